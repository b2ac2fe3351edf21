"""B1 and B2: what importing costs, and the slices of one pair of ranks."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import works
from timing import Options, Row, clock, forget, interleaved, times, told

import kvspec
from kvspec.ownership.slices import TPTransferSlice

FORBIDDEN = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "msgspec")
IMPORT = """
import json, sys, time
a = time.perf_counter()
import numpy
b, spent = time.perf_counter(), time.process_time()
import kvspec
c, spent = time.perf_counter(), time.process_time() - spent
print(json.dumps([b - a, c - b, spent, [m for m in {names!r} if m in sys.modules]]))
"""
NO_TORCH = "torch is not installed"
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)


def b1(options: Options) -> Iterator[Row]:
    """Import time beyond numpy's, in new processes, and what must not be imported."""
    program = IMPORT.format(names=FORBIDDEN)
    taken = []
    with tempfile.TemporaryDirectory() as compiled:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(kvspec.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "",
            "PYTHONPYCACHEPREFIX": compiled,  # as installed; the first run compiles
        }
        for _ in range(1 + options.times(24)):
            run = subprocess.run(
                [sys.executable, "-c", program], env=environment, check=True, capture_output=True
            )
            taken.append(json.loads(run.stdout))
    numpy, ours, spent = (median(each[i] for each in taken[1:]) for i in range(3))
    loaded = sorted({name for each in taken for name in each[3]})
    yield Row(
        budget="B1",
        what="import kvspec, beyond numpy (other: numpy itself)",
        ours=f"{told(ours)}, CPU {told(spent)}",
        other=told(numpy),
        ratio=times(numpy, ours),
        wanted="<= 80 ms",
        met=ours <= 0.080,
    )
    yield Row(
        budget="B1",
        what=f"of {', '.join(FORBIDDEN)}: imported",
        ours=", ".join(loaded) or "none",
        wanted="none",
        met=not loaded,
    )


def b2(options: Options) -> Iterator[Row]:
    """Slices of random rank pairs, against torch's planner on the same heads."""
    try:
        from torch_planner import Overlap  # noqa: PLC0415 - torch is optional
    except ImportError:
        yield Row(budget="B2", what="get_tp_transfer_slices", ours="", other=NO_TORCH)
        return
    drawn = random.Random(0)  # noqa: S311 - the same pairs in every run
    warm: list[list[float]] = []
    cold: list[list[float]] = []
    for _ in range(options.times(240)):
        heads, local, remote = drawn.choice(HEADS), drawn.randint(1, 64), drawn.randint(1, 64)
        spec = works.heads(heads, 16)
        asked = (drawn.randrange(local), local, remote)
        other = Overlap(heads, *asked)
        _check_same_heads(spec.get_tp_transfer_slices(*asked), other)

        def ours(spec: works.LayerSpec = spec, asked: tuple[int, ...] = asked) -> object:
            return spec.get_tp_transfer_slices(*asked)

        def first(spec: works.LayerSpec = spec, asked: tuple[int, ...] = asked) -> float:
            forget()
            return clock(lambda: spec.get_tp_transfer_slices(*asked))()

        def built(heads: int = heads, asked: tuple[int, ...] = asked) -> object:
            return Overlap(heads, *asked).plan()

        warm.append(interleaved(3, clock(ours, 5), clock(other.plan, 5)))
        cold.append(interleaved(1, first, clock(built)))
    for what, rows in (("", warm), (", nothing cached, torch's chunks made anew", cold)):
        mine, torchs = (median(each[i] for each in rows) for i in range(2))
        yield Row(
            budget="B2",
            what=f"get_tp_transfer_slices, {len(rows)} rank pairs, TP <= 64{what}",
            ours=told(mine),
            other=f"torch {told(torchs)}",
            ratio=times(torchs, mine),
            wanted="" if what else "< 45 us, > 1 x",
            met=None if what else mine < 45e-6 and mine < torchs,
        )


def _check_same_heads(slices: tuple[TPTransferSlice, ...], other: object) -> None:
    ours = sorted((each.global_range for each in slices), key=lambda each: each.start)
    theirs = other.heads(other.plan())  # type: ignore[attr-defined]
    if ours != theirs:
        raise RuntimeError(f"the planners disagree: {ours} and {theirs}")
