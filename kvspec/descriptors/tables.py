"""The two block tables of one edge, and what is wrong with them.

Law: what a table does not hold is never read or written; a table is refused as a whole, before
anything of it moves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np

from kvspec.descriptors.paging import Paging, TokenSplit
from kvspec.descriptors.request import BlockTable, Ids, TransferRequest, check_no_null
from kvspec.errors import Mismatch, MismatchError, SpecError
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.replicas import Role
from kvspec.plan.edges import Edge
from kvspec.specs import LayerSpec

Side = tuple[Role, str, BlockTable, Paging]
Positions = range | Mapping[str, range]
"""Positions of one step of a request: of the prompt, or by consumer group."""


@attrs.frozen(eq=False)
class Tables:
    """The block tables of one edge: the tokens *wanted* by the consumer, and how many it has.

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
