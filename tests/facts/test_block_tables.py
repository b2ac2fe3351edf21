"""Test block tables: null blocks, blocks of two groups, ids out of range and counts of tokens."""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
from builders import group
from builders import request as ask
from refused import refusal

import kvspec
from kvspec import RankId

WINDOW = kvspec.SlidingWindowSpec(
    block_size=32, total_num_kv_heads=2, head_size=32, dtype="float32", sliding_window=64
)
STATE = kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=2, dtype="bfloat16", block_size=32)
NUM_BLOCKS = 16
RANK = RankId()


def engine(null_block: int | None = 0, **groups: kvspec.LayerSpec) -> kvspec.EngineSpec:
    """Return an engine of one rank, and one layer for each of *groups*."""
    kv_groups = [group(spec, f"layer.{name}", name=name) for name, spec in groups.items()]
    return builders.engine(*kv_groups, null_block=null_block)


@attrs.frozen
class Pair:
    """Two engines of one rank with their caches, and the table between them."""

    plan: kvspec.TransferPlan
    caches: tuple[kvspec.RankCache, kvspec.RankCache]
    table: kvspec.DescriptorTable

    @staticmethod
    def of(
        producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, *, shared: bool = False
    ) -> Pair:
        """Return the pair. Its groups have one *shared* memory, or one memory each."""
        plan = kvspec.plan_transfer(producer, consumer)
        source, target = (
            kvspec.plan_memory(side, RANK, NUM_BLOCKS, shared=shared)
            for side in (producer, consumer)
        )
        return Pair(plan, (source, target), kvspec.build_table(plan, source, target))

    def ways(self, request: kvspec.TransferRequest) -> dict[str, Any]:
        """Return every function that moves or verifies *request*, by name."""
        caches = [{RANK: cache} for cache in self.caches]
        return {
            "select": lambda: self.table.select(request),
            "descriptors": lambda: self.table.descriptors(request),
            "verify": lambda: kvspec.verify(self.plan, *caches, request),
        }


def refusals(pair: Pair, request: kvspec.TransferRequest) -> dict[str, Any]:
    """Return the error that each way raises for *request*."""
    return {name: refusal(way, kvspec.KVSpecError) for name, way in pair.ways(request).items()}


def fact_of(error: Any) -> tuple[str, object]:
    """Return the field of an error and its value, or the wanted tokens if a mismatch."""
    if isinstance(error, kvspec.MismatchError):
        (mismatch,) = error.mismatches
        return mismatch.field, mismatch.consumer
    return error.field, error.value


def test_null_blocks_before_window_are_not_moved() -> None:
    """A window of 64 after 95 tokens needs tokens 32..94. vLLM's block 0 holds the others."""
    pair = Pair.of(engine(g=WINDOW), engine(g=WINDOW))
    request = ask(95, [0, 3, 5], [0, 7, 9])
    rows = pair.table.descriptors(request)
    for cache, addresses in zip(pair.caches, (rows[:, 0], rows[:, 1]), strict=True):
        blocks = {
            place[0]
            for region in cache.regions
            for address in addresses.tolist()
            if (place := region.locate(address)) is not None
        }
        assert blocks == ({3, 5} if cache is pair.caches[0] else {7, 9})
    assert pair.ways(request)["verify"]() is None


@pytest.mark.parametrize("null", [1, 5])
def test_null_blocks_of_two_engines_may_differ(null: int) -> None:
    """The consumer's null block is 1 or 5, and the producer's is 0."""
    pair = Pair.of(engine(0, g=WINDOW), engine(null, g=WINDOW))
    request = ask(160, [0, 0, 0, 3, 4], [null, null, null, 7, 8])
    assert pair.ways(request)["verify"]() is None


# Tokens 31..93 are live: the window of 64 includes the query at position 94.
NO_BLOCK = ("consumer_blocks['g']", 0)
DROPPED = ("producer_blocks['g']", range(31, 94))


