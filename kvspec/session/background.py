"""Move a session on in a thread, and provide the lock that all its threads share.

Invariant: the thread does not hold the lock while it rests. It rests for a shorter time while bytes
move. A forked child inherits the sockets and a possibly locked lock. In a child the session does
nothing: it sends and receives no message, closes no socket of the parent, and waits for no thread.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable

from kvspec.errors import TransferError, TransferState

BUSY, IDLE = 5e-4, 1e-2  # seconds that it rests while bytes move, and else


class Background:
    """Calls *step* until it is stopped; *wait* rests, at most so many seconds."""

    def __init__(
        self, step: Callable[[], None], moving: Callable[[], bool], wait: Callable[[float], None]
    ) -> None:
        self._step, self._moving, self._wait = step, moving, wait
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Let the step that is under way end, and begin no other."""
        self._ended.set()
        self._thread.join()

    def _serve(self) -> None:
        while not self._ended.is_set():
            self._step()
            self._wait(BUSY if self._moving() else IDLE)


class SessionLock:
    """A lock of the process that made it; a thread may take it again."""

    def __init__(self) -> None:
        self._lock, self._pid = threading.RLock(), os.getpid()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made it."""
        return os.getpid() != self._pid

    @property
    def held(self) -> threading.RLock:
        """What a `with` holds; `TransferError` "forked" in a fork."""
        if self.forked:
            message = f"the session of process {self._pid} was used in its fork {os.getpid()}"
            raise TransferError(
                f"{message}; {TransferState.FORKED.advice}", state=TransferState.FORKED
            )
        return self._lock
