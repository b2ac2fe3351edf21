"""The blocks that may be cached after a load are exactly those in which each byte is true."""

from __future__ import annotations

from collections import Counter

import attrs
import builders
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import Phase, example, given, settings
from special_cases import common_cases, interleaved_cases, spanning_cases

import kvspec
from kvspec.check.counting import cached_tokens_of, context_of, live_positions
from kvspec.descriptors.complete import complete_blocks, complete_tokens
from kvspec.testing import Case, oracle, strategies
from kvspec.testing.carve import Bytes, logical_views
from kvspec.testing.parallels import is_state
from kvspec.testing.positions import PartRows, excluded_layers, rows_of
from kvspec.testing.world import SEED, World, described, world

Place = tuple[str, int]
"""A group, and the index of a block in its table."""


def truth(rows: PartRows) -> Bytes:
    """Return the true bytes of *rows*, of shape (entries, units, bytes)."""
    _, layer, part = rows.key
    per_token = rows.part.per_token
    numbers, seen = (rows.token, -1) if per_token else (rows.row, rows.seen)
    size = rows.part.content_bytes
    return oracle.content(layer, part, rows.units, numbers, size, seed=SEED, seen=seen).swapaxes(
        0, 1
    )


class Judge:
    """Compare each block of a consumer with the truth, byte by byte, on all ranks and layers."""

    def __init__(self, case: Case) -> None:
        self.here: World = world(case)
        self.case, self.request = case, case.request
        self.tables = case.request.consumer_blocks

    def rows(self, rank: kvspec.RankId) -> list[PartRows]:
        """Return the rows of the layers that move."""
        excluded = excluded_layers(self.case.producer) | excluded_layers(self.case.consumer)
        engine, source = self.case.consumer, self.case.producer
        rows = rows_of(engine, rank, self.tables, self.request, source=source)
        return [each for each in rows if each.key[1] not in excluded]

    def views(self, rank: kvspec.RankId) -> dict[tuple[str, str, str], Bytes]:
        """Return the memory of a rank."""
        storage = self.here.consumers[rank][1]
        return logical_views(self.case.consumer, rank, storage, self.case.consumer_pool)

    def valid_before(self, rows: PartRows) -> npt.NDArray[np.bool_]:
        """Return which rows the consumer had before the load, as the request describes it."""
        cached = cached_tokens_of(self.request, self.case.consumer.group(rows.key[0]))
        if not rows.part.per_token:
            return np.full(len(rows.row), 0 < cached == self.request.num_tokens)
        return ~rows.live & (rows.token < cached)

    def load(self) -> None:
        """Write true bytes to the rows that were valid before, and execute the transfer."""
        for rank in self.here.consumers:
            views = self.views(rank)
            for rows in self.rows(rank):
                valid = self.valid_before(rows)
                views[rows.key][rows.block[valid], :, rows.row[valid]] = truth(rows)[valid]
        self.here.execute(described)

    def spoil_dead(self) -> None:
        """Make each dead byte wrong: the producer need not hold it, so any byte may arrive."""
        for rank in self.here.consumers:
            views = self.views(rank)
            for rows in self.rows(rank):
                dead = rows.dead
                views[rows.key][rows.block[dead], :, rows.row[dead]] = ~truth(rows)[dead]

    def complete(self) -> dict[Place, bool]:
        """Return for each block whether each of its bytes is true, on every rank and layer."""
        complete: dict[Place, bool] = {}
        for rank in self.here.consumers:
            views = self.views(rank)
            for rows in self.rows(rank):
                name = rows.key[0]
                right = views[rows.key][rows.block, :, rows.row] == truth(rows)
                final = self.final(rows) & right.all(axis=(1, 2))
                for index, is_final in zip(self._index(rows), final, strict=True):
                    place = name, int(index)
                    complete[place] = complete.get(place, True) and bool(is_final)
        return complete

    def _index(self, rows: PartRows) -> npt.NDArray[np.int64]:
        """Return the index in the table of each row's block."""
        group = self.case.consumer.group(rows.key[0])
        table, size = self.tables[group.name], group.spec.block_size
        if not rows.part.per_token:
            last = (self.request.num_tokens - 1 - table.first_token) // size
            return np.full(len(rows.row), last if len(table.block_ids) > 1 else 0)
        return (rows.token - table.first_token) // (size * self._context(group))

    def _context(self, group: kvspec.KVCacheGroup) -> int:
        return context_of(self.case.consumer, kvspec.RankId(), group)[1]

    def final(self, rows: PartRows) -> npt.NDArray[np.bool_]:
        """Return which rows never change again: the prompt or the cached prefix fills them."""
        group = self.case.consumer.group(rows.key[0])
        if not rows.part.per_token:
            table, size = self.tables[group.name], group.spec.block_size
            end = table.first_token + (self._index(rows) + 1) * size
            return np.equal(end, self.request.num_tokens) & (end > 0)
        live = live_positions(group.spec.of_layer(rows.key[1]), self.request)
        known = max(len(live), cached_tokens_of(self.request, group))
        return rows.token + rows.part.tokens_per_state <= known

    def first_index(self, name: str) -> int:
        """Return the index of the first block that still belongs to the request for sure."""
        group = self.case.consumer.group(name)
        if is_state(group.spec):
            return 0
        live = live_positions(group.spec.of_layer(group.layers[0]), self.request)
        first = int(np.argmax(live)) if live.any() else len(live)
        size = group.spec.block_size * self._context(group)
        return first // size - self.tables[name].first_token // size

    def named(self) -> set[Place]:
        """Return the blocks that the library names."""
        places = set()
        _, _, table = next(self.here.tables(), (None, None, None))
        blocks = complete_blocks(self.here.plan, self.request)
        if table is not None:  # Each table of the plan returns the same blocks.
            assert str(blocks) == str(table.complete_blocks(self.request))
        for name, ids in blocks.items():
            index = [np.flatnonzero(self.tables[name].block_ids == block) for block in ids]
            assert [1] * len(ids) == [len(each) for each in index]
            assert sorted(np.concatenate([[], *index])) == list(np.concatenate([[], *index]))
            places |= {(name, int(each[0])) for each in index}
        return places


