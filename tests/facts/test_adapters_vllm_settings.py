"""vLLM's whole configuration is read by vLLM's own rules, and what it leaves open is asked for."""

from __future__ import annotations

import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from refused import words
from vllm_like import HEADS, config, state

import kvspec
from kvspec.adapters import vllm

FULL = like.FullAttentionSpec(**HEADS)
LATENT = like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")
DRAFT = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1}, dcp_sharded=False)


class Layer:
    """An attention layer of a worker."""

    class Backend:
        """What `get_attn_backend` returns."""

        @staticmethod
        def full_cls_name() -> tuple[str, str]:
            """Return the backend's module and class."""
            return "vllm.v1.attention.backends.flash_attn", "FlashAttentionBackend"

    def get_attn_backend(self) -> type:
        """Return the backend."""
        return self.Backend


class Model:
    """vLLM's ModelConfig: as many KV heads in all layers, or `by_layer`."""

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
    """Return a VllmConfig with worker's layers *names*, and parallel or other fields changed."""
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
    """Return a KVTransferConfig of a connector, or of several."""
    more = {"connectors": [{"kv_connector": child} for child in children]}
    return SimpleNamespace(kv_connector=name, kv_connector_extra_config=more)


def cached(*groups: Any, layout: Any = "LBNHC", **more: Any) -> Any:
    """Return a KVCacheConfig whose layout has been resolved."""
    found = config(*groups, **more)
    found.kv_cache_layout = layout  # type: ignore[attr-defined]
    return found


def test_nothing_is_asked_that_the_configuration_knows() -> None:
    """TP 2 of 4 heads: sizes, heads, layout and backend are read; it is the engine told by hand."""
    layers = ["model.layers.0.attn", "model.layers.1.attn"]
    given = configured(*layers, tensor_parallel_size=2, rank=1)
    engine = vllm.from_vllm(given, cached((layers, FULL)))
    parallel = kvspec.ParallelConfig(tp_size=2)
    by_hand = like.engine_spec(
        config((layers, FULL)), parallel=parallel, total_num_kv_heads=4, layout="NHD"
    )
    assert by_hand == engine
    assert 0 == engine.null_block
    enum = SimpleNamespace(name="LBNHC")
    given.cache_config.kv_cache_layout = enum
    assert engine == vllm.from_vllm(given, cached((layers, FULL), layout=None))


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
def test_interleaving_is_what_vllm_will_have_set(more: dict[str, Any], interleave: int) -> None:
    """NixlConnector by its exact name, left open: the smallest block; else what was configured."""
    defaults = {
        "tensor_parallel_size": 2,
        "decode_context_parallel_size": 2,
        "cp_kv_cache_interleave_size": 4,
        "kv_transfer_config": transfer("NixlConnector"),
    }
    names = "layers.0.attn", "draft.0"
    given = configured(*names, model=Model(heads=2), **{**defaults, **more})
    both = cached((["layers.0.attn"], attrs_block(LATENT, 32)), (["draft.0"], DRAFT))
    engine = vllm.from_vllm(given, both, total_num_kv_heads=1)
    assert interleave == engine.parallel.interleave_size
    assert [True, False] == [group.context_sharded for group in engine.groups]


def attrs_block(spec: Any, size: int) -> Any:
    """Return a spec with another block size."""
    return like.MLAAttentionSpec(block_size=size, head_size=spec.head_size, dtype=spec.dtype)


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
def test_context_ranks_run_over_pcp_first(pcp: int, tp: int, dcp: int, ranks: Any) -> None:
    """VLLM's groups of DCP: PCP that is not shared replicates, and DCP may span it."""
    given = configured(
        "layers.0.attn",
        tensor_parallel_size=tp,
        prefill_context_parallel_size=pcp,
        decode_context_parallel_size=dcp,
    )
    parallel = vllm.from_vllm(given, cached((["layers.0.attn"], LATENT))).parallel
    assert dcp == parallel.context_size
    found = [
        [parallel.context(kvspec.RankId(pcp=row, tp=rank)).rank for rank in range(tp)]
        for row in range(pcp)
    ]
    assert ranks == found


