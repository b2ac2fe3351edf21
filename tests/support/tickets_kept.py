"""Tickets of held prompts, and consumers that keep them."""

from __future__ import annotations

from two_engines import Side, request, until

from kvspec.session import new_remote_id
from kvspec.tickets import PrefillTicket

BLOCKS = {"full": [1, 2, 3, 4], "window": [4, 3, 2, 1]}
ASKED = request(tokens=14, producer_blocks=BLOCKS, consumer_blocks=BLOCKS)
LEASE = 1.6
"""Seconds. Each test waits several of them. A busy machine may stop a process for one second."""


def ticket_of(
    side: Side, name: str = "p", addresses: tuple[str, ...] = (), lease: float = LEASE
) -> PrefillTicket:
    """Hold a prompt on all ranks until a lease ends, and return its ticket."""
    remote_id = new_remote_id(name)
    for one in side.sessions.values():
        one.hold(remote_id, lease=lease)
    return PrefillTicket(
        engine_id=side.name,
        addresses=addresses or (*side.addresses,),
        remote_id=remote_id,
        computed_tokens=14,
        tables=BLOCKS,
    )


def kept(consumer: Side, ticket: PrefillTicket, timeout: float = 30.0) -> None:
    """Keep *ticket* on all ranks."""
    for one in consumer.sessions.values():
        one.keep(ticket, timeout=timeout)


def connect_by_ticket(consumer: Side, producer: Side) -> None:
    """Let the consumer decline a ticket, so that it knows the producer.

    On a busy machine, a connection takes longer than the short leases of the tests.
    """
    ticket = ticket_of(producer, "introduction", lease=60.0)
    for one in consumer.sessions.values():
        one.decline(ticket=ticket)
    until(lambda: not any(one.held for one in producer.sessions.values()), producer)
    for one in producer.sessions.values():
        one.settled()
