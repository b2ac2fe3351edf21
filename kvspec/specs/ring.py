"""Rings: a request has one block, and its row r holds a position p with p modulo the rows = r.

A layer that compresses r tokens into one row of its cache keeps the raw rows of the r tokens that
are not complete yet. vLLM calls such a cache a circular buffer.

Invariant: rows are paired by position. Two rings of different sizes keep a position in different
rows, so row i of one ring is never moved into row i of the other one.

How it works:
    A ring of 8 rows and a ring of 16 rows keep the positions 4 to 9 here:

        position         4   5   6   7   8   9
        row of 8         4   5   6   7   0   1
        row of 16        4   5   6   7   8   9

    With r = 4, the tokens 8 and 9 are the open group of a prompt of 10 tokens. Some compressors
    also read the group before it again (*overlap*). The next query then reads the positions 4 to 9:

        >>> sizes = {"head_size": 512, "dtype": "float32", "compress_ratio": 4, "overlap": True}
        >>> spec = CircularBufferSpec(block_size=8, **sizes)
        >>> live = spec.live_tokens(10)
        >>> live, [position % spec.block_size for position in live]
        (range(4, 10), [4, 5, 6, 7, 0, 1])

    Without overlap, a prompt of whole groups has no open group, so nothing moves:

        >>> attrs.evolve(spec, overlap=False).live_tokens(8)
        range(8, 8)
"""

from __future__ import annotations

from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.dtypes import dtype_name, itemsize
from kvspec.ownership.part import Part
from kvspec.specs.layer import LayerSpec, is_flag, is_size


def _is_ratio(_: object, at: attrs.Attribute[int], value: object) -> None:
    # A group of one token is never open.
    positive_int(at.name, value, least=2)


@attrs.frozen(kw_only=True, slots=False)
class CircularBufferSpec(LayerSpec):
    """The rows of the tokens that a layer has not compressed yet, in a ring.

    A request has one block, whose id is the only one in its block table. All ranks hold the whole
    ring, also context ranks. A prefix cache never contains a ring, so a cached prefix never makes
    its transfer unnecessary.

    Attributes:
        block_size: Rows of the ring. The two engines may have different numbers of rows, since
            speculative tokens need more rows.
        head_size: Elements of one row of one head.
        dtype: Type of the elements.
        num_kv_heads: Heads of each row, such as a key and a gate. Every rank holds all of them.
        compress_ratio: Tokens that the layer compresses together.
        overlap: Whether the compressor also reads the group of tokens before the open one.

    >>> import kvspec
    >>> spec = kvspec.CircularBufferSpec(
    ...     block_size=8, head_size=1024, dtype="float32", compress_ratio=2)
    >>> spec.live_tokens(7), spec.page_size_bytes(tp_rank=3, tp_size=4)
    (range(6, 7), 32768)
    """

    head_size: int = attrs.field(validator=is_size)
    dtype: str = attrs.field(converter=dtype_name)
    num_kv_heads: int = attrs.field(default=1, validator=is_size)
    compress_ratio: int = attrs.field(validator=_is_ratio)
    overlap: bool = attrs.field(default=False, validator=is_flag)

    def __attrs_post_init__(self) -> None:
        most = self.compress_ratio * (1 + self.overlap) - 1
        if self.block_size < most:
            raise SpecError("block_size", self.block_size, f"at least {most}, a row for each token")

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The ring. Its heads stay together, so every rank holds all of them."""
        part = Part(
            name="ring",
            units=self.num_kv_heads,
            states=self.block_size,
            content_bytes=self.head_size * itemsize(self.dtype),
            granularity=self.num_kv_heads,
            dtype=self.dtype,
        )
        return (part,)

    @property
    def is_ring(self) -> bool:
        """Always True."""
        return True

    def without_transfer(self, cached: int, num_tokens: int) -> int:
        """Return 0, because no prefix cache contains a ring.

        Raises:
            SpecError: If a row moves, and a prefix of *cached* tokens ends inside a group of
                tokens. The rest of the group would be in a ring.
        """
        if cached % self.compress_ratio and self.live_tokens(num_tokens):
            wanted = f"a multiple of compress_ratio={self.compress_ratio}, for a layer with a ring"
            raise SpecError("cached_tokens", cached, wanted)
        return 0

    def live_tokens(self, num_tokens: int) -> range:
        """Return the positions of the open group, and with overlap of the group before it.

        The source is SGLang's `c4_state_transfer_indices`.
        """
        n = positive_int("num_tokens", num_tokens, least=0)
        count = n % self.compress_ratio + self.compress_ratio * self.overlap
        return range(max(0, n - count), n)
