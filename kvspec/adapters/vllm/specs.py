"""vLLM's specs of one layer on one rank, read as the kinds of layer of a model.

Law: a rank's sizes are never the model's. Totals come from the caller or from sizes that cannot
mean two things, and what the deal then gives the rank has to be what vLLM says it holds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from kvspec.adapters.vllm.config import Given
from kvspec.adapters.vllm.states import read_state
from kvspec.dtypes import itemsize
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
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

_WINDOW = {"sliding_window": None, "extra_retained_tokens": 0}

KINDS: dict[str, tuple[Callable[..., LayerSpec], Mapping[str, int | None]]] = {
    "FullAttentionSpec": (FullAttentionSpec, {}),
    "SlidingWindowSpec": (SlidingWindowSpec, _WINDOW),
    "ChunkedLocalAttentionSpec": (ChunkedLocalAttentionSpec, {"attention_chunk_size": None}),
    "CrossAttentionSpec": (CrossAttentionSpec, {}),
    "MLAAttentionSpec": (MLAAttentionSpec, {}),
    "SlidingWindowMLASpec": (SlidingWindowMLASpec, _WINDOW),
    "MambaSpec": (MambaSpec, {}),
}
"""vLLM's classes, by name: our kind, and more fields that both have: None, or if missing what."""

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
        for name in ("kernel_block_size", "n_groups"):
            if getattr(self, name) is not None:
                positive_int(name, getattr(self, name))
        if self.conv_layout not in ("DS", "SD"):
            wanted = "'DS' (dimension first) or 'SD' (row first)"
            raise SpecError("conv_layout", self.conv_layout, wanted)

    def read(self, layer: str, theirs: Given) -> LayerSpec:
        """Return the kind of *layer* whose spec on this rank is *theirs*."""
        name = name_of(theirs.value)
        if name is None:
            told = next((f", and {w}" for n, w in NOT_CACHE.items() if _is(theirs.value, n)), "")
            wanted = f"one of {', '.join(KINDS)}{told}"
            raise SpecError(theirs.path, type(theirs.value).__name__, wanted)
        if name == "MambaSpec":
            spec: LayerSpec = read_state(
                theirs, self.parallel, self.tp_rank, self.conv_layout, self.n_groups
            )
        elif "MLA" in name:
            spec = self._latent(name, theirs)
        else:
            spec = self._heads(name, layer, theirs)
        return self._paged(spec, theirs)

    def layout_of(self, spec: LayerSpec, theirs: Given) -> str:
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

    def _latent(self, name: str, theirs: Given) -> LayerSpec:
        kind, more = KINDS[name]
        given = _common(theirs, more)
        size = given["head_size"] * itemsize(given["dtype"])
        rows = given["block_size"] // given["tokens_per_state"]
        content = theirs.get("state_content_bytes").size_or_none()
        if content is None:
            page = _real_page(theirs)
            if rows and page is not None and page != rows * size and page % rows == 0:
                content = page // rows
        with theirs.named():
            return kind(**given, state_content_bytes=None if content == size else content)

    def _heads(self, name: str, layer: str, theirs: Given) -> LayerSpec:
        kind, more = KINDS[name]
        given, local = _common(theirs, more), theirs.get("num_kv_heads").size()
        total = self._total(layer, local)
        dealt = len(self.parallel.deal(total).ranges[self.tp_rank])
        if dealt != local:
            wanted = f"{dealt}: rank {self.tp_rank} of {self.parallel.tp_size} has {dealt} of the "
            wanted += f"model's {total} (total_num_kv_heads) in {layer!r}"
            raise SpecError(f"{theirs.path}.num_kv_heads", local, wanted)
        given["total_num_kv_heads"] = total
        given["head_size_v"] = theirs.get("head_size_v").size_or_none()
        given |= self._packing(theirs)
        with theirs.named():
            return kind(**given)

    def _total(self, layer: str, local: int) -> int:
        total = self.heads.get(layer) if isinstance(self.heads, Mapping) else self.heads
        if total is None and self.parallel.tp_size == 1:
            total = local
        if total is None:
            wanted = f"the KV heads of {layer!r} in the model: vLLM's specs give a rank's"
            raise SpecError("total_num_kv_heads", self.heads, wanted)
        return total

    def _packing(self, theirs: Given) -> dict[str, Any]:
        """Return how the content of a layer with heads is packed, where it is not k beside v.

        One slot a head is an opaque row of each head, two slots of all heads are planes; of any
        other packing the page is one piece: neither its heads nor its tokens can be cut.
        """
        content = theirs.get("state_content_bytes").size_or_none()
        local, quant = theirs.get("num_kv_heads").size(), theirs.get("kv_quant_mode").value
        opaque = str(getattr(quant, "name", quant)).upper() == "NVFP4"
        slots = theirs.get("num_head_slots").size_or_none()
        if not opaque and slots in (None, local) and not _planes(theirs):
            default = sum(_head_sizes(theirs)) * itemsize(theirs.get("dtype").dtype())
            return {} if content in (None, default) else {"state_content_bytes": content}
        if not opaque and _planes(theirs):
            return {}
        tokens = block = theirs.get("block_size").size()
        rows = block // theirs.get("tokens_per_state").size(1)
        page = _real_page(theirs) if content is None else (slots or local) * rows * content
        if page is None or page % local:
            wanted = f"{local} heads of equal size: content for each of num_head_slots={slots}"
            raise SpecError(f"{theirs.path}.state_content_bytes", content, wanted)
        if self.kernel_block_size is not None and self.kernel_block_size < tokens:
            tokens = self.kernel_block_size
        content = page // local * tokens // block
        return {"state_content_bytes": content, "tokens_per_state": tokens, "spans_heads": True}

    def _paged(self, spec: LayerSpec, theirs: Given) -> LayerSpec:
        """Return *spec* with vLLM's padding, if its page has the bytes that vLLM says."""

        def local(part: Part) -> int:
            return len(self.parallel.deal(part.units, part.deal_in).ranges[self.tp_rank])

        real = sum(local(p) * p.states * p.content_bytes for p in spec.parts)
        told = _real_page(theirs)
        if told is not None and told != real:
            wanted = f"{real}, the bytes of {', '.join(p.name for p in spec.parts)} in a block"
            raise SpecError(f"{theirs.path}.page_size_bytes", told, wanted)
        page = theirs.get("page_size_bytes").size_or_none()
        page = theirs.get("page_size_padded").size_or_none() if page is None else page
        if page is None or page == real:
            return spec
        if page < real:
            raise SpecError(f"{theirs.path}.page_size_bytes", page, f"at least {real}")
        return attrs.evolve(spec, page_size_padded=page)


