"""Transfer requests: how many tokens to move, and the block tables of both sides.

Invariant: a block table assigns token positions to its blocks. Blocks of the two sides are paired
by position. The index in the table is not compared, neither from its start nor from its end.

How it works:
    A request moves the positions ``live ∩ [cached_tokens, num_tokens)`` of each group. *Live* are
    the tokens that a later query can see: all of them, or those of a sliding window. Each side
    finds the positions in its own table. For example, a prompt has 40 tokens and the consumer has
    cached 16. The producer has blocks of 16 tokens and the consumer blocks of 8:

        position    16              24              32       40
        producer    block 1                       | block 2
        consumer    block 2       | block 3       | block 4
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import MAX_TOKENS, Frozen, mapping, positive_int, sequence
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.replicas import Role
from kvspec.specs import LayerSpec

Ids = npt.NDArray[np.int64]
MAX_ID = 2**63 - 1
_BOOLS = {bool, np.bool_}


def _block_ids(value: object) -> Ids:
    """Return block ids as a read-only int64 array."""
    array = _array(value)
    # An empty list becomes an array of floats, so the type of an empty array does not matter.
    fits = array is not None and array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if array is None or not fits or (array.dtype.kind == "u" and array.max(initial=0) > MAX_ID):
        raise SpecError("block_ids", value, "a sequence of ints")
    ids = array.astype(np.int64)
    ids.setflags(write=False)
    return ids


def _array(value: object) -> npt.NDArray[Any] | None:
    """Return *value* as an array, or None if it has no order or contains a bool."""
    if isinstance(value, np.ndarray):
        # Comparisons skip the masked ids of a masked array, so a bad id would pass all checks.
        # Test the attribute: importing numpy.ma takes 13 ms.
        return None if hasattr(value, "mask") else value
    if isinstance(value, Sequence):
        # numpy would turn a bool among ints into the id 0 or 1.
        if isinstance(value, (str, bytes)) or not _BOOLS.isdisjoint(map(type, value)):
            return None
    elif not hasattr(value, "__array__"):
        return None
    try:
        return np.asarray(value)
    except (ValueError, TypeError):
        return None


@attrs.frozen
class BlockTable:
    """The blocks of one request in one group, in token order.

    Block ``i`` contains ``block_size`` tokens from ``first_token + i * block_size``. If C context
    ranks share the tokens, it is a virtual block of ``block_size * C`` positions. In a group of
    state layers, a table of one id is the slot of the state. In a longer table, the block of the
    last token contains the state. The table of a ring has one id.

    Attributes:
        block_ids: Block ids in token order: int64, shape (blocks,), read-only.
        first_token: Position of the first token in the table.
        ordered: The block ids in ascending order.

    >>> table = BlockTable([7, 3], first_token=32)
    >>> table.tokens(16), table.blocks_of(range(50, 60), 16).tolist()
    (range(32, 64), [3])
    """

    block_ids: Ids = attrs.field(
        converter=_block_ids, eq=attrs.cmp_using(eq=np.array_equal), hash=False
    )
    first_token: int = attrs.field(default=0)
    ordered: Ids = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        positive_int("first_token", self.first_token, least=0, most=MAX_TOKENS)
        # Sort once: the descriptor table of each producer rank searches the ids for repeated ones,
        # and compares the smallest and the largest with the memory.
        ordered = self.block_ids.copy()
        ordered.sort()
        ordered.setflags(write=False)
        object.__setattr__(self, "ordered", ordered)

    def tokens(self, block_size: int) -> range:
        """Return the token positions of the table, for blocks of *block_size* positions."""
        return range(self.first_token, self.first_token + len(self.block_ids) * block_size)

    def blocks_of(self, tokens: range, block_size: int) -> Ids:
        """Return the ids of the blocks that contain *tokens*. The table must contain them all.

        Args:
            tokens: Consecutive token positions, at least one.
            block_size: Positions of a block.

        Returns:
            Block ids in token order, a view of `block_ids`.
        """
        first = (tokens.start - self.first_token) // block_size
        last = (tokens.stop - 1 - self.first_token) // block_size
        return self.block_ids[first : last + 1]

    def without_block(self, tokens: range, block_size: int, null_block: int | None) -> range:
        """Return those of *tokens* that have no block: the first ones whose block is null.

        Args:
            tokens: Token positions. The table must contain them all.
            block_size: Positions of a block.
            null_block: Id of the null block, or None if the engine has none.

        Returns:
            Positions in the first null blocks that follow each other. Empty if all blocks are real.
        """
        if null_block is None:
            return EMPTY
        null = self.blocks_of(tokens, block_size) == null_block
        if not null.any():
            return EMPTY
        first, last = np.flatnonzero(np.diff(null, prepend=False, append=False))[:2].tolist()
        block_start = tokens.start - (tokens.start - self.first_token) % block_size
        return range(
            max(block_start + first * block_size, tokens.start),
            min(block_start + last * block_size, tokens.stop),
        )

    def inside(self, num_blocks: int) -> bool:
        """Whether all ids are from 0 to *num_blocks* - 1. The table must not be empty."""
        return self.ordered.item(0) >= 0 and self.ordered.item(-1) < num_blocks

    def check_start(self, field: str, block_size: int) -> None:
        """Raise `SpecError` unless `first_token` is a multiple of *block_size*."""
        if self.first_token % block_size:
            raise SpecError(f"{field}.first_token", self.first_token, f"a multiple of {block_size}")

    def check_ring(self, field: str) -> None:
        """Raise `SpecError` if the table has more than one block: a request has one ring."""
        if len(self.block_ids) > 1:
            raise SpecError(field, self.block_ids.tolist(), "one id, the block of the ring")

    def state_block(self, field: str, block_size: int, token: int) -> int:
        """Return the index of the block that contains the state after *token*.

        Args:
            field: Name of the table for errors.
            block_size: Tokens of a block.
            token: Position of the last token that the state has seen.

        Returns:
            An index into `block_ids`.

        Raises:
            SpecError: If no block contains the state.
        """
        if len(self.block_ids) == 1 and not self.first_token:
            return 0
        self.check_start(field, block_size)
        if token not in self.tokens(block_size):
            expected = f"one id, the state's slot, or a block for token {token}"
            raise SpecError(field, self.block_ids.tolist(), expected)
        return (token - self.first_token) // block_size


def check_ids(side: Role, group: str, ids: Ids, num_blocks: int) -> None:
    """Raise `SpecError` with the first of *ids* that is not from 0 to *num_blocks* - 1."""
    # As unsigned numbers, negative ids are larger than any count: one comparison is enough.
    wrong = ids.view(np.uint64) >= num_blocks
    if np.count_nonzero(wrong):
        expected = f"block ids from 0 to {num_blocks - 1}"
        raise SpecError(f"{side}_blocks[{group!r}]", int(ids[wrong.argmax()]), expected)


Tables = Mapping[str, BlockTable | Sequence[int]]


def _producer_tables(value: Tables) -> Mapping[str, BlockTable]:
    return tables_of("producer_blocks", value)


def _consumer_tables(value: Tables) -> Mapping[str, BlockTable]:
    return tables_of("consumer_blocks", value)


def tables_of(field: str, value: Tables) -> Mapping[str, BlockTable]:
    """Return block tables by group as an immutable mapping. Plain ids start at token 0."""
    tables = mapping(field, value, "group names to block tables")
    return Frozen(
        {
            group: table if isinstance(table, BlockTable) else BlockTable(table)
            for group, table in tables.items()
        }
    )


def _frozen(value: int | Mapping[str, int]) -> int | Mapping[str, int]:
    return Frozen(value) if isinstance(value, Mapping) else value


def _positions(value: Sequence[int]) -> tuple[int, ...]:
    return tuple(
        positive_int("state_positions", position, most=MAX_TOKENS)
        for position in sequence("state_positions", value, "numbers of tokens")
    )


class Known(dict[object, Any]):
    """A cache of values derived from a request. A pickle or a copy of it is empty."""

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        return Known, ()


@attrs.frozen(kw_only=True)
class TransferRequest:
    """The tokens that one request moves, and the block tables of both sides.

    Attributes:
        request_id: Name of the request, not empty.
        num_tokens: Number of leading tokens that the consumer need not compute. It computes the
            next token itself.
        producer_blocks: Block tables of the producer by the names of its groups. A plain sequence
            of ids starts at token 0.
        consumer_blocks: Block tables of the consumer by the names of its groups.
        cached_tokens: Number of leading tokens that the consumer already has. An int applies to
            all groups that count the tokens of the prompt. A mapping applies to the groups it
            names, and the others have cached none. A ring moves nevertheless.
        encoder_tokens: Number of tokens of the encoder. Groups of cross attention require it.
        state_tokens: Number of tokens that the recurrent states of the producer have seen. It must
            equal `num_tokens`, which is the default. A ring may have seen more tokens, as long as
            it still has a row for each token that moves.
        state_positions: Numbers of tokens after each of which the recurrent states move, ascending.
            The last is `num_tokens`. A consumer that keeps states in a prefix cache resumes there
            later. States after cached tokens do not move. Both tables have a block for each state:
            that of the last token that it has seen. `num_tokens` alone by default.
        known: Values that descriptor tables derive from the request. The tables of all producer
            ranks share them.

    >>> request = TransferRequest(
    ...     request_id="r", num_tokens=40, cached_tokens=16,
    ...     producer_blocks={"full": [9, 4, 5]}, consumer_blocks={"full": [1, 2, 7]},
    ... )
    >>> request.table("producer", "full").block_ids.tolist()
    [9, 4, 5]
    """

    request_id: str
    num_tokens: int
    producer_blocks: Mapping[str, BlockTable] = attrs.field(converter=_producer_tables)
    consumer_blocks: Mapping[str, BlockTable] = attrs.field(converter=_consumer_tables)
    cached_tokens: int | Mapping[str, int] = attrs.field(default=0, converter=_frozen)
    encoder_tokens: int | None = None
    state_tokens: int | None = None
    state_positions: tuple[int, ...] = attrs.field(default=(), converter=_positions)
    known: dict[object, Any] = attrs.field(init=False, eq=False, repr=False, factory=Known)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.request_id, str) or not self.request_id:
            raise SpecError("request_id", self.request_id, "a non-empty str")
        positive_int("num_tokens", self.num_tokens, least=0, most=MAX_TOKENS)
        cached: Any = self.cached_tokens
        for value in cached.values() if isinstance(cached, Frozen) else (cached,):
            positive_int("cached_tokens", value, least=0, most=MAX_TOKENS)
        for field, count in (
            ("encoder_tokens", self.encoder_tokens),
            ("state_tokens", self.state_tokens),
        ):
            if count is not None:
                positive_int(field, count, least=0, most=MAX_TOKENS)
        positions = self.state_positions
        if positions and ([*positions] != sorted({*positions}) or positions[-1] != self.num_tokens):
            wanted = f"ascending numbers of tokens, the last of them num_tokens={self.num_tokens}"
            raise SpecError("state_positions", positions, wanted)

    def check_groups(self, groups: Iterable[str]) -> None:
        """Raise `SpecError` if `cached_tokens` names a group that is not in *groups*."""
        if isinstance(self.cached_tokens, int):
            return
        if unknown := sorted(set(self.cached_tokens) - set(groups), key=repr):
            expected = f"groups of the consumer: {', '.join(groups)}"
            raise SpecError("cached_tokens", unknown, expected)

    def table(self, side: Role, group: str) -> BlockTable:
        """Return the block table of a group.

        Args:
            side: "producer" or "consumer".
            group: Name of a group of that side.

        Returns:
            The block table.

        Raises:
            SpecError: If the request has no table for the group.
        """
        tables = self.producer_blocks if side == "producer" else self.consumer_blocks
        try:
            return tables[group]
        except KeyError:
            expected = f"a block table for group {group!r}"
            raise SpecError(f"{side}_blocks", sorted(tables, key=repr), expected) from None

    def hit(self, group: str, spec: LayerSpec) -> int:
        """Return the number of leading tokens of *group* that the request states as cached."""
        if not isinstance(self.cached_tokens, int):
            return self.cached_tokens.get(group, 0)
        # One count for all groups counts prompt tokens. Tokens of an encoder are other tokens.
        return self.cached_tokens if spec.counts_prompt else 0

    def cached(self, group: str, spec: LayerSpec) -> int:
        """Return the number of leading tokens of *group* that the consumer already has.

        It is 0 for a ring. Raises `SpecError` if they end inside a group of a ring that moves.
        """
        return spec.without_transfer(self.hit(group, spec), self.total(spec))

    def total(self, spec: LayerSpec) -> int:
        """Return the number of tokens for layers of *spec*: those of the prompt or the encoder."""
        return spec.total(self.num_tokens, self.encoder_tokens)

    def wanted(self, group: str, spec: LayerSpec) -> range:
        """Return the token positions of *group* that the request moves.

        Args:
            group: Name of a group of the consumer.
            spec: Spec of layers of the group.

        Returns:
            The live positions from the first that is not cached.
        """
        live = spec.live_tokens(self.total(spec))
        return range(max(live.start, self.cached(group, spec)), live.stop) or EMPTY

    def moves(self, group: str, spec: LayerSpec) -> tuple[range, ...]:
        """Return the ranges of token positions of *group* that the request moves.

        Args:
            group: Name of a group of the consumer.
            spec: Spec of layers of the group.

        Returns:
            The result of `wanted`. For recurrent states, the last position of each state. Empty if
            nothing moves.

        >>> import kvspec
        >>> state = kvspec.MambaSpec.mamba2(
        ...     block_size=16, num_heads=2, head_dim=4, state_size=4, n_groups=1, conv_kernel=4,
        ...     dtype="float16")
        >>> request = TransferRequest(
        ...     request_id="r", num_tokens=40, state_positions=[16, 32, 40], cached_tokens=16,
        ...     producer_blocks={}, consumer_blocks={})
        >>> request.moves("state", state)
        (range(31, 32), range(39, 40))
        """
        wanted = self.wanted(group, spec)
        if not wanted:
            return ()
        if spec.parts[0].per_token or not self.state_positions:
            return (wanted,)
        cached = self.cached(group, spec)
        return tuple(range(end - 1, end) for end in self.state_positions if end > cached)


def check_no_null(
    side: Role, group: str, null_block: int | None, missing: range, wanted: range
) -> None:
    """Raise if *missing* is not empty: the tokens whose block is the null block.

    Args:
        side: The side of the table.
        group: The group of the table.
        null_block: Id of the null block.
        missing: Tokens of the request whose block is the null block.
        wanted: All tokens that the request moves.

    Raises:
        SpecError: For a table of the consumer, which must have a real block for each token.
        MismatchError: For a table of the producer, which has dropped tokens that must move.
    """
    if not missing:
        return
    field, tokens = f"{side}_blocks[{group!r}]", f"tokens {missing.start}..{missing.stop - 1}"
    if side == "consumer":
        raise SpecError(field, null_block, f"a block for {tokens}, not the null block")
    why = f"the producer's table has the null block for {tokens}"
    held = f"null block {null_block}"
    raise MismatchError([Mismatch(field, held, wanted, why, ("held", "expected"))])
