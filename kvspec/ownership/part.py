"""Parts: the common form to which every kind of layer is reduced.

Invariant: plans, tables and checks see parts only. None of them knows whether a part belongs to an
attention layer, a latent cache or a recurrent state.

How it works:
    A block of a layer is a few named arrays. Each array is a part: units x states x content bytes.
    For example, Llama 3 8B with blocks of 16 tokens has 8 KV heads of 128 elements in bfloat16:

        part    units (heads)    states (tokens)    content bytes
        k       8                16                 256
        v       8                16                 256

    One rank of TP 2 owns 4 units, so its page has 2 x 4 x 16 x 256 = 32,768 bytes:

        >>> from kvspec import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> [(part.name, part.units, part.states, part.content_bytes) for part in spec.parts]
        [('k', 8, 16, 256), ('v', 8, 16, 256)]
        >>> spec.page_size_bytes(tp_rank=0, tp_size=2)
        32768

    A latent cache (MLA) is one part with one unit, so every rank holds all of it. A recurrent
    state is several parts: the channels of its convolution, and its SSM heads.
"""

from __future__ import annotations

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int
from kvspec.ownership.dtypes import dtype_name, itemsize


def _dtype(value: object) -> str | None:
    return None if value is None else dtype_name(value)


@attrs.frozen(kw_only=True, cache_hash=True)
class Part:
    """One named array of a block: units x states x content bytes.

    Attributes:
        name: Name of the part, such as "k" or "conv_x".
        units: Number of units in the whole model. TP divides the units among ranks. Units are KV
            heads, SSM heads or conv channels. A part with 1 unit is never divided.
        states: States of one block: its rows. If each state describes one token, these are the
            tokens of a block (vLLM: `block_size`).
        content_bytes: Bytes of one unit of one state. They are contiguous in every layout, unless a
            page format cuts them into *chunks*.
        granularity: TP gives whole multiples of this many units to a rank. It is the channels of
            one head in a conv state.
        tokens_per_state: Tokens that one state describes. It is 0 for a recurrent state, which
            describes no tokens of its own.
        dtype: Type of the elements, or None if the content is opaque bytes.
        tensor: Name of the tensor that contains the part. A page holds its tensors one after the
            other. Parts of one tensor lie side by side. If rows are tokens, their contents are
            packed together (k, then v) unless the layout has the letter K. In a recurrent state,
            the units of one part follow those of the other.
        whole: Whether the units of one rank can only move together. Some packed formats have
            scales that span all heads of a rank.
        chunks: Number of equal chunks into which the content is cut in memory. A block contains
            the first chunk of all its rows, then the second chunk of all rows, and so on.

    >>> import kvspec
    >>> kvspec.Part(name="k", units=8, states=16, content_bytes=128, tokens_per_state=1).units
    8
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
            requirement = f"whole elements of {self.dtype}, {size} bytes each"
            raise SpecError(f"{self.name}.content_bytes", self.content_bytes, requirement)
        if self.content_bytes % self.chunks:
            requirement = f"a divisor of content_bytes={self.content_bytes}"
            raise SpecError(f"{self.name}.chunks", self.chunks, requirement)

    @property
    def per_token(self) -> bool:
        """Whether the rows are tokens. Otherwise, a block holds one recurrent state."""
        return self.tokens_per_state > 0
