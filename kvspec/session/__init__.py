"""What a connector is written on: engines that meet, requests that are loaded, held and freed."""

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
