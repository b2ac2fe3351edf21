"""The law of releases, law 12: each request is freed once, and not while a rank reads it.

How it works:
    A `Script` is a list of steps: a request is held, a reader has read it, a notification arrives,
    twice or never, time passes. `play` performs the steps on a state machine of the system, and
    keeps the truth apart from it: who has read what, and when each lease ends. Example with two
    readers, where the notification of the first one arrives twice:

        step              the system returns        the truth
        hold r0 (2)                                 c0 and c1 must read r0
        read 0            notify                    c0 has read
        repeat 0                                    the notification stays in the network
        deliver 0                                   one of two notices has arrived
        deliver 0         freed r0                  c1 has not read: the law is broken

    A system may free a request that was not read only after its lease. An abort is no exception: a
    reader may be reading at that time. The lease begins when the request is held. A system may
    extend it, for example while its readers send heartbeats, so a late release is no fault here.
    Steps of time depend on the lease, since a fixed number of seconds never comes close to the end
    of a long lease:

        step              time passes until
        wait 0.5          half a lease is over
        before 0          just before the lease of the first held request ends
        after 0           just after it

    At the end, readers read one after the other, and all notices arrive after each read. So a
    system that frees a request after some of many readers frees it before the others have read.

    >>> class Counting:
    ...     '''Counts notifications instead of readers.'''
    ...     lease = 10.0
    ...     def __init__(self): self.missing = {}
    ...     def hold(self, request, readers, now): self.missing[request] = len(readers); return []
    ...     def read_by(self, request, reader, now): return [("notify", request)]
    ...     def notification(self, notice, now):
    ...         self.missing[notice] -= 1
    ...         return [("freed", notice)] if self.missing[notice] == 0 else []
    ...     def time(self, now): return []
    ...     def abort(self, request, now): return []
    >>> steps = [("hold", 2), ("read", 0), ("repeat", 0), ("deliver", 0), ("deliver", 0)]
    >>> print(play(Counting, Script(steps)))
    r0 was freed at 0 s, before c1 has read it, and before its lease ends at 10 s
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import attrs

# Rounds after a script, each of a quarter of the lease, or of a second if there is no lease.
_ROUNDS = 24
# "Just before" the end of a lease, as a share of the lease: 7 ms of 30 s. A system may round times
# to milliseconds, so it is more than that. It is less than a tick. A power of two keeps sums exact.
_NEAR = 2.0**-12
# More readers than these are many, for the report.
_FEW = 3
# Within so many rounds, a request that all readers have read must be freed without its lease.
_PROMPT = 2


class Releasing(Protocol):
    """The release protocol of one producer rank and its readers, as a state machine without I/O.

    Each method returns events: ``("notify", notice)`` sends a notice, which any value may be, over
    a network that may delay it. ``("freed", request)`` frees the blocks of a request.

    Attributes:
        lease: Seconds after which a request may be freed although it was not read. `math.inf` if
            it never may.
    """

    lease: float

    def hold(self, request: str, readers: Sequence[str], now: float) -> Iterable[tuple[str, Any]]:
        """Hold the blocks of *request* until all *readers* have read them."""

    def read_by(self, request: str, reader: str, now: float) -> Iterable[tuple[str, Any]]:
        """Note on the side of *reader* that it has read the whole *request*."""

    def notification(self, notice: Any, now: float) -> Iterable[tuple[str, Any]]:  # noqa: ANN401
        """Receive a notice that an earlier event has sent."""

    def time(self, now: float) -> Iterable[tuple[str, Any]]:
        """Let time pass, to *now*."""

    def abort(self, request: str, now: float) -> Iterable[tuple[str, Any]]:
        """Abort *request* on the producer."""


ScriptStep = tuple[str, float]


def _steps(steps: Iterable[ScriptStep]) -> tuple[ScriptStep, ...]:
    return tuple(steps)


@attrs.frozen
class Script:
    """Steps, each a name and a number.

    Attributes:
        steps: "hold" with a number of readers, "again" likewise but with the last id that was
            freed, "read", "deliver", "repeat", "lose", "abort", "before" and "after" with a place
            among what is possible, "wait" with a number of leases, and "time" with seconds. Without
            a lease, "wait" counts seconds, and "before" and "after" do nothing.

    >>> Script([("hold", 2), ("read", 0)]).steps
    (('hold', 2), ('read', 0))
    """

    steps: tuple[ScriptStep, ...] = attrs.field(converter=_steps)


def play(release: Callable[[], Releasing], script: Script) -> str | None:
    """Return the first fault of a system in *script*, or None.

    Args:
        release: The function `System.release`.
        script: The steps.
    """
    try:
        _Play(release()).run(script)
    except _FaultError as fault:
        return str(fault)
    return None


class _FaultError(Exception):
    """The law is broken."""


@attrs.define(eq=False)
class _Hold:
    """The truth about one request.

    *leased* is true if only its lease may free it: a notice was lost, or its readers were told that
    it was aborted.
    """

    request: str
    readers: list[str]
    until: float
    read: set[str] = attrs.field(factory=set)
    freed: bool = False
    leased: bool = False

    @property
    def missing(self) -> list[str]:
        """The readers that have not read."""
        return [reader for reader in self.readers if reader not in self.read]


@attrs.define(eq=False)
class _Play:
    """One run of a script."""

    machine: Releasing
    now: float = 0.0
    holds: list[_Hold] = attrs.field(factory=list)
    # Notices that were not delivered yet, each with the hold whose reader has sent it.
    network: list[tuple[Any, _Hold | None]] = attrs.field(factory=list)

    def run(self, script: Script) -> None:
        """Perform all steps, and let all that is left end."""
        lease = getattr(self.machine, "lease", None)
        if not (isinstance(lease, (int, float)) and lease >= 0):
            raise _FaultError(f"lease={lease!r}: expected seconds >= 0, or math.inf")
        for name, number in script.steps:
            getattr(self, f"_{name}")(number)
        self._end()

    def _hold(self, readers: float, request: str = "") -> None:
        names = [f"c{reader}" for reader in range(int(readers))]
        request = request or f"r{len({hold.request for hold in self.holds})}"
        hold = _Hold(request, names, self.now + self.machine.lease)
        self.holds.append(hold)
        self._events(self.machine.hold(request, tuple(names), self.now), hold)

    def _again(self, readers: float) -> None:
        """Hold a request whose id was used before, and is free."""
        held = {hold.request for hold in self.holds if not hold.freed}
        free = [hold.request for hold in self.holds if hold.request not in held]
        if free:
            self._hold(readers, free[-1])

    def _read(self, at: float) -> None:
        # A reader does not know that a lease is over, so it may also read what was freed. Of two
        # holds of one id, the last one is read.
        last = {hold.request: hold for hold in self.holds}
        waiting = [(hold, reader) for hold in last.values() for reader in hold.missing]
        if waiting:
            hold, reader = waiting[int(at) % len(waiting)]
            hold.read.add(reader)
            self._events(self.machine.read_by(hold.request, reader, self.now), hold)

    def _deliver(self, at: float) -> None:
        if self.network:
            notice, hold = self.network.pop(int(at) % len(self.network))
            self._events(self.machine.notification(notice, self.now), hold)

    def _repeat(self, at: float) -> None:
        if self.network:
            self.network.append(self.network[int(at) % len(self.network)])

    def _lose(self, at: float) -> None:
        if self.network:
            _, hold = self.network.pop(int(at) % len(self.network))
            # Whose notice it was may be unknown. Then any request may have to wait for its lease.
            for each in self.holds if hold is None else [hold]:
                each.leased = True

    def _time(self, seconds: float) -> None:
        self.now += seconds
        self._events(self.machine.time(self.now), None)

    @property
    def lease(self) -> float:
        """Seconds of a lease, or one second if leases never end."""
        return 1.0 if math.isinf(self.machine.lease) else self.machine.lease

    def _wait(self, leases: float) -> None:
        self._time(leases * self.lease)

    def _before(self, at: float, sign: int = -1) -> None:
        ends = [hold.until for hold in self.holds if not hold.freed and math.isfinite(hold.until)]
        if ends:
            end = ends[int(at) % len(ends)] + sign * _NEAR * self.lease
            # Time never goes back, and this end may be over.
            self._time(max(end - self.now, 0.0))

    def _after(self, at: float) -> None:
        self._before(at, sign=1)

    def _abort(self, at: float) -> None:
        held = [hold for hold in self.holds if not hold.freed]
        if held:
            hold = held[int(at) % len(held)]
            hold.leased = True
            self._events(self.machine.abort(hold.request, self.now), hold)

    def _events(self, events: Any, hold: _Hold | None) -> None:  # noqa: ANN401 - of any form
        several = isinstance(events, Iterable) and not isinstance(events, str)
        for event in events if several else (() if events is None else (events,)):
            match event:
                case ("notify", notice):
                    self.network.append((notice, hold))
                case ("freed", request):
                    self._freed(request)
                case _:
                    expected = "('notify', notice) or ('freed', request)"
                    raise _FaultError(f"expected events {expected}, got {event!r}")

    def _freed(self, request: object) -> None:
        held = [hold for hold in self.holds if hold.request == request and not hold.freed]
        if not held:
            times = "twice" if any(h.request == request for h in self.holds) else "but never held"
            raise _FaultError(f"{request} was freed {times}, at {self.now:g} s")
        (hold,) = held
        if hold.missing and self.now < hold.until:
            lease = f"before its lease ends at {hold.until:g} s"
            if math.isinf(hold.until):
                lease = "it has no lease"
            raise _FaultError(
                f"{request} was freed at {self.now:g} s, before {', '.join(hold.missing)} has read"
                f" it, and {lease}"
            )
        hold.freed = True

    def _end(self) -> None:
        """Let each reader read, deliver all notices after each read, and let all leases end."""
        while any(hold.missing for hold in {h.request: h for h in self.holds}.values()):
            self._read(0)
            self._deliver_all()
        quarter = 1.0 if math.isinf(self.machine.lease) else self.machine.lease / 4
        for number in range(_ROUNDS):
            self._deliver_all()
            if number == _PROMPT:
                self._all_freed(hold for hold in self.holds if not hold.leased and not hold.missing)
            self._time(quarter / 4 if number < _PROMPT else quarter)
        self._all_freed(self.holds if math.isfinite(self.machine.lease) else ())

    def _deliver_all(self) -> None:
        # A system that answers each notice with a notice would never end.
        for _ in range(10 * len(self.network)):
            self._deliver(0)

    def _all_freed(self, holds: Iterable[_Hold]) -> None:
        for hold in holds:
            if not hold.freed:
                late = ", and its lease is over" if hold.until <= self.now else ""
                why = "all readers have read it" if not hold.missing else "nobody reads it"
                raise _FaultError(f"{hold.request} is not freed at {self.now:g} s: {why}{late}")


def values(script: Script) -> Iterator[str]:
    """Yield what makes a script hard, for the report."""
    names = {name for name, _ in script.steps}
    words = {
        "repeat": "repeated notifications",
        "lose": "lost notifications",
        "abort": "aborts",
        "again": "ids used again",
        "wait": "late notifications",
        "before": "leases that are almost over",
        "after": "leases that are over",
    }
    hard = [word for name, word in words.items() if name in names]
    if any(number > _FEW for name, number in script.steps if name in ("hold", "again")):
        hard.append("many readers")
    yield from hard or ["in order"]
