"""Tests how the vLLM adapter reads engines from a `VllmConfig` and block tables from a request."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from moved import moves
from refused import refusal
from vllm_like import HEADS, config, state

import kvspec
from kvspec.adapters import vllm

FULL = like.FullAttentionSpec(**HEADS)
LATENT = like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
DRAFT = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1}, dcp_sharded=False)


KEYS = kvspec.KeyContent(rotary="halves", rotary_size=8)


class Layer:
    """An attention layer of a worker."""

    _k_scale = _v_scale = 1.0

    class Backend:
        """The class that `get_attn_backend` returns."""

        @staticmethod
        def full_cls_name() -> tuple[str, str]:
            """Return the backend's module and class."""
            return "vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"

    def get_attn_backend(self) -> type:
        """Return the backend."""
        return self.Backend


class Model:
    """A ModelConfig with the same number of KV heads in all layers, or the numbers *by_layer*."""

    def __init__(self, heads: int = 4, layers: int = 2, by_layer: Any = (), **text: int) -> None:
        self.heads, self.layers = heads, layers
        self.hf_text_config = SimpleNamespace(**text)
        if by_layer:
            self.model_arch_config = [SimpleNamespace(total_num_kv_heads=n) for n in by_layer]

    def get_total_num_kv_heads(self) -> int:
        """Return the KV heads of one layer."""
        return self.heads

    def get_total_num_hidden_layers(self) -> int:
        """Return the layers of all stages."""
        return self.layers


def configured(*names: str, model: Model | None = None, **more: Any) -> Any:
    """Return the VllmConfig of a worker with the layers *names*. *more* replaces fields."""
    parallel = {
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "prefill_context_parallel_size": 1,
        "decode_context_parallel_size": 1,
        "rank": 0,
        "cp_kv_cache_interleave_size": 1,
        "dcp_kv_cache_interleave_size": 1,
        "_allow_auto_resolve_cp_interleave_size": True,
    }
    own = {name: more.pop(name) for name in tuple(more) if name in parallel}
    fields = {
        "parallel_config": SimpleNamespace(**{**parallel, **own}),
        "model_config": Model() if model is None else model,
        "cache_config": SimpleNamespace(kv_cache_layout=None),
        "compilation_config": SimpleNamespace(
            static_forward_context={name: Layer() for name in names}
        ),
        "kv_transfer_config": None,
        "speculative_config": None,
    }
    return SimpleNamespace(**{**fields, **more})


def transfer(name: str, *children: str) -> Any:
    """Return a KVTransferConfig of the connector *name*, which may contain *children*."""
    more = {"connectors": [{"kv_connector": child} for child in children]}
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=more)


def cached(*groups: Any, layout: Any = "LBNHC", **more: Any) -> Any:
    """Return a KVCacheConfig whose layout has been resolved."""
    resolved = config(*groups, **more)
    resolved.kv_cache_layout = layout  # type: ignore[attr-defined]
    return resolved


def test_from_vllm_reads_sizes_heads_layout_and_backend() -> None:
    """The engine equals the engine that is described by hand."""
    layers = ["model.layers.0.attn", "model.layers.1.attn"]
    vllm_config = configured(*layers, tensor_parallel_size=2, rank=1)
    engine = vllm.from_vllm(vllm_config, cached((layers, FULL)))
    parallel = kvspec.ParallelConfig(tp_size=2)
    by_hand = like.engine_spec(
        config((layers, FULL)), parallel=parallel, total_num_kv_heads=4, layout="NHD"
    )
    assert by_hand == engine
    assert 0 == engine.null_block
    enum = SimpleNamespace(name="LBNHC")
    vllm_config.cache_config.kv_cache_layout = enum
    assert engine == vllm.from_vllm(vllm_config, cached((layers, FULL), layout=None))


INTERLEAVES = [
    ({}, 16),
    ({"kv_transfer_config": transfer("MultiConnector", "X", "NixlConnector")}, 16),
    ({"kv_transfer_config": transfer("NixlPullConnector")}, 4),
    ({"kv_transfer_config": None}, 4),
    ({"_allow_auto_resolve_cp_interleave_size": False}, 4),
    ({"dcp_kv_cache_interleave_size": 8}, 16),
    ({"kv_transfer_config": transfer("X"), "dcp_kv_cache_interleave_size": 8}, 8),
    ({"kv_transfer_config": None, "dcp_kv_cache_interleave_size": 8}, 4),
    ({"decode_context_parallel_size": 1}, 1),
]


@pytest.mark.parametrize(("more", "interleave"), INTERLEAVES)
def test_interleave_size_follows_vllm_rules(more: dict[str, Any], interleave: int) -> None:
    """With NixlConnector and no configured size, vLLM interleaves by the smallest block."""
    defaults = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 4,
        "kv_transfer_config": transfer("NixlConnector"),
    }
    names = "layers.0.attn", "draft.0"
    vllm_config = configured(*names, model=Model(heads=2), **{**defaults, **more})
    both = cached((["layers.0.attn"], replace(LATENT, block_size=32)), (["draft.0"], DRAFT))
    engine = vllm.from_vllm(vllm_config, both, total_num_kv_heads=1)
    assert interleave == engine.parallel.interleave_size
    assert [True, False] == [group.context_sharded for group in engine.groups]


