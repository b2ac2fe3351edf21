"""Read the options that the commands share, such as the engines.

How it works:
    An engine is described by a model and by *words* such as ``tp=4,pp=2,block=32,layout=NHD``.
    `KEYS` maps each key to its field in `ParallelConfig`, in the groups or in `EngineSpec`. A key
    that is missing has the value in `DEFAULTS`. A key that occurs twice is an error. An error names
    the side too: ``producer.tp='two': expected a whole number …``.
"""

from __future__ import annotations

import os
import re
from functools import partial
from typing import Any, cast

import attrs
import typer

from kvspec import models
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import MOST
from kvspec.models import catalogue
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.replicas import POLICIES, ReplicaPolicy, ReplicaPolicyName, Topology

_BLOCK = 16
_DTYPE = "bfloat16"  # It suits each model, so an error with it is an error of the model.
Model = str | dict[str, object]
"""A model: its name in the catalogue, the path of its config, or the config itself."""

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
    "dtype": "dtype",
}
_TEXT_KEYS = {"layout", "dtype"}
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
PRODUCER_OPTION, CONSUMER_OPTION = (
    engine_option(
        "",
        metavar="KEY=VALUE,…",
        help=f"Sizes, layout and dtype of the {side}, such as tp=4,pp=2,block=32,layout=NHD. "
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


def known_model(model: str) -> str:
    """Return the model that *model* names. One that only resembles a name is printed.

    A model of the catalogue is meant if it is the only one whose name has all words of *model*, in
    the same order.

    Raises:
        SpecError: If several models have these words. It names them.

    >>> known_model("Qwen3-0.6B"), known_model("falcon-mamba")
    ('Qwen3-0.6B', 'falcon-mamba-7b')
    """
    if os.path.exists(model) or model.endswith(".json"):  # noqa: PTH110 - no error for any name
        return model
    words = _words(model)
    found = [name for name in catalogue.names() if words and _occur(words, _words(name))]
    exact = {
        each.casefold() for name in catalogue.names() for each in (name, catalogue.repository(name))
    }
    if model.casefold() in exact or not found:
        return model  # If the catalogue does not have it, its error suggests similar names.
    if len(found) > 1:
        rule = f"several models have these words: {', '.join(found)}"
        raise SpecError("model", model, rule=rule)
    typer.echo(
        f"{model!r} is not in the catalogue, {found[0]} is: the plan is that of {found[0]}",
        err=True,
    )
    return found[0]


def _words(name: str) -> list[str]:
    return re.findall("[a-z]+|[0-9]+[a-z]*", name.rpartition("/")[2].casefold())


def _occur(words: list[str], name: list[str]) -> bool:
    """Whether all *words* occur in *name* in this order."""
    rest = iter(name)
    return all(word in rest for word in words)


def model_groups(
    model: Model, block_size: int, dtype: str | None = None
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model, with caches of *dtype* or of the config's own."""
    if isinstance(model, str) and not os.path.exists(model) and not model.endswith(".json"):  # noqa: PTH110 - no error for any name
        model = catalogue.config(model)
    return models.from_config(model, block_size=block_size, dtype=dtype)


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
        fields[KEYS[key]] = value if key in _TEXT_KEYS else whole(f"{side}.{key}", value)
    return fields


def whole(field: str, word: str, most: int = MOST) -> int:
    """Convert a word of ASCII digits to an int of at most *most*."""
    # `int` would also accept signs, underscores and digits of other scripts. Python refuses to
    # convert more than 4,300 digits, with an error that names no field.
    if word.isascii() and word.isdecimal() and len(word) <= len(str(most)) and int(word) <= most:
        return int(word)
    raise SpecError(field, word, f"a whole number of at most {most}")


def engine_pair(model: str, producer: str, consumer: str) -> tuple[EngineSpec, EngineSpec]:
    """Return the two engines that the options of a command describe."""
    return engine("producer", model, producer), engine("consumer", model, consumer)


def engine(side: str, model: Model, words: str) -> EngineSpec:
    """Return an engine that serves *model*, described by *words*. Errors name the *side*.

    >>> engine("producer", "Qwen3-0.6B", "tp=4,pp=2").parallel.tp_size
    4
    """
    parallel: dict[str, Any] = engine_words(side, words)
    block_size, layout = parallel.pop("block_size", _BLOCK), parallel.pop("layout")
    kernel, dtype = parallel.pop("kernel_block_size", None), parallel.pop("dtype", None)
    try:
        groups = model_groups(model, block_size, dtype)
        if kernel is not None:
            groups = tuple(_cut_finer(group, kernel) for group in groups)
        return EngineSpec(groups=groups, parallel=ParallelConfig(**parallel), layout=layout)
    except SpecError as error:
        # If the model itself is invalid, this raises an error that names no side.
        model_groups(model, _BLOCK, _DTYPE)
        field = f"{side}.{error.field}"
        raise SpecError(field, error.value, error.expected, rule=error.rule) from None


def _cut_finer(group: KVCacheGroup, kernel: int) -> KVCacheGroup:
    """Return *group* with kernel blocks of *kernel* tokens. States and rings have none."""
    if group.spec.is_ring or not all(part.per_token for part in group.spec.parts):
        return group
    return attrs.evolve(group, kernel_block_size=kernel)


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
