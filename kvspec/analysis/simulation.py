"""How long a transfer takes, and which link bounds it, for each replica policy.

Law: only counts bytes on links; every byte counted is one that a plan moves. A predicted time is
a fluid lower bound: no transfer can be faster on these links, and a real one is slower.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.analysis.flows import flows
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import (
    ReplicaPolicy,
    ReplicaPolicyName,
    Role,
    Topology,
    known_policies,
)
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan, plan_transfer

__all__ = ["LinkTime", "PolicyLoad", "Simulation", "simulate"]

Floats = npt.NDArray[np.float64]
Speed = float | Sequence[float]
"""Bytes a second of every rank's link, or one number a rank."""


@attrs.frozen(kw_only=True)
class LinkTime:
    """One rank's link in one direction: its load in bytes, and how long that takes alone."""

    side: Role
    rank: RankId
    load: int
    seconds: float

    def __str__(self) -> str:
        way = "out of" if self.side == "producer" else "into"
        return f"{way} {self.side} {self.rank}"


@attrs.frozen(kw_only=True, eq=False)
class PolicyLoad:
    """What one policy puts on every link.

    *out* are bytes out of each producer rank, to all consumer engines together; *into* are bytes
    into each rank of any one consumer engine, the same for all of them. Both are int64 arrays over
    `ParallelConfig.ranks`; *out_seconds* and *into_seconds* divide them by the links' speeds.
    """

    replica_policy: ReplicaPolicyName
    producer_ranks: tuple[RankId, ...]
    consumer_ranks: tuple[RankId, ...]
    out: Ints
    into: Ints
    out_seconds: Floats
    into_seconds: Floats

    @property
    def seconds(self) -> float:
        """The predicted time: the greatest of load / speed over all links."""
        return self.bottleneck.seconds

    @cached_property
    def bottleneck(self) -> LinkTime:
        """The link that takes longest alone; of equal ones the producer's, and the lowest rank."""
        source, target = int(self.out_seconds.argmax()), int(self.into_seconds.argmax())
        if self.out_seconds[source] >= self.into_seconds[target]:
            return self._link("producer", source)
        return self._link("consumer", target)

    @cached_property
    def busiest(self) -> LinkTime:
        """The producer's link with most bytes, which is what a policy decides."""
        return self._link("producer", int(self.out.argmax()))

    @property
    def unevenness(self) -> float:
        """The most loaded producer link's bytes over the mean of all: 1 is perfectly even."""
        mean = float(self.out.mean())
        return float(self.out.max()) / mean if mean else 1.0

    def _link(self, side: Role, at: int) -> LinkTime:
        if side == "producer":
            ranks, load, seconds = self.producer_ranks, self.out, self.out_seconds
        else:
            ranks, load, seconds = self.consumer_ranks, self.into, self.into_seconds
        return LinkTime(side=side, rank=ranks[at], load=int(load[at]), seconds=float(seconds[at]))


@attrs.frozen(kw_only=True, eq=False)
class Simulation:
    """The loads of one request to each of *consumers* engines, under several policies."""

    num_tokens: int
    consumers: int
    policies: tuple[PolicyLoad, ...]

    @property
    def best(self) -> PolicyLoad:
        """The policy with the shortest predicted time; of equal ones, the first compared."""
        return min(self.policies, key=lambda each: each.seconds)

    def policy(self, replica_policy: ReplicaPolicyName) -> PolicyLoad:
        """Return the loads under one policy."""
        for each in self.policies:
            if isinstance(replica_policy, str) and each.replica_policy == replica_policy:
                return each
        compared = ", ".join(each.replica_policy for each in self.policies)
        raise SpecError(
            "replica_policy", replica_policy, f"one of the policies compared: {compared}"
        )


