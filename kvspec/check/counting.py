"""Who owns what, and which tokens are live: counted out one by one, by the definitions alone.

Law: units are handed out like cards, token positions in turn, and liveness is a question about one
position. No sharding, no `BlockCyclic` and no `live_tokens` of the library is asked, so that those
who judge it can ask here instead. Of kvspec it reads only values.

Who owns what, and what is live: asked of the library, or counted out beside it.

Law: both answer the same questions, and of the tokens' sharding only which places of one virtual
block a rank stores. Where they differ, the library is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints
from kvspec.specs import LayerSpec

if TYPE_CHECKING:
    from numpy.typing import NDArray


def shard_units(units: int, tp_size: int, granularity: int = 1) -> list[list[int]]:
    """Distribute *units* to *tp_size* ranks one by one, in packs of *granularity*.

    Return each rank's units.

    Enough packs: a rank's share is full once it has `packs / tp_size` of them, and the next rank
    goes on. Too few packs: neighbours share one. `shard_units(3, 2) == [[0], [1, 2]]`.
    """
    packs = units // granularity
    hands: list[list[int]] = [[] for _ in range(tp_size)]
    credit = 0
    if packs >= tp_size:
        rank = 0
        for pack in range(packs):
            credit += tp_size
            if credit > packs:
                credit, rank = credit - packs, rank + 1
            hands[rank].append(pack)
    else:
        pack = 0
        for hand in hands:
            hand.append(pack)
            credit += packs
            if credit >= tp_size:
                credit, pack = credit - tp_size, pack + 1
    return [
        [pack * granularity + one for pack in hand for one in range(granularity)] for hand in hands
    ]


def rank_units(
    engine: EngineSpec, rank: RankId, part: Part, group: KVCacheGroup | None = None
) -> list[int]:
    """Return the global units of *part* that *rank* holds, in the order in which it stores them."""
    explicit = engine.parallel.shardings.get(part.units)
    if group is not None:
        explicit = group.shardings.get(part.name, explicit)
    if explicit is not None:
        return list(explicit[rank.tp])
    return shard_units(part.units, engine.parallel.tp_size, part.granularity)[rank.tp]


def rank_layers(engine: EngineSpec, rank: RankId, group: KVCacheGroup) -> list[str]:
    """Return the layers of *group* that *rank*'s pipeline stage holds.

    Stages that are not given hold runs of layer numbers, handed out like heads: one by one, in
    order.
    """
    stages = engine.parallel.stages
    if engine.parallel.pp_size == 1 and stages is None:
        return list(group.layers)
    numbers = {layer: _number(layer) for each in engine.groups for layer in each.layers}
    if stages is None:
        order = sorted({number for number in numbers.values() if number is not None})
        shares: list[list[int]] = [[] for _ in range(engine.parallel.pp_size)]
        stage = 0
        for at, number in enumerate(order):
            while (stage + 1) * len(order) // len(shares) <= at:
                stage += 1
            shares[stage].append(number)
        own = shares[rank.pp]
        return [layer for layer in group.layers if numbers[layer] in own]
    stage_layers = stages[rank.pp]
    if isinstance(stage_layers, range):
        return [layer for layer in group.layers if numbers[layer] in stage_layers]
    return [layer for layer in group.layers if layer in stage_layers]


def _number(layer: str) -> int | None:
    digits = "".join(char if char.isdigit() else " " for char in layer).split()
    return int(digits[0]) if digits else None


def context_of(
    engine: EngineSpec, rank: RankId, group: KVCacheGroup | None = None
) -> tuple[int, int]:
    """Return the context rank of *rank*, and how many context ranks share the group's tokens."""
    parallel = engine.parallel
    if group is not None and not group.context_sharded:
        return 0, 1
    if parallel.context_ranks is None:
        size = parallel.dcp_size * parallel.pcp_size
        return rank.pcp * parallel.dcp_size + rank.tp % parallel.dcp_size, size
    size = len({each for row in parallel.context_ranks for each in row})
    return parallel.context_ranks[rank.pcp][rank.tp], size


def own_positions(
    engine: EngineSpec, rank: RankId, first: int, count: int, group: KVCacheGroup | None = None
) -> NDArray[np.int64]:
    """Return the next *count* token positions of *group* from *first* that *rank* stores.

    Positions are handed out to the context ranks in turn, an interleave at a time; *first* begins a
    round.
    """
    context, size = context_of(engine, rank, group)
    positions = np.arange(first, first + count * size)
    own: NDArray[np.bool_] = positions // engine.parallel.interleave_size % size == context
    return positions[own]


