"""Tests how the vLLM adapter reads the regions of a rank from the tensors of each vLLM version."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of
from moved import blocks_for, moved
from refused import refusal
from vllm_like import HEADS, config, engine_spec, state

import kvspec
from kvspec.adapters import vllm

ONE = kvspec.RankId()

# A cache contains only addresses, so the arrays must stay alive.
KEPT: list[Any] = []


def zeros(shape: Any, dtype: Any) -> Any:
    """Return an array of zeros, and keep it alive until the tests end."""
    KEPT.append(np.zeros(shape, dtype))
    return KEPT[-1]


def test_34_layers_of_gemma_in_5_tensors_move() -> None:
    """Gemma has 5 full layers and 29 layers with a window, in 7 groups.

    The layers of a tensor belong to different groups. A block id belongs to one group at a time,
    so the layers can share memory.
    """
    full = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": 4})
    window = like.SlidingWindowSpec(**{**HEADS, "num_kv_heads": 4}, sliding_window=40)
    names = [f"model.layers.{at}.self_attn.attn" for at in range(34)]
    full_names = names[5::6]
    rest = [name for name in names if name not in full_names]
    groups = [(full_names, full), *((rest[at::6], window) for at in range(6))]
    page, blocks = full.page_size_bytes, 40
    tensors = [
        like.KVCacheTensor(
            page * blocks, [members[at] for members, _ in groups if at < len(members)]
        )
        for at in range(5)
    ]
    theirs = config(*groups, num_blocks=blocks, tensors=tensors)
    engine = engine_spec(theirs)
    sides = []
    for _ in "pd":
        views = {}
        for tensor in tensors:
            shared = zeros(tensor.size, np.uint8).reshape(blocks, 4, 16, 32)
            views |= dict.fromkeys(tensor.shared_by, shared)
        sides.append({ONE: vllm.rank_cache(engine, ONE, views, config=theirs)})
        assert 5 == len(sides[-1][ONE].memory)
        assert 34 * 2 == len(sides[-1][ONE].regions)
    tables = [{f"group{at}": [first + at, 15 + at, 29 - at] for at in range(7)} for first in (1, 8)]
    assert [] == moved(engine, engine, request_of(45, *tables), (sides[0], sides[1]))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_groups_in_one_allocation_move(layout: str) -> None:
    """Attention and Mamba2 layers share the same bytes, so the cache registers one memory."""
    attention = like.FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype="uint8")
    mamba = state("mamba2", ((72, 3), (8, 8, 4)), page_size_padded=8192)
    page, blocks = 8192, 7
    strides = (page * blocks, page) if layout == "LBHNC" else (page, 2 * page)
    pairs = ["layer.0", "layer.2"], ["layer.1", "layer.3"]
    tensors = [like.KVCacheTensor(2 * page * blocks, list(pair), 0, *strides) for pair in pairs]
    theirs = config((pairs[0], attention), (pairs[1], mamba), num_blocks=blocks, tensors=tensors)
    engine = engine_spec(theirs, n_groups=1, layout=layout)
    sides = []
    for _ in "pd":
        flat = zeros(2 * page * blocks, np.uint8)
        views = like.tensors_of(theirs, layout, flat)
        sides.append({ONE: vllm.rank_cache(engine, ONE, views, config=theirs)})
        memory = kvspec.Memory(flat.ctypes.data, flat.nbytes)
        assert (memory,) == sides[-1][ONE].memory
    tables = {"group0": [2, 1], "group1": [5]}, {"group0": [4, 6], "group1": [3]}
    assert [] == moved(engine, engine, request_of(100, *tables), (sides[0], sides[1]))


def plane_views(heads: int, shape: str, blocks: int = 5) -> np.ndarray[Any, Any]:
    """Return a tensor of an older vLLM: a view in NHD order of memory in the order *shape*."""
    sizes = {"K": 2, "B": blocks, "N": 16, "H": heads, "C": 8}
    stored = zeros([sizes[letter] for letter in shape], np.uint16)
    logical = ("KB" if shape.startswith("K") else "BK") + "NHC"
    return stored.transpose([shape.index(letter) for letter in logical])


@pytest.mark.parametrize("shape", ["KBNHC", "KBHNC", "BKNHC", "BKHNC"])
@pytest.mark.parametrize("heads", [2, 16])
def test_tensors_with_planes_move(shape: str, heads: int) -> None:
    """Older tensors are [2, blocks, tokens, heads, size] or [blocks, 2, ...], in several orders.

    With 2 blocks and 16 heads every order has the same shape. Only the layout and the strides
    differ.
    """
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": heads})
    theirs = config((["layer.0"], spec))
    engine = engine_spec(theirs, layout="L" + shape)
    other = engine_spec(theirs, layout="BLNHC")
    tensor = plane_views(heads, shape, 2)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor})
    plane = tensor[:, :1] if shape.startswith("K") else tensor.swapaxes(0, 1)[:, :1]
    value = plane[1].ctypes.data - tensor.ctypes.data
    assert value == cache.region("layer.0", "v").base - cache.region("layer.0", "k").base
    packed = {"layer.0": zeros((2, 16, heads, 16), np.uint16).swapaxes(1, 2)}
    target = vllm.rank_cache(other, ONE, packed)
    request = request_of(15, {"group0": [1]}, {"group0": [1]})
    assert [] == moved(engine, other, request, ({ONE: cache}, {ONE: target}))


def test_latent_moves_with_or_without_axis_of_heads() -> None:
    """The tensors have 12 kernel blocks of 16 tokens for 3 blocks of 64."""
    spec = like.MLAAttentionSpec(block_size=64, head_size=12, dtype="bfloat16")
    engine = engine_spec(config((["layer.0"], spec)), kernel_block_size=16)
    old = vllm.rank_cache(engine, ONE, {"layer.0": zeros((12, 16, 12), np.uint16)})
    new = vllm.rank_cache(engine, ONE, {"layer.0": zeros((12, 1, 16, 12), np.uint16)})
    request = request_of(100, {"group0": [2, 1]}, {"group0": [1, 2]})
    assert [] == moved(engine, engine, request, ({ONE: old}, {ONE: new}))


@pytest.mark.parametrize(
    ("layout", "shape", "expected_shape"),
    [
        ("LBHNC", (5, 3, 16, 16), "[blocks, 2, 16, 32 bytes]"),
        ("LBHNC", (5, 2, 16, 17), "[blocks, 2, 16, 32 bytes]"),
        ("LBHNC", (5, 2, 16, 2, 8), "[blocks, 2, 16, 32 bytes]"),
        ("LKBNHC", (5, 2, 16, 2, 8), "[2, blocks, 16, 2, 16 bytes]"),
        ("LBKNHC", (2, 5, 16, 2, 8), "[blocks, 2, 16, 2, 16 bytes]"),
        ("LBKNHC", (5, 2, 8, 2, 8), "[blocks, 2, 16, 2, 16 bytes]"),
    ],
)
def test_rank_cache_rejects_shape_that_differs_from_layout(
    layout: str, shape: Any, expected_shape: str
) -> None:
    """The error contains the shape of the tensor and the shape that the layout requires."""
    engine = engine_spec(config((["layer.0"], like.FullAttentionSpec(**HEADS))), layout=layout)
    tensors = {"layer.0": zeros(shape, np.uint16)}
    error = refusal(lambda: vllm.rank_cache(engine, ONE, tensors))
    assert ("tensors['layer.0'].shape", shape) == (error.field, error.value)
    assert expected_shape in error.expected


@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_rank_cache_reads_state_from_two_tensors(conv_layout: str) -> None:
    """The first tensor is the conv state, the second the temporal state."""
    shapes = ((40, 3) if conv_layout == "DS" else (3, 40), (4, 8, 4))
    theirs = config((["layer.0"], state("mamba2", shapes)))
    engine = engine_spec(theirs, conv_layout=conv_layout)
    conv, ssm = (zeros((4, *shape), np.uint8) for shape in shapes)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": [conv, ssm]})
    step = 3 if conv_layout == "DS" else 1
    assert 32 * step == cache.region("layer.0", "conv_b").base - conv.ctypes.data
    assert ssm.ctypes.data == cache.region("layer.0", "ssm").base
    with_gaps = zeros((4, 4, 8, 8), np.uint8)[..., :4]
    shorter = (4, *shapes[0][:1], 2)
    for tensors, field, value, requirement in (
        ([conv], "", "1 tensors", "2 tensors"),
        (conv, "", "1 tensors", "2 tensors"),
        ([conv[:, :, :2], ssm], "['conv'].shape", shorter, str(list(shapes[0]))[1:]),
        ([conv, ssm[:, :2]], "['ssm'].shape", (4, 2, 8, 4), "32 bytes"),
        ([conv, with_gaps], ".stride", 8, "4"),
    ):
        error = refusal(lambda given=tensors: vllm.rank_cache(engine, ONE, {"layer.0": given}))
        assert (f"tensors['layer.0']{field}", value) == (error.field, error.value)
        assert requirement in error.expected


def test_rank_cache_rejects_tensors_that_differ_from_engine() -> None:
    """The number of blocks, the layers, the number of tensors and the element size must agree."""
    theirs = config((["layer.0"], like.FullAttentionSpec(**HEADS)))
    engine = engine_spec(theirs)
    right = zeros((5, 2, 16, 16), np.uint16)
    odd = np.zeros((6, 2, 16, 1), "V32")  # elements of 32 bytes
    for tensors, field, value, requirement in (
        ({"layer.0": right}, "tensors['layer.0'].shape[0]", 5, "6"),
        ({}, "tensors", [], "'layer.0'"),
        ({"layer.0": [right]}, "tensors['layer.0']", "1 tensors", "one"),
        ({"layer.0": odd}, "tensors['layer.0'].itemsize", 32, "16"),
    ):
        error = refusal(lambda given=tensors: vllm.rank_cache(engine, ONE, given, config=theirs))
        assert (field, value) == (error.field, error.value)
        assert requirement in error.expected


def test_rank_cache_reads_torch_tensors() -> None:
    """All tensors are views of one torch storage, so the cache registers one memory."""
    torch = pytest.importorskip("torch")
    spec = like.FullAttentionSpec(**HEADS)
    mamba = like.MambaSpec(
        block_size=16, shapes=((40, 3), (4, 8, 4)), dtypes=("bfloat16", "bfloat16")
    )
    engine = engine_spec(config((["layer.0"], spec), (["layer.1"], mamba)), layout="NHD")
    flat = torch.zeros(2 * 4096, dtype=torch.bfloat16)
    tensor = flat[:2048].view(4, 16, 2, 16).permute(0, 2, 1, 3)
    states = [flat[2048:2528].view(4, 40, 3), flat[4096 : 4096 + 512].view(4, 4, 8, 4)]
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor, "layer.1": states})
    assert [flat.numel() * 2] == [memory.length for memory in cache.memory]
    assert 16 == cache.region("layer.0", "v").base - cache.region("layer.0", "k").base
    assert {"group0", "group1"} == set(blocks_for(engine, 20))


FULL = like.FullAttentionSpec(**HEADS)
WINDOW = like.SlidingWindowSpec(**HEADS, sliding_window=40)
MAMBA = state("mamba2", ((40, 3), (4, 8, 4)), page_size_padded=1024)
PAGE, BLOCKS = 1024, 6
POOL = np.zeros(8 * BLOCKS * PAGE, np.uint8)
WHOLE = BLOCKS * PAGE


def pages(at: int = 0, stride: int = PAGE, blocks: int = BLOCKS) -> Any:
    """Return the view [blocks, 2 heads, 16 tokens, 32 bytes] from byte *at* of the pool on."""
    return np.ndarray((blocks, 2, 16, 32), np.uint8, POOL, at, (stride, 512, 32, 1))


def states(at: int = 0, stride: int = PAGE, blocks: int = BLOCKS) -> list[Any]:
    """Return conv and temporal state in the same pages."""
    return [
        np.ndarray((blocks, 40, 3), np.uint8, POOL, at, (stride, 3, 1)),
        np.ndarray((blocks, 4, 8, 4), np.uint8, POOL, at + 120, (stride, 32, 4, 1)),
    ]


def raw(size: int) -> Any:
    """Return the raw pages of a state. Each page has *size* bytes."""
    return np.ndarray((BLOCKS, 1, 1, size), np.int8, POOL, 0, (PAGE, size, size, 1))


@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_rank_cache_reads_state_from_raw_pages(conv_layout: str) -> None:
    """A page contains the conv state, then the temporal state, then padding."""
    shape = (40, 3) if conv_layout == "DS" else (3, 40)
    spec = state("mamba2", (shape, (4, 8, 4)), page_size_padded=1024)
    engine = engine_spec(config((["l.0"], spec)))
    conv = np.ndarray((BLOCKS, *shape), np.uint8, POOL, 0, (PAGE, shape[1], 1))
    listed = vllm.rank_cache(engine, ONE, {"l.0": [conv, states()[1]]})
    assert listed == vllm.rank_cache(engine, ONE, {"l.0": raw(248)})
    torch = pytest.importorskip("torch")
    tensor = torch.from_numpy(POOL[:WHOLE].view(np.int8)).view(BLOCKS, 1, 1, PAGE)[..., :248]
    assert listed.regions == vllm.rank_cache(engine, ONE, {"l.0": tensor}).regions


def hybrid(*shared: Any, **place: int) -> like.KVCacheConfig:
    """Return a config of two full, two window and two Mamba2 layers, in the tensors *shared*."""
    groups = (["f.0", "f.1"], FULL), (["w.0", "w.1"], WINDOW), (["m.0", "m.1"], MAMBA)
    size = WHOLE if not place else len(POOL)
    return config(*groups, tensors=[like.KVCacheTensor(size, list(x), **place) for x in shared])


# Each tensor has its own memory and one layer of each group.
APART = hybrid(["f.0", "w.0", "m.0"], ["f.1", "w.1", "m.1"])
# All layers are in one allocation. Each block has a row of two pages.
ROWS = hybrid(["f.0", "f.1"], ["w.0", "w.1"], ["m.0", "m.1"], layer_stride=PAGE, block_stride=2048)
# No layers share a tensor.
TWO = config(
    (["f.0"], FULL),
    (["w.0"], WINDOW),
    tensors=[like.KVCacheTensor(WHOLE, ["f.0"]), like.KVCacheTensor(WHOLE, ["w.0"])],
)


def placed(theirs: like.KVCacheConfig, places: dict[str, int], stride: int) -> kvspec.RankCache:
    """Read pages that begin at *places*, and compare them with the config *theirs*."""
    engine = engine_spec(theirs, layout="LBHNC" if stride == PAGE else "BLHNC")
    tensors = {
        layer: states(at, stride) if layer.startswith("m") else pages(at, stride)
        for layer, at in places.items()
    }
    return vllm.rank_cache(engine, ONE, tensors, config=theirs)


def separate(**moved_layers: int) -> kvspec.RankCache:
    """Read tensors whose places follow the config APART, except those of *moved_layers*."""
    places = {f"{kind}_{n}": n * WHOLE for kind in "fwm" for n in (0, 1)} | moved_layers
    return placed(APART, {name.replace("_", "."): at for name, at in places.items()}, PAGE)


def rows(stride: int = 2048, **moved_layers: int) -> kvspec.RankCache:
    """Read tensors whose places follow the config ROWS, except those of *moved_layers*."""
    places = {f"{kind}_{n}": n * PAGE for kind in "fwm" for n in (0, 1)} | moved_layers
    return placed(ROWS, {name.replace("_", "."): at for name, at in places.items()}, stride)


def test_rank_cache_reads_layers_that_share_memory_as_in_config() -> None:
    """The layers share tensors, or rows of one allocation that may begin anywhere."""
    further = {f"{kind}_{n}": 64 + n * PAGE for kind in "fwm" for n in (0, 1)}
    for cache in (separate(), rows(), rows(**further)):
        assert 6 == len({region.layer for region in cache.regions})


def test_layers_of_tensor_are_read_from_layers_or_shared_by() -> None:
    """Newer tensors that have strides also have `layers` instead of `shared_by`."""
    theirs = hybrid(layer_stride=PAGE, block_stride=2048)
    for tensor in ROWS.kv_cache_tensors:
        theirs.kv_cache_tensors.append(like.changed(tensor, "shared_by", "gone"))
        theirs.kv_cache_tensors[-1].layers = tensor.shared_by  # type: ignore[attr-defined]
    places = {f"{kind}.{n}": n * PAGE for kind in "fwm" for n in (0, 1)}
    assert rows() == placed(theirs, places, 2048)
    error = refusal(lambda: placed(theirs, places | {"w.0": PAGE, "w.1": 0}, 2048))
    assert ("tensors", "f.0 and w.0, 1024 bytes apart") == (error.field, error.value)
    assert "config.kv_cache_tensors[1].layers" in error.expected


def one_full(**changes: Any) -> kvspec.RankCache:
    """Read one layer of full attention. *changes* replace arguments of `rank_cache`."""
    theirs = config((["l.0"], FULL))
    engine = changes.pop("engine", engine_spec(theirs))
    rank, tensors = changes.pop("rank", ONE), changes.pop("tensors", {"l.0": pages()})
    return vllm.rank_cache(engine, rank, tensors, **changes)


def one_state(tensors: Any) -> kvspec.RankCache:
    """Read the tensors of one state."""
    return vllm.rank_cache(engine_spec(config((["l.0"], MAMBA))), ONE, {"l.0": tensors})


def test_layer_without_group_must_have_tensor_of_another_layer() -> None:
    """A layer that reads the cache of another layer is in no group and has the same tensor."""
    own = pages()
    assert one_full(tensors={"l.0": own}) == one_full(tensors={"l.0": own, "l.1": own})
    error = refusal(lambda: one_full(tensors={"l.0": own, "l.1": own[:]}))
    assert ("tensors", "l.1") == (error.field, error.value)


FIRST, SECOND = (f"config.kv_cache_tensors[{at}].shared_by" for at in (0, 1))

# Call, field and value of the error, and an identifier or number in its requirement.
REFUSED: list[tuple[Callable[[], object], str, Any, str]] = [
    # Tensors that differ from the config.
    (lambda: separate(w_0=2 * WHOLE), "tensors", "f.0 and w.0, 12288 bytes apart", FIRST),
    (lambda: separate(m_0=WHOLE, m_1=0),
     "tensors", "f.0 and m.0, 6144 bytes apart", FIRST),
    (lambda: separate(f_1=0, w_1=0, m_1=0), "tensors", "f.0.k and f.1.k", "overlap"),
    (lambda: placed(TWO, {"f.0": 0, "w.0": 0}, PAGE), "tensors", "f.0 and w.0", SECOND),
    (lambda: separate(m_1=WHOLE + 512), "tensors", "f.1 and m.1, 512 bytes apart", SECOND),
    (lambda: separate(m_1=WHOLE + 1000), "tensors", "f.1.k and m.1.conv_x", "different"),
    (lambda: rows(w_0=2 * WHOLE, w_1=2 * WHOLE + PAGE),
     "tensors", "f.0 and w.0, 12288 bytes apart", SECOND),
    (lambda: rows(w_0=PAGE, w_1=0), "tensors", "f.0 and w.0, 1024 bytes apart", SECOND),
    (lambda: rows(3072), "tensors['f.0'].stride", 3072, "2048"),
    (lambda: one_full(config=config((["l.1"], FULL), tensors=[like.KVCacheTensor(1, ["l.1"])])),
     "config", ["l.1"], "'l.0'"),
    (lambda: one_full(config=config((["l.0"], FULL), num_blocks=5)),
     "tensors['l.0'].shape[0]", 6, "5"),
    (lambda: one_full(config="abc"), "config", "str", "KVCacheConfig"),
    (lambda: one_full(config=like.changed(config((["l.0"], FULL)), "num_blocks", "gone")),
     "config.num_blocks", None, ""),
    # Other arguments.
    (lambda: one_full(engine=None), "engine", None, "EngineSpec"),
    (lambda: one_full(rank=None), "rank", None, "RankId"),
    (lambda: one_full(rank=kvspec.RankId(tp=4)), "rank", kvspec.RankId(tp=4), "tp < 1"),
    (lambda: one_full(tensors=None), "tensors", "NoneType", ""),
    (lambda: one_full(tensors=[pages()]), "tensors", "list", ""),
    (lambda: one_full(tensors={"l.0": pages(), "zz": pages()}), "tensors", "zz", "tp0"),
    # Objects that cannot be the tensor of a layer.
    (lambda: one_full(tensors={"l.0": None}), "tensors['l.0']", "NoneType", "numpy"),
    (lambda: one_full(tensors={"l.0": "x"}), "tensors['l.0']", "str", "numpy"),
    (lambda: one_full(tensors={"l.0": {"k": pages()}}), "tensors['l.0']", "dict", "numpy"),
    (lambda: one_full(tensors={"l.0": [pages()]}), "tensors['l.0']", "1 tensors", "one"),
    (lambda: one_full(tensors={"l.0": pages()[0, 0, 0, 0]}), "tensors['l.0']", "uint8", "numpy"),
    (lambda: one_full(tensors={"l.0": np.zeros((), np.uint8)}), "tensors['l.0'].shape", (), "BHNC"),
    (lambda: one_full(tensors={"l.0": pages(blocks=0)}),
     "tensors['l.0']['k'].shape", (0, 2, 1, 16, 16), "1"),
    (lambda: one_full(tensors={"l.0": np.empty((6, 2, 16, 4), object)}),
     "tensors['l.0'].dtype", "object", "bfloat16"),
]  # fmt: skip

REFUSED_STATES: list[tuple[Callable[[], object], str, Any, str]] = [
    (lambda: one_state(None), "tensors['l.0']", "NoneType", "numpy"),
    (lambda: one_state("ab"), "tensors['l.0']", "str", "numpy"),
    (lambda: one_state([states()[0], None]), "tensors['l.0'][1]", "NoneType", "numpy"),
    (lambda: one_state([]), "tensors['l.0']", "0 tensors", "2"),
    (lambda: one_state(raw(247)), "tensors['l.0'].shape", (6, 1, 1, 247), "248"),
    (lambda: one_state(raw(248)[..., ::-1]), "tensors['l.0'].stride", -1, "1"),
    (lambda: one_state(raw(0)), "tensors['l.0'].shape", (6, 1, 1, 0), "248"),
    (lambda: one_state(states(blocks=0)), "tensors['l.0']['conv'].shape", (0, 40, 3, 1), "1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "field", "value", "requirement"), REFUSED)
def test_rank_cache_rejects_invalid_arguments(
    call: Callable[[], object], field: str, value: object, requirement: str
) -> None:
    """If two layers share memory, the error contains the tensors of the config."""
    error = refusal(call)
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected


@pytest.mark.parametrize(("call", "field", "value", "requirement"), REFUSED_STATES)
def test_rank_cache_rejects_invalid_tensors_of_state(
    call: Callable[[], object], field: str, value: object, requirement: str
) -> None:
    """A state has two tensors, of 120 and 128 bytes a block, or one tensor of 248 raw bytes."""
    error = refusal(call)
    assert (field, value) == (error.field, error.value)
    assert requirement in error.expected


def test_rank_cache_rejects_torch_tensor_without_dense_memory() -> None:
    """A meta tensor has no memory, and a sparse tensor has no strides."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 2, 16, 16)
    for tensor, field, value in (
        (good.to("meta"), "device", "meta"),
        (good.to_sparse(), "layout", "torch.sparse_coo"),
    ):
        error = refusal(lambda tensor=tensor: one_full(tensors={"l.0": tensor}))
        assert (f"tensors['l.0'].{field}", value) == (error.field, error.value)


