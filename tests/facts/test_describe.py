"""What a table says of one descriptor: read back, it is what the request wants."""

from __future__ import annotations

import re

import attrs
import builders
import pytest
from builders import engine

import kvspec
from kvspec import RankId
from kvspec.nixl import Costs, explain_cost

WORDS = re.compile(r"  (\S+) (\S+): units? (\S+), consumer block (\d+), tokens? (.+)")


def heads(
    layout: str, block_size: int, kernel: int | None = None, **sizes: int
) -> kvspec.EngineSpec:
    """Return an engine of two layers of four heads, with a *kernel*'s own blocks."""
    spec = builders.gqa(block_size=block_size, head_size=8)
    group = builders.group(spec, "layers.0", "layers.1", kernel_block_size=kernel)
    return engine(group, layout=layout, **sizes)


def numbers(text: str) -> list[int]:
    """Return the numbers that ``4..6``, ``3`` or ``1, 5`` means."""
    first, _, last = text.partition("..")
    return (
        list(range(int(first), int(last) + 1)) if last else [int(each) for each in text.split(",")]
    )


PAIRS = [
    (heads("LBNHC", 4, tp_size=8), heads("LBHNC", 6, tp_size=2)),
    (heads("BLHNC", 4, tp_size=2), heads("LBNHC", 4, tp_size=2)),
    (heads("LKBNHC", 4, tp_size=1, pcp_size=2, interleave_size=2), heads("BLHNC", 4, pp_size=2)),
    (heads("LBNHC", 4, tp_size=2), heads("LBHNC", 6, 2)),
]


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_every_wanted_token_is_told_once(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> None:
    """Over all ids, each layer, part, head and uncached token is named, in the right block."""
    plan = kvspec.plan_transfer(producer, consumer)
    group = consumer.groups[0]
    size, small = group.spec.block_size, group.memory_block_size
    blocks = {
        "producer_blocks": {"g": list(range(20))}, "consumer_blocks": {"g": [9, 3, 4, 0, 7, 1, 2]}
    }  # fmt: skip
    request = kvspec.TransferRequest(request_id="r", num_tokens=23, cached_tokens=5, **blocks)
    told = []
    for rank in consumer.parallel.ranks:
        theirs, _ = kvspec.allocate(consumer, rank, 10)
        for source in plan.sources(rank):
            ours, _ = kvspec.allocate(producer, source, 20)
            table = kvspec.build_table(plan, ours, theirs)
            for each in table.select(request)[1].tolist():
                for line in kvspec.explain(table, consumer_id=each, request=request).splitlines():
                    found = WORDS.fullmatch(line)
                    if found:
                        layer, part, units, block, tokens = found.groups()
                        for token in numbers(tokens):
                            logical = blocks["consumer_blocks"]["g"][token // size]
                            assert (
                                logical * group.kernel_blocks_per_block + token % size // small
                                == int(block)
                            )
                            told += [(layer, part, u, token) for u in numbers(units)]
    live = [each for each in told if 5 <= each[3] < 23]
    wanted = {
        (layer, part, head, token)
        for layer in ("layers.0", "layers.1")
        for part in "kv"
        for head in range(4)
        for token in range(5, 23)
    }
    assert wanted == set(live)
    assert len(wanted) == len(live)
    assert all(each[3] >= 5 for each in told)


def test_one_descriptor_in_words() -> None:
    """Bytes, both places, what they hold, and why this replica: worked out by hand."""
    producer, consumer = PAIRS[0]
    plan = kvspec.plan_transfer(producer, consumer)
    ours, _ = kvspec.allocate(producer, RankId(tp=2), 4)
    theirs, _ = kvspec.allocate(consumer, RankId(tp=0), 4)
    table = kvspec.build_table(plan, ours, theirs)
    request = builders.request(4, [3], [2])
    first = int(table.select(request)[1][0])
    # Producer tp2 has head 1 alone, its block 3 begins 3 x 4 tokens x 32 bytes on; the consumer's
    # head 1 follows 6 tokens of head 0 in block 2 of 2 heads. Both hold 4 tokens in one chunk.
    source = ours.region("layers.0", "k").base + 3 * 4 * 32
    target = theirs.region("layers.0", "k").base + (2 * 2 + 1) * 6 * 32
    head = f"id {first}: 128 bytes, producer tp2 at {source:#x} (block 3)"
    wanted = [
        f"{head} -> consumer tp0 at {target:#x}",
        "  layers.0 k: unit 1, consumer block 2, tokens 0..3",
        "  layers.0 v: unit 1, consumer block 2, tokens 0..3",
        "  producer ranks tp2, tp3 hold unit 1 of k+v: the policy 'spread' chose tp2",
    ]
    assert "\n".join(wanted) == kvspec.explain(table, consumer_id=first, request=request)


def test_who_alone_holds_is_said() -> None:
    """A producer without replicas is not chosen."""
    producer, consumer = PAIRS[1]
    plan = kvspec.plan_transfer(producer, consumer)
    sides = (kvspec.plan_memory(each, RankId(tp=1), 4) for each in (producer, consumer))
    table = kvspec.build_table(plan, *sides)
    assert "only producer tp1 holds units 2..3 of k+v" in kvspec.explain(table, consumer_id=0)


@pytest.mark.parametrize("layouts", [("BLNHC", "LBNHC"), ("LBNHC", "LNBHC"), ("NBLHC", "BLNHC")])
def test_a_descriptor_that_runs_over_blocks(layouts: tuple[str, str]) -> None:
    """Every live byte is told by the descriptors that select picks, block by block."""
    spec = builders.gqa(1, block_size=64, head_size=8)
    producer, consumer = (
        engine(each, layers=("l.0", "l.1"), layout=layout)
        for each, layout in zip((spec, attrs.evolve(spec, block_size=16)), layouts, strict=True)
    )
    caches = (
        kvspec.plan_memory(producer, RankId(), 4, 10**6),
        kvspec.plan_memory(consumer, RankId(), 8),
    )
    table = kvspec.build_table(kvspec.plan_transfer(producer, consumer), *caches)
    request = builders.request(40, [2], [4, 5, 3])
    told: list[tuple[str, str, int, int]] = []
    for each in table.select(request)[1].tolist():
        for line in kvspec.explain(table, consumer_id=each, request=request).splitlines():
            found = WORDS.fullmatch(line)
            if found:
                layer, part, _, block, tokens = found.groups()
                told += [(layer, part, int(block), token) for token in numbers(tokens)]
    wanted = {
        (layer, part, block, 16 * at + token)
        for layer in ("l.0", "l.1")
        for part in "kv"
        for at, block in enumerate((4, 5, 3))
        for token in range(min(16, 40 - 16 * at))
    }
    assert len(wanted) == len(told)
    assert wanted == set(told)


def test_a_table_in_words() -> None:
    """Rows and ids of both sides, and a request's descriptors: worked out by hand."""
    engines = heads("LBNHC", 4), heads("LBNHC", 4, tp_size=1)
    caches = (kvspec.allocate(each, RankId(), 5)[0] for each in engines)
    table = kvspec.build_table(kvspec.plan_transfer(*engines), *caches)
    # A row of blocks and one of tokens for each layer.
    rows = """producer tp0 -> consumer tp0
  producer: 4 rows of 50 descriptors in DRAM
  consumer: 4 rows of 50 descriptors in DRAM"""
    assert rows == kvspec.explain(table)
    blocks = {"producer_blocks": {"g": [1, 2, 3]}, "consumer_blocks": {"g": [2, 3, 4]}}
    request = kvspec.TransferRequest(request_id="r", num_tokens=12, cached_tokens=2, **blocks)
    # Of each layer two tokens of 128 bytes and two blocks of 512, all of it side by side.
    counts = "2,560 bytes in 8 descriptors; NIXL merges them into 4, and 2 is the minimum"
    assert f"{rows}\n  r: {counts}" == kvspec.explain(table, request=request)
    # Two ranges too, of which every run is permuted: that never pays for two descriptors.
    costs = Costs()
    direct, staged = 1e3 * costs.direct(2, 2560), 1e3 * costs.staged(2, 2560, 8, 2560)
    ways = f"directly: {direct:.3g} ms (staged: {staged:.3g} ms, 2 ranges of 2,560 B)"
    told = f"read {ways}\nwritten {ways}\nby {costs.origin}: `kvspec calibrate` was not run here"
    assert told == explain_cost(table, request)


def test_a_table_says_when_the_area_is_cheaper() -> None:
    """Heads first to rows first: the producer has whole blocks, the consumer a head of a token."""
    engines = heads("LBHNC", 16), heads("LBNHC", 16)
    caches = (kvspec.allocate(each, RankId(), 70)[0] for each in engines)
    table = kvspec.build_table(kvspec.plan_transfer(*engines), *caches)
    blocks = {"producer_blocks": {"g": range(64)}, "consumer_blocks": {"g": range(1, 65)}}
    request = kvspec.TransferRequest(request_id="r", num_tokens=1024, **blocks)
    read, written, _ = explain_cost(table, request).splitlines()
    for line, way in ((read, "read"), (written, "written")):
        assert line.startswith(f"{way} staged: ")
        assert ", 2 ranges of 256 KiB (directly: " in line


@pytest.mark.parametrize("wrong", [-1, 10**9, True, "0"])
def test_an_id_that_is_none_is_refused(wrong: object) -> None:
    """The ids there are, are told."""
    producer, consumer = PAIRS[1]
    plan = kvspec.plan_transfer(producer, consumer)
    caches = (kvspec.allocate(each, RankId(), 4)[0] for each in (producer, consumer))
    table = kvspec.build_table(plan, *caches)
    with pytest.raises(kvspec.SpecError, match=r"consumer_id=.*: expected an id from 0 to \d+"):
        kvspec.explain(table, consumer_id=wrong)  # type: ignore[arg-type]
