"""Block ids of groups that share one memory.

Law: a block that one group's tokens are written to is, on that rank, no other group's.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import permutations

import numpy as np

from kvspec.descriptors.request import Ids, TransferRequest
from kvspec.errors import SpecError
from kvspec.inputs import MOST
from kvspec.memory.aliasing import groups_that_share
from kvspec.memory.regions import RankCache
from kvspec.plan.plan import TransferPlan


def sharing(cache: RankCache) -> tuple[frozenset[str], ...]:
    """Return the sets of groups whose blocks of one id share memory on the rank of *cache*."""
    split = {group.name: group.split for group in cache.engine.groups}
    return groups_that_share(cache.regions, split)


def check_shared(
    plan: TransferPlan, request: TransferRequest, shared: Iterable[frozenset[str]]
) -> None:
    """Raise `SpecError` if a block of *request* is written for one group and held by another.

    *shared*: groups of the consumer that share memory. Blocks before the first live token are not
    asked: the request may have given them back.
    """
    pairs = {pair.consumer.name: pair.alike[0][0] for pair in plan.pairs}
    for groups in shared:
        for name, other in permutations(sorted(groups & set(request.consumer_blocks)), 2):
            if name not in pairs:
                continue  # nothing of it moves
            written = _blocks(plan, request, name, request.wanted(name, pairs[name]))
            group = plan.consumer.group(other)
            spec = group.spec.of_layer(group.layers[0])
            live = spec.live_tokens(request.total(spec))
            held = _blocks(plan, request, other, range(live.start, MOST))
            twice = np.intersect1d(written, held)
            if len(twice):
                told = f"each block once; group {other!r}, in the same memory, has it too"
                raise SpecError(f"consumer_blocks[{name!r}]", int(twice[0]), told)


def _blocks(plan: TransferPlan, request: TransferRequest, name: str, tokens: range) -> Ids:
    """Return the ids of the blocks in which group *name* has any of *tokens*; no null block."""
    group, table = plan.consumer.group(name), request.consumer_blocks[name]
    size = plan.consumer.virtual_block(group)
    if not all(part.per_token for part in group.own_parts):
        size = group.spec.block_size
        if len(table.block_ids) == 1 and not table.first_token:
            return table.block_ids[: len(tokens)]
    held = table.tokens(size)
    inside = range(max(tokens.start, held.start), min(tokens.stop, held.stop))
    ids = table.blocks_of(inside, size) if inside else table.block_ids[:0]
    null = plan.consumer.null_block
    return ids if null is None else ids[ids != null]