# Each attribute has six changes. Every fifth change is one of each attribute.
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("whole", [APART, ROWS], ids=["apart", "rows"])
def test_rank_cache_reads_or_rejects_config_with_one_changed_attribute(
    whole: like.KVCacheConfig, step: int
) -> None:
    """No other error is raised if any attribute is missing or has another value."""
    in_rows = whole is ROWS
    engine = engine_spec(whole, layout="BLHNC" if in_rows else "LBHNC")
    stride, far = (2048, PAGE) if in_rows else (PAGE, WHOLE)
    tensors = {
        f"{kind}.{n}": (states if kind == "m" else pages)(n * far, stride)
        for kind in "fwm"
        for n in (0, 1)
    }
    vllm.rank_cache(engine, ONE, tensors, config=whole)
    for where, theirs in islice(like.broken(whole), 0, None, step):
        try:
            vllm.rank_cache(engine, ONE, tensors, config=theirs)
        except kvspec.SpecError:
            continue
        except Exception as error:
            raise AssertionError(where) from error


def replacements(tensor: Any) -> Iterator[Any]:
    """Yield *tensor* and objects of other types and shapes in place of it."""
    yield from (
        tensor,
        None,
        5,
        "x",
        (),
        -1,
        b"",
        {},
        [tensor],
        [tensor, tensor],
        tensor[0],
        tensor[:0],
    )
    yield from (
        tensor.reshape(-1),
        tensor.astype("f4"),
        tensor[..., :1],
        tensor[..., ::-1],
        tensor.T,
    )
    yield from (
        np.zeros((), np.uint8),
        tensor[None],
        tensor[:, :0],
        np.broadcast_to(tensor[:1], tensor.shape),
    )


