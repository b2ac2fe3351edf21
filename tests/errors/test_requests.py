"""Errors of requests, block tables and caches, which are raised before anything is written.

A request that contradicts its own tables is a `SpecError`. Tokens that the producer does not hold,
a state after another number of tokens and a cache of another engine are a `MismatchError`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from builders import engine
from refused import REJECTED, check_rejected, check_values, differences, refusal, row

import kvspec
from kvspec import BlockTable, RankId
from kvspec.nixl.rows import checked_rows

GQA: dict[str, Any] = {
    "block_size": 4, "total_num_kv_heads": 4, "head_size": 8, "dtype": "bfloat16",
}  # fmt: skip
FULL = kvspec.FullAttentionSpec(**GQA)
CROSS = kvspec.CrossAttentionSpec(**GQA)
ROWS = kvspec.FullAttentionSpec(**GQA | {"block_size": 8}, tokens_per_state=4)
WINDOW = kvspec.SlidingWindowSpec(**GQA | {"block_size": 8}, tokens_per_state=4, sliding_window=3)
STATE = kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=2, dtype="bfloat16")
STATES = kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=2, dtype="bfloat16", block_size=8)
LATENT = kvspec.MLAAttentionSpec(block_size=1, head_size=1, dtype="bfloat16")
NUM_BLOCKS = 6
BLOCKS: dict[str, Any] = {"producer_blocks": {"g": (0, 1, 2)}, "consumer_blocks": {"g": (3, 4, 5)}}
SLOTS: dict[str, Any] = {"producer_blocks": {"g": (1,)}, "consumer_blocks": {"g": (2,)}}


@attrs.frozen
class Pair:
    """Two engines of one rank and one kind of layer, with caches, storage and their table."""

    plan: kvspec.TransferPlan
    producer: kvspec.RankCache
    consumer: kvspec.RankCache
    table: kvspec.DescriptorTable
    storage: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

    @staticmethod
    def of(spec: kvspec.LayerSpec) -> Pair:
        """Return the pair for a layer of *spec*."""
        plan = kvspec.plan_transfer(engine(spec), engine(spec))
        sides = [kvspec.allocate(e, RankId(), NUM_BLOCKS) for e in (plan.producer, plan.consumer)]
        (producer_ids, mine), (consumer_ids, yours) = sides
        mine["g"][:] = 7  # The consumer has zeros, so a copy changes it.
        # Blocks move whole, so that the first ids are those of the blocks.
        table = kvspec.build_table(plan, producer_ids, consumer_ids, dead_tokens=True)
        return Pair(plan, producer_ids, consumer_ids, table, (mine["g"], yours["g"]))

    def verify(self, request: kvspec.TransferRequest) -> kvspec.CounterExample | None:
        """Verify the descriptors of *request*."""
        return kvspec.verify(
            self.plan, {RankId(): self.producer}, {RankId(): self.consumer}, request
        )


PAIRS = {spec: Pair.of(spec) for spec in (FULL, CROSS, ROWS, WINDOW, STATE, STATES)}
PLAN, PRODUCER, CONSUMER = PAIRS[FULL].plan, PAIRS[FULL].producer, PAIRS[FULL].consumer


def make_request(**changes: Any) -> kvspec.TransferRequest:
    """Return a request of ten tokens in three blocks. The fields in *changes* replace its own."""
    base: dict[str, Any] = {"request_id": "r", "num_tokens": 10, **BLOCKS}
    return kvspec.TransferRequest(**base | changes)


def select(spec: kvspec.LayerSpec = FULL, **changes: Any) -> Any:
    """Return the descriptor ids of a request between two engines of *spec*."""
    return PAIRS[spec].table.select(make_request(**changes))


@pytest.mark.parametrize("value", ["", None, 3, b"r"])
def test_request_rejects_empty_name(value: Any) -> None:
    """The id must be a text that is not empty."""
    check_rejected(lambda: make_request(request_id=value), "request_id", value)


@pytest.mark.parametrize("name", ["num_tokens", "cached_tokens", "encoder_tokens", "state_tokens"])
def test_request_rejects_count_that_is_no_natural_int(name: str) -> None:
    """None is accepted only if it means the number of tokens."""
    bad = [-1, True, 1.0, "3", *([None] if name in {"num_tokens", "cached_tokens"} else [])]
    check_values(lambda value: make_request(**{name: value}), name, bad, 0)


def test_request_rejects_cached_count_of_group_that_is_no_natural_int() -> None:
    """The counts in a mapping have the same rule."""
    bad = [-1, True, 1.0, "3", None]
    check_values(lambda value: make_request(cached_tokens={"g": value}), "cached_tokens", bad, 0)


def test_block_table_rejects_first_token_that_is_no_natural_int() -> None:
    """A table begins at a position."""
    check_values(
        lambda value: BlockTable((1,), value), "first_token", [-1, True, 1.0, "3", None], 0
    )


IDS: list[Any] = [
    (0.5,), (1, 2.0), (True, False), np.array([True]), np.array([1.0]), [[1, 2], [3, 4]],
    np.zeros((2, 2), int), "12", ("1",), (None,), (2**64,), (1, True), (7, False, 8), None, 5,
    [[1], [2, 3]], b"ab", {1, 2}, {1: 2}, (2**63,), np.array([2**63], np.uint64),
    np.ma.array([1, -5], mask=[False, True]),
]  # fmt: skip


@pytest.mark.parametrize("value", IDS)
def test_block_table_rejects_ids_that_are_no_ints(value: Any) -> None:
    """Float, bool, text, two-dimensional and too wide ids fail when the table is made."""
    check_rejected(lambda: BlockTable(value), "block_ids", value)
    check_rejected(lambda: make_request(consumer_blocks={"g": value}), "block_ids", value)


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_block_tables_of_any_int_type_are_equal(kind: type[np.integer]) -> None:
    """The width and the sign of an array's type do not matter."""
    assert BlockTable((7, 0, 100)) == BlockTable(np.array([7, 0, 100], kind))  # type: ignore[arg-type]


