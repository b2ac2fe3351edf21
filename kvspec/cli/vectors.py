"""Implement `kvspec vectors`: write test vectors for other languages, or check them."""

from __future__ import annotations

from pathlib import Path

import typer

from kvspec.cli import printing
from kvspec.vectors import files
from kvspec.vectors.families import FAMILIES


def vectors(
    folder: str = typer.Argument(metavar="FOLDER", help="Folder of the files."),
    family: list[str] = typer.Option(
        [], help=f"Families to write. Default: all of {', '.join(FAMILIES)}."
    ),
    large: bool = typer.Option(False, "--large", help="Write every combination."),
    check: bool = typer.Option(
        False, "--check", help="Read the files and compare each vector with a new one."
    ),
) -> None:
    """Write test vectors as JSON, or check the files of a folder.

    Each vector is a transfer with its right slices and copies.
    The byte oracle has confirmed each of them.
    Exit status 0: done. 1: a vector is wrong. 2: a file is damaged or has another version.
    """
    with printing.reported_errors():
        if check:
            _check(Path(folder))
            return
        for path, count in files.write(Path(folder), family or tuple(FAMILIES), large=large):
            typer.echo(f"{path.name}: {count:,} vectors, {path.stat().st_size:,} bytes")


def _check(folder: Path) -> None:
    """Print the result of each file. Exit with status 1 if a vector is wrong."""
    found = 0
    for checked in files.check(folder):
        found += len(checked.wrong)
        state = f"WRONG: {', '.join(checked.wrong)}" if checked.wrong else "right"
        typer.echo(f"{checked.family}: {checked.vectors:,} vectors, {state}")
    if found:
        raise typer.Exit(printing.WRONG)
