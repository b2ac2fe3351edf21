"""One load, as its caller sees it.

Invariant: a load is done only after all data has arrived and its producers confirmed it. Its blocks
are reserved until it has ended, even if it has already failed. After that nothing writes them.

How it works:
    This is the life of a load. `kvspec.completion.states` has the table that drives it.

        state       in this state                                    leaves it when
        ----------  -----------------------------------------------  ---------------------------
        connecting  its reads are not queued yet; the producer of a  its reads are queued
                    ticket may still be connecting
        moving      data arrives; then checksums are compared;       all data has arrived, and
                    heartbeats keep the request held                 was compared if asked for
        asking      the producers are asked whether the data was     each producer rank that was
                    valid                                            read has answered `valid`
        done        the blocks may be used                           its `done` is answered
        draining    an error is known, but bytes may be in flight    no byte can move any more
        failed      the blocks may be reused                         its `done` is answered
        forgotten   the request id may be used again

    The first four states are the good case. A fault leads from any of the first three to
    *draining*, and from there to *failed*: an error, a deadline, a cancellation, or the end of the
    session. If nothing is in flight, as before the producer is connected, *draining* ends at once.
    In *draining* the load sends no heartbeats and has no deadline. It ends when NIXL has ended its
    reads. That a producer has ended is not enough: its last bytes may be on their way.

    From *asking* on, the load repeats its last messages, `done` to each producer rank, until all
    have answered. In *done* and *failed* it gives up after `patience` seconds. Until then the
    request id stays taken.

    A load that fails before its reads are queued sends none. If a ticket names the producer, the
    session declines the request once that producer is connected.

    These are states of the ledger. `Load.state` is "moving" in *connecting*, *moving*, *asking* and
    *draining*. `Load.open` is true in them.

    A load reads all data at once, so the producer must have written all of it. We had loads that
    read each layer as soon as it was written. No engine could use them: vLLM and SGLang know the
    blocks of a prompt only when they have computed it. SGLang holds each chunk instead, and a load
    of its own reads it.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Generator, Mapping
from functools import cached_property
from typing import Any, Literal, Self

import numpy as np
import numpy.typing as npt

from kvspec.analysis.explanation import slice_lines
from kvspec.completion.consumer import LoadPlan, Step
from kvspec.descriptors.complete import complete_blocks
from kvspec.descriptors.request import TransferRequest
from kvspec.errors import TransferError, TransferState
from kvspec.inputs import instance, seconds
from kvspec.ownership.parallel import RankId
from kvspec.session.background import SessionLock, closes_if_interrupted
from kvspec.session.checksums import Audit
from kvspec.session.remotes import Connection, RemoteEngine
from kvspec.session.transport import ReadInFlight
from kvspec.session.written import LoadBlocks, blocks_of
from kvspec.tickets.ticket import PrefillTicket
from kvspec.wire.messages import Key

LoadState = Literal["moving", "done", "failed"]
LOST = (TransferState.PEER_LOST, TransferState.STALE_PEER)
"""States after which a peer has to be connected again."""
VOID = "compute its `undefined_blocks`, or load the request again"
FIRST_REST, LAST_REST = 20e-6, 2e-3
"""Seconds between two polls of `wait`. Spinning would take the core from NIXL's threads."""
LAST_SLEEP = 1e-2
"""Longest sleep of an awaiting task between polls. It exceeds that of `wait`: tasks may be many."""


