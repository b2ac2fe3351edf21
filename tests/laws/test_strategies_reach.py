"""Tests that the strategies draw each hard case more than once in a fixed number of tries.

A law checks only cases that are drawn. If a kind of case turns out to matter, add it here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import islice, pairwise, product
from math import gcd
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from special_cases import interleaved_cases, spanning_cases

import kvspec
from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
    length_in,
    live_positions,
    own_positions,
    rank_layers,
    rank_units,
)
from kvspec.ownership.replicas import POLICIES as EVERY_POLICY
from kvspec.testing.case import Case
from kvspec.testing.engines import NAMED_LAYOUTS
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import is_state, parts_of
from kvspec.testing.requests import needed
from kvspec.testing.strategies import cases, sharing_cases
from kvspec.testing.world import plan_of

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

pytestmark = pytest.mark.uncovered

TRIES, FEW = 1400, 300


@lru_cache
def drawn(
    strategy: Callable[[], SearchStrategy[Case]] = cases, tries: int = TRIES
) -> tuple[Case, ...]:
    """Return the cases that hypothesis draws from *strategy* with a fixed seed."""
    collected: list[Case] = []

    @settings(
        max_examples=tries,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy())
    def collect(case: Case) -> None:
        collected.append(case)

    collect()
    return tuple(collected)


def cached_of(case: Case, group: kvspec.KVCacheGroup) -> int:
    """Return the number of tokens of *group* that the consumer has cached."""
    return cached_tokens_of(case.request, group)


def token_groups(case: Case) -> list[kvspec.KVCacheGroup]:
    """Return the consumer's groups that move and have rows of tokens."""
    return [own for _, own in pairs(case) if not is_state(own.spec)]


Group = kvspec.KVCacheGroup


def pairs(case: Case) -> list[tuple[Group, Group]]:
    """Return pairs of a producer's and a consumer's group with a common layer."""
    return [
        (producer_group, consumer_group)
        for producer_group, consumer_group in product(case.producer.groups, case.consumer.groups)
        if set(producer_group.layers) & set(consumer_group.layers)
        and consumer_group.name != "draft"
    ]


def any_pair(case: Case, test: Callable[[Group, Group], bool]) -> bool:
    """Return whether *test* holds for any pair of groups with rows of tokens."""
    return any(test(a, b) for a, b in pairs(case) if not is_state(a.spec))


def stages(case: Case) -> tuple[int, int]:
    """Return the number of pipeline stages of each side."""
    return case.producer.parallel.pp_size, case.consumer.parallel.pp_size


def contexts(case: Case) -> tuple[int, int]:
    """Return the number of context ranks of each side that share the tokens of a group."""
    if not token_groups(case):
        return 1, 1
    producer, consumer = (context_of(e, kvspec.RankId())[1] for e in (case.producer, case.consumer))
    return producer, consumer


def takes_turns(case: Case, side: int) -> bool:
    """Return whether one side shards tokens one by one, and its blocks have several tokens."""
    engine = (case.producer, case.consumer)[side]
    return contexts(case)[side] > 1 == engine.parallel.interleave_size and any_pair(
        case, lambda a, b: (a, b)[side].spec.block_size > 1
    )


def uneven(engine: kvspec.EngineSpec) -> bool:
    """Return whether two stages hold different numbers of layers."""
    return len({sum(map(len, stage_layers)) for stage_layers in layers_by_stage(engine)}) > 1


def layers_by_stage(engine: kvspec.EngineSpec) -> list[list[list[str]]]:
    """Return the layers of each group, for each stage."""
    ranks = [kvspec.RankId(pp=stage) for stage in range(engine.parallel.pp_size)]
    return [[rank_layers(engine, rank, group) for group in engine.groups] for rank in ranks]


def lacks_group(engine: kvspec.EngineSpec) -> bool:
    """Return whether a stage has layers, but no layer of one of the groups."""
    return any(
        any(stage_layers) and not all(stage_layers) for stage_layers in layers_by_stage(engine)
    )


def no_divisor(sizes: tuple[int, int]) -> bool:
    """Return whether neither of two sizes divides the other."""
    return sizes[0] % sizes[1] != 0 != sizes[1] % sizes[0]


def block_sizes(first: Group, second: Group) -> tuple[int, int]:
    """Return both block sizes."""
    return first.spec.block_size, second.spec.block_size


def tile(first: Group, second: Group) -> int:
    """Return the largest number of tokens that divides both sides' blocks in memory."""
    return gcd(*((group.kernel_block_size or group.spec.block_size) for group in (first, second)))


