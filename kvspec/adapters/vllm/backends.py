"""vLLM's attention backends, and the order in which each keeps the elements of a page.

Law: neither a spec nor a tensor's shape and strides say in which order elements lie inside a page;
the backend does. One that is not named here is refused by name, and no page is taken to be plain
because nobody said otherwise.

How the content of a page of vLLM's is packed, given the format that its backend keeps.

Law: what a spec says of slots and content has to be what its backend's format makes of the heads;
the letters of the layout are vLLM's own, or those that say the packing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader
from kvspec.dtypes import itemsize
from kvspec.errors import SpecError
from kvspec.specs.formats import is_opaque

ROWS = "rows"
"""Each head of each token in one chunk: keys beside values, a latent, or packed bytes."""

_V1 = "vllm.v1.attention.backends."

_ROWS = [
    "flash_attn.FlashAttentionBackend",
    "flash_attn_diffkv.FlashAttentionDiffKVBackend",
    "triton_attn.TritonAttentionBackend",
    "triton_attn_diffkv.TritonAttentionDiffKVBackend",
    "triton_flash_attn.TritonFlashAttentionBackend",
    "flex_attention.FlexAttentionBackend",
    "hpc_attn.HpcAttentionBackend",
    "rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend",
    "rocm_octave_attn.RocmOctaveAttentionBackend",
    "mla.triton_mla.TritonMLABackend",
    "mla.flashmla.FlashMLABackend",
    "mla.flashmla_sparse.FlashMLASparseBackend",
    "mla.flashinfer_mla.FlashInferMLABackend",
    "mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend",
    "mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend",
    "mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend",
    "mla.cutlass_mla.CutlassMLABackend",
    "mla.flashattn_mla.FlashAttnMLABackend",
    "mla.flashattn_mla_sparse.FlashAttnMLASparseBackend",
    "mla.tokenspeed_mla.TokenspeedMLABackend",
    "mla.rocm_aiter_mla.AiterMLABackend",
    "mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend",
    "mla.aiter_triton_mla.AiterTritonMLABackend",
    "mla.cpu_mla.CPUMLABackend",
    "mla.amx_mla.AMXMLABackend",
]

_OTHERS = {
    "flashinfer.FlashInferBackend": "FlashInfer's",
    "triton_flashinfer.TritonFlashInferBackend": "FlashInfer's",
    "b12x.B12xPagedAttentionBackend": "planes",
    "rocm_segmented_attn.RocmSegmentedAttentionBackend": "planes",
    "rocm_aiter_fa.AiterFlashAttentionBackend": "AITER's",
    "rocm_attn.RocmAttentionBackend": "x-packed",
    "cpu_attn.CPUAttentionBackend": "CPU's",
    "turboquant_attn.TurboQuantAttentionBackend": "TurboQuant's",
    "ultraquant_attn.UltraQuantAttentionBackend": "opaque:ultraquant",
    "mla.indexer.DeepseekV32IndexerBackend": "indexer's",
    "mla.indexer.DeepseekV4IndexerBackend": "indexer's",
    "mla.indexer.DeepseekV41IndexerBackend": "indexer's",
    "mla.sparse_swa.DeepseekSparseSWABackend": "DeepSeek's",
}

_MODELS = {
    "deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend": "DeepSeek's",
    "deepseek_v4.nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": "DeepSeek's",
    "deepseek_v41.sparse_mla.DeepseekV4FlashMLABackend": "DeepSeek's",
    "deepseek_v41.sparse_mla.FlashMLAMegaAttnBackend": "DeepSeek's",
    "deepseek_v41.nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": "DeepSeek's",
    "minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseMSANvfp4Backend": "opaque:msa",
}

FORMATS: Mapping[str, str] = {
    **{_V1 + name: ROWS for name in _ROWS},
    **{_V1 + name: form for name, form in _OTHERS.items()},
    **{f"vllm.models.{name}": form for name, form in _MODELS.items()},
}
"""The format of a backend's pages, by the backend's module and class."""

_VARIANTS: Mapping[str, Mapping[str, str]] = {
    "CPU's": {"vec": "keys-transposed", "vec16": "keys-transposed", "amx": "opaque:amx"},
    "indexer's": {"rows": "opaque:indexer", "shuffled": "opaque:indexer-shuffled"},
    "TurboQuant's": {
        "rows": ROWS,
        "e4b15": "opaque:turboquant-e4b15",
        "scales apart": "opaque:turboquant-scales",
    },
}
"""What a backend's name leaves open, and the format that each variant of it is."""

