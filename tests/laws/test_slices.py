"""The laws of slices: which units of which rank one rank exchanges, for every kind of layer.

Stated over what should be there: the units that the oracle's cards give to each rank.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import attrs
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.ownership.sharding import even_sharding
from kvspec.ownership.slices import TPTransferSlice
from kvspec.testing.carve import shard_units
from kvspec.testing.parallels import tp_sizes
from kvspec.testing.strategies import POLICIES, specs

SIZES = tp_sizes(16)
MANY = settings(max_examples=5 * settings.default.max_examples)
POLICY = st.sampled_from(POLICIES)
GQA = kvspec.FullAttentionSpec(block_size=1, total_num_kv_heads=2, head_size=1, dtype="uint8")


@lru_cache(maxsize=4096)
def owned(part: kvspec.Part, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the units of *part* that each of *size* ranks holds."""
    return tuple(tuple(hand) for hand in shard_units(part.units, size, part.granularity))


def every_part(spec: kvspec.LayerSpec) -> Iterator[tuple[str, kvspec.Part]]:
    """Yield (layer, part) of every layer that *spec* tells apart."""
    for layer in spec.layers or ("any",):
        for part in spec.of_layer(layer).parts:
            yield layer, part


def of(slices: Sequence[TPTransferSlice], layer: str, part: kvspec.Part) -> list[TPTransferSlice]:
    """Return the slices that move *part* of *layer*."""
    return [s for s in slices if part.name in s.parts and (not s.layers or layer in s.layers)]