CASES = strategies.cases() | strategies.sharing_cases() | common_cases()
SPREAD = spanning_cases() | interleaved_cases()


def chunked(num_tokens: int, cached: int) -> Case:
    """Return chunks of eight tokens over six blocks of four tokens."""
    spec = kvspec.ChunkedLocalAttentionSpec(
        block_size=4, total_num_kv_heads=1, head_size=1, dtype="uint8", attention_chunk_size=8
    )
    side, ids = builders.engine(spec), [3, 1, 5, 2, 0, 4]
    return builders.case(side, side, builders.request(num_tokens, ids, ids, cached_tokens=cached))


def windowed(num_tokens: int, window: int, cached: int = 0, **fields: int) -> Case:
    """Return a window over four blocks of eight tokens."""
    spec = builders.window(window, 1, block_size=8, head_size=1, dtype="uint8", **fields)
    side = builders.engine(spec)
    ids = [3, 1, 2, 0]
    return builders.case(side, side, builders.request(num_tokens, ids, ids, cached_tokens=cached))


def state_given_back() -> Case:
    """Return a cached state whose block was given back."""
    side = builders.engine(builders.mamba2(block_size=16))
    load = builders.request(32, [0, 1], [2, -1], cached_tokens=32)
    return builders.case(side, side, load)


@given(CASES | SPREAD)
@example(state_given_back())
@example(windowed(31, 20))
@example(windowed(32, 22, tokens_per_state=4))
@example(windowed(32, 30, cached=3))
@example(windowed(32, 1, cached=32))
@example(windowed(30, 1, cached=30))
@example(chunked(16, 16))
@example(chunked(16, 24))
def test_complete_blocks_are_the_blocks_whose_bytes_are_all_true(case: Case) -> None:
    """Each named block is true after the load. Each other block may contain a wrong byte."""
    judge = Judge(case)
    judge.load()
    named, arrived = judge.named(), judge.complete()
    assert all(arrived[place] for place in named)
    judge.spoil_dead()
    true_blocks = {
        (name, index)
        for (name, index), complete in judge.complete().items()
        if complete and index >= judge.first_index(name)
    }
    assert true_blocks == named


@given(CASES | SPREAD)
@example(windowed(31, 20))
@example(windowed(30, 22, tokens_per_state=4))
def test_complete_tokens_are_the_tokens_whose_bytes_are_all_true(case: Case) -> None:
    """A token is complete if each row that describes it is true on every rank and layer."""
    judge = Judge(case)
    judge.load()
    judge.spoil_dead()
    wrong: dict[str, set[int]] = {}
    held: dict[str, set[int]] = {}
    for rank in judge.here.consumers:
        views = judge.views(rank)
        for rows in judge.rows(rank):
            if rows.part.per_token and rows.part.name != "ring":
                right = (views[rows.key][rows.block, :, rows.row] == truth(rows)).all(axis=(1, 2))
                tokens = rows.token[:, None] + np.arange(rows.part.tokens_per_state)
                good = right & judge.final(rows)
                held.setdefault(rows.key[0], set()).update(tokens.ravel().tolist())
                wrong.setdefault(rows.key[0], set()).update(tokens[~good].ravel().tolist())
    named = complete_tokens(judge.here.plan, judge.request)
    for name, positions in held.items():
        complete = {token for each in named[name] for token in each}
        assert positions - wrong[name] == positions & complete


