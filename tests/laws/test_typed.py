"""Tests that `from_tensors` reads typed tensors over the memory of `allocate`, in every layout.

The oracle makes the tensors, so the regions that are read can be compared with those allocated.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import builders
import numpy as np
import pytest
import special_cases
from builders import engine, request
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st
from typed_tensors import raw_pages, typed_tensors

import kvspec
from kvspec import RankId
from kvspec.adapters import vllm
from kvspec.testing import strategies
from kvspec.testing.carve import logical_views
from tests.support.refused import refusal

CHOICES = ("whole", "torch", "typed", "folded", "by group")
ENGINES = strategies.engine_pairs(largest=4).map(lambda pair: pair[0])


def places(cache: kvspec.RankCache) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return where every content lies. The stride of an axis of one does not matter."""
    return {
        (region.layer, region.part): (
            region.group, region.base, region.num_blocks, region.units, region.states,
            region.content_bytes,
            region.block_stride if region.num_blocks > 1 else 0,
            region.unit_stride if region.units > 1 else 0,
            region.state_stride if region.states > 1 else 0,
        )
        for region in cache.regions
    }  # fmt: skip


@st.composite
def reread_caches(draw: st.DrawFn) -> tuple[kvspec.RankCache, kvspec.RankCache, Counter[str]]:
    """Draw a rank's cache, the cache read from tensors over its bytes, and the choices made."""
    side = draw(ENGINES)
    rank = draw(st.sampled_from(side.parallel.ranks))
    blocks = draw(st.integers(1, 3)) + (side.null_block or 0)
    cache, storage = kvspec.allocate(side, rank, blocks)
    choices: Counter[str] = Counter()

    def choose(question: str) -> bool:
        answer = draw(st.booleans())
        choices[question] += answer
        return answer

    tensors, axes = typed_tensors(side, rank, storage, blocks, choose)
    for layer in side.homes:
        if side.stage_of[layer] == rank.pp:
            tensors.setdefault(layer, {})
    for region in cache.regions:
        choices[side.layout_of(side.group(region.group)) + side.group(region.group).name] += 1
    return cache, kvspec.RankCache.from_tensors(side, rank, tensors, axes), choices


@given(reread_caches())
def test_from_tensors_reads_the_regions_that_allocate_made(
    caches: tuple[kvspec.RankCache, kvspec.RankCache, Counter[str]],
) -> None:
    """The regions are equal and lie in the same memory, for all layouts, kinds and types."""
    allocated, reread, _ = caches
    assert places(allocated) == places(reread)
    for memory in reread.memory:
        assert any(
            held.address <= memory.address and memory.end <= held.end for held in allocated.memory
        )


@pytest.mark.uncovered
def test_reread_caches_contain_every_kind_of_tensor() -> None:
    """Tensors have several parts, are of torch, or have the types of their parts."""
    seen: Counter[str] = Counter()

    # Tensors that are whole are rare: 50 examples had between 2 and 39 of them.
    @given(reread_caches())
    @settings(max_examples=100, phases=[Phase.generate], database=None)
    def look(caches: tuple[kvspec.RankCache, kvspec.RankCache, Counter[str]]) -> None:
        seen.update(caches[2])

    look()
    assert all(seen[question] > 10 for question in CHOICES)


KINDS_OF_STATES = (*special_cases.STATES, "replicated state")
STATES = strategies.engine_pairs(KINDS_OF_STATES, largest=4).map(lambda pair: pair[0])


@given(STATES, st.data())
def test_rank_cache_of_raw_state_pages_equals_the_allocated_cache(
    side: kvspec.EngineSpec, data: st.DataObject
) -> None:
    """An engine such as vLLM passes states as bytes of whole pages."""
    rank = data.draw(st.sampled_from(side.parallel.ranks))
    blocks = data.draw(st.integers(1, 3)) + (side.null_block or 0)
    cache, storage = kvspec.allocate(side, rank, blocks)
    raw = raw_pages(side, rank, storage, blocks)
    layers = [layer for layer in side.homes if side.stage_of[layer] == rank.pp]
    assume(set(layers) == set(raw))
    reread = vllm.rank_cache(side, rank, raw)
    assert places(cache) == places(reread)


STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=2, state_size=3, conv_kernel=4, dtype="bfloat16",
    ssm_dtype="float32",
)  # fmt: skip
UNEQUAL = builders.gqa(2, block_size=3, head_size_v=2)
UNIFORM = kvspec.UniformTypeKVCacheSpecs(
    specs={
        layer: builders.gqa(2, block_size=3, head_size=size) for layer, size in (("a", 4), ("b", 3))
    }
)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (STATE, "LHBNC"), (STATE, "HBLNC"), (STATE, "NHLBC"), (STATE, "LNBHC"),
        (UNEQUAL, "LNBHC"), (UNEQUAL, "HLBNC"), (UNEQUAL, "LNKBHC"), (UNEQUAL, "NHBLC"),
        (UNIFORM, "NLBHC"), (UNIFORM, "BNLHC"), (UNIFORM, "NLKBHC"), (UNIFORM, "LBNHC"),
    ],
)  # fmt: skip
def test_from_tensors_reads_views_of_parts_in_unusual_layouts(
    spec: kvspec.LayerSpec, layout: str
) -> None:
    """States have H or N outside B, or parts of unequal sizes have rows outside of blocks."""
    torch = pytest.importorskip("torch")
    side = engine(spec, layers=("a", "b"), layout=layout)
    cache, storage = kvspec.allocate(side, RankId(), 5)
    tensors: dict[str, dict[str, Any]] = {}
    for (_, layer, part), view in logical_views(side, RankId(), storage, 5).items():
        tensors.setdefault(layer, {})[part] = torch.from_numpy(view)
    reread = kvspec.RankCache.from_tensors(side, RankId(), tensors, "BHNC")
    assert places(cache) == places(reread)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLNHC"])
