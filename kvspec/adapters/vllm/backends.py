"""Read the order of the elements inside vLLM's pages from the name of the attention backend.

Neither a spec nor the shape and strides of a tensor determine that order. Two backends may give a
tensor the same shape and write different orders into it.

Invariant: a page has a known order only if `FORMATS` has its backend. Another backend, or none, is
refused. The slots and bytes that a spec reports must be those that the backend's format
needs for the heads.

How it works:
    A backend's name leads to a format. Some backends have several formats. Then fields of the spec
    decide (`_for_spec`), or a property of the layer that the caller passes as a variant. The format
    determines the letters of the layout (`layout_of`) and some fields of our spec (`packing`).
    In vLLM's layout LBHNC, a rank has 4 heads of 64 float16 elements in blocks of 16 tokens:

        backend       format            slots x tokens x bytes      letters    a page in memory
        FLASH_ATTN    rows              4 x 16 x 256                LBHNC      key beside value
        B12X          planes            2 x 16 x 512                LBKNHC     all keys, all values
        CPU, vec      keys-transposed   4 x 16 x 256                LBHKNC     keys, values
        CPU, amx      opaque:amx        4 x 16 x 256                LBHNC      unknown, moves whole
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader, chosen
from kvspec.errors import SpecError
from kvspec.inputs import positive_int
from kvspec.ownership.dtypes import itemsize
from kvspec.specs.formats import is_opaque

# Each head of each token is one run of bytes: a key and its value, a latent, or packed bytes.
ROW_PAGES = "rows"

# Each token that is not compressed yet has a row.
RING = "ring"

_V1 = "vllm.v1.attention.backends."

_ROW_BACKENDS = [
    "flash_attn.FlashAttentionBackend",
    "flash_attn_diffkv.FlashAttentionDiffKVBackend",
    "triton_attn.TritonAttentionBackend",
    "triton_attn_diffkv.TritonAttentionDiffKVBackend",
    "triton_flash_attn.TritonFlashAttentionBackend",
    "flex_attention.FlexAttentionBackend",
    "hpc_attn.HpcAttentionBackend",
    "rocm_aiter_unified_attn.RocmAiterUnifiedAttentionBackend",
    "mla.triton_mla.TritonMLABackend",
    "mla.flashmla.FlashMLABackend",
    "mla.flashmla_sparse.FlashMLASparseBackend",
    "mla.flashinfer_mla.FlashInferMLABackend",
    "mla.flashinfer_mla_sparse.FlashInferMLASparseTRTLLMBackend",
    "mla.flashinfer_mla_sparse.FlashInferMLASparseSM120Backend",
    "mla.flashinfer_mla_sparse_sm90.FlashInferMLASparseSM90Backend",
    "mla.cutlass_mla.CutlassMLABackend",
    "mla.flashattn_mla.FlashAttnMLABackend",
    "mla.flashattn_mla.XPUFlashAttnMLABackend",
    "mla.flashattn_mla_sparse.FlashAttnMLASparseBackend",
    "mla.flashattn_mla_sparse.FlashAttnMLASparseFA4Backend",
    "mla.xpu_mla_sparse.XPUMLASparseBackend",
    "mla.tokenspeed_mla.TokenspeedMLABackend",
    "mla.rocm_aiter_mla.AiterMLABackend",
    "mla.rocm_aiter_mla_sparse.ROCMAiterMLASparseBackend",
    "mla.aiter_triton_mla.AiterTritonMLABackend",
    "mla.cpu_mla.CPUMLABackend",
    "mla.amx_mla.AMXMLABackend",
]

# The backend of summaries, which have one head whatever the heads of the model are.
SUMMARIES = "step5.nvidia.sparse_summary_cache.Step5SparseSummaryBackend"

# Backends of one model whose pages are rows. Those of a compressor and of Inkling's convolutions
# keep rows of another kind than keys and values. Those of dots3, HY-V4, Step-5 and Qwen4's
# attention extend a backend of rows, and write as it does.
_ROW_MODELS = [
    "deepseek_v4.compressor.CompressorBackend",
    "dots3_note.nvidia.attention.Dots3NoteTritonMLABackend",
    "hy_v4.nvidia.flashmla_sparse.HYV4FlashMLASparseBackend",
    "inkling.amd.sconv_swa_attn.InklingSconvBackend",
    "inkling.nvidia.sconv_swa_attn.InklingSconvBackend",
    "minimax_m3.common.sparse_attention.MiniMaxM3SparseBackend",
    "minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseCutlassBackend",
    "minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseMSABackend",
    "minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseTritonBackend",
    "qwen4_exp.common.qsa_cache.QSAStateBackend",
    "qwen4_exp.nvidia.qsa.Qwen4ExpQSAFlashAttentionBackend",
    "step5.nvidia.sparse_attention.Step5DSAAttentionBackend",
    "step5.nvidia.sparse_attention.Step5SplitKVFlashAttentionBackend",
    SUMMARIES,
]

_OTHER_BACKENDS = {
    "flashinfer.FlashInferBackend": "FlashInfer's",
    "triton_flashinfer.TritonFlashInferBackend": "FlashInfer's",
    "b12x.B12xPagedAttentionBackend": "planes",
    "rocm_segmented_attn.RocmSegmentedAttentionBackend": "planes",
    "rocm_aiter_fa.AiterFlashAttentionBackend": "AITER's",
    "rocm_attn.RocmAttentionBackend": "x-packed",
    "cpu_attn.CPUAttentionBackend": "CPU's",
    "turboquant_attn.TurboQuantAttentionBackend": "TurboQuant's",
    "rocm_octave_attn.RocmOctaveAttentionBackend": "Octave's",
    "ultraquant_attn.UltraQuantAttentionBackend": "opaque:ultraquant",
    "mla.indexer.DeepseekV32IndexerBackend": "indexer's",
    "mla.indexer.DeepseekV4IndexerBackend": "indexer's",
    "mla.indexer.DeepseekV41IndexerBackend": "indexer's",
    "mla.indexer.Glm5NextIndexerBackend": "indexer's",
    "mla.sparse_swa.DeepseekSparseSWABackend": "DeepSeek's",
    "mla.indexer.KpoolTailBackend": RING,
}

_MODELS = {
    "deepseek_v4.sparse_mla.DeepseekV4FlashMLABackend": "DeepSeek's",
    "deepseek_v4.nvidia.flashinfer_sparse.DeepseekSparseSWAFlashInferBackend": "DeepSeek's",
    "deepseek_v4.nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": "DeepSeek's",
    "deepseek_v4.nvidia.flashmla.DeepseekSparseSWAFlashMLABackend": "DeepSeek's",
    "deepseek_v41.sparse_mla.DeepseekV4FlashMLABackend": "DeepSeek's",
    "deepseek_v41.compressor.CompressorBackend": RING,
    "deepseek_v41.sparse_mla.FlashMLAMegaAttnBackend": "DeepSeek's",
    "deepseek_v41.nvidia.flashinfer_sparse.DeepseekSparseSWAFlashInferBackend": "DeepSeek's",
    "deepseek_v41.nvidia.flashinfer_sparse.DeepseekV4FlashInferMLASparseBackend": "DeepSeek's",
    "deepseek_v41.nvidia.flashmla.DeepseekSparseSWAFlashMLABackend": "DeepSeek's",
    "minimax_m3.amd.indexer_msa.MiniMaxM3IndexerMSABackend": "keys",
    "minimax_m3.common.indexer.MiniMaxM3IndexerBackend": "keys",
    "minimax_m3.nvidia.indexer_msa.MiniMaxM3IndexerMSABackend": "keys",
    "minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseMSANvfp4Backend": "opaque:msa",
}

# A class that extends another one may have kernels with a page order of its own.
_UNREAD = "not yet: the order in which its kernels write a page is unknown"
_OF_RINGS = "not yet: its ring has other rows than `block_size`: as many as fit into its page"
_OF_PADDED_ROWS = "not yet: its rows end with dead elements, and its spec counts them as a latent's"
_OF_OTHERS = "no layer has it: other backends extend it"
_OF_STATES = "no pages of tokens: its layers keep states, and MambaSpec describes those"

# The backends whose layers cannot be described, and why, by module and class.
BACKENDS_REFUSED: Mapping[str, str] = {
    f"vllm.{name}": why
    for why, names in {
        _UNREAD: [
            "models.qwen4_exp.amd.qsa.Qwen4ExpQSAFlashAttentionBackend",
            "models.deepseek_v4.amd.rocm.DeepseekV4ROCMAiterMLASparseBackend",
            "models.deepseek_v4.cpu.cpu_mla.DeepseekV4CPUIndexerBackend",
            "models.deepseek_v4.cpu.cpu_mla.DeepseekV4CPUSparseBackend",
            "models.deepseek_v4.xpu.xpu_sparse.DeepseekV4XPUSparseBackend",
            "models.deepseek_v41.amd.rocm.DeepseekV41ROCMAiterMLASparseBackend",
            "models.deepseek_v41.amd.rocm.DeepseekV4ROCMAiterMLASparseBackend",
            "models.deepseek_v41.amd.rocm.DeepseekV41ROCMAiterSparseSWABackend",
            "models.minimax_m3.amd.indexer_aiter.MiniMaxM3IndexerAiterBackend",
            "models.minimax_m3.amd.sparse_attention_msa.MiniMaxM3SparseAiterPABackend",
            "v1.attention.backends.mla.rocm_paged_mxfp4_indexer.DeepseekV4RocmMxfp4IndexerBackend",
            "v1.attention.backends.mla.rocm_paged_mxfp4_indexer.DeepseekV41RocmMxfp4IndexerBackend",
            "v1.attention.backends.mla.sparse_indexer.DeepseekV41SparseIndexerBackend",
        ],
        _OF_PADDED_ROWS: [
            "models.dots3_note.nvidia.attention.Dots3NotePaddedSparseBackend",
        ],
        _OF_RINGS: [
            "models.step5.nvidia.csa_tail_ring.Step5CSATailRingBackend",
        ],
        _OF_OTHERS: [
            "model_executor.layers.attention.mla_attention.MLACommonBackend",
            "models.deepseek_v4.sparse_mla.DeepseekV4SparseMLABackend",
            "models.deepseek_v41.sparse_mla.DeepseekV4SparseMLABackend",
            "v1.attention.backends.composite.CompositeAttentionBackend",
            "v1.attention.backends.mla.flashinfer_mla_sparse._FlashInferMLASparseBackendBase",
            "v1.attention.backends.triton_flash_attn._FABackend",
        ],
        _OF_STATES: [
            "models.kimi_k3.amd.kda_metadata.KimiK3ROCmKDABackend",
            "models.kimi_k3.nvidia.kda_metadata.KimiK3KDAAttentionBackend",
            "v1.attention.backends.gdn_attn.GDNAttentionBackend",
            "v1.attention.backends.linear_attn.BailingLinearAttentionBackend",
            "v1.attention.backends.linear_attn.LinearAttentionBackend",
            "v1.attention.backends.mamba1_attn.Mamba1AttentionBackend",
            "v1.attention.backends.mamba2_attn.Mamba2AttentionBackend",
            "v1.attention.backends.short_conv_attn.PleShortConvAttentionBackend",
            "v1.attention.backends.short_conv_attn.ShortConvAttentionBackend",
        ],
        "no keys and values: it keeps hidden states of a model that is extracted": [
            "model_executor.models.extract_hidden_states.CacheOnlyAttentionBackend",
        ],
    }.items()
    for name in names
}

# The format of each backend's pages, by the module and class of the backend. A name with 's is not
# a format yet: fields of the spec, or a variant, decide between the formats of that backend.
FORMATS: Mapping[str, str] = {
    **{_V1 + name: ROW_PAGES for name in _ROW_BACKENDS},
    **{_V1 + name: form for name, form in _OTHER_BACKENDS.items()},
    **{f"vllm.models.{name}": ROW_PAGES for name in _ROW_MODELS},
    **{f"vllm.models.{name}": form for name, form in _MODELS.items()},
}

# The backends of rings, and how many tokens their layers compress together. None if it differs
# among models: then the variant of the layer is the number.
RINGS: Mapping[str, int | None] = {
    # It raises an error for any ratio but 1 and 2, and with ratio 1 it has no ring.
    "vllm.models.deepseek_v41.compressor.CompressorBackend": 2,
    "vllm.models.qwen4_exp.common.qsa_cache.QSAStateBackend": None,
    "vllm.v1.attention.backends.mla.indexer.KpoolTailBackend": None,
}

# The formats of a backend whose name leaves a property open, by the value of that property.
_VARIANTS: Mapping[str, Mapping[str, str]] = {
    "CPU's": {"vec": "keys-transposed", "vec16": "keys-transposed", "amx": "opaque:amx"},
    "indexer's": {
        "rows": "key planes",
        "mx": "key planes, MX",
        "shuffled": "opaque:indexer-shuffled",
    },
    "TurboQuant's": {
        "rows": ROW_PAGES,
        "e4b15": "opaque:turboquant-e4b15",
        "scales apart": "opaque:turboquant-scales",
    },
}

# How the names of the classes begin that vLLM makes for layers that attend to chunks.
_OF_CHUNKS = "ChunkedLocalAttention_"

# Bytes of a record of DeepSeek V4.1: 512 elements of fp8 and 16 scales, or of fp4 and 32 scales.
_RECORDS_V41 = (512 + 16, 256 + 32)

_EXPECTED = "the full_cls_name() of a known attention backend"


@attrs.frozen
class Backends:
    """The backends of the layers, and the properties that their names leave open.

    Attributes:
        by_layer: A backend for each layer name, or one backend for all layers.
        variants: A variant for each layer name, or one for all layers.
    """

    by_layer: Any
    variants: Any = None

    def format_of(self, layer: str, spec: FieldReader) -> str:
        """Return the page format of *layer*, whose spec is *spec*."""
        field = f"backends[{layer!r}]"
        name = full_name(field, chosen(self.by_layer, layer))
        form = FORMATS.get(name)
        if form is None:
            why = BACKENDS_REFUSED.get(name, "kvspec.adapters.vllm.FORMATS")
            raise SpecError(field, name, f"{_EXPECTED} ({why})")
        if form == RING:
            raise SpecError(spec.path, type(spec.value).__name__, "CircularBufferSpec")
        form = _for_spec(form, spec)
        if form in _VARIANTS:
            form = self._variant(layer, name, _VARIANTS[form])
        # A row of another length has elements of half a byte, or several scales.
        if form in KEY_PLANES and spec.get("head_size").value != INDEXER_ROW:
            form = "opaque:indexer"
        _check(field, name, form, spec)
        return ROW_PAGES if form == "keys" else form

    def _variant(self, layer: str, name: str, known: Mapping[str, str]) -> str:
        """Return the format for the caller's variant of the backend called *name*."""
        variant = chosen(self.variants, layer)
        if not isinstance(variant, str) or variant not in known:
            wanted = f"one of {', '.join(known)}: the variants of {name.rpartition('.')[2]}"
            raise SpecError(f"variants[{layer!r}]", variant, wanted)
        return known[variant]

    def ratio_of(self, layer: str) -> int:
        """Return how many tokens *layer*, which keeps a ring, compresses together."""
        field = f"backends[{layer!r}]"
        name = full_name(field, chosen(self.by_layer, layer))
        if name not in RINGS:
            why = BACKENDS_REFUSED.get(name, "kvspec.adapters.vllm.backends.RINGS")
            raise SpecError(field, name, f"the backend of a ring ({why})")
        known, variant = RINGS[name], chosen(self.variants, layer)
        if known is not None:
            return known
        return positive_int(f"variants[{layer!r}]", variant, least=2)

    def of_summaries(self, layer: str) -> bool:
        """Return whether *layer* keeps summaries, which have one head on each rank."""
        name = full_name(f"backends[{layer!r}]", chosen(self.by_layer, layer))
        return name == f"vllm.models.{SUMMARIES}"

    def device_of(self, layer: str) -> str | None:
        """Return the type of device whose kernels write the state of *layer*, or None."""
        device = self.variants.get(layer) if isinstance(self.variants, Mapping) else None
        if device is not None and not isinstance(device, str):
            raise SpecError(f"variants[{layer!r}]", device, "a type of device, such as cuda or cpu")
        return device