@pytest.mark.parametrize(
    ("producer", "consumer", "fact", "tokens"),
    [
        ([0, 3, 4], [0, 7, 8], NO_BLOCK, "31..31"),
        ([2, 3, 4], [0, 7, 8], NO_BLOCK, "31..31"),
        ([0, 3, 4], [6, 7, 8], DROPPED, "31..31"),
        ([2, 3, 4], [6, 0, 0], NO_BLOCK, "32..93"),
        ([2, 0, 4], [6, 7, 8], DROPPED, "32..63"),
    ],
)
def test_live_token_in_null_block_is_rejected(
    producer: list[int], consumer: list[int], fact: tuple[str, object], tokens: str
) -> None:
    """Both sides must have a block for every live token. The error names the tokens without."""
    pair = Pair.of(engine(g=WINDOW), engine(g=WINDOW))
    errors = refusals(pair, ask(94, producer, consumer))
    for way in ("select", "descriptors"):
        assert fact == fact_of(errors[way])
        assert tokens in str(errors[way])
    sides = {"consumer_blocks['g']", "producer_blocks['g']"}
    assert all(fact_of(error)[0] in sides for error in errors.values())
    assert all("null" in str(error) for error in errors.values())


def test_state_in_null_block_is_rejected() -> None:
    """The table has the state's only slot, or several blocks with the state in the last one."""
    pair = Pair.of(engine(g=STATE), engine(g=STATE))
    dropped = ("producer_blocks['g']", range(93, 94))
    for slots, fact in (
        (([1], [0]), NO_BLOCK), (([0, 0, 3], [2, 1, 0]), NO_BLOCK),
        (([0], [1]), dropped), (([3, 1, 0], [0, 0, 1]), dropped),
    ):  # fmt: skip
        errors = refusals(pair, ask(94, *slots))
        assert dict.fromkeys(errors, fact) == {way: fact_of(errors[way]) for way in errors}
        assert all("93" in str(error) for error in errors.values())
    assert pair.ways(ask(94, [0, 0, 3], [0, 0, 1]))["verify"]() is None


def test_null_block_outside_pool_is_rejected() -> None:
    """The null block must be an id of the pool of 16 blocks."""
    for null in (-1, True, 16):
        error = refusal(lambda null=null: kvspec.allocate(engine(null, g=WINDOW), RANK, 16))
        assert ("null_block", null) == (error.field, error.value)
    split = attrs.evolve(engine(None, g=WINDOW).groups[0], kernel_block_size=8)
    # Each block is four kernel blocks, which do not make more ids of blocks.
    small = kvspec.EngineSpec(groups=(split,), null_block=16)
    error = refusal(lambda: kvspec.allocate(small, RANK, 16))
    assert ("null_block", 16) == (error.field, error.value)


def test_verify_finds_row_that_writes_null_block() -> None:
    """Another connector writes 128 bytes into the consumer's block 0."""
    pair = Pair.of(engine(g=WINDOW), engine(g=WINDOW))
    request = ask(95, [0, 3, 4], [0, 7, 8])
    row = [[pair.caches[0].regions[0].base, pair.caches[1].regions[0].base, 128]]
    rows = np.concatenate([pair.table.descriptors(request), np.array(row, np.uint64)])
    fault = kvspec.verify(
        pair.plan, {RANK: pair.caches[0]}, {RANK: pair.caches[1]}, request, {(RANK, RANK): rows}
    )
    assert fault is not None
    assert ("unwanted", 0) == (fault.kind, fault.block)


FULL = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=8, dtype="bfloat16")
LAST = kvspec.SlidingWindowSpec(
    block_size=4, total_num_kv_heads=2, head_size=8, dtype="bfloat16", sliding_window=5
)


def test_block_of_two_groups_is_rejected_on_consumer() -> None:
    """In one memory a block is written for one group only. The error names both groups."""
    both = engine(a=FULL, b=LAST)
    pair, separate = Pair.of(both, both, shared=True), Pair.of(both, both)
    same = {"a": [1, 2, 3], "b": [4, 5, 3]}
    source = {"a": [1, 2, 3], "b": [4, 5, 6]}
    for name, way in pair.ways(ask(12, source, same)).items():
        error = refusal(way)
        assert ("consumer_blocks['a']", 3) == (error.field, error.value), name
        assert "'b'" in str(error), name
    for name, way in separate.ways(ask(12, source, same)).items():
        assert name != "verify" or way() is None  # each group has its own memory
        way()


