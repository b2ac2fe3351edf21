"""Refusals of an engine's own tensors, by their words: layer, field, value, what was wanted."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import builders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.lib.stride_tricks import as_strided
from refused import case, words

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
    """Return an engine of one group of *layers*, "l" unless given."""
    return builders.engine(spec, layers=layers or ("l",), layout=layout, **sizes)


def z(*shape: int, dtype: Any = np.uint16) -> np.ndarray[Any, Any]:
    """Return zeros; two bytes an element, as bfloat16 has, unless *dtype* is given."""
    return np.zeros(shape, dtype)


GOOD = z(6, 4, 4, 16)
"""Blocks, rows, heads, k and v of one head."""
CONV, SSM = z(6, CHANNELS, 3), z(6, 4, 2, 3, dtype=np.float32)


def read(tensor: Any, axes: Any = None, rank: Any = RankId(), **given: Any) -> kvspec.RankCache:  # noqa: B008 - frozen
    """Read *tensor* as that of layer "l", its axes said: heads are as many as rows."""
    if axes is None:
        axes = {"LBNHC": "BNHC", "LKBNHC": "KBNHC"}[given.get("layout", "LBNHC")]
    return kvspec.RankCache.from_tensors(engine(**given), rank, {"l": tensor}, axes)


def latent(tensor: Any, axes: Any = "BNC") -> kvspec.RankCache:
    """Read *tensor* as that of an MLA layer."""
    return read(tensor, axes, spec=LATENT)


def state(axes: Any = None, **tensors: Any) -> kvspec.RankCache:
    """Read a state's tensors, dimension first, the right ones unless given."""
    return read({"conv": CONV, "ssm": SSM} | tensors, axes or DS, spec=STATE, layout="LBHNC")


def both(one: Any, two: Any) -> kvspec.RankCache:
    """Read the tensors of two layers of one group."""
    return kvspec.RankCache.from_tensors(engine("l", "m"), RankId(), {"l": one, "m": two}, "BNHC")


KV, SHAPE, STRIDE = "tensors['l']['kv']", "tensors['l']['kv'].shape", "tensors['l']['kv'].stride"
ORDER = "expected strides in the order of layout {}, outermost first"
CONTENT = "expected contiguous content, {} bytes"
APART = "tensors='{} and {}': expected regions of one group that do not overlap"
ACROSS = "tensors='{} and {}': expected blocks of different groups that coincide or lie apart"
BUFFER = z(2000)
SHARED = z(9, 4, 4, 16)
POOL = z(6144)
PAGE = 4 * 4 * 16 * 2
"""Bytes of a page of `FULL`."""


def pages(at: int = 0, stride: int = PAGE, blocks: int = 6) -> Any:
    """Return pages of `FULL`, *stride* bytes apart, from byte *at* of the pool on."""
    return np.ndarray((blocks, 4, 4, 16), np.uint16, POOL, at, (stride, 128, 32, 2))


