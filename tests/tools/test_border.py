"""docs/border.py: each page format of each engine is exact or refused by name."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "docs" / "border.py"


@pytest.fixture(scope="module", name="border")
def loaded() -> Any:
    """Return the script as a module."""
    spec = importlib.util.spec_from_file_location("border", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["border"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["border"]


REFUSED = {
    ("vLLM", "unknown backend"),
    ("vLLM", "no backend"),
    ("vLLM", "CPU_ATTN, no isa"),
    ("vLLM", "indexer, no variant"),
    ("vLLM", "TurboQuant, no variant"),
    ("vLLM", "fp8, no type"),
    ("SGLang", "vectorized_5d"),
    ("SGLang", "other pools"),
    ("TensorRT-LLM", "pool, no axes"),
    ("LMCache", "chunk, packed, no axes"),
}
"""Pages that are refused whatever the peer is."""

WHOLE = {
    "NVFP4, MSA",
    "ROCM_AITER_FA shuffled",
    "CPU_ATTN, amx",
    "indexer, rows",
    "indexer, shuffled",
    "TurboQuant, e4b15",
    "TurboQuant, scales apart",
    "UltraQuant",
    "DeepSeek V4 records",
}
"""Pages that move whole alone: to equal blocks, and where they have heads to equal TP."""

KINDS = {"RSWASpec", "HiddenStateCacheSpec", "SinkFullAttentionSpec", "CircularBufferSpec", "KDA"}
"""Kinds that are refused whatever the page is."""


def test_there_is_no_third_verdict(border: Any) -> None:
    """What is not refused is exact, byte by byte; whole pages that cannot be cut are in between."""
    found: dict[Any, list[str]] = {}
    for row in border.rows():
        verdicts = [border.verdict(row, *trial) for trial in border.TRIALS.values()]
        assert all(each == "exact" or each.startswith("refused: ") for each in verdicts)
        found[row.engine, row.page, row.kind] = verdicts
    for (engine, page, kind), verdicts in found.items():
        if (engine, page) in REFUSED or kind in KINDS or (page, kind) == ("slots, DCP 2", "full"):
            assert "exact" not in verdicts
        elif page in WHOLE:
            last = "exact" if kind == "MLA" else "refused"
            assert ["exact", "refused", last] == [each.partition(":")[0] for each in verdicts]
        else:
            assert ["exact"] * 3 == verdicts
    assert 44 == sum(verdicts[0] == "exact" for verdicts in found.values())


def test_the_command_prints_the_table() -> None:
    """A line for each page and kind below the names of the trials."""
    command = [sys.executable, str(PATH)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)  # noqa: S603
    title, *lines = run.stdout.splitlines()
    assert ["engine", "page", "kind", "as it is", "other blocks", "other TP"] == [
        each.strip() for each in title.split("  ") if each.strip()
    ]
    assert len(lines) > 40
    assert "exact" in lines[0]
