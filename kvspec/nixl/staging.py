"""Move transfers of many short runs through staging buffers: registered memory of this rank.

Invariant: a slot belongs to one transfer from before its handle is posted until no byte of the
handle can move any more. A transfer in quarantine keeps its slots. A staged transfer writes exactly
the bytes of the direct transfer. The other bytes of a range stay in the buffer.

How it works:
    Each posted descriptor costs the transport time. So a staged read posts a few long ranges of the
    peer instead of many short runs, and then permutes the bytes of the runs into place. That is
    faster if posting takes longer than permuting. `Staging.saves` decides with one number: a
    descriptor costs as much time as permuting `stage_below` bytes. For example, 16 MiB move from
    64 ranges. In runs of 2 KiB, these are 8,192 descriptors. Staging spares 8,128 of them. Minus
    96 for the search, they cost as much as permuting 47 MiB: staging is faster. In runs of 8 KiB,
    the spared descriptors cost as much as permuting 11 MiB: staging is slower.

    A buffer is divided into slots of equal size. Each handle of a staged transfer uses one slot. A
    transfer that finds no free slot draws a ticket and waits. Free slots go to the waiting
    transfers in the order of their tickets. For example, three transfers share two slots:

        transfer    ticket    slots
        A           -         0, 1
        B           7         -
        C           8         -

    The handle in slot 0 ends. C is polled first, but B is ahead of C and only one slot is free: C
    waits. Then B is polled and receives slot 0.

    A transfer makes progress only when it is polled, and its owner may have stopped polling it. So
    polling C also polls B and then A, until a handle of one of them ends
    (`InFlightTransfers.poll_others`).
"""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, positive_int
from kvspec.memory.from_tensors import read_array
from kvspec.memory.rank_cache import Memory
from kvspec.nixl.agent import Prepared
from kvspec.nixl.memory import RegisteredMemory, overlapping, text_of
from kvspec.nixl.merging import Pairing, Spans
from kvspec.nixl.ranges import SPARE, Batch, copy_runs, ranges_of
from kvspec.nixl.rows import SEVERAL

# Default bytes of a buffer and of its slots.
BUFFER = 32 << 20
SLOT_BYTES = 8 << 20
# Least bytes of a buffer.
LEAST = 4096
# Measured with NIXL over shared memory on one core, 16 to 32 MiB from four sources, in shuffled
# blocks. Runs of 4 KiB: staged and direct take equal times. 2 KiB: direct takes 1.4 times as long.
# 8 KiB: staged takes 1.4 times as long. The number is larger than 4 KiB, because `Staging.saves`
# also counts the ranges and the search against staging. With 6 KiB, runs of 4 KiB are staged if
# both together cost less than a third of the descriptors.
STAGE_BELOW = 6 << 10
# Finding the ranges of a transfer takes as long as posting so many descriptors.
LEAST_SAVED = 96
# Ranges so far apart are never read as one, whatever a descriptor costs.
MAX_GAP = 256 << 10


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """The staging buffer of a rank, and the rule by which transfers are staged.

    Attributes:
        buffer: Bytes to allocate when they are first needed, in the memory type and on the device
            of the transfer. Or memory of the caller: a contiguous, one-dimensional numpy array or
            torch tensor. The rank keeps a reference to it. No cache and no other rank may use this
            memory.
        slot_bytes: Bytes of one slot. One handle moves so much at most. A transfer with a longer
            run is not staged.
        stage_below: Transfers of many runs are staged if their runs are shorter than this number of
            bytes on average. `kvspec calibrate` measures it on your machine. The default was
            measured with NIXL over shared memory.
        always: Stage each transfer that can be staged, however long its runs are.

    Raises:
        SpecError: If an attribute is wrong.
    """

    buffer: Any = BUFFER
    slot_bytes: int = SLOT_BYTES
    stage_below: int = STAGE_BELOW
    always: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.buffer, int):
            positive_int("staging.buffer", self.buffer, least=LEAST)
        else:
            memory_of(self.buffer)
        positive_int("staging.slot_bytes", self.slot_bytes)
        positive_int("staging.stage_below", self.stage_below, least=0)
        flag("staging.always", self.always)

    def saves(self, runs: int, ranges: int, nbytes: int) -> bool:
        """Whether *ranges* ranges of *nbytes* in all, and permuting, are faster than *runs* runs.

        >>> Staging().saves(runs=8192, ranges=64, nbytes=16 << 20)  # Runs of 2 KiB
        True
        >>> Staging().saves(runs=2048, ranges=64, nbytes=16 << 20)  # Runs of 8 KiB
        False
        >>> Staging().saves(runs=64, ranges=1, nbytes=16 << 10)  # Too few to be worth the search
        False
        """
        return self.always or (runs - ranges - LEAST_SAVED) * self.stage_below > nbytes

    @property
    def gap(self) -> int:
        """Reads join ranges that are at most so many bytes apart.

        Reading a byte takes about a quarter of the time of reading and permuting it.
        """
        return min(MAX_GAP, 4 * self.stage_below)

    @property
    def longest(self) -> int:
        """Bytes of a slot. A buffer smaller than `slot_bytes` is one slot."""
        whole = self.buffer if isinstance(self.buffer, int) else memory_of(self.buffer).length
        return min(self.slot_bytes, whole)

    @staticmethod
    def of(value: object) -> Staging | None:
        """Return *value* as settings. Bytes or memory become the buffer. None stays None."""
        if value is None or isinstance(value, Staging):
            return value
        return Staging(buffer=value)


