"""The laws of moves: which consumer rank reads which units from which producer rank.

Laws 1 (exact cover), 3 (symmetry), 5 (identity), 6 (fair) and 7 (counts). They need no memory, but
law 7 looks at the copies of a system that answers them.

How it works:
    The oracle counts for each consumer rank which units and token positions it owns. `cover`
    compares the counts of reads with it. Example: 2 heads, TP 2 on the producer, TP 1 on the
    consumer, and a system that forgets the second producer rank:

        unit        0  0  0  0    1  1  1  1
        token       0  1  2  3    0  1  2  3
        reads       1  1  1  1    0  0  0  0
        expected    1  1  1  1    1  1  1  1

    The law reports the first difference: unit 1, token 0, expected 1 read, got 0. A move counts
    only if the producer rank holds the unit and the token, so a read from a wrong rank is 0 too.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import lcm
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.check.counting import context_of, rank_layers, rank_units
from kvspec.testing.laws.owners import (
    FAR,
    Target,
    counted_replicas,
    has_replicas,
    home,
    horizon,
    owns,
    targets,
)
from kvspec.testing.laws.system import moves_of, pairs_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import Move, Trial
    from kvspec.testing.world import Pair

Arrivals = dict[tuple["RankId", str, str], "list[Move]"]


def _by_target(trial: Trial) -> Arrivals:
    """Return the moves to each consumer rank, by layer and part."""
    arrivals: Arrivals = defaultdict(list)
    for move in trial.moves("consumer"):
        arrivals[move.consumer, move.layer, move.part].append(move)
    return arrivals


def _named(move: Move) -> str:
    """Return the ranks, the layer, the part and the units of *move* for a message."""
    return (
        f"producer {move.producer}, consumer {move.consumer}, layer {move.layer}, part {move.part},"
        f" units {list(move.units)}"
    )


def cover(trial: Trial) -> Iterator[str]:
    """Yield each part with a unit and position that is not read once, and each needless read.

    Only the first wrong position of a part is named.
    """
    if trial.system.moves is None:
        return
    case, arriving = trial.case, _by_target(trial)
    for target in targets(case.consumer, case.producer):
        moves = arriving.pop((target.rank, target.layer, target.part.name), [])
        size = context_of(case.consumer, target.rank, target.group)[1]
        virtual = target.group.spec.block_size * size
        far = _horizon(case, moves, virtual)
        owned = owns(case.consumer, target.rank, target.part, target.group, far)
        times = _times(case, target, moves, far, virtual)
        for place, position in np.argwhere(times != owned).tolist()[:1]:
            unit = rank_units(case.consumer, target.rank, target.part, target.group)[place]
            reads = "1 read" if owned[position] else "no reads"
            yield (
                f"consumer {target.rank}, layer {target.layer}, part {target.part.name}, unit "
                f"{unit}, token {position}: expected {reads} from a producer rank that holds it, "
                f"got {times[place, position]}"
            )
    for (rank, layer, part), moves in arriving.items():
        yield f"consumer {rank}, layer {layer}, part {part}: expected no reads, got {len(moves)}"


def _horizon(case: Case, moves: list[Move], virtual: int) -> int:
    """Return the number of positions to check, at most `FAR`.

    They are two periods. After one period, the context ranks of both engines and the stripes of all
    moves repeat.
    """
    steps = max((move.stripe[1] for move in moves), default=1)
    return min(2 * lcm(horizon(case.producer, case.consumer), virtual * steps), FAR)


def _times(
    case: Case, target: Target, moves: list[Move], far: int, virtual: int
) -> npt.NDArray[np.int64]:
    """Return how often each (place, position) of *target* is read from a rank that owns it.

    A place is an index into the units that the consumer rank holds.
    """
    own = rank_units(case.consumer, target.rank, target.part, target.group)
    times = np.zeros((len(own), far), np.int64)
    block, group = np.arange(far) // virtual, home(case.producer, target.layer)
    for move in moves:
        if target.layer not in rank_layers(case.producer, move.producer, group):
            continue
        held = rank_units(case.producer, move.producer, target.part, group)
        sent = owns(case.producer, move.producer, target.part, group, far)
        sent = sent & owns(case.consumer, target.rank, target.part, target.group, far)
        sent = sent & (block % move.stripe[1] == move.stripe[0])
        # A place that a rank does not have is not a read. `identity` reports it.
        for place, source in zip(move.consumer_units, move.producer_units, strict=False):
            if place < len(own) and source < len(held) and own[place] == held[source]:
                times[place] += sent
    return times


def symmetry(trial: Trial) -> Iterator[str]:
    """Yield each move that only one side computes, and each move that swapping does not swap."""
    ask, case = trial.system.moves, trial.case
    if ask is None:
        return
    pulled, pushed = set(trial.moves("consumer")), set(trial.moves("producer"))
    for move in pulled - pushed:
        yield f"{_named(move)}: the consumer pulls this, but the producer does not push it"
    for move in pushed - pulled:
        yield f"{_named(move)}: the producer pushes this, but the consumer does not pull it"
    # The choice among replicas need not be the same in both directions.
    if has_replicas(case.producer) or has_replicas(case.consumer):
        return
    # The policy stays, because the system may support no other one.
    policy = case.replica_policy
    if (nodes := policy.topology) is not None:
        swapped_nodes = attrs.evolve(nodes, producer=nodes.consumer, consumer=nodes.producer)
        policy = attrs.evolve(policy, topology=swapped_nodes)
    back = attrs.evolve(case, producer=case.consumer, consumer=case.producer, replica_policy=policy)
    swapped = {
        attrs.evolve(
            move,
            producer=move.consumer,
            consumer=move.producer,
            producer_units=move.consumer_units,
            consumer_units=move.producer_units,
        )
        for move in moves_of(ask(back, "consumer"), back)
    }
    for move in pulled ^ swapped:
        yield f"{_named(move)}: expected this move in both directions, got it in only one"


def identity(trial: Trial) -> Iterator[str]:
    """Yield each move without units, or with different units at its two ends."""
    case = trial.case
    parts = {(t.rank, t.layer, t.part.name): t.part for t in targets(case.consumer, case.producer)}
    for (rank, layer, name), moves in _by_target(trial).items():
        part = parts.get((rank, layer, name))
        for move in moves:
            units = list(move.units)
            ends = [
                _units_at(case.producer, move.producer, layer, part, move.producer_units),
                _units_at(case.consumer, rank, layer, part, move.consumer_units),
            ]
            if not units or ends != [units, units]:
                yield (
                    f"{_named(move)}: expected these units at both ends, got {ends[0]} on the "
                    f"producer and {ends[1]} on the consumer"
                )


def _units_at(
    engine: EngineSpec, rank: RankId, layer: str, part: Part | None, places: range
) -> list[int]:
    """Return the units that *rank* holds at *places*. Places that it lacks are skipped."""
    own = [] if part is None else rank_units(engine, rank, part, home(engine, layer))
    return [own[place] for place in places if place < len(own)]


# Number of virtual blocks over which stripes are counted.
ROUNDS = 7


def fair(trial: Trial) -> Iterator[str]:
    """Yield each replica class that is not read as the replica policy requires.

    The unit of counting is a reader, or under `stripe` a virtual block that a reader reads.
    """
    if trial.system.moves is None:
        return
    case, arriving = trial.case, _by_target(trial)
    policy = case.replica_policy.name
    for counted in counted_replicas(case.producer, case.consumer):
        where = f"layer {counted.layers[0]}, part {counted.part.name}"
        blocks = range(ROUNDS if policy == "stripe" else 1)
        loads: dict[tuple[RankId, ...], Counter[RankId]] = {}
        for reader in counted.consumers:
            read = {
                (move.producer, block)
                for layer in counted.layers
                for move in arriving.get((reader, layer, counted.part.name), ())
                if move.producer in counted.replicas and counted.units & set(move.units)
                for block in blocks
                if block % move.stripe[1] == move.stripe[0]
            }
            among = _candidates(case, counted.replicas, reader)
            load = loads.setdefault(among, Counter(dict.fromkeys(among, 0)))
            load.update(source for source, _ in read)
            for source in sorted({source for source, _ in read} - set(among)):
                yield (
                    f"consumer {reader}, {where}: expected a read from producer "
                    f"{' or '.join(map(str, among))} under policy {policy!r}, got {source}"
                )
        for load in loads.values():
            if max(load.values()) - min(load.values()) > 1:
                reads = ", ".join(f"{count} from {rank}" for rank, count in load.items())
                yield f"{where}: expected numbers of reads that differ by at most 1, got {reads}"


def _candidates(case: Case, members: Sequence[RankId], reader: RankId) -> tuple[RankId, ...]:
    """Return the replicas among which the replica policy of *case* chooses for *reader*."""
    nodes, policy = case.replica_policy.topology, case.replica_policy.name
    if policy == "nearest" and nodes is not None:
        near = (rank for rank in members if nodes.producer[rank] == nodes.consumer[reader])
        return tuple(near) or tuple(members)
    return tuple(members[:1] if policy == "first" else members)


def counts(trial: Trial) -> Iterator[str]:
    """Yield each pair of ranks on which both sides disagree, and each producer without a pair."""
    ask, case = trial.system.tells, trial.case
    if ask is None:
        return
    sent, awaited = (pairs_of(ask(case, role)) for role in ("consumer", "producer"))
    for p, c in sent - awaited:
        yield f"consumer {c} notifies producer {p}, but the producer does not wait for it"
    for p, c in awaited - sent:
        yield f"producer {p} waits for consumer {c}, but the consumer does not notify it"
    # Also a rank that is not read must learn that it may release its blocks.
    for rank in case.producer.parallel.ranks:
        if rank not in {p for p, _ in awaited}:
            yield f"producer {rank}: expected 1 or more notifications, got 0: it keeps its blocks"
    for p, c in _reads(trial) - awaited:
        yield f"consumer {c} reads from producer {p}, but the producer does not wait for it"


def _reads(trial: Trial) -> set[Pair]:
    """Return the pairs of ranks that read, as far as the system answers which ones do."""
    reads = {(move.producer, move.consumer) for move in trial.moves("consumer")}
    for _, copies in trial.copies():
        reads |= {pair for pair, pair_copies in copies.items() if pair_copies}
    return reads
