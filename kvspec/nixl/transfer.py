"""One read or write in flight: posted in pieces, polled, ended exactly once.

A handle is released only when no byte of it can move any more, because release is not an abort:
whatever is in flight when a transfer fails stays in quarantine until it ends or the agent is gone.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import MutableSet
from typing import Literal

import attrs

from kvspec.errors import SpecError, TransferError
from kvspec.inputs import instance, seconds
from kvspec.nixl.agent import Agent, Subject
from kvspec.nixl.errors import STATES
from kvspec.nixl.merging import Pairing, checked_ids, pair
from kvspec.nixl.notifications import FIRST_WAIT, LAST_WAIT
from kvspec.nixl.rows import StridedRows

IN_FLIGHT = 16  # handles posted at once, so that a list of any length makes few


class Prepared:
    """A list of descriptors that nixl has checked, of this rank (*peer* None) or of a *peer*.

    *total* ids; id *i* of row *r* lies at `address[r] + (i - first id of r) * stride[r]`.
    """

    def __init__(
        self,
        agent: Agent,
        rows: StridedRows,
        memory_type: str,
        peer: str | None,
        handle: int | None,
    ) -> None:
        self.rows = rows
        self.memory_type = memory_type
        self.peer = peer
        self._agent = agent
        self._handle = handle  # None where there is no row
        self.released = False  # once True, nixl has the list no more

    def __repr__(self) -> str:
        side = "local" if self.peer is None else f"peer={self.peer!r}"
        return f"<Prepared {side} {len(self.rows.table)} rows, {self.total} ids>"

    @property
    def total(self) -> int:
        """Number of ids."""
        return self.rows.total

    def handle(self, agent: Agent) -> int:
        """Return nixl's handle, for *agent*, which must be the one that prepared the list."""
        if agent is not self._agent:
            message = f"the list of {self._agent.name!r} was given to {agent.name!r}"
            raise TransferError(message, rank=agent.name, state="bug")
        if self.released:
            raise TransferError(
                f"{self!r} was released: {STATES['closed']}", rank=self.peer, state="closed"
            )
        return self._handle or 0

    def release(self) -> None:
        """Give the list back; transfers that were posted from it go on. Twice is once."""
        with self._agent.locked():
            known, self.released = not self.released, True  # first: an interrupt may come between
            if known and self._handle is not None:
                self._agent.release_list(self._handle)


@attrs.frozen(kw_only=True)
class Order:
    """What was asked for: *operation* "READ" or "WRITE" of *pairs*, within *timeout* seconds."""

    operation: Literal["READ", "WRITE"]
    local: Prepared
    remote: Prepared
    pairs: Pairing = attrs.field(repr=False)
    request: str
    timeout: float

    @property
    def subject(self) -> Subject:
        """Peer and request, for errors."""
        return self.remote.peer or "", self.request

    def make(self, agent: Agent, piece: slice) -> int:
        """Return nixl's handle for one of the pairs' pieces."""
        handles = self.local.handle(agent), self.remote.handle(agent)  # refuses released lists
        pairs = self.pairs
        if pairs.joined is not None:
            local = self.local.memory_type, pairs.joined.local[piece]
            remote = self.remote.memory_type, pairs.joined.remote[piece]
            return agent.make_plain(self.operation, local, remote, self.subject)
        sides = (handles[0], pairs.local_ids[piece]), (handles[1], pairs.remote_ids[piece])
        return agent.make(self.operation, *sides, self.subject)


def order_of(
    agent: Agent,
    operation: Literal["READ", "WRITE"],
    local: tuple[Prepared, object],
    remote: tuple[Prepared, object],
    *,
    request: object,
    timeout: float,
) -> Order:
    """Return the checked order to move (list, ids) pairs; nothing is posted yet."""
    _check_side("local", local[0], agent)
    _check_side("remote", remote[0], agent)
    pairs = pair(
        local[0].rows,
        checked_ids("local_ids", local[1], local[0].total),
        remote[0].rows,
        checked_ids("remote_ids", remote[1], remote[0].total),
        "local" if operation == "READ" else "remote",
    )
    return Order(
        operation=operation,
        local=local[0],
        remote=remote[0],
        pairs=pairs,
        request=instance("request", request, str),
        timeout=seconds("timeout", timeout),
    )


def _check_side(side: str, prepared: object, agent: Agent) -> None:
    if not isinstance(prepared, Prepared) or (prepared.peer is None) != (side == "local"):
        raise SpecError(side, prepared, f"a list prepared for the {side} side")
    prepared.handle(agent)


