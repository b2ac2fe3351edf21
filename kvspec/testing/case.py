"""One transfer to judge: two engines, their pools, a request, and who reads which replica.

A case is a value; strategies draw it, `world` gives it memory, laws are about it.
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
    """One transfer: both engines, their block pools by group, the request and the replica policy.

    *common_states*: only the rows of states that both have move. *shared*: on each side, all groups
    lie in one memory.
    """

    producer: EngineSpec
    consumer: EngineSpec
    producer_pool: Mapping[str, int]
    consumer_pool: Mapping[str, int]
    request: TransferRequest
    replica_policy: ReplicaPolicy = attrs.field(default=ReplicaPolicy(), converter=_replica_policy)
    common_states: bool = False
    shared: bool = False
