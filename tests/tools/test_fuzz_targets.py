"""Test that each fuzz target decodes most fixed inputs and finds a planted fault."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import kvspec
from kvspec.ownership.stripes import Stripe

pytestmark = pytest.mark.pages

RUN = Path(__file__).parents[2] / "fuzz" / "run.py"
INPUTS = 40
Plant = Callable[[pytest.MonkeyPatch], None]


def load() -> Any:
    """Return the program that runs targets, as a module."""
    spec = importlib.util.spec_from_file_location("fuzz_run", RUN)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


FUZZ = load()


def fuzz(target: str, count: int = INPUTS) -> int:
    """Run every law of *target* on *count* fixed inputs and return how many it decodes."""
    laws = FUZZ.laws_of(target).values()
    assert laws
    return sum(law(data) is not None for law in laws for data in FUZZ.inputs(count))


@pytest.mark.parametrize("target", FUZZ.TARGETS)
def test_target_finds_no_fault_in_fixed_inputs(target: str) -> None:
    """More than half of the inputs decode to a case."""
    assert fuzz(target) > INPUTS // 2


@pytest.mark.parametrize("target", FUZZ.TARGETS)
def test_target_begins_with_its_invariant(target: str) -> None:
    """The first line of a target is its invariant, in one sentence."""
    first = (RUN.parent / f"{target}.py").read_text().splitlines()[0]
    assert first.startswith('"""')
    assert first.endswith(".")


def first_replica_only(patch: pytest.MonkeyPatch) -> None:
    """Send every consumer to the first replica under every policy."""

    def first(_self: object, _reader: int, equal: Any) -> Any:
        return equal, ((equal.replicas[0], Stripe()),)

    patch.setattr(kvspec.ownership.replicas.ReplicaChooser, "choose", first)


def second_part_shifted(patch: pytest.MonkeyPatch) -> None:
    """Place every second part one byte too late."""
    original = kvspec.memory.allocation.place

    def place(*arguments: Any) -> Any:
        members, size = original(*arguments)
        for member in members[1::2]:
            member.offset += 1
        return members, size + 1

    patch.setattr(kvspec.memory.allocation, "place", place)


def last_tile_lost(patch: pytest.MonkeyPatch) -> None:
    """Omit the last tile of every request."""
    original = kvspec.descriptors.tiles._cut

    def cut(*arguments: Any) -> Any:
        return {step: begins[:-1] for step, begins in original(*arguments).items()}

    patch.setattr(kvspec.descriptors.tiles, "_cut", cut)


def repeated_block_accepted(patch: pytest.MonkeyPatch) -> None:
    """Accept a table that contains one block twice."""
    patch.setattr(kvspec.descriptors.tiles, "check_once", lambda *_, **__: None)


def contexts_compared_by_number(patch: pytest.MonkeyPatch) -> None:
    """Treat two context ranks as sharing tokens only if their numbers are equal."""
    patch.setattr(kvspec.plan.replica_groups, "meet", lambda one, other: one.rank == other.rank)


def any_field_is_a_number(patch: pytest.MonkeyPatch) -> None:
    """Accept any field of a config as a number."""
    patch.setattr(
        "kvspec.models.fields.ModelConfig.number", lambda self, name: int(self.get(name) or 0)
    )


def impossible_message_blames_caller(patch: pytest.MonkeyPatch) -> None:
    """Raise an impossible message as an error of the caller instead of the sender."""
    patch.setattr("kvspec.wire.packing.refuse", lambda _, error, __: (_ for _ in ()).throw(error))


def impossible_value_blames_caller(patch: pytest.MonkeyPatch) -> None:
    """Raise the error of a constructor unchanged, as if the caller had passed the value."""
    patch.setattr("kvspec.wire.values.refuse", lambda _, error, __: (_ for _ in ()).throw(error))


@pytest.mark.parametrize(
    ("target", "plant"),
    [
        ("slices", first_replica_only),
        ("layouts", second_part_shifted),
        ("contexts", contexts_compared_by_number),
        ("block_tables", last_tile_lost),
        pytest.param("block_tables", repeated_block_accepted, marks=pytest.mark.slow),
        ("from_config", any_field_is_a_number),
        ("handshakes", impossible_value_blames_caller),
        ("messages", impossible_message_blames_caller),
    ],
)
def test_target_finds_a_planted_fault(
    target: str, plant: Plant, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The search uses 40 times as many inputs of the same series."""
    plant(monkeypatch)
    with pytest.raises((AssertionError, ValueError, TypeError)):
        fuzz(target, 40 * INPUTS)


def test_input_selects_its_law() -> None:
    """The first byte is the number of the law. An empty input runs none."""
    runs: list[tuple[int, bytes]] = []
    laws = [lambda data, at=at: runs.append((at, data)) for at in range(3)]
    run = FUZZ.one_input(laws)
    for data in (b"", b"\x00a", b"\x04b", b"\x05"):
        run(data)
    assert [(0, b"a"), (1, b"b"), (2, b"")] == runs


def test_corpus_gets_seeds_only_once(tmp_path: Path) -> None:
    """An empty folder gets seeds. A folder with files and a file stay as they are."""
    folder = tmp_path / "corpus"
    assert str(folder) == FUZZ.with_corpus([str(folder)])[-1]
    assert FUZZ.SEEDS == len(list(folder.iterdir()))
    for extra in list(folder.iterdir())[1:]:
        extra.unlink()
    FUZZ.with_corpus([str(folder)])
    (only,) = folder.iterdir()
    assert [str(only)] == FUZZ.with_corpus([str(only)])
