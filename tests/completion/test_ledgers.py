"""Law 12: each request is freed once, after its last reader; what failed never becomes readable.

Over any plan and any order of lost, doubled, early, late, foreign and reordered messages,
heartbeats, aborts, restarts and frontiers. A dozen broken ledgers are caught by the same
assertions.
"""

# ruff: noqa: D102 - the rules of the machine are named by what happens

from __future__ import annotations

import random
from typing import Any

import attrs
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule
from ledger_world import World
from msgspec.structs import replace

import kvspec
from kvspec.completion.actions import Free, Tell
from kvspec.completion.consumer import ConsumerLedger
from kvspec.completion.producer import ProducerLedger
from kvspec.completion.states import CONSUMER, PRODUCER, PUSH
from kvspec.testing import strategies
from kvspec.wire.messages import Done, Heartbeat, Lease, Message, ReaderStatus, Valid

AT = st.integers(0, 50)
FORGED = ("copy", "nonce", "id", "epoch", "start", "number", "fewer", "more", "stranger")
ENDS = ("done", "done", "done", "done", "failed", "hangs")


class Machine(RuleBasedStateMachine):
    """Anything that may happen to two engines, in any order."""

    world: World

    @initialize(
        pair=strategies.engine_pairs(largest=4),
        replica_policy=st.sampled_from(("spread", "stripe")),
    )
    def begin(self, pair: Any, replica_policy: Any) -> None:
        self.world = World(kvspec.plan_transfer(*pair, replica_policy=replica_policy))

    @rule(samples=st.sampled_from((1, 1, 2)), moved=st.integers(0, 7), partial=st.booleans(),
          sure=st.booleans(), old=st.integers(0, 2))  # fmt: skip
    def admit(self, samples: int, moved: int, partial: bool, sure: bool, old: int) -> None:
        self.world.admit(samples, moved, partial=partial, sure=sure, old=old)

    @rule(at=AT)
    def admit_rank(self, at: int) -> None:
        self.world.admit_rank(at)

    @rule(at=AT, again=st.booleans(), rejected=st.sampled_from((False, False, False, True)),
          connecting=st.booleans())  # fmt: skip
    def expect_rank(self, at: int, again: bool, rejected: bool, connecting: bool) -> None:
        self.world.expect_rank(at, again=again, rejected=rejected, connecting=connecting)

    @rule(at=AT)
    def connect_rank(self, at: int) -> None:
        self.world.connect_rank(at)

    @rule(at=AT, upto=st.sampled_from((6, 6, 2, 3)))
    def start(self, at: int, upto: int) -> None:
        self.world.start(at, upto)

    @rule(at=AT, how=st.sampled_from(ENDS))
    def finish(self, at: int, how: str) -> None:
        self.world.finish(at, how)

    @rule(at=AT, upto=st.integers(1, 6))
    def record_progress(self, at: int, upto: int) -> None:
        self.world.record_progress(at, upto)

    @rule(at=AT, twice=st.booleans())
    def deliver(self, at: int, twice: bool) -> None:
        self.world.deliver(at, twice=twice)

    @rule(at=AT)
    def lose(self, at: int) -> None:
        self.world.lose(at)

    @rule(at=AT, how=st.sampled_from(FORGED))
    def forge(self, at: int, how: str) -> None:
        self.world.forge(at, how)

    @rule(at=AT)
    def abort(self, at: int) -> None:
        self.world.abort(at)

    @rule(at=AT)
    def give_up(self, at: int) -> None:
        self.world.give_up(at)

    @rule(at=AT)
    def begin_push(self, at: int) -> None:
        self.world.begin_push(at)

    @rule(at=AT, fails=st.booleans())
    def end_push(self, at: int, fails: bool) -> None:
        self.world.end_push(at, fails=fails)

    @rule(at=AT)
    def cancel(self, at: int) -> None:
        self.world.cancel(at)

    @rule(at=AT)
    def retry(self, at: int) -> None:
        self.world.retry(at)

    @rule(at=AT)
    def reread(self, at: int) -> None:
        self.world.reread(at)

    @rule(seconds=st.sampled_from((0.5, 2.0, 5.0, 11.0)))
    def advance(self, seconds: float) -> None:
        self.world.advance(seconds)

    @rule(seconds=st.sampled_from((2.0, 11.0, 41.0)))
    def stop_clock(self, seconds: float) -> None:
        self.world.stop_clock(seconds)

    @rule(name=st.sampled_from("PD"), really=st.sampled_from((False, False, True)))
    def restart(self, name: str, really: bool) -> None:
        if really:
            self.world.restart(name)

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.end()


