"""Move one transfer through the staging buffer: post ranges of the peer, and permute their runs.

Invariant: a staged transfer writes exactly the bytes of the direct transfer. The other bytes of a
range stay in the buffer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import attrs
import numpy as np

from kvspec.nixl.agent import Agent, Subject
from kvspec.nixl.permuting import copy_runs
from kvspec.nixl.ranges import Batch, Ints, Ranges
from kvspec.nixl.staging_buffer import StagingBuffer

if TYPE_CHECKING:
    from numpy.typing import NDArray


@attrs.frozen(kw_only=True, eq=False)
class Stage:
    """How one order is staged: its *ranges*, through *buffer*."""

    buffer: StagingBuffer
    ranges: Ranges
    device: int  # of the peer's memory
    inward: bool

    @property
    def batches(self) -> tuple[Batch, ...]:
        """What handles are made of."""
        return self.ranges.batches

    def make(
        self,
        agent: Agent,
        operation: str,
        remote_type: str,
        subject: Subject,
        batch: Batch,
        slot: int,
    ) -> int:
        """Return nixl's handle for a batch that goes through *slot*; what is written is there."""
        base = self.buffer.address(slot)
        if not self.inward:
            self._copy(batch, base)
        memory = self.buffer.memory
        near = _descriptors(base + batch.offset, batch.length, memory.device)
        far = _descriptors(batch.address, batch.length, self.device)
        sides = (memory.memory_type, near), (remote_type, far)
        return agent.make_plain(operation, *sides, subject)

    def land(self, batch: Batch, slot: int) -> None:
        """Take what is done: what was read goes where it belongs."""
        if self.inward:
            self._copy(batch, self.buffer.address(slot))

    def _copy(self, batch: Batch, base: int) -> None:
        memory = self.buffer.memory
        place = memory.memory_type, memory.device
        for moves in self.ranges.moves(batch):
            copy_runs(base, moves, inward=self.inward, place=place, scratch=self.buffer.scratch)


def _descriptors(address: Ints, length: Ints, device: int) -> NDArray[np.uint64]:
    found = np.empty((len(address), 3), np.uint64)
    found[:, 0], found[:, 1], found[:, 2] = address, length, device
    return found
