"""vLLM's tensors become a rank's regions, whichever its version, or an error names the shape."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvspec
from kvspec.adapters import vllm

sys.path.insert(0, str(Path(__file__).parent))

import vllm_like as like
from moved import blocks_for, moved, request_of
from vllm_like import HEADS, config, state

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
    engine = vllm.engine_spec(theirs)
    sides = []
    for _ in "pd":
        views = {}
        for tensor in tensors:
            shared = zeros(tensor.size, np.uint8).reshape(blocks, 4, 16, 32)
            views |= dict.fromkeys(tensor.shared_by, shared)
        sides.append({ONE: vllm.rank_cache(engine, ONE, views, blocks)})
        assert 5 == len(sides[-1][ONE].memory)
        assert 34 * 2 == len(sides[-1][ONE].regions)
    tables = [{f"group{at}": [first + at, 15 + at, 29 - at] for at in range(7)} for first in (1, 8)]
    assert [] == moved(engine, engine, request_of(45, *tables), (sides[0], sides[1]))


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
def test_all_groups_in_one_allocation(layout: str) -> None:
    """Attention and Mamba2 layers over the same bytes: one piece of memory is registered."""
    attention = like.FullAttentionSpec(block_size=64, num_kv_heads=2, head_size=32, dtype="uint8")
    mamba = state("mamba2", ((72, 3), (8, 8, 4)), page_size_padded=8192)
    page, blocks = 8192, 7
    strides = (page * blocks, page) if layout == "LBHNC" else (page, 2 * page)
    pairs = ["layer.0", "layer.2"], ["layer.1", "layer.3"]
    tensors = [like.KVCacheTensor(2 * page * blocks, list(each), 0, *strides) for each in pairs]
    theirs = config((pairs[0], attention), (pairs[1], mamba), num_blocks=blocks, tensors=tensors)
    engine = vllm.engine_spec(theirs, n_groups=1, layout=layout)
    sides = []
    for _ in "pd":
        flat = zeros(2 * page * blocks, np.uint8)
        views = like.tensors_of(theirs, layout, flat)
        sides.append({ONE: vllm.rank_cache(engine, ONE, views, blocks)})
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
    engine = vllm.engine_spec(theirs, layout="L" + shape)
    other = vllm.engine_spec(theirs, layout="BLNHC")
    tensor = plane_views(heads, shape, 2)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor}, 2)
    plane = tensor[:, :1] if shape.startswith("K") else tensor.swapaxes(0, 1)[:, :1]
    value = plane[1].ctypes.data - tensor.ctypes.data
    assert value == cache.region("layer.0", "v").base - cache.region("layer.0", "k").base
    packed = {"layer.0": zeros((2, 16, heads, 16), np.uint16).swapaxes(1, 2)}
    target = vllm.rank_cache(other, ONE, packed)
    request = request_of(30, {"group0": [1, 0]}, {"group0": [0, 1]})
    assert [] == moved(engine, other, request, ({ONE: cache}, {ONE: target}))


def test_one_latent_may_come_without_heads() -> None:
    """``[blocks, tokens, content]`` is ``[blocks, 1, tokens, content]``; the kernel's blocks."""
    spec = like.MLAAttentionSpec(block_size=64, head_size=12, dtype="bfloat16")
    engine = vllm.engine_spec(config((["layer.0"], spec)), kernel_block_size=16)
    old = vllm.rank_cache(engine, ONE, {"layer.0": zeros((12, 16, 12), np.uint16)}, 3)
    new = vllm.rank_cache(engine, ONE, {"layer.0": zeros((12, 1, 16, 12), np.uint16)}, 3)
    request = request_of(100, {"group0": [2, 0]}, {"group0": [1, 2]})
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
    engine = vllm.engine_spec(config((["layer.0"], like.FullAttentionSpec(**HEADS))), layout=layout)
    with pytest.raises(kvspec.SpecError, match=rf"tensors\['layer.0'\].shape=\(.*{told}"):
        vllm.rank_cache(engine, ONE, {"layer.0": zeros(shape, np.uint16)})


@pytest.mark.parametrize("conv_layout", ["DS", "SD"])
def test_states_come_as_a_list(conv_layout: str) -> None:
    """Conv and temporal state, in this order; a wrong shape, one of them, a gap: refused."""
    shapes = ((40, 3) if conv_layout == "DS" else (3, 40), (4, 8, 4))
    theirs = config((["layer.0"], state("mamba2", shapes)))
    engine = vllm.engine_spec(theirs, conv_layout=conv_layout)
    conv, ssm = (zeros((4, *shape), np.uint8) for shape in shapes)
    cache = vllm.rank_cache(engine, ONE, {"layer.0": [conv, ssm]}, 4)
    step = 3 if conv_layout == "DS" else 1
    assert 32 * step == cache.region("layer.0", "conv_b").base - conv.ctypes.data
    assert ssm.ctypes.data == cache.region("layer.0", "ssm").base
    gap = zeros((4, 4, 8, 8), np.uint8)[..., :4]
    for given, told in (
        ([conv], "wanted 2 tensors: conv, ssm"),
        (conv, "wanted 2 tensors: conv, ssm"),
        ([conv[:, :, :2], ssm], r"\['conv'\].shape=.* of 1 bytes"),
        ([conv, ssm[:, :2]], r"\['ssm'\].shape=.*\[blocks, 4, ...\] of 32 bytes"),
        ([conv, gap], "stride=8: wanted one piece, 4 bytes apart"),
    ):
        with pytest.raises(kvspec.SpecError, match=told):
            vllm.rank_cache(engine, ONE, {"layer.0": given})


def test_tensors_are_checked_against_the_config() -> None:
    """Blocks, layers that are missing, a list where one tensor is, a type that is none."""
    engine = vllm.engine_spec(config((["layer.0"], like.FullAttentionSpec(**HEADS))))
    right = zeros((5, 2, 16, 16), np.uint16)
    odd = np.zeros((6, 2, 16, 1), "V32")  # elements of 32 bytes
    for given, told in (
        ({"layer.0": right}, r"shape=\(5, 2, 16, 8\): wanted 6 blocks in memory"),
        ({}, "a tensor for layer 'layer.0'"),
        ({"layer.0": [right]}, "'1 tensors': wanted one tensor"),
        ({"layer.0": odd}, "elements that divide the 16 bytes"),
    ):
        with pytest.raises(kvspec.SpecError, match=told):
            vllm.rank_cache(engine, ONE, given, 6)


def test_torch_tensors_are_read_too() -> None:
    """bfloat16 views of one torch storage: one piece of memory, content in bytes."""
    torch = pytest.importorskip("torch")
    spec = like.FullAttentionSpec(**HEADS)
    mamba = like.MambaSpec(
        block_size=16, shapes=((40, 3), (4, 8, 4)), dtypes=("bfloat16", "bfloat16")
    )
    engine = vllm.engine_spec(config((["layer.0"], spec), (["layer.1"], mamba)), layout="NHD")
    flat = torch.zeros(2 * 4096, dtype=torch.bfloat16)
    tensor = flat[:2048].view(4, 16, 2, 16).permute(0, 2, 1, 3)
    states = [flat[2048:2528].view(4, 40, 3), flat[4096 : 4096 + 512].view(4, 4, 8, 4)]
    cache = vllm.rank_cache(engine, ONE, {"layer.0": tensor, "layer.1": states}, 4)
    assert [flat.numel() * 2] == [memory.length for memory in cache.memory]
    assert 16 == cache.region("layer.0", "v").base - cache.region("layer.0", "k").base
    assert {"group0", "group1"} == set(blocks_for(engine, 20))
