"""Tiles of one request: which rows it moves over one edge, and where they lie in both memories.

Invariant: a tile is identified by the tokens in it, and the block table of each side assigns those
tokens to a block. No cached byte is written. Tables are validated completely before anything moves.

How it works:
    A *tile* is a range of tokens that no block and no interleave of either side divides. Tiles move
    whole, except at the ends of a request. In this example a tile has 4 tokens, a prompt has 15,
    and the consumer has cached 5 of them:

        token      4   5   6   7 |  8   9  10  11 | 12  13  14  15
                   c   w   w   w |  w   w   w   w |  w   w   w   d
        moves          5   6   7    8   9  10  11   12  13  14

    The first tile moves from its first token that is neither cached nor dead. The last tile moves
    up to its last token that is not dead. Both may be the same tile.

    A *dead* token (d) lies after the last token, or before the first live token of a window. The
    consumer will not read it, and the producer's memory may hold anything there. Attention kernels
    multiply the values of masked tokens by 0, and 0 times NaN is NaN. So dead tokens do not move,
    unless the caller of `build_table` allows it. If it does, a tile without a cached token moves
    whole if that takes less time (`SplitRows.dead_cost_less`).

    Tokens are counted in one of two ways (`_Frame`). Usually they are positions of the request. If
    both sides shard tokens among context ranks alike, they are the rank's own tokens, without
    gaps. Then interleaves do not divide tiles.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs
import numpy as np

from kvspec.descriptors.paging import BlockLayout, Paging, RowKind, TokenSplit
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest, check_ids, check_no_null
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.replicas import Role
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

TableSide = tuple[Role, str, BlockTable, Paging]
# Positions of one step of a request: of the prompt, or by group of the consumer.
Positions = range | Mapping[str, range]
# Whether a tile may move whole, with its dead tokens, in place of a part of it.
MovesWhole = Callable[[RowKind], bool]
# For each kind of row, where its rows begin: the producer's and the consumer's own tokens before
# each row, counted from the first token of the table. For a state: its index in the table.
RowStarts = dict[RowKind, tuple[Ints, Ints]]

EVERY_TOKEN = BlockCyclic()  # One rank owns all positions.

# Writing ids to their places is faster than sorting them if there are at least so many ids, and
# the largest is less than so many times their number. Measured with `select` of the workload W1
# in bench/README.md: 2.0 ns a descriptor instead of 2.7.
PLACE_FROM, PLACE_WITHIN = 1000, 8


@attrs.frozen(eq=False)
class EdgeTables:
    """The block tables of one edge, and the tokens that the request moves over it.

    Attributes:
        edge: The edge.
        wanted: Positions that the request moves. For recurrent states, those of the last one.
        moves: The same, but for recurrent states the last position of each state.
        cached: Number of leading tokens that the consumer already has.
        tokens: Positions of one step of the request, or None if all move at once.
        recurrent: Whether the group has recurrent states, which move with the last step.
        producer: Block table of the producer.
        consumer: Block table of the consumer.
    """

    edge: Edge
    wanted: range
    moves: tuple[range, ...]
    cached: int
    tokens: range | None
    recurrent: bool
    producer: BlockTable
    consumer: BlockTable

    @staticmethod
    def of(
        request: TransferRequest,
        edge: Edge,
        spec: LayerSpec,
        tokens: Positions | None,
        *,
        recurrent: bool,
    ) -> EdgeTables:
        """Return the tables of *request* for *edge*, between layers of *spec*."""
        return EdgeTables(
            edge=edge,
            wanted=request.wanted(edge.group, spec),
            moves=request.moves(edge.group, spec),
            cached=request.cached(edge.group, spec),
            tokens=None if tokens is None else _step_tokens(request, edge.group, spec, tokens),
            recurrent=recurrent,
            producer=request.table("producer", edge.producer_group),
            consumer=request.table("consumer", edge.group),
        )

    @property
    def reached(self) -> range:
        """The wanted tokens up to the end of this step. Empty if the step moves none."""
        tokens, wanted = self.tokens, self.wanted
        if tokens is None or tokens.start < wanted.stop <= tokens.stop:
            return wanted
        if self.recurrent or not tokens or tokens.start >= wanted.stop:
            return EMPTY
        return range(wanted.start, min(wanted.stop, tokens.stop)) or EMPTY

    @property
    def last(self) -> bool:
        """Whether this step is the last."""
        return self.tokens is None or self.tokens.stop >= self.wanted.stop

    def sides(self, token_split: TokenSplit) -> tuple[TableSide, TableSide]:
        """Return name, group, table and paging of the producer, then of the consumer."""
        return (
            ("producer", self.edge.producer_group, self.producer, token_split.producer),
            ("consumer", self.edge.group, self.consumer, token_split.consumer),
        )

    def check(self, token_split: TokenSplit) -> None:
        """Validate both tables.

        Raises:
            SpecError: If a table is impossible, or the consumer's lacks tokens that move.
            MismatchError: If the producer's table lacks tokens that move.
        """
        check = self._check_tokens if token_split.tile else self._check_state
        # The caller is the consumer, so the errors of its own table come first.
        check(self.sides(token_split)[::-1])

    def _check_tokens(self, sides: tuple[TableSide, ...]) -> None:
        tokens = self.reached
        for side, group, table, paging in sides:
            if paging.is_ring:
                table.check_ring(f"{side}_blocks[{group!r}]")
            if table.first_token:
                table.check_start(f"{side}_blocks[{group!r}]", paging.virtual_block)
            held = table.tokens(paging.virtual_block)
            if _inside(tokens, held):
                continue
            if side == "producer":
                check_producer_holds(group, held, tokens)
            expected = f"blocks for tokens {tokens.start}..{tokens.stop - 1}"
            raise SpecError(f"{side}_blocks[{group!r}]", held, expected)
        for side, group, table, paging in sides:
            if paging.null_block is not None:
                missing = table.without_block(tokens, paging.virtual_block, paging.null_block)
                check_no_null(side, group, paging.null_block, missing, tokens)
            # Check all blocks that move, not only those of this edge: another edge may use the
            # second place of a repeated block.
            check_once(side, group, table, table.blocks_of(tokens, paging.virtual_block))

    def _check_state(self, sides: tuple[TableSide, ...]) -> None:
        for side, group, table, paging in sides:
            field = f"{side}_blocks[{group!r}]"
            slots = state_slots(field, table, paging.block_size, self.moves)
            for slot, wanted in zip(slots, self.moves, strict=True):
                missing = wanted if table.block_ids[slot] == paging.null_block else EMPTY
                check_no_null(side, group, paging.null_block, missing, wanted)
            if side == "consumer" or len(slots) > 1:
                check_once(side, group, table, table.block_ids[slots])


def state_slots(
    field: str, table: BlockTable, block_size: int, moves: Iterable[range]
) -> list[int]:
    """Return the indices of the blocks of several states in a table.

    Args:
        field: Name of the table for errors.
        table: The block table.
        block_size: Tokens of a block.
        moves: The last position of each state.

    Raises:
        SpecError: If a state has no block, or two have the same.
    """
    slots = [table.state_block(field, block_size, tokens.start) for tokens in moves]
    if len({*slots}) < len(slots):
        ends = ", ".join(str(tokens.stop) for tokens in moves)
        expected = f"a block for each of the states after {ends} tokens"
        raise SpecError(field, table.block_ids.tolist(), expected)
    return slots


def check_tokens(tokens: object, groups: Iterable[str]) -> None:
    """Raise `SpecError` unless *tokens* is a range of positions, or ranges by names in *groups*."""
    ranges = tokens if isinstance(tokens, Mapping) else {None: tokens}
    if unknown := sorted(set(ranges) - {None, *groups}, key=repr):
        raise SpecError("tokens", unknown, f"groups of the consumer: {', '.join(groups)}")
    for group, positions in ranges.items():
        field = "tokens" if group is None else f"tokens[{group!r}]"
        if (
            not isinstance(positions, range)
            or positions.step != 1
            or not 0 <= positions.start <= positions.stop
        ):
            raise SpecError(field, positions, "a range of positions, range(start, stop)")


def _step_tokens(request: TransferRequest, group: str, spec: LayerSpec, tokens: Positions) -> range:
    """Return the positions of *group* that one step moves.

    A mapping has the positions of each group, and a group that it does not name does not move. A
    range applies to all groups that count the tokens of the prompt. Other groups, such as those of
    an encoder, move with the last token of the prompt. If the prompt has none, they move each time.
    """
    if isinstance(tokens, Mapping):
        return tokens.get(group, EMPTY)
    if spec.counts_prompt:
        return tokens
    last = not request.num_tokens or tokens.start < request.num_tokens <= tokens.stop
    return range(request.total(spec)) if last else EMPTY


def check_producer_holds(group: str, held: range, wanted: range) -> None:
    """Raise `MismatchError` if the producer's table of *group* does not contain all of *wanted*."""
    if _inside(wanted, held):
        return
    missing = range(max(wanted.start, held.stop), wanted.stop) or range(
        wanted.start, min(held.start, wanted.stop)
    )
    why = f"the producer's table does not hold tokens {missing.start}..{missing.stop - 1}"
    sides = "held", "expected"
    raise MismatchError([Mismatch(f"producer_blocks[{group!r}]", held, wanted, why, sides)])


