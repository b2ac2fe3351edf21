"""Implement `kvspec vectors`: write test vectors for other languages, or check them."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import typer

from kvspec.cli import printing
from kvspec.vectors import files
from kvspec.vectors.families import FAMILIES


def vectors(
    folder: str = typer.Argument(metavar="FOLDER", help="Folder of the files."),
    family: list[str] = typer.Option(
        [],
        help=f"Families to write, or to check. Default: all of {', '.join(FAMILIES)}.",
    ),
    large: bool = typer.Option(False, "--large", help="Write every combination, or check it."),
    check: bool = typer.Option(
        False, "--check", help="Read the files and compare each vector with a new one."
    ),
) -> None:
    """Write test vectors as JSON, or check the files of a folder.

    Each vector is a transfer with its right slices and copies.
    The byte oracle has confirmed each of them.
    Exit status 0: done. 1: a vector is wrong, or a family has no file.
    2: a file is damaged or has another version.
    """
    with printing.reported_errors():
        if check:
            _check(Path(folder), family or tuple(FAMILIES), large=large)
            return
        for path, count in files.write(Path(folder), family or tuple(FAMILIES), large=large):
            typer.echo(f"{path.name}: {count:,} vectors, {path.stat().st_size:,} bytes")


# A file of another set lacks hundreds of vectors.
_MOST_NAMES = 20


def _check(folder: Path, families: Collection[str], *, large: bool) -> None:
    """Print the result of each file. Exit with status 1 if a vector is wrong, or a file missing."""
    found = 0
    missing = dict.fromkeys(families)
    for checked in files.check(folder, large=large):
        missing.pop(checked.family, None)
        found += len(checked.wrong)
        names = ", ".join(checked.wrong[:_MOST_NAMES])
        more = len(checked.wrong) - _MOST_NAMES
        names += f" and {more:,} more" if more > 0 else ""
        state = f"WRONG: {names}" if checked.wrong else "right"
        typer.echo(f"{checked.family}: {checked.vectors:,} vectors, {state}")
    for family in missing:
        typer.echo(f"{family}: MISSING, no file has these vectors")
    if found or missing:
        raise typer.Exit(printing.WRONG)
