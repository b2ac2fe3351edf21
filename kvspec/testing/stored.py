"""Prompts that one engine stores and another one loads, and kvspec's own store.

Invariant: `OwnStore` uses the planner of stored pages only through the interface for connectors.

How it works:
    `stored_cases` draws the steps of the producer. A model with states loads up to the end of the
    last step that ends at the end of a page. `kvspec.testing.laws.stored_pages` has an example.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from math import lcm
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.check.counting import context_of
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.ownership.parallel import RankId
from kvspec.stored.names import ModelIdentity, PromptIdentity, page_names, space_of
from kvspec.stored.objects import MemoryObjects, Objects
from kvspec.stored.placement import StoredSpec, is_state
from kvspec.stored.plans import plan_store, whole_engine
from kvspec.stored.store import Hit, PageStore
from kvspec.testing.kinds import KINDS
from kvspec.testing.laws.stored_pages import StoredCase, StoredStep, pages
from kvspec.testing.laws.system import System, Trial
from kvspec.testing.pairs import engine_pairs
from kvspec.testing.parallels import sample
from kvspec.testing.requests import tables
from kvspec.testing.supports import EVERYTHING, Supports
from kvspec.testing.world import World

STORABLE = tuple(kind for kind in KINDS if kind not in ("cross", "ring"))
"""The kinds of layers that can be stored."""
_LONGEST_PROMPT = 48


def has_states(engine: EngineSpec) -> bool:
    """Return whether *engine* has a recurrent state."""
    return any(is_state(group.spec) for group in engine.groups)


@st.composite
def stored_cases(
    draw: st.DrawFn, kinds: Sequence[str] = STORABLE, *, supports: Supports = EVERYTHING
) -> StoredCase:
    """Draw a prompt that one engine stores and another one loads.

    Args:
        draw: Passed by Hypothesis.
        kinds: Keys of `KINDS` that can be stored.
        supports: What may be drawn.
    """
    producer, consumer = _same_layers(*draw(engine_pairs(kinds, 4, supports=supports)))
    blocks = [
        _virtual_block(engine) if supports.equal_blocks else 1 for engine in (producer, consumer)
    ]
    placement = draw(placements(producer, lcm(*blocks), own_cut=not supports.placements))
    size = placement.page_tokens
    most = max(2 * size, _LONGEST_PROMPT)
    ends = draw(st.lists(st.integers(1, most), max_size=2, unique=True))
    # Most steps end at the end of a page, where a state can be stored.
    whole = draw(st.lists(st.integers(1, most // size), min_size=1, max_size=2, unique=True))
    lengths = sorted({*ends, *(pages * size for pages in whole)})
    # Pages behind the last state are stored without a state, so they cannot be loaded.
    if has_states(producer) and size > 1 and draw(st.booleans()):
        lengths.append((lengths[-1] // size + 1) * size + draw(st.integers(1, size - 1)))
    steps = []
    for before, after in pairwise([0, *lengths]):
        start = min(before // size, after // size) * size
        steps.append(draw(_side(producer, after, start, whole_engine(producer), supports)))
    stored = lengths[-1] // size
    if has_states(producer):
        stored = max(length // size for length in lengths if length % size == 0)
    row = lcm(*(max(1, part.tokens_per_state) for g in consumer.groups for part in g.own_parts))
    if supports.prefixes == "blocks":
        row = lcm(row, _virtual_block(consumer), _virtual_block(producer))
    most_cached = 0 if supports.prefixes == "none" else stored * size // row
    cached = row * draw(sample(0, 0, 0, *range(most_cached + 1)))
    # Without the last step, less may be stored.
    ranks = producer.parallel.ranks
    absent = draw(sample(None, draw(st.sampled_from(ranks)))) if len(ranks) > 1 else None
    return StoredCase(
        producer=producer,
        consumer=consumer,
        placement=placement,
        steps=tuple(steps),
        loaded=draw(_side(consumer, stored * size, cached, None, supports)),
        absent=absent,
    )


def _virtual_block(engine: EngineSpec) -> int:
    """Return the tokens of whole blocks of all groups of *engine* that have tokens."""
    blocks = (
        group.spec.block_size * context_of(engine, RankId(), group)[1]
        for group in engine.groups
        if not is_state(group.spec)
    )
    return lcm(*blocks)


@st.composite
def _side(
    draw: st.DrawFn,
    engine: EngineSpec,
    length: int,
    cached: int,
    reader: EngineSpec | None,
    supports: Supports,
) -> StoredStep:
    """Draw the tables of *engine* for a prompt of *length* tokens, without the *cached* ones."""
    request = TransferRequest(
        request_id="r",
        num_tokens=length,
        cached_tokens=cached,
        producer_blocks={},
        consumer_blocks={},
    )
    own, pool = draw(tables(engine, request, reader, supports))
    both = attrs.evolve(request, producer_blocks=own, consumer_blocks=own)
    return StoredStep(request=both, pool=pool)


def _same_layers(producer: EngineSpec, consumer: EngineSpec) -> tuple[EngineSpec, EngineSpec]:
    """Return both engines without the layers that only one of them excludes."""
    excluded = {*producer.excluded, *consumer.excluded}

    def without(engine: EngineSpec) -> EngineSpec:
        groups = [
            attrs.evolve(group, excluded=[name for name in group.layers if name in excluded])
            for group in engine.groups
        ]
        return attrs.evolve(engine, groups=groups)

    return without(producer), without(consumer)


@st.composite
def placements(
    draw: st.DrawFn, engine: EngineSpec, multiple: int = 1, *, own_cut: bool = False
) -> StoredSpec:
    """Draw a placement to which *engine* can store pages.

    Args:
        draw: Passed by Hypothesis.
        engine: The engine.
        multiple: The tokens of a page are a multiple of it.
        own_cut: Whether only the tokens of a page matter, since the store has a cut of its own.
    """
    sizes, parts = engine.parallel, [p for group in engine.groups for p in group.own_parts]
    rows = lcm(sizes.interleave_size, *(max(1, part.tokens_per_state) for part in parts))
    step = lcm(rows * sizes.context_size, multiple)
    layers = [layer for layer in engine.homes if layer not in engine.excluded]
    stages = tuple(names for _, names in sorted(engine.by_stage(layers).items()))
    page_tokens = step * draw(st.integers(1, max(1, 16 // step)))
    if own_cut:
        return StoredSpec.of(engine, page_tokens=page_tokens, head_groups=1)
    fields: dict[str, Any] = {
        "page_tokens": page_tokens,
        "layer_ranges": stages if sizes.pp_size > 1 else draw(sample(None, stages)),
        "context_size": sizes.context_size,
        "interleave_size": sizes.interleave_size,
        "layout": draw(sample("BLKNHC", "BLKNHC", "BLNHC", "BLHNC", "BLKHNC")),
    }
    most = max(part.units // part.granularity for part in parts)
    counts = dict.fromkeys((draw(st.integers(1, most)), most, *range(most - 1, 0, -1)))
    for count in counts:
        placement = StoredSpec.of(engine, head_groups=count, **fields)
        try:
            plan_store(engine, placement)
        except SpecError as error:
            if error.field != "head_groups":
                raise
        else:
            return placement
    # The parts of some states have no division by which each chunk belongs to one rank.
    return draw(st.nothing())


def own_names(
    model: ModelIdentity, prompt: PromptIdentity, placement: StoredSpec, token_ids: Sequence[int]
) -> tuple[str, ...]:
    """Return kvspec's names of the whole pages of a prompt."""
    space = space_of(model, placement.digest)
    return page_names(space, token_ids, placement.page_tokens, prompt)