@pytest.mark.parametrize(
    ("pcp", "tp", "dcp", "ranks"),
    [
        (1, 4, 2, [[0, 1, 0, 1]]),
        (2, 1, 2, [[0], [1]]),
        (2, 2, 1, [[0, 0], [0, 0]]),
        (2, 2, 2, [[0, 0], [1, 1]]),
        (2, 2, 4, [[0, 2], [1, 3]]),
    ],
)
def test_context_ranks_count_over_pcp_before_tp(pcp: int, tp: int, dcp: int, ranks: Any) -> None:
    """DCP may span PCP. Otherwise the PCP ranks are replicas."""
    vllm_config = configured(
        "layers.0.attn",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )
    parallel = vllm.from_vllm(vllm_config, cached((["layers.0.attn"], LATENT))).parallel
    assert dcp == parallel.context_size
    context_ranks = [
        [parallel.context(kvspec.RankId(pcp=row, tp=rank)).rank for rank in range(tp)]
        for row in range(pcp)
    ]
    assert ranks == context_ranks


ONE_HEAD = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1})
TWO_KINDS = [(["layers.0.attn"], ONE_HEAD), (["layers.1.attn"], FULL)]


def heads_of(engine: kvspec.EngineSpec) -> dict[str, int]:
    """Return the KV heads of each layer."""
    return {
        layer: group.spec.of_layer(layer).total_num_kv_heads  # type: ignore[attr-defined]
        for layer, group in engine.homes.items()
    }


def test_heads_are_read_for_each_layer() -> None:
    """The caller must pass the heads of each layer if vLLM has one number for unequal layers."""
    names = "layers.0.attn", "layers.1.attn"
    heads = {"layers.0.attn": 2, "layers.1.attn": 8}
    vllm_config = configured(*names, model=Model(by_layer=(2, 8)), tensor_parallel_size=4)
    assert heads == heads_of(vllm.from_vllm(vllm_config, cached(*TWO_KINDS)))
    vllm_config.model_config = Model(heads=8)
    error = refusal(lambda: vllm.from_vllm(vllm_config, cached(*TWO_KINDS)))
    assert ("total_num_kv_heads", None) == (error.field, error.value)
    assert "'layers.1.attn'" in error.expected
    engine = vllm.from_vllm(vllm_config, cached(*TWO_KINDS), total_num_kv_heads=heads)
    assert heads == heads_of(engine)


def test_from_vllm_rejects_heads_that_contradict_the_model() -> None:
    """Rank 0 of 4 has 3 of 12 heads, but the spec has one."""
    vllm_config = configured("layers.0.attn", model=Model(heads=12), tensor_parallel_size=4)
    error = refusal(lambda: vllm.from_vllm(vllm_config, cached(TWO_KINDS[0])))
    assert ("kv_cache_groups[0].kv_cache_spec.num_kv_heads", 1) == (error.field, error.value)
    assert "3" in error.expected


@pytest.mark.parametrize("name", ["draft.attn", "layers.2.attn", "eagle", "marked"])
def test_draft_has_heads_of_draft_model(name: str) -> None:
    """A draft has a marked group, a marked spec, its own name, or a number after the target."""
    names = "layers.0.attn", name
    spec = like.changed(ONE_HEAD, "is_draft", value=True) if name == "marked" else ONE_HEAD
    both = cached((["layers.0.attn"], LATENT), ([name], spec))
    both.kv_cache_groups[1].is_eagle_group = name == "eagle"
    draft = SimpleNamespace(draft_model_config=Model(heads=2))
    vllm_config = configured(
        *names, model=Model(heads=1), tensor_parallel_size=2, speculative_config=draft
    )
    draft_spec = vllm.from_vllm(vllm_config, both).groups[1].spec
    assert 2 == draft_spec.total_num_kv_heads  # type: ignore[attr-defined]


class ModelArch:
    """A ModelArchitectureConfig with one number of heads: each index returns the whole model."""

    per_layer_overrides = None

    def __init__(self, heads: int) -> None:
        self.total_num_kv_heads = heads

    def __getitem__(self, _: int) -> ModelArch:
        return self


def arch(heads: int, **text: Any) -> Model:
    """Return a model of two layers with one number of KV heads. Its `hf_text_config` is *text*."""
    model = Model(heads=heads, **text)
    model.model_arch_config = ModelArch(heads)  # type: ignore[assignment]
    return model


def shared(*shares: int) -> list[Any]:
    """Return the `block_configs` of a model whose layers share heads in groups of *shares*."""
    return [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=n)) for n in shares]


UNEQUAL_LAYERS: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, "swa_num_key_value_heads is 8"),
    ({"other": {"num_attention_groups": 8}}, "other.num_attention_groups is 8"),
    ({"block_configs": shared(2, 2, 4)}, "block_configs[2].attention.n_heads_in_group is 4"),
    ({"num_global_key_value_heads": 2}, "num_global_key_value_heads is 2"),
]

EQUAL_LAYERS: list[dict[str, Any]] = [
    {"num_key_value_heads": 4, "swa_num_key_value_heads": 4, "num_attention_heads": 32},
    {"block_configs": shared(8, 8)},
    {"kv_heads": None, "n_head_kv": True, "a": {"a": {"a": {"a": {"a": {"kv_heads": 8}}}}}},
]