_WANTED = "the full_cls_name() of the layer's attention backend, one that is known"


@attrs.frozen
class Backends:
    """What the caller says of the backends: one for all layers of attention, or one by layer.

    *variants*: in the same way, what a backend's name leaves open.
    """

    fields: Any
    variants: Any = None

    def format_of(self, layer: str, spec: FieldReader) -> str:
        """Return the format of the pages of *layer*, whose spec is *spec*, or raise `SpecError`."""
        name = full_name(f"backends[{layer!r}]", self._of(self.fields, layer))
        form = FORMATS.get(name)
        field = f"backends[{layer!r}]"
        if form is None:
            raise SpecError(field, name, f"{_WANTED} (kvspec.adapters.vllm.FORMATS)")
        form = _for_spec(form, spec)
        if form in _VARIANTS:
            form = self._variant(layer, name, _VARIANTS[form])
        _check(field, name, form, spec)
        return form

    def _variant(self, layer: str, name: str, known: Mapping[str, str]) -> str:
        """Return the format that the caller's variant of the backend called *name* is."""
        variant = self._of(self.variants, layer)
        if not isinstance(variant, str) or variant not in known:
            wanted = f"one of {', '.join(known)}, which {name.rpartition('.')[2]} leaves open"
            raise SpecError(f"variants[{layer!r}]", variant, wanted)
        return known[variant]

    def device_of(self, layer: str) -> str | None:
        """Return the type of device whose kernels write the state of *layer*, if that is said."""
        device = self.variants.get(layer) if isinstance(self.variants, Mapping) else None
        if device is not None and not isinstance(device, str):
            raise SpecError(f"variants[{layer!r}]", device, "a type of device, as cuda or cpu")
        return device

    def _of(self, fields: Any, layer: str) -> Any:  # noqa: ANN401
        return fields.get(layer) if isinstance(fields, Mapping) else fields


def full_name(field: str, fields: Any) -> str:  # noqa: ANN401 - vLLM's class, not imported
    """Return a backend's module and class, joined by a dot."""
    if callable(FieldReader(field, fields).get("full_cls_name").value):
        fields = FieldReader(field, fields).call("full_cls_name").value
    if isinstance(fields, tuple) and all(isinstance(name, str) for name in fields):
        fields = ".".join(fields)
    if not isinstance(fields, str):
        raise SpecError(field, fields, f"{_WANTED}: a spec does not say the order inside a page")
    return fields


def quantization(spec: FieldReader) -> str:
    """Return the name of a spec's quantization mode, ``NONE`` where it has none."""
    mode = spec.get("kv_quant_mode").value
    return str(getattr(mode, "name", mode)).upper()


def _for_spec(form: str, spec: FieldReader) -> str:
    """Return which format a backend that has two keeps *spec* in."""
    if form == "AITER's":
        return "opaque:aiter" if spec.get("num_head_slots").value else ROWS
    if form == "FlashInfer's":
        return "scaled planes" if quantization(spec) == "NVFP4" else ROWS
    if form == "DeepSeek's":
        packed = spec.get("state_content_bytes").value is not None
        return "opaque:deepseek" if packed else ROWS
    return form


def _check(field: str, name: str, form: str, spec: FieldReader) -> None:
    """Refuse a spec that its backend would not have made."""
    slots = spec.get("num_head_slots").size_or_none()
    heads = spec.get("num_kv_heads").size_or_none()
    if form == ROWS and slots not in (None, heads):
        wanted = f"one that keeps {slots} head slots for {heads} heads, as {spec.path} says"
        raise SpecError(field, name, wanted)
    if form == ROWS and quantization(spec) == "NVFP4":
        raise SpecError(field, name, f"one that keeps NVFP4, as {spec.path} says")
    role = spec.get("cache_role").value
    if form == ROWS and str(getattr(role, "name", role)).upper() == "INDEXER":
        raise SpecError(field, name, f"one that keeps an indexer's keys, as {spec.path} says")
    if form in ("planes", "x-packed") and slots != 2:  # noqa: PLR2004 - keys and values
        raise SpecError(field, name, f"2 head slots in {spec.path}, keys and values, not {slots}")
    if form == "opaque:msa" and (heads is None or slots != 2 * heads):
        raise SpecError(field, name, f"two slots for each head in {spec.path}, not {slots}")


