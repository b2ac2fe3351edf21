"""What a producer rank pushed to a reader, in few bytes: the reader has worked out the same.

Law: equal are those of requests that write the same tokens into the same of the consumer's blocks.
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
    """What one rank wrote for another, of those groups that it has for it.

    *num_tokens*: of the prompt; *encoder_tokens*, *state_tokens*: 0 where nothing of them is
    written. *cached*, *blocks*: 16 bytes that sum up where each group begins, and its blocks.
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
        """Say what is another than *expected*; the counts first, on which the rest depends."""
        counts = [
            f"{name}={own}, expected {other}"
            for name in ("num_tokens", "encoder_tokens", "state_tokens")
            if (own := getattr(self, name)) != (other := getattr(wanted, name))
        ]
        if counts:
            return ", ".join(counts)
        if self.cached != wanted.cached:
            return "other cached_tokens than the reader's"
        return "" if self.blocks == wanted.blocks else "other consumer_blocks than the reader's"
