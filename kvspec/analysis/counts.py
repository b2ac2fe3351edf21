"""Count the bytes and descriptors that one request moves, for each pair of ranks and each rank.

Invariant: counting never changes a plan and allocates no cache memory.

How it works:
    The bytes come from `kvspec.analysis.flows`. The descriptors are counted with the rows of real
    tables, for two caches that are planned but not allocated. The request's blocks are 1, 3, 5 and
    so on, so that no two of them are adjacent. This is the worst case, because adjacent blocks can
    share a descriptor. Many pairs of ranks have the same shape: the same slices, cache layouts and
    contexts. Their descriptors are counted only once.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import numpy as np

from kvspec.analysis.fewest import fewest
from kvspec.analysis.flows import flows
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.selection import SplitGroup
from kvspec.descriptors.table import numbered_rows_of
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.memory.allocation import plan_memory
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import Role
from kvspec.plan.plan import TransferPlan

# Every block of a request becomes an entry of an array. This many take some seconds.
MAX_BLOCKS = 2**22

# A producer rank and a consumer rank.
Pair = tuple[RankId, RankId]


@attrs.frozen
class Amount:
    """A number of bytes and of the descriptors that move them.

    Attributes:
        nbytes: Bytes.
        descriptors: Descriptors. One descriptor moves one contiguous range of memory.
    """

    nbytes: int
    descriptors: int

    @staticmethod
    def total(loads: Iterable[Amount]) -> Amount:
        """Return the sum of *loads*.

        >>> print(Amount.total([Amount(1000, 1), Amount(24, 2)]))
        1,024 bytes in 3 descriptors
        """
        summands = tuple(loads)
        return Amount(
            sum(load.nbytes for load in summands), sum(load.descriptors for load in summands)
        )

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes in {self.descriptors:,} descriptors"


@attrs.frozen
class Link:
    """The network link of one rank and the load that it carries.

    Attributes:
        side: Either "producer" or "consumer".
        rank: The rank.
        load: Everything that leaves a producer rank, or enters a consumer rank.
    """

    side: Role
    rank: RankId
    load: Amount

    def __str__(self) -> str:
        return f"{self.side} {self.rank}: {self.load}"


@attrs.frozen(kw_only=True)
class Traffic:
    """The loads of one request on every pair of ranks and on every rank. Made by `traffic`.

    Attributes:
        num_tokens: Length of the request. The consumer has cached none of it.
        pairs: Amount of each pair of ranks that has an edge, by (producer rank, consumer rank).
        producers: Amount that leaves each producer rank.
        consumers: Amount that enters each consumer rank.
    """

    num_tokens: int
    pairs: dict[Pair, Amount]
    producers: dict[RankId, Amount]
    consumers: dict[RankId, Amount]

    @property
    def total(self) -> Amount:
        """The load of all pairs together."""
        return Amount.total(self.pairs.values())

    @property
    def busiest(self) -> Link:
        """The link with the most bytes. In a tie, a producer and the lowest rank win."""
        links = [Link("producer", rank, load) for rank, load in self.producers.items()]
        links += [Link("consumer", rank, load) for rank, load in self.consumers.items()]
        return max(links, key=lambda link: link.load.nbytes)

    def __str__(self) -> str:
        lines = [f"{self.num_tokens:,} tokens: {self.total}"]
        lines += [
            f"  producer {source} -> consumer {target}: {load}"
            for (source, target), load in self.pairs.items()
        ]
        return "\n".join([*lines, f"busiest link: {self.busiest}"])


def traffic(plan: TransferPlan, num_tokens: int) -> Traffic:
    """Count the bytes and descriptors that a request of *num_tokens* moves over *plan*.

    The consumer has cached nothing. A cross-attention layer reads as many encoder tokens as the
    request has tokens. Bytes count live tokens and whole states, but not the dead tokens at the
    end of a block. Descriptors are counted for caches as `allocate` makes them, and for blocks of
    which no two are adjacent. Blocks in ascending order need fewer descriptors.

    Args:
        plan: The plan.
        num_tokens: Length of the request, at least 0.

    Returns:
        The loads of every pair of ranks and of every rank.

    Raises:
        SpecError: If *num_tokens* is not a count, or needs too many blocks or bytes.
        MismatchError: If `build_table` cannot connect two ranks.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, plan_transfer
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="latent", layers=["l.0"], spec=spec)])
    >>> print(traffic(plan_transfer(engine, engine), 100))
    100 tokens: 115,200 bytes in 2 descriptors
      producer tp0 -> consumer tp0: 115,200 bytes in 2 descriptors
    busiest link: producer tp0: 115,200 bytes in 2 descriptors
    """
    edge_flows = flows(plan, num_tokens)
    producers, consumers = plan.producer.parallel.ranks, plan.consumer.parallel.ranks
    pair_bytes: dict[Pair, int] = {}
    columns = edge_flows.producer, edge_flows.consumer, edge_flows.moved
    for producer, consumer, nbytes in zip(*map(np.ndarray.tolist, columns), strict=True):
        pair = producers[producer], consumers[consumer]
        pair_bytes[pair] = pair_bytes.get(pair, 0) + nbytes
    counter = _DescriptorCounter(plan, num_tokens)
    pairs = {pair: Amount(nbytes, counter.count(*pair)) for pair, nbytes in pair_bytes.items()}
    return Traffic(
        num_tokens=num_tokens,
        pairs=pairs,
        producers=_by_rank(producers, pairs, 0),
        consumers=_by_rank(consumers, pairs, 1),
    )


def edge_descriptors(plan: TransferPlan, num_tokens: int) -> dict[tuple[Pair, str], int]:
    """Return the descriptors of each pair of ranks and group of the consumer, as `traffic` counts.

    Raises:
        SpecError: As `traffic`.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, plan_transfer
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="latent", layers=["l.0"], spec=spec)])
    >>> [*edge_descriptors(plan_transfer(engine, engine), 100).values()]
    [2]
    """
    counter = _DescriptorCounter(plan, num_tokens)
    counts = dict[tuple[Pair, str], int]()
    for edge in plan.edges:
        pair = edge.producer, edge.consumer
        counts[pair, edge.group] = counter.count(*pair, group=edge.group)
    return counts


def _by_rank(
    ranks: tuple[RankId, ...], pairs: dict[Pair, Amount], side: int
) -> dict[RankId, Amount]:
    loads: dict[RankId, list[Amount]] = {rank: [] for rank in ranks}
    for pair, load in pairs.items():
        loads[pair[side]].append(load)
    return {rank: Amount.total(rank_loads) for rank, rank_loads in loads.items()}


class _DescriptorCounter:
    """Counts the descriptors between two ranks. Pairs of the same shape share one count."""

    def __init__(self, plan: TransferPlan, num_tokens: int) -> None:
        self.plan = plan
        engines = plan.producer, plan.consumer
        sides = [_tables(engine, num_tokens) for engine in engines]
        # The ids go up to twice the number of blocks, and the null block must exist as well.
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

    def count(self, producer: RankId, consumer: RankId, *, group: str | None = None) -> int:
        """Return the number of descriptors between two ranks, perhaps of one group only."""
        edges = [
            edge for edge in self.plan.between(producer, consumer) if group in (None, edge.group)
        ]
        # Neither the TP rank nor the global units of a slice change the number of descriptors.
        same_shape = tuple(
            (
                edge.producer_group,
                edge.group,
                edge.layers,
                attrs.evolve(transfer_slice, remote_rank=0, global_range=range(0)),
            )
            for edge in edges
            for transfer_slice in edge.slices
        )
        key = same_shape, self.shapes[0][producer], self.shapes[1][consumer]
        if key not in self.known:
            source = plan_memory(self.plan.producer, producer, self.pools[0])
            target = plan_memory(self.plan.consumer, consumer, self.pools[1])
            # A table would refuse more ids than NIXL can take. Counting needs no ids.
            numbered_rows = numbered_rows_of(self.plan, edges, (source, target))
            picked = [
                picked
                for split_group in SplitGroup.of(self.plan, numbered_rows, dead_tokens=False)
                for picked in split_group.picked(self.request, None)
            ]
            self.known[key] = fewest(picked, (source.boundaries, target.boundaries))
        return self.known[key]


def _tables(engine: EngineSpec, num_tokens: int) -> dict[str, BlockTable]:
    """Return a block table for each group. No two of its blocks are adjacent."""
    tables = {}
    for group in engine.groups:
        blocks = -(-num_tokens // engine.virtual_block(group)) or 1
        if blocks > MAX_BLOCKS:
            rule = f"the request needs {blocks} blocks, but at most {MAX_BLOCKS} can be counted"
            raise SpecError("num_tokens", num_tokens, rule=rule)
        if not any(part.per_token for part in group.spec.parts):
            blocks = 1  # A recurrent state is one slot for any number of tokens.
        # All ids are odd if the null block is even, and even if it is odd.
        first = 1 - _null_block(engine) % 2
        tables[group.name] = BlockTable(first + 2 * np.arange(blocks))
    return tables


def _null_block(engine: EngineSpec) -> int:
    return -1 if engine.null_block is None else engine.null_block


def _shapes(engine: EngineSpec) -> dict[RankId, int]:
    """Return a number for each rank, equal for ranks with the same cache layout and context."""
    known: dict[object, int] = {}
    shapes = {}
    for rank in engine.parallel.ranks:
        held = tuple(engine.held(rank).items())
        contexts = tuple(engine.context(group, rank) for group in engine.groups)
        shapes[rank] = known.setdefault((held, contexts), len(known))
    return shapes
