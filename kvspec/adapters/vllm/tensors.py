"""vLLM's tensors, read as one rank's regions.

Law: a tensor is only viewed, never copied, and its shape has to be one that is known for its kind
and layout, extent by extent; a shape that could be believed two ways is settled by its strides.

What is asked of a tensor, whether it is torch's or numpy's.

Law: extents, bytes and views; nothing is copied and nothing is known of caches.

vLLM's tensors in memory, held against the tensors that its config says there are.

Law: layers alias where the config says so and nowhere else. That is judged by addresses, after the
tensors were read, and an error names two layers and what the config says of them.
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
from kvspec.inputs import instance, positive_int
from kvspec.memory.aliasing import meetings
from kvspec.memory.from_tensors import check_layers, check_tensor
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

_HEAD_AXES = 4


def several(given: Any) -> bool:  # noqa: ANN401
    """Whether *given* is a sequence of tensors, not one."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def is_raw(tensor: Any) -> bool:  # noqa: ANN401
    """Whether a tensor is one of raw bytes, ``[blocks, 1, 1, bytes]``."""
    shape = tuple(tensor.shape)
    return len(shape) == _HEAD_AXES and shape[1:3] == (1, 1) and itemsize(tensor) == 1


def has(tensor: Any, content: int) -> bool:  # noqa: ANN401
    """Whether the last axis is of so many bytes of *content*."""
    return bool(tensor.shape[-1] * itemsize(tensor) == content)


def itemsize(tensor: Any) -> int:  # noqa: ANN401
    """Return the bytes of an element."""
    return int(tensor.itemsize if hasattr(tensor, "strides") else tensor.element_size())


