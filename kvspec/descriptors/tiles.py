"""Which tiles of one request move over one edge.

Law: positions decide. A tile is named by the tokens it holds; each side's block table turns that
into a block and a place in it. A tile that begins with cached tokens moves its end only, so that
no cached byte is ever written. Any other tile moves whole, dead tokens and all; but the last one
leaves those out where that takes no more rows, or where they take longer than a row more.

The two block tables of one edge, and what is wrong with them.

Law: what a table does not hold is never read or written; a table is refused as a whole, before
anything of it moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise

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

Side = tuple[Role, str, BlockTable, Paging]
Positions = range | Mapping[str, range]
"""Positions of one step of a request: of the prompt, or by consumer group."""


@attrs.frozen(eq=False)
class Tables:
    """The block tables of one edge: the tokens *expected* by the consumer, and how many it has.

    *tokens*: the positions by which one step of the request moves on; None: all at once. *whole*:
    whether it is a state, which moves with the last step.
    """

    edge: Edge
    wanted: range
    cached: int
    tokens: range | None
    whole: bool
    producer: BlockTable
    consumer: BlockTable

    @staticmethod
    def of(
        request: TransferRequest,
        edge: Edge,
        spec: LayerSpec,
        tokens: Positions | None,
        *,
        whole: bool,
    ) -> Tables:
        """Return the tables of *request* for *edge*, between layers of *spec*."""
        return Tables(
            edge=edge,
            wanted=request.wanted(edge.group, spec),
            cached=request.cached(edge.group, spec),
            tokens=None if tokens is None else _own_tokens(request, edge.group, spec, tokens),
            whole=whole,
            producer=request.table("producer", edge.producer_group),
            consumer=request.table("consumer", edge.group),
        )

    @property
    def reached(self) -> range:
        """The wanted tokens that this step or one before it moves; empty where it moves none."""
        tokens, wanted = self.tokens, self.wanted
        if tokens is None or tokens.start < wanted.stop <= tokens.stop:
            return wanted
        if self.whole or not tokens or tokens.start >= wanted.stop:
            return EMPTY
        return range(wanted.start, min(wanted.stop, tokens.stop)) or EMPTY

    @property
    def last(self) -> bool:
        """Whether no later step follows."""
        return self.tokens is None or self.tokens.stop >= self.wanted.stop

    def sides(self, token_split: TokenSplit) -> tuple[Side, Side]:
        """Return name, group, table and paging of the consumer, and of the producer."""
        return (
            ("consumer", self.edge.group, self.consumer, token_split.consumer),
            ("producer", self.edge.producer_group, self.producer, token_split.producer),
        )

    def check(self, token_split: TokenSplit) -> None:
        """Raise `SpecError` for tables that are impossible.

        And `MismatchError` for wanted tokens that the producer does not hold.
        """
        check = self._check_tokens if token_split.tile else self._check_state
        check(self.sides(token_split))

    def _check_tokens(self, sides: tuple[Side, Side]) -> None:
        wanted = self.reached
        for side, group, table, paging in sides:
            if table.first_token:
                table.check_start(f"{side}_blocks[{group!r}]", paging.virtual_block)
            held = table.tokens(paging.virtual_block)
            if _inside(wanted, held):
                continue
            if side == "producer":
                check_producer_holds(group, held, wanted)
            told = f"blocks for tokens {wanted.start}..{wanted.stop - 1}"
            raise SpecError(f"{side}_blocks[{group!r}]", held, told)
        for side, group, table, paging in sides:
            if paging.null_block is not None:
                missing = table.without_block(wanted, paging.virtual_block, paging.null_block)
                check_no_null(side, group, paging.null_block, missing, wanted)
            # Of all that moves, not of this edge alone: another may read a block's other place.
            _check_once(side, group, table, table.blocks_of(wanted, paging.virtual_block))

    def _check_state(self, sides: tuple[Side, Side]) -> None:
        for side, group, table, paging in sides:
            field = f"{side}_blocks[{group!r}]"
            slot = table.state_block(field, paging.block_size, self.wanted.start)
            missing = self.wanted if table.block_ids[slot] == paging.null_block else EMPTY
            check_no_null(side, group, paging.null_block, missing, self.wanted)
            if side == "consumer":
                _check_once(side, group, table, table.block_ids[slot : slot + 1])


def check_tokens(tokens: object, groups: Iterable[str]) -> None:
    """Raise `SpecError` unless *tokens* is a range of positions, or some for *groups*."""
    ranges = tokens if isinstance(tokens, Mapping) else {None: tokens}
    if strange := sorted(set(ranges) - {None, *groups}, key=repr):
        raise SpecError("tokens", strange, f"groups of the consumer: {', '.join(groups)}")
    for group, own in ranges.items():
        field = "tokens" if group is None else f"tokens[{group!r}]"
        if not isinstance(own, range) or own.step != 1 or not 0 <= own.start <= own.stop:
            raise SpecError(field, own, "a range of positions, range(start, stop)")


def _own_tokens(request: TransferRequest, group: str, spec: LayerSpec, tokens: Positions) -> range:
    """Return the positions of *group* that *tokens* are.

    What counts other tokens than the prompt's moves with the prompt's last, unless it is named; of
    a prompt of no tokens, with any step.
    """
    if isinstance(tokens, Mapping):
        return tokens.get(group, EMPTY)
    if spec.counts_prompt:
        return tokens
    last = not request.num_tokens or tokens.start < request.num_tokens <= tokens.stop
    return range(request.total(spec)) if last else EMPTY


def check_producer_holds(group: str, held: range, wanted: range) -> None:
    """Raise `MismatchError` naming the first *expected* tokens that the producer's table lacks."""
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


