"""Count which units, layers and positions a rank owns, and which tokens are live, one by one.

Invariant: no function here uses the library code that computes the same. It reads only values.

How it works:
    Each fact is computed from its definition, without `Sharding`, `BlockCyclic` and `live_tokens`:

        fact                    counted as
        ---------------------   -----------------------------------------------------------------
        units of a rank         deal packs of units to the ranks, in order (`shard_units`)
        layers of a stage       deal the layer numbers to the stages, in order (`rank_layers`)
        positions of a rank     deal positions to the context ranks, one interleave at a time
                                (`own_positions`)
        live positions          test for each position whether the next query attends to it
                                (`live_positions`)
        cached tokens           read from the request (`cached_tokens_of`)

    `verify` compares the library with these facts (`kvspec.check.ownership`). The tests use the
    same functions as an oracle, so a fault of the library cannot hide in both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    # Types only: at run time this module must not depend on the code that it judges.
    from numpy.typing import NDArray

    from kvspec.descriptors.request import TransferRequest
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part


def shard_units(units: int, tp_size: int, granularity: int = 1) -> list[list[int]]:
    """Distribute *units* to *tp_size* ranks one by one, in packs of *granularity*.

    If there are enough packs, each rank takes packs until it has `packs / tp_size` of them. If
    there are too few, neighbouring ranks share a pack.

    Returns:
        The units of each rank.

    >>> shard_units(3, 2), shard_units(2, 4)
    ([[0], [1, 2]], [[0], [0], [1], [1]])
    """
    packs = units // granularity
    hands: list[list[int]] = [[] for _ in range(tp_size)]
    # Credit counts in fractions of a pack, so that no division rounds.
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
        [pack * granularity + unit for pack in hand for unit in range(granularity)]
        for hand in hands
    ]


def rank_units(
    engine: EngineSpec, rank: RankId, part: Part, group: KVCacheGroup | None = None
) -> list[int]:
    """Return the model's units of *part* that *rank* holds, in the order of its memory."""
    explicit = engine.parallel.shardings.get(part.units)
    if group is not None:
        explicit = group.shardings.get(part.name, explicit)
    if explicit is not None:
        return list(explicit[rank.tp])
    return shard_units(part.units, engine.parallel.tp_size, part.granularity)[rank.tp]


def rank_layers(engine: EngineSpec, rank: RankId, group: KVCacheGroup) -> list[str]:
    """Return the layers of *group* that the pipeline stage of *rank* holds.

    If the engine has no explicit stages, the layer numbers are dealt to the stages in order.
    """
    stages = engine.parallel.stages
    if engine.parallel.pp_size == 1 and stages is None:
        return list(group.layers)
    numbers = {layer: _number(layer) for member in engine.groups for layer in member.layers}
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
    """Return the first number in the name of a layer."""
    digits = "".join(char if char.isdecimal() else " " for char in layer).split()
    return int(digits[0]) if digits else None


def context_of(
    engine: EngineSpec, rank: RankId, group: KVCacheGroup | None = None
) -> tuple[int, int]:
    """Return the context rank of *rank*, and the number of context ranks that share tokens."""
    parallel = engine.parallel
    if group is not None and not group.context_sharded:
        return 0, 1
    if parallel.context_ranks is None:
        size = parallel.dcp_size * parallel.pcp_size
        return rank.pcp * parallel.dcp_size + rank.tp % parallel.dcp_size, size
    size = len({context for row in parallel.context_ranks for context in row})
    return parallel.context_ranks[rank.pcp][rank.tp], size


def own_positions(
    engine: EngineSpec, rank: RankId, first: int, count: int, group: KVCacheGroup | None = None
) -> NDArray[np.int64]:
    """Return the next *count* token positions of *group* from *first* that *rank* stores.

    The context ranks take turns, and each of them takes one interleave of positions at a time.
    *first* must be the first position of context rank 0's turn.
    """
    context, size = context_of(engine, rank, group)
    positions = np.arange(first, first + count * size)
    own: NDArray[np.bool_] = positions // engine.parallel.interleave_size % size == context
    return positions[own]


def _kind(spec: object) -> str:
    """Return the name of the class of the layers of *spec*."""
    # A uniform-type group has a class of its own. Its layers are all of one class.
    layers = getattr(spec, "specs", None) or {"": spec}
    return type(next(iter(layers.values()))).__name__


def counts_encoder(spec: object) -> bool:
    """Return whether layers of *spec* store the tokens of an encoder."""
    return _kind(spec) == "CrossAttentionSpec"


def is_ring(spec: object) -> bool:
    """Return whether a request has one block in layers of *spec*, whose rows are used in turn."""
    return _kind(spec) == "CircularBufferSpec"


def length_in(spec: object, request: TransferRequest) -> int:
    """Return the number of positions of the request in layers of *spec*."""
    if counts_encoder(spec) and request.encoder_tokens is not None:
        return request.encoder_tokens
    return request.num_tokens


def live_positions(spec: Any, request: TransferRequest) -> NDArray[np.bool_]:  # noqa: ANN401
    """Return for each position of the request whether the next query attends to it.

    The query is at position `num_tokens`. With a sliding window it attends to positions less than
    a window away. With chunked attention it attends to its own chunk. A ring is read for the group
    of tokens that is not complete, and with overlap for the last complete one. Otherwise the query
    attends to all positions.
    """
    length = length_in(spec, request)
    position = np.arange(length)
    window = getattr(spec, "sliding_window", None)
    if window is not None:
        return np.asarray(length - position < window + spec.extra_retained_tokens)
    chunk = getattr(spec, "attention_chunk_size", None)
    if chunk is not None:
        return np.asarray(position // chunk == length // chunk)
    ratio = getattr(spec, "compress_ratio", None)
    if ratio is not None:
        return np.asarray(length // ratio - position // ratio <= int(spec.overlap))
    return np.ones(length, bool)


def first_live(live: NDArray[np.bool_]) -> int:
    """Return the first *live* position, or the position of the query if no position is live.

    >>> first_live(np.array([False, True, True])), first_live(np.zeros(3, bool))
    (1, 3)
    """
    return int(live.argmax()) if live.any() else len(live)


def of_group(value: int | Mapping[str, int] | None, group: str, default: int) -> int:
    """Return the count of *group*. *value* is one count for all groups, or one for each name."""
    if value is None:
        return default
    return value if isinstance(value, int) else value.get(group, default)


def cached_tokens_of(request: TransferRequest, group: KVCacheGroup) -> int:
    """Return the number of tokens of *group* that the consumer has cached."""
    # One count for all groups counts decoder tokens, so it does not apply to encoder tokens.
    if counts_encoder(group.spec) and isinstance(request.cached_tokens, int):
        return 0
    # No prefix cache contains a ring.
    if is_ring(group.spec):
        return 0
    return of_group(request.cached_tokens, group.name, 0)
