"""What a block table may say: null blocks, shared memory, ids, and whose tokens are counted."""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
from builders import group
from builders import request as ask
from refused import refusal, words

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
    made = [group(spec, f"layer.{name}", name=name) for name, spec in groups.items()]
    return builders.engine(*made, null_block=null_block)


@attrs.frozen
class Pair:
    """Two engines of one rank with their caches, and the table between them."""

    plan: kvspec.TransferPlan
    caches: tuple[kvspec.RankCache, kvspec.RankCache]
    storage: tuple[dict[str, Any], dict[str, Any]]
    table: kvspec.DescriptorTable

    @staticmethod
    def of(
        producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, *, shared: bool = False
    ) -> Pair:
        """Return the pair, with *shared* memory or a memory for each group."""
        plan = kvspec.plan_transfer(producer, consumer)
        (ours, mine), (theirs, yours) = (
            kvspec.allocate(each, RANK, NUM_BLOCKS, shared=shared) for each in (producer, consumer)
        )
        table = kvspec.build_table(plan, ours, theirs)
        return Pair(plan, (ours, theirs), (mine, yours), table)

    def ways(self, request: kvspec.TransferRequest) -> dict[str, Any]:
        """Return every way to move or to judge *request*."""
        held = [
            {RANK: (cache, storage)}
            for cache, storage in zip(self.caches, self.storage, strict=True)
        ]
        caches = [{RANK: cache} for cache in self.caches]
        return {
            "select": lambda: self.table.select(request),
            "descriptors": lambda: self.table.descriptors(request),
            "reference": lambda: kvspec.check.reference.copy(self.plan, *held, request),
            "verify": lambda: kvspec.verify(self.plan, *caches, request),
        }


def refusals(pair: Pair, request: kvspec.TransferRequest) -> dict[str, str]:
    """Return with which words each way refuses *request*."""
    return {name: words(way, kvspec.KVSpecError) for name, way in pair.ways(request).items()}


def test_a_window_that_has_passed_leaves_null_blocks_alone() -> None:
    """Of 95 tokens a window of 64 sees 32..94: vLLM's block 0 is neither read nor written."""
    pair = Pair.of(engine(g=WINDOW), engine(g=WINDOW))
    request = ask(95, [0, 3, 5], [0, 7, 9])
    moved = pair.table.descriptors(request)
    for cache, address in zip(pair.caches, (moved[:, 0], moved[:, 1]), strict=True):
        blocks = {
            place[0]
            for region in cache.regions
            for each in address.tolist()
            if (place := region.locate(each)) is not None
        }
        assert blocks == ({3, 5} if cache is pair.caches[0] else {7, 9})
    pair.storage[0]["g"][:] = 7
    for way in pair.ways(request).values():
        way()
    page = WINDOW.page_size_bytes()
    assert not pair.storage[1]["g"][:page].any()
    assert None is pair.ways(request)["verify"]()


@pytest.mark.parametrize("null", [1, 5])
def test_null_blocks_of_both_sides_may_differ(null: int) -> None:
    """Each engine says its own; one that stands once is no more a block than one that repeats."""
    pair = Pair.of(engine(0, g=WINDOW), engine(null, g=WINDOW))
    request = ask(160, [0, 0, 0, 3, 4], [null, null, null, 7, 8])
    assert None is pair.ways(request)["verify"]()


LIVE = "consumer_blocks['g']=0: expected a block for tokens 31..31, not the null block"
DROPPED = (
    "producer_blocks['g']: held 'null block 0', expected range(31, 94) "
    "(the producer's table has the null block for tokens 31..31)"
)


@pytest.mark.parametrize(
    ("producer", "consumer", "wanted"),
    [
        ([0, 3, 4], [0, 7, 8], LIVE),
        ([2, 3, 4], [0, 7, 8], LIVE),
        ([0, 3, 4], [6, 7, 8], DROPPED),
        ([2, 3, 4], [6, 0, 0], LIVE.replace("31..31", "32..93")),
        ([2, 0, 4], [6, 7, 8], DROPPED.replace("31..31", "32..63")),
    ],
)
def test_a_live_token_in_a_null_block_is_refused(
    producer: list[int], consumer: list[int], wanted: str
) -> None:
    """Of 94 tokens the window sees 31: the consumer must have a block for it, the producer too."""
    pair = Pair.of(engine(g=WINDOW), engine(g=WINDOW))
    said = refusals(pair, ask(94, producer, consumer))
    assert (wanted, wanted) == (said["select"], said["descriptors"])
    assert all("the null block" in each for each in said.values())
    assert not pair.storage[1]["g"].any()


