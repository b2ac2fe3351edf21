"""Refusals of specs, parts and parallel sizes, by their words: field, value, what was wanted."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from functools import cached_property
from typing import Any

import attrs
import numpy as np
import pytest
from refused import words

import kvspec
from kvspec.ownership.sharding import even_sharding
from kvspec.specs import AttentionSpec

GQA: dict[str, Any] = {
    "block_size": 4, "total_num_kv_heads": 4, "head_size": 8, "dtype": "bfloat16",
}  # fmt: skip
MLA: dict[str, Any] = {"block_size": 4, "head_size": 8, "dtype": "bfloat16"}
CONV: dict[str, Any] = {"conv_kernel": 4, "dtype": "bfloat16"}
MAMBA1 = CONV | {"intermediate_size": 4, "state_size": 2}
MAMBA2 = CONV | {"num_heads": 4, "head_dim": 2, "n_groups": 2, "state_size": 2}
DELTA = CONV | {"num_k_heads": 2, "num_v_heads": 4, "head_k_dim": 2, "head_v_dim": 2}
STATE: dict[str, Any] = {"name": "p", "units": 4, "states": 1, "content_bytes": 1}
FULL = kvspec.FullAttentionSpec(**GQA)
WINDOW = kvspec.SlidingWindowSpec(**GQA, sliding_window=8)
OPAQUE = kvspec.MambaSpec.replicated_state(state_bytes=4)
PART = kvspec.Part(**STATE, tokens_per_state=0)
UNIFORM = kvspec.UniformTypeKVCacheSpecs(specs={"a": FULL})
DTYPES = (
    "expected one of float64, int64, float32, int32, bfloat16, float16, int16, float8_e4m3fn, "
    "float8_e4m3fnuz, float8_e5m2, float8_e5m2fnuz, float8_e8m0fnu, int8, uint8, bool"
)

LEAST = {
    "extra_retained_tokens": 0, "num_speculative_tokens": 0, "tokens_per_state of a part": 0,
    "conv_kernel": 2,
}  # fmt: skip
"""The least value of a size, where it is not 1."""

MAKERS: list[tuple[Callable[..., Any], dict[str, Any]]] = [
    (kvspec.FullAttentionSpec, GQA),
    (kvspec.CrossAttentionSpec, GQA),
    (kvspec.SlidingWindowSpec, GQA | {"sliding_window": 8}),
    (kvspec.ChunkedLocalAttentionSpec, GQA | {"attention_chunk_size": 8}),
    (kvspec.MLAAttentionSpec, MLA),
    (kvspec.SlidingWindowMLASpec, MLA | {"sliding_window": 8}),
    (kvspec.MambaSpec.mamba1, MAMBA1),
    (kvspec.MambaSpec.mamba2, MAMBA2),
    (kvspec.MambaSpec.gated_delta_net, DELTA),
    (kvspec.MambaSpec.short_conv, CONV | {"conv_dim": 4}),
    (kvspec.MambaSpec.replicated_state, {"state_bytes": 4}),
    (kvspec.ParallelConfig, {}),
]
OPTIONAL = {
    "head_size_v",
    "state_content_bytes",
    "page_size_padded",
    "page_block_size",
    "elements_per_scale",
}
SIZES = [
    (make, base, name)
    for make, base in MAKERS
    for name, at in inspect.signature(make).parameters.items()
    if str(at.annotation) in {"int", "int | None"}
]


def test_the_sizes_are_all_there() -> None:
    """Every size field of every kind of layer is tried, and five of a parallel config."""
    assert 90 == len(SIZES)
    named = {name for _, _, name in SIZES}
    assert set(LEAST) - {"tokens_per_state of a part"} <= named
    assert OPTIONAL <= named
    for make, base in MAKERS:
        make(**base)


@pytest.mark.parametrize(("make", "base", "name"), SIZES)
def test_a_size_is_a_plain_int(make: Callable[..., Any], base: dict[str, Any], name: str) -> None:
    """Zero, negative, bool, float, None and text are refused by field, value and least value."""
    least = LEAST.get(name, 1)
    bad = [least - 1, -1, True, 4.0, "4", *([] if name in OPTIONAL else [None])]
    wanted = [f"{name}={value!r}: expected an int >= {least}" for value in bad]
    assert wanted == [words(lambda v=value: make(**base | {name: v})) for value in bad]


@pytest.mark.parametrize(
    "name", ["units", "states", "content_bytes", "granularity", "tokens_per_state"]
)
def test_a_size_of_a_part_is_a_plain_int(name: str) -> None:
    """A part's sizes are refused by the part's name too."""
    least = LEAST.get(f"{name} of a part", 1)
    bad = [least - 1, -1, True, 4.0, None, "4"]
    wanted = [f"p.{name}={value!r}: expected an int >= {least}" for value in bad]
    assert wanted == [words(lambda v=value: kvspec.Part(**STATE | {name: v})) for value in bad]


@pytest.mark.parametrize(
    "value", ["bf16", "BFloat16", "complex64", "", None, 4, True, 2.5, b"float16", np.float32]
)
def test_a_dtype_is_a_known_name(value: Any) -> None:
    """An unknown dtype is refused with every name that is known."""
    assert f"dtype={value!r}: {DTYPES}" == words(lambda: attrs.evolve(FULL, dtype=value))
    for make, base in ((kvspec.MambaSpec.mamba1, MAMBA1), (kvspec.MambaSpec.mamba2, MAMBA2)):
        wanted = f"dtype={value!r}: {DTYPES}"
        assert wanted == words(lambda m=make, b=base: m(**b | {"dtype": value}))


@pytest.mark.parametrize("value", ["bf16", 4, True, ""])
def test_a_state_s_own_dtype_is_a_known_name(value: Any) -> None:
    """`ssm_dtype` is refused by its own name."""
    wanted = f"ssm_dtype={value!r}: {DTYPES}"
    assert wanted == words(lambda: kvspec.MambaSpec.mamba1(**MAMBA1, ssm_dtype=value))


@pytest.mark.parametrize(
    ("rank", "size", "wanted"),
    [
        (2, 2, "rank=2: expected less than size=2"),
        (7, 2, "rank=7: expected less than size=2"),
        (-1, 2, "rank=-1: expected an int >= 0"),
        (True, 2, "rank=True: expected an int >= 0"),
        (1.0, 2, "rank=1.0: expected an int >= 0"),
        (None, 2, "rank=None: expected an int >= 0"),
        (0, 0, "size=0: expected an int >= 1"),
        (0, True, "size=True: expected an int >= 1"),
        (0, 2.0, "size=2.0: expected an int >= 1"),
    ],
)
@pytest.mark.parametrize("spec", [FULL, OPAQUE, UNIFORM])
def test_a_rank_lies_inside_its_size(
    spec: kvspec.LayerSpec, rank: Any, size: Any, wanted: str
) -> None:
    """A rank outside its size is refused, for slices and for page sizes."""
    named = wanted.replace("rank", "tp_rank").replace("size", "tp_size")
    assert named == words(lambda: spec.page_size_bytes(tp_rank=rank, tp_size=size))
    named = wanted.replace("rank", "local_tp_rank").replace("size", "local_tp_size")
    assert named == words(lambda: spec.get_tp_transfer_slices(rank, size, 1))


BAD_SLICES: list[Any] = [
    ({"remote_tp_size": 0}, "remote_tp_size=0: expected an int >= 1"),
    ({"remote_tp_size": True}, "remote_tp_size=True: expected an int >= 1"),
    ({"role": "reader"}, "role='reader': expected 'consumer' or 'producer'"),
    ({"role": None}, "role=None: expected 'consumer' or 'producer'"),
    ({"role": ["consumer"]}, "role=['consumer']: expected 'consumer' or 'producer'"),
    (
        {"replica_policy": "all"},
        "replica_policy='all': expected one of spread, first, stripe, nearest",
    ),
    (
        {"replica_policy": None},
        "replica_policy=None: expected one of spread, first, stripe, nearest",
    ),
    (
        {"replica_policy": ["first"]},
        "replica_policy=['first']: expected one of spread, first, stripe, nearest",
    ),
]


@pytest.mark.parametrize(("given", "wanted"), BAD_SLICES)
def test_a_role_and_a_policy_are_known_names(given: dict[str, Any], wanted: str) -> None:
    """Whatever selects slices is refused by name, value and what it may be."""
    sizes: dict[str, Any] = {"local_tp_rank": 1, "local_tp_size": 2, "remote_tp_size": 16}
    assert wanted == words(lambda: FULL.get_tp_transfer_slices(**sizes | given))


@pytest.mark.parametrize(
    "spec", [FULL, WINDOW, kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=3),
             kvspec.SlidingWindowMLASpec(**MLA, sliding_window=3), OPAQUE, UNIFORM],
)  # fmt: skip
def test_a_number_of_tokens_is_a_plain_int(spec: kvspec.LayerSpec) -> None:
    """Negative, bool, float, None and text are no number of tokens."""
    bad: list[Any] = [-1, True, 1.0, None, "3"]
    wanted = [f"num_tokens={value!r}: expected an int >= 0" for value in bad]
    assert wanted == [words(lambda v=value: spec.live_tokens(v)) for value in bad]


def uniform(*specs: Any, names: tuple[Any, ...] = ("a", "b")) -> object:
    """Return a uniform-type group of *specs*."""
    return kvspec.UniformTypeKVCacheSpecs(specs=dict(zip(names, specs, strict=False)))


def state(*parts: Any) -> object:
    """Return a state of *parts*."""
    return kvspec.MambaSpec(state_parts=parts)


REFUSED: list[Any] = [
    # parts
    (lambda: kvspec.Part(**STATE, granularity=3), "p.units=4: expected a multiple of 3"),
    (state, "state_parts=(): expected at least one part"),
    (lambda: state(attrs.evolve(PART, tokens_per_state=2)),
     "p.tokens_per_state=2: expected 0, because the rows of a state are not tokens"),
    # rows and pages
    (lambda: attrs.evolve(FULL, tokens_per_state=3),
     "block_size=4: expected a multiple of tokens_per_state=3"),
    (lambda: attrs.evolve(FULL, page_size_padded=511).page_size_bytes(),
     "page_size_padded=511: expected at least the 512 bytes of the page"),
    (lambda: attrs.evolve(FULL, page_size_padded=255).page_size_bytes(1, 2),
     "page_size_padded=255: expected at least the 256 bytes of the page"),
    (lambda: attrs.evolve(OPAQUE, page_size_padded=3).page_size_bytes(),
     "page_size_padded=3: expected at least the 4 bytes of the page"),
    # uniform-type groups
    (uniform, "specs={}: expected at least one layer"),
    (lambda: uniform(FULL, "x"), "specs['b']='x': expected a FullAttentionSpec, as a has"),
    (lambda: uniform(FULL, WINDOW), f"specs['b']={WINDOW!r}: expected a FullAttentionSpec, as a has"),
    (lambda: uniform(FULL, attrs.evolve(FULL, block_size=8)),
     "specs['b'].block_size=8: expected 4, as a has"),
    (lambda: uniform(WINDOW, attrs.evolve(WINDOW, sliding_window=9)),
     "specs['b'].sliding_window=9: expected 8, as a has"),
    (lambda: uniform(WINDOW, attrs.evolve(WINDOW, extra_retained_tokens=1)),
     "specs['b'].extra_retained_tokens=1: expected 0, as a has"),
    (lambda: UNIFORM.of_layer("z"), "layer='z': expected one of a"),
    # shardings
    (lambda: even_sharding(4, 2, 3), "units=4: expected a multiple of granularity=3"),
    # names, types and sizes of what is given by hand
    (lambda: kvspec.Part(**STATE | {"name": ""}), "name='': expected a non-empty str"),
    (lambda: kvspec.Part(**STATE | {"name": None}),
     "name=None: expected a non-empty str"),
    (lambda: state(PART, PART),
     "state_parts=('p', 'p'): expected parts with different names"),
    (lambda: state("p"), "state_parts='p': expected a Part"),
    (lambda: kvspec.MambaSpec(state_parts=None),  # type: ignore[arg-type]
     "state_parts=None: expected a sequence of Parts"),
    (lambda: uniform("x"),
     "specs['a']='x': expected a spec of a kind of layer"),
    (lambda: uniform(UNIFORM), f"specs['a']={UNIFORM!r}: expected a spec of one layer"),
    (lambda: uniform(FULL, names=("",)), "specs='': expected layer names"),
    (lambda: uniform(FULL, names=(1,)), "specs=1: expected layer names"),
    (lambda: kvspec.UniformTypeKVCacheSpecs(specs=None),  # type: ignore[arg-type]
     "specs=None: expected a mapping from layer names to specs"),
    (lambda: even_sharding(4, 0), "tp_size=0: expected an int >= 1"),
    (lambda: even_sharding(0, 1),
     "units=0: expected an int >= 1"),
    (lambda: even_sharding(4, 2, 0),
     "granularity=0: expected an int >= 1"),
    (lambda: even_sharding(4.0, 2),  # type: ignore[arg-type]
     "units=4.0: expected an int >= 1"),
    (lambda: attrs.evolve(FULL, spans_heads=1), "spans_heads=1: expected True or False"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "wanted"),
    [pytest.param(*each, id=f"{i} {each[1][:40]}") for i, each in enumerate(REFUSED)],
)
def test_a_wrong_description_is_refused_in_words(call: Callable[[], object], wanted: str) -> None:
    """Field, value and what was wanted are told, in these words."""
    assert wanted == words(call)


@pytest.mark.parametrize(
    "error",
    [
        kvspec.SpecError("field", (1, "two"), "three"),
        kvspec.Mismatch("field", range(2), None, "because"),
        kvspec.MismatchError([kvspec.Mismatch("a", 1, 2, "x"), kvspec.Mismatch("b", 3, 4, "y")]),
        kvspec.WireError("groups[0].name", b"\xff", "text"),
        kvspec.TransferError("lost", state=kvspec.TransferState.BUG),
        kvspec.TransferError(
            "lost", rank=kvspec.RankId(tp=3), request="r", state=kvspec.TransferState.PEER_LOST
        ),
    ],
)
def test_errors_survive_a_pickle(error: Any) -> None:
    """Every error crosses a process boundary with its text and its fields."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(error) is type(again)
    assert str(error) == str(again)
    assert vars(error) == vars(again) if isinstance(error, Exception) else error == again


