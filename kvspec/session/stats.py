"""Numbers of the things that a session holds, and of those that it has done."""

from __future__ import annotations

from bisect import bisect_left

import attrs

from kvspec.errors import TransferState

SECONDS = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Upper bounds of the histogram of load times."""


def _by_state(counts: dict[TransferState, int]) -> dict[TransferState, int]:
    """Return a copy with all states. It never grows, so any thread may read it at any time."""
    return dict.fromkeys(TransferState, 0) | counts


@attrs.define(eq=False)
class Counters:
    """Sums since the session was opened. They never decrease.

    One thread at a time changes them, under the lock of the session. Others may read them at any
    time without a lock.

    Attributes:
        loads_started: Loads that were begun.
        loads_done: Loads that are done.
        loads_failed: Loads that have failed.
        failed_by_state: The failed loads by the state of their errors. It contains all states.
        load_seconds: Seconds from the call of `load` to the end, over all loads that are done. The
            mean is `load_seconds / loads_done`.
        seconds_histogram: Number of loads that are done, by their times: one number for each bound
            in `SECONDS`, and one for longer loads.
        bytes_read: Bytes that reads of this rank have moved.
        descriptors_read: Descriptors of these reads, before NIXL merges neighbours.
        holds_started: Requests that were held.
        holds_done: Held requests that all readers have read, cancelled or declined.
        holds_expired: Held requests whose lease ended first.
        holds_aborted: Held requests that were aborted.
        declines: Requests that this rank has declined, as a consumer.
        messages_sent: Messages that were passed to the channel, which may lose them.
        messages_received: Messages that were received with a right seal.
        declines_lost: Declined tickets whose producer could not be reached.
        messages_refused: Messages that changed nothing, because they were late, repeated, forged
            or meant for another incarnation. A late `lease` of an open load does not count.
    """

    loads_started: int = 0
    loads_done: int = 0
    loads_failed: int = 0
    failed_by_state: dict[TransferState, int] = attrs.field(factory=dict, converter=_by_state)
    load_seconds: float = 0.0
    # The converters copy, so that `attrs.evolve` returns counters that do not change any more.
    seconds_histogram: list[int] = attrs.field(
        factory=lambda: [0] * (len(SECONDS) + 1), converter=list
    )
    bytes_read: int = 0
    descriptors_read: int = 0
    holds_started: int = 0
    holds_done: int = 0
    holds_expired: int = 0
    holds_aborted: int = 0
    declines: int = 0
    messages_sent: int = 0
    messages_received: int = 0
    declines_lost: int = 0
    messages_refused: int = 0

    def count_done(self, seconds: float) -> None:
        """Count a load that is done after *seconds*."""
        self.loads_done += 1
        self.load_seconds += seconds
        self.seconds_histogram[bisect_left(SECONDS, seconds)] += 1

    def count_failed(self, state: TransferState) -> None:
        """Count a load that has failed with an error of *state*."""
        self.loads_failed += 1
        self.failed_by_state[state] += 1


@attrs.frozen
class SessionStats:
    """Numbers of the things that a session holds.

    Once everything has ended and the session is closed, all numbers except the counters are zero.
    The counters do not take part in comparisons.

    Attributes:
        loads: Loads that still send or expect messages. `close` does not wait for the last answers.
        steps: Steps that may still write.
        errands: Tickets that are kept, or whose refusal was not sent yet.
        held: Requests that are held for readers.
        held_blocks: Blocks of these requests, if `hold` was called with `blocks`.
        remembered: Requests that the ledger still remembers.
        engines: Connected engines.
        disconnecting: Old engines whose connections still exist.
        sums: Checksums that readers wait for.
        counters: Sums since the session was opened.
    """

    loads: int = 0
    steps: int = 0
    errands: int = 0
    held: int = 0
    held_blocks: int = 0
    remembered: int = 0
    engines: int = 0
    disconnecting: int = 0
    sums: int = 0
    counters: Counters = attrs.field(factory=Counters, eq=False)
