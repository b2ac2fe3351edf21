"""Tests of slices: which units a rank exchanges with which ranks, for every kind of layer.

The expected units are those that the oracle deals to each rank.
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
from kvspec.check.counting import shard_units
from kvspec.ownership.sharding import even_sharding
from kvspec.ownership.slices import TPTransferSlice
from kvspec.testing.strategies import KNOWN_POLICIES, specs

pytestmark = pytest.mark.uncovered

SIZES = st.integers(1, 16)
MANY = settings(max_examples=5 * settings.default.max_examples)
POLICY = st.sampled_from(KNOWN_POLICIES)
GQA = kvspec.FullAttentionSpec(block_size=1, total_num_kv_heads=2, head_size=1, dtype="uint8")
# Its convolutions have 8 units each: two packs of q and of k, and four packs of v.
EQUAL_UNITS = kvspec.MambaSpec.gated_delta_net(
    num_k_heads=2, head_k_dim=4, num_v_heads=4, head_v_dim=2, conv_kernel=2, dtype="uint8"
)


@lru_cache(maxsize=4096)
def owned(part: kvspec.Part, size: int) -> tuple[tuple[int, ...], ...]:
    """Return the units of *part* that each of *size* ranks holds."""
    return tuple(tuple(hand) for hand in shard_units(part.units, size, part.granularity))


def every_part(spec: kvspec.LayerSpec) -> Iterator[tuple[str, kvspec.Part]]:
    """Yield (layer, part) for every layer with parts of its own in *spec*."""
    for layer in spec.layers or ("any",):
        for part in spec.of_layer(layer).parts:
            yield layer, part


def slices_of(
    slices: Sequence[TPTransferSlice], layer: str, part: kvspec.Part
) -> list[TPTransferSlice]:
    """Return the slices that move *part* of *layer*."""
    return [s for s in slices if part.name in s.parts and (not s.layers or layer in s.layers)]


def read_at(slices: Sequence[TPTransferSlice], block: int) -> Iterator[tuple[int, int, int]]:
    """Yield (unit, local unit, remote rank) of everything that moves of virtual block *block*."""
    for tp_slice in slices:
        if tp_slice.stripe.holds(block):
            for unit, local in zip(tp_slice.global_range, tp_slice.local_range, strict=True):
                yield unit, local, tp_slice.remote_rank


def assert_cover(
    spec: kvspec.LayerSpec, consumers: int, producers: int, **replica_policy: Any
) -> None:
    """Check that each unit of a consumer rank is read once, into its own place, in each block."""
    for rank in range(consumers):
        slices = spec.get_tp_transfer_slices(rank, consumers, producers, **replica_policy)
        for layer, part in every_part(spec):
            rank_slices = slices_of(slices, layer, part)
            target = Counter(enumerate(owned(part, consumers)[rank]))
            for block in range(max((tp_slice.stripe.step for tp_slice in rank_slices), default=1)):
                read = Counter((local, unit) for unit, local, _ in read_at(rank_slices, block))
                assert target == read


@pytest.mark.parametrize("replica_policy", KNOWN_POLICIES)
def test_slices_cover_each_unit_once_for_small_sizes(replica_policy: str) -> None:
    """Law 1 holds for all head counts up to 9 and all sizes up to 8."""
    for heads, consumers, producers in product(range(1, 10), range(1, 9), range(1, 9)):
        spec = attrs.evolve(GQA, total_num_kv_heads=heads)
        assert_cover(spec, consumers, producers, replica_policy=replica_policy)


def assert_identity(
    spec: kvspec.LayerSpec, consumers: int, producers: int, policy: kvspec.ReplicaPolicy
) -> None:
    """Check that a slice is not empty and contains the same global units at both ends."""
    for rank in range(consumers):
        slices = spec.get_tp_transfer_slices(rank, consumers, producers, replica_policy=policy)
        for layer, part in every_part(spec):
            for tp_slice in slices_of(slices, layer, part):
                own_units, remote_units = (
                    owned(part, consumers)[rank],
                    owned(part, producers)[tp_slice.remote_rank],
                )
                units = list(tp_slice.global_range)
                assert units
                assert units == [own_units[i] for i in tp_slice.local_range]
                assert units == [remote_units[i] for i in tp_slice.remote_range]


def assert_neighbours(spec: kvspec.LayerSpec, size: int) -> None:
    """Check that the default sharding deals each unit to a run of neighbouring ranks."""
    for _, part in every_part(spec):
        ranges = even_sharding(part.units, size, part.granularity).ranges
        assert [list(units) for units in owned(part, size)] == [
            list(unit_range) for unit_range in ranges
        ]
        for unit in range(part.units):
            holders = [rank for rank, own in enumerate(ranges) if unit in own]
            assert list(range(holders[0], holders[0] + len(holders))) == holders


def assert_symmetry(
    spec: kvspec.LayerSpec, consumers: int, producers: int, policy: kvspec.ReplicaPolicy
) -> None:
    """Check that the slices of the consumers and of the producers are the same."""
    pulled, pushed = set(), set()
    for rank in range(consumers):
        slices = spec.get_tp_transfer_slices(
            rank, consumers, producers, role="consumer", replica_policy=policy
        )
        pulled |= {
            (tp_slice.remote_rank, rank, seen_from_consumer(tp_slice)) for tp_slice in slices
        }
    for rank in range(producers):
        slices = spec.get_tp_transfer_slices(
            rank, producers, consumers, role="producer", replica_policy=policy
        )
        pushed |= {
            (rank, tp_slice.remote_rank, seen_from_producer(tp_slice)) for tp_slice in slices
        }
    assert pulled == pushed


def seen_from_consumer(tp_slice: TPTransferSlice) -> tuple[object, ...]:
    """Return the fields of a consumer's slice, without the rank."""
    ranges = tp_slice.global_range, tp_slice.local_range, tp_slice.remote_range
    return (tp_slice.parts, tp_slice.layers, tp_slice.stripe, *ranges)


