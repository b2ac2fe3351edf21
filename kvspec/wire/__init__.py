"""The bytes that two engines exchange: handshakes, and messages about requests."""

from kvspec.wire.codec import VERSION
from kvspec.wire.seal import Secret

__all__ = [
    "VERSION",
    "Secret",
]
