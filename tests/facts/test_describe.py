"""Test the texts of `explain` about descriptor tables.

The tests parse names and numbers from the texts, and compare them with the request.
"""

from __future__ import annotations

import re

import attrs
import builders
import pytest
from builders import engine
from refused import refusal

import kvspec
from kvspec import RankId

# A line about one layer and part: the units, the consumer's block and the tokens.
CONTENT_LINE = re.compile(r"  (\S+) ([kv]):\D+(\d\S*),\D+(\d+),\D+(\d.*)")


def heads(
    layout: str, block_size: int, kernel: int | None = None, **sizes: int
) -> kvspec.EngineSpec:
    """Return an engine of two layers of four heads, with kernel blocks of *kernel* tokens."""
    spec = builders.gqa(block_size=block_size, head_size=8)
    group = builders.group(spec, "layers.0", "layers.1", kernel_block_size=kernel)
    return engine(group, layout=layout, **sizes)


def numbers(text: str) -> list[int]:
    """Return the numbers that ``4..6``, ``3`` or ``1, 5`` means."""
    first, _, last = text.partition("..")
    if last:
        return list(range(int(first), int(last) + 1))
    return [int(number) for number in text.split(",")]


def contents_of(
    table: kvspec.DescriptorTable, request: kvspec.TransferRequest
) -> list[tuple[str, str, int, int, int]]:
    """Return (layer, part, unit, consumer block, token) of all descriptors of *request*."""
    contents = []
    for consumer_id in table.select(request).consumer_ids.tolist():
        text = kvspec.explain(table, consumer_id=consumer_id, request=request)
        for line in text.splitlines():
            if match := CONTENT_LINE.fullmatch(line):
                layer, part, units, block, tokens = match.groups()
                contents += [
                    (layer, part, unit, int(block), token)
                    for token in numbers(tokens)
                    for unit in numbers(units)
                ]
    return contents


def missing_facts(text: str, *facts: str) -> list[str]:
    """Return the *facts* that *text* does not contain in this order."""
    missing = []
    for fact in facts:
        _, separator, rest = text.partition(fact)
        if separator:
            text = rest
        else:
            missing.append(fact)
    return missing


PAIRS = [
    (heads("LBNHC", 4, tp_size=8), heads("LBHNC", 6, tp_size=2)),
    (heads("BLHNC", 4, tp_size=2), heads("LBNHC", 4, tp_size=2)),
    (heads("LKBNHC", 4, tp_size=1, pcp_size=2, interleave_size=2), heads("BLHNC", 4, pp_size=2)),
    (heads("LBNHC", 4, tp_size=2), heads("LBHNC", 6, 2)),
]