def _inside(inner: range, outer: range) -> bool:
    return outer.start <= inner.start and inner.stop <= outer.stop


def check_once(side: Role, group: str, table: BlockTable, ids: Ids) -> None:
    """Raise `SpecError` if one of the block *ids* that move is in two places of the table."""
    ordered = table.ordered
    if len(ids) < len(ordered):
        # A block that is written must not be anywhere else in its table, because that place would
        # change as well. A block that is only read may be elsewhere if that place does not move.
        ordered = ordered[np.isin(ordered, ids)] if side == "consumer" else np.sort(ids)
    repeated = ordered[:-1] == ordered[1:]
    if np.count_nonzero(repeated):
        value = int(ordered[repeated.argmax()])
        raise SpecError(f"{side}_blocks[{group!r}]", value, "each block once")


@attrs.frozen(eq=False)
class Tiles:
    """The places of the tiles that move of one row set: int64 arrays of shape (2, tiles).

    The first row of each array is the producer's and the second the consumer's.

    Attributes:
        block: Block in memory.
        tile: Tile in the block.
        ids: Ids, counted from the first id of each run.
    """

    block: Ints
    tile: Ints
    ids: Ints

    def __len__(self) -> int:
        count: int = self.ids.shape[1]
        return count

    def take(self, indices: Ints) -> Tiles:
        """Return the tiles with these *indices*."""
        return Tiles(self.block[:, indices], self.tile[:, indices], self.ids[:, indices])


