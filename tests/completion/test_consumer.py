"""The ledger of a consumer: examples beside the law of `test_ledgers`."""

from __future__ import annotations

import tracemalloc
from typing import Any

from msgspec.structs import replace
from refused import refusal

import kvspec
from kvspec.completion.consumer import ConsumerLedger, LoadPlan, Step
from kvspec.completion.ledger import Closed, Ended, Failed, Tell
from kvspec.errors import TransferState
from kvspec.wire.messages import MESSAGES, Done, Key, Message, RankAddress, Valid

P = [RankAddress("prefill", 1, kvspec.RankId(tp=tp)) for tp in range(2)]
D = [RankAddress("decode", 1, kvspec.RankId(tp=tp)) for tp in range(3)]
KEY = Key("cmpl-1", b"8 bytes!")


def message_of(kind: str, by: int = 0, **more: Any) -> Message:
    """Return a message of a producer rank to the consumer rank."""
    return MESSAGES[kind](**{"key": KEY, "by": P[by], "to": D[0], **more})


def kinds(actions: list[Any]) -> list[str]:
    """Return the kind of each action; of a message, its own kind."""
    return [a.message.kind if isinstance(a, Tell) else type(a).__name__ for a in actions]


def reads(**more: Any) -> LoadPlan:
    """Return a plan that reads the first producer rank, and informs both."""
    fields: dict[str, Any] = {
        "request_id": "mine", "key": KEY, "engine_id": "prefill", "epoch": 1,
        "expected": {P[0].rank: 2, P[1].rank: 1}, "sources": (P[0].rank,),
    }  # fmt: skip
    return LoadPlan(**{**fields, **more})


def expect(ledger: ConsumerLedger, plan: LoadPlan, now: float, timeout: float) -> list[Any]:
    """Begin a load whose producer is connected. Return the actions."""
    actions: list[Any] = [*ledger.begin(plan.request_id, now, timeout)]
    ledger.assign(plan)
    return actions + ledger.queued(plan.request_id, now)


def moving(**more: Any) -> ConsumerLedger:
    """Return a consumer rank whose load started at second 0, with a timeout of 20 seconds."""
    ledger = ConsumerLedger(D[0], heartbeat=5.0, patience=12.0)
    assert ["heartbeat", "heartbeat"] == kinds(expect(ledger, reads(**more), 0.0, 20.0))
    return ledger


def answers(actions: list[Any], kind: str, **more: Any) -> list[Message]:
    """Return the answers to the messages among *actions*."""
    return [a.message.answer(MESSAGES[kind], **more) for a in actions if isinstance(a, Tell)]


def test_load_is_done_when_its_source_answers_valid() -> None:
    """The load asks after its last byte. It closes when both producer ranks have answered."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    asked = ledger.finish(step, 3.0)
    assert ["done", "done"] == kinds(asked)
    first, second = answers(asked, "valid")
    assert ["Ended"] == kinds(ledger.receive(first, 4.0))
    assert ["Refused"] == kinds(ledger.receive(first, 4.0))
    assert [Closed("mine")] == ledger.receive(second, 5.0)
    assert ({}, 0, None) == (ledger.open, ledger.steps, ledger.due)


def test_load_is_done_when_valid_comes_at_the_time_of_the_last_byte() -> None:
    """The producer held the request when it answered, so it held it when the byte arrived."""
    ledger = moving()
    asked = ledger.finish(ledger.start("mine", P[0].rank), 3.0)
    assert ["Ended"] == kinds(ledger.receive(answers(asked, "valid")[0], 3.0))


def test_load_with_granted_lease_waits_for_valid() -> None:
    """The consumer's clock may have stood still, so its measure of the lease proves nothing."""
    ledger = ConsumerLedger(D[0], heartbeat=500.0)
    grant = answers(expect(ledger, reads(), 0.0, 2000.0), "lease", lease=1000.0)[0]
    assert [] == ledger.receive(grant, 0.0)
    asked = ledger.finish(ledger.start("mine", P[0].rank), 0.0)
    assert {"done"} == set(kinds(asked))
    assert ["Ended"] == kinds(ledger.receive(answers(asked, "valid")[0], 0.0))


def test_late_or_repeated_lease_is_ignored_without_a_refusal() -> None:
    """A healthy producer may answer a heartbeat after the load has sent `done`."""
    ledger = ConsumerLedger(D[0])
    lease = answers(expect(ledger, reads(), 0.0, 20.0), "lease", lease=9.0)[0]
    assert [] == ledger.receive(lease, 0.0) + ledger.receive(lease, 0.0)
    asked = ledger.finish(ledger.start("mine", P[0].rank), 1.0)
    assert [] == ledger.receive(lease, 1.0)
    never_sent = replace(lease, number=99)
    assert ["Refused"] == kinds(ledger.receive(never_sent, 1.0))
    assert ["Ended"] == kinds(ledger.receive(answers(asked, "valid")[0], 1.0))


