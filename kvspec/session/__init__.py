"""Sessions connect engines and move requests. Connectors are built on them."""

from kvspec.session.channel import Channel, TcpChannel
from kvspec.session.load import Load
from kvspec.session.prometheus import SessionCollector
from kvspec.session.session import Session
from kvspec.session.transport import Transport
from kvspec.wire.messages import new_remote_id

__all__ = [
    "Channel",
    "Load",
    "Session",
    "SessionCollector",
    "TcpChannel",
    "Transport",
    "new_remote_id",
]
