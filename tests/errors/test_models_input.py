"""The configs that `from_config` and the catalogue accept, and their errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import LLAMA
from refused import check_rejected, refusal

from kvspec import EngineSpec, models
from kvspec.models import catalogue
from kvspec.models.architectures import ARCHITECTURES


def spec_of(config: dict[str, Any], group: str = "full", **options: Any) -> Any:
    """Return the spec of one group of *config*."""
    (named,) = (g for g in models.from_config(config, **options) if g.name == group)
    return named.spec


# Element types


def contents(name: str, group: str, **options: Any) -> dict[str, int]:
    """Return the content bytes of a group's parts, by name."""
    parts = spec_of(catalogue.config(name) | options.pop("also", {}), group, **options).parts
    return {part.name: part.content_bytes for part in parts}


def test_dtype_is_the_argument_or_the_one_of_the_config() -> None:
    """The key has two spellings, and may be outside text_config."""
    assert "float16" == spec_of(catalogue.config("Llama-2-7B")).dtype
    assert "float32" == spec_of(catalogue.config("Llama-2-7B"), dtype="float32").dtype
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert "float16" == spec_of({**config, "dtype": "float16"}).dtype
    nested = {"model_type": "llava", "text_config": {**config, "model_type": "llama"}}
    assert "float16" == spec_of({**nested, "torch_dtype": "float16"}).dtype


def test_dtype_of_8_bits_does_not_change_states() -> None:
    """Engines quantise the attention cache, not recurrent states."""
    name, fp8 = "Qwen3-Next-80B-A3B", "float8_e4m3fn"
    assert {"k": 256, "v": 256} == contents(name, "full", dtype=fp8)
    assert contents(name, "gated_delta_net") == contents(name, "gated_delta_net", dtype=fp8)


def test_dtype_of_8_bits_needs_a_declared_dtype_for_states() -> None:
    """Without a dtype in the config, nothing describes the states. Other models do not need it."""
    config = catalogue.config("Qwen3-Next-80B-A3B")
    undeclared = {key: value for key, value in config.items() if not key.endswith("dtype")}
    error = refusal(lambda: models.from_config(undeclared, dtype="fp8"))
    assert ("dtype", None) == (error.field, error.value)
    assert models.from_config(config, dtype="float16") == models.from_config(
        undeclared, dtype="float16"
    )
    assert "float8_e4m3fn" == spec_of({**LLAMA, "torch_dtype": None}, dtype="fp8").dtype


def test_temporal_state_may_have_its_own_dtype() -> None:
    """It comes from the argument. VLLM and SGLang read different keys of the config."""
    plain = contents("Bamba-9B", "mamba")
    wide = contents("Bamba-9B", "mamba", ssm_dtype="float32")
    assert plain | {"ssm": 2 * plain["ssm"]} == wide
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        also = {key: "float32"}
        assert wide == contents("Bamba-9B", "mamba", also=also, ssm_dtype="float32")
        config = catalogue.config("Bamba-9B") | also
        check_rejected(lambda: models.from_config(config), key, "float32", "ssm_dtype")  # noqa: B023


# Errors


@pytest.mark.parametrize(
    ("change", "field", "value", "word"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers", None, 1),
        ({"num_hidden_layers": True}, "num_hidden_layers", True, 1),
        ({"num_attention_heads": 0}, "num_attention_heads", 0, 1),
        ({"num_key_value_heads": "2"}, "num_key_value_heads", "2", 1),
        ({"num_key_value_heads": [2, 1]}, "num_key_value_heads", [2, 1], "int"),
        ({"hidden_size": 255}, "hidden_size", 255, "num_attention_heads"),
        ({"head_dim": 0}, "head_dim", 0, 1),
        ({"torch_dtype": None}, "dtype", None, "config"),
        ({"torch_dtype": "int4"}, "dtype", "int4", "float16"),
        ({"layer_types": ["full_attention"]}, "layer_types", ["full_attention"], 2),
        ({"layer_types": ["full_attention", "odd"]}, "layer_types", "odd", "full_attention"),
        (
            {"layer_types": ["linear_attention"] * 2},
            "layer_types",
            ["linear_attention"] * 2,
            "LlamaForCausalLM",
        ),
        ({"layer_types": ["mamba"] * 2}, "layer_types", "mamba", "full_attention"),
        (
            {"layer_types": ["sliding_attention"] * 2},
            "layer_types",
            ["sliding_attention"] * 2,
            "engines",
        ),
        (
            {
                "architectures": ["Lfm3ForCausalLM"],
                "head_dim": 64,
                "layer_types": ["sliding_attention"] * 2,
            },
            "sliding_window",
            None,
            "int",
        ),
        ({"architectures": ["BambaForCausalLM"]}, "attn_layer_indices", None, "indices"),
        (
            {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [2]},
            "attn_layer_indices",
            [2],
            "num_hidden_layers",
        ),
        (
            {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-"},
            "hybrid_override_pattern",
            "M*-",
            "num_hidden_layers",
        ),
        (
            {
                "architectures": ["JambaForCausalLM"],
                "attn_layer_period": 4,
                "attn_layer_offset": 4,
            },
            "attn_layer_offset",
            4,
            "attn_layer_period",
        ),
        (
            {"architectures": ["Qwen3ForCausalLM"], "layer_types": ["sliding_attention"] * 2},
            "use_sliding_window",
            False,
            "layer_types",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1]},
            "no_rope_layers",
            [1],
            "num_hidden_layers",
        ),
    ],
)
def test_config_with_wrong_field_is_rejected(
    change: dict[str, Any], field: str, value: object, word: object
) -> None:
    """The error names the field as the config does."""
    check_rejected(lambda: models.from_config({**LLAMA, **change}), field, value, word)


