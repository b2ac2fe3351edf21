"""Read SGLang's token pools of one rank as layers that share slots.

Invariant: nothing is guessed. A pool is recognised by its exact class, because a subclass may keep
another order. Each buffer must have the shape that its class allocates.

How it works:
    A pool has a buffer for each layer, with one slot for each token. A page is a run of consecutive
    slots. Some pools consist of others. Each of these becomes one or several `TokenPool`:

        class                  group      layers and what they keep
        MHATokenToKVPool       full       keys and values; swa: those of layers with a window
        MLATokenToKVPool       full       a latent
        SWAKVPool              full, swa  two pools of keys and values, with slots of their own
        MHATokenToKVPoolFP4    full       the same, with scales; also MHATokenToKVPoolMXFP8
        MLATokenToKVPoolFP4    full       a latent and its scales
        DSATokenToKVPool       full       a latent
                               indexer    of layers that choose tokens: pages of keys and scales
        MiniMaxSparseKVPool    full       keys and values
                               indexer    of sparse layers: one key
        HybridLinearKVPool     full       those of its `full_kv_pool`, for the layers that attend

    The states of a `HybridLinearKVPool` are read by `kvspec.adapters.sglang.state_pools`.

    An `MHATokenToKVPool` may also have scales: the class of its `quant_method` shows which. A scale
    belongs to adjacent elements of one head of one token. SGLang orders those of a page of 128
    tokens for one kernel, so the page has one row of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from math import prod
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.errors import SpecError
from kvspec.inputs import mapping
from kvspec.memory.from_tensors import check_tensor
from kvspec.specs import AttentionSpec, LayerSpec
from kvspec.specs.formats import is_opaque

# The names of the groups: layers that keep all tokens, layers with a window, the keys by which a
# layer chooses tokens, recurrent states, and layers of a draft.
FULL_GROUP, WINDOW, INDEXER, STATE, DRAFT = "full", "swa", "indexer", "state", "draft"

# The classes of SGLang that are read, by exact name.
POOL_KINDS = (
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MHATokenToKVPoolMXFP8",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "DSATokenToKVPool",
    "SWAKVPool",
    "HybridLinearKVPool",
    "MiniMaxSparseKVPool",
)
# Those that may be the `full_kv_pool` of a `HybridLinearKVPool`.
_PLAIN = (
    "MHATokenToKVPool",
    "MHATokenToKVPoolFP4",
    "MHATokenToKVPoolMXFP8",
    "MLATokenToKVPool",
    "MLATokenToKVPoolFP4",
    "DSATokenToKVPool",
)

# The package of the classes that are read. A class in it has a name of its own.
_PACKAGE = "sglang."

_PART = "it is a part of another pool"
_UNIFIED = "all pools share one buffer, in which SGLang moves pages"
_SPARSE = "the host has tokens that the device lacks"
_SPREAD = "the pages of a request lie on several ranks"
_NPU = "the layout of NPUs was not run"
# Classes of SGLang that are not read, and why.
POOLS_NOT_YET = {
    "PageMajorMHATokenToKVPool": "SGLang cannot construct it",
    "NoOpMHATokenToKVPool": "it keeps no tokens",
    "MHATokenToKOnlyPool": _PART,
    "MiniMaxM3Nvfp4KVPool": "keys, values and scales lie in the order of one kernel",
    "MiniMaxM3Nvfp4MainKVPool": _PART,
    "MiniMaxM3Nvfp4IndexKPool": _PART,
    "QSATokenToKVPool": "a ring of pending keys, and compressed keys, lie beside the states",
    "DeepSeekV4SingleKVPool": _PART,
    "DeepSeekV4UniformFP8KVPool": _PART,
    "DeepSeekV4IndexerPool": _PART,
    "HiSparseC4DevicePool": _SPARSE,
    "HiSparseDSATokenToKVPool": _SPARSE,
    "HiSparseMHAMainPool": _SPARSE,
    "LayerSplitDSATokenToKVPool": "each context rank has some of the layers",
    "PageInterleaveMHATokenToKVPool": _SPREAD,
    "PageInterleaveMLATokenToKVPool": _SPREAD,
    "PageInterleaveDSATokenToKVPool": _SPREAD,
    "UnifiedMHATokenToKVPool": _UNIFIED,
    "UnifiedMLATokenToKVPool": _UNIFIED,
    "UnifiedSWAKVPool": _UNIFIED,
    "UnifiedHybridLinearKVPool": _UNIFIED,
    "UnifiedDraftKVPool": _UNIFIED,
    "UnifiedDraftSWAKVPool": _UNIFIED,
    "NPUMHATokenToKVPool": _NPU,
    "NPUMHATokenToKOnlyPool": _NPU,
    "NPUMLATokenToKVPool": _NPU,
    "NPUMiniMaxSparseKVPool": _NPU,
    "NPUDeepSeekV4SingleKVPool": _NPU,
    "NPUDeepSeekV4IndexerPool": _NPU,
    "DSV4NPUTokenToKVPool": _NPU,
}

# The attributes of pools with scales for small groups of elements. Their type may be called uint8.
SCALE_BUFFERS = ("k_scale_buffer", "v_scale_buffer", "native_k_scale_buffer", "kv_scale_buffer")

# The axes of a buffer of tokens, and of a buffer of an indexer.
_SLOT_AXES, _INDEX_AXES = ("slots", "heads", "size"), ("pages", "bytes")


@attrs.frozen
class Scales:
    """The scales of a pool's elements.

    Attributes:
        dtype: Their type.
        elements: Elements of the pool's type that share a scale. In FP4 it is a byte with two.
        tokens: Tokens whose scales lie in one row, in an order that is not known.
        global_scales: Whether each layer has one more scale outside of the pool.
    """

    dtype: str
    elements: int
    tokens: int = 1
    global_scales: bool = False


_NV_SCALE, _MX_SCALE = "float8_e4m3fn", "float8_e8m0fnu"
# 16 elements of FP4 share a scale. They are 8 bytes.
_FP4 = 8

# The scales of a `MHATokenToKVPool`, by the class of its `quant_method`.
_RECIPES = {
    "UnquantizedKVCacheMethod": None,
    "CPUFP8KVCacheMethod": None,
    "FP4MXBlock16KVCacheMethod": Scales(_MX_SCALE, _FP4),
    "NVFP4KVCacheMethod": Scales(_NV_SCALE, _FP4, global_scales=True),
}


@attrs.frozen
class TokenPool:
    """Layers of one rank that share slots.

    Attributes:
        path: The path to the pool, for error messages.
        group: The group of the layers.
        page_size: Tokens of a page.
        dtype: The type of the elements.
        layers: The numbers of the layers in the model.
        buffers: For each layer, in the same order, the tensors by the name of their part. The part
            ``page`` has the axes pages and bytes. The others have the axes slots, heads and size.
        replicated: Whether each context rank holds all tokens.
        latent_size: The elements of a latent if its row also has scales, else None.
        scales: The scales in buffers of their own, or None.
    """

    path: str
    group: str
    page_size: int
    dtype: str
    layers: tuple[int, ...]
    buffers: tuple[dict[str, Any], ...]
    replicated: bool = False
    latent_size: int | None = None
    scales: Scales | None = None

    @property
    def has_global_scales(self) -> bool:
        """Whether each layer has a scale of keys and one of values outside of the pool."""
        return "float8" in self.dtype if self.scales is None else self.scales.global_scales

    @property
    def has_heads(self) -> bool:
        """Whether a layer keeps keys and values by heads."""
        return "k" in self.buffers[0]

    @property
    def layout(self) -> str | None:
        """The layout of the layers. None for that of the engine."""
        # A latent has no planes of keys and values, as the engine's layout has.
        return None if self.has_heads else "LBNHC"

    def axes(self, spec: LayerSpec) -> dict[str, str]:
        """Return the letters of the axes of all tensors, by the name of the group."""
        if "page" in self.buffers[0]:
            return {self.group: "BC" if _is_opaque(spec) else "BNC"}
        # Scales of several tokens may have more axes.
        more = {part: "(BN)H" + "C" * (len(tensor.shape) - 2)
                for part, tensor in self.buffers[0].items() if part.endswith("_scale")}  # fmt: skip
        return {self.group: "(BN)HC", **more}

    def tensors(self, place: int, spec: LayerSpec) -> dict[str, Any]:
        """Return the buffers of the layer at *place*, without slots after the last whole page."""
        own = self.buffers[place]
        if "page" in own:
            return own if _is_opaque(spec) else _planes(own["page"], self.page_size, spec)
        found = {}
        for part, rows in own.items():
            tokens = self.scales.tokens if self.scales and part.endswith("_scale") else 1
            page = self.page_size // tokens
            found[part] = rows[: len(rows) // page * page]
        return found

    def shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of *part*. All layers must have the same."""
        shapes = [tuple(buffer[part].shape) for buffer in self.buffers]
        if len(set(shapes)) > 1:
            raise SpecError(f"{self.path}.{part}", shapes, "one shape in all layers")
        return shapes[0]


