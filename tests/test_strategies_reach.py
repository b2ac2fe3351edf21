"""The strategies reach the hard cases: each is drawn, in a few hundred tries, more than once.

The laws say nothing about what is never drawn. A case that turns out to matter gets a line here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, Phase, given, settings

import kvspec
from kvspec.testing.carve import rank_units
from kvspec.testing.kinds import KINDS
from kvspec.testing.oracle import live_positions
from kvspec.testing.strategies import (
    NAMED_LAYOUTS,
    POLICIES,
    Case,
    cases,
    is_state,
    length_of,
    needed,
    parts_of,
)

TRIES = 500


@lru_cache(maxsize=1)
def drawn() -> tuple[Case, ...]:
    """Return the cases that hypothesis draws for a fixed seed."""
    found: list[Case] = []

    @settings(
        max_examples=TRIES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(cases())
    def collect(case: Case) -> None:
        found.append(case)

    collect()
    return tuple(found)


def cached_of(case: Case, group: kvspec.KVCacheGroup) -> int:
    """Return how many tokens of *group* the consumer has."""
    cached = case.request.cached_tokens
    return cached if isinstance(cached, int) else cached[group.name]


def token_groups(case: Case) -> list[kvspec.KVCacheGroup]:
    """Return the consumer's groups whose rows are tokens."""
    return [group for group in case.consumer.groups if not is_state(group.spec)]


def replicated(engine: kvspec.EngineSpec, part: kvspec.Part) -> bool:
    """Return whether two ranks of *engine* hold the same, of a part that could be dealt."""
    hands = [tuple(rank_units(engine, rank, part)) for rank in engine.parallel.ranks]
    return part.units > part.deal_in and len(set(hands)) < len(hands)


def any_part(case: Case, test: Callable[[kvspec.Part], bool]) -> bool:
    """Return whether *test* holds for any part."""
    return any(map(test, parts_of(case.producer.groups)))


def sizes(case: Case) -> tuple[int, int]:
    """Return both TP sizes."""
    return case.producer.parallel.tp_size, case.consumer.parallel.tp_size


def letters(engine: kvspec.EngineSpec) -> list[str]:
    """Return the layout of each group."""
    return [group.layout or engine.layout for group in engine.groups]


def window_start(case: Case, group: kvspec.KVCacheGroup) -> int:
    """Return the first position that the next query sees; 0 if none."""
    live = live_positions(group.spec.of_layer(group.layers[0]), case.request)
    return int(live.argmax()) if live.any() else 0


def tables(case: Case, group: kvspec.KVCacheGroup) -> tuple[kvspec.BlockTable, kvspec.BlockTable]:
    """Return the producer's and the consumer's block table of *group*."""
    request = case.request
    return request.producer_blocks[group.name], request.consumer_blocks[group.name]


def has_unread_rank(case: Case) -> bool:
    """Return whether no consumer needs what a producer rank holds, by the plan's election."""
    plan = kvspec.plan_transfer(
        case.producer, case.consumer, replicas=case.replicas, salt=case.salt
    )
    return any(not plan.targets(rank) for rank in case.producer.parallel.ranks)


def hybrid(case: Case) -> bool:
    """Return whether states and tokens move together."""
    return {is_state(group.spec) for group in case.producer.groups} == {True, False}


def lookahead(case: Case) -> bool:
    """Return whether the producer has a whole block at or beyond the request's length."""
    return any(
        tables(case, group)[0].tokens(group.spec.block_size).stop
        >= length_of(group, case.request) + group.spec.block_size
        for group in token_groups(case)
    )


def neighbours(case: Case, step: int) -> bool:
    """Return whether a producer's table has two neighbouring ids *step* apart."""
    return any(
        b - a == step
        for group in token_groups(case)
        for a, b in pairwise(tables(case, group)[0].block_ids.tolist())
    )


def row_boundary(case: Case) -> bool:
    """Return whether a window begins inside a row that stands for several tokens."""
    return any(
        window_start(case, group) % group.spec.of_layer(group.layers[0]).parts[0].tokens_per_state
        for group in token_groups(case)
    )


def heads_of(group: kvspec.KVCacheGroup) -> set[int]:
    """Return the head counts of the layers of a group."""
    return {part.units for part in parts_of([group])}


def planes(case: Case) -> set[bool]:
    """Return, of groups with K and V, whether each side's layout has planes."""
    return {
        "K" in layout
        for engine in (case.producer, case.consumer)
        for group, layout in zip(engine.groups, letters(engine), strict=True)
        if not is_state(group.spec) and len(group.spec.of_layer(group.layers[0]).parts) > 1
    }


def conv_orders(case: Case) -> set[tuple[str, bool]]:
    """Return, of groups of states, whether each side stores the dimension first."""
    return {
        (group.name, layout.index("H") < layout.index("N"))
        for engine in (case.producer, case.consumer)
        for group, layout in zip(engine.groups, letters(engine), strict=True)
        if is_state(group.spec)
    }