def row_starts(
    request: TransferRequest,
    tables: EdgeTables,
    token_split: TokenSplit,
    moves_whole: MovesWhole | None = None,
) -> RowStarts:
    """Return where the rows of *request* begin on one edge, by kind of row.

    Args:
        request: The request.
        tables: Its tables for the edge. They have been validated.
        token_split: How the request is cut.
        moves_whole: Whether dead tokens move with a kind of row. None: they never move.

    Raises:
        MismatchError: If a recurrent state has seen other tokens than the request has, or a ring
            so many more that it has no row for a live token.
    """
    if not token_split.tile:
        return _state(request, tables, token_split)
    if token_split.producer.is_ring:
        check_ring_tokens(request, tables.wanted, token_split.producer.memory_block_size)
    producer, consumer = token_split.producer.context, token_split.consumer.context
    same_sharding = producer.same_sharding(consumer)
    frame = (_own_counts if same_sharding else _positions)(tables, token_split)
    starts = _cut(tables, token_split, frame, moves_whole).items()
    first = tables.producer.first_token, tables.consumer.first_token
    if same_sharding and first == (0, 0):
        return {kind: (tokens, tokens) for kind, tokens in starts}
    # Tables begin at a virtual block, so each context rank owns an equal share of what is before.
    before = first[0] // producer.size, first[1] // consumer.size
    return {
        kind: (frame.producer.local(tokens) - before[0], frame.consumer.local(tokens) - before[1])
        for kind, tokens in starts
    }