def memory_of(buffer: Any) -> Memory:  # noqa: ANN401 - numpy's or torch's
    """Return the memory of a numpy array or torch tensor. All its bytes must be its own."""
    wanted = f"a number of bytes, or a numpy array or torch tensor of at least {LEAST} bytes"
    if not isinstance(buffer, np.ndarray) and not hasattr(buffer, "data_ptr"):
        raise SpecError("staging.buffer", buffer, wanted)
    array = read_array("staging.buffer", "staging.buffer", buffer)
    nbytes = math.prod(array.shape) * array.itemsize
    writable = not isinstance(buffer, np.ndarray) or buffer.flags.writeable
    if tuple(array.strides) != (array.itemsize,) or nbytes < LEAST or not writable:
        shape = f"{array.dtype}{tuple(array.shape)}"
        wanted += ", one-dimensional, writable and contiguous"
        raise SpecError("staging.buffer", shape, wanted)
    # torch frees a storage by resizing it to 0, and the tensor keeps its shape.
    if (left := array.memory.end - array.address) < nbytes:
        raise SpecError("staging.buffer", f"{left} bytes", f"{nbytes} bytes that are allocated")
    device = getattr(buffer, "device", "cpu")
    if str(device).partition(":")[0] not in ("cpu", "cuda"):
        wanted = "memory of the host or of a CUDA device"
        raise SpecError("staging.buffer", str(device), wanted)
    return attrs.evolve(array.memory, address=array.address, length=nbytes)


def _allocated(nbytes: int, memory_type: str, device: int) -> Any:  # noqa: ANN401 - numpy's or torch's
    """Allocate *nbytes* for slots. Host memory has a margin of `SPARE` bytes on both sides."""
    try:
        if memory_type == "DRAM":
            return np.empty(SPARE + nbytes + SPARE, np.uint8)
        import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    # torch raises RuntimeError if the memory of the GPU is exhausted.
    except (MemoryError, ValueError, RuntimeError) as error:
        wanted = f"a size that fits into {memory_type} of device {device}"
        raise SpecError("staging.buffer", f"{nbytes} bytes", wanted) from error


# Registers memories, and keeps a reference to their owner.
Register = Callable[[Iterable[Memory], object], None]


class StagingBuffer:
    """One registered memory, divided into slots.

    Attributes:
        memory: The whole memory.
        slot_bytes: Bytes of one slot.
        scratch: Addresses of the unused bytes below and above all slots, or nothing. `copy_runs`
            writes there.
        slots: Number of slots.
    """

    def __init__(self, memory: Memory, slot_bytes: int, given: object = None) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        margin = SPARE if given is None and memory.memory_type == "DRAM" else 0
        self.scratch = (memory.address, memory.end - margin) if margin else ()
        self.slots = (memory.length - 2 * margin) // slot_bytes
        self._first = memory.address + margin
        self._given = given  # Memory of the caller, who may free or resize it.

    def address(self, slot: int) -> int:
        """Return the address of a slot. Raise `TransferError` if the caller freed the buffer."""
        try:
            kept = self._given is None or memory_of(self._given) == self.memory
        except SpecError:
            kept = False
        if not kept:
            message = "the staging buffer was freed or moved while in use"
            state = TransferState.BUG
            raise TransferError(f"{message}: {state.advice}", state=state)
        return self._first + slot * self.slot_bytes


