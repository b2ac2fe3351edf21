"""SGLang's token pools of one rank, read field by field.

Law: a pool is known by its exact class, and its buffers by their shape: a slot for each token,
``[slots, heads, size]``, page by page from slot 0 on. Any other order is refused by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.errors import SpecError
from kvspec.inputs import mapping
from kvspec.memory.from_tensors import check_tensor

FULL, WINDOW, DRAFT = "full", "swa", "draft"
"""The groups: layers that keep every token, layers of a window, layers of a draft model."""

KINDS = ("MHATokenToKVPool", "MLATokenToKVPool", "SWAKVPool")
"""SGLang's classes that are read, by name; one made from them may keep anything."""

NOT_YET = {
    "MHATokenToKVPoolFP4": "scales of two elements each lie in buffers of their own",
    "MLATokenToKVPoolFP4": "scales of two elements each lie in buffers of their own",
    "NSATokenToKVPool": "an indexer's keys lie page by page, their scales after them",
    "DSATokenToKVPool": "an indexer's keys lie page by page, their scales after them",
    "DoubleSparseTokenToKVPool": "labels lie beside keys and values",
    "HybridLinearKVPool": "recurrent states lie in a pool of their own",
    "DeepSeekV4TokenToKVPool": "compressed tokens lie in pools of their own",
}
"""SGLang's classes that are not read yet, and why."""

_AXES = 3


@attrs.frozen
class TokenPool:
    """Layers of one rank that share slots; *layers*: the model's numbers, in order of *buffers*.

    *buffers*: for each layer the tensors by the name of the part that they hold.
    """

    path: str
    group: str
    page_size: int
    dtype: str
    layers: tuple[int, ...]
    buffers: tuple[dict[str, Any], ...]

    @property
    def latent(self) -> bool:
        """Whether a layer keeps one latent, not keys and values of heads."""
        return "latent" in self.buffers[0]

    def shape(self, part: str) -> tuple[int, int, int]:
        """Return slots, heads and elements of *part*'s buffers, alike in all layers."""
        shapes = [tuple(buffer[part].shape) for buffer in self.buffers]
        if len(set(shapes)) > 1:
            raise SpecError(f"{self.path}.{part}", shapes, "one shape in all layers")
        slots, heads, size = shapes[0]
        return slots, heads, size


def read_pools(path: str, fields: object, group: str) -> tuple[TokenPool, ...]:
    """Return the pools that *fields*, one of SGLang's, is made of; its layers are of *group*."""
    pool = FieldReader(path, fields)
    name = type(fields).__name__
    if name not in KINDS:
        why = f"; not yet: {NOT_YET[name]}" if name in NOT_YET else ""
        raise SpecError(path, name, f"one of {', '.join(KINDS)}{why}")
    if name == "SWAKVPool":
        return tuple(_halves(pool))
    _check_layout(pool)
    start = pool.get("start_layer").size(0, least=0)
    found = tuple(_buffers(pool, latent=name.startswith("MLA")))
    return (_pool(pool, group, tuple(range(start, start + len(found))), found),)


def _halves(pool: FieldReader) -> Iterator[TokenPool]:
    """Yield the two pools of a model with windows; its layers are named by number."""
    field = pool.get("layers_mapping")
    places = mapping(field.path, field.value, "layer numbers to places")
    for attribute, group, windowed in (
        ("full_kv_pool", FULL, False),
        ("swa_kv_pool", WINDOW, True),
    ):
        half = pool.get(attribute)
        if type(half.value).__name__ != "MHATokenToKVPool":
            raise SpecError(half.path, type(half.value).__name__, "a MHATokenToKVPool")
        _check_layout(half)
        numbers = {place: layer for layer, (place, of_window) in places.items()
                   if of_window is windowed}  # fmt: skip
        found = tuple(_buffers(half, latent=False))
        if sorted(numbers) != list(range(len(found))):
            wanted = f"a layer for each of the {len(found)} buffers of {half.path}"
            raise SpecError(field.path, sorted(numbers), wanted)
        if found:
            layers = tuple(numbers[place] for place in range(len(found)))
            yield _pool(half, group, layers, found)


def _pool(
    pool: FieldReader, group: str, layers: tuple[int, ...], buffers: tuple[dict[str, Any], ...]
) -> TokenPool:
    if not buffers:
        raise SpecError(pool.path, "no buffers", "at least one layer")
    size, dtype = pool.get("page_size").size(), pool.get("dtype").dtype()
    return TokenPool(pool.path, group, size, dtype, layers, buffers)


def _check_layout(pool: FieldReader) -> None:
    """Refuse keys and values in chunks, as ROCm's kernels may have them."""
    layout = pool.get("kv_cache_layout")
    if layout.value not in (None, "nhd"):
        wanted = "'nhd'; not yet: heads in chunks of 16 bytes"
        raise SpecError(layout.path, layout.value, wanted)


def _buffers(pool: FieldReader, *, latent: bool) -> Iterator[dict[str, Any]]:
    """Yield each layer's buffers by part, checked to have three axes."""
    names = {"latent": "kv_buffer"} if latent else {"k": "k_buffer", "v": "v_buffer"}
    columns: dict[str, tuple[FieldReader, ...]] = {
        part: pool.get(name).members("buffers") for part, name in names.items()
    }
    counts = {part: len(column) for part, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise SpecError(pool.path, counts, "as many buffers of keys as of values")
    for row in zip(*columns.values(), strict=True):
        for buffer in row:
            check_tensor(buffer.path, buffer.value)
            if len(buffer.value.shape) != _AXES:
                wanted = "[slots, heads, size]"
                raise SpecError(f"{buffer.path}.shape", tuple(buffer.value.shape), wanted)
        yield dict(zip(columns, (buffer.value for buffer in row), strict=True))


def stages_of(path: str, fields: object, read: Callable[[str, object], Any]) -> tuple[Any, ...]:
    """Return what *read* makes of one pool, or of one of each pipeline stage."""
    if isinstance(fields, Sequence):
        return tuple(read(f"{path}[{at}]", pool) for at, pool in enumerate(fields))
    return (read(path, fields),)
