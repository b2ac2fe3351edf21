"""Test the script docs/border.py, which shows the page formats that move or are rejected."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).parents[2] / "docs" / "border.py"
GOLDENS = Path(__file__).parents[1] / "goldens"


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
    ("vLLM type", "fp8_inc"),
    ("SGLang", "vectorized_5d"),
    ("SGLang", "nvfp4, native scales"),
    ("SGLang", "other pools"),
    ("slots, DCP 2", "full"),
    ("raw state page", "KDA"),
}
"""Pages that are always rejected, by their engine or their kind."""

WHOLE = {
    "NVFP4, MSA",
    "ROCM_AITER_FA shuffled",
    "CPU_ATTN, amx",
    "indexer, rows",
    "indexer, shuffled",
    "index pages, keys shuffled",
    "TurboQuant, e4b15",
    "TurboQuant, scales apart",
    "UltraQuant",
    "DeepSeek V4 records",
    "slots and index pages, keys shuffled",
    "slots and index pages, keys with Hadamard",
    "slots and index pages, keys shuffled, Hadamard",
}
"""Pages that can only move whole: to equal block sizes and, if they have heads, to equal TP."""

# The same pages among those of all backend classes and cache types of vLLM.
WHOLE |= {
    "rocm_octave_attn.RocmOctaveAttentionBackend",
    "ultraquant_attn.UltraQuantAttentionBackend",
    "mla.indexer.DeepseekV32IndexerBackend",
    "mla.indexer.DeepseekV4IndexerBackend",
    "mla.indexer.DeepseekV41IndexerBackend",
    "mla.indexer.Glm5NextIndexerBackend",
    "models.minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseMSANvfp4Backend",
    "octave_k3v4",
    "octave_k3v3",
    "octave_k3v3_compact",
    "ultraquant_4bit",
    "fp8_ds_mla, 584 bytes",
}

KINDS = {
    "refused",
    "RSWASpec",
    "HiddenStateCacheSpec",
    "SinkFullAttentionSpec",
}
"""Kinds of layers that are always rejected."""


def test_page_formats_are_exact_or_rejected(border: Any) -> None:
    """Pages that can only move whole are exact in some trials and rejected in the others."""
    verdicts_of: dict[Any, list[str]] = {}
    for row in border.rows():
        verdicts = [border.verdict(row, *trial) for trial in border.TRIALS.values()]
        assert all(text == "exact" or text.startswith("refused: ") for text in verdicts)
        verdicts_of[row.engine, row.page, row.kind] = verdicts
    for (engine, page, kind), verdicts in verdicts_of.items():
        if (engine, page) in REFUSED or kind in KINDS or (page, kind) in REFUSED:
            assert "exact" not in verdicts
        elif page in WHOLE:
            last = "exact" if kind.startswith("MLA") or kind == "DSA" else "refused"
            assert ["exact", "refused", last] == [text.partition(":")[0] for text in verdicts]
        else:
            assert ["exact"] * 3 == verdicts
    assert 161 == sum(verdicts[0] == "exact" for verdicts in verdicts_of.values())


def test_each_backend_class_and_cache_type_of_vllm_has_a_row(border: Any) -> None:
    """The names are recorded from vLLM 0.32 and 0.33. A class has pages or a reason of its own."""
    recorded = json.loads((GOLDENS / "vllm_backends.json").read_text())
    rows = [row for row in border.rows() if row.engine in ("vLLM class", "vLLM type")]
    names = [row.page.partition(",")[0] for row in rows]
    classes = [
        border.short_name(name) for key in recorded if "classes" in key for name in recorded[key]
    ]
    assert sorted(classes) == sorted(
        name for name, row in zip(names, rows, strict=True) if row.engine == "vLLM class"
    )
    assert set(recorded["types"]) == set(names) - set(classes)


UNKNOWN = {"perhaps rotated", "other order", "part of a key", "fp8, scales of a batch", "fp8"}
"""Meanings that an adapter refuses to state."""


def test_meanings_are_bridged_or_rejected(border: Any) -> None:
    """Only the order of rotated elements may differ. All else is refused by name."""
    for meaning in border.meanings():
        stored, *trials = border.meaning_cells(meaning)
        if meaning.keys in UNKNOWN:
            assert stored.startswith("refused: ")
            assert not any(trials)
            continue
        rotated = not stored.startswith("none")
        content, scales = "refused: layers.0.key_content", "refused: layers.0.scales_digest"
        order, unrotated = ("permuted", content) if rotated else ("same", "same")
        assert [order, unrotated, content, scales] == trials
        assert rotated == (meaning.keys not in ("not in this layer", "no positions"))
        assert ("normalised" in stored, "pairs" in stored or meaning.keys == "MLA") == (
            meaning.keys == "normalised",
            meaning.keys in ("rotated pairs", "MLA"),
        )


def test_border_script_prints_its_tables(
    border: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first table has a line for each page and kind, below a line with the trials."""
    some = [*border.rows()][:50]
    monkeypatch.setattr(border, "rows", lambda: some)
    border.main()
    title, *lines = capsys.readouterr().out.splitlines()
    assert ["engine", "page", "kind", "as it is", "other blocks", "other TP"] == [
        column.strip() for column in title.split("  ") if column.strip()
    ]
    assert lines.index("") > 40
    assert "exact" in lines[0]
    assert lines[lines.index("") + 1].startswith("engine  ")
    assert "permuted" in lines[lines.index("") + 2]
