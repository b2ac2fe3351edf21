"""Test that `verify` finds every planted fault, and that `prove` finds planted bugs.

Two layers of four heads move from TP 4 to TP 2. Head h is on producer rank h only, so a test can
compute the right descriptor of every content without the library.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from faults import faults_of_proof, rounded_up_sharding_in_proof, unit_ranges_in_proof
from refused import refusal

import kvspec
from kvspec import BlockTable, RankId
from kvspec.check import proof, prove
from kvspec.check.verify import verify
from kvspec.ownership.replicas import ReplicaChooser, ReplicaPolicy, tp_chooser
from kvspec.ownership.sharding import Sharding
from kvspec.ownership.slices import UnitRange, consumer_unit_ranges
from kvspec.ownership.stripes import WHOLE

LAYERS = ("a", "b")
HEADS, ROWS, CONTENT = 4, 4, 16
GQA: dict[str, Any] = {
    "block_size": ROWS, "total_num_kv_heads": HEADS, "head_size": 8, "dtype": "bfloat16",
}  # fmt: skip
PRODUCER_BLOCKS, CONSUMER_BLOCKS = (5, 1, 3), (2, 6, 0)
NUM_CACHED, NUM_TOKENS = 5, 11
Descriptors = dict[tuple[RankId, RankId], np.ndarray[Any, np.dtype[np.uint64]]]


def engine(tp: int, layout: str, spec: kvspec.LayerSpec | None = None) -> kvspec.EngineSpec:
    """Return an engine of two layers."""
    spec = spec or kvspec.FullAttentionSpec(**GQA)
    return builders.engine(spec, layers=LAYERS, tp=tp, layout=layout)


PLAN = kvspec.plan_transfer(engine(4, "LBHNC"), engine(2, "LBNHC"))
# The storage stays referenced here, because the addresses of the caches point into it.
ALLOCATED = [
    {rank: kvspec.allocate(side, rank, 8) for rank in side.parallel.ranks}
    for side in (PLAN.producer, PLAN.consumer)
]
PRODUCERS, CONSUMERS = ({rank: cache for rank, (cache, _) in side.items()} for side in ALLOCATED)
REQUEST = builders.request(NUM_TOKENS, PRODUCER_BLOCKS, CONSUMER_BLOCKS, cached_tokens=NUM_CACHED)


@attrs.frozen
class Row:
    """The right descriptor of one content: the content, the two ranks and both addresses."""

    layer: str
    part: str
    head: int
    token: int
    pair: tuple[RankId, RankId]
    source: int
    target: int
    length: int = CONTENT


def consumer_of(head: int) -> RankId:
    """Return the consumer rank that has *head*: two heads each."""
    return RankId(tp=head // 2)


def source_address(layer: str, part: str, head: int, token: int) -> int:
    """Return the address of one content on the producer rank of *head*."""
    region = PRODUCERS[RankId(tp=head)].region(layer, part)
    return region.address(PRODUCER_BLOCKS[token // ROWS], 0, token % ROWS)


def target_address(
    layer: str, part: str, head: int, token: int, blocks: tuple[int, ...] = CONSUMER_BLOCKS
) -> int:
    """Return the address of one content on the consumer rank of *head*."""
    region = CONSUMERS[consumer_of(head)].region(layer, part)
    return region.address(blocks[token // ROWS], head % 2, token % ROWS)


def right_row(layer: str, part: str, head: int, token: int) -> Row:
    """Return the right descriptor of one content."""
    pair = (RankId(tp=head), consumer_of(head))
    place = (layer, part, head, token)
    return Row(*place, pair, source_address(*place), target_address(*place))


def all_right_rows() -> Iterator[Row]:
    """Yield the right descriptors, one for each content that is live and not cached."""
    for layer in LAYERS:
        for part in "kv":
            for head in range(HEADS):
                for token in range(NUM_CACHED, NUM_TOKENS):
                    yield right_row(layer, part, head, token)


RIGHT_ROWS = tuple(all_right_rows())
FAULTY_CONTENT = ("b", "v", 2, 6)
"""The layer, part, head and token at which faults are planted."""
GOOD_ROW = right_row(*FAULTY_CONTENT)


def descriptors_of(rows: Any) -> Descriptors:
    """Return *rows* by pair of ranks, as `verify` takes them."""
    by_pair: dict[tuple[RankId, RankId], list[tuple[int, int, int]]] = {
        row.pair: [] for row in RIGHT_ROWS
    }
    for row in rows:
        by_pair.setdefault(row.pair, []).append((row.source, row.target, row.length))
    return {pair: np.array(rows, np.uint64).reshape(-1, 3) for pair, rows in by_pair.items()}


def with_rows(*new_rows: Row, instead_of: Row = GOOD_ROW) -> list[Row]:
    """Return the right rows with *new_rows* instead of one of them."""
    return [row for row in RIGHT_ROWS if row != instead_of] + list(new_rows)


def with_changed(**changed: Any) -> list[Row]:
    """Return the right rows, with fields of the row of `FAULTY_CONTENT` changed."""
    return with_rows(attrs.evolve(GOOD_ROW, **changed))


def first_fault(
    rows: Any, request: kvspec.TransferRequest = REQUEST
) -> kvspec.CounterExample | None:
    """Return the fault that `verify` finds in *rows*."""
    return verify(PLAN, PRODUCERS, CONSUMERS, request, descriptors_of(rows))


def fault_at(kind: Any, head: int = 2, token: int = 6, **changed: Any) -> kvspec.CounterExample:
    """Return the fault of one content of layer b, part v, with fields *changed*."""
    fields: dict[str, Any] = {
        "consumer": consumer_of(head), "layer": "b", "part": "v", "unit": head, "token": token,
        "row": token, "wanted_from": (RankId(tp=head),),
    }  # fmt: skip
    return kvspec.CounterExample(kind=kind, **fields | changed)


def fault_of_block(kind: Any, block: int, **changed: Any) -> kvspec.CounterExample:
    """Return the fault of a byte in unit 0 of a block that the request does not have."""
    fields = {"unit": 0, "token": None, "wanted_from": (), "block": block}
    return fault_at(kind, **fields | changed)


SWAPPED = [right_row("b", "k", 2, 6), GOOD_ROW]
FIRST_MISSING = fault_at("missing", head=0, token=NUM_CACHED, layer="a", part="k")
END = PRODUCERS[RankId(tp=2)].memory[-1].end


def dead_row(**changed: Any) -> Row:
    """Return the descriptor of a token after the end of the request, in its own last blocks."""
    return attrs.evolve(right_row("b", "v", 2, 11), **changed)


def row_of_missing_unit() -> Row:
    """Return head 3's descriptor, read where the rank of head 2 would have a second unit."""
    stride = PRODUCERS[RankId(tp=2)].region("b", "v").unit_stride
    right, of_head_2 = right_row("b", "v", 3, 6), right_row("b", "v", 2, 6)
    return attrs.evolve(right, pair=of_head_2.pair, source=of_head_2.source + stride)


