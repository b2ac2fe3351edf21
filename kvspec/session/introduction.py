"""The sealed introduction of a session: the handshake of its rank, and the address of its channel.

Invariant: an introduction is used only after its seal has proved that a holder of the secret wrote
all of it.
"""

from __future__ import annotations

import secrets
import time

import attrs

from kvspec.errors import SpecError, WireError
from kvspec.inputs import instance
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.protocol.handshake import MAX_NAME, Handshake
from kvspec.protocol.messages import Key
from kvspec.protocol.seal import Secret
from kvspec.protocol.wire import decode_handshake, encode_handshake

INTRODUCTION = b"kvspec-introduction-1\n"
_NONCE = 16  # bytes
_SIZE = 2  # bytes that tell the address's length


@attrs.frozen(kw_only=True)
class Introduced:
    """A rank that was introduced: its *handshake*, and the *address* of its channel."""

    handshake: Handshake
    address: str

    @property
    def rank(self) -> RankId:
        """The rank."""
        return self.handshake.rank

    def seal(self, secret: Secret) -> bytes:
        """Return the bytes for peers."""
        address = self.address.encode()
        if not 0 < len(address) <= MAX_NAME:
            raise SpecError("address", self.address, f"a text of 1 to {MAX_NAME} bytes")
        body = len(address).to_bytes(_SIZE, "big") + address + encode_handshake(self.handshake)
        return secret.seal(INTRODUCTION, body)


def epoch_of(epoch: int | None, cache: RankCache) -> int:
    """Return the *epoch*, of None the time in ns, which the ranks of an engine could not share."""
    ranks = instance("cache", cache, RankCache).engine.parallel.ranks
    if epoch is None and len(ranks) > 1:
        wanted = f"one number for all {len(ranks)} ranks, larger at each start of the engine"
        raise SpecError("epoch", epoch, wanted)
    return time.time_ns() if epoch is None else epoch


def introduced(sealed: object, secret: Secret) -> Introduced:
    """Return who is introduced by *sealed*; `WireError` for any other bytes."""
    wanted = "the complete bytes that Session.introduction returned"
    body = secret.unseal("introduction", INTRODUCTION, sealed, wanted)
    size = int.from_bytes(body[:_SIZE], "big")
    address, handshake = body[_SIZE : _SIZE + size], body[_SIZE + size :]
    try:
        name = address.decode()
    except UnicodeDecodeError:
        raise WireError("introduction.address", address, "UTF-8") from None
    if not 0 < size <= MAX_NAME or not name.isprintable():
        raise WireError("introduction.address", name, f"a text of 1 to {MAX_NAME} bytes")
    return Introduced(handshake=decode_handshake(handshake), address=name)


def new_remote_id(request_id: str) -> str:
    """Return a new name of the producer's request *request_id*, for all ranks of both engines.

    The producer's engine calls this once for each request, and sends the name to its own ranks and
    to the consumer. The name contains a random part, so that two requests of one id differ.

    Args:
        request_id: Id of the request in the producer's engine.

    Returns:
        The name, of the form `id#digits`.

    >>> new_remote_id("request-1").split("#")[0]
    'request-1'
    """
    key = Key(request_id, secrets.token_bytes(_NONCE))
    return f"{key.request_id}#{key.nonce.hex()}"


def key_of(remote_id: object) -> Key:
    """Return the request that *remote_id* stands for."""
    request_id, _, nonce = instance("remote_id", remote_id, str).rpartition("#")
    try:
        return Key(request_id, bytes.fromhex(nonce))
    except ValueError:  # no hexadecimal digits; or a SpecError
        raise SpecError("remote_id", remote_id, "a str that new_remote_id returned") from None
