"""Implement `kvspec calibrate`: measure the cost of transfers on this machine and save it.

A rank with a staging buffer reads the saved file when it starts.
"""

from __future__ import annotations

from pathlib import Path

import typer

from kvspec.cli.options import output, progress_bar, reported_errors, table
from kvspec.errors import nbytes
from kvspec.nixl.calibration import save, writable
from kvspec.nixl.costs import FIGURES
from kvspec.run.measure import fitted, measure, probes


def calibrate(
    to: Path | None = typer.Option(
        None,
        help="File to write. Default: $KVSPEC_CALIBRATION, or a file in your cache directory.",
    ),
    tries: int = typer.Option(
        7, min=1, help="Number of times that each transfer is measured. The fastest counts."
    ),
    megabytes: int = typer.Option(16, min=1, max=1024, help="Size of the largest transfer in MiB."),
    dry: bool = typer.Option(False, "--dry", help="Measure, but write no file."),
) -> None:
    """Measure the cost of transfers between two processes of this machine, and save it.

    A rank with a staging buffer uses these costs to decide what to stage.
    Run this command on an idle machine, with the environment of the engines
    (`UCX_TLS`, `UCX_NET_DEVICES`).
    """
    requests = tuple(probes(megabytes << 20))
    with reported_errors():
        # Measuring takes minutes, so check first that the result can be saved.
        path = None if dry else writable(to)
        with progress_bar() as bar:
            task = bar.add_task("requests", total=len(requests))
            samples = measure(requests, tries, lambda done: bar.update(task, advance=done))
        costs = fitted(samples)
        written = None if path is None else save(costs, path)
    rows = [
        (
            nbytes(staged.permuted / staged.runs),
            nbytes(staged.permuted),
            *(f"{1e3 * sample.seconds:.2f}" for sample in (direct, staged)),
            *(f"{1e3 * sample.expected(costs):.2f}" for sample in (direct, staged)),
        )
        for direct, staged, *_ in samples
    ]
    measured = "direct, ms", "staged, ms"
    columns = ("mean run", "bytes", *measured, *(f"fitted {name}" for name in measured))
    console = output()
    console.print(table(columns, rows))
    for name in FIGURES:
        console.print(f"{name}: {readable_seconds(getattr(costs, name))}", highlight=False)
    console.print("nothing written" if written is None else f"written to {written}", soft_wrap=True)


def readable_seconds(seconds: float) -> str:
    """Return *seconds* in a unit that gives a short number.

    >>> readable_seconds(3.1e-6), readable_seconds(1.2e-10), readable_seconds(0)
    ('3.1 us', '0.12 ns', '0 s')
    """
    # The smallest unit is shown as ns too: no cost is printed in ps.
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ns", 1e-12)):
        if seconds >= size:
            return f"{seconds / max(size, 1e-9):.3g} {unit}"
    return "0 s"