def test_error_names_an_alias_as_the_config_spells_it() -> None:
    """A GPT-2 config has n_layer, so the error names n_layer."""
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 0, "torch_dtype": "bfloat16"}
    check_rejected(lambda: models.from_config(config), "n_layer", 0, 1)


def test_error_about_unknown_architecture_lists_the_known_ones() -> None:
    """A known model_type does not excuse an unknown class."""
    config = {**LLAMA, "architectures": ["LlamaForEagle"], "model_type": "llama"}
    error = refusal(lambda: models.from_config(config))
    assert "architectures" == error.field
    assert "LlamaForEagle" in str(error.value)
    assert all(name in error.expected for name in models.architectures())
    check_rejected(lambda: models.from_config({}), "model_type", None)


def test_architecture_names_are_unique() -> None:
    """Each name belongs to one row of the table."""
    names = [name for row in ARCHITECTURES for name in row.names]
    assert sorted(set(names)) == sorted(names)


# Sources


def test_from_config_reads_a_file_or_its_folder(tmp_path: Path) -> None:
    """A path may name config.json or the folder that contains it."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    groups = models.from_config(LLAMA)
    assert groups == models.from_config(file) == models.from_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "word"), [("{", "readable"), ("[" * 200_000, "readable"), ("[]", "object")], ids=len
)
def test_from_config_rejects_file_without_an_object(tmp_path: Path, text: str, word: str) -> None:
    """The value of the error is the path."""
    file = tmp_path / "config.json"
    file.write_text(text)
    check_rejected(lambda: models.from_config(tmp_path), "config", str(file), word)


def test_from_config_rejects_missing_file_and_other_types() -> None:
    """A config is a dict, or the path of a file that exists."""
    check_rejected(lambda: models.from_config(7), "config", 7, "dict")  # type: ignore[arg-type]
    path = "no/such/config.json"
    check_rejected(lambda: models.from_config(path), "config", path, "readable")


# The catalogue


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_of_the_catalogue_makes_an_engine(name: str) -> None:
    """Each entry is complete: its groups need no further value."""
    groups = models.from_config(catalogue.config(name))
    assert groups == EngineSpec(groups=groups).groups
    assert catalogue.repository(name).count("/") == 1


def test_catalogue_has_every_kind_of_group() -> None:
    """Short convolutions are the exception: no entry has them."""
    kinds = {
        group.name
        for name in catalogue.names()
        for group in models.from_config(catalogue.config(name))
    }
    expected = {"full", "mla", "sliding_window", "chunked_local", "mamba", "gated_delta_net"}
    assert expected == kinds
    assert catalogue.DEFAULT in catalogue.names()


def test_config_of_the_catalogue_is_a_copy() -> None:
    """A change that the caller makes does not change the catalogue."""
    config = catalogue.config("gemma-3-4b")
    text: Any = config["text_config"]
    text["num_hidden_layers"] = 1
    assert config != catalogue.config("gemma-3-4b")


def test_catalogue_accepts_names_and_repositories() -> None:
    """Upper and lower case are equal."""
    config = catalogue.config("Qwen3-0.6B")
    assert config == catalogue.config("qwen3-0.6b") == catalogue.config("Qwen/Qwen3-0.6B")


def test_error_about_unknown_model_lists_close_names_first() -> None:
    """It lists all names after the close ones, so that the next attempt is right."""
    error = refusal(lambda: catalogue.config("Qwen3-0.6"))
    assert ("model", "Qwen3-0.6") == (error.field, error.value)
    requirement = error.expected or error.rule
    assert all(name in requirement for name in catalogue.names())
    assert requirement.index("Qwen3-0.6B") < requirement.index("Llama")
    other = refusal(lambda: catalogue.config("\N{SECTION SIGN}"))
    assert (other.expected or other.rule).index("Llama") < (other.expected or other.rule).index(
        "Qwen"
    )