PLANES = ("planes", "x-packed", "opaque:aiter")
"""Formats with two head slots: the keys, and the values, of all heads of a rank."""


PACKED = ("opaque:turboquant", "opaque:ultraquant")
"""Formats of rows of packed bytes, whose number does not say what is in them: int4's rows of scale
and codes are as long as UltraQuant's."""


def packing(given_spec: FieldReader, page_format: str) -> dict[str, Any]:
    """Return the fields of a spec with heads that say its packing, none where k lies beside v."""
    content = given_spec.get("state_content_bytes").size_or_none()
    local, width = given_spec.get("num_kv_heads").size(), itemsize(given_spec.get("dtype").dtype())
    size = given_spec.get("head_size").size()
    size_v = given_spec.get("head_size_v").size(size)
    plain = content in (None, (size + size_v) * width)
    if page_format in PLANES:
        if content != local * size * width or size != size_v:
            wanted = f"{local * size * width}: keys or values of {local} heads in each slot"
            raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
        return {} if page_format == "planes" else {"page_format": page_format}
    if page_format == ROWS:
        return {} if plain else {"state_content_bytes": content}
    if page_format == "scaled planes":
        return _scaled(given_spec, content)
    if page_format == "opaque:msa":
        slot = given_spec.get("state_content_bytes").size()
        return {"state_content_bytes": 2 * slot, "page_format": page_format}
    if page_format.startswith(PACKED):
        return {"state_content_bytes": content, "page_format": page_format}
    if not plain:
        wanted = f"None or {(size + size_v) * width}: a key and a value"
        raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
    return {"page_format": page_format}


def _scaled(given_spec: FieldReader, content: int | None) -> dict[str, Any]:
    """Return FlashInfer's NVFP4: half a byte an element, a scale for 16 of them.

    The page is the data of all keys, their scales, the data of all values, theirs. Scales of four
    tokens of a head lie in an order of their own.
    """
    size, local = given_spec.get("head_size").size(), given_spec.get("num_kv_heads").size()
    slots, bytes_of_slot = given_spec.get("num_head_slots"), size // 2 + size // 16
    if size % 16 or given_spec.get("head_size_v").size(size) != size or content != bytes_of_slot:
        wanted = f"{bytes_of_slot}: the data and scales of {size} elements, a multiple of 16"
        raise SpecError(f"{given_spec.path}.state_content_bytes", content, wanted)
    if slots.value != 2 * local:
        raise SpecError(slots.path, slots.value, f"{2 * local}: a key and a value of each head")
    return {
        "head_size": size // 2,
        "head_size_v": size // 2,
        "scale_dtype": "float8_e4m3fn",
        "elements_per_scale": 8,
        "tokens_per_scale": 4,
    }


def layout_of(layout: str, page_format: str) -> str:
    """Return the layout of rows of tokens: vLLM's letters, or those that say the packing.

    Two head slots are planes, K outside the tokens; where heads are cut in chunks, a head has all
    its rows before the next. A page that is opaque lies in one chunk.
    """
    if page_format in ("planes", "x-packed", "keys-transposed"):
        if "K" in layout:
            raise SpecError("layout", layout, f"no K where pages are {page_format}")
        if page_format == "keys-transposed":
            return layout.replace("N", "KN")
        planes = layout.replace("H", "K")
        return planes.replace("C", "HC") if page_format == "planes" else planes.replace("N", "HN")
    whole = page_format == "scaled planes" or is_opaque(page_format)
    if whole and layout[:2] != outer(layout):
        wanted = f"L and B outermost: a page that is {page_format} lies in one chunk"
        raise SpecError("layout", layout, wanted)
    if page_format == "scaled planes" and layout.index("N") < layout.index("H"):
        wanted = "H outside N: scales of four tokens of a head lie together"
        raise SpecError("layout", layout, wanted)
    return layout


def outer(layout: str) -> str:
    """Return layers and blocks, in the order of the *layout*."""
    return "".join(letter for letter in layout if letter in "LB")


def real_page(given_spec: FieldReader) -> int | None:
    """Return the bytes of a page without padding, if vLLM says them."""
    found = given_spec.get("unpadded_page_size_bytes").size_or_none()
    return given_spec.get("real_page_size_bytes").size_or_none() if found is None else found
