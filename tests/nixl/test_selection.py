"""Test that a selection moves the same bytes in the same descriptors as its ids."""

from __future__ import annotations

from itertools import pairwise, product
from typing import Any

import builders
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec import DescriptorTable, RankId, SpecError
from kvspec.nixl import NixlRank, merging
from kvspec.nixl.merging import (
    Pairing,
    Plain,
    checked_ids,
    continues_in_row,
    fits,
    pair,
    pair_selection,
    plain_ends,
)
from kvspec.nixl.rows import checked_rows
from kvspec.ownership.replicas import Role
from kvspec.testing import Case, strategies
from kvspec.testing.world import world

UNLIMITED = 1 << 40


def rows_of(table: DescriptorTable) -> dict[Role, Any]:
    """Return the checked rows of both sides."""
    return {
        "producer": checked_rows(table.producer_rows),
        "consumer": checked_rows(table.consumer_rows),
    }


def both(
    table: DescriptorTable, request: kvspec.TransferRequest, target: Role
) -> tuple[Pairing, Pairing]:
    """Return the pairs by tile and the pairs by id. *target* is the side that is written."""
    selection, rows = table.select(request), rows_of(table)
    ids = [
        checked_ids("ids", each, rows[side].total)
        for side, each in zip(("producer", "consumer"), selection.ids, strict=True)
    ]
    local: Role = "consumer"
    name = "local" if target == local else "remote"
    ends = plain_ends(selection.end_parts, 1)
    one_by_one = pair(rows["consumer"], ids[1], rows["producer"], ids[0], name, ends)
    pairing = pair_selection(selection, rows["consumer"], rows["producer"], 1, name)
    return pairing, one_by_one


def moved(pairing: Pairing) -> list[tuple[int, int, int]]:
    """Return the address on both sides and the length of the copied bytes, joined if they touch."""
    found: list[tuple[int, int, int]] = []
    for local, remote, nbytes in sorted(
        zip(*(each.tolist() for each in pairing.moved_runs()), strict=True)
    ):
        begin, size = (local, remote), nbytes
        if found and (found[-1][0] + found[-1][2], found[-1][1] + found[-1][2]) == begin:
            first = found.pop()
            begin, size = first[:2], first[2] + nbytes
        found.append((*begin, size))
    return found


def joined(pairing: Pairing) -> bool:
    """Whether all descriptors are passed to NIXL by address."""
    return all(isinstance(batch, Plain) for batch in pairing.batches)


def posted(rows: dict[Role, Any], pairing: Pairing, *batches: slice | Plain) -> int:
    """Return the number of descriptors that NIXL posts. It joins ids of one dense row."""
    count = 0
    for batch in batches or pairing.batches:
        if isinstance(batch, Plain):
            count += len(batch.moved_runs.nbytes)
            continue
        sides = zip(rows.values(), (pairing.remote_ids, pairing.local_ids), strict=True)
        one, other = (continues_in_row(s, ids[batch], s.row_of(ids[batch])) for s, ids in sides)
        count += len(one) + 1 - int((one & other).sum()) if len(pairing.local_ids[batch]) else 0
    return count


@given(strategies.cases() | strategies.sharing_cases())
def test_pairs_by_tile_equal_pairs_by_id(case: Case) -> None:
    """Bytes, posted descriptors and copied bytes are equal for pull and push."""
    here = world(case)
    for _, _, table in here.tables():
        for target in ("consumer", "producer"):
            found, expected = both(table, case.request, target)  # type: ignore[arg-type]
            assert (expected.nbytes, moved(expected)) == (found.nbytes, moved(found))
            # Only a sample of a large selection is merged, so a few joins may be missed.
            large = len(found.local_ids) > merging.SAMPLE
            assert expected.runs == found.runs or (large and joined(expected))
            assert found.runs == posted(rows_of(table), found)
            slices = [batch for batch in found.batches if isinstance(batch, slice)]
            ends = [0, *(batch.stop for batch in slices)]
            assert [slice(*each) for each in pairwise(ends)] == slices
            assert ends[-1] == len(found.local_ids) or joined(found)


