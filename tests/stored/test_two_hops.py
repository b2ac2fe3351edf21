"""The law of stored pages: two hops are one hop, for all kinds and all sizes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvspec.testing.laws.stored_pages import StoredCase
from kvspec.testing.stored import STORABLE, stored_cases, two_hops


@given(stored_cases())
def test_two_hops_are_one_hop(case: StoredCase) -> None:
    assert two_hops(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORABLE)
@settings(max_examples=40)
@given(data=st.data())
def test_two_hops_are_one_hop_for_each_kind(kind: str, data: st.DataObject) -> None:
    assert two_hops(data.draw(stored_cases([kind]))) == []
