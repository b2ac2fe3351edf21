"""Implement `kvspec calibrate`: measure below which length of runs this machine should stage."""

from __future__ import annotations

import typer

from kvspec.cli import printing
from kvspec.errors import nbytes
from kvspec.run.measure import measure, probes, threshold


def calibrate(
    tries: int = typer.Option(
        7, min=1, help="Number of times that each transfer is measured. The fastest counts."
    ),
    megabytes: int = typer.Option(16, min=1, max=1024, help="Size of the largest transfer in MiB."),
) -> None:
    """Measure transfers between two processes of this machine, directly and staged.

    The last line is the threshold for `kvspec.nixl.Staging(stage_below=...)`: transfers with
    shorter runs are faster through a staging buffer.
    Run this command on an idle machine, with the environment of the engines
    (`UCX_TLS`, `UCX_NET_DEVICES`).
    """
    printing.show_stages()
    with printing.reported_errors():
        samples = measure(tuple(probes(megabytes << 20)), tries)
    rows = [
        (
            nbytes(sample.mean),
            nbytes(sample.nbytes),
            *(f"{1e3 * seconds:.2f}" for seconds in (sample.direct, sample.staged)),
        )
        for sample in samples
    ]
    console = printing.output()
    console.print(printing.table(("mean run", "bytes", "direct, ms", "staged, ms"), rows))
    console.print(f"stage_below: {threshold(samples)}", highlight=False)
