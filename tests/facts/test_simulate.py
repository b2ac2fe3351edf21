"""Tests that a simulation counts the bytes that plans move, for each policy, rank and link."""

from __future__ import annotations

import json
from math import gcd, inf, nan
from typing import Any, get_args

import builders
import numpy as np
import pytest
from builders import engine, gqa, mamba2, mla
from hypothesis import given
from hypothesis import strategies as st
from refused import refusal

import kvspec
import kvspec.analysis.flows
from kvspec.analysis.flows import flows
from kvspec.analysis.simulation import PolicyLoad, Simulation, simulate
from kvspec.ownership.replicas import ReplicaPolicyName

POLICIES: tuple[ReplicaPolicyName, ...] = get_args(ReplicaPolicyName)
TOKENS = 200


def attention(tp: int, heads: int, *, states: bool = False, **sizes: int) -> kvspec.EngineSpec:
    """Return an engine of three attention layers. With *states* it also has two Mamba2 layers."""
    groups = [builders.group(gqa(heads), "l.0", "l.1", "l.2", name="full")]
    if states:
        groups.append(builders.group(mamba2(n_groups=2, state_size=4), "l.3", "l.4", name="states"))
    return engine(*groups, tp=tp, **sizes)


def latent(tp: int) -> kvspec.EngineSpec:
    """Return an engine of one MLA layer with 8 bytes for each token. Every rank is a replica."""
    return engine(mla(head_size=4), tp=tp)


def load_of(simulation: Simulation, policy: ReplicaPolicyName) -> PolicyLoad:
    """Return the loads under one policy."""
    (load,) = (load for load in simulation.policies if load.replica_policy == policy)
    return load


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
        sides.append(attention(tp_size, heads, pp_size=pp_size, dcp_size=dcp_size, states=states))
    return sides[0], sides[1]


