"""Which cells of one request move over one edge.

Law: positions decide. A cell is named by the tokens it holds; each side's block table turns that
into a block and a place in it. A cell that begins with cached tokens moves its end only, so that
no cached byte is ever written. Any other cell moves whole, dead tokens and all; but the last one
leaves those out where that takes no more rows.
"""

from __future__ import annotations

from itertools import pairwise

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.paging import Geometry, RowKind
from kvspec.descriptors.pool import Pool
from kvspec.descriptors.request import TransferRequest, check_ids
from kvspec.descriptors.tables import Tables
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.ownership.tokens import Cyclic, Ints

Begins = dict[RowKind, tuple[Ints, Ints]]
"""Of each kind of row, where what it takes begins: the producer's and the consumer's own tokens
before it, counted from the first token of the table; of a state, its place in the table."""


@attrs.frozen(eq=False)
class Cells:
    """Descriptors of one set of rows, by block in memory and place in the block, on both sides."""

    producer_block: Ints
    producer_cell: Ints
    consumer_block: Ints
    consumer_cell: Ints

    def __len__(self) -> int:
        return len(self.producer_block)


def begins(request: TransferRequest, tables: Tables, geometry: Geometry) -> Begins:
    """Return what each kind of row takes of *request*: of what is cut by *geometry*, on one edge.

    The *tables* hold wanted tokens. Raises `MismatchError` for a state that has seen other tokens.
    """
    if not geometry.cell:
        return _state(request, tables, geometry)
    alike = geometry.producer.context.alike(geometry.consumer.context)
    frame = (_own_counts if alike else _positions)(tables, geometry)
    before = [
        table.first_token // paging.context.size
        for table, paging in (
            (tables.producer, geometry.producer),
            (tables.consumer, geometry.consumer),
        )
    ]
    return {
        kind: (frame.producer.local(begin) - before[0], frame.consumer.local(begin) - before[1])
        for kind, begin in _cut(tables, geometry, frame).items()
    }


