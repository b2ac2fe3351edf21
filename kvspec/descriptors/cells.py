"""Which pieces of one request move over one edge.

Law: positions decide. A piece is named by the tokens it holds; each side's block table turns that
into a block and a place in it. A cell that begins with cached tokens moves its end only, so that
no cached byte is ever written; any other cell moves whole, dead tokens and all.
"""

from __future__ import annotations

import attrs
import numpy as np

from kvspec.descriptors.paging import Geometry, TokenSide
from kvspec.descriptors.request import BlockTable, TransferRequest, check_ids, check_no_null
from kvspec.descriptors.runs import RowSet
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.ownership.election import Role
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.tokens import Cyclic, Ints
from kvspec.plan.edges import Edge


@attrs.frozen(eq=False)
class Pieces:
    """What moves over one edge, in each side's own count of tokens.

    Column i of *ours* and *theirs* is a piece of *tokens* tokens; the first *tails* of them are the
    end of a cell, the others whole cells.
    """

    ours: Ints
    theirs: Ints
    tokens: Ints
    tails: int
    producer: BlockTable
    consumer: BlockTable


@attrs.frozen(eq=False)
class Cells:
    """Descriptors of one set of rows, by block in memory and place in the block, on both sides."""

    producer_block: Ints
    producer_cell: Ints
    consumer_block: Ints
    consumer_cell: Ints

    def __len__(self) -> int:
        return len(self.producer_block)


_NONE = np.empty(0, np.int64)


def pieces(request: TransferRequest, edge: Edge, geometry: Geometry) -> Pieces:
    """Return what *request* moves over *edge* of the layers and parts that are cut by *geometry*.

    Raises `SpecError` for block tables that are impossible, `MismatchError` for tokens that the
    producer does not hold.
    """
    ours = request.table("producer", edge.producer_group)
    theirs = request.table("consumer", edge.group)
    wanted = request.wanted(edge.group, geometry.spec)
    if not wanted:
        return Pieces(_NONE, _NONE, _NONE, 0, ours, theirs)
    if not geometry.cell:
        moves = _state_moves(request, geometry, wanted)
        slots = (
            _slot("producer", edge.producer_group, ours, geometry.producer, wanted),
            _slot("consumer", edge.group, theirs, geometry.consumer, wanted),
        )
        written = theirs.block_ids[slots[1] : slots[1] + 1]
        _check_once(f"consumer_blocks[{edge.group!r}]", theirs, written, written=True)
        at = [np.full(int(moves), slot, np.int64) for slot in slots]
        return Pieces(at[0], at[1], np.zeros(int(moves), np.int64), 0, ours, theirs)
    _check_held(edge, geometry, ours, theirs, wanted)
    mine, yours, tokens, tails = _cut(request, edge, geometry)
    mine = mine - _first(ours, geometry.producer)
    yours = yours - _first(theirs, geometry.consumer)
    for field, table, side in (
        (f"producer_blocks[{edge.producer_group!r}]", ours, geometry.producer),
        (f"consumer_blocks[{edge.group!r}]", theirs, geometry.consumer),
    ):
        # Of all that moves, not of this edge alone: another may read a block's other place.
        used = table.blocks_of(wanted, side.block_size * side.context.size)
        _check_once(field, table, used, written=table is theirs)
    return Pieces(mine, yours, tokens, tails, ours, theirs)


