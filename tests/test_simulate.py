"""A simulation counts the bytes that plans move, and no others."""

from __future__ import annotations

import json
from math import gcd
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.flows import flows
from kvspec.simulate import simulate
from kvspec.slices import Replicas

POLICIES: tuple[Replicas, ...] = get_args(Replicas)
TOKENS = 200


def engine(
    tp_size: int, heads: int, *, pp_size: int = 1, dcp_size: int = 1, states: bool = False
) -> kvspec.EngineSpec:
    """Return an engine of three attention layers, and with *states* two of Mamba2."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=heads, head_size=4, dtype="bfloat16"
    )
    groups = [kvspec.KVCacheGroup(name="full", layers=("l.0", "l.1", "l.2"), spec=spec)]
    if states:
        state = kvspec.MambaSpec.mamba2(
            num_heads=8, head_dim=2, n_groups=2, state_size=4, conv_kernel=4, dtype="bfloat16"
        )
        groups.append(kvspec.KVCacheGroup(name="states", layers=("l.3", "l.4"), spec=state))
    parallel = kvspec.ParallelConfig(tp_size=tp_size, pp_size=pp_size, dcp_size=dcp_size)
    return kvspec.EngineSpec(groups=groups, parallel=parallel)


def latent(tp_size: int) -> kvspec.EngineSpec:
    """Return an engine of one MLA layer of 8 bytes a token: every rank is a replica."""
    spec = kvspec.MLAAttentionSpec(block_size=16, head_size=4, dtype="bfloat16")
    group = kvspec.KVCacheGroup(name="latent", layers=("l.0",), spec=spec)
    return kvspec.EngineSpec(groups=(group,), parallel=kvspec.ParallelConfig(tp_size=tp_size))


@st.composite
def pairs(draw: st.DrawFn) -> tuple[kvspec.EngineSpec, kvspec.EngineSpec]:
    """Draw two engines of one model, with replicas, stages and context ranks."""
    heads = draw(st.sampled_from([1, 2, 3, 4, 8]))
    states = draw(st.booleans())
    sides = []
    for _ in range(2):
        tp_size = draw(st.integers(1, 8))
        room = gcd(tp_size, max(1, tp_size // heads)) if tp_size >= heads else 1
        dcp_size = draw(st.sampled_from([n for n in (1, 2, 4) if room % n == 0]))
        if tp_size % heads:
            dcp_size = 1
        pp_size = draw(st.integers(1, 2))
        sides.append(engine(tp_size, heads, pp_size=pp_size, dcp_size=dcp_size, states=states))
    return sides[0], sides[1]


def replanned(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec], policy: Replicas, consumers: int
) -> tuple[list[int], list[int]]:
    """Return both sides' bytes by planning once for each consumer engine and adding pairs."""
    out = dict.fromkeys(engines[0].parallel.ranks, 0)
    into = dict.fromkeys(engines[1].parallel.ranks, 0)
    for salt in range(consumers):
        plan = kvspec.plan_transfer(*engines, policy, salt)
        moved = flows(plan, TOKENS)
        for source, target, nbytes in zip(moved.producer, moved.consumer, moved.moved, strict=True):
            out[plan.producer.parallel.ranks[source]] += int(nbytes)
            into[plan.consumer.parallel.ranks[target]] += int(nbytes)
    return list(out.values()), [each // consumers for each in into.values()]


@given(pairs(), st.sampled_from(POLICIES), st.integers(1, 9))
def test_many_engines_load_links_as_their_own_plans_do(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec], policy: Replicas, consumers: int
) -> None:
    """Rotating the classes of replicas is planning anew with each engine's salt."""
    found = simulate(engines, num_tokens=TOKENS, consumers=consumers).policy(policy)
    assert replanned(engines, policy, consumers) == (found.out.tolist(), found.into.tolist())


