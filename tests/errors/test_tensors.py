"""Errors of the tensors that an engine allocated itself."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import builders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from refused import REJECTED, check_rejected, row

import kvspec
from kvspec import RankId

FULL = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=4, head_size=8, dtype="bfloat16")
LATENT = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=2, state_size=3, conv_kernel=4, dtype="bfloat16",
    ssm_dtype="float32",
)  # fmt: skip
CHANNELS = 8 + 6 + 6
"""x, B and C of the state."""
DS = {"conv": "BHN", "ssm": "BHCC"}


def engine(
    *layers: str, spec: kvspec.LayerSpec = FULL, layout: str = "LBNHC", **sizes: int
) -> kvspec.EngineSpec:
    """Return an engine of one group of *layers*, by default the layer "l"."""
    return builders.engine(spec, layers=layers or ("l",), layout=layout, **sizes)


def z(*shape: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    """Return zeros. By default an element has two bytes, as bfloat16 has."""
    return np.zeros(shape, dtype)


GOOD = z(6, 4, 4, 16)
"""Blocks, rows, heads, k and v of one head."""
CONV, SSM = z(6, CHANNELS, 3), z(6, 4, 2, 3, dtype=np.float32)


def read(tensor: Any, axes: Any = None, rank: Any = RankId(), **fields: Any) -> kvspec.RankCache:  # noqa: B008 - frozen
    """Read *tensor* as that of layer "l". Its axes are explicit: it has as many heads as rows."""
    if axes is None:
        axes = {"LBNHC": "BNHC", "LKBNHC": "KBNHC"}[fields.get("layout", "LBNHC")]
    return kvspec.RankCache.from_tensors(engine(**fields), rank, {"l": tensor}, axes)


def latent(tensor: Any, axes: Any = "BNC") -> kvspec.RankCache:
    """Read *tensor* as that of an MLA layer."""
    return read(tensor, axes, spec=LATENT)


def state(axes: Any = None, **tensors: Any) -> kvspec.RankCache:
    """Read the tensors of a state, dimension first. *tensors* replace the right ones."""
    return read({"conv": CONV, "ssm": SSM} | tensors, axes or DS, spec=STATE, layout="LBHNC")


def both(first: Any, second: Any) -> kvspec.RankCache:
    """Read the tensors of two layers of one group."""
    tensors = {"l": first, "m": second}
    return kvspec.RankCache.from_tensors(engine("l", "m"), RankId(), tensors, "BNHC")


KV, SHAPE, STRIDE = "tensors['l']['kv']", "tensors['l']['kv'].shape", "tensors['l']['kv'].stride"
BUFFER = z(2000)
SHARED = z(9, 4, 4, 16)
POOL = z(6144)
PAGE = 4 * 4 * 16 * 2
"""Bytes of a page of `FULL`."""


def pages(at: int = 0, stride: int = PAGE, blocks: int = 6) -> Any:
    """Return pages of `FULL`, *stride* bytes apart. The first is at byte *at* of the pool."""
    return np.ndarray((blocks, 4, 4, 16), np.uint16, POOL, at, (stride, 128, 32, 2))


def finer(at: int = 0) -> Any:
    """Return the same pages as blocks of 2 tokens, 2 for each block of the table."""
    return np.ndarray((12, 2, 4, 16), np.uint16, POOL, at, (PAGE // 2, 128, 32, 2))


def latents(at: int = 0, stride: int = 64, blocks: int = 6) -> Any:
    """Return pages of `LATENT`."""
    return np.ndarray((blocks, 4, 1, 8), np.uint16, POOL, at, (stride, 16, 16, 2))


def across(one: Any, other: Any, spec: kvspec.LayerSpec = FULL, **fields: Any) -> kvspec.RankCache:
    """Read the tensors of the layers l and m, which belong to different groups."""
    groups = [
        kvspec.KVCacheGroup(name="g", layers=["l"], spec=FULL),
        kvspec.KVCacheGroup(name="h", layers=["m"], spec=spec, **fields),
    ]
    engine = kvspec.EngineSpec(groups=groups, layout="LBNHC")
    if other.ndim == len("KBNHC"):
        other = {"k": other[0], "v": other[1]}
    return kvspec.RankCache.from_tensors(engine, RankId(), {"l": one, "m": other}, "BNHC")


def test_good_tensors_are_accepted() -> None:
    """Each rejected tensor below differs from one of these in one respect."""
    assert 2 == len(read(GOOD).regions)
    assert 1 == len(latent(z(6, 4, 8)).regions)
    assert 4 == len(state().regions)
    assert 4 == len(both(GOOD, GOOD.copy()).regions)


SHAPES = [
    row(lambda: read(z(6, 4, 64)), SHAPE, (6, 4, 64), 4),
    row(lambda: read(z(6, 4, 4, 2, 8)), SHAPE, (6, 4, 4, 2, 8), 4),
    row(lambda: read(z(8)), SHAPE, (8,), 4),
    row(lambda: read(GOOD, "BNH"), SHAPE, (6, 4, 4, 16), 3),
    row(lambda: read(GOOD, "KBNHC"), SHAPE, (6, 4, 4, 16), 5),
    row(lambda: read(z(6, 4, 3, 16)), SHAPE, (6, 4, 3, 16), "H"),
    row(lambda: read(z(6, 3, 4, 16)), SHAPE, (6, 3, 4, 16), "N"),
    row(lambda: read(z(6, 5, 4, 16)), SHAPE, (6, 5, 4, 16), "N"),
    row(lambda: read(z(6, 4, 4, 15)), SHAPE, (6, 4, 4, 15), 32),
    row(lambda: read(z(6, 4, 4, 16, dtype=np.uint8)), SHAPE, (6, 4, 4, 16), 32),
    row(lambda: read(z(3, 6, 4, 4, 8), layout="LKBNHC"), SHAPE, (3, 6, 4, 4, 8), "K"),
    row(lambda: read(z(1, 6, 4, 4, 8), layout="LKBNHC"), SHAPE, (1, 6, 4, 4, 8), "K"),
    row(lambda: read(z(2, 6, 4, 4, 7), layout="LKBNHC"), SHAPE, (2, 6, 4, 4, 7), 16),
    row(lambda: latent(z(6, 4, 8), None), SHAPE, (6, 4, 8), 4),
    row(lambda: latent(z(6, 4, 7)), SHAPE, (6, 4, 7), 16),
    row(lambda: state(conv=z(6, CHANNELS - 1, 3)), "tensors['l']['conv'].shape", (6, 19, 3), "H"),
    row(lambda: state(conv=z(6, CHANNELS, 2)), "tensors['l']['conv'].shape", (6, 20, 2), "N"),
    row(lambda: state(ssm=z(6, 4, 2, 3)), "tensors['l']['ssm'].shape", (6, 4, 2, 3), 24),
    row(lambda: state(ssm=z(6, 3, 2, 3, dtype=np.float32)),
        "tensors['l']['ssm'].shape", (6, 3, 2, 3), "H"),
    # A tensor that is too large belongs to another engine, too.
    row(lambda: read(z(6, 4, 5, 16)), SHAPE, (6, 4, 5, 16), "H"),
    row(lambda: read(GOOD, rank=RankId(tp=1), tp_size=2), SHAPE, (6, 4, 4, 16), "H"),
    row(lambda: read(z(6, 4, 4, 17)), SHAPE, (6, 4, 4, 17), 32),
    row(lambda: read(z(6, 4, 4, 16, dtype=np.float32)), SHAPE, (6, 4, 4, 16), 32),
    row(lambda: latent(z(6, 4, 8, dtype=np.float32)), SHAPE, (6, 4, 8), 16),
    row(lambda: read(z(2, 6, 4, 1, 8), "KBNHC", spec=LATENT, layout="LKBNHC"),
        SHAPE, (2, 6, 4, 1, 8), "K"),
    row(lambda: state(conv=z(6, CHANNELS + 1, 3)), "tensors['l']['conv'].shape", (6, 21, 3), "H"),
    row(lambda: state(conv=z(6, CHANNELS, 4)), "tensors['l']['conv'].shape", (6, 20, 4), "N"),
    row(lambda: state(conv=z(6, CHANNELS, 3, dtype=np.float32)),
        "tensors['l']['conv'].shape", (6, 20, 3), 2),
    row(lambda: state(ssm=z(6, 4, 2, 4, dtype=np.float32)),
        "tensors['l']['ssm'].shape", (6, 4, 2, 4), 24),
    row(lambda: read(z(0, 4, 4, 16)), SHAPE, (0, 4, 4, 16), "B"),
    row(lambda: read(z(6, 4, 0, 16)), SHAPE, (6, 4, 0, 16), "H"),
]  # fmt: skip

STRIDES = [
    row(lambda: read(z(6, 4, 4, 16).swapaxes(1, 2)), STRIDE, (512, 32, 128, 2), "BNHC"),
    row(lambda: read(GOOD, "BHNC"), STRIDE, (512, 128, 32, 2), "BNHC"),
    row(lambda: read(GOOD, "NBHC"), STRIDE, (512, 128, 32, 2), "BNHC"),
    row(lambda: read(z(6, 2, 4, 4, 8), "BKNHC", layout="LKBNHC"),
        STRIDE, (512, 256, 64, 16, 2), "KBNHC"),
    row(lambda: state({"conv": "BNH", "ssm": "BHCC"}, conv=z(6, 3, CHANNELS)),
        "tensors['l']['conv'].stride", (120, 40, 2), "BHNC"),
    row(lambda: read(z(6, 4, 4, 32)[..., ::2]), STRIDE, 4, 2),
    row(lambda: read(GOOD[..., ::-1]), STRIDE, -2, 2),
    row(lambda: read(as_strided(BUFFER, (6, 4, 4, 16), (512, 128, 32, 0))), STRIDE, 0, 2),
    row(lambda: read(GOOD[::-1]), STRIDE, (-512, 128, 32, 2), "BNHC"),
    row(lambda: read(GOOD[:, :, ::-1]), STRIDE, (512, 128, -32, 2), "BNHC"),
    row(lambda: read(np.broadcast_to(GOOD[:1], GOOD.shape)), STRIDE, (0, 128, 32, 2), "BNHC"),
    row(lambda: read(np.broadcast_to(GOOD[:, :, :1], GOOD.shape)),
        STRIDE, (512, 128, 0, 2), "BNHC"),
    row(lambda: state(ssm=z(6, 4, 3, 2, dtype=np.float32).swapaxes(2, 3)),
        "tensors['l']['ssm'].stride", 8, 4),
]  # fmt: skip

OVERLAPS = [
    row(lambda: both(GOOD, GOOD), "tensors", "l.k and m.k", "overlap"),
    row(lambda: both(SHARED[:6], SHARED[3:]), "tensors", "l.k and m.k", "overlap"),
    row(lambda: read({"k": GOOD[..., :8], "v": GOOD[..., :8]}),
        "tensors", "l.k and l.v", "overlap"),
    row(lambda: read({"k": GOOD[..., :8], "v": GOOD[..., 4:12]}),
        "tensors", "l.k and l.v", "overlap"),
    row(lambda: read(as_strided(BUFFER, (6, 4, 4, 16), (256, 128, 32, 2))),
        "tensors", "l.k and l.k", "overlap"),
    row(lambda: read(as_strided(BUFFER, (6, 4, 4, 16), (512, 128, 16, 2))),
        "tensors", "l.k and l.v", "overlap"),
    row(lambda: latent(as_strided(BUFFER, (6, 4, 8), (64, 8, 2))),
        "tensors", "l.latent and l.latent", "overlap"),
    row(lambda: latent(as_strided(BUFFER, (6, 4, 8), (32, 16, 2))),
        "tensors", "l.latent and l.latent", "overlap"),
    row(lambda: read({"kv": GOOD, "k": z(6, 4, 4, 8)}), "tensors['l']", ["k", "kv"]),
    # The end of a block of m is the beginning of the next block of l.
    row(lambda: kvspec.RankCache.from_tensors(
        engine("l", "m", spec=LATENT), RankId(),
        {"l": latents(0, 128), "m": latents(96, 128)}, "BNHC"),
        "tensors", "l.latent and m.latent", "overlap"),
]  # fmt: skip

GROUPS = [
    row(lambda: across(pages(), pages(16)), "tensors", "l.k and m.v", "coincide"),
    row(lambda: across(pages(), pages(PAGE // 2)), "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(), pages(PAGE)), "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(5 * PAGE), pages()), "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(), pages(0, 2 * PAGE, 3)), "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(), pages(blocks=5)), "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(), pages(blocks=1)), "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(), latents(), LATENT), "tensors", "l.k and m.latent", "coincide"),
    row(lambda: across(pages(), latents(PAGE - 32, PAGE), LATENT),
        "tensors", "l.k and m.latent", "coincide"),
    row(lambda: across(pages(), finer(PAGE // 2), kernel_block_size=2),
        "tensors", "l.k and m.k", "coincide"),
    row(lambda: across(pages(), pages(blocks=12), kernel_block_size=2),
        "tensors['m']['kv'].shape", (12, 4, 4, 16), "N"),
    row(lambda: across(pages(), POOL[:1536].reshape(2, 6, 4, 4, 8), layout="LKBNHC"),
        "tensors", "l.k and m.k", "coincide"),
]  # fmt: skip

FOREIGN = ">u2" if sys.byteorder == "little" else "<u2"
"""Integers whose bytes are in the other order than this machine's."""
NAMES = [
    row(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), {"m": GOOD}, "BNHC"),
        "tensors", ["m"], "l"),
    row(lambda: kvspec.RankCache.from_tensors(engine("l", "n"), RankId(), {"l": GOOD}, "BNHC"),
        "tensors", ["l"], "n"),
    row(lambda: read({"q": z(6, 4, 4, 8)}), "tensors['l']", "q"),
    row(lambda: read({"k": z(6, 4, 4, 8)}), "tensors['l']", ["k"], "v"),
    row(lambda: read({}), "tensors['l']", [], "k"),
    row(lambda: read({"conv": CONV}, DS, spec=STATE, layout="LBHNC"),
        "tensors['l']", ["conv"], "ssm"),
    row(lambda: state(gate=CONV), "tensors['l']", "gate"),
    row(lambda: read(GOOD, rank=RankId(tp=1)), "rank", RankId(tp=1)),
    row(lambda: read(GOOD, rank=0), "rank", 0),
    *(row(lambda v=v: read(v), "tensors['l']", type(v).__name__, "torch")
      for v in (None, 3, "x", [[1]], b"abc")),
    row(lambda: read({"k": None}), "tensors['l']['k']", "NoneType"),
    row(lambda: both(GOOD, None), "tensors['m']", "NoneType"),
    row(lambda: kvspec.RankCache.from_tensors(
        engine(), RankId(), {"l": GOOD, "draft": GOOD}, "BNHC"), "tensors", "draft"),
    row(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), None, "BNHC"),  # type: ignore[arg-type]
        "tensors", "NoneType"),
    row(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), [GOOD], "BNHC"),  # type: ignore[arg-type]
        "tensors", "list"),
    *(row(lambda a=a: read(GOOD, a), "axes", a)
      for a in ("BNHX", "LBHN", "bnhc", "BBHC", 3, "CBNH", "B(N)H(HC)", "BN(HC)C", "BN(CH)",
                "BN((HC))", "B(N", "BN()HC")),
    *(row(lambda n=n: read(GOOD, {"kv": "BNHC", n: "BNHC"}), "axes", n, "kv")
      for n in ("k", "nonsense", "l", 3, None)),
    row(lambda: read(np.empty((6, 4, 4, 16), object)), f"{KV}.dtype", "object"),
    row(lambda: read(z(6, 4, 4, 16, dtype=FOREIGN)), f"{KV}.dtype", FOREIGN, "order"),
    row(lambda: kvspec.RankCache.from_tensors("e", RankId(), {}, "BNHC"), "engine", "e"),  # type: ignore[arg-type]
]  # fmt: skip


