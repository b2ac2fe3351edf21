"""The arguments of a transfer: two lists that NIXL has checked, and pairs of their ids.

Invariant: everything is checked before anything is posted.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Literal, cast

from kvspec.descriptors.selection import Selection
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance, seconds
from kvspec.nixl.agent import Agent
from kvspec.nixl.merging import Pairing, checked_ids, pair
from kvspec.nixl.ranges import Batch, Repeated, one_by_one, repeated
from kvspec.nixl.rows import StridedRows
from kvspec.nixl.selected import pair_selection
from kvspec.nixl.staging import Buffers, Stage
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
        agent: The agent that checked the list.
        rows: The checked rows.
        source: The very array that was prepared. A `Selection` of its table needs no other check.
        memory_type: "DRAM" or "VRAM".
        released: Whether NIXL no longer has the list.
    """

    __slots__ = ("_handle", "agent", "memory_type", "peer", "released", "rows", "source")

    def __init__(
        self,
        agent: Agent,
        rows: StridedRows,
        memory_type: str,
        peer: str | None,
        handle: int | None,
        source: object = None,
    ) -> None:
        self.agent, self.rows, self.source = agent, rows, source
        self.memory_type, self.peer, self.released = memory_type, peer, False
        self._handle = handle  # None if there are no rows.

    def __repr__(self) -> str:
        side = "local" if self.peer is None else f"peer={self.peer!r}"
        return f"<Prepared {side} {len(self.rows.table)} rows, {self.total} ids>"

    @property
    def total(self) -> int:
        """Number of ids."""
        return self.rows.total

    def check(self) -> int:
        """Return NIXL's handle of the list. Raise `TransferError` "closed" if it was released."""
        if self.released:
            message = f"{self!r} was released: {TransferState.CLOSED.advice}"
            raise TransferError(message, rank=self.peer, state=TransferState.CLOSED)
        return self._handle or 0

    def release(self) -> None:
        """Release the list. Posted transfers continue. A second call does nothing."""
        with self.agent.lock():
            self.agent.check_open()
            # Set the flag first: after an interrupt in between, the handle is never freed twice.
            known, self.released = not self.released, True
            if known and self._handle is not None:
                self.agent.release_list(self._handle)


# A local list, ids of it, a remote list, and as many ids of it. Or a selection, and None.
Sides = tuple[Prepared, "NDArray[np.integer] | Selection", Prepared, "NDArray[np.integer] | None"]


class TransferSpec:
    """A checked transfer that is not posted yet.

    Attributes:
        operation: "READ" or "WRITE".
        local: List of this rank.
        remote: List of the peer.
        pairs: The pairs of ids.
        request: Name of the request.
        timeout: Seconds until the transfer fails.
        stage: How the transfer uses the staging buffer, or None.
        subject: Peer and request, for errors.
        batches: What handles are made of: slices of the pairs, or batches of the stage.
    """

    __slots__ = (
        "batches", "local", "operation", "pairs", "remote", "request", "stage", "subject",
        "timeout",
    )  # fmt: skip

    def __init__(
        self,
        operation: Operation,
        local: Prepared,
        remote: Prepared,
        pairs: Pairing,
        request: str,
        timeout: float,
        stage: Stage | None = None,
    ) -> None:
        self.operation, self.local, self.remote, self.pairs = operation, local, remote, pairs
        self.request, self.timeout, self.stage = request, timeout, stage
        self.subject = remote.peer or "", request
        self.batches: tuple[slice, ...] | tuple[Batch, ...]
        self.batches = pairs.batches if stage is None else stage.ranges.batches

    @property
    def places(self) -> tuple[tuple[str, str], tuple[str, str]]:
        """Peer ("" for this rank) and memory type of the source, and of the destination."""
        local, remote = ("", self.local.memory_type), (self.subject[0], self.remote.memory_type)
        return (remote, local) if self.operation == "READ" else (local, remote)

    def make(self, agent: Agent, batch: slice | Batch, slot: int = 0) -> int:
        """Return NIXL's handle for one batch. A staged batch uses *slot* of the buffer."""
        # Later batches are made when the list may be released already.
        local, remote, pairs = self.local.check(), self.remote.check(), self.pairs
        if isinstance(batch, Batch):
            stage, kind = cast("Stage", self.stage), self.remote.memory_type
            return stage.make(agent, self.operation, kind, self.subject, batch, slot)
        if pairs.joined is not None:
            near = self.local.memory_type, pairs.joined.local[batch]
            far = self.remote.memory_type, pairs.joined.remote[batch]
            return agent.make_plain(self.operation, near, far, self.subject)
        near_ids, far_ids = pairs.local_ids[batch], pairs.remote_ids[batch]
        return agent.make(self.operation, (local, near_ids), (remote, far_ids), self.subject)


