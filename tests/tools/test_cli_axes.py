"""Transfers between real processes that combine real models, layouts and parallel sizes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from refused import check_rejected

import kvspec
from kvspec.cli import options
from kvspec.cli.options import engine, engine_words
from kvspec.inputs import MOST
from kvspec.run.job import Job
from kvspec.run.local import run_transfer

pytest.importorskip("nixl_cu13")

RUNS = {
    "gemma 3: two groups, pipeline stages, blocks of 16 and 64": (
        "gemma-3-4b", "tp=2,pp=2,block=16", "tp=3,block=64", 1100, 0,
    ),
    "gpt-oss: windows, 48 and 32 tokens, cached inside a block": (
        "gpt-oss-20b", "tp=2,block=48", "tp=2,pp=2,block=32,layout=LBNHC", 300, 33,
    ),
    "DeepSeek-V3: latents, context ranks, kernel blocks": (
        "DeepSeek-V3", "tp=2,dcp=2,interleave=8,block=64", "tp=3,block=32,kernel=16", 150, 0,
    ),
    "DeepSeek-V3.2: latents and whole pages of indexer keys, context ranks": (
        "DeepSeek-V3.2", "tp=2,dcp=2,interleave=64,block=64", "tp=3,block=64", 150, 0,
    ),
    "Qwen3-Next: attention and gated delta nets at unequal TP and PP": (
        "Qwen3-Next-80B-A3B", "tp=4", "tp=1,pp=2,block=48", 60, 0,
    ),
    "granite-4-h: Mamba2 with one group, replicated conv channels": (
        "granite-4.0-h-tiny", "tp=1,pp=2", "tp=3", 60, 0,
    ),
    "Qwen3: context ranks on both sides, interleaves of 4 and 8, 16 and 24 tokens": (
        "Qwen3-0.6B", "tp=1,pcp=2,interleave=4,block=16", "tp=1,pcp=3,interleave=8,block=24", 200,
        50,
    ),
}  # fmt: skip
# The laws judge the bytes of each such pair. Here, processes move them over NIXL, for each kind of
# layer.
OFTEN = ("gpt-oss", "DeepSeek-V3:", "granite-4-h")


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("model", "producer", "consumer", "tokens", "cached"),
    [
        pytest.param(*run, id=name, marks=() if name.startswith(OFTEN) else pytest.mark.slow)
        for name, run in RUNS.items()
    ],
)
def test_every_byte_of_a_real_model_is_right(
    model: str, producer: str, consumer: str, tokens: int, cached: int
) -> None:
    """After a transfer over real NIXL, every byte of every consumer rank is right."""
    job = Job(
        producer=engine("producer", model, producer),
        consumer=engine("consumer", model, consumer),
        tokens=tokens,
        cached=cached,
        requests=1,
    )
    report = run_transfer(job)
    assert () == tuple(report.faults)
    assert report.ok


def test_engine_option_sets_each_size() -> None:
    """A key that is missing keeps its default."""
    option = "tp=4, pp=2,dcp=2,interleave=8,block=32,kernel=16,layout=NHD"
    made = engine("producer", "DeepSeek-V3", option)
    parallel = made.parallel
    sizes = (parallel.tp_size, parallel.pp_size, parallel.dcp_size, parallel.interleave_size)
    assert (4, 2, 2, 8) == sizes
    assert (32, 16) == (made.groups[0].spec.block_size, made.groups[0].kernel_block_size)
    assert "LBNHC" == made.layout_of(made.groups[0])


def test_engine_option_sets_the_dtype_of_the_caches(tmp_path: Path) -> None:
    """Engines choose different dtypes for this checkpoint, so its config is not enough."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "head_dim": 16}
    model = tmp_path / "config.json"
    model.write_text(json.dumps({"model_type": "llama", "torch_dtype": "float32", **sizes}))
    for dtype in ("bfloat16", "float16"):
        made = engine("producer", str(model), f"dtype={dtype}")
        assert dtype == made.groups[0].spec.dtype
    for option, value in (("tp=2", "float32"), ("dtype=bfloat61", "bfloat61")):
        check_rejected(
            lambda option=option: engine("producer", str(model), option),  # type: ignore[misc]
            "producer.dtype",
            value,
            "",
        )


@pytest.mark.parametrize(
    ("option", "field", "value", "word"),
    [
        ("tpp=2", "producer", "tpp=2", "dcp"),
        ("tp", "producer", "tp", "key"),
        ("tp=4,pp=2,tp=8", "producer.tp", "8", "once"),
        ("tp=two", "producer.tp", "two", "number"),
        ("tp=\N{FULLWIDTH DIGIT TWO}", "producer.tp", "\N{FULLWIDTH DIGIT TWO}", "number"),
        ("tp=\N{ARABIC-INDIC DIGIT TWO}", "producer.tp", "\N{ARABIC-INDIC DIGIT TWO}", "number"),
        ("tp=-2", "producer.tp", "-2", "number"),
        (f"tp={'9' * 20}", "producer.tp", "9" * 20, str(MOST)),
        (f"tp={'9' * 9999}", "producer.tp", "9" * 9999, str(MOST)),
    ],
)
def test_engine_option_rejects_wrong_text(option: str, field: str, value: str, word: str) -> None:
    """The field has the side and the key."""
    check_rejected(lambda: engine_words("producer", option), field, value, word)


def test_engine_error_with_rule_keeps_its_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The field gets the name of the side, and the rule stays."""

    def refuse(**_: object) -> None:
        raise kvspec.SpecError("tp_size", 4, rule="must divide the heads")

    monkeypatch.setattr(options, "EngineSpec", refuse)
    with pytest.raises(kvspec.SpecError) as caught:
        engine("producer", "Qwen3-0.6B", "tp=4")
    error = caught.value
    assert ("producer.tp_size", 4, "must divide the heads") == (
        error.field,
        error.value,
        error.rule,
    )
