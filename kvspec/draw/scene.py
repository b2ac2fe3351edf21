"""What the picture of a plan shows: boxes of ranks, and lines of units in them.

Law: every slice of every edge that is asked for is in exactly one line of its consumer, and every
unit that a producer rank holds is in exactly one line of it. Places and colours are not decided
here.
"""

from __future__ import annotations

import re

import attrs

from kvspec.draw.canvas import DASH
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Cyclic
from kvspec.plan.explain import sizes
from kvspec.plan.plan import TransferPlan
from kvspec.plan.shares import Share


@attrs.frozen
class Family:
    """Parts that are dealt alike: their names joined, all their units, and dealt in what."""

    name: str
    units: int
    deal_in: int

    def pieces(self, units: range) -> range:
        """Return *units* counted in what they are dealt in: heads or groups of channels."""
        return range(units.start // self.deal_in, units.stop // self.deal_in)


@attrs.define
class Held:
    """Units of one family that a producer rank holds, and who reads any of them."""

    family: Family
    units: range
    readers: list[RankId] = attrs.field(factory=list)


@attrs.define
class Read:
    """Units of one family that a consumer rank reads from one producer rank."""

    family: Family
    units: range
    source: RankId
    stripe: tuple[int, int]
    extra: str = ""
    groups: list[str] = attrs.field(factory=list)
    layers: list[str] = attrs.field(factory=list)


@attrs.frozen
class Scene:
    """The lines of every rank of both sides."""

    plan: TransferPlan
    families: tuple[Family, ...]
    held: dict[RankId, list[Held]]
    read: dict[RankId, list[Read]]


def scene(plan: TransferPlan, group: str | None) -> Scene:
    """Return what to draw of *plan*: all of it, or one group of the consumer's."""
    if group is not None:
        plan.consumer.group(group)
    shares = [each for each in plan.shares if group in (None, each.pair.consumer.name)]
    if not shares:
        raise SpecError("group", group, "a group that the plan transfers")
    families = tuple(dict.fromkeys(family_of(each.parts) for each in shares))
    read = _read(plan, group, families)
    return Scene(plan, families, _held(plan, shares, read), read)


def family_of(parts: tuple[Part, ...]) -> Family:
    """Return the family of *parts*."""
    return Family("+".join(part.name for part in parts), parts[0].units, parts[0].deal_in)


def _read(
    plan: TransferPlan, group: str | None, families: tuple[Family, ...]
) -> dict[RankId, list[Read]]:
    """Return every consumer rank's lines; slices that differ only in their layers are one."""
    order = {family: at for at, family in enumerate(families)}
    found: dict[RankId, dict[tuple[object, ...], Read]] = {
        rank: {} for rank in plan.consumer.parallel.ranks
    }
    specs = {each.name: each.spec for each in plan.consumer.groups}
    for edge in plan.edges:
        if group not in (None, edge.group):
            continue
        for each in edge.slices:
            layers = each.layers or edge.layers
            own = specs[edge.group].of_layer(layers[0]).parts
            family = family_of(tuple(part for part in own if part.name in each.parts))
            key = (family, each.global_range, edge.producer, each.stripe)
            line = found[edge.consumer].setdefault(
                key, Read(family, each.global_range, edge.producer, each.stripe)
            )
            line.groups += [edge.group] if edge.group not in line.groups else []
            line.layers += layers
    for rank, lines in found.items():
        for line in lines.values():
            line.extra = _extra(plan, rank, line)
    return {
        rank: sorted(lines.values(), key=lambda line: (order[line.family], line.units.start))
        for rank, lines in found.items()
    }


def _extra(plan: TransferPlan, rank: RankId, line: Read) -> str:
    """Say which blocks, positions and layers a line is about, if not all."""
    told = []
    if line.stripe[1] > 1:
        told.append(f"blocks b % {line.stripe[1]} = {line.stripe[0]}")
    home = plan.producer.homes[line.layers[0]]
    tokens = any(part.per_token for part in home.spec.of_layer(line.layers[0]).parts)
    if plan.producer.context_size(home) > 1 and tokens:
        told.append(f"context {plan.producer.context(home, line.source).rank}")
    stages = plan.consumer.stage_of
    groups = (plan.consumer.group(name) for name in line.groups)
    mine = {each for group in groups for each in group.layers if stages[each] == rank.pp}
    if not set(line.layers) >= mine:
        told.append(layers_text(line.layers))
    return ", ".join(told)


def _held(
    plan: TransferPlan, shares: list[Share], read: dict[RankId, list[Read]]
) -> dict[RankId, list[Held]]:
    """Return every producer rank's lines."""
    ranks = plan.producer.parallel.ranks
    found: dict[RankId, dict[tuple[Family, range], Held]] = {rank: {} for rank in ranks}
    for share in shares:
        family = family_of(share.parts)
        for rank, units in zip(ranks, share.members.ranges, strict=True):
            if units:
                found[rank].setdefault((family, units), Held(family, units))
    for reader, lines in read.items():
        for line in lines:
            for held in found[line.source].values():
                inside = held.units.start <= line.units.start < held.units.stop
                if held.family == line.family and inside and reader not in held.readers:
                    held.readers.append(reader)
    return {rank: list(lines.values()) for rank, lines in found.items()}


def bands(engine: EngineSpec) -> list[tuple[str, list[RankId]]]:
    """Return the ranks in bands: pipeline stages, and context ranks within them."""
    parallel = engine.parallel
    found: dict[tuple[int, Cyclic], list[RankId]] = {}
    for rank in parallel.ranks:
        found.setdefault((rank.pp, parallel.context(rank)), []).append(rank)
    told: list[tuple[str, list[RankId]]] = []
    for (stage, context), ranks in sorted(found.items(), key=lambda e: (e[0][0], e[0][1].rank)):
        words = []
        if parallel.pp_size > 1:
            layers = [layer for layer, at in engine.stage_of.items() if at == stage]
            words.append(f"stage {stage}: {layers_text(layers)}")
        if context.size > 1:
            each = f"{context.interleave} token{'s' if context.interleave > 1 else ''}"
            words.append(f"context {context.rank} of {context.size}, {each} at a time")
        told.append((" · ".join(words), ranks))
    return told


def excluded_text(plan: TransferPlan) -> list[str]:
    """Say, for each side, which layers it does not transfer."""
    sides = (("producer", plan.producer), ("consumer", plan.consumer))
    return [
        f"excluded by the {side}: {layers_text([*engine.excluded])}"
        for side, engine in sides
        if engine.excluded
    ]


def layers_text(layers: list[str]) -> str:
    """Return layer names in few words: by number where each has one and none is left out."""
    numbers = sorted({int(n.group()) for n in map(re.compile(r"\d+").search, layers) if n})
    if len(numbers) == len(set(layers)) and numbers[-1] - numbers[0] == len(numbers) - 1:
        first, last = numbers[0], numbers[-1]
        return f"layer {first}" if first == last else f"layers {first}{DASH}{last}"
    more = len(set(layers)) - 1
    return f"{layers[0]} and {more} more" if more else layers[0]


def side_text(engine: EngineSpec, groups: set[str]) -> str:
    """Return one engine's sizes, layouts and block sizes in words."""
    own = [each for each in engine.groups if each.name in groups]
    layouts = "/".join(dict.fromkeys(engine.layout_of(each) for each in own))
    tokens = {
        each.spec.block_size
        for each in own
        if any(part.per_token for part in each.spec.of_layer(each.layers[0]).parts)
    }
    blocks = f" · blocks of {'/'.join(map(str, sorted(tokens)))} tokens" if tokens else ""
    return f"{sizes(engine.parallel)} · layout {layouts}{blocks}"
