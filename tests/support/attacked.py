"""Processes for tests of attacks: one whose sessions serve loads, and some that attack it.

`python attacked.py victim` opens a producer and a consumer in one process, with a limit of 1,024
descriptors, and obeys the commands on its input: `load` prints the seconds of some loads, `new`
those in which a new reader connects and loads, and `stats` the longest `poll` since the last call.

`python attacked.py idle|empty|unsealed ADDRESS COUNT` opens COUNT connections to ADDRESS and keeps
them open. Those of `empty` and `unsealed` send frames without an end, and connect again if they are
closed. An attacker prints a line when its connections are open, and ends with its input.

`python attacked.py quiet SECONDS` prints the share of a core that two idle sessions use.

`python attacked.py serve` prints how many requests of another process a consumer loads a second.

`bench/attacks.py` runs this file against other checkouts too, so it accepts their older names.
"""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Session, TcpChannel, new_remote_id
from kvspec.testing.fake_nixl import FakeNixl

LIMIT = 1024  # descriptors of the victim: the usual limit of a process
LOADS = 50
BLOCKS = 128
FLYING, SERVING, MOST = 64, 5.0, 4000  # loads in flight, for so many seconds, and in all
EMPTY = bytes(4) * 16384
UNSEALED = b"".join(
    len(data).to_bytes(4, "big") + data for data in [b"kvspec-message-1\n" + bytes(60_000)]
)


def report(value: object) -> None:
    """Write a line for the parent process."""
    sys.stdout.write(f"{json.dumps(value)}\n")
    sys.stdout.flush()


def engine() -> Any:
    """Return an engine of one rank."""
    spec = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=4, dtype="uint8")
    group = kvspec.KVCacheGroup(name="full", layers=["l.0"], spec=spec)
    return kvspec.EngineSpec(groups=[group])


class TimedChannel(TcpChannel):
    """A channel that measures the polls of a background session.

    The thread of the session waits on the channel between two polls.
    """

    longest, resumed = 0.0, 0.0

    def wait(self, timeout: float) -> None:
        """Wait, and measure the time since the last wait ended."""
        if self.resumed:
            self.longest = max(self.longest, time.monotonic() - self.resumed)
        super().wait(timeout)
        self.resumed = time.monotonic()


def opened(stack: ExitStack, name: str, *, background: bool = True, channel: Any = None) -> Any:
    """Open a session with a thread, or one that the caller polls."""
    cache, storage = kvspec.allocate(engine(), kvspec.RankId(), num_blocks=BLOCKS)
    secret = b"the secret of this test"
    nixl = stack.enter_context(NixlRank(prefix=f"{name}-", secret=secret, polled=not background))
    session = Session(
        nixl, cache, engine_id=name, owner=storage, background=background, channel=channel
    )
    return stack.enter_context(session)


def connect(session: Any, address: str) -> None:
    """Fetch the introduction of the producer at *address*, and connect to it."""
    found = session.fetch([address], timeout=20.0)
    (getattr(session, "connect", None) or session.meet)(found)


def load(session: Any, producer: Any, name: str) -> None:
    """Load one request, and wait until it is done."""
    remote_id = new_remote_id(name)
    (getattr(producer, "hold", None) or producer.ledger.expect)(remote_id)
    tables = {"full": [1, 2, 3]}
    request = kvspec.TransferRequest(
        request_id=name, num_tokens=12, producer_blocks=tables, consumer_blocks=tables
    )
    session.load(request, remote_id=remote_id, timeout=60.0, engine_id="P").wait()


def timed(work: Callable[[], object]) -> float:
    """Return the seconds of one call of *work*."""
    start = time.monotonic()
    work()
    return time.monotonic() - start