FAULTS: dict[str, tuple[Callable[[], Any], kvspec.CounterExample]] = {
    "missing row": (with_rows, fault_at("missing")),
    "double row": (lambda: [*RIGHT_ROWS, GOOD_ROW], fault_at("double")),
    "wrong head": (
        lambda: with_changed(source=source_address("b", "v", 3, 6)), fault_at("wrong source")),
    "wrong head's rank": (
        lambda: with_changed(source=source_address("b", "v", 3, 6),
                             pair=(RankId(tp=3), RankId(tp=1))), fault_at("wrong source")),
    "right address, wrong rank": (
        lambda: with_changed(pair=(RankId(tp=3), RankId(tp=1))), fault_at("wrong source")),
    "wrong token": (
        lambda: with_changed(source=source_address("b", "v", 2, 7)), fault_at("wrong source")),
    "wrong layer": (
        lambda: with_changed(source=source_address("a", "v", 2, 6)), fault_at("wrong source")),
    "wrong block": (
        lambda: with_changed(source=source_address("b", "v", 2, 10)), fault_at("wrong source")),
    "one byte off": (
        lambda: with_changed(source=GOOD_ROW.source + 1), fault_at("wrong source")),
    "k of v": (
        lambda: with_changed(source=source_address("b", "k", 2, 6)), fault_at("wrong source")),
    "swapped k and v": (
        lambda: [row for row in RIGHT_ROWS if row not in SWAPPED]
        + [attrs.evolve(row, source=other.source)
           for row, other in zip(SWAPPED, SWAPPED[::-1], strict=True)],
        fault_at("wrong source", part="k")),
    "one byte short": (
        lambda: with_changed(length=CONTENT - 1), fault_at("missing", byte=CONTENT - 1)),
    "empty": (lambda: with_changed(length=0), fault_at("missing")),
    "to another token": (
        lambda: with_changed(target=target_address("b", "v", 2, 7)), fault_at("missing")),
    "to a foreign block": (
        lambda: [*RIGHT_ROWS,
                 attrs.evolve(GOOD_ROW, target=target_address("b", "v", 2, 6, (4, 4, 4)))],
        fault_of_block("unwanted", 4, row=2)),
    "to a cached token": (
        lambda: [*RIGHT_ROWS, attrs.evolve(GOOD_ROW, target=target_address("b", "v", 2, 4))],
        fault_at("unwanted", token=4)),
    "to a cached block": (
        lambda: [*RIGHT_ROWS, attrs.evolve(GOOD_ROW, target=target_address("b", "v", 3, 1))],
        fault_at("unwanted", head=3, token=1)),
    "to an address without content": (
        lambda: [*RIGHT_ROWS, attrs.evolve(GOOD_ROW, target=16)],
        kvspec.CounterExample(
            kind="unwanted", consumer=RankId(tp=1), layer="", part="", byte=16)),
    "dead row from another request's block": (
        lambda: [*RIGHT_ROWS,
                 dead_row(source=PRODUCERS[RankId(tp=2)].region("b", "v").address(4, 0, 3))],
        fault_of_block("foreign", 4, row=3, producer=RankId(tp=2))),
    "dead row from beyond the memory": (
        lambda: [*RIGHT_ROWS, dead_row(source=END)],
        kvspec.CounterExample(kind="foreign", consumer=RankId(tp=1), layer="", part="", byte=END,
                              producer=RankId(tp=2))),
    "dead row across the end of the memory": (
        lambda: [*RIGHT_ROWS, dead_row(source=END - 1)],
        fault_of_block("foreign", 7, row=3, byte=CONTENT - 1, producer=RankId(tp=2))),
    "unit after the last one of the source": (
        lambda: with_rows(row_of_missing_unit(), instead_of=right_row("b", "v", 3, 6)),
        fault_at("wrong source", head=3)),
    "no rows": (list, FIRST_MISSING),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "expected"), FAULTS.values(), ids=FAULTS)
def test_verify_finds_planted_fault(
    plant: Callable[[], Any], expected: kvspec.CounterExample
) -> None:
    """All fields of the fault are compared, and its text contains its place."""
    fault = first_fault(plant())
    assert expected == fault
    place = [f"consumer {expected.consumer}"]
    if expected.layer:
        place += [f"layer {expected.layer}", f"part {expected.part}", f"unit {expected.unit}"]
        place += [f"byte {expected.byte}"]
    else:
        place += [f"{expected.byte:#x}"]
    if expected.block is not None:
        place += [f"block {expected.block}", f"row {expected.row}"]
    if expected.token is not None:
        place += [f"token {expected.token}"]
    assert [name for name in place if name not in str(fault)] == []


@pytest.mark.parametrize(
    "place", [("a", "k", 0, 5), ("a", "v", 1, 7), ("b", "k", 3, 10), FAULTY_CONTENT]
)
def test_verify_names_missing_content_anywhere(place: tuple[str, str, int, int]) -> None:
    """The fault names the head of the model, the token and the producer rank."""
    layer, part, head, token = place
    expected = fault_at("missing", head, token, layer=layer, part=part)
    assert expected == first_fault(with_rows(instead_of=right_row(*place)))


def test_verify_accepts_write_into_block_that_begins_at_the_end_of_the_request() -> None:
    """Eight tokens fill two blocks. The third block of the table is the request's, too."""
    request = attrs.evolve(REQUEST, num_tokens=2 * ROWS)
    rows = [row for row in RIGHT_ROWS if row.token < 2 * ROWS]
    assert first_fault(rows, request) is None
    beyond = attrs.evolve(GOOD_ROW, target=target_address("b", "v", 2, 2 * ROWS + 2))
    assert first_fault([*rows, beyond], request) is None
    shorter = {"g": list(CONSUMER_BLOCKS[:2])}
    fault = first_fault([*rows, beyond], attrs.evolve(request, consumer_blocks=shorter))
    assert fault is not None
    assert ("unwanted", CONSUMER_BLOCKS[2]) == (fault.kind, fault.block)


