"""The vLLM adapter reads the meaning of keys from the modules around the attention layers."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import pytest
import vllm_like as like

import kvspec
from kvspec import KeyContent
from kvspec.adapters.field_reader import FieldReader
from kvspec.adapters.vllm.config import read_config
from kvspec.adapters.vllm.key_contents import key_contents_of, scales_of
from kvspec.adapters.vllm.worker_side import Settings

torch = pytest.importorskip("torch")

HALVES = KeyContent(rotary="halves", rotary_size=64)


class Layer(torch.nn.Module):  # type: ignore[misc]
    """An attention layer as vLLM constructs it."""

    kv_cache_dtype = "auto"


class Rotary(torch.nn.Module):  # type: ignore[misc]
    """A rotary embedding with the attributes that vLLM's have."""

    def __init__(self, head_size: int, rotary_dim: int, **more: Any) -> None:
        super().__init__()
        self.head_size, self.rotary_dim = head_size, rotary_dim
        for name, value in more.items():
            setattr(self, name, value)


class Parent(torch.nn.Module):  # type: ignore[misc]
    """The module of a model around an attention layer."""

    def __init__(self, layer: Layer, **more: Any) -> None:
        super().__init__()
        self.attn = layer
        for name, value in more.items():
            setattr(self, name, value)


# The adapters know classes by their names. This one applies its rotary embedding if it has one.
Parent.__module__, Parent.__qualname__ = "vllm.model_executor.models.llama", "LlamaAttention"


class Exaone4Attention(Parent):
    """A module that applies its rotary embedding in some layers only."""

    __module__ = "vllm.model_executor.models.exaone4"


class Unknown(Parent):
    """A module of a class that the adapters do not know."""


def full(head_size: int = 64) -> Any:
    """Return vLLM's spec of a layer with keys and values."""
    return like.FullAttentionSpec(
        block_size=16, num_kv_heads=2, head_size=head_size, dtype="float32"
    )


def latent() -> Any:
    """Return vLLM's spec of a layer of MLA."""
    return like.MLAAttentionSpec(block_size=16, num_kv_heads=1, head_size=576, dtype="float32")


def read(layer: object, spec: Any) -> tuple[FieldReader, Any]:
    """Return the VllmConfig and the KVCacheConfig of a worker with one layer."""
    context = SimpleNamespace(static_forward_context={"layers.0.attn": layer})
    fields = FieldReader("vllm_config", SimpleNamespace(compilation_config=context))
    return fields, [read_config(FieldReader("", like.config((["layers.0.attn"], spec))))]


@pytest.mark.parametrize(
    ("spec", "modules", "content"),
    [
        (full(), {"rotary_emb": Rotary(64, 64, is_neox_style=True)}, HALVES),
        (
            full(),
            {"rotary_emb": Rotary(64, 32, is_neox_style=False), "k_norm": torch.nn.Identity()},
            KeyContent(rotary="pairs", rotary_size=32, normalized=True),
        ),
        (full(), {"rotary_emb": None}, KeyContent(rotary="none")),
        (
            latent(),
            {
                "rotary_emb": Rotary(64, 64, is_neox_style=False),
                "kv_a_layernorm": torch.nn.Identity(),
            },
            KeyContent(rotary="pairs", rotary_start=512, rotary_size=64, normalized=True),
        ),
        # The module keeps its rotary embedding elsewhere, or rotates a part of the key that only
        # its own code knows.
        (full(), {}, None),
        (full(192), {"rotary_emb": Rotary(64, 64, is_neox_style=True)}, None),
        (full(), {"rotary_emb": Rotary(64, 64)}, None),
    ],
)
def test_key_content_is_that_of_the_module_around_the_layer(
    spec: Any, modules: dict[str, Any], content: KeyContent | None
) -> None:
    layer = Layer()
    parent = Parent(layer, **modules)
    found = key_contents_of(*read(layer, spec))
    assert ({} if content is None else {"layers.0.attn": content}) == found
    del parent


def test_layer_with_a_recurrent_state_inside_a_module_has_no_key_content() -> None:
    """Its spec has no `head_size`, so the engine would not start if it was read."""
    layer = Layer()
    parent = Parent(layer, rotary_emb=None)
    assert {} == key_contents_of(*read(layer, like.state("short_conv", ((2, 64),))))
    del parent


def table_of(frequencies: Any, magnitude: float = 1.0, rows: int = 8) -> Any:
    """Return the cosines and the sines of the first positions."""
    angles = torch.arange(rows)[:, None] * torch.tensor(frequencies)[None]
    return torch.cat((angles.cos(), angles.sin()), dim=-1) * magnitude


class Tabled(Rotary):
    """A rotary embedding that keeps a coarse table, as vLLM's do."""

    def __init__(self, *frequencies: float, magnitude: float = 1.0, **more: Any) -> None:
        size = 2 * len(frequencies)
        super().__init__(size, size, is_neox_style=True, **more)
        self.angles, self.magnitude = frequencies, magnitude
        self.cos_sin_cache = self._compute_cos_sin_cache().to(torch.bfloat16)

    def _compute_cos_sin_cache(self) -> Any:
        return table_of(self.angles, self.magnitude)


