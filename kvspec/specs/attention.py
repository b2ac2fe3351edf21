"""Attention: rows for tokens, sharded in KV heads or, where there is one latent, not at all."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.dtypes import dtype_name, itemsize
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.part import Part
from kvspec.specs.formats import PLAIN, chunks_of, is_opaque, page_format
from kvspec.specs.layer import LayerSpec, is_count, is_flag, is_size, is_size_or_none


def _scale_dtype(value: object) -> str | None:
    return None if value is None else dtype_name(value, "scale_dtype")


@attrs.frozen(kw_only=True, slots=False)
class AttentionSpec(LayerSpec):
    """A layer with rows for tokens.

    *tokens_per_state*: tokens that one row stands for (> 1 where the cache is compressed).
    *state_content_bytes*: if given, one (head, row) is this many opaque bytes (per-token scales,
    packed formats) in a single part ``kv``; *dtype* and head size then describe nothing in memory.
    *spans_heads*: that packing spans the heads of a rank, so that it cannot be cut between them.
    *page_format*: in which order elements lie inside a block (`kvspec.specs.formats`); engines may
    differ in formats that are known, a page of an opaque one moves whole. *page_block_size*: tokens
    of an opaque page, where a block is several: the kernel's blocks, where the table's are larger.
    """

    head_size: int = attrs.field(validator=is_size)
    dtype: str = attrs.field(converter=dtype_name)
    tokens_per_state: int = attrs.field(default=1, validator=is_size)
    state_content_bytes: int | None = attrs.field(default=None, validator=is_size_or_none)
    spans_heads: bool = attrs.field(default=False, validator=is_flag)
    page_format: str = attrs.field(default=PLAIN, converter=page_format)
    page_block_size: int | None = attrs.field(default=None, validator=is_size_or_none)

    def __attrs_post_init__(self) -> None:
        if self.block_size % self.tokens_per_state:
            wanted = f"a multiple of tokens_per_state={self.tokens_per_state}"
            raise SpecError("block_size", self.block_size, wanted)
        if self.page_block_size is not None:
            if not is_opaque(self.page_format):
                wanted = f"None where the format is {self.page_format}: its rows can be cut"
                raise SpecError("page_block_size", self.page_block_size, wanted)
            if self.block_size % self.page_block_size:
                wanted = f"a divisor of block_size={self.block_size}"
                raise SpecError("page_block_size", self.page_block_size, wanted)
        if self.page_format != PLAIN or self.state_content_bytes is not None:
            self._check_parts(tuple(part.name for part in self.parts))

    def _check_parts(self, names: tuple[str, ...]) -> None:
        """Raise `SpecError` for a packing or a format that parts of these *names* do not have."""
        told = ", ".join(names)
        if is_opaque(self.page_format):
            if names != ("page",):
                wanted = f"{PLAIN}: a page of {told} is told by its parts"
                raise SpecError("page_format", self.page_format, wanted)
        elif self.page_format != PLAIN and names != ("k", "v"):
            wanted = f"{PLAIN} or opaque for a page of {told}: it orders keys and values"
            raise SpecError("page_format", self.page_format, wanted)
        elif self.state_content_bytes is not None and "kv" not in names:
            wanted = f"None: {told} of {type(self).__name__} have sizes of their own"
            raise SpecError("state_content_bytes", self.state_content_bytes, wanted)

    def _rows(self, units: int, **sizes: int) -> tuple[Part, ...]:
        """Return a part for each name, of so many elements, or the one that is packed."""
        if self.state_content_bytes is not None:
            return self._in_format([self._part("kv", units, self.state_content_bytes, None)])
        return self._in_format(
            self._part(name, units, size * itemsize(self.dtype), self.dtype)
            for name, size in sizes.items()
        )

    def _in_format(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Return *parts*, or the whole page as one row of one part where its format is opaque."""
        found = tuple(parts)
        if not is_opaque(self.page_format):
            return found
        tokens = self.page_block_size or self.block_size
        row = max(part.tokens_per_state for part in found)
        if tokens % row:
            raise SpecError("page_block_size", tokens, f"a multiple of {row}, the tokens of a row")
        page = Part(
            name="page",
            units=found[0].units,
            states=self.block_size // tokens,
            content_bytes=sum(tokens // p.tokens_per_state * p.content_bytes for p in found),
            tokens_per_state=tokens,
            whole=True,
        )
        return (page,)

    def _part(
        self,
        name: str,
        units: int,
        content: int,
        dtype: str | None,
        tensor: str = "kv",
        states: int = 1,
    ) -> Part:
        """Return a part; one of its rows stands for *states* of the layer's states."""
        tokens = self.tokens_per_state * states
        return Part(
            name=name,
            units=units,
            states=self.block_size // tokens,
            content_bytes=content,
            tokens_per_state=tokens,
            dtype=dtype,
            tensor=tensor,
            whole=self.spans_heads,
            chunks=chunks_of(self.page_format, name, content, dtype),
        )


@attrs.frozen(kw_only=True, slots=False)
class FullAttentionSpec(AttentionSpec):
    """Keys and values of every token, sharded in KV heads.

    *total_num_kv_heads*: KV heads of the model, not of a rank. *head_size*, *head_size_v*:
    elements of one key and one value (equal unless given). *scale_dtype*: if given, each head of
    each token has scales of this type, in tensors of their own: the page is keys, their scales,
    values, theirs. *elements_per_scale*: elements of *dtype* that share a scale, all of a head
    unless given (NVFP4: 8 bytes of two elements each; MXFP8: 32). *tokens_per_scale*: tokens whose
    scales lie in one row, in whatever order (NVFP4 as FlashInfer keeps it: 4).
    """

    total_num_kv_heads: int = attrs.field(validator=is_size)
    head_size_v: int | None = attrs.field(default=None, validator=is_size_or_none)
    scale_dtype: str | None = attrs.field(default=None, converter=_scale_dtype)
    elements_per_scale: int | None = attrs.field(default=None, validator=is_size_or_none)
    tokens_per_scale: int = attrs.field(default=1, validator=is_size)

    def __attrs_post_init__(self) -> None:
        self._check_scales()
        super().__attrs_post_init__()

    def _check_scales(self) -> None:
        if self.scale_dtype is None:
            if self.elements_per_scale is not None:
                wanted = "None where there is no scale_dtype"
                raise SpecError("elements_per_scale", self.elements_per_scale, wanted)
            if self.tokens_per_scale != 1:
                wanted = "1 where there is no scale_dtype"
                raise SpecError("tokens_per_scale", self.tokens_per_scale, wanted)
            return
        row = self.tokens_per_state * self.tokens_per_scale
        if self.block_size % row:
            raise SpecError("block_size", self.block_size, f"a multiple of {row}, a row of scales")
        if self.state_content_bytes is not None:
            wanted = "None where the content is packed (state_content_bytes), scales and all"
            raise SpecError("scale_dtype", self.scale_dtype, wanted)
        each = self.elements_per_scale
        if each is not None and (self.head_size % each or (self.head_size_v or 0) % each):
            told = f"a divisor of head_size={self.head_size}"
            more = "" if self.head_size_v is None else f" and head_size_v={self.head_size_v}"
            raise SpecError("elements_per_scale", each, told + more)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Keys and values of the model's KV heads, and the scales of each."""
        heads, sizes = self.total_num_kv_heads, {"k": self.head_size, "v": self._value_size}
        if self.scale_dtype is None:
            return self._rows(heads, **sizes)
        found: list[Part] = []
        for name, size in sizes.items():
            content = size * itemsize(self.dtype)
            found.append(self._part(name, heads, content, self.dtype, name))
            count = size // (self.elements_per_scale or size)
            content = count * itemsize(self.scale_dtype) * self.tokens_per_scale
            scale = f"{name}_scale"
            part = self._part(scale, heads, content, self.scale_dtype, scale, self.tokens_per_scale)
            found.append(part)
        return self._in_format(found)

    @property
    def _value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v


@attrs.frozen(kw_only=True, slots=False)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of the encoder's tokens; `live_tokens` takes the encoder's own count."""

    @property
    def counts_prompt(self) -> bool:
        """False: its positions are the encoder's."""
        return False

    def total(self, num_tokens: int, encoder_tokens: int | None) -> int:  # noqa: ARG002
        """Return the encoder's tokens, which the request must tell."""
        if encoder_tokens is None:
            raise SpecError("encoder_tokens", None, "the encoder's own count, for cross attention")
        return encoder_tokens


@attrs.frozen(kw_only=True, slots=False)
class SlidingWindowSpec(FullAttentionSpec):
    """Full attention that looks back *sliding_window* tokens, its own included.

    *extra_retained_tokens*: positions kept before the window, for speculative decoding.
    """

    sliding_window: int = attrs.field(validator=is_size)
    extra_retained_tokens: int = attrs.field(default=0, validator=is_count)

    def live_tokens(self, num_tokens: int) -> range:
        """Return ``[max(0, n - window + 1 - extra), n)``."""
        return _window(num_tokens, self.sliding_window + self.extra_retained_tokens)


@attrs.frozen(kw_only=True, slots=False)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Full attention within chunks of *attention_chunk_size* tokens."""

    attention_chunk_size: int = attrs.field(validator=is_size)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the tokens before *num_tokens* that lie in its chunk."""
        n = positive_int("num_tokens", num_tokens, least=0)
        return range(n // self.attention_chunk_size * self.attention_chunk_size, n) or EMPTY


@attrs.frozen(kw_only=True, slots=False)
class MLAAttentionSpec(AttentionSpec):
    """One latent vector of *head_size* elements a token; one unit, so every rank is a replica."""

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The latent, one unit."""
        return self._rows(1, latent=self.head_size)


@attrs.frozen(kw_only=True, slots=False)
class SlidingWindowMLASpec(MLAAttentionSpec):
    """Multi-head latent attention that looks back *sliding_window* tokens."""

    sliding_window: int = attrs.field(validator=is_size)
    extra_retained_tokens: int = attrs.field(default=0, validator=is_count)

    def live_tokens(self, num_tokens: int) -> range:
        """Return ``[max(0, n - window + 1 - extra), n)``."""
        return _window(num_tokens, self.sliding_window + self.extra_retained_tokens)


def _window(num_tokens: int, window: int) -> range:
    n = positive_int("num_tokens", num_tokens, least=0)
    return range(max(0, n - window + 1), n) or EMPTY
