"""Fixtures of the tests of sessions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext

import pytest
from two_engines import Side, four_to_two

from kvspec.testing import FakeNixl


@pytest.fixture
def net() -> Iterator[FakeNixl]:
    """Replace NIXL."""
    with FakeNixl() as fake:
        yield fake


@pytest.fixture
def simulated(request: pytest.FixtureRequest) -> Iterator[None]:
    """Replace NIXL, unless the test has the marker `nixl`. A real agent costs a third of a second.

    The tests with the marker show that an adapter moves bytes over the real NIXL too.
    """
    with nullcontext() if request.node.get_closest_marker("nixl") else FakeNixl():
        yield


@pytest.fixture
def pair(net: FakeNixl) -> Iterator[tuple[Side, Side]]:
    """Yield a producer of four ranks and a connected consumer of two."""
    with four_to_two() as sides:
        yield sides
