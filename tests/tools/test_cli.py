"""The commands without processes: what they print, what they refuse, and what a run counts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from builders import LLAMA

import kvspec
from kvspec import (
    EngineSpec,
    FullAttentionSpec,
    KVCacheGroup,
    MambaSpec,
    ParallelConfig,
    RankId,
    SlidingWindowSpec,
    SpecError,
)
from kvspec.errors import nbytes
from kvspec.run import Compared, Failure, Job, Moved, RankReport, Report
from kvspec.run.contents import MAX_LINES, Contents, Storage
from kvspec.run.limits import check_memory
from kvspec.run.notices import Notices
from kvspec.testing import logical_views

pytest.importorskip("typer", reason="needs the cli extra")

from typer.testing import CliRunner, Result

from kvspec.check.proof import Proof
from kvspec.cli import app as cli
from kvspec.cli import verify as cli_verify

REPO = Path(kvspec.__file__).parents[1]


def run(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, arguments, prog_name="kvspec", env={"COLUMNS": "100"})


def rows(result: Result) -> list[list[str]]:
    """Return the cells of a printed table, without head and rules."""
    found = [line.split() for line in result.stdout.splitlines()]
    return [cells for cells in found if cells and cells[0].startswith("tp")]


def test_slices_prints_who_reads_what() -> None:
    """8 heads, TP 2 to 3: the middle consumer reads both producers."""
    result = run("slices", "--heads", "8")
    assert 0 == result.exit_code
    wanted = [
        ["tp0", "tp0", "k+v", "0..1", "0..1", "0..1"],
        ["tp1", "tp0", "k+v", "2..3", "0..1", "2..3"],
        ["tp1", "tp1", "k+v", "4", "2", "0"],
        ["tp2", "tp1", "k+v", "5..7", "0..2", "1..3"],
    ]
    assert wanted == rows(result)


def test_slices_of_one_rank_from_the_other_side() -> None:
    """A producer's view swaps the last two columns."""
    result = run("slices", "--heads", "8", "--role", "producer", "--rank", "1")
    assert [
        ["tp1", "tp1", "k+v", "4", "0", "2"],
        ["tp1", "tp2", "k+v", "5..7", "1..3", "0..2"],
    ] == rows(result)


def test_slices_tells_stripes() -> None:
    """A striped consumer takes every other block from each replica."""
    options = ("--kind", "mla", "--producer-tp", "2", "--consumer-tp", "1")
    result = run("slices", *options, "--replica-policy", "stripe", "--json")
    told = json.loads(result.stdout)
    assert [(0, [0, 2]), (1, [1, 2])] == [(e["remote_rank"], e["stripe"]) for e in told]
    assert "b % 2 == 1" in run("slices", *options, "--replica-policy", "stripe").stdout


@pytest.mark.parametrize(
    ("kind", "parts"),
    [
        ("mamba1", {"conv_x+ssm"}),
        ("mamba2", {"conv_x", "conv_b+conv_c", "ssm"}),
        ("gated-delta-net", {"conv_q+conv_k", "conv_v", "ssm"}),
    ],
)
def test_slices_of_states(kind: str, parts: set[str]) -> None:
    """Parts that are sharded alike share a row; others have rows of their own."""
    result = run("slices", "--kind", kind, "--heads", "4", "--groups", "2", "--json")
    assert parts == {"+".join(each["parts"]) for each in json.loads(result.stdout)}