# In some versions of vLLM the architecture's config has no index. In both the model has one number.
VERSIONS = pytest.mark.parametrize("model", [arch, Model], ids=["indexed", "not indexed"])


@VERSIONS
@pytest.mark.parametrize(("text", "contradiction"), UNEQUAL_LAYERS)
def test_from_vllm_rejects_one_number_of_heads_for_unequal_layers(
    model: Callable[..., Model], text: dict[str, Any], contradiction: str
) -> None:
    """One head on each of 8 ranks may be 8 heads, or 4 heads that are replicated.

    The model's own config contains the second number, for example for the layers with a window.
    """
    names = ["layers.0.attn", "layers.1.attn"]
    vllm_config = configured(*names, model=model(4, **text), tensor_parallel_size=8)
    both = cached((names[:1], ONE_HEAD), (names[1:], ONE_HEAD))
    error = refusal(lambda: vllm.from_vllm(vllm_config, both))
    assert ("total_num_kv_heads", None) == (error.field, error.value)
    assert f"hf_text_config.{contradiction}" in error.expected
    by_hand = dict(zip(names, (4, 8), strict=True))
    assert by_hand == heads_of(vllm.from_vllm(vllm_config, both, total_num_kv_heads=by_hand))


@VERSIONS
@pytest.mark.parametrize("text", EQUAL_LAYERS)
def test_from_vllm_reads_one_number_of_heads_for_equal_layers(
    model: Callable[..., Model], text: dict[str, Any]
) -> None:
    """The model's own config contains no second number of KV heads."""
    vllm_config = configured("layers.0.attn", model=model(4, **text), tensor_parallel_size=8)
    engine = vllm.from_vllm(vllm_config, cached((["layers.0.attn"], ONE_HEAD)))
    assert {"layers.0.attn": 4} == heads_of(engine)


@VERSIONS
def test_from_vllm_ignores_numbers_of_model_if_ranks_have_several_heads(
    model: Callable[..., Model],
) -> None:
    """2 heads on each of 2 ranks are 4 heads, whatever other number the model's config has."""
    text = {"num_global_key_value_heads": 2}
    vllm_config = configured("layers.0.attn", model=model(4, **text), tensor_parallel_size=2)
    engine = vllm.from_vllm(vllm_config, cached((["layers.0.attn"], FULL)))
    assert {"layers.0.attn": 4} == heads_of(engine)


def test_heads_of_layer_with_overrides_are_not_compared_with_the_model() -> None:
    """An entry with overrides is the number of its own layer, so it may differ from the model."""
    model = arch(4, num_global_key_value_heads=2)
    model.model_arch_config.per_layer_overrides = {1: {}}  # type: ignore[attr-defined]
    vllm_config = configured("layers.0.attn", model=model, tensor_parallel_size=8)
    engine = vllm.from_vllm(vllm_config, cached((["layers.0.attn"], ONE_HEAD)))
    assert {"layers.0.attn": 4} == heads_of(engine)


def test_draft_is_compared_with_its_own_config() -> None:
    """Target and draft have unequal numbers of heads, and each config contains its own."""
    names = "layers.0.attn", "layers.2.attn"
    draft = SimpleNamespace(draft_model_config=Model(heads=2, num_key_value_heads=2))
    vllm_config = configured(
        *names,
        model=Model(heads=8, num_key_value_heads=8),
        tensor_parallel_size=8,
        speculative_config=draft,
    )
    both = cached((names[:1], ONE_HEAD), (names[1:], ONE_HEAD))
    assert dict(zip(names, (8, 2), strict=True)) == heads_of(vllm.from_vllm(vllm_config, both))


def test_from_vllm_rejects_marked_group_of_draft_and_target_with_unequal_heads() -> None:
    """A target of 8 heads and a draft of 4 have the same spec on 8 ranks."""
    names = ["layers.0.attn", "layers.1.attn"]
    both = cached((names, ONE_HEAD))
    both.kv_cache_groups[0].is_eagle_group = True
    draft = SimpleNamespace(draft_model_config=arch(4))
    vllm_config = configured(
        *names, model=arch(8), tensor_parallel_size=8, speculative_config=draft
    )
    error = refusal(lambda: vllm.from_vllm(vllm_config, both))
    assert ("total_num_kv_heads", None) == (error.field, error.value)
    assert "'layers.0.attn'" in error.expected
    draft.draft_model_config = arch(8)
    assert dict.fromkeys(names, 8) == heads_of(vllm.from_vllm(vllm_config, both))


def test_kernel_block_size_follows_from_blocks_of_tensor() -> None:
    """The tensor has 12 blocks and the config 6 of 16 tokens, so a kernel block has 8 tokens."""
    both = cached((["layers.0.attn"], FULL), (["layers.1.attn"], LATENT), layout="LBHNC")
    tensors = {
        "layers.0.attn": np.zeros((12, 2, 8, 16), np.uint16),
        "layers.1.attn": np.zeros((6, 1, 16, 8), np.uint16),
    }
    vllm_config = configured(*tensors)
    engine = vllm.from_vllm(vllm_config, both, tensors)
    assert [8, None] == [group.kernel_block_size for group in engine.groups]
    assert 3 == len(vllm.rank_cache(engine, kvspec.RankId(), tensors, config=both).regions)
    for blocks in (7, 3, 6 * 3, 0):
        other = {**tensors, "layers.0.attn": np.zeros((blocks, 2, 8, 16), np.uint16)}
        error = refusal(lambda other=other: vllm.from_vllm(vllm_config, both, other))
        assert "tensors['layers.0.attn'].shape" == error.field
        assert (blocks, 2, 8, 16) == error.value
        assert "6" in error.expected


