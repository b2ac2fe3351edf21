"""The arguments of a transfer: two lists that NIXL has checked, and pairs of their ids.

Invariant: everything is checked before anything is posted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import attrs

from kvspec.descriptors.selection import Selection
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.nixl.agent import Agent
from kvspec.nixl.merging import Pairing, checked_ids, pair
from kvspec.nixl.rows import StridedRows
from kvspec.nixl.selected import pair_selection
from kvspec.ownership.replicas import Role

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

Operation = Literal["READ", "WRITE"]


@attrs.define(eq=False, repr=False)
class Prepared:
    """A list of descriptors that NIXL has checked. `NixlRank.prepare` returns it.

    Id *i* of row *r* begins at `address[r] + (i - first id of r) * stride[r]`.

    Attributes:
        agent: The agent that checked the list.
        rows: The checked rows.
        memory_type: "DRAM" or "VRAM".
        peer: Name of the peer that has the memory, or None for memory of this rank.
        given_rows: The array that the caller passed to `prepare`, not a copy. If it is an array of
            a selection's table, the list has the rows of that table.
        released: Whether NIXL no longer has the list.
        _handle: NIXL's handle, or None if there are no rows.
    """

    agent: Agent
    rows: StridedRows
    memory_type: str
    peer: str | None
    _handle: int | None
    given_rows: object
    released: bool = False

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
        with self.agent.lock:
            self.agent.check_open()
            # Set the flag first: after an interrupt in between, the handle is never freed twice.
            known, self.released = not self.released, True
            if known and self._handle is not None:
                self.agent.release_list(self._handle)


# A local list, ids of it, a remote list, and as many ids of it. Or a selection, and None.
Sides = tuple[Prepared, "NDArray[np.integer] | Selection", Prepared, "NDArray[np.integer] | None"]


def checked_pairs(agent: Agent, operation: Operation, sides: Sides) -> Pairing:
    """Return the pairs of ids of *sides*, which must be lists of *agent*."""
    local, local_ids, remote, remote_ids = sides
    if not isinstance(local, Prepared) or local.peer is not None or local.agent is not agent:
        raise SpecError("local", local, "a list that this rank prepared of its own memory")
    if not isinstance(remote, Prepared) or remote.peer is None or remote.agent is not agent:
        raise SpecError("remote", remote, "a list that this rank prepared of a peer's memory")
    if local.released or remote.released:
        local.check(), remote.check()
    target = "local" if operation == "READ" else "remote"
    if isinstance(local_ids, Selection):
        return _pair_selection(sides, local_ids, target)
    ids = checked_ids("local_ids", local_ids, local.rows.total)
    remote_ids = checked_ids("remote_ids", remote_ids, remote.rows.total)
    return pair(local.rows, ids, remote.rows, remote_ids, target)


def _pair_selection(sides: Sides, selection: Selection, target: str) -> Pairing:
    """Return the pairs of *selection*, by its parts if that is possible, else by its ids."""
    local, remote, near = sides[0].rows, sides[2].rows, _near_role(sides, selection)
    far: Role = "consumer" if near == "producer" else "producer"
    found = pair_selection(selection, local, remote, near, near if target == "local" else far)
    if found is not None:
        return found
    ids = selection[::-1] if near == "consumer" else selection
    return pair(local, ids[0], remote, ids[1], target)


def _near_role(sides: Sides, selection: Selection) -> Role:
    """Return whether the local list has the rows of the producer or of the consumer.

    Raise `SpecError` if the lists do not have the rows of the selection's table.
    """
    local, _, remote, _ = sides
    remote_ids: object = sides[3]
    if remote_ids is not None and remote_ids is not selection:
        raise SpecError("remote_ids", remote_ids, "None, or the same selection as local_ids")
    consumer, producer = selection.consumer_rows, selection.producer_rows
    if local.given_rows is consumer and remote.given_rows is producer:
        return "consumer"
    if local.given_rows is producer and remote.given_rows is consumer:
        return "producer"
    raise SpecError(
        "local_ids", "a selection", "a selection of the table whose rows both lists contain"
    )
