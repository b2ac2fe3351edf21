"""The tensors that engines allocate, read as regions: the addresses are those of the elements.

Each shape is written through the engine's own indexing, [block, plane, head, row, content], and
read back through the addresses of the regions; and it agrees with what `allocate` lays out for
the layout that it is called by.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import attrs
import builders
import numpy as np
import pytest

import kvspec
from kvspec import RankId

BLOCKS, ROWS, HEADS, SIZE = 5, 4, 3, 8
LAYERS = ("l", "m")
ELEMENT = np.uint16
"""Two bytes, as bfloat16 has."""
GQA = builders.gqa(2 * HEADS, block_size=ROWS, head_size=SIZE)
LATENT = kvspec.MLAAttentionSpec(block_size=ROWS, head_size=576, dtype="bfloat16")
STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=2, state_size=3, conv_kernel=4, dtype="bfloat16",
    ssm_dtype="float32",
)  # fmt: skip
X, BC = 4, 3
"""Channels of x, of B and of C on one of two ranks: two heads of two, one group of three."""
Tensors = dict[str, Any]


def engine(layout: str, spec: kvspec.LayerSpec = GQA) -> kvspec.EngineSpec:
    """Return an engine of two TP ranks and two layers."""
    return builders.engine(spec, layers=LAYERS, tp=2, layout=layout)


RANK = RankId(tp=1)


def shifts(cache: kvspec.RankCache) -> dict[tuple[str, str], tuple[int, ...]]:
    """Return what of each region does not depend on where a layer's tensor begins."""
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
    """Write numbers through the tensors; find each at the addresses of the regions.

    *locate*: (tensors of a layer, part, block, unit, row) -> the content there, a flat view.
    """
    number = 0
    for region, block, unit, row in places(cache):
        content = locate(tensors[region.layer], region.part, block, unit, row)
        content[...] = np.arange(number, number + content.size).reshape(content.shape) % 65521
        number += int(content.size)
    assert number > 0
    number = 0
    for region, block, unit, row in places(cache):
        found = ctypes.string_at(region.address(block, unit, row), region.content_bytes)
        content = locate(tensors[region.layer], region.part, block, unit, row)
        dtype = np.float32 if region.part == "ssm" else ELEMENT
        values = np.frombuffer(found, dtype)
        assert [v % 65521 for v in range(number, number + values.size)] == values.tolist()
        assert content.size == values.size
        number += values.size


def planes(order: str) -> Any:
    """Return how to locate a content in one tensor with K planes, dimensions in *order*."""

    def locate(tensor: Any, part: str, block: int, unit: int, row: int) -> Any:
        at = {"K": "kv".index(part), "B": block, "H": unit, "N": row}
        return tensor[tuple(at[letter] for letter in order)]

    return locate


def packed(order: str) -> Any:
    """Return how to locate a content in one tensor with k and v packed, dimensions in *order*."""

    def locate(tensor: Any, part: str, block: int, unit: int, row: int) -> Any:
        at = {"B": block, "H": unit, "N": row}
        content = tensor[tuple(at[letter] for letter in order)]
        return content[:SIZE] if part == "k" else content[SIZE:]

    return locate


def separate(tensors: Any, part: str, block: int, unit: int, row: int) -> Any:
    """Locate a content in SGLang's buffers [blocks, rows, heads, size], k and v apart."""
    return tensors[part][block, row, unit]


def latent(tensor: Any, _part: str, block: int, _unit: int, row: int) -> Any:
    """Locate a content in [blocks, rows, 576]."""
    return tensor[block, row]


SHAPES: list[tuple[str, str, str | None, tuple[int, ...], tuple[int, ...] | None, Any]] = [
    # name, layout, axes, shape as allocated, permutation handed out, how to locate a content
    ("FlashAttention", "LKBNHC", None, (2, BLOCKS, ROWS, HEADS, SIZE), None, planes("KBNH")),
    ("FlashInfer NHD", "LBKNHC", None, (BLOCKS, 2, ROWS, HEADS, SIZE), None, planes("BKNH")),
    ("FlashInfer HND", "LBKHNC", None, (BLOCKS, 2, HEADS, ROWS, SIZE), None, planes("BKHN")),
    ("FlashInfer HND as NHD", "LBKHNC", "BKNHC", (BLOCKS, 2, HEADS, ROWS, SIZE), (0, 1, 3, 2, 4),
     planes("BKNH")),
    ("vLLM's view of HND", "LBHNC", "BHNC", (BLOCKS, HEADS, ROWS, 2 * SIZE), None, packed("BHN")),
    ("vLLM's view of NHD", "LBNHC", "BHNC", (BLOCKS, ROWS, HEADS, 2 * SIZE), (0, 2, 1, 3),
     packed("BHN")),
    ("packed NHD", "NHD", None, (BLOCKS, ROWS, HEADS, 2 * SIZE), None, packed("BNH")),
    ("packed HND", "HND", None, (BLOCKS, HEADS, ROWS, 2 * SIZE), None, packed("BHN")),
]  # fmt: skip


