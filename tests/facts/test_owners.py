"""A cache keeps the tensors that its addresses point to."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from typing import Any

import attrs
import builders
import numpy as np
import pytest

import kvspec

ENGINE = builders.engine(builders.gqa(2, block_size=4, head_size=8), layout="LBKNHC")
RANK = kvspec.RankId()


class Watched(np.ndarray):
    """An array that a weak reference can watch."""


def array(*shape: int) -> Watched:
    """Return zeros of two bytes each."""
    return np.zeros(shape, np.uint16).view(Watched)


def whole_tensor() -> tuple[kvspec.RankCache, list[Any]]:
    """Return a cache of a temporary tensor with keys and values, and weak references."""
    tensor = array(6, 2, 4, 2, 8)
    cache = kvspec.RankCache.from_tensors(ENGINE, RANK, {"l": tensor}, axes="BKNHC")
    return cache, [weakref.ref(tensor)]


def tensors_by_part() -> tuple[kvspec.RankCache, list[Any]]:
    """Return a cache of temporary tensors with keys or values."""
    parts = {"k": array(6, 4, 2, 8), "v": array(6, 4, 2, 8)}
    cache = kvspec.RankCache.from_tensors(ENGINE, RANK, {"l": parts}, axes="BNHC")
    return cache, [weakref.ref(part) for part in parts.values()]


def views_of_one_buffer() -> tuple[kvspec.RankCache, list[Any]]:
    """Return a cache of a view of a temporary buffer."""
    buffer = array(6 * 2 * 4 * 2 * 8)
    view = buffer.reshape(6, 2, 4, 2, 8)
    cache = kvspec.RankCache.from_tensors(ENGINE, RANK, {"l": view}, axes="BKNHC")
    return cache, [weakref.ref(view)]


@pytest.mark.parametrize("make", [whole_tensor, tensors_by_part, views_of_one_buffer])
def test_cache_keeps_its_tensors_alive(
    make: Callable[[], tuple[kvspec.RankCache, list[Any]]],
) -> None:
    """The tensors live as long as the cache or a copy of it, and no longer."""
    cache, tensors = make()
    copies = [copy.copy(cache), copy.deepcopy(cache), attrs.evolve(cache, rank=RANK)]
    del cache
    while copies:
        assert all(tensor() is not None for tensor in tensors)
        copies.pop()
    assert [None] * len(tensors) == [tensor() for tensor in tensors]


def test_allocated_cache_keeps_its_storage() -> None:
    """A caller that drops the storage does not free the memory."""
    cache, storage = kvspec.allocate(ENGINE, RANK, num_blocks=3)
    owner = weakref.ref(storage["g"])
    del storage
    assert owner() is not None
    del cache
    assert owner() is None


def test_cache_made_by_hand_keeps_its_owner() -> None:
    """The owner may be any object."""
    paper = kvspec.plan_memory(ENGINE, RANK, 3)
    owner = array(1)
    cache = kvspec.RankCache(ENGINE, RANK, paper.regions, paper.memory, owner=owner)
    watched = weakref.ref(owner)
    del owner
    assert watched() is not None
    del cache
    assert watched() is None


def test_owner_is_not_part_of_the_value_of_a_cache() -> None:
    """Caches with other owners are equal, and a pickle contains no tensor."""
    cache, _ = whole_tensor()
    bare = kvspec.RankCache(ENGINE, RANK, cache.regions, cache.memory)
    assert bare == cache
    assert hash(bare) == hash(cache)
    assert repr(bare) == repr(cache)
    received = pickle.loads(pickle.dumps(cache))  # noqa: S301 - our own bytes
    assert received == cache
    assert ((), ()) == (bare.owner, received.owner)
    assert len(pickle.dumps(cache)) - len(pickle.dumps(bare)) < 100