def finer(at: int = 0) -> Any:
    """Return the same pages as blocks of 2 tokens, 2 for each block of the table."""
    return np.ndarray((12, 2, 4, 16), np.uint16, POOL, at, (PAGE // 2, 128, 32, 2))


def latents(at: int = 0, stride: int = 64, blocks: int = 6) -> Any:
    """Return pages of `LATENT`."""
    return np.ndarray((blocks, 4, 1, 8), np.uint16, POOL, at, (stride, 16, 16, 2))


def across(one: Any, other: Any, spec: kvspec.LayerSpec = FULL, **given: Any) -> kvspec.RankCache:
    """Read the tensors of two layers, l and m, each of a group of its own."""
    groups = [
        kvspec.KVCacheGroup(name="g", layers=["l"], spec=FULL),
        kvspec.KVCacheGroup(name="h", layers=["m"], spec=spec, **given),
    ]
    engine = kvspec.EngineSpec(groups=groups, layout="LBNHC")
    if other.ndim == len("KBNHC"):
        other = {"k": other[0], "v": other[1]}
    return kvspec.RankCache.from_tensors(engine, RankId(), {"l": one, "m": other}, "BNHC")


def test_the_good_tensors_are_accepted() -> None:
    """What is refused below differs in one thing from what is accepted."""
    assert 2 == len(read(GOOD).regions)
    assert 1 == len(latent(z(6, 4, 8)).regions)
    assert 4 == len(state().regions)
    assert 4 == len(both(GOOD, GOOD.copy()).regions)


SHAPES = [
    case(lambda: read(z(6, 4, 64)), f"{SHAPE}=(6, 4, 64): expected 4 dimensions, BNHC"),
    case(lambda: read(z(6, 4, 4, 2, 8)), f"{SHAPE}=(6, 4, 4, 2, 8): expected 4 dimensions, BNHC"),
    case(lambda: read(z(8)), f"{SHAPE}=(8,): expected 4 dimensions, BNHC"),
    case(lambda: read(GOOD, "BNH"), f"{SHAPE}=(6, 4, 4, 16): expected 3 dimensions, BNH"),
    case(lambda: read(GOOD, "KBNHC"), f"{SHAPE}=(6, 4, 4, 16): expected 5 dimensions, KBNHC"),
    case(lambda: read(z(6, 4, 3, 16)),
         f"{SHAPE}=(6, 4, 3, 16): expected 4 units along H"),
    case(lambda: read(z(6, 3, 4, 16)),
         f"{SHAPE}=(6, 3, 4, 16): expected 4 rows along N"),
    case(lambda: read(z(6, 5, 4, 16)),
         f"{SHAPE}=(6, 5, 4, 16): expected 4 rows along N"),
    case(lambda: read(z(6, 4, 4, 15)),
         f"{SHAPE}=(6, 4, 4, 15): expected content of 32 bytes, not 30"),
    case(lambda: read(z(6, 4, 4, 16, dtype=np.uint8)),
         f"{SHAPE}=(6, 4, 4, 16): expected content of 32 bytes, not 16"),
    case(lambda: read(z(3, 6, 4, 4, 8), layout="LKBNHC"),
         f"{SHAPE}=(3, 6, 4, 4, 8): expected 2 planes along K"),
    case(lambda: read(z(1, 6, 4, 4, 8), layout="LKBNHC"),
         f"{SHAPE}=(1, 6, 4, 4, 8): expected 2 planes along K"),
    case(lambda: read(z(2, 6, 4, 4, 7), layout="LKBNHC"),
         f"{SHAPE}=(2, 6, 4, 4, 7): expected content of 16 bytes, not 14"),
    case(lambda: latent(z(6, 4, 8), None), f"{SHAPE}=(6, 4, 8): expected 4 dimensions, BNHC"),
    case(lambda: latent(z(6, 4, 7)), f"{SHAPE}=(6, 4, 7): expected content of 16 bytes, not 14"),
    case(lambda: state(conv=z(6, CHANNELS - 1, 3)),
         "tensors['l']['conv'].shape=(6, 19, 3): expected 20 units along H"),
    case(lambda: state(conv=z(6, CHANNELS, 2)),
         "tensors['l']['conv'].shape=(6, 20, 2): expected 3 rows along N"),
    case(lambda: state(ssm=z(6, 4, 2, 3)), "tensors['l']['ssm'].shape=(6, 4, 2, 3): expected "
         "content of 24 bytes, not 12"),
    case(lambda: state(ssm=z(6, 3, 2, 3, dtype=np.float32)),
         "tensors['l']['ssm'].shape=(6, 3, 2, 3): expected 4 units along H"),
    # more than the engine says is not the engine's cache either
    case(lambda: read(z(6, 4, 5, 16)), f"{SHAPE}=(6, 4, 5, 16): expected 4 units along H"),
    case(lambda: read(GOOD, rank=RankId(tp=1), tp_size=2),
         f"{SHAPE}=(6, 4, 4, 16): expected 2 units along H"),
    case(lambda: read(z(6, 4, 4, 17)),
         f"{SHAPE}=(6, 4, 4, 17): expected content of 32 bytes, not 34"),
    case(lambda: read(z(6, 4, 4, 16, dtype=np.float32)),
         f"{SHAPE}=(6, 4, 4, 16): expected content of 32 bytes, not 64"),
    case(lambda: latent(z(6, 4, 8, dtype=np.float32)),
         f"{SHAPE}=(6, 4, 8): expected content of 16 bytes, not 32"),
    case(lambda: read(z(2, 6, 4, 1, 8), "KBNHC", spec=LATENT, layout="LKBNHC"),
         f"{SHAPE}=(2, 6, 4, 1, 8): expected 1 plane along K"),
    case(lambda: state(conv=z(6, CHANNELS + 1, 3)),
         "tensors['l']['conv'].shape=(6, 21, 3): expected 20 units along H"),
    case(lambda: state(conv=z(6, CHANNELS, 4)),
         "tensors['l']['conv'].shape=(6, 20, 4): expected 3 rows along N"),
    case(lambda: state(conv=z(6, CHANNELS, 3, dtype=np.float32)),
         "tensors['l']['conv'].shape=(6, 20, 3): expected content of 2 bytes, not 4"),
    case(lambda: state(ssm=z(6, 4, 2, 4, dtype=np.float32)),
         "tensors['l']['ssm'].shape=(6, 4, 2, 4): expected content of 24 bytes, not 32"),
    case(lambda: read(z(0, 4, 4, 16)), f"{SHAPE}=(0, 4, 4, 16): expected at least 1 block along B"),
    case(lambda: read(z(6, 4, 0, 16)), f"{SHAPE}=(6, 4, 0, 16): expected at least 1 unit along H"),
]  # fmt: skip

STRIDES = [
    case(lambda: read(z(6, 4, 4, 16).swapaxes(1, 2)),
         f"{STRIDE}=(512, 32, 128, 2): {ORDER.format('BNHC')}"),
    case(lambda: read(GOOD, "BHNC"), f"{STRIDE}=(512, 128, 32, 2): {ORDER.format('BNHC')}"),
    case(lambda: read(GOOD, "NBHC"), f"{STRIDE}=(512, 128, 32, 2): {ORDER.format('BNHC')}"),
    case(lambda: read(z(6, 2, 4, 4, 8), "BKNHC", layout="LKBNHC"),
         f"{STRIDE}=(512, 256, 64, 16, 2): {ORDER.format('KBNHC')}"),
    case(lambda: state({"conv": "BNH", "ssm": "BHCC"}, conv=z(6, 3, CHANNELS)),
         f"tensors['l']['conv'].stride=(120, 40, 2): {ORDER.format('BHNC')}"),
    case(lambda: read(z(6, 4, 4, 32)[..., ::2]), f"{STRIDE}=4: {CONTENT.format(2)}"),
    case(lambda: read(GOOD[..., ::-1]), f"{STRIDE}=-2: {CONTENT.format(2)}"),
    case(lambda: read(as_strided(BUFFER, (6, 4, 4, 16), (512, 128, 32, 0))),
         f"{STRIDE}=0: {CONTENT.format(2)}"),
    case(lambda: read(GOOD[::-1]), f"{STRIDE}=(-512, 128, 32, 2): {ORDER.format('BNHC')}"),
    case(lambda: read(GOOD[:, :, ::-1]), f"{STRIDE}=(512, 128, -32, 2): {ORDER.format('BNHC')}"),
    case(lambda: read(np.broadcast_to(GOOD[:1], GOOD.shape)),
         f"{STRIDE}=(0, 128, 32, 2): {ORDER.format('BNHC')}"),
    case(lambda: read(np.broadcast_to(GOOD[:, :, :1], GOOD.shape)),
         f"{STRIDE}=(512, 128, 0, 2): {ORDER.format('BNHC')}"),
    case(lambda: state(ssm=z(6, 4, 3, 2, dtype=np.float32).swapaxes(2, 3)),
         f"tensors['l']['ssm'].stride=8: {CONTENT.format(4)}"),
]  # fmt: skip

OVERLAPS = [
    case(lambda: both(GOOD, GOOD), APART.format("l.k", "m.k")),
    case(lambda: both(SHARED[:6], SHARED[3:]), APART.format("l.k", "m.k")),
    case(lambda: read({"k": GOOD[..., :8], "v": GOOD[..., :8]}), APART.format("l.k", "l.v")),
    case(lambda: read({"k": GOOD[..., :8], "v": GOOD[..., 4:12]}), APART.format("l.k", "l.v")),
    case(lambda: read(as_strided(BUFFER, (6, 4, 4, 16), (256, 128, 32, 2))),
         APART.format("l.k", "l.k")),
    case(lambda: read(as_strided(BUFFER, (6, 4, 4, 16), (512, 128, 16, 2))),
         APART.format("l.k", "l.v")),
    case(lambda: latent(as_strided(BUFFER, (6, 4, 8), (64, 8, 2))),
         APART.format("l.latent", "l.latent")),
    case(lambda: latent(as_strided(BUFFER, (6, 4, 8), (32, 16, 2))),
         APART.format("l.latent", "l.latent")),
    case(lambda: read({"kv": GOOD, "k": z(6, 4, 4, 8)}),
         "tensors['l']=['k', 'kv']: expected each part once"),
    # the end of a block of m is the beginning of the next one of l
    case(lambda: kvspec.RankCache.from_tensors(
        engine("l", "m", spec=LATENT), RankId(), {"l": latents(0, 128), "m": latents(96, 128)}),
         APART.format("l.latent", "m.latent")),
]  # fmt: skip

GROUPS = [
    case(lambda: across(pages(), pages(16)), ACROSS.format("l.k", "m.v")),
    case(lambda: across(pages(), pages(PAGE // 2)), ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(), pages(PAGE)), ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(5 * PAGE), pages()), ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(), pages(0, 2 * PAGE, 3)), ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(), pages(blocks=5)), ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(), pages(blocks=1)), ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(), latents(), LATENT), ACROSS.format("l.k", "m.latent")),
    case(lambda: across(pages(), latents(PAGE - 32, PAGE), LATENT),
         ACROSS.format("l.k", "m.latent")),
    case(lambda: across(pages(), finer(PAGE // 2), kernel_block_size=2),
         ACROSS.format("l.k", "m.k")),
    case(lambda: across(pages(), pages(blocks=12), kernel_block_size=2),
         "tensors['m']['kv'].shape=(12, 4, 4, 16): expected 2 rows along N"),
    case(lambda: across(pages(), POOL[:1536].reshape(2, 6, 4, 4, 8), layout="LKBNHC"),
         ACROSS.format("l.k", "m.k")),
]  # fmt: skip

NAMES = [
    case(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), {"m": GOOD}),
         "tensors=['m']: expected a tensor for layer 'l'"),
    case(lambda: kvspec.RankCache.from_tensors(engine("l", "n"), RankId(), {"l": GOOD}),
         "tensors=['l']: expected a tensor for layer 'n'"),
    case(lambda: read({"q": z(6, 4, 4, 8)}), "tensors['l']='q': expected one of k, v, kv"),
    case(lambda: read({"k": z(6, 4, 4, 8)}), "tensors['l']=['k']: expected a tensor for v"),
    case(lambda: read({}), "tensors['l']=[]: expected a tensor for k, v"),
    case(lambda: read({"conv": CONV}, DS, spec=STATE, layout="LBHNC"),
         "tensors['l']=['conv']: expected a tensor for ssm"),
    case(lambda: state(gate=CONV),
         "tensors['l']='gate': expected one of conv_x, conv_b, conv_c, ssm, conv"),
    case(lambda: read(GOOD, rank=RankId(tp=1)),
         "rank=RankId(pp=0, pcp=0, tp=1): expected pp < 1, pcp < 1, tp < 1, none negative"),
    case(lambda: read(GOOD, rank=0), "rank=0: expected a RankId"),
    *(case(lambda v=v: read(v), f"tensors['l']={type(v).__name__!r}: expected a torch tensor or a "
           "numpy array") for v in (None, 3, "x", [[1]], b"abc")),
    case(lambda: read({"k": None}), "tensors['l']['k']='NoneType': expected a torch tensor or a "
         "numpy array"),
    case(lambda: both(GOOD, None), "tensors['m']='NoneType': expected a torch tensor or a numpy "
         "array"),
    case(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), {"l": GOOD, "draft": GOOD}),
         "tensors='draft': expected layers that tp0 has"),
    case(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), None),  # type: ignore[arg-type]
         "tensors='NoneType': expected a mapping from layer names to tensors"),
    case(lambda: kvspec.RankCache.from_tensors(engine(), RankId(), [GOOD]),  # type: ignore[arg-type]
         "tensors='list': expected a mapping from layer names to tensors"),
    *(case(lambda a=a: read(GOOD, a),
           f"axes={a!r}: expected the letters B, K, H, N, P, C of the dimensions, each once (C: the "
           "last ones), those of one dimension in brackets")
      for a in ("BNHX", "LBHN", "bnhc", "BBHC", 3, "CBNH", "B(N)H(HC)", "BN(HC)C", "BN(CH)",
                "BN((HC))", "B(N", "BN()HC")),
    *(case(lambda n=n: read(GOOD, {"kv": "BNHC", n: "BNHC"}),
           f"axes={n!r}: expected names of the tensors given, or of groups: kv, g")
      for n in ("k", "nonsense", "l", 3, None)),
    case(lambda: read(np.empty((6, 4, 4, 16), object)),
         f"{KV}.dtype='object': expected plain bytes, such as bfloat16"),
    case(lambda: read(z(6, 4, 4, 16, dtype=">u2" if sys.byteorder == "little" else "<u2")),
         f"{KV}.dtype='{'>' if sys.byteorder == 'little' else '<'}u2': expected this machine's order"
         " of bytes"),
    case(lambda: kvspec.RankCache.from_tensors("e", RankId(), {}),  # type: ignore[arg-type]
         "engine='e': expected an EngineSpec"),
]  # fmt: skip


def folded(shape: tuple[int, ...], axes: str | None) -> kvspec.RankCache:
    """Read a tensor of *shape*, of 4 heads and blocks of 4 tokens."""
    return kvspec.RankCache.from_tensors(engine(), RankId(), {"l": z(*shape)}, axes)


def one_latent(tensor: Any, axes: str | None) -> kvspec.RankCache:
    """Read a tensor of an MLA layer, of one unit."""
    return kvspec.RankCache.from_tensors(engine(spec=LATENT), RankId(), {"l": tensor}, axes)


FOLDED = [
    case(lambda: folded((6, 4, 60), "BN(HC)"),
         f"{SHAPE}=(6, 4, 60): expected 4 units x 32 bytes along (HC)"),
    case(lambda: folded((6, 4, 128), "BN(HC)"),
         f"{SHAPE}=(6, 4, 128): expected 4 units x 32 bytes along (HC)"),
    case(lambda: folded((6, 4, 128), "BN(KHC)"),
         f"{SHAPE}=(6, 4, 128): expected 2 planes x 4 units x 16 bytes along (KHC)"),
    case(lambda: folded((22, 4, 16), "(BN)HC"),
         f"{SHAPE}=(22, 4, 16): expected whole blocks of 4 rows along (BN)"),
    case(lambda: folded((0, 4, 16), "(BN)HC"),
         f"{SHAPE}=(0, 4, 16): expected whole blocks of 4 rows along (BN)"),
    case(lambda: latent(z(24, 8), "BNC"), f"{SHAPE}=(24, 8): expected 3 dimensions, BNC"),
    case(lambda: folded((24, 64), "BN(HC)"), f"{SHAPE}=(24, 64): expected 3 dimensions, BN(HC)"),
    case(lambda: folded((6, 4, 64), None),
         f"axes=None: pass 'BN(HC)' or 'BH(NC)' or 'BN(KHC)' or 'BH(KNC)', because all fit {SHAPE}="
         "(6, 4, 64)"),
    case(lambda: folded((24, 64), None),
         f"axes=None: pass '(BN)(HC)' or '(BH)(NC)' or '(HB)(NC)' or '(BN)(KHC)' or "
         f"'(BH)(KNC)', because all fit {SHAPE}=(24, 64)"),
    case(lambda: one_latent(z(24, 8), None),
         f"axes=None: pass '(BN)C', because it fits {SHAPE}=(24, 8)"),
    case(lambda: one_latent(z(6, 33), "B(NHC)"),
         f"{SHAPE}=(6, 33): expected 4 rows x 1 unit x 16 bytes along (NHC)"),
    case(lambda: folded((24, 4, 2, 8), "(BN)HC"),
         f"{SHAPE}=(24, 4, 2, 8): expected 3 dimensions, (BN)HC"),
]  # fmt: skip
"""Several axes in one dimension; GOOD has content of 32 bytes, keys and values packed."""


@pytest.mark.parametrize(
    ("call", "wanted"), [*SHAPES, *FOLDED, *STRIDES, *OVERLAPS, *GROUPS, *NAMES]
)
def test_a_wrong_tensor_is_refused_in_words(call: Callable[[], object], wanted: str) -> None:
    """Layer, field, value and what was wanted are told, in these words."""
    assert wanted == words(call)


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
def test_groups_may_share_blocks(name: str) -> None:
    """Block i of one group within the page of block i of the other, or apart: it is accepted."""
    assert {"l", "m"} == {region.layer for region in LEGAL[name]().regions}


PLACES = st.tuples(
    st.integers(0, 40).map(lambda n: 8 * n), st.sampled_from([64, 72, 96, 128]), st.integers(1, 4)
)


@given(one=PLACES, other=PLACES, kernel=st.booleans())
def test_groups_share_no_byte_of_two_blocks(
    one: tuple[int, int, int], other: tuple[int, int, int], *, kernel: bool
) -> None:
    """Where pages are accepted, block i of one and j of the other share none; counted by bytes."""
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
            kvspec.EngineSpec(groups=groups, layout="LBNHC"), RankId(), tensors
        )
    except kvspec.SpecError:
        assert clash or (not same_blocks and set.union(*held) & set.union(*others))
    else:
        assert not clash
        assert same_blocks or not set.union(*held) & set.union(*others)