def test_from_vllm_requires_backends_without_worker() -> None:
    """The scheduler of vLLM has no attention layers, so the caller passes their backends."""
    vllm_config, kv_cache_config = configured(), cached((["layers.0.attn"], FULL))
    error = refusal(lambda: vllm.from_vllm(vllm_config, kv_cache_config))
    assert ("backends['layers.0.attn']", None) == (error.field, error.value)
    backends = Layer.Backend.full_cls_name()
    assert vllm.from_vllm(vllm_config, kv_cache_config, backends=backends)
    vllm_config.compilation_config.static_forward_context = {"layers.0.attn": object()}
    error = refusal(lambda: vllm.from_vllm(vllm_config, kv_cache_config))
    field = "static_forward_context['layers.0.attn'].get_attn_backend"
    assert (field, None) == (error.field, error.value)


def test_variant_of_backend_is_read_from_layer() -> None:
    """The layer contains the instruction set of CPU attention, and whether an indexer shuffles."""
    backend = SimpleNamespace(
        full_cls_name=lambda: ("vllm.v1.attention.backends.cpu_attn", "CPUAttentionBackend")
    )
    cpu = SimpleNamespace(get_attn_backend=lambda: backend, isa="vec16")
    indexer = SimpleNamespace(
        get_attn_backend=lambda: "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend",
        uses_shuffled_layout=True,
    )
    keys = like.changed(replace(LATENT, dtype="uint8"), "cache_role", "INDEXER")
    both = cached((["layers.0.attn"], FULL), (["layers.0.indexer"], keys), layout="LBHNC")
    vllm_config = configured()
    layers = vllm_config.compilation_config.static_forward_context
    layers |= {"layers.0.attn": cpu, "layers.0.indexer": indexer}
    formats = [
        group.spec.page_format  # type: ignore[attr-defined]
        for group in vllm.from_vllm(vllm_config, both).groups
    ]
    assert ["keys-transposed", "opaque:indexer-shuffled"] == formats
    del cpu.isa
    error = refusal(lambda: vllm.from_vllm(vllm_config, both))
    assert ("variants['layers.0.attn']", None) == (error.field, error.value)
    assert "vec, vec16, amx" in error.expected


def index_layer(own: object = None, **attributes: Any) -> Any:
    """Return an indexer. *own* is the order of its pages, as its class states it."""
    backend = "vllm.v1.attention.backends.mla.indexer.DeepseekV32IndexerBackend"
    base = type("Cache", (), {"uses_shuffled_layout": False})
    cls = type("Own", (base,), {} if own is None else {"uses_shuffled_layout": own})
    layer = cls()
    layer.get_attn_backend = lambda: backend
    vars(layer).update(attributes)
    return layer