def test_a_state_in_a_null_block_is_refused() -> None:
    """The slot of a state, of one or of several blocks, is not the null block."""
    pair = Pair.of(engine(g=STATE), engine(g=STATE))
    live = "consumer_blocks['g']=0: expected a block for tokens 93..93, not the null block"
    dropped = (
        "producer_blocks['g']: held 'null block 0', expected range(93, 94) "
        "(the producer's table has the null block for tokens 93..93)"
    )
    for slots, wanted in (
        (([1], [0]), live), (([0, 0, 3], [2, 1, 0]), live),
        (([0], [1]), dropped), (([3, 1, 0], [0, 0, 1]), dropped),
    ):  # fmt: skip
        said = refusals(pair, ask(94, *slots))
        assert dict.fromkeys(said, wanted) == said
    assert None is pair.ways(ask(94, [0, 0, 3], [0, 0, 1]))["verify"]()


def test_a_null_block_is_one_of_the_pool() -> None:
    """An id that no block has can be no block's: it was meant otherwise."""
    for null, wanted in (
        (-1, "null_block=-1: expected an int >= 0"),
        (True, "null_block=True: expected an int >= 0"),
        (16, "null_block=16: expected less than the 16 blocks of layer.g.k"),
    ):
        assert wanted == words(lambda n=null: kvspec.allocate(engine(n, g=WINDOW), RANK, 16))
    split = attrs.evolve(engine(None, g=WINDOW).groups[0], kernel_block_size=8)
    small = kvspec.EngineSpec(groups=(split,), null_block=16)  # four of a kernel's to a block
    assert wanted == words(lambda: kvspec.allocate(small, RANK, 16))


def test_a_descriptor_that_writes_a_null_block_is_a_fault() -> None:
    """`verify` finds what another connector writes there."""
    pair = Pair.of(engine(g=WINDOW), engine(g=WINDOW))
    request = ask(95, [0, 3, 4], [0, 7, 8])
    more = [[pair.caches[0].regions[0].base, pair.caches[1].regions[0].base, 128]]
    given = np.concatenate([pair.table.descriptors(request), np.array(more, np.uint64)])
    fault = kvspec.verify(
        pair.plan, {RANK: pair.caches[0]}, {RANK: pair.caches[1]}, request, {(RANK, RANK): given}
    )
    assert fault is not None
    assert ("unwanted", 0) == (fault.kind, fault.block)


FULL = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=8, dtype="bfloat16")
LAST = kvspec.SlidingWindowSpec(
    block_size=4, total_num_kv_heads=2, head_size=8, dtype="bfloat16", sliding_window=5
)


def test_groups_of_one_memory_share_no_block() -> None:
    """A block that is written for one group is no other group's; both groups are named."""
    both = engine(a=FULL, b=LAST)
    pair, separate = Pair.of(both, both, shared=True), Pair.of(both, both)
    same = {"a": [1, 2, 3], "b": [4, 5, 3]}
    mine = {"a": [1, 2, 3], "b": [4, 5, 6]}
    wanted = "consumer_blocks['a']=3: group 'b' shares this memory, so it must have other blocks"
    for name, way in pair.ways(ask(12, mine, same)).items():
        assert wanted == words(way), name
    for name, way in separate.ways(ask(12, mine, same)).items():
        assert name != "verify" or way() is None  # each group has its own memory
        way()


