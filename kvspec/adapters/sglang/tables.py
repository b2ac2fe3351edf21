"""SGLang's slots of one request, read as block tables.

Law: a page holds consecutive tokens in consecutive slots. Slots of which that is not true are no
table, whatever their first one says.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from kvspec.adapters.sglang.engine import WINDOW
from kvspec.descriptors.request import BlockTable
from kvspec.engines.engine import EngineSpec
from kvspec.errors import SpecError
from kvspec.inputs import instance

Slots = npt.NDArray[np.int64]


def block_tables(engine: EngineSpec, slots: Any) -> dict[str, BlockTable]:  # noqa: ANN401
    """Return the tables of one request, by group of *engine*, for a `TransferRequest`.

    *slots*: the slot of each token from 0 on, ``req_to_token[request, :n]``; with windows a mapping
    from group to them, those of ``swa`` as `translate_loc_from_full_to_swa` gives them, 0 for what
    the window has passed. With decode context parallelism slots are those of all ranks together, as
    the request's row has them.
    """
    instance("engine", engine, EngineSpec)
    names = [group.name for group in engine.groups]
    if not isinstance(slots, Mapping) and WINDOW in names:
        raise SpecError("slots", type(slots).__name__, "slots by group: a window has its own")
    found: dict[str, BlockTable] = {}
    counts: dict[str, int] = {}
    for group in engine.groups:
        given = slots.get(group.name) if isinstance(slots, Mapping) else slots
        field = f"slots[{group.name!r}]"
        own = _array(field, given)
        counts[group.name] = len(own)
        found[group.name] = _table(field, own, engine.virtual_block(group))
    most = max(counts.values())
    for name, count in counts.items():
        if count < most:
            wanted = f"{most}, a slot for each token as other groups have, 0 where it is gone"
            raise SpecError(f"slots[{name!r}]", f"{count} slots", wanted)
    return found


def _array(field: str, given: Any) -> Slots:  # noqa: ANN401
    """Return *given*, a sequence or a tensor of ints, as an array."""
    try:
        found = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        found = np.empty(0, object)
    if found.ndim != 1 or (found.size and found.dtype.kind not in "iu"):
        raise SpecError(field, given, "a slot for each token, ints >= 0")
    found = found.astype(np.int64)
    if found.size and found.min() < 0:
        raise SpecError(field, int(found.min()), "a slot for each token, ints >= 0")
    return found


def _table(field: str, slots: Slots, page: int) -> BlockTable:
    """Return the pages of *slots*; slot 0 for all tokens of a page means that it is gone."""
    pages = slots[::page] // page
    inside = np.arange(len(slots))
    wanted = pages[inside // page] * page + inside % page
    wrong = np.flatnonzero((slots != wanted) & ((slots != 0) | (wanted >= page)))
    if wrong.size:
        token = int(wrong[0])
        expected = f"slot {wanted[token]}: pages of {page} tokens lie in consecutive slots"
        raise SpecError(f"{field}[{token}]", int(slots[token]), expected)
    return BlockTable(pages)