def test_verify_finds_write_into_block_before_the_first_live_token() -> None:
    """With a window, the first block of the table may belong to another request by now."""
    spec = builders.window(4, 1, block_size=4)
    side = builders.engine(spec)
    caches = {RankId(): kvspec.plan_memory(side, RankId(), num_blocks=4)}
    request = builders.request(12, [1, 2, 3], [3, 2, 1])
    plan = kvspec.plan_transfer(side, side)
    rows = kvspec.build_table(plan, caches[RankId()], caches[RankId()]).descriptors(request)
    region = caches[RankId()].region("l", "k")
    for token, kind in ((7, "unwanted"), (8, None)):
        block, row = divmod(token, 4)
        source, target = (region.address(each, 0, row) for each in (1 + block, 3 - block))
        more = np.array([[source, target, region.content_bytes]], np.uint64)
        wider = {(RankId(), RankId()): np.concatenate([rows, more])}
        fault = verify(plan, caches, caches, request, wider)
        assert kind == (fault and fault.kind)


def test_verify_finds_row_that_is_one_byte_too_long() -> None:
    """The row writes into the next content, so the fault depends on what follows."""
    last = right_row("b", "v", 3, 8)
    fault = first_fault(with_rows(attrs.evolve(last, length=CONTENT + 1), instead_of=last))
    assert fault is not None
    assert ("b", RankId(tp=1)) == (fault.layer, fault.consumer)
    assert (fault.kind, fault.token) in {("double", 9), ("unwanted", None)}


@pytest.mark.parametrize("wrong", range(4))
def test_verify_checks_source_of_every_write_of_a_content(wrong: int) -> None:
    """One content arrives in four writes, in ascending or descending order."""
    size = CONTENT // 4
    quarters = [
        attrs.evolve(
            GOOD_ROW, source=GOOD_ROW.source + at, target=GOOD_ROW.target + at, length=size
        )
        for at in range(0, CONTENT, size)
    ]
    quarters[wrong] = attrs.evolve(quarters[wrong], source=quarters[wrong].source + 1)
    for rows in (quarters, quarters[::-1]):
        assert fault_at("wrong source", byte=wrong * size) == first_fault(with_rows(*rows))


def test_verify_finds_wrong_source_beside_empty_rows() -> None:
    """Rows without bytes do not hide a wrong source, and are not faults themselves."""
    empty = attrs.evolve(GOOD_ROW, length=0, source=0)
    wrong = attrs.evolve(GOOD_ROW, source=GOOD_ROW.source + 1)
    assert fault_at("wrong source") == first_fault(with_rows(empty, wrong, empty))
    assert first_fault([empty, *RIGHT_ROWS, empty]) is None


def library_descriptors() -> Descriptors:
    """Return the library's own descriptors, maximally merged."""
    return {
        (source, rank): kvspec.build_table(PLAN, PRODUCERS[source], CONSUMERS[rank]).descriptors(
            REQUEST
        )
        for rank in CONSUMERS
        for source in PLAN.sources(rank)
    }


def test_verify_accepts_right_bytes_in_any_rows() -> None:
    """The rows are merged, shuffled, or half contents."""
    assert verify(PLAN, PRODUCERS, CONSUMERS, REQUEST) is None
    assert verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, library_descriptors()) is None
    shuffled = list(RIGHT_ROWS)
    np.random.default_rng(3).shuffle(shuffled)  # type: ignore[arg-type]
    assert first_fault(shuffled) is None
    half = CONTENT // 2
    halves = [
        attrs.evolve(row, source=row.source + at, target=row.target + at, length=half)
        for row in RIGHT_ROWS
        for at in (0, half)
    ]
    assert first_fault(halves) is None


def test_verify_accepts_dead_rows_of_own_blocks() -> None:
    """Token 11 follows the request in its last block, so a whole tile may contain it."""
    dead_rows = [
        right_row(layer, part, head, 11)
        for layer in LAYERS
        for part in "kv"
        for head in range(HEADS)
    ]
    assert first_fault([*RIGHT_ROWS, *dead_rows]) is None


@pytest.mark.parametrize("kind", ["missing", "wrong source"])
def test_verify_finds_fault_in_merged_row(kind: str) -> None:
    """The longest row of a pair is one byte short, or reads one byte further."""
    descriptors = library_descriptors()
    pair = GOOD_ROW.pair
    longest = int(np.argmax(descriptors[pair][:, 2]))
    descriptors[pair] = descriptors[pair].copy()
    if kind == "missing":
        descriptors[pair][longest, 2] -= 1
    else:
        descriptors[pair][longest, 0] += 1
    fault = verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, descriptors)
    assert fault is not None
    assert kind == fault.kind
    assert (RankId(tp=1), 2, (RankId(tp=2),)) == (fault.consumer, fault.unit, fault.wanted_from)


WHOLE_PLAN = kvspec.plan_transfer(engine(1, "LBHNC"), engine(1, "LBHNC"))
RANK = RankId()
WHOLE_PRODUCER, WHOLE_CONSUMER = (
    kvspec.allocate(WHOLE_PLAN.producer, RANK, 8)[0] for _ in range(2)
)
WHOLE_REQUEST = builders.request(8, (0, 1), (0, 1))


