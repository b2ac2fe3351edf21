"""Errors of specs, parts and parallel sizes, and the errors themselves."""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

import attrs
import numpy as np
import pytest
from refused import REJECTED, check_rejected, check_values, has_in_order, row

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


def test_sizes_are_complete() -> None:
    """`SIZES` has all size fields of each kind of layer, and five of a parallel config."""
    assert 90 == len(SIZES)
    names = {name for _, _, name in SIZES}
    assert set(LEAST) - {"tokens_per_state of a part"} <= names
    assert OPTIONAL <= names
    for make, base in MAKERS:
        make(**base)


@pytest.mark.parametrize(("make", "base", "name"), SIZES)
def test_size_must_be_a_plain_int(
    make: Callable[..., Any], base: dict[str, Any], name: str
) -> None:
    """Zero, negative, bool, float, None and text are rejected, and the error has the least size."""
    least = LEAST.get(name, 1)
    bad = [least - 1, -1, True, 4.0, "4", *([] if name in OPTIONAL else [None])]
    check_values(lambda value: make(**base | {name: value}), name, bad, least)


@pytest.mark.parametrize(
    "name", ["units", "states", "content_bytes", "granularity", "tokens_per_state"]
)
def test_size_of_a_part_must_be_a_plain_int(name: str) -> None:
    """The field begins with the name of the part."""
    least = LEAST.get(f"{name} of a part", 1)
    bad = [least - 1, -1, True, 4.0, None, "4"]
    check_values(lambda value: kvspec.Part(**STATE | {name: value}), f"p.{name}", bad, least)


@pytest.mark.parametrize(
    "value", ["bf16", "BFloat16", "complex64", "", None, 4, True, 2.5, b"float16", np.float32]
)
def test_dtype_must_be_a_known_name(value: Any) -> None:
    """The error lists the known names."""
    error = check_rejected(lambda: attrs.evolve(FULL, dtype=value), "dtype", value)
    assert all(name in error.expected for name in ("float64", "bfloat16", "float8_e4m3fn", "bool"))
    for make, base in ((kvspec.MambaSpec.mamba1, MAMBA1), (kvspec.MambaSpec.mamba2, MAMBA2)):
        check_rejected(partial(make, **base | {"dtype": value}), "dtype", value)


@pytest.mark.parametrize("value", ["bf16", 4, True, ""])
def test_ssm_dtype_must_be_a_known_name(value: Any) -> None:
    """The error names `ssm_dtype`, not `dtype`."""
    call = partial(kvspec.MambaSpec.mamba1, **MAMBA1, ssm_dtype=value)
    check_rejected(call, "ssm_dtype", value, "float32")


@pytest.mark.parametrize(
    ("rank", "size", "field", "word"),
    [
        (2, 2, "rank", 2),
        (7, 2, "rank", 2),
        (-1, 2, "rank", 0),
        (True, 2, "rank", 0),
        (1.0, 2, "rank", 0),
        (None, 2, "rank", 0),
        (0, 0, "size", 1),
        (0, True, "size", 1),
        (0, 2.0, "size", 1),
    ],
)
@pytest.mark.parametrize("spec", [FULL, OPAQUE, UNIFORM])
def test_rank_must_be_less_than_its_size(
    spec: kvspec.LayerSpec, rank: Any, size: Any, field: str, word: int
) -> None:
    """Slices and page sizes have the same rule."""
    value = {"rank": rank, "size": size}[field]
    call = partial(spec.page_size_bytes, tp_rank=rank, tp_size=size)
    check_rejected(call, f"tp_{field}", value, word)
    call = partial(spec.get_tp_transfer_slices, rank, size, 1)
    check_rejected(call, f"local_tp_{field}", value, word)


