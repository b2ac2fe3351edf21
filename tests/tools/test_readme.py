"""Test the length of README.md, its commands and its numbers."""

from __future__ import annotations

import json
import os
import re
import tomllib
from itertools import product
from pathlib import Path

import pytest

import kvspec

pytestmark = pytest.mark.pages

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = re.compile(r"'\.\[([a-z,]+)\]'")
SIZES = range(1, 17)


def test_readme_is_short() -> None:
    """A newcomer can read 180 lines in a few minutes. Other topics are on the pages in docs."""
    assert len(README.splitlines()) <= 180


def test_readme_names_the_two_commands() -> None:
    """The first block names two scripts that can be run."""
    first = next(source for language, source in BLOCK.findall(README) if language == "sh")
    commands = [line.split()[0] for line in first.splitlines()]
    assert ["scripts/transfer", "scripts/test"] == commands
    assert all(os.access(ROOT / command, os.X_OK) for command in commands)


def test_extras_in_readme_and_scripts_exist() -> None:
    """Each extra that a script or README.md names is an extra of the package."""
    scripts = [(ROOT / "scripts" / name).read_text("utf-8") for name in ("transfer", "test")]
    extras = {
        extra
        for text in (README, *scripts)
        for names in EXTRAS.findall(text)
        for extra in names.split(",")
    }
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"cli", "nixl", "testing"} == extras
    assert extras <= set(project["optional-dependencies"])


def loads(heads: int, tp_size: int) -> bool:
    """Return whether vLLM loads a model of *heads* KV heads at *tp_size*: one divides the other."""
    return heads % tp_size == 0 if tp_size <= heads else tp_size % heads == 0


def test_loadable_sizes_agree_with_those_recorded_from_vllm() -> None:
    """The rule of `loads` gives the recorded result for each size that was tried in vLLM."""
    path = ROOT / "tests" / "goldens" / "vllm_qkv_loadable.json"
    for heads, tp_size, heads_of_rank, _ in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        assert (heads_of_rank is not None) == loads(heads, tp_size)


def vllm_refuses(producer: int, consumer: int, heads: int) -> bool:
    """Return whether the NIXL connector of vLLM 0.33 refuses, by the checks in its source.

    One TP size must be a multiple of the other, and a producer with replicated heads must not have
    more ranks than the consumer.
    """
    if max(producer, consumer) % min(producer, consumer):
        return True
    return producer > consumer and producer > heads


def test_readme_counts_the_triples_that_vllm_refuses_and_kvspec_plans() -> None:
    """Of 610 triples of sizes up to 16, vLLM's connector refuses 320. kvspec plans all."""
    triples = [
        (producer, consumer, heads)
        for producer, consumer, heads in product(SIZES, SIZES, SIZES)
        if loads(heads, producer) and loads(heads, consumer)
    ]
    refused = sum(vllm_refuses(*triple) for triple in triples)
    assert (610, 320) == (len(triples), refused)
    words = " ".join(README.split())
    assert all(number in words for number in (f"{len(triples)} triples", f"refuses {refused}"))
    assert f"plans all {len(triples)}" in words
    for producer, consumer, heads in triples:
        spec = kvspec.FullAttentionSpec(
            block_size=1, total_num_kv_heads=heads, head_size=1, dtype="uint8"
        )
        groups = [kvspec.KVCacheGroup(name="full", layers=["layer"], spec=spec)]
        engines = (
            kvspec.EngineSpec(groups=groups, parallel=kvspec.ParallelConfig(tp_size=size))
            for size in (producer, consumer)
        )
        kvspec.plan_transfer(*engines)
