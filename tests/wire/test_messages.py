"""Messages, and what the ledgers do with each: facts beside the law of `test_ledgers`."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from refused import refusal

import kvspec
from kvspec.completion.actions import Closed, Ended, Failed, Tell
from kvspec.completion.consumer import ConsumerLedger, Step
from kvspec.completion.load_plan import LoadPlan
from kvspec.errors import TransferState
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic
from kvspec.wire.codec import decode_message, encode_message
from kvspec.wire.messages import (
    MESSAGES,
    ChecksumRequest,
    Done,
    Extent,
    Key,
    Message,
    Pushed,
    RankAddress,
    Valid,
    key_of,
    new_remote_id,
)

P = [RankAddress("prefill", 1, kvspec.RankId(tp=tp)) for tp in range(2)]
D = [RankAddress("decode", 1, kvspec.RankId(tp=tp)) for tp in range(3)]
KEY = Key("cmpl-1", b"8 bytes!")
HEAD = len(b"kvspec-message\n") + 2
WORDS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=9)
COUNTS = st.integers(0, 2**20 - 1)
PARTIES = st.builds(
    RankAddress, WORDS, st.integers(0, 2**63 - 1), st.builds(kvspec.RankId, COUNTS, COUNTS, COUNTS)
)


def said(kind: str, by: int = 0, **more: Any) -> Message:
    """Return a message of one of two readers to a producer, or of a producer to a reader."""
    reader = kind in ("heartbeat", "done")
    fields: dict[str, Any] = {"expected": 2, "by": D[by], "to": P[0]} if reader else {}
    fields = fields or {"by": P[by], "to": D[0]}
    return MESSAGES[kind](**{"key": KEY, **fields, **more})


@st.composite
def extents(draw: st.DrawFn) -> Extent:
    """Draw any extent."""

    def span(least: int) -> range:
        start = draw(COUNTS)
        return range(start, start + draw(st.integers(least, 99)))

    names = st.lists(WORDS, min_size=1, max_size=4, unique=True)
    contexts = st.builds(BlockCyclic, COUNTS, st.integers(1, 9), st.just(4))
    return Extent(
        layers=tuple(draw(names)),
        parts=tuple(draw(names)),
        units=span(1),
        tokens=span(1),
        rows=span(0),
        producer=draw(contexts),
        consumer=draw(contexts),
        stripe=draw(st.integers(1, 9).map(lambda step: Stripe(step - 1, step))),
        block=draw(st.integers(1, 99)),
    )


@given(extents())
def test_halves_cover_the_extent_and_end(given: Extent) -> None:
    """Each split divides one field in two. One token of one unit has no halves."""
    turns = 0
    while given.halves is not None:
        first, second = given.halves
        split = [
            name
            for name in Extent.__struct_fields__
            if getattr(first, name) != getattr(second, name)
        ]
        assert 1 == len(split)
        whole = [*getattr(first, split[0]), *getattr(second, split[0])]
        assert whole == [*getattr(given, split[0])]
        given, turns = second, turns + 1
    assert turns < 2 + 2 + 7 + 7 + 1
    assert (1, 1, 1) == (len(given.layers), len(given.parts), len(given.units))
    assert 1 == len(given.rows or given.tokens)


@st.composite
def messages(draw: st.DrawFn) -> Message:
    """Draw any message."""
    kind = draw(st.sampled_from(sorted(MESSAGES)))
    more: dict[str, Any] = {}
    if kind in ("heartbeat", "done"):
        more["expected"] = draw(st.integers(1, 2**20))
    if kind == "lease":
        more["lease"] = draw(st.floats(0, 1e6))
    if kind == "progress":
        more |= {"group": draw(WORDS), "layer": draw(WORDS), "upto": draw(COUNTS)}
    if kind == "checksum_request":
        more["extent"] = draw(extents())
    if kind == "pushed":
        more["pushed"] = Pushed(
            *draw(st.tuples(*[COUNTS] * 3, *[st.binary(min_size=16, max_size=16)] * 2))
        )
    if kind == "checksum":
        more["total"] = draw(st.binary(min_size=8, max_size=8))
    return MESSAGES[kind](
        key=Key(draw(WORDS), draw(st.binary(min_size=8, max_size=64))),
        by=draw(PARTIES),
        to=draw(PARTIES),
        attempt=draw(COUNTS),
        number=draw(COUNTS),
        sample=draw(COUNTS),
        **more,
    )


@given(messages())
def test_message_of_any_kind_decodes_equal(given: Message) -> None:
    """Every message arrives equal, in few bytes."""
    data = encode_message(given)
    assert given == decode_message(data)
    assert len(data) < 400


HEARTBEAT = encode_message(said("heartbeat"))


def changed(at: int, value: Any) -> bytes:
    """Return the bytes of a heartbeat with another element."""
    data = encode_message(said("heartbeat"))
    fields = msgspec.msgpack.decode(data[HEAD:])
    fields[at] = value
    return data[:HEAD] + msgspec.msgpack.encode(fields)


KIND, KEYED, BY, TO, ATTEMPT, NUMBER, SAMPLE, OWN = range(8)
ASKED = Extent(layers=("l.0",), parts=("k",), units=range(2), tokens=range(9))


DONE = Pushed(num_tokens=9, encoder_tokens=0, state_tokens=9, cached=bytes(16), blocks=bytes(16))


def within(message: Message, field: int, at: int, value: Any) -> bytes:
    """Return the bytes of a message with another value inside one of its elements."""
    data = encode_message(message)
    fields = msgspec.msgpack.decode(data[HEAD:])
    fields[field][at] = value
    return data[:HEAD] + msgspec.msgpack.encode(fields)


def asked(at: int, value: Any) -> bytes:
    """Return the bytes of a checksum request with another element of its extent."""
    return within(said("checksum_request", by=0, extent=ASKED), OWN, at, value)


def wrote(at: int, value: Any) -> bytes:
    """Return the bytes of `pushed` with another element of its description."""
    return within(said("pushed", pushed=DONE), OWN, at, value)


def own(kind: str, at: int, value: Any, **more: Any) -> bytes:
    """Return the bytes of a message of *kind* with another element."""
    data = encode_message(said(kind, **more))
    fields = msgspec.msgpack.decode(data[HEAD:])
    fields[at] = value
    return data[:HEAD] + msgspec.msgpack.encode(fields)


LAYER = {"group": "full", "layer": "l.0", "upto": 9}
AT = {"pp": 0, "pcp": 0, "tp": 0}


@pytest.mark.parametrize(
    ("data", "path", "value"),
    [
        ("text", "message", "str"),
        (b"", "message", b""),
        (HEARTBEAT[:-1], "message", "Input data was truncated"),
        (HEARTBEAT + b"x", "message", ...),
        (HEARTBEAT + bytes(17000), "message", HEARTBEAT[:HEAD]),
        (b"kvspec-message\n\0\2" + HEARTBEAT[HEAD:], "message", b"kvspec-message\n\0\2"),
        (HEARTBEAT[:HEAD] + b"\x91" * 5000, "$[0]", ...),
        (HEARTBEAT[:HEAD] + b"\xdd\xff\xff\xff\xff", "message", "Input data was truncated"),
        (changed(BY, ["decode", 1, [[[0]], 0, 0]]), "$[2][2]", "`array`"),
        (changed(BY, ["decode", 1, AT | {"tp": -1}]), "message.by.rank", kvspec.RankId(tp=-1)),
        (changed(TO, ["decode", 1, AT | {"pp": 2**63}]), "message.to.rank", kvspec.RankId(2**63)),
        (changed(BY, ["decode", 1, AT, 0]), "$[2]", ...),
        (changed(KIND, "shout"), "$[0]", ...),
        (changed(KIND, "checksum_request"), "$[7]", "`int`"),
        (changed(KIND, "valid"), "message", "7"),
        (changed(KEYED, ["", b"8 bytes!"]), "$[1][0]", ...),
        (changed(KEYED, ["x" * 1025, b"8 bytes!"]), "$[1][0]", ...),
        (changed(KEYED, [b"x", b"8 bytes!"]), "$[1][0]", "`bytes`"),
        (changed(KEYED, ["x", b"short"]), "$[1][1]", ...),
        (changed(KEYED, ["x", bytes(65)]), "$[1][1]", ...),
        (changed(BY, ["decode", -1, AT]), "$[2][1]", ...),
        (changed(TO, ["", 1, AT]), "$[3][0]", ...),
        (changed(TO, ["x" * 256, 1, AT]), "$[3][0]", ...),
        (changed(ATTEMPT, 2**64 - 1), "$[4]", ...),
        (changed(NUMBER, -1), "$[5]", ...),
        (changed(SAMPLE, 2**20), "$[6]", ...),
        (changed(OWN, 0), "$[7]", ...),
        (changed(OWN, 2**20 + 1), "$[7]", ...),
        (own("heartbeat", slice(8, 8), [1]), "message", "8"),
        (own("heartbeat", slice(7, 8), []), "message", "7"),
        (own("lease", 7, float("nan"), lease=1.0), "$[7]", ...),
        (own("lease", 7, float("inf"), lease=1.0), "$[7]", ...),
        (own("lease", 7, -1.0, lease=1.0), "$[7]", ...),
        (own("progress", 7, "", **LAYER), "$[7]", ...),
        (own("progress", 8, "x" * 1025, **LAYER), "$[8]", ...),
        (own("progress", 9, 2**63, **LAYER), "$[9]", ...),
        (own("checksum", 7, bytes(9), total=bytes(8)), "$[7]", ...),
        (own("checksum", 7, bytes(7), total=bytes(8)), "$[7]", ...),
        (wrote(0, -1), "$[7][0]", ...),
        (wrote(1, 2**63 - 1), "$[7][1]", ...),
        (wrote(2, 1.5), "$[7][2]", "`float`"),
        (wrote(3, bytes(15)), "$[7][3]", ...),
        (wrote(4, bytes(17)), "$[7][4]", ...),
        (asked(0, []), "message.layers", ()),
        (asked(0, ["l.0", "l.0"]), "message.layers", ("l.0", "l.0")),
        (asked(0, ["\N{LATIN SMALL LETTER E WITH ACUTE}" * 1024]), "message.layers", ...),
        (asked(0, ["x" * 1000 + str(n) for n in range(5)]), "message.layers", "5006 bytes"),
        (asked(1, [""] * 5000), "message.parts", ""),
        (asked(2, [2, 2]), "message.units", range(2, 2)),
        (asked(2, 7), ..., ...),
        (asked(2, [1]), ..., ...),
        (asked(3, [0, 2**63 - 1]), "message.tokens", range(2**63 - 1)),
        (asked(3, [9, 0]), "message.tokens", range(9, 0)),
        (asked(4, [1, 0]), "message.rows", range(1, 0)),
        (asked(5, {"rank": 0, "size": 0, "interleave": 1}), "message.producer.size", 0),
        (asked(6, {"rank": 0, "size": 1, "interleave": 0}), "message.consumer.interleave", 0),
        (asked(7, {"first": 1, "step": 1}), "message.stripe.first", 1),
        (asked(8, 0), "$[7][8]", ...),
        (asked(8, -1), "$[7][8]", ...),
    ],
)
def test_decode_message_rejects_malformed_bytes(data: Any, path: str, value: Any) -> None:
    """Cut, too long, of other types, out of bounds, or with elements of another kind.

    A value or path of `...` is not compared: msgspec does not report it.
    """
    error = refusal(lambda: decode_message(data), kvspec.WireError)
    assert error.path
    assert path in (error.path, ...)
    assert value is ... or (type(value), value) == (type(error.value), error.value)


@pytest.mark.parametrize(
    "remote_id",
    ["id", "x#", "#" + "00" * 8, "x#" + "00" * 7, "x#" + "00" * 65, "x#" + "0g" * 8,
     "x#" + "AA" * 8, "x#" + "00 " * 8, "x" * 1025 + "#" + "00" * 8, "\ud800#" + "00" * 8, b"x", 7],
)  # fmt: skip
def test_key_of_rejects_names_that_new_remote_id_cannot_return(remote_id: Any) -> None:
    """Each request has exactly one name."""
    error = refusal(lambda: key_of(remote_id))
    assert ("remote_id", remote_id) == (error.field, error.value)


def test_new_remote_id_rejects_invalid_ids_and_longest_messages_fit() -> None:
    """An id is a text of 1 to 1,024 bytes."""
    for name in ("", "x" * 1025, b"x", 7):
        error = refusal(lambda name=name: new_remote_id(name))
        assert ("request_id", name) == (error.field, error.value)
        assert "1024" in error.expected
    long = said(
        "progress", key=Key("x" * 1024, bytes(64)), group="g" * 1024, layer="l" * 1024, upto=9
    )
    far = [replace(address, engine_id="e" * 255, epoch=2**62) for address in (P[0], D[0])]
    data = encode_message(replace(long, by=far[0], to=far[1]))
    assert 3500 < len(data) < 4096
    most = replace(ASKED, layers=("x" * 1024, "y" * 1024), parts=("k" * 1024, "v" * 1024))
    key = Key("x" * 1024, bytes(64))
    asking = ChecksumRequest(key=key, by=far[1], to=far[0], extent=most)
    assert 5500 < len(encode_message(asking)) < 8192


def kinds(actions: list[Any]) -> list[str]:
    """Return what actions are, messages by their kind."""
    return [a.message.kind if isinstance(a, Tell) else type(a).__name__ for a in actions]


PLACE = ("full", "layers.0")


def reads(**more: Any) -> LoadPlan:
    """Return an order: read one layer of the first producer rank, and tell both."""
    fields: dict[str, Any] = {
        "request_id": "mine", "key": KEY, "engine_id": "prefill", "epoch": 1,
        "expected": {P[0].rank: 2, P[1].rank: 1}, "sources": {P[0].rank: {PLACE: 8}},
    }  # fmt: skip
    return LoadPlan(**{**fields, **more})


def moving(**more: Any) -> ConsumerLedger:
    """Return a consumer rank that reads, since second 0, for at most twenty."""
    ledger = ConsumerLedger(D[0], heartbeat=5.0, patience=12.0)
    assert ["heartbeat", "heartbeat"] == kinds(ledger.expect(reads(**more), 0.0, 20.0))
    return ledger


def answers(actions: list[Any], kind: str, **more: Any) -> list[Message]:
    """Return the answers to the messages among *actions*."""
    return [a.message.answer(MESSAGES[kind], **more) for a in actions if isinstance(a, Tell)]


def test_ready_when_the_source_held_it_afterwards() -> None:
    """All has arrived, the source is asked, and says that it was valid; then both are told."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    asked = ledger.finish(step, 3.0)
    assert ["done", "done"] == kinds(asked)
    first, second = answers(asked, "valid")
    assert ["Ended"] == kinds(ledger.receive(first, 4.0))
    assert ["Refused"] == kinds(ledger.receive(first, 4.0))
    assert [Closed("mine")] == ledger.receive(second, 5.0)
    assert ({}, 0, None) == (ledger.open, ledger.steps, ledger.due)


