"""The exhaustive proof: every TP pair and head count up to a bound, through the real slicing code.

Law: for every consumer rank the slices tile its heads exactly once, every slice comes from a rank
that owns those heads, and within a replica class consumers per replica differ by at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import attrs

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

Owned = tuple[tuple[int, int], ...]

MAX_TP = MAX_HEADS = 256
"""Both at once are two thousand million consumer ranks: about an hour of one core."""


@attrs.frozen
class Proof:
    """How much was tried, and what was not exact: *faults* holds at most one for each triple."""

    triples: int
    rank_cases: int
    faults: tuple[str, ...]

    @property
    def exact(self) -> bool:
        """Whether every case was exact."""
        return not self.faults


def prove(
    max_tp: int,
    max_heads: int,
    *,
    jobs: int | None = None,
    progress: Callable[[int], None] | None = None,
    replica_policies: tuple[ReplicaPolicyName, ...] = ("spread",),
    ranks_per_node: int | None = None,
) -> Proof:
    """Try every (producer TP, consumer TP, heads) up to the bounds, on every consumer rank.

    The bounds are at most 256 each. *jobs*: processes, one for each core unless given. *progress*
    is called with the number of triples finished since its last call. *ranks_per_node*: for
    policies that ask for nodes; both engines' ranks fill the same nodes in order.
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
    # Imported here: who plans a transfer does not start processes.
    from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: PLC0415
    from multiprocessing import get_context  # noqa: PLC0415

    triples = rank_cases = 0
    faults: list[str] = []
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet)
    try:
        # Most heads first: the longest tasks should not be the last ones.
        tasks = [
            pool.submit(_prove_heads, h, max_tp, policies, ranks_per_node)
            for h in range(max_heads, 0, -1)
        ]
        for task in as_completed(tasks):
            ranks, wrong = task.result()
            rank_cases += ranks
            triples += max_tp * max_tp
            faults += wrong
            if progress is not None:
                progress(max_tp * max_tp)
    finally:
        pool.shutdown(cancel_futures=True)
    return Proof(triples, rank_cases, tuple(faults))


def _quiet() -> None:
    """Leave an interrupt to the parent, which ends the pool."""
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
    """Return [start, stop) of every rank, by giving out the heads one by one.

    With as many heads as ranks or more, head h goes to the last rank whose share begins at or
    before it; with fewer, every rank takes the head under its place.
    """
    if heads < tp_size:
        return tuple(
            (rank * heads // tp_size, rank * heads // tp_size + 1) for rank in range(tp_size)
        )
    shares: list[list[int]] = [[] for _ in range(tp_size)]
    rank = 0
    for head in range(heads):
        while rank + 1 < tp_size and (rank + 1) * heads < (head + 1) * tp_size:
            rank += 1
        shares[rank].append(head)
    return tuple((share[0], share[-1] + 1) for share in shares)


def _fault(
    consumer: Sharding, producer: Sharding, wanted: Owned, held: Owned, chooser: ReplicaChooser
) -> str | None:
    """Return what is wrong with one TP pair, or None."""
    reads: dict[tuple[int, ...], list[int]] = {}
    for rank, (start, stop) in enumerate(wanted):
        reached = start
        for source, first, last, stripe, equals in _whole(
            consumer_unit_ranges(consumer, producer, rank, chooser)
        ):
            if first != reached or last <= first:
                return f"rank {rank}: heads {reached}.. missing or double at {first}..{last - 1}"
            if last > stop:
                over = f"heads {max(first, stop)}..{last - 1} read, although not its own"
                return f"rank {rank}: {over}"
            if not held[source][0] <= first < last <= held[source][1]:
                return f"rank {rank}: producer {source} does not own heads {first}..{last - 1}"
            if stripe.whole:
                reads.setdefault(equals, []).append(source)
            reached = last
        if reached != stop:
            return f"rank {rank}: heads {reached}..{stop - 1} missing"
    if len(set(held)) == len(held):
        return None
    return _unfair(held, reads, everybody=chooser.policy is POLICIES["spread"])


def _unfair(held: Owned, reads: dict[tuple[int, ...], list[int]], *, everybody: bool) -> str | None:
    """Return which equal ranks are read unevenly, or None.

    Equal are those among which a reader chosen, or *everybody* that owns the same heads.
    """
    if everybody:
        every = [rank for sources in reads.values() for rank in sources]
        owners = {own: [r for r, other in enumerate(held) if other == own] for own in set(held)}
        reads = {tuple(ranks): [r for r in every if r in ranks] for ranks in owners.values()}
    for equals, sources in reads.items():
        counts = [sources.count(rank) for rank in equals]
        if max(counts) - min(counts) > 1:
            return f"replicas of heads {held[equals[0]]} are read {counts} times"
    return None


def _whole(unit_ranges: list[UnitRange]) -> Iterable[UnitRange]:
    """Return one range for each range whose stripes together are every virtual block once."""
    if all(unit_range.stripe.whole for unit_range in unit_ranges):
        return unit_ranges
    ways: dict[tuple[int, int], list[UnitRange]] = {}
    for unit_range in unit_ranges:
        ways.setdefault((unit_range.start, unit_range.stop), []).append(unit_range)
    return [
        unit_ranges[0]
        for unit_ranges in ways.values()
        if times_held(unit_range.stripe for unit_range in unit_ranges) == 1
    ]
