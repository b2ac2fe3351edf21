"""What a connector is written on: engines that meet, requests that are loaded, held and freed."""

from kvspec.session.channel import Channel, TcpChannel
from kvspec.session.introduction import new_remote_id
from kvspec.session.ledger import Ledger, Settled
from kvspec.session.load import LoadState, Progress, SessionLoad, SessionPush
from kvspec.session.prompts import PromptLoad, Prompts
from kvspec.session.session import Session
from kvspec.session.stats import SessionStats
from kvspec.session.ticket import PrefillTicket, content_of

__all__ = [
    "Channel",
    "Ledger",
    "LoadState",
    "PrefillTicket",
    "Progress",
    "PromptLoad",
    "Prompts",
    "Session",
    "SessionLoad",
    "SessionPush",
    "SessionStats",
    "Settled",
    "TcpChannel",
    "content_of",
    "new_remote_id",
]