def _check_once(side: Role, group: str, table: BlockTable, ids: Ids) -> None:
    """Raise `SpecError` if one of the block *ids* that move stands for two places.

    A block that is written may stand nowhere else in its table; one that is only read may, where
    nothing of it moves.
    """
    used = table.ordered
    if len(ids) < len(used):
        used = used[np.isin(used, ids)] if side == "consumer" else np.sort(ids)
    twice = used[:-1] == used[1:]
    if np.count_nonzero(twice):
        value = int(used[twice.argmax()])
        raise SpecError(f"{side}_blocks[{group!r}]", value, "each block once")


ALL = BlockCyclic()
"""Who owns every token."""
MANY, FAR = 1000, 8
"""How many ids, and within how many times as many, take less time to place than to sort."""
Begins = dict[RowKind, tuple[Ints, Ints]]
"""Of each kind of row, where what it takes begins: the producer's and the consumer's own tokens
before it, counted from the first token of the table; of a state, its place in the table."""


@attrs.frozen(eq=False)
class Tiles:
    """Descriptors of one set of rows, by *block* in memory and *tile* in the block, and by *ids*.

    Int64 of shape (2, n): of the producer, and of the consumer. Ids count from a run's first.
    """

    block: Ints
    tile: Ints
    ids: Ints

    def __len__(self) -> int:
        count: int = self.ids.shape[1]
        return count


def begins(request: TransferRequest, tables: Tables, token_split: TokenSplit) -> Begins:
    """Return what each kind of row takes of *request*.

    Of what is cut by *token_split*, on one edge.

    The *tables* hold wanted tokens. Raises `MismatchError` for a state that has seen other tokens.
    """
    if not token_split.tile:
        return _state(request, tables, token_split)
    producer, consumer = token_split.producer.context, token_split.consumer.context
    same_sharding = producer.same_sharding(consumer)
    frame = (_own_counts if same_sharding else _positions)(tables, token_split)
    found = _cut(tables, token_split, frame).items()
    first = tables.producer.first_token, tables.consumer.first_token
    if same_sharding and first == (0, 0):
        return {kind: (begin, begin) for kind, begin in found}
    before = first[0] // producer.size, first[1] // consumer.size
    return {
        kind: (frame.producer.local(begin) - before[0], frame.consumer.local(begin) - before[1])
        for kind, begin in found
    }


def tiles(
    tables: Tables,
    token_split: TokenSplit,
    kind: RowKind,
    taken: tuple[Ints, Ints],
    block_layouts: tuple[BlockLayout, BlockLayout],
) -> Tiles:
    """Return the descriptors of rows of one kind for what they take, ordered by producer id."""
    found = np.zeros((3, 2, len(taken[0])), np.int64)
    block, tile, ids = found[0], found[1], found[2]
    for row, (side, group, table, paging) in enumerate(tables.sides(token_split)[::-1]):
        begin, block_layout = taken[row], block_layouts[row]
        place, part, inner = paging.places(begin, kind) if token_split.tile else (begin, None, None)
        own, blocks = (
            table.block_ids[place],
            block_layout.num_blocks // paging.kernel_blocks_per_block,
        )
        if not table.inside(blocks):
            check_ids(side, group, own, blocks)
            if kind.tokens > token_split.tile:
                # What runs on has ids that follow the first, so its last is the greatest.
                last = (begin + kind.tokens - 1) // paging.block_size
                check_ids(side, group, table.block_ids[last], blocks)
        block[row] = own if part is None else own * paging.kernel_blocks_per_block + part
        if inner is not None:
            tile[row] = inner
        ids[row] = block_layout.ids(block[row], tile[row])
    if np.count_nonzero(ids[0, :-1] > ids[0, 1:]):
        block, tile, ids = found.take(_ascending(ids[0]), axis=2)
    return Tiles(block, tile, ids)


