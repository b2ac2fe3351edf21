"""Parts need not be alike: scales beside keys, of another type, with rows and units of their own.

A kind made here alone, whose page has a scale for four tokens of all heads, obeys the laws that
every kind obeys; and scales for each token and head are read from typed tensors as they are.
"""

from __future__ import annotations

import ctypes
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

HALF = settings(max_examples=settings.default.max_examples // 2)
TOKENS = 4
"""Tokens that share a scale."""


@attrs.frozen(kw_only=True, slots=False)
class PageScaledSpec(kvspec.FullAttentionSpec):
    """Keys and values, and one scale for four tokens of all heads: other rows, other units."""

    @cached_property
    def parts(self) -> tuple[kvspec.Part, ...]:
        """The scale's tensor stands between the keys' and the values'."""
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
def test_unequal_rows_arrive_exactly_once(case: strategies.Case) -> None:
    """Law 1, for parts of one page that have other rows and units, in every way."""
    check_every_way(case)


def test_tensors_of_a_page_follow_each_other() -> None:
    """A page of 8 tokens, 2 heads of 3 elements: keys, 2 scales, values, at 0, 96 and 104."""
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
    """Return the tensors that an engine has: bfloat16 keys and values, float32 scales."""
    sizes = {"B": BLOCKS, "N": ROWS, "H": heads}
    shape = [sizes[each] for each in order]
    return {
        name: torch.randn(*shape, 1, dtype=torch.float32) if "scale" in name
        else torch.randn(*shape, SIZE).to(torch.bfloat16)
        for name in ("k", "k_scale", "v", "v_scale")
    }  # fmt: skip


def test_float32_scales_beside_bfloat16_keys_are_read_and_moved() -> None:
    """From real typed tensors at TP 2, rows first, into those of TP 1, heads first: each number."""
    torch = pytest.importorskip("torch")
    producer, consumer = engine("LBNHC", 2), engine("LBHNC", 1)
    held = {rank: tensors(torch, LOCAL, "BNH") for rank in producer.parallel.ranks}
    wanted = tensors(torch, 2 * LOCAL, "BHN")
    plan = kvspec.plan_transfer(producer, consumer)
    request = builders.request(11, [4, 1], [0, 5], cached_tokens=3)
    target = kvspec.RankCache.from_tensors(consumer, RankId(), {"l": wanted})
    sources = {
        rank: kvspec.RankCache.from_tensors(producer, rank, {"l": own})
        for rank, own in held.items()
    }
    assert None is kvspec.verify(plan, sources, {RankId(): target}, request)
    for source in sources.values():
        for start, stop, length in kvspec.build_table(plan, source, target).descriptors(request):
            ctypes.memmove(int(stop), int(start), int(length))
    for name, head, token in ((n, h, t) for n in wanted for h in range(4) for t in range(3, 11)):
        (mine, yours), row = ((4, 0), (1, 5))[token // ROWS], token % ROWS
        sent = held[RankId(tp=head // LOCAL)][name][mine, row, head % LOCAL]
        assert sent.tolist() == wanted[name][yours, head, row].tolist()


def test_a_scale_of_another_type_is_refused() -> None:
    """The part's own type counts: float16 scales are not the float32 ones that the engine names."""
    torch = pytest.importorskip("torch")
    own = tensors(torch, LOCAL, "BNH")
    wrong = own | {"v_scale": torch.zeros(BLOCKS, ROWS, LOCAL, 2, dtype=torch.float16)}
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.RankCache.from_tensors(engine("LBNHC", 2), RankId(), {"l": wrong})
    told = "tensors['l']['v_scale'].dtype='float16': expected float32, as the part has"
    assert f"{told}, or plain bytes" == str(caught.value)


def test_nvfp4_and_mxfp8_pages_by_hand() -> None:
    """NVFP4: a head of 128 is 64 bytes and 8 scales; MXFP8: 128 and 4. Keys and values alike."""
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


def test_scales_say_what_they_hold_for() -> None:
    """Engines whose scales hold for other elements do not fit; a default said aloud does."""
    of = {each: attrs.evolve(SCALED, elements_per_scale=each) for each in (None, SIZE, 2)}
    assert () == kvspec.mismatches(engine("LBNHC", 1, of[None]), engine("LBHNC", 2, of[SIZE]))
    found = kvspec.mismatches(engine("LBNHC", 1, of[None]), engine("LBHNC", 2, of[2]))
    assert ["l.elements_per_scale"] == [each.field for each in found]


def words(**fields: Any) -> str:
    """Return the refusal of `SCALED` with other *fields*."""
    with pytest.raises(kvspec.SpecError) as caught:
        attrs.evolve(SCALED, **fields)
    return str(caught.value)


def test_scales_that_cannot_be_are_refused() -> None:
    """A scale for a part of a head that does not divide it, of nothing, of packed content."""
    assert "elements_per_scale=3: expected a divisor of head_size=4" == words(elements_per_scale=3)
    wanted = "elements_per_scale=4: expected a divisor of head_size=4 and head_size_v=6"
    assert wanted == words(elements_per_scale=4, head_size_v=6)
    told = words(scale_dtype=None, elements_per_scale=2)
    assert "elements_per_scale=2: expected None if scale_dtype is None" == told
    told = words(scale_dtype=None, tokens_per_scale=2)
    assert "tokens_per_scale=2: expected 1 if scale_dtype is None" == told
    assert "expected a multiple of 3, a row of scales" in words(tokens_per_scale=3)
    told = words(state_content_bytes=9)
    wanted = "cannot be combined with state_content_bytes, which includes the scales"
    assert f"scale_dtype='float32': {wanted}" == told


PART = {"name": "p", "units": 4, "states": 1, "content_bytes": 6}


@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        ({"tensor": ""}, "p.tensor='': expected a non-empty str"),
        ({"tensor": 3}, "p.tensor=3: expected a non-empty str"),
        ({"whole": 1}, "p.whole=1: expected True or False"),
        (
            {"dtype": "float32"},
            "p.content_bytes=6: expected whole elements of float32, 4 bytes each",
        ),
        ({"dtype": "half-precision"}, "dtype='half-precision': expected one of "),
    ],
)
def test_every_field_of_a_part_is_checked(fields: dict[str, Any], wanted: str) -> None:
    """A part that cannot be is not."""
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.Part(**PART | fields)
    assert str(caught.value).startswith(wanted)


def test_states_made_by_hand_have_the_type_of_their_spec() -> None:
    """A part that names no dtype has its spec's; one that names one keeps it; they are compared."""
    parts = [
        kvspec.Part(name=name, units=2, states=1, content_bytes=4, tokens_per_state=0, dtype=own)
        for name, own in (("conv", None), ("ssm", None), ("gate", "int32"))
    ]
    spec = kvspec.MambaSpec(state_parts=parts, dtype="bfloat16", ssm_dtype="float32")
    assert ["bfloat16", "float32", "int32"] == [part.dtype for part in spec.parts]
    other = attrs.evolve(spec, state_parts=[*parts[:2], attrs.evolve(parts[2], dtype="float32")])
    found = kvspec.mismatches(engine("LBNHC", 1, spec), engine("LBNHC", 1, other))
    assert [("l.gate.dtype", "int32", "float32")] == [
        (m.field, m.producer, m.consumer) for m in found
    ]
    assert np.all([part.per_token is False for part in spec.parts])
