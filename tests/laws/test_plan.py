"""The laws of plans: every pair of ranks of two engines, who reads whom and who tells whom.

Stated over what should be there: every consumer rank's layers, units and token positions, every
producer rank's release. Who owns what is asked of the oracle, position by position.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache
from itertools import product
from math import lcm
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.testing import strategies
from kvspec.testing.carve import rank_layers, rank_units
from kvspec.testing.positions import context_of, excluded_layers, live_positions

PAIRS = strategies.engine_pairs(largest=8)
POLICY = st.sampled_from(strategies.POLICIES)
SALT = st.integers(0, 5)
MANY = settings(max_examples=2 * settings.default.max_examples)
FAR = 240
"""Positions that the laws look at, at most: where ownership repeats earlier, two periods of it."""
Engines = tuple[kvspec.EngineSpec, kvspec.EngineSpec]
Target = tuple[kvspec.RankId, str, str, kvspec.Part]
Mask = npt.NDArray[np.bool_]


def targets(engine: kvspec.EngineSpec, other: kvspec.EngineSpec) -> Iterator[Target]:
    """Yield (rank, group, layer, part) of all that *engine* holds and neither side excludes."""
    still = excluded_layers(engine) | excluded_layers(other)
    for rank in engine.parallel.ranks:
        for group in engine.groups:
            for layer in rank_layers(engine, rank, group):
                for part in group.spec.of_layer(layer).parts if layer not in still else ():
                    yield rank, group.name, layer, part


def moves(
    plan: kvspec.TransferPlan, target: Target
) -> Iterator[tuple[kvspec.RankId, kvspec.TPTransferSlice]]:
    """Yield (producer rank, slice) of all that moves into *target*."""
    rank, group, layer, part = target
    for edge in plan.edges:
        if edge.consumer == rank and edge.group == group and layer in edge.layers:
            for each in edge.slices:
                if part.name in each.parts and layer in each.layers:
                    yield edge.producer, each


def owns(engine: kvspec.EngineSpec, rank: kvspec.RankId, part: kvspec.Part, far: int) -> Mask:
    """Return which of the first *far* token positions a rank owns, asked one after the other.

    A state is held whole by every context rank: it stands at any position.
    """
    mine, size = context_of(engine, rank)
    return _dealt(mine, size if part.tokens_per_state else 1, engine.parallel.interleave_size, far)


@lru_cache(maxsize=4096)
def _dealt(mine: int, size: int, interleave: int, far: int) -> Mask:
    found, turn, left = [], 0, interleave
    for _ in range(far):
        found.append(size == 1 or turn == mine)
        left -= 1
        if not left:
            turn, left = (turn + 1) % size, interleave
    return np.array(found)


def horizon(plan: kvspec.TransferPlan, steps: int, virtual: int) -> int:
    """Return how many positions show all that two engines and *steps* stripes do."""
    period = lcm(*(
        context_of(each, kvspec.RankId())[1] * each.parallel.interleave_size
        for each in (plan.producer, plan.consumer)
    ), virtual * steps)  # fmt: skip
    return min(2 * period, FAR)


def arrivals(
    plan: kvspec.TransferPlan, target: Target, far: int, virtual: int
) -> npt.NDArray[np.int64]:
    """Count how often each (place, position) of *target* is sent by a rank that owns it.

    The unit is the one that the producer rank holds where the slice says, dealt by the oracle.
    """
    rank, _, layer, part = target
    own = rank_units(plan.consumer, rank, part)
    found = np.zeros((len(own), far), np.int64)
    block = np.arange(far) // virtual
    for producer, each in moves(plan, target):
        held = rank_units(plan.producer, producer, part)
        home = next(group for group in plan.producer.groups if layer in group.layers)
        assert layer in rank_layers(plan.producer, producer, home)
        sent = owns(plan.producer, producer, part, far) & owns(plan.consumer, rank, part, far)
        sent = sent & (each.stripe.holds(block))
        for place, source in zip(each.local_range, each.remote_range, strict=True):
            assert own[place] == held[source]
            found[place] += sent
    return found


DEALT_APART = (
    (1, {"tp_size": 4, "dcp_size": 2, "interleave_size": 2}, {"pcp_size": 3, "interleave_size": 1}),
    (2, {"tp_size": 4, "dcp_size": 2}, {"tp_size": 2, "pcp_size": 2, "interleave_size": 2}),
)


@MANY
@given(PAIRS, POLICY, SALT)
def test_exact_cover(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 1: every rank, layer of its stage, part, unit and position it owns arrives once.

    It is sent by a rank that owns that layer, unit and position.
    """
    check_cover(kvspec.plan_transfer(*engines, replicas=replicas, salt=salt))


