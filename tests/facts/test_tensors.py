"""Tests that `RankCache.from_tensors` reads the tensors of engines as regions.

The tests write each element with the indexing of the engine, [block, plane, head, row, content],
and read it at the address of its region. The regions equal those of `allocate` for the same
layout.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from refused import refusal

import kvspec
from kvspec import RankId

BLOCKS, ROWS, HEADS, SIZE = 5, 4, 3, 8
LAYERS = ("l", "m")
ELEMENT = np.uint16  # numpy has no bfloat16.
GQA = builders.gqa(2 * HEADS, block_size=ROWS, head_size=SIZE)
LATENT = kvspec.MLAAttentionSpec(block_size=ROWS, head_size=576, dtype="bfloat16")
STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=2, state_size=3, conv_kernel=4, dtype="bfloat16",
    ssm_dtype="float32",
)  # fmt: skip
# One of two ranks has 4 channels of x (two heads of 2), and 3 of B and of C (one group of 3).
X, BC = 4, 3
Tensors = dict[str, Any]


def engine(layout: str, spec: kvspec.LayerSpec = GQA) -> kvspec.EngineSpec:
    """Return an engine of two TP ranks and two layers."""
    return builders.engine(spec, layers=LAYERS, tp=2, layout=layout)


RANK = RankId(tp=1)


def shifts(cache: kvspec.RankCache) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return the fields of each region, with offsets relative to the first region of its layer."""
    first = {r.layer: min(x.base for x in cache.regions if x.layer == r.layer)
             for r in cache.regions}  # fmt: skip
    return {
        (r.layer, r.part): (
            r.base - first[r.layer], r.num_blocks, r.block_stride,
            r.unit_stride if r.units > 1 else 0, r.state_stride if r.states > 1 else 0,
            r.content_bytes, r.units, r.states,
        )
        for r in cache.regions
    }  # fmt: skip


def places(cache: kvspec.RankCache) -> Iterator[tuple[kvspec.Region, int, int, int]]:
    """Yield every (region, block, unit, row) of a cache."""
    for region in cache.regions:
        for block, unit, row in np.ndindex(region.num_blocks, region.units, region.states):
            yield region, block, unit, row


def check_bytes(cache: kvspec.RankCache, tensors: Tensors, locate: Any) -> None:
    """Write numbers into the tensors, and read them at the addresses of the regions.

    Args:
        cache: The cache that was read from *tensors*.
        tensors: The tensors of each layer.
        locate: Takes the tensors of a layer, a part, a block, a unit and a row. Returns a flat
            view of the content at this place.
    """
    number = 0
    for region, block, unit, row in places(cache):
        content = locate(tensors[region.layer], region.part, block, unit, row)
        content[...] = np.arange(number, number + content.size).reshape(content.shape) % 65521
        number += int(content.size)
    assert number > 0
    number = 0
    for region, block, unit, row in places(cache):
        stored = ctypes.string_at(region.address(block, unit, row), region.content_bytes)
        content = locate(tensors[region.layer], region.part, block, unit, row)
        dtype = np.float32 if region.part == "ssm" else ELEMENT
        values = np.frombuffer(stored, dtype)
        assert [v % 65521 for v in range(number, number + values.size)] == values.tolist()
        assert content.size == values.size
        number += values.size


def planes(order: str) -> Any:
    """Return a function that locates a content in a tensor with K planes and axes *order*."""

    def locate(tensor: Any, part: str, block: int, unit: int, row: int) -> Any:
        at = {"K": "kv".index(part), "B": block, "H": unit, "N": row}
        return tensor[tuple(at[letter] for letter in order)]

    return locate


def packed(order: str) -> Any:
    """Return a function that locates a content in a tensor with k and v packed, axes *order*."""

    def locate(tensor: Any, part: str, block: int, unit: int, row: int) -> Any:
        at = {"B": block, "H": unit, "N": row}
        content = tensor[tuple(at[letter] for letter in order)]
        return content[:SIZE] if part == "k" else content[SIZE:]

    return locate


def separate(tensors: Any, part: str, block: int, unit: int, row: int) -> Any:
    """Locate a content in SGLang's buffers [blocks, rows, heads, size], one for k and one for v."""
    return tensors[part][block, row, unit]


def latent(tensor: Any, _part: str, block: int, _unit: int, row: int) -> Any:
    """Locate a content in [blocks, rows, 576]."""
    return tensor[block, row]