class Transfer:
    """A read or write under way. `poll` or `wait` until it is "DONE"; both raise if it fails.

    *request*, *peer*, *descriptors* (pairs of ids), *runs* (what merging should leave of them),
    *nbytes*, *handles* (pieces posted so far) and, if the rank captures telemetry, *posted*: the
    descriptors that nixl did post.
    """

    def __init__(self, agent: Agent, registry: MutableSet[Transfer], order: Order) -> None:
        self.request = order.request
        self.peer = order.remote.peer or ""
        self.descriptors = len(order.pairs.local_ids)
        self.runs = order.pairs.runs
        self.nbytes = order.pairs.nbytes
        self.handles = 0
        self.posted: int | None = 0 if agent.telemetry else None
        self._agent = agent
        self._registry = registry
        self._order = order
        self._deadline = time.monotonic() + order.timeout
        self._pending = deque(order.pairs.pieces)
        self._in_flight: list[int] = []
        self._error: TransferError | None = None
        self._settled = 0

    def __repr__(self) -> str:
        what = f"{self._order.operation} {self.request!r} with {self.peer!r}"
        return f"<Transfer {what}: {self.state}, {self.live_handles} in flight>"

    @property
    def state(self) -> str:
        """Return "PROC", "DONE", or the state of the error that ended it."""
        if self._error is not None:
            return self._error.state or "bug"
        return "PROC" if self._in_flight or self._pending else "DONE"

    @property
    def live_handles(self) -> int:
        """Handles that are in flight; of a failed transfer: in quarantine."""
        return len(self._in_flight)

    def start(self) -> None:
        """Post the first piece. An error is kept for `poll`, so that callers see errors once."""
        self._registry.add(self)
        try:
            self._advance()
        except TransferError:
            if self._error is None:
                raise

    def poll(self) -> str:
        """Return "PROC" or "DONE" without waiting; raise `TransferError` if it failed or is late.

        Posts at most one piece that the transport copies at once (about 13 ms, or 64 MiB).
        """
        with self._agent.locked():
            if self.state != "PROC" and not self._in_flight:
                self._registry.discard(self)
            if self._error is not None:
                failed = self._error
                raise TransferError(
                    failed.message, rank=failed.rank, request=failed.request, state=failed.state
                ) from failed
            if self.state == "PROC":
                self._advance()
            return self.state

    def wait(self) -> None:
        """Poll, resting 20 us to 2 ms in between, until done; raise `TransferError` otherwise."""
        rest, settled = FIRST_WAIT, self._settled
        while self.poll() == "PROC":
            if self._settled != settled:
                rest, settled = FIRST_WAIT, self._settled
                continue
            time.sleep(max(0.0, min(rest, self._deadline - time.monotonic())))
            rest = min(2 * rest, LAST_WAIT)

    def reap(self) -> bool:
        """Release the handles that ended; return whether none is left."""
        with self._agent.locked():
            for handle in tuple(self._in_flight):
                if self._agent.terminal(handle):
                    self._let_go(handle)
            if not self._in_flight and not self._pending:
                self._registry.discard(self)
        return not self._in_flight

    def stop(self) -> bool:
        """Post no more, and return whether nothing is in flight."""
        if self.state == "PROC":
            message = f"the rank was closed first: {STATES['closed']}"
            self._error = TransferError(
                message, rank=self.peer, request=self.request, state="closed"
            )
        self._pending.clear()
        return self.reap()

    def abandon(self) -> None:
        """Release what is in flight: the caller must destroy the agent next, to stop the data."""
        while self._in_flight:
            with contextlib.suppress(TransferError):
                self._let_go(self._in_flight[-1])
        self._registry.discard(self)

    def _advance(self) -> None:
        try:
            for handle in tuple(self._in_flight):
                if self._agent.check(handle, self._order.subject):
                    self._settle(handle)
            if self.state == "PROC" and time.monotonic() >= self._deadline:
                raise self._late()
            self._post()
        except TransferError as error:
            self._pending.clear()
            self._error = error
            self.reap()
            raise
        if self.state == "DONE":
            self._registry.discard(self)

    def _post(self) -> None:
        order, agent = self._order, self._agent
        while self._pending and len(self._in_flight) < IN_FLIGHT:
            piece = self._pending[0]
            handle = order.make(agent, piece)
            self._in_flight.append(handle)
            self._pending.popleft()
            self.handles += 1
            if agent.post(handle, order.subject):
                self._settle(handle)
                return

    def _settle(self, handle: int) -> None:
        if self.posted is not None:
            self.posted += self._agent.posted(handle)
        self._let_go(handle)

    def _let_go(self, handle: int) -> None:
        self._in_flight.remove(handle)  # first: nixl crashes on a freed handle, should an
        self._settled += 1  # interrupt come between; one that is never freed waits for `close`
        self._agent.release(handle)

    def _late(self) -> TransferError:
        done, pieces = self._settled, len(self._order.pairs.pieces)
        rest = "nothing is in flight"
        if self.live_handles:
            rest = (
                f"{self.live_handles} stay in flight, in quarantine: no block of either side may be"
                " used again until reap() returns this transfer or the rank is closed"
            )
        return TransferError(
            f"not done after {self._order.timeout} s: {done} of {pieces} pieces are; {rest}",
            rank=self.peer,
            request=self.request,
            state="timeout",
        )