def test_block_that_moves_for_two_groups_is_refused_on_producer() -> None:
    """One block of a shared memory holds the bytes of one group, so that one table is wrong."""
    both = engine(a=FULL, b=LAST)
    pair, separate = Pair.of(both, both, shared=True), Pair.of(both, both)
    mine = {"a": [1, 2, 3], "b": [4, 5, 6]}
    same = ask(12, {"a": [1, 2, 3], "b": [4, 5, 3]}, mine)
    for name, way in pair.ways(same).items():
        error = refusal(way)
        assert ("producer_blocks['a']", 3) == (error.field, error.value), name
        assert "'b'" in str(error), name
    given = {(RANK, RANK): separate.table.descriptors(same)}
    caches = [{RANK: cache} for cache in pair.caches]
    for independent in (False, True):
        error = refusal(
            lambda independent=independent: kvspec.verify(
                pair.plan, *caches, same, given, independent=independent
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
def test_block_that_moves_for_one_group_may_stand_in_two_tables_of_producer(
    tables: dict[str, list[int]], cached: Any, null: int | None
) -> None:
    """The other group does not move the block: it is dead, cached, null, or for later tokens."""
    both = engine(null, a=FULL, b=LAST)
    pair = Pair.of(both, both, shared=True)
    mine = {"a": [7, 8, 9], "b": [10, 11, 12]}
    request = ask(12, tables, mine, cached_tokens=cached)
    for name, way in pair.ways(request).items():
        assert name != "verify" or way() is None
        way()


def test_block_of_excluded_group_may_stand_in_two_tables_of_producer() -> None:
    """A group of drafts moves nothing, so that its table does not matter."""
    draft = group(LAST, "layer.b", name="b", excluded=("layer.b",))
    both = builders.engine(group(FULL, "layer.a", name="a"), draft, null_block=0)
    pair = Pair.of(both, both, shared=True)
    mine = {"a": [7, 8, 9], "b": [10, 11, 12]}
    for way in pair.ways(ask(12, {"a": [1, 2, 3], "b": [1, 2, 3]}, mine)).values():
        way()


def test_blocks_are_compared_by_group_of_producer() -> None:
    """Two groups of the consumer may read one block that a producer's group of both has."""
    whole = builders.engine(group(FULL, "layer.a", "layer.b", name="ab"), null_block=0)
    split = engine(a=FULL, b=FULL)
    pair = Pair.of(whole, split, shared=True)
    request = ask(12, {"ab": [1, 2, 3]}, {"a": [1, 2, 3], "b": [4, 5, 6]})
    assert None is pair.ways(request)["verify"]()
    back = Pair.of(split, whole, shared=True)
    request = ask(12, {"a": [1, 2, 3], "b": [4, 5, 2]}, {"ab": [1, 2, 3]})
    for way in back.ways(request).values():
        error = refusal(way)
        assert ("producer_blocks['a']", 2) == (error.field, error.value)


def test_step_refuses_block_of_two_groups_once_both_tables_have_it() -> None:
    """A producer's table may end at what is written; what is missing is not compared."""
    both = engine(a=FULL, b=FULL)
    pair, mine = Pair.of(both, both, shared=True), {"a": [7, 8, 9], "b": [10, 11, 12]}
    early = ask(12, {"a": [1], "b": [4]}, mine)
    assert len(pair.table.select(early, tokens=range(4))[0])
    wrong = ask(12, {"a": [1, 2], "b": [4, 1]}, mine)
    error = refusal(lambda: pair.table.select(wrong, tokens=range(8)))
    assert ("producer_blocks['a']", 1) == (error.field, error.value)


def test_blocks_that_were_given_back_are_not_judged() -> None:
    """Before the first live token a table may name what is another group's by now."""
    both = engine(a=FULL, b=LAST)
    pair, tables = Pair.of(both, both, shared=True), {"a": [1, 2, 3], "b": [1, 5, 6]}
    ours = {"a": [1, 2, 3], "b": [4, 5, 6]}
    assert None is pair.ways(ask(12, ours, tables))["verify"]()
    tables["b"] = [4, 5, 1]
    assert "group 'b'" in words(pair.ways(ask(12, ours, tables, cached_tokens={"b": 12}))["select"])
    assert None is pair.ways(ask(12, ours, tables, cached_tokens=12))["verify"]()


def test_the_slot_of_a_state_is_no_other_groups_block() -> None:
    """So it is where one of the groups holds a state, in its only slot or in one of its blocks."""
    state = kvspec.MambaSpec.short_conv(
        conv_dim=4, conv_kernel=2, dtype="bfloat16", block_size=4, page_size_padded=256
    )
    both = engine(a=attrs.evolve(FULL, page_size_padded=256), s=state)
    pair, fine = Pair.of(both, both, shared=True), {"a": [1, 2, 3], "s": [4]}
    for slot in ([2], [5, 6, 3]):
        request = ask(12, fine, {"a": [1, 2, 3], "s": slot})
        for name in ("select", "descriptors", "reference"):
            assert "group 's' shares this memory" in words(pair.ways(request)[name])
    assert None is pair.ways(ask(12, fine, {"a": [1, 2, 3], "s": [2, 1, 4]}))["verify"]()
    for slot in ([2], [5, 6, 3]):
        for way in pair.ways(ask(12, {"a": [1, 2, 3], "s": slot}, fine)).values():
            error = refusal(way)
            assert ("producer_blocks['a']", slot[-1]) == (error.field, error.value)
    assert None is pair.ways(ask(12, {"a": [1, 2, 3], "s": [2, 1, 4]}, fine))["verify"]()


def test_an_id_that_would_wrap_is_no_block() -> None:
    """2**62 + 3 times two kernel blocks is 6 in 64 bits: no way takes it for block 3."""
    spec = kvspec.FullAttentionSpec(block_size=8, total_num_kv_heads=1, head_size=2, dtype="uint8")
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec, kernel_block_size=4)
    one = kvspec.EngineSpec(groups=(group,))
    pair, wrong = Pair.of(one, one), 2**62 + 3
    pair.storage[0]["g"][:] = 7
    for side, tables in (("producer", ([wrong], [1])), ("consumer", ([1], [wrong]))):
        said = refusals(pair, ask(8, *tables))
        wanted = f"{side}_blocks['g']={wrong}: expected block ids from 0 to 15"
        assert dict.fromkeys(said, wanted) == said
        nothing: Any = {}
        caches = ({RANK: pair.caches[0]}, {RANK: pair.caches[1]})
        fault = kvspec.verify(pair.plan, *caches, ask(8, *tables), nothing)
        assert fault is not None
        assert "missing" == fault.kind
    assert not pair.storage[1]["g"].any()


@pytest.mark.parametrize("heads", [1, 2])
def test_the_first_id_beyond_a_pool_of_kernel_blocks_is_no_block(heads: int) -> None:
    """16 blocks are 32 in memory, which lie like rows of one block, or apart by heads."""
    spec = kvspec.FullAttentionSpec(
        block_size=8, total_num_kv_heads=heads, head_size=2, dtype="uint8"
    )
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec, kernel_block_size=4)
    one = kvspec.EngineSpec(groups=(group,), layout="LBHNC")
    pair = Pair.of(one, one)
    for side, tables in (("producer", ([16], [1])), ("consumer", ([1], [16]))):
        said = refusals(pair, ask(8, *tables))
        wanted = f"{side}_blocks['g']=16: expected block ids from 0 to 15"
        assert dict.fromkeys(said, wanted) == said
    assert None is pair.ways(ask(8, [15], [15]))["verify"]()