@pytest.mark.parametrize("sizes", [(4, 8), (8, 4), (12, 4), (8, 12), (4, 4)])
@pytest.mark.parametrize("tp_sizes", [(2, 2), (4, 2), (2, 1)])
def test_unequal_blocks_are_counted_like_nixl_joins_them(
    sizes: tuple[int, int], tp_sizes: tuple[int, int]
) -> None:
    """The counted descriptors equal those that NIXL posts, also if tiles are out of order."""
    names = ("LBHNC", "LBNHC", "LKBHNC", "BLHNC", "LHBNC")
    for layouts in product(names, repeat=2):
        case = unequal(layouts, sizes, tp_sizes)
        for _, _, table in world(case).tables():
            found, expected = both(table, case.request, "consumer")
            assert (expected.nbytes, expected.runs) == (found.nbytes, found.runs)
            assert found.runs == posted(rows_of(table), found)


@given(strategies.cases(), st.integers(1, 9), st.integers(1, 4096) | st.just(UNLIMITED))
def test_each_batch_fits_into_one_handle(case: Case, descriptors: int, nbytes: int) -> None:
    """Handles have any limits and share no run. A transfer that fits into one handle uses one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(merging, "MAX_DESCRIPTORS", descriptors)
        patch.setattr(merging, "MAX_BYTES", nbytes)
        for _, _, table in world(case).tables():
            found, _ = both(table, case.request, "consumer")
            rows = rows_of(table)
            if fits(found.runs, found.nbytes) and found.runs:
                assert len(found.batches) == 1
            consumer = rows["consumer"]
            length = consumer.length[consumer.row_of(found.local_ids)]
            for batch in found.batches:
                assert posted(rows, found, batch) <= descriptors
                if isinstance(batch, Plain):
                    assert batch.moved_runs.nbytes.sum() <= max(nbytes, batch.moved_runs.nbytes[0])
                else:
                    assert length[batch].sum() <= nbytes or batch.stop - batch.start == 1
            if nbytes == UNLIMITED:  # Else a run that is too long for one handle is cut.
                assert found.runs == posted(rows, found)


def unequal(layouts: tuple[str, str], sizes: tuple[int, int], tp_sizes: tuple[int, int]) -> Case:
    """Return a request of 24 tokens in blocks of unequal *sizes*. Some block ids are adjacent."""
    sides = [
        builders.engine(
            builders.gqa(4, block_size=size), layers=("l.0", "l.1"), tp=tp, layout=layout
        )
        for size, tp, layout in zip(sizes, tp_sizes, layouts, strict=True)
    ]
    tables = [[1, 2, 0, 5, 4, 3][: -(-24 // size)] for size in sizes]
    return builders.case(*sides, builders.request(24, *tables))


def shuffled(layouts: tuple[str, str], tokens: int = 30, **more: Any) -> Case:
    """Return a request of shuffled blocks between TP 4 and TP 2, in *layouts*."""
    sides = [
        builders.engine(
            builders.gqa(4, block_size=4), layers=("l.0", "l.1", "l.2"), tp=tp, layout=layout
        )
        for tp, layout in zip((4, 2), layouts, strict=True)
    ]
    return builders.case(
        *sides, builders.request(tokens, [5, 1, 2, 3, 9, 0, 7, 8], range(8), **more)
    )


PLAIN = [("LBHNC", "LBHNC"), ("LBNHC", "LBHNC"), ("LKBHNC", "LBHNC"), ("LKBNHC", "LKBNHC")]


@pytest.mark.parametrize("layouts", PLAIN)
@pytest.mark.parametrize("cached", [0, 8])
def test_common_layouts_are_paired_by_tile(layouts: tuple[str, str], cached: int) -> None:
    """The layouts of most engines take the fast path, so that benchmarks measure it."""
    case = shuffled(layouts, 32, cached_tokens=cached)
    here = world(case)
    for _, _, table in here.tables():
        found, expected = both(table, case.request, "consumer")
        assert (expected.nbytes, expected.runs) == (found.nbytes, found.runs)
        assert [batch for batch in found.batches if isinstance(batch, slice)]


@pytest.mark.parametrize(
    ("layouts", "cached", "tokens", "pays"),
    [
        (("LHBNC", "LHBNC"), 64, 528, False),
        (("LKBNHC", "BLHNC"), 64, 517, False),
    ],
)
def test_sample_shows_whether_merging_across_rows_pays(
    layouts: tuple[str, str],
    cached: int,
    tokens: int,
    pays: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A selection of more ids than the sample is decided like all of its ids."""
    monkeypatch.setattr(merging, "SAMPLE", 64)
    monkeypatch.setattr(merging, "IDS_FOR_A_POST", 1 << 20)  # Looking at ids costs nothing.
    found, expected, descriptors = sampled(layouts, cached, tokens)
    assert len(expected.local_ids) > 64
    assert joined(found) == pays == joined(expected)
    assert found.runs <= 1.15 * descriptors