def full_name(field: str, backend: Any) -> str:  # noqa: ANN401 - vLLM's class, not imported
    """Return the module and the class, joined by a dot, of the backend that writes the pages."""
    backend = _writer(backend)
    if callable(FieldReader(field, backend).get("full_cls_name").value):
        backend = FieldReader(field, backend).call("full_cls_name").value
    if isinstance(backend, tuple) and all(isinstance(name, str) for name in backend):
        backend = ".".join(backend)
    if not isinstance(backend, str):
        raise SpecError(field, backend, f"{_EXPECTED}: the order inside a page depends on it")
    return backend


def _writer(backend: Any) -> Any:  # noqa: ANN401
    """Return the backend whose code writes the pages of *backend*: its base, if it reads chunks.

    For layers that attend to chunks, vLLM makes a class of its own, with a name like
    ``ChunkedLocalAttention_8192_FlashAttentionBackend``. It overrides only `get_builder_cls`, and
    that builder changes only which blocks are read. vLLM makes other classes in the same way, some
    of which write other pages. They keep their names, which are refused.
    """
    if not isinstance(backend, type) or not backend.__name__.startswith(_OF_CHUNKS):
        return backend
    overrides = [name for name in vars(backend) if not name.startswith("_")]
    one_base = len(backend.__bases__) == 1
    return backend.__base__ if one_base and overrides == ["get_builder_cls"] else backend


