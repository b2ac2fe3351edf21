"""Test transfers under a launcher. Each process is one rank, and it may be missing or die."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import builders
import pytest
from forked import Forked
from refused import check_rejected, has_in_order

import kvspec
from kvspec.nixl.agent import package_names
from kvspec.run.job import Job
from kvspec.run.launched import LAUNCHERS, Place

pytestmark = [
    pytest.mark.commands,
    pytest.mark.nixl,
    pytest.mark.skipif(
        find_spec("torch") is None or not any(find_spec(name) for name in package_names()),
        reason="needs nixl and torch",
    ),
]
REPO = Path(kvspec.__file__).parents[1]
MODEL = Path(tempfile.mkdtemp(prefix="kvspec-test-")) / "config.json"
COMMAND = [
    *("transfer", "--model", str(MODEL), "--requests", "1"),
    *("--producer", "tp=1", "--consumer", "tp=1"),
]
TORCHRUN = ("--launcher", "torchrun")
SECRET = "the secret of this launch"  # noqa: S105 - of a test
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.fixture(autouse=True, scope="module")
def model() -> Iterator[None]:
    """Write the config of a small model, which all processes read."""
    MODEL.write_text(json.dumps(builders.LLAMA), "utf-8")
    yield
    shutil.rmtree(MODEL.parent)


def port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def environment_of(**variables: object) -> dict[str, str]:
    """Return the environment of a command on this checkout, with additional *variables*."""
    environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
    environment |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment |= {"KVSPEC_SECRET": SECRET}
    return environment | {name: str(value) for name, value in variables.items()}


def started(arguments: list[str], **variables: object) -> subprocess.Popen[str]:
    """Start Python on this checkout with *arguments* and additional environment *variables*."""
    return subprocess.Popen(  # noqa: S603 - this checkout's own commands
        [sys.executable, *arguments],
        env=environment_of(**variables),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rank_of(launcher: str, number: int, store: int, *more: str, secret: str = SECRET) -> Forked:
    """Start one of two processes as *launcher* does. The store has the port *store*."""
    names = dict(zip(LAUNCHERS[launcher], (number, 2, number), strict=True))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store, "KVSPEC_SECRET": secret, **names}
    folder = Path(tempfile.mkdtemp(dir=MODEL.parent))
    return Forked([*COMMAND, "--launcher", launcher, *more], environment_of(**variables), folder)


def ended(process: subprocess.Popen[str] | Forked, seconds: float = 120) -> tuple[Any, str, str]:
    """Return exit status, output and error output."""
    output, errors = process.communicate(timeout=seconds)
    return process.returncode, output, errors


def test_two_nodes_of_torchrun_move_every_byte() -> None:
    """Only the first process prints the report."""
    command = [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port())),
    ]
    nodes = [
        started([*command, "--node-rank", node, "-m", "kvspec.cli", *COMMAND, *TORCHRUN])
        for node in "01"
    ]
    (status, output, errors), (other, silent, _) = map(ended, nodes)
    assert (0, 0) == (status, other), errors
    assert "right" in output
    assert "" == silent


def test_all_processes_fail_if_a_byte_is_wrong() -> None:
    """Only the first process prints the fault."""
    store = port()
    ranks = [rank_of("slurm", number, store, "--tamper") for number in range(2)]
    (status, output, _), (other, silent, errors) = map(ended, ranks)
    assert (1, 1) == (status, other)
    assert has_in_order(["1", "consumer tp0", "token", "byte"], output)
    assert ("", "") == (silent, errors)


def test_ranks_with_different_secrets_do_not_connect() -> None:
    """The consumer refuses the introduction of the producer, and both processes fail."""
    store = port()
    secrets = (SECRET, "the secret of another launch")
    ranks = [rank_of("slurm", rank, store, secret=key) for rank, key in enumerate(secrets)]
    (status, output, _), (other, silent, errors) = map(ended, ranks)
    assert (1, 1, "") == (status, other, silent)
    assert has_in_order(["consumer tp0", "connect", "secret"], output)
    assert has_in_order(["consumer tp0", "connect", "secret"], errors)


def test_ranks_with_different_options_do_not_start() -> None:
    """The consumer would have cached what the producer's report calls moved."""
    store = port()
    ranks = [rank_of("slurm", 0, store), rank_of("slurm", 1, store, "--cached", "200")]
    (status, output, _), (other, silent, errors) = map(ended, ranks)
    assert (1, 1, "") == (status, other, silent)
    assert all(has_in_order(["start", "options", "cached"], text) for text in (output, errors))


