"""Transfers between real processes over NIXL, compared byte by byte, and what ends them early."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import attrs
import builders
import numpy as np
import pytest
from forked import fork_ranks
from refused import has_in_order
from typer.testing import CliRunner

import kvspec
from kvspec import (
    EngineSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    ReplicaPolicy,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.cli import app as cli
from kvspec.nixl.agent import package_names
from kvspec.run import recovery
from kvspec.run.contents import Contents
from kvspec.run.job import Job, Side
from kvspec.run.local import LocalRanks, run_transfer
from kvspec.run.rank_client import EngineClient
from kvspec.run.recovery import Recovery
from kvspec.run.report import Figures, Report
from kvspec.run.request_rank import RequestRank
from kvspec.run.transfer_rank import STAGES, Arguments

pytestmark = [
    pytest.mark.commands,
    pytest.mark.nixl,
    pytest.mark.skipif(not any(find_spec(name) for name in package_names()), reason="needs nixl"),
]
REPO = Path(kvspec.__file__).parents[1]


def heads(count: int, **more: Any) -> FullAttentionSpec:
    """Return full attention with *count* small KV heads."""
    size: dict[str, Any] = {"block_size": 4, "head_size": 16, "dtype": "bfloat16"}
    return FullAttentionSpec(total_num_kv_heads=count, **(size | more))


def engine(
    specs: Sequence[LayerSpec], tp_size: int, layout: str = "LBHNC", padded: Sequence[int] = ()
) -> EngineSpec:
    """Return an engine with a group of two layers for each spec. *padded* has their page sizes."""
    pages = zip(specs, padded, strict=True) if padded else ()
    made = [attrs.evolve(spec, page_size_padded=page) for spec, page in pages] or specs
    return builders.engine(*made, layers=("l.0", "l.1"), tp=tp_size, layout=layout)


def pair(specs: Sequence[LayerSpec], sizes: tuple[int, int], **more: Any) -> Job:
    """Return the job that moves two prompts of 19 tokens between TP *sizes*."""
    layouts = more.pop("layouts", ("LBHNC", "LBHNC"))
    padded = more.pop("padded", ((), ()))
    sides = [
        engine(specs, size, layout, pad)
        for size, layout, pad in zip(sizes, layouts, padded, strict=True)
    ]
    job: dict[str, Any] = {
        "producer": sides[0],
        "consumer": sides[1],
        "tokens": 19,
        "requests": 2,
        "timeout": 60.0,
    }
    return Job(**(job | more))


def mamba2(count: int, groups: int) -> MambaSpec:
    """Return a small Mamba2 state."""
    return MambaSpec.mamba2(
        num_heads=count,
        head_dim=8,
        n_groups=groups,
        state_size=16,
        conv_kernel=4,
        dtype="bfloat16",
        ssm_dtype="float32",
    )


MLA = MLAAttentionSpec(block_size=4, head_size=72, dtype="bfloat16")
WINDOW = SlidingWindowSpec(
    block_size=4, total_num_kv_heads=2, head_size=16, dtype="bfloat16", sliding_window=6
)
UNIFORM = UniformTypeKVCacheSpecs(specs={"wide": heads(4), "narrow": heads(2, head_size=32)})
NHD_HND = ("LBNHC", "LBHNC")

CASES = {
    "4 heads, 8 to 2": pair([heads(4)], (8, 2)),
    "6 heads, 2 to 3": pair([heads(6)], (2, 3), layouts=NHD_HND),
    "12 heads, 4 to 3": pair([heads(12)], (4, 3), layouts=NHD_HND),
    "MLA, 4 to 3": pair([MLA], (4, 3)),
    "MLA in stripes, 3 to 2": pair([MLA], (3, 2), replica_policy=ReplicaPolicy("stripe")),
    "Mamba2 of one group, 1 to 2": pair([mamba2(4, 1)], (1, 2)),
    "Mamba2 of one group, 4 to 2": pair([mamba2(4, 1)], (4, 2), layouts=NHD_HND),
    "attention and states, 2 to 3": pair([heads(3), mamba2(6, 2)], (2, 3)),
    "1 head, 3 to 2, the first replica": pair(
        [heads(1)], (3, 2), replica_policy=ReplicaPolicy("first")
    ),
    "HND to NHD, 3 to 2": pair([heads(5)], (3, 2), layouts=NHD_HND[::-1]),
    "HND to NHD, 3 to 2, staged": pair([heads(5)], (3, 2), layouts=NHD_HND[::-1], staging=1),
    "attention and states, 2 to 3, staged": pair([heads(3), mamba2(6, 2)], (2, 3), staging=1),
    "planes of K and V, 2 to 3": pair([heads(4)], (2, 3), layouts=("LBKHNC", "LKBNHC")),
    "blocks across layers, 2 to 1": pair([heads(4)], (2, 1), layouts=("BLKHNC", "BHLNC")),
    "padded pages, 2 to 3": pair([heads(6)], (2, 3), padded=((800,), (555,)), layouts=NHD_HND),
    "a window and a cached prefix, 1 to 2": pair([heads(2), WINDOW], (1, 2), cached=6),
    "all of it cached, 1 to 2": pair([heads(2)], (1, 2), cached=19),
    "layers with heads of their own, 2 to 3": pair([UNIFORM], (2, 3), layouts=NHD_HND),
}

# A rank is a process of a second or more. Each feature of these cases is in another case, too.
NIGHTLY = {
    "4 heads, 8 to 2",
    "6 heads, 2 to 3",
    "12 heads, 4 to 3",
    "MLA, 4 to 3",
    "Mamba2 of one group, 4 to 2",
    "HND to NHD, 3 to 2",
    "attention and states, 2 to 3",
}
assert set(CASES) > NIGHTLY


def children() -> dict[str, int]:
    """Return the names and process ids of the ranks that this process has started."""
    found: dict[str, int] = {}
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text("ascii").split():
            command = Path(f"/proc/{child}/cmdline").read_text("utf-8").split("\0")
            if "rank_server" in " ".join(command):
                found[command[-2]] = int(child)
    return found


def without_processes(report: Report) -> Report:
    """Return *report* after checking that no process is left."""
    assert {} == children()
    return report


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ranks be forked. The other tests start them as a user's program does."""
    fork_ranks(monkeypatch)


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "job",
    [
        pytest.param(job, id=name, marks=pytest.mark.slow if name in NIGHTLY else ())
        for name, job in CASES.items()
    ],
)
def test_transfer_writes_every_byte_and_finishes_every_request(job: Job) -> None:
    """Two requests are done on each consumer rank, and freed on each producer rank."""
    report = run_transfer(job)
    plan = job.plan
    assert () == report.faults
    assert len(plan.producer.parallel.ranks) + len(plan.consumer.parallel.ranks) == len(
        report.ranks
    )
    assert {job.requests} == {rank.finished for rank in report.ranks}
    moved = sum(pair.nbytes for pair in report.moved)
    assert (moved if job.staging else 0) == sum(pair.staged for pair in report.moved)
    assert {(edge.producer, edge.consumer) for edge in plan.edges} == {
        (moved.producer, moved.consumer) for moved in report.moved
    }
    assert list(STAGES) == list(report.stages)


