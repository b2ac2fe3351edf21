"""`kvspec transfer` on a launcher: each process one rank; who is missing, dies or lies is named."""

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

import kvspec
from kvspec import SpecError
from kvspec.nixl.agent import package_names
from kvspec.run import LAUNCHERS, Job, Place

pytestmark = [
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
    *("--producer-tp", "1", "--consumer-tp", "1"),
]
OF_TORCHRUN = ("--launcher", "torchrun")
OTHERS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "KVSPEC_SECRET")


@pytest.fixture(autouse=True, scope="module")
def model() -> Iterator[None]:
    """Write a small model down, for all processes to read."""
    MODEL.write_text(json.dumps(builders.LLAMA), "utf-8")
    yield
    shutil.rmtree(MODEL.parent)


def port() -> int:
    """Return a port that was free a moment ago."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def started(arguments: list[str], **variables: object) -> subprocess.Popen[str]:
    """Start Python with *arguments*, of this checkout, and with some more *variables*."""
    environment = {name: value for name, value in os.environ.items() if name not in OTHERS}
    environment |= {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    environment |= {name: str(value) for name, value in variables.items()}
    return subprocess.Popen(  # noqa: S603 - this checkout's own commands
        [sys.executable, *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def rank_of(launcher: str, number: int, store: int, *more: str) -> subprocess.Popen[str]:
    """Start one of two processes as *launcher* would, the store at port *store*."""
    names = dict(zip(LAUNCHERS[launcher], (number, 2, number), strict=True))
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store, **names}
    return started(["-m", "kvspec.cli", *COMMAND, "--launcher", launcher, *more], **variables)


def ended(process: subprocess.Popen[str], seconds: float = 120) -> tuple[int, str, str]:
    """Return exit status, output and error output."""
    output, errors = process.communicate(timeout=seconds)
    return process.returncode, output, errors


def test_two_nodes_of_torchrun() -> None:
    """Over the loopback: one report, of the first process; every byte right."""
    command = [
        *("-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
        *("--master-addr", "127.0.0.1", "--master-port", str(port())),
    ]
    nodes = [
        started([*command, "--node-rank", node, "-m", "kvspec.cli", *COMMAND, *OF_TORCHRUN])
        for node in "01"
    ]
    (status, output, errors), (other, silent, _) = map(ended, nodes)
    assert (0, 0) == (status, other), errors
    assert "every byte right" in output
    assert "" == silent


def test_processes_of_slurm() -> None:
    """Producers write, and introductions are sealed by the secret of the environment."""
    store = port()
    ranks = [rank_of("slurm", number, store, "--mode", "push") for number in range(2)]
    (status, output, errors), (other, _, _) = map(ended, ranks)
    assert (0, 0) == (status, other), errors
    assert "finished receiving 1 of 1" in output


def test_who_does_not_come_is_named() -> None:
    """By the first process, in its report, within the time that the job has and a little more."""
    began = time.monotonic()
    status, output, _ = ended(rank_of("openmpi", 0, port(), "--timeout", "5"))
    assert status == 1
    assert "consumer tp0 failed in stage start: no answer within 5 s" in output
    assert time.monotonic() - began < 60


def test_where_nobody_keeps_the_store_is_said() -> None:
    """A process that never finds the first one."""
    place = port()
    status, output, errors = ended(rank_of("slurm", 1, place, "--timeout", "4"))
    assert (1, "") == (status, output)
    assert f"no store at 127.0.0.1:{place} (MASTER_ADDR, MASTER_PORT)" in errors


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_who_dies_or_hangs_is_named(how: signal.Signals) -> None:
    """A process that is killed or stopped: the other says so in time, and ends."""
    store = port()
    ranks = [rank_of("slurm", number, store, "--timeout", "12") for number in range(2)]
    try:
        while not any("nixl" in line for line in mapped(ranks[1].pid)):
            time.sleep(0.05)  # until it is about to start
            assert ranks[1].poll() is None
        ranks[1].send_signal(how)
        status, output, errors = ended(ranks[0])
        assert status == 1
        assert "consumer tp0 failed in stage" in output, errors
    finally:
        for each in ranks:
            each.kill()
            each.communicate()


def mapped(pid: int) -> list[str]:
    """Return what a process has loaded."""
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
}
WRONG = [
    ("slurm", {"SLURM_PROCID": None}, "SLURM_PROCID=None: expected a number"),
    ("slurm", {"SLURM_PROCID": "two"}, "SLURM_PROCID='two': expected a number"),
    ("slurm", {"SLURM_PROCID": "-1"}, "SLURM_PROCID='-1': expected a number"),
    ("slurm", {"SLURM_PROCID": "2"}, "SLURM_PROCID=2: expected a number below 2"),
    ("slurm", {"SLURM_NTASKS": "3"}, "SLURM_NTASKS=3: expected 2: a process for each rank"),
    ("slurm", {"MASTER_ADDR": None}, "MASTER_ADDR=None: expected the host of the first process"),
    ("slurm", {"MASTER_PORT": "http"}, "MASTER_PORT='http': expected a number"),
    ("mpirun", {}, "launcher='mpirun': expected one of torchrun, slurm, openmpi"),
]


@pytest.mark.parametrize(("launcher", "changes", "message"), WRONG)
def test_what_a_launcher_does_not_say_is_refused(
    launcher: str, changes: dict[str, str | None], message: str
) -> None:
    """A variable that is missing, or nonsense, by its name."""
    engine = builders.engine(builders.gqa(1))
    said = {name: value for name, value in (SLURM | changes).items() if value is not None}
    with pytest.raises(SpecError) as caught:
        Place.of(launcher, Job(producer=engine, consumer=engine), said)
    assert str(caught.value).startswith(message)


def test_the_command_refuses_it_too() -> None:
    """With exit status 2, in one line."""
    status, _, errors = ended(started(["-m", "kvspec.cli", *COMMAND, "--launcher", "torchrun"]))
    assert status == 2
    assert "RANK=None: expected a number, which the launcher sets" in errors
