"""The common part of both ledgers: calls that change all or nothing, and times to wake up.

Invariant: a public method that changes a ledger either makes all its changes and returns the
actions, or raises and changes nothing. So a call that was interrupted, for example by
`KeyboardInterrupt`, can be repeated, and no action is lost.

How it works:
    `Ledger._touch` copies a record before its first change in a call. If an exception leaves the
    call, `atomic` puts the copies and the numbers of the ledger back.

    A heap contains the time at which each record must be looked at next. An entry whose time is not
    the `wake` of its record is out of date and is skipped. So a record that is needed later or
    earlier gets a second entry, and one that is put back may get one that it has already.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections.abc import Callable, Hashable, Iterator
from typing import Any, ClassVar, Concatenate, Generic, ParamSpec, Protocol, Self, TypeVar

from kvspec.completion.actions import Present
from kvspec.wire.messages import RankAddress


class Record(Protocol):
    """A record of a ledger. *wake* is when it is looked at, and the order in that moment."""

    wake: tuple[float, int]

    def copied(self) -> Self:
        """Return a copy that later changes of this record do not reach."""


K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Record)
L = TypeVar("L", bound="Ledger[Any, Any]")
P = ParamSpec("P")
T = TypeVar("T")


def atomic(act: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Undo all changes of a method if an exception leaves it. The method must not call another."""

    @functools.wraps(act)
    def whole(ledger: L, /, *args: P.args, **more: P.kwargs) -> T:
        ledger._before = {}  # noqa: SLF001
        numbers = [getattr(ledger, name) for name in ledger.numbers]
        try:
            return act(ledger, *args, **more)
        except BaseException:
            for name, number in zip(ledger.numbers, numbers, strict=True):
                setattr(ledger, name, number)
            for key, record in ledger._before.items():  # noqa: SLF001
                ledger._put_back(key, record)  # noqa: SLF001
            raise

    return whole


class Ledger(Generic[K, R]):
    """Records by key. Methods receive events and the time, and return actions.

    Attributes:
        me: Address of this rank.
        numbers: Names of the attributes that are numbers and that calls change.
    """

    numbers: ClassVar[tuple[str, ...]]

    def __init__(self, me: RankAddress) -> None:
        self.me = me
        self._now = 0.0
        self._present = Present()
        self._records: dict[K, R] = {}
        self._before: dict[K, R | None] = {}
        self._wakes: list[tuple[float, int, K]] = []
        self._order = itertools.count()

    @property
    def due(self) -> float | None:
        """Time of the next call of `tick`, or None. It may be too early."""
        return self._wakes[0][0] if self._wakes else None

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine."""
        self._present.disconnect(engine_id)

    def _touch(self, key: K) -> R | None:
        """Return a record that is about to change, or None. Copy it first, once in each call."""
        record = self._records.get(key)
        if key not in self._before:
            self._before[key] = None if record is None else record.copied()
        return record

    def _put_back(self, key: K, record: R | None) -> None:
        if record is None:
            self._records.pop(key, None)
        else:
            self._records[key] = record
            if record.wake[0] < math.inf:  # Its entry may have been taken from the heap.
                heapq.heappush(self._wakes, (*record.wake, key))

    def _look_at(self, key: K, record: R, time: float) -> None:
        """Look at a record at a time."""
        record.wake = time, next(self._order)
        heapq.heappush(self._wakes, (*record.wake, key))

    def _woken(self, now: float) -> Iterator[R]:
        """Set the time, which never goes back. Yield the records whose time has come."""
        self._now = max(self._now, now)
        while self._wakes and self._wakes[0][0] <= self._now:
            *wake, key = self._wakes[0]
            record = self._touch(key)  # First: an interrupt must not lose the entry.
            heapq.heappop(self._wakes)
            if record is not None and record.wake == tuple(wake):
                yield record
