"""The messages of two engines: their handshake, and the ledgers of producer and consumer."""

from kvspec.protocol.encode import register
from kvspec.protocol.wire import VERSION

__all__ = [
    "VERSION",
    "register",
]