def test_report_names_a_missing_rank() -> None:
    """The first process prints the report soon after the timeout of the job."""
    began = time.monotonic()
    status, output, _ = ended(rank_of("openmpi", 0, port(), "--timeout", "5"))
    assert status == 1
    assert has_in_order(["consumer tp0", "start", "5"], output)
    assert time.monotonic() - began < 60


def test_error_names_the_address_of_a_missing_store() -> None:
    """The first process runs the store, and the test does not start that process."""
    store = port()
    status, output, errors = ended(rank_of("slurm", 1, store, "--timeout", "4"))
    assert (1, "") == (status, output)
    assert f"127.0.0.1:{store}" in errors


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_report_names_a_rank_that_dies_or_hangs(number: signal.Signals) -> None:
    """The other process reports it in time and ends."""
    store = port()
    ranks = [rank_of("slurm", rank, store, "--timeout", "12") for rank in range(2)]
    try:
        wait_for_nixl(ranks[1])
        ranks[1].send_signal(number)
        status, output, errors = ended(ranks[0])
        assert status == 1
        assert "consumer tp0" in output, errors
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def test_rank_ends_if_the_process_of_the_store_hangs() -> None:
    """The second process reports it soon after the timeout, although torch waits without end."""
    store = port()
    ranks = [rank_of("slurm", rank, store, "--timeout", "6") for rank in range(2)]
    try:
        wait_for_nixl(ranks[1])
        ranks[0].send_signal(signal.SIGSTOP)
        status, output, errors = ended(ranks[1], 40)
        assert (1, "") == (status, output)
        assert has_in_order(["consumer tp0", f"127.0.0.1:{store}"], errors)
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


def wait_for_nixl(process: Forked) -> None:
    """Wait until a process has loaded NIXL, after it has met the store and before its rank runs."""
    while not any("nixl" in line for line in mapped(process.pid)):
        time.sleep(0.05)
        assert process.poll() is None


def mapped(pid: int) -> list[str]:
    """Return the files that a process has mapped into its memory."""
    try:
        return Path(f"/proc/{pid}/maps").read_text("utf-8").splitlines()
    except OSError:
        return []


SLURM: dict[str, Any] = {
    "SLURM_PROCID": "0",
    "SLURM_NTASKS": "2",
    "SLURM_LOCALID": "0",
    "MASTER_ADDR": "node-0",
    "MASTER_PORT": "29500",
    "KVSPEC_SECRET": SECRET,
}
WRONG: list[tuple[str, dict[str, str | None], str, object, object]] = [
    ("slurm", {"SLURM_PROCID": None}, "SLURM_PROCID", None, "number"),
    ("slurm", {"SLURM_PROCID": "two"}, "SLURM_PROCID", "two", "number"),
    ("slurm", {"SLURM_PROCID": "-1"}, "SLURM_PROCID", "-1", "number"),
    ("slurm", {"SLURM_PROCID": "2"}, "SLURM_PROCID", 2, 2),
    ("slurm", {"SLURM_NTASKS": "3"}, "SLURM_NTASKS", 3, 2),
    ("slurm", {"MASTER_ADDR": None}, "MASTER_ADDR", None, "host"),
    ("slurm", {"MASTER_PORT": "http"}, "MASTER_PORT", "http", "number"),
    ("slurm", {"KVSPEC_SECRET": None}, "KVSPEC_SECRET", None, 16),
    ("slurm", {"KVSPEC_SECRET": ""}, "KVSPEC_SECRET", "0 bytes", 16),
    ("slurm", {"KVSPEC_SECRET": "x" * 15}, "KVSPEC_SECRET", "15 bytes", 16),
    ("mpirun", {}, "launcher", "mpirun", "openmpi"),
]


@pytest.mark.parametrize(("launcher", "changes", "field", "value", "word"), WRONG)
def test_place_rejects_missing_and_wrong_variables(
    launcher: str, changes: dict[str, str | None], field: str, value: object, word: object
) -> None:
    """The field is the name of the variable."""
    engine = builders.engine(builders.gqa(1))
    variables = {name: text for name, text in (SLURM | changes).items() if text is not None}
    job = Job(producer=engine, consumer=engine)
    check_rejected(lambda: Place.of(launcher, job, variables), field, value, word)


def test_place_does_not_print_its_secret() -> None:
    """It reads the secret as the bytes of the environment."""
    engine = builders.engine(builders.gqa(1))
    place = Place.of("slurm", Job(producer=engine, consumer=engine), SLURM)
    assert SECRET.encode() == place.secret
    assert SECRET not in repr(place)


def test_command_rejects_a_missing_variable() -> None:
    """The exit status is 2."""
    status, _, errors = ended(started(["-m", "kvspec.cli", *COMMAND, "--launcher", "torchrun"]))
    assert status == 2
    assert "RANK=None" in errors