def read_at(slices: Sequence[TPTransferSlice], block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (unit, local unit, remote rank) of all that *slices* move of virtual block *block*."""
    for each in slices:
        if each.stripe.holds(block):
            for unit, local in zip(each.global_range, each.local_range, strict=True):
                yield unit, local, each.remote_rank


def assert_cover(
    spec: kvspec.LayerSpec, consumers: int, producers: int, **replica_policy: Any
) -> None:
    """Each unit that a consumer rank holds is read once, into its own place, at every block."""
    for rank in range(consumers):
        slices = spec.get_tp_transfer_slices(rank, consumers, producers, **replica_policy)
        for layer, part in every_part(spec):
            mine = of(slices, layer, part)
            target = Counter(enumerate(owned(part, consumers)[rank]))
            for block in range(max((each.stripe.step for each in mine), default=1)):
                read = Counter((local, unit) for unit, local, _ in read_at(mine, block))
                assert target == read


@pytest.mark.parametrize("replica_policy", POLICIES)
def test_exact_cover_of_a_grid(replica_policy: str) -> None:
    """Law 1 for all head counts up to 9 and all sizes up to 8, multiples or not."""
    for heads, consumers, producers in product(range(1, 10), range(1, 9), range(1, 9)):
        spec = attrs.evolve(GQA, total_num_kv_heads=heads)
        assert_cover(spec, consumers, producers, replica_policy=replica_policy)


def assert_identity(
    spec: kvspec.LayerSpec, consumers: int, producers: int, policy: kvspec.ReplicaPolicy
) -> None:
    """Hold that a slice is not empty and names the same global units at both ends."""
    for rank in range(consumers):
        slices = spec.get_tp_transfer_slices(rank, consumers, producers, replica_policy=policy)
        for layer, part in every_part(spec):
            for each in of(slices, layer, part):
                ours, theirs = (
                    owned(part, consumers)[rank],
                    owned(part, producers)[each.remote_rank],
                )
                units = list(each.global_range)
                assert units
                assert units == [ours[i] for i in each.local_range]
                assert units == [theirs[i] for i in each.remote_range]


def assert_neighbours(spec: kvspec.LayerSpec, size: int) -> None:
    """Hold that under the default sharding a unit's holders are a run of ranks.

    As the cards fall.
    """
    for _, part in every_part(spec):
        ranges = even_sharding(part.units, size, part.granularity).ranges
        assert [list(hand) for hand in owned(part, size)] == [list(each) for each in ranges]
        for unit in range(part.units):
            holders = [rank for rank, own in enumerate(ranges) if unit in own]
            assert list(range(holders[0], holders[0] + len(holders))) == holders


def assert_symmetry(
    spec: kvspec.LayerSpec, consumers: int, producers: int, policy: kvspec.ReplicaPolicy
) -> None:
    """Hold that consumers would pull what producers would push, seen from the other end."""
    pulled, pushed = set(), set()
    for rank in range(consumers):
        slices = spec.get_tp_transfer_slices(
            rank, consumers, producers, role="consumer", replica_policy=policy
        )
        pulled |= {(each.remote_rank, rank, seen_from_consumer(each)) for each in slices}
    for rank in range(producers):
        slices = spec.get_tp_transfer_slices(
            rank, producers, consumers, role="producer", replica_policy=policy
        )
        pushed |= {(rank, each.remote_rank, seen_from_producer(each)) for each in slices}
    assert pulled == pushed


def seen_from_consumer(each: TPTransferSlice) -> tuple[object, ...]:
    """Return everything of a consumer's slice but the rank."""
    ranges = each.global_range, each.local_range, each.remote_range
    return (each.parts, each.layers, each.stripe, *ranges)


def seen_from_producer(each: TPTransferSlice) -> tuple[object, ...]:
    """Return everything of a producer's slice but the rank, as the consumer would say it."""
    ranges = each.global_range, each.remote_range, each.local_range
    return (each.parts, each.layers, each.stripe, *ranges)


def chosen(
    part: kvspec.Part, consumers: int, producers: int, replica_policy: str
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (consumer, unit, block, producer) by the definition, from sets of units."""
    holds, needs = ([set(hand) for hand in owned(part, n)] for n in (producers, consumers))
    classes: dict[tuple[int, ...], list[int]] = {}
    for rank, hand in enumerate(owned(part, producers)):
        classes.setdefault(hand, []).append(rank)
    for members in classes.values():
        readers = [rank for rank, need in enumerate(needs) if need & holds[members[0]]]
        for position, reader in enumerate(readers):
            for unit, block in product(needs[reader] & holds[members[0]], range(6)):
                index = {
                    "first": 0,
                    "spread": position * len(members) // len(readers),
                    "stripe": (block * len(readers) + position) % len(members),
                }[replica_policy]
                yield reader, unit, block, members[index]


def assert_agreement(
    spec: kvspec.LayerSpec, consumers: int, producers: int, replica_policy: str
) -> None:
    """Hold that slices are two ranks' sets of units intersected, replicas chosen as defined."""
    slices = [
        spec.get_tp_transfer_slices(rank, consumers, producers, replica_policy=replica_policy)
        for rank in range(consumers)
    ]
    for layer, part in every_part(spec):
        target = set(chosen(part, consumers, producers, replica_policy))
        read = {
            (rank, unit, block, source)
            for rank in range(consumers)
            for block in range(6)
            for unit, _, source in read_at(of(slices[rank], layer, part), block)
        }
        assert target == read


def assert_fair(
    spec: kvspec.LayerSpec, consumers: int, producers: int, policy: kvspec.ReplicaPolicy
) -> None:
    """Hold that readers per replica differ by at most one under spread, blocks under stripe."""
    slices = [
        spec.get_tp_transfer_slices(rank, consumers, producers, replica_policy=policy)
        for rank in range(consumers)
    ]
    for layer, part in every_part(spec):
        hands = owned(part, producers)
        for units in set(hands):
            members = [rank for rank, hand in enumerate(hands) if hand == units]
            load = Counter(dict.fromkeys(members, 0))
            for block in range(7 if policy.name == "stripe" else 1):
                for each in slices:
                    load.update(
                        {s for u, _, s in read_at(of(each, layer, part), block) if u in units}
                    )
                if policy.name == "first":
                    assert {members[0]} == {rank for rank in members if load[rank]}
                else:
                    assert max(load.values()) - min(load.values()) <= 1


@MANY
@given(specs(), SIZES, SIZES, POLICY, st.integers(0, 20))
@example(GQA, 3, 7, "spread", 1)
@example(GQA, 5, 16, "stripe", 3)
def test_slices_keep_the_laws(
    spec: kvspec.LayerSpec, consumers: int, producers: int, replica_policy: str, salt: int
) -> None:
    """Laws 1, 3, 5 and 6, and by sets: all of them hold of every pair that is drawn."""
    drawn = (spec, consumers, producers)
    policy = kvspec.ReplicaPolicy(replica_policy, salt)
    assert_cover(*drawn, replica_policy=policy)
    assert_identity(*drawn, policy)
    assert_symmetry(*drawn, policy)
    assert_neighbours(spec, consumers)
    assert_agreement(*drawn, replica_policy)
    assert_fair(*drawn, policy)


@MANY
@given(specs(), SIZES, SIZES, SIZES, POLICY)
def test_two_hops_are_one_hop(
    spec: kvspec.LayerSpec, producers: int, between: int, consumers: int, replica_policy: str
) -> None:
    """Law 4: each unit that arrives over any third engine is the unit that arrives directly."""

    def hop(source: int, target: int) -> dict[tuple[str, str, int, int], tuple[int, int]]:
        return {
            (layer, part.name, rank, local): (each.remote_rank, remote)
            for rank in range(target)
            for slices in [
                spec.get_tp_transfer_slices(rank, target, source, replica_policy=replica_policy)
            ]
            for layer, part in every_part(spec)
            for each in of(slices, layer, part)
            for local, remote in zip(each.local_range, each.remote_range, strict=True)
        }

    direct, first, second = (
        hop(producers, consumers), hop(producers, between), hop(between, consumers)
    )  # fmt: skip
    for layer, part in every_part(spec):
        for rank, hand in enumerate(owned(part, consumers)):
            for local, unit in enumerate(hand):
                over = first[layer, part.name, *second[layer, part.name, rank, local]]
                for source, index in (direct[layer, part.name, rank, local], over):
                    assert unit == owned(part, producers)[source][index]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), SIZES, SIZES, POLICY)