def simulate(
    plan_or_engines: TransferPlan | tuple[EngineSpec, EngineSpec],
    *,
    num_tokens: int,
    consumers: int = 1,
    out_speed: Speed = 50e9,
    in_speed: Speed = 50e9,
    replica_policies: Sequence[ReplicaPolicyName] | None = None,
    topology: Topology | None = None,
) -> Simulation:
    """Predict how the links are loaded when every consumer engine fetches one request.

    *plan_or_engines*: the producer and the consumer, or a plan between them, whose own policy and
    salt do not matter. *num_tokens*: length of each request, nothing cached. *consumers*: how many
    engines like the consumer fetch at once from the one producer; engine e chooses with salt e.
    *out_speed*, *in_speed*: bytes a second of each rank's own link, full duplex, one number for
    all ranks or one a rank. *replica_policies*: the policies to compare; unless given, every one,
    but those that need a *topology* where there is none.

    A predicted time is ``max(load / speed)`` over all links: a fluid lower bound. It assumes that
    nothing but the ranks' own links is short (no oversubscribed switch), and leaves out latency,
    the cost of each descriptor, dead bytes of partly live blocks, and pauses while one rank waits
    for another. Raises `MismatchError` where the engines do not fit, and `SpecError` where all
    links together carry more bytes than a signed 64-bit number holds.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> group = KVCacheGroup(name="latent", layers=("layers.0",), spec=spec)
    >>> producer = EngineSpec(groups=(group,), parallel=ParallelConfig(tp_size=4))
    >>> consumer = EngineSpec(groups=(group,))
    >>> found = simulate((producer, consumer), num_tokens=1024, consumers=8)
    >>> {each.replica_policy: each.out.tolist() for each in found.policies
    ...     if each.replica_policy != "stripe"}
    {'spread': [2359296, 2359296, 2359296, 2359296], 'first': [9437184, 0, 0, 0]}
    """
    producer, consumer = _engines(plan_or_engines)
    positive_int("num_tokens", num_tokens, least=0)
    positive_int("consumers", consumers)
    compared = _replica_policies(replica_policies, topology)
    out_ranks, in_ranks = producer.parallel.ranks, consumer.parallel.ranks
    out_speeds = _speeds("out_speed", out_speed, len(out_ranks))
    in_speeds = _speeds("in_speed", in_speed, len(in_ranks))
    loads: list[PolicyLoad] = []
    for replica_policy in compared:
        moved = flows(plan_transfer(producer, consumer, replica_policy), num_tokens)
        out = moved.out(consumers)
        load = PolicyLoad(
            replica_policy=replica_policy.name,
            producer_ranks=out_ranks,
            consumer_ranks=in_ranks,
            out=out,
            into=moved.into,
            out_seconds=_seconds("out_speed", out, out_speeds),
            into_seconds=_seconds("in_speed", moved.into, in_speeds),
        )
        loads.append(load)
    return Simulation(num_tokens=num_tokens, consumers=consumers, policies=tuple(loads))


def _replica_policies(
    replica_policies: Sequence[ReplicaPolicyName] | None, topology: Topology | None
) -> list[ReplicaPolicy]:
    given = known_policies(topology) if replica_policies is None else replica_policies
    policies = sequence("replica_policies", given, "policies")
    if not policies:
        raise SpecError("replica_policies", replica_policies, "at least one policy")
    return [ReplicaPolicy(policy, topology=topology) for policy in policies]


def _engines(given: object) -> tuple[EngineSpec, EngineSpec]:
    if isinstance(given, TransferPlan):
        return given.producer, given.consumer
    if not isinstance(given, (tuple, list)) or len(given) != 2:  # noqa: PLR2004 - two engines
        raise SpecError("plan_or_engines", given, "a TransferPlan, or two EngineSpecs")
    return instance("producer", given[0], EngineSpec), instance("consumer", given[1], EngineSpec)


def _speeds(field: str, speed: Speed, ranks: int) -> Floats:
    given = np.asarray(speed, object)
    if given.shape not in ((), (ranks,)) or not all(map(_is_speed, given.flat)):
        raise SpecError(field, speed, f"bytes a second > 0, one number or {ranks} of them")
    return np.broadcast_to(given.astype(np.float64), (ranks,))


def _is_speed(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:
        return False


def _seconds(field: str, load: Ints, speed: Floats) -> Floats:
    with np.errstate(over="ignore"):
        found = load / speed
    if not np.isfinite(found).all():
        wanted = "bytes a second that take a finite time for every link's load"
        raise SpecError(field, float(speed.min()), wanted)
    return found
