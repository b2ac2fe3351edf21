"""B17: counts and checks of a large model and a long request, which list few descriptors.

Invariant: the peak of memory is that of Python and numpy, without the caches' descriptions. It is
measured in a run of its own, because measuring it slows Python down.
"""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable, Iterator

import attrs
import works
from timing import Options, Row, readable

import kvspec
from kvspec import DescriptorTable, RankCache, RankId, TransferPlan, TransferRequest

SECONDS, BYTES = 2.0, 500 << 20
# Llama 3.1 70B, 128,000 tokens in random blocks. With tokens outermost, each token is a run.
LONG = works.Work(
    name="70B",
    layers=80,
    spec=works.heads(8, 16),
    tp_sizes=(8, 8),
    tokens=128_000,
    layouts=("LKBNHC", "LKBHNC"),
)
TALL = attrs.evolve(
    LONG, name="10,000 layers, 1,000 tokens", layers=10_000, tp_sizes=(1, 1), tokens=1_000
)
# The work, and the page formats of both sides.
WORKS = (
    (LONG, ("plain", "plain")),
    (attrs.evolve(LONG, layouts=("LBKHNC", "LBNHC")), ("keys-transposed", "plain")),
    (attrs.evolve(LONG, layouts=("LBNHC", "LBKHNC")), ("plain", "x-packed")),
    (attrs.evolve(LONG, tp_sizes=(8, 4)), ("plain", "plain")),
    (attrs.evolve(LONG, tp_sizes=(8, 4), layouts=("LKBNHC", "BLHNC")), ("plain", "plain")),
    (attrs.evolve(LONG, tp_sizes=(8, 4), layouts=("LHNBC", "LKBNHC")), ("plain", "plain")),
    (TALL, ("plain", "plain")),
)


@attrs.frozen
class _Case:
    """A plan with the caches of all ranks, a request, and the table of one pair of ranks."""

    plan: TransferPlan
    sides: tuple[dict[RankId, RankCache], dict[RankId, RankCache]]
    request: TransferRequest
    table: DescriptorTable

    @staticmethod
    def of(work: works.Work, page_formats: tuple[str, str]) -> _Case:
        engines = [
            attrs.evolve(
                engine,
                groups=[
                    attrs.evolve(group, spec=attrs.evolve(group.spec, page_format=page_format))
                    for group in engine.groups
                ],
            )
            for engine, page_format in zip(work.engines(), page_formats, strict=True)
        ]
        plan = kvspec.plan_transfer(*engines)
        producers, consumers = (
            dict(works.caches(engine, pool, side))
            for side, (engine, pool) in enumerate(zip(engines, work.pools, strict=True))
        )
        target = plan.consumer.parallel.ranks[0]
        source = plan.sources(target)[0]
        table = kvspec.build_table(plan, producers[source], consumers[target])
        return _Case(plan, (producers, consumers), work.request(), table)

    def calls(self) -> dict[str, Callable[[], object]]:
        """Return the calls by name."""
        plan, request, table = self.plan, self.request, self.table
        return {
            "traffic": lambda: kvspec.traffic(plan, request.num_tokens),
            "explain": lambda: kvspec.explain(table, request=works.afresh(request)),
            "unwritten_ranges": lambda: table.unwritten_ranges(works.afresh(request)),
            "verify": lambda: kvspec.verify(plan, *self.sides, works.afresh(request)),
        }


def b17(options: Options) -> Iterator[Row]:
    """Time each call once, and measure its memory in a second call."""
    for work, formats in WORKS[:1] if options.quick else WORKS:
        sides = zip(work.layouts, formats, strict=True)
        layouts = " -> ".join(f"{layout} {page_format}" for layout, page_format in sides)
        sizes = "TP {} -> {}".format(*work.tp_sizes)
        for name, call in _Case.of(work, formats).calls().items():
            started = time.process_time()
            call()
            seconds = time.process_time() - started
            tracemalloc.start()
            call()
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            yield Row(
                budget="B17",
                what=f"{name}, {work.name}, {sizes}, {layouts}",
                ours=f"{readable(seconds)}, {peak >> 20} MiB",
                required=f"{SECONDS:.0f} s, {BYTES >> 20} MiB",
                met=seconds <= SECONDS and peak <= BYTES,
            )
