"""Errors, sorted by whose fault it is.

Law: every error names the value that was refused and what was wanted instead, and is raised before
anything moves. All of them survive a pickle, since they cross process boundaries.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

MAX_SHOWN = 400
"""Characters of a value in a message; of a longer one the beginning is shown, and its type."""


def shown(value: object) -> str:
    """Return *value* as a message shows it."""
    text = repr(value)
    if len(text) <= MAX_SHOWN:
        return text
    return f"{text[: MAX_SHOWN // 4]}... (a {type(value).__name__})"


class KVSpecError(Exception):
    """Any error of this library."""


class SpecError(KVSpecError, ValueError):
    """The caller's own description is impossible.

    *field* is the name of the argument, *value* what it was, *wanted* what would have been right.
    """

    def __init__(self, field: str, value: object, wanted: str) -> None:
        super().__init__(f"{field}={shown(value)}: wanted {wanted}")
        self.field = field
        self.value = value
        self.wanted = wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.wanted)


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
    """The peer sent rubbish: where in the message (*path*), the *value*, what was *wanted*."""

    def __init__(self, path: str, value: object, wanted: str) -> None:
        super().__init__(f"{path}: got {shown(value)}, wanted {wanted}")
        self.path = path
        self.value = value
        self.wanted = wanted

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.path, self.value, self.wanted)


class TransferError(KVSpecError):
    """The transport failed, at *rank*, for *request*, leaving the transfer in *state*."""

    def __init__(
        self,
        message: str,
        *,
        rank: object = None,
        request: object = None,
        state: str | None = None,
    ) -> None:
        told = {"rank": rank, "request": request, "state": state}
        where = ", ".join(f"{name}={value}" for name, value in told.items() if value is not None)
        super().__init__(f"{message} ({where})" if where else message)
        self.message = message
        self.rank = rank
        self.request = request
        self.state = state

    def __reduce__(self) -> tuple[Any, ...]:
        return _transfer_error, (self.message, self.rank, self.request, self.state)


def _transfer_error(
    message: str, rank: object, request: object, state: str | None
) -> TransferError:
    return TransferError(message, rank=rank, request=request, state=state)