@pytest.mark.parametrize("layout", ["LBHNC", "LKBNHC", "LBKHNC"])
def test_rank_cache_reads_or_rejects_any_tensor(layout: str) -> None:
    """No other error is raised for a layer of tokens, of opaque pages or of a state."""
    opaque = {
        "kv_quant_mode": like.KVQuantMode.NVFP4,
        "num_head_slots": 4,
        "state_content_bytes": 9,
        "head_size": 16,
        "dtype": "uint8",
    }
    for spec in (FULL, MAMBA, like.FullAttentionSpec(**{**HEADS, **opaque})):
        read, refused = 0, 0
        whole = spec not in (FULL, MAMBA)
        backends = like.FLASHINFER if whole else like.FLASH
        layout = "LBHNC" if whole else layout
        engine = engine_spec(config((["l.0"], spec)), layout=layout, backends=backends)
        for shape in (
            (6, 2, 16, 32),
            (6, 4, 16, 9),
            (6, 40, 3),
            (2, 6, 16, 2, 16),
            (6, 2, 2, 16, 16),
        ):
            for tensor in replacements(zeros(shape, np.uint8)):
                for tensors in (tensor, [tensor], [states()[0], tensor]):
                    try:
                        vllm.rank_cache(engine, ONE, {"l.0": tensors})
                        read += 1
                    except kvspec.SpecError:
                        refused += 1
        assert refused > 100
        assert read or spec is not FULL
