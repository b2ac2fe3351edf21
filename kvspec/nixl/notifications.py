"""Keep the notifications that arrived until the caller takes them.

Invariant: payloads are compared as a whole. Memory is bounded: each introduced peer has its own
limit, all unknown peers share one, and notifications beyond the limit are only counted.

kvspec sends one notification for each plan, after its data. It never attaches one to a transfer:
NIXL sends an attached notification only when the initiator polls the finished transfer.
"""

from __future__ import annotations

import time
from collections import Counter

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import instance, seconds
from kvspec.nixl.agent import Agent

MAX_NOTIFICATION = 64 << 10  # bytes; a notification blocks its sender for as long as it takes
MAX_KEPT = 4096  # notifications of one peer that nobody took
MAX_KEPT_BYTES = 4 << 20
HELLO = b"kvspec-nixl hello"  # opens the connection, so that the first read does not
FIRST_WAIT, LAST_WAIT = 20e-6, 2e-3  # seconds between polls: spinning is slower, it starves nixl


def check_payload(payload: object) -> None:
    """Refuse what is not a notification: bytes, at most `MAX_NOTIFICATION`, not the greeting."""
    if not isinstance(payload, bytes):
        raise SpecError("payload", type(payload).__name__, "bytes")
    if len(payload) > MAX_NOTIFICATION or payload == HELLO:
        wanted = f"at most {MAX_NOTIFICATION} bytes other than {HELLO!r}"
        raise SpecError("payload", f"{len(payload)} bytes", wanted)


class Inbox:
    """What came to *agent* and was not taken yet, in order by peer.

    What strangers sent is given out once they are *introduced*. *refused* counts what did not fit,
    by peer; "" stands for strangers.
    """

    def __init__(self, agent: Agent) -> None:
        self.introduced: set[str] = set()
        self.refused: Counter[str] = Counter()
        self._agent = agent
        self._kept: dict[str, list[bytes]] = {}

    def __len__(self) -> int:
        """Return how many are kept."""
        return sum(map(len, self._kept.values()))

    def forget(self, peer: str) -> None:
        """Forget *peer* and what it sent: it is a stranger from now on."""
        self.introduced.discard(peer)
        self._kept.pop(peer, None)
        self.refused.pop(peer, None)

    def clear(self) -> None:
        """Forget what is kept."""
        self._kept.clear()

    def drain(self) -> list[tuple[str, bytes]]:
        """Take all that peers sent, as (peer, payload)."""
        with self._agent.locked():
            self._receive()
            peers = [peer for peer in self._kept if peer in self.introduced]
            return [(peer, payload) for peer in peers for payload in self._kept.pop(peer)]

    def wait(self, payload: bytes, timeout: float, peer: str | None) -> str:
        """Take one that equals *payload*, within *timeout* seconds; return its sender."""
        check_payload(payload)
        if peer is not None:
            instance("peer", peer, str)
        deadline, rest = time.monotonic() + seconds("timeout", timeout), FIRST_WAIT
        with self._agent.waiting():
            while True:
                sender = self._take(payload, peer)
                if sender is not None:
                    return sender
                left = deadline - time.monotonic()
                if left <= 0:
                    message = f"no notification {payload[:64]!r} arrived within {timeout} s"
                    raise TransferError(message, rank=peer, state=TransferState.TIMEOUT)
                time.sleep(min(rest, left))
                rest = min(2 * rest, LAST_WAIT)

    def _take(self, payload: bytes, peer: str | None) -> str | None:
        with self._agent.locked():
            self._receive()
            for sender, payloads in self._kept.items():
                wanted = sender in self.introduced and peer in {None, sender}
                if wanted and payload in payloads:
                    payloads.remove(payload)
                    return sender
        return None

    def _receive(self) -> None:
        for sender, payloads in self._agent.notifications().items():
            stranger = sender not in self.introduced
            sharing = set(self._kept) - self.introduced if stranger else {sender}
            kept = [len(payload) for name in sharing for payload in self._kept.get(name, ())]
            room, space = MAX_KEPT - len(kept), MAX_KEPT_BYTES - sum(kept)
            for payload in payloads:
                if payload == HELLO:
                    continue
                if not room or space < len(payload):
                    self.refused["" if stranger else sender] += 1
                    continue
                self._kept.setdefault(sender, []).append(payload)
                room, space = room - 1, space - len(payload)
