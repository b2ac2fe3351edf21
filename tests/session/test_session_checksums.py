"""Loads with `checksum` are done if checksums of both sides are equal, and fail otherwise."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import attrs
import pytest
from msgspec.structs import replace
from refused import has_in_order
from session_faults import cache_is_on_a_device

import kvspec
from kvspec.errors import SpecError

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import BLOCKS, Direct, Side, engine, request, start_of, until

from kvspec.check.differences import differing_rows, row_digests
from kvspec.completion.producer import ProducerLedger
from kvspec.digests import regions, wanted
from kvspec.session import Load, checksums, new_remote_id
from kvspec.session.checksums import ChecksumAnswers, advance, computation_of
from kvspec.session.mailbox import MESSAGE
from kvspec.testing import FakeNixl, logical_views
from kvspec.testing.fake_nixl import FakeFlight
from kvspec.wire.codec import decode_message, encode_message
from kvspec.wire.messages import (
    Checksum,
    ChecksumContents,
    ChecksumRequest,
    ChecksumUnavailable,
    Key,
    Message,
    RankAddress,
    key_of,
)

SIZES = {
    "two of four": (engine(4, state=True), engine(2, state=True)),
    "blocks of two": (engine(2, 6), engine(3, 6, block=2)),
    "contexts": (engine(2, 1, dcp_size=2, interleave_size=2), engine(1, 1)),
}


@contextlib.contextmanager
def connected(sizes: tuple[Any, Any], **more: Any) -> Iterator[tuple[Side, Side]]:
    """Yield a producer and a consumer that is connected to it."""
    options: dict[str, Any] = {"heartbeat": 0.05} | more
    with (
        Side("P", sizes[0], polled=False, lease=5.0) as producer,
        Side("D", sizes[1], polled=False, **options) as consumer,
    ):
        consumer.connect(producer)
        yield producer, consumer


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.nixl)])
def nixl(request: pytest.FixtureRequest) -> Iterator[None]:
    """Run the test over a fake NIXL, and over the real one."""
    if request.param == "real":
        pytest.importorskip("nixl_cu13", reason="needs nixl")
    with FakeNixl() if request.param == "fake" else contextlib.nullcontext():
        yield


def asked_of(sides: tuple[Side, Side], tokens: int = 14, cached: int = 3) -> Any:
    """Return a request in blocks of both sizes, in reverse order on the consumer."""
    tables = []
    for side in sides:
        group = side.spec.groups[0]
        count = -(-tokens // side.spec.virtual_block(group))
        tables.append({group.name: [*range(1, count + 1)] for group in side.spec.groups})
    consumer = {name: ids[::-1] for name, ids in tables[1].items()}
    return request(
        tokens=tokens, cached=cached, producer_blocks=tables[0], consumer_blocks=consumer
    )


def begin(sides: tuple[Side, Side], **more: Any) -> tuple[Any, list[Load]]:
    """Hold and load a request."""
    producer, consumer = sides
    asked, remote_id = asked_of(sides), new_remote_id("r")
    producer.fill(asked)
    consumer.spoil(asked)
    producer.hold(remote_id, blocks=asked.producer_blocks)
    return asked, consumer.load(asked, remote_id, checksum=True, **more)


def ended(loads: list[Load], *sides: Side) -> list[str]:
    """Wait until *loads* have ended and no checksum is computed, and return the states."""
    until(lambda: all(load.state != "moving" for load in loads), *sides)
    sessions = [session for side in sides for session in side.sessions.values()]
    until(lambda: not any(s.stats().sums + s.stats().loads for s in sessions), *sides)
    return [load.state for load in loads]


@pytest.mark.parametrize("sizes", SIZES)
def test_load_is_done_when_checksums_are_equal(nixl: None, sizes: str) -> None:
    """They do not depend on parallel sizes, blocks and contexts. Each is requested once."""
    with connected(SIZES[sizes], heartbeat=2.0) as sides:
        producer, consumer = sides
        asked, loads = begin(sides)
        assert ["done"] * len(loads) == ended(loads, *sides)
        assert [] == consumer.wrong(asked)
        assert [()] * len(loads) == [s.settled().refused for s in consumer.sessions.values()]
        done: list[str] = []
        until(lambda: done.extend(producer.settled()[0]) or len(done) == len(producer.sessions))
        assert [0] * len(producer.sessions) == [s.stats().held for s in producer.sessions.values()]


@pytest.mark.parametrize(
    ("sizes", "layer", "part", "token"),
    [
        ("two of four", "l.1", "v", 9),
        ("two of four", "s.0", "conv_x", None),
        ("blocks of two", "w.0", "k", 13),
        ("contexts", "l.0", "k", 10),
    ],
)
def test_load_fails_when_one_byte_differs(
    nixl: None, sizes: str, layer: str, part: str, token: int | None
) -> None:
    """The error names layer and producer rank, and `differing_rows` finds unit and token."""
    with connected(SIZES[sizes]) as sides:
        consumer = sides[1]
        asked, loads = begin(sides)
        # All data has arrived, and no checksum is compared yet.
        until(lambda: not loads[-1].in_flight, consumer)
        rank = consumer.spec.parallel.ranks[-1]
        views = logical_views(consumer.spec, rank, consumer.storage[rank], BLOCKS)
        group = next(group for group in consumer.spec.groups if layer in group.layers)
        slot, row = divmod(13 if token is None else token, group.spec.block_size)
        block = asked.consumer_blocks[group.name].block_ids[slot]
        views[group.name, layer, part][block, -1, 1 if token is None else row, 0] ^= 16
        assert ["done"] * (len(loads) - 1) + ["failed"] == ended(loads, *sides)
        error = loads[-1].error
        assert error is not None
        assert "differs" == error.state
        assert error.rank is not None
        assert has_in_order([layer, "kvspec.check.differences"], error.message)
        assert asked.consumer_blocks.keys() == loads[-1].undefined_blocks.keys()
        source = next(r for r in sides[0].sessions if str(error.rank).endswith(str(r)))
        selection = wanted(loads[-1].remote.plan, asked)
        selection = {key: want for key, want in selection.items() if key[0] == layer}
        sent, received = (
            row_digests(side.sessions[rank].cache, tables, selection)
            for side, rank, tables in (
                (sides[0], source, asked.producer_blocks),
                (consumer, rank, asked.consumer_blocks),
            )
        )
        unit = consumer.spec.units(group, group.spec.parts[0], rank).stop - 1
        row = 1 if token is None else token
        assert [(layer, part, unit, row)] == differing_rows([sent], [received])


@pytest.mark.parametrize("signs", ["float32", "every odd bfloat16"])
def test_load_fails_when_all_signs_of_a_layer_flip(signs: str) -> None:
    """Many equal changes must not cancel each other in the checksum of a content."""
    dtype = signs.rsplit(maxsplit=1)[-1]
    spec = engine(2, size=32 // (4 if dtype == "float32" else 2), dtype=dtype)
    with FakeNixl(), connected((spec, spec)) as sides:
        consumer = sides[1]
        _, loads = begin(sides)
        # All data has arrived, and no checksum is compared yet.
        until(lambda: not loads[-1].in_flight, consumer)
        rank = consumer.spec.parallel.ranks[-1]
        views = logical_views(consumer.spec, rank, consumer.storage[rank], BLOCKS)
        views["full", "l.0", "k"][..., 3::4] ^= 0x80  # The sign is in the last byte.
        assert ["done", "failed"] == ended(loads, *sides)
        assert loads[-1].error is not None
        assert "differs" == loads[-1].error.state


def test_load_of_wrong_producer_blocks_fails() -> None:
    """The producer computes checksums of the blocks that its own engine has passed."""
    with FakeNixl(), connected(SIZES["blocks of two"]) as sides:
        producer, consumer = sides
        asked, remote_id = asked_of(sides), new_remote_id("r")
        producer.fill(asked)
        producer.hold(remote_id, blocks=asked.producer_blocks)
        wrong = attrs.evolve(asked, producer_blocks={"full": [1, 3, 2, 4], "window": [1, 2, 3, 4]})
        loads = consumer.load(wrong, remote_id, checksum=True)
        assert {"failed"} == set(ended(loads, *sides))
        assert {"differs"} == {load.error.state for load in loads if load.error}


def test_load_fails_when_the_producer_cannot_compute_checksums() -> None:
    """The producer has no blocks or too few, or it is silent."""
    with FakeNixl(), connected(SIZES["two of four"]) as sides:
        producer, consumer = sides
        asked = asked_of(sides)
        for options in ({}, {"blocks": {name: [1] for name in asked.producer_blocks}}):
            remote_id = new_remote_id("r")
            producer.hold(remote_id, **options)
            loads = consumer.load(asked, remote_id, checksum=True)
            assert ["failed"] * 2 == ended(loads, *sides)
            assert {"uncompared"} == {load.error.state for load in loads if load.error}
            until(lambda: not any(s.held for s in producer.sessions.values()), *sides)
        loads = consumer.load(asked, new_remote_id("r"), checksum=True, timeout=0.2)
        until(lambda: all(load.state == "failed" for load in loads), consumer)
        assert {"timeout"} == {load.error.state for load in loads if load.error}
        session = next(iter(producer.sessions.values()))
        late = kvspec.BlockTable([1, 2], first_token=2)  # inside of a block
        for blocks in ({"else": [1]}, [1], {"full": late}):
            with pytest.raises(SpecError) as caught:
                session.hold(new_remote_id("r"), blocks=blocks)  # type: ignore[arg-type]
            assert "blocks" in caught.value.field
        with pytest.raises(SpecError) as caught:
            consumer.load(asked, new_remote_id("r"), checksum=7)
        assert ("checksum", 7) == (caught.value.field, caught.value.value)


def test_checksum_rejects_an_extent_that_the_rank_lacks() -> None:
    """A peer may name unknown layers, parts and units, or more tokens than the memory has."""
    spec = engine(2)
    cache, _storage = kvspec.allocate(spec, kvspec.RankId(), num_blocks=BLOCKS)
    tables = kvspec.BlockTable([1, 2]), kvspec.BlockTable([1, BLOCKS])
    whole: dict[str, Any] = {
        "layer": "l.0", "parts": ("k",), "units": range(1), "tokens": range(8)
    }  # fmt: skip
    for table, change, word in (
        (tables[0], {"layer": "l.9"}, "l.9"),
        (tables[0], {"parts": ("conv",)}, "conv"),
        (tables[0], {"units": range(1, 2)}, "units"),
        (tables[0], {"tokens": range(9)}, "tokens"),
        (tables[0], {"tokens": range(2**62)}, "tokens"),
        (tables[1], {}, "pool"),
        (kvspec.BlockTable([1, 2], first_token=2), {"tokens": range(2, 8)}, "first_token"),
    ):
        contents = ChecksumContents(**whole | change)
        with pytest.raises(SpecError, match=word):
            next(computation_of(cache, {"full": table}, contents))
    assert advance(computation_of(cache, {"full": tables[0]}, ChecksumContents(**whole)), math.inf)


@pytest.mark.parametrize("parts", [("conv_x", "ssm"), ("ssm", "conv_x"), ("ssm",)])
def test_checksum_request_for_missing_rows_is_refused(parts: tuple[str, ...]) -> None:
    """One of the parts has fewer rows. The session records the reason and continues."""
    spec = kvspec.MambaSpec.mamba2(
        num_heads=4, head_dim=2, n_groups=2, state_size=2, conv_kernel=4, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="s", layers=["s.0"], spec=spec)
    one = kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=1))
    contents = ChecksumContents(
        layer="s.0", parts=parts, units=range(1), tokens=range(8), rows=range(3)
    )
    with FakeNixl(), Side("P", one, polled=False, channel=Direct("P")) as producer:
        (session,) = producer.sessions.values()
        remote_id = new_remote_id("r")
        session.hold(remote_id, blocks={"s": [1]})
        question = ChecksumRequest(
            key=key_of(remote_id), by=RankAddress("D", 1, session.me.rank),
            to=session.me,
            contents=contents,
        )  # fmt: skip
        Direct("D").send("P", session.nixl.secret.seal(MESSAGE, encode_message(question)))
        session.poll()
        (why,) = session.settled().refused
        assert all(fact in why for fact in ("rows=range(0, 3)", "ssm"))
        assert 0 == session.stats().sums


def test_checksum_for_an_earlier_load_does_not_answer_the_next() -> None:
    """The next load of the request may request checksums of other tokens."""
    with FakeNixl(), connected(SIZES["blocks of two"]) as sides:
        consumer = sides[1]
        asked, loads = begin(sides)
        (session, *_), (first, *_) = consumer.sessions.values(), loads
        assert first.audit is not None
        until(lambda: first.audit._open, consumer)
        numbers = set(first.audit._open or ())
        first.cancel()
        # The other ranks are not polled, so their loads keep the request held.
        until(lambda: session.poll() or not session.stats().loads, sides[0])
        other = attrs.evolve(asked, request_id="again", cached_tokens=7)
        again = session.load(other, remote_id=first.remote_id, timeout=9.0, checksum=True)
        assert again.audit is not None
        until(lambda: again.audit._open, consumer)
        assert numbers.isdisjoint(again.audit._open or ())
        assert ["done"] == ended([again], *sides), again.error


@pytest.mark.parametrize("side", [0, 1], ids=["producer", "consumer"])
def test_load_fails_when_a_rank_is_closed_before_its_checksums(side: int) -> None:
    """The memory of the rank may be gone."""
    with FakeNixl(), connected(SIZES["two of four"]) as sides:
        _, loads = begin(sides)
        until(lambda: not any(load.in_flight for load in loads), sides[1])
        for session in sides[side].sessions.values():
            session.nixl.close()
        assert ["failed"] * 2 == ended(loads, *sides)
        states = {load.error.state for load in loads if load.error}
        assert states <= ({"uncompared", "gone"}, {"closed"})[side]


def test_checksum_is_requested_again_once_in_each_heartbeat() -> None:
    """Repeated requests keep their numbers. An answer to no request is recorded."""
    now = 0.0
    with FakeNixl(), connected(SIZES["blocks of two"], heartbeat=1.0, clock=lambda: now) as sides:
        producer, consumer = sides
        _, loads = begin(sides, timeout=99.0)
        session, load = next(iter(consumer.sessions.values())), loads[0]
        asked: list[Message] = []
        assert load.audit is not None
        messages = load.audit.messages
        load.audit.messages = cast("Any", SimpleNamespace(send=asked.append))
        until(lambda: asked, consumer)
        numbers, counts = [message.number for message in asked], []
        for later in (0.0, 0.9, 1.0, 1.9, 2.5):
            now = later
            session.poll()
            counts.append(len(asked) // len(numbers))
        assert ([1, 1, 2, 2, 3], numbers * 3) == (counts, [message.number for message in asked])
        other = producer.first
        answer = replace(asked[0].answer(Checksum, total=bytes(8)), number=0, by=other.me)
        sealed = other.nixl.secret.seal(MESSAGE, encode_message(answer, start_of(other)))
        other.channel.send(session.channel.address, sealed)
        recorded: list[str] = []
        until(lambda: recorded.extend(session.settled().refused) or recorded, producer)
        assert "question" in recorded[-1]
        load.audit.messages = messages
        now = 4.0
        assert {"done"} == set(ended(loads, *sides))


class Asked:
    """A producer rank that holds one request, and a request for the checksum of its first layer."""

    def __init__(self) -> None:
        spec, self.sent, self.owner = engine(1), list[Message](), object()
        self.noted: list[str] = []
        cache, _ = kvspec.allocate(spec, kvspec.RankId(), num_blocks=BLOCKS)
        me = RankAddress("P", 1, kvspec.RankId())
        self.ledger, self.key = ProducerLedger(me, lease=10.0), key_of(new_remote_id("r"))
        messages = cast("Any", SimpleNamespace(send=self.sent.append, note=self.noted.append))
        self.answers = ChecksumAnswers(self.ledger, cache, self.owner, messages)
        self.ledger.hold(self.key, 0.0, blocks={"full": kvspec.BlockTable([1, 2])})
        contents = ChecksumContents(layer="l.0", parts=("k",), units=range(1), tokens=range(8))
        self.question = ChecksumRequest(
            self.key, RankAddress("D", 1, me.rank), me, contents=contents
        )


def test_closed_rank_computes_no_checksums() -> None:
    """Its memory may be gone, so it keeps no reference and sends no answer."""
    asked = Asked()
    asked.answers.receive(asked.question)
    assert (1, asked.owner) == (len(asked.answers.asked), asked.answers.owner)
    asked.answers.close()
    asked.answers.receive(asked.question)
    asked.answers.move()
    assert (0, None, []) == (len(asked.answers.asked), asked.answers.owner, asked.sent)


def test_request_that_is_freed_gets_no_checksum() -> None:
    """It may come before or after the end of the lease."""
    asked = Asked()
    asked.answers.receive(asked.question)
    asked.ledger.tick(10.0)
    asked.answers.move()
    asked.answers.receive(asked.question)
    assert (0, []) == (len(asked.answers.asked), asked.sent)


def test_checksum_that_cannot_be_computed_delays_no_other() -> None:
    """The error is unexpected. Its reader learns that it gets no checksum."""
    asked = Asked()

    def fails() -> checksums.Computation:
        yield
        raise MemoryError

    asked.answers.asked[asked.question] = fails()
    asked.answers.receive(replace(asked.question, number=2))
    until(lambda: asked.answers.move() or not asked.answers.asked)
    assert [ChecksumUnavailable, Checksum] == [type(answer) for answer in asked.sent]
    (why,) = asked.noted
    assert "MemoryError" in why


def test_load_whose_own_checksum_cannot_be_computed_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error is unexpected. It does not end the poll, and it is not taken for equal data."""

    def fails(*_: object) -> checksums.Computation:
        yield
        raise MemoryError

    with FakeNixl(), connected(SIZES["two of four"]) as sides:
        monkeypatch.setattr(checksums, "computation_of", fails)
        _, loads = begin(sides)
        assert ["failed"] * 2 == ended(loads, *sides)
        errors = [load.error for load in loads if load.error]
        assert {"uncompared"} == {error.state for error in errors}


