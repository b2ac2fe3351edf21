"""What two engines say to each other: the handshake, and who is done with which request."""

from kvspec.protocol.encode import register
from kvspec.protocol.wire import VERSION

__all__ = [
    "VERSION",
    "register",
]
