"""Decide which transfers are staged: those that can be staged, and cost less that way.

Invariant: only the costs decide. A staged transfer has one device of the peer, one device of this
rank, and no run longer than a slot.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs
import numpy as np

from kvspec.descriptors.selection import Picked, Selection
from kvspec.errors import SpecError
from kvspec.inputs import sequence
from kvspec.nixl.agent import Agent
from kvspec.nixl.costs import Costs
from kvspec.nixl.merging import Pairing
from kvspec.nixl.ranges import Ranges, Repeated, ranges_of
from kvspec.nixl.rows import StridedRows
from kvspec.nixl.stage import Stage
from kvspec.nixl.staging_buffer import Buffers
from kvspec.nixl.transfer_spec import Operation, Sides, TransferSpec, spec_of
from kvspec.ownership.replicas import Role

OPERATIONS = ("READ", "WRITE")  # whatever else would move one of the two ways
SIDES = "tuples (local list, local ids, remote list, remote ids)"
WORTH = 0.9
"""What share of the direct cost the best staged one must be below, for ranges to be looked for."""


def specs_of(
    agent: Agent,
    operation: Operation,
    pairs: Iterable[Sides],
    buffers: Buffers,
    request: object,
    timeout: object,
) -> tuple[TransferSpec, ...]:
    """Return the checked order of each (local, ids, remote, ids); nothing is posted yet."""
    if not isinstance(operation, str) or operation not in OPERATIONS:
        raise SpecError("operation", operation, " or ".join(OPERATIONS))
    found = []
    for each in sequence("pairs", pairs, SIDES):
        if not isinstance(each, tuple) or len(each) != 4:  # noqa: PLR2004 - as `SIDES` are
            raise SpecError("pairs", each, SIDES)
        spec = spec_of(agent, operation, each[:2], each[2:], request=request, timeout=timeout)
        found.append(staged(spec, each[1], buffers))
    return tuple(found)


def staged(spec: TransferSpec, selection: object, buffers: Buffers) -> TransferSpec:
    """Return *spec*, to be staged if that is cheaper; *selection*: what it was found of."""
    staging, pairs = buffers.staging, spec.pairs
    if staging is None:
        return spec
    costs, always = staging.costs, staging.always and pairs.nbytes > 0
    direct = costs.direct(pairs.runs, pairs.nbytes, len(pairs.batches))
    batches = -(-pairs.nbytes // staging.longest)
    least = costs.staged(1, pairs.nbytes, pairs.runs, pairs.nbytes, batches)
    if not always and WORTH * direct <= least:
        return spec
    devices = [_device(each.rows) for each in (spec.local, spec.remote)]
    if None in devices:
        return spec
    inward = spec.operation == "READ"
    ranges = ranges_of(
        repeated_sets_of(selection, spec), staging.longest, costs.gap if inward else 0
    )
    if ranges is None or not (always or cost_of(ranges, costs) < direct):
        return spec
    buffer = buffers.beside(staging, spec.local.memory_type, devices[0] or 0)
    return attrs.evolve(
        spec, stage=Stage(buffer=buffer, ranges=ranges, device=devices[1] or 0, inward=inward)
    )


def cost_of(ranges: Ranges, costs: Costs) -> float:
    """Return the seconds that *ranges* take."""
    numbers = ranges.ranges, ranges.read, ranges.runs, ranges.nbytes
    return costs.staged(*numbers, batches=len(ranges.batches))


def _device(rows: StridedRows) -> int | None:
    """Return the device that all rows lie on; None where there are several."""
    devices = rows.table[:, 2]
    return int(devices[0]) if len(devices) and (devices == devices[0]).all() else None


def repeated_sets_of(selection: object, spec: TransferSpec) -> tuple[Repeated, ...]:
    """Return the runs of an order as they repeat, or one by one."""
    local, remote = spec.local.rows, spec.remote.rows
    found = None
    if isinstance(selection, Selection):
        far: Role = "producer" if spec.remote.source is selection.producer_rows else "consumer"
        found = repeated(selection.parts, far, remote)
    return (_one_by_one(spec.pairs, local, remote),) if found is None else found


def repeated(parts: Sequence[Picked], far: Role, rows: StridedRows) -> tuple[Repeated, ...] | None:
    """Return picked *parts* as they repeat, *rows* being the *far* side's.

    None where tiles of one run may lie in different memories: the plain ids tell which.
    """
    found = [_repeated(picked, far, rows) for picked in parts]
    kept = tuple(each for each in found if each is not None)
    return kept if len(kept) == len(found) else None


def _repeated(picked: Picked, far: Role, rows: StridedRows) -> Repeated | None:
    entry, tiles = picked
    sets = entry.rows
    producer, consumer = zip(
        (sets.producer_address, sets.consumer_address), sets.offsets(tiles), strict=True
    )
    block_layout, first, sides = sets.producer, entry.producer_first, (producer, consumer)
    if far == "consumer":
        block_layout, first, sides = sets.consumer, entry.consumer_first, (consumer, producer)
    area = rows.areas(first, len(sets), block_layout.rows_per_run)
    if area is None:
        return None
    (address, offset), (near, near_offset) = sides
    return Repeated(
        far=address,
        near=near,
        length=sets.length,
        area=area,
        far_tile=offset,
        near_tile=near_offset,
    )


def _one_by_one(pairs: Pairing, local: StridedRows, remote: StridedRows) -> Repeated:
    """Return pairs of ids, each a run of its own."""
    rows = local.row_of(pairs.local_ids), remote.row_of(pairs.remote_ids)
    nothing = np.zeros(1, np.int64)
    return Repeated(
        far=remote.address_of(pairs.remote_ids, rows[1]),
        near=local.address_of(pairs.local_ids, rows[0]),
        length=local.length[rows[0]],
        area=remote.area[rows[1]],
        far_tile=nothing,
        near_tile=nothing,
    )