@given(pairs())
def test_every_consumer_rank_receives_what_it_owns(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
) -> None:
    """Counted part by part and token by token over the target, for every policy."""
    consumer = engines[1]
    parallel, found = consumer.parallel, simulate(engines, num_tokens=TOKENS)
    for at, rank in enumerate(parallel.ranks):
        owned = 0
        for group in consumer.groups:
            for part in group.spec.parts:
                units = parallel.deal(part.units, part.deal_in).ranges[rank.tp]
                context = parallel.context(rank)
                rows = sum(
                    (token // context.interleave) % context.size == context.rank
                    for token in range(TOKENS)
                )
                rows = rows if part.tokens_per_state else part.states
                layers = len(consumer.layers_at(group, rank.pp))
                owned += layers * len(units) * rows * part.content_bytes
        assert {owned} == {int(each.into[at]) for each in found.policies}


@given(
    st.sampled_from([1, 4]),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 8)]),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 8)]),
    st.sampled_from(POLICIES),
    st.integers(0, 900),
    st.integers(1, 900),
)
def test_rows_are_counted_one_by_one(
    grain: int,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    policy: Replicas,
    num_tokens: int,
    window: int,
) -> None:
    """A row moves if any of its live tokens is owned on both sides: counted token by token."""
    spec = kvspec.SlidingWindowMLASpec(
        block_size=32,
        head_size=4,
        dtype="bfloat16",
        tokens_per_state=grain,
        sliding_window=window,
    )
    group = kvspec.KVCacheGroup(name="window", layers=("l.0",), spec=spec)
    sides = [
        kvspec.EngineSpec(
            groups=(group,),
            parallel=kvspec.ParallelConfig(
                tp_size=tp_size, dcp_size=size, interleave_size=each * grain
            ),
        )
        for tp_size, (size, each) in ((4, ours), (3 * theirs[0], theirs))
    ]
    plan = kvspec.plan_transfer(sides[0], sides[1], policy)
    wanted: dict[tuple[kvspec.RankId, kvspec.RankId], int] = {}
    for edge in plan.edges:
        mine, other = sides[0].parallel, sides[1].parallel
        contexts = mine.context(edge.producer), other.context(edge.consumer)
        rows = {
            (each.stripe, token // grain)
            for each in edge.slices
            for token in spec.live_tokens(num_tokens)
            if token // (32 * contexts[1].size) % each.stripe[1] == each.stripe[0]
            and all(token // c.interleave % c.size == c.rank for c in contexts)
        }
        wanted[edge.producer, edge.consumer] = len(rows) * spec.parts[0].content_bytes
    found = plan.traffic(num_tokens).pairs
    assert wanted == {pair: load.nbytes for pair, load in found.items()}


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_spread_over_many_engines_is_even_to_one_request(
    members: int, readers: int, consumers: int
) -> None:
    """Salts rotate replicas: any two serve numbers of readers that differ by at most one."""
    found = simulate((latent(members), latent(readers)), num_tokens=TOKENS, consumers=consumers)
    served = found.policy("spread").out // (TOKENS * 8)
    assert readers * consumers == int(served.sum())
    assert int(served.max() - served.min()) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_stripe_is_fairest(members: int, readers: int, consumers: int) -> None:
    """No policy loads its busiest replica less than stripe, but for one block of each engine."""
    engines = latent(members), latent(readers)
    found = simulate(engines, num_tokens=TOKENS, consumers=consumers)
    block = 16 * 8
    striped = int(found.policy("stripe").out.max())
    even = -(-TOKENS * 8 * readers * consumers // members)
    assert striped <= even + block * consumers
    for policy in ("spread", "first"):
        assert striped <= int(found.policy(policy).out.max()) + block * consumers


@given(st.integers(1, 12), st.integers(1, 12))
def test_first_loads_one_replica_with_everything(members: int, readers: int) -> None:
    """Policy first reads the lowest rank alone."""
    found = simulate((latent(members), latent(readers)), num_tokens=TOKENS, consumers=3)
    assert [TOKENS * 8 * readers * 3] + [0] * (members - 1) == found.policy("first").out.tolist()


def test_time_is_the_slowest_link_s() -> None:
    """1600 bytes out at 100 B/s take 16 s, 800 in at 200 B/s take 4 s: the producer bounds."""
    found = simulate(
        (latent(1), latent(2)), num_tokens=100, out_speed=100.0, in_speed=200.0
    ).policy("spread")
    assert ([1600], [800, 800]) == (found.out.tolist(), found.into.tolist())
    assert ([16.0], [4.0, 4.0]) == (found.out_seconds.tolist(), found.into_seconds.tolist())
    assert 16.0 == found.seconds
    assert "out of producer tp0" == str(found.bottleneck)
    assert (1600, kvspec.RankId()) == (found.busiest.load, found.busiest.rank)


def test_a_slow_rank_bounds_where_it_is_slow() -> None:
    """Speeds are given rank by rank: the second consumer's link takes 800 / 10 = 80 s."""
    found = simulate(
        (latent(2), latent(2)), num_tokens=100, out_speed=[100.0, 50.0], in_speed=[100.0, 10.0]
    )
    spread, first = found.policy("spread"), found.policy("first")
    assert ([8.0, 16.0], [16.0, 0.0]) == (spread.out_seconds.tolist(), first.out_seconds.tolist())
    assert 80.0 == spread.seconds
    assert "into consumer tp1" == str(spread.bottleneck)
    assert (1.0, 2.0) == (spread.unevenness, first.unevenness)
    assert "spread" == found.best.replicas


def test_hand_worked_heads() -> None:
    """Of 2 heads on 4 ranks, two readers take one replica each, stripes both."""
    engines = engine(4, 2), engine(2, 2)
    found = simulate(engines, num_tokens=32)
    head = 3 * 2 * 4 * 2 * 32  # layers, k and v, elements, bytes each, tokens
    assert [head, 0, head, 0] == found.policy("spread").out.tolist()
    assert [head // 2] * 4 == found.policy("stripe").out.tolist()
    twice = simulate(engines, num_tokens=32, consumers=2)
    assert [head] * 4 == twice.policy("spread").out.tolist()
    assert [2 * head, 0, 2 * head, 0] == twice.policy("first").out.tolist()


def test_a_plan_stands_for_its_engines() -> None:
    """A plan's own policy and salt do not matter."""
    engines = engine(4, 2), engine(2, 2)
    plan = kvspec.plan_transfer(*engines, "first", 3)
    ours, theirs = (simulate(each, num_tokens=9).policy("spread") for each in (plan, engines))
    assert ours.out.tolist() == theirs.out.tolist()


def test_no_tokens_take_no_time() -> None:
    """An empty request moves nothing and is even."""
    found = simulate((latent(2), latent(2)), num_tokens=0).policy("stripe")
    assert (0.0, 1.0) == (found.seconds, found.unevenness)


def test_hundreds_of_ranks_need_no_plan_for_each_engine() -> None:
    """A thousand engines of 256 ranks load 128 ranks evenly, to a request of one reader."""
    found = simulate((latent(128), latent(256)), num_tokens=1000, consumers=1001)
    out = found.policy("spread").out
    assert 256 * 1001 * 8000 == int(out.sum())
    assert np.ptp(out) == 0


@pytest.mark.parametrize(
    ("given_", "told"),
    [
        ({"num_tokens": -1}, "num_tokens=-1: wanted an int >= 0"),
        ({"num_tokens": 1, "consumers": 0}, "consumers=0: wanted an int >= 1"),
        (
            {"num_tokens": 1, "out_speed": 0.0},
            "out_speed=0.0: wanted bytes a second > 0, one number or 2 of them",
        ),
        (
            {"num_tokens": 1, "in_speed": [1.0, 2.0]},
            "in_speed=[1.0, 2.0]: wanted bytes a second > 0, one number or 3 of them",
        ),
        (
            {"num_tokens": 1, "replicas": ("most",)},
            "replicas='most': wanted one of spread, first, stripe",
        ),
        ({"num_tokens": 1, "replicas": ()}, "replicas=(): wanted at least one policy"),
    ],
)
def test_impossible_input_is_refused_in_words(given_: dict[str, object], told: str) -> None:
    """The error names the field, its value and what was wanted."""
    with pytest.raises(kvspec.SpecError) as error:
        simulate((latent(2), latent(3)), **given_)  # type: ignore[arg-type]
    assert told == str(error.value)


def test_only_compared_policies_are_told() -> None:
    """A policy that was not compared is an error that lists those that were."""
    found = simulate((latent(2), latent(3)), num_tokens=1, replicas=("first",))
    with pytest.raises(kvspec.SpecError) as error:
        found.policy("stripe")
    assert "replicas='stripe': wanted one of the policies compared: first" == str(error.value)


def command(*words: str) -> tuple[int, str]:
    """Run ``kvspec simulate`` and return its exit status and what it printed."""
    typer, testing = pytest.importorskip("typer"), pytest.importorskip("typer.testing")
    from kvspec.cli.simulate import simulate_command  # noqa: PLC0415 - needs an extra

    app = typer.Typer()
    app.command()(simulate_command)
    found = testing.CliRunner().invoke(app, [*words])
    return found.exit_code, found.output


def test_the_command_tells_every_policy() -> None:
    """A table names each policy, its time and the bytes out of every rank."""
    status, told = command("--model", "DeepSeek-V3", "--producer", "tp=4", "--consumer", "tp=1")
    assert 0 == status
    for word in ("spread", "first", "stripe", "ms", "lower bound", "█···"):
        assert word in told


def test_the_command_prints_json() -> None:
    """The same numbers as `simulate` gives."""
    status, told = command("--json", "--replicas", "first", "--producer", "tp=4")
    found = json.loads(told)
    first = found["policies"]["first"]
    assert (0, ["first"]) == (status, list(found["policies"]))
    assert sum(first["out_bytes"].values()) == sum(first["in_bytes"].values())
    moved = max(*first["out_bytes"].values(), *first["in_bytes"].values())
    assert moved / 50e9 == first["seconds"]


def test_the_command_refuses_in_one_line() -> None:
    """Bad input is exit status 2."""
    assert 2 == command("--replicas", "most")[0]
    assert 2 == command("--consumers", "0")[0]