def test_valid_before_all_has_arrived_does_not_count() -> None:
    """Only an answer to a question asked after the last byte counts."""
    ledger = ConsumerLedger(D[0])
    early = answers(expect(ledger, reads(), 0.0, 20.0), "valid")[0]
    assert [] == ledger.receive(early, 0.0)
    actions = ledger.finish(ledger.start("mine", P[0].rank), 1.0)
    assert "Ended" not in kinds(actions)


def test_repeated_message_keeps_its_number_and_no_other_load_has_it() -> None:
    """So a late answer to an earlier load of the same request is refused."""
    ledger = moving()
    later = ledger.finish(ledger.start("mine", P[0].rank), 3.0)
    first, *_ = [action.message for action in later]
    again = [action.message for action in ledger.tick(8.0)]
    assert ({first.number}, 2) == ({message.number for message in again}, len(again))
    for message in again:
        ledger.receive(message.answer(Valid), 9.0)
    assert {} == ledger.open
    heartbeats = [action.message for action in expect(ledger, reads(), 9.0, 20.0)]
    assert all(message.number > first.number for message in heartbeats)
    assert "Refused" in kinds(ledger.receive(first.answer(Valid), 9.0))


def test_load_to_verify_asks_only_after_its_data_was_compared() -> None:
    """Its data must be compared when all of it has arrived, and not before."""
    ranks = P[0].rank, P[1].rank
    ledger = moving(checksum=True, sources=ranks)
    first = ledger.start("mine", ranks[0])
    assert [] == ledger.finish(first, 2.0)
    assert not ledger.uncompared("mine")
    last = ledger.start("mine", ranks[1])
    assert not ledger.uncompared("mine")
    assert [] == ledger.finish(last, 4.0)
    assert ledger.uncompared("mine")
    assert ["heartbeat", "heartbeat"] == kinds(ledger.tick(5.0))
    asked = ledger.compared("mine", 6.0)
    assert ["done", "done"] == kinds(asked)
    assert not ledger.uncompared("mine")
    assert [] == ledger.compared("mine", 6.0)
    ends = [a for valid in answers(asked, "valid") for a in ledger.receive(valid, 7.0)]
    assert ["Ended", "Closed"] == kinds(ends)


def test_load_whose_data_differs_fails_at_once() -> None:
    """No step is open when its data is compared. It is not compared again after that."""
    ledger = moving(checksum=True)
    ledger.finish(ledger.start("mine", P[0].rank), 1.0)
    failed = ledger.cancel("mine", 2.0, "a token differs", TransferState.DIFFERS)
    assert ["Failed", "Ended", "done", "done"] == kinds(failed)
    assert [] == ledger.compared("mine", 2.0)
    assert not ledger.uncompared("mine")


def test_load_to_verify_that_moves_nothing_is_done_at_once() -> None:
    """There is no data to compare."""
    ledger = ConsumerLedger(D[0])
    assert "Ended" in kinds(expect(ledger, reads(sources=(), checksum=True), 0.0, 20.0))


def test_load_fails_when_its_source_answers_gone() -> None:
    """The source freed the request before it was read. The reason names its rank."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    gone = answers(ledger.finish(step, 3.0), "gone")
    actions = ledger.receive(gone[0], 4.0)
    assert isinstance(actions[0], Failed)
    assert ("mine", TransferState.GONE) == (actions[0].request_id, actions[0].state)
    assert "prefill tp0" in actions[0].why
    assert Ended("mine", "failed") == actions[1]


def test_failed_load_sends_done_to_a_rank_that_answered_gone_while_bytes_moved() -> None:
    """Both ranks have aborted the request. Each of them frees it when it receives `done`."""
    ledger = ConsumerLedger(D[0])
    heartbeats = expect(ledger, reads(), 0.0, 20.0)
    step = ledger.start("mine", P[0].rank)
    failed = [a for gone in answers(heartbeats, "gone") for a in ledger.receive(gone, 1.0)]
    assert ["Failed"] == kinds(failed)
    assert ["Ended", "done", "done"] == kinds(ledger.finish(step, 2.0))


def test_failed_load_keeps_its_blocks_until_its_last_step_has_ended() -> None:
    """The step may still write into them."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    (failed,) = ledger.cancel("mine", 1.0)
    assert isinstance(failed, Failed)
    assert TransferState.CANCELLED == failed.state
    assert [] == ledger.cancel("mine", 1.0) + ledger.tick(100.0)
    assert ["Ended", "done", "done"] == kinds(ledger.finish(step, 200.0))
    assert [Closed("mine")] == ledger.tick(212.0)


def test_cancel_in_other_words_keeps_the_given_state() -> None:
    """The state of a failure does not depend on the words of its reason."""
    ledger = moving()
    failed = ledger.cancel("mine", 1.0, "not there in time", TransferState.GONE)
    assert failed[0] == Failed("mine", "not there in time", TransferState.GONE)
    ledger = moving()
    assert ledger.cancel("mine", 1.0, "not wanted")[0].state is TransferState.CANCELLED  # type: ignore[union-attr]


