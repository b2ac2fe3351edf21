"""The arguments of a transfer: two lists that NIXL has checked, and pairs of their ids.

Invariant: everything is checked before anything is posted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from kvspec.descriptors.selection import Selection
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance, seconds
from kvspec.nixl.agent import Agent, Subject
from kvspec.nixl.merging import Pairing, checked_ids, pair
from kvspec.nixl.ranges import Batch
from kvspec.nixl.rows import StridedRows
from kvspec.nixl.selected import pair_selection
from kvspec.nixl.stage import Stage
from kvspec.ownership.replicas import Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Operation = Literal["READ", "WRITE"]


class Prepared:
    """A list of descriptors that NIXL has checked. `NixlRank.prepare` returns it.

    Id *i* of row *r* begins at `address[r] + (i - first id of r) * stride[r]`.

    Attributes:
        peer: Name of the peer that has the memory, or None for memory of this rank.
    """

    def __init__(
        self,
        agent: Agent,
        rows: StridedRows,
        memory_type: str,
        peer: str | None,
        handle: int | None,
        source: object = None,
    ) -> None:
        self.rows = rows
        self.source = source  # the very array that was prepared
        self.memory_type = memory_type
        self.peer = peer
        self._agent = agent
        self._handle = handle  # None where there is no row
        self.released = False  # once True, nixl has the list no more

    def __repr__(self) -> str:
        side = "local" if self.peer is None else f"peer={self.peer!r}"
        return f"<Prepared {side} {len(self.rows.table)} rows, {self.total} ids>"

    @property
    def total(self) -> int:
        """Number of ids."""
        return self.rows.total

    def handle(self, agent: Agent) -> int:
        """Return NIXL's handle of the list. *agent* must be the agent that prepared it."""
        if agent is not self._agent:
            message = f"{agent.name!r} cannot use a list that {self._agent.name!r} prepared"
            raise TransferError(message, rank=agent.name, state=TransferState.BUG)
        if self.released:
            raise TransferError(
                f"{self!r} was released: {TransferState.CLOSED.advice}",
                rank=self.peer,
                state=TransferState.CLOSED,
            )
        return self._handle or 0

    def release(self) -> None:
        """Release the list. Posted transfers continue. A second call does nothing."""
        with self._agent.locked():
            known, self.released = not self.released, True  # first: an interrupt may come between
            if known and self._handle is not None:
                self._agent.release_list(self._handle)


Sides = tuple[Prepared, "NDArray[np.integer] | Selection", Prepared, "NDArray[np.integer] | None"]
"""A local list and ids of it, a remote list and as many ids of it; or a selection and None."""


@attrs.frozen(kw_only=True)
class TransferSpec:
    """What was asked for: *operation* "READ" or "WRITE" of *pairs*, within *timeout* seconds.

    *stage*: how it goes through the buffer, if it does.
    """

    operation: Operation
    local: Prepared
    remote: Prepared
    pairs: Pairing = attrs.field(repr=False)
    request: str
    timeout: float
    stage: Stage | None = attrs.field(default=None, repr=False)

    @property
    def subject(self) -> Subject:
        """Peer and request, for errors."""
        return self.remote.peer or "", self.request

    @property
    def target_place(self) -> tuple[str, str]:
        """Whose bytes are written, this rank's ("") or a peer's, and their memory type."""
        return self._place(self.local if self.operation == "READ" else self.remote)

    @property
    def source_place(self) -> tuple[str, str]:
        """Whose bytes are read, and their memory type."""
        return self._place(self.remote if self.operation == "READ" else self.local)

    @staticmethod
    def _place(prepared: Prepared) -> tuple[str, str]:
        return prepared.peer or "", prepared.memory_type

    @property
    def batches(self) -> tuple[slice, ...] | tuple[Batch, ...]:
        """What handles are made of: slices of the pairs, or batches of the stage's ranges."""
        return self.pairs.batches if self.stage is None else self.stage.batches

    def make(self, agent: Agent, batch: slice | Batch, slot: int = 0) -> int:
        """Return nixl's handle for one of the batches, which goes through *slot* of the buffer."""
        handles = self.local.handle(agent), self.remote.handle(agent)  # refuses released lists
        pairs = self.pairs
        if isinstance(batch, Batch):
            stage, kind = instance("stage", self.stage, Stage), self.remote.memory_type
            return stage.make(agent, self.operation, kind, self.subject, batch, slot)
        if pairs.joined is not None:
            local = self.local.memory_type, pairs.joined.local[batch]
            remote = self.remote.memory_type, pairs.joined.remote[batch]
            return agent.make_plain(self.operation, local, remote, self.subject)
        sides = (handles[0], pairs.local_ids[batch]), (handles[1], pairs.remote_ids[batch])
        return agent.make(self.operation, *sides, self.subject)


def spec_of(
    agent: Agent,
    operation: Operation,
    local: tuple[Prepared, object],
    remote: tuple[Prepared, object],
    *,
    request: object,
    timeout: object,
) -> TransferSpec:
    """Return the checked order to move (list, ids) pairs; nothing is posted yet."""
    _check_side("local", local[0], agent)
    _check_side("remote", remote[0], agent)
    target = "local" if operation == "READ" else "remote"
    if isinstance(local[1], Selection):
        pairs = _pairs(local[1], local[0], remote, target)
    else:
        pairs = pair(
            local[0].rows,
            checked_ids("local_ids", local[1], local[0].total),
            remote[0].rows,
            checked_ids("remote_ids", remote[1], remote[0].total),
            target,
        )
    return TransferSpec(
        operation=operation,
        local=local[0],
        remote=remote[0],
        pairs=pairs,
        request=instance("request", request, str),
        timeout=seconds("timeout", timeout),
    )


def _pairs(
    selection: Selection, local: Prepared, remote: tuple[Prepared, object], target: str
) -> Pairing:
    """Return the pairs of *selection*, which both lists must have been prepared for."""
    prepared, ids = remote
    if ids is not None and ids is not selection:
        raise SpecError("remote_ids", ids, "None, or the same selection as local_ids")
    own: tuple[Role, Role] = ("consumer", "producer")
    if local.source is selection.producer_rows:
        own = ("producer", "consumer")
    sources = selection.consumer_rows, selection.producer_rows
    if own[0] == "producer":
        sources = sources[::-1]
    if local.source is not sources[0] or prepared.source is not sources[1]:
        raise SpecError(
            "local_ids", "a selection", "a selection of the table whose rows both lists contain"
        )
    rows: dict[Role, StridedRows] = {own[0]: local.rows, own[1]: prepared.rows}
    found = pair_selection(selection, rows, own[target == "remote"], own[0])
    if found is not None:
        return found
    producer, consumer = selection
    ids_of = {"producer": producer, "consumer": consumer}
    return pair(local.rows, ids_of[own[0]], prepared.rows, ids_of[own[1]], target)


def _check_side(side: str, prepared: object, agent: Agent) -> None:
    if not isinstance(prepared, Prepared) or (prepared.peer is None) != (side == "local"):
        raise SpecError(side, prepared, f"a list prepared for the {side} side")
    prepared.handle(agent)