@pytest.mark.parametrize(("heads", "ours", "theirs"), DEALT_APART)
@pytest.mark.parametrize("replicas", strategies.POLICIES)
def test_exact_cover_of_tokens_dealt_apart(
    heads: int, ours: Any, theirs: Any, replicas: Any
) -> None:
    """Law 1, where both sides deal tokens, to other sizes and by other interleaves."""
    engines = gqa(heads, **ours), gqa(heads, **theirs)
    check_cover(kvspec.plan_transfer(*engines, replicas=replicas))


def check_cover(plan: kvspec.TransferPlan) -> None:
    """Check that every byte of the target is sent once."""
    size = context_of(plan.consumer, kvspec.RankId())[1]
    for target in targets(plan.consumer, plan.producer):
        rank, group, _, part = target
        virtual = plan.consumer.group(group).spec.block_size * size
        steps = max((each.stripe.step for _, each in moves(plan, target)), default=1)
        far = horizon(plan, steps, virtual)
        units = len(rank_units(plan.consumer, rank, part))
        wanted = np.tile(owns(plan.consumer, rank, part, far), (units, 1))
        assert np.array_equal(wanted, arrivals(plan, target, far, virtual))


@given(PAIRS, POLICY, SALT)
def test_edges_are_one_per_pair_of_ranks_and_groups(
    engines: Engines, replicas: Any, salt: int
) -> None:
    """An edge moves something, stands once, and its slices name its own producer."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    names = Counter((e.producer, e.consumer, e.producer_group, e.group) for e in plan.edges)
    assert {1} == set(names.values())
    for edge in plan.edges:
        assert edge.slices
        assert {edge.producer.tp} == {each.remote_rank for each in edge.slices}
        assert set(edge.layers) <= set(engines[0].group(edge.producer_group).layers)
        assert set(edge.layers) <= set(engines[1].group(edge.group).layers)


@given(PAIRS, POLICY, SALT)
def test_counts(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 7: notifiers and notifies are the same edges; every producer rank is told by someone."""
    producer, consumer = engines
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    told = {(p, c) for p in producer.parallel.ranks for c in plan.notifiers(p)}
    tell = {(p, c) for c in consumer.parallel.ranks for p in plan.notifies(c)}
    assert told == tell
    assert set(producer.parallel.ranks) == {p for p, _ in told}
    assert {(edge.producer, edge.consumer) for edge in plan.edges} <= told
    assert len(producer.parallel.ranks) == plan.finished_sending_count
    assert len(consumer.parallel.ranks) == plan.finished_recving_count


@given(PAIRS, POLICY, SALT)
def test_sources_and_targets_are_the_edges(engines: Engines, replicas: Any, salt: int) -> None:
    """Pull and push ask the same plan: who reads whom is one set of pairs."""
    producer, consumer = engines
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    edges = {(edge.producer, edge.consumer) for edge in plan.edges}
    assert edges == {(p, c) for c in consumer.parallel.ranks for p in plan.sources(c)}
    assert edges == {(p, c) for p in producer.parallel.ranks for c in plan.targets(p)}


@attrs.frozen
class Replicas:
    """A replica class: what its *members* hold alike, and its *readers*, all who need of it."""

    layers: tuple[str, ...]
    part: kvspec.Part
    units: frozenset[int]
    positions: Mask = attrs.field(eq=False)
    members: tuple[kvspec.RankId, ...]
    readers: tuple[kvspec.RankId, ...]


