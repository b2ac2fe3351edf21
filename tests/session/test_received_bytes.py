"""Arbitrary bytes over the channel of a session raise nothing and change nothing."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from two_engines import Direct, Side, ended, engine, request, start_of

import kvspec
from kvspec.session import TcpChannel, new_remote_id
from kvspec.session.mailbox import ANSWER, CHALLENGE, INTRODUCTION, MAX_REFUSED, MESSAGE, QUESTION
from kvspec.testing import FakeNixl
from kvspec.wire.codec import decode_message, encode_message
from kvspec.wire.messages import (
    MESSAGES,
    ChecksumContents,
    ChecksumRequest,
    Done,
    Heartbeat,
    Key,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
    key_of,
)
from kvspec.wire.packing import pack
from kvspec.wire.seal import Secret
from kvspec.wire.versions import NO_START, OWN, START, VERSION

REMOTE_ID = new_remote_id("r")
ASK = pack(OWN)
HEAD = b"kvspec-message\n" + VERSION.to_bytes(2, "big")
RANK = kvspec.RankId()
CONTENTS = ChecksumContents(layer="l.0", parts=("k",), units=range(1), tokens=range(1))
RANKS = (RANK, kvspec.RankId(tp=7))
PARTIES = st.builds(
    RankAddress, st.sampled_from("PDX"), st.sampled_from((0, 1)), st.sampled_from(RANKS)
)  # fmt: skip
KEYS = st.sampled_from((key_of(REMOTE_ID), Key("r", b"another nonce"), Key("\0", bytes(8))))
SMALL = st.sampled_from((0, 1, 2, 3, 2**62, 2**63 - 1))


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """Draw a message that resembles a true one, which any holder of the secret could send."""
    kind = draw(st.sampled_from(sorted(MESSAGES)))
    more: dict[str, Any] = {}
    if kind in ("heartbeat", "done"):
        more["expected"] = draw(st.integers(1, 3))
    if kind == "lease":
        more["lease"] = draw(st.sampled_from((0.0, 1.0, 1e6)))
    if kind == "checksum_request":
        units, tokens = (range(draw(SMALL), draw(SMALL)) for _ in range(2))
        try:
            more["contents"] = ChecksumContents(
                layer="l.0", parts=("k",), units=units, tokens=tokens, rows=range(draw(SMALL))
            )
        except kvspec.SpecError:
            more["contents"] = ChecksumContents(
                layer="w.0", parts=("k",), units=range(1), tokens=range(1)
            )
    if kind == "checksum":
        more["total"] = draw(st.binary(min_size=8, max_size=8))
    message = MESSAGES[kind](
        key=draw(KEYS),
        by=draw(PARTIES),
        to=draw(PARTIES),
        number=draw(SMALL),
        **more,
    )  # fmt: skip
    return encode_message(message)


PURPOSES = st.sampled_from((MESSAGE, QUESTION, CHALLENGE, ANSWER, INTRODUCTION, b"kvspec-nixl-3\n"))
ANY_MESSAGES = st.one_of(
    st.binary(max_size=200),
    st.tuples(PURPOSES, st.binary(max_size=200)).map(b"".join),
    st.tuples(PURPOSES, st.binary(max_size=200) | messages()),
    st.tuples(st.just(MESSAGE), messages()),
)


def of_a_rank(starts: dict[str, bytes], purpose: bytes, body: bytes) -> tuple[bytes, bytes]:
    """Return a drawn message with the start of its sender's session."""
    if body.startswith(HEAD + NO_START):
        start = starts.get(decode_message(body).by.engine_id, NO_START)
        body = HEAD + start + body.removeprefix(HEAD + NO_START)
    return purpose, body


