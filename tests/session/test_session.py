"""Sessions of two engines in one process, over memory or NIXL: they meet, load, hold, refuse."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import msgspec
import numpy as np
import pytest

import kvspec
from kvspec.errors import MismatchError, SpecError, TransferError, WireError

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from sessions import Side, engine, new_remote_id, request, until

from kvspec.nixl import NixlRank, Staging
from kvspec.session import Load, Session, TcpChannel
from kvspec.session.mailbox import INTRODUCTION, introduced
from kvspec.session.stats import SessionStats
from kvspec.testing import FakeNixl
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.wire.codec import encode_handshake
from kvspec.wire.messages import MESSAGES, ChecksumUnavailable, key_of


@contextlib.contextmanager
def two(staging: Staging | None = None) -> Iterator[tuple[Side, Side]]:
    """Yield a producer of four ranks, two of which are read, and a consumer of two."""
    with (
        Side("P", engine(4), polled=False, lease=5.0, staging=staging) as producer,
        Side("D", engine(2), polled=True, heartbeat=0.2, staging=staging) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


@pytest.fixture
def net() -> Iterator[FakeNixl]:
    """Replace nixl."""
    with FakeNixl() as fake:
        yield fake


@pytest.fixture
def pair(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Return two engines over memory."""
    with two() as sides:
        yield sides


@pytest.fixture(params=["fake", "staged", pytest.param("real", marks=pytest.mark.nixl)])
def either(request: pytest.FixtureRequest) -> Iterator[tuple[Side, Side]]:
    """Return two engines over memory, also through areas of two batches, and over nixl."""
    staging = (
        Staging(buffer=4096, slot_bytes=2048, always=True) if request.param == "staged" else None
    )
    if request.param == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    nixl = contextlib.nullcontext() if request.param == "real" else FakeNixl()
    with nixl, two(staging) as sides:
        yield sides


def ended(loads: list[Load], *sides: Side) -> list[str]:
    """Wait until all of *loads* ended, and return how."""
    until(lambda: all(load.state != "moving" for load in loads), *sides)
    return [load.state for load in loads]


def quiet(*sides: Side) -> None:
    """Wait until nothing is said or held any more."""
    sessions = [session for side in sides for session in side.sessions.values()]
    until(lambda: not any(s.stats().loads + s.stats().held for s in sessions), *sides)


def test_a_request_is_loaded_and_freed(either: tuple[Side, Side]) -> None:
    """Every rank's load is done, each byte is right, and each producer rank frees it once."""
    producer, consumer = either
    asked = request(tokens=14, cached=3)
    remote_id = new_remote_id("cmpl-1")
    producer.fill(asked)
    consumer.spoil(asked)
    producer.hold(remote_id)
    loads = consumer.load(asked, remote_id)
    assert ["done", "done"] == ended(loads, producer, consumer)
    assert [] == consumer.wrong(asked)
    assert [(None, {})] * 2 == [(load.error, load.undefined_blocks) for load in loads]
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 4, producer, consumer)
    assert ["cmpl-1"] * 4 == done
    quiet(producer, consumer)
    for session in (*producer.sessions.values(), *consumer.sessions.values()):
        assert 0 == session.nixl.stats().transfers
        assert (0, 0, 0) == attrs.astuple(session.stats())[:3]


@pytest.mark.parametrize("wrong", [None, "1", True, -1, float("nan"), float("inf"), 10**400])
def test_seconds_are_a_finite_number(pair: tuple[Side, Side], wrong: Any) -> None:
    """Anything else is refused by name, however large an int is."""
    _, consumer = pair
    with pytest.raises(SpecError, match="timeout="):
        consumer.load(request(), new_remote_id("r"), timeout=wrong)


def test_what_is_not_written_can_be_zeroed(pair: tuple[Side, Side]) -> None:
    """`unwritten_ranges` are the bytes of the request's own blocks that hold what others left."""
    producer, consumer = pair
    longer = [6, 5, 4, 3, 2]  # a block for tokens 16 to 19, too
    asked = request(tokens=14, consumer_blocks={"full": longer, "window": longer})
    remote_id = new_remote_id("cmpl-1")
    producer.hold(remote_id)
    for rank, load in zip(consumer.sessions, consumer.load(asked, remote_id), strict=True):
        ended([load], producer, consumer)
        left = {name: flat.ctypes.data for name, flat in consumer.storage[rank].items()}
        spans = load.unwritten_ranges
        assert (np.uint64, (len(spans), 2)) == (spans.dtype, spans.shape)
        # 4 tokens of 2 layers and of 1, K and V, 1 head of 4 bytes
        assert 4 * (2 + 1) * 2 * 4 == int(spans[:, 1].sum())
        assert all(
            any(0 <= int(at) - start < 1 << 20 for start in left.values()) for at in spans[:, 0]
        )


def test_a_full_hit_and_a_release_move_nothing(pair: tuple[Side, Side]) -> None:
    """What is cached whole is done at once, and told to every producer rank, as a release is."""
    producer, consumer = pair
    hit, given_up = new_remote_id("hit"), new_remote_id("given up")
    producer.hold(hit)
    producer.hold(given_up)
    loads = consumer.load(request(tokens=14, cached=14), hit)
    assert ["done", "done"] == [load.state for load in loads]
    for session in consumer.sessions.values():
        session.decline(given_up)
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 8, producer, consumer)
    assert ["given up"] * 4 + ["hit"] * 4 == sorted(done)


