"""Draw pairs of engines for rare cases.

The content of a layer may span all heads of a rank. Turns of context ranks may begin inside of a
block in memory. The conv states of two engines may have unequal numbers of rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.check.counting import rank_units
from kvspec.descriptors.request import BlockTable
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs import LayerSpec, MambaSpec
from kvspec.testing import Case, strategies
from kvspec.testing.engines import engines, groups, laid_out
from kvspec.testing.kinds import KINDS
from kvspec.testing.parallels import explicit_shardings, is_state, sample

# Pairs are filtered for equal ranges of heads. Larger engines rarely agree.
_SPANNING_RANKS = 4


# Kinds with a conv state. Speculative tokens add rows to it.
STATES = ("mamba1", "mamba2", "gated delta net", "short conv")


def spanning_cases() -> st.SearchStrategy[Case]:
    """Draw a transfer with content that spans all heads of a rank.

    Both sides shard the heads equally, because such content cannot be divided.
    """
    return spanning_pairs().flatmap(strategies.case_of)


def interleaved_cases() -> st.SearchStrategy[Case]:
    """Draw a transfer between engines with equal context ranks and an interleave of 6 tokens.

    Blocks in memory have 4 or 12 tokens. So the 6 tokens of one turn of a rank may begin inside of
    a block.
    """
    return interleaved_pairs().flatmap(strategies.case_of)


@st.composite
def spanning_pairs(draw: st.DrawFn) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines with a group whose packed content or opaque page spans the heads of a rank.

    Such content cannot be divided by head, so each range of heads exists on both sides.
    """
    drawn: Any = draw(KINDS["full, opaque"])
    row, block = drawn.tokens_per_state, drawn.block_size
    pages = [size for size in range(row, block, row) if block % size == 0]
    opaque = {"page_format": "opaque:drawn"}
    spans: Any = ({"spans_heads": True}, opaque, *({**opaque, "page_block_size": p} for p in pages))
    explicit = draw(st.sampled_from((True, False, False)))
    # Explicit shardings of packed content are the rarest case, so they are drawn more often.
    choices = (spans[0],) * 4 + spans if explicit else spans
    spec: LayerSpec = attrs.evolve(drawn, **draw(st.sampled_from(choices)))
    packed = KVCacheGroup(name="packed", layers=("packed.0", "packed.1"), spec=spec)
    model = draw(st.sampled_from(((), draw(groups(("MLA",))))))
    if explicit:
        part = packed.spec.parts[0]
        sides = draw(_same_sharding(part.units, part.granularity, _SPANNING_RANKS))
        producer, consumer = (
            draw(laid_out(EngineSpec(groups=(packed, *model), parallel=parallel)))
            for parallel in sides
        )
        return producer, consumer
    any_engine = engines((packed, *model), _SPANNING_RANKS)
    producer = draw(any_engine)
    return producer, draw(any_engine.filter(lambda engine: _same_ranges(producer, engine, packed)))