def test_verify_accepts_halves_of_a_content_from_two_replicas() -> None:
    """Both replicas hold the right bytes."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
    plan = kvspec.plan_transfer(engine(2, "LBHNC", spec), engine(1, "LBHNC", spec))
    producers = {
        rank: kvspec.allocate(plan.producer, rank, 8)[0] for rank in plan.producer.parallel.ranks
    }
    consumer, _ = kvspec.allocate(plan.consumer, RANK, 8)
    descriptors = {
        (rank, RANK): np.array(
            [
                (cache.region(layer, "latent").address(block, 0, token) + at,
                 consumer.region(layer, "latent").address(block, 0, token) + at, 8)
                for layer in LAYERS for block in (0, 1) for token in range(4)
            ], np.uint64,
        )
        for (rank, cache), at in zip(producers.items(), (0, 8), strict=True)
    }  # fmt: skip
    assert verify(plan, producers, {RANK: consumer}, WHOLE_REQUEST, descriptors) is None


def test_verify_finds_double_row_inside_merged_row() -> None:
    """A long row has already written the token."""
    rows = kvspec.build_table(WHOLE_PLAN, WHOLE_PRODUCER, WHOLE_CONSUMER).descriptors(WHOLE_REQUEST)
    source, target = (
        cache.region("a", "v").address(0, 1, 1) for cache in (WHOLE_PRODUCER, WHOLE_CONSUMER)
    )
    rows = np.concatenate([rows, np.array([[source, target, CONTENT]], np.uint64)])
    fault = verify(
        WHOLE_PLAN, {RANK: WHOLE_PRODUCER}, {RANK: WHOLE_CONSUMER}, WHOLE_REQUEST,
        {(RANK, RANK): rows},
    )  # fmt: skip
    assert fault is not None
    assert ("double", "a", "v", 1, 1) == (
        fault.kind, fault.layer, fault.part, fault.unit, fault.token,
    )  # fmt: skip


def test_verify_finds_double_row_after_doubled_dead_row() -> None:
    """A dead row may be written twice, and that does not hide the fault."""
    dead = right_row("a", "k", 2, 11)
    assert fault_at("double") == first_fault([*RIGHT_ROWS, dead, dead, GOOD_ROW])


def test_verify_finds_token_without_consumer_block() -> None:
    """The request determines the tokens that must arrive, not the consumer's table."""
    short = attrs.evolve(REQUEST, consumer_blocks={"g": CONSUMER_BLOCKS[:2]})
    rows = [row for row in RIGHT_ROWS if row.token < 2 * ROWS]
    fault = first_fault(rows, short)
    assert fault is not None
    assert ("missing", 2 * ROWS) == (fault.kind, fault.token)


def test_verify_finds_write_into_cached_block() -> None:
    """Block 2 holds the cached tokens 0..3, so tokens 8..10 must not be written into it."""
    reused = (2, 6, 2)
    request = attrs.evolve(REQUEST, consumer_blocks={"g": reused})
    rows = [
        attrs.evolve(row, target=target_address(row.layer, row.part, row.head, row.token, reused))
        for row in RIGHT_ROWS
    ]
    assert first_fault(rows, request) is not None


def test_verify_finds_missing_tokens_of_huge_request() -> None:
    """The tables hold 12 tokens just before position 2**62."""
    first_token = 2**62 - 2**62 % ROWS - 12
    tables = [BlockTable(blocks, first_token) for blocks in (PRODUCER_BLOCKS, CONSUMER_BLOCKS)]
    whole = attrs.evolve(REQUEST, num_tokens=2**62, cached_tokens=0)
    error = refusal(lambda: first_fault(RIGHT_ROWS, whole), kvspec.MismatchError)
    assert ["producer_blocks['g']"] == [mismatch.field for mismatch in error.mismatches]
    assert "12" in str(error)  # the first token that the producer's table lacks
    late = attrs.evolve(
        whole,
        cached_tokens=first_token + 5,
        num_tokens=first_token + NUM_TOKENS,
        producer_blocks={"g": tables[0]},
        consumer_blocks={"g": CONSUMER_BLOCKS},
    )
    fault = first_fault(RIGHT_ROWS, late)
    assert fault is not None
    assert ("missing", late.cached_tokens) == (fault.kind, fault.token)
    assert first_fault(RIGHT_ROWS, attrs.evolve(late, consumer_blocks={"g": tables[1]})) is None


def test_verify_finds_tokens_before_first_block_of_table() -> None:
    """The consumer's table begins at token 8, so no block holds tokens 0..7."""
    table = BlockTable(CONSUMER_BLOCKS, 8)
    late = attrs.evolve(REQUEST, cached_tokens=0, consumer_blocks={"g": table})
    fault = first_fault(RIGHT_ROWS, late)
    assert fault is not None
    assert ("missing", 0) == (fault.kind, fault.token)


@pytest.mark.parametrize(("side", "kind"), [(0, "foreign"), (1, "unwanted")])
def test_verify_finds_access_to_null_block(side: int, kind: str) -> None:
    """A dead row reads the producer's null block, or writes the consumer's."""
    null = attrs.evolve(engine(1, "LBHNC"), null_block=0)
    plan = kvspec.plan_transfer(null, null)
    caches = [{RANK: kvspec.allocate(null, RANK, 8)[0]} for _ in range(2)]
    request = builders.request(7, (0, 5), (0, 6), cached_tokens=4)
    rows = kvspec.build_table(plan, caches[0][RANK], caches[1][RANK]).descriptors(request)
    assert verify(plan, *caches, request, {(RANK, RANK): rows}) is None
    dead = [
        cache[RANK].region("a", "k").address(block, 0, 3)
        for cache, block in zip(caches, (5, 6), strict=True)
    ]
    dead[side] = caches[side][RANK].region("a", "k").address(0, 0, 3)
    rows = np.concatenate([rows, np.array([[*dead, CONTENT]], np.uint64)])
    fault = verify(plan, *caches, request, {(RANK, RANK): rows})
    assert fault is not None
    assert kind == fault.kind


@pytest.mark.parametrize("address", [1 << 40, 2**63 - 1 - CONTENT])
def test_verify_finds_access_outside_an_empty_table(address: int) -> None:
    """A request without tokens may move nothing, also near the largest address."""
    empty = builders.request(0, (), ())
    pair, own = FIRST_PAIR, PRODUCERS[RankId()].region("a", "k").base
    fault = verify(PLAN, PRODUCERS, CONSUMERS, empty, {pair: [[own, address, CONTENT]]})
    assert fault is not None
    assert ("unwanted", address) == (fault.kind, fault.byte)
    request = attrs.evolve(empty, consumer_blocks={"g": (3,)})
    into = CONSUMERS[RankId()].region("a", "k").address(3, 0, 0)
    fault = verify(PLAN, PRODUCERS, CONSUMERS, request, {pair: [[address, into, CONTENT]]})
    assert fault is not None
    assert ("foreign", address) == (fault.kind, fault.byte)


