"""What a rank owes to the producers of tickets before a load: keep a prompt, or decline it.

Invariant: each errand ends. A kept prompt is declined when its time is over. A decline is tried
again until it was sent over a connection, or until nobody can wait for it any more. Then the log
and a counter show that it was lost.

How it works:
    A scheduler may have a ticket long before it has blocks for the prompt. `keep` sends heartbeats
    meanwhile, so a producer needs only a short lease for prompts that nobody wants. An errand needs
    a connection, which a thread opens:

        connection        a kept prompt                    a decline
        is being opened   waits                            waits
        has failed        tries again after a pause        tries again after a pause
        is open           heartbeat, then one each         is passed to the ledger, which repeats
                          `heartbeat` seconds              it until it is answered

    A load of the ticket ends the errand when its own heartbeats begin, which have higher numbers.
    Until then the prompt stays kept, however long the load waits for a connection.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

import attrs

from kvspec.completion.consumer import ConsumerLedger, LoadPlan
from kvspec.session.load import Load
from kvspec.session.mailbox import Messages
from kvspec.session.remotes import Connection, RemoteEngine, Remotes
from kvspec.tickets.ticket import PrefillTicket
from kvspec.wire.messages import Gone, Heartbeat, Key, Lease, Message, key_of

log = logging.getLogger(__name__)

FIRST_PAUSE, LAST_PAUSE = 0.5, 30.0
"""Seconds between attempts to reach a producer. Each pause is twice as long as the one before."""
LONGEST_DECLINE = 600.0
"""Seconds for which a decline is tried again. A lease is usually over much earlier."""


ErrandName = tuple[str, Key]
"""The engine and the request of an errand."""


@attrs.define(eq=False)
class Errand:
    """One kept or declined ticket.

    Attributes:
        ticket: The ticket.
        until: When a kept prompt is declined, or a decline is lost.
        keeps: Whether the prompt is kept. Otherwise it is declined.
        due: When to act next.
        pause: Seconds until the next attempt, if this one fails.
        connection: The attempt to connect that is awaited, or None.
        why: Why the last attempt failed.
    """

    ticket: PrefillTicket
    until: float
    keeps: bool
    due: float = 0.0
    pause: float = FIRST_PAUSE
    connection: Connection | None = None
    why: object = None

    @property
    def times(self) -> tuple[float, float]:
        """When it must act. A connection that it waits for has no time."""
        return self.until, self.due if self.connection is None else math.inf


@attrs.define(eq=False)
class Errands:
    """The errands of one rank, by the name of the request. All methods need the session's lock.

    Attributes:
        ledger: Numbers the heartbeats.
        remotes: The connected engines.
        messages: Sends the heartbeats.
        now: The clock.
        send_decline: Passes a decline to the ledger. It raises if a load has the same name.
    """

    ledger: ConsumerLedger
    remotes: Remotes
    messages: Messages
    now: Callable[[], float]
    send_decline: Callable[[RemoteEngine, Key], None]
    # By engine and request: two tickets of one request may name two engines.
    _errands: dict[ErrandName, Errand] = attrs.field(factory=dict)
    # A poll is called often, and a producer that is gone leaves thousands of errands. So `move`
    # looks at them only if the earliest is due, or if a connection has ended that some wait for.
    _next: float = math.inf
    _awaited: set[Connection] = attrs.field(factory=set)

    def __len__(self) -> int:
        return len(self._errands)

    @property
    def names(self) -> set[str]:
        """Names of the producers that errands need."""
        return {errand.ticket.engine_id for errand in self._errands.values()}

    @property
    def due(self) -> float:
        """When the next errand must act, or earlier. Infinite if none does."""
        return self._next if self._errands else math.inf

    def keep(self, ticket: PrefillTicket, timeout: float) -> None:
        """Keep a prompt for *timeout* seconds. Repeating it changes the time and the addresses."""
        known = self._errands.get(_name(ticket))
        if known is not None and known.keeps:
            known.until, known.ticket = self.now() + timeout, ticket
            self._look_at(known)
            return
        self._begin(Errand(ticket, self.now() + timeout, keeps=True))

    def decline(self, ticket: PrefillTicket) -> None:
        """Decline a prompt, also if it is kept."""
        self._begin(Errand(ticket, self.now() + LONGEST_DECLINE, keeps=False))

    def extend(self, load: Load) -> None:
        """Prepare for *load*, which waits: do not decline its prompt, and keep it if it is kept."""
        name = load.engine_id, load.key
        known = self._errands.get(name)
        if known is not None and known.keeps:
            known.until = max(known.until, load.deadline)
        else:
            self.end(*name)

    def end(self, engine_id: str, key: Key) -> None:
        """Forget the errand of a request, because a load has begun."""
        self._errands.pop((engine_id, key), None)

    def clear(self, engine_id: str | None = None) -> None:
        """Forget the errands to an engine that has ended, or all errands."""
        for name in list(self._errands):
            if engine_id in (None, name[0]):
                del self._errands[name]

    def answers(self, message: Message) -> bool:
        """Return whether *message* is the answer to a heartbeat of a kept prompt, and process it.

        After `gone`, no heartbeat is sent. A load of the ticket then learns the reason.
        """
        name = message.by.engine_id, message.key
        errand = self._errands.get(name)
        if errand is None or not errand.keeps or not isinstance(message, Lease | Gone):
            return False
        if isinstance(message, Gone):
            del self._errands[name]
        return True

    def move(self) -> None:
        """Send what is due."""
        now = self.now()
        if now < self._next and not any(each.future.done() for each in self._awaited):
            return
        for name, errand in list(self._errands.items()):
            if now >= errand.until:
                self._end(name, errand)
            elif errand.connection is not None and not errand.connection.future.done():
                continue
            elif errand.connection is not None or now >= errand.due:
                self._run(name, errand, now)
        every = self._errands.values()
        self._awaited = {each.connection for each in every if each.connection is not None}
        self._next = min((time for each in every for time in each.times), default=math.inf)

    def _look_at(self, errand: Errand) -> None:
        """Let `move` look at *errand* in time."""
        self._next = min(self._next, *errand.times)
        if errand.connection is not None:
            self._awaited.add(errand.connection)

    def _begin(self, errand: Errand) -> None:
        name = _name(errand.ticket)
        self._errands[name] = errand
        self._run(name, errand, self.now())
        self._look_at(errand)

    def _run(self, name: ErrandName, errand: Errand, now: float) -> None:
        try:
            if errand.connection is None:
                errand.connection = self.remotes.connection(errand.ticket)
            if not errand.connection.future.done():
                return
            connection, errand.connection = errand.connection, None
            connection.future.result()
            remote = self.remotes.find(errand.ticket.engine_id)
            if not errand.keeps:
                # This raises `SpecError` while a load of the ticket ends. The load may be one that
                # informs no producer, so the decline is sent after it.
                self.send_decline(remote, name[1])
        except Exception as error:  # noqa: BLE001 - the session's poll must go on
            errand.connection, errand.why = None, error
            errand.due = now + errand.pause
            errand.pause = min(2 * errand.pause, LAST_PAUSE)
            return
        if errand.keeps:
            errand.due, errand.pause = now + self.ledger.heartbeat, FIRST_PAUSE
            self._beat(name[1], remote)
        else:
            del self._errands[name]

    def _beat(self, key: Key, remote: RemoteEngine) -> None:
        """Send a heartbeat to each rank of the producer that waits for this rank."""
        engine_id, epoch = remote.incarnation
        plan = LoadPlan(
            request_id="", key=key, engine_id=engine_id, epoch=epoch, expected=remote.readers
        )
        number = self.ledger.question()
        for rank, expected in remote.readers.items():
            about = plan.about(self.ledger.me, rank, number)
            self.messages.send(Heartbeat(*about, expected=expected))

    def _end(self, name: ErrandName, errand: Errand) -> None:
        """Decline a prompt that was kept for its whole time, or note that a decline is lost."""
        request_id = name[1].request_id
        if errand.keeps:
            log.info("%s is declined: it was kept for its whole time", request_id)
            self.decline(errand.ticket)
            return
        self.messages.counters.declines_lost += 1
        producer = f"{errand.ticket.engine_id} at {', '.join(errand.ticket.addresses)}"
        log.warning("%s is not declined at %s: %s", request_id, producer, errand.why)
        del self._errands[name]


def _name(ticket: PrefillTicket) -> ErrandName:
    return ticket.engine_id, key_of(ticket.remote_id)
