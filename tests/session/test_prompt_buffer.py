"""Tests the blocks of engines whose own cache has none."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
from lines import interrupted_at

import kvspec
from kvspec.adapters import prompt_buffer
from kvspec.adapters.prompt_buffer import HeldTables, PromptBuffer
from kvspec.errors import SpecError, TransferError
from kvspec.nixl import NixlRank
from kvspec.session import Session
from kvspec.testing import FakeNixl

pytestmark = pytest.mark.adapters

FIRST = {"first_token": 7, "sampling": "greedy"}
TOKENS = list(range(100, 113))


def engine(block_size: int, **changed: object) -> kvspec.EngineSpec:
    """Return an engine with a full layer, a window of 5 tokens and a latent."""
    sizes = {"block_size": block_size, "dtype": "float16", "head_size": 4}
    full = kvspec.FullAttentionSpec(**sizes, total_num_kv_heads=3, head_size_v=8)
    window = kvspec.SlidingWindowSpec(**sizes, total_num_kv_heads=2, sliding_window=5)
    latent = kvspec.MLAAttentionSpec(**{**sizes, "head_size": 6, **changed})
    groups = [
        kvspec.KVCacheGroup(name=f"g{number}", layers=[f"layers.{number}"], spec=spec, layout=order)
        for number, (spec, order) in enumerate(
            ((full, "LKBNHC"), (window, "LKBHNC"), (latent, "LBNHC"))
        )
    ]
    return kvspec.EngineSpec(groups=groups)


@contextmanager
def opened(name: str, buffer: PromptBuffer) -> Iterator[Session]:
    """Yield a session of *buffer*, whose bytes are all 255: NaN in each float type."""
    for (arrays,) in [buffer.cache.owner]:
        for array in arrays:
            array[:] = 255
    with (
        NixlRank() as nixl,
        Session(nixl, buffer.cache, engine_id=name, background=True) as session,
    ):
        yield session


def rows_of(buffer: PromptBuffer, layer: str, part: str, tokens: range) -> np.ndarray:
    """Return rows that differ in each byte."""
    region = buffer.cache.region(layer, part)
    seed = sum(map(ord, layer + part))
    shape = (100, region.units, region.content_bytes)
    return np.random.default_rng(seed).integers(0, 255, shape, np.uint8)[tokens.start : tokens.stop]


def parts(buffer: PromptBuffer) -> list[tuple[str, str]]:
    """Return the names of all layers and parts."""
    return [(region.layer, region.part) for region in buffer.cache.regions]


def filled(buffer: PromptBuffer) -> HeldTables:
    """Return the tables of a prompt whose rows have been written."""
    tables = buffer.take(len(TOKENS) - 1, len(TOKENS))
    for layer, part in parts(buffer):
        first = tables[buffer.engine.homes[layer].name].first_token
        tokens = range(first, len(TOKENS))
        buffer.write(tables, layer, part, tokens, rows_of(buffer, layer, part, tokens))
    return tables


@pytest.mark.parametrize("num_tokens", [12, 13])
@pytest.mark.parametrize("sizes", [(4, 4), (2, 8), (8, 1), (3, 5)], ids=str)
def test_prompt_is_equal_in_another_buffer_after_a_load(
    sizes: tuple[int, int], num_tokens: int
) -> None:
    """Both kinds of consumers read it: those of N - 1 tokens and those of N. All blocks return."""
    held, loading = (PromptBuffer(engine(size), 16) for size in sizes)
    with FakeNixl(), opened("p", held) as producer, opened("d", loading) as consumer:
        ticket = held.hold(
            producer, "r", TOKENS, filled(held), {"first_token": 7, "sampling": "greedy"}
        )
        with loading.loaded(consumer, ticket, num_tokens, 10.0) as tables:
            for layer, part in parts(loading):
                live = loading.engine.homes[layer].spec.live_tokens(num_tokens)
                found = loading.read(tables, layer, part, live)
                assert np.array_equal(rows_of(loading, layer, part, live), found)
        while producer.held:
            held.reclaim(producer)
        held.reclaim(producer)
    for buffer in (held, loading):
        assert all(sorted(free) == [*range(16)] for free in buffer._free.values())
    assert 7 == ticket.sampled(TOKENS, "greedy")


def test_load_of_another_engine_fails_and_gives_its_blocks_back() -> None:
    held, loading = PromptBuffer(engine(4), 16), PromptBuffer(engine(4, head_size=8), 16)
    with FakeNixl(), opened("p", held) as producer, opened("d", loading) as consumer:
        ticket = held.hold(producer, "r", TOKENS, filled(held))
        with (
            pytest.raises(TransferError) as caught,
            loading.loaded(consumer, ticket, 12, 10.0),
        ):
            pytest.fail("the load is done")
    assert isinstance(caught.value.__cause__, kvspec.MismatchError)
    assert all(16 == len(free) for free in loading._free.values())


def test_buffer_rejects_prompts_that_do_not_fit() -> None:
    """The blocks of the groups that did fit are given back."""
    buffer = PromptBuffer(engine(4), 3)
    with pytest.raises(SpecError) as caught:
        buffer.take(12, 13)
    assert ("num_blocks", 3) == (caught.value.field, caught.value.value)
    assert all(3 == len(free) for free in buffer._free.values())
    buffer.take(11, 12)


def test_blocks_of_a_closed_session_return() -> None:
    """The next session of the same buffer has all blocks."""
    buffer = PromptBuffer(engine(4), 4)
    with FakeNixl():
        for _ in range(3):
            with opened("p", buffer) as session:
                buffer.reclaim(session)
                buffer.hold(session, "r", TOKENS, filled(buffer))


def test_interrupted_hold_never_gives_the_blocks_of_a_held_prompt() -> None:
    """The interrupt comes before each line, also after the session has held the prompt."""
    buffer = PromptBuffer(engine(4), 8)
    with FakeNixl(), opened("p", buffer) as session:

        def hold() -> None:
            tables = filled(buffer)
            try:
                # An aborted prompt is held for the rest of its lease.
                buffer.hold(session, "r", TOKENS, tables, lease=0.2)
            except BaseException:
                buffer.give(tables)
                raise

        place, reached = 0, True
        while reached:
            reached, _ = interrupted_at(place, hold, prompt_buffer)
            for remote_id, (_, tables) in buffer._held.items():
                assert remote_id not in session.held or all(
                    not {*table.block_ids} & {*buffer._free[name]} for name, table in tables.items()
                )
            for remote_id in session.held:
                session.abort(remote_id)
            while session.held:
                buffer.reclaim(session)
                time.sleep(0.01)
            buffer.reclaim(session)
            assert all(len({*free}) == len(free) for free in buffer._free.values())
            place += 1
            # An interrupt of `take` itself may lose blocks, but never gives them twice.
            buffer._free = {name: [*range(8)] for name in buffer._free}
    assert place > 30
