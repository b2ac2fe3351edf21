"""Law 12 over sessions: nothing done is wrong, each request is freed once, and nothing is left.

Real sessions, ledgers and NIXL ranks over memory, a channel that loses, doubles, reorders and
forges, a clock, restarts. A few broken sessions are caught by the same assertions.
"""

# ruff: noqa: D102 - the rules of the machine are named by what happens

from __future__ import annotations

import contextlib
import random
from typing import Any, Literal

import pytest
import session_faults as faults
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from session_world import MODES, PAIRS, Mode, World

from kvspec.completion.consumer import ConsumerLedger
from kvspec.completion.load_plan import Source
from kvspec.descriptors.tiles import Tables
from kvspec.nixl import Transfer
from kvspec.session import Load
from kvspec.session.loads import Loads
from kvspec.testing import FakeNixl
from kvspec.wire.messages import Gone, Message, Pushed, Valid
from kvspec.wire.seal import MAC, Secret

AT = st.integers(0, 50)
LANDS = ("land", "land", "land", "land", "part", "fail", "flip")
DELIVERS = ("once", "once", "once", "once", "twice", "lose")
FORGED = ("byte", "cut", "valid")


class Machine(RuleBasedStateMachine):
    """Anything that may happen to sessions of two engines, in any order."""

    @initialize(pair=st.sampled_from(PAIRS), mode=st.sampled_from(MODES), verify=st.booleans())
    def begin(self, pair: Any, mode: Mode, verify: bool) -> None:
        self.stack = contextlib.ExitStack()
        net = self.stack.enter_context(FakeNixl())
        self.world = World(net, pair, mode, verify=verify)

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

    @rule(at=AT, short=st.sampled_from((False, False, False, True)))
    def push(self, at: int, short: bool) -> None:
        self.world.push(at, short=short)

    @rule(at=AT, tokens=st.integers(1, 9), all_layers=st.booleans())
    def write(self, at: int, tokens: int, all_layers: bool) -> None:
        self.world.write(at, tokens, all_layers=all_layers)

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


def chaos(seed: int, mode: Mode, *, verify: bool, steps: int = 120) -> World:
    """Let anything happen to two engines, as *seed* has it."""
    drawn = random.Random(seed)
    small = lambda: drawn.randrange(51)  # noqa: E731
    with FakeNixl() as net:
        world = World(net, drawn.choice(PAIRS), mode, verify=verify)
        rules = {
            "admit": (8, lambda: world.admit(
                drawn.randint(1, 18), drawn.choice((0, 0, 3, 20)), early=drawn.random() < 0.3)),
            "hold": (6, lambda: world.hold(small())),
            "read": (12, lambda: world.read(
                small(), "decline" if drawn.random() < 0.1 else "load")),
            "reread": (4, lambda: world.reread(small())),
            "push": (15 * world.pushed, lambda: world.push(
                small(), short=drawn.random() < 0.1)),
            "write": (25 * world.follow, lambda: world.write(
                small(), drawn.randint(1, 9), all_layers=drawn.random() < 0.5)),
            "land": (20, lambda: world.land(small(), drawn.choice(LANDS * 2 + ("land",) * 6))),
            "deliver": (40, lambda: world.deliver(small(), drawn.choice(DELIVERS + ("once",) * 9))),
            "forge": (3, lambda: world.forge(small(), drawn.choice(FORGED))),
            "abort": (4, lambda: world.abort(small())),
            "cancel": (0.7, lambda: world.cancel(small())),
            "advance": (5, lambda: world.advance(drawn.choice((0.5, 1.0, 3.0, 6.0)))),
            "restart": (0.4, lambda: world.restart(drawn.choice("PD"))),
            "stop clock": (0.5, lambda: world.stop_clock(drawn.choice((2.0, 11.0)))),
        }  # fmt: skip
        weights = [weight for weight, _ in rules.values()]
        try:
            for _, act in drawn.choices(list(rules.values()), weights, k=steps):
                act()
            world.end()
        finally:
            world.close()
    return world


def test_anything_may_happen_to_sessions() -> None:
    """Whatever happens, no assertion of the world fails; and everything that may happen does."""
    for mode in MODES:
        worlds = [chaos(seed, mode, verify=seed % 2 == 0) for seed in range(8)]
        assert {"done", "failed"} == set().union(*(world.outcomes for world in worlds))
        why = {why for world in worlds for asked in world.asked for why in asked.freed.values()}
        assert {"done", "expired"} == why


def unasked(patch: pytest.MonkeyPatch) -> None:
    """Be done as soon as all is there, whether or not it was still held."""
    finish = ConsumerLedger.finish

    def believe(self: Any, step: Any, now: float) -> Any:
        for source in self._loads[step.request_id].sources.values():
            source.valid = True
        return finish(self, step, now)

    patch.setattr(ConsumerLedger, "finish", believe)


