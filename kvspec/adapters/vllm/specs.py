"""vLLM's specs of one layer on one rank, read as the kinds of layer of a model.

Law: a rank's sizes are never the model's. Totals come from the caller or from sizes that cannot
mean two things, and what the sharding then gives the rank has to be what vLLM says it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.backends import (
    ROWS,
    Backends,
    layout_of,
    outer,
    packing,
    quantization,
    real_page,
)
from kvspec.adapters.vllm.recurrent import read_state
from kvspec.dtypes import dtype_name, itemsize
from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.part import Part
from kvspec.specs import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from kvspec.specs.formats import PLAIN, is_opaque

_WINDOW = {"sliding_window": None, "extra_retained_tokens": 0}

KINDS: dict[str, tuple[Callable[..., Any], Mapping[str, int | None]]] = {
    "FullAttentionSpec": (FullAttentionSpec, {}),
    "SlidingWindowSpec": (SlidingWindowSpec, _WINDOW),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, {"attention_chunk_size": None}),
    "CrossAttentionSpec": (CrossAttentionSpec, {}),
    "MLAAttentionSpec": (MLAAttentionSpec, {}),
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, _WINDOW),
    "MambaSpec": (MambaSpec, {}),
}
"""vLLM's classes, by name: our kind, and more fields that both have: None, or if missing what."""

NOT_MOVED = {
    "EncoderOnlyAttentionSpec": "it keeps nothing between steps",
    "SinkFullAttentionSpec": "sink tokens stand in no request's block table",
    "CircularBufferSpec": "scratch space is not cache",
    "RSWASpec": "its table has a gap in the middle, which no window describes",
    "HiddenStateCacheSpec": "hidden states are not keys and values",
    "HiSparseHotSpec": "it is a device's replica of a host's cache",
    "HiSparseResidentSpec": "it is a device's replica of a host's cache",
}
"""vLLM's classes that are not moved, and why; exclude their layers."""


def name_of(spec: object) -> str | None:
    """Return the name of *spec*'s class if it is a known kind, or None.

    A class made from a known one may keep anything: only the class itself counts.
    """
    name = type(spec).__name__
    return name if name in KINDS else None


@attrs.frozen
class RankLayer:
    """One layer as vLLM keeps it: its kind, and what a group says of its memory."""

    spec: LayerSpec
    layout: str
    kernel_block_size: int | None
    context_sharded: bool


