"""vLLM's tensors in memory, held against the tensors that its config says there are.

Law: layers alias where the config says so and nowhere else. That is judged by addresses, after the
tensors were read, and an error names two layers and what the config says of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvspec.adapters.vllm.config import Config, Tensor
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.memory.aliasing import meetings
from kvspec.memory.rank_cache import RankCache


@attrs.frozen
class _Place:
    """Where the config puts a layer: the tensor that holds it, and its first byte there."""

    tensor: Tensor
    start: int

    @property
    def allocation(self) -> str:
        """Tensors with a block stride lie in one allocation, any other is one by itself."""
        return "" if self.tensor.block_stride else self.tensor.path


def owned(engine: EngineSpec, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *tensors* without those of layers that own none: vLLM names them all the same."""
    if not isinstance(tensors, Mapping):
        return tensors
    owned = {id(tensor) for layer, tensor in tensors.items() if layer in engine.stage_of}
    return {
        layer: tensor
        for layer, tensor in tensors.items()
        if layer in engine.stage_of or id(tensor) not in owned
    }


def check_places(cache: RankCache, config: Config) -> None:
    """Raise `SpecError` unless the layers of *cache* lie as *config*'s tensors say."""
    places = {
        layer: _Place(tensor, tensor.offset + at * tensor.layer_stride)
        for tensor in config.tensors
        for at, layer in enumerate(tensor.layers)
    }
    bases: dict[str, int] = {}
    for region in cache.regions:
        bases[region.layer] = min(region.base, bases.get(region.layer, region.base))
    for layer in bases if places else ():
        if layer not in places:
            raise SpecError("config", sorted(places), f"a tensor that holds {layer!r}")
    if places:
        _check_strides(cache, places)
        _check_starts(cache, places, bases)
        _check_separate(cache, places)


def _check_strides(cache: RankCache, places: dict[str, _Place]) -> None:
    """Check that blocks follow one another as they do in the config."""
    for region in cache.regions:
        tensor = places[region.layer].tensor
        found = region.block_stride * cache.engine.homes[region.layer].kernel_blocks_per_block
        if tensor.block_stride not in (0, found) and region.num_blocks > 1:
            wanted = f"{tensor.block_stride}, the block_stride that holds for {tensor.path}"
            raise SpecError(f"tensors[{region.layer!r}].stride", found, wanted)


def _check_starts(cache: RankCache, places: dict[str, _Place], bases: dict[str, int]) -> None:
    """Check that layers of one allocation begin as far from one another as in the config."""
    firsts: dict[str, str] = {}
    for layer, base in bases.items():
        place = places[layer]
        in_rows = place.tensor.layer_stride < place.tensor.block_stride
        if in_rows and cache.engine.homes[layer].kernel_blocks_per_block > 1:
            continue  # finer blocks may make finer rows
        other = firsts.setdefault(place.allocation, layer)
        found, wanted = base - bases[other], place.start - places[other].start
        if found != wanted:
            pair = f"{other} and {layer}, {found} bytes apart"
            raise SpecError("tensors", pair, f"{wanted} bytes, as {_said(places[other], place)}")


def _check_separate(cache: RankCache, places: dict[str, _Place]) -> None:
    """Check that what the config holds in two allocations shares no byte."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache.engine.groups
    }
    for one, other, _ in meetings(cache.regions, kernel_blocks_per_block):
        pair = places[one.layer], places[other.layer]
        if pair[0].allocation != pair[1].allocation:
            wanted = f"no byte shared, as {_said(*pair)}"
            raise SpecError("tensors", f"{one.layer} and {other.layer}", wanted)


def _said(one: _Place, other: _Place) -> str:
    if one.tensor is other.tensor:
        return f"{one.tensor.path} has both"
    return f"{one.tensor.path} and {other.tensor.path} have them"
