"""One read or write in flight: it is posted in batches, polled, and ends once.

Invariant: a handle is released only when no byte of it can move any more, because a release does
not stop NIXL. If a transfer fails, its handles in flight stay in quarantine until they end or the
agent is destroyed.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from typing import Literal

from kvspec.errors import TransferError, TransferState
from kvspec.nixl.agent import Agent
from kvspec.nixl.notifications import FIRST_WAIT, LAST_WAIT
from kvspec.nixl.ranges import Batch
from kvspec.nixl.transfer_spec import TransferSpec

IN_FLIGHT = 16  # handles posted at once, so that a list of any length makes few
TURN = 0.01  # seconds after which a poll of what is staged ends: its batches are short


class Transfer:
    """A read or write in progress. Call `poll` or `wait` until it is "DONE".

    Attributes:
        request: Name of the request, as passed by the caller.
        peer: Name of the peer.
        descriptors: Number of pairs of ids.
        nbytes: Bytes to move.
        handles: Number of batches posted so far.
        posted: Number of descriptors that NIXL posted after merging, if the rank captures
            telemetry.
        error: The `TransferError` if the transfer failed, else None.
        staged: Whether the transfer moves through the staging buffer.
    """

    def __init__(self, agent: Agent, spec: TransferSpec) -> None:
        self.spec = spec
        self.request = spec.request
        self.peer = spec.remote.peer or ""
        self.descriptors = len(spec.pairs.local_ids)
        self.staged = spec.stage is not None
        self.buffer = None if spec.stage is None else spec.stage.buffer
        self.ticket: int | None = None  # its place in the line for a slot of the buffer
        self.nbytes = spec.pairs.nbytes
        self.handles = 0
        self.posted: int | None = 0 if agent.telemetry else None
        self.error: TransferError | None = None
        self.delivered = False  # whether somebody knows how it ended
        self._freed = False  # whether somebody knows that quarantine ended
        self._agent = agent
        self._deadline = time.monotonic() + spec.timeout
        self._pending: deque[slice | Batch] = deque(spec.batches)
        self._in_flight: dict[int, tuple[slice | Batch, int]] = {}  # handles: what, and its slot
        self._turn = 0.0  # when it has moved on enough for one step
        self._settled = 0

    def __repr__(self) -> str:
        what = f"{self.spec.operation} {self.request!r} with {self.peer!r}"
        return f"<Transfer {what}: {self.state}, {self.live_handles} in flight>"

    @property
    def state(self) -> str:
        """Return "PROC", "DONE", or the state of the error that ended the transfer."""
        if self.error is not None:
            return self.error.state
        return "PROC" if self._in_flight or self._pending else "DONE"

    @property
    def runs(self) -> int:
        """Number of descriptors expected after merging. If staged, number of ranges of the peer."""
        return self.spec.pairs.runs if self.spec.stage is None else self.spec.stage.ranges.ranges

    @property
    def live_handles(self) -> int:
        """Number of handles in flight. If the transfer failed, these are in quarantine."""
        return len(self._in_flight)

    @property
    def slots_held(self) -> tuple[int, ...]:
        """Slots of the staging buffer that this transfer uses until its handles are over."""
        return tuple(slot for _, slot in self._in_flight.values()) if self.staged else ()

    @property
    def over(self) -> bool:
        """Whether no byte of the transfer can move any more."""
        return not self._in_flight and self.state != "PROC"

    def poll(self) -> str:
        """Return "PROC" or "DONE" without waiting.

        Posts the next batches. If the transport copies while it posts, a call posts one batch
        (about 13 ms, or 64 MiB). A staged transfer posts batches for up to 10 ms.

        Raises:
            TransferError: If the transfer failed, or its deadline is over.
        """
        with self._agent.locked():
            self.step()
            if self.buffer is not None and self.ticket is not None and self.state == "PROC":
                self.buffer.poll_others(self)
            self.delivered = self.delivered or self.state != "PROC"
            if self.error is not None:
                error = self.error
                raise TransferError(
                    error.message, rank=error.rank, request=error.request, state=error.state
                ) from error
            return self.state

    def wait(self) -> None:
        """Poll until the transfer is done, with pauses of 20 us to 2 ms.

        Raises:
            TransferError: If the transfer failed, or its deadline is over.
        """
        rest, settled = FIRST_WAIT, self._settled
        with self._agent.waiting():
            while self.poll() == "PROC":
                if self._settled != settled:
                    rest, settled = 0.0 if self.staged else FIRST_WAIT, self._settled
                time.sleep(max(0.0, min(rest, self._deadline - time.monotonic())))
                rest = min(max(2 * rest, FIRST_WAIT), LAST_WAIT)

    def step(self) -> bool:
        """Release finished handles, post more, and keep an error. Return whether a handle ended.

        Checks the deadline. After a failure, handles are released as soon as they end.
        """
        if self.state != "PROC":
            return self.reap()
        settled, self._turn = self._settled, time.monotonic() + TURN
        try:
            for handle in tuple(self._in_flight):
                if self._agent.check(handle, self.spec.subject):
                    self._settle(handle)
                    if self.staged and time.monotonic() >= self._turn:
                        break
            if self.state == "PROC" and time.monotonic() >= self._deadline:
                raise self._late()
            self._post()
        except TransferError as error:
            self.error, self.ticket = error, None  # first: nothing pending, and no error, is done
            self._pending.clear()
            self._freed = self.reap()
        return self._settled != settled

    def reap(self) -> bool:
        """Release the handles that ended. Return whether none is left."""
        with self._agent.locked():
            for handle in tuple(self._in_flight):
                if self._agent.terminal(handle):
                    self._let_go(handle)
        return not self._in_flight

    def pending_event(self) -> Literal["done", "failed", "freed"] | None:
        """Return the next event to report: "done" or "failed", then "freed" after quarantine."""
        if not self.delivered and self.state != "PROC":
            return "done" if self.error is None else "failed"
        return "freed" if self.quarantined and self.reap() else None

    def deliver(self, kind: str) -> None:
        """Record that the event *kind* was reported."""
        self.delivered = True
        self._freed = self._freed or kind == "freed"

    def free(self) -> bool:
        """Return True once, when quarantine ended: all blocks of the transfer can be used again."""
        if not self.quarantined or not self.reap():
            return False
        self.deliver("freed")
        return True

    @property
    def quarantined(self) -> bool:
        """Whether the transfer failed in flight, and its end was not reported yet."""
        return self.error is not None and not self._freed

    @property
    def reapable(self) -> bool:
        """Whether the transfer is over, and that was reported."""
        return self.over and self.delivered and not self.quarantined

    def stop(
        self,
        why: str = "the rank was closed first",
        state: TransferState = TransferState.CLOSED,
    ) -> bool:
        """Post nothing more, and fail with *why*. Return whether nothing is in flight."""
        with self._agent.locked():
            if self.state == "PROC":
                told = f"{why}: {state.advice}"
                self.error = TransferError(told, rank=self.peer, request=self.request, state=state)
            self._pending.clear()
            self.ticket = None
            return self.reap()

    def abandon(self) -> None:
        """Release handles in flight. The caller must destroy the agent next to stop their bytes."""
        while self._in_flight:
            with contextlib.suppress(TransferError):
                self._let_go(next(reversed(self._in_flight)))

    def _post(self) -> None:
        spec, agent = self.spec, self._agent
        while self._pending and len(self._in_flight) < IN_FLIGHT:
            batch, slot = self._pending[0], 0
            if self.buffer is not None:
                free = self.buffer.free_slot(self.ticket)
                if free is None:
                    self.ticket = self.buffer.ticket() if self.ticket is None else self.ticket
                    return
                slot, self.ticket = free, None
            handle = spec.make(agent, batch, slot)
            self._in_flight[handle] = batch, slot
            self._pending.popleft()
            self.handles += 1
            if agent.post(handle, spec.subject):
                self._settle(handle)
                if not self.staged or time.monotonic() >= self._turn:
                    return

    def _settle(self, handle: int) -> None:
        batch, slot = self._in_flight[handle]
        if self.spec.stage is not None and not isinstance(batch, slice):
            self.spec.stage.land(batch, slot)  # first: if it is interrupted, it is done again
        if self.posted is not None:
            self.posted += self._agent.posted(handle)
        self._let_go(handle)

    def _let_go(self, handle: int) -> None:
        del self._in_flight[handle]  # first: nixl crashes on a freed handle, should an
        self._settled += 1  # interrupt come between; one that is never freed waits for `close`
        self._agent.release(handle)

    def _late(self) -> TransferError:
        done, batches = self._settled, len(self.spec.batches)
        rest = "nothing is in flight"
        if self.live_handles:
            rest = (
                f"{self.live_handles} stay in flight, in quarantine: no block of either side may be"
                " used again until reap() returns this transfer or the rank is closed"
            )
        return TransferError(
            f"{done} of {batches} batches were done after {self.spec.timeout} s; {rest}",
            rank=self.peer,
            request=self.request,
            state=TransferState.TIMEOUT,
        )
