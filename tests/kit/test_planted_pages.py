"""Mistakes of stores of all kinds of layers: the cases of the profile `ci` show each."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import attrs
import numpy as np
import pytest

import kvspec
from kvspec.ownership.dtypes import itemsize
from kvspec.stored.placement import is_state
from kvspec.testing.kit import Supports, System
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.judging import PROFILES, look, stored_of_each_kind
from kvspec.testing.laws import LAWS
from kvspec.testing.laws.stored_pages import StoredCase
from kvspec.testing.stored import OwnStore
from kvspec.testing.world import World

PAGES = LAWS[15]
STATES = ("mamba1", "mamba2", "gated delta net", "short conv")


def contents(here: World, cache: Any, region: Any) -> Iterator[int]:
    """Yield the address of each content in the blocks of the request."""
    table = here.case.request.table("consumer", region.group)
    split = cache.engine.group(region.group).kernel_blocks_per_block
    for block in (b * split + part for b in table.block_ids.tolist() if b for part in range(split)):
        for state in range(region.states):
            for unit in range(region.units):
                yield region.address(block, unit, state)


class Altering(OwnStore):
    """Loads the right bytes, and then alters those of some regions."""

    def alter(self, here: World, cache: Any, region: Any) -> None:
        """Alter the bytes of *region*."""
        raise NotImplementedError

    def load(self, here: World) -> None:
        """Load, and alter each region."""
        super().load(here)
        for cache, _ in here.consumers.values():
            for region in cache.regions:
                self.alter(here, cache, region)


def exchange(one: int, other: int, size: int) -> None:
    """Exchange the bytes at two addresses."""
    first, second = ctypes.string_at(one, size), ctypes.string_at(other, size)
    ctypes.memmove(one, second, size)
    ctypes.memmove(other, first, size)


class SwappedParts(Altering):
    """Exchanges K and V of the ranks behind the first."""

    def alter(self, here: World, cache: Any, region: Any) -> None:
        """Exchange keys and values of equal sizes."""
        if region.part != "k" or not cache.rank.tp:
            return
        values = cache.region(region.layer, "v")
        if values.content_bytes == region.content_bytes:
            for both in zip(
                contents(here, cache, region), contents(here, cache, values), strict=True
            ):
                exchange(*both, region.content_bytes)


class ByteOrder(Altering):
    """Turns the bytes of each element around, on the last of several stages."""

    def alter(self, here: World, cache: Any, region: Any) -> None:
        """Turn the elements of more than one byte."""
        dtype = cache.part_of(region)[0].dtype
        width = itemsize(dtype) if dtype else 1
        stages = cache.engine.parallel.pp_size
        if width == 1 or region.content_bytes % width or not 1 < stages == cache.rank.pp + 1:
            return
        for address in contents(here, cache, region):
            data = np.frombuffer(ctypes.string_at(address, region.content_bytes), np.uint8)
            ctypes.memmove(address, data.reshape(-1, width)[:, ::-1].tobytes(), data.size)


class LayerOrder(Altering):
    """Exchanges two layers of a stage behind the first."""

    def alter(self, here: World, cache: Any, region: Any) -> None:
        """Exchange a region with the one of the next layer."""
        same = [
            each
            for each in cache.regions
            if (each.group, each.part, each.content_bytes, each.units)
            == (region.group, region.part, region.content_bytes, region.units)
        ]
        if here.case.producer.parallel.pp_size > 1 and len(same) > 1 and region == same[0]:
            for both in zip(
                contents(here, cache, same[0]), contents(here, cache, same[1]), strict=True
            ):
                exchange(*both, region.content_bytes)


class Forgetting(OwnStore):
    """Loads all but some regions."""

    def forgets(self, cache: Any, region: Any) -> bool:
        """Return whether *region* is not loaded."""
        raise NotImplementedError

    def load(self, here: World) -> None:
        """Load, and put the old bytes back."""
        old: dict[int, bytes] = {}
        for cache, _ in here.consumers.values():
            for region in (each for each in cache.regions if self.forgets(cache, each)):
                for address in contents(here, cache, region):
                    old[address] = ctypes.string_at(address, region.content_bytes)
        super().load(here)
        for address, data in old.items():
            ctypes.memmove(address, data, len(data))


class WithoutScales(Forgetting):
    """Does not load the scales."""

    def forgets(self, cache: Any, region: Any) -> bool:
        """Forget the scales."""
        del cache
        return "scale" in region.part


class LatentOfOneRank(Forgetting):
    """Loads a latent only to the first TP rank."""

    def forgets(self, cache: Any, region: Any) -> bool:
        """Forget the latent of other ranks."""
        return region.part == "latent" and cache.rank.tp > 0


class FirstStage(Forgetting):
    """Loads only the first stage of several."""

    def forgets(self, cache: Any, region: Any) -> bool:
        """Forget the later stages."""
        del region
        return cache.rank.pp > 0


class LatePrefix(OwnStore):
    """Leaves the page out in which the cached tokens end."""

    def load(self, here: World) -> None:
        """Round the cached tokens up to a page."""
        request, size = here.case.request, self.page_tokens
        own: Any = request
        cached = min(-(-own.cached_tokens // size) * size, own.num_tokens)
        for cache, _ in here.consumers.values():
            rank = self.store.rank_pages(cache)
            pages = self.hit.num_pages if self.hit else 0
            rank.load(self.names, pages, request.consumer_blocks, cached_tokens=cached)


class Lenient(OwnStore):
    """Finds pages without looking for some of their objects."""

    def ignores(self, group: str, chunk: kvspec.RankId) -> bool:
        """Return whether an object is not looked up."""
        raise NotImplementedError

    def lookup(self, consumer: kvspec.EngineSpec) -> int:
        """Count the pages of which the other objects are there."""
        super().lookup(consumer)
        pages = self.hit.num_pages if self.hit else 0
        wanted = [
            each
            for each in self.store.load_plan(consumer).objects
            if not self.ignores(each.group, each.chunk)
        ]
        while pages < len(self.names) and self.store.has([self.names[pages]], wanted)[0]:
            pages += 1
        return pages * self.page_tokens


class WithoutContexts(Lenient):
    """Looks for the first context chunk only."""

    def ignores(self, group: str, chunk: kvspec.RankId) -> bool:
        """Ignore the other chunks."""
        del group
        return chunk.pcp > 0


class OneHeadGroup(Lenient):
    """Looks for the first head group only."""

    def ignores(self, group: str, chunk: kvspec.RankId) -> bool:
        """Ignore the other head groups."""
        del group
        return chunk.tp > 0


class WithoutStates(Lenient):
    """Does not look for states."""

    def ignores(self, group: str, chunk: kvspec.RankId) -> bool:
        """Ignore states."""
        del chunk
        return is_state(self.store.placement.engine.group(group).spec)


class EarlyState(OwnStore):
    """Takes the state behind the last token for that of the last page end."""

    def save(self, here: World, tokens: range) -> None:
        """Shorten the step to the last page end, but keep its tables."""
        own: Any = here.case.request
        stop = tokens.stop // self.page_tokens * self.page_tokens
        if stop:
            case = attrs.evolve(here.case, request=attrs.evolve(own, num_tokens=stop))
            last = {
                name: kvspec.BlockTable(table.block_ids[-1:], 0)
                if is_state(here.case.producer.group(name).spec)
                else table
                for name, table in own.producer_blocks.items()
            }
            request = attrs.evolve(case.request, producer_blocks=last)
            case = attrs.evolve(case, request=request)
            here = attrs.evolve(here, case=case)
            super().save(here, range(min(tokens.start, stop), stop))


class TokenEarly(OwnStore):
    """Saves a page before its last token is computed."""

    def save(self, here: World, tokens: range) -> None:
        """Save as if one more token were there."""
        own: Any = here.case.request
        stop = min(tokens.stop + 1, len(self.names) * self.page_tokens)
        stop = max(stop, tokens.stop)
        case = attrs.evolve(here.case, request=attrs.evolve(own, num_tokens=stop))
        super().save(attrs.evolve(here, case=case), range(tokens.start, stop))


@lru_cache
def cases(kinds: tuple[str, ...]) -> list[StoredCase]:
    """Return the cases of these kinds that the profile `ci` judges first."""
    narrow = attrs.evolve(Supports(), kinds=kinds)
    return [case for case, _ in stored_of_each_kind(narrow, PROFILES["ci"], 0)]


MISTAKES: list[tuple[Any, tuple[str, ...]]] = [
    (SwappedParts, ("full",)), (LatentOfOneRank, ("MLA",)), (EarlyState, STATES),
    (ByteOrder, ("full", "MLA")), (LayerOrder, ("full", "MLA")),
    (WithoutScales, ("full, with scales",)), (FirstStage, ("full",)),
    (LatePrefix, ("sliding window", "full")), (WithoutContexts, ("MLA",)),
    (OneHeadGroup, ("full",)), (WithoutStates, STATES), (TokenEarly, ("full", "MLA")),
]  # fmt: skip


@pytest.mark.parametrize(
    ("store", "kinds"),
    # The checks of a change judge the first ones, and the nightly run judges all.
    [*MISTAKES[:3], *(pytest.param(*each, marks=pytest.mark.slow) for each in MISTAKES[3:])],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_cases_of_ci_show_the_mistake(store: Any, kinds: tuple[str, ...]) -> None:
    guards = [Guard(System(name="s", pages=each), 20.0) for each in (store, OwnStore)]
    faults = ((case, look(guards[0], [PAGES], case)[16]) for case in cases(kinds))
    case = next(case for case, (verdict, _) in faults if verdict == "wrong")
    assert "exact" == look(guards[1], [PAGES], case)[16][0]
