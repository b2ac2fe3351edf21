"""A short description of pushed data, which the reader computes as well and compares.

Invariant: two requests have equal descriptions if they write the same tokens into the same blocks
of the consumer.
"""

from __future__ import annotations

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int

SUM = 16
"""Bytes of the sum over blocks, and of that over cached tokens."""
MOST = 2**62


@attrs.frozen
class Pushed:
    """The data that one rank wrote for another, in the groups that it has.

    Attributes:
        num_tokens: Tokens of the prompt.
        encoder_tokens: Tokens of the encoder, or 0 if none are written.
        state_tokens: Tokens that a recurrent state has seen, or 0 if none is written.
        cached: Checksum, 16 bytes, of the first position of each group.
        blocks: Checksum, 16 bytes, of the blocks of each group.
    """

    num_tokens: int
    encoder_tokens: int
    state_tokens: int
    cached: bytes = attrs.field(repr=False)
    blocks: bytes = attrs.field(repr=False)

    def __attrs_post_init__(self) -> None:
        for name in ("num_tokens", "encoder_tokens", "state_tokens"):
            positive_int(f"pushed.{name}", getattr(self, name), least=0, most=MOST)
        for name in ("cached", "blocks"):
            value = getattr(self, name)
            if not isinstance(value, bytes) or len(value) != SUM:
                raise SpecError(f"pushed.{name}", value, f"{SUM} bytes")

    def differs(self, wanted: Pushed) -> str:
        """Return how *wanted* differs, or "".

        The counts come first, because the rest depends on them.
        """
        counts = [
            f"{name}={own}, expected {other}"
            for name in ("num_tokens", "encoder_tokens", "state_tokens")
            if (own := getattr(self, name)) != (other := getattr(wanted, name))
        ]
        if counts:
            return ", ".join(counts)
        if self.cached != wanted.cached:
            return "cached_tokens differ from those of the reader"
        return "" if self.blocks == wanted.blocks else "other consumer_blocks than the reader's"
