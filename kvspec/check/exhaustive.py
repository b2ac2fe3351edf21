"""The exhaustive proof: every TP pair and head count up to a bound, through the real slicing code.

Law: for every consumer rank the slices tile its heads exactly once, every slice comes from a rank
that owns those heads, and within a replica class consumers per replica differ by at most one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int, sequence
from kvspec.ownership.deals import Deal, default_deal
from kvspec.ownership.election import Replicas, check_policy
from kvspec.ownership.slices import Piece, consumer_pieces

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
    replicas: tuple[Replicas, ...] = ("spread",),
) -> Proof:
    """Try every (producer TP, consumer TP, heads) up to the bounds, on every consumer rank.

    The bounds are at most 256 each. *jobs*: processes, one for each core unless given. *progress*
    is called with the number of triples finished since its last call.
    """
    positive_int("max_tp", max_tp, most=MAX_TP)
    positive_int("max_heads", max_heads, most=MAX_HEADS)
    if jobs is not None:
        positive_int("jobs", jobs)
    policies = sequence("replicas", replicas, "policies")
    if not policies:
        raise SpecError("replicas", replicas, "at least one policy")
    for policy in policies:
        check_policy(policy)
    # Imported here: who plans a transfer does not start processes.
    from concurrent.futures import ProcessPoolExecutor, as_completed  # noqa: PLC0415
    from multiprocessing import get_context  # noqa: PLC0415

    triples = rank_cases = 0
    faults: list[str] = []
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("spawn"), initializer=_quiet)
    try:
        # Most heads first: the longest tasks should not be the last ones.
        tasks = [pool.submit(_prove_heads, h, max_tp, policies) for h in range(max_heads, 0, -1)]
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


def _prove_heads(heads: int, max_tp: int, replicas: tuple[Replicas, ...]) -> tuple[int, list[str]]:
    owned = [owned_heads(heads, size) for size in range(1, max_tp + 1)]
    deals = [default_deal(heads, size) for size in range(1, max_tp + 1)]
    ranks, faults = 0, list[str]()
    for producer, theirs in zip(deals, owned, strict=True):
        for consumer, mine in zip(deals, owned, strict=True):
            ranks += len(mine)
            for policy in replicas:
                wrong = _fault(consumer, producer, mine, theirs, policy)
                if wrong is not None:
                    pair = f"{heads} heads, TP {len(theirs)} -> {len(mine)}, {policy}"
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
    consumer: Deal, producer: Deal, mine: Owned, theirs: Owned, policy: Replicas
) -> str | None:
    """Return what is wrong with one TP pair, or None."""
    reads = [0] * len(theirs)
    for rank, (start, stop) in enumerate(mine):
        at = start
        pieces = consumer_pieces(consumer, producer, rank, policy)
        for source, first, last, stripe in pieces if policy != "stripe" else _whole(pieces):
            if first != at or last <= first:
                return f"rank {rank}: heads {at}.. missing or double at {first}..{last - 1}"
            if last > stop:
                over = f"heads {max(first, stop)}..{last - 1} read, although not its own"
                return f"rank {rank}: {over}"
            if not theirs[source][0] <= first < last <= theirs[source][1]:
                return f"rank {rank}: producer {source} does not own heads {first}..{last - 1}"
            reads[source] += stripe == (0, 1)
            at = last
        if at != stop:
            return f"rank {rank}: heads {at}..{stop - 1} missing"
    return _unfair(theirs, reads) if policy == "spread" else None


def _unfair(theirs: Owned, reads: list[int]) -> str | None:
    """Return which replicas are read unevenly, or None."""
    if len(theirs) == len(set(theirs)):
        return None
    by_class: dict[tuple[int, int], list[int]] = {}
    for own, count in zip(theirs, reads, strict=True):
        by_class.setdefault(own, []).append(count)
    for own, counts in by_class.items():
        if max(counts) - min(counts) > 1:
            return f"replicas of heads {own} are read {counts} times"
    return None


def _whole(pieces: list[Piece]) -> Iterator[Piece]:
    """Yield one piece for each range whose stripes together are every virtual block once."""
    stripes: dict[tuple[int, int], list[Piece]] = {}
    for piece in pieces:
        stripes.setdefault((piece.start, piece.stop), []).append(piece)
    for ways in stripes.values():
        firsts = sorted(way.stripe[0] for way in ways)
        if firsts == list(range(ways[0].stripe[1])):
            yield ways[0]
