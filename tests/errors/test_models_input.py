"""What `from_config` and the catalogue accept, and how they refuse the rest."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from builders import LLAMA

from kvspec import EngineSpec, SpecError, models
from kvspec.models import catalogue
from kvspec.models.architectures import ROWS


def spec_of(config: dict[str, Any], group: str = "full", **options: Any) -> Any:
    """Return the spec of one group of *config*."""
    (found,) = (g for g in models.from_config(config, **options) if g.name == group)
    return found.spec


# Element types


def contents(name: str, group: str, **options: Any) -> dict[str, int]:
    """Return the content bytes of a group's parts, by name."""
    parts = spec_of(catalogue.config(name) | options.pop("also", {}), group, **options).parts
    return {part.name: part.content_bytes for part in parts}


def test_the_dtype_is_the_configs_unless_given() -> None:
    """Both spellings of the key are read, and outside text_config too."""
    assert "float16" == spec_of(catalogue.config("Llama-2-7B")).dtype
    assert "float32" == spec_of(catalogue.config("Llama-2-7B"), dtype="float32").dtype
    config = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
    assert "float16" == spec_of({**config, "dtype": "float16"}).dtype
    nested = {"model_type": "llava", "text_config": {**config, "model_type": "llama"}}
    assert "float16" == spec_of({**nested, "torch_dtype": "float16"}).dtype


def test_an_8_bit_cache_leaves_states_as_the_config_has_them() -> None:
    """Engines quantise the attention cache, not recurrent states."""
    name, fp8 = "Qwen3-Next-80B-A3B", "float8_e4m3fn"
    assert {"k": 256, "v": 256} == contents(name, "full", dtype=fp8)
    assert contents(name, "gated_delta_net") == contents(name, "gated_delta_net", dtype=fp8)


def test_the_temporal_state_may_have_a_dtype_of_its_own() -> None:
    """From the argument, or from the config under either key."""
    plain = contents("Nemotron-H-8B", "mamba")
    given = contents("Nemotron-H-8B", "mamba", ssm_dtype="float32")
    assert plain | {"ssm": 2 * plain["ssm"]} == given
    for key in ("mamba_ssm_dtype", "mamba_ssm_cache_dtype"):
        assert given == contents("Nemotron-H-8B", "mamba", also={key: "float32"})


# Refusals


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers=None: expected an int >= 1"),
        ({"num_hidden_layers": True}, "num_hidden_layers=True: expected an int >= 1"),
        ({"num_attention_heads": 0}, "num_attention_heads=0: expected an int >= 1"),
        ({"num_key_value_heads": "2"}, "num_key_value_heads='2': expected an int >= 1"),
        ({"num_key_value_heads": [2, 1]}, r"num_key_value_heads=\[2, 1\]: expected an int"),
        ({"hidden_size": 255}, "hidden_size=255: must be a multiple of num_attention_heads=4"),
        ({"head_dim": 0}, "head_dim=0: expected an int >= 1"),
        ({"torch_dtype": None}, "dtype=None: the config has no dtype"),
        ({"torch_dtype": "int4"}, "dtype='int4': expected one of"),
        ({"layer_types": ["full_attention"]}, "expected num_hidden_layers=2 names"),
        ({"layer_types": ["full_attention", "odd"]}, "layer_types='odd': expected one of"),
        ({"layer_types": ["mamba"] * 2}, "expected attention layers only, because LlamaForCausalLM"),
        ({"layer_types": ["sliding_attention"] * 2}, "sliding_window=None: expected an int"),
        (
            {"architectures": ["BambaForCausalLM"]},
            "attn_layer_indices=None: expected a list of layer indices",
        ),
        (
            {"architectures": ["BambaForCausalLM"], "attn_layer_indices": [2]},
            r"attn_layer_indices=\[2\]: expected a list of layer indices below num_hidden_layers=2",
        ),
        (
            {"architectures": ["NemotronHForCausalLM"], "hybrid_override_pattern": "M*-"},
            r"hybrid_override_pattern='M\*-': expected num_hidden_layers=2 letters",
        ),
        (
            {"architectures": ["Llama4ForCausalLM"], "no_rope_layers": [1]},
            r"no_rope_layers=\[1\]: expected num_hidden_layers=2 flags",
        ),
    ],
)
def test_a_bad_field_is_refused_by_its_name(change: dict[str, Any], said: str) -> None:
    """The message names the field, its value and what was wanted."""
    with pytest.raises(SpecError, match=said):
        models.from_config({**LLAMA, **change})


