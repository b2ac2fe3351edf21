"""Values of a wrong type raise an error of kvspec, not an exception of Python or numpy."""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
from refused import refusal

import kvspec
from kvspec import RankId
from kvspec.wire.messages import ChecksumContents

RANK = RankId()
ENGINE = builders.engine(builders.gqa(), layers=("l", "m"))
CACHE = kvspec.plan_memory(ENGINE, RANK, 4)
ODD: tuple[Any, ...] = (None, [], {}, 1.5, "0", True, np.zeros((2, 2), np.int64))
"""Values other than a plain int."""


@pytest.mark.parametrize("name", ["base", "block_stride", "unit_stride", "state_stride"])
@pytest.mark.parametrize("value", ODD, ids=repr)
def test_cache_rejects_region_whose_address_is_not_an_int(name: str, value: Any) -> None:
    """The error names the field of the region."""
    first, *others = CACHE.regions
    wrong = [attrs.evolve(first, **{name: value}), *others]
    error = refusal(lambda: kvspec.RankCache(ENGINE, RANK, wrong, CACHE.memory))
    assert f"regions['l.k'].{name}" == error.field
    assert value is error.value


@pytest.mark.parametrize("value", ODD[:4], ids=repr)
@pytest.mark.parametrize("name", ["layer", "part", "memory_type", "device"])
def test_cache_rejects_region_with_name_of_wrong_type(name: str, value: Any) -> None:
    """A region's layer, part, memory type and device may be values that have no hash."""
    first, *others = CACHE.regions
    wrong = [attrs.evolve(first, **{name: value}), *others]
    error = refusal(lambda: kvspec.RankCache(ENGINE, RANK, wrong, CACHE.memory))
    assert "regions" in error.field


@pytest.mark.parametrize(
    ("name", "value"),
    [("parts", each) for each in (None, 1, "abc", {"l": 1}, [None], [["l"]], [], ["l", "l"])]
    + [("layer", each) for each in (None, 1, "", ["l"])],
)
def test_extent_rejects_names_that_are_not_texts(name: str, value: Any) -> None:
    """The error names the field."""
    fields: dict[str, Any] = {"layer": "l", "parts": ("k",), name: value}
    error = refusal(lambda: ChecksumContents(**fields, units=range(1), tokens=range(1)))
    assert name == error.field


@pytest.mark.parametrize(
    "value",
    [np.zeros((2, 2)), np.array([["l", "m"]]), [np.array(["l", "m"])], [["l"]], [None], ["l", 1]],
    ids=repr,
)
def test_table_rejects_layers_that_are_not_names(value: Any) -> None:
    """The rows of an array with two dimensions are not names."""
    plan = kvspec.plan_transfer(ENGINE, ENGINE)
    error = refusal(lambda: kvspec.build_table(plan, CACHE, CACHE, layers=value))
    assert "layers" == error.field


@pytest.mark.parametrize("value", [np.array(["l"]), {"l"}, frozenset("l"), ("l",)], ids=repr)
def test_table_accepts_layers_of_any_collection(value: Any) -> None:
    """The order of names does not matter, so a set is accepted."""
    plan = kvspec.plan_transfer(ENGINE, ENGINE)
    table = kvspec.build_table(plan, CACHE, CACHE, layers=value)
    assert frozenset("l") == table.layers


@pytest.mark.parametrize("digits", [19, 5000])
def test_stages_reject_layer_number_that_is_too_long(digits: int) -> None:
    """Python refuses to read an int of 5,000 digits with an exception of its own."""
    names = ("layers.0", f"layers.{'1' * digits}")
    error = refusal(lambda: builders.engine(builders.gqa(), layers=names, pp_size=2))
    assert "layers" == error.field
    assert names[1] == error.value


def test_stages_accept_layer_number_with_leading_zeros() -> None:
    """Zeros before a number do not make it large."""
    names = ("layers.0", f"layers.{'0' * 30}1")
    engine = builders.engine(builders.gqa(), layers=names, pp_size=2)
    assert (names[1],) == engine.layers_at(engine.groups[0], 1)
