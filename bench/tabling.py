"""B14: tables of large blocks and of groups of states, and the cost of caches.

Invariant: the time and the number of rows do not grow with the block size, because a table has rows
of whole tiles only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import attrs
import works
from planning import first_ranks
from requesting import budgeted
from timing import Options, Row, cpu, interleaved, readable

import kvspec
from kvspec import DescriptorTable, EngineSpec, ParallelConfig, models
from kvspec.models import catalogue

# CPU seconds for one table of up to 80 layers.
LIMIT = 8e-3
HYBRID = "Nemotron-H-8B"
# Tokens of a block whose page is as large as a state. An engine may choose it for a hybrid model.
HYBRID_BLOCK = 1_056
# Tokens of a block that is as long as a prompt. 65,521 is a prime.
VERY_LONG = (65_521, 1 << 20)
ONE_TOKEN = works.Work(
    name="128 tokens a block, rows first, TP 2 -> 1",
    layers=1,
    spec=works.heads(8, 128),
    tp_sizes=(2, 1),
    tokens=129,
    layouts=("LKBNHC", "LKBNHC"),
)


def b14(options: Options) -> Iterator[Row]:
    """Time tables of large blocks, and count their rows."""
    spec = works.heads(8, 16)
    base = attrs.evolve(works.W1, tokens=4_096)
    small = _table(base)
    rows = len(small().producer_rows)
    for size in (16, 64, 128, 256):
        make = _table(attrs.evolve(base, spec=attrs.evolve(spec, block_size=size)))
        ours, of_16 = interleaved(options.times(16), cpu(make), cpu(small))
        yield budgeted("B14", f"build_table, 80 layers, TP 8 -> 4, blocks of {size}", ours, LIMIT)
        yield _twice("  its time; other: blocks of 16, warm caches", ours, of_16)
        count = len(make().producer_rows)
        yield Row(
            budget="B14",
            what="  its rows; other: of blocks of 16",
            ours=f"{count:,}",
            other=f"{rows:,}",
            ratio=f"{count / rows:.2f}",
            required="<= 3",
            met=count <= 3 * rows,
        )
    for size in VERY_LONG:
        work = attrs.evolve(base, spec=attrs.evolve(spec, block_size=size), tokens=2 * size)
        for layouts in (("LBHNC", "LBHNC"), ("LBKNHC", "LBKNHC")):
            make = _table(attrs.evolve(work, layouts=layouts))
            ours, of_16 = interleaved(options.times(16), cpu(make), cpu(small))
            what = f"build_table, {layouts[0]}, blocks of {size:,}; other: {base.layouts[0]}, of 16"
            yield _twice(what, ours, of_16)
    yield from _formats()
    yield from _hybrid(options)
    yield from _last_block()
    yield from _caches(options)


def _twice(what: str, ours: float, other: float) -> Row:
    return Row(
        budget="B14",
        what=what,
        ours=readable(ours),
        other=readable(other),
        ratio=f"{ours / other:.2f}",
        required="<= 2",
        met=ours <= 2 * other,
    )


def _formats() -> Iterator[Row]:
    """Yield the bytes of the tables of equal engines, in pools of 32,000 tokens of Llama 3.1 8B."""
    for page_format, block in (("x-packed", 16), ("keys-transposed", 128)):
        spec = attrs.evolve(works.heads(8, block), page_format=page_format)
        work = works.Work(
            name=page_format,
            layers=32,
            spec=spec,
            tp_sizes=(1, 1),
            tokens=32_000,
            layouts=("LBKHNC", "LBKHNC"),
        )
        table = _table(work)()
        pool = sum(memory.length for memory in table.producer.memory)
        size = table.producer_rows.nbytes
        yield Row(
            budget="B14",
            what=f"{page_format}, blocks of {block}: bytes of the rows; other: of the pool",
            ours=f"{size:,}",
            other=f"{pool:,}",
            ratio=f"{size / pool:.2g}",
            required="<= 0.01",
            met=size <= pool / 100,
        )


def _hybrid(options: Options) -> Iterator[Row]:
    groups = models.from_config(catalogue.config(HYBRID), block_size=HYBRID_BLOCK)
    producer, consumer = (
        EngineSpec(groups=groups, parallel=ParallelConfig(tp_size=size), layout="LBHNC")
        for size in (8, 4)
    )
    make = _between(producer, consumer, (64, 64))
    (ours,) = interleaved(options.times(16), cpu(make))
    what = f"build_table, {HYBRID}, TP 8 -> 4, blocks of {HYBRID_BLOCK:,}"
    yield budgeted("B14", what, ours, LIMIT)


def _last_block() -> Iterator[Row]:
    moved = _table(ONE_TOKEN)().descriptors(attrs.evolve(ONE_TOKEN, cached=128).request())
    yield Row(
        budget="B14",
        what="one token of a last block of 128, rows first, TP 2 -> 1: descriptors, bytes",
        ours=f"{len(moved)}, {int(moved[:, 2].sum()):,}",
        required="2, 2,048",
        met=(len(moved), int(moved[:, 2].sum())) == (2, 2048),
    )


def _caches(options: Options) -> Iterator[Row]:
    try:
        import torch  # noqa: PLC0415 - torch is optional
    except ImportError:
        yield Row(budget="B14", what="RankCache.from_tensors", ours="", other="no torch")
        return
    engine, _ = attrs.evolve(works.W1, layouts=("LKBHNC", "LKBHNC")).engines()
    rank = engine.parallel.ranks[0]
    tensors = {
        layer: torch.empty((2, 4, 1, 16, 128), dtype=torch.bfloat16)
        for layer in engine.groups[0].layers
    }
    ours, other = interleaved(
        options.times(16),
        cpu(lambda: kvspec.RankCache.from_tensors(engine, rank, tensors, "KBHNC")),
        cpu(lambda: kvspec.plan_memory(engine, rank, 4, 1 << 40)),
    )
    yield Row(
        budget="B14",
        what="RankCache.from_tensors, 80 layers; other: plan_memory, which looks at no tensor",
        ours=readable(ours),
        other=readable(other),
        ratio=f"{ours / other:.2f}",
    )


def _table(work: works.Work) -> Callable[[], DescriptorTable]:
    return _between(*work.engines(), work.pools)


def _between(
    producer: EngineSpec, consumer: EngineSpec, pools: tuple[int, int]
) -> Callable[[], DescriptorTable]:
    plan = kvspec.plan_transfer(producer, consumer)
    ranks = first_ranks(plan)
    source = kvspec.plan_memory(producer, ranks[0], pools[0], 1 << 40)
    target = kvspec.plan_memory(consumer, ranks[1], pools[1], 2 << 40)
    return lambda: kvspec.build_table(plan, source, target)
