"""What the commands have in common: models and engines from words, refusals, and the consoles.

Law: words become engines here and nowhere else. Bad input is one line on standard error and exit
status 2; results go to standard output, progress to standard error.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import attrs
import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from kvspec import models
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import KVSpecError, MismatchError, SpecError
from kvspec.inputs import MOST
from kvspec.models import catalogue
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.replicas import POLICIES, ReplicaPolicy, ReplicaPolicyName, Topology
from kvspec.ownership.stripes import Stripe

if TYPE_CHECKING:
    from rich.text import Text

WRONG, REFUSED, INTERRUPTED = 1, 2, 130
"""Exit statuses: a check failed; the input is bad; Ctrl-C (128 + SIGINT)."""
_BLOCK = 16
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
"""What the words of one engine may set, such as ``tp=4,pp=2,block=16,layout=LBNHC``."""
POLICY_NAMES = "|".join(POLICIES)
"""What ``--replica-policy`` takes."""

of_engines = partial(typer.Option, rich_help_panel="The two engines")
of_requests = partial(typer.Option, rich_help_panel="The requests")
in_words = partial(of_engines, metavar="KEY=VALUE,…")
"""Options in panels of their own; of one engine in words."""
MODEL = typer.Option(
    catalogue.DEFAULT, help="A model of the catalogue, or the path of a config.json."
)
REPLICA_POLICY = of_engines(
    "spread", metavar=POLICY_NAMES, help="Which of several equal producer ranks is read."
)
RANKS_PER_NODE = typer.Option(
    None,
    help="Both engines fill the same nodes with this many ranks each; needed for "
    + ", ".join(name for name, policy in POLICIES.items() if policy.topology)
    + ".",
)
AS_JSON = typer.Option(False, "--json", help="Print JSON instead of tables.")
"""Options of several commands."""


def model_groups(model: str, block_size: int) -> tuple[KVCacheGroup, ...]:
    """Return the groups of *model*: a name of the catalogue, or the path of a ``config.json``."""
    if Path(model).exists() or model.endswith(".json"):
        return models.from_config(model, block_size=block_size)
    return models.from_config(catalogue.config(model), block_size=block_size)


def engine_words(side: str, words: str, **defaults: int | str) -> dict[str, int | str]:
    """Return the sizes and the layout of *side*: *defaults*, changed by ``key=value,…`` *words*."""
    sizes, seen = dict(defaults), set[str]()
    for word in filter(None, (word.strip() for word in words.split(","))):
        key, _, value = word.partition("=")
        if key not in KEYS or not value:
            raise SpecError(side, word, f"key=value, with a key of {', '.join(KEYS)}")
        if key in seen:
            raise SpecError(f"{side}.{key}", value, "each key once")
        seen.add(key)
        if key == "layout":
            sizes["layout"] = value
        else:
            sizes[KEYS[key]] = _whole(f"{side}.{key}", value)
    return sizes


def _whole(field: str, word: str) -> int:
    """Return the number that a word of ASCII digits is."""
    if not word.isascii() or not word.isdecimal():
        raise SpecError(field, word, "a whole number")
    if len(word) > len(str(MOST)):
        raise SpecError(field, word, f"a whole number of at most {len(str(MOST))} digits")
    return int(word)


def engine(side: str, model: str, words: str, **defaults: int | str) -> EngineSpec:
    """Return the engine that serves *model* as *words* say; errors name its *side*."""
    given: dict[str, Any] = engine_words(side, words, **defaults)
    block_size, layout = given.pop("block_size", _BLOCK), given.pop("layout", "LBHNC")
    kernel = given.pop("kernel_block_size", None)
    try:
        groups = model_groups(model, block_size)
        if kernel is not None:
            groups = tuple(_cut_finer(group, kernel) for group in groups)
        return EngineSpec(groups=groups, parallel=ParallelConfig(**given), layout=layout)
    except SpecError as error:
        model_groups(model, _BLOCK)  # raises what is wrong with the model, which is no side's
        raise SpecError(f"{side}.{error.field}", error.value, error.expected) from None


def _cut_finer(group: KVCacheGroup, kernel: int) -> KVCacheGroup:
    """Return *group* with the kernel's blocks, unless its rows are no tokens."""
    if not all(part.per_token for part in group.spec.parts):
        return group
    return attrs.evolve(group, kernel_block_size=kernel)


@contextmanager
def refusals() -> Iterator[None]:
    """Turn a refusal into one line and exit status 2, an interrupt into status 130."""
    try:
        yield
    except KVSpecError as error:
        words = (
            "the engines do not fit: " + "; ".join(map(str, error.mismatches))
            if isinstance(error, MismatchError)
            else str(error)
        )
        sys.stderr.write(f"kvspec: {' '.join(words.split())}\n")
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


def replica_policy_of(
    replica_policy: str,
    ranks_per_node: int | None,
    producer: ParallelConfig,
    consumer: ParallelConfig,
) -> ReplicaPolicy:
    """Return the replica policy that the options ask for."""
    topology = topology_of((replica_policy,), ranks_per_node, producer, consumer)
    return ReplicaPolicy(cast("ReplicaPolicyName", replica_policy), topology=topology)


def topology_of(
    replica_policy: Iterable[str],
    ranks_per_node: int | None,
    producer: ParallelConfig,
    consumer: ParallelConfig,
) -> Topology | None:
    """Return the nodes that ``--ranks-per-node`` means.

    Which some policies of *replica_policy* need.
    """
    if ranks_per_node is None:
        for name in replica_policy:
            if name in POLICIES and POLICIES[name].topology:
                wanted = (
                    f"--ranks-per-node, since --replica-policy {name} asks who is on which node"
                )
                raise SpecError("ranks_per_node", None, wanted)
        return None
    return Topology.packed(producer, consumer, ranks_per_node)


def table(
    names: Iterable[str], rows: Iterable[Iterable[str | Text]], numbers: Collection[str] = ()
) -> Table:
    """Return a table of *rows*, the columns of *numbers* to the right; an empty row is a rule."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in names:
        made.add_column(name, justify="right" if name in numbers else "left", overflow="fold")
    for cells in map(tuple, rows):
        if cells:
            made.add_row(*cells)
        else:
            made.add_section()
    return made


def print_json(value: object) -> None:
    """Print *value* as JSON: ranks by their names, ranges and stripes as two numbers."""
    typer.echo(json.dumps(value, indent=1, default=_plain))


def _plain(value: object) -> object:
    if isinstance(value, RankId):
        return str(value)
    if isinstance(value, range):
        return [value.start, value.stop]
    if isinstance(value, Stripe):
        return [value.first, value.step]
    return attrs.asdict(cast("attrs.AttrsInstance", value), recurse=False)
