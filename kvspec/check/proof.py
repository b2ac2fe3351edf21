"""Prove the slicing of heads: try every pair of TP sizes and every number of heads up to a bound.

Invariant: for every consumer rank, the slices tile its heads exactly once. Each slice comes from a
rank that owns those heads. The numbers of readers of two replicas differ by at most one.

How it works:
    For each triple (producer TP, consumer TP, heads) the proof gives the heads to the ranks one by
    one (`owned_heads`). Then it calls the planner's own slicing for every consumer rank and
    compares. For example, with 3 heads and TP 2 -> 3:

        rank        producer                    consumer
        0           head 0                      head 0: from producer 0
        1           heads 1 and 2               head 1: from producer 1
        2                                       head 2: from producer 1
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

import attrs

from kvspec.check.counting import shard_units
from kvspec.errors import SpecError
from kvspec.inputs import positive_int, sequence
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.replicas import (
    POLICIES,
    ReplicaChooser,
    ReplicaPolicy,
    ReplicaPolicyName,
    Topology,
    tp_chooser,
)
from kvspec.ownership.sharding import Sharding, even_sharding
from kvspec.ownership.slices import UnitRange, consumer_unit_ranges
from kvspec.ownership.stripes import times_held

LOG = logging.getLogger(__name__)
# The first head and the end of the heads of each rank.
Owned = tuple[tuple[int, int], ...]

# With both bounds the proof tries two billion consumer ranks, which takes one core about an hour.
MAX_TP = MAX_HEADS = 256


@attrs.frozen
class Proof:
    """The result of `prove`.

    Attributes:
        triples: Number of (producer TP, consumer TP, heads) that were tried.
        rank_cases: Number of consumer ranks that were checked, over all triples.
        faults: A description of the first fault of each triple and policy.
    """

    triples: int
    rank_cases: int
    faults: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether there is no fault."""
        return not self.faults


def prove(
    max_tp: int,
    max_heads: int,
    *,
    jobs: int | None = None,
    replica_policies: tuple[ReplicaPolicyName, ...] = ("spread",),
    ranks_per_node: int | None = None,
) -> Proof:
    """Check every (producer TP, consumer TP, heads) up to the bounds, on every consumer rank.

    Args:
        max_tp: Largest TP size of both engines, at most 256.
        max_heads: Largest number of heads, at most 256.
        jobs: Number of processes. One for each core by default.
        replica_policies: Names of the replica policies to check.
        ranks_per_node: Number of ranks of a node, for policies that depend on nodes. The ranks of
            both engines fill the same nodes in order.

    Returns:
        The number of cases, and the faults.

    Raises:
        SpecError: If an argument is not valid.

    Each process imports this module again, so call this function from a main module:

    >>> proof = prove(8, 8)  # doctest: +SKIP
    >>> proof.triples, proof.exact  # doctest: +SKIP
    (512, True)
    """
    positive_int("max_tp", max_tp, most=MAX_TP)
    positive_int("max_heads", max_heads, most=MAX_HEADS)
    if jobs is not None:
        positive_int("jobs", jobs)
    policies = sequence("replica_policies", replica_policies, "policies")
    if not policies:
        raise SpecError("replica_policies", replica_policies, "at least one policy")
    for policy in policies:
        _replica_policy(policy, ranks_per_node, 1, 1)
    # Programs that only plan transfers do not need these modules.
    from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: PLC0415
    from multiprocessing import get_context  # noqa: PLC0415

    triples = rank_cases = 0
    faults: list[str] = []
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet)
    try:
        # Tasks with the most heads take longest. If they ran last, most cores would be idle.
        tasks = [
            pool.submit(_prove_heads, h, max_tp, policies, ranks_per_node)
            for h in range(max_heads, 0, -1)
        ]
        for number, task in enumerate(as_completed(tasks), 1):
            ranks, wrong = task.result()
            rank_cases += ranks
            triples += max_tp * max_tp
            faults += wrong
            LOG.info("checked %d of %d numbers of heads", number, max_heads)
    finally:
        pool.shutdown(cancel_futures=True)
    return Proof(triples, rank_cases, tuple(faults))


def _quiet() -> None:
    """Ignore Ctrl-C in a worker. The parent receives it too, and ends the pool."""
    import signal  # noqa: PLC0415

    signal.signal(signal.SIGINT, signal.SIG_IGN)