def test_a_promise_of_whole_blocks_makes_fewer_rows(pair: tuple[Side, Side]) -> None:
    """The same bytes move; who breaks it is refused by name, and it can be taken back."""
    producer, consumer = pair
    session, other = consumer.sessions.values()

    def rows() -> int:
        found = session._remotes.find("producer", None).tables.values()
        return sum(len(table.consumer_rows) for table in found)

    plain = rows()
    for one in (session, other):
        one.connect(producer.introductions, prefix_multiple=4)
    assert rows() < plain
    asked, remote_id = request(tokens=14, cached=8), new_remote_id("r")
    producer.fill(asked)
    consumer.spoil(asked)
    producer.hold(remote_id)
    loads = consumer.load(asked, remote_id)
    assert ["done", "done"] == ended(loads, producer, consumer)
    assert [] == consumer.wrong(asked)
    with pytest.raises(SpecError, match="prefix_multiple=4") as caught:
        session.load(request(cached=7), remote_id=new_remote_id("r"), timeout=1.0)
    assert ("cached_tokens", 7) == (caught.value.field, caught.value.value)
    with pytest.raises(SpecError) as caught:
        session.connect(producer.introductions, prefix_multiple=0)
    assert ("prefix_multiple", 0) == (caught.value.field, caught.value.value)
    quiet(producer, consumer)
    session.connect(producer.introductions)
    assert plain == rows()


def test_samples_of_a_prompt_are_counted(pair: tuple[Side, Side]) -> None:
    """A request that two samples read is held until both did."""
    producer, consumer = pair
    remote_id = new_remote_id("n=2")
    producer.hold(remote_id)
    first = consumer.load(request("a"), remote_id, sample=0, samples=2)
    assert ["done", "done"] == ended(first, producer, consumer)
    assert ([], []) == producer.settled()
    for session in consumer.sessions.values():
        session.decline(remote_id, sample=1, samples=2)
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 4, producer, consumer)


def test_what_the_producer_let_go_is_not_done(pair: tuple[Side, Side]) -> None:
    """A reader that comes after the lease, or for a request that was dropped, fails closed."""
    producer, consumer = pair
    late, aborted = new_remote_id("late"), new_remote_id("dropped")
    producer.hold(late, lease=0.01)
    producer.hold(aborted)
    for session in producer.sessions.values():
        session.abort(aborted)
    expired: list[str] = []
    until(lambda: expired.extend(producer.settled()[1]) or len(expired) == 4, producer)
    assert ["late"] * 4 == expired
    loads = []
    for name, remote_id in (("a", late), ("b", aborted)):
        loads += consumer.load(request(name), remote_id)
        assert ["failed"] * 2 == ended(loads[-2:], producer, consumer)
    for load in loads:
        assert load.error is not None
        assert "gone" == load.error.state
        assert "freed it before it was read" in str(load.error)
        assert {"full": (1, 2, 3, 4), "window": (1, 2, 3)} == load.undefined_blocks  # tokens 7..13


def test_a_load_that_nobody_answers_fails_in_time(pair: tuple[Side, Side]) -> None:
    """All bytes are there, but nobody says that they were valid: not done, and said so."""
    _, consumer = pair
    loads = consumer.load(request(), new_remote_id("r"), timeout=0.3)
    assert ["failed"] * 2 == ended(loads, consumer)
    assert ["timeout"] * 2 == [load.error.state for load in loads if load.error]
    with pytest.raises(TransferError, match=r"not there in time.*request=r"):
        loads[0].wait()


