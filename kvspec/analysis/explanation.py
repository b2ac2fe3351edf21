"""Describe a plan, a descriptor table or one descriptor in words.

Invariant: a description is derived from the plan or the table alone and never changes it.

How it works:
    A plan lists its edges and notifications. To describe one descriptor, `explain` goes from the
    descriptor id back to the model. A table holds runs, a run has one id for each block and tile,
    and each id stands for a range of memory:

        id  ->  row set and run  ->  block and tile  ->  address range  ->  layer, part, unit, token

    `_place_of` does the first two steps. `_lines` does the last one: it computes the address of
    each unit, row and chunk of a region in block 0, and finds the blocks that shift the address
    into the range.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from kvspec.analysis.fewest import descriptor_counts
from kvspec.descriptors.request import TransferRequest
from kvspec.descriptors.selection import NumberedRows
from kvspec.descriptors.table import DescriptorTable
from kvspec.errors import SpecError, counted
from kvspec.memory.rank_cache import Region
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.replicas import Role
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan

# A set of more layers is described by its number, its first and its last name. DeepSeek-V3.2 has
# 122 cached layers, and the description of a plan repeats the set for every edge.
MAX_NAMES = 4


def explain(
    subject: TransferPlan | DescriptorTable,
    *,
    consumer_id: int | None = None,
    request: TransferRequest | None = None,
) -> str:
    """Describe a plan or a descriptor table in words.

    The text of a plan lists which units each consumer rank reads from which producer rank, and
    which consumer ranks notify each producer rank. The text of a table counts the rows and
    descriptors of both sides.

    Args:
        subject: The plan or the table.
        consumer_id: Describe only the descriptor with this id of the consumer side: its layers,
            parts, units and rows, and why the producer rank was chosen. For tables only.
        request: Count the descriptors of this request. Together with *consumer_id*: name the
            tokens and the producer's block, too. For tables only.

    Returns:
        Lines of text.

    Raises:
        SpecError: If *subject* is not a plan or a table, or *consumer_id* is not an id of the
            table.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig, plan_transfer
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> group = KVCacheGroup(name="latent", layers=["l.0", "l.1"], spec=spec)
    >>> producer = EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=2))
    >>> consumer = EngineSpec(groups=[group])
    >>> print(explain(plan_transfer(producer, consumer)))
    TP 2 -> TP 1, replicas chosen by 'spread': 1 edge
    consumer tp0 reads producer tp0, group latent, 2 layers: l.0, l.1
      latent unit 0
    consumer tp0 notifies producer tp0
    consumer tp0 notifies producer tp1, which no consumer rank reads
    """
    if isinstance(subject, TransferPlan):
        for field, value in (("consumer_id", consumer_id), ("request", request)):
            if value is not None:
                raise SpecError(field, value, rule="can only be used with a DescriptorTable")
        return "\n".join(_plan_lines(subject))
    if not isinstance(subject, DescriptorTable):
        raise SpecError("subject", subject, "a TransferPlan or a DescriptorTable")
    table = subject
    if consumer_id is None:
        return _summary(table, request)
    return _describe(table, consumer_id, request)


def sizes(parallel: ParallelConfig) -> str:
    """Return the parallel sizes in words.

    >>> sizes(ParallelConfig(tp_size=4, dcp_size=2))
    'TP 4, context 2 x 1 tokens'
    """
    words = [f"TP {parallel.tp_size}"]
    if parallel.pp_size > 1:
        words.append(f"PP {parallel.pp_size}")
    if parallel.context_size > 1:
        words.append(f"context {parallel.context_size} x {parallel.interleave_size} tokens")
    return ", ".join(words)


def _plan_lines(plan: TransferPlan) -> Iterator[str]:
    """Yield the sizes, the excluded layers, the edges and the notifications of a plan."""
    both = " -> ".join(sizes(engine.parallel) for engine in (plan.producer, plan.consumer))
    edges = counted(len(plan.edges), "edge")
    yield f"{both}, replicas chosen by {plan.policy_name!r}: {edges}"
    for side, engine in (("producer", plan.producer), ("consumer", plan.consumer)):
        if engine.excluded:
            yield f"excluded by the {side}, not transferred: {layer_names(tuple(engine.excluded))}"
    for edge in plan.edges:
        ranks = f"consumer {edge.consumer} reads producer {edge.producer}"
        yield f"{ranks}, group {edge.group}, {layer_names(edge.layers)}"
        tokens = edge_tokens(plan, edge)
        yield from (f"  {line}{tokens}" for line in slice_lines(edge))
    for rank in plan.producer.parallel.ranks:
        notifiers = plan.notifiers(rank)
        unread = "" if plan.targets(rank) else ", which no consumer rank reads"
        if len(notifiers) == 1:
            yield f"consumer {notifiers[0]} notifies producer {rank}{unread}"
        else:
            yield f"consumer ranks {', '.join(map(str, notifiers))} notify producer {rank}{unread}"


def layer_names(layers: tuple[str, ...]) -> str:
    """Return the names of a few layers, or the number of many layers with the first and the last.

    >>> layer_names(("l.0", "l.1"))
    '2 layers: l.0, l.1'
    >>> layer_names(tuple(f"layers.{index}" for index in range(61)))
    '61 layers: layers.0 .. layers.60'
    """
    many = len(layers) > MAX_NAMES
    names = f"{layers[0]} .. {layers[-1]}" if many else ", ".join(layers)
    return f"{counted(len(layers), 'layer')}: {names}"


def slice_lines(edge: Edge) -> Iterator[str]:
    """Yield the parts, units, layers and blocks that move over an edge, one line for each slice."""
    for tp_slice in edge.slices:
        units = _range_text(
            "unit", np.arange(tp_slice.global_range.start, tp_slice.global_range.stop)
        )
        layers = "" if tp_slice.layers == edge.layers else f" of {layer_names(tp_slice.layers)}"
        blocks = "" if tp_slice.stripe.whole else f", {tp_slice.stripe}"
        yield f"{'+'.join(tp_slice.parts)} {units}{layers}{blocks}"


def head_lines(plan: TransferPlan, edge: Edge) -> Iterator[str]:
    """Yield the parts, heads, layers and blocks that move over an edge.

    A head is what tensor parallelism gives to a rank as a whole: a KV head, or the channels of one
    head of a recurrent state. So all parts of a layer count the same heads, where `slice_lines`
    counts channels for some parts. Parts with equal heads are one line.

    >>> from kvspec import EngineSpec, KVCacheGroup, MambaSpec, ParallelConfig, plan_transfer
    >>> spec = MambaSpec.mamba2(num_heads=4, head_dim=8, state_size=16, n_groups=1, conv_kernel=4,
    ...     dtype="float32")
    >>> group = KVCacheGroup(name="mamba", layers=["l.0"], spec=spec)
    >>> engines = [EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=n)) for n in (1, 2)]
    >>> plan = plan_transfer(*engines)
    >>> list(slice_lines(plan.edges[1]))
    ['conv_x units 16..31', 'conv_b+conv_c units 0..15', 'ssm units 2..3']
    >>> list(head_lines(plan, plan.edges[1]))
    ['conv_x+ssm heads 2..3', 'conv_b+conv_c']
    """
    spec = plan.consumer.group(edge.group).spec
    names: dict[tuple[str, str, str], list[str]] = {}
    for tp_slice in edge.slices:
        parts_by_name = {part.name: part for part in spec.of_layer(tp_slice.layers[0]).parts}
        layers = "" if tp_slice.layers == edge.layers else f" of {layer_names(tp_slice.layers)}"
        blocks = "" if tp_slice.stripe.whole else f", {tp_slice.stripe}"
        for name in tp_slice.parts:
            part, units = parts_by_name[name], tp_slice.global_range
            # Explicit shardings may divide a head.
            whole = units.start % part.granularity == units.stop % part.granularity == 0
            size = part.granularity if whole else 1
            heads = range(units.start // size, units.stop // size)
            only = len(heads) == part.units // size == 1
            noun = (
                "" if only else f" {_range_text('head' if whole else 'channel', np.array(heads))}"
            )
            names.setdefault((layers, blocks, noun), []).append(name)
    for (layers, blocks, noun), parts in names.items():
        yield f"{'+'.join(parts)}{noun}{layers}{blocks}"


def layer_numbers(layers: tuple[str, ...]) -> str:
    """Return the numbers of layers in short: a range, or the first, the last and how many.

    >>> layer_numbers(("model.layers.0.attn", "model.layers.1.attn"))
    '0..1'
    >>> layer_numbers(tuple(f"layers.{number}" for number in (3, 7, 11)))
    '3..11 (3)'
    >>> layer_numbers(("first", "last"))
    'first..last (2)'
    """
    found = [re.findall(r"[0-9]+", name) for name in layers]
    numbers = [int(digits[0]) for digits in found if digits]
    if len(numbers) < len(layers):
        return layers[0] if len(layers) == 1 else f"{layers[0]}..{layers[-1]} ({len(layers)})"
    if len(numbers) == 1:
        return str(numbers[0])
    whole = numbers == [*range(numbers[0], numbers[-1] + 1)]
    return f"{numbers[0]}..{numbers[-1]}{'' if whole else f' ({len(numbers)})'}"


def edge_tokens(plan: TransferPlan, edge: Edge) -> str:
    """Return the tokens of an edge between context ranks. Edges without contexts move all tokens.

    Two edges of a plan may read the same units of different context ranks. Only the tokens
    distinguish them.
    """
    group = plan.producer.group(edge.producer_group)
    if not group.spec.of_layer(edge.layers[0]).parts[0].per_token:
        return ""
    producer = plan.producer.context(group, edge.producer)
    consumer = plan.consumer.context(plan.consumer.group(edge.group), edge.consumer)
    if producer.size == 1 or producer == consumer:
        return "" if consumer.size == 1 else f", tokens {_first_runs(consumer)}"
    tokens = f", tokens {_first_runs(producer)}"
    return tokens if consumer.size == 1 else f"{tokens} that are also in {_first_runs(consumer)}"


def _first_runs(context: BlockCyclic) -> str:
    """Return the first tokens of a context, such as ``1, 3, 5, ...`` or ``16..31, 48..63, ...``."""
    run, shown = context.interleave, 3 if context.interleave == 1 else 2
    starts = [(index * context.size + context.rank) * run for index in range(shown)]
    runs = [str(start) if run == 1 else f"{start}..{start + run - 1}" for start in starts]
    return ", ".join([*runs, "..."])


def _describe(table: DescriptorTable, consumer_id: int, request: TransferRequest | None) -> str:
    """Describe one descriptor: its layers, parts, units and block, and why its source was chosen.

    With a request, the text also names the tokens and the place in the producer's memory.
    """
    numbered, run, block, tile = _place_of(table, "consumer", consumer_id)
    rows, edge = numbered.rows, numbered.edge
    start = int(rows.consumer_address[run] + rows.consumer.offsets(block, tile))
    length = int(rows.length[run])
    source = "" if request is None else _source(table, consumer_id, request)
    ranks = f"producer {edge.producer}{source} -> consumer {edge.consumer}"
    regions = [
        region
        for region in table.consumer.regions
        if region.group == edge.group and region.layer in edge.layers
    ]
    addresses = range(start, start + length)
    contents = (
        line for region in regions for line in _lines(table, numbered, region, addresses, request)
    )
    title = f"id {consumer_id}: {length} bytes, {ranks} at {start:#x}"
    return "\n".join([title, *contents, f"  {_why(table, numbered)}"])


def _summary(table: DescriptorTable, request: TransferRequest | None) -> str:
    """Count the rows and ids of both sides, and the descriptors of *request*.

    The descriptors of a request are counted in three ways: as selected ids, after NIXL has merged
    them, and as the smallest number that the memory of both sides allows.
    """
    lines = [f"producer {table.producer.rank} -> consumer {table.consumer.rank}"]
    for number, side in enumerate(("producer", "consumer")):
        rows = len(getattr(table, f"{side}_rows"))
        ids = sum(numbered.rows.ids_used[number] for numbered in table.numbered_rows)
        memory_type = getattr(table, f"{side}_memory_type")
        lines.append(f"  {side}: {rows:,} rows of {ids:,} descriptors in {memory_type}")
    if request is not None:
        merged, fewest = descriptor_counts(table, request)
        moves = [(numbered.rows, len(tiles)) for numbered, tiles in table.tiles(request)]
        moved = sum(rows.nbytes * tiles for rows, tiles in moves)
        count = sum(len(rows) * tiles for rows, tiles in moves)
        size = f"{moved:,} bytes in {count:,} descriptors"
        merging = f"NIXL merges them into {merged:,}, and {fewest:,} is the minimum"
        lines.append(f"  {request.request_id}: {size}; {merging}")
        if dead := table.dead_bytes(request):
            why = "an opaque page moves whole"
            if table.dead_tokens:
                why = "moving them takes less time than more descriptors would"
            lines.append(f"  {dead:,} of the bytes belong to dead tokens: {why}")
    return "\n".join(lines)


def _source(table: DescriptorTable, consumer_id: int, request: TransferRequest) -> str:
    """Return the place in the producer's memory that *request* pairs with a consumer id."""
    numbered, run, block, tile = _place_of(table, "consumer", consumer_id)
    number = numbered.rows.consumer.ids(block, tile)
    for moving, tiles in table.tiles(request):
        found = np.flatnonzero(tiles.ids[1] == number).tolist() if moving is numbered else []
        if found:
            at: int = found[0]
            start = numbered.rows.producer_address[run] + numbered.rows.offsets(tiles)[0, at]
            return f" at {int(start):#x} (block {tiles.block[0, at]})"
    return " (not part of this request)"


