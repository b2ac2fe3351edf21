"""What the picture of a plan shows: a box for every rank, and in it a line for each range of units.

Law: every slice of every edge that is asked for is in exactly one line of its consumer, and every
unit that a producer rank holds is in exactly one line of it. Places are not decided here.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

import attrs

from kvspec.analysis.explanation import sizes
from kvspec.draw.canvas import DASH
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError, counted
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.stripes import Stripe
from kvspec.plan.plan import TransferPlan
from kvspec.plan.replica_groups import ReplicaGroup

_MOST_CELLS, _MOST_READERS = 8, 3


@attrs.frozen
class PartGroup:
    """Parts that are sharded alike.

    Their names, all their units, and in how many they are sharded.
    """

    name: str
    units: int
    granularity: int
    per_token: bool

    @staticmethod
    def of(parts: Sequence[Part]) -> PartGroup:
        """Return the group of *parts*."""
        name, one = "+".join(part.name for part in parts), parts[0]
        return PartGroup(name, one.units, one.granularity, one.per_token)

    def labels(self, units: range) -> list[str]:
        """Return the text of every cell: of each head or group of channels, or of many."""
        packs = range(units.start // self.granularity, units.stop // self.granularity)
        if len(packs) <= _MOST_CELLS:
            return [str(transfer_slice) for transfer_slice in packs]
        return [f"{packs.start}{DASH}{packs.stop - 1}"]


@attrs.frozen
class Read:
    """Units that *consumer* reads from *producer*, of *layers* of *groups* of the consumer's."""

    consumer: RankId
    producer: RankId
    part_group: PartGroup
    units: range
    stripe: Stripe
    groups: tuple[str, ...]
    layers: tuple[str, ...]


@attrs.frozen
class Line:
    """Units in the box of a rank, *words* about them, and the *reads* that begin or end here.

    *number*: of the producer rank among those that are read, or None where nobody reads.
    """

    part_group: PartGroup
    units: range
    words: str
    number: int | None
    reads: tuple[Read, ...]


@attrs.frozen(eq=False)
class Box:
    """One rank: its lines, and a note where it has nothing to do."""

    rank: RankId
    lines: list[Line]
    note: str = ""


@attrs.frozen
class EngineColumn:
    """One engine: what it is, and its boxes in captioned bands."""

    name: str
    caption: str
    bands: dict[str, list[Box]]

    @property
    def boxes(self) -> list[Box]:
        """All of them, from top to bottom."""
        return [box for boxes in self.bands.values() for box in boxes]


@attrs.frozen
class Scene:
    """All that is drawn of one plan."""

    part_groups: list[PartGroup]
    reads: list[Read]
    sides: tuple[EngineColumn, EngineColumn]


def scene(plan: TransferPlan, group: str | None) -> Scene:
    """Return what to draw of *plan*: all of it, or one group of the consumer's."""
    if group is not None:
        plan.consumer.group(group)
    replica_groups = [
        replica_group
        for replica_group in plan.replica_groups
        if group in (None, replica_group.pair.consumer.name)
    ]
    if not replica_groups:
        raise SpecError("group", group, "a group that the plan transfers")
    part_groups = list(
        dict.fromkeys(PartGroup.of(replica_group.parts) for replica_group in replica_groups)
    )
    reads = sorted(
        _reads(plan, group), key=lambda r: (part_groups.index(r.part_group), r.units.start)
    )
    numbers = {r: number for number, r in enumerate(sorted({read.producer for read in reads}))}
    groups = {name for read in reads for name in read.groups}
    homes = {pair.producer.name for pair in plan.pairs if pair.consumer.name in groups}
    consumers: dict[RankId, list[Line]] = {rank: [] for rank in plan.consumer.parallel.ranks}
    for read in reads:
        line = Line(
            read.part_group, read.units, _source(plan, read), numbers[read.producer], (read,)
        )
        consumers[read.consumer].append(line)
    targets = [Box(rank, own, "" if own else "reads nothing") for rank, own in consumers.items()]
    sides = (
        _side("Producer", plan.producer, homes, _producers(plan, replica_groups, reads, numbers)),
        _side("Consumer", plan.consumer, groups, targets),
    )
    return Scene(part_groups, reads, sides)


