"""Grids of cases that several connectors share, and the moves of heads between two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from toy import gqa, latent, transfer

import kvspec
from kvspec import RankId
from kvspec.check.counting import rank_units
from kvspec.testing import Case
from kvspec.testing.laws import Move


def legal(count: int, tp: int) -> bool:
    """Return whether a model with *count* heads can be loaded with *tp* ranks."""
    return count % tp == 0 or tp % count == 0


def heads() -> Iterator[Case]:
    """All numbers of heads and TP sizes up to 16 that a model can be loaded with: 610 cases."""
    sizes = range(1, 17)
    for count, p, d in sorted(product(sizes, repeat=3), key=lambda c: (max(c), c)):
        if legal(count, p) and legal(count, d):
            yield transfer(gqa(count, block_size=1), tp=(p, d))


def latents() -> Iterator[Case]:
    """A latent between all TP sizes up to 8."""
    for p, d in product(range(1, 9), repeat=2):
        yield transfer(latent(), tp=(p, d), tokens=5)


def heads_of(case: Case) -> tuple[int, bool]:
    """Return the number of heads of the model, and whether it is a latent."""
    spec: Any = case.producer.groups[0].spec
    if isinstance(spec, kvspec.MLAAttentionSpec):
        return 1, True
    return spec.total_num_kv_heads, False


def moves(case: Case, source: int, target: int, theirs: range, mine: range) -> Iterator[Move]:
    """Yield the moves of some heads between two ranks, for each layer and part.

    Args:
        case: The transfer.
        source: TP rank of the producer.
        target: TP rank of the consumer.
        theirs: Places of the heads among those that the producer rank holds.
        mine: Places of the heads among those that the consumer rank holds.
    """
    for group in case.consumer.groups:
        part = group.spec.parts[0]
        first = rank_units(case.consumer, RankId(tp=target), part, group)[0]
        for layer, part in product(group.layers, group.spec.parts):
            yield Move(
                producer=RankId(tp=source), consumer=RankId(tp=target), layer=layer,
                part=part.name, units=range(first + mine.start, first + mine.stop),
                producer_units=theirs, consumer_units=mine,
            )  # fmt: skip