def test_verify_rejects_block_of_the_producer_that_holds_two_places() -> None:
    """A block holds the tokens of one place of a table, with the caller's descriptors too."""
    request = attrs.evolve(REQUEST, producer_blocks={"g": (5, 1, 1)})
    for descriptors in ({}, None):
        error = refusal(
            lambda given=descriptors: verify(PLAN, PRODUCERS, CONSUMERS, request, given)
        )
        assert ("producer_blocks['g']", 1) == (error.field, error.value)


def test_verify_finds_all_missing_if_consumer_table_is_empty() -> None:
    """The first fault is the first wanted token."""
    request = attrs.evolve(REQUEST, consumer_blocks={"g": ()})
    assert FIRST_MISSING == first_fault(RIGHT_ROWS, request)


def test_verify_requires_cache_of_every_consumer_rank() -> None:
    """The error names the rank that has no cache."""
    some = {RankId(tp=0): CONSUMERS[RankId(tp=0)]}
    error = refusal(lambda: verify(PLAN, PRODUCERS, some, REQUEST))
    assert ("consumers", ["tp0"]) == (error.field, error.value)
    assert "tp1" in str(error)


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ({"producers": {}}, "producers"),
        ({"request": attrs.evolve(REQUEST, consumer_blocks={})}, "consumer_blocks"),
        ({"request": attrs.evolve(REQUEST, producer_blocks={})}, "producer_blocks"),
    ],
)
def test_verify_rejects_missing_cache_or_table(arguments: dict[str, Any], field: str) -> None:
    """The caches and the tables are required with the caller's descriptors too."""
    arguments = {"producers": PRODUCERS, "request": REQUEST} | arguments
    descriptors = descriptors_of(RIGHT_ROWS)
    error = refusal(lambda: verify(PLAN, consumers=CONSUMERS, descriptors=descriptors, **arguments))
    assert field == error.field


def test_verify_rejects_empty_table_of_producer() -> None:
    """The producer must hold the wanted tokens 5..10."""
    request = attrs.evolve(REQUEST, producer_blocks={"g": ()})
    error = refusal(lambda: first_fault(RIGHT_ROWS, request), kvspec.MismatchError)
    (mismatch,) = error.mismatches
    assert ("producer_blocks['g']", range(5, 11)) == (mismatch.field, mismatch.consumer)


def test_verify_without_descriptors_rejects_what_select_rejects() -> None:
    """The consumer's table has no block for token 8."""
    short = attrs.evolve(REQUEST, consumer_blocks={"g": CONSUMER_BLOCKS[:2]})
    error = refusal(lambda: verify(PLAN, PRODUCERS, CONSUMERS, short))
    assert "consumer_blocks['g']" == error.field


STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=1, state_size=2, conv_kernel=3, dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("part", "unit", "state_row"), [("conv_x", 5, 1), ("conv_b", 1, 0), ("ssm", 3, 0)]
)
def test_verify_names_missing_byte_of_state(part: str, unit: int, state_row: int) -> None:
    """The fault has the channel or head of the model, and the row of the state."""
    plan = kvspec.plan_transfer(engine(1, "LBHNC", STATE), engine(2, "LBNHC", STATE))
    allocated = [
        {rank: kvspec.allocate(side, rank, 3) for rank in side.parallel.ranks}
        for side in (plan.producer, plan.consumer)
    ]
    producers, consumers = (
        {rank: cache for rank, (cache, _) in side.items()} for side in allocated
    )
    request = builders.request(9, (2,), (1,))
    faulty_rank = RankId(tp=1 if part != "conv_b" else 0)
    region = consumers[faulty_rank].region("b", part)
    hole = region.address(1, unit % region.units, state_row)
    descriptors = {}
    for rank, cache in consumers.items():
        merged = kvspec.build_table(plan, producers[RANK], cache).descriptors(request).tolist()
        cuts = [
            (start + at, stop + at, 2)
            for start, stop, length in merged
            for at in range(0, length, 2)
            if rank != faulty_rank or not hole <= stop + at < hole + region.content_bytes
        ]
        descriptors[RANK, rank] = np.array(cuts, np.uint64)
    expected = fault_at(
        "missing", consumer=faulty_rank, part=part, unit=unit, token=None, row=state_row,
        wanted_from=(RANK,),
    )  # fmt: skip
    assert expected == verify(plan, producers, consumers, request, descriptors)


POLICIES: Any = ("spread", "first", "stripe")


def test_prove_finds_no_fault_under_any_policy() -> None:
    """The triples are 6 x 6 TP sizes x 8 numbers of heads, with 1 + ... + 6 ranks 6 times each."""
    expected = proof.Proof(6 * 6 * 8, 8 * 6 * sum(range(1, 7)), ())
    assert expected == prove(6, 8, jobs=1, replica_policies=POLICIES)


