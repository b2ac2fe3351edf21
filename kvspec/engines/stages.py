"""Which pipeline stage holds which layer.

Law: stages are sharded by layer names, or by the first number in them; never by index.
"""

from __future__ import annotations

import re
from itertools import pairwise

from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig, Stage

MOST_DIGITS = 18
"""Digits of a layer's number: it fits a signed 64-bit number.

Python raises an error of its own for a text of thousands of digits.
"""


def stages_of(layers: list[str], parallel: ParallelConfig) -> dict[str, int]:
    """Return the pipeline stage of each of *layers*; `SpecError` for one in none or in several."""
    if parallel.pp_size == 1 and parallel.stages is None:
        return dict.fromkeys(layers, 0)
    stages = parallel.stages or _even_stages(layers, parallel.pp_size)
    found: dict[str, int] = {}
    for layer in layers:
        holders = [number for number, stage in enumerate(stages) if _holds(stage, layer)]
        if len(holders) != 1:
            where = "no stage" if not holders else f"stages {holders}"
            raise SpecError("stages", stages, f"one stage for layer {layer!r}, which is in {where}")
        found[layer] = holders[0]
    return found


def _number(layer: str) -> int | None:
    """Return the first number in the name of *layer*; None if it has none."""
    found = re.search(r"0*(\d+)", layer)
    if found and len(found[1]) > MOST_DIGITS:
        raise SpecError("layers", layer, f"a first number of at most {MOST_DIGITS} digits")
    return int(found[1]) if found else None


def _holds(stage: Stage, layer: str) -> bool:
    return _number(layer) in stage if isinstance(stage, range) else layer in stage


def _even_stages(layers: list[str], count: int) -> tuple[range, ...]:
    """Return a contiguous, even sharding of layer numbers to stages."""
    found: set[int] = set()
    for layer in layers:
        number = _number(layer)
        if number is None:
            wanted = f"each stage's layer names, since layer {layer!r} has no number to place it by"
            raise SpecError("stages", None, wanted)
        found.add(number)
    numbers = sorted(found)
    starts = (numbers[stage * len(numbers) // count] for stage in range(1, count))
    return tuple(range(a, b) for a, b in pairwise([0, *starts, numbers[-1] + 1]))
