"""The arguments of a transfer: two lists that NIXL has checked, and pairs of their ids.

Invariant: everything is checked before anything is posted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, cast

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
        handle: NIXL's handle, or 0 if there are no rows.
    """

    agent: Agent
    rows: StridedRows
    memory_type: str
    peer: str | None
    handle: int
    given_rows: object
    released: bool = False

    def __repr__(self) -> str:
        side = "local" if self.peer is None else f"peer={self.peer!r}"
        return f"<Prepared {side} {len(self.rows.table)} rows, {self.total} ids>"

    @property
    def total(self) -> int:
        """Number of ids."""
        return self.rows.total

    def release(self) -> None:
        """Release the list. Posted transfers continue. A second call does nothing."""
        with self.agent.lock:
            self.agent.check_open()
            # Set the flag first: after an interrupt in between, the handle is never freed twice.
            known, self.released = not self.released, True
            if known and self.rows.total:
                self.agent.release_list(self.handle)


def check_unreleased(*lists: Prepared) -> None:
    """Raise `TransferError` "closed" if one of *lists* was released."""
    for prepared in lists:
        if prepared.released:
            message = f"{prepared!r} was released: {TransferState.CLOSED.advice}"
            raise TransferError(message, rank=prepared.peer, state=TransferState.CLOSED)


# A local list, ids of it, a remote list, and as many ids of it. Or a selection, and None.
Sides = tuple[Prepared, "NDArray[np.integer] | Selection", Prepared, "NDArray[np.integer] | None"]


def checked_pairs(agent: Agent, operation: Operation, sides: Sides) -> Pairing:
    """Return the pairs of ids of *sides*, which must be lists of *agent*.

    The ids of a selection are paired by its parts if that is possible.
    """
    local, local_ids, remote, remote_ids = sides
    if not isinstance(local, Prepared) or local.peer is not None or local.agent is not agent:
        raise SpecError("local", local, "a list that this rank prepared of its own memory")
    if not isinstance(remote, Prepared) or remote.peer is None or remote.agent is not agent:
        raise SpecError("remote", remote, "a list that this rank prepared of a peer's memory")
    if local.released or remote.released:
        check_unreleased(local, remote)
    target = "local" if operation == "READ" else "remote"
    if not isinstance(local_ids, Selection):
        local_ids = checked_ids("local_ids", local_ids, local.rows.total)
        remote_ids = checked_ids("remote_ids", remote_ids, remote.rows.total)
        return pair(local.rows, local_ids, remote.rows, remote_ids, target)
    selection, other = local_ids, cast("object", remote_ids)
    if other is not None and other is not selection:
        raise SpecError("remote_ids", other, "None, or the same selection as local_ids")
    near: Role = "consumer" if local.given_rows is selection.consumer_rows else "producer"
    roles = selection.producer_rows, selection.consumer_rows
    far_rows, near_rows = roles if near == "consumer" else roles[::-1]
    if local.given_rows is not near_rows or remote.given_rows is not far_rows:
        rule = "a selection of the table whose rows both lists contain"
        raise SpecError("local_ids", "a selection", rule)
    inward = operation == "READ"
    found = pair_selection(selection, local.rows, remote.rows, near, inward=inward)
    if found is not None:
        return found
    ids = selection[::-1] if near == "consumer" else selection
    return pair(local.rows, ids[0], remote.rows, ids[1], target)
