"""Seal messages with a shared secret and a purpose, and open them.

Invariant: an opened message was sealed as a whole, with the same secret and for the same purpose.
All other bytes raise `WireError`. A seal authenticates. It does not encrypt.
"""

from __future__ import annotations

import hmac

import attrs

from kvspec.errors import WireError

MAC = 32  # bytes of SHA-256


@attrs.frozen
class Secret:
    """What ranks share, as *key*; empty where the channel between them is trusted.

    >>> secret = Secret(b"known to all ranks")
    >>> sealed = secret.seal(b"greeting", b"hello")
    >>> secret.unseal("message", b"greeting", sealed, "a greeting")
    b'hello'
    >>> secret.unseal("message", b"greeting", sealed + b"!", "one")
    Traceback (most recent call last):
    ...
    kvspec.errors.WireError: message: got '46 bytes, damaged or of another secret', expected one
    """

    key: bytes = attrs.field(repr=False)

    def seal(self, purpose: bytes, body: bytes) -> bytes:
        """Return *body* as a message for *purpose*."""
        return purpose + hmac.digest(self.key, purpose + body, "sha256") + body

    def unseal(self, path: str, purpose: bytes, sealed: object, wanted: str) -> bytes:
        """Return the body that was sealed, or raise `WireError` at *path*."""
        if not isinstance(sealed, bytes):
            raise WireError(path, type(sealed).__name__, wanted)
        start = len(purpose) + MAC
        if len(sealed) < start or not sealed.startswith(purpose):
            raise WireError(path, f"{len(sealed)} bytes, {sealed[:16]!r}", wanted)
        body = sealed[start:]
        mac = hmac.digest(self.key, purpose + body, "sha256")
        if not hmac.compare_digest(sealed[len(purpose) : start], mac):
            raise WireError(path, f"{len(sealed)} bytes, damaged or of another secret", wanted)
        return body