def hasty(patch: pytest.MonkeyPatch) -> None:
    """Be over as soon as it has failed."""
    fail = Load.fail

    def at_once(self: Any, *why: Any) -> None:
        fail(self, *why)
        self.state = "failed"

    patch.setattr(Load, "fail", at_once)


def one_source(patch: pytest.MonkeyPatch) -> None:
    """Read the first rank that has anything, and no other."""
    begin = Loads.begin

    def partly(self: Any, load: Any, remote: Any) -> None:
        lanes, remote.lanes = remote.lanes, dict([*remote.lanes.items()][:1])
        try:
            begin(self, load, remote)
        finally:
            remote.lanes = lanes

    patch.setattr(Loads, "begin", partly)


def unsealed(patch: pytest.MonkeyPatch) -> None:
    """Open whatever looks like a message."""
    patch.setattr(Secret, "unseal", lambda _, __, purpose, data, ___: data[len(purpose) + MAC :])


def unmarked(patch: pytest.MonkeyPatch) -> None:
    """Answer whoever is late that all was valid."""
    patch.setattr("kvspec.wire.messages.Message.answer", deceive(Message.answer))


def deceive(answer: Any) -> Any:
    """Return *answer*, which says valid for gone."""
    return lambda self, kind, **more: answer(self, Valid if kind is Gone else kind, **more)


def never_released(patch: pytest.MonkeyPatch) -> None:
    """Keep the handles of a transfer that failed, though they have ended."""
    patch.setattr(Transfer, "reap", lambda self: not self.live_handles)


def trusting(patch: pytest.MonkeyPatch) -> None:
    """Take whatever was pushed for what was asked for."""
    patch.setattr(Pushed, "differs", lambda *_: "")


def ahead(patch: pytest.MonkeyPatch) -> None:
    """Read whatever a message says of a layer up to its end."""
    wrote = Source.record
    patch.setattr(Source, "record", lambda self, place, _: wrote(self, place, 10**6))


def back(patch: pytest.MonkeyPatch) -> None:
    """Let a frontier go back to where a late message says, and read from there again."""

    def again(self: Any, place: Any, upto: int) -> None:
        if place in self.written:
            self.written[place] = min(upto, self.ends[place])
            self.started[place] = min(self.started[place], self.written[place])

    patch.setattr(Source, "record", again)


def states_early(patch: pytest.MonkeyPatch) -> None:
    """Move a state with the first step that any token of its group moves in."""
    patch.setattr(Tables, "reached", property(_hastily(Tables.reached.fget)))


def _hastily(reached: Any) -> Any:
    return lambda self: self.wanted if self.whole and self.tokens else reached(self)


def other_layers(patch: pytest.MonkeyPatch) -> None:
    """Take what is said of one layer for all layers of its group."""
    wrote = Source.record

    def all_of(self: Any, place: Any, upto: int) -> None:
        for other in self.ends:
            if other[0] == place[0]:
                wrote(self, other, upto)

    patch.setattr(Source, "record", all_of)


def half_way(patch: pytest.MonkeyPatch) -> None:
    """Be whole as soon as anything of a source has arrived."""
    finish = ConsumerLedger.finish

    def all_of_it(self: Any, step: Any, now: float) -> Any:
        load = self._loads[step.request_id]
        rank, tokens = load.steps[step.number]
        load.sources[rank].missing = tokens
        return finish(self, step, now)

    patch.setattr(ConsumerLedger, "finish", all_of_it)


def too_early(patch: pytest.MonkeyPatch) -> None:
    """Be done first, and compare then."""
    patch.setattr(Loads, "_arrive", lambda self, load, step: self._close(load, (step,)))


BROKEN: dict[Mode | Literal["verify"], tuple[Any, ...]] = {
    "pull": (
        unasked, hasty, one_source, unsealed, unmarked, never_released,
        faults.free_request_is_reported_twice, faults.earlier_load_answers_for_the_next,
    ),
    "push": (
        faults.outcome_is_sent_before_the_end, faults.reader_that_gave_up_is_forgotten, trusting,
        faults.first_push_answers_for_the_next,
    ),
    "follow": (ahead, back, states_early, other_layers, half_way),
    "verify": (
        faults.differences_are_ignored, faults.only_the_first_source_is_compared,
        faults.only_the_last_token_is_compared, too_early,
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("mode", "broken"), [(mode, broken) for mode, plants in BROKEN.items() for broken in plants]
)
def test_a_broken_session_is_caught(
    mode: Any, broken: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each fails an assertion of the world within some seeds."""
    broken(monkeypatch)

    def try_many() -> None:
        for seed in range(100):
            chaos(seed, "pull" if mode == "verify" else mode, verify=mode == "verify")

    with pytest.raises(AssertionError):
        try_many()
