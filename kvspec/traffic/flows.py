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
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import Cyclic, Ints
from kvspec.plan.edges import exchanges
from kvspec.plan.plan import TransferPlan
from kvspec.plan.shares import Share
from kvspec.specs import LayerSpec

MAX_PERIOD = 2**28
"""Tokens that are looked at one by one, for a pair of context ranks: some seconds."""
STEP = 2**22
"""Tokens that are looked at together, about: their positions are an array."""


@attrs.frozen(kw_only=True, eq=False)
class Flows:
    """The bytes that one request moves, one entry for each slice of each edge.

    *producer* and *consumer* are indices into each side's `ParallelConfig.ranks`, *moved* bytes.
    *members* holds the classes of equal producer ranks among which readers elect, as indices;
    *class_of* says in which class an entry's producer was elected, *position* which of it it is.
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
    classes: dict[tuple[int, ...], int] = {}
    sizes: dict[tuple[object, ...], int] = {}
    columns: list[tuple[int, int, int, int, int]] = []
    for one in exchanges(plan.producer, plan.consumer, plan.shares, plan.election):
        share, piece = one.share, one.piece
        context = plan.consumer.context(
            share.pair.consumer, plan.consumer.parallel.ranks[one.reader]
        )
        key = (id(share), piece.stripe, context)
        if key not in sizes:
            sizes[key] = _unit_bytes(share, piece.stripe, context, num_tokens)
        moved = len(one.layers) * (piece.stop - piece.start) * sizes[key]
        number = classes.setdefault(piece.equals, len(classes))
        place = piece.equals.index(piece.producer)
        columns.append((piece.producer, one.reader, moved, number, place))
    total = sum(column[2] for column in columns)
    if total > MOST:
        told = f"fewer: all links together would carry {total} bytes, more than {MOST}"
        raise SpecError("num_tokens", num_tokens, told)
    producer, consumer, moved_bytes, class_of, position = (
        np.array(columns, np.int64).reshape(-1, 5).T
    )
    return Flows(
        producer=producer,
        consumer=consumer,
        moved=moved_bytes,
        class_of=class_of,
        position=position,
        members=tuple(classes),
    )


def _unit_bytes(share: Share, stripe: Stripe, theirs: Cyclic, num_tokens: int) -> int:
    """Return the bytes of one unit of one layer of *share* that a reader's context takes."""
    ours = share.context or Cyclic()
    return sum(
        part.content_bytes * _rows(share.spec, part, stripe, ours, theirs, num_tokens)
        for part in share.parts
    )


def _rows(
    spec: LayerSpec,
    part: Part,
    stripe: Stripe,
    ours: Cyclic,
    theirs: Cyclic,
    num_tokens: int,
) -> int:
    """Return how many rows of *part* hold live tokens that both own, in the blocks of a stripe."""
    live = spec.live_tokens(num_tokens)
    grain, virtual = part.tokens_per_state, spec.block_size * theirs.size
    if not grain:
        moves = bool(live) and stripe.holds(live.start // virtual)
        return part.states * moves
    if stripe.whole and ours.size == theirs.size == 1:
        return -(-live.stop // grain) - live.start // grain

    # Ownership repeats, so one period from a row's boundary stands for all.
    cycles = ours.size * ours.interleave, theirs.size * theirs.interleave
    period = lcm(*cycles, virtual * stripe.step, grain)
    if min(period, len(live)) > MAX_PERIOD:
        told = f"at most {MAX_PERIOD}, since who owns which tokens repeats only after {period}"
        raise SpecError("num_tokens", num_tokens, told)

    def owned(start: int, stop: int) -> int:
        tokens = np.arange(start, stop)
        tokens = tokens[stripe.holds(tokens // virtual)]
        rows = tokens[ours.owns(tokens) & theirs.owns(tokens)] // grain
        return len(rows) and 1 + int(np.count_nonzero(np.diff(rows)))

    def count(start: int, stop: int) -> int:
        step = grain * -(-STEP // grain)  # whole rows, as the first begins at a row's boundary
        return sum(owned(at, min(at + step, stop)) for at in range(start, stop, step))

    first = min(-(-live.start // grain) * grain, live.stop)
    times, rest = divmod(live.stop - first, period)
    found = count(live.start, first) + count(live.stop - rest, live.stop)
    return found + (times * count(first, first + period) if times else 0)
