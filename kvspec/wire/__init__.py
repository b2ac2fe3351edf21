"""The bytes that two engines exchange: handshakes, and messages about requests."""

from kvspec.wire.codec import VERSION
from kvspec.wire.values import register

__all__ = [
    "VERSION",
    "register",
]
