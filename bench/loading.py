"""How long one large load keeps a session, and how much of the caller's thread loads take.

The producer's ranks and the consumer run in this process, over a fake NIXL that moves no byte. So
the figures contain only kvspec. Run it in another checkout by its `PYTHONPATH`:

    PYTHONPATH=../before python bench/loading.py
"""

# ruff: noqa: ANN401, SLF001 - stand-ins for NIXL and for a lock

from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import attrs
import works

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Load, Session, new_remote_id
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeAgent
from kvspec.tickets import PrefillTicket

LARGE = works.Work(
    name="131,072 tokens, 60 layers, TP 4 -> 1",
    layers=60,
    spec=works.heads(8, 16),
    tp_sizes=(4, 1),
    tokens=131_072,
)
USUAL = attrs.evolve(LARGE, name="4,096 tokens, 60 layers, TP 4 -> 1", tokens=4_096)
HEARTBEAT = 0.1
STEP = 0.005
"""Seconds between two calls of a scheduler's loop."""


class TimedLock:
    """A lock that records the longest time for which it was held."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._since, self.longest = lock, 0.0, 0.0

    def __enter__(self) -> None:
        self._lock.acquire()
        self._since = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        self.longest = max(self.longest, time.perf_counter() - self._since)
        self._lock.release()


class EmptyAgent(FakeAgent):
    """An agent whose handles move nothing, and end after some seconds."""

    seconds = 1e9

    def prepXferDlist(self, *_: Any) -> int:  # noqa: N802, D102
        return next(self.net.numbers)

    def releasedDlistH(self, _: int) -> None:  # noqa: N802, D102
        return

    def makeXferReq(self, *_: Any) -> int:  # noqa: N802, D102
        return next(self.net.numbers)

    def createXferReq(self, *_: Any) -> int:  # noqa: N802, D102
        return next(self.net.numbers)

    def postXferReq(self, handle: int) -> Any:  # noqa: N802, D102
        self.handles[handle] = time.perf_counter() + self.seconds  # type: ignore[assignment]
        return self.net.NIXL_IN_PROG

    def getXferStatus(self, handle: int) -> Any:  # noqa: N802, D102
        over = self.handles[handle] <= time.perf_counter()  # type: ignore[operator]
        return self.net.NIXL_SUCCESS if over else self.net.NIXL_IN_PROG

    def releaseXferReq(self, handle: int) -> None:  # noqa: N802, D102
        del self.handles[handle]


class Engines:
    """The sessions of a producer and of a consumer with one rank, which are connected."""

    def __init__(self, work: works.Work, stack: ExitStack, seconds: float = 1e9) -> None:
        self.work = work
        net = stack.enter_context(FakeNixl())
        net.nixlAgent = type("nixlAgent", (EmptyAgent,), {"net": net, "seconds": seconds})
        sides = []
        for name, engine, pool, side in zip("PD", work.engines(), work.pools, (0, 1), strict=True):
            more: dict[str, Any] = {} if side == 0 else {"heartbeat": HEARTBEAT}
            ranks = []
            for rank, cache in works.caches(engine, pool, side):
                nixl = NixlRank(prefix=f"{name}-{rank}-", polled=False, secret=b"")
                stack.callback(nixl.close, 0.0)
                ranks.append(Session(nixl, cache, engine_id=name, epoch=1, background=True, **more))
                stack.callback(ranks[-1].close, 0.0)
            sides.append(ranks)
        self.producers, (self.consumer,) = sides
        self.lock = TimedLock(self.consumer._lock._lock)
        self.consumer._lock._lock = self.lock  # type: ignore[assignment]
        self.sent = [time.perf_counter()]
        send = self.consumer.channel.send

        def sent(*message: Any) -> None:
            self.sent.append(time.perf_counter())
            send(*message)

        self.consumer.channel.send = sent  # type: ignore[assignment]

    def ticket(self, name: str) -> PrefillTicket:
        """Hold a request, and return its ticket."""
        remote_id = new_remote_id(name)
        for one in self.producers:
            one.hold(remote_id)
        addresses = [one.channel.address for one in self.producers]
        tables = {works.GROUP: self.work.tables()[0].tolist()}
        tokens = self.work.tokens
        return PrefillTicket(
            engine_id="P", addresses=addresses, remote_id=remote_id, computed_tokens=tokens,
            tables=tables,
        )  # fmt: skip

    def load(self, name: str, ticket: PrefillTicket, blocks: Any, tokens: int) -> Load:
        """Start a load of *tokens*."""
        request = kvspec.TransferRequest(
            request_id=name,
            num_tokens=tokens,
            producer_blocks=ticket.tables,
            consumer_blocks={works.GROUP: blocks},
        )
        return self.consumer.load(request, ticket=ticket, timeout=60.0)

    def started(self, *loads: Load) -> None:
        """Wait until *loads* have posted their first reads."""
        while not all(load.in_flight for load in loads):
            time.sleep(1e-3)
            for load in loads:
                if load.error is not None:
                    raise load.error


def large() -> None:
    """Print how long the session is kept by the start of one large load."""
    with ExitStack() as stack:
        both = Engines(LARGE, stack)
        blocks = LARGE.tables()[1]
        small = both.load("small", both.ticket("small"), blocks[-1:], 16)
        both.started(small)
        ticket = both.ticket("large")
        time.sleep(3 * HEARTBEAT)
        both.lock.longest = 0.0
        del both.sent[:-1]
        begun = time.perf_counter()
        load = both.load("large", ticket, blocks[:-1], LARGE.tokens - 16)
        returned = time.perf_counter() - begun
        both.started(load)
        started = time.perf_counter() - begun
        time.sleep(2 * HEARTBEAT)
        gaps = [later - one for one, later in zip(both.sent, both.sent[1:], strict=False)]
        print(
            f"{LARGE.name}: load returned after {returned:.3f} s, reads posted after {started:.3f}"
            f" s, lock held {both.lock.longest:.3f} s at most, no message for {max(gaps):.3f} s"
            f" (heartbeat {HEARTBEAT} s)"
        )


def caller() -> None:
    """Print the share of the caller's thread that loads take, with eight of them in flight."""
    with ExitStack() as stack:
        both = Engines(USUAL, stack, seconds=0.05)
        blocks = USUAL.tables()[1]
        share = len(blocks) // 8
        spent, cpu, steps, done, number = 0.0, 0.0, 0, 0, 0
        loads: list[tuple[int, Load]] = []
        begun = time.perf_counter()
        while time.perf_counter() < begun + 5.0:
            ready = []
            for place in set(range(8)) - {place for place, _ in loads}:
                number += 1
                ready.append((place, both.ticket(f"r{number}")))
            at, used = time.perf_counter(), time.thread_time()
            for place, ticket in ready:
                own = blocks[place * share : place * share + share]
                loads.append((place, both.load(ticket.remote_id, ticket, own, 16 * share)))
            left = [(place, load) for place, load in loads if load.poll() == "moving"]
            both.consumer.settled()
            spent += time.perf_counter() - at
            cpu += time.thread_time() - used
            for _, load in loads:
                if load.state == "failed":
                    raise load.error or AssertionError
            done += len(loads) - len(left)
            loads, steps = left, steps + 1
            time.sleep(STEP)
        wall = time.perf_counter() - begun
        print(
            f"8 loads of {16 * share} tokens in flight: {done / wall:.0f} loads a second, the "
            f"caller's thread spends {spent / wall:.1%} in kvspec ({cpu / wall:.1%} of a core)"
        )


if __name__ == "__main__":
    threading.current_thread().name = "caller"
    large()
    caller()
