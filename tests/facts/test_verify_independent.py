"""A fault of the library itself is found: ownership and liveness are asked of a second source.

Each fault is planted where the library answers for itself, so that plan, table and `verify` agree
on what is wrong; only counting one by one shows it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import builders
import pytest

import kvspec
from kvspec.check import counting
from kvspec.engines import engine as engines
from kvspec.ownership import parallel
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.sharding import Sharding, even_sharding
from kvspec.ownership.tokens import BlockCyclic
from tests.support.builders import engine, gqa

NUM_TOKENS = 100
WINDOW: dict[str, Any] = {
    "block_size": 1, "total_num_kv_heads": 4, "head_size": 4, "dtype": "bfloat16",
}  # fmt: skip


def check(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, *, independent: bool
) -> kvspec.CounterExample | None:
    """Return what `verify` finds in the library's own descriptors."""
    plan = kvspec.plan_transfer(producer, consumer)
    held = [
        {rank: kvspec.allocate(side, rank, 2 * NUM_TOKENS) for rank in side.parallel.ranks}
        for side in (producer, consumer)
    ]
    caches = [{rank: cache for rank, (cache, _) in side.items()} for side in held]
    request = builders.request(
        NUM_TOKENS,
        {group.name: range(NUM_TOKENS) for group in producer.groups},
        {group.name: range(NUM_TOKENS, 2 * NUM_TOKENS) for group in consumer.groups},
        cached_tokens=5,
    )
    return kvspec.verify(plan, *caches, request, independent=independent)


def one_token_short(spec: type[kvspec.LayerSpec], patch: pytest.MonkeyPatch) -> None:
    """Plant a live token too few, at the beginning."""
    live = spec.live_tokens

    def short(self: kvspec.LayerSpec, num_tokens: int) -> range:
        return live(self, num_tokens)[1:]

    patch.setattr(spec, "live_tokens", short)


@pytest.mark.parametrize(
    ("spec", "first"),
    [
        (kvspec.FullAttentionSpec(**WINDOW), 5),
        (kvspec.SlidingWindowSpec(**WINDOW, sliding_window=30), 71),
        (kvspec.SlidingWindowSpec(**WINDOW, sliding_window=30, extra_retained_tokens=3), 68),
        (kvspec.ChunkedLocalAttentionSpec(**WINDOW, attention_chunk_size=32), 96),
    ],
)
def test_a_live_token_too_few_is_found(
    spec: kvspec.LayerSpec, first: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The token that `live_tokens` forgets is missing; by the library's own word nothing is."""
    side = engine(spec)
    assert None is check(side, side, independent=True)
    if isinstance(spec, kvspec.SlidingWindowSpec | kvspec.ChunkedLocalAttentionSpec):
        one_token_short(type(spec), monkeypatch)
        assert None is check(side, side, independent=False)
        found = check(side, side, independent=True)
        assert found is not None
        assert ("missing", first) == (found.kind, found.token)


def context_shifted(patch: pytest.MonkeyPatch) -> None:
    """Plant a context rank that is the next one's."""
    context = ParallelConfig.context

    def shifted(self: ParallelConfig, rank: RankId) -> BlockCyclic:
        own = context(self, rank)
        return attrs.evolve(own, rank=(own.rank + 1) % own.size)

    patch.setattr(ParallelConfig, "context", shifted)


def sharding_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Plant a sharding that is rounded the other way."""

    def rounded_up(units: int, tp_size: int, granularity: int = 1) -> Sharding:
        cuts = [-(-rank * units // tp_size) for rank in range(tp_size + 1)]
        ranges = tuple(range(*cuts[rank : rank + 2]) for rank in range(tp_size))
        return (
            Sharding(units, ranges)
            if units > tp_size
            else even_sharding(units, tp_size, granularity)
        )

    patch.setattr(parallel, "even_sharding", rounded_up)


def stage_off_by_one(patch: pytest.MonkeyPatch) -> None:
    """Plant stages that hold each other's layers."""
    stages = engines.stages_of

    def swapped(layers: list[str], sizes: ParallelConfig) -> dict[str, int]:
        return {layer: sizes.pp_size - 1 - at for layer, at in stages(layers, sizes).items()}

    patch.setattr(engines, "stages_of", swapped)


@pytest.mark.parametrize(
    ("plant", "sizes"),
    [
        (context_shifted, {"tp": 2, "dcp_size": 2, "interleave_size": 4}),
        (sharding_off_by_one, {"tp": 2}),
        (stage_off_by_one, {"pp_size": 2, "layers": ("l.0", "l.1")}),
    ],
)
def test_a_planted_fault_of_ownership_is_found(
    plant: Callable[[pytest.MonkeyPatch], None],
    sizes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A context, a sharding, a stage off by one.

    Right by the library's own word, found by counting.
    """
    spec = gqa(1 if "dcp_size" in sizes else 5)

    def sides() -> tuple[kvspec.EngineSpec, kvspec.EngineSpec]:
        return engine(spec, layers=sizes.get("layers", ("l",))), engine(spec, **sizes)

    for pair in (sides(), sides()[::-1]):
        assert None is check(*pair, independent=True)
    plant(monkeypatch)
    for pair in (sides(), sides()[::-1]):
        assert None is check(*pair, independent=False)
        found = check(*pair, independent=True)
        assert found is not None
        assert found.kind in {"missing", "wrong source", "unwanted"}


def test_positions_are_counted_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for more positions than can be looked at is told so."""
    monkeypatch.setattr(counting, "MAX_COUNTED", NUM_TOKENS - 1)
    side = engine(gqa())
    assert None is check(side, side, independent=False)
    told = "num_tokens=100: expected at most 99 positions, because each is counted"
    with pytest.raises(kvspec.SpecError, match=told):
        check(side, side, independent=True)


def test_independent_is_a_flag() -> None:
    """Anything but True and False is refused."""
    side = engine(gqa())
    with pytest.raises(kvspec.SpecError, match="independent=1: expected True or False"):
        check(side, side, independent=1)  # type: ignore[arg-type]
