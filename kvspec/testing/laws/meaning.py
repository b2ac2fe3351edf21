"""The law of equal meaning, law 14: bytes of another meaning are never moved as they are.

How it works:
    The law gives both engines of a case keys of equal shape and different meaning:

        change                                             what a system may do
        pairs in the producer, halves in the consumer      refuse, or deliver each element where
                                                           its meaning is
        one side's keys are normalised, or not stated      refuse
        one side has scales                                refuse
        pairs and halves of rows that cannot be reordered  refuse

    The oracle writes different bytes to each element. So a system that moves rows as they are
    delivers wrong bytes. Example of one key of 4 elements, where a and A are rotated together:

        producer    a A b B        right    a b A B        as they are    a A b B
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.specs import KeyContent, LayerSpec, UniformTypeKVCacheSpecs
from kvspec.testing.laws.owners import targets
from kvspec.testing.laws.refusal import ask_all, faults_of_all
from kvspec.testing.laws.system import NothingToJudgeError, Trial, deliver
from kvspec.testing.rotary import may_rotate, reorders

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.testing.case import Case

# Returns the fields of a layer's spec that a change sets.
Fields = Callable[[Any], dict[str, Any]]


def meaning(trial: Trial) -> Iterator[str]:
    """Yield each wrong byte of keys in another order, and each other meaning that is accepted."""
    ask_all(trial)
    if not (specs := _rotating(trial.case)):
        raise NothingToJudgeError("no layer that moves has keys that can be rotated")
    yield from _as_they_are(Trial(trial.system, _changed(trial.case, _pairs, _halves)))
    others = _other_meanings(trial.case, specs)
    yield from faults_of_all(
        (field, what, Trial(trial.system, wrong, blank=True)) for field, what, wrong in others
    )


def _as_they_are(trial: Trial) -> Iterator[str]:
    """Yield each byte that arrives where an element of another meaning belongs."""
    try:
        answers = list(trial.copies())
        whole = trial.after_connector
    except trial.system.refusals as error:
        if "key_content" not in str(error):
            yield (
                "producer rotary='pairs', consumer rotary='halves': expected an error that contains"
                f" 'key_content', got {error}"
            )
        return
    for name, copies in answers:
        deliver(trial.world, copies)
        yield from (f"{name}, pairs to halves: {fault}" for fault in trial.world.differences())
    if whole is not None:
        yield from (f"connector, pairs to halves: {fault}" for fault in whole.differences())


def _rotating(case: Case) -> list[LayerSpec]:
    """Return the producer's specs of layers that move and whose keys can be rotated."""
    moving = {target.layer for target in targets(case.consumer, case.producer)}
    specs = [
        group.spec.of_layer(layer)
        for group in case.producer.groups
        for layer in group.layers
        if layer in moving
    ]
    return [spec for spec in specs if may_rotate(spec)]


def _other_meanings(case: Case, specs: list[LayerSpec]) -> Iterator[tuple[str, str, Case]]:
    """Yield (field, change, case) of engines whose bytes have meanings that do not fit."""

    def normalized(spec: Any) -> dict[str, Any]:  # noqa: ANN401
        return {"key_content": attrs.evolve(_content(spec, "halves"), normalized=True)}

    yield (
        "key_content",
        "normalised keys (producer normalized=True, consumer normalized=False)",
        _changed(case, normalized, _halves),
    )
    yield (
        "key_content",
        "keys of unstated meaning (producer rotary='halves', consumer key_content=None)",
        _changed(case, _halves, _nothing),
    )
    yield (
        "key_content",
        "keys of stated meaning (producer key_content=None, consumer rotary='halves')",
        _changed(case, _nothing, _halves),
    )
    scaled = _changed(case, lambda _: {"key_content": None, "scales_digest": "00"}, _nothing)
    yield "scales_digest", "scales on one side (producer scales_digest='00', consumer None)", scaled
    if any(may_rotate(spec) and not reorders(spec) for spec in specs):
        pairs = _changed(case, lambda spec: {"key_content": _content(spec, "pairs")}, _halves)
        what = "pairs of rows that cannot be reordered (producer 'pairs', consumer 'halves')"
        yield "key_content", what, pairs


def _content(spec: Any, rotary: str) -> KeyContent:  # noqa: ANN401
    return KeyContent(rotary=rotary, rotary_size=spec.head_size // 2 * 2)


def _halves(spec: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"key_content": _content(spec, "halves")}


def _pairs(spec: Any) -> dict[str, Any]:  # noqa: ANN401
    return {"key_content": _content(spec, "pairs" if reorders(spec) else "halves")}


def _nothing(_: object) -> dict[str, Any]:
    return {"key_content": None, "scales_digest": None}


def _changed(case: Case, producer: Fields, consumer: Fields) -> Case:
    """Return *case* with the fields of each side set in all layers whose keys can be rotated."""
    return attrs.evolve(
        case,
        producer=_engine(case.producer, producer),
        consumer=_engine(case.consumer, consumer),
    )


def _engine(engine: EngineSpec, fields: Fields) -> EngineSpec:
    groups = []
    for group in engine.groups:
        layers = group.spec.layers or ("",)
        specs = {layer: _spec(group.spec.of_layer(layer), fields) for layer in layers}
        spec = UniformTypeKVCacheSpecs(specs=specs) if group.spec.layers else specs[""]
        groups.append(attrs.evolve(group, spec=spec))
    return attrs.evolve(engine, groups=tuple(groups))


def _spec(spec: LayerSpec, fields: Fields) -> LayerSpec:
    return attrs.evolve(spec, **fields(spec)) if may_rotate(spec) else spec
