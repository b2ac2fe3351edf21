"""Fixtures of the tests of NIXL."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvspec.testing.fake_nixl import FakeNixl


@pytest.fixture
def net() -> Iterator[FakeNixl]:
    """Replace NIXL."""
    with FakeNixl() as made:
        yield made
