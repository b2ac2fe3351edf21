"""Pools of DeepSeek-V4 that SGLang's own classes build on a CPU, and whose own code writes them.

A nightly workflow installs SGLang. Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import ctypes
import os
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import sglang_serving as serving
from builders import request as request_of

import kvspec
from kvspec import RankId
from kvspec.adapters import sglang as adapter
from kvspec.adapters.sglang.describing import check_supported
from kvspec.errors import SpecError
from kvspec.testing.world import described

pytestmark = pytest.mark.adapters

os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it when it defines a kernel.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # SGLang warns of each kernel that a CPU does not have.
    pytest.importorskip("sglang", reason="SGLang is not installed")
    import torch
    from sglang.kernels.ops.kvcache.dsv4_main_kv_store import NopeFp8RopeBf16Pack
    from sglang.srt import runtime_context
    from sglang.srt.layers.attention.dsv4 import unified_kv_gate as gate
    from sglang.srt.mem_cache import deepseek_v4_compress_state as states
    from sglang.srt.mem_cache import deepseek_v4_memory_pool as v4

# Layer 0 has a window alone, layers 1 and 3 have the ratio 4, and layer 2 the ratio 128.
RATIOS, HEAD, KEY = [0, 4, 128, 4], 512, 128
WRITTEN = 140
REQUEST, INDEX = 2, {"index_order": "rows", "index_hadamard": False}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> Settings:
    """Let pools find the settings that SGLang's processes set at their start."""
    return Settings(monkeypatch)


class Settings:
    """What SGLang reads from its context while it builds a pool."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kernel = SimpleNamespace(
            dsv4_attn_backend="auto", enable_deepseek_v4_fp4_indexer=False
        )
        self.features = SimpleNamespace(enable_encoder_swa_bounded_replay=False)
        self.spec = SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None)
        own = SimpleNamespace(kernel=self.kernel, features=self.features,
                              graph=SimpleNamespace(cuda_graph_config=None))  # fmt: skip
        patch.setattr(v4, "get_exec", lambda: own)
        patch.setattr(v4, "get_spec", lambda: self.spec)
        schedule = SimpleNamespace(chunked_prefill_size=None)
        patch.setattr(runtime_context, "get_schedule", lambda: schedule)
        patch.setattr(v4, "get_platform", lambda: SimpleNamespace(is_sm120=False))


def pool_of(page: int = 256, swa: int = 256, ratios: Any = None, **fields: Any) -> Any:
    """Return a pool of 8 pages of *page* tokens, with window pages of *swa* tokens."""
    ratios = RATIOS if ratios is None else ratios
    size, requests = 8 * page, 4
    sizes: dict[str, Any] = {
        "max_num_reqs": requests, "swa_size": size, "c4_size": size // 4, "c128_size": size // 128,
        "c4_state_pool_size": size // swa * 8, "c128_state_pool_size": (requests + 1) * 128,
        "page_size": page, "swa_page_size": swa, "dtype": torch.float8_e4m3fn,
        "c4_state_dtype": torch.float32, "c128_state_dtype": torch.float32,
        "qk_nope_head_dim": 448, "qk_rope_head_dim": 64, "indexer_head_dim": KEY,
        "layer_num": len(ratios), "device": "cpu", "enable_memory_saver": False,
        "compression_ratios": ratios, "full_size": size,
    }  # fmt: skip
    return v4.DeepSeekV4TokenToKVPool(**sizes | fields)


def slots(tokens: int, page: int, seed: int) -> Any:
    """Return the slots of a prompt on scattered pages."""
    pages = 1 + np.random.default_rng(seed).permutation(-(-tokens // page))
    return torch.from_numpy((pages[:, None] * page + np.arange(page)).ravel()[:tokens])


class Side:
    """One engine with a pool, and the slots of one prompt."""

    def __init__(self, tokens: int, page: int, swa: int, seed: int, pool: Any = None) -> None:
        self.pool = pool_of(page, swa) if pool is None else pool
        self.tokens, self.full = tokens, slots(tokens, page, seed)
        table = torch.zeros(10 * page, dtype=torch.int64)
        table[self.full] = slots(tokens, swa, seed + 7)
        self.pool.register_mapping(table)
        self.window = self.pool.translate_loc_from_full_to_swa(self.full)
        self.request = REQUEST + seed % 2
        self.engine = adapter.engine_spec(self.pool, **INDEX)
        self.cache = adapter.rank_cache(self.engine, RankId(), self.pool)
        # SGLang frees the pages of a window that no query reads. Their slots are 0.
        gone = torch.where(torch.arange(tokens) // swa * swa + swa <= tokens - 128, 0, self.window)
        own = {"full": self.full, "swa": gone, "request": self.request}
        self.tables = adapter.block_tables(self.engine, own)

    def rows(self, ratio: int) -> Any:
        """Return the rows of the latents of *ratio* that are complete."""
        ends = self.full[ratio - 1 :: ratio]
        assert ((ends + 1) % ratio == 0).all()
        return ends // ratio


def move(producer: Side, consumer: Side, **options: Any) -> None:
    """Copy the prompt from the pool of one side to that of the other."""
    plan = kvspec.plan_transfer(producer.engine, consumer.engine)
    request = request_of(producer.tokens, producer.tables, consumer.tables, **options)
    table = kvspec.build_table(plan, producer.cache, consumer.cache)
    for start, stop, length in described(table, request):
        ctypes.memmove(stop, start, length)


def pack(count: int) -> Any:
    """Return *count* latents as SGLang quantises them."""
    return NopeFp8RopeBf16Pack(
        torch.randint(1, 100, (count, 448), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.randn(count, 64).to(torch.bfloat16),
        torch.randint(1, 200, (count, 7), dtype=torch.uint8),
    )


def latents(pool: Any, buffer: Any, rows: Any) -> tuple[Any, Any]:
    """Return data and scales of *rows*, from where SGLang's `KVLayout` has them in a page."""
    step, first, scale_step = pool.kv_layout.row_addressing(pool.page_size)
    data, scales = pool.kv_layout.data_bytes, pool.kv_layout.scale_bytes
    pages, at = rows // pool.page_size, rows % pool.page_size
    found = [
        buffer[pages[:, None], (base + at * stride)[:, None] + torch.arange(size)]
        for base, stride, size in ((0, step, data), (first, scale_step, scales))
    ]
    return found[0], found[1]


