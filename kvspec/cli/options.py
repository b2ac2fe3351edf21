"""Share code between the commands: options, engines from words, error lines, tables and JSON.

Invariant: bad input is one line on standard error and exit status 2. Results go to standard output,
progress goes to standard error.

How it works:
    An engine is described by a model and by *words* such as ``tp=4,pp=2,block=32,layout=NHD``.
    `KEYS` maps each key to its field in `ParallelConfig`, in the groups or in `EngineSpec`. A key
    that is missing has the value in `DEFAULTS`. A key that occurs twice is an error. An error names
    the side too: ``producer.tp='two': expected a whole number``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import attrs
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from rich.text import Text

from kvspec import models
from kvspec.analysis.explanation import sizes
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import KVSpecError, MismatchError, SpecError
from kvspec.inputs import MOST
from kvspec.models import catalogue
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.replicas import POLICIES, ReplicaPolicy, ReplicaPolicyName, Topology
from kvspec.ownership.stripes import Stripe

# Exit statuses: a check failed, the input is invalid, and Ctrl-C (128 + SIGINT).
WRONG, REFUSED, INTERRUPTED = 1, 2, 130
# Rows of a table that are printed. ``--json`` has all of them.
MAX_ROWS = 48
_BLOCK = 16

# Keys of the words that describe one engine, and the fields that they set.
KEYS = {
    "tp": "tp_size",
    "pp": "pp_size",
    "dcp": "dcp_size",
    "pcp": "pcp_size",
    "interleave": "interleave_size",
    "block": "block_size",
    "kernel": "kernel_block_size",
    "layout": "layout",
}
# The fields of each engine that its words do not set. The sizes and the layouts differ, so that
# the commands without options show more than a copy.
DEFAULTS: dict[str, dict[str, int | str]] = {
    "producer": {"tp_size": 2, "layout": "LBNHC"},
    "consumer": {"tp_size": 3, "layout": "LBHNC"},
}

# Options of one panel of the help text.
engine_option = partial(typer.Option, rich_help_panel="The two engines")
request_option = partial(typer.Option, rich_help_panel="The requests")

# Options of several commands.
MODEL = typer.Option(
    catalogue.DEFAULT, help="Name of a model in the catalogue, or path of a config.json."
)
PRODUCER, CONSUMER = (
    engine_option(
        "",
        metavar="KEY=VALUE,…",
        help=f"Sizes and layout of the {side}, such as tp=4,pp=2,block=32,layout=NHD. "
        f"Keys: {', '.join(KEYS)}. Default: tp={fields['tp_size']},layout={fields['layout']}.",
    )
    for side, fields in DEFAULTS.items()
)
REPLICA_POLICY = engine_option(
    "spread",
    metavar="|".join(POLICIES),
    help="How to choose among producer ranks that hold the same data.",
)
RANKS_PER_NODE = typer.Option(
    None,
    help="Number of ranks of each engine on one node. Required by the policy "
    + ", ".join(name for name, policy in POLICIES.items() if policy.needs_topology)
    + ".",
)
AS_JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")


def model_groups(model: str, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model, by its name in the catalogue or the path of its config."""
    if Path(model).exists() or model.endswith(".json"):
        return models.from_config(model, block_size=block_size)
    return models.from_config(catalogue.config(model), block_size=block_size)


def engine_words(side: str, words: str) -> dict[str, int | str]:
    """Return the fields of one *side*: those that *words* set, and the defaults.

    >>> engine_words("producer", "tp=4,pp=2")
    {'tp_size': 4, 'layout': 'LBNHC', 'pp_size': 2}
    """
    fields, seen = dict(DEFAULTS[side]), set[str]()
    for word in filter(None, (word.strip() for word in words.split(","))):
        key, _, value = word.partition("=")
        if key not in KEYS or not value:
            raise SpecError(side, word, f"key=value with one of the keys {', '.join(KEYS)}")
        if key in seen:
            raise SpecError(f"{side}.{key}", value, rule="each key may be set only once")
        seen.add(key)
        fields[KEYS[key]] = value if key == "layout" else _whole(f"{side}.{key}", value)
    return fields