@given(st.lists(st.tuples(st.sampled_from("PD"), ANY_MESSAGES), max_size=40))
@settings(max_examples=50)
def test_arbitrary_messages_change_nothing(messages: list[tuple[str, Any]]) -> None:
    """Random bytes, sealed or not, and messages between any ranks about any request."""
    with (
        FakeNixl(lambda flight: flight.land() if flight.copies[0][2] == 1 else None),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D")) as consumer,
    ):
        consumer.connect(producer)
        producer.hold(REMOTE_ID, blocks=request().producer_blocks)
        (load,) = consumer.load(request(), REMOTE_ID, timeout=1e9)
        stranger, secret = Direct("stranger"), producer.sessions[RANK].nixl.secret
        starts = {"P": start_of(producer.first), "D": start_of(consumer.first)}
        for to, message in messages:
            data = (
                message if isinstance(message, bytes) else secret.seal(*of_a_rank(starts, *message))
            )
            stranger.send(to, data)
            producer.poll()
            assert load.poll() != "done"
        answers = [data for _, data in stranger.receive()]
        assert all(each.startswith((MESSAGE, CHALLENGE)) for each in answers)


def test_peer_without_secret_gets_no_answer() -> None:
    """A question that is sealed with another secret is recorded, and not answered."""
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        stranger = Direct("stranger")
        stranger.send("P", Secret(b"another secret, as long").seal(QUESTION, ASK))
        stranger.send("P", Secret(b"").seal(QUESTION, ASK))
        foreign = producer.sessions[RANK].settled().refused
        assert 2 == len([each for each in foreign if "damaged or of another secret" in each])
        assert [] == stranger.receive()
        secret = producer.sessions[RANK].nixl.secret
        stranger.send("P", secret.seal(QUESTION, ASK))
        stranger.send("P", secret.seal(ANSWER, challenge(producer, stranger, secret)))
        producer.poll()
        assert producer.introductions == [data for _, data in stranger.receive()]


