"""The versions of the wire format: which ones a session reads, and which one two sessions speak.

Each session states its oldest and its newest version, in its question and in its handshake. Two
sessions speak the newest version that both can read. So engines of two releases can serve together
while a deployment is upgraded.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from kvspec.errors import SpecError
from kvspec.wire.packing import WireStruct

VERSION = 12
"""The version of the format; any change to it, or to what is meant by it, takes the next."""
OLDEST = 10
"""The oldest version that this package reads and writes."""
ATTEMPTLESS = 12
"""The first version without attempts, pushes and progress. Older messages number an attempt."""
RANGED = 11
"""The first version in which a session states its versions. Older sessions state none."""
START = 16
"""Bytes that identify one start of a session."""
NO_START = bytes(START)
"""The start of a session whose version states none."""

Version = Annotated[int, Meta(ge=1, le=0xFFFF)]


class Versions(WireStruct, frozen=True):
    """The versions that a session reads and writes: *oldest*, *newest* and all between them.

    >>> Versions(10, 11).common(Versions(11, 14))
    11
    >>> Versions(10, 11).common(Versions(12, 14)) is None
    True
    """

    oldest: Version
    newest: Version

    def __post_init__(self) -> None:
        if self.oldest > self.newest:
            raise SpecError("oldest", self.oldest, f"at most {self.newest}, the newest version")

    def __str__(self) -> str:
        return f"{self.oldest} to {self.newest}"

    def __contains__(self, version: int) -> bool:
        return self.oldest <= version <= self.newest

    def common(self, other: Versions) -> int | None:
        """Return the newest version of both, or None."""
        version = min(self.newest, other.newest)
        return version if version in self and version in other else None


OWN = Versions(OLDEST, VERSION)
"""The versions of this package."""
