"""Refusals of requests, block tables and caches, by their words; and that nothing happens first.

What a request gets wrong about its own tables is a `SpecError`; tokens that the producer does not
hold, a state that has seen other tokens and caches of another engine are a `MismatchError`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from builders import engine
from refused import case, words

import kvspec
from kvspec import BlockTable, RankId

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
        (ours, mine), (theirs, yours) = sides
        mine["g"][:] = 7  # so that a copy would show
        table = kvspec.build_table(plan, ours, theirs)
        return Pair(plan, ours, theirs, table, (mine["g"], yours["g"]))

    def verify(self, request: kvspec.TransferRequest) -> kvspec.CounterExample | None:
        """Return what is wrong with the library's own descriptors of *request*."""
        return kvspec.verify(
            self.plan, {RankId(): self.producer}, {RankId(): self.consumer}, request
        )


PAIRS = {spec: Pair.of(spec) for spec in (FULL, CROSS, ROWS, WINDOW, STATE, STATES)}
PLAN, OURS, THEIRS = PAIRS[FULL].plan, PAIRS[FULL].producer, PAIRS[FULL].consumer


def ask(**given: Any) -> kvspec.TransferRequest:
    """Return a request of ten tokens in three blocks, with what is *given* instead."""
    base: dict[str, Any] = {"request_id": "r", "num_tokens": 10, **BLOCKS}
    return kvspec.TransferRequest(**base | given)


def select(spec: kvspec.LayerSpec = FULL, **given: Any) -> Any:
    """Return the ids that a request moves between two engines of *spec*."""
    return PAIRS[spec].table.select(ask(**given))


@pytest.mark.parametrize("value", ["", None, 3, b"r"])
def test_a_request_has_a_name(value: Any) -> None:
    """An id that is empty or no text is refused."""
    wanted = f"request_id={value!r}: expected a non-empty str"
    assert wanted == words(lambda: ask(request_id=value))


@pytest.mark.parametrize("name", ["num_tokens", "cached_tokens", "encoder_tokens", "state_tokens"])
def test_a_count_of_tokens_is_a_plain_int(name: str) -> None:
    """Negative, bool, float and text are no counts; None is one only where it means 'the same'."""
    bad: list[Any] = [
        -1,
        True,
        1.0,
        "3",
        *([None] if name in {"num_tokens", "cached_tokens"} else []),
    ]
    wanted = [f"{name}={value!r}: expected an int >= 0" for value in bad]
    assert wanted == [words(lambda v=value: ask(**{name: v})) for value in bad]


def test_a_cached_count_of_a_group_is_a_plain_int() -> None:
    """So is each of the counts by group."""
    bad: list[Any] = [-1, True, 1.0, "3", None]
    wanted = [f"cached_tokens={value!r}: expected an int >= 0" for value in bad]
    assert wanted == [words(lambda v=value: ask(cached_tokens={"g": v})) for value in bad]


def test_a_first_token_is_a_plain_int() -> None:
    """A table begins at a position."""
    bad: list[Any] = [-1, True, 1.0, "3", None]
    wanted = [f"first_token={value!r}: expected an int >= 0" for value in bad]
    assert wanted == [words(lambda v=value: BlockTable((1,), v)) for value in bad]


IDS: list[Any] = [
    (0.5,), (1, 2.0), (True, False), np.array([True]), np.array([1.0]), [[1, 2], [3, 4]],
    np.zeros((2, 2), int), "12", ("1",), (None,), (2**64,), (1, True), (7, False, 8), None, 5,
    [[1], [2, 3]], b"ab", {1, 2}, {1: 2}, (2**63,), np.array([2**63], np.uint64),
    np.ma.array([1, -5], mask=[False, True]),
]  # fmt: skip


@pytest.mark.parametrize("value", IDS)
def test_block_ids_are_plain_ints(value: Any) -> None:
    """Float, bool, text, two-dimensional and too wide ids are refused where the table is made."""
    wanted = f"block_ids={value!r}: expected a sequence of ints"
    assert wanted == words(lambda: BlockTable(value))
    assert wanted == words(lambda: ask(consumer_blocks={"g": value}))


