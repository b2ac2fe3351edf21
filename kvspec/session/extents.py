"""Compute which contents a pair of ranks moves for a request, and the checksums of these contents.

Invariant: the extents of all sources of a consumer rank cover all that the request moves to it,
each byte once. Equal contents have equal checksums on both ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from kvspec.check.digests import Wanted, partial_sums, readable, rows_of, wanted_of
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.errors import SpecError
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.wire.messages import MAX_NAMES, Extent

Names = tuple[str, ...]
Alike = tuple[Names, Wanted]
"""Parts of layers that are summed together, and what of them."""


def extents_of(
    plan: TransferPlan, request: TransferRequest, producer: RankId, consumer: RankId
) -> Iterator[Extent]:
    """Yield what *request* moves from *producer* to *consumer*, in messages' sizes."""
    for edge in plan.between(producer, consumer):
        groups = plan.producer.group(edge.producer_group), plan.consumer.group(edge.group)
        contexts = (
            plan.producer.context(groups[0], producer),
            plan.consumer.context(groups[1], consumer),
        )
        block = plan.consumer.virtual_block(groups[1])
        for one in edge.slices:
            for (every, want), same_extents in _same_extents(
                plan, request, edge, one, block
            ).items():
                for layers, parts in _sized(same_extents, every):
                    yield Extent(
                        layers=layers,
                        parts=parts,
                        units=one.global_range,
                        tokens=want.tokens,
                        rows=range(want.rows),
                        producer=contexts[0],
                        consumer=contexts[1],
                        stripe=one.stripe,
                        block=block,
                    )


def _same_extents(
    plan: TransferPlan, request: TransferRequest, edge: Edge, one: TPTransferSlice, block: int
) -> dict[Alike, list[str]]:
    """Return the layers of a slice by what moves of them: the same of the same parts."""
    parts: dict[tuple[str, Wanted], list[str]] = {}
    for layer, part, want in wanted_of(plan, request, edge, one):
        if part.per_token or one.stripe.holds(want.tokens.start // block):
            parts.setdefault((layer, want), []).append(part.name)
    layers: dict[Alike, list[str]] = {}
    for (layer, want), names in parts.items():
        layers.setdefault((tuple(names), want), []).append(layer)
    return layers


def _sized(layers: Sequence[str], parts: Sequence[str]) -> Iterator[tuple[Names, Names]]:
    """Yield all layers with all parts, cut where the names are too many for a message."""
    size = sum(len(name.encode()) for name in (*layers, *parts))
    half = len(layers) // 2
    if size <= MAX_NAMES or len(layers) == len(parts) == 1:
        yield tuple(layers), tuple(parts)
    elif half:
        yield from _sized(layers[:half], parts)
        yield from _sized(layers[half:], parts)
    else:
        half = len(parts) // 2
        yield from _sized(layers, parts[:half])
        yield from _sized(layers, parts[half:])


def sums_of(cache: RankCache, tables: Mapping[str, BlockTable], extent: Extent) -> Iterator[int]:
    """Yield sums that add up, modulo 2**64, to that of what this rank holds of *extent*.

    Each is a little work, so that a caller may rest between. *tables*: the request's, of this
    engine's groups. `SpecError` for what the rank does not hold, or cannot read.
    """
    placed: dict[tuple[str, int, int], tuple[Ints, Ints, Ints]] = {}
    for layer in extent.layers:
        for name in extent.parts:
            region = cache.region(layer, name)
            part, units = readable(cache, region)
            if extent.units.start < units.start or units.stop < extent.units.stop:
                raise SpecError("units", extent.units, f"units of the rank: {units}")
            if not part.per_token and part.states < extent.rows.stop:
                raise SpecError(
                    "rows", extent.rows, f"rows below {part.states}, the rows of {name}"
                )
            key = region.group, part.tokens_per_state, region.num_blocks
            if key not in placed:
                placed[key] = _placed(cache, layer, part, tables, extent)
            for unit in extent.units:
                yield from partial_sums(region, unit - units.start, unit, *placed[key])


def _placed(
    cache: RankCache, layer: str, part: Part, tables: Mapping[str, BlockTable], extent: Extent
) -> tuple[Ints, Ints, Ints]:
    """Return block in memory, row and number of the rows of *extent*."""
    region = cache.region(layer, part.name)
    want = Wanted(extent.tokens, extent.rows.stop)
    block, row, number = rows_of(cache, region, part, tables, want)
    if part.per_token:
        keep = extent.stripe.holds(number // extent.block)
        for context in (extent.producer, extent.consumer):
            keep &= context.owns(number)
    else:
        keep = row >= extent.rows.start
    return block[keep], row[keep], number[keep]
