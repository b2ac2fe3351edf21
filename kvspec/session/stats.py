"""Numbers of the things that a session holds, and of those that it has done."""

from __future__ import annotations

import attrs


@attrs.define(eq=False)
class Counters:
    """Sums since the session was opened. They never decrease.

    One thread at a time changes them, under the lock of the session. Others may read them at any
    time without a lock.

    Attributes:
        loads_started: Loads that were begun.
        loads_done: Loads that are done.
        loads_failed: Loads that have failed.
        load_seconds: Seconds from the call of `load` to the end, over all loads that are done. The
            mean is `load_seconds / loads_done`.
        bytes_read: Bytes that reads of this rank have moved.
        bytes_written: Bytes that pushes of this rank have moved.
        messages_sent: Messages that were sent.
        messages_received: Messages that were received with a right seal.
        refusals_lost: Declined tickets whose producer could not be reached.
        messages_refused: Messages that changed nothing, because they were late, repeated, forged
            or meant for another incarnation. A late `lease` of an open load does not count.
    """

    loads_started: int = 0
    loads_done: int = 0
    loads_failed: int = 0
    load_seconds: float = 0.0
    bytes_read: int = 0
    bytes_written: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    refusals_lost: int = 0
    messages_refused: int = 0


@attrs.frozen
class SessionStats:
    """Numbers of the things that a session holds.

    Once everything has ended and the session is closed, all numbers except the counters are zero.
    The counters do not take part in comparisons.

    Attributes:
        loads: Loads that still send or expect messages.
        steps: Steps that may still write.
        pushes: Pushes to readers that the ledger remembers, because the readers may send again.
        errands: Tickets that are kept, or whose refusal was not sent yet.
        held: Requests that are held for readers.
        remembered: Requests that the ledger still remembers.
        engines: Connected engines.
        leaving: Old engines whose connections still exist.
        sums: Checksums that readers wait for.
        counters: Sums since the session was opened.
    """

    loads: int = 0
    steps: int = 0
    pushes: int = 0
    errands: int = 0
    held: int = 0
    remembered: int = 0
    engines: int = 0
    leaving: int = 0
    sums: int = 0
    counters: Counters = attrs.field(factory=Counters, eq=False)
