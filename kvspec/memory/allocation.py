"""The caches that an engine's own layout makes, in memory or on paper.

Law: `allocate` and `plan_memory` make the same regions; one of them has bytes behind them.
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

Blocks = int | Mapping[str, int]


def allocate(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: Blocks,
    device: str = "cpu",
    *,
    shared: bool = False,
) -> tuple[RankCache, dict[str, Any]]:
    """Allocate one rank's cache and return it with its storage, keyed by group name.

    *num_blocks*: blocks of every group's tables, or of each by name. Storage is one flat array of
    bytes for each group: zeroed numpy ``uint8`` on ``"cpu"``, a torch ``uint8`` tensor on a GPU
    such as ``"cuda:0"``. *shared*: all groups lie in the same bytes, as hybrid memory allocators
    have it, and one array serves them all; block ids then belong to one group at a time.
    """
    arrays: list[Any] = []

    def obtain(size: int) -> Memory:
        array, memory = _array(size, device)
        arrays.append(array)
        return memory

    flag("shared", shared)
    cache, groups = _planned(engine, rank, num_blocks, obtain, shared=shared)
    each = arrays * len(groups) if shared else arrays
    return cache, dict(zip(groups, each, strict=True))


def plan_memory(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: Blocks,
    address: int = 0,
    *,
    shared: bool = False,
) -> RankCache:
    """Return the cache that `allocate` would make, as it would lie from *address* on.

    Nothing is allocated: caches of any size can be planned with, and looked at.
    """
    at = positive_int("address", address, least=0)
    flag("shared", shared)

    def obtain(size: int) -> Memory:
        nonlocal at
        at += size
        return Memory(at - size, size)

    return _planned(engine, rank, num_blocks, obtain, shared=shared)[0]


@attrs.frozen
class _Plan:
    """One group's layers in *size* bytes of *count* blocks in memory."""

    group: KVCacheGroup
    placed: list[Placement]
    size: int
    count: int


def _planned(
    engine: EngineSpec,
    rank: RankId,
    num_blocks: Blocks,
    obtain: Callable[[int], Memory],
    *,
    shared: bool,
) -> tuple[RankCache, list[str]]:
    """Return a rank's cache in the memory that *obtain* gives, and the groups it holds.

    Memory is obtained once for each group, or once for all that are *shared*.
    """
    plans = _plans(engine, rank, num_blocks)
    if shared:
        _check_shared(plans)
    regions: list[Region] = []
    memory: list[Memory] = []
    for each in plans:
        if not shared or not memory:
            whole = max(each.size for each in plans) if shared else each.size
            memory.append(obtain(max(whole, 1)))
        found = (placed for placed in each.placed if placed.units)
        regions += (_region(each.group.name, placed, each.count, memory[-1]) for placed in found)
    cache = RankCache(engine, rank, tuple(regions), tuple(memory))
    return cache, [each.group.name for each in plans]


def _plans(engine: EngineSpec, rank: RankId, num_blocks: Blocks) -> list[_Plan]:
    """Return where each group of which *rank* holds any layer lies in memory of its own."""
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    if isinstance(num_blocks, Mapping):
        names = [group.name for group in engine.groups]
        strange = sorted(set(num_blocks) - set(names), key=repr)
        if strange:
            raise SpecError("num_blocks", strange, f"groups of the engine: {', '.join(names)}")
    plans: list[_Plan] = []
    for group in engine.groups:
        layers = engine.layers_at(group, rank.pp)
        count = num_blocks.get(group.name) if isinstance(num_blocks, Mapping) else num_blocks
        count = positive_int(f"num_blocks[{group.name!r}]", count) * group.kernel_blocks_per_block
        if layers:
            plans.append(_Plan(group, *_placed(engine, group, layers, rank, count), count))
    return plans


def _check_shared(plans: list[_Plan]) -> None:
    """Raise `SpecError` unless blocks of different groups coincide or are apart."""
    strides = {
        (
            placed.block_stride * each.group.kernel_blocks_per_block,
            each.count // each.group.kernel_blocks_per_block,
        )
        for each in plans
        for placed in each.placed
        if placed.units
    }
    if len(strides) > 1:
        found = ", ".join(f"{stride} bytes x {count}" for stride, count in sorted(strides))
        wanted = "one block stride and one number of blocks in all groups (pad the pages)"
        raise SpecError("shared", found, wanted)


def _region(group: str, each: Placement, count: int, span: Memory) -> Region:
    return Region(
        group=group,
        layer=each.layer,
        part=each.part.name,
        base=span.address + each.offset,
        num_blocks=count,
        block_stride=each.block_stride,
        unit_stride=each.unit_stride,
        state_stride=each.state_stride,
        chunk_stride=each.chunk_stride if each.part.chunks > 1 else 0,
        content_bytes=each.part.content_bytes,
        units=each.units,
        states=each.part.states,
        chunks=each.part.chunks,
        memory_type=span.memory_type,
        device=span.device,
    )


def _placed(
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
            raise SpecError("num_blocks", f"{size} bytes", "what fits into memory") from None
        return array, Memory(array.ctypes.data, array.nbytes)
    if not re.fullmatch(r"(cuda|xpu)(:\d+)?", str(device)):
        raise SpecError("device", device, "'cpu' or a GPU such as 'cuda:0'")
    import torch  # noqa: PLC0415 - only a GPU needs it, and it starts slowly

    try:
        tensor = torch.zeros(size, dtype=torch.uint8, device=device)
    except (RuntimeError, AssertionError) as error:
        why = str(error).partition("\n")[0]
        raise SpecError("device", device, f"a GPU with {size} bytes free ({why})") from error
    return tensor, Memory(tensor.data_ptr(), tensor.numel(), "VRAM", tensor.device.index or 0)
