"""What two engines say to each other: the handshake, and who is done with which request."""

from kvspec.protocol.compatibility import compatibility_hash
from kvspec.protocol.consumer import ConsumerLedger
from kvspec.protocol.encode import register
from kvspec.protocol.extent import Extent
from kvspec.protocol.handshake import Handshake, disagreements, one_engine
from kvspec.protocol.load_plan import LoadPlan
from kvspec.protocol.messages import (
    Closed,
    Failed,
    Free,
    Key,
    Message,
    RankAddress,
    Ready,
    Refused,
    Release,
    Tell,
)
from kvspec.protocol.producer import ProducerLedger
from kvspec.protocol.pushed import Pushed
from kvspec.protocol.states import CONSUMER, PRODUCER, Row
from kvspec.protocol.wire import decode_handshake, decode_message, encode_handshake, encode_message

__all__ = [
    "CONSUMER",
    "PRODUCER",
    "Closed",
    "ConsumerLedger",
    "Extent",
    "Failed",
    "Free",
    "Handshake",
    "Key",
    "LoadPlan",
    "Message",
    "ProducerLedger",
    "Pushed",
    "RankAddress",
    "Ready",
    "Refused",
    "Release",
    "Row",
    "Tell",
    "compatibility_hash",
    "decode_handshake",
    "decode_message",
    "disagreements",
    "encode_handshake",
    "encode_message",
    "one_engine",
    "register",
]