def test_prove_returns_counts_and_logs_each_number_of_heads(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A log at INFO shows how much of the proof is done. Each node has one rank of each engine."""
    caplog.set_level("INFO", "kvspec")
    result = prove(2, 2, jobs=1, replica_policies=(*POLICIES, "nearest"), ranks_per_node=1)
    assert proof.Proof(8, 12, ()) == result
    assert result.exact
    assert [(1, 2), (2, 2)] == [record.args for record in caplog.records]


@pytest.mark.parametrize(
    ("call", "field", "value"),
    [
        (lambda: prove(0, 1), "max_tp", 0),
        (lambda: prove(1, True), "max_heads", True),  # noqa: FBT003
        (lambda: prove(1, 1, replica_policies=("all",)),  # type: ignore[arg-type]
         "replica_policy", "all"),
        (lambda: prove(1, 1, replica_policies=()), "replica_policies", ()),
        (lambda: prove(1, 1, replica_policies="first"),  # type: ignore[arg-type]
         "replica_policies", "first"),
        (lambda: prove(257, 1), "max_tp", 257),
        (lambda: prove(10**8, 10**8), "max_tp", 10**8),
        (lambda: prove(1, 257), "max_heads", 257),
        (lambda: prove(1, 1, jobs=0), "jobs", 0),
        (lambda: prove(1, 1, jobs="2"), "jobs", "2"),  # type: ignore[arg-type]
    ],
)  # fmt: skip
def test_prove_rejects_invalid_arguments(
    call: Callable[[], object], field: str, value: object
) -> None:
    """The bounds, the policies and the number of processes are checked."""
    error = refusal(call)
    assert (field, value, type(value)) == (error.field, error.value, type(error.value))


def test_verify_ignores_content_of_null_block() -> None:
    """Id -1 is not the block before the first one, whose bytes belong to another part."""
    spec = kvspec.SlidingWindowSpec(
        block_size=4, total_num_kv_heads=1, head_size=2, dtype="int8", sliding_window=5
    )
    group = kvspec.KVCacheGroup(name="w", layers=("l.0", "l.1"), spec=spec)
    side = kvspec.EngineSpec(groups=(group,), layout="LKBNHC")
    plan = kvspec.plan_transfer(side, side)
    caches = [{RANK: kvspec.allocate(side, RANK, 4)[0]} for _ in range(2)]
    for null in (-1, 9, 0):
        request = builders.request(8, {"w": [0, 1]}, {"w": [null, 3]}, cached_tokens=4)
        assert verify(plan, *caches, request) is None


def last_head_lost(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Lose a head of the last range."""
    return [*unit_ranges[:-1], unit_ranges[-1]._replace(stop=unit_ranges[-1].stop - 1)]


def first_range_doubled(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the first range twice."""
    return [unit_ranges[0], *unit_ranges]


def first_range_from_rank_0(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the first range from producer rank 0."""
    return [unit_ranges[0]._replace(producer=0), *unit_ranges[1:]]


def numbers_in(text: str) -> list[int]:
    """Return the numbers in *text*, in order."""
    return [int(number) for number in re.findall(r"\d+", text)]


@pytest.mark.parametrize(
    ("bug", "numbers", "word"),
    [
        # heads, both TP sizes, consumer rank; then the heads, or the producer and the heads
        (last_head_lost, [4, 1, 1, 0, 3, 3], "missing"),
        (first_range_doubled, [4, 1, 1, 0, 4, 0, 3], "double"),
        (first_range_from_rank_0, [4, 2, 2, 1, 0, 2, 3], "own"),
    ],
)
def test_proof_finds_planted_bug(
    bug: Callable[[list[UnitRange]], list[UnitRange]], numbers: list[int], word: str
) -> None:
    """The fault names the heads, both TP sizes, the policy and the rank."""

    def wrong_unit_ranges(*arguments: Any) -> list[UnitRange]:
        return bug(consumer_unit_ranges(*arguments))

    with unit_ranges_in_proof(wrong_unit_ranges):
        faults = faults_of_proof(4, 3)
    assert numbers == numbers_in(faults[0])
    assert word in faults[0]
    assert all("spread" in fault for fault in faults)
    assert {4} == {numbers_in(fault)[0] for fault in faults}


def last_block_from_rank_0(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the last blocks of the last heads from producer rank 0."""
    return [*unit_ranges[:-1], unit_ranges[-1]._replace(producer=0)]


def last_block_from_rank_before_0(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the last blocks of the last heads from a rank whose number is negative."""
    return [*unit_ranges[:-1], unit_ranges[-1]._replace(producer=-1)]


def last_block_from_no_rank(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the last blocks of the last heads from a rank that the producer does not have."""
    return [*unit_ranges[:-1], unit_ranges[-1]._replace(producer=4)]


def last_block_lost(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Lose the last blocks of the last heads."""
    return unit_ranges[:-1]


def last_block_doubled(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the last blocks of the last heads twice."""
    return [*unit_ranges, unit_ranges[-1]]


def last_stripe_half_as_dense(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read every second one of the last blocks of the last heads."""
    last = unit_ranges[-1]
    half = attrs.evolve(last.stripe, step=2 * last.stripe.step)
    return [*unit_ranges[:-1], last._replace(stripe=half)]


def stripes_made_whole(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read all blocks of the first heads from their first replica, as a range without stripes."""
    first = unit_ranges[0]
    own = [unit_range for unit_range in unit_ranges if unit_range.start != first.start]
    return [first._replace(stripe=WHOLE), *own]


def all_blocks_from_first_replica(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read all blocks from the first replica."""
    return [unit_range._replace(producer=unit_range.replicas[0]) for unit_range in unit_ranges]


@pytest.mark.parametrize(
    ("bug", "word"),
    [
        (last_block_from_rank_0, "does not own"),
        (last_block_from_rank_before_0, "does not own"),
        (last_block_from_no_rank, "does not own"),
        (last_block_lost, "missing"),
        (last_block_doubled, "missing"),
        (last_stripe_half_as_dense, "missing"),
        (all_blocks_from_first_replica, "are read"),
        (stripes_made_whole, "are read"),
    ],
)
def test_proof_finds_planted_bug_of_stripes(
    bug: Callable[[list[UnitRange]], list[UnitRange]], word: str
) -> None:
    """With 2 heads and TP 4 to TP 1, two replicas of each head send every second block."""

    def wrong_unit_ranges(*arguments: Any) -> list[UnitRange]:
        unit_ranges = consumer_unit_ranges(*arguments)
        return unit_ranges if unit_ranges[-1].stripe.whole else bug(unit_ranges)

    with unit_ranges_in_proof(wrong_unit_ranges):
        faults = {
            tuple(numbers_in(fault)[:3]): fault for fault in faults_of_proof(2, 4, ("stripe",))
        }
    assert word in faults[2, 4, 1]


def test_proof_finds_unfair_choice_of_replicas() -> None:
    """All consumers read the first replica: the bytes are right, but `spread` is not kept."""

    def first_replica_only(
        consumer: Sharding, producer: Sharding, rank: int, _chooser: ReplicaChooser
    ) -> list[UnitRange]:
        sizes = len(producer.ranges), len(consumer.ranges)
        chooser = tp_chooser(ReplicaPolicy("first"), *sizes)
        return consumer_unit_ranges(consumer, producer, rank, chooser)

    with unit_ranges_in_proof(first_replica_only):
        faults = faults_of_proof(1, 3)
    # heads, both TP sizes, the range of the heads, reads of each replica
    assert [
        [1, 2, 2, 0, 1, 2, 0],
        [1, 2, 3, 0, 1, 3, 0],
        [1, 3, 2, 0, 1, 2, 0, 0],
        [1, 3, 3, 0, 1, 3, 0, 0],
    ] == [numbers_in(fault) for fault in faults]


def test_proof_finds_wrong_sharding() -> None:
    """Rounding up moves the cut between two ranks only if the heads do not divide evenly."""
    with rounded_up_sharding_in_proof():
        assert [] == faults_of_proof(4, 2)
        fault = faults_of_proof(5, 3)[0]
    # 5 heads, TP 1 -> 2, rank 0: head 2 is read, but heads 0 and 1 of five are its own.
    assert [5, 1, 2, 0, 2, 2] == numbers_in(fault)
    assert "own" in fault


def test_proof_names_head_that_rank_does_not_own() -> None:
    """From TP 2 to TP 1 the wrong cut reads head 2 from a producer rank without it."""
    with rounded_up_sharding_in_proof():
        faults = [numbers_in(fault) for fault in faults_of_proof(5, 3)]
    assert [5, 2, 1, 0] in [numbers[:4] for numbers in faults]


def test_owned_heads_of_small_sizes() -> None:
    """By hand: 8 heads over 3 ranks, and 2 heads over 4 ranks."""
    assert ((0, 2), (2, 5), (5, 8)) == proof.owned_heads(8, 3)
    assert ((0, 1), (0, 1), (1, 2), (1, 2)) == proof.owned_heads(2, 4)


def test_verify_requires_only_live_tokens_of_window() -> None:
    """A window of 3 after 7 tokens needs tokens 5 and 6; token 4 may come or not."""
    spec = kvspec.SlidingWindowSpec(**GQA, sliding_window=3)
    plan = kvspec.plan_transfer(engine(1, "LBHNC", spec), engine(1, "LBHNC", spec))
    caches = [{RANK: kvspec.allocate(plan.producer, RANK, 8)[0]} for _ in range(2)]
    request = attrs.evolve(
        WHOLE_REQUEST, num_tokens=7, producer_blocks={"g": BlockTable((1,), 4)},
        consumer_blocks={"g": BlockTable((3,), 4)},
    )  # fmt: skip
    assert verify(plan, *caches, request) is None
    rows = kvspec.build_table(plan, caches[0][RANK], caches[1][RANK]).descriptors(request)
    fault = verify(plan, *caches, request, {(RANK, RANK): rows[:-1]})
    assert fault is not None
    assert ("missing", 5) == (fault.kind, fault.token)


FIRST_PAIR = (RankId(), RankId())
# `asarray` would drop the mask, and a masked row would count.
MASKED = np.ma.array([[1, 2, 3]], mask=True)


@pytest.mark.parametrize(
    ("descriptors", "field", "value"),
    [
        ({(RankId(), RankId(tp=9)): [[1, 2, 3]]}, "descriptors[", RankId(tp=9)),
        ({(RankId(tp=9), RankId()): [[1, 2, 3]]}, "descriptors[", RankId(tp=9)),
        ({(0, 0): [[1, 2, 3]]}, "descriptors[(0, 0)]", 0),
        ({"tp0": [[1, 2, 3]]}, "descriptors", "tp0"),
        ({FIRST_PAIR: [[1, 2]]}, "descriptors[", "int64 of shape (1, 2)"),
        ({FIRST_PAIR: [[1.0, 2.0, 3.0]]}, "descriptors[", "float64 of shape (1, 3)"),
        ({FIRST_PAIR: [[1, 2, 3], [4]]}, "descriptors[", [[1, 2, 3], [4]]),
        ({FIRST_PAIR: [[1, 2, -3]]}, "descriptors[", [1, 2, -3]),
        ({FIRST_PAIR: np.array([[2**63, 2, 3]], np.uint64)}, "descriptors[", [2**63, 2, 3]),
        ({FIRST_PAIR: MASKED}, "descriptors[", "a masked array"),
        ({FIRST_PAIR: [[2**63 - 3, 2, 3]]}, "descriptors[", [2**63 - 3, 2, 3]),
        ([1], "descriptors", [1]),
    ],
)
def test_verify_rejects_invalid_descriptors(descriptors: Any, field: str, value: object) -> None:
    """Descriptors are rows of three integers, by a pair of ranks of the plan."""
    error = refusal(lambda: verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, descriptors))
    assert error.field.startswith(field)
    assert value == error.value


def test_verify_accepts_descriptors_as_lists() -> None:
    """Numpy converts lists of rows to arrays of integers."""
    descriptors = {pair: rows.tolist() for pair, rows in descriptors_of(RIGHT_ROWS).items()}
    assert verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, descriptors) is None


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"plan": None}, "plan", None),
        ({"producers": None}, "producers", None),
        ({"consumers": [1]}, "consumers", [1]),
        ({"request": None}, "request", None),
        ({"consumers": CONSUMERS | {RankId(tp=2): PRODUCERS[RankId(tp=2)]}},
         "consumers[tp2]", RankId(tp=2)),
        ({"consumers": CONSUMERS | {"a": 1}}, "consumers[a]", "a"),
    ],
)  # fmt: skip
def test_verify_rejects_invalid_arguments(
    arguments: dict[str, Any], field: str, value: object
) -> None:
    """With the caller's descriptors and without."""
    valid: dict[str, Any] = {
        "plan": PLAN, "producers": PRODUCERS, "consumers": CONSUMERS, "request": REQUEST
    }  # fmt: skip
    for more in ({}, {"descriptors": descriptors_of(RIGHT_ROWS)}):
        error = refusal(lambda more=more: verify(**valid | more | arguments))
        assert (field, value) == (error.field, error.value)


