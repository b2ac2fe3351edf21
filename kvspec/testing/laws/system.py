"""The system that the laws judge: functions that describe what a connector does in one transfer.

Invariant: a law compares the answers of a system with the oracle, never with the library. `KVSPEC`
wraps the library itself as a system. A question that a system does not answer is not judged.

How it works:
    A system answers some of nine questions, on five levels. Each enables the laws beside it:

        level               question     answer                                        laws
        a, rank mapping     moves        which rank reads which units of which rank    1 3 5 6 11
                            tells        which consumer rank notifies which producer   7
        b, byte copies      descriptors  (producer address, consumer address, bytes)   1 4 8-11 14
                            prepared     rows and ids, as NIXL prepares them           1 4 8-11 14
                            steps        copies of one step of a schedule              13
        c, release          release      a state machine that frees blocks             12
        d, a whole one      connector    it has moved the bytes itself                 1 10 11 14
        e, stored pages     names        the name of each whole page of a prompt       15
                            pages        a store that saves and loads pages            16

    The laws of bytes allocate real memory for a case (`World`), and execute the copies there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import product
from operator import index
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.errors import KVSpecError
from kvspec.ownership.parallel import RankId
from kvspec.testing.supports import EVERYTHING, Supports
from kvspec.testing.world import (
    ByteCopy,
    Held,
    Pair,
    PreparedLists,
    World,
    WrongFormError,
    described,
    plan_of,
    prepared,
    world,
)

if TYPE_CHECKING:
    from kvspec.descriptors.request import TransferRequest
    from kvspec.ownership.replicas import Role
    from kvspec.stored.names import ModelIdentity, PromptIdentity
    from kvspec.stored.placement import StoredSpec
    from kvspec.testing.case import Case


def _instance(of: type) -> Callable[[object, Any, Any], None]:
    def check(move: object, field: Any, value: Any) -> None:  # noqa: ANN401
        del move
        if not isinstance(value, of):
            raise WrongFormError(f"a Move has {field.name}={value!r}: expected a {of.__name__}")

    return check


def _numbers(move: object, field: Any, value: Any) -> None:  # noqa: ANN401
    """Check that *value* is a range. Lists and arrays have no hash, and laws compare sets."""
    del move
    if not isinstance(value, range) or (value and min(value[0], value[-1]) < 0):
        expected = "a range of numbers >= 0"
        raise WrongFormError(f"a Move has {field.name}={value!r}: expected {expected}")


def _stripe(move: object, field: Any, value: Any) -> None:  # noqa: ANN401
    del move
    are_ints = isinstance(value, tuple) and [type(number) for number in value] == [int, int]
    if not are_ints or not 0 <= value[0] < value[1]:
        expected = "two ints (first, step), with 0 <= first < step"
        raise WrongFormError(f"a Move has {field.name}={value!r}: expected {expected}")


@attrs.frozen(kw_only=True)
class Move:
    """Units of one part of one layer that a consumer rank reads from a producer rank.

    Attributes:
        producer: The rank that holds the units.
        consumer: The rank that reads them.
        layer: Name of the layer.
        part: Name of the part, such as "k".
        units: Numbers of the units in the model, such as heads.
        producer_units: Places of the units among those that the producer rank holds.
        consumer_units: Places of the units among those that the consumer rank holds.
        stripe: `(first, step)`: only the consumer's virtual blocks `b` with `b % step == first`.

    Raises:
        WrongFormError: If a field has another form, so that the laws could not compare the move.

    Example: a consumer rank with the heads 2 and 3 reads head 3 from a rank that holds only head 3.

    >>> from kvspec import RankId
    >>> Move(
    ...     producer=RankId(tp=3), consumer=RankId(tp=1), layer="l", part="k", units=range(3, 4),
    ...     producer_units=range(0, 1), consumer_units=range(1, 2),
    ... ).stripe
    (0, 1)
    """

    producer: RankId = attrs.field(validator=_instance(RankId))
    consumer: RankId = attrs.field(validator=_instance(RankId))
    layer: str = attrs.field(validator=_instance(str))
    part: str = attrs.field(validator=_instance(str))
    units: range = attrs.field(validator=_numbers)
    producer_units: range = attrs.field(validator=_numbers)
    consumer_units: range = attrs.field(validator=_numbers)
    stripe: tuple[int, int] = attrs.field(default=(0, 1), validator=_stripe)


class MovedBeforeRefusalError(AssertionError):
    """A connector moved bytes before it refused. The law that asked reports it as a fault."""


class NothingToJudgeError(Exception):
    """A case has nothing that a law could judge. The message has the reason."""


Ask = Callable[[World, "RankId", "RankId"], Iterable[ByteCopy]]
AskStep = Callable[[World, "RankId", "RankId", frozenset[str], range], Iterable[ByteCopy]]


@attrs.frozen(kw_only=True)
class System:
    """Functions that describe a connector. A function is None if the connector has no answer.

    A function that cannot serve a case raises `MismatchError`, or one of *refuses*. That is a
    refusal, which a report contains with its words. Any other exception is a fault, except that
    impossible requests may also be refused with `KVSpecError` or `ValueError`.

    Attributes:
        name: The name in messages.
        version: The version of the connector, for reports.
        supports: The cases that the connector supports. Strategies draw no others.
        refuses: Classes of the connector's own errors that are refusals.
        where: Where other code finds the system, as "module:NAME". Reproductions import it.
        moves: Called with a case and a role. Returns the moves of the transfer as the consumers or
            the producers compute them.
        tells: Called with a case and a role. Returns pairs (producer rank, consumer rank) in which
            the consumer notifies the producer that it has read. Each role computes its own pairs.
        descriptors: Called with a world, a producer rank and a consumer rank. Returns the copies
            (producer address, consumer address, bytes) of the request.
        prepared: Called like *descriptors*. Returns rows and ids for the same copies, or None.
        steps: Called like *descriptors*, with layers and a range of tokens. Returns the copies of
            the step in which these layers advance from the start to the stop of the range.
        release: Called without arguments. Returns a new `release.Releasing`.
        connector: Called with a world. Moves the bytes of the request in the memory of the world's
            ranks, and returns when all have arrived.
        names: Called with a `ModelIdentity`, a `PromptIdentity`, a `StoredSpec` and token ids.
            Returns the name of each whole page: a text, bytes or an int, or a tuple of all keys of
            the page.
        pages: Called like *names*. Returns a new and empty `stored_pages.Storing`.

    >>> idle = System(name="idle", descriptors=lambda world, producer, consumer: [])
    >>> [name for name, _ in idle.ways()]
    ['descriptors']
    """

    name: str
    version: str = ""
    supports: Supports = EVERYTHING
    refuses: tuple[type[Exception], ...] = ()
    where: str = ""
    moves: Callable[[Case, Role], Iterable[Move]] | None = None
    tells: Callable[[Case, Role], Iterable[Pair]] | None = None
    descriptors: Ask | None = None
    prepared: Callable[[World, RankId, RankId], PreparedLists | None] | None = None
    steps: AskStep | None = None
    release: Callable[[], Any] | None = None
    connector: Callable[[World], object] | None = None
    names: Callable[[ModelIdentity, PromptIdentity, StoredSpec, Sequence[int]], Any] | None = None
    pages: Callable[[ModelIdentity, PromptIdentity, StoredSpec, Sequence[int]], Any] | None = None

    @property
    def refusals(self) -> tuple[type[Exception], ...]:
        """All classes with which the system may refuse a case that is impossible."""
        return KVSpecError, ValueError, *self.refuses

    def answers(self, questions: Iterable[str]) -> bool:
        """Return whether the system answers one of *questions*, which are names of its fields."""
        return any(getattr(self, question) is not None for question in questions)

    def ways(self) -> Iterator[tuple[str, Ask]]:
        """Yield each way in which the system describes its copies: its name and its function."""
        if self.descriptors is not None:
            yield "descriptors", self.descriptors
        if self.prepared is not None:
            yield "ids", self._by_ids

    def _by_ids(self, here: World, producer: RankId, consumer: RankId) -> Iterable[ByteCopy]:
        lists = None if self.prepared is None else self.prepared(here, producer, consumer)
        if lists is None:
            return []
        if not isinstance(lists, PreparedLists):
            raise WrongFormError(f"prepared: expected PreparedLists or None, got {lists!r}")
        return lists.copies()


CopiesByPair = dict[Pair, list[ByteCopy]]
# Bytes before and after the memory of each rank that a connector gets. A page is more than the
# errors by one block of the small engines that strategies draw.
GUARD = 4096


@attrs.frozen
class Trial:
    """A system and a case. The world and the answers are computed once for all laws.

    The consumers of the world hold the result of the last copies. `deliver` restores them first.

    Attributes:
        system: The system to judge.
        case: The transfer.
        blank: Whether the memory has no contents, because a law only looks for a refusal.
    """

    system: System
    case: Case
    _world: World | None = None
    _legal: Case | None = None
    blank: bool = False
    _moves: dict[Role, list[Move]] = attrs.field(factory=dict, init=False, repr=False, eq=False)
    _answers: dict[str, CopiesByPair] = attrs.field(factory=dict, init=False, repr=False, eq=False)

    @cached_property
    def world(self) -> World:
        """The case with its memory, allocated on first use."""
        return self._world or world(self.case, blank=self.blank)

    def asking(self, request: TransferRequest) -> Trial:
        """Return a trial of another *request* that uses the memory of this trial."""
        here = self.world.asking(request)
        return Trial(self.system, here.case, here, self.case)

    def moves(self, role: Role) -> list[Move]:
        """Return the moves as the side *role* computes them. Empty if there is no answer."""
        if role not in self._moves:
            ask = self.system.moves
            self._moves[role] = [] if ask is None else moves_of(ask(self.case, role), self.case)
        return self._moves[role]

    @cached_property
    def guarded(self) -> World:
        """The case with memory between guard bytes, for the connector."""
        # The memory is that of the legal case, since an impossible request cannot be filled.
        return world(self._legal or self.case, guard=GUARD).asking(self.case.request)

    @cached_property
    def after_connector(self) -> World | None:
        """The case with its memory after the connector has run. None without a connector.

        Raises:
            MovedBeforeRefusalError: If the connector refuses, but bytes of a consumer have changed.
        """
        if self.system.connector is None:
            return None
        try:
            self.system.connector(self.guarded)
        except self.system.refusals as error:
            if not self.guarded.changed():
                raise
            raise MovedBeforeRefusalError(
                f"connector: bytes have moved before this refusal: {error}"
            ) from error
        # A thread of the connector may still copy. Bytes that arrive later are missing.
        here = self.guarded
        producers, consumers = map(copied_memory, (here.producers, here.consumers))
        return World(here.case, producers, consumers, here.before)

    def copies(self) -> Iterator[tuple[str, CopiesByPair]]:
        """Yield each way in which the system describes its copies, and these copies."""
        for name, way in self.system.ways():
            if name not in self._answers:
                self._answers[name] = copied(self.world, name, way)
            yield name, self._answers[name]


def copied_memory(side: Held) -> Held:
    """Return *side* with a copy of the memory of each rank and of its guard bytes."""
    copies: Held = {}
    for rank, (cache, storage) in side.items():
        owners: Any = cache.owner
        (whole,) = owners
        memory, begin = whole.copy(), whole.ctypes.data
        # Groups that share memory share one array.
        arrays = {
            id(flat): memory[flat.ctypes.data - begin :][: flat.size] for flat in storage.values()
        }
        copies[rank] = (
            attrs.evolve(cache, owner=memory),
            {name: arrays[id(flat)] for name, flat in storage.items()},
        )
    return copies


def deliver(here: World, copies: CopiesByPair) -> None:
    """Restore the consumers of a world, and execute *copies*."""
    here.restore()
    for pair, pair_copies in copies.items():
        here.copy(pair, pair_copies)


def copied(here: World, name: str, way: Ask) -> CopiesByPair:
    """Return the copies of *way*, whose name is *name*, between each pair of ranks."""
    pairs = product(here.producers, here.consumers)
    return {pair: copies_of(name, way(here, *pair), *pair) for pair in pairs}


def copies_of(name: str, answer: Any, producer: RankId, consumer: RankId) -> list[ByteCopy]:  # noqa: ANN401
    """Return the copies that a system has answered, with Python integers.

    Sums of numpy integers could overflow.

    Raises:
        WrongFormError: If the answer has another form.
    """
    wrong = answer
    try:
        copies: list[ByteCopy] = []
        for wrong in answer:
            source, target, length = map(index, wrong)
            if length < 1:
                raise ValueError(length)  # noqa: TRY301 - the handler below describes it
            copies.append((source, target, length))
    except (TypeError, ValueError) as error:
        raise WrongFormError(
            f"{name}, producer {producer}, consumer {consumer}: expected three ints for each copy"
            f" (producer address, consumer address, bytes >= 1), got {wrong!r}"
        ) from error
    return copies


def moves_of(answer: Any, case: Case) -> list[Move]:  # noqa: ANN401
    """Return the moves that a system has answered.

    Raises:
        WrongFormError: If the answer has another form, or names ranks, layers or parts that the
            engines do not have.
    """
    if not isinstance(answer, Iterable):
        raise WrongFormError(f"moves: expected a Move for each read, got {answer!r}")
    parts = {
        layer: [part.name for part in group.spec.of_layer(layer).parts]
        for group in case.consumer.groups
        for layer in group.layers
    }
    sides = {"producer": set(case.producer.parallel.ranks),
             "consumer": set(case.consumer.parallel.ranks)}  # fmt: skip
    moves = list(answer)
    for move in moves:
        if not isinstance(move, Move):
            raise WrongFormError(f"moves: expected a Move for each read, got {move!r}")
        for side, ranks in sides.items():
            if (rank := getattr(move, side)) not in ranks:
                raise WrongFormError(
                    f"moves: a move has {side}={rank!r}: expected one of"
                    f" {', '.join(map(repr, sorted(ranks)))}"
                )
        if move.part not in parts.get(move.layer, ()):
            raise WrongFormError(
                f"moves: a move names part {move.part!r} of layer {move.layer!r}. The engines have"
                f" {parts}"
            )
    return moves


def pairs_of(answer: Any) -> set[Pair]:  # noqa: ANN401
    """Return the pairs of ranks that a system has answered. Raise `WrongFormError` otherwise."""
    pairs = list(answer) if isinstance(answer, Iterable) else [answer]
    for pair in pairs:
        if not isinstance(pair, tuple) or [type(rank) for rank in pair] != [RankId, RankId]:
            raise WrongFormError(
                f"tells: expected pairs (producer RankId, consumer RankId), got {pair!r}"
            )
    return set(pairs)


def _moves(case: Case, role: Role) -> Iterator[Move]:
    plan = plan_of(case)
    if role == "consumer":
        ranks = case.consumer.parallel.ranks
        pairs = [(source, rank) for rank in ranks for source in plan.sources(rank)]
    else:
        ranks = case.producer.parallel.ranks
        pairs = [(rank, target) for rank in ranks for target in plan.targets(rank)]
    for edge in (edge for pair in pairs for edge in plan.between(*pair)):
        for unit_slice in edge.slices:
            for layer, part in product(unit_slice.layers, unit_slice.parts):
                yield Move(
                    producer=edge.producer,
                    consumer=edge.consumer,
                    layer=layer,
                    part=part,
                    units=unit_slice.global_range,
                    producer_units=unit_slice.remote_range,
                    consumer_units=unit_slice.local_range,
                    stripe=(unit_slice.stripe.first, unit_slice.stripe.step),
                )


def _tells(case: Case, role: Role) -> Iterator[Pair]:
    plan = plan_of(case)
    if role == "consumer":
        yield from ((p, c) for c in case.consumer.parallel.ranks for p in plan.notifies(c))
    else:
        yield from ((p, c) for p in case.producer.parallel.ranks for c in plan.notifiers(p))


def _descriptors(here: World, producer: RankId, consumer: RankId) -> Iterable[ByteCopy]:
    if not here.plan.between(producer, consumer):
        return []
    return described(here.table(producer, consumer), here.case.request)


def _prepared(here: World, producer: RankId, consumer: RankId) -> PreparedLists | None:
    if not here.plan.between(producer, consumer):
        return None
    return prepared(here.table(producer, consumer), here.case.request)


def _steps(
    here: World, producer: RankId, consumer: RankId, layers: frozenset[str], tokens: range
) -> Iterable[ByteCopy]:
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
    where="kvspec.testing.laws:KVSPEC",
)
"""The library itself, as a system."""
