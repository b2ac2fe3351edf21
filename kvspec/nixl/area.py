"""The area: registered memory through which staged transfers go, slot by slot.

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
from kvspec.memory.arrays import check_tensor
from kvspec.memory.regions import Memory
from kvspec.nixl import living
from kvspec.nixl.calibration import calibrated
from kvspec.nixl.costs import Costs
from kvspec.nixl.living import Held
from kvspec.nixl.memory import overlap, text_of
from kvspec.nixl.permuting import SPARE

AREA = 32 << 20
SLOT_BYTES = 8 << 20
LEAST = 4096


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """How a rank stages: through which area, in slots of which size, and by which costs.

    *area*: bytes of memory to allocate where it is first needed, beside what is moved; or memory of
    the caller's, held from then on: a numpy array or a torch tensor of one dimension, without gaps.
    No other rank may have it, nor any cache lie in it: what this process knows of is refused.
    *slot_bytes*: bytes that one handle moves. A transfer is staged where *costs*, by default those
    of `calibrated`, say that it takes less time, or *always* where it can be. Of one with a run
    longer than a slot nothing is staged.
    """

    area: Any = AREA
    slot_bytes: int = SLOT_BYTES
    costs: Costs = attrs.field(factory=calibrated)
    always: bool = False

    def __attrs_post_init__(self) -> None:
        if isinstance(self.area, int):
            positive_int("staging.area", self.area, least=LEAST)
        else:
            memory_of(self.area)
        positive_int("staging.slot_bytes", self.slot_bytes)
        instance("staging.costs", self.costs, Costs)
        flag("staging.always", self.always)

    @property
    def longest(self) -> int:
        """Bytes of a slot, no more than the area has."""
        whole = self.area if isinstance(self.area, int) else memory_of(self.area).length
        return min(self.slot_bytes, whole)

    @staticmethod
    def of(value: object) -> Staging | None:
        """Return *value* as settings: bytes or memory are the area; None is none."""
        if value is None or isinstance(value, Staging):
            return value
        return Staging(area=value)


def memory_of(area: Any) -> Memory:  # noqa: ANN401 - numpy's or torch's
    """Return the memory of a numpy array or a torch tensor, all of whose bytes are its own."""
    wanted = f"a number of bytes, or a numpy array or torch tensor of at least {LEAST} bytes"
    if not isinstance(area, np.ndarray) and not hasattr(area, "data_ptr"):
        raise SpecError("staging.area", area, wanted)
    check_tensor("staging.area", area)
    if isinstance(area, np.ndarray):
        whole, writable = area.flags.c_contiguous, area.flags.writeable
        if area.ndim != 1 or not whole or not writable or area.nbytes < LEAST:
            shape = f"{area.dtype}{area.shape}"
            raise SpecError("staging.area", shape, f"{wanted}, of one dimension, writable, no gaps")
        return Memory(area.ctypes.data, area.nbytes)
    nbytes = area.numel() * area.element_size()
    storage = area.untyped_storage().nbytes() - area.storage_offset() * area.element_size()
    if not area.is_contiguous() or nbytes < LEAST:
        shape = f"{area.dtype}{tuple(area.shape)}"
        raise SpecError("staging.area", shape, f"{wanted}, without gaps")
    if storage < nbytes:
        raise SpecError("staging.area", f"{storage} bytes", f"{nbytes} bytes, not freed")
    kind = {"cpu": "DRAM", "cuda": "VRAM"}.get(area.device.type)
    if kind is None:
        raise SpecError("staging.area", str(area.device), "memory of the host or of a CUDA device")
    return Memory(area.data_ptr(), nbytes, kind, area.device.index or 0)


def _allocated(nbytes: int, memory_type: str, device: int) -> Any:  # noqa: ANN401 - numpy's or torch's
    try:
        if memory_type == "DRAM":
            return np.empty(SPARE + nbytes + SPARE, np.uint8)
        import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

        return torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
    except (MemoryError, ValueError, RuntimeError) as error:  # of torch: what does not fit, too
        wanted = f"what fits into {memory_type} of device {device}"
        raise SpecError("staging.area", f"{nbytes} bytes", wanted) from error


Register = Callable[[Iterable[Memory], object], None]
"""Registers memories, and holds what owns them."""


class User(Protocol):
    """A transfer, as it is seen here.

    *area*: through which it goes. *ticket*: its place in the line, if it waits for a slot.
    """

    area: Area | None
    ticket: int | None

    @property
    def over(self) -> bool:
        """Whether no byte of it moves any more."""

    @property
    def slots_held(self) -> Iterable[int]:
        """Which slots of the area are its own."""

    def step(self) -> bool:
        """Move it on; return whether anything of it was done."""


class Area:
    """One registered memory in slots, for those of the rank's *transfers* that go through it.

    *spares*: where bytes begin that are no slot's, before and behind all slots; see `copy_runs`.
    """

    def __init__(
        self, memory: Memory, slot_bytes: int, transfers: Iterable[User], given: object = None
    ) -> None:
        self.memory = memory
        self.slot_bytes = slot_bytes
        margin = SPARE if given is None and memory.memory_type == "DRAM" else 0
        self.spares = (memory.address, memory.end - margin) if margin else ()
        self.slots = (memory.length - 2 * margin) // slot_bytes
        self._first = memory.address + margin
        self._given = given  # by a caller, who may free what is held here
        self._transfers = transfers
        self._tickets = itertools.count()

    def address(self, slot: int) -> int:
        """Return where a slot begins; refuse an area that its owner freed."""
        if self._given is not None:
            with contextlib.suppress(SpecError):
                if memory_of(self._given) == self.memory:
                    return self._first + slot * self.slot_bytes
            message = (
                f"the staging area was freed or moved while in use: {TransferState.BUG.advice}"
            )
            raise TransferError(message, state=TransferState.BUG)
        return self._first + slot * self.slot_bytes

    def ticket(self) -> int:
        """Return a place in the line."""
        return next(self._tickets)

    def room(self, ticket: int | None) -> int | None:
        """Return a free slot for who holds *ticket*, or none yet; None where it has to wait."""
        others = self._users()
        held = {slot for user in others for slot in user.slots_held}
        ahead = sum(
            user.ticket is not None and (ticket is None or user.ticket < ticket) for user in others
        )
        if self.slots - len(held) <= ahead:
            return None
        return next(slot for slot in range(self.slots) if slot not in held)

    def move_on(self, waiting: User) -> None:
        """Move the others on, that *waiting* gets its turn: until something of them is done."""
        line = sorted(self._users(), key=lambda other: (other.ticket is None, other.ticket or 0))
        for other in line:
            if other is not waiting and other.step():
                return

    def _users(self) -> list[User]:
        return [each for each in self._transfers if each.area is self and not each.over]


class Areas:
    """The areas of one rank: one for each memory that is staged for, made when first needed.

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
        self._made: dict[tuple[str, int], Area] = {}
        self._lock = threading.RLock()  # of making one

    def open(self) -> None:
        """Register the memory that was given, if any; refuse what another live rank has."""
        if self.staging is None or isinstance(self.staging.area, int):
            return
        memory = memory_of(self.staging.area)
        if any(overlap(memory, other) for other in living.memories()):
            gc.collect()  # a rank that nobody has any more may still be there
        for other in living.memories():
            if overlap(memory, other):
                wanted = f"memory that no other rank has, as {text_of(other)}"
                raise SpecError("staging.area", text_of(memory), wanted)
        self._make(self.staging, memory, self.staging.area)

    def beside(self, staging: Staging, memory_type: str, device: int) -> Area:
        """Return the area of a kind of memory and device; refuse another than was given."""
        with self._lock:
            if (memory_type, device) not in self._made:
                if not isinstance(staging.area, int):
                    told = ", ".join(f"{kind} of device {number}" for kind, number in self._made)
                    wanted = f"{memory_type} of device {device}, where the local list lies"
                    raise SpecError("staging.area", told, wanted)
                owner = _allocated(staging.area, memory_type, device)
                self._make(staging, attrs.evolve(memory_of(owner), device=device), owner)
            return self._made[memory_type, device]

    def _make(self, staging: Staging, memory: Memory, owner: object) -> None:
        given = None if isinstance(staging.area, int) else owner
        area = Area(memory, staging.longest, self._transfers, given)
        self._register([memory], owner)
        self._held.areas += (memory,)
        self._made[memory.memory_type, memory.device] = area