def test_what_was_held_when_the_last_byte_came_is_sound() -> None:
    """Answered at the very time: the source held it, and it is ready."""
    ledger = moving()
    asked = ledger.finish(ledger.start("mine", P[0].rank), 3.0)
    assert ["Ended"] == kinds(ledger.receive(answers(asked, "valid")[0], 3.0))


def test_load_with_granted_lease_waits_for_valid() -> None:
    """The consumer's clock may have stood still, so its measure of the lease proves nothing."""
    ledger = ConsumerLedger(D[0], heartbeat=500.0)
    grant = answers(ledger.expect(reads(), 0.0, 2000.0), "lease", lease=1000.0)[0]
    assert [] == ledger.receive(grant, 0.0)
    asked = ledger.finish(ledger.start("mine", P[0].rank), 0.0)
    assert {"done"} == set(kinds(asked))
    assert ["Ended"] == kinds(ledger.receive(answers(asked, "valid")[0], 0.0))


def test_valid_before_all_has_arrived_does_not_count() -> None:
    """Only an answer to a question asked after the last byte counts."""
    ledger = ConsumerLedger(D[0])
    early = answers(ledger.expect(reads(), 0.0, 20.0), "valid")[0]
    assert [] == ledger.receive(early, 0.0)
    actions = ledger.finish(ledger.start("mine", P[0].rank), 1.0)
    assert "Ended" not in kinds(actions)