TestLedgers = Machine.TestCase
TestLedgers.settings = settings(max_examples=60, stateful_step_count=60)


def engine(tp: int, heads: int, pp: int = 1) -> kvspec.EngineSpec:
    """Return an engine of two groups, one layer of each on every stage."""
    full = kvspec.FullAttentionSpec(
        block_size=4, total_num_kv_heads=heads, head_size=2, dtype="uint8"
    )
    latent = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    groups = [
        kvspec.KVCacheGroup(name="full", layers=["l.0", "l.2"], spec=full),
        kvspec.KVCacheGroup(name="latent", layers=["l.1", "l.3"], spec=latent),
    ]
    parallel = kvspec.ParallelConfig(tp_size=tp, pp_size=pp)
    return kvspec.EngineSpec(groups=groups, parallel=parallel)


PLANS = tuple(
    kvspec.plan_transfer(engine(p, heads, pp), engine(d, heads))
    for p, d, heads, pp in ((1, 1, 2, 1), (2, 1, 2, 1), (1, 2, 2, 1), (4, 2, 2, 1), (2, 3, 6, 1),
                            (1, 2, 2, 2))
)  # fmt: skip


def chaos(seed: int, steps: int = 160, **ledgers: Any) -> World:
    """Let anything happen to two engines, as *seed* has it."""
    drawn = random.Random(seed)
    world = World(drawn.choice(PLANS), **ledgers)
    small = lambda: drawn.randrange(51)  # noqa: E731
    rules = {
        "admit": (3, lambda: world.admit(
            drawn.choice((1, 1, 2)), drawn.randrange(4), partial=drawn.random() < 0.2,
            sure=drawn.random() < 0.3, old=drawn.randrange(2))),
        "admit rank": (8, lambda: world.admit_rank(small())),
        "expect": (9, lambda: world.expect_rank(
            small(), again=drawn.random() < 0.4, rejected=drawn.random() < 0.1,
            connecting=drawn.random() < 0.2)),
        "connect": (4, lambda: world.connect_rank(small())),
        "start": (25, lambda: world.start(small(), drawn.choice((6, 6, 3)))),
        "finish": (25, lambda: world.finish(small(), drawn.choice(ENDS * 2 + ("done",) * 8))),
        "progress": (3, lambda: world.record_progress(small(), drawn.randrange(1, 7))),
        "deliver": (30, lambda: world.deliver(small(), twice=drawn.random() < 0.2)),
        "lose": (1, lambda: world.lose(small())),
        "forge": (3, lambda: world.forge(small(), drawn.choice(FORGED))),
        "abort": (0.3, lambda: world.abort(small())),
        "give up": (3, lambda: world.give_up(small())),
        "begin push": (3, lambda: world.begin_push(small())),
        "end push": (2, lambda: world.end_push(small(), fails=drawn.random() < 0.4)),
        "cancel": (0.5, lambda: world.cancel(small())),
        "retry": (3, lambda: world.retry(small())),
        "reread": (3, lambda: world.reread(small())),
        "advance": (4, lambda: world.advance(drawn.choice((0.5, 1.0, 3.0, 6.0)))),
        "restart": (0.2, lambda: world.restart(drawn.choice("PD"))),
        "stop clock": (0.5, lambda: world.stop_clock(drawn.choice((2.0, 11.0)))),
    }  # fmt: skip
    weights = [weight for weight, _ in rules.values()]
    for _, act in drawn.choices(list(rules.values()), weights, k=steps):
        act()
    world.end()
    return world


