"""Tests that `models.from_config` gives each layer the cache that transformers and vLLM make.

`python bench/architectures.py --record` and `python bench/vllm_specs.py --record` recorded the
caches: see there.
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import vllm_specs
from model_caches import verdict_of

from kvspec.models import catalogue
from kvspec.models.architectures import ARCHITECTURES, Architecture

GOLDENS = Path(__file__).parents[1] / "goldens"
RECORDED: dict[str, Any] = json.loads(
    gzip.decompress((GOLDENS / "transformers_caches.json.gz").read_bytes())
)
TYPES: dict[str, dict[str, Any]] = RECORDED["types"]
SPECS: dict[str, dict[str, Any]] = json.loads(
    gzip.decompress((GOLDENS / "vllm_specs.json.gz").read_bytes())
)["models"]
KNOWN = {name for row in ARCHITECTURES for name in row.names}

# Classes whose config transformers saves without fields that vLLM and published files need.
ONLY_VLLM = {"MiMoV2FlashForCausalLM"}

# Rows without a record, and where their facts come from.
OTHERWISE = {"ernie4_5_vl_moe_text": "the attention of Ernie4_5_MoeForCausalLM"}


def names_of(config: dict[str, Any], *classes: str) -> set[str]:
    """Return the names by which the table may know a recorded config."""
    text = config.get("text_config", {})
    found = {*classes, *config.get("architectures", ())}
    types = (text.get("model_type"), None if found else config["model_type"])
    return found | {name for name in types if name is not None}


@pytest.mark.parametrize("model_type", TYPES)
def test_groups_equal_the_cache_of_a_tiny_model_or_are_refused(model_type: str) -> None:
    """A class that the table has is never refused. Each field is left out in turn."""
    recorded = TYPES[model_type]
    verdict, why = verdict_of(recorded)
    known = not KNOWN.isdisjoint(names_of(recorded["config"], recorded["class"]))
    expected = "right" if known and recorded["class"] not in ONLY_VLLM else "refused"
    assert expected == verdict, why


@pytest.mark.parametrize("name", catalogue.names())
def test_groups_of_the_catalogue_equal_the_cache_of_the_model(name: str) -> None:
    """The models have their real sizes."""
    verdict, why = verdict_of(RECORDED["catalogue"][name])
    assert "right" == verdict, why


@pytest.mark.parametrize("name", SPECS)
def test_groups_equal_the_specs_of_vllm_or_are_refused(name: str) -> None:
    """The names of the layers are vLLM's too."""
    verdict, why = vllm_specs.verdict(SPECS[name])
    known = not KNOWN.isdisjoint(names_of(SPECS[name]["config"]))
    assert ("right" if known else "refused") == verdict, why


@pytest.mark.parametrize("row", ARCHITECTURES, ids=lambda row: row.names[0])
def test_every_row_is_compared_with_a_model(row: Architecture) -> None:
    """A new row needs a record, or a test with facts of another origin."""
    recorded = {TYPES[name]["class"] for name in TYPES} | set(TYPES)
    for each in (*TYPES.values(), *SPECS.values()):
        recorded |= names_of(each["config"])
    assert recorded & set(row.names) or row.names[0] in OTHERWISE
