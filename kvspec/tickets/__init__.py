"""Tickets of held prompts, and the identity of what they contain. A router needs nothing else."""

from kvspec.tickets.identity import ContentIdentity, MediaItem, content_of, explain_difference
from kvspec.tickets.sampling import sampling_of
from kvspec.tickets.ticket import PrefillTicket

__all__ = [
    "ContentIdentity",
    "MediaItem",
    "PrefillTicket",
    "content_of",
    "explain_difference",
    "sampling_of",
]