def _is_opaque(spec: LayerSpec) -> bool:
    return isinstance(spec, AttentionSpec) and is_opaque(spec.page_format)


def _planes(pages: Any, tokens: int, spec: LayerSpec) -> dict[str, Any]:  # noqa: ANN401
    """Return views [pages, tokens, bytes] of the parts that lie one after the other in a page."""
    views, start = dict[str, Any](), 0
    for part in spec.parts:
        stop = start + tokens * part.content_bytes
        views[part.name] = pages[:, start:stop].reshape(-1, tokens, part.content_bytes)
        start = stop
    return views


def read_pools(
    path: str, fields: object, group: str, windows: Mapping[int, int] | None = None
) -> tuple[TokenPool, ...]:
    """Return the token pools of *fields*, one of SGLang's pools. Its layers belong to *group*.

    Layers of a plain pool that are in *windows* belong to the group of layers with a window.
    """
    pool = FieldReader(path, fields)
    kind = check_class(pool, POOL_KINDS)
    # A pipeline stage has the layers from `start_layer` on.
    start = pool.get("start_layer").size(0, least=0)
    return tuple(_READ[kind](pool, group, windows or {}, start))


def read_drafts(path: str, fields: object) -> tuple[TokenPool, ...]:
    """Return the token pools of a draft, which has the slots of the model's tokens.

    Raises:
        SpecError: If the draft has layers with windows, indexers or states.
    """
    pools = read_pools(path, fields, DRAFT)
    name = type(fields).__name__
    if name == "HybridLinearKVPool" or any(pool.group != DRAFT for pool in pools):
        wanted = "a pool of keys and values, or of latents"
        raise SpecError(path, name, f"{wanted}; not yet: drafts with windows, indexers or states")
    return pools


