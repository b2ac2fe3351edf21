"""Predict how long a transfer takes, and which link limits it, for each replica policy.

Invariant: a predicted time is a lower bound. Only bytes that a plan moves are counted, so no
transfer can be faster on these links.

How it works:
    Each rank has its own link. A link takes load / speed seconds, and the slowest link is the
    *bottleneck*: its time is the prediction. For example, DeepSeek's latent cache is replicated on
    4 producer ranks. 8 consumer engines with one rank each read 1,024 tokens of one layer, which
    are 1,179,648 bytes. All links move 50 GB/s:

        policy    bytes out of each producer rank        bottleneck
        first     9437184, 0, 0, 0                       producer tp0: 189 us
        spread    2359296, 2359296, 2359296, 2359296     producer tp0: 47 us

    Engine e uses salt e, so the policy ``spread`` rotates the choice and all links carry the same.
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
# Bytes per second of each link: one number for all ranks, or one number for each rank.
Speed = float | Sequence[float]


@attrs.frozen(kw_only=True)
class LinkTime:
    """The link of one rank in one direction.

    Attributes:
        side: Either "producer" or "consumer".
        rank: The rank.
        load: Bytes that the link carries.
        seconds: Time that the link needs for them.
    """

    side: Role
    rank: RankId
    load: int
    seconds: float

    def __str__(self) -> str:
        way = "out of" if self.side == "producer" else "into"
        return f"{way} {self.side} {self.rank}"


@attrs.frozen(kw_only=True, eq=False)
class PolicyLoad:
    """The load of every link under one policy.

    Attributes:
        replica_policy: Name of the policy.
        producer_ranks: The ranks of the producer, in the order of *out*.
        consumer_ranks: The ranks of each consumer engine, in the order of *into*.
        out: Bytes out of each producer rank to all consumer engines, as int64.
        into: Bytes into each rank of one consumer engine, as int64. All engines have the same.
        out_seconds: Time of each producer link: *out* divided by its speed.
        into_seconds: Time of each consumer link: *into* divided by its speed.
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
        """The predicted time: the longest time of any link."""
        return self.bottleneck.seconds

    @cached_property
    def bottleneck(self) -> LinkTime:
        """The link with the longest time. In a tie, a producer and the lowest rank win."""
        source, target = int(self.out_seconds.argmax()), int(self.into_seconds.argmax())
        if self.out_seconds[source] >= self.into_seconds[target]:
            return self._link("producer", source)
        return self._link("consumer", target)

    @cached_property
    def busiest(self) -> LinkTime:
        """The producer link with the most bytes. A policy changes only the producer's links."""
        return self._link("producer", int(self.out.argmax()))

    @property
    def unevenness(self) -> float:
        """Bytes of the busiest producer link divided by the mean of all: 1 is perfectly even."""
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
    """The loads under several policies. Made by `simulate`.

    Attributes:
        num_tokens: Length of the request of each consumer engine.
        consumers: Number of consumer engines.
        policies: One entry for each policy.
    """

    num_tokens: int
    consumers: int
    policies: tuple[PolicyLoad, ...]

    @property
    def best(self) -> PolicyLoad:
        """The policy with the shortest predicted time. In a tie, the first one wins."""
        return min(self.policies, key=lambda load: load.seconds)


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
    """Predict the load of every link when each consumer engine reads one request.

    The predicted time is ``max(load / speed)`` over all links. It assumes that only the ranks' own
    links limit the transfer, not a shared switch. It leaves out latency, the cost of descriptors,
    the dead bytes of partly filled blocks, and the time while one rank waits for another.

    Args:
        plan_or_engines: The producer and the consumer, or a plan between them. The policy and the
            salt of the plan are ignored.
        num_tokens: Length of each request, at least 0. The consumers have cached none of it.
        consumers: Number of engines like the consumer that read at the same time from the one
            producer. Engine e chooses with salt e.
        out_speed: Bytes per second out of each producer rank: one number, or one for each rank.
        in_speed: Bytes per second into each consumer rank: one number, or one for each rank.
        replica_policies: Names of the policies to compare. By default all of them, except those
            that need a *topology* if there is none.
        topology: The node of each rank.

    Returns:
        The loads under each policy.

    Raises:
        MismatchError: If the engines do not fit together.
        SpecError: If an argument is invalid, or all links together carry more bytes than a signed
            64-bit integer holds.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> group = KVCacheGroup(name="latent", layers=("layers.0",), spec=spec)
    >>> producer = EngineSpec(groups=(group,), parallel=ParallelConfig(tp_size=4))
    >>> consumer = EngineSpec(groups=(group,))
    >>> simulation = simulate((producer, consumer), num_tokens=1024, consumers=8)
    >>> {load.replica_policy: load.out.tolist() for load in simulation.policies
    ...     if load.replica_policy != "stripe"}
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
        # The engines of a plan fit, also if their states have different numbers of rows.
        common_states = isinstance(plan_or_engines, TransferPlan)
        plan = plan_transfer(producer, consumer, replica_policy, common_states=common_states)
        edge_flows = flows(plan, num_tokens)
        # `Flows.out` rotates the choice for each engine. Planning once for each engine would give
        # the same loads, but takes seconds for hundreds of engines.
        out, into = edge_flows.out(consumers), edge_flows.into
        load = PolicyLoad(
            replica_policy=replica_policy.name,
            producer_ranks=out_ranks,
            consumer_ranks=in_ranks,
            out=out,
            into=into,
            out_seconds=_seconds("out_speed", out, out_speeds),
            into_seconds=_seconds("in_speed", into, in_speeds),
        )
        loads.append(load)
    return Simulation(num_tokens=num_tokens, consumers=consumers, policies=tuple(loads))


def _replica_policies(
    replica_policies: Sequence[ReplicaPolicyName] | None, topology: Topology | None
) -> list[ReplicaPolicy]:
    names = known_policies(topology) if replica_policies is None else replica_policies
    policies = sequence("replica_policies", names, "policies")
    if not policies:
        raise SpecError("replica_policies", replica_policies, "at least one policy")
    return [ReplicaPolicy(policy, topology=topology) for policy in policies]


def _engines(plan_or_engines: object) -> tuple[EngineSpec, EngineSpec]:
    if isinstance(plan_or_engines, TransferPlan):
        return plan_or_engines.producer, plan_or_engines.consumer
    if not isinstance(plan_or_engines, (tuple, list)) or len(plan_or_engines) != 2:  # noqa: PLR2004 - two engines
        raise SpecError("plan_or_engines", plan_or_engines, "a TransferPlan or two EngineSpecs")
    producer, consumer = plan_or_engines
    return instance("producer", producer, EngineSpec), instance("consumer", consumer, EngineSpec)


def _speeds(field: str, speed: Speed, ranks: int) -> Floats:
    # An array of objects keeps bools and huge ints as they are, so that `_is_speed` sees them.
    speeds = np.asarray(speed, object)
    if speeds.shape not in ((), (ranks,)) or not all(map(_is_speed, speeds.flat)):
        raise SpecError(field, speed, f"bytes per second > 0, as one number or {ranks} numbers")
    return np.broadcast_to(speeds.astype(np.float64), (ranks,))


def _is_speed(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        return False
    try:
        return 0 < float(value) < math.inf
    except OverflowError:  # An int above 1.8e308 does not fit into a float.
        return False


def _seconds(field: str, load: Ints, speed: Floats) -> Floats:
    with np.errstate(over="ignore"):
        seconds = load / speed
    # A speed such as 1e-320 is more than 0, but load / speed overflows to infinity.
    if not np.isfinite(seconds).all():
        expected = "bytes per second at which every link takes a finite time"
        raise SpecError(field, float(speed.min()), expected)
    return seconds
