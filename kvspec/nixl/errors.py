"""What nixl's errors mean: the states of a `TransferError`, in words.

nixl says one word for many faults, so what was being done decides with it.
"""

from __future__ import annotations

STATES = {
    "peer_lost": "the peer died or was cut off, or this rank's own memory is gone; destination"
    " blocks are undefined; disconnect and connect anew",
    "stale_peer": "the peer is not, or no longer, the one that was connected; disconnect it and"
    " connect with its present metadata",
    "not_registered": "a row is not inside memory that was registered when metadata was taken",
    "timeout": "nothing is known of the data",
    "busy": "not over; wait(), reap() or close() first",
    "stopped": "it was given up; what was in flight is in quarantine until it ends",
    "closed": "the rank or the list is closed",
    "forked": "agents do not survive a fork; start processes with spawn",
    "unavailable": "nixl or its backend is missing",
    "interrupted": "an exception, of a signal perhaps, came between the making of a piece and its"
    " posting; start the transfer again",
    "bug": "kvspec passed nixl something that it should have refused itself",
}
_OF_KIND = {
    "RemoteDisconnect": "peer_lost",
    "Cancelled": "peer_lost",
    "Backend": "peer_lost",
    "Unknown": "peer_lost",
    "NotFound": "stale_peer",
}
_OF_STEP = {
    ("create", "NotFound"): "unavailable",
    ("create", "Backend"): "unavailable",
    ("create", "NotSupported"): "unavailable",
    ("register", "Backend"): "not_registered",
    ("prepare", "NotFound"): "not_registered",
    ("check", "NotPosted"): "interrupted",
    ("connect", "NotAllowed"): "stale_peer",
    ("connect", "InvalidParam"): "stale_peer",
    ("connect", "Mismatch"): "stale_peer",
}
# Kinds after which the backend has let go of a handle. Not NotFound: it also means that the peer's
# entry was removed while the data still moves.
TERMINAL_KINDS = frozenset({"RemoteDisconnect", "Cancelled", "Backend", "NotPosted"})


def kind_of(error: BaseException) -> str:
    """Return nixl's word for *error*: "NotFound" for nixlNotFoundError."""
    return type(error).__name__.removeprefix("nixl").removesuffix("Error")


def state_of(step: str, kind: str) -> str:
    """Return the state after *kind* came from *step*."""
    return _OF_STEP.get((step, kind), _OF_KIND.get(kind, "bug"))
