"""Sessions of two engines that reuse blocks at once, over a network that loses messages.

How it works:
    The world keeps the truth apart from the sessions. A block has the bytes of one request until
    its engine frees it, and `RUBBISH` afterwards. So a session that calls a request done too early
    has wrong bytes. The world also copies the bytes of each load that has ended. A write that is
    still in flight then changes bytes that are compared later.

    A test performs steps in any order: admit, hold, read, land, deliver, lose, forge, abort,
    cancel, restart and advance. After each step the world polls every session and compares
    it with the truth (`look`). `end` lets everything finish and checks that nothing is left.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from truths import RUBBISH, truth
from two_engines import (
    HEARTBEAT,
    LEASE,
    LONGEST,
    PATIENCE,
    TIMEOUT,
    BrokenPromiseError,
    Promise,
    Side,
    TwoEngines,
    check,
    engine,
)

import kvspec
from kvspec.errors import SpecError, TransferError
from kvspec.nixl.rank import NixlStats
from kvspec.session import Load, new_remote_id
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl, logical_views
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.testing.positions import rows_of

if TYPE_CHECKING:
    from collections.abc import Iterator

# Blocks of a rank: few enough that requests reuse each other's blocks all the time.
BLOCKS = 12
Rank = kvspec.RankId
PAIRS = tuple(
    (engine(p, heads, state=state), engine(d, heads, block=block, state=state))
    for p, d, heads, block, state in (
        (1, 1, 2, 4, False),
        (2, 1, 2, 4, True),
        (1, 2, 2, 2, True),
        (4, 2, 2, 4, False),
        (2, 3, 6, 8, False),
    )
)


def spans(views: Any, tables: Any) -> list[range]:
    """Return the address ranges of a request's blocks on one rank, row by row."""
    ranges = []
    for key, view in views.items():
        for block in tables[key[0]].block_ids:
            ranges += (range(*np.lib.array_utils.byte_bounds(unit)) for unit in view[block])
    return ranges


class Delayed:
    """A channel of the world. A message waits in the world's network until it is delivered."""

    def __init__(self, world: World, address: str) -> None:
        self.world, self.address, self.arrived = world, address, list[tuple[str, bytes]]()

    def send(self, route: str, *messages: bytes) -> None:
        """Put messages into the network."""
        self.world.net += [(route, self.address, data) for data in messages]

    def receive(self) -> list[tuple[str, bytes]]:
        """Return the messages that were delivered."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self, timeout: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Forget the delivered messages."""
        self.arrived.clear()


@attrs.define(eq=False)
class Entry:
    """A request: its blocks, the producer ranks that hold it, and its outcome on each."""

    remote_id: str
    request: kvspec.TransferRequest
    seed: int
    start: int
    to: int
    freed: dict[Rank, str] = attrs.field(factory=dict)
    held: set[Rank] = attrs.field(factory=set)
    read: set[Rank] = attrs.field(factory=set)
    lost: bool = False


@attrs.define(eq=False)
class Reader:
    """One rank's load of a request, and a copy of the bytes of its blocks when it ended.

    *again* is true if the rank has loaded the request before.
    """

    entry: Entry
    rank: Rank
    start: int
    load: Load | None
    again: bool
    after: dict[Any, Any] | None = None


class Engine(Side):
    """All ranks of one incarnation of an engine, with views of the bytes in their blocks."""

    def __init__(self, world: World, name: str, spec: kvspec.EngineSpec, epoch: int) -> None:
        self.channels: dict[Rank, Delayed] = {}

        def channel(rank: Rank) -> Delayed:
            return self.channels.setdefault(rank, Delayed(world, f"{name}{epoch}-{rank}"))

        super().__init__(
            name, spec, epoch=epoch, blocks=BLOCKS, channel=channel,
            polled=name == "D", lease=LEASE, longest=LONGEST,
            heartbeat=HEARTBEAT, patience=PATIENCE,
            clock=world.reader_clock if name == "D" else world.clock,
        )  # fmt: skip
        self.views: dict[Rank, Any] = {
            rank: logical_views(spec, rank, storage, BLOCKS)
            for rank, storage in self.storage.items()
        }

    def truth(self, rank: Rank, entry: Entry, tables: Any, *, producer: bool) -> Iterator[Any]:
        """Yield for each part: key, the request's blocks, true bytes, and which bytes count."""
        return truth(self.spec, rank, tables, entry.request, entry.seed, producer=producer)

    def kill(self, net: FakeNixl) -> None:
        """End the processes of the engine."""
        for session in self.sessions.values():
            if session.nixl.name in net.agents:
                net.kill(session.nixl.name)
            session.nixl.close(drain=0.0)