@pytest.mark.parametrize(("axes", "order"), [("BHNC", (0, 1, 2, 3)), ("BNHC", (0, 2, 1, 3))])
def test_from_tensors_reads_states_with_the_axes_of_the_caller(
    layout: str, axes: str, order: tuple[int, ...]
) -> None:
    side = engine(STATE, layers=("a", "b"), layout=layout)
    cache, storage = kvspec.allocate(side, RankId(), 5)
    tensors: dict[str, dict[str, Any]] = {}
    for (_, layer, part), view in logical_views(side, RankId(), storage, 5).items():
        tensors.setdefault(layer, {})[part] = view.transpose(order)
    assert places(cache) == places(kvspec.RankCache.from_tensors(side, RankId(), tensors, axes))


def test_from_tensors_registers_the_span_of_strided_views_once() -> None:
    """Two arrays with strides interleave in one buffer of bytes."""
    latent = kvspec.MLAAttentionSpec(block_size=2, head_size=4, dtype="uint8")
    side = engine(latent, layers=("a", "b"))
    buffer = bytearray(200)
    first_view, second_view = (
        np.ndarray((5, 1, 2, 4), np.uint8, buffer, first, (32, 16, 8, 1)) for first in (8, 24)
    )
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    cache = kvspec.RankCache.from_tensors(
        side, RankId(), {"a": first_view, "b": second_view}, "BHNC"
    )
    assert (kvspec.Memory(start + 8, 4 * 32 + 8 + 4 + 16),) == cache.memory
    assert [start + 8, start + 24] == [region.base for region in cache.regions]
    table = kvspec.build_table(kvspec.plan_transfer(side, side), cache, cache)
    assert 2 * 2 * 2 == len(table.descriptors(request(4, [0, 4], [1, 2])))


EQUAL = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=8, dtype="bfloat16")


def strange(kind: str) -> Any:
    """Return a tensor of torch that has no memory of its own."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 3, 4, 16, dtype=torch.bfloat16)
    if kind == "FakeTensor":
        from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: PLC0415

        with FakeTensorMode():
            return torch.zeros(6, 3, 4, 16, dtype=torch.bfloat16)
    if kind == "nested":
        return torch.nested.nested_tensor([torch.zeros(3, 4, 16), torch.zeros(2, 4, 16)])
    if kind == "jagged":
        rows = [torch.zeros(3, 64), torch.zeros(2, 64)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    return good.to("meta") if kind == "meta" else good.float().to_sparse()


ROWS = attrs.evolve(EQUAL, block_size=3)


def refused(tensor: Any) -> tuple[str, object]:
    """Return field and value of the error that *tensor* raises."""
    side = engine(ROWS, layout="LBNHC")
    error = refusal(lambda: kvspec.RankCache.from_tensors(side, RankId(), {"l": tensor}, "BNHC"))
    return error.field, error.value


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "attribute", "value"),
    [
        ("FakeTensor", "", "FakeTensor"), ("nested", ".layout", "nested"),
        ("jagged", "", "NestedTensor"), ("meta", ".device", "meta"),
        ("sparse", ".layout", "torch.sparse_coo"),
    ],
)  # fmt: skip
def test_from_tensors_rejects_tensors_without_dense_memory(
    kind: str, attribute: str, value: str
) -> None:
    """Such a tensor has no address to register."""
    assert (f"tensors['l']['kv']{attribute}", value) == refused(strange(kind))


def test_from_tensors_rejects_tensors_inside_vmap() -> None:
    """Inside `torch.vmap` a tensor is a batch of others."""
    torch = pytest.importorskip("torch")
    refusals: list[tuple[str, object]] = []

    def look(tensor: Any) -> Any:
        refusals.append(refused(tensor))
        return tensor

    torch.vmap(look)(torch.zeros(2, 6, 3, 4, 16, dtype=torch.bfloat16))
    assert refusals[0][0].startswith("tensors['l']['kv']")


def test_from_tensors_rejects_tensors_without_dimensions() -> None:
    """A number of numpy or torch has an empty shape."""
    torch = pytest.importorskip("torch")
    expected = "tensors['l']['kv'].shape", ()
    assert [expected] * 2 == [refused(number) for number in (np.array(3), torch.tensor(3))]


@pytest.mark.parametrize("value", [np.array(3), range(10**20), range(10**9)])
def test_descriptions_reject_invalid_sequences(value: Any) -> None:
    """An array without dimensions and a huge range raise SpecError at once."""
    spec = kvspec.MLAAttentionSpec(block_size=1, head_size=1, dtype="uint8")
    calls = (
        lambda: kvspec.KVCacheGroup(name="g", layers=value, spec=spec),
        lambda: kvspec.KVCacheGroup(name="g", layers="l", spec=spec, excluded=value),
        lambda: kvspec.EngineSpec(groups=value),
        lambda: kvspec.ParallelConfig(stages=value),
        lambda: kvspec.MambaSpec(state_parts=value),
    )
    for call in calls:
        with pytest.raises(kvspec.SpecError):
            call()
