"""Draw layer specs: `KINDS` has one strategy for each kind of layer.

A new kind needs one line in `KINDS`, and then all laws judge it. Other modules name a kind only if
they draw a special case of it. Sizes are a few bytes, so that whole transfers stay small. Block
sizes, head counts and TP sizes need not divide each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hypothesis import strategies as st

from kvspec.errors import SpecError
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.testing.supports import Supports, quoted

_HEADS = st.sampled_from((1, 2, 3, 4, 5, 6, 8, 12, 16))
_ONE_TO_FOUR = st.integers(1, 4)
# With at most two rotated pairs, the step from pairs to halves is its own inverse. So a system that
# confuses the two directions is wrong only for keys of 6 elements or more.
_KEYS = st.sampled_from((1, 2, 3, 4, 6, 8, 2, 4, 6, 8, 6, 8))
_ANY_DTYPE = st.sampled_from(("uint8", "bfloat16", "float8_e4m3fn", "float32"))
_SCALES = st.sampled_from(("float32", "float8_e4m3fn"))
# Small windows end inside of a block, which is the hard case. Large ones cover whole prompts.
_WINDOWS = st.sampled_from((2, 3, 5, 6, 8)) | st.integers(1, 24)
# The tokens of a block. In some blocks each row stands for several tokens.
_BLOCK_SIZES = st.sampled_from(
    [{"block_size": b} for b in (1, 2, 3, 4, 8, 16, 24, 32)]
    + [{"block_size": b, "tokens_per_state": t} for b, t in ((2, 2), (8, 4), (16, 4))]
)
_KEY_FIELDS: dict[str, st.SearchStrategy[Any]] = {"head_size": _KEYS, "dtype": _ANY_DTYPE}
_GQA = _KEY_FIELDS | {"total_num_kv_heads": _HEADS}
_STATE: dict[str, st.SearchStrategy[Any]] = {
    "conv_kernel": st.integers(2, 4),
    "dtype": _ANY_DTYPE,
    "num_speculative_tokens": st.integers(0, 1),
}
_NO_FIELDS: dict[str, st.SearchStrategy[int]] = {}
_SSM = _STATE | {"ssm_dtype": st.sampled_from((None, "float32"))}


def _attention(make: Any, **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[LayerSpec]:  # noqa: ANN401
    """Draw a block and *fields*, and call *make* with them."""

    def build(block: Mapping[str, int], **drawn: Any) -> LayerSpec:  # noqa: ANN401
        spec: LayerSpec = make(**_without_illegal_scales({**block, **drawn}))
        return spec

    return st.builds(build, _BLOCK_SIZES, **fields)


def _without_illegal_scales(fields: dict[str, Any]) -> dict[str, Any]:
    """Return *fields*, without `tokens_per_scale` if there are no scales or it is not legal.

    A block must hold a whole number of rows of scales.
    """
    row = fields.get("tokens_per_state", 1) * fields.get("tokens_per_scale", 1)
    if fields.get("scale_dtype") is None or fields["block_size"] % row:
        fields.pop("tokens_per_scale", None)
    return fields


@st.composite
def _uniform(
    draw: st.DrawFn,
    /,
    make: Any,  # noqa: ANN401
    window: Mapping[str, st.SearchStrategy[int]] = _NO_FIELDS,
    **own: st.SearchStrategy[Any],
) -> LayerSpec:
    """Draw a uniform-type group of two or three layers.

    The fields *own*, the dtype, and often the tokens of a row are drawn for each layer. Half of the
    later layers repeat those of the layer before, so that the two may differ in nothing but the
    meaning of their keys. The fields *window* are drawn once for all layers.
    """
    block, later_tokens = draw(_BLOCK_SIZES), draw(st.sampled_from((None, None, 1)))
    fields: dict[str, Any] = {}
    shared = {"block_size": block["block_size"]} | {name: draw(w) for name, w in window.items()}
    layers = {}
    for i in range(draw(st.integers(2, 3))):
        # The first layer always has the rows of the block.
        tokens = (i and later_tokens) or block.get("tokens_per_state", 1)
        if not fields or draw(st.booleans()):
            fields = {name: draw(field) for name, field in own.items()} | {
                "dtype": draw(_ANY_DTYPE)
            }
        fields |= {**shared, "tokens_per_state": tokens}
        layers[f"uniform.{make.__name__}.{i}"] = make(**_without_illegal_scales({**fields}))
    return UniformTypeKVCacheSpecs(specs=layers)


def _ring(more: int, **fields: Any) -> LayerSpec:  # noqa: ANN401
    """Return a ring with *more* rows than one request needs."""
    most = fields["compress_ratio"] * (1 + fields["overlap"]) - 1
    return CircularBufferSpec(block_size=most + more, **fields)


KINDS: dict[str, st.SearchStrategy[LayerSpec]] = {
    "full": _attention(FullAttentionSpec, **_GQA),
    "full, V of another size": _attention(FullAttentionSpec, **_GQA, head_size_v=_ONE_TO_FOUR),
    "full, opaque": _attention(FullAttentionSpec, **_GQA, state_content_bytes=st.integers(1, 9)),
    # The page format "x-packed" needs keys that are multiples of 16 bytes.
    "full, keys of 16 bytes": _attention(
        FullAttentionSpec, total_num_kv_heads=_HEADS, head_size=st.sampled_from((8, 16)),
        dtype=st.just("bfloat16"),
    ),
    "full, with scales": _attention(
        FullAttentionSpec, **_GQA, head_size_v=st.none() | _ONE_TO_FOUR, scale_dtype=_SCALES,
        elements_per_scale=st.sampled_from((None, 1)),
        tokens_per_scale=st.sampled_from((1, 1, 2, 4)),
    ),
    "sliding window": _attention(
        SlidingWindowSpec, **_GQA, sliding_window=_WINDOWS, extra_retained_tokens=st.integers(0, 2)
    ),
    "chunked local": _attention(ChunkedLocalAttentionSpec, **_GQA, attention_chunk_size=_WINDOWS),
    "cross": _attention(CrossAttentionSpec, **_GQA),
    "MLA": _attention(MLAAttentionSpec, **_KEY_FIELDS),
    "sliding window MLA": _attention(SlidingWindowMLASpec, **_KEY_FIELDS, sliding_window=_WINDOWS),
    "uniform": _uniform(
        FullAttentionSpec, total_num_kv_heads=_HEADS, head_size=_KEYS,
        scale_dtype=st.sampled_from((None, None, "float32")),
        tokens_per_scale=st.sampled_from((1, 1, 2)),
    ),
    "uniform MLA": _uniform(MLAAttentionSpec, head_size=_KEYS),
    "uniform sliding window": _uniform(
        SlidingWindowSpec, {"sliding_window": _WINDOWS}, total_num_kv_heads=_HEADS, head_size=_KEYS
    ),
    "mamba1": st.builds(
        MambaSpec.mamba1, intermediate_size=st.integers(1, 12), state_size=_ONE_TO_FOUR, **_SSM
    ),
    "mamba2": st.builds(
        MambaSpec.mamba2, num_heads=_HEADS, head_dim=_ONE_TO_FOUR, n_groups=_ONE_TO_FOUR,
        state_size=_ONE_TO_FOUR, **_SSM,
    ),
    "gated delta net": st.builds(
        MambaSpec.gated_delta_net, num_k_heads=_HEADS, num_v_heads=_HEADS, head_k_dim=_ONE_TO_FOUR,
        head_v_dim=_ONE_TO_FOUR, **_SSM,
    ),
    "short conv": st.builds(MambaSpec.short_conv, conv_dim=st.integers(1, 12), **_STATE),
    "ring": st.builds(
        _ring, head_size=_KEYS, dtype=_ANY_DTYPE, num_kv_heads=st.integers(1, 2),
        compress_ratio=st.sampled_from((4, 3, 2, 8)), overlap=st.booleans(),
        more=st.sampled_from((0, 1, 2, 5)),
    ),
    "replicated state": st.builds(MambaSpec.replicated_state, state_bytes=st.integers(1, 9)),
}  # fmt: skip
"""A strategy of specs for each kind of layer, by the name of the kind."""

WINDOWED = frozenset(
    {"sliding window", "chunked local", "sliding window MLA", "uniform sliding window"}
)
"""The kinds whose queries do not read every earlier token."""


def specs() -> st.SearchStrategy[LayerSpec]:
    """Draw a spec of any kind in `KINDS`.

    >>> from hypothesis import find
    >>> find(specs(), lambda spec: spec.block_size == 3).block_size
    3
    """
    return st.sampled_from(tuple(KINDS)).flatmap(KINDS.__getitem__)


def kinds_of(supports: Supports) -> tuple[str, ...]:
    """Return the kinds of layers that are supported, the simplest one first.

    Raises:
        SpecError: If a name is not a key of `KINDS`.

    >>> kinds_of(Supports(kinds=["MLA", "full"]))
    ('full', 'MLA')
    """
    for name in supports.kinds or ():
        if name not in KINDS:
            raise SpecError("kinds", name, f"one of {quoted(KINDS)}")
    names = [name for name in KINDS if supports.kinds is None or name in supports.kinds]
    return tuple(name for name in names if supports.windows or name not in WINDOWED)