def boundary(case: Case, group: Group) -> int:
    """Return the end of the cached prefix of a group, or 0 if no token or all are cached."""
    cached = cached_of(case, group)
    return cached if 0 < cached < length_in(group.spec, case.request) else 0


def sharing_replicas(engine: kvspec.EngineSpec) -> bool:
    """Return whether two ranks hold the same of several heads, but different tokens."""
    return any(
        own_positions(engine, rank, 0, 8).tolist()
        != own_positions(engine, other_rank, 0, 8).tolist()
        for group in engine.groups
        if not is_state(group.spec)
        for part in parts_of([group])
        if part.units > 1
        for rank, other_rank in product(engine.parallel.ranks, repeat=2)
        if rank.pcp == other_rank.pcp
        and rank_units(engine, rank, part) == rank_units(engine, other_rank, part)
    )


def replicated(engine: kvspec.EngineSpec, part: kvspec.Part) -> bool:
    """Return whether two ranks hold the same units of a part that could be sharded."""
    ranks = [kvspec.RankId(tp=tp) for tp in range(engine.parallel.tp_size)]
    units_by_rank = [tuple(rank_units(engine, rank, part)) for rank in ranks]
    return part.units > part.granularity and len(set(units_by_rank)) < len(units_by_rank)


def any_part(case: Case, test: Callable[[kvspec.Part], bool]) -> bool:
    """Return whether *test* holds for any part."""
    return any(map(test, parts_of([group for group, _ in pairs(case)])))


def sizes(case: Case) -> tuple[int, int]:
    """Return both TP sizes."""
    return case.producer.parallel.tp_size, case.consumer.parallel.tp_size


def letters(engine: kvspec.EngineSpec) -> list[str]:
    """Return the layout of each group."""
    return [group.layout or engine.layout for group in engine.groups]


def window_start(case: Case, group: kvspec.KVCacheGroup) -> int:
    """Return the first position that the next query attends to, or 0 if no position exists."""
    live = live_positions(group.spec.of_layer(group.layers[0]), case.request)
    return int(live.argmax()) if live.any() else 0


def tables(case: Case, group: kvspec.KVCacheGroup) -> tuple[kvspec.BlockTable, kvspec.BlockTable]:
    """Return both sides' block tables of *group*, which is a group of the consumer."""
    request = case.request
    producer_tables = request.producer_blocks
    name = next(a.name for a, b in pairs(case) if b is group and a.name in producer_tables)
    return producer_tables[name], request.consumer_blocks[group.name]


def has_unread_rank(case: Case) -> bool:
    """Return whether no consumer rank reads from one of the producer ranks."""
    plan = plan_of(case)
    return any(not plan.targets(rank) for rank in case.producer.parallel.ranks)


def hybrid(case: Case) -> bool:
    """Return whether states and tokens move together."""
    return {is_state(group.spec) for group in case.producer.groups} == {True, False}


def lookahead(case: Case) -> bool:
    """Return whether the producer has a whole block after the request's last token."""
    return any(
        tables(case, group)[0].tokens(group.spec.block_size).stop
        >= length_in(group.spec, case.request) + group.spec.block_size
        for group in token_groups(case)
    )


def neighbours(case: Case, step: int) -> bool:
    """Return whether two neighbouring ids of a producer's table are *step* apart."""
    return any(
        b - a == step
        for group in token_groups(case)
        for a, b in pairwise(tables(case, group)[0].block_ids.tolist())
    )


def row_boundary(case: Case) -> bool:
    """Return whether a window begins inside a row of several tokens."""
    return any(
        window_start(case, group) % group.spec.of_layer(group.layers[0]).parts[0].tokens_per_state
        for group in token_groups(case)
    )


def heads_of(group: kvspec.KVCacheGroup) -> set[int]:
    """Return the head counts of the layers of a group."""
    return {part.units for part in parts_of([group])}


def planes(case: Case) -> set[bool]:
    """Return for each group with keys and values whether its layout has planes."""
    return {
        "K" in layout
        for engine in (case.producer, case.consumer)
        for group, layout in zip(engine.groups, letters(engine), strict=True)
        if not is_state(group.spec) and len(group.spec.of_layer(group.layers[0]).parts) > 1
    }


