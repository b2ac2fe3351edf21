"""A simulation counts the bytes that plans move, and no others."""

from __future__ import annotations

import json
from functools import partial
from math import gcd, inf, nan
from typing import Any, get_args

import builders
import numpy as np
import pytest
from builders import engine, gqa, mamba2, mla
from hypothesis import given
from hypothesis import strategies as st

import kvspec
import kvspec.analysis.flows
from kvspec.analysis.flows import flows
from kvspec.analysis.simulation import PolicyLoad, Simulation, simulate
from kvspec.ownership.replicas import ReplicaPolicyName

POLICIES: tuple[ReplicaPolicyName, ...] = get_args(ReplicaPolicyName)
TOKENS = 200


def attention(tp: int, heads: int, *, states: bool = False, **sizes: int) -> kvspec.EngineSpec:
    """Return an engine of three attention layers, and with *states* two of Mamba2."""
    groups = [builders.group(gqa(heads), "l.0", "l.1", "l.2", name="full")]
    if states:
        groups.append(builders.group(mamba2(n_groups=2, state_size=4), "l.3", "l.4", name="states"))
    return engine(*groups, tp=tp, **sizes)


def latent(tp: int) -> kvspec.EngineSpec:
    """Return an engine of one MLA layer of 8 bytes a token: every rank is a replica."""
    return engine(mla(head_size=4), tp=tp)


