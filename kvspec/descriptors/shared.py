"""Block ids of groups that share one memory.

Invariant: a block of a shared memory holds the bytes of one group. On the consumer, a block that
is written for one group is in no other group's table. On the producer, no block is read for two
groups.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import combinations, permutations

import numpy as np

from kvspec.descriptors.request import BlockTable, Ids, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import MOST
from kvspec.memory.aliasing import groups_that_share
from kvspec.memory.regions import RankCache
from kvspec.plan.plan import TransferPlan


def sharing(cache: RankCache) -> tuple[frozenset[str], ...]:
    """Return the sets of groups whose blocks of one id share memory on the rank of *cache*."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache.engine.groups
    }
    return groups_that_share(cache.regions, kernel_blocks_per_block)


def check_shared(
    plan: TransferPlan, request: TransferRequest, shared: Iterable[frozenset[str]]
) -> None:
    """Raise `SpecError` if a block of *request* is written for one group and held by another.

    *shared*: groups of the consumer that share memory. Blocks before the first live token are not
    asked: the request may have given them back.
    """
    pairs = {pair.consumer.name: pair.layers_by_spec[0][0] for pair in plan.pairs}
    for groups in shared:
        for name, other in permutations(sorted(groups & set(request.consumer_blocks)), 2):
            if name not in pairs:
                continue  # nothing of it moves
            tables = request.consumer_blocks
            wanted = request.wanted(name, pairs[name])
            written = _blocks(plan.consumer, name, tables[name], wanted)
            group = plan.consumer.group(other)
            spec = group.spec.of_layer(group.layers[0])
            live = spec.live_tokens(request.total(spec))
            held = _blocks(plan.consumer, other, tables[other], range(live.start, MOST))
            twice = np.intersect1d(written, held)
            if len(twice):
                told = f"each block once; group {other!r}, in the same memory, has it too"
                raise SpecError(f"consumer_blocks[{name!r}]", int(twice[0]), told)


def check_shared_sources(
    plan: TransferPlan, request: TransferRequest, shared: Iterable[frozenset[str]]
) -> None:
    """Raise `SpecError` if *request* reads one block of the producer for two groups.

    A block may still stand in two tables, if at most one of the groups moves it. The other group
    may have given the block back, or the consumer may have cached its tokens.

    Args:
        plan: The transfer plan of the two engines.
        request: The request. Tables that end early are compared as far as they reach.
        shared: Sets of groups of the producer that share memory.

    """
    if not shared:
        return
    read: dict[str, list[Ids]] = {}
    for pair in plan.pairs:
        name = pair.producer.name
        table = request.producer_blocks.get(name)
        if table is None:
            continue  # `TransferRequest.table` raises if the request needs it.
        for spec, _ in pair.layers_by_spec:
            wanted = request.wanted(pair.consumer.name, spec)
            read.setdefault(name, []).append(_blocks(plan.producer, name, table, wanted))
    check_read_once(read, shared)


def check_read_once(read: Mapping[str, list[Ids]], shared: Iterable[frozenset[str]]) -> None:
    """Raise `SpecError` if two groups of one memory read the same block.

    Args:
        read: Ids of the blocks that move, by group of the producer.
        shared: Sets of groups of the producer that share memory.

    """
    for groups in shared:
        for name, other in combinations(sorted(groups & read.keys()), 2):
            twice = np.intersect1d(np.concatenate(read[name]), np.concatenate(read[other]))
            if len(twice):
                told = f"a block of one group; group {other!r}, in the same memory, reads it too"
                raise SpecError(f"producer_blocks[{name!r}]", int(twice[0]), told)


def _blocks(engine: EngineSpec, name: str, table: BlockTable, tokens: range) -> Ids:
    """Return the ids of the blocks of *table* that hold *tokens* of group *name*; no null block."""
    group = engine.group(name)
    size = engine.virtual_block(group)
    if not all(part.per_token for part in group.own_parts):
        size = group.spec.block_size
        if len(table.block_ids) == 1 and not table.first_token:
            return table.block_ids[: len(tokens)]
    held = table.tokens(size)
    inside = range(max(tokens.start, held.start), min(tokens.stop, held.stop))
    ids = table.blocks_of(inside, size) if inside else table.block_ids[:0]
    null = engine.null_block
    return ids if null is None else ids[ids != null]