def conv_orders(case: Case) -> set[tuple[str, bool]]:
    """Return for each group of states whether its layout has the dimension first."""
    return {
        (group.layers[0].rpartition(".")[0], layout.index("H") < layout.index("N"))
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
        c,
        lambda p: (
            p.units // p.granularity > sizes(c)[1] and p.units // p.granularity % sizes(c)[1] != 0
        ),
    ),
    "a P rank without readers": has_unread_rank,
    "Mamba2 groups below ranks": lambda c: any_part(
        c, lambda p: p.name == "conv_b" and p.units // p.granularity < min(sizes(c))
    ),
    "stripes over replicas": lambda c: (
        c.replica_policy.name == "stripe" and any_part(c, lambda p: replicated(c.producer, p))
    ),
    "stripes over three replicas and blocks": lambda c: (
        c.replica_policy.name == "stripe"
        and any(
            sizes(c)[0] >= 3 * part.units // part.granularity
            and len(needed(g, c.request)) > 2 * each
            for g in token_groups(c)
            for part, each in [(parts_of([g])[0], g.spec.block_size)]
        )
    ),
    "a one-token tail": lambda c: any(
        length_in(g.spec, c.request) % g.spec.block_size == 1 < g.spec.block_size
        for g in token_groups(c)
    ),
    "whole blocks only": lambda c: any(
        length_in(g.spec, c.request) % g.spec.block_size == 0 for g in token_groups(c)
    ),
    "a cached boundary in a block": lambda c: any(
        0 < cached_of(c, g) < length_in(g.spec, c.request) and cached_of(c, g) % g.spec.block_size
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
    "cached tokens, and no live one": lambda c: any(
        cached_of(c, g)
        and length_in(g.spec, c.request)
        and not live_positions(g.spec.of_layer(g.layers[0]), c.request).any()
        for g in token_groups(c)
    ),
    "everything cached": lambda c: (
        bool(token_groups(c)) and not any(needed(g, c.request) for g in token_groups(c))
    ),
    "cached tokens by group": lambda c: not isinstance(c.request.cached_tokens, int),
    "a padded page": lambda c: any(g.spec.page_size_padded for g in c.consumer.groups),
    "pages padded differently": lambda c: any(
        a.spec.page_size_padded != b.spec.page_size_padded for a, b in pairs(c)
    ),
    "unequal layouts": lambda c: letters(c.producer) != letters(c.consumer),
    "planes against packed": lambda c: len(planes(c)) == 2,
    "conv states of both orders": lambda c: len(conv_orders(c)) > len(dict(conv_orders(c))),
    "a uniform group of different heads": lambda c: any(
        len(heads_of(g)) > 1 for g in token_groups(c)
    ),
    "explicit shardings": lambda c: bool(c.producer.parallel.shardings),
    "a rank that holds nothing": lambda c: any(
        not own for sharding in c.producer.parallel.shardings.values() for own in sharding
    ),
    "states and tokens together": hybrid,
    "an encoder of its own length": lambda c: c.request.encoder_tokens is not None,
    "one rank to one": lambda c: (
        len(c.producer.parallel.ranks) == len(c.consumer.parallel.ranks) == 1
    ),
}


ROW_KINDS: dict[int, set[str]] = {}


def row_kinds(case: Case) -> set[str]:
    """Return which kinds of row the pairs of ranks of *case* use."""
    if id(case) in ROW_KINDS:
        return ROW_KINDS[id(case)]
    names = ROW_KINDS.setdefault(id(case), set())
    plan = plan_of(case)
    for source, target in {(edge.producer, edge.consumer) for edge in plan.edges}:
        caches = (
            kvspec.plan_memory(case.producer, source, case.producer_pool),
            kvspec.plan_memory(case.consumer, target, case.consumer_pool),
        )
        for numbered, _ in kvspec.build_table(plan, *caches).tiles(case.request):
            skip, tokens = numbered.rows.kind
            tile = numbered.split_rows.token_split.tile
            if numbered.is_end:
                ends, begins = skip + tokens == tile, not skip
                names.add("an end" if ends else "a beginning" if begins else "a middle")
    return names