def _whole(field: str, word: str) -> int:
    """Convert a word of ASCII digits to an int."""
    # `int` would also accept signs, underscores and digits of other scripts.
    if not word.isascii() or not word.isdecimal():
        raise SpecError(field, word, "a whole number")
    # Python refuses to convert more than 4,300 digits, with an error that names no field.
    if len(word) > len(str(MOST)):
        raise SpecError(field, word, f"a whole number of at most {len(str(MOST))} digits")
    return int(word)


def engine_pair(model: str, producer: str, consumer: str) -> tuple[EngineSpec, EngineSpec]:
    """Return the two engines that the options of a command describe."""
    return engine("producer", model, producer), engine("consumer", model, consumer)


def engine(side: str, model: str, words: str) -> EngineSpec:
    """Return an engine that serves *model*, described by *words*. Errors name the *side*.

    >>> engine("producer", "Qwen3-0.6B", "tp=4,pp=2").parallel.tp_size
    4
    """
    parallel: dict[str, Any] = engine_words(side, words)
    block_size, layout = parallel.pop("block_size", _BLOCK), parallel.pop("layout")
    kernel = parallel.pop("kernel_block_size", None)
    try:
        groups = model_groups(model, block_size)
        if kernel is not None:
            groups = tuple(_cut_finer(group, kernel) for group in groups)
        return EngineSpec(groups=groups, parallel=ParallelConfig(**parallel), layout=layout)
    except SpecError as error:
        # If the model itself is invalid, this raises an error that names no side.
        model_groups(model, _BLOCK)
        field = f"{side}.{error.field}"
        raise SpecError(field, error.value, error.expected, rule=error.rule) from None


def _cut_finer(group: KVCacheGroup, kernel: int) -> KVCacheGroup:
    """Return *group* with kernel blocks of *kernel* tokens. Recurrent states have no tokens."""
    if not all(part.per_token for part in group.spec.parts):
        return group
    return attrs.evolve(group, kernel_block_size=kernel)


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


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """Show a progress bar on a terminal, until the block ends.

    Yields:
        Function that receives what is going on, how much of it is done, and how much there is.
    """
    console = Console(stderr=True)
    columns = TextColumn("{task.description:8}"), BarColumn(bar_width=30), MofNCompleteColumn()
    with Progress(
        *columns,
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not console.is_terminal,
    ) as bar:
        task = bar.add_task("start")
        yield lambda what, done, total: bar.update(
            task, description=what, completed=done, total=total
        )


def replica_policy_of(
    name: str, ranks_per_node: int | None, engines: tuple[EngineSpec, EngineSpec]
) -> ReplicaPolicy:
    """Return the replica policy of the options ``--replica-policy`` and ``--ranks-per-node``."""
    topology = None
    if ranks_per_node is not None:
        producer, consumer = engines
        topology = Topology.packed(producer.parallel, consumer.parallel, ranks_per_node)
    elif name in POLICIES and POLICIES[name].needs_topology:
        rule = f"--replica-policy {name} needs --ranks-per-node"
        raise SpecError("ranks_per_node", None, rule=rule)
    return ReplicaPolicy(cast("ReplicaPolicyName", name), topology=topology)


def print_heading(console: Console, model: str, producer: EngineSpec, consumer: EngineSpec) -> None:
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
    by_units: dict[int, list[str]] = {}
    for part in group.spec.of_layer(group.layers[0]).parts:
        by_units.setdefault(part.units // part.granularity, []).append(part.name)
    units = "; ".join(f"{'+'.join(names)} {count}" for count, names in by_units.items())
    return f"{len(group.layers)} {group.name} layers (units: {units})"


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


def print_json(value: object) -> None:
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
