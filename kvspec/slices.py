"""Parts, the overlap of two deals, and which replica is read.

Law: a slice is the intersection of what two ranks own; it names the same global units at both
ends. Where producer ranks are replicas, one is elected, and both engines elect the same one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from math import gcd
from typing import Any, Literal, NamedTuple, get_args

import attrs

from kvspec.errors import SpecError
from kvspec.parallel import Deal
from kvspec.ranges import positive_int, shift

Role = Literal["consumer", "producer"]
Replicas = Literal["spread", "first", "stripe"]
ALL_BLOCKS = (0, 1)


@attrs.frozen(kw_only=True)
class Part:
    """One named array of a block: units x states x content bytes.

    *units*: pieces the model has that TP can deal out (KV heads, SSM heads, conv channels; 1 =
    never split). *states*: rows of one block. *content_bytes*: bytes of one (unit, state),
    contiguous in every layout. *deal_in*: units are dealt in whole multiples of this.
    *tokens_per_state*: tokens that one row stands for; 0 for a state that is not indexed by tokens.
    *tensor*: parts of one tensor lie side by side: where rows are tokens, packed in the content (k
    and v) unless the layout has planes; in a state, one part's units after the other's (the
    channels of a conv state). *whole*: what one rank holds of the part cannot be cut between units
    (packed formats whose scales span heads).
    """

    name: str
    units: int
    states: int
    content_bytes: int
    deal_in: int = 1
    tokens_per_state: int = 1
    tensor: str = "kv"
    whole: bool = False

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise SpecError("name", self.name, "a non-empty str")
        for field in ("units", "states", "content_bytes", "deal_in"):
            positive_int(f"{self.name}.{field}", getattr(self, field))
        positive_int(f"{self.name}.tokens_per_state", self.tokens_per_state, least=0)
        if self.units % self.deal_in:
            raise SpecError(f"{self.name}.units", self.units, f"a multiple of {self.deal_in}")


@attrs.frozen
class TPTransferSlice:
    """The units that one pair of ranks exchanges.

    Ranges are in units of *parts*: *global_range* of the model's, *local_range* of what the asking
    rank holds, *remote_range* of what *remote_rank* holds; all three have one length. *layers* is
    empty for "every layer of the group". *stripe* ``(first, step)``: only the virtual blocks ``b``
    with ``b % step == first`` move over this pair; ``(0, 1)`` is all of them.
    """

    remote_rank: int
    parts: tuple[str, ...]
    global_range: range
    local_range: range
    remote_range: range
    layers: tuple[str, ...] = ()
    stripe: tuple[int, int] = ALL_BLOCKS

    def view(self, array: Any, axis: int, side: Literal["local", "remote"] = "local") -> Any:  # noqa: ANN401
        """Return the view of a rank's cache *array* that this slice means.

        *array*: a numpy array, torch tensor or anything sliced like one, whose *axis* runs over the
        units (heads) that the rank holds; *side* says whose array it is. No bytes are copied.

        >>> import numpy as np
        >>> heads = TPTransferSlice(0, ("k", "v"), range(2, 4), range(0, 2), range(2, 4))
        >>> heads.view(np.zeros((7, 16, 2, 128)), axis=2).shape
        (7, 16, 2, 128)
        """
        if side not in ("local", "remote"):
            raise SpecError("side", side, "'local' or 'remote'")
        units = self.local_range if side == "local" else self.remote_range
        if not isinstance(getattr(array, "shape", None), Sequence):
            raise SpecError("array", type(array).__name__, "an array or tensor, with a shape")
        dims = len(array.shape)
        if isinstance(axis, bool) or not isinstance(axis, int) or not -dims <= axis < dims:
            raise SpecError("axis", axis, f"an axis of an array with {dims} dimensions")
        if array.shape[axis] < units.stop:
            raise SpecError(
                f"array.shape[{axis}]", array.shape[axis], f"at least {units.stop} units"
            )
        return array[(slice(None),) * (axis % dims) + (slice(units.start, units.stop),)]


class Piece(NamedTuple):
    """Global units [start, stop) that a consumer rank reads from *producer*."""

    producer: int
    start: int
    stop: int
    stripe: tuple[int, int]


def check_policy(replicas: object, salt: object = 0) -> None:
    """Raise `SpecError` unless *replicas* is the name of an election policy and *salt* a count."""
    if replicas not in get_args(Replicas):
        raise SpecError("replicas", replicas, f"one of {', '.join(get_args(Replicas))}")
    positive_int("salt", salt, least=0)


def elect(
    replicas: Replicas, position: int, consumers: int, members: int, salt: int = 0
) -> tuple[tuple[int, tuple[int, int]], ...]:
    """Return which members of a replica class one consumer reads, each with its stripe.

    *position* of the consumer among the *consumers* of the class, ascending; *members* of it. A
    stripe's virtual blocks b solve (b consumers + position + salt) mod members = member.
    """
    if members == 1 or replicas == "first":
        return ((0, ALL_BLOCKS),)
    if replicas == "spread":
        return (((position * members // consumers + salt) % members, ALL_BLOCKS),)
    step = members // gcd(consumers, members)
    return tuple(
        ((block * consumers + position + salt) % members, (block, step)) for block in range(step)
    )


@lru_cache(maxsize=65536)
def _readers(consumer: Deal, start: int, stop: int) -> tuple[int, ...]:
    return consumer.ranks_of(range(start, stop))


def consumer_pieces(
    consumer: Deal, producer: Deal, rank: int, replicas: Replicas = "spread", salt: int = 0
) -> list[Piece]:
    """Return what consumer *rank* reads, ascending in units; together, exactly what it owns."""
    own = consumer.ranges[rank]
    pieces = []
    for index in producer.classes(own):
        units, members = producer.owned[index], producer.holders[index]
        start, stop = max(own.start, units.start), min(own.stop, units.stop)
        if len(members) == 1:
            pieces.append(Piece(members[0], start, stop, ALL_BLOCKS))
            continue
        readers = _readers(consumer, units.start, units.stop)
        elected = elect(replicas, readers.index(rank), len(readers), len(members), salt)
        pieces.extend(Piece(members[each], start, stop, stripe) for each, stripe in elected)
    return pieces


def _pieces_of(
    role: Role, local: Deal, remote: Deal, rank: int, replicas: Replicas, salt: int
) -> list[tuple[int, Piece]]:
    """Return (remote rank, piece) for local *rank*, from whichever side it is on."""
    if role == "consumer":
        return [(p.producer, p) for p in consumer_pieces(local, remote, rank, replicas, salt)]
    own = local.ranges[rank]
    return [
        (reader, piece)
        for reader in remote.ranks_of(own)
        for piece in consumer_pieces(remote, local, reader, replicas, salt)
        if piece.producer == rank
    ]


def transfer_slices(
    parts: Sequence[Part],
    local_rank: int,
    local_deal: Callable[[Part], Deal],
    remote_deal: Callable[[Part], Deal],
    *,
    role: Role = "consumer",
    replicas: Replicas = "spread",
    salt: int = 0,
    layers: tuple[str, ...] = (),
) -> tuple[TPTransferSlice, ...]:
    """Return the slices of *parts* that local rank *local_rank* exchanges with every remote rank.

    Parts that are dealt alike share their slices.
    """
    alike: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        alike.setdefault((part.units, part.deal_in), []).append(part)
    slices = []
    for group in alike.values():
        names = tuple(part.name for part in group)
        local, remote = local_deal(group[0]), remote_deal(group[0])
        own = local.ranges[local_rank].start
        for peer, piece in _pieces_of(role, local, remote, local_rank, replicas, salt):
            units = range(piece.start, piece.stop)
            theirs = shift(units, -remote.ranges[peer].start)
            ours = shift(units, -own)
            slices.append(TPTransferSlice(peer, names, units, ours, theirs, layers, piece.stripe))
    return tuple(slices)