AXES: dict[str, Callable[[Case], bool]] = {
    "PP on P only, uneven": lambda c: stages(c)[0] > stages(c)[1] == 1 and uneven(c.producer),
    "PP on D only, uneven": lambda c: stages(c)[1] > stages(c)[0] == 1 and uneven(c.consumer),
    "PP on both, uneven": lambda c: (
        min(stages(c)) > 1 and uneven(c.producer) and uneven(c.consumer)
    ),
    "PP on both, of other sizes": lambda c: min(stages(c)) > 1 and len(set(stages(c))) > 1,
    "stages by layer numbers": lambda c: (
        max(stages(c)) > 1 and None in (c.producer.parallel.stages, c.consumer.parallel.stages)
    ),
    "a stage without layers of a group on P": lambda c: lacks_group(c.producer),
    "a stage without layers of a group on D": lambda c: lacks_group(c.consumer),
    "a stage without layers": lambda c: any(
        not any(each) for each in (*layers_by_stage(c.producer), *layers_by_stage(c.consumer))
    ),
    "states at unequal TP with PP": lambda c: (
        max(stages(c)) > 1
        and sizes(c)[0] != sizes(c)[1]
        and any(is_state(a.spec) for a, _ in pairs(c))
    ),
    "tokens sharded on P only": lambda c: contexts(c)[0] > contexts(c)[1] == 1,
    "tokens sharded on D only": lambda c: contexts(c)[1] > contexts(c)[0] == 1,
    "tokens sharded on both, to other sizes": lambda c: (
        min(contexts(c)) > 1 and len(set(contexts(c))) > 1
    ),
    "DCP on both": lambda c: (
        min(contexts(c)) > 1 and min(e.parallel.dcp_size for e in (c.producer, c.consumer)) > 1
    ),
    "tokens sharded on both, by other interleaves": lambda c: (
        min(contexts(c)) > 1
        and len({e.parallel.interleave_size for e in (c.producer, c.consumer)}) > 1
    ),
    "interleaves that do not divide": lambda c: (
        min(contexts(c)) > 1
        and no_divisor((c.producer.parallel.interleave_size, c.consumer.parallel.interleave_size))
    ),
    "an interleave of 1 on P and larger blocks": lambda c: takes_turns(c, 0),
    "an interleave of 1 on D and larger blocks": lambda c: takes_turns(c, 1),
    "an interleave of 1 against a larger one": lambda c: (
        min(contexts(c)) > 1
        and 1 in {e.parallel.interleave_size for e in (c.producer, c.consumer)} != {1}
    ),
    "tokens sharded equally on both": lambda c: (
        min(contexts(c)) > 1
        and contexts(c)[0] == contexts(c)[1]
        and c.producer.parallel.interleave_size == c.consumer.parallel.interleave_size
    ),
    "PCP and DCP together": lambda c: any(
        e.parallel.pcp_size > 1 and e.parallel.dcp_size > 1 for e in (c.producer, c.consumer)
    ),
    "PCP that replicates on P": lambda c: c.producer.parallel.pcp_size > contexts(c)[0] == 1,
    "PCP that replicates on D": lambda c: c.consumer.parallel.pcp_size > contexts(c)[1] == 1,
    "explicit context ranks": lambda c: any(
        e.parallel.context_ranks is not None and size > 1
        for e, size in zip((c.producer, c.consumer), contexts(c), strict=True)
    ),
    "replicas of heads that share the tokens": lambda c: (
        max(contexts(c)) > 1 and (sharing_replicas(c.producer) or sharing_replicas(c.consumer))
    ),
    "sharded tokens and a cached prefix": lambda c: (
        max(contexts(c)) > 1 and any(boundary(c, g) for g in token_groups(c))
    ),
    "sharded tokens and a cached boundary in an interleave": lambda c: (
        max(contexts(c)) > 1
        and any(boundary(c, g) % c.consumer.parallel.interleave_size for g in token_groups(c))
    ),
    "sharded tokens and unequal blocks": lambda c: (
        max(contexts(c)) > 1 and any_pair(c, lambda a, b: len(set(block_sizes(a, b))) > 1)
    ),
    "sharded tokens and a window": lambda c: (
        max(contexts(c)) > 1 and any(window_start(c, g) for g in token_groups(c))
    ),
    "sharded tokens and kernel blocks": lambda c: (
        max(contexts(c)) > 1
        and any_pair(c, lambda a, b: a.kernel_blocks_per_block * b.kernel_blocks_per_block > 1)
    ),
    "sharded tokens, stripes and replicas": lambda c: (
        max(contexts(c)) > 1
        and c.replica_policy.name == "stripe"
        and any_part(c, lambda p: p.units * contexts(c)[0] < len(c.producer.parallel.ranks))
    ),
    "sharded tokens and a table that starts late": lambda c: any(
        size > 1 and any(tables(c, g)[at].first_token for g in token_groups(c))
        for at, size in enumerate(contexts(c))
    ),
    "several blocks of sharded tokens": lambda c: any(
        size > 1 and any(len(tables(c, g)[at].block_ids) > 1 for g in token_groups(c))
        for at, size in enumerate(contexts(c))
    ),
    "blocks of P that D's divide": lambda c: any_pair(
        c,
        lambda a, b: (
            block_sizes(a, b)[0] % block_sizes(a, b)[1]
            == 0
            < block_sizes(a, b)[0] - block_sizes(a, b)[1]
        ),
    ),
    "blocks of D that P's divide": lambda c: any_pair(
        c,
        lambda a, b: (
            block_sizes(a, b)[1] % block_sizes(a, b)[0]
            == 0
            < block_sizes(a, b)[1] - block_sizes(a, b)[0]
        ),
    ),
    "larger blocks on P that do not divide": lambda c: any_pair(
        c, lambda a, b: no_divisor(block_sizes(a, b)) and a.spec.block_size > b.spec.block_size
    ),
    "larger blocks on D that do not divide": lambda c: any_pair(
        c, lambda a, b: no_divisor(block_sizes(a, b)) and a.spec.block_size < b.spec.block_size
    ),
    "kernel blocks on P": lambda c: any_pair(
        c, lambda a, b: a.kernel_blocks_per_block > b.kernel_blocks_per_block == 1
    ),
    "kernel blocks on D": lambda c: any_pair(
        c, lambda a, b: b.kernel_blocks_per_block > a.kernel_blocks_per_block == 1
    ),
    "kernel blocks on both, unequal": lambda c: any_pair(
        c,
        lambda a, b: (
            min(a.kernel_blocks_per_block, b.kernel_blocks_per_block) > 1
            and a.kernel_blocks_per_block != b.kernel_blocks_per_block
        ),
    ),
    "compressed rows and unequal blocks": lambda c: any_pair(
        c, lambda a, b: len(set(block_sizes(a, b))) > 1 and parts_of([a])[0].tokens_per_state > 1
    ),
    "unequal blocks and a window start in one": lambda c: any_pair(
        c,
        lambda a, b: (
            len(set(block_sizes(a, b))) > 1 and window_start(c, b) % min(block_sizes(a, b)) != 0
        ),
    ),
    "a cached boundary in a tile": lambda c: any_pair(c, lambda a, b: boundary(c, b) % tile(a, b)),
    "a cached boundary between tiles of a block": lambda c: any_pair(
        c,
        lambda a, b: boundary(c, b) % tile(a, b) == 0 < boundary(c, b) % b.spec.block_size,
    ),
    "groups with their own blocks": lambda c: (
        len({group.spec.block_size for group in token_groups(c)}) > 1
    ),
    "groups of other names": lambda c: any(a.name != b.name for a, b in pairs(c)),
    "a group that P splits": lambda c: any(
        len([a for a, other in pairs(c) if other is b]) > 1 for _, b in pairs(c)
    ),
    "a group that D splits": lambda c: any(
        len([b for other, b in pairs(c) if other is a]) > 1 for a, _ in pairs(c)
    ),
    "a group split in two ways": lambda c: any(
        len([a for a, other in pairs(c) if other is b]) > 1
        and len([each for other, each in pairs(c) if other is one]) > 1
        for one, b in pairs(c)
    ),
    "groups in another order": lambda c: (
        [b for a in c.producer.groups for b in c.consumer.groups if (a, b) in pairs(c)]
        != [b for b in c.consumer.groups if any(b is each for _, each in pairs(c))]
    ),
    "a state in a later block on P": lambda c: states_in_tables(c, 0),
    "a state in a later block on D": lambda c: states_in_tables(c, 1),
    "a placeholder for a cached state": lambda c: any(
        is_state(g.spec)
        and cached_of(c, g) >= c.request.num_tokens > 0
        and -1 in c.request.consumer_blocks[g.name].block_ids
        for g in c.consumer.groups
        if g.name in c.request.consumer_blocks
    ),
    "a null block of -1": lambda c: any(
        -1 in table.block_ids for table in c.request.consumer_blocks.values()
    ),
    "a null block for many tokens": lambda c: any(
        list(table.block_ids).count(0) > 1 for table in c.request.consumer_blocks.values()
    ),
    "null blocks on P": lambda c: any(
        -1 in table.block_ids for table in c.request.producer_blocks.values()
    ),
    "a null block of P's own": lambda c: nulls(c.producer, c.request.producer_blocks),
    "a null block of D's own": lambda c: nulls(c.consumer, c.request.consumer_blocks),
    "null blocks of both that differ": lambda c: (
        nulls(c.producer, c.request.producer_blocks)
        and nulls(c.consumer, c.request.consumer_blocks)
        and c.producer.null_block != c.consumer.null_block
    ),
    "a window that P keeps as full attention": lambda c: any_pair(
        c, lambda a, b: len(windows(a)) < len(windows(b))
    ),
    "a window that D keeps as full attention": lambda c: any_pair(
        c, lambda a, b: len(windows(a)) > len(windows(b))
    ),
    "more tokens kept on one side": lambda c: any_pair(
        c, lambda a, b: len(windows(a)) == len(windows(b)) and windows(a) != windows(b)
    ),
    "one cached count together with an encoder": lambda c: (
        c.request.encoder_tokens is not None
        and isinstance(c.request.cached_tokens, int)
        and c.request.cached_tokens > 0
    ),
    "a pool without a spare block": lambda c: any(
        c.consumer_pool[g.name] == len(tables(c, g)[1].block_ids) > 1 for g in token_groups(c)
    ),
    "a draft layer on P": lambda c: drafts(c.producer, c.consumer, alone=False),
    "a draft layer on D": lambda c: drafts(c.consumer, c.producer, alone=False),
    "a group of drafts on P": lambda c: drafts(c.producer, c.consumer, alone=True),
    "a group of drafts on D": lambda c: drafts(c.consumer, c.producer, alone=True),
    "a layer that one side excludes": lambda c: any(
        a.layers == b.layers and a.excluded != b.excluded for a, b in pairs(c)
    ),
    "uniform windows": lambda c: any(
        "sliding_window" in str(vars(b.spec.of_layer(b.layers[0]))) and b.spec.layers
        for _, b in pairs(c)
    ),
    "a uniform group of other rows": lambda c: any(
        b.spec.layers and len({part.tokens_per_state for part in parts_of([b])}) > 1
        for _, b in pairs(c)
    ),
    "a uniform group of other types": lambda c: any(
        b.spec.layers and len({part.dtype for part in parts_of([b])}) > 1 for _, b in pairs(c)
    ),
    "a padded uniform group": lambda c: any(
        b.spec.layers and b.spec.of_layer(b.layers[0]).page_size_padded for _, b in pairs(c)
    ),
    "no tokens": lambda c: c.request.num_tokens == 0,
    "an encoder of no tokens": lambda c: c.request.encoder_tokens == 0,
    "more tokens cached than requested": lambda c: any(
        cached_of(c, g) > length_in(g.spec, c.request) for g in token_groups(c)
    ),
    "TP above six on P": lambda c: sizes(c)[0] > 6,
    "TP above six on D": lambda c: sizes(c)[1] > 6,
    "units that a group shards its own way": lambda c: any(
        a.shardings or b.shardings for a, b in pairs(c)
    ),
    "tokens that one group holds whole": lambda c: any_pair(
        c, lambda a, b: not (a.context_sharded and b.context_sharded)
    ),
    "the nearest of several replicas": lambda c: (
        c.replica_policy.topology is not None and any_part(c, lambda p: replicated(c.producer, p))
    ),
    "the end of a tile": lambda c: "an end" in row_kinds(c),
    "the beginning of a tile": lambda c: "a beginning" in row_kinds(c),
    "the middle of a tile": lambda c: "a middle" in row_kinds(c),
    "rows of scales for several tokens": lambda c: any_pair(
        c,
        lambda a, b: (
            max(layer_values(a, "tokens_per_scale") | layer_values(b, "tokens_per_scale")) > 1
        ),
    ),
    "rows of scales and unequal blocks": lambda c: any_pair(
        c, lambda a, b: len(set(block_sizes(a, b))) > 1 < max(layer_values(b, "tokens_per_scale"))
    ),
    "scales in a uniform group": lambda c: any_pair(
        c, lambda _, b: bool(b.spec.layers) and len(layer_values(b, "scale_dtype")) > 1
    ),
    "rows of scales in a uniform group": lambda c: any_pair(
        c, lambda _, b: bool(b.spec.layers) and max(layer_values(b, "tokens_per_scale")) > 1
    ),
    "a format in a uniform group": lambda c: any_pair(
        c,
        lambda _, b: bool(b.spec.layers) and layer_values(b, "page_format") == {"keys-transposed"},
    ),
    "other formats of a uniform group": lambda c: any_pair(
        c, lambda a, b: bool(b.spec.layers) and len(formats(a, b)) > 1
    ),
    "equal layers of a group in several orders": lambda c: any_pair(
        c, lambda _, b: len(orders(b)) > len({parts for parts, _ in orders(b)})
    ),
    "tokens that a uniform group holds whole": lambda c: any_pair(
        c, lambda _, b: bool(b.spec.layers) and not b.context_sharded
    ),
    "no table for a group of drafts": lambda c: any(
        group.name not in tables
        for engine, tables in (
            (c.producer, c.request.producer_blocks),
            (c.consumer, c.request.consumer_blocks),
        )
        for group in engine.groups
    ),
}


