"""A session of the release before exchanges requests with a session of this one, both ways."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
OLDER = "ae02f8e"
"""The last commit that speaks version 10 alone."""
SCRIPT = ROOT / "tests" / "support" / "one_release.py"
SECRET = "the secret of two releases"  # noqa: S105 - of this test

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def older(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the package of the older commit, or skip."""
    command = ["git", "-C", str(ROOT), "archive", OLDER, "kvspec"]
    try:
        packed = subprocess.run(command, capture_output=True, check=True)  # noqa: S603
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"needs git and its history with the commit {OLDER}: {error}")
    folder = tmp_path_factory.mktemp("older")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder


@contextmanager
def process(package: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Run one rank with the *package* in a folder. It ends with its input."""
    env = os.environ | {
        "PYTHONPATH": str(package),
        "KVSPEC_SECRET": SECRET,
        "UCX_NET_DEVICES": "lo",
    }
    env["UCX_NET_DEVICES"] = "lo"
    env.pop("KVSPEC_SECRET_FILE", None)
    command = [sys.executable, str(SCRIPT), *arguments]
    with subprocess.Popen(  # noqa: S603
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as child:
        try:
            yield child
        finally:
            assert child.stdin is not None
            child.stdin.close()
            try:
                child.wait(30.0)
            except subprocess.TimeoutExpired:
                child.kill()


def told(child: subprocess.Popen[str], **command: Any) -> Any:
    """Return the answer of a child to *command*, or its first line."""
    assert child.stdin is not None
    assert child.stdout is not None
    if command:
        child.stdin.write(json.dumps(command) + "\n")
        child.stdin.flush()
    line = child.stdout.readline()
    assert line, f"the process ended during {command}"
    return json.loads(line)


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [("older", "this"), ("this", "older"), ("this", "this"), ("older", "older")],
)
def test_request_moves_between_two_releases(older: Path, producer: str, consumer: str) -> None:
    """Bytes, checksums and messages pass. Each speaks the newest version that both read."""
    packages = {"older": older, "this": ROOT}
    with ExitStack() as stack:
        p = stack.enter_context(process(packages[producer], "P"))
        d = stack.enter_context(process(packages[consumer], "D"))
        address, versions = told(p)
        _, own = told(d)
        told(d, connect=address)
        for number in range(3):
            remote_id = told(p, hold=f"r{number}", seed=number)
            wanted = told(p, digest=True)
            assert ["done", wanted] == told(d, load=remote_id)
        assert 3 == told(p, settled=3)
        assert [] == told(p, refused=True)
        assert [] == told(d, refused=True)
        common = min(versions, own)
        assert {common} == {told(p, spoken=True), told(d, spoken=True)}


@contextmanager
def two(
    older: Path, producer: str, consumer: str
) -> Iterator[tuple[subprocess.Popen[str], subprocess.Popen[str]]]:
    """Yield a producer and a connected consumer."""
    packages = {"older": older, "this": ROOT}
    with process(packages[producer], "P") as p, process(packages[consumer], "D") as d:
        address, _ = told(p)
        told(d)
        told(d, connect=address)
        yield p, d


def test_older_consumer_that_follows_fails_at_its_time_limit(older: Path) -> None:
    """It reads nothing, since no producer of this release sends progress. Others load as before."""
    with two(older, "this", "older") as (p, d):
        before = told(d, digest=True)
        assert ["failed", "timeout"] == told(d, follow=told(p, hold="r", seed=1))
        assert before == told(d, digest=True)
        remote_id = told(p, hold="s", seed=2)
        assert ["done", told(p, digest=True)] == told(d, load=remote_id)
        assert 2 == told(p, settled=2)
        assert [] == told(p, refused=True)


def test_progress_of_an_older_producer_is_refused_by_name(older: Path) -> None:
    """Its answers arrive all the same, so the load is done."""
    with two(older, "older", "this") as (p, d):
        remote_id = told(p, hold="r", seed=1, progress=True)
        assert ["done", told(p, digest=True)] == told(d, load=remote_id)
        assert 1 == told(p, settled=1)
        refused = told(d, refused=True)
        assert refused
        assert all("'progress'" in line for line in refused)
