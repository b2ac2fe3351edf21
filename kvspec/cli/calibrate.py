"""`kvspec calibrate`: what transfers cost on this machine, kept where ranks look for it."""

from __future__ import annotations

from pathlib import Path

import typer

from kvspec.cli.options import output, progress_bar, refusals, table
from kvspec.errors import nbytes
from kvspec.nixl.calibration import save, writable
from kvspec.nixl.costs import FIGURES
from kvspec.run.measure import fitted, measure, probes


def calibrate(
    to: Path | None = typer.Option(
        None, help="The file to write; $KVSPEC_CALIBRATION, or one in your cache directory."
    ),
    tries: int = typer.Option(7, min=1, help="How often each transfer is tried; the least counts."),
    megabytes: int = typer.Option(16, min=1, max=1024, help="MiB of the largest transfer."),
    dry: bool = typer.Option(False, "--dry", help="Write no file."),
) -> None:
    """Measure transfers between two processes of this machine, and keep what they cost.

    A rank with a staging buffer chooses by these figures. Measure on a machine that does nothing
    else, with the environment (`UCX_TLS`, `UCX_NET_DEVICES`) that the engines will have.
    """
    wanted = tuple(probes(megabytes << 20))
    with refusals():
        place = None if dry else writable(to)  # before minutes are spent on what cannot be kept
        with progress_bar() as bar:
            task = bar.add_task("requests", total=len(wanted))
            samples = measure(wanted, tries, lambda done: bar.update(task, advance=done))
        costs = fitted(samples)
        written = None if place is None else save(costs, place)
    rows = [
        (
            nbytes(staged.permuted / staged.runs),
            nbytes(staged.permuted),
            *(f"{1e3 * one.seconds:.2f}" for one in (direct, staged)),
            *(f"{1e3 * one.expected(costs):.2f}" for one in (direct, staged)),
        )
        for direct, staged, *_ in samples
    ]
    columns = ("mean run", "bytes", "direct, ms", "staged, ms", "fitted", "fitted")
    console = output()
    console.print(table(columns, rows))
    for name in FIGURES:
        console.print(f"{name}: {told(getattr(costs, name))}", highlight=False)
    console.print("nothing written" if written is None else f"written to {written}", soft_wrap=True)


def told(seconds: float) -> str:
    """Return *seconds* in the unit that reads best.

    >>> told(3.1e-6), told(1.2e-10), told(0)
    ('3.1 us', '0.12 ns', '0 s')
    """
    for unit, size in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6), ("ns", 1e-9), ("ns", 1e-12)):
        if seconds >= size:
            return f"{seconds / max(size, 1e-9):.3g} {unit}"
    return "0 s"
