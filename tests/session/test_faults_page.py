"""The rows of `docs/faults.md`, in processes over the real NIXL: shared memory and tcp.

`ROWS` names the test of each row, which runs over both transports. A soak puts the faults together.
"""

from __future__ import annotations

import inspect
import os
import re
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("nixl_cu13", reason="needs nixl")

from attacked import EMPTY, UNSEALED
from faulty_ranks import FaultyEngine, go_on, stop
from session_soak import LossyEngine, soak
from two_engines import Side, engine

import kvspec
from kvspec.run.rank_client import until
from kvspec.run.rank_server import Launch
from kvspec.session import TcpChannel, new_remote_id
from kvspec.session.mailbox import INTRODUCTION, MESSAGE
from kvspec.wire.codec import encode_message
from kvspec.wire.messages import MAX_REQUEST, Gone, Heartbeat, RankAddress, key_of
from kvspec.wire.seal import Secret

PAGE = Path(kvspec.__file__).parents[1] / "docs" / "faults.md"
# On one machine, UCX moves data through shared memory unless UCX_TLS forbids it.
SHARED = "all"
TRANSPORTS = [
    pytest.param(SHARED, id="shared"),
    pytest.param("tcp", id="tcp", marks=pytest.mark.slow),
]
pytestmark = [pytest.mark.faults, pytest.mark.nixl]
SAME = {"name": "the same agent", "prefix": ""}
TIMES = {"lease": 2.0, "heartbeat": 0.3, "patience": 2.0}
# For a test in which only the end of a reader may fail. A busy machine stops a rank for seconds.
LENIENT = {"lease": 6.0, "heartbeat": 0.3, "patience": 6.0}
DONE = ("done", "", {}, 0)
# Seconds until a load fails that should fail for another reason. A busy machine is slow.
LONG = 30.0


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """Return the `UCX_TLS` of the ranks."""
    return str(request.param)


def started(
    name: str,
    spec: kvspec.EngineSpec,
    epoch: int,
    transport: str,
    kind: type[FaultyEngine] = FaultyEngine,
    **more: Any,
) -> FaultyEngine:
    """Start an engine. Ranks of the producer "P" start no transfers."""
    agent = {"polled": name != "P"} | more.pop("nixl", {})
    options = {"blocks": 12, "nixl": agent, "session": TIMES} | more
    launch = Launch(name=name, epoch=epoch, **options)
    return kind(spec, launch, transport)