def check_class(pool: FieldReader, kinds: tuple[str, ...]) -> str:
    """Return the name of a pool's class. Raise `SpecError` unless it is exactly one of *kinds*."""
    kind = type(pool.value)
    name = kind.__name__
    if name not in kinds:
        why = f"; not yet: {POOLS_NOT_YET[name]}" if name in POOLS_NOT_YET else ""
        raise SpecError(pool.path, name, f"one of {', '.join(kinds)}{why}")
    # A platform's plug-in may extend SGLang's class under the same name, with another order.
    bases = kind.__mro__[1:]
    extends_sglang = any(base.__module__.startswith(_PACKAGE) for base in bases)
    if any(base.__name__ == name for base in bases) or (
        extends_sglang and not kind.__module__.startswith(_PACKAGE)
    ):
        wanted = f"SGLang's own {name}; not yet: classes that extend it"
        raise SpecError(pool.path, f"{kind.__module__}.{kind.__qualname__}", wanted)
    return name


Layers = int | tuple[int, ...]


def _numbers(layers: Layers, count: int, field: FieldReader) -> tuple[int, ...]:
    """Return the numbers of *count* layers: from a first one on, or *layers* themselves."""
    numbers = tuple(range(layers, layers + count)) if isinstance(layers, int) else layers
    if len(numbers) != count:
        raise SpecError(field.path, f"{count} buffers", f"{len(numbers)}, one for each layer")
    return numbers


