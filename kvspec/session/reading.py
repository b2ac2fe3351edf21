"""The consumer's side of a session: its loads, and what of them is in flight.

Law: the ledger says when a load is done or over; nothing is told to it but what was seen: a step is
finished when its last byte is there, and has failed for good only when none can come any more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import attrs

from kvspec.errors import TransferError
from kvspec.nixl import NixlRank
from kvspec.protocol.consumer import ConsumerLedger
from kvspec.protocol.notices import Action, Closed, Failed, Notice, Ready, Refused, Release, Tell
from kvspec.protocol.order import ReadOrder
from kvspec.session.introduction import key_of
from kvspec.session.ledger import refusal
from kvspec.session.load import Flight, SessionLoad
from kvspec.session.remote import Remote

TURN = 0.02  # seconds in which transfers are moved on, before anything else has its turn
LOST = ("peer_lost", "stale_peer")  # states after which a peer has to be connected anew


@attrs.define(eq=False)
class Reading:
    """The loads of one rank, by request: what *book* knows of them, and what *nixl* moves."""

    book: ConsumerLedger
    nixl: NixlRank
    now: Callable[[], float]
    tell: Callable[[Notice], None]
    note: Callable[[str], None]
    loads: dict[str, SessionLoad] = attrs.field(factory=dict)
    _turn: int = 0

    @property
    def moving(self) -> bool:
        """Whether anything is in flight."""
        return any(load.flights for load in self.loads.values())

    def order(self, remote: Remote, remote_id: str, request_id: str, **more: Any) -> ReadOrder:  # noqa: ANN401
        """Return what is told to the ranks of *remote*; nothing moves yet."""
        engine_id, epoch = remote.start
        return ReadOrder.of(
            remote.plan,
            self.book.me.rank,
            {},
            request_id=request_id,
            key=key_of(remote_id),
            engine_id=engine_id,
            epoch=epoch,
            **more,
        )

    def begin(self, load: SessionLoad, timeout: float, **more: Any) -> None:  # noqa: ANN401
        """Start *load*: everything is checked before anything is posted."""
        remote, request = load.remote, load.request
        order = self.order(remote, load.remote_id, request.request_id, **more)
        sides = {rank: lane.sides(request) for rank, lane in remote.lanes.items()}
        sides = {rank: one for rank, one in sides.items() if len(one[1][0])}
        places = {
            rank: {
                (edge.group, layer): 1
                for edge in remote.plan.between(rank, self.book.me.rank)
                for layer in edge.layers
            }
            for rank in sides
        }
        order = attrs.evolve(order, sources=places)
        self.book.check(order)
        transfers = self.nixl.move(
            "READ", sides.values(), request=request.request_id, timeout=timeout
        )
        self.loads[request.request_id] = load
        self.do(self.book.expect(order, self.now(), timeout))
        for rank, transfer in zip(sides, transfers, strict=True):
            groups = dict.fromkeys(group for group, _ in places[rank])
            steps = tuple(self.book.start(request.request_id, rank, group) for group in groups)
            load.flights[rank] = Flight(transfer, steps)

    def move(self) -> None:
        """Move what is in flight on, in turns."""
        flying = [(load, rank) for load in self.loads.values() for rank in load.flights]
        end = time.monotonic() + TURN
        for place in range(len(flying)):
            load, rank = flying[(self._turn + place) % len(flying)]
            self._settle(load, rank, load.flights[rank])
            if time.monotonic() >= end:
                self._turn += place + 1
                break

    def _settle(self, load: SessionLoad, rank: Any, flight: Flight) -> None:  # noqa: ANN401
        """Tell the ledger what became of one transfer, once nothing of it can move."""
        transfer, end = flight.transfer, self.book.finish
        try:
            if transfer.poll() == "PROC":
                return
        except TransferError as error:
            load.fail(rank, error.message, error.state)
            load.remote.lost |= error.state in LOST
            if not transfer.over:
                if not flight.told:
                    flight.told = True
                    self.do(self.book.fail(flight.steps[0], error.message, self.now(), quiet=False))
                return
            with contextlib.suppress(TransferError):  # of a rank that is closed
                transfer.free()
            end = partial(self.book.fail, why=error.message)
        load.written |= transfer.handles > 0
        del load.flights[rank]
        for step in flight.steps:
            self.do(end(step, now=self.now()))

    def do(self, actions: Iterable[Action]) -> None:
        """Do what the ledger wants."""
        for action in actions:
            if isinstance(action, Tell):
                self.tell(action.notice)
            elif isinstance(action, Refused):
                self.note(refusal(action))
            elif (load := self.loads.get(action.request_id)) is not None:
                self._change(load, action)

    def _change(self, load: SessionLoad, action: Action) -> None:
        if isinstance(action, Ready):
            load.state = "done"
        elif isinstance(action, Failed):
            load.fail(None, action.why)
            for flight in load.flights.values():
                with contextlib.suppress(TransferError):
                    flight.transfer.stop("its load has failed", "stopped")
        elif isinstance(action, Release):
            load.state = "failed"
        elif isinstance(action, Closed):
            del self.loads[load.request.request_id]
