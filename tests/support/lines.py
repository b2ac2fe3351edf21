"""What happens between two lines: a signal, or another thread's turn, there and not by luck."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any


@contextlib.contextmanager
def between_lines(act: Callable[[int], object], *modules: ModuleType) -> Iterator[None]:
    """Let this thread *act* before each line of *modules*, told how many were before it."""
    files = {module.__file__ for module in modules}
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if event in ("call", "line"):  # a generator that goes on is called
            count += 1
            act(count - 1)
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        yield
    finally:
        sys.settrace(before)


class Other:
    """Another thread, which does *work* when first asked; who asks waits for it a moment."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)

    def at(self, line: int) -> Callable[[int], None]:
        """Return what begins before a *line*, and waits: until it is done, or has to wait, too."""

        def act(now: int) -> None:
            if now == line:
                self._thread.start()
                self._thread.join(0.03)

        return act

    def join(self) -> None:
        """Wait until it is done, if it has not begun begin now."""
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(10.0)
        assert not self._thread.is_alive()


def interrupted_at(
    place: int, act: Callable[[], object], *modules: ModuleType
) -> tuple[bool, bool]:
    """Call *act* with a KeyboardInterrupt before line *place* of *modules*.

    Return whether *act* has so many lines, and whether the interrupt left *act*. Python swallows an
    interrupt in a generator that is being closed.
    """
    reached = False

    def interrupt(line: int) -> None:
        nonlocal reached
        if line == place:
            reached = True
            raise KeyboardInterrupt

    try:
        with between_lines(interrupt, *modules):
            act()
    except KeyboardInterrupt:
        return True, True
    return reached, False