def _heads(
    pool: FieldReader, group: str, windows: Mapping[int, int], layers: Layers
) -> Iterator[TokenPool]:
    """Yield the layers of a pool of keys and values: those without a window, then the others."""
    scales = _scales_of_heads(pool)
    _check_layout(pool, scales)
    buffers = tuple(_buffers(pool, {"k": "k_buffer", "v": "v_buffer"}))
    if scales is not None:
        buffers = _with_scales(pool, buffers, scales)
    whole = _pool(pool, group, _numbers(layers, len(buffers), pool), buffers, scales)
    for name, windowed in ((group, False), (WINDOW, True)):
        rows = [row for row in zip(whole.layers, whole.buffers, strict=True)
                if (row[0] in windows) is windowed]  # fmt: skip
        if rows:
            own, tensors = zip(*rows, strict=True)
            yield attrs.evolve(whole, group=name, layers=own, buffers=tensors)


def _latents(
    pool: FieldReader, group: str, windows: Mapping[int, int], layers: Layers
) -> Iterator[TokenPool]:
    """Yield the layers of a pool of latents."""
    scales = Scales(_MX_SCALE, _FP4) if type(pool.value).__name__ == "MLATokenToKVPoolFP4" else None
    _check_layout(pool, scales)
    size = None
    if pool.get("dsa_kv_cache_store_fp8").flag(default=False):
        size = pool.get("kv_lora_rank").size() + pool.get("qk_rope_head_dim").size()
    buffers = tuple(_buffers(pool, {"kv" if size else "latent": "kv_buffer"}))
    if scales is not None:
        buffers = _with_scales(pool, buffers, scales)
    own = _pool(pool, group, _numbers(layers, len(buffers), pool), buffers, scales)
    if any(number in windows for number in own.layers):
        raise SpecError("windows", windows, "no layers of latents; not yet: latents with a window")
    # The rows have elements of 8 bits, scales, and an unquantised part.
    yield attrs.evolve(own, latent_size=size, dtype="uint8") if size else own


def _sparse_latents(
    pool: FieldReader, group: str, windows: Mapping[int, int], layers: Layers
) -> Iterator[TokenPool]:
    """Yield latents, and the index pages of the layers that choose tokens."""
    (latents,) = _latents(pool, group, windows, layers)
    yield latents
    pooled, size = pool.get("index_kpool"), pool.get("index_page_size")
    if pooled.size(1) > 1:
        wanted = "1; not yet: keys of several tokens, and the ring of those that are incomplete"
        raise SpecError(pooled.path, pooled.value, wanted)
    if size.size() != latents.page_size:
        wanted = f"{latents.page_size}, the page_size; not yet: index pages of another size"
        raise SpecError(size.path, size.value, wanted)
    skipped = pool.get("skip_topk_layers").members("whether a layer takes its tokens from another")
    pages = list(_buffers(pool, {"page": "index_k_with_scale_buffer"}, _INDEX_AXES))
    if not len(skipped) == len(pages) == len(latents.layers):
        wanted = f"{len(latents.layers)}, one for each layer"
        raise SpecError(pool.get("skip_topk_layers").path, len(skipped), wanted)
    # A layer that takes its tokens from another has a buffer without pages.
    rows = [row for row in zip(latents.layers, pages, skipped, strict=True)
            if not row[2].flag(default=False)]  # fmt: skip
    if rows:
        own, tensors, _ = zip(*rows, strict=True)
        yield attrs.evolve(latents, group=INDEXER, layers=own, buffers=tensors, dtype="uint8",
                           latent_size=None)  # fmt: skip