@pytest.mark.parametrize(
    ("own", "rocm", "scales", "usual", "expected"),
    [
        (None, False, None, "float8_e4m3fn", ("uint8", "float32", "plain")),
        (None, False, False, "float8_e4m3fn", ("uint8", "float32", "plain")),
        (None, False, True, "float8_e4m3fn", ("uint8", "float8_e8m0fnu", "plain")),
        (False, True, False, "float8_e4m3fn", ("uint8", "float32", "plain")),
        (False, True, False, "float8_e4m3fnuz", ("float8_e4m3fnuz", "float32", "plain")),
        (True, True, False, "float8_e4m3fnuz",
         ("float8_e4m3fnuz", None, "opaque:indexer-shuffled")),
        (None, True, False, "float8_e4m3fn", None),
    ],
)  # fmt: skip
def test_numbers_of_an_index_page_are_read_from_the_platform(
    own: object,
    rocm: bool,
    scales: bool | None,
    usual: str,
    expected: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The spec is the same on all of them. On AMD, a class that states nothing may shuffle."""
    platform = SimpleNamespace(fp8_dtype=lambda: f"torch.{usual}", is_rocm=lambda: rocm)
    deep_gemm = SimpleNamespace()
    if scales is not None:
        deep_gemm.mqa_logits_use_mx_scales = lambda: scales
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    monkeypatch.setitem(sys.modules, "vllm.utils.deep_gemm", deep_gemm)
    keys = replace(LATENT, head_size=132, dtype="uint8")
    vllm_config = configured()
    vllm_config.compilation_config.static_forward_context["l.0"] = index_layer(own)
    both = cached((["l.0"], keys))
    if expected is None:
        error = refusal(lambda: vllm.from_vllm(vllm_config, both))
        assert ("variants['l.0']", None) == (error.field, error.value)
        return
    spec: Any = vllm.from_vllm(vllm_config, both).groups[0].spec
    assert expected == (spec.dtype, spec.scale_dtype, spec.page_format)


def of_device(kind: str, shapes: Any, device: Any) -> kvspec.EngineSpec:
    """Return the engine of one state on a type of *device*."""
    vllm_config = configured(device_config=SimpleNamespace(device_type=device))
    layers = vllm_config.compilation_config.static_forward_context
    layers["l.0"] = SimpleNamespace(mamba_type=kind, get_attn_backend=lambda: None)
    return vllm.from_vllm(vllm_config, cached((["l.0"], state(kind, shapes))))


def test_delta_net_state_depends_on_device() -> None:
    """A CUDA kernel stores [values, keys] of a head, and a CPU kernel [keys, values].

    Both are [8, 8] here, so the shape does not show the difference.
    """
    shapes = ((3, 48), (2, 8, 8))
    cuda, cpu = (of_device("GDN_ATTN", shapes, device) for device in ("cuda", "cpu"))
    assert cuda == of_device("GDN_ATTN", shapes, None)
    assert cuda == like.engine_spec(config((["l.0"], state("GDN_ATTN", shapes))), layout="LBNHC",
                                    conv_layout="SD", variants="vec")  # fmt: skip
    error = refusal(lambda: kvspec.plan_transfer(cuda, cpu), kvspec.MismatchError)
    (mismatch,) = error.mismatches
    assert ("l.0.parts", "ssm") == (mismatch.field, mismatch.producer[-1])
    assert "ssm_cpu" == mismatch.consumer[-1]
    assert kvspec.plan_transfer(cpu, of_device("GDN_ATTN", shapes, "cpu"))
    raw = np.zeros((6, 1, 1, 3 * 48 + 2 * 8 * 8), np.int8)
    caches = [vllm.rank_cache(engine, kvspec.RankId(), {"l.0": raw}) for engine in (cuda, cpu)]
    bases = [sorted(region.base for region in cache.regions) for cache in caches]
    assert bases[0] == bases[1]
    mamba = [of_device("MAMBA1", ((3, 32), (32, 4)), device) for device in ("cuda", "cpu")]
    assert mamba[0] == mamba[1]
    error = refusal(lambda: of_device("GDN_ATTN", shapes, 5))
    assert ("variants['l.0']", 5) == (error.field, error.value)
    assert "device" in error.expected


# vLLM has the same spec for `fp8_e4m3` and `fp8_e5m2`, on every platform.
FP8 = replace(FULL, dtype="uint8", kv_quant_mode=like.KVQuantMode.FP8_PER_TENSOR)

PLATFORMS = [
    ("fp8", "torch.float8_e4m3fn", "float8_e4m3fn"),
    ("fp8_e4m3", "torch.float8_e4m3fnuz", "float8_e4m3fnuz"),
    ("fp8_e5m2", "torch.float8_e4m3fn", "float8_e5m2"),
    ("fp8_per_token_head", "torch.float8_e4m3fn", "float8_e4m3fn"),
]


def fp8(monkeypatch: pytest.MonkeyPatch, cache: Any, usual: str) -> kvspec.EngineSpec:
    """Return the engine of a layer with the cache dtype *cache*. The platform's fp8 is *usual*."""
    platform = SimpleNamespace(fp8_dtype=lambda: usual)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    vllm_config, kv_cache_config = configured("layers.0.attn"), cached((["layers.0.attn"], FP8))
    layers = vllm_config.compilation_config.static_forward_context
    layers["layers.0.attn"].kv_cache_dtype = cache
    engine = vllm.from_vllm(vllm_config, kv_cache_config, key_content=KEYS)
    worker_info = vllm.WorkerInfo.of(vllm_config, kv_cache_config)
    assert engine == vllm.whole_engine(vllm_config, [worker_info], {}, KEYS)
    return engine


@pytest.mark.parametrize(("cache", "usual", "elements"), PLATFORMS)
def test_fp8_dtype_is_read_from_layer_and_platform(
    cache: str, usual: str, elements: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The spec contains only `uint8`. A transfer between two fp8 dtypes is an error."""
    engine = fp8(monkeypatch, cache, usual)
    assert elements == engine.groups[0].spec.dtype  # type: ignore[attr-defined]
    other = like.engine_spec(
        config((["layers.0.attn"], FP8)),
        layout="LBNHC",
        fp8_dtype="float8_e5m2fnuz",
        key_content=KEYS,
        scales={"layers.0.attn": (1.0, 1.0)},
    )
    error = refusal(lambda: kvspec.plan_transfer(engine, other), kvspec.MismatchError)
    assert [("layers.0.attn.dtype", elements, "float8_e5m2fnuz")] == [
        (mismatch.field, mismatch.producer, mismatch.consumer) for mismatch in error.mismatches
    ]


@pytest.mark.parametrize(
    ("cache", "usual"),
    [
        (None, "torch.float8_e4m3fn"),
        ("auto", "torch.float8_e4m3fn"),
        ("fp8_new", "torch.float8_e4m3fn"),
        ([], "torch.float8_e4m3fn"),
        ("fp8_e5m2", "torch.float8_e4m3fnuz"),
    ],
)
def test_from_vllm_rejects_ambiguous_fp8(
    cache: Any, usual: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layer does not choose an fp8 dtype, or the platform has no E5M2 that is known."""
    error = refusal(lambda: fp8(monkeypatch, cache, usual))
    assert ("fp8_dtype['layers.0.attn']", None) == (error.field, error.value)


def test_from_vllm_rejects_fp8_without_platform(monkeypatch: pytest.MonkeyPatch) -> None:
    """The platform of vLLM decides what `fp8` means."""
    monkeypatch.delitem(sys.modules, "vllm.platforms", raising=False)
    vllm_config = configured("layers.0.attn")
    error = refusal(lambda: vllm.from_vllm(vllm_config, cached((["layers.0.attn"], FP8))))
    assert ("fp8_dtype['layers.0.attn']", None) == (error.field, error.value)


@pytest.mark.parametrize(
    ("options", "value"),
    [
        ({}, None),
        ({"fp8_dtype": "bfloat16"}, "bfloat16"),
        ({"fp8_dtype": {"layers.1.attn": "fp8"}}, None),
    ],
)
def test_engine_spec_rejects_missing_or_wrong_fp8_dtype(options: Any, value: Any) -> None:
    """The dtype must be one of fp8, for every layer with fp8."""
    error = refusal(lambda: like.engine_spec(config((["layers.0.attn"], FP8)), **options))
    assert ("fp8_dtype['layers.0.attn']", value) == (error.field, error.value)


TURBOQUANT = replace(FULL, dtype="uint8", state_content_bytes=20)

SLOTS = [
    ("turboquant_4bit_nc", False, None, "plain"),
    ("turboquant_k8v4", False, (8, 9), "plain"),
    ("turboquant_k8v4", False, (9, 0), "plain"),
    ("turboquant_k8v4", False, (8, 6), "opaque:turboquant-e4b15"),
    ("turboquant_k8v4", False, (), "plain"),
    ("turboquant_k8v4", True, (9, 5), "opaque:turboquant-scales"),
    ("turboquant_3bit_nc", True, (9, 5), "opaque:turboquant-scales"),
]


def turboquant(
    monkeypatch: pytest.MonkeyPatch,
    cache: str,
    separate_scales: Any,
    device: tuple[int, ...] | None,
) -> kvspec.EngineSpec:
    """Return the engine of a TurboQuant layer.

    *device* is the capability of a CUDA device, () for another device, or None if it is unknown.
    """
    platform = SimpleNamespace(
        fp8_dtype=lambda: "float8_e4m3fn",
        is_cuda_alike=lambda: bool(device),
        get_device_capability=lambda: SimpleNamespace(major=device[0], minor=device[1]),  # type: ignore[index,misc]
    )
    loaded = None if device is None else platform
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=loaded))
    name = "vllm.v1.attention.backends.turboquant_attn.TurboQuantAttentionBackend"
    layer = SimpleNamespace(
        get_attn_backend=lambda: name,
        kv_cache_dtype=cache,
        impl=SimpleNamespace(_soa_store=separate_scales),
    )
    vllm_config = configured()
    vllm_config.compilation_config.static_forward_context["layers.0.attn"] = layer
    return vllm.from_vllm(vllm_config, cached((["layers.0.attn"], TURBOQUANT)))