def make(shape: tuple[int, ...], library: str, dtype: Any = ELEMENT) -> tuple[Any, Any]:
    """Return zeros as (what the engine holds, a numpy view of it)."""
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
def test_an_engine_s_tensor_is_its_layout(
    name: str,
    layout: str,
    axes: str | None,
    shape: tuple[int, ...],
    permuted: tuple[int, ...] | None,
    locate: Any,
    library: str,
) -> None:
    """One tensor a layer: regions like `allocate`'s, one memory each, every element in place."""
    given, views = {}, {}
    for layer in LAYERS:
        tensor, view = make(shape, library)
        if permuted is not None:
            tensor = tensor.transpose(permuted) if library == "numpy" else tensor.permute(permuted)
            view = view.transpose(permuted)
        given[layer], views[layer] = tensor, view
    described = engine(layout)
    cache = kvspec.RankCache.from_tensors(described, RANK, given, axes)
    wanted, _ = kvspec.allocate(described, RANK, BLOCKS)
    assert shifts(wanted) == shifts(cache)
    assert {("DRAM", 0, views[each].nbytes) for each in LAYERS} == {
        (m.memory_type, m.device, m.length) for m in cache.memory
    }
    assert {views[each].ctypes.data for each in LAYERS} == {m.address for m in cache.memory}
    check_bytes(cache, views, locate)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["LKBNHC", "LBNHC"])
def test_separate_k_and_v_buffers(layout: str, library: str) -> None:
    """SGLang's k and v buffers lie as the planes of LKBNHC do; a layout without K takes them."""
    pairs = {x: {p: make((BLOCKS, ROWS, HEADS, SIZE), library) for p in "kv"} for x in LAYERS}
    given = {x: {p: tensor for p, (tensor, _) in pair.items()} for x, pair in pairs.items()}
    views = {x: {p: view for p, (_, view) in pair.items()} for x, pair in pairs.items()}
    cache = kvspec.RankCache.from_tensors(engine(layout), RANK, given)
    assert 4 == len(cache.memory)
    planes_, _ = kvspec.allocate(engine("LKBNHC"), RANK, BLOCKS)
    assert [x[1:] for x in shifts(planes_).values()] == [x[1:] for x in shifts(cache).values()]
    check_bytes(cache, views, separate)


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("layout", ["LBNHC", "LBHNC", "LKBNHC"])
def test_a_latent_without_heads(layout: str, library: str) -> None:
    """MLA's [blocks, rows, 576] has no head axis: one unit, whatever the layout says of heads."""
    made = {layer: make((BLOCKS, ROWS, 576), library) for layer in LAYERS}
    described = engine(layout, LATENT)
    given = {layer: tensor for layer, (tensor, _) in made.items()}
    cache = kvspec.RankCache.from_tensors(described, RANK, given, "BNC")
    wanted, _ = kvspec.allocate(described, RANK, BLOCKS)
    assert shifts(wanted) == shifts(cache)
    check_bytes(cache, {layer: view for layer, (_, view) in made.items()}, latent)