@pytest.mark.parametrize(("producer", "consumer"), PAIRS)
def test_explain_names_every_wanted_token_once(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> None:
    """The texts of all ids name each layer, part, head and uncached token, in the right block.

    The request begins and ends with a block of both sides, because ends have no ids.
    """
    plan = kvspec.plan_transfer(producer, consumer)
    group = consumer.groups[0]
    size, kernel_size = group.spec.block_size, group.memory_block_size
    ids = [9, 3, 4, 0, 7, 1, 2]
    request = builders.request(24, list(range(20)), ids, cached_tokens=12)
    contents = []
    for rank in consumer.parallel.ranks:
        consumer_cache, _ = kvspec.allocate(consumer, rank, 10)
        for source in plan.sources(rank):
            producer_cache, _ = kvspec.allocate(producer, source, 20)
            table = kvspec.build_table(plan, producer_cache, consumer_cache)
            contents += contents_of(table, request)
    for _, _, _, block, token in contents:
        first = ids[token // size] * group.kernel_blocks_per_block
        assert first + token % size // kernel_size == block
    live = [
        (layer, part, unit, token) for layer, part, unit, _, token in contents if 12 <= token < 24
    ]
    expected = {
        (layer, part, head, token)
        for layer in ("layers.0", "layers.1")
        for part in "kv"
        for head in range(4)
        for token in range(12, 24)
    }
    assert expected == set(live)
    assert len(expected) == len(live)
    assert all(token >= 12 for *_, token in contents)


def test_explain_describes_one_descriptor() -> None:
    """The text has the bytes, both places, the contents and the reason for this replica."""
    producer, consumer = PAIRS[0]
    plan = kvspec.plan_transfer(producer, consumer)
    producer_cache, _ = kvspec.allocate(producer, RankId(tp=2), 4)
    consumer_cache, _ = kvspec.allocate(consumer, RankId(tp=0), 4)
    table = kvspec.build_table(plan, producer_cache, consumer_cache)
    request = builders.request(4, [3], [2])
    first = int(table.select(request).consumer_ids[0])
    # Producer tp2 has only head 1, and each of its blocks has 4 tokens of 32 bytes. On the consumer
    # a block has 2 heads, and head 1 follows the 6 tokens of head 0. Blocks of 4 and of 6 tokens
    # have tiles of 2: 64 bytes of head 1.
    source = producer_cache.region("layers.0", "k").base + 3 * 4 * 32
    target = consumer_cache.region("layers.0", "k").base + (2 * 2 + 1) * 6 * 32
    text = kvspec.explain(table, consumer_id=first, request=request)
    place = (str(first), "64 bytes", "tp2", f"{source:#x}", "block 3", "tp0", f"{target:#x}")
    contents = [
        fact for part in "kv" for fact in (f"layers.0 {part}:", "unit 1", "block 2", "0..1")
    ]
    assert [] == missing_facts(text, *place, *contents, "tp2", "tp3", "unit 1", "'spread'", "tp2")
    assert 4 == len(text.splitlines())


def test_explain_names_only_owner_of_units() -> None:
    """Producer tp1 has no replica, so no policy is named."""
    producer, consumer = PAIRS[1]
    plan = kvspec.plan_transfer(producer, consumer)
    caches = (kvspec.plan_memory(side, RankId(tp=1), 4) for side in (producer, consumer))
    table = kvspec.build_table(plan, *caches)
    text = kvspec.explain(table, consumer_id=0)
    assert [] == missing_facts(text, "only", "tp1", "2..3", "k+v")
    assert "spread" not in text


@pytest.mark.parametrize("layouts", [("BLNHC", "LBNHC"), ("LBNHC", "LNBHC"), ("NBLHC", "BLNHC")])
def test_explain_names_all_blocks_of_long_descriptors(layouts: tuple[str, str]) -> None:
    """One descriptor covers several of the consumer's blocks."""
    spec = builders.gqa(1, block_size=64, head_size=8)
    producer, consumer = (
        engine(side_spec, layers=("l.0", "l.1"), layout=layout)
        for side_spec, layout in zip(
            (spec, attrs.evolve(spec, block_size=16)), layouts, strict=True
        )
    )
    caches = (
        kvspec.plan_memory(producer, RankId(), 4, 10**6),
        kvspec.plan_memory(consumer, RankId(), 8),
    )
    table = kvspec.build_table(kvspec.plan_transfer(producer, consumer), *caches)
    contents = contents_of(table, builders.request(48, [2], [4, 5, 3]))
    expected = {
        (layer, part, 0, block, 16 * at + token)
        for layer in ("l.0", "l.1")
        for part in "kv"
        for at, block in enumerate((4, 5, 3))
        for token in range(16)
    }
    assert len(expected) == len(contents)
    assert expected == set(contents)


def test_explain_counts_rows_and_descriptors_of_table() -> None:
    """Both sides have a row of blocks for each of two layers."""
    engines = heads("LBNHC", 4), heads("LBNHC", 4, tp_size=1)
    caches = (kvspec.allocate(side, RankId(), 5)[0] for side in engines)
    table = kvspec.build_table(kvspec.plan_transfer(*engines), *caches)
    rows = (
        "tp0", "tp0", "\n", "producer", "2 rows", "10", "DRAM", "\n", "consumer", "2 rows", "10",
        "DRAM",
    )  # fmt: skip
    assert [] == missing_facts(kvspec.explain(table), *rows)
    request = builders.request(12, [1, 2, 3], [2, 3, 4], cached_tokens=2)
    # Each layer has an end of two tokens of 128 bytes, and two blocks of 512, all of them adjacent.
    text = kvspec.explain(table, request=request)
    assert [] == missing_facts(text, *rows, "\n", "r:")
    assert ["2,560", "6", "4", "2"] == re.findall(r"[\d,]*\d", text.splitlines()[-1])


@pytest.mark.parametrize("wrong", [-1, 10**9, True, "0"])
def test_explain_rejects_unknown_id(wrong: object) -> None:
    """The id must be one of the table."""
    producer, consumer = PAIRS[1]
    plan = kvspec.plan_transfer(producer, consumer)
    caches = (kvspec.allocate(side, RankId(), 4)[0] for side in (producer, consumer))
    table = kvspec.build_table(plan, *caches)
    error = refusal(lambda: kvspec.explain(table, consumer_id=wrong))  # type: ignore[arg-type]
    assert ("consumer_id", wrong) == (error.field, error.value)


def test_explain_rejects_other_subjects() -> None:
    """Only plans and tables can be explained."""
    with pytest.raises(kvspec.SpecError, match="TransferPlan") as caught:
        kvspec.explain("x")  # type: ignore[arg-type]
    assert ("subject", "x") == (caught.value.field, caught.value.value)
