"""What a session holds, counted."""

from __future__ import annotations

import attrs


@attrs.frozen
class SessionLeftovers:
    """What a session holds: all zero once everything came to its end and it is closed.

    *loads* of which anything is still said, *steps* that may still write, *pushes* to readers that
    may come again, requests *held* for readers, and *remembered*; *engines* that were met, and
    starts whose lanes are still *leaving*.
    """

    loads: int = 0
    steps: int = 0
    pushes: int = 0
    held: int = 0
    remembered: int = 0
    engines: int = 0
    leaving: int = 0
