"""Two engines in one process: a producer "P", a consumer "D", and the messages between them.

How it works:
    `Side` is one engine: a session, a cache and its bytes for each rank. Tests of sessions connect
    two of them, over the real NIXL or a fake one, and call the sessions themselves.

    `TwoEngines` is the world of a test that performs steps in any order. It has a clock for each
    engine and a network that loses, repeats and delays messages. `play` draws the steps. A world
    records the truth apart from the tested objects, and raises `BrokenPromiseError` if they
    contradict it.
    Two worlds test two layers:

    ==================  ==========================  ==============================================
    module              tested objects              because
    ==================  ==========================  ==============================================
    `ledger_world`      the pure ledgers            no byte moves, so it performs thousands of
                                                    steps a second and can forge any message
    `session_world`     sessions with their         real bytes in blocks that requests reuse show
                        ledgers and NIXL ranks      a load that is done too early
    ==================  ==========================  ==============================================
"""

from __future__ import annotations

import enum
import os
import random
import time
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Self, TypeVar

import attrs
import pytest

import kvspec
from kvspec.nixl import NixlRank, Staging
from kvspec.session import Load, Session
from kvspec.session.channel import Channel
from kvspec.session.mailbox import open_introduction
from kvspec.testing import FakeNixl, oracle
from kvspec.wire.messages import key_of

if TYPE_CHECKING:
    import numpy as np

os.environ.setdefault("UCX_NET_DEVICES", "lo")
BLOCKS = 8
# Seconds for worlds. Heartbeats fit three times into a lease, the consumer waits longer than a
# lease for an answer, and `LONGEST` exceeds the timeout of a load.
LEASE, LONGEST, HEARTBEAT, PATIENCE, TIMEOUT = 10.0, 40.0, 3.0, 15.0, 25.0
Message = TypeVar("Message")


class Promise(enum.StrEnum):
    """What sessions and ledgers promise, whatever happens to messages, bytes, ranks and clocks."""

    VALID = "a load that is done has the bytes of its request"
    WHOLE = "a load that is done has received all of its tokens"
    ONCE = "a load moves no byte twice"
    OVER = "nothing writes the blocks of a load that has ended"
    ORDER = "a load ends, releases its blocks and closes, in this order and once"
    EXPLAINED = "a load has an error if and only if it failed"
    OWNED = "the blocks of a load that has ended can be loaded into"
    FREED_ONCE = "a held request is freed exactly once on each rank"
    UNREAD = "a request is freed when no reader reads it, or its lease is over"
    LEASED = "a heartbeat extends a lease once"
    ANSWERED = "without faults every load is done and every request is freed as read"
    PROMPT = "without lost messages, a request that was given up is freed when its readers end"
    ENDS = "every load ends"
    CLEAN = "nothing is left when everything has ended"


class BrokenPromiseError(AssertionError):
    """A promise that a world found broken."""

    def __init__(self, promise: Promise, why: object) -> None:
        super().__init__(f"{promise.name}: {promise}: {why}")
        self.promise = promise


def cases_of(
    faults: Mapping[Any, Mapping[Any, Promise]], slow: Container[object] = ()
) -> list[Any]:
    """Return one case of a test for each fault: where it is, the fault and the broken promise.

    Only the nightly run looks for the faults in *slow*.
    """
    return [
        pytest.param(
            *(where, fault, promise),
            id=f"{where}-{fault.__name__}",
            marks=[pytest.mark.slow] if fault in slow else [],
        )
        for where, some in faults.items()
        for fault, promise in some.items()
    ]


def check_breaks(promise: Promise, worlds: Iterator[object]) -> None:
    """Check that one of the *worlds*, played one after the other, breaks *promise* first."""
    with pytest.raises(BrokenPromiseError) as caught:
        deque(worlds, maxlen=0)
    assert promise == caught.value.promise


def check(promise: Promise, kept: object, why: object = "") -> None:
    """Raise `BrokenPromiseError` unless *kept*. *why* describes the case."""
    if not kept:
        raise BrokenPromiseError(promise, why)


class TwoEngines(Generic[Message]):
    """The clocks of two engines, and the messages that are on their way.

    Attributes:
        now: The time of the producer.
        stopped: Seconds for which the clock of the consumer stood still.
        net: Messages that were sent and not delivered yet.
    """

    def __init__(self) -> None:
        self.now = self.stopped = 0.0
        self.net: list[Message] = []

    def clock(self) -> float:
        """Return the time of the producer."""
        return self.now

    def reader_clock(self) -> float:
        """Return the time of the consumer."""
        return self.now - self.stopped

    def stop_clock(self, seconds: float) -> None:
        """Advance the producer's clock while the consumer's clock stands still."""
        self.stopped += seconds
        self.advance(seconds)

    def advance(self, seconds: float) -> None:
        """Advance the time."""
        raise NotImplementedError

    def take(self, at: int, *, keep: bool = False) -> Message | None:
        """Return a message of the network, or None. Remove it unless *keep*."""
        if not self.net:
            return None
        at %= len(self.net)
        return self.net[at] if keep else self.net.pop(at)


