"""Errors, sorted by whose fault it is.

Law: every error names the value that was refused and what was wanted instead, and is raised before
anything moves. All of them survive a pickle, since they cross process boundaries.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Self

import attrs

MAX_SHOWN = 400
"""Characters of a value in a message; of a longer one the beginning is shown, and its type."""


def shown(value: object) -> str:
    """Return *value* as a message shows it."""
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 4]}... (a {type(value).__name__})"


_KIB = 1024


def counted(count: int, noun: str) -> str:
    """Return a count in words, such as ``1 layer`` or ``80 layers``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nbytes(size: float) -> str:
    """Return a size in bytes or, where it is whole or large, in KiB, MiB, GiB or TiB.

    >>> nbytes(1280), nbytes(4096), nbytes(1_234_567)
    ('1,280 B', '4 KiB', '1.2 MiB')
    """
    count, unit = float(size), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if count < _KIB or (unit == "B" and count % _KIB and count < 10 * _KIB):
            break
        count, unit = count / _KIB, larger
    return f"{count:,.0f} {unit}" if unit == "B" or count == int(count) else f"{count:,.1f} {unit}"


class KVSpecError(Exception):
    """Any error of this library."""


class SpecError(KVSpecError, ValueError):
    """The caller's own description is impossible.

    Attributes:
        field: Name of the argument or field, such as `block_size` or `regions['layers.0.k'].base`.
        value: The value that was refused.
        expected: The requirement as a noun phrase, or empty if there is a rule.
        rule: The requirement as a sentence, for relations between fields, or empty.

    >>> SpecError("block_size", 0, "an int >= 1")
    SpecError('block_size=0: expected an int >= 1')
    >>> SpecError("lease", 3.0, rule="only a 'lease' message may carry a lease")
    SpecError("lease=3.0: only a 'lease' message may carry a lease")

    """

    def __init__(self, field: str, value: object, expected: str = "", *, rule: str = "") -> None:
        super().__init__(f"{field}={shown(value)}: {rule or f'expected {expected}'}")
        self.field = field
        self.value = value
        self.expected = expected
        self.rule = rule

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_rule, (type(self), self.field, self.value, self.expected, self.rule)


@attrs.frozen
class Mismatch:
    """One field in which two valid sides do not fit: its name, both values and why it matters.

    *sides* names whose values they are where it is not the producer's and the consumer's: what is
    held and what is wanted, what is needed and the limit, the plan's and the cache's.
    """

    field: str
    producer: object
    consumer: object
    why: str
    sides: tuple[str, str] = ("producer", "consumer")

    def __str__(self) -> str:
        values = zip(self.sides, (self.producer, self.consumer), strict=True)
        both = ", ".join(f"{side} {shown(value)}" for side, value in values)
        return f"{self.field}: {both} ({self.why})"


class MismatchError(KVSpecError):
    """Two valid sides do not fit together; *mismatches* lists every differing field."""

    def __init__(self, mismatches: Iterable[Mismatch]) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__("\n".join(str(one) for one in self.mismatches))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.mismatches,)


class WireError(KVSpecError):
    """A message of the peer is not valid.

    Attributes:
        path: Place in the message, such as `message.rank.tp`.
        value: The value that was refused.
        expected: The requirement as a noun phrase, or empty if there is a rule.
        rule: The requirement as a sentence, or empty.

    """

    def __init__(self, path: str, value: object, expected: str = "", *, rule: str = "") -> None:
        requirement = f": {rule}" if rule else f", expected {expected}"
        super().__init__(f"{path}: got {shown(value)}{requirement}")
        self.path = path
        self.value = value
        self.expected = expected
        self.rule = rule

    def __reduce__(self) -> tuple[Any, ...]:
        return _with_rule, (type(self), self.path, self.value, self.expected, self.rule)


def _with_rule(
    kind: type[SpecError | WireError], place: str, value: object, expected: str, rule: str
) -> SpecError | WireError:
    """Make an error anew from a pickle, which passes positional arguments only."""
    return kind(place, value, expected, rule=rule)


