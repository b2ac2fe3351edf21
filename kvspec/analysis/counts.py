"""How much one request moves: bytes and descriptors, by pair of ranks and by rank.

Law: only reads a plan. Bytes are `flows`; descriptors are those of real tables over caches on
paper, made once for all pairs of ranks that are alike.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvspec.analysis.flows import flows
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.table import build_table
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.memory.allocation import plan_memory
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.plan.plan import TransferPlan

MAX_BLOCKS = 2**22
"""Blocks of one group that are looked at: some seconds."""

Pair = tuple[RankId, RankId]
"""A producer's rank and a consumer's."""


@attrs.frozen
class Load:
    """Bytes, and the descriptors that move them."""

    nbytes: int
    descriptors: int

    @staticmethod
    def total(loads: Iterable[Load]) -> Load:
        """Return the sum of *loads*."""
        every = tuple(loads)
        return Load(sum(each.nbytes for each in every), sum(each.descriptors for each in every))

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes in {self.descriptors:,} descriptors"


@attrs.frozen
class Link:
    """One rank's own link to the other side, and what goes over it."""

    side: Role
    rank: RankId
    load: Load

    def __str__(self) -> str:
        return f"{self.side} {self.rank}: {self.load}"


@attrs.frozen(kw_only=True)
class Traffic:
    """What a request of *num_tokens* moves, nothing cached.

    *pairs*: by (producer, consumer), every pair that has an edge. *producers* and *consumers*: of
    every rank of each side, all that leaves or enters it.
    """

    num_tokens: int
    pairs: dict[Pair, Load]
    producers: dict[RankId, Load]
    consumers: dict[RankId, Load]

    @property
    def total(self) -> Load:
        """All of it."""
        return Load.total(self.pairs.values())

    @property
    def busiest(self) -> Link:
        """The link with most bytes; the producer's and the lower rank in a tie."""
        links = [Link("producer", *each) for each in self.producers.items()]
        links += [Link("consumer", *each) for each in self.consumers.items()]
        return max(links, key=lambda link: link.load.nbytes)

    def __str__(self) -> str:
        lines = [f"{self.num_tokens:,} tokens: {self.total}"]
        lines += [
            f"  {source} -> {target}: {load}" for (source, target), load in self.pairs.items()
        ]
        return "\n".join([*lines, f"busiest link: {self.busiest}"])


def traffic(plan: TransferPlan, num_tokens: int) -> Traffic:
    """Return what a request of *num_tokens* moves over *plan*, nothing cached.

    Cross attention counts as many tokens of the encoder. Bytes count live tokens and whole states,
    not the blocks' dead ends. Descriptors are for caches as `allocate` makes them, and blocks of
    which no two lie side by side: blocks in order take fewer. `MismatchError` where `build_table`
    has one.
    """
    found = flows(plan, num_tokens)
    producers, consumers = plan.producer.parallel.ranks, plan.consumer.parallel.ranks
    moved: dict[Pair, int] = {}
    for p, c, nbytes in zip(
        *map(np.ndarray.tolist, (found.producer, found.consumer, found.moved)), strict=True
    ):
        pair = producers[p], consumers[c]
        moved[pair] = moved.get(pair, 0) + nbytes
    counts = _Counts(plan, num_tokens)
    pairs = {pair: Load(nbytes, counts.of(*pair)) for pair, nbytes in moved.items()}
    return Traffic(
        num_tokens=num_tokens,
        pairs=pairs,
        producers=_by_rank(producers, pairs, 0),
        consumers=_by_rank(consumers, pairs, 1),
    )


def _by_rank(ranks: tuple[RankId, ...], pairs: dict[Pair, Load], side: int) -> dict[RankId, Load]:
    loads: dict[RankId, list[Load]] = {rank: [] for rank in ranks}
    for pair, load in pairs.items():
        loads[pair[side]].append(load)
    return {rank: Load.total(each) for rank, each in loads.items()}


class _Counts:
    """Counts the descriptors of pairs of ranks, once for those that are alike."""

    def __init__(self, plan: TransferPlan, num_tokens: int) -> None:
        self.plan = plan
        engines = plan.producer, plan.consumer
        sides = [_tables(engine, num_tokens) for engine in engines]
        self.pools = [
            {name: max(2 * len(table.block_ids), null + 1) for name, table in tables.items()}
            for tables, null in zip(sides, map(_null_block, engines), strict=True)
        ]
        self.request = TransferRequest(
            request_id="traffic",
            num_tokens=num_tokens,
            encoder_tokens=num_tokens,
            producer_blocks=sides[0],
            consumer_blocks=sides[1],
        )
        self.known: dict[tuple[object, ...], int] = {}
        self.shapes = [_shapes(engine) for engine in engines]

    def of(self, producer: RankId, consumer: RankId) -> int:
        """Return the descriptors between two ranks."""
        between = self.plan.between(producer, consumer)
        same_shape = tuple(
            (
                edge.producer_group,
                edge.group,
                edge.layers,
                attrs.evolve(each, remote_rank=0, global_range=range(0)),
            )
            for edge in between
            for each in edge.slices
        )
        key = same_shape, self.shapes[0][producer], self.shapes[1][consumer]
        if key not in self.known:
            source = plan_memory(self.plan.producer, producer, self.pools[0])
            target = plan_memory(self.plan.consumer, consumer, self.pools[1])
            table = build_table(self.plan, source, target)
            self.known[key] = len(table.descriptors(self.request))
        return self.known[key]


def _tables(engine: EngineSpec, num_tokens: int) -> dict[str, BlockTable]:
    """Return a table for each group, of blocks of which no two lie side by side."""
    found = {}
    for group in engine.groups:
        blocks = -(-num_tokens // engine.virtual_block(group)) or 1
        if blocks > MAX_BLOCKS:
            told = f"at most {MAX_BLOCKS} blocks, which are counted one by one; it takes {blocks}"
            raise SpecError("num_tokens", num_tokens, told)
        if not any(part.per_token for part in group.spec.parts):
            blocks = 1  # the slot of a state
        first = 1 - _null_block(engine) % 2  # so no block is the null block
        found[group.name] = BlockTable(first + 2 * np.arange(blocks))
    return found


def _null_block(engine: EngineSpec) -> int:
    return -1 if engine.null_block is None else engine.null_block


def _shapes(engine: EngineSpec) -> dict[RankId, int]:
    """Return a number for each rank, equal for ranks whose caches and tokens are laid out alike."""
    known: dict[object, int] = {}
    found = {}
    for rank in engine.parallel.ranks:
        held = tuple(engine.held(rank).items())
        contexts = tuple(engine.context(group, rank) for group in engine.groups)
        found[rank] = known.setdefault((held, contexts), len(known))
    return found
