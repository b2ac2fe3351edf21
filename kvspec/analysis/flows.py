"""Compute how many bytes one request moves over every edge of a plan.

Invariant: bytes are counted for live tokens and whole states, never for whole blocks. The time
does not depend on the number of tokens, except where several context divisions overlap.

How it works:
    The bytes of a slice are layers x units x rows x bytes of one row. Only the rows need thought.
    A row moves over an edge if three owners agree on its tokens: the producer's context, the
    consumer's context, and the stripe of the edge. Each of them is a `BlockCyclic`. For example,
    owner ``a`` is the second of two ranks that take runs of 4 tokens in turn. Owner ``b`` is the
    first of three ranks that take runs of 2. Both own these tokens, in columns of 2:

        token     0   2   4   6   8   10  12  14  16  18  20  22
        a                 2   2           2   2           2   2
        b         2           2           2           2
        both                  2           2

    Everything repeats after lcm(2 x 4, 3 x 2) = 24 tokens. So `shared_rows` counts one period of 24
    tokens, multiplies it, and counts the rest. Within gcd(4, 2) = 2 tokens, either all or none are
    shared. So one test for each run of 2 tokens is enough.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import gcd, lcm

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.inputs import MAX_TOKENS, MOST, instance, positive_int
from kvspec.ownership.stripes import Stripe
from kvspec.ownership.tokens import BlockCyclic, Ints
from kvspec.plan.edges import assignments
from kvspec.plan.plan import TransferPlan
from kvspec.plan.replica_groups import ReplicaGroup

# Runs of tokens that are tested for one pair of context ranks. This many take some seconds.
MAX_RUNS = 2**28
# Runs that are tested together, as one array of 32 MiB.
BLOCKS_AT_ONCE = 2**22


@attrs.frozen(kw_only=True, eq=False)
class Flows:
    """The bytes that one request moves. Each array has one entry for each slice of an edge.

    Attributes:
        ranks: Numbers of ranks of the producer and of the consumer.
        producer: Index of the producer rank in `ParallelConfig.ranks`.
        consumer: Index of the consumer rank.
        moved: Bytes.
        class_of: Index of the replica class from which the producer rank was chosen.
        position: Position of the producer rank in that class.
        replica_classes: Sets of producer ranks with the same content, as indices.
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
        """Bytes into each consumer rank."""
        return _sum_by_index(self.consumer, self.moved, self.ranks[1])

    def out(self, engines: int) -> Ints:
        """Return the bytes out of each producer rank if several consumer engines read.

        Engine e chooses with salt e, and a salt rotates every replica class. So engine e loads
        position p of a class exactly as engine 0 loads position p - e. A class of n replicas is
        evenly loaded after every n engines. Only the remaining engines are added one by one. For
        example, a class of 3 has the loads 6, 0, 0 for one engine. For 7 engines it has two full
        turns of 6 each, and one engine more: 18, 12, 12.

        Args:
            engines: Number of consumer engines that read the same number of tokens.

        Raises:
            SpecError: If all links together carry more bytes than a signed 64-bit integer holds.
        """
        total = int(self.moved.sum())
        if total * engines > MOST:
            rule = f"must be at most {MOST // total}, so that all links carry at most {MOST} bytes"
            raise SpecError("consumers", engines, rule=rule)
        out = np.zeros(self.ranks[0], np.int64)
        for number, replicas in enumerate(self.replica_classes):
            chosen = self.class_of == number
            loads = _sum_by_index(self.position[chosen], self.moved[chosen], len(replicas))
            turns, rest = divmod(engines, len(replicas))
            class_loads = loads.sum() * turns + sum(np.roll(loads, salt) for salt in range(rest))
            np.add.at(out, np.array(replicas), class_loads)
        return out


def _sum_by_index(index: Ints, nbytes: Ints, size: int) -> Ints:
    # np.bincount would sum in float64, which is not exact above 2**53 bytes.
    sums = np.zeros(size, np.int64)
    np.add.at(sums, index, nbytes)
    return sums


