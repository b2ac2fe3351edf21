"""Read by which angles the rotary module of vLLM or SGLang turns keys.

Invariant: the angles are those that the engine computes, after all overrides. Nothing is derived
from the name of a scaling or from a config. A module whose angles depend on the length of a prompt
is refused.

How it works:
    A rotary module computes a table with one row for each position: the cosines of all pairs, then
    their sines. Row 1 contains the angle and the magnitude of each pair:

        angles 1.0 and 0.1, magnitude 1:    0.54  0.995 | 0.84  0.0998

    An engine may keep the table in bfloat16, which is too coarse. So the module computes it again,
    and row 1 of the kept table must be the same but for its rounding.

    LongRoPE has two lists of factors. vLLM chooses one of them when it starts, by its
    `max_model_len`. SGLang chooses by the positions of each batch.
"""

from __future__ import annotations

import math
from typing import Any
from weakref import WeakKeyDictionary

from kvspec.adapters.field_reader import FieldReader
from kvspec.errors import SpecError

LONGROPE = "Phi3LongRoPEScaledRotaryEmbedding"

# These rotate keys by the position inside a chunk, or by a sum of many angles.
_NOT_ONE_ANGLE = ("DualChunkRotaryEmbedding", "FourierRotaryEmbedding")

# The rounding of bfloat16, twice.
_ROUNDING = 2**-7

# Row 1 of each table. All layers of a model share a few modules, and a table has many megabytes.
_ROWS_OF: WeakKeyDictionary[Any, list[float]] = WeakKeyDictionary()


def rotation(rotary: FieldReader, pairs: int) -> dict[str, Any]:
    """Return the `frequencies` and the `magnitude` of a rotary module, or nothing if unknown.

    Args:
        rotary: The rotary module.
        pairs: The number of pairs that it rotates.

    Raises:
        SpecError: If the module does not turn each pair by one angle for each token, or if the
            angles depend on the length of a prompt.
    """
    kind = type(rotary.value).__name__
    if kind in _NOT_ONE_ANGLE:
        raise SpecError(rotary.path, kind, "a rotary embedding with one angle for each pair")
    if kind == LONGROPE:
        return _of_longrope(rotary)
    if not callable(rotary.get("_compute_cos_sin_cache").value):
        return {}
    row = _row(rotary)
    turned = [*zip(row[:pairs], row[pairs:], strict=False)]
    angles = [math.atan2(sine, cosine) for cosine, sine in turned]
    sizes = [math.hypot(cosine, sine) for cosine, sine in turned]
    known = len(row) == 2 * pairs and all(angle > 0 for angle in angles)
    # All pairs have one magnitude, but for the rounding of float32. If not, it is another table.
    if not known or max(sizes) - min(sizes) > 1e-5 * min(sizes):
        return {}
    return {"frequencies": tuple(angles), "magnitude": sizes[0]}


def _row(rotary: FieldReader) -> list[float]:
    """Return row 1 of the table that the module computes. Raise if it keeps another."""
    if rotary.value not in _ROWS_OF:
        table = rotary.call("_compute_cos_sin_cache").value
        _ROWS_OF[rotary.value] = [float(each) for each in table[1].tolist()]
    row, kept = _ROWS_OF[rotary.value], rotary.get("cos_sin_cache")
    stored = kept.item(1).value.tolist()
    near = len(row) == len(stored) and all(
        abs(computed - kept_value) <= _ROUNDING * max(1, abs(computed))
        for computed, kept_value in zip(row, stored, strict=True)
    )
    if not near:
        raise SpecError(kept.path, stored, f"{row}, which the module computes")
    return row


def _of_longrope(rotary: FieldReader) -> dict[str, Any]:
    limits = [rotary.get(f"{name}max_position_embeddings").size() for name in ("original_", "")]
    long = rotary.get("use_long_rope").value
    if long is None and limits[1] <= limits[0]:
        long = False
    if not isinstance(long, bool):
        wanted = "a rotary embedding whose factors do not depend on the length of a prompt"
        raise SpecError(rotary.path, LONGROPE, wanted)
    name = "long" if long else "short"
    factors, size = rotary.get(f"{name}_factor").value, rotary.get(f"{name}_mscale").value
    computed = rotary.value._compute_inv_freq(factors).tolist()  # noqa: SLF001 - see above
    found = {"frequencies": tuple(map(float, computed))}
    return found if size is None else found | {"magnitude": float(size)}