def play(
    drawn: random.Random, steps: int, rules: Iterable[tuple[float, Callable[[], object]]]
) -> None:
    """Perform *steps* that are drawn from *rules*: pairs of a weight and a call."""
    weights, calls = zip(*rules, strict=True)
    for call in drawn.choices(calls, weights, k=steps):
        call()


def engine(
    tp: int,
    heads: int = 2,
    block: int = 4,
    *,
    size: int = 4,
    state: bool = False,
    dtype: str = "uint8",
    **parallel: Any,
) -> kvspec.EngineSpec:
    """Return an engine with two full layers, a layer with a window, and an optional state."""
    sizes: dict[str, Any] = {"total_num_kv_heads": heads, "head_size": size, "dtype": dtype}
    full = kvspec.FullAttentionSpec(block_size=block, **sizes)
    window = kvspec.SlidingWindowSpec(block_size=block, sliding_window=8, **sizes)
    groups = [
        kvspec.KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=full),
        kvspec.KVCacheGroup(name="window", layers=["w.0"], spec=window),
    ]
    if state:
        conv = kvspec.MambaSpec.short_conv(
            conv_dim=6, conv_kernel=3, dtype="uint8", block_size=block
        )
        groups.append(kvspec.KVCacheGroup(name="state", layers=["s.0"], spec=conv))
    sizes = kvspec.ParallelConfig(tp_size=tp, **parallel)
    return kvspec.EngineSpec(groups=groups, parallel=sizes)


class Direct:
    """A channel inside this process. A message arrives at once."""

    channels: ClassVar[dict[str, Direct]] = {}

    def __init__(self, address: str) -> None:
        self.address, self.arrived = address, list[tuple[str, bytes]]()
        self.channels[address] = self

    def send(self, route: str, *messages: bytes) -> None:
        """Append *messages* to those of the receiver."""
        if route in self.channels:
            self.channels[route].arrived += [(self.address, data) for data in messages]

    def receive(self) -> list[tuple[str, bytes]]:
        """Return the messages that have arrived."""
        arrived, self.arrived = self.arrived, []
        return arrived

    def wait(self, timeout: float) -> None:
        """Return at once."""

    def close(self) -> None:
        """Remove the channel, so that later messages to it are lost."""
        self.channels.pop(self.address, None)


