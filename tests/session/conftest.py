"""Fixtures of the tests of sessions."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from two_engines import Side, four_to_two

from kvspec.testing import FakeNixl


@pytest.fixture
def net() -> Iterator[FakeNixl]:
    """Replace NIXL."""
    with FakeNixl() as fake:
        yield fake


@pytest.fixture
def pair(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Yield a producer of four ranks and a connected consumer of two."""
    with four_to_two() as sides:
        yield sides