def test_slices_of_a_model_name_its_groups(tmp_path: Path) -> None:
    """A model is named, or given as the path of its config.json or of its folder."""
    told = json.loads(run("slices", "--model", "gemma-3-1b", "--json").stdout)
    assert {"full", "sliding_window"} == {each["group"] for each in told}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for model in (path, tmp_path):
        told = json.loads(run("slices", "--model", str(model), "--json").stdout)
        assert {"full"} == {each["group"] for each in told}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("slices",), "heads=None: pass --heads, --model or --kind mla"),
        (("slices", "--heads", "0"), "total_num_kv_heads=0: expected an int >= 1"),
        (("slices", "--heads", "4", "--producer-tp", "0"), "producer_tp=0: expected an int >= 1"),
        (("slices", "--heads", "4", "--rank", "3"), "rank=3: expected a rank of the consumer"),
        (("slices", "--heads", "4", "--role", "x"), "role='x': expected 'consumer' or 'producer'"),
        (("slices", "--heads", "4", "--kind", "x"), "kind='x': expected one of attention, mla"),
        (("slices", "--heads", "4", "--replica-policy", "x"), ("replica_policy='x': expected one "
                                                               "of spread")),
        (("slices", "--model", "qwen3-0.7b"), "perhaps Qwen3-"),
        (("slices", "--model", "/no/config.json"), "config='/no/config.json': expected a readable"),
        (("transfer", "--producer-tp", "0"), "producer.tp_size=0: expected an int >= 1"),
        (("transfer", "--consumer-layout", "LBX"), "consumer.layout='LBX': expected the letters"),
        (("transfer", "--consumer-tp", "300"), "ranks=302: expected at most 256 processes in all"),
        (("transfer", "--tokens", "0"), "tokens=0: expected an int >= 1"),
        (("transfer", "--tokens", "2000000000"), "tokens=2000000000: expected at most 1000000000"),
        (("transfer", "--tokens", "400000000"), ": expected "),
        (("transfer", "--cached", "301"), "cached=301: expected at most tokens=300"),
        (("transfer", "--requests", "0"), "requests=0: expected an int >= 1"),
        (("transfer", "--replica-policy", "x"), "replica_policy='x': expected one of spread, "),
        (("transfer", "--mode", "x"), "mode='x': expected pull or push"),
        (("transfer", "--device", "tpu"), "device='tpu': expected cpu, cuda, or one GPU"),
        (("transfer", "--timeout", "nan"), "timeout=nan: expected finite seconds >= 0"),
        (("transfer", "--timeout", "0"), "timeout=0.0: expected seconds, more than 0 and at most"),
        (("transfer", "--seed", "-1"), "seed=-1: expected an int >= 0"),
        (("transfer", "--block-size", "0"), ": producer.block_size=0: expected an int >= 1"),
        (("transfer", "--consumer", "block=0"), ": consumer.block_size=0: expected an int >= 1"),
        (("simulate", "--producer", "block=0"), ": producer.block_size=0: expected an int >= 1"),
        (("simulate", "--model", "nemo"), ": model='nemo': expected "),
        (("slices", "--heads", "4", "--consumer-tp", "65537"),
         "consumer_tp=65537: expected at most 65536"),
        (("slices", "--model", "gemma-3-1b", "--svg", ""), "svg='': expected a file that can be"),
        (("slices", "--heads", "4", "--svg", "/"), "svg='/': expected a file that can be written"),
        (("verify", "--max-tp", "100000000"), "max_tp=100000000: expected at most 256"),
        (("verify", "--max-heads", "100000000"), "max_heads=100000000: expected at most 256"),
        (("verify", "--max-tp", "0"), "max_tp=0: expected an int >= 1"),
        (("verify", "--max-heads", "-3"), "max_heads=-3: expected an int >= 1"),
        (("verify", "--jobs", "0"), "jobs=0: expected an int >= 1"),
        (("verify", "--replica-policy", "x"), "replica_policy='x': expected one of spread"),
        *(((*command, "--replica-policy", "nearest"), "nearest needs --ranks-per-node")
          for command in (("verify",), ("simulate",), ("transfer",), ("slices", "--heads", "4"))),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_status_two(arguments: tuple[str, ...], words: str) -> None:
    """Standard error names the value and what was wanted; nothing is printed elsewhere."""
    result = run(*arguments)
    assert (2, "") == (result.exit_code, result.stdout)
    assert 1 == result.stderr.count("\n")
    assert result.stderr.startswith("kvspec: ")
    assert words in result.stderr