@pytest.mark.parametrize(
    ("tables", "field", "ids"),
    [
        ({"producer_blocks": {"g": []}}, "producer_blocks['g']", []),
        ({"consumer_blocks": {"g": []}}, "consumer_blocks['g']", []),
        ({"consumer_blocks": {"g": [1, 2]}}, "consumer_blocks['g']", [1, 2]),
        ({"producer_blocks": {"g": BlockTable((1, 2), 11)}}, "producer_blocks['g']", [1, 2]),
    ],
)
def test_verify_rejects_table_without_block_of_state(
    tables: dict[str, Any], field: str, ids: list[int]
) -> None:
    """A table has one slot, or the block after token 10, with the caller's descriptors too."""
    plan = kvspec.plan_transfer(engine(1, "LBHNC", STATE), engine(1, "LBHNC", STATE))
    caches = [{RANK: kvspec.allocate(side, RANK, 8)[0]} for side in (plan.producer, plan.consumer)]
    blocks = {"producer_blocks": {"g": [1]}, "consumer_blocks": {"g": [2]}} | tables
    request = kvspec.TransferRequest(request_id="r", num_tokens=11, **blocks)
    for descriptors in ({}, None):
        error = refusal(lambda given=descriptors: verify(plan, *caches, request, given))
        assert (field, ids) == (error.field, list(error.value))