def tiles(
    tables: EdgeTables,
    token_split: TokenSplit,
    starts: tuple[Ints, Ints],
    block_layouts: tuple[BlockLayout, BlockLayout],
) -> Tiles:
    """Return the places of rows of one kind, in ascending order of the producer's ids.

    Args:
        tables: The tables of the request.
        token_split: How the request is cut.
        starts: Where the rows begin on the producer and on the consumer, as in `RowStarts`.
        block_layouts: How the rows repeat on the producer and on the consumer.

    Raises:
        SpecError: If a block id is not in the memory.
    """
    places = np.zeros((3, 2, len(starts[0])), np.int64)
    block, tile, ids = places[0], places[1], places[2]
    for side_index, (side, group, table, paging) in enumerate(tables.sides(token_split)):
        start, block_layout = starts[side_index], block_layouts[side_index]
        # A state moves whole: its start is its index in the table.
        index, kernel_block, inner = (
            paging.places(start, token_split.tile) if token_split.tile else (start, None, None)
        )
        block_ids = table.block_ids[index]
        num_blocks = block_layout.num_blocks // paging.kernel_blocks_per_block
        if not table.inside(num_blocks):  # An id outside is allowed if its block does not move.
            check_ids(side, group, block_ids, num_blocks)
        if kernel_block is None:
            block[side_index] = block_ids
        else:
            block[side_index] = block_ids * paging.kernel_blocks_per_block + kernel_block
        if inner is not None:
            tile[side_index] = inner
        ids[side_index] = block_layout.ids(block[side_index], tile[side_index])
    # NIXL joins only neighbours in the list, so that ascending ids need the fewest descriptors.
    if np.count_nonzero(ids[0, :-1] > ids[0, 1:]):
        block, tile, ids = places.take(_ascending(ids[0]), axis=2)
    return Tiles(block, tile, ids)


def _ascending(ids: Ints) -> Ints:
    """Return the order of *ids*. Many ids that are close together are placed and not sorted.

    No id is repeated, because `check_once` has refused repeated blocks of the producer.

    >>> _ascending(np.array([2, 0, 3])).tolist()
    [1, 0, 2]
    """
    if len(ids) > PLACE_FROM and (end := int(ids.max()) + 1) < PLACE_WITHIN * len(ids):
        places = np.full(end, -1)
        places[ids] = np.arange(len(ids))
        return places[places >= 0]
    return ids.argsort(kind="stable")


def check_ring_tokens(request: TransferRequest, wanted: range, rows: int) -> None:
    """Raise `MismatchError` unless the producer's ring of *rows* rows still has *wanted* tokens."""
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    if not seen - rows <= wanted.start < wanted.stop <= seen:
        why = f"a ring of {rows} rows has only its last {rows} tokens"
        held = range(max(seen - rows, 0), seen)
        raise MismatchError([Mismatch("state_tokens", held, wanted, why, ("held", "expected"))])


def check_state_tokens(request: TransferRequest) -> None:
    """Raise `MismatchError` if the producer's states have not seen exactly the request's tokens."""
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    if seen != request.num_tokens:
        why = "a recurrent state cannot be rewound: it must have seen exactly these tokens"
        raise MismatchError([Mismatch("state_tokens", seen, request.num_tokens, why)])


