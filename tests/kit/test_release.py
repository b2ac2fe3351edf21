"""Law 12: a system that frees blocks too early, twice or never breaks it, and kvspec does not."""

# ruff: noqa: D101, D102 - the protocol is documented in `release.Releasing`

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from kvspec_system import Ledgers

from kvspec.testing.kit import Supports, System, Verdict, judge
from kvspec.testing.kit.axes import AXES
from kvspec.testing.kit.judging import Profile
from kvspec.testing.laws.release import Script, play
from kvspec.testing.strategies import scripts

Events = list[tuple[str, Any]]
TINY = Profile("tiny", examples=1, each=2, everything=1, seconds=5.0, shrinking=0.0)


class Right:
    """A correct protocol: a set of readers for each hold, with a number that no other hold has."""

    lease = 10.0

    def __init__(self) -> None:
        self.held: dict[str, tuple[int, set[str], float]] = {}
        self.number = 0

    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        self.number += 1
        self.held[request] = self.number, set(readers), now + self.lease
        return []

    def read_by(self, request: str, reader: str, _now: float) -> Events:
        number = self.held[request][0] if request in self.held else 0
        return [("notify", (request, number, reader))]

    def notification(self, notice: Any, now: float) -> Events:
        request, number, reader = notice
        if request in self.held and self.held[request][0] == number:
            self.held[request][1].discard(reader)
        return self.time(now)

    def time(self, now: float) -> Events:
        over = [r for r, (_, missing, until) in self.held.items() if not missing or until <= now]
        for request in over:
            del self.held[request]
        return [("freed", request) for request in over]

    def abort(self, _request: str, now: float) -> Events:
        return self.time(now)


class CountsNotifications(Right):
    def notification(self, notice: Any, now: float) -> Events:
        request, _, _ = notice
        if request in self.held and self.held[request][1]:
            self.held[request][1].pop()
        return self.time(now)


class FreesOnAbort(Right):
    def abort(self, request: str, _now: float) -> Events:
        return [("freed", request)] if self.held.pop(request, None) else []


class IgnoresTheHold(Right):
    def notification(self, notice: Any, now: float) -> Events:
        request, _, reader = notice
        if request in self.held:
            self.held[request][1].discard(reader)
        return self.time(now)


class NeverExpires(Right):
    def time(self, _now: float) -> Events:
        return super().time(-math.inf)


class FreesTwice(Right):
    def time(self, now: float) -> Events:
        return super().time(now) * 2


class ExpiresEarly(Right):
    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        return super().hold(request, readers, now - 6)


class LongLeaseEndsAtHalf(Right):
    lease = 480.0

    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        return super().hold(request, readers, now - 240)


class ExpiresASecondEarly(Right):
    lease = 30.0

    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        return super().hold(request, readers, now - 1)


class ExpiresAMomentEarly(Right):
    lease = 30.0

    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        return super().hold(request, readers, now - 0.01)


class CountsToThree(Right):
    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        super().hold(request, readers, now)
        self.of = {**getattr(self, "of", {}), request: len(readers)}
        return []

    def notification(self, notice: Any, now: float) -> Events:
        request, number, _ = notice
        events = super().notification(notice, now)
        if request in self.held and self.held[request][0] == number:
            missing = self.held[request][1]
            if self.of[request] - len(missing) >= 3:
                missing.clear()
        return [*events, *self.time(now)]


class HoldsForSixteen(Right):
    def hold(self, request: str, readers: Sequence[str], now: float) -> Events:
        return super().hold(request, readers[:16], now)


class TellsNobody(Right):
    def read_by(self, _request: str, _reader: str, _now: float) -> Events:
        return []


class LongLease(Right):
    lease = 480.0


class NoLease(Right):
    lease = math.inf


@pytest.mark.parametrize("protocol", [Right, LongLease, NoLease, Ledgers])
@settings(max_examples=40, deadline=None)
@given(script=scripts())
def test_correct_protocol_keeps_law_12(protocol: Callable[[], Any], script: Script) -> None:
    assert play(protocol, script) is None


@pytest.mark.parametrize(
    ("protocol", "word"),
    [
        (CountsNotifications, "before"),
        (FreesOnAbort, "before"),
        (IgnoresTheHold, "before"),
        (NeverExpires, "not freed"),
        pytest.param(FreesTwice, "twice", marks=pytest.mark.slow),
        pytest.param(ExpiresEarly, "before", marks=pytest.mark.slow),
        pytest.param(LongLeaseEndsAtHalf, "before", marks=pytest.mark.slow),
        pytest.param(ExpiresASecondEarly, "before", marks=pytest.mark.slow),
        (ExpiresAMomentEarly, "before"),
        pytest.param(CountsToThree, "before", marks=pytest.mark.slow),
        pytest.param(HoldsForSixteen, "before", marks=pytest.mark.slow),
        (TellsNobody, "not freed"),
    ],
)
def test_law_12_finds_wrong_protocol(protocol: Callable[[], Any], word: str) -> None:
    system = System(name="bad", release=protocol)
    report = judge(system, profile=TINY, axes=[AXES[-1]])
    assert report.wrong
    found = report.wrong[0].wrong_case
    assert found is not None
    assert word in found.fault
    assert isinstance(found.case, Script)
    steps = found.case.steps
    fewer = [Script(steps[:at] + steps[at + 1 :]) for at in range(len(steps))]
    assert not any(play(protocol, script) for script in fewer), "a step is not needed"


@pytest.mark.parametrize("wrong", ["freed", ["freed"], [("freed",)], 5, [5], [("gone", "r0")]])
def test_law_12_names_an_event_of_wrong_form(wrong: object) -> None:
    class Wrong(Right):
        def time(self, _now: float) -> Any:
            return wrong

    fault = play(Wrong, Script([("hold", 1), ("wait", 0.5)]))
    assert fault is not None
    assert "('freed', request)" in fault
    assert repr(wrong).strip("[]")[:5] in fault


@pytest.mark.parametrize("lease", [-1.0, math.nan, "30", None])
def test_law_12_names_a_lease_that_is_no_time(lease: Any) -> None:
    class Wrong(Right):
        pass

    Wrong.lease = lease
    fault = play(Wrong, Script([("hold", 1)]))
    assert fault is not None
    assert f"lease={lease!r}" in fault


def test_report_names_many_readers_and_the_ends_of_leases() -> None:
    report = judge(System(name="right", release=Right), profile=TINY, axes=[AXES[-1]])
    assert not report.wrong
    values = {j.value for j in report.judgements if j.axis}
    assert {"many readers", "leases that are almost over", "leases that are over"} <= values


def test_law_12_judges_without_what_a_system_does_not_support() -> None:
    narrow = Supports(reused_ids=False, repeated=False, lost=False)
    system = System(name="counts", release=IgnoresTheHold, supports=narrow)
    report = judge(system, profile=TINY, axes=[AXES[-1]])
    verdicts = {j.verdict for j in report.judgements if j.law.number == 12}
    assert {Verdict.EXACT} == verdicts