class Buffers:
    """The staging buffers of one rank: one for each memory type and device.

    They are created when they are first needed.

    Attributes:
        staging: The settings.
    """

    def __init__(self, staging: Staging, register: Register, own: RegisteredMemory) -> None:
        self.staging = staging
        self._register = register
        self._own = own
        self._made: dict[tuple[str, int], StagingBuffer] = {}
        self._lock = threading.RLock()  # Two threads must not create the same buffer.

    def open(self) -> None:
        """Register the caller's memory, if any. Raise `SpecError` if a live rank uses it."""
        if isinstance(self.staging.buffer, int):
            return
        memory = memory_of(self.staging.buffer)
        if overlapping(memory):
            gc.collect()  # The other rank may be unreachable but not collected yet.
        for other in overlapping(memory):
            wanted = f"memory outside {text_of(other)}, which another rank has registered"
            raise SpecError("staging.buffer", text_of(memory), wanted)
        self._make(memory, self.staging.buffer)

    def stage(
        self, pairs: Pairing, local: Prepared, remote: Prepared, *, inward: bool
    ) -> Stage | None:
        """Return how to stage *pairs*, or None if that is impossible or slower.

        A staged transfer has one device of the peer, one device of this rank, and no run longer
        than a slot.

        Args:
            pairs: The pairs of ids.
            local: List of this rank.
            remote: List of the peer.
            inward: Whether the transfer is a read.
        """
        staging, near = self.staging, local.rows.device
        if SEVERAL in (near, remote.rows.device) or not pairs.nbytes:
            return None
        # One range is the best case, so the ranges of most transfers need not be found.
        if not staging.saves(pairs.runs, 1, pairs.nbytes):
            return None
        gap, longest = staging.gap if inward else 0, staging.longest
        batches = ranges_of(pairs.spans(), remote.rows.area_begins, longest=longest, gap=gap)
        if batches is None:
            return None
        posted, moved = (sum(len(b.address) for b in batches), sum(b.nbytes for b in batches))
        if not staging.saves(pairs.runs, posted, moved):
            return None
        return Stage(self._beside(local.memory_type, near), batches, posted, inward)

    def _beside(self, memory_type: str, device: int) -> StagingBuffer:
        """Return the buffer for a memory type and device. Create it if it is missing.

        Raise `SpecError` if the caller's memory is of another type or device.
        """
        buffer = self.staging.buffer
        with self._lock:
            if (memory_type, device) not in self._made:
                if not isinstance(buffer, int):
                    made = ", ".join(f"{kind} of device {number}" for kind, number in self._made)
                    wanted = f"{memory_type} of device {device}, the place of the local list"
                    raise SpecError("staging.buffer", made, wanted)
                owner = _allocated(buffer, memory_type, device)
                self._make(attrs.evolve(memory_of(owner), device=device), owner)
            return self._made[memory_type, device]

    def _make(self, memory: Memory, owner: object) -> None:
        given = None if isinstance(self.staging.buffer, int) else owner
        buffer = StagingBuffer(memory, self.staging.longest, given)
        self._register([memory], owner)
        self._own.buffers += (memory,)
        self._made[memory.memory_type, memory.device] = buffer


@attrs.frozen(eq=False)
class Stage:
    """The ranges of one staged transfer.

    Attributes:
        buffer: The buffer of this rank.
        batches: Ranges of the peer, and their runs.
        ranges: Number of ranges.
        inward: Whether the transfer is a read.
    """

    buffer: StagingBuffer
    batches: tuple[Batch, ...]
    ranges: int
    inward: bool

    def spans(self, batch: Batch, slot: int) -> Spans:
        """Return the ranges of *batch* in *slot* and at the peer. A write copies its runs first."""
        base = self.buffer.address(slot)
        if not self.inward:
            self._copy(batch, base)
        return Spans(base + batch.offset, batch.address, batch.length)

    def land(self, batch: Batch, slot: int) -> None:
        """Copy the runs of a finished read from *slot* to their places."""
        if self.inward:
            self._copy(batch, self.buffer.address(slot))

    def _copy(self, batch: Batch, base: int) -> None:
        memory = self.buffer.memory
        place = memory.memory_type, memory.device
        for moves in batch.moves():
            copy_runs(base, moves, inward=self.inward, place=place, scratch=self.buffer.scratch)
