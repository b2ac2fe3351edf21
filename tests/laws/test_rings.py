"""Rings: the row of a position is the position modulo the rows of the ring.

The laws judge rings with all other kinds. Here they judge them alone, beside other groups, and with
all pairs of TP sizes. The rows of `BY_HAND` were worked out by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
import numpy as np
import pytest
from builders import case, engine, group, mla, request
from hypothesis import given

import kvspec
from kvspec.draw import plan_svg, table_svg
from kvspec.testing import Case, laws, strategies
from kvspec.testing.laws import KVSPEC, LAWS
from kvspec.testing.world import ByteCopy, World, world

OF_BYTES = [law for law in LAWS if law.number in {1, 4, 5, 8, 9, 10, 11, 13}]
# compress_ratio, overlap, tokens of the prompt, live positions, and pairs of (rows, rows used).
BY_HAND: list[Any] = [
    (2, False, 7, [6], {8: [6], 16: [6], 1: [0]}),
    (2, False, 8, [], {8: [], 16: []}),
    (4, True, 10, [*range(4, 10)], {8: [4, 5, 6, 7, 0, 1], 16: [*range(4, 10)]}),
    (4, True, 8, [4, 5, 6, 7], {8: [4, 5, 6, 7], 7: [4, 5, 6, 0]}),
    (4, True, 3, [0, 1, 2], {8: [0, 1, 2], 16: [0, 1, 2]}),
    (16, False, 70, [*range(64, 70)], {16: [*range(6)], 48: [*range(16, 22)]}),
    (8, False, 23, [*range(16, 23)], {7: [2, 3, 4, 5, 6, 0, 1], 11: [5, 6, 7, 8, 9, 10, 0]}),
    (3, True, 1000, [*range(996, 1000)], {5: [1, 2, 3, 4], 6: [0, 1, 2, 3]}),
    (2, False, 0, [], {8: []}),
]


def ring(rows: int = 8, ratio: int = 4, **fields: Any) -> kvspec.CircularBufferSpec:
    """Return a ring whose rows have 4 bytes."""
    sizes: dict[str, Any] = {"head_size": 4, "dtype": "uint8", "compress_ratio": ratio}
    return kvspec.CircularBufferSpec(block_size=rows, **sizes | fields)


def moved(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, tokens: int, **more: Any
) -> Case:
    """Return the case of a request whose ring is block 2 of the producer and 1 of the consumer."""
    return case(producer, consumer, request(tokens, [2], [1], **more))


@pytest.mark.parametrize(("ratio", "overlap", "tokens", "live", "rows"), BY_HAND)
def test_ring_moves_live_positions_between_their_rows(
    ratio: int, overlap: bool, tokens: int, live: list[int], rows: dict[int, list[int]]
) -> None:
    """Each pair of numbers of rows is a producer and a consumer."""
    for own, sources in rows.items():
        assert live == [*ring(own, ratio, overlap=overlap).live_tokens(tokens)]
        for other, targets in rows.items():
            here = world(
                moved(*(engine(ring(n, ratio, overlap=overlap)) for n in (own, other)), tokens)
            )
            table = here.table(kvspec.RankId(), kvspec.RankId())
            bases = here.producers[kvspec.RankId()][0].memory[0].address + 2 * own * 4
            to = here.consumers[kvspec.RankId()][0].memory[0].address + 1 * other * 4
            copies = table.descriptors(here.case.request).astype(np.int64)
            found = [
                ((source - bases) // 4 + row, (target - to) // 4 + row)
                for source, target, length in copies.tolist()
                for row in range(length // 4)
            ]
            assert sorted(zip(sources, targets, strict=True)) == sorted(found)
            unwritten = table.unwritten_ranges(here.case.request).astype(np.int64).tolist()
            free = {(at - to) // 4 + row for at, size in unwritten for row in range(size // 4)}
            assert {*range(other)} - {*targets} == free
            assert {} == table.complete_blocks(here.case.request)
            assert [] == laws.broken(KVSPEC, here.case)
            assert None is kvspec.verify(here.plan, *caches(here), here.case.request)


def caches(here: World) -> Iterator[dict[kvspec.RankId, kvspec.RankCache]]:
    """Yield the caches of both sides."""
    for side in (here.producers, here.consumers):
        yield {rank: cache for rank, (cache, _) in side.items()}


@pytest.mark.parametrize("producer", [1, 2, 3, 4])
@pytest.mark.parametrize("consumer", [1, 2, 3, 4])
def test_ring_is_replicated_on_all_ranks(producer: int, consumer: int) -> None:
    """Neither TP nor context ranks divide a ring of two heads, and every rank receives all."""
    sizes = ({"dcp_size": producer}, {"pcp_size": 2})
    tps = producer, consumer
    sides = [
        engine(group(ring(rows, num_kv_heads=2, overlap=True)), tp=tp, **more)
        for rows, tp, more in zip((8, 16), tps, sizes, strict=True)
    ]
    here = world(moved(sides[0], sides[1], 10))
    for target in here.consumers:
        tables = [here.table(source, target) for source in here.producers]
        rows = [table.descriptors(here.case.request)[:, 2].sum() for table in tables]
        assert [6 * 2 * 4] == [nbytes for nbytes in rows if nbytes]
    assert [] == laws.broken(KVSPEC, here.case)


@pytest.mark.slow
@given(strategies.twins(["ring"]))
def test_rings_keep_the_laws(twins: tuple[Case, Case]) -> None:
    """Rings of any sizes, between engines of any ranks."""
    assert [] == laws.broken(KVSPEC, *twins)


@pytest.mark.slow
@given(
    strategies.cases(["ring", "MLA", "sliding window MLA", "short conv"])
    | strategies.sharing_cases(["ring", "MLA", "sliding window"])
)
def test_rings_beside_other_groups_keep_the_laws(one: Case) -> None:
    """Rings lie beside the groups of their models, perhaps in one memory."""
    assert [] == laws.broken(KVSPEC, one, of=OF_BYTES)
    here = world(one)
    assert None is kvspec.verify(here.plan, *caches(here), one.request, independent=True)


@pytest.mark.parametrize("tokens", [9, 10, 13, 22])
def test_laws_find_a_ring_that_moves_by_index(tokens: int) -> None:
    """A connector that copies row i to row i breaks law 1, also if it copies the whole ring."""

    def by_index(here: World, producer: kvspec.RankId, consumer: kvspec.RankId) -> list[ByteCopy]:
        source, target = (
            side[rank][0].memory[0].address
            for side, rank in ((here.producers, producer), (here.consumers, consumer))
        )
        return [(source + 2 * 8 * 4, target + 1 * 16 * 4, 8 * 4)]

    wrong = laws.System(name="by index", descriptors=by_index)
    one = moved(engine(ring(8, overlap=True)), engine(ring(16, overlap=True)), tokens)
    assert 1 in {law.number for law, _ in laws.broken(wrong, one)}
    assert [] == laws.broken(KVSPEC, one)


@pytest.mark.parametrize("rows", [(8, 16), (16, 8), (8, 8)])
def test_common_states_never_move_a_ring_by_index(rows: tuple[int, int]) -> None:
    """An engine without drafts sets `common_states` for the conv states of the same model."""
    state = kvspec.MambaSpec.short_conv(conv_dim=2, conv_kernel=3, dtype="uint8")
    more = kvspec.MambaSpec.short_conv(
        conv_dim=2, conv_kernel=3, dtype="uint8", num_speculative_tokens=2
    )
    sides = [
        engine(ring(own, overlap=True), own_state)
        for own, own_state in zip(rows, (state, more), strict=True)
    ]
    tables: Any = {"g0": [2], "g1": [1]}
    one = case(sides[0], sides[1], request(10, tables, tables), common_states=True)
    assert [] == laws.broken(KVSPEC, one)
    (ranges,) = (edge.slices for edge in world(one).plan.edges if edge.group == "g0")
    assert ("ring",) == ranges[0].parts


@pytest.mark.parametrize("cached", [0, 4, 8, {"g0": 9}, {"g1": 8, "g0": 8}])
def test_cached_prefix_never_replaces_a_ring(cached: Any) -> None:
    """The rows before a cached token move as well, since no prefix cache has them."""
    side = engine(mla(block_size=4, head_size=2), ring(overlap=True))
    tables: Any = {"g0": [2, 1, 0], "g1": [1]}
    one = case(side, side, request(10, tables, tables, cached_tokens=cached))
    assert [] == laws.broken(KVSPEC, one)
    here = world(one)
    table = here.table(kvspec.RankId(), kvspec.RankId())
    region = table.consumer.region("g1.l", "ring")
    rows = table.descriptors(one.request).astype(np.int64)
    inside = (rows[:, 1] >= region.base) & (rows[:, 1] < region.base + 2 * 32)
    assert 6 * 4 == rows[inside, 2].sum()


@pytest.mark.parametrize("cached", [9, 10, 3, {"g": 2}])
def test_cached_prefix_that_ends_inside_a_group_is_refused(cached: Any) -> None:
    """The engine that cached the prefix had the rest of the group in its ring."""
    side = engine(ring())
    here = world(moved(side, side, 10))
    asked = request(10, [2], [1], cached_tokens=cached)
    table = here.table(kvspec.RankId(), kvspec.RankId())
    for ask in (
        table.select,
        lambda asked: kvspec.verify(here.plan, *caches(here), asked),
        lambda asked: kvspec.verify(here.plan, *caches(here), asked, independent=True),
        lambda asked: kvspec.verify(here.plan, *caches(here), asked, {}, independent=True),
    ):
        with pytest.raises(kvspec.SpecError) as caught:
            ask(asked)
        assert "cached_tokens" == caught.value.field
        assert "compress_ratio=4" in str(caught.value)


@pytest.mark.parametrize(("tokens", "cached"), [(8, 6), (16, 6), (8, 9), (0, 3), (8, {"g": 2})])
def test_cached_prefix_does_not_matter_if_no_group_is_open(tokens: int, cached: Any) -> None:
    """Rule 8 refuses a prefix inside a group only if a position is wanted."""
    one = moved(engine(ring()), engine(ring(16)), tokens, cached_tokens=cached)
    here = world(one)
    table = here.table(kvspec.RankId(), kvspec.RankId())
    assert 0 == len(table.select(one.request))
    assert 16 * 4 == table.unwritten_ranges(one.request)[:, 1].sum()
    for independent in (False, True):
        places = *caches(here), one.request
        assert None is kvspec.verify(here.plan, *places, independent=independent)


def test_ring_without_open_group_uses_only_its_first_block() -> None:
    """A table of two ids is allowed if nothing moves. Only the first id is the ring."""
    one = moved(engine(ring()), engine(ring(16)), 8)
    here = world(attrs.evolve(one, consumer_pool={"g": 3}))
    asked = attrs.evolve(one.request, consumer_blocks={"g": [1, 0]})
    table = here.table(kvspec.RankId(), kvspec.RankId())
    region = table.consumer.region("l", "ring")
    assert [[region.base + 64, 64]] == table.unwritten_ranges(asked).tolist()
    assert None is kvspec.verify(here.plan, *caches(here), asked)
    source = table.producer.region("l", "ring").address(block=2, unit=0, state=0)
    for block in (0, 1):
        copies = [(source, region.address(block=block, unit=0, state=0), 4)]
        given = {(kvspec.RankId(), kvspec.RankId()): copies}
        fault = kvspec.verify(here.plan, *caches(here), asked, given)
        assert fault is not None
        assert "unwanted" == fault.kind


def test_ring_without_a_block_has_no_unwritten_rows() -> None:
    """A table may be empty if nothing moves."""
    one = moved(engine(ring()), engine(ring(16)), 8)
    table = world(one).table(kvspec.RankId(), kvspec.RankId())
    asked = attrs.evolve(one.request, consumer_blocks={"g": []})
    assert [] == table.unwritten_ranges(asked).tolist()


@pytest.mark.parametrize(
    "changed",
    [{"state_tokens": 13}, {"producer_blocks": {"g": [2, 0]}}, {"consumer_blocks": {"g": [1, 0]}}],
)
def test_verify_refuses_an_impossible_ring_whatever_was_copied(changed: Any) -> None:
    """The descriptors of a connector cannot be right if the rows are gone or have two places."""
    here = world(moved(engine(ring(overlap=True)), engine(ring(16, overlap=True)), 10))
    asked = attrs.evolve(here.case.request, **changed)
    copies = here.table(kvspec.RankId(), kvspec.RankId()).descriptors(here.case.request)
    given = {(kvspec.RankId(), kvspec.RankId()): copies}
    assert None is kvspec.verify(here.plan, *caches(here), here.case.request, given)
    with pytest.raises((kvspec.SpecError, kvspec.MismatchError), match=next(iter(changed))):
        kvspec.verify(here.plan, *caches(here), asked, given)


@pytest.mark.parametrize("tokens", [10, 30, 46])
def test_stripe_counts_a_ring_as_one_block(tokens: int) -> None:
    """The positions behind the first 8 are on the stripe of the first virtual block, too."""
    sides = engine(ring(8, overlap=True), tp=4), engine(ring(8, overlap=True), tp=2)
    one = attrs.evolve(moved(*sides, tokens), replica_policy="stripe")
    here = world(one)
    pairs = kvspec.traffic(here.plan, tokens).pairs.items()
    counted = {pair: amount.nbytes for pair, amount in pairs}
    for (source, target), nbytes in counted.items():
        table = here.table(source, target)
        assert nbytes == table.descriptors(one.request)[:, 2].sum()
    assert {0, 6 * 4} == {*counted.values()}


@pytest.mark.parametrize("tokens", [2**62, 2**62 - 1, 2**62 - 15])
def test_ring_of_the_longest_request_has_all_of_its_rows(tokens: int) -> None:
    """The rows that are not wanted count as later positions, also behind the last possible one."""
    here = world(moved(engine(ring(overlap=True)), engine(ring(16, overlap=True)), 10))
    table = here.table(kvspec.RankId(), kvspec.RankId())
    asked = attrs.evolve(here.case.request, num_tokens=tokens)
    moves = table.descriptors(asked)[:, 2].sum()
    assert 16 * 4 - moves == table.unwritten_ranges(asked)[:, 1].sum()


@pytest.mark.parametrize("side", ["producer", "consumer"])
@pytest.mark.parametrize(
    "blocks", [[], [1, 0], [0], [-1], [9], kvspec.BlockTable([1], first_token=8)]
)
def test_table_of_a_ring_needs_one_block(side: str, blocks: Any) -> None:
    """A request has one block of a ring for its whole life."""
    own = engine(ring(), null_block=0)
    here = world(moved(own, own, 10))
    table = here.table(kvspec.RankId(), kvspec.RankId())
    asked: Any = {"producer_blocks": {"g": [2]}, "consumer_blocks": {"g": [1]}}
    asked |= {f"{side}_blocks": {"g": blocks}}
    wrong = attrs.evolve(here.case.request, **asked)
    with pytest.raises((kvspec.SpecError, kvspec.MismatchError), match=f"{side}_blocks"):
        table.select(wrong)
    empty = attrs.evolve(wrong, num_tokens=8)
    assert 0 == len(table.select(empty))


@pytest.mark.parametrize(
    ("rows", "seen", "served"),
    [(7, 10, True), (7, 11, True), (7, 12, False), (8, 12, True), (8, 13, False), (8, 9, False)],
)
def test_ring_that_has_seen_more_tokens_moves_while_it_has_the_rows(
    rows: int, seen: int, served: bool
) -> None:
    """The positions 4 to 9 move. A ring of 7 rows still has them after 11 tokens, not after 12."""
    own = engine(ring(rows, overlap=True))
    here = world(moved(own, engine(ring(16, overlap=True)), 10, state_tokens=seen))
    table = here.table(kvspec.RankId(), kvspec.RankId())
    if served:
        assert [] == laws.broken(KVSPEC, here.case)
        return
    for ask in (table.select, lambda asked: kvspec.verify(here.plan, *caches(here), asked)):
        with pytest.raises(kvspec.MismatchError, match="state_tokens"):
            ask(here.case.request)


@pytest.mark.parametrize("policy", ["spread", "stripe"])
def test_ring_is_counted_explained_and_drawn_by_position(policy: Any) -> None:
    """A stripe counts blocks of the table, so one replica sends the whole ring."""
    sides = engine(ring(8, overlap=True), tp=4), engine(ring(15, overlap=True), tp=2)
    plan = kvspec.plan_transfer(*sides, policy)
    assert "10 tokens: 48 bytes in 4 descriptors" in str(kvspec.traffic(plan, num_tokens=10))
    places = [
        kvspec.plan_memory(side, kvspec.RankId(), 5, at)
        for side, at in zip(sides, (0, 4096), strict=True)
    ]
    table, asked = kvspec.build_table(plan, *places), request(10, [3], [2])
    told = [
        kvspec.explain(table, consumer_id=int(number), request=asked)
        for number in table.select(asked).consumer_ids
    ]
    tokens = {int(text.partition(", token ")[2].split()[0]) for text in told}
    assert tokens == {*range(4, 10)}
    assert "15 rows a block" in table_svg(table)
    assert "blocks of" not in plan_svg(plan)


@pytest.mark.parametrize(
    ("tokens", "words"),
    [(30, [*(f"token {at}" for at in (*range(24, 30), 22, 23))]), (3, ["token 0", "row 7"])],
)
def test_explain_names_the_last_token_of_each_row(tokens: int, words: list[str]) -> None:
    """Token 24 is in row 0 of 8 rows. After 3 tokens, no token is in row 7."""
    one = moved(engine(ring(15)), engine(ring(8)), tokens)
    table = world(one).table(kvspec.RankId(), kvspec.RankId())
    rows = [
        kvspec.explain(table, consumer_id=8 + row, request=one.request).splitlines()[1]
        for row in range(8)
    ]
    for number, word in enumerate(words[:-1]):
        assert rows[number].endswith(f", {word}")
    assert rows[7].endswith(f", {words[-1]}")


def test_dead_tokens_of_a_ring_never_move() -> None:
    """The row of a dead token may be that of a live one in the other ring."""
    one = moved(engine(ring(16, overlap=True)), engine(ring(8, overlap=True)), 10)
    here = world(one)
    (producer, _), (consumer, _) = (
        side[kvspec.RankId()] for side in (here.producers, here.consumers)
    )
    table = kvspec.build_table(here.plan, producer, consumer, dead_tokens=True)
    assert 0 == table.dead_bytes(one.request)
    assert [4 * 4, 2 * 4] == table.descriptors(one.request)[:, 2].tolist()


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"compress_ratio": 2}, "compress_ratio"), ({"overlap": True}, "overlap"),
        ({"head_size": 8}, "head_size"), ({"dtype": "int8"}, "dtype"),
        ({"num_kv_heads": 2}, "num_kv_heads"),
    ],
)  # fmt: skip
def test_rings_that_mean_other_things_are_refused(changed: dict[str, Any], field: str) -> None:
    """Only the number of rows and the padding may differ."""
    found = kvspec.mismatches(engine(ring()), engine(attrs.evolve(ring(), **changed)))
    assert {f"l.{field}"} == {mismatch.field for mismatch in found}
    padded = attrs.evolve(ring(12), page_size_padded=64)
    assert () == kvspec.mismatches(engine(ring()), engine(padded))


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rows": 2}, "block_size"), ({"rows": 6, "overlap": True}, "block_size"),
        ({"ratio": 1}, "compress_ratio"), ({"overlap": 1}, "overlap"),
        ({"num_kv_heads": 0}, "num_kv_heads"), ({"head_size": 0}, "head_size"),
        ({"dtype": "none"}, "dtype"),
    ],
)  # fmt: skip
def test_ring_rejects_impossible_fields(fields: Any, field: str) -> None:
    """A ring needs a row for each live token."""
    with pytest.raises(kvspec.SpecError) as caught:
        ring(**fields)
    assert field == caught.value.field


def test_ring_has_no_kernel_blocks_and_is_never_divided() -> None:
    """A ring is one block in memory, and `context_sharded` becomes False."""
    with pytest.raises(kvspec.SpecError) as caught:
        group(ring(), kernel_block_size=4)
    assert "groups['g'].kernel_block_size" == caught.value.field
    assert not group(ring()).context_sharded
    uniform = kvspec.UniformTypeKVCacheSpecs(specs={"l": ring(), "m": ring(head_size=2)})
    assert not group(uniform, "l", "m").context_sharded
    assert range(8, 10) == uniform.live_tokens(10)


def test_uniform_group_of_rings_moves_each_layer_by_position() -> None:
    """Layers of one group may have rows of different lengths."""
    sides = [
        engine(
            group(
                kvspec.UniformTypeKVCacheSpecs(
                    specs={
                        "l": ring(rows, overlap=True),
                        "m": ring(rows, overlap=True, head_size=2),
                    }
                ),
                "l",
                "m",
            )
        )
        for rows in (8, 16)
    ]
    assert [] == laws.broken(KVSPEC, moved(sides[0], sides[1], 10))
    assert [] == laws.broken(KVSPEC, moved(sides[1], sides[0], 14))