class Watched(Direct):
    """A channel that records whom it trusts. Its connections stay until they are in `closed`."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.trusted, self.closed = list[str](), set[str]()

    def trust(self, route: str) -> None:
        """Record that *route* has shown a right seal."""
        self.trusted.append(route)

    def reaches(self, route: str) -> bool:
        """Whether the connection of *route* is open."""
        return route not in self.closed


class Readers:
    """The routes on which a producer receives messages that claim to come from one reader."""

    def __init__(self, producer: Side) -> None:
        self.producer, self.secret = producer, producer.sessions[RANK].nixl.secret
        self.start = NO_START
        self.routes = {name: Direct(name) for name in ("reader", "copy", "again")}
        producer.hold(REMOTE_ID)

    def answered(
        self, name: str, kind: type[Message] = Heartbeat, number: int = 0, to: str = "P", **own: Any
    ) -> list[str]:
        """Return which routes receive the answer to a message on the route *name*."""
        own |= {"expected": 1} if issubclass(kind, ReaderStatus) else {"contents": CONTENTS}
        receiver = RankAddress(to, 1, RANK)
        asked = kind(key_of(REMOTE_ID), RankAddress("D", 1, RANK), receiver, number, **own)
        self.routes[name].send("P", self.secret.seal(MESSAGE, encode_message(asked, self.start)))
        self.producer.poll()
        return [each for each, route in self.routes.items() if route.receive()]


@pytest.fixture
def watched() -> Iterator[Watched]:
    """Yield the channel of a producer."""
    with FakeNixl():
        yield Watched("P")


def test_copy_of_a_message_takes_no_answers_away(watched: Watched) -> None:
    """Nor does it make its connection trusted, until the connection of the sender has ended."""
    with Side("P", engine(1), polled=False, channel=watched) as producer:
        readers = Readers(producer)
        assert ["reader"] == readers.answered("reader", number=1)
        assert ["reader"] == readers.answered("reader", number=2)
        # The copies are refused, and those of other messages are not newer.
        assert [] == readers.answered("copy", number=1)
        assert [] == readers.answered("copy", number=2)
        assert [] == readers.answered("copy", number=9, to="Q")
        assert ["reader"] == readers.answered("reader", number=3)
        assert [] == readers.answered("copy", number=3)
        # A checksum request is answered whatever its number is.
        assert ["reader"] == readers.answered("reader", ChecksumRequest)
        assert ["reader", "copy"] == readers.answered("copy", ChecksumRequest)
        assert {"reader"} == set(watched.trusted)
        watched.closed.add("copy")
        assert ["reader"] == readers.answered("copy", ChecksumRequest)
        watched.closed.clear()
        # A newer message comes from the reader. So may an old one, if its connection has ended.
        assert ["again"] == readers.answered("again", number=4)
        watched.closed.add("again")
        assert ["copy"] == readers.answered("copy", ChecksumRequest)
        assert {"reader", "again", "copy"} == set(watched.trusted)


@pytest.mark.parametrize(("kind", "number"), [(Done, 5), (ChecksumRequest, 0)])
def test_reader_on_a_new_connection_is_answered_while_the_old_one_seems_open(
    watched: Watched, kind: type[Message], number: int
) -> None:
    """A firewall may end a connection that this side still sees. The reader repeats its message."""
    with Side("P", engine(1), polled=False, channel=watched) as producer:
        readers = Readers(producer)
        assert ["reader"] == readers.answered("reader", number=1)
        assert ["reader"] == readers.answered("reader", kind, number)
        for _ in range(2):
            assert ["reader", "again"] == readers.answered("again", kind, number)


def test_connection_of_a_rank_that_was_dialled_is_trusted(watched: Watched) -> None:
    """A producer that reads from its consumer too dials the address of the consumer."""
    with Side("P", engine(1), polled=False, channel=watched) as producer:
        session, readers = producer.sessions[RANK], Readers(producer)
        with Side("D", engine(1), polled=False, channel=Direct("D")) as consumer:
            session.connect(consumer.introductions)
            answers = Direct.channels["D"]
            readers.routes["D"], readers.start = answers, start_of(consumer.first)
            readers.answered("D", number=1)
            readers.answered("again", ChecksumRequest)
            assert "again" in watched.trusted


def challenge(producer: Side, asker: Direct, secret: Secret) -> bytes:
    """Return the random bytes that the producer sends to *asker*, whose question it has."""
    producer.poll()
    ((_, data),) = asker.receive()
    return secret.unseal("challenge", CHALLENGE, data, "a challenge")


def test_recorded_question_replayed_on_new_connection_gets_no_introduction() -> None:
    """Every frame of a good exchange is replayed, in order and each alone, over TCP."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        (holder,), (asker,) = producer.sessions.values(), consumer.sessions.values()
        recorded: list[bytes] = []
        receive = holder.channel.receive

        def record() -> list[tuple[str, bytes]]:
            came = receive()
            recorded.extend(data for _, data in came)
            return came

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder.channel, "receive", record)
            step = asker.channel.wait
            patch.setattr(asker.channel, "wait", lambda timeout: (holder.poll(), step(timeout)))
            assert producer.introductions == asker.fetch(producer.addresses)
        assert len(recorded) >= 1
        for frames in (recorded, *([each] for each in recorded)):
            stranger = TcpChannel()
            for each in frames:
                stranger.send(holder.channel.address, each)
            came: list[bytes] = []
            end = time.monotonic() + 0.3
            while time.monotonic() < end:
                holder.poll()
                came += [data for _, data in stranger.receive()]
            assert not [data for data in came if data.startswith(INTRODUCTION)]
            stranger.close()


def test_answer_counts_once_and_only_on_the_connection_that_was_challenged() -> None:
    """A copy of the answer is worth nothing, on the same connection and on another."""
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        (session,) = producer.sessions.values()
        secret, one, other = session.nixl.secret, Direct("one"), Direct("other")
        nonces = []
        for asker in (one, other):
            asker.send("P", secret.seal(QUESTION, ASK))
            nonces.append(challenge(producer, asker, secret))
        answer = secret.seal(ANSWER, nonces[0])
        for asker, answers in ((other, []), (one, producer.introductions), (one, []), (other, [])):
            asker.send("P", answer)
            producer.poll()
            assert answers == [data for _, data in asker.receive()]
        one.send("P", secret.seal(QUESTION, ASK))
        assert challenge(producer, one, secret) not in nonces


