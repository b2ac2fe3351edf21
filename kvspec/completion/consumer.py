"""The consumer's ledger: what a consumer rank waits for, and when the data is valid.

Invariant: a request is ready only after every source and group has arrived, and each producer then
answered `valid`. Each fault fails the request by name. Its blocks stay reserved until nothing in
flight can write them.

A lease never makes a request ready. Two clocks measure the lease, and the consumer's clock may stop
while the producer's clock runs, for example in a paused virtual machine.

Each public method that changes the ledger either makes all its changes and returns the actions, or
raises and changes nothing. So a call that was interrupted, for example by `KeyboardInterrupt`, can
be repeated, and no action is lost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

from kvspec.completion.actions import Action, Closed, Failed, Present, Ready, Refused, Release, Tell
from kvspec.completion.load_plan import Frontiers, LoadPlan, Name, Place
from kvspec.completion.pending import Pending, Source, name_of, refusal_of
from kvspec.completion.states import CONSUMER
from kvspec.errors import SpecError, TransferState
from kvspec.inputs import seconds
from kvspec.ownership.parallel import RankId
from kvspec.wire.messages import (
    Done,
    Heartbeat,
    LayerProgress,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
)

T = TypeVar("T")


class ConsumerLedger:
    """The requests that one consumer rank reads. Methods receive events and return actions.

    Args:
        me: Address of this rank.
        heartbeat: Seconds between heartbeats, and between repeats of unanswered messages. It must
            be less than half of the producer's lease.
        patience: Seconds for which messages to a silent producer are repeated.
    """

    def __init__(self, me: RankAddress, *, heartbeat: float = 5.0, patience: float = 60.0) -> None:
        self.me = me
        self.heartbeat = seconds("heartbeat", heartbeat)
        self.patience = seconds("patience", patience)
        self._now = 0.0
        self._loads: dict[str, Pending] = {}
        self._names: dict[Name, str] = {}
        self._steps: dict[int, tuple[str, RankId, dict[Place, range]]] = {}
        self._numbers = 0
        self._present = Present()
        self._due = math.inf

    @property
    def open(self) -> dict[str, str]:
        """State of each request that still sends or expects messages."""
        return {name: load.state for name, load in self._loads.items()}

    @property
    def due(self) -> float | None:
        """Time of the next call of `tick`, or None."""
        return None if math.isinf(self._due) else self._due

    @property
    def steps(self) -> int:
        """Number of steps that may still write."""
        return len(self._steps)

    def check(self, plan: LoadPlan) -> None:
        """Check that *plan* can be expected.

        Raises:
            SpecError: If the request is open already, or the producer's incarnation is not the
                connected one.
        """
        if plan.request_id in self._loads:
            raise SpecError("request_id", plan.request_id, "the id of no open request")
        if self._present.past(plan.engine_id, plan.epoch):
            raise SpecError("epoch", plan.epoch, f"the connected incarnation of {plan.engine_id}")
        if plan.name in self._names:
            raise SpecError("key", plan.key, "an attempt and sample that no open request has")

    def expect(self, plan: LoadPlan, now: float, timeout: float) -> list[Action]:
        """Begin a request: wait for the data of *plan* for at most *timeout* seconds.

        Returns:
            Actions. A request that moves no data is ready at once.
        """
        self.check(plan)
        most = seconds("timeout", timeout)
        return self._whole(now, None, lambda: self._expect(plan, now, most))

    def forget(self, plan: LoadPlan) -> None:
        """Forget a request that sent no message yet."""
        load = self._loads.pop(plan.request_id, None)
        self._names.pop(plan.name, None)
        for step in load.steps if load is not None else ():
            self._steps.pop(step, None)

    def _expect(self, plan: LoadPlan, now: float, timeout: float) -> list[Action]:
        actions = self._tick(now)
        load = Pending(plan, self._now + timeout)
        self._loads[plan.request_id] = load
        self._names[load.plan.name] = plan.request_id
        for rank, ends in plan.sources.items():
            if ends:
                load.sources[rank] = Source(Frontiers(ends, partial=plan.partial))
        load.untold = set(plan.expected)
        self._due = min(self._due, load.due)
        actions += self._tell(load, Heartbeat) if load.sources else []
        return actions + self._moved(load)

    def readable(self, request_id: str) -> dict[RankId, dict[Place, int]]:
        """Return the data that can be read now.

        Returns:
            By source and layer, the position up to which it is written.
        """
        load = self._loads.get(request_id)
        if load is None or load.state != "moving":
            return {}
        ready = {rank: source.frontiers.readable() for rank, source in load.sources.items()}
        return {rank: places for rank, places in ready.items() if places}

    def start(
        self,
        request_id: str,
        source: RankId,
        group: str,
        layers: Iterable[str] | None = None,
        upto: int | None = None,
    ) -> int:
        """Record that a step is about to be posted. It may write from now on.

        For pushed data, a step begins when the producer learns the blocks, and ends when it answers
        that the data is written.

        Args:
            request_id: The request.
            source: Rank of the producer.
            group: Group of the layers.
            layers: Names of layers. All layers of the group by default.
            upto: Position behind the last token to move. By default, the end of the request.

        Returns:
            The number of the step.

        Raises:
            SpecError: If the request does not move, or the step would move data twice or before it
                was written.
        """
        return self._whole(
            self._now, request_id, lambda: self._start(request_id, source, group, layers, upto)
        )

    def _start(
        self,
        request_id: str,
        source: RankId,
        group: str,
        layers: Iterable[str] | None,
        upto: int | None,
    ) -> int:
        load = self._loads.get(request_id)
        if load is None or load.state != "moving" or source not in load.sources:
            raise SpecError("request_id", request_id, f"a request that moves from {source}")
        moved = load.sources[source].frontiers.start(group, layers, upto)
        self._numbers += 1
        self._steps[self._numbers] = request_id, source, moved
        load.steps.add(self._numbers)
        return self._numbers

    def finish(self, step: int, now: float) -> list[Action]:
        """Record that all bytes of a step have arrived, and it writes no more. Return actions."""
        return self._whole(now, self._reads(step), lambda: self._finish(step, now))

    def _finish(self, step: int, now: float) -> list[Action]:
        actions = self._tick(now)
        load, rank, moved = self._ended(step)
        if load.state == "moving":
            source = load.sources[rank]
            source.frontiers.finish(moved)
            source.whole = source.frontiers.whole
            return actions + self._moved(load)
        return actions + self._quiet(load)

    def fail(
        self,
        step: int,
        why: str,
        now: float,
        *,
        quiet: bool = True,
        state: TransferState = TransferState.GONE,
    ) -> list[Action]:
        """Record that a step failed. Its data is void. Return actions.

        Args:
            step: Number of the step.
            why: Reason.
            now: Time in seconds.
            quiet: Whether the step can write no more. If not, call `finish` or `fail` again later.
            state: State of the error, if this is the first fault of the request.
        """
        return self._whole(
            now, self._reads(step), lambda: self._fail(step, why, now, state, quiet=quiet)
        )

    def _fail(
        self, step: int, why: str, now: float, state: TransferState, *, quiet: bool
    ) -> list[Action]:
        actions = self._tick(now)
        if quiet:
            load = self._ended(step)[0]
            return actions + self._fault(load, why, state) + self._quiet(load)
        known = self._steps.get(step)
        if known is None:
            raise SpecError("step", step, "a step that is open")
        return actions + self._fault(self._loads[known[0]], why, state)

    def cancel(
        self,
        request_id: str,
        now: float,
        why: str = "cancelled",
        state: TransferState = TransferState.STOPPED,
    ) -> list[Action]:
        """Give a request up. If it has already ended, nothing changes. Return actions."""
        return self._whole(now, request_id, lambda: self._cancel(request_id, now, why, state))

    def _cancel(self, request_id: str, now: float, why: str, state: TransferState) -> list[Action]:
        actions = self._tick(now)
        load = self._loads.get(request_id)
        return actions + (self._fault(load, why, state) if load else [])

    def receive(self, message: Message, now: float) -> list[Action]:
        """Process a message of a producer. Return actions."""
        name = self._names.get(name_of(message), "")
        # A frontier grows in one line, so `progress`, which is frequent, needs no copy.
        copied = None if isinstance(message, LayerProgress) else name
        return self._whole(now, copied, lambda: self._receive(name, message, now))

    def _receive(self, name: str, message: Message, now: float) -> list[Action]:
        actions = self._tick(now)
        load = self._loads.get(name)
        why = refusal_of(message, load, self.me)
        if load is None or why is not None:
            return [*actions, Refused(message, why or "of no request that is open")]
        rank = message.by.rank
        if isinstance(message, LayerProgress):
            if rank in load.sources:
                load.sources[rank].frontiers.record((message.group, message.layer), message.upto)
            return actions
        del load.asked[rank][message.number]
        if not isinstance(message, Lease):
            load.untold.discard(rank)
            if isinstance(message, Valid):
                # Only questions asked after everything arrived have an answer in this state.
                if load.state == "asking" and rank in load.sources:
                    load.sources[rank].valid = True
            elif rank in load.sources and not load.sources[rank].sound:
                why = f"{message.by} freed it before it was read"
                actions += self._fault(load, why, TransferState.GONE)
        return actions + self._moved(load) + self._told(load)

    def connect(self, engine_id: str, epoch: int, now: float) -> list[Action]:
        """Record the current incarnation of a producer, and return actions.

        Requests of an earlier incarnation fail.
        """
        return self._whole(math.inf, None, lambda: self._meet(engine_id, epoch, now))

    def _meet(self, engine_id: str, epoch: int, now: float) -> list[Action]:
        actions = self._tick(now)
        self._present.connect(engine_id, epoch)
        for load in list(self._loads.values()):
            if load.plan.engine_id == engine_id and load.plan.epoch != epoch:
                load.untold.clear()
                why = f"{engine_id} was restarted"
                actions += self._fault(load, why, TransferState.GONE)
                actions += self._told(load)
        return actions

    def disconnect(self, engine_id: str) -> None:
        """Forget a producer."""
        self._present.disconnect(engine_id)

    def tick(self, now: float) -> list[Action]:
        """Process the time, and return actions.

        Heartbeats and repeated messages are sent, and late requests fail.
        """
        return self._whole(now, None, lambda: self._tick(now))

    def open_steps(self, request_id: str) -> frozenset[int]:
        """Return the steps of a request that may still write."""
        load = self._loads.get(request_id)
        return frozenset() if load is None else frozenset(load.steps)

    def _reads(self, step: int) -> str | None:
        """Return the id of the request that a step reads."""
        known = self._steps.get(step)
        return None if known is None else known[0]

    def _whole(self, now: float, request_id: str | None, act: Callable[[], T]) -> T:
        """Return what *act* returns; undo all that it changed if an exception leaves it.

        *act* may change the request *request_id*, and every request once `tick` is due at *now*.
        """
        due = now >= self._due
        copied = {
            name: load.copied() for name, load in self._loads.items() if due or name == request_id
        }
        # The order of requests stays, since `tick` tells of them in this order.
        loads = {name: copied.get(name, load) for name, load in self._loads.items()}
        names, steps = dict(self._names), dict(self._steps)
        clock = self._now, self._numbers, self._due
        try:
            return act()
        except BaseException:
            self._loads, self._names, self._steps = loads, names, steps
            self._now, self._numbers, self._due = clock
            raise

    def _tick(self, now: float) -> list[Action]:
        self._now = max(self._now, seconds("now", now))
        actions: list[Action] = []
        if self._now < self._due:
            return actions
        for load in list(self._loads.values()):
            if load.state in ("moving", "asking") and self._now >= load.deadline:
                actions += self._fault(load, "not there in time", TransferState.TIMEOUT)
            elif load.state == "telling" and self._now >= load.deadline:
                load.untold.clear()
                actions += self._told(load)
            elif load.state != "draining" and self._now >= load.next_tell:
                moves = load.state == "moving"
                actions += self._tell(load, Heartbeat if moves else Done, again=not moves)
        waiting = (load.due for load in self._loads.values() if load.state != "draining")
        self._due = min(waiting, default=math.inf)
        return actions

    def _tell(
        self, load: Pending, kind: type[ReaderStatus], *, again: bool = False
    ) -> list[Action]:
        """Tell every producer rank that has not answered for good; *again*: by the same number."""
        if not again:
            self._numbers += 1
            load.number = self._numbers
        load.next_tell = self._now + self.heartbeat
        self._due = min(self._due, load.due)
        actions: list[Action] = []
        for rank in sorted(load.untold):
            load.ask(rank, self._now, self.patience)
            actions.append(Tell(load.message(kind, self.me, rank)))
        return actions

    def _ended(self, step: int) -> tuple[Pending, RankId, Mapping[Place, range]]:
        """Close an open step."""
        known = self._steps.pop(step, None)
        if known is None:
            raise SpecError("step", step, "a step that is open")
        load = self._loads[known[0]]
        load.steps.discard(step)
        return load, known[1], known[2]

    def _moved(self, load: Pending) -> list[Action]:
        """Ask, once everything arrived; be ready, once it was valid."""
        actions: list[Action] = []
        if load.state == "moving" and all(s.whole for s in load.sources.values()):
            load.state = CONSUMER["moving", "whole"].state
            load.asked.clear()
            actions += self._tell(load, Done)
        if load.state == "asking" and all(source.sound for source in load.sources.values()):
            load.state = CONSUMER["asking", "sound"].state
            load.deadline = self._now + self.patience
            self._due = min(self._due, load.due)
            actions.append(Ready(load.plan.request_id))
            actions += self._told(load)
        return actions

    def _fault(self, load: Pending, why: str, state: TransferState) -> list[Action]:
        """Fail a request that has not ended, once, and let go of it when nothing writes it."""
        failed = CONSUMER[load.state, "fault"]
        load.state = failed.state
        if failed.done != "fail":
            return []
        return [Failed(load.plan.request_id, why, state), *self._quiet(load)]

    def _quiet(self, load: Pending) -> list[Action]:
        """Release a failed request's blocks once no step is open, and tell the producers then."""
        if load.state != "draining" or load.steps:
            return []
        load.state = CONSUMER["draining", "quiet"].state
        load.deadline = self._now + self.patience
        load.asked.clear()
        if load.plan.again:
            load.untold.clear()
        told = self._tell(load, Done)
        return [Release(load.plan.request_id), *told, *self._told(load)]

    def _told(self, load: Pending) -> list[Action]:
        """Close a request once nobody is left to be told."""
        if load.state != "telling" or load.untold:
            return []
        load.state = CONSUMER["telling", "told"].state
        del self._loads[load.plan.request_id], self._names[load.plan.name]
        self._due = self._due if self._loads else math.inf
        return [Closed(load.plan.request_id)]
