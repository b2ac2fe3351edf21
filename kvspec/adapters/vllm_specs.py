"""vLLM's specs of one layer on one rank, read as the kinds of layer of a model.

Law: a rank's sizes are never the model's. Totals come from the caller or from sizes that cannot
mean two things, and what the deal then gives the rank has to be what vLLM says it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvspec.adapters.vllm_states import read_state
from kvspec.dtypes import dtype_name, itemsize
from kvspec.errors import SpecError
from kvspec.parallel import ParallelConfig
from kvspec.ranges import positive_int
from kvspec.slices import Part
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

KINDS: dict[str, tuple[Callable[..., LayerSpec], tuple[str, ...]]] = {
    "FullAttentionSpec": (FullAttentionSpec, ()),
    "SlidingWindowSpec": (SlidingWindowSpec, ("sliding_window", "extra_retained_tokens")),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, ("attention_chunk_size",)),
    "CrossAttentionSpec": (CrossAttentionSpec, ()),
    "MLAAttentionSpec": (MLAAttentionSpec, ()),
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, ("sliding_window", "extra_retained_tokens")),
    "MambaSpec": (MambaSpec, ()),
}
"""vLLM's classes, by name: our kind, and the fields that both have."""

NOT_CACHE = {
    "EncoderOnlyAttentionSpec": "it keeps nothing between steps",
    "SinkFullAttentionSpec": "sink tokens stand in no request's block table",
    "CircularBufferSpec": "scratch space is not cache",
}
"""vLLM's classes that hold nothing that could be moved, and why; exclude their layers."""


def name_of(spec: object) -> str | None:
    """Return the name of the class in *spec*'s ancestry that is a known kind, or None."""
    for each in type(spec).__mro__:
        if each.__name__ in NOT_CACHE:
            return None
        if each.__name__ in KINDS:
            return each.__name__
    return None


