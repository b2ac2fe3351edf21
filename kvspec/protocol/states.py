"""How a request goes through both ledgers, as tables; docs/ledgers.md draws them.

Law: what is not in a table cannot happen. Every state but the last leads on by time alone, so every
request reaches an end; and only one row of each table frees, only one makes ready.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Row:
    """One transition: to which *state*, what is *done*, and why it is right."""

    state: str
    done: str
    why: str


PRODUCER: dict[tuple[str, str], Row] = {
    ("unknown", "heartbeat"): Row("unknown", "keep", "the engine may not have told this rank yet"),
    ("unknown", "done"): Row("unknown", "keep", "as above; counted when the request is admitted"),
    ("unknown", "admit"): Row("held", "replay", "what came early counts"),
    ("unknown", "time"): Row("forgotten", "gone", "nobody knows it: the reader must not trust it"),
    ("held", "heartbeat"): Row("held", "lease", "a live reader gets more time, up to the longest"),
    ("held", "done"): Row("held", "valid", "held until now, so all that was read was right"),
    ("held", "again"): Row("held", "repeat", "the answer was lost"),
    ("held", "abort"): Row("fenced", "", "a reader may be reading: nothing is freed yet"),
    ("held", "complete"): Row("freed", "free", "every reader that will come is done"),
    ("held", "time"): Row("freed", "free", "the lease is over; who comes now is told"),
    ("fenced", "heartbeat"): Row("fenced", "gone", "the reader may stop at once"),
    ("fenced", "done"): Row("fenced", "gone", "what it read may be cut short: it fails closed"),
    ("fenced", "again"): Row("fenced", "repeat", "what was valid when it was read stays so"),
    ("fenced", "abort"): Row("fenced", "", "once is enough"),
    ("fenced", "complete"): Row("freed", "free", "every reader that will come is done"),
    ("fenced", "time"): Row("freed", "free", "the lease is over"),
    ("freed", "heartbeat"): Row("freed", "gone", "late: the blocks may hold another request"),
    ("freed", "done"): Row("freed", "gone", "late: what it read may be another request's"),
    ("freed", "again"): Row("freed", "repeat", "what was valid when it was read stays so"),
    ("freed", "time"): Row("forgotten", "", "who comes later is unknown, and told the same"),
}
"""By state and event. *again*: what a reader that is done said before. *complete*: all readers that
will come are done, and none is undone. *time*: the lease is over, or a freed request was remembered
as long."""

CONSUMER: dict[tuple[str, str], Row] = {
    ("moving", "whole"): Row("asking", "ask", "every source and group arrived: was it valid?"),
    ("moving", "fault"): Row("draining", "fail", "by name; its blocks may still be written"),
    ("asking", "sound"): Row("telling", "ready", "each source answered after it was read"),
    ("asking", "fault"): Row("draining", "fail", "a source is gone, or does not answer in time"),
    ("draining", "fault"): Row("draining", "", "it failed already, by its first fault"),
    ("draining", "quiet"): Row("telling", "release", "nothing in flight can write its blocks"),
    ("telling", "fault"): Row("telling", "", "it ended already"),
    ("telling", "told"): Row("closed", "close", "every producer rank answered, or is given up"),
}
"""By state and event. *whole*: nothing is missing. *sound*: every source answered `valid`
after its last byte was there. *quiet*: no step is open. *told*: nobody is left to tell."""
