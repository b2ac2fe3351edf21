"""Connect the producers of tickets in one thread, when they are first needed.

Invariant: no caller waits for a connection. At most *most* of these producers stay connected. The
least recently used are disconnected, so that producers that are gone for good use no memory.
"""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import attrs

from kvspec.errors import TransferError, TransferState
from kvspec.inputs import positive_int
from kvspec.session.ticket import PrefillTicket


@attrs.define(eq=False)
class Connection:
    """The connection to the producer of a ticket.

    Attributes:
        engine_id: Name of the producer.
        addresses: Addresses of its ranks.
        attempt: The result of connecting.
        lost: Whether a load failed since. The producer may have restarted at the same addresses.
    """

    engine_id: str
    addresses: tuple[str, ...]
    attempt: Future[object]
    lost: bool = False

    @property
    def useless(self) -> bool:
        """Whether the producer must be connected again for the next load."""
        done = self.attempt.done()
        return self.lost or (done and (self.attempt.cancelled() or bool(self.attempt.exception())))


class Connector:
    """The producers of the tickets that a session has loaded or declined.

    All methods need the lock of the session. The thread starts with the first ticket.

    Args:
        connect: Connects the ranks at some addresses, and returns when that is done.
        disconnect: Disconnects an engine.
        poll: Is called when a connection succeeded or failed: loads may wait for it.
        most: Number of producers that stay connected.
    """

    def __init__(
        self,
        connect: Callable[[tuple[str, ...]], object],
        disconnect: Callable[[str], object],
        poll: Callable[[], None],
        most: int,
    ) -> None:
        self._most = positive_int("max_producers", most)
        self._connect, self._disconnect, self._poll = connect, disconnect, poll
        # One thread: a connection is then never opened while the same engine is disconnected.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvspec-connect")
        self._connections: OrderedDict[str, Connection] = OrderedDict()
        self._closed = False

    def connection(self, ticket: PrefillTicket) -> Connection:
        """Return the connection to the producer of *ticket*. Begin a new one if necessary."""
        if self._closed:
            raise TransferError("the session was closed", state=TransferState.CLOSED)
        name, addresses = ticket.engine_id, ticket.addresses
        known = self._connections.get(name)
        if known is None or known.addresses != addresses or known.useless:
            known = Connection(name, addresses, self._thread.submit(self._connect, addresses))
            known.attempt.add_done_callback(lambda _: self._poll())
        self._connections[name] = known
        self._connections.move_to_end(name)
        if len(self._connections) > self._most:
            oldest, _ = self._connections.popitem(last=False)
            self._thread.submit(self._quietly, oldest)
        return known

    def forget(self, engine_id: str) -> None:
        """Record that an engine was disconnected."""
        self._connections.pop(engine_id, None)

    def close(self) -> None:
        """Accept no new producer. Attempts that have not begun are cancelled."""
        self._closed = True
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _quietly(self, engine_id: str) -> None:
        with contextlib.suppress(TransferError):  # The session may be closed.
            self._disconnect(engine_id)
