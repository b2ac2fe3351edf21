"""Test that the example adapter in docs/adapters.md moves right bytes and rejects wrong input."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from refused import refusal

import kvspec

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
BLOCKS = dict(re.findall(r"^```python (\w+)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))


def run(*names: str) -> dict[str, Any]:
    """Run blocks of the page in the given order, and return the names that they define."""
    namespace: dict[str, Any] = {}
    for name in names:
        exec(compile(BLOCKS[name], f"docs/adapters.md, {name}", "exec"), namespace)  # noqa: S102
    return namespace


def test_example_adapter_moves_every_live_token() -> None:
    """The checks of the page succeed, and all heads of both layers have the producer's values."""
    here = run("kiln", "adapter", "use")
    assert ["kiln", "adapter", "use"] == list(BLOCKS)
    sides = {"p": (here["producers"], 3), "c": (here["consumers"], 2)}
    tables = {"p": {0: [3, 1, 2], 1: [0, 5, 4]}, "c": {0: [6, 7, 1], 1: [0, 2, 3]}}
    for layer, first in ((0, 0), (1, 17)):
        for token in range(first, 40):
            for head in range(6):
                values = []
                for side, (ranks, heads) in sides.items():
                    array = ranks[head // heads].layers[layer]
                    block = tables[side][layer][token // 16]
                    values.append(array[block, :, token % 16, head % heads])
                assert np.array_equal(*values)
                assert values[1].all()


def test_example_adapter_rejects_wrong_arrays_and_lost_blocks() -> None:
    """One array has another dtype. One table lacks a block that the window reads."""
    here = run("kiln", "adapter", "use")
    kiln = here["KilnRank"](0, 1, heads_of_model=2)
    engine = here["engine_of"](kiln)
    kiln.layers[1] = kiln.layers[1].astype(np.float16)
    error = refusal(lambda: here["cache_of"](engine, kiln))
    assert "layers[1]" == error.field
    assert "float16" in str(error.value)
    lost = kvspec.TransferRequest(
        request_id="1",
        num_tokens=39,
        producer_blocks=here["tables_of"]({0: [3, 1, 2], 1: [None, None, 4]}),
        consumer_blocks=here["tables_of"]({0: [6, 7, 1], 1: [None, 2, 3]}),
    )
    source = next(iter(here["sources"].values()))
    table = kvspec.build_table(here["plan"], source, next(iter(here["targets"].values())))
    with pytest.raises(kvspec.MismatchError) as caught:
        table.select(lost)
    (mismatch,) = caught.value.mismatches
    assert mismatch.field.startswith("producer_blocks")


def test_page_of_adapters_names_every_adapter() -> None:
    """The page also names the functions of each adapter.

    The adapter for transformers copies prompts, so it describes no memory of the engine.
    """
    for engine in kvspec.adapters.ENGINES:
        assert f"kvspec.adapters.{engine}" in PAGE
        module = getattr(kvspec.adapters, engine)
        calls = [name for name in re.findall(r"`(\w+)\(", PAGE) if hasattr(module, name)]
        if engine == "transformers":
            assert set(module.__all__) == set(calls)
        else:
            assert {"rank_cache", "block_tables"} < set(calls)
