"""Compare foreign pages with the code of the installed engines, over all small sizes.

`KVSPEC_VLLM_PYTHON` and `KVSPEC_SGLANG_PYTHON` are Pythons with an engine. By default, those that
`scripts/vllm-pair` and `scripts/cross-pair` have made.
"""

from __future__ import annotations

import gzip
import json
import os
import subprocess
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import foreign_folders as made
import numpy as np
import pytest
import unified_writer as sglang
from canonical_writer import BLOCK

import kvspec
from kvspec.adapters.foreign_pages import regions_of
from kvspec.stored.placement import StoredSpec

pytestmark = pytest.mark.slow
Record = Callable[[str, object], None]
ROOT = Path(__file__).parents[2]


def cases_of(engine: str, folder: Path) -> dict[str, Any]:
    """Let the engine's own code make all cases."""
    python = os.environ.get(
        f"KVSPEC_{engine.upper()}_PYTHON", str(ROOT / f".venv-{engine}/bin/python")
    )
    if not Path(python).exists():
        pytest.skip(f"needs {python}")
    writer = {"vllm": "canonical_writer.py", "sglang": "unified_writer.py"}[engine]
    target = folder / "cases.json.gz"
    command = [python, str(ROOT / "tests/support" / writer), str(target), "--grid"]
    subprocess.run(command, check=True, cwd=folder, capture_output=True, timeout=600)  # noqa: S603
    found: dict[str, Any] = json.loads(gzip.decompress(target.read_bytes()))
    return found


def test_all_pages_of_vllm_are_those_of_a_virtual_engine(
    tmp_path: Path, record_property: Record
) -> None:
    found = cases_of("vllm", tmp_path)
    counts: Counter[str] = Counter()
    for number, row in enumerate(found["rows"]):
        if row["page"] is None:
            counts["refused by vLLM"] += 1
            continue
        counts["certified"] += 1
        layout = {"packed": "BL", "split": "BLK"}[row["encoding"]]
        layout += {"nhd": "NHC", "hnd": "HNC"}[row["family"]]
        group = kvspec.KVCacheGroup(name="g", layers=made.LAYERS[:1], spec=made.spec_of(row))
        tokens = BLOCK * row["dcp"] * row["pcp"]
        placement = StoredSpec(groups=[group], page_tokens=tokens, layout=layout)
        (stored,) = placement.objects
        payload = np.array(row["page"], np.uint16).view(np.uint8)
        wrong = sum(
            int(np.count_nonzero(found != expected))
            for region in regions_of(placement, stored)
            for unit in range(region.units)
            for state in range(region.states)
            for at in (region.address(0, unit, state),)
            for found in (payload[at : at + region.content_bytes].view(np.uint16),)
            for expected in (
                made.vllm_number(int(region.part == "v"), state, unit, np.arange(len(found)), 0),
            )
        )
        assert (0, payload.size) == (wrong, placement.object_bytes(*stored)), row
        if row["pcp"] == 1:
            # And by the file, whose row is longer the more workers have the same heads.
            (tmp_path / str(number)).mkdir()
            folder = made.folder_of(tmp_path / str(number), made.fields_of(row))
            copies = max(1, row["tp"] // max(1, row["heads"]))
            made.write_row(made.file_of(folder), row, copies=copies)
            pages = made.opened(folder, row)
            (stored,) = pages.placement.objects
            assert 0 == made.wrong_elements(pages, stored, made.read(pages, stored)), row
            counts["read from a file"] += 1
    record_property("vLLM", f"{found['vllm']}: {dict(counts)}")
    assert counts["certified"] > 400
    # The reason to read files by the length of their pages.
    deleted = {"stored": True, "error": "Short read: expected 8192 bytes, read 4096", "left": False}
    assert deleted == found["io"]
    for row in found["mooncake"]:
        pages, objects = made.shards(row)
        for stored in pages.placement.objects:
            assert 0 == made.wrong_elements(pages, stored, made.read(pages, stored)), row
        assert len(objects) == len(pages.placement.objects)
    record_property("Mooncake", len(found["mooncake"]))


def test_all_unified_objects_of_sglang_are_those_of_a_virtual_engine(
    tmp_path: Path, record_property: Record
) -> None:
    found = cases_of("sglang", tmp_path)
    counts: Counter[str] = Counter()
    for row in found["rows"]:
        if row["objects"] is None:
            counts["refused by SGLang"] += 1
            continue
        counts["replicated heads" if row["tp"] > row["heads"] > 0 else "stored"] += 1
        objects = {key: np.array(page, np.uint16).tobytes() for key, page in row["objects"].items()}
        pages = made.unified(row, objects)
        for stored in pages.placement.objects:
            payload = made.read(pages, stored, sglang.HASH)
            assert 0 == made.wrong_elements(pages, stored, payload, sglang.number), row
    record_property("SGLang", f"{found['sglang']}: {dict(counts)}")
    assert counts["stored"] > 90
