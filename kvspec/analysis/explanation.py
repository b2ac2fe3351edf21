"""A table and one descriptor of it in words.

Law: reads a table backwards, from an id to bytes to the layer, part, units and tokens that they
hold; it decides nothing.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.selection import Entry
from kvspec.descriptors.table import DescriptorTable
from kvspec.errors import SpecError
from kvspec.inputs import instance
from kvspec.memory.rank_cache import Region
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.replicas import Role
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan


def explain(
    subject: TransferPlan | DescriptorTable,
    *,
    consumer_id: int | None = None,
    request: TransferRequest | None = None,
) -> str:
    """Describe a plan or a descriptor table in words.

    A plan: which consumer rank reads which units from which producer rank, and which consumer ranks
    notify each producer rank. A table: the rows of both sides.

    Args:
        subject: The plan or the table.
        consumer_id: Of a table only. Describe the descriptor with this id of the consumer's side:
            the layers, parts, units and tokens that it moves, and why they come from this rank.
        request: Of a table only. Count the descriptors of this request, or, with *consumer_id*,
            name the tokens and the producer's block.

    Returns:
        Lines of text.

    Raises:
        SpecError: If *subject* is neither a plan nor a table, or *consumer_id* is not an id of
            the table.

    """
    if isinstance(subject, TransferPlan):
        for field, value in (("consumer_id", consumer_id), ("request", request)):
            if value is not None:
                raise SpecError(field, value, "None: only a DescriptorTable takes it")
        return "\n".join(_plan_lines(subject))
    table = instance("subject", subject, DescriptorTable)
    if consumer_id is None:
        return _summary(table, request)
    return _describe(table, consumer_id, request)


def sizes(parallel: ParallelConfig) -> str:
    """Return the parallel sizes in words, such as ``TP 4, PP 2``."""
    found = [f"TP {parallel.tp_size}"]
    if parallel.pp_size > 1:
        found.append(f"PP {parallel.pp_size}")
    if parallel.context_size > 1:
        found.append(f"context {parallel.context_size} x {parallel.interleave_size} tokens")
    return ", ".join(found)


def _plan_lines(plan: TransferPlan) -> Iterator[str]:
    """Yield, line by line, who reads which units from whom, and who tells whom."""
    both = " -> ".join(sizes(engine.parallel) for engine in (plan.producer, plan.consumer))
    yield f"{both}, replicas by {plan.policy_name!r}: {len(plan.edges)} edges"
    for side, engine in (("producer", plan.producer), ("consumer", plan.consumer)):
        if engine.excluded:
            yield f"excluded by the {side}, not transferred: {', '.join(engine.excluded)}"
    for edge in plan.edges:
        yield f"{edge.consumer} reads {edge.producer}, group {edge.group}:"
        yield from (f"  {line}" for line in carried(edge))
    for rank in plan.producer.parallel.ranks:
        told = ", ".join(map(str, plan.notifiers(rank)))
        unread = "" if plan.targets(rank) else " (nobody reads it)"
        yield f"producer {rank}{unread} is told by consumer {told}"


def carried(edge: Edge) -> Iterator[str]:
    """Yield what one producer rank gives to one consumer rank: parts, units, layers, blocks."""
    for each in edge.slices:
        units = f"{each.global_range.start}..{each.global_range.stop - 1}"
        layers = "" if each.layers == edge.layers else f" of {', '.join(each.layers)}"
        blocks = "" if each.stripe.whole else f", {each.stripe}"
        yield f"{'+'.join(each.parts)} units {units}{layers}{blocks}"


def _describe(table: DescriptorTable, consumer_id: int, request: TransferRequest | None) -> str:
    """Say what the descriptor with the consumer's id *consumer_id* moves, and why from there.

    Names layers, parts, the model's units and the block; with *request*, the tokens and where the
    bytes come from too.
    """
    entry, run, block, tile = _found(table, "consumer", consumer_id)
    rows, edge = entry.rows, entry.edge
    start = int(rows.consumer_address[run] + rows.consumer.offsets(block, tile))
    length = int(rows.length[run])
    source = "" if request is None else _source(table, consumer_id, request)
    title = f"id {consumer_id}: {length} bytes, {edge.producer}{source} -> {edge.consumer}"
    regions = [
        each
        for each in table.consumer.regions
        if each.group == edge.group and each.layer in edge.layers
    ]
    span = range(start, start + length)
    told = (line for each in regions for line in _lines(table, entry, each, span, request))
    return "\n".join([f"{title} at {start:#x}", *told, f"  {_why(table, entry)}"])


def _summary(table: DescriptorTable, request: TransferRequest | None) -> str:
    """Say how many rows and ids each side has, and how many descriptors *request* takes.

    They are counted as ids, as what NIXL merges those to, and as the fewest that memory allows.
    """
    lines = [f"{table.producer.rank} -> {table.consumer.rank}"]
    for number, side in enumerate(("producer", "consumer")):
        rows = len(getattr(table, f"{side}_rows"))
        ids = sum(entry.rows.ids_used[number] for entry in table.entries)
        where = getattr(table, f"{side}_memory_type")
        lines.append(f"  {side}: {rows:,} rows of {ids:,} descriptors in {where}")
    if request is not None:
        merged, fewest = table.counts(request)
        moved = int(table.descriptors(request)[:, 2].sum())
        told = f"{len(table.select(request)[0]):,} ids, {merged:,} after NIXL's merging"
        lines.append(f"  {request.request_id}: {moved:,} bytes; {told}, {fewest:,} the fewest")
        if dead := table.dead_bytes(request):
            why = "which takes less time than the descriptors that would leave them out"
            lines.append(f"  {dead:,} of the bytes are of dead tokens of the last block, {why}")
    return "\n".join(lines)


def _source(table: DescriptorTable, consumer_id: int, request: TransferRequest) -> str:
    """Say which bytes of the producer *request* pairs with a consumer's id."""
    producer_ids, consumer_ids = table.select(request)
    index = np.flatnonzero(consumer_ids == consumer_id)
    if not len(index):
        return " (not of this request)"
    entry, run, block, tile = _found(table, "producer", int(producer_ids[index[0]]))
    rows = entry.rows
    address = int(rows.producer_address[run] + rows.producer.offsets(block, tile))
    return f" at {address:#x} (its block {int(block)})"


