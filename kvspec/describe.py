"""One descriptor in words.

Law: reads a table backwards, from an id to bytes to the layer, part, units and tokens that they
hold; it decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvspec.cache import Region
from kvspec.errors import SpecError
from kvspec.ranges import Ints
from kvspec.request import TransferRequest
from kvspec.table import DescriptorTable, Entry


def describe(table: DescriptorTable, consumer_id: int, request: TransferRequest | None) -> str:
    """Say what the descriptor with the consumer's id *consumer_id* moves, and why from there.

    Names layers, parts, the model's units and the block; with *request*, the tokens too.
    """
    entry, run, block, cell = _found(table, consumer_id)
    rows, edge = entry.rows, entry.edge
    start = int(rows.consumer_address[run] + rows.consumer.offsets(block, cell))
    length = int(rows.length[run])
    lines = [f"id {consumer_id}: {length} bytes, {edge.producer} -> {edge.consumer}"]
    regions = [
        each
        for each in table.consumer.regions
        if each.group == edge.group and each.layer in edge.layers
    ]
    lines += (
        line
        for region in regions
        if (line := _line(table, entry, region, range(start, start + length), request))
    )
    return "\n".join([*lines, f"  {_why(table, entry)}"])


def _found(table: DescriptorTable, consumer_id: int) -> tuple[Entry, int, Ints, Ints]:
    total = sum(entry.rows.ids_used()[1] for entry in table.entries)
    if not 0 <= consumer_id < total:
        raise SpecError("consumer_id", consumer_id, f"an id from 0 to {total - 1}")
    entry = next(each for each in reversed(table.entries) if each.consumer_first <= consumer_id)
    pool = entry.rows.consumer
    run, step = divmod(consumer_id - entry.consumer_first, pool.num_blocks * pool.cells)
    block, cell = divmod(step, pool.cells) if pool.folded else divmod(step, pool.num_blocks)[::-1]
    return entry, run, np.int64(block), np.int64(cell)  # type: ignore[return-value]


def _line(
    table: DescriptorTable,
    entry: Entry,
    region: Region,
    span: range,
    request: TransferRequest | None,
) -> str | None:
    """Say which of the region's contents lie in *span*, or None if none do."""
    at = region.locate(span.start)
    blocks = [at[0]] if at is not None else range(region.num_blocks)
    units = np.arange(region.units)[:, None] * region.unit_stride
    grid = region.base + units + np.arange(region.states) * region.state_stride
    for block in blocks:
        address = grid + block * region.block_stride
        inside = (address >= span.start) & (address < span.stop)
        if inside.any():
            unit, state = np.nonzero(inside)
            first = _first_unit(table, entry, region)
            told = f"  {region.layer} {region.part}: units {_span(unit + first)}, block {block}"
            return f"{told}, {_rows(table, entry, block, state, request)}"
    return None


def _first_unit(table: DescriptorTable, entry: Entry, region: Region) -> int:
    engine, rank = table.consumer.engine, table.consumer.rank
    spec = engine.group(entry.edge.group).spec.of_layer(region.layer)
    part = next(each for each in spec.parts if each.name == region.part)
    return engine.parallel.deal(part.units, part.deal_in).ranges[rank.tp].start


def _rows(
    table: DescriptorTable,
    entry: Entry,
    block: int,
    state: Ints,
    request: TransferRequest | None,
) -> str:
    """Say which rows of a block, as token positions where a request's table holds the block."""
    grain = entry.rows.geometry.grain
    if request is None or not grain:
        return f"rows {_span(state)}"
    engine, rank = table.consumer.engine, table.consumer.rank
    group = engine.group(entry.edge.group)
    held = request.consumer_blocks[group.name]
    of_table, part = divmod(block, group.split)
    index = np.flatnonzero(held.block_ids == of_table)
    if not len(index):
        return f"rows {_span(state)} of a block that is not the request's"
    context = engine.parallel.context(rank)
    local = int(index[0]) * group.spec.block_size + part * group.memory_block_size + state * grain
    tokens = context.position(held.first_token // context.size + local)
    return f"tokens {_span(tokens)}"


def _span(values: Ints) -> str:
    found = np.unique(values)
    if len(found) == 1:
        return str(found[0])
    if found[-1] - found[0] == len(found) - 1:
        return f"{found[0]}..{found[-1]}"
    return ", ".join(map(str, found.tolist()))


def _why(table: DescriptorTable, entry: Entry) -> str:
    """Say which producer ranks hold the same bytes, and how this one came to be read."""
    return "\n  ".join(dict.fromkeys(_reasons(table, entry)))


def _reasons(table: DescriptorTable, entry: Entry) -> Iterator[str]:
    plan, edge = table.plan, entry.edge
    ranks = plan.producer.parallel.ranks
    at = ranks.index(edge.producer)
    for share in plan.shares:
        if share.pair.consumer.name != edge.group or not share.members.ranges[at]:
            continue
        units = share.members.ranges[at]
        held = f"units {_span(np.arange(units.start, units.stop))}"
        members = share.members.ranks_of(units)
        if not set(share.layers) & set(edge.layers):
            continue
        parts = "+".join(part.name for part in share.parts)
        if len(members) == 1:
            yield f"only {edge.producer} holds {held} of {parts}"
        else:
            others = ", ".join(str(ranks[each]) for each in members)
            yield f"{held} of {parts} are held by {others}; elected by {plan.replicas!r}"
