"""Run an action between two lines of a module: raise a signal, or let another thread run.

Such races are then deterministic: a test tries every line instead of waiting for a rare schedule.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import threading
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from types import CodeType, FrameType, ModuleType
from typing import Any


@contextlib.contextmanager
def between_lines(act: Callable[[int], object], *modules: ModuleType) -> Iterator[None]:
    """Call *act* in this thread before each line of *modules*, with the number of lines before.

    `try:` and the end of a `with` are no such lines: Python handles no signal there.
    """
    files = {module.__file__ for module in modules}
    count = 0

    def line(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code.co_filename not in files:
            return None
        if frame.f_lasti in _without_signals(frame.f_code):
            return line
        if event in ("call", "line"):  # A generator that continues causes a "call".
            count += 1
            act(count - 1)
        return line

    before = sys.gettrace()
    sys.settrace(line)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def _without_signals(code: CodeType) -> frozenset[int]:
    """Return offsets of *code* at which a line begins, and before which Python handles no signal.

    `try:` is a NOP. The end of a `with` passes None three times to `__exit__`, perhaps below a
    value to return, or passes on an exception. No exception table covers these instructions, so an
    interrupt there would leave the lock of the `with` locked.
    """
    steps = list(dis.get_instructions(code))
    found = {step.offset for step in steps if step.opname == "NOP"}
    for at, step in enumerate(steps):
        nothing = [each.argval for each in steps[at : at + 3] if "CONST" in each.opname]
        if [None] * 3 == nothing or step.opname == "WITH_EXCEPT_START":
            found.add(step.offset)
            if at and steps[at - 1].opname in ("SWAP", "PUSH_EXC_INFO"):
                found.add(steps[at - 1].offset)
    return frozenset(found)


# After these instructions, and nowhere else, Python calls the handlers of signals.
HANDLES_SIGNALS = {"RESUME", "CALL", "CALL_FUNCTION_EX", "CALL_KW", "JUMP_BACKWARD"}


def interrupted_after(place: int, act: Callable[[], object], folder: Path) -> tuple[int, bool]:
    """Call *act*, and raise a KeyboardInterrupt at moment *place* in the code below *folder*.

    A moment is one at which Python calls the handlers of signals. They are counted from 0. The
    replacement for NIXL has none, as C code has none, and neither has code in `uninterrupted`.

    A handler that raises does so inside of the last instruction, but a trace function inside of the
    next one. If a `with` ends between the two, as after ``return call()``, its lock would stay
    locked. Python releases it, so such a moment is not counted.

    Returns:
        How many moments were counted, and whether the interrupt left *act*.
    """
    count, root, before = 0, str(folder), sys.gettrace()
    last: dict[FrameType, int] = {}

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if event == "call":
            file = frame.f_code.co_filename
            if not file.startswith(root) or "/testing/" in file:
                return None
            frame.f_trace_opcodes = True
        elif event == "return":
            last.pop(frame, None)
        elif event == "opcode":
            code, at = frame.f_code, last.get(frame)
            if at is not None and _names(code)[at] in HANDLES_SIGNALS:
                handlers = _handlers(code)
                count += handlers[at] == handlers[frame.f_lasti]
                if count == place + 1:
                    raise KeyboardInterrupt
            last[frame] = frame.f_lasti
        return step

    sys.settrace(step)
    try:
        act()
    except KeyboardInterrupt:
        return count, True
    finally:
        sys.settrace(before)
    return count, False


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Let `interrupted_after` count nothing inside."""
    before = sys.gettrace()
    sys.settrace(None)
    try:
        yield
    finally:
        sys.settrace(before)


@cache
def _names(code: CodeType) -> dict[int, str]:
    """Return the name of the instruction at each offset of *code*."""
    return {step.offset: step.opname for step in dis.get_instructions(code)}


@cache
def _handlers(code: CodeType) -> dict[int, int | None]:
    """Return for each offset of *code* where an exception continues, or None if it leaves."""
    entries = dis.Bytecode(code).exception_entries  # type: ignore[attr-defined]
    return {
        at: next((one.target for one in entries if one.start <= at < one.end), None)
        for at in _names(code)
    }


class Other:
    """Another thread, which does *work* once a chosen line is reached."""

    def __init__(self, work: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=work, daemon=True)

    def at(self, line: int) -> Callable[[int], None]:
        """Return an action that starts the thread before *line* and waits for it a moment.

        The thread either ends in that moment, or blocks on a lock that the tested thread holds.
        """

        def act(now: int) -> None:
            if now == line:
                self._thread.start()
                # 30 ms let the work end unless it waits for a lock. Then the tested thread must
                # go on, or both would wait for ever.
                self._thread.join(0.03)

        return act

    def join(self) -> None:
        """Wait until the work is done. Start it now if the line was never reached."""
        if self._thread.ident is None:
            self._thread.start()
        self._thread.join(10.0)
        assert not self._thread.is_alive()


def interrupted_at(
    place: int, act: Callable[[], object], *modules: ModuleType
) -> tuple[bool, bool]:
    """Call *act* with a KeyboardInterrupt before line *place* of *modules*.

    Returns:
        Whether *act* has that many lines, and whether the interrupt left *act*. Python swallows an
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


def interrupted_in(place: int, function: Callable[..., object], act: Callable[[], object]) -> bool:
    """Call *act* with a KeyboardInterrupt before bytecode instruction *place* of *function*.

    A signal can come between the call and the assignment of one statement. Lines do not show it.

    Returns:
        Whether *act* has that many instructions of *function*.
    """
    count = 0

    def step(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if frame.f_code is not function.__code__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == place + 1:
                raise KeyboardInterrupt
        return step

    before = sys.gettrace()
    sys.settrace(step)
    try:
        with contextlib.suppress(KeyboardInterrupt):
            act()
    finally:
        sys.settrace(before)
    return count > place