def folded(shape: tuple[int, ...], axes: str) -> kvspec.RankCache:
    """Read a tensor of *shape*, of 4 heads and blocks of 4 tokens."""
    return kvspec.RankCache.from_tensors(engine(), RankId(), {"l": z(*shape)}, axes)


def one_latent(tensor: Any, axes: str) -> kvspec.RankCache:
    """Read a tensor of an MLA layer, of one unit."""
    return kvspec.RankCache.from_tensors(engine(spec=LATENT), RankId(), {"l": tensor}, axes)


FOLDED = [
    row(lambda: folded((6, 4, 60), "BN(HC)"), SHAPE, (6, 4, 60), "(HC)"),
    row(lambda: folded((6, 4, 128), "BN(HC)"), SHAPE, (6, 4, 128), "(HC)"),
    row(lambda: folded((6, 4, 128), "BN(KHC)"), SHAPE, (6, 4, 128), "(KHC)"),
    row(lambda: folded((22, 4, 16), "(BN)HC"), SHAPE, (22, 4, 16), "(BN)"),
    row(lambda: folded((0, 4, 16), "(BN)HC"), SHAPE, (0, 4, 16), "(BN)"),
    row(lambda: latent(z(24, 8), "BNC"), SHAPE, (24, 8), 3),
    row(lambda: folded((24, 64), "BN(HC)"), SHAPE, (24, 64), 3),
    row(lambda: one_latent(z(6, 33), "B(NHC)"), SHAPE, (6, 33), "(NHC)"),
    row(lambda: folded((24, 4, 2, 8), "(BN)HC"), SHAPE, (24, 4, 2, 8), 3),
]  # fmt: skip
"""Several axes in one dimension. GOOD has content of 32 bytes, keys and values packed."""