def _reads(plan: TransferPlan, group: str | None) -> Iterator[Read]:
    """Yield what every consumer rank reads; slices that differ only in their layers are one."""
    places: dict[tuple[RankId, RankId, PartGroup, range, Stripe], list[tuple[str, str]]] = {}
    for edge in plan.edges:
        spec = plan.consumer.group(edge.group).spec
        for transfer_slice in edge.slices if group in (None, edge.group) else ():
            parts = spec.of_layer(transfer_slice.layers[0]).parts
            part_group = PartGroup.of([part for part in parts if part.name in transfer_slice.parts])
            key = (
                edge.consumer,
                edge.producer,
                part_group,
                transfer_slice.global_range,
                transfer_slice.stripe,
            )
            places.setdefault(key, []).extend(
                (edge.group, layer) for layer in transfer_slice.layers
            )
    for key, found in places.items():
        groups, layers = zip(*found, strict=True)
        yield Read(*key, tuple(dict.fromkeys(groups)), layers)


def _producers(
    plan: TransferPlan,
    replica_groups: list[ReplicaGroup],
    reads: list[Read],
    numbers: dict[RankId, int],
) -> Iterator[Box]:
    """Yield the box of every producer rank: the units that it holds, and who reads them."""
    for index, rank in enumerate(plan.producer.parallel.ranks):
        held = dict.fromkeys(
            (PartGroup.of(s.parts), s.producer_sharding.ranges[index]) for s in replica_groups
        )
        here, lines = [read for read in reads if read.producer == rank], list[Line]()
        for part_group, units in held:
            own = tuple(r for r in here if r.part_group == part_group and r.units.start in units)
            words = _readers(own) if own else "not read here" if here else ""
            if units:
                lines.append(Line(part_group, units, words, numbers[rank] if own else None, own))
        yield Box(rank, lines, "" if here else _unread(plan, rank))


def _readers(reads: tuple[Read, ...]) -> str:
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
    if producer.context_size(home) > 1 and read.part_group.per_token:
        words.append(f"context {producer.context(home, read.producer).rank}")
    groups = map(consumer.group, read.groups)
    own = {layer for group in groups for layer in consumer.layers_at(group, read.consumer.pp)}
    if not own.issubset(read.layers):
        words.append(_layers(read.layers))
    return ", ".join(words)


def _unread(plan: TransferPlan, rank: RankId) -> str:
    """Say of a producer rank that nobody reads here who tells it to release."""
    if plan.targets(rank):
        return "read for other groups only"
    notifiers = plan.notifiers(rank)
    by = "every consumer rank" if len(notifiers) > 1 else str(notifiers[0])
    return f"not read; {by} tells it to release"


def _side(name: str, engine: EngineSpec, groups: set[str], boxes: Iterable[Box]) -> EngineColumn:
    """Return one side, its *boxes* in bands: pipeline stages, and context ranks within them."""
    bands: dict[str, list[Box]] = {}
    parallel, layers = engine.parallel, engine.by_stage(engine.stage_of)
    for box in sorted(boxes, key=lambda box: (box.rank.pp, parallel.context(box.rank).rank)):
        words: list[str] = []
        context = parallel.context(box.rank)
        if parallel.pp_size > 1:
            words.append(f"stage {box.rank.pp}: {_layers(layers.get(box.rank.pp, ()))}")
        if context.size > 1:
            tokens = counted(context.interleave, "token")
            words.append(f"context {context.rank} of {context.size}, {tokens} at a time")
        bands.setdefault(" · ".join(words), []).append(box)
    own = [group for group in engine.groups if group.name in groups]
    caption = [sizes(parallel), f"layout {'/'.join(dict.fromkeys(map(engine.layout_of, own)))}"]
    blocks = {g.spec.block_size for g in own if any(part.per_token for part in g.own_parts)}
    if blocks:
        caption.append(f"blocks of {'/'.join(map(str, sorted(blocks)))} tokens")
    return EngineColumn(name, " · ".join(caption), bands)


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
