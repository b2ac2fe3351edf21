"""vLLM's tensors become a rank's regions, whichever its version, or an error names the shape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import vllm_like as like
from builders import request as request_of
from moved import blocks_for, moved
from refused import case, words
from vllm_like import HEADS, config, engine_spec, state

import kvspec
from kvspec.adapters import vllm

ONE = kvspec.RankId()

KEPT: list[Any] = []
"""A cache knows addresses only, so somebody has to keep the memory."""


def zeros(shape: Any, dtype: Any) -> Any:
    """Return an array that stays."""
    KEPT.append(np.zeros(shape, dtype))
    return KEPT[-1]


def test_gemma_s_34_layers_in_5_tensors() -> None:
    """5 full and 29 sliding-window layers, 7 groups: 5 regions of memory, and 34 layers move.

    The layers of a tensor are of different groups, and block ids are of one group at a time.
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
def test_all_groups_in_one_allocation(layout: str) -> None:
    """Attention and Mamba2 layers over the same bytes: one stretch of memory is registered."""
    attention = like.FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype="uint8")
    mamba = state("mamba2", ((72, 3), (8, 8, 4)), page_size_padded=8192)
    page, blocks = 8192, 7
    strides = (page * blocks, page) if layout == "LBHNC" else (page, 2 * page)
    pairs = ["layer.0", "layer.2"], ["layer.1", "layer.3"]
    tensors = [like.KVCacheTensor(2 * page * blocks, list(each), 0, *strides) for each in pairs]
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
    """Return older caches: the letters of *shape* in memory order, as vLLM's logical NHD shape."""
    sizes = {"K": 2, "B": blocks, "N": 16, "H": heads, "C": 8}
    stored = zeros([sizes[letter] for letter in shape], np.uint16)
    logical = ("KB" if shape.startswith("K") else "BK") + "NHC"
    return stored.transpose([shape.index(letter) for letter in logical])


@pytest.mark.parametrize("shape", ["KBNHC", "KBHNC", "BKNHC", "BKHNC"])
@pytest.mark.parametrize("heads", [2, 16])
def test_older_caches_have_planes(shape: str, heads: int) -> None:
    """``[2, blocks, tokens, heads, size]`` and ``[blocks, 2, ...]``, either order in memory.

    As many heads as tokens, two blocks: then the shape says nothing, the layout and strides do.
    """
    spec = like.FullAttentionSpec(**{**HEADS, "num_kv_heads": heads})
    theirs = config((["layer.0"], spec))
    engine = engine_spec(theirs, layout="L" + shape)
    other = engine_spec(theirs, layout="BLNHC")
    tensor = plane_views(heads, shape, 2)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor}, 2)
    plane = tensor[:, :1] if shape.startswith("K") else tensor.swapaxes(0, 1)[:, :1]
    value = plane[1].ctypes.data - tensor.ctypes.data
    assert value == cache.region("layer.0", "v").base - cache.region("layer.0", "k").base
    packed = {"layer.0": zeros((2, 16, heads, 16), np.uint16).swapaxes(1, 2)}
    target = vllm.rank_cache(other, ONE, packed)
    request = request_of(15, {"group0": [1]}, {"group0": [1]})
    assert [] == moved(engine, other, request, ({ONE: cache}, {ONE: target}))


def test_one_latent_may_come_without_heads() -> None:
    """``[blocks, tokens, content]`` is ``[blocks, 1, tokens, content]``; the kernel's blocks."""
    spec = like.MLAAttentionSpec(block_size=64, head_size=12, dtype="bfloat16")
    engine = engine_spec(config((["layer.0"], spec)), kernel_block_size=16)
    old = vllm.rank_cache(engine, ONE, {"layer.0": zeros((12, 16, 12), np.uint16)}, 3)
    new = vllm.rank_cache(engine, ONE, {"layer.0": zeros((12, 1, 16, 12), np.uint16)}, 3)
    request = request_of(100, {"group0": [2, 1]}, {"group0": [1, 2]})
    assert [] == moved(engine, engine, request, ({ONE: old}, {ONE: new}))


