"""vLLM's rings: the rows of the tokens that a layer has not compressed yet.

A spec does not have the number of tokens that are compressed together. It is always 2 in
DeepSeek-V4.1. In GLM-5.3 and Qwen4 the layer has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import vllm_like as like
from refused import refusal
from vllm_like import HEADS, config, engine_spec
from vllm_serving import Engine, Request, installed, until

import kvspec
from kvspec.adapters.vllm import block_tables, loses_a_token
from kvspec.adapters.vllm.tables import check_rings

pytestmark = [pytest.mark.adapters, pytest.mark.usefixtures("simulated")]


@pytest.fixture(autouse=True)
def vllm() -> Iterator[None]:
    """Provide the base class of vLLM for the connector."""
    with installed():
        yield


RING: dict[str, Any] = {"num_kv_heads": 1, "head_size": 64, "head_size_v": 0, "dtype": "float32"}
RINGS = {
    "vllm.models.deepseek_v41.compressor.CompressorBackend": None,
    "vllm.v1.attention.backends.mla.indexer.KpoolTailBackend": 16,
    "vllm.models.qwen4_exp.common.qsa_cache.QSAStateBackend": 4,
}


def ring(backend: str, ratio: Any, block_size: int = 16, **fields: Any) -> Any:
    """Return the engine with one ring, read from vLLM's spec on one of two ranks."""
    spec = like.CircularBufferSpec(block_size=block_size, **RING | fields)
    return engine_spec(
        config((["layer.0"], spec)),
        parallel=kvspec.ParallelConfig(tp_size=2),
        backends=backend,
        variants={"layer.0": ratio},
    )


@pytest.mark.parametrize(("backend", "ratio"), RINGS.items())
def test_engine_spec_reads_a_ring_that_each_rank_holds_whole(backend: str, ratio: Any) -> None:
    """DeepSeek-V4.1 always compresses two tokens. The others have the number in their layers."""
    for heads in (1, 2):
        engine = ring(backend, ratio, num_kv_heads=heads)
        spec = engine.group("group0").spec
        assert spec == kvspec.CircularBufferSpec(
            block_size=16,
            num_kv_heads=heads,
            head_size=64,
            dtype="float32",
            compress_ratio=ratio or 2,
        )
        assert [heads * 16 * 64 * 4] * 2 == [
            spec.page_size_bytes(tp_rank=rank, tp_size=2) for rank in (0, 1)
        ]


@pytest.mark.parametrize(
    ("backend", "ratio", "fields", "field"),
    [
        ("kpool", None, {}, "variants['layer.0']"),
        ("kpool", 1, {}, "variants['layer.0']"),
        ("kpool", "16", {}, "variants['layer.0']"),
        ("kpool", 16, {"head_size_v": 64}, "head_size_v"),
        ("kpool", 16, {"state_content_bytes": 128}, "state_content_bytes"),
        ("kpool", 16, {"tokens_per_state": 2}, "tokens_per_state"),
        ("kpool", 16, {"block_size": 8}, "block_size"),
        ("step5", 8, {}, "backends['layer.0']"),
        ("flash", 8, {}, "backends['layer.0']"),
        # vLLM's pages of another size are something else than these rows.
        ("kpool", 16, {"page_size_padded": 1024}, "page_size_bytes"),
    ],
)
def test_engine_spec_refuses_a_ring_that_is_not_certain(
    backend: str, ratio: Any, fields: Any, field: str
) -> None:
    names = {
        "kpool": "vllm.v1.attention.backends.mla.indexer.KpoolTailBackend",
        "step5": "vllm.models.step5.nvidia.csa_tail_ring.Step5CSATailRingBackend",
        "flash": like.FLASH,
    }
    error = refusal(lambda: ring(names[backend], ratio, **fields))
    assert error.field.endswith(field)


def test_engine_spec_refuses_other_layers_on_the_backend_of_a_ring() -> None:
    spec = like.FullAttentionSpec(**HEADS)
    error = refusal(lambda: engine_spec(config((["layer.0"], spec)), backends=next(iter(RINGS))))
    assert "CircularBufferSpec" in error.expected


def test_block_table_of_a_ring_has_one_block() -> None:
    """The prompt is longer than the ring. The producer keeps all tokens if its rows suffice."""
    backend = "vllm.v1.attention.backends.mla.indexer.KpoolTailBackend"
    full = like.FullAttentionSpec(**HEADS)
    both = config((["layer.0"], full), (["layer.1"], like.CircularBufferSpec(block_size=8, **RING)))
    engine = engine_spec(
        both, backends={"layer.0": like.FLASH, "layer.1": backend}, variants={"layer.1": 8}
    )
    tables = block_tables(engine, both, [[3, 4, 5], [7]], num_tokens=40)
    assert [7] == tables["group1"].block_ids.tolist()
    assert (
        "block_ids['group1']"
        == refusal(lambda: block_tables(engine, both, [[3, 4, 5], []], num_tokens=40)).field
    )
    # After a whole group, a ring may have no row of it.
    assert [8, 16, 24] == [tokens for tokens in range(1, 30) if loses_a_token(engine, tokens)]
    for computed in range(1, 40):
        check_rings(engine, computed, computed - 1 + loses_a_token(engine, computed))
    check_rings(engine, 40, 16)
    assert "num_tokens" == refusal(lambda: check_rings(engine, 40, 20)).field


@pytest.mark.nixl
@pytest.mark.parametrize(
    ("rows", "cached", "tokens"), [((8, 16), 0, 14), ((16, 8), 4, 14), ((8, 8), 8, 16)]
)
def test_ring_moves_through_the_connector_in_its_one_block(
    rows: tuple[int, int], cached: int, tokens: int
) -> None:
    """The rows of an open group of 4 move. After 16 tokens there is none, so it stops at 15."""
    computed = tokens - (tokens == 16)
    tables, others = ([1, 2, 3, 4], [5, 6, 7, 8], [9]), ([4, 3, 2, 1], [8, 7, 6, 5], [10])
    names = "group0", "group1", "group2"
    with Engine("p", 2, ring=rows[0]) as producer, Engine("d", 1, ring=rows[1]) as consumer:
        moved = kvspec.TransferRequest(
            request_id="d",
            num_tokens=tokens - 1,
            cached_tokens=cached,
            state_tokens=computed,
            producer_blocks=dict(zip(names, tables, strict=True)),
            consumer_blocks=dict(zip(names, others, strict=True)),
        )
        producer.fill(moved)
        consumer.spoil(moved)
        params = producer.prefill(Request("p-1", tokens), *tables)
        consumer.decode(Request("d-1", tokens, params), *others, cached=cached)
        until(lambda: producer.sent and consumer.received, producer, consumer)
        assert {} == consumer.failed
        assert [] == consumer.wrong(moved)
