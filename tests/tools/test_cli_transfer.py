"""Every pair that is hard to plan, moved between real processes over NIXL and compared."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import attrs
import builders
import pytest

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
from kvspec.nixl.agent import package_names
from kvspec.run import STAGES, Figures, Job, Report, run_transfer

pytestmark = [
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
    """Return an engine with one group of two layers for each spec; *padded*: their pages."""
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
    "MLA in stripes, 3 to 2, pushed": pair(
        [MLA], (3, 2), replica_policy=ReplicaPolicy("stripe"), mode="push"
    ),
    "Mamba2 of one group, 1 to 2": pair([mamba2(4, 1)], (1, 2)),
    "Mamba2 of one group, 4 to 2": pair([mamba2(4, 1)], (4, 2), layouts=NHD_HND),
    "attention and states, 2 to 3, pushed": pair([heads(3), mamba2(6, 2)], (2, 3), mode="push"),
    "1 head, 3 to 2, the first replica, pushed": pair(
        [heads(1)], (3, 2), replica_policy=ReplicaPolicy("first"), mode="push"
    ),
    "HND to NHD, 3 to 2": pair([heads(5)], (3, 2), layouts=NHD_HND[::-1]),
    "HND to NHD, 3 to 2, staged": pair([heads(5)], (3, 2), layouts=NHD_HND[::-1], staging=1),
    "attention and states, 2 to 3, pushed, staged": pair(
        [heads(3), mamba2(6, 2)], (2, 3), mode="push", staging=1
    ),
    "planes of K and V, 2 to 3": pair([heads(4)], (2, 3), layouts=("LBKHNC", "LKBNHC")),
    "blocks across layers, 2 to 1, pushed": pair(
        [heads(4)], (2, 1), layouts=("BLKHNC", "BHLNC"), mode="push"
    ),
    "padded pages, 2 to 3": pair([heads(6)], (2, 3), padded=((800,), (555,)), layouts=NHD_HND),
    "a window and a cached prefix, 1 to 2": pair([heads(2), WINDOW], (1, 2), cached=6),
    "all of it cached, 1 to 2, pushed": pair([heads(2)], (1, 2), cached=19, mode="push"),
    "layers with heads of their own, 2 to 3": pair([UNIFORM], (2, 3), layouts=NHD_HND),
}


def ended(report: Report) -> Report:
    """Return *report*, having seen that no process is left."""
    assert [] == multiprocessing.active_children()
    return report


@pytest.mark.parametrize("job", CASES.values(), ids=CASES)
def test_every_byte_and_every_count_is_right(job: Job) -> None:
    """Two real engines move two requests; no byte is wrong, no notification missing or foreign."""
    report = ended(run_transfer(job))
    plan = job.plan
    assert () == report.faults
    assert len(plan.producer.parallel.ranks) + len(plan.consumer.parallel.ranks) == len(
        report.ranks
    )
    told = sum(len(plan.notifiers(rank)) for rank in plan.producer.parallel.ranks)
    if job.mode == "push":
        told += sum(len(plan.sources(rank)) for rank in plan.consumer.parallel.ranks)
    assert told * job.requests == sum(each.awaited for each in report.ranks)
    assert {(edge.producer, edge.consumer) for edge in plan.edges} == {
        (each.producer, each.consumer) for each in report.moved
    }
    assert list(STAGES) == list(report.stages)
    assert not any(each.torch for each in report.ranks)


def test_what_a_request_moves_is_what_its_live_tokens_hold() -> None:
    """19 tokens of 6 heads, k and v, 2 layers, in tiles of 4 tokens: counted by hand."""
    report = ended(run_transfer(pair([heads(6)], (1, 1), requests=1)))
    assert [2 * 2 * 6 * 20 * 32] == [each.nbytes for each in report.moved]


def test_one_changed_byte_is_found_and_told() -> None:
    """The comparison can fail: a byte of the last token is named with both values."""
    report = ended(run_transfer(pair([heads(2)], (1, 2), tamper=True)))
    assert ("1 wrong byte, on consumer tp0",) == report.faults
    (line,) = report.lines
    assert "request-0: tp0 group g layer l.0 part k unit 0 token 18" in line
    assert not report.ok


def test_a_rank_that_dies_is_named_and_ends_the_run() -> None:
    """A killed process is reported with the stage and the signal, long before the timeout."""

    def kill(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("connect", 0):
            (victim,) = (e for e in multiprocessing.active_children() if e.name == "producer tp1")
            victim.kill()

    began = time.monotonic()
    report = ended(run_transfer(pair([heads(2)], (2, 1)), kill))
    assert time.monotonic() - began < 30
    first = str(report.failures[0])
    assert "producer tp1 failed in stage connect: its process died (SIGKILL)" == first
    assert not report.ok


def test_a_rank_that_hangs_is_named_when_the_time_is_over() -> None:
    """A stopped process does not stop the parent."""

    def stop(stage: str, done: int, total: int) -> None:
        if (stage, done) == ("connect", 0):
            (victim,) = (e for e in multiprocessing.active_children() if e.name == "consumer tp0")
            assert victim.pid is not None
            os.kill(victim.pid, signal.SIGSTOP)

    report = ended(run_transfer(pair([heads(2)], (2, 1), timeout=4.0), stop))
    assert ["consumer tp0 failed in stage connect: no answer within 4 s"] == [
        str(each) for each in report.failures
    ]


def test_a_rank_that_fails_is_told_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error in a process crosses to the parent in words."""
    monkeypatch.setenv("KVSPEC_NIXL_PACKAGE", "no_such_nixl")
    report = ended(run_transfer(pair([heads(2)], (1, 1))))
    assert all("stage start: nixl cannot be imported" in str(each) for each in report.failures)
    assert 1 <= len(report.failures) <= 2