def test_failed_step_passes_its_state_to_the_failed_action() -> None:
    """The state contains all that is known of the transfer."""
    ledger = moving()
    step = ledger.start("mine", P[0].rank)
    actions = ledger.fail(step, "the peer died", 1.0, state=TransferState.PEER_LOST)
    assert Failed("mine", "the peer died", TransferState.PEER_LOST) == actions[0]


def test_late_load_fails_and_stops_informing_a_producer_that_does_not_answer() -> None:
    """It fails at its timeout, and repeats its messages while *patience* lasts."""
    ledger = moving()
    assert ["heartbeat", "heartbeat"] == kinds(ledger.tick(5.0))
    late = ledger.tick(20.0)
    assert ["Failed", "Ended", "done", "done"] == kinds(late)
    assert isinstance(late[0], Failed)
    assert TransferState.TIMEOUT == late[0].state
    assert ["done", "done"] == kinds(ledger.tick(25.0))
    assert [Closed("mine")] == ledger.tick(32.0)


def test_load_that_ended_early_leaves_nothing_until_its_deadline() -> None:
    """The deadlines are a day away, and another load is open all the time."""
    ledger = moving()
    tracemalloc.start()
    try:
        for at in range(5000):
            ledger.begin(f"{at}", 1.0, 86400.0)
            ledger.cancel(f"{at}", 1.0)
            ledger.actions.clear()  # as a session does that has carried them out
        assert ["mine"] == list(ledger.open)
        assert tracemalloc.get_traced_memory()[0] < 200_000
    finally:
        tracemalloc.stop()


def test_load_without_sources_is_done_at_once() -> None:
    """All tokens are cached. Every producer rank is informed all the same."""
    ledger = ConsumerLedger(D[0])
    actions = expect(ledger, reads(sources=()), 0.0, 20.0)
    assert ["done", "done", "Ended"] == kinds(actions)
    assert ["Closed"] == kinds(
        [a for n in answers(actions, "gone") for a in ledger.receive(n, 1.0)]
    )


def test_load_fails_when_its_producer_restarts() -> None:
    """The earlier incarnation has ended, so no message is sent to it."""
    ledger = moving()
    actions = ledger.connect("prefill", 2, 1.0)
    assert isinstance(actions[0], Failed)
    assert ("mine", TransferState.GONE) == (actions[0].request_id, actions[0].state)
    assert Ended("mine", "failed") == actions[1]
    assert ["Closed"] == kinds(actions[2:])
    error = refusal(lambda: ledger.connect("prefill", 1, 2.0))
    assert ("epoch", 1) == (error.field, error.value)
    ledger.disconnect("prefill")
    assert ["heartbeat", "heartbeat"] == kinds(expect(ledger, reads(), 2.0, 9.0))


def test_consumer_ledger_rejects_invalid_plans_and_steps() -> None:
    """A plan is open already, a rank is not a source, or a step does not exist."""
    ledger = moving()
    source = P[0].rank
    calls: list[tuple[Any, str, Any]] = [
        (lambda: expect(ledger, reads(), 0.0, 1.0), "request_id", "mine"),
        (lambda: expect(ledger, reads(request_id="third"), 0.0, 1.0), "key", KEY),
        (lambda: ledger.start("other", source), "request_id", "other"),
        (lambda: ledger.start("mine", P[1].rank), "request_id", "mine"),
        (lambda: [ledger.start("mine", source) for _ in range(2)], "request_id", "mine"),
        (
            lambda: ledger.finish(Step("mine", 99, source), 0.0),
            "step",
            ("mine", 99, source),
        ),
        (
            lambda: ledger.fail(Step("other", 99, source), "why", 0.0, quiet=False),
            "step",
            ("other", 99, source),
        ),
    ]
    for call, field, value in calls:
        error = refusal(call)
        assert (field, value) == (error.field, error.value)
    assert [] == ledger.cancel("other", 0.0)
    heartbeat = Done(KEY, P[0], D[0], 1, expected=1)
    for message in (
        heartbeat,
        message_of("valid", by=1, number=7),
        message_of("valid", key=Key("x", b"8 bytes!")),
    ):
        assert ["Refused"] == kinds(ledger.receive(message, 0.0))
    stranger = replace(message_of("valid"), by=replace(P[0], rank=kvspec.RankId(tp=9)))
    assert ["Refused"] == kinds(ledger.receive(stranger, 0.0))


def test_disconnect_ends_the_last_messages_of_loads() -> None:
    """Nobody answers them, and the request id is free at once. Bytes in flight keep it."""
    ledger = moving()
    assert ["Failed", "Ended", "done", "done"] == kinds(ledger.cancel("mine", 1.0))
    assert ["Closed"] == kinds(ledger.disconnect("prefill"))
    expect(ledger, reads(), 2.0, 20.0)
    step = ledger.start("mine", P[0].rank)
    ledger.cancel("mine", 3.0)
    assert [] == ledger.disconnect("prefill")
    assert {"mine": "draining"} == ledger.open
    assert ["Ended", "Closed"] == kinds(ledger.fail(step, "it is over", 4.0))