def flows(plan: TransferPlan, num_tokens: int) -> Flows:
    """Return the bytes that each slice of *plan* moves for one request, of which nothing is cached.

    Args:
        plan: The plan.
        num_tokens: Length of the request, at least 0.

    Raises:
        SpecError: If all slices together move more bytes than a signed 64-bit integer holds.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, plan_transfer
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="latent", layers=["l.0"], spec=spec)])
    >>> flows(plan_transfer(engine, engine), 100).moved.tolist()
    [115200]
    """
    instance("plan", plan, TransferPlan)
    positive_int("num_tokens", num_tokens, least=0)
    consumers = plan.consumer.parallel.ranks
    classes: dict[tuple[int, ...], int] = {}
    sizes: dict[tuple[object, ...], int] = {}
    columns: list[tuple[int, int, int, int, int]] = []
    engines = plan.producer, plan.consumer
    for assignment in assignments(*engines, plan.replica_groups, plan.replica_policy):
        replica_group, unit_range = assignment.replica_group, assignment.unit_range
        context = plan.consumer.context(replica_group.pair.consumer, consumers[assignment.reader])
        # Counting rows may take seconds, and most slices of a replica group have the same rows.
        key = (id(replica_group), unit_range.stripe, context)
        if key not in sizes:
            sizes[key] = _unit_bytes(replica_group, unit_range.stripe, context, num_tokens)
        moved = len(assignment.layers) * (unit_range.stop - unit_range.start) * sizes[key]
        number = classes.setdefault(unit_range.replicas, len(classes))
        place = unit_range.replicas.index(unit_range.producer)
        columns.append((unit_range.producer, assignment.reader, moved, number, place))
    total = sum(column[2] for column in columns)
    if total > MOST:
        rule = f"all links together would carry {total} bytes, which is more than {MOST}"
        raise SpecError("num_tokens", num_tokens, rule=rule)
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
    """Return the bytes of one unit of one layer that the context *reader* receives."""
    live = replica_group.spec.live_tokens(num_tokens)
    # Stripes count virtual blocks. Each of them has one block on every context rank of the reader.
    virtual = replica_group.spec.block_size * reader.size
    if replica_group.spec.is_ring:
        virtual = MAX_TOKENS  # The one block has all positions.
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
            # A state moves as a whole, in the stripe of its first live token.
            rows = part.states if live and stripe.holds(live.start // virtual) else 0
        nbytes += rows * part.content_bytes
    return nbytes


def shared_rows(owners: Iterable[BlockCyclic], live: range, tokens_per_state: int) -> int:
    """Return the number of states with live tokens that all *owners* own.

    The module docstring shows the example in a picture. One owner alone can count its own tokens,
    so that case takes no loop.

    Raises:
        SpecError: If the period has more than `MAX_RUNS` runs.

    >>> owners = BlockCyclic(1, 2, 4), BlockCyclic(0, 3, 2)
    >>> [shared_rows(owners, live, 1) for live in (range(24), range(7, 14), range(24000))]
    [4, 3, 4000]
    >>> shared_rows([BlockCyclic(1, 2, 4)], range(21, 22), 2)
    1
    """
    if not live:
        return 0
    # All tokens of a row have the same owner. The row moves if any of them is live.
    start, stop = (
        live.start // tokens_per_state * tokens_per_state,
        -(-live.stop // tokens_per_state) * tokens_per_state,
    )
    deciding = [owner for owner in owners if owner.size > 1] or [BlockCyclic()]
    if len(deciding) == 1:
        return (deciding[0].local(stop) - deciding[0].local(start)) // tokens_per_state
    run = gcd(*(owner.interleave for owner in deciding))
    period = lcm(*(owner.size * owner.interleave for owner in deciding))
    if min(period, len(live)) // run > MAX_RUNS:
        most = f"must be at most {MAX_RUNS * run}"
        why = f"because the ownership of tokens repeats only after {period} tokens"
        raise SpecError("num_tokens", live.stop, rule=f"{most}, {why}")
    # Any stretch of one period has the same count, wherever it starts.
    periods, rest = divmod(stop - start, period)
    in_period = _count_shared(deciding, start, start + period, run) if periods else 0
    return (
        periods * in_period + _count_shared(deciding, start, start + rest, run)
    ) // tokens_per_state


def _count_shared(owners: list[BlockCyclic], start: int, stop: int, run: int) -> int:
    """Count the tokens from *start* to *stop* that all owners own, in runs of *run* tokens."""
    count = 0
    for at in range(start // run, -(-stop // run), BLOCKS_AT_ONCE):
        first = np.arange(at, min(at + BLOCKS_AT_ONCE, -(-stop // run))) * run
        shared = np.logical_and.reduce([owner.owns(first) for owner in owners])
        inside = np.minimum(first + run, stop) - np.maximum(first, start)
        count += int(inside[shared].sum())
    return count
