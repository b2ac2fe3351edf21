"""The law of stored pages: two hops are one hop.

An engine stores the pages of a prompt step by step. Another engine loads them. Then its memory must
be as after a direct transfer between the two: the byte oracle judges both in the same way.

Invariant: the law uses the planner of stored pages only through the interface for connectors.

How it works:
    Each step of the producer is a memory of its own, with the tokens up to the end of the step and
    with block tables of its own. The last step of a model with states ends where the state is:

        page tokens 4, steps end at 6, 8, 13
        step    finished pages    state at     stored
        6       0                 6            page 0, without a state
        8       1                 8            page 1, with the state
        13      2                 13           page 2, without a state

    The consumer then finds 3 pages without states, or 2 pages with states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import lcm
from typing import Any

import attrs
from hypothesis import strategies as st

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.stored.names import ModelIdentity, PromptIdentity
from kvspec.stored.objects import MemoryObjects, Objects
from kvspec.stored.placement import StoredSpec, is_state
from kvspec.stored.plans import plan_store, whole_engine
from kvspec.stored.store import PageStore
from kvspec.testing import oracle
from kvspec.testing.kinds import KINDS
from kvspec.testing.pairs import engine_pairs
from kvspec.testing.parallels import sample
from kvspec.testing.requests import tables
from kvspec.testing.supports import EVERYTHING, Supports
from kvspec.testing.world import SEED, held, snapshot

STORABLE = tuple(kind for kind in KINDS if kind not in ("cross", "ring"))
"""The kinds of layers that can be stored."""
STORED_MODEL = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
_LONGEST_PROMPT = 48


@attrs.frozen(kw_only=True)
class StoredStep:
    """Block tables and pools of one engine at one length of the prompt.

    Attributes:
        request: The request with the length. Its tables are those of the engine on both sides.
        pool: Number of blocks of each group, by its name.
    """

    request: TransferRequest
    pool: Mapping[str, int]


@attrs.frozen(kw_only=True)
class StoredCase:
    """A prompt that one engine stores, and another one loads.

    Attributes:
        producer: The engine that stores.
        consumer: The engine that loads.
        placement: The placement of the pages.
        steps: The lengths of the prompt after each step of the producer, with its tables.
        loaded: The tables of the consumer. The length is that of the longest stored prefix.
    """

    producer: EngineSpec
    consumer: EngineSpec
    placement: StoredSpec
    steps: tuple[StoredStep, ...]
    loaded: StoredStep

    @property
    def token_ids(self) -> list[int]:
        """The tokens of the prompt."""
        return list(range(self.steps[-1].request.num_tokens))


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
    placement = draw(placements(producer))
    size = placement.page_tokens
    most = max(size, _LONGEST_PROMPT)
    ends = draw(st.lists(st.integers(1, most), max_size=2, unique=True))
    # Most steps end at the end of a page, where a state can be stored.
    whole = draw(st.lists(st.integers(1, most // size), min_size=1, max_size=2, unique=True))
    lengths = sorted({*ends, *(pages * size for pages in whole)})
    steps = []
    for before, after in pairwise([0, *lengths]):
        start = min(before // size, after // size) * size
        steps.append(draw(_side(producer, after, start, whole_engine(producer), supports)))
    stored = lengths[-1] // size
    if has_states(producer):
        stored = max(length // size for length in lengths if length % size == 0)
    row = lcm(*(max(1, part.tokens_per_state) for g in consumer.groups for part in g.own_parts))
    cached = row * draw(sample(0, 0, 0, *range(stored * size // row + 1)))
    return StoredCase(
        producer=producer,
        consumer=consumer,
        placement=placement,
        steps=tuple(steps),
        loaded=draw(_side(consumer, stored * size, cached, None, supports)),
    )


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
def placements(draw: st.DrawFn, engine: EngineSpec) -> StoredSpec:
    """Draw a placement to which *engine* can store pages."""
    sizes, parts = engine.parallel, [p for group in engine.groups for p in group.own_parts]
    rows = lcm(sizes.interleave_size, *(max(1, part.tokens_per_state) for part in parts))
    step = rows * sizes.context_size
    layers = [layer for layer in engine.homes if layer not in engine.excluded]
    stages = tuple(names for _, names in sorted(engine.by_stage(layers).items()))
    fields: dict[str, Any] = {
        "page_tokens": step * draw(st.integers(1, max(1, 16 // step))),
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


def two_hops(case: StoredCase, objects: Objects | None = None) -> list[str]:
    """Return a line for each byte that is wrong after the load.

    Args:
        case: The prompt.
        objects: The place of the objects. Memory of this process by default.
    """
    store = PageStore(case.placement, STORED_MODEL, MemoryObjects() if objects is None else objects)
    names = store.names(case.token_ids, PromptIdentity.of_text())
    done = 0
    for step in case.steps:
        _save_step(case, store, names, done, step)
        done = step.request.num_tokens
    loaded, size = case.loaded, case.placement.page_tokens
    hit = store.lookup(names, case.consumer)
    if hit.num_tokens != loaded.request.num_tokens:
        return [f"lookup: expected {loaded.request.num_tokens} tokens, got {hit.num_tokens}"]
    ranks = held(case.consumer, loaded.pool)
    blocks = loaded.request.consumer_blocks
    for rank, (_, storage) in ranks.items():
        own = case.consumer, rank, storage, loaded.pool, blocks, loaded.request
        oracle.spoil(*own, seed=SEED)
    before = snapshot(ranks)
    faults: list[str] = []
    cached: Any = loaded.request.cached_tokens
    for rank, (cache, storage) in ranks.items():
        pages = store.rank_pages(cache, buffer_bytes=2 * size)
        pages.load(hit, hit.num_pages, blocks, cached_tokens=cached)
        memory = case.consumer, rank, before[rank], storage, loaded.pool, blocks, loaded.request
        faults += oracle.check(*memory, seed=SEED, source=case.producer)
    hit.close()
    return faults


def _save_step(
    case: StoredCase, store: PageStore, names: tuple[str, ...], done: int, step: StoredStep
) -> None:
    """Save the pages that the producer has finished in *step*, after *done* tokens."""
    size, engine, length = case.placement.page_tokens, case.producer, step.request.num_tokens
    blocks = step.request.producer_blocks
    states = {
        group.name: {length: _state_block(group.spec.block_size, blocks[group.name], length)}
        for group in engine.groups
        if is_state(group.spec) and group.name in blocks
    }
    ranks = held(engine, step.pool)
    for rank, (cache, storage) in ranks.items():
        oracle.fill(engine, rank, storage, step.pool, blocks, step.request, seed=SEED)
        pages = store.rank_pages(cache, buffer_bytes=2 * size)
        first = done // size
        pages.save(names, first, length // size - first, blocks, states)


def _state_block(block_size: int, table: BlockTable, length: int) -> int:
    """Return the block of the state after *length* tokens."""
    at = 0 if len(table.block_ids) == 1 else (length - 1 - table.first_token) // block_size
    return int(table.block_ids[at])