ONE_HEAD = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 1})
TWO_KINDS = [(["layers.0.attn"], ONE_HEAD), (["layers.1.attn"], FULL)]


def heads_of(engine: kvspec.EngineSpec) -> dict[str, int]:
    """Return the KV heads of each layer."""
    return {
        layer: group.spec.of_layer(layer).total_num_kv_heads  # type: ignore[attr-defined]
        for layer, group in engine.homes.items()
    }


def test_heads_come_layer_by_layer() -> None:
    """By the model's own number, layer by layer where vLLM has them, the draft's for a draft."""
    names = "layers.0.attn", "layers.1.attn"
    given = configured(*names, model=Model(by_layer=(2, 8)), tensor_parallel_size=4)
    assert {"layers.0.attn": 2, "layers.1.attn": 8} == heads_of(
        vllm.from_vllm(given, cached(*TWO_KINDS))
    )
    given.model_config = Model(heads=8)
    told = "total_num_kv_heads=None: expected one number for each layer: 'layers.1.attn' and "
    assert f"{told}'layers.0.attn' differ" == words(
        lambda: vllm.from_vllm(given, cached(*TWO_KINDS))
    )
    by_hand = {"layers.0.attn": 2, "layers.1.attn": 8}
    engine = vllm.from_vllm(given, cached(*TWO_KINDS), total_num_kv_heads=by_hand)
    assert by_hand == heads_of(engine)
    given.model_config = Model(heads=12)
    told = "num_kv_heads=1: expected 3: rank 0 of 4 has 3 of the model's 12"
    assert told in words(lambda: vllm.from_vllm(given, cached(TWO_KINDS[0])))


@pytest.mark.parametrize("name", ["draft.attn", "layers.2.attn", "eagle", "marked"])
def test_a_draft_has_its_own_heads(name: str) -> None:
    """A draft is known by its group, its mark, its name, or a number beyond the target's layers."""
    names = "layers.0.attn", name
    spec = like.changed(ONE_HEAD, "is_draft", value=True) if name == "marked" else ONE_HEAD
    both = cached((["layers.0.attn"], LATENT), ([name], spec))
    both.kv_cache_groups[1].is_eagle_group = name == "eagle"
    draft = SimpleNamespace(draft_model_config=Model(heads=2))
    given = configured(*names, model=Model(heads=1), tensor_parallel_size=2,
                       speculative_config=draft)  # fmt: skip
    found = vllm.from_vllm(given, both).groups[1].spec
    assert 2 == found.total_num_kv_heads  # type: ignore[attr-defined]


class ModelArch:
    """vLLM's ModelArchitectureConfig of a model with one number: every layer is the whole model."""

    per_layer_overrides = None

    def __init__(self, heads: int) -> None:
        self.total_num_kv_heads = heads

    def __getitem__(self, _: int) -> ModelArch:
        return self


def arch(heads: int, **text: Any) -> Model:
    """Return a model of two layers with one number of KV heads, and what its own config says."""
    model = Model(heads=heads, **text)
    model.model_arch_config = ModelArch(heads)  # type: ignore[assignment]
    return model


def shared(*shares: int) -> list[Any]:
    """Return what a model whose layers differ says of each of them."""
    return [SimpleNamespace(attention=SimpleNamespace(n_heads_in_group=n)) for n in shares]


UNLIKE: list[tuple[dict[str, Any], str]] = [
    ({"num_key_value_heads": 4, "swa_num_key_value_heads": 8}, "swa_num_key_value_heads is 8"),
    ({"other": {"num_attention_groups": 8}}, "other.num_attention_groups is 8"),
    ({"block_configs": shared(2, 2, 4)}, "block_configs[2].attention.n_heads_in_group is 4"),
]

