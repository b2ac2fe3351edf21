"""Compare two engines and list every difference that would make a transfer wrong.

Invariant: layers pair by name, never by index. Every field that changes the meaning of a byte is
compared. All differences are reported at once, with both values and the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import Mismatch
from kvspec.inputs import instance
from kvspec.ownership.part import Part
from kvspec.specs import LayerSpec
from kvspec.specs.key_content import rotation_difference
from kvspec.specs.layer import LIVENESS_FIELDS, MEMORY_FIELDS, WHY, meaning


def mismatches(producer: EngineSpec, consumer: EngineSpec) -> tuple[Mismatch, ...]:
    """Return every field in which the caches of two engines do not fit together.

    Parallel sizes, layouts, block sizes and padding may differ. They decide where bytes are, not
    what the bytes mean. One engine may also keep tokens longer: it may store
    a sliding-window layer as full attention. Two windows of different sizes are a mismatch. Layers
    that either side excludes are not compared.

    Args:
        producer: The engine that computes the cache.
        consumer: The engine that reads it.

    Returns:
        The differences, with one entry for all layers that differ in the same way. Empty if the
        engines fit.

    Raises:
        SpecError: If *producer* or *consumer* is not an `EngineSpec`.

    >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup
    >>> producer, consumer = (
    ...     EngineSpec(groups=[KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=spec)])
    ...     for spec in (
    ...         FullAttentionSpec(
    ...             block_size=16, total_num_kv_heads=4, head_size=size, dtype="bfloat16")
    ...         for size in (64, 128)))
    >>> found = mismatches(producer, consumer)
    >>> [(mismatch.field, mismatch.producer, mismatch.consumer) for mismatch in found]
    [('l.0 and 1 more.head_size', 64, 128)]
    """
    instance("producer", producer, EngineSpec)
    instance("consumer", consumer, EngineSpec)
    found: dict[object, tuple[Mismatch, list[str]]] = {}
    compared: dict[tuple[int, int], list[Mismatch]] = {}
    excluded = {*producer.excluded, *consumer.excluded}
    for layer in dict.fromkeys([*producer.homes, *consumer.homes]):
        if layer in excluded:
            continue
        homes = producer.homes.get(layer), consumer.homes.get(layer)
        if homes[0] is None or homes[1] is None:
            found[layer] = (_one_sided(*homes), [layer])
            continue
        specs = homes[0].spec.of_layer(layer), homes[1].spec.of_layer(layer)
        # Most layers of a group share one spec object, so one comparison serves them all.
        pair = id(specs[0]), id(specs[1])
        if pair not in compared:
            compared[pair] = _layer_mismatches(*specs)
        for mismatch in compared[pair]:
            key = (mismatch.field, repr(mismatch.producer), repr(mismatch.consumer))
            found.setdefault(key, (mismatch, []))[1].append(layer)
    return tuple(
        attrs.evolve(mismatch, field=f"{_layer_names(layers)}.{mismatch.field}")
        for mismatch, layers in found.values()
    )


def _layer_names(layers: list[str]) -> str:
    return layers[0] if len(layers) == 1 else f"{layers[0]} and {len(layers) - 1} more"


def _one_sided(producer: KVCacheGroup | None, consumer: KVCacheGroup | None) -> Mismatch:
    source, target = (group and f"in group {group.name!r}" for group in (producer, consumer))
    return Mismatch("layer", source, target, "each layer must exist on both sides or be excluded")


def _layer_mismatches(producer: LayerSpec, consumer: LayerSpec) -> list[Mismatch]:
    kind = _common_kind(producer, consumer)
    if kind is None:
        why = "each kind of layer keeps different tokens and different parts"
        return [Mismatch("kind", type(producer).__name__, type(consumer).__name__, why)]
    found: list[Mismatch] = []
    has_own_parts = False
    for field in attrs.fields(kind):
        name = field.name
        if name == "state_parts":
            has_own_parts = True
        elif name not in MEMORY_FIELDS and _differ(producer, consumer, name):
            why = WHY.get(name, "it changes what the bytes mean")
            found.append(Mismatch(name, getattr(producer, name), getattr(consumer, name), why))
    if not any(mismatch.field == "key_content" for mismatch in found):
        found += _rotation_mismatches(producer, consumer)
    # Parts that are derived from the fields differ only if the fields differ. Reporting the parts
    # too would repeat the same difference in words that the user did not write.
    if found and not has_own_parts:
        return found
    field_names = {mismatch.field for mismatch in found}
    return found + [
        mismatch
        for mismatch in _part_mismatches(producer.parts, consumer.parts)
        if not (mismatch.field.endswith(".dtype") and field_names & DTYPES)
    ]


def _common_kind(producer: LayerSpec, consumer: LayerSpec) -> type[LayerSpec] | None:
    """Return the kind of layer under which both specs can be compared, or None.

    An engine may keep a sliding-window layer as full attention. The two kinds then fit, because
    they differ only in how long they keep tokens. The common kind is the one that keeps more.
    Such a transfer moves the tokens that the consumer's kind still reads. If the producer
    has dropped some of these tokens, its block table has no block for them, and the request is
    refused.
    """
    for general, special in ((producer, consumer), (consumer, producer)):
        kind = type(general)
        if type(special) is kind:
            return kind
        special_fields = {field.name for field in attrs.fields(type(special))}
        extra_fields = special_fields - {field.name for field in attrs.fields(kind)}
        if (
            isinstance(special, kind)
            and extra_fields <= LIVENESS_FIELDS
            and general.counts_prompt == special.counts_prompt
        ):
            return kind
    return None


def _differ(producer: LayerSpec, consumer: LayerSpec, field: str) -> bool:
    """Whether two specs differ in *field*. An omitted field equals its explicit default."""
    if getattr(producer, field) == getattr(consumer, field):
        return False
    return meaning(producer, field) != meaning(consumer, field)


def _rotation_mismatches(producer: LayerSpec, consumer: LayerSpec) -> Iterator[Mismatch]:
    """Yield the number of the rotation of keys that both specs state, and that differs."""
    left, right = (getattr(spec, "key_content", None) for spec in (producer, consumer))
    difference = left and right and rotation_difference(left, right)
    if difference:
        name, first, second = difference
        yield Mismatch(f"key_content.{name}", first, second, WHY["rotation"])


def _part_mismatches(producer: tuple[Part, ...], consumer: tuple[Part, ...]) -> list[Mismatch]:
    names = [tuple(part.name for part in parts) for parts in (producer, consumer)]
    if names[0] != names[1]:
        return [Mismatch("parts", names[0], names[1], "parts pair by name")]
    return [
        Mismatch(f"{left.name}.{field}", getattr(left, field), getattr(right, field), why)
        for left, right in zip(producer, consumer, strict=True)
        for field, why in PART_WHY.items()
        if getattr(left, field) != getattr(right, field)
        # The rows of a block may differ: a block size is not part of what the bytes mean.
        and not (field == "states" and left.per_token)
    ]


# Fields of a spec that set the dtypes of its parts.
DTYPES = {"dtype", "ssm_dtype"}

# Fields of a part that must be equal on both sides, with the reason.
PART_WHY = {
    "units": "units pair by their global number",
    "content_bytes": "the row of one unit has a different length",
    "granularity": "the units would be cut at different places",
    "tokens_per_state": "a row holds a different number of tokens",
    "dtype": "the same bytes stand for different numbers",
    "states": "the states have different numbers of rows, perhaps because of speculative tokens",
}


def differing(
    left: object, right: object, field: str, why: str, sides: tuple[str, str]
) -> Iterator[Mismatch]:
    """Yield the innermost fields in which two descriptions differ, each with its path.

    >>> [str(found) for found in differing((1, 2), (1, 3), "sizes", "must be equal", ("a", "b"))]
    ['sizes[1]: a 2, b 3 (must be equal)']
    """
    kind: Any = type(left)
    inner: list[tuple[str, object, object]] = []
    if kind is type(right) and attrs.has(kind):
        names = [attribute.name for attribute in attrs.fields(kind) if attribute.eq]
        inner = [(f"{field}.{name}", getattr(left, name), getattr(right, name)) for name in names]
    elif isinstance(left, Mapping) and isinstance(right, Mapping) and set(left) == set(right):
        inner = [(f"{field}[{key!r}]", left[key], right[key]) for key in left]
    elif isinstance(left, tuple) and isinstance(right, tuple) and len(left) == len(right):
        both = enumerate(zip(left, right, strict=True))
        inner = [(f"{field}[{index}]", *pair) for index, pair in both]
    elif left != right:
        yield Mismatch(field, left, right, why, sides)
    for path, first, second in inner:
        yield from differing(first, second, path, why, sides)
