"""The waist: one named array of a block.

Law: every kind of layer becomes parts, and nothing that comes after knows more of a kind than they
say.
"""

from __future__ import annotations

import attrs

from kvspec.dtypes import dtype_name, itemsize
from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int


def _dtype(value: object) -> str | None:
    return None if value is None else dtype_name(value)


@attrs.frozen(kw_only=True, cache_hash=True)
class Part:
    """One named array of a block: units x states x content bytes.

    *units*: what TP can divide among its ranks (KV heads, SSM heads, conv channels; 1 =
    never split). *states*: rows of one block. *content_bytes*: bytes of one (unit, state),
    contiguous in every layout. *granularity*: units are sharded in whole multiples of this.
    *tokens_per_state*: tokens that one row stands for; 0 for a state that is not indexed by tokens.
    *dtype*: the type of the content's elements, or None where it is opaque bytes.
    *tensor*: a page holds its tensors one after the other, each as the layout says; parts of one
    tensor lie side by side in it: where rows are tokens, packed in the content (k and v) unless the
    layout has planes; in a state, one part's units after the other's (the channels of a conv
    state). *whole*: what one rank holds of the part cannot be cut between units (packed formats
    whose scales span heads). *chunks*: equal chunks in which the content lies in memory; a block
    has the first chunk of all its rows, then the second.
    """

    name: str
    units: int
    states: int
    content_bytes: int
    granularity: int = 1
    tokens_per_state: int = 1
    dtype: str | None = attrs.field(default=None, converter=_dtype)
    tensor: str = "kv"
    whole: bool = False
    chunks: int = 1

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError("name", self.name, "a non-empty str")
        for field in ("units", "states", "content_bytes", "granularity", "chunks"):
            positive_int(f"{self.name}.{field}", getattr(self, field))
        positive_int(f"{self.name}.tokens_per_state", self.tokens_per_state, least=0)
        if self.units % self.granularity:
            raise SpecError(f"{self.name}.units", self.units, f"a multiple of {self.granularity}")
        if not isinstance(self.tensor, str) or not self.tensor:
            raise SpecError(f"{self.name}.tensor", self.tensor, "a non-empty str")
        flag(f"{self.name}.whole", self.whole)
        size = 1 if self.dtype is None else itemsize(self.dtype)
        if self.content_bytes % size:
            wanted = f"whole elements of {self.dtype}, {size} bytes each"
            raise SpecError(f"{self.name}.content_bytes", self.content_bytes, wanted)
        if self.content_bytes % self.chunks:
            wanted = f"a divisor of content_bytes={self.content_bytes}"
            raise SpecError(f"{self.name}.chunks", self.chunks, wanted)

    @property
    def per_token(self) -> bool:
        """Whether its rows stand for tokens; else a block holds one recurrent state."""
        return self.tokens_per_state > 0
