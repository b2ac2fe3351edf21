"""The consumer's ledger: what a consumer rank waits for, and when the data is valid.

Invariant: a load is done only after all data of each source has arrived, and each source then
answered `valid`. Each fault fails the load with an error that names the fault. The blocks of the
load stay reserved until nothing in flight can write them.

Invariant: a load reads each source once.

A lease never makes a load done. Each side measures the lease by its own clock. The consumer's clock
may stop while the producer's clock runs, for example in a paused virtual machine.

How it works:
    `CONSUMER` in `kvspec.completion.states` contains each state, each event and the next state. The
    ledger executes its rows: `_take_row` takes the row of an event and calls the method that
    `ACTIONS` has for it. Some events are conditions (`_CONDITIONS`): after each change, `_advance`
    executes the row of a condition that holds. For example, the last step of a load ends:

        finish          everything was started, and no step is open
        _advance        moving + whole -> asking: a `Tell` of `done` for each producer rank
        receive valid   the source is valid
        _advance        asking + valid -> done: `Ended`
        _advance        done + answered -> forgotten: `Closed`
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import ClassVar, NamedTuple

import attrs
import msgspec

from kvspec.completion.ledger import (
    LEAST_INTERVAL,
    Action,
    Closed,
    Ended,
    Failed,
    Ledger,
    Record,
    Refused,
    Tell,
    recorded,
)
from kvspec.completion.states import CONSUMER, PUBLIC, row_of
from kvspec.errors import SpecError, TransferState
from kvspec.inputs import seconds
from kvspec.ownership.parallel import RankId
from kvspec.wire.messages import (
    Done,
    Gone,
    Heartbeat,
    Key,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
)

FREE_ID = "a new id, or one whose load has exchanged its last messages"
LoadName = tuple[Key, str, int]
"""Name of a load in messages: key, the producer's name and epoch."""


@attrs.frozen(kw_only=True)
class LoadPlan:
    """One request that one consumer rank reads.

    Attributes:
        request_id: The consumer's own id.
        key: The producer's name of the request.
        engine_id: Name of the producer.
        epoch: Incarnation of the producer.
        expected: For each producer rank that receives messages, how many readers it must expect.
        sources: The producer ranks that are read. Empty if nothing moves.
        checksum: Whether the data must be compared before the load is done.
        name: Name of the load in messages.
    """

    request_id: str
    key: Key
    engine_id: str
    epoch: int
    expected: Mapping[RankId, int]
    sources: tuple[RankId, ...] = ()
    checksum: bool = False
    name: LoadName = attrs.field(init=False)

    @name.default
    def _name(self) -> LoadName:
        return self.key, self.engine_id, self.epoch

    def about(
        self, by: RankAddress, rank: RankId, number: int = 0
    ) -> tuple[Key, RankAddress, RankAddress, int]:
        """Return the fields of a message about this load from *by* to a producer *rank*."""
        to = RankAddress(self.engine_id, self.epoch, rank)
        return self.key, by, to, number


NO_PLAN = LoadPlan(request_id="", key=Key("", b""), engine_id="", epoch=0, expected={})
"""The plan of a load until its producer is connected. No engine has an empty name."""


class Source(msgspec.Struct, eq=False):
    """One producer rank that a load reads.

    Attributes:
        started: Whether its step was started.
        valid: Whether the producer answered, after the last byte, that it still held the request.
    """

    started: bool = False
    valid: bool = False


class Step(NamedTuple):
    """The read of one source. It may write the blocks of the load until it is finished or failed.

    Attributes:
        request_id: The load.
        number: Number of the step.
        rank: The producer rank whose data moves.
    """

    request_id: str
    number: int
    rank: RankId


class OpenLoad(Record, eq=False):
    """One load in the ledger.

    Attributes:
        request_id: The consumer's own id.
        deadline: When the load fails, or when messages to silent producers are given up.
        state: The state in `CONSUMER`.
        plan: The plan, or `NO_PLAN` before the producer is connected.
        sources: The producer ranks that are read.
        steps: By number, the steps that may still write.
        uncompared: Whether data moves that was not compared yet, but must be.
        waiting: The producer ranks that have not sent their last answer, with the number of readers
            that each must expect.
        asked: Numbers of the questions whose answers count, from the first to the newest. All loads
            share one counter, so the range may contain numbers of other loads. An answer also
            contains the name of its load.
        next_message: When the next message is due.
    """

    request_id: str
    deadline: float
    state: str = "connecting"
    plan: LoadPlan = NO_PLAN
    sources: dict[RankId, Source] = msgspec.field(default_factory=dict)
    steps: dict[int, Step] = msgspec.field(default_factory=dict)
    uncompared: bool = False
    waiting: dict[RankId, int] = msgspec.field(default_factory=dict)
    asked: range = range(0)
    next_message: float = math.inf

    @property
    def due(self) -> float:
        """When the time changes something. Infinite in *draining* and *forgotten*."""
        if self.state in ("draining", "forgotten"):
            return math.inf
        return min(self.deadline, self.next_message)

    @property
    def arrived(self) -> bool:
        """Whether everything that moves has arrived, unless a step has failed."""
        return not self.steps and all(source.started for source in self.sources.values())