def test_block_that_moves_for_two_groups_is_rejected_on_producer() -> None:
    """A block of a shared memory holds the bytes of one group, so one of the tables is wrong."""
    both = engine(a=FULL, b=LAST)
    pair, separate = Pair.of(both, both, shared=True), Pair.of(both, both)
    target = {"a": [1, 2, 3], "b": [4, 5, 6]}
    same = ask(12, {"a": [1, 2, 3], "b": [4, 5, 3]}, target)
    for name, way in pair.ways(same).items():
        error = refusal(way)
        assert ("producer_blocks['a']", 3) == (error.field, error.value), name
        assert "'b'" in str(error), name
    descriptors = {(RANK, RANK): separate.table.descriptors(same)}
    caches = [{RANK: cache} for cache in pair.caches]
    for independent in (False, True):
        error = refusal(
            lambda independent=independent: kvspec.verify(
                pair.plan, *caches, same, descriptors, independent=independent
            )
        )
        assert ("producer_blocks['a']", 3) == (error.field, error.value)
    for name, way in separate.ways(same).items():
        assert name != "verify" or way() is None  # each group has its own memory
        way()


@pytest.mark.parametrize(
    ("tables", "cached", "null"),
    [
        ({"a": [1, 2, 3], "b": [1, 5, 6]}, 0, 0),
        ({"a": [1, 2, 3], "b": [3, 5, 6]}, 0, None),
        ({"a": [1, 2, 3], "b": [4, 5, 1]}, {"b": 12}, 0),
        ({"a": [1, 2, 3], "b": [4, 5, 1]}, {"a": 4}, 0),
        ({"a": [0, 2, 3], "b": [0, 5, 6]}, {"a": 4}, 0),
        ({"a": [1, 2, 3, 5], "b": [4, 6, 7, 2]}, 0, 0),
        ({"a": [1, 2, 3], "b": [1, 2, 3]}, 12, 0),
    ],
    ids=["dead", "dead, no null block", "cached", "cached in the other", "null", "later", "all"],
)
def test_block_that_moves_for_one_group_may_be_in_two_tables_of_producer(
    tables: dict[str, list[int]], cached: Any, null: int | None
) -> None:
    """The other group does not move the block: it is dead, cached, null, or of later tokens."""
    both = engine(null, a=FULL, b=LAST)
    pair = Pair.of(both, both, shared=True)
    target = {"a": [7, 8, 9], "b": [10, 11, 12]}
    request = ask(12, tables, target, cached_tokens=cached)
    for name, way in pair.ways(request).items():
        assert name != "verify" or way() is None
        way()


def test_block_of_excluded_group_may_be_in_two_tables_of_producer() -> None:
    """The group of a draft model moves nothing, so its table does not matter."""
    draft = group(LAST, "layer.b", name="b", excluded=("layer.b",))
    both = builders.engine(group(FULL, "layer.a", name="a"), draft, null_block=0)
    pair = Pair.of(both, both, shared=True)
    target = {"a": [7, 8, 9], "b": [10, 11, 12]}
    for way in pair.ways(ask(12, {"a": [1, 2, 3], "b": [1, 2, 3]}, target)).values():
        way()


def test_block_of_one_producer_group_may_be_read_for_two_consumer_groups() -> None:
    """The blocks are compared by the groups of the producer, which has both layers in one group."""
    whole = builders.engine(group(FULL, "layer.a", "layer.b", name="ab"), null_block=0)
    split = engine(a=FULL, b=FULL)
    pair = Pair.of(whole, split, shared=True)
    request = ask(12, {"ab": [1, 2, 3]}, {"a": [1, 2, 3], "b": [4, 5, 6]})
    assert pair.ways(request)["verify"]() is None
    back = Pair.of(split, whole, shared=True)
    request = ask(12, {"a": [1, 2, 3], "b": [4, 5, 2]}, {"ab": [1, 2, 3]})
    for way in back.ways(request).values():
        error = refusal(way)
        assert ("producer_blocks['a']", 2) == (error.field, error.value)