def test_a_load_can_be_cancelled(pair: tuple[Side, Side]) -> None:
    """It fails, and the producer's blocks are free as soon as it is told."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    loads = consumer.load(request(), remote_id)
    for load in loads:
        load.cancel()
    assert ["failed"] * 2 == ended(loads, consumer)
    done: list[str] = []
    until(lambda: done.extend(producer.settled()[0]) or len(done) == 4, producer, consumer)


def test_all_is_checked_before_anything_moves(pair: tuple[Side, Side]) -> None:
    """Block tables, ids and engines that cannot be are refused by name; nothing is left of it."""
    _, consumer = pair
    session = next(iter(consumer.sessions.values()))
    good, remote_id = request(), new_remote_id("r")
    bad = attrs.evolve(good, consumer_blocks={"full": [1, 2, 3, 77], "window": [1, 2, 3, 4]})
    for asked, more, error, words in (
        (bad, {}, SpecError, "consumer_blocks"),
        (good, {"remote_id": "r"}, SpecError, "new_remote_id"),
        (good, {"remote_id": "r#zz"}, SpecError, "new_remote_id"),
        (good, {"remote_id": b"r"}, SpecError, "remote_id"),
        (good, {"engine_id": "Q"}, SpecError, "engine_id"),
        (good, {"timeout": float("nan")}, SpecError, "timeout"),
        (good, {"attempt": -1}, SpecError, "attempt"),
    ):
        given: dict[str, Any] = {"remote_id": remote_id, "timeout": 1.0} | more
        with pytest.raises(error, match=words):
            session.load(asked, **given)
        assert 0 == session.stats().loads == session.nixl.stats().transfers
    load = session.load(good, remote_id=remote_id, timeout=9.0)
    with pytest.raises(SpecError, match="open"):
        session.load(good, remote_id=new_remote_id("r"), timeout=9.0)
    load.cancel()


def test_load_ignores_tables_of_excluded_group(net: FakeNixl) -> None:
    """A draft moves nothing: its table may be short, and two loads may name one block of it."""
    sides = []
    for tp in (4, 2):
        full, window = engine(tp).groups
        draft = attrs.evolve(window, excluded=window.layers)
        sides.append(attrs.evolve(engine(tp), groups=(full, draft)))
    with (
        Side("P", sides[0], polled=False, lease=5.0) as producer,
        Side("D", sides[1], polled=True, heartbeat=0.2) as consumer,
    ):
        consumer.connect(producer)
        loads: list[Load] = []
        for name, full_blocks in (("a", [1, 2]), ("b", [3, 4])):
            blocks = {"full": full_blocks, "window": [5]}
            remote_id = new_remote_id(name)
            producer.hold(remote_id)
            asked = request(name, tokens=8, producer_blocks=blocks, consumer_blocks=blocks)
            loads += consumer.load(asked, remote_id)
        assert {"done"} == {*ended(loads, producer, consumer)}


def test_a_request_is_held_once(pair: tuple[Side, Side]) -> None:
    """The same name cannot be held twice. An abort of another name changes nothing."""
    session = next(iter(pair[0].sessions.values()))
    remote_id = new_remote_id("r")
    session.hold(remote_id)
    with pytest.raises(SpecError) as caught:
        session.hold(remote_id)
    assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)
    session.abort(new_remote_id("r"))
    assert (remote_id,) == session.held
    for name in ("", "x" * 1025, "\ud800", b"binary", None):
        with pytest.raises(SpecError, match="request_id"):
            new_remote_id(name)  # type: ignore[arg-type]


def own(session: Session, **changes: Any) -> bytes:
    """Return the introduction of a session that tells something else."""
    told = session._own
    changed = attrs.evolve(told, handshake=attrs.evolve(told.handshake, **changes))
    return changed.seal(session.nixl.secret)


def body_of(address: object, shake: bytes) -> bytes:
    """Return the body of an introduction."""
    return msgspec.msgpack.encode((address, 30.0, 5.0, shake))


def good_seal_of(session: Session, body: bytes) -> bytes:
    """Return *body* as an introduction that the session can open."""
    return session.nixl.secret.seal(INTRODUCTION, body)


def test_who_does_not_fit_is_refused_by_name(pair: tuple[Side, Side]) -> None:
    """Wrong secrets, ranks missing or twice, other models, replica policies, starts.

    Nobody is met.
    """
    producer, consumer = pair
    session = next(iter(consumer.sessions.values()))
    first, *rest = producer.sessions.values()
    others = [each.introduction for each in rest]
    good = first.introduction
    older = [own(each, epoch=0) for each in producer.sessions.values()]
    newer = [own(each, epoch=9) for each in producer.sessions.values()]
    salted, peers = kvspec.ReplicaPolicy("spread", 3), session.nixl.peers
    with NixlRank("other", secret=b"another secret, long enough") as other:
        foreign = first._own.seal(other.secret)
    shake = encode_handshake(first._own.handshake)
    other_version = shake.replace(b"kvspec-handshake\n\0", b"kvspec-handshake\n\1")
    assert shake != other_version
    versioned, short, lying = (
        session.nixl.secret.seal(INTRODUCTION, body)
        for body in (
            body_of("h:1", other_version), body_of("h:1", shake[:-1]), body_of("h" * 256, shake),
        )
    )  # fmt: skip
    for introductions, error, words in (
        ([versioned, *others], WireError, "version"),
        ([short, *others], WireError, "complete"),
        ([lying, *others], WireError, "introduction"),
        ([good_seal_of(session, b""), *others], WireError, "introduction"),
        ([foreign, *others], WireError, "secret"),
        ([good[:-1], *others], WireError, "damaged"),
        ([b"rubbish", *others], WireError, "Session.introduction"),
        (others, SpecError, "tp0"),
        ([good, good, *others], SpecError, "once"),
        ([], SpecError, "each"),
        (good, SpecError, "introductions"),
        ([own(first, epoch=2), *others], MismatchError, "epoch"),
        (older, SpecError, "epoch=0"),
        ([own(s, model="m") for s in producer.sessions.values()], MismatchError, "model"),
        (
            [own(s, replica_policy=salted) for s in producer.sessions.values()],
            MismatchError,
            "replica_policy",
        ),
        ([own(s, engine_id="D") for s in producer.sessions.values()], MismatchError, "itself"),
        (consumer.introductions, MismatchError, "itself"),
    ):
        with pytest.raises(error, match=words):
            session.connect(introductions)
        assert peers == session.nixl.peers
    with pytest.raises(SpecError, match="'producer' or 'consumer'"):
        session.connect([good, *others], role="friend")  # type: ignore[arg-type]
    session.connect([good, *others])
    assert peers == session.nixl.peers
    session.connect(newer)
    with pytest.raises(SpecError, match="epoch=1"):
        session.connect([good, *others])


def test_an_epoch_is_shared_by_the_ranks_of_a_start(net: FakeNixl) -> None:
    """An engine of several ranks has to say which; one of one rank need not."""
    cache, storage = kvspec.allocate(engine(2), kvspec.RankId(), num_blocks=2)
    with NixlRank("r", polled=True) as nixl:
        with pytest.raises(SpecError, match="2 ranks") as caught:
            Session(nixl, cache, engine_id="D")
        assert ("epoch", None) == (caught.value.field, caught.value.value)
        with pytest.raises(SpecError, match="engine_id"):
            Session(nixl, cache, engine_id="", epoch=1)
        with pytest.raises(SpecError, match="a RankCache"):
            Session(nixl, storage, engine_id="D")  # type: ignore[arg-type]
        cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
        before = time.time_ns()
        with Session(nixl, cache, engine_id="D", owner=storage) as session:
            assert session.me.epoch >= before


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lease": -1.0}, "lease=-1.0"),
        ({"longest": float("nan")}, "longest=nan"),
        ({"heartbeat": "1"}, "heartbeat='1'"),
        ({"patience": None}, "patience=None"),
        ({"model": ""}, "model=''"),
        ({"replica_policy": "spread"}, "replica_policy='spread'"),
        ({"epoch": -1}, "epoch=-1"),
        ({"engine_id": ""}, "engine_id=''"),
    ],
)
def test_what_is_wrong_registers_nothing(net: FakeNixl, wrong: dict[str, Any], words: str) -> None:
    """A session that was refused leaves the rank as it was: another can have the same memory."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
    with NixlRank("r", polled=True) as nixl:
        before = nixl.stats()
        with pytest.raises(SpecError, match=words):
            Session(nixl, cache, **{"engine_id": "D", "owner": storage} | wrong)
        assert before == nixl.stats()


