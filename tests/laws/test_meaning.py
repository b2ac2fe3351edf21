"""Keys of equal shape and different order: each element arrives where its meaning is.

The tests compute the place of each element in the way that each engine's own kernel rotates it.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from builders import case, engine, gqa, mla, request
from hypothesis import Phase, given, settings
from refused import refusal
from ways import check_every_way

import kvspec
from kvspec import KeyContent, RankId
from kvspec.analysis.fewest import descriptor_counts
from kvspec.check.differences import differing
from kvspec.digests import digest, wanted
from kvspec.draw import plan_svg, table_svg
from kvspec.testing import Case, laws, strategies
from kvspec.testing.laws import KVSPEC, LAWS, System
from kvspec.testing.pairs import meant_spec
from kvspec.testing.world import ByteCopy, World, described, world

pytestmark = pytest.mark.uncovered

HALVES = KeyContent(rotary="halves", rotary_size=8)
PAIRS = attrs.evolve(HALVES, rotary="pairs")
PARTIAL = KeyContent(rotary="pairs", rotary_start=4, rotary_size=4)
# A layout in which each page format is legal. A key of 8 elements has two chunks of 16 bytes.
FORMATS = {"plain": "LBNHC", "keys-transposed": "LBHKNC", "x-packed": "LBKHNC"}


def side(content: KeyContent, page_format: str = "plain", **fields: Any) -> kvspec.EngineSpec:
    """Return an engine of one layer of two heads."""
    layout = FORMATS[page_format]
    sizes = {"block_size": 4, "head_size": 8, "dtype": "float32"}
    tp = fields.pop("tp", 1)
    spec = gqa(2, **sizes | fields, page_format=page_format, key_content=content)
    return engine(spec, layout=layout, tp=tp)


def latent_side(content: KeyContent, **fields: Any) -> kvspec.EngineSpec:
    """Return an engine of one latent layer of 12 elements."""
    return engine(mla(block_size=4, key_content=content, **fields))


def transfer(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, tokens: int = 10) -> Case:
    """Return a request of *tokens* tokens, of which the consumer has cached three."""
    tables = [
        range(1, 2 + (tokens - 1) // one.groups[0].spec.block_size) for one in (producer, consumer)
    ]
    return case(producer, consumer, request(tokens, *tables, cached_tokens=3))


def rows_of(cache: kvspec.RankCache, storage: Any, part: str) -> npt.NDArray[np.uint8]:
    """Return the bytes of a part as they are stored: (blocks, units, rows, bytes), a view."""
    region, flat = cache.region("l", part), storage["g"]
    first = region.base - flat.ctypes.data
    return np.lib.stride_tricks.as_strided(
        flat[first:],
        (region.num_blocks, region.units, region.states, region.content_bytes),
        (region.block_stride, region.unit_stride, region.state_stride, 1),
    )


@pytest.mark.parametrize("second", FORMATS)
@pytest.mark.parametrize("first", FORMATS)
def test_halves_and_pairs_are_exchanged_byte_for_byte(first: str, second: str) -> None:
    """The oracle accepts every way of moving them, between all page formats."""
    for one, other in ((HALVES, PAIRS), (PAIRS, HALVES)):
        check_every_way(transfer(side(one, first), side(other, second, block_size=6, tp=2)))


@pytest.mark.parametrize("rotary", ["halves", "pairs"])
@pytest.mark.parametrize("other", ["halves", "pairs"])
def test_latent_rows_are_exchanged_in_any_order(rotary: str, other: str) -> None:
    """The rotated part may be first or last, in halves or pairs."""
    for start, end in product((0, 8), (0, 8)):
        sides = [
            latent_side(KeyContent(rotary=order, rotary_start=at, rotary_size=4))
            for order, at in ((rotary, start), (other, end))
        ]
        check_every_way(transfer(*sides))


@pytest.mark.parametrize("swapped", [False, True])
def test_layers_of_one_group_keep_their_own_orders(swapped: bool) -> None:
    """The layers of a uniform-type group may have equal parts and different orders."""
    contents = {"a": (HALVES, HALVES), "b": (PAIRS, HALVES), "c": (PAIRS, PAIRS), "d": (None, None)}
    sides = []
    for number in (swapped, not swapped):
        specs = {
            name: gqa(2, block_size=4, head_size=8, key_content=pair[number])
            for name, pair in contents.items()
        }
        spec = kvspec.UniformTypeKVCacheSpecs(specs=specs)
        sides.append(engine(spec, layers=tuple(specs)))
    check_every_way(transfer(*sides))


def test_elements_arrive_where_the_kernel_of_the_consumer_reads_them() -> None:
    """Element j of pair i is at 2i + j in the producer, and at i + 2j in the consumer."""
    halves = attrs.evolve(PARTIAL, rotary="halves")
    here = world(transfer(side(PARTIAL, dtype="bfloat16"), side(halves, dtype="bfloat16"), 4))
    here.restore()
    here.execute(described)
    sent, received = (
        rows_of(cache, storage, "k").copy().view(np.uint16)[1, :, 3]
        for cache, storage in (here.producers[RankId()], here.consumers[RankId()])
    )
    # The first four elements are not rotated.
    order = [0, 1, 2, 3, *(4 + 2 * pair + half for half in (0, 1) for pair in (0, 1))]
    assert sent[:, order].tolist() == received.tolist()
    assert sent.tolist() != received.tolist()


def test_rotated_part_of_deepseek_arrives_in_order_of_transformers() -> None:
    """VLLM stores `latent, x0 x1 x2 x3`, transformers `latent, x0 x2 x1 x3`."""
    pairs = KeyContent(rotary="pairs", rotary_start=8, rotary_size=4)
    sides = latent_side(pairs), latent_side(attrs.evolve(pairs, rotary="halves"))
    here = world(transfer(*sides, 4))
    here.execute(described)
    sent, received = (
        rows_of(cache, storage, "latent").copy().view(np.uint16)[1, 0, 3]
        for cache, storage in (here.producers[RankId()], here.consumers[RankId()])
    )
    assert sent[[*range(8), 8, 10, 9, 11]].tolist() == received.tolist()


def test_equal_orders_need_no_more_rows_than_unstated_ones() -> None:
    """Only different orders are cut into elements."""
    counts = []
    for contents in ((None, None), (PAIRS, PAIRS), (PAIRS, HALVES)):
        sides = [engine(gqa(2, head_size=8, key_content=content)) for content in contents]
        caches = [kvspec.plan_memory(one, RankId(), 4) for one in sides]
        table = kvspec.build_table(kvspec.plan_transfer(*sides), *caches)
        counts.append(len(table.producer_rows))
    assert counts[0] == counts[1] < counts[2]


def test_digests_of_halves_and_pairs_are_equal_after_the_transfer() -> None:
    """Bytes that moved as they are give different digests."""
    drawn = transfer(side(PAIRS, "keys-transposed"), side(HALVES))
    here = world(drawn)
    asked = wanted(here.plan, drawn.request)

    def differences() -> list[Any]:
        return differing(
            [digest(here.producers[RankId()][0], drawn.request.producer_blocks, asked)],
            [digest(here.consumers[RankId()][0], drawn.request.consumer_blocks, asked)],
        )

    here.execute(described)
    assert [] == differences()
    keys = rows_of(*here.consumers[RankId()], "k").view(np.uint32)
    keys[:] = keys[..., [0, 4, 1, 5, 2, 6, 3, 7]]
    assert [("l", "k", 0), ("l", "k", 1)] == differences()


def test_verify_names_byte_that_moved_as_it_is() -> None:
    """A connector that ignores the order is caught without any memory."""
    sides = side(PAIRS), side(HALVES)
    caches = [{RankId(): kvspec.plan_memory(one, RankId(), 4)} for one in sides]
    plan, whole = kvspec.plan_transfer(*sides), request(4, [1], [2])
    assert None is kvspec.verify(plan, *caches, whole)
    unaware = [attrs.evolve(each, groups=engine(gqa(2, block_size=4, head_size=8, dtype="float32"),
                            layout="LBNHC").groups) for each in sides]  # fmt: skip
    plain = [{RankId(): kvspec.plan_memory(one, RankId(), 4)} for one in unaware]
    table = kvspec.build_table(
        kvspec.plan_transfer(*unaware), *(cache[RankId()] for cache in plain)
    )
    moved = {(RankId(), RankId()): table.descriptors(whole)}
    fault = kvspec.verify(plan, *caches, whole, moved)
    assert fault is not None
    # Element 1 of the common order is the second of the producer's pairs.
    assert ("wrong source", "k", 4) == (fault.kind, fault.part, fault.byte)


@pytest.mark.parametrize("first", [0, 8])
@pytest.mark.parametrize("second", [0, 8])
def test_verify_counts_bytes_as_the_consumer_stores_them(first: int, second: int) -> None:
    """The order of the producer, and whether both orders are equal, does not matter."""
    sides = [
        latent_side(KeyContent(rotary="halves", rotary_start=at, rotary_size=4))
        for at in (first, second)
    ]
    caches = [{RankId(): kvspec.plan_memory(one, RankId(), 4)} for one in sides]
    plan, whole = kvspec.plan_transfer(*sides), request(4, [1], [2])
    rows = kvspec.build_table(plan, *(each[RankId()] for each in caches)).descriptors(whole)
    rows = rows[rows[:, 1].argsort()]
    rows[-1, 2] -= 1  # The last byte of the last token in the consumer's memory is missing.
    fault = kvspec.verify(plan, *caches, whole, {(RankId(), RankId()): rows})
    assert fault is not None
    assert ("missing", 3, 23) == (fault.kind, fault.token, fault.byte)


def test_plans_of_different_orders_are_explained_counted_and_drawn() -> None:
    """No page of the library assumes that a content is one run of bytes."""
    sides = side(PAIRS), side(HALVES)
    drawn = transfer(*sides)
    plan = kvspec.plan_transfer(*sides)
    caches = [kvspec.plan_memory(one, RankId(), 4, 4096) for one in sides]
    table = kvspec.build_table(plan, *caches)
    posted, least = descriptor_counts(table, drawn.request)
    assert posted == len(table.select(drawn.request))
    assert least == len(table.descriptors(drawn.request)) > 10
    assert "l k" in kvspec.explain(table, consumer_id=0, request=drawn.request)
    assert table_svg(table)
    assert plan_svg(plan)
    equal = kvspec.plan_transfer(sides[0], sides[0])
    amounts = [kvspec.traffic(each, 10).consumers[RankId()] for each in (equal, plan)]
    assert amounts[0].nbytes == amounts[1].nbytes
    assert amounts[0].descriptors < amounts[1].descriptors


def test_cache_of_tensors_has_order_of_its_engine() -> None:
    """`from_tensors` reads the same places as `plan_memory`."""
    one = side(PAIRS)
    tensor = np.zeros((4, 4, 2, 16), np.float32)
    cache = kvspec.RankCache.from_tensors(one, RankId(), {"l": tensor}, "BNHC")
    planned = kvspec.plan_memory(one, RankId(), 4, tensor.ctypes.data)
    assert planned.regions == cache.regions
    assert [True, False] == [bool(region.segments) for region in cache.regions]


@pytest.mark.parametrize(
    ("spec", "other"),
    [
        (gqa(2, head_size=8, state_content_bytes=20), {}),
        (gqa(2, head_size=8, page_format="opaque:x"), {}),
        (gqa(2, head_size=8, spans_heads=True), {}),
        (gqa(2, head_size=8, tokens_per_state=2), {}),
        (gqa(2, head_size=8, dtype="uint8", scale_dtype="float32", elements_per_scale=2), {}),
        (gqa(2, head_size=8, dtype="uint8", scale_dtype="float32"), {}),
        (gqa(2, head_size=8, dtype="uint8", scale_dtype="float32", elements_per_scale=8), {}),
        (gqa(2, head_size=8, dtype="uint8", scales_digest="ab"), {}),
        (mla(head_size=8, dtype="uint8", scales_digest="ab"), {}),
        (mla(head_size=12), {"rotary_start": 2}),
        (gqa(2, head_size=12), {"rotary_start": 4}),
    ],
)
def test_orders_that_cannot_be_changed_are_refused(spec: Any, other: dict[str, int]) -> None:
    """Equal orders are accepted."""
    contents = HALVES, attrs.evolve(PAIRS, **other)
    sides = [engine(attrs.evolve(spec, key_content=content)) for content in contents]
    kvspec.plan_transfer(sides[1], sides[1])
    error = refusal(lambda: kvspec.plan_transfer(*sides), kvspec.MismatchError)
    found = [(each.field, each.producer, each.consumer) for each in error.mismatches]
    assert [("l.key_content", *contents)] == found


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", "float8_e5m2"])
def test_keys_of_one_byte_elements_with_scales_change_their_order(dtype: str) -> None:
    """Only uint8 may be the type of packed elements."""
    for scales in ({"scale_dtype": "float32"}, {"scales_digest": "ab"}):
        spec = gqa(2, head_size=8, dtype=dtype, **scales)
        sides = [engine(attrs.evolve(spec, key_content=content)) for content in (HALVES, PAIRS)]
        assert kvspec.plan_transfer(*sides).edges


@pytest.mark.parametrize("spec", [gqa(2), mla(head_size=4), gqa(2, tokens_per_state=2)])
def test_strategies_draw_every_pair_of_orders(spec: Any) -> None:
    """The laws check only orders that are drawn. A compressed row keeps its order."""
    seen: set[tuple[str, str]] = set()

    @given(meant_spec(spec))
    @settings(max_examples=400, phases=[Phase.generate], database=None, derandomize=True)
    def look(drawn: tuple[Any, Any]) -> None:
        contents = [each.key_content for each in drawn]
        if None not in contents:
            assert not kvspec.mismatches(*map(engine, drawn))
            first, second = (f"{one.rotary} {one.rotary_start > 0}" for one in contents)
            seen.add((first, second))

    look()
    orders = [f"{rotary} {late}" for rotary in ("halves", "pairs") for late in (False, True)]
    expected = set(product(orders, orders))
    if spec.parts[0].name == "k":
        # Only latent rows may have their rotated part at another place.
        expected = {pair for pair in expected if pair[0].split()[1] == pair[1].split()[1]}
    if spec.tokens_per_state > 1:
        expected = {(order, order) for order in orders}
    assert expected == seen


LAW = LAWS[13]
MOVER = attrs.evolve(KVSPEC, moves=None, tells=None, steps=None)


@settings(max_examples=settings.default.max_examples // 2)
@given(strategies.cases(["full", "MLA", "sliding window", "uniform", "full, with scales"], 3))
def test_kvspec_keeps_law_of_meaning(drawn: Case) -> None:
    """Halves and pairs are delivered in order. Any other meaning is refused."""
    LAW.check(MOVER, drawn)


def unaware(engines: Callable[[kvspec.EngineSpec], kvspec.EngineSpec]) -> System:
    """Return kvspec between engines that *engines* changed before."""

    def copies(here: World, producer: RankId, consumer: RankId) -> list[ByteCopy]:
        caches = [
            kvspec.RankCache(engines(cache.engine), rank, cache.regions, cache.memory)
            for cache, rank in (
                (here.producers[producer][0], producer),
                (here.consumers[consumer][0], consumer),
            )
        ]
        plan = kvspec.plan_transfer(*(cache.engine for cache in caches))
        return described(kvspec.build_table(plan, *caches), here.case.request)

    return System(name="unaware", descriptors=copies)


def without(engine: kvspec.EngineSpec, **fields: None) -> kvspec.EngineSpec:
    """Return *engine*, whose specs have no *fields*."""
    groups = [attrs.evolve(g, spec=attrs.evolve(g.spec, **fields)) for g in engine.groups]
    return attrs.evolve(engine, groups=groups)


UNSTATED: list[Callable[[kvspec.EngineSpec], kvspec.EngineSpec]] = [
    lambda one: without(one, key_content=None),
    lambda one: without(one, scales_digest=None),
]


@pytest.mark.parametrize("forget", UNSTATED, ids=["key_content", "scales_digest"])
def test_law_of_meaning_finds_system_that_ignores_a_meaning(forget: Any) -> None:
    """One case tries each change."""
    plain = engine(gqa(2, block_size=4))
    assert list(LAW.faults(unaware(forget), transfer(plain, plain)))
    assert not list(LAW.faults(unaware(lambda one: one), transfer(plain, plain)))


def test_law_of_meaning_names_each_change_that_is_accepted() -> None:
    """An author who mends only the first change would need a run for each other one."""
    plain = engine(gqa(2, block_size=4, tokens_per_state=2))
    (fault,) = LAW.faults(unaware(UNSTATED[0]), case(plain, plain, request(4, [1], [2])))
    for words in ("normalised", "unstated", "keys of stated", "cannot be reordered"):
        assert words in fault
    assert "scales" not in fault


def test_law_of_meaning_is_not_judged_if_no_key_can_be_rotated() -> None:
    """A key of one element has no order, so nothing was tried."""
    plain = engine(gqa(2, block_size=4, head_size=1))
    broken = laws.broken(MOVER, transfer(plain, plain), of=[LAW])
    assert [] == broken
    assert "rotated" in broken.not_judged[str(LAW)]


def test_law_of_meaning_finds_row_that_moved_as_it_is() -> None:
    """The first wrong byte is that of element 1, which is element 2 of the producer's row."""
    plain = engine(mla(block_size=4, head_size=4, dtype="uint8"))
    fault = next(LAW.faults(unaware(UNSTATED[0]), transfer(plain, plain, 4)))
    assert "byte 1:" in fault
