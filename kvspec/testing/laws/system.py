"""What the laws judge: a connector's own answers about one transfer.

Law: what is judged is an argument. A question that a system does not answer is not judged; what it
answers is held against the oracle and its cards, never against kvspec, which is one system of many.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from itertools import product
from typing import TYPE_CHECKING

import attrs

from kvspec.testing.world import (
    Copy,
    Pair,
    PreparedLists,
    World,
    described,
    plan_of,
    prepared,
    world,
)

if TYPE_CHECKING:
    from kvspec.descriptors.request import TransferRequest
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.replicas import Role
    from kvspec.testing.case import Case


@attrs.frozen(kw_only=True)
class Move:
    """Units of one part of one layer that a consumer rank reads of a producer rank.

    *units* are the model's; *producer_units* and *consumer_units* say where in what each rank holds
    they stand. *stripe* ``(first, step)``: only of the consumer's virtual blocks ``b`` with
    ``b % step == first``.
    """

    producer: RankId
    consumer: RankId
    layer: str
    part: str
    units: range
    producer_units: range
    consumer_units: range
    stripe: tuple[int, int] = (0, 1)


Ask = Callable[[World, "RankId", "RankId"], Iterable[Copy]]
AskStep = Callable[[World, "RankId", "RankId", frozenset[str], range], Iterable[Copy]]


@attrs.frozen(kw_only=True)
class System:
    """What is judged: functions that answer for a connector, None where it has no answer.

    *moves*: who reads what, asked of the consumers or of the producers. *tells*: the pairs
    (producer rank, consumer rank) of which the consumer tells the producer that it is done, asked
    of either.
    *descriptors*: the copies (producer address, consumer address, length) of a world's request
    between two ranks; *prepared*: lists of rows and ids that mean the same; *steps*: the copies of
    one step, of some layers, which moves on from a range's start to its stop. A world has both
    engines, the request and every rank's cache: see `kvspec.testing.world.World`. Whoever cannot
    serve a case raises `MismatchError`, which no law catches but the one about refusals.
    """

    name: str
    moves: Callable[[Case, Role], Iterable[Move]] | None = None
    tells: Callable[[Case, Role], Iterable[Pair]] | None = None
    descriptors: Ask | None = None
    prepared: Callable[[World, RankId, RankId], PreparedLists | None] | None = None
    steps: AskStep | None = None

    def ways(self) -> Iterator[tuple[str, Ask]]:
        """Yield every way in which the system names its copies."""
        if self.descriptors is not None:
            yield "descriptors", self.descriptors
        if self.prepared is not None:
            yield "ids", self._by_ids

    def _by_ids(self, here: World, producer: RankId, consumer: RankId) -> Iterable[Copy]:
        lists = None if self.prepared is None else self.prepared(here, producer, consumer)
        return [] if lists is None else lists.copies()


Copies = dict[Pair, list[Copy]]


@attrs.frozen
class Trial:
    """A system and a case that judges it; the world and the copies are made once for all laws.

    Its consumers hold what was copied last: `deliver` gives them first what they had before.
    """

    system: System
    case: Case
    _world: World | None = None
    _moves: dict[Role, list[Move]] = attrs.field(factory=dict, init=False, repr=False, eq=False)
    _made: dict[str, Copies] = attrs.field(factory=dict, init=False, repr=False, eq=False)

    @cached_property
    def world(self) -> World:
        """The case with its memory."""
        return self._world or world(self.case)

    def asking(self, request: TransferRequest) -> Trial:
        """Return the trial of another *request* over the memory of this one."""
        here = self.world.asking(request)
        return Trial(self.system, here.case, here)

    def moves(self, role: Role) -> list[Move]:
        """Return who reads what, asked of one side; nothing where the system has no answer."""
        if role not in self._moves:
            ask = self.system.moves
            self._moves[role] = [] if ask is None else list(ask(self.case, role))
        return self._moves[role]

    def copies(self) -> Iterator[tuple[str, Copies]]:
        """Yield each way in which the system names its copies, and what it copies so."""
        for name, way in self.system.ways():
            if name not in self._made:
                self._made[name] = copied(self.world, way)
            yield name, self._made[name]


def deliver(here: World, copies: Copies) -> None:
    """Do what *copies* say, and nothing else, to the consumers of a world."""
    here.restore()
    for pair, found in copies.items():
        here.copy(pair, found)


def copied(here: World, way: Ask) -> Copies:
    """Return what *way* copies between each pair of ranks, as plain ints."""
    pairs = product(here.producers, here.consumers)
    return {pair: [ints(each) for each in way(here, *pair)] for pair in pairs}


def ints(copy: Iterable[int]) -> Copy:
    """Return *copy* as plain ints."""
    source, place, length = map(int, copy)
    return source, place, length


def _moves(case: Case, role: Role) -> Iterator[Move]:
    plan = plan_of(case)
    if role == "consumer":
        ranks = case.consumer.parallel.ranks
        pairs = [(source, rank) for rank in ranks for source in plan.sources(rank)]
    else:
        ranks = case.producer.parallel.ranks
        pairs = [(rank, target) for rank in ranks for target in plan.targets(rank)]
    for edge in (edge for pair in pairs for edge in plan.between(*pair)):
        for each in edge.slices:
            for layer, part in product(each.layers, each.parts):
                yield Move(
                    producer=edge.producer,
                    consumer=edge.consumer,
                    layer=layer,
                    part=part,
                    units=each.global_range,
                    producer_units=each.remote_range,
                    consumer_units=each.local_range,
                    stripe=(each.stripe.first, each.stripe.step),
                )


def _tells(case: Case, role: Role) -> Iterator[Pair]:
    plan = plan_of(case)
    if role == "consumer":
        yield from ((p, c) for c in case.consumer.parallel.ranks for p in plan.notifies(c))
    else:
        yield from ((p, c) for p in case.producer.parallel.ranks for c in plan.notifiers(p))


def _descriptors(here: World, producer: RankId, consumer: RankId) -> Iterable[Copy]:
    if not here.plan.between(producer, consumer):
        return []
    return described(here.table(producer, consumer), here.case.request)


def _prepared(here: World, producer: RankId, consumer: RankId) -> PreparedLists | None:
    if not here.plan.between(producer, consumer):
        return None
    return prepared(here.table(producer, consumer), here.case.request)


def _steps(
    here: World, producer: RankId, consumer: RankId, layers: frozenset[str], tokens: range
) -> Iterable[Copy]:
    if not here.plan.between(producer, consumer):
        return []
    table = here.table(producer, consumer, layers)
    return described(table, here.case.request, tokens)


KVSPEC = System(
    name="kvspec",
    moves=_moves,
    tells=_tells,
    descriptors=_descriptors,
    prepared=_prepared,
    steps=_steps,
)
"""The library itself."""
