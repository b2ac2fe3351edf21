"""Hypothesis strategies for all that the laws judge: specs, engine pairs, requests and cases.

Invariant: each drawn case is legal. A system may refuse a case that it does not support, but no
case is impossible to serve. `tests/laws/test_strategies_reach.py` proves that hard cases are drawn.

How it works:
    A case is drawn in steps, from the model to the memory. Each step has its own module:

        step                                            module
        a spec for each group of layers                 `kinds`
        ranks, stages, shardings and context ranks      `parallels`
        blocks, layouts, padding and page formats       `engines`
        a second engine that serves the same model      `pairs`
        prompt length, cached tokens, block tables      `requests`
        the replica policy                              here

    All sizes are small: a few KiB for each rank, so that a law can check each byte. A new kind of
    layer needs one line in `kinds.KINDS`. Then all strategies draw it.

    A test of a connector needs the strategy, the system and the laws:

    >>> from hypothesis import given, settings
    >>> from kvspec.testing import Case, laws, strategies
    >>> @settings(max_examples=3)
    ... @given(strategies.cases(kinds=["full", "MLA"], largest=2))
    ... def test_connector_keeps_laws(case: Case) -> None:
    ...     assert laws.broken(laws.KVSPEC, case) == []
    >>> test_connector_keeps_laws()
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.ownership.replicas import POLICIES as POLICY_RULES
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName, Topology, known_policies
from kvspec.testing.case import Case
from kvspec.testing.engines import engines
from kvspec.testing.kinds import KINDS, specs
from kvspec.testing.laws.release import Script
from kvspec.testing.pairs import engine_pairs, other_engines, sharing_kinds, sharing_pairs
from kvspec.testing.requests import given_back, of_one_pool, requests, tables
from kvspec.testing.supports import EVERYTHING, Supports

__all__ = [
    "KINDS",
    "cases",
    "engine_pairs",
    "engines",
    "requests",
    "specs",
]

KNOWN_POLICIES: tuple[ReplicaPolicyName, ...] = known_policies(None)
"""Names of the replica policies that need no topology."""


@st.composite
def case_of(
    draw: st.DrawFn,
    pair: tuple[EngineSpec, EngineSpec],
    *,
    common_states: bool = False,
    supports: Supports = EVERYTHING,
    others: Sequence[EngineSpec] = (),
) -> Case:
    """Draw a transfer between a *pair* of engines. The *others* can serve its request too."""
    producer, consumer = pair
    request, producer_pool, consumer_pool = draw(requests(producer, consumer, supports, others))
    return Case(
        producer=producer,
        consumer=consumer,
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        request=request,
        **draw(_replica_policies(producer, consumer, supports)),
        common_states=common_states,
    )


@st.composite
def twins(
    draw: st.DrawFn, kinds: Sequence[str] = tuple(KINDS), *, supports: Supports = EVERYTHING
) -> tuple[Case, Case]:
    """Draw two cases of one request, with different engines.

    Laws that compare two transfers need them. Both cases must deliver the same content.

    Args:
        draw: Passed by Hypothesis.
        kinds: Keys of `KINDS`. The groups are of these kinds.
        supports: What may be drawn.

    Returns:
        A case, and the same request between two other engines of the same groups.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(twins(["MLA"]))
    ... def test_lengths_are_equal(pair: tuple[Case, Case]) -> None:
    ...     assert pair[0].request.num_tokens == pair[1].request.num_tokens
    >>> test_lengths_are_equal()
    """
    sharing = sharing_kinds(kinds, supports)
    shared = bool(sharing) and draw(st.integers(0, 2)) == 1
    pairs = sharing_pairs(sharing, supports) if shared else engine_pairs(kinds, supports=supports)
    pair = draw(pairs)
    # These engines have at most 4 ranks, since a law moves the bytes of both cases.
    sides = draw(other_engines(pair, min(4, supports.max_tp), supports, shared=shared))
    case = draw(case_of(pair, supports=supports, others=sides))
    (producer_blocks, producer_pool), (consumer_blocks, consumer_pool) = (
        draw(tables(engine, case.request, sides[1], supports)) for engine in sides
    )
    other = attrs.evolve(
        case,
        producer=sides[0],
        consumer=sides[1],
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        request=attrs.evolve(
            case.request, producer_blocks=producer_blocks, consumer_blocks=consumer_blocks
        ),
        **draw(_replica_policies(*sides, supports)),
    )
    if shared:
        case, other = draw(_in_one_memory(case)), draw(_in_one_memory(other))
    return case, other


@st.composite
def _replica_policies(
    draw: st.DrawFn,
    producer: EngineSpec,
    consumer: EngineSpec,
    supports: Supports = EVERYTHING,
) -> dict[str, Any]:
    """Draw a replica policy, which sometimes knows the nodes of the ranks."""
    if supports.policies is not None:
        names = [name for name in KNOWN_POLICIES if name in supports.policies]
        return {"replica_policy": draw(st.sampled_from(names))}
    salt, with_nodes = draw(st.integers(0, 5)), draw(st.sampled_from((False, False, False, True)))
    if not with_nodes:
        return {"replica_policy": ReplicaPolicy(draw(st.sampled_from(KNOWN_POLICIES)), salt)}
    nodes = [
        {rank: draw(st.integers(0, 2)) for rank in side.parallel.ranks}
        for side in (producer, consumer)
    ]
    topology = Topology(producer=nodes[0], consumer=nodes[1])
    policy = draw(st.sampled_from(tuple(POLICY_RULES)))
    return {"replica_policy": ReplicaPolicy(policy, salt, topology)}


@st.composite
def plans(draw: st.DrawFn) -> Case:
    """Draw a case without memory: two engines of one model, and a replica policy.

    Its request has no tokens, and its pools have no groups. The laws of moves need no more. The
    engines may be larger than those of `cases`, because no byte moves.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(plans())
    ... def test_request_is_empty(case: Case) -> None:
    ...     assert case.request.num_tokens == 0
    >>> test_request_is_empty()
    """
    producer, consumer = draw(engine_pairs(largest=8))
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


def cases(
    kinds: Sequence[str] = tuple(KINDS), largest: int = 6, *, supports: Supports = EVERYTHING
) -> st.SearchStrategy[Case]:
    """Draw a whole transfer: two engines of one model, a request, pools and a replica policy.

    Args:
        kinds: Keys of `KINDS`. The groups of the model are of these kinds.
        largest: The largest TP size of four in five pairs. The fifth pair may have twice as much.
            Pairs with pipeline stages or PCP ranks have smaller TP sizes, but more ranks.
        supports: What may be drawn. Nothing is drawn and thrown away.

    Returns:
        A strategy of cases.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(cases(["full", "MLA"], largest=2))
    ... def test_engines_are_small(case: Case) -> None:
    ...     assert case.producer.parallel.tp_size <= 4
    >>> test_engines_are_small()
    """
    pairs = engine_pairs(kinds, largest, supports=supports)
    return pairs.flatmap(lambda pair: case_of(pair, supports=supports))


@st.composite
def scripts(draw: st.DrawFn, supports: Supports = EVERYTHING) -> Script:
    """Draw the steps of a release protocol.

    >>> from hypothesis import find
    >>> find(scripts(), lambda script: len(script.steps) > 1).steps
    (('hold', 1), ('hold', 1))
    """
    at = st.integers(0, 5)
    # A system may count to a number of readers, such as 8 or 16, so some requests have more.
    readers = st.sampled_from((1, 2, 3, 1, 2, 3, 4, 5, 9, 17))
    steps = {"hold": readers, "read": at, "deliver": at, "abort": at}
    if supports.repeated:
        steps |= {"repeat": at}
    if supports.lost:
        steps |= {"lose": at}
    if supports.reused_ids:
        steps |= {"again": readers}
    steps |= {"wait": st.sampled_from((0.125, 0.5, 2.0)), "before": at, "after": at}
    # Reads and deliveries are the most frequent steps, or few requests would be read.
    names = [*steps, "read", "read", "deliver", "deliver"]
    # Lists of any size are mostly short, and most faults need several steps.
    size = draw(st.sampled_from((1, 4, 8, 12, 20)))
    drawn = draw(st.lists(st.sampled_from(names), min_size=size, max_size=size))
    opening = ["hold"]
    if supports.repeated and supports.reused_ids and draw(st.booleans()):
        # A late copy of a notification, for an id that is held again. Chance finds it too rarely.
        opening = ["hold", "read", "repeat", "deliver", "again", "deliver"]
    return Script([(name, draw(steps[name])) for name in (*opening, *drawn)])


def sharing_cases(
    kinds: Sequence[str] = tuple(KINDS), *, supports: Supports = EVERYTHING
) -> st.SearchStrategy[Case]:
    """Draw a transfer between engines whose groups share one memory, as in vLLM.

    No two groups of a side have a common block, except for the null block. A table of the consumer
    may name blocks before its first live position that another group has by now.

    >>> from hypothesis import given, settings
    >>> @settings(max_examples=2)
    ... @given(sharing_cases())
    ... def test_memory_is_shared(case: Case) -> None:
    ...     assert case.shared
    >>> test_memory_is_shared()
    """
    pairs = sharing_pairs(sharing_kinds(kinds, supports), supports)
    return pairs.flatmap(lambda pair: case_of(pair, supports=supports)).flatmap(_in_one_memory)


@st.composite
def _in_one_memory(draw: st.DrawFn, case: Case) -> Case:
    """Draw block ids with which the groups of each side of *case* share one memory."""
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
    request = attrs.evolve(request, consumer_blocks=draw(given_back(case.consumer, request)))
    return attrs.evolve(
        case,
        request=request,
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        shared=True,
    )
