"""The sealed introduction of a session: the handshake of its rank, and the address of its channel.

Invariant: an introduction is used only after its seal has proved that a holder of the secret wrote
all of it.
"""

from __future__ import annotations

import time

import attrs

from kvspec.errors import SpecError, WireError
from kvspec.inputs import instance
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import RankId
from kvspec.wire.codec import decode_handshake, encode_handshake
from kvspec.wire.handshake import MAX_NAME, Handshake
from kvspec.wire.seal import Secret

INTRODUCTION = b"kvspec-introduction-1\n"

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