def test_a_uniform_group_is_its_layers(
    heads: list[int], consumers: int, producers: int, replica_policy: str
) -> None:
    """Each layer of a uniform-type group is sliced as if alone; none represents another."""
    layers = {f"l{i}": attrs.evolve(GQA, total_num_kv_heads=n) for i, n in enumerate(heads)}
    group = kvspec.UniformTypeKVCacheSpecs(specs=layers)
    for rank, (layer, alone) in product(range(consumers), layers.items()):
        target = alone.get_tp_transfer_slices(
            rank, consumers, producers, replica_policy=replica_policy
        )
        slices = group.get_tp_transfer_slices(
            rank, consumers, producers, replica_policy=replica_policy
        )
        for part in alone.parts:
            got = [attrs.evolve(each, layers=()) for each in of(slices, layer, part)]
            assert list(target) == got


# Laws that do not hold, each locked with its witness.


def test_swapping_sides_with_replicas_does_not_swap_the_slices() -> None:
    """One head, 1 rank to 2: both read rank 0. Swapped, only one of the two replicas is read."""
    spec = attrs.evolve(GQA, total_num_kv_heads=1)
    there = {(0, rank) for rank in (0, 1) for _ in spec.get_tp_transfer_slices(rank, 2, 1)}
    back = {(each.remote_rank, 0) for each in spec.get_tp_transfer_slices(0, 1, 2)}
    assert {(0, 0), (0, 1)} == there
    assert {(0, 0)} == back


def test_a_third_engine_may_change_which_replica_is_read() -> None:
    """Two hops give the same units, not the same source: 2 replicas, over 1 rank, to 2 ranks."""
    spec = attrs.evolve(GQA, total_num_kv_heads=1)
    direct = [spec.get_tp_transfer_slices(rank, 2, 2)[0].remote_rank for rank in (0, 1)]
    over = [spec.get_tp_transfer_slices(0, 1, 2)[0].remote_rank] * 2
    assert [0, 1] == direct
    assert [0, 0] == over


def test_spread_is_fair_to_replicas_not_to_ranks() -> None:
    """3 heads on 4 ranks: rank 0 and 1 share one head, so they give half of what others give."""
    spec = attrs.evolve(GQA, total_num_kv_heads=3)
    read = Counter(
        each.remote_rank for rank in range(6) for each in spec.get_tp_transfer_slices(rank, 6, 4)
    )
    assert {0: 1, 1: 1, 2: 2, 3: 2} == read