@st.composite
def _same_sharding(
    draw: st.DrawFn, units: int, granularity: int, largest: int
) -> tuple[ParallelConfig, ParallelConfig]:
    """Draw two explicit shardings with the same ranges of units, for equal or unequal TP sizes."""
    # With one rank there is only one range, so two ranks are the smallest size if they can differ.
    least = min(2, units // granularity)
    sizes = [draw(st.integers(least, largest)) for _ in range(2)]
    ranges = draw(explicit_shardings(units, granularity, min(sizes)))
    owned = sorted({units for units in ranges if units}, key=lambda units: units.start)
    sides = []
    for size in sizes:
        more = [draw(st.sampled_from((*owned, range(0)))) for _ in range(size - len(owned))]
        sharded = tuple(draw(st.permutations([*owned, *more])))
        sides.append(ParallelConfig(tp_size=size, shardings={units: sharded}))
    return sides[0], sides[1]


@st.composite
def interleaved_pairs(draw: st.DrawFn) -> tuple[EngineSpec, EngineSpec]:
    """Draw engines with equal context ranks, whose turns may begin inside of a block in memory.

    A block has 12 or 24 tokens, a block in memory has 4 or 12, and a turn has 6. So a prefix or a
    prompt may end inside of a block in memory on one rank, and between two on another.
    """
    drawn: Any = draw(KINDS[draw(sample("full", "sliding window", "MLA"))])
    heads = draw(st.integers(1, 3)) if hasattr(drawn, "total_num_kv_heads") else 0
    fields = {"total_num_kv_heads": heads} if heads else {}
    size = draw(st.integers(2, 3))
    sharded = {heads: (range(heads),) * size} if heads > 1 else {}
    parallel = ParallelConfig(tp_size=size, dcp_size=size, interleave_size=6, shardings=sharded)
    sides = []
    for _ in range(2):
        block = draw(sample(12, 24))
        spec: LayerSpec = attrs.evolve(drawn, block_size=block, tokens_per_state=1, **fields)
        group = KVCacheGroup(name="dealt", layers=("dealt.0", "dealt.1"), spec=spec)
        engine = draw(laid_out(EngineSpec(groups=(group,), parallel=parallel)))
        group = engine.groups[0]
        # Padded pages cannot be cut into smaller blocks.
        if group.spec.page_size_padded is None:
            group = attrs.evolve(group, kernel_block_size=draw(sample(4, 4, 4, 12)))
        sides.append(attrs.evolve(engine, groups=(group,)))
    return sides[0], sides[1]


def _same_ranges(producer: EngineSpec, consumer: EngineSpec, group: KVCacheGroup) -> bool:
    """Return whether the ranks of both engines hold the same ranges of the units of *group*."""
    ranges = []
    for engine in (producer, consumer):
        own = engine.group(group.name)  # The group of this engine: it may have its own shardings.
        part = own.spec.parts[0]
        sharded = {tuple(rank_units(engine, rank, part, own)) for rank in engine.parallel.ranks}
        ranges.append(sharded - {()})
    return ranges[0] == ranges[1]


@st.composite
def common_cases(draw: st.DrawFn) -> Case:
    """Draw a transfer of conv states, where either side may have more rows than the other.

    Only the rows that both sides have move. See `Case.common_states`.
    """
    model = draw(groups(STATES))
    producer, consumer = (draw(engines(draw(with_own_rows(model)), 4)) for _ in range(2))
    return draw(strategies.case_of((producer, consumer), common_states=True))


@st.composite
def snapshot_cases(draw: st.DrawFn) -> Case:
    """Draw a transfer that moves states at several positions, each in a block of its own.

    Some positions may be cached. A block that no state needs may be null.
    """
    kind = draw(st.sampled_from(STATES))
    case = draw(strategies.cases([kind, "full", "sliding window"], largest=2).filter(_has_states))
    request, sizes = case.request, _state_sizes(case)
    positions = [request.num_tokens]
    # From behind, so that no two positions are in one block of either side.
    while len(positions) < 4 and draw(st.integers(0, 3)):
        most = min((positions[0] - 1) // size * size for size in sizes)
        if not most:
            break
        # Mostly at the end of a block. A position inside one is that of a partial tail.
        positions.insert(0, draw(sample(most, most, draw(st.integers(1, most)))))
    cached = request.cached_tokens
    if isinstance(cached, int):
        cached = {group.name: cached for group in case.consumer.groups}
    some = draw(sample(0, 0, *positions))
    states = {group.name: some for group in case.consumer.groups if is_state(group.spec)}
    fields: dict[str, Any] = {"state_positions": positions, "cached_tokens": {**cached, **states}}
    pools = {}
    for side, engine in (("producer", case.producer), ("consumer", case.consumer)):
        tables = dict(getattr(request, f"{side}_blocks"))
        pool = dict(getattr(case, f"{side}_pool"))
        for group in engine.groups:
            if group.name in tables and is_state(group.spec):
                used = {(end - 1) // group.spec.block_size for end in positions if end > some}
                table = draw(_snapshot_table(group, used, positions[-1], engine.null_block))
                tables[group.name] = table
                pool[group.name] = int(table.block_ids.max()) + 2
        fields[f"{side}_blocks"], pools[f"{side}_pool"] = tables, pool
    return attrs.evolve(case, request=attrs.evolve(request, **fields), **pools)


@st.composite
def _snapshot_table(
    draw: st.DrawFn, group: KVCacheGroup, used: set[int], end: int, null: int | None
) -> BlockTable:
    """Draw a table with the blocks *used*, up to the block after that of token *end* - 1."""
    size = group.spec.block_size
    blocks = range(draw(sample(0, min(used, default=0))), -(-end // size) + 1)
    free = [block for block in range(len(blocks) + 2) if block != null]
    ids = draw(st.permutations(free))[: len(blocks)]
    if null is not None and draw(st.booleans()):
        ids = [at if block in used else null for block, at in zip(blocks, ids, strict=True)]
    return BlockTable(ids, blocks.start * size)


def _state_sizes(case: Case) -> list[int]:
    """Return the block sizes of the groups of states of both engines."""
    groups = [*case.producer.groups, *case.consumer.groups]
    return [group.spec.block_size for group in groups if is_state(group.spec)]


def _has_states(case: Case) -> bool:
    """Return whether a group of states has a prompt that is longer than its blocks."""
    sizes = _state_sizes(case)
    return bool(sizes) and case.request.num_tokens > max(sizes) and not case.shared


@st.composite
def with_own_rows(draw: st.DrawFn, model: Sequence[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    """Draw the speculative tokens of one engine. Each adds a row to the conv states of *model*."""
    own_groups = []
    for group in model:
        spec, more = group.spec, draw(st.integers(0, 2))
        if isinstance(spec, MambaSpec):
            parts = tuple(
                attrs.evolve(part, states=part.states + more) if part.tensor == "conv" else part
                for part in spec.parts
            )
            spec = attrs.evolve(spec, state_parts=parts)
        own_groups.append(attrs.evolve(group, spec=spec))
    return tuple(own_groups)