class Phi3LongRoPEScaledRotaryEmbedding(Rotary):
    """LongRoPE with the attributes of vLLM's class. SGLang's has no `use_long_rope`."""

    def __init__(self, **more: Any) -> None:
        limits = {"max_position_embeddings": 64, "original_max_position_embeddings": 16}
        factors = {"short_factor": [1.0, 1.0], "long_factor": [4.0, 4.0]}
        sizes = {"short_mscale": 1.5, "long_mscale": 1.5}
        super().__init__(4, 4, **(limits | factors | sizes | more))

    def _compute_inv_freq(self, factors: list[float]) -> Any:
        return 1 / (torch.tensor(factors) * torch.tensor([1.0, 0.1]))


def content_with(rotary: Any, **modules: Any) -> KeyContent:
    """Return what is stated of a layer whose module has *rotary*."""
    layer = Layer()
    parent = Parent(layer, rotary_emb=rotary, **modules)
    (found,) = key_contents_of(*read(layer, full(rotary.head_size))).values()
    del parent
    return found


def test_frequencies_are_those_of_the_table_that_the_module_computes() -> None:
    """The kept table is too coarse."""
    found = content_with(Tabled(1.0, 0.03, magnitude=1.25))
    assert found.frequencies == pytest.approx((1.0, 0.03), rel=1e-6)
    assert found.magnitude == pytest.approx(1.25, rel=1e-6)


def test_table_that_the_module_does_not_compute_is_refused() -> None:
    rotary = Tabled(1.0, 0.03)
    rotary.cos_sin_cache = table_of((1.0, 0.3))
    with pytest.raises(kvspec.SpecError) as caught:
        content_with(rotary)
    assert caught.value.field.endswith("rotary_emb.cos_sin_cache")


def test_longrope_has_the_frequencies_of_the_factors_that_vllm_has_chosen() -> None:
    contents = [
        content_with(Phi3LongRoPEScaledRotaryEmbedding(use_long_rope=long))
        for long in (False, True)
    ]
    producer, consumer = (
        kvspec.EngineSpec(
            groups=[
                kvspec.KVCacheGroup(
                    name="full",
                    layers=["layers.0"],
                    spec=kvspec.FullAttentionSpec(
                        block_size=16, total_num_kv_heads=2, head_size=4, dtype="float32",
                        key_content=content,
                    ),
                )
            ]
        )
        for content in contents
    )  # fmt: skip
    assert not kvspec.mismatches(producer, producer)
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(producer, consumer)
    (mismatch,) = caught.value.mismatches
    assert mismatch.field == "layers.0.key_content.frequencies[0]"
    assert mismatch.producer == pytest.approx(4 * mismatch.consumer)


@pytest.mark.parametrize("limit", [16, 64])
def test_longrope_that_chooses_factors_by_the_prompt_is_refused(limit: int) -> None:
    """If no prompt can be long, it has only the short factors."""
    rotary = Phi3LongRoPEScaledRotaryEmbedding(max_position_embeddings=limit)
    if limit == 16:
        assert content_with(rotary).frequencies == pytest.approx((1.0, 10.0))
        return
    with pytest.raises(kvspec.SpecError) as caught:
        content_with(rotary)
    assert caught.value.value == "Phi3LongRoPEScaledRotaryEmbedding"


def test_false_in_place_of_a_norm_is_no_norm() -> None:
    """The class Qwen2Attention of vLLM has a flag with the name of a norm."""
    rotary = Rotary(64, 64, is_neox_style=True)
    assert content_with(rotary, qk_norm=False) == HALVES


@pytest.mark.parametrize(
    ("window", "everywhere", "content"),
    [
        (None, True, KeyContent(rotary="pairs", rotary_size=64)),
        (32, False, KeyContent(rotary="pairs", rotary_size=64)),
        (None, False, KeyContent(rotary="none")),
        (None, None, None),
    ],
)
def test_key_content_of_a_layer_that_does_not_rotate_is_none(
    window: Any, everywhere: Any, content: Any
) -> None:
    """To permute its keys from pairs to halves would be a silent error."""
    layer, fields = Layer(), {"sliding_window": window, "apply_rope_all_layers": everywhere}
    if everywhere is None:
        del fields["apply_rope_all_layers"]  # The condition is unknown.
    parent = Exaone4Attention(layer, rotary_emb=Rotary(64, 64, is_neox_style=False), **fields)
    found = key_contents_of(*read(layer, full()))
    assert ({} if content is None else {"layers.0.attn": content}) == found
    del parent