@pytest.mark.parametrize("kind", [np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_block_ids_are_ints_of_any_type(kind: type[np.integer]) -> None:
    """An array of any width, with sign or without, is the same ids."""
    assert BlockTable((7, 0, 100)) == BlockTable(np.array([7, 0, 100], kind))  # type: ignore[arg-type]


def test_requests_are_values_that_hash() -> None:
    """Equal ones are one key."""
    assert 1 == len({ask(), ask()})
    assert 2 == len({BlockTable((1, 2)), BlockTable([1, 2]), BlockTable([2, 1])})


ONCE = "consumer_blocks['g']={}: expected each block once"
REFUSED = [
    # tables too short, too late, off a block's boundary
    case(lambda: select(consumer_blocks={"g": (3, 4)}),
         "consumer_blocks['g']=range(0, 8): expected blocks for tokens 0..9"),
    case(lambda: select(consumer_blocks={"g": ()}),
         "consumer_blocks['g']=range(0, 0): expected blocks for tokens 0..9"),
    case(lambda: select(consumer_blocks={"g": BlockTable((3, 4), 4)}),
         "consumer_blocks['g']=range(4, 12): expected blocks for tokens 0..9"),
    case(lambda: select(consumer_blocks={"g": (3,)}, cached_tokens=3),
         "consumer_blocks['g']=range(0, 4): expected blocks for tokens 3..9"),
    case(lambda: select(CROSS, encoder_tokens=14),
         "consumer_blocks['g']=range(0, 12): expected blocks for tokens 0..13"),
    case(lambda: select(cached_tokens=4, consumer_blocks={"g": BlockTable((3, 4), 2)}),
         "consumer_blocks['g'].first_token=2: expected a multiple of 4"),
    case(lambda: select(cached_tokens=4, producer_blocks={"g": BlockTable((1, 2), 3)}),
         "producer_blocks['g'].first_token=3: expected a multiple of 4"),
    # ids
    *(case(lambda s=side, i=i: select(**{s: {"g": (0, i, 2)}}),
           f"{side}['g']={i}: expected block ids from 0 to 5")
      for side in BLOCKS for i in (6, -1, 10**12)),
    *(case(lambda i=i: select(consumer_blocks={"g": i}), ONCE.format(i[-1]))
      for i in ((0, 1, 0), (4, 5, 5), (2, 2, 2))),
    case(lambda: select(cached_tokens=4, consumer_blocks={"g": (3, 4, 3)}), ONCE.format(3)),
    case(lambda: select(producer_blocks={"g": (1, 2, 1)}),
         "producer_blocks['g']=1: expected each block once"),
    # groups
    case(lambda: select(producer_blocks={"h": (0, 1, 2)}),
         "producer_blocks=['h']: expected a block table for group 'g'"),
    case(lambda: select(consumer_blocks={}),
         "consumer_blocks=[]: expected a block table for group 'g'"),
    case(lambda: select(cached_tokens={"h": 4}), "cached_tokens=['h']: expected groups of the "
         "consumer: g"),
    case(lambda: select(cached_tokens={0: 1, "b": 2}),
         "cached_tokens=['b', 0]: expected groups of the consumer: g"),
    case(lambda: select(producer_blocks={0: (1,), "a": (2,)}),
         "producer_blocks=['a', 0]: expected a block table for group 'g'"),
    *(case(lambda s=side, v=value: ask(**{s: v}),
           f"{side}={value!r}: expected a mapping from group names to block tables")
      for side in BLOCKS for value in (None, (1, 2))),
    # states
    *(case(lambda s=side, i=i: select(STATE, **SLOTS | {s: {"g": i}}),
           f"{side}['g']={list(i)}: expected one id, the state's slot, or a block for token 9")
      for side in SLOTS for i in ((1, 2), ())),
    *(case(lambda s=side, i=i: select(STATE, **SLOTS | {s: {"g": (i,)}}),
           f"{side}['g']={i}: expected block ids from 0 to 5")
      for side in SLOTS for i in (7, -2)),
    *(case(lambda s=side, t=table: select(STATES, **SLOTS | {s: {"g": t}}),
           f"{side}['g'].first_token=2: expected a multiple of 8")
      for side in SLOTS for table in (BlockTable((1, 2), 2), BlockTable((1,), 2))),
    *(case(lambda s=side: select(STATES, **SLOTS | {s: {"g": BlockTable((1,), 400)}}),
           f"{side}['g']=[1]: expected one id, the state's slot, or a block for token 9")
      for side in SLOTS),
    case(lambda: select(STATES, producer_blocks={"g": (1,)}, consumer_blocks={"g": (5, 5)}),
         ONCE.format(5)),
    # the encoder's tokens
    case(lambda: select(CROSS),
         "encoder_tokens=None: expected the number of encoder tokens, for cross attention"),
    # a row of several tokens cannot be written in part
    *(case(lambda c=c: select(ROWS, cached_tokens=c),
           f"cached_tokens={c}: expected a multiple of tokens_per_state=4") for c in (1, 5, 6, 9)),
    case(lambda: select(WINDOW, num_tokens=16, cached_tokens=15),
         "cached_tokens=15: expected a multiple of tokens_per_state=4"),
    # things of another type
    case(lambda: PAIRS[FULL].table.select("r"),  # type: ignore[arg-type]
         "request='r': expected a TransferRequest"),
    case(lambda: kvspec.build_table(None, OURS, THEIRS),  # type: ignore[arg-type]
         "plan=None: expected a TransferPlan"),
    case(lambda: kvspec.build_table(PLAN, None, THEIRS),  # type: ignore[arg-type]
         "producer_cache=None: expected a RankCache"),
    case(lambda: kvspec.build_table(PLAN, OURS, "c"),  # type: ignore[arg-type]
         "consumer_cache='c': expected a RankCache"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wanted"), REFUSED)
def test_a_wrong_request_is_refused_in_words(call: Callable[[], object], wanted: str) -> None:
    """Field, value and what was wanted are told, in these words."""
    assert wanted == words(call)


HELD = "producer_blocks['g']: held {}, expected {} (the producer's table does not hold tokens {})"
SEEN = (
    "state_tokens: producer {}, consumer {} "
    "(a recurrent state cannot be rewound: it must have seen exactly these tokens)"
)
IDS_ARE_INT32 = (
    "{} descriptors: needed {}, limit 2147483648 "
    "(descriptor ids are int32: use fewer blocks, or groups of fewer layers)"
)


def huge(num_blocks: int) -> kvspec.RankCache:
    """Return a cache of *num_blocks* blocks of one row of two bytes, without memory behind it."""
    region = kvspec.Region(
        group="g", layer="l", part="latent", base=64, num_blocks=num_blocks, block_stride=2,
        unit_stride=2, state_stride=2, content_bytes=2, units=1, states=1,
    )  # fmt: skip
    return kvspec.RankCache(engine(LATENT), RankId(), (region,), (kvspec.Memory(0, 2**62),))


def table_of(ours: int, theirs: int) -> kvspec.DescriptorTable:
    """Return the table of two caches with so many blocks, without memory behind them."""
    plan = kvspec.plan_transfer(engine(LATENT), engine(LATENT))
    return kvspec.build_table(plan, huge(ours), huge(theirs))


UNFIT = [
    case(lambda: select(producer_blocks={"g": (0, 1)}),
         HELD.format("range(0, 8)", "range(0, 10)", "8..9")),
    case(lambda: select(producer_blocks={"g": ()}),
         HELD.format("range(0, 0)", "range(0, 10)", "0..9")),
    case(lambda: select(producer_blocks={"g": BlockTable((1, 2), 4)}),
         HELD.format("range(4, 12)", "range(0, 10)", "0..3")),
    case(lambda: select(cached_tokens=3, producer_blocks={"g": (0, 1)}),
         HELD.format("range(0, 8)", "range(3, 10)", "8..9")),
    *(case(lambda n=n: select(STATE, **SLOTS, state_tokens=n), SEEN.format(n, 10))
      for n in (9, 11, 0)),
    case(lambda: table_of(2**31 + 1, 4), IDS_ARE_INT32.format("producer", 2**31 + 1)),
    case(lambda: table_of(4, 2**40), IDS_ARE_INT32.format("consumer", 2**40)),
    case(lambda: table_of(2**31 + 1, 2**40),
         "\n".join([IDS_ARE_INT32.format("producer", 2**31 + 1),
                    IDS_ARE_INT32.format("consumer", 2**40)])),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wanted"), UNFIT)
def test_two_sides_that_do_not_fit_are_refused_in_words(
    call: Callable[[], object], wanted: str
) -> None:
    """Both values and the reason are told, in these words."""
    assert wanted == words(call, kvspec.MismatchError)


@pytest.mark.parametrize(
    "num_blocks",
    [2**31 - 1, 2**31],
)
def test_the_last_id_of_an_int32_is_used(num_blocks: int) -> None:
    """Just as many ids as an int32 has are no fault; the last one is selected."""
    last = num_blocks - 1
    tables = {"producer_blocks": {"g": (last,)}, "consumer_blocks": {"g": (last,)}}
    ids = table_of(num_blocks, num_blocks).select(ask(num_tokens=1, **tables))
    assert ([last], [last]) == tuple(side.tolist() for side in ids)


@pytest.mark.parametrize("side", ["producer", "consumer"])
def test_a_cache_of_another_engine_is_refused(side: str) -> None:
    """What differs and the reason are told, before any row is made."""
    other, _ = kvspec.allocate(engine(CROSS), RankId(), 2)
    caches = (other, THEIRS) if side == "producer" else (OURS, other)
    why = "the cache was laid out for another engine than the plan's"
    wanted = f"{side}_cache.engine.groups[0].spec: plan {FULL!r}, cache {CROSS!r} ({why})"
    assert wanted == words(lambda: kvspec.build_table(PLAN, *caches), kvspec.MismatchError)


def test_the_innermost_difference_is_told() -> None:
    """Of two engines that shard one number of units differently: that sharding's ranges, each."""
    low, high = range(2), range(2, 4)
    one, other = (
        engine(FULL, tp_size=2, shardings={4: sharding}) for sharding in ((low, high), (high, low))
    )
    caches = kvspec.plan_memory(other, RankId(), 2), kvspec.plan_memory(one, RankId(), 2)
    plan = kvspec.plan_transfer(one, one)
    fault = words(lambda: kvspec.build_table(plan, *caches), kvspec.MismatchError)
    field = "producer_cache.engine.parallel.shardings[4]"
    assert fault.startswith(f"{field}[0]: plan {low!r}, cache {high!r} (")
    assert f"{field}[1]: plan {high!r}, cache {low!r} (" in fault


def handmade(**changed: Any) -> object:
    """Build a table with regions of which something is not the engine's."""
    regions = tuple(attrs.evolve(each, **changed) for each in OURS.regions)
    return kvspec.build_table(PLAN, attrs.evolve(OURS, regions=regions), THEIRS)


EXTENT = OURS.regions[0].extent
HANDMADE = [
    case(lambda: attrs.evolve(OURS, memory=()),
         f"regions['l.k']={EXTENT}: expected a region inside the memory given"),
    case(lambda: attrs.evolve(OURS, memory=(kvspec.Memory(EXTENT.start, 8),)),
         f"regions['l.k']={EXTENT}: expected a region inside the memory given"),
    case(lambda: attrs.evolve(OURS, memory=(attrs.evolve(OURS.memory[0], device=1),)),
         f"regions['l.k']={EXTENT}: expected a region inside the memory given"),
    case(lambda: attrs.evolve(OURS, regions=OURS.regions[1:]),
         "regions=['l.v']: expected a region for each part that tp0 has, l.k too"),
    case(lambda: handmade(layer="m"), "regions='m.k': expected parts of layers that tp0 has"),
    case(lambda: handmade(group="h"), "regions['l.k'].group='h': expected 'g', the layer's group"),
    case(lambda: handmade(units=True),
         "regions['l.k'].units=True: expected 4, as the engine's part has"),
    case(lambda: handmade(block_stride=-8),
         "regions['l.k'].block_stride=-8: expected an int >= 0"),
    case(lambda: handmade(base=8.0), "regions['l.k'].base=8.0: expected an int >= 0"),
    case(lambda: attrs.evolve(OURS, engine="e"), "engine='e': expected an EngineSpec"),
    case(lambda: attrs.evolve(OURS, regions=("k",)), "regions='k': expected a Region"),
    case(lambda: OURS.region("l", "z"), "region='l.z': expected a part of a layer that tp0 has"),
    case(lambda: attrs.evolve(OURS, rank=RankId(tp=5)),
         "rank=RankId(pp=0, pcp=0, tp=5): expected pp < 1, pcp < 1, tp < 1, none negative"),
    *(case(lambda f=f, v=v: handmade(**{f: v}),
           f"regions['l.k'].{f}={v}: expected {right}, as the engine's part has")
      for f, v, right in (("content_bytes", 8, 16), ("units", 1, 4), ("states", 2, 4))),
    case(lambda: handmade(num_blocks=-3), "regions['l.k'].num_blocks=-3: expected an int >= 1"),
    case(lambda: attrs.evolve(OURS, regions=OURS.regions * 2),
         "regions='l.k': expected each part of a layer once"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wanted"), HANDMADE)
def test_a_cache_made_by_hand_is_checked(call: Callable[[], object], wanted: str) -> None:
    """Regions lie inside the memory given and are the engine's own parts."""
    assert wanted == words(call)


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
def test_a_window_that_begins_inside_a_row_is_moved(num_tokens: int, cached: int) -> None:
    """What is cached ends where the row begins, so the whole row is free to be written."""
    assert None is PAIRS[WINDOW].verify(ask(num_tokens=num_tokens, cached_tokens=cached))


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


@pytest.mark.parametrize(("spec", "given", "ours", "theirs"), ACCEPTED)
def test_what_is_not_wanted_is_not_judged(
    spec: kvspec.LayerSpec, given: dict[str, Any], ours: list[int], theirs: list[int]
) -> None:
    """Dead, cached and foreign entries of a table do not matter, nor one prefix shared twice."""
    producer, consumer = select(spec, **given)
    assert producer.dtype == consumer.dtype == np.int32
    assert ours == producer[: len(ours)].tolist()
    assert theirs == consumer[: len(theirs)].tolist()
    assert bool(ours) == bool(len(producer))


BAD_REQUESTS: list[tuple[kvspec.LayerSpec, dict[str, Any]]] = [
    (FULL, {"consumer_blocks": {"g": (3, 4)}}), (FULL, {"producer_blocks": {"g": (3, 4)}}),
    (FULL, {"consumer_blocks": {"g": (3, 4, 6)}}), (FULL, {"consumer_blocks": {"g": (3, 3, 4)}}),
    (FULL, {"consumer_blocks": {}}), (STATE, SLOTS | {"state_tokens": 9}),
    (STATE, SLOTS | {"producer_blocks": {"g": (1, 2)}}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "given"), BAD_REQUESTS)
def test_nothing_happens_before_everything_is_checked(
    spec: kvspec.LayerSpec, given: dict[str, Any]
) -> None:
    """A refused select leaves every byte and the table as they were: the next one is right."""
    pair = Pair.of(spec)
    good = ask(**SLOTS if spec is STATE else BLOCKS)
    pair.storage[0][:] = np.arange(pair.storage[0].size) % 251
    before = [each.copy() for each in (*pair.storage, *pair.table.select(good))]
    bad = ask(**given)
    for method in (pair.table.select, pair.table.descriptors):
        with pytest.raises(kvspec.KVSpecError):
            method(bad)
    after = [*pair.storage, *pair.table.select(good)]
    assert [each.tolist() for each in before] == [each.tolist() for each in after]
    assert len(after[-1]) > 0
    assert None is pair.verify(good)


@pytest.mark.parametrize(
    ("ours", "theirs", "replica_policy"),
    [
        ({"tp_size": 1}, {"tp_size": 2, "dcp_size": 2, "interleave_size": 4}, "spread"),
        ({"tp_size": 2}, {"tp_size": 1}, "stripe"),
    ],
)
def test_a_block_read_twice_is_refused_by_every_pair(
    ours: dict[str, int], theirs: dict[str, int], replica_policy: Any
) -> None:
    """Also where the two places of the block are read by different pairs of ranks."""
    four = attrs.evolve(LATENT, block_size=4)
    producer, consumer = (
        attrs.evolve(engine(four), parallel=kvspec.ParallelConfig(**sizes))
        for sizes in (ours, theirs)
    )
    plan = kvspec.plan_transfer(producer, consumer, replica_policy)
    request = builders.request(8, [0, 0], [0, 1])
    for rank in consumer.parallel.ranks:
        for source in plan.sources(rank):
            caches = (
                kvspec.allocate(side, each, 4)[0]
                for side, each in ((producer, source), (consumer, rank))
            )
            table = kvspec.build_table(plan, *caches)
            told = words(lambda table=table: table.select(request))
            assert "producer_blocks['g']=0: expected each block once" == told


@pytest.mark.parametrize("sizes", [(4, 16), (16, 4)])
def test_every_block_of_a_long_range_is_checked(sizes: tuple[int, int]) -> None:
    """Blocks of 4 that follow each other are one chunk of the other side's block; all must be."""
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
    assert any(entry.rows.token_split.spans > 1 for entry in table.entries)
    tables = [{"g": (3, 4, 5, 6)} if size == 4 else {"g": (0,)} for size in sizes]
    request = builders.request(16, tables[0], tables[1])
    side = "producer" if sizes[0] == 4 else "consumer"
    told = words(lambda: table.select(request))
    assert f"{side}_blocks['g']=6: expected block ids from 0 to 5" == told


def held(pair: Pair) -> tuple[Any, Any]:
    """Return what `reference.copy` takes of both sides."""
    caches = (pair.producer, pair.consumer)
    ours, theirs = ({RankId(): (c, {"g": s})} for c, s in zip(caches, pair.storage, strict=True))
    return ours, theirs


def copy(spec: kvspec.LayerSpec = FULL, blocks: dict[str, Any] | None = None, **given: Any) -> None:
    """Copy by torch what a request moves, with what is *given* instead."""
    pytest.importorskip("torch")
    from kvspec.check import reference  # noqa: PLC0415 - torch

    ours, theirs = held(PAIRS[spec])
    base = {
        "plan": PAIRS[spec].plan,
        "producers": ours,
        "consumers": theirs,
        "request": ask(**blocks or {}),
    }
    reference.copy(**base | given)


HELD = "a mapping from RankId to (RankCache, storage)"
NOT_HELD = "producers[tp0]={}: expected (RankCache, storage) of that rank"


@pytest.mark.parametrize(
    ("call", "wanted"),
    [
        case(lambda: copy(plan=None), "plan=None: expected a TransferPlan"),
        case(lambda: copy(producers=None), f"producers=None: expected {HELD}"),
        case(lambda: copy(consumers=3), f"consumers=3: expected {HELD}"),
        case(lambda: copy(request=None), "request=None: expected a TransferRequest"),
        case(lambda: copy(producers={}), NOT_HELD.format(None)),
        case(lambda: copy(producers={RankId(): 3}), NOT_HELD.format(3)),
        case(lambda: copy(producers={RankId(): (1, 2)}), NOT_HELD.format((1, 2))),
        case(
            lambda: copy(producers={RankId(): (OURS, {})}),
            "producers[tp0]=[]: expected the bytes of group 'g' that the cache lies in",
        ),
        case(
            lambda: copy(consumers={RankId(): (THEIRS, {"g": PAIRS[FULL].storage[1][1:]})}),
            "consumers[tp0]=['g']: expected the bytes of group 'g' that the cache lies in",
        ),
        case(
            lambda: copy(consumers={RankId(): (THEIRS, {"g": [0]})}),
            "consumers[tp0]=['g']: expected the bytes of group 'g' that the cache lies in",
        ),
        case(
            lambda: copy(blocks={"producer_blocks": {}}),
            "producer_blocks=[]: expected a block table for group 'g'",
        ),
        case(
            lambda: copy(blocks={"consumer_blocks": {"x": [1, 2, 3]}}),
            "consumer_blocks=['x']: expected a block table for group 'g'",
        ),
        case(
            lambda: copy(blocks={"consumer_blocks": {"g": [1, -1, 2]}}),
            "consumer_blocks['g']=-1: expected block ids from 0 to 5",
        ),
        case(
            lambda: copy(blocks={"producer_blocks": {"g": [1, 2, 6]}}),
            "producer_blocks['g']=6: expected block ids from 0 to 5",
        ),
        case(
            lambda: copy(STATE, SLOTS | {"producer_blocks": {"g": [9]}}),
            "producer_blocks['g']=9: expected block ids from 0 to 5",
        ),
        case(
            lambda: copy(STATE, SLOTS | {"consumer_blocks": {"g": []}}),
            "consumer_blocks['g']=[]: expected one id, the state's slot, or a block for token 9",
        ),
        case(
            lambda: copy(blocks={"cached_tokens": {"x": 1}}),
            "cached_tokens=['x']: expected groups of the consumer: g",
        ),
    ],
)
def test_the_reference_refuses_in_words_before_it_writes(
    call: Callable[[], object], wanted: str
) -> None:
    """As `select` does: nothing is copied, and no id counts from the end."""
    before = [each.copy() for pair in PAIRS.values() for each in pair.storage]
    assert wanted == words(call)
    after = [each for pair in PAIRS.values() for each in pair.storage]
    assert all(np.array_equal(*each) for each in zip(before, after, strict=True))


@pytest.mark.parametrize("flat", [np.array("x"), np.array([None]), np.zeros(9, np.float32)])
def test_the_reference_takes_bytes_alone(flat: np.typing.NDArray[Any]) -> None:
    """An array of anything else is refused, and no error of torch's own comes through."""
    told = "consumers[tp0]=['g']: expected the bytes of group 'g' that the cache lies in"
    assert told == words(lambda: copy(consumers={RankId(): (THEIRS, {"g": flat})}))


def test_the_reference_takes_tensors_in_the_midst_of_a_storage() -> None:
    """Bytes are found where the cache lies, not where the tensor's storage begins."""
    torch = pytest.importorskip("torch")
    sides: list[tuple[kvspec.RankCache, Any]] = []
    for cache, flat in zip((OURS, THEIRS), PAIRS[FULL].storage, strict=True):
        inside = torch.zeros(len(flat) + 64, dtype=torch.uint8)[64:]
        by = inside.data_ptr() - cache.memory[0].address
        regions = [attrs.evolve(each, base=each.base + by) for each in cache.regions]
        memory = [attrs.evolve(each, address=each.address + by) for each in cache.memory]
        moved = attrs.evolve(cache, regions=regions, memory=memory)
        sides.append((moved, inside))
    (ours, source), (theirs, target) = sides
    source[:] = torch.arange(len(source)) % 251
    blocks = {"num_tokens": 12}
    held = {"producers": {RankId(): (ours, {"g": source})}}
    copy(blocks=blocks, **held, consumers={RankId(): (theirs, {"g": target})})
    wanted = torch.zeros(len(target), dtype=torch.uint8)
    table = kvspec.build_table(PAIRS[FULL].plan, ours, theirs)
    rows = table.descriptors(ask(**blocks)).astype(np.int64)
    rows[:, :2] -= [source.data_ptr(), target.data_ptr()]
    for start, place, length in rows.tolist():
        wanted[place : place + length] = source[start : start + length]
    assert torch.equal(wanted, target)


def test_the_reference_writes_no_group_before_all_are_right() -> None:
    """Of two groups the second has a wrong block: the first is not copied either."""
    groups = [kvspec.KVCacheGroup(name=name, layers=(name,), spec=FULL) for name in "gh"]
    side = kvspec.EngineSpec(groups=groups)
    ours, theirs = (kvspec.allocate(side, RankId(), NUM_BLOCKS) for _ in range(2))
    for flat in ours[1].values():
        flat[:] = 7
    request = ask(
        producer_blocks={"g": (0, 1, 2), "h": (0, 1, 2)},
        consumer_blocks={"g": (0, 1, 2), "h": (0, 1, 9)},
    )
    plan, held = kvspec.plan_transfer(side, side), ({RankId(): ours}, {RankId(): theirs})
    told = "consumer_blocks['h']=9: expected block ids from 0 to 5"
    assert told == words(lambda: kvspec.check.reference.copy(plan, *held, request))
    assert not any(flat.any() for flat in theirs[1].values())