def _place_of(table: DescriptorTable, side: Role, id_: int) -> tuple[NumberedRows, int, Ints, Ints]:
    """Return the numbered rows of an id, its run, its block in memory and its tile in the block."""
    number = 0 if side == "producer" else 1
    total = sum(numbered.rows.ids_used[number] for numbered in table.numbered_rows)
    if not total:
        raise SpecError(f"{side}_id", id_, rule="these two ranks exchange nothing, so no id exists")
    if isinstance(id_, bool) or not isinstance(id_, (int, np.integer)) or not 0 <= id_ < total:
        raise SpecError(f"{side}_id", id_, f"an id from 0 to {total - 1}")
    # The ids of each row set follow those of the one before it.
    firsts = [getattr(numbered, f"{side}_first") for numbered in table.numbered_rows]
    numbered = table.numbered_rows[bisect_right(firsts, id_) - 1]
    block_layout = getattr(numbered.rows, side)
    run, id_in_run = divmod(int(id_) - getattr(numbered, f"{side}_first"), block_layout.ids_per_run)
    block, tile = block_layout.place(id_in_run)
    return numbered, run, np.asarray(block, np.int64), np.asarray(tile, np.int64)


def _lines(
    table: DescriptorTable,
    numbered: NumberedRows,
    region: Region,
    addresses: range,
    request: TransferRequest | None,
) -> Iterator[str]:
    """Yield one line for each block with bytes in *addresses*: its part, units and rows."""
    block_addresses = region.addresses()
    _, units = table.consumer.part_of(region)
    stride = max(region.block_stride, 1)
    # `block_addresses` has the addresses in block 0. In block b, a content is b times the stride
    # further on. So *addresses* has each content for one range of blocks.
    first_block = np.maximum(-((block_addresses - addresses.start) // stride), 0)
    last_block = np.minimum((addresses.stop - 1 - block_addresses) // stride, region.num_blocks - 1)
    ranges = zip(first_block.ravel().tolist(), last_block.ravel().tolist(), strict=True)
    for block in sorted({block for first, last in ranges for block in range(first, last + 1)}):
        unit, state, _ = np.nonzero((first_block <= block) & (block <= last_block))
        names = _range_text("unit", unit + units.start)
        place = f"  {region.layer} {region.part}: {names}, consumer block {block}"
        yield f"{place}, {_rows(table, numbered, block, state, request)}"


def _rows(
    table: DescriptorTable,
    numbered: NumberedRows,
    block: int,
    state: Ints,
    request: TransferRequest | None,
) -> str:
    """Return rows of a block in words, as token positions if the block belongs to *request*."""
    tokens_per_state = numbered.split_rows.token_split.tokens_per_state
    if request is None or not tokens_per_state:
        return _range_text("row", state)
    engine, rank = table.consumer.engine, table.consumer.rank
    group = engine.group(numbered.edge.group)
    block_table = request.consumer_blocks[group.name]
    # Block tables count logical blocks, memory counts the blocks of the attention kernel.
    logical_block, part = divmod(block, group.kernel_blocks_per_block)
    index = np.flatnonzero(block_table.block_ids == logical_block)
    if not len(index):
        return f"{_range_text('row', state)} of a block that is not part of the request"
    if group.spec.is_ring:
        last, size = request.num_tokens - 1, group.spec.block_size
        tokens = last - (last - state) % size
        # A short request has no token in the last rows.
        return _range_text("row", state) if tokens.min() < 0 else _range_text("token", tokens)
    context = engine.context(group, rank)
    local = (
        int(index[0]) * group.spec.block_size
        + part * group.memory_block_size
        + state * tokens_per_state
    )
    tokens = context.position(block_table.first_token // context.size + local)
    return _range_text("token", tokens)


def _range_text(noun: str, values: Ints) -> str:
    """Return numbers with their noun.

    >>> [_range_text("row", np.array(rows)) for rows in ([3], [4, 5, 6], [1, 3])]
    ['row 3', 'rows 4..6', 'rows 1, 3']
    """
    numbers = np.unique(values)
    if len(numbers) == 1:
        return f"{noun} {numbers[0]}"
    if numbers[-1] - numbers[0] == len(numbers) - 1:
        return f"{noun}s {numbers[0]}..{numbers[-1]}"
    return f"{noun}s {', '.join(map(str, numbers.tolist()))}"


def _why(table: DescriptorTable, numbered: NumberedRows) -> str:
    """Return which producer ranks hold the same bytes, and why this rank was chosen."""
    return "\n  ".join(dict.fromkeys(_reasons(table, numbered)))


def _reasons(table: DescriptorTable, numbered: NumberedRows) -> Iterator[str]:
    plan, edge = table.plan, numbered.edge
    ranks = plan.producer.parallel.ranks
    at = ranks.index(edge.producer)
    for replica_group in plan.replica_groups:
        if (
            replica_group.pair.consumer.name != edge.group
            or not replica_group.producer_sharding.ranges[at]
        ):
            continue
        units = replica_group.producer_sharding.ranges[at]
        held = _range_text("unit", np.arange(units.start, units.stop))
        members = replica_group.producer_sharding.ranks_of(units)
        if not set(replica_group.layers) & set(edge.layers):
            continue
        parts = "+".join(part.name for part in replica_group.parts)
        if len(members) == 1:
            yield f"only producer {edge.producer} holds {held} of {parts}"
        else:
            replicas = ", ".join(str(ranks[member]) for member in members)
            chosen = f"the policy {plan.policy_name!r} chose {edge.producer}"
            yield f"producer ranks {replicas} hold {held} of {parts}: {chosen}"