@pytest.mark.parametrize("axes", [None, {}, {"h": "BNHC"}])
def test_error_about_missing_axes_names_the_choices(axes: Any) -> None:
    """A shape alone does not show them: with as many heads as rows, several orders fit."""
    groups = [
        kvspec.KVCacheGroup(name=name, layers=[layer], spec=FULL) for name, layer in ("gl", "hm")
    ]
    described = kvspec.EngineSpec(groups=groups, layout="LKBNHC")
    tensors = {"l": z(6, 4, 4, 16), "m": z(6, 4, 4, 16)}
    error = check_rejected(
        lambda: kvspec.RankCache.from_tensors(described, RankId(), tensors, axes), "axes", axes
    )
    choices = ["KBNHC", "BNHC", "BHNC", "HBNC", "BKNHC", "BKHNC"]
    assert sorted(choices) == sorted(re.findall("'([A-Z()]+)'", error.rule))
    assert f"{KV}.shape=(6, 4, 4, 16)" in error.rule


@pytest.mark.parametrize(REJECTED, [*SHAPES, *FOLDED, *STRIDES, *OVERLAPS, *GROUPS, *NAMES])
def test_wrong_tensor_is_rejected(
    call: Callable[[], object], field: str, value: object, word: object
) -> None:
    """The field begins with the layer and the tensor."""
    check_rejected(call, field, value, word)