@attrs.frozen(kw_only=True)
class RankSpecs:
    """What vLLM's specs do not say: see `kvspec.adapters.vllm.engine_spec`."""

    parallel: ParallelConfig
    tp_rank: int
    heads: int | Mapping[str, int] | None
    layout: str
    kernel_block_size: int | Mapping[str, int] | None
    conv_layout: str | None
    n_groups: int | None
    backends: Backends
    fp8_dtype: str | Mapping[str, str] | None = None

    def __attrs_post_init__(self) -> None:
        if positive_int("tp_rank", self.tp_rank, least=0) >= self.parallel.tp_size:
            raise SpecError("tp_rank", self.tp_rank, f"less than tp_size={self.parallel.tp_size}")
        sizes = self.kernel_block_size
        for size in sizes.values() if isinstance(sizes, Mapping) else (sizes,):
            if size is not None:
                positive_int("kernel_block_size", size)
        if self.n_groups is not None:
            positive_int("n_groups", self.n_groups)
        if self.conv_layout not in (None, "DS", "SD"):
            wanted = "'DS' (dimension first), 'SD' (row first), or None"
            raise SpecError("conv_layout", self.conv_layout, wanted)

    def format_of(self, layer: str, given_spec: FieldReader) -> str:
        """Return the format of the pages of *layer*; a state's follows from its shapes."""
        if name_of(given_spec.value) in (None, "MambaSpec"):
            return ROWS
        return self.backends.format_of(layer, given_spec)

    def knows(self, layer: str, given_spec: FieldReader) -> bool:
        """Whether the kind of *layer* and the format of its pages are known."""
        if name_of(given_spec.value) is None:
            return False
        try:
            self.format_of(layer, given_spec)
        except SpecError:
            return False
        return True

    def read(self, layer: str, given_spec: FieldReader) -> RankLayer:
        """Return what *layer* is whose spec on this rank is *given_spec*."""
        name = name_of(given_spec.value)
        if name is None:
            cls = type(given_spec.value).__name__
            why = f", and {NOT_MOVED[cls]}" if cls in NOT_MOVED else ""
            raise SpecError(given_spec.path, cls, f"one of {', '.join(KINDS)}{why}")
        page_format = self.format_of(layer, given_spec)
        if name == "MambaSpec":
            state, order = read_state(
                given_spec,
                self.parallel,
                self.tp_rank,
                self.conv_layout,
                self.n_groups,
                self.backends.device_of(layer),
            )
            return self._layer(
                layer, state, given_spec, outer(self.layout) + ("HNC", "NHC")[order == "SD"]
            )
        if "MLA" in name:
            spec = self._latent(name, layer, given_spec, page_format)
        else:
            spec = self._heads(name, layer, given_spec, page_format)
        return self._layer(layer, spec, given_spec, layout_of(self.layout, page_format))

    def _layer(
        self, layer: str, spec: LayerSpec, given_spec: FieldReader, layout: str
    ) -> RankLayer:
        kernel = None
        if isinstance(spec, AttentionSpec):
            kernel = self._kernel_block(layer, spec.block_size)
            if kernel is not None and is_opaque(spec.page_format) and not spec.block_size % kernel:
                spec = attrs.evolve(spec, page_block_size=kernel)
        return RankLayer(
            spec=self._paged(spec, given_spec),
            layout=layout,
            kernel_block_size=kernel,
            context_sharded=_context_sharded(spec, given_spec),
        )

    def _kernel_block(self, layer: str, block_size: int) -> int | None:
        """Return the tokens of a block in memory, None where they are the table's."""
        sizes = self.kernel_block_size
        size = sizes.get(layer) if isinstance(sizes, Mapping) else sizes
        return size if size is not None and size < block_size else None

    def _latent(
        self, name: str, layer: str, given_spec: FieldReader, page_format: str
    ) -> AttentionSpec:
        kind, more = KINDS[name]
        fields = self._common(layer, given_spec, more)
        size = fields["head_size"] * itemsize(fields["dtype"])
        rows = fields["block_size"] // fields["tokens_per_state"]
        content = given_spec.get("state_content_bytes").size_or_none()
        if content is None:
            page = real_page(given_spec)
            if rows and page is not None and page != rows * size and page % rows == 0:
                content = page // rows
        with given_spec.named():
            spec: AttentionSpec = kind(
                **fields,
                state_content_bytes=None if content == size else content,
                page_format=page_format if is_opaque(page_format) else PLAIN,
            )
            return spec

    def _heads(
        self, name: str, layer: str, given_spec: FieldReader, page_format: str
    ) -> AttentionSpec:
        kind, more = KINDS[name]
        fields = self._common(layer, given_spec, more)
        local = given_spec.get("num_kv_heads").size()
        total = self._total(layer, local)
        own_units = len(self.parallel.sharding(total).ranges[self.tp_rank])
        if own_units != local:
            wanted = (
                f"{own_units}: rank {self.tp_rank} of {self.parallel.tp_size} has "
                f"{own_units} of the "
            )
            wanted += f"model's {total} (total_num_kv_heads) in {layer!r}"
            raise SpecError(f"{given_spec.path}.num_kv_heads", local, wanted)
        fields["total_num_kv_heads"] = total
        fields["head_size_v"] = given_spec.get("head_size_v").size_or_none()
        fields |= packing(given_spec, page_format)
        with given_spec.named():
            spec: AttentionSpec = kind(**fields)
            return spec

    def _common(
        self, layer: str, given_spec: FieldReader, more: Mapping[str, int | None]
    ) -> dict[str, Any]:
        fields = {name: given_spec.get(name).size() for name in ("block_size", "head_size")}
        for name, missing in {"tokens_per_state": 1, **more}.items():
            fields[name] = given_spec.get(name).size(missing, least=0 if missing == 0 else 1)
        return {**fields, "dtype": self._dtype(layer, given_spec)}

    def _dtype(self, layer: str, given_spec: FieldReader) -> str:
        """Return the elements of *layer*: of every fp8 there is, a spec says ``uint8``."""
        dtype = given_spec.get("dtype").dtype()
        if dtype != "uint8" or not quantization(given_spec).startswith("FP8"):
            return dtype
        said, field = self.fp8_dtype, f"fp8_dtype[{layer!r}]"
        found = said.get(layer) if isinstance(said, Mapping) else said
        name = None if found is None else dtype_name(found, field)
        if name is None or not name.startswith("float8_e"):
            wanted = f"the elements of its cache, of which {given_spec.path} says only fp8"
            raise SpecError(field, found, wanted)
        return name

    def _total(self, layer: str, local: int) -> int:
        total = self.heads.get(layer) if isinstance(self.heads, Mapping) else self.heads
        if total is None and self.parallel.tp_size == 1:
            total = local
        if total is None:
            wanted = f"the KV heads of {layer!r} in the model: vLLM's specs give a rank's"
            raise SpecError("total_num_kv_heads", self.heads, wanted)
        return total

    def _paged(self, spec: LayerSpec, given_spec: FieldReader) -> LayerSpec:
        """Return *spec* with vLLM's padding, if its page has the bytes that vLLM says."""

        def local(part: Part) -> int:
            return len(self.parallel.sharding(part.units, part.granularity).ranges[self.tp_rank])

        real = sum(local(p) * p.states * p.content_bytes for p in spec.parts)
        page = real_page(given_spec)
        if page is not None and page != real:
            wanted = f"{real}, the bytes of {', '.join(p.name for p in spec.parts)} in a block"
            raise SpecError(f"{given_spec.path}.page_size_bytes", page, wanted)
        page = given_spec.get("page_size_bytes").size_or_none()
        page = given_spec.get("page_size_padded").size_or_none() if page is None else page
        if page is None or page == real:
            return spec
        if page < real:
            raise SpecError(f"{given_spec.path}.page_size_bytes", page, f"at least {real}")
        return attrs.evolve(spec, page_size_padded=page)


def _context_sharded(spec: LayerSpec, given_spec: FieldReader) -> bool:
    """Return whether vLLM shards a layer's tokens to context ranks; True for older vLLMs."""
    sharded = given_spec.get("dcp_sharded")
    if sharded.value is None or not spec.parts[0].per_token:
        return True
    return flag(sharded.path, sharded.value)
