"""The case: all that describes one transfer, without memory.

Strategies draw cases, `world` allocates memory for them, and laws judge systems with them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import attrs

from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName

if TYPE_CHECKING:
    from kvspec.descriptors.request import TransferRequest
    from kvspec.engines.engine import EngineSpec


def _replica_policy(value: ReplicaPolicyName | ReplicaPolicy) -> ReplicaPolicy:
    return ReplicaPolicy.of(value)


@attrs.frozen(kw_only=True)
class Case:
    """One transfer between two engines.

    Attributes:
        producer: The engine that holds the tokens.
        consumer: The engine that reads them.
        producer_pool: Number of blocks of each group, by its name.
        consumer_pool: The same for the consumer.
        request: The tokens and the block tables of both sides.
        replica_policy: The rule that chooses one of several equal producer ranks for each reader.
        common_states: Whether states may have more rows on one side. Then only the rows that both
            sides have move.
        shared: Whether all groups of a rank share one memory.

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=2, producer_blocks={"g": [0]}, consumer_blocks={"g": [1]}
    ... )
    >>> case = Case(
    ...     producer=engine, consumer=engine, producer_pool={"g": 2}, consumer_pool={"g": 2},
    ...     request=request,
    ... )
    >>> case.replica_policy.name
    'spread'
    """

    producer: EngineSpec
    consumer: EngineSpec
    producer_pool: Mapping[str, int]
    consumer_pool: Mapping[str, int]
    request: TransferRequest
    replica_policy: ReplicaPolicy = attrs.field(default=ReplicaPolicy(), converter=_replica_policy)
    common_states: bool = False
    shared: bool = False
