"""Print what the commands share: errors, stages, tables and JSON.

Invariant: bad input is one line on standard error and exit status 2. Results go to standard output,
stages go to standard error.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import cast

import attrs
import typer
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvspec.analysis.explanation import sizes
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import KVSpecError, MismatchError
from kvspec.ownership.parallel import RankId
from kvspec.ownership.stripes import Stripe

# Exit statuses: a check failed, the input is invalid, and Ctrl-C (128 + SIGINT).
WRONG, REFUSED, INTERRUPTED = 1, 2, 130
# Rows of a table that are printed. ``--json`` has all of them.
MAX_ROWS = 48


@contextmanager
def reported_errors() -> Iterator[None]:
    """Report a `KVSpecError` in one line with exit status 2, and Ctrl-C with exit status 130."""
    try:
        yield
    except KVSpecError as error:
        message = (
            "the engines do not fit together: " + "; ".join(map(str, error.mismatches))
            if isinstance(error, MismatchError)
            else str(error)
        )
        sys.stderr.write(f"kvspec: {' '.join(message.split())}\n")
        raise typer.Exit(REFUSED) from None
    except KeyboardInterrupt:
        sys.stderr.write("kvspec: interrupted\n")
        raise typer.Exit(INTERRUPTED) from None


def output() -> Console:
    """Return the console for results.

    It ignores markup, because a name such as ``[red]`` would otherwise change the output.
    """
    return Console(markup=False, highlight=False, emoji=False)


def show_stages() -> None:
    """Print what kvspec begins to do on standard error, one line each, if that is a terminal."""
    if sys.stderr.isatty():
        logging.basicConfig(format="%(message)s")
        logging.getLogger("kvspec").setLevel(logging.INFO)


def heading(console: Console, model: str, producer: EngineSpec, consumer: EngineSpec) -> None:
    """Print the model with its groups, and both engines."""
    groups = ", ".join(map(_group, producer.groups))
    console.print(Text.assemble((model, "bold"), f"  {groups}"), soft_wrap=True)
    engines = f"{_engine(producer)} -> {_engine(consumer)}"
    console.print(Text(engines, "bold"), soft_wrap=True)


def _engine(spec: EngineSpec) -> str:
    # Only groups with tokens have blocks. A recurrent state has one slot for each request.
    blocks = {g.spec.block_size for g in spec.groups if g.spec.parts[0].per_token}
    tokens = f", blocks of {' and '.join(map(str, sorted(blocks)))}" if blocks else ""
    return f"{sizes(spec.parallel)}{tokens}, {spec.layout}"


def _group(group: KVCacheGroup) -> str:
    by_heads: dict[int, list[str]] = {}
    for part in group.spec.of_layer(group.layers[0]).parts:
        by_heads.setdefault(part.units // part.granularity, []).append(part.name)
    heads = "; ".join(f"{'+'.join(names)} {count}" for count, names in by_heads.items())
    return f"{len(group.layers)} {group.name} layers (heads: {heads})"


def rank_name(rank: RankId, *, stages: bool) -> str:
    """Return the name of a rank. With *stages*, the first stage has a name too.

    >>> rank_name(RankId(tp=1), stages=True), rank_name(RankId(tp=1), stages=False)
    ('pp0.tp1', 'tp1')
    """
    return f"pp0.{rank}" if stages and not rank.pp else str(rank)


def table(
    names: Iterable[str], rows: Iterable[Iterable[str | Text]], numbers: Collection[str] = ()
) -> Table:
    """Return a table. The columns in *numbers* are right-aligned, and an empty row is a line."""
    result = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        result.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for cells in map(tuple, rows):
        if cells:
            result.add_row(*cells)
        else:
            result.add_section()
    return result


def pairs(
    console: Console, names: Iterable[str], rows: Sequence[Iterable[str]], numbers: Collection[str]
) -> None:
    """Print a table with one row for each pair of ranks, and the number of rows left out."""
    console.print(table(names, rows[:MAX_ROWS], numbers))
    if rows[MAX_ROWS:]:
        console.print(f"and {len(rows) - MAX_ROWS} more pairs, see --json")


def as_json(value: object) -> None:
    """Print *value* as JSON. Ranks become names, ranges and stripes become two numbers."""
    typer.echo(json.dumps(value, indent=1, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, RankId):
        return str(value)
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Stripe):
        return [value.first, value.step]
    return attrs.asdict(cast("attrs.AttrsInstance", value), recurse=False)