def _windowed(
    pool: FieldReader, _group: str, windows: Mapping[int, int], _layers: Layers
) -> Iterator[TokenPool]:
    """Yield the two pools of a model with windows.

    `layers_mapping` has the place of each layer: {0: (0, False), 1: (0, True)} puts layer 0 at
    place 0 of the full pool, and layer 1 at place 0 of the pool with windows.
    """
    if windows:
        wanted = "none for a SWAKVPool, which knows its layers: pass sliding_window"
        raise SpecError("windows", windows, wanted)
    field = pool.get("layers_mapping")
    places = mapping(field.path, field.value, "layer numbers to places")
    for attribute, own_group, windowed in (
        ("full_kv_pool", FULL_GROUP, False),
        ("swa_kv_pool", WINDOW, True),
    ):
        half = pool.get(attribute)
        check_class(half, ("MHATokenToKVPool",))
        own = {layer: place for layer, (place, of_window) in places.items()
               if of_window is windowed}  # fmt: skip
        # A pipeline stage may have layers of one kind only.
        if own or half.get("k_buffer").members("buffers"):
            yield from _heads(half, own_group, {}, _by_place(field, own, half))


def _by_place(field: FieldReader, places: Mapping[int, int], pool: FieldReader) -> tuple[int, ...]:
    """Return the layers of *pool* in the order of their *places*, which *field* has."""
    count = len(places)
    if sorted(places.values()) != list(range(count)):
        wanted = f"a layer for each of the {count} buffers of {pool.path}"
        raise SpecError(field.path, sorted(places.values()), wanted)
    return tuple(sorted(places, key=places.__getitem__))


def _hybrid(
    pool: FieldReader,
    group: str,
    windows: Mapping[int, int],
    _: Layers,
) -> Iterator[TokenPool]:
    """Yield the layers that attend. `kvspec.adapters.sglang.state_pools` reads the others."""
    inner, field = pool.get("full_kv_pool"), pool.get("full_attention_layer_id_mapping")
    kind = check_class(inner, _PLAIN)
    places = mapping(field.path, field.value, "layer numbers to places")
    own = _by_place(field, places, inner)
    # A pipeline stage may have layers with states only.
    if own:
        yield from _READ[kind](inner, group, windows, own)


def _minimax(
    pool: FieldReader, group: str, windows: Mapping[int, int], layers: Layers
) -> Iterator[TokenPool]:
    """Yield keys and values of all layers, and the index keys of the sparse ones."""
    main, keys = pool.get("main_pool"), pool.get("index_k_pool")
    for name in ("dense_pool", "index_kv_pool"):
        if (other := pool.get(name)).value is not None:
            wanted = "None; not yet: dense layers in a pool of their own, or index values"
            raise SpecError(other.path, type(other.value).__name__, wanted)
    check_class(main, ("MHATokenToKVPool",))
    yield from _heads(main, group, windows, layers)
    if keys.value is None:
        return
    check_class(keys, ("MHATokenToKOnlyPool",))
    field = pool.get("index_k_layer_id_mapping")
    own = _by_place(field, mapping(field.path, field.value, "layer numbers to places"), keys)
    buffers = tuple(_buffers(keys, {"latent": "k_buffer"}))
    yield _pool(keys, INDEXER, _numbers(own, len(buffers), keys), buffers)


_Reader = Callable[[FieldReader, str, Mapping[int, int], Layers], Iterator[TokenPool]]
_READ: dict[str, _Reader] = {
    "MHATokenToKVPool": _heads,
    "MHATokenToKVPoolFP4": _heads,
    "MHATokenToKVPoolMXFP8": _heads,
    "MLATokenToKVPool": _latents,
    "MLATokenToKVPoolFP4": _latents,
    "DSATokenToKVPool": _sparse_latents,
    "SWAKVPool": _windowed,
    "HybridLinearKVPool": _hybrid,
    "MiniMaxSparseKVPool": _minimax,
}


def _scales_of_heads(pool: FieldReader) -> Scales | None:
    """Return the scales of a pool of keys and values, or None if its elements have none."""
    name = type(pool.value).__name__
    if name == "MHATokenToKVPoolFP4":
        return Scales(_MX_SCALE, _FP4, global_scales=True)
    if name == "MHATokenToKVPoolMXFP8":
        # SGLang orders the scales of a page of this size for one kernel.
        ordered = pool.get("mxfp8_sf_interleaved").flag(default=False)
        return Scales(_MX_SCALE, 32, pool.get("page_size").size() if ordered else 1)
    method = pool.get("quant_method")
    if method.value is None:
        return None
    return _RECIPES[check_class(method, tuple(_RECIPES))]