def test_a_missing_nixl_is_said_before_anything_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra to install is named."""
    monkeypatch.setenv("KVSPEC_NIXL_PACKAGE", "no_such_nixl")
    result = run("transfer")
    assert 2 == result.exit_code
    assert "pip install 'kvspec[nixl]'" in result.stderr


def test_missing_extras_are_named() -> None:
    """Without typer the command says what to install, in one line."""
    code = "import sys; sys.modules['typer'] = None; import kvspec.cli; kvspec.cli.main()"
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 2 == done.returncode
    assert "kvspec: typer is not installed: pip install 'kvspec[cli]'\n" == done.stderr


def test_the_version_is_the_packages() -> None:
    """--version prints it and stops."""
    assert f"kvspec {kvspec.__version__}\n" == run("--version").stdout


def test_verify_counts_what_it_tried() -> None:
    """4 x 4 TP pairs and 3 head counts are 48 triples, each on 1 to 4 consumer ranks."""
    result = run("verify", "--max-tp", "4", "--max-heads", "3", "--jobs", "1")
    assert 0 == result.exit_code
    tried = "48 triples (producer TP, consumer TP, heads), 120 consumer ranks, "
    words = " ".join(result.stdout.split())
    assert words.startswith(f"all exact: {tried}")
    assert words.endswith(", policies: spread")


@pytest.mark.parametrize(("more", "last"), [((), "stripe"), (("--ranks-per-node", "2"), "nearest")])
def test_verify_says_which_policies_it_tried(more: tuple[str, ...], last: str) -> None:
    """All that can be had: nearest, only where the nodes are said."""
    result = run("verify", "--max-tp", "2", "--max-heads", "2", "--replica-policy", "all", *more)
    assert 0 == result.exit_code
    known = ("spread", "first", "stripe", "nearest")
    told = f", policies: {', '.join(known[: known.index(last) + 1])}"
    assert " ".join(result.stdout.split()).endswith(told)


def test_verify_fails_if_one_triple_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exit status 1, and the counter-example."""

    def prove(*_: object, **more: Any) -> Proof:
        more["progress"](5)
        assert ("spread", "first", "stripe") == more["replica_policies"]
        return Proof(9, 27, ("3 heads, TP 2 -> 3, spread: rank 1: heads 1.. missing",))

    monkeypatch.setattr(cli_verify, "prove", prove)
    result = run("verify", "--replica-policy", "all")
    assert 1 == result.exit_code
    assert "WRONG: 1 of 9 triples" in result.stdout
    assert "rank 1: heads 1.. missing" in result.stdout


def small_job(**more: Any) -> Job:
    """Return a job of two groups: tokens in a window, and a state."""
    window = SlidingWindowSpec(
        block_size=4, total_num_kv_heads=2, head_size=4, dtype="float16", sliding_window=6
    )
    groups = [
        KVCacheGroup(name="window", layers=["w"], spec=window),
        KVCacheGroup(
            name="state",
            layers=["s"],
            spec=MambaSpec.mamba1(
                intermediate_size=4, state_size=4, conv_kernel=4, dtype="float16"
            ),
        ),
    ]
    engines = [EngineSpec(groups=groups, parallel=ParallelConfig(tp_size=size)) for size in (1, 2)]
    return Job(producer=engines[0], consumer=engines[1], tokens=19, **more)


def test_requests_own_blocks_of_live_tokens_only() -> None:
    """A window of 6 before token 19 begins at 14: blocks 3 and 4 of 4 tokens, from token 12."""
    job = small_job(requests=3)
    assert {"window": 3 * 2 + 3, "state": 3 + 3} == job.num_blocks("producer")
    for side in ("producer_blocks", "consumer_blocks"):
        tables = [getattr(each, side) for each in job.moves]
        assert [12] * 3 == [each["window"].first_token for each in tables]
        for group, count in (("window", 6), ("state", 3)):
            ids = np.concatenate([each[group].block_ids for each in tables])
            assert count == len(set(ids.tolist()))
    # Live rows 14..18: 2 heads x (k + v) x 8 bytes; and 4 channels x (3 conv rows + 4) x 2 bytes.
    assert 5 * 2 * 2 * 8 + 4 * (3 + 4) * 2 == job.request_bytes


def test_a_chunk_that_just_ended_moves_nothing() -> None:
    """At a chunk's end no token is live: the request owns no block, and the run is still a run."""
    spec = kvspec.ChunkedLocalAttentionSpec(
        block_size=4, total_num_kv_heads=1, head_size=4, dtype="int8", attention_chunk_size=8
    )
    engine = EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=spec)])
    job = Job(producer=engine, consumer=engine, tokens=16)
    assert {"g": 3} == job.num_blocks("consumer")
    assert 0 == job.request_bytes
    assert [0, 0] == [len(each.consumer_blocks["g"].block_ids) for each in job.moves]


def consumer_storage(job: Job) -> tuple[Storage, Storage]:
    """Return what consumer tp0 holds before and, if all goes well, after."""
    sizes = {
        group.name: job.num_blocks("consumer")[group.name]
        * sum(group.spec.page_size_bytes(0, 2) for _ in group.layers)
        for group in job.consumer.groups
    }
    contents = Contents(job, "consumer", RankId())
    before = contents.before(sizes)
    right, _ = contents.after(before)
    return before, right


