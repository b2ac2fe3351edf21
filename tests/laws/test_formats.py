"""Pages in another order: formats that are known are bridged, opaque ones move whole or not at all.

Where elements lie is written here as each engine's own kernel indexes them, element by element.
"""

from __future__ import annotations

import ctypes
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
from kvspec.dtypes import itemsize
from kvspec.specs.formats import chunks_of
from kvspec.testing import strategies

KINDS = ("full", "full, keys of 16 bytes", "sliding window", "full, V of another size")
CASES = strategies.cases(KINDS, 4)
FEW = settings(max_examples=settings.default.max_examples // 2)


def formats_of(group: kvspec.KVCacheGroup) -> str:
    """Return the format of a group's pages; those of states have none."""
    return str(getattr(group.spec, "page_format", "plain"))


def formats(case: strategies.Case) -> tuple[set[str], set[str]]:
    """Return the formats of the producer's groups and of the consumer's."""
    ours, theirs = (
        {formats_of(group) for group in side.groups} for side in (case.producer, case.consumer)
    )
    return ours, theirs


@given(CASES)
@FEW
def test_any_format_becomes_any_other(case: strategies.Case) -> None:
    """Law 1 over formats: by ids, by descriptors and by the reference; and `verify` says right."""
    assume(set.union(*formats(case)) != {"plain"})
    check_every_way(case)


def test_every_pair_of_formats_is_drawn() -> None:
    """Plain, transposed and packed, each to each."""
    seen: Counter[tuple[str, str]] = Counter()

    @given(strategies.engine_pairs(KINDS[1:2], 2))
    @settings(max_examples=1000, phases=[Phase.generate], database=None, derandomize=True)
    def look(pair: tuple[kvspec.EngineSpec, kvspec.EngineSpec]) -> None:
        ours, theirs = ({formats_of(group) for group in side.groups} for side in pair)
        seen.update((a, b) for a in ours for b in theirs)

    look()
    names = ("plain", "keys-transposed", "x-packed")
    assert [] == [(a, b) for a in names for b in names if not seen[a, b]]


HEADS, SIZE, X = 2, 16, 8
"""x: elements of two bytes in 16."""
Place = Callable[[str, int, int, int, int], int]


def transposed(part: str, rows: int, head: int, token: int, dim: int) -> int:
    """Return where vLLM's CPU attention keeps an element in its page, counted in elements."""
    first = head * 2 * rows * SIZE
    if part == "k":
        return first + dim * rows + token
    return first + rows * SIZE + token * SIZE + dim


def packed(part: str, rows: int, head: int, token: int, dim: int) -> int:
    """Return where paged attention on ROCm has one: keys [H, S/x, N, x], values [H, S, N]."""
    if part == "k":
        return ((head * (SIZE // X) + dim // X) * rows + token) * X + dim % X
    return HEADS * rows * SIZE + (head * SIZE + dim) * rows + token


def plain(part: str, rows: int, head: int, token: int, dim: int) -> int:
    """Return where heads of rows [key | value] have one."""
    return ((head * rows + token) * 2 + (part == "v")) * SIZE + dim


FORMATS: dict[str, tuple[str, str, Place]] = {
    "keys-transposed": ("keys-transposed", "LBHKNC", transposed),
    "x-packed": ("x-packed", "LBKHNC", packed),
    "plain": ("plain", "LBHNC", plain),
}


def engine(name: str, rows: int, layers: int = 2, **fields: Any) -> kvspec.EngineSpec:
    """Return an engine of one rank whose blocks have so many *rows*, in the format *name*."""
    page_format, layout, _ = FORMATS[name]
    spec = kvspec.FullAttentionSpec(
        block_size=rows, total_num_kv_heads=HEADS, head_size=SIZE, dtype="bfloat16",
        page_format=page_format, **fields,
    )  # fmt: skip
    names = tuple(f"l.{number}" for number in range(layers))
    group = kvspec.KVCacheGroup(name="g", layers=names, spec=spec)
    return kvspec.EngineSpec(groups=(group,), layout=layout)


Memory = npt.NDArray[np.uint16]


def pages(name: str, rows: int, blocks: int) -> tuple[kvspec.RankCache, Memory]:
    """Return a cache of *blocks*, and its elements [layers, blocks, elements of a page]."""
    cache, storage = kvspec.allocate(engine(name, rows), RankId(), blocks)
    return cache, storage["g"].view(np.uint16).reshape(2, blocks, 2 * HEADS * rows * SIZE)


def number(layer: int, part: str, head: int, token: int, dim: int) -> int:
    """Return the true value of an element: all of them differ."""
    return (((layer * 2 + (part == "v")) * HEADS + head) * 96 + token) * SIZE + dim + 1


def elements(tokens: range) -> list[tuple[int, str, int, int, int]]:
    """Return every (layer, part, head, token, dim)."""
    sizes = np.ndindex(2, 2, HEADS, len(tokens), SIZE)
    return [(a, "kv"[b], c, tokens[d], e) for a, b, c, d, e in sizes]


def moved(
    hops: list[tuple[str, int, list[int]]], tokens: int, cached: int = 0
) -> tuple[list[int], Memory]:
    """Move a prompt over *hops* (format, rows, block ids); return descriptors of each, the last."""
    name, rows, ids = hops[0]
    cache, memory = pages(name, rows, 6)
    for layer, part, head, token, dim in elements(range(tokens)):
        at = FORMATS[name][2](part, rows, head, token % rows, dim)
        memory[layer, ids[token // rows], at] = number(layer, part, head, token, dim)
    counts = []
    for after, size, places in hops[1:]:
        target, found = pages(after, size, 6)
        plan = kvspec.plan_transfer(cache.engine, target.engine)
        request = kvspec.TransferRequest(
            request_id="r", num_tokens=tokens, cached_tokens=cached,
            producer_blocks={"g": ids}, consumer_blocks={"g": places},
        )  # fmt: skip
        table = kvspec.build_table(plan, cache, target)
        rows_moved = table.descriptors(request).tolist()
        assert None is kvspec.verify(plan, {RankId(): cache}, {RankId(): target}, request)
        for start, stop, length in rows_moved:
            ctypes.memmove(stop, start, length)
        counts.append(len(rows_moved))
        cache, memory, ids = target, found, places
    return counts, memory


HOPS = [
    [("keys-transposed", 8, [3, 1, 5]), ("keys-transposed", 16, [2, 4]), ("plain", 4, [*range(6)])],
    [("x-packed", 8, [3, 1, 5]), ("keys-transposed", 8, [5, 0, 2]), ("x-packed", 4, [*range(6)])],
    [("plain", 8, [0, 4, 2]), ("x-packed", 16, [1, 0]), ("plain", 8, [5, 3, 1])],
]


@pytest.mark.parametrize("cached", [0, 5])
@pytest.mark.parametrize("hops", HOPS)
def test_an_element_arrives_where_the_other_kernel_reads_it(
    hops: list[tuple[str, int, list[int]]], cached: int
) -> None:
    """Over two hops of other formats and block sizes, element by element, cached ones excepted."""
    hops = hops if not cached else [hops[0], hops[-1]]
    _, memory = moved(hops, 21, cached)
    name, rows, ids = hops[-1]
    for layer, part, head, token, dim in elements(range(21)):
        at = FORMATS[name][2](part, rows, head, token % rows, dim)
        found = memory[layer, ids[token // rows], at]
        assert (number(layer, part, head, token, dim) if token >= cached else 0) == found


@pytest.mark.parametrize("name", FORMATS)
def test_whole_pages_of_one_format_are_as_many_as_plain_ones(name: str) -> None:
    """Equal formats and blocks: one descriptor a block and layer, and no more rows than plain."""
    ids = [4, 0, 2]
    counts, _ = moved([(name, 8, ids), (name, 8, [1, 3, 5])], 24)
    assert [2 * 3] == counts
    cache, _ = pages(name, 8, 6)
    plain_cache, _ = pages("plain", 8, 6)
    tables = [
        kvspec.build_table(kvspec.plan_transfer(each.engine, each.engine), each, each)
        for each in (cache, plain_cache)
    ]
    whole = [
        sum(len(e.rows) for e in table.entries if e.rows.kind == (8, 0, 8)) for table in tables
    ]
    assert whole[0] == whole[1] == 2


def test_raw_pages_are_read_as_what_they_are() -> None:
    """CPU attention hands out [blocks, heads, tokens, 2 x size]: views say what lies there."""
    rows, blocks = 8, 5
    raw = np.zeros((blocks, HEADS, rows, 2 * SIZE), np.uint16)
    heads = raw.reshape(blocks, HEADS, 2, rows * SIZE)
    given = {
        "k": heads[:, :, 0].reshape(blocks, HEADS, SIZE, rows),
        "v": heads[:, :, 1].reshape(blocks, HEADS, rows, SIZE),
    }
    described_engine = engine("keys-transposed", rows, layers=1)
    cache = kvspec.RankCache.from_tensors(
        described_engine, RankId(), {"l.0": given}, {"k": "BHPN", "v": "BHNC"}
    )
    wanted = kvspec.plan_memory(described_engine, RankId(), blocks, raw.ctypes.data)
    assert wanted.regions == cache.regions
    for token, dim in ((0, 0), (3, 5), (7, 15)):
        raw.ravel()[transposed("k", rows, 1, token, dim)] = 9
        region = cache.region("l.0", "k")
        at = region.address(0, 1, token) + region.chunk_offset(2 * dim)
        assert 9 == np.frombuffer(ctypes.string_at(at, 2), np.uint16)[0]
        assert (0, 1, token, 2 * dim) == region.locate(at)


def test_as_many_elements_as_rows_have_two_readings() -> None:
    """A square page reads transposed or not: its axes have to be said."""
    where = engine("keys-transposed", SIZE, layers=1)
    given = {name: np.zeros((5, HEADS, SIZE, SIZE), np.uint16) for name in "kv"}
    with pytest.raises(kvspec.SpecError, match="both fit"):
        kvspec.RankCache.from_tensors(
            where, RankId(), {"l.0": given | {"k": given["k"][..., None]}}
        )
    axes = {"k": "BHPN", "v": "BHNC"}
    assert 2 == len(kvspec.RankCache.from_tensors(where, RankId(), {"l.0": given}, axes).regions)


def opaque(name: str = "opaque:amx", rows: int = 8, tp_size: int = 1) -> kvspec.EngineSpec:
    """Return an engine whose pages are opaque, of two layers and two heads."""
    spec = kvspec.FullAttentionSpec(
        block_size=rows, total_num_kv_heads=HEADS, head_size=SIZE, dtype="bfloat16",
        page_format=name,
    )  # fmt: skip
    group = kvspec.KVCacheGroup(name="g", layers=("l.0", "l.1"), spec=spec)
    return kvspec.EngineSpec(groups=(group,), parallel=kvspec.ParallelConfig(tp_size=tp_size))


def refused(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec) -> list[tuple[object, ...]]:
    """Return the fields that do not fit, with both values."""
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(producer, consumer)
    return [(each.field, each.producer, each.consumer) for each in caught.value.mismatches]


def test_opaque_pages_move_whole() -> None:
    """Equal names, blocks and heads: a page is one row, and its size is that of keys and values."""
    where = opaque()
    (part,) = where.groups[0].spec.parts
    assert ("page", 1, 8, HEADS * 2 * 8 * SIZE * 2) == (
        part.name, part.states, part.tokens_per_state, part.units * part.content_bytes
    )  # fmt: skip
    cache = kvspec.plan_memory(where, RankId(), 6)
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=20, cached_tokens=8,
        producer_blocks={"g": [0, 2, 4]}, consumer_blocks={"g": [5, 3, 1]},
    )  # fmt: skip
    table = kvspec.build_table(kvspec.plan_transfer(where, where), cache, cache)
    page = HEADS * 2 * 8 * SIZE * 2
    assert [page] * 4 == [length for *_, length in table.descriptors(request).tolist()]
    inside = attrs.evolve(request, cached_tokens=9)
    with pytest.raises(kvspec.SpecError, match="cached_tokens=9: expected a multiple of"):
        table.select(inside)


def test_opaque_pages_that_do_not_fit_are_refused_by_name() -> None:
    """Another format, another block size, heads that would be cut: both values are told."""
    other = attrs.evolve(opaque(), layout="LBHKNC")
    assert [("l.0 and 1 more.page_format", "opaque:amx", "opaque:vec")] == refused(
        other, opaque("opaque:vec")
    )
    transposed_pages = engine("keys-transposed", 8)
    assert [("l.0 and 1 more.page_format", "keys-transposed", "opaque:amx")] == refused(
        transposed_pages, opaque()
    )
    assert ("l.0 and 1 more.page.tokens_per_state", 8, 16) in refused(opaque(), opaque(rows=16))
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(opaque(), opaque(tp_size=2))
    assert "page" in str(caught.value)


def finer(rows: int, kernel: int | None, page: int | None = 8) -> kvspec.EngineSpec:
    """Return an engine of opaque pages of 8 tokens whose tables have blocks of *rows* tokens."""
    whole = opaque(rows=rows)
    spec: Any = attrs.evolve(whole.groups[0].spec, page_block_size=page)  # type: ignore[call-arg]
    group = attrs.evolve(whole.groups[0], spec=spec, kernel_block_size=kernel)
    return attrs.evolve(whole, groups=(group,))


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (finer(32, 8), opaque(rows=8)),
        (opaque(rows=8), finer(32, 8)),
        (finer(32, 8), finer(16, 8)),
        (finer(32, 16), finer(48, 8)),
        (finer(32, None), finer(8, None)),
    ],
)
def test_opaque_pages_of_kernel_blocks_move_whole(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec
) -> None:
    """The kernel's block is the page, whatever the table's: equal pages move, byte for byte."""
    assert [] == moves(producer, consumer, 75, cached_tokens=24)
    assert [] == moves(consumer, producer, 75, cached_tokens=24)


def test_opaque_pages_of_other_kernel_blocks_are_refused_by_name() -> None:
    """Pages of 8 and of 16 tokens; kernel blocks that cut a page, or do not say what a page is."""
    assert [
        ("l.0 and 1 more.page.content_bytes", 1024 // 2, 1024),
        ("l.0 and 1 more.page.tokens_per_state", 8, 16),
    ] == refused(finer(32, 8), finer(32, 16, 16))
    for kernel, page in ((8, None), (8, 16), (4, 8)):
        with pytest.raises(kvspec.SpecError) as caught:
            finer(32, kernel, page)
        wanted = "expected a multiple of the spec's page_block_size, for opaque pages"
        assert f"groups['g'].kernel_block_size={kernel}: {wanted}" == str(caught.value)


def test_formats_that_are_known_mean_the_same() -> None:
    """They are no mismatch, and the compatibility hash of the two engines is one."""
    one, other = engine("keys-transposed", 8), engine("x-packed", 16)
    assert () == kvspec.mismatches(one, other)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"page_format": "plian"},
     "page_format='plian': expected one of plain, keys-transposed, x-packed, or opaque: and a name"),
    ({"page_format": "opaque:"}, "page_format='opaque:': expected one of plain,"),
    ({"page_format": None}, "page_format=None: expected one of plain,"),
    ({"page_format": "x-packed", "head_size": 4},
     "page_format='x-packed': expected a format whose chunks of 16 bytes divide the 8 bytes of k"),
    ({"page_format": "keys-transposed", "scale_dtype": "float32"},
     "page_format='keys-transposed': expected plain or opaque for a page of k, k_scale, v, v_scale"),
    ({"page_format": "keys-transposed", "state_content_bytes": 8},
     "page_format='keys-transposed': expected plain or opaque for a page of kv"),
    ({"page_block_size": 2},
     "page_block_size=2: the page_format must be opaque, but it is plain"),
    ({"page_format": "opaque:a", "page_block_size": 3},
     "page_block_size=3: expected a divisor of block_size=4"),
    ({"page_format": "opaque:a", "page_block_size": 2, "scale_dtype": "float32",
      "tokens_per_scale": 4},
     "page_block_size=2: expected a multiple of 4, the tokens of a row"),
    ({"page_format": "opaque:a", "page_block_size": 0}, "page_block_size=0: expected an int >= 1"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "wanted"), REFUSED)
def test_a_format_that_cannot_be_is_refused(fields: dict[str, Any], wanted: str) -> None:
    """An unknown name, chunks that do not divide, a page that is not keys and values."""
    base: dict[str, Any] = {
        "block_size": 4, "total_num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"
    }  # fmt: skip
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.FullAttentionSpec(**base | fields)
    assert str(caught.value).startswith(wanted)


@pytest.mark.parametrize("layout", ["LBHNC", "LBKNHC", "LKBNHC"])
def test_a_layout_without_pages_of_heads_has_no_format(layout: str) -> None:
    """Rows and content must be the innermost axes, and keys apart from values."""
    where = attrs.evolve(engine("keys-transposed", 8), layout=layout)
    with pytest.raises(kvspec.SpecError, match="N just before C, such as LBHKNC"):
        kvspec.plan_memory(where, RankId(), 3)


def test_a_page_in_any_format_can_be_drawn() -> None:
    """Whatever can be planned can be drawn, and told in words."""
    cache, _ = pages("keys-transposed", 8, 6)
    other, _ = pages("plain", 4, 6)
    table = kvspec.build_table(kvspec.plan_transfer(cache.engine, other.engine), cache, other)
    assert table_svg(table).startswith("<svg")
    assert "l.0 k: unit 0, consumer's block 0, row 0" in kvspec.explain(table, consumer_id=0)


@pytest.mark.parametrize(("dtype", "chunks"), [("bfloat16", 8), ("float32", 8), (None, 16)])
def test_transposed_keys_lie_by_element(dtype: str | None, chunks: int) -> None:
    """A chunk is an element, two bytes or four; of opaque bytes, one."""
    size = 16 if dtype is None else 8 * itemsize(dtype)
    assert chunks == chunks_of("keys-transposed", "k", size, dtype)
    assert 1 == chunks_of("keys-transposed", "v", size, dtype)