def length_in(spec: object, request: TransferRequest) -> int:
    """Return how many positions the request has in this kind of layer."""
    if type(spec).__name__ == "CrossAttentionSpec" and request.encoder_tokens is not None:
        return request.encoder_tokens
    return request.num_tokens


def live_positions(spec: Any, request: TransferRequest) -> NDArray[np.bool_]:  # noqa: ANN401
    """Return, for each position below the request's length, whether the next query sees it.

    The query stands at position n = `num_tokens`: it sees what is less than a window away, or in
    its own chunk; cross attention sees every encoder token.
    """
    length = length_in(spec, request)
    position = np.arange(length)
    window = getattr(spec, "sliding_window", None)
    if window is not None:
        return np.asarray(length - position < window + spec.extra_retained_tokens)
    chunk = getattr(spec, "attention_chunk_size", None)
    if chunk is not None:
        return np.asarray(position // chunk == length // chunk)
    return np.ones(length, bool)


def of_group(value: int | Mapping[str, int] | None, group: str, default: int) -> int:
    """Return what a count that may be told by group is for *group*."""
    if value is None:
        return default
    return value if isinstance(value, int) else value.get(group, default)


def cached_tokens_of(request: TransferRequest, group: KVCacheGroup) -> int:
    """Return how many tokens of *group* the consumer has: one count is never the encoder's."""
    cross = type(group.spec).__name__ == "CrossAttentionSpec"
    if cross and isinstance(request.cached_tokens, int):
        return 0
    return of_group(request.cached_tokens, group.name, 0)


MAX_COUNTED = 2**24
"""Positions that are looked at one by one: a second or so."""


@attrs.frozen(eq=False)
class Owners:
    """What the library itself says of one engine."""

    engine: EngineSpec

    def layers(self, group: KVCacheGroup, rank: RankId) -> tuple[str, ...]:
        """Return the layers of *group* that the rank's stage holds."""
        return self.engine.layers_at(group, rank.pp)

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the model's units of *part* that the rank holds."""
        return self.engine.units(group, part, rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the positions that one block of the group's table stands for."""
        return self.engine.virtual_block(group)

    def stored(self, group: KVCacheGroup, rank: RankId) -> Ints:
        """Return which positions of a virtual block the rank's block stores, in its order."""
        _check_countable(f"groups[{group.name!r}].block_size", group.spec.block_size)
        return self.engine.context(group, rank).position(np.arange(group.spec.block_size))

    def wanted(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> range:
        """Return the positions of *group*, of layers of *spec*, that have to move."""
        return request.wanted(group.name, spec)

    def cached(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> int:
        """Return how many leading positions of *group*, of layers of *spec*, the consumer has."""
        return request.cached(group.name, spec)


class Counted(Owners):
    """The same, counted out one by one.

    No sharding, no `BlockCyclic`, no `live_tokens` is asked.
    """

    def layers(self, group: KVCacheGroup, rank: RankId) -> tuple[str, ...]:
        """Return the layers of *group* whose numbers are handed out to the rank's stage."""
        return tuple(rank_layers(self.engine, rank, group))

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the units that are handed out to the rank one by one."""
        return _units(self.engine, group, part, rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the positions of as many blocks as there are context ranks."""
        _, size = context_of(self.engine, RankId(), group)
        return group.spec.block_size * size

    def stored(self, group: KVCacheGroup, rank: RankId) -> Ints:
        """Return the positions of a virtual block that are handed out to the rank in turn."""
        size = group.spec.block_size
        _check_countable(f"groups[{group.name!r}].block_size", self.virtual_block(group))
        return own_positions(self.engine, rank, 0, size, group)

    def wanted(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> range:
        """Return the positions that the next query sees, and that are not cached."""
        _check_countable("num_tokens", length_in(spec, request))
        live = np.flatnonzero(live_positions(spec, request))
        live = live[live >= self.cached(request, group, spec)]
        return range(int(live[0]), int(live[-1]) + 1) if len(live) else EMPTY

    def cached(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> int:  # noqa: ARG002
        """Return the one count, unless it is told by group or is not of the encoder's tokens."""
        return cached_tokens_of(request, group)


@lru_cache(maxsize=4096)
def _units(engine: EngineSpec, group: KVCacheGroup, part: Part, rank: RankId) -> range:
    own = rank_units(engine, rank, part, group)
    return range(own[0], own[-1] + 1) if own else EMPTY


def _check_countable(field: str, positions: int) -> None:
    if positions > MAX_COUNTED:
        told = f"at most {MAX_COUNTED} positions, which are looked at one by one"
        raise SpecError(field, positions, told)