SHARED: dict[str, Callable[[Case], bool]] = {
    "a block that one group gave back to another": lambda c: named_twice(c, cached=False),
    "a cached block that one group gave back to another": lambda c: named_twice(c, cached=True),
    "a format in one memory": lambda c: any_pair(c, lambda _, b: formats(b) != {"plain"}),
    "other formats in one memory": lambda c: any_pair(c, lambda a, b: len(formats(a, b)) > 1),
    "formats of two groups in one memory": lambda c: (
        len({each for g in token_groups(c) for each in formats(g)}) > 1
    ),
    "scales in one memory": lambda c: any_pair(
        c, lambda _, b: None not in layer_values(b, "scale_dtype")
    ),
    "a null block of P's in one memory": lambda c: nulls(c.producer, c.request.producer_blocks),
    "a null block of D's in one memory": lambda c: nulls(c.consumer, c.request.consumer_blocks),
    "units that a group of one memory shards its own way": lambda c: any(
        a.shardings or b.shardings for a, b in pairs(c)
    ),
    "tokens that a group of one memory holds whole": lambda c: any_pair(
        c, lambda a, b: not (a.context_sharded and b.context_sharded)
    ),
}
"""Cases of engines whose groups share one memory."""


def shards_spanning_content(case: Case) -> bool:
    """Return whether both sides shard content that spans heads by unequal ranges."""
    return any_pair(
        case,
        lambda a, b: (
            True in layer_values(b, "spans_heads")
            and all(
                len({len(each) for each in e.parallel.shardings.get(a.spec.parts[0].units, ())}) > 1
                for e in (case.producer, case.consumer)
            )
        ),
    )