def windows(
    num_tokens: int, ids: list[int], window: int = 20, null: int | None = None, **fields: int
) -> list[int]:
    """Return the complete blocks of a table of blocks of eight tokens."""
    side = builders.engine(builders.window(window, 1, block_size=8), null_block=null)
    load = builders.request(num_tokens, [4, 5, 6, 7], ids, **fields)
    blocks: list[int] = complete_blocks(kvspec.plan_transfer(side, side), load)["g"].tolist()
    return blocks


def test_block_with_dead_tokens_before_the_window_is_not_complete() -> None:
    """The window of 20 reads the tokens 12 to 30, so the second block has four dead tokens."""
    assert [2] == windows(31, [3, 1, 2, 0])
    assert [1, 2] == windows(31, [3, 1, 2, 0], cached_tokens=16)
    assert [1, 2] == windows(31, [3, 1, 2, 0], cached_tokens=12)
    assert [2] == windows(31, [3, 1, 2, 0], cached_tokens=11)


def test_block_before_the_first_live_token_is_not_complete() -> None:
    """All tokens of the first block were cached, but the request may have given it back."""
    assert 3 not in windows(31, [3, 1, 2, 0], cached_tokens=31)
    assert [3, 1, 2] == windows(31, [3, 1, 2, 0], window=31, cached_tokens=31)


@pytest.mark.parametrize(
    ("null", "ids", "complete"),
    [
        (9, [3, 9, 2, 0], [2]),  # The null block is a placeholder.
        (None, [3, -1, 2, 0], [2]),  # So are a negative id
        (None, [3, 3, 2, 0], [2]),  # and an id that repeats.
    ],
)
def test_placeholders_in_a_table_are_not_complete(
    null: int | None, ids: list[int], complete: list[int]
) -> None:
    """All tokens up to 16 were cached, and the window begins at token 12."""
    assert complete == windows(31, ids, null=null, cached_tokens=16)


def test_row_that_the_cached_prefix_does_not_fill_is_not_complete() -> None:
    """Rows of four tokens: 22 cached tokens fill five rows."""
    side = builders.engine(builders.gqa(1, block_size=8, tokens_per_state=4))
    plan = kvspec.plan_transfer(side, side)
    load = builders.request(20, [0, 1, 2], [5, 6, 7], cached_tokens=22)
    assert {"g": (range(20),)} == complete_tokens(plan, load)


def test_cached_prefix_without_a_move_is_complete() -> None:
    """The consumer has cached everything, so nothing moves."""
    side = builders.engine(builders.gqa(1, block_size=8))
    plan = kvspec.plan_transfer(side, side)
    load = builders.request(20, [0, 1, 2], [5, 6, 7], cached_tokens=24)
    assert [5, 6, 7] == complete_blocks(plan, load)["g"].tolist()
    assert {"g": (range(24),)} == complete_tokens(plan, load)


@pytest.mark.parametrize(
    ("num_tokens", "cached", "complete"), [(32, 0, [6]), (32, 32, [6]), (32, 40, []), (31, 0, [])]
)
def test_state_is_complete_only_at_the_end_of_its_block(
    num_tokens: int, cached: int, complete: list[int]
) -> None:
    """A later prompt looks for the state after a whole number of blocks."""
    side = builders.engine(builders.mamba2(block_size=16))
    load = builders.request(num_tokens, [0, 1], [5, 6], cached_tokens=cached)
    blocks = complete_blocks(kvspec.plan_transfer(side, side), load)
    assert complete == blocks["g"].tolist()
    assert {} == complete_tokens(kvspec.plan_transfer(side, side), load)


def test_state_with_rows_of_the_consumer_alone_is_not_complete() -> None:
    """The producer has no rows for speculative tokens, so they do not move."""
    sides = [
        builders.engine(builders.mamba2(block_size=16, num_speculative_tokens=n)) for n in (0, 1)
    ]
    plan = kvspec.plan_transfer(sides[0], sides[1], common_states=True)
    for cached, complete in ((0, []), (32, [6])):
        load = builders.request(32, [0, 1], [5, 6], cached_tokens=cached)
        assert complete == complete_blocks(plan, load)["g"].tolist()