def test_key_content_of_a_module_of_an_unknown_class_has_to_be_configured() -> None:
    """It may have a rotary embedding that it does not apply. The refusal names the setting."""
    layer = Layer()
    parent = Unknown(layer, rotary_emb=Rotary(64, 64, is_neox_style=True))
    found = key_contents_of(*read(layer, full()))
    assert {} == found
    with pytest.raises(kvspec.SpecError) as caught:
        engine(found, full())
    assert "key_content['layers.0.attn']" == caught.value.field
    assert "configure key_content" in str(caught.value)
    assert HALVES == engine(HALVES, full()).groups[0].spec.key_content  # type: ignore[attr-defined]
    del parent


def test_key_content_of_a_layer_in_two_modules_is_unknown() -> None:
    """The modules may rotate its keys in different ways."""
    layer = Layer()
    parents = [Parent(layer, rotary_emb=Rotary(64, 64, is_neox_style=neox)) for neox in (0, 1)]
    assert {} == key_contents_of(*read(layer, full()))
    del parents


def test_search_for_modules_disturbs_no_other_thread() -> None:
    """`tuple` raises SystemError if another thread has taken a reference to the tuple it fills."""
    layer, going, errors = Layer(), [True], list[BaseException]()
    parent = Parent(layer, rotary_emb=Rotary(64, 64, is_neox_style=True))

    def work() -> None:
        try:
            while going:
                tuple(number for number in range(2000) if number % 3)
        except SystemError as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    for _ in range(20):
        assert {"layers.0.attn": HALVES} == key_contents_of(*read(layer, full()))
    going.clear()
    thread.join()
    assert [] == errors
    del parent


def engine(contents: Any, *specs: Any, scales: Any = None) -> kvspec.EngineSpec:
    """Return the engine with one group of one layer for each of *specs*."""
    names = [f"layers.{number}.attn" for number in range(len(specs))]
    groups = [([name], spec) for name, spec in zip(names, specs, strict=True)]
    return like.engine_spec(like.config(*groups), key_content=contents, scales=scales)


def test_engine_requires_the_meaning_of_each_layer_with_keys() -> None:
    with pytest.raises(kvspec.SpecError) as caught:
        engine({"layers.0.attn": HALVES}, full(), full())
    assert "key_content['layers.1.attn']" == caught.value.field
    assert None is engine(None, full()).groups[0].spec.key_content  # type: ignore[attr-defined]


def test_layers_of_one_group_may_differ_in_meaning() -> None:
    """Some layers of SmolLM3 have no positions, and all are in one group."""
    names = ["layers.0.attn", "layers.1.attn"]
    contents = {names[0]: HALVES, names[1]: KeyContent(rotary="none")}
    both = like.engine_spec(like.config((names, full())), key_content=contents)
    (group,) = both.groups
    assert contents == {name: group.spec.of_layer(name).key_content for name in names}  # type: ignore[attr-defined]


def test_engines_with_other_scales_do_not_fit() -> None:
    one, other = (engine(HALVES, full(), scales={"layers.0.attn": (s, 1.0)}) for s in (0.5, 0.25))
    (found,) = kvspec.mismatches(one, other)
    assert "layers.0.attn.scales_digest" == found.field


@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2", "nvfp4", "nvfp4_4over6"])
def test_scales_are_those_of_quantised_layers(dtype: str) -> None:
    layer = Layer()
    assert {} == scales_of(*read(layer, full()))
    layer.kv_cache_dtype = dtype
    layer._k_scale, layer._v_scale = torch.tensor(0.5), torch.tensor([0.25])
    assert {"layers.0.attn": (0.5, 0.25)} == scales_of(*read(layer, full()))


@pytest.mark.parametrize("dtype", ["fp8_ds_mla", "nvfp4_ds_mla"])
def test_layer_whose_rows_contain_all_scales_has_no_others(dtype: str) -> None:
    """The layers of DeepSeek V4 have no `_k_scale`."""
    layer = Layer()
    layer.kv_cache_dtype = dtype
    assert {} == scales_of(*read(layer, full()))


@pytest.mark.parametrize(
    ("name", "value"),
    [("calculate_kv_scales", True), ("_k_scale", torch.ones(2)), ("_v_scale", None)],
)
def test_scales_that_are_not_one_number_are_refused(name: str, value: object) -> None:
    layer = Layer()
    layer.kv_cache_dtype, layer._k_scale, layer._v_scale = "fp8", 1.0, 1.0
    setattr(layer, name, value)
    with pytest.raises(kvspec.SpecError) as caught:
        scales_of(*read(layer, full()))
    assert caught.value.field.endswith(name)


@pytest.mark.parametrize("value", [{}, {"rotary_size": 2}, {"rotary": "pairs", "x": 1}, "halves"])
def test_key_content_setting_must_have_the_fields_of_a_key_content(value: object) -> None:
    with pytest.raises(kvspec.SpecError) as caught:
        Settings(model="m", key_content=value)  # type: ignore[arg-type]
    assert "key_content" in caught.value.field


def test_key_content_setting_is_the_meaning_of_all_layers() -> None:
    fields = {"rotary": "halves", "rotary_size": 64}
    assert HALVES == Settings(model="m", key_content=fields).key_content  # type: ignore[arg-type]
