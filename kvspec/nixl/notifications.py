"""Notifications that came: kept until somebody takes them, compared whole, never by a part.

One is sent for a plan, after its data; it is never attached to a transfer, whose end nixl would
then tell only to a peer that is being polled.
"""

from __future__ import annotations

import time

from kvspec.errors import SpecError, TransferError
from kvspec.inputs import seconds
from kvspec.nixl.agent import Agent

MAX_NOTIFICATION = 64 << 10  # bytes; a notification blocks its sender for as long as it takes
HELLO = b"kvspec-nixl hello"  # opens the connection, so that the first read does not
FIRST_WAIT, LAST_WAIT = 20e-6, 2e-3  # seconds between polls: spinning is slower, it starves nixl


def check_payload(payload: object) -> None:
    """Refuse what is not a notification: bytes, at most `MAX_NOTIFICATION`, not the greeting."""
    if not isinstance(payload, bytes):
        raise SpecError("payload", type(payload).__name__, "bytes")
    if len(payload) > MAX_NOTIFICATION or payload == HELLO:
        wanted = f"at most {MAX_NOTIFICATION} bytes, and not {HELLO!r}"
        raise SpecError("payload", f"{len(payload)} bytes", wanted)


class Inbox:
    """What came to *agent* and was not taken yet, in order by peer."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._kept: list[tuple[str, bytes]] = []

    def drain(self) -> list[tuple[str, bytes]]:
        """Take all, as (peer, payload)."""
        with self._agent.locked():
            self._receive()
            taken = self._kept.copy()
            self._kept.clear()
        return taken

    def wait(self, payload: bytes, timeout: float, peer: str | None) -> str:
        """Take one that equals *payload*, within *timeout* seconds; return its sender."""
        deadline, rest = time.monotonic() + seconds("timeout", timeout), FIRST_WAIT
        while True:
            with self._agent.locked():
                self._receive()
                for place, (sender, received) in enumerate(self._kept):
                    if received == payload and peer in {None, sender}:
                        del self._kept[place]
                        return sender
            left = deadline - time.monotonic()
            if left <= 0:
                message = f"no notification {payload[:64]!r} in {timeout} s"
                raise TransferError(message, rank=peer, state="timeout")
            time.sleep(min(rest, left))
            rest = min(2 * rest, LAST_WAIT)

    def _receive(self) -> None:
        for peer, payloads in self._agent.notifications().items():
            self._kept += [(peer, payload) for payload in payloads if payload != HELLO]