LEGAL: dict[str, Callable[[], kvspec.RankCache]] = {
    "the same pages": lambda: across(pages(), pages()),
    "one after the other": lambda: across(pages(), pages(6 * PAGE)),
    "apart, in other numbers": lambda: across(pages(), pages(6 * PAGE, blocks=3)),
    "side by side in a row": lambda: across(pages(0, 2 * PAGE), pages(PAGE, 2 * PAGE)),
    "shifted within a padded page": lambda: across(pages(0, 2 * PAGE), pages(16, 2 * PAGE)),
    "a smaller page": lambda: across(pages(), latents(0, PAGE), LATENT),
    "at the end of the page": lambda: across(pages(), latents(PAGE - 64, PAGE), LATENT),
    "kernel blocks": lambda: across(pages(), finer(), kernel_block_size=2),
    "kernel blocks apart": lambda: across(pages(), finer(6 * PAGE), kernel_block_size=2),
    "one block": lambda: across(pages(blocks=1), pages(16, blocks=1)),
}


@pytest.mark.parametrize("name", LEGAL)
def test_groups_may_share_memory_block_by_block(name: str) -> None:
    """Block i of one group may be inside the page of block i of the other group."""
    assert {"l", "m"} == {region.layer for region in LEGAL[name]().regions}


