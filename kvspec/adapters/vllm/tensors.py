"""vLLM's tensors, read as one rank's regions.

Law: a tensor is only viewed, never copied, and its shape has to be one that is known for its kind
and layout, extent by extent; a shape that could be believed two ways is settled by its strides.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod
from typing import Any

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.arrays import flat, has, is_raw, itemsize, ordered, several, strides_of
from kvspec.adapters.vllm.config import Config, read_config
from kvspec.adapters.vllm.memory import check_places, owned
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int
from kvspec.memory.from_tensors import check_layers, check_tensor
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part

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
