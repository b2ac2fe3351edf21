"""A thread that moves a session on, so that nobody else has to.

Law: it never holds the session while it rests, and rests shorter while bytes move.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

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
