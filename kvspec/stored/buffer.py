"""The buffer of a rank: slots of objects, and copies between the slots and the rank's cache.

Invariant: a slot has the memory of one block of the virtual engine. So the rows of a plan gather
whole objects into slots, and scatter them out of slots.

How it works:
    Each object of a page has an area of the buffer with one slot for each page of a batch. A rank
    with two objects, of 4 and 2 bytes, and batches of 3 pages has a buffer of 18 bytes:

        0     4     8     12   14   16   18
        | object 0        | object 1     |
        | p0  | p1  | p2  | p0 | p1 | p2 |

    A table of descriptors connects the cache with one area. It is built once. Its rows are copied
    like those of a staged transfer: by numpy in host memory, and by torch in the memory of a GPU.
    A GPU has a second buffer in its own memory, and whole areas are copied between both buffers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.engines.engine import EngineSpec
from kvspec.memory.allocation import plan_memory
from kvspec.memory.rank_cache import RankCache
from kvspec.nixl.staging.copying import copy_runs
from kvspec.nixl.staging.ranges import Moves
from kvspec.ownership.tokens import Ints
from kvspec.plan.plan import TransferPlan
from kvspec.stored.placement import PageObject, StoredSpec

PAGE = 4096
"""Bytes to which the buffer is aligned in host memory."""


class SlotBuffer:
    """The slots of a rank for one direction.

    Attributes:
        objects: The objects of a page that the rank moves.
        pages: Pages of a batch: slots of each object.
    """

    def __init__(
        self,
        placement: StoredSpec,
        plan: TransferPlan,
        cache: RankCache,
        objects: tuple[PageObject, ...],
        most_bytes: int,
        *,
        stores: bool,
    ) -> None:
        """Allocate the slots.

        Args:
            placement: The placement of the pages.
            plan: The plan between the engine of *cache* and the virtual engine, in either
                direction.
            cache: The cache of the rank.
            objects: The objects of a page that the rank moves.
            most_bytes: Bytes of the buffer, if one page is not larger.
            stores: Whether *plan* leads to the virtual engine. The engine may equal it, so the
                plan does not show the direction.
        """
        self.objects, self._stores = objects, stores
        self._placement, self._plan, self._cache = placement, plan, cache
        self._sizes = {stored: placement.object_bytes(*stored) for stored in objects}
        page = sum(self._sizes.values())
        self.pages = max(1, most_bytes // page) if page else 1
        self._starts: dict[PageObject, int] = {}
        size = 0
        for stored in objects:
            self._starts[stored] = size
            size += self.pages * self._sizes[stored]
        kinds = {(one.memory_type, one.device) for one in cache.regions} or {("DRAM", 0)}
        # A cache of several kinds is refused when a table is built.
        self._place = min(kinds)
        self._host, self._near = _allocated(size, self._place)
        self._tables: dict[PageObject, DescriptorTable] = {}

    @property
    def _address(self) -> int:
        """Address of the slots on the side of the cache."""
        if self._near is None:
            return int(self._host.ctypes.data)
        return int(self._near.data_ptr())

    def prepare(self) -> None:
        """Build the tables of all objects, so that an error comes before the first copy."""
        for stored in self.objects:
            if stored not in self._tables:
                self._tables[stored] = self._table(stored)

    def payload(self, stored: PageObject, slot: int) -> memoryview:
        """Return the bytes of a slot in host memory."""
        start = self._starts[stored] + slot * self._sizes[stored]
        return memoryview(self._host)[start : start + self._sizes[stored]]

    def rows(self, stored: PageObject, request: TransferRequest) -> Ints:
        """Return what *request* copies: producer address, consumer address and length.

        Returns:
            int64 array of shape (runs, 3), in no order.
        """
        if stored not in self._tables:
            self.prepare()
        tiles = self._tables[stored].tiles(request)
        runs = [numbered.addresses(chosen) for numbered, chosen in tiles]
        return np.concatenate([np.empty((0, 3), np.int64), *runs])

    def gather(self, stored: PageObject, requests: Iterable[TransferRequest], slots: int) -> None:
        """Copy the bytes of *requests* from the cache into the first *slots* slots of an object."""
        rows = [self.rows(stored, request) for request in requests]
        near, slot, length = np.concatenate(rows).T
        self._copy(slot, near, length, inward=False)
        if self._near is not None:
            self._exchange(stored, slots, to_host=True)

    def scatter(self, stored: PageObject, rows: Ints, slots: int) -> None:
        """Copy *rows* from the first *slots* slots of an object into the cache."""
        if self._near is not None:
            self._exchange(stored, slots, to_host=False)
        slot, near, length = rows.T
        self._copy(slot, near, length, inward=True)

    def _copy(self, slot: Ints, near: Ints, length: Ints, *, inward: bool) -> None:
        """Copy runs between the slots and the cache, by their lengths."""
        base = self._address
        # In the order of the slots, numpy needs one pass.
        order = slot.argsort()
        slot, near, length = slot[order] - base, near[order], length[order]
        equal = not length.size or length.min() == length.max()
        for size in length[:1].tolist() if equal else np.unique(length).tolist():
            which = slice(None) if equal else length == size
            moves = Moves(offset=slot[which], near=near[which], length=size)
            copy_runs(base, moves, inward=inward, place=self._place)

    def _exchange(self, stored: PageObject, slots: int, *, to_host: bool) -> None:
        """Copy the first *slots* slots of an object between the host and the GPU."""
        import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

        start = self._starts[stored]
        area = slice(start, start + slots * self._sizes[stored])
        host, near = torch.from_numpy(self._host[area]), self._near[area]
        if to_host:
            host.copy_(near)
        else:
            near.copy_(host)
            torch.cuda.synchronize(near.device)

    def _table(self, stored: PageObject) -> DescriptorTable:
        """Return the table between the cache and the area of an object."""
        address = self._address + self._starts[stored]
        slots = _on_paper(self._placement.engine, stored, self.pages, address)
        group = self._placement.engine.group(stored.group)
        layers = self._placement.engine.layers_at(group, stored.chunk.pp)
        caches = (self._cache, slots) if self._stores else (slots, self._cache)
        return build_table(self._plan, *caches, layers=layers)


def _on_paper(engine: EngineSpec, stored: PageObject, slots: int, address: int) -> RankCache:
    """Return a cache of the chunk in which the blocks of the group begin at *address*.

    The other groups have one block each. Their addresses are never used.
    """
    before = 0
    for group in engine.groups:
        if group.name == stored.group:
            break
        layers = engine.layers_at(group, stored.chunk.pp)
        size = sum(engine.page_size_bytes(layer, stored.chunk) for layer in layers)
        before += max(size, 1) if layers else 0
    counts = {group.name: slots if group.name == stored.group else 1 for group in engine.groups}
    return plan_memory(engine, stored.chunk, counts, address - before)


def _allocated(size: int, place: tuple[str, int]) -> tuple[Any, Any]:
    """Return a host array of *size* bytes, and a tensor of the GPU if the cache lies there."""
    if place[0] == "DRAM":
        # Pages of the operating system are aligned, so that a file may be written directly.
        padded = np.empty(size + PAGE, np.uint8)
        start = -padded.ctypes.data % PAGE
        return padded[start : start + size], None
    import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

    host = torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()
    return host, torch.empty(size, dtype=torch.uint8, device=f"cuda:{place[1]}")
