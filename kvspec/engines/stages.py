"""The pipeline stage of each layer.

Invariant: a stage is determined by the name of a layer, or by the first number in the name. The
place of a layer in a list is never used, because two engines list their layers in different orders.

        >>> layers = ["layers.0.attn", "layers.1.attn", "layers.2.attn", "layers.3.attn"]
        >>> stages_of(layers, ParallelConfig(pp_size=2))
        {'layers.0.attn': 0, 'layers.1.attn': 0, 'layers.2.attn': 1, 'layers.3.attn': 1}
"""

from __future__ import annotations

import re
from itertools import pairwise, permutations

from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig, StageLayers

# A number with 18 digits fits into 64 bits. Without a limit, `int` would raise its own ValueError
# for a text with thousands of digits.
MOST_DIGITS = 18


def stages_of(layers: list[str], parallel: ParallelConfig) -> dict[str, int]:
    """Return the pipeline stage of each layer.

    Args:
        layers: Names of all layers of the engine.
        parallel: Parallel sizes of the engine. Without explicit stages, the layer numbers are
            divided evenly.

    Raises:
        SpecError: If a layer belongs to no stage or to several, or has no number but needs one.

    >>> stages_of(["l.0", "l.7"], ParallelConfig(pp_size=2, stages=[range(0, 5), range(5, 8)]))
    {'l.0': 0, 'l.7': 1}
    """
    if parallel.pp_size == 1 and parallel.stages is None:
        return dict.fromkeys(layers, 0)
    stages = parallel.stages or _even_stages(layers, parallel.pp_size)
    stage_of: dict[str, int] = {}
    for layer in layers:
        holders = [number for number, stage in enumerate(stages) if _holds(stage, layer)]
        if len(holders) != 1:
            where = "no stage" if not holders else f"stages {holders}"
            raise SpecError("stages", stages, f"one stage for layer {layer!r}, which is in {where}")
        stage_of[layer] = holders[0]
    return stage_of


def _number(layer: str) -> int | None:
    """Return the first number in the name of *layer*, or None if there is no number."""
    digits = re.search(r"0*(\d+)", layer)
    if digits and len(digits[1]) > MOST_DIGITS:
        raise SpecError("layers", layer, f"a first number of at most {MOST_DIGITS} digits")
    return int(digits[1]) if digits else None


def _holds(stage: StageLayers, layer: str) -> bool:
    return _number(layer) in stage if isinstance(stage, range) else layer in stage


def _even_stages(layers: list[str], count: int) -> tuple[range, ...]:
    """Divide the layer numbers contiguously and evenly among *count* stages.

    Refuses an engine of which one half of the layers seems to count on from the other half. Then
    two names with other numbers belong to one layer.
    """
    numbered: dict[str, set[int]] = {}  # by the text before the number
    for layer in layers:
        number = _number(layer)
        if number is None:
            requirement = f"the layer names of each stage, because layer {layer!r} has no number"
            raise SpecError("stages", None, requirement)
        numbered.setdefault(re.split(r"\d", layer, maxsplit=1)[0], set()).add(number)
    # Falcon-H1 of vLLM has `model.layers.0.attn` and `model.36.mixer` in one layer.
    for one, other in permutations(map(sorted, numbered.values()), 2):
        count_on = list(range(one[0], one[0] + 2 * len(one)))
        if len(one) > 1 and one + other == count_on and len(one) == len(other):
            raise SpecError(
                "stages",
                None,
                "the layer names of each stage, because layers "
                f"{other[0]} to {other[-1]} may be in the layers {one[0]} to {one[-1]}",
            )
    # Several layers may have one number, such as the caches of one model layer. They stay together.
    numbers = sorted(set[int]().union(*numbered.values()))
    starts = (numbers[stage * len(numbers) // count] for stage in range(1, count))
    return tuple(range(a, b) for a, b in pairwise([0, *starts, numbers[-1] + 1]))
