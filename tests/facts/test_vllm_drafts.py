"""The layers of a draft of vLLM, and the tokens behind their keys."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import vllm_like as like
from refused import refusal

import kvspec
from kvspec.adapters import vllm
from kvspec.adapters.vllm.drafts import LOOKAHEAD, WITHOUT_CACHE, Draft, draft_of, is_of_draft

FULL = like.FullAttentionSpec(**like.HEADS)
ONE_HEAD = like.FullAttentionSpec(**{**like.HEADS, "num_kv_heads": 1})
LATENT = like.MLAAttentionSpec(block_size=16, head_size=8, dtype="bfloat16")


def model(heads: int = 4, layers: int = 2) -> Any:
    """Return a ModelConfig."""
    return SimpleNamespace(
        get_total_num_kv_heads=lambda: heads,
        get_total_num_hidden_layers=lambda: layers,
        hf_text_config=None,
    )


def configured(target: Any, *, tp: int = 1, pp: int = 1, draft: Any = None) -> Any:
    """Return the VllmConfig of an engine with a draft."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(tensor_parallel_size=tp, pipeline_parallel_size=pp, rank=0),
        model_config=target,
        cache_config=SimpleNamespace(kv_cache_layout="LBNHC"),
        speculative_config=SimpleNamespace(draft_model_config=draft or target),
    )


# The names of a draft's layers that vLLM 0.32 made for tiny models, and the target's layers.
NAMES = {
    "model.layers.3.self_attn.attn": 3,  # EAGLE, EAGLE3, DFlash and DSpark beside Llama, Qwen3
    "draft_model.model.layers.0.self_attn.attn": 3,  # any model as a draft
    "mtp.layers.0.self_attn.attn": 8,  # Qwen3-Next, Qwen3.5, EXAONE-MoE
    "model.mtp.layers.0.self_attn.attn": 8,  # MiMo-V2
    "mtp.layers.8.self_attn.indexer.raw_key_cache": 8,  # Qwen4
    "model.layers.8.self_attn.indexer.k_cache": 8,  # DeepSeek-V3.2
}


@pytest.mark.parametrize(("name", "count"), NAMES.items())
def test_layer_of_a_draft_is_known_by_its_name(name: str, count: int) -> None:
    assert is_of_draft(name, count)
    assert not is_of_draft("model.layers.2.self_attn.attn", count)


def speculative(method: object, **more: Any) -> Any:
    """Return a config with a draft."""
    draft = SimpleNamespace(model="org/draft", revision="7")
    config = {"method": method, "draft_model_config": draft, **more}
    return SimpleNamespace(speculative_config=SimpleNamespace(**config))


@pytest.mark.parametrize(("method", "lookahead"), LOOKAHEAD.items())
def test_draft_with_a_cache_is_named_with_its_method(method: str, lookahead: int) -> None:
    draft = draft_of(speculative(method))
    assert Draft(method, "org/draft", "7", lookahead) == draft
    assert f"{method} org/draft@7" == str(draft)


@pytest.mark.parametrize("method", WITHOUT_CACHE)
def test_method_without_a_cache_is_no_draft(method: str) -> None:
    assert None is draft_of(speculative(method))
    assert None is draft_of(SimpleNamespace(speculative_config=None))


@pytest.mark.parametrize("method", ["custom_class", "extract_hidden_states", None, 5])
def test_unknown_method_is_refused(method: object) -> None:
    error = refusal(lambda: draft_of(speculative(method)))
    assert ("speculative_config.method", method) == (error.field, error.value)


def test_several_modules_of_mtp_are_refused() -> None:
    several = speculative("mtp", use_multi_module_mtp=lambda: True)
    error = refusal(lambda: draft_of(several))
    assert ("speculative_config.method", "mtp") == (error.field, error.value)
    one = speculative("mtp", use_multi_module_mtp=lambda: False)
    assert 1 == draft_of(one).lookahead  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "name", ["mtp.layers.0.attn", "draft_model.model.layers.0.attn", "model.layers.4.attn"]
)
def test_draft_is_on_the_last_stage_whatever_its_number(name: str) -> None:
    """A number that begins at 0 again is not that of a layer of the first stage."""
    names = [f"model.layers.{number}.attn" for number in range(4)]
    stages = [[*names[:2]], [*names[2:], name]]
    halves = [like.config((layers, LATENT)) for layers in stages]
    engine = vllm.from_vllm(configured(model(layers=4), pp=2), halves, backends=like.FLASH)
    assert 1 == engine.stage_of[name]


def test_name_of_two_layers_is_refused() -> None:
    """The number of EAGLE's layer follows from its own stage in vLLM 0.32, as a target layer's."""
    name = "model.layers.{}.attn"
    stages = [[name.format(0), name.format(1)], [name.format(2), name.format(1)]]
    configs = [like.config((layers, LATENT)) for layers in stages]
    error = refusal(lambda: like.engine_spec(configs, parallel=kvspec.ParallelConfig(pp_size=2)))
    assert "stages" == error.field
    assert "model.layers.1.attn" in error.expected


def test_draft_of_mtp_has_the_heads_of_its_own_config() -> None:
    """Its group is not marked, and its number is that of a target layer."""
    names = "layers.0.attn", "mtp.layers.0.attn"
    vllm_config = configured(model(heads=1), tp=2, draft=model(heads=2))
    both = like.config((names[:1], LATENT), (names[1:], ONE_HEAD))
    spec = vllm.from_vllm(vllm_config, both, backends=like.FLASH).groups[1].spec
    assert 2 == spec.total_num_kv_heads  # type: ignore[attr-defined]


@pytest.mark.parametrize("wide", [False, True])
def test_engine_without_the_draft_is_refused_by_its_layer(*, wide: bool) -> None:
    """The draft is in the group of its target, or in a group of its own class."""
    target, draft = "model.layers.0.attn", "model.layers.1.attn"
    spec = FULL if wide else LATENT
    specs = like.UniformTypeKVCacheSpecs(
        block_size=16, kv_cache_specs={target: LATENT, draft: spec}
    )
    engines = [
        like.engine_spec(like.config(([target, draft], specs))),
        like.engine_spec(like.config(([target], LATENT))),
    ]
    for producer, consumer in (engines, engines[::-1]):
        error = refusal(
            lambda a=producer, b=consumer: kvspec.plan_transfer(a, b), kvspec.MismatchError
        )
        assert [f"{draft}.layer"] == [mismatch.field for mismatch in error.mismatches]