def _state(request: TransferRequest, tables: EdgeTables, token_split: TokenSplit) -> RowStarts:
    """Return where the recurrent states of *request* lie in both tables."""
    check_state_tokens(request)
    block = token_split.consumer.virtual_block
    moves = [each for each in tables.moves if token_split.stripe.holds(each.start // block)]
    if not moves:
        return {}
    producer, consumer = (
        np.array(state_slots(f"{side}_blocks[{group!r}]", table, paging.block_size, moves))
        for side, group, table, paging in tables.sides(token_split)
    )
    return {token_split.whole_kind: (producer, consumer)}


@attrs.frozen(eq=False)
class _Frame:
    """A way to count tokens, and who owns them. Tiles begin at multiples of their size in it.

    Attributes:
        wanted: Tokens that the request moves.
        tokens: Tokens of one step, or None. The step moves the tiles that end in it, and the last
            step moves the rest.
        cached: Number of leading tokens that the consumer already has.
        block: Tokens of one block of the consumer's table, in this way of counting.
        producer: The tokens that the producer rank owns.
        consumer: The tokens that the consumer rank owns.
    """

    wanted: range
    tokens: range | None
    cached: int
    block: int
    producer: BlockCyclic
    consumer: BlockCyclic


def _own_counts(tables: EdgeTables, token_split: TokenSplit) -> _Frame:
    """Count the tokens that both ranks own. They shard alike, so both count the same tokens."""
    local, wanted = token_split.consumer.context.local, tables.wanted
    own = range(local(wanted.start), local(wanted.stop))
    tokens = tables.tokens and range(local(tables.tokens.start), local(tables.tokens.stop))
    block = token_split.consumer.block_size
    return _Frame(own, tokens, local(tables.cached), block, EVERY_TOKEN, EVERY_TOKEN)


def _positions(tables: EdgeTables, token_split: TokenSplit) -> _Frame:
    """Count positions of the request. Each tile has one owner on each side."""
    owners = token_split.producer.context, token_split.consumer.context
    block = token_split.consumer.virtual_block
    return _Frame(tables.wanted, tables.tokens, tables.cached, block, *owners)


def _cut(
    tables: EdgeTables, token_split: TokenSplit, frame: _Frame, moves_whole: MovesWhole | None
) -> dict[RowKind, Ints]:
    """Return the first tokens of the rows that move, by kind of row, in the count of *frame*.

    These are the rows of the example above:

    >>> from kvspec.ownership.parallel import RankId
    >>> from kvspec.ownership.stripes import WHOLE
    >>> edge = Edge(producer=RankId(), consumer=RankId(), producer_group="g", group="g",
    ...     layers=(), slices=())
    >>> moves = range(5, 15)
    >>> tables = EdgeTables(edge, moves, (moves,), cached=5, tokens=None, recurrent=False,
    ...     producer=BlockTable([6, 7, 8, 9]), consumer=BlockTable([3, 1]))
    >>> token_split = TokenSplit(WHOLE, 4, 1, Paging(4, 4, EVERY_TOKEN), Paging(8, 8, EVERY_TOKEN))
    >>> def rows(moves_whole):
    ...     frame = _positions(tables, token_split)
    ...     for kind, starts in _cut(tables, token_split, frame, moves_whole).items():
    ...         print(kind, starts.tolist())
    >>> rows(None)
    RowKind(skip=1, tokens=3) [5]
    RowKind(skip=0, tokens=3) [12]
    RowKind(skip=0, tokens=4) [8]

    If dead tokens may move, the token 15 moves. The first tile has a cached token:

    >>> rows(lambda kind: True)
    RowKind(skip=1, tokens=3) [5]
    RowKind(skip=0, tokens=4) [8, 12]
    """
    size, tokens_per_state, wanted = token_split.tile, token_split.tokens_per_state, frame.wanted
    if not wanted:
        return {}
    # A state with a wanted token moves whole.
    moving = range(
        wanted.start // tokens_per_state * tokens_per_state,
        -(-wanted.stop // tokens_per_state) * tokens_per_state,
    )
    tile_starts = np.arange(moving.start // size * size, moving.stop, size, dtype=np.int64)
    first, last = int(tile_starts[0]), int(tile_starts[-1])
    tile_starts = _moving(tables, token_split, frame, tile_starts)
    rows, whole = dict[RowKind, Ints](), token_split.whole_kind
    # Only the first and the last tile may move in part. They may be missing, because another edge
    # or step moves them. If they are the same tile, the first pass takes it, and the second finds
    # no tile.
    for tile_start, place in ((first, 0), (last, -1)):
        start, stop = max(moving.start, tile_start), min(moving.stop, tile_start + size)
        kind = RowKind(start - tile_start, stop - start)
        if kind == whole or not len(tile_starts) or tile_starts[place] != tile_start:
            continue
        # A tile that begins in the cached prefix never moves whole: it would write a cached token.
        if moves_whole is None or tile_start < frame.cached or not moves_whole(kind):
            rows[kind] = np.array([start], np.int64)
            tile_starts = np.delete(tile_starts, place)
    if len(tile_starts):
        rows[whole] = tile_starts
    return rows


def _moving(tables: EdgeTables, token_split: TokenSplit, frame: _Frame, tile_starts: Ints) -> Ints:
    """Return the tiles that move over this edge in this step of the request."""
    for owner in (frame.producer, frame.consumer):
        if owner.size > 1:
            tile_starts = tile_starts[owner.owns(tile_starts)]
    if not token_split.stripe.whole:
        tile_starts = tile_starts[token_split.stripe.holds(tile_starts // frame.block)]
    if frame.tokens is not None:
        stop = tile_starts + token_split.tile
        ends = tables.last | (stop <= frame.tokens.stop)
        tile_starts = tile_starts[(stop > frame.tokens.start) & ends]
    return tile_starts


def check_cached(tables: EdgeTables, tokens_per_state: int) -> None:
    """Raise `SpecError` if a state has cached tokens and tokens that move.

    Every edge of the group must refuse the request, whichever ranks have the state. So positions
    are compared, not a rank's own tokens, and *tokens_per_state* may be that of a layer of another
    rank. No interleave divides a state, so a state has consecutive positions.
    """
    if tables.wanted.start // tokens_per_state * tokens_per_state < tables.cached:
        raise SpecError(
            "cached_tokens", tables.cached, f"a multiple of tokens_per_state={tokens_per_state}"
        )
