"""Which of several equal producer ranks is read.

Law: both engines elect the same one, from the two descriptions alone.
"""

from __future__ import annotations

from math import gcd
from typing import Literal, get_args

from kvspec.errors import SpecError
from kvspec.inputs import positive_int

Role = Literal["consumer", "producer"]


Replicas = Literal["spread", "first", "stripe"]


ALL_BLOCKS = (0, 1)


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
