"""Check registered memory: each byte once, and each row inside one registered memory.

Invariant: a descriptor lies in one registered memory. So memories that overlap in part are refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product

import numpy as np

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance, positive_int, sequence
from kvspec.memory.rank_cache import MEMORY_TYPES, Memory
from kvspec.nixl.rows import ID_END, StridedRows


def check_memory_type(value: object) -> None:
    """Refuse *value* unless it is one of `MEMORY_TYPES`."""
    if not isinstance(value, str) or value not in MEMORY_TYPES:
        raise SpecError("memory_type", value, " or ".join(MEMORY_TYPES))


def new_memories(
    registered: Sequence[Memory], memories: Iterable[Memory], buffers: Sequence[Memory] = ()
) -> tuple[Memory, ...]:
    """Return what of *memories* is still to be registered, given what is *registered*.

    A memory inside a registered one is already covered. One that overlaps another without lying
    inside it is refused: a row over the boundary would lie in neither. So is one in staging
    *buffers*.
    """
    given = sequence("memories", memories, "Memories")
    wanted = [_checked(f"memories[{place}]", memory) for place, memory in enumerate(given)]
    for memory, buffer in product(wanted, buffers):
        if overlap(memory, buffer):
            raise SpecError(
                "memories", text_of(memory), f"memory outside the staging buffer {text_of(buffer)}"
            )
    every = [(memory, True) for memory in registered] + [(memory, False) for memory in wanted]
    every.sort(key=lambda pair: (*_device(pair[0]), pair[0].address, -pair[0].end))
    fresh: list[Memory] = []
    last: Memory | None = None
    for memory, known in every:
        if last is not None and _device(last) == _device(memory) and memory.address < last.end:
            if known or memory.end > last.end:
                raise SpecError(
                    "memories", text_of(memory), f"memory without overlap with {text_of(last)}"
                )
            continue
        last = memory
        if not known:
            fresh.append(memory)
    return tuple(fresh)


def _checked(field: str, memory: object) -> Memory:
    checked = instance(field, memory, Memory)
    for name, least in (("address", 1), ("length", 1), ("device", 0)):
        most = ID_END - 1 if name == "device" else checked.end
        positive_int(f"{field}.{name}", getattr(checked, name), least=least, most=most)
    return checked


def _device(memory: Memory) -> tuple[str, int]:
    return memory.memory_type, memory.device


def overlap(memory: Memory, other: Memory) -> bool:
    """Whether two memories share a byte."""
    first, last = max(memory.address, other.address), min(memory.end, other.end)
    return _device(memory) == _device(other) and first < last


def text_of(memory: Memory) -> str:
    """Return *memory* as a message shows it."""
    where = f"[{memory.address:#x}, {memory.end:#x})"
    return f"{memory.memory_type} {where} of device {memory.device}"


def check_inside(rows: StridedRows, memory_type: str, registered: Sequence[Memory]) -> None:
    """Refuse *rows* unless each lies, whole, inside one of the *registered* memories."""
    address, device = rows.table.view(np.int64)[:, (0, 2)].T
    of_type = [memory for memory in registered if memory.memory_type == memory_type]
    inside = np.zeros(len(rows.table), dtype=bool)
    for memory in of_type:
        within = (address >= memory.address) & (rows.end <= memory.end)
        inside |= within & (device == memory.device)
    if not inside.all():
        row = int((~inside).argmax())
        start, end = int(address[row]), int(rows.end[row])
        gaps = {each: max(each.address - end, start - each.end, 0) for each in of_type}
        near = min(gaps, key=lambda each: (gaps[each], abs(each.address - start)), default=None)
        raise TransferError(
            f"rows[{row}] ({rows.text(row)}, end {int(rows.end[row]):#x}) must be inside registered"
            f" {memory_type} memory; nearest memory: {text_of(near) if near else 'none'}",
            state=TransferState.NOT_REGISTERED,
        )
