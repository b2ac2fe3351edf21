"""The consumer's ledger: what a consumer rank waits for, and when the data is valid.

Invariant: a load is done only after all data of each source has arrived, and each source then
answered `valid`. Each fault fails the load by name. Its blocks stay reserved until nothing in
flight can write them.

A lease never makes a load done. Two clocks measure the lease, and the consumer's clock may stop
while the producer's clock runs, for example in a paused virtual machine.

How it works:
    `CONSUMER` in `kvspec.completion.states` contains each state, each event and the next state. The
    ledger executes its rows: `_step` takes the row of an event and calls the method that the row
    names (`_ACTS`). Some events are conditions (`_CONDITIONS`): after each change, `_advance`
    executes the row of a condition that holds. For example, the last step of a load ends:

        finish          missing = 0
        _advance        moving + whole -> verifying: send `done` to each producer rank
        receive valid   the source is valid
        _advance        verifying + valid -> done: `Ended`
        _advance        done + answered -> forgotten: `Closed`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar, NamedTuple

import attrs

from kvspec.completion.actions import Action, Closed, Ended, Failed, Refused, Tell
from kvspec.completion.ledger import Ledger, atomic
from kvspec.completion.load_plan import LoadPlan, Name, Place, Source
from kvspec.completion.states import CONSUMER, PUBLIC
from kvspec.errors import SpecError, TransferState
from kvspec.inputs import seconds
from kvspec.ownership.parallel import RankId
from kvspec.wire.messages import (
    Done,
    Gone,
    Heartbeat,
    Key,
    LayerProgress,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
)

FREE_ID = "a new id, or one whose load has exchanged its last messages"


class Step(NamedTuple):
    """A part of a load that may write its blocks, until it is finished or has failed."""

    request_id: str
    number: int


@attrs.define(eq=False)
class OpenLoad:
    """One load in the ledger.

    Attributes:
        request_id: The consumer's own id.
        deadline: When the load fails, or when messages to silent producers are given up.
        state: The state in `CONSUMER`.
        plan: The plan, once the producer is connected.
        sources: The producer ranks that are read.
        steps: By number, the source and the tokens of each step that may still write.
        asked: By rank and number, when each message was sent that has no answer yet.
        unanswered: The producer ranks that have not sent their last answer.
        number: Number of the last message.
        next_message: When the next message is due.
        wake: When the ledger looks at this load next, and the order in that moment.
    """

    request_id: str
    deadline: float
    state: str = "connecting"
    plan: LoadPlan | None = None
    sources: dict[RankId, Source] = attrs.field(factory=dict)
    steps: dict[int, tuple[RankId, int]] = attrs.field(factory=dict)
    asked: dict[RankId, dict[int, float]] = attrs.field(factory=dict)
    unanswered: set[RankId] = attrs.field(factory=set)
    number: int = 0
    next_message: float = math.inf
    wake: tuple[float, int] = (math.inf, 0)

    @property
    def due(self) -> float:
        """When the time changes something. Never while the blocks of a failure may be written."""
        return math.inf if self.state == "draining" else min(self.deadline, self.next_message)

    def copied(self) -> OpenLoad:
        """Return a copy that later changes of this one do not reach."""
        sources = {rank: source.copied() for rank, source in self.sources.items()}
        asked = {rank: dict(numbers) for rank, numbers in self.asked.items()}
        # Much faster than `attrs.evolve`, and each call of the ledger copies a load.
        return OpenLoad(
            self.request_id, self.deadline, self.state, self.plan, sources, dict(self.steps), asked,
            set(self.unanswered), self.number, self.next_message, self.wake,
        )  # fmt: skip


def name_of(answer: Message) -> Name:
    """Return the name of the load that a producer's message is about."""
    return answer.key, answer.attempt, answer.sample, answer.by.engine_id, answer.by.epoch