def calm(seed: int, **ledgers: Any) -> World:
    """Read a few requests with no fault but the order of what happens: all are ready, all sent."""
    drawn = random.Random(seed)
    world = World(drawn.choice(PLANS), **ledgers)
    for number in range(3):
        world.admit(drawn.choice((1, 2)), drawn.randrange(4), partial=False,
                    sure=drawn.random() < 0.3, old=number)  # fmt: skip
    for _ in range(2000):
        drawn.choice((
            lambda: world.admit_rank(drawn.randrange(9)),
            lambda: world.expect_rank(drawn.randrange(9), again=False, rejected=False),
            lambda: world.start(drawn.randrange(50), 6),
            lambda: world.finish(drawn.randrange(50), "done"),
            lambda: world.deliver(drawn.randrange(50)),
        ))()  # fmt: skip
        world.advance(0.004)
    world.end()
    assert {"ready"} == {load.outcome for load in world.loads}
    assert {"sent"} == {why for request in world.requests for why in request.freed.values()}
    return world


def test_all_requests_are_ready_when_nothing_fails() -> None:
    """Requests of any plan, samples and full hits are all ready, and freed as sent."""
    for seed in range(20):
        calm(seed)


def test_law_holds_whatever_happens() -> None:
    """Nothing is left over, freed twice, freed too early, or ready with void data."""
    worlds = [chaos(seed) for seed in range(150)]
    outcomes = {load.outcome for world in worlds for load in world.loads}
    why = {why for world in worlds for r in world.requests for why in r.freed.values()}
    assert {"ready", "failed", "died"} == outcomes
    assert {"sent", "expired", "aborted"} == why


class RecordingTable(dict[Any, Any]):
    """A table that knows which of its rows were looked up."""

    def __init__(self, table: Any) -> None:
        super().__init__(table)
        self.rows: set[Any] = set()

    def __getitem__(self, row: Any) -> Any:
        self.rows.add(row)
        return super().__getitem__(row)


def test_every_row_of_the_tables_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Chaos uses each row of the tables."""
    tables = {
        "producer.PRODUCER": RecordingTable(PRODUCER),
        "producer.PUSH": RecordingTable(PUSH),
        "consumer.CONSUMER": RecordingTable(CONSUMER),
    }
    for name, table in tables.items():
        monkeypatch.setattr(f"kvspec.completion.{name}", table)
    for seed in range(120):
        chaos(seed, steps=400)
    for name, table in tables.items():
        assert set(table) == table.rows, name


class ByTotal(ProducerLedger):
    """Count `done` messages instead of readers."""

    def receive(self, message: Any, now: float) -> Any:
        """Count each `done` as that of another reader."""
        self.extra = getattr(self, "extra", 0) + 1
        by = replace(message.by, rank=kvspec.RankId(tp=1000 + self.extra))
        request = self._requests.get(message.key)
        known = request and request.state == "held" and request.reader(message.by, message.sample)
        if message.kind == "done" and known and known.done:
            super().receive(replace(message, by=by), now)
        return super().receive(message, now)


class ByRequest(ProducerLedger):
    """Identify a request by its request id alone."""

    def receive(self, message: Any, now: float) -> Any:
        """Accept any nonce."""
        same = [key for key in self.held if key.request_id == message.key.request_id]
        return super().receive(replace(message, key=[*same, message.key][0]), now)


class OnAbort(ProducerLedger):
    """Free on abort."""

    def abort(self, key: Any, now: float) -> Any:
        """Free at once."""
        actions = super().abort(key, now)
        held = self.find(key)
        return actions + (self._step(held, "complete") if held else [])


class FirstCount(ProducerLedger):
    """Use the number of readers of the first message for all."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace every later count by the first."""
        request = self._requests.get(message.key)
        name = message.by.engine_id, message.by.epoch
        incarnation = request and request.incarnations.get(name)
        if incarnation and isinstance(message, ReaderStatus):
            message = replace(message, expected=incarnation.expected)
        return super().receive(message, now)


