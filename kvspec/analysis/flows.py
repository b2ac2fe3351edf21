"""The bytes that one request moves over every edge of a plan.

Law: only reads a plan. Bytes are counted by live token and whole state, not by blocks.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, lcm

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.inputs import MOST, instance, positive_int
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import assignments
from kvspec.plan.plan import TransferPlan
from kvspec.plan.replica_groups import ReplicaGroup

MAX_LOOKED_AT = 2**28
"""Runs of tokens that are looked at one by one, for a pair of context ranks: some seconds."""
STEP = 2**22
"""Runs that are looked at together: their positions are an array."""


@attrs.frozen(kw_only=True, eq=False)
class Flows:
    """The bytes that one request moves, one entry for each slice of each edge.

    *producer* and *consumer* are indices into each side's `ParallelConfig.ranks`, *moved* bytes.
    *replica_classes* holds the classes of equal producer ranks among which readers choose, as
    indices; *class_of* says in which class an entry's producer was chosen, *position* which of it
    it is. *ranks*: how many the producer and the consumer have.
    """

    ranks: tuple[int, int]
    producer: Ints
    consumer: Ints
    moved: Ints
    class_of: Ints
    position: Ints
    replica_classes: tuple[tuple[int, ...], ...]

    @property
    def into(self) -> Ints:
        """The bytes into each consumer rank."""
        return _total(self.consumer, self.moved, self.ranks[1])

    def out(self, engines: int) -> Ints:
        """Return the bytes out of each producer rank, if so many consumer engines fetch alike.

        A salt rotates every class of equals, so engine e loads the member at place p as the first
        engine loads the member at place p - e. All of a class turn after as many engines as it has
        members, and only the engines that are left over have to be added one by one. `SpecError`
        where that is more bytes in all than a signed 64-bit number holds.
        """
        total = int(self.moved.sum())
        if total * engines > MOST:
            told = f"at most {MOST // total}: all links together carry at most {MOST} bytes"
            raise SpecError("consumers", engines, told)
        out = np.zeros(self.ranks[0], np.int64)
        for number, replicas in enumerate(self.replica_classes):
            chosen = self.class_of == number
            loads = _total(self.position[chosen], self.moved[chosen], len(replicas))
            turns, rest = divmod(engines, len(replicas))
            summed = loads.sum() * turns + sum(np.roll(loads, engine) for engine in range(rest))
            np.add.at(out, np.array(replicas), summed)
        return out


def _total(place: Ints, nbytes: Ints, size: int) -> Ints:
    found = np.zeros(size, np.int64)
    np.add.at(found, place, nbytes)
    return found


def flows(plan: TransferPlan, num_tokens: int) -> Flows:
    """Return what each slice of *plan* moves for a request of *num_tokens*, nothing cached.

    `SpecError` where that is more bytes in all than a signed 64-bit number holds.
    """
    instance("plan", plan, TransferPlan)
    positive_int("num_tokens", num_tokens, least=0)
    consumers = plan.consumer.parallel.ranks
    classes: dict[tuple[int, ...], int] = {}
    sizes: dict[tuple[object, ...], int] = {}
    columns: list[tuple[int, int, int, int, int]] = []
    for one in assignments(plan.producer, plan.consumer, plan.replica_groups, plan.replica_policy):
        replica_group, unit_range = one.replica_group, one.unit_range
        context = plan.consumer.context(replica_group.pair.consumer, consumers[one.reader])
        key = (id(replica_group), unit_range.stripe, context)
        if key not in sizes:
            sizes[key] = _unit_bytes(replica_group, unit_range.stripe, context, num_tokens)
        moved = len(one.layers) * (unit_range.stop - unit_range.start) * sizes[key]
        number = classes.setdefault(unit_range.replicas, len(classes))
        place = unit_range.replicas.index(unit_range.producer)
        columns.append((unit_range.producer, one.reader, moved, number, place))
    total = sum(column[2] for column in columns)
    if total > MOST:
        told = f"fewer: all links together would carry {total} bytes, more than {MOST}"
        raise SpecError("num_tokens", num_tokens, told)
    producer, consumer, moved_bytes, class_of, position = (
        np.array(columns, np.int64).reshape(-1, 5).T
    )
    return Flows(
        ranks=(len(plan.producer.parallel.ranks), len(consumers)),
        producer=producer,
        consumer=consumer,
        moved=moved_bytes,
        class_of=class_of,
        position=position,
        replica_classes=tuple(classes),
    )


def _unit_bytes(
    replica_group: ReplicaGroup, stripe: Stripe, reader: BlockCyclic, num_tokens: int
) -> int:
    """Return the bytes of one unit of one layer that a reader's context takes."""
    live = replica_group.spec.live_tokens(num_tokens)
    virtual = replica_group.spec.block_size * reader.size
    owners = {
        replica_group.context or BlockCyclic(),
        reader,
        BlockCyclic(stripe.first, stripe.step, virtual),
    }
    nbytes = 0
    for part in replica_group.parts:
        if part.per_token:
            rows = shared_rows(owners, live, part.tokens_per_state)
        else:
            rows = part.states if live and stripe.holds(live.start // virtual) else 0
        nbytes += rows * part.content_bytes
    return nbytes


def shared_rows(owners: Iterable[BlockCyclic], live: range, grain: int) -> int:
    """Return how many rows of *grain* tokens, some of them *live*, all *owners* give to their rank.

    Where one sharding decides, an owner counts its own positions itself. Several agree from one run
    to the next: a run is as long as the greatest length of which all interleaves are multiples. And
    all begin anew after a period, so any period holds as many positions as another. Here ``a`` is
    the second of two ranks that take runs of 4 in turn, ``b`` the first of three that take 2, and
    the period is 24 positions long::

        position  0   2   4   6   8   10  12  14  16  18  20  22
        a                 2   2           2   2           2   2
        b         2           2           2           2
        both                  2           2

    >>> owners = BlockCyclic(1, 2, 4), BlockCyclic(0, 3, 2)
    >>> [shared_rows(owners, live, 1) for live in (range(24), range(7, 14), range(24000))]
    [4, 3, 4000]
    >>> shared_rows([BlockCyclic(1, 2, 4)], range(21, 22), 2)
    1
    """
    if not live:
        return 0
    # A row is one owner's, and moves if any of its tokens is live.
    start, stop = live.start // grain * grain, -(-live.stop // grain) * grain
    deciding = [owner for owner in owners if owner.size > 1] or [BlockCyclic()]
    if len(deciding) == 1:
        return (deciding[0].local(stop) - deciding[0].local(start)) // grain
    run = gcd(*(owner.interleave for owner in deciding))
    period = lcm(*(owner.size * owner.interleave for owner in deciding))
    if min(period, len(live)) // run > MAX_LOOKED_AT:
        told = f"at most {MAX_LOOKED_AT * run}"
        why = f"since who owns which tokens repeats only after {period}"
        raise SpecError("num_tokens", live.stop, f"{told}, {why}")
    periods, rest = divmod(stop - start, period)
    whole = _looked_at(deciding, start, start + period, run) if periods else 0
    return (periods * whole + _looked_at(deciding, start, start + rest, run)) // grain


def _looked_at(owners: list[BlockCyclic], start: int, stop: int, run: int) -> int:
    """Return how many positions are shared: of every *run*, all or none."""
    found = 0
    for at in range(start // run, -(-stop // run), STEP):
        first = np.arange(at, min(at + STEP, -(-stop // run))) * run
        shared = np.logical_and.reduce([owner.owns(first) for owner in owners])
        inside = np.minimum(first + run, stop) - np.maximum(first, start)
        found += int(inside[shared].sum())
    return found