def test_introductions_are_fetched_over_the_channel(pair: tuple[Side, Side]) -> None:
    """Who knows where the ranks' channels are needs nothing else; who is not there is named."""
    producer, consumer = pair
    session = next(iter(consumer.sessions.values()))
    stop = threading.Event()

    def serve() -> None:
        while not stop.is_set():
            producer.poll()
            time.sleep(1e-3)

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        assert producer.introductions == session.fetch(producer.addresses)
    finally:
        stop.set()
        thread.join()
    # The time in the message is `timeout`, or `absent` if no process accepts connections.
    for address, seconds in (("127.0.0.1:9", {"timeout": 0.1}), ("nowhere", {"absent": 0.1})):
        with pytest.raises(TransferError, match=r"0\.1 s") as caught:
            session.fetch([address], **{"timeout": 5.0, **seconds})
        assert (address, "timeout") == (caught.value.rank, caught.value.state)
    with pytest.raises(SpecError, match="addresses"):
        session.fetch("127.0.0.1:9")


def test_who_is_there_is_waited_for_longer(pair: tuple[Side, Side]) -> None:
    """Who takes a connection and is silent has all the time, and is told from who is not there."""
    session = next(iter(pair[1].sessions.values()))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        start = time.monotonic()
        with pytest.raises(
            TransferError, match=rf"{address} within 0.5 s: the process there is silent"
        ):
            session.fetch([address], timeout=0.5, absent=0.1)
        assert time.monotonic() - start >= 0.5


def test_who_hangs_up_is_not_waited_for(pair: tuple[Side, Side]) -> None:
    """A listener that lets go of each connection, and one that is gone meanwhile."""
    session = next(iter(pair[1].sessions.values()))
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    server.accept()[0].close()

        thread = threading.Thread(target=hang_up)
        thread.start()
        start = time.monotonic()
        with pytest.raises(TransferError, match=rf"no introduction from {address}"):
            session.fetch([address], timeout=1.0, absent=1.0)
        assert time.monotonic() - start < 5.0
        server.shutdown(socket.SHUT_RDWR)
        thread.join()
    start = time.monotonic()
    with pytest.raises(
        TransferError, match=rf"{address} within 0.2 s: no process accepts connections"
    ):
        session.fetch([address], timeout=60.0, absent=0.2)
    assert time.monotonic() - start < 5.0


def test_a_thread_moves_a_session_on(net: FakeNixl) -> None:
    """With a thread of its own nobody has to poll: questions are answered, loads end."""
    before = threading.active_count()
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(2), polled=True, background=True) as consumer,
    ):
        for session in consumer.sessions.values():
            session.connect(session.fetch(producer.addresses))
        asked, remote_id = request(), new_remote_id("r")
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        loads = consumer.load(asked, remote_id)
        until(lambda: all(load.state == "done" for load in loads))
        assert [] == consumer.wrong(asked)
        until(lambda: not producer.sessions[kvspec.RankId()].held)
        assert before + 3 == threading.active_count()
    assert before == threading.active_count()


def test_a_restarted_producer_is_met_anew(either: tuple[Side, Side]) -> None:
    """What is loaded from its last start fails; what it says now is believed, and loads go on."""
    consumer = either[1]
    old = consumer.load(request("old"), new_remote_id("old"))
    with Side("P", engine(1), epoch=2, polled=False) as again:
        consumer.connect(again)
        assert ["failed"] * 2 == [load.state for load in old]
        assert all("was restarted" in str(load.error) for load in old)
        asked, remote_id = request("new"), new_remote_id("new")
        again.fill(asked)
        consumer.spoil(asked)
        again.hold(remote_id)
        loads = consumer.load(asked, remote_id)
        assert ["done"] * 2 == ended(loads, again, consumer)
        assert [] == consumer.wrong(asked)
        quiet(again, consumer)
        for session in consumer.sessions.values():
            assert 1 == len(session.nixl.peers)
            assert (1, 0) == (session.stats().engines, session.stats().leaving)
            session.disconnect("P")
            assert () == session.nixl.peers
            with pytest.raises(SpecError, match="none yet"):
                session.decline(remote_id)


def test_a_closed_session_leaves_nothing(pair: tuple[Side, Side]) -> None:
    """Its loads fail, its peers are parted from, and nothing of it is open."""
    _, consumer = pair
    session = next(iter(consumer.sessions.values()))
    load = session.load(request(), remote_id=new_remote_id("r"), timeout=9.0)
    session.close()
    session.close()
    assert "failed" == load.poll()
    assert "cancelled" in str(load.error)
    assert (0, 0) == (len(session.nixl.peers), session.nixl.stats().transfers)
    assert 0 == len(session.channel)  # type: ignore[arg-type]
    session.nixl.close()
    assert "failed" == load.poll()
    assert SessionStats(loads=session.stats().loads) == session.stats()


def test_a_closed_rank_holds_nothing(pair: tuple[Side, Side]) -> None:
    """All bytes had arrived, but nobody can say that they were valid: the load fails, by name."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    loads = consumer.load(request(), remote_id)
    (first, *_) = producer.sessions.values()
    first.nixl.close()
    assert ["failed", "done"] == ended(loads, producer, consumer)
    assert "P tp0 freed it before it was read" in str(loads[0].error)
    freed: tuple[list[str], list[str]] = [], []

    def settled() -> bool:
        for known, new in zip(freed, producer.settled(), strict=True):
            known.extend(new)
        return len(freed[0] + freed[1]) == 4

    until(settled, consumer)
    assert (["r"] * 3, ["r"]) == freed
    quiet(producer, consumer)


def hang(net: FakeNixl) -> None:
    """Let nothing land by itself."""
    net.fate = lambda _: None


def test_a_failed_load_is_over_when_nothing_moves(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """It has failed, and says so; but its blocks are its own until the last byte has landed."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    hang(net)
    (load,) = consumer.load(request(), remote_id, timeout=0.05)[:1]
    until(lambda: load.error, producer, consumer)
    assert load.error is not None
    assert "timeout" == load.error.state
    assert "moving" == load.poll()
    assert {"full", "window"} == set(load.undefined_blocks)
    session = next(iter(consumer.sessions.values()))
    with pytest.raises(TransferError, match="busy"):
        session.load(request("another"), remote_id=new_remote_id("another"), timeout=9.0)
    assert ([], []) == producer.settled()
    for flight in net.moving:
        flight.land()
    assert ["failed"] == ended([load], producer, consumer)
    quiet(producer, consumer)
    assert 0 == session.nixl.stats().transfers


