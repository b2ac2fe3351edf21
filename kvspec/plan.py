"""The transfer plan: every pair of ranks, what it exchanges, and who tells whom.

Law: both engines compute the same plan from the two descriptions alone, so pulling and pushing
are the same edges. Exact cover is checked where the plan is made: a plan that exists tiles every
part of every layer of every consumer rank exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs

from kvspec.engine import EngineSpec
from kvspec.errors import KVSpecError, Mismatch, MismatchError, SpecError
from kvspec.loads import Traffic
from kvspec.mismatches import mismatches
from kvspec.parallel import RankId
from kvspec.ranges import cover_fault, flag, instance, shift
from kvspec.shares import GroupPair, Share, group_pairs, shares
from kvspec.slices import Replicas, TPTransferSlice, check_policy, consumer_pieces


@attrs.frozen(kw_only=True)
class Edge:
    """What one producer rank gives to one consumer rank, of one pair of groups.

    *slices* are seen from the consumer: local is the consumer's range, remote the producer's.
    """

    producer: RankId
    consumer: RankId
    producer_group: str
    group: str
    layers: tuple[str, ...]
    slices: tuple[TPTransferSlice, ...]


@attrs.frozen(kw_only=True)
class TransferPlan:
    """Who exchanges what, for every pair of ranks of two engines; see `plan_transfer`."""

    producer: EngineSpec
    consumer: EngineSpec
    replicas: Replicas
    salt: int
    pairs: tuple[GroupPair, ...]
    shares: tuple[Share, ...] = attrs.field(repr=False, eq=False)
    edges: tuple[Edge, ...]

    def __attrs_post_init__(self) -> None:
        _check_cover(self)

    @cached_property
    def _by_pair(self) -> dict[tuple[RankId, RankId], tuple[Edge, ...]]:
        found: dict[tuple[RankId, RankId], list[Edge]] = {}
        for edge in self.edges:
            found.setdefault((edge.producer, edge.consumer), []).append(edge)
        return {pair: tuple(edges) for pair, edges in found.items()}

    @cached_property
    def _pairs(self) -> dict[tuple[str, str], GroupPair]:
        return {(pair.producer.name, pair.consumer.name): pair for pair in self.pairs}

    def pair_of(self, edge: Edge) -> GroupPair:
        """Return the groups between which *edge* is."""
        instance("edge", edge, Edge)
        found = self._pairs.get((edge.producer_group, edge.group))
        if found is None:
            raise SpecError("edge", edge, "an edge of this plan")
        return found

    def between(self, producer: RankId, consumer: RankId) -> tuple[Edge, ...]:
        """Return the edges of one pair of ranks, one for each pair of groups."""
        self.producer.parallel.check_rank(producer, "producer")
        self.consumer.parallel.check_rank(consumer, "consumer")
        return self._by_pair.get((producer, consumer), ())

    def sources(self, consumer: RankId) -> tuple[RankId, ...]:
        """Return the producer ranks that *consumer* reads, ascending."""
        self.consumer.parallel.check_rank(consumer, "consumer")
        return tuple(sorted(p for p, c in self._by_pair if c == consumer))

    def targets(self, producer: RankId) -> tuple[RankId, ...]:
        """Return the consumer ranks that read *producer*, ascending."""
        self.producer.parallel.check_rank(producer, "producer")
        return tuple(sorted(c for p, c in self._by_pair if p == producer))

    @cached_property
    def _notifiers(self) -> dict[RankId, tuple[RankId, ...]]:
        readers: dict[RankId, set[RankId]] = {}
        for source, target in self._by_pair:
            readers.setdefault(source, set()).add(target)
        return {
            rank: tuple(sorted(readers[rank])) if rank in readers else self._releasers(at)
            for at, rank in enumerate(self.producer.parallel.ranks)
        }

    def _releasers(self, at: int) -> tuple[RankId, ...]:
        """Elect who tells the producer rank at index *at*, which nobody reads.

        The first share of which it holds any units names it; a rank that holds nothing that moves
        is told by every consumer.
        """
        ranks = self.consumer.parallel.ranks
        for share in self.shares:
            units = share.members.ranges[at]
            readers = share.readers.ranks_of(units)
            if readers:
                members = share.members.ranks_of(units)
                return (ranks[readers[members.index(at) * len(readers) // len(members)]],)
        return ranks

    def notifiers(self, producer: RankId) -> tuple[RankId, ...]:
        """Return the consumer ranks that notify *producer* when it may release a request.

        They are its readers, also of requests that move no byte; of a rank that nobody reads, one
        elected releaser.
        """
        self.producer.parallel.check_rank(producer, "producer")
        return self._notifiers[producer]

    def notifies(self, consumer: RankId) -> tuple[RankId, ...]:
        """Return the producer ranks that *consumer* notifies when it is done with a request."""
        self.consumer.parallel.check_rank(consumer, "consumer")
        return tuple(rank for rank, by in self._notifiers.items() if consumer in by)

    @property
    def finished_sending_count(self) -> int:
        """Producer ranks that report a request as sent."""
        return len(self.producer.parallel.ranks)

    @property
    def finished_recving_count(self) -> int:
        """Consumer ranks that report a request as received."""
        return len(self.consumer.parallel.ranks)

    def traffic(self, num_tokens: int) -> Traffic:
        """Return the bytes and descriptors that a request of *num_tokens* moves, nothing cached.

        By pair of ranks, by rank, and the busiest link; see `kvspec.traffic.traffic`.
        """
        from kvspec.traffic import traffic  # noqa: PLC0415 - it reads this module's values

        return traffic(self, num_tokens)

    def explain(self) -> str:
        """Return, in words, who reads which units from whom, and who notifies whom."""
        from kvspec.explain import explain  # noqa: PLC0415 - it reads this module's values

        return "\n".join(explain(self))

    def to_svg(self, group: str | None = None) -> str:
        """Return a picture of the plan; needs ``kvspec[draw]``; see `kvspec.draw.plan_svg`."""
        from kvspec.draw import plan_svg  # noqa: PLC0415 - an extra draws

        return plan_svg(self, group)

    def _repr_svg_(self) -> str:
        return self.to_svg()


def plan_transfer(
    producer: EngineSpec,
    consumer: EngineSpec,
    replicas: Replicas = "spread",
    salt: int = 0,
    *,
    common_states: bool = False,
) -> TransferPlan:
    """Plan the transfer of any request from *producer* to *consumer*.

    *replicas*: which one of several equal producer ranks is read; both engines must use one
    policy and one *salt*. *common_states*: where recurrent states have more rows on one side
    (speculative tokens), move the rows that both have instead of refusing. Raises `MismatchError`
    where the engines do not fit, before anything else.
    """
    for field, engine in (("producer", producer), ("consumer", consumer)):
        instance(field, engine, EngineSpec)
    check_policy(replicas, salt)
    flag("common_states", common_states)
    found = mismatches(producer, consumer)
    if common_states:
        found = tuple(each for each in found if not each.field.endswith(".states"))
    if found:
        raise MismatchError(found)
    pairs = tuple(group_pairs(producer, consumer))
    dealt = tuple(each for pair in pairs for each in shares(producer, consumer, pair))
    edges = tuple(_edges(producer, consumer, dealt, replicas, salt))
    plan = TransferPlan(
        producer=producer,
        consumer=consumer,
        replicas=replicas,
        salt=salt,
        pairs=pairs,
        shares=dealt,
        edges=edges,
    )
    _check_whole(plan)
    return plan


def _edges(
    producer: EngineSpec,
    consumer: EngineSpec,
    dealt: tuple[Share, ...],
    replicas: Replicas,
    salt: int,
) -> Iterator[Edge]:
    """Yield the edges, ascending by consumer, then group, then producer."""
    ours, theirs = producer.parallel.ranks, consumer.parallel.ranks
    pairs = {share.pair: at for at, share in enumerate(dealt)}
    found: dict[tuple[int, int, int], list[TPTransferSlice]] = {}
    for share in dealt:
        names = tuple(part.name for part in share.parts)
        at_stage = consumer.by_stage(share.layers)
        for reader, own in enumerate(share.readers.ranges):
            if not own:
                continue
            layers = at_stage[theirs[reader].pp]
            for piece in consumer_pieces(share.readers, share.members, reader, replicas, salt):
                units = range(piece.start, piece.stop)
                each = TPTransferSlice(
                    remote_rank=ours[piece.producer].tp,
                    parts=names,
                    global_range=units,
                    local_range=shift(units, -own.start),
                    remote_range=shift(units, -share.members.ranges[piece.producer].start),
                    layers=layers,
                    stripe=piece.stripe,
                )
                found.setdefault((reader, pairs[share.pair], piece.producer), []).append(each)
    by_index = {at: pair for pair, at in pairs.items()}
    for reader, at, source in sorted(found):
        pair, slices = by_index[at], found[reader, at, source]
        moved = {layer for each in slices for layer in each.layers}
        layers = tuple(layer for layer in pair.layers if layer in moved)
        yield Edge(
            producer=ours[source],
            consumer=theirs[reader],
            producer_group=pair.producer.name,
            group=pair.consumer.name,
            layers=layers,
            slices=tuple(
                attrs.evolve(each, layers=()) if each.layers == layers else each for each in slices
            ),
        )


def _check_cover(plan: TransferPlan) -> None:
    """Raise `KVSpecError` unless the slices of every consumer rank are exactly what it owns."""
    found: dict[tuple[object, ...], list[TPTransferSlice]] = {}
    parallel = plan.producer.parallel
    contexts = {rank: parallel.context(rank) for rank in parallel.ranks}
    for edge in plan.edges:
        for each in edge.slices:
            for name in each.parts:
                key = (edge.consumer, each.layers or edge.layers, name, contexts[edge.producer])
                found.setdefault(key, []).append(each)
    for share in plan.shares:
        at_stage = plan.consumer.by_stage(share.layers)
        among = set(contexts.values()) if share.context is None else {share.context}
        for rank, own in zip(plan.consumer.parallel.ranks, share.readers.ranges, strict=True):
            for part in share.parts if own else ():
                keys = ((rank, at_stage[rank.pp], part.name, context) for context in among)
                slices = [each for key in keys for each in found.get(key, ())]
                fault = cover_fault(_ranges_once(slices), range(len(own)))
                if fault is not None:
                    where = f"consumer {rank}, layer {at_stage[rank.pp][0]}, part {part.name}"
                    raise KVSpecError(f"{where}: units {fault.where} {fault.kind}")


def _check_whole(plan: TransferPlan) -> None:
    """Refuse slices that would cut what cannot be cut between units."""
    for share in plan.shares:
        if not share.parts[0].whole:
            continue
        ours, theirs = ({r for r in d.ranges if r} for d in (share.members, share.readers))
        if ours != theirs:
            field = f"{share.layers[0]}.{share.parts[0].name}"
            why = "its content spans the heads of a rank, so both sides must deal heads alike"
            mine, yours = (sorted((r.start, r.stop) for r in each) for each in (ours, theirs))
            raise MismatchError([Mismatch(field, mine, yours, why)])


def _ranges_once(slices: list[TPTransferSlice]) -> Iterator[range]:
    """Yield each local range as often as its stripes cover a virtual block."""
    stripes: dict[range, list[tuple[int, int]]] = {}
    for each in slices:
        stripes.setdefault(each.local_range, []).append(each.stripe)
    for units, ways in stripes.items():
        period = max(step for _, step in ways)
        hits = sorted(block for first, step in ways for block in range(first, period, step))
        times = 1 if hits == list(range(period)) else 0 if len(hits) < period else 2
        for _ in range(times):
            yield units