def _common(theirs: Given, more: Mapping[str, int | None]) -> dict[str, Any]:
    given = {name: theirs.get(name).size() for name in ("block_size", "head_size")}
    for name, missing in {"tokens_per_state": 1, **more}.items():
        given[name] = theirs.get(name).size(missing, least=0 if missing == 0 else 1)
    return {**given, "dtype": theirs.get("dtype").dtype()}


def _head_sizes(theirs: Given) -> tuple[int, int]:
    """Return the elements of a key and of a value."""
    size = theirs.get("head_size").size()
    return size, theirs.get("head_size_v").size(size)


def _planes(theirs: Given) -> bool:
    """Whether two head slots are the keys and the values of all heads of the rank."""
    content = theirs.get("state_content_bytes").size_or_none()
    if theirs.get("num_head_slots").value != 2 or content is None:  # noqa: PLR2004 - K and V
        return False
    size, size_v = _head_sizes(theirs)
    local = theirs.get("num_kv_heads").size()
    return size == size_v and content == local * size * itemsize(theirs.get("dtype").dtype())


def _real_page(theirs: Given) -> int | None:
    """Return the bytes of a page without padding, if vLLM says them."""
    found = theirs.get("unpadded_page_size_bytes").size_or_none()
    return theirs.get("real_page_size_bytes").size_or_none() if found is None else found


def _is(spec: object, name: str) -> bool:
    return any(each.__name__ == name for each in type(spec).__mro__)
