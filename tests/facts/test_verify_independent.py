"""Test that `verify` with `independent=True` finds faults of the library itself.

Each fault is planted in a function that the plan, the table and `verify` share, so all of them
agree on the wrong result. Only counting one by one finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import attrs
import builders
import faults
import pytest
from builders import engine, gqa
from refused import refusal

import kvspec
from kvspec.check import ownership

NUM_TOKENS = 100
SIZES: dict[str, Any] = {
    "block_size": 1, "total_num_kv_heads": 4, "head_size": 4, "dtype": "bfloat16",
}  # fmt: skip


def check(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, *, independent: bool
) -> kvspec.CounterExample | None:
    """Return the fault that `verify` finds in the library's own descriptors."""
    plan = kvspec.plan_transfer(producer, consumer)
    allocated = [
        {rank: kvspec.allocate(side, rank, 2 * NUM_TOKENS) for rank in side.parallel.ranks}
        for side in (producer, consumer)
    ]
    caches = [{rank: cache for rank, (cache, _) in side.items()} for side in allocated]
    request = builders.request(
        NUM_TOKENS,
        {group.name: range(NUM_TOKENS) for group in producer.groups},
        {group.name: range(NUM_TOKENS, 2 * NUM_TOKENS) for group in consumer.groups},
        cached_tokens=5,
    )
    return kvspec.verify(plan, *caches, request, independent=independent)


def test_independent_verify_counts_encoder_tokens_of_a_uniform_group() -> None:
    """One number of cached tokens counts the prompt, so it does not apply to the encoder."""
    specs = {f"l.{at}": kvspec.CrossAttentionSpec(**SIZES | {"head_size": 4 + at}) for at in (0, 1)}
    side, rank = engine(kvspec.UniformTypeKVCacheSpecs(specs=specs)), kvspec.RankId()
    caches = [{rank: kvspec.plan_memory(side, rank, 9, base << 40)} for base in (1, 2)]
    plan = kvspec.plan_transfer(side, side)
    for encoder_tokens in (5, 8):  # The encoder has fewer or more tokens than the prompt.
        request = builders.request(
            6, range(8), range(8), cached_tokens=4, encoder_tokens=encoder_tokens
        )
        for independent in (False, True):
            assert kvspec.verify(plan, *caches, request, independent=independent) is None


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (kvspec.SlidingWindowSpec(**SIZES, sliding_window=30), 71),
        (kvspec.SlidingWindowSpec(**SIZES, sliding_window=30, extra_retained_tokens=3), 68),
        (kvspec.ChunkedLocalAttentionSpec(**SIZES, attention_chunk_size=32), 96),
    ],
)
def test_independent_verify_finds_lost_live_token(spec: kvspec.LayerSpec, first: int) -> None:
    """The token that `live_tokens` omits is missing. The library's own count does not find it."""
    side = engine(spec)
    assert check(side, side, independent=True) is None
    with faults.first_live_token_lost(type(spec)):
        assert check(side, side, independent=False) is None
        fault = check(side, side, independent=True)
    assert fault is not None
    assert ("missing", first) == (fault.kind, fault.token)


def test_independent_verify_accepts_full_attention() -> None:
    """All tokens after the cached ones arrive."""
    side = engine(kvspec.FullAttentionSpec(**SIZES))
    assert check(side, side, independent=True) is None


@pytest.mark.parametrize(
    ("plant", "sizes"),
    [
        (faults.context_of_next_rank, {"tp": 2, "dcp_size": 2, "interleave_size": 4}),
        (faults.rounded_up_sharding, {"tp": 2}),
        (faults.stages_in_reverse, {"pp_size": 2, "layers": ("l.0", "l.1")}),
    ],
)
def test_independent_verify_finds_fault_of_ownership(
    plant: Callable[[], AbstractContextManager[None]], sizes: dict[str, Any]
) -> None:
    """A context rank, a sharding or a stage is off by one, on either side."""
    spec = gqa(1 if "dcp_size" in sizes else 5)

    def sides() -> tuple[kvspec.EngineSpec, kvspec.EngineSpec]:
        return engine(spec, layers=sizes.get("layers", ("l",))), engine(spec, **sizes)

    for pair in (sides(), sides()[::-1]):
        assert check(*pair, independent=True) is None
    with plant():
        for pair in (sides(), sides()[::-1]):
            assert check(*pair, independent=False) is None
            fault = check(*pair, independent=True)
            assert fault is not None
            assert fault.kind in {"missing", "wrong source", "unwanted"}


def test_independent_verify_finds_units_without_memory() -> None:
    """Two equal engines plan memory for 2 units of 8. All other units lie behind the memory."""
    side = engine(
        kvspec.MambaSpec.gated_delta_net(
            num_k_heads=2, num_v_heads=2, head_k_dim=4, head_v_dim=4, conv_kernel=3, dtype="uint8"
        )
    )
    assert check(side, side, independent=True) is None
    with faults.packs_counted_as_units():
        side = attrs.evolve(side)  # An engine keeps its shardings.
        fault = check(side, side, independent=True)
    assert fault is not None
    assert ("missing", "conv_q", 2) == (fault.kind, fault.part, fault.unit)


def test_independent_verify_finds_state_in_another_block() -> None:
    """The table has a block for each token. The state after the last one is in the last block."""
    side = engine(kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=3, dtype="uint8"))
    assert check(side, side, independent=True) is None
    with faults.state_in_block_before():
        fault = check(side, side, independent=True)
    assert fault is not None
    assert ("missing", "conv_x") == (fault.kind, fault.part)


def test_independent_verify_rejects_too_many_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each position is counted, so their number has a bound."""
    monkeypatch.setattr(ownership, "MAX_COUNTED", NUM_TOKENS - 1)
    side = engine(gqa())
    assert check(side, side, independent=False) is None
    error = refusal(lambda: check(side, side, independent=True))
    assert ("num_tokens", NUM_TOKENS) == (error.field, error.value)
    assert "99" in str(error)


def test_verify_rejects_independent_that_is_not_bool() -> None:
    """The value 1 is an int, although it equals True."""
    side = engine(gqa())
    error = refusal(lambda: check(side, side, independent=1))  # type: ignore[arg-type]
    assert ("independent", 1) == (error.field, error.value)