class World(TwoEngines[tuple[str, str, bytes]]):
    """Sessions of a producer and a consumer whose blocks are scarce.

    A message of the network has a receiver, a sender and bytes.
    """

    def __init__(
        self,
        net: FakeNixl,
        pair: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
        *,
        checksum: bool = False,
    ) -> None:
        super().__init__()
        self.nixl, self.pair, self.checksum = net, pair, checksum
        net.fate = self.posted
        self.moved = set[int]()  # the consumer's bytes that transfers were posted for
        self.asked: list[Entry] = []
        self.readers: list[Reader] = []
        self.to_hold: list[tuple[Entry, Rank]] = []
        self.to_read: list[tuple[Entry, Rank]] = []
        self.outcomes = Counter[str]()
        self.starts = {"P": 0, "D": 0}
        self.free = {side: set(range(1, BLOCKS)) for side in "PD"}
        self.engines: dict[str, Engine] = {}
        self.restart("P")
        self.restart("D")

    def posted(self, flight: FakeFlight) -> None:
        """Land the byte that proves a connection; check that a load moves no byte twice."""
        if [1] == [length for *_, length in flight.copies]:
            flight.land()
            return
        for to, _, length in flight.copies:
            span = range(to, to + length)
            check(Promise.ONCE, self.moved.isdisjoint(span))
            self.moved.update(span)

    def restart(self, name: str) -> None:
        """End an engine if it runs, and start it; the consumer connects with the producer."""
        if name in self.engines:
            self.engines[name].kill(self.nixl)
        self.starts[name] += 1
        self.engines[name] = Engine(self, name, self.pair[name == "D"], self.starts[name])
        self.free[name] = set(range(1, BLOCKS))
        if name == "P":
            for entry in self.asked:
                entry.lost = True
            self.to_hold.clear()
        else:
            self.moved.clear()
            self.readers = [r for r in self.readers if r.start == self.starts["D"]]
        self.to_read.clear()
        if "D" in self.engines:
            self.engines["D"].connect(self.engines["P"])
        self.look()

    def admit(self, tokens: int, cached: int, *, early: bool) -> None:
        """Create a request, and hold it on all producer ranks unless readers may be *early*."""
        tables: list[dict[str, kvspec.BlockTable]] = []
        for name, spec in zip("PD", self.pair, strict=True):
            size = spec.groups[0].spec.block_size
            count = -(-tokens // size)
            if len(self.free[name]) < count:
                return
            ids = sorted(self.free[name])[:count][:: -1 if name == "D" else 1]
            tables.append({group.name: kvspec.BlockTable(ids) for group in spec.groups})
        seed = len(self.asked) + 10
        request = kvspec.TransferRequest(
            request_id=f"{seed}", num_tokens=tokens, cached_tokens=min(cached, tokens),
            producer_blocks=tables[0], consumer_blocks=tables[1],
        )  # fmt: skip
        entry = Entry(
            new_remote_id(f"r{seed % 3}.{seed}"), request, seed, self.starts["P"], self.starts["D"]
        )
        for name, own in zip("PD", tables, strict=True):
            self.free[name] -= {int(block) for block in own["full"].block_ids}
        self.asked.append(entry)
        self.compute(entry)
        self.to_hold += [(entry, rank) for rank in self.engines["P"].sessions]
        self.to_read += [(entry, rank) for rank in self.engines["D"].sessions]
        if not early:
            while self.to_hold:
                self.hold(0)

    def hold(self, at: int) -> None:
        """Hold a request on one producer rank."""
        if self.to_hold:
            entry, rank = self.to_hold.pop(at % len(self.to_hold))
            session = self.engines["P"].sessions[rank]
            session.hold(
                entry.remote_id, blocks=entry.request.producer_blocks if self.checksum else None
            )
            entry.held.add(rank)

    def compute(self, entry: Entry) -> None:
        """Write the bytes of a request on every producer rank."""
        for rank, views in self.engines["P"].views.items():
            for key, view in views.items():
                view[entry.request.producer_blocks[key[0]].block_ids] = RUBBISH
            self.fill(entry, rank)

    def fill(self, entry: Entry, rank: Rank) -> None:
        """Write the bytes of a request on one producer rank."""
        side, tables = self.engines["P"], entry.request.producer_blocks
        true = {k: (i, r) for k, i, r, _ in side.truth(rank, entry, tables, producer=True)}
        for rows in rows_of(side.spec, rank, tables, entry.request):
            ids, right = true[rows.key]
            own = (rows.token < entry.request.num_tokens) | (not rows.part.per_token)
            block, row = rows.block[own], rows.row[own]
            place = (block[:, None] == ids).argmax(axis=1)
            side.views[rank][rows.key][block, :, row] = right[place, :, row]

    def read(self, at: int, how: str) -> None:
        """Let one consumer rank load or decline a request.

        A rank that has loaded it before may have to wait until the producer knows the end of that
        load. It tries again later, unless it declines.
        """
        if not self.to_read:
            return
        entry, rank = self.to_read.pop(at % len(self.to_read))
        session, load = self.engines["D"].sessions[rank], None
        if how != "decline":
            self.spoil(entry, rank)
        try:
            if how == "decline":
                session.decline(entry.remote_id)
            else:
                load = session.load(
                    entry.request, remote_id=entry.remote_id, timeout=TIMEOUT,
                    checksum=self.checksum,
                )  # fmt: skip
        except TransferError as error:
            raise BrokenPromiseError(Promise.OWNED, entry.remote_id) from error
        except SpecError as error:
            waits = error.field in ("request_id", "key") and rank in entry.read
            check(Promise.OWNED, waits, error)
            if how != "decline":
                self.to_read.append((entry, rank))
                return
        again = rank in entry.read
        entry.read.add(rank)
        self.readers.append(Reader(entry, rank, self.starts["D"], load, again))
        self.look()

    def reread(self, at: int) -> None:
        """Let a rank whose load has ended load the request again."""
        ended = [r for r in self.readers if r.after is not None and not r.entry.lost]
        if ended:
            reader = ended[at % len(ended)]
            self.readers.remove(reader)
            self.to_read.append((reader.entry, reader.rank))

    def spoil(self, entry: Entry, rank: Rank) -> None:
        """Write rubbish into a request's blocks, except for tokens that the consumer has cached."""
        views = self.engines["D"].views[rank]
        for key, view in views.items():
            view[entry.request.consumer_blocks[key[0]].block_ids] = RUBBISH
        for span in spans(views, entry.request.consumer_blocks):
            self.moved.difference_update(span)
        for key, ids, right, counts in self.cached(rank, entry):
            views[key][ids] = np.where(counts, right, views[key][ids])

    def cached(self, rank: Rank, entry: Entry) -> Iterator[Any]:
        """Yield the bytes that the consumer has cached."""
        whole = attrs.evolve(entry.request, cached_tokens=0)
        having = attrs.evolve(entry, request=whole)
        tables, request = entry.request.consumer_blocks, entry.request
        for key, ids, right, counts in self.engines["D"].truth(
            rank, having, tables, producer=False
        ):
            spec = self.pair[1].group(key[0]).spec
            rows = np.arange(len(ids) * right.shape[2]).reshape(len(ids), 1, right.shape[2], 1)
            if not all(part.per_token for part in spec.parts):
                rows = np.full_like(rows, request.num_tokens - 1)
            yield key, ids, right, counts & (rows < request.cached(key[0], spec))

    def land(self, at: int, how: str) -> None:
        """Complete a transfer in flight: all, a part, with a wrong byte, or with a failure."""
        moving = self.nixl.moving
        if moving:
            flight = moving[at % len(moving)]
            if how == "fail":
                flight.fail(0.5)
            else:
                flight.land(0.5 if how == "part" else 1.0)
            if how == "flip" and self.checksum:
                flight.spoil(at)
            self.look()

    def deliver(self, at: int, how: str = "once") -> None:
        """Deliver a message once or twice, or lose it."""
        message = self.take(at, keep=how == "twice")
        if message is not None:
            route, sender, data = message
            channels = [c for side in self.engines.values() for c in side.channels.values()]
            for channel in channels:
                if channel.address == route and how != "lose":
                    channel.arrived.append((sender, data))
            self.look()

    def forge(self, at: int, how: str) -> None:
        """Deliver a changed message, which its seal no longer fits."""
        if self.net:
            route, sender, data = self.net[at % len(self.net)]
            bad = {
                "byte": lambda: data[:-1] + bytes([data[-1] ^ 1]),
                "cut": lambda: data[:-1],
                "valid": lambda: data.replace(b"\xa4gone", b"\xa5valid").replace(
                    b"\xa9heartbeat", b"\xa4done"
                ),
            }[how]()
            if bad != data:
                self.net.append((route, sender, bad))
                self.deliver(-1)

    def abort(self, at: int) -> None:
        """Abort a request on every rank of the producer."""
        if self.asked and not (entry := self.asked[at % len(self.asked)]).lost:
            for session in self.engines["P"].sessions.values():
                session.abort(entry.remote_id)

    def cancel(self, at: int) -> None:
        """Cancel a load."""
        loads = [reader.load for reader in self.readers if reader.load is not None]
        if loads:
            loads[at % len(loads)].cancel()
            self.look()

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        self.now += seconds
        self.look()

    def look(self) -> None:
        """Poll every session, and compare its results with the truth."""
        for side in self.engines.values():
            for session in side.sessions.values():
                session.poll()
        if len(self.engines) == 2:
            self.settle()
            self.judge()

    def settle(self) -> None:
        """Reuse the blocks that producer ranks freed; each is freed once and no longer read."""
        side = self.engines["P"]
        for rank, session in side.sessions.items():
            settled = session.settled()
            for name in settled.freed:
                (entry,) = [a for a in self.asked if a.remote_id == name]
                once = rank in entry.held and rank not in entry.freed
                check(Promise.FREED_ONCE, once, f"{name} on {rank}")
                entry.freed[rank] = "done" if name in settled.done else "expired"
                ids = entry.request.producer_blocks["full"].block_ids
                if name in settled.done:
                    self.unread(rank, entry)
                for view in side.views[rank].values():
                    view[ids] = RUBBISH
                if set(entry.freed) == set(side.sessions):
                    self.free["P"] |= set(ids.tolist())

    def unread(self, rank: Rank, entry: Entry) -> None:
        """Check that no reader reads the blocks of a request that *rank* has freed as done.

        A reader whose lease has expired may read bytes of another request, so it is not checked
        here.
        """
        for reader in self.readers:
            open_ = reader.load is not None and reader.after is None
            if reader.entry is entry and open_ and not reader.again:
                tables = entry.request.producer_blocks, entry.request.consumer_blocks
                views = self.engines["P"].views[rank], self.engines["D"].views[reader.rank]
                source, target = (spans(*side) for side in zip(views, tables, strict=True))
                for flight in self.nixl.moving:
                    to, of, _ = flight.copies[0]
                    reads = any(of in span for span in source) and any(to in s for s in target)
                    check(Promise.UNREAD, not reads, f"{entry.remote_id} on {rank}")

    def judge(self) -> None:
        """Compare done loads with the truth, and ended loads with the copy of their bytes."""
        for reader in self.readers:
            if reader.load is None or reader.load.state == "moving":
                continue
            views = self.engines["D"].views[reader.rank]
            tables = reader.entry.request.consumer_blocks
            if reader.after is None:
                self.outcomes[reader.load.state] += 1
                failed = reader.load.state == "failed"
                check(Promise.EXPLAINED, failed == (reader.load.error is not None))
                if reader.load.state == "done":
                    self.right(reader)
                reader.after = {k: v[tables[k[0]].block_ids].copy() for k, v in views.items()}
            for key, view in views.items():
                ids = tables[key[0]].block_ids
                check(Promise.OVER, np.array_equal(reader.after[key], view[ids]), key)
        for entry in {id(r.entry): r.entry for r in self.readers}.values():
            readers = [r for r in self.readers if r.entry is entry]
            over = all(r.load is None or r.after is not None for r in readers)
            if over and len(readers) == len(self.engines["D"].sessions):
                self.readers = [r for r in self.readers if r.entry is not entry]
                self.free["D"] |= set(entry.request.consumer_blocks["full"].block_ids.tolist())

    def right(self, reader: Reader) -> None:
        """Check that a load that is done has the bytes of its request."""
        side, tables = self.engines["D"], reader.entry.request.consumer_blocks
        whole = attrs.evolve(reader.entry.request, cached_tokens=0)
        having = attrs.evolve(reader.entry, request=whole)
        for key, ids, right, counts in side.truth(reader.rank, having, tables, producer=False):
            wrong = (side.views[reader.rank][key][ids] != right) & counts
            check(Promise.VALID, not wrong.any(), key)

    def end(self) -> None:
        """Let everything in progress end; then nothing may be left on either side."""
        while self.to_hold or self.to_read:
            self.hold(0)
            self.read(0, "decline")
        for _ in range(40):
            while self.nixl.moving:
                self.land(0, "land")
            while self.net:
                self.deliver(0)
            self.advance(HEARTBEAT)
        for reader in self.readers:
            over = reader.load is None or reader.load.state != "moving"
            check(Promise.ENDS, over, reader.entry.remote_id)
        for name, side in self.engines.items():
            for rank, session in side.sessions.items():
                left = session.stats()
                engines = int(name == "D")
                check(Promise.CLEAN, SessionStats(engines=engines) == left, f"{rank}: {left}")
                own = session.nixl.stats()
                check(Promise.CLEAN, (0, 0) == (own.transfers, own.handles), f"{rank}: {own}")
        for entry in self.asked:
            everywhere = set(self.engines["P"].sessions) == set(entry.freed)
            check(Promise.FREED_ONCE, entry.lost or everywhere, entry.remote_id)

    def close(self) -> None:
        """Close every engine."""
        for side in self.engines.values():
            side.close()
            for session in side.sessions.values():
                check(Promise.CLEAN, NixlStats() == session.nixl.stats(), session)
