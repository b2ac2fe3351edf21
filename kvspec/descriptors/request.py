"""Block tables with token ranges, and the requests that move them.

Law: a block table says which tokens its blocks hold; nothing is ever paired by count or from the
end. What to move is ``live ∩ [cached, num_tokens)``, cut into ranges by each side's own table.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.inputs import Frozen, mapping, positive_int
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.replicas import Role
from kvspec.specs import LayerSpec

Ids = npt.NDArray[np.int64]
MAX_ID = 2**63 - 1
MAX_TOKENS = 2**62
"""The greatest position: the end of its block is still a signed 64-bit number."""
_BOOLS = {bool, np.bool_}


def _block_ids(value: object) -> Ids:
    given = _array(value)
    fits = given is not None and given.ndim == 1 and (given.dtype.kind in "iu" or not given.size)
    if given is None or not fits or (given.dtype.kind == "u" and given.max(initial=0) > MAX_ID):
        raise SpecError("block_ids", value, "a sequence of ints")
    ids = given.astype(np.int64)
    ids.setflags(write=False)
    return ids


def _array(value: object) -> npt.NDArray[Any] | None:
    """Return *value* as an array, or None if it has no order or hides a bool among ints."""
    if isinstance(value, np.ndarray):  # numpy.ma, which takes long to import, compares no masked id
        return None if hasattr(value, "mask") else value
    if isinstance(value, Sequence):
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

    Block ``i`` holds the tokens ``first_token + i * block_size`` and on; where C context ranks
    share the tokens, it stands for a virtual block of ``block_size * C`` of them. The table of a
    group of state layers is the one slot that holds the state; of a longer one, the state is in
    the block of the last token. *ordered*: its ids in ascending order.
    """

    block_ids: Ids = attrs.field(
        converter=_block_ids, eq=attrs.cmp_using(eq=np.array_equal), hash=False
    )
    first_token: int = attrs.field(default=0)
    ordered: Ids = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        positive_int("first_token", self.first_token, least=0, most=MAX_TOKENS)
        ordered = self.block_ids.copy()
        ordered.sort()
        ordered.setflags(write=False)
        object.__setattr__(self, "ordered", ordered)

    def tokens(self, block_size: int) -> range:
        """Return the token positions that the table holds, for blocks of *block_size* tokens."""
        return range(self.first_token, self.first_token + len(self.block_ids) * block_size)

    def blocks_of(self, tokens: range, block_size: int) -> Ids:
        """Return the ids of the blocks that hold *tokens*, all of which the table has."""
        first = (tokens.start - self.first_token) // block_size
        last = (tokens.stop - 1 - self.first_token) // block_size
        return self.block_ids[first : last + 1]

    def without_block(self, tokens: range, block_size: int, null_block: int | None) -> range:
        """Return the first of *tokens*, all in the table, that stand in the null block."""
        if null_block is None:
            return EMPTY
        null = self.blocks_of(tokens, block_size) == null_block
        if not null.any():
            return EMPTY
        first, last = np.flatnonzero(np.diff(null, prepend=False, append=False))[:2].tolist()
        at = tokens.start - (tokens.start - self.first_token) % block_size
        return range(
            max(at + first * block_size, tokens.start), min(at + last * block_size, tokens.stop)
        )

    def inside(self, num_blocks: int) -> bool:
        """Whether a pool of *num_blocks* has all of its ids, of which there is one or more."""
        return self.ordered.item(0) >= 0 and self.ordered.item(-1) < num_blocks

    def check_start(self, field: str, block_size: int) -> None:
        """Raise `SpecError` unless the table begins where a block of *block_size* tokens does."""
        if self.first_token % block_size:
            raise SpecError(f"{field}.first_token", self.first_token, f"a multiple of {block_size}")

    def state_block(self, field: str, block_size: int, token: int) -> int:
        """Return which block holds the state that has seen *token* last: the only one, or its own.

        `SpecError` naming *field* if none does.
        """
        if len(self.block_ids) == 1 and not self.first_token:
            return 0
        self.check_start(field, block_size)
        if token not in self.tokens(block_size):
            wanted = f"one id, the state's slot, or a block for token {token}"
            raise SpecError(field, self.block_ids.tolist(), wanted)
        return (token - self.first_token) // block_size


def check_ids(side: Role, group: str, ids: Ids, num_blocks: int) -> None:
    """Raise `SpecError` naming the first of *ids* that a pool of *num_blocks* does not have."""
    wrong = ids.view(np.uint64) >= num_blocks  # below 0, too
    if np.count_nonzero(wrong):
        wanted = f"block ids from 0 to {num_blocks - 1}"
        raise SpecError(f"{side}_blocks[{group!r}]", int(ids[wrong.argmax()]), wanted)


