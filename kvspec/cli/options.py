"""What the commands have in common: models and engines from words, refusals, and the consoles.

Law: words become engines here and nowhere else. Bad input is one line on standard error and exit
status 2; results go to standard output, progress to standard error.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from kvspec import catalogue, models
from kvspec.cli import INTERRUPTED
from kvspec.engine import EngineSpec, KVCacheGroup
from kvspec.errors import KVSpecError, MismatchError, SpecError
from kvspec.parallel import ParallelConfig

WRONG, REFUSED = 1, 2
"""Exit statuses: what was checked is wrong; the input is bad."""


def model_groups(model: str, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Return the groups of *model*: a name of the catalogue, or the path of a ``config.json``."""
    if Path(model).exists() or model.endswith(".json"):
        return models.from_config(model, block_size=block_size)
    return models.from_config(catalogue.config(model), block_size=block_size)


def engine(side: str, groups: tuple[KVCacheGroup, ...], *, tp_size: int, layout: str) -> EngineSpec:
    """Return the engine that serves *groups* at *tp_size* in *layout*; errors name its *side*."""
    try:
        return EngineSpec(groups=groups, parallel=ParallelConfig(tp_size=tp_size), layout=layout)
    except SpecError as error:
        raise SpecError(f"{side} {error.field}", error.value, error.wanted) from None


@contextmanager
def refusals() -> Iterator[None]:
    """Turn an error of ours into one line and exit status 2, an interrupt into status 130."""
    try:
        yield
    except KVSpecError as error:
        told = (
            "the engines do not fit: " + "; ".join(map(str, error.mismatches))
            if isinstance(error, MismatchError)
            else str(error)
        )
        sys.stderr.write(f"kvspec: {' '.join(told.split())}\n")
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        sys.stderr.write("kvspec: interrupted\n")
        raise typer.Exit(INTERRUPTED) from None


def output() -> Console:
    """Return the console for results: no markup is read, so that any name can be printed."""
    return Console(markup=False, highlight=False, emoji=False)


def progress_bar() -> Progress:
    """Return a bar that shows itself on a terminal, on standard error, and then goes away."""
    console = Console(stderr=True)
    return Progress(
        TextColumn("{task.description}", justify="left"),
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    )
