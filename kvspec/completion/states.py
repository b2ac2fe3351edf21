"""The states of a request in both ledgers, as tables. docs/ledgers.md shows them.

Invariant: a transition that is not in a table cannot happen. Blocks are freed only on the way into
*freed*, and no row leads back from there, so a request is freed once. A load becomes *done* by one
row, after its sources answered `valid`. It becomes *failed* by one row, when no byte can move.

Time ends each state of a request or a load except *draining*. The deadline of a load is a *fault*.
In all other states, it is the event *time*. *draining* has no time limit: it ends when no transfer
can write. No row sends the messages about checksums: the session does.

How it works:
    A ledger turns what happens into an event, looks up its row, and calls the method of the column
    `action`. These conditions decide which event it is:

    producer's event  condition                                                in the code
    ----------------  -------------------------------------------------------  --------------------
    heartbeat, done   the limits and the readers so far allow the message;     `receive`, `refusal`
                      otherwise it is refused and is no event
    repeated          a `done` with the number of the reader's last `done`     `repeats`
    hold, abort       the engine calls `hold` or `abort`                       `hold`, `abort`
    complete          no dispute; for each incarnation that reads, all         `complete`
                      expected readers have come and all are done
    time              `tick` finds that `expires` is over; each accepted       `_wake`, `_lease`
                      heartbeat moves it, at most to `latest`

    consumer's event  condition                                                in the code
    ----------------  -------------------------------------------------------  --------------------
    queued            the reads are queued                                     `queued`
    whole             the read of each source was started, no step is open,    `_CONDITIONS`
                      and no checksum is to be compared
    valid             each source has answered `valid` to a number that was    `receive`,
                      asked in *asking*                                        `_CONDITIONS`
    quiet             no step is open                                          `_CONDITIONS`
    answered          each producer rank has answered a number that was asked  `refusal_of`,
                                                                               `_CONDITIONS`
    time              `deadline` is over in *done* or *failed*; earlier, that  `_wake`
                      is a fault
    fault             the first error of the load, or its cancellation         `_fault`

    `JOINT` has the pairs of states that both sides can be in at the same time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from kvspec.errors import TransferError, TransferState


class Transition(NamedTuple):
    """One transition.

    Attributes:
        state: The next state.
        action: The action of the ledger: a method, or "" for none.
        why: The reason why this is right.
    """

    state: str
    action: str
    why: str


PRODUCER: dict[tuple[str, str], Transition] = {
    ("unknown", "heartbeat"): Transition(
        "unknown", "keep", "the engine may hold the request later"
    ),
    ("unknown", "done"): Transition("unknown", "keep", "it counts when the request is held"),
    ("unknown", "hold"): Transition("held", "replay", "earlier messages count"),
    ("unknown", "time"): Transition("forgotten", "gone", "it was never held: the data is void"),
    ("held", "heartbeat"): Transition(
        "held", "lease", "a live reader gets more time, up to the longest"
    ),
    ("held", "done"): Transition("held", "valid", "held until now, so all data was valid"),
    ("held", "repeated"): Transition("held", "repeat", "the answer was lost"),
    ("held", "abort"): Transition("fenced", "", "a reader may still read: nothing is freed yet"),
    ("held", "complete"): Transition("freed", "free", "all expected readers are done"),
    ("held", "time"): Transition("freed", "free", "the lease is over; later readers receive gone"),
    ("fenced", "heartbeat"): Transition("fenced", "gone", "the reader may stop at once"),
    ("fenced", "done"): Transition("fenced", "gone", "its data may be incomplete, so it is void"),
    ("fenced", "repeated"): Transition("fenced", "repeat", "data that was valid stays valid"),
    ("fenced", "abort"): Transition("fenced", "", "it is aborted already"),
    ("fenced", "complete"): Transition("freed", "free", "all expected readers are done"),
    ("fenced", "time"): Transition("freed", "free", "the lease is over"),
    ("freed", "heartbeat"): Transition(
        "freed", "gone", "late: the blocks may hold another request"
    ),
    ("freed", "done"): Transition("freed", "gone", "late: its data may belong to another request"),
    ("freed", "repeated"): Transition("freed", "repeat", "data that was valid stays valid"),
    ("freed", "time"): Transition(
        "forgotten", "", "the request is unknown to later readers: they receive gone, too"
    ),
}
"""The producer's transitions, by state and event.

