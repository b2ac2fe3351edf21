"""Introduce, connect and forget the peers of one rank.

Invariant: nothing of a peer is loaded before its introduction was checked. Its hello messages are
never returned to the caller.
"""

from __future__ import annotations

import contextlib

from kvspec.errors import TransferError, TransferState
from kvspec.nixl.agent import Agent
from kvspec.nixl.envelope import Envelope, opened
from kvspec.nixl.notifications import HELLO, Inbox
from kvspec.nixl.transfer_spec import Prepared


class Peers:
    """The peers of *agent*'s rank, and the lists that were prepared of each and of the rank."""

    def __init__(self, agent: Agent, inbox: Inbox, secret: bytes | None) -> None:
        self._agent = agent
        self._inbox = inbox
        self._secret = secret
        self._lists: dict[str | None, list[Prepared]] = {None: []}  # None: the rank's own

    @property
    def names(self) -> tuple[str, ...]:
        """Who is connected."""
        return tuple(name for name in tuple(self._lists) if name is not None)

    @property
    def lists(self) -> int:
        """How many lists nixl holds."""
        every = tuple(self._lists.values())  # at once: another thread may connect meanwhile
        return sum(not prepared.released for lists in every for prepared in tuple(lists))

    def introduce(self, metadata: bytes) -> Envelope:
        """Return who is introduced by *metadata*, and hear it from now on."""
        peer = opened(metadata, self._secret)
        name = self._agent.name
        if peer.name == name:
            message = f"{name!r} is this rank's own name: connect with the metadata of another rank"
            raise TransferError(message, rank=name, state=TransferState.STALE_PEER)
        self._inbox.introduced.add(peer.name)
        return peer

    def load(self, peer: Envelope) -> bool:
        """Load *peer*'s metadata and greet it; return whether it is connected anew."""
        with self._agent.locked():
            new = peer.name not in self._lists
            self._agent.connect(peer.name, peer.metadata)
            self._lists.setdefault(peer.name, [])
            try:
                self._agent.notify(peer.name, HELLO)
            except TransferError:
                if new:
                    with contextlib.suppress(TransferError):
                        self._disconnect(peer.name)
                raise
            return new

    def forget(self, peer: str) -> None:
        """Forget *peer*, its lists and what it sent; refuse who is neither connected nor heard."""
        if not isinstance(peer, str) or peer not in self._inbox.introduced:
            self.check(peer)
        self._inbox.forget(peer)
        if peer in self._lists:
            self._disconnect(peer)

    def _disconnect(self, peer: str) -> None:
        for prepared in self._lists[peer]:
            prepared.release()
        del self._lists[peer]
        self._agent.disconnect(peer)

    def check(self, peer: str) -> None:
        """Refuse who is not connected."""
        if not isinstance(peer, str) or peer not in self.names:
            raise TransferError(
                f"{peer!r} is not connected", rank=peer, state=TransferState.STALE_PEER
            )

    def keep(self, prepared: Prepared) -> Prepared:
        """Keep a list until it is released, and return it."""
        lists = self._lists[prepared.peer]
        lists[:] = [known for known in lists if not known.released] + [prepared]
        return prepared

    def close(self) -> None:
        """Release every list, disconnect everybody."""
        for lists in self._lists.values():
            for prepared in lists:
                prepared.release()
        for peer in self.names:
            with contextlib.suppress(TransferError):  # a dead one is gone already
                self._agent.disconnect(peer)

    def clear(self) -> None:
        """Forget all, of an agent that is gone."""
        self._lists = {None: []}
        self._inbox.clear()