def _replica_policy(
    policy: ReplicaPolicyName, ranks_per_node: int | None, producer_tp: int, consumer_tp: int
) -> ReplicaPolicy:
    if ranks_per_node is None:
        return ReplicaPolicy(policy)
    producer, consumer = ParallelConfig(tp_size=producer_tp), ParallelConfig(tp_size=consumer_tp)
    return ReplicaPolicy(policy, topology=Topology.packed(producer, consumer, ranks_per_node))


def _prove_heads(
    heads: int,
    max_tp: int,
    replica_policies: tuple[ReplicaPolicyName, ...],
    ranks_per_node: int | None = None,
) -> tuple[int, list[str]]:
    owned = [owned_heads(heads, size) for size in range(1, max_tp + 1)]
    shardings = [even_sharding(heads, size) for size in range(1, max_tp + 1)]
    ranks, faults = 0, list[str]()
    for producer, held in zip(shardings, owned, strict=True):
        for consumer, wanted in zip(shardings, owned, strict=True):
            ranks += len(wanted)
            for policy in replica_policies:
                replica_policy = _replica_policy(policy, ranks_per_node, len(held), len(wanted))
                chooser = tp_chooser(replica_policy, len(held), len(wanted))
                wrong = _fault(consumer, producer, wanted, held, chooser)
                if wrong is not None:
                    pair = f"{heads} heads, TP {len(held)} -> {len(wanted)}, {policy}"
                    faults.append(f"{pair}: {wrong}")
    return ranks, faults


def owned_heads(heads: int, tp_size: int) -> Owned:
    """Return the heads of every rank as (start, stop), counted out one by one.

    >>> owned_heads(3, 2), owned_heads(2, 4)
    (((0, 1), (1, 3)), ((0, 1), (0, 1), (1, 2), (1, 2)))
    """
    return tuple((own[0], own[-1] + 1) for own in shard_units(heads, tp_size))


def _fault(
    consumer: Sharding, producer: Sharding, wanted: Owned, held: Owned, chooser: ReplicaChooser
) -> str | None:
    """Return the first fault of one pair of TP sizes, or None."""
    reads: dict[tuple[int, ...], list[int]] = {}
    for rank, (start, stop) in enumerate(wanted):
        reached = start
        unit_ranges = consumer_unit_ranges(consumer, producer, rank, chooser)
        for source, first, end, stripe, replicas in _joined_stripes(unit_ranges):
            if first != reached or end <= first:
                return f"rank {rank}: heads {reached}.. missing or double at {first}..{end - 1}"
            if end > stop:
                over = f"heads {max(first, stop)}..{end - 1} read, although not its own"
                return f"rank {rank}: {over}"
            if not held[source][0] <= first < end <= held[source][1]:
                return f"rank {rank}: producer {source} does not own heads {first}..{end - 1}"
            if stripe.whole:
                reads.setdefault(replicas, []).append(source)
            reached = end
        if reached != stop:
            return f"rank {rank}: heads {reached}..{stop - 1} missing"
    if len(set(held)) == len(held):
        return None
    return _unfair(held, reads, everybody=chooser.policy is POLICIES["spread"])


def _unfair(held: Owned, reads: dict[tuple[int, ...], list[int]], *, everybody: bool) -> str | None:
    """Return which replicas are read unevenly, or None.

    The replicas are the ranks that the chooser chose from, or with *everybody* all ranks that own
    the same heads.
    """
    if everybody:
        sources_read = [rank for sources in reads.values() for rank in sources]
        owners = {heads: [r for r, own in enumerate(held) if own == heads] for heads in set(held)}
        reads = {tuple(ranks): [r for r in sources_read if r in ranks] for ranks in owners.values()}
    for replicas, sources in reads.items():
        counts = [sources.count(rank) for rank in replicas]
        if max(counts) - min(counts) > 1:
            return f"replicas of heads {held[replicas[0]]} are read {counts} times"
    return None


def _joined_stripes(unit_ranges: list[UnitRange]) -> Iterable[UnitRange]:
    """Return one range for each set of equal ranges, which differ only in their stripes.

    A set is left out unless its stripes together cover each virtual block exactly once. Then the
    caller finds that its heads are missing.
    """
    if all(unit_range.stripe.whole for unit_range in unit_ranges):
        return unit_ranges
    same_heads: dict[tuple[int, int], list[UnitRange]] = {}
    for unit_range in unit_ranges:
        same_heads.setdefault((unit_range.start, unit_range.stop), []).append(unit_range)
    return [
        unit_ranges[0]
        for unit_ranges in same_heads.values()
        if times_held(unit_range.stripe for unit_range in unit_ranges) == 1
    ]