ALIKE: list[dict[str, Any]] = [
    {"num_key_value_heads": 4, "swa_num_key_value_heads": 4, "num_attention_heads": 32},
    {"block_configs": shared(8, 8)},
    {"kv_heads": None, "n_head_kv": True, "a": {"a": {"a": {"a": {"a": {"kv_heads": 8}}}}}},
]


@pytest.mark.parametrize(("text", "told"), UNLIKE)
def test_one_number_is_not_believed_of_a_model_whose_layers_differ(
    text: dict[str, Any], told: str
) -> None:
    """One head on each of 8 ranks is 4 heads held twice, or 8: a window's layers may have 8."""
    names = ["layers.0.attn", "layers.1.attn"]
    given = configured(*names, model=arch(4, **text), tensor_parallel_size=8)
    both = cached((names[:1], ONE_HEAD), (names[1:], ONE_HEAD))
    said = words(lambda: vllm.from_vllm(given, both))
    assert said.startswith(
        "total_num_kv_heads=None: expected one number for each layer, as 'layers."
    )
    assert f"hf_text_config.{told}, and vLLM's one number for all is 4" in said
    by_hand = dict(zip(names, (4, 8), strict=True))
    assert by_hand == heads_of(vllm.from_vllm(given, both, total_num_kv_heads=by_hand))


@pytest.mark.parametrize("text", ALIKE)
def test_one_number_is_believed_of_a_model_whose_layers_are_alike(text: dict[str, Any]) -> None:
    """What its own config says of KV heads is one number, and vLLM's."""
    given = configured("layers.0.attn", model=arch(4, **text), tensor_parallel_size=8)
    engine = vllm.from_vllm(given, cached((["layers.0.attn"], ONE_HEAD)))
    assert {"layers.0.attn": 4} == heads_of(engine)


def test_a_group_that_is_marked_for_its_draft_has_the_target_s_layers_too() -> None:
    """A target of 8 heads and a draft of 4 have one spec on 8 ranks: neither number is taken."""
    names = ["layers.0.attn", "layers.1.attn"]
    both = cached((names, ONE_HEAD))
    both.kv_cache_groups[0].is_eagle_group = True
    draft = SimpleNamespace(draft_model_config=arch(4))
    given = configured(*names, model=arch(8), tensor_parallel_size=8, speculative_config=draft)
    wanted = "expected one number for each layer: 'layers.0.attn' may be the target's or a draft's"
    assert f"total_num_kv_heads=None: {wanted}" == words(lambda: vllm.from_vllm(given, both))
    draft.draft_model_config = arch(8)
    assert dict.fromkeys(names, 8) == heads_of(vllm.from_vllm(given, both))


def test_kernel_blocks_are_read_from_the_tensors() -> None:
    """Twice as many blocks in memory as in the table: blocks of 8 of 16 tokens."""
    both = cached((["layers.0.attn"], FULL), (["layers.1.attn"], LATENT), layout="LBHNC")
    tensors = {
        "layers.0.attn": np.zeros((12, 2, 8, 16), np.uint16),
        "layers.1.attn": np.zeros((6, 1, 16, 8), np.uint16),
    }
    given = configured(*tensors)
    engine = vllm.from_vllm(given, both, tensors)
    assert [8, None] == [group.kernel_block_size for group in engine.groups]
    assert 3 == len(vllm.rank_cache(engine, kvspec.RankId(), tensors, config=both).regions)
    for blocks in (7, 3, 6 * 3, 0):
        torn = {**tensors, "layers.0.attn": np.zeros((blocks, 2, 8, 16), np.uint16)}
        told = "expected a multiple of the 6 blocks of 16 tokens in the config"
        assert told in words(lambda torn=torn: vllm.from_vllm(given, both, torn))


