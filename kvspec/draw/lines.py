"""What the picture of a plan shows: a box for every rank, and in it a line for each range of units.

Law: every slice of every edge that is asked for is in exactly one line of its consumer, and every
unit that a producer rank holds is in exactly one line of it. Places are not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

import attrs

from kvspec.draw.canvas import DASH, colour, counted
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.plan.explain import sizes
from kvspec.plan.plan import TransferPlan
from kvspec.plan.shares import Share

_MOST_CELLS, _MOST_READERS = 8, 3


@attrs.frozen
class Family:
    """Parts that are dealt alike: their names, all their units, and in how many they are dealt."""

    name: str
    units: int
    deal_in: int
    per_token: bool

    @staticmethod
    def of(parts: Sequence[Part]) -> Family:
        """Return the family of *parts*."""
        name, one = "+".join(part.name for part in parts), parts[0]
        return Family(name, one.units, one.deal_in, one.per_token)

    def labels(self, units: range) -> list[str]:
        """Return the text of every cell: of each head or group of channels, or of many."""
        pieces = range(units.start // self.deal_in, units.stop // self.deal_in)
        if len(pieces) <= _MOST_CELLS:
            return [str(piece) for piece in pieces]
        return [f"{pieces.start}{DASH}{pieces.stop - 1}"]


@attrs.frozen
class Read:
    """Units that *consumer* reads from *producer*, of (group, layer) *places*."""

    consumer: RankId
    producer: RankId
    family: Family
    units: range
    stripe: Stripe
    places: tuple[tuple[str, str], ...]

    @property
    def groups(self) -> tuple[str, ...]:
        """The consumer's groups."""
        return tuple(dict.fromkeys(group for group, _ in self.places))

    @property
    def layers(self) -> list[str]:
        """The layers of all of them."""
        return [layer for _, layer in self.places]


@attrs.frozen
class Line:
    """Units in the box of a rank, what they are told to be, and the *reads* that begin or end here.

    *number*: of the producer rank among those that are read, or None where nobody reads.
    """

    family: Family
    units: range
    words: str
    number: int | None
    reads: tuple[Read, ...]

    @property
    def labels(self) -> list[str]:
        """The text of every cell."""
        return self.family.labels(self.units)

    @property
    def fill(self) -> str:
        """The colour of the producer rank, or nothing."""
        return "" if self.number is None else colour(self.number)


@attrs.frozen
class Box:
    """One rank: its lines, and a note where it has nothing to do."""

    rank: RankId
    lines: list[Line]
    note: str = ""


@attrs.frozen
class Side:
    """One engine: what it is, and its boxes in captioned bands."""

    name: str
    caption: str
    bands: list[tuple[str, list[Box]]]

    @property
    def boxes(self) -> list[Box]:
        """All of them, from top to bottom."""
        return [box for _, boxes in self.bands for box in boxes]


@attrs.frozen
class Scene:
    """All that is drawn of one plan."""

    families: list[Family]
    reads: list[Read]
    sides: tuple[Side, Side]


def scene(plan: TransferPlan, group: str | None) -> Scene:
    """Return what to draw of *plan*: all of it, or one group of the consumer's."""
    if group is not None:
        plan.consumer.group(group)
    shares = [each for each in plan.shares if group in (None, each.pair.consumer.name)]
    if not shares:
        raise SpecError("group", group, "a group that the plan transfers")
    families = list(dict.fromkeys(Family.of(share.parts) for share in shares))
    reads = _reads(plan, group)
    numbers = {rank: at for at, rank in enumerate(sorted({read.producer for read in reads}))}
    held = _held(plan, shares, reads, numbers)
    sources: dict[RankId, list[Line]] = {rank: [] for rank in plan.consumer.parallel.ranks}
    for each in sorted(reads, key=lambda read: (families.index(read.family), read.units.start)):
        line = Line(each.family, each.units, _source(plan, each), numbers[each.producer], (each,))
        sources[each.consumer].append(line)
    producers = [Box(rank, lines, _unread(plan, rank, lines)) for rank, lines in held.items()]
    consumers = [Box(r, lines, "" if lines else "reads nothing") for r, lines in sources.items()]
    groups = {name for read in reads for name in read.groups}
    homes = {pair.producer.name for pair in plan.pairs if pair.consumer.name in groups}
    sides = (
        Side("Producer", _caption(plan.producer, homes), _bands(plan.producer, producers)),
        Side("Consumer", _caption(plan.consumer, groups), _bands(plan.consumer, consumers)),
    )
    return Scene(families, reads, sides)


def _reads(plan: TransferPlan, group: str | None) -> list[Read]:
    """Return what every consumer rank reads; slices that differ only in their layers are one."""
    found: dict[tuple[RankId, RankId, Family, range, Stripe], list[tuple[str, str]]] = {}
    for edge in plan.edges:
        if group not in (None, edge.group):
            continue
        for each in edge.slices:
            layers = each.layers
            parts = plan.consumer.group(edge.group).spec.of_layer(layers[0]).parts
            family = Family.of([part for part in parts if part.name in each.parts])
            key = (edge.consumer, edge.producer, family, each.global_range, each.stripe)
            found.setdefault(key, []).extend((edge.group, layer) for layer in layers)
    return [Read(*key, tuple(places)) for key, places in found.items()]


