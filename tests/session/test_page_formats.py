"""Sessions of equal engines whose pages order keys in chunks, with pools of 32,000 tokens.

A part of a block of these pages has a run for each chunk or element of a key. No page of the pools
is touched but those of the request, so they need little memory.
"""

from __future__ import annotations

import builders
import numpy as np
import pytest
from two_engines import Side, until

from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl

TOKENS = 32_000  # Of one pool.
CACHED, MOVED = 300, 700  # Both end inside a block.
HEADS, ROW = 8, 256  # Heads, and the bytes of one token of one head.
# The tokens of a block, and the chunks of a row of keys and of values.
FORMATS = {"x-packed": (16, (16, 128)), "keys-transposed": (128, (128, 1))}


@pytest.mark.parametrize("page_format", FORMATS)
@pytest.mark.parametrize("layers", [1, pytest.param(32, marks=pytest.mark.slow)])
def test_engines_with_chunked_keys_connect_and_load(
    net: FakeNixl, page_format: str, layers: int
) -> None:
    """The tables take at most 1 % of a pool, and a load moves the tokens that are not cached."""
    del net
    block, chunks = FORMATS[page_format]
    spec = builders.gqa(HEADS, block_size=block, head_size=128, page_format=page_format)
    names = [f"l.{number}" for number in range(layers)]
    engine, blocks = builders.engine(spec, layers=names, layout="LBKHNC"), TOKENS // block
    with (
        Side("P", engine, polled=False, blocks=blocks) as producer,
        Side("D", engine, polled=False, blocks=blocks) as consumer,
    ):
        consumer.connect(producer)
        source, target = (
            flat.reshape(layers, blocks, 2, HEADS, block * ROW)
            for side in (producer, consumer)
            for storage in side.storage.values()
            for flat in storage.values()
        )
        remote = consumer.first._remotes.find("P")
        for table in remote.tables.values():
            for rows in (table.producer_rows, table.consumer_rows):
                assert 0 < rows.nbytes <= source.nbytes / 100
        held = np.arange(5, 5 + -(-MOVED // block))
        drawn = np.random.default_rng(1).integers(1, 256, source[:, held].shape, np.uint8)
        source[:, held] = drawn
        asked = builders.request(MOVED, held, held[::-1], cached_tokens=CACHED)
        remote_id = new_remote_id("r")
        producer.hold(remote_id)
        [load] = consumer.load(asked, remote_id, timeout=60.0)
        until(lambda: load.poll() != "moving", producer)
        assert "done" == load.state, load.error
        for part, count in enumerate(chunks):
            sent, arrived = (
                each[:, :, part].reshape(layers, len(held), HEADS, count, block, -1)
                for each in (drawn, target[:, held[::-1]])
            )
            token = np.arange(len(held))[:, None] * block + np.arange(block)
            moves = (CACHED <= token) & (token < MOVED)
            expected = np.where(moves[:, None, None, :, None], sent, 0)
            assert np.array_equal(expected, arrived)
        others = np.setdiff1d(np.arange(held[-1] + 9), held)
        assert not target[:, others].any()
