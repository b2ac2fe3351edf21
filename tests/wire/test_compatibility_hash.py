"""Two engines have equal compatibility hashes if their bytes have equal meaning."""

from __future__ import annotations

from typing import Any

import attrs
from hypothesis import example, given
from hypothesis import strategies as st
from refused import refusal

import kvspec
from kvspec.specs.layer import LIVENESS_FIELDS
from kvspec.testing import strategies
from kvspec.wire.compatibility import compatibility_hash

Engines = tuple[kvspec.EngineSpec, kvspec.EngineSpec]


def prints(pair: Engines) -> tuple[str, str]:
    """Return the hashes of both engines over the layers that neither side excludes."""
    producer, consumer = pair
    return compatibility_hash(producer, consumer.excluded), compatibility_hash(
        consumer, producer.excluded
    )


@st.composite
def changed(draw: st.DrawFn, spec: Any) -> Any:
    """Draw *spec*, or a spec that differs from it in one field, in a part or in its kind."""
    kind = draw(st.sampled_from(sorted(strategies.KINDS)))
    other: Any = draw(strategies.KINDS[kind])
    fields = [
        field.name
        for field in attrs.fields(type(spec))
        if field.init and hasattr(other, field.name) and field.name not in ("specs", "block_size")
    ]
    if not fields or draw(st.booleans()):
        return draw(st.sampled_from((spec, other)))
    name = draw(st.sampled_from(fields))
    try:
        return attrs.evolve(spec, **{name: getattr(other, name)})
    except kvspec.SpecError:
        return spec


def engine(spec: Any) -> kvspec.EngineSpec:
    """Return an engine with layers of *spec*."""
    layers = spec.layers or ("layers.0", "layers.1")
    return kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=layers, spec=spec)])


@st.composite
def pairs(draw: st.DrawFn) -> Engines:
    """Draw two engines. The spec of the second may be a changed spec of the first."""
    spec = draw(strategies.specs())
    return engine(spec), engine(draw(changed(spec)))


def full(**more: Any) -> kvspec.EngineSpec:
    """Return an engine of full attention."""
    fields = {"block_size": 4, "total_num_kv_heads": 2, "head_size": 3, "dtype": "uint8"}
    return engine(kvspec.FullAttentionSpec(**{**fields, **more}))


@given(strategies.engine_pairs())
def test_hashes_are_equal_for_any_layouts_and_shardings(pair: Engines) -> None:
    """Engines of one model have one hash, because a plan bridges the rest."""
    assert () == kvspec.mismatches(*pair)
    one, other = prints(pair)
    assert one == other


@given(pairs())
@example((full(), full(head_size_v=3)))
@example((full(), full(head_size_v=2)))
@example((full(scale_dtype="float32"), full(scale_dtype="float32", elements_per_scale=3)))
@example((full(), full(block_size=8)))
def test_hashes_differ_exactly_for_mismatches_other_than_kept_tokens(pair: Engines) -> None:
    """Engines without a mismatch have one hash. A mismatch of kept tokens does not change it."""
    mismatches = kvspec.mismatches(*pair)
    one, other = prints(pair)
    if not mismatches:
        assert one == other
    kept = [
        mismatch
        for mismatch in mismatches
        if mismatch.field.rpartition(".")[2] in LIVENESS_FIELDS
        or any({mismatch.producer, mismatch.consumer} <= kinds for kinds in SAME_CACHE)
    ]
    if len(kept) < len(mismatches):
        assert one != other


SAME_CACHE = (
    {"FullAttentionSpec", "SlidingWindowSpec", "ChunkedLocalAttentionSpec"},
    {"MLAAttentionSpec", "SlidingWindowMLASpec"},
)
"""Kinds that differ in the tokens that they keep, and in nothing else."""


def test_equal_hashes_do_not_prove_that_engines_fit() -> None:
    """Two windows both fit full attention, but not each other. No hash can express that."""
    model = {"block_size": 4, "total_num_kv_heads": 2, "head_size": 3, "dtype": "uint8"}
    short, long = (
        engine(kvspec.SlidingWindowSpec(**model, sliding_window=size)) for size in (4, 8)
    )
    assert () == kvspec.mismatches(full(), short) == kvspec.mismatches(full(), long)
    assert kvspec.mismatches(short, long)
    assert compatibility_hash(full()) == compatibility_hash(short) == compatibility_hash(long)


@given(strategies.engine_pairs(), st.data())
def test_layers_count_by_name(pair: Engines, data: st.DataObject) -> None:
    """A layer more changes the hash. The order of groups does not."""
    engine = pair[0]
    kept = [layer for layer in engine.homes if layer not in engine.excluded]
    without = data.draw(st.sampled_from(kept)) if kept else None
    if without is not None:
        assert compatibility_hash(engine) != compatibility_hash(engine, [without])
    again = attrs.evolve(engine, groups=engine.groups[::-1])
    assert compatibility_hash(engine) == compatibility_hash(again)


def test_hash_of_one_engine_is_the_stored_hash() -> None:
    """If this fails, the meaning of the hash has changed and the wire needs a new version."""
    assert "751e55beb088bc6007eb331d49422fcc" == compatibility_hash(full())


@attrs.frozen(kw_only=True, slots=False)
class Rotated(kvspec.MLAAttentionSpec):
    """A kind whose bytes mean something else."""

    turns: int = 1


@attrs.frozen(kw_only=True, slots=False)
class Encoded(kvspec.MLAAttentionSpec):
    """A kind that counts the tokens of the encoder."""

    counts_prompt = False


@attrs.frozen(kw_only=True, slots=False)
class Forgetful(kvspec.MLAAttentionSpec):
    """A kind with every field that makes a kind keep fewer tokens."""

    sliding_window: int = 4
    extra_retained_tokens: int = 0
    attention_chunk_size: int = 4


def test_only_kinds_that_keep_fewer_tokens_have_the_hash_of_their_base() -> None:
    """A new field, or another count of tokens, changes the kind even with equal field values."""
    fields: dict[str, Any] = {"block_size": 4, "head_size": 2, "dtype": "uint8"}
    latent = compatibility_hash(engine(kvspec.MLAAttentionSpec(**fields)))
    assert latent == compatibility_hash(engine(Forgetful(**fields)))
    kinds = [compatibility_hash(engine(kind(**fields))) for kind in (Rotated, Encoded)]
    assert 3 == len({latent, *kinds})
    heads = {**fields, "total_num_kv_heads": 2}
    assert compatibility_hash(full(head_size=2)) != compatibility_hash(
        engine(kvspec.CrossAttentionSpec(**heads))
    )


def test_compatibility_hash_rejects_other_than_engines_of_plain_values() -> None:
    """An argument that is not an engine, and a spec with a set as a field."""
    wrong: Any = 1
    error = refusal(lambda: compatibility_hash(wrong))
    assert ("engine", 1) == (error.field, error.value)

    @attrs.frozen(kw_only=True, slots=False)
    class Odd(kvspec.MLAAttentionSpec):
        field: object = attrs.field(hash=False)

    odd = engine(Odd(block_size=1, head_size=1, dtype="uint8", field={1}))
    error = refusal(lambda: compatibility_hash(odd))
    assert ("spec", {1}) == (error.field, error.value)