def test_known_checksum_is_sent_again_without_work() -> None:
    """A reader whose answer was lost asks again, and the bytes are not read again."""
    asked = Asked()
    asked.answers.receive(asked.question)
    until(lambda: asked.answers.move() or not asked.answers.asked)
    asked.answers.receive(replace(asked.question, number=2))
    assert not asked.answers.asked
    first, second = asked.sent
    assert isinstance(first, Checksum)
    assert replace(first, number=2) == second


def test_long_checksum_is_computed_in_several_polls(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll ends after a bounded time, and the next one continues. Other work is done between."""
    monkeypatch.setattr(regions, "MANY_BYTES", 1)
    asked = Asked()
    asked.answers.receive(asked.question)
    monkeypatch.setattr(checksums, "CHECKSUM_TURN", 1e-9)
    polls = 0
    while asked.answers.asked:
        asked.answers.move()
        polls += 1
    (answer,) = asked.sent
    assert isinstance(answer, Checksum)
    monkeypatch.undo()
    asked = Asked()
    asked.answers.receive(asked.question)
    asked.answers.move()
    assert polls > 1
    assert [answer.total] == [cast("Checksum", message).total for message in asked.sent]


def test_load_is_done_when_a_checksum_was_lost() -> None:
    """The consumer asks again, and receives the answer."""
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False, channel=Direct("P")) as producer,
        Side("D", engine(1), polled=True, channel=Direct("D"), heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        _, loads = begin((producer, consumer))
        lost: list[bytes] = []

        def lose() -> bool:
            producer.poll()
            came = Direct.channels["D"].arrived
            lost.extend(data for _, data in came if b"checksum" in data)
            came[:] = [each for each in came if b"checksum" not in each[1]]
            return bool(lost)

        until(lose, consumer)
        assert "moving" == loads[0].state
        assert ["done"] == ended(loads, producer, consumer)


def test_load_is_done_when_the_producer_keeps_few_checksum_requests(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The producer drops the others, and the consumer sends them again."""
    monkeypatch.setattr("kvspec.session.checksums.MAX_ASKED", 1)
    monkeypatch.setattr("kvspec.session.checksums.MAX_KNOWN", 1)
    with FakeNixl(), connected(SIZES["two of four"]) as sides:
        _, loads = begin(sides)
        assert ["done"] * 2 == ended(loads, *sides)


def test_load_rejects_verify_for_memory_of_a_device() -> None:
    """Checksums are computed by the CPU, from the memory of the cache."""
    with FakeNixl(), connected(SIZES["two of four"]) as sides:
        cache_is_on_a_device(sides[1].first)
        with pytest.raises(SpecError, match="VRAM") as caught:
            begin(sides)
        assert ("checksum", True) == (caught.value.field, caught.value.value)


def corrupt(flight: FakeFlight) -> None:
    """Land a transfer with one wrong byte."""
    flight.land()
    flight.spoil()


def test_extents_of_many_parts_with_long_names_fit_into_messages() -> None:
    """A peer refuses a longer message, so the extents are cut by their parts."""
    names = [f"{number}{letter * 1023}" for letter in "a\N{GRINNING FACE}" for number in range(9)]
    names += [f"p{number}" for number in range(4000)]
    parts = [
        kvspec.Part(name=name, units=1, states=1, content_bytes=1, tokens_per_state=0)
        for name in names
    ]
    spec = kvspec.MambaSpec(state_parts=parts)
    group = kvspec.KVCacheGroup(name="state", layers=["l" * 1024], spec=spec)
    plan = kvspec.plan_transfer(*[kvspec.EngineSpec(groups=[group])] * 2)
    asked = request(tokens=1, producer_blocks={"state": [0]}, consumer_blocks={"state": [0]})
    address = RankAddress("e" * 255, 2**63 - 1, kvspec.RankId())
    key, covered = Key("r" * 1024, bytes(64)), list[str]()
    for contents in checksums.contents_of(plan, asked, kvspec.RankId(), kvspec.RankId()):
        message = ChecksumRequest(key, address, address, 2**63 - 1, contents=contents)
        assert message == decode_message(encode_message(message))
        covered += contents.parts
    assert names == covered
