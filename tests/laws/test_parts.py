"""Tests of parts with different types, rows and units, such as keys, values and their scales.

One kind of layer is made here: its page has a scale for four tokens of all heads. It keeps the laws
of every kind. Scales for each token and head are read from typed tensors.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ways import check_every_way

import kvspec
from kvspec import RankId
from kvspec.testing import strategies
from kvspec.testing.kinds import KINDS
from tests.support.refused import refusal

HALF = settings(max_examples=settings.default.max_examples // 2)
TOKENS = 4
"""Tokens that share a scale."""


@attrs.frozen(kw_only=True, slots=False)
class PageScaledSpec(kvspec.FullAttentionSpec):
    """Keys and values, and one scale for four tokens of all heads."""

    @cached_property
    def parts(self) -> tuple[kvspec.Part, ...]:
        """The tensor of the scale lies between those of the keys and of the values."""
        key, value = super().parts
        scale = kvspec.Part(
            name="scale", units=1, states=self.block_size // TOKENS, content_bytes=4,
            tokens_per_state=TOKENS, dtype="float32", tensor="scale",
        )  # fmt: skip
        return key, scale, attrs.evolve(value, tensor="value")


DRAWN = st.builds(
    PageScaledSpec, block_size=st.sampled_from((4, 8)), total_num_kv_heads=st.integers(1, 5),
    head_size=st.integers(1, 3), dtype=st.just("bfloat16"),
)  # fmt: skip
CASES = strategies.cases(("scales of a page",), 4)


@pytest.fixture(autouse=True, scope="module")
def _a_kind() -> Iterator[None]:
    """Let the strategies draw the kind while these tests run."""
    KINDS["scales of a page"] = DRAWN
    yield
    del KINDS["scales of a page"]


@given(CASES)
@HALF
def test_parts_with_different_rows_keep_law_1(case: strategies.Case) -> None:
    """The transfer moves by ids and by descriptors."""
    check_every_way(case)


def test_tensors_of_a_page_lie_in_the_order_of_the_parts() -> None:
    """A page of 8 tokens and 2 heads of 3 elements: keys at 0, 2 scales at 96, values at 104."""
    spec = PageScaledSpec(block_size=8, total_num_kv_heads=2, head_size=3, dtype="bfloat16")
    side = builders.engine(spec, layers=("a", "b"))
    cache, storage = kvspec.allocate(side, RankId(), 5)
    first = storage["g"].ctypes.data
    at = {(each.layer, each.part): each.base - first for each in cache.regions}
    assert {("a", "k"): 0, ("a", "scale"): 96, ("a", "v"): 104} == {
        key: at[key] for key in at if key[0] == "a"
    }
    assert 5 * 200 == at["b", "k"]


SIZE, ROWS, BLOCKS, LOCAL = 4, 8, 6, 2
SCALED = builders.gqa(2 * LOCAL, block_size=ROWS, head_size=SIZE, scale_dtype="float32")


def engine(layout: str, tp: int, spec: kvspec.LayerSpec = SCALED) -> kvspec.EngineSpec:
    """Return an engine of one layer."""
    return builders.engine(spec, tp=tp, layout=layout)


def tensors(torch: Any, heads: int, order: str) -> dict[str, Any]:
    """Return bfloat16 keys and values, and float32 scales."""
    sizes = {"B": BLOCKS, "N": ROWS, "H": heads}
    shape = [sizes[each] for each in order]
    return {
        name: torch.randn(*shape, 1, dtype=torch.float32) if "scale" in name
        else torch.randn(*shape, SIZE).to(torch.bfloat16)
        for name in ("k", "k_scale", "v", "v_scale")
    }  # fmt: skip


def test_transfer_moves_float32_scales_beside_bfloat16_keys() -> None:
    """The producer has TP 2 and rows first. The consumer has TP 1 and heads first."""
    torch = pytest.importorskip("torch")
    producer, consumer = engine("LBNHC", 2), engine("LBHNC", 1)
    held = {rank: tensors(torch, LOCAL, "BNH") for rank in producer.parallel.ranks}
    received = tensors(torch, 2 * LOCAL, "BHN")
    plan = kvspec.plan_transfer(producer, consumer)
    request = builders.request(11, [4, 1], [0, 5], cached_tokens=3)
    target = kvspec.RankCache.from_tensors(consumer, RankId(), {"l": received}, "BHNC")
    sources = {
        rank: kvspec.RankCache.from_tensors(producer, rank, {"l": own}, "BNHC")
        for rank, own in held.items()
    }
    assert None is kvspec.verify(plan, sources, {RankId(): target}, request)
    for source in sources.values():
        for start, stop, length in kvspec.build_table(plan, source, target).descriptors(request):
            ctypes.memmove(int(stop), int(start), int(length))
    for name, head, token in ((n, h, t) for n in received for h in range(4) for t in range(3, 11)):
        (producer_block, consumer_block), row = ((4, 0), (1, 5))[token // ROWS], token % ROWS
        sent = held[RankId(tp=head // LOCAL)][name][producer_block, row, head % LOCAL]
        assert sent.tolist() == received[name][consumer_block, head, row].tolist()


def test_from_tensors_rejects_scales_of_another_type() -> None:
    """The scales are float16, and the part has the type float32."""
    torch = pytest.importorskip("torch")
    own = tensors(torch, LOCAL, "BNH")
    wrong = own | {"v_scale": torch.zeros(BLOCKS, ROWS, LOCAL, 2, dtype=torch.float16)}
    error = refusal(
        lambda: kvspec.RankCache.from_tensors(engine("LBNHC", 2), RankId(), {"l": wrong}, "BNHC")
    )
    assert ("tensors['l']['v_scale'].dtype", "float16") == (error.field, error.value)
    assert "float32" in str(error)


def test_nvfp4_and_mxfp8_pages_have_the_sizes_worked_out_by_hand() -> None:
    """A head of 128 elements has 64 bytes with NVFP4 and 128 with MXFP8, and 8 or 4 scales."""
    nvfp4 = builders.gqa(
        8, head_size=64, dtype="uint8", scale_dtype="float8_e4m3fn", elements_per_scale=8
    )
    mxfp8 = builders.gqa(
        8, head_size=128, dtype="float8_e4m3fn", scale_dtype="float8_e8m0fnu", elements_per_scale=32
    )
    names = ("k", "k_scale", "v", "v_scale")
    assert [*zip(names, (64, 8, 64, 8), strict=True)] == [
        (part.name, part.content_bytes) for part in nvfp4.parts
    ]
    assert [*zip(names, (128, 4, 128, 4), strict=True)] == [
        (part.name, part.content_bytes) for part in mxfp8.parts
    ]
    cache = kvspec.plan_memory(engine("LBHNC", 4, nvfp4), RankId(), 3)
    heads = 2
    rows = [16 * heads * size for size in (64, 8, 64, 8)]
    assert [sum(rows[:at]) for at in range(4)] == [each.base for each in cache.regions]
    assert {sum(rows)} == {each.block_stride for each in cache.regions}


def test_mismatches_compare_the_elements_of_a_scale() -> None:
    """The default equals the head size."""
    of = {each: attrs.evolve(SCALED, elements_per_scale=each) for each in (None, SIZE, 2)}
    assert () == kvspec.mismatches(engine("LBNHC", 1, of[None]), engine("LBHNC", 2, of[SIZE]))
    mismatches = kvspec.mismatches(engine("LBNHC", 1, of[None]), engine("LBHNC", 2, of[2]))
    assert ["l.elements_per_scale"] == [each.field for each in mismatches]


def test_spec_rejects_impossible_scales() -> None:
    """A scale must divide a head and a block, and needs a type and separate content."""
    cases: list[tuple[dict[str, Any], str, object, str]] = [
        ({"elements_per_scale": 3}, "elements_per_scale", 3, "head_size=4"),
        ({"elements_per_scale": 4, "head_size_v": 6}, "elements_per_scale", 4, "head_size_v=6"),
        ({"scale_dtype": None, "elements_per_scale": 2}, "elements_per_scale", 2, "scale_dtype"),
        ({"scale_dtype": None, "tokens_per_scale": 2}, "tokens_per_scale", 2, "scale_dtype"),
        ({"tokens_per_scale": 3}, "block_size", ROWS, "3"),
        ({"state_content_bytes": 9}, "scale_dtype", "float32", "state_content_bytes"),
    ]
    for fields, field, value, word in cases:
        error = refusal(functools.partial(attrs.evolve, SCALED, **fields))
        assert (field, value) == (error.field, error.value)
        assert word in str(error)


PART = {"name": "p", "units": 4, "states": 1, "content_bytes": 6}


@pytest.mark.parametrize(
    ("fields", "field", "value"),
    [
        ({"tensor": ""}, "p.tensor", ""),
        ({"tensor": 3}, "p.tensor", 3),
        ({"whole": 1}, "p.whole", 1),
        ({"dtype": "float32"}, "p.content_bytes", 6),  # An element has 4 bytes.
        ({"dtype": "half-precision"}, "dtype", "half-precision"),
    ],
)
def test_part_rejects_invalid_fields(fields: dict[str, Any], field: str, value: object) -> None:
    """The error contains the field and its value."""
    part: dict[str, Any] = PART | fields
    error = refusal(lambda: kvspec.Part(**part))
    assert (field, value) == (error.field, error.value)


def test_state_parts_without_a_dtype_have_that_of_their_spec() -> None:
    """A part with its own dtype keeps it, and plans compare it."""
    parts = [
        kvspec.Part(name=name, units=2, states=1, content_bytes=4, tokens_per_state=0, dtype=own)
        for name, own in (("conv", None), ("ssm", None), ("gate", "int32"))
    ]
    spec = kvspec.MambaSpec(state_parts=parts, dtype="bfloat16", ssm_dtype="float32")
    assert ["bfloat16", "float32", "int32"] == [part.dtype for part in spec.parts]
    changed = attrs.evolve(spec, state_parts=[*parts[:2], attrs.evolve(parts[2], dtype="float32")])
    mismatches = kvspec.mismatches(engine("LBNHC", 1, spec), engine("LBNHC", 1, changed))
    assert [("l.gate.dtype", "int32", "float32")] == [
        (m.field, m.producer, m.consumer) for m in mismatches
    ]
    assert np.all([part.per_token is False for part in spec.parts])