class Truth:
    """The values that a model writes for one prompt, by layer."""

    def __init__(self, side: Side) -> None:
        torch.manual_seed(side.tokens)
        count, pool = side.tokens, side.pool
        self.window = {layer: pack(count) for layer in range(len(RATIOS))}
        self.latents = {at: pack(count // r) for at, r in enumerate(RATIOS) if r}
        sparse = [at for at, ratio in enumerate(RATIOS) if ratio == 4]
        self.keys = {
            at: (
                torch.randint(0, 100, (count // 4, KEY), dtype=torch.uint8),
                torch.rand(count // 4),
            )
            for at in sparse
        }
        sums = {at: 2 * (1 + (r == 4)) * HEAD for at, r in enumerate(RATIOS) if r}
        self.sums = {at: torch.randn(count, size) for at, size in sums.items()}
        self.index_sums = {at: torch.randn(count, 4 * KEY) for at in sparse}
        for layer, own in self.window.items():
            # Triton's interpreter is slow, and no query reads earlier tokens.
            pool.set_swa_key_buffer(
                layer, side.window[-WRITTEN:], own.slice_pack(slice(-WRITTEN, None))
            )
        for layer, own in self.latents.items():
            pool.set_extra_key_buffer(layer, side.rows(RATIOS[layer]), own)
        for layer, (keys, scales) in self.keys.items():
            own = keys.view(torch.float8_e4m3fn)
            pool.set_index_k_scale_buffer(layer, side.rows(4), own, scales)
        for kind, each in self.each_sum():
            for layer, rows in each.items():
                # Later tokens overwrite the rows of earlier ones.
                for tokens in torch.arange(count).split(8):
                    place = self.place(side, kind, layer, tokens)
                    value = states.KVAndScore(rows[tokens])
                    getattr(pool, kind)[layer].set_state_by_state_loc(place, value)

    def each_sum(self) -> Iterator[tuple[str, dict[int, Any]]]:
        """Yield the sums of the latents and of the keys."""
        yield "compress_state_pools", self.sums
        yield "indexer_compress_state_pools", self.index_sums

    def place(self, side: Side, kind: str, layer: int, tokens: Any) -> Any:
        """Return the rows of the sums of *tokens*, as SGLang finds them."""
        state = getattr(side.pool, kind)[layer]
        if not state.request_scoped:
            return state.translate_from_swa_loc_to_state_loc(side.window[tokens])
        requests = torch.full_like(tokens, side.request)
        return state.translate_from_req_position_to_state_loc(requests, tokens)

    def check(self, side: Side) -> None:
        """Compare all that the next query reads."""
        count, pool = side.tokens, side.pool
        live = torch.arange(max(0, count - 127), count)
        for layer, own in self.window.items():
            same(own, live, latents(pool.swa_kv_pool, pool.get_swa_raw_buffer(layer),
                                    side.window[live]))  # fmt: skip
        for layer, own in self.latents.items():
            _, at, kept = pool.layer_mapping[layer]
            rows = side.rows(RATIOS[layer])
            if len(rows):
                same(own, torch.arange(len(rows)), latents(kept, kept.kv_buffer[at], rows))
        pages = (side.full[:: pool.page_size] // pool.page_size)[None]
        for layer, (keys, scales) in self.keys.items():
            size = len(keys)
            if size:
                found = pool.get_index_k_scale_buffer(
                    layer, torch.tensor([size]), pages, size, size
                )
                assert torch.equal(keys, found[0].view(torch.uint8))
                assert torch.equal(scales, found[1].view(torch.float32)[:, 0])
        for kind, each in self.each_sum():
            for layer, rows in each.items():
                ratio = RATIOS[layer]
                first = count - count % ratio - (ratio if ratio == 4 else 0)
                live = torch.arange(max(0, first), count)
                state = getattr(pool, kind)[layer]
                place = self.place(side, kind, layer, live)
                assert torch.equal(rows[live], state.get_state_by_state_loc(place).kv_score)


def same(own: Any, live: Any, found: tuple[Any, Any]) -> None:
    """Compare latents with rows of a pool."""
    data = own.k_nope_fp8[live].view(torch.uint8), own.k_rope_bf16[live].view(torch.uint8)
    assert torch.equal(torch.cat(data, 1), found[0])
    assert torch.equal(own.scale_k_nope_ue8m0[live], found[1][:, :7])


LENGTHS = (3, 4, 127, 130, 256, 258, 262, 391)


@pytest.mark.parametrize("tokens", LENGTHS)
@pytest.mark.parametrize("pages", [(256, 256), (256, 512)])
def test_sglang_finds_the_compressed_latents_of_another_engine(
    tokens: int, pages: tuple[int, int]
) -> None:
    """The states of a page and of a request have all positions that the next query reads."""
    producer, consumer = (Side(tokens, page, 256, seed) for seed, page in enumerate(pages))
    truth = Truth(producer)
    truth.check(producer)
    move(producer, consumer)
    truth.check(consumer)


def written(pool: Any, buffer: Any, rows: Any) -> tuple[Any, Any]:
    """Write random bytes to *rows* of a buffer, where SGLang's `KVLayout` has them."""
    step, first, scale_step = pool.kv_layout.row_addressing(pool.page_size)
    pages, at = rows // pool.page_size, rows % pool.page_size
    for base, stride, size in (
        (0, step, pool.kv_layout.data_bytes),
        (first, scale_step, pool.kv_layout.scale_bytes),
    ):
        places = pages[:, None], (base + at * stride)[:, None] + torch.arange(size)
        buffer[places] = torch.randint(0, 256, (len(rows), size), dtype=torch.uint8)
    return latents(pool, buffer, rows)


def shared(side: Side, rows_of: Any, *, fill: bool) -> Iterator[Any]:
    """Yield the shared latents that the next query reads. Write them before, if *fill*."""
    pool, tokens = side.pool, side.tokens
    live = torch.arange(max(0, tokens - 127), tokens)
    for layer in range(len(pool.compression_ratios)):
        yield from rows_of(pool.swa_kv_pool, pool.get_swa_raw_buffer(layer), side.window[live])
    for layer in pool.kv_source_layers:
        ratio, at, kept = pool.layer_mapping[layer]
        rows = side.rows(ratio)
        yield from rows_of(kept, kept.kv_buffer[at], rows)
        keys = pool.index_pools[ratio]
        if fill:
            keys.index_k_with_scale_buffer[at].random_(0, 256)
        yield from keys.get_index_k_fp4(at, rows)
    pairs = pool.compress_state_pools[2]
    last = torch.arange(tokens - tokens % 2, tokens)
    places = torch.full_like(last, side.request), last
    place = pairs.translate_from_req_position_to_state_loc(*places)
    if fill:
        value = states.KVAndScore(torch.randn(len(last), 2 * HEAD))
        pairs.set_state_by_state_loc(place, value)
    yield pairs.get_state_by_state_loc(place).kv_score


@pytest.mark.parametrize("layout", ["v4", "v41", "v41_new"])
@pytest.mark.parametrize("tokens", [2, 5, 257, 391])
def test_sglang_finds_the_shared_latents_of_another_engine(layout: str, tokens: int) -> None:
    """Only sources own latents of the ratios 1 and 2. Their index pages have 64 rows."""
    made: dict[str, Any] = {
        "ratios": [0, 1, 2, 1, 2], "kv_source_layers": [1, 2], "kv_layout": layout,
    }  # fmt: skip
    producer, consumer = (
        Side(tokens, page, 256, seed, pool_of(page, **made)) for seed, page in enumerate((256, 512))
    )
    assert ("layers.1",) == producer.engine.group("c1").layers
    torch.manual_seed(0)
    wanted = [*shared(producer, written, fill=True)]
    move(producer, consumer)
    found = [*shared(consumer, latents, fill=False)]
    assert all(torch.equal(*both) for both in zip(wanted, found, strict=True))


def test_pages_of_one_scale_for_all_move(alone: Settings) -> None:
    """The kernels of TRT-LLM read 512 elements of 8 bits, with the scale 1."""
    alone.kernel.dsv4_attn_backend = "trtllm"
    producer, consumer = (Side(259, page, 256, seed) for seed, page in enumerate((256, 512)))
    rows = [
        side.pool.kv_pools[4].kv_buffer[1].view(torch.uint8).view(-1, 512)
        for side in (producer, consumer)
    ]
    rows[0].random_(0, 100)
    move(producer, consumer)
    assert torch.equal(rows[0][producer.rows(4)], rows[1][consumer.rows(4)])
    alone.kernel.dsv4_attn_backend = "auto"
    packed = adapter.engine_spec(pool_of(), **INDEX)
    assert "layers.0.swa_cache" in str(kvspec.mismatches(producer.engine, packed)[0].field)


def differing(left: Any, right: Any) -> set[str]:
    """Return the fields in which two pools differ, by the end of their names."""
    own = [adapter.engine_spec(pool, **INDEX) for pool in (left, right)]
    return {each.field.rpartition(".")[2] for each in kvspec.mismatches(*own)}


def test_states_of_pages_of_unequal_sizes_are_refused(alone: Settings) -> None:
    """Each page has a ring, and a kind of layer with a ring for each page does not exist."""
    assert "tokens_per_state" in differing(pool_of(256, 256), pool_of(256, 128))
    plain = pool_of()
    alone.spec = SimpleNamespace(speculative_algorithm="EAGLE", speculative_num_draft_tokens=3)
    assert {"state_content_bytes", "page_format"} == differing(plain, pool_of())
    # Without layers of ratio 4, pages of windows and rings of requests may differ.
    drafts = pool_of(ratios=[0, 128])
    alone.spec = SimpleNamespace(speculative_algorithm=None, speculative_num_draft_tokens=None)
    assert set() == differing(pool_of(swa=64, ratios=[0, 128]), drafts)


def test_states_of_other_numbers_are_refused() -> None:
    half = dict.fromkeys(("c4_state_dtype", "c128_state_dtype"), torch.bfloat16)
    assert {"dtype", "state_content_bytes", "page_format"} == differing(pool_of(), pool_of(**half))


@pytest.mark.parametrize("field", ["index_order", "index_hadamard"])
def test_keys_of_another_meaning_are_refused(field: str) -> None:
    own = adapter.engine_spec(pool_of(), **INDEX)
    changed = {"index_order": "shuffled", "index_hadamard": True}
    other = adapter.engine_spec(pool_of(), **INDEX | {field: changed[field]})
    (found,) = kvspec.mismatches(own, other)
    assert found.field.endswith("page_format")
    with pytest.raises(SpecError) as caught:
        adapter.engine_spec(pool_of(), **INDEX | {field: None})
    assert field == caught.value.field


def test_numbers_of_amd_are_refused() -> None:
    with pytest.raises(SpecError) as caught:
        adapter.engine_spec(pool_of(), **INDEX, fp8_dtype="float8_e4m3fnuz")
    assert caught.value.field == "fp8_dtype"


def test_keys_of_four_bits_differ_from_those_of_eight(alone: Settings) -> None:
    plain = pool_of()
    alone.kernel.enable_deepseek_v4_fp4_indexer = True
    assert "head_size" in differing(plain, pool_of())


@pytest.mark.parametrize(
    ("field", "made"),
    [
        ("unified_kv_pool", {}),
        ("swa_req_ring_size", {"is_draft_worker": True, "ratios": [0, 0]}),
        ("request_window", {}),
        ("online", {}),
        ("kv_pools[4]", {"enable_hisparse": True}),
    ],
)
def test_pools_with_a_window_or_states_elsewhere_are_refused(
    field: str, made: dict[str, Any], alone: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang builds them. The error names what lies elsewhere."""
    if field == "unified_kv_pool":
        monkeypatch.setattr(gate, "is_unified_kv_triton", lambda: True)
    elif field == "online":
        monkeypatch.setattr(v4, "ONLINE_C128", True)
    else:
        alone.features.enable_encoder_swa_bounded_replay = field != "kv_pools[4]"
    pool = pool_of(**made)
    with pytest.raises(SpecError) as caught:
        adapter.engine_spec(pool, **INDEX)
    assert field in caught.value.field


def test_backend_refuses_the_pool_by_name() -> None:
    """Its tables have no slots of windows and of requests."""
    around = serving.surroundings(serving.World(1), 0, 1, 256, pool=pool_of())
    with pytest.raises(SpecError) as caught:
        check_supported(serving.settings(), around)
    assert ("token_to_kv_pool", "DeepSeekV4TokenToKVPool") == (
        caught.value.field, caught.value.value,
    )  # fmt: skip


def test_slots_of_a_prompt_are_required() -> None:
    """SGLang's window and its requests have slots of their own."""
    side = Side(300, 256, 256, 0)
    own = {"full": side.full, "swa": side.window, "request": REQUEST}
    for slots_, field in (
        (side.full, "slots"),
        (own | {"swa": None}, "slots['swa']"),
        (own | {"request": None}, "slots['request']"),
        (own | {"request": 0}, "slots['request']"),
        (own | {"full": None}, "slots['full']"),
        (own | {"swa": side.window[:-1]}, "slots['swa']"),
    ):
        with pytest.raises(SpecError) as caught:
            adapter.block_tables(side.engine, slots_)
        assert field == caught.value.field
