"""Test which blocks a load offers to a prefix cache, and that a session keeps its memory alive."""

from __future__ import annotations

import gc
import os
import weakref

os.environ.setdefault("UCX_NET_DEVICES", "lo")

from two_engines import Side, engine, request, until

import kvspec
from kvspec.nixl import NixlRank
from kvspec.session import Session, new_remote_id
from kvspec.testing import FakeNixl


def test_done_load_names_complete_blocks_and_a_moving_load_none() -> None:
    """The last block of a prompt that is not a multiple of the block size is not complete."""
    asked = request()
    with (
        FakeNixl(),
        Side("P", engine(1), polled=False) as producer,
        Side("D", engine(1), polled=True, heartbeat=0.05) as consumer,
    ):
        consumer.connect(producer)
        remote_id = new_remote_id("r")
        producer.fill(asked)
        producer.hold(remote_id)
        (load,) = consumer.load(asked, remote_id)
        assert load.complete_blocks == {}
        until(lambda: load.poll() == "done", producer, consumer)
        full = asked.consumer_blocks["full"].block_ids.tolist()
        assert asked.num_tokens % 4
        assert load.complete_blocks["full"] == tuple(full[: asked.num_tokens // 4])
        window = asked.consumer_blocks["window"].block_ids.tolist()
        assert set(load.complete_blocks["window"]) < set(window)


def test_session_keeps_the_owner_of_its_cache_alive() -> None:
    """The cache knows the tensors that it was made from, so the caller need not keep them."""
    with FakeNixl():
        cache, storage = kvspec.allocate(engine(1), kvspec.RankId(), 8)
        alive = [weakref.ref(array) for array in storage.values()]
        session = Session(NixlRank(), cache, engine_id="P")
        nixl = session.nixl
        del cache, storage
        gc.collect()
        assert all(one() is not None for one in alive)
        session.close()
        nixl.close()
        del session, nixl
        gc.collect()
        assert not any(one() is not None for one in alive)
