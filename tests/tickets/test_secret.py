"""Secrets of the environment and of files: what is accepted, and what is refused by its number."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvspec.errors import SpecError
from kvspec.wire.seal import Secret, secret_of


@pytest.mark.parametrize("given", [3, "short", b"brief", "\ud800" * 20], ids=repr)
def test_secret_rejects_wrong_values(given: object) -> None:
    with pytest.raises(SpecError):
        secret_of(given)


def test_secret_is_that_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secrets"
    path.write_text("a new secret, long enough\nan old secret, long enough\n")
    monkeypatch.delenv("KVSPEC_SECRET")
    monkeypatch.setenv("KVSPEC_SECRET_FILE", str(path))
    old = Secret(b"an old secret, long enough")
    both = secret_of(None)
    assert b"hello" == both.unseal("message", b"greeting", old.seal(b"greeting", b"hello"), "one")
    monkeypatch.setenv("KVSPEC_SECRET", "a secret, long enough")
    with pytest.raises(SpecError):
        secret_of(None)
    monkeypatch.delenv("KVSPEC_SECRET")
    monkeypatch.delenv("KVSPEC_SECRET_FILE")
    with pytest.raises(SpecError):
        secret_of(None)