def test_load_whose_start_nixl_refuses_gives_its_blocks_back(
    net: FakeNixl, pair: tuple[Side, Side]
) -> None:
    """NIXL refuses bytes that the caller's own transfer writes; the load can begin after that."""
    producer, consumer = pair
    session = next(iter(consumer.sessions.values()))
    remote_id = new_remote_id("r")
    producer.fill(request())
    producer.hold(remote_id)
    consumer.spoil(request())
    hang(net)
    lane = next(iter(session._remotes.find("producer", "P").lanes.values()))
    own = session.nixl.move("READ", [lane.sides(request())], request="own", timeout=9.0)
    with pytest.raises(TransferError) as refused:
        session.load(request(), remote_id=remote_id, timeout=9.0)
    assert "busy" == refused.value.state
    assert (SessionStats(engines=1), {}) == (
        session.stats(),
        session._loads._locks._busy._places,
    )
    for flight in net.moving:
        flight.land()
    own[0].wait()
    net.fate = FakeFlight.land
    load = session.load(request(), remote_id=remote_id, timeout=9.0)
    assert ["done"] == ended([load], producer, consumer)


def test_load_is_not_done_when_its_clock_stood_still_beyond_the_lease() -> None:
    """The producer's answer decides, not the lease that the consumer measured."""
    now = {"P": 0.0, "D": 0.0}
    with (
        FakeNixl() as net,
        Side("P", engine(1), polled=False, lease=5.0, clock=lambda: now["P"]) as producer,
        Side("D", engine(1), polled=True, heartbeat=1.0, clock=lambda: now["D"]) as consumer,
    ):
        consumer.connect(producer)
        remote_id = new_remote_id("r")
        producer.fill(request())
        consumer.spoil(request())
        producer.hold(remote_id)
        hang(net)
        (load,) = consumer.load(request(), remote_id)
        (session,) = consumer.sessions.values()
        until(lambda: _granted(session), producer, consumer)
        now["P"] += 60.0  # a paused machine: its own clock stands still
        assert ["r"] == producer.settled()[1]
        producer.fill(request(), seed=7)  # the blocks are another request's by now
        for flight in net.moving:
            flight.land()
        assert ["failed"] == ended([load], producer, consumer)
        assert load.error is not None
        assert "gone" == load.error.state


def _granted(session: Session) -> bool:
    """Return whether the producer has answered every question of the only load."""
    (pending,) = session._loads.book._loads.values()
    return bool(pending.asked) and not any(pending.asked.values())