def state(order: str) -> Any:
    """Return how to locate a content in conv [blocks, ...] in *order* and ssm."""
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
def test_a_state_s_two_tensors(
    layout: str, order: str, shape: tuple[int, ...], library: str
) -> None:
    """Mamba2's conv [x | B | C] of the rank, dimension first or last, and its ssm state."""
    made = {
        x: {"conv": make(shape, library), "ssm": make((BLOCKS, 2, 2, 3), library, np.float32)}
        for x in LAYERS
    }
    given = {x: {n: tensor for n, (tensor, _) in both.items()} for x, both in made.items()}
    views = {x: {n: view for n, (_, view) in both.items()} for x, both in made.items()}
    axes = {"conv": f"B{order}", "ssm": "BHCC"}
    cache = kvspec.RankCache.from_tensors(engine(layout, STATE), RANK, given, axes)
    wanted, _ = kvspec.allocate(engine(layout, STATE), RANK, BLOCKS)
    ours, theirs = shifts(wanted), shifts(cache)
    assert {k: v[3:] for k, v in ours.items()} == {k: v[3:] for k, v in theirs.items()}
    conv = [("l", f"conv_{each}") for each in "xbc"]
    assert [ours[each][0] for each in conv] == [
        theirs[each][0] - theirs[conv[0]][0] for each in conv
    ]
    assert 4 == len(cache.memory)
    check_bytes(cache, views, state(order))


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_state_tensors_in_one_page_are_an_allocated_page(library: str) -> None:
    """Conv and ssm as views of one buffer, a block's page after the other, as vLLM slices them."""
    described = engine("LBHNC", STATE)
    page = 3 * (X + 2 * BC) * 2 + 2 * 2 * 3 * 4
    given: Tensors = {}
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
        given[layer] = {"conv": conv, "ssm": ssm}
    axes = {"conv": "BHN", "ssm": "BHCC"}
    cache = kvspec.RankCache.from_tensors(described, RANK, given, axes)
    wanted, _ = kvspec.allocate(described, RANK, BLOCKS)
    assert shifts(wanted) == shifts(cache)
    assert 2 == len(cache.memory)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_pool_of_all_layers_is_registered_once(library: str) -> None:
    """TensorRT-LLM's pool [blocks, layers, 2, heads, rows, size] as a view for each layer."""
    pool, view = make((BLOCKS, len(LAYERS), 2, HEADS, ROWS, SIZE), library)
    described = engine("BLKHNC")
    given = {layer: pool[:, i] for i, layer in enumerate(LAYERS)}
    cache = kvspec.RankCache.from_tensors(described, RANK, given)
    assert (kvspec.Memory(view.ctypes.data, view.nbytes),) == cache.memory
    wanted, storage = kvspec.allocate(described, RANK, BLOCKS)
    assert storage["g"].nbytes == view.nbytes
    bases = [[r.base - c.memory[0].address for r in c.regions] for c in (wanted, cache)]
    assert bases[0] == bases[1]
    assert shifts(wanted) == shifts(cache)
    views = {layer: view[:, i] for i, layer in enumerate(LAYERS)}
    check_bytes(cache, views, planes("BKHN"))


def test_what_a_view_leaves_out_is_no_part_of_the_cache() -> None:
    """A slice of a larger pool, and padded pages, are only strides; the pool is registered."""
    pool = np.zeros((2 * BLOCKS, ROWS + 1, HEADS, 2 * SIZE), ELEMENT)
    part = pool[::2, :ROWS]
    cache = kvspec.RankCache.from_tensors(
        engine("LBNHC"), RANK, {"l": part, "m": pool[1::2, :ROWS]}
    )
    assert (kvspec.Memory(pool.ctypes.data, pool.nbytes),) == cache.memory
    assert {2 * (ROWS + 1) * HEADS * 2 * SIZE * 2} == {r.block_stride for r in cache.regions}
    check_bytes(cache, {"l": part, "m": pool[1::2, :ROWS]}, packed("BNH"))


def test_padded_pages_of_numpy_s_as_strided_are_read() -> None:
    """The memory behind a view is that of the array it was made of, however it was made."""
    pool = np.zeros(BLOCKS * 1024, ELEMENT)
    view = np.lib.stride_tricks.as_strided(
        pool, (BLOCKS, ROWS, HEADS, 2 * SIZE), (2048, HEADS * 4 * SIZE, 4 * SIZE, 2)
    )
    given = {"l": view, "m": np.zeros(view.shape, ELEMENT)}
    cache = kvspec.RankCache.from_tensors(engine("LBNHC"), RANK, given)
    assert kvspec.Memory(pool.ctypes.data, pool.nbytes) == cache.memory[0]