SPANNING: dict[str, Callable[[Case], bool]] = {
    "content that spans heads": lambda c: any_pair(
        c, lambda _, b: True in layer_values(b, "spans_heads")
    ),
    "content that spans heads under explicit shardings": shards_spanning_content,
    "an opaque page": lambda c: any_pair(c, lambda _, b: formats(b) == {"opaque:drawn"}),
    "several opaque pages, some cached": lambda c: any(
        formats(g) == {"opaque:drawn"} and 0 < cached_of(c, g) < length_in(g.spec, c.request)
        for g in token_groups(c)
    ),
    "opaque pages, several in a block": lambda c: any_pair(
        c,
        lambda a, b: (
            len(set(block_sizes(a, b))) > 1
            and None not in layer_values(b, "page_block_size")
            and formats(b) == {"opaque:drawn"}
        ),
    ),
    "kernel blocks of opaque pages": lambda c: any_pair(
        c,
        lambda a, b: (
            a.kernel_blocks_per_block != b.kernel_blocks_per_block
            and formats(b) == {"opaque:drawn"}
        ),
    ),
    "an opaque page of sharded tokens": lambda c: (
        max(contexts(c)) > 1 and any_pair(c, lambda _, b: formats(b) == {"opaque:drawn"})
    ),
}
"""Cases of content that cannot be cut."""

