"""The state of one load or push, as the caller sees it.

Invariant: a load is done only after all data has arrived and its producers confirmed it. Its blocks
are reserved until it has ended, even if it has already failed. After that nothing writes them.
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
from kvspec.completion.load_plan import LoadPlan, Name, Place
from kvspec.descriptors.request import TransferRequest
from kvspec.errors import TransferError, TransferState
from kvspec.inputs import instance
from kvspec.nixl import Transfer
from kvspec.nixl.transfer import FIRST_WAIT, LAST_WAIT
from kvspec.ownership.parallel import RankId
from kvspec.session.checksums import Audit
from kvspec.session.remotes import RemoteEngine
from kvspec.session.written import Blocks, blocks_of
from kvspec.wire.messages import PushDone, Pushed, PushStopped

LoadState = Literal["moving", "done", "failed"]
LOST = (TransferState.PEER_LOST, TransferState.STALE_PEER)
"""States after which a peer has to be connected anew."""
VOID = "the contents of its `undefined_blocks` are void: compute them, or load the request again"


@attrs.define(eq=False)
class InFlight:
    """What moves of a load from one *rank*, and the ledger's *steps* that it ends.

    *transfer*: None where the producer writes, and *pushed* what that is to be.
    """

    rank: RankId
    transfer: Transfer | None
    steps: tuple[int, ...]
    pushed: Pushed | None = None

    def wrong(self, message: PushDone | PushStopped) -> str:
        """Say what is wrong with what *message* says was pushed, if anything is."""
        if isinstance(message, PushStopped) or self.pushed is None:
            return f"{message.by} stopped writing"
        differs = message.pushed.differs(self.pushed)
        return f"{message.by} pushed another request: {differs}" if differs else ""


class Progress:
    """A load or a push of a session. Call `poll` until the state is not "moving", or call `wait`.

    Attributes:
        request: The request.
        remote_id: Name of the request, from `new_remote_id`.
        state: "moving", "done" or "failed".
        error: The first error, or None. It is set before the state becomes "failed".
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
        """Make progress on the whole session, and return the state. Never raises.

        "done" and "failed" are final: no byte of this request moves any more. With an `error`, the
        state stays "moving" while bytes in flight may still be written.
        """
        self._step()
        return self.state

    def wait(self) -> None:
        """Poll until the state is "done".

        Raises:
            TransferError: The `error` if it failed. With state "closed" if the session was closed
                before.
        """
        rest = FIRST_WAIT
        while self.poll() == "moving":
            if self.remote.unheard:
                raise self.closed()
            time.sleep(rest)
            rest = min(2 * rest, LAST_WAIT)
        if self.error is not None:
            raise self.error

    def closed(self) -> TransferError:
        """Return the error of a wait that cannot end, because the session is closed."""
        why = "the session was closed before the end, so its blocks may still be written"
        return TransferError(why, request=self.request.request_id, state=TransferState.CLOSED)

    def fail(self, rank: RankId | None, why: str, state: TransferState) -> None:
        """Store the first error: its *rank*, its reason and its state."""
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


class Push(Progress):
    """The part of a request that one producer rank writes. `Session.push` returns it."""


class Load(Progress):
    """A request that one consumer rank reads from its producer ranks. `Session.load` returns it.

    `undefined_blocks` are the blocks to compute again after a failure. `unwritten_ranges` are the
    bytes to set to zero before an engine reads whole blocks.
    """

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
        """Give up the load. It fails as soon as nothing can write its blocks any more."""
        self._cancel(self.request.request_id)

    def fail(self, rank: RankId | None, why: str, state: TransferState) -> None:
        """Store the first error, and the differences that are known so far."""
        differs = "" if self.audit is None or self.audit.differs in why else self.audit.differs
        more = f"; {differs}" if differs else ""
        super().fail(rank, f"{why}{more}", state)

    def follow(self, ends: Mapping[RankId, Mapping[Place, int]], deadline: float) -> None:
        """Read from each rank and layer up to its end, until *deadline*."""
        self.ends = {(rank, place): end for rank in ends for place, end in ends[rank].items()}
        self.frontiers = dict.fromkeys(self.ends, 0)
        self.deadline = deadline

    def stop(self) -> None:
        """Post no more reads."""
        for flight in self.in_flight.values():
            with contextlib.suppress(TransferError):
                if flight.transfer is not None:
                    flight.transfer.stop("its load has failed", TransferState.STOPPED)

    @property
    def digest_seconds(self) -> float:
        """Seconds that this rank has spent on checksums of received data."""
        return 0.0 if self.audit is None else self.audit.seconds

    @property
    def held_back(self) -> bool:
        """Whether received data still has to be compared."""
        return self.audit is not None and bool(self.audit.steps)

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the consumer's blocks whose contents are undefined, because the load failed.

        It is empty if the load is done, or failed before any byte moved.
        """
        in_flight = tuple(self.in_flight.values())  # at once: another thread may end some meanwhile
        moves = any(f.transfer is None or f.transfer.handles for f in in_flight)
        if self.error is None or not (self.written or moves):
            return {}
        return {group: tuple(sorted({*ids.tolist()})) for group, ids in self.blocks.items()}

    @cached_property
    def blocks(self) -> Blocks:
        """By group, the consumer's blocks that the load writes."""
        return blocks_of(self.remote.plan, self.request)

    @property
    def unwritten_ranges(self) -> npt.NDArray[np.uint64]:
        """Bytes of the consumer's blocks that the load does not write.

        An engine that reads whole blocks must set them to zero.

        Returns:
            A uint64 array of shape (ranges, 2): address and length in bytes.
        """
        lanes = self.remote.tables.values()
        left = [table.unwritten_ranges(self.request) for table in lanes]
        return np.concatenate([np.empty((0, 2), np.uint64), *left])