def replanned(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
    policy: ReplicaPolicyName,
    consumers: int,
    nodes: kvspec.Topology,
) -> tuple[list[int], list[int]]:
    """Return the bytes of both sides. Plan for each consumer engine and add all pairs."""
    out = dict.fromkeys(engines[0].parallel.ranks, 0)
    into = dict.fromkeys(engines[1].parallel.ranks, 0)
    for salt in range(consumers):
        plan = kvspec.plan_transfer(*engines, kvspec.ReplicaPolicy(policy, salt, nodes))
        moved = flows(plan, TOKENS)
        for source, target, nbytes in zip(moved.producer, moved.consumer, moved.moved, strict=True):
            out[plan.producer.parallel.ranks[source]] += int(nbytes)
            into[plan.consumer.parallel.ranks[target]] += int(nbytes)
    return list(out.values()), [received // consumers for received in into.values()]


@given(pairs(), st.sampled_from(POLICIES), st.integers(1, 9), st.integers(1, 4))
def test_simulation_of_many_engines_equals_their_own_plans(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
    policy: ReplicaPolicyName,
    consumers: int,
    ranks_per_node: int,
) -> None:
    """The simulation rotates replicas instead of planning with the salt of each engine."""
    nodes = kvspec.Topology.packed(engines[0].parallel, engines[1].parallel, ranks_per_node)
    simulation = simulate(engines, num_tokens=TOKENS, consumers=consumers, topology=nodes)
    load = load_of(simulation, policy)
    replanned_bytes = replanned(engines, policy, consumers, nodes)
    assert replanned_bytes == (load.out.tolist(), load.into.tolist())


@given(pairs())
def test_each_consumer_rank_receives_the_bytes_that_it_owns(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
) -> None:
    """The test counts each part and token of the consumer. All policies have the same result."""
    consumer = engines[1]
    parallel, simulation = consumer.parallel, simulate(engines, num_tokens=TOKENS)
    for at, rank in enumerate(parallel.ranks):
        owned = 0
        for group in consumer.groups:
            for part in group.spec.parts:
                units = parallel.sharding(part.units, part.granularity).ranges[rank.tp]
                context = parallel.context(rank)
                rows = sum(
                    (token // context.interleave) % context.size == context.rank
                    for token in range(TOKENS)
                )
                rows = rows if part.tokens_per_state else part.states
                layers = len(consumer.layers_at(group, rank.pp))
                owned += layers * len(units) * rows * part.content_bytes
        assert {owned} == {int(load.into[at]) for load in simulation.policies}


@given(
    st.sampled_from([1, 4]),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 8)]),
    st.sampled_from([(1, 1), (2, 1), (2, 4), (4, 8)]),
    st.sampled_from(POLICIES),
    st.integers(0, 900),
    st.integers(1, 900),
)
def test_traffic_counts_rows_with_tokens_of_both_sides(
    grain: int,
    ours: tuple[int, int],
    theirs: tuple[int, int],
    policy: ReplicaPolicyName,
    num_tokens: int,
    window: int,
) -> None:
    """A row moves if both sides own one of its live tokens. The test counts each token."""
    spec = kvspec.SlidingWindowMLASpec(
        block_size=32,
        head_size=4,
        dtype="bfloat16",
        tokens_per_state=grain,
        sliding_window=window,
    )
    sides = [
        engine(spec, tp=tp_size, dcp_size=size, interleave_size=interleave * grain)
        for tp_size, (size, interleave) in ((4, ours), (3 * theirs[0], theirs))
    ]
    nodes = kvspec.Topology.packed(sides[0].parallel, sides[1].parallel, 2)
    plan = kvspec.plan_transfer(sides[0], sides[1], kvspec.ReplicaPolicy(policy, 0, nodes))
    moved_bytes: dict[tuple[kvspec.RankId, kvspec.RankId], int] = {}
    for edge in plan.edges:
        mine, other = sides[0].parallel, sides[1].parallel
        contexts = mine.context(edge.producer), other.context(edge.consumer)
        rows = {
            (part.stripe, token // grain)
            for part in edge.slices
            for token in spec.live_tokens(num_tokens)
            if part.stripe.holds(token // (32 * contexts[1].size))
            and all(token // c.interleave % c.size == c.rank for c in contexts)
        }
        moved_bytes[edge.producer, edge.consumer] = len(rows) * spec.parts[0].content_bytes
    pairs = kvspec.traffic(plan, num_tokens).pairs
    assert moved_bytes == {pair: load.nbytes for pair, load in pairs.items()}


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_spread_policy_differs_by_at_most_one_reader(
    members: int, readers: int, consumers: int
) -> None:
    """The salts of the engines rotate the replicas."""
    engines = latent(members), latent(readers)
    simulation = simulate(engines, num_tokens=TOKENS, consumers=consumers)
    served = load_of(simulation, "spread").out // (TOKENS * 8)
    assert readers * consumers == int(served.sum())
    assert int(served.max() - served.min()) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_stripe_policy_has_smallest_maximum_load(
    members: int, readers: int, consumers: int
) -> None:
    """Rounding to blocks may add one block for each engine to the busiest replica."""
    engines = latent(members), latent(readers)
    simulation = simulate(engines, num_tokens=TOKENS, consumers=consumers)
    block = 16 * 8
    striped = int(load_of(simulation, "stripe").out.max())
    even = -(-TOKENS * 8 * readers * consumers // members)
    assert striped <= even + block * consumers
    for policy in ("spread", "first"):
        assert striped <= int(load_of(simulation, policy).out.max()) + block * consumers


@given(st.integers(1, 12), st.integers(1, 12))
def test_first_policy_loads_only_the_first_replica(members: int, readers: int) -> None:
    """The producer rank with the lowest number sends all bytes."""
    simulation = simulate((latent(members), latent(readers)), num_tokens=TOKENS, consumers=3)
    out = load_of(simulation, "first").out.tolist()
    assert [TOKENS * 8 * readers * 3] + [0] * (members - 1) == out


def test_time_is_that_of_the_slowest_link() -> None:
    """The producer sends 1600 bytes at 100 B/s in 16 s. A consumer needs 4 s for 800 bytes."""
    speeds = {"out_speed": 100.0, "in_speed": 200.0}
    load = load_of(simulate((latent(1), latent(2)), num_tokens=100, **speeds), "spread")
    assert ([1600], [800, 800]) == (load.out.tolist(), load.into.tolist())
    assert ([16.0], [4.0, 4.0]) == (load.out_seconds.tolist(), load.into_seconds.tolist())
    assert 16.0 == load.seconds
    assert ("producer", kvspec.RankId()) == (load.bottleneck.side, load.bottleneck.rank)
    assert (1600, kvspec.RankId()) == (load.busiest.load, load.busiest.rank)


def test_slow_rank_determines_time_if_it_is_loaded() -> None:
    """Each rank has its own speed. The link of the second consumer takes 800 / 10 = 80 s."""
    simulation = simulate(
        (latent(2), latent(2)), num_tokens=100, out_speed=[100.0, 50.0], in_speed=[100.0, 10.0]
    )
    spread, first = load_of(simulation, "spread"), load_of(simulation, "first")
    assert ([8.0, 16.0], [16.0, 0.0]) == (spread.out_seconds.tolist(), first.out_seconds.tolist())
    assert 80.0 == spread.seconds
    assert ("consumer", kvspec.RankId(tp=1)) == (spread.bottleneck.side, spread.bottleneck.rank)
    assert "consumer tp1" in str(spread.bottleneck)
    assert (1.0, 2.0) == (spread.unevenness, first.unevenness)
    assert "spread" == simulation.best.replica_policy


def test_loads_of_two_heads_on_four_ranks_match_hand_computation() -> None:
    """Each of two readers reads one replica of its head, or stripes of both replicas."""
    engines = attention(4, 2), attention(2, 2)
    simulation = simulate(engines, num_tokens=32)
    # 3 layers, keys and values, 4 elements of 2 bytes, 32 tokens.
    head = 3 * 2 * 4 * 2 * 32
    assert [head, 0, head, 0] == load_of(simulation, "spread").out.tolist()
    assert [head // 2] * 4 == load_of(simulation, "stripe").out.tolist()
    twice = simulate(engines, num_tokens=32, consumers=2)
    assert [head] * 4 == load_of(twice, "spread").out.tolist()
    assert [2 * head, 0, 2 * head, 0] == load_of(twice, "first").out.tolist()


def test_simulation_ignores_policy_of_plan() -> None:
    """A plan and its two engines have the same loads."""
    engines = attention(4, 2), attention(2, 2)
    plan = kvspec.plan_transfer(*engines, kvspec.ReplicaPolicy("first", 3))
    of_plan = load_of(simulate(plan, num_tokens=9), "spread")
    of_engines = load_of(simulate(engines, num_tokens=9), "spread")
    assert of_engines.out.tolist() == of_plan.out.tolist()


def test_simulate_accepts_plan_for_common_rows() -> None:
    """The producer's state has one row and the consumer's has two, so one row of one byte moves."""
    sides = (
        engine(kvspec.MambaSpec.short_conv(conv_dim=1, conv_kernel=rows + 1, dtype="uint8"))
        for rows in (1, 2)
    )
    plan = kvspec.plan_transfer(*sides, common_states=True)
    assert [1] == load_of(simulate(plan, num_tokens=9), "spread").out.tolist()


def test_empty_request_takes_no_time() -> None:
    """Loads of 0 bytes are even."""
    load = load_of(simulate((latent(2), latent(2)), num_tokens=0), "stripe")
    assert (0.0, 1.0) == (load.seconds, load.unevenness)


def test_simulation_of_many_large_engines_is_even() -> None:
    """1001 engines of 256 ranks read from 128 ranks. One plan for each engine would be slow."""
    simulation = simulate((latent(128), latent(256)), num_tokens=1000, consumers=1001)
    out = load_of(simulation, "spread").out
    assert 256 * 1001 * 8000 == int(out.sum())
    assert np.ptp(out) == 0


@pytest.mark.parametrize(
    ("arguments", "field", "value"),
    [
        ({"num_tokens": -1}, "num_tokens", -1),
        ({"num_tokens": 1, "consumers": 0}, "consumers", 0),
        ({"num_tokens": 1, "out_speed": 0.0}, "out_speed", 0.0),
        ({"num_tokens": 1, "in_speed": [1.0, 2.0]}, "in_speed", [1.0, 2.0]),
        ({"num_tokens": 1, "replica_policies": ("most",)}, "replica_policy", "most"),
        ({"num_tokens": 1, "replica_policies": ()}, "replica_policies", ()),
        ({"num_tokens": 1, "replica_policies": 3}, "replica_policies", 3),
        ({"num_tokens": 1, "replica_policies": "first"}, "replica_policies", "first"),
        ({"num_tokens": 1, "out_speed": 1e-310}, "out_speed", 1e-310),
    ],
)
def test_simulate_rejects_invalid_arguments(
    arguments: dict[str, Any], field: str, value: object
) -> None:
    """The error contains the argument and its value."""
    error = refusal(lambda: simulate((latent(2), latent(3)), **arguments))
    assert (field, value) == (error.field, error.value)


@pytest.mark.parametrize(
    "speed",
    [
        "x",
        "5",
        None,
        True,
        nan,
        inf,
        -inf,
        -1.0,
        10**400,
        1j,
        [1.0, True],
        [1.0, "x"],
        [[1.0], 2.0],
    ],
    ids=repr,
)
def test_simulate_rejects_invalid_speed(speed: Any) -> None:
    """A speed must be a finite number above 0, in both directions."""
    for field in ("out_speed", "in_speed"):
        with pytest.raises(kvspec.SpecError) as caught:
            simulate((latent(2), latent(3)), num_tokens=1, **{field: speed})
        assert (field, speed) == (caught.value.field, caught.value.value)


def test_simulate_accepts_any_real_number_as_speed() -> None:
    """An int and a number of numpy are speeds too."""
    for speed in (8, np.float32(8), np.int64(8), [8, 8], np.full(2, 8)):
        simulation = simulate((latent(2), latent(2)), num_tokens=3, out_speed=speed)
        assert [3.0, 3.0] == load_of(simulation, "spread").out_seconds.tolist()


@pytest.mark.parametrize(
    ("engines", "field", "value"),
    [
        (None, "plan_or_engines", None),
        ((), "plan_or_engines", ()),
        ((1, 2), "producer", 1),
        ((latent(1), "two"), "consumer", "two"),
        ({1, 2}, "plan_or_engines", {1, 2}),
    ],
)
def test_simulate_rejects_anything_but_a_plan_or_two_engines(
    engines: Any, field: str, value: object
) -> None:
    """The error contains the side if only one of two engines is invalid."""
    error = refusal(lambda: simulate(engines, num_tokens=1))
    assert (field, value) == (error.field, error.value)


def test_simulate_rejects_three_engines() -> None:
    """The error contains the whole argument: no single engine is invalid."""
    three: Any = (latent(1),) * 3
    error = refusal(lambda: simulate(three, num_tokens=1))
    assert ("plan_or_engines", three) == (error.field, error.value)


MOST = 2**63 - 1


def test_simulate_rejects_loads_beyond_63_bits() -> None:
    """3 readers of 8 bytes for each token receive 24 bytes. The sum must fit into 63 bits."""
    engines = latent(2), latent(3)
    plan = kvspec.plan_transfer(*engines)
    calls: tuple[Any, ...] = (
        lambda: kvspec.traffic(plan, 10**18),
        lambda: flows(plan, 10**18),
        lambda: simulate(plan, num_tokens=10**18),
    )
    for call in calls:
        error = refusal(call)
        assert ("num_tokens", 10**18) == (error.field, error.value)
        assert str(24 * 10**18) in str(error)
    error = refusal(lambda: simulate(engines, num_tokens=1, consumers=10**18))
    assert ("consumers", 10**18) == (error.field, error.value)
    assert str(MOST // 24) in str(error)


@pytest.mark.parametrize(
    ("num_tokens", "consumers"), [(MOST // 24, 1), (1, MOST // 24), (10**9, MOST // 24 // 10**9)]
)
def test_largest_possible_loads_are_exact(num_tokens: int, consumers: int) -> None:
    """No load overflows at the limit of 63 bits."""
    simulation = simulate((latent(2), latent(3)), num_tokens=num_tokens, consumers=consumers)
    for load in simulation.policies:
        assert 24 * num_tokens * consumers == sum(load.out.tolist())
        assert [8 * num_tokens] * 3 == load.into.tolist()
        assert min(load.out.tolist()) >= 0


def contexts(dcp_size: int, block_size: int, tp: int) -> kvspec.EngineSpec:
    """Return an engine of one MLA layer with 8 bytes for each token. Its tokens are sharded."""
    return engine(mla(block_size=block_size, head_size=4), tp=tp, dcp_size=dcp_size)


def test_flows_do_not_depend_on_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 7 tokens have the same result as one step of all tokens."""
    plan = kvspec.plan_transfer(contexts(2, 48, 4), contexts(3, 16, 3), "stripe")
    at_once = flows(plan, 1000).moved.tolist()
    monkeypatch.setattr(kvspec.analysis.flows, "BLOCKS_AT_ONCE", 7)
    assert at_once == flows(plan, 1000).moved.tolist()


def test_flows_rejects_too_long_period() -> None:
    """127 replicas alternate by blocks of 4 Mi tokens, so a period has 508 Mi tokens."""
    plan = kvspec.plan_transfer(contexts(2, 2**22, 254), contexts(1, 2**22, 1), "stripe")
    error = refusal(lambda: flows(plan, 10**9))
    assert ("num_tokens", 10**9) == (error.field, error.value)
    assert str(2**28) in str(error)
    assert str(127 * 2**22) in str(error)


@pytest.mark.parametrize("value", [None, "9", 1.0, True, -1])
def test_flows_rejects_invalid_plan_or_token_count(value: Any) -> None:
    """The number must be an int, so 1.0 and True are invalid."""
    plan = kvspec.plan_transfer(latent(1), latent(1))
    for call, field in (
        (lambda: flows(plan, value), "num_tokens"),
        (lambda: flows(value, 1), "plan"),
    ):
        error = refusal(call)
        assert field == error.field
        assert value is error.value


def command(*words: str) -> tuple[int, str]:
    """Run `kvspec plan`. Return its exit status and its output."""
    testing = pytest.importorskip("typer.testing")
    from kvspec.cli.app import app  # noqa: PLC0415 - needs an extra

    result = testing.CliRunner().invoke(app, ["plan", *words])
    return result.exit_code, result.output


def test_command_prints_table_of_policies() -> None:
    """The table has the time and the load of each rank. The output also contains the speeds."""
    engines = ("--producer", "tp=4", "--consumer", "tp=1")
    status, output = command("--model", "DeepSeek-V3", *engines, "--in-speed", "12.5")
    assert 0 == status
    # Policy "first" loads one of four ranks, so its bar is one full cell and three empty cells.
    for word in ("spread", "first", "stripe", "ms", "50 GB/s", "12.5 GB/s", "█···"):
        assert word in output


def test_command_prints_json() -> None:
    """The time follows from the largest load and the default speed of 50 GB/s."""
    engines = ("--model", "DeepSeek-V3", "--producer", "tp=4", "--consumer", "tp=1")
    status, output = command("--json", "--replica-policy", "first", *engines)
    plan = json.loads(output)
    policies = plan["policies"]
    first = policies["first"]
    assert (0, ["spread", "first", "stripe"]) == (status, list(policies))
    assert sum(edge["bytes"] for edge in plan["edges"]) == first["out_bytes"]["tp0"]
    assert sum(first["out_bytes"].values()) == sum(first["in_bytes"].values())
    moved = max(*first["out_bytes"].values(), *first["in_bytes"].values())
    assert moved / 50e9 == first["seconds"]


def test_command_exits_with_2_if_input_is_invalid() -> None:
    """Status 2 is the status of a usage error."""
    assert 2 == command("--replica-policy", "most")[0]
    assert 2 == command("--consumers", "0")[0]


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("option", ["--consumers", "--tokens"])
def test_command_rejects_loads_beyond_63_bits(option: str, more: tuple[str, ...]) -> None:
    """No number that overflowed is printed, in a table or in JSON."""
    field, value = {"--consumers": ("consumers", 10**15), "--tokens": ("num_tokens", 10**18)}[
        option
    ]
    status, output = command(option, str(value), *more)
    assert 2 == status
    assert output.startswith(f"kvspec: {field}={value}: ")
    assert 1 == output.count("\n")


@pytest.mark.parametrize("option", ["--out-speed", "--in-speed"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300"])
def test_command_rejects_invalid_speed(option: str, value: str) -> None:
    """The error contains the value of the option, which is in GB/s."""
    status, output = command(option, value)
    field = option.strip("-").replace("-", "_")
    assert 2 == status
    assert output.startswith(f"kvspec: {field}={float(value)}: ")
    assert 1 == output.count("\n")
