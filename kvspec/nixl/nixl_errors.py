"""Map NIXL's exceptions to `TransferState`.

NIXL uses one exception for many faults. So the step that failed decides the state as well.
"""

from __future__ import annotations

from kvspec.errors import TransferState

_OF_KIND = {
    "RemoteDisconnect": TransferState.PEER_LOST,
    "Cancelled": TransferState.PEER_LOST,
    "Backend": TransferState.PEER_LOST,
    "Unknown": TransferState.PEER_LOST,
    "NotFound": TransferState.STALE_PEER,
}
_OF_STEP = {
    ("create", "NotFound"): TransferState.UNAVAILABLE,
    ("create", "Backend"): TransferState.UNAVAILABLE,
    ("create", "NotSupported"): TransferState.UNAVAILABLE,
    ("register", "Backend"): TransferState.NOT_REGISTERED,
    ("prepare", "NotFound"): TransferState.NOT_REGISTERED,
    ("check", "NotPosted"): TransferState.INTERRUPTED,
    ("connect", "NotAllowed"): TransferState.STALE_PEER,
    ("connect", "InvalidParam"): TransferState.STALE_PEER,
    ("connect", "Mismatch"): TransferState.STALE_PEER,
}
# Kinds after which the backend has let go of a handle. Not NotFound: it also means that the peer's
# entry was removed while the data still moves.
TERMINAL_KINDS = frozenset({"RemoteDisconnect", "Cancelled", "Backend", "NotPosted"})


def kind_of(error: BaseException) -> str:
    """Return nixl's word for *error*: "NotFound" for nixlNotFoundError."""
    return type(error).__name__.removeprefix("nixl").removesuffix("Error")


def state_of(step: str, kind: str) -> TransferState:
    """Return the state after *kind* came from *step*."""
    return _OF_STEP.get((step, kind), _OF_KIND.get(kind, TransferState.BUG))
