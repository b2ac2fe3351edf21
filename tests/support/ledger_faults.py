"""Ledgers with one fault each. The chaos of ledgers must find every fault."""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
from msgspec.structs import replace

import kvspec
from kvspec.completion.consumer import ConsumerLedger
from kvspec.completion.ledger import Tell
from kvspec.completion.producer import ProducerLedger
from kvspec.errors import TransferState
from kvspec.wire.messages import Done, Heartbeat, Lease, Message, ReaderStatus, Valid


class CountsMessages(ProducerLedger):
    """Count `done` messages instead of readers."""

    def receive(self, message: Any, now: float) -> Any:
        """Handle each `done` as one of another reader."""
        self.extra = getattr(self, "extra", 0) + 1
        by = replace(message.by, rank=kvspec.RankId(tp=1000 + self.extra))
        request = self.records.get(message.key)
        known = request and request.state == "held" and request.readers.get(message.by)
        if message.kind == "done" and known and known.done:
            super().receive(replace(message, by=by), now)
        return super().receive(message, now)


class IgnoresNonce(ProducerLedger):
    """Identify a request by its id alone."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace the nonce by that of a held request."""
        same = [key for key in self.held if key.request_id == message.key.request_id]
        return super().receive(replace(message, key=[*same, message.key][0]), now)


class FreesOnAbort(ProducerLedger):
    """Free a request that is aborted, although it is read."""

    def abort(self, key: Any, now: float) -> Any:
        """Free the request at once."""
        actions = super().abort(key, now)
        held = self.find(key)
        return actions + (self._take_row(held, "complete") if held else [])


class KeepsFirstCount(ProducerLedger):
    """Keep the first number of readers that an incarnation sent."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace each later number by the first."""
        request = self.records.get(message.key)
        name = message.by.engine_id, message.by.epoch
        incarnation = request and request.incarnations.get(name)
        if incarnation and isinstance(message, ReaderStatus):
            message = replace(message, expected=incarnation.expected)
        return super().receive(message, now)


class RejectsEarlyReaders(ProducerLedger):
    """Send `gone` to a reader that comes before the request is held."""

    def _keep(self, request: Any, message: Any, _: str) -> Any:
        return self._gone(request, message, _)

    def _take_row(self, request: Any, event: str, message: Any = None) -> Any:
        if request.state == "unknown" and event in ("heartbeat", "done"):
            return self._keep(request, message, "unknown")
        return super()._take_row(request, event, message)


class SendsValidAfterFree(ProducerLedger):
    """Send `valid` to a reader that comes after the request was freed."""

    def _take_row(self, request: Any, event: str, message: Any = None) -> Any:
        if request.state == "freed" and event == "done":
            return [Tell(message.answer(Valid))]
        return super()._take_row(request, event, message)


class ForgetsItsLease(ProducerLedger):
    """Send leases, and free the request when the first one ends."""

    def _deliver(self, request: Any, message: Any) -> Any:
        expires = request.expires
        actions = super()._deliver(request, message)
        if request.state == "held":
            request.expires = expires
        return actions


class FreesTwice(ProducerLedger):
    """Free a request again when it is forgotten."""

    def tick(self, now: float) -> Any:
        """Free each request that is forgotten."""
        before = {key for key, request in self.records.items() if request.state == "freed"}
        actions = super().tick(now)
        self.freed |= {key.remote_id: "expired" for key in before if key not in self.records}
        return actions


class IgnoresEpoch(ProducerLedger):
    """Accept messages of earlier incarnations of an engine."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace the epoch by that of the present incarnation."""
        epoch = self.epochs.get(message.by.engine_id, message.by.epoch)
        return super().receive(replace(message, by=replace(message.by, epoch=epoch)), now)


class IgnoresRank(ProducerLedger):
    """Take all ranks of an engine for one rank."""

    def receive(self, message: Any, now: float) -> Any:
        """Replace the rank and the number of readers."""
        message = replace(message, by=replace(message.by, rank=kvspec.RankId()))
        if isinstance(message, ReaderStatus):
            message = replace(message, expected=1)
        return super().receive(message, now)


class RemembersForever(ProducerLedger):
    """Remember freed requests for ever."""

    def tick(self, now: float) -> Any:
        """Put back each freed request that was forgotten."""
        kept = {k: r for k, r in self.records.items() if r.state == "freed"}
        actions = super().tick(now)
        self.records.update(kept)
        return actions


