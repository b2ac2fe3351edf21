"""Move a session on in a thread, and provide the lock and the clock that all its threads share.

Invariant: the thread does not hold the lock while it rests. It rests for a shorter time while bytes
move. A forked child inherits the sockets and a possibly locked lock. In a child the session does
nothing: it sends and receives no message, closes no socket of the parent, and waits for no thread.

How it works:
    The thread calls `poll`, then rests in the `wait` of the channel. Four things end the rest:

    ====================  =====================================================================
    event                 how the thread learns of it
    ====================  =====================================================================
    a message             `wait` of the channel returns
    a timer of a ledger   the session returns the seconds until then, at most `IDLE`
    bytes move            NIXL has no event for it, so the rest lasts only `BUSY` seconds
    another thread calls  the caller wakes the thread if it must poll sooner. If the channel has no
                          `wake`, the thread polls every `UNWOKEN` seconds
    ====================  =====================================================================

    A `poll` of the caller does nothing while the thread works, so that the caller's thread does not
    pay for transfers. A thread that connects an engine polls by itself, and then it takes messages
    and wake-ups that this thread waits for. So it calls `wake` after its poll, because bytes may
    move now.

    A poll that raises an unexpected error does not end the thread: loads and leases depend on it.
    The thread logs the error, and polls again after `IDLE` seconds, so that an error that stays
    neither takes the CPU nor fills the log. An interrupt (see `SessionLock`) closes the session, as
    it does in a call, and ends the thread: a caller that waits must not wait for a dead thread.
"""

from __future__ import annotations

import functools
import logging
import math
import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Concatenate, Generic, ParamSpec, Protocol, TypeVar

from kvspec.errors import TransferError, TransferState
from kvspec.session.channel import Channel

BUSY = 5e-4
"""Seconds between two polls while bytes move."""
IDLE = 1.0
"""Seconds between two polls while nothing happens."""
UNWOKEN = 0.02
"""The same for a channel without `wake`."""

T = TypeVar("T")
P = ParamSpec("P")
G = TypeVar("G", bound="Guarded")
_LOG = logging.getLogger("kvspec.session")
_BOOT = getattr(time, "CLOCK_BOOTTIME", None)
since_boot: Callable[[], float] = (
    time.monotonic if _BOOT is None else partial(time.clock_gettime, _BOOT)
)
"""Return seconds that never go back, and that count while the machine is suspended.

`time.monotonic` stands still during a suspend on Linux. It is used only where the system has no
`CLOCK_BOOTTIME`. A paused virtual machine may stop both clocks, so neither may decide that bytes
are valid.
"""


class Guarded(Protocol):
    """An object with the lock of a session."""

    @property
    def _lock(self) -> SessionLock:
        """The lock."""


class SessionLock:
    """A lock of the process that created it.

    A thread that holds it cannot take it again. Only a signal handler or a log handler could try,
    in the middle of another call of the session, whose next lines rely on the state before.

    An *interrupt* is an exception that may come between any two instructions, such as
    `KeyboardInterrupt`: any `BaseException` that is no `Exception`. It may leave everything half
    changed. So an interrupt inside of a call closes the session, and only `close` looks at what
    is left. Each change of the session is made in `with lock.held, lock:`. If an interrupt leaves
    it, the lock stays marked, and the next thread that enters calls `close` first. Each public
    call has the decorator `closes_if_interrupted`, for the parts that need no lock.

    We tried to keep the state correct between any two lines, by journals and by the order of lines.
    It took more reading than all else. A C lock is taken and released by one instruction, so `held`
    is one, and the mark is a second context manager.

    Args:
        close: Closes the session after an interrupt. A second call does no harm.
    """

    def __init__(self, close: Callable[[], None] = lambda: None) -> None:
        self._close = close
        self._changing = False  # If set while nobody has the lock, an interrupt left a call.
        # Not a plain lock: a thread would wait for itself without end. A Condition is the public
        # way to find out whether this thread holds an RLock.
        self._lock, self._pid = threading.RLock(), os.getpid()
        self._condition = threading.Condition(self._lock)

    def __enter__(self) -> None:
        if self._changing:
            self._close()
        self._changing = True

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or issubclass(kind, Exception):
            self._changing = False

    def interrupted(self) -> None:
        """Close the session, because an interrupt has left one of its calls."""
        if not self.forked and not self.inside:
            with self.held, self:
                self._close()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that created the lock."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Raise `TransferError` "forked" in a forked child."""
        if self.forked:
            message = f"the session of process {self._pid} was used in its fork {os.getpid()}"
            raise TransferError(
                f"{message}; {TransferState.FORKED.advice}", state=TransferState.FORKED
            )

    @property
    def inside(self) -> bool:
        """Whether this thread holds the lock."""
        try:
            self._condition.notify(0)  # Wakes no thread. Raises if this one has no lock.
        except RuntimeError:
            return False
        return True

    @property
    def held(self) -> threading.RLock:
        """The lock for a `with`. Raises as `check`."""
        self.check()
        return self._lock

    def check(self) -> None:
        """Check that this thread may take the lock.

        Raises:
            TransferError: With state "forked" in a forked child, and "busy" if this thread holds
                the lock.
        """
        self.check_process()
        if self.inside:
            message = (
                "the session was called inside of another of its calls, perhaps by a signal "
                "handler; let the handler set a flag, and call the session when the call is over"
            )
            raise TransferError(message, state=TransferState.BUSY)