def test_an_error_says_what_was_lost(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """Which rank, which request, layers, heads and tokens, what NIXL said, and what to do."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    hang(net)
    load = consumer.load(request("mine"), remote_id)[1]
    for flight in net.moving:
        flight.fail(0.5)
    assert ["failed"] == ended([load], producer, consumer)
    error = str(load.error)
    for words in (
        "nixl check failed: RemoteDisconnect",
        "from tp2: group full, layers l.0 to l.1, k+v unit 1, tokens 0..13",
        "group window, layers w.0 to w.0, k+v unit 1, tokens 7..13",
        "compute them, or load the request again",
        "rank=P tp2, request=mine, state=peer_lost",
    ):
        assert words in error
    quiet(producer, consumer)
    net.fate = FakeFlight.land
    session = list(consumer.sessions.values())[1]
    assert load.remote.plan is not session.connect(producer.introductions), "its lane was lost"
    asked, again = request("again"), new_remote_id("again")
    producer.fill(asked)
    producer.hold(again)
    load = session.load(asked, remote_id=again, timeout=9.0)
    assert ["done"] == ended([load], producer, consumer)


def test_a_load_of_which_nothing_was_posted_leaves_its_blocks_as_they_were(net: FakeNixl) -> None:
    """It waits for room in the area: nothing of it is undefined when it is given up."""
    staging = Staging(buffer=4096, slot_bytes=4096, always=True)
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True, staging=staging) as consumer,
    ):
        consumer.connect(producer)
        (session,) = consumer.sessions.values()
        hang(net)
        first, second = (
            session.load(
                request(name, 4, consumer_blocks={"full": [block], "window": [block]}),
                remote_id=new_remote_id(name), timeout=9.0,
            )
            for name, block in (("a", 1), ("b", 2))
        )  # fmt: skip
        for load in (first, second):
            load.cancel()
        assert ({}, "failed") == (second.undefined_blocks, second.poll())
        assert ({}, {"full": (1,), "window": (1,)}) == (
            second.undefined_blocks,
            first.undefined_blocks,
        )
        for flight in net.moving:
            flight.land()
        assert ["failed"] == ended([first], producer, consumer)
        assert {"full": (1,), "window": (1,)} == first.undefined_blocks


def test_one_of_several_sources_fails_the_load(net: FakeNixl) -> None:
    """The others are broken off, and nothing is called done."""
    with (
        Side("P", engine(2), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        consumer.connect(producer)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        hang(net)
        (load,) = consumer.load(request(), remote_id)
        first, second = net.moving
        first.fail()
        until(lambda: load.error, producer, consumer)
        assert "moving" == load.poll()
        second.land()
        assert ["failed"] == ended([load], producer, consumer)
        quiet(producer, consumer)


@pytest.mark.parametrize("more", [{}, {"follow": True}], ids=repr)
def test_who_is_parted_from_fails_its_loads(
    net: FakeNixl, pair: tuple[Side, Side], more: dict[str, Any]
) -> None:
    """Those of it alone, by name, each when nothing of it moves any more."""
    _, consumer = pair
    session = next(iter(consumer.sessions.values()))
    with Side("Q", engine(4), polled=False) as other:
        session.connect(other.introductions)
        hang(net)
        given: dict[str, Any] = {"timeout": 9.0, **more}
        gone = session.load(request("a"), remote_id=new_remote_id("a"), engine_id="P", **given)
        asked = request("b", 4, consumer_blocks={"full": [7], "window": [7]})
        stays = session.load(asked, remote_id=new_remote_id("b"), engine_id="Q", **given)
        moving = [flight for flight in net.moving if flight.copies[0][2]]
        session.disconnect("P")
        assert "P was disconnected" in str(gone.error)
        assert (None, "moving") == (stays.error, stays.poll())
        assert ("failed" if more else "moving") == gone.poll()
        for flight in moving:
            flight.land()
        assert ["failed"] == ended([gone], consumer)
        with pytest.raises(SpecError, match="connected producers: Q"):
            session.load(request("c"), remote_id=new_remote_id("c"), engine_id="P", **given)


def test_what_nobody_waits_for_is_noted(pair: tuple[Side, Side]) -> None:
    """Answers and words about pushes that came twice, or to nobody: each is told once, and why."""
    producer, consumer = pair
    (by, *_), (session, *_) = producer.sessions.values(), consumer.sessions.values()
    for kind, why in (
        ("valid", "no open load"),
        ("stopped", "waits for no such push"),
        ("checksum_unavailable", "no question is open for it"),
    ):
        key = key_of(new_remote_id("r"))
        message = MESSAGES[kind](key=key, by=by.me, to=session.me)
        session._deliver(message)
        (told,) = session.settled().foreign
        assert (kind, True) == (told.split()[0], why in told)
    load = session.load(request(), remote_id=new_remote_id("r"), timeout=9.0)
    session._deliver(ChecksumUnavailable(key=load.plan.name[0], by=by.me, to=session.me))
    assert "no question is open" in session.settled().foreign[-1]


def test_a_killed_producer_fails_its_loads(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """Whether it dies while it is read, or after; and the consumer serves on."""
    producer, consumer = pair
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    hang(net)
    loads = consumer.load(request(), remote_id, timeout=0.2)
    for name in list(net.agents):
        if name.startswith("P"):
            net.kill(name)
    assert ["failed"] * 2 == ended(loads, consumer)
    assert ["peer_lost"] * 2 == [load.error.state for load in loads if load.error]


def test_strangers_and_rubbish_change_nothing(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """What is not sealed by the secret is noted, and answered by nobody."""
    producer, consumer = pair
    session = next(iter(producer.sessions.values()))
    rubbish = b"", b"rubbish", b"kvspec-message-1\n" + bytes(99), b"kvspec-question-2\n"
    strangers = [TcpChannel() for _ in rubbish]
    for stranger, data in zip(strangers, rubbish, strict=True):
        stranger.send(session.channel.address, data)
    foreign: list[str] = []

    def heard() -> bool:
        assert [] == [each for stranger in strangers for each in stranger.receive()]
        foreign.extend(session.settled().foreign)
        return len(foreign) >= 4 and not any(map(len, strangers))

    until(heard, consumer)
    assert 4 == len(foreign)
    assert "damaged or of another secret" in " ".join(foreign)
    for stranger in strangers:
        stranger.close()


@pytest.mark.parametrize("kind", ["fake", pytest.param("real", marks=pytest.mark.nixl)])
def test_a_producer_may_push(kind: str) -> None:
    """Each rank writes its part into all that need it; the loads wait, and are as sure as reads."""
    if kind == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    with (
        FakeNixl() if kind == "fake" else contextlib.nullcontext(),
        Side("P", engine(4), polled=False) as producer,
        Side("D", engine(2, block=2), polled=False) as consumer,
    ):
        consumer.connect(producer)
        for session in producer.sessions.values():
            session.connect(consumer.introductions, role="consumer")
        asked = request(tokens=7, consumer_blocks={"full": [1, 3, 5, 7], "window": [1, 3, 5, 7]})
        remote_id = new_remote_id("r")
        producer.fill(asked)
        consumer.spoil(asked)
        producer.hold(remote_id)
        loads = consumer.load(asked, remote_id, pushed=True)
        pushes = [
            session.push(asked, remote_id=remote_id, timeout=9.0, epoch=1)
            for session in producer.sessions.values()
        ]
        assert ["done"] * 2 == ended(loads, producer, consumer)
        assert ["done"] * 4 == [push.poll() for push in pushes]
        assert [] == consumer.wrong(asked)
        done: list[str] = []
        until(lambda: done.extend(producer.settled()[0]) or len(done) == 4, producer, consumer)
        quiet(producer, consumer)


@pytest.fixture
def pushing(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Return a producer of two ranks that met the consumer of one."""
    with (
        Side("P", engine(2), polled=True) as producer,
        Side("D", engine(1), polled=False, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        for session in producer.sessions.values():
            session.connect(consumer.introductions, role="consumer")
        yield producer, consumer


def test_what_was_given_up_is_not_pushed(net: FakeNixl, pushing: tuple[Side, Side]) -> None:
    """Neither what is in flight when a load is cancelled ends it early, nor does more begin."""
    producer, consumer = pushing
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    hang(net)
    first, second = producer.sessions.values()
    push = first.push(request(), remote_id=remote_id, timeout=9.0, epoch=1)
    (load,) = consumer.load(request(), remote_id, pushed=True)
    load.cancel()
    end = time.monotonic() + 0.3
    while time.monotonic() < end:
        for side in pushing:
            side.poll()
    assert ("moving", "moving") == (load.state, push.state)
    for flight in net.moving:
        flight.land()
    assert ["failed"] == ended([load], producer, consumer)
    assert {"full", "window"} == set(load.undefined_blocks)
    assert "failed" == push.poll()
    assert "stopped" == push.error.state
    quiet(producer, consumer)
    with pytest.raises(SpecError, match="hold") as caught:
        second.push(request(), remote_id=remote_id, timeout=9.0, epoch=1)
    assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)


def test_a_push_that_fails_fails_the_load(net: FakeNixl, pushing: tuple[Side, Side]) -> None:
    """Whoever writes says that it will not be whole; both ends name the ranks."""
    producer, consumer = pushing
    remote_id = new_remote_id("r")
    producer.hold(remote_id)
    hang(net)
    (load,) = consumer.load(request(), remote_id, pushed=True)
    asked: dict[str, Any] = {"remote_id": remote_id, "timeout": 9.0}
    pushes = [s.push(request(), epoch=1, **asked) for s in producer.sessions.values()]
    with pytest.raises(SpecError) as caught:
        next(iter(producer.sessions.values())).push(request(), epoch=0, **asked)
    assert ("epoch", 0) == (caught.value.field, caught.value.value)
    with pytest.raises(SpecError, match="pushed") as caught:
        list(producer.sessions.values())[1].push(request(), epoch=1, **asked)
    assert ("remote_id", remote_id) == (caught.value.field, caught.value.value)
    bad, good = net.moving
    bad.fail(0.5)
    good.land()
    assert ["failed"] == ended([load], producer, consumer)
    assert ["failed", "done"] == [push.poll() for push in pushes]
    assert "to tp0: group full" in str(pushes[0].error)
    assert "P tp0 stopped writing; from tp0: group full" in str(load.error)
    quiet(producer, consumer)


@pytest.mark.parametrize("first", ["load", "push"])
def test_a_push_that_is_refused_fails_the_load(pushing: tuple[Side, Side], first: str) -> None:
    """At once, or at the reader's first heartbeat; the attempt is over for both, not the next."""
    producer, consumer = pushing
    remote_id, asked = new_remote_id("r"), request()
    producer.hold(remote_id)
    loads = consumer.load(asked, remote_id, pushed=True) if first == "load" else []
    short = request(producer_blocks={"full": [1], "window": [1]})
    given: dict[str, Any] = {"remote_id": remote_id, "timeout": 9.0, "epoch": 1}
    session, *others = producer.sessions.values()
    with pytest.raises(MismatchError, match="producer_blocks"):
        session.push(short, **given)
    assert "failed" == session.push(asked, **given).poll()
    loads = loads or consumer.load(asked, remote_id, pushed=True)
    for other in others:
        other.push(asked, **given)
    assert ["failed"] == ended(loads, producer, consumer)
    assert "P tp0 stopped writing" in str(loads[0].error)
    quiet(producer, consumer)
    again = new_remote_id("r")
    producer.fill(asked)
    consumer.spoil(asked)
    producer.hold(again)
    loads = consumer.load(asked, again, pushed=True)
    for one in producer.sessions.values():
        one.push(asked, **given | {"remote_id": again})
    assert ["done"] == ended(loads, producer, consumer)
    assert [] == consumer.wrong(asked)
    quiet(producer, consumer)


def test_a_pushed_load_needs_blocks(pushing: tuple[Side, Side]) -> None:
    """Whoever waits for what is pushed has blocks for it, or is refused by name."""
    session = next(iter(pushing[1].sessions.values()))
    short = {"full": [1, 2, 3], "window": [1, 2, 3, 4]}
    asked: dict[str, Any] = {"remote_id": new_remote_id("r"), "timeout": 9.0, "pushed": True}
    with pytest.raises(SpecError, match=r"consumer_blocks\['full'\].*blocks for tokens 0..13"):
        session.load(request(consumer_blocks=short), **asked)
    assert 0 == session.stats().loads


def test_a_producer_that_is_gone_pushes_nothing(pushing: tuple[Side, Side]) -> None:
    """Who was to write is no more, says who parts from it: the load is over at once."""
    _, consumer = pushing
    (load,) = consumer.load(request(), new_remote_id("r"), pushed=True)
    load.cancel()
    assert "moving" == load.poll()
    for session in consumer.sessions.values():
        session.disconnect("P")
    assert "failed" == load.poll()


def test_one_engine_may_be_both(net: FakeNixl) -> None:
    """What is met in one role stays when the other is met anew; what is lost is lost in both."""
    with (
        Side("A", engine(1), polled=False, heartbeat=0.05) as one,
        Side("B", engine(1), polled=False, heartbeat=0.05) as other,
    ):
        (near,), (far,) = one.sessions.values(), other.sessions.values()
        for role in ("producer", "consumer"):
            near.connect(other.introductions, role=role)  # type: ignore[arg-type]
            far.connect(one.introductions, role=role)  # type: ignore[arg-type]
        hang(net)
        asked: dict[str, Any] = {"remote_id": new_remote_id("r"), "timeout": 9.0}
        far.hold(asked["remote_id"])
        load = near.load(request(), **asked)
        net.moving[0].fail()
        assert ["failed"] == ended([load], one, other)
        net.fate = FakeFlight.land
        for role in ("producer", "consumer"):
            near.connect(other.introductions, role=role)  # type: ignore[arg-type]
        assert (2, 0) == (near.stats().engines, near.stats().leaving)
        asked["remote_id"] = new_remote_id("pushed")
        one.fill(request("pushed"))
        other.spoil(request("pushed"))
        near.hold(asked["remote_id"])
        near.push(request("pushed"), epoch=1, **asked)
        load = far.load(request("pushed"), pushed=True, **asked)
        assert ["done"] == ended([load], one, other)
        assert [] == other.wrong(request("pushed"))
        asked["remote_id"] = new_remote_id("again")
        far.hold(asked["remote_id"])
        load = near.load(request("again"), **asked)
        assert ["done"] == ended([load], one, other)
        quiet(one, other)
        near.disconnect("B")
        assert () == near.nixl.peers


def test_who_cannot_be_prepared_for_is_not_met(net: FakeNixl) -> None:
    """Memory that is gone, an agent that is gone: nobody stays connected."""
    with (
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True) as consumer,
    ):
        (session,) = consumer.sessions.values()
        ((name, life),) = ((name, life) for name, life in net.agents.items() if name[0] == "P")
        kept = list(life.memory)
        life.memory[1:] = []
        with pytest.raises(TransferError) as caught:
            session.connect(producer.introductions)
        assert "not_registered" == caught.value.state
        assert ((), 0) == (session.nixl.peers, session.stats().engines)
        life.memory[:] = kept
        session.connect(producer.introductions)
        session.disconnect("P")
        net.kill(name)
        with pytest.raises(TransferError):
            session.connect(producer.introductions)
        assert () == session.nixl.peers


def test_an_address_that_cannot_travel_is_refused(net: FakeNixl) -> None:
    """And its channel is closed: the session never was."""
    cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), num_blocks=2)
    channel = TcpChannel(public="h" * 300)
    with NixlRank("r", polled=True) as nixl, pytest.raises(SpecError, match="address="):
        Session(nixl, cache, engine_id="D", owner=storage, channel=channel)
    channel.send(channel.address, b"x")
    assert 1 == channel.lost


