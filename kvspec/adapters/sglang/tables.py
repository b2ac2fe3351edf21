"""Read SGLang's slots of one request as block tables.

Invariant: each page of a table has consecutive tokens in consecutive slots. Slots in another order
are refused. So a table never depends on the first slot of a page alone.

How it works:
    With pages of 4 tokens, the slots of a request with 10 tokens may be:

        token    0   1   2   3 |  4   5   6   7 |  8   9
        slot     0   0   0   0 | 20  21  22  23 |  8   9
        page     0             |  5             |  2

    Slot 0 for all tokens of a page means that a window has passed the page: page 0 is the engine's
    null block. The slots 20, 22, 21, 23 would be refused. A recurrent state has a table of one
    block, its slot.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvspec.adapters.field_reader import chosen
from kvspec.adapters.sglang.compressed_pools import COMPRESSED_GROUPS, REQUEST_SLOT, slots_of
from kvspec.adapters.sglang.engine import NULL_PAGE
from kvspec.adapters.sglang.pools import FULL_GROUP, INDEXER, STATE, WINDOW
from kvspec.descriptors.request import BlockTable
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import instance

Slots = npt.NDArray[np.int64]


def block_tables(engine: EngineSpec, slots: Any) -> dict[str, BlockTable]:  # noqa: ANN401
    """Return the block tables of one request, by group name, for a `TransferRequest`.

    Args:
        engine: The engine, from `engine_spec`.
        slots: The slot of each token from 0 on, ``req_to_token[request, :n]``. If the engine has a
            window or states, a mapping from group to slots. Those of ``swa`` are the results of
            `translate_loc_from_full_to_swa`, and 0 for tokens that the window has passed. That of
            ``state`` is one slot of the `MambaPool`. ``request`` is `req_pool_idx`, the block of
            rings. ``indexer`` may be missing: it has the slots of ``full``. So have the groups of
            compressed latents and keys. Their states by page have the slots of ``swa``. With decode
            context parallelism, the slots count over all context ranks, as in the row of the
            request.

    Returns:
        A table for each group of the engine.

    Raises:
        SpecError: If the slots of a page are not consecutive, or a group has fewer slots than
            another.

    >>> import numpy
    >>> from kvspec.adapters.sglang import engine_spec
    >>> class MLATokenToKVPool:
    ...     page_size, dtype = 4, "uint8"
    ...     kv_buffer = [numpy.zeros((64, 1, 576), numpy.uint8)]
    >>> slots = [0, 0, 0, 0, 20, 21, 22, 23, 8, 9]
    >>> block_tables(engine_spec(MLATokenToKVPool()), slots)["full"].block_ids.tolist()
    [0, 5, 2]
    """
    instance("engine", engine, EngineSpec)
    names = [group.name for group in engine.groups]
    if isinstance(slots, Mapping):
        slots = {INDEXER: slots.get(FULL_GROUP), **slots}
    elif {WINDOW, STATE, *COMPRESSED_GROUPS} & {*names}:
        wanted = "slots by group: windows and states have their own"
        raise SpecError("slots", type(slots).__name__, wanted)
    tables: dict[str, BlockTable] = {}
    counts: dict[str, int] = {}
    for group in engine.groups:
        field = f"slots[{group.name!r}]"
        if group.name == STATE:
            tables[group.name] = state_table(field, slots.get(STATE))
            continue
        if group.spec.is_ring:
            field = f"slots[{REQUEST_SLOT!r}]"
            tables[group.name] = state_table(field, slots.get(REQUEST_SLOT), "req_pool_idx")
            continue
        source = slots_of(group.name)
        field = f"slots[{source!r}]"
        own = _array(field, chosen(slots, source))
        counts[group.name] = len(own)
        tables[group.name] = _table(field, own, engine.virtual_block(group))
    # A list without the slots that a window has passed would put its tokens at wrong places.
    most = max(counts.values(), default=0)
    for name, count in counts.items():
        if count < most:
            wanted = f"{most}, a slot for each token as other groups have, 0 where it is gone"
            raise SpecError(f"slots[{name!r}]", f"{count} slots", wanted)
    return tables


def state_table(field: str, slot: Any, of: str = "the MambaPool") -> BlockTable:  # noqa: ANN401
    """Return the table of the state in one slot, which is an int or an array of one int."""
    own = _array(field, np.asarray(slot).reshape(-1))
    if len(own) != 1 or own[0] == NULL_PAGE:
        raise SpecError(field, slot, f"one slot of {of}, from 1 on")
    return BlockTable(own)


def _array(field: str, slots: Any) -> Slots:  # noqa: ANN401
    """Return *slots*, a sequence or a tensor of ints, as an array."""
    try:
        array = np.asarray(slots)
    # numpy cannot convert ragged lists, or tensors in GPU memory.
    except (TypeError, ValueError, RuntimeError):
        array = np.empty(0, object)
    # An empty list has the type float64 in numpy.
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise SpecError(field, slots, "a slot for each token, ints >= 0")
    array = array.astype(np.int64)
    if array.size and array.min() < 0:
        raise SpecError(field, int(array.min()), "a slot for each token, ints >= 0")
    return array


def _table(field: str, slots: Slots, page: int) -> BlockTable:
    """Return the pages of *slots*. Raise `SpecError` if the slots of a page are not consecutive."""
    pages = slots[::page] // page
    inside = np.arange(len(slots))
    expected = pages[inside // page] * page + inside % page
    # In page 0, slot 0 is right for each token: the window has passed the page.
    wrong = np.flatnonzero((slots != expected) & ((slots != 0) | (expected >= page)))
    if wrong.size:
        token = int(wrong[0])
        wanted = f"slot {expected[token]}: pages of {page} tokens lie in consecutive slots"
        raise SpecError(f"{field}[{token}]", int(slots[token]), wanted)
    return BlockTable(pages)
