"""The law of refusals: what cannot be moved is refused by name, before a byte of it moves.

Each wrong case is a right one with one thing changed, so that the two sides mean other bytes, or
something live has nowhere to come from or to go to. A system refuses by raising before it names a
copy; a crash is no refusal.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import permutations
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.descriptors.request import BlockTable
from kvspec.errors import KVSpecError
from kvspec.testing.carve import count_kernel_blocks, rank_units
from kvspec.testing.laws.owners import home, targets
from kvspec.testing.laws.system import Trial
from kvspec.testing.positions import cached_tokens_of, context_of, live_positions, rows_of

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case

_DTYPES = {"uint8": "int8", "bfloat16": "float16", "float8_e4m3fn": "float8_e5m2"}
"""Other element types of the same size."""


def of_models(trial: Trial) -> Iterator[str]:
    """Yield each producer of another model that is not refused, or not by the name of the field."""
    for name, what, wrong in _other_models(trial.case):
        yield from _accepted(name, what, Trial(trial.system, wrong))


def of_requests(trial: Trial) -> Iterator[str]:
    """Yield each impossible request that is not refused, or not by the name of the group."""
    if not any(trial.system.ways()):
        return
    for name, what, change in (*_wrong_requests(trial.case), *_shared_blocks(trial.case)):
        wrong = attrs.evolve(trial.case.request, **change)
        yield from _accepted(name, what, trial.asking(wrong))


def _accepted(name: str, what: str, wrong: Trial) -> Iterator[str]:
    """Yield a fault unless the system refuses what is *wrong*, by its *name*, before it copies."""
    try:
        wrong.moves("consumer")
        for _, _ in wrong.copies():
            pass
    except (KVSpecError, ValueError) as error:
        if name not in str(error):
            yield f"{what}: refused without saying {name!r}: {error}"
    else:
        yield f"{what}: not refused"


def _other_models(case: Case) -> Iterator[tuple[str, str, Case]]:
    """Yield (field, change, case) of producers with another model: their bytes mean others."""
    moving = {target.layer for target in targets(case.consumer, case.producer)}
    for group in case.producer.groups:
        spec: Any = group.spec
        if moving.isdisjoint(group.layers) or spec.layers or not hasattr(spec, "head_size"):
            continue
        changes = {"dtype": _DTYPES.get(spec.dtype)}
        readers = [
            each.spec for each in case.consumer.groups if set(each.layers) & set(group.layers)
        ]
        if all(hasattr(each, "sliding_window") for each in (spec, *readers)):
            changes["sliding_window"] = spec.sliding_window + 1
        for field, value in changes.items():
            if value is not None:
                other = attrs.evolve(group, spec=attrs.evolve(spec, **{field: value}))
                what = f"the producer's {group.layers[0]}.{field}={value!r}"
                yield field, what, attrs.evolve(case, producer=_with(case.producer, other))
        return


def _with(engine: EngineSpec, group: Any) -> EngineSpec:  # noqa: ANN401
    groups = tuple(group if each.name == group.name else each for each in engine.groups)
    return attrs.evolve(engine, groups=groups)


def _wrong_requests(case: Case) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (group, change, fields) of requests that leave something live no place."""
    request = case.request
    for group, live in _live_blocks(case).items():
        ids = request.consumer_blocks[group].block_ids.tolist()
        first = request.consumer_blocks[group].first_token
        homes = {
            each.name
            for each in case.producer.groups
            if set(each.layers) & set(case.consumer.group(group).layers)
        }
        others = case.consumer_pool[group], -1, *live[1:2]
        changed = ([other if each == live[0] else each for each in ids] for other in others)
        none: list[int] = []
        for table in (none, *changed):
            blocks = {**request.consumer_blocks, group: BlockTable(table, first)}
            yield group, f"consumer_blocks[{group!r}]={table}", {"consumer_blocks": blocks}
        if len(homes) == 1:
            (home,) = homes
            tables = {**request.producer_blocks, home: BlockTable(none)}
            yield home, f"producer_blocks[{home!r}]=[]", {"producer_blocks": tables}


def _shared_blocks(case: Case) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (group, change, fields) of requests in which a block moves for two groups.

    In a shared memory a block holds one group's bytes, so that another group's would be lost. On
    each side, a block that moves for one group is put in the place of one that moves for another.
    """
    if not case.shared:
        return
    producer, consumer = case.producer, case.consumer
    sides: tuple[tuple[str, EngineSpec, EngineSpec, dict[str, list[int]]], ...] = (
        ("producer_blocks", producer, consumer, _read_blocks(case)),
        ("consumer_blocks", consumer, producer, _live_blocks(case)),
    )
    for side, engine, other, moved in sides:
        holders: dict[str, set[RankId]] = {}
        for target in targets(engine, other):
            # A rank to which no unit is sharded has no memory of the group.
            if rank_units(engine, target.rank, target.part, target.group):
                holders.setdefault(target.group.name, set()).add(target.rank)
        tables = getattr(case.request, side)
        for group, second in permutations(moved, 2):
            # On other ranks the two groups may not meet, as on different pipeline stages.
            if not holders[group] <= holders[second]:
                continue
            old, new = moved[group][-1], moved[second][0]
            ids = [new if each == old else each for each in tables[group].block_ids.tolist()]
            changed = {**tables, group: attrs.evolve(tables[group], block_ids=ids)}
            what = f"{side}[{group!r}]={ids}, of which group {second!r} has {new}"
            yield group, what, {side: changed}


def _read_blocks(case: Case) -> dict[str, list[int]]:
    """Return the producer's blocks from which something must be read, by group, in no order."""
    found: dict[str, set[int]] = {}
    for target in targets(case.producer, case.consumer):
        group, table = target.group, case.request.producer_blocks[target.group.name]
        tokens = _wanted(case, home(case.consumer, target.layer), target.layer)
        size = group.spec.block_size
        if target.part.per_token:
            size *= context_of(case.producer, target.rank, group)[1]
        else:  # A state lies in the block of its last token, or in its only slot.
            slot = len(table.block_ids) == 1 and not table.first_token
            tokens = [0] if slot and tokens else tokens[-1:]
        ids = table.block_ids.tolist()
        blocks = {ids[(token - table.first_token) // size] for token in tokens}
        found.setdefault(group.name, set()).update(blocks)
    return {group: sorted(blocks) for group, blocks in found.items() if blocks}


def _wanted(case: Case, group: KVCacheGroup, layer: str) -> list[int]:
    """Return the tokens that *layer*, in *group* of the consumer, has to receive."""
    live = live_positions(group.spec.of_layer(layer), case.request).nonzero()[0].tolist()
    return [token for token in live if token >= cached_tokens_of(case.request, group)]


def _live_blocks(case: Case) -> dict[str, list[int]]:
    """Return the consumer's blocks of which something must arrive, by group, in no order."""
    found: dict[str, set[int]] = {}
    for rank in case.consumer.parallel.ranks:
        tables = case.request.consumer_blocks
        for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
            kernel_blocks_per_block = count_kernel_blocks(case.consumer.group(rows.key[0]))
            blocks = (
                (rows.block[rows.live] // kernel_blocks_per_block).tolist() if rows.units else ()
            )
            found.setdefault(rows.key[0], set()).update(blocks)
    return {group: sorted(blocks) for group, blocks in found.items() if blocks}