def quantization(spec: FieldReader) -> str:
    """Return the name of a spec's quantization mode, or ``NONE``."""
    mode = spec.get("kv_quant_mode").value
    return str(getattr(mode, "name", mode)).upper()


def _for_spec(form: str, spec: FieldReader) -> str:
    """Return the format for *spec* if the spec decides between two. Otherwise return *form*."""
    # AITER reports head slots only if it shuffles the page.
    if form == "AITER's":
        return "opaque:aiter" if spec.get("num_head_slots").value else ROW_PAGES
    if form == "FlashInfer's":
        return "scaled planes" if quantization(spec) == "NVFP4" else ROW_PAGES
    # The bytes of a row mean other numbers in each mode. Rows of int4 may be as long.
    if form == "Octave's":
        return f"opaque:octave-{quantization(spec).lower()}"
    # DeepSeek V4 has fp8 records with their own bytes of a row, or plain latents. A page of its
    # records of 584 bytes has all data before all scales. In those of V4.1, the scales of a token
    # follow its data.
    if form == "DeepSeek's":
        size = spec.get("state_content_bytes").value
        return ROW_PAGES if size is None or size in _RECORDS_V41 else "opaque:deepseek"
    return form


def _check(field: str, name: str, form: str, spec: FieldReader) -> None:
    """Raise `SpecError` if the backend *name* could not have made *spec*."""
    slots = spec.get("num_head_slots").size_or_none()
    heads = spec.get("num_kv_heads").size_or_none()
    if form == ROW_PAGES and slots not in (None, heads):
        wanted = f"a backend that keeps {slots} slots for {heads} heads, as {spec.path} requires"
        raise SpecError(field, name, wanted)
    if form == ROW_PAGES and quantization(spec) == "NVFP4":
        raise SpecError(field, name, f"a backend that keeps NVFP4, as {spec.path} requires")
    role = spec.get("cache_role").value
    if form == ROW_PAGES and str(getattr(role, "name", role)).upper() == "INDEXER":
        wanted = f"a backend that keeps an indexer's keys, as {spec.path} requires"
        raise SpecError(field, name, wanted)
    if form == "keys" and spec.get("state_content_bytes").value is not None:
        wanted = f"a backend that packs an indexer's keys, as {spec.path} requires"
        raise SpecError(field, name, wanted)
    if form.startswith("opaque:octave-") and "OCTAVE" not in quantization(spec):
        wanted = f"a backend that keeps {quantization(spec)}, as {spec.path} requires"
        raise SpecError(field, name, wanted)
    # The two slots are all keys and all values of a rank, not two heads. If TP differs, a transfer
    # that divides the slots like heads sends one rank only keys and the other only values. No
    # length check finds this error. By its source, vLLM 0.33 makes it (we have not run it).
    if form in ("planes", "x-packed") and slots != 2:  # noqa: PLR2004 - keys and values
        raise SpecError(field, name, f"2 head slots in {spec.path}, keys and values, not {slots}")
    if form == "opaque:msa" and (heads is None or slots != 2 * heads):
        raise SpecError(field, name, f"two slots for each head in {spec.path}, not {slots}")


