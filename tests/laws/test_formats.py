"""Tests that known page formats are converted into each other and opaque pages move whole.

The tests compute the place of each element in the way that each engine's own kernel indexes it.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, assume, given, settings
from moved import moves
from ways import check_every_way

import kvspec
from kvspec import RankId
from kvspec.draw import table_svg
from kvspec.ownership.dtypes import itemsize
from kvspec.specs.formats import chunks_of
from kvspec.testing import strategies
from tests.support.refused import refusal

KINDS = ("full", "full, keys of 16 bytes", "sliding window", "full, V of another size")
CASES = strategies.cases(KINDS, 4)
FEW = settings(max_examples=settings.default.max_examples // 2)


def formats_of(group: kvspec.KVCacheGroup) -> str:
    """Return the page format of a group. Groups of states have plain pages."""
    return str(getattr(group.spec, "page_format", "plain"))


def formats(case: strategies.Case) -> tuple[set[str], set[str]]:
    """Return the page formats of the producer's groups and of the consumer's groups."""
    producer_formats, consumer_formats = (
        {formats_of(group) for group in side.groups} for side in (case.producer, case.consumer)
    )
    return producer_formats, consumer_formats


@given(CASES)
@FEW
def test_transfer_between_any_two_formats_delivers_each_byte_once(case: strategies.Case) -> None:
    """Law 1 holds for ids and descriptors, and `verify` accepts the transfer."""
    assume(set.union(*formats(case)) != {"plain"})
    check_every_way(case)


@pytest.mark.slow
def test_engine_pairs_contain_every_pair_of_formats() -> None:
    """The laws check conversions only between formats that are drawn.

    A thousand draws take 10 s, and what is drawn changes only if a strategy does.
    """
    seen: Counter[tuple[str, str]] = Counter()

    @given(strategies.engine_pairs(KINDS[1:2], 2))
    @settings(max_examples=1000, phases=[Phase.generate], database=None, derandomize=True)
    def look(pair: tuple[kvspec.EngineSpec, kvspec.EngineSpec]) -> None:
        producer_formats, consumer_formats = (
            {formats_of(group) for group in side.groups} for side in pair
        )
        seen.update((a, b) for a in producer_formats for b in consumer_formats)

    look()
    names = ("plain", "keys-transposed", "x-packed")
    assert [] == [(a, b) for a in names for b in names if not seen[a, b]]


# X: elements of two bytes in 16 bytes.
HEADS, SIZE, X = 2, 16, 8
Place = Callable[[str, int, int, int, int], int]


def transposed(part: str, rows: int, head: int, token: int, dim: int) -> int:
    """Return the element's index in a page of vLLM's CPU attention."""
    first = head * 2 * rows * SIZE
    if part == "k":
        return first + dim * rows + token
    return first + rows * SIZE + token * SIZE + dim


def packed(part: str, rows: int, head: int, token: int, dim: int) -> int:
    """Return the element's index for paged attention on ROCm: K [H, S/x, N, x], V [H, S, N]."""
    if part == "k":
        return ((head * (SIZE // X) + dim // X) * rows + token) * X + dim % X
    return HEADS * rows * SIZE + (head * SIZE + dim) * rows + token


def plain(part: str, rows: int, head: int, token: int, dim: int) -> int:
    """Return the element's index in a page of heads with rows [key | value]."""
    return ((head * rows + token) * 2 + (part == "v")) * SIZE + dim


FORMATS: dict[str, tuple[str, str, Place]] = {
    "keys-transposed": ("keys-transposed", "LBHKNC", transposed),
    "x-packed": ("x-packed", "LBKHNC", packed),
    "plain": ("plain", "LBHNC", plain),
}


def engine(name: str, rows: int, layers: int = 2, **fields: Any) -> kvspec.EngineSpec:
    """Return an engine of one rank with blocks of *rows* rows in the format *name*."""
    page_format, layout, _ = FORMATS[name]
    spec = kvspec.FullAttentionSpec(
        block_size=rows, total_num_kv_heads=HEADS, head_size=SIZE, dtype="bfloat16",
        page_format=page_format, **fields,
    )  # fmt: skip
    names = tuple(f"l.{true_value}" for true_value in range(layers))
    group = kvspec.KVCacheGroup(name="g", layers=names, spec=spec)
    return kvspec.EngineSpec(groups=(group,), layout=layout)


Memory = npt.NDArray[np.uint16]


def pages(name: str, rows: int, blocks: int) -> tuple[kvspec.RankCache, Memory]:
    """Return a cache of *blocks*, and its elements [layers, blocks, elements of a page]."""
    cache, storage = kvspec.allocate(engine(name, rows), RankId(), blocks)
    return cache, storage["g"].view(np.uint16).reshape(2, blocks, 2 * HEADS * rows * SIZE)


def true_value(layer: int, part: str, head: int, token: int, dim: int) -> int:
    """Return the true value of an element. All values differ."""
    return (((layer * 2 + (part == "v")) * HEADS + head) * 96 + token) * SIZE + dim + 1


def elements(tokens: range) -> list[tuple[int, str, int, int, int]]:
    """Return every (layer, part, head, token, dim)."""
    sizes = np.ndindex(2, 2, HEADS, len(tokens), SIZE)
    return [(a, "kv"[b], c, tokens[d], e) for a, b, c, d, e in sizes]


def moved(
    hops: list[tuple[str, int, list[int]]], tokens: int, cached: int = 0
) -> tuple[list[int], Memory]:
    """Move a prompt over *hops* (format, rows, block ids).

    Return the number of descriptors of each hop, and the last memory.
    """
    name, rows, ids = hops[0]
    cache, memory = pages(name, rows, 6)
    for layer, part, head, token, dim in elements(range(tokens)):
        index = FORMATS[name][2](part, rows, head, token % rows, dim)
        memory[layer, ids[token // rows], index] = true_value(layer, part, head, token, dim)
    counts = []
    for after, size, target_ids in hops[1:]:
        target, target_memory = pages(after, size, 6)
        plan = kvspec.plan_transfer(cache.engine, target.engine)
        request = kvspec.TransferRequest(
            request_id="r", num_tokens=tokens, cached_tokens=cached,
            producer_blocks={"g": ids}, consumer_blocks={"g": target_ids},
        )  # fmt: skip
        table = kvspec.build_table(plan, cache, target)
        rows_moved = table.descriptors(request).tolist()
        assert None is kvspec.verify(plan, {RankId(): cache}, {RankId(): target}, request)
        for start, stop, length in rows_moved:
            ctypes.memmove(stop, start, length)
        counts.append(len(rows_moved))
        cache, memory, ids = target, target_memory, target_ids
    return counts, memory


HOPS = [
    [("keys-transposed", 8, [3, 1, 5]), ("keys-transposed", 16, [2, 4]), ("plain", 4, [*range(6)])],
    [("x-packed", 8, [3, 1, 5]), ("keys-transposed", 8, [5, 0, 2]), ("x-packed", 4, [*range(6)])],
    [("plain", 8, [0, 4, 2]), ("x-packed", 16, [1, 0]), ("plain", 8, [5, 3, 1])],
]


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("hops", HOPS)
def test_elements_arrive_at_the_index_of_the_consumer_kernel(
    hops: list[tuple[str, int, list[int]]], cached: int
) -> None:
    """The prompt moves over two hops. The consumer keeps the elements that it has cached."""
    hops = hops if not cached else [hops[0], hops[-1]]
    _, memory = moved(hops, 21, cached)
    name, rows, ids = hops[-1]
    for layer, part, head, token, dim in elements(range(21)):
        index = FORMATS[name][2](part, rows, head, token % rows, dim)
        arrived = memory[layer, ids[token // rows], index]
        assert (true_value(layer, part, head, token, dim) if token >= cached else 0) == arrived


@pytest.mark.parametrize("name", FORMATS)
def test_whole_pages_of_one_format_need_as_few_rows_as_plain_pages(name: str) -> None:
    """Equal formats and blocks need one descriptor for each block and layer."""
    ids = [4, 0, 2]
    counts, _ = moved([(name, 8, ids), (name, 8, [1, 3, 5])], 24)
    assert [2 * 3] == counts
    cache, _ = pages(name, 8, 6)
    plain_cache, _ = pages("plain", 8, 6)
    tables = [
        kvspec.build_table(
            kvspec.plan_transfer(one_cache.engine, one_cache.engine), one_cache, one_cache
        )
        for one_cache in (cache, plain_cache)
    ]
    whole = [
        sum(len(e.rows) for e in table.numbered_rows if e.rows.kind == (0, 8)) for table in tables
    ]
    assert whole[0] == whole[1] == 2


def test_from_tensors_reads_views_of_raw_transposed_pages() -> None:
    """CPU attention has tensors [blocks, heads, tokens, 2 * size].

    The test passes views of their parts.
    """
    rows, blocks = 8, 5
    raw = np.zeros((blocks, HEADS, rows, 2 * SIZE), np.uint16)
    heads = raw.reshape(blocks, HEADS, 2, rows * SIZE)
    views = {
        "k": heads[:, :, 0].reshape(blocks, HEADS, SIZE, rows),
        "v": heads[:, :, 1].reshape(blocks, HEADS, rows, SIZE),
    }
    described_engine = engine("keys-transposed", rows, layers=1)
    cache = kvspec.RankCache.from_tensors(
        described_engine, RankId(), {"l.0": views}, {"k": "BHPN", "v": "BHNC"}
    )
    planned = kvspec.plan_memory(described_engine, RankId(), blocks, raw.ctypes.data)
    assert planned.regions == cache.regions
    for token, dim in ((0, 0), (3, 5), (7, 15)):
        raw.ravel()[transposed("k", rows, 1, token, dim)] = 9
        region = cache.region("l.0", "k")
        address = region.address(0, 1, token) + region.chunk_offset(2 * dim)
        assert 9 == np.frombuffer(ctypes.string_at(address, 2), np.uint16)[0]
        assert (0, 1, token, 2 * dim) == region.locate(address)


def test_axes_distinguish_transposed_and_plain_keys_of_square_pages() -> None:
    """With as many elements as rows, both have the same shape."""
    side = engine("keys-transposed", SIZE, layers=1)
    tensors = {name: np.zeros((5, HEADS, SIZE, SIZE), np.uint16) for name in "kv"}
    axes = {"k": "BHPN", "v": "BHNC"}
    assert 2 == len(kvspec.RankCache.from_tensors(side, RankId(), {"l.0": tensors}, axes).regions)


def opaque(name: str = "opaque:amx", rows: int = 8, tp_size: int = 1) -> kvspec.EngineSpec:
    """Return an engine of opaque pages with two layers and two heads."""
    spec = kvspec.FullAttentionSpec(
        block_size=rows, total_num_kv_heads=HEADS, head_size=SIZE, dtype="bfloat16",
        page_format=name,
    )  # fmt: skip
    group = kvspec.KVCacheGroup(name="g", layers=("l.0", "l.1"), spec=spec)
    return kvspec.EngineSpec(groups=(group,), parallel=kvspec.ParallelConfig(tp_size=tp_size))


def mismatched_fields(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> list[tuple[object, ...]]:
    """Return the fields that do not fit, with both values."""
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(producer, consumer)
    return [(each.field, each.producer, each.consumer) for each in caught.value.mismatches]


def test_opaque_pages_move_whole() -> None:
    """A page of equal name, block size and heads is one row of keys and values."""
    side = opaque()
    (part,) = side.groups[0].spec.parts
    assert ("page", 1, 8, HEADS * 2 * 8 * SIZE * 2) == (
        part.name, part.states, part.tokens_per_state, part.units * part.content_bytes
    )  # fmt: skip
    cache = kvspec.plan_memory(side, RankId(), 6)
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=20, cached_tokens=8,
        producer_blocks={"g": [0, 2, 4]}, consumer_blocks={"g": [5, 3, 1]},
    )  # fmt: skip
    table = kvspec.build_table(kvspec.plan_transfer(side, side), cache, cache)
    page = HEADS * 2 * 8 * SIZE * 2
    assert [page] * 4 == [length for *_, length in table.descriptors(request).tolist()]
    error = refusal(lambda: table.select(attrs.evolve(request, cached_tokens=9)))
    assert ("cached_tokens", 9) == (error.field, error.value)


def test_plan_rejects_opaque_pages_that_differ() -> None:
    """The formats, the block sizes or the heads of a rank differ."""
    keys_apart = attrs.evolve(opaque(), layout="LBHKNC")
    assert [("l.0 and 1 more.page_format", "opaque:amx", "opaque:vec")] == mismatched_fields(
        keys_apart, opaque("opaque:vec")
    )
    transposed_pages = engine("keys-transposed", 8)
    assert [("l.0 and 1 more.page_format", "keys-transposed", "opaque:amx")] == mismatched_fields(
        transposed_pages, opaque()
    )
    assert ("l.0 and 1 more.page.tokens_per_state", 8, 16) in mismatched_fields(
        opaque(), opaque(rows=16)
    )
    fields = [field for field, *_ in mismatched_fields(opaque(), opaque(tp_size=2))]
    assert any("page" in field for field in fields)


def opaque_blocks(rows: int, kernel: int | None, page: int | None = 8) -> kvspec.EngineSpec:
    """Return an engine of opaque pages of *page* tokens and tables with blocks of *rows* tokens."""
    whole = opaque(rows=rows)
    spec: Any = attrs.evolve(whole.groups[0].spec, page_block_size=page)  # type: ignore[call-arg]
    group = attrs.evolve(whole.groups[0], spec=spec, kernel_block_size=kernel)
    return attrs.evolve(whole, groups=(group,))


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (opaque_blocks(32, 8), opaque(rows=8)),
        (opaque(rows=8), opaque_blocks(32, 8)),
        (opaque_blocks(32, 8), opaque_blocks(16, 8)),
        (opaque_blocks(32, 16), opaque_blocks(48, 8)),
        (opaque_blocks(32, None), opaque_blocks(8, None)),
    ],
)
def test_opaque_pages_of_equal_kernel_blocks_move_whole(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> None:
    """A page is a kernel block, so the tables may have different block sizes."""
    assert [] == moves(producer, consumer, 75, cached_tokens=24)
    assert [] == moves(consumer, producer, 75, cached_tokens=24)


def test_opaque_pages_must_be_whole_kernel_blocks() -> None:
    """A kernel block must have whole pages, and the spec must have the size of a page."""
    assert [
        ("l.0 and 1 more.page.content_bytes", 1024 // 2, 1024),
        ("l.0 and 1 more.page.tokens_per_state", 8, 16),
    ] == mismatched_fields(opaque_blocks(32, 8), opaque_blocks(32, 16, 16))
    for kernel, page in ((8, None), (8, 16), (4, 8)):
        error = refusal(functools.partial(opaque_blocks, 32, kernel, page))
        assert ("groups['g'].kernel_block_size", kernel) == (error.field, error.value)


def test_mismatches_ignore_known_formats() -> None:
    """Known formats are converted, so engines with different formats fit together."""
    first, second = engine("keys-transposed", 8), engine("x-packed", 16)
    assert () == kvspec.mismatches(first, second)


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    ({"page_format": "plian"}, "page_format", "opaque"),
    ({"page_format": "opaque:"}, "page_format", "opaque"),
    ({"page_format": None}, "page_format", "opaque"),
    # A chunk has 16 bytes, and the content of a key has 8.
    ({"page_format": "x-packed", "head_size": 4}, "page_format", "16"),
    ({"page_format": "keys-transposed", "scale_dtype": "float32"}, "page_format", "k_scale"),
    ({"page_format": "keys-transposed", "state_content_bytes": 8}, "page_format", "kv"),
    ({"page_block_size": 2}, "page_block_size", "plain"),
    ({"page_format": "opaque:a", "page_block_size": 3}, "page_block_size", "block_size=4"),
    # A row of scales has 4 tokens, so a page of 2 tokens would cut it.
    ({"page_format": "opaque:a", "page_block_size": 2, "scale_dtype": "float32",
      "tokens_per_scale": 4}, "page_block_size", "4"),
    ({"page_format": "opaque:a", "page_block_size": 0}, "page_block_size", "1"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "field", "word"), REFUSED)
def test_spec_rejects_impossible_formats(fields: dict[str, Any], field: str, word: str) -> None:
    """The format is unknown, its chunks do not divide a row, or the page has other parts."""
    base: dict[str, Any] = {
        "block_size": 4, "total_num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"
    }  # fmt: skip
    error = refusal(lambda: kvspec.FullAttentionSpec(**base | fields))
    assert (field, fields[field]) == (error.field, error.value)
    assert word in str(error)


@pytest.mark.parametrize("layout", ["LBHNC", "LBKNHC", "LKBNHC"])
def test_plan_memory_rejects_formats_in_layouts_without_pages_of_heads(layout: str) -> None:
    """Rows and content must be the innermost axes, and keys must be separate from values."""
    side = attrs.evolve(engine("keys-transposed", 8), layout=layout)
    error = refusal(lambda: kvspec.plan_memory(side, RankId(), 3))
    assert ("layout", layout) == (error.field, error.value)


def test_table_of_different_formats_can_be_drawn_and_explained() -> None:
    """A picture and an explanation exist for each table."""
    cache, _ = pages("keys-transposed", 8, 6)
    other, _ = pages("plain", 4, 6)
    table = kvspec.build_table(kvspec.plan_transfer(cache.engine, other.engine), cache, other)
    assert table_svg(table).startswith("<svg")
    explanation = kvspec.explain(table, consumer_id=0)
    assert all(fact in explanation for fact in ("l.0 k", "unit 0", "block 0", "row 0"))


@pytest.mark.parametrize(("dtype", "chunks"), [("bfloat16", 8), ("float32", 8), (None, 16)])
def test_chunks_of_transposed_keys_are_elements(dtype: str | None, chunks: int) -> None:
    """An element has two or four bytes. Opaque content is divided into bytes."""
    size = 16 if dtype is None else 8 * itemsize(dtype)
    assert chunks == chunks_of("keys-transposed", "k", size, dtype)
    assert 1 == chunks_of("keys-transposed", "v", size, dtype)