def test_a_question_has_one_number_however_often_it_is_asked() -> None:
    """And none that a question of another load had, of the same attempt or not."""
    ledger = moving()
    later = ledger.finish(ledger.start("mine", P[0].rank), 3.0)
    first, *_ = [action.message for action in later]
    again = [action.message for action in ledger.tick(8.0)]
    assert ({first.number}, 2) == ({message.number for message in again}, len(again))
    for message in again:
        ledger.receive(message.answer(Valid), 9.0)
    assert {} == ledger.open
    heartbeats = [action.message for action in ledger.expect(reads(), 9.0, 20.0)]
    assert all(message.number > first.number for message in heartbeats)
    assert "Refused" in kinds(ledger.receive(first.answer(Valid), 9.0))


def test_gone_fails_by_name() -> None:
    """A source that freed it before it was read fails the request, once, and says who."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    gone = answers(ledger.finish(step, 3.0), "gone")
    actions = ledger.receive(gone[0], 4.0)
    assert (
        Failed(
            "mine",
            "prefill tp0 aborted it, or its lease ended before it was read",
            TransferState.GONE,
        )
        == actions[0]
    )
    assert Ended("mine", "failed") == actions[1]


def test_blocks_are_held_while_a_step_may_write() -> None:
    """A request that fails keeps its blocks until its last step has ended."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    assert [Failed("mine", "cancelled", TransferState.STOPPED)] == ledger.cancel("mine", 1.0)
    assert [] == ledger.cancel("mine", 1.0) + ledger.tick(100.0)
    assert ["Ended", "done", "done"] == kinds(ledger.finish(step, 200.0))
    assert [Closed("mine")] == ledger.tick(212.0)