def victim() -> None:
    """Serve loads, and obey commands."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (LIMIT, hard))
    with ExitStack() as stack:
        stack.enter_context(FakeNixl())
        channel = TimedChannel()
        producer, consumer = opened(stack, "P", channel=channel), opened(stack, "D")
        connect(consumer, producer.channel.address)
        done = names = 0
        settled = getattr(producer, "settled", None) or producer.ledger.poll
        report(producer.channel.address)
        for line in sys.stdin:
            first = names + 1
            if line.strip() == "load":
                names += LOADS

                def some(first: int = first, last: int = names) -> None:
                    for number in range(first, last + 1):
                        load(consumer, producer, f"r{number}")

                answer: Any = timed(some)
            elif line.strip() == "new":
                names += 1

                def new(name: str = f"r{names}", reader: str = f"N{names}") -> None:
                    with ExitStack() as more:
                        session = opened(more, reader)
                        connect(session, producer.channel.address)
                        load(session, producer, name)

                answer = timed(new)
            else:
                end = time.monotonic() + 20.0
                while done < names and time.monotonic() < end:
                    done += len(settled().done)
                    time.sleep(1e-3)
                answer = {"poll": channel.longest, "lost": names - done}
                channel.longest = 0.0
            report(answer)


def dialled(address: tuple[str, int]) -> socket.socket | None:
    """Return a connection that does not block, or None if it is not accepted within a second."""
    try:
        link = socket.create_connection(address, timeout=1.0)
    except OSError:
        return None
    link.settimeout(0)
    return link


def attack(kind: str, address: str, count: int) -> None:
    """Open *count* connections, and send by them what *kind* demands."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    descriptors = count + 64
    if soft < descriptors:
        resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, max(hard, descriptors)))
    host, _, port = address.rpartition(":")
    where, data = (host, int(port)), {"empty": EMPTY, "unsealed": UNSEALED}.get(kind, b"")
    links: list[socket.socket] = []
    started = False
    while not select.select([sys.stdin], [], [], 0.01 if started else 0)[0]:
        if len(links) < count and (kind != "idle" or not started):
            links += [link for _ in range(32) if (link := dialled(where)) is not None]
        if not started and (len(links) >= count or kind != "idle"):
            started = True
            report("ready")
        for link in list(links) if data else ():
            try:
                for _ in range(16):
                    link.send(data)
            except BlockingIOError:
                pass
            except OSError:
                link.close()
                links.remove(link)
    for link in links:
        link.close()


def quiet(seconds: float) -> None:
    """Print the share of a core that a producer and a consumer use while nothing happens."""
    with ExitStack() as stack:
        stack.enter_context(FakeNixl())
        producer, consumer = opened(stack, "P"), opened(stack, "D")
        connect(consumer, producer.channel.address)
        load(consumer, producer, "r")
        time.sleep(1.0)
        before = time.process_time()
        time.sleep(seconds)
        report((time.process_time() - before) / seconds / 2)


def hold() -> None:
    """Hold many requests over the real NIXL, until the input ends."""
    with ExitStack() as stack:
        producer = opened(stack, "P")
        names = [new_remote_id(f"r{number}") for number in range(MOST)]
        for name in names:
            (getattr(producer, "hold", None) or producer.ledger.expect)(name, lease=600.0)
        report([producer.channel.address, names])
        sys.stdin.read()


def serve() -> None:
    """Load as many requests of another process as possible in a while, 64 at a time.

    Print how many were done in a second, and the 99th percentile of the seconds of `load`.
    """
    with ExitStack() as stack:
        command = [sys.executable, __file__, "hold"]
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        child = subprocess.Popen(command, text=True, **pipes)  # noqa: S603 - this file
        assert child.stdin is not None
        assert child.stdout is not None
        stack.callback(child.wait)
        stack.callback(child.stdin.close)
        address, names = json.loads(child.stdout.readline())
        consumer = opened(stack, "D", background=False)
        connect(consumer, address)
        flying, begun, done = list[Any](), list[float](), 0
        free = [*range(BLOCKS)]
        start = time.monotonic()
        while time.monotonic() < start + SERVING and (flying or names):
            while len(flying) < FLYING and names:
                block, remote_id = free.pop(), names.pop()
                tables = {"full": [block]}
                request = kvspec.TransferRequest(
                    request_id=remote_id, num_tokens=4,
                    producer_blocks=tables, consumer_blocks=tables,
                )  # fmt: skip
                before = time.monotonic()
                load = consumer.load(request, remote_id=remote_id, timeout=60.0)
                begun.append(time.monotonic() - before)
                flying.append((load, block))
            consumer.poll()
            ended = [pair for pair in flying if pair[0].state != "moving"]
            free += [block for _, block in ended]
            done += sum(load.state == "done" for load, _ in ended)
            flying = [pair for pair in flying if pair not in ended]
        taken = time.monotonic() - start
        begun.sort()
        report({"rate": done / taken, "p99": begun[int(len(begun) * 0.99)]})


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        if sys.argv[1] == "victim":
            victim()
        elif sys.argv[1] in ("hold", "serve"):
            (hold if sys.argv[1] == "hold" else serve)()
        elif sys.argv[1] == "quiet":
            quiet(float(sys.argv[2]))
        else:
            attack(sys.argv[1], sys.argv[2], int(sys.argv[3]))
