"""Find the rows of a request in the blocks of a rank: which token each holds, and if it must move.

Invariant: ownership and liveness are counted token by token (`check.counting`), and rows are
counted through the block table. Of kvspec, the module uses only `check.counting` and plain values.

How it works:
    `rows_of` walks through the table. Example: a prompt of 7 tokens, 5 of them cached, blocks of 4
    tokens, and the table [3, 1]:

        block    row    token    after the transfer
        3        0-3    0-3      cached: must not change
        1        0      4        cached: must not change
        1        1-2    5-6      live: must arrive
        1        3      7        dead: may be overwritten, since no token 7 exists

    A block before the first live token may belong to another request by now, so its rows must not
    change. With a window of 3 instead, only the tokens 5 and 6 are live, and block 3 must not
    change even if no token is cached.

    With two context ranks and an interleave of 1, rank 0 holds only even tokens. Then its rows 0 to
    3 of block 3 are the tokens 0, 2, 4 and 6.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
    first_live,
    is_ring,
    live_positions,
    of_group,
    own_positions,
    rank_layers,
    rank_units,
)
from kvspec.testing.carve import count_kernel_blocks

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.descriptors.request import BlockTable, TransferRequest
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.ownership.part import Part

Tables = Mapping[str, "BlockTable | Sequence[int]"]


def excluded_layers(engine: EngineSpec | None) -> set[str]:
    """Return the layers that *engine* excludes from the transfer. Empty if *engine* is None."""
    groups = () if engine is None else engine.groups
    return {layer for group in groups for layer in group.excluded}


@dataclass(frozen=True)
class PartRows:
    """The rows of one part in the blocks of a request. All arrays have one entry for each row.

    Attributes:
        key: (group, layer, part).
        part: The part.
        units: Numbers of the units that the rank holds, in order.
        block: Block in memory of each row.
        row: Number of the row in its block.
        token: First token of the row, or -1 for a recurrent state.
        known: Whether the row holds a token of the request.
        live: Whether the row must arrive.
        dead: Whether the row may be overwritten: it has no live and no cached token, and lies in
            the block of the first live token or a later one. If it is neither live nor dead, it
            must not change.
        seen: For a recurrent state, the number of tokens that it has seen. Its content depends on
            it.
    """

    key: tuple[str, str, str]
    part: Part
    units: Sequence[int]
    block: NDArray[np.int64]
    row: NDArray[np.int64]
    token: NDArray[np.int64]
    known: NDArray[np.bool_]
    live: NDArray[np.bool_]
    dead: NDArray[np.bool_]
    seen: int


def rows_of(
    engine: EngineSpec,
    rank: RankId,
    tables: Tables,
    request: TransferRequest,
    seen: int | Mapping[str, int] | None = None,
    source: EngineSpec | None = None,
) -> Iterator[PartRows]:
    """Yield the rows of each part in the blocks of a request on one rank.

    Rows of layers that one side excludes must not change, so they are neither live nor dead.

    Args:
        engine: The engine of the rank.
        rank: The rank.
        tables: The block tables of the engine.
        request: The request.
        seen: Tokens that states have seen, for all groups or by group. `num_tokens` by default.
        source: The producer, if *engine* is the consumer. Rows of a state that the producer lacks
            do not move.

    Yields:
        The rows of one part of one layer.
    """
    excluded = excluded_layers(engine) | excluded_layers(source)
    for group in engine.groups:
        if group.name not in tables and excluded.issuperset(group.layers):
            continue
        table = _table(tables[group.name])
        count = len(table[0]) * group.spec.block_size
        own = own_positions(engine, rank, table[1], count, group)
        virtual = group.spec.block_size * context_of(engine, rank, group)[1]
        for layer in rank_layers(engine, rank, group):
            for part in group.spec.of_layer(layer).parts:
                moves = 0 if layer in excluded else _common_rows(source, layer, part)
                if is_ring(group.spec):
                    own_seen = of_group(seen, group.name, request.num_tokens)
                    every = [(own_seen, _ring_rows(group, layer, part, table, request, own_seen))]
                elif part.per_token:
                    own_seen = of_group(seen, group.name, request.num_tokens)
                    columns = _token_rows(group, layer, part, own, request, table[1], virtual)
                    every = [(own_seen, columns)]
                else:
                    every = list(_states(group, part, table, request, moves, seen))
                for own_seen, (at, rows, token, known, live, dead) in every:
                    held = _held(table[0], engine.null_block)[at]
                    # The rows of a table's block are spread over several blocks in memory.
                    kernel_blocks_per_block = count_kernel_blocks(group)
                    kernel_block, row = np.divmod(rows, part.states // kernel_blocks_per_block)
                    yield PartRows(
                        key=(group.name, layer, part.name),
                        part=part,
                        units=rank_units(engine, rank, part, group),
                        block=(table[0][at] * kernel_blocks_per_block + kernel_block)[held],
                        row=row[held],
                        token=token[held],
                        known=known[held],
                        live=live[held] & (moves > 0),
                        dead=dead[held] & (moves > 0),
                        seen=own_seen,
                    )


def _common_rows(source: EngineSpec | None, layer: str, part: Part) -> int:
    """Return the number of rows in a block of *part* that *source* has, too."""
    for group in () if source is None else source.groups:
        for source_part in group.spec.of_layer(layer).parts if layer in group.layers else ():
            if source_part.name == part.name and not part.per_token:
                return min(part.states, source_part.states)
    return part.states


_Table = tuple["NDArray[np.int64]", int]


def _table(table: Any) -> _Table:  # noqa: ANN401
    """Return the block ids of a table, and the first token of its first block."""
    ids = np.asarray(getattr(table, "block_ids", table), np.int64)
    return ids, getattr(table, "first_token", 0)


def _held(ids: NDArray[np.int64], null: int | None) -> NDArray[np.bool_]:
    """Return a mask of the blocks of a table that belong to the request.

    Null blocks do not. If the engine has no null block, negative ids and repeated ids are null.
    """
    if null is not None:
        return np.array([block not in (null, -1) for block in ids], bool)
    return np.array([block >= 0 and (ids == block).sum() == 1 for block in ids], bool)


# Place in the table, row, token, known, live, dead.
_Columns = tuple[
    "NDArray[np.int64]",
    "NDArray[np.int64]",
    "NDArray[np.int64]",
    "NDArray[np.bool_]",
    "NDArray[np.bool_]",
    "NDArray[np.bool_]",
]


def _token_rows(
    group: KVCacheGroup,
    layer: str,
    part: Part,
    own: NDArray[np.int64],
    request: TransferRequest,
    first_token: int,
    virtual: int,
) -> _Columns:
    """Return the columns of a part whose rows are tokens. A block has *virtual* positions."""
    cached = cached_tokens_of(request, group)
    live = live_positions(group.spec.of_layer(layer), request)
    blocks = len(own) // group.spec.block_size
    at, row = (index.ravel() for index in np.indices((blocks, part.states)))
    token = own[at * group.spec.block_size + row * part.tokens_per_state]
    covered = token[:, None] + np.arange(part.tokens_per_state)
    # Positions at or after the length are not live: they use the appended False.
    covered_live = np.append(live, False)[np.minimum(covered, len(live))]
    must = np.asarray((covered_live & (covered >= cached)).any(axis=1))
    # A row of several tokens that holds cached and live ones must arrive. Any other row with a
    # cached token must not change. An earlier block may belong to another request by now.
    own_block = at >= (first_live(live) - first_token) // virtual
    dead = own_block & ~must & np.asarray((covered >= cached).all(axis=1))
    return at, row, token, token < len(live), must, dead


def _ring_rows(
    group: KVCacheGroup,
    layer: str,
    part: Part,
    table: _Table,
    request: TransferRequest,
    seen: int,
) -> _Columns:
    """Return the columns of a ring, in which each of *seen* positions takes the next row.

    A row holds the last position that took it. If none did, its token is the first that will. A row
    without a live position must not change.
    """
    live = live_positions(group.spec.of_layer(layer), request)
    row = np.arange(part.states if len(table[0]) else 0)
    token = row.copy()
    for position in range(seen):
        if len(row):
            token[position % part.states] = position
    known = token < seen
    must = np.append(live, False)[np.minimum(token, len(live))]
    return np.zeros_like(row), row, token, known, must, np.zeros(len(row), bool)


def _states(
    group: KVCacheGroup,
    part: Part,
    table: _Table,
    request: TransferRequest,
    moves: int,
    seen: int | Mapping[str, int] | None,
) -> Iterator[tuple[int, _Columns]]:
    """Yield for each state of the request how many tokens it has seen, and its columns.

    An earlier state is left out if it is cached, or if its block is not in the table: the producer
    has given back the blocks of the states that its consumer has cached.
    """
    last, size = request.num_tokens, group.spec.block_size
    held = range(table[1], table[1] + len(table[0]) * size)
    for end in request.state_positions or (last,):
        if end == last:
            yield of_group(seen, group.name, end), _state_rows(group, part, table, request, moves)
        elif end - 1 in held and end > cached_tokens_of(request, group):
            yield end, _state_rows(group, part, table, request, moves, end)


def _state_rows(
    group: KVCacheGroup,
    part: Part,
    table: _Table,
    request: TransferRequest,
    moves: int,
    end: int | None = None,
) -> _Columns:
    """Return the columns of the state after *end* tokens, whose first *moves* rows move.

    *end* is the number of tokens of the request by default. The token of a row is -1. If the table
    has several blocks, the block of the last token holds the state.
    """
    row, slot = np.arange(part.states), 0
    if len(table[0]) > 1:
        slot = ((end or request.num_tokens) - 1 - table[1]) // group.spec.block_size
    # A state is cached completely or not at all.
    must = cached_tokens_of(request, group) < request.num_tokens
    none = np.zeros(part.states, bool)
    return np.full_like(row, slot), row, np.full_like(row, -1), ~none, must & (row < moves), none