def test_step_rejects_block_of_two_groups_once_both_tables_have_it() -> None:
    """A producer's table may end at the last written token. Missing blocks are not compared."""
    both = engine(a=FULL, b=FULL)
    pair, target = Pair.of(both, both, shared=True), {"a": [7, 8, 9], "b": [10, 11, 12]}
    early = ask(12, {"a": [1], "b": [4]}, target)
    assert len(pair.table.select(early, tokens=range(4)))
    wrong = ask(12, {"a": [1, 2], "b": [4, 1]}, target)
    error = refusal(lambda: pair.table.select(wrong, tokens=range(8)))
    assert ("producer_blocks['a']", 1) == (error.field, error.value)


def test_freed_block_may_be_in_table_of_another_group() -> None:
    """A block before the first live token may already belong to another group."""
    both = engine(a=FULL, b=LAST)
    pair, tables = Pair.of(both, both, shared=True), {"a": [1, 2, 3], "b": [1, 5, 6]}
    source = {"a": [1, 2, 3], "b": [4, 5, 6]}
    assert pair.ways(ask(12, source, tables))["verify"]() is None
    caches = [{RANK: cache} for cache in pair.caches]
    for cached in (8, 12):  # The consumer had the block when it cached these tokens.
        request = ask(12, source, tables, cached_tokens={"b": cached})
        for independent in (False, True):
            assert kvspec.verify(pair.plan, *caches, request, independent=independent) is None
    tables["b"] = [4, 5, 1]
    error = refusal(pair.ways(ask(12, source, tables, cached_tokens={"b": 12}))["select"])
    assert ("consumer_blocks['a']", 1) == (error.field, error.value)
    assert "'b'" in str(error)
    assert pair.ways(ask(12, source, tables, cached_tokens=12))["verify"]() is None


def test_slot_of_state_must_not_be_block_of_another_group() -> None:
    """The state is in its group's only slot, or in the last of several blocks."""
    state = kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=2, dtype="bfloat16", block_size=4)
    state = attrs.evolve(state, page_size_padded=256)
    both = engine(a=attrs.evolve(FULL, page_size_padded=256), s=state)
    pair, valid = Pair.of(both, both, shared=True), {"a": [1, 2, 3], "s": [4]}
    for slot in ([2], [5, 6, 3]):
        tables = {"a": [1, 2, 3], "s": slot}
        for name in ("select", "descriptors"):
            error = refusal(pair.ways(ask(12, valid, tables))[name])
            assert ("consumer_blocks['a']", slot[-1]) == (error.field, error.value)
            assert "'s'" in str(error)
        for way in pair.ways(ask(12, tables, valid)).values():
            error = refusal(way)
            assert ("producer_blocks['a']", slot[-1]) == (error.field, error.value)
    fine = {"a": [1, 2, 3], "s": [2, 1, 4]}  # only the last block of the state moves
    assert pair.ways(ask(12, valid, fine))["verify"]() is None
    assert pair.ways(ask(12, fine, valid))["verify"]() is None


@pytest.mark.parametrize("split", [False, True])
def test_row_that_is_partly_cached_is_rejected_for_every_rank(*, split: bool) -> None:
    """Stage 0 has rows of four tokens and stage 1 has rows of one token.

    The producer has one group, or one for each layer.
    """
    specs = {
        f"l.{at}": builders.gqa(1, block_size=8, tokens_per_state=row)
        for at, row in enumerate((4, 1))
    }
    uniform = kvspec.UniformTypeKVCacheSpecs(specs=specs)
    groups = [group(spec, layer, name=layer) for layer, spec in specs.items()]
    producer = builders.engine(*groups) if split else builders.engine(uniform)
    consumer = builders.engine(uniform, pp_size=2)
    plan = kvspec.plan_transfer(producer, consumer)
    source = kvspec.plan_memory(producer, RANK, 4, 1 << 20)
    blocks = {name: [0, 1] for name in (specs if split else "g")}
    for rank in consumer.parallel.ranks:
        table = kvspec.build_table(plan, source, kvspec.plan_memory(consumer, rank, 4, 1 << 30))
        for cached in (4, 8, 16):
            assert table.descriptors(ask(16, blocks, [0, 1], cached_tokens=cached)).any() == (
                cached < 16
            )
        error = refusal(lambda: table.select(ask(16, blocks, [0, 1], cached_tokens=6)))  # noqa: B023
        assert ("cached_tokens", 6) == (error.field, error.value)