def strides_of(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the strides in bytes."""
    if hasattr(tensor, "strides"):
        return tuple(tensor.strides)
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def ordered(tensor: Any, order: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return the view whose axes stand in another *order*."""
    return tensor.permute(order) if hasattr(tensor, "permute") else tensor.transpose(order)


def flat(field: str, tensor: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return *tensor*, called *field*, in a new shape; raise `SpecError` unless that is a view."""
    kept = next(
        (at for at, (a, b) in enumerate(zip(tensor.shape, shape, strict=False)) if a != b),
        len(tensor.shape),
    )
    step = itemsize(tensor)
    dims = list(zip(tensor.shape, strides_of(tensor), strict=True))[kept:]
    for count, stride in reversed(dims):
        if count > 1 and stride != step:
            raise SpecError(f"{field}.stride", stride, f"one chunk, {step} bytes apart")
        step *= count
    return tensor.reshape(shape)


def zero(tensors: Iterable[Any], places: npt.NDArray[np.uint64]) -> None:
    """Set the bytes of *places*, rows (address, length), to zero; each lies in a torch tensor's."""
    import torch  # noqa: PLC0415 - whoever has such tensors has loaded it

    def bytes_of(tensor: Any) -> Any:  # noqa: ANN401
        made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return made.set_(tensor.untyped_storage())

    whole = map(bytes_of, tensors)
    storages = {storage.data_ptr(): storage for storage in whole}
    starts = sorted(storages)
    for address, length in places.tolist():
        start = starts[bisect_right(starts, address) - 1]
        storages[start][address - start : address - start + length] = 0


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


_AXES = {3: "BHC", 4: "BHNC", 5: "BHPNC"}
"""Letters of the views that this module makes, by the number of their dimensions."""

_FIVE = 5
_TOKENS, _LATENT = 4, 3


def rank_cache(
    engine: EngineSpec,
    rank: RankId,
    tensors: Mapping[str, Any],
    num_blocks: int | None = None,
    *,
    config: Any = None,  # noqa: ANN401 - vLLM's class, not imported
) -> RankCache:
    """Return where vLLM's *tensors* of one rank lie.

    *engine*: from `engine_spec`. *tensors*: for each layer of the rank, a tensor of shape
    ``[blocks, heads, tokens, content]`` (content: k then v); with planes in the layout
    ``[2, blocks, tokens, heads, size]`` or ``[blocks, 2, tokens, heads, size]``; of one latent
    ``[blocks, tokens, content]`` too; of a state one of raw bytes, ``[blocks, 1, 1, bytes]``, in
    which its tensors follow one another without a gap, conv first, or the list of these.
    Blocks are the kernel's. Layers that the engine excludes may be left out. *num_blocks*: in the
    table's blocks; checked if given. *config*: this rank's own `KVCacheConfig`; if given, the
    tensors have its number of blocks, layers share memory where its `kv_cache_tensors` say so, and
    no others do. A layer of no group that has another's very tensor reads that one's cache.
    """
    instance("engine", engine, EngineSpec).parallel.check_rank(rank)
    tensors = owned(engine, tensors)
    check_layers(engine, rank, tensors)
    held = None if config is None else read_config(FieldReader("config", config))
    num_blocks = _blocks(num_blocks, held)
    views = {}
    for group in engine.groups:
        for layer in engine.layers_at(group, rank.pp):
            if layer not in tensors:
                continue
            views[layer] = dict(_Layer(engine, group, rank, layer).views(tensors[layer]))
            if num_blocks is not None:
                _check_blocks(layer, views[layer], num_blocks * group.kernel_blocks_per_block)
    axes = {name: _AXES[view.ndim] for named in views.values() for name, view in named.items()}
    cache = RankCache.from_tensors(engine, rank, views, axes)
    if held is not None:
        check_places(cache, held)
    return cache


def _blocks(fields: int | None, config: Config | None) -> int | None:
    """Return the table's blocks, as the caller or the config says."""
    if fields is not None:
        positive_int("num_blocks", fields)
    if config is None:
        return fields
    count = config.fields.get("num_blocks").size()
    if fields not in (None, count):
        raise SpecError("num_blocks", fields, f"{count}, as the config has")
    return count


def _check_blocks(layer: str, views: Mapping[str, Any], wanted: int) -> None:
    for view in views.values():
        if view.shape[0] != wanted:
            field = f"tensors[{layer!r}].shape[0]"
            raise SpecError(field, view.shape[0], f"{wanted} blocks in memory")


class _Layer:
    """What one layer's tensors should look like on one rank."""

    def __init__(self, engine: EngineSpec, group: KVCacheGroup, rank: RankId, layer: str) -> None:
        self.field = f"tensors[{layer!r}]"
        self.parts = group.in_memory(layer).parts
        self.letters = engine.layout_of(group).replace("L", "")
        self.units = [len(engine.units(group, part, rank)) for part in self.parts]

    def views(self, fields: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield views of the layer's tensors by the name of the part or tensor that they hold."""
        if not self.parts[0].per_token:
            yield from self._states(fields)
            return
        if several(fields):
            raise SpecError(
                self.field, f"{len(fields)} tensors", "one tensor where rows are tokens"
            )
        check_tensor(self.field, fields)
        if any(part.chunks > 1 for part in self.parts):
            yield from self._chunks(fields)
            return
        if len({part.tensor for part in self.parts}) > 1:
            yield from self._one_after_the_other(fields)
            return
        for part, view in zip(self.parts, self._tokens(fields), strict=True):
            yield part.name, view[:, :, None] if part.name in ("k", "v") else view

    def _one_after_the_other(self, tensor: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield views of the parts that follow one another in a page, whatever its shape says."""
        held = list(zip(self.parts, self.units, strict=True))
        sizes = [units * part.states * part.content_bytes for part, units in held]
        shape, start = tuple(tensor.shape), 0
        if len(shape) != _TOKENS or itemsize(tensor) != 1 or prod(shape[1:]) != sum(sizes):
            wanted = f"pages of {sum(sizes)} bytes: {', '.join(part.name for part in self.parts)}"
            raise SpecError(f"{self.field}.shape", shape, wanted)
        whole = flat(self.field, tensor, (shape[0], sum(sizes)))
        for (part, units), size in zip(held, sizes, strict=True):
            rows = (units, 1, part.states) if part.name in ("k", "v") else (units, part.states)
            yield (
                part.name,
                whole[:, start : start + size].reshape((shape[0], *rows, part.content_bytes)),
            )
            start += size

    def _chunks(self, tensor: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        """Yield views [blocks, heads, chunks, rows, content] of keys and values that lie apart.

        Each head has its keys before its values, or the keys of all heads lie before all values.
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
        if part.whole and len(shape) == _TOKENS:
            page, (size, rest) = prod(shape[1:]), divmod(prod(shape[1:]), heads)
            if not rest and page * itemsize(tensor) == heads * part.states * part.content_bytes:
                return [flat(self.field, tensor, (shape[0], heads, 1, size))]
        if "K" in self.letters:
            return self._planes(tensor, heads, part)
        content = sum(each.content_bytes for each in self.parts)
        if heads == 1 and len(shape) == _LATENT:
            tensor = tensor[:, None]
        if tuple(tensor.shape)[1:3] != (heads, part.states) or not has(tensor, content):
            expected = f"[blocks, {heads}, {part.states}, {content} bytes]"
            raise SpecError(f"{self.field}.shape", shape, f"{expected} for layout {self.letters}")
        return self._beside(tensor)

    def _beside(self, tensor: Any) -> list[Any]:  # noqa: ANN401
        found: list[Any] = []
        at = 0
        for part in self.parts:
            size, rest = divmod(part.content_bytes, itemsize(tensor))
            if rest:
                wanted = f"elements that divide the {part.content_bytes} bytes of {part.name}"
                raise SpecError(f"{self.field}.itemsize", itemsize(tensor), wanted)
            found.append(tensor[..., at : at + size])
            at += size
        return found

    def _planes(self, tensor: Any, heads: int, part: Part) -> list[Any]:  # noqa: ANN401
        shape, field = tuple(tensor.shape), f"{self.field}.shape"
        size, planes = part.content_bytes, len(self.parts)
        slots = len(shape) == _TOKENS and shape[1:3] == (planes, part.states)
        if slots and has(tensor, heads * size):
            inner = (shape[0], planes, part.states, heads, size // itemsize(tensor))
            tensor = flat(self.field, tensor, inner)
            return [ordered(tensor[:, each], (0, 2, 1, 3)) for each in range(planes)]
        outer = "KB" if self.letters.index("K") < self.letters.index("B") else "BK"
        orders = [outer + "NHC", outer + "HNC"]
        sizes = {"K": planes, "H": heads, "N": part.states}
        fits = [
            order
            for order in orders
            if len(shape) == _FIVE
            and has(tensor, size)
            and all(shape[order.index(axis)] == count for axis, count in sizes.items())
        ]
        if not fits:
            expected = (
                f"{'[2, blocks' if outer == 'KB' else '[blocks, 2'}, {part.states}, {heads}, "
            )
            raise SpecError(field, shape, f"{expected}{size} bytes] for layout {self.letters}")
        order = next((each for each in fits if self._agrees(tensor, each)), fits[0])
        axis = order.index("K")
        rest = order.replace("K", "")
        found = []
        for each in range(planes):
            plane = tensor[each] if axis == 0 else tensor[:, each]
            found.append(ordered(plane, tuple(rest.index(letter) for letter in "BHNC")))
        return found

    def _agrees(self, tensor: Any, order: str) -> bool:  # noqa: ANN401
        """Whether the strides of heads and rows stand as the layout says."""
        strides = dict(zip(order, strides_of(tensor), strict=True))
        rows_outside = self.letters.index("N") < self.letters.index("H")
        return rows_outside == (strides["N"] > strides["H"])

    def _states(self, fields: Any) -> Iterator[tuple[str, Any]]:  # noqa: ANN401
        held: dict[str, list[tuple[Part, int]]] = {}
        for part, units in zip(self.parts, self.units, strict=True):
            held.setdefault(part.tensor, []).append((part, units))
        tensors = list(fields) if several(fields) else [fields]
        for at, tensor in enumerate(tensors):
            check_tensor(f"{self.field}[{at}]" if several(fields) else self.field, tensor)
        if not several(fields) and is_raw(fields):
            yield from self._cut(fields, held)
            return
        if len(tensors) != len(held):
            wanted = f"{len(held)} tensors ({', '.join(held)}), or one of raw bytes"
            raise SpecError(self.field, f"{len(tensors)} tensors", wanted)
        for (name, parts), tensor in zip(held.items(), tensors, strict=True):
            yield name, self._state(name, tensor, parts)

    def _cut(
        self,
        raw: Any,  # noqa: ANN401
        held: Mapping[str, list[tuple[Part, int]]],
    ) -> Iterator[tuple[str, Any]]:
        """Yield views of the tensors that lie one after the other in a page of raw bytes."""
        sizes = {name: sum(u * p.states * p.content_bytes for p, u in held[name]) for name in held}
        shape, total = tuple(raw.shape), sum(sizes.values())
        if shape[-1] != total:
            wanted = f"[blocks, 1, 1, {total}], the bytes of {' and '.join(held)}"
            raise SpecError(f"{self.field}.shape", shape, wanted)
        if strides_of(raw)[-1] != 1:
            raise SpecError(
                f"{self.field}.stride", strides_of(raw)[-1], "bytes one after the other"
            )
        start = 0
        for name, parts in held.items():
            part_view = raw[:, 0, 0, start : start + sizes[name]]
            extents = self._extents(name, parts)
            if prod(extents) != sizes[name]:
                unlike = ", ".join(part.name for part, _ in parts)
                raise SpecError(f"{self.field}[{name!r}]", unlike, "parts of the same rows")
            yield name, self._units_first(part_view.reshape((shape[0], *extents)))
            start += sizes[name]

    def _extents(self, name: str, parts: list[tuple[Part, int]]) -> tuple[int, ...]:
        """Return the extents of a state's tensor within a block, the last one in bytes."""
        part, units = parts[0][0], sum(count for _, count in parts)
        if name != "conv" and part.states == 1:
            return units, part.content_bytes
        rows = (part.states, units) if self._row_first else (units, part.states)
        return (*rows, part.content_bytes)

    def _units_first(self, view: Any) -> Any:  # noqa: ANN401
        """Return a state's view with its units before its rows, if it has rows."""
        return ordered(view, (0, 2, 1, 3)) if view.ndim == _TOKENS and self._row_first else view

    @property
    def _row_first(self) -> bool:
        return self.letters.index("N") < self.letters.index("H")

    def _state(self, name: str, tensor: Any, parts: list[tuple[Part, int]]) -> Any:  # noqa: ANN401
        shape, field = tuple(tensor.shape), f"{self.field}[{name!r}].shape"
        *wanted, content = self._extents(name, parts)
        if name == "conv":
            if shape[1:] != tuple(wanted) or itemsize(tensor) != content:
                expected = f"[blocks, {wanted[0]}, {wanted[1]}] of {content} bytes"
                raise SpecError(field, shape, expected)
            return self._units_first(tensor[..., None])
        if shape[1:2] != tuple(wanted) or prod(shape[2:]) * itemsize(tensor) != content:
            raise SpecError(field, shape, f"[blocks, {wanted[0]}, ...] of {content} bytes")
        return flat(self.field, tensor, (shape[0], *wanted, prod(shape[2:])))
