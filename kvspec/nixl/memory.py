"""Check the memory of a rank.

Invariant: each byte is registered once, and memories that overlap in part are refused. So a row
that lies whole in one registered memory lies in no other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.memory.rank_cache import MEMORY_TYPES, Memory
from kvspec.nixl.rows import ID_END


def check_memory_type(value: object) -> None:
    """Raise `SpecError` if *value* is not one of `MEMORY_TYPES`."""
    if not isinstance(value, str) or value not in MEMORY_TYPES:
        raise SpecError("memory_type", value, " or ".join(MEMORY_TYPES))


def new_memories(registered: Sequence[Memory], memories: Iterable[Memory]) -> tuple[Memory, ...]:
    """Return those of *memories* that are neither registered nor inside a registered memory.

    Raise `SpecError` for a memory that overlaps another one in part: a row over the boundary would
    lie in neither. Raise it also for a memory that contains a registered one, because that one
    cannot grow.
    """
    given = sequence("memories", memories, "Memories")
    wanted = [_checked(f"memories[{place}]", memory) for place, memory in enumerate(given)]
    # Each memory with its number in *memories*, or -1 if it is registered.
    every = [(memory, -1) for memory in registered]
    every += [(memory, number) for number, memory in enumerate(wanted)]
    every.sort(key=lambda pair: (*_device(pair[0]), pair[0].address, -pair[0].end))
    fresh: list[Memory] = []
    last, before = None, -1
    for memory, number in every:
        if last is None or not _overlap(memory, last):
            last, before = memory, number
            fresh += [memory] * (number >= 0)
        elif number < 0 or memory.end > last.end:
            known, new = (memory, before) if number < 0 else (last, number)
            rule = f"no overlap with {_text(known)}, or a memory inside it"
            raise SpecError(f"memories[{new}]", _text(wanted[new]), rule)
    return tuple(fresh)


def _checked(field: str, memory: object) -> Memory:
    checked = instance(field, memory, Memory)
    for name, least in (("address", 1), ("length", 1), ("device", 0)):
        most = ID_END - 1 if name == "device" else checked.end
        positive_int(f"{field}.{name}", getattr(checked, name), least=least, most=most)
    return checked


def _device(memory: Memory) -> tuple[str, int]:
    return memory.memory_type, memory.device


def _overlap(memory: Memory, other: Memory) -> bool:
    """Whether two memories share a byte."""
    first, last = max(memory.address, other.address), min(memory.end, other.end)
    return _device(memory) == _device(other) and first < last


def _text(memory: Memory) -> str:
    """Return *memory* for a message."""
    where = f"[{memory.address:#x}, {memory.end:#x})"
    return f"{memory.memory_type} {where} of device {memory.device}"