def test_verify_rejects_state_of_another_token() -> None:
    """The producer's state has seen one token less, with the caller's descriptors too."""
    plan = kvspec.plan_transfer(engine(1, "LBHNC", STATE), engine(1, "LBHNC", STATE))
    caches = [{RANK: kvspec.allocate(side, RANK, 8)[0]} for side in (plan.producer, plan.consumer)]
    request = builders.request(11, (1,), (2,), state_tokens=10)
    for descriptors in ({}, None):
        error = refusal(
            lambda given=descriptors: verify(plan, *caches, request, given), kvspec.MismatchError
        )
        (mismatch,) = error.mismatches
        assert ("state_tokens", 10, 11) == (mismatch.field, mismatch.producer, mismatch.consumer)


def test_verify_rejects_cache_of_another_engine() -> None:
    """The field that differs is named, with the values of the plan and of the cache."""
    other = engine(2, "LBNHC", kvspec.FullAttentionSpec(**GQA | {"head_size": 16}))
    caches = {rank: kvspec.allocate(other, rank, 8)[0] for rank in other.parallel.ranks}
    descriptors = descriptors_of(RIGHT_ROWS)
    error = refusal(
        lambda: verify(PLAN, PRODUCERS, caches, REQUEST, descriptors), kvspec.MismatchError
    )
    (mismatch,) = error.mismatches
    assert "consumers[tp0].engine.groups[0].spec.head_size" == mismatch.field
    assert (8, 16) == (mismatch.producer, mismatch.consumer)
    assert ("plan", "cache") == mismatch.sides


def test_verify_rejects_cache_of_another_rank() -> None:
    """The caches of the two consumer ranks are swapped."""
    swapped = {RankId(tp=0): CONSUMERS[RankId(tp=1)], RankId(tp=1): CONSUMERS[RankId(tp=0)]}
    error = refusal(lambda: verify(PLAN, PRODUCERS, swapped, REQUEST))
    assert ("consumers[tp0]", "tp1") == (error.field, error.value)


TWO_RANKS = builders.engine(builders.gqa(4, block_size=4), tp=2)
BUFFER = np.zeros(1 << 16, np.uint8)


def caches_in_buffer(first: int, second: int, step: int) -> dict[RankId, kvspec.RankCache]:
    """Return the caches of two ranks in one buffer.

    They begin at the bytes *first* and *second*, and have a page every *step* bytes.
    """
    caches = {}
    for rank, start in ((RankId(tp=0), first), (RankId(tp=1), second)):
        shape, strides = (6, 2, 4, 16), (step, 64, 16, 1)
        pages = np.lib.stride_tricks.as_strided(BUFFER[start:], shape, strides)
        caches[rank] = kvspec.RankCache.from_tensors(TWO_RANKS, rank, {"l": pages}, "BHNC")
    return caches


def verify_consumers(consumers: dict[RankId, kvspec.RankCache], **options: Any) -> object:
    """Return the fault in the library's own descriptors to these caches."""
    plan = kvspec.plan_transfer(builders.engine(builders.gqa(4, block_size=4)), TWO_RANKS)
    cache, storage = kvspec.allocate(plan.producer, RankId(), 6)
    request = builders.request(9, [3, 0, 2], [1, 5, 4])
    fault = verify(plan, {RankId(): cache}, consumers, request, **options)
    assert storage  # it must outlive the call
    return fault


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (0, 128), (127, 0), (0, 5 * 256), (0, 5 * 256 + 127)]
)
def test_verify_rejects_consumer_ranks_that_share_bytes(first: int, second: int) -> None:
    """One rank would overwrite the other, unless they are separate processes."""
    step = 256 if abs(second - first) > 128 else 128
    caches = caches_in_buffer(first, second, step)
    error = refusal(lambda: verify_consumers(caches))
    assert "consumers[tp1]" == error.field
    assert error.value.startswith("l.")
    assert "tp0" in error.value
    assert verify_consumers(caches, separate_processes=True) is None


def test_verify_accepts_consumer_ranks_without_common_bytes() -> None:
    """Pages of two ranks alternate, or one rank follows the other, or the caches are planned."""
    assert verify_consumers(caches_in_buffer(0, 128, 256)) is None
    assert verify_consumers(caches_in_buffer(0, 6 * 128, 128)) is None
    planned = {rank: kvspec.plan_memory(TWO_RANKS, rank, 6) for rank in TWO_RANKS.parallel.ranks}
    assert verify_consumers(planned) is None
    error = refusal(lambda: verify_consumers(planned, separate_processes=1))
    assert ("separate_processes", 1) == (error.field, error.value)


def test_verify_accepts_planned_caches_at_equal_addresses() -> None:
    """Each planned cache begins at address 0, with two memories for two groups."""
    specs = builders.gqa(4, block_size=4), builders.mla(block_size=4)
    plan = kvspec.plan_transfer(builders.engine(*specs), builders.engine(*specs, tp=2))
    producers, consumers = (
        {rank: kvspec.plan_memory(side, rank, 6) for rank in side.parallel.ranks}
        for side in (plan.producer, plan.consumer)
    )
    assert 2 == len(consumers[RankId()].memory)
    tables = {"g0": [3, 0, 2], "g1": [1, 2, 3]}, {"g0": [1, 5, 4], "g1": [4, 0, 2]}
    assert verify(plan, producers, consumers, builders.request(9, *tables)) is None


@pytest.mark.parametrize("independent", [False, True])
def test_consumer_may_read_blocks_before_the_chunk_of_the_producer(independent: bool) -> None:
    """The layers of the consumer decide which blocks of a producer are read."""
    chunked, full = (
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=2),
        kvspec.FullAttentionSpec(**GQA),
    )
    sides = [engine(1, "NHD", spec) for spec in (chunked, full)]
    caches = [{RankId(): kvspec.plan_memory(side, RankId(), num_blocks=8)} for side in sides]
    asked = builders.request(8, [0, 1], [3, 2])
    assert verify(kvspec.plan_transfer(*sides), *caches, asked, independent=independent) is None
