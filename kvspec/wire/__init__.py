"""The bytes that two engines exchange: handshakes, and messages about requests."""

from kvspec.wire.seal import Secret
from kvspec.wire.versions import VERSION

__all__ = [
    "VERSION",
    "Secret",
]
