"""B6: how many descriptors a request posts, against the fewest that the bytes allow.

NIXL joins what `select` returns only where ids follow each other on both sides, inside one row
whose descriptors touch, in the order of the list. `descriptors()` is the minimum; real NIXL
says how many it posted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import product
from statistics import median
from typing import Any, NamedTuple

import attrs
import numpy as np
import works
from timing import Options, Row

from kvspec import DescriptorTable, allocate, build_table, plan_transfer

LAYOUTS = ("LBHNC", "LBNHC", "LKBNHC", "LBKHNC", "BLHNC", "BLNHC", "BHLNC", "LHBNC")
PAIRS = ((8, 4), (4, 8), (4, 4), (2, 8), (8, 2), (16, 4), (3, 2))
FRAGMENTS = (0, 1, 8)
CACHED = (0, 64, 37)
BASE = works.Work(name="merging", layers=3, spec=works.heads(8, 16), tp_sizes=(1, 1), tokens=517)
LIMIT = 1.15
REAL = (0, 7, 19, 31, 42, 53)
"""The numbers of the cases that go through NIXL itself, spread over `cases`."""


def cases(options: Options) -> Iterator[works.Work]:
    """Yield every layout pair x TP pair x fragmentation x cached prefix."""
    layouts = LAYOUTS[:3] if options.quick else LAYOUTS
    pairs = PAIRS[:2] if options.quick else PAIRS
    for names, sizes, run, cached in product(product(layouts, repeat=2), pairs, FRAGMENTS, CACHED):
        what = f"{names[0]} -> {names[1]}, TP {sizes[0]} -> {sizes[1]}, runs of {run or 'all'}"
        yield attrs.evolve(
            BASE,
            name=f"{what}, {cached} cached",
            layouts=names,
            tp_sizes=sizes,
            fragments=run,
            cached=cached,
        )


def posted(table: DescriptorTable, ids: tuple[np.ndarray, np.ndarray]) -> int:
    """Return how many descriptors NIXL's rule leaves of *ids*, (producer's, consumer's)."""
    if not len(ids[0]):
        return 0
    joined = np.ones(len(ids[0]) - 1, dtype=bool)
    for rows, own in zip((table.producer_rows, table.consumer_rows), ids, strict=True):
        _, length, _, stride, count = rows.astype(np.int64).T
        row = np.searchsorted(np.cumsum(count), own, side="right")
        joined &= (np.diff(own) == 1) & (np.diff(row) == 0) & (length == stride)[row[1:]]
    return 1 + int((~joined).sum())


def _first(work: works.Work) -> tuple[DescriptorTable, Any]:
    producer, consumer = work.engines()
    plan = plan_transfer(producer, consumer)
    [rank, *_] = plan.sources(consumer.parallel.ranks[0])
    ours = works.cache_at(producer, rank, work.num_blocks, 1 << 40)
    theirs = works.cache_at(consumer, consumer.parallel.ranks[0], work.num_blocks, 2 << 40)
    return build_table(plan, ours, theirs), work.request()


def b6(options: Options) -> Iterator[Row]:
    """Descriptors after merging over the minimum, and NIXL's own count of some cases."""
    whole: list[_Count] = []
    inside: list[_Count] = []
    for work in cases(options):
        table, request = _first(work)
        after, fewest = posted(table, table.select(request)), len(table.descriptors(request))
        kind = inside if work.cached % work.spec.block_size else whole
        kind.append(_Count(after / fewest, after, fewest, work.name))
    yield from _worst("nothing cached, or whole blocks", whole)
    yield from _worst("the cached prefix ends inside a block", inside)
    yield from _real(options)


class _Count(NamedTuple):
    """What one case posts, and the fewest that it could."""

    ratio: float
    after: int
    fewest: int
    name: str


def _worst(what: str, found: list[_Count]) -> Iterator[Row]:
    worst = max(found)
    over = sum(each.ratio > LIMIT for each in found)
    yield Row(
        budget="B6",
        what=f"posted, worst of {len(found)}: {what} (other: the fewest)",
        ours=str(worst.after),
        other=str(worst.fewest),
        ratio=f"{worst.ratio:.3g}",
        wanted=f"<= {LIMIT}",
        met=worst.ratio <= LIMIT,
    )
    total = sum(each.after for each in found), sum(each.fewest for each in found)
    yield Row(
        budget="B6",
        what=f"  worst is {worst.name}",
        ours="",
    )
    yield Row(
        budget="B6",
        what=f"  all {len(found)} together; {over} are over {LIMIT}; "
        f"median ratio {median(each.ratio for each in found):.3g}",
        ours=str(total[0]),
        other=str(total[1]),
        ratio=f"{total[0] / total[1]:.3g}",
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
    known = list(cases(options))
    chosen = [known[at] for at in REAL if at < len(known)]
    equal = 0
    for work in chosen:
        ours, theirs = _through(NixlRank, work)
        equal += ours == theirs
    yield Row(
        budget="B6",
        what=f"{what}: cases",
        ours=f"{equal} of {len(chosen)}",
        wanted="all",
        met=equal == len(chosen),
    )


def _through(rank_class: Any, work: works.Work) -> tuple[int, int]:  # noqa: ANN401
    """Return what our rule counts for *work*, and what NIXL posted."""
    producer, consumer = work.engines()
    plan = plan_transfer(producer, consumer)
    target = consumer.parallel.ranks[0]
    [source, *_] = plan.sources(target)
    theirs, held = allocate(producer, source, work.num_blocks)
    ours, own = allocate(consumer, target, work.num_blocks)
    table = build_table(plan, theirs, ours)
    ids = table.select(work.request())
    with rank_class() as far, rank_class(polled=True, telemetry=True) as near:
        far.register(theirs.memory, owner=held)
        near.register(ours.memory, owner=own)
        peer = near.connect(far.metadata())
        local = near.prepare(table.consumer_rows)
        remote = near.prepare(table.producer_rows, peer=peer)
        transfer = near.read(local, ids[1], remote, ids[0], request="bench", timeout=60)
        transfer.wait()
        return posted(table, ids), transfer.posted