def _ascending(ids: Ints) -> Ints:
    """Return the order of *ids*, by putting each in its place where they are many and near.

    >>> _ascending(np.array([2, 0, 3])).tolist()
    [1, 0, 2]
    """
    if len(ids) > MANY and (end := int(ids.max()) + 1) < FAR * len(ids):
        places = np.full(end, -1)
        places[ids] = np.arange(len(ids))
        order = places[places >= 0]
        if len(order) == len(ids):  # none is there twice
            return order
    return ids.argsort(kind="stable")


def _state(request: TransferRequest, tables: Tables, token_split: TokenSplit) -> Begins:
    seen = request.num_tokens if request.state_tokens is None else request.state_tokens
    if seen != request.num_tokens:
        why = "a recurrent state cannot be rewound: it must have seen exactly these tokens"
        raise MismatchError([Mismatch("state_tokens", seen, request.num_tokens, why)])
    token = tables.wanted.start
    if not token_split.stripe.holds(token // token_split.consumer.virtual_block):
        return {}
    consumer, producer = (
        np.array([table.state_block(side, paging.block_size, token)], np.int64)
        for side, _, table, paging in tables.sides(token_split)
    )
    return {RowKind(0, 0, 0): (producer, consumer)}


@attrs.frozen(eq=False)
class _Frame:
    """The count of tokens in which tiles are cut, and who owns what in it.

    *block*: how much of it one block of the consumer's table stands for. *tokens*: what one step
    of the request moves on by: the tiles that end there; the last step moves what is left.
    """

    wanted: range
    tokens: range | None
    cached: int
    block: int
    producer: BlockCyclic
    consumer: BlockCyclic


def _own_counts(tables: Tables, token_split: TokenSplit) -> _Frame:
    """Count the tokens that both sides own: they shard them alike, so their own counts are one."""
    local, wanted = token_split.consumer.context.local, tables.wanted
    own = range(local(wanted.start), local(wanted.stop))
    tokens = tables.tokens and range(local(tables.tokens.start), local(tables.tokens.stop))
    return _Frame(own, tokens, local(tables.cached), token_split.consumer.block_size, ALL, ALL)


def _positions(tables: Tables, token_split: TokenSplit) -> _Frame:
    """Count positions of the request: each tile has one owner on either side."""
    owners = token_split.producer.context, token_split.consumer.context
    block = token_split.consumer.virtual_block
    return _Frame(tables.wanted, tables.tokens, tables.cached, block, *owners)


def _cut(tables: Tables, token_split: TokenSplit, frame: _Frame) -> dict[RowKind, Ints]:
    """Return where begins what each kind of row takes, in the count of *frame*.

    Of 15 tokens 5 are cached. In tiles of 4, with rows of up to two and a last tile that may be
    trimmed, that is:

        tiles       4 5 6 7 | 8 9 10 11 | 12 13 14 15
        rows          5 6 7   8 9 10 11   12 13 14        where the last two tiles lie apart
                      5 6 7   8 9 10 11   12 13 14 15     where they follow: one row, dead token too
    """
    tile, wanted = token_split.tile, frame.wanted
    if not wanted:
        return {}
    every = np.arange(wanted.start // tile * tile, wanted.stop, tile, dtype=np.int64)
    first, last = int(every[0]), int(every[-1])
    live = (
        -(-wanted.stop // token_split.grain) * token_split.grain - last
    )  # tokens of the last tile
    every = _moving(tables, token_split, frame, every)
    parts: list[tuple[RowKind, Ints]] = []
    if first < frame.cached:
        start = _after_cached(tables, token_split, frame) - first
        # By *partial_sizes* a row begins or ends where its tile does: there is none from within to
        # within.
        within = first == last and token_split.trim_from > 0 and not token_split.partial_sizes
        if len(every) and every[0] == first:
            parts += _part(token_split, first, start, live if within else tile)
            every = every[1:]
    begins, counts = _joined(tables, token_split, frame, every)
    if (
        token_split.trim_from
        and tile - live >= token_split.trim_from
        and len(begins)
        and begins[-1] == last
    ):
        end = _part(token_split, last, 0, live)
        parts += end
        if end:
            begins, counts = begins[:-1], None if counts is None else counts[:-1]
    parts += _by_count(tile, begins, counts)
    if len(parts) == 1:
        return dict(parts)
    taken: dict[RowKind, list[Ints]] = {}
    for kind, some in parts:
        taken.setdefault(kind, []).append(some)
    return {kind: np.concatenate(some) for kind, some in taken.items()}


def _by_count(tile: int, begins: Ints, counts: Ints | None) -> list[tuple[RowKind, Ints]]:
    """Return the rows of whole tiles, by how many each takes; None: one each."""
    if counts is None:
        return [(RowKind(tile, 0, tile), begins)] if len(begins) else []
    return [
        (RowKind(tile, 0, count * tile), begins[counts == count])
        for count in np.unique(counts).tolist()
    ]


def _moving(tables: Tables, token_split: TokenSplit, frame: _Frame, every: Ints) -> Ints:
    """Return those of the tiles *every* that move over this edge, in this step of the request."""
    for owner in (frame.producer, frame.consumer):
        if owner.size > 1:
            every = every[owner.owns(every)]
    if not token_split.stripe.whole:
        every = every[token_split.stripe.holds(every // frame.block)]
    if frame.tokens is not None:
        stop = every + token_split.tile
        every = every[(stop > frame.tokens.start) & (tables.last | (stop <= frame.tokens.stop))]
    return every


def _part(token_split: TokenSplit, tile: int, start: int, stop: int) -> list[tuple[RowKind, Ints]]:
    """Return the rows of the tokens from *start* to *stop* of the tile that begins at *tile*.

    By *partial_sizes* (1, 4, 16), tokens 5..15 of a tile of 16 are rows of 3 and of 8 tokens, which
    end where 4 and 16 end; tokens 0..7 are one row of 8. Tokens 0..8 are none: the tile moves
    whole.
    """
    if not token_split.partial_sizes:
        grain = token_split.grain
        return [(RowKind(grain, 0, grain), np.arange(tile + start, tile + stop, grain))]
    size_pairs = pairwise(token_split.partial_sizes)
    if stop < token_split.tile:
        one = (period for size, period in size_pairs if stop < period and stop % size == 0)
        return [(RowKind(period, 0, stop), np.array([tile])) for period in one][:1]
    found = []
    for _, period in size_pairs:
        tokens = -start % period
        if tokens:
            found.append((RowKind(period, period - tokens, tokens), np.array([tile + start])))
            start += tokens
    return found


def _after_cached(tables: Tables, token_split: TokenSplit, frame: _Frame) -> int:
    """Return where the first row begins that moves of a tile that begins with cached tokens."""
    start = frame.wanted.start // token_split.grain * token_split.grain
    if start < frame.cached:
        told = f"a multiple of tokens_per_state={token_split.grain}"
        raise SpecError("cached_tokens", tables.cached, told)
    return start


def _joined(
    tables: Tables, token_split: TokenSplit, frame: _Frame, every: Ints
) -> tuple[Ints, Ints | None]:
    """Return which of the tiles *every* begin a row, and how many each takes; None: one each.

    Tiles follow in memory inside a block, and from block to block where rows flow on and the ids
    follow each other. Two tiles, each a block of a producer whose rows flow, and half a block of
    the consumer:

        producer    | 5     | 6     |   one row       | 5     | 9     |   two rows
        consumer    | 3             |                 | 3             |
    """
    if token_split.spans == 1 or len(every) < 2:  # noqa: PLR2004 - it takes two
        return every, None
    follows = np.ones(len(every) - 1, np.bool_)
    owners = frame.consumer, frame.producer
    for (_, _, table, paging), owner in zip(tables.sides(token_split), owners, strict=True):
        local = owner.local(every) - table.first_token // paging.context.size
        follows &= local[:-1] + token_split.tile == local[1:]
        inside = local[1:] % paging.memory_block_size != 0
        if paging.contiguous_across_blocks:
            ids = table.block_ids[local // paging.block_size]
            inside |= ids[1:] == ids[:-1] + 1
        follows &= inside
    starts = np.concatenate([[0], np.flatnonzero(~follows) + 1])
    return every[starts], np.diff(starts, append=len(every))