def classes(plan: kvspec.TransferPlan, far: int = FAR) -> Iterator[Replicas]:
    """Yield every replica class, from sets of layers, units and positions."""
    engines = plan.producer, plan.consumer
    still = excluded_layers(engines[0]) | excluded_layers(engines[1])
    kinds: dict[Any, list[str]] = {}
    for ours, theirs, stage in product(
        plan.producer.groups, plan.consumer.groups, range(plan.producer.parallel.pp_size)
    ):
        for layer in rank_layers(plan.producer, kvspec.RankId(pp=stage), ours):
            if layer in theirs.layers and layer not in still:
                parts = theirs.spec.of_layer(layer).parts
                kinds.setdefault((theirs.name, ours.name, stage, parts), []).append(layer)
    for (_, _, stage, parts), layers in kinds.items():
        for part in parts:
            holds, needs = (
                {
                    rank: (frozenset(rank_units(engine, rank, part)), owns(engine, rank, part, far))
                    for rank in engine.parallel.ranks
                    if any(set(layers) & set(rank_layers(engine, rank, g)) for g in engine.groups)
                }
                for engine in engines
            )
            alike: dict[Any, list[kvspec.RankId]] = {}
            for rank, (units, positions) in holds.items():
                if rank.pp == stage and units:
                    alike.setdefault((units, positions.tobytes()), []).append(rank)
            for (units, _), members in alike.items():
                positions = holds[members[0]][1]
                readers = [r for r, (u, p) in needs.items() if u & units and (p & positions).any()]
                yield Replicas(
                    tuple(layers), part, units, positions, tuple(members), tuple(readers)
                )