def test_where_there_is_no_worker_the_backends_are_told() -> None:
    """VLLM's scheduler has made no layers: what a worker says of them is asked for by layer."""
    given, one = configured(), cached((["layers.0.attn"], FULL))
    assert words(lambda: vllm.from_vllm(given, one)).startswith("backends['layers.0.attn']=None")
    assert vllm.from_vllm(given, one, backends=Layer.Backend.full_cls_name())
    given.compilation_config.static_forward_context = {"layers.0.attn": object()}
    told = "static_forward_context['layers.0.attn'].get_attn_backend=None: expected a method"
    assert told == words(lambda: vllm.from_vllm(given, one))


def test_what_a_backend_s_name_leaves_open_is_asked_of_the_layer() -> None:
    """The instructions that CPU attention was built for, and whether an indexer shuffles."""
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
    given = configured()
    made = given.compilation_config.static_forward_context
    made |= {"layers.0.attn": cpu, "layers.0.indexer": indexer}
    formats = [
        group.spec.page_format  # type: ignore[attr-defined]
        for group in vllm.from_vllm(given, both).groups
    ]
    assert ["keys-transposed", "opaque:indexer-shuffled"] == formats
    del cpu.isa
    told = "variants['layers.0.attn']=None: expected one of vec, vec16, amx"
    assert words(lambda: vllm.from_vllm(given, both)).startswith(told)


def of_device(kind: str, shapes: Any, device: Any) -> kvspec.EngineSpec:
    """Return the engine of one state on a type of *device*."""
    given = configured(device_config=SimpleNamespace(device_type=device))
    made = given.compilation_config.static_forward_context
    made["l.0"] = SimpleNamespace(mamba_type=kind, get_attn_backend=lambda: None)
    return vllm.from_vllm(given, cached((["l.0"], state(kind, shapes))))


def test_a_delta_net_s_state_is_its_device_s() -> None:
    """CUDA's kernels keep [values, keys] of a head, a CPU's [keys, values]: both are [8, 8]."""
    shapes = ((3, 48), (2, 8, 8))
    cuda, cpu = (of_device("GDN_ATTN", shapes, each) for each in ("cuda", "cpu"))
    assert cuda == of_device("GDN_ATTN", shapes, None)
    assert cuda == like.engine_spec(config((["l.0"], state("GDN_ATTN", shapes))), layout="LBNHC",
                                    conv_layout="SD", variants="vec")  # fmt: skip
    told = words(lambda: kvspec.plan_transfer(cuda, cpu), kvspec.MismatchError)
    assert "ssm_cpu" in told
    assert kvspec.plan_transfer(cpu, of_device("GDN_ATTN", shapes, "cpu"))
    raw = np.zeros((6, 1, 1, 3 * 48 + 2 * 8 * 8), np.int8)
    caches = [vllm.rank_cache(each, kvspec.RankId(), {"l.0": raw}) for each in (cuda, cpu)]
    bases = [sorted(region.base for region in cache.regions) for cache in caches]
    assert bases[0] == bases[1]
    mamba = [of_device("MAMBA1", ((3, 32), (32, 4)), each) for each in ("cuda", "cpu")]
    assert mamba[0] == mamba[1]
    wanted = "variants['l.0']=5: expected a type of device, such as cuda or cpu"
    assert wanted == words(lambda: of_device("GDN_ATTN", shapes, 5))


FP8 = replace(FULL, dtype="uint8", kv_quant_mode=like.KVQuantMode.FP8_PER_TENSOR)
"""What vLLM has for ``fp8_e4m3`` and ``fp8_e5m2`` alike, on every platform."""

PLATFORMS = [
    ("fp8", "torch.float8_e4m3fn", "float8_e4m3fn"),
    ("fp8_e4m3", "torch.float8_e4m3fnuz", "float8_e4m3fnuz"),
    ("fp8_e5m2", "torch.float8_e4m3fn", "float8_e5m2"),
    ("fp8_per_token_head", "torch.float8_e4m3fn", "float8_e4m3fn"),
]


