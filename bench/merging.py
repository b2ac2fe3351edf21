"""B6: the descriptors that a request posts, compared with the fewest that the bytes allow.

NIXL merges two ids only if they are adjacent on both sides, lie in one row whose descriptors touch,
and follow each other in the list. Before that, `NixlRank` merges runs of different rows.
`DescriptorTable.descriptors()` returns the minimum. NIXL's telemetry returns the true number.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import attrs
import numpy as np
import works
from planning import first_ranks, first_table
from timing import Options, Row

from kvspec import DescriptorTable, ParallelConfig, allocate, build_table, plan_transfer
from kvspec.analysis.fewest import descriptor_counts
from kvspec.descriptors.selection import Selection
from kvspec.nixl.merging import pair_selection
from kvspec.nixl.rows import checked_rows
from kvspec.testing.posted import counted_posts

LAYOUTS = ("LBHNC", "LBNHC", "LKBNHC", "LBKHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
PAIRS = ((8, 4), (4, 8), (4, 4), (2, 8), (8, 2), (16, 4), (3, 2))
# Adjacent blocks: all of the pool, one (shuffled), and eight.
FRAGMENTS = (0, 1, 8)
# This many tokens are whole blocks in every case, except with blocks of 48 tokens or several
# context ranks.
BOUNDARY = 64
# Cached tokens: none, whole blocks, and a prime that ends inside a block.
CACHED = (0, BOUNDARY, 37)
BASE = works.Work(name="merging", layers=3, spec=works.heads(8, 16), tp_sizes=(1, 1), tokens=517)
# Posted descriptors may exceed the minimum by this factor. Each posted descriptor costs NIXL about
# 3 us of CPU time, as much as moving 26 KB.
LIMIT = 1.15
# Numbers of the cases that NIXL itself moves. They are spread over the cases of each kind.
REAL = (0, 7, 19, 31, 42, 53)
# Two more cases, in which NIXL would post too many descriptors if it received the ids alone.
JOINED = (
    "LHBNC -> LHBNC, TP 4 -> 4, runs of all, 37 cached",
    "BLHNC -> BHLNC, TP 4 -> 4, runs of all, 64 cached",
)


def _contexts(dcp_size: int, interleave_size: int) -> ParallelConfig:
    return ParallelConfig(tp_size=16, dcp_size=dcp_size, interleave_size=interleave_size)


BLOCKS = tuple(
    attrs.evolve(
        BASE, name=f"blocks {ours} -> {theirs}", tp_sizes=(8, 4), block_sizes=(ours, theirs)
    )
    for ours, theirs in ((16, 64), (64, 16), (48, 32))
)
KERNELS = tuple(
    attrs.evolve(
        BASE,
        name=f"blocks of 64 by kernel blocks of {' -> '.join(str(each or 64) for each in kernels)}",
        tp_sizes=(8, 4),
        block_sizes=(64, 64),
        kernel_blocks=kernels,
    )
    for kernels in ((16, None), (None, 16), (16, 32))
)
CONTEXTS = tuple(
    attrs.evolve(
        BASE,
        name=f"DCP {ours} -> {theirs}, interleave {runs[0]} -> {runs[1]}",
        parallels=(_contexts(ours, runs[0]), _contexts(theirs, runs[1])),
    )
    for ours, theirs, runs in ((2, 2, (1, 1)), (2, 1, (16, 16)), (2, 1, (4, 4)), (1, 2, (8, 8)))
)
GRID = tuple(
    attrs.evolve(BASE, name=f"TP {ours} -> {theirs}", tp_sizes=(ours, theirs))
    for ours, theirs in PAIRS
)
KINDS = {
    "equal blocks": GRID,
    "unequal blocks": BLOCKS,
    "kernel blocks": KERNELS,
    "context ranks": CONTEXTS,
}


def cases(bases: Sequence[works.Work], options: Options) -> Iterator[works.Work]:
    """Yield every layout pair x one of *bases* x fragmentation x cached prefix."""
    layouts = LAYOUTS[:3] if options.quick else LAYOUTS
    bases = bases[:2] if options.quick else bases
    for names, base, run, cached in product(product(layouts, repeat=2), bases, FRAGMENTS, CACHED):
        what = f"{names[0]} -> {names[1]}, {base.name}, runs of {run or 'all'}"
        yield attrs.evolve(
            base, name=f"{what}, {cached} cached", layouts=names, fragments=run, cached=cached
        )


def posted(table: DescriptorTable, selection: Selection) -> int:
    """Return how many descriptors `NixlRank` posts for *selection*."""
    rows = checked_rows(table.consumer_rows), checked_rows(table.producer_rows)
    return pair_selection(selection, *rows, 1, "local").runs


def merged(table: DescriptorTable, selection: Selection) -> int:
    """Return how many descriptors remain of *selection* by NIXL's own rule."""
    ids = selection.ids
    if not len(ids[0]):
        return len(selection.ends)
    joined = np.ones(len(ids[0]) - 1, dtype=bool)
    for rows, own in zip((table.producer_rows, table.consumer_rows), ids, strict=True):
        _, length, _, stride, count = rows.astype(np.int64).T
        row = np.searchsorted(np.cumsum(count), own, side="right")
        joined &= (np.diff(own) == 1) & (np.diff(row) == 0) & (length == stride)[row[1:]]
    return len(selection.ends) + 1 + int((~joined).sum())


