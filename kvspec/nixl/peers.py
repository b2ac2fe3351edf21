"""Introduce ranks to each other: name a rank, seal its metadata, and check that of a peer.

Invariant: NIXL receives only metadata whose seal and agent names were checked.

NIXL aborts the process on some damaged metadata and keeps parts of other damaged metadata. It also
lets the metadata of one agent replace that of another agent. So this module checks a MAC with the
shared secret, and the agent's name inside NIXL's own bytes. Without a secret the MAC detects only
accidents: anyone who can write to the channel can crash its readers.
"""

from __future__ import annotations

import os
import socket
import struct
import uuid

from kvspec.errors import SpecError, WireError
from kvspec.inputs import MOST, instance
from kvspec.wire.handshake import MAX_NAME, is_name
from kvspec.wire.packing import WireStruct, decoder_of, pack, unpack
from kvspec.wire.seal import Secret

_METADATA_MAGIC = b"kvspec-nixl-3\n"
_INNER = struct.Struct("<16sQ")  # how NIXL's bytes begin: a tag, and the length of the agent's name
_TAG = b"nixlSerDes|Agent"


class Envelope(WireStruct, frozen=True, kw_only=True):
    """The introduction of one agent.

    Attributes:
        name: Name of the agent.
        metadata: NIXL's metadata of the agent.
        probe: Address of one byte of registered host memory. A peer reads it to connect.
    """

    name: str
    metadata: bytes
    probe: int

    def seal(self, secret: Secret) -> bytes:
        """Return the sealed bytes. A peer with the same *secret* detects any change."""
        return secret.seal(_METADATA_MAGIC, pack(self))


_ENVELOPES = decoder_of(Envelope)


def name_of(name: object, prefix: str) -> str:
    """Return the checked *name*. If it is None, return a new one: *prefix*, host, pid and uuid."""
    if name is None:
        instance("prefix", prefix, str)
        name = f"{prefix}{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex}"
    elif prefix:
        raise SpecError("name", name, rule="a name and a prefix cannot be combined")
    return is_name("name", name)


def open_metadata(sealed: object, secret: Secret) -> Envelope:
    """Return what was sealed, or raise `WireError`."""
    wanted = "the complete bytes that NixlRank.metadata() returned"
    body = secret.unseal("metadata", _METADATA_MAGIC, sealed, wanted)
    peer = unpack("metadata", _ENVELOPES, body)
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