def asked(name: str, tokens: int = 14, block: int = 4, first: int = 1) -> kvspec.TransferRequest:
    """Return a request of *tokens*, in blocks from *first* on."""
    ids = list(range(first, first + -(-tokens // block)))
    tables = {"full": ids, "window": ids}
    return kvspec.TransferRequest(
        request_id=name, num_tokens=tokens, producer_blocks=tables, consumer_blocks=tables
    )


def load(
    producer: FaultyEngine, consumer: FaultyEngine, name: str, timeout: float = LONG
) -> list[Any]:
    """Hold and load a request. Return the outcome on each rank of the consumer."""
    remote_id = new_remote_id(name)
    producer.ask("hold", remote_id, asked(name), 7)
    consumer.ask("load", asked(name), remote_id, 7, timeout)
    return consumer.ended(name)


def dial(address: str, unread: int = 0) -> socket.socket:
    """Return a connection to a channel, which buffers at most *unread* bytes, if given."""
    host, _, port = address.rpartition(":")
    link = socket.socket()
    if unread:
        link.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, unread)
    link.settimeout(20.0)
    link.connect((host, int(port)))
    return link


def framed(data: bytes) -> bytes:
    """Return *data* as a channel sends it."""
    return len(data).to_bytes(4, "big") + data


END_OF_READER: dict[str, Callable[[FaultyEngine], object]] = {
    "close": lambda reader: reader.ask("close", 20.0),
    "close without time": lambda reader: reader.ask("close", 0.0),
    "kill": lambda reader: reader.kill(),
}


def ended_by_ucx(producer: FaultyEngine) -> bool:
    """Return whether UCX has aborted the process of the only rank."""
    return -signal.SIGABRT == producer.ranks[0].process.wait(10.0)


@pytest.mark.parametrize(
    "end",
    # A reader that has no time to drain is gone as fast as one that is killed.
    ["close", "kill", pytest.param("close without time", marks=pytest.mark.slow)],
)
def test_producer_serves_other_readers_after_a_reader_ends(transport: str, end: str) -> None:
    """It frees the request of that reader once. Over tcp, UCX may end the producer instead.

    Then loads of the other reader fail, and the next start of the producer serves it. A reader
    that closes with time to drain never ends the producer.
    """
    spec = engine(1, heads=2, block=16, size=512)
    tokens, options = 16 * 800, {"blocks": 804, "session": LENIENT}
    scattered = {name: [*range(1, 801, 2), *range(2, 801, 2)] for name in ("full", "window")}
    ordered = {name: [*range(1, 801)] for name in ("full", "window")}
    may_end = transport == "tcp" and end != "close"
    with started("E", spec, 1, transport, **options) as other:
        producer = started("P", spec, 1, transport, **options)
        for turn in (1, 2):
            other.connect(producer)
            names = []
            with started("D", spec, turn, transport, **options) as reader:
                reader.connect(producer)
                for one in (reader, other):
                    name = f"{turn} {one.ranks[0].name}"
                    request = kvspec.TransferRequest(
                        request_id=name, num_tokens=tokens, producer_blocks=scattered,
                        consumer_blocks=ordered,
                    )  # fmt: skip
                    remote_id = new_remote_id(name)
                    producer.ask("hold", remote_id, request, 7, lease=6.0)
                    one.ask("load", request, remote_id, 7, 60.0)
                    names.append(name)
                time.sleep(2e-2 * turn)
                END_OF_READER[end](reader)
            ((state, error, _, wrong),) = other.ended(names[1])
            assert 0 == wrong
            try:
                assert state == "done" or ended_by_ucx(producer), error
                ended, served = producer.settled(*names)
                assert ({"done"}, 1) == (served, len(ended))
            except ConnectionError:
                assert may_end
                assert ended_by_ucx(producer)
                assert state == "done" or "state=peer_lost" in error
                producer.kill()
                producer = started("P", spec, turn + 1, transport, **options)
        with producer:
            other.connect(producer)
            assert [DONE] == load(producer, other, "last")
            other.quiet()


def test_load_fails_when_its_producer_dies_before_or_during_it(transport: str) -> None:
    """A load that ended before is done. The next incarnation has the same names."""
    spec = engine(1, heads=1, block=16, size=8192)
    tokens, sizes = 16 * 60, {"blocks": 64}
    with started("D", spec, 1, transport, **sizes) as consumer:
        for epoch, moment in enumerate(("before", "during", "after"), 1):
            with started("P", spec, epoch, transport, nixl=SAME, **sizes) as producer:
                consumer.connect(producer)
                remote_id, request = new_remote_id(moment), asked(moment, tokens, 16)
                producer.ask("hold", remote_id, request, 7, lease=20.0)
                if moment == "before":
                    producer.kill()
                if moment == "during":
                    stop(producer.ranks[0])
                consumer.ask("load", request, remote_id, 7, LONG)
                if moment == "during":
                    assert "moving" == consumer.ranks[0].ask("state", moment)[0]
                    producer.kill()
                ((state, error, undefined_blocks, wrong),) = consumer.ended(moment)
                if moment == "after":
                    assert DONE == (state, error, undefined_blocks, wrong)
                    continue
                assert ("failed", 0) == (state, wrong)
                assert "rank=P tp0" in error
                assert "state=peer_lost" in error
                assert (moment == "during") <= bool(undefined_blocks)
        with started("P", spec, 9, transport, nixl=SAME, **sizes) as producer:
            consumer.connect(producer)
            assert [DONE] == load(producer, consumer, "last")
            consumer.quiet()
            producer.quiet()
            (_, nixl, threads, _) = consumer.ask("left")[0]
            assert (1, 2) == (nixl.peers, threads)


def test_load_fails_when_a_process_is_stopped_longer_than_the_lease(transport: str) -> None:
    """The consumer is stopped first, then a rank of the producer. Both continue to work."""
    with (
        started("P", engine(2), 1, transport) as producer,
        started("D", engine(1), 1, transport) as consumer,
    ):
        consumer.connect(producer)
        assert [DONE] == load(producer, consumer, "warm")
        remote_id = new_remote_id("slow")
        producer.ask("hold", remote_id, asked("slow", first=5), 7, lease=0.5)
        stop(consumer.ranks[0])
        assert [{"done"}, {"expired"}] == producer.settled(
            "warm", "slow"
        )  # Its blocks are overwritten.
        go_on(consumer.ranks[0])
        consumer.ask("load", asked("slow", first=5), remote_id, 7, LONG)
        ((state, error, undefined_blocks, _),) = consumer.ended("slow")
        assert "failed" == state
        assert "before it was read" in error
        assert {"full": (5, 6, 7, 8), "window": (6, 7, 8)} == undefined_blocks
        stop(producer.ranks[1])
        remote_id = new_remote_id("stopped")
        producer.ranks[0].ask("hold", remote_id, asked("stopped"), 7)
        consumer.ask("load", asked("stopped"), remote_id, 7, 1.0)
        time.sleep(1.2)
        go_on(producer.ranks[1])
        ((state, error, _, _),) = consumer.ended("stopped")
        assert "failed" == state
        assert "state=timeout" in error
        producer.ranks[1].ask("hold", remote_id, asked("stopped"), 7)
        producer.settled("stopped")
        consumer.quiet()
        producer.quiet()
        assert [DONE] == load(producer, consumer, "last")


def test_load_fails_when_a_rank_of_its_producer_is_closed(transport: str) -> None:
    """The rank is closed before a load, or during one. Its session answers that the data is gone.

    Over shared memory the bytes are read all the same. The other rank and the next incarnation
    continue to work.
    """
    spec = engine(2, block=16, size=4096)
    tokens, sizes = 16 * 60, {"blocks": 64}
    with started("D", spec, 1, transport, **sizes) as consumer:
        for epoch, moment in enumerate(("before", "during"), 1):
            with started("P", spec, epoch, transport, **sizes) as producer:
                consumer.connect(producer)
                assert [DONE] * 2 == load(producer, consumer, f"well {epoch}")
                remote_id, request = new_remote_id(moment), asked(moment, tokens, 16)
                producer.ask("hold", remote_id, request, 7, lease=20.0)
                closed = producer.ranks[0]
                if moment == "before":
                    closed.ask("shut")
                else:
                    stop(closed)
                consumer.ask("load", request, remote_id, 7, LONG)
                if moment == "during":
                    go_on(closed)
                    closed.ask("shut")
                (state, error, undefined_blocks, wrong), other = consumer.ended(moment)
                assert (DONE, 0) == (other, wrong)
                if moment == "before" or state == "failed":
                    assert ("failed", {"full", "window"}) == (state, set(undefined_blocks))
                    assert "P tp0" in error
                    assert "before it was read" in error or "peer_lost" in error
                how = {"failed": {"done", "expired"}, "done": {"done"}}
                assert [{"done"}, how[state]] == producer.settled(f"well {epoch}", moment)
                consumer.quiet()
                producer.quiet()


def test_late_load_of_reused_blocks_fails(transport: str) -> None:
    """It reads the bytes of another request, and the producer answers `gone` each time."""
    with (
        started("P", engine(1), 1, transport) as producer,
        started("D", engine(2, block=2), 1, transport) as consumer,
    ):
        consumer.connect(producer)
        for turn in range(5):
            first, second = f"first {turn}", f"second {turn}"
            remote_id = new_remote_id(first)
            ids = {"full": [1, 2], "window": [1, 2]}
            request = kvspec.TransferRequest(
                request_id=first, num_tokens=8, producer_blocks=ids,
                consumer_blocks={"full": [1, 2, 3, 4], "window": [1, 2, 3, 4]},
            )  # fmt: skip
            producer.ask("hold", remote_id, request, 7, lease=0.01)
            assert [{"expired"}] == producer.settled(first)
            producer.ask("hold", new_remote_id(second), request, 8, lease=0.1)
            consumer.ask("load", request, remote_id, 7, LONG)
            assert ["failed"] * 2 == [state for state, *_ in consumer.ended(first)]
            assert [{"expired"}] == producer.settled(second)
        consumer.quiet()
        producer.quiet()
        until(lambda: producer.ask("left")[0][0].remembered == 0)


def test_forked_child_has_no_session_and_its_parent_serves_on(transport: str) -> None:
    """The producer and the consumer fork, and the child of each ends as a program does."""
    with (
        started("P", engine(1), 1, transport) as producer,
        started("D", engine(1), 1, transport) as consumer,
    ):
        consumer.connect(producer)
        for turn, forking in enumerate((producer, consumer)):
            remote_id, request = new_remote_id(f"{turn}"), asked(f"{turn}")
            producer.ask("hold", remote_id, request, 7)
            consumer.ask("load", request, remote_id, 7, LONG)
            assert [("forked", 7)] == forking.ask("fork")
            assert [DONE] == consumer.ended(f"{turn}")
            assert [DONE] == load(producer, consumer, f"after {turn}")
        assert [{"done"}] * 4 == producer.settled("0", "after 0", "1", "after 1")
        consumer.quiet()


def test_engine_whose_session_was_interrupted_starts_again(transport: str) -> None:
    """A signal handler raises in `load` after 0.1 ms to 4 ms. The session has a thread."""
    delays = iter(number * 1e-4 for number in range(1, 41))
    with started("P", engine(1), 1, transport) as producer:
        for epoch in range(1, 4):
            with started("D", engine(1), epoch, transport) as consumer:
                consumer.connect(producer)
                left = False
                while not left:
                    delay = next(delays)
                    name = f"{epoch} {delay:.4f}"
                    remote_id, request = new_remote_id(name), asked(name)
                    producer.ask("hold", remote_id, request, 7)
                    (left,) = consumer.ask("interrupt", delay, "load", request, remote_id, 7, LONG)
                    if not left:
                        assert [DONE] == consumer.ended(name)
        with started("D", engine(1), 4, transport) as consumer:
            consumer.connect(producer)
            assert [DONE] == load(producer, consumer, "last")
        until(lambda: not producer.ask("left")[0].session.held)


def test_lost_doubled_reordered_and_forged_messages_change_no_outcome(transport: str) -> None:
    """Ranks lose, double or delay three messages in twenty. A forger claims the contrary."""
    forger, secret = TcpChannel(), Secret(b"the secret of a forger")
    with (
        started("P", engine(1), 1, transport, LossyEngine) as producer,
        started("D", engine(2), 1, transport, LossyEngine) as consumer,
    ):
        consumer.connect(producer)
        addresses = [*producer.ask("address"), *consumer.ask("address")]
        for turn in range(20):
            name = f"{turn}"
            remote_id, request = new_remote_id(name), asked(name)
            producer.ask("hold", remote_id, request, 7, lease=LONG)
            consumer.ask("load", request, remote_id, 7, LONG)
            by, to = (RankAddress(one, 1, kvspec.RankId()) for one in "PD")
            lie = secret.seal(MESSAGE, encode_message(Gone(key_of(remote_id), by, to)))
            for address in addresses:
                forger.send(address, lie)
            forger.receive()
            assert [DONE] * 2 == consumer.ended(name)
            assert [{"done"}] == producer.settled(name)
        consumer.quiet()
        producer.quiet()
    forger.close()


class RecordedChannel(TcpChannel):
    """A channel whose messages an attacker on the network records."""

    def __init__(self) -> None:
        self.recorded: list[bytes] = []
        super().__init__()

    def send(self, route: str, *messages: bytes) -> None:
        """Send and record *messages*."""
        self.recorded.extend(messages)
        super().send(route, *messages)


def test_recorded_request_for_an_introduction_returns_none(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attacker repeats all messages of the asker on one connection, and each on its own."""
    monkeypatch.setenv("UCX_TLS", transport)
    channel = RecordedChannel()
    with (
        started("P", engine(1), 1, transport) as producer,
        Side("D", engine(1), polled=True, channel=channel) as consumer,
    ):
        (address,) = producer.ask("address")
        assert producer.ask("introduce") == consumer.first.fetch([address])
        assert 2 <= len(channel.recorded)
        for messages in (channel.recorded, *([one] for one in channel.recorded)):
            attacker, answers = TcpChannel(), list[bytes]()
            for one in messages:
                attacker.send(address, one)
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                answers += [data for _, data in attacker.receive()]
                time.sleep(1e-3)
            assert not [data for data in answers if data.startswith(INTRODUCTION)]
            attacker.close()


def test_connections_of_strangers_stop_no_load_and_no_reader(transport: str) -> None:
    """Some send nothing, some half a message, and some messages with a wrong seal."""
    with (
        started("P", engine(1), 1, transport) as producer,
        started("D", engine(1), 1, transport) as consumer,
    ):
        consumer.connect(producer)
        (address,) = producer.ask("address")
        links = []
        for number in range(300):
            links.append(dial(address))
            if data := (b"", b"\0\0\1", EMPTY, UNSEALED)[number % 4]:
                links[-1].send(data)
        assert [DONE] == load(producer, consumer, "meanwhile")
        with started("E", engine(1), 1, transport) as new:
            new.connect(producer)
            assert [DONE] == load(producer, new, "new")
        for link in links:
            link.close()


def test_peer_that_reads_no_answers_is_disconnected(transport: str) -> None:
    """It knows the secret, and asks for a request that was freed. Other loads are done.

    The name of the request is long, so that the answers soon fill the buffers of the system.
    """
    secret = Secret(os.environ["KVSPEC_SECRET"].encode())
    by, to = (RankAddress(name, 1, kvspec.RankId()) for name in "XP")
    name = "u" * MAX_REQUEST
    remote_id = new_remote_id(name)
    with (
        started("P", engine(1), 1, transport) as producer,
        started("D", engine(1), 1, transport) as consumer,
    ):
        consumer.connect(producer)
        producer.ask("hold", remote_id, asked(name), 7, 0.01)
        assert [{"expired"}] == producer.settled(name)
        (address,) = producer.ask("address")
        link = dial(address, unread=4096)
        beat = Heartbeat(key_of(remote_id), by, to, expected=1)

        def disconnected() -> bool:
            try:
                for _ in range(100):
                    link.sendall(framed(secret.seal(MESSAGE, encode_message(beat))))
            except OSError:
                return True
            return False

        assert not disconnected()
        assert [DONE] == load(producer, consumer, "before")
        until(disconnected, 40.0)
        assert [DONE] == load(producer, consumer, "after")
        link.close()


def test_soak_with_every_fault_loses_no_request() -> None:
    """Six processes move 40 requests. Three messages in twenty are lost, doubled or delayed.

    `python tests/support/session_soak.py --tls tcp` does it over tcp.
    """
    figures = soak(requests=40, faults=8)
    print(figures)  # noqa: T201
    assert (40, 8) == (figures.requests, figures.faults)
    assert (0, 0, 0) == (figures.lost, figures.wrong, figures.leaked)
    assert 40 * 2 == figures.done + figures.failed + figures.gone
    assert figures.done > figures.failed > 0


ENDS = test_producer_serves_other_readers_after_a_reader_ends
RESTARTS = test_load_fails_when_its_producer_dies_before_or_during_it
ROWS: dict[str, Callable[..., None]] = {
    "A reader closes": ENDS,
    "The process of a reader is killed": ENDS,
    "The rank of a reader closes": ENDS,
    "The process of a producer is killed": RESTARTS,
    "An engine starts again": RESTARTS,
    "A producer's `NixlRank` is closed": test_load_fails_when_a_rank_of_its_producer_is_closed,
    "A process is stopped": test_load_fails_when_a_process_is_stopped_longer_than_the_lease,
    "A load comes": test_late_load_of_reused_blocks_fails,
    "A process forks": test_forked_child_has_no_session_and_its_parent_serves_on,
    "A call of a session is": test_engine_whose_session_was_interrupted_starts_again,
    "Messages are": test_lost_doubled_reordered_and_forged_messages_change_no_outcome,
    "An attacker": test_recorded_request_for_an_introduction_returns_none,
    "Strangers": test_connections_of_strangers_stop_no_load_and_no_reader,
    "A peer": test_peer_that_reads_no_answers_is_disconnected,
}
"""The test of each row of the page, by the first words of the row."""


def test_every_row_of_the_page_has_a_test_over_both_transports() -> None:
    """The rows of the page and of `ROWS` are the same, in the same order."""
    table = PAGE.read_text().split("\n| event |")[1].split("\n\n")[0]
    events = re.findall(r"^\| (.*?) \|", table, re.MULTILINE)[1:]
    assert len(ROWS) == len(events)
    for event, (words, test) in zip(events, ROWS.items(), strict=True):
        assert event.startswith(words)
        assert "transport" in inspect.signature(test).parameters
