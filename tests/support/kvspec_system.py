"""kvspec itself as a system of all five levels, in the way in which any connector describes itself.

The levels a and b are those of `laws.KVSPEC`. Level c wraps the ledgers, level d opens a
session for each rank over a NIXL in this process, and level e stores pages in its memory.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import attrs

import kvspec
from kvspec.completion.consumer import ConsumerLedger, LoadPlan, Step
from kvspec.completion.ledger import Tell
from kvspec.completion.producer import ProducerLedger
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id
from kvspec.testing import FakeNixl
from kvspec.testing.laws import KVSPEC
from kvspec.testing.stored import OwnStore, own_names
from kvspec.testing.world import World
from kvspec.wire.codec import decode_message, encode_message
from kvspec.wire.messages import Key, RankAddress, key_of

LEASE = 10.0
FOREVER = 1e6  # seconds that a reader waits, since the scripts let it wait long
PRODUCER = kvspec.RankId()
Event = tuple[str, Any]


class Ledgers:
    """The ledger of a producer rank, and those of its readers."""

    lease = LEASE

    def __init__(self) -> None:
        self.producer = ProducerLedger(RankAddress("P", 1, PRODUCER), lease=LEASE)
        self.producer.connect("D", 1)
        self.readers: dict[str, ConsumerLedger] = {}
        self.keys: dict[str, Key] = {}
        self.steps: dict[tuple[str, str], Step] = {}
        self.numbers = itertools.count()

    def reader(self, name: str, now: float) -> ConsumerLedger:
        """Return the ledger of a reader, which is made on first use."""
        if name not in self.readers:
            me = RankAddress("D", 1, kvspec.RankId(tp=int(name[1:])))
            ledger = ConsumerLedger(me, heartbeat=LEASE / 3, patience=FOREVER)
            self.readers[name] = ledger
            ledger.connect("P", 1, now)
        return self.readers[name]

    def hold(self, request: str, readers: Sequence[str], now: float) -> Iterator[Event]:
        """Hold a request, and let each reader begin to read."""
        key = self.keys[request] = Key(request, next(self.numbers).to_bytes(8, "big"))
        yield from self.events(self.producer.hold(key, now))
        for name in readers:
            load = f"{request}.{next(self.numbers)}"
            plan = LoadPlan(
                request_id=load,
                key=key,
                engine_id="P",
                epoch=1,
                expected={PRODUCER: len(readers)},
                sources=(PRODUCER,),
            )
            ledger = self.reader(name, now)
            yield from self.events(ledger.begin(load, now, FOREVER))
            ledger.assign(plan)
            self.steps[request, name] = ledger.start(load, PRODUCER)
            yield from self.events(ledger.queued(load, now))

    def read_by(self, request: str, reader: str, now: float) -> list[Event]:
        """End the read of a reader. Its load may have failed before, because of an abort."""
        step = self.steps.pop((request, reader), None)
        return list(self.events(self.readers[reader].finish(step, now))) if step else []

    def notification(self, notice: bytes, now: float) -> list[Event]:
        """Pass a message to its ledger."""
        message = decode_message(notice)
        if message.to.engine_id == "P":
            return list(self.events(self.producer.receive(message, now)))
        return list(self.events(self.reader(f"c{message.to.rank.tp}", now).receive(message, now)))

    def time(self, now: float) -> list[Event]:
        """Let all ledgers see the time."""
        ledgers: list[Any] = [self.producer, *self.readers.values()]
        return [event for ledger in ledgers for event in self.events(ledger.tick(now))]

    def abort(self, request: str, now: float) -> list[Event]:
        """Abort a request."""
        return list(self.events(self.producer.abort(self.keys[request], now)))

    def events(self, actions: Iterable[Any]) -> Iterator[Event]:
        """Yield the messages among *actions*, and the requests that are free, as events."""
        for action in actions:
            if isinstance(action, Tell):
                yield "notify", encode_message(action.message)
        while self.producer.freed:
            remote_id, _ = self.producer.freed.popitem()
            yield "freed", key_of(remote_id).request_id


class Direct:
    """A channel inside this process. A message arrives at once."""

    def __init__(self, address: str, net: dict[str, Direct]) -> None:
        self.address, self.net, self.arrived = address, net, list[tuple[str, bytes]]()
        net[address] = self

    def send(self, route: str, *messages: bytes) -> None:
        """Append *messages* to those of the receiver."""
        self.net[route].arrived += [(self.address, data) for data in messages]

    def receive(self) -> list[tuple[str, bytes]]:
        """Return the messages that have arrived."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self, timeout: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Keep the channel: the last messages of the other side may still come."""


def sessions(here: World) -> None:
    """Move the request of *here* with a session for each rank."""
    net: dict[str, Direct] = {}
    with FakeNixl(), ExitStack() as stack:

        def opened(engine: str, held: dict[Any, Any]) -> list[Session]:
            return [open_one(engine, *rank) for rank in held.values()]

        def open_one(engine: str, cache: kvspec.RankCache, storage: Any) -> Session:
            name = f"{engine}-{cache.rank}"
            nixl = NixlRank(prefix=f"{name}-", polled=True, secret=b"all ranks of this test")
            stack.callback(nixl.close, drain=0.0)
            own = {"engine_id": engine, "epoch": 1, "owner": storage}
            policy = here.case.replica_policy
            session = Session(nixl, cache, channel=Direct(name, net), replica_policy=policy, **own)
            stack.callback(session.close, drain=0.0)
            return session

        producers, consumers = opened("P", here.producers), opened("D", here.consumers)
        for session in consumers:
            session.connect([producer.introduction for producer in producers])
        remote = new_remote_id(here.case.request.request_id)
        for session in producers:
            session.hold(remote)
        request = here.case.request
        loads = [session.load(request, remote_id=remote, timeout=10.0) for session in consumers]
        until = time.monotonic() + 10
        while any(load.state == "moving" for load in loads) and time.monotonic() < until:
            for session in (*producers, *consumers):
                session.poll()
        for load in loads:
            load.wait()


SYSTEM = attrs.evolve(
    KVSPEC,
    version=kvspec.__version__,
    release=Ledgers,
    connector=sessions,
    names=own_names,
    pages=OwnStore,
    where="kvspec_system:SYSTEM",
)
