"""Prove the slicing of heads: try every pair of TP sizes and every number of heads up to a bound.

Invariant: for every consumer rank, the slices tile its heads exactly once, in each virtual block.
Each slice comes from a rank that owns those heads. The numbers of readers of two replicas differ
by at most one. Under `stripe`, this holds for the numbers of virtual blocks that are read.

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
    ReplicaChooser,
    ReplicaPolicy,
    ReplicaPolicyName,
    Topology,
    tp_chooser,
)
from kvspec.ownership.sharding import Sharding, even_sharding
from kvspec.ownership.slices import UnitRange, consumer_unit_ranges

LOG = logging.getLogger(__name__)
# The first head and the end of the heads of each rank.
Owned = tuple[tuple[int, int], ...]
# The producer rank of each virtual block that one consumer rank reads. After the last one, they
# repeat.
SourceRanks = tuple[int, ...]

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
    if jobs is not None:
        jobs = min(jobs, max_heads)  # The pool starts all processes, and there are no more tasks.
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
    everybody = chooser.policy.candidates is None
    # The sources of each reader, by the replicas that it chose from or by the heads that they own.
    reads: dict[tuple[int, ...], list[SourceRanks]] = {}
    for rank, (start, stop) in enumerate(wanted):
        reached = start
        unit_ranges = consumer_unit_ranges(consumer, producer, rank, chooser)
        for first, end, sources, replicas in _with_sources(unit_ranges):
            if first != reached or end <= first:
                return f"rank {rank}: heads {reached}.. missing or double at {first}..{end - 1}"
            if end > stop:
                over = f"heads {max(first, stop)}..{end - 1} read, although not its own"
                return f"rank {rank}: {over}"
            for source in sources:
                # Python would take a negative number as an index from the end.
                own = held[source] if 0 <= source < len(held) else (0, 0)
                if not own[0] <= first < end <= own[1]:
                    return f"rank {rank}: producer {source} does not own heads {first}..{end - 1}"
            reads.setdefault(held[sources[0]] if everybody else replicas, []).append(sources)
            reached = end
        if reached != stop:
            return f"rank {rank}: heads {reached}..{stop - 1} missing"
    if len(set(held)) == len(held):
        return None
    if everybody:
        reads = {tuple(ranks): reads.get(own, []) for own, ranks in _owners(held).items()}
    return _unfair(held, reads, striped=chooser.policy.striped)


def _owners(held: Owned) -> dict[tuple[int, int], list[int]]:
    """Return the ranks that own the same heads, by heads."""
    owners: dict[tuple[int, int], list[int]] = {}
    for rank, own in enumerate(held):
        owners.setdefault(own, []).append(rank)
    return owners


def _unfair(
    held: Owned, reads: dict[tuple[int, ...], list[SourceRanks]], *, striped: bool
) -> str | None:
    """Return which replicas are read unevenly, or None.

    *reads* has the sources of each reader, by replicas. If the policy is *striped*, the reads are
    compared after each virtual block. After as many blocks as replicas, they repeat.
    """
    for replicas, readers in reads.items():
        counts = dict.fromkeys(replicas, 0)
        for block in range(len(replicas) if striped else 1):
            for sources in readers:
                source = sources[block % len(sources)]
                counts[source] = counts.get(source, 0) + 1
            if max(counts.values()) - min(counts.values()) > 1:
                shown = list(counts.values())
                return f"replicas of heads {held[replicas[0]]} are read {shown} times"
    return None


def _with_sources(
    unit_ranges: list[UnitRange],
) -> Iterable[tuple[int, int, SourceRanks, tuple[int, ...]]]:
    """Yield start, stop, sources and replicas of each set of equal ranges.

    The ranges of a set differ only in their stripes. A set is left out unless each virtual block
    has exactly one source. Then the caller finds that its heads are missing.
    """
    if all(unit_range.stripe.whole for unit_range in unit_ranges):
        for unit_range in unit_ranges:
            yield unit_range.start, unit_range.stop, (unit_range.producer,), unit_range.replicas
        return
    same_heads: dict[tuple[int, int], list[UnitRange]] = {}
    for unit_range in unit_ranges:
        same_heads.setdefault((unit_range.start, unit_range.stop), []).append(unit_range)
    for (start, stop), stripes in same_heads.items():
        step = stripes[0].stripe.step
        sources = {unit_range.stripe.first: unit_range.producer for unit_range in stripes}
        one_each = len(stripes) == step and sorted(sources) == list(range(step))
        if one_each and all(unit_range.stripe.step == step for unit_range in stripes):
            in_order = tuple(sources[block] for block in range(step))
            yield start, stop, in_order, stripes[0].replicas