def test_equal_requests_and_tables_have_equal_hashes() -> None:
    """Equal values are one key."""
    assert 1 == len({make_request(), make_request()})
    assert 2 == len({BlockTable((1, 2)), BlockTable([1, 2]), BlockTable([2, 1])})


TABLE = [
    # tables too short, too late, off a block's boundary
    row(lambda: select(consumer_blocks={"g": (3, 4)}),
        "consumer_blocks['g']", range(8), "0..9"),
    row(lambda: select(consumer_blocks={"g": ()}), "consumer_blocks['g']", range(0), "0..9"),
    row(lambda: select(consumer_blocks={"g": BlockTable((3, 4), 4)}),
        "consumer_blocks['g']", range(4, 12), "0..9"),
    row(lambda: select(consumer_blocks={"g": (3,)}, cached_tokens=3),
        "consumer_blocks['g']", range(4), "3..9"),
    row(lambda: select(CROSS, encoder_tokens=14), "consumer_blocks['g']", range(12), "0..13"),
    row(lambda: select(cached_tokens=4, consumer_blocks={"g": BlockTable((3, 4), 2)}),
        "consumer_blocks['g'].first_token", 2, 4),
    row(lambda: select(cached_tokens=4, producer_blocks={"g": BlockTable((1, 2), 3)}),
        "producer_blocks['g'].first_token", 3, 4),
    # ids
    *(row(lambda s=side, i=i: select(**{s: {"g": (0, i, 2)}}), f"{side}['g']", i, 5)
      for side in BLOCKS for i in (6, -1, 10**12)),
    *(row(lambda i=i: select(consumer_blocks={"g": i}), "consumer_blocks['g']", i[-1], "once")
      for i in ((0, 1, 0), (4, 5, 5), (2, 2, 2))),
    row(lambda: select(cached_tokens=4, consumer_blocks={"g": (3, 4, 3)}),
        "consumer_blocks['g']", 3, "once"),
    row(lambda: select(producer_blocks={"g": (1, 2, 1)}), "producer_blocks['g']", 1, "once"),
    # groups
    row(lambda: select(producer_blocks={"h": (0, 1, 2)}), "producer_blocks", ["h"], "g"),
    row(lambda: select(consumer_blocks={}), "consumer_blocks", [], "g"),
    row(lambda: select(cached_tokens={"h": 4}), "cached_tokens", ["h"]),
    row(lambda: select(cached_tokens={0: 1, "b": 2}), "cached_tokens", ["b", 0]),
    row(lambda: select(producer_blocks={0: (1,), "a": (2,)}), "producer_blocks", ["a", 0], "g"),
    *(row(lambda s=side, v=value: make_request(**{s: v}), side, value)
      for side in BLOCKS for value in (None, (1, 2))),
    # states
    *(row(lambda s=side, i=i: select(STATE, **SLOTS | {s: {"g": i}}), f"{side}['g']", list(i), 9)
      for side in SLOTS for i in ((1, 2), ())),
    *(row(lambda s=side, i=i: select(STATE, **SLOTS | {s: {"g": (i,)}}), f"{side}['g']", i, 5)
      for side in SLOTS for i in (7, -2)),
    *(row(lambda s=side, t=table: select(STATES, **SLOTS | {s: {"g": t}}),
          f"{side}['g'].first_token", 2, 8)
      for side in SLOTS for table in (BlockTable((1, 2), 2), BlockTable((1,), 2))),
    *(row(lambda s=side: select(STATES, **SLOTS | {s: {"g": BlockTable((1,), 400)}}),
          f"{side}['g']", [1], 9)
      for side in SLOTS),
    row(lambda: select(STATES, producer_blocks={"g": (1,)}, consumer_blocks={"g": (5, 5)}),
        "consumer_blocks['g']", 5, "once"),
    # the encoder's tokens
    row(lambda: select(CROSS), "encoder_tokens", None),
    # a row of several tokens cannot be written in part
    *(row(lambda c=c: select(ROWS, cached_tokens=c), "cached_tokens", c, 4) for c in (1, 5, 6, 9)),
    row(lambda: select(WINDOW, num_tokens=16, cached_tokens=15), "cached_tokens", 15, 4),
    # things of another type
    row(lambda: PAIRS[FULL].table.select("r"), "request", "r"),  # type: ignore[arg-type]
    row(lambda: kvspec.build_table(None, PRODUCER, CONSUMER), "plan", None),  # type: ignore[arg-type]
    row(lambda: kvspec.build_table(PLAN, None, CONSUMER), "producer_cache", None),  # type: ignore[arg-type]
    row(lambda: kvspec.build_table(PLAN, PRODUCER, "c"), "consumer_cache", "c"),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(REJECTED, TABLE)
def test_wrong_request_is_rejected(
    call: Callable[[], object], field: str, value: object, word: object
) -> None:
    """The error has the field and the value."""
    check_rejected(call, field, value, word)


def huge(num_blocks: int) -> kvspec.RankCache:
    """Return a cache of *num_blocks* blocks of one row of two bytes, without memory behind it."""
    region = kvspec.Region(
        group="g", layer="l", part="latent", base=64, num_blocks=num_blocks, block_stride=2,
        unit_stride=2, state_stride=2, content_bytes=2, units=1, states=1,
    )  # fmt: skip
    return kvspec.RankCache(engine(LATENT), RankId(), (region,), (kvspec.Memory(0, 2**62),))


def table_of(producer_ids: int, consumer_ids: int) -> kvspec.DescriptorTable:
    """Return the table of two caches with so many blocks, without memory behind them."""
    plan = kvspec.plan_transfer(engine(LATENT), engine(LATENT))
    return kvspec.build_table(plan, huge(producer_ids), huge(consumer_ids))


HELD = "producer_blocks['g']"
IDS_OF_PRODUCER = ("producer descriptors", 2**31, 2**31 - 1)
IDS_OF_CONSUMER = ("consumer descriptors", 2**40, 2**31 - 1)
UNFIT: list[Any] = [
    (lambda: select(producer_blocks={"g": (0, 1)}), (HELD, range(8), range(10))),
    (lambda: select(producer_blocks={"g": ()}), (HELD, range(0), range(10))),
    (lambda: select(producer_blocks={"g": BlockTable((1, 2), 4)}), (HELD, range(4, 12), range(10))),
    (lambda: select(cached_tokens=3, producer_blocks={"g": (0, 1)}),
     (HELD, range(8), range(3, 10))),
    *((lambda n=n: select(STATE, **SLOTS, state_tokens=n), ("state_tokens", n, 10))
      for n in (9, 11, 0)),
    (lambda: table_of(2**31, 4), IDS_OF_PRODUCER),
    (lambda: table_of(4, 2**40), IDS_OF_CONSUMER),
    (lambda: table_of(2**31, 2**40), IDS_OF_PRODUCER, IDS_OF_CONSUMER),
]  # fmt: skip


@pytest.mark.parametrize("case", UNFIT, ids=[str(number) for number in range(len(UNFIT))])
def test_two_sides_that_do_not_fit_are_a_mismatch(case: Any) -> None:
    """The error has the values of both sides: held and needed, or needed and the limit."""
    call, *expected = case
    assert expected == differences(refusal(call, kvspec.MismatchError))


def test_select_returns_the_last_id_of_the_largest_table() -> None:
    """A rank can prepare the rows of each table that can be built."""
    num_blocks = 2**31 - 1
    last = num_blocks - 1
    tables = {"producer_blocks": {"g": (last,)}, "consumer_blocks": {"g": (last,)}}
    table = table_of(num_blocks, num_blocks)
    ids = table.select(make_request(num_tokens=1, **tables))
    assert ([last], [last]) == tuple(side.tolist() for side in ids.ids)
    for rows in (table.producer_rows, table.consumer_rows):
        assert num_blocks == checked_rows(rows).total


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_table_rejects_cache_of_another_engine(side: str) -> None:
    """The difference is a mismatch between the plan and the cache."""
    other, _ = kvspec.allocate(engine(CROSS), RankId(), 2)
    caches = (other, CONSUMER) if side == "producer" else (PRODUCER, other)
    error = refusal(lambda: kvspec.build_table(PLAN, *caches), kvspec.MismatchError)
    assert [(f"{side}_cache.engine.groups[0].spec", FULL, CROSS)] == differences(error)


def test_mismatch_of_caches_names_the_innermost_field() -> None:
    """Two engines that shard the same units differently differ in the ranges of that sharding."""
    low, high = range(2), range(2, 4)
    producer_ids, consumer_ids = (
        engine(FULL, tp_size=2, shardings={4: sharding}) for sharding in ((low, high), (high, low))
    )
    caches = (
        kvspec.plan_memory(consumer_ids, RankId(), 2),
        kvspec.plan_memory(producer_ids, RankId(), 2),
    )
    plan = kvspec.plan_transfer(producer_ids, producer_ids)
    error = refusal(lambda: kvspec.build_table(plan, *caches), kvspec.MismatchError)
    field = "producer_cache.engine.parallel.shardings[4]"
    assert [(f"{field}[0]", low, high), (f"{field}[1]", high, low)] == differences(error)


def handmade(**changed: Any) -> object:
    """Build a table from regions with *changed* fields."""
    regions = tuple(attrs.evolve(region, **changed) for region in PRODUCER.regions)
    return kvspec.build_table(PLAN, attrs.evolve(PRODUCER, regions=regions), CONSUMER)


EXTENT = PRODUCER.regions[0].address_range
OVERLAPPING = kvspec.Memory(16, 16), kvspec.Memory(24, 16)
HANDMADE = [
    row(lambda: attrs.evolve(PRODUCER, memory=()),
        "regions['l.k']", EXTENT, "inside"),
    row(lambda: attrs.evolve(PRODUCER, memory=(kvspec.Memory(EXTENT.start, 8),)),
        "regions['l.k']", EXTENT, "inside"),
    row(lambda: attrs.evolve(PRODUCER, memory=(attrs.evolve(PRODUCER.memory[0], device=1),)),
        "regions['l.k']", EXTENT, "inside"),
    row(lambda: attrs.evolve(PRODUCER, memory=(kvspec.Memory(0, 8), *OVERLAPPING)),
        "memory", OVERLAPPING[1], "apart"),
    row(lambda: attrs.evolve(PRODUCER, regions=PRODUCER.regions[1:]), "regions", ["l.v"], "l.k"),
    row(lambda: handmade(layer="m"), "regions", "m.k"),
    row(lambda: handmade(group="h"), "regions['l.k'].group", "h"),
    row(lambda: handmade(units=True), "regions['l.k'].units", value=True, word=4),
    row(lambda: handmade(block_stride=-8), "regions['l.k'].block_stride", -8, 0),
    row(lambda: handmade(base=8.0), "regions['l.k'].base", 8.0, 0),
    row(lambda: attrs.evolve(PRODUCER, engine="e"), "engine", "e"),
    row(lambda: attrs.evolve(PRODUCER, regions=("k",)), "regions", "k"),
    row(lambda: PRODUCER.region("l", "z"), "region", "l.z"),
    row(lambda: attrs.evolve(PRODUCER, rank=RankId(tp=5)),
        "rank", RankId(tp=5)),
    *(row(lambda f=f, v=v: handmade(**{f: v}), f"regions['l.k'].{f}", v, right)
      for f, v, right in (("content_bytes", 8, 16), ("units", 1, 4), ("states", 2, 4))),
    row(lambda: handmade(num_blocks=-3), "regions['l.k'].num_blocks", -3, 1),
    row(lambda: handmade(num_blocks=0), "regions['l.k'].num_blocks", 0, 1),
    row(lambda: attrs.evolve(PRODUCER, regions=PRODUCER.regions * 2), "regions", "l.k", "once"),
]  # fmt: skip


@pytest.mark.parametrize(REJECTED, HANDMADE)
def test_handmade_cache_is_checked(
    call: Callable[[], object], field: str, value: object, word: object
) -> None:
    """Regions lie inside the given memory and equal the engine's own parts."""
    check_rejected(call, field, value, word)


@pytest.mark.parametrize(
    ("num_tokens", "cached"),
    [
        (14, 12),
        (16, 8),
        (23, 0),
        (16, 12),
        (15, 12),
        (23, 20),
    ],
)
def test_window_that_begins_inside_a_row_is_moved(num_tokens: int, cached: int) -> None:
    """The cached tokens end where the row begins, so the whole row may be written."""
    assert None is PAIRS[WINDOW].verify(make_request(num_tokens=num_tokens, cached_tokens=cached))


ACCEPTED: list[tuple[kvspec.LayerSpec, dict[str, Any], list[int], list[int]]] = [
    (FULL, {"cached_tokens": 10}, [], []),
    (FULL, {"cached_tokens": 99}, [], []),
    (FULL, {"num_tokens": 0, "consumer_blocks": {"g": ()}, "producer_blocks": {"g": ()}}, [], []),
    (FULL, {"cached_tokens": 4, "consumer_blocks": {"g": BlockTable((3, 4), 4)}}, [1, 2], [3, 4]),
    (FULL, {"cached_tokens": 4, "consumer_blocks": {"g": (-1, 4, 5)}}, [1, 2], [4, 5]),
    (FULL, {"producer_blocks": {"g": (0, 1, 2, 99)}}, [0, 1, 2], [3, 4, 5]),
    (FULL, {"producer_blocks": {"g": (2, 2, 1)}, "cached_tokens": 4}, [1, 2], [5, 4]),
    (FULL, {"producer_blocks": {"g": range(3), "other": (77,)}}, [0, 1, 2], [3, 4, 5]),
    (FULL, {"state_tokens": 9}, [0, 1, 2], [3, 4, 5]),
    (STATE, SLOTS | {"cached_tokens": 10, "state_tokens": 9}, [], []),
    (STATE, SLOTS | {"state_tokens": 10}, [1], [2]),
    (ROWS, {"cached_tokens": 8}, [1], [4]),
]


@pytest.mark.parametrize(("spec", "changes", "producer_ids", "consumer_ids"), ACCEPTED)
def test_select_ignores_entries_that_do_not_move(
    spec: kvspec.LayerSpec,
    changes: dict[str, Any],
    producer_ids: list[int],
    consumer_ids: list[int],
) -> None:
    """Dead, cached and foreign entries of a table do not matter, and a prefix may repeat."""
    selection = select(spec, **changes)
    assert {ids.dtype for ids in selection.ids} == {np.dtype(np.int32)}
    every = *selection.parts, *selection.end_parts
    blocks = {tuple(pair) for _, tiles in every for pair in tiles.block.T.tolist()}
    assert set(zip(producer_ids, consumer_ids, strict=True)) == blocks


BAD_REQUESTS: list[tuple[kvspec.LayerSpec, dict[str, Any]]] = [
    (FULL, {"consumer_blocks": {"g": (3, 4)}}), (FULL, {"producer_blocks": {"g": (3, 4)}}),
    (FULL, {"consumer_blocks": {"g": (3, 4, 6)}}), (FULL, {"consumer_blocks": {"g": (3, 3, 4)}}),
    (FULL, {"consumer_blocks": {}}), (STATE, SLOTS | {"state_tokens": 9}),
    (STATE, SLOTS | {"producer_blocks": {"g": (1, 2)}}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "changes"), BAD_REQUESTS)
def test_rejected_select_changes_nothing(spec: kvspec.LayerSpec, changes: dict[str, Any]) -> None:
    """After the error every byte is as before, and the table serves the next request."""
    pair = Pair.of(spec)
    good = make_request(**SLOTS if spec is STATE else BLOCKS)
    pair.storage[0][:] = np.arange(pair.storage[0].size) % 251
    before = [array.copy() for array in (*pair.storage, *pair.table.select(good).ids)]
    bad = make_request(**changes)
    for method in (pair.table.select, pair.table.descriptors):
        with pytest.raises(kvspec.KVSpecError):
            method(bad)
    after = [*pair.storage, *pair.table.select(good).ids]
    assert [array.tolist() for array in before] == [array.tolist() for array in after]
    assert len(after[-1]) > 0
    assert None is pair.verify(good)


@pytest.mark.parametrize(
    ("producer_ids", "consumer_ids", "replica_policy"),
    [
        ({"tp_size": 1}, {"tp_size": 2, "dcp_size": 2, "interleave_size": 4}, "spread"),
        ({"tp_size": 2}, {"tp_size": 1}, "stripe"),
    ],
)
def test_every_pair_rejects_a_block_that_is_read_twice(
    producer_ids: dict[str, int], consumer_ids: dict[str, int], replica_policy: Any
) -> None:
    """Different pairs of ranks may read the two places of the block."""
    four = attrs.evolve(LATENT, block_size=4)
    producer, consumer = (
        attrs.evolve(engine(four), parallel=kvspec.ParallelConfig(**sizes))
        for sizes in (producer_ids, consumer_ids)
    )
    plan = kvspec.plan_transfer(producer, consumer, replica_policy)
    request = builders.request(8, [0, 0], [0, 1])
    for rank in consumer.parallel.ranks:
        for source in plan.sources(rank):
            caches = (
                kvspec.allocate(side, of_side, 4)[0]
                for side, of_side in ((producer, source), (consumer, rank))
            )
            table = kvspec.build_table(plan, *caches)
            call = partial(table.select, request)
            check_rejected(call, "producer_blocks['g']", 0, "once")


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)])
def test_select_checks_every_block_of_a_long_range(sizes: tuple[int, int]) -> None:
    """Adjacent blocks of 4 are one chunk of the other side's block, and each is checked."""
    engines = [
        attrs.evolve(
            engine(attrs.evolve(FULL, block_size=size)),
            layout="LKBNHC" if size == 4 else "LBKHNC",
            parallel=kvspec.ParallelConfig(tp_size=4 if size == 4 else 2),
        )
        for size in sizes
    ]
    plan = kvspec.plan_transfer(*engines)
    caches = [kvspec.allocate(each, RankId(), 6)[0] for each in engines]
    table = kvspec.build_table(plan, *caches)
    tables = [{"g": (3, 4, 5, 6)} if size == 4 else {"g": (0,)} for size in sizes]
    request = builders.request(16, tables[0], tables[1])
    side = "producer" if sizes[0] == 4 else "consumer"
    check_rejected(lambda: table.select(request), f"{side}_blocks['g']", 6, 5)


def test_every_pair_of_ranks_refuses_a_prefix_that_ends_inside_a_row() -> None:
    """Only one of two context ranks has the row, but the other must not move its own rows."""
    spec = kvspec.MLAAttentionSpec(block_size=8, head_size=2, dtype="bfloat16", tokens_per_state=4)
    parallel = kvspec.ParallelConfig(tp_size=2, dcp_size=2, interleave_size=4)
    side = attrs.evolve(engine(spec), parallel=parallel)
    plan = kvspec.plan_transfer(side, side)
    request = make_request(cached_tokens=5, num_tokens=20)
    for edge in plan.edges:
        caches = (
            kvspec.plan_memory(side, rank, NUM_BLOCKS) for rank in (edge.producer, edge.consumer)
        )
        check_rejected(
            partial(kvspec.build_table(plan, *caches).select, request), "cached_tokens", 5
        )
