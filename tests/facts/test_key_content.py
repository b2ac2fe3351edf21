"""Keys and scales of equal shape but different meaning: what is described and refused."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
import pytest
from refused import refusal

import kvspec
from kvspec.adapters.attention_modules import agreed_key_content
from kvspec.wire.values import Decoder, encode

FIELDS: dict[str, Any] = {
    "block_size": 4,
    "total_num_kv_heads": 2,
    "head_size": 8,
    "dtype": "bfloat16",
}
FULL = kvspec.FullAttentionSpec(**FIELDS)
MLA = kvspec.MLAAttentionSpec(block_size=4, head_size=12, dtype="bfloat16")
HALVES = kvspec.KeyContent(rotary="halves", rotary_size=8)
PAIRS = attrs.evolve(HALVES, rotary="pairs")


def engine(spec: kvspec.LayerSpec) -> kvspec.EngineSpec:
    """Return an engine of one layer."""
    group = kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)
    return kvspec.EngineSpec(groups=[group])


def with_key(content: kvspec.KeyContent | None, spec: Any = FULL) -> kvspec.EngineSpec:
    """Return an engine whose keys have *content*."""
    return engine(attrs.evolve(spec, key_content=content))


def found(producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec) -> list[tuple[Any, ...]]:
    """Return field and both values of each mismatch."""
    mismatches = kvspec.mismatches(producer, consumer)
    return [(each.field, each.producer, each.consumer) for each in mismatches]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"rotary": "thirds"}, "rotary"),
        ({"rotary": None}, "rotary"),
        ({"rotary": ["pairs"]}, "rotary"),
        ({"rotary": "pairs"}, "rotary_size"),
        ({"rotary": "pairs", "rotary_size": 3}, "rotary_size"),
        ({"rotary": "halves", "rotary_size": -2}, "rotary_size"),
        ({"rotary": "halves", "rotary_size": True}, "rotary_size"),
        ({"rotary": "none", "rotary_size": 2}, "rotary_size"),
        ({"rotary": "none", "rotary_start": 2}, "rotary_start"),
        ({"rotary": "pairs", "rotary_size": 2, "rotary_start": -1}, "rotary_start"),
        ({"rotary": "none", "normalized": 1}, "normalized"),
    ],
)
def test_key_content_rejects_values_that_contradict(fields: dict[str, Any], field: str) -> None:
    """The error names the field and has its value."""
    error = refusal(lambda: kvspec.KeyContent(**fields))
    assert (field, fields.get(field, 0)) == (error.field, error.value)


def test_spec_rejects_rotated_range_outside_of_row() -> None:
    """The rotated range must lie in the row of a head, or of the latent vector."""
    outside = kvspec.KeyContent(rotary="pairs", rotary_start=2, rotary_size=8)
    error = refusal(lambda: attrs.evolve(FULL, key_content=outside))
    assert ("key_content.rotary_stop", 10) == (error.field, error.value)
    assert attrs.evolve(MLA, key_content=outside).key_content == outside


@pytest.mark.parametrize(
    ("scales", "refused"),
    [
        ({}, []),
        ({"scale_dtype": "float32"}, ["l.key_content"]),
        ({"scales_digest": "ab"}, ["l.key_content"]),
    ],
)
def test_uint8_with_scales_is_not_reordered(scales: dict[str, str], refused: list[str]) -> None:
    """A byte with a scale may hold two elements of a key."""
    spec = attrs.evolve(FULL, dtype="uint8", **scales)
    assert refused == [field for field, *_ in found(with_key(HALVES, spec), with_key(PAIRS, spec))]


def test_spec_rejects_key_content_of_another_type() -> None:
    """A dict is not a `KeyContent`."""
    value: Any = {"rotary": "halves"}
    error = refusal(lambda: attrs.evolve(FULL, key_content=value))
    assert ("key_content", value) == (error.field, error.value)


def test_cross_attention_rejects_key_content() -> None:
    """Keys of an encoder have no position in the prompt."""
    error = refusal(lambda: kvspec.CrossAttentionSpec(**FIELDS, key_content=HALVES))
    assert ("key_content", HALVES) == (error.field, error.value)
    assert "key_content" not in {field.name for field in attrs.fields(kvspec.MambaSpec)}


@pytest.mark.parametrize("value", ["", "xyz", "ABCD", 5, b"00"])
def test_spec_rejects_scales_digest_without_hexadecimal_digits(value: Any) -> None:
    """The error names the field."""
    error = refusal(lambda: attrs.evolve(FULL, scales_digest=value))
    assert ("scales_digest", value) == (error.field, error.value)


def test_equal_meanings_match() -> None:
    """No difference is reported, and the hashes are equal."""
    assert [] == found(with_key(PAIRS), with_key(PAIRS))
    scaled = attrs.evolve(FULL, scales_digest="ab")
    assert [] == found(engine(scaled), engine(scaled))


@pytest.mark.parametrize(
    ("producer", "consumer"),
    [
        (None, HALVES),
        (PAIRS, None),
        (HALVES, attrs.evolve(HALVES, normalized=True)),
        (HALVES, attrs.evolve(PAIRS, rotary_size=4)),
        (HALVES, attrs.evolve(HALVES, rotary_size=4)),
        (
            kvspec.KeyContent(rotary="halves", rotary_size=4),
            kvspec.KeyContent(rotary="halves", rotary_size=4, rotary_start=4),
        ),
        (HALVES, kvspec.KeyContent(rotary="none")),
        (None, kvspec.KeyContent(rotary="none")),
    ],
)
def test_different_key_contents_are_refused(producer: Any, consumer: Any) -> None:
    """The mismatch has the field and both values, and the hashes differ."""
    difference = [("l.key_content", producer, consumer)]
    assert difference == found(with_key(producer), with_key(consumer))


def test_different_scales_are_refused() -> None:
    """Also if only one side has scales."""
    one, other = (engine(attrs.evolve(FULL, scales_digest=digest)) for digest in ("ab", "cd"))
    assert [("l.scales_digest", "ab", "cd")] == found(one, other)
    assert [("l.scales_digest", "ab", None)] == found(one, engine(FULL))


def test_layers_of_uniform_group_may_have_different_meanings() -> None:
    """Each layer has its own key content and its own scales."""
    layers = {
        "a": attrs.evolve(FULL, key_content=HALVES, scales_digest="ab"),
        "b": attrs.evolve(FULL, key_content=kvspec.KeyContent(rotary="none")),
    }
    both = kvspec.UniformTypeKVCacheSpecs(specs=layers)
    assert layers == both.specs
    one = kvspec.UniformTypeKVCacheSpecs(specs={"a": layers["a"], "b": FULL})
    producer, consumer = (
        kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=["a", "b"], spec=spec)])
        for spec in (both, one)
    )
    assert [("b.key_content", layers["b"].key_content, None)] == found(producer, consumer)


def test_described_meanings_survive_the_wire() -> None:
    """An engine with all new fields is decoded to an equal one."""
    spec = attrs.evolve(FULL, key_content=PAIRS, scales_digest="ab")
    described = engine(spec)
    assert described == Decoder().value("engine", encode(described))


def test_scales_digest_depends_on_values_and_layers_only() -> None:
    """Types, shapes of one element and the order of layers do not matter."""
    digest = kvspec.scales_digest({"a": (0.5, 1.0), "b": (0.25, 2)})
    same = {"b": (np.float16(0.25), np.array([2])), "a": (np.array(0.5), np.float64(1))}
    assert digest == kvspec.scales_digest(same)
    others: list[dict[str, Any]] = [
        {"a": (0.5, 1.0)},
        {"a": (1.0, 0.5), "b": (0.25, 2)},
        {"a": (0.5, 1.0), "c": (0.25, 2)},
        {"a": (0.25, 2), "b": (0.5, 1.0)},
        {"a": ([0.5, 0.5], 1.0), "b": (0.25, 2)},
        {"a": (np.nextafter(0.5, 1), 1.0), "b": (0.25, 2)},
    ]
    assert len({digest, *map(kvspec.scales_digest, others)}) == 1 + len(others)


@pytest.mark.parametrize(
    ("scales", "field"),
    [
        ({}, "scales"),
        ([("a", (1, 1))], "scales"),
        ({1: (1, 1)}, "scales"),
        ({"a": 1.0}, "scales['a']"),
        ({"a": (1.0,)}, "scales['a']"),
        ({"a": (1.0, None)}, "scales['a']"),
        ({"a": (1.0, "x")}, "scales['a']"),
        ({"a": (0.0, 1.0)}, "scales['a']"),
        ({"a": (float("nan"), 1.0)}, "scales['a']"),
        ({"a": (1.0, [])}, "scales['a']"),
    ],
)
def test_scales_digest_rejects_impossible_scales(scales: Any, field: str) -> None:
    """The error names the layer."""
    assert field == refusal(lambda: kvspec.scales_digest(scales)).field


TURNED = attrs.evolve(HALVES, frequencies=(1.0, 0.1, 0.01, 0.001), magnitude=1.5)


@pytest.mark.parametrize(
    ("changed", "field"),
    [
        ({"frequencies": (1.0, 0.1, 0.01, 0.0011)}, "frequencies[3]"),
        ({"magnitude": 1.6}, "magnitude"),
        # Roundings, and numbers that an engine does not state.
        ({"frequencies": (1.0, 0.1, 0.01, 0.001 * (1 + 1e-6))}, None),
        ({"frequencies": None, "magnitude": None}, None),
    ],
)
def test_rotations_fit_unless_both_are_known_and_differ(changed: Any, field: str | None) -> None:
    engines = [with_key(TURNED), with_key(attrs.evolve(TURNED, **changed))]
    found = kvspec.mismatches(*engines)
    assert ([] if field is None else [f"key_content.{field}"]) == [
        each.field[each.field.index("key_content") :] for each in found
    ]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"frequencies": (1.0,)}, "frequencies"),
        ({"frequencies": (1.0, 0.1, 0.01, 0)}, "frequencies[3]"),
        ({"frequencies": (1.0, 0.1, 0.01, "a")}, "frequencies[3]"),
        ({"frequencies": (1.0, 0.1, 0.01, float("nan"))}, "frequencies[3]"),
        ({"magnitude": -1.0}, "magnitude"),
        ({"rotary": "none", "rotary_size": 0, "magnitude": 1.0}, "magnitude"),
    ],
)
def test_key_content_rejects_impossible_rotations(fields: dict[str, Any], field: str) -> None:
    error = refusal(lambda: attrs.evolve(HALVES, **fields))
    assert error.field == field


def test_meaning_of_module_keeps_what_only_one_side_states() -> None:
    """A user configures the order for all layers. The angles of each layer come from its module."""
    angles = (1.0, 0.25)
    plain = kvspec.KeyContent(rotary="halves", rotary_size=4)
    own = attrs.evolve(plain, frequencies=angles, magnitude=1.5)
    assert own == agreed_key_content("key_content", plain, own)
    assert own == agreed_key_content("key_content", own, plain)
    normalized = attrs.evolve(plain, normalized=True)
    agreed = agreed_key_content("key_content", normalized, own)
    assert attrs.evolve(own, normalized=True) == agreed
    with pytest.raises(kvspec.SpecError) as caught:
        agreed_key_content("key_content", attrs.evolve(plain, frequencies=(1.0, 0.5)), own)
    assert "key_content" == caught.value.field
