"""Read vLLM's spec of one layer on one rank as the spec of that layer in the model.

Invariant: the sizes of a rank are never taken for those of the model. The totals come from the
caller, or from sizes that fit only one model. The share of the rank that follows from the totals
must equal the share that vLLM reports.

How it works:
    A rank reports 1 KV head, and TP is 4. The model may have 4 heads (one for each rank), 2 heads
    (each held by two ranks) or 1 head (held by all ranks). The three models need different
    transfers. So the caller must pass the total, and the check is:

        total    heads of ranks 0, 1, 2, 3    rank 0 reports 1
        4        0     1     2     3          accepted
        2        0     0     1     1          accepted
        8        0, 1  2, 3  4, 5  6, 7       refused: rank 0 would have 2

    Then the size of a page is computed: 1 head · 16 tokens · (128 + 128) elements · 2 bytes are
    8,192 bytes. If vLLM's page has another size before padding, the spec was misunderstood and is
    refused. If only the padded page is larger, the spec gets the same padding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader, check_tp_rank, chosen, model_heads
from kvspec.adapters.vllm.backends import (
    INDEXER_KEY,
    KEY_PLANES,
    ROW_PAGES,
    Backends,
    layout_of,
    outer,
    packing,
    quantization,
    real_page,
    rows_without_values,
)
from kvspec.adapters.vllm.recurrent import read_state
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int
from kvspec.ownership.dtypes import dtype_name, itemsize
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.part import Part
from kvspec.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KeyContent,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    scales_digest,
)
from kvspec.specs.formats import PLAIN, is_opaque

_WINDOW = {"sliding_window": None, "extra_retained_tokens": 0}

# For each class name of vLLM: our class, and the fields that both have beyond the common ones.
# The value of such a field is its default, or None if the field is required.
SPEC_KINDS: dict[str, tuple[Callable[..., Any], Mapping[str, int | None]]] = {
    "FullAttentionSpec": (FullAttentionSpec, {}),
    "SlidingWindowSpec": (SlidingWindowSpec, _WINDOW),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, {"attention_chunk_size": None}),
    "CrossAttentionSpec": (CrossAttentionSpec, {}),
    "MLAAttentionSpec": (MLAAttentionSpec, {}),
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, _WINDOW),
    "MambaSpec": (MambaSpec, {}),
    "CircularBufferSpec": (CircularBufferSpec, {}),
}

# vLLM's classes that kvspec does not move, and why. The caller can exclude their layers.
NOT_MOVED = {
    "EncoderOnlyAttentionSpec": "it keeps nothing between steps",
    "SinkFullAttentionSpec": "no block table of a request contains sink tokens",
    "RSWASpec": "its table has a gap in the middle, which no window describes",
    "HiddenStateCacheSpec": "hidden states are not keys and values",
    "HiSparseHotSpec": "it is a device's replica of a host's cache",
    "HiSparseResidentSpec": "it is a device's replica of a host's cache",
}


def name_of(spec: object) -> str | None:
    """Return the name of *spec*'s class if the class is known, else None."""
    # A subclass does not count as its base class: vLLM's `RSWASpec` and `HiddenStateCacheSpec`
    # extend known classes and keep something else.
    name = type(spec).__name__
    return name if name in SPEC_KINDS else None


@attrs.frozen
class RankLayer:
    """One layer of a vLLM rank: its spec in the model, and the fields that its group needs."""

    spec: LayerSpec
    layout: str
    kernel_block_size: int | None
    context_sharded: bool


