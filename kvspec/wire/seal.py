"""Seal messages with a shared secret and a purpose, and open them.

Invariant: an opened message was sealed as a whole, with an accepted secret and for the same
purpose. All other bytes raise `WireError`. A seal authenticates. It does not encrypt.

How it works:
    A `Secret` seals with its key, and accepts seals of that key and of the keys in `accepted`. So a
    running deployment can change its secret. `KVSPEC_SECRET_FILE` names a file with one secret in
    each line. The first one seals. Each process reads the file once, when it starts:

        step  lines of the file  the rank seals with  and accepts
        1     old, new           old                  both
        2     new, old           new                  both
        3     new                new                  new

    Finish each step on all ranks before the next one. Then any two ranks are at most one step
    apart, and each accepts what the other one seals.
"""

from __future__ import annotations

import functools
import hmac

import attrs

from kvspec.errors import SpecError, WireError

MAC = 32  # bytes of SHA-256
MIN_SECRET = 16  # bytes
MAX_ACCEPTED_SECRETS = 8  # A stranger's wrong seal costs one MAC for each.
MAX_SECRET_FILE = 1 << 16  # bytes


def _keyed(key: bytes) -> hmac.HMAC:
    """Return what `hmac.digest` begins with. For a short body, a copy of it takes half the time."""
    return hmac.new(key, digestmod="sha256")


@attrs.frozen
class Secret:
    """The secret that all ranks share. The key is empty if the channel between them is trusted.

    Attributes:
        key: The key that seals.
        accepted: Further keys whose seals are accepted, while the secret of a deployment changes.

    >>> secret = Secret(b"known to all ranks")
    >>> sealed = secret.seal(b"greeting", b"hello")
    >>> newer = Secret(b"the one after it", (b"known to all ranks",))
    >>> newer.unseal("message", b"greeting", sealed, "one")
    b'hello'
    >>> secret.unseal("message", b"greeting", sealed + b"!", "one")
    Traceback (most recent call last):
    ...
    kvspec.errors.WireError: message: got '46 bytes, damaged or of another secret', expected one
    """

    key: bytes = attrs.field(repr=False)
    accepted: tuple[bytes, ...] = attrs.field(default=(), repr=False)
    _macs: tuple[hmac.HMAC, ...] = attrs.field(init=False, eq=False, repr=False)

    @_macs.default
    def _begin(self) -> tuple[hmac.HMAC, ...]:
        return tuple(_keyed(key) for key in (self.key, *self.accepted))

    def mac(self, purpose: bytes, body: bytes) -> bytes:
        """Return the code that proves that *body* was sealed for *purpose*."""
        return _code(self._macs[0], purpose, body)

    def proves(self, code: object, purpose: bytes, body: bytes) -> bool:
        """Whether *code*, which a stranger may have sent, is that of `mac` in hexadecimal."""
        if not isinstance(code, str) or not code.isascii():
            return False
        return any(
            hmac.compare_digest(code, _code(each, purpose, body).hex()) for each in self._macs
        )

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
        code = sealed[len(purpose) : start]
        if not any(hmac.compare_digest(code, _code(each, purpose, body)) for each in self._macs):
            raise WireError(path, f"{len(sealed)} bytes, damaged or of another secret", expected)
        return body


def _code(keyed: hmac.HMAC, purpose: bytes, body: bytes) -> bytes:
    mac = keyed.copy()
    mac.update(purpose + body)
    return mac.digest()


def secret_of(secret: object) -> Secret:
    """Return *secret*, or that of the environment if it is None, as a checked `Secret`.

    The environment has either `KVSPEC_SECRET`, one secret, or `KVSPEC_SECRET_FILE`, the path of a
    file with one secret in each line. Empty bytes mean that only trusted programs reach the
    channel. There is no default: a rank that authenticates nobody must be the decision of its
    caller.

    Args:
        secret: A `Secret`, its key as str or bytes, or None.

    Returns:
        The secret.

    Raises:
        SpecError: If there is no secret, the environment has two, a secret is too short to be one,
            or the file cannot be read.
    """
    if secret is None:
        return _of_environment()
    if isinstance(secret, Secret):
        if secret.accepted:
            _checked("secret", [secret.key, *secret.accepted])
        return secret
    try:
        key = secret.encode() if isinstance(secret, str) else secret
    except UnicodeEncodeError:
        raise SpecError("secret", "a str", "a str that UTF-8 can encode") from None
    if not isinstance(key, bytes):
        raise SpecError("secret", type(secret).__name__, "a str or bytes")
    if secret != b"" and len(key) < MIN_SECRET:
        wanted = f"at least {MIN_SECRET} bytes, or secret=b'' for a trusted channel"
        raise SpecError("secret", f"{len(key)} bytes", wanted)
    return Secret(key)


def _of_environment() -> Secret:
    from os import environ  # noqa: PLC0415 - the only place of this layer with an effect

    text, path = environ.get("KVSPEC_SECRET"), environ.get("KVSPEC_SECRET_FILE")
    if text is not None and path is not None:
        rule = "set KVSPEC_SECRET or KVSPEC_SECRET_FILE, not both"
        raise SpecError("secret", "two", rule=rule)
    if path is not None:
        return _of_file(path)
    if text is None:
        rule = (
            "set KVSPEC_SECRET to the same random text for all ranks, or KVSPEC_SECRET_FILE to the"
            " path of a file with it, or pass secret=b'' if only trusted programs reach the channel"
        )
        raise SpecError("secret", None, rule=rule)
    return secret_of(text)


@functools.cache  # A process reads it once, so that all its parts are in the same step.
def _of_file(path: str) -> Secret:
    """Return the secrets in the lines of a file: the first one seals, all are accepted."""
    from pathlib import Path  # noqa: PLC0415 - an effect, as `environ`

    try:
        with Path(path).open("rb") as file:
            data = file.read(MAX_SECRET_FILE + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path.
        why = getattr(error, "strerror", None) or str(error)
        raise SpecError("KVSPEC_SECRET_FILE", path, rule=f"cannot be read: {why}") from None
    if len(data) > MAX_SECRET_FILE:
        raise SpecError("KVSPEC_SECRET_FILE", path, f"at most {MAX_SECRET_FILE} bytes")
    return _checked("KVSPEC_SECRET_FILE", data.splitlines())


def _checked(field: str, keys: list[bytes]) -> Secret:
    """Return the secret with these *keys*. An error has the number of a line, never a secret."""
    if not 0 < len(keys) <= MAX_ACCEPTED_SECRETS:
        raise SpecError(field, f"{len(keys)} lines", f"1 to {MAX_ACCEPTED_SECRETS}, a secret each")
    for number, key in enumerate(keys, 1):
        if len(key) < MIN_SECRET or key != key.strip():
            wanted = f"at least {MIN_SECRET} bytes, without space before or after"
            raise SpecError(field, f"line {number} of {len(key)} bytes", wanted)
    return Secret(keys[0], tuple(keys[1:]))
