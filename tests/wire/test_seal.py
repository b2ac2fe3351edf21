"""Secrets: of the environment, of a file, and their change in a running deployment."""

from __future__ import annotations

from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
from two_engines import Side, engine, request

from kvspec.errors import SpecError, WireError
from kvspec.session import new_remote_id
from kvspec.testing import FakeNixl
from kvspec.tickets import PrefillTicket
from kvspec.wire import seal
from kvspec.wire.seal import Secret, secret_of

OLD, NEW = b"the old secret of all", b"the new secret of all"
STEPS = [(OLD,), (OLD, NEW), (NEW, OLD), (NEW,)]


def file_of(path: Path, *lines: bytes) -> str:
    """Return the path of a file with these lines."""
    file = path / "secrets"
    file.write_bytes(b"\n".join(lines) + b"\n")
    seal._of_file.cache_clear()
    return str(file)


@pytest.fixture
def clean(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """Return the environment without any secret."""
    monkeypatch.delenv("KVSPEC_SECRET", raising=False)
    monkeypatch.delenv("KVSPEC_SECRET_FILE", raising=False)
    return monkeypatch


def test_file_gives_its_first_line_as_key_and_accepts_all(
    clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A file of one line is the same secret as `KVSPEC_SECRET`."""
    clean.setenv("KVSPEC_SECRET_FILE", file_of(tmp_path, NEW, OLD))
    assert Secret(NEW, (OLD,)) == secret_of(None)
    file_of(tmp_path, NEW)
    assert Secret(NEW) == secret_of(None) == secret_of(NEW)
    (tmp_path / "secrets").write_bytes(NEW + b"\r\n" + OLD)
    assert Secret(NEW) == secret_of(None)
    seal._of_file.cache_clear()
    assert Secret(NEW, (OLD,)) == secret_of(None)


@pytest.mark.parametrize(
    ("lines", "value"),
    [
        ((b"",), "line 1 of 0 bytes"),
        ((NEW, b"", OLD), "line 2 of 0 bytes"),
        ((NEW, b"a short one"), "line 2 of 11 bytes"),
        ((NEW, OLD + b" "), f"line 2 of {len(OLD) + 1} bytes"),
        ((b" " * 20,), "line 1 of 20 bytes"),
        ([bytes([65 + n]) * 16 for n in range(9)], "9 lines"),
    ],
)
def test_file_with_a_bad_line_is_refused_and_not_shown(
    clean: pytest.MonkeyPatch, tmp_path: Path, lines: Any, value: str
) -> None:
    """The error has the number of the line. It never contains a secret."""
    clean.setenv("KVSPEC_SECRET_FILE", file_of(tmp_path, *lines))
    with pytest.raises(SpecError) as caught:
        secret_of(None)
    assert ("KVSPEC_SECRET_FILE", value) == (caught.value.field, caught.value.value)
    assert "secret of all" not in str(caught.value)
    assert "short one" not in str(caught.value)


def test_missing_empty_huge_and_second_source_of_secret_are_refused(
    clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Nobody starts with a secret that was not meant."""
    empty, huge = tmp_path / "empty", tmp_path / "huge"
    empty.write_bytes(b"")
    huge.write_bytes(b"x" * (1 << 17))
    for path in (str(tmp_path / "none"), str(tmp_path), str(empty), str(huge), ""):
        clean.setenv("KVSPEC_SECRET_FILE", path)
        with pytest.raises(SpecError) as caught:
            secret_of(None)
        assert "KVSPEC_SECRET_FILE" == caught.value.field
    clean.setenv("KVSPEC_SECRET_FILE", file_of(tmp_path, NEW))
    clean.setenv("KVSPEC_SECRET", OLD.decode())
    with pytest.raises(SpecError, match="not both"):
        secret_of(None)


@pytest.mark.parametrize("accepted", [(b"",), (OLD, b"short"), (b" " * 16,)])
def test_accepted_secret_that_is_empty_or_short_is_refused(accepted: tuple[bytes, ...]) -> None:
    """An empty accepted key would accept the seals of everybody."""
    with pytest.raises(SpecError):
        secret_of(Secret(NEW, accepted))


def test_seal_of_a_neighbouring_step_is_accepted_and_no_other() -> None:
    """Each rank accepts what ranks of the step before and after it seal."""
    secrets = [Secret(step[0], step[1:]) for step in STEPS]
    for (at, one), (there, two) in product(enumerate(secrets), repeat=2):
        sealed = one.seal(b"x\n", b"body")
        if abs(at - there) <= 1:
            assert b"body" == two.unseal("x", b"x\n", sealed, "one")
            assert two.proves(one.mac(b"x\n", b"body").hex(), b"x\n", b"body")
        elif {at, there} == {0, 3}:
            with pytest.raises(WireError):
                two.unseal("x", b"x\n", sealed, "one")
            assert not two.proves(one.mac(b"x\n", b"body").hex(), b"x\n", b"body")


def side(
    name: str, step: tuple[bytes, ...], clean: pytest.MonkeyPatch, path: Path, epoch: int
) -> Side:
    """Return an engine that was started with the secrets of a step."""
    clean.setenv("KVSPEC_SECRET_FILE", file_of(path, *step))
    polled = name == "D"
    return Side(name, engine(1), epoch=epoch, polled=polled)


def test_secret_changes_engine_by_engine_without_a_refused_request(
    clean: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """P and D are restarted one after the other in each step, and each pair moves a request."""
    pairs = [(STEPS[0], STEPS[0])]
    for before, after in pairwise(STEPS):
        pairs += [(after, before), (after, after)]
    for epoch, (p_step, d_step) in enumerate(pairs, 1):
        with (
            FakeNixl(),
            side("P", p_step, clean, tmp_path, epoch) as producer,
            side("D", d_step, clean, tmp_path, epoch) as consumer,
        ):
            wanted, name = request(f"r{epoch}"), new_remote_id(f"r{epoch}")
            producer.fill(wanted)
            consumer.spoil(wanted)
            producer.hold(name)
            consumer.connect(producer)
            (load,) = consumer.load(wanted, name)
            for _ in range(1000):
                producer.poll()
                consumer.poll()
                if load.poll() != "moving":
                    break
            assert "done" == load.poll(), load.error
            assert [] == consumer.wrong(wanted)
            assert [] == [*producer.first._messages.refused, *consumer.first._messages.refused]


def test_ticket_of_a_neighbouring_step_is_accepted() -> None:
    """A router may deliver a ticket that an engine of the step before has sealed."""
    ticket = PrefillTicket(
        engine_id="P",
        addresses=("127.0.0.1:1",),
        remote_id=new_remote_id("r"),
        computed_tokens=4,
        tables={"full": [1]},
    )
    for step, other in pairwise(STEPS):
        for one, two in ((step, other), (other, step)):
            params = ticket.to_params(Secret(one[0], one[1:]))
            assert ticket == PrefillTicket.from_params(params, Secret(two[0], two[1:]))
