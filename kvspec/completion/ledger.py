"""The common part of both ledgers: records, actions and timers.

Invariant: a ledger does nothing itself. It appends actions to `actions`, in order, and the session
carries them out. Tests read what each method returns. A method that raises an error has checked its
arguments first: it has changed nothing but the time.

An interrupt, such as `KeyboardInterrupt`, may leave a ledger half changed. Then the session is
closed, and the ledger is not used any more: see `kvspec.session.background.SessionLock`.

How it works:
    A heap contains the time at which each record must be looked at next. An entry that is not the
    `wake` of its record is out of date and is skipped. So a record that is needed earlier gets a
    second entry. A record that is needed later is scheduled again when its entry comes. The heap is
    built again when most of its entries are out of date.
"""

from __future__ import annotations

import functools
import heapq
import itertools
import math
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import msgspec

from kvspec.errors import SpecError, TransferState
from kvspec.inputs import positive_int
from kvspec.ownership.parallel import RankId
from kvspec.wire.handshake import is_name
from kvspec.wire.messages import Message, RankAddress

NEVER = math.inf, 0
# The heap is rebuilt when it has more than two entries for each record plus this many.
SPARE_WAKES = 64
# Seconds. With shorter intervals, a poll would have something due at each moment.
LEAST_INTERVAL = 1e-3


class Tell(NamedTuple):
    """Action: send *message* to its receiver."""

    message: Message


class Refused(NamedTuple):
    """Action: a message changed nothing. *why* is the reason."""

    message: Message
    why: str

    def __str__(self) -> str:
        return f"{self.message}: {self.why}"


class Ended(NamedTuple):
    """Action: a load is done, or it has failed. Nothing can write its blocks any more.

    *state* is its public state. The data of a load that is done has arrived and was valid.
    """

    request_id: str
    state: str


class Failed(NamedTuple):
    """Action: a request has failed. Its blocks are still reserved.

    *state* becomes the state of the `TransferError`. *rank* is the producer rank that caused the
    failure, if one rank did.
    """

    request_id: str
    why: str
    state: TransferState
    rank: RankId | None = None


class Closed(NamedTuple):
    """Action: a request has ended. It sends and expects no message any more."""

    request_id: str


HoldAction = Tell | Refused
"""An action that the producer's ledger returns. The session carries them out in order."""
Action = Tell | Refused | Failed | Ended | Closed
"""An action that the consumer's ledger returns. The session carries them out in order."""


class Record(msgspec.Struct, eq=False, kw_only=True):
    """A record of a ledger.

    Attributes:
        wake: Next time to look at the record, and a counter that breaks ties.
    """

    wake: tuple[float, int] = NEVER

    @property
    def due(self) -> float:
        """When the time changes something."""
        raise NotImplementedError


A = TypeVar("A")
K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Record)
L = TypeVar("L", bound="Ledger[Any, Any, Any]")
P = ParamSpec("P")
T = TypeVar("T")


def recorded(act: Callable[Concatenate[L, P], list[A]]) -> Callable[Concatenate[L, P], list[A]]:
    """Keep the actions that a method returns in `Ledger.actions` as well."""

    @functools.wraps(act)
    def whole(ledger: L, /, *args: P.args, **more: P.kwargs) -> list[A]:
        result = act(ledger, *args, **more)
        ledger.actions += result
        return result

    return whole


class Ledger(Generic[K, R, A]):
    """Records by key. Methods receive events and the time, and append actions of the type `A`.

    Attributes:
        me: Address of this rank.
        records: The records.
        epochs: The current incarnation of each connected engine. If an engine is not connected,
            every incarnation of it counts as current.
        counts: Numbers that the ledger counts, by name.
        actions: Actions that wait. The session removes each and carries it out.
    """

    def __init__(self, me: RankAddress) -> None:
        self.me = me
        self.records: dict[K, R] = {}
        self.epochs: dict[str, int] = {}
        self.counts = Counter[str]()
        self.actions: list[A] = []
        self._now = 0.0
        self._wakes: list[tuple[float, int, K]] = []
        self._order = itertools.count()

    @property
    def due(self) -> float | None:
        """Time of the next call of `tick`, or None. The call may then find nothing to do."""
        return self._wakes[0][0] if self.records and self._wakes else None

    @recorded
    def tick(self, now: float) -> list[A]:
        """Process the time, which never goes back. Return actions."""
        return self._tick(now)

    def disconnect(self, engine_id: str) -> list[A]:
        """Disconnect an engine. Return actions."""
        self.epochs.pop(engine_id, None)
        return []

    def clear(self) -> None:
        """Forget all records, without actions."""
        for entries in (self.records, self._wakes, self.counts, self.actions):
            entries.clear()

    def _connect(self, engine_id: str, epoch: int) -> None:
        """Record the current incarnation; raise `SpecError` if *epoch* is less than before."""
        known = self.epochs.get(is_name("engine_id", engine_id), 0)
        if positive_int("epoch", epoch, least=0) < known:
            rule = (
                f"must be at least {known}, the epoch of {engine_id!r:.80} that was connected."
                " Was its clock set back? Restart it with a larger epoch, or, if the other start"
                f" has ended, call disconnect({engine_id!r:.80})"
            )
            raise SpecError("epoch", epoch, rule=rule)
        self.epochs[engine_id] = epoch

    def _count(self, name: str, more: int) -> int:
        """Add to a number of `counts`, and return the sum."""
        self.counts[name] += more
        return self.counts[name]

    def _save(self, key: K, record: R) -> None:
        """Store a record, and look at it when it is due."""
        self.records[key] = record
        self._schedule(key, record)

    def _rebuild(self) -> None:
        """Make a heap of the entries that are not out of date. A sorted list is a heap."""
        self._wakes = sorted(
            (*record.wake, key) for key, record in self.records.items() if record.wake != NEVER
        )

    def _schedule(self, key: K, record: R) -> None:
        """Look at a record when it is due. An entry may be too early, but never too late."""
        if record.due < record.wake[0]:
            record.wake = record.due, next(self._order)
            heapq.heappush(self._wakes, (*record.wake, key))
            # A load that ends early leaves its deadline in the heap. Remove such entries.
            if len(self._wakes) > 2 * len(self.records) + SPARE_WAKES:
                self._rebuild()

    def _set_time(self, now: float) -> None:
        """Record the time, and look at no record. The time never goes back."""
        self._now = max(self._now, now)

    def _tick(self, now: float) -> list[A]:
        """Set the time, and look at the records whose time has come."""
        self._set_time(now)
        actions: list[A] = []
        while self._wakes and self._wakes[0][0] <= self._now:
            *wake, key = heapq.heappop(self._wakes)
            record = self.records.get(key)
            if record is not None and record.wake == tuple(wake):
                record.wake = NEVER
                actions += self._wake(record)
                self._schedule(key, record)
        return actions

    def _wake(self, record: R, /) -> list[A]:
        """Look at a record. Return actions."""
        raise NotImplementedError
