"""Test the traffic matrices for KVBench, for each axis."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

import kvspec
from kvspec.analysis.kvbench import MOST_RANKS, matrix_text, pattern_text, traffic_matrix
from kvspec.errors import SpecError

FULL = kvspec.FullAttentionSpec(block_size=16, total_num_kv_heads=4, head_size=8, dtype="bfloat16")
LATENT = kvspec.MLAAttentionSpec(block_size=16, head_size=24, dtype="bfloat16")
LAYERS = [f"layers.{number}" for number in range(4)]
# Bytes of one head of one token in all layers, keys and values.
HEAD = len(LAYERS) * 2 * 8 * 2
TOKENS = 64
COMMAND = "plan --model Qwen3-0.6B --producer tp=2 --consumer tp=3 --tokens 100 --json"


def engine(spec: kvspec.LayerSpec, **sizes: int) -> kvspec.EngineSpec:
    """Return an engine of four layers."""
    group = kvspec.KVCacheGroup(name="g", layers=LAYERS, spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(**sizes))


def between(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, policy: str = "spread"
) -> list[list[int]]:
    """Return the cells from producer ranks to consumer ranks."""
    plan = kvspec.plan_transfer(producer, consumer, kvspec.ReplicaPolicy(policy))
    matrix = traffic_matrix(plan, TOKENS)
    sources = len(producer.parallel.ranks)
    assert not matrix[sources:].any()
    assert not matrix[:, :sources].any()
    assert matrix.sum() == kvspec.traffic(plan, TOKENS).total.nbytes
    return matrix[:sources, sources:].tolist()


def test_matrix_of_tp_above_the_heads_gives_each_rank_a_whole_head() -> None:
    cells = between(engine(FULL, tp_size=4), engine(FULL, tp_size=8))
    one = HEAD * TOKENS
    assert cells == [[one * (source == target // 2) for target in range(8)] for source in range(4)]


def test_matrix_of_mla_gives_each_rank_the_whole_latent() -> None:
    cells = np.array(between(engine(LATENT, tp_size=2), engine(LATENT, tp_size=4)))
    assert [4 * 24 * 2 * TOKENS] * 4 == cells.sum(axis=0).tolist()
    assert [2, 2] == (cells > 0).sum(axis=1).tolist()


def test_matrix_of_context_parallelism_connects_all_context_ranks() -> None:
    producer = engine(FULL, tp_size=2, pcp_size=2, interleave_size=16)
    cells = between(producer, engine(FULL, tp_size=4))
    half = HEAD * TOKENS // 2
    first, second = [half, half, 0, 0], [0, 0, half, half]
    assert cells == [first, second, first, second]


def test_matrix_of_pipeline_stages_sends_each_stage_its_layers() -> None:
    cells = between(engine(FULL, pp_size=2), engine(FULL, pp_size=4))
    one = 4 * HEAD * TOKENS // 4
    assert cells == [[one, one, 0, 0], [0, 0, one, one]]


def test_matrix_of_policy_first_reads_one_replica() -> None:
    cells = between(engine(LATENT, tp_size=3), engine(LATENT, tp_size=2), "first")
    assert [[4 * 24 * 2 * TOKENS] * 2, [0, 0], [0, 0]] == cells


def test_matrix_of_several_consumers_rotates_the_replicas() -> None:
    plan = kvspec.plan_transfer(engine(LATENT, tp_size=3), engine(LATENT))
    one = 4 * 24 * 2 * TOKENS
    cells = traffic_matrix(plan, TOKENS, consumers=3)[:3, 3:]
    assert cells.tolist() == [[one, 0, 0], [0, one, 0], [0, 0, one]]


@pytest.mark.parametrize("consumers", [0, MOST_RANKS])
def test_matrix_refuses_an_impossible_number_of_consumers(consumers: int) -> None:
    plan = kvspec.plan_transfer(engine(LATENT), engine(LATENT))
    with pytest.raises(SpecError) as raised:
        traffic_matrix(plan, TOKENS, consumers)
    assert ("consumers", consumers) == (raised.value.field, raised.value.value)


def test_texts_have_the_format_of_kvbench() -> None:
    """KVBench splits lines at spaces, and loads YAML, of which JSON is a part."""
    plan = kvspec.plan_transfer(engine(FULL, tp_size=2), engine(FULL, tp_size=3))
    matrix = traffic_matrix(plan, TOKENS)
    rows = [[int(cell) for cell in line.split()] for line in matrix_text(matrix).splitlines()]
    assert matrix.tolist() == rows
    (pattern,) = json.loads(pattern_text("m.txt", TOKENS))["traffic_patterns"]
    assert {"matrix_file": "m.txt", "metadata": {"isl": TOKENS}} == pattern


def test_plan_command_writes_both_files(tmp_path: Path) -> None:
    runner = pytest.importorskip("typer.testing", reason="needs the extra cli").CliRunner()
    from kvspec.cli.app import app  # noqa: PLC0415 - it needs typer

    file = tmp_path / "traffic.yaml"
    done = runner.invoke(app, [*COMMAND.split(), "--kvbench", str(file)])
    assert 0 == done.exit_code
    (pattern,) = json.loads(file.read_text(encoding="utf-8"))["traffic_patterns"]
    matrix = np.loadtxt(pattern["matrix_file"], dtype=np.int64)
    edges = json.loads(done.stdout)["edges"]
    assert ((5, 5), sum(edge["bytes"] for edge in edges)) == (matrix.shape, matrix.sum())
    refused = runner.invoke(app, [*COMMAND.split(), "--kvbench", str(tmp_path / "no" / "file")])
    assert (2, True) == (refused.exit_code, "kvbench" in refused.stderr)


def test_plan_command_refuses_an_empty_name_before_it_writes_the_matrix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = pytest.importorskip("typer.testing", reason="needs the extra cli").CliRunner()
    from kvspec.cli.app import app  # noqa: PLC0415 - it needs typer

    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    refused = runner.invoke(app, [*COMMAND.split(), "--kvbench", ""])
    assert (2, True) == (refused.exit_code, "kvbench" in refused.stderr)
    assert ["folder"] == [path.name for path in tmp_path.rglob("*")]