@pytest.mark.parametrize(
    ("layout", "shape", "told"),
    [
        ("LBHNC", (5, 3, 16, 16), r"\[blocks, 2, 16, 32 bytes\] for layout BHNC"),
        ("LBHNC", (5, 2, 16, 17), r"\[blocks, 2, 16, 32 bytes\] for layout BHNC"),
        ("LBHNC", (5, 2, 16, 2, 8), r"\[blocks, 2, 16, 32 bytes\] for layout BHNC"),
        ("LKBNHC", (5, 2, 16, 2, 8), r"\[2, blocks, 16, 2, 16 bytes\] for layout KBNHC"),
        ("LBKNHC", (2, 5, 16, 2, 8), r"\[blocks, 2, 16, 2, 16 bytes\] for layout BKNHC"),
        ("LBKNHC", (5, 2, 8, 2, 8), r"\[blocks, 2, 16, 2, 16 bytes\] for layout BKNHC"),
    ],
)
def test_an_unknown_shape_is_refused(layout: str, shape: Any, told: str) -> None:
    """The error names the layer, the shape, and the one that the layout asks for."""
    engine = engine_spec(config((["layer.0"], like.FullAttentionSpec(**HEADS))), layout=layout)
    with pytest.raises(kvspec.SpecError, match=rf"tensors\['layer.0'\].shape=\(.*{told}"):
        vllm.rank_cache(engine, ONE, {"layer.0": zeros(shape, np.uint16)})


@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_states_come_as_a_list(conv_layout: str) -> None:
    """Conv and temporal state, in this order; a wrong shape, one of them, a gap: refused."""
    shapes = ((40, 3) if conv_layout == "DS" else (3, 40), (4, 8, 4))
    theirs = config((["layer.0"], state("mamba2", shapes)))
    engine = engine_spec(theirs, conv_layout=conv_layout)
    conv, ssm = (zeros((4, *shape), np.uint8) for shape in shapes)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": [conv, ssm]}, 4)
    step = 3 if conv_layout == "DS" else 1
    assert 32 * step == cache.region("layer.0", "conv_b").base - conv.ctypes.data
    assert ssm.ctypes.data == cache.region("layer.0", "ssm").base
    gap = zeros((4, 4, 8, 8), np.uint8)[..., :4]
    for given, told in (
        ([conv], r"expected 2 tensors \(conv, ssm\), or one of raw bytes"),
        (conv, r"expected 2 tensors \(conv, ssm\), or one of raw bytes"),
        ([conv[:, :, :2], ssm], r"\['conv'\].shape=.* of 1 bytes"),
        ([conv, ssm[:, :2]], r"\['ssm'\].shape=.*\[blocks, 4, ...\] of 32 bytes"),
        ([conv, gap], "stride=8: expected 4: contiguous"),
    ):
        with pytest.raises(kvspec.SpecError, match=told):
            vllm.rank_cache(engine, ONE, {"layer.0": given})


def test_tensors_are_checked_against_the_config() -> None:
    """Blocks, layers that are missing, a list where one tensor is, a type that is none."""
    engine = engine_spec(config((["layer.0"], like.FullAttentionSpec(**HEADS))))
    right = zeros((5, 2, 16, 16), np.uint16)
    odd = np.zeros((6, 2, 16, 1), "V32")  # elements of 32 bytes
    for given, told in (
        ({"layer.0": right}, r"shape\[0\]=5: expected 6 blocks in memory"),
        ({}, "a tensor for layer 'layer.0'"),
        ({"layer.0": [right]}, "'1 tensors': expected one tensor"),
        ({"layer.0": odd}, "elements that divide the 16 bytes"),
    ):
        with pytest.raises(kvspec.SpecError, match=told):
            vllm.rank_cache(engine, ONE, given, 6)