INTERLEAVED: dict[str, Callable[[Case], bool]] = {
    "an interleave that does not divide tiles": lambda c: any_pair(
        c, lambda a, b: no_divisor((c.consumer.parallel.interleave_size, tile(a, b)))
    ),
    "a cached prefix in such an interleave": lambda c: any_pair(
        c,
        lambda a, b: (
            no_divisor((c.consumer.parallel.interleave_size, tile(a, b)))
            and boundary(c, b) % 12 > 0
        ),
    ),
    "several heads with such an interleave": lambda c: any_part(c, lambda p: p.units > 1),
}
"""Cases of engines that shard their tokens equally."""


def layer_values(group: Group, field: str) -> set[Any]:
    """Return the values of a spec *field* in a group's layers; 0 if a spec lacks it."""
    return {getattr(group.spec.of_layer(layer), field, 0) for layer in group.layers}


def formats(*groups: Group) -> set[str]:
    """Return the page formats of *groups*."""
    return {each for group in groups for each in layer_values(group, "page_format")}


def orders(group: kvspec.KVCacheGroup) -> set[tuple[Any, Any]]:
    """Return the parts of the layers of *group*, each with an order in which keys are stored."""
    specs = [group.spec.of_layer(layer) for layer in group.layers]
    return {(spec.parts, tuple(spec.segments(p.name) for p in spec.parts)) for spec in specs}


