"""Test that docs/replace-the-ratio.md, the recorded answers of three connectors, and kvspec agree.

`ratio_answers.json` was recorded by calling the named functions of the installed packages.
`tests/tools/test_pages.py` runs the code of the page and compares its output.
"""

from __future__ import annotations

import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from builders import gqa

GOLDENS = Path(__file__).parent
PAGE = (GOLDENS.parents[1] / "docs" / "replace-the-ratio.md").read_text(encoding="utf-8")
ANSWERS: dict[str, Any] = json.loads((GOLDENS / "ratio_answers.json").read_text(encoding="utf-8"))
MAPPING: list[Any] = json.loads(
    gzip.decompress((GOLDENS / "vllm_tp_mapping.json.gz").read_bytes())
)["rows"]


def section(name: str) -> str:
    """Return the text of the section whose heading begins with *name*."""
    return PAGE.split(f"\n## {name}")[1].split("\n## ")[0]


def printed(name: str) -> list[list[int]]:
    """Return the numbers that the code of a section prints, without its heading."""
    (output,) = re.findall(r"```text\n.*\n((?:.*\n)*?)```", section(name))
    return [[int(number) for number in line.split()] for line in output.splitlines()]


def shown(name: str) -> list[list[str]]:
    """Return the cells of the table of recorded answers in a section."""
    rows = re.findall(r"^\| (\d.*) \|$", section(name), re.MULTILINE)
    return [[cell.strip() for cell in row.split("|")] for row in rows]


def recorded(name: str, heads: int, producer: int, consumer: int) -> list[list[list[int] | None]]:
    """Return the answers of one function, by consumer rank and producer rank."""
    rows = ANSWERS[name]["rows"]
    (answers,) = [row[3] for row in rows if row[:3] == [heads, producer, consumer]]
    return list(answers)


def test_page_shows_vllms_recorded_mapping_and_equal_slices() -> None:
    rows = [row for row in MAPPING if row[:4] == ["full", 4, 8, 2]]
    answers = [[rank, *sources[0], offset] for *_, rank, (sources, offset, *_) in rows]
    assert answers == [[int(cell) for cell in row] for row in shown("vLLM")]
    assert answers == printed("vLLM")


def test_page_shows_sglangs_recorded_slices_and_equal_slices() -> None:
    answers = recorded("sglang", 8, 4, 2)
    table = [[int(cell) for cell in row] for row in shown("SGLang")]
    assert table == printed("SGLang")
    for decode, prefill, *slice_ in table:
        assert answers[decode][prefill] == slice_


def test_page_shows_mooncakes_recorded_plan_and_equal_slices() -> None:
    answers = recorded("vllm_mooncake", 4, 8, 2)
    sending = []
    for producer, consumer, *cells in shown("Mooncake"):
        answer = answers[int(consumer)][int(producer)]
        assert (["sends nothing", "", ""] if answer is None else [*map(str, answer)]) == cells
        if answer is not None:
            sending.append([int(producer), int(consumer), *answer])
    assert sending == printed("Mooncake")


@pytest.mark.parametrize("name", ["sglang", "vllm_mooncake"])
def test_each_slice_equals_the_recorded_answer_for_its_pair_of_ranks(name: str) -> None:
    """The recorded functions answer for any pair. Slices have only pairs with a head in common."""
    compared = 0
    for heads, producer, consumer, answers in ANSWERS[name]["rows"]:
        for rank in range(consumer):
            for part in gqa(heads).get_tp_transfer_slices(
                rank, consumer, producer, replica_policy="first"
            ):
                ours = [part.remote_range.start, len(part.local_range), part.local_range.start]
                assert answers[rank][part.remote_rank] == ours
                compared += 1
    assert len(ANSWERS[name]["rows"]) == 64
    assert compared == 277