def cells(found: Pieces, edge: Edge, rows: RowSet) -> Cells:
    """Return the descriptors of *rows* for the pieces that they take, ordered by producer id."""
    geometry = rows.geometry
    if not geometry.cell:
        mine = found.producer.block_ids[found.ours]
        yours = found.consumer.block_ids[found.theirs]
        check_ids(f"producer_blocks[{edge.producer_group!r}]", mine, rows.producer.num_blocks)
        check_ids(f"consumer_blocks[{edge.group!r}]", yours, rows.consumer.num_blocks)
        return Cells(mine, found.tokens, yours, found.tokens)
    ours, theirs = _taken(found, rows)
    if not len(ours):
        return Cells(ours, ours, ours, ours)
    columns: list[Ints] = []
    for name, group, local, table, side, pool in (
        ("producer", edge.producer_group, ours, found.producer, geometry.producer, rows.producer),
        ("consumer", edge.group, theirs, found.consumer, geometry.consumer, rows.consumer),
    ):
        at, token = np.divmod(local, side.block_size)
        part, token = np.divmod(token, side.memory_block_size)
        split = side.block_size // side.memory_block_size
        ids = table.block_ids[at]
        # A piece may run on into later blocks. Their ids follow the first, so the last is greatest.
        last = table.block_ids[(local + rows.tokens - 1) // side.block_size]
        for ends in (ids, last):
            check_ids(f"{name}_blocks[{group!r}]", ends, pool.num_blocks // split)
        columns += [ids * split + part, (token - rows.skip) // rows.unit]
    order = np.argsort(rows.producer.steps(columns[0], columns[1]), kind="stable")
    return Cells(*(column[order] for column in columns))


def _taken(found: Pieces, rows: RowSet) -> tuple[Ints, Ints]:
    """Return the pieces that *rows* take, cut finer where they take them row by row."""
    geometry = rows.geometry
    whole = not rows.skip and rows.unit == geometry.cell
    if not whole and not found.tails:
        return _NONE, _NONE
    tail = np.arange(len(found.tokens)) < found.tails
    chosen = ~tail if whole else tail
    if geometry.spans > 1 if whole else geometry.tails:
        chosen = chosen & (found.tokens == rows.tokens)
        return found.ours[chosen], found.theirs[chosen]
    count = found.tokens[chosen] // rows.tokens
    inside = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    ours, theirs = (np.repeat(each[chosen], count) for each in (found.ours, found.theirs))
    return ours + inside * rows.tokens, theirs + inside * rows.tokens


def _cut(request: TransferRequest, edge: Edge, geometry: Geometry) -> tuple[Ints, Ints, Ints, int]:
    """Return both sides' first token and the tokens of every piece, and how many are tails.

    Where both sides deal tokens alike, their own counts are one count, and cells are cut in it;
    else cells are cut in positions, and kept if both own them.
    """
    wanted = request.wanted(edge.group, geometry.spec)
    cached = request.cached(edge.group, geometry.spec)
    cell, (ours, theirs) = geometry.cell, (geometry.producer.context, geometry.consumer.context)
    virtual = geometry.consumer.block_size * theirs.size
    if ours.alike(theirs):
        start, stop, cached = (ours.local(at) for at in (wanted.start, wanted.stop, cached))
        wanted, virtual = range(start, stop), geometry.consumer.block_size
        ours = theirs = Cyclic()
    if not wanted:
        return _NONE, _NONE, _NONE, 0
    first = wanted.start // cell * cell
    positions = np.arange(first, wanted.stop, cell, dtype=np.int64)
    tokens = np.full(len(positions), cell, np.int64)
    if first < cached:
        start = wanted.start // geometry.grain * geometry.grain
        if start < cached:
            told = f"a multiple of tokens_per_state={geometry.grain}"
            raise SpecError("cached_tokens", request.cached(edge.group, geometry.spec), told)
        positions[0], tokens[0] = start, first + cell - start
    keep = ours.owns(positions) & theirs.owns(positions)
    keep &= geometry.stripe.holds(positions // virtual)
    tails = int(first < cached and keep[0])
    positions, tokens = positions[keep], tokens[keep]
    columns = ours.local(positions), theirs.local(positions), tokens
    return (*_joined(request, edge, geometry, columns, tails), tails)


def _joined(
    request: TransferRequest,
    edge: Edge,
    geometry: Geometry,
    columns: tuple[Ints, Ints, Ints],
    tails: int,
) -> tuple[Ints, Ints, Ints]:
    """Join cells that follow each other in memory on both sides.

    Inside one block they do; from block to block where rows flow on and the ids follow each other.
    """
    ours, theirs, tokens = columns
    if geometry.spans == 1 or len(tokens) <= tails + 1:
        return columns
    follows = np.ones(len(tokens) - 1, np.bool_)
    follows[:tails] = False
    for local, side, table in (
        (ours, geometry.producer, request.producer_blocks[edge.producer_group]),
        (theirs, geometry.consumer, request.consumer_blocks[edge.group]),
    ):
        follows &= local[:-1] + tokens[:-1] == local[1:]
        inside = local[1:] % side.memory_block_size != 0
        if side.flows:
            ids = table.block_ids[(local - _first(table, side)) // side.block_size]
            inside |= ids[1:] == ids[:-1] + 1
        follows &= inside
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return ours[starts], theirs[starts], np.add.reduceat(tokens, starts)


def _first(table: BlockTable, side: TokenSide) -> int:
    """Return how many of its own tokens the side counts before its table."""
    return table.first_token // side.context.size


def _state_moves(request: TransferRequest, geometry: Geometry, wanted: range) -> bool:
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    if seen != request.num_tokens:
        why = "a recurrent state cannot be rewound: it must have seen exactly these tokens"
        raise MismatchError([Mismatch("state_tokens", seen, request.num_tokens, why)])
    virtual = geometry.consumer.block_size * geometry.consumer.context.size
    return geometry.stripe.holds(wanted.start // virtual)


def _slot(name: Role, group: str, table: BlockTable, side: TokenSide, wanted: range) -> int:
    """Return which of a table's blocks holds the state: its only slot, or the last token's."""
    slot = table.state_block(f"{name}_blocks[{group!r}]", side.block_size, wanted.start)
    missing = wanted if table.block_ids[slot] == side.null_block else EMPTY
    check_no_null(name, group, side.null_block, missing, wanted)
    return slot


def _check_held(
    edge: Edge, geometry: Geometry, ours: BlockTable, theirs: BlockTable, wanted: range
) -> None:
    held = []
    for field, group, table, side in (
        ("producer_blocks", edge.producer_group, ours, geometry.producer),
        ("consumer_blocks", edge.group, theirs, geometry.consumer),
    ):
        virtual = side.block_size * side.context.size
        table.check_start(f"{field}[{group!r}]", virtual)
        held.append(table.tokens(virtual))
    if not _inside(wanted, held[1]):
        told = f"blocks for tokens {wanted.start}..{wanted.stop - 1}"
        raise SpecError(f"consumer_blocks[{edge.group!r}]", held[1], told)
    check_producer_holds(edge.producer_group, held[0], wanted)
    sides: tuple[tuple[Role, str, BlockTable, TokenSide], ...] = (
        ("consumer", edge.group, theirs, geometry.consumer),
        ("producer", edge.producer_group, ours, geometry.producer),
    )
    for name, group, table, side in sides:
        virtual = side.block_size * side.context.size
        missing = table.without_block(wanted, virtual, side.null_block)
        check_no_null(name, group, side.null_block, missing, wanted)


def check_producer_holds(group: str, held: range, wanted: range) -> None:
    """Raise `MismatchError` naming the first *wanted* tokens that the producer's table lacks."""
    if _inside(wanted, held):
        return
    missing = range(max(wanted.start, held.stop), wanted.stop) or range(
        wanted.start, min(held.start, wanted.stop)
    )
    why = f"the producer's table does not hold tokens {missing.start}..{missing.stop - 1}"
    sides = "held", "wanted"
    raise MismatchError([Mismatch(f"producer_blocks[{group!r}]", held, wanted, why, sides)])


def _inside(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _check_once(field: str, table: BlockTable, ids: Ints, *, written: bool) -> None:
    """Raise `SpecError` if one of the block *ids* that move stands for two places.

    A block that is *written* may stand nowhere else in its table; one that is only read may, where
    nothing of it moves.
    """
    used = np.sort(table.block_ids[np.isin(table.block_ids, ids)] if written else ids)
    twice = used[:-1][used[:-1] == used[1:]]
    if len(twice):
        raise SpecError(field, int(twice[0]), "each block once")
