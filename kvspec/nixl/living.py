"""Know all live ranks of this process and their registered memory.

Invariant: two live ranks never have the same name. The staging buffer of a rank never overlaps
memory of another rank. All ranks are closed when the interpreter exits.
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
    """What this module needs of a rank."""

    name: str

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the connected peers."""

    def close(self) -> None:
        """Release everything."""


@attrs.define(eq=False)
class Held:
    """The memory that a rank has registered.

    Attributes:
        memories: All registered memories.
        buffers: Those of them that are staging buffers.
    """

    memories: tuple[Memory, ...] = ()
    buffers: tuple[Memory, ...] = ()

    @property
    def caches(self) -> tuple[Memory, ...]:
        """The registered memories that are not staging buffers."""
        return tuple(memory for memory in self.memories if memory not in self.buffers)


# Weak references: a rank that the caller drops without `close` must disappear with its agent.
_RANKS: weakref.WeakValueDictionary[str, Living] = weakref.WeakValueDictionary()
_HELD: weakref.WeakValueDictionary[str, Held] = weakref.WeakValueDictionary()
# Reentrant, because a signal handler may close a rank while the same thread holds the lock.
_LOCK = threading.RLock()
# A fork copies the lock in its present state. If another thread held it, the child would wait
# forever. So the forking thread takes it first, and both processes release it.
os.register_at_fork(
    before=_LOCK.acquire, after_in_child=_LOCK.release, after_in_parent=_LOCK.release
)


def enter(rank: Living, held: Held) -> None:
    """Add *rank* and its memory. Raise `SpecError` if a live rank has or knows its name."""
    with _LOCK:
        # NIXL refuses a peer with the name of the local agent or of another peer.
        if any(rank.name in {other.name, *other.peers} for other in _alive()):
            raise SpecError(
                "name", rank.name, "a name that no live rank of this process has or knows"
            )
        _RANKS[rank.name], _HELD[rank.name] = rank, held


def leave(rank: Living) -> None:
    """Free the name of *rank*."""
    with _LOCK:
        if _RANKS.get(rank.name) is rank:
            del _RANKS[rank.name]
            _HELD.pop(rank.name, None)


def buffers() -> tuple[Memory, ...]:
    """Return the staging buffers of all live ranks."""
    return tuple(buffer for held in _held() for buffer in held.buffers)


def memories() -> tuple[Memory, ...]:
    """Return the registered memories of all live ranks."""
    return tuple(memory for held in _held() for memory in held.memories)


def _alive() -> tuple[Living, ...]:
    with _LOCK:
        return tuple(_RANKS.values())


def _held() -> tuple[Held, ...]:
    with _LOCK:
        return tuple(_HELD.values())


@atexit.register
def close_all() -> None:
    """Close all live ranks.

    At exit, a thread that still waits inside NIXL would abort the process.
    """
    for rank in _alive():
        rank.close()