@pytest.mark.parametrize("address", ["", "h" * 256, "h\n:1", b"h:1", 7])
def test_an_address_that_is_none_is_refused(pair: tuple[Side, Side], address: object) -> None:
    """Of a peer that knows the secret, too: none, too long, not to be shown, no text."""
    session = next(iter(pair[0].sessions.values()))
    shake = encode_handshake(session._own.handshake)

    def told(address: object) -> str:
        sealed = good_seal_of(session, body_of(address, shake))
        return introduced(sealed, session.nixl.secret).address

    assert ["h:1", "h" * 255] == [told("h:1"), told("h" * 255)]
    with pytest.raises(WireError) as caught:
        told(address)
    assert caught.value.path.startswith("introduction")


def test_a_session_of_which_nothing_moves_is_closed_at_once(pair: tuple[Side, Side]) -> None:
    """However long it might wait; what it holds for readers that may come is no reason to."""
    pair[0].hold(new_remote_id("r"))
    began = time.monotonic()
    for side in pair:
        for session in side.sessions.values():
            session.close(drain=5.0)
    assert time.monotonic() - began < 5.0


def test_one_load_that_moves_is_moving(net: FakeNixl, pair: tuple[Side, Side]) -> None:
    """Beside one of which nothing does, whichever came first."""
    session = next(iter(pair[1].sessions.values()))
    hang(net)
    remote_ids = [new_remote_id(name) for name in "abc"]
    for number, remote_id in enumerate(remote_ids):
        assert (number > 1) is session._moving()
        asked = request(remote_id[0], cached=0 if number == 1 else 14)
        session.load(asked, remote_id=remote_id, timeout=9.0)
    assert session._moving()