class Load:
    """A request that one consumer rank reads from its producer ranks. `Session.load` returns it.

    Call `poll` until the state is not "moving", or call `wait`. `complete_blocks` are the blocks
    that a prefix cache may contain, and `undefined_blocks` those whose contents a failed load has
    destroyed. `unwritten_ranges` are the bytes to set to zero before an engine reads whole blocks.

    Attributes:
        request: The request.
        remote_id: Name of the request, from `new_remote_id`.
        state: "moving", "done" or "failed".
        error: The first error, or None. It is set before the state becomes "failed". If a
            `SpecError`, `MismatchError` or `WireError` is the cause, it is the `__cause__`.
    """

    remote: RemoteEngine
    plan: LoadPlan  # The plan in the ledger, once the producer is connected.
    audit: Audit | None = None

    def __init__(
        self,
        request: TransferRequest,
        key: Key,
        producer: RemoteEngine | Connection,
        poll_session: Callable[[], None],
        lock: SessionLock,
        closed: Callable[[], bool],
        cancel: Callable[[Load], None],
        ticket: PrefillTicket | None = None,
        *,
        checksum: bool = False,
    ) -> None:
        self.request = instance("request", request, TransferRequest)
        self.key, self.remote_id = key, key.remote_id
        self.engine_id = producer.engine_id
        self.state: LoadState = "moving"
        self.error: TransferError | None = None
        self.checksum, self.ticket = checksum, ticket
        self.connection = producer if isinstance(producer, Connection) else None
        self.in_flight: dict[Step, ReadInFlight] = {}
        self.began = self.deadline = 0.0
        self.seconds = 0.0  # From the start to the end of a load that is done.
        self.written = False  # Whether any byte may have been written.
        self.nbytes = 0  # Bytes to read.
        self.bytes_moved = 0  # By reads that have ended.
        self._lock, self._poll_session, self._closed, self._cancel = (
            lock,
            poll_session,
            closed,
            cancel,
        )

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request.request_id!r}: {self.state}>"

    def __await__(self) -> Generator[Any, None, Self]:
        """Wait in an event loop until the state is "done". Return this object.

        The task polls the session and sleeps in turns, so no thread is needed. Cancelling the task
        does not cancel the load: call `cancel` for that. Raises as `wait`.
        """
        return self._ended().__await__()

    async def _ended(self) -> Self:
        rest = FIRST_REST
        while not self.wait(0.0):
            await asyncio.sleep(rest)
            rest = min(2 * rest, LAST_SLEEP)
        return self

    def poll(self) -> LoadState:
        """Make progress on the whole session, and return the state.

        A failure is not raised: it is in `error`. "done" and "failed" are final: no byte of this
        request moves any more. With an `error`, the state stays "moving" while bytes in flight may
        still be written.

        Raises:
            TransferError: With state "busy" if a signal handler or a callback calls it inside of
                another call of the session. With state "forked" in a forked process.
        """
        self._poll_session()
        return self.state

    @closes_if_interrupted
    def wait(self, timeout: float | None = None) -> bool:
        """Poll until the state is "done".

        Args:
            timeout: Seconds to wait at most, or None for no limit. The load itself goes on.

        Returns:
            Whether it is done. False if *timeout* seconds have passed before.

        Raises:
            SpecError: If *timeout* is no number of seconds.
            TransferError: The `error` if it failed. With state "closed" if the session was closed
                before.
        """
        longest = math.inf if timeout is None else seconds("timeout", timeout)
        end, rest = time.monotonic() + longest, FIRST_REST
        while self.open and self.poll() == "moving":
            if self._closed():
                why = "the session was closed before the end, so its blocks may be written"
                name = self.request.request_id
                raise TransferError(why, request=name, state=TransferState.CLOSED)
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(rest, left))
            rest = min(2 * rest, LAST_REST)
        if self.error is not None:
            raise self.error
        return True

    @property
    def open(self) -> bool:
        """Whether the load has not ended: its blocks may be written."""
        return self.state == "moving"

    @property
    def has_remote(self) -> bool:
        """Whether the load has begun: its producer was connected, and there is a `remote`."""
        return hasattr(self, "remote")

    def cancel(self) -> None:
        """Cancel the load. It fails as soon as nothing can write its blocks any more."""
        self._cancel(self)

    def fail(
        self,
        rank: RankId | None,
        why: str,
        state: TransferState,
        cause: BaseException | None = None,
    ) -> None:
        """Store the first error."""
        if self.error is None:
            moved = "" if rank is None else f". It moved from {rank}: {self._moved_from(rank)}"
            error = TransferError(
                f"{why}{moved}{self._advice}",
                rank=self.engine_id if rank is None else f"{self.engine_id} {rank}",
                request=self.request.request_id,
                state=state,
            )
            error.__cause__ = cause
            self.error = error

    def _moved_from(self, rank: RankId) -> str:
        """Describe what moves between this rank and another: groups, layers, units, tokens."""
        table = self.remote.tables[rank]
        parts: list[str] = []
        for edge in table.plan.between(table.producer.rank, table.consumer.rank):
            wanted = self.request.wanted(edge.group, table.plan.consumer.group(edge.group).spec)
            layers = f"layers {edge.layers[0]} to {edge.layers[-1]}"
            tokens = f"tokens {wanted.start}..{wanted.stop - 1}"
            parts.append(f"group {edge.group}, {layers}, {', '.join(slice_lines(edge))}, {tokens}")
        return "; ".join(parts)

    @property
    def moves(self) -> bool:
        """Whether data of this load is still to come: it has begun, and has not failed."""
        return self.has_remote and self.open and self.error is None

    @property
    def progress(self) -> tuple[int, int]:
        """Bytes that have arrived, and bytes in all. (0, 0) until the producer is connected."""
        moved = self.bytes_moved + sum(read.arrived for read in tuple(self.in_flight.values()))
        return min(moved, self.nbytes), self.nbytes

    @property
    def _touched(self) -> bool:
        """Whether any byte may have been written by now."""
        in_flight = tuple(self.in_flight.values())  # At once: another thread may end some of them.
        return self.written or any(read.begun for read in in_flight)

    @property
    def _advice(self) -> str:
        """The end of the message of an error: the blocks to compute again, if there are any."""
        return f"; {VOID}" if self._touched else ""

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the consumer's blocks whose contents are undefined, because the load failed.

        It is empty if the load is done, or failed before any byte moved: then the blocks contain
        what they contained before. No token of a load that failed counts as loaded.
        """
        return {} if self.error is None else self.written_blocks

    @property
    def written_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the consumer's blocks that may have changed. A `RankAgreement` needs them."""
        if not self._touched:
            return {}
        return {group: tuple(sorted({*ids.tolist()})) for group, ids in self.blocks.items()}

    @cached_property
    def blocks(self) -> LoadBlocks:
        """By group, the consumer's blocks that the load writes."""
        return blocks_of(self.remote.plan, self.request)

    @property
    def complete_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the consumer's blocks that a prefix cache may contain, once the load is done.

        In each of them every token was moved, or was cached before. A block in which a window
        begins, or the last block of a prompt, may have tokens that never moved. The blocks are the
        same on all ranks of the engine, and valid when the loads of all ranks are done.
        """
        if self.state != "done" or not self.has_remote:
            return {}
        found = complete_blocks(self.remote.plan, self.request)
        return {group: tuple(ids.tolist()) for group, ids in found.items()}

    @property
    def unwritten_ranges(self) -> npt.NDArray[np.uint64]:
        """Bytes of the consumer's blocks that the load does not write.

        An engine that reads whole blocks must set them to zero.

        Returns:
            A uint64 array of shape (ranges, 2): address and length in bytes. Empty if the load
            failed before its producer was connected.
        """
        tables: Mapping[RankId, Any] = self.remote.tables if self.has_remote else {}
        left = [table.unwritten_ranges(self.request) for table in tables.values()]
        return np.concatenate([np.empty((0, 2), np.uint64), *left])
