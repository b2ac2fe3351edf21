"""Sessions connect engines and move requests. Connectors are built on them."""

from kvspec.session.channel import Channel, TcpChannel
from kvspec.session.introduction import new_remote_id
from kvspec.session.load import SessionLoad
from kvspec.session.prompts import Prompts
from kvspec.session.session import Session
from kvspec.session.ticket import PrefillTicket, content_of

__all__ = [
    "Channel",
    "PrefillTicket",
    "Prompts",
    "Session",
    "SessionLoad",
    "TcpChannel",
    "content_of",
    "new_remote_id",
]
