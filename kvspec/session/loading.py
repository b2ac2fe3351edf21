"""The consumer's side of a session: its loads, and what of them is in flight.

Invariant: the ledger decides when a load is done or over. It is told that a step is finished when
the last byte has arrived, and that a step has failed for good when no byte can arrive any more.

Invariant: an interrupt between any two lines loses no action of the ledger. A call of the ledger
and the recording of its actions are one line. The actions are carried out from the record, at once
or at the next poll. Carrying out an action twice has the effect of once. If the caller of `load` is
interrupted, the load is stopped, and its blocks are freed when nothing can write them.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable

import attrs
import msgspec

from kvspec.completion.actions import Action, Closed, Failed, Ready, Refused, Release, Tell
from kvspec.completion.consumer import ConsumerLedger
from kvspec.completion.load_plan import LoadPlan
from kvspec.completion.pending import about, name_of
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, instance, seconds
from kvspec.memory.rank_cache import RankCache
from kvspec.nixl import NixlRank, Transfer
from kvspec.ownership.parallel import RankId
from kvspec.session.checksums import Audit
from kvspec.session.following import Frontiers, advances, ends_of, start
from kvspec.session.load import LOST, InFlight, Load
from kvspec.session.remotes import ReadOptions
from kvspec.session.written import BlockLocks, Blocks, pushed_of
from kvspec.wire.messages import (
    Checksum,
    ChecksumUnavailable,
    LayerProgress,
    Message,
    PushDone,
    PushStopped,
    StopWriting,
)

TURN = 0.02  # seconds in which transfers are moved on, before anything else has its turn


@attrs.frozen(eq=False)
class Orphan:
    """The claim and the transfers of a load whose caller was interrupted and never received it."""

    owner: int
    blocks: Blocks
    transfers: tuple[Transfer, ...]

    @property
    def over(self) -> bool:
        """Whether no byte of it can move any more; nothing more is posted."""
        with contextlib.suppress(TransferError):  # of a rank that is closed
            for transfer in self.transfers:
                transfer.stop("its load was interrupted", TransferState.STOPPED)
        return all(transfer.over for transfer in self.transfers)


@attrs.define(eq=False)
class Loading:
    """The loads of one rank, by request: what *book* knows of them, and what *nixl* moves.

    Attributes:
        recorded: Actions of the ledger that are still to be carried out, in order.
    """

    book: ConsumerLedger
    nixl: NixlRank
    cache: RankCache
    now: Callable[[], float]
    tell: Callable[[Message], None]
    note: Callable[[str], None]
    loads: dict[str, Load] = attrs.field(factory=dict)
    recorded: deque[Action] = attrs.field(factory=deque)
    _orphans: list[Orphan] = attrs.field(factory=list)
    _turn: int = 0
    _locks: BlockLocks = attrs.Factory(lambda self: BlockLocks(self.cache), takes_self=True)

    @property
    def moving(self) -> bool:
        """Whether anything is in flight, or compared."""
        moving = any(load.in_flight or load.held_back for load in self.loads.values())
        return moving or bool(self._orphans)

    def begin(
        self,
        load: Load,
        timeout: float,
        options: ReadOptions,
        *,
        pushed: bool,
        follow: bool,
        digest: bool,
    ) -> None:
        """Start *load*: everything is checked before anything is posted.

        *pushed*: the producers write, and each of them checks, and says when it has written.
        *follow*: nothing is posted yet, but what a producer says is written, as it says so.
        *digest*: what arrived is compared with what they hold.
        """
        self.act()  # an earlier load of this name may have an end that is recorded only
        remote, request, timeout = load.remote, load.request, seconds("timeout", timeout)
        if flag("digest", digest):
            load.audit = Audit(remote, request, self.book.me, self.nixl, self.cache, self.tell)
        if flag("pushed", pushed) and flag("follow", follow):
            raise SpecError("follow", follow, rule="follow cannot be combined with pushed=True")
        if flag("follow", follow):
            self._begin_following(load, timeout, options)
            return
        load_plan = remote.load_plan(self.book.me.rank, load.remote_id, request.request_id, options)
        lanes = remote.lanes
        pushes = {r: pushed_of(lane.table, request) for r, lane in lanes.items() if pushed}
        sides = remote.sides(request, () if pushed else lanes)
        sources = {rank: lanes[rank].places for rank in (*sides, *pushes)}
        load_plan = attrs.evolve(load_plan, sources=sources)
        self._own(load, load_plan)
        name = request.request_id
        transfers = self.nixl.move("READ", sides.values(), request=name, timeout=timeout)
        told = self._expect(load_plan, timeout)
        moved = dict(zip(sides, transfers, strict=True))
        for rank, places in sources.items():
            groups = dict.fromkeys(group for group, _ in places)
            steps = tuple(self.book.start(name, rank, group) for group in groups)
            load.in_flight[rank] = InFlight(rank, moved.get(rank), steps, pushes.get(rank))
        self._know(load, told)

    def _know(self, load: Load, told: list[Action]) -> None:
        """Let polls move *load* on from now, and carry out what beginning it *told*."""
        name = load.request.request_id
        self.recorded.extend(told)  # first: actions of a load that nobody knows are skipped
        self.loads[name] = load
        self.act()

    def _expect(self, load_plan: LoadPlan, timeout: float) -> list[Action]:
        """Return the actions for *load_plan* alone; record those that time caused for others."""
        now = self.now()
        self.recorded.extend(self.book.tick(now))
        return self.book.expect(load_plan, now, timeout)

    def give_up(self, load: Load) -> None:
        """Undo the beginning of a load that its caller never received.

        The beginning was refused, or interrupted at any line. A load that polls already know is
        cancelled. Of any other, nothing was told to a producer.
        """
        if not load.owner:
            return  # it may not even be the only load of this name
        name = load.request.request_id
        if self.loads.get(name) is load:
            self.recorded.extend(self.book.cancel(name, self.now()))
            self.act()
            return
        self.book.forget(load.load_plan)
        known = {id(f.transfer) for other in self.loads.values() for f in other.in_flight.values()}
        begun = tuple(
            transfer
            for transfer in self.nixl.transfers
            if transfer.request == name
            and transfer.spec.operation == "READ"
            and id(transfer) not in known
        )
        self._orphans.append(Orphan(load.owner, load.blocks, begun))
        self._free_orphans()

    def _free_orphans(self) -> None:
        """Free the blocks of interrupted loads that nothing can write any more."""
        for orphan in list(self._orphans):
            if orphan.over:
                for transfer in orphan.transfers:
                    transfer.deliver("freed")
                self._locks.release(orphan.owner, orphan.blocks)
                self._orphans.remove(orphan)

    def _own(self, load: Load, load_plan: LoadPlan) -> None:
        """Let its blocks belong to *load*, if it may begin and no other load is to write them."""
        self.book.check(load_plan)
        load.load_plan, load.name = load_plan, load_plan.name
        load.owner = self._locks.acquire(load.request.request_id, load.blocks)

    def _begin_following(self, load: Load, timeout: float, options: ReadOptions) -> None:
        request, ends = load.request, ends_of(load)
        load_plan = load.remote.load_plan(
            self.book.me.rank, load.remote_id, request.request_id, options
        )
        load_plan = attrs.evolve(load_plan, sources=ends, partial=True)
        self._own(load, load_plan)
        load.follow(ends, self.now() + timeout)
        self._know(load, self._expect(load_plan, timeout))

    def _follow(self, load: Load, frontiers: Frontiers) -> None:
        """Start to read what was written since the last time."""
        name = load.request.request_id
        try:
            for advance in advances(self.book.readable(name), frontiers):
                rank, upto = advance.rank, advance.tokens.stop
                step = self.book.start(name, rank, advance.group, advance.layers, upto)
                frontiers |= dict.fromkeys(advance.places, upto)
                try:
                    transfer = start(self.nixl, load, advance, load.deadline - self.now())
                except TransferError as error:
                    load.fail(rank, error.message, error.state)
                    why, state = error.message, error.state
                    self.recorded.extend(self.book.fail(step, why, self.now(), state=state))
                    break
                if transfer is None:
                    self._arrived(load, (step,))
                else:
                    load.in_flight[step] = InFlight(rank, transfer, (step,))
        except BaseException:
            self._adopt(load)
            raise
        self.act()

    def _adopt(self, load: Load) -> None:
        """Fail *load* if an interrupt left a step of it that no flight ends.

        At most one step was being started. If its transfer was begun, the step ends with it.
        """
        name = load.request.request_id
        flying = [step for flight in load.in_flight.values() for step in flight.steps]
        held = () if load.audit is None else load.audit.steps
        for step in self.book.open_steps(name).difference(flying, held):
            known = {id(flight.transfer) for flight in load.in_flight.values()}
            begun = [
                transfer
                for transfer in self.nixl.transfers
                if transfer.request == name
                and transfer.spec.operation == "READ"
                and id(transfer) not in known
            ]
            why, state = "it was interrupted", TransferState.STOPPED
            if begun:
                rank = next(iter(load.remote.tables))
                load.in_flight[step] = InFlight(rank, begun[0], (step,))
            now, quiet = self.now(), not begun
            self.recorded.extend(self.book.fail(step, why, now, quiet=quiet, state=state))

    def receive(self, message: Message) -> None:
        """Take a producer's message; its own groups may have other names than this engine's."""
        if isinstance(message, PushDone | PushStopped):
            self._written(message)
            return
        if isinstance(message, Checksum | ChecksumUnavailable):
            self._checksum(message)
            return
        if isinstance(message, LayerProgress) and (
            home := self.cache.engine.homes.get(message.layer)
        ):
            message = msgspec.structs.replace(message, group=home.name)
        self.recorded.extend(self.book.receive(message, self.now()))
        self.act()

    def move(self) -> None:
        """Move what is in flight on, in turns."""
        self.act()
        self._free_orphans()
        for load in list(self.loads.values()):
            if load.frontiers is not None:
                self._follow(load, load.frontiers)
        end = time.monotonic() + TURN
        for load in [load for load in self.loads.values() if load.held_back]:
            self._compare(load, end)
        flying = [(load, key) for load in self.loads.values() for key in load.in_flight]
        for place in range(len(flying)):
            load, key = flying[(self._turn + place) % len(flying)]
            flight = load.in_flight[key]
            if flight.transfer is not None:
                self._settle(load, key, flight, flight.transfer)
            elif load.error is not None and self.now() >= load.asked:
                self._stop(load)
            if time.monotonic() >= end:
                self._turn += place + 1
                break

    def _written(self, message: PushDone | PushStopped) -> None:
        """Take from a producer that it writes no more: it has written all, or has given up."""
        rank = message.by.rank
        for load in self.loads.values():
            flight = load.in_flight.get(rank) if load.name == name_of(message) else None
            if flight is not None and flight.transfer is None:
                done = isinstance(message, PushDone)
                state = TransferState.DIFFERS if done else TransferState.STOPPED
                if why := flight.wrong(message):
                    load.fail(rank, why, state)
                self._end(load, rank, why, state)
                return
        self.note(f"{message.kind} of {message.by}: nothing that it pushes is waited for")

    def connect(self, engine_id: str, epoch: int) -> None:
        """Know the present start of an engine: loads from another fail."""
        self.recorded.extend(self.book.connect(engine_id, epoch, self.now()))
        self.act()
        self._gone(engine_id, epoch)

    def disconnect(self, engine_id: str) -> None:
        """Forget an engine that is no more: loads from it fail."""
        instance("engine_id", engine_id, str)
        for name, load in list(self.loads.items()):
            if load.remote.start[0] == engine_id:
                why = f"{engine_id} was disconnected"
                now, state = self.now(), TransferState.GONE
                self.recorded.extend(self.book.cancel(name, now, why, state))
                self.act()
        self._gone(engine_id)
        self.book.disconnect(engine_id)

    def _gone(self, engine_id: str, epoch: int | None = None) -> None:
        """Take that all starts of an engine but *epoch* are no more: they write nothing."""
        for load in list(self.loads.values()):
            name, start = load.remote.start
            if name == engine_id and start != epoch:
                for rank in [r for r, flight in load.in_flight.items() if flight.transfer is None]:
                    self._end(load, rank, f"{engine_id} is gone", TransferState.GONE)

    def _stop(self, load: Load) -> None:
        """Ask the producers that push to stop, again and again until they answer."""
        load.asked = self.now() + self.book.heartbeat
        for flight in load.in_flight.values():
            self.tell(StopWriting(*about(load.name, self.book.me, flight.rank)))

    def _settle(self, load: Load, key: RankId | int, flight: InFlight, transfer: Transfer) -> None:
        """Tell the ledger what became of one transfer, once nothing of it can move."""
        why, state = "", TransferState.GONE
        try:
            if transfer.poll() == "PROC":
                return
        except TransferError as error:
            why, state = error.message, error.state
            load.fail(flight.rank, why, error.state)
            load.remote.lost |= error.state in LOST
            if not transfer.over:
                step, now = flight.steps[0], self.now()
                self.recorded.extend(self.book.fail(step, why, now, quiet=False, state=state))
                self.act()
                return
            with contextlib.suppress(TransferError):  # of a rank that is closed
                transfer.free()
        load.written |= transfer.handles > 0
        self._end(load, key, why, state)

    def _end(self, load: Load, key: RankId | int, why: str, state: TransferState) -> None:
        """Tell the ledger that nothing of a flight comes any more: all is there, or *why* not."""
        flight = load.in_flight[key]
        load.written |= flight.transfer is None
        if not why:
            self._arrived(load, flight.steps)
        else:
            self._close(load, flight.steps, why, state)
        # Last: the next poll ends a flight again whose end was interrupted.
        load.in_flight.pop(key, None)
        self.act()

    def _arrived(self, load: Load, steps: tuple[int, ...]) -> None:
        """Tell the ledger that all of some steps is there; of what is compared, after that."""
        if load.audit is not None and load.error is None:
            load.audit.steps += tuple(step for step in steps if step not in load.audit.steps)
            return
        self._close(load, steps)

    def _close(
        self,
        load: Load,
        steps: tuple[int, ...],
        why: str = "",
        state: TransferState = TransferState.GONE,
    ) -> None:
        """Record that *steps* have ended, well or because of *why*; skip those that are closed."""
        for step in steps:
            if step in self.book.open_steps(load.request.request_id):
                # One line each: an interrupt must not come between the call and its record.
                now = self.now()
                if why:
                    self.recorded.extend(self.book.fail(step, why, now, state=state))
                else:
                    self.recorded.extend(self.book.finish(step, now))

    def _compare(self, load: Load, end: float) -> None:
        """Compare what arrived with what its producers hold, once all of it has."""
        if load.audit is None or load.in_flight or load.frontiers != load.ends:
            return
        why = load.audit.move(load.name, self.now(), self.book.heartbeat, end)
        if why is None:
            return
        state = load.audit.verdict
        if why:
            load.fail(load.audit.source, why, state)
        self._close(load, load.audit.steps, why, state)
        load.audit.cancel()
        self.act()

    def _checksum(self, message: Checksum | ChecksumUnavailable) -> None:
        """Take a producer's sum, or that it has none."""
        audits = [one.audit for one in self.loads.values() if one.name == name_of(message)]
        if not any(audit.deliver(message) for audit in audits if audit is not None):
            self.note(f"{message.kind} of {message.by}: no question is open for it")

    def act(self) -> None:
        """Carry out the recorded actions of the ledger."""
        while self.recorded:
            action = self.recorded[0]
            if isinstance(action, Tell | Refused):
                self.recorded.popleft()  # first: a message may be lost, since it is sent again
                if isinstance(action, Tell):
                    self.tell(action.message)
                else:
                    self.note(str(action))
                continue
            if (load := self.loads.get(action.request_id)) is not None:
                self._change(load, action)
            self.recorded.popleft()  # last: an interrupted change is made again

    def _change(self, load: Load, action: Action) -> None:
        if isinstance(action, Ready | Release):
            self._locks.release(load.owner, load.blocks)
        if isinstance(action, Ready):
            load.state = "done"
        elif isinstance(action, Failed):
            load.fail(None, action.why, action.state)
            if load.audit is not None:
                self._close(load, load.audit.steps)
                load.audit.cancel()
            load.stop()
        elif isinstance(action, Release):
            load.state = "failed"
        elif isinstance(action, Closed):
            self.loads.pop(load.request.request_id, None)