class RepeatsFirstAnswer(ProducerLedger):
    """Repeat the first answer to a reader that loads the request again."""

    def receive(self, message: Message, now: float) -> Any:
        """Replace the number by that of the reader's first `done`."""
        request = self.records.get(message.key)
        seen = request.readers.get(message.by) if request else None
        other = not isinstance(message, ReaderStatus)
        if other or seen is None or not seen.done:
            return super().receive(message, now)
        fields = {field: getattr(message, field) for field in Done.__struct_fields__}
        actions = super().receive(Done(**fields | {"number": seen.message.number}), now)
        return [
            Tell(replace(action.message, number=message.number))
            if isinstance(action, Tell)
            else action
            for action in actions
        ]


class ExtendsLeaseForCopies(ProducerLedger):
    """Extend the lease for a copy of a heartbeat."""

    def receive(self, message: Any, now: float) -> Any:
        """Answer a copy like the original."""
        request = self.records.get(message.key)
        reader = request.readers.get(message.by) if request else None
        copy = reader is not None and reader.message == message
        if not copy or not isinstance(message, Heartbeat) or not request or request.state != "held":
            return super().receive(message, now)
        request.expires = max(request.expires, now + self.lease)
        return [Tell(message.answer(Lease, lease=self.lease))]


class RestartsNumbers(ConsumerLedger):
    """Restart the numbers of messages with each load."""

    def _send(self, load: Any, kind: str, *, repeat: bool = False) -> Any:
        self.own = getattr(self, "own", Counter[str]())
        numbers, self.counts["numbers"] = self.counts["numbers"], self.own[load.request_id]
        actions = super()._send(load, kind, repeat=repeat)
        self.own[load.request_id], self.counts["numbers"] = self.counts["numbers"], numbers
        return actions


class AwaitsNoAnswer(ConsumerLedger):
    """End a load as done when its data is there, without an answer of the producer."""

    def finish(self, step: Any, now: float) -> Any:
        """Take the data of every source for valid."""
        load = self.records[step.request_id]
        for source in load.sources.values():
            source.valid = True
        return super().finish(step, now)


class TrustsItsOwnClock(ConsumerLedger):
    """Take data for valid while the lease lasts by the clock of the consumer."""

    def receive(self, message: Any, now: float) -> Any:
        """Record until when the producer holds the request."""
        load = self.records.get(self.find(message) or "")
        if load and message.kind == "lease" and message.number in load.asked:
            # The last question was sent a heartbeat before the next one is due.
            asked = load.next_message - self.heartbeat
            self.leases = getattr(self, "leases", {}) | {
                (load.request_id, message.by.rank): asked + message.lease - 0.01
            }
        return super().receive(message, now)

    def finish(self, step: Any, now: float) -> Any:
        """Take data that arrives during the lease for valid."""
        name = step.request_id
        if now < getattr(self, "leases", {}).get((name, step.rank), -1.0):
            self.records[name].sources[step.rank].valid = True
        return super().finish(step, now)


class NeedsOneSource(ConsumerLedger):
    """End a load as done when the data of one source is there."""

    def _advance(self, load: Any) -> Any:
        moving, steps = {step.rank for step in load.steps.values()}, load.steps
        whole = {r: s for r, s in load.sources.items() if s.started and r not in moving}
        if load.state != "moving" or not whole:
            return super()._advance(load)
        load.sources, load.steps = whole, {}
        actions = super()._advance(load)
        load.steps = steps
        return actions


class ReleasesAtOnce(ConsumerLedger):
    """Release the blocks of a failed load while reads may still write."""

    def _advance(self, load: Any) -> Any:
        if load.state != "draining":
            return super()._advance(load)
        steps, load.steps = load.steps, {}
        actions = super()._advance(load)
        load.steps = steps
        return actions


class InformsSourcesAlone(ConsumerLedger):
    """Inform only the producer ranks that this rank reads."""

    def assign(self, plan: Any) -> Any:
        """Leave out the other producer ranks."""
        informed = {rank: n for rank, n in plan.expected.items() if rank in plan.sources}
        super().assign(attrs.evolve(plan, expected=informed))


class SendsNothingAfterGone(ConsumerLedger):
    """Send no `done` to a producer rank that has answered a heartbeat with `gone`."""

    def _fault(self, load: Any, why: str, state: TransferState, rank: Any = None) -> Any:
        if state is TransferState.GONE and rank is not None and load.state == "moving":
            load.waiting.pop(rank, None)
        return super()._fault(load, why, state, rank)


class IgnoresFailedReads(ConsumerLedger):
    """Continue a load after a failed read."""

    def fail(self, step: Any, why: str, now: float, *, quiet: bool = True) -> Any:
        """Finish a failed read."""
        return self.finish(step, now) if quiet and why else self.tick(now)


class ComparesNothing(ConsumerLedger):
    """End a load that must be compared without a comparison."""

    def assign(self, plan: Any) -> Any:
        """Leave out the comparison."""
        super().assign(attrs.evolve(plan, checksum=False))