def state(**rows: int) -> kvspec.MambaSpec:
    """Return a conv state whose parts have these numbers of rows."""
    parts = (
        kvspec.Part(name=f"conv_{name}", units=1, states=count, content_bytes=1, tokens_per_state=0)
        for name, count in rows.items()
    )
    return kvspec.MambaSpec(state_parts=parts, block_size=4)


@pytest.mark.parametrize(
    ("rows", "complete"),
    [
        ([{"a": 3, "b": 2}, {"a": 3, "b": 2}], [2]),
        ([{"a": 5, "b": 2}, {"a": 3, "b": 2}], [2]),
        ([{"a": 2, "b": 3}, {"a": 3, "b": 3}], []),
        # The rows of both sides are 2 and 3, but they are those of other parts.
        ([{"a": 2, "b": 2}, {"a": 3, "b": 2}], []),
        ([{"a": 2, "b": 3, "c": 2}, {"a": 3, "b": 3, "c": 2}], []),
    ],
)
def test_state_without_rows_of_one_part_is_not_complete(
    rows: list[dict[str, int]], complete: list[int]
) -> None:
    sides = [builders.engine(state(**parts)) for parts in rows]
    plan = kvspec.plan_transfer(sides[0], sides[1], common_states=True)
    assert complete == complete_blocks(plan, builders.request(4, [1], [2]))["g"].tolist()


def test_state_without_rows_of_one_layer_is_not_complete() -> None:
    """The producer has a group for each layer, and the state of the first has fewer rows."""
    groups = [
        builders.group(state(a=rows), layer, name=layer) for rows, layer in ((2, "l.0"), (3, "l.1"))
    ]
    consumer = builders.engine(builders.group(state(a=3), "l.0", "l.1"))
    plan = kvspec.plan_transfer(builders.engine(*groups), consumer, common_states=True)
    load = builders.request(4, {"l.0": [1], "l.1": [1]}, [2])
    assert [] == complete_blocks(plan, load)["g"].tolist()


@pytest.mark.parametrize(("null", "ids"), [(0, [3, 0]), (None, [3, -1]), (None, [3, 3])])
def test_state_in_a_placeholder_is_not_complete(null: int | None, ids: list[int]) -> None:
    """A table has a placeholder if the state was given back."""
    side = builders.engine(builders.mamba2(block_size=16), null_block=null)
    load = builders.request(32, [1, 2], ids, cached_tokens=32)
    assert [] == complete_blocks(kvspec.plan_transfer(side, side), load)["g"].tolist()


def test_groups_whose_layers_all_stay_have_no_entry() -> None:
    """A draft layer of the consumer does not move, so the load completes none of its blocks."""
    spec = builders.gqa(1, block_size=8)
    target = builders.group(spec, "l", name="g")
    draft = builders.group(spec, "draft", name="draft", excluded=("draft",))
    plan = kvspec.plan_transfer(builders.engine(target), builders.engine(target, draft))
    load = builders.request(16, [0, 1], {"g": [5, 6], "draft": [1, 2]})
    assert ["g"] == list(complete_blocks(plan, load)) == list(complete_tokens(plan, load))


def test_complete_blocks_reject_a_wrong_request() -> None:
    """The errors name the argument, the table, or the group."""
    side = builders.engine(builders.gqa(1, block_size=8))
    plan = kvspec.plan_transfer(side, side)
    whole = builders.request(16, [0, 1], [5, 6])
    for arguments, field in (
        ((plan, None), "request"),
        ((None, whole), "plan"),
        ((plan, attrs.evolve(whole, consumer_blocks={})), "consumer_blocks"),
        ((plan, attrs.evolve(whole, cached_tokens={"h": 3})), "cached_tokens"),
    ):
        with pytest.raises(kvspec.SpecError) as caught:
            complete_blocks(*arguments)
        assert field == caught.value.field


@pytest.mark.uncovered
def test_cases_reach_each_rule() -> None:
    """Windows, rows of several tokens, context ranks and states name some blocks and not others."""
    seen = Counter[tuple[str, str]]()

    @settings(phases=[Phase.generate], max_examples=60)
    @given(CASES)
    def count(case: Case) -> None:
        judge = Judge(case)
        for name, ids in complete_blocks(judge.here.plan, case.request).items():
            table = case.request.consumer_blocks[name].block_ids
            kind = "state" if is_state(case.consumer.group(name).spec) else "tokens"
            seen[kind, "some" if len(ids) else "none"] += 1
            seen[kind, "not all"] += 0 < len(ids) < len(table)

    count()
    assert 4 < min(
        seen["tokens", "some"], seen["tokens", "none"], seen["state", "some"],
        seen["state", "none"], seen["tokens", "not all"],
    ), seen  # fmt: skip
