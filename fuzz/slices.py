"""For any two shardings of a part and any policy, each consumer rank reads exactly its units.

It reads each unit once for each virtual block, into its own place, from a producer rank that holds
the unit. Replicas share their readers evenly. The slices that producers would push equal the slices
that consumers would pull. The oracle deals the units to the ranks like cards.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from kvspec.check.counting import shard_units
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName, tp_chooser
from kvspec.ownership.slices import TPTransferSlice, transfer_slices
from kvspec.testing.parallels import explicit_shardings
from kvspec.testing.strategies import KNOWN_POLICIES

# With 24 ranks on a side, sizes that share no divisor and sizes that divide each other both occur.
LARGEST = 24
Sides = tuple[ParallelConfig, ParallelConfig]


@st.composite
def sides(draw: st.DrawFn, part: Part) -> Sides:
    """Draw a producer and a consumer that shard *part* evenly or by an explicit sharding."""
    drawn = []
    for _ in range(2):
        size = draw(st.integers(1, LARGEST))
        shardings = {}
        if draw(st.booleans()):
            shardings[part.units] = draw(explicit_shardings(part.units, part.granularity, size))
        drawn.append(ParallelConfig(tp_size=size, shardings=shardings))
    return drawn[0], drawn[1]


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
        lambda part: local.sharding(part.units, part.granularity),
        lambda part: remote.sharding(part.units, part.granularity),
        tp_chooser(ReplicaPolicy(replica_policy, salt), producer.tp_size, consumer.tp_size),
    )


@given(st.data(), parts(), st.sampled_from(KNOWN_POLICIES), st.integers(0, 40))
def test_consumers_read_each_unit_once(
    data: st.DataObject, part: Part, replica_policy: ReplicaPolicyName, salt: int
) -> None:
    """A consumer rank reads each of its units once from a holder. Push and pull agree."""
    producer, consumer = both = data.draw(sides(part))
    pulled, pushed = set(), set()
    for rank in consumer.ranks:
        own = slices_of(part, both, rank, pull=True, replica_policy=replica_policy, salt=salt)
        own_units = held(consumer, part, rank.tp)
        for block in range(max((piece.stripe.step for piece in own), default=1)):
            reads = [piece for piece in own if piece.stripe.holds(block)]
            units = [(at, unit) for r in reads for at, unit in zip(*_pair(r), strict=True)]
            assert list(enumerate(own_units)) == sorted(units)
        for piece in own:
            remote_units = held(producer, part, piece.remote_rank)
            assert list(piece.global_range) == [remote_units[at] for at in piece.remote_range]
            ranges = (piece.global_range, piece.remote_range, piece.local_range)
            pulled.add((piece.remote_rank, rank.tp, ranges, piece.stripe))
    for rank in producer.ranks:
        for piece in slices_of(
            part, both, rank, pull=False, replica_policy=replica_policy, salt=salt
        ):
            ranges = (piece.global_range, piece.local_range, piece.remote_range)
            pushed.add((rank.tp, piece.remote_rank, ranges, piece.stripe))
    assert pulled == pushed
    if replica_policy == "spread":
        readers = Counter(source for source, _ in {pair[:2] for pair in pulled})
        fair([held(producer, part, rank.tp) for rank in producer.ranks], readers)


def fair(hands: list[list[int]], readers: Counter[int]) -> None:
    """Check that producer ranks with the same units have equally many readers, give or take one."""
    for hand in {tuple(units) for units in hands if units}:
        counts = [readers[rank] for rank, own in enumerate(hands) if tuple(own) == hand]
        assert max(counts) - min(counts) <= 1


def _pair(piece: TPTransferSlice) -> tuple[range, range]:
    return piece.local_range, piece.global_range