@enum.verify(enum.UNIQUE)
class TransferState(enum.StrEnum):
    """The state in which a `TransferError` leaves a transfer.

    A member equals its plain string. `docs/faults.md` prints all members.

    Attributes:
        meaning: What is known of the transfer.
        remedy: What the caller does next.

    """

    meaning: str
    remedy: str

    def __new__(cls, value: str, meaning: str, remedy: str) -> Self:
        """Make a member that equals *value*."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning, member.remedy = meaning, remedy
        return member

    PEER_LOST = (
        "peer_lost",
        "the peer died or was cut off, or this rank's memory is gone; its blocks are undefined",
        "disconnect the peer and connect anew",
    )
    STALE_PEER = (
        "stale_peer",
        "the peer is not, or no longer, the one that was connected",
        "disconnect it and connect with its present metadata",
    )
    NOT_REGISTERED = (
        "not_registered",
        "a row is not inside memory that was registered when metadata was taken",
        "register the memory, take the metadata again and connect with it",
    )
    TIMEOUT = (
        "timeout",
        "the time is over; nothing is known of the data",
        "treat the destination blocks as undefined; try again, or wait longer",
    )
    BUSY = (
        "busy",
        "an earlier transfer or load of the same bytes or blocks is not over",
        "wait(), reap() or close() first",
    )
    STOPPED = (
        "stopped",
        "one side gave the transfer up; what was in flight is in quarantine until it ends",
        "use the destination blocks only after that; load the request anew if it is still needed",
    )
    GONE = (
        "gone",
        "the producer no longer holds the request, or is no more; what was read is void",
        "compute the blocks, or load the request from a producer that holds it",
    )
    DIFFERS = (
        "differs",
        "what arrived, or was pushed, is not what the consumer asked for",
        "compute the blocks, or load the request anew; both sides may name different blocks",
    )
    UNVERIFIED = (
        "unverified",
        "the data arrived, but could not be compared with what the producer holds",
        "pass `blocks` to the producer's `ledger.hold`, or load without `digest`",
    )
    CLOSED = (
        "closed",
        "the session, the rank or the list is closed",
        "open a new one",
    )
    FORKED = (
        "forked",
        "agents and sessions do not survive a fork",
        "start processes with spawn",
    )
    UNAVAILABLE = (
        "unavailable",
        "NIXL or its backend is missing, or an address cannot be listened on",
        "install NIXL, repair the backend, or give another address",
    )
    INTERRUPTED = (
        "interrupted",
        "an exception, of a signal perhaps, came between the making of a piece and its posting",
        "start the transfer again",
    )
    BUG = (
        "bug",
        "kvspec or its caller passed NIXL something that kvspec should have refused itself",
        "report it, with the message",
    )

    @property
    def advice(self) -> str:
        """The meaning and the remedy, as messages show them."""
        return f"{self.meaning}; {self.remedy}"


class TransferError(KVSpecError):
    """The transport failed, at *rank*, for *request*, leaving the transfer in *state*.

    A plain string that equals a state is converted.
    """

    def __init__(
        self,
        message: str,
        *,
        rank: object = None,
        request: object = None,
        state: TransferState,
    ) -> None:
        known = next((each for each in TransferState if each == state), None)
        if known is None:
            raise SpecError("state", state, f"one of {', '.join(TransferState)}")
        told = {"rank": rank, "request": request, "state": known}
        where = ", ".join(f"{name}={value}" for name, value in told.items() if value is not None)
        super().__init__(f"{message} ({where})" if where else message)
        self.message = message
        self.rank = rank
        self.request = request
        self.state = known

    def __reduce__(self) -> tuple[Any, ...]:
        return _transfer_error, (self.message, self.rank, self.request, self.state)


def _transfer_error(
    message: str, rank: object, request: object, state: TransferState
) -> TransferError:
    return TransferError(message, rank=rank, request=request, state=state)
