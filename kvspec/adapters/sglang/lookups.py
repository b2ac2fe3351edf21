"""Fetch the tickets of a decode engine's requests, without a wait in any step of the engine.

Invariant: a ticket that is found after its request has ended is declined once.
"""

from __future__ import annotations

import http.client
import threading
import time
from collections.abc import Callable

import attrs

from kvspec.adapters.sglang.tickets import (
    MOST_ROOMS,
    SERVER_TIMEOUT,
    Params,
    check_room,
    claim,
    failed,
    is_whole,
)
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.tickets import PrefillTicket

# Seconds between two looks for the tickets of waiting requests.
LOOKUP_REST = 0.01
# Seconds after which a server that cannot be reached is taken for dead.
DEAD_AFTER = 15.0


@attrs.define(eq=False)
class Lookup:
    """A request that waits for its ticket.

    Attributes:
        room: The room of the request.
        name: The name with which the request claims the room.
        deadline: When the look-up fails.
        server: The start of the server that was asked first. A later start has lost the room.
        ticket: The newest ticket that was found. It may be of the first chunks only.
        error: The reason why no ticket will come.
        over: Whether the request has ended, so that its ticket is declined.
    """

    room: int
    name: str
    deadline: float
    server: str = ""
    ticket: PrefillTicket | None = None
    error: Exception | None = None
    over: bool = False

    @property
    def ended(self) -> bool:
        """Whether there is the ticket of the whole prompt, or an error."""
        return self.error is not None or (self.ticket is not None and is_whole(self.ticket))

    @property
    def known(self) -> str:
        """The name of the newest ticket that was found, or ""."""
        return "" if self.ticket is None else self.ticket.remote_id

    def result(self) -> PrefillTicket | None:
        """Return the newest ticket, or None if there is none yet. Raise if no other will come."""
        if self.error is not None:
            raise self.error
        return self.ticket


class Lookups:
    """Fetch tickets in a thread for each server, so that no step of an engine waits for a server.

    Args:
        timeout: Seconds after which a look-up fails.
        decline: A function that declines a ticket of a request that has ended.
        keep: A function that lets the producer of a ticket keep the prompt. The thread calls it for
            the ticket of a whole prompt, because SGLang polls no request while it is paused, or
            while retracted requests wait for memory.
        absent: Seconds after which a look-up fails if the server cannot be reached.
        secret: As in `PrefillTicket.from_params`.
    """

    def __init__(
        self,
        timeout: float,
        decline: Callable[[PrefillTicket], None],
        *,
        keep: Callable[[PrefillTicket], None] = lambda _: None,
        absent: float = DEAD_AFTER,
        secret: str | bytes | None = None,
    ) -> None:
        self._timeout, self._absent = timeout, absent
        self._decline, self._keep, self._secret = decline, keep, secret
        self._waiting: dict[str, list[Lookup]] = {}
        self._lock = threading.Lock()

    def add(self, address: str, room: int, name: str) -> Lookup:
        """Begin to look for the ticket of *room*, for the request *name* of this engine.

        Raises:
            SpecError: If *room* is not a room.
        """
        lookup = Lookup(check_room(room), name, time.monotonic() + self._timeout)
        with self._lock:
            if address in self._waiting:
                self._waiting[address].append(lookup)
                return lookup
            self._waiting[address] = [lookup]
        thread = f"kvspec-tickets-{address}"
        threading.Thread(target=self._run, args=(address,), name=thread, daemon=True).start()
        return lookup

    def decline(self, lookup: Lookup) -> None:
        """Decline the ticket of *lookup*, now or when it is found. A second call does nothing."""
        with self._lock:
            first, lookup.over = not lookup.over, True
            ticket = lookup.ticket
        if first and ticket is not None and is_whole(ticket):
            self._decline(ticket)

    def _run(self, address: str) -> None:
        """Look for tickets at *address* until no request waits for one."""
        connection: http.client.HTTPConnection | None = None
        reached = time.monotonic()
        while waiting := self._open(address):
            failure: Exception | None = None
            try:
                connection = connection or http.client.HTTPConnection(
                    address, timeout=SERVER_TIMEOUT
                )
                for start in range(0, len(waiting), MOST_ROOMS):
                    self._ask(connection, waiting[start : start + MOST_ROOMS])
                reached = time.monotonic()
            except Exception as error:  # noqa: BLE001 - the address and the answer may be anything
                failure = error
                if connection is not None:
                    connection.close()  # The next request opens it again.
            silent = time.monotonic() - reached
            for lookup in waiting:
                lookup.error = lookup.error or self._over(address, lookup, failure, silent)
            time.sleep(LOOKUP_REST)
        if connection is not None:
            connection.close()

    def _open(self, address: str) -> list[Lookup]:
        """Return the requests that wait for a ticket at *address*. Forget it if there are none."""
        with self._lock:
            waiting = [each for each in self._waiting[address] if not each.ended]
            self._waiting[address] = waiting
            if not waiting:
                del self._waiting[address]
            return waiting

    def _ask(self, connection: http.client.HTTPConnection, waiting: list[Lookup]) -> None:
        """Take what the server has for *waiting*."""
        # One question names each room once, so requests that share a room are asked apart.
        questions: list[dict[int, Lookup]] = []
        for lookup in waiting:
            free = (each for each in questions if lookup.room not in each)
            question = next(free, None)
            if question is None:
                question = dict[int, Lookup]()
                questions.append(question)
            question[lookup.room] = lookup
        for question in questions:
            names = {room: (each.name, each.known) for room, each in question.items()}
            server, answer = claim(connection, names, self._secret)
            for room, lookup in question.items():
                lookup.server = lookup.server or server
                if lookup.server != server:
                    why = "the prefill engine was restarted, so it has lost the prompt"
                    name, state = f"room-{room}", TransferState.STALE_PEER
                    lookup.error = TransferError(why, request=name, state=state)
                elif room in answer:
                    self._take(lookup, answer[room])

    def _over(
        self, address: str, lookup: Lookup, failure: Exception | None, silent: float
    ) -> Exception | None:
        """Return why *lookup* has ended without a ticket, or None if it has not."""
        request = f"room-{lookup.room}"
        if lookup.ended:
            return None
        if isinstance(failure, SpecError):  # The server has answered: the secrets differ.
            return failure
        if silent > self._absent:
            why = (
                f"the prefill engine has probably ended: its ticket server {address} has not"
                f" answered for {silent:.0f} s ({type(failure).__name__}: {failure})"
            )
            return TransferError(why, request=request, state=TransferState.PEER_LOST)
        if time.monotonic() > lookup.deadline:
            limit = f"{self._timeout:.0f} s"
            why = f"the prefill engine at {address} has published no ticket in {limit}"
            return TransferError(why, request=request, state=TransferState.TIMEOUT)
        return None

    def _take(self, lookup: Lookup, params: Params) -> None:
        """Take the ticket or the failure that was found."""
        try:
            why = failed(lookup.room, params, self._secret)
            if why is not None:
                rule = f"the prefill engine failed: {why}"
                raise SpecError("remote_failure", lookup.room, rule=rule)  # noqa: TRY301
            ticket = PrefillTicket.from_params(params, self._secret)
        except Exception as error:  # noqa: BLE001 - the parameters may be anything
            lookup.error = error
            return
        if is_whole(ticket) and not lookup.over:
            self._keep(ticket)  # Before anybody can decline it.
        with self._lock:
            lookup.ticket, over = ticket, lookup.over
        if over and is_whole(ticket):
            self._decline(ticket)
