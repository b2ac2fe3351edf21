"""Sessions connect engines and move requests. Connectors are built on them."""

from kvspec.session.agreement import RankAgreement
from kvspec.session.channel import Channel, TcpChannel
from kvspec.session.load import Load
from kvspec.session.session import Session
from kvspec.session.ticket import PrefillTicket, content_of
from kvspec.wire.messages import new_remote_id

__all__ = [
    "Channel",
    "Load",
    "PrefillTicket",
    "RankAgreement",
    "Session",
    "TcpChannel",
    "content_of",
    "new_remote_id",
]