def test_positions_end_where_their_sums_still_fit() -> None:
    """A window that ends at the greatest position moves, and a greater one is refused."""
    pair, most = Pair.of(engine(None, g=LAST), engine(None, g=LAST)), 2**62
    tables = kvspec.BlockTable([1, 2], most - 8), kvspec.BlockTable([3, 4], most - 8)
    assert None is pair.ways(ask(most, *tables))["verify"]()
    missing = kvspec.verify(
        pair.plan, {RANK: pair.caches[0]}, {RANK: pair.caches[1]}, ask(most, *tables), {}
    )
    assert (most - 4, "missing") == (
        getattr(missing, "token", None),
        getattr(missing, "kind", None),
    )
    wanted = "expected at most 4611686018427387904"
    assert f"num_tokens={most + 1}: {wanted}" == words(lambda: ask(most + 1, [1], [1]))
    late = f"first_token={most + 4}: {wanted}"
    assert late == words(lambda: kvspec.BlockTable([1], most + 4))


def test_one_cached_count_is_of_the_prompt() -> None:
    """Of an encoder's eight tokens none is cached because sixteen of the prompt are."""
    cross = kvspec.CrossAttentionSpec(
        block_size=4, total_num_kv_heads=2, head_size=8, dtype="bfloat16"
    )
    pair = Pair.of(engine(a=FULL, x=cross), engine(a=FULL, x=cross))
    ids = {"a": [1, 2, 3, 4, 5], "x": [1, 2]}
    for cached, moved in ((16, 12), ({"a": 16, "x": 4}, 8), ({"a": 16, "x": 8}, 4)):
        request = ask(20, ids, ids, encoder_tokens=8, cached_tokens=cached)
        row = 2 * 2 * 8 * 2  # k and v, heads, elements, bytes
        assert moved * row == int(pair.table.descriptors(request)[:, 2].sum())
        assert None is pair.ways(request)["verify"]()
    request = ask(20, ids, ids, encoder_tokens=8, cached_tokens=16)
    nothing = kvspec.verify(
        pair.plan, {RANK: pair.caches[0]}, {RANK: pair.caches[1]},
        attrs.evolve(request, cached_tokens={"a": 20}), {},
    )  # fmt: skip
    assert nothing is not None
    assert ("layer.x", 0) == (nothing.layer, nothing.token)