SHAPES: list[tuple[str, str, str, tuple[int, ...], tuple[int, ...] | None, Any]] = [
    # Name, layout, axes, allocated shape, permutation of the view, function to locate a content.
    ("FlashAttention", "LKBNHC", "KBNHC", (2, BLOCKS, ROWS, HEADS, SIZE), None, planes("KBNH")),
    ("FlashInfer NHD", "LBKNHC", "BKNHC", (BLOCKS, 2, ROWS, HEADS, SIZE), None, planes("BKNH")),
    ("FlashInfer HND", "LBKHNC", "BKHNC", (BLOCKS, 2, HEADS, ROWS, SIZE), None, planes("BKHN")),
    ("FlashInfer HND as NHD", "LBKHNC", "BKNHC", (BLOCKS, 2, HEADS, ROWS, SIZE), (0, 1, 3, 2, 4),
     planes("BKNH")),
    ("vLLM's view of HND", "LBHNC", "BHNC", (BLOCKS, HEADS, ROWS, 2 * SIZE), None, packed("BHN")),
    ("vLLM's view of NHD", "LBNHC", "BHNC", (BLOCKS, ROWS, HEADS, 2 * SIZE), (0, 2, 1, 3),
     packed("BHN")),
    ("packed NHD", "NHD", "BNHC", (BLOCKS, ROWS, HEADS, 2 * SIZE), None, packed("BNH")),
    ("packed HND", "HND", "BHNC", (BLOCKS, HEADS, ROWS, 2 * SIZE), None, packed("BHN")),
]  # fmt: skip


def make(shape: tuple[int, ...], library: str, dtype: Any = ELEMENT) -> tuple[Any, Any]:
    """Return a tensor of zeros, and a numpy view of it."""
    if library == "numpy":
        array = np.zeros(shape, dtype)
        return array, array
    torch = pytest.importorskip("torch")
    name = {ELEMENT: "bfloat16", np.float32: "float32"}[dtype]
    tensor = torch.zeros(shape, dtype=getattr(torch, name))
    raw = torch.int16 if dtype == ELEMENT else torch.float32
    return tensor, tensor.view(raw).numpy().view(dtype)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("name", "layout", "axes", "shape", "permuted", "locate"), SHAPES, ids=[s[0] for s in SHAPES]
)
def test_regions_of_tensor_equal_allocated_regions_of_layout(
    name: str,
    layout: str,
    axes: str,
    shape: tuple[int, ...],
    permuted: tuple[int, ...] | None,
    locate: Any,
    library: str,
) -> None:
    """Each layer has one tensor, and the cache registers one memory for it."""
    tensors, views = {}, {}
    for layer in LAYERS:
        tensor, view = make(shape, library)
        if permuted is not None:
            tensor = tensor.transpose(permuted) if library == "numpy" else tensor.permute(permuted)
            view = view.transpose(permuted)
        tensors[layer], views[layer] = tensor, view
    described = engine(layout)
    cache = kvspec.RankCache.from_tensors(described, RANK, tensors, axes)
    allocated, _ = kvspec.allocate(described, RANK, BLOCKS)
    assert shifts(allocated) == shifts(cache)
    assert {("DRAM", 0, views[layer].nbytes) for layer in LAYERS} == {
        (m.memory_type, m.device, m.length) for m in cache.memory
    }
    assert {views[layer].ctypes.data for layer in LAYERS} == {m.address for m in cache.memory}
    check_bytes(cache, views, locate)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["LKBNHC", "LBNHC"])
def test_from_tensors_reads_separate_buffers_of_k_and_v(layout: str, library: str) -> None:
    """SGLang's buffers equal the planes of LKBNHC. A layout without K may have them, too."""
    pairs = {x: {p: make((BLOCKS, ROWS, HEADS, SIZE), library) for p in "kv"} for x in LAYERS}
    tensors = {x: {p: tensor for p, (tensor, _) in pair.items()} for x, pair in pairs.items()}
    views = {x: {p: view for p, (_, view) in pair.items()} for x, pair in pairs.items()}
    cache = kvspec.RankCache.from_tensors(engine(layout), RANK, tensors, "BNHC")
    assert 4 == len(cache.memory)
    planes_, _ = kvspec.allocate(engine("LKBNHC"), RANK, BLOCKS)
    assert [x[1:] for x in shifts(planes_).values()] == [x[1:] for x in shifts(cache).values()]
    check_bytes(cache, views, separate)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LKBNHC"])