def test_a_transfer_between_engines_tensors_is_right() -> None:
    """FlashAttention's tensors at TP 2 to FlashInfer's HND at TP 1: each head's rows arrive."""
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
    target = kvspec.RankCache.from_tensors(consumer, RankId(), theirs)
    for rank, tensors in ours.items():
        source = kvspec.RankCache.from_tensors(producer, rank, tensors)
        for start, stop, length in kvspec.build_table(plan, source, target).descriptors(request):
            ctypes.memmove(int(stop), int(start), int(length))
    for layer, plane, head, token in np.ndindex(2, 2, 2 * HEADS, 7):
        rank, local = divmod(head, HEADS)
        (mine, yours), row = ((4, 0), (2, 3))[token // ROWS], token % ROWS
        wanted = ours[RankId(tp=rank)][LAYERS[layer]][plane, mine, row, local]
        assert wanted.tolist() == theirs[LAYERS[layer]][yours, plane, head, row].tolist()
    untouched = np.delete(theirs["l"], (0, 3), axis=0)
    assert not untouched.any()


def test_elements_of_another_float_type_are_refused() -> None:
    """The same bytes would mean other numbers; plain bytes say nothing, and are taken."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    engine = kvspec.EngineSpec(groups=(group,))
    half = np.zeros((6, 1, 4, 8), np.float16)
    with pytest.raises(kvspec.SpecError) as caught:
        kvspec.RankCache.from_tensors(engine, kvspec.RankId(), {"l": half})
    wanted = (
        "tensors['l']['kv'].dtype='float16': expected bfloat16, as the part has, or plain bytes"
    )
    assert wanted == str(caught.value)
    cache = kvspec.RankCache.from_tensors(engine, kvspec.RankId(), {"l": half.view(np.uint16)})
    assert 1 == len(cache.regions)


def test_an_alias_of_a_layout_is_the_layout() -> None:
    """NHD and LBNHC are one engine, in whatever words."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    one, other = (kvspec.EngineSpec(groups=(group,), layout=name) for name in ("NHD", "LBNHC"))
    assert one == other


TWO = [
    kvspec.KVCacheGroup(name="full", layers=["l"], spec=GQA),
    kvspec.KVCacheGroup(name="latent", layers=["m"], spec=LATENT, layout="LBHNC"),
]


def two(axes: Any, latents: tuple[int, ...] = (BLOCKS, 1, ROWS, 576)) -> kvspec.RankCache:
    """Read the tensors of two groups: [blocks, heads, rows, k and v] and latents."""
    described = kvspec.EngineSpec(
        groups=TWO, parallel=kvspec.ParallelConfig(tp_size=2), layout="LBHNC"
    )
    tensors = {
        "l": np.zeros((BLOCKS, HEADS, ROWS, 2 * SIZE), ELEMENT),
        "m": np.zeros(latents, ELEMENT),
    }
    return kvspec.RankCache.from_tensors(described, RANK, tensors, axes)


def test_axes_are_said_by_group() -> None:
    """A group's name stands for all its tensors that have no axes of their own."""
    wanted = shifts(two("BHNC"))
    assert wanted == shifts(two({"full": "BHNC", "latent": "BHNC"}))
    assert wanted == shifts(two({"full": "BHNC", "latent": "(BN)C"}, (BLOCKS * ROWS, 576)))
    assert wanted == shifts(two({"full": "(BN)C", "latent": "(BN)C", "kv": "BHNC"}))


def test_a_key_of_axes_that_is_not_plain_is_refused() -> None:
    """The name of nothing; a group's that is also that of another group's tensors."""
    names = "names of the tensors given, or of groups: kv, full, latent"
    for key in ("l", "layers.0", "k", "Full", "", 0):
        with pytest.raises(kvspec.SpecError) as caught:
            two({key: "BHNC"})
        assert f"axes={key!r}: expected {names}" == str(caught.value)
    groups = [TWO[0], attrs.evolve(TWO[1], name="k")]
    described = kvspec.EngineSpec(
        groups=groups, parallel=kvspec.ParallelConfig(tp_size=2), layout="LBHNC"
    )
    content = {x: np.zeros((5, 3, 4, 8), ELEMENT) for x in "kv"}
    tensors = {"l": content, "m": np.zeros((5, 1, 4, 576), ELEMENT)}
    for more in ({}, {"v": "BHNC"}):
        with pytest.raises(kvspec.SpecError) as caught:
            kvspec.RankCache.from_tensors(described, RANK, tensors, {"k": "BHNC"} | more)
        wanted = "axes='k': expected a name of a group or of tensors, and it is of both"
        assert wanted == str(caught.value)
    own = {"k": "BHNC", "v": "BHNC", "kv": "BHNC"}
    assert 3 == len(kvspec.RankCache.from_tensors(described, RANK, tensors, own).regions)


def test_axes_of_another_stage_s_tensors_may_be_said() -> None:
    """One mapping serves all ranks, also those whose stage has no layer of a group."""
    described = kvspec.EngineSpec(
        groups=TWO,
        parallel=kvspec.ParallelConfig(pp_size=2, tp_size=2, stages=[["l"], ["m"]]),
        layout="LBHNC",
    )
    axes = {"kv": "BHNC", "latent": "BHNC"}
    tensors = {"l": np.zeros((5, 3, 4, 16), ELEMENT), "m": np.zeros((5, 1, 4, 576), ELEMENT)}
    for stage, (layer, tensor) in enumerate(tensors.items()):
        rank = RankId(pp=stage)
        cache = kvspec.RankCache.from_tensors(described, rank, {layer: tensor}, axes)
        assert {layer} == {region.layer for region in cache.regions}
