"""Keep all transfers of one rank until they are over and their end was reported.

Invariant: no transfer is lost, even if the caller drops its object. While a transfer is not over,
no other transfer reads or writes the bytes that it writes. That includes quarantine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Literal

import attrs

from kvspec.errors import TransferError, TransferState
from kvspec.inputs import seconds
from kvspec.nixl.agent import Agent
from kvspec.nixl.notifications import FIRST_WAIT, LAST_WAIT, Inbox
from kvspec.nixl.spans import Spans
from kvspec.nixl.transfer import Transfer
from kvspec.nixl.transfer_spec import TransferSpec


@attrs.frozen
class Event:
    """Something that `NixlRank.pump` observed. Each event is returned once.

    Attributes:
        kind: "done" or "failed": the transfer ended. "freed": quarantine ended, so the blocks of a
            failed transfer can be used again. "notified": a notification arrived.
        peer: Name of the peer.
        transfer: The transfer, or None for a notification. If it failed, it has an `error`.
        payload: Bytes of the notification.
    """

    kind: Literal["done", "failed", "freed", "notified"]
    peer: str
    transfer: Transfer | None = None
    payload: bytes = b""


@attrs.frozen
class NixlStats:
    """Numbers of the objects that a rank holds. All are zero after it is closed.

    Attributes:
        transfers: Transfers that are not over, or whose end was not reported yet.
        handles: NIXL handles in flight.
        lists: Descriptor lists.
        registrations: Registered memories.
        peers: Connected peers.
        notifications: Notifications that were not returned yet.
        threads: Threads that wait in a method of the rank.
    """

    transfers: int = 0
    handles: int = 0
    lists: int = 0
    registrations: int = 0
    peers: int = 0
    notifications: int = 0
    threads: int = 0


@attrs.frozen(eq=False)
class _Live:
    """*transfers* that are known, those that are not over, and the bytes these write, by place.

    *fresh*: those of the latter whose bytes are not in *written* yet: nobody asked for them.
    """

    transfers: tuple[Transfer, ...] = ()
    moving: tuple[Transfer, ...] = ()
    written: Mapping[tuple[str, str], Spans] = attrs.field(factory=dict)
    fresh: tuple[Transfer, ...] = ()

    def swept(self) -> _Live:
        """Return what is left without what is over."""
        written = dict(self.written)
        moving = []
        for transfer in self.moving:
            if not transfer.over:
                moving.append(transfer)
                continue
            if transfer not in self.fresh:
                place = transfer.spec.target_place
                written[place] = written[place].minus(transfer.spec.pairs.written)
        known = tuple(transfer for transfer in self.transfers if not transfer.reapable)
        fresh = tuple(transfer for transfer in self.fresh if not transfer.over)
        return _Live(known, tuple(moving), written, fresh)

    def plus(self, transfer: Transfer) -> _Live:
        """Return this and *transfer*, which `refuse` let through."""
        return _Live(
            (*self.transfers, transfer),
            (*self.moving, transfer),
            self.written,
            (*self.fresh, transfer),
        )

    def asked(self) -> _Live:
        """Return the same with the bytes of all that move."""
        written = dict(self.written)
        for transfer in self.fresh:
            place = transfer.spec.target_place
            written[place] = written.get(place, Spans()).plus(transfer.spec.pairs.written)
        return _Live(self.transfers, self.moving, written)

    def refuse(self, spec: TransferSpec) -> None:
        """Refuse *spec* if it moves bytes that another transfer writes, or writes what one reads.

        Bytes are told apart by address: those of two devices of one kind differ too.
        """
        place = spec.target_place
        if any(transfer.spec.source_place == place for transfer in self.moving) or any(
            _moves(spec, where, spans) for where, spans in self.written.items()
        ):
            for transfer in self.moving:
                if _clash(spec, transfer.spec):
                    message = (
                        f"{transfer!r} moves some of the same bytes: {TransferState.BUSY.advice}"
                    )
                    peer = spec.remote.peer
                    raise TransferError(
                        message, rank=peer, request=spec.request, state=TransferState.BUSY
                    )


def _moves(spec: TransferSpec, place: tuple[str, str], spans: Spans) -> bool:
    """Whether *spec* writes or reads some of *spans* at *place*."""
    written, source = spec.pairs.written, spec.pairs.source
    return (spec.target_place == place and spans.meets(written.start, written.end)) or (
        spec.source_place == place and spans.meets(*source)
    )


def _clash(spec: TransferSpec, other: TransferSpec) -> bool:
    """Whether one of two orders writes what the other writes or reads."""
    return _moves(spec, other.target_place, other.pairs.written) or _moves(
        other, spec.target_place, spec.pairs.written
    )


class InFlightTransfers:
    """The transfers of *agent*'s rank, from `start` until nobody needs to know of them."""

    def __init__(self, agent: Agent, inbox: Inbox) -> None:
        self._agent = agent
        self._inbox = inbox
        self._live = _Live()  # replaced whole, so that an interrupt leaves the old or the new
        self._turn = 0
        self._events: list[Event] = []

    def __iter__(self) -> Iterator[Transfer]:
        """Yield what is known."""
        known = self._live.transfers
        return (transfer for transfer in known if not transfer.reapable)

    def start(self, specs: Iterable[TransferSpec]) -> tuple[Transfer, ...]:
        """Start *specs*; refused if bytes of one are busy. Other errors are kept for `poll`."""
        with self._agent.locked():
            live = self._live.swept()
            started: list[Transfer] = []
            for spec in specs:
                if live.moving:
                    live = live.asked()
                    live.refuse(spec)
                started.append(Transfer(self._agent, spec))
                live = live.plus(started[-1])
            self._live = live
            for transfer in started:
                transfer.step()
        return tuple(started)

    def check_idle(self, peer: str) -> None:
        """Refuse to go on where a transfer with *peer* is not over."""
        here = [transfer for transfer in self if transfer.peer == peer]
        if busy := [transfer.request for transfer in here if not transfer.over]:
            raise TransferError(
                f"{busy}: {TransferState.BUSY.advice}", rank=peer, state=TransferState.BUSY
            )

    def pump(self, budget: float) -> tuple[Event, ...]:
        """See `NixlRank.pump`."""
        deadline, rest = time.monotonic() + seconds("budget", budget), FIRST_WAIT
        while True:
            if self._step(deadline):
                rest = FIRST_WAIT
            left = deadline - time.monotonic()
            if self._events or left <= 0:
                with self._agent.locked():
                    events = tuple(self._events)
                    self._events.clear()
                return events
            time.sleep(min(rest, left))
            rest = min(2 * rest, LAST_WAIT)

    def _step(self, deadline: float) -> bool:
        """Step the transfers in turn, and look into the inbox, until an event or the *deadline*.

        Return whether something moved.
        """
        known, settled = tuple(self), False
        self._receive()
        for place in range(len(known)):
            transfer = known[(self._turn + place) % len(known)]
            with self._agent.locked():
                settled |= transfer.step()
                if kind := transfer.pending_event():
                    self._events.append(Event(kind, transfer.peer, transfer))
                    transfer.deliver(kind)  # last: twice is better than lost
            self._receive()
            if self._events or time.monotonic() >= deadline:
                self._turn += place + 1
                break
        return settled

    def _receive(self) -> None:
        for peer, payload in self._inbox.drain():
            self._events.append(Event("notified", peer, payload=payload))

    def reap(self) -> tuple[Transfer, ...]:
        """Release what ended in quarantine; return the transfers whose blocks are free again."""
        with self._agent.locked():
            return tuple(transfer for transfer in self if transfer.free())

    def stop(self, drain: float) -> bool:
        """Post no more; wait *drain* seconds at most; return whether nothing is in flight."""
        deadline = time.monotonic() + drain
        while not all([transfer.stop() for transfer in self._live.transfers]):  # noqa: C419 - each
            if time.monotonic() >= deadline:
                return False
            time.sleep(FIRST_WAIT)
        return True

    def abandon(self) -> None:
        """Release everything, in flight or not, and forget it."""
        for transfer in self._live.transfers:
            transfer.abandon()
        self._live = _Live()
