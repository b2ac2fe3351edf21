"""What a rank's session tells of itself, sealed: its handshake, and where its channel is.

Law: what is read was written by who shares the secret, whole; nothing of it is used before that.
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
        wanted = f"a number that the {len(ranks)} ranks of this start share, and that grows"
        raise SpecError("epoch", epoch, wanted)
    return time.time_ns() if epoch is None else epoch


def introduced(sealed: object, secret: Secret) -> Introduced:
    """Return who is introduced by *sealed*; `WireError` for any other bytes."""
    wanted = "what Session.introduction returned, whole"
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
    """Return what all ranks of both engines name a request of the producer by.

    The id with a nonce that no other request has: two of one id are told apart. The producer's
    engine makes it once for a request, and tells it to its ranks and to whoever is to read.
    """
    key = Key(request_id, secrets.token_bytes(_NONCE))
    return f"{key.request_id}#{key.nonce.hex()}"


def key_of(remote_id: object) -> Key:
    """Return the request that *remote_id* stands for."""
    request_id, _, nonce = instance("remote_id", remote_id, str).rpartition("#")
    try:
        return Key(request_id, bytes.fromhex(nonce))
    except ValueError:  # no hexadecimal digits; or a SpecError
        raise SpecError("remote_id", remote_id, "what new_remote_id returned") from None