def test_a_torch_tensor_is_refused_in_the_same_words() -> None:
    """Shapes and strides of torch, counted in elements there, are told in bytes."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 4, 4, 16, dtype=torch.bfloat16)
    table = [
        (good.transpose(1, 2), f"{STRIDE}=(512, 32, 128, 2): {ORDER.format('BNHC')}"),
        (good[:, :, :3], f"{SHAPE}=(6, 4, 3, 16): expected 4 units along H"),
        (good[:, :3], f"{SHAPE}=(6, 3, 4, 16): expected 4 rows along N"),
        (good[..., :15], f"{SHAPE}=(6, 4, 4, 15): expected content of 32 bytes, not 30"),
        (good[..., ::2], f"{STRIDE}=4: {CONTENT.format(2)}"),
        (good[..., :1].expand(good.shape), f"{STRIDE}=0: {CONTENT.format(2)}"),
        (good[:, :, :1].expand(good.shape), f"{STRIDE}=(512, 128, 0, 2): {ORDER.format('BNHC')}"),
        (good.flatten(2), f"{SHAPE}=(6, 4, 64): expected 4 dimensions, BNHC"),
    ]
    assert [wanted for _, wanted in table] == [words(lambda t=t: read(t)) for t, _ in table]
    assert APART.format("l.k", "m.k") == words(lambda: both(good, good))


@pytest.mark.parametrize(
    ("kind", "told"), [("meta", "device='meta'"), ("sparse", "layout='torch.sparse_coo'")]
)
def test_a_tensor_without_memory_is_refused(kind: str, told: str) -> None:
    """A tensor that has no dense storage has no address to register."""
    torch = pytest.importorskip("torch")
    good = torch.zeros(6, 4, 4, 16, dtype=torch.bfloat16)
    tensor = good.to("meta") if kind == "meta" else good.float().to_sparse()
    wanted = f"{KV}.{told}: expected a dense tensor on a CPU or a GPU"
    assert wanted == words(lambda: read(tensor))