@pytest.mark.parametrize(("cache", "separate_scales", "device", "page"), SLOTS)
def test_turboquant_page_format_is_read_from_layer_and_device(
    cache: str,
    separate_scales: bool,
    device: tuple[int, ...] | None,
    page: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The scales are in each row or after all rows of a page. Keys are E4M3 or E4B15."""
    spec = turboquant(monkeypatch, cache, separate_scales, device).groups[0].spec
    assert (page, 20) == (spec.page_format, spec.state_content_bytes)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("cache", "separate_scales"), [("turboquant_k8v4", False), ("turboquant_4bit_nc", None)]
)
def test_from_vllm_rejects_ambiguous_turboquant(
    cache: str, separate_scales: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The format needs the layer's `_soa_store`, and for 8-bit keys also the device."""
    error = refusal(lambda: turboquant(monkeypatch, cache, separate_scales, None))
    assert ("variants['layers.0.attn']", None) == (error.field, error.value)
    assert "e4b15" in error.expected


@pytest.mark.parametrize("name", ["mamba_n_groups", "n_groups", "mamba_ngroups"])
def test_groups_of_state_are_read_from_any_known_name(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model has one group of Mamba2, so both ranks have a replica of it."""
    spec = state("mamba2", ((40, 3), (4, 8, 4)))
    vllm_config = configured(tensor_parallel_size=2, model=Model(**{name: 1}))
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    engine = vllm.from_vllm(vllm_config, cached((["layers.0.mixer"], spec)))
    units = {part.name: part.units for part in engine.groups[0].spec.parts}
    assert {"conv_x": 64, "conv_b": 4, "conv_c": 4, "ssm": 8} == units
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT")
    short = state("short_conv", ((2, 32),))
    engine = vllm.from_vllm(vllm_config, cached((["layers.0.mixer"], short)))
    # The default of vLLM is row first, so the shape (2, 32) has 32 channels on each of 2 ranks.
    assert 64 == engine.groups[0].spec.parts[0].units


def test_worker_rank_follows_from_number_of_worker() -> None:
    """The workers of an engine are `arange(pp * pcp * tp).reshape(pp, pcp, tp)` in vLLM."""
    sizes = {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}
    for number, (pp, pcp, tp) in enumerate(np.ndindex(2, 2, 3)):
        vllm_config = configured(tensor_parallel_size=3, rank=number, **sizes)
        assert kvspec.RankId(pp=pp, pcp=pcp, tp=tp) == vllm.worker_rank(vllm_config)


def test_whole_engine_joins_layers_of_all_workers() -> None:
    """Each worker describes its own layers. A missing worker is an error."""
    names = [f"layers.{number}.attn" for number in range(5)]
    parts = [names[:3], names[3:]]
    sizes: dict[str, Any] = {"model": Model(layers=5), "tensor_parallel_size": 2}
    sizes |= {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}
    workers = [
        (configured(*parts[n // 4], rank=n, **sizes), cached((parts[n // 4], FULL)))
        for n in range(8)
    ]
    worker_infos = [vllm.WorkerInfo.of(*both) for both in workers]
    halves = [cached((part, FULL)) for part in parts]
    whole = vllm.from_vllm(configured(*names, **sizes), halves, key_content=KEYS)
    engines = [vllm.whole_engine(vllm_config, worker_infos, {}, KEYS) for vllm_config, _ in workers]
    assert [whole] * 8 == engines
    error = refusal(lambda: vllm.whole_engine(workers[0][0], worker_infos[:7], {}))
    assert ("workers", "7 workers") == (error.field, error.value)
    assert "8" in error.expected


def test_stages_must_have_layers_of_vllm_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """By default vLLM divides 5 layers into stages of 3 and 2. The environment may change it."""
    names = [f"layers.{number}.attn" for number in range(5)]
    vllm_config = configured(*names, model=Model(layers=5), pipeline_parallel_size=2)
    halves = [cached((names[:3], LATENT)), cached((names[3:], LATENT))]
    stages = vllm.from_vllm(vllm_config, halves).by_stage(names)
    assert {0: 3, 1: 2} == {stage: len(layers) for stage, layers in stages.items()}
    error = refusal(lambda: vllm.from_vllm(vllm_config, halves[::-1]))
    assert ("kv_cache_config[0]", "layers.3.attn") == (error.field, error.value)
    assert "0..2" in error.expected
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,3")
    error = refusal(lambda: vllm.from_vllm(vllm_config, halves))
    assert ("kv_cache_config[0]", "layers.2.attn") == (error.field, error.value)
    assert "0..1" in error.expected
    for partition in ("2,2", "5", "2,x", "-1,6", ""):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        error = refusal(lambda: vllm.from_vllm(vllm_config, halves))
        assert ("VLLM_PP_LAYER_PARTITION", partition) == (error.field, error.value)
        assert "5" in error.expected


def test_states_of_falcon_h1_are_on_the_stage_of_their_own_config() -> None:
    """Each stage has the states of its own layers.

    Of 4 layers, vLLM names the state of layer 1 after the number 5. No stage has a layer 5.
    """
    names = [f"model.layers.{number}.self_attn.attn" for number in range(4)]
    mixers = [f"model.{4 + number}.mixer" for number in range(4)]
    vllm_config = configured(*names, model=Model(layers=4), pipeline_parallel_size=2)
    mixer = state("MAMBA1", ((3, 32), (32, 4)))
    halves = [cached((names[at : at + 2], LATENT), (mixers[at : at + 2], mixer)) for at in (0, 2)]
    engine = vllm.from_vllm(vllm_config, halves)
    assert dict.fromkeys(names[:2] + mixers[:2], 0) == {
        layer: stage for layer, stage in engine.stage_of.items() if not stage
    }
    whole = vllm.from_vllm(
        configured(*names, model=Model(layers=4)), cached((names, LATENT), (mixers, mixer))
    )
    assert [] == moves(engine, whole, 70)


def test_layer_that_reads_the_cache_of_another_has_none_of_its_own() -> None:
    """Layer 1 of Gemma 3n is registered under its own name, with the tensor of layer 0."""
    own_config = cached((["layers.0.attn"], LATENT))
    tensor = np.zeros((6, 1, 16, 8), np.uint16)
    pages = {"layers.0.attn": tensor, "layers.1.attn": tensor}
    engine = vllm.from_vllm(configured(*pages), own_config, pages)
    assert ["layers.0.attn"] == list(engine.homes)
    cache = vllm.rank_cache(engine, kvspec.RankId(), pages, config=own_config)
    assert ["layers.0.attn"] == [region.layer for region in cache.regions]


def test_rows_of_dspark_move_as_windows_after_the_layers_of_the_target() -> None:
    """The draft has its own group, whose numbers begin after the target's layers."""
    draft = like.SlidingWindowMLASpec(
        block_size=16, head_size=8, dtype="bfloat16", sliding_window=20
    )
    both = cached((["layers.0.attn"], LATENT), (["layers.2.attn.swa_cache"], draft))
    speculative = SimpleNamespace(draft_model_config=Model(heads=1))
    vllm_config = configured(
        "layers.0.attn", "layers.2.attn.swa_cache", speculative_config=speculative
    )
    engine = vllm.from_vllm(vllm_config, both)
    assert [range(70), range(51, 70)] == [g.spec.live_tokens(70) for g in engine.groups]
    assert [] == moves(engine, engine, 70)


def read_with(**changes: Any) -> kvspec.EngineSpec:
    """Read a configuration of which some fields have other values."""
    vllm_config = configured(
        "layers.0.attn",
        model=Model(heads=2),
        tensor_parallel_size=4,
        decode_context_parallel_size=2,
        cache_config=SimpleNamespace(kv_cache_layout=SimpleNamespace(name="LBNHC")),
    )
    for name, value in changes.items():
        setattr(vllm_config, name, value)
    return vllm.from_vllm(vllm_config, cached((["layers.0.attn"], ONE_HEAD), layout=None))


WRONG_TYPES = (None, 5, "x", (), {}, object())


@pytest.mark.parametrize(
    ("name", "field"),
    [
        ("parallel_config", "vllm_config.parallel_config.tensor_parallel_size"),
        ("model_config", "vllm_config.model_config.get_total_num_kv_heads"),
        ("cache_config", "kv_cache_layout"),
        ("compilation_config", "backends['layers.0.attn']"),
    ],
)
def test_from_vllm_rejects_config_of_wrong_type(name: str, field: str) -> None:
    """The error contains the path of the first missing attribute."""
    for value in WRONG_TYPES:
        error = refusal(lambda value=value: read_with(**{name: value}))
        assert (field, None) == (error.field, error.value)


def test_from_vllm_reads_kv_transfer_config_of_wrong_type_as_none() -> None:
    """Without a connector the configured interleave size applies."""
    engine = read_with()
    assert 1 == engine.parallel.interleave_size
    assert [engine] * len(WRONG_TYPES) == [
        read_with(kv_transfer_config=value) for value in WRONG_TYPES
    ]


MAMBA = state("mamba1", ((8, 3), (8, 4)), mamba_cache_mode="align")
BOTH = config((["layers.0"], FULL), (["draft.0"], DRAFT), (["layers.1"], MAMBA))


# 100 tokens have 7 blocks of 16 tokens.
WHOLE, DRAFTS = [0, 0, 5, 6, 1, 2, 3], [7, 8, 9, 10, 11, 12, 13]


def tables(*ids: Any, count: Any = 100, spec: Any = MAMBA) -> Any:
    """Read the block tables of a request over full attention, a draft and a state of 64 tokens."""
    both = config((["layers.0"], FULL), (["draft.0"], DRAFT), (["layers.1"], spec))
    return vllm.block_tables(like.engine_spec(BOTH), both, ids, count)


def test_block_tables_reads_one_list_for_each_group() -> None:
    """Null blocks stay in place. A state has one block. Excluded groups have no table."""
    assert {
        "group0": kvspec.BlockTable(WHOLE),
        "group1": kvspec.BlockTable(DRAFTS),
        "group2": kvspec.BlockTable([9]),
    } == tables(WHOLE, DRAFTS, [0, 9, 3])
    none = state("mamba1", ((8, 3), (8, 4)))
    assert kvspec.BlockTable([4]) == tables(WHOLE, DRAFTS, [4, 5, 6], spec=none)["group2"]
    assert kvspec.BlockTable([]) == tables([1], [2], [], count=0)["group2"]
    sparse = config((["layers.0"], FULL), (["draft.0"], like.RSWASpec(**HEADS)))
    engine = like.engine_spec(sparse, excluded=["draft.0"])
    assert {"group0"} == vllm.block_tables(engine, sparse, ([1], [2]), 9).keys()


MODE = "kv_cache_config.kv_cache_groups[2].kv_cache_spec.mamba_cache_mode"


@pytest.mark.parametrize(
    ("call", "field", "value", "requirement"),
    [
        (lambda: tables(WHOLE, DRAFTS), "block_ids", "2 lists", "3"),
        # 100 tokens of a state with blocks of 64 tokens are in the second block, at place 1.
        (lambda: tables(WHOLE, DRAFTS, [0, 0]), "block_ids['group2']", [0, 0], "place 1"),
        (lambda: tables(WHOLE, DRAFTS, [3]), "block_ids['group2']", [3], "place 1"),
        (lambda: tables(WHOLE, DRAFTS, [3], spec=like.changed(MAMBA, "mamba_cache_mode", "all")),
         MODE, "all", "'align'"),
        (lambda: tables(WHOLE, DRAFTS, [3], count=-1), "num_tokens", -1, ""),
        (lambda: tables(WHOLE[2:], DRAFTS, [0, 9]), "block_ids['group0']", [5, 6, 1, 2, 3], "7"),
        (lambda: tables(WHOLE, DRAFTS[:2], [0, 9]), "block_ids['group1']", [7, 8], "7"),
        (lambda: tables(WHOLE, "ab", [3]), "block_ids", "ab", ""),
        (lambda: vllm.block_tables(None, BOTH, [], 1), "engine", None, "EngineSpec"),
        (lambda: vllm.block_tables(like.engine_spec(BOTH), BOTH, 5, 1), "block_ids", 5, ""),
    ],
)  # fmt: skip
def test_block_tables_rejects_invalid_ids(
    call: Any, field: str, value: object, requirement: str
) -> None:
    """Each group needs a list with its null blocks, and a state needs its block."""
    error = refusal(call)
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected
