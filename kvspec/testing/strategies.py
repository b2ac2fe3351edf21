"""Draw what the laws are about: specs of every kind, engine pairs that differ, requests, shardings.

The one place where cases are drawn. Everything is small (a few KiB a rank), everything is legal,
and a new kind of layer is one line of `KINDS`. Tests prove that the hard cases are reached.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.ownership.replicas import POLICIES as EVERY_POLICY
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName, Topology, known_policies
from kvspec.testing.case import Case
from kvspec.testing.engines import engines, groups, sharing_engines
from kvspec.testing.kinds import KINDS, specs
from kvspec.testing.pairs import engine_pairs, interleaved_pairs, spanning_pairs, with_own_rows
from kvspec.testing.requests import of_one_pool, requests, tables

__all__ = [
    "KINDS",
    "cases",
    "engine_pairs",
    "engines",
    "requests",
    "specs",
]

POLICIES: tuple[ReplicaPolicyName, ...] = known_policies(None)
"""The policies that need no nodes."""
STATES = ("mamba1", "mamba2", "gated delta net", "short conv")
"""Kinds whose state has rows for speculative tokens."""


@st.composite
def _case(
    draw: st.DrawFn, pair: tuple[EngineSpec, EngineSpec], *, common_states: bool = False
) -> Case:
    """Draw a transfer between a *pair* of engines."""
    producer, consumer = pair
    request, producer_pool, consumer_pool = draw(requests(producer, consumer))
    return Case(
        producer=producer,
        consumer=consumer,
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        request=request,
        **draw(_replica_policies(producer, consumer)),
        common_states=common_states,
    )


@st.composite
def twins(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 6
) -> tuple[Case, Case]:
    """Draw a case, and the same request between other engines of the same groups."""
    case = draw(cases(kinds, largest))
    sides = [draw(engines(each.groups, 4)) for each in (case.producer, case.consumer)]
    (sources, producer_pool), (targets, consumer_pool) = (
        draw(tables(each, case.request, sides[1])) for each in sides
    )
    other = attrs.evolve(
        case,
        producer=sides[0],
        consumer=sides[1],
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        request=attrs.evolve(case.request, producer_blocks=sources, consumer_blocks=targets),
        **draw(_replica_policies(*sides)),
    )
    return case, other


@st.composite
def _replica_policies(
    draw: st.DrawFn, producer: EngineSpec, consumer: EngineSpec
) -> dict[str, Any]:
    """Draw a replica policy, which sometimes knows the nodes of the ranks."""
    salt, near = draw(st.integers(0, 5)), draw(st.sampled_from((False, False, False, True)))
    if not near:
        return {"replica_policy": ReplicaPolicy(draw(st.sampled_from(POLICIES)), salt)}
    nodes = [
        {rank: draw(st.integers(0, 2)) for rank in side.parallel.ranks}
        for side in (producer, consumer)
    ]
    topology = Topology(producer=nodes[0], consumer=nodes[1])
    policy = draw(st.sampled_from(tuple(EVERY_POLICY)))
    return {"replica_policy": ReplicaPolicy(policy, salt, topology)}


@st.composite
def plans(draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), largest: int = 8) -> Case:
    """Draw two engines of one model and a replica policy, without a request or memory."""
    producer, consumer = draw(engine_pairs(kinds, largest))
    request = TransferRequest(
        request_id="none", num_tokens=0, producer_blocks={}, consumer_blocks={}
    )
    return Case(
        producer=producer,
        consumer=consumer,
        producer_pool={},
        consumer_pool={},
        request=request,
        **draw(_replica_policies(producer, consumer)),
    )


def cases(kinds: Sequence[str] = tuple(KINDS), largest: int = 6) -> st.SearchStrategy[Case]:
    """Draw a whole transfer between engines of about *largest* ranks."""
    return engine_pairs(kinds, largest).flatmap(_case)


def spanning_cases(largest: int = 4) -> st.SearchStrategy[Case]:
    """Draw a transfer of content that spans the heads of a rank, sharded alike on both sides."""
    return spanning_pairs(largest).flatmap(_case)


def interleaved_cases() -> st.SearchStrategy[Case]:
    """Draw a transfer of tokens sharded alike, by interleaves that tiles do not divide."""
    return interleaved_pairs().flatmap(_case)


@st.composite
def common_cases(draw: st.DrawFn, largest: int = 4) -> Case:
    """Draw a transfer of states of which either side may have more rows."""
    model = draw(groups(STATES))
    producer, consumer = (draw(engines(draw(with_own_rows(model)), largest)) for _ in range(2))
    return draw(_case((producer, consumer), common_states=True))


@st.composite
def sharing_cases(draw: st.DrawFn, largest: int = 4) -> Case:
    """Draw a transfer between engines each of whose groups lie in one memory."""
    kinds = [kind for kind in KINDS if not kind.startswith("uniform")]
    model = draw(groups(kinds).filter(lambda found: len(found) > 1))
    case = draw(
        _case((draw(sharing_engines(model, largest)), draw(sharing_engines(model, largest))))
    )
    (producer_blocks, producer_pool), (consumer_blocks, consumer_pool) = (
        draw(of_one_pool(tables, engine.null_block))
        for engine, tables in (
            (case.producer, case.request.producer_blocks),
            (case.consumer, case.request.consumer_blocks),
        )
    )
    request = attrs.evolve(
        case.request, producer_blocks=producer_blocks, consumer_blocks=consumer_blocks
    )
    return attrs.evolve(
        case,
        request=request,
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        shared=True,
    )