@pytest.mark.usefixtures("forked")
def test_request_moves_the_bytes_of_its_live_tokens() -> None:
    """19 tokens in 2 layers, for keys and values of 6 heads. The last block is not full."""
    report = run_transfer(pair([heads(6)], (1, 1), requests=1))
    assert [2 * 2 * 6 * 19 * 32] == [moved.nbytes for moved in report.moved]


def test_report_names_one_changed_byte() -> None:
    """The comparison can fail: the report names the place of a wrong byte of the last token."""
    report = without_processes(run_transfer(pair([heads(2)], (1, 2), tamper=True)))
    (fault,) = report.faults
    assert has_in_order(["1", "consumer tp0"], fault)
    (line,) = report.lines
    assert has_in_order(["tp0", "g", "l.0", "k", "0", "18"], line)
    assert not report.ok


def before(monkeypatch: pytest.MonkeyPatch, stage: str, act: Callable[[], None]) -> None:
    """Let the parent of the ranks do *act* when *stage* begins."""
    through = LocalRanks.through

    def patched(self: LocalRanks, name: str, arguments: Arguments) -> list[Any]:
        if name == stage:
            act()
        return through(self, name, arguments)

    monkeypatch.setattr(LocalRanks, "through", patched)


def test_killed_rank_ends_the_run_before_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """The report names the rank, the stage and the signal."""
    before(monkeypatch, "connect", lambda: os.kill(children()["producer tp1"], signal.SIGKILL))
    began = time.monotonic()
    report = without_processes(run_transfer(pair([heads(2)], (2, 1))))
    assert time.monotonic() - began < 30
    first = report.failures[0]
    assert ("producer", "tp1", "connect") == (first.side, str(first.rank), first.stage)
    assert "SIGKILL" in first.why
    assert not report.ok