def test_torch_tensors_are_read_too() -> None:
    """bfloat16 views of one torch storage: one stretch of memory, content in bytes."""
    torch = pytest.importorskip("torch")
    spec = like.FullAttentionSpec(**HEADS)
    mamba = like.MambaSpec(
        block_size=16, shapes=((40, 3), (4, 8, 4)), dtypes=("bfloat16", "bfloat16")
    )
    engine = engine_spec(config((["layer.0"], spec), (["layer.1"], mamba)), layout="NHD")
    flat = torch.zeros(2 * 4096, dtype=torch.bfloat16)
    tensor = flat[:2048].view(4, 16, 2, 16).permute(0, 2, 1, 3)
    states = [flat[2048:2528].view(4, 40, 3), flat[4096 : 4096 + 512].view(4, 4, 8, 4)]
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor, "layer.1": states}, 4)
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
    """Return the raw pages of a state, *size* bytes each."""
    return np.ndarray((BLOCKS, 1, 1, size), np.int8, POOL, 0, (PAGE, size, size, 1))


@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_a_raw_page_is_cut_into_its_states(conv_layout: str) -> None:
    """Conv first, then at once the temporal state, padding at the end: as a list of them lies."""
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
    """Return a config: two full, two sliding-window, two Mamba2 layers in tensors *shared*."""
    groups = (["f.0", "f.1"], FULL), (["w.0", "w.1"], WINDOW), (["m.0", "m.1"], MAMBA)
    size = WHOLE if not place else len(POOL)
    return config(*groups, tensors=[like.KVCacheTensor(size, list(x), **place) for x in shared])


APART = hybrid(["f.0", "w.0", "m.0"], ["f.1", "w.1", "m.1"])
"""Each tensor is memory of its own, of one layer of each group."""
ROWS = hybrid(["f.0", "f.1"], ["w.0", "w.1"], ["m.0", "m.1"], layer_stride=PAGE, block_stride=2048)
"""One allocation, a row of two pages for each block."""


TWO = config(
    (["f.0"], FULL),
    (["w.0"], WINDOW),
    tensors=[like.KVCacheTensor(WHOLE, ["f.0"]), like.KVCacheTensor(WHOLE, ["w.0"])],
)
"""Two tensors that no layers share."""


def placed(theirs: like.KVCacheConfig, places: dict[str, int], stride: int) -> kvspec.RankCache:
    """Read pages that begin at *places*, against the config."""
    engine = engine_spec(theirs, layout="LBHNC" if stride == PAGE else "BLHNC")
    given = {
        layer: states(at, stride) if layer.startswith("m") else pages(at, stride)
        for layer, at in places.items()
    }
    return vllm.rank_cache(engine, ONE, given, config=theirs)


def separate(**moved: int) -> kvspec.RankCache:
    """Read tensors that lie as APART says, but for those that are *moved*."""
    at = {f"{kind}_{n}": n * WHOLE for kind in "fwm" for n in (0, 1)} | moved
    return placed(APART, {name.replace("_", "."): each for name, each in at.items()}, PAGE)


def rows(stride: int = 2048, **moved: int) -> kvspec.RankCache:
    """Read tensors that lie as ROWS says, but for those that are *moved*."""
    at = {f"{kind}_{n}": n * PAGE for kind in "fwm" for n in (0, 1)} | moved
    return placed(ROWS, {name.replace("_", "."): each for name, each in at.items()}, stride)


def test_layers_share_memory_as_the_config_says() -> None:
    """In tensors of their own, or in the rows of one allocation, wherever that begins."""
    further = {f"{kind}_{n}": 64 + n * PAGE for kind in "fwm" for n in (0, 1)}
    for cache in (separate(), rows(), rows(**further)):
        assert 6 == len({region.layer for region in cache.regions})


