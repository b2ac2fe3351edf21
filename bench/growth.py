"""B9 and B10: the exhaustive proof, and how the cost grows with a work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import works
from planning import OTHERS, first_pair, first_table, planned
from timing import Options, Row, clock, interleaved, readable

from kvspec import plan_transfer
from kvspec.check import prove


def b9(options: Options) -> Iterator[Row]:
    """Prove every TP pair, on every core."""
    max_tp, max_heads = (16, 32) if options.quick else (64, 128)
    proofs = []
    seconds = clock(lambda: proofs.append(prove(max_tp, max_heads)))()
    proof = proofs[0]
    cores = os.cpu_count() or 1
    yield Row(
        budget="B9",
        what=f"proof, TP <= {max_tp}, heads <= {max_heads}: {proof.triples} triples, "
        f"{proof.rank_cases} rank cases, {len(proof.faults)} faults, {cores} cores",
        ours=f"{readable(seconds)}, {readable(seconds * cores / proof.rank_cases)} a case and core",
        # 120 s on 2 cores are 14 us a rank case. A trial with bare integers took 41 s.
        required="" if options.quick else "< 120 s, exact",
        met=None if options.quick else seconds < 120 and proof.exact,
    )


def b10(options: Options) -> Iterator[Row]:
    """Yield rows of growth: constant in tokens and blocks, or linear where it must grow."""
    repetitions = options.times(24)
    for work in (works.W1, *OTHERS):
        short = attrs.evolve(work, tokens=work.tokens // 16)
        full, less = interleaved(repetitions, lambda w=work: planned(w), lambda w=short: planned(w))
        yield _growth(f"plan_transfer, {work.name} (other: 1/16 of the tokens)", full, less, 1.25)
        full, less = interleaved(repetitions, first_pair(work), first_pair(short))
        what = "  build_table (other: 1/16 of the tokens, and of the blocks)"
        yield _growth(what, full, less, limit=1.25)
        pairs = [(first_table(size), size.request()) for size in (work, short)]
        counts = [len(table.select(request)) for table, request in pairs]
        taken = interleaved(
            repetitions, *(clock(lambda m=m: m[0].select(works.afresh(m[1]))) for m in pairs)
        )
        per_id = [seconds / count for seconds, count in zip(taken, counts, strict=True)]
        what = "  select, each descriptor (other: 1/16 of the tokens)"
        yield _growth(what, *per_id, limit=2)
        half = attrs.evolve(work, layers=work.layers // 2)
        full, less = interleaved(repetitions, first_pair(work), first_pair(half))
        yield _growth("  build_table (other: half the layers)", full, less, limit=2.5)
    yield from _edges(options)


def _edges(options: Options) -> Iterator[Row]:
    """Compare plans of many and of few edges by the cost of one layer of one edge."""
    systems = [works.many_ranks(scale) for scale in (4, 2)]
    taken = interleaved(1 if options.quick else 3, *(lambda w=w: planned(w) for w in systems))
    sizes = []
    for work in systems:
        plan = plan_transfer(*work.engines())
        sizes.append(sum(len(edge.layers) for edge in plan.edges))
    what = (
        f"plan_transfer, {systems[0].name}, each of {sizes[0]} edges x layers (other: {sizes[1]})"
    )
    full, less = (seconds / size for seconds, size in zip(taken, sizes, strict=True))
    yield _growth(what, full, less, limit=2)


def _growth(what: str, full: float, less: float, limit: float) -> Row:
    return Row(
        budget="B10",
        what=what,
        ours=readable(full),
        other=readable(less),
        ratio=f"{full / less:.3g}",
        required=f"ratio <= {limit}",
        met=full <= limit * less,
    )