@attrs.frozen(kw_only=True)
class RankSpecs:
    """What vLLM's specs do not say: see `kvspec.adapters.vllm.engine_spec`."""

    parallel: ParallelConfig
    tp_rank: int
    heads: int | Mapping[str, int] | None
    layout: str
    kernel_block_size: int | None
    conv_layout: str
    n_groups: int | None

    def __attrs_post_init__(self) -> None:
        if positive_int("tp_rank", self.tp_rank, least=0) >= self.parallel.tp_size:
            raise SpecError("tp_rank", self.tp_rank, f"less than tp_size={self.parallel.tp_size}")

    def read(self, layer: str, theirs: Any) -> LayerSpec:  # noqa: ANN401
        """Return the kind of *layer* whose spec on this rank is *theirs*."""
        name, field = name_of(theirs), f"kv_cache_spec[{layer!r}]"
        if name is None:
            told = next((f", and {w}" for n, w in NOT_CACHE.items() if _is(theirs, n)), "")
            wanted = f"one of {', '.join(KINDS)}{told}"
            raise SpecError(field, type(theirs).__name__, wanted)
        if name == "MambaSpec":
            spec: LayerSpec = read_state(
                field, theirs, self.parallel, self.tp_rank, self.conv_layout, self.n_groups
            )
        elif "MLA" in name:
            spec = self._latent(name, theirs)
        else:
            spec = self._heads(name, layer, theirs)
        return self._paged(field, spec, theirs)

    def layout_of(self, spec: LayerSpec, theirs: Any) -> str:  # noqa: ANN401
        """Return the layout in which vLLM keeps a layer: its own letters, or ours for its packing.

        Two head slots are planes, K outside the tokens and all heads of a token inside it. A page
        of a state, or one that is opaque, lies in one piece.
        """
        outer = "".join(each for each in self.layout if each in "LB")
        if isinstance(spec, MambaSpec):
            return outer + ("HN" if self.conv_layout == "DS" else "NH") + "C"
        if _planes(theirs):
            if "K" in self.layout:
                raise SpecError("layout", self.layout, "no K where head slots are planes")
            return self.layout.replace("H", "K").replace("C", "HC")
        if isinstance(spec, AttentionSpec) and spec.spans_heads and self.layout[:2] != outer:
            wanted = "L and B outermost: a page whose packing spans heads lies in one piece"
            raise SpecError("layout", self.layout, wanted)
        return self.layout

    def kernel_block_of(self, spec: LayerSpec) -> int | None:
        """Return the tokens of a block in memory, None where they are the table's."""
        if self.kernel_block_size is None or not isinstance(spec, AttentionSpec):
            return None
        return self.kernel_block_size if self.kernel_block_size < spec.block_size else None

    def _latent(self, name: str, theirs: Any) -> LayerSpec:  # noqa: ANN401
        kind, more = KINDS[name]
        size = theirs.head_size * itemsize(dtype_name(theirs.dtype))
        rows = theirs.block_size // _get(theirs, "tokens_per_state", 1)
        content, page = _get(theirs, "state_content_bytes", None), _real_page(theirs)
        if content is None and page is not None and page != rows * size and page % rows == 0:
            content = page // rows
        return kind(
            **_common(theirs, more), state_content_bytes=None if content == size else content
        )

    def _heads(self, name: str, layer: str, theirs: Any) -> LayerSpec:  # noqa: ANN401
        kind, more = KINDS[name]
        local, total = theirs.num_kv_heads, self._total(layer, theirs)
        dealt = len(self.parallel.deal(total).ranges[self.tp_rank])
        if dealt != local:
            wanted = f"{dealt}: rank {self.tp_rank} of {self.parallel.tp_size} has {dealt} of the "
            wanted += f"model's {total} (total_num_kv_heads)"
            raise SpecError(f"kv_cache_spec[{layer!r}].num_kv_heads", local, wanted)
        given = {**_common(theirs, more), "total_num_kv_heads": total}
        given["head_size_v"] = _get(theirs, "head_size_v", None)
        return kind(**given | self._packing(layer, theirs))

    def _total(self, layer: str, theirs: Any) -> int:  # noqa: ANN401
        total = self.heads.get(layer) if isinstance(self.heads, Mapping) else self.heads
        if total is None and self.parallel.tp_size == 1:
            total = theirs.num_kv_heads
        if total is None:
            wanted = f"the KV heads of {layer!r} in the model: vLLM's specs give a rank's"
            raise SpecError("total_num_kv_heads", self.heads, wanted)
        return positive_int("total_num_kv_heads", total)

    def _packing(self, layer: str, theirs: Any) -> dict[str, Any]:  # noqa: ANN401
        """Return how the content of a layer with heads is packed, where it is not k beside v.

        One slot a head is an opaque row of each head, two slots of all heads are planes; of any
        other packing the page is one piece: neither its heads nor its tokens can be cut.
        """
        size, size_v = theirs.head_size, _get(theirs, "head_size_v", None) or theirs.head_size
        content = _get(theirs, "state_content_bytes", None)
        local, quant = theirs.num_kv_heads, _get(theirs, "kv_quant_mode", None)
        opaque = str(getattr(quant, "name", quant)).upper() == "NVFP4"
        slots = _get(theirs, "num_head_slots", None)
        if not opaque and slots in (None, local) and not _planes(theirs):
            default = (size + size_v) * itemsize(dtype_name(theirs.dtype))
            return {} if content in (None, default) else {"state_content_bytes": content}
        if not opaque and _planes(theirs):
            return {}
        field = f"kv_cache_spec[{layer!r}]"
        rows = theirs.block_size // _get(theirs, "tokens_per_state", 1)
        page = _real_page(theirs) if content is None else (slots or local) * rows * content
        if page is None or page % local:
            wanted = f"{local} heads of equal size: content for each of num_head_slots={slots}"
            raise SpecError(f"{field}.state_content_bytes", content, wanted)
        tokens = theirs.block_size
        if self.kernel_block_size is not None and self.kernel_block_size < tokens:
            tokens = self.kernel_block_size
        content = page // local * tokens // theirs.block_size
        return {"state_content_bytes": content, "tokens_per_state": tokens, "spans_heads": True}

    def _paged(self, field: str, spec: LayerSpec, theirs: Any) -> LayerSpec:  # noqa: ANN401
        """Return *spec* with vLLM's padding, if its page has the bytes that vLLM says."""

        def local(part: Part) -> int:
            return len(self.parallel.deal(part.units, part.deal_in).ranges[self.tp_rank])

        real = sum(local(p) * p.states * p.content_bytes for p in spec.parts)
        told = _real_page(theirs)
        if told is not None and told != real:
            wanted = f"{real}, the bytes of {', '.join(p.name for p in spec.parts)} in a block"
            raise SpecError(f"{field}.page_size_bytes", told, wanted)
        page = _get(theirs, "page_size_bytes", None) or _get(theirs, "page_size_padded", None)
        if page is None or page == real:
            return spec
        if page < real:
            raise SpecError(f"{field}.page_size_bytes", page, f"at least {real}")
        return attrs.evolve(spec, page_size_padded=page)


def _common(theirs: Any, more: tuple[str, ...]) -> dict[str, Any]:  # noqa: ANN401
    given = {name: getattr(theirs, name) for name in ("block_size", "head_size", "dtype")}
    given["tokens_per_state"] = _get(theirs, "tokens_per_state", 1)
    return given | {name: getattr(theirs, name) for name in more if hasattr(theirs, name)}


def _planes(theirs: Any) -> bool:  # noqa: ANN401
    """Whether two head slots are the keys and the values of all heads of the rank."""
    content = _get(theirs, "state_content_bytes", None)
    if _get(theirs, "num_head_slots", None) != 2 or content is None:  # noqa: PLR2004 - K and V
        return False
    size, size_v = theirs.head_size, _get(theirs, "head_size_v", None) or theirs.head_size
    whole = theirs.num_kv_heads * size * itemsize(dtype_name(theirs.dtype))
    return bool(size == size_v and content == whole)


def _real_page(theirs: Any) -> int | None:  # noqa: ANN401
    """Return the bytes of a page without padding, if vLLM says them."""
    for name in ("unpadded_page_size_bytes", "real_page_size_bytes"):
        found = _get(theirs, name, None)
        if found is not None:
            return int(found)
    return None


def _get(spec: Any, name: str, default: Any) -> Any:  # noqa: ANN401
    found = getattr(spec, name, None)
    return default if found is None else found


def _is(spec: object, name: str) -> bool:
    return any(each.__name__ == name for each in type(spec).__mro__)