def test_hanging_rank_fails_at_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A stopped process does not stop the parent. The ranks start within the timeout."""
    before(monkeypatch, "connect", lambda: os.kill(children()["consumer tp0"], signal.SIGSTOP))
    report = without_processes(run_transfer(pair([heads(2)], (2, 1), timeout=12.0)))
    (failure,) = report.failures
    assert ("consumer", "tp0", "connect") == (failure.side, str(failure.rank), failure.stage)
    assert "12" in failure.why


def test_rank_that_dies_or_hangs_in_its_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bytes are right, but the library may have crashed when the rank gave its memory back."""

    def break_down() -> None:
        os.kill(children()["consumer tp0"], signal.SIGKILL)
        os.kill(children()["producer tp1"], signal.SIGSTOP)

    before(monkeypatch, "close", break_down)
    report = without_processes(run_transfer(pair([heads(2)], (2, 1), timeout=15.0)))
    assert not report.ok
    assert "SIGKILL" in report.faults[0]
    assert ("close", 0) == (report.failures[0].stage, report.wrong)
    assert report.judged


def test_report_names_a_changed_byte_of_a_producer() -> None:
    """No byte of a producer may change."""
    job = pair([heads(2)], (1, 1), requests=1)
    contents = Contents(job, "producer", kvspec.RankId())
    held = contents.before({"g": job.cache_bytes()[0]})
    judged = contents.judge(held, {"g": held["g"] ^ (np.arange(len(held["g"])) == 0)})
    (line,) = judged.lines
    assert has_in_order(["producer tp0", "l.0", "stay"], line)


def test_failure_of_a_rank_has_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent receives the message of the error in the process."""
    monkeypatch.setenv("KVSPEC_NIXL_PACKAGE", "no_such_nixl")
    report = without_processes(run_transfer(pair([heads(2)], (1, 1))))
    assert all(failure.stage == "start" for failure in report.failures)
    assert all("nixl" in failure.why for failure in report.failures)
    assert 1 <= len(report.failures) <= 2


def test_error_in_the_parent_leaves_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks end with the parent."""

    def fail() -> None:
        raise KeyboardInterrupt

    before(monkeypatch, "fill", fail)
    with pytest.raises(KeyboardInterrupt):
        run_transfer(pair([heads(2)], (1, 1)))
    assert {} == children()


