"""Connect and forget the peers of one rank, and pass notifications between them.

Invariant: nothing of a peer is loaded before its introduction was checked. Payloads of unknown
senders are returned only once the sender is connected, and the memory for them is bounded. The
hello messages of this module are never returned.

kvspec sends one notification for each plan, after its data. It never attaches one to a transfer:
NIXL sends an attached notification only when the initiator polls the finished transfer.
"""

from __future__ import annotations

import contextlib

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.nixl.agent import Agent
from kvspec.nixl.envelope import Envelope, opened
from kvspec.nixl.transfer_spec import Prepared

MAX_NOTIFICATION = 64 << 10  # Bytes. Sending a longer one blocks the sender noticeably.
# Notifications of unknown senders that are kept until they are connected, and their bytes.
MAX_KEPT = 4096
MAX_KEPT_BYTES = 4 << 20
HELLO = b"kvspec-nixl hello"  # It opens the connection, so that the first read need not.


def check_payload(payload: object) -> None:
    """Raise `SpecError` unless *payload* is short bytes other than the hello message."""
    if not isinstance(payload, bytes):
        raise SpecError("payload", type(payload).__name__, "bytes")
    if len(payload) > MAX_NOTIFICATION or payload == HELLO:
        expected = f"at most {MAX_NOTIFICATION} bytes other than {HELLO!r}"
        raise SpecError("payload", f"{len(payload)} bytes", expected)


class Peers:
    """The peers of one rank, the lists that were prepared for each, and their notifications.

    Attributes:
        early: Sender and payload of the notifications of unknown senders.
        answered: Names of the peers from which a test read has succeeded.
    """

    def __init__(self, agent: Agent, secret: bytes) -> None:
        self.early: list[tuple[str, bytes]] = []
        self.answered: set[str] = set()
        self._agent = agent
        self._secret = secret
        self._lists: dict[str | None, list[Prepared]] = {None: []}  # None: lists of the rank.

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the connected peers."""
        return tuple(name for name in tuple(self._lists) if name is not None)

    @property
    def lists(self) -> int:
        """Number of lists that NIXL holds."""
        every = tuple(self._lists.values())  # At once: another thread may connect meanwhile.
        return sum(not prepared.released for lists in every for prepared in tuple(lists))

    def check_metadata(self, metadata: bytes) -> Envelope:
        """Return the checked content of *metadata*. It must not be that of this rank."""
        peer = opened(metadata, self._secret)
        name = self._agent.name
        if peer.name == name:
            message = f"{name!r} is this rank's own name: connect with the metadata of another rank"
            raise TransferError(message, rank=name, state=TransferState.STALE_PEER)
        return peer

    def load(self, peer: Envelope) -> None:
        """Load the metadata of *peer* and send hello."""
        with self._agent.lock:
            self._agent.check_open()
            new = peer.name not in self._lists
            self._agent.connect(peer.name, peer.metadata)
            self._lists.setdefault(peer.name, [])
            try:
                self._agent.notify(peer.name, HELLO)
            except TransferError:
                if new:
                    with contextlib.suppress(TransferError):
                        self.forget(peer.name)
                raise

    def forget(self, peer: str) -> None:
        """Forget *peer* and its lists. Raise `TransferError` if it is not connected."""
        self.check(peer)
        self.answered.discard(peer)
        for prepared in self._lists[peer]:
            prepared.release()
        del self._lists[peer]
        self._agent.disconnect(peer)

    def check(self, peer: str) -> None:
        """Raise `TransferError` "stale_peer" if *peer* is not connected."""
        if not isinstance(peer, str) or peer not in self.names:
            raise TransferError(
                f"{peer!r} is not connected", rank=peer, state=TransferState.STALE_PEER
            )

    def keep(self, prepared: Prepared) -> Prepared:
        """Keep a list until it is released, and return it."""
        lists = self._lists[prepared.peer]
        lists[:] = [known for known in lists if not known.released] + [prepared]
        return prepared

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return sender and payload of all notifications of connected peers that arrived."""
        with self._agent.lock:
            arrived, early = list[tuple[str, bytes]](), list[tuple[str, bytes]]()
            kept, size = self.early, 0
            received = self._agent.notifications().items()
            new = [(sender, payload) for sender, payloads in received for payload in payloads]
            for sender, payload in kept + new:
                if sender in self._lists and payload != HELLO:
                    arrived.append((sender, payload))
                elif payload != HELLO and len(early) < MAX_KEPT:
                    size += len(payload)
                    early += [(sender, payload)] * (size <= MAX_KEPT_BYTES)
            self.early = early
            return arrived

    def close(self) -> None:
        """Release every list and disconnect every peer."""
        for lists in self._lists.values():
            for prepared in lists:
                prepared.release()
        for peer in self.names:
            with contextlib.suppress(TransferError):  # NIXL has forgotten a dead peer already.
                self._agent.disconnect(peer)

    def clear(self) -> None:
        """Forget everything about an agent that was destroyed."""
        self._lists = {None: []}
        self.early = []
        self.answered = set()
