"""What `allocate` makes, `from_tensors` takes: typed tensors over the same bytes, in every layout.

The tensors are made by the oracle's arithmetic, of every kind and layout, so that what is read of
them is held against what was laid out.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from builders import engine, request
from hypothesis import Phase, assume, given, settings
from hypothesis import strategies as st

import kvspec
from kvspec import RankId
from kvspec.adapters import vllm
from kvspec.testing import strategies
from kvspec.testing.carve import logical_views
from kvspec.testing.typed import raw_pages, typed_tensors

QUESTIONS = ("whole", "torch", "typed", "folded", "by group")
ENGINES = strategies.engine_pairs(largest=4).map(lambda pair: pair[0])


def places(cache: kvspec.RankCache) -> dict[tuple[str, str], tuple[Any, ...]]:
    """Return where every content lies; a stride along which there is one counts for nothing."""
    return {
        (each.layer, each.part): (
            each.group, each.base, each.num_blocks, each.units, each.states, each.content_bytes,
            each.block_stride if each.num_blocks > 1 else 0,
            each.unit_stride if each.units > 1 else 0,
            each.state_stride if each.states > 1 else 0,
        )
        for each in cache.regions
    }  # fmt: skip


@st.composite
def read(draw: st.DrawFn) -> tuple[kvspec.RankCache, kvspec.RankCache, Counter[str]]:
    """Draw a rank's cache, the same read from typed tensors over its bytes, and what these are."""
    side = draw(ENGINES)
    rank = draw(st.sampled_from(side.parallel.ranks))
    blocks = draw(st.integers(1, 3)) + (side.null_block or 0)
    cache, storage = kvspec.allocate(side, rank, blocks)
    seen: Counter[str] = Counter()

    def choose(question: str) -> bool:
        answer = draw(st.booleans())
        seen[question] += answer
        return answer

    tensors, axes = typed_tensors(side, rank, storage, blocks, choose)
    for layer in side.homes:
        if side.stage_of[layer] == rank.pp:
            tensors.setdefault(layer, {})
    for each in cache.regions:
        seen[side.layout_of(side.group(each.group)) + side.group(each.group).name] += 1
    return cache, kvspec.RankCache.from_tensors(side, rank, tensors, axes), seen


@given(read())
def test_what_is_allocated_is_read_back(
    found: tuple[kvspec.RankCache, kvspec.RankCache, Counter[str]],
) -> None:
    """Equal regions, in the same memory, whatever the layout, the kinds and the types."""
    allocated, again, _ = found
    assert places(allocated) == places(again)
    for memory in again.memory:
        assert any(
            each.address <= memory.address and memory.end <= each.end for each in allocated.memory
        )


def test_every_kind_of_tensor_is_drawn() -> None:
    """Tensors of several parts, of torch, of the parts' own types; axes in one, or by group."""
    seen: Counter[str] = Counter()

    @given(read())
    @settings(max_examples=50, phases=[Phase.generate], database=None)
    def look(found: tuple[kvspec.RankCache, kvspec.RankCache, Counter[str]]) -> None:
        seen.update(found[2])

    look()
    assert all(seen[question] > 10 for question in QUESTIONS)


KINDS_OF_STATES = (*strategies.STATES, "replicated state")
STATES = strategies.engine_pairs(KINDS_OF_STATES, largest=4).map(lambda pair: pair[0])


@given(STATES, st.data())
def test_raw_pages_of_states_are_cut_where_they_were_laid_out(
    side: kvspec.EngineSpec, data: st.DataObject
) -> None:
    """What vLLM hands over, bytes of whole pages, becomes the regions that `allocate` made."""
    rank = data.draw(st.sampled_from(side.parallel.ranks))
    blocks = data.draw(st.integers(1, 3)) + (side.null_block or 0)
    cache, storage = kvspec.allocate(side, rank, blocks)
    raw = raw_pages(side, rank, storage, blocks)
    held = [layer for layer in side.homes if side.stage_of[layer] == rank.pp]
    assume(set(held) == set(raw))
    again = vllm.rank_cache(side, rank, raw)
    assert places(cache) == places(again)


STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=2, state_size=3, conv_kernel=4, dtype="bfloat16",
    ssm_dtype="float32",
)  # fmt: skip
UNLIKE = builders.gqa(2, block_size=3, head_size_v=2)
UNIFORM = kvspec.UniformTypeKVCacheSpecs(
    specs={
        layer: builders.gqa(2, block_size=3, head_size=size) for layer, size in (("a", 4), ("b", 3))
    }
)


@pytest.mark.parametrize(
    ("spec", "layout"),
    [
        (STATE, "LHBNC"), (STATE, "HBLNC"), (STATE, "NHLBC"), (STATE, "LNBHC"),
        (UNLIKE, "LNBHC"), (UNLIKE, "HLBNC"), (UNLIKE, "LNKBHC"), (UNLIKE, "NHBLC"),
        (UNIFORM, "NLBHC"), (UNIFORM, "BNLHC"), (UNIFORM, "NLKBHC"), (UNIFORM, "LBNHC"),
    ],
)  # fmt: skip
def test_layouts_that_were_refused_are_read(spec: kvspec.LayerSpec, layout: str) -> None:
    """States with H or N outside B; unlike sizes with rows outside of blocks: each part a view."""
    torch = pytest.importorskip("torch")
    side = engine(spec, layers=("a", "b"), layout=layout)
    cache, storage = kvspec.allocate(side, RankId(), 5)
    given: dict[str, dict[str, Any]] = {}
    for (_, layer, part), view in logical_views(side, RankId(), storage, 5).items():
        given.setdefault(layer, {})[part] = torch.from_numpy(view)
    again = kvspec.RankCache.from_tensors(side, RankId(), given, "BHNC")
    assert places(cache) == places(again)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC", "LHBNC", "BLNHC"])
def test_conv_states_stand_as_the_layout_says(layout: str) -> None:
    """Unless axes are said, a state's tensors have blocks first, then units and rows as named."""
    side = engine(STATE, layers=("a", "b"), layout=layout)
    cache, storage = kvspec.allocate(side, RankId(), 5)
    order = (0, 1, 2, 3) if layout.index("H") < layout.index("N") else (0, 2, 1, 3)
    given: dict[str, dict[str, Any]] = {}
    for (_, layer, part), view in logical_views(side, RankId(), storage, 5).items():
        given.setdefault(layer, {})[part] = view.transpose(order)
    assert places(cache) == places(kvspec.RankCache.from_tensors(side, RankId(), given))


def test_a_view_over_a_padded_buffer_is_inside_its_memory() -> None:
    """Arrays with strides of their own over plain bytes: what they span is registered, once."""
    latent = kvspec.MLAAttentionSpec(block_size=2, head_size=4, dtype="uint8")
    side = engine(latent, layers=("a", "b"))
    buffer = bytearray(200)
    one, other = (
        np.ndarray((5, 1, 2, 4), np.uint8, buffer, first, (32, 16, 8, 1)) for first in (8, 24)
    )
    start = np.frombuffer(buffer, np.uint8).ctypes.data
    cache = kvspec.RankCache.from_tensors(side, RankId(), {"a": one, "b": other})
    assert (kvspec.Memory(start + 8, 4 * 32 + 8 + 4 + 16),) == cache.memory
    assert [start + 8, start + 24] == [each.base for each in cache.regions]
    table = kvspec.build_table(kvspec.plan_transfer(side, side), cache, cache)
    assert 2 * 2 * 2 == len(table.descriptors(request(4, [0, 4], [1, 2])))