def about(
    name: Name, by: RankAddress, rank: RankId, number: int = 0
) -> tuple[Key, RankAddress, RankAddress, int, int, int]:
    """Return the fields of a consumer's message about the load *name*, to a producer *rank*."""
    key, attempt, sample, engine_id, epoch = name
    return key, by, RankAddress(engine_id, epoch, rank), attempt, number, sample


def refusal_of(answer: Message, load: OpenLoad | None, me: RankAddress) -> str | None:
    """Return why rank *me* does not expect *answer* about *load*, or None if it does."""
    if load is None or answer.to != me:
        return "it belongs to no open load of this rank"
    if answer.by.rank not in load.asked:
        return "its sender received no question"
    # A lease changes nothing, and that of a healthy producer may be late.
    late = isinstance(answer, Lease) and answer.number <= load.number
    if late or isinstance(answer, LayerProgress):
        return None
    if not isinstance(answer, Lease | Valid | Gone):
        return "only producers receive this kind"
    if answer.number not in load.asked[answer.by.rank]:
        return "the answer is a repetition, or late"
    return None


class ConsumerLedger(Ledger[str, OpenLoad]):
    """The loads of one consumer rank. Methods receive events and return actions.

    Args:
        me: Address of this rank.
        heartbeat: Seconds between heartbeats, and between repeats of unanswered messages. It must
            be less than half of the producer's lease.
        patience: Seconds for which messages to a silent producer are repeated.
    """

    numbers: ClassVar[tuple[str, ...]] = ("_now", "_numbers")

    def __init__(self, me: RankAddress, *, heartbeat: float = 5.0, patience: float = 60.0) -> None:
        super().__init__(me)
        self.heartbeat = seconds("heartbeat", heartbeat)
        self.patience = seconds("patience", patience)
        self._loads = self._records
        self._names: dict[Name, str] = {}
        self._numbers = 0

    @property
    def open(self) -> dict[str, str]:
        """State of each load that still sends or expects messages."""
        return {name: load.state for name, load in list(self._loads.items())}

    @property
    def steps(self) -> int:
        """Number of steps that may still write."""
        return sum(len(load.steps) for load in list(self._loads.values()))

    def find(self, message: Message) -> str | None:
        """Return the id of the load that a producer's *message* is about."""
        return self._find(name_of(message))

    @atomic
    def begin(self, request_id: str, now: float, timeout: float) -> list[Action]:
        """Begin a load in the state *connecting*. It fails after *timeout* seconds.

        Raises:
            SpecError: If a load of this id is open.
        """
        return self._begin(request_id, now, timeout)

    @atomic
    def assign(self, plan: LoadPlan) -> None:
        """Give a load its plan, so that its steps can start. Call `connected` after that.

        Raises:
            SpecError: If another load has the same name in messages, or the producer's incarnation
                is not the connected one.
        """
        self._assign(plan)

    @atomic
    def connected(self, request_id: str, now: float) -> list[Action]:
        """Record that all reads of a load are posted. Its heartbeats begin. Return actions."""
        load = self._touch(request_id)
        if load is None or load.state != "connecting" or load.plan is None:
            raise SpecError("request_id", request_id, "a load that waits for its producer")
        self._now = max(self._now, now)
        # Before the deadline is checked: only a load that was connected informs its producers.
        return self._step(load, "connected") + self._tick(now)

    @atomic
    def expect(self, plan: LoadPlan, now: float, timeout: float) -> list[Action]:
        """Begin a load whose producer is connected. Return actions.

        A load that moves no data is done at once.
        """
        actions = self._begin(plan.request_id, now, timeout)
        return actions + self._step(self._assign(plan), "connected")

    def readable(self, request_id: str) -> dict[RankId, dict[Place, range]]:
        """Return the positions that can be read now, by source and layer."""
        load = self._loads.get(request_id)
        if load is None or load.state != "moving":
            return {}
        ready = {rank: source.readable() for rank, source in load.sources.items()}
        return {rank: places for rank, places in ready.items() if places}

    def started(self, request_id: str) -> bool:
        """Return whether steps were started for everything that a load moves."""
        load = self._loads.get(request_id)
        return load is None or all(s.started == s.ends for s in load.sources.values())

    @atomic
    def start(
        self, request_id: str, source: RankId, upto: Mapping[Place, int] | None = None
    ) -> Step:
        """Record that a step is about to be posted. It may write from now on.

        For pushed data, a step begins when the producer learns the blocks, and ends when it answers
        that the data is written.

        Args:
            request_id: The load.
            source: Rank of the producer.
            upto: For each layer that moves, the position behind the last token. By default, all
                layers move to their ends.

        Returns:
            The step.

        Raises:
            SpecError: If the load does not move, or the step would move data twice or before it
                was written.
        """
        load = self._touch(request_id)
        if load is None or load.state not in ("connecting", "moving") or source not in load.sources:
            raise SpecError("request_id", request_id, f"a load that moves from {source}")
        known = load.sources[source]
        tokens = known.start(known.ends if upto is None else upto)
        self._numbers += 1
        load.steps[self._numbers] = source, tokens
        return Step(request_id, self._numbers)

    @atomic
    def finish(self, step: Step, now: float) -> list[Action]:
        """Record that all bytes of a step have arrived, and it writes no more. Return actions."""
        actions = self._tick(now)
        load, (rank, tokens) = self._end(step)
        load.sources[rank].missing -= tokens
        return actions + self._advance(load)

    @atomic
    def fail(
        self,
        step: Step,
        why: str,
        now: float,
        *,
        quiet: bool = True,
        state: TransferState = TransferState.GONE,
    ) -> list[Action]:
        """Record that a step failed. Its data is void. Return actions.

        Args:
            step: The step.
            why: Reason.
            now: Time in seconds.
            quiet: Whether the step can write no more. If not, call `finish` or `fail` again later.
            state: State of the error, if this is the first fault of the load.
        """
        actions = self._tick(now)
        load, moved = self._end(step)
        if not quiet:
            load.steps[step.number] = moved
        return actions + self._fault(load, why, state)

    @atomic
    def cancel(
        self,
        request_id: str,
        now: float,
        why: str = "cancelled",
        state: TransferState = TransferState.STOPPED,
    ) -> list[Action]:
        """Give a load up. If it has already ended, nothing changes. Return actions."""
        actions = self._tick(now)
        load = self._touch(request_id)
        return actions + self._fault(load, why, state) if load is not None else actions

    @atomic
    def receive(self, message: Message, now: float) -> list[Action]:
        """Process a message of a producer. Return actions."""
        actions = self._tick(now)
        load = self._loads.get(self.find(message) or "")
        why = refusal_of(message, load, self.me)
        if load is None or why is not None:
            return [*actions, Refused(message, why or "")]
        rank = message.by.rank
        source = load.sources.get(rank)
        if isinstance(message, LayerProgress):
            # A frontier grows in one line, so `progress`, which is frequent, needs no copy.
            if source is not None:
                source.record((message.group, message.layer), message.upto)
            return actions
        self._touch(load.request_id)
        load.asked[rank].pop(message.number, None)  # A late lease has no question any more.
        if isinstance(message, Lease):
            return actions
        load.unanswered.discard(rank)
        if source is not None and isinstance(message, Valid):
            # Only a question that was asked after everything arrived has an answer in this state.
            source.valid = source.valid or load.state == "verifying"
        elif source is not None and not source.sound:
            why = f"{message.by} aborted it, or its lease ended before it was read"
            return actions + self._fault(load, why, TransferState.GONE)
        return actions + self._advance(load)

    @atomic
    def connect(self, engine_id: str, epoch: int, now: float) -> list[Action]:
        """Record the current incarnation of a producer. Loads of an earlier one fail.

        Returns:
            Actions.
        """
        actions = self._tick(now)
        self._present.connect(engine_id, epoch)
        for load in list(self._loads.values()):
            plan = load.plan
            if plan is not None and plan.engine_id == engine_id and plan.epoch != epoch:
                self._touch(load.request_id)
                load.unanswered.clear()
                why = f"{engine_id} was restarted"
                actions += self._fault(load, why, TransferState.GONE)
        return actions

    @atomic
    def tick(self, now: float) -> list[Action]:
        """Process the time, and return actions.

        Heartbeats and repeated messages are sent, and late loads fail.
        """
        return self._tick(now)

    def open_steps(self, request_id: str) -> frozenset[Step]:
        """Return the steps of a load that may still write."""
        load = self._loads.get(request_id)
        return frozenset(Step(request_id, number) for number in (load.steps if load else ()))

    def _find(self, name: Name) -> str | None:
        """Return the id of the load of a *name*. An interrupted call may leave a name behind."""
        request_id = self._names.get(name, "")
        load = self._loads.get(request_id)
        known = load is not None and load.plan is not None and load.plan.name == name
        return request_id if known else None

    def _put_back(self, key: str, record: OpenLoad | None) -> None:
        super()._put_back(key, record)
        if record is not None and record.plan is not None:
            self._names[record.plan.name] = key

    def _begin(self, request_id: str, now: float, timeout: float) -> list[Action]:
        if request_id in self._loads:
            raise SpecError("request_id", request_id, FREE_ID)
        actions = self._tick(now)
        self._touch(request_id)
        load = self._loads[request_id] = OpenLoad(request_id, self._now + timeout)
        self._schedule(load)
        return actions

    def _assign(self, plan: LoadPlan) -> OpenLoad:
        load = self._touch(plan.request_id)
        if load is None or load.plan is not None:
            raise SpecError("request_id", plan.request_id, "a load that waits for its producer")
        if self._present.is_other(plan.engine_id, plan.epoch):
            raise SpecError("epoch", plan.epoch, f"the connected incarnation of {plan.engine_id}")
        if self._find(plan.name) is not None:
            raise SpecError("key", plan.key, "an attempt and sample whose earlier load is over")
        load.plan = plan
        self._names[plan.name] = plan.request_id
        load.sources = {
            rank: Source.of(ends, partial=plan.partial)
            for rank, ends in plan.sources.items()
            if ends
        }
        return load

    def _end(self, step: Step) -> tuple[OpenLoad, tuple[RankId, int]]:
        """Close an open step. Return its load, its source and its tokens."""
        load = self._touch(step.request_id)
        if load is None or step.number not in load.steps:
            raise SpecError("step", step, "a step that is open")
        return load, load.steps.pop(step.number)

    def _tick(self, now: float) -> list[Action]:
        actions: list[Action] = []
        for load in self._woken(now):
            load.wake = math.inf, 0
            if self._now < load.due:
                pass
            elif self._now < load.deadline:
                moves = load.state == "moving"
                actions += self._send(load, Heartbeat if moves else Done, again=not moves)
            elif (load.state, "time") in CONSUMER:
                actions += self._step(load, "time")
            else:
                why = "not there in time"
                if load.plan is None:
                    why += ": its producer is not connected yet"
                actions += self._fault(load, why, TransferState.TIMEOUT)
            self._schedule(load)
        return actions

    def _schedule(self, load: OpenLoad) -> None:
        """Look at *load* when it is due. The entry may be too early, but never too late."""
        if load.due < load.wake[0] and load.state != "forgotten":
            self._look_at(load.request_id, load, load.due)

    def _fault(self, load: OpenLoad, why: str, state: TransferState) -> list[Action]:
        """Execute the row of a fault. Only the first fault of a load becomes its error."""
        return self._step(load, "fault", [Failed(load.request_id, why, state)])

    def _advance(self, load: OpenLoad) -> list[Action]:
        """Execute the row of the condition that leads out of the state, if it holds."""
        if load.state not in _CONDITIONS:
            return []
        event, holds = _CONDITIONS[load.state]
        return self._step(load, event) if holds(load) else []

    def _step(self, load: OpenLoad, event: str, failed: Sequence[Failed] = ()) -> list[Action]:
        """Execute one row of the table, and those of all conditions that hold after it."""
        row = CONSUMER[load.state, event]
        public, load.state = PUBLIC[load.state], row.state
        actions: list[Action] = []
        if PUBLIC[row.state] not in (public, ""):
            actions.append(Ended(load.request_id, PUBLIC[row.state]))
        actions += failed if row.action == "fail" else ()
        if row.action in _ACTS:
            actions += _ACTS[row.action](self, load)
        self._schedule(load)
        return actions + self._advance(load)

    def _start_heartbeats(self, load: OpenLoad) -> list[Action]:
        """Send the first heartbeats. A load that moves nothing is complete and sends none."""
        load.unanswered = set(load.plan.expected) if load.plan is not None else set()
        return self._send(load, Heartbeat) if load.sources else []

    def _ask(self, load: OpenLoad) -> list[Action]:
        """Ask the producers whether the data was valid. Answers to heartbeats do not count now."""
        load.asked.clear()
        return self._send(load, Done)

    def _await(self, load: OpenLoad) -> list[Action]:
        """Give the other producers time to answer."""
        load.deadline = self._now + self.patience
        return []

    def _release(self, load: OpenLoad) -> list[Action]:
        """Inform the producers of a failure, unless another attempt follows."""
        if load.plan is not None and load.plan.again:
            load.unanswered.clear()
        self._await(load)
        return self._ask(load)

    def _close(self, load: OpenLoad) -> list[Action]:
        self._touch(load.request_id)
        if load.plan is not None:
            self._names.pop(load.plan.name, None)
        self._loads.pop(load.request_id, None)
        if not self._loads:
            self._wakes.clear()
        return [Closed(load.request_id)]

    def _send(
        self, load: OpenLoad, kind: type[ReaderStatus], *, again: bool = False
    ) -> list[Action]:
        """Send to each producer rank that has to answer. *again*: with the same number."""
        plan = load.plan
        if plan is None:
            return []
        if not again:
            self._numbers += 1
            load.number = self._numbers
        load.next_message = self._now + self.heartbeat
        actions: list[Action] = []
        for rank in sorted(load.unanswered):
            asked = load.asked.setdefault(rank, {})
            for old in [n for n, at in asked.items() if at < self._now - self.patience]:
                del asked[old]
            asked[load.number] = self._now
            fields = about(plan.name, self.me, rank, load.number)
            actions.append(Tell(kind(*fields, expected=plan.expected[rank])))
        return actions


_ACTS: dict[str, Callable[[ConsumerLedger, OpenLoad], list[Action]]] = {
    "begin": ConsumerLedger._start_heartbeats,  # noqa: SLF001
    "ask": ConsumerLedger._ask,  # noqa: SLF001
    "await": ConsumerLedger._await,  # noqa: SLF001
    "release": ConsumerLedger._release,  # noqa: SLF001
    "close": ConsumerLedger._close,  # noqa: SLF001
}
"""The method of each action in the table. `_step` itself does "fail"."""

_CONDITIONS: dict[str, tuple[str, Callable[[OpenLoad], bool]]] = {
    "moving": ("whole", lambda load: not any(s.missing for s in load.sources.values())),
    "verifying": ("valid", lambda load: all(s.sound for s in load.sources.values())),
    "draining": ("quiet", lambda load: not load.steps),
    "done": ("answered", lambda load: not load.unanswered),
    "failed": ("answered", lambda load: not load.unanswered),
}
"""For each state, the event that is a condition."""
