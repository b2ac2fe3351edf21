"""Introduce ranks to each other: seal, check, connect and forget, and pass notifications.

Invariant: NIXL receives only metadata whose seal and agent names were checked. Payloads of unknown
senders are returned only once the sender is connected, and the memory for them is bounded. The
hello messages of this module are never returned.

NIXL aborts the process on some damaged metadata and keeps parts of other damaged metadata. It also
lets the metadata of one agent replace that of another agent. So this module checks a MAC with the
shared secret, and the agent's name inside NIXL's own bytes. Without a secret the MAC detects only
accidents: anyone who can write to the channel can crash its readers.

kvspec sends one notification for each plan, after its data. It never attaches one to a transfer:
NIXL sends an attached notification only when the initiator polls the finished transfer.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import uuid

import msgspec

from kvspec.errors import SpecError, TransferError, TransferState, WireError
from kvspec.inputs import MOST, instance
from kvspec.nixl.agent import Agent, Prepared
from kvspec.wire.seal import Secret

MAX_NAME = 255  # bytes
MIN_SECRET = 16  # bytes

_MAGIC = b"kvspec-nixl-3\n"
_INNER = struct.Struct("<16sQ")  # how NIXL's bytes begin: a tag, and the length of the agent's name
_TAG = b"nixlSerDes|Agent"

MAX_NOTIFICATION = 64 << 10  # Bytes. Sending a longer one blocks the sender noticeably.
# Notifications of unknown senders that are kept until they are connected, and their bytes.
MAX_KEPT = 4096
MAX_KEPT_BYTES = 4 << 20
HELLO = b"kvspec-nixl hello"  # It opens the connection, so that the first read need not.


class Envelope(msgspec.Struct, array_like=True, frozen=True, kw_only=True):
    """The introduction of one agent.

    Attributes:
        name: Name of the agent.
        metadata: NIXL's metadata of the agent.
        probe: Address of one byte of registered host memory. A peer reads it to connect.
    """

    name: str
    metadata: bytes
    probe: int

    def seal(self, secret: bytes) -> bytes:
        """Return the sealed bytes. A peer with the same *secret* detects any change."""
        return Secret(secret).seal_value(_MAGIC, self)


def name_of(name: object, prefix: str) -> str:
    """Return the checked *name*. If it is None, return a new one: *prefix*, host, pid and uuid."""
    if name is None:
        instance("prefix", prefix, str)
        name = f"{prefix}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    elif prefix:
        raise SpecError("name", name, rule="a name and a prefix cannot be combined")
    try:
        size = len(instance("name", name, str).encode())
    except UnicodeEncodeError:
        size = 0
    if not 0 < size <= MAX_NAME:
        raise SpecError("name", name, f"a text of 1 to {MAX_NAME} bytes")
    return str(name)


def secret_of(secret: object) -> bytes:
    """Return *secret*, or `KVSPEC_SECRET` of the environment if it is None, as bytes.

    Empty bytes mean that only trusted programs reach the channel. There is no default: a rank that
    authenticates nobody must be the decision of its caller.

    Raises:
        SpecError: If there is no secret, or it is too short to be one.
    """
    if secret is None and (secret := os.environ.get("KVSPEC_SECRET")) is None:
        rule = (
            "set KVSPEC_SECRET to the same random text for all ranks, or pass secret=b'' if only"
            " trusted programs reach the channel"
        )
        raise SpecError("secret", None, rule=rule)
    try:
        key = secret.encode() if isinstance(secret, str) else secret
    except UnicodeEncodeError:
        raise SpecError("secret", "a str", "a str that UTF-8 can encode") from None
    if not isinstance(key, bytes):
        raise SpecError("secret", type(secret).__name__, "a str or bytes")
    if secret != b"" and len(key) < MIN_SECRET:
        wanted = f"at least {MIN_SECRET} bytes, or secret=b'' for a trusted channel"
        raise SpecError("secret", f"{len(key)} bytes", wanted)
    return key


def opened(sealed: object, secret: bytes) -> Envelope:
    """Return what was sealed, or raise `WireError`."""
    wanted = "the complete bytes that NixlRank.metadata() returned"
    peer = Secret(secret).unseal_value("metadata", _MAGIC, sealed, Envelope, wanted)
    name = peer.name.encode()
    if not 0 < len(name) <= MAX_NAME:
        raise WireError("metadata.name", f"{len(name)} bytes", f"1 to {MAX_NAME} bytes")
    if not 0 < peer.probe < MOST:
        raise WireError("metadata.probe", peer.probe, f"an address below {MOST}")
    inner = _inner_name(peer.metadata)
    if inner != name:
        expected = f"{peer.name!r}, the name on the envelope"
        raise WireError("metadata.agent", inner[:MAX_NAME], expected)
    return peer


def _inner_name(metadata: bytes) -> bytes:
    """Return the name of the agent in NIXL's *metadata*, or raise `WireError`."""
    tag, size = _INNER.unpack_from(metadata.ljust(_INNER.size, b"\0"))
    if tag != _TAG or len(metadata) < _INNER.size + size:
        raise WireError("metadata.agent", metadata[: _INNER.size], "metadata of a NIXL agent")
    return metadata[_INNER.size :][:size]


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
