"""B9 and B10: the exhaustive proof, and how cost grows with a work."""

from __future__ import annotations

import os
from collections.abc import Iterator

import attrs
import works
from planning import first_pair, planned, tables
from timing import Options, Row, clock, interleaved, told

from kvspec.verify import prove


def b9(options: Options) -> Iterator[Row]:
    """Prove every TP pair, on every core."""
    max_tp, max_heads = (16, 32) if options.quick else (64, 128)
    found = []
    seconds = clock(lambda: found.append(prove(max_tp, max_heads)))()
    proof = found[0]
    cores = os.cpu_count() or 1
    yield Row(
        budget="B9",
        what=f"proof, TP <= {max_tp}, heads <= {max_heads}: {proof.triples} triples, "
        f"{proof.rank_cases} rank cases, {len(proof.faults)} faults, {cores} cores",
        ours=f"{told(seconds)}, {told(seconds * cores / proof.rank_cases)} a case and core",
        wanted="" if options.quick else "< 120 s, exact",
        met=None if options.quick else seconds < 120 and proof.exact,
    )


def b10(options: Options) -> Iterator[Row]:
    """Growth: what must not depend on tokens does not, what may is linear."""
    short = attrs.evolve(works.W1, tokens=works.W1.tokens // 16)
    repetitions = options.times(24)
    full, less = interleaved(repetitions, lambda: planned(works.W1), lambda: planned(short))
    yield _growth("plan_transfer, W1 (other: 1/16 of the tokens)", full, less, limit=1.25)
    made = [(tables(work)[0], work.request()) for work in (works.W1, short)]
    counts = [len(table.select(request)[0]) for table, request in made]
    full, less = interleaved(repetitions, *(clock(lambda m=m: m[0].select(m[1])) for m in made))
    per_id = [seconds / count for seconds, count in zip((full, less), counts, strict=True)]
    yield _growth("select, W1, each descriptor (other: 1/16 of the tokens)", *per_id, limit=2)
    halved = [attrs.evolve(works.W1, layers=n) for n in (80, 40)]
    full, less = interleaved(repetitions, *(first_pair(work, work.num_blocks) for work in halved))
    yield _growth("build_table, 80 layers (other: 40 layers)", full, less, limit=2.5)


def _growth(what: str, full: float, less: float, limit: float) -> Row:
    return Row(
        budget="B10",
        what=what,
        ours=told(full),
        other=told(less),
        ratio=f"{full / less:.3g}",
        wanted=f"ratio <= {limit}",
        met=full <= limit * less,
    )