# Formats with two head slots: the keys of all heads of a rank, and the values of all heads.
PLANES = ("planes", "x-packed", "opaque:aiter")

# Bytes of a key of an indexer: 128 elements of fp8 and a float32 scale. All keys of a page lie
# before all scales (vLLM: `indexer_k_quant_and_cache`).
INDEXER_KEY, INDEXER_ROW = 128, 128 + 4

# The scales of such a page, by its format: their type and the elements that share one. On GPUs of
# compute capability 10, vLLM 0.33 keeps four equal bytes in place of a float32 (vLLM:
# `mqa_logits_use_mx_scales`), and a byte is for 32 elements.
KEY_PLANES: Mapping[str, tuple[str, int | None]] = {
    "key planes": ("float32", None),
    "key planes, MX": ("float8_e8m0fnu", 32),
}

# Formats whose rows are packed bytes. Each has a name of its own, because the length of a row does
# not identify the content: UltraQuant's rows are as long as int4's rows of a scale and codes.
PACKED = ("opaque:turboquant", "opaque:ultraquant", "opaque:octave")


def packing(rank_spec: FieldReader, page_format: str) -> dict[str, Any]:
    """Return the fields of our spec that describe how *page_format* packs the heads.

    Empty if each key lies beside its value in plain elements, or in planes of plain elements.
    """
    content = rank_spec.get("state_content_bytes").size_or_none()
    local, width = rank_spec.get("num_kv_heads").size(), itemsize(rank_spec.get("dtype").dtype())
    size = rank_spec.get("head_size").size()
    size_v = rank_spec.get("head_size_v").size(size)
    plain = content in (None, (size + size_v) * width)
    if page_format in PLANES:
        if content != local * size * width or size != size_v:
            wanted = f"{local * size * width}: the keys or values of {local} heads in each slot"
            raise SpecError(f"{rank_spec.path}.state_content_bytes", content, wanted)
        return {} if page_format == "planes" else {"page_format": page_format}
    if page_format == ROW_PAGES:
        return {} if plain else {"state_content_bytes": content}
    if page_format == "scaled planes":
        return _scaled(rank_spec, content)
    if page_format == "opaque:msa":
        slot = rank_spec.get("state_content_bytes").size()
        return {"state_content_bytes": 2 * slot, "page_format": page_format}
    if page_format.startswith(PACKED):
        return {"state_content_bytes": content, "page_format": page_format}
    if not plain:
        wanted = f"None or {(size + size_v) * width}: a key and a value"
        raise SpecError(f"{rank_spec.path}.state_content_bytes", content, wanted)
    return {"page_format": page_format}


