"""Test `kvspec vectors`: exit statuses and the names in its output."""

from __future__ import annotations

import gzip
import re
from pathlib import Path

import msgspec
import pytest

pytest.importorskip("typer", reason="needs the extra cli")

from typer.testing import CliRunner

from kvspec.cli.app import app
from kvspec.vectors import files
from kvspec.vectors.families import FAMILIES, transfers
from kvspec.vectors.recording import record

RUNNER = CliRunner()
ORDER = list(FAMILIES).index


def test_vectors_writes_the_named_family_and_checks_it(tmp_path: Path) -> None:
    written = RUNNER.invoke(app, ["vectors", str(tmp_path), "--family", "refusals"])
    assert (0, "refusals.json.gz") == (written.exit_code, written.stdout.split(":")[0])
    checked = RUNNER.invoke(app, ["vectors", str(tmp_path), "--check", "--family", "refusals"])
    assert (0, True) == (checked.exit_code, checked.stdout.endswith(" vectors, right\n"))


def test_vectors_check_of_the_large_set_names_what_a_small_file_lacks(tmp_path: Path) -> None:
    """Only some of many names are printed."""
    (first, *_) = transfers("pp")
    encoded = files.encoded("pp", [record(first)])
    (tmp_path / "pp.json.gz").write_bytes(gzip.compress(encoded))
    small, large = (
        RUNNER.invoke(app, ["vectors", str(tmp_path), "--check", "--family", "pp", *more])
        for more in ([], ["--large"])
    )
    assert (1, 1) == (small.exit_code, large.exit_code)
    assert (" and 47 more", " and 143 more") == tuple(
        re.findall(" and .* more", each.stdout)[0] for each in (small, large)
    )


def test_vectors_check_names_each_family_without_a_file(tmp_path: Path) -> None:
    RUNNER.invoke(app, ["vectors", str(tmp_path), "--family", "refusals"])
    checked = RUNNER.invoke(app, ["vectors", str(tmp_path), "--check"])
    missing = [line.split(":")[0] for line in checked.stdout.splitlines() if "MISSING" in line]
    assert (1, list(FAMILIES)) == (checked.exit_code, sorted([*missing, "refusals"], key=ORDER))
    named = RUNNER.invoke(app, ["vectors", str(tmp_path), "--check", "--family", "tp"])
    assert (1, True) == (named.exit_code, "tp: MISSING" in named.stdout)


def test_vectors_check_names_a_wrong_vector(tmp_path: Path) -> None:
    RUNNER.invoke(app, ["vectors", str(tmp_path), "--family", "refusals"])
    path = tmp_path / "refusals.json.gz"
    first, *rest = files.read(path).vectors
    wrong = msgspec.structs.replace(
        first, expected=msgspec.structs.replace(first.expected, refused=("other",))
    )
    path.write_bytes(gzip.compress(files.encoded("refusals", [wrong, *rest])))
    checked = RUNNER.invoke(app, ["vectors", str(tmp_path), "--check"])
    assert (1, True) == (checked.exit_code, f"WRONG: {first.id}\n" in checked.stdout)


def test_vectors_check_refuses_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "tp.json.gz").write_bytes(b"damaged")
    checked = RUNNER.invoke(app, ["vectors", str(tmp_path), "--check"])
    assert (2, True) == (checked.exit_code, "tp.json.gz" in checked.stderr)


def test_vectors_refuses_an_unknown_family(tmp_path: Path) -> None:
    refused = RUNNER.invoke(app, ["vectors", str(tmp_path), "--family", "unknown"])
    assert (2, True) == (refused.exit_code, "unknown" in refused.stderr)