def command(*options: str) -> list[str]:
    """Return the command line of a small run."""
    return [sys.executable, "-m", "kvspec.cli", "transfer", "--tokens", "33", *options]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "80"}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of a small run to its end."""
    return subprocess.run(  # noqa: S603 - our own command
        command(*options), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_default_command_prints_a_verdict_in_its_last_line() -> None:
    """It moves a real model from TP 2 to TP 3 and from NHD to HND, and exits with 0."""
    done = run()
    assert (0, "") == (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert has_in_order(["Qwen3-0.6B", "28", "full", "8"], lines[0])
    assert has_in_order(["right", "bytes", "3"], lines[-1])
    assert max(map(len, lines)) <= 80


def test_command_with_a_wrong_byte_exits_with_1() -> None:
    """With --json, standard output is one object, which has the fault."""
    done = run("--tamper", "--json", "--model", "gemma-3-1b")
    assert (1, "") == (done.returncode, done.stderr)
    output = json.loads(done.stdout)
    assert (False, 1) == (output["ok"], output["wrong_bytes"])
    (fault,) = output["faults"]
    assert has_in_order(["1", "consumer tp0"], fault)
    # Both producer ranks have the only KV head, and three consumer ranks divide their reads.
    pairs = [(pair["producer"], pair["consumer"]) for pair in output["pairs"]]
    assert [("tp0", "tp0"), ("tp0", "tp1"), ("tp1", "tp2")] == pairs


@contextmanager
def transferring(*more: str, handled: int, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """Run the command in a process group of its own, and wait for its first line.

    It has the default handler of the signal *handled*, which its children inherit: a job in the
    background ignores interrupts, and a test run under nohup ignores SIGHUP.
    """
    with subprocess.Popen(  # noqa: S603 - our own command
        command(*more),
        env=ENVIRONMENT | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, handled, signal.SIG_DFL),  # noqa: PLW1509 - no thread yet
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process


def test_interrupt_ends_every_process_with_one_line() -> None:
    """Ctrl-C reaches the whole process group."""
    with transferring(handled=signal.SIGINT) as process:
        time.sleep(0.7)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert 130 == process.returncode
    assert 1 == errors.count("\n")
    assert "interrupted" in errors
    assert gone(process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_signal_to_the_parent_leaves_no_process(tmp_path: Path, number: int) -> None:
    """Only the parent receives the signal. It leaves no file."""
    folder = str(tmp_path)
    with transferring("--requests", "9", handled=signal.SIGHUP, TMPDIR=folder) as process:
        begun = Path(f"/proc/{process.pid}/task/{process.pid}/children")
        while not begun.read_text("ascii"):
            time.sleep(0.01)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=20)
    assert "" == errors
    assert gone(process.pid)
    assert (-number, []) == (process.returncode, list(tmp_path.iterdir()))


def gone(group: int, seconds: float = 5.0) -> bool:
    """Return whether the process group, with Python's own helper, ends within *seconds*."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_transfer_in_host_memory_does_not_import_torch() -> None:
    """Neither the parent nor a rank imports it, so the command starts fast."""
    code = (
        "import sys, kvspec.cli\n"
        "sys.argv = ['kvspec', 'transfer', '--tokens', '5', '--consumer', 'tp=1', '--json']\n"
        "if __name__ == '__main__':\n"
        "    assert 'typer' not in sys.modules and 'rich' not in sys.modules\n"
        "    try:\n"
        "        kvspec.cli.main()\n"
        "    except SystemExit as end:\n"
        "        assert end.code == 0, end.code\n"
        "    assert 'typer' in sys.modules and 'torch' not in sys.modules\n"
    )
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code], env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert (0, "") == (done.returncode, done.stderr)
    assert not any(rank["torch"] for rank in json.loads(done.stdout)["ranks"])