def test_the_judge_accepts_the_right_bytes_and_nothing_else() -> None:
    """An untouched cache, a byte short and a byte too many are all wrong; dead bytes are free."""
    job = small_job()
    before, right = consumer_storage(job)
    judged = Contents(job, "consumer", RankId()).judge(before, right)
    total = sum(map(len, right.values()))
    assert (0, (), total) == (judged.wrong, judged.lines, judged.judged + judged.free)
    # Of each request rows 12 and 13 lie before the window, row 19 behind the prompt: 1 head, k, v.
    assert 2 * 3 * 2 * 8 == judged.free
    assert Contents(job, "consumer", RankId()).judge(before, before).wrong > 0

    views = logical_views(job.consumer, RankId(), right, job.num_blocks("consumer"))
    for request, table in enumerate(each.consumer_blocks["window"] for each in job.moves):
        views["window", "w", "v"][table.block_ids[1], 0, 2, 3] ^= 1
        judged = Contents(job, "consumer", RankId()).judge(before, right)
        assert request + 1 == judged.wrong
        assert (
            f"request-{request}: tp0 group window layer w part v unit 0 token 18"
            in (judged.lines[request])
        )
        views["window", "w", "k"][table.block_ids[1], 0, 3, 0] ^= 1  # token 19: dead


def test_a_byte_of_a_spare_block_is_told_as_nobodys() -> None:
    """What no request owns must not change."""
    job = small_job()
    before, right = consumer_storage(job)
    owned = {int(i) for each in job.moves for i in each.consumer_blocks["state"].block_ids}
    spare = min(set(range(job.num_blocks("consumer")["state"])) - owned)
    views = logical_views(job.consumer, RankId(), right, job.num_blocks("consumer"))
    views["state", "s", "ssm"][spare, 0, 0, 0] ^= 255
    judged = Contents(job, "consumer", RankId()).judge(before, right)
    (line,) = judged.lines
    assert 1 == judged.wrong
    assert line.startswith("no request: tp0 group state layer s part ssm unit 0")
    assert "not the request's" in line


def test_very_wrong_is_told_in_few_lines() -> None:
    """A cache that nobody wrote has many wrong bytes and few lines about them."""
    job = small_job()
    before, _ = consumer_storage(job)
    judged = Contents(job, "consumer", RankId()).judge(before, before)
    assert judged.wrong > 100
    assert len(judged.lines) <= 3 * MAX_LINES


