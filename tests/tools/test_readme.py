"""README.md tells the truth: its example prints what is shown, its figures are counted."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import os
import re
import tomllib
from itertools import product
from pathlib import Path

import kvspec
from kvspec.testing import FakeNixl

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
EXTRAS = re.compile(r"'\.\[([a-z,]+)\]'")
SIZES = range(1, 17)


def test_the_example_prints_what_is_shown() -> None:
    """The Python blocks run one after the other; the text after one is what it prints."""
    blocks, names = BLOCK.findall(README), {"__name__": "__readme__"}
    shown, printed = [], []
    nixl = contextlib.nullcontext() if importlib.util.find_spec("nixl_cu13") else FakeNixl()
    for at, (kind, source) in enumerate(blocks):
        if kind != "python":
            continue
        out = io.StringIO()
        with contextlib.redirect_stdout(out), nixl:
            exec(compile(source, f"README.md, block {at}", "exec"), names)  # noqa: S102 - our own
        printed.append(out.getvalue())
        follows = blocks[at + 1] if at + 1 < len(blocks) else ("", "")
        shown.append(follows[1] if follows[0] == "text" else "")
    assert shown == printed
    assert README.count("\n```text\n") == len([each for each in shown if each])


def test_the_two_commands_are_there() -> None:
    """A reader can start what the first block names."""
    first = next(source for kind, source in BLOCK.findall(README) if kind == "sh")
    named = [line.split()[0] for line in first.splitlines()]
    assert ["scripts/transfer", "scripts/test"] == named
    assert all(os.access(ROOT / name, os.X_OK) for name in named)


def test_what_the_scripts_install_is_offered() -> None:
    """Each extra that a script or the README names is one of the package."""
    texts = [
        README,
        *((ROOT / "scripts" / name).read_text("utf-8") for name in ("transfer", "test")),
    ]
    named = {name for text in texts for found in EXTRAS.findall(text) for name in found.split(",")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert {"cli", "nixl", "testing"} == named
    assert named <= set(project["optional-dependencies"])


def test_links_lead_somewhere() -> None:
    """Every file that is linked or drawn is in the repository."""
    linked = re.findall(r"\]\(([^)#]+)\)", README)
    files = [each for each in linked if not each.startswith("https://")]
    assert [] == [each for each in files if not (ROOT / each).is_file()]


def loads(heads: int, tp_size: int) -> bool:
    """Return whether vLLM loads a model of *heads* KV heads at *tp_size*: one divides the other."""
    return heads % tp_size == 0 if tp_size <= heads else tp_size % heads == 0


def test_what_vllm_loads_was_recorded_from_it() -> None:
    """The rule of `loads` gives what vLLM said of each size that was tried."""
    path = ROOT / "tests" / "goldens" / "vllm_qkv_loadable.json"
    for heads, tp_size, on_a_rank, _ in json.loads(path.read_text(encoding="utf-8"))["rows"]:
        assert (on_a_rank is not None) == loads(heads, tp_size)


def vllm_refuses(producer: int, consumer: int, heads: int) -> bool:
    """Return whether the NIXL connector of vLLM 0.33 refuses, by the checks in its source.

    One TP size must be a multiple of the other, and a producer with replicated heads must not have
    more ranks than the consumer.
    """
    if max(producer, consumer) % min(producer, consumer):
        return True
    return producer > consumer and producer > heads


def test_how_many_triples_are_refused_elsewhere_and_planned_here() -> None:
    """The figures of "Why": of 610 triples up to 16, 320 are refused; kvspec plans all."""
    triples = [
        (producer, consumer, heads)
        for producer, consumer, heads in product(SIZES, SIZES, SIZES)
        if loads(heads, producer) and loads(heads, consumer)
    ]
    refused = sum(vllm_refuses(*each) for each in triples)
    assert (610, 320) == (len(triples), refused)
    assert f"refuses {refused}. kvspec plans all {len(triples)}" in README
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


def test_the_picture_is_the_one_that_the_plan_gives() -> None:
    """docs/idea.svg is what docs/draw_idea.py draws, from the plan of the example."""
    path = ROOT / "docs" / "draw_idea.py"
    spec = importlib.util.spec_from_file_location("draw_idea", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.draw() == (ROOT / "docs" / "idea.svg").read_text(encoding="utf-8")