def test_sessions_lose_no_request_when_ranks_are_killed(tmp_path: Path) -> None:
    """Sessions move 8 requests from TP 1 to TP 2 while two ranks are killed and restart."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(builders.LLAMA), "utf-8")
    sizes = ("--producer", "tp=1", "--consumer", "tp=2", "--seed", "1")
    done = run("--model", str(model), *sizes, "--requests", "8", "--kill", "2", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    output = json.loads(done.stdout)
    assert (True, 8, 2) == (output["ok"], output["requests"], output["faults"])
    assert (0, 0, 0) == (output["lost"], output["wrong"], output["leaked"])
    assert 8 * 2 == output["done"] + output["failed"] + output["gone"]
    assert 0 < output["done"]


def test_figures_without_a_finished_load_are_wrong() -> None:
    """Loads that all fail lose and leak nothing, but surviving ranks must still serve."""
    served = Figures(requests=3, done=1, failed=4, gone=1, faults=1)
    assert served.ok
    facts = ["3", "1", "6", "1 done", "4 failed", "1 gone", "0 lost", "0 wrong", "0 leaked"]
    assert has_in_order(facts, str(served))
    (wrong,) = attrs.evolve(served, done=0, failed=5).wrongs
    assert "done" in wrong
    assert attrs.evolve(served, requests=1, done=0, failed=0, gone=2).ok


class Unconnected(Recovery):
    """A run in which an engine that was killed is started, but not connected again."""

    def start(self, side: Side) -> None:
        """Start an engine. Only the first start connects it."""
        again = side in self.engines
        with patch.object(EngineClient, "connect") if again else nullcontext():
            super().start(side)


@pytest.mark.usefixtures("forked")
def test_loads_that_fail_after_a_restart_are_wrong() -> None:
    """Only loads during which a rank was killed may fail."""
    job = pair([heads(2)], (1, 1), requests=6)
    figures = Unconnected(job).run(["kill producer"])
    assert (0, 0, 0) == (figures.lost, figures.wrong, figures.leaked)
    assert 0 < figures.unexplained <= figures.failed
    assert any("nothing was killed" in wrong for wrong in figures.wrongs)


@pytest.mark.usefixtures("forked")
def test_error_of_a_session_ends_a_run_with_kills() -> None:
    """It is a failure of the run, not an invalid input."""
    lost = kvspec.TransferError("no engine", state=kvspec.TransferState.PEER_LOST)
    with patch.object(EngineClient, "connect", side_effect=lost):
        figures = Recovery(pair([heads(2)], (1, 1))).run(["kill producer"])
    assert (2, str(lost)) == (figures.lost, figures.died)


def test_hanging_rank_ends_a_run_with_kills_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks get little more time than the job has."""
    monkeypatch.setattr(recovery, "DRAIN", 2.0)

    class Hanging(Recovery):
        def send(self, faults: Sequence[str]) -> None:
            os.kill(children()["consumer tp0"], signal.SIGSTOP)
            super().send(faults)

    began = time.monotonic()
    figures = Hanging(pair([heads(2)], (1, 1), timeout=6.0)).run(["kill producer"])
    assert time.monotonic() - began < 30
    assert has_in_order(["consumer tp0", "answer"], figures.died)


class SpillingRank(RequestRank):
    """A rank whose transfers change a byte of a spare block, too."""

    def hold(self, *request: Any, **more: Any) -> None:
        """Hold a request."""
        super().hold(*request, **more)
        next(iter(self.views.values()))[-1, 0, 0, 0] = 0


@pytest.mark.usefixtures("forked")
def test_changed_byte_of_a_spare_block_is_wrong() -> None:
    """A run with kills looks at the blocks of no request at its end."""
    with patch.object(EngineClient, "rank_type", SpillingRank):
        figures = Recovery(pair([heads(2)], (1, 1))).run([])
    assert (2, 1) == (figures.done, figures.wrong)


def test_requests_that_are_not_sent_in_time_are_lost() -> None:
    """The command exits with 1, and its last line has their number."""
    sizes = ("--producer", "tp=1", "--consumer", "tp=1")
    done = run(*sizes, "--requests", "3", "--kill", "1", "--timeout", "0.01")
    assert (1, "") == (done.returncode, done.stderr)
    assert has_in_order(["3", "lost"], done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("options", "word"),
    [
        (("--kill", "3"), "requests=2"),
        (("--kill", "-1"), "0"),
        (("--kill", "1", "--tamper"), "tamper"),
        (("--kill", "1", "--staging", "1"), "staging"),
        (("--kill", "1", "--device", "cuda"), "cuda"),
        (("--kill", "1", "--launcher", "torchrun"), "torchrun"),
    ],
)
def test_command_rejects_impossible_kills(options: Sequence[str], word: str) -> None:
    """The command exits with 2 before it starts a process."""
    done = CliRunner().invoke(cli.app, command(*options)[3:], env={"COLUMNS": "80"})
    assert (2, "") == (done.exit_code, done.stdout)
    assert has_in_order([f"kill={options[1]}", word], done.stderr)