def test_a_tensor_s_layers_have_two_names() -> None:
    """What was once `shared_by` is `layers` where a tensor says how far they are apart."""
    theirs = hybrid(layer_stride=PAGE, block_stride=2048)
    for each in ROWS.kv_cache_tensors:
        theirs.kv_cache_tensors.append(like.changed(each, "shared_by", "gone"))
        theirs.kv_cache_tensors[-1].layers = each.shared_by  # type: ignore[attr-defined]
    places = {f"{kind}.{n}": n * PAGE for kind in "fwm" for n in (0, 1)}
    assert rows() == placed(theirs, places, 2048)
    with pytest.raises(kvspec.SpecError, match=r"config.kv_cache_tensors\[1\].layers have them"):
        placed(theirs, places | {"w.0": PAGE, "w.1": 0}, 2048)


def one_full(**given: Any) -> kvspec.RankCache:
    """Read one layer of full attention, or what is *given* in place of it."""
    theirs = config((["l.0"], FULL))
    engine = given.pop("engine", engine_spec(theirs))
    rank, tensors = given.pop("rank", ONE), given.pop("tensors", {"l.0": pages()})
    return vllm.rank_cache(engine, rank, tensors, **given)


def one_state(given: Any) -> kvspec.RankCache:
    """Read one state."""
    return vllm.rank_cache(engine_spec(config((["l.0"], MAMBA))), ONE, {"l.0": given})


def test_a_layer_that_reads_another_s_cache_owns_none() -> None:
    """It is named with the very tensor of the layer that writes it, and stands in no group."""
    own = pages()
    assert one_full(tensors={"l.0": own}) == one_full(tensors={"l.0": own, "l.1": own})
    told = "tensors='l.1': expected layers that tp0 has"
    assert told == words(lambda: one_full(tensors={"l.0": own, "l.1": own[:]}))


TENSOR = "expected a torch tensor or a numpy array"
LENT = "config.kv_cache_tensors[{}].shared_by"
REFUSED = [
    # against the config
    (lambda: separate(w_0=2 * WHOLE), "tensors", "f.0 and w.0, 12288 bytes apart", LENT.format(0)),
    (lambda: separate(m_0=WHOLE, m_1=0),
     "tensors", "f.0 and m.0, 6144 bytes apart", LENT.format(0)),
    (lambda: separate(f_1=0, w_1=0, m_1=0), "tensors", "f.0.k and f.1.k", "overlap"),
    (lambda: placed(TWO, {"f.0": 0, "w.0": 0}, PAGE), "tensors", "f.0 and w.0", LENT.format(1)),
    (lambda: separate(m_1=WHOLE + 512), "tensors", "f.1 and m.1, 512 bytes apart", LENT.format(1)),
    (lambda: separate(m_1=WHOLE + 1000), "tensors", "f.1.k and m.1.conv_x", "different"),
    (lambda: rows(w_0=2 * WHOLE, w_1=2 * WHOLE + PAGE),
     "tensors", "f.0 and w.0, 12288 bytes apart", LENT.format(1)),
    (lambda: rows(w_0=PAGE, w_1=0), "tensors", "f.0 and w.0, 1024 bytes apart", LENT.format(1)),
    (lambda: rows(3072), "tensors['f.0'].stride", 3072, "2048"),
    (lambda: one_full(config=config((["l.1"], FULL), tensors=[like.KVCacheTensor(1, ["l.1"])])),
     "config", ["l.1"], "'l.0'"),
    (lambda: one_full(config=config((["l.0"], FULL), num_blocks=5)),
     "tensors['l.0'].shape[0]", 6, "5"),
    (lambda: one_full(config=config((["l.0"], FULL)), num_blocks=5), "num_blocks", 5, "6"),
    (lambda: one_full(config="abc"), "config", "str", "KVCacheConfig"),
    (lambda: one_full(config=like.changed(config((["l.0"], FULL)), "num_blocks", "gone")),
     "config.num_blocks", None, ""),
    # the arguments
    (lambda: one_full(engine=None), "engine", None, "EngineSpec"),
    (lambda: one_full(rank=None), "rank", None, "RankId"),
    (lambda: one_full(rank=kvspec.RankId(tp=4)), "rank", kvspec.RankId(tp=4), "tp < 1"),
    (lambda: one_full(num_blocks="6"), "num_blocks", "6", ""),
    (lambda: one_full(tensors=None), "tensors", "NoneType", ""),
    (lambda: one_full(tensors=[pages()]), "tensors", "list", ""),
    (lambda: one_full(tensors={"l.0": pages(), "zz": pages()}), "tensors", "zz", "tp0"),
    # a tensor
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
    (lambda: one_state(None), "tensors['l.0']", "NoneType", "numpy"),
    (lambda: one_state("ab"), "tensors['l.0']", "str", "numpy"),
    (lambda: one_state([states()[0], None]), "tensors['l.0'][1]", "NoneType", "numpy"),
    (lambda: one_state([]), "tensors['l.0']", "0 tensors", "2"),
    (lambda: one_state(raw(247)), "tensors['l.0'].shape", (6, 1, 1, 247), "248"),
    (lambda: one_state(raw(248)[..., ::-1]), "tensors['l.0'].stride", -1, "1"),
    (lambda: one_state(raw(0)), "tensors['l.0'].shape", (6, 1, 1, 0), "248"),
    (lambda: one_state(states(blocks=0)), "tensors['l.0']['conv'].shape", (0, 40, 3, 1), "1"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "wanted"), REFUSED)