class Side:
    """One engine of this process: a session and a storage for each rank."""

    def __init__(
        self,
        name: str,
        spec: kvspec.EngineSpec,
        *,
        epoch: int = 1,
        polled: bool,
        staging: Staging | None = None,
        blocks: int = BLOCKS,
        channel: Channel | Callable[[kvspec.RankId], Channel] | None = None,
        **session: Any,
    ) -> None:
        self.name, self.spec, self.epoch = name, spec, epoch
        self.sessions: dict[kvspec.RankId, Session] = {}
        self.storage: dict[kvspec.RankId, dict[str, np.ndarray]] = {}
        self.before: dict[kvspec.RankId, dict[str, np.ndarray]] = {}
        for rank in spec.parallel.ranks:
            cache, storage = kvspec.allocate(spec, rank, num_blocks=blocks)
            nixl = NixlRank(prefix=f"{name}-{rank}-", polled=polled, staging=staging)
            own = channel(rank) if callable(channel) else channel
            self.sessions[rank] = Session(
                nixl, cache, engine_id=name, epoch=epoch, owner=storage, channel=own, **session
            )
            self.storage[rank] = storage

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def first(self) -> Session:
        """The session of the first rank."""
        return next(iter(self.sessions.values()))

    @property
    def introductions(self) -> list[bytes]:
        """The introductions of all ranks, which the other side connects with."""
        return [session.introduction for session in self.sessions.values()]

    @property
    def other_introductions(self) -> list[bytes]:
        """The introductions with another lease. So they connect the same ranks again."""
        secret = self.first.nixl.secret
        ranks = [open_introduction(sealed, secret) for sealed in self.introductions]
        return [attrs.evolve(rank, lease=rank.lease + 1).seal(secret) for rank in ranks]

    @property
    def addresses(self) -> list[str]:
        """The addresses of the ranks' channels."""
        return [session.channel.address for session in self.sessions.values()]

    def connect(self, producer: Side) -> None:
        """Connect every rank with the *producer*."""
        for session in self.sessions.values():
            session.connect(producer.introductions)

    def hold(self, remote_id: str, **more: Any) -> None:
        """Hold a request on every rank."""
        for session in self.sessions.values():
            session.hold(remote_id, **more)

    def load(self, request: kvspec.TransferRequest, remote_id: str, **more: Any) -> list[Load]:
        """Load a request on every rank."""
        options = {"timeout": 10.0, "remote_id": remote_id} | more
        return [session.load(request, **options) for session in self.sessions.values()]

    def poll(self) -> None:
        """Poll every rank once."""
        for session in self.sessions.values():
            session.poll()

    def fill(self, request: kvspec.TransferRequest, seed: int = 0) -> None:
        """Write a request's true bytes into the producer's ranks, and random bytes elsewhere."""
        for rank, storage in self.storage.items():
            tables = request.producer_blocks
            oracle.fill(self.spec, rank, storage, BLOCKS, tables, request, seed=seed)

    def spoil(self, request: kvspec.TransferRequest, seed: int = 0) -> None:
        """Write wrong bytes into the consumer's ranks where the request must write."""
        for rank, storage in self.storage.items():
            tables = request.consumer_blocks
            oracle.spoil(self.spec, rank, storage, BLOCKS, tables, request, seed=seed)
            self.before[rank] = {name: flat.copy() for name, flat in storage.items()}

    def wrong(self, request: kvspec.TransferRequest, seed: int = 0) -> list[str]:
        """Return every difference between the consumer's bytes and the oracle's."""
        return [
            f"{rank}: {line}"
            for rank, storage in self.storage.items()
            for line in oracle.check(
                self.spec, rank, self.before[rank], storage, BLOCKS, request.consumer_blocks,
                request, seed=seed,
            )
        ]  # fmt: skip

    def settled(self) -> tuple[list[str], list[str]]:
        """Return the request ids that any rank has freed: first as done, then otherwise."""
        settled = [session.settled() for session in self.sessions.values()]
        done = [key_of(name).request_id for some in settled for name in some.done]
        other = [
            key_of(name).request_id for some in settled for name in (*some.expired, *some.aborted)
        ]
        return sorted(done), sorted(other)

    def close(self) -> None:
        """Close all sessions and NIXL ranks."""
        for session in self.sessions.values():
            session.close(drain=0.0)
            session.nixl.close(drain=0.0)


def request(name: str = "r", tokens: int = 14, cached: int = 0, **more: Any) -> Any:
    """Return a request of *tokens* in blocks 1, 2, 3, ... of both sides, 4 tokens each.

    The consumer's table is reversed, so that a swap of the two tables is noticed.
    """
    blocks = list(range(1, -(-tokens // 4) + 1))
    tables: dict[str, Any] = {
        "producer_blocks": {"full": blocks, "window": blocks},
        "consumer_blocks": {"full": blocks[::-1], "window": blocks[::-1]},
    }
    return kvspec.TransferRequest(
        request_id=name, num_tokens=tokens, cached_tokens=cached, **tables | more
    )


def until(true: Callable[[], Any], *sides: Side, seconds: float = 20.0) -> None:
    """Poll the *sides* until *true* returns a true value."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, f"the condition stayed false for {seconds} s"
        for side in sides:
            side.poll()
        time.sleep(2e-4)  # Other threads and processes of the test need the core.


def start_of(session: Session) -> bytes:
    """Return the start that the messages of *session* contain."""
    return open_introduction(session.introduction, session.nixl.secret).handshake.start


def ended(loads: list[Load], *sides: Side) -> list[str]:
    """Wait until all of *loads* have ended, and return their states."""
    until(lambda: all(load.state != "moving" for load in loads), *sides)
    return [load.state for load in loads]


def quiet(*sides: Side) -> None:
    """Wait until no load is open and no request is held."""
    sessions = [session for side in sides for session in side.sessions.values()]
    until(lambda: not any(s.stats().loads + s.stats().held for s in sessions), *sides)


def freed(count: int, producer: Side, *others: Side) -> list[str]:
    """Wait until ranks of *producer* have freed *count* requests as done; return their names."""
    names: list[str] = []
    until(lambda: names.extend(producer.settled()[0]) or len(names) >= count, producer, *others)
    return sorted(names)


def let_nothing_land(net: FakeNixl) -> None:
    """Let transfers move nothing until a test lands them."""
    net.fate = lambda _: None


def land(net: FakeNixl) -> None:
    """Land all transfers that move."""
    for flight in net.moving:
        flight.land()


@contextmanager
def four_to_two(staging: Staging | None = None) -> Iterator[tuple[Side, Side]]:
    """Yield a producer of four ranks, two of which are read, and a connected consumer of two."""
    with (
        Side("P", engine(4), polled=False, lease=5.0, staging=staging) as producer,
        Side("D", engine(2), polled=True, heartbeat=0.2, staging=staging) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer
