"""Read vLLM's tensors of one rank as a `RankCache`.

Invariant: tensors are only viewed, never copied. Each size of a tensor must be the one that the
engine and the layout require. If a shape has two readings, the strides decide. Layers share memory
where vLLM's config places them so, and nowhere else.

How it works:
    A rank has 4 heads, 10 blocks of 16 tokens and 64 elements of float16 for each key and value.
    The accepted shapes of a layer's tensor are:

        layout     shape                    view of k                  view of v
        LBHNC      [10, 4, 16, 128]         t[..., :64]                t[..., 64:]
        LKBNHC     [2, 10, 16, 4, 64]       t[0], axes as B H N C      t[1], axes as B H N C
        LBKNHC     [10, 2, 16, 4, 64]       t[:, 0], axes as B H N C   t[:, 1], axes as B H N C

    Each part of the layer becomes one view with the axes block, head, token and content. Then
    `RankCache.from_tensors` reads the addresses and strides of the views.

    If vLLM's config is passed, the addresses are compared with its `kv_cache_tensors` afterwards.
    For example, if the config places a and b 4,096 bytes apart in one allocation, the tensors of
    a and b must begin 4,096 bytes apart. If it places them in two allocations, they must not share
    a byte.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import Config, Tensor, read_config
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.memory.aliasing import meetings
from kvspec.memory.from_tensors import check_layers, check_tensor
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

# The letters of the views that this module makes, by the number of their dimensions. P is the axis
# of chunks.
_AXES_BY_NDIM = {3: "BHC", 4: "BHNC", 5: "BHPNC"}

# The number of dimensions of a tensor with planes of keys and values, of a tensor with heads and
# tokens, and of a tensor with one latent for each token.
_WITH_PLANES, _WITH_HEADS, _WITH_LATENTS = 5, 4, 3


def rank_cache(
    engine: EngineSpec,
    rank: RankId,
    tensors: Mapping[str, Any],
    *,
    config: Any = None,  # noqa: ANN401 - vLLM's class, not imported
) -> RankCache:
    """Return the memory of vLLM's *tensors* on one rank.

    The result keeps a reference to the tensors.

    Args:
        engine: The engine, from `engine_spec` or `from_vllm`.
        rank: The rank that the tensors belong to.
        tensors: The tensor of each layer of the rank, by layer name. Its blocks are those of the
            attention kernel. Accepted shapes:

            - ``[blocks, heads, tokens, content]``, where content is the key, then the value.
            - ``[2, blocks, tokens, heads, size]`` or ``[blocks, 2, tokens, heads, size]``, for
              layouts with separate planes of keys and values.
            - ``[blocks, tokens, content]``, for one latent per token.
            - ``[blocks, 1, 1, bytes]``, for recurrent states: all states of the layer, one after
              the other, the conv state first. Or a list with one tensor for each state.

            Layers that the engine excludes may be missing. A layer without a cache of its own may
            be present if its tensor is the tensor of another layer.
        config: The rank's own `KVCacheConfig`. If passed, the tensors must have its number of
            blocks, and must lie in memory as its `kv_cache_tensors` describe.

    Returns:
        The cache of the rank.

    Raises:
        SpecError: If a tensor is missing or has an unexpected shape, or if tensors lie elsewhere
            than *config* describes.

    >>> import kvspec, numpy
    >>> sizes = {"block_size": 16, "head_size": 64, "dtype": "float16"}
    >>> spec = kvspec.FullAttentionSpec(total_num_kv_heads=4, **sizes)
    >>> group = kvspec.KVCacheGroup(name="group0", layers=["layers.0"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group], layout="LBHNC")
    >>> tensor = numpy.zeros((10, 4, 16, 128), numpy.float16)
    >>> cache = rank_cache(engine, RankId(), {"layers.0": tensor})
    >>> [(region.part, region.num_blocks, region.unit_stride) for region in cache.regions]
    [('k', 10, 4096), ('v', 10, 4096)]
    """
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    tensors = owned(engine, tensors)
    check_layers(engine, rank, tensors)
    own_config = None if config is None else read_config(FieldReader("config", config))
    count = None if own_config is None else own_config.fields.get("num_blocks").size()
    views = {}
    for group in engine.groups:
        for layer in engine.layers_at(group, rank.pp):
            if layer not in tensors:
                continue
            views[layer] = dict(_Layer(engine, group, rank, layer).views(tensors[layer]))
            if count is not None:
                _check_blocks(layer, views[layer], count * group.kernel_blocks_per_block)
    axes = {
        name: _AXES_BY_NDIM[view.ndim] for named in views.values() for name, view in named.items()
    }
    cache = RankCache.from_tensors(engine, rank, views, axes)
    if own_config is not None:
        check_places(cache, own_config)
    return cache


def _check_blocks(layer: str, views: Mapping[str, Any], blocks: int) -> None:
    for view in views.values():
        if view.shape[0] != blocks:
            field = f"tensors[{layer!r}].shape[0]"
            raise SpecError(field, view.shape[0], f"{blocks} blocks in memory")


def owned(engine: EngineSpec, tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return *tensors* without the layers that read the cache of another layer."""
    # vLLM registers such a layer under its own name, with the other layer's tensor object. No group
    # contains the layer, so `check_layers` would refuse it.
    if not isinstance(tensors, Mapping):
        return tensors
    owned = {id(tensor) for layer, tensor in tensors.items() if layer in engine.stage_of}
    return {
        layer: tensor
        for layer, tensor in tensors.items()
        if layer in engine.stage_of or id(tensor) not in owned
    }


