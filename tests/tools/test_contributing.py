"""Test the example of CONTRIBUTING.md, which adds a new kind of layer in three steps."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.testing import kinds, laws, strategies
from kvspec.testing.laws import KVSPEC
from kvspec.testing.world import world

DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"
STEP = re.compile(r"^```python step (\d)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
STEPS = dict(STEP.findall(DOCUMENT.read_text(encoding="utf-8")))
KIND = "keys only"


@pytest.fixture(scope="module")
def source() -> Iterator[ModuleType]:
    """Import step 1 as a module and add the line of step 2 to the kinds. Both are undone later."""
    module = ModuleType("keys_only")
    sys.modules[module.__name__] = module
    exec(compile(STEPS["1"], "CONTRIBUTING.md, step 1", "exec"), vars(module))  # noqa: S102
    names = vars(kinds) | vars(module)
    exec(compile(STEPS["2"], "CONTRIBUTING.md, step 2", "exec"), names)  # noqa: S102
    yield module
    del kinds.KINDS[KIND]
    del sys.modules[module.__name__]


def test_contributing_has_three_steps() -> None:
    """The second step is a single line."""
    assert ["1", "2", "3"] == sorted(STEPS)
    assert 1 == len(STEPS["2"].splitlines())


def test_facts_of_step_three_hold(source: ModuleType) -> None:
    """The numbers that a person computed are right."""
    exec(compile(STEPS["3"], "CONTRIBUTING.md, step 3", "exec"), dict(vars(source)))  # noqa: S102


@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck))
@pytest.mark.usefixtures("source")
def test_new_kind_keeps_every_law(data: st.DataObject) -> None:
    """Plan, table, `verify`, the oracle and the laws need no change for a new kind."""
    case, other = data.draw(strategies.twins(kinds=(KIND,)))
    assert [] == laws.broken(KVSPEC, case, other)
    transfer = world(case)
    sides = [
        {rank: cache for rank, (cache, _) in held.items()}
        for held in (transfer.producers, transfer.consumers)
    ]
    assert None is kvspec.verify(transfer.plan, *sides, case.request)


def test_plan_compares_fields_of_new_kind(source: ModuleType) -> None:
    """Two engines that differ in a field of the new kind do not fit."""

    def engine(**fields: Any) -> kvspec.EngineSpec:
        spec = source.KeysOnlySpec(block_size=4, head_size=2, dtype="uint8", **fields)
        group = kvspec.KVCacheGroup(name="keys", layers=["layer"], spec=spec)
        return kvspec.EngineSpec(groups=[group])

    (mismatch,) = kvspec.mismatches(engine(total_num_kv_heads=2), engine(total_num_kv_heads=4))
    assert ("layer.total_num_kv_heads", 2, 4) == (
        mismatch.field,
        mismatch.producer,
        mismatch.consumer,
    )


def test_contributing_quotes_a_real_message() -> None:
    """The table of errors contains the message that is raised."""
    with pytest.raises(kvspec.SpecError) as raised:
        kvspec.MLAAttentionSpec(block_size=0, head_size=1, dtype="uint8")
    assert f"`{raised.value}`" in DOCUMENT.read_text(encoding="utf-8")