@attrs.frozen(kw_only=True)
class RankSpecs:
    """Reads specs, together with the facts that the specs do not contain.

    See `kvspec.adapters.vllm.engine_spec` for the fields.
    """

    parallel: ParallelConfig
    tp_rank: int
    heads: int | Mapping[str, int] | None
    layout: str
    kernel_block_size: int | Mapping[str, int] | None
    conv_layout: str | None
    n_groups: int | None
    backends: Backends
    fp8_dtype: str | Mapping[str, str] | None = None
    key_content: KeyContent | Mapping[str, KeyContent] | None = None
    scales: Mapping[str, tuple[float, float]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        check_tp_rank(self.tp_rank, self.parallel.tp_size)
        sizes = self.kernel_block_size
        for size in sizes.values() if isinstance(sizes, Mapping) else (sizes,):
            if size is not None:
                positive_int("kernel_block_size", size)
        if self.n_groups is not None:
            positive_int("n_groups", self.n_groups)
        if self.conv_layout not in (None, "DS", "SD"):
            wanted = "'DS' (dimension first), 'SD' (row first), or None"
            raise SpecError("conv_layout", self.conv_layout, wanted)

    def format_of(self, layer: str, rank_spec: FieldReader) -> str:
        """Return the page format of *layer*."""
        # A recurrent state has no attention backend. Its format follows from its shapes.
        name = name_of(rank_spec.value)
        if name in (None, "MambaSpec"):
            return ROW_PAGES
        if name == "CircularBufferSpec":
            self.backends.ratio_of(layer)
            return ROW_PAGES
        return self.backends.format_of(layer, rank_spec)

    def knows(self, layer: str, rank_spec: FieldReader) -> bool:
        """Whether the class of the spec and the page format of *layer* are known."""
        if name_of(rank_spec.value) is None:
            return False
        try:
            self.format_of(layer, rank_spec)
        except SpecError:
            return False
        return True

    def read(self, layer: str, rank_spec: FieldReader) -> RankLayer:
        """Return the layer in the model whose spec on this rank is *rank_spec*."""
        name = name_of(rank_spec.value)
        if name is None:
            cls = type(rank_spec.value).__name__
            why = f" (not moved: {NOT_MOVED[cls]})" if cls in NOT_MOVED else ""
            raise SpecError(rank_spec.path, cls, f"one of {', '.join(SPEC_KINDS)}{why}")
        page_format = self.format_of(layer, rank_spec)
        if name == "MambaSpec":
            state, order = read_state(
                rank_spec,
                self.parallel,
                self.tp_rank,
                self.conv_layout,
                self.n_groups,
                self.backends.device_of(layer),
            )
            inner = "NHC" if order == "SD" else "HNC"
            return self._layer(layer, state, rank_spec, outer(self.layout) + inner)
        if name == "CircularBufferSpec":
            ring = self._ring(layer, rank_spec)
            return self._layer(layer, ring, rank_spec, layout_of(self.layout, page_format))
        if "MLA" in name:
            spec = self._latent(name, layer, rank_spec, page_format)
        else:
            spec = self._heads(name, layer, rank_spec, page_format)
        spec = self._with_meaning(layer, spec)
        return self._layer(layer, spec, rank_spec, layout_of(self.layout, page_format))

    def _with_meaning(self, layer: str, spec: AttentionSpec) -> AttentionSpec:
        """Return *spec* with the meaning of its keys, and with the identity of its scales."""
        content = chosen(self.key_content, layer)
        packed = spec.state_content_bytes is not None or is_opaque(spec.page_format)
        packed |= isinstance(spec, MLAAttentionSpec) and spec.scale_dtype is not None
        # Nothing has to be known about the keys of cross attention, or of a packed row, whose
        # format has one meaning.
        if packed or isinstance(spec, CrossAttentionSpec):
            content = None
        elif content is None and self.key_content is not None:
            rule = (
                "the layer's modules do not show how keys are rotated: configure key_content, "
                "such as {'rotary': 'halves', 'rotary_size': 128}"
            )
            raise SpecError(f"key_content[{layer!r}]", None, rule=rule)
        if content is not None:
            instance(f"key_content[{layer!r}]", content, KeyContent)
        # The digest leaves out the name, so that layers with equal scales have equal specs.
        scales = self.scales.get(layer)
        digest = None if scales is None else scales_digest({"layer": scales})
        return attrs.evolve(spec, key_content=content, scales_digest=digest)

    def _layer(self, layer: str, spec: LayerSpec, rank_spec: FieldReader, layout: str) -> RankLayer:
        """Return the layer with its padding, kernel blocks and context sharding."""
        kernel = None
        if isinstance(spec, AttentionSpec):
            kernel = self._kernel_block(layer, spec.block_size)
            # An opaque page cannot be divided. So if the kernel has smaller blocks, its blocks are
            # the pages, and these move whole.
            if kernel is not None and is_opaque(spec.page_format) and not spec.block_size % kernel:
                spec = attrs.evolve(spec, page_block_size=kernel)
        return RankLayer(
            spec=self._paged(spec, rank_spec),
            layout=layout,
            kernel_block_size=kernel,
            context_sharded=_context_sharded(spec, rank_spec),
        )

    def _kernel_block(self, layer: str, block_size: int) -> int | None:
        """Return the tokens of a block in memory, or None if not fewer than *block_size*."""
        size: int | None = chosen(self.kernel_block_size, layer)
        return size if size is not None and size < block_size else None

    def _latent(
        self, name: str, layer: str, rank_spec: FieldReader, page_format: str
    ) -> AttentionSpec:
        """Return the spec of a layer with one latent for each token."""
        kind, more = SPEC_KINDS[name]
        fields = self._common(layer, rank_spec, more)
        if fields["dtype"] == "uint8":
            fields["dtype"] = self._bytes_of(layer)
        if page_format in KEY_PLANES:
            scale, shared = KEY_PLANES[page_format]
            fields |= {"head_size": INDEXER_KEY, "scale_dtype": scale, "elements_per_scale": shared}
            with rank_spec.named():
                planes: AttentionSpec = kind(**fields)
                return planes
        size = fields["head_size"] * itemsize(fields["dtype"])
        rows = fields["block_size"] // fields["tokens_per_state"]
        content = rank_spec.get("state_content_bytes").size_or_none()
        # A packed latent has data and scales in one row. Some specs of such latents lack the size
        # of a row. It is then the size of the page, divided by the rows.
        if content is None:
            page = real_page(rank_spec)
            if rows and page is not None and page != rows * size and page % rows == 0:
                content = page // rows
        with rank_spec.named():
            spec: AttentionSpec = kind(
                **fields,
                state_content_bytes=None if content == size else content,
                page_format=page_format if is_opaque(page_format) else PLAIN,
            )
            return spec

    def _ring(self, layer: str, rank_spec: FieldReader) -> CircularBufferSpec:
        """Return the spec of a layer with the rows of tokens that it has not compressed yet."""
        fields = self._common(layer, rank_spec, {"num_kv_heads": None})
        row = fields["head_size"] * itemsize(fields["dtype"])
        # Each head of a row, such as a key and a gate, is on every rank.
        value, rows = rank_spec.get("head_size_v"), fields.pop("tokens_per_state")
        if value.value != 0:
            raise SpecError(value.path, value.value, "0: a row is no key and value")
        if rows != 1:
            raise SpecError(rank_spec.get("tokens_per_state").path, rows, "1: a row for each token")
        content = rank_spec.get("state_content_bytes")
        if content.size_or_none() not in (None, row):
            raise SpecError(content.path, content.value, f"None or {row}: the elements of a row")
        with rank_spec.named():
            return CircularBufferSpec(**fields, compress_ratio=self.backends.ratio_of(layer))

    def _heads(
        self, name: str, layer: str, rank_spec: FieldReader, page_format: str
    ) -> AttentionSpec:
        """Return the spec of a layer with KV heads."""
        kind, more = SPEC_KINDS[name]
        fields = self._common(layer, rank_spec, more)
        local = rank_spec.get("num_kv_heads")
        heads = 1 if self.backends.of_summaries(layer) else self.heads
        total = model_heads(heads, layer, local, self.parallel, self.tp_rank)
        fields["total_num_kv_heads"] = total
        if rank_spec.get("head_size_v").value == 0:
            row = fields["head_size"] * itemsize(fields["dtype"])
            fields |= rows_without_values(rank_spec, page_format, row)
        else:
            fields["head_size_v"] = rank_spec.get("head_size_v").size_or_none()
            fields |= packing(rank_spec, page_format)
        with rank_spec.named():
            spec: AttentionSpec = kind(**fields)
            return spec

    def _common(
        self, layer: str, rank_spec: FieldReader, more: Mapping[str, int | None]
    ) -> dict[str, Any]:
        """Return the fields that all kinds of attention have, and *more* (see `SPEC_KINDS`)."""
        fields = {name: rank_spec.get(name).size() for name in ("block_size", "head_size")}
        rows = rank_spec.get("tokens_per_state")
        if isinstance(rows.value, Fraction) and rows.value < 1:
            wanted = "at least 1 (not yet: several rows for each token)"
            raise SpecError(rows.path, rows.value, wanted)
        for name, missing in {"tokens_per_state": 1, **more}.items():
            fields[name] = rank_spec.get(name).size(missing, least=0 if missing == 0 else 1)
        return {**fields, "dtype": self._dtype(layer, rank_spec)}

    def _dtype(self, layer: str, rank_spec: FieldReader) -> str:
        """Return the element type of *layer*."""
        # vLLM describes e4m3fn, e4m3fnuz and e5m2 in the same way: as uint8 in an fp8 mode. The
        # bytes of one type are other numbers in another, so the type must be known.
        dtype = rank_spec.get("dtype").dtype()
        if dtype != "uint8" or not quantization(rank_spec).startswith("FP8"):
            return dtype
        value, field = chosen(self.fp8_dtype, layer), f"fp8_dtype[{layer!r}]"
        name = None if value is None else dtype_name(value, field)
        if name is None or not name.startswith("float8_e"):
            wanted = f"the fp8 type of the layer's elements: {rank_spec.path} contains only 'fp8'"
            raise SpecError(field, value, wanted)
        return name

    def _bytes_of(self, layer: str) -> str:
        """Return the type of a latent or an index key that vLLM describes as bytes.

        Their elements of fp8 are e4m3fn, except on platforms that have no such type. The bytes of
        e4m3fnuz are other numbers.
        """
        value = chosen(self.fp8_dtype, layer)
        name = None if value is None else dtype_name(value, f"fp8_dtype[{layer!r}]")
        return name if name is not None and name.endswith("fnuz") else "uint8"

    def _paged(self, spec: LayerSpec, rank_spec: FieldReader) -> LayerSpec:
        """Return *spec* with vLLM's padding. Raise if vLLM's page has another size."""

        def local(part: Part) -> int:
            return len(self.parallel.sharding(part.units, part.granularity).ranges[self.tp_rank])

        real = sum(local(p) * p.states * p.content_bytes for p in spec.parts)
        page = real_page(rank_spec)
        if page is not None and page != real:
            wanted = f"{real}, the bytes of {', '.join(p.name for p in spec.parts)} in a block"
            raise SpecError(f"{rank_spec.path}.page_size_bytes", page, wanted)
        # `page_size_bytes` is a property of vLLM's classes and includes the padding.
        page = rank_spec.get("page_size_bytes").size_or_none()
        page = rank_spec.get("page_size_padded").size_or_none() if page is None else page
        if page is None or page == real:
            return spec
        if page < real:
            raise SpecError(f"{rank_spec.path}.page_size_bytes", page, f"at least {real}")
        return attrs.evolve(spec, page_size_padded=page)


def _context_sharded(spec: LayerSpec, rank_spec: FieldReader) -> bool:
    """Whether vLLM shards the tokens of a layer among context ranks."""
    # Older versions of vLLM shard every layer and have no such field. In newer ones, a draft model
    # may run whole while its target is sharded. A recurrent state has no tokens to
    # shard, and gets the default.
    return not spec.parts[0].per_token or rank_spec.get("dcp_sharded").flag(default=True)
