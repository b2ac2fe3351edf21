"""What a machine's transfers cost is read from a file that is whole and its own, or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvspec import SpecError
from kvspec.nixl import Costs, Staging
from kvspec.nixl.calibration import VARIABLE, calibrated, place, save, writable
from kvspec.nixl.costs import FIGURES

MEASURED = Costs(handle=1e-5, descriptor=2e-6, byte=1e-10, run=5e-8)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return where this test's figures are kept."""
    path = tmp_path / "deep" / "calibration.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def test_what_was_saved_is_read(file: Path) -> None:
    """By its path, by the environment, and by a rank's settings; it says where it is from."""
    assert file == save(MEASURED)
    assert [file] == list(file.parent.iterdir())
    for costs in (calibrated(), calibrated(file), calibrated(str(file)), Staging().costs):
        assert MEASURED == costs
        assert f"measured on this machine ({file})" == costs.origin


def test_there_is_a_place_without_the_variable(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In the user's cache directory."""
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert tmp_path / "kvspec" / "calibration.json" == place()


Change = Callable[[dict[str, Any]], object]


def changed(change: Change) -> Callable[[str], str]:
    """Return what makes another text of a right one."""

    def text(right: str) -> str:
        held = json.loads(right)
        change(held)
        return json.dumps(held)

    return text


WRONG: list[tuple[Callable[[str], str], str]] = [
    (lambda right: right[:-20], "whole"),
    (lambda _: "", "file of JSON"),
    (lambda _: "\x00\xff", "expected a file of JSON, whole"),
    (lambda _: "[" * 40000, "JSON"),
    (lambda right: right + " " * 70000, "over 65536 bytes"),
    (lambda _: "[]", "expected a dict"),
    (lambda _: "{}", "expected machine, seconds, version"),
    (changed(lambda held: held.update(version=2)), "version=2: expected 1"),
    (changed(lambda held: held["machine"].update(cpu="Another")), "cpu='Another': expected"),
    (changed(lambda held: held["machine"].update(cores=999)), "cores=999: expected"),
    (changed(lambda held: held["machine"].update(nixl="0.1")), "nixl='0.1': expected"),
    (changed(lambda held: held["machine"].update(transports="dust")), "transports='dust'"),
    (changed(lambda held: held["machine"].pop("cpu")), "machine"),
    (changed(lambda held: held.update(seconds=3)), "seconds=3: expected a dict"),
    (changed(lambda held: held["seconds"].pop("run")), "seconds"),
    (changed(lambda held: held["seconds"].update(run=-1)), "run=-1: expected"),
    (changed(lambda held: held["seconds"].update(byte="fast")), "byte='fast': expected"),
    (changed(lambda held: held["seconds"].update(byte=float("nan"))), "byte=nan: expected"),
    (changed(lambda held: held["seconds"].update(byte=1e9)), "byte=1000000000.0: expected"),
]


@pytest.mark.parametrize(("damage", "words"), WRONG)
def test_a_damaged_file_is_refused_or_replaced(
    file: Path, damage: Callable[[str], str], words: str
) -> None:
    """Refused if it was named; else the defaults stand in, and say why."""
    save(MEASURED)
    file.write_text(damage(file.read_text("utf-8")), "latin-1")
    with pytest.raises(SpecError, match=words) as caught:
        calibrated(file)
    assert str(file) in str(caught.value)
    costs = calibrated()
    assert Costs() == costs
    assert str(caught.value) in costs.origin
    assert costs.origin.startswith("the stated defaults")


@pytest.mark.parametrize("kind", ["missing", "folder", "pipe", "below a file"])
def test_a_file_that_cannot_be_read_is_no_crash(file: Path, kind: str) -> None:
    """Missing, or no file; nobody waits for who never writes."""
    if kind == "folder":
        file.mkdir(parents=True)
    if kind == "pipe":
        file.parent.mkdir()
        os.mkfifo(file)
    if kind == "below a file":
        file.parent.write_text("")
    assert ("was not run here" in calibrated().origin) == (kind == "missing")
    with pytest.raises(SpecError, match="expected a file that `kvspec calibrate` wrote"):
        calibrated(file)
    assert Costs() == calibrated()


@pytest.mark.parametrize("name", ["a" * 300, "nul\0"])
def test_a_name_that_no_file_has_is_no_crash(file: Path, name: str) -> None:
    """Neither to read nor to write."""
    with pytest.raises(SpecError, match="expected a file that `kvspec calibrate` wrote"):
        calibrated(file.with_name(name))
    with pytest.raises(SpecError, match=r"calibration=.*expected a file that can be written"):
        save(MEASURED, file.with_name(name))


def test_a_long_name_in_the_environment_is_no_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    """The defaults stand in."""
    monkeypatch.setenv(VARIABLE, "a" * 300)
    assert "File name too long" in calibrated().origin


def test_who_has_no_home_has_the_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the user of a container, of whom the machine knows a number alone."""
    for name in (VARIABLE, "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 54321)
    assert "KVSPEC_CALIBRATION=None: expected a path, since this user has no home" in (
        calibrated().origin
    )
    with pytest.raises(SpecError, match="KVSPEC_CALIBRATION=None"):
        save(MEASURED)


def test_nothing_is_left_where_nothing_can_be_written(file: Path) -> None:
    """A folder is refused by name, and before anything is measured."""
    file.mkdir(parents=True)
    for refused in (writable, partial(save, MEASURED)):
        with pytest.raises(SpecError, match="a file that can be written: this is a folder"):
            refused(path=file)
    assert [file] == list(file.parent.iterdir())


def test_a_path_is_a_path(file: Path) -> None:
    """No number."""
    wrong: Any = 3
    with pytest.raises(SpecError, match="path=3: expected a path"):
        calibrated(wrong)


def test_all_figures_are_kept() -> None:
    """What costs are made of is what the file has."""
    assert {*FIGURES, "origin"} == set(Costs.__annotations__)
