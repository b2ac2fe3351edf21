"""Commands that start no process, and the checks and counts of a run."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from builders import LLAMA
from hypothesis import given
from hypothesis import strategies as st
from refused import has_in_order

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
from kvspec.run.contents import MAX_LINES, Contents, Storage
from kvspec.run.job import Job
from kvspec.run.limits import check_memory
from kvspec.run.report import Compared, Failure, Moved, RankReport, Report
from kvspec.testing import Case, logical_views, strategies

pytest.importorskip("typer", reason="needs the cli extra")

from typer.testing import CliRunner, Result

from kvspec.check import proof as proof_module
from kvspec.check.proof import Proof
from kvspec.cli import app as cli
from kvspec.cli import printing

REPO = Path(kvspec.__file__).parents[1]


def run(*arguments: str) -> Result:
    """Run the command line in this process."""
    return CliRunner().invoke(cli.app, arguments, prog_name="kvspec", env={"COLUMNS": "130"})


def rows(result: Result) -> list[list[str]]:
    """Return the cells of a printed table, without head and rules."""
    lines = [line.split() for line in result.stdout.splitlines()]
    return [cells for cells in lines if cells and cells[0].startswith("tp")]


def test_plan_prints_sources_and_bytes_of_each_consumer() -> None:
    """8 heads, TP 2 to 3: the middle consumer reads both producers."""
    result = run("plan", "--model", "Qwen3-0.6B", "--tokens", "1")
    assert 0 == result.exit_code
    head = 28 * 2 * 128 * 2  # bytes of one head of a token: layers, k and v, elements, bfloat16
    # Keys and values of a head lie side by side. Each layer and head is a descriptor.
    expected = [
        f"tp0 tp0 full 0..27 k+v heads 0..1 {2 * head:,} 56 512 B",
        f"tp1 tp0 full 0..27 k+v heads 2..3 {2 * head:,} 56 512 B",
        f"tp1 tp1 full 0..27 k+v head 4 {head:,} 28 512 B",
        f"tp2 tp1 full 0..27 k+v heads 5..7 {3 * head:,} 84 512 B",
    ]
    assert expected == list(map(" ".join, rows(result)))


def test_plan_names_the_stage_and_the_layers_of_each_edge() -> None:
    """With pipeline stages on one side, all ranks have the name of their stage."""
    words = ("--producer", "tp=1,pp=2", "--consumer", "tp=1", "--tokens", "1")
    result = run("plan", *words)
    assert [] == rows(result)  # No rank is called tp0.
    lines = [line.split() for line in result.stdout.splitlines()]
    assert [["pp0.tp0", "pp0.tp0", "full", "0..13"], ["pp0.tp0", "pp1.tp0", "full", "14..27"]] == [
        cells[:4] for cells in lines if cells[:1] == ["pp0.tp0"]
    ]
    (spread,) = [line for line in result.stdout.splitlines() if "spread" in line and "ms" in line]
    assert has_in_order(["KiB pp0.tp0", "into consumer pp0.tp0"], spread)


def test_plan_counts_all_parts_of_a_layer_in_heads() -> None:
    """The channels of conv_x are those of the heads of ssm."""
    words = ("--model", "Nemotron-H-8B", "--producer", "tp=2", "--consumer", "tp=3")
    output = run("plan", *words).stdout
    assert "heads: conv_x+ssm 128; conv_b+conv_c 8" in output
    cells = re.findall(r"(?:conv_x\+ssm|conv_b\+conv_c|k\+v) heads? [0-9.]+", output)
    assert {"conv_x+ssm heads 42..63", "conv_x+ssm heads 64..84", "k+v head 4"} <= {*cells}
    assert " unit" not in output


def test_descriptors_of_edges_are_those_of_the_pair() -> None:
    """The groups of a pair share no descriptor if they share no memory."""
    from kvspec.analysis.counts import edge_descriptors  # noqa: PLC0415
    from kvspec.cli.options import engine_pair  # noqa: PLC0415

    plan = kvspec.plan_transfer(*engine_pair("gemma-3-1b", "tp=2,pp=2", "tp=3,block=32"))
    counts = edge_descriptors(plan, 100)
    pairs = dict.fromkeys((pair for pair, _ in counts), 0)
    for (pair, _), count in counts.items():
        pairs[pair] += count
    assert pairs == {
        pair: load.descriptors for pair, load in kvspec.traffic(plan, 100).pairs.items()
    }


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("Llama-3-70B", "Llama-3.1-70B"),
        ("meta-llama/Llama-3-8B", "Llama-3.1-8B"),
        ("falcon-mamba", "falcon-mamba-7b"),
        ("qwen3-4b", "Qwen3-4B-2507"),
    ],
)
def test_plan_accepts_an_unambiguous_name_and_prints_it(given: str, found: str) -> None:
    """Standard error says which model is meant."""
    result = run("plan", "--model", given, "--tokens", "1")
    assert (0, 1) == (result.exit_code, result.stderr.count("\n"))
    assert found in result.stderr
    assert result.stdout.startswith(found)


def test_every_model_of_the_catalogue_is_found_by_its_own_names() -> None:
    """None of them is taken for another one, and nothing is printed."""
    from kvspec.cli.options import known_model  # noqa: PLC0415
    from kvspec.models import catalogue  # noqa: PLC0415

    for name in catalogue.names():
        for own in (name, name.upper(), catalogue.repository(name)):
            assert own == known_model(own)


def edges_of(*options: str) -> list[dict[str, Any]]:
    """Return the edges that `kvspec plan --json` prints."""
    edges: list[dict[str, Any]] = json.loads(run("plan", *options, "--json").stdout)["edges"]
    return edges


def test_json_of_a_plan_has_the_places_on_both_ranks() -> None:
    """Producer tp1 holds heads 4 to 7, so head 5 is at its place 1."""
    edge = edges_of("--model", "Qwen3-0.6B")[-1]
    (piece,) = edge["slices"]
    assert ("tp1", "tp2", ["k", "v"]) == (edge["producer"], edge["consumer"], piece["parts"])
    ranges = [piece[f"{name}_range"] for name in ("global", "local", "remote")]
    assert [[5, 8], [0, 3], [1, 4]] == ranges


def test_plan_prints_stripes() -> None:
    """A striped consumer takes every other block from each replica."""
    options = ("--model", "DeepSeek-V3", "--consumer", "tp=1", "--replica-policy", "stripe")
    edges = edges_of(*options)
    assert [("tp0", [0, 2]), ("tp1", [1, 2])] == [
        (edge["producer"], edge["slices"][0]["stripe"]) for edge in edges
    ]
    assert edges[0]["bytes"] == edges[1]["bytes"]
    assert "b % 2 == 1" in run("plan", *options).stdout


def test_plan_prints_the_tokens_of_each_context_rank() -> None:
    """Two context ranks hold the same unit of different tokens."""
    words = ("--producer", "tp=2,dcp=2,interleave=8", "--consumer", "tp=1")
    output = " ".join(run("plan", "--model", "DeepSeek-V3", *words).stdout.split())
    assert has_in_order(["tp0 tp0", "0..7, 16..23", "tp0 tp1", "8..15, 24..31"], output)


@pytest.mark.parametrize(
    ("model", "parts"),
    [
        ("falcon-mamba-7b", {"conv_x+ssm"}),
        ("Bamba-9B", {"conv_x", "conv_b+conv_c", "ssm", "k+v"}),
        ("Qwen3-Next-80B-A3B", {"conv_q+conv_k", "conv_v", "ssm", "k+v"}),
    ],
)
def test_plan_of_states_joins_parts_with_equal_shardings(model: str, parts: set[str]) -> None:
    """Parts with equal shardings share a slice, and each other part has its own."""
    edges = edges_of("--model", model, "--producer", "tp=1", "--consumer", "tp=2")
    assert parts == {"+".join(piece["parts"]) for edge in edges for piece in edge["slices"]}


def test_plan_of_a_model_has_its_groups(tmp_path: Path) -> None:
    """A model is a name, or the path of a config.json or of its folder."""
    edges = edges_of("--model", "gemma-3-1b")
    assert {"full", "sliding_window"} == {edge["group"] for edge in edges}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    for model in (path, tmp_path):
        assert {"full"} == {edge["group"] for edge in edges_of("--model", str(model))}


def test_plan_draws_the_exchange(tmp_path: Path) -> None:
    """The picture has all groups, and standard error has the name of the file."""
    path = tmp_path / "plan.svg"
    result = run("plan", "--model", "gemma-3-1b", "--svg", str(path))
    assert (0, f"wrote {path}\n") == (result.exit_code, result.stderr)
    assert "sliding_window" in path.read_text("utf-8")


@pytest.mark.parametrize(
    ("arguments", "fact", "word"),
    [
        (("plan", "--producer", "tp=0"), "producer.tp_size=0", "1"),
        (("plan", "--producer", "tq=1"), "producer='tq=1'", "dcp"),
        (("plan", "--tokens", "-1"), "num_tokens=-1", "0"),
        (("plan", "--replica-policy", "x"), "replica_policy='x'", "spread"),
        (("plan", "--model", "qwen3-0.7b"), "model='qwen3-0.7b'", "Qwen3-"),
        (("plan", "--model", "llama"), "model='llama'", "Llama-3.1-70B, Llama-3.2-1B"),
        (("plan", "--model", "Mistral-7B"), "model='Mistral-7B'", "v0.1, Mistral-7B-v0.2"),
        (("plan", "--model", ""), "model=''", "catalogue"),
        (("plan", "--model", "x" * 300), f"model='{'x' * 300}'", "Qwen3-"),
        (("plan", "--model", f"{'x' * 300}.json"), f"config='{'x' * 300}.json'", "readable"),
        (("plan", "--model", "/no/config.json"), "config='/no/config.json'", "readable"),
        (("transfer", "--producer", "tp=0"), "producer.tp_size=0", "1"),
        (("transfer", "--consumer", "layout=LBX"), "consumer.layout='LBX'", "LBNHC"),
        (("transfer", "--consumer", "tp=300"), "ranks=302", "256"),
        (("transfer", "--tokens", "0"), "tokens=0", "1"),
        (("transfer", "--tokens", "2000000000"), "tokens=2000000000", "1000000000"),
        (("transfer", "--tokens", "400000000"), "memory='667.6 TiB", "tokens"),
        (("transfer", "--tokens", "9", "--staging", "65536"), "memory='19", "staging"),
        (("transfer", "--cached", "301"), "cached=301", "tokens=300"),
        (("transfer", "--requests", "0"), "requests=0", "1"),
        (("transfer", "--replica-policy", "x"), "replica_policy='x'", "spread"),
        (("transfer", "--device", "tpu"), "device='tpu'", "cuda"),
        (("transfer", "--timeout", "nan"), "timeout=nan", "finite"),
        (("transfer", "--timeout", "0"), "timeout=0.0", "0"),
        (("transfer", "--seed", "-1"), "seed=-1", "0"),
        (("transfer", "--producer", "block=0"), "producer.block_size=0", "1"),
        (("transfer", "--consumer", "block=0"), "consumer.block_size=0", "1"),
        (("plan", "--producer", "block=0"), "producer.block_size=0", "1"),
        (("plan", "--model", "nemo"), "model='nemo'", "catalogue"),
        (("plan", "--consumer", "tp=65537"), "consumer.ranks=65537", "65536"),
        (("plan", "--model", "gemma-3-1b", "--svg", ""), "svg=''", "file"),
        (("plan", "--svg", "/"), "svg='/'", "file"),
        (("prove", "--max-tp", "100000000"), "max_tp=100000000", "256"),
        (("prove", "--max-heads", "100000000"), "max_heads=100000000", "256"),
        (("prove", "--max-tp", "0"), "max_tp=0", "1"),
        (("prove", "--max-heads", "-3"), "max_heads=-3", "1"),
        (("prove", "--jobs", "0"), "jobs=0", "1"),
        (("prove", "--ranks-per-node", "0"), "ranks_per_node=0", "1"),
        *(((*command, "--replica-policy", "nearest"), "ranks_per_node=None", "--ranks-per-node")
          for command in (("plan",), ("transfer",))),
    ],
)  # fmt: skip
def test_command_with_wrong_option_prints_one_line_and_exits_with_2(
    arguments: tuple[str, ...], fact: str, word: str
) -> None:
    """Standard error has the field and the value, and standard output is empty."""
    result = run(*arguments)
    assert (2, "") == (result.exit_code, result.stdout)
    assert 1 == result.stderr.count("\n")
    assert result.stderr.startswith("kvspec: ")
    assert f" {fact}" in result.stderr
    assert word in result.stderr.partition(fact)[2]


def test_command_prints_one_line_if_its_output_cannot_be_written() -> None:
    """The exit status is 2."""
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = plan_in_a_process(full)
    assert (2, 1) == (done.returncode, done.stderr.count("\n"))
    assert has_in_order(["kvspec: ", "space"], done.stderr)


def test_command_prints_to_a_terminal_without_unicode() -> None:
    """Characters that it lacks become question marks."""
    done = plan_in_a_process(subprocess.PIPE, PYTHONIOENCODING="ascii")
    assert (0, "") == (done.returncode, done.stderr)
    assert has_in_order(["Qwen3", "?", "predicted"], done.stdout)


def plan_in_a_process(output: Any, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run `kvspec plan`, and write to *output*."""
    return subprocess.run(
        [sys.executable, "-m", "kvspec.cli", "plan"],
        env={"PYTHONPATH": str(REPO), **environment},
        stdout=output,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )


