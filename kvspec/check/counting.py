"""Who owns what, and which tokens are live: counted out one by one, by the definitions alone.

Law: units are handed out like cards, token positions in turn, and liveness is a question about one
position. No sharding, no `BlockCyclic` and no `live_tokens` of the library is asked, so that those
who judge it can ask here instead. Of kvspec it reads only values.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.descriptors.request import TransferRequest
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part


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
