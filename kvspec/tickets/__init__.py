"""Plain values of a router and a scheduler: tickets of held prompts, and the agreement of ranks.

A router needs nothing else. No module of this folder needs NIXL or a session.
"""

from kvspec.tickets.agreement import RankAgreement, ReleaseAgreement
from kvspec.tickets.identity import ContentIdentity, content_of
from kvspec.tickets.sampling import sampling_of
from kvspec.tickets.stated import MediaItem, explain_difference
from kvspec.tickets.ticket import PrefillTicket

__all__ = [
    "ContentIdentity",
    "MediaItem",
    "PrefillTicket",
    "RankAgreement",
    "ReleaseAgreement",
    "content_of",
    "explain_difference",
    "sampling_of",
]
