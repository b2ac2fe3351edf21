"""Reads and writes in flight: they are posted in batches, polled, and end once.

Invariant: a handle is released only when no byte of it can move any more, because a release does
not stop NIXL. If a transfer fails, its handles in flight stay in quarantine until they end or the
agent is destroyed. No transfer is lost, even if the caller drops its object. While bytes of a
transfer can move, no other transfer of the same rank reads or writes the bytes that it writes. That
includes quarantine. Transfers of other ranks and of peers are not checked.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import threading
import time
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import TypeAlias, TypeVar, cast

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance, seconds
from kvspec.memory.busy import BusyRanges, united
from kvspec.nixl.agent import Agent, check_unreleased
from kvspec.nixl.file_memory import FILE_HANDLES
from kvspec.nixl.merging import Operation, Plain, PreparedSides, checked_pairs
from kvspec.nixl.staging.choosing import Buffers
from kvspec.nixl.staging.learning import Lesson
from kvspec.nixl.staging.ranges import Batch
from kvspec.nixl.staging.stage import StagedRanges, StagingBuffer, free_slot, in_line
from kvspec.ownership.tokens import Ints

IN_FLIGHT = 16  # Handles that one transfer has posted at once. A list of any length makes few.
STAGED_TURN = 0.01  # Seconds after which a poll of a staged transfer ends. Its batches are short.
# Seconds between two polls. Spinning is slower, because it takes the core from NIXL's threads.
FIRST_WAIT, LAST_WAIT = 20e-6, 2e-3

K = TypeVar("K", bound=Hashable)
TransferRef: TypeAlias = "weakref.ref[Transfer]"  # It does not keep the transfer alive.
Claimed = tuple[tuple[str, str], Ints, Ints]  # A place, and the starts and ends of ranges.


class Transfer:
    """A read or write in progress. Call `poll` or `wait` until it is "DONE".

    Attributes:
        operation: "READ" or "WRITE".
        local: List of this rank.
        remote: List of the peer.
        peer: Name of the peer.
        request: Name of the request, as passed by the caller.
        key: The caller's key of the transfer, or None for a single `read` or `write`.
        pairs: The pairs of ids.
        stage: How the transfer uses the staging buffer, or None.
        descriptors: Number of pairs of ids and of ends.
        nbytes: Bytes to move.
        handles: Number of batches posted so far.
        error: The `TransferError` if the transfer failed, else None.
        started: Whether its bytes may move. False for a result of `pair` until `move`.
    """

    handles = 0
    error: TransferError | None = None
    started = False
    queue_number: int | None = None  # Its place in the line for a slot of the buffer.
    stage: StagedRanges | None = None
    _deadline = math.inf  # The first step sets it, since reading the clock takes 0.4 us.
    _settled = 0
    _lesson: Lesson | None = None

    def __init__(
        self,
        transfers: InFlightTransfers,
        operation: Operation,
        sides: PreparedSides,
        request: str,
        timeout: float,
        key: object = None,
    ) -> None:
        """Check the transfer of *sides*, staged if that is faster. Nothing is posted yet."""
        self._all, self._agent = transfers, transfers.agent
        self.operation, self.request, self.timeout, self.key = operation, request, timeout, key
        self.pairs = pairs = checked_pairs(self._agent, operation, sides)
        self.local, _, self.remote, _ = sides
        self.peer = self.remote.peer or ""
        self._subject = self.peer, request
        self.descriptors, self.nbytes = len(sides[1]), pairs.nbytes
        self.batches: Sequence[slice | Plain | Batch] = pairs.batches
        if transfers.buffers is not None:
            lists = self.local, self.remote
            choose = transfers.buffers.choose
            self.stage, self._lesson = choose(pairs, *lists, inward=operation == "READ")
            if self.stage is not None:
                self.batches = self.stage.batches
        self._pending = [*self.batches[::-1]]  # The next one is the last.
        self._in_flight: dict[
            int, tuple[slice | Plain | Batch, int]
        ] = {}  # Batch and slot of each handle.

    def __repr__(self) -> str:
        name = f"{self.operation} {self.request!r} with {self.peer!r}"
        return f"<Transfer {name}: {self.state}, {self.live_handles} in flight>"

    @property
    def state(self) -> str:
        """Return "PROC", "DONE", or the state of the error that ended the transfer."""
        if self.error is not None:
            return self.error.state
        return "PROC" if self._in_flight or self._pending else "DONE"

    @property
    def staged(self) -> bool:
        """Whether the transfer moves through the staging buffer."""
        return self.stage is not None

    @property
    def runs(self) -> int:
        """Number of descriptors expected after merging. If staged, number of ranges of the peer."""
        return self.pairs.runs if self.stage is None else self.stage.ranges

    @property
    def large(self) -> bool:
        """Whether it has several batches."""
        return len(self.batches) > 1

    @property
    def begun(self) -> bool:
        """Whether bytes may have moved: a batch was posted."""
        return self.handles > 0

    @property
    def arrived(self) -> int:
        """About how many bytes have arrived: the batches have about the same size."""
        return self.nbytes * self._settled // len(self.batches) if self.batches else 0

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
        return not self._in_flight and (self.error is not None or not self._pending)

    def poll(self, turn: float | None = None) -> str:
        """Return "PROC" or "DONE" without waiting.

        Posts the next batches. After a failure, a call releases the handles in quarantine that
        ended. A staged transfer that waits for a slot also polls the others of its buffer.

        Args:
            turn: A call posts until 16 handles are in flight. After a post that finished at once,
                it stops if *turn* seconds are over. One post takes up to 3 ms. The default is 10
                ms for a staged transfer. Else it is 0: the call stops after the first such post.

        Raises:
            SpecError: If `pair` returned the transfer, and `move` has not started it.
            TransferError: If the transfer failed, or its deadline is over.
        """
        with self._agent.lock:
            if not self.over:  # A transfer that has ended stays as it is when the rank is closed.
                self._agent.check_open()
            if not self.started:  # Its bytes are not busy, so none may move.
                raise SpecError("transfer", self, "a transfer that `move` has started")
            self.make_progress(turn)
            if self.queue_number is not None and self.stage is not None and self.state == "PROC":
                self._all.poll_others(self, self.stage.buffer)
            if self.error is not None:
                error = self.error
                raise TransferError(
                    error.message, rank=error.rank, request=error.request, state=error.state
                ) from error
            return self.state

    def wait(self) -> None:
        """Poll until the transfer is done, with pauses of 20 us to 2 ms. Raises as `poll`."""
        rest, settled = FIRST_WAIT, self._settled
        while self.poll() == "PROC":
            if self._settled != settled:
                rest, settled = 0.0 if self.staged else FIRST_WAIT, self._settled
            time.sleep(max(0.0, min(rest, self._deadline - time.monotonic())))
            rest = min(max(2 * rest, FIRST_WAIT), LAST_WAIT)

    def make_progress(self, turn: float | None = None) -> bool:
        """Release finished handles, post more, and keep an error. Check the deadline.

        After a failure, handles are only released, as soon as they end.

        Returns:
            Whether a slot of the staging buffer may have become free: a handle ended, or a transfer
            that failed or is done has none left.
        """
        if self.error is not None or not (self._in_flight or self._pending):
            return not self._in_flight or self.reap()
        if (lesson := self._lesson) is None:
            return self._move(turn)
        ended = lesson.take(lambda: self._move(turn), lambda: bool(self._in_flight))
        if self.state == "DONE" and self._all.buffers is not None:
            self._all.buffers.learner.add(lesson)
        if (
            self.state != "PROC" or self.queue_number is not None
        ):  # Waiting for a slot teaches nothing.
            self._lesson = None
        return ended

    def _move(self, turn: float | None) -> bool:
        """Do the work of `make_progress` for a transfer that has not ended."""
        settled, now = self._settled, time.monotonic()
        if self._deadline == math.inf:
            self._deadline = now + self.timeout
        if turn is None:
            turn = STAGED_TURN if self.stage is not None else 0.0
        try:
            for handle in tuple(self._in_flight):
                if self._agent.advance(handle, "check", self._subject):
                    self._settle(handle)
                    if self.stage is not None and time.monotonic() >= now + turn:
                        break
            if now >= self._deadline and (self._in_flight or self._pending):
                raise self._timed_out()
            self._post(now, turn)
        except TransferError as error:
            self._fail(error)
        return self._settled != settled

    def reap(self) -> bool:
        """Release the handles that ended. Return whether none is left."""
        for handle in tuple(self._in_flight):
            if self._agent.terminal(handle):
                with contextlib.suppress(TransferError):  # Then it goes with the agent.
                    self._let_go(handle)
        return not self._in_flight

    def _fail(self, error: TransferError) -> None:
        """Post nothing more, and release the handles that ended."""
        # Set the error first: a transfer with nothing pending and no error counts as done.
        self.error, self.queue_number = error, None
        self._pending.clear()
        self.reap()

    def cancel(self, why: str, state: TransferState) -> bool:
        """Post nothing more, and fail with *why*. Return whether nothing is in flight."""
        with self._agent.lock:
            if self.state == "PROC":
                self._fail(self._failed(f"{why}: {state.advice}", state))
            return self.reap()

    def release_now(self) -> None:
        """Release handles in flight. The caller must destroy the agent next to stop their bytes."""
        while self._in_flight:
            with contextlib.suppress(TransferError):
                self._let_go(next(reversed(self._in_flight)))

    def of(self, transfers: InFlightTransfers) -> bool:
        """Return whether the transfer belongs to the rank of *transfers*."""
        return self._all is transfers

    def renew(self, key: object, request: str, timeout: float) -> None:
        """Take over what `move` was called with. The transfer was paired before."""
        self.key, self.request, self.timeout = key, request, timeout
        self._subject = self.peer, request
        self._deadline = time.monotonic() + timeout

    def make(self, batch: slice | Plain | Batch, slot: int = 0) -> int:
        """Return NIXL's handle for one batch. A staged batch uses *slot* of the buffer."""
        local, remote, pairs = self.local, self.remote, self.pairs
        if local.released or remote.released:  # Later batches are made after `move`.
            check_unreleased(local, remote)
        if self.stage is not None:
            # A staging buffer has the memory type and the device of the local list.
            moved_runs = self.stage.moved_runs(cast("Batch", batch), slot)
            batch = Plain(moved_runs, local.rows.device, remote.rows.device)
        if not isinstance(batch, Plain):
            ids = pairs.local_ids, pairs.remote_ids
            if len(self.batches) > 1 and isinstance(batch, slice):
                ids = ids[0][batch], ids[1][batch]
            lists = (local.handle, ids[0]), (remote.handle, ids[1])
            return self._agent.make(self.operation, *lists, self._subject)
        moved_runs, *devices = batch
        near = local.memory_type, devices[0], moved_runs.local
        far = remote.memory_type, devices[1], moved_runs.remote
        return self._agent.make_plain(self.operation, moved_runs.nbytes, near, far, self._subject)

    def _post(self, now: float, turn: float) -> None:
        """Post batches. Stop *turn* seconds after *now* if a batch ends at once."""
        while self._pending and len(self._in_flight) < IN_FLIGHT:
            if self.remote.memory_type == "FILE" and self._all.file_handles >= FILE_HANDLES:
                return
            batch, slot = self._pending[-1], 0
            if self.stage is not None:
                free = free_slot(self.stage.buffer, self._all, self.queue_number)
                if free is None:
                    if self.queue_number is None:
                        self.queue_number = next(self._all.queue_numbers)
                    return
                slot, self.queue_number = free, None
            handle = self.make(batch, slot)
            self._in_flight[handle] = batch, slot
            self._pending.pop()
            self.handles += 1
            if self._agent.advance(handle, "post", self._subject):
                self._settle(handle)
                if not turn or time.monotonic() >= now + turn:
                    return

    def _settle(self, handle: int) -> None:
        if self.stage is not None:
            # Copy first: if an interrupt comes before the release, the copy is repeated.
            batch, slot = self._in_flight[handle]
            self.stage.land(cast("Batch", batch), slot)
        self._let_go(handle)

    def _let_go(self, handle: int) -> None:
        # Forget the handle first, since an interrupt may come in between: NIXL crashes if a freed
        # handle is used again. A handle that is never freed only waits for `close`.
        del self._in_flight[handle]
        self._settled += 1
        self._agent.release(handle)

    def _timed_out(self) -> TransferError:
        rest, state = "nothing is in flight", TransferState.OVERDUE
        if self.live_handles:
            state = TransferState.TIMEOUT
            rest = (
                f"{self.live_handles} stay in flight, in quarantine: no block of either side may be"
                " used again until this transfer is over or the rank is closed"
            )
        done, batches = self._settled, len(self.batches)
        message = f"{done} of {batches} batches were done after {self.timeout} s; {rest}"
        return self._failed(message, state)

    def _failed(self, message: str, state: TransferState) -> TransferError:
        return TransferError(message, rank=self.peer, request=self.request, state=state)


