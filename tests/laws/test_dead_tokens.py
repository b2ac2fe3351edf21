"""Tests that no byte of a dead token is written, unless a table is built with `dead_tokens=True`.

A dead token lies behind the last token of the request, or before the first token that moves. The
producer's memory may hold anything there, also NaN.
"""

from __future__ import annotations

import builders
import numpy as np
import pytest
import special_cases
from hypothesis import example, given, settings

import kvspec
from kvspec import EngineSpec, RankId
from kvspec.specs.formats import is_opaque
from kvspec.testing import Case, strategies
from kvspec.testing.carve import logical_views
from kvspec.testing.positions import rows_of
from kvspec.testing.world import CopiesOf, described, inside, selected, world

pytestmark = pytest.mark.uncovered

WAYS: list[CopiesOf] = [described, selected]

# The window begins inside a tile, and both ends of the window lie in one tile.
SHORT_WINDOW = builders.engine(
    kvspec.SlidingWindowSpec(
        block_size=16, total_num_kv_heads=2, head_size=2, dtype="uint8", sliding_window=4
    ),
    layout="LBHNC",
)

# Two blocks of the producer are one row of two tiles, unless the second one has a dead token.
HALVES = [
    builders.engine(builders.gqa(2, block_size=size, head_size=2), tp=tp, layout="LBHNC")
    for size, tp in ((4, 2), (8, 1))
]


def has_opaque_pages(engine: EngineSpec) -> bool:
    """Return whether a layer of *engine* has pages that can only move whole."""
    specs = [group.spec.of_layer(layer) for group in engine.groups for layer in group.layers]
    return any(is_opaque(getattr(spec, "page_format", "plain")) for spec in specs)


@given(strategies.cases() | special_cases.common_cases() | strategies.sharing_cases())
@example(builders.case(SHORT_WINDOW, SHORT_WINDOW, builders.request(13, [3], [5])))
@example(builders.case(SHORT_WINDOW, SHORT_WINDOW, builders.request(35, [0, 3, 1], [5, 2, 6])))
@example(builders.case(*HALVES, builders.request(15, [3, 4, 5, 6], [7, 2])))
def test_table_by_default_writes_no_byte_of_a_dead_token(case: Case) -> None:
    """The oracle marks all bytes that hold dead tokens. Copies must not touch any of them."""
    here = world(case)
    for p, c, table in here.tables():
        _, dead = here.right(c)
        for way in WAYS:
            for _, place, length in way(table, case.request):
                name, start = inside(here.consumers[c][1], place, length)
                assert not dead[name][start : start + length].any(), (p, c, way)
        assert has_opaque_pages(case.producer) or 0 == table.dead_bytes(case.request)