BAD_SLICES: list[tuple[str, Any, object]] = [
    ("remote_tp_size", 0, 1),
    ("remote_tp_size", True, 1),
    ("role", "reader", "consumer"),
    ("role", None, "consumer"),
    ("role", ["consumer"], "consumer"),
    ("replica_policy", "all", "nearest"),
    ("replica_policy", None, "nearest"),
    ("replica_policy", ["first"], "nearest"),
]


@pytest.mark.parametrize(("name", "value", "word"), BAD_SLICES)
def test_slices_reject_wrong_argument(name: str, value: Any, word: object) -> None:
    """A role and a replica policy must be known names, and a size a plain int."""
    arguments: dict[str, Any] = {"local_tp_rank": 1, "local_tp_size": 2, "remote_tp_size": 16}
    arguments[name] = value
    check_rejected(lambda: FULL.get_tp_transfer_slices(**arguments), name, value, word)


@pytest.mark.parametrize(
    "spec", [FULL, WINDOW, kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=3),
             kvspec.SlidingWindowMLASpec(**MLA, sliding_window=3), OPAQUE, UNIFORM],
)  # fmt: skip
def test_number_of_tokens_must_be_a_plain_int(spec: kvspec.LayerSpec) -> None:
    """A negative number, a bool, a float, None and a text are rejected."""
    check_values(spec.live_tokens, "num_tokens", [-1, True, 1.0, None, "3"], 0)


def uniform(*specs: Any, names: tuple[Any, ...] = ("a", "b")) -> object:
    """Return a uniform-type group of *specs*."""
    return kvspec.UniformTypeKVCacheSpecs(specs=dict(zip(names, specs, strict=False)))


def state(*parts: Any) -> object:
    """Return a state of *parts*."""
    return kvspec.MambaSpec(state_parts=parts)


TABLE: list[Any] = [
    # parts
    row(lambda: kvspec.Part(**STATE, granularity=3), "p.units", 4, 3),
    row(state, "state_parts", ()),
    row(lambda: state(attrs.evolve(PART, tokens_per_state=2)), "p.tokens_per_state", 2),
    # rows and pages
    row(lambda: attrs.evolve(FULL, tokens_per_state=3), "block_size", 4, 3),
    row(lambda: attrs.evolve(FULL, page_size_padded=511).page_size_bytes(),
        "page_size_padded", 511, 512),
    row(lambda: attrs.evolve(FULL, page_size_padded=255).page_size_bytes(1, 2),
        "page_size_padded", 255, 256),
    row(lambda: attrs.evolve(OPAQUE, page_size_padded=3).page_size_bytes(),
        "page_size_padded", 3, 4),
    # uniform-type groups
    row(uniform, "specs", {}),
    row(lambda: uniform(FULL, "x"), "specs['b']", "x"),
    row(lambda: uniform(FULL, WINDOW), "specs['b']", WINDOW),
    row(lambda: uniform(FULL, attrs.evolve(FULL, block_size=8)), "specs['b'].block_size", 8, 4),
    row(lambda: uniform(WINDOW, attrs.evolve(WINDOW, sliding_window=9)),
        "specs['b'].sliding_window", 9, 8),
    row(lambda: uniform(WINDOW, attrs.evolve(WINDOW, extra_retained_tokens=1)),
        "specs['b'].extra_retained_tokens", 1, 0),
    row(lambda: UNIFORM.of_layer("z"), "layer", "z"),
    # shardings
    row(lambda: even_sharding(4, 2, 3), "units", 4),
    # names, types and sizes
    row(lambda: kvspec.Part(**STATE | {"name": ""}), "name", ""),
    row(lambda: kvspec.Part(**STATE | {"name": None}), "name", None),
    row(lambda: state(PART, PART), "state_parts", ("p", "p"), "different"),
    row(lambda: state("p"), "state_parts", "p"),
    row(lambda: kvspec.MambaSpec(state_parts=None), "state_parts", None),  # type: ignore[arg-type]
    row(lambda: uniform("x"), "specs['a']", "x"),
    row(lambda: uniform(UNIFORM), "specs['a']", UNIFORM),
    row(lambda: uniform(FULL, names=("",)), "specs", ""),
    row(lambda: uniform(FULL, names=(1,)), "specs", 1),
    row(lambda: kvspec.UniformTypeKVCacheSpecs(specs=None), "specs", None),  # type: ignore[arg-type]
    row(lambda: even_sharding(4, 0), "tp_size", 0, 1),
    row(lambda: even_sharding(0, 1), "units", 0, 1),
    row(lambda: even_sharding(4, 2, 0), "granularity", 0, 1),
    row(lambda: even_sharding(4.0, 2), "units", 4.0, 1),  # type: ignore[arg-type]
    row(lambda: attrs.evolve(FULL, spans_heads=1), "spans_heads", 1),
]  # fmt: skip