def wait_for_all(transfers: Sequence[Transfer]) -> None:
    """Poll *transfers* in turn until all have ended. Then raise the error of the first that failed.

    Each has a deadline, so this ends.
    """
    moving, rest = [*transfers], FIRST_WAIT
    while moving := [transfer for transfer in moving if _moves(transfer)]:
        time.sleep(rest)
        rest = min(2 * rest, LAST_WAIT)
    for transfer in transfers:
        transfer.poll()


def _moves(transfer: Transfer) -> bool:
    """Poll *transfer*. Return whether it has not ended."""
    try:
        return transfer.poll() == "PROC"
    except TransferError:
        if transfer.error is None:  # The rank is closed, or this is a forked child.
            raise
        return False


class InFlightTransfers:
    """The transfers of one rank, from `start` until no byte of them can move any more.

    How claims work:
        A transfer is claimed if `BusyRanges` contains all of its bytes. The rule is: whenever two
        transfers are in flight, all in flight are claimed. All else decides when the ranges are
        computed. One lock guards the claims. It is not the lock of the agent, which each poll
        needs: claiming a million ranges takes 0.1 s. Computing the ranges takes longer, so `pair`
        does it before it takes the lock.

        transfer                    its claim
        alone in flight             is not needed, so its ranges are not computed
        in flight with others       `start` makes it, unless `pair` has made it
        paired, and not started     may be taken by another transfer that needs the bytes
        over, or no longer exists   the next claim removes it

        `start` claims all transfers in flight that are not claimed. So a claim that was taken, or
        that an interrupt has left half made, is made again before any other transfer can start. For
        example, B and C write the same bytes, and A writes others:

            start A    A is alone                      claimed: none
            pair B     A is in flight                  claimed: A, B
            start C    C takes the claim of B          claimed: A, C
            start B    B needs the bytes of C          "busy": C is in flight
            C is over
            start B    the claim of C is removed       claimed: A, B

    Attributes:
        agent: The agent of the rank.
        buffers: The staging buffers of the rank, or None if nothing is staged.
        queue_numbers: Numbers for the line of transfers that wait for a slot. They grow.
    """

    def __init__(self, agent: Agent, buffers: Buffers | None = None) -> None:
        self.agent, self.buffers = agent, buffers
        self.queue_numbers = itertools.count()
        # Replaced whole, so that an interrupt leaves the old transfers or the new ones.
        self._known: tuple[Transfer, ...] = ()
        # A thread that holds the lock of the agent may take this one. Never the other way around.
        self._claiming = threading.RLock()
        self._busy: BusyRanges[TransferRef] = BusyRanges()
        # False: the claim is being made, or is incomplete.
        self._claimed: dict[TransferRef, bool] = {}

    def __iter__(self) -> Iterator[Transfer]:
        """Yield the transfers that are not over, as far as they were polled."""
        return (transfer for transfer in self._known if not transfer.over)

    def start(
        self,
        operation: Operation,
        pairs: Mapping[K, PreparedSides | Transfer],
        request: str,
        timeout: float,
    ) -> dict[K, Transfer]:
        """Start transfers, or none of them if bytes of one are busy. `poll` raises other errors.

        The first `poll` of a transfer that was paired before posts its first batch. The batches of
        the others are posted here.
        """
        if not isinstance(request, str):
            instance("request", request, str)
        timeout = seconds("timeout", timeout)
        paired = {key: each for key, each in pairs.items() if isinstance(each, Transfer)}
        made = {
            key: paired.get(key) or Transfer(self, operation, sides, request, timeout, key)
            for key, sides in cast("Mapping[K, PreparedSides]", pairs).items()
        }
        started = [*made.values()]
        with self.agent.lock:
            self.agent.check_open()
            if paired:
                self._take(paired, request, timeout)
            moving = self.reap() if self._known else ()
            every = (*moving, *started)
            try:
                for transfer in started:
                    transfer.started = True
                self._claim_all(moving, started)
                self._known = every
            except BaseException:
                if self._known is not every:  # An interrupt may come after the assignment.
                    for transfer in started:
                        transfer.started = False
                raise
            for key, transfer in made.items():
                if key not in paired:
                    transfer.make_progress()
            if len(every) == 1 and every[0].over:  # A small one often ends at once.
                self._known = ()
        return made

    def _take(self, paired: Mapping[K, Transfer], request: str, timeout: float) -> None:
        """Renew *paired*, which `pair` has returned and which have not started.

        Raises:
            SpecError: If one of them has started, or is of another rank.
        """
        every = [*paired.values()]
        for transfer in every:
            expected = ""
            if not transfer.of(self):
                expected = "transfers that this rank has paired"
            elif transfer.started or every.count(transfer) > 1:
                expected = "transfers that were paired, each of which is started once"
            if expected:
                raise SpecError("pairs", transfer, expected)
        for key, transfer in paired.items():
            transfer.renew(key, request, timeout)

    def pair(self, pairs: Mapping[K, PreparedSides], request: str) -> dict[K, Transfer]:
        """Return reads, and claim their bytes if others are in flight. Nothing starts.

        Such a claim yields to any transfer that starts first.
        """
        if not isinstance(request, str):
            instance("request", request, str)
        with self.agent.lock:  # In a fork, the lock of the claims may be locked forever.
            self.agent.check_open()
        made = {
            key: Transfer(self, "READ", sides, request, math.inf, key)
            for key, sides in pairs.items()
        }
        self._claim_all(self.reap() if self._known else (), [*made.values()])
        return made

    def _claim_all(self, moving: Sequence[Transfer], started: Sequence[Transfer]) -> None:
        """Claim the bytes of all transfers. Raise `TransferError` "busy" if any two share some.

        The ranges of a transfer take time to compute. So a transfer that is alone claims none until
        a second one starts.
        """
        every = (*moving, *started)
        if len(every) == 1:
            return
        # Without the lock. If a claim is taken meanwhile, its ranges are computed with the lock.
        ranges = {each: _ranges(each) for each in every if not self._claimed.get(weakref.ref(each))}
        with self._claiming:
            for owner in tuple(self._claimed):
                known = owner()
                if known is None or known.over:
                    self._release(owner)
            for transfer in every:
                if not self._claimed.get(weakref.ref(transfer)):
                    self._claim(transfer, ranges.get(transfer) or _ranges(transfer), started)

    def _release(self, owner: TransferRef) -> None:
        """Remove a claim. The caller holds the lock of the claims."""
        if owner in self._claimed:
            self._claimed[owner] = False  # If an interrupt comes now, the claim is made again.
        self._busy.release(owner)
        self._claimed.pop(owner, None)

    def _claim(
        self, transfer: Transfer, ranges: tuple[Claimed, Claimed], started: Sequence[Transfer]
    ) -> None:
        """Claim the bytes of *transfer*. Raise `TransferError` "busy" if another one uses them.

        *started* are the transfers that start in the same call. A conflict of two of them is an
        error of the caller, so the message does not advise to wait.
        Addresses identify bytes: those of two devices of one memory type differ as well.
        """
        owner, (target, source) = weakref.ref(transfer), ranges
        self._release(owner)  # An interrupt may have left a part of an earlier claim.
        self._claimed[owner] = False
        while True:
            conflict = self._busy.claim(owner, *target)
            conflict = conflict or self._busy.claim(owner, *source, shared=True)
            if conflict is None:
                self._claimed[owner] = True
                return
            self._busy.release(owner)
            other = conflict.owner()
            # The bytes are free if the other one is only paired, or is over.
            if other is not None and not other.over and (other in self._known or other in started):
                self._release(owner)
                raise _busy(transfer, other, started)
            self._release(conflict.owner)

    def reap(self) -> tuple[Transfer, ...]:
        """Release handles in quarantine that ended. Forget the transfers that are over.

        Returns:
            The other transfers.
        """
        with self.agent.lock:
            for transfer in self._known:
                if transfer.error is not None:
                    transfer.reap()
            self._known = tuple(transfer for transfer in self._known if not transfer.over)
            return self._known

    def poll_others(self, waiting: Transfer, buffer: StagingBuffer) -> None:
        """Poll the other transfers that use *buffer* until a handle of one of them ends.

        Those that wait for a slot come first: a free slot may be reserved for one of them.
        """
        for user in in_line(buffer, self):
            if user is not waiting and user.make_progress():
                return

    @property
    def file_handles(self) -> int:
        """Number of handles in flight that move files."""
        of_files = (each for each in self._known if each.remote.memory_type == "FILE")
        return sum(transfer.live_handles for transfer in of_files)

    def check_files_idle(self, descriptors: set[int]) -> None:
        """Raise `TransferError` "busy" while a transfer of one of the files is not over."""
        for transfer in self.reap():
            if transfer.remote.memory_type == "FILE" and descriptors & transfer.remote.devices:
                state = TransferState.BUSY
                message = f"{transfer!r} moves one of the files: {state.advice}"
                raise TransferError(message, request=transfer.request, state=state)

    def check_idle(self, peer: str) -> None:
        """Raise `TransferError` "busy" while a transfer with *peer* is not over."""
        if busy := [transfer.request for transfer in self.reap() if transfer.peer == peer]:
            state = TransferState.BUSY
            raise TransferError(f"{busy}: {state.advice}", rank=peer, state=state)

    def cancel_all(self, drain: float) -> bool:
        """Post no more, and wait up to *drain* seconds. Return whether nothing is in flight."""
        deadline = time.monotonic() + drain
        why = "the rank was closed first", TransferState.CLOSED
        while not all([transfer.cancel(*why) for transfer in self._known]):  # noqa: C419 - stop each
            if time.monotonic() >= deadline:
                return False
            time.sleep(FIRST_WAIT)
        return True

    def release_now(self) -> None:
        """Release everything, in flight or not, and forget it."""
        for transfer in self._known:
            transfer.release_now()
        with self._claiming:
            self._known, self._busy, self._claimed = (), BusyRanges(), dict[TransferRef, bool]()


def _ranges(transfer: Transfer) -> tuple[Claimed, Claimed]:
    """Return the bytes that *transfer* writes and those that it reads. This takes long."""
    local, remote, nbytes = transfer.pairs.moved_runs()
    start, stop = united(local, local + nbytes)
    near = ("", transfer.local.memory_type), start, stop
    start, stop = united(remote, remote + nbytes)
    far = (transfer.peer, transfer.remote.memory_type), start, stop
    return (near, far) if transfer.operation == "READ" else (far, near)


def _busy(transfer: Transfer, other: Transfer, started: Sequence[Transfer]) -> TransferError:
    """Return the error of two transfers that move some of the same bytes."""
    if transfer not in started:  # It moves already, and *other* is about to start.
        transfer, other = other, transfer
    state = TransferState.BUSY
    message = f"{other!r} moves some of the same bytes: {state.advice}"
    if other in started:
        one, two = sorted((other, transfer), key=started.index)
        message = (
            f"pairs[{one.key!r}] and pairs[{two.key!r}] of this call move some of the same bytes"
        )
    return TransferError(message, rank=transfer.peer, request=transfer.request, state=state)
