"""The ranks that live in this process: no two of one name, and none when the interpreter ends.

Threads that still wait for NIXL while the interpreter ends would make it abort.
"""

from __future__ import annotations

import atexit
import threading
import weakref
from typing import Protocol

from kvspec.errors import SpecError


class Living(Protocol):
    """A rank, as it is seen here."""

    name: str

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the connected peers."""

    def close(self) -> None:
        """Let go of everything."""


_RANKS: weakref.WeakValueDictionary[str, Living] = weakref.WeakValueDictionary()
_LOCK = threading.Lock()


def enter(rank: Living) -> None:
    """Let *rank* live; refuse a name that a live rank has or knows."""
    with _LOCK:
        if any(rank.name in {other.name, *other.peers} for other in tuple(_RANKS.values())):
            raise SpecError("name", rank.name, "a name that no live rank of this process knows")
        _RANKS[rank.name] = rank


def leave(rank: Living) -> None:
    """Free the name of *rank*."""
    if _RANKS.get(rank.name) is rank:
        del _RANKS[rank.name]


@atexit.register
def close_all() -> None:
    """Close every rank that lives."""
    for rank in tuple(_RANKS.values()):
        rank.close()