def test_an_error_in_the_parent_leaves_no_process() -> None:
    """Whatever ends the parent ends its ranks."""

    def fail(stage: str, done: int, total: int) -> None:
        if stage == "fill":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_transfer(pair([heads(2)], (1, 1)), fail)
    assert [] == multiprocessing.active_children()


def command(*options: str) -> list[str]:
    """Return the command line of a small run."""
    return [sys.executable, "-m", "kvspec.cli", "transfer", "--tokens", "33", *options]


ENVIRONMENT = {**os.environ, "PYTHONPATH": str(REPO), "COLUMNS": "80"}


def run(*options: str) -> subprocess.CompletedProcess[str]:
    """Run the command line of a small run to its end."""
    return subprocess.run(  # noqa: S603 - our own command
        command(*options), env=ENVIRONMENT, capture_output=True, text=True, check=False
    )


def test_the_default_command_ends_in_one_line_of_verdict() -> None:
    """TP 2 to TP 3, NHD to HND, of a real model: exit status 0, nothing on standard error."""
    done = run()
    assert (0, "") == (done.returncode, done.stderr)
    lines = done.stdout.splitlines()
    assert "Qwen3-0.6B  28 full layers (units: k+v 8)" == lines[0]
    assert lines[-1].startswith("every byte right: ")
    assert lines[-1].endswith(" bytes on 3 consumer ranks")
    assert max(map(len, lines)) <= 80


def test_a_wrong_byte_is_exit_status_one_and_json_tells_it() -> None:
    """With --json standard output is one object."""
    done = run("--tamper", "--json", "--mode", "push", "--model", "gemma-3-1b")
    assert (1, "") == (done.returncode, done.stderr)
    told = json.loads(done.stdout)
    assert (False, 1) == (told["ok"], told["wrong_bytes"])
    assert ["1 wrong byte, on consumer tp0"] == told["faults"]
    # One KV head: both producer ranks hold it, and the three consumer ranks read evenly.
    pairs = [(each["producer"], each["consumer"]) for each in told["pairs"]]
    assert [("tp0", "tp0"), ("tp0", "tp1"), ("tp1", "tp2")] == pairs