def windows(group: kvspec.KVCacheGroup) -> tuple[int, ...]:
    """Return the fields of *group*'s spec that determine which tokens it keeps."""
    fields = ("sliding_window", "extra_retained_tokens", "attention_chunk_size")
    return tuple(getattr(group.spec, name) for name in fields if hasattr(group.spec, name))


def nulls(engine: kvspec.EngineSpec, tables: Mapping[str, kvspec.BlockTable]) -> bool:
    """Return whether one of the *tables* contains the null block of *engine*."""
    return any(engine.null_block in table.block_ids for table in tables.values())


def named_twice(case: Case, *, cached: bool) -> bool:
    """Return whether two groups of D name one block, which one of them had *cached* or not."""
    tables, null = case.request.consumer_blocks, case.consumer.null_block
    return any(
        (cached_of(case, group) > 0) == cached
        and set(tables[group.name].block_ids.tolist()) & set(table.block_ids.tolist()) - {null, -1}
        for group in token_groups(case)
        for name, table in tables.items()
        if name != group.name
    )


def states_in_tables(case: Case, side: int) -> bool:
    """Return whether a state lies in a later block of a table with several blocks."""
    return any(
        len(tables(case, b)[side].block_ids) > 1
        and case.request.num_tokens
        > tables(case, b)[side].first_token + (a, b)[side].spec.block_size
        for a, b in pairs(case)
        if is_state(b.spec) and a.name in case.request.producer_blocks
        if b.name in case.request.consumer_blocks
    )


def drafts(engine: kvspec.EngineSpec, other: kvspec.EngineSpec, *, alone: bool) -> bool:
    """Return whether *engine* excludes a layer that *other* lacks.

    *alone*: whether to look at groups of drafts alone, or only at other groups.
    """
    known = {layer for group in other.groups for layer in group.layers}
    return any(
        (group.name == "draft") == alone and set(group.excluded) - known for group in engine.groups
    )


def rare(
    tests: Mapping[str, Callable[[Case], bool]], cases_drawn: Sequence[Case]
) -> dict[str, int]:
    """Return the kinds of cases that occur less than twice, and how often they do."""
    hits = {name: len([*islice(filter(test, cases_drawn), 2)]) for name, test in tests.items()}
    return {name: count for name, count in hits.items() if count < 2}


@pytest.mark.slow
def test_cases_contain_each_hard_case_twice() -> None:
    """The laws check each of these cases in every run."""
    assert {} == rare(REACHED | AXES, drawn())


@pytest.mark.slow
def test_special_strategies_contain_each_hard_case_twice() -> None:
    """These cases need shared memory, content that cannot be cut, or equal sharding of tokens."""
    assert {} == rare(SHARED, drawn(sharing_cases))
    assert {} == rare(SPANNING, drawn(spanning_cases, TRIES // 3))
    assert {} == rare(INTERLEAVED, drawn(interleaved_cases, TRIES // 10))


@pytest.mark.slow
def test_few_cases_contain_nine_of_ten_hard_cases() -> None:
    """Most hard cases are not rare. Drawing all of them takes a minute."""
    tests = REACHED | AXES
    missing = [name for name, test in tests.items() if not any(map(test, drawn(tries=FEW)))]
    assert len(missing) <= len(tests) // 10, missing


def test_cases_contain_every_kind_layout_and_policy() -> None:
    """All kinds of layers, named layouts and replica policies are drawn, and other layouts too."""
    few = drawn(tries=FEW)
    groups = [g.name.partition(" on ")[0] for case in few for g in case.producer.groups]
    assert {*KINDS, "draft"} == set(groups)
    layouts = {each for case in few for each in letters(case.consumer)}
    assert set(NAMED_LAYOUTS) < layouts
    names = {c.replica_policy.name for c in few}
    assert set(EVERY_POLICY) == names


def test_cases_need_less_than_300_kilobytes_of_each_rank() -> None:
    """A law runs thousands of transfers, so each must take milliseconds."""
    for case in drawn(tries=FEW)[::2]:
        _, storage = kvspec.allocate(case.consumer, kvspec.RankId(), case.consumer_pool)
        assert sum(flat.size for flat in storage.values()) < 300_000