def fp8(monkeypatch: pytest.MonkeyPatch, cache: Any, usual: str) -> kvspec.EngineSpec:
    """Return the engine of a worker whose layer has a *cache*, on a platform with *usual* fp8."""
    platform = SimpleNamespace(fp8_dtype=lambda: usual)
    monkeypatch.setitem(sys.modules, "vllm.platforms", SimpleNamespace(current_platform=platform))
    given, one = configured("layers.0.attn"), cached((["layers.0.attn"], FP8))
    made = given.compilation_config.static_forward_context
    made["layers.0.attn"].kv_cache_dtype = cache
    engine = vllm.from_vllm(given, one)
    assert engine == vllm.whole_engine(given, [vllm.WorkerInfo.of(given, one)], {})
    return engine


@pytest.mark.parametrize(("cache", "usual", "elements"), PLATFORMS)
def test_which_fp8_a_cache_is_the_layer_and_its_platform_say(
    cache: str, usual: str, elements: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A spec says ``uint8`` of each: between two that differ nothing moves, by name."""
    engine = fp8(monkeypatch, cache, usual)
    assert elements == engine.groups[0].spec.dtype  # type: ignore[attr-defined]
    other = like.engine_spec(
        config((["layers.0.attn"], FP8)), layout="LBNHC", fp8_dtype="float8_e5m2fnuz"
    )
    told = words(lambda: kvspec.plan_transfer(engine, other), kvspec.MismatchError)
    assert "dtype" in told
    assert elements in told


def test_an_fp8_of_which_nobody_says_which_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither a layer without a choice, nor one that its platform has otherwise, is guessed."""
    wanted = (
        "expected the fp8 type of the layer's elements: "
        "kv_cache_groups[0].kv_cache_spec contains only 'fp8'"
    )
    for cache in (None, "auto", "fp8_new", []):
        told = words(lambda cache=cache: fp8(monkeypatch, cache, "torch.float8_e4m3fn"))
        assert f"fp8_dtype['layers.0.attn']=None: {wanted}" == told
    assert wanted in words(lambda: fp8(monkeypatch, "fp8_e5m2", "torch.float8_e4m3fnuz"))
    both = config((["layers.0.attn"], FP8))
    assert wanted in words(lambda: like.engine_spec(both))
    assert wanted in words(lambda: like.engine_spec(both, fp8_dtype="bfloat16"))
    assert wanted in words(lambda: like.engine_spec(both, fp8_dtype={"layers.1.attn": "fp8"}))
    monkeypatch.delitem(sys.modules, "vllm.platforms")
    given = configured("layers.0.attn")
    assert wanted in words(lambda: vllm.from_vllm(given, cached((["layers.0.attn"], FP8))))


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
    """Return the engine of a layer of TurboQuant; *device*: of CUDA, () of others, None unknown."""
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
    given = configured()
    given.compilation_config.static_forward_context["layers.0.attn"] = layer
    return vllm.from_vllm(given, cached((["layers.0.attn"], TURBOQUANT)))


@pytest.mark.parametrize(("cache", "separate_scales", "device", "page"), SLOTS)
def test_how_turboquant_keeps_its_rows_is_asked_of_the_layer_and_its_device(
    cache: str,
    separate_scales: bool,
    device: tuple[int, ...] | None,
    page: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One backend, one spec: scales in each row, or after all rows of a page; keys of either 8."""
    spec = turboquant(monkeypatch, cache, separate_scales, device).groups[0].spec
    assert (page, 20) == (spec.page_format, spec.state_content_bytes)  # type: ignore[attr-defined]


def test_turboquant_of_which_nobody_says_how_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither without an answer of the layer, nor without a platform where the device decides."""
    told = "variants['layers.0.attn']=None: expected one of rows, e4b15, scales apart"
    for cache, separate_scales in (("turboquant_k8v4", False), ("turboquant_4bit_nc", None)):
        said = words(
            lambda cache=cache, separate_scales=separate_scales: turboquant(
                monkeypatch, cache, separate_scales, None
            )
        )
        assert said.startswith(told)


@pytest.mark.parametrize("name", ["mamba_n_groups", "n_groups", "mamba_ngroups"])
def test_a_model_s_groups_have_several_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One group of Mamba2 on each of 2 ranks: replicated, since the model has one."""
    spec = state("mamba2", ((40, 3), (4, 8, 4)))
    given = configured(tensor_parallel_size=2, model=Model(**{name: 1}))
    monkeypatch.setenv("VLLM_SSM_CONV_STATE_LAYOUT", "DS")
    engine = vllm.from_vllm(given, cached((["layers.0.mixer"], spec)))
    units = {part.name: part.units for part in engine.groups[0].spec.parts}
    assert {"conv_x": 64, "conv_b": 4, "conv_c": 4, "ssm": 8} == units
    monkeypatch.delenv("VLLM_SSM_CONV_STATE_LAYOUT")
    short = state("short_conv", ((2, 32),))
    engine = vllm.from_vllm(given, cached((["layers.0.mixer"], short)))
    assert 64 == engine.groups[0].spec.parts[0].units, "row first, vLLM's default"


def test_a_worker_s_number_says_which_rank_it_is() -> None:
    """VLLM's group of an engine is ``arange(pp * pcp * tp).reshape(pp, pcp, tp)``."""
    sizes = {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}
    for number, (pp, pcp, tp) in enumerate(np.ndindex(2, 2, 3)):
        given = configured(tensor_parallel_size=3, rank=number, **sizes)
        assert kvspec.RankId(pp=pp, pcp=pcp, tp=tp) == vllm.worker_rank(given)


def test_the_layers_of_all_stages_are_told_by_their_workers() -> None:
    """Each knows its own; all describe the whole engine, or say how many are missing."""
    names = [f"layers.{number}.attn" for number in range(5)]
    parts = [names[:3], names[3:]]
    sizes: dict[str, Any] = {"model": Model(layers=5), "tensor_parallel_size": 2}
    sizes |= {"pipeline_parallel_size": 2, "prefill_context_parallel_size": 2}
    workers = [
        (configured(*parts[n // 4], rank=n, **sizes), cached((parts[n // 4], FULL)))
        for n in range(8)
    ]
    told = [vllm.WorkerInfo.of(*both) for both in workers]
    halves = [cached((part, FULL)) for part in parts]
    whole = vllm.from_vllm(configured(*names, **sizes), halves)
    assert [whole] * 8 == [vllm.whole_engine(given, told, {}) for given, _ in workers]
    wanted = "workers='7 workers': expected all 8 of the engine"
    assert wanted == words(lambda: vllm.whole_engine(workers[0][0], told[:7], {}))


def test_pipeline_stages_have_the_layers_of_vllm_s_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """5 layers on 2 stages: 3 and 2, or as the environment says; others are refused by name."""
    names = [f"layers.{number}.attn" for number in range(5)]
    given = configured(*names, model=Model(layers=5), pipeline_parallel_size=2)
    halves = [cached((names[:3], LATENT)), cached((names[3:], LATENT))]
    assert {0: 3, 1: 2} == {
        stage: len(found) for stage, found in vllm.from_vllm(given, halves).by_stage(names).items()
    }
    told = "kv_cache_config[0]='layers.3.attn': expected layers 0..2: those of stage 0"
    assert told == words(lambda: vllm.from_vllm(given, halves[::-1]))
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "2,3")
    assert "'layers.2.attn': expected layers 0..1" in words(lambda: vllm.from_vllm(given, halves))
    for partition in ("2,2", "5", "2,x", "-1,6", ""):
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
        told = f"VLLM_PP_LAYER_PARTITION={partition!r}: expected 2 numbers of layers with the sum 5"
        assert told == words(lambda: vllm.from_vllm(given, halves))


@pytest.mark.parametrize(
    "field",
    ["parallel_config", "model_config", "cache_config", "compilation_config", "kv_transfer_config"],
)
def test_a_configuration_with_one_thing_wrong_is_read_or_refused(field: str) -> None:
    """Any field missing, or anything in its place: no other error."""
    one = cached((["layers.0.attn"], ONE_HEAD), layout=None)
    for value in (None, 5, "x", (), {}, object()):
        given = configured("layers.0.attn", tensor_parallel_size=4, decode_context_parallel_size=2)
        setattr(given, field, value)
        with pytest.raises(kvspec.SpecError):
            vllm.from_vllm(given, one)


MAMBA = state("mamba1", ((8, 3), (8, 4)), mamba_cache_mode="align")
BOTH = config((["layers.0"], FULL), (["draft.0"], DRAFT), (["layers.1"], MAMBA))


WHOLE, DRAFTS = [0, 0, 5, 6, 1, 2, 3], [7, 8, 9, 10, 11, 12, 13]
"""Blocks of 16 for 100 tokens."""


def tables(*ids: Any, count: Any = 100, spec: Any = MAMBA, **given: Any) -> Any:
    """Read the block tables of a request over full attention, a draft and a state of 64 tokens."""
    both = config((["layers.0"], FULL), (["draft.0"], DRAFT), (["layers.1"], spec))
    return vllm.block_tables(like.engine_spec(BOTH, **given), both, ids, count)


def test_a_list_s_place_says_its_group() -> None:
    """Null blocks stay in place; of a state the one block that holds it; an excluded group goes."""
    found = tables(WHOLE, DRAFTS, [0, 9, 3])
    assert {
        "group0": kvspec.BlockTable(WHOLE),
        "group1": kvspec.BlockTable(DRAFTS),
        "group2": kvspec.BlockTable([9]),
    } == found
    none = state("mamba1", ((8, 3), (8, 4)))
    assert kvspec.BlockTable([4]) == tables(WHOLE, DRAFTS, [4, 5, 6], spec=none)["group2"]
    assert kvspec.BlockTable([]) == tables([1], [2], [], count=0)["group2"]
    sparse = config((["layers.0"], FULL), (["draft.0"], like.RSWASpec(**HEADS)))
    engine = like.engine_spec(sparse, excluded=["draft.0"])
    assert {"group0"} == vllm.block_tables(engine, sparse, ([1], [2]), 9).keys()


MODE = "kv_cache_config.kv_cache_groups[2].kv_cache_spec.mamba_cache_mode"


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda: tables(WHOLE, DRAFTS), "block_ids='2 lists': expected one for each of 3 groups"),
        (lambda: tables(WHOLE, DRAFTS, [0, 0]),
         "block_ids['group2']=[0, 0]: expected a block at place 1, with the state after 100 tokens"),
        (lambda: tables(WHOLE, DRAFTS, [3]),
         "block_ids['group2']=[3]: expected a block at place 1, with the state after 100 tokens"),
        (lambda: tables(WHOLE, DRAFTS, [3], spec=like.changed(MAMBA, "mamba_cache_mode", "all")),
         f"{MODE}='all': expected 'none' or 'align'"),
        (lambda: tables(WHOLE, DRAFTS, [3], count=-1), "num_tokens=-1: expected an int >= 0"),
        (lambda: tables(WHOLE[2:], DRAFTS, [0, 9]),
         "block_ids['group0']=[5, 6, 1, 2, 3]: expected 7 ids for 100 tokens, null blocks in place"),
        (lambda: tables(WHOLE, DRAFTS[:2], [0, 9]),
         "block_ids['group1']=[7, 8]: expected 7 ids for 100 tokens, null blocks in place"),
        (lambda: tables(WHOLE, "ab", [3]), "block_ids='ab': expected a sequence of ints"),
        (lambda: vllm.block_tables(None, BOTH, [], 1), "engine=None: expected an EngineSpec"),
        (lambda: vllm.block_tables(like.engine_spec(BOTH), BOTH, 5, 1),
         "block_ids=5: expected a sequence of lists of ids"),
    ],
)  # fmt: skip
def test_other_tables_are_refused_in_words(call: Any, told: str) -> None:
    """A list for each group, from which no null block is missing, and a state's block."""
    assert told == words(call)