def refusal_of(answer: Message, load: OpenLoad | None, me: RankAddress) -> str:
    """Return why rank *me* does not expect *answer* about *load*, or "" if it does."""
    if load is None or answer.to != me:
        return "it belongs to no open load of this rank"
    rank, number = answer.by.rank, answer.number
    if not load.asked or rank not in load.plan.expected:
        return "its sender received no question"
    # Accept a late `lease`: it changes nothing, and a slow producer is not an error.
    if isinstance(answer, Lease) and number < load.asked.stop:
        return ""
    if not isinstance(answer, Lease | Valid | Gone):
        return "this kind is sent to producers only"
    return "" if number in load.asked and rank in load.waiting else "it is a repetition, or late"


class ConsumerLedger(Ledger[str, OpenLoad, Action]):
    """The loads of one consumer rank. Methods receive events, and append to `actions`.

    Args:
        me: Address of this rank.
        heartbeat: Seconds between heartbeats, and between repeats of unanswered messages. It must
            be less than half of the producer's lease.
        patience: Seconds for which a load that has ended repeats its last messages.
    """

    def __init__(self, me: RankAddress, *, heartbeat: float = 5.0, patience: float = 60.0) -> None:
        super().__init__(me)
        self.heartbeat = seconds("heartbeat", heartbeat, LEAST_INTERVAL)
        self.patience = seconds("patience", patience)
        self._names: dict[LoadName, str] = {}

    def clear(self) -> None:
        """Forget all loads, without actions."""
        super().clear()
        self._names.clear()

    @property
    def open(self) -> dict[str, str]:
        """State of each load that still sends or expects messages."""
        return {name: load.state for name, load in list(self.records.items())}

    @property
    def steps(self) -> int:
        """Number of steps that may still write."""
        return sum(len(load.steps) for load in list(self.records.values()))

    def question(self) -> int:
        """Return a new number for a heartbeat that belongs to no load yet."""
        return self._count("numbers", 1)

    def find(self, message: Message) -> str | None:
        """Return the id of the load that a producer's *message* is about."""
        by = message.by
        return self._names.get((message.key, by.engine_id, by.epoch))

    @recorded
    def begin(self, request_id: str, now: float, timeout: float) -> list[Action]:
        """Begin a load in the state *connecting*. It fails after *timeout* seconds.

        Raises:
            SpecError: If a load of this id is open.
        """
        if request_id in self.records:
            raise SpecError("request_id", request_id, FREE_ID)
        actions = self._tick(now)
        self._save(request_id, OpenLoad(request_id, self._now + timeout))
        return actions

    def assign(self, plan: LoadPlan) -> None:
        """Give a load its plan, so that its steps can start. Call `queued` after that.

        Raises:
            SpecError: If another load has the same name in messages.
        """
        load = self.records.get(plan.request_id)
        if load is None or load.plan is not NO_PLAN:
            raise SpecError("request_id", plan.request_id, "a load that waits for its producer")
        if plan.name in self._names:
            raise SpecError("key", plan.key, "a request whose earlier load is over")
        self._names[plan.name] = plan.request_id
        load.plan = plan
        load.sources = {rank: Source() for rank in plan.sources}
        load.uncompared = plan.checksum and bool(load.sources)

    @recorded
    def queued(self, request_id: str, now: float) -> list[Action]:
        """Record that all reads of a load are queued. Its heartbeats begin. Return actions.

        A load that moves no data is done at once.
        """
        load = self.records.get(request_id)
        if load is None or load.state != "connecting" or load.plan is NO_PLAN:
            raise SpecError("request_id", request_id, "a load that waits for its producer")
        self._set_time(now)
        # Take this step before the deadline check. A load that fails in *connecting* does not
        # inform its producers.
        return self._take_row(load, "queued") + self._tick(now)

    def uncompared(self, request_id: str) -> bool:
        """Return whether all data of a load has arrived, and must be compared now."""
        load = self.records.get(request_id)
        return load is not None and load.state == "moving" and load.uncompared and load.arrived

    @recorded
    def compared(self, request_id: str, now: float) -> list[Action]:
        """Record that the data of a load was compared and is equal. Return actions.

        If it differs, call `cancel`.
        """
        actions = self._tick(now)
        load = self.records.get(request_id)
        if load is None or load.state != "moving":
            return actions  # It failed meanwhile.
        load.uncompared = False
        return actions + self._advance(load)

    def start(self, request_id: str, source: RankId) -> Step:
        """Record that the read of a producer rank is about to be posted. It may write from now on.

        Raises:
            SpecError: If the load does not move, or the rank is read already.
        """
        load = self.records.get(request_id)
        moved = load.sources.get(source) if load is not None else None
        if (
            load is None
            or load.state not in ("connecting", "moving")
            or moved is None
            or moved.started
        ):
            raise SpecError("request_id", request_id, f"a load that is about to read {source}")
        moved.started = True
        step = Step(request_id, self._count("numbers", 1), source)
        load.steps[step.number] = step
        return step

    @recorded
    def finish(self, step: Step, now: float) -> list[Action]:
        """Record that all bytes of a step have arrived, and it writes no more. Return actions."""
        load = self._of(step)
        actions = self._tick(now)
        del load.steps[step.number]
        return actions + self._advance(load)

    @recorded
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
        load = self._of(step)
        actions = self._tick(now)
        if quiet:
            del load.steps[step.number]
        return actions + self._fault(load, why, state)

    @recorded
    def cancel(
        self,
        request_id: str,
        now: float,
        why: str = "cancelled",
        state: TransferState = TransferState.CANCELLED,
    ) -> list[Action]:
        """Cancel a load. If it has already ended, nothing changes. Return actions."""
        actions = self._tick(now)
        load = self.records.get(request_id)
        return actions + (self._fault(load, why, state) if load is not None else [])

    @recorded
    def receive(self, message: Message, now: float) -> list[Action]:
        """Process a message of a producer. Return actions."""
        actions = self._tick(now)
        load = self.records.get(self.find(message) or "")
        why = refusal_of(message, load, self.me)
        if load is None or why:
            return [*actions, Refused(message, why)]
        rank = message.by.rank
        source = load.sources.get(rank)
        if isinstance(message, Lease):
            return actions
        # In *moving* and *draining*, the question was a heartbeat. A producer that has aborted the
        # request frees it when it receives `done`, so this rank still has to send it.
        if load.state not in ("moving", "draining"):
            load.waiting.pop(rank, None)
        if source is not None and isinstance(message, Valid):
            # In *asking*, only `done` is open. It was sent after the last byte had arrived.
            source.valid |= load.state == "asking"
        elif source is not None and not source.valid:
            why = f"{message.by} aborted it, or its lease ended before it was read"
            return actions + self._fault(load, why, TransferState.GONE, rank)
        return actions + self._advance(load)

    @recorded
    def connect(self, engine_id: str, epoch: int, now: float) -> list[Action]:
        """Record the current incarnation of a producer. Loads of an earlier one fail.

        Returns:
            Actions.
        """
        self._connect(engine_id, epoch)
        actions = self._tick(now)
        for load in self._loads_of(engine_id):
            if load.plan.epoch != epoch:
                load.waiting = {}
                why = f"{engine_id} was restarted"
                actions += self._fault(load, why, TransferState.GONE)
        return actions

    @recorded
    def disconnect(self, engine_id: str) -> list[Action]:
        """Disconnect a producer. Its loads wait for no answer any more. Return actions."""
        actions = super().disconnect(engine_id)
        for load in self._loads_of(engine_id):
            load.waiting = {}
            actions += self._advance(load)
        return actions

    def _loads_of(self, engine_id: str) -> list[OpenLoad]:
        return [load for load in self.records.values() if load.plan.engine_id == engine_id]

    @recorded
    def lose(self, rank: RankAddress, now: float) -> list[Action]:
        """Record that a producer rank has ended: it answers nothing any more. Return actions.

        Loads that read from it fail, unless it has confirmed their data.
        """
        actions = self._tick(now)
        for load in list(self.records.values()):
            source, plan = load.sources.get(rank.rank), load.plan
            if (plan.engine_id, plan.epoch) != (rank.engine_id, rank.epoch):
                continue
            if source is not None and not source.valid:
                why, state = f"the process of {rank} has ended", TransferState.PEER_LOST
                actions += self._fault(load, why, state, rank.rank)
        return actions

    def _of(self, step: Step) -> OpenLoad:
        """Return the load of an open step."""
        load = self.records.get(step.request_id)
        if load is None or step.number not in load.steps:
            raise SpecError("step", step, "a step that is open")
        return load

    def _wake(self, load: OpenLoad, /) -> list[Action]:
        """Send or repeat the messages that are due, or end a load that is late."""
        if self._now < load.due:
            return []
        if self._now < load.deadline:
            moves = load.state == "moving"
            return self._send(load, Heartbeat if moves else Done, repeat=not moves)
        if (load.state, "time") in CONSUMER:
            return self._take_row(load, "time")
        why = "not there in time"
        if load.plan is NO_PLAN:
            why += ": its producer is not connected yet"
        return self._fault(load, why, TransferState.TIMEOUT)

    def _fault(
        self, load: OpenLoad, why: str, state: TransferState, rank: RankId | None = None
    ) -> list[Action]:
        """Execute the row of a fault. Only the first fault of a load becomes its error."""
        return self._take_row(load, "fault", Failed(load.request_id, why, state, rank))

    def _advance(self, load: OpenLoad) -> list[Action]:
        """Execute the row of the condition that leads out of the state, if it holds."""
        event, holds = _CONDITIONS.get(load.state, ("", None))
        return self._take_row(load, event) if holds and holds(load) else []

    def _take_row(self, load: OpenLoad, event: str, *failed: Failed) -> list[Action]:
        """Execute one row of the table, and those of all conditions that hold after it."""
        row = row_of("consumer", CONSUMER, load.state, event)
        public, load.state = PUBLIC[load.state], row.state
        actions = list[Action]()
        if PUBLIC[row.state] not in (public, ""):
            actions.append(Ended(load.request_id, PUBLIC[row.state]))
        if row.action == "fail":
            actions += failed
        elif row.action:
            actions += self.ACTIONS[row.action](self, load)
        self._schedule(load.request_id, load)
        return actions + self._advance(load)

    def _begin(self, load: OpenLoad) -> list[Action]:
        """Send the first heartbeats, unless the load moves nothing."""
        load.waiting = dict(load.plan.expected)
        return self._send(load, Heartbeat) if load.sources else []

    def _ask(self, load: OpenLoad) -> list[Action]:
        """Ask the producers whether the data was valid. Answers to heartbeats do not count now."""
        load.asked = range(0)
        return self._send(load, Done)

    def _await(self, load: OpenLoad) -> list[Action]:
        """Give the remaining producer ranks `patience` seconds to answer."""
        load.deadline = self._now + self.patience
        return []

    def _report(self, load: OpenLoad) -> list[Action]:
        """Inform the producers of a failure."""
        self._await(load)
        return self._ask(load)

    def _close(self, load: OpenLoad) -> list[Action]:
        self._names.pop(load.plan.name, None)
        del self.records[load.request_id]
        return [Closed(load.request_id)]

    def _send(
        self, load: OpenLoad, kind: type[ReaderStatus], *, repeat: bool = False
    ) -> list[Action]:
        """Send to each producer rank that has to answer. *repeat*: with the same number."""
        if not repeat:
            number = self._count("numbers", 1)
            load.asked = range(load.asked.start if load.asked else number, number + 1)
        load.next_message = self._now + self.heartbeat
        return [
            Tell(kind(*load.plan.about(self.me, rank, load.asked[-1]), expected=expected))
            for rank, expected in sorted(load.waiting.items())
        ]

    # The column `action` of `CONSUMER`. Arguments: ledger and load. The action `fail` returns the
    # `Failed` of its fault.
    ACTIONS: ClassVar[dict[str, Callable[..., list[Action]]]] = {
        "begin": _begin,
        "ask": _ask,
        "await": _await,
        "report": _report,
        "close": _close,
    }


_CONDITIONS: dict[str, tuple[str, Callable[[OpenLoad], bool]]] = {
    # A failed step leads out of *moving*. So here all ended steps have succeeded.
    "moving": ("whole", lambda load: load.arrived and not load.uncompared),
    "asking": ("valid", lambda load: all(source.valid for source in load.sources.values())),
    "draining": ("quiet", lambda load: not load.steps),
    "done": ("answered", lambda load: not load.waiting),
    "failed": ("answered", lambda load: not load.waiting),
}
"""For each state, the event that is a condition."""