def test_large_selection_is_not_merged_to_spare_few_descriptors(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Looking at all ids would take longer than posting the ends of blocks separately."""
    monkeypatch.setattr(merging, "SAMPLE", 64)
    found, expected, _ = sampled(("LHBNC", "LHBNC"), 37, 528)
    assert joined(expected)
    assert not joined(found)


def sampled(layouts: tuple[str, str], cached: int, tokens: int) -> tuple[Pairing, Pairing, int]:
    """Return the pairings of a selection and of its ids, and the merged descriptors."""
    layers = tuple(f"l.{number}" for number in range(3))
    sides = [
        builders.engine(builders.gqa(8), layers=layers, tp=4, layout=layout) for layout in layouts
    ]
    caches = [kvspec.plan_memory(side, RankId(), 40) for side in sides]
    table = kvspec.build_table(kvspec.plan_transfer(*sides), *caches)
    request = builders.request(tokens, range(33), range(33), cached_tokens=cached)
    return *both(table, request, "consumer"), len(table.descriptors(request))


def test_selection_contains_ids_and_ends() -> None:
    """The request has 30 tokens in blocks of 4, so the last two tokens are an end."""
    case = shuffled(PLAIN[0])
    here = world(case)
    table = here.table(RankId(), RankId())
    selection = table.select(case.request)
    ids = len(selection.producer_ids), len(selection.consumer_ids)
    assert [sum(len(e.rows) * len(c) for e, c in selection.parts)] * 2 == [*ids]
    assert 0 < len(selection.ends) == len(selection) - ids[0]
    assert selection.nbytes == int(table.descriptors(case.request)[:, 2].sum())
    with pytest.raises(ValueError, match="read-only"):
        table.consumer_rows[0] = 0


@pytest.mark.parametrize("operation", ["READ", "WRITE"])
def test_selection_moves_the_same_bytes_as_its_ids(operation: str) -> None:
    """Real NIXL moves every byte right for pull and push."""
    case = shuffled(PLAIN[0], cached_tokens=6)
    here = world(case)
    with NixlRank(secret=b"") as producer, NixlRank(secret=b"") as consumer:
        for side, ranks in ((producer, here.producers), (consumer, here.consumers)):
            for cache, storage in ranks.values():
                side.register(cache.memory, owner=storage)
        pulled = operation == "READ"
        local, remote = (consumer, producer) if pulled else (producer, consumer)
        peer = local.connect(remote.metadata())
        for _, _, table in here.tables():
            lists = [
                local.prepare(rows, peer=None if own is pulled else peer)
                for own, rows in ((True, table.consumer_rows), (False, table.producer_rows))
            ]
            first, second = lists if pulled else lists[::-1]
            move = local.read if pulled else local.write
            move(first, table.select(case.request), second, request="r", timeout=10).wait()
    assert [] == here.differences()


def test_ids_of_a_selection_are_read_only() -> None:
    """A transfer checks only the parts of a selection, so the ids cannot be changed."""
    case = shuffled(PLAIN[0])
    selection = world(case).table(RankId(), RankId()).select(case.request)
    for ids in selection.ids:
        with pytest.raises(ValueError, match="read-only"):
            ids[0] = 10**6
        ids.copy()[0] = 10**6


def test_selection_of_another_table_is_refused() -> None:
    """Equal rows of another array are refused, and so are ids in addition to a selection."""
    case = shuffled(PLAIN[0])
    tables = [world(case).table(RankId(), RankId()) for _ in range(2)]
    here = world(case)
    with NixlRank(secret=b"") as rank, NixlRank(secret=b"") as peer:
        own = here.table(RankId(), RankId())
        for side, ranks in ((rank, here.consumers), (peer, here.producers)):
            for cache, storage in ranks.values():
                side.register(cache.memory, owner=storage)
        name = rank.connect(peer.metadata())
        lists = rank.prepare(own.consumer_rows), rank.prepare(own.producer_rows, peer=name)
        local, remote = lists
        for selection in (tables[0].select(case.request), tables[1].select(case.request)):
            with pytest.raises(SpecError) as caught:
                rank.read(local, selection, remote, request="r", timeout=1)
            assert "local_ids" == caught.value.field
        mine = own.select(case.request)
        for ids in ((mine, mine.producer_ids), (mine.consumer_ids, None)):
            with pytest.raises(SpecError) as caught:
                rank.read(local, ids[0], remote, ids[1], request="r", timeout=1)
            assert "remote_ids" == caught.value.field
        rank.read(local, mine, remote, mine, request="r", timeout=10).wait()


def padded(descriptors: int) -> Case:
    """Return a request of two layers whose pages are equal. The content of one fills its page."""
    sizes = {"block_size": 4, "total_num_kv_heads": 1, "dtype": "uint8"}
    specs = {
        "l.0": kvspec.FullAttentionSpec(**sizes, head_size=8),
        "l.1": kvspec.FullAttentionSpec(**sizes, head_size=4, page_size_padded=64),
    }
    spec = kvspec.UniformTypeKVCacheSpecs(specs=specs)
    group = kvspec.KVCacheGroup(name="g", layers=[*specs], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    blocks = [*range(1, 2 * descriptors + 3)]
    return builders.case(engine, engine, builders.request(4 * len(blocks), blocks, blocks))


@pytest.mark.parametrize("descriptors", [1, 2, 5])
def test_handles_cut_no_joined_run_of_a_layer_beside_one_with_padding(
    monkeypatch: pytest.MonkeyPatch, descriptors: int
) -> None:
    """NIXL joins the blocks of the layer whose content fills the page, and not of the other."""
    monkeypatch.setattr(merging, "MAX_DESCRIPTORS", descriptors)
    case = padded(descriptors)
    for _, _, table in world(case).tables():
        found, _ = both(table, case.request, "consumer")
        assert not joined(found)
        rows = rows_of(table)
        assert 1 + len(case.request.producer_blocks["g"].block_ids) == found.runs
        assert found.runs == posted(rows, found)
        for batch in found.batches:
            assert posted(rows, found, batch) <= descriptors


def test_handles_of_limited_bytes_are_cut_between_joined_runs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A block has 64 bytes. Four blocks would fit into a handle, but NIXL joins three and three."""
    monkeypatch.setattr(merging, "MAX_BYTES", 4 * 64)
    side = builders.engine(builders.gqa(1, block_size=4, head_size=8, dtype="uint8"))
    blocks = [1, 2, 3, 5, 6, 7]
    case = builders.case(side, side, builders.request(24, blocks, blocks))
    [(_, _, table)] = world(case).tables()
    found, _ = both(table, case.request, "consumer")
    assert (slice(0, 3), slice(3, 6)) == found.batches
    assert 2 == found.runs == posted(rows_of(table), found)
