"""An interrupt inside of a call closes the session, and nothing of it is left.

Its loads fail, nothing moves any more, and a new session on the same memory works.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lines import between_lines, interrupted_after, uninterrupted
from two_engines import Direct, Side, engine, land, let_nothing_land, request, until

import kvspec
from kvspec import KVSpecError, TransferError
from kvspec.completion import consumer, ledger, producer
from kvspec.nixl import NixlRank, rank, transfer
from kvspec.session import (
    Load,
    Session,
    holds,
    load,
    loads,
    mailbox,
    new_remote_id,
    remotes,
    session,
)
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.tickets import PrefillTicket

PACKAGE = Path(kvspec.__file__).parent
LINES = ledger, consumer, producer, session, loads, load, remotes, holds, mailbox, rank, transfer
ASKED = request()
TABLES = ASKED.producer_blocks
LEASE = 30.0
# Python reports an interrupt that comes while it destroys an object, and goes on.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class World:
    """A producer that lives on, and one NIXL rank of a consumer with a new session each time."""

    def __init__(self, stack: contextlib.ExitStack) -> None:
        self.net = stack.enter_context(FakeNixl())
        self.now, self.epoch = 0.0, 0
        more: dict[str, Any] = {"polled": False, "clock": lambda: self.now}
        self.producer = stack.enter_context(
            Side("P", engine(1), channel=Direct("P"), lease=LEASE, **more)
        )
        self.side = stack.enter_context(Side("D", engine(1), channel=Direct("D"), **more))
        self.side.first.close()
        self.nixl: NixlRank = self.side.first.nixl
        self.producer.fill(ASKED)

    @contextlib.contextmanager
    def opened(self) -> Iterator[Session]:
        """Yield a new session on the same memory. It is not closed if it was interrupted."""
        self.epoch += 1
        own: dict[str, Any] = {"engine_id": "D", "epoch": self.epoch, "heartbeat": 2.0}
        one = Session(
            self.nixl, self.side.first.cache, channel=Direct("D"), clock=lambda: self.now, **own
        )
        yield one
        one.close(drain=0.0)

    def held(self) -> str:
        """Return a request that the producer holds, written to its end."""
        remote_id = new_remote_id("r")
        with uninterrupted():
            self.producer.hold(remote_id, blocks=TABLES)
            self.side.spoil(ASKED)
        return remote_id

    def serve(self) -> None:
        """Poll the producer, which is not interrupted."""
        with uninterrupted():
            self.producer.poll()

    def begin(self, one: Session, how: str) -> Load:
        """Begin a load."""
        remote_id = self.held()
        if how == "ticket":
            ticket = PrefillTicket(
                engine_id="P", addresses=["P"], remote_id=remote_id, tables=TABLES,
                computed_tokens=ASKED.num_tokens,
            )  # fmt: skip
            return one.load(ASKED, ticket=ticket, timeout=20.0)
        more = {how: True} if how else {}
        return one.load(ASKED, remote_id=remote_id, timeout=20.0, **more)

    def settle(self) -> None:
        """Poll the producer until the lease of each request is over."""
        for _ in range(3):
            self.now += LEASE + 1.0
            self.producer.settled()
        assert () == self.producer.first.held

    def check_works(self) -> None:
        """Check that a new session on the same memory loads the right bytes."""
        with self.opened() as one:
            one.connect(self.producer.introductions)
            moved = self.begin(one, "")
            until(lambda: moved.poll() != "moving", self.producer)
            assert ("done", []) == (moved.state, self.side.wrong(ASKED)), moved.error
        self.settle()


@pytest.fixture
def world() -> Iterator[World]:
    """Yield a world, and check that nothing of its ranks is left."""
    with contextlib.ExitStack() as stack:
        yield World(stack)


class Calls:
    """The calls that are interrupted. Each method returns one, after its preparations."""

    def __init__(self, world: World, one: Session, how: str) -> None:
        self.world, self.one, self.how = world, one, how
        self.moved: Load | None = None
        if how != "connect":
            one.connect(world.producer.introductions)

    def connect(self) -> Callable[[], object]:
        """Return a call that connects the producer."""
        return lambda: self.one.connect(self.world.producer.introductions)

    def load(self) -> Callable[[], object]:
        """Return a call that begins a load."""

        def act() -> None:
            self.moved = self.world.begin(self.one, self.how)

        return act

    def poll(self) -> Callable[[], object]:
        """Return a call of some polls while a load moves."""
        self.load()()
        return self.polls

    def wait(self) -> Callable[[], object]:
        """Return a call that waits for a load. The producer answers meanwhile."""
        self.load()()
        poll = self.one.poll
        self.one.poll = lambda: (self.world.serve(), poll())  # type: ignore[method-assign]
        assert self.moved is not None
        return lambda: self.moved and self.moved.wait(1.0)

    def polls(self) -> None:
        """Poll both sides."""
        for _ in range(4):
            self.one.poll()
            self.world.serve()


WAYS = [("connect", "connect")] + [
    (call, how) for call in ("load", "poll", "wait") for how in ("", "checksum", "ticket")
]


def interrupt(world: World, drawn: random.Random, moments: dict[Any, int]) -> bool:
    """Interrupt a drawn call at a drawn moment, and check what is left.

    Returns:
        Whether the interrupt has closed the session. It has not if it came before the call began.
    """
    call, how = drawn.choice(WAYS)
    lands = call == "connect" or drawn.random() < 0.7  # Otherwise bytes stay in flight.
    with world.opened() as one:
        calls = Calls(world, one, how)
        if not lands:
            let_nothing_land(world.net)
        act = getattr(calls, call)()
        most = moments.get((call, how, lands), 0)
        place = drawn.randrange(most) if most else 10**9
        count, left = interrupted_after(place, act, PACKAGE)
        if not most:
            moments[call, how, lands] = count
        moved, closed = calls.moved, one._interrupted
        assert left or not closed
        if closed:
            with pytest.raises(TransferError) as caught:
                one.hold(new_remote_id("late"))
            assert "closed" == caught.value.state
            moving = len(world.net.moving)
            one.poll()
            assert moving == len(world.net.moving), "a read was posted"
            if moved is not None and moving:
                assert moved.error is not None
                assert ("moving", "closed") == (moved.state, moved.error.state)
        world.net.fate = FakeFlight.land
        land(world.net)
        one.poll()
        if closed and moved is not None:
            assert moved.state in ("done", "failed")
            assert ("done" == moved.state) == (moved.error is None)
            assert "failed" == moved.state or [] == world.side.wrong(ASKED)
    stats = world.nixl.stats()
    assert (0, 0) == (stats.transfers, stats.handles), (call, how, place)
    before = {name: flat.copy() for name, flat in world.side.storage[kvspec.RankId()].items()}
    world.settle()
    after = world.side.storage[kvspec.RankId()]
    assert all((before[name] == after[name]).all() for name in before), "something moves"
    return closed


@pytest.mark.parametrize(
    ("seed", "number"),
    [(0, 40), *(pytest.param(seed, 100, marks=pytest.mark.slow) for seed in range(5))],
)
def test_interrupted_session_is_closed_and_its_memory_can_be_used(
    world: World, seed: int, number: int
) -> None:
    """Interrupts at random moments in `connect`, `load`, `poll` and `wait`."""
    drawn, moments, interrupts = random.Random(seed), dict[Any, int](), 0
    while interrupts < number:
        if interrupt(world, drawn, moments):
            interrupts += 1
            if interrupts % 4 == 0:
                world.check_works()
    world.check_works()


def test_waiting_load_fails_when_its_wait_is_interrupted(world: World) -> None:
    """The blocks stay reserved until no byte can move."""
    with world.opened() as one:
        one.connect(world.producer.introductions)
        let_nothing_land(world.net)
        moved = world.begin(one, "")
        assert "moving" == moved.poll()
        one._lock.interrupted()
        assert moved.error is not None
        assert ("moving", "closed") == (moved.poll(), moved.error.state)
        assert {} != moved.undefined_blocks
        land(world.net)
        assert "failed" == moved.poll()
        assert {"closed": 1} == {
            state: count for state, count in one.stats().counters.failed_by_state.items() if count
        }
    world.settle()


@pytest.mark.parametrize("interrupts", [1, 2])
def test_new_session_loads_the_same_id_while_an_interrupted_one_drains(
    world: World, interrupts: int
) -> None:
    """The old session still polls for its own bytes. A poll of it may be interrupted as well."""
    other: Any = {"full": [7, 6, 5, 0], "window": [7, 6, 5, 0]}
    again = request(consumer_blocks=other)
    with world.opened() as old:
        old.connect(world.producer.introductions)
        let_nothing_land(world.net)
        moved = world.begin(old, "")
        old._lock.interrupted()
        (flight,) = world.net.moving
        world.net.fate = FakeFlight.land
        with world.opened() as new:
            new.connect(world.producer.introductions)
            let_nothing_land(world.net)
            remote_id = world.held()
            loaded = new.load(again, remote_id=remote_id, timeout=20.0)
            for _ in range(interrupts):
                assert "moving" == moved.poll()
                old._lock._changing = interrupts > 1
            flight.land()
            assert "failed" == moved.poll()
            world.side.spoil(again)
            land(world.net)
            until(lambda: loaded.poll() != "moving", world.producer)
            assert ("done", []) == (loaded.state, world.side.wrong(again)), loaded.error
    world.settle()


def test_interrupt_in_a_thread_that_holds_the_lock_closes_at_the_next_call(world: World) -> None:
    """No other thread works with what an interrupt has left half changed."""
    with world.opened() as one:
        one.connect(world.producer.introductions)
        moved = world.begin(one, "")
        with contextlib.suppress(KeyboardInterrupt), one._lock.held, one._lock:
            one._loads.ledger.records.clear()
            raise KeyboardInterrupt
        assert "failed" == moved.poll()
        assert moved.error is not None
        assert "closed" == moved.error.state
    world.settle()
    world.check_works()


def test_call_of_a_signal_handler_inside_of_a_load_is_refused(world: World) -> None:
    """Otherwise the load would be done without its bytes."""
    refused, place, reached = 0, 0, True
    with world.opened() as one:
        one.connect(world.producer.introductions)
        while reached:
            reached = False

            def act(line: int, place: int = place) -> None:
                nonlocal reached, refused
                if line != place:
                    return
                reached = True
                try:
                    one.disconnect("P")
                except TransferError as error:
                    refused += error.state == "busy"

            moved: Any = None
            with between_lines(act, *LINES), contextlib.suppress(KVSpecError):
                moved = world.begin(one, "")
            if moved is not None:
                until(lambda moved=moved: moved.poll() != "moving", world.producer)
                assert "failed" == moved.state or [] == world.side.wrong(ASKED)

            def over() -> bool:
                world.now += 0.5
                one.poll()
                return not one.stats().loads

            until(over, world.producer)
            one.connect(world.producer.introductions)
            place += 7
        assert refused > 20
    world.settle()
