"""Requests of a step: which pages of a prompt are whole in memory, and what moves for them.

Invariant: a request of a store moves whole pages only. A page whose tokens are not all in memory,
or a state that has not seen exactly the tokens of its prefix, is never part of a request.

How it works:
    An engine computes a prompt in steps. A window layer gives back the blocks that its window has
    passed: its table then has the null block there. So pages are stored step by step. Here a page
    has 8 tokens, a block has 4, the window is 8, and 16 tokens are computed in each step:

        after step    table of the window group    whole pages
        16 tokens     [5, 2, 7, 1]                 0, 1
        32 tokens     [0, 0, 0, 1, 6, 3, 9, 8]     2, 3 (page 1 has a null block now)

    The second step passes ``pages=range(2, 4)``, the pages that it has completed.

    A state belongs to the page that ends where the state ends. The caller names the positions at
    which it has a state, and the block of each: ``{"state": {16: 3, 32: 4}}``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from math import lcm

import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import BlockTable, TransferRequest, check_ids, check_no_null
from kvspec.descriptors.tiles import check_once
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import mapping, positive_int
from kvspec.ownership.tokens import Ints
from kvspec.stored.placement import is_state
from kvspec.stored.plans import PageLoadPlan, StorePlan

Tables = Mapping[str, BlockTable | Sequence[int]]
"""Block tables by the names of the groups of the engine. Plain ids start at token 0."""
StateBlocks = Mapping[str, Mapping[int, int]]
"""For each group of states: the block of the state, by the number of tokens that it has seen."""


def check_states(engine: EngineSpec, states_at: StateBlocks) -> dict[str, dict[int, int]]:
    """Return *states_at* after a check of its groups, positions and blocks."""
    known = [group.name for group in engine.groups if is_state(group.spec)]
    checked: dict[str, dict[int, int]] = {}
    for name, blocks in mapping("states_at", states_at, "groups to blocks by position").items():
        if name not in known:
            raise SpecError("states_at", name, f"groups of states: {', '.join(known) or 'none'}")
        field = f"states_at[{name!r}]"
        checked[name] = {
            positive_int(field, position): positive_int(field, block, least=0)
            for position, block in mapping(field, blocks, "positions to blocks").items()
        }
    return checked


def whole_pages(
    plan: StorePlan,
    group: str,
    pages: range,
    tables: Tables,
    states_at: StateBlocks,
) -> tuple[int, ...]:
    """Return those of *pages* that are whole in the memory of the engine.

    Args:
        plan: The plan of the engine.
        group: Name of a stored group.
        pages: Numbers of pages whose tokens have all been computed.
        tables: Block tables of the engine, also of groups that are not stored.
        states_at: The states of the engine.

    Raises:
        SpecError: If a table is missing.
    """
    size = plan.placement.page_tokens
    whole = np.ones(len(pages), np.bool_)
    ends = (np.arange(pages.start, pages.stop) + 1) * size
    for own in plan.sources(group):
        if is_state(own.spec):
            whole &= np.isin(ends, [*states_at.get(own.name, {})])
            continue
        whole &= _held(plan.engine, own, ends - size, ends, _table(tables, own.name))
    return tuple((pages.start + np.flatnonzero(whole)).tolist())


def check_store_tables(
    plan: StorePlan,
    group: str,
    pages: Sequence[int],
    tables: Tables,
    states_at: StateBlocks,
    num_blocks: Mapping[str, int],
) -> None:
    """Check all blocks that a save reads, before it writes its first object.

    Args:
        plan: The plan of the engine.
        group: Name of a stored group.
        pages: Numbers of the pages that `whole_pages` has returned.
        tables: As in `whole_pages`.
        states_at: As in `whole_pages`.
        num_blocks: Blocks of the groups in the memory of the rank.

    Raises:
        SpecError: If a block is not in memory, or it is in two places.
    """
    size = plan.placement.page_tokens
    for own in plan.sources(group):
        if own.name not in num_blocks or not pages:
            continue
        if is_state(own.spec):
            held = {(page + 1) * size: states_at[own.name][(page + 1) * size] for page in pages}
            if plan.engine.null_block in held.values():
                expected = f"blocks that are not the null block {plan.engine.null_block}"
                raise SpecError(f"states_at[{own.name!r}]", held, expected)
            ids = BlockTable([*held.values()]).block_ids
        else:
            # Pages may share a block, so count each place of the table once.
            table, block = _table(tables, own.name), plan.engine.virtual_block(own)
            read = np.zeros(len(table.block_ids), np.bool_)
            for run in runs_of(pages):
                tokens = range(run.start * size, run.stop * size)
                first = (tokens.start - table.first_token) // block
                read[first : (tokens.stop - 1 - table.first_token) // block + 1] = True
            ids = table.block_ids[read]
        with _argument("states_at" if is_state(own.spec) else "tables"):
            check_ids("producer", own.name, ids, num_blocks[own.name])
            check_once("producer", own.name, BlockTable(ids), ids)


@contextmanager
def _argument(name: str) -> Iterator[None]:
    """Name the argument of the caller in an error about a block table of a request."""
    try:
        yield
    except SpecError as error:
        _, bracket, rest = error.field.partition("[")
        field = f"{name}{bracket}{rest}"
        raise SpecError(field, error.value, error.expected, rule=error.rule) from None


def _held(
    engine: EngineSpec,
    group: KVCacheGroup,
    starts: Ints,
    ends: Ints,
    table: BlockTable,
) -> npt.NDArray[np.bool_]:
    """Return for each range of tokens whether all its blocks are in *table*, and none is null."""
    block = engine.virtual_block(group)
    table.check_start(f"tables[{group.name!r}]", block)
    null = table.block_ids == (-1 if engine.null_block is None else engine.null_block)
    nulls = np.append(0, np.cumsum(null))
    first = (starts - table.first_token) // block
    last = (ends - 1 - table.first_token) // block + 1
    inside = (first >= 0) & (last <= len(null))
    most = len(null)
    same: npt.NDArray[np.bool_] = nulls[last.clip(0, most)] == nulls[first.clip(0, most)]
    return inside & same


def _table(tables: Tables, name: str) -> BlockTable:
    if name not in tables:
        raise SpecError("tables", sorted(tables, key=repr), f"a block table for group {name!r}")
    table = tables[name]
    return table if isinstance(table, BlockTable) else BlockTable(table)


def runs_of(pages: Sequence[int]) -> Iterator[range]:
    """Yield the ranges of consecutive numbers in *pages*, which ascend.

    >>> [*runs_of([0, 1, 4, 5, 6])]
    [range(0, 2), range(4, 7)]
    """
    cuts = [at for at, (one, other) in enumerate(pairwise(pages), 1) if other != one + 1]
    for start, stop in pairwise([0, *cuts, len(pages)]):
        if start < stop:
            yield range(pages[start], pages[stop - 1] + 1)


def store_requests(
    plan: StorePlan,
    group: str,
    pages: Sequence[int],
    tables: Tables,
    states_at: StateBlocks,
) -> Iterator[TransferRequest]:
    """Yield the requests that gather *pages* into the slots 0, 1, ... of a buffer.

    Args:
        plan: The plan of the engine.
        group: Name of a stored group.
        pages: Numbers of whole pages, ascending. The first one goes to slot 0.
        tables: As in `whole_pages`.
        states_at: As in `whole_pages`.
    """
    size, sources = plan.placement.page_tokens, plan.sources(group)
    if is_state(plan.placement.engine.group(group).spec):
        for slot, page in enumerate(pages):
            tokens = (page + 1) * size
            blocks = {own.name: [states_at[own.name][tokens]] for own in sources}
            yield TransferRequest(
                request_id=group,
                num_tokens=tokens,
                producer_blocks=blocks,
                consumer_blocks={group: [slot]},
            )
        return
    own_tables = {own.name: _table(tables, own.name) for own in sources}
    slot = 0
    for run in runs_of(pages):
        slots = BlockTable(range(slot, slot + len(run)), run.start * size)
        slot += len(run)
        yield TransferRequest(
            request_id=group,
            num_tokens=run.stop * size,
            cached_tokens={group: run.start * size},
            producer_blocks=own_tables,
            consumer_blocks={group: slots},
        )


def load_pages(plan: PageLoadPlan, group: str, num_pages: int, cached_tokens: int) -> range:
    """Return the pages of a stored group that a load of *num_pages* pages reads.

    Args:
        plan: The plan of the engine.
        group: Name of a stored group.
        num_pages: Pages of the prompt from which the engine continues.
        cached_tokens: Leading tokens that the engine has already.
    """
    pages = plan.live_pages(group, num_pages)
    if cached_tokens >= num_pages * plan.placement.page_tokens:
        return range(num_pages, num_pages)
    return range(max(pages.start, cached_tokens // plan.placement.page_tokens), num_pages)


def load_request(
    plan: PageLoadPlan,
    group: str,
    pages: range,
    num_pages: int,
    tables: Tables,
    cached_tokens: int,
) -> TransferRequest:
    """Return the request that scatters *pages* out of the slots 0, 1, ... of a buffer.

    Args:
        plan: The plan of the engine.
        group: Name of a stored group.
        pages: Pages in the buffer, a part of `load_pages`.
        num_pages: As in `load_pages`.
        tables: Block tables of the engine.
        cached_tokens: As in `load_pages`.
    """
    size, targets = plan.placement.page_tokens, plan.targets(group)
    own_tables = {own.name: _table(tables, own.name) for own in targets}
    if is_state(plan.placement.engine.group(group).spec):
        return TransferRequest(
            request_id=group,
            num_tokens=pages.stop * size,
            producer_blocks={group: [0]},
            consumer_blocks=own_tables,
        )
    starts: dict[str, int] = {}
    for own in targets:
        # The row of the first live token moves whole.
        row = lcm(*(part.tokens_per_state for part in own.own_parts))
        live = own.spec.live_tokens(num_pages * size).start // row * row
        starts[own.name] = max(live, cached_tokens, pages.start * size)
    return TransferRequest(
        request_id=group,
        num_tokens=pages.stop * size,
        cached_tokens=starts,
        producer_blocks={group: BlockTable(range(len(pages)), pages.start * size)},
        consumer_blocks=own_tables,
    )


def check_load_tables(
    plan: PageLoadPlan, group: str, request: TransferRequest, num_blocks: Mapping[str, int]
) -> None:
    """Check all blocks that a load writes, before its first batch.

    Args:
        plan: The plan of the engine.
        group: Name of a stored group.
        request: The request of all pages of the load.
        num_blocks: Blocks of the groups in the memory of the rank.

    Raises:
        SpecError: If a token has no block, a block is not in memory, or it is in two places.
    """
    engine = plan.engine
    for own in plan.targets(group):
        if own.name not in num_blocks:
            continue
        table, field = request.table("consumer", own.name), f"tables[{own.name!r}]"
        size, stop = engine.virtual_block(own), request.num_tokens
        tokens = range(request.cached(own.name, own.spec), stop)
        if is_state(own.spec):
            at = table.state_block(field, own.spec.block_size, stop - 1)
            table, size = BlockTable(table.block_ids[at : at + 1], stop - 1), 1
            tokens = range(stop - 1, stop)
        table.check_start(field, size)
        held = table.tokens(size)
        if not tokens:
            continue
        if tokens.start < held.start or held.stop < stop:
            expected = f"blocks for tokens {tokens.start}..{stop - 1}"
            raise SpecError(field, held, expected)
        missing = table.without_block(tokens, size, engine.null_block)
        ids = table.blocks_of(tokens, size)
        with _argument("tables"):
            check_no_null("consumer", own.name, engine.null_block, missing, tokens)
            check_ids("consumer", own.name, ids, num_blocks[own.name])
            check_once("consumer", own.name, table, ids)
