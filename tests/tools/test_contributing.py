"""The worked example of CONTRIBUTING.md is all that a new kind of layer takes."""

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
    """Import step 1 as a module and put the line of step 2 into the table of kinds, for a while."""
    module = ModuleType("keys_only")
    sys.modules[module.__name__] = module
    exec(compile(STEPS["1"], "CONTRIBUTING.md, step 1", "exec"), vars(module))  # noqa: S102
    names = vars(kinds) | vars(module)
    exec(compile(STEPS["2"], "CONTRIBUTING.md, step 2", "exec"), names)  # noqa: S102
    yield module
    del kinds.KINDS[KIND]
    del sys.modules[module.__name__]


def test_the_steps_are_one_file_one_line_and_facts() -> None:
    """The document shows three steps, the second a single line."""
    assert ["1", "2", "3"] == sorted(STEPS)
    assert 1 == len(STEPS["2"].splitlines())


def test_the_facts_are_true(source: ModuleType) -> None:
    """What step 3 works out by hand is so."""
    exec(compile(STEPS["3"], "CONTRIBUTING.md, step 3", "exec"), dict(vars(source)))  # noqa: S102


@given(data=st.data())
@settings(suppress_health_check=list(HealthCheck))
@pytest.mark.usefixtures("source")
def test_the_new_kind_keeps_every_law(data: st.DataObject) -> None:
    """Plan, table and verify work with it untouched, and so do the oracle and the laws."""
    case, other = data.draw(strategies.twins(kinds=(KIND,)))
    assert [] == laws.broken(KVSPEC, case, other)
    here = world(case)
    sides = [
        {rank: cache for rank, (cache, _) in held.items()}
        for held in (here.producers, here.consumers)
    ]
    assert None is kvspec.verify(here.plan, *sides, case.request)


def test_a_new_field_is_compared_without_being_named(source: ModuleType) -> None:
    """Two engines that differ in a field of the new kind are refused, field by field."""

    def engine(**fields: Any) -> kvspec.EngineSpec:
        spec = source.KeysOnlySpec(block_size=4, head_size=2, dtype="uint8", **fields)
        group = kvspec.KVCacheGroup(name="keys", layers=["layer"], spec=spec)
        return kvspec.EngineSpec(groups=[group])

    (found,) = kvspec.mismatches(engine(total_num_kv_heads=2), engine(total_num_kv_heads=4))
    assert ("layer.total_num_kv_heads", 2, 4) == (found.field, found.producer, found.consumer)


def test_the_documented_messages_are_real() -> None:
    """The table of errors quotes what is raised."""
    with pytest.raises(kvspec.SpecError) as raised:
        kvspec.MLAAttentionSpec(block_size=0, head_size=1, dtype="uint8")
    assert f"`{raised.value}`" in DOCUMENT.read_text(encoding="utf-8")
