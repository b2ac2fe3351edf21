"""Complete blocks: the blocks of a finished load that may be put into a prefix cache.

Invariant: each token of a complete block was moved or was valid before, on every rank and in every
layer that moves. So a later prompt that begins with the same tokens may read the whole block.

How it works:
    A load moves only live tokens. With a window of 12 tokens, a query after 40 tokens reads the
    tokens 29 to 39. The consumer has blocks of 16 tokens and has cached the first block:

        token       0 ... 15 | 16 ... 28    29 ... 31 | 32 ... 39    40 ... 47
        content     cached   | not moved    moved     | moved        not computed
        complete    yes      | no                     | no

    The second block is the trap. It is full, so an engine would put it into its prefix cache. A
    later prompt of 32 tokens would then read the tokens 21 to 28, which were never moved.

    Three rules need more than token positions:

    - Some rows describe several tokens. If one token of a row is live, the row moves whole. So the
      complete tokens begin at the start of that row. A row that the prompt does not fill will
      change later, so the complete tokens end before that row.
    - A recurrent state describes all tokens up to one position. Its block is complete if the block
      ends exactly there, because a later prompt looks for the state at the end of a block.
    - The dead tokens of a tile that moves whole do not count. The producer need not hold them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, Ids, TransferRequest
from kvspec.engines.group import KVCacheGroup
from kvspec.inputs import instance
from kvspec.ownership.part import Part
from kvspec.plan.plan import TransferPlan


def complete_tokens(plan: TransferPlan, request: TransferRequest) -> dict[str, tuple[range, ...]]:
    """Return the token positions that a prefix cache may contain after *request* was loaded.

    A prefix cache that stores ranges of tokens can use them. They are valid only after the loads of
    all ranks are done. A layer that either engine excludes does not count: the load does not move
    it, so the consumer has to fill it in any case.

    Args:
        plan: The transfer plan of the two engines.
        request: The request. Its block tables are not read.

    Returns:
        By group of the consumer: ascending ranges that do not touch. Cached tokens are included.
        Groups of recurrent states, rings, and groups that do not move have no entry.

    Raises:
        SpecError: If the request lacks encoder tokens, or names an unknown group.

    >>> import kvspec
    >>> sizes = {"block_size": 16, "total_num_kv_heads": 2, "head_size": 4, "dtype": "bfloat16"}
    >>> engine = kvspec.EngineSpec(groups=[
    ...     kvspec.KVCacheGroup(
    ...         name="full", layers=["l.0"], spec=kvspec.FullAttentionSpec(**sizes)),
    ...     kvspec.KVCacheGroup(
    ...         name="window", layers=["l.1"],
    ...         spec=kvspec.SlidingWindowSpec(**sizes, sliding_window=12))])
    >>> tables = {"full": [3, 4, 5], "window": [7, 8, 9]}
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=40, cached_tokens=16,
    ...     producer_blocks=tables, consumer_blocks=tables)
    >>> complete_tokens(kvspec.plan_transfer(engine, engine), request)
    {'full': (range(0, 40),), 'window': (range(0, 16), range(29, 40))}
    """
    parts_by_group = _moving_parts(plan, request)
    return {
        name: _ranges(plan.consumer.group(name), request, parts)
        for name, parts in parts_by_group.items()
        if all(part.per_token for part in parts)
    }


def complete_blocks(plan: TransferPlan, request: TransferRequest) -> dict[str, Ids]:
    """Return the consumer's blocks that a prefix cache may contain after *request* was loaded.

    A prefix cache that stores full blocks can use them. They are valid only after the loads of all
    ranks are done. Keep all other blocks of the request out of the cache, even if they are full.
    A layer that either engine excludes does not count, as in `complete_tokens`.

    Args:
        plan: The transfer plan of the two engines.
        request: The request.

    Returns:
        By group of the consumer: block ids in token order, int64. They include blocks whose tokens
        were all cached before. Blocks before the first live token are not included, because they
        may belong to another request by now. Rings and groups that do not move have no entry.

    Raises:
        SpecError: If the request lacks a table or encoder tokens, or names an unknown group.

    >>> import kvspec
    >>> spec = kvspec.SlidingWindowSpec(
    ...     block_size=16, total_num_kv_heads=2, head_size=4, dtype="bfloat16", sliding_window=20)
    >>> group = kvspec.KVCacheGroup(name="window", layers=["l"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group])
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=50, producer_blocks={"window": [7, 8, 9, 2]},
    ...     consumer_blocks={"window": [3, 4, 5, 6]})
    >>> complete_blocks(kvspec.plan_transfer(engine, engine), request)  # Tokens 31 to 49 move.
    {'window': array([5])}
    """
    ranges = complete_tokens(plan, request)
    return {
        name: _full_blocks(plan, name, request, ranges[name])
        if name in ranges
        else _state_block(plan, name, request, parts)
        for name, parts in _moving_parts(plan, request).items()
    }


def resume_positions(plan: TransferPlan, request: TransferRequest) -> tuple[int, ...]:
    """Return after how many tokens the consumer can go on, once *request* was loaded.

    At such a position all groups are complete: each has the tokens that the next query reads, and
    the states after exactly these tokens. So a prefix cache restores all groups there, or none.

    Args:
        plan: The transfer plan of the two engines.
        request: The request. Its block tables are not read.

    Returns:
        Those of `state_positions` at which all groups are complete, ascending. The last is
        `num_tokens`.

    Raises:
        SpecError: If the request lacks encoder tokens, or names an unknown group.

    >>> import kvspec
    >>> sizes = {"block_size": 16, "total_num_kv_heads": 2, "head_size": 4, "dtype": "bfloat16"}
    >>> state = kvspec.MambaSpec.short_conv(
    ...     conv_dim=4, conv_kernel=3, dtype="bfloat16", block_size=16)
    >>> window = kvspec.SlidingWindowSpec(**sizes, sliding_window=12)
    >>> engine = kvspec.EngineSpec(groups=[
    ...     kvspec.KVCacheGroup(name=name, layers=[name], spec=spec)
    ...     for name, spec in (("state", state), ("window", window))])
    >>> tables = {"state": [3, 4, 5], "window": [7, 8, 9]}
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=42, state_positions=[16, 41, 42],
    ...     producer_blocks=tables, consumer_blocks=tables)

    The query after 41 tokens reads the tokens 30 to 40. The load moves the tokens 31 to 41.

    >>> resume_positions(kvspec.plan_transfer(engine, engine), request)
    (42,)
    """
    ranges = complete_tokens(plan, request)
    groups = [pair.consumer for pair in plan.pairs]

    def complete(end: int) -> bool:
        for group in groups:
            spec = group.spec
            if not spec.parts[0].per_token:
                moved = any(end == tokens.stop for tokens in request.moves(group.name, spec))
                if not moved and request.cached(group.name, spec) != end:
                    return False
            elif spec.counts_prompt:
                live = spec.live_tokens(end)
                inside = (
                    tokens.start <= live.start and live.stop <= tokens.stop
                    for tokens in ranges.get(group.name, ())
                )
                # A row of several tokens has also seen those after the position.
                inside_row = any(end % part.tokens_per_state for part in spec.parts)
                if live and (inside_row or not any(inside)):
                    return False
        return True

    last = request.num_tokens
    return (*(end for end in request.state_positions if end < last and complete(end)), last)


def _moving_parts(plan: TransferPlan, request: TransferRequest) -> dict[str, list[Part]]:
    """Return the parts of the layers that move, by group of the consumer. Rings are left out."""
    groups = instance("plan", plan, TransferPlan).consumer.groups
    instance("request", request, TransferRequest).check_groups([group.name for group in groups])
    parts: dict[str, list[Part]] = {}
    for pair in (pair for pair in plan.pairs if not pair.consumer.spec.is_ring):
        own = parts.setdefault(pair.consumer.name, [])
        own += (part for spec, _ in pair.layers_by_spec for part in spec.parts)
    return parts


def _ranges(group: KVCacheGroup, request: TransferRequest, parts: list[Part]) -> tuple[range, ...]:
    """Return the complete tokens of a group whose rows are tokens."""
    # Parts may have rows of different sizes. A token is complete if it is complete in all parts.
    rows = {part.tokens_per_state for part in parts}
    cached, wanted = request.cached(group.name, group.spec), request.wanted(group.name, group.spec)
    ranges = [range(min(cached // row * row for row in rows))]
    if wanted:
        # The window may begin inside a row. The row moves whole, so it is complete.
        start = group.spec.live_tokens(request.total(group.spec)).start
        moved = range(
            max(start // row * row for row in rows), min(wanted.stop // row * row for row in rows)
        )
        joins = moved.start <= cached
        ranges = [range(moved.stop)] if joins else [*ranges, moved]
    return tuple(tokens for tokens in ranges if tokens)


def _full_blocks(
    plan: TransferPlan, name: str, request: TransferRequest, ranges: tuple[range, ...]
) -> Ids:
    """Return the blocks that contain only tokens of *ranges*."""
    group, table = plan.consumer.group(name), request.table("consumer", name)
    size = plan.consumer.virtual_block(group)
    starts = table.first_token + np.arange(len(table.block_ids)) * size
    full = np.zeros(len(starts), np.bool_)
    for tokens in ranges:
        full |= (starts >= tokens.start) & (starts + size <= tokens.stop)
    live = group.spec.live_tokens(request.total(group.spec))
    full &= starts + size > live.start
    return table.block_ids[full & _are_blocks(table, plan.consumer.null_block)]


def _are_blocks(table: BlockTable, null_block: int | None) -> npt.NDArray[np.bool_]:
    """Return which ids of *table* are blocks. The null block and repeated ids are placeholders."""
    ids, index, times = np.unique(table.block_ids, return_inverse=True, return_counts=True)
    blocks = (ids >= 0) & (times == 1)
    if null_block is not None:
        blocks &= ids != null_block
    return np.asarray(blocks[index])


def _state_block(plan: TransferPlan, name: str, request: TransferRequest, parts: list[Part]) -> Ids:
    """Return the blocks of those states that are the ones after the last token of their blocks."""
    group, table = plan.consumer.group(name), request.table("consumer", name)
    size, after = group.spec.block_size, request.num_tokens
    # The consumer may have rows for more speculative tokens than the producer. They do not move.
    rows = {part.name: part.states for part in group.own_parts}
    all_rows = all(part.states == rows[part.name] for part in parts)
    moved = request.moves(name, group.spec) if all_rows else ()
    ends = [tokens.stop for tokens in moved]
    if after and request.cached(name, group.spec) == after:
        ends.append(after)
    slots = [
        (end - 1 - table.first_token) // size
        for end in ends
        if not end % size and end - 1 in table.tokens(size)
    ]
    return table.block_ids[slots][_are_blocks(table, plan.consumer.null_block)[slots]]