class NoEarly(ProducerLedger):
    """Answer early messages with `gone`."""

    def _keep(self, request: Any, message: Any, _: str) -> Any:
        return self._gone(request, message, _)

    def _step(self, request: Any, event: str, message: Any = None) -> Any:
        if request.state == "unknown" and event in ("heartbeat", "done"):
            return self._keep(request, message, "unknown")
        return super()._step(request, event, message)


class NoFence(ProducerLedger):
    """Answer late `done` messages with `valid`."""

    def _step(self, request: Any, event: str, message: Any = None) -> Any:
        if request.state == "freed" and event == "done":
            return [Tell(message.answer(Valid))]
        return super()._step(request, event, message)


class NoBeats(ProducerLedger):
    """Send leases, and do not extend them."""

    def _deliver(self, request: Any, message: Any) -> Any:
        expires = request.expires
        actions = super()._deliver(request, message)
        if request.state == "held":
            request.expires = expires
        return actions


class Twice(ProducerLedger):
    """Free a request again when it is forgotten."""

    def tick(self, now: float) -> Any:
        """Free all requests that this call forgets."""
        before = {key for key, request in self._requests.items() if request.state == "freed"}
        actions = super().tick(now)
        return actions + [Free(key, "expired") for key in before if key not in self._requests]


class AnyStart(ProducerLedger):
    """Accept messages of earlier incarnations."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace the epoch."""
        epoch = self._present._epochs.get(message.by.engine_id, message.by.epoch)
        return super().receive(replace(message, by=replace(message.by, epoch=epoch)), now)


class AnyRank(ProducerLedger):
    """Do not distinguish the ranks of an engine."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace the rank, and expect one reader."""
        message = replace(message, by=replace(message.by, rank=kvspec.RankId()))
        if isinstance(message, ReaderStatus):
            message = replace(message, expected=1)
        return super().receive(message, now)


class Everlasting(ProducerLedger):
    """Never forget a freed request."""

    def tick(self, now: float) -> Any:
        """Restore the forgotten requests."""
        kept = {k: r for k, r in self._requests.items() if r.state == "freed"}
        actions = super().tick(now)
        self._requests.update(kept)
        return actions


class ByAttempt(ProducerLedger):
    """Answer another load of a reader as the first one."""

    def receive(self, message: Message, now: float) -> Any:
        """Replace the message by the `done` of the first load."""
        request = self._requests.get(message.key)
        seen = request.reader(message.by, message.sample) if request else None
        other = not isinstance(message, ReaderStatus)
        if other or seen is None or not seen.done or seen.message.attempt != message.attempt:
            return super().receive(message, now)
        fields = {field: getattr(message, field) for field in Done.__struct_fields__}
        actions = super().receive(Done(**fields | {"number": seen.message.number}), now)
        return [
            Tell(replace(action.message, number=message.number))
            if isinstance(action, Tell)
            else action
            for action in actions
        ]


class Repeating(ProducerLedger):
    """Extend the lease for a copy of a heartbeat."""

    def receive(self, message: Any, now: float) -> Any:
        """Answer the copy as the original."""
        request = self._requests.get(message.key)
        reader = request.reader(message.by, message.sample) if request else None
        copy = reader is not None and reader.message == message
        if not copy or not isinstance(message, Heartbeat) or not request or request.state != "held":
            return super().receive(message, now)
        request.expires = max(request.expires, now + self.lease)
        return [Tell(message.answer(Lease, lease=self.lease))]


class Unfenced(ProducerLedger):
    """Forget the readers that gave a push up."""

    def _push_message(self, request: Any, message: Any) -> Any:
        actions = super()._push_message(request, message)
        target = message.attempt, message.sample, message.by
        if request.push(target).state == "stopped":
            del request.pushes[target]
            self.pushes -= 1
        return actions