def test_from_tensors_reads_latent_without_axis_of_heads(layout: str, library: str) -> None:
    """MLA's [blocks, rows, 576] has one unit, wherever the layout has the letter H."""
    pairs = {layer: make((BLOCKS, ROWS, 576), library) for layer in LAYERS}
    described = engine(layout, LATENT)
    tensors = {layer: tensor for layer, (tensor, _) in pairs.items()}
    cache = kvspec.RankCache.from_tensors(described, RANK, tensors, "BNC")
    allocated, _ = kvspec.allocate(described, RANK, BLOCKS)
    assert shifts(allocated) == shifts(cache)
    check_bytes(cache, {layer: view for layer, (_, view) in pairs.items()}, latent)


def state(order: str) -> Any:
    """Return a function that locates a content in ssm, or in conv [blocks, ...] with *order*."""
    first = {"conv_x": 0, "conv_b": X, "conv_c": X + BC}

    def locate(tensors: Any, part: str, block: int, unit: int, row: int) -> Any:
        if part == "ssm":
            return tensors["ssm"][block, unit]
        at = {"H": first[part] + unit, "N": row}
        return tensors["conv"][(block, *(slice(at[x], at[x] + 1) for x in order))]

    return locate


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize(
    ("layout", "order", "shape"),
    [("LBHNC", "HN", (BLOCKS, X + 2 * BC, 3)), ("LBNHC", "NH", (BLOCKS, 3, X + 2 * BC))],
    ids=["DS", "SD"],
)
def test_from_tensors_reads_state_from_two_tensors(
    layout: str, order: str, shape: tuple[int, ...], library: str
) -> None:
    """The conv tensor of Mamba2 contains x, B and C, in the order DS or SD."""
    pairs = {
        x: {"conv": make(shape, library), "ssm": make((BLOCKS, 2, 2, 3), library, np.float32)}
        for x in LAYERS
    }
    tensors = {x: {n: tensor for n, (tensor, _) in both.items()} for x, both in pairs.items()}
    views = {x: {n: view for n, (_, view) in both.items()} for x, both in pairs.items()}
    axes = {"conv": f"B{order}", "ssm": "BHCC"}
    cache = kvspec.RankCache.from_tensors(engine(layout, STATE), RANK, tensors, axes)
    allocated_cache, _ = kvspec.allocate(engine(layout, STATE), RANK, BLOCKS)
    allocated, read = shifts(allocated_cache), shifts(cache)
    # The offset and the block stride differ, because `allocate` stores conv and ssm in one page.
    assert {k: v[3:] for k, v in allocated.items()} == {k: v[3:] for k, v in read.items()}
    conv = [("l", f"conv_{part}") for part in "xbc"]
    assert [allocated[part][0] for part in conv] == [
        read[part][0] - read[conv[0]][0] for part in conv
    ]
    assert 4 == len(cache.memory)
    check_bytes(cache, views, state(order))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_state_tensors_in_one_page_equal_allocated_page(library: str) -> None:
    """Conv and ssm are views of one buffer, in which each block has one page, as in vLLM."""
    described = engine("LBHNC", STATE)
    page = 3 * (X + 2 * BC) * 2 + 2 * 2 * 3 * 4
    tensors: Tensors = {}
    for layer in LAYERS:
        tensor, _ = make((BLOCKS * page // 2,), library)
        if library == "torch":
            torch = pytest.importorskip("torch")
            conv = tensor.as_strided((BLOCKS, X + 2 * BC, 3), (page // 2, 3, 1))
            ssm = tensor.view(torch.float32).as_strided(
                (BLOCKS, 2, 2, 3), (page // 4, 6, 3, 1), (X + 2 * BC) * 3 // 2
            )
        else:
            conv = np.ndarray((BLOCKS, X + 2 * BC, 3), ELEMENT, tensor.data, 0, (page, 6, 2))
            ssm = np.ndarray(
                (BLOCKS, 2, 2, 3), np.float32, tensor.data, (X + 2 * BC) * 6, (page, 24, 12, 4)
            )
        tensors[layer] = {"conv": conv, "ssm": ssm}
    axes = {"conv": "BHN", "ssm": "BHCC"}
    cache = kvspec.RankCache.from_tensors(described, RANK, tensors, axes)
    allocated, _ = kvspec.allocate(described, RANK, BLOCKS)
    assert shifts(allocated) == shifts(cache)
    assert 2 == len(cache.memory)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_pool_of_all_layers_is_registered_once(library: str) -> None:
    """Each layer has a view of TensorRT-LLM's pool [blocks, layers, 2, heads, rows, size]."""
    pool, view = make((BLOCKS, len(LAYERS), 2, HEADS, ROWS, SIZE), library)
    described = engine("BLKHNC")
    tensors = {layer: pool[:, i] for i, layer in enumerate(LAYERS)}
    cache = kvspec.RankCache.from_tensors(described, RANK, tensors, "BKHNC")
    assert (kvspec.Memory(view.ctypes.data, view.nbytes),) == cache.memory
    allocated, storage = kvspec.allocate(described, RANK, BLOCKS)
    assert storage["g"].nbytes == view.nbytes
    bases = [[r.base - c.memory[0].address for r in c.regions] for c in (allocated, cache)]
    assert bases[0] == bases[1]
    assert shifts(allocated) == shifts(cache)
    views = {layer: view[:, i] for i, layer in enumerate(LAYERS)}
    check_bytes(cache, views, planes("BKHN"))


def test_from_tensors_reads_slice_of_pool_with_padded_pages() -> None:
    """The cache registers the pool, but its regions contain only the slice."""
    pool = np.zeros((2 * BLOCKS, ROWS + 1, HEADS, 2 * SIZE), ELEMENT)
    part = pool[::2, :ROWS]
    cache = kvspec.RankCache.from_tensors(
        engine("LBNHC"), RANK, {"l": part, "m": pool[1::2, :ROWS]}, "BNHC"
    )
    assert (kvspec.Memory(pool.ctypes.data, pool.nbytes),) == cache.memory
    assert {2 * (ROWS + 1) * HEADS * 2 * SIZE * 2} == {r.block_stride for r in cache.regions}
    check_bytes(cache, {"l": part, "m": pool[1::2, :ROWS]}, packed("BNH"))


def test_from_tensors_registers_memory_behind_view_of_as_strided() -> None:
    """The memory of a view is the memory of its base array."""
    pool = np.zeros(BLOCKS * 1024, ELEMENT)
    view = np.lib.stride_tricks.as_strided(
        pool, (BLOCKS, ROWS, HEADS, 2 * SIZE), (2048, HEADS * 4 * SIZE, 4 * SIZE, 2)
    )
    tensors = {"l": view, "m": np.zeros(view.shape, ELEMENT)}
    cache = kvspec.RankCache.from_tensors(engine("LBNHC"), RANK, tensors, "BNHC")
    assert kvspec.Memory(pool.ctypes.data, pool.nbytes) == cache.memory[0]


def test_transfer_between_tensors_of_two_engines_copies_each_row() -> None:
    """FlashAttention's tensors at TP 2 move to FlashInfer's HND at TP 1."""
    producer, consumer = engine("LKBNHC"), engine("LBKHNC")
    consumer = kvspec.EngineSpec(groups=consumer.groups, layout=consumer.layout)
    random = np.random.default_rng(7)
    ours = {
        rank: {
            x: random.integers(0, 2**16, (2, BLOCKS, ROWS, HEADS, SIZE), ELEMENT) for x in LAYERS
        }
        for rank in producer.parallel.ranks
    }
    theirs = {x: np.zeros((BLOCKS, 2, 2 * HEADS, ROWS, SIZE), ELEMENT) for x in LAYERS}
    plan = kvspec.plan_transfer(producer, consumer)
    request = builders.request(7, (4, 2), (0, 3))
    target = kvspec.RankCache.from_tensors(consumer, RankId(), theirs, "BKHNC")
    for rank, tensors in ours.items():
        source = kvspec.RankCache.from_tensors(producer, rank, tensors, "KBNHC")
        for start, stop, length in kvspec.build_table(plan, source, target).descriptors(request):
            ctypes.memmove(int(stop), int(start), int(length))
    for layer, plane, head, token in np.ndindex(2, 2, 2 * HEADS, 7):
        rank, local = divmod(head, HEADS)
        (mine, yours), row = ((4, 0), (2, 3))[token // ROWS], token % ROWS
        sent = ours[RankId(tp=rank)][LAYERS[layer]][plane, mine, row, local]
        assert sent.tolist() == theirs[LAYERS[layer]][yours, plane, head, row].tolist()
    untouched = np.delete(theirs["l"], (0, 3), axis=0)
    assert not untouched.any()


def test_from_tensors_rejects_elements_of_another_float_type() -> None:
    """The same bytes would mean other numbers. Elements of an integer type count as plain bytes."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    engine = kvspec.EngineSpec(groups=(group,))
    half = np.zeros((6, 1, 4, 8), np.float16)
    rank = kvspec.RankId()
    error = refusal(lambda: kvspec.RankCache.from_tensors(engine, rank, {"l": half}, "BHNC"))
    assert ("tensors['l']['kv'].dtype", "float16") == (error.field, error.value)
    assert "bfloat16" in error.expected
    cache = kvspec.RankCache.from_tensors(engine, rank, {"l": half.view(np.uint16)}, "BHNC")
    assert 1 == len(cache.regions)


def test_engines_with_layout_and_its_alias_are_equal() -> None:
    """NHD is the alias of LBNHC in vLLM."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    assert kvspec.EngineSpec(groups=(group,), layout="NHD") == kvspec.EngineSpec(
        groups=(group,), layout="LBNHC"
    )


TWO_GROUPS = [
    kvspec.KVCacheGroup(name="full", layers=["l"], spec=GQA),
    kvspec.KVCacheGroup(name="latent", layers=["m"], spec=LATENT, layout="LBHNC"),
]


def read_two_groups(
    axes: Any, latents: tuple[int, ...] = (BLOCKS, 1, ROWS, 576)
) -> kvspec.RankCache:
    """Read the tensors of two groups: [blocks, heads, rows, k and v], and latents."""
    described = kvspec.EngineSpec(
        groups=TWO_GROUPS, parallel=kvspec.ParallelConfig(tp_size=2), layout="LBHNC"
    )
    tensors = {
        "l": np.zeros((BLOCKS, HEADS, ROWS, 2 * SIZE), ELEMENT),
        "m": np.zeros(latents, ELEMENT),
    }
    return kvspec.RankCache.from_tensors(described, RANK, tensors, axes)


def test_axes_of_group_apply_to_tensors_without_own_axes() -> None:
    """The axes of a tensor's name, here "kv", take precedence over those of its group."""
    same_axes = shifts(read_two_groups("BHNC"))
    flat = (BLOCKS * ROWS, 576)
    assert same_axes == shifts(read_two_groups({"full": "BHNC", "latent": "BHNC"}))
    assert same_axes == shifts(read_two_groups({"full": "BHNC", "latent": "(BN)C"}, flat))
    by_tensor = {"full": "(BN)C", "latent": "(BN)C", "kv": "BHNC"}
    assert same_axes == shifts(read_two_groups(by_tensor))


@pytest.mark.parametrize("key", ["l", "layers.0", "k", "Full", "", 0])
def test_from_tensors_rejects_axes_with_unknown_key(key: Any) -> None:
    """A key must be the name of tensors or of a group."""
    error = refusal(lambda: read_two_groups({key: "BHNC"}))
    assert ("axes", key) == (error.field, error.value)
    assert "kv, full, latent" in error.expected


def test_from_tensors_rejects_axes_with_ambiguous_key() -> None:
    """The key "k" is the name of a group and of tensors of the other group."""
    groups = [TWO_GROUPS[0], attrs.evolve(TWO_GROUPS[1], name="k")]
    described = kvspec.EngineSpec(
        groups=groups, parallel=kvspec.ParallelConfig(tp_size=2), layout="LBHNC"
    )
    content = {x: np.zeros((5, 3, 4, 8), ELEMENT) for x in "kv"}
    tensors = {"l": content, "m": np.zeros((5, 1, 4, 576), ELEMENT)}
    for more in ({}, {"v": "BHNC"}):
        axes = {"k": "BHNC"} | more
        error = refusal(
            lambda axes=axes: kvspec.RankCache.from_tensors(described, RANK, tensors, axes)
        )
        assert ("axes", "k") == (error.field, error.value)
        assert "only" in error.expected
    own = {"k": "BHNC", "v": "BHNC", "kv": "BHNC"}
    assert 3 == len(kvspec.RankCache.from_tensors(described, RANK, tensors, own).regions)


def test_axes_may_contain_tensors_of_another_stage() -> None:
    """One mapping is valid for all ranks, also if a stage has no layer of a group."""
    described = kvspec.EngineSpec(
        groups=TWO_GROUPS,
        parallel=kvspec.ParallelConfig(pp_size=2, tp_size=2, stages=[["l"], ["m"]]),
        layout="LBHNC",
    )
    axes = {"kv": "BHNC", "latent": "BHNC"}
    tensors = {"l": np.zeros((5, 3, 4, 16), ELEMENT), "m": np.zeros((5, 1, 4, 576), ELEMENT)}
    for stage, (layer, tensor) in enumerate(tensors.items()):
        rank = RankId(pp=stage)
        cache = kvspec.RankCache.from_tensors(described, rank, {layer: tensor}, axes)
        assert {layer} == {region.layer for region in cache.regions}