def test_first_introduction_that_verifies_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A false introduction and a later one do not replace it."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D")) as consumer,
    ):
        (session,), (good,) = consumer.sessions.values(), producer.introductions
        false = good[:-1] + bytes([good[-1] ^ 1])
        other = INTRODUCTION + bytes(99)

        def wait(timeout: float) -> None:
            session.channel.arrived += [("P", each) for each in (false, other, good, other, false)]

        monkeypatch.setattr(session.channel, "wait", wait)
        assert [good] == session.fetch(["P"], timeout=0.5)


@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,), (3,), (0, 2, 4), (1, 4)])
def test_fetch_over_own_channel_survives_lost_and_doubled_messages(
    lost: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A question, a challenge, an answer or an introduction may be lost, and all come twice."""
    monkeypatch.setattr("kvspec.session.mailbox.ASK_AGAIN", 0.02)
    monkeypatch.setattr("kvspec.session.mailbox.CHALLENGE_AGAIN", 0.01)
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D")) as consumer,
    ):
        (session,) = consumer.sessions.values()
        numbers, send = itertools.count(), Direct.send

        def lossy(self: Direct, route: str, data: bytes) -> None:
            for _ in range(0 if next(numbers) in lost else 2):
                send(self, route, data)

        def wait(timeout: float) -> None:
            producer.poll()
            time.sleep(timeout / 10)

        monkeypatch.setattr(Direct, "send", lossy)
        monkeypatch.setattr(session.channel, "wait", wait)
        assert producer.introductions == session.fetch(["P"], timeout=5.0)


def test_questions_in_a_row_get_one_challenge(monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer that repeats its question fills no queue. The challenge is repeated after a while.

    It is the same challenge, so that an answer on a slow way is not too late.
    """
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        stranger, secret = Direct("stranger"), producer.sessions[RANK].nixl.secret

        def asked(count: int) -> list[bytes]:
            for _ in range(count):
                stranger.send("P", secret.seal(QUESTION, ASK))
            producer.poll()
            return [data for _, data in stranger.receive()]

        (first,) = asked(1000)
        assert [] == asked(1)
        monkeypatch.setattr("kvspec.session.mailbox.CHALLENGE_AGAIN", 0.0)
        assert [first] == asked(1)


def test_challenges_that_wait_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest is forgotten: its answer gets nothing, and that of a newer one is good."""
    monkeypatch.setattr("kvspec.session.mailbox.MAX_CHALLENGES", 2)
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        secret = producer.sessions[RANK].nixl.secret
        askers = [Direct(name) for name in "abc"]
        for asker in askers:
            asker.send("P", secret.seal(QUESTION, ASK))
        nonces = [challenge(producer, asker, secret) for asker in askers]
        for asker, nonce in zip(askers, nonces, strict=True):
            asker.send("P", secret.seal(ANSWER, nonce))
        producer.poll()
        assert [0, 1, 1] == [len(asker.receive()) for asker in askers]


def test_rank_answers_no_challenge_of_a_peer_that_it_did_not_ask() -> None:
    """So an attacker cannot use a rank that knows the secret to answer a challenge."""
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        stranger, secret = Direct("stranger"), producer.sessions[RANK].nixl.secret
        stranger.send("P", secret.seal(CHALLENGE, bytes(16)))
        producer.poll()
        assert [] == stranger.receive()


def test_latest_refused_messages_are_returned_once() -> None:
    """Only `MAX_REFUSED` reasons are kept."""
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        stranger, session = Direct("stranger"), producer.sessions[RANK]
        for number in range(MAX_REFUSED + 9):
            stranger.send("P", bytes(number))
        producer.poll()
        foreign = session.settled().refused
        assert (MAX_REFUSED, ()) == (len(foreign), session.settled().refused)
        assert f"{MAX_REFUSED + 8} bytes" in foreign[-1]


def test_late_copy_with_right_seal_does_not_disconnect() -> None:
    """An introduction may be on its way over that connection."""
    with FakeNixl(), Side("P", engine(1), polled=False) as producer:
        (session,) = producer.sessions.values()
        stranger, secret = TcpChannel(), session.nixl.secret
        for purpose in (ANSWER, CHALLENGE):
            stranger.send(session.channel.address, secret.seal(purpose, bytes(16)))
        stranger.send(session.channel.address, secret.seal(QUESTION, ASK))
        came: list[bytes] = []
        end = time.monotonic() + 5.0
        while not came and time.monotonic() < end:
            producer.poll()
            came += [data for _, data in stranger.receive()]
        assert [True] == [data.startswith(CHALLENGE) for data in came]
        assert 2 == len(session.settled().refused)
        stranger.close()


def test_peer_that_was_chosen_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    """Strangers are logged for debugging only, since they could fill the log."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D")) as consumer,
        caplog.at_level("INFO", "kvspec.session"),
    ):
        (session,) = consumer.sessions.values()
        consumer.connect(producer)
        session.channel.arrived += [(route, b"?") for route in "PXPX"]
        session.poll()
        session.disconnect("P")
    names = [(each.levelname, each.message.partition(" ")[0]) for each in caplog.records]
    assert [("INFO", "connected"), ("WARNING", "P"), ("INFO", "disconnected")] == names


