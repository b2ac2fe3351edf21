"""Test that the quick theorems about the integer core hold, and that they find planted faults.

`python proof/run.py` proves all theorems. docs/proof.md describes them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
pytest.importorskip("z3", reason="z3-solver is not installed: pip install --group proof")


@pytest.fixture(scope="module")
def proof() -> Iterator[ModuleType]:
    """Return proof/run.py as a module."""
    sys.path.insert(0, str(ROOT / "proof"))
    try:
        yield importlib.import_module("run")
    finally:
        sys.path.remove(str(ROOT / "proof"))
        for name in ("run", "theorems", "library", "symbolic"):
            sys.modules.pop(name, None)


def test_quick_theorems_hold(proof: ModuleType) -> None:
    """A failing theorem is reported by name, with its counterexample."""
    judged = {t.name: proof.judged(t, None) for t in proof.chosen((), quick=True)}
    assert len(judged) > 30
    assert {} == {name: how for name, (good, how) in judged.items() if not good}


def test_quick_theorems_find_planted_faults(proof: ModuleType) -> None:
    """Every fourth theorem is tried. `python proof/run.py --plant` plants all faults."""
    plants = {t.plants[0]: t for t in proof.chosen((), quick=True)[::4] if t.plants}
    assert len(plants) > 8
    assert [] == [fault.after for fault, t in plants.items() if not proof.judged(t, fault)[0]]


def test_theorems_without_integers_fail(proof: ModuleType) -> None:
    """Assumptions that contradict each other would prove anything."""

    def empty(path: object) -> None:
        x = path.int("x")  # type: ignore[attr-defined]
        path.assume((x > 0) & (x < 0))  # type: ignore[attr-defined]
        path.claim("anything", x == 7)  # type: ignore[attr-defined]

    with pytest.raises(sys.modules["symbolic"].RefutedError):
        proof.explore(empty)