def _with_scales(
    pool: FieldReader, buffers: tuple[dict[str, Any], ...], scales: Scales
) -> tuple[dict[str, Any], ...]:
    """Return *buffers* with those of their scales: [rows, heads, ...].

    Some buffers of scales have the heads of a token in one row.
    """
    names = {"k": "k_scale_buffer", "v": "v_scale_buffer", "latent": "kv_scale_buffer"}
    found = tuple(dict(own) for own in buffers)
    for part in buffers[0] if buffers else ():
        field = pool.get(names[part])
        rows = field.members("buffers")
        if len(rows) != len(buffers):
            raise SpecError(field.path, f"{len(rows)} buffers", f"{len(buffers)}, as {part} has")
        for own, row in zip(found, rows, strict=True):
            slots, heads, size = own[part].shape
            check_tensor(row.path, row.value)
            flat = (slots, heads * size // scales.elements)
            tensor, content = row.value, scales.tokens * size // scales.elements
            if tuple(tensor.shape) == flat:
                tensor = tensor.reshape(slots, heads, flat[1] // heads)
            shape = tuple(tensor.shape)
            if shape[:2] != (slots // scales.tokens, heads) or prod(shape[2:]) != content:
                wanted = f"[{slots // scales.tokens}, {heads}, {content}], or the axes in one"
                raise SpecError(f"{row.path}.shape", tuple(row.value.shape), wanted)
            own[f"{part}_scale"] = tensor
    return found


def _pool(
    pool: FieldReader,
    group: str,
    layers: tuple[int, ...],
    buffers: tuple[dict[str, Any], ...],
    scales: Scales | None = None,
) -> TokenPool:
    if not buffers:
        raise SpecError(pool.path, "no buffers", "at least one layer")
    size = pool.get("page_size").size()
    # A byte of FP4 has two elements.
    dtype = "uint8" if scales and scales.elements == _FP4 else pool.get("dtype").dtype()
    replicated = pool.get("dcp_replicated").flag(default=False)
    return TokenPool(pool.path, group, size, dtype, layers, buffers, replicated, scales=scales)


def _check_layout(pool: FieldReader, own: Scales | None = None) -> None:
    """Raise `SpecError` unless keys and values are whole rows, and lie in their buffers alone.

    *own* are the scales that are read.
    """
    layout = pool.get("kv_cache_layout")
    # Some ROCm kernels split them into chunks.
    if layout.value not in (None, "nhd"):
        wanted = "'nhd'; not yet: heads in chunks of 16 bytes"
        raise SpecError(layout.path, layout.value, wanted)
    # The storage of such a tensor is larger than its memory, so it cannot be registered.
    reserved = pool.get("post_capture_active")
    if reserved.flag(default=False):
        wanted = "False; not yet: addresses that are reserved before the size is known"
        raise SpecError(reserved.path, reserved.value, wanted)
    for name in SCALE_BUFFERS if own is None else ("native_k_scale_buffer",):
        scales = pool.get(name)
        if scales.value is not None:
            wanted = "None; not yet: scales of elements in buffers of their own"
            raise SpecError(scales.path, type(scales.value).__name__, wanted)


def _buffers(
    pool: FieldReader, names: Mapping[str, str], axes: tuple[str, ...] = _SLOT_AXES
) -> Iterator[dict[str, Any]]:
    """Yield the buffers of each layer by part. *names* are those of their lists."""
    columns: dict[str, tuple[FieldReader, ...]] = {
        part: pool.get(name).members("buffers") for part, name in names.items()
    }
    counts = {part: len(column) for part, column in columns.items()}
    if len(set(counts.values())) > 1:
        raise SpecError(pool.path, counts, "as many buffers of keys as of values")
    for row in zip(*columns.values(), strict=True):
        for buffer in row:
            check_tensor(buffer.path, buffer.value)
            if len(buffer.value.shape) != len(axes):
                wanted = f"[{', '.join(axes)}]"
                raise SpecError(f"{buffer.path}.shape", tuple(buffer.value.shape), wanted)
        yield dict(zip(columns, (buffer.value for buffer in row), strict=True))