def test_an_alias_is_named_as_the_config_spells_it() -> None:
    """A GPT-2 config says n_layer, so its error does."""
    config = {"architectures": ["GPT2LMHeadModel"], "n_layer": 0, "torch_dtype": "float32"}
    with pytest.raises(SpecError, match="n_layer=0: expected an int >= 1"):
        models.from_config(config)


def test_an_unknown_architecture_is_told_what_is_known() -> None:
    """A known model_type does not excuse an unknown class."""
    config = {**LLAMA, "architectures": ["LlamaForEagle"], "model_type": "llama"}
    with pytest.raises(SpecError, match=r"LlamaForEagle.*LlamaForCausalLM") as caught:
        models.from_config(config)
    assert "architectures" == caught.value.field
    assert all(name in caught.value.expected for name in models.architectures())
    with pytest.raises(SpecError, match="model_type=None: expected one of the known architectures"):
        models.from_config({})


def test_no_name_stands_in_two_rows() -> None:
    """A name leads to one row."""
    names = [name for row in ROWS for name in row.names]
    assert sorted(set(names)) == sorted(names)


# Sources


def test_a_file_and_its_folder_are_read(tmp_path: Path) -> None:
    """A path may name config.json or the folder that holds it."""
    file = tmp_path / "config.json"
    file.write_text(json.dumps(LLAMA))
    wanted = models.from_config(LLAMA)
    assert wanted == models.from_config(file) == models.from_config(str(tmp_path))


@pytest.mark.parametrize(
    ("text", "said"), [("{", "expected a readable JSON file"), ("[]", "expected a JSON object")]
)
def test_a_file_that_holds_no_object_is_refused(tmp_path: Path, text: str, said: str) -> None:
    """The error names the path."""
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(SpecError, match=said):
        models.from_config(tmp_path)


def test_what_is_neither_dict_nor_path_is_refused() -> None:
    """So is a file that is not there."""
    with pytest.raises(SpecError, match="config=7: expected a dict"):
        models.from_config(7)  # type: ignore[arg-type]
    with pytest.raises(SpecError, match="expected a readable JSON file"):
        models.from_config("no/such/config.json")


# The catalogue


@pytest.mark.parametrize("name", catalogue.names())
def test_every_model_of_the_catalogue_makes_an_engine(name: str) -> None:
    """Each entry is complete: no value has to be given to make its groups."""
    groups = models.from_config(catalogue.config(name))
    assert groups == EngineSpec(groups=groups).groups
    assert catalogue.repository(name).count("/") == 1


def test_the_catalogue_holds_each_kind_of_group() -> None:
    """Short convolutions apart, which no entry has."""
    kinds = {
        group.name
        for name in catalogue.names()
        for group in models.from_config(catalogue.config(name))
    }
    wanted = {"full", "mla", "sliding_window", "chunked_local", "mamba", "gated_delta_net"}
    assert wanted == kinds
    assert catalogue.DEFAULT in catalogue.names()


def test_a_config_is_a_copy() -> None:
    """What a caller changes stays the caller's."""
    config = catalogue.config("gemma-3-4b")
    text: Any = config["text_config"]
    text["num_hidden_layers"] = 1
    assert config != catalogue.config("gemma-3-4b")


def test_names_and_repositories_both_find_a_model() -> None:
    """In any case of letters."""
    wanted = catalogue.config("Qwen3-0.6B")
    assert wanted == catalogue.config("qwen3-0.6b") == catalogue.config("Qwen/Qwen3-0.6B")


def test_an_unknown_model_is_told_the_closest_names() -> None:
    """And all the names, so that the next try is right."""
    with pytest.raises(SpecError, match=r"perhaps Qwen3-0\.6B") as caught:
        catalogue.config("Qwen3-0.6")
    assert all(name in caught.value.expected for name in catalogue.names())
    with pytest.raises(SpecError, match=r"a model of the catalogue \(known: Llama"):
        catalogue.config("§")