class Rejecting(Direct):
    """A channel that records the routes that its session rejects."""

    def __init__(self, address: str) -> None:
        super().__init__(address)
        self.rejected: list[str] = []

    def reject(self, route: str) -> None:
        """Record the route."""
        self.rejected.append(route)


def test_progress_of_an_older_producer_is_refused_by_name_and_it_stays_connected(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The producer sends it beside its answers, which must arrive."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=(channel := Rejecting("D"))) as consumer,
    ):
        consumer.connect(producer)
        producer.hold(REMOTE_ID)
        (load,) = consumer.load(request(), REMOTE_ID)
        own, me = producer.first, consumer.first.me
        data = encode_message(Valid(key_of(REMOTE_ID), own.me, me), start_of(own), 11)
        head = len(HEAD) + START
        kind, *fields = msgspec.msgpack.decode(data[head:])
        second = [*fields]
        second[3] = 1
        progress, again = (
            own.nixl.secret.seal(MESSAGE, data[:head] + msgspec.msgpack.encode(body))
            for body in (["progress", *fields, "full", "l.0", 14], [kind, *second])
        )
        channel.arrived += [("P", progress)] * 3 + [("P", again)]
        assert ["done"] == ended([load], producer, consumer)
        foreign = consumer.first.settled().refused
        assert [True] * 3 == ["'progress'" in line for line in foreign[:3]]
        assert [True] == ["attempt" in line for line in foreign[3:]]
        assert [] == channel.rejected
        channel.arrived.append(("P", progress[:-1]))
        consumer.poll()
        assert ["P"] == channel.rejected
    assert "valid" == kind
    assert 1 == sum("progress" in record.message for record in caplog.records)


def test_routes_of_latest_senders_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new message makes its sender the latest. A forgotten sender gets no answer."""
    monkeypatch.setattr("kvspec.session.mailbox.MAX_ROUTES", 2)
    with FakeNixl(), Side("P", engine(1), polled=False, channel=Direct("P")) as producer:
        (session,) = producer.sessions.values()
        producer.hold(REMOTE_ID)
        ranks = [Direct(name) for name in "abc"]

        def heartbeat(at: int) -> None:
            """Send a heartbeat of one rank."""
            by = RankAddress("D", 1, kvspec.RankId(tp=at))
            message = Heartbeat(key=key_of(REMOTE_ID), by=by, to=session.me, expected=3)
            ranks[at].send("P", session.nixl.secret.seal(MESSAGE, encode_message(message)))

        for at in (0, 1, 0, 2):
            heartbeat(at)
        session.poll()  # The answers are sent after all heartbeats were read.
        assert [1, 0, 1] == [len(rank.receive()) for rank in ranks]
