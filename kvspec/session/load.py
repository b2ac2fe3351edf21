"""One request that a consumer rank reads, from as many producer ranks as hold it, as one thing.

Law: it is done only when all has arrived and was valid; a load that ended, well or not, is never
written again. Until then its blocks belong to it, also when it has failed already.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Literal

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.analysis.explanation import carried
from kvspec.descriptors.request import TransferRequest
from kvspec.errors import TransferError, TransferState
from kvspec.inputs import instance
from kvspec.nixl import Transfer
from kvspec.nixl.notifications import FIRST_WAIT, LAST_WAIT
from kvspec.ownership.parallel import RankId
from kvspec.protocol.load_plan import LoadPlan, Name, Place
from kvspec.protocol.messages import Message
from kvspec.protocol.pushed import Pushed
from kvspec.session.audit import Audit
from kvspec.session.remote import RemoteEngine
from kvspec.session.written import Blocks, blocks_of

LoadState = Literal["moving", "done", "failed"]
LOST = (TransferState.PEER_LOST, TransferState.STALE_PEER)
"""States after which a peer has to be connected anew."""
VOID = (
    "its `undefined_blocks` blocks hold nothing that may be read: compute them, or load the "
    "request anew"
)


@attrs.define(eq=False)
class InFlight:
    """What moves of a load from one *rank*, and the ledger's *steps* that it ends.

    *transfer*: None where the producer writes, and *pushed* what that is to be.
    """

    rank: RankId
    transfer: Transfer | None
    steps: tuple[int, ...]
    pushed: Pushed | None = None

    def wrong(self, message: Message) -> str:
        """Say what is wrong with what *message* says was pushed, if anything is."""
        if message.pushed is None or self.pushed is None:
            return f"{message.by} gave up writing"
        differs = message.pushed.differs(self.pushed)
        return f"{message.by} pushed another request: {differs}" if differs else ""


class Progress:
    """What was asked of a session. Ask `poll` until it is not "moving", or `wait`.

    *request*, *remote_id*: what was asked for. *error*: None unless it failed, or is about to.
    """

    def __init__(
        self,
        request: TransferRequest,
        remote_id: str,
        remote: RemoteEngine,
        step: Callable[[], None],
    ) -> None:
        self.request = instance("request", request, TransferRequest)
        self.remote_id = remote_id
        self.remote = remote
        self.state: LoadState = "moving"
        self.error: TransferError | None = None
        self._step = step

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.request.request_id!r}: {self.state}>"

    def poll(self) -> LoadState:
        """Move everything of the session on and return how this stands; never raises.

        "done" and "failed" are for good: no byte of it moves any more. What has an `error` is
        "moving" for as long as something in flight may still write.
        """
        self._step()
        return self.state

    def wait(self) -> None:
        """Poll until it is done; raise `error` if it failed, or the session was closed before."""
        rest = FIRST_WAIT
        while self.poll() == "moving":
            if self.remote.unheard:
                raise self.closed()
            time.sleep(rest)
            rest = min(2 * rest, LAST_WAIT)
        if self.error is not None:
            raise self.error

    def closed(self) -> TransferError:
        """Return the error of a wait that cannot end, because nothing moves the session on."""
        why = "the session was closed while it moved: its blocks may be written still"
        return TransferError(why, request=self.request.request_id, state=TransferState.CLOSED)

    def fail(self, rank: RankId | None, why: str, state: TransferState) -> None:
        """Keep the first reason why it fails: at which *rank*, in which state of a transfer."""
        if self.error is None:
            carried = "" if rank is None else f"; {self.way} {rank}: {self._carried(rank)}"
            engine_id = self.remote.start[0]
            self.error = TransferError(
                f"{why}{carried}{self.advice}",
                rank=engine_id if rank is None else f"{engine_id} {rank}",
                request=self.request.request_id,
                state=state,
            )

    way, advice = "to", ""

    def _carried(self, rank: RankId) -> str:
        """Say what moves between this rank and one other: groups, layers, units, tokens."""
        table = self.remote.tables[rank]
        told: list[str] = []
        for edge in table.plan.between(table.producer.rank, table.consumer.rank):
            wanted = self.request.wanted(edge.group, table.plan.consumer.group(edge.group).spec)
            layers = f"layers {edge.layers[0]} to {edge.layers[-1]}"
            tokens = f"tokens {wanted.start}..{wanted.stop - 1}"
            told.append(f"group {edge.group}, {layers}, {', '.join(carried(edge))}, {tokens}")
        return "; ".join(told)


class SessionPush(Progress):
    """What `Session.push` returns: one rank's part of a request, written to all that need it."""


