"""Read SGLang's `DeepSeekV4TokenToKVPool` of one rank as layers with compressed latents.

Invariant: nothing is guessed. Each buffer must have the shape that its class allocates. A pool
whose window or states lie elsewhere is refused.

How it works:
    Each layer keeps the latents of a window. A layer with a ratio r also keeps one latent for r
    tokens, and the sums of the tokens that it has not compressed yet. Its indexer, if it has one,
    keeps a key for r tokens. DeepSeek-V4 has the ratios 4 and 128, V4.1 has 1 and 2:

        group         layers             a block                  its id
        swa           all                a page of window slots   slot of the window // page
        c4, c128      those of a ratio   rows of a page           slot // page
        c4_index      those of ratio 4   rows of a page           slot // page
        c4_state      those of ratio 4   8 rows, a ring           slot of the window // page
        c128_state    those of ratio 128 128 rows, a ring         slot of the request

    In a page, the data of all rows comes first, then their scales, then padding. With pages of 256
    tokens, `c4` has 64 rows in a page: 64 x 576 bytes of data, and 64 x 8 bytes of scales.

    The state of a position p of the ratio 128 is row p % 128 of the request's ring. That of the
    ratio 4 is row p % 8 of the ring of its *page*. So a request has several such rings, and its
    last 7 positions may lie in two of them. No kind of layer describes a ring for each page. But a
    page with a live position may move whole, as one row of a window, if both engines have pages
    and rings of one size. SGLang adds the learned position (`ape`) to a score when it compresses,
    and vLLM before it stores the score. So the states have a page format of their own.

    The slots of a window are those of SGLang's `translate_loc_from_full_to_swa`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.sglang.pools import FULL_GROUP, WINDOW, check_class
from kvspec.errors import SpecError
from kvspec.inputs import mapping
from kvspec.memory.from_tensors import check_tensor
from kvspec.ownership.dtypes import itemsize
from kvspec.specs import (
    CircularBufferSpec,
    KeyContent,
    LayerSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    scales_digest,
)
from kvspec.specs.attention import AttentionSpec
from kvspec.specs.formats import is_opaque

COMPRESSED_POOL = "DeepSeekV4TokenToKVPool"
_UNIFORM_POOL = "DeepSeekV4UniformFP8KVPool"
_LATENT_POOLS = ("DeepSeekV4SingleKVPool", _UNIFORM_POOL)

# The ratios that SGLang has. The compressor of ratio 4 also reads the group before the open one,
# and its states belong to pages. Ratio 1 compresses nothing.
_COMPRESS_RATIOS, _PAGED_RATIO = (1, 2, 4, 128), 4
# The groups of the ratios, and the ends of their names.
KEY_PAGES, SUMS, KEY_SUMS = "_index", "_state", "_index_state"
COMPRESSED_GROUPS = (
    WINDOW,
    *(f"c{ratio}{end}" for ratio in _COMPRESS_RATIOS for end in ("", KEY_PAGES, SUMS, KEY_SUMS)),
)
# The key of the number of a request among the slots of `block_tables`.
REQUEST_SLOT = "request"

# The records of a token, by the name of SGLang's `KVLayout`. The first three have all data of a
# page before all scales. In the next two, the scales of a token follow its data. The last one has
# the scale 1 for all.
_FLOAT8, _NV_SCALE, _MX_SCALE = "float8_e4m3fn", "float8_e4m3fn", "float8_e8m0fnu"
_ONE_SCALE = scales_digest({"layer": (1.0, 1.0)})
_RECORDS: dict[str, dict[str, Any]] = {
    # 448 elements of 8 bits, 64 of bfloat16. 7 scales and a byte of padding.
    "v4": {"head_size": 576, "dtype": "uint8", "scale_dtype": "uint8", "elements_per_scale": 72},
    "v41": {
        "head_size": 512,
        "dtype": _FLOAT8,
        "scale_dtype": _MX_SCALE,
        "elements_per_scale": 32,
    },
    # A byte has two elements.
    "v41_fp4": {
        "head_size": 256,
        "dtype": "uint8",
        "scale_dtype": _NV_SCALE,
        "elements_per_scale": 8,
    },
    "v41_new": {"head_size": 512, "dtype": _FLOAT8, "state_content_bytes": 512 + 16},
    "v41_fp4_new": {"head_size": 256, "dtype": "uint8", "state_content_bytes": 256 + 32},
    "uniform_fp8": {"head_size": 512, "dtype": _FLOAT8, "scales_digest": _ONE_SCALE},
}
# Those of a key of an indexer: 128 elements of 8 bits, or of 4.
_INDEX_KEYS: dict[str, dict[str, Any]] = {
    "": {"head_size": 128, "dtype": "uint8", "scale_dtype": "float32"},
    "-fp4": {
        "head_size": 64,
        "dtype": "uint8",
        "scale_dtype": _MX_SCALE,
        "elements_per_scale": 16,
    },
}
# The format of the states that belong to a page.
_PAGE_RINGS = "opaque:sglang-compressor"


def slots_of(group: str) -> str:
    """Return the group whose slots the pages of *group* have.

    >>> slots_of("c128"), slots_of("c4_index"), slots_of("c4_state"), slots_of("draft")
    ('full', 'full', 'swa', 'draft')
    """
    if group == WINDOW or group not in COMPRESSED_GROUPS:
        return group
    return WINDOW if group.endswith(SUMS) else FULL_GROUP


@attrs.frozen
class CompressedPool:
    """Layers of one rank that keep rows of one kind in blocks of equal bytes.

    Attributes:
        path: The path to the pool, for error messages.
        group: The group of the layers.
        layers: The numbers of the layers in the model.
        buffers: For each layer, in the same order, the tensor: blocks and bytes, or for a ring
            blocks, rows and elements.
        spec: The spec of the layers, without what keys mean.
    """

    path: str
    group: str
    layers: tuple[int, ...]
    buffers: tuple[Any, ...]
    spec: LayerSpec

    layout = "LBNHC"

    @property
    def page_size(self) -> int:
        """Tokens of a block, or the rows of a ring."""
        return self.spec.block_size

    @property
    def suffix(self) -> str:
        """The end of the name of each cache, behind the name of its layer or indexer."""
        if self.group == WINDOW:
            return ".swa_cache"
        if self.group.endswith(KEY_SUMS):
            return ".indexer.compressor.state_cache"
        return ".compressor.state_cache" if self.group.endswith(SUMS) else ""

    @property
    def has_keys(self) -> bool:
        """Whether the layers keep the keys of an indexer."""
        return self.group.endswith(KEY_PAGES)

    def keys_of(self, *, shuffled: bool, hadamard: bool) -> LayerSpec:
        """Return the spec of an indexer's keys.

        If only one of two engines multiplies keys and queries by a matrix, it chooses other tokens.
        The bytes do not show it, so the name of the format does. Such pages move whole.
        """
        form = "-fp4" if self.spec.parts[0].content_bytes < _INDEX_KEYS[""]["head_size"] else ""
        order = "-shuffled" if shuffled else ""
        own = "-hadamard" if hadamard else ""
        if not order and not own:
            return self.spec
        spec: Any = self.spec
        named: LayerSpec = attrs.evolve(spec, page_format=f"opaque:indexer{form}{order}{own}")
        return named

    def latents_of(self, content: KeyContent | None) -> LayerSpec:
        """Return the spec of layers whose keys mean *content*. States have no keys."""
        if self.group.endswith(SUMS):
            return self.spec
        spec: Any = self.spec
        stated: LayerSpec = attrs.evolve(spec, key_content=content)
        return stated

    def axes(self, spec: LayerSpec) -> dict[str, str]:
        """Return the letters of the axes of all tensors, by the name of the group."""
        opaque = isinstance(spec, AttentionSpec) and is_opaque(spec.page_format)
        return {self.group: "BC" if opaque else "BNC"}

    def tensors(self, place: int, spec: LayerSpec) -> dict[str, Any]:
        """Return the views of the layer at *place*, by the name of their part."""
        buffer = self.buffers[place]
        if spec.is_ring:
            return {"ring": buffer}
        views, start = dict[str, Any](), 0
        for part in spec.parts:
            stop = start + part.states * part.content_bytes
            rows = buffer[:, start:stop]
            if part.name != "page":
                rows = rows.reshape(-1, part.states, part.content_bytes)
            views[part.name] = rows
            start = stop
        return views


def read_compressed(path: str, fields: object) -> tuple[CompressedPool, ...]:
    """Return the layers of *fields*, a `DeepSeekV4TokenToKVPool`. *path* is for error messages.

    Raises:
        SpecError: If the window or the states lie elsewhere, or a buffer has another shape.
    """
    pool = FieldReader(path, fields)
    check_class(pool, (COMPRESSED_POOL,))
    _check_places(pool)
    return tuple(_CompressedReader(pool).groups())


def _check_places(pool: FieldReader) -> None:
    """Raise `SpecError` unless the window and its latents are pages of tokens."""
    for name, wanted in (
        ("request_window", "None; not yet: a window for each request, which is computed again"),
        ("unified_kv_pool", "None; not yet: windows and latents in one buffer"),
        ("swa_req_ring_size", "None; not yet: a ring of window slots for each request"),
        ("swa_valid_from", "None; not yet: the rows of a draft"),
    ):
        if (field := pool.get(name)).value is not None:
            raise SpecError(field.path, type(field.value).__name__, wanted)


@attrs.frozen
class _CompressedReader:
    """The pools that a pool consists of."""

    pool: FieldReader

    def groups(self) -> Iterator[CompressedPool]:
        """Yield the window, and then the groups of each ratio."""
        start, stop = (self.pool.get(name).size(least=0) for name in ("_stage_start", "_stage_end"))
        window = self.pool.get("swa_kv_pool")
        size = self.pool.get("sliding_window").size()
        yield self.latents(
            window, WINDOW, tuple(range(start, stop)), SlidingWindowMLASpec, sliding_window=size
        )
        field = self.pool.get("sources_by_ratio")
        owners = mapping(field.path, field.value, "layer numbers by ratio")
        for ratio, layers in owners.items():
            if ratio not in _COMPRESS_RATIOS:
                raise SpecError(
                    field.path, ratio, f"one of {', '.join(map(str, _COMPRESS_RATIOS))}"
                )
            kept = self._of_ratio("kv_pools", ratio)
            yield self.latents(
                kept, f"c{ratio}", tuple(layers), MLAAttentionSpec, tokens_per_state=ratio
            )
            keys = self._of_ratio("index_pools", ratio)
            if keys.value is not None:
                yield self.keys(keys, ratio, tuple(layers))
            for name, end in (
                ("compress_state_pools", SUMS),
                ("indexer_compress_state_pools", KEY_SUMS),
            ):
                yield from self.states(name, ratio, f"c{ratio}{end}", tuple(layers))

    def _of_ratio(self, name: str, ratio: int) -> FieldReader:
        field = self.pool.get(name)
        pools = mapping(field.path, field.value, "pools by ratio")
        return FieldReader(f"{field.path}[{ratio}]", pools.get(ratio))

    def latents(
        self,
        kept: FieldReader,
        group: str,
        layers: tuple[int, ...],
        kind: type[MLAAttentionSpec],
        **sizes: int,
    ) -> CompressedPool:
        """Return the layers of a pool of latents."""
        field = kept.get("kv_layout")
        name = str(getattr(field.value, "value", field.value))
        if check_class(kept, _LATENT_POOLS) == _UNIFORM_POOL:
            name = "uniform_fp8"
        if name not in _RECORDS:
            raise SpecError(field.path, name, f"one of {', '.join(_RECORDS)}")
        block = kept.get("page_size").size() * sizes.get("tokens_per_state", 1)
        fields: dict[str, Any] = {**sizes, **_RECORDS[name]}
        spec = kind(block_size=block, **fields)
        return self._pages(kept, "kv_buffer", group, layers, spec)

    def keys(self, kept: FieldReader, ratio: int, layers: tuple[int, ...]) -> CompressedPool:
        """Return the layers of a pool of an indexer's keys."""
        check_class(kept, ("DeepSeekV4IndexerPool",))
        for name in ("uses_aiter_fp4_layout", "index_k_page8"):
            if (field := kept.get(name)).flag(default=False):
                raise SpecError(field.path, field.value, "False; not yet: the orders of AITER")
        fields = _INDEX_KEYS["-fp4" if kept.get("use_fp4_indexer").flag(default=False) else ""]
        block = kept.get("page_size").size() * ratio
        spec = MLAAttentionSpec(block_size=block, tokens_per_state=ratio, **fields)
        return self._pages(kept, "index_k_with_scale_buffer", f"c{ratio}{KEY_PAGES}", layers, spec)

    def _pages(
        self, kept: FieldReader, name: str, group: str, layers: tuple[int, ...], spec: LayerSpec
    ) -> CompressedPool:
        """Return the layers of a list of buffers [pages, bytes]. A page may end with padding."""
        rows = kept.get(name).members("buffers")
        if len(rows) != len(layers):
            wanted = f"{len(layers)}, one for each layer of group {group!r}"
            raise SpecError(f"{kept.path}.{name}", f"{len(rows)} buffers", wanted)
        content = spec.page_size_bytes()
        sizes: set[int] = set()
        for row in rows:
            check_tensor(row.path, row.value)
            shape = tuple(row.value.shape)
            if len(shape) != 2 or shape[1] < content:  # noqa: PLR2004 - pages and bytes
                raise SpecError(f"{row.path}.shape", shape, f"[pages, {content} bytes or more]")
            sizes.add(shape[1])
        if len(sizes) > 1:
            raise SpecError(f"{kept.path}.{name}", sorted(sizes), "pages of one size")
        padded = sizes.pop() if sizes else content
        if padded != content:
            spec = attrs.evolve(spec, page_size_padded=padded)
        return CompressedPool(kept.path, group, layers, tuple(row.value for row in rows), spec)

    def states(
        self, name: str, ratio: int, group: str, layers: tuple[int, ...]
    ) -> Iterator[CompressedPool]:
        """Yield the layers of the sums that are not compressed yet, if there are any."""
        members = self.pool.get(name).members("states by layer")
        pools = [members[layer] for layer in layers]
        if all(each.value is None for each in pools):
            return
        rings = [_ring(each, ratio) for each in pools]
        specs = {self._state_spec(each, ratio) for each in pools}
        if len(specs) > 1:
            raise SpecError(
                f"{self.pool.path}.{name}", len(specs), "one kind of state in all layers"
            )
        (spec,) = specs
        buffers = tuple(ring if spec.is_ring else ring.reshape(len(ring), -1) for ring in rings)
        yield CompressedPool(f"{self.pool.path}.{name}", group, layers, buffers, spec)

    def _state_spec(self, state: FieldReader, ratio: int) -> LayerSpec:
        rows = state.get("ring_size").size()
        tensor = state.get("kv_score_buffer").get("kv_score").value
        dtype = str(tensor.dtype).removeprefix("torch.")
        elements = int(tensor.shape[1])
        of_page = ratio == _PAGED_RATIO
        if state.get("request_scoped").flag(default=False) is of_page:
            raise SpecError(f"{state.path}.request_scoped", of_page, str(not of_page))
        if not of_page:
            return CircularBufferSpec(
                block_size=rows, head_size=elements, dtype=dtype, compress_ratio=ratio
            )
        page = state.get("swa_page_size").size()
        if page % rows:
            raise SpecError(f"{state.path}.ring_size", rows, f"a divisor of swa_page_size={page}")
        # A window of 8: the next query reads the 4 to 7 positions before it.
        return SlidingWindowMLASpec(
            block_size=page,
            tokens_per_state=page,
            head_size=elements,
            dtype=dtype,
            state_content_bytes=rows * elements * itemsize(dtype),
            page_format=f"{_PAGE_RINGS}-{dtype}-{rows}",
            sliding_window=2 * _PAGED_RATIO,
        )


def _ring(state: FieldReader, ratio: int) -> Any:  # noqa: ANN401
    """Return the view [rings, rows, elements] of the states of one layer."""
    check_class(state, ("CompressStatePool",))
    if (online := state.get("online")).flag(default=False):
        wanted = "False; not yet: one row of a maximum, a sum and a key for each request"
        raise SpecError(online.path, online.value, wanted)
    if (own := state.get("ratio").size()) != ratio:
        raise SpecError(f"{state.path}.ratio", own, f"{ratio}, as the layer has")
    buffer = state.get("kv_score_buffer").get("kv_score")
    check_tensor(buffer.path, buffer.value)
    shape, rows = tuple(buffer.value.shape), state.get("ring_size").size()
    if len(shape) != 2 or shape[0] <= rows:  # noqa: PLR2004 - rows and elements
        raise SpecError(f"{buffer.path}.shape", shape, f"[more than {rows} rows, elements]")
    count = shape[0] // rows
    # The rows after the last ring belong to no request.
    return buffer.value[: count * rows].reshape(count, rows, shape[1])