def test_what_moves_is_counted_while_nothing_changes(pair: tuple[Side, Side]) -> None:
    """The session's own thread asks that between polls, while others begin loads and end them."""
    session = next(iter(pair[1].sessions.values()))
    asks = threading.Thread(target=session._moving)
    with session._lock.held:
        asks.start()
        asks.join(0.05)
        assert asks.is_alive()
    asks.join(5.0)
    assert not asks.is_alive()


def test_many_threads_may_load_at_once(net: FakeNixl) -> None:
    """Beside the session's own thread: each load is done, every request freed, nothing is left."""
    with (
        Side("P", engine(2), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        (session,) = consumer.sessions.values()
        told: list[str] = []

        def work(number: int) -> None:
            ids = {"full": [number], "window": [number]}
            for turn in range(20):
                name = f"{number}.{turn}"
                asked = request(name, 4, producer_blocks=ids, consumer_blocks=ids)
                remote_id = new_remote_id(name)
                producer.hold(remote_id)
                load = session.load(asked, remote_id=remote_id, timeout=20.0)
                load.wait()
                told.append(load.state)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 6)]
        for thread in threads:
            thread.start()
        done: list[str] = []
        until(lambda: done.extend(producer.settled()[0]) or len(done) == 200)
        for thread in threads:
            thread.join()
        assert ["done"] * 100 == told
        quiet(producer, consumer)
        assert 0 == session.nixl.stats().transfers


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_fork_does_nothing(net: FakeNixl) -> None:
    """What it asks is refused, what it closes stays open, and its parent goes on."""
    with (
        Side("P", engine(1), polled=False, background=True) as producer,
        Side("D", engine(1), polled=True, background=True) as consumer,
    ):
        consumer.connect(producer)
        (session,) = consumer.sessions.values()
        for name in "abc":
            remote_id = new_remote_id(name)
            producer.hold(remote_id)
            (load,) = consumer.load(request(name), remote_id)
            load.wait()
            child = os.fork()
            if not child:
                code = 1
                with contextlib.suppress(BaseException):
                    session.close()
                    asked = (load.poll, session.poll, session.stats, session.settled)
                    code = len({refused(ask) for ask in asked} - {"forked"})
                os._exit(code)
            assert 0 == os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def refused(ask: Callable[[], object]) -> str | None:
    """Return in which state of a transfer something is refused."""
    try:
        ask()
    except TransferError as error:
        return error.state
    return "not at all"
