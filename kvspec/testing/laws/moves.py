"""The laws of who reads whom: stated over every unit and position that each consumer rank owns."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from math import lcm
from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.testing.carve import rank_layers, rank_units
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
from kvspec.testing.positions import context_of

if TYPE_CHECKING:
    import numpy.typing as npt

    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part
    from kvspec.testing.case import Case
    from kvspec.testing.laws.system import Move, Trial

Arrivals = dict[tuple["RankId", str, str], "list[Move]"]


def _by_target(trial: Trial) -> Arrivals:
    """Return what moves to each consumer rank, by layer and part."""
    found: Arrivals = defaultdict(list)
    for each in trial.moves("consumer"):
        found[each.consumer, each.layer, each.part].append(each)
    return found


def cover(trial: Trial) -> Iterator[str]:
    """Yield each part that is not read once at each of its positions, and what is read in vain."""
    if trial.system.moves is None:
        return
    case, arriving = trial.case, _by_target(trial)
    for target in targets(case.consumer, case.producer):
        moves = arriving.pop((target.rank, target.layer, target.part.name), [])
        size = context_of(case.consumer, target.rank, target.group)[1]
        virtual = target.group.spec.block_size * size
        far = _horizon(case, moves, virtual)
        wanted = owns(case.consumer, target.rank, target.part, target.group, far)
        times = _times(case, target, moves, far, virtual)
        for place, position in np.argwhere(times != wanted).tolist()[:1]:
            unit = rank_units(case.consumer, target.rank, target.part, target.group)[place]
            yield (
                f"consumer {target.rank}, layer {target.layer}, part {target.part.name}, unit "
                f"{unit}, position {position}: read {times[place, position]} times from a rank "
                f"that holds it, expected {int(wanted[position])}"
            )
    for rank, layer, part in arriving:
        yield f"consumer {rank}, layer {layer}, part {part}: read, but nothing of it should move"


def _horizon(case: Case, moves: list[Move], virtual: int) -> int:
    """Return how many positions show all that two engines and the stripes of *moves* do."""
    steps = max((each.stripe[1] for each in moves), default=1)
    return min(2 * lcm(horizon(case.producer, case.consumer), virtual * steps), FAR)


def _times(
    case: Case, target: Target, moves: list[Move], far: int, virtual: int
) -> npt.NDArray[np.int64]:
    """Count how often each (place, position) of *target* is sent by a rank that owns it."""
    own = rank_units(case.consumer, target.rank, target.part, target.group)
    found = np.zeros((len(own), far), np.int64)
    block, group = np.arange(far) // virtual, home(case.producer, target.layer)
    for each in moves:
        if target.layer not in rank_layers(case.producer, each.producer, group):
            continue
        held = rank_units(case.producer, each.producer, target.part, group)
        sent = owns(case.producer, each.producer, target.part, group, far)
        sent = sent & owns(case.consumer, target.rank, target.part, target.group, far)
        sent = sent & (block % each.stripe[1] == each.stripe[0])
        for place, source in zip(each.consumer_units, each.producer_units, strict=False):
            if place < len(own) and source < len(held) and own[place] == held[source]:
                found[place] += sent
    return found


def symmetry(trial: Trial) -> Iterator[str]:
    """Yield what one side would move and the other would not, and what swapping does not swap."""
    ask, case = trial.system.moves, trial.case
    if ask is None:
        return
    pulled, pushed = set(trial.moves("consumer")), set(trial.moves("producer"))
    yield from (f"pulled and not pushed: {each}" for each in pulled - pushed)
    yield from (f"pushed and not pulled: {each}" for each in pushed - pulled)
    if has_replicas(case.producer) or has_replicas(case.consumer):
        return
    back = attrs.evolve(
        case, producer=case.consumer, consumer=case.producer, replica_policy="spread"
    )
    swapped = {
        attrs.evolve(
            each,
            producer=each.consumer,
            consumer=each.producer,
            producer_units=each.consumer_units,
            consumer_units=each.producer_units,
        )
        for each in ask(back, "consumer")
    }
    for each in pulled ^ swapped:
        yield f"without replicas, one way only: {each}"


def identity(trial: Trial) -> Iterator[str]:
    """Yield each move that is empty, or is not of the same units at both ends."""
    case = trial.case
    known = {(t.rank, t.layer, t.part.name): t.part for t in targets(case.consumer, case.producer)}
    for (rank, layer, name), moves in _by_target(trial).items():
        part = known.get((rank, layer, name))
        for each in moves:
            units = list(each.units)
            ends = [
                _units_at(case.producer, each.producer, layer, part, each.producer_units),
                _units_at(case.consumer, rank, layer, part, each.consumer_units),
            ]
            if not units or ends != [units, units]:
                yield f"{each}: expected the same units at both ends, got {ends[0]} and {ends[1]}"


def _units_at(
    engine: EngineSpec, rank: RankId, layer: str, part: Part | None, places: range
) -> list[int]:
    """Return the units that *rank* holds at *places*; no more than it has."""
    own = [] if part is None else rank_units(engine, rank, part, home(engine, layer))
    return [own[place] for place in places if place < len(own)]


ROUNDS = 7
"""Virtual blocks over which stripes are counted."""


def fair(trial: Trial) -> Iterator[str]:
    """Yield each replica class whose members are not read as the policy says.

    Evenly among those that readers choose among, counted in readers; under `stripe`, in virtual
    blocks that each reader reads. Under `first` that is the first alone, under `nearest` those on
    the reader's node, if there are any.
    """
    if trial.system.moves is None:
        return
    case, arriving = trial.case, _by_target(trial)
    policy = case.replica_policy.name
    for counted in counted_replicas(case.producer, case.consumer):
        where = f"{counted.layers[0]}.{counted.part.name}"
        blocks = range(ROUNDS if policy == "stripe" else 1)
        loads: dict[tuple[RankId, ...], Counter[RankId]] = {}
        for reader in counted.consumers:
            read = {
                (each.producer, block)
                for layer in counted.layers
                for each in arriving.get((reader, layer, counted.part.name), ())
                if each.producer in counted.replicas and counted.units & set(each.units)
                for block in blocks
                if block % each.stripe[1] == each.stripe[0]
            }
            among = _candidates(case, counted.replicas, reader)
            load = loads.setdefault(among, Counter(dict.fromkeys(among, 0)))
            load.update(source for source, _ in read)
            for source in sorted({source for source, _ in read} - set(among)):
                yield f"{reader} reads {where} of {source}, not of one that {policy} chooses among"
        for load in loads.values():
            if max(load.values()) - min(load.values()) > 1:
                told = ", ".join(f"{rank} {count}" for rank, count in load.items())
                yield f"{where}: replicas are read unevenly: {told}"


def _candidates(case: Case, members: Sequence[RankId], reader: RankId) -> tuple[RankId, ...]:
    """Return the replicas among which the case's policy chooses for one reader."""
    nodes, policy = case.replica_policy.topology, case.replica_policy.name
    if policy == "nearest" and nodes is not None:
        near = (rank for rank in members if nodes.producer[rank] == nodes.consumer[reader])
        return tuple(near) or tuple(members)
    return tuple(members[:1] if policy == "first" else members)


def counts(trial: Trial) -> Iterator[str]:
    """Yield each producer rank that its readers do not tell, nobody tells, or the wrong ones."""
    ask, case = trial.system.tells, trial.case
    if ask is None:
        return
    tell, told = (set(ask(case, role)) for role in ("consumer", "producer"))
    yield from (f"{c} tells {p}, which does not wait for it" for p, c in tell - told)
    yield from (f"{p} waits for {c}, which does not tell it" for p, c in told - tell)
    for rank in case.producer.parallel.ranks:
        if rank not in {p for p, _ in told}:
            yield f"producer {rank} is told by nobody, and never releases a block"
    for p, c in {(each.producer, each.consumer) for each in trial.moves("consumer")} - told:
        yield f"{c} reads {p}, which does not wait for it"
