"""What two engines say to each other: the handshake before anything moves."""

from kvspec.protocol.fingerprint import fingerprint
from kvspec.protocol.handshake import Handshake, disagreements, one_engine
from kvspec.protocol.plain import register
from kvspec.protocol.wire import decode_handshake, encode_handshake

__all__ = [
    "Handshake",
    "decode_handshake",
    "disagreements",
    "encode_handshake",
    "fingerprint",
    "one_engine",
    "register",
]
