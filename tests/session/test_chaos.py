"""Law 12 over sessions: done loads are right, each request is freed once, and nothing is left.

Sessions, ledgers and NIXL ranks run over a fake NIXL, and a channel that loses, repeats, reorders
and forges messages. Clocks stand still and engines restart. Broken sessions break a `Promise`.
"""

# ruff: noqa: D102 - each rule of the machine is named after the step that it performs

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import session_faults as faults
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from session_world import PAIRS, World
from two_engines import Promise, cases_of, check_breaks, play

from kvspec.testing import FakeNixl

AT = st.integers(0, 50)
LANDS = ("land", "land", "land", "land", "part", "fail", "flip")
DELIVERS = ("once", "once", "once", "once", "twice", "lose")
FORGED = ("byte", "cut", "valid")


class Machine(RuleBasedStateMachine):
    """All steps of a world of sessions, in any order."""

    @initialize(pair=st.sampled_from(PAIRS), checksum=st.booleans())
    def begin(self, pair: Any, checksum: bool) -> None:
        self.stack = contextlib.ExitStack()
        net = self.stack.enter_context(FakeNixl())
        self.world = World(net, pair, checksum=checksum)

    @rule(tokens=st.integers(1, 18), cached=st.sampled_from((0, 0, 3, 20)), early=st.booleans())
    def admit(self, tokens: int, cached: int, early: bool) -> None:
        self.world.admit(tokens, cached, early=early)

    @rule(at=AT)
    def hold(self, at: int) -> None:
        self.world.hold(at)

    @rule(at=AT, how=st.sampled_from(("load", "load", "load", "decline")))
    def read(self, at: int, how: str) -> None:
        self.world.read(at, how)

    @rule(at=AT)
    def reread(self, at: int) -> None:
        self.world.reread(at)

    @rule(at=AT, how=st.sampled_from(LANDS))
    def land(self, at: int, how: str) -> None:
        self.world.land(at, how)

    @rule(at=AT, how=st.sampled_from(DELIVERS))
    def deliver(self, at: int, how: str) -> None:
        self.world.deliver(at, how)

    @rule(at=AT, how=st.sampled_from(FORGED))
    def forge(self, at: int, how: str) -> None:
        self.world.forge(at, how)

    @rule(at=AT)
    def abort(self, at: int) -> None:
        self.world.abort(at)

    @rule(at=AT)
    def cancel(self, at: int) -> None:
        self.world.cancel(at)

    @rule(seconds=st.sampled_from((0.5, 2.0, 5.0, 11.0)))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(name=st.sampled_from("PD"), really=st.sampled_from((False, False, False, True)))
    def restart(self, name: str, really: bool) -> None:
        if really:
            self.world.restart(name)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            with self.stack:
                try:
                    self.world.end()
                finally:
                    self.world.close()


TestSessions = Machine.TestCase
TestSessions.settings = settings(max_examples=25, stateful_step_count=40)


def chaos(seed: int, *, checksum: bool, steps: int = 120) -> World:
    """Perform steps that *seed* draws, then end everything."""
    drawn = random.Random(seed)
    small = lambda: drawn.randrange(51)  # noqa: E731
    with FakeNixl() as net:
        world = World(net, drawn.choice(PAIRS), checksum=checksum)
        try:
            play(drawn, steps, (
                (8, lambda: world.admit(
                    drawn.randint(1, 18), drawn.choice((0, 0, 3, 20)), early=drawn.random() < 0.3)),
                (6, lambda: world.hold(small())),
                (12, lambda: world.read(small(), "decline" if drawn.random() < 0.1 else "load")),
                (4, lambda: world.reread(small())),
                (20, lambda: world.land(small(), drawn.choice(LANDS * 2 + ("land",) * 6))),
                (40, lambda: world.deliver(small(), drawn.choice(DELIVERS + ("once",) * 9))),
                (3, lambda: world.forge(small(), drawn.choice(FORGED))),
                (4, lambda: world.abort(small())),
                (0.7, lambda: world.cancel(small())),
                (5, lambda: world.advance(drawn.choice((0.5, 1.0, 3.0, 6.0)))),
                (0.4, lambda: world.restart(drawn.choice("PD"))),
                (0.5, lambda: world.stop_clock(drawn.choice((2.0, 11.0)))),
            ))  # fmt: skip
            world.end()
        finally:
            world.close()
    return world


def test_sessions_keep_their_promises_in_any_order_of_steps() -> None:
    """Loads end as done and as failed, and requests are freed as done and as expired."""
    worlds = [chaos(seed, checksum=seed % 2 == 0) for seed in range(12)]
    assert {"done", "failed"} == set().union(*(world.outcomes for world in worlds))
    why = {why for world in worlds for entry in world.asked for why in entry.freed.values()}
    assert {"done", "expired"} == why


FAULTS: dict[str, dict[Any, Promise]] = {
    "whole": {
        faults.answers_are_not_awaited: Promise.VALID,
        faults.failed_load_ends_at_once: Promise.OWNED,
        faults.only_the_first_source_is_read: Promise.VALID,
        faults.seals_are_not_checked: Promise.UNREAD,
        faults.late_reader_is_sent_valid: Promise.VALID,
        faults.handles_are_not_released: Promise.ENDS,
        faults.free_request_is_reported_twice: Promise.FREED_ONCE,
        faults.earlier_load_answers_for_the_next: Promise.VALID,
    },
    "checksum": {
        faults.differences_are_ignored: Promise.VALID,
        faults.only_the_first_source_is_compared: Promise.VALID,
        faults.only_the_last_token_is_compared: Promise.VALID,
        faults.load_ends_before_it_is_compared: Promise.VALID,
    },
}


@pytest.mark.parametrize(
    ("mode", "fault", "promise"),
    # Few seeds show these faults, so the searches are long.
    cases_of(
        FAULTS,
        slow=[
            faults.only_the_first_source_is_compared,
            faults.earlier_load_answers_for_the_next,
            faults.only_the_last_token_is_compared,
        ],
    ),
)
def test_chaos_finds_the_promise_that_a_fault_breaks(
    mode: Any, fault: Any, promise: Promise, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fault breaks its promise within a hundred seeds, and no other promise before."""
    fault(monkeypatch)

    worlds = (chaos(seed, checksum=mode == "checksum") for seed in range(100))
    check_breaks(promise, worlds)
