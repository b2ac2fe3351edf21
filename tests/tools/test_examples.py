"""Test that each file of examples runs, prints what it promises, and stays short."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

pytestmark = pytest.mark.pages

FOLDER = Path(__file__).parents[2] / "examples"
# A router and a supervisor are whole programs. One cannot read more at a time.
MAX_LINES = 165


def run(name: str, *arguments: str | Path) -> Sequence[str]:
    """Run an example in a process of its own, and return the lines that it prints."""
    # The example sets a secret if there is none. UCX must not try a device that reaches no peer.
    own = {name: value for name, value in os.environ.items() if name != "KVSPEC_SECRET"}
    done = subprocess.run(  # noqa: S603 - our own interpreter and file
        [sys.executable, FOLDER / name, *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
        env={"UCX_NET_DEVICES": "lo", **own},
    )
    assert 0 == done.returncode, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.py")), ids=lambda file: file.name)
def test_example_is_short_and_listed(file: Path) -> None:
    assert len(file.read_text(encoding="utf-8").splitlines()) <= MAX_LINES
    assert f"]({file.name})" in (FOLDER / "README.md").read_text(encoding="utf-8")


def test_plan_and_explain_counts_and_draws(tmp_path: Path) -> None:
    """Of 16 ranks with 8 heads, every second has a replica that is not read."""
    picture = tmp_path / "plan.svg"
    lines = run("plan_and_explain.py", "--svg", picture)
    assert "held, but read by nobody: tp1 tp3 tp5 tp7 tp9 tp11 tp13 tp15" in lines
    assert any(line.startswith("refused: model.layers.0") for line in lines)
    assert ET.parse(picture).getroot().tag.endswith("svg")  # noqa: S314 - our own picture


def test_verify_arithmetic_finds_the_sizes_with_replicated_heads() -> None:
    """Counting is right as long as no two ranks hold the same head."""
    verdicts = [line.partition(": ")[2] for line in run("verify_arithmetic.py")]
    assert ["right"] * 4 == verdicts[:4]
    assert [True] * 2 == [verdict.startswith("wrong: consumer tp") for verdict in verdicts[4:]]


def test_stored_pages_are_loaded_by_an_engine_of_other_sizes() -> None:
    lines = run("stored_pages.py")
    assert "  full tp3: 16 KiB, by tp6, tp7 take turns" in lines
    assert "tp2: 64 tokens of heads [3 4]" in lines
    assert "0 of 64 tokens can be loaded" in lines


def test_read_tensors_moves_every_byte() -> None:
    assert [
        "refused: tensors['layers.0']['kv'].stride",
        "value of token 37, head 5, layer 1: True",
        "wrong bytes: None",
    ] == run("read_tensors.py")


@pytest.mark.nixl
def test_engine_connector_moves_prompts_and_survives_an_abort() -> None:
    """The second prompt is aborted, and all blocks are free in the end."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    assert [
        f"prompt {number}: {state}, and its blocks are free"
        for number, state in enumerate(("done", "failed", "done"))
    ] == run("engine_connector.py")


@pytest.mark.nixl
def test_supervisor_serves_every_job_after_killed_ranks() -> None:
    """The supervisor starts an engine again, and the router's next attempt is done."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    assert [
        "prefill: a rank has died, all ranks start again",
        "job 0: done in attempt 2",
        "job 0, ticket of the old start: failed",
        "decode: a rank has died, all ranks start again",
        "job 1: done in attempt 2",
        "job 2: done in attempt 1",
        "job 3, aborted ticket: failed",
    ] == run("supervisor.py")


@pytest.mark.nixl
def test_cross_engine_puts_rotated_keys_in_the_other_order() -> None:
    """Without transformers, the example names what is missing."""
    lines = run("cross_engine.py")
    if importlib.util.find_spec("transformers") is None:
        assert lines[0].startswith("skipped: needs ")
        pytest.skip("needs transformers")
    assert ["key of token 37 on rank tp0: True", "key of token 37 on rank tp1: True"] == lines[-2:]
