"""The ledger of a producer: examples beside the law of `test_ledgers`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from msgspec.structs import replace
from refused import refusal

import kvspec
from kvspec.completion import producer
from kvspec.completion.ledger import Refused, Tell
from kvspec.completion.producer import MAX_KEPT_READERS, ProducerLedger
from kvspec.wire.messages import (
    Done,
    Heartbeat,
    Key,
    Lease,
    RankAddress,
    Valid,
)

if TYPE_CHECKING:
    import pytest

P = [RankAddress("prefill", 1, kvspec.RankId(tp=tp)) for tp in range(2)]
D = [RankAddress("decode", 1, kvspec.RankId(tp=tp)) for tp in range(3)]
KEY = Key("cmpl-1", b"8 bytes!")


def heartbeat(number: int, by: int = 0, **more: Any) -> Heartbeat:
    """Return a heartbeat of one of two readers."""
    fields: dict[str, Any] = {"key": KEY, "by": D[by], "to": P[0], "expected": 2}
    return Heartbeat(**fields | {"number": number} | more)


def done(by: int = 0, number: int = 2, **more: Any) -> Done:
    """Return a `done` of one of two readers."""
    fields: dict[str, Any] = {"key": KEY, "by": D[by], "to": P[0], "expected": 2}
    return Done(**fields | {"number": number} | more)


def held(**more: Any) -> ProducerLedger:
    """Return a producer rank that holds the request since second 0, for ten seconds."""
    ledger = ProducerLedger(P[0], lease=10.0, longest=30.0)
    assert [] == ledger.hold(KEY, 0.0, **more)
    return ledger


def kinds(actions: list[Any]) -> list[str]:
    """Return the kind of each action; of a message, its own kind."""
    return [a.message.kind if isinstance(a, Tell) else type(a).__name__ for a in actions]


def test_request_is_freed_after_its_last_reader() -> None:
    """Two readers will come. The first is done, twice, and frees nothing; the second does."""
    ledger = held()
    assert ["lease"] == kinds(ledger.receive(heartbeat(1), 1.0))
    assert ["valid"] == kinds(ledger.receive(done(), 2.0))
    assert ["valid"] == kinds(ledger.receive(done(), 2.0))
    assert (KEY,) == ledger.held
    assert {} == ledger.freed
    assert ["valid"] == kinds(ledger.receive(done(1), 3.0))
    assert {KEY.remote_id: "done"} == ledger.freed
    assert ["valid"] == kinds(ledger.receive(done(1), 4.0))
    assert ["gone"] == kinds(ledger.receive(done(2), 4.0))
    assert [] == ledger.tick(13.0)
    assert (0, None) == (len(ledger.records), ledger.due)


def test_heartbeat_that_waited_extends_a_lease_that_is_over() -> None:
    """A producer had no CPU for a lease. Nothing that it does before the heartbeat frees blocks."""
    ledger, other = held(), Key("cmpl-2", b"8 bytes?")
    ledger.receive(heartbeat(1), 1.0)
    assert [] == ledger.hold(other, 12.0)
    ledger.abort(other, 12.0)
    ledger.receive(heartbeat(1, key=Key("unknown", b"8 bytes!")), 12.0)
    assert ["lease"] == kinds(ledger.receive(heartbeat(2), 12.0))
    assert {} == ledger.freed
    ledger.tick(21.0)
    assert KEY in ledger.held
    ledger.tick(22.0)
    assert "expired" == ledger.freed[KEY.remote_id]


def test_repeated_heartbeat_extends_no_lease() -> None:
    """A recorded heartbeat of a dead reader is refused, so the lease ends when it must."""
    ledger = held()
    first = heartbeat(1)
    assert ["lease"] == kinds(ledger.receive(first, 1.0))
    assert ["lease"] == kinds(ledger.receive(heartbeat(2), 4.0))
    for now in (4.0, 9.0, 13.9):
        for copy in (first, heartbeat(2)):
            assert ["Refused"] == kinds(ledger.receive(copy, now))
    assert {} == ledger.freed
    assert [] == ledger.tick(14.0)
    assert {KEY.remote_id: "expired"} == ledger.freed


def test_repeated_heartbeat_extends_no_lease_after_an_abort() -> None:
    """An aborted request is freed when its lease ends, and repetitions do not change that."""
    ledger = held()
    ledger.receive(heartbeat(1), 1.0)
    ledger.abort(KEY, 2.0)
    assert ["Refused"] == kinds(ledger.receive(heartbeat(1), 3.0))
    assert ["gone"] == kinds(ledger.receive(heartbeat(2), 3.0))
    assert {} == ledger.freed
    assert [] == ledger.tick(11.0)
    assert {KEY.remote_id: "aborted"} == ledger.freed


def test_repeated_heartbeat_is_kept_once_before_the_request_is_held() -> None:
    """Only one of several copies of an early heartbeat extends the lease."""
    ledger = ProducerLedger(P[0], lease=10.0)
    for now in (0.0, 1.0, 2.0):
        assert [] == ledger.receive(heartbeat(1), now)
    assert ["lease"] == kinds(ledger.hold(KEY, 3.0))
    assert ["Refused"] == kinds(ledger.receive(heartbeat(1), 12.0))
    assert {} == ledger.freed
    assert [] == ledger.tick(13.0)
    assert {KEY.remote_id: "expired"} == ledger.freed


def test_data_that_was_valid_for_one_load_is_not_for_the_next() -> None:
    """A reader that sends a heartbeat after `done` reads again: the request waits for it."""
    ledger = held()
    assert ["valid"] == kinds(ledger.receive(done(number=2), 1.0))
    assert ["Refused"] == kinds(ledger.receive(heartbeat(1), 1.0))  # It was delayed.
    assert ["lease"] == kinds(ledger.receive(heartbeat(3), 1.0))
    assert ["valid"] == kinds(ledger.receive(done(1), 2.0))
    (late,) = ledger.receive(done(number=2), 2.0)
    assert isinstance(late, Refused)
    assert "older" in str(late)
    assert (KEY,) == ledger.held, "freed although a lease was sent"
    assert {} == ledger.freed
    assert ["valid"] == kinds(ledger.receive(done(number=4), 3.0))
    assert {KEY.remote_id: "done"} == ledger.freed
    assert ["valid"] == kinds(ledger.receive(done(number=4), 3.0))
    assert ["gone"] == kinds(ledger.receive(heartbeat(5), 4.0))
    assert ["gone"] == kinds(ledger.receive(done(number=6), 4.0))


def test_early_message_counts() -> None:
    """The ledger does not wait for readers that were done before the request was held."""
    ledger = ProducerLedger(P[0], lease=10.0)
    assert [] == ledger.receive(done(), 0.0) + ledger.receive(done(1), 1.0)
    assert {} == ledger.freed
    assert ["valid", "valid"] == kinds(ledger.hold(KEY, 2.0))
    assert {KEY.remote_id: "done"} == ledger.freed


def test_early_engine_that_declined_does_not_end_the_request_of_another() -> None:
    """All early messages count before the ledger asks whether every reader is done."""
    other = RankAddress("other", 1, kvspec.RankId())
    ledger = ProducerLedger(P[0], lease=10.0)
    assert [] == ledger.receive(done(expected=1), 0.0)
    assert [] == ledger.receive(replace(heartbeat(1, expected=1), by=other), 1.0)
    assert ["valid", "lease"] == kinds(ledger.hold(KEY, 2.0))
    assert {} == ledger.freed
    assert ["valid"] == kinds(ledger.receive(replace(done(expected=1), by=other), 3.0))
    assert {KEY.remote_id: "done"} == ledger.freed


def test_early_reader_receives_gone_when_the_request_is_not_held_in_time() -> None:
    """The answer comes one lease after the message."""
    ledger = ProducerLedger(P[0], lease=10.0)
    assert [] == ledger.receive(heartbeat(1), 0.0)
    assert ["gone"] == kinds(ledger.tick(10.0))
    assert 0 == len(ledger.records)


def test_heartbeats_extend_the_lease_up_to_the_longest() -> None:
    """A heartbeat grants ten seconds from when it comes, and none beyond thirty."""
    ledger = held()
    leases = []
    for number, now in enumerate((5.0, 14.0, 23.0)):
        (answer,) = ledger.receive(heartbeat(number), now)
        assert isinstance(answer, Tell)
        assert isinstance(answer.message, Lease)
        leases.append(answer.message.lease)
    assert [10.0, 10.0, 7.0] == leases
    assert {} == ledger.freed
    assert ["gone"] == kinds(ledger.receive(heartbeat(9), 30.0))
    assert {KEY.remote_id: "expired"} == ledger.freed


def test_aborted_request_is_freed_when_its_readers_are_done() -> None:
    """Readers receive `gone`, and the reason of the end is the abort."""
    ledger = held()
    ledger.receive(heartbeat(1), 1.0)
    assert [] == ledger.abort(KEY, 2.0)
    assert ["gone"] == kinds(ledger.receive(done(), 3.0))
    assert {} == ledger.freed
    assert ["gone"] == kinds(ledger.receive(done(1), 3.0))
    assert {KEY.remote_id: "aborted"} == ledger.freed
    assert [] == ledger.abort(KEY, 4.0) + ledger.abort(Key("never held", b"8 bytes!"), 4.0)


def test_readers_that_disagree_leave_the_lease() -> None:
    """Two readers expect different numbers: the request is freed when its lease ends."""
    ledger = held()
    ledger.receive(heartbeat(1), 1.0)
    (refused,) = ledger.receive(done(1, expected=1), 1.0)
    assert isinstance(refused, Refused)
    assert "expects" in refused.why
    assert ["valid", "valid"] == kinds(ledger.receive(done(), 2.0) + ledger.receive(done(1), 2.0))
    assert {} == ledger.freed
    assert [] == ledger.tick(11.0)
    assert {KEY.remote_id: "expired"} == ledger.freed


def test_messages_for_others_change_nothing() -> None:
    """They name another rank or incarnation, or come from a producer."""
    ledger = held()
    ledger.connect("decode", 1)
    ledger.receive(heartbeat(1), 1.0)
    for message in (
        done(to=P[1]),
        done(to=replace(P[0], epoch=0)),
        replace(done(), by=replace(D[0], epoch=0)),
        Valid(KEY, P[0], D[0]),
    ):
        assert ["Refused"] == kinds(ledger.receive(message, 2.0))
    error = refusal(lambda: ledger.connect("decode", 0))
    assert ("epoch", 0) == (error.field, error.value)
    ledger.disconnect("decode")
    ledger.connect("decode", 0)


def test_incarnations_that_read_one_request_are_bounded() -> None:
    """After sixteen incarnations, one more is refused, and only the lease frees."""
    ledger = held()
    for epoch in range(16):
        by = replace(D[0], epoch=epoch)
        assert ["valid"] == kinds(ledger.receive(replace(done(), by=by), 1.0))
    more = replace(done(), by=replace(D[0], epoch=99))
    (refused,) = ledger.receive(more, 1.0)
    assert isinstance(refused, Refused)
    assert "16" in refused.why


def test_messages_for_unknown_requests_are_bounded() -> None:
    """The ledger keeps a limited number of them, and only for a lease."""
    ledger = ProducerLedger(P[0], lease=10.0)
    ledger.most_early = 100
    for at in range(5000):
        key = Key(f"request {at}", b"8 bytes!")
        ledger.receive(done(key=key), at / 1000)
    assert 100 == len(ledger.records)
    known = Key("request 0", b"8 bytes!")
    assert ["Refused"] == kinds(ledger.receive(done(1, key=known), 5.0))
    ledger.tick(20.0)
    assert (0, None) == (len(ledger.records), ledger.due)


def test_request_is_admitted_once() -> None:
    """A name is held once, and time does not go back."""
    ledger = held()
    error = refusal(lambda: ledger.hold(KEY, 1.0))
    assert ("remote_id", KEY.remote_id) == (error.field, error.value)
    ledger.tick(9.0)
    assert [] == ledger.tick(1.0)


def test_requests_of_one_id_are_held_at_the_same_time() -> None:
    """A client that retries gets a new name. Messages, aborts and ends belong to one name."""
    ledger = held()
    again = Key(KEY.request_id, b"another nonce")
    assert [] == ledger.hold(again, 1.0)
    assert (KEY, again) == ledger.held
    ledger.abort(KEY, 2.0)
    ledger.receive(done(), 3.0)
    assert {} == ledger.freed
    assert ["gone"] == kinds(ledger.receive(done(1), 3.0))
    assert {KEY.remote_id: "aborted"} == ledger.freed
    assert ["lease"] == kinds(ledger.receive(heartbeat(7, key=again), 4.0))
    assert (again,) == ledger.held


def test_held_request_has_blocks_until_it_is_freed() -> None:
    """They are those of the engine. No checksum of them is computed later."""
    tables = {"g": kvspec.BlockTable([1])}
    ledger = held(blocks=tables)
    record = ledger.find(KEY)
    assert record is not None
    assert tables == record.blocks
    record.checksums["an extent"] = b""  # type: ignore[index]
    ledger.tick(10.0)
    assert ledger.find(KEY) is None


def test_cleared_ledger_holds_nothing() -> None:
    """A closed session has no requests."""
    ledger = held()
    ledger.receive(heartbeat(1, key=Key("unknown", b"8 bytes!")), 1.0)
    ledger.clear()
    left = ledger.counts["held"], len(ledger.records), ledger.held, ledger.due
    assert (0, 0, (), None) == left


def test_done_of_another_session_is_not_answered_as_the_first_one() -> None:
    """Two sessions of one name and epoch read the request, which breaks the rule for epochs.

    The blocks were freed after the first `done`, so the data of the other session may be wrong.
    """
    for other in (1, 7, 9):
        ledger = held()
        for by in range(2):
            ledger.receive(heartbeat(7, by), 0.0)
        for by in range(2):
            assert "valid" in kinds(ledger.receive(done(by, number=8), 1.0))
        assert (KEY.remote_id in ledger.freed) is True
        again = kinds(ledger.receive(done(0, number=8), 2.0))
        assert ["valid"] == again
        assert "valid" not in kinds(ledger.receive(done(0, number=other), 2.0))


def invented(count: int) -> list[RankAddress]:
    """Return ranks of one engine."""
    return [RankAddress("decode", 1, kvspec.RankId(tp=tp)) for tp in range(count)]


def test_readers_of_a_request_are_bounded() -> None:
    """Ranks that were invented with the secret use little memory."""
    ledger, name = held(), Key("cmpl-2", b"8 bytes?")
    ledger.hold(name, 0.0)
    last: list[Any] = []
    for by in invented(MAX_KEPT_READERS + 10):
        last = ledger.receive(replace(heartbeat(1, expected=2**20), by=by), 0.0)
    assert "Refused" == kinds(last)[0]
    assert MAX_KEPT_READERS == ledger.counts["readers"]
    # Another request still has readers, and a known reader goes on.
    assert "lease" in kinds(ledger.receive(replace(heartbeat(1), key=name), 0.0))
    assert "lease" in kinds(ledger.receive(heartbeat(2, expected=2**20), 0.0))
    ledger.tick(100.0)
    ledger.tick(200.0)
    assert 0 == ledger.counts["readers"]


def test_readers_of_freed_requests_keep_no_new_reader_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy producer frees thousands of requests within one lease."""
    monkeypatch.setattr(producer, "MAX_ALL_READERS", 8)
    monkeypatch.setattr(producer, "MAX_PAST_READERS", 8)
    ledger, last = held(), list[Any]()
    for number in range(30):
        key = Key(f"cmpl-{number}", b"other id")
        ledger.hold(key, 0.0)
        last = ledger.receive(done(key=key, expected=1), 0.0)
        assert ["valid"] == kinds(last)
    assert (0, 8) == (ledger.counts["readers"], ledger.counts["past"])
    # Only a reader of a request that is held is one too many.
    key = Key("cmpl-0", b"other id")
    for by in invented(8):
        ledger.receive(replace(heartbeat(1, expected=9), by=by), 0.0)
    assert 8 == ledger.counts["readers"]
    assert ["gone"] == kinds(ledger.receive(heartbeat(1, by=2, key=key), 0.0))
    ledger.tick(100.0)
    ledger.tick(200.0)
    assert 0 == ledger.counts["past"]
