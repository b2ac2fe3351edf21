"""The bytes that two engines exchange: handshakes, and messages about requests."""

from kvspec.wire.codec import VERSION

__all__ = [
    "VERSION",
]