def b6(options: Options) -> Iterator[Row]:
    """Yield rows: posted descriptors over the minimum, and NIXL's own count of some cases."""
    wrong, alone = 0, 0
    for kind, bases in KINDS.items():
        whole: list[_Count] = []
        inside: list[_Count] = []
        for work in cases(bases, options):
            table, request = first_table(work), work.request()
            selection, fewest = table.select(request), len(table.descriptors(request))
            after, by_ids = posted(table, selection), merged(table, selection)
            wrong += descriptor_counts(table, request) != (by_ids, fewest)
            alone += by_ids > LIMIT * fewest
            counts = inside if work.cached % BOUNDARY else whole
            if fewest:
                counts.append(_Count(after / fewest, after, fewest, work.name))
        yield from _worst(f"{kind}: cached nothing or {BOUNDARY}", whole)
        yield from _worst(f"{kind}: the cached prefix ends inside a block", inside)
    yield Row(
        budget="B6",
        what=f"cases over {LIMIT} if NIXL receives the ids alone",
        ours=str(alone),
    )
    yield Row(
        budget="B6",
        what="cases in which descriptor_counts() differs from NIXL's rule on the ids of select",
        ours=str(wrong),
        required="0",
        met=not wrong,
    )
    yield from _real(options)


class _Count(NamedTuple):
    """The descriptors that one case posts, and the fewest that it could."""

    ratio: float
    after: int
    fewest: int
    name: str


def _worst(what: str, counts: list[_Count]) -> Iterator[Row]:
    worst = max(counts)
    over = sum(case.ratio > LIMIT for case in counts)
    yield Row(
        budget="B6",
        what=f"posted, worst of {len(counts)}, {what} (other: the fewest)",
        ours=str(worst.after),
        other=str(worst.fewest),
        ratio=f"{worst.ratio:.3g}",
        required=f"<= {LIMIT}",
        met=worst.ratio <= LIMIT,
    )
    total = sum(case.after for case in counts), sum(case.fewest for case in counts)
    yield Row(
        budget="B6",
        what=f"  worst is {worst.name}",
        ours="",
    )
    yield Row(
        budget="B6",
        what=f"  all {len(counts)} together; {over} are over {LIMIT}; "
        f"median ratio {median(case.ratio for case in counts):.3g}",
        ours=str(total[0]),
        other=str(total[1]),
        ratio=f"{total[0] / total[1]:.5g}",
    )


def _real(options: Options) -> Iterator[Row]:
    os.environ.setdefault("UCX_NET_DEVICES", "lo")
    what = "NIXL's telemetry counts what our rule counts"
    try:
        import nixl_cu13  # noqa: F401, PLC0415 - NIXL is optional

        from kvspec.nixl import NixlRank  # noqa: PLC0415
    except ImportError:
        yield Row(budget="B6", what=what, ours="", other="nixl is not installed")
        return
    every = [list(cases(bases, options)) for bases in KINDS.values()]
    chosen = [known[at] for known in every for at in REAL]
    if not options.quick:
        chosen += [work for work in every[0] if work.name in JOINED]
    equal = 0
    for work in chosen:
        ours, theirs = _through(NixlRank, work)
        equal += ours == theirs
    yield Row(
        budget="B6",
        what=f"{what}: cases",
        ours=f"{equal} of {len(chosen)}",
        required="all",
        met=equal == len(chosen),
    )


def _through(rank_class: Any, work: works.Work) -> tuple[int, int]:  # noqa: ANN401
    """Return the number that our rule counts for *work*, and the number that NIXL posted."""
    producer, consumer = work.engines()
    plan = plan_transfer(producer, consumer)
    source, target = first_ranks(plan)
    theirs, held = allocate(producer, source, work.pools[0])
    ours, own = allocate(consumer, target, work.pools[1])
    table = build_table(plan, theirs, ours)
    selection = table.select(work.request())
    with (
        counted_posts() as counts,
        rank_class(secret=b"") as far,
        rank_class(secret=b"", polled=True) as near,
    ):
        far.register(theirs.memory, owner=held)
        near.register(ours.memory, owner=own)
        peer = near.connect(far.metadata())
        local = near.prepare(table.consumer_rows)
        remote = near.prepare(table.producer_rows, peer=peer)
        transfer = near.read(local, selection, remote, request="bench", timeout=60)
        transfer.wait()
        return posted(table, selection), counts[transfer]