@pytest.mark.parametrize("package", ["no_such_nixl", "no_such.nixl"])
def test_transfer_without_nixl_prints_the_extra_to_install(
    monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    """The command stops before it starts a process."""
    monkeypatch.setenv("KVSPEC_NIXL_PACKAGE", package)
    result = run("transfer")
    assert 2 == result.exit_code
    assert "kvspec[nixl]" in result.stderr


def test_command_without_typer_prints_the_extra_to_install() -> None:
    """Standard error has one line."""
    code = "import sys; sys.modules['typer'] = None; import kvspec.cli; kvspec.cli.main()"
    done = subprocess.run(  # noqa: S603 - our own code
        [sys.executable, "-c", code],
        env={"PYTHONPATH": str(REPO)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert 2 == done.returncode
    assert 1 == done.stderr.count("\n")
    assert "kvspec[cli]" in done.stderr


def test_version_option_prints_the_version_of_the_package() -> None:
    """The command stops after it."""
    assert f"kvspec {kvspec.__version__}\n" == run("--version").stdout


def test_prove_prints_how_many_cases_it_tried() -> None:
    """4 x 4 TP pairs and 3 head counts are 48 triples, each on 1 to 4 consumer ranks."""
    result = run("prove", "--max-tp", "4", "--max-heads", "3", "--jobs", str(10**12))
    assert 0 == result.exit_code
    assert ["48", "120"] == re.findall(r"\b(\d+) (?:triples|consumer ranks)", result.stdout)
    assert "all exact" in result.stdout


@pytest.mark.parametrize(("more", "last"), [((), "stripe"), (("--ranks-per-node", "2"), "nearest")])
def test_prove_prints_the_policies_that_it_tried(more: tuple[str, ...], last: str) -> None:
    """The policy nearest needs the option for nodes."""
    result = run("prove", "--max-tp", "2", "--max-heads", "2", *more)
    assert 0 == result.exit_code
    known = ("spread", "first", "stripe", "nearest")
    policies = " ".join(result.stdout.split()).rpartition(": ")[2]
    assert list(known[: known.index(last) + 1]) == policies.split(", ")


def test_prove_fails_if_one_triple_is_not_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is 1, and standard output has the counter-example."""

    def prove(*_: object, **more: Any) -> Proof:
        assert ("spread", "first", "stripe") == more["replica_policies"]
        return Proof(9, 27, ("3 heads, TP 2 -> 3, spread: rank 1: heads 1.. missing",))

    monkeypatch.setattr(proof_module, "prove", prove)
    result = run("prove")
    assert 1 == result.exit_code
    assert "1 of 9" in result.stdout
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


def test_job_gives_each_request_blocks_of_live_tokens_only() -> None:
    """A window of 6 before token 19 begins at 14: blocks 3 and 4 of 4 tokens, from token 12."""
    job = small_job(requests=3)
    assert {"window": 3 * 2 + 3, "state": 3 + 3} == job.num_blocks("producer")
    for side in ("producer_blocks", "consumer_blocks"):
        tables = [getattr(move, side) for move in job.moves]
        assert [12] * 3 == [table["window"].first_token for table in tables]
        for group, count in (("window", 6), ("state", 3)):
            ids = np.concatenate([table[group].block_ids for table in tables])
            assert count == len(set(ids.tolist()))


def test_job_at_the_end_of_a_chunk_moves_nothing() -> None:
    """At the end of a chunk no token is live, so the request has no block."""
    spec = kvspec.ChunkedLocalAttentionSpec(
        block_size=4, total_num_kv_heads=1, head_size=4, dtype="int8", attention_chunk_size=8
    )
    engine = EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=spec)])
    job = Job(producer=engine, consumer=engine, tokens=16)
    assert {"g": 3} == job.num_blocks("consumer")
    assert [0, 0] == [len(move.consumer_blocks["g"].block_ids) for move in job.moves]


def consumer_storage(job: Job) -> tuple[Storage, Storage]:
    """Return the bytes of consumer tp0 before the transfer and after a right one."""
    sizes = {
        group.name: job.num_blocks("consumer")[group.name]
        * sum(group.spec.page_size_bytes(0, 2) for _ in group.layers)
        for group in job.consumer.groups
    }
    contents = Contents(job, "consumer", RankId())
    before = contents.before(sizes)
    right, _ = contents.after(before)
    return before, right


def test_contents_accept_the_right_bytes_only() -> None:
    """An unwritten cache and a changed byte are wrong. Dead bytes may have any value."""
    job = small_job()
    before, right = consumer_storage(job)
    judged = Contents(job, "consumer", RankId()).judge(before, right)
    total = sum(map(len, right.values()))
    assert (0, (), total) == (judged.wrong, judged.lines, judged.judged + judged.free)
    # Live rows 14..18: 2 heads x (k + v) x 8 bytes; and 4 channels x (3 conv rows + 4) x 2 bytes.
    # Consumer tp0 receives half of the live bytes of two requests.
    assert 5 * 2 * 2 * 8 + 4 * (3 + 4) * 2 == judged.arriving
    # Each request has rows 12 and 13 before the window and row 19 after the prompt: 1 head, k, v.
    assert 2 * 3 * 2 * 8 == judged.free
    assert Contents(job, "consumer", RankId()).judge(before, before).wrong > 0

    views = logical_views(job.consumer, RankId(), right, job.num_blocks("consumer"))
    for request, table in enumerate(move.consumer_blocks["window"] for move in job.moves):
        block = table.block_ids[1]
        views["window", "w", "v"][block, 0, 2, 3] ^= 1
        judged = Contents(job, "consumer", RankId()).judge(before, right)
        assert request + 1 == judged.wrong
        facts = ["tp0", "window", "w", "v", "0", "18", f"block {block}"]
        assert has_in_order(facts, judged.lines[request])
        views["window", "w", "k"][block, 0, 3, 0] ^= 1  # token 19: dead


def test_contents_report_a_changed_byte_of_a_spare_block() -> None:
    """Blocks that belong to no request must not change."""
    job = small_job()
    before, right = consumer_storage(job)
    owned = {int(i) for move in job.moves for i in move.consumer_blocks["state"].block_ids}
    spare = min(set(range(job.num_blocks("consumer")["state"])) - owned)
    views = logical_views(job.consumer, RankId(), right, job.num_blocks("consumer"))
    views["state", "s", "ssm"][spare, 0, 0, 0] ^= 255
    judged = Contents(job, "consumer", RankId()).judge(before, right)
    (line,) = judged.lines
    assert 1 == judged.wrong
    facts = ["tp0", "state", "s", "ssm", "0", "outside", f"block {spare}"]
    assert has_in_order(facts, line)


@given(case=strategies.cases(), tokens=st.integers(1, 60), cached=st.integers(0, 60))
def test_contents_find_the_tampered_byte_of_any_consumer(
    case: Case, tokens: int, cached: int
) -> None:
    """The changed byte is judged, whatever the first consumer rank with layers holds."""
    job = Job(
        producer=case.producer,
        consumer=case.consumer,
        tokens=tokens,
        cached=min(cached, tokens),
        requests=1,
    )
    # A pipeline stage without layers has no memory.
    rank = next(
        rank
        for rank in job.consumer.parallel.ranks
        if any(job.consumer.layers_at(group, rank.pp) for group in job.consumer.groups)
    )
    cache = kvspec.plan_memory(job.consumer, rank, job.num_blocks("consumer"))
    groups = [group for group in job.consumer.groups if job.consumer.layers_at(group, rank.pp)]
    sizes = {group.name: memory.length for group, memory in zip(groups, cache.memory, strict=True)}
    contents = Contents(job, "consumer", rank)
    before = contents.before(sizes)
    right, _ = contents.after(before)
    contents.tamper(right)
    assert 1 == contents.judge(before, right).wrong


def test_contents_report_many_wrong_bytes_in_few_lines() -> None:
    """An unwritten cache has many wrong bytes."""
    job = small_job()
    before, _ = consumer_storage(job)
    judged = Contents(job, "consumer", RankId()).judge(before, before)
    assert judged.wrong > 100
    assert len(judged.lines) == MAX_LINES


def report(**more: Any) -> Report:
    """Return the report of one consumer rank. *more* replaces fields of the right report."""
    of_rank: dict[str, Any] = {"expired": (), "compared": Compared(judged=9)}
    rank = RankReport(
        side="consumer",
        rank=RankId(tp=3),
        moved=(Moved(producer=RankId(), consumer=RankId(tp=3), nbytes=4),),
        finished=1,
        torch=False,
        **(of_rank | {key: value for key, value in more.items() if key in of_rank}),
    )
    whole: dict[str, Any] = {"failures": (), "loaded": (1, 1), "freed": (1, 1)}
    whole |= {key: value for key, value in more.items() if key in whole}
    return Report(ranks=(rank,), stages={}, **whole)


@pytest.mark.parametrize(
    ("more", "facts"),
    [
        ({"expired": ("request-1",)}, ["consumer tp3", "request-1"]),
        ({"compared": Compared(judged=9, wrong=2)}, ["2", "consumer tp3"]),
        ({"freed": (0, 1)}, ["freed", "0", "1"]),
        ({"loaded": (2, 1)}, ["loaded", "2", "1"]),
        (
            {"failures": (Failure(side="producer", rank=RankId(), stage="fill", why="it is ill"),)},
            ["producer tp0", "fill", "it is ill"],
        ),
    ],
)
def test_report_with_a_single_fault_is_wrong(more: dict[str, Any], facts: list[str]) -> None:
    """The fault has the rank and the numbers, and is in the JSON output."""
    assert report().ok
    wrong = report(**more)
    (fault,) = wrong.faults
    assert has_in_order(facts, fault)
    assert not wrong.ok
    assert [fault] == wrong.as_dict()["faults"]


def test_report_can_be_written_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    """JSON has the names of the ranks."""
    printing.as_json(report().as_dict())
    output = json.loads(capsys.readouterr().out)
    assert "tp3" == output["pairs"][0]["consumer"] == output["ranks"][0]["rank"]
    assert 9 == output["ranks"][0]["compared"]["judged"]


def test_check_memory_rejects_caches_that_do_not_fit() -> None:
    """The need includes the copies of the caches and the libraries of the processes."""
    check_memory([1 << 20] * 2, available=1 << 30)
    with pytest.raises(SpecError, match=r"476\.8 MiB") as caught:
        check_memory([250_000_000] * 2, available=3_000_000_000)
    assert "memory" == caught.value.field
    assert str(caught.value.value).startswith("2.0 GiB")


def test_nbytes_returns_exact_or_short_sizes() -> None:
    """A size is a number of bytes or of binary units, with at most one decimal."""
    texts = {0: "0 B", 512: "512 B", 1024: "1 KiB", 5888: "5,888 B", 11776: "11.5 KiB"}
    texts |= {2**21: "2 MiB", 2_500_000: "2.4 MiB", 3 * 2**40: "3 TiB"}
    assert list(texts.values()) == list(map(nbytes, texts))


def test_run_of_engines_that_do_not_fit_is_a_mismatch() -> None:
    """The plan is made before a process starts."""
    spec = FullAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=4, dtype="int8")
    other = FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=4, dtype="int8")
    producer, consumer = (
        EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=of_side)])
        for of_side in (spec, other)
    )
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec_run(producer, consumer)
    (mismatch,) = caught.value.mismatches
    assert ("l.total_num_kv_heads", 2, 4) == (
        mismatch.field,
        mismatch.producer,
        mismatch.consumer,
    )


def kvspec_run(producer: EngineSpec, consumer: EngineSpec) -> Report:
    """Run two engines."""
    from kvspec.run.local import run_transfer  # noqa: PLC0415 - used only here

    return run_transfer(Job(producer=producer, consumer=consumer))


def test_calibrate_prints_a_threshold() -> None:
    """Two processes move a small request of each shape, directly and staged."""
    pytest.importorskip("nixl_cu13", reason="needs nixl")
    result = run("calibrate", "--megabytes", "1", "--tries", "1")
    assert 0 == result.exit_code, result.output
    name, threshold = result.stdout.splitlines()[-1].split()
    assert "stage_below:" == name
    assert 0 <= int(threshold) <= 1 << 20


@pytest.mark.parametrize("option", ["--tries", "--megabytes"])
def test_calibrate_rejects_zero(option: str) -> None:
    """It needs at least one try of at least 1 MiB."""
    assert 2 == run("calibrate", option, "0").exit_code
