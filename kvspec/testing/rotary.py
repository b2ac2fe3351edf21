"""What the keys of a layer may mean, and whether their elements can be stored in another order.

The module does not use the library's own answers, because laws compare the library with it.
"""

from __future__ import annotations

from typing import TypeGuard

from kvspec.specs import AttentionSpec, CrossAttentionSpec, LayerSpec


def may_rotate(spec: LayerSpec) -> TypeGuard[AttentionSpec]:
    """Return whether the keys of a layer can be rotated: they have two elements and positions."""
    return (
        isinstance(spec, AttentionSpec)
        and not isinstance(spec, CrossAttentionSpec)
        and spec.head_size > 1
    )


def reorders(spec: AttentionSpec) -> bool:
    """Return whether the elements of a row can be stored in another order.

    Each row must be one key of one token, and no scale may belong to a part of its elements. A
    ``uint8`` with a scale, in the cache or outside of it, may hold two elements.

    >>> import kvspec
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> compressed = kvspec.MLAAttentionSpec(
    ...     block_size=4, head_size=2, dtype="uint8", tokens_per_state=4)
    >>> reorders(spec), reorders(compressed)
    (True, False)
    """
    opaque = spec.state_content_bytes is not None or spec.page_format.startswith("opaque:")
    grouped = getattr(spec, "elements_per_scale", None) not in (None, spec.head_size)
    scales = spec.scales_digest, getattr(spec, "scale_dtype", None)
    packed = spec.dtype == "uint8" and scales != (None, None)
    return not (opaque or grouped or packed or spec.spans_heads or spec.tokens_per_state > 1)
