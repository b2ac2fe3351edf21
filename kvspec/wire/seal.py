"""Seal messages with a shared secret and a purpose, and open them.

Invariant: an opened message was sealed as a whole, with the same secret and for the same purpose.
All other bytes raise `WireError`. A seal authenticates. It does not encrypt.
"""

from __future__ import annotations

import hmac

import attrs

from kvspec.errors import SpecError, WireError

MAC = 32  # bytes of SHA-256
MIN_SECRET = 16  # bytes


@attrs.frozen
class Secret:
    """The secret that all ranks share. The key is empty if the channel between them is trusted.

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
    # For a short body, a copy of this takes about half the time of `hmac.digest`.
    _keyed: hmac.HMAC = attrs.field(init=False, eq=False, repr=False)

    @_keyed.default
    def _begin(self) -> hmac.HMAC:
        return hmac.new(self.key, digestmod="sha256")

    def mac(self, purpose: bytes, body: bytes) -> bytes:
        """Return the code that proves that *body* was sealed for *purpose*."""
        code = self._keyed.copy()
        code.update(purpose + body)
        return code.digest()

    def proves(self, code: object, purpose: bytes, body: bytes) -> bool:
        """Whether *code*, which a stranger may have sent, is that of `mac` in hexadecimal."""
        own = self.mac(purpose, body).hex()
        return isinstance(code, str) and code.isascii() and hmac.compare_digest(code, own)

    def seal(self, purpose: bytes, body: bytes) -> bytes:
        """Return *body* as a message for *purpose*."""
        return purpose + self.mac(purpose, body) + body

    def unseal(self, path: str, purpose: bytes, sealed: object, expected: str) -> bytes:
        """Return the body that was sealed, or raise `WireError` at *path*."""
        if not isinstance(sealed, bytes):
            raise WireError(path, type(sealed).__name__, expected)
        start = len(purpose) + MAC
        if len(sealed) < start or not sealed.startswith(purpose):
            raise WireError(path, f"{len(sealed)} bytes, {sealed[:16]!r}", expected)
        body = sealed[start:]
        if not hmac.compare_digest(sealed[len(purpose) : start], self.mac(purpose, body)):
            raise WireError(path, f"{len(sealed)} bytes, damaged or of another secret", expected)
        return body


def secret_of(secret: object) -> bytes:
    """Return *secret*, or `KVSPEC_SECRET` of the environment if it is None, as bytes.

    Empty bytes mean that only trusted programs reach the channel. There is no default: a rank that
    authenticates nobody must be the decision of its caller.

    Raises:
        SpecError: If there is no secret, or it is too short to be one.
    """
    if secret is None:
        from os import environ  # noqa: PLC0415 - the only place of this layer with an effect

        secret = environ.get("KVSPEC_SECRET")
    if secret is None:
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