def closes_if_interrupted(call: Callable[Concatenate[G, P], T]) -> Callable[Concatenate[G, P], T]:
    """Close the session if an interrupt leaves a public *call*."""

    @functools.wraps(call)
    def guarded(self: G, /, *args: P.args, **more: P.kwargs) -> T:
        try:
            return call(self, *args, **more)
        except Exception:
            raise
        except BaseException:
            self._lock.interrupted()
            raise

    return guarded


class Background:
    """A thread that polls a session until it is stopped.

    Args:
        poll: The poll. It is called while the lock is held.
        rest: Returns how many seconds the next poll may be away.
        channel: Its `wait` is where the thread rests.
        lock: The lock of the session.
    """

    def __init__(
        self,
        poll: Callable[[], None],
        rest: Callable[[], float],
        channel: Channel,
        lock: SessionLock,
    ) -> None:
        self._poll, self._rest, self._wait, self._lock = poll, rest, channel.wait, lock
        self._wake: Callable[[], None] | None = getattr(channel, "wake", None)
        self._longest = UNWOKEN if self._wake is None else IDLE
        self._until = math.inf  # when the rest ends
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    @property
    def works(self) -> bool:
        """Whether the thread polls, so that no other thread has to."""
        return not self._ended.is_set()

    def wake(self) -> None:
        """End the rest if the thread must poll earlier. Call this with the lock."""
        if self._wake is not None and time.monotonic() + self._rest() < self._until:
            self._wake()

    def end(self) -> None:
        """Start no other poll."""
        self._ended.set()

    def close(self) -> None:
        """Wait for the current poll, and start no other."""
        self.end()
        if self._wake is not None:
            self._wake()
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended.is_set():
            try:
                with self._lock.held, self._lock:  # so that no other poll comes between the lines
                    self._poll()
                    rest = min(self._rest(), self._longest)
                    self._until = time.monotonic() + rest
                self._wait(rest)
            except Exception:  # noqa: BLE001 - the thread must not end, and the log has the error
                if self._ended.is_set():
                    return  # The channel is closed.
                _LOG.exception("a poll in the background failed; the thread polls again")
                self._ended.wait(IDLE)  # not in the channel, which may be what fails
            except BaseException:  # noqa: BLE001 - Python does not report a `SystemExit` of a thread
                _LOG.exception("a poll in the background was interrupted; the session is closed")
                self.end()
                self._lock.interrupted()


class Worker(Generic[T]):
    """A thread that works on one thing after the other. It starts with the first thing.

    The work takes long, and must not delay messages. So it has a thread of its own, which does not
    hold the lock of the session. It is a daemon: a process can end in the middle of the work.

    Args:
        work: The work. An error is logged.
    """

    def __init__(self, work: Callable[[T], None]) -> None:
        self._work = work
        self._things: queue.SimpleQueue[T | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, thing: T) -> None:
        """Work on *thing* after all that were put before. Call this with the lock."""
        self._things.put(thing)
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name="kvspec-loads", daemon=True)
            try:
                thread.start()
            except RuntimeError:  # The system has no more threads. The next call tries again.
                _LOG.exception("a load is not started yet; it fails at its deadline")
            else:
                self._thread = thread

    def close(self, timeout: float) -> None:
        """Begin nothing new, and wait up to *timeout* seconds for the work."""
        self._things.put(None)
        if self._thread is not None:
            self._thread.join(timeout)

    def _serve(self) -> None:
        while (thing := self._things.get()) is not None:
            try:
                self._work(thing)
            except BaseException:  # noqa: BLE001 - the next load must start, and the log has the error
                _LOG.exception("a load was not started; it fails at its deadline")