def test_an_engine_may_keep_a_window_as_full_attention() -> None:
    """What the consumer reads of a layer moves; what the producer dropped, its table says."""
    whole = builders.gqa(2, block_size=32, head_size=32, dtype="float32")
    more = attrs.evolve(WINDOW, extra_retained_tokens=40)
    row = 2 * 2 * 32 * 4  # k and v, heads, elements, bytes
    ids = [1, 2, 3, 4]
    for ours, theirs, moved in ((whole, WINDOW, 64), (more, WINDOW, 64), (WINDOW, more, 128)):
        pair = Pair.of(engine(g=ours), engine(g=theirs))
        request = ask(128, ids, ids)  # whole blocks move
        assert moved * row == pair.table.descriptors(request)[:, 2].sum()
        assert None is pair.ways(request)["verify"]()
    pair = Pair.of(engine(g=WINDOW), engine(g=whole))
    assert None is pair.ways(ask(127, ids, ids))["verify"]()
    said = refusals(pair, ask(127, [0, 0, 3, 4], ids))
    assert all("the null block for tokens 0.." in each for each in said.values())


def test_what_kvspec_itself_asks_for_uses_no_null_block() -> None:
    """A run's tables begin after it, and counting descriptors goes around it."""
    from kvspec.run.job import Job  # noqa: PLC0415 - an extra runs

    ours, theirs = engine(3, g=WINDOW), engine(None, g=WINDOW)
    job = Job(producer=ours, consumer=theirs, tokens=95, requests=2)
    assert {"g": 4} == {
        name: count - job.num_blocks("consumer")[name]
        for name, count in job.num_blocks("producer").items()
    }
    ids = np.concatenate([each.producer_blocks["g"].block_ids for each in job.moves])
    assert 3 < ids.min() <= ids.max() < job.num_blocks("producer")["g"]
    assert len(ids) == len(set(ids.tolist()))
    for null in (0, 1, 4, 99):
        plan = kvspec.plan_transfer(engine(null, g=FULL), engine(g=FULL))
        without = kvspec.plan_transfer(engine(None, g=FULL), engine(None, g=FULL))
        assert kvspec.traffic(without, 12).total == kvspec.traffic(plan, 12).total


@pytest.mark.parametrize("pool", [1_200, 5_000, 200_000])
@pytest.mark.parametrize("blocks", [900, 1_100])
def test_ids_of_a_long_shuffled_table_ascend(pool: int, blocks: int) -> None:
    """However many, near or far: each pair stays one, and the producer's ids are in order."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=1, head_size=8, dtype="float32"
    )
    both = engine(None, full=spec)
    caches = [kvspec.plan_memory(both, RANK, pool, base << 40) for base in (1, 2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    drawn = [np.random.default_rng(seed).permutation(pool)[:blocks] for seed in (3, 4)]
    asked = kvspec.TransferRequest(
        request_id="r",
        num_tokens=16 * blocks,
        producer_blocks={"full": drawn[0]},
        consumer_blocks={"full": drawn[1]},
    )
    order = np.argsort(drawn[0])
    for expected, ids in zip(drawn, table.select(asked), strict=True):
        assert np.array_equal(expected[order], ids)


def test_a_request_never_changes() -> None:
    """Not when what it was made of does, nor if told to: tables remember what they found."""
    both = engine(None, full=WINDOW)
    caches = [kvspec.plan_memory(both, RANK, NUM_BLOCKS, base << 40) for base in (1, 2)]
    table = kvspec.build_table(kvspec.plan_transfer(both, both), *caches)
    cached, blocks = {"full": 32}, {"full": [3, 4]}
    asked = kvspec.TransferRequest(
        request_id="r",
        num_tokens=64,
        cached_tokens=cached,
        producer_blocks=blocks,
        consumer_blocks=blocks,
    )
    expected = table.select(asked)[1].tolist()
    cached["full"], blocks["full"] = 0, [5, 6]
    for fresh in (asked, attrs.evolve(asked)):
        assert expected == table.select(fresh)[1].tolist()
    for held in (asked.cached_tokens, asked.producer_blocks, asked.consumer_blocks):
        with pytest.raises(TypeError, match="item assignment"):
            held["full"] = 0  # type: ignore[index]
