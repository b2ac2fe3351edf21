"""Load prompts that other engines hold, and connect to these engines when they are first needed.

Invariant: neither the connection nor a load blocks or raises. Only held requests are read. The
producer always learns the outcome, or its lease expires. At most *most* producers stay connected.
The least recently used are disconnected.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import Self, TypeVar

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.descriptors.request import TransferRequest
from kvspec.errors import KVSpecError, TransferError, TransferState
from kvspec.inputs import instance, positive_int, seconds
from kvspec.nixl.transfer import LAST_WAIT
from kvspec.session.load import Load, LoadState
from kvspec.session.session import Session
from kvspec.session.ticket import PrefillTicket

T = TypeVar("T")
ABSENT = 2.0
"""Seconds for which a producer that nobody is found of is tried: it was there when it answered."""


@attrs.define(eq=False)
class Connection:
    """That a producer's ranks at some *addresses* are *connected*, or will be; or *lost* since."""

    addresses: tuple[str, ...]
    connected: Future[object]
    lost: bool = False

    @property
    def over(self) -> bool:
        """Whether it was not met, and will not be by this, or has to be met anew."""
        failed = self.connected.done() and (
            self.connected.cancelled() or self.connected.exception() is not None
        )
        return self.lost or failed

    def lose(self) -> None:
        """Have the producer met anew when it is next asked for, since something of it was lost."""
        self.lost = True


class PromptLoad:
    """A load of a prompt. `Prompts.load` returns it before the producer is connected.

    Attributes:
        request: The request.
        load: The `Load` after the producer is connected, else None.
    """

    def __init__(
        self,
        request: TransferRequest,
        connection: Future[object],
        begin: Callable[[], Load],
        decline: Callable[[], None],
        failed: Callable[[], None],
    ) -> None:
        self.request = request
        self.load: Load | None = None
        self._refused: Exception | None = None
        self._begin, self._decline, self._failed = begin, decline, failed
        self._lock = threading.Lock()
        connection.add_done_callback(self._connected)

    def __repr__(self) -> str:
        return (
            f"<PromptLoad {self.request.request_id!r}: {self.load or self._refused or 'to meet'}>"
        )

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """As in `Load`. Empty if the load did not begin."""
        return {} if self.load is None else self.load.undefined_blocks

    @property
    def unwritten_ranges(self) -> npt.NDArray[np.uint64]:
        """As in `Load`. Empty if the load did not begin."""
        return np.empty((0, 2), np.uint64) if self.load is None else self.load.unwritten_ranges

    @property
    def error(self) -> Exception | None:
        """The first error, or None. The producer may be unreachable, or the request may not fit."""
        return self._refused if self.load is None else self.load.error

    def poll(self) -> LoadState:
        """Make progress on the whole session, and return the state. Never raises."""
        if self.load is None:
            return "moving" if self._refused is None else "failed"
        state = self.load.poll()
        if state == "failed":
            self._failed()
        return state

    def wait(self) -> None:
        """Poll until the load is done.

        Raises:
            KVSpecError: The `error` if the load failed, or the session was closed before.
        """
        while self.poll() == "moving":
            if self.load is not None and self.load.remote.unheard:
                raise self.load.closed()
            time.sleep(LAST_WAIT)
        if self.error is not None:
            raise self.error

    def cancel(self) -> None:
        """Give up the load. It fails when nothing can write its blocks any more."""
        with self._lock:
            if self.load is None and self._refused is None:
                name = self.request.request_id
                self._refused = TransferError(
                    "cancelled", request=name, state=TransferState.STOPPED
                )
        if self.load is not None:
            self.load.cancel()

    def _connected(self, connection: Future[object]) -> None:
        """Begin after a *connection*; what is wrong with it, or then, is the error."""
        try:
            connection.result()
            with self._lock:
                if self._refused is None:
                    self.load = self._begin()
            if self.load is None:
                self._decline()
        except CancelledError:
            message = "`Prompts` was closed before its producer was connected"
            name = self.request.request_id
            self._refused = self._refused or TransferError(
                message, request=name, state=TransferState.CLOSED
            )
        except Exception as error:  # noqa: BLE001 - whatever it was, it fails this request alone
            self._refused = self._refused or error
            self._failed()


class Prompts:
    """The prompts that one consumer rank reads from other engines.

    Args:
        session: The session of the rank. The caller closes it.
        timeout: Seconds in which a prompt must arrive after its producer is connected.
        patience: Seconds in which a reachable producer must answer, at most *timeout*. No other
            producer is connected meanwhile.
        most: Number of producers that stay connected. Beyond it, the least recently used is
            disconnected, so that producers that are gone for good use no memory.
    """

    def __init__(
        self, session: Session, *, timeout: float, patience: float = 30.0, most: int = 256
    ) -> None:
        self.session = instance("session", session, Session)
        self._timeout = seconds("timeout", timeout)
        self._patience = min(self._timeout, seconds("patience", patience))
        self._most = positive_int("most", most)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="kvspec-connect")
        self._connections: OrderedDict[str, Connection] = OrderedDict()  # by producer
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def load(self, prompt: PrefillTicket, request: TransferRequest) -> PromptLoad:
        """Start reading *request* of a prompt. Connect its producer first.

        An error of the prompt or its producer becomes the error of the load, and the producer is
        informed.

        Args:
            prompt: The ticket of the producer.
            request: The request, from `PrefillTicket.request`.

        Returns:
            The load.
        """
        instance("prompt", prompt, PrefillTicket)

        def begin() -> Load:
            try:
                prompt.check_held(instance("request", request, TransferRequest))
                return self.session.load(
                    request,
                    remote_id=prompt.remote_id,
                    engine_id=prompt.engine_id,
                    timeout=self._timeout,
                )
            except BaseException:
                decline()
                raise

        def decline() -> None:
            self._decline(prompt)

        connection = self._connection(prompt)
        return PromptLoad(request, connection.connected, begin, decline, connection.lose)

    def decline(self, prompt: PrefillTicket) -> None:
        """Inform the producer that nothing will be read. If that fails, its lease ends."""
        self._connection(prompt).connected.add_done_callback(lambda _: self._decline(prompt))

    def close(self) -> None:
        """Connect to no more producers. The session stays open."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _decline(self, prompt: PrefillTicket) -> None:
        with contextlib.suppress(KVSpecError):
            self.session.decline(prompt.remote_id, engine_id=prompt.engine_id)

    def _connection(self, prompt: PrefillTicket) -> Connection:
        """Return when a producer is met, or was; one that could not be met is tried again."""
        name = prompt.engine_id
        with self._lock:
            known = self._connections.get(name)
            if known is None or known.addresses != prompt.addresses or known.over:
                known = Connection(prompt.addresses, self._submit(self._connect, prompt.addresses))
            self._connections[name] = known
            self._connections.move_to_end(name)
            if len(self._connections) > self._most:
                self._submit(self.session.disconnect, self._connections.popitem(last=False)[0])
        return known

    def _submit(self, act: Callable[[T], object], given: T) -> Future[object]:
        """Let the thread *act*; what comes after the end is cancelled, as what still waits then."""
        try:
            return self._thread.submit(act, given)
        except RuntimeError:
            never = Future[object]()
            never.cancel()
            return never

    def _connect(self, addresses: tuple[str, ...]) -> None:
        wait = self._patience
        found = self.session.fetch(addresses, wait, absent=min(wait, ABSENT))
        self.session.connect(found, timeout=wait)
