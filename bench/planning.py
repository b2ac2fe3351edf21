"""B1 to B5, B9, B10: what planning, tables and look-ups cost, without moving a byte."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median

import mooncake_client
import works
from mooncake_client import Mooncake
from timing import Options, Row, clock, forget, interleaved, times, told

import kvspec
from kvspec import DescriptorTable, RankId, build_table, plan_transfer

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
HEADS = (1, 2, 3, 4, 6, 8, 12, 16, 32, 64, 128)
ROOT = RankId()
NO_TORCH = "torch is not installed"


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


def _check_same_heads(slices: tuple[kvspec.TPTransferSlice, ...], other: object) -> None:
    ours = sorted((each.global_range for each in slices), key=lambda each: each.start)
    theirs = other.heads(other.plan())  # type: ignore[attr-defined]
    if ours != theirs:
        raise RuntimeError(f"the planners disagree: {ours} and {theirs}")


def planned(work: works.Work) -> float:
    """Time `plan_transfer` of *work* as if for the first time in a process."""
    producer, consumer = work.engines()
    forget()
    return clock(lambda: plan_transfer(producer, consumer))()


def b3(options: Options) -> Iterator[Row]:
    """Whole plans, nothing cached before, and Mooncake's logical plan of the same ranks."""
    for work in (works.W1, works.W2):
        [ours] = interleaved(options.times(40), lambda work=work: planned(work))
        yield Row(
            budget="B3",
            what=f"plan_transfer, {work.name}, all rank pairs, nothing cached",
            ours=told(ours),
            wanted="< 20 ms" if work is works.W1 else "",
            met=ours < 0.020 if work is works.W1 else None,
        )
    what = "plan_transfer, W3 (other: Mooncake's logical plan of every target)"
    if options.python is None:
        [ours] = interleaved(options.times(40), lambda: planned(works.W3))
        yield Row(budget="B3", what=what, ours=told(ours), other=mooncake_client.HOW)
        return
    with Mooncake(options.python, mooncake_client.described(works.W3)) as other:
        ours, theirs = interleaved(
            options.times(40), lambda: planned(works.W3), lambda: other.seconds("plan")
        )
    yield Row(
        budget="B3",
        what=what,
        ours=told(ours),
        other=told(theirs),
        ratio=times(theirs, ours),
        wanted=">= 10 x",
        met=theirs >= 10 * ours,
    )


def first_pair(work: works.Work, num_blocks: int) -> Callable[[], float]:
    """Return a timer of `build_table` for the first pair of ranks, their caches new each time."""
    producer, consumer = work.engines()
    plan = plan_transfer(producer, consumer)

    def run() -> float:
        ours = works.cache_at(producer, ROOT, num_blocks, 1 << 40)
        theirs = works.cache_at(consumer, ROOT, num_blocks, 2 << 40)
        return clock(lambda: build_table(plan, ours, theirs))()

    return run


def tables(work: works.Work) -> list[DescriptorTable]:
    """Return the tables of every pair of ranks of *work*."""
    producer, consumer = work.engines()
    plan = plan_transfer(producer, consumer)
    ours, theirs = (
        dict(works.caches(engine, work.num_blocks, side))
        for side, engine in enumerate((producer, consumer))
    )
    return [
        build_table(plan, ours[source], theirs[rank])
        for rank in theirs
        for source in plan.sources(rank)
    ]


def b4(options: Options) -> Iterator[Row]:
    """Descriptor tables of one pair of ranks, and of pools sixteen times as large."""
    for work in (works.W1, works.W2):
        small = work.num_blocks // 16
        ours, less = interleaved(
            options.times(40), first_pair(work, work.num_blocks), first_pair(work, small)
        )
        yield Row(
            budget="B4",
            what=f"build_table, {work.name}, one rank pair (other: a pool of 1/16 the blocks)",
            ours=told(ours),
            other=told(less),
            ratio=times(less, ours),
            wanted="< 5 ms" if work is works.W1 else "",
            met=ours < 0.005 if work is works.W1 else None,
        )
        rows = [len(_first_table(work, count).producer_rows) for count in (work.num_blocks, small)]
        yield Row(
            budget="B4",
            what=f"rows, {work.name}, {work.num_blocks} blocks (other: {small} blocks)",
            ours=str(rows[0]),
            other=str(rows[1]),
            wanted="equal",
            met=rows[0] == rows[1],
        )


def _first_table(work: works.Work, num_blocks: int) -> DescriptorTable:
    producer, consumer = work.engines()
    ours = works.cache_at(producer, ROOT, num_blocks, 1 << 40)
    theirs = works.cache_at(consumer, ROOT, num_blocks, 2 << 40)
    return build_table(plan_transfer(producer, consumer), ours, theirs)


def b5(options: Options) -> Iterator[Row]:
    """Ids of a request with shuffled blocks; W3 of all ranks against Mooncake's lowering."""
    for work in (works.W1, works.W2):
        table, request = tables(work)[0], work.request()
        found = len(table.select(request)[0])
        [ours] = interleaved(options.times(40), clock(lambda t=table, r=request: t.select(r)))
        yield Row(
            budget="B5",
            what=f"select, {work.name}, one rank pair, shuffled blocks, {found} descriptors",
            ours=f"{told(ours / found)} each",
            wanted="< 25 ns each" if work is works.W1 else "",
            met=ours / found < 25e-9 if work is works.W1 else None,
        )
    yield from _lowering(options)


def _lowering(options: Options) -> Iterator[Row]:
    made, request = tables(works.W3), works.W3.request()
    select = clock(lambda: [each.select(request) for each in made])
    describe = clock(lambda: [each.descriptors(request) for each in made])
    if options.python is None:
        [ours] = interleaved(options.times(40), select)
        yield Row(
            budget="B5", what="select, W3, all ranks", ours=told(ours), other=mooncake_client.HOW
        )
        return
    with Mooncake(options.python, mooncake_client.described(works.W3)) as other:
        same = mooncake_client.digest([each.descriptors(request) for each in made])
        if same != other.ask("digest"):
            raise RuntimeError("kvspec and Mooncake disagree about the writes of W3")
        lower, bare = (lambda name=name: other.seconds(name) for name in ("lower", "lower_only"))
        ours, listed, theirs, inner = interleaved(options.times(24), select, describe, lower, bare)
    what = f"all ranks, {same['writes']} equal writes"
    for name, mine, its, wanted in (
        ("select", ours, theirs, ">= 500 x"),
        ("select (other: its inner loop, without its checks)", ours, inner, ""),
        ("descriptors(), addresses as Mooncake's", listed, theirs, ""),
    ):
        yield Row(
            budget="B5",
            what=f"W3 {name}, {what}",
            ours=told(mine),
            other=f"Mooncake {told(its)}",
            ratio=times(its, mine),
            wanted=wanted,
            met=its >= 500 * mine if wanted else None,
        )
