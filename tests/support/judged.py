"""What `verify` and law 1 of the kit find wrong with given descriptors."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import kvspec
from kvspec.testing.laws.copies import cover
from kvspec.testing.laws.system import System, Trial
from kvspec.testing.world import World

Descriptors = dict[tuple[kvspec.RankId, kvspec.RankId], npt.NDArray[np.uint64]]


def caches(here: World) -> tuple[Any, Any]:
    """Return the caches of both sides by rank."""
    producers, consumers = (
        {rank: cache for rank, (cache, _) in side.items()}
        for side in (here.producers, here.consumers)
    )
    return producers, consumers


def law_1(here: World, descriptors: Descriptors) -> list[str]:
    """Return what law 1 finds wrong with *descriptors*."""

    def answer(_: World, p: kvspec.RankId, c: kvspec.RankId) -> list[Any]:
        return list(map(tuple, descriptors.get((p, c), np.empty((0, 3))).tolist()))

    try:
        return [*cover(Trial(System(name="given", descriptors=answer), here.case, here))]
    except AssertionError as error:  # A copy leaves the memory of its rank.
        return [str(error)]