def _held(
    plan: TransferPlan, shares: list[Share], reads: list[Read], numbers: dict[RankId, int]
) -> dict[RankId, list[Line]]:
    """Return the lines of every producer rank: the units that it holds, and who reads them."""
    ranks = plan.producer.parallel.ranks
    held: dict[RankId, dict[tuple[Family, range], None]] = {rank: {} for rank in ranks}
    for share in shares:
        for rank, units in zip(ranks, share.members.ranges, strict=True):
            if units:
                held[rank][Family.of(share.parts), units] = None
    by_rank: dict[RankId, list[Read]] = {rank: [] for rank in ranks}
    for read in reads:
        by_rank[read.producer].append(read)
    lines: dict[RankId, list[Line]] = {rank: [] for rank in ranks}
    for rank, ranges in held.items():
        for family, units in ranges:
            own = [e for e in by_rank[rank] if e.family == family and e.units.start in units]
            words = _readers(own) if own else "not read here" if by_rank[rank] else ""
            number = numbers[rank] if own else None
            lines[rank].append(Line(family, units, words, number, tuple(own)))
    return lines


def _readers(reads: list[Read]) -> str:
    names = [str(rank) for rank in sorted({read.consumer for read in reads})]
    if len(names) <= _MOST_READERS:
        return f"→ {', '.join(names)}"
    return f"→ {names[0]} … {names[-1]} ({len(names)})"


def _source(plan: TransferPlan, read: Read) -> str:
    """Say from whom *read* is, and which blocks, positions and layers, if not all."""
    words = [f"← {read.producer}"]
    if not read.stripe.whole:
        words.append(str(read.stripe))
    producer, consumer = plan.producer, plan.consumer
    home = producer.homes[read.layers[0]]
    if producer.context_size(home) > 1 and read.family.per_token:
        words.append(f"context {producer.context(home, read.producer).rank}")
    groups = map(consumer.group, read.groups)
    own = {layer for group in groups for layer in consumer.layers_at(group, read.consumer.pp)}
    if not own.issubset(read.layers):
        words.append(_layers(read.layers))
    return ", ".join(words)


def _unread(plan: TransferPlan, rank: RankId, lines: list[Line]) -> str:
    """Say of a producer rank that nobody reads here who tells it to release."""
    if any(line.reads for line in lines):
        return ""
    if plan.targets(rank):
        return "read for other groups only"
    notifiers = plan.notifiers(rank)
    by = "every consumer rank" if len(notifiers) > 1 else str(notifiers[0])
    return f"not read; {by} tells it to release"


def _bands(engine: EngineSpec, boxes: Iterable[Box]) -> list[tuple[str, list[Box]]]:
    """Return the boxes in bands: pipeline stages, and context ranks within them."""
    found: dict[tuple[int, int], list[Box]] = {}
    for box in boxes:
        key = (box.rank.pp, engine.parallel.context(box.rank).rank)
        found.setdefault(key, []).append(box)
    return [(_band(engine, found[key][0].rank), found[key]) for key in sorted(found)]


def _band(engine: EngineSpec, rank: RankId) -> str:
    words: list[str] = []
    context = engine.parallel.context(rank)
    if engine.parallel.pp_size > 1:
        layers = engine.by_stage(engine.stage_of).get(rank.pp, ())
        words.append(f"stage {rank.pp}: {_layers(layers)}")
    if context.size > 1:
        each = counted(context.interleave, "token")
        words.append(f"context {context.rank} of {context.size}, {each} at a time")
    return " · ".join(words)


def excluded(plan: TransferPlan) -> list[str]:
    """Say, for each side, which layers it does not transfer."""
    sides = (("producer", plan.producer), ("consumer", plan.consumer))
    return [
        f"excluded by the {side}: {_layers(engine.excluded)}"
        for side, engine in sides
        if engine.excluded
    ]


def _layers(names: Iterable[str]) -> str:
    """Return layers in few words: by number where each has one and none is left out."""
    layers = list(dict.fromkeys(names))
    if not layers:
        return "no layers"
    numbers = sorted({int(n.group()) for n in map(re.compile(r"\d+").search, layers) if n})
    if len(layers) == len(numbers) == numbers[-1] - numbers[0] + 1:
        first, last = numbers[0], numbers[-1]
        return f"layer {first}" if first == last else f"layers {first}{DASH}{last}"
    return f"{layers[0]} and {len(layers) - 1} more" if layers[1:] else layers[0]


def _caption(engine: EngineSpec, groups: set[str]) -> str:
    """Return one engine's sizes, layouts and block sizes in words."""
    own = [group for group in engine.groups if group.name in groups]
    words = [sizes(engine.parallel)]
    words.append(f"layout {'/'.join(dict.fromkeys(map(engine.layout_of, own)))}")
    tokens = {
        group.spec.block_size
        for group in own
        if any(part.per_token for part in group.spec.of_layer(group.layers[0]).parts)
    }
    if tokens:
        words.append(f"blocks of {'/'.join(map(str, sorted(tokens)))} tokens")
    return " · ".join(words)