class _Layer:
    """The views of one layer's tensors. `units` has, for each part, its units on the rank."""

    def __init__(self, engine: EngineSpec, group: KVCacheGroup, rank: RankId, layer: str) -> None:
        self.field = f"tensors[{layer!r}]"
        self.parts = group.in_memory(layer).parts
        self.letters = engine.layout_of(group).replace("L", "")
        self.units = [len(engine.units(group, part, rank)) for part in self.parts]

    def views(self, tensors: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield each view of a tensor, or list of tensors, with the name of its part or state."""
        if not self.parts[0].per_token:
            yield from self._states(tensors)
            return
        if several(tensors):
            raise SpecError(
                self.field, f"{len(tensors)} tensors", "one tensor, as the layer keeps tokens"
            )
        check_tensor(self.field, tensors)
        # Page formats that split heads into chunks, or keep keys apart from values in a page.
        if any(part.chunks > 1 for part in self.parts):
            yield from self._chunks(tensors)
            return
        # FlashInfer's NVFP4 and the keys of an indexer, whose pages have data and scales in runs.
        if len({part.tensor for part in self.parts}) > 1:
            yield from self._one_after_the_other(tensors)
            return
        for part, view in zip(self.parts, self._tokens(tensors), strict=True):
            # Views of keys and values have the axes BHPNC. Here P has one chunk.
            yield part.name, view[:, :, None] if part.name in ("k", "v") else view

    def _one_after_the_other(self, tensor: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield views of parts that follow one another in a page.

        Only the number of bytes in a page counts, not the shape of the page.
        """
        shapes = {
            part.name: (units, *(1,) * (part.name in ("k", "v")), part.states, part.content_bytes)
            for part, units in zip(self.parts, self.units, strict=True)
        }
        shape, total = tuple(tensor.shape), sum(map(prod, shapes.values()))
        if (
            len(shape) not in (_WITH_HEADS, _WITH_LATENTS)
            or itemsize(tensor) != 1
            or prod(shape[1:]) != total
        ):
            wanted = f"pages of {total} bytes: {', '.join(shapes)}"
            raise SpecError(f"{self.field}.shape", shape, wanted)
        yield from consecutive(flat(self.field, tensor, (shape[0], total)), shapes)

    def _chunks(self, tensor: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield views [blocks, heads, chunks, rows, content] of separate keys and values.

        Either each head has its keys before its values, or all keys lie before all values.
        """
        heads, rows, shape = self.units[0], self.parts[0].states, tuple(tensor.shape)
        planes = self.letters.index("K") < self.letters.index("H")
        outer = len(self.parts) if planes else heads
        size, step = heads * sum(p.states * p.content_bytes for p in self.parts), itemsize(tensor)
        if shape[1:3] != (outer, rows) or prod(shape[1:]) * step != size:
            expected = f"[blocks, {outer}, {rows}, {size // outer // rows} bytes]"
            raise SpecError(f"{self.field}.shape", shape, f"{expected} for layout {self.letters}")
        whole, start = flat(self.field, tensor, (shape[0], outer, prod(shape[2:]))), 0
        for number, part in enumerate(self.parts):
            stop = start + part.states * part.content_bytes // step
            inner = (part.chunks, part.states, part.content_bytes // part.chunks // step)
            part_view = whole[:, number] if planes else whole[:, :, start:stop]
            yield part.name, part_view.reshape((shape[0], heads, *inner))
            start = stop

    def _tokens(self, tensor: Any) -> list[Any]:  # noqa: ANN401
        """Return a view [blocks, heads, rows, content] of every part."""
        heads, part = self.units[0], self.parts[0]
        shape = tuple(tensor.shape)
        if part.whole and len(shape) == _WITH_HEADS:
            # A page that moves whole: only its number of bytes counts.
            page = prod(shape[1:])
            size, rest = divmod(page, heads)
            if not rest and page * itemsize(tensor) == heads * part.states * part.content_bytes:
                return [flat(self.field, tensor, (shape[0], heads, 1, size))]
        if "K" in self.letters:
            return self._planes(tensor, heads, part)
        content = sum(part.content_bytes for part in self.parts)
        if heads == 1 and len(shape) == _WITH_LATENTS:
            tensor = tensor[:, None]
        if tuple(tensor.shape)[1:3] != (heads, part.states) or not has(tensor, content):
            expected = f"[blocks, {heads}, {part.states}, {content} bytes]"
            raise SpecError(f"{self.field}.shape", shape, f"{expected} for layout {self.letters}")
        return self._beside(tensor)

    def _beside(self, tensor: Any) -> list[Any]:  # noqa: ANN401
        """Return the views of parts that lie beside one another in the last axis."""
        views: list[Any] = []
        start = 0
        for part in self.parts:
            size, rest = divmod(part.content_bytes, itemsize(tensor))
            if rest:
                wanted = f"elements that divide the {part.content_bytes} bytes of {part.name}"
                raise SpecError(f"{self.field}.itemsize", itemsize(tensor), wanted)
            views.append(tensor[..., start : start + size])
            start += size
        return views

    def _planes(self, tensor: Any, heads: int, part: Part) -> list[Any]:  # noqa: ANN401
        """Return the views of keys and values that lie in separate planes."""
        shape, field = tuple(tensor.shape), f"{self.field}.shape"
        size, planes = part.content_bytes, len(self.parts)
        # A backend with two head slots has the shape [blocks, 2, tokens, heads * size].
        slots = len(shape) == _WITH_HEADS and shape[1:3] == (planes, part.states)
        if slots and has(tensor, heads * size):
            inner = (shape[0], planes, part.states, heads, size // itemsize(tensor))
            tensor = flat(self.field, tensor, inner)
            return [ordered(tensor[:, plane], (0, 2, 1, 3)) for plane in range(planes)]
        outer = "KB" if self.letters.index("K") < self.letters.index("B") else "BK"
        # The axes may be in either order, whatever their order in memory is.
        orders = [outer + "NHC", outer + "HNC"]
        sizes = {"K": planes, "H": heads, "N": part.states}
        fits = [
            order
            for order in orders
            if len(shape) == _WITH_PLANES
            and has(tensor, size)
            and all(shape[order.index(axis)] == count for axis, count in sizes.items())
        ]
        if not fits:
            expected = (
                f"{'[2, blocks' if outer == 'KB' else '[blocks, 2'}, {part.states}, {heads}, "
            )
            raise SpecError(field, shape, f"{expected}{size} bytes] for layout {self.letters}")
        # With as many heads as tokens, both orders fit the shape. Then the strides decide.
        order = next((order for order in fits if self._agrees(tensor, order)), fits[0])
        axis = order.index("K")
        rest = order.replace("K", "")
        views = []
        for number in range(planes):
            plane = tensor[number] if axis == 0 else tensor[:, number]
            views.append(ordered(plane, tuple(rest.index(letter) for letter in "BHNC")))
        return views

    def _agrees(self, tensor: Any, order: str) -> bool:  # noqa: ANN401
        """Whether the strides of heads and rows are in the order of the layout."""
        strides = dict(zip(order, strides_of(tensor), strict=True))
        rows_outside = self.letters.index("N") < self.letters.index("H")
        return rows_outside == (strides["N"] > strides["H"])

    def _states(self, given: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield a view of each recurrent state, from one tensor or a list of them."""
        states: dict[str, list[tuple[Part, int]]] = {}
        for part, units in zip(self.parts, self.units, strict=True):
            states.setdefault(part.tensor, []).append((part, units))
        tensors = list(given) if several(given) else [given]
        for at, tensor in enumerate(tensors):
            check_tensor(f"{self.field}[{at}]" if several(given) else self.field, tensor)
        if not several(given) and is_raw(given):
            yield from self._cut(given, states)
            return
        if len(tensors) != len(states):
            wanted = f"{len(states)} tensors ({', '.join(states)}), or one of raw bytes"
            raise SpecError(self.field, f"{len(tensors)} tensors", wanted)
        for (name, parts), tensor in zip(states.items(), tensors, strict=True):
            yield name, self._state(name, tensor, parts)

    def _cut(
        self,
        raw: Any,  # noqa: ANN401
        states: Mapping[str, list[tuple[Part, int]]],
    ) -> Iterator[tuple[str, Any]]:
        """Yield views of the states that follow one another in a page of raw bytes."""
        sizes = {
            name: sum(units * part.states * part.content_bytes for part, units in parts)
            for name, parts in states.items()
        }
        shape, total = tuple(raw.shape), sum(sizes.values())
        if shape[-1] != total:
            wanted = f"[blocks, 1, 1, {total}], the bytes of {' and '.join(states)}"
            raise SpecError(f"{self.field}.shape", shape, wanted)
        if strides_of(raw)[-1] != 1:
            raise SpecError(f"{self.field}.stride", strides_of(raw)[-1], "1: contiguous bytes")
        shapes = {name: self._shape_of(name, parts) for name, parts in states.items()}
        for name, parts in states.items():
            if prod(shapes[name]) != sizes[name]:
                wanted = "parts with the same number and size of rows"
                names = ", ".join(part.name for part, _ in parts)
                raise SpecError(f"{self.field}[{name!r}]", names, wanted)
        for name, view in consecutive(raw[:, 0, 0], shapes):
            yield name, self._units_first(view)

    def _shape_of(self, name: str, parts: list[tuple[Part, int]]) -> tuple[int, ...]:
        """Return the sizes of a state inside a block. The last size is in bytes."""
        part, units = parts[0][0], sum(count for _, count in parts)
        if name != "conv" and part.states == 1:
            return units, part.content_bytes
        rows = (part.states, units) if self._row_first else (units, part.states)
        return (*rows, part.content_bytes)

    def _units_first(self, view: Any) -> Any:  # noqa: ANN401
        """Return the view of a state with its units before its rows, if it has rows."""
        return ordered(view, (0, 2, 1, 3)) if view.ndim == _WITH_HEADS and self._row_first else view

    @property
    def _row_first(self) -> bool:
        return self.letters.index("N") < self.letters.index("H")

    def _state(self, name: str, tensor: Any, parts: list[tuple[Part, int]]) -> Any:  # noqa: ANN401
        shape, field = tuple(tensor.shape), f"{self.field}[{name!r}].shape"
        *wanted, content = self._shape_of(name, parts)
        if name == "conv":
            if shape[1:] != tuple(wanted) or itemsize(tensor) != content:
                expected = f"[blocks, {wanted[0]}, {wanted[1]}] of {content} bytes"
                raise SpecError(field, shape, expected)
            return self._units_first(tensor[..., None])
        if shape[1:2] != tuple(wanted) or prod(shape[2:]) * itemsize(tensor) != content:
            raise SpecError(field, shape, f"[blocks, {wanted[0]}, ...] of {content} bytes")
        return flat(self.field, tensor, (shape[0], *wanted, prod(shape[2:])))


@attrs.frozen
class _ViewPlace:
    """The place of a layer in the config: its tensor, and its first byte there."""

    tensor: Tensor
    start: int

    @property
    def allocation(self) -> str:
        """The name of the allocation."""
        # Tensors with a block stride share one allocation, which gets the empty name.
        return "" if self.tensor.block_stride else self.tensor.path


def check_places(cache: RankCache, config: Config) -> None:
    """Raise `SpecError` unless the layers of *cache* lie as the tensors of *config* describe."""
    places = {
        layer: _ViewPlace(tensor, tensor.offset + at * tensor.layer_stride)
        for tensor in config.tensors
        for at, layer in enumerate(tensor.layers)
    }
    # Layers of several groups may begin at one address and still differ in pages and strides. So
    # each layer is checked by itself (vllm#57661 merged them by address).
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


def _check_strides(cache: RankCache, places: dict[str, _ViewPlace]) -> None:
    """Raise `SpecError` unless each layer has the block stride of the config."""
    for region in cache.regions:
        tensor = places[region.layer].tensor
        stride = region.block_stride * cache.engine.homes[region.layer].kernel_blocks_per_block
        # torch and numpy may report any stride for an axis of one block.
        if tensor.block_stride not in (0, stride) and region.num_blocks > 1:
            wanted = f"{tensor.block_stride}, the block_stride that holds for {tensor.path}"
            raise SpecError(f"tensors[{region.layer!r}].stride", stride, wanted)


def _check_starts(cache: RankCache, places: dict[str, _ViewPlace], bases: dict[str, int]) -> None:
    """Raise `SpecError` unless layers of one allocation have the distances of the config."""
    firsts: dict[str, str] = {}
    for layer, base in bases.items():
        place = places[layer]
        in_rows = place.tensor.layer_stride < place.tensor.block_stride
        if in_rows and cache.engine.homes[layer].kernel_blocks_per_block > 1:
            # The pages of all layers of a block lie together. If the kernel has smaller blocks,
            # vLLM may put the pages of a smaller block together, so the distances differ.
            continue
        first = firsts.setdefault(place.allocation, layer)
        distance, expected = base - bases[first], place.start - places[first].start
        if distance != expected:
            pair = f"{first} and {layer}, {distance} bytes apart"
            wanted = f"{expected} bytes, as {_paths(places[first], place)}"
            raise SpecError("tensors", pair, wanted)


def _check_separate(cache: RankCache, places: dict[str, _ViewPlace]) -> None:
    """Raise `SpecError` if layers of two allocations share a byte."""
    kernel_blocks_per_block = {
        group.name: group.kernel_blocks_per_block for group in cache.engine.groups
    }
    for one, other, _ in meetings(cache.regions, kernel_blocks_per_block):
        pair = places[one.layer], places[other.layer]
        if pair[0].allocation != pair[1].allocation:
            wanted = f"no byte shared, as {_paths(*pair)}"
            raise SpecError("tensors", f"{one.layer} and {other.layer}", wanted)


def _paths(first: _ViewPlace, second: _ViewPlace) -> str:
    """Return the tensors of the config that hold two layers, in words."""
    if first.tensor is second.tensor:
        return f"{first.tensor.path} has both"
    return f"{first.tensor.path} and {second.tensor.path} have them"


def consecutive(
    pages: Any,  # noqa: ANN401
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[tuple[str, Any]]:
    """Yield views of the parts that follow one another in each of *pages*, with their *shapes*."""
    start = 0
    for name, shape in shapes.items():
        stop = start + prod(shape)
        yield name, pages[:, start:stop].reshape((len(pages), *shape))
        start = stop


def several(given: Any) -> bool:  # noqa: ANN401
    """Whether *given* is a sequence of tensors."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def is_raw(tensor: Any) -> bool:  # noqa: ANN401
    """Whether a tensor has raw bytes as elements, and the shape ``[blocks, 1, 1, bytes]``."""
    shape = tuple(tensor.shape)
    return len(shape) == _WITH_HEADS and shape[1:3] == (1, 1) and itemsize(tensor) == 1


def has(tensor: Any, content: int) -> bool:  # noqa: ANN401
    """Whether the last axis has *content* bytes."""
    return bool(tensor.shape[-1] * itemsize(tensor) == content)


def itemsize(tensor: Any) -> int:  # noqa: ANN401
    """Return the bytes of an element."""
    # A numpy array has `strides`. A torch tensor has none, and old versions lack `itemsize`.
    return int(tensor.itemsize if hasattr(tensor, "strides") else tensor.element_size())


def strides_of(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the strides in bytes."""
    if hasattr(tensor, "strides"):
        return tuple(tensor.strides)
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def ordered(tensor: Any, order: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return the view with its axes in *order*."""
    return tensor.permute(order) if hasattr(tensor, "permute") else tensor.transpose(order)


def flat(field: str, tensor: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return a view of *tensor* in a new shape. Raise `SpecError` if it would need a copy.

    The leading axes that both shapes have in common may have any strides. The other axes must be
    contiguous.
    """
    # `reshape` would copy silently. Then the addresses would be those of the copy.
    kept = next(
        (at for at, (a, b) in enumerate(zip(tensor.shape, shape, strict=False)) if a != b),
        len(tensor.shape),
    )
    step = itemsize(tensor)
    dims = list(zip(tensor.shape, strides_of(tensor), strict=True))[kept:]
    for count, stride in reversed(dims):
        if count > 1 and stride != step:
            raise SpecError(f"{field}.stride", stride, f"{step}: contiguous inside a block")
        step *= count
    return tensor.reshape(shape)


def zero(tensors: Iterable[Any], places: npt.NDArray[np.uint64]) -> None:
    """Set the bytes at *places* to zero.

    Args:
        tensors: torch tensors whose storages contain all places.
        places: Rows (address, length), shape (rows, 2).
    """
    import torch  # noqa: PLC0415 - a caller with torch tensors has loaded it

    def bytes_of(tensor: Any) -> Any:  # noqa: ANN401
        """Return the whole storage of *tensor* as bytes."""
        storage_bytes = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return storage_bytes.set_(tensor.untyped_storage())

    # The tensors of vLLM are views of few storages, so most of these are equal.
    storages = {storage.data_ptr(): storage for storage in map(bytes_of, tensors)}
    starts = sorted(storages)
    for address, length in places.tolist():
        start = starts[bisect_right(starts, address) - 1]
        storages[start][address - start : address - start + length] = 0
