"""Make the caches that an engine's own layout describes, in real memory or on paper.

Invariant: `allocate` and `plan_memory` return the same regions. Only `allocate` makes bytes.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import numpy as np

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import flag, instance, positive_int
from kvspec.memory.layout import Placement, place
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

# The number of blocks in every group's block tables, or one number for each group by name.
Blocks = int | Mapping[str, int]


def allocate(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: Blocks,
    device: str = "cpu",
    *,
    shared: bool = False,
) -> tuple[RankCache, dict[str, Any]]:
    """Allocate the cache of one rank.

    Args:
        engine: The engine.
        rank: The rank.
        num_blocks: Number of blocks in each group's block tables, or a mapping from the name of
            each group to its number.
        device: ``"cpu"``, or a GPU such as ``"cuda:0"``.
        shared: Whether all groups lie in the same bytes, as with hybrid memory allocators. A block
            id then belongs to one group at a time.

    Returns:
        The cache, and its storage by group name. A group without layers on the rank has no storage.
        The storage of a group is a flat array of zeroed bytes: numpy ``uint8`` on ``"cpu"``, a
        torch ``uint8`` tensor on a GPU. If the memory is shared, all groups have the same array.
        The cache keeps a reference to the storage.

    Raises:
        SpecError: If the memory cannot be allocated, or the groups cannot share memory.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> cache, storage = allocate(engine, RankId(), num_blocks=10)
    >>> storage["full"].shape
    (160,)
    """
    arrays: list[Any] = []

    def obtain(size: int) -> Memory:
        array, memory = _array(size, device)
        arrays.append(array)
        return memory

    flag("shared", shared)
    cache, groups = _make_cache(engine, rank, num_blocks, obtain, shared=shared, owner=arrays)
    group_arrays = arrays * len(groups) if shared else arrays
    return cache, dict(zip(groups, group_arrays, strict=True))


def plan_memory(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: Blocks,
    address: int = 0,
    *,
    shared: bool = False,
) -> RankCache:
    """Return the cache that `allocate` would make, without allocating memory.

    Args:
        engine: The engine.
        rank: The rank.
        num_blocks: Number of blocks, as for `allocate`.
        address: Address at which the memory of the cache begins.
        shared: Whether all groups lie in the same bytes, as for `allocate`.

    Returns:
        The cache, of any size. It has addresses but no bytes, so it can be drawn and passed to
        `build_table` and `verify`, but not transferred.

    Raises:
        SpecError: If the groups cannot share memory, or an address exceeds 63 bits.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["layers.0", "layers.1"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> cache = plan_memory(engine, RankId(), num_blocks=10, address=4096)
    >>> [region.base for region in cache.regions]
    [4096, 4256]
    """
    next_address = positive_int("address", address, least=0)
    flag("shared", shared)

    def obtain(size: int) -> Memory:
        nonlocal next_address
        next_address += size
        return Memory(next_address - size, size)

    return _make_cache(engine, rank, num_blocks, obtain, shared=shared)[0]


@attrs.frozen
class _PlacedGroup:
    """One group in memory: its placements, and *count* kernel blocks in *size* bytes."""

    group: KVCacheGroup
    placements: list[Placement]
    size: int
    count: int


def _make_cache(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: Blocks,
    obtain: Callable[[int], Memory],
    *,
    shared: bool,
    owner: object = None,
) -> tuple[RankCache, list[str]]:
    """Return a rank's cache, which keeps *owner* alive, and the names of its groups.

    *obtain* receives a number of bytes and returns memory of that size. It is called once for each
    group, or once in total if *shared*.
    """
    placed_groups = _placed_groups(engine, rank, num_blocks)
    if shared:
        _check_shared(placed_groups)
    regions: list[Region] = []
    memory: list[Memory] = []
    for placed in placed_groups:
        if not shared or not memory:
            size = max(member.size for member in placed_groups) if shared else placed.size
            # A rank may hold no units of any part. Its memory still needs an address.
            memory.append(obtain(max(size, 1)))
        regions += (
            _region(placed.group.name, placement, placed.count, memory[-1])
            for placement in placed.placements
            if placement.units
        )
    cache = RankCache(engine, rank, tuple(regions), tuple(memory), owner=owner)
    return cache, [placed.group.name for placed in placed_groups]


def _placed_groups(engine: EngineSpec, rank: RankId, num_blocks: Blocks) -> list[_PlacedGroup]:
    """Place each group of which *rank* holds a layer."""
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    if isinstance(num_blocks, Mapping):
        names = [group.name for group in engine.groups]
        unknown = sorted(set(num_blocks) - set(names), key=repr)
        if unknown:
            raise SpecError("num_blocks", unknown, f"groups of the engine: {', '.join(names)}")
    placed_groups: list[_PlacedGroup] = []
    for group in engine.groups:
        layers = engine.layers_at(group, rank.pp)
        count = num_blocks.get(group.name) if isinstance(num_blocks, Mapping) else num_blocks
        count = positive_int(f"num_blocks[{group.name!r}]", count) * group.kernel_blocks_per_block
        if layers:
            placements, size = _place_layers(engine, group, layers, rank, count)
            placed_groups.append(_PlacedGroup(group, placements, size, count))
    return placed_groups


def _check_shared(placed_groups: list[_PlacedGroup]) -> None:
    """Check that all groups have one block stride and one number of blocks.

    Then block i of a group shares bytes only with block i of the other groups.
    """
    strides = {
        (
            placement.block_stride * placed.group.kernel_blocks_per_block,
            placed.count // placed.group.kernel_blocks_per_block,
        )
        for placed in placed_groups
        for placement in placed.placements
        if placement.units
    }
    if len(strides) > 1:
        differing = ", ".join(f"{stride} bytes x {count}" for stride, count in sorted(strides))
        expected = "one block stride and one number of blocks in all groups (pad the pages)"
        raise SpecError("shared", differing, expected)


def _region(group: str, placed: Placement, count: int, memory: Memory) -> Region:
    return Region(
        group=group,
        layer=placed.layer,
        part=placed.part.name,
        base=memory.address + placed.offset,
        num_blocks=count,
        block_stride=placed.block_stride,
        unit_stride=placed.unit_stride,
        state_stride=placed.state_stride,
        chunk_stride=placed.chunk_stride if placed.part.chunks > 1 else 0,
        content_bytes=placed.part.content_bytes,
        units=placed.units,
        states=placed.part.states,
        chunks=placed.part.chunks,
        memory_type=memory.memory_type,
        device=memory.device,
    )


def _place_layers(
    engine: EngineSpec, group: KVCacheGroup, layers: tuple[str, ...], rank: RankId, count: int
) -> tuple[list[Placement], int]:
    def local_units(part: Part) -> int:
        return len(engine.units(group, part, rank))

    specs = [(layer, group.in_memory(layer)) for layer in layers]
    return place(engine.layout_of(group), specs, local_units, count)


def _array(size: int, device: str) -> tuple[Any, Memory]:
    if isinstance(device, str) and device == "cpu":
        try:
            array = np.zeros(size, dtype=np.uint8)
        except (MemoryError, ValueError, OverflowError):
            raise SpecError("num_blocks", f"{size} bytes", "a size that fits into memory") from None
        return array, Memory(array.ctypes.data, array.nbytes)
    if not re.fullmatch(r"(cuda|xpu)(:\d+)?", str(device)):
        raise SpecError("device", device, "'cpu' or a GPU such as 'cuda:0'")
    import torch  # noqa: PLC0415 - only a GPU needs torch, and its import is slow

    try:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    # torch raises AssertionError if it was built without CUDA, and RuntimeError otherwise.
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise SpecError("device", device, f"a GPU with {size} bytes free ({why})") from error
    return tensor, Memory(tensor.data_ptr(), tensor.numel(), "VRAM", tensor.device.index or 0)