def test_an_interrupt_ends_every_process_quietly() -> None:
    """Ctrl-C reaches the whole process group; only one line is said."""
    # A job in the background ignores interrupts, and would hand that down.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(  # noqa: S603 - our own command
        command(),
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heard,  # noqa: PLW1509 - no thread has been started here
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(0.7)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=20)
    assert (130, "kvspec: interrupted\n") == (process.returncode, errors)
    assert gone(process.pid)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_whatever_ends_the_parent_leaves_no_process(tmp_path: Path, number: int) -> None:
    """Nor a folder, unless it is killed: the parent alone is told to end, and does not hang."""
    # Who runs these tests under nohup ignores SIGHUP, and would hand that down.
    heard = partial(signal.signal, signal.SIGHUP, signal.SIG_DFL)
    with subprocess.Popen(  # noqa: S603 - our own command
        command("--requests", "9"),
        env={**ENVIRONMENT, "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=heard,  # noqa: PLW1509 - no thread has been started here
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        while not list(tmp_path.glob("kvspec-*/*.log")):
            time.sleep(0.01)
        os.kill(process.pid, number)
        _, errors = process.communicate(timeout=20)
    assert "" == errors
    assert gone(process.pid)
    if number == signal.SIGKILL:
        assert -number == process.returncode
    else:
        assert (128 + number, []) == (process.returncode, list(tmp_path.glob("kvspec-*")))


def gone(group: int, seconds: float = 5.0) -> bool:
    """Return whether the process group ends within *seconds*, Python's own helper included."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def test_neither_the_parent_nor_the_command_line_imports_torch() -> None:
    """A run in host memory starts fast because nothing loads torch."""
    code = (
        "import sys, kvspec.cli\n"
        "sys.argv = ['kvspec', 'transfer', '--tokens', '5', '--consumer-tp', '1', '--json']\n"
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
    assert not any(each["torch"] for each in json.loads(done.stdout)["ranks"])


def test_what_is_killed_starts_again_and_nothing_is_lost(tmp_path: Path) -> None:
    """Sessions move 8 requests while a rank of either engine is killed, pulled to a wider TP."""
    model = tmp_path / "config.json"
    model.write_text(json.dumps(builders.LLAMA), "utf-8")
    sizes = ("--producer-tp", "1", "--consumer-tp", "2", "--seed", "1")
    done = run("--model", str(model), *sizes, "--requests", "8", "--kill", "2", "--json")
    assert (0, "") == (done.returncode, done.stderr)
    told = json.loads(done.stdout)
    assert (True, 8, 2) == (told["ok"], told["requests"], told["faults"])
    assert (0, 0, 0) == (told["lost"], told["wrong"], told["leaked"])
    assert 8 * 2 == told["done"] + told["failed"] + told["gone"]
    assert 0 < told["done"]


def test_a_run_in_which_nothing_was_served_is_wrong() -> None:
    """Loads that all fail lose and leak nothing; yet who survives serves on."""
    served = Figures(requests=3, done=1, failed=4, gone=1, faults=1)
    assert served.ok
    loads = "of 6 loads 1 done, 4 failed, 1 gone"
    words = f"3 requests, 1 fault; {loads}; 0 lost, 0 wrong, 0 leaked; 0.0 seconds"
    assert words == str(served)
    assert ("no load was done",) == attrs.evolve(served, done=0, failed=5).wrongs
    assert attrs.evolve(served, requests=1, done=0, failed=0, gone=2).ok


def test_requests_that_are_not_sent_in_time_are_lost() -> None:
    """Exit status 1, and the verdict says how many."""
    done = run("--requests", "3", "--kill", "1", "--timeout", "0.01")
    assert (1, "") == (done.returncode, done.stderr)
    assert "WRONG: 3 requests were lost" == done.stdout.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "wanted"),
    [
        (("--kill", "3"), "at most requests=2"),
        (("--kill", "-1"), "expected an int >= 0"),
        (("--kill", "1", "--tamper"), "a run without tamper"),
        (("--kill", "1", "--staging", "1"), "a run without staging"),
        (("--kill", "1", "--device", "cuda"), "device cpu, not cuda"),
        (("--kill", "1", "--launcher", "torchrun"), "no launcher=torchrun"),
    ],
)
def test_kills_that_cannot_be_are_refused(options: Sequence[str], wanted: str) -> None:
    """By name, before a process starts."""
    done = run(*options)
    assert (2, "") == (done.returncode, done.stdout)
    assert "kill" in done.stderr
    assert wanted in " ".join(done.stderr.split())