class OwnStore:
    """kvspec's own store with the pages of one prompt. See `laws.stored_pages.Storing`."""

    def __init__(
        self,
        model: ModelIdentity,
        prompt: PromptIdentity,
        placement: StoredSpec,
        token_ids: Sequence[int],
        objects: Objects | None = None,
    ) -> None:
        """Open the store. The *objects* are in the memory of this process by default."""
        self.store = PageStore(placement, model, MemoryObjects() if objects is None else objects)
        self.names = self.store.names(token_ids, prompt)
        self.page_tokens = placement.page_tokens
        self.hit: Hit | None = None

    def save(self, here: World, tokens: range) -> None:
        """Save the pages that are whole after these *tokens*."""
        request, engine = here.case.request, here.case.producer
        tables, length = request.producer_blocks, request.num_tokens
        states = {
            group.name: {length: _state_block(group.spec.block_size, tables[group.name], length)}
            for group in engine.groups
            if is_state(group.spec) and group.name in tables
        }
        first, stop = tokens.start // self.page_tokens, tokens.stop // self.page_tokens
        for cache, _ in here.producers.values():
            rank = self.store.rank_pages(cache, buffer_bytes=2 * self.page_tokens)
            rank.save(self.names, first, stop - first, tables, states)

    def lookup(self, consumer: EngineSpec) -> int:
        """Return how many tokens *consumer* can load, and pin their objects."""
        self.hit = self.store.lookup(self.names, consumer)
        return self.hit.num_tokens

    def load(self, here: World) -> None:
        """Load what `lookup` has found."""
        request: Any = here.case.request
        with self.hit or self.store.lookup(self.names, here.case.consumer) as hit:
            for cache, _ in here.consumers.values():
                rank = self.store.rank_pages(cache, buffer_bytes=2 * self.page_tokens)
                cached = request.cached_tokens
                rank.load(hit, hit.num_pages, request.consumer_blocks, cached_tokens=cached)


def _state_block(block_size: int, table: BlockTable, length: int) -> int:
    """Return the block of the state after *length* tokens."""
    at = 0 if len(table.block_ids) == 1 else (length - 1 - table.first_token) // block_size
    return int(table.block_ids[at])


def two_hops(case: StoredCase, objects: Objects | None = None) -> list[str]:
    """Return the faults of kvspec's own store in *case*, by law 16.

    Args:
        case: The prompt.
        objects: The place of the objects. Memory of this process by default.
    """
    store = partial(OwnStore, objects=objects)
    stored: Any = case
    return list(pages(Trial(System(name="kvspec", pages=store), stored)))
