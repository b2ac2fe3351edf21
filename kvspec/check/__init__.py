"""Check that a transfer is right: `verify`, digests, a reference copy and an exhaustive proof.

Invariant: the checkers go through what should arrive, and share no code with what they check.
"""

from kvspec.check import digests, reference
from kvspec.check.proof import prove

__all__ = [
    "digests",
    "prove",
    "reference",
]
