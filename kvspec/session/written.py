"""Compute which blocks of the consumer a request writes, and how much of each.

Invariant: a block belongs to one load until that load is over. Both sides compute the same checksum
of the written blocks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import Ids, TransferRequest, check_ids
from kvspec.descriptors.table import DescriptorTable, sharing
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.memory.rank_cache import RankCache
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec
from kvspec.wire.messages import DIGEST, Pushed

Blocks = Mapping[str, Ids]
"""By group, the ids of blocks, in any order."""


def placed(
    plan: TransferPlan, group: KVCacheGroup, request: TransferRequest
) -> Iterator[tuple[range, Ids]]:
    """Yield what *request* writes into the blocks of one group of the consumer.

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
        wanted = request.wanted(group.name, spec)
        if not wanted:
            continue
        field, table = f"consumer_blocks[{group.name!r}]", request.table("consumer", group.name)
        if any(part.per_token for part in spec.parts):
            table.check_start(field, size)
            held = table.tokens(size)
            if wanted.start < held.start or held.stop < wanted.stop:
                told = f"blocks for tokens {wanted.start}..{wanted.stop - 1}"
                raise SpecError(field, held, told)
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


def blocks_of(plan: TransferPlan, request: TransferRequest) -> Blocks:
    """Return the blocks that *request* writes on the consumer, by group.

    A group without a table, or of which every layer is excluded, has none. Its table is not read,
    so that it may be short: a draft's table usually is.
    """
    found: dict[str, Ids] = {}
    null = plan.consumer.null_block
    for group in plan.consumer.groups:
        if group.name in request.consumer_blocks:
            some = [ids for _, ids in placed(plan, group, request)]
            ids = some[0] if len(some) == 1 else np.concatenate([np.empty(0, np.int64), *some])
            found[group.name] = ids if null is None else ids[ids != null]
    return {group: ids for group, ids in found.items() if len(ids)}


def pushed_of(table: DescriptorTable, request: TransferRequest) -> Pushed:
    """Return what *request* writes by *table*; `SpecError` where it has no blocks for it."""
    plan, ranks = table.plan, (table.producer.rank, table.consumer.rank)
    engine = plan.consumer
    groups = dict.fromkeys(edge.group for edge in plan.between(*ranks))
    request.check_groups([group.name for group in engine.groups])
    cached, blocks, counts = blake2b(digest_size=DIGEST), blake2b(digest_size=DIGEST), {"prompt"}
    for group in map(engine.group, groups):
        for wanted, ids in placed(plan, group, request):
            cached.update(f"{group.name!r} {wanted.start};".encode())
            blocks.update(ids.astype("<i8").tobytes())
        for spec in _moving(plan, group):
            counts.add("prompt" if spec.counts_prompt else "encoder")
            counts |= {"state" for part in spec.parts if not part.per_token}
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    return Pushed(
        num_tokens=request.num_tokens,
        encoder_tokens=(request.encoder_tokens or 0) if "encoder" in counts else 0,
        state_tokens=seen if "state" in counts else 0,
        cached=cached.digest(),
        blocks=blocks.digest(),
    )


class BlockLocks:
    """Which load of a rank each block of its *cache* belongs to, until that is over."""

    def __init__(self, cache: RankCache) -> None:
        splits = {group.name: group.kernel_blocks_per_block for group in cache.engine.groups}
        self._pools: dict[str, npt.NDArray[np.int64]] = {}
        for region in cache.regions:
            count = region.num_blocks // splits[region.group]
            self._pools.setdefault(region.group, np.zeros(count, np.int64))
        for groups in sharing(cache):
            pool = max((self._pools[name] for name in groups), key=len)
            self._pools |= dict.fromkeys(groups, pool)
        self._names: dict[int, str] = {}
        self._last = 0

    def acquire(self, request_id: str, blocks: Blocks) -> int:
        """Return a number for `release`; `TransferError` "busy" where a block belongs to another.

        `SpecError` for ids that the cache does not have.
        """
        own = {group: ids for group, ids in blocks.items() if group in self._pools}
        for group, ids in own.items():
            pool = self._pools[group]
            check_ids("consumer", group, ids, len(pool))
            owners = pool[ids]
            for block in ids[owners != 0][:1].tolist() if owners.any() else ():
                owner = self._names[int(pool[block])]
                message = (
                    f"block {block} of group {group} belongs to {owner!r} until that load is over"
                )
                raise TransferError(message, request=request_id, state=TransferState.BUSY)
        self._last += 1
        self._names[self._last] = request_id
        try:
            for group, ids in own.items():
                self._pools[group][ids] = self._last
            return self._last  # noqa: TRY300 - an interrupt outside would lose it
        except BaseException:  # an interrupt: nobody else knows the number
            self.release(self._last, blocks)
            raise

    def release(self, number: int, blocks: Blocks) -> None:
        """Free the blocks of a load that is over; a second call changes nothing."""
        for group in blocks.keys() & self._pools.keys():
            ids = blocks[group]
            self._pools[group][ids[self._pools[group][ids] == number]] = 0
        self._names.pop(number, None)