def load_of(simulation: Simulation, policy: ReplicaPolicyName) -> PolicyLoad:
    """Return the loads under one policy."""
    (found,) = (load for load in simulation.policies if load.replica_policy == policy)
    return found


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
    """Return both sides' bytes by planning once for each consumer engine and adding pairs."""
    out = dict.fromkeys(engines[0].parallel.ranks, 0)
    into = dict.fromkeys(engines[1].parallel.ranks, 0)
    for salt in range(consumers):
        plan = kvspec.plan_transfer(*engines, kvspec.ReplicaPolicy(policy, salt, nodes))
        moved = flows(plan, TOKENS)
        for source, target, nbytes in zip(moved.producer, moved.consumer, moved.moved, strict=True):
            out[plan.producer.parallel.ranks[source]] += int(nbytes)
            into[plan.consumer.parallel.ranks[target]] += int(nbytes)
    return list(out.values()), [each // consumers for each in into.values()]


@given(pairs(), st.sampled_from(POLICIES), st.integers(1, 9), st.integers(1, 4))
def test_many_engines_load_links_as_their_own_plans_do(
    engines: tuple[kvspec.EngineSpec, kvspec.EngineSpec],
    policy: ReplicaPolicyName,
    consumers: int,
    ranks_per_node: int,
) -> None:
    """Rotating the classes of replicas is planning anew with each engine's salt."""
    nodes = kvspec.Topology.packed(engines[0].parallel, engines[1].parallel, ranks_per_node)
    found = simulate(engines, num_tokens=TOKENS, consumers=consumers, topology=nodes)
    loads = load_of(found, policy)
    wanted = replanned(engines, policy, consumers, nodes)
    assert wanted == (loads.out.tolist(), loads.into.tolist())


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
                units = parallel.sharding(part.units, part.granularity).ranges[rank.tp]
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
    policy: ReplicaPolicyName,
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
    sides = [
        engine(spec, tp=tp_size, dcp_size=size, interleave_size=each * grain)
        for tp_size, (size, each) in ((4, ours), (3 * theirs[0], theirs))
    ]
    nodes = kvspec.Topology.packed(sides[0].parallel, sides[1].parallel, 2)
    plan = kvspec.plan_transfer(sides[0], sides[1], kvspec.ReplicaPolicy(policy, 0, nodes))
    wanted: dict[tuple[kvspec.RankId, kvspec.RankId], int] = {}
    for edge in plan.edges:
        mine, other = sides[0].parallel, sides[1].parallel
        contexts = mine.context(edge.producer), other.context(edge.consumer)
        rows = {
            (each.stripe, token // grain)
            for each in edge.slices
            for token in spec.live_tokens(num_tokens)
            if each.stripe.holds(token // (32 * contexts[1].size))
            and all(token // c.interleave % c.size == c.rank for c in contexts)
        }
        wanted[edge.producer, edge.consumer] = len(rows) * spec.parts[0].content_bytes
    found = kvspec.traffic(plan, num_tokens).pairs
    assert wanted == {pair: load.nbytes for pair, load in found.items()}


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 30))
def test_spread_over_many_engines_is_even_to_one_request(
    members: int, readers: int, consumers: int
) -> None:
    """Salts rotate replicas: any two serve numbers of readers that differ by at most one."""
    found = simulate((latent(members), latent(readers)), num_tokens=TOKENS, consumers=consumers)
    served = load_of(found, "spread").out // (TOKENS * 8)
    assert readers * consumers == int(served.sum())
    assert int(served.max() - served.min()) <= 1


@given(st.integers(1, 12), st.integers(1, 12), st.integers(1, 4))
def test_stripe_is_fairest(members: int, readers: int, consumers: int) -> None:
    """No policy loads its busiest replica less than stripe, but for one block of each engine."""
    engines = latent(members), latent(readers)
    found = simulate(engines, num_tokens=TOKENS, consumers=consumers)
    block = 16 * 8
    striped = int(load_of(found, "stripe").out.max())
    even = -(-TOKENS * 8 * readers * consumers // members)
    assert striped <= even + block * consumers
    for policy in ("spread", "first"):
        assert striped <= int(load_of(found, policy).out.max()) + block * consumers


@given(st.integers(1, 12), st.integers(1, 12))
def test_first_loads_one_replica_with_everything(members: int, readers: int) -> None:
    """Policy first reads the lowest rank alone."""
    found = simulate((latent(members), latent(readers)), num_tokens=TOKENS, consumers=3)
    assert [TOKENS * 8 * readers * 3] + [0] * (members - 1) == load_of(found, "first").out.tolist()


def test_time_is_the_slowest_link_s() -> None:
    """1600 bytes out at 100 B/s take 16 s, 800 in at 200 B/s take 4 s: the producer bounds."""
    speeds = {"out_speed": 100.0, "in_speed": 200.0}
    found = load_of(simulate((latent(1), latent(2)), num_tokens=100, **speeds), "spread")
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
    spread, first = load_of(found, "spread"), load_of(found, "first")
    assert ([8.0, 16.0], [16.0, 0.0]) == (spread.out_seconds.tolist(), first.out_seconds.tolist())
    assert 80.0 == spread.seconds
    assert "into consumer tp1" == str(spread.bottleneck)
    assert (1.0, 2.0) == (spread.unevenness, first.unevenness)
    assert "spread" == found.best.replica_policy


def test_hand_worked_heads() -> None:
    """Of 2 heads on 4 ranks, two readers take one replica each, stripes both."""
    engines = attention(4, 2), attention(2, 2)
    found = simulate(engines, num_tokens=32)
    head = 3 * 2 * 4 * 2 * 32  # layers, k and v, elements, bytes each, tokens
    assert [head, 0, head, 0] == load_of(found, "spread").out.tolist()
    assert [head // 2] * 4 == load_of(found, "stripe").out.tolist()
    twice = simulate(engines, num_tokens=32, consumers=2)
    assert [head] * 4 == load_of(twice, "spread").out.tolist()
    assert [2 * head, 0, 2 * head, 0] == load_of(twice, "first").out.tolist()


def test_a_plan_stands_for_its_engines() -> None:
    """A plan's own policy and salt do not matter."""
    engines = attention(4, 2), attention(2, 2)
    plan = kvspec.plan_transfer(*engines, "first", 3)
    ours, theirs = (load_of(simulate(each, num_tokens=9), "spread") for each in (plan, engines))
    assert ours.out.tolist() == theirs.out.tolist()


def test_no_tokens_take_no_time() -> None:
    """An empty request moves nothing and is even."""
    found = load_of(simulate((latent(2), latent(2)), num_tokens=0), "stripe")
    assert (0.0, 1.0) == (found.seconds, found.unevenness)


def test_hundreds_of_ranks_need_no_plan_for_each_engine() -> None:
    """A thousand engines of 256 ranks load 128 ranks evenly, to a request of one reader."""
    found = simulate((latent(128), latent(256)), num_tokens=1000, consumers=1001)
    out = load_of(found, "spread").out
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
def test_impossible_input_is_refused_by_name(
    arguments: dict[str, object], field: str, value: object
) -> None:
    """The error names the field and its value."""
    with pytest.raises(kvspec.SpecError) as error:
        simulate((latent(2), latent(3)), **arguments)  # type: ignore[arg-type]
    assert (field, value) == (error.value.field, error.value.value)


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
def test_a_speed_is_a_number_above_0(speed: Any) -> None:
    """What is no number, no speed or endless is refused on either side."""
    for field in ("out_speed", "in_speed"):
        with pytest.raises(kvspec.SpecError) as error:
            simulate((latent(2), latent(3)), num_tokens=1, **{field: speed})
        assert (field, speed) == (error.value.field, error.value.value)


def test_a_speed_is_any_real_number() -> None:
    """Whole numbers and those of numpy are speeds too."""
    for speed in (8, np.float32(8), np.int64(8), [8, 8], np.full(2, 8)):
        found = simulate((latent(2), latent(2)), num_tokens=3, out_speed=speed)
        assert [3.0, 3.0] == load_of(found, "spread").out_seconds.tolist()


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
def test_other_than_two_engines_are_refused(engines: Any, field: str, value: object) -> None:
    """A plan, or a producer and a consumer, and nothing else."""
    with pytest.raises(kvspec.SpecError) as error:
        simulate(engines, num_tokens=1)
    assert (field, value) == (error.value.field, error.value.value)


def test_three_engines_are_refused() -> None:
    """The error names the argument; which engine is too many cannot be known."""
    with pytest.raises(kvspec.SpecError) as error:
        simulate((latent(1),) * 3, num_tokens=1)  # type: ignore[arg-type]
    assert "plan_or_engines" == error.value.field


MOST = 2**63 - 1


def test_loads_beyond_64_bits_are_refused() -> None:
    """3 readers of 8 bytes a token: the bound is that all links' bytes fit 63 bits."""
    engines = latent(2), latent(3)
    plan = kvspec.plan_transfer(*engines)
    calls: tuple[Any, ...] = (
        partial(kvspec.traffic, plan),
        lambda n: flows(plan, n),
        lambda n: simulate(plan, num_tokens=n),
    )
    for call in calls:
        with pytest.raises(kvspec.SpecError) as error:
            call(10**18)
        assert ("num_tokens", 10**18) == (error.value.field, error.value.value)
        assert "24000000000000000000 bytes" in str(error.value)
    with pytest.raises(kvspec.SpecError) as error:
        simulate(engines, num_tokens=1, consumers=10**18)
    assert ("consumers", 10**18) == (error.value.field, error.value.value)
    assert f"at most {MOST // 24}," in str(error.value)


@pytest.mark.parametrize(
    ("num_tokens", "consumers"), [(MOST // 24, 1), (1, MOST // 24), (10**9, MOST // 24 // 10**9)]
)
def test_the_greatest_loads_are_exact(num_tokens: int, consumers: int) -> None:
    """As many tokens and engines as fit are counted to the byte."""
    found = simulate((latent(2), latent(3)), num_tokens=num_tokens, consumers=consumers)
    for each in found.policies:
        assert 24 * num_tokens * consumers == sum(each.out.tolist())
        assert [8 * num_tokens] * 3 == each.into.tolist()
        assert min(each.out.tolist()) >= 0


def contexts(dcp_size: int, block_size: int, tp: int) -> kvspec.EngineSpec:
    """Return an engine of one MLA layer of 8 bytes a token, whose tokens are sharded."""
    return engine(mla(block_size=block_size, head_size=4), tp=tp, dcp_size=dcp_size)


def test_long_periods_are_counted_in_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting a few tokens at a time is counting them at once."""
    plan = kvspec.plan_transfer(contexts(2, 48, 4), contexts(3, 16, 3), "stripe")
    at_once = flows(plan, 1000).moved.tolist()
    monkeypatch.setattr(kvspec.analysis.flows, "STEP", 7)
    assert at_once == flows(plan, 1000).moved.tolist()


def test_a_period_that_is_too_long_is_refused() -> None:
    """127 replicas take turns over blocks of 4 Mi tokens: one round is 508 Mi tokens."""
    plan = kvspec.plan_transfer(contexts(2, 2**22, 254), contexts(1, 2**22, 1), "stripe")
    with pytest.raises(kvspec.SpecError) as error:
        flows(plan, 10**9)
    assert ("num_tokens", 10**9) == (error.value.field, error.value.value)
    assert "at most 268435456" in str(error.value)
    assert "after 532676608" in str(error.value)


@pytest.mark.parametrize("value", [None, "9", 1.0, True, -1])
def test_flows_are_those_of_a_plan_and_a_count(value: Any) -> None:
    """Neither is taken for another."""
    with pytest.raises(kvspec.SpecError) as error:
        flows(kvspec.plan_transfer(latent(1), latent(1)), value)
    assert f"num_tokens={value!r}: expected an int >= 0" == str(error.value)
    with pytest.raises(kvspec.SpecError) as error:
        flows(value, 1)
    assert f"plan={value!r}: expected a TransferPlan" == str(error.value)


def command(*words: str) -> tuple[int, str]:
    """Run ``kvspec simulate`` and return its exit status and what it printed."""
    typer, testing = pytest.importorskip("typer"), pytest.importorskip("typer.testing")
    from kvspec.cli.simulate import simulate_command  # noqa: PLC0415 - needs an extra

    app = typer.Typer()
    app.command()(simulate_command)
    found = testing.CliRunner().invoke(app, [*words])
    return found.exit_code, found.output


def test_the_command_tells_every_policy() -> None:
    """A table names each policy, its time and bytes out of every rank; and how fast links are."""
    engines = ("--producer", "tp=4", "--consumer", "tp=1")
    status, told = command("--model", "DeepSeek-V3", *engines, "--in-speed", "12.5")
    assert 0 == status
    speeds = "50 GB/s out of and 12.5 GB/s into each rank"
    for word in ("spread", "first", "stripe", "ms", speeds, "█···"):
        assert word in told


def test_the_command_prints_json() -> None:
    """The same numbers as `simulate` gives."""
    status, told = command("--json", "--replica-policy", "first", "--producer", "tp=4")
    found = json.loads(told)
    first = found["policies"]["first"]
    assert (0, ["first"]) == (status, list(found["policies"]))
    assert sum(first["out_bytes"].values()) == sum(first["in_bytes"].values())
    moved = max(*first["out_bytes"].values(), *first["in_bytes"].values())
    assert moved / 50e9 == first["seconds"]


def test_the_command_refuses_in_one_line() -> None:
    """Bad input is exit status 2."""
    assert 2 == command("--replica-policy", "most")[0]
    assert 2 == command("--consumers", "0")[0]


@pytest.mark.parametrize("more", [(), ("--json",)])
@pytest.mark.parametrize("option", ["--consumers", "--tokens"])
def test_the_command_refuses_what_64_bits_do_not_hold(option: str, more: tuple[str, ...]) -> None:
    """No wrapped number is printed, in a table or in JSON."""
    status, told = command(option, "1000000000000000", *more)
    if option == "--tokens":
        status, told = command(option, "1000000000000000000", *more)
    field = {"--consumers": "consumers", "--tokens": "num_tokens"}[option]
    assert 2 == status
    assert told.startswith(f"kvspec: {field}=1000000000000000")
    assert 1 == told.count("\n")


@pytest.mark.parametrize("option", ["--out-speed", "--in-speed"])
@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "1e300"])
def test_the_command_names_a_speed_as_it_was_given(option: str, value: str) -> None:
    """In GB/s, one for all ranks."""
    status, told = command(option, value)
    field = option.strip("-").replace("-", "_")
    shown = float(value)
    assert 2 == status
    assert told.startswith(f"kvspec: {field}={shown}: expected ")
    assert 1 == told.count("\n")
