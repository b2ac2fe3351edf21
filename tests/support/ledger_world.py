"""Ledgers of two engines, over a network that loses, repeats, delays and forges messages.

The world records the truth independently of the ledgers: the overwritten blocks, the time of each
read, and the expected readers. A ledger that frees too early, is ready too early, or never
ends breaks a `Promise`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
from msgspec.structs import replace
from two_engines import (
    HEARTBEAT,
    LEASE,
    LONGEST,
    PATIENCE,
    TIMEOUT,
    Promise,
    TwoEngines,
    check,
)

import kvspec
from kvspec.completion.consumer import ConsumerLedger, LoadPlan
from kvspec.completion.consumer import Step as LedgerStep
from kvspec.completion.ledger import Closed, Ended, Failed, Tell
from kvspec.completion.producer import ProducerLedger
from kvspec.errors import TransferState
from kvspec.wire import messages as wire
from kvspec.wire.codec import decode_message, encode_message
from kvspec.wire.messages import Key, Message, RankAddress

Rank = kvspec.RankId


@attrs.define(eq=False)
class Request:
    """One request of the producer: the groups that move, and its outcome by producer rank."""

    key: Key
    epoch: int
    groups: frozenset[str]
    admitted: dict[Rank, float] = attrs.field(factory=dict)
    promised: dict[Rank, float] = attrs.field(factory=dict)
    freed: dict[Rank, str] = attrs.field(factory=dict)
    done: dict[Rank, set[Rank]] = attrs.field(factory=dict)
    lost: bool = False


@attrs.define(eq=False)
class Load:
    """One rank's load of a request.

    *reread* is true if the rank has read the request before, and *compared* if its data was
    compared.
    """

    request: Request
    rank: Rank
    load_plan: LoadPlan
    left: set[Rank]
    void: bool = False
    outcome: str = ""
    released: bool = False
    closed: bool = False
    reread: bool = False
    compared: bool = False


@attrs.define(eq=False)
class Step:
    """One read that was posted."""

    load: Load
    source: Rank
    failed: bool = False


class World(TwoEngines[bytes]):
    """The ledgers of a producer and of a consumer. A message of the network is its bytes."""

    def __init__(
        self,
        plan: kvspec.TransferPlan,
        producer: type[ProducerLedger] = ProducerLedger,
        consumer: type[ConsumerLedger] = ConsumerLedger,
    ) -> None:
        super().__init__()
        self.plan, self.kinds = plan, (producer, consumer)
        self.epochs = {"P": 1, "D": 1}
        self.leases: set[tuple[Any, ...]] = set()
        self.sent: list[bytes] = []
        self.requests: list[Request] = []
        self.loads: list[Load] = []
        self.steps: dict[tuple[Rank, LedgerStep], Step] = {}
        self.to_admit: list[tuple[Request, Rank]] = []
        self.to_expect: list[tuple[Request, Rank]] = []
        self.to_connect: list[Load] = []
        self.count = 0
        self.start_engine("P")
        self.start_engine("D")

    def start_engine(self, name: str) -> None:
        """Start an engine: empty ledgers of a new epoch."""
        side = self.plan.producer if name == "P" else self.plan.consumer
        ranks = side.parallel.ranks
        own = {rank: RankAddress(name, self.epochs[name], rank) for rank in ranks}
        if name == "P":
            self.producers = {
                rank: self.kinds[0](address, lease=LEASE, longest=LONGEST)
                for rank, address in own.items()
            }
            for ledger in self.producers.values():
                ledger.connect("D", self.epochs["D"])
        else:
            self.consumers = {
                rank: self.kinds[1](address, heartbeat=HEARTBEAT, patience=PATIENCE)
                for rank, address in own.items()
            }
            for reader in self.consumers.values():
                self.acted(
                    reader.connect("P", self.epochs["P"], self.reader_now), "D", reader.me.rank
                )

    def restart(self, name: str) -> None:
        """End an engine and start it again. Its peer connects with the new start."""
        self.epochs[name] += 1
        if name == "P":
            for request in self.requests:
                request.lost = True
            self.to_admit.clear()
            self.to_expect = []
            self.start_engine("P")
            for rank, reader in self.consumers.items():
                self.acted(reader.connect("P", self.epochs["P"], self.reader_now), "D", rank)
            return
        for load in self.loads:
            if not load.closed:
                load.closed, load.outcome, load.released = True, load.outcome or "died", True
        self.steps.clear()
        self.to_expect = []
        self.to_connect = []
        self.start_engine("D")
        for ledger in self.producers.values():
            ledger.connect("D", self.epochs["D"])

    def admit(self, moved: int, *, old: int) -> None:
        """Create a request. Its producer ranks and readers receive it one by one."""
        self.count += 1
        name = f"request {old}"  # Several requests of one id may be held at the same time.
        groups = [group.name for group in self.plan.consumer.groups]
        moving = frozenset(group for at, group in enumerate(groups) if moved >> at & 1)
        key = Key(name, self.count.to_bytes(8, "big"))
        request = Request(key, self.epochs["P"], moving)
        self.requests.append(request)
        self.to_admit += [(request, rank) for rank in self.producers]
        self.to_expect += [(request, rank) for rank in self.consumers]

    def admit_rank(self, at: int) -> None:
        """Admit a request on one producer rank."""
        if self.to_admit:
            request, rank = self.to_admit.pop(at % len(self.to_admit))
            request.promised[rank] = self.now + LEASE
            request.admitted[rank] = self.now
            self.acted(self.producers[rank].hold(request.key, self.now), "P", rank)

    def expect_rank(
        self,
        at: int,
        *,
        rejected: bool,
        connecting: bool = False,
        checksum: bool = False,
    ) -> None:
        """Start the load of a request on one consumer rank, perhaps before it is connected."""
        if not self.to_expect:
            return
        request, rank = self.to_expect.pop(at % len(self.to_expect))
        producers = self.plan.notifies(rank)
        load_plan = LoadPlan(
            request_id=f"{self.count}.{len(self.loads)}",
            key=request.key,
            engine_id="P",
            epoch=request.epoch,
            expected={one: len(self.plan.notifiers(one)) for one in producers},
            sources=() if rejected else self.sources(rank, request.groups),
            checksum=checksum,
        )
        if request.epoch != self.epochs["P"]:
            return
        left = {*load_plan.sources}
        reread = any(
            load.load_plan.name == load_plan.name for load in self.loads if load.rank == rank
        )
        self.loads.append(Load(request, rank, load_plan, left, reread=reread))
        ledger = self.consumers[rank]
        actions = ledger.begin(load_plan.request_id, self.reader_now, TIMEOUT)
        if connecting:
            self.to_connect.append(self.loads[-1])
        else:
            ledger.assign(load_plan)
            actions += ledger.queued(load_plan.request_id, self.reader_now)
        self.acted(actions, "D", rank)

    def sources(self, rank: Rank, groups: frozenset[str]) -> tuple[Rank, ...]:
        """Return the producer ranks from which a consumer rank reads any of *groups*."""
        return tuple(
            producer
            for producer in self.plan.sources(rank)
            if any(edge.group in groups for edge in self.plan.between(producer, rank))
        )

    def connect_rank(self, at: int) -> None:
        """Start a load that waited for its producer's connection, unless the load has failed."""
        if not self.to_connect:
            return
        load = self.to_connect.pop(at % len(self.to_connect))
        ledger, name = self.consumers[load.rank], load.load_plan.request_id
        if self.state(load) != "connecting":
            return
        if load.request.epoch != self.epochs["P"]:
            self.acted(ledger.cancel(name, self.reader_now), "D", load.rank)
            return
        ledger.assign(load.load_plan)
        self.acted(ledger.queued(name, self.reader_now), "D", load.rank)

    def start(self, at: int) -> None:
        """Post the read of a source that was not posted yet."""
        posted = {(id(step.load), step.source) for step in self.steps.values()}
        places = [
            (load, source)
            for load in self.loads
            if self.state(load) == "moving"
            for source in sorted(load.left)
            if (id(load), source) not in posted
        ]
        if places:
            load, source = places[at % len(places)]
            step = self.consumers[load.rank].start(load.load_plan.request_id, source)
            self.steps[load.rank, step] = Step(load, source)

    def finish(self, at: int, how: str) -> None:
        """End a read: done, failed, or failed while it may still write."""
        if not self.steps:
            return
        name = list(self.steps)[at % len(self.steps)]
        step, ledger = self.steps[name], self.consumers[name[0]]
        if how == "done" or step.failed:
            del self.steps[name]
            request = step.load.request
            step.load.void |= request.lost or step.source in request.freed or step.failed
            step.load.left.discard(step.source)
            actions = ledger.finish(name[1], self.reader_now)
        elif how == "failed":
            del self.steps[name]
            step.load.void = True
            actions = ledger.fail(name[1], "a read failed", self.reader_now)
        else:
            step.failed = step.load.void = True
            actions = ledger.fail(name[1], "a read hangs", self.reader_now, quiet=False)
        self.acted(actions, "D", name[0])
        stopped = how == "done" or self.state(step.load) not in ("moving", "verifying", "done")
        check(Promise.ORDER, stopped, "a load moves on after a failed read")

    def compare(self, at: int, *, equal: bool) -> None:
        """Compare the data of a load, if the ledger waits for it."""
        loads = [load for load in self.loads if not load.closed]
        if not loads:
            return
        load = loads[at % len(loads)]
        ledger, name = self.consumers[load.rank], load.load_plan.request_id
        if not ledger.uncompared(name):
            return
        check(Promise.WHOLE, not load.left, "compared before its data arrived")
        load.compared = True
        if equal:
            actions = ledger.compared(name, self.reader_now)
        else:
            load.void = True
            actions = ledger.cancel(name, self.reader_now, "it differs", TransferState.DIFFERS)
        self.acted(actions, "D", load.rank)

    def deliver(self, at: int, *, twice: bool = False) -> None:
        """Deliver a message from the network, or a copy of it."""
        data = self.take(at, keep=twice)
        if data is not None:
            self.arrive(decode_message(data))

    def arrive(self, message: Message) -> None:
        """Pass a message to the rank that it is addressed to."""
        ledgers: dict[Rank, Any] = self.producers if message.to.engine_id == "P" else self.consumers
        ledger = ledgers.get(message.to.rank)
        if ledger is None:
            return
        mine = [r for r in self.requests if r.key == message.key and not r.lost]
        true = message.by.epoch == self.epochs["D"] and message.to == ledger.me
        if mine and isinstance(message, wire.Done) and true:
            mine[0].done.setdefault(message.to.rank, set()).add(message.by.rank)
        now = self.now if message.to.engine_id == "P" else self.reader_now
        self.acted(ledger.receive(message, now), message.to.engine_id, message.to.rank)

    def lose(self, at: int) -> None:
        """Lose a message."""
        self.take(at)

    def forge(self, at: int, how: str) -> None:
        """Deliver a copy of a message that was sent before, changed or not."""
        if not self.sent:
            return
        message = decode_message(self.sent[at % len(self.sent)])
        reader = isinstance(message, wire.ReaderStatus)

        def heartbeat(**changes: Any) -> Message:
            """Return a heartbeat of the same reader, with other fields."""
            assert isinstance(message, wire.ReaderStatus)
            fields = {field: getattr(message, field) for field in wire.Heartbeat.__struct_fields__}
            return wire.Heartbeat(**fields | changes)

        stranger = replace(message.by, rank=Rank(tp=77))
        changes: dict[str, Callable[[], Message]] = {
            "nonce": lambda: replace(message, key=Key(message.key.request_id, b"another nonce")),
            "id": lambda: replace(message, key=Key("another", message.key.nonce)),
            "epoch": lambda: replace(message, by=replace(message.by, epoch=0)),
            "start": lambda: replace(message, to=replace(message.to, epoch=0)),
            "number": lambda: replace(message, number=message.number + 1000),
            "copy": lambda: message,
            "fewer": lambda: heartbeat(expected=1),
            "more": lambda: heartbeat(expected=9),
            "stranger": lambda: heartbeat(by=stranger),
        }
        if how in ("fewer", "more", "stranger") and not reader:
            return
        if how == "number" and reader:
            return
        self.arrive(changes[how]())

    def abort(self, at: int) -> None:
        """Abort a request on all producer ranks."""
        if self.requests:
            request = self.requests[at % len(self.requests)]
            for rank, ledger in self.producers.items():
                self.acted(ledger.abort(request.key, self.now), "P", rank)

    def cancel(self, at: int) -> None:
        """Cancel a load."""
        open_loads = [load for load in self.loads if not load.closed]
        if open_loads:
            load = open_loads[at % len(open_loads)]
            actions = self.consumers[load.rank].cancel(load.load_plan.request_id, self.reader_now)
            self.acted(actions, "D", load.rank)

    def reread(self, at: int) -> None:
        """Let a rank load a request again that it has read or given up."""
        ended = [load for load in self.loads if load.closed and not load.request.lost]
        if ended:
            load = ended[at % len(ended)]
            name = load.request, load.rank
            in_progress = [(other.request, other.rank) for other in self.loads if not other.closed]
            if name not in (*in_progress, *self.to_expect):
                self.to_expect.append(name)

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds
        sides: list[tuple[str, dict[Rank, Any], float]]
        sides = [("P", self.producers, self.now), ("D", self.consumers, self.reader_now)]
        for name, ledgers, now in sides:
            for rank, ledger in list(ledgers.items()):
                self.acted(ledger.tick(now), name, rank)

    def starve(self, seconds: float) -> None:
        """Advance the time while the producer has no CPU. Its messages wait meanwhile."""
        self.now += seconds
        for rank, ledger in self.consumers.items():
            self.acted(ledger.tick(self.reader_now), "D", rank)

    @property
    def reader_now(self) -> float:
        """The time of the consumer's clock."""
        return self.reader_clock()

    def state(self, load: Load) -> str | None:
        """Return the ledger's state of a load."""
        return (
            self.consumers[load.rank].open.get(load.load_plan.request_id)
            if not load.closed
            else None
        )

    def place(self, request: Request, rank: Rank) -> str:
        """Return where a request is on a producer rank, in the words of `JOINT`."""
        if rank in request.freed:
            return "read" if request.freed[rank] == "done" else "expired"
        if rank not in request.promised:
            return "new"
        return self.producers[rank].records[request.key].state

    def joint_states(self) -> Iterator[tuple[str, str]]:
        """Yield the state of each first load, with the place of its request on each source."""
        for load in self.loads:
            if not (load.closed or load.reread or load.request.lost):
                for source in load.load_plan.sources:
                    yield self.state(load) or "", self.place(load.request, source)

    def acted(self, actions: list[Any], name: str, rank: Rank) -> None:
        """Execute the actions of a ledger, and compare them with the truth."""
        for action in actions:
            if isinstance(action, Tell):
                message = action.message
                assert (name, rank) == (message.by.engine_id, message.by.rank), "a wrong sender"
                if isinstance(message, wire.Lease):
                    self.promise(message)
                self.net.append(encode_message(message))
                self.sent = [*self.sent[-60:], self.net[-1]]
            elif isinstance(action, Failed | Ended | Closed):
                self.loaded(action)
        if name == "P":
            for remote_id, how in self.producers[rank].freed.items():
                self.freed(remote_id, how, rank)
            self.producers[rank].freed.clear()

    def promise(self, message: wire.Lease) -> None:
        """Record a lease: until it ends, a rank may free only requests that have finished.

        One heartbeat extends a lease once. A repeated copy of it must not.
        """
        name = message.by, message.to, message.key, message.number
        check(Promise.LEASED, name not in self.leases, name)
        self.leases.add(name)
        for request in self.requests:
            if request.key == message.key and not request.lost:
                until = self.now + message.lease
                before = request.promised[message.by.rank]
                request.promised[message.by.rank] = max(before, until)

    def freed(self, name: str, how: str, rank: Rank) -> None:
        """Check that blocks are freed once, and only if no rank reads or the lease is over."""
        mine = [r for r in self.requests if r.key.remote_id == name and rank in r.promised]
        held = [r for r in mine if not r.lost and rank not in r.freed]
        check(Promise.FREED_ONCE, held, f"{name} on {rank}")
        request = held[0]
        request.freed[rank] = how
        if self.now >= request.promised[rank]:
            return
        missing = {*self.plan.notifiers(rank)} - request.done.get(rank, set())
        check(Promise.UNREAD, not missing, f"{name} on {rank}, before {missing} have finished")
        reading = [
            step
            for step in self.steps.values()
            if step.source == rank and step.load.request is request
            if not step.load.reread
        ]
        check(Promise.UNREAD, not reading, f"{name} on {rank}, while it is read")

    def loaded(self, action: Failed | Ended | Closed) -> None:
        """Check the order of a load's events: ready or failed, released, closed.

        A load is released only when no read can still write into its blocks.
        """
        (load,) = (x for x in self.loads if x.load_plan.request_id == action.request_id)
        check(Promise.ORDER, not load.closed, "an event after the last")
        if isinstance(action, Ended) and action.state == "done":
            check(Promise.ORDER, load.outcome == "", load.outcome)
            check(Promise.WHOLE, not load.left, load.left)
            check(Promise.VALID, not load.void, "a read was void")
            moved = load.load_plan.checksum and load.load_plan.sources
            check(Promise.VALID, load.compared or not moved, "it was not compared")
            load.outcome = "ready"
        elif isinstance(action, Failed):
            check(Promise.ORDER, load.outcome == "", load.outcome)
            check(Promise.EXPLAINED, action.why)
            load.outcome = "failed"
        elif isinstance(action, Ended):
            check(Promise.ORDER, ("failed", False) == (load.outcome, load.released))
            writing = [s for s in self.steps.values() if s.load is load]
            check(Promise.OVER, not writing, "a read may still write")
            load.released = True
        else:
            check(Promise.ORDER, load.outcome == "ready" or load.released, "closed too early")
            load.closed = True

    def start_all(self) -> None:
        """Start all admissions, connections and loads that wait."""
        while self.to_admit:
            self.admit_rank(0)
        while self.to_expect:
            self.expect_rank(0, rejected=True)
        while self.to_connect:
            self.connect_rank(0)

    def end(self) -> None:
        """Let everything in progress end. Afterwards no side may have anything left."""
        self.start_all()
        while self.steps:
            self.finish(0, "failed")
        for _ in range(60):
            while self.net:
                self.deliver(0)
            self.advance(HEARTBEAT)
        self.nothing_left()

    def end_at_once(self) -> None:
        """Let everything end while the time stands still. Afterwards every request is freed."""
        self.start_all()
        while self.steps or self.net or any(self.state(load) == "moving" for load in self.loads):
            self.start(0)
            if self.steps:
                self.finish(0, "done")
            self.deliver(0)
        for request in self.requests:
            check(Promise.PROMPT, set(self.producers) == set(request.freed), request.key)

    def nothing_left(self) -> None:
        """Check that all ledgers are empty, and that each request was freed."""
        for ledger in self.producers.values():
            left = ledger.held, len(ledger.records), ledger.due, ledger.counts["held"]
            check(Promise.CLEAN, ((), 0, None, 0) == left, left)
        for reader in self.consumers.values():
            rest = reader.open, reader.steps, reader.due
            check(Promise.CLEAN, ({}, 0, None) == rest, rest)
        for load in self.loads:
            check(Promise.ENDS, load.closed, load.load_plan.request_id)
        for request in self.requests:
            everywhere = set(self.producers) == set(request.freed)
            check(Promise.FREED_ONCE, request.lost or everywhere, request.key)