@MANY
@given(PAIRS, POLICY, SALT)
def test_an_unread_rank_has_its_releaser(engines: Engines, replicas: Any, salt: int) -> None:
    """The rank at place j of c is released by g[j len(g) // len(c)]; one that holds nothing by all.

    A rank of several classes (its parts are dealt differently) is told by the releaser of one.
    """
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    found = list(classes(plan))
    for rank in engines[0].parallel.ranks:
        if plan.targets(rank):
            assert plan.targets(rank) == plan.notifiers(rank)
            continue
        elected = [
            each.readers[each.members.index(rank) * len(each.readers) // len(each.members)]
            for each in found
            if rank in each.members
        ]
        if elected:
            (releaser,) = plan.notifiers(rank)
            assert releaser in elected
        else:
            assert engines[1].parallel.ranks == plan.notifiers(rank)


@MANY
@given(PAIRS, POLICY, SALT)
def test_fair(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 6: of one replica class, readers (under stripe: virtual blocks) differ by at most one."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    for each in classes(plan):
        load = Counter(dict.fromkeys(each.members, 0))
        for reader in each.readers:
            read: set[tuple[kvspec.RankId, int]] = set()
            for layer in each.layers:
                group = next(g.name for g in plan.consumer.groups if layer in g.layers)
                for source, cut in moves(plan, (reader, group, layer, each.part)):
                    if source in each.members and each.units & set(cut.global_range):
                        blocks = range(7 if replicas == "stripe" else 1)
                        read |= {(source, b) for b in blocks if cut.stripe.holds(b)}
            load.update(source for source, _ in read)
        assert each.readers
        if replicas == "first":
            assert {each.members[0]} == {rank for rank in each.members if load[rank]}
        else:
            assert max(load.values()) - min(load.values()) <= 1


@pytest.mark.parametrize(
    ("heads", "told"),
    [(1, {1: 0, 2: 0, 3: 1, 4: 1, 5: 1}), (2, {1: 0, 2: 0, 4: 1, 5: 1})],
)
def test_releasers_by_hand(heads: int, told: dict[int, int]) -> None:
    """Six producer ranks, two consumers, only first replicas read: each half has its releaser."""
    plan = kvspec.plan_transfer(gqa(heads, 6), gqa(heads, 2), replicas="first")
    unread = [rank for rank in plan.producer.parallel.ranks if not plan.targets(rank)]
    assert told == {rank.tp: each.tp for rank in unread for each in plan.notifiers(rank)}


def gqa(heads: int, tp_size: int = 1, **deals: Any) -> kvspec.EngineSpec:
    """Return an engine of one attention layer."""
    spec = kvspec.FullAttentionSpec(
        block_size=2, total_num_kv_heads=heads, head_size=2, dtype="uint8"
    )
    group = kvspec.KVCacheGroup(name="g", layers=("l",), spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=tp_size, **deals)
    return kvspec.EngineSpec(groups=(group,), parallel=parallel)


def flat(
    plan: kvspec.TransferPlan, *, swapped: bool = False
) -> set[tuple[kvspec.RankId, kvspec.RankId, str, Any, Any, Any]]:
    """Return (producer, consumer, layer and part, ranges) of every slice, by layer and part."""
    found = set()
    for target in targets(plan.consumer, plan.producer):
        for producer, each in moves(plan, target):
            pair = (producer, target[0]), (each.remote_range, each.local_range)
            (a, b), ranges = (pair[0][::-1], pair[1][::-1]) if swapped else pair
            name = f"{target[2]}.{target[3].name}"
            found.add((a, b, name, each.global_range, *ranges))
    return found


def has_replicas(engine: kvspec.EngineSpec) -> bool:
    """Return whether any unit of any layer and position of *engine* is held by two ranks."""
    held: dict[tuple[str, str, int], Any] = {}
    for rank, _, layer, part in targets(engine, engine):
        for unit in rank_units(engine, rank, part):
            key = layer, part.name, unit
            held[key] = held.get(key, 0) + owns(engine, rank, part, FAR).astype(int)
    return any(count.max() > 1 for count in held.values())


SHARDED = ("full", "full, V of another size", "mamba1", "short conv", "uniform", "mamba2")


@MANY
@given(strategies.engine_pairs(SHARDED, largest=4), POLICY, SALT)
def test_symmetry(engines: Engines, replicas: Any, salt: int) -> None:
    """Law 3: where neither side has replicas, swapping the sides swaps the slices, no more."""
    if any(map(has_replicas, engines)):
        return
    there = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    back = kvspec.plan_transfer(*engines[::-1], replicas=replicas, salt=salt)
    assert flat(there) == flat(back, swapped=True)


def test_symmetry_does_not_hold_with_replicas() -> None:
    """Its witness: one head, 1 rank to 2 gives two edges, 2 ranks to 1 give one."""
    assert len(kvspec.plan_transfer(gqa(1, 1), gqa(1, 2)).edges) == 2
    assert len(kvspec.plan_transfer(gqa(1, 2), gqa(1, 1)).edges) == 1


@MANY
@given(PAIRS, POLICY, SALT, st.integers(1, 40))
def test_traffic_is_what_is_wanted(engines: Engines, replicas: Any, salt: int, tokens: int) -> None:
    """Bytes moved are the live rows that each consumer rank owns, whatever the producer is."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=tokens, producer_blocks={}, consumer_blocks={}
    )
    wanted = Counter[kvspec.RankId]()
    for rank, group, layer, part in targets(engines[1], engines[0]):
        spec = engines[1].group(group).spec.of_layer(layer)
        live = live_positions(spec, request) & owns(engines[1], rank, part, tokens)
        each = part.tokens_per_state
        rows = len({token // each for token in live.nonzero()[0].tolist()}) if each else part.states
        wanted[rank] += len(rank_units(engines[1], rank, part)) * rows * part.content_bytes
    got = Counter[kvspec.RankId]()
    for rank, load in plan.traffic(tokens).consumers.items():
        got[rank] += load.nbytes
    assert +wanted == +got


@given(PAIRS, POLICY, SALT)
def test_explain_names_every_pair(engines: Engines, replicas: Any, salt: int) -> None:
    """The explanation mentions every rank that reads, is read or is told."""
    plan = kvspec.plan_transfer(*engines, replicas=replicas, salt=salt)
    words = plan.explain()
    for edge in plan.edges:
        assert str(edge.producer) in words
        assert str(edge.consumer) in words


def test_explicit_deals_by_hand() -> None:
    """5 heads, vLLM-like 2+2+1 to an engine that gives the odd head to its first rank: 3+2."""
    producer = gqa(5, 3, unit_deals={5: (range(2), range(2, 4), range(4, 5))})
    consumer = gqa(5, 2, unit_deals={5: (range(3), range(3, 5))})
    plan = kvspec.plan_transfer(producer, consumer)
    got = [
        (edge.producer.tp, edge.consumer.tp, each.global_range, each.local_range, each.remote_range)
        for edge in plan.edges
        for each in edge.slices
    ]
    assert sorted(got, key=str) == [
        (0, 0, range(2), range(2), range(2)),
        (1, 0, range(2, 3), range(2, 3), range(1)),
        (1, 1, range(3, 4), range(1), range(1, 2)),
        (2, 1, range(4, 5), range(1, 2), range(1)),
    ]