def engine_of_kernel_blocks(heads: int, layout: str = "LBHNC") -> kvspec.EngineSpec:
    """Return an engine whose blocks of 8 tokens are two kernel blocks each."""
    spec = kvspec.FullAttentionSpec(
        block_size=8, total_num_kv_heads=heads, head_size=2, dtype="uint8"
    )
    return builders.engine(group(spec, "l", kernel_block_size=4), layout=layout)


def assert_id_rejected(pair: Pair, block: int) -> None:
    """Check that every way rejects *block* on either side."""
    for side, tables in (("producer", ([block], [1])), ("consumer", ([1], [block]))):
        errors = refusals(pair, ask(8, *tables))
        fact = (f"{side}_blocks['g']", block)
        assert dict.fromkeys(errors, fact) == {way: fact_of(errors[way]) for way in errors}


def test_block_id_that_would_overflow_is_rejected() -> None:
    """Twice 2**62 + 3 does not fit into 64 bits, so its address would be that of block 3."""
    side = engine_of_kernel_blocks(1)
    pair, wrong = Pair.of(side, side), 2**62 + 3
    assert_id_rejected(pair, wrong)
    caches = ({RANK: pair.caches[0]}, {RANK: pair.caches[1]})
    for tables in (([wrong], [1]), ([1], [wrong])):
        fault = kvspec.verify(pair.plan, *caches, ask(8, *tables), {})
        assert fault is not None
        assert "missing" == fault.kind


@pytest.mark.parametrize("heads", [1, 2])
def test_first_id_after_pool_of_kernel_blocks_is_rejected(heads: int) -> None:
    """16 blocks are 32 kernel blocks, which are contiguous only with one head."""
    side = engine_of_kernel_blocks(heads)
    pair = Pair.of(side, side)
    assert_id_rejected(pair, 16)
    assert pair.ways(ask(8, [15], [15]))["verify"]() is None


def test_largest_position_moves_and_larger_one_is_rejected() -> None:
    """Positions are at most 2**62, so that sums of two positions fit into 64 bits."""
    pair, most = Pair.of(engine(None, g=LAST), engine(None, g=LAST)), 2**62
    tables = kvspec.BlockTable([1, 2], most - 8), kvspec.BlockTable([3, 4], most - 8)
    request = ask(most, *tables)
    assert pair.ways(request)["verify"]() is None
    fault = kvspec.verify(pair.plan, {RANK: pair.caches[0]}, {RANK: pair.caches[1]}, request, {})
    assert fault is not None
    assert ("missing", most - 4) == (fault.kind, fault.token)
    error = refusal(lambda: ask(most + 1, [1], [1]))
    assert ("num_tokens", most + 1) == (error.field, error.value)
    error = refusal(lambda: kvspec.BlockTable([1], most + 4))
    assert ("first_token", most + 4) == (error.field, error.value)


def test_single_count_of_cached_tokens_applies_to_prompt_only() -> None:
    """Sixteen cached tokens of the prompt do not mean cached tokens of the encoder."""
    cross = kvspec.CrossAttentionSpec(
        block_size=4, total_num_kv_heads=2, head_size=8, dtype="bfloat16"
    )
    pair = Pair.of(engine(a=FULL, x=cross), engine(a=FULL, x=cross))
    ids = {"a": [1, 2, 3, 4, 5], "x": [1, 2]}
    for cached, num_moved in ((16, 12), ({"a": 16, "x": 4}, 8), ({"a": 16, "x": 8}, 4)):
        request = ask(20, ids, ids, encoder_tokens=8, cached_tokens=cached)
        row = 2 * 2 * 8 * 2  # k and v, heads, elements, bytes
        assert num_moved * row == int(pair.table.descriptors(request)[:, 2].sum())
        assert pair.ways(request)["verify"]() is None
    request = ask(20, ids, ids, encoder_tokens=8, cached_tokens=16)
    assert (16, 0) == (request.hit("a", FULL), request.hit("x", cross))
    fault = kvspec.verify(
        pair.plan, {RANK: pair.caches[0]}, {RANK: pair.caches[1]},
        attrs.evolve(request, cached_tokens={"a": 20}), {},
    )  # fmt: skip
    assert fault is not None
    assert ("layer.x", 0) == (fault.layer, fault.token)


