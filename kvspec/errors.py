"""The errors of the library, one class for each kind of cause.

Invariant: an error carries its facts as attributes, so that no caller has to read the message.
Every error can be pickled, because errors cross process boundaries.

How it works:
    Each class has a different cause, so it needs a different reaction:

    class            cause                                       the caller
    ---------------  ------------------------------------------  --------------------------
    `SpecError`      an argument or a description is wrong       repairs its own input
    `MismatchError`  two valid descriptions do not fit together  changes one of the engines
    `WireError`      a message of the peer is not valid          disconnects the peer
    `TransferError`  the transport or the peer failed            does what `state` advises
    `StoreError`     a stored object cannot be used or written   computes the page

    `SpecError` is also a `ValueError`, and `KVSpecError` is the base of all five. The first two are
    raised before any byte moves. A `TransferError` is of one of two classes, so that `except` can
    choose: `RemoteTransferError` if the other side is to blame, else `LocalTransferError`.

        >>> from kvspec import ParallelConfig
        >>> try:
        ...     ParallelConfig(tp_size=0)
        ... except SpecError as error:
        ...     print(error.field, error.value, "|", error)
        tp_size 0 | tp_size=0: expected an int >= 1
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from typing import Any, Literal, Self

import attrs

# A description of an engine can have thousands of characters, which would hide the message.
MAX_SHOWN = 400


def shown(value: object) -> str:
    """Return the `repr` of *value*, shortened if it has more than `MAX_SHOWN` characters.

    >>> shown(range(3))
    'range(0, 3)'
    >>> shown([0] * 1000)[-16:]
    ' 0, ... (a list)'
    """
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 4]}... (a {type(value).__name__})"


_KIB = 1024


def counted(count: int, noun: str) -> str:
    """Return a count with its noun, in the plural unless the count is 1.

    >>> counted(1, "layer"), counted(8000, "layer")
    ('1 layer', '8,000 layers')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def nbytes(size: float) -> str:
    """Return a size in the unit that is easiest to read.

    A size below 10 KiB stays in bytes unless it is a whole number of KiB: it is often compared with
    the product of a few small numbers.

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
    """The base class of all errors of this library."""


class SpecError(KVSpecError, ValueError):
    """An argument, or a field of a description, has a value that is not possible.

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
    """One field whose values on two sides do not fit together.

    Attributes:
        field: Name of the field, such as `layers.0.dtype`.
        producer: Value on the first side.
        consumer: Value on the second side.
        why: Why the values must fit, as a short clause.
        sides: Names of the two sides, for comparisons of other things than two engines. For
            example `("plan", "cache")`.

    >>> print(Mismatch("layers.0.dtype", "float16", "bfloat16", "the bytes mean other numbers"))
    layers.0.dtype: producer 'float16', consumer 'bfloat16' (the bytes mean other numbers)
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
    """Two sides are valid, but do not fit together.

    Attributes:
        mismatches: Every field that differs, not only the first.

    >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup, plan_transfer
    >>> def engine(dtype):
    ...     spec = FullAttentionSpec(
    ...         block_size=16, total_num_kv_heads=8, head_size=128, dtype=dtype)
    ...     return EngineSpec(groups=[KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> try:
    ...     plan_transfer(engine("float16"), engine("bfloat16"))
    ... except MismatchError as error:
    ...     print([(m.field, m.producer, m.consumer) for m in error.mismatches])
    [('l.dtype', 'float16', 'bfloat16')]
    """

    def __init__(self, mismatches: Iterable[Mismatch]) -> None:
        self.mismatches = tuple(mismatches)
        super().__init__("\n".join(map(str, self.mismatches)))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.mismatches,)


class WireError(KVSpecError):
    """A message of the peer is not valid.

    The message comes from another machine, so its sender has the fault, not the caller.

    Attributes:
        path: Place in the message, such as `message.rank.tp`.
        value: The value that was refused.
        expected: The requirement as a noun phrase, or empty if there is a rule.
        rule: The requirement as a sentence, or empty.

    >>> WireError("message.rank.tp", -1, "an int >= 0")
    WireError('message.rank.tp: got -1, expected an int >= 0')
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


StoreProblem = Literal["absent", "damaged", "foreign", "version", "unsafe", "full", "failed"]
"""The cause of a `StoreError`.

| problem | meaning |
|---|---|
| absent | no object of this name is stored, or no longer |
| damaged | the object is shorter or longer than its header says, or its bytes were changed |
| foreign | kvspec did not write it, or it is another object under this name |
| version | another version of kvspec wrote it |
| unsafe | its owner, permissions or kind allow others to change it |
| full | the limit, the quota or the disk leaves no room, so nothing was written |
| failed | the operating system or the object store reported an error |
"""


class StoreError(KVSpecError):
    """A stored object cannot be read or written. The caller can always compute the page instead.

    Attributes:
        problem: The cause, one of `StoreProblem`.
        place: The object or its file.
        field: Name of the field that is wrong.
        value: The value that was found.
        expected: The requirement as a noun phrase.

    >>> StoreError("damaged", "tp0 of group full", "checksum", "00000000", "'1c291ca3'")
    StoreError("tp0 of group full: checksum='00000000': expected '1c291ca3' (damaged)")
    """

    def __init__(
        self, problem: StoreProblem, place: str, field: str, value: object, expected: str
    ) -> None:
        super().__init__(f"{place}: {field}={shown(value)}: expected {expected} ({problem})")
        self.problem = problem
        self.place = place
        self.field = field
        self.value = value
        self.expected = expected

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problem, self.place, self.field, self.value, self.expected)


def _with_rule(
    kind: type[SpecError | WireError], place: str, value: object, expected: str, rule: str
) -> SpecError | WireError:
    """Create an error from a pickle, which passes positional arguments only."""
    return kind(place, value, expected, rule=rule)


@enum.verify(enum.UNIQUE)
class TransferState(enum.StrEnum):
    """The state in which a `TransferError` leaves a transfer.

    A member equals its plain string. `docs/limits.md` lists all members.

    Attributes:
        meaning: The facts that are known about the transfer.
        remedy: The next step of the caller.
        side: "remote" if the other side is to blame, so that another peer may help. Else "local".

    >>> TransferState.TIMEOUT == "timeout"
    True
    >>> TransferState.CLOSED.advice
    'the session, the rank or the list is closed; open a new one'
    """

    meaning: str
    remedy: str
    side: Literal["local", "remote"]

    def __new__(
        cls, value: str, meaning: str, remedy: str, side: Literal["local", "remote"] = "local"
    ) -> Self:
        """Create a member that equals *value*."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning, member.remedy, member.side = meaning, remedy, side
        return member

    PEER_LOST = (
        "peer_lost",
        "the peer cannot be reached, or the memory of this rank is gone",
        "load with its next ticket, or disconnect the peer and connect again",
        "remote",
    )
    STALE_PEER = (
        "stale_peer",
        "the peer is not the one that was connected, or was restarted since",
        "disconnect the peer and connect with its current metadata",
        "remote",
    )
    NOT_REGISTERED = (
        "not_registered",
        "a row is outside the registered memory that the metadata contains, or NIXL refused it",
        "register the memory, create the metadata again and connect with it",
    )
    FILE_FAILED = (
        "file_failed",
        "a file is shorter than its registered memory, was not opened for this, or its disk failed",
        "treat the destination as undefined, and check the length, the mode and the disk",
    )
    TIMEOUT = (
        "timeout",
        "the other side was not done within the time limit, and the state of the data is unknown",
        "treat the destination blocks as undefined, and try again or wait longer",
        "remote",
    )
    OVERDUE = (
        "overdue",
        "the time limit has passed while nothing was in flight: this rank was busy or not polled",
        "treat the destination blocks as undefined, and poll more often or wait longer",
    )
    BUSY = (
        "busy",
        "an earlier transfer or load of the same bytes or blocks has not ended",
        "wait until it is over, or close() first",
    )
    CANCELLED = (
        "cancelled",
        "this side cancelled it, and operations in flight are in quarantine until they end",
        "reuse the destination blocks only after that, and load the request again if needed",
    )
    GONE = (
        "gone",
        "the producer no longer holds the request or has ended, and the data that was read is void",
        "compute the blocks, or load the request from a producer that holds it",
        "remote",
    )
    DIFFERS = (
        "differs",
        "the data that arrived differs from the data that the producer holds",
        "compute the blocks, or load the request again: the sides may have named different blocks",
        "remote",
    )
    UNCOMPARED = (
        "uncompared",
        "the data arrived, but could not be compared with the data of the producer",
        "pass `blocks` to the producer's `hold`, or load without `checksum`",
        "remote",
    )
    REFUSED = (
        "refused",
        "the request does not fit the ticket or the connected engine, and nothing of it moved",
        "read the `__cause__` of the error, correct the request, or compute the blocks",
    )
    CLOSED = (
        "closed",
        "the session, the rank or the list is closed",
        "open a new one",
    )
    FORKED = (
        "forked",
        "an agent or a session does not work in a forked process",
        "start processes with the method spawn",
    )
    UNAVAILABLE = (
        "unavailable",
        "NIXL or its backend is missing, or an address cannot be used to listen",
        "install NIXL, repair the backend, or pass another address",
    )
    INTERRUPTED = (
        "interrupted",
        "an exception, perhaps from a signal handler, came before a prepared handle was posted",
        "start the transfer again",
    )
    BUG = (
        "bug",
        "kvspec has broken a rule of its own, or NIXL refused an argument that kvspec accepted",
        "report the error with its message",
    )

    @property
    def advice(self) -> str:
        """The meaning and the remedy, as they stand at the end of a message."""
        return f"{self.meaning}; {self.remedy}"


class TransferError(KVSpecError):
    """The transport or the peer failed while a transfer was prepared or ran.

    Attributes:
        message: Description of the failure, without the facts below.
        rank: Rank or peer at which it failed, or None.
        request: Id of the request that failed, or None.
        state: State of the transfer. It determines what the caller can do next, and the class.

    >>> TransferError("no answer", rank="tp0", request="r1", state=TransferState.TIMEOUT)
    RemoteTransferError('no answer (rank=tp0, request=r1, state=timeout)')
    """

    def __new__(
        cls, *_: object, state: TransferState, rank: object = None, request: object = None
    ) -> Self:
        """Create an error of the class that *state* determines."""
        del rank, request
        remote = any(member == state and member.side == "remote" for member in TransferState)
        kind: Any = cls
        if cls is TransferError:
            kind = RemoteTransferError if remote else LocalTransferError
        error: Self = super().__new__(kind)
        return error

    def __init__(
        self,
        message: str,
        *,
        rank: object = None,
        request: object = None,
        state: TransferState,
    ) -> None:
        # A plain string that equals a state becomes the member, so `state.remedy` always works.
        known_state = next((member for member in TransferState if member == state), None)
        if known_state is None:
            raise SpecError("state", state, f"one of {', '.join(TransferState)}")
        facts = {"rank": rank, "request": request, "state": known_state}
        where = ", ".join(f"{name}={value}" for name, value in facts.items() if value is not None)
        super().__init__(f"{message} ({where})" if where else message)
        self.message = message
        self.rank = rank
        self.request = request
        self.state = known_state

    def __reduce__(self) -> tuple[Any, ...]:
        return _transfer_error, (self.message, self.rank, self.request, self.state)


class LocalTransferError(TransferError):
    """This side is to blame. Another peer would not help.

    >>> TransferError("it was closed", state=TransferState.CLOSED)
    LocalTransferError('it was closed (state=closed)')
    """


class RemoteTransferError(TransferError):
    """The other side or the network is to blame. Compute the blocks, or load them elsewhere.

    >>> TransferError("its process has ended", state=TransferState.PEER_LOST)
    RemoteTransferError('its process has ended (state=peer_lost)')
    """


def _transfer_error(
    message: str, rank: object, request: object, state: TransferState
) -> TransferError:
    return TransferError(message, rank=rank, request=request, state=state)
