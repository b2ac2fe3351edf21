"""The ranks that live in this process: no two of one name, no buffer of one in another's memory.

None when the interpreter ends: threads that still wait for NIXL then would make it abort.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from typing import Protocol

import attrs

from kvspec.errors import SpecError
from kvspec.memory.rank_cache import Memory


class Living(Protocol):
    """A rank, as it is seen here."""

    name: str

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the connected peers."""

    def close(self) -> None:
        """Let go of everything."""


@attrs.define(eq=False)
class Held:
    """The *memories* that a rank has registered; *buffers*: those that it stages through."""

    memories: tuple[Memory, ...] = ()
    buffers: tuple[Memory, ...] = ()

    @property
    def caches(self) -> tuple[Memory, ...]:
        """Those that are no buffer."""
        return tuple(memory for memory in self.memories if memory not in self.buffers)


_RANKS: weakref.WeakValueDictionary[str, Living] = weakref.WeakValueDictionary()
_HELD: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()
_LOCK = threading.RLock()  # a handler of a signal may close a rank
os.register_at_fork(
    before=_LOCK.acquire, after_in_child=_LOCK.release, after_in_parent=_LOCK.release
)


def enter(rank: Living, held: Held) -> None:
    """Let *rank* live, and its memory be known; refuse a name that a live rank has or knows."""
    with _LOCK:
        if any(rank.name in {other.name, *other.peers} for other in _alive()):
            raise SpecError("name", rank.name, "a name that no live rank of this process knows")
        _RANKS[rank.name], _HELD[rank.name] = rank, held


def leave(rank: Living) -> None:
    """Free the name of *rank*."""
    with _LOCK:
        if _RANKS.get(rank.name) is rank:
            del _RANKS[rank.name]
            _HELD.pop(rank.name, None)


def buffers() -> tuple[Memory, ...]:
    """Return what ranks that live stage through."""
    return tuple(buffer for held in _held() for buffer in held.buffers)


def memories() -> tuple[Memory, ...]:
    """Return what ranks that live have registered."""
    return tuple(memory for held in _held() for memory in held.memories)


def _alive() -> tuple[Living, ...]:
    with _LOCK:
        return tuple(_RANKS.values())


def _held() -> tuple[Held, ...]:
    with _LOCK:
        return tuple(_HELD.values())


@atexit.register
def close_all() -> None:
    """Close every rank that lives."""
    for rank in _alive():
        rank.close()
