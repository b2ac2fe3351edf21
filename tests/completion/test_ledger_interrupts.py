"""An interrupted call of a ledger changes nothing, so that it can be made again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lines import interrupted_at

import kvspec
from kvspec.completion import consumer, ledger, producer
from kvspec.completion.consumer import ConsumerLedger, LoadOptions, LoadPlan
from kvspec.completion.ledger import Tell
from kvspec.completion.producer import ProducerLedger
from kvspec.wire.messages import (
    MESSAGES,
    Done,
    Heartbeat,
    Key,
    Message,
    RankAddress,
)

LINES = ledger, consumer, producer
Calls = list[Callable[[Any, list[Any]], Any]]
PLACE = ("full", "layers.0")
RANK, OTHER = kvspec.RankId(), kvspec.RankId(tp=1)


def reads(**options: Any) -> LoadPlan:
    """Return a plan that reads one layer of the first producer rank, and informs both."""
    return LoadPlan(
        request_id="mine", key=Key("theirs", b"8 bytes!"), engine_id="prefill", epoch=1,
        expected={RANK: 1, OTHER: 1}, sources={RANK: {PLACE: 8}}, options=LoadOptions(**options),
    )  # fmt: skip


def answers(actions: list[Any], kind: str, **more: Any) -> list[Message]:
    """Return the answers to the messages among *actions*."""
    return [a.message.answer(MESSAGES[kind], **more) for a in actions if isinstance(a, Tell)]


def begun(**options: Any) -> Calls:
    """Return the calls that begin a load. The last of them returns the first messages."""
    return [
        lambda ledger, _: ledger.begin("mine", 0.0, 20.0),
        lambda ledger, _: ledger.assign(reads(**options)),
        lambda ledger, _: ledger.connected("mine", 0.0),
    ]


DONE: Calls = [
    *begun(),
    lambda ledger, _: ledger.start("mine", RANK),
    lambda ledger, results: ledger.receive(answers(results[2], "lease", lease=9.0)[0], 1.0),
    lambda ledger, _: ledger.tick(6.0),
    lambda ledger, results: ledger.finish(results[3], 7.0),
    lambda ledger, results: ledger.receive(answers(results[6], "valid")[0], 8.0),
    lambda ledger, results: ledger.receive(answers(results[6], "valid")[1], 8.0),
]
VERIFIED: Calls = [
    *begun(verify=True),
    *DONE[3:7],
    lambda ledger, _: ledger.verified("mine", 7.0),
    lambda ledger, results: ledger.receive(answers(results[7], "valid")[0], 8.0),
    lambda ledger, results: ledger.receive(answers(results[7], "valid")[1], 8.0),
]
LATE: Calls = [
    *DONE[:4],
    lambda ledger, results: ledger.fail(results[3], "it hangs", 3.0, quiet=False),
    lambda ledger, _: ledger.tick(25.0),
    lambda ledger, results: ledger.fail(results[3], "it broke", 26.0),
    lambda ledger, _: ledger.tick(40.0),
]
CONNECTED: Calls = [
    lambda ledger, _: ledger.begin("mine", 0.0, 20.0),
    lambda ledger, _: ledger.assign(reads()),
    lambda ledger, _: ledger.start("mine", RANK),
    lambda ledger, _: ledger.connected("mine", 1.0),
    lambda ledger, results: ledger.finish(results[2], 7.0),
    lambda ledger, _: ledger.cancel("mine", 8.0),
    lambda ledger, _: ledger.tick(40.0),
]
RESTARTED: Calls = [
    *DONE[:4],
    lambda ledger, _: ledger.cancel("mine", 3.0),
    lambda ledger, _: ledger.connect("prefill", 99, 4.0),
    lambda ledger, results: ledger.finish(results[3], 5.0),
    lambda ledger, _: ledger.tick(40.0),
]
FOLLOWED: Calls = [
    *begun(follow=True),
    lambda ledger, results: ledger.receive(written(results[2], 5), 1.0),
    lambda ledger, _: ledger.start("mine", RANK, {PLACE: 3}),
    lambda ledger, _: ledger.start("mine", RANK, {PLACE: 5}),
    lambda ledger, results: ledger.finish(results[5], 2.0),
    lambda ledger, results: ledger.receive(written(results[2], 8), 3.0),
    lambda ledger, _: ledger.start("mine", RANK),
    lambda ledger, results: ledger.finish(results[4], 4.0),
    lambda ledger, results: ledger.finish(results[8], 4.5),
    lambda ledger, results: ledger.receive(answers(results[10], "valid")[0], 4.6),
    lambda ledger, results: ledger.receive(answers(results[10], "gone")[1], 4.7),
]


def written(actions: list[Any], upto: int) -> Message:
    """Return the message of the first producer rank that a layer is written so far."""
    return answers(actions, "progress", group=PLACE[0], layer=PLACE[1], upto=upto)[0]


KEY, OTHER_KEY = Key("theirs", b"8 bytes!"), Key("theirs", b"9 bytes!!")
ME, READERS = (
    RankAddress("prefill", 1, RANK), [RankAddress("decode", 1, rank) for rank in (RANK, OTHER)]
)  # fmt: skip
TARGETS = [(0, reader) for reader in READERS]
WRITTEN = bytes(16)


def message_of(kind: Any, by: int, number: int, key: Key = KEY) -> Any:
    """Return a message of one of two readers."""
    return kind(key, READERS[by], ME, number, expected=2)


def ticks(now: float) -> Calls:
    """Return calls that let the time pass."""
    return [lambda ledger, _: ledger.tick(now)]


READ: Calls = [
    lambda ledger, _: ledger.receive(message_of(Heartbeat, 0, 1), 0.0),
    lambda ledger, _: ledger.receive(message_of(Done, 1, 1, OTHER_KEY), 0.0),
    lambda ledger, _: ledger.admit(KEY, 1.0, lease=20.0),
    lambda ledger, _: ledger.record_progress(KEY, [("full", "l.0"), ("full", "l.1")], 4, 2.0),
    lambda ledger, _: ledger.receive(
        message_of(Heartbeat, 1, 1), 12.0
    ),  # The other request expires.
    lambda ledger, _: ledger.receive(message_of(Done, 0, 2), 13.0),
    lambda ledger, _: ledger.receive(message_of(Done, 1, 2), 14.0),
    lambda ledger, _: ledger.receive(message_of(Done, 1, 2), 15.0),
    *ticks(99.0),
]
ABORTED: Calls = [
    lambda ledger, _: ledger.admit(KEY, 0.0),
    lambda ledger, _: ledger.admit(OTHER_KEY, 0.0),
    lambda ledger, _: ledger.receive(message_of(Heartbeat, 0, 1), 1.0),
    lambda ledger, _: ledger.abort(KEY, 2.0),
    lambda ledger, _: ledger.receive(message_of(Heartbeat, 0, 2), 3.0),
    *ticks(40.0),  # Both leases end in one call.
    *ticks(99.0),
]


def played(calls: Calls, at: int = -1, place: int = 0) -> tuple[list[Any], bool]:
    """Make *calls*; if an interrupt at line *place* ends call *at*, make this call again.

    Return what the calls returned, and whether call *at* has so many lines.
    """
    consumes = calls in (DONE, VERIFIED, LATE, CONNECTED, RESTARTED, FOLLOWED)
    ledger: Any = (
        ConsumerLedger(RankAddress("decode", 1, RANK), heartbeat=5.0, patience=12.0)
        if consumes
        else ProducerLedger(ME, lease=10.0, longest=30.0)
    )
    results: list[Any] = []
    reached = False
    for number, call in enumerate(calls):

        def act(call: Any = call) -> None:
            results.append(call(ledger, results))

        raised = True
        if number == at:
            reached, raised = interrupted_at(place, act, *LINES)
        if raised:
            act()
    if consumes:
        assert {} == ledger.open
    else:
        empty = (
            ledger.held,
            ledger.counts["held"],
            len(ledger.records),
            ledger.due,
        )
        assert ((), 0, 0, None) == empty
        results.append(ledger.freed)
    return results, reached


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
    "calls", [DONE, VERIFIED, LATE, CONNECTED, RESTARTED, FOLLOWED, READ, ABORTED]
)
def test_ledger_call_that_is_interrupted_can_be_made_again(calls: Calls) -> None:
    """The actions are the same wherever the interrupt comes."""
    expected, _ = played(calls)
    for at in range(len(calls)):
        place, reached = 0, True
        while reached:
            results, reached = played(calls, at, place)
            assert expected == results, (at, place)
            place += 1
        assert place > 1