@pytest.mark.parametrize(
    ("error", "wanted"),
    [
        (kvspec.WireError("groups[0]", 3, "a str"), "groups[0]: got 3, expected a str"),
        (kvspec.TransferError("lost", state=kvspec.TransferState.BUG), "lost (state=bug)"),
        (kvspec.TransferError("lost", rank=kvspec.RankId(tp=3), request="r",
                              state=kvspec.TransferState.PEER_LOST),
         "lost (rank=tp3, request=r, state=peer_lost)"),
        (kvspec.MismatchError([kvspec.Mismatch("a", 1, 2, "x"), kvspec.Mismatch("b", 3, 4, "y")]),
         "a: producer 1, consumer 2 (x)\nb: producer 3, consumer 4 (y)"),
    ],
)  # fmt: skip
def test_errors_say_what_was_wrong(error: Exception, wanted: str) -> None:
    """Path, value, rank, request and state are in the text; every mismatch has its line."""
    assert wanted == str(error)


def test_spec_errors_are_value_errors() -> None:
    """A caller's impossible description is a `ValueError` too; the other faults are not."""
    assert issubclass(kvspec.SpecError, ValueError)
    assert issubclass(kvspec.SpecError, kvspec.KVSpecError)
    for other in (kvspec.MismatchError, kvspec.WireError, kvspec.TransferError):
        assert issubclass(other, kvspec.KVSpecError)
        assert not issubclass(other, ValueError)


class IndexerSpec(AttentionSpec):
    """Keys of an index, each of a size of its own: a kind that packs nothing."""

    @cached_property
    def parts(self) -> tuple[kvspec.Part, ...]:
        """The index keys, and their scales."""
        return (
            self._part("index", 1, self.head_size, self.dtype),
            self._part("index_scale", 1, 4, "float32", "index_scale"),
        )


def test_what_a_kind_would_ignore_is_refused() -> None:
    """Packed content and an order of the page, of a kind whose parts know neither."""
    given: dict[str, Any] = {"block_size": 4, "head_size": 8, "dtype": "uint8"}
    assert [8, 4] == [part.content_bytes for part in IndexerSpec(**given).parts]
    own = "index, index_scale of IndexerSpec have their own sizes"
    assert f"state_content_bytes=12: expected None, because {own}" == words(
        lambda: IndexerSpec(**given, state_content_bytes=12)
    )
    told = "plain, because the page consists of the parts index, index_scale"
    assert f"page_format='opaque:x': expected {told}" == words(
        lambda: IndexerSpec(**given, page_format="opaque:x")
    )
