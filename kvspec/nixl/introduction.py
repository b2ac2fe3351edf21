"""The envelope in which one rank is introduced to another: damage shows before NIXL sees it.

NIXL keeps half of any metadata that it could not read, and then refuses the good one.
"""

from __future__ import annotations

import struct
import zlib

import attrs

from kvspec.errors import WireError

_MAGIC = b"kvspec-nixl-1\n"
_HEAD = struct.Struct("<IQ")  # length of the name, address of the probe


@attrs.frozen(kw_only=True)
class Envelope:
    """What a peer needs to reach an agent: its *name*, nixl's *metadata*, and where to knock.

    *probe* is the address of one byte of registered DRAM: reading it proves the connection.
    """

    name: str
    metadata: bytes = attrs.field(repr=False)
    probe: int

    def seal(self) -> bytes:
        """Return the bytes, of which any damage shows."""
        title = self.name.encode()
        body = _HEAD.pack(len(title), self.probe) + title + self.metadata
        return _MAGIC + zlib.crc32(body).to_bytes(4, "little") + body


def unseal(sealed: object) -> Envelope:
    """Return what was sealed, or raise `WireError`."""
    wanted = "what NixlRank.metadata() returned, whole"
    if not isinstance(sealed, bytes):
        raise WireError("metadata", type(sealed).__name__, wanted)
    start = len(_MAGIC) + 4
    if len(sealed) < start + _HEAD.size or not sealed.startswith(_MAGIC):
        raise WireError("metadata", f"{len(sealed)} bytes, {sealed[:16]!r}", wanted)
    if zlib.crc32(sealed[start:]) != int.from_bytes(sealed[start - 4 : start], "little"):
        raise WireError("metadata", f"{len(sealed)} damaged bytes", wanted)
    size, probe = _HEAD.unpack_from(sealed, start)
    title = sealed[start + _HEAD.size :]
    try:
        name = title[:size].decode()
    except UnicodeDecodeError:
        raise WireError("metadata.name", title[:size], "UTF-8") from None
    return Envelope(name=name, metadata=title[size:], probe=probe)
