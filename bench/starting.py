"""B1 and B2: the cost of the import, and of the slices of one pair of ranks."""

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
from timing import Options, Row, clock, forget, interleaved, readable, times

import kvspec
from kvspec.ownership.slices import TPTransferSlice

# Optional packages. `import kvspec` must work without them, and must not spend time on them.
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
    """Yield the import time beyond numpy's, in new processes, and forbidden imports."""
    program = IMPORT.format(names=FORBIDDEN)
    taken = []
    with tempfile.TemporaryDirectory() as compiled:
        environment = {
            **os.environ,
            "PYTHONPATH": str(Path(kvspec.__file__).parents[1]),
            "PYTHONDONTWRITEBYTECODE": "",
            # Installed packages have bytecode. The first run compiles it, and is not counted.
            "PYTHONPYCACHEPREFIX": compiled,
        }
        for _ in range(1 + options.times(24)):
            run = subprocess.run(
                [sys.executable, "-c", program], env=environment, check=True, capture_output=True
            )
            taken.append(json.loads(run.stdout))
    numpy, ours, spent = (median(run[i] for run in taken[1:]) for i in range(3))
    loaded = sorted({name for run in taken for name in run[3]})
    yield Row(
        budget="B1",
        what="import kvspec, beyond numpy (other: numpy itself)",
        ours=f"{readable(ours)}, CPU {readable(spent)}",
        other=readable(numpy),
        ratio=times(numpy, ours),
        required="<= 80 ms",
        met=ours <= 0.080,
    )
    yield Row(
        budget="B1",
        what=f"of {', '.join(FORBIDDEN)}: imported",
        ours=", ".join(loaded) or "none",
        required="none",
        met=not loaded,
    )


# torch's planner took 45 us for one target plan when the limit was set (2 cores, no GPU).
def b2(options: Options) -> Iterator[Row]:
    """Yield the time of slices of random rank pairs, and of torch's planner on the same heads."""
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
        ranks = (drawn.randrange(local), local, remote)
        other = Overlap(heads, *ranks)
        _check_same_heads(spec.get_tp_transfer_slices(*ranks), other)

        def ours(spec: works.LayerSpec = spec, ranks: tuple[int, ...] = ranks) -> object:
            return spec.get_tp_transfer_slices(*ranks)

        def first(spec: works.LayerSpec = spec, ranks: tuple[int, ...] = ranks) -> float:
            forget()
            return clock(lambda: spec.get_tp_transfer_slices(*ranks))()

        def built(heads: int = heads, ranks: tuple[int, ...] = ranks) -> object:
            return Overlap(heads, *ranks).plan()

        warm.append(interleaved(3, clock(ours, 5), clock(other.plan, 5)))
        cold.append(interleaved(1, first, clock(built)))
    for what, rows in (("", warm), (", nothing cached, torch's chunks built too", cold)):
        mine, torchs = (median(row[i] for row in rows) for i in range(2))
        yield Row(
            budget="B2",
            what=f"get_tp_transfer_slices, {len(rows)} rank pairs, TP <= 64{what}",
            ours=readable(mine),
            other=f"torch {readable(torchs)}",
            ratio=times(torchs, mine),
            required="" if what else "< 45 us, > 1 x",
            met=None if what else mine < 45e-6 and mine < torchs,
        )


def _check_same_heads(slices: tuple[TPTransferSlice, ...], other: object) -> None:
    ours = sorted((piece.global_range for piece in slices), key=lambda heads: heads.start)
    theirs = other.heads(other.plan())  # type: ignore[attr-defined]
    if ours != theirs:
        raise RuntimeError(f"the planners disagree: {ours} and {theirs}")
