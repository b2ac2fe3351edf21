"""Sessions connect engines and move requests. Connectors are built on them."""

from kvspec.session.agreement import RankAgreement, ReleaseAgreement
from kvspec.session.channel import Channel, TcpChannel
from kvspec.session.load import Load
from kvspec.session.prometheus import SessionCollector
from kvspec.session.session import Session
from kvspec.wire.messages import new_remote_id

__all__ = [
    "Channel",
    "Load",
    "RankAgreement",
    "ReleaseAgreement",
    "Session",
    "SessionCollector",
    "TcpChannel",
    "new_remote_id",
]