Tables = Mapping[str, BlockTable | Sequence[int]]


def _producer_tables(value: Tables) -> Mapping[str, BlockTable]:
    return tables_of("producer_blocks", value)


def _consumer_tables(value: Tables) -> Mapping[str, BlockTable]:
    return tables_of("consumer_blocks", value)


def tables_of(field: str, value: Tables) -> Mapping[str, BlockTable]:
    """Return block tables by group, which never change; plain ids start at token 0."""
    given = mapping(field, value, "group names to block tables")
    return Frozen(
        {
            group: table if isinstance(table, BlockTable) else BlockTable(table)
            for group, table in given.items()
        }
    )


def _frozen(value: int | Mapping[str, int]) -> int | Mapping[str, int]:
    return Frozen(value) if isinstance(value, Mapping) else value


class Known(dict[object, Any]):
    """What was worked out of a request; not copied, nor sent, with it."""

    def __reduce__(self) -> tuple[type[Known], tuple[()]]:
        return Known, ()


@attrs.frozen(kw_only=True)
class TransferRequest:
    """One request: how many tokens, how many the consumer has, and both sides' block tables.

    *num_tokens*: position of the first token that the consumer computes itself. *cached_tokens*:
    leading tokens that the consumer already holds, one count or one for each group; one count is
    of the prompt's tokens, so of an encoder's none are cached unless its group says so. Tables are
    keyed by group name, each side's by its own groups; a plain sequence of ids starts at token 0.
    *encoder_tokens*: the encoder's own count, which cross attention needs. *state_tokens*: how
    many tokens the producer's recurrent states have seen, `num_tokens` unless given. *known*: what
    tables found of it, so that it is cut once for all sources.
    """

    request_id: str
    num_tokens: int
    producer_blocks: Mapping[str, BlockTable] = attrs.field(converter=_producer_tables)
    consumer_blocks: Mapping[str, BlockTable] = attrs.field(converter=_consumer_tables)
    cached_tokens: int | Mapping[str, int] = attrs.field(default=0, converter=_frozen)
    encoder_tokens: int | None = None
    state_tokens: int | None = None
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

    def check_groups(self, groups: Iterable[str]) -> None:
        """Raise `SpecError` if cached tokens are told of a group that is not the consumer's."""
        if isinstance(self.cached_tokens, int):
            return
        if strange := sorted(set(self.cached_tokens) - set(groups), key=repr):
            wanted = f"groups of the consumer: {', '.join(groups)}"
            raise SpecError("cached_tokens", strange, wanted)

    def table(self, side: Role, group: str) -> BlockTable:
        """Return the block table of a *side*'s group; raise `SpecError` if there is none."""
        tables = self.producer_blocks if side == "producer" else self.consumer_blocks
        try:
            return tables[group]
        except KeyError:
            wanted = f"a block table for group {group!r}"
            raise SpecError(f"{side}_blocks", sorted(tables, key=repr), wanted) from None

    def cached(self, group: str, spec: LayerSpec) -> int:
        """Return the leading tokens of *group*, layers of *spec*, that the consumer holds."""
        if not isinstance(self.cached_tokens, int):
            return self.cached_tokens.get(group, 0)
        return self.cached_tokens if spec.counts_prompt else 0

    def total(self, spec: LayerSpec) -> int:
        """Return how many tokens layers of *spec* count: the prompt's, or the encoder's."""
        return spec.total(self.num_tokens, self.encoder_tokens)

    def wanted(self, group: str, spec: LayerSpec) -> range:
        """Return the token positions of *group* that have to move."""
        live = spec.live_tokens(self.total(spec))
        return range(max(live.start, self.cached(group, spec)), live.stop) or EMPTY


def check_no_null(
    side: Role, group: str, null_block: int | None, missing: range, wanted: range
) -> None:
    """Raise if the *side*'s table of *group* has its null block for the tokens *missing*.

    A `SpecError` about the consumer's own table, a `MismatchError` about what the producer dropped.
    """
    if not missing:
        return
    field, tokens = f"{side}_blocks[{group!r}]", f"tokens {missing.start}..{missing.stop - 1}"
    if side == "consumer":
        raise SpecError(field, null_block, f"a block for {tokens}, not the null block")
    why = f"the producer's table has the null block for {tokens}"
    held = f"null block {null_block}"
    raise MismatchError([Mismatch(field, held, wanted, why, ("held", "expected"))])
