"""Attention layers: caches whose rows describe tokens.

A row usually describes one token. In a compressed cache it describes several.

The units are the KV heads of the model. Multi-head latent attention (MLA) has one unit, its latent
vector, so every TP rank holds a replica of the whole cache.

How it works:
    The fields of an attention layer determine its parts. The first condition that holds decides:

    condition                        parts                          content bytes: one row, one head
    -------------------------------  -----------------------------  --------------------------------
    `page_format` is opaque          `page`                         all bytes of the page
    `state_content_bytes` is set     `kv`                           `state_content_bytes`
    `scale_dtype` is set             `k`, `k_scale`, `v`,           elements x bytes of the dtype,
                                     `v_scale`, or for MLA          scales x bytes of `scale_dtype`
                                     `latent`, `latent_scale`
    MLA                              `latent`                       `head_size` x bytes of the dtype
    otherwise                        `k`, `v`                       elements x bytes of the dtype

    For example, FP8 keys and values of 128 elements with one float32 scale for each head and token:

        >>> spec = FullAttentionSpec(block_size=16, total_num_kv_heads=8, head_size=128,
        ...                          dtype="float8_e4m3fn", scale_dtype="float32")
        >>> [(part.name, part.content_bytes) for part in spec.parts]
        [('k', 128), ('k_scale', 4), ('v', 128), ('v_scale', 4)]
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.dtypes import dtype_name, itemsize
from kvspec.ownership.part import Part
from kvspec.specs.formats import PLAIN, chunks_of, is_opaque, page_format
from kvspec.specs.key_content import (
    KeyContent,
    Segment,
    common_content,
    digest_or_none,
    key_content,
    segments_of,
)
from kvspec.specs.layer import LayerSpec, is_count, is_flag, is_size, is_size_or_none


def _scale_dtype(value: object) -> str | None:
    return None if value is None else dtype_name(value, "scale_dtype")


@attrs.frozen(kw_only=True, slots=False)
class AttentionSpec(LayerSpec):
    """The base class of layers whose rows describe tokens. Use a subclass.

    Attributes:
        head_size: Elements of one key of one head, or of one latent vector.
        dtype: Type of the elements.
        tokens_per_state: Tokens that one row describes. It is more than 1 if the cache is
            compressed.
        state_content_bytes: Bytes of one row of one head, or None. If it is set, the row is opaque
            bytes in one part `kv`, for example with scales for each token. Then *dtype* and
            *head_size* describe nothing in memory.
        spans_heads: Whether the bytes of a row mix all heads of a rank, so that heads cannot be
            separated. Both engines must then divide the heads equally.
        page_format: Order of the elements inside a block, see `kvspec.specs.formats`. The two
            engines may have different formats if both are known. A page of an opaque format moves
            as a whole.
        page_block_size: Tokens of one opaque page, or None for a whole block. It is the kernel's
            block size if a block of the table consists of several kernel blocks.
        key_content: Meaning of the stored keys, or None if it is not stated. If one engine states
            it, both engines must. None is not the same as a key without rotary embedding.
        scales_digest: Identity of the scales that the engine keeps outside of the cache, from
            `kvspec.scales_digest`, or None if there are none. Both engines must have the same. Keys
            of dtype ``uint8`` with scales keep their order, because a byte may have two elements.
            State ``int8`` or ``float8_e4m3fn`` for elements of one byte.
        scale_dtype: Type of scales, or None. If it is set, each head of each token has scales, in
            their own tensors. The page consists of keys, scales of keys, values, scales of values.
            With MLA, it consists of latents and scales of latents.
        elements_per_scale: Elements of *dtype* that share one scale, or None for all elements of a
            head. It is 8 for NVFP4, whose dtype is a byte with two elements, and 32 for MXFP8.
        tokens_per_scale: Tokens whose scales form one row, in any order. It is 4 for NVFP4 in
            FlashInfer.
    """

    head_size: int = attrs.field(validator=is_size)
    dtype: str = attrs.field(converter=dtype_name)
    tokens_per_state: int = attrs.field(default=1, validator=is_size)
    state_content_bytes: int | None = attrs.field(default=None, validator=is_size_or_none)
    spans_heads: bool = attrs.field(default=False, validator=is_flag)
    page_format: str = attrs.field(default=PLAIN, converter=page_format)
    page_block_size: int | None = attrs.field(default=None, validator=is_size_or_none)
    key_content: KeyContent | None = attrs.field(default=None, converter=key_content)
    scales_digest: str | None = attrs.field(default=None, converter=digest_or_none)
    scale_dtype: str | None = attrs.field(default=None, converter=_scale_dtype)
    elements_per_scale: int | None = attrs.field(default=None, validator=is_size_or_none)
    tokens_per_scale: int = attrs.field(default=1, validator=is_size)

    def __attrs_post_init__(self) -> None:
        self._check_scales()
        most = self.head_size * (2 if self._is_packed else 1)
        if self.key_content is not None and self.key_content.rotary_stop > most:
            requirement = f"a range that ends at {most} or before, the elements of head_size"
            stop = self.key_content.rotary_stop
            raise SpecError("key_content.rotary_stop", stop, requirement)
        if self.block_size % self.tokens_per_state:
            requirement = f"a multiple of tokens_per_state={self.tokens_per_state}"
            raise SpecError("block_size", self.block_size, requirement)
        if self.page_block_size is not None:
            if not is_opaque(self.page_format):
                rule = f"the page_format must be opaque, but it is {self.page_format}"
                raise SpecError("page_block_size", self.page_block_size, rule=rule)
            if self.block_size % self.page_block_size:
                requirement = f"a divisor of block_size={self.block_size}"
                raise SpecError("page_block_size", self.page_block_size, requirement)
        # The parts of a plain page are valid if its fields are. Computing them takes time.
        if self.page_format != PLAIN or self.state_content_bytes is not None:
            self._check_parts(tuple(part.name for part in self.parts))

    @property
    def common_key_content(self) -> KeyContent | None:
        """The key content that both engines must have, see `kvspec.specs.key_content`.

        It is `key_content` itself if kvspec cannot change the order of its elements.
        """
        if self.key_content is None or self._key_part is None:
            return self.key_content
        return common_content(self.key_content, self.head_size, latent=self._is_latent)

    def segments(self, part: str) -> tuple[Segment, ...]:
        """Return where a row of *part* stores its bytes, see `kvspec.specs.key_content`."""
        if self.key_content is None or part != self._key_part:
            return ()
        size = itemsize(self.dtype)
        return segments_of(self.key_content, self.head_size, size, latent=self._is_latent)

    @cached_property
    def _key_part(self) -> str | None:
        """The name of the part whose elements kvspec can reorder, or None.

        Each row of the part must be one key of one token.
        """
        name = "latent" if self._is_latent else "k"
        part = next((part for part in self.parts if part.name == name), None)
        if part is None or part.tokens_per_state != 1 or not self._reorders_elements:
            return None
        return name if part.content_bytes == self.head_size * itemsize(self.dtype) else None

    @property
    def _reorders_elements(self) -> bool:
        """Whether an element keeps its meaning if it is stored at another place of its row."""
        # A scale of a part of a row belongs to adjacent elements.
        has_one_scale = self.elements_per_scale in (None, self.head_size)
        return has_one_scale and not self.spans_heads and not self._is_packed

    @property
    def _is_packed(self) -> bool:
        """Whether a byte may hold two elements, as in NVFP4. Moving bytes would not part them."""
        return self.dtype == "uint8" and self._has_scales

    @property
    def _has_scales(self) -> bool:
        """Whether the elements have scales, in the cache or outside of it."""
        return self.scale_dtype is not None or self.scales_digest is not None

    @property
    def _is_latent(self) -> bool:
        """Whether a row is a latent row of MLA."""
        return False

    def _check_scales(self) -> None:
        if self.scale_dtype is None:
            if self.elements_per_scale is not None:
                requirement = "None if scale_dtype is None"
                raise SpecError("elements_per_scale", self.elements_per_scale, requirement)
            if self.tokens_per_scale != 1:
                requirement = "1 if scale_dtype is None"
                raise SpecError("tokens_per_scale", self.tokens_per_scale, requirement)
            return
        row = self.tokens_per_state * self.tokens_per_scale
        if self.block_size % row:
            raise SpecError("block_size", self.block_size, f"a multiple of {row}, a row of scales")
        if self.state_content_bytes is not None:
            rule = "cannot be combined with state_content_bytes, which includes the scales"
            raise SpecError("scale_dtype", self.scale_dtype, rule=rule)
        elements = self.elements_per_scale
        own = {name: getattr(self, name, None) for name in ("head_size", "head_size_v")}
        sizes = {name: size for name, size in own.items() if size is not None}
        if elements is not None and any(size % elements for size in sizes.values()):
            listed = " and ".join(f"{name}={size}" for name, size in sizes.items())
            raise SpecError("elements_per_scale", elements, f"a divisor of {listed}")

    def _check_parts(self, names: tuple[str, ...]) -> None:
        """Check that parts of these *names* can have the format and the packing of the spec."""
        listed = ", ".join(names)
        if is_opaque(self.page_format):
            # A subclass with its own parts does not combine them into one opaque page.
            if names != ("page",):
                requirement = f"{PLAIN}, because the page consists of the parts {listed}"
                raise SpecError("page_format", self.page_format, requirement)
        elif self.page_format != PLAIN and names != ("k", "v"):
            requirement = f"{PLAIN} or opaque for a page of {listed}: it orders keys and values"
            raise SpecError("page_format", self.page_format, requirement)
        elif self.state_content_bytes is not None and "kv" not in names:
            requirement = f"None, because {listed} of {type(self).__name__} have their own sizes"
            raise SpecError("state_content_bytes", self.state_content_bytes, requirement)

    def _rows(self, units: int, **sizes: int) -> tuple[Part, ...]:
        """Return a part for each name with its number of elements, or one packed part."""
        if self.state_content_bytes is not None:
            return self._in_format([self._part("kv", units, self.state_content_bytes, None)])
        if self.scale_dtype is not None:
            return self._in_format(self._planes(units, sizes))
        return self._in_format(
            self._part(name, units, size * itemsize(self.dtype), self.dtype)
            for name, size in sizes.items()
        )

    def _planes(self, units: int, sizes: Mapping[str, int]) -> Iterator[Part]:
        """Yield a part for each name with its number of elements, and then the part of its scales.

        Each has a tensor of its own.
        """
        scale_bytes = itemsize(self.scale_dtype or "uint8") * self.tokens_per_scale
        for name, size in sizes.items():
            yield self._part(name, units, size * itemsize(self.dtype), self.dtype, name)
            count, scale = size // (self.elements_per_scale or size), f"{name}_scale"
            content, tokens = count * scale_bytes, self.tokens_per_scale
            yield self._part(scale, units, content, self.scale_dtype, scale, tokens)

    def _in_format(self, parts: Iterable[Part]) -> tuple[Part, ...]:
        """Return *parts*, or one part with the whole page as its row if the format is opaque."""
        plain_parts = tuple(parts)
        if not is_opaque(self.page_format):
            return plain_parts
        tokens = self.page_block_size or self.block_size
        row = max(part.tokens_per_state for part in plain_parts)
        if tokens % row:
            raise SpecError("page_block_size", tokens, f"a multiple of {row}, the tokens of a row")
        page = Part(
            name="page",
            units=plain_parts[0].units,
            states=self.block_size // tokens,
            content_bytes=sum(
                tokens // part.tokens_per_state * part.content_bytes for part in plain_parts
            ),
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
        rows_described: int = 1,
    ) -> Part:
        """Return a part. One of its rows describes *rows_described* rows of keys or values."""
        tokens = self.tokens_per_state * rows_described
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
    """Keys and values of all tokens, divided among ranks by KV heads.

    A page of one rank has `block_size * heads * (head_size + head_size_v)` elements, as in vLLM's
    `FullAttentionSpec.real_page_size_bytes`. `heads` is the number of KV heads of the rank.

    Attributes:
        total_num_kv_heads: KV heads of the whole model (vLLM:
            `ModelConfig.get_total_num_kv_heads()`). The `num_kv_heads` of vLLM's spec are those of
            one rank.
        head_size: Elements of one key of one head.
        head_size_v: Elements of one value of one head, or None if it equals *head_size*.

    >>> spec = FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> spec.page_size_bytes(tp_rank=0, tp_size=4) == 16 * 2 * (128 + 128) * 2
    True
    """

    total_num_kv_heads: int = attrs.field(validator=is_size)
    head_size_v: int | None = attrs.field(default=None, validator=is_size_or_none)
    # Those of the base class again, for their place in a handshake.
    scale_dtype: str | None = attrs.field(default=None, converter=_scale_dtype)
    elements_per_scale: int | None = attrs.field(default=None, validator=is_size_or_none)
    tokens_per_scale: int = attrs.field(default=1, validator=is_size)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """Keys and values of the model's KV heads, and their scales if there are any."""
        return self._rows(self.total_num_kv_heads, k=self.head_size, v=self._value_size)

    @property
    def _value_size(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v


@attrs.frozen(kw_only=True, slots=False)
class CrossAttentionSpec(FullAttentionSpec):
    """Keys and values of the tokens of an encoder.

    Pass the number of encoder tokens to `live_tokens`, and to the request as `encoder_tokens`.

    >>> import kvspec
    >>> spec = kvspec.CrossAttentionSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=64, dtype="bfloat16"
    ... )
    >>> spec.page_size_bytes(tp_rank=0, tp_size=2)
    16384
    """

    def __attrs_post_init__(self) -> None:
        # These keys belong to the encoder's tokens, which have no position in the prompt.
        if self.key_content is not None:
            raise SpecError("key_content", self.key_content, "None for cross attention")
        super().__attrs_post_init__()

    @property
    def counts_prompt(self) -> bool:
        """Always False. The tokens are those of the encoder."""
        return False

    def total(self, num_tokens: int, encoder_tokens: int | None) -> int:  # noqa: ARG002
        """Return *encoder_tokens*. Raise `SpecError` if the request does not contain them."""
        if encoder_tokens is None:
            raise SpecError(
                "encoder_tokens", None, "the number of encoder tokens, for cross attention"
            )
        return encoder_tokens


@attrs.frozen(kw_only=True, slots=False)
class SlidingWindowSpec(FullAttentionSpec):
    """Attention to the last *sliding_window* tokens.

    Attributes:
        sliding_window: Tokens that a query reads, including its own token.
        extra_retained_tokens: Tokens before the window that the engine keeps as well. Speculative
            decoding may go back to them.

    >>> spec = SlidingWindowSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16", sliding_window=4)
    >>> spec.live_tokens(10)  # The query at position 10 reads 7, 8, 9 and itself.
    range(7, 10)
    """

    sliding_window: int = attrs.field(validator=is_size)
    extra_retained_tokens: int = attrs.field(default=0, validator=is_count)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the last `sliding_window - 1 + extra_retained_tokens` of *num_tokens* positions.

        The query itself is the last token of its window, and it has no stored row yet. The
        source is vLLM's `SlidingWindowManager.get_num_skipped_tokens`.
        """
        return _window(num_tokens, self.sliding_window + self.extra_retained_tokens)


@attrs.frozen(kw_only=True, slots=False)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    """Attention within chunks of tokens, as in Llama 4.

    Attributes:
        attention_chunk_size: Tokens of one chunk. A query reads only tokens of its own chunk.

    >>> spec = ChunkedLocalAttentionSpec(block_size=16, total_num_kv_heads=8, head_size=128,
    ...                                  dtype="bfloat16", attention_chunk_size=8)
    >>> spec.live_tokens(10), spec.live_tokens(16)
    (range(8, 10), range(16, 16))
    """

    attention_chunk_size: int = attrs.field(validator=is_size)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the tokens before position *num_tokens* that are in the chunk of that position.

        The source is vLLM's `ChunkedLocalAttentionManager.get_num_skipped_tokens`.
        """
        n = positive_int("num_tokens", num_tokens, least=0)
        return range(n // self.attention_chunk_size * self.attention_chunk_size, n)


@attrs.frozen(kw_only=True, slots=False)
class MLAAttentionSpec(AttentionSpec):
    """One latent vector of *head_size* elements for each token (multi-head latent attention).

    There is one unit, so every TP rank holds all of it. vLLM describes it as one KV head.

    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> spec.page_size_bytes(tp_rank=3, tp_size=8) == 64 * 576 * 2
    True
    """

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The latent vector, with one unit."""
        return self._rows(1, latent=self.head_size)

    @property
    def _is_latent(self) -> bool:
        return True


@attrs.frozen(kw_only=True, slots=False)
class SlidingWindowMLASpec(MLAAttentionSpec):
    """Multi-head latent attention to the last *sliding_window* tokens.

    Attributes:
        sliding_window: Tokens that a query reads, including its own token.
        extra_retained_tokens: Tokens before the window that the engine keeps as well.

    >>> import kvspec
    >>> spec = kvspec.SlidingWindowMLASpec(
    ...     block_size=16, head_size=576, dtype="bfloat16", sliding_window=4
    ... )
    >>> spec.live_tokens(10)
    range(7, 10)
    """

    sliding_window: int = attrs.field(validator=is_size)
    extra_retained_tokens: int = attrs.field(default=0, validator=is_count)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the last `sliding_window - 1 + extra_retained_tokens` of *num_tokens* positions.

        The query itself is the last token of its window, and it has no stored row yet. The
        source is vLLM's `SlidingWindowManager.get_num_skipped_tokens`.
        """
        return _window(num_tokens, self.sliding_window + self.extra_retained_tokens)


def _window(num_tokens: int, window: int) -> range:
    """Return the positions before the query at *num_tokens* that are in a window of *window*.

    The window includes the query, so at most `window - 1` earlier positions are in it.
    """
    n = positive_int("num_tokens", num_tokens, least=0)
    return range(max(0, n - window + 1), n)