class SessionLoad(Progress):
    """What `Session.load` returns: a request, from all ranks that hold it, as one thing."""

    way, advice = "from", f"; {VOID}"
    load_plan: LoadPlan  # what the ledger expects
    name: Name  # what its messages name it by

    def __init__(
        self,
        request: TransferRequest,
        remote_id: str,
        remote: RemoteEngine,
        step: Callable[[], None],
        cancel: Callable[[str], None],
    ) -> None:
        super().__init__(request, remote_id, remote, step)
        self.in_flight: dict[RankId | int, InFlight] = {}  # by rank, or by step of what is followed
        self.frontiers: dict[tuple[RankId, Place], int] | None = None  # of what is followed
        self.ends: dict[tuple[RankId, Place], int] | None = None
        self.audit: Audit | None = None
        self.owner = 0  # what its blocks belong to
        self.deadline = 0.0
        self.written = False  # whether any byte of it may have been
        self.asked = 0.0  # when producers are asked again to stop
        self._cancel = cancel

    def cancel(self) -> None:
        """Give it up: it fails as soon as nothing can write its blocks any more."""
        self._cancel(self.request.request_id)

    def fail(self, rank: RankId | None, why: str, state: TransferState) -> None:
        """Keep the first reason why it fails, and what is known to differ by then."""
        differs = "" if self.audit is None or self.audit.differs in why else self.audit.differs
        more = f"; {differs}" if differs else ""
        super().fail(rank, f"{why}{more}", state)

    def follow(self, ends: Mapping[RankId, Mapping[Place, int]], deadline: float) -> None:
        """Follow each rank and layer up to its end, until *deadline*."""
        self.ends = {(rank, place): end for rank in ends for place, end in ends[rank].items()}
        self.frontiers = dict.fromkeys(self.ends, 0)
        self.deadline = deadline

    def stop(self) -> None:
        """Post nothing more of what is read."""
        for flight in self.in_flight.values():
            with contextlib.suppress(TransferError):
                if flight.transfer is not None:
                    flight.transfer.stop("its load has failed", TransferState.STOPPED)

    @property
    def digest_seconds(self) -> float:
        """How long this rank has summed what arrived, to compare it."""
        return 0.0 if self.audit is None else self.audit.seconds

    @property
    def held_back(self) -> bool:
        """Whether something has arrived that is still to be compared."""
        return self.audit is not None and bool(self.audit.steps)

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the consumer's blocks whose content is undefined because this load failed.

        Empty where it is done, and where it failed before anything was moved.
        """
        in_flight = tuple(self.in_flight.values())  # at once: another thread may end some meanwhile
        moves = any(f.transfer is None or f.transfer.handles for f in in_flight)
        if self.error is None or not (self.written or moves):
            return {}
        return {group: tuple(sorted({*ids.tolist()})) for group, ids in self.blocks.items()}

    @cached_property
    def blocks(self) -> Blocks:
        """By group, the consumer's blocks that it is to write."""
        return blocks_of(self.remote.plan, self.request)

    @property
    def unwritten_ranges(self) -> npt.NDArray[np.uint64]:
        """(address, length) of the bytes of its own blocks that it does not write: to be zeroed.

        A uint64 array of shape (n, 2), for an engine that reads whole blocks.
        """
        lanes = self.remote.tables.values()
        left = [table.unwritten_ranges(self.request) for table in lanes]
        return np.concatenate([np.empty((0, 2), np.uint64), *left])