def _found(table: DescriptorTable, side: Role, at: int) -> tuple[Entry, int, Ints, Ints]:
    """Return an id's entry, its run, its block in memory and its place in the block."""
    number = 0 if side == "producer" else 1
    total = sum(entry.rows.ids_used[number] for entry in table.entries)
    if isinstance(at, bool) or not isinstance(at, (int, np.integer)) or not 0 <= at < total:
        wanted = f"an id from 0 to {total - 1}" if total else "nothing: this pair moves nothing"
        raise SpecError(f"{side}_id", at, wanted)
    firsts = [getattr(entry, f"{side}_first") for entry in table.entries]
    entry = table.entries[bisect_right(firsts, at) - 1]
    block_layout = getattr(entry.rows, side)
    run, own = divmod(int(at) - getattr(entry, f"{side}_first"), block_layout.ids_per_run)
    block, tile = block_layout.place(own)
    return entry, run, np.asarray(block, np.int64), np.asarray(tile, np.int64)


def _lines(
    table: DescriptorTable,
    entry: Entry,
    region: Region,
    span: range,
    request: TransferRequest | None,
) -> Iterator[str]:
    """Say, block by block, which of the region's contents lie in *span*."""
    units = np.arange(region.units)[:, None, None] * region.unit_stride
    rows = np.arange(region.states)[:, None] * region.state_stride
    grid = region.base + units + rows + np.arange(region.chunks) * region.chunk_stride
    stride = max(region.block_stride, 1)
    # The first and the last block in which each content lies in the span.
    before = np.maximum(-((grid - span.start) // stride), 0)
    after = np.minimum((span.stop - 1 - grid) // stride, region.num_blocks - 1)
    spans = zip(before.ravel().tolist(), after.ravel().tolist(), strict=True)
    for block in sorted({each for first, last in spans for each in range(first, last + 1)}):
        unit, state, _ = np.nonzero((before <= block) & (block <= after))
        first = _first_unit(table, entry, region)
        told = f"  {region.layer} {region.part}: {_span('unit', unit + first)}"
        told += f", consumer's block {block}"
        yield f"{told}, {_rows(table, entry, block, state, request)}"


def _first_unit(table: DescriptorTable, entry: Entry, region: Region) -> int:
    engine, rank = table.consumer.engine, table.consumer.rank
    group = engine.group(entry.edge.group)
    parts = group.spec.of_layer(region.layer).parts
    part = next(each for each in parts if each.name == region.part)
    return engine.units(group, part, rank).start


def _rows(
    table: DescriptorTable,
    entry: Entry,
    block: int,
    state: Ints,
    request: TransferRequest | None,
) -> str:
    """Say which rows of a block, as token positions where a request's table holds the block."""
    grain = entry.rows.token_split.grain
    if request is None or not grain:
        return _span("row", state)
    engine, rank = table.consumer.engine, table.consumer.rank
    group = engine.group(entry.edge.group)
    held = request.consumer_blocks[group.name]
    of_table, part = divmod(block, group.kernel_blocks_per_block)
    index = np.flatnonzero(held.block_ids == of_table)
    if not len(index):
        return f"{_span('row', state)} of a block that is not the request's"
    context = engine.context(group, rank)
    local = int(index[0]) * group.spec.block_size + part * group.memory_block_size + state * grain
    tokens = context.position(held.first_token // context.size + local)
    return _span("token", tokens)


def _span(noun: str, values: Ints) -> str:
    """Return *values* with their noun: ``unit 3``, ``tokens 4..9``, ``rows 1, 3``."""
    found = np.unique(values)
    if len(found) == 1:
        return f"{noun} {found[0]}"
    if found[-1] - found[0] == len(found) - 1:
        return f"{noun}s {found[0]}..{found[-1]}"
    return f"{noun}s {', '.join(map(str, found.tolist()))}"


def _why(table: DescriptorTable, entry: Entry) -> str:
    """Say which producer ranks hold the same bytes, and how this one came to be read."""
    return "\n  ".join(dict.fromkeys(_reasons(table, entry)))


def _reasons(table: DescriptorTable, entry: Entry) -> Iterator[str]:
    plan, edge = table.plan, entry.edge
    ranks = plan.producer.parallel.ranks
    at = ranks.index(edge.producer)
    for replica_group in plan.replica_groups:
        if (
            replica_group.pair.consumer.name != edge.group
            or not replica_group.producer_sharding.ranges[at]
        ):
            continue
        units = replica_group.producer_sharding.ranges[at]
        held = _span("unit", np.arange(units.start, units.stop))
        members = replica_group.producer_sharding.ranks_of(units)
        if not set(replica_group.layers) & set(edge.layers):
            continue
        parts = "+".join(part.name for part in replica_group.parts)
        if len(members) == 1:
            yield f"only {edge.producer} holds {held} of {parts}"
        else:
            others = ", ".join(str(ranks[each]) for each in members)
            yield f"{held} of {parts} held by {others}; chosen by {plan.policy_name!r}"
