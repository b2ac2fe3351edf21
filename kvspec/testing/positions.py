"""Which rows a request's own blocks hold: asked token by token, by the definitions alone.

Half of the byte oracle: who owns a token and whether it is live is counted out (`check.counting`),
and a row is found by counting through the table. Of kvspec it reads only values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
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

__all__ = [
    "Rows",
    "Tables",
    "cached_tokens_of",
    "context_of",
    "excluded_layers",
    "live_positions",
    "of_group",
    "own_positions",
    "rows_of",
]

Tables = Mapping[str, "BlockTable | Sequence[int]"]


def excluded_layers(engine: EngineSpec | None) -> set[str]:
    """Return the layers that the groups of *engine* name as not transferred."""
    groups = () if engine is None else engine.groups
    return {layer for group in groups for layer in group.excluded}


@dataclass(frozen=True)
class Rows:
    """Rows of one part that a request's own blocks hold: one entry a (block, row), same order."""

    key: tuple[str, str, str]
    part: Part
    units: Sequence[int]
    block: NDArray[np.int64]
    row: NDArray[np.int64]
    token: NDArray[np.int64]
    known: NDArray[np.bool_]  # below the request's length
    live: NDArray[np.bool_]  # must arrive
    dead: NDArray[np.bool_]  # may be overwritten
    seen: int


def rows_of(
    engine: EngineSpec,
    rank: RankId,
    tables: Tables,
    request: TransferRequest,
    seen: int | Mapping[str, int] | None = None,
    source: EngineSpec | None = None,
) -> Iterator[Rows]:
    """Yield the rows of every part that *tables* give the request on this rank.

    States have *seen* that many tokens, or, as the consumer wants them, exactly `num_tokens`. What
    either this engine or *source* excludes does not move, nor do a state's rows that *source*
    lacks: they are neither live nor dead.
    """
    still = excluded_layers(engine) | excluded_layers(source)
    for group in engine.groups:
        if group.name not in tables and still.issuperset(group.layers):
            continue
        table = _table(tables[group.name])
        count = len(table[0]) * group.spec.block_size
        own = own_positions(engine, rank, table[1], count, group)
        for layer in rank_layers(engine, rank, group):
            for part in group.spec.of_layer(layer).parts:
                moves = 0 if layer in still else _common_rows(source, layer, part)
                if part.per_token:
                    found = _token_rows(group, layer, part, own, request)
                else:
                    found = _state_rows(group, part, table, request, moves)
                at, row, token, known, live, dead = found
                held = _held(table[0], engine.null_block)[at]
                kernel_blocks_per_block = count_kernel_blocks(group)
                kernel_block, row = np.divmod(row, part.states // kernel_blocks_per_block)
                yield Rows(
                    key=(group.name, layer, part.name),
                    part=part,
                    units=rank_units(engine, rank, part, group),
                    block=(table[0][at] * kernel_blocks_per_block + kernel_block)[held],
                    row=row[held],
                    token=token[held],
                    known=known[held],
                    live=live[held] & (moves > 0),
                    dead=dead[held] & (moves > 0),
                    seen=of_group(seen, group.name, request.num_tokens),
                )


def _common_rows(source: EngineSpec | None, layer: str, part: Part) -> int:
    """Return how many rows of one block of *part* the *source* has too."""
    for group in () if source is None else source.groups:
        for other in group.spec.of_layer(layer).parts if layer in group.layers else ():
            if other.name == part.name and not part.per_token:
                return min(part.states, other.states)
    return part.states


_Table = tuple["NDArray[np.int64]", int]


def _table(table: Any) -> _Table:  # noqa: ANN401
    """Return the block ids of a table, and the first token of the first."""
    ids = np.asarray(getattr(table, "block_ids", table), np.int64)
    return ids, getattr(table, "first_token", 0)


def _held(ids: NDArray[np.int64], null: int | None) -> NDArray[np.bool_]:
    """Return which blocks of a table are the request's.

    Not the engine's null block, nor where it says of none: what is no block, or stands often.
    """
    if null is not None:
        return np.array([each not in (null, -1) for each in ids], bool)
    return np.array([each >= 0 and (ids == each).sum() == 1 for each in ids], bool)


_Found = tuple[
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
) -> _Found:
    """Return (place in the table, row, token, known, live, dead) of rows that are tokens."""
    cached = cached_tokens_of(request, group)
    live = live_positions(group.spec.of_layer(layer), request)
    blocks = len(own) // group.spec.block_size
    at, row = (each.ravel() for each in np.indices((blocks, part.states)))
    token = own[at * group.spec.block_size + row * part.tokens_per_state]
    covered = token[:, None] + np.arange(part.tokens_per_state)
    wanted = np.append(live, False)[np.minimum(covered, len(live))]
    must = np.asarray((wanted & (covered >= cached)).any(axis=1))
    dead = ~must & np.asarray((covered >= cached).all(axis=1))
    return at, row, token, token < len(live), must, dead


def _state_rows(
    group: KVCacheGroup,
    part: Part,
    table: _Table,
    request: TransferRequest,
    moves: int,
) -> _Found:
    """Return the same of one state's rows, the first *moves* of which move; tokens are -1.

    Of a table of several blocks, the one of the last token holds the state.
    """
    row, slot = np.arange(part.states), 0
    if len(table[0]) > 1:
        slot = (request.num_tokens - 1 - table[1]) // group.spec.block_size
    wanted = cached_tokens_of(request, group) < request.num_tokens
    none = np.zeros(part.states, bool)
    return np.full_like(row, slot), row, np.full_like(row, -1), ~none, wanted & (row < moves), none
