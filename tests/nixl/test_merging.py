"""Test that pairs of ids become few descriptors with the same bytes, each in one memory."""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.analysis.fewest import descriptor_counts
from kvspec.descriptors.selection import Selection
from kvspec.descriptors.table import build_table
from kvspec.errors import SpecError
from kvspec.nixl import merging as pairs
from kvspec.nixl.rows import StridedRows, checked_rows
from kvspec.testing import strategies
from kvspec.testing.world import finest, world

HALF = settings(max_examples=settings.default.max_examples // 2)
GAP = 5
"""Bytes between memories that do not touch."""


@attrs.frozen
class Drawn:
    """Rows in memories that may touch, and ids of the rows."""

    rows: StridedRows
    ids: np.ndarray
    memories: list[range]

    def bytes_of(self) -> list[list[int]]:
        """Return the addresses of each id's bytes, counted one by one."""
        every = [
            list(range(address + step * stride, address + step * stride + length))
            for address, length, _, stride, count in self.rows.table.tolist()
            for step in range(count)
        ]
        return [every[each] for each in self.ids.tolist()]

    def memory_of(self, address: int) -> int:
        """Return which memory holds *address*."""
        return next(at for at, each in enumerate(self.memories) if address in each)


@st.composite
def sides(draw: st.DrawFn, size: int) -> Drawn:
    """Draw rows of *size* bytes for each id, and all their ids once, often in ascending order."""
    memories, table, at = [], [], 1000
    for _ in range(draw(st.integers(1, 3))):
        at += draw(st.sampled_from((0, GAP)))
        start = at
        for _ in range(draw(st.integers(1, 2))):
            dense, many = draw(st.booleans()), draw(st.integers(1, 6))
            stride = size if dense else draw(st.integers(1, 3)) * size
            first = draw(st.integers(start, at))  # Rows may share bytes.
            table.append((first, size, 0, stride, many))
            at = max(at, first + (many - 1) * stride + size)
        memories.append(range(start, at))
    rows = checked_rows(np.array(table, np.uint64))
    ids = draw(st.permutations(range(rows.total)) | st.just(range(rows.total)))
    return Drawn(rows, np.array([*ids], np.int32), memories)


@st.composite
def drawn_pairs(draw: st.DrawFn) -> tuple[Drawn, Drawn]:
    """Draw both sides of one transfer. The ids of both sides have equal lengths."""
    size = draw(st.integers(1, 3))
    one, other = draw(sides(size)), draw(sides(size))
    count = min(len(one.ids), len(other.ids))
    return attrs.evolve(one, ids=one.ids[:count]), attrs.evolve(other, ids=other.ids[:count])


def moves(local: Drawn, remote: Drawn, pairing: pairs.Pairing) -> Iterator[tuple[list[int], ...]]:
    """Yield the bytes of both sides of each descriptor of *pairing*, batch after batch."""
    ids = local.bytes_of(), remote.bytes_of()
    for batch in pairing.batches:
        if isinstance(batch, slice):
            yield from zip(ids[0][batch], ids[1][batch], strict=True)
            continue
        columns = (column.tolist() for column in batch.moved_runs)
        for one, other, length in zip(*columns, strict=True):
            yield tuple([*range(at, at + length)] for at in (one, other))


@given(drawn_pairs(), st.sampled_from(("local", "remote")), st.integers(1, 20), st.integers(1, 9))
def test_descriptors_have_the_bytes_of_the_ids(
    both: tuple[Drawn, Drawn], destination: str, most_bytes: int, most: int
) -> None:
    """For any limits, each byte moves from its source, and each descriptor is in one memory."""
    local, remote = both
    wanted = sorted(
        pair
        for one, other in zip(local.bytes_of(), remote.bytes_of(), strict=True)
        for pair in zip(one, other, strict=True)
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pairs, "MAX_BYTES", most_bytes)
        patch.setattr(pairs, "MAX_DESCRIPTORS", most)
        written = [pair[destination == "remote"] for pair in wanted]
        twice = len(set(written)) < len(written)
        sent = local.rows, local.ids, remote.rows, remote.ids, destination
        if twice:
            with pytest.raises(SpecError, match="twice") as caught:
                pairs.pair(*sent)
            assert f"{destination}_ids" == caught.value.field
            return
        pairing = pairs.pair(*sent)
    moved = list(moves(local, remote, pairing))
    assert wanted == sorted(p for one, other in moved for p in zip(one, other, strict=True))
    assert pairing.nbytes == len(wanted)
    size = int(local.rows.length[0])
    slices = [each for each in pairing.batches if isinstance(each, slice)]
    assert slices in ([], [*pairing.batches])
    assert [each.start for each in slices] == [0, *(each.stop for each in slices)][: len(slices)]
    for batch in pairing.batches:
        if isinstance(batch, slice):
            assert by_nixls_rule_of(local, remote, batch) <= most
            assert (batch.stop - batch.start) * size <= max(most_bytes, size)
        else:
            assert len(batch.moved_runs.nbytes) <= most
            assert int(batch.moved_runs.nbytes.sum()) <= most_bytes
    for side, number in ((local, 0), (remote, 1)):
        for each in moved:
            assert side.memory_of(each[number][0]) == side.memory_of(each[number][-1])


@given(strategies.cases())
def test_posted_descriptors_are_near_the_minimum(case: strategies.Case) -> None:
    """Every request posts at most 1.15 times the fewest descriptors.

    Each pool has a spare block. Without it, a row could end where another one begins, and NIXL
    could not know that both are in one memory.
    """
    pools = (
        {name: blocks + 1 for name, blocks in pool.items()}
        for pool in (case.producer_pool, case.consumer_pool)
    )
    here = world(attrs.evolve(case, producer_pool=next(pools), consumer_pool=next(pools)))
    for p, c, _ in here.tables():
        caches = finest(here.producers[p][0]), finest(here.consumers[c][0])
        table = build_table(here.plan, *caches)
        assert paired(table, case.request).runs <= 1.15 * len(table.descriptors(case.request))


def paired(table: kvspec.DescriptorTable, request: kvspec.TransferRequest) -> pairs.Pairing:
    """Return what the consumer posts for *request*."""
    rows = checked_rows(table.consumer_rows), checked_rows(table.producer_rows)
    return pairs.pair_selection(table.select(request), *rows, 1, "local")


@pytest.mark.parametrize(
    ("layouts", "cached"), [(("LHBNC", "LHBNC"), 37), (("BLHNC", "BHLNC"), 64)]
)
def test_merging_posts_fewer_descriptors_than_nixl_posts_for_the_ids(
    layouts: tuple[str, str], cached: int
) -> None:
    """The cached prefix ends inside a block, or both sides order layers and heads differently."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=8, head_size=8, dtype="bfloat16"
    )
    group = kvspec.KVCacheGroup(name="g", layers=("l.0", "l.1", "l.2"), spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=4)
    sides = [kvspec.EngineSpec(groups=(group,), parallel=parallel, layout=each) for each in layouts]
    caches = [kvspec.plan_memory(each, kvspec.RankId(), 40) for each in sides]
    table = build_table(kvspec.plan_transfer(*sides), *caches)
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=517, cached_tokens=cached,
        producer_blocks={"g": range(33)}, consumer_blocks={"g": range(33)},
    )  # fmt: skip
    fewest = len(table.descriptors(request))
    assert by_nixls_rule(table, table.select(request)) > 1.15 * fewest
    assert paired(table, request).runs <= 1.15 * fewest


def by_nixls_rule_of(local: Drawn, remote: Drawn, batch: slice) -> int:
    """Return the number of descriptors that NIXL posts for one batch of drawn ids."""
    both = (local.rows.table, remote.rows.table), (local.ids[batch], remote.ids[batch])
    return left_of(*both)


def by_nixls_rule(table: kvspec.DescriptorTable, selection: Selection) -> int:
    """Return the number of descriptors that NIXL posts for the ids and the ends of *selection*."""
    rows = table.producer_rows, table.consumer_rows
    return left_of(rows, selection.ids) + len(selection.ends)


def left_of(tables: tuple[np.ndarray, np.ndarray], ids: tuple[np.ndarray, np.ndarray]) -> int:
    """Return the number of descriptors after joining pairs that follow each other in dense rows."""
    starts = [0] if len(ids[0]) else []
    for at in range(1, len(ids[0])):
        for rows, own in zip(tables, ids, strict=True):
            ends = np.cumsum(rows[:, 4].astype(np.int64))
            row, before = (int(np.searchsorted(ends, own[n], "right")) for n in (at, at - 1))
            if row != before or own[at] != own[at - 1] + 1 or rows[row, 1] != rows[row, 3]:
                starts.append(at)
                break
    return len(starts)


@HALF
@given(strategies.cases())
def test_counts_follow_the_rule_of_nixl(case: strategies.Case) -> None:
    """`descriptor_counts` counts what NIXL posts by its own rule, id by id."""
    for _, _, table in world(case).tables():
        posted, fewest = descriptor_counts(table, case.request)
        assert by_nixls_rule(table, table.select(case.request)) == posted
        assert len(table.descriptors(case.request)) == fewest <= posted


def test_counts_join_adjacent_blocks_of_dense_rows() -> None:
    """In this layout, the row of one token in all blocks is dense."""
    sides = []
    for size in (4, 2):
        spec = kvspec.MLAAttentionSpec(block_size=size, head_size=4, dtype="int8")
        group = kvspec.KVCacheGroup(name="g", layers=("l.0",), spec=spec)
        sides.append(kvspec.EngineSpec(groups=(group,), layout="LHNBC"))
    caches = [
        kvspec.plan_memory(each, kvspec.RankId(), n) for each, n in zip(sides, (2, 4), strict=True)
    ]
    table = build_table(kvspec.plan_transfer(*sides), *caches)
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=8, producer_blocks={"g": [0, 1]},
        consumer_blocks={"g": [0, 2, 1, 3]},
    )  # fmt: skip
    assert (4, 4) == descriptor_counts(table, request)


def joined(pairing: pairs.Pairing) -> list[list[list[int]]]:
    """Return the columns of each batch that is passed by address."""
    plain = [batch.moved_runs for batch in pairing.batches if not isinstance(batch, slice)]
    return [[column.tolist() for column in moved_runs] for moved_runs in plain]


def test_runs_of_rows_that_share_memory_are_joined() -> None:
    """The end of a tile and the next tiles become one descriptor, although their rows differ."""
    rows = checked_rows(np.array([(1000, 16, 0, 16, 8), (1000, 4, 0, 4, 32)], np.uint64))
    ids = np.array([8 + 6, 8 + 7, 2, 3, 4], np.int32)  # 8 bytes, and then three tiles.
    pairing = pairs.pair(rows, ids, rows, ids, "local")
    assert (1, 56) == (pairing.runs, pairing.nbytes)
    assert [[[1024], [1024], [56]]] == joined(pairing)


def test_runs_of_rows_that_only_touch_are_separate() -> None:
    """A row that begins at the end of another row may be in another registered memory."""
    rows = checked_rows(np.array([(1000, 16, 0, 16, 8), (1128, 16, 0, 16, 8)], np.uint64))
    pairing = pairs.pair(rows, np.arange(16), rows, np.arange(16), "local")
    assert ([], 2) == (joined(pairing), pairing.runs)


def test_rows_of_two_devices_are_separate() -> None:
    """The addresses of two devices overlap, but they are two memories."""
    rows = checked_rows(np.array([(1000, 16, 0, 16, 8), (1016, 16, 1, 16, 8)], np.uint64))
    ids = np.array([0, 8], np.int32)
    assert [] == joined(pairs.pair(rows, ids, rows, ids, "local"))


def test_long_run_is_divided_into_descriptors_of_one_handle(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each descriptor has at most 64 MiB, and the last one has the rest."""
    monkeypatch.setattr(pairs, "MAX_BYTES", 64 << 20)
    rows = checked_rows(
        np.array([(0, 1 << 20, 0, 1 << 20, 200), (0, 1, 0, 1, 200 << 20)], np.uint64)
    )
    ids = np.array([200 + (1 << 20) - 1, *range(1, 131)], np.int32)
    pairing = pairs.pair(rows, ids, rows, ids, "remote")
    starts = [(1 << 20) - 1, (65 << 20) - 1, (129 << 20) - 1]
    lengths = [64 << 20, 64 << 20, (2 << 20) + 1]
    assert [[[at], [at], [n]] for at, n in zip(starts, lengths, strict=True)] == joined(pairing)