*repeated* is a `done` that was answered before. *complete* means that all expected readers
are done. *time* means that the lease is over. A freed or unknown request is remembered for one more
lease.
"""

CONSUMER: dict[tuple[str, str], Transition] = {
    ("connecting", "queued"): Transition(
        "moving", "begin", "its reads are queued: heartbeats request more lease"
    ),
    ("connecting", "fault"): Transition(
        "draining", "fail", "no message was sent; a start that failed may have posted reads"
    ),
    ("moving", "whole"): Transition("asking", "ask", "all data arrived: ask whether it was valid"),
    ("moving", "fault"): Transition(
        "draining", "fail", "the error names the fault; its blocks may still be written"
    ),
    ("asking", "valid"): Transition("done", "await", "each source answered after it was read"),
    ("asking", "fault"): Transition(
        "draining", "fail", "a source is gone, or does not answer in time"
    ),
    ("draining", "fault"): Transition("draining", "", "it has already failed by its first fault"),
    ("draining", "quiet"): Transition("failed", "report", "nothing in flight can write its blocks"),
    ("done", "fault"): Transition("done", "", "it ended already"),
    ("done", "answered"): Transition("forgotten", "close", "every producer rank has answered"),
    ("done", "time"): Transition("forgotten", "close", "the other producer ranks are given up"),
    ("failed", "fault"): Transition("failed", "", "it ended already"),
    ("failed", "answered"): Transition("forgotten", "close", "every producer rank has answered"),
    ("failed", "time"): Transition("forgotten", "close", "the other producer ranks are given up"),
}
"""The consumer's transitions, by state and event.

*queued* means that the producer is connected and the reads, if any, are queued. *whole* means
that nothing is missing, and that the data was compared if it must be. *valid* means that every
source answered `valid` after its last byte had arrived. *quiet* means that no step is open.
*answered* means that every producer rank has answered. *time* means that the patience is over. A
*fault* is an error, a deadline or a cancellation.
"""

PUBLIC = {
    "connecting": "moving",
    "moving": "moving",
    "asking": "moving",
    "draining": "moving",
    "done": "done",
    "failed": "failed",
    "forgotten": "",
}
"""The public state of a load, by its state in the consumer's ledger."""

JOINT: dict[str, tuple[str, ...]] = {
    "connecting": ("new", "held", "fenced", "expired"),
    "moving": ("new", "held", "fenced", "expired"),
    "draining": ("new", "held", "fenced", "expired"),
    "asking": ("new", "held", "fenced", "read", "expired"),
    "failed": ("new", "held", "fenced", "read", "expired"),
    "done": ("held", "fenced", "read", "expired"),
}
"""For each state of a load, where the request can be on a producer rank that the load reads.

*new* means that the rank does not hold the request yet. *read* and *expired* are the end: all
readers were done, or the lease was over before. They include *forgotten*. Each side has a clock of
its own, and messages may be lost, so nearly all pairs occur. Four pairs cannot occur:

- *read* with *connecting*, *moving* or *draining*: the load has not sent its `done` yet, so the
  producer still waits for it. This protects the blocks while they are read.
- *new* with *done*: only a rank that held the request answers `valid`.

That holds for the first load of a request by a rank. The rank may load it again, although it has
sent `done`: then the producer may have freed the request.
"""


def row_of(
    role: str, table: Mapping[tuple[str, str], Transition], state: str, event: str
) -> Transition:
    """Return the row of an event in the ledger of a *role*.

    Raises:
        TransferError: With state "bug" if the event is impossible in the state.
    """
    try:
        return table[state, event]
    except KeyError:
        message = f"the {role}'s ledger has no event {event!r} in the state {state!r}"
        advice = TransferState.BUG.advice
        raise TransferError(f"{message}: {advice}", state=TransferState.BUG) from None
