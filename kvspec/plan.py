"""The transfer plan: every pair of ranks, what it exchanges, and who tells whom.

Law: both engines compute the same plan from the two descriptions alone, so pulling and pushing
are the same edges. Exact cover is checked where the plan is made: a plan that exists tiles every
part of every layer of every consumer rank exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import attrs

from kvspec.engine import EngineSpec, KVCacheGroup, mismatches
from kvspec.errors import KVSpecError, Mismatch, MismatchError, SpecError
from kvspec.parallel import Deal, RankId
from kvspec.ranges import cover_fault
from kvspec.slices import Part, Replicas, TPTransferSlice, check_policy, transfer_slices
from kvspec.specs import LayerSpec


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


@attrs.frozen
class GroupPair:
    """A producer's and a consumer's group, and the layers that they share."""

    producer: KVCacheGroup
    consumer: KVCacheGroup
    layers: tuple[str, ...]

    @cached_property
    def alike(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """The shared layers by the consumer's spec of them: one entry unless sizes differ."""
        shared = set(self.layers)
        kept = ((s, tuple(x for x in names if x in shared)) for s, names in self.consumer.alike)
        return tuple((spec, names) for spec, names in kept if names)


@attrs.frozen(kw_only=True)
class TransferPlan:
    """Who exchanges what, for every pair of ranks of two engines; see `plan_transfer`."""

    producer: EngineSpec
    consumer: EngineSpec
    replicas: Replicas
    salt: int
    pairs: tuple[GroupPair, ...]
    edges: tuple[Edge, ...]

    def __attrs_post_init__(self) -> None:
        _check_cover(self)

    @cached_property
    def _by_pair(self) -> dict[tuple[RankId, RankId], tuple[Edge, ...]]:
        found: dict[tuple[RankId, RankId], list[Edge]] = {}
        for edge in self.edges:
            found.setdefault((edge.producer, edge.consumer), []).append(edge)
        return {pair: tuple(edges) for pair, edges in found.items()}

    def between(self, producer: RankId, consumer: RankId) -> tuple[Edge, ...]:
        """Return the edges of one pair of ranks, one for each pair of groups."""
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
        found: dict[RankId, tuple[RankId, ...]] = {}
        for rank in self.producer.parallel.ranks:
            found[rank] = self.targets(rank) or self._releasers(rank)
        return found

    def _releasers(self, rank: RankId) -> tuple[RankId, ...]:
        """Elect who tells a producer rank that nobody reads."""
        for spec in (spec for pair in self.pairs for spec, _ in pair.alike):
            for part in spec.parts:
                units = _deal(self.producer, part).ranges[rank.tp]
                if not units:
                    continue
                members = _deal(self.producer, part).ranks_of(units)
                readers = _deal(self.consumer, part).ranks_of(units)
                at = members.index(rank.tp) * len(readers) // len(members)
                return (RankId(tp=readers[at]),)
        return self.consumer.parallel.ranks

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

    def traffic(self, num_tokens: int) -> dict[tuple[RankId, RankId], int]:
        """Return the bytes of a request of *num_tokens*, nothing cached, by rank pair.

        Counted by live token and whole state; the blocks' dead ends are not counted.
        """
        from kvspec.explain import traffic  # noqa: PLC0415 - it reads this module's values

        return traffic(self, num_tokens)

    def explain(self) -> str:
        """Return, in words, who reads which units from whom, and who notifies whom."""
        from kvspec.explain import explain  # noqa: PLC0415 - it reads this module's values

        return "\n".join(explain(self))


