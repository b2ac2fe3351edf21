"""The adapter of docs/adapters.md is complete: its blocks run, and it refuses what it must."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvspec

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def run(*names: str) -> dict[str, Any]:
    """Run blocks of the page, one after the other, and return their names."""
    found: dict[str, Any] = {}
    for name in names:
        exec(compile(BLOCKS[name], f"docs/adapters.md, {name}", "exec"), found)  # noqa: S102
    return found


def test_the_made_up_engine_s_requests_arrive() -> None:
    """The page's own checks hold, and live tokens of every head of both layers arrived."""
    here = run("kiln", "adapter", "use")
    assert ["kiln", "adapter", "use"] == list(BLOCKS)
    held = {"p": (here["producers"], 3), "c": (here["consumers"], 2)}
    tables = {"p": {0: [3, 1, 2], 1: [0, 5, 4]}, "c": {0: [6, 7, 1], 1: [0, 2, 3]}}
    for layer, first in ((0, 0), (1, 17)):
        for token in range(first, 40):
            for head in range(6):
                found = []
                for side, (ranks, each) in held.items():
                    array = ranks[head // each].layers[layer]
                    block = tables[side][layer][token // 16]
                    found.append(array[block, :, token % 16, head % each])
                assert np.array_equal(*found)
                assert found[1].all()


def test_the_made_up_adapter_refuses_what_it_does_not_know() -> None:
    """Arrays of another type or shape; a table that has lost what the window still reads."""
    here = run("kiln", "adapter", "use")
    kiln = here["KilnRank"](0, 1, heads_of_model=2)
    engine = here["engine_of"](kiln)
    kiln.layers[1] = kiln.layers[1].astype(np.float16)
    with pytest.raises(kvspec.SpecError, match=r"layers\[1\]=.*float16.*of float32"):
        here["cache_of"](engine, kiln)
    lost = kvspec.TransferRequest(
        request_id="1",
        num_tokens=39,
        producer_blocks=here["tables_of"]({0: [3, 1, 2], 1: [None, None, 4]}),
        consumer_blocks=here["tables_of"]({0: [6, 7, 1], 1: [None, 2, 3]}),
    )
    source = next(iter(here["sources"].values()))
    table = kvspec.build_table(here["plan"], source, next(iter(here["targets"].values())))
    with pytest.raises(kvspec.MismatchError, match="the null block for tokens 16"):
        table.select(lost)


def test_every_adapter_is_named_on_the_page() -> None:
    """And what each function of one is called, is called so there."""
    for engine in kvspec.adapters.ENGINES:
        assert f"kvspec.adapters.{engine}" in PAGE
        module = getattr(kvspec.adapters, engine)
        calls = [name for name in re.findall(r"`(\w+)\(", PAGE) if hasattr(module, name)]
        assert {"rank_cache", "block_tables"} < set(calls)
