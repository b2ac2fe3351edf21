"""Which cells of one request move over one edge.

Law: positions decide. A cell is named by the tokens it holds; each side's block table turns that
into a block and a place in it. A cell that holds a cached position moves row by row, so that no
cached byte is ever written.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import gcd

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.plan import Edge
from kvspec.request import BlockTable, TransferRequest
from kvspec.runs import RowSet

Ints = npt.NDArray[np.int64]


@attrs.frozen(eq=False)
class Cells:
    """Cells of one edge, by block id and place in the block, on both sides."""

    producer_block: Ints
    producer_cell: Ints
    consumer_block: Ints
    consumer_cell: Ints

    def __len__(self) -> int:
        return len(self.producer_block)


_NONE = np.empty(0, np.int64)
NO_CELLS = Cells(_NONE, _NONE, _NONE, _NONE)


def cut(request: TransferRequest, edge: Edge, rows: RowSet) -> Cells:
    """Return the cells of *rows* that *request* moves over *edge*, ordered by producer id.

    Raises `SpecError` for block tables that are impossible, `MismatchError` for tokens that the
    producer does not hold.
    """
    ours = _table(request.producer_blocks, edge.producer_group, "producer_blocks")
    theirs = _table(request.consumer_blocks, edge.group, "consumer_blocks")
    wanted = request.wanted(edge.group, rows.spec)
    if not wanted:
        return NO_CELLS
    if not rows.tokens:
        return _state(request, edge, rows, ours, theirs, wanted)
    _check_held(edge, rows, ours, theirs, wanted)
    positions = _positions(rows, wanted, request.cached(edge.group))
    if not len(positions):
        return NO_CELLS
    found: list[Ints] = []
    for table, block_size, pool in (
        (ours, rows.producer_block_size, rows.producer),
        (theirs, rows.spec.block_size, rows.consumer),
    ):
        block, token = np.divmod(positions - table.first_token, block_size)
        found += [table.block_ids[block], token // rows.tokens]
        field = "producer_blocks" if table is ours else "consumer_blocks"
        group = edge.producer_group if table is ours else edge.group
        _check_ids(f"{field}[{group!r}]", found[-2], pool.num_blocks)
    _check_once(edge, theirs, rows, wanted)
    order = np.argsort(rows.producer.steps(found[0], found[1]), kind="stable")
    return Cells(*(column[order] for column in found))


def _positions(rows: RowSet, wanted: range, cached: int) -> Ints:
    """Return the first token of every cell that moves.

    A cell that begins with cached tokens is cut: its end moves in pieces, each of the largest
    grain that fits. Any other cell moves whole, dead tokens and all.
    """
    grain, start = rows.tokens, wanted.start
    cell = gcd(rows.producer_block_size, rows.spec.block_size)
    if start // cell * cell >= cached:
        start = start // cell * cell
    if rows.within is None:
        span = range(-(-start // grain) * grain, wanted.stop)
    else:
        span = range(-(-start // grain) * grain, -(-start // rows.within) * rows.within)
    positions = np.arange(span.start, min(span.stop, wanted.stop), grain, dtype=np.int64)
    first, step = rows.stripe
    if step > 1:
        positions = positions[positions // rows.spec.block_size % step == first]
    return positions


def _state(
    request: TransferRequest,
    edge: Edge,
    rows: RowSet,
    ours: BlockTable,
    theirs: BlockTable,
    wanted: range,
) -> Cells:
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    if seen != request.num_tokens:
        why = "a recurrent state cannot be rewound: it must have seen exactly these tokens"
        raise MismatchError([Mismatch("state_tokens", seen, request.num_tokens, why)])
    first, step = rows.stripe
    if wanted.start // rows.spec.block_size % step != first:
        return NO_CELLS
    for field, group, table, pool in (
        ("producer_blocks", edge.producer_group, ours, rows.producer),
        ("consumer_blocks", edge.group, theirs, rows.consumer),
    ):
        if len(table.block_ids) != 1:
            raise SpecError(
                f"{field}[{group!r}]", table.block_ids.tolist(), "one id, the state's slot"
            )
        _check_ids(f"{field}[{group!r}]", table.block_ids, pool.num_blocks)
    zero = np.zeros(1, np.int64)
    return Cells(ours.block_ids, zero, theirs.block_ids, zero)


def _table(tables: Mapping[str, BlockTable], group: str, field: str) -> BlockTable:
    found = tables.get(group)
    if found is None:
        raise SpecError(field, sorted(tables), f"a block table for group {group!r}")
    return found


def _check_held(
    edge: Edge, rows: RowSet, ours: BlockTable, theirs: BlockTable, wanted: range
) -> None:
    for field, group, table, size in (
        ("producer_blocks", edge.producer_group, ours, rows.producer_block_size),
        ("consumer_blocks", edge.group, theirs, rows.spec.block_size),
    ):
        if table.first_token % size:
            raise SpecError(
                f"{field}[{group!r}].first_token", table.first_token, f"a multiple of {size}"
            )
    held = theirs.tokens(rows.spec.block_size)
    if not _inside(wanted, held):
        told = f"blocks for tokens {wanted.start}..{wanted.stop - 1}"
        raise SpecError(f"consumer_blocks[{edge.group!r}]", held, told)
    held = ours.tokens(rows.producer_block_size)
    if not _inside(wanted, held):
        missing = range(max(wanted.start, held.stop), wanted.stop) or range(
            wanted.start, min(held.start, wanted.stop)
        )
        why = f"the producer's table does not hold tokens {missing.start}..{missing.stop - 1}"
        field = f"producer_blocks[{edge.producer_group!r}]"
        raise MismatchError([Mismatch(field, held, wanted, why)])


def _inside(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def _check_ids(field: str, ids: Ints, num_blocks: int) -> None:
    wrong = ids[(ids < 0) | (ids >= num_blocks)]
    if len(wrong):
        raise SpecError(field, int(wrong[0]), f"block ids from 0 to {num_blocks - 1}")


def _check_once(edge: Edge, theirs: BlockTable, rows: RowSet, wanted: range) -> None:
    size = rows.spec.block_size
    first, last = (
        (position - theirs.first_token) // size for position in (wanted.start, wanted.stop - 1)
    )
    used = np.sort(theirs.block_ids[first : last + 1])
    twice = used[:-1][used[:-1] == used[1:]]
    if len(twice):
        raise SpecError(f"consumer_blocks[{edge.group!r}]", int(twice[0]), "each block once")