EQUAL = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=8, dtype="bfloat16")
READINGS = [
    ("LBHNC", (6, 4, 4, 16), "'BHNC' or 'BNHC'"),
    ("LBNHC", (6, 4, 4, 16), "'BNHC' or 'BHNC'"),
    ("LBNHC", (1, 4, 4, 16), "'BNHC' or 'BHNC'"),
    ("LHBNC", (4, 4, 4, 16), "'HBNC' or 'BHNC'"),
    ("LKBNHC", (2, 6, 4, 4, 8), None),
    ("LKBNHC", (2, 2, 4, 4, 8), "'KBNHC' or 'BKNHC'"),
    ("LBKNHC", (6, 2, 4, 4, 8), "'BKNHC' or 'BKHNC'"),
]


@pytest.mark.parametrize(("layout", "shape", "told"), READINGS)
def test_two_readings_of_one_shape_are_refused_unless_said(
    layout: str, shape: tuple[int, ...], told: str | None
) -> None:
    """As many heads as rows: NHD read as HND would pass, so the axes have to be said."""
    side = engine(EQUAL, layout=layout)
    tensor = np.zeros(shape, np.uint16)
    said = kvspec.RankCache.from_tensors(side, RankId(), {"l": tensor}, layout.replace("L", ""))
    assert 2 == len(said.regions)
    if told is None:
        assert said == kvspec.RankCache.from_tensors(side, RankId(), {"l": tensor})
        return
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.RankCache.from_tensors(side, RankId(), {"l": tensor})
    wanted = f"axes=None: expected {told}: both fit tensors['l']['kv'].shape={shape}"
    assert wanted == str(caught.value)


def test_rows_and_heads_that_differ_need_no_axes() -> None:
    """One head, one row, or unequal numbers have one reading."""
    for fields in ({"block_size": 3}, {"total_num_kv_heads": 1}, {"block_size": 1}):
        spec: Any = attrs.evolve(EQUAL, **fields)
        side = engine(spec, layout="LBNHC")
        shape = (6, spec.block_size, spec.total_num_kv_heads, 16)
        cache = kvspec.RankCache.from_tensors(side, RankId(), {"l": np.zeros(shape, np.uint16)})
        assert 2 == len(cache.regions)


def strange(kind: str) -> Any:
    """Return a tensor of torch that has no bytes of its own."""
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


def refused(tensor: Any) -> str:
    """Return why *tensor* is not read."""
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.RankCache.from_tensors(engine(ROWS, layout="LBNHC"), RankId(), {"l": tensor})
    return str(caught.value)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("kind", "told"),
    [
        ("FakeTensor", "='FakeTensor'"), ("nested", ".layout='nested'"),
        ("jagged", "='NestedTensor'"), ("meta", ".device='meta'"),
        ("sparse", ".layout='torch.sparse_coo'"),
    ],
)  # fmt: skip
def test_a_tensor_without_bytes_of_its_own_is_refused(kind: str, told: str) -> None:
    """Whatever stands for other tensors, or for none, has no address to register."""
    wanted = f"tensors['l']['kv']{told}: expected a dense tensor on a CPU or a GPU"
    assert wanted == refused(strange(kind))


def test_a_tensor_under_vmap_is_refused() -> None:
    """Inside `torch.vmap` a tensor is a batch of others."""
    torch = pytest.importorskip("torch")
    found: list[str] = []

    def look(tensor: Any) -> Any:
        found.append(refused(tensor))
        return tensor

    torch.vmap(look)(torch.zeros(2, 6, 3, 4, 16, dtype=torch.bfloat16))
    assert found[0].endswith("expected a dense tensor on a CPU or a GPU")


def test_an_array_without_dimensions_is_no_cache() -> None:
    """A number of numpy or torch has a shape, an empty one."""
    torch = pytest.importorskip("torch")
    wanted = "tensors['l']['kv'].shape=(): expected 4 dimensions, BNHC"
    assert [wanted] * 2 == [refused(each) for each in (np.array(3), torch.tensor(3))]


@pytest.mark.parametrize("value", [np.array(3), range(10**20), range(10**9)])
def test_what_is_no_sequence_of_a_description_is_refused(value: Any) -> None:
    """An array of no dimension, a range without an end in sight: our error, at once."""
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
