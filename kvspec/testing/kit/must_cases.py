"""The cases that each run judges on the axis of TP sizes, whatever it draws.

Random cases of a small profile may leave a whole class of pairs out. Connectors were wrong in these
classes: sizes that do not divide, and more ranks than heads. So cases of each class are listed.
Each case has at least two heads and moves tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, cast

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import FullAttentionSpec
from kvspec.testing.case import Case
from kvspec.testing.requests import needed

if TYPE_CHECKING:
    from kvspec.testing.supports import Supports

SIZES = (
    # Producer ranks, consumer ranks and heads. Sizes divide, or they do not.
    (2, 2, 4), (1, 2, 2), (2, 1, 2), (2, 4, 4), (4, 2, 4), (1, 3, 6), (3, 1, 6), (2, 3, 6),
    (3, 2, 6), (2, 3, 4), (3, 2, 4), (3, 4, 4), (4, 3, 4),
    # More producer ranks than heads.
    (4, 2, 2), (3, 1, 2), (4, 1, 2), (8, 2, 4), (6, 3, 3), (6, 2, 3), (5, 2, 3), (8, 3, 4),
    # More consumer ranks than heads.
    (2, 4, 2), (1, 3, 2), (1, 4, 2), (2, 8, 4), (3, 6, 3), (2, 5, 3),
    # Both.
    (4, 4, 2), (4, 3, 2), (3, 4, 2), (8, 4, 2), (4, 8, 2), (6, 4, 3),
)  # fmt: skip
BLOCK, TOKENS, POOL = 2, 5, 4
"""Tokens of a block, tokens of the request, and blocks of each pool. The last block is not full."""


def must_cases(narrow: Supports) -> Iterator[Case]:
    """Yield the listed cases that *narrow* allows. A kind other than "full" has none."""
    if "full" not in (narrow.kinds or ("full",)):
        return
    layouts = narrow.layouts or ("LBHNC",)
    policies = narrow.policies or ("spread",)
    for producer, consumer, heads in SIZES:
        sides = [_engine(size, heads, layouts[0]) for size in (producer, consumer)]
        even = all(heads % size == 0 or size % heads == 0 for size in (producer, consumer))
        allowed = max(producer, consumer) <= narrow.max_tp and (even or not narrow.even_heads)
        if allowed and narrow.fit(*sides):
            request = TransferRequest(
                request_id="must",
                num_tokens=TOKENS,
                producer_blocks={"full": [1, 3, 2]},
                consumer_blocks={"full": [2, 1, 3]},
            )
            yield Case(
                producer=sides[0],
                consumer=sides[1],
                producer_pool={"full": POOL},
                consumer_pool={"full": POOL},
                request=request,
                replica_policy=cast("Any", policies[0]),
            )


def _engine(tp_size: int, heads: int, layout: str) -> EngineSpec:
    spec = FullAttentionSpec(block_size=BLOCK, total_num_kv_heads=heads, head_size=2, dtype="uint8")
    group = KVCacheGroup(name="full", layers=["layer.0"], spec=spec)
    parallel = ParallelConfig(tp_size=tp_size)
    return EngineSpec(groups=[group], parallel=parallel, layout=layout)


def moves_nothing(case: Case) -> bool:
    """Return whether the consumer of *case* lacks no token: every answer to it is right."""
    return not any(needed(each, case.request, case.consumer) for each in case.consumer.groups)
