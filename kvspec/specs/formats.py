"""Page formats: the order of elements inside a block.

Invariant: a known format determines where bytes lie, not their meaning.

How it works:
    In the plain format, a block stores one row after the other. Some attention backends cut the
    content of each row into equal chunks, and store the first chunk of all rows, then the second
    chunk of all rows. For one head with keys of 4 elements (0 to 3) of the tokens a and b:

        format             memory
        plain              a0 a1 a2 a3   b0 b1 b2 b3
        keys-transposed    a0 b0   a1 b1   a2 b2   a3 b3

    kvspec knows the chunks of both formats, so it can copy one into the other:

        >>> from kvspec import FullAttentionSpec
        >>> spec = FullAttentionSpec(block_size=2, total_num_kv_heads=1, head_size=4,
        ...                          dtype="uint8", page_format="keys-transposed")
        >>> [(part.name, part.chunks) for part in spec.parts]
        [('k', 4), ('v', 1)]

    An opaque format is only a name, such as `opaque:fp4`. kvspec does not know its order. So only
    whole pages of it move, and only into pages of the same format.
"""

from __future__ import annotations

from kvspec.errors import SpecError
from kvspec.ownership.dtypes import itemsize

PLAIN, OPAQUE = "plain", "opaque:"

# vLLM's paged attention splits the head dimension by `x = 16 // element_size`: one chunk always has
# 16 bytes.
X_BYTES = 16

# The known formats: bytes of one chunk of each part, or None for one element. A part that is not
# listed is not cut into chunks.
#
# `keys-transposed`: for each head, keys are [head_size, tokens] and values [tokens, head_size], as
# in vLLM's attention on CPUs. `x-packed`: keys are [head_size / x, tokens, x] and values
# [head_size, tokens], as in vLLM's paged attention on ROCm.
_CHUNK_BYTES: dict[str, dict[str, int | None]] = {
    PLAIN: {},
    "keys-transposed": {"k": None},
    "x-packed": {"k": X_BYTES, "v": None},
}


def page_format(value: object) -> str:
    """Return *value* if it is the name of a format. Raise `SpecError` otherwise.

    >>> page_format("opaque:fp4")
    'opaque:fp4'
    """
    opaque = isinstance(value, str) and value.startswith(OPAQUE) and value != OPAQUE
    if isinstance(value, str) and (opaque or value in _CHUNK_BYTES):
        return value
    raise SpecError(
        "page_format", value, f"one of {', '.join(_CHUNK_BYTES)}, or {OPAQUE} and a name"
    )


def is_opaque(name: str) -> bool:
    """Return whether the format is opaque, so that only whole pages can move."""
    return name.startswith(OPAQUE)


def chunks_of(name: str, part: str, content: int, dtype: str | None) -> int:
    """Return the number of chunks into which a format cuts a row.

    Args:
        name: Name of the format.
        part: Name of the part.
        content: Bytes of one unit of one row.
        dtype: Type of the elements, or None for opaque bytes.

    Raises:
        SpecError: If the chunks of the format do not divide the content.

    >>> chunks_of("x-packed", "k", 256, "bfloat16"), chunks_of("x-packed", "v", 256, "bfloat16")
    (16, 128)
    """
    sizes = _CHUNK_BYTES.get(name, {})
    if part not in sizes:
        return 1
    size = sizes[part] or (1 if dtype is None else itemsize(dtype))
    if content % size:
        requirement = f"a format whose chunks of {size} bytes divide the {content} bytes of {part}"
        raise SpecError("page_format", name, requirement)
    return content // size
