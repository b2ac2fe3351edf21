"""The bytes that one request moves over every edge of a plan.

Law: only reads a plan. Bytes are counted by live token and whole state, not by blocks.
"""

from __future__ import annotations

from math import lcm

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.inputs import MOST, instance, positive_int
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Cyclic, Ints
from kvspec.plan.plan import TransferPlan
from kvspec.specs import LayerSpec

MAX_PERIOD = 2**28
"""Tokens that are looked at one by one, for a pair of context ranks: some seconds."""
STEP = 2**22
"""Tokens that are looked at together, about: their positions are an array."""


@attrs.frozen(kw_only=True, eq=False)
class Flows:
    """The bytes that one request moves, one entry for each slice of each edge.

    *producer* and *consumer* are indices into each side's `ParallelConfig.ranks`, *moved* bytes.
    *members* holds the classes of replicas, each as indices of producer ranks; *class_of* says to
    which class an entry's producer was elected, *position* which of its members it is.
    """

    producer: Ints
    consumer: Ints
    moved: Ints
    class_of: Ints
    position: Ints
    members: tuple[tuple[int, ...], ...]


def flows(plan: TransferPlan, num_tokens: int) -> Flows:
    """Return what each slice of *plan* moves for a request of *num_tokens*, nothing cached.

    `SpecError` where that is more bytes in all than a signed 64-bit number holds.
    """
    instance("plan", plan, TransferPlan)
    positive_int("num_tokens", num_tokens, least=0)
    ours, theirs = plan.producer.parallel, plan.consumer.parallel
    index = [{rank: at for at, rank in enumerate(side.ranks)} for side in (ours, theirs)]
    classes, members = _classes(plan)
    sizes: dict[tuple[object, ...], int] = {}
    columns: list[tuple[int, int, int, int, int]] = []
    for edge in plan.edges:
        source, target = index[0][edge.producer], index[1][edge.consumer]
        pair = plan.pair_of(edge)
        mine = plan.producer.context(pair.producer, edge.producer)
        other = plan.consumer.context(pair.consumer, edge.consumer)
        for each in edge.slices:
            names = each.layers or edge.layers
            spec = pair.specs[names[0]]
            key = (id(spec), each.parts, each.stripe, mine, other)
            if key not in sizes:
                sizes[key] = _unit_bytes(spec, each.parts, each.stripe, mine, other, num_tokens)
            moved = len(names) * len(each.global_range) * sizes[key]
            home = names[0], each.parts[0]
            where = classes.get((*home, mine)) or classes[*home, None]
            columns.append((source, target, moved, *where[source]))
    total = sum(column[2] for column in columns)
    if total > MOST:
        told = f"fewer: all links together would carry {total} bytes, more than {MOST}"
        raise SpecError("num_tokens", num_tokens, told)
    table = np.array(columns, np.int64).reshape(-1, 5).T
    producer, consumer, moved_bytes, class_of, position = table
    return Flows(
        producer=producer,
        consumer=consumer,
        moved=moved_bytes,
        class_of=class_of,
        position=position,
        members=members,
    )


def _classes(
    plan: TransferPlan,
) -> tuple[dict[tuple[object, ...], dict[int, tuple[int, int]]], tuple[tuple[int, ...], ...]]:
    """Return the classes of replicas, and by (layer, part, context) each rank's class and place."""
    found: dict[tuple[object, ...], dict[int, tuple[int, int]]] = {}
    members: list[tuple[int, ...]] = []
    for share in plan.shares:
        places = {
            rank: (len(members) + at, place)
            for at, holders in enumerate(share.members.holders)
            for place, rank in enumerate(holders)
        }
        members += share.members.holders
        for layer in share.layers:
            found.update(((layer, part.name, share.context), places) for part in share.parts)
    return found, tuple(members)


def _unit_bytes(
    spec: LayerSpec,
    parts: tuple[str, ...],
    stripe: tuple[int, int],
    ours: Cyclic,
    theirs: Cyclic,
    num_tokens: int,
) -> int:
    """Return the bytes of one unit of one layer that move between two contexts."""
    moved = (part for part in spec.parts if part.name in parts)
    return sum(
        part.content_bytes * _rows(spec, part, stripe, ours, theirs, num_tokens) for part in moved
    )


def _rows(
    spec: LayerSpec,
    part: Part,
    stripe: tuple[int, int],
    ours: Cyclic,
    theirs: Cyclic,
    num_tokens: int,
) -> int:
    """Return how many rows of *part* hold live tokens that both own, in the blocks of a stripe."""
    live = spec.live_tokens(num_tokens)
    grain, virtual = part.tokens_per_state, spec.block_size * theirs.size
    if not grain:
        inside = [live.start // virtual % stripe[1] == stripe[0]] if live else []
        return part.states * sum(inside)
    if stripe == (0, 1) and ours.size == theirs.size == 1:
        return -(-live.stop // grain) - live.start // grain

    # Ownership repeats, so one period from a row's boundary stands for all.
    cycles = ours.size * ours.interleave, theirs.size * theirs.interleave
    period = lcm(*cycles, virtual * stripe[1], grain)
    if min(period, len(live)) > MAX_PERIOD:
        told = f"at most {MAX_PERIOD}, since who owns which tokens repeats only after {period}"
        raise SpecError("num_tokens", num_tokens, told)

    def owned(start: int, stop: int) -> int:
        tokens = np.arange(start, stop)
        tokens = tokens[tokens // virtual % stripe[1] == stripe[0]]
        rows = tokens[ours.owns(tokens) & theirs.owns(tokens)] // grain
        return len(rows) and 1 + int(np.count_nonzero(np.diff(rows)))

    def count(start: int, stop: int) -> int:
        step = grain * -(-STEP // grain)  # whole rows, as the first begins at a row's boundary
        return sum(owned(at, min(at + step, stop)) for at in range(start, stop, step))

    first = min(-(-live.start // grain) * grain, live.stop)
    times, rest = divmod(live.stop - first, period)
    found = count(live.start, first) + count(live.stop - rest, live.stop)
    return found + (times * count(first, first + period) if times else 0)