class Inbox:
    """An agent's inbox that is filled by hand."""

    def __init__(self, *came: tuple[str, bytes]) -> None:
        self.came = list(came)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return all that came and forget it."""
        came, self.came = self.came, []
        return came


def collected(notices: Notices, *came: tuple[str, bytes]) -> list[str]:
    """Let *came* arrive, wait no time, and return the requests that finished."""
    finished: list[str] = []
    notices.collect(cast("Any", Inbox(*came)), 0.0, finished.append)
    return finished


def test_a_request_is_finished_when_each_sender_told_it_once() -> None:
    """tp1 is not tp11, twice is not two, and what nobody should send finishes nothing."""
    notices = Notices("ab", ["consumer-tp1-", "consumer-tp11-"])
    assert 4 == notices.awaited
    assert [] == collected(notices, ("consumer-tp1-host", b"a"), ("consumer-tp1-host", b"a"))
    assert ["'a' from 'consumer-tp1-host'"] == notices.foreign
    assert ["a"] == collected(notices, ("consumer-tp11-host", b"a"))
    assert [] == collected(notices, ("producer-tp1-host", b"b"), ("consumer-tp1-host", b"c"))
    assert (2, 3, ["a"]) == (notices.notified, len(notices.foreign), notices.finished)


def test_who_waits_for_nobody_is_finished_at_once() -> None:
    """A consumer that reads knows by itself."""
    assert ["a"] == collected(Notices("a", ()))


def report(**more: Any) -> Report:
    """Return the report of one consumer rank, right unless *more* says otherwise."""
    seen: dict[str, Any] = {
        "awaited": 2,
        "notified": 2,
        "foreign": (),
        "compared": Compared(judged=9),
    }
    rank = RankReport(
        side="consumer",
        rank=RankId(tp=3),
        moved=(Moved(producer=RankId(), consumer=RankId(tp=3), nbytes=4),),
        finished=1,
        torch=False,
        **(seen | {key: value for key, value in more.items() if key in seen}),
    )
    whole: dict[str, Any] = {"failures": (), "sending": (1, 1), "receiving": (1, 1)}
    whole |= {key: value for key, value in more.items() if key in whole}
    return Report(ranks=(rank,), stages={}, **whole)


@pytest.mark.parametrize(
    ("more", "fault"),
    [
        ({"notified": 1}, "consumer tp3 got 1 notifications of 2"),
        (
            {"foreign": ("'x' from 'y'",)},
            "consumer tp3 got notifications it must not: 'x' from 'y'",
        ),
        ({"compared": Compared(judged=9, wrong=2)}, "2 wrong bytes, on consumer tp3"),
        ({"sending": (0, 1)}, "finished sending 0 times, not 1"),
        ({"receiving": (2, 1)}, "finished receiving 2 times, not 1"),
        (
            {"failures": (Failure(side="producer", rank=RankId(), stage="fill", why="it is ill"),)},
            "producer tp0 failed in stage fill: it is ill",
        ),
    ],
)
def test_whatever_is_not_exact_is_not_right(more: dict[str, Any], fault: str) -> None:
    """Each single fault is told and makes the whole run wrong."""
    assert report().ok
    wrong = report(**more)
    assert (fault,) == wrong.faults
    assert not wrong.ok
    assert [fault] == wrong.as_dict()["faults"]


def test_a_report_is_plain_values() -> None:
    """It can be written as JSON; ranks are told by their names."""
    told = json.loads(json.dumps(report().as_dict()))
    assert "tp3" == told["pairs"][0]["consumer"] == told["ranks"][0]["rank"]


def test_too_much_memory_is_refused_with_what_is_needed() -> None:
    """Caches are counted with their copies, processes with their libraries."""
    check_memory([1 << 20] * 2, available=1 << 30)
    with pytest.raises(SpecError, match=r"memory='2\.0 GiB.*476\.8 MiB of cache on 2 ranks.*60%"):
        check_memory([250_000_000] * 2, available=3_000_000_000)


def test_sizes_are_told_exactly_or_shortly() -> None:
    """Few bytes, whole binary units, or one decimal of them."""
    told = {0: "0 B", 512: "512 B", 1024: "1 KiB", 5888: "5,888 B", 11776: "11.5 KiB"}
    told |= {2**21: "2 MiB", 2_500_000: "2.4 MiB", 3 * 2**40: "3 TiB"}
    assert list(told.values()) == list(map(nbytes, told))


def test_a_uniform_spec_of_another_kind_is_planned_before_it_is_started() -> None:
    """Engines that do not fit are refused with every field, not by a failing process."""
    spec = FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=4, dtype="int8")
    other = FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=4, dtype="int8")
    one, two = (
        EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=each)])
        for each in (spec, other)
    )
    with pytest.raises(kvspec.MismatchError, match="total_num_kv_heads: producer 2, consumer 4"):
        kvspec_run(one, two)


def kvspec_run(producer: EngineSpec, consumer: EngineSpec) -> Report:
    """Run two engines that do not fit."""
    from kvspec.run import run_transfer  # noqa: PLC0415 - the only run of this file

    return run_transfer(Job(producer=producer, consumer=consumer))


def test_calibrate_measures_and_writes(tmp_path: Path) -> None:
    """Two processes, a small request of each shape: a table, seven figures and a file of them."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    file = tmp_path / "calibration.json"
    result = run("calibrate", "--megabytes", "1", "--tries", "1", "--to", str(file))
    assert 0 == result.exit_code, result.output
    figures = json.loads(file.read_text("utf-8"))["seconds"]
    for name, value in figures.items():
        assert value > 0
        assert f"{name}: " in result.stdout
    assert 7 == len(figures)
    assert f"written to {file}" in result.stdout


def test_calibrate_measures_nothing_that_cannot_be_kept(tmp_path: Path) -> None:
    """A folder is refused in a line, before anything is measured."""
    result = run("calibrate", "--to", str(tmp_path))
    assert 2 == result.exit_code
    assert "expected a file that can be written: this is a folder" in result.stderr
    assert not result.stdout


@pytest.mark.parametrize("option", ["--tries", "--megabytes"])
def test_calibrate_refuses_nothing_to_do(option: str) -> None:
    """At least one try, of at least 1 MiB."""
    assert 2 == run("calibrate", option, "0").exit_code
