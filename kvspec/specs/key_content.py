"""The meaning of stored keys, and of the scales of quantised caches.

Invariant: two rows of equal shape may mean different numbers. A `KeyContent` states what the shape
does not: whether keys are rotated, by which angles, in which order their elements lie, and whether
they are normalised.

How it works:
    Rotary embedding turns the elements of a key in pairs. Engines store the same pairs in two
    orders. For a key of 8 elements, of which the first 6 are rotated (a with A, b with B, c with
    C), and the last two are not (x, y):

        halves      a b c A B C x y     GPT-NeoX, `rotate_half`: element i with i + n/2
        pairs       a A b B c C x y     GPT-J, interleaved: element 2i with 2i + 1

    A row of MLA has a latent part and a rotated part. Either of them may be the first.

    kvspec moves halves to pairs, and a rotated part at one end of a latent row to the other end. It
    numbers the bytes of a row in a *common order*: halves, and in MLA the rotated part last.
    `segments_of` describes where the row stores them. A segment is (start, size, count, stride) in
    bytes. The example above with one byte for each element, stored in pairs:

        common byte     0 1 2           3 4 5           6 7
        element         a b c           A B C           x y
        stored byte     0 2 4           1 3 5           6 7
        segment         (0, 1, 3, 2)    (1, 1, 3, 2)    (6, 2, 1, 2)

    >>> content = KeyContent(rotary="pairs", rotary_size=6)
    >>> segments_of(content, elements=8, itemsize=1, latent=False)
    ((0, 1, 3, 2), (1, 1, 3, 2), (6, 2, 1, 2))
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.inputs import flag, instance, mapping, positive_int, sequence

# The bytes `start + i * stride` to `start + i * stride + size`, for i from 0 to `count - 1`: start,
# size, count, stride.
Segment = tuple[int, int, int, int]

NONE, HALVES, PAIRS = "none", "halves", "pairs"
ROTARY = (NONE, HALVES, PAIRS)

DIGEST_BYTES = 16

# Two makers compute the same angles in float32, by different steps. Their results differ by a few
# units of 1e-7. A rotary base of 10001 in place of 10000 changes the slowest angles by 1e-4.
_SAME_ANGLE = 1e-5


def _rotary(value: object) -> str:
    if not isinstance(value, str) or value not in ROTARY:
        raise SpecError("rotary", value, f"one of {', '.join(ROTARY)}")
    return value


def _positive(field: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise SpecError(field, value, "a number > 0")
    if not 0 < value < math.inf:
        raise SpecError(field, value, "a finite number > 0")
    return float(value)


def _frequencies(value: object) -> tuple[float, ...] | None:
    if value is None:
        return None
    angles = sequence("frequencies", value, "angles in radians, or None")
    return tuple(_positive(f"frequencies[{at}]", angle) for at, angle in enumerate(angles))


def _magnitude(value: object) -> float | None:
    return None if value is None else _positive("magnitude", value)


def _brief(angles: tuple[float, ...] | None) -> str:
    """Return the text of *angles* in a `repr`. All 64 angles would hide the other fields."""
    return f"({angles[0]:.6g}, ..., {angles[-1]:.6g})" if angles else str(angles)


@attrs.frozen(kw_only=True)
class KeyContent:
    """What the elements of a stored key mean.

    A row is the key of one head. For MLA, it is the latent row: its latent part and its rotated
    part.

    Attributes:
        rotary: Order of the rotated elements as they are stored. `none`: keys are stored before
            rotary embedding, or the model has none. `halves`: elements i and i + n/2 of the rotated
            range are rotated together. `pairs`: elements 2i and 2i + 1 are.
        rotary_start: First rotated element of the row. For MLA, it is 0 if the rotated part is
            first, and the size of the latent part if that is first.
        rotary_size: Number n of rotated elements, an even number. It is 0 exactly if *rotary* is
            `none`.
        normalized: Whether the model normalises keys (`k_norm`) before they are stored.
        frequencies: The angle in radians by which each rotated pair turns from one token to the
            next, n / 2 numbers in the order of *halves*. They contain the rotary base and all
            scaling (linear, YaRN, LongRoPE). None if the engine cannot state them. None fits any
            angles, so the caller then answers for equal rotation.
        magnitude: Factor by which the rotation multiplies the rotated elements, such as the
            `mscale` of YaRN. None if the engine cannot state it. None fits any factor.

    >>> import kvspec
    >>> pairs = kvspec.KeyContent(rotary="pairs", rotary_size=64)
    >>> spec = kvspec.FullAttentionSpec(
    ...     block_size=16, total_num_kv_heads=8, head_size=64, dtype="bfloat16", key_content=pairs)
    >>> spec.key_content.rotary
    'pairs'
    """

    rotary: str = attrs.field(converter=_rotary)
    rotary_start: int = 0
    rotary_size: int = 0
    normalized: bool = False
    frequencies: tuple[float, ...] | None = attrs.field(
        default=None, converter=_frequencies, repr=_brief
    )
    magnitude: float | None = attrs.field(default=None, converter=_magnitude)

    def __attrs_post_init__(self) -> None:
        positive_int("rotary_start", self.rotary_start, least=0)
        size = positive_int("rotary_size", self.rotary_size, least=0)
        flag("normalized", self.normalized)
        if self.rotary == NONE:
            for field in ("rotary_size", "rotary_start"):
                if getattr(self, field):
                    raise SpecError(field, getattr(self, field), "0 if rotary is 'none'")
            for field in ("frequencies", "magnitude"):
                if getattr(self, field) is not None:
                    raise SpecError(field, getattr(self, field), "None if rotary is 'none'")
        elif size == 0 or size % 2:
            raise SpecError("rotary_size", size, f"an even number >= 2 if rotary is {self.rotary}")
        elif self.frequencies is not None and 2 * len(self.frequencies) != size:
            raise SpecError("frequencies", self.frequencies, f"{size // 2} angles, one for a pair")

    @property
    def rotary_stop(self) -> int:
        """The element after the last rotated element."""
        return self.rotary_start + self.rotary_size


def common_content(content: KeyContent, elements: int, *, latent: bool) -> KeyContent:
    """Return what *content* means in the common order.

    Args:
        content: The content of a row of *elements* elements. Its order can be changed.
        elements: Elements of the row.
        latent: Whether the row is a latent row of MLA.

    >>> content = KeyContent(rotary="pairs", rotary_size=2)
    >>> common = common_content(content, 8, latent=True)
    >>> common.rotary, common.rotary_start
    ('halves', 6)
    """
    if content.rotary == NONE:
        return content
    start = content.rotary_start
    # A rotated part in the middle of a latent row would divide the latent part in an unknown way.
    if latent and start == 0:
        start = elements - content.rotary_size
    return attrs.evolve(content, rotary=HALVES, rotary_start=start)


def without_rotation(content: KeyContent) -> KeyContent:
    """Return *content* without the numbers that are compared by `rotation_difference`."""
    return attrs.evolve(content, frequencies=None, magnitude=None)


def rotation_difference(
    producer: KeyContent, consumer: KeyContent
) -> tuple[str, float, float] | None:
    """Return the first number of the rotation in which two contents differ, or None.

    The contents have the same number of rotated elements. A number that one of them does not state
    fits any number.

    Returns:
        The name of the number, and both values.

    >>> base = KeyContent(rotary="halves", rotary_size=4, frequencies=(1, 1e-2))
    >>> rotation_difference(base, attrs.evolve(base, frequencies=(1, 1e-3)))
    ('frequencies[1]', 0.01, 0.001)
    """
    pairs: list[tuple[str, float, float]] = []
    if producer.frequencies is not None and consumer.frequencies is not None:
        angles = zip(producer.frequencies, consumer.frequencies, strict=True)
        pairs += [(f"frequencies[{at}]", *both) for at, both in enumerate(angles)]
    if producer.magnitude is not None and consumer.magnitude is not None:
        pairs.append(("magnitude", producer.magnitude, consumer.magnitude))
    return next(
        (pair for pair in pairs if not math.isclose(pair[1], pair[2], rel_tol=_SAME_ANGLE)), None
    )


def segments_of(
    content: KeyContent, elements: int, itemsize: int, *, latent: bool
) -> tuple[Segment, ...]:
    """Return where a row stores its bytes, in the common order. Empty if it is stored in it.

    Args:
        content: The content of the row.
        elements: Elements of the row.
        itemsize: Bytes of one element.
        latent: Whether the row is a latent row of MLA.
    """
    if content == common_content(content, elements, latent=latent):
        return ()
    first, stop, step = (
        at * itemsize for at in (content.rotary_start, content.rotary_stop, elements)
    )
    before, behind = (0, first, 1, first), (stop, step - stop, 1, step - stop)
    rotated: list[Segment] = [(first, stop - first, 1, stop - first)]
    if content.rotary == PAIRS:
        count = content.rotary_size // 2
        rotated = [(first + at, itemsize, count, 2 * itemsize) for at in (0, itemsize)]
    moves_last = latent and content.rotary_start == 0
    segments = [behind, *rotated] if moves_last else [before, *rotated, behind]
    return tuple(segment for segment in segments if segment[1])


def key_content(value: object) -> KeyContent | None:
    """Return *value* if it is a `KeyContent` or None. Raise `SpecError` otherwise."""
    return None if value is None else instance("key_content", value, KeyContent)


def digest_or_none(value: object) -> str | None:
    """Return *value* if it is None or hexadecimal digits. Raise `SpecError` otherwise."""
    if value is None:
        return None
    if isinstance(value, str) and value and set(value) <= set("0123456789abcdef"):
        return value
    raise SpecError("scales_digest", value, "lower-case hexadecimal digits, or None")


def scales_digest(scales: Mapping[str, tuple[Any, Any]]) -> str:
    """Return the identity of the scales of a quantised cache.

    Two engines with equal scales get equal digests. Use the result as `scales_digest` of a spec,
    for all layers of that spec. If the engines may divide their layers into different groups, give
    each layer a spec of its own (`UniformTypeKVCacheSpecs`), with the digest of that layer alone.

    Args:
        scales: The scale of keys and the scale of values, by layer name. A scale is a number, an
            array or a tensor. It is compared by its exact value as float64. The order of the layers
            does not matter.

    Returns:
        32 hexadecimal digits.

    Raises:
        SpecError: If a scale is missing, not a number, not finite or not positive.

    >>> import numpy as np
    >>> import kvspec
    >>> digest = kvspec.scales_digest({"l.0": (0.5, 1.0), "l.1": (0.25, 1.0)})
    >>> same = kvspec.scales_digest({"l.1": (np.float32(0.25), 1), "l.0": (np.array([0.5]), 1)})
    >>> len(digest), digest == same
    (32, True)
    """
    mapping("scales", scales, "layer names to pairs of a key scale and a value scale")
    if not scales:
        raise SpecError("scales", scales, "at least one layer")
    whole = hashlib.blake2b(digest_size=DIGEST_BYTES)
    for layer in sorted(instance("scales", layer, str) for layer in scales):
        pair, field = scales[layer], f"scales[{layer!r}]"
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:  # noqa: PLR2004 - keys, values
            raise SpecError(field, pair, "a pair of a key scale and a value scale")
        # Lengths before the contents keep two different mappings from giving the same bytes.
        name = layer.encode()
        whole.update(struct.pack("<Q", len(name)) + name)
        for scale in pair:
            values = _as_float64(field, scale)
            whole.update(struct.pack("<Q", values.size) + values.tobytes())
    return whole.hexdigest()


def _as_float64(field: str, scale: Any) -> Any:  # noqa: ANN401
    """Return a scale as a flat array of little-endian float64."""
    # `tolist` also reads tensors of a GPU and of bfloat16, which numpy cannot.
    plain = scale.tolist() if hasattr(scale, "tolist") else scale
    try:
        values = np.asarray(plain, "<f8").ravel()
    except (TypeError, ValueError) as error:
        raise SpecError(field, scale, "numbers") from error
    if not values.size or not (np.isfinite(values) & (values > 0)).all():
        raise SpecError(field, scale, "positive finite numbers")
    return values