@given(strategies.cases() | special_cases.common_cases())
@settings(max_examples=settings.default.max_examples // 2)
def test_table_with_dead_tokens_moves_the_same_live_bytes_and_counts_the_dead(case: Case) -> None:
    """`dead_bytes` is the number of bytes that such a table moves more."""
    here = world(case)
    here.execute(described)
    assert [] == here.differences()
    here.restore()
    for p, c, table in here.tables():
        caches = here.producers[p][0], here.consumers[c][0]
        larger = kvspec.build_table(here.plan, *caches, dead_tokens=True)
        moved, least = (
            int(each.descriptors(case.request)[:, 2].sum()) - each.dead_bytes(case.request)
            for each in (larger, table)
        )
        assert least == moved
        here.copy((p, c), selected(larger, case.request))
    assert [] == here.differences()


def transposed(block_size: int) -> EngineSpec:
    """Return an engine with vLLM's transposed keys: two heads of four elements in float32."""
    spec = builders.gqa(
        2, block_size=block_size, head_size=4, dtype="float32", page_format="keys-transposed"
    )
    return builders.engine(spec, layout="LBHKNC")


@pytest.mark.parametrize("sizes", [(32, 32), (32, 16), (16, 32)])
@pytest.mark.parametrize("tokens", [1, 15, 33, 63])
def test_transposed_keys_leave_nan_of_dead_tokens_on_the_producer(
    sizes: tuple[int, int], tokens: int
) -> None:
    """The producer's memory is NaN except for the prompt, and the consumer's memory is 0."""
    sides = [transposed(size) for size in sizes]
    request = builders.request(tokens, [*range(64 // sizes[0])], [*range(64 // sizes[1])][::-1])
    case = builders.case(*sides, request)
    here = world(case)
    for rank, (_, storage) in here.producers.items():
        for flat in storage.values():
            flat.view(np.float32)[:] = np.nan
        ones(case, rank, storage)
    for _, storage in here.consumers.values():
        for flat in storage.values():
            flat[:] = 0
    here.execute(selected)
    [(_, storage)] = here.consumers.values()
    arrived = np.concatenate([flat.view(np.float32) for flat in storage.values()])
    assert np.isfinite(arrived).all()
    assert 2 * 2 * 4 * tokens == arrived.sum()  # One for each element of two keys and two values.


def ones(case: Case, rank: RankId, storage: dict[str, np.ndarray]) -> None:
    """Write 1.0 to each element of the request's tokens in a producer rank."""
    views = logical_views(case.producer, rank, storage, case.producer_pool)
    one = np.frombuffer(np.float32(1).tobytes(), np.uint8)
    for rows in rows_of(case.producer, rank, case.request.producer_blocks, case.request):
        for block, row in zip(rows.block[rows.known], rows.row[rows.known], strict=True):
            views[rows.key][block, :, row] = np.tile(one, rows.part.content_bytes // 4)


@pytest.mark.parametrize(("tokens", "dead"), [(16, 0), (17, 15), (31, 1)])
@pytest.mark.parametrize("page_block_size", [None, 16])
def test_dead_bytes_count_the_rest_of_an_opaque_page(
    page_block_size: int | None, tokens: int, dead: int
) -> None:
    """A page moves whole. A block of two pages moves only the pages with a live token."""
    block_size = 16 if page_block_size is None else 32
    spec = builders.gqa(
        block_size=block_size, page_format="opaque:x", page_block_size=page_block_size
    )
    side = builders.engine(spec)
    request = builders.request(tokens, [0, 1], [1, 0])
    case = builders.case(side, side, request)
    [(_, _, table)] = world(case).tables()
    token_bytes = 2 * 4 * 4 * 2  # Keys and values, heads, elements, bytes.
    assert dead * token_bytes == table.dead_bytes(request)
    assert (tokens + dead) * token_bytes == table.descriptors(request)[:, 2].sum()


@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 24])
def test_chunked_attention_writes_no_token_of_the_chunk_before(chunk: int) -> None:
    """A chunk may begin inside a block."""
    spec = kvspec.ChunkedLocalAttentionSpec(
        block_size=16, total_num_kv_heads=1, head_size=4, dtype="uint8", attention_chunk_size=chunk
    )
    side = builders.engine(spec)
    for tokens in (23, 24, 25, 31):
        request = builders.request(tokens, [0, 1], [1, 0])
        [(_, _, table)] = world(builders.case(side, side, request)).tables()
        assert tokens % chunk * 8 == table.descriptors(request)[:, 2].sum()
        assert 0 == table.dead_bytes(request)


def bytes_of(ranges: list[list[int]]) -> set[int]:
    """Return all addresses of *ranges*, which are pairs of an address and a length."""
    return {at for start, length in ranges for at in range(start, start + length)}


@settings(max_examples=max(8, settings.default.max_examples // 4))
@given(strategies.cases() | special_cases.spanning_cases())
@example(builders.case(SHORT_WINDOW, SHORT_WINDOW, builders.request(35, [0, 3, 1], [5, 2, 6])))
@example(builders.case(*HALVES, builders.request(15, [3, 4, 5, 6], [7, 2])))
def test_unwritten_ranges_leave_out_dead_tokens_that_move(case: Case) -> None:
    """A table that moves dead tokens leaves fewer bytes unwritten: those that it does not move."""
    here = world(case, blank=True)
    for p, c, table in here.tables():
        caches = here.producers[p][0], here.consumers[c][0]
        whole = kvspec.build_table(here.plan, *caches, dead_tokens=True)
        written = bytes_of(whole.descriptors(case.request)[:, 1:].tolist())
        least = bytes_of(table.unwritten_ranges(case.request).tolist())
        assert least - written == bytes_of(whole.unwritten_ranges(case.request).tolist())