def test_window_and_full_attention_of_one_layer_move() -> None:
    """The consumer's spec determines the tokens that move. The producer must still hold them."""
    whole = builders.gqa(2, block_size=32, head_size=32, dtype="float32")
    more = attrs.evolve(WINDOW, extra_retained_tokens=40)
    row = 2 * 2 * 32 * 4  # k and v, heads, elements, bytes
    ids = [1, 2, 3, 4]
    for producer, consumer, num_moved in (
        (whole, WINDOW, 63),
        (more, WINDOW, 63),
        (WINDOW, more, 103),
    ):
        pair = Pair.of(engine(g=producer), engine(g=consumer))
        request = ask(128, ids, ids)
        assert num_moved * row == pair.table.descriptors(request)[:, 2].sum()
        assert pair.ways(request)["verify"]() is None
    pair = Pair.of(engine(g=WINDOW), engine(g=whole))
    assert pair.ways(ask(127, ids, ids))["verify"]() is None
    errors = refusals(pair, ask(127, [0, 0, 3, 4], ids))
    for error in errors.values():
        assert ("producer_blocks['g']", range(127)) == fact_of(error)
        assert "0.." in str(error)


def test_tables_that_kvspec_makes_do_not_use_null_block() -> None:
    """The tables of `kvspec run` begin after it, and `traffic` does not depend on it."""
    from kvspec.run.job import Job  # noqa: PLC0415 - an extra runs

    producer, consumer = engine(3, g=WINDOW), engine(None, g=WINDOW)
    job = Job(producer=producer, consumer=consumer, tokens=95, requests=2)
    assert {"g": 4} == {
        name: count - job.num_blocks("consumer")[name]
        for name, count in job.num_blocks("producer").items()
    }
    ids = np.concatenate([move.producer_blocks["g"].block_ids for move in job.moves])
    assert 3 < ids.min() <= ids.max() < job.num_blocks("producer")["g"]
    assert len(ids) == len(set(ids.tolist()))
    for null in (0, 1, 4, 99):
        plan = kvspec.plan_transfer(engine(null, g=FULL), engine(g=FULL))
        without = kvspec.plan_transfer(engine(None, g=FULL), engine(None, g=FULL))
        assert kvspec.traffic(without, 12).total == kvspec.traffic(plan, 12).total