class Impatient(ProducerLedger):
    """Answer `stop` while bytes of the write may still move."""

    def _push(self, request: Any, target: Any, event: str, pushed: Any = None) -> Any:
        hasty = event == "stop" and request.push(target).in_flight
        return super()._push(request, target, "failed" if hasty else event, pushed)


class Renumbered(ConsumerLedger):
    """Number the questions of each load from one on."""

    def _send(self, load: Any, kind: str, *, again: bool = False) -> Any:
        kept, self._numbers = self._numbers, load.number
        actions = super()._send(load, kind, again=again)
        self._numbers = kept
        return actions


class Unasked(ConsumerLedger):
    """Be ready as soon as all is there, whether or not it was still held."""

    def finish(self, step: Any, now: float) -> Any:
        """Believe every source."""
        load = self._loads[step.request_id]
        for source in load.sources.values():
            source.valid = True
        return super().finish(step, now)


class Leased(ConsumerLedger):
    """Be ready without the producer's answer while a granted lease lasts by the own clock."""

    def receive(self, message: Any, now: float) -> Any:
        """Remember until when the producer holds the request."""
        load = self._loads.get(self.find(message) or "")
        asked = load.asked.get(message.by.rank, {}).get(message.number) if load else None
        if message.kind == "lease" and asked is not None:
            self.leases = getattr(self, "leases", {}) | {
                (load.request_id, message.by.rank): asked + message.lease - 0.01
            }
        return super().receive(message, now)

    def finish(self, step: Any, now: float) -> Any:
        """Take what arrives during the lease for valid."""
        name = step.request_id
        rank, _ = self._loads[name].steps[step.number]
        if now < getattr(self, "leases", {}).get((name, rank), -1.0):
            self._loads[name].sources[rank].valid = True
        return super().finish(step, now)


class OneSource(ConsumerLedger):
    """Be ready when one source is whole."""

    def _advance(self, load: Any) -> Any:
        if load.state == "moving" and any(not s.missing for s in load.sources.values()):
            load.sources = {r: s for r, s in load.sources.items() if not s.missing}
        return super()._advance(load)


class AtOnce(ConsumerLedger):
    """Release the blocks of what failed at once."""

    def _advance(self, load: Any) -> Any:
        if load.state != "draining":
            return super()._advance(load)
        steps, load.steps = load.steps, {}
        actions = super()._advance(load)
        load.steps = steps
        return actions


class OnlySources(ConsumerLedger):
    """Forget the producer ranks that nobody reads."""

    def expect(self, order: Any, now: float, timeout: float) -> Any:
        """Tell the sources alone."""
        told = {rank: n for rank, n in order.expected.items() if rank in order.sources}
        return super().expect(attrs.evolve(order, expected=told), now, timeout)


class Stubborn(ConsumerLedger):
    """Go on where a read has failed."""

    def fail(self, step: Any, why: str, now: float, *, quiet: bool = True) -> Any:
        """Take a failed read for one that is done."""
        return self.finish(step, now) if quiet and why else self.tick(now)


CALM = 8
"""Seeds that are tried without a fault too."""
BROKEN = {
    "producer": (ByTotal, ByRequest, OnAbort, FirstCount, NoEarly, NoFence, NoBeats, Twice,
                 AnyStart, AnyRank, Everlasting, ByAttempt, Repeating, Unfenced, Impatient),
    "consumer": (Unasked, Leased, OneSource, AtOnce, OnlySources, Stubborn, Renumbered),
}  # fmt: skip


@pytest.mark.parametrize(
    ("side", "ledger"), [(side, each) for side, kinds in BROKEN.items() for each in kinds]
)
def test_broken_ledger_is_caught(side: str, ledger: type) -> None:
    """Each fails an assertion within a thousand seeds, most within a hundred."""

    def try_many() -> None:
        for seed in range(1000):
            if seed < CALM:
                calm(seed, **{side: ledger})
            chaos(seed, **{side: ledger})

    with pytest.raises(AssertionError):
        try_many()
