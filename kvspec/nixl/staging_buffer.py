"""The buffer: registered memory through which staged transfers go, slot by slot.

Law: a slot belongs to one transfer from before it is posted until no byte of it can move, in
quarantine too. Who finds no slot free waits in line, and moves the others on while it waits: so
a free slot goes to who waits longest, and nobody waits for a transfer that nobody polls.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import threading
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import attrs
import numpy as np

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, instance, positive_int
from kvspec.memory.from_tensors import check_tensor
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import living
from kvspec.nixl.calibration import calibrated
from kvspec.nixl.costs import Costs
from kvspec.nixl.living import Held
from kvspec.nixl.memory import overlap, text_of
from kvspec.nixl.permuting import SPARE

BUFFER = 32 << 20
SLOT_BYTES = 8 << 20
LEAST = 4096


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """How a rank stages: through which buffer, in slots of which size, and by which costs.

    *buffer*: bytes of memory to allocate where it is first needed, beside what is moved; or memory
    of the caller's, held from then on: a numpy array or a torch tensor of one dimension, without
    gaps. No other rank may have it, nor any cache lie in it: what this process knows of is refused.
    *slot_bytes*: bytes that one handle moves. A transfer is staged where *costs*, by default those
    of `calibrated`, say that it takes less time, or *always* where it can be. Of one with a run
    longer than a slot nothing is staged.
    """

    buffer: Any = BUFFER
    slot_bytes: int = SLOT_BYTES
    costs: Costs = attrs.field(factory=calibrated)
    always: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.buffer, int):
            positive_int("staging.buffer", self.buffer, least=LEAST)
        else:
            memory_of(self.buffer)
        positive_int("staging.slot_bytes", self.slot_bytes)
        instance("staging.costs", self.costs, Costs)
        flag("staging.always", self.always)

    @property
    def longest(self) -> int:
        """Bytes of a slot, no more than the buffer has."""
        whole = self.buffer if isinstance(self.buffer, int) else memory_of(self.buffer).length
        return min(self.slot_bytes, whole)

    @staticmethod
    def of(value: object) -> Staging | None:
        """Return *value* as settings: bytes or memory are the buffer; None is none."""
        if value is None or isinstance(value, Staging):
            return value
        return Staging(buffer=value)


def memory_of(buffer: Any) -> Memory:  # noqa: ANN401 - numpy's or torch's
    """Return the memory of a numpy array or a torch tensor, all of whose bytes are its own."""
    wanted = f"a number of bytes, or a numpy array or torch tensor of at least {LEAST} bytes"
    if not isinstance(buffer, np.ndarray) and not hasattr(buffer, "data_ptr"):
        raise SpecError("staging.buffer", buffer, wanted)
    check_tensor("staging.buffer", buffer)
    if isinstance(buffer, np.ndarray):
        whole, writable = buffer.flags.c_contiguous, buffer.flags.writeable
        if buffer.ndim != 1 or not whole or not writable or buffer.nbytes < LEAST:
            shape = f"{buffer.dtype}{buffer.shape}"
            raise SpecError(
                "staging.buffer", shape, f"{wanted}, of one dimension, writable, no gaps"
            )
        return Memory(buffer.ctypes.data, buffer.nbytes)
    nbytes = buffer.numel() * buffer.element_size()
    storage = buffer.untyped_storage().nbytes() - buffer.storage_offset() * buffer.element_size()
    if not buffer.is_contiguous() or nbytes < LEAST:
        shape = f"{buffer.dtype}{tuple(buffer.shape)}"
        raise SpecError("staging.buffer", shape, f"{wanted}, without gaps")
    if storage < nbytes:
        raise SpecError("staging.buffer", f"{storage} bytes", f"{nbytes} bytes, not freed")
    kind = {"cpu": "DRAM", "cuda": "VRAM"}.get(buffer.device.type)
    if kind is None:
        raise SpecError(
            "staging.buffer", str(buffer.device), "memory of the host or of a CUDA device"
        )
    return Memory(buffer.data_ptr(), nbytes, kind, buffer.device.index or 0)


def _allocated(nbytes: int, memory_type: str, device: int) -> Any:  # noqa: ANN401 - numpy's or torch's
    try:
        if memory_type == "DRAM":
            return np.empty(SPARE + nbytes + SPARE, np.uint8)
        import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    except (MemoryError, ValueError, RuntimeError) as error:  # of torch: what does not fit, too
        wanted = f"what fits into {memory_type} of device {device}"
        raise SpecError("staging.buffer", f"{nbytes} bytes", wanted) from error


Register = Callable[[Iterable[Memory], object], None]
"""Registers memories, and holds what owns them."""


class User(Protocol):
    """A transfer, as it is seen here.

    *buffer*: through which it goes. *ticket*: its place in the line, if it waits for a slot.
    """

    buffer: StagingBuffer | None
    ticket: int | None

    @property
    def over(self) -> bool:
        """Whether no byte of it moves any more."""

    @property
    def slots_held(self) -> Iterable[int]:
        """Which slots of the buffer are its own."""

    def step(self) -> bool:
        """Move it on; return whether anything of it was done."""


class StagingBuffer:
    """One registered memory in slots, for those of the rank's *transfers* that go through it.

    *scratch*: where bytes begin that are no slot's, before and behind all slots; see `copy_runs`.
    """

    def __init__(
        self, memory: Memory, slot_bytes: int, transfers: Iterable[User], given: object = None
    ) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        margin = SPARE if given is None and memory.memory_type == "DRAM" else 0
        self.scratch = (memory.address, memory.end - margin) if margin else ()
        self.slots = (memory.length - 2 * margin) // slot_bytes
        self._first = memory.address + margin
        self._given = given  # by a caller, who may free what is held here
        self._transfers = transfers
        self._tickets = itertools.count()

    def address(self, slot: int) -> int:
        """Return where a slot begins; refuse a buffer that its owner freed."""
        if self._given is not None:
            with contextlib.suppress(SpecError):
                if memory_of(self._given) == self.memory:
                    return self._first + slot * self.slot_bytes
            message = (
                f"the staging buffer was freed or moved while in use: {TransferState.BUG.advice}"
            )
            raise TransferError(message, state=TransferState.BUG)
        return self._first + slot * self.slot_bytes

    def ticket(self) -> int:
        """Return a place in the line."""
        return next(self._tickets)

    def free_slot(self, ticket: int | None) -> int | None:
        """Return a free slot for who holds *ticket*, or none yet; None where it has to wait."""
        others = self._users()
        held = {slot for user in others for slot in user.slots_held}
        ahead = sum(
            user.ticket is not None and (ticket is None or user.ticket < ticket) for user in others
        )
        if self.slots - len(held) <= ahead:
            return None
        return next(slot for slot in range(self.slots) if slot not in held)

    def poll_others(self, waiting: User) -> None:
        """Move the others on, that *waiting* gets its turn: until something of them is done."""
        line = sorted(self._users(), key=lambda other: (other.ticket is None, other.ticket or 0))
        for other in line:
            if other is not waiting and other.step():
                return

    def _users(self) -> list[User]:
        return [each for each in self._transfers if each.buffer is self and not each.over]


class Buffers:
    """The buffers of one rank: one for each memory that is staged for, made when first needed.

    *staging*: None where nothing is staged.
    """

    def __init__(
        self,
        staging: Staging | None,
        register: Register,
        transfers: Iterable[User],
        held: Held,
    ) -> None:
        self.staging = staging
        self._register = register
        self._transfers = transfers
        self._held = held
        self._made: dict[tuple[str, int], StagingBuffer] = {}
        self._lock = threading.RLock()  # of making one

    def open(self) -> None:
        """Register the memory that was given, if any; refuse what another live rank has."""
        if self.staging is None or isinstance(self.staging.buffer, int):
            return
        memory = memory_of(self.staging.buffer)
        if any(overlap(memory, other) for other in living.memories()):
            gc.collect()  # a rank that nobody has any more may still be there
        for other in living.memories():
            if overlap(memory, other):
                wanted = f"memory that no other rank has, as {text_of(other)}"
                raise SpecError("staging.buffer", text_of(memory), wanted)
        self._make(self.staging, memory, self.staging.buffer)

    def beside(self, staging: Staging, memory_type: str, device: int) -> StagingBuffer:
        """Return the buffer of a kind of memory and device; refuse another than was given."""
        with self._lock:
            if (memory_type, device) not in self._made:
                if not isinstance(staging.buffer, int):
                    told = ", ".join(f"{kind} of device {number}" for kind, number in self._made)
                    wanted = f"{memory_type} of device {device}, where the local list lies"
                    raise SpecError("staging.buffer", told, wanted)
                owner = _allocated(staging.buffer, memory_type, device)
                self._make(staging, attrs.evolve(memory_of(owner), device=device), owner)
            return self._made[memory_type, device]

    def _make(self, staging: Staging, memory: Memory, owner: object) -> None:
        given = None if isinstance(staging.buffer, int) else owner
        buffer = StagingBuffer(memory, staging.longest, self._transfers, given)
        self._register([memory], owner)
        self._held.buffers += (memory,)
        self._made[memory.memory_type, memory.device] = buffer