def rows_without_values(rank_spec: FieldReader, page_format: str, row: int) -> dict[str, Any]:
    """Return the fields of rows of *row* bytes for each head that are no key and value.

    vLLM describes them by values of size 0: the inputs of Inkling's convolutions, and Step-5's
    summaries of eight tokens.
    """
    content = rank_spec.get("state_content_bytes")
    if page_format != ROW_PAGES or content.size_or_none() not in (None, row):
        raise SpecError(f"{rank_spec.path}.head_size_v", 0, "a page of rows without packed bytes")
    return {"state_content_bytes": row}


def _scaled(rank_spec: FieldReader, content: int | None) -> dict[str, Any]:
    """Return the fields of FlashInfer's NVFP4, with half a byte per element.

    16 elements have a scale of one byte. A page contains the data of all keys, the scales of the
    keys, the data of all values and the scales of the values. vLLM's kernel permutes the scales of
    four tokens of a head among themselves, so the scales of four tokens never part.
    """
    # Two elements share a byte, so the sizes are halved: a scale is for 8 bytes.
    size, local = rank_spec.get("head_size").size(), rank_spec.get("num_kv_heads").size()
    slots, bytes_of_slot = rank_spec.get("num_head_slots"), size // 2 + size // 16
    if size % 16 or rank_spec.get("head_size_v").size(size) != size or content != bytes_of_slot:
        wanted = f"{bytes_of_slot}: the data and scales of {size} elements, a multiple of 16"
        raise SpecError(f"{rank_spec.path}.state_content_bytes", content, wanted)
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
    """Return vLLM's letters, changed if the page format keeps keys apart from values.

    >>> layout_of("LBHNC", "planes"), layout_of("LBHNC", "keys-transposed")
    ('LBKNHC', 'LBHKNC')
    """
    if page_format in ("planes", "x-packed", "keys-transposed"):
        if "K" in layout:
            raise SpecError("layout", layout, f"letters without K for pages that are {page_format}")
        # The keys of all tokens of a block lie before their values, so K is just outside N.
        if page_format == "keys-transposed":
            return layout.replace("N", "KN")
        # vLLM's axis H counts the two slots, so it becomes K. In "planes", a row has all heads, so
        # H is inside N. In "x-packed", each head has its own rows, so H is outside N.
        planes = layout.replace("H", "K")
        return planes.replace("C", "HC") if page_format == "planes" else planes.replace("N", "HN")
    whole = page_format == "scaled planes" or is_opaque(page_format)
    if whole and layout[:2] != outer(layout):
        wanted = f"L and B outermost: a page that is {page_format} is contiguous"
        raise SpecError("layout", layout, wanted)
    if page_format == "scaled planes" and layout.index("N") < layout.index("H"):
        wanted = "H outside N: scales of four tokens of a head lie together"
        raise SpecError("layout", layout, wanted)
    return layout


def outer(layout: str) -> str:
    """Return the letters L and B in the order of *layout*."""
    return "".join(letter for letter in layout if letter in "LB")


def real_page(rank_spec: FieldReader) -> int | None:
    """Return the bytes of a page without padding, or None if vLLM does not report them."""
    # The field has two names among the versions of vLLM.
    page = rank_spec.get("unpadded_page_size_bytes").size_or_none()
    return rank_spec.get("real_page_size_bytes").size_or_none() if page is None else page