PLACES = st.tuples(
    st.integers(0, 40).map(lambda n: 8 * n), st.sampled_from([64, 72, 96, 128]), st.integers(1, 4)
)


@given(one=PLACES, other=PLACES, kernel=st.booleans())
def test_groups_share_no_byte_of_two_blocks(
    one: tuple[int, int, int], other: tuple[int, int, int], *, kernel: bool
) -> None:
    """If the pages are accepted, blocks with different numbers share no byte, counted by bytes."""
    (at, stride, blocks), (there, step, count) = one, other
    tensors = {"l": latents(at, stride, blocks), "m": latents(there, step, count)}
    if kernel:
        shape, strides = (2 * count, 2, 1, 8), (step // 2, 16, 16, 2)
        tensors["m"] = np.ndarray(shape, np.uint16, POOL, there, strides)
    groups = [
        kvspec.KVCacheGroup(name="g", layers=["l"], spec=LATENT),
        kvspec.KVCacheGroup(
            name="h", layers=["m"], spec=LATENT, kernel_block_size=2 if kernel else None
        ),
    ]
    halves = (range(32), range(step // 2, step // 2 + 32)) if kernel else (range(64),)
    held = [{at + i * stride + x for x in range(64)} for i in range(blocks)]
    others = [{there + j * step + x for half in halves for x in half} for j in range(count)]
    clash = any(a & b for i, a in enumerate(held) for j, b in enumerate(others) if i != j)
    same_blocks = blocks == count and (stride == step or count == 1)
    try:
        kvspec.RankCache.from_tensors(
            kvspec.EngineSpec(groups=groups, layout="LBNHC"), RankId(), tensors, "BNHC"
        )
    except kvspec.SpecError:
        assert clash or (not same_blocks and set.union(*held) & set.union(*others))
    else:
        assert not clash


def test_torch_tensor_is_rejected_like_an_array() -> None:
    """Torch counts strides in elements, and the errors count them in bytes."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 4, 4, 16, dtype=torch.bfloat16)
    table: list[tuple[Any, str, object, object]] = [
        (good.transpose(1, 2), STRIDE, (512, 32, 128, 2), "BNHC"),
        (good[:, :, :3], SHAPE, (6, 4, 3, 16), "H"),
        (good[:, :3], SHAPE, (6, 3, 4, 16), "N"),
        (good[..., :15], SHAPE, (6, 4, 4, 15), 32),
        (good[..., ::2], STRIDE, 4, 2),
        (good[..., :1].expand(good.shape), STRIDE, 0, 2),
        (good[:, :, :1].expand(good.shape), STRIDE, (512, 128, 0, 2), "BNHC"),
        (good.flatten(2), SHAPE, (6, 4, 64), 4),
    ]
    for tensor, *expected in table:
        check_rejected(partial(read, tensor), *expected)  # type: ignore[arg-type]
    check_rejected(lambda: both(good, good), "tensors", "l.k and m.k", "overlap")


@pytest.mark.parametrize(
    ("kind", "field", "value"),
    [("meta", "device", "meta"), ("sparse", "layout", "torch.sparse_coo")],
)
def test_tensor_without_dense_memory_is_rejected(kind: str, field: str, value: str) -> None:
    """A tensor without dense storage has no address to register."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 4, 4, 16, dtype=torch.bfloat16)
    tensor = good.to("meta") if kind == "meta" else good.float().to_sparse()
    check_rejected(lambda: read(tensor), f"{KV}.{field}", value, "dense")