def seen_from_producer(tp_slice: TPTransferSlice) -> tuple[object, ...]:
    """Return the fields of a producer's slice in the consumer's order, without the rank."""
    ranges = tp_slice.global_range, tp_slice.remote_range, tp_slice.local_range
    return (tp_slice.parts, tp_slice.layers, tp_slice.stripe, *ranges)


def chosen(
    part: kvspec.Part, consumers: int, producers: int, replica_policy: str
) -> Iterator[tuple[int, int, int, int]]:
    """Yield (consumer, unit, block, producer) computed by definition, from sets of units."""
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
    """Check that slices are the intersections of sets of units, with replicas as defined."""
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
            for unit, _, source in read_at(slices_of(slices[rank], layer, part), block)
        }
        assert target == read


def assert_fair(
    spec: kvspec.LayerSpec, consumers: int, producers: int, policy: kvspec.ReplicaPolicy
) -> None:
    """Check that the loads of replicas differ by at most one.

    The load of a replica is its readers with `spread`, and its blocks with `stripe`.
    """
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
                        {
                            s
                            for u, _, s in read_at(slices_of(each, layer, part), block)
                            if u in units
                        }
                    )
                if policy.name == "first":
                    assert {members[0]} == {rank for rank in members if load[rank]}
                else:
                    assert max(load.values()) - min(load.values()) <= 1


@MANY
@given(specs(), SIZES, SIZES, POLICY, st.integers(0, 20))
@example(GQA, 3, 7, "spread", 1)
@example(GQA, 5, 16, "stripe", 3)
@example(EQUAL_UNITS, 3, 4, "spread", 0)
def test_slices_keep_laws_1_3_5_and_6(
    spec: kvspec.LayerSpec, consumers: int, producers: int, replica_policy: str, salt: int
) -> None:
    """They also equal the intersections of sets of units."""
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
def test_slices_over_a_third_engine_deliver_the_same_units(
    spec: kvspec.LayerSpec, producers: int, between: int, consumers: int, replica_policy: str
) -> None:
    """Law 4 holds for any third engine between the two."""

    def hop(source: int, target: int) -> dict[tuple[str, str, int, int], tuple[int, int]]:
        return {
            (layer, part.name, rank, local): (tp_slice.remote_rank, remote)
            for rank in range(target)
            for slices in [
                spec.get_tp_transfer_slices(rank, target, source, replica_policy=replica_policy)
            ]
            for layer, part in every_part(spec)
            for tp_slice in slices_of(slices, layer, part)
            for local, remote in zip(tp_slice.local_range, tp_slice.remote_range, strict=True)
        }

    direct, first, second = (
        hop(producers, consumers), hop(producers, between), hop(between, consumers)
    )  # fmt: skip
    for layer, part in every_part(spec):
        for rank, units in enumerate(owned(part, consumers)):
            for local, unit in enumerate(units):
                over = first[layer, part.name, *second[layer, part.name, rank, local]]
                for source, index in (direct[layer, part.name, rank, local], over):
                    assert unit == owned(part, producers)[source][index]


@given(st.lists(st.integers(1, 16), min_size=1, max_size=4), SIZES, SIZES, POLICY)
def test_slices_of_a_uniform_group_equal_those_of_its_layers(
    heads: list[int], consumers: int, producers: int, replica_policy: str
) -> None:
    """Each layer is sliced as if it were alone."""
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
            layer_slices = [
                attrs.evolve(tp_slice, layers=()) for tp_slice in slices_of(slices, layer, part)
            ]
            assert list(target) == layer_slices


# Properties that do not hold. Each test has a counter-example.


def test_slices_with_replicas_are_not_symmetric() -> None:
    """With 1 rank to 2, both ranks read rank 0. With 2 ranks to 1, only one replica is read."""
    spec = attrs.evolve(GQA, total_num_kv_heads=1)
    there = {(0, rank) for rank in (0, 1) for _ in spec.get_tp_transfer_slices(rank, 2, 1)}
    back = {(tp_slice.remote_rank, 0) for tp_slice in spec.get_tp_transfer_slices(0, 1, 2)}
    assert {(0, 0), (0, 1)} == there
    assert {(0, 0)} == back


def test_slices_over_a_third_engine_may_read_another_replica() -> None:
    """Two replicas send to 2 ranks over 1 rank: the units stay the same, the source changes."""
    spec = attrs.evolve(GQA, total_num_kv_heads=1)
    direct = [spec.get_tp_transfer_slices(rank, 2, 2)[0].remote_rank for rank in (0, 1)]
    over = [spec.get_tp_transfer_slices(0, 1, 2)[0].remote_rank] * 2
    assert [0, 1] == direct
    assert [0, 0] == over


def test_spread_balances_replicas_but_not_ranks() -> None:
    """Of 4 ranks, rank 0 and 1 share one of 3 heads, so each sends half as much as the others."""
    spec = attrs.evolve(GQA, total_num_kv_heads=3)
    read = Counter(
        tp_slice.remote_rank
        for rank in range(6)
        for tp_slice in spec.get_tp_transfer_slices(rank, 6, 4)
    )
    assert {0: 1, 1: 1, 2: 2, 3: 2} == read
