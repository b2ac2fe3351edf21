"""The axes of a report: one way in which transfers differ, and the values that a case has on it.

How it works:
    An axis allows only its own fields of `Supports`. All other fields have their narrowest value.
    So a fault that a report shows on an axis is caused by this axis, or by the simplest transfer.
    The axis "everything" allows all that the system supports, and finds faults of two axes at once.

        axis      fields                              values of a case
        tp        max_tp, equal_tp, tp_multiples ...  equal, 2 -> 1 (multiple), 2 -> 3 (other), ...
        blocks    equal_blocks, kernel_blocks         equal, multiple, other, kernel blocks
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.check.counting import cached_tokens_of, length_in
from kvspec.testing.kinds import WINDOWED
from kvspec.testing.laws.release import values
from kvspec.testing.laws.steps import schedule_of
from kvspec.testing.stored import STORABLE
from kvspec.testing.supports import Supports

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.testing.case import Case
    from kvspec.testing.laws.prompt_names import PromptPair
    from kvspec.testing.laws.stored_pages import StoredCase

# The axis of law 12. It has scripts instead of cases.
RELEASE = "release"
# The axis of law 13. Its cases are the simplest ones, and their steps differ.
STEPS = "steps"
# The axes of laws 15 and 16, which judge pairs of prompts, and prompts that are stored.
NAMED, PAGES = "names", "pages"
NARROWEST = attrs.asdict(Supports.only(), recurse=False)


@attrs.frozen
class Axis:
    """One axis.

    Attributes:
        name: The name, as in a report and in a file of expected failures.
        fields: The fields of `Supports` that make the axis. The others are as the system states
            them on this axis only if they are in *along*.
        values: Returns the values that a case has on the axis, or a script on the axis "release".
        along: More fields that may vary together with those of the axis.
    """

    name: str
    fields: tuple[str, ...]
    values: Callable[[Any], Iterable[str]]
    along: tuple[str, ...] = ()

    def narrowed(self, supports: Supports, kinds: Sequence[str]) -> list[Supports]:
        """Return what to draw from, one after the other. Each kind is drawn by itself.

        Args:
            supports: What the system supports.
            kinds: The kinds that it supports, of which the first one is the simplest.

        Returns:
            Nothing if the system supports only the simplest value of the axis.
        """
        if self.name == "everything":
            return [supports]
        if self.name == "windows":
            kinds = [kind for kind in kinds if kind in WINDOWED]
        if self.name == "content":
            # Latents have keys in the same row, so the rotated elements may begin elsewhere.
            kinds = list(dict.fromkeys((*kinds[:1], *(kind for kind in kinds if kind == "MLA"))))
        if self.name == PAGES:
            kinds = [kind for kind in kinds if kind in STORABLE]
            return [attrs.evolve(supports, kinds=tuple(kinds))] if kinds else []
        if not kinds:
            return []
        base = {
            "kinds": kinds[:1],
            "layouts": (supports.layouts or NARROWEST["layouts"])[:1],
            "policies": (supports.policies or NARROWEST["policies"])[:1],
        }
        kept = {name: getattr(supports, name) for name in (*self.fields, *self.along)}
        if self.name in ("kinds", "windows"):
            return [Supports.only(**{**base, **kept, "kinds": (kind,)}) for kind in kinds]
        without: dict[str, Any] = {name: base.get(name, NARROWEST[name]) for name in self.fields}
        narrow = Supports.only(**base | kept)
        differs = narrow != attrs.evolve(narrow, **without)
        if self.name == "content" and differs:
            return [attrs.evolve(narrow, kinds=(kind,)) for kind in kinds]
        return [narrow] if differs or self.name in (RELEASE, STEPS, NAMED) else []


def _ratio(first: int, second: int) -> str:
    """Return how two sizes relate."""
    if first == second:
        return "equal"
    low, high = sorted((first, second))
    relation = "multiple" if high % low == 0 else "other"
    return f"{relation}, {'producer' if first > second else 'consumer'} larger"


def _pairs(case: Case) -> Iterator[tuple[KVCacheGroup, KVCacheGroup]]:
    """Yield the groups of both sides that have a common layer."""
    for source in case.producer.groups:
        for target in case.consumer.groups:
            if set(source.layers) & set(target.layers):
                yield source, target


def _kinds(case: Case | StoredCase) -> Iterator[str]:
    # A group has the name of its kind, which an engine may have changed: "full on P 1".
    for group in case.producer.groups:
        yield group.name.partition(" on ")[0]


def _groups(case: Case) -> Iterator[str]:
    yield from _kinds(case)
    if case.shared:
        yield "in one memory"


def _tp(case: Case) -> Iterator[str]:
    sizes = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    yield _ratio(*sizes)
    for side, engine in (("producer", case.producer), ("consumer", case.consumer)):
        units = {part.units for group in engine.groups for part in group.own_parts}
        if min(units, default=engine.parallel.tp_size) < engine.parallel.tp_size:
            yield f"{side} with more ranks than heads"


CLASSES = (
    *("equal", "multiple, producer larger", "multiple, consumer larger"),
    *("other, producer larger", "other, consumer larger"),
    *("producer with more ranks than heads", "consumer with more ranks than heads"),
)
"""All values of the axis "tp", so that a report shows those that were not drawn."""


def _pp(case: Case) -> Iterator[str]:
    yield f"{case.producer.parallel.pp_size} to {case.consumer.parallel.pp_size}"


def _cp(case: Case) -> Iterator[str]:
    both = [_contexts(engine) for engine in (case.producer, case.consumer)]
    yield " to ".join(both) if any(word != "none" for word in both) else "none"


def _contexts(engine: EngineSpec) -> str:
    parallel = engine.parallel
    words = [name for name in ("dcp", "pcp") if getattr(parallel, f"{name}_size") > 1]
    divided = parallel.context_size > 1
    return (
        "+".join(words) + ("" if divided else " replicas")
        if words
        else ("explicit" if divided else "none")
    )


def _blocks(case: Case) -> Iterator[str]:
    for source, target in _pairs(case):
        yield _ratio(source.spec.block_size, target.spec.block_size)
        if source.kernel_blocks_per_block > 1 or target.kernel_blocks_per_block > 1:
            yield "kernel blocks"


def _layouts(case: Case) -> Iterator[str]:
    for source, target in _pairs(case):
        both = case.producer.layout_of(source), case.consumer.layout_of(target)
        yield "equal" if both[0] == both[1] else "different"
        specs = [group.spec.of_layer(group.layers[0]) for group in (source, target)]
        if any(getattr(spec, "page_size_padded", None) is not None for spec in specs):
            yield "padding"
        formats = [getattr(spec, "page_format", "plain") for spec in specs]
        if any(name != "plain" and not name.startswith("opaque:") for name in formats):
            yield "keys transposed"


def _prefixes(case: Case) -> Iterator[str]:
    for group in case.consumer.groups:
        cached, length = cached_tokens_of(case.request, group), length_in(group.spec, case.request)
        if not cached:
            yield "none"
        elif cached >= length:
            yield "the whole prompt"
        else:
            ends = "ends on blocks" if cached % group.spec.block_size == 0 else "ends inside blocks"
            yield ends


def _windows(case: Case) -> Iterator[str]:
    for source, target in _pairs(case):
        words = [_window(group) for group in (source, target)]
        yield words[0] if words[0] == words[1] else " to ".join(words)


def _window(group: KVCacheGroup) -> str:
    spec = group.spec.of_layer(group.layers[0])
    for field in ("sliding_window", "attention_chunk_size"):
        if getattr(spec, field, None) is not None:
            return "chunk" if field != "sliding_window" else "window"
    return "all tokens"


def _states(case: Case) -> Iterator[str]:
    contents = [
        {
            getattr(g.spec.of_layer(layer), "key_content", None)
            for g in e.groups
            for layer in g.layers
        }
        for e in (case.producer, case.consumer)
    ]
    yield (
        "not stated"
        if contents[0] | contents[1] == {None}
        else ("equal" if contents[0] == contents[1] else "different")
    )


def _steps(case: Case) -> Iterator[str]:
    schedule = schedule_of(case)
    layers = {names for names, _ in schedule}
    words = ["by layer"] * (len(layers) > 1) + ["by token"] * (len(schedule) > len(layers))
    yield " and ".join(words) or "at once"


def _names(pair: PromptPair) -> Iterator[str]:
    yield pair.fact


def _pages(case: StoredCase) -> Iterator[str]:
    yield from _kinds(case)
    sizes = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    yield f"{_ratio(*sizes)} TP"
    if case.absent is not None:
        yield "a rank saves nothing"


def _everything(_: Case) -> Iterator[str]:
    yield "all of it"


_TP = ("max_tp", "equal_tp", "tp_multiples", "even_heads")

AXES = (
    Axis("kinds", ("kinds",), _kinds, _TP),
    Axis("tp", (*_TP, "shardings"), _tp, ("policies",)),
    Axis("pp", ("max_pp", "equal_pp"), _pp),
    Axis("cp", ("dcp", "pcp"), _cp, _TP),
    Axis("blocks", ("equal_blocks", "kernel_blocks", "compressed", "late_tables"), _blocks),
    Axis("layouts", ("layouts", "equal_layouts", "padding", "transposed"), _layouts),
    Axis("prefixes", ("prefixes",), _prefixes, ("equal_blocks", "late_tables")),
    Axis(
        "windows",
        ("windows",),
        _windows,
        ("null_blocks", "retention", "prefixes", "late_tables", "equal_blocks"),
    ),
    Axis("content", ("key_content",), _states),
    Axis("groups", ("hybrid", "drafts", "regrouped", "shared"), _groups, ("kinds",)),
    Axis(STEPS, (), _steps),
    Axis("everything", (), _everything),
    Axis(NAMED, ("placements",), _names),
    Axis(PAGES, ("placements",), _pages),
    Axis(RELEASE, ("lost", "repeated", "reused_ids"), values),
)
"""All axes, in the order of a report."""
