"""Each exhibit of the museum is caught by its law, and kvspec passes the same transfers."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from exhibits_of_releases import Holder
from hypothesis import given, settings
from table import EXHIBITS, PAGE, row
from toy import Toy

from kvspec.testing import strategies
from kvspec.testing.laws import LAWS
from kvspec.testing.laws.release import Script, play

if TYPE_CHECKING:
    from exhibit import Exhibit

BY_REFERENCE = {exhibit.reference: exhibit for exhibit in EXHIBITS}


@pytest.mark.parametrize("exhibit", EXHIBITS, ids=BY_REFERENCE)
def test_exhibit_is_caught_by_its_law_and_kvspec_is_not(exhibit: Exhibit) -> None:
    """The smallest transfer is always the same, and it is the one on the page."""
    smallest = exhibit.smallest()
    assert exhibit.minimal == exhibit.describe(smallest)
    assert exhibit.fault(smallest, exhibit.right) is None

    @settings(max_examples=10, database=None, derandomize=True)
    @given(exhibit.cases)
    def kvspec_keeps_the_law(drawn: Any) -> None:
        assert exhibit.fault(drawn, exhibit.right) is None

    kvspec_keeps_the_law()


# The toy copies rows, and knows no page format.
OF_BYTES = {
    name: exhibit
    for name, exhibit in BY_REFERENCE.items()
    if exhibit.law == 1 and exhibit.system.descriptors and "CPU attention" not in name
}


@pytest.mark.parametrize("exhibit", OF_BYTES.values(), ids=OF_BYTES)
def test_toy_without_the_mistake_keeps_law_1(exhibit: Exhibit) -> None:
    """An exhibit is caught because of its mistake, and not because the toy is wrong."""

    @settings(max_examples=10, database=None, derandomize=True)
    @given(exhibit.cases)
    def toy_keeps_the_law(drawn: Any) -> None:
        assert exhibit.fault(drawn, Toy().system()) is None

    toy_keeps_the_law()


@given(strategies.scripts())
def test_holder_without_a_mistake_keeps_law_12(script: Script) -> None:
    assert play(Holder, script) is None


def test_museum_shows_at_least_25_different_bugs() -> None:
    assert len(EXHIBITS) >= 25
    assert len(EXHIBITS) == len(BY_REFERENCE)


def test_each_law_catches_a_bug_except_law_2_which_is_about_the_others() -> None:
    """Laws 15 and 16 are about stores: `tests/kit/test_stores.py` has their mistakes."""
    assert {law.number for law in LAWS} - {2, 15, 16} == {exhibit.law for exhibit in EXHIBITS}


def test_museum_page_lists_every_exhibit() -> None:
    """`python tests/museum/table.py` writes the page. The seconds are those of one machine."""
    lines = PAGE.read_text("utf-8").splitlines()
    for exhibit in EXHIBITS:
        assert any(line.startswith(row(exhibit)) for line in lines), exhibit.reference
    assert len(EXHIBITS) == sum("| law " in line for line in lines)
