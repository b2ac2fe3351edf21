"""Ask a system so that whatever it does becomes a judgement: it may crash, hang or change its mind.

Invariant: after an answer, a refusal or a fault, the laws can go on with the next question.

How it works:
    `guarded` replaces each function of a system. The new function asks the old one within a time
    limit, asks it a second time, and maps what happens:

        the system                                   a law sees
        answers twice the same                       the answer
        raises `MismatchError` or one of `refuses`   `RefusedError`
        raises another `KVSpecError`, `ValueError`   that error: law 11 accepts it as a refusal
        raises anything else                         `FaultyAnswerError`
        makes an answer of wrong form                `FaultyAnswerError`
        does not answer in time                      `FaultyAnswerError`
        answers differently the second time          `FaultyAnswerError`
        ends the process, with `sys.exit`            `FaultyAnswerError`

    `FaultyAnswerError` is an `AssertionError`, so the law that asked reports it as a fault. A
    function that did not answer in time is not asked again about the same case. After
    `MOST_OVERDUE` cases it is not asked at all, since each question takes the whole time limit.
    Laws that need it are not judged then.
"""

from __future__ import annotations

import functools
import signal
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import attrs
import numpy as np

import kvspec
from kvspec.errors import KVSpecError, MismatchError
from kvspec.testing.world import PreparedLists, WrongFormError

if TYPE_CHECKING:
    from types import FrameType

    from kvspec.testing.laws.system import System

T = TypeVar("T")

MOST_OVERDUE = 2
# Files between a system and an exception that kvspec raises for it. "<" begins generated code.
_NOT_OF_A_SYSTEM = (
    str(Path(kvspec.__file__).parent),
    str(Path(attrs.evolve.__code__.co_filename).parent),
    "<",
)

# The questions whose answers can be compared. The others return nothing, or an object with a state.
_COMPARED = ("moves", "tells", "descriptors", "prepared", "steps", "names")


class RefusedError(KVSpecError):
    """The system refused the case. The message has the words of the system."""


class FaultyAnswerError(AssertionError):
    """The system crashed, did not answer in time, or answered twice differently."""


class NotAskedError(Exception):
    """The function is not asked, since it did not answer in time before."""


class _OverdueError(BaseException):
    """The time limit is over. Not an `Exception`, since a system may catch all of those."""


@attrs.define(eq=False)
class Guard:
    """Asks the functions of one system.

    Attributes:
        system: The system.
        seconds: The time limit of each question.
        overdue: How often each function did not answer in time.
        stuck: The functions that did not answer in time about the present case.
        raised: The last exception of the system that was passed on.
        found: The words of faults that only a guard finds, such as two answers that differ.
    """

    system: System
    seconds: float
    overdue: Counter[str] = attrs.field(factory=Counter, init=False)
    stuck: set[str] = attrs.field(factory=set, init=False)
    raised: BaseException | None = attrs.field(default=None, init=False)
    found: set[str] = attrs.field(factory=set, init=False)

    def guarded(self) -> System:
        """Return the system with functions that ask as `How it works` describes.

        `release` and `pages` return objects with a state. The judge asks each script or case whole.
        """
        changes: dict[str, Any] = {}
        for name in (*_COMPARED, "connector", "release"):
            function = getattr(self.system, name)
            if function is not None:
                changes[name] = self._asking(name, function)
        return attrs.evolve(self.system, **changes)

    def _asking(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function, updated=())
        def ask(*arguments: object) -> object:
            first = self.ask(name, function, *arguments)
            if name in _COMPARED and not _equal(first, self.ask(name, function, *arguments)):
                raise self._found(f"{name}: two calls with the same arguments differ")
            return first

        return ask

    def ask(self, name: str, function: Callable[..., Any], *arguments: object) -> object:
        """Return the answer of *function* to *arguments*. A generator is exhausted into a list."""
        if name in self.stuck or self.overdue[name] >= MOST_OVERDUE:
            raise NotAskedError(f"{name} did not answer in time before")

        def answer() -> object:
            answered = function(*arguments)
            return list(answered) if name in _COMPARED and _lazy(answered) else answered

        try:
            return within(self.seconds, answer)
        except _OverdueError:
            self.overdue[name] += 1
            self.stuck.add(name)
            raise self._found(f"{name}: no answer within {self.seconds:g} s") from None
        # It would end the process of the judge, with the status that the system chooses.
        except SystemExit as error:
            raise self._found(f"{name}: raised {error!r}{place_of(error)}") from None
        except Exception as error:
            if isinstance(error, (MismatchError, RefusedError, *self.system.refuses)):
                self.raised = RefusedError(str(error) or type(error).__name__)
                raise self.raised from error
            if isinstance(error, (KVSpecError, ValueError)):
                self.raised = error
                raise
            if isinstance(error, WrongFormError):
                raise FaultyAnswerError(f"{name}: {error}{place_of(error)}") from error
            words = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
            words = f"raised {words}{place_of(error)}, which is not a refusal"
            raise FaultyAnswerError(f"{name}: {words}") from error

    def _found(self, words: str) -> FaultyAnswerError:
        self.found.add(words)
        return FaultyAnswerError(words)


def place_of(error: BaseException) -> str:
    """Return the last line of the system that an exception has passed, for a message."""
    frames = traceback.extract_tb(error.__traceback__)
    # An exception that kvspec raises for the system has frames of kvspec at the end.
    own = [frame for frame in frames if not frame.filename.startswith(_NOT_OF_A_SYSTEM)]
    return f" at {Path(own[-1].filename).name}:{own[-1].lineno}" if own else ""


def _lazy(answer: object) -> bool:
    return isinstance(answer, Iterable) and not isinstance(answer, PreparedLists)


def _equal(first: object, second: object) -> bool:
    """Return whether two answers are equal, but for the order of moves, pairs and copies.

    Names of pages have an order.
    """
    if isinstance(first, PreparedLists) and isinstance(second, PreparedLists):
        fields = attrs.astuple(first, recurse=False), attrs.astuple(second, recurse=False)
        return all(map(np.array_equal, *fields))
    if isinstance(first, list) and isinstance(second, list):
        if all(isinstance(each, (str, bytes)) for each in first):
            return first == second
        # A copy may be a list or an array, which have no hash and no order.
        return sorted(map(repr, first)) == sorted(map(repr, second))
    return first is second or first == second


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of *call*, or raise if it takes longer than *seconds*.

    In the main thread, a signal interrupts the call. It cannot interrupt C code. In other threads
    the call runs in a thread of its own, which goes on after the time is over.
    """
    if threading.current_thread() is threading.main_thread() and hasattr(signal, "setitimer"):
        return _interrupted(seconds, call)
    return _in_thread(seconds, call)


def _interrupted(seconds: float, call: Callable[[], T]) -> T:
    def over(number: int, frame: FrameType | None) -> None:
        del number, frame
        raise _OverdueError

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, over)
    # A test runner may use the same timer for its own limit, which must stay.
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        return call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left:
            rest = max(left - (time.monotonic() - began), 1e-3)
            signal.setitimer(signal.ITIMER_REAL, rest, interval)


def _in_thread(seconds: float, call: Callable[[], T]) -> T:
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # noqa: BLE001 - raised again in the thread that asked
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if errors:
        raise errors[0]
    if not results:
        raise _OverdueError
    return results[0]
