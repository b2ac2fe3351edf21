"""For any two shardings of any part, under every replica policy.

Each consumer rank reads exactly its units.

Each unit once a virtual block, into its own place, from a producer rank that holds it; replicas
share their readers evenly; what the producers would push is what the consumers would pull. Units
are handed out by the oracle's cards.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName, tp_chooser
from kvspec.ownership.slices import TPTransferSlice, transfer_slices
from kvspec.testing.carve import shard_units
from kvspec.testing.parallels import explicit_shardings
from kvspec.testing.strategies import POLICIES

LARGEST = 24
Sides = tuple[ParallelConfig, ParallelConfig]


@st.composite
def sides(draw: st.DrawFn, part: Part) -> Sides:
    """Draw a producer and a consumer that sharding *part* by default or in their own way."""
    found = []
    for _ in range(2):
        size = draw(st.integers(1, LARGEST))
        shardings = {}
        if draw(st.booleans()):
            shardings[part.units] = draw(explicit_shardings(part.units, part.granularity, size))
        found.append(ParallelConfig(tp_size=size, shardings=shardings))
    return found[0], found[1]


@st.composite
def parts(draw: st.DrawFn) -> Part:
    """Draw a part: up to 32 packs of up to 3 units."""
    granularity = draw(st.integers(1, 3))
    units = granularity * draw(st.integers(1, 32))
    return Part(name="p", units=units, states=1, content_bytes=1, granularity=granularity)


def held(side: ParallelConfig, part: Part, rank: int) -> list[int]:
    """Return the units of *part* that *rank* holds, in order."""
    explicit = side.shardings.get(part.units)
    if explicit is not None:
        return list(explicit[rank])
    return shard_units(part.units, side.tp_size, part.granularity)[rank]


def slices_of(
    part: Part,
    sides: Sides,
    rank: RankId,
    *,
    pull: bool,
    replica_policy: ReplicaPolicyName,
    salt: int,
) -> tuple[TPTransferSlice, ...]:
    """Return the slices of one rank: of a consumer if *pull*, else of a producer."""
    producer, consumer = sides
    local, remote = (consumer, producer) if pull else (producer, consumer)
    return transfer_slices(
        (part,),
        "consumer" if pull else "producer",
        rank.tp,
        lambda each: local.sharding(each.units, each.granularity),
        lambda each: remote.sharding(each.units, each.granularity),
        tp_chooser(ReplicaPolicy(replica_policy, salt), producer.tp_size, consumer.tp_size),
    )


@given(st.data(), parts(), st.sampled_from(POLICIES), st.integers(0, 40))
def test_every_unit_once(
    data: st.DataObject, part: Part, replica_policy: ReplicaPolicyName, salt: int
) -> None:
    """Each consumer rank reads each of its units once, from a holder; a push is the same."""
    producer, consumer = both = data.draw(sides(part))
    pulled, pushed = set(), set()
    for rank in consumer.ranks:
        found = slices_of(part, both, rank, pull=True, replica_policy=replica_policy, salt=salt)
        mine = held(consumer, part, rank.tp)
        for block in range(max((each.stripe.step for each in found), default=1)):
            reads = [each for each in found if each.stripe.holds(block)]
            units = [(at, unit) for r in reads for at, unit in zip(*_pair(r), strict=True)]
            assert list(enumerate(mine)) == sorted(units)
        for each in found:
            theirs = held(producer, part, each.remote_rank)
            assert list(each.global_range) == [theirs[at] for at in each.remote_range]
            ranges = (each.global_range, each.remote_range, each.local_range)
            pulled.add((each.remote_rank, rank.tp, ranges, each.stripe))
    for rank in producer.ranks:
        for each in slices_of(
            part, both, rank, pull=False, replica_policy=replica_policy, salt=salt
        ):
            ranges = (each.global_range, each.local_range, each.remote_range)
            pushed.add((rank.tp, each.remote_rank, ranges, each.stripe))
    assert pulled == pushed
    if replica_policy == "spread":
        readers = Counter(source for source, _ in {each[:2] for each in pulled})
        fair([held(producer, part, rank.tp) for rank in producer.ranks], readers)


def fair(hands: list[list[int]], readers: Counter[int]) -> None:
    """Readers of producer ranks that hold the same units differ by at most one."""
    for hand in {tuple(each) for each in hands if each}:
        counts = [readers[rank] for rank, own in enumerate(hands) if tuple(own) == hand]
        assert max(counts) - min(counts) <= 1


def _pair(each: TPTransferSlice) -> tuple[range, range]:
    return each.local_range, each.global_range
