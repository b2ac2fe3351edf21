"""Send and take NIXL's own notifications. kvspec uses none but the hello of `connect`."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvspec.nixl import NixlRank


def notify(rank: NixlRank, peer: str, payload: bytes) -> None:
    """Send *payload* to *peer*. Raises `TransferError` if the peer is lost."""
    rank._agent.call("notify", "genNotif", peer, payload, peer=peer)


def notifications(rank: NixlRank) -> dict[str, list[bytes]]:
    """Return all notifications that arrived, by sender. A polled rank makes progress."""
    arrived: dict[str, list[bytes]] = rank._agent.call("notifications", "getNotifs", {}, [])
    return arrived