def test_cancel_in_other_words_keeps_the_given_state() -> None:
    """The state of a failure does not depend on the words of its reason."""
    ledger = moving()
    failed = ledger.cancel("mine", 1.0, "not there in time", TransferState.GONE)
    assert failed[0] == Failed("mine", "not there in time", TransferState.GONE)
    ledger = moving()
    assert ledger.cancel("mine", 1.0, "not wanted")[0].state is TransferState.STOPPED  # type: ignore[union-attr]


def test_failed_step_passes_its_state_to_the_failed_action() -> None:
    """What is known of the transfer is not lost on the way through the ledger."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    actions = ledger.fail(step, "the peer died", 1.0, state=TransferState.PEER_LOST)
    assert Failed("mine", "the peer died", TransferState.PEER_LOST) == actions[0]


def test_late_is_failed_and_a_dead_producer_is_not_told_for_ever() -> None:
    """Not there in time: it fails. Nobody answers: it is repeated, then given up."""
    ledger = moving()
    assert ["heartbeat", "heartbeat"] == kinds(ledger.tick(5.0))
    late = ledger.tick(20.0)
    assert ["Failed", "Ended", "done", "done"] == kinds(late)
    assert Failed("mine", "not there in time", TransferState.TIMEOUT) == late[0]
    assert ["done", "done"] == kinds(ledger.tick(25.0))
    assert [Closed("mine")] == ledger.tick(32.0)


def test_a_full_hit_is_ready_at_once() -> None:
    """Nothing moves: ready now, and every producer rank is told all the same."""
    ledger = ConsumerLedger(D[0])
    actions = ledger.expect(reads(sources={}), 0.0, 20.0)
    assert ["done", "done", "Ended"] == kinds(actions)
    assert ["Closed"] == kinds(
        [a for n in answers(actions, "gone") for a in ledger.receive(n, 1.0)]
    )


def test_a_restarted_producer_fails_what_it_had() -> None:
    """A new epoch: what the earlier start held is lost, and there is nobody to tell."""
    ledger = moving()
    actions = ledger.connect("prefill", 2, 1.0)
    failed = Failed("mine", "prefill was restarted", TransferState.GONE)
    assert [failed, Ended("mine", "failed")] == actions[:2]
    assert ["Closed"] == kinds(actions[2:])
    for call in (
        lambda: ledger.expect(reads(), 2.0, 9.0),
        lambda: ledger.connect("prefill", 1, 2.0),
    ):
        error = refusal(call)
        assert ("epoch", 1) == (error.field, error.value)
    ledger.disconnect("prefill")
    assert ["heartbeat", "heartbeat"] == kinds(ledger.expect(reads(), 2.0, 9.0))


def test_frontiers_move_once_and_after_they_are_written() -> None:
    """What is read in parts moves up to what was written, nothing twice, and all in the end."""
    ledger = moving(partial=True)
    source = P[0].rank
    assert {} == ledger.readable("mine")
    error = refusal(lambda: ledger.start("mine", source))
    assert ("upto", 8) == (error.field, error.value)
    wrote = said("progress", group=PLACE[0], layer=PLACE[1], upto=5)
    assert [] == ledger.receive(wrote, 1.0)
    assert {source: {PLACE: range(5)}} == ledger.readable("mine")
    first = ledger.start("mine", source, {PLACE: 5})
    assert {} == ledger.readable("mine")
    error = refusal(lambda: ledger.start("mine", source, {PLACE: 5}))
    assert ("upto", 5) == (error.field, error.value)
    ledger.receive(replace(wrote, upto=99), 2.0)
    last = ledger.start("mine", source)
    assert [] == ledger.finish(last, 3.0)
    assert ["done", "done"] == kinds(ledger.finish(first, 3.0))


def test_consumer_ledger_rejects_invalid_plans_and_steps() -> None:
    """Ranks that are read and do not count readers, steps of nothing, plans that are open."""
    ledger = moving()
    source = P[0].rank
    calls: list[tuple[Any, str, Any]] = [
        (lambda: reads(request_id=""), "request_id", ""),
        (lambda: ledger.expect(reads(), 0.0, 1.0), "request_id", "mine"),
        (lambda: ledger.expect(reads(request_id="other"), 0.0, 1.0), "key", KEY),
        (lambda: ledger.start("other", source), "request_id", "other"),
        (lambda: ledger.start("mine", P[1].rank), "request_id", "mine"),
        (
            lambda: ledger.start("mine", source, {("full", "layers.9"): 8}),
            "layers",
            ("full", "layers.9"),
        ),
        (lambda: ledger.finish(Step("mine", 99), 0.0), "step", ("mine", 99)),
        (lambda: ledger.fail(Step("other", 99), "why", 0.0, quiet=False), "step", ("other", 99)),
    ]
    for call, field, value in calls:
        error = refusal(call)
        assert (field, value) == (error.field, error.value)
    assert [] == ledger.cancel("other", 0.0)
    assert {} == ledger.readable("other")
    heartbeat = Done(KEY, P[0], D[0], 0, 1, expected=1)
    for message in (
        heartbeat,
        said("valid", by=1, number=7),
        said("valid", key=Key("x", b"8 bytes!")),
    ):
        assert ["Refused"] == kinds(ledger.receive(message, 0.0))
    stranger = replace(said("valid"), by=replace(P[0], rank=kvspec.RankId(tp=9)))
    assert ["Refused"] == kinds(ledger.receive(stranger, 0.0))