def cells(
    tables: Tables,
    geometry: Geometry,
    kind: RowKind,
    taken: tuple[Ints, Ints],
    pools: tuple[Pool, Pool],
) -> Cells:
    """Return the descriptors of rows of one kind for what they take, ordered by producer id."""
    columns: list[Ints] = []
    sides = reversed(tables.sides(geometry))
    for (side, group, table, paging), begin, pool in zip(sides, taken, pools, strict=True):
        if geometry.cell:
            place, token = np.divmod(begin, paging.block_size)
            part, token = np.divmod(token, paging.memory_block_size)
            cell = (token - kind.skip) // kind.period
        else:
            place, part, cell = begin, 0 * begin, 0 * begin
        # What runs on into later blocks has ids that follow the first, so its last is greatest.
        last = (begin + kind.tokens - 1) // paging.block_size if geometry.cell else begin
        ids = table.block_ids[place]
        for ends in (ids, table.block_ids[last]):
            check_ids(f"{side}_blocks[{group!r}]", ends, pool.num_blocks // paging.split)
        columns += [ids * paging.split + part, cell]
    order = pools[0].ids(columns[0], columns[1])
    if (order[:-1] < order[1:]).all():
        return Cells(*columns)
    ascending = np.argsort(order, kind="stable")
    return Cells(*(column[ascending] for column in columns))


def _state(request: TransferRequest, tables: Tables, geometry: Geometry) -> Begins:
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    if seen != request.num_tokens:
        why = "a recurrent state cannot be rewound: it must have seen exactly these tokens"
        raise MismatchError([Mismatch("state_tokens", seen, request.num_tokens, why)])
    token = tables.wanted.start
    if not geometry.stripe.holds(token // geometry.consumer.virtual_block):
        return {}
    consumer, producer = (
        np.array([table.state_block(side, paging.block_size, token)], np.int64)
        for side, _, table, paging in tables.sides(geometry)
    )
    return {RowKind(0, 0, 0): (producer, consumer)}


@attrs.frozen(eq=False)
class _Frame:
    """The count of tokens in which cells are cut, and who owns what in it.

    *block*: how much of it one block of the consumer's table stands for. *tokens*: what one step
    of the request moves on by: the cells that end there; the last step moves what is left.
    """

    wanted: range
    tokens: range | None
    cached: int
    block: int
    producer: Cyclic
    consumer: Cyclic


def _own_counts(tables: Tables, geometry: Geometry) -> _Frame:
    """Count the tokens that both sides own: they deal them alike, so their own counts are one."""
    local, wanted = geometry.consumer.context.local, tables.wanted
    own = range(local(wanted.start), local(wanted.stop))
    tokens = tables.tokens and range(local(tables.tokens.start), local(tables.tokens.stop))
    return _Frame(
        own, tokens, local(tables.cached), geometry.consumer.block_size, Cyclic(), Cyclic()
    )


def _positions(tables: Tables, geometry: Geometry) -> _Frame:
    """Count positions of the request: each cell has one owner on either side."""
    owners = geometry.producer.context, geometry.consumer.context
    block = geometry.consumer.virtual_block
    return _Frame(tables.wanted, tables.tokens, tables.cached, block, *owners)


def _cut(tables: Tables, geometry: Geometry, frame: _Frame) -> dict[RowKind, Ints]:
    """Return where begins what each kind of row takes, in the count of *frame*.

    Of 15 tokens 5 are cached. In cells of 4, with rows of up to two and an open last cell, that is:

        cells       4 5 6 7 | 8 9 10 11 | 12 13 14 15
        rows          5 6 7   8 9 10 11   12 13 14        where the last two cells lie apart
                      5 6 7   8 9 10 11   12 13 14 15     where they follow: one row, dead token too
    """
    cell, wanted = geometry.cell, frame.wanted
    if not wanted:
        return {}
    every = np.arange(wanted.start // cell * cell, wanted.stop, cell, dtype=np.int64)
    first, last = int(every[0]), int(every[-1])
    live = -(-wanted.stop // geometry.grain) * geometry.grain - last  # tokens of the last cell
    keep = _moving(tables, geometry, frame, every)
    parts: list[tuple[RowKind, Ints]] = []
    if first < frame.cached:
        start = _after_cached(tables, geometry, frame) - first
        # By scale a row begins or ends where its cell does: there is none from within to within.
        within = first == last and geometry.open and not geometry.scale
        if keep[0]:
            parts += _part(geometry, first, start, live if within else cell)
        every, keep = every[1:], keep[1:]
    begin, count = _joined(tables, geometry, frame, every[keep])
    if geometry.open and live < cell and len(begin) and begin[-1] == last:
        end = _part(geometry, last, 0, live)
        parts += end
        begin, count = (begin[:-1], count[:-1]) if end else (begin, count)
    parts += [(RowKind(cell, 0, n * cell), begin[count == n]) for n in np.unique(count).tolist()]
    taken: dict[RowKind, list[Ints]] = {}
    for kind, begins in parts:
        taken.setdefault(kind, []).append(begins)
    return {kind: np.concatenate(begins) for kind, begins in taken.items()}


def _moving(
    tables: Tables, geometry: Geometry, frame: _Frame, every: Ints
) -> npt.NDArray[np.bool_]:
    """Return which of the cells *every* move over this edge, and in this step of the request."""
    keep = frame.producer.owns(every) & frame.consumer.owns(every)
    keep &= geometry.stripe.holds(every // frame.block)
    if frame.tokens is not None:
        stop = every + geometry.cell
        keep &= (stop > frame.tokens.start) & (tables.last | (stop <= frame.tokens.stop))
    return keep


def _part(geometry: Geometry, cell: int, start: int, stop: int) -> list[tuple[RowKind, Ints]]:
    """Return the rows of the tokens from *start* to *stop* of the cell that begins at *cell*.

    By scale (1, 4, 16), tokens 5..15 of a cell of 16 are rows of 3 and of 8 tokens, which end where
    4 and 16 end; tokens 0..7 are one row of 8. Tokens 0..8 are none: the cell moves whole.
    """
    if not geometry.scale:
        grain = geometry.grain
        return [(RowKind(grain, 0, grain), np.arange(cell + start, cell + stop, grain))]
    scales = pairwise(geometry.scale)
    if stop < geometry.cell:
        one = (period for size, period in scales if stop < period and stop % size == 0)
        return [(RowKind(period, 0, stop), np.array([cell])) for period in one][:1]
    found = []
    for _, period in scales:
        tokens = -start % period
        if tokens:
            found.append((RowKind(period, period - tokens, tokens), np.array([cell + start])))
            start += tokens
    return found


def _after_cached(tables: Tables, geometry: Geometry, frame: _Frame) -> int:
    """Return where the first row begins that moves of a cell that begins with cached tokens."""
    start = frame.wanted.start // geometry.grain * geometry.grain
    if start < frame.cached:
        told = f"a multiple of tokens_per_state={geometry.grain}"
        raise SpecError("cached_tokens", tables.cached, told)
    return start


def _joined(tables: Tables, geometry: Geometry, frame: _Frame, every: Ints) -> tuple[Ints, Ints]:
    """Return which of the cells *every* begin a row, and how many each takes.

    Cells follow in memory inside a block, and from block to block where rows flow on and the ids
    follow each other. Two cells, each a block of a producer whose rows flow, and half a block of
    the consumer:

        producer    | 5     | 6     |   one row       | 5     | 9     |   two rows
        consumer    | 3             |                 | 3             |
    """
    if geometry.spans == 1 or len(every) < 2:  # noqa: PLR2004 - it takes two
        return every, np.ones(len(every), np.int64)
    follows = np.ones(len(every) - 1, np.bool_)
    owners = frame.consumer, frame.producer
    for (_, _, table, paging), owner in zip(tables.sides(geometry), owners, strict=True):
        local = owner.local(every) - table.first_token // paging.context.size
        follows &= local[:-1] + geometry.cell == local[1:]
        inside = local[1:] % paging.memory_block_size != 0
        if paging.flows:
            ids = table.block_ids[local // paging.block_size]
            inside |= ids[1:] == ids[:-1] + 1
        follows &= inside
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return every[starts], np.diff(starts, append=len(every))
