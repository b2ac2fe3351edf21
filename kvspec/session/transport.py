"""The interface between a session and the object that moves its bytes.

`kvspec.nixl.NixlRank` is a `Transport`. A session uses nothing else of NIXL.

Invariant of every transport: memory stays referenced while a byte of it can move. A read that
failed may still write its destination until it is `over`.

How it works:
    One session reads the memory of another one:

        producer's session                   consumer's session
        `register` its cache                 `register` its cache
        `metadata` goes into its             `connect_all` with the metadata of all ranks
        introduction                         `prepare` the rows of both sides, once for each rank
                                             `pair` what a request selects, and `move` it
                                             `poll` each read until it is "DONE"
        `tick` in each poll                  `tick` in each poll

    The producer's session does nothing for a read.

    A session has one lock, but it does not hold it in calls that take long. So a transport needs a
    lock of its own. In the docstrings below, *locked* means that the session holds its lock. Such
    a call comes from any thread: a caller of the session, its background thread, or a thread that
    connects. After `close`, each method may raise `TransferError` with state "closed".
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from kvspec.errors import SpecError, TransferState
from kvspec.memory.region import Memory
from kvspec.wire.seal import Secret

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

K = TypeVar("K", bound=Hashable)


class PreparedRows(Protocol):
    """Rows of one side, as `Transport.prepare` returned them."""

    def release(self) -> None:
        """Release the rows. Called locked, or by the thread whose `prepare` has failed."""


class ReadInFlight(Protocol):
    """One read from one peer. The properties are read by any thread, locked or not."""

    @property
    def request(self) -> str:
        """Name of the request."""

    @property
    def peer(self) -> str:
        """Name of the peer."""

    @property
    def nbytes(self) -> int:
        """Bytes to move."""

    @property
    def arrived(self) -> int:
        """About how many of them have arrived."""

    @property
    def descriptors(self) -> int:
        """Number of pairs of ids and of ends."""

    @property
    def large(self) -> bool:
        """Whether it takes several polls, because one poll may not take long."""

    @property
    def begun(self) -> bool:
        """Whether a byte of the destination may have been written."""

    @property
    def over(self) -> bool:
        """Whether no byte can move any more."""

    def poll(self, turn: float | None = None) -> str:
        """Return "PROC" or "DONE" without waiting. Called locked, by each poll of the session.

        Args:
            turn: Seconds that the call may work, about. By default, the transport decides.

        Raises:
            TransferError: If the read failed. Each later call raises it again.
        """

    def cancel(self, why: str, state: TransferState) -> bool:
        """Begin no other byte, and fail. Return whether the read is over. Called locked."""


Sides = tuple[PreparedRows, Any, PreparedRows, None]
"""Rows of this rank, a `Selection` of their table, and the rows of a peer."""


class Transport(Protocol):
    """The object that moves the bytes of a session. See the module docstring for its threads.

    It is hashable, and has weak references.
    """

    @property
    def secret(self) -> Secret:
        """The key that seals introductions and messages."""

    @property
    def closed(self) -> bool:
        """Whether the transport was closed: then no byte moves."""

    @property
    def peers(self) -> Sequence[str]:
        """Names of the connected peers."""

    @property
    def transfers(self) -> Sequence[ReadInFlight]:
        """The reads of which bytes can move, including those that failed."""

    def register(self, memories: Iterable[Memory], owner: object = None) -> None:
        """Let peers read *memories*, and keep a reference to *owner* until the end.

        `Session` calls it once, when it is created. Raises `SpecError` if a memory cannot be read.
        """

    def metadata(self) -> bytes:
        """Return what a peer passes to `connect_all`. `Session` calls it once after `register`."""

    def connect_all(self, metadata: Iterable[bytes], timeout: float = 10.0) -> Sequence[str]:
        """Connect all peers of *metadata*, or none. Return their names, in the same order. Waits.

        `Session.connect` calls it in the thread of its caller, and a ticket in a thread for each
        producer. They are not locked, so several calls may run at the same time.

        Raises:
            WireError: If some metadata is damaged.
            TransferError: If a peer is not reached within *timeout* seconds.
        """

    def disconnect(self, peer: str) -> None:
        """Forget *peer*. Called locked.

        Raises:
            TransferError: With state "busy" while bytes move between this rank and the peer.
        """

    def prepare(
        self, rows: NDArray[np.uint64], memory_type: str = "DRAM", peer: str | None = None
    ) -> PreparedRows:
        """Check *rows* of this rank, or of a connected peer. `NixlRank.prepare` describes them.

        Called after `connect_all` in the same thread. Not locked.

        Raises:
            TransferError: If a row is outside registered memory, or *peer* is not connected.
        """

    def pair(self, pairs: Mapping[K, Any], *, request: str) -> Mapping[K, ReadInFlight]:
        """Check the *pairs*: `Sides` by any key. That may take long. Nothing starts.

        Called by the thread that calls `Session.load`, or by the thread that begins the loads of
        tickets. Not locked.

        Raises:
            TransferError: If rows were released meanwhile.
        """

    def move(
        self, pairs: Mapping[K, Any], *, request: str, timeout: float
    ) -> Mapping[K, ReadInFlight]:
        """Start the reads *pairs*, which `pair` has returned. If one is wrong, none starts.

        They fail after *timeout* seconds. Called locked.

        Raises:
            TransferError: As `pair`, or with state "busy" if another read writes the same bytes.
        """

    def tick(self) -> None:
        """Do what is due although nothing moves. Each poll of the session calls it, locked."""


def check_transport(transport: Transport) -> Transport:
    """Return *transport*. Raise `SpecError` unless it has the methods of a `Transport`."""
    names = [name for name in vars(Transport) if not name.startswith("_")]
    missing = [name for name in names if not hasattr(transport, name)]
    if missing or isinstance(transport, type):
        wanted = f"a NixlRank, or another Transport with {', '.join(missing or names)}"
        raise SpecError("nixl", transport, wanted)
    return transport
