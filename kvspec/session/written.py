"""Compute which blocks of the consumer a request writes, and lock them for one load.

Invariant: at most one open load writes a block.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np

from kvspec.descriptors.request import Ids, TransferRequest, check_ids
from kvspec.descriptors.table import sharing
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.memory.busy import BusyRanges
from kvspec.memory.rank_cache import RankCache
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec

LoadBlocks = Mapping[str, Ids]
"""By group, the ids of blocks, in any order."""


def tokens_and_blocks(
    plan: TransferPlan, group: KVCacheGroup, request: TransferRequest
) -> Iterator[tuple[range, Ids]]:
    """Yield the tokens that *request* writes into one group of the consumer, and their blocks.

    Args:
        plan: The transfer plan of the two engines. Layers that either side excludes do not move.
        group: The consumer's group.
        request: The request.

    Yields:
        For each kind of layer that moves: the wanted tokens and the ids of their blocks, in order.

    Raises:
        SpecError: If the consumer's table has no blocks for them.
    """
    size = plan.consumer.virtual_block(group)
    for spec in _moving(plan, group):
        for wanted in request.moves(group.name, spec):
            field, table = f"consumer_blocks[{group.name!r}]", request.table("consumer", group.name)
            if any(part.per_token for part in spec.parts):
                table.check_start(field, size)
                held = table.tokens(size)
                if wanted.start < held.start or held.stop < wanted.stop:
                    expected = f"blocks for tokens {wanted.start}..{wanted.stop - 1}"
                    raise SpecError(field, held, expected)
                yield wanted, table.blocks_of(wanted, size)
            else:
                slot = table.state_block(field, spec.block_size, wanted.start)
                yield wanted, table.block_ids[slot : slot + 1]


def _moving(plan: TransferPlan, group: KVCacheGroup) -> Iterator[LayerSpec]:
    """Yield the specs of *group* that have a layer which neither side excludes."""
    excluded = {*plan.producer.excluded, *plan.consumer.excluded}
    for spec, layers in group.layers_by_spec:
        if not excluded.issuperset(layers):
            yield spec


def blocks_of(plan: TransferPlan, request: TransferRequest) -> LoadBlocks:
    """Return the blocks that *request* writes on the consumer, by group.

    Groups without a table are left out, and so are groups whose layers are all excluded. The table
    of an excluded group may be short, for example that of a draft model.
    """
    found: dict[str, Ids] = {}
    null = plan.consumer.null_block
    for group in plan.consumer.groups:
        if group.name in request.consumer_blocks:
            parts = [ids for _, ids in tokens_and_blocks(plan, group, request)]
            ids = parts[0] if len(parts) == 1 else np.concatenate([np.empty(0, np.int64), *parts])
            found[group.name] = ids if null is None else ids[ids != null]
    return {group: ids for group, ids in found.items() if len(ids)}


class BlockLocks:
    """The loads of a rank that own blocks of its cache. A block has one owner at a time.

    A pool is a set of groups that share memory. A block of a group belongs to each of its pools.
    """

    def __init__(self, cache: RankCache) -> None:
        splits = {group.name: group.kernel_blocks_per_block for group in cache.engine.groups}
        self._counts: dict[str, int] = {}
        for region in cache.regions:
            self._counts.setdefault(region.group, region.num_blocks // splits[region.group])
        shared = sharing(cache)
        self._pools = {
            group: [pool for pool in shared if group in pool] or [frozenset((group,))]
            for group in self._counts
        }
        self._busy: BusyRanges[str] = BusyRanges()

    def acquire(self, request_id: str, blocks: LoadBlocks) -> None:
        """Claim *blocks* until `release`. Call `release` even if this raises.

        Raises:
            SpecError: If the cache does not have a block.
            TransferError: With state "busy" if a block belongs to another load.
        """
        own = {group: ids for group, ids in blocks.items() if group in self._pools}
        pools: dict[frozenset[str], list[Ids]] = {}
        for group, ids in own.items():
            check_ids("consumer", group, ids, self._counts[group])
            for pool in self._pools[group]:
                pools.setdefault(pool, []).append(ids)
        for pool, parts in pools.items():
            ids = np.concatenate(parts)
            conflict = self._busy.claim(request_id, pool, ids, ids + 1)
            if conflict is not None:
                block, owner = conflict.start, conflict.owner
                group = next(group for group in own if group in pool and block in own[group])
                message = (
                    f"block {block} of group {group} belongs to {owner!r} until that load is over"
                )
                raise TransferError(message, request=request_id, state=TransferState.BUSY)

    def release(self, request_id: str) -> None:
        """Free the blocks of a load. A second call changes nothing."""
        self._busy.release(request_id)