REACHED: dict[str, Callable[[Case], bool]] = {
    "replicas on P": lambda c: any_part(
        c, lambda p: replicated(c.producer, p) and not replicated(c.consumer, p)
    ),
    "replicas on D": lambda c: any_part(
        c, lambda p: replicated(c.consumer, p) and not replicated(c.producer, p)
    ),
    "replicas on both": lambda c: any_part(
        c, lambda p: replicated(c.consumer, p) and replicated(c.producer, p)
    ),
    "TP sizes that do not divide": lambda c: max(sizes(c)) % min(sizes(c)) != 0,
    "units that do not divide": lambda c: any_part(
        c, lambda p: p.units // p.deal_in > sizes(c)[1] and p.units // p.deal_in % sizes(c)[1] != 0
    ),
    "a P rank without readers": has_unread_rank,
    "Mamba2 groups below ranks": lambda c: any_part(
        c, lambda p: p.name == "conv_b" and p.units // p.deal_in < min(sizes(c))
    ),
    "stripes over replicas": lambda c: (
        c.replicas == "stripe" and any_part(c, lambda p: replicated(c.producer, p))
    ),
    "stripes over three replicas and blocks": lambda c: (
        c.replicas == "stripe"
        and any(
            sizes(c)[0] >= 3 * part.units // part.deal_in and len(needed(g, c.request)) > 2 * each
            for g in token_groups(c)
            for part, each in [(parts_of([g])[0], g.spec.block_size)]
        )
    ),
    "a one-token tail": lambda c: any(
        length_of(g, c.request) % g.spec.block_size == 1 < g.spec.block_size
        for g in token_groups(c)
    ),
    "whole blocks only": lambda c: any(
        length_of(g, c.request) % g.spec.block_size == 0 for g in token_groups(c)
    ),
    "a cached boundary in a block": lambda c: any(
        0 < cached_of(c, g) < length_of(g, c.request) and cached_of(c, g) % g.spec.block_size
        for g in token_groups(c)
    ),
    "a window start in a block": lambda c: any(
        window_start(c, g) % g.spec.block_size for g in token_groups(c)
    ),
    "a window start in a row": row_boundary,
    "a window that outlives the cached prefix": lambda c: any(
        0 < cached_of(c, g) < window_start(c, g) for g in token_groups(c)
    ),
    "tables that start late": lambda c: any(
        0 < tables(c, g)[0].first_token != tables(c, g)[1].first_token for g in token_groups(c)
    ),
    "a lookahead block": lookahead,
    "adjacent blocks": lambda c: neighbours(c, 1),
    "descending blocks": lambda c: neighbours(c, -1),
    "scattered blocks": lambda c: neighbours(c, 2),
    "everything cached": lambda c: (
        bool(token_groups(c)) and not any(needed(g, c.request) for g in token_groups(c))
    ),
    "something cached by group": lambda c: not isinstance(c.request.cached_tokens, int),
    "a padded page": lambda c: any(g.spec.page_size_padded for g in c.consumer.groups),
    "pages padded differently": lambda c: any(
        a.spec.page_size_padded != b.spec.page_size_padded
        for a, b in zip(c.producer.groups, c.consumer.groups, strict=True)
    ),
    "unequal layouts": lambda c: letters(c.producer) != letters(c.consumer),
    "planes against packed": lambda c: len(planes(c)) == 2,
    "conv states of both orders": lambda c: len(conv_orders(c)) > len(dict(conv_orders(c))),
    "a uniform group of different heads": lambda c: any(
        len(heads_of(g)) > 1 for g in token_groups(c)
    ),
    "explicit deals": lambda c: bool(c.producer.parallel.unit_deals),
    "a rank that holds nothing": lambda c: any(
        not own for deal in c.producer.parallel.unit_deals.values() for own in deal
    ),
    "states and tokens together": hybrid,
    "an encoder of its own length": lambda c: c.request.encoder_tokens is not None,
    "one rank to one": lambda c: sizes(c) == (1, 1),
}


@pytest.mark.parametrize("name", REACHED)
def test_a_hard_case_is_reached(name: str) -> None:
    """At least three of the cases drawn are of this sort, so the laws meet it in every run."""
    assert sum(map(bool, map(REACHED[name], drawn()))) >= 3


def test_every_kind_layout_and_policy_is_reached() -> None:
    """All kinds of layer, the ten named layouts and others, and all election policies are drawn."""
    groups = [group.name for case in drawn() for group in case.producer.groups]
    assert set(KINDS) == set(groups)
    layouts = {each for case in drawn() for each in letters(case.consumer)}
    assert set(NAMED_LAYOUTS) < layouts
    assert set(POLICIES) == {case.replicas for case in drawn()}


def test_cases_stay_small() -> None:
    """A whole transfer fits in a few hundred KiB a rank, so that laws run in milliseconds."""
    for case in drawn()[::10]:
        _, storage = kvspec.allocate(case.consumer, kvspec.RankId(), case.consumer_pool)
        assert sum(flat.size for flat in storage.values()) < 300_000
