"""Check the memory of a rank.

Invariant: each byte is registered once, and memories that overlap in part are refused. So a row
that lies whole in one registered memory lies in no other one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.memory.rank_cache import Memory
from kvspec.nixl.rows import ID_END


def new_memories(registered: Sequence[Memory], memories: Iterable[Memory]) -> tuple[Memory, ...]:
    """Return those of *memories* that are neither registered nor inside a registered memory.

    Raise `SpecError` for a memory that overlaps another one in part: a row over the boundary would
    lie in neither. Raise it also for a memory that contains a registered one, because that one
    cannot grow.
    """
    given = sequence("memories", memories, "Memories")
    wanted = [(place, _checked(f"memories[{place}]", each)) for place, each in enumerate(given)]
    # By device: a rank may have thousands of files, and each is a device of its own.
    known: dict[tuple[str, int], list[Memory]] = {}
    for memory in registered:
        known.setdefault((memory.memory_type, memory.device), []).append(memory)
    new = []
    # The longest first, so that none contains an earlier one.
    for place, memory in sorted(wanted, key=lambda pair: (-pair[1].length, pair[1].address)):
        beside = known.setdefault((memory.memory_type, memory.device), [])
        other = next((each for each in beside if _overlap(each, memory)), None)
        if other is None:
            beside.append(memory)
            new.append(memory)
        elif memory.address < other.address or memory.end > other.end:
            rule = f"no overlap with {_text(other)}, or a memory inside it"
            raise SpecError(f"memories[{place}]", _text(memory), rule)
    return tuple(new)


def _checked(field: str, memory: object) -> Memory:
    checked = instance(field, memory, Memory)
    positive_int(f"{field}.address", checked.address)
    positive_int(f"{field}.length", checked.length)
    positive_int(f"{field}.device", checked.device, least=0, most=ID_END - 1)
    return checked


def _overlap(memory: Memory, other: Memory) -> bool:
    """Whether two memories of one device share a byte."""
    return memory.address < other.end and other.address < memory.end


def _text(memory: Memory) -> str:
    """Return *memory* for a message."""
    where = f"[{memory.address:#x}, {memory.end:#x})"
    return f"{memory.memory_type} {where} of device {memory.device}"