def test_tensors_that_are_not_the_config_s_are_refused_in_words(
    call: Callable[[], object], wanted: str
) -> None:
    """What they are, and what was expected; of two layers that alias, what the config says."""
    with pytest.raises(kvspec.SpecError) as caught:
        call()
    assert wanted == str(caught.value)


def test_a_torch_tensor_without_memory_is_refused() -> None:
    """On the meta device, or sparse: before anything else is read of it."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 2, 16, 16)
    for tensor, told in (
        (good.to("meta"), "device='meta'"),
        (good.to_sparse(), "layout='torch.sp"),
    ):
        with pytest.raises(kvspec.SpecError, match=rf"tensors\['l.0'\].{told}"):
            one_full(tensors={"l.0": tensor})


@pytest.mark.parametrize("whole", [APART, ROWS], ids=["apart", "rows"])
def test_a_config_with_one_thing_wrong_is_read_or_refused(whole: like.KVCacheConfig) -> None:
    """Any one attribute missing or replaced, of the config or what it holds: no other error."""
    in_rows = whole is ROWS
    engine = engine_spec(whole, layout="BLHNC" if in_rows else "LBHNC")
    stride, far = (2048, PAGE) if in_rows else (PAGE, WHOLE)
    given = {
        f"{kind}.{n}": (states if kind == "m" else pages)(n * far, stride)
        for kind in "fwm"
        for n in (0, 1)
    }
    vllm.rank_cache(engine, ONE, given, config=whole)
    for where, theirs in like.broken(whole):
        try:
            vllm.rank_cache(engine, ONE, given, config=theirs)
        except kvspec.SpecError:
            continue
        except Exception as error:
            raise AssertionError(where) from error


def torn(tensor: Any) -> Iterator[Any]:
    """Yield what could stand in place of a tensor."""
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
def test_any_other_tensor_is_read_or_refused(layout: str) -> None:
    """Whatever is given as a tensor, of tokens, opaque pages or a state: no other error."""
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
            for given in torn(zeros(shape, np.uint8)):
                for each in (given, [given], [states()[0], given]):
                    try:
                        vllm.rank_cache(engine, ONE, {"l.0": each})
                        read += 1
                    except kvspec.SpecError:
                        refused += 1
        assert refused > 100
        assert read or spec is not FULL