def plan_transfer(
    producer: EngineSpec, consumer: EngineSpec, replicas: Replicas = "spread", salt: int = 0
) -> TransferPlan:
    """Plan the transfer of any request from *producer* to *consumer*.

    *replicas*: which one of several equal producer ranks is read; both engines must use one
    policy and one *salt*. Raises `MismatchError` where the engines do not fit, before anything
    else.
    """
    for field, engine in (("producer", producer), ("consumer", consumer)):
        if not isinstance(engine, EngineSpec):
            raise SpecError(field, engine, "an EngineSpec")
    check_policy(replicas)
    found = [*mismatches(producer, consumer), *_not_yet(producer, consumer)]
    if found:
        raise MismatchError(found)
    pairs = tuple(_pairs(producer, consumer))
    edges = tuple(
        edge
        for rank in consumer.parallel.ranks
        for pair in pairs
        for edge in _edges(producer, consumer, pair, rank, replicas, salt)
    )
    return TransferPlan(
        producer=producer,
        consumer=consumer,
        replicas=replicas,
        salt=salt,
        pairs=pairs,
        edges=edges,
    )


def _not_yet(producer: EngineSpec, consumer: EngineSpec) -> Iterator[Mismatch]:
    for field in ("pp_size", "dcp_size", "pcp_size"):
        ours, theirs = getattr(producer.parallel, field), getattr(consumer.parallel, field)
        if (ours, theirs) != (1, 1):
            yield Mismatch(f"parallel.{field}", ours, theirs, "not yet: only 1 on both sides")
    for layer, group in producer.homes.items():
        other = consumer.homes.get(layer)
        if other is None:
            continue
        ours, theirs = group.spec.block_size, other.spec.block_size
        if ours != theirs and any(p.tokens_per_state for p in group.spec.of_layer(layer).parts):
            yield Mismatch(f"{layer}.block_size", ours, theirs, "not yet: only equal block sizes")
            return


def _pairs(producer: EngineSpec, consumer: EngineSpec) -> Iterator[GroupPair]:
    for mine in consumer.groups:
        by_home: dict[str, list[str]] = {}
        for layer in mine.layers:
            by_home.setdefault(producer.homes[layer].name, []).append(layer)
        for name, layers in by_home.items():
            yield GroupPair(producer.group(name), mine, tuple(layers))


def _deal(engine: EngineSpec, part: Part) -> Deal:
    return engine.parallel.deal(part.units, part.deal_in)


def _edges(
    producer: EngineSpec,
    consumer: EngineSpec,
    pair: GroupPair,
    rank: RankId,
    replicas: Replicas,
    salt: int,
) -> Iterator[Edge]:
    by_source: dict[int, list[TPTransferSlice]] = {}
    for spec, layers in pair.alike:
        slices = transfer_slices(
            spec.parts,
            rank.tp,
            lambda part: _deal(consumer, part),
            lambda part: _deal(producer, part),
            replicas=replicas,
            salt=salt,
            layers=() if len(pair.alike) == 1 else layers,
        )
        for each in slices:
            by_source.setdefault(each.remote_rank, []).append(each)
    for source in sorted(by_source):
        yield Edge(
            producer=RankId(tp=source),
            consumer=rank,
            producer_group=pair.producer.name,
            group=pair.consumer.name,
            layers=pair.layers,
            slices=tuple(by_source[source]),
        )


def _check_cover(plan: TransferPlan) -> None:
    found: dict[tuple[RankId, str, tuple[str, ...], str], list[TPTransferSlice]] = {}
    for edge in plan.edges:
        for each in edge.slices:
            for name in each.parts:
                key = (edge.consumer, edge.group, each.layers or edge.layers, name)
                found.setdefault(key, []).append(each)
    for rank in plan.consumer.parallel.ranks:
        for pair in plan.pairs:
            for spec, layers in pair.alike:
                for part in spec.parts:
                    own = _deal(plan.consumer, part).ranges[rank.tp]
                    slices = found.get((rank, pair.consumer.name, layers, part.name), [])
                    fault = cover_fault(_ranges_once(slices), range(len(own)))
                    if fault is not None:
                        where = f"consumer {rank}, layer {layers[0]}, part {part.name}"
                        raise KVSpecError(f"{where}: units {fault.where} {fault.kind}")


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
