"""The memory of a staging buffer, and the work of one staged transfer in it.

Invariant: a slot belongs to one transfer from before its handle is posted until no byte of the
handle can move any more. A transfer in quarantine keeps its slots.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol, TypeVar

import attrs
import numpy as np

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.memory.rank_cache import Memory
from kvspec.nixl.merging import Runs
from kvspec.nixl.staging.copying import SCRATCH_BYTES, copy_runs
from kvspec.nixl.staging.ranges import Batch
from kvspec.nixl.staging.rule import Staging


class StagingBuffer:
    """One allocated memory, divided into slots.

    Attributes:
        owner: The array or tensor that owns the memory.
        memory: The whole memory.
        slots: Number of slots.
        slot_bytes: Bytes of one slot.
        scratch: Addresses of the unused bytes below and above all slots, or nothing. `copy_runs`
            writes there.

    Raises:
        SpecError: If the memory cannot be allocated.
    """

    def __init__(self, staging: Staging, memory_type: str, device: int) -> None:
        nbytes, margin = staging.buffer, SCRATCH_BYTES if memory_type == "DRAM" else 0
        try:
            if memory_type == "DRAM":
                self.owner: Any = np.empty(margin + nbytes + margin, np.uint8)
                address = self.owner.ctypes.data
            else:
                import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

                self.owner = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
                # torch may return memory that a queued kernel still writes. NIXL waits for none.
                torch.cuda.synchronize(device)
                address = self.owner.data_ptr()
        # torch raises RuntimeError if the memory of the GPU is exhausted, and AssertionError if it
        # was built without CUDA, such as for an XPU.
        except (MemoryError, ValueError, RuntimeError, AssertionError, ImportError) as error:
            why = str(error).partition("\n")[0]
            wanted = f"a size that fits into {memory_type} of device {device} ({why})"
            raise SpecError("staging.buffer", f"{nbytes} bytes", wanted) from error
        self.memory = Memory(address, margin + nbytes + margin, memory_type, device)
        self.slot_bytes = staging.longest
        self.slots = nbytes // self.slot_bytes
        self.scratch = (address, address + margin + nbytes) if margin else ()
        self._first = address + margin

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self._first + slot * self.slot_bytes


@attrs.define(eq=False)
class StagedRanges:
    """The ranges of one staged transfer.

    Attributes:
        buffer: The buffer of this rank.
        batches: Ranges of the peer, and their runs.
        ranges: Number of ranges.
        nbytes: Bytes of all ranges.
        inward: Whether the transfer is a read.
        copying: Seconds that the copies took so far.
    """

    buffer: StagingBuffer
    batches: tuple[Batch, ...]
    ranges: int
    nbytes: int
    inward: bool
    copying: float = 0.0

    def moved_runs(self, batch: Batch, slot: int) -> Runs:
        """Return the ranges of *batch* in *slot* and at the peer. A write copies its runs first."""
        base = self.buffer.address(slot)
        if not self.inward:
            self._copy(batch, base)
        return Runs(base + batch.offset, batch.address, batch.length)

    def land(self, batch: Batch, slot: int) -> None:
        """Copy the runs of a finished read from *slot* to their places."""
        if self.inward:
            self._copy(batch, self.buffer.address(slot))

    def _copy(self, batch: Batch, base: int) -> None:
        memory = self.buffer.memory
        place = memory.memory_type, memory.device
        # The processor copies host memory itself. It waits for a GPU.
        clock = time.thread_time if memory.memory_type == "DRAM" else time.perf_counter
        begun = clock()
        try:
            for moves in batch.moves():
                copy_runs(base, moves, inward=self.inward, place=place, scratch=self.buffer.scratch)
        # torch raises RuntimeError if the memory of the GPU is exhausted.
        except (MemoryError, RuntimeError) as error:
            message = f"the copy between a slot and the cache failed: {error}"
            raise TransferError(message, state=TransferState.CANCELLED) from error
        self.copying += clock() - begun


class SlotUser(Protocol):
    """A staged transfer, as the line for free slots sees it.

    Attributes:
        stage: How it is staged. None for a transfer that needs no slot.
        queue_number: Its place in the line, or None if it does not wait.
    """

    stage: StagedRanges | None
    queue_number: int | None

    @property
    def slots_held(self) -> tuple[int, ...]:
        """The slots of the handles that are not over."""


U = TypeVar("U", bound=SlotUser)


def in_line(buffer: StagingBuffer, transfers: Iterable[U]) -> list[U]:
    """Return the transfers that use *buffer*. Those that wait for a slot come first, in order."""
    users = [each for each in transfers if each.stage is not None and each.stage.buffer is buffer]
    return sorted(users, key=lambda user: (user.queue_number is None, user.queue_number or 0))


def free_slot(
    buffer: StagingBuffer, transfers: Iterable[SlotUser], queue_number: int | None
) -> int | None:
    """Return a free slot of *buffer*, or None if the transfer with *queue_number* must wait.

    A transfer that has not waited yet has no number: None.
    """
    users = in_line(buffer, transfers)
    used = {slot for user in users for slot in user.slots_held}
    ahead = sum(
        user.queue_number is not None and (queue_number is None or user.queue_number < queue_number)
        for user in users
    )
    # One free slot is reserved for each transfer that has waited longer.
    if buffer.slots - len(used) <= ahead:
        return None
    return next(slot for slot in range(buffer.slots) if slot not in used)