def spec_of(
    agent: Agent,
    operation: Operation,
    sides: Sides,
    request: object,
    timeout: object,
    buffers: Buffers | None = None,
) -> TransferSpec:
    """Return the checked transfer of *sides*, staged if that is faster. Nothing is posted yet."""
    local, local_ids, remote, remote_ids = sides
    if not isinstance(local, Prepared) or local.peer is not None or local.agent is not agent:
        raise SpecError("local", local, "a list that this rank prepared of its own memory")
    if not isinstance(remote, Prepared) or remote.peer is None or remote.agent is not agent:
        raise SpecError("remote", remote, "a list that this rank prepared of a peer's memory")
    local.check()
    remote.check()
    target = "local" if operation == "READ" else "remote"
    far: Role | None = None
    if isinstance(local_ids, Selection):
        far = _far_role(local_ids, local, remote, remote_ids)
        pairs = _pair_selection(local_ids, local.rows, remote.rows, far, target)
    else:
        ids = checked_ids("local_ids", local_ids, local.rows.total)
        remote_ids = checked_ids("remote_ids", remote_ids, remote.rows.total)
        pairs = pair(local.rows, ids, remote.rows, remote_ids, target)
    name, limit = instance("request", request, str), seconds("timeout", timeout)
    if buffers is None or buffers.staging is None:
        return TransferSpec(operation, local, remote, pairs, name, limit)
    runs = partial(_runs, local_ids, far, pairs, local.rows, remote.rows)
    memory_type, inward = local.memory_type, operation == "READ"
    stage = buffers.stage(pairs, local.rows, remote.rows, runs, memory_type, inward=inward)
    return TransferSpec(operation, local, remote, pairs, name, limit, stage)


def _runs(
    ids: object, far: Role | None, pairs: Pairing, local: StridedRows, remote: StridedRows
) -> tuple[Repeated, ...]:
    """Return the runs of a transfer: those of the selection *ids* if possible, else each pair."""
    found = None
    if far is not None and isinstance(ids, Selection):
        found = repeated(ids.parts, far, remote)
    return (one_by_one(pairs, local, remote),) if found is None else found


def _far_role(selection: Selection, local: Prepared, remote: Prepared, remote_ids: object) -> Role:
    """Return whether the remote list has the rows of the producer or of the consumer.

    Raise `SpecError` if the lists do not have the rows of the selection's table.
    """
    if remote_ids is not None and remote_ids is not selection:
        raise SpecError("remote_ids", remote_ids, "None, or the same selection as local_ids")
    consumer, producer = selection.consumer_rows, selection.producer_rows
    if local.source is consumer and remote.source is producer:
        return "producer"
    if local.source is producer and remote.source is consumer:
        return "consumer"
    raise SpecError(
        "local_ids", "a selection", "a selection of the table whose rows both lists contain"
    )


def _pair_selection(
    selection: Selection, local: StridedRows, remote: StridedRows, far: Role, target: str
) -> Pairing:
    """Return the pairs of *selection*, by its parts if that is possible, else by its ids."""
    near: Role = "consumer" if far == "producer" else "producer"
    rows: dict[Role, StridedRows] = {near: local, far: remote}
    found = pair_selection(selection, rows, near if target == "local" else far, near)
    if found is not None:
        return found
    ids = selection[::-1] if near == "consumer" else selection
    return pair(local, ids[0], remote, ids[1], target)