@pytest.mark.parametrize("pool", [1_200, 5_000, 200_000])
@pytest.mark.parametrize("blocks", [900, 1_100])
def test_select_sorts_ids_of_long_shuffled_tables(pool: int, blocks: int) -> None:
    """The producer's ids ascend, and each keeps its place with its consumer's id."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=1, head_size=8, dtype="float32"
    )
    both = engine(None, full=spec)
    caches = [kvspec.plan_memory(both, RANK, pool, base << 40) for base in (1, 2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    shuffled = [np.random.default_rng(seed).permutation(pool)[:blocks] for seed in (3, 4)]
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=16 * blocks,
        producer_blocks={"full": shuffled[0]},
        consumer_blocks={"full": shuffled[1]},
    )
    order = np.argsort(shuffled[0])
    for expected, ids in zip(shuffled, table.select(request).ids, strict=True):
        assert np.array_equal(expected[order], ids)


def test_request_is_immutable() -> None:
    """It copies the mappings of the caller, because tables cache results by request."""
    both = engine(None, full=WINDOW)
    caches = [kvspec.plan_memory(both, RANK, NUM_BLOCKS, base << 40) for base in (1, 2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    cached, blocks = {"full": 32}, {"full": [3, 4]}
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=64,
        cached_tokens=cached,
        producer_blocks=blocks,
        consumer_blocks=blocks,
    )
    expected = table.select(request).consumer_ids.tolist()
    cached["full"], blocks["full"] = 0, [5, 6]
    for fresh in (request, attrs.evolve(request)):
        assert expected == table.select(fresh).consumer_ids.tolist()
    for tables in (request.cached_tokens, request.producer_blocks, request.consumer_blocks):
        with pytest.raises(TypeError, match="assignment"):
            tables["full"] = 0  # type: ignore[index]


def test_unwritten_ranges_leave_blocks_of_repeated_ids_alone() -> None:
    """The last two blocks of the table are behind the prompt. One id stands for both."""
    both = engine(None, full=WINDOW)
    caches = [kvspec.plan_memory(both, RANK, NUM_BLOCKS, base << 40) for base in (1, 2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    ids = [1, 2, 3, 6, 7, 8, 5, 5]  # The prompt of 176 tokens ends in block 8.
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=176,
        producer_blocks={"full": ids},
        consumer_blocks={"full": ids},
    )
    keys, _ = caches[1].regions  # Values lie beside the keys in each block.
    placeholder = keys.address(5, 0, 0)
    stop = placeholder + keys.block_stride
    for address, length in table.unwritten_ranges(request).tolist():
        assert address + length <= placeholder or stop <= address


@pytest.mark.parametrize("counts", [(4, 8), (8, 4)])
def test_unwritten_ranges_lie_inside_the_memory_of_each_layer(counts: tuple[int, int]) -> None:
    """Two layers of a group have different numbers of blocks. The prompt ends before block 3."""
    spec = kvspec.MLAAttentionSpec(block_size=1, head_size=4, dtype="uint8")
    both = builders.engine(spec, layers=("a", "b"))

    def cache(blocks: tuple[int, int]) -> kvspec.RankCache:
        places = list(zip("ab", (1000, 2000), blocks, strict=True))
        regions = [
            kvspec.Region(
                group="g", layer=layer, part="latent", base=base, num_blocks=count,
                block_stride=4, unit_stride=0, state_stride=0, content_bytes=4, units=1, states=1,
            )
            for layer, base, count in places
        ]  # fmt: skip
        return kvspec.RankCache(
            both, RANK, regions, [kvspec.Memory(base, 4 * count) for _, base, count in places]
        )

    table = kvspec.build_table(kvspec.plan_transfer(both, both), cache((8, 8)), cache(counts))
    request = ask(2, [0, 1], [0, 1, 3, 6])
    expected = [
        [base + 4 * block, 4]
        for base, count in zip((1000, 2000), counts, strict=True)
        for block in (3, 6)
        if block < count
    ]
    assert expected == table.unwritten_ranges(request).tolist()


@pytest.mark.parametrize(
    ("tokens", "cached", "ids", "expected"),
    [
        (4, 0, [2], [(2, 2)]),  # The third row of the state has no source.
        (4, 0, [2, 3], [(2, 2), (3, 0)]),  # A block behind the prompt has no state yet.
        (5, 0, [2, 3, 4], [(3, 2), (4, 0)]),
        (4, 4, [2, 3], [(3, 0)]),
        (4, 8, [2, 3, 4], [(4, 0)]),
        (4, 4, [2], []),
        (0, 0, [2], [(2, 0)]),  # No token has been seen, so nothing moves.
        (0, 0, [2, 3], [(2, 0), (3, 0)]),
        (0, 4, [2], []),
        (0, 0, [-1, 99, 5, 5], []),
    ],
)
def test_unwritten_ranges_have_rows_of_states_that_do_not_move(
    tokens: int, cached: int, ids: list[int], expected: list[tuple[int, int]]
) -> None:
    """Each entry is a block and its first unwritten row. The consumer has three rows of a byte."""
    sides = [
        builders.engine(
            kvspec.MambaSpec(
                state_parts=[
                    kvspec.Part(
                        name="conv_s", units=1, states=rows, content_bytes=1, tokens_per_state=0
                    )
                ],
                block_size=4,
            )
        )
        for rows in (2, 3)
    ]
    caches = [kvspec.plan_memory(side, RANK, NUM_BLOCKS, 1000) for side in sides]
    plan = kvspec.plan_transfer(sides[0], sides[1], common_states=True)
    table = kvspec.build_table(plan, *caches)
    ranges = table.unwritten_ranges(ask(tokens, [1] * len(ids), ids, cached_tokens=cached))
    bytes_ = [1000 + 3 * block + row for block, first in expected for row in range(first, 3)]
    assert bytes_ == [at for start, size in ranges.tolist() for at in range(start, start + size)]