@pytest.mark.parametrize(REJECTED, TABLE)
def test_wrong_description_is_rejected(
    call: Callable[[], object], field: str, value: object, word: object
) -> None:
    """The error has the field and the value."""
    check_rejected(call, field, value, word)


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
def test_error_survives_a_pickle(error: Any) -> None:
    """An error crosses a process boundary with its text and its fields."""
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert type(error) is type(again)
    assert str(error) == str(again)
    assert vars(error) == vars(again) if isinstance(error, Exception) else error == again


@pytest.mark.parametrize(
    ("error", "facts"),
    [
        (kvspec.WireError("groups[0]", 3, "a str"), [["groups[0]", "3", "str"]]),
        (kvspec.TransferError("lost", state=kvspec.TransferState.BUG), [["lost", "bug"]]),
        (kvspec.TransferError("lost", rank=kvspec.RankId(tp=3), request="r",
                              state=kvspec.TransferState.PEER_LOST),
         [["lost", "tp3", "request=r", "peer_lost"]]),
        (kvspec.MismatchError([kvspec.Mismatch("a", 1, 2, "x"), kvspec.Mismatch("b", 3, 4, "y")]),
         [["a", "1", "2", "x"], ["b", "3", "4", "y"]]),
    ],
)  # fmt: skip
def test_message_has_all_facts_of_the_error(error: Exception, facts: list[list[str]]) -> None:
    """The message has path, value, rank, request and state, and a line for each mismatch."""
    lines = str(error).splitlines()
    assert len(facts) == len(lines)
    for line, words in zip(lines, facts, strict=True):
        assert has_in_order(words, line)


def test_only_spec_errors_are_value_errors() -> None:
    """An impossible description is a `ValueError` of the caller. The other errors are not."""
    assert issubclass(kvspec.SpecError, ValueError)
    assert issubclass(kvspec.SpecError, kvspec.KVSpecError)
    for other in (kvspec.MismatchError, kvspec.WireError, kvspec.TransferError):
        assert issubclass(other, kvspec.KVSpecError)
        assert not issubclass(other, ValueError)


class IndexerSpec(AttentionSpec):
    """Keys of an indexer and their scales: a kind of layer that packs nothing."""

    @cached_property
    def parts(self) -> tuple[kvspec.Part, ...]:
        """Return the index keys and their scales."""
        return (
            self._part("index", 1, self.head_size, self.dtype),
            self._part("index_scale", 1, 4, "float32", "index_scale"),
        )


def test_kind_rejects_fields_that_its_parts_ignore() -> None:
    """The parts of this kind ignore packed content and the order inside a page."""
    sizes: dict[str, Any] = {"block_size": 4, "head_size": 8, "dtype": "uint8"}
    assert [8, 4] == [part.content_bytes for part in IndexerSpec(**sizes).parts]
    call = partial(IndexerSpec, **sizes, state_content_bytes=12)
    check_rejected(call, "state_content_bytes", 12, "IndexerSpec")
    call = partial(IndexerSpec, **sizes, page_format="opaque:x")
    check_rejected(call, "page_format", "opaque:x", "plain")
