"""The common part of both ledgers: actions, atomic changes, and timers.

Invariant: a ledger does nothing itself. It returns actions, and the session carries them out.

Invariant: a public method that changes a ledger either makes all its changes and keeps its actions,
or raises and changes nothing. So a call that was interrupted, for example by `KeyboardInterrupt`,
can be repeated, and no action is lost. The ledger's time is not set back.

How it works:
    A ledger is made of dicts, and a record is an entry of the dict `records`. Only `_put` and
    `_drop` change an entry. They write the old entry into a journal first. If an exception leaves
    a call, `atomic` puts the old entries back, the last one first.

    `_change` puts a copy of a record into `records`. The call may then assign the fields of that
    copy, because `atomic` puts the old record back. The copy shares its dicts with the old record.
    So the call changes an entry with `_put`, or it assigns a new dict:

        request = self._change(key)                      # journal: records, key, old request
        request.expires = now + 30                       # a field of the copy
        self._put(request.progress, place, 8)            # journal: progress, place, old position
        request.early = {}                               # a field of the copy

    So a call costs the same, however many readers or layers a record has.

    A heap contains the time at which each record must be looked at next. An entry that is not the
    `wake` of its record is out of date and is skipped. So a record that is needed earlier gets a
    second entry. A record that is needed later is scheduled again when its entry comes. The heap is
    built again when most of its entries are out of date.
"""

from __future__ import annotations

import copy
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
SPARE = 64
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
E = TypeVar("E", bound=Hashable)
K = TypeVar("K", bound=Hashable)
R = TypeVar("R", bound=Record)
L = TypeVar("L", bound="Ledger[Any, Any, Any]")
P = ParamSpec("P")
T = TypeVar("T")


def atomic(act: Callable[Concatenate[L, P], T]) -> Callable[Concatenate[L, P], T]:
    """Undo all changes of a method if an exception leaves it.

    The actions that the method returns are also kept in `Ledger.actions`. An atomic method must not
    call another atomic method: each starts its own journal.
    """

    @functools.wraps(act)
    def whole(ledger: L, /, *args: P.args, **more: P.kwargs) -> T:
        ledger._journal = []  # noqa: SLF001
        kept = len(ledger.actions)
        try:
            result = act(ledger, *args, **more)
            if isinstance(result, list):
                ledger.actions += result
            return result  # noqa: TRY300 - an interrupt before the end undoes the call
        except BaseException:
            del ledger.actions[kept:]
            ledger._undo()  # noqa: SLF001
            raise

    return whole


class Ledger(Generic[K, R, A]):
    """Records by key. Methods receive events and the time, and return actions of the type `A`.

    Attributes:
        me: Address of this rank.
        records: The records.
        epochs: The current incarnation of each connected engine. If an engine is not connected,
            every incarnation of it counts as current.
        counts: Numbers that the ledger counts, by name.
        actions: Actions that were returned. The session removes each after it was carried out.
    """

    def __init__(self, me: RankAddress) -> None:
        self.me = me
        self.records: dict[K, R] = {}
        self.epochs: dict[str, int] = {}
        self.counts = Counter[str]()
        self.actions: list[A] = []
        self._now = 0.0
        self._journal: list[tuple[dict[Any, Any], Any, Any]] = []
        self._wakes: list[tuple[float, int, K]] = []
        self._order = itertools.count()

    @property
    def due(self) -> float | None:
        """Time of the next call of `tick`, or None. The call may then find nothing to do."""
        return self._wakes[0][0] if self.records and self._wakes else None

    @atomic
    def tick(self, now: float) -> list[A]:
        """Process the time, which never goes back. Return actions."""
        return self._tick(now)

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine."""
        self.epochs.pop(engine_id, None)

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
        self._put(self.epochs, engine_id, epoch)

    def _put(self, entries: dict[E, T], key: E, entry: T) -> None:
        """Set one entry of a dict. `atomic` can undo this."""
        self._journal.append((entries, key, entries.get(key)))
        entries[key] = entry

    def _drop(self, entries: dict[E, T], key: E) -> None:
        """Remove one entry of a dict, if there is one. `atomic` can undo this."""
        self._journal.append((entries, key, entries.get(key)))
        entries.pop(key, None)

    def _count(self, name: str, more: int) -> int:
        """Add to a number of `counts`, and return the sum."""
        self._put(self.counts, name, self.counts[name] + more)
        return self.counts[name]

    def _change(self, key: K) -> R | None:
        """Return a copy of a record that takes its place, or None. Its fields may be assigned."""
        if (record := self.records.get(key)) is not None:
            record = copy.copy(record)
            self._put(self.records, key, record)
        return record

    def _save(self, key: K, record: R) -> None:
        """Store a record, and look at it when it is due."""
        self._put(self.records, key, record)
        self._schedule(key, record)

    def _undo(self) -> None:
        """Put back what the journal contains."""
        for entries, key, entry in reversed(self._journal):
            if entry is None:
                entries.pop(key, None)
            else:
                entries[key] = entry
        self._rebuild()  # Entries may have been taken from the heap.

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
            if len(self._wakes) > 2 * len(self.records) + SPARE:
                self._rebuild()

    def _tick(self, now: float) -> list[A]:
        """Set the time, and look at the records whose time has come."""
        self._now = max(self._now, now)
        actions: list[A] = []
        while self._wakes and self._wakes[0][0] <= self._now:
            *wake, key = heapq.heappop(self._wakes)
            known = self.records.get(key)
            if known is None or known.wake != tuple(wake):
                continue
            if (record := self._change(key)) is not None:
                record.wake = NEVER
                actions += self._wake(record)
                self._schedule(key, record)
        return actions

    def _wake(self, record: R, /) -> list[A]:
        """Look at a record. Return actions."""
        raise NotImplementedError
