"""The NIXL agent of one rank, with its memory, peers, lists and transfers.

Invariant: all arguments are checked before NIXL receives them. Each wait has a deadline. Memory
stays registered and referenced until the rank is closed. A transfer that fails in flight stays in
quarantine, because NIXL cannot stop it. Only closing the rank destroys the agent and stops all. All
ranks are closed when the interpreter exits.

NIXL's notifications are not used, because a session has a channel of its own for messages. Only
`connect` sends one, a hello, which opens the connection.

UCX chooses the network devices. Set `UCX_NET_DEVICES` before the first rank is created, for
instance to `mlx5_0:1`, or to `lo` on one machine. `KVSPEC_NIXL_PACKAGE` selects the nixl package
to import.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import time
import weakref
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Self, TypeVar

import attrs
import numpy as np

from kvspec.descriptors.selection import Selection
from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, mapping, seconds, sequence
from kvspec.memory.region import Memory, check_memory_type
from kvspec.nixl.agent import Agent, Prepared
from kvspec.nixl.file_memory import (
    BACKENDS,
    RegisteredFile,
    check_files,
    checked_backends,
    identity_of,
)
from kvspec.nixl.memory import new_memories
from kvspec.nixl.merging import PreparedSides
from kvspec.nixl.peers import Envelope, name_of, open_metadata
from kvspec.nixl.rows import checked_rows, row_of_one
from kvspec.nixl.staging.choosing import Buffers
from kvspec.nixl.staging.rule import Staging
from kvspec.nixl.transfer import InFlightTransfers, K, Transfer, wait_for_all
from kvspec.wire.seal import Secret, secret_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

T = TypeVar("T")

# A polled rank reads one byte of each new peer. Each read has a byte of its own here, because two
# transfers may not write one byte. Peers read the first byte, and the others are for the reads.
PROBES = 4096
SIDES_TEXT = "tuples (local list, local ids, remote list, remote ids)"
DISCARD = 1.0  # Seconds between two calls that discard hellos.
HELLO = b"kvspec-nixl hello"  # It opens the connection, so that the first read need not.


@attrs.frozen
class NixlStats:
    """Numbers of the objects that a rank holds. All are zero after it is closed.

    Attributes:
        transfers: Transfers of which bytes can move.
        handles: NIXL handles in flight.
        lists: Descriptor lists.
        registrations: Registered memories.
        peers: Connected peers.
    """

    transfers: int = 0
    handles: int = 0
    lists: int = 0
    registrations: int = 0
    peers: int = 0


class NixlRank:
    """The NIXL agent of one rank.

    Methods may be called from any thread. They run one at a time. Call `close` at the end, or use
    the rank in a `with` statement.

    Args:
        name: Name of the agent, unique among all ranks: `connect` refuses a second rank of one
            name. By default, a new name for each incarnation: *prefix*, host, process id and a
            random part. So a restarted peer is never taken for its predecessor.
        prefix: Begin of the default name.
        secret: Key that authenticates introductions. By default, the environment variable
            `KVSPEC_SECRET`, or the file that `KVSPEC_SECRET_FILE` names. `b""` is for channels that
            only trusted programs can reach. NIXL neither authenticates nor encrypts the data.
        polled: Create the agent without a progress thread. Bytes then move only inside `poll`
            and `wait`. This suits a rank that starts all its transfers. A rank whose memory peers
            read or write needs the thread.
        staging: A `Staging`, or the bytes of its buffer. Transfers of many short runs move
            through the buffer if that takes less time. None: all transfers are direct.
        backends: NIXL's plug-ins. "UCX" connects peers. "POSIX", "GDS" or "GDS_MT" moves bytes
            between memory and files (see `Memory.of_file`). A rank without "UCX" has only files.

    Raises:
        SpecError: If an argument is wrong.
        TransferError: With state "unavailable" if nixl or one of the backends is missing.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        prefix: str = "",
        secret: Secret | str | bytes | None = None,
        polled: bool = False,
        staging: Staging | int | None = None,
        backends: Iterable[str] = ("UCX",),
    ) -> None:
        self.backends = checked_backends(backends)
        self.name = name_of(name, prefix)
        self.polled = flag("polled", polled)
        # A rank that has only files introduces itself to no peer.
        self.secret = secret_of(secret if "UCX" in self.backends else b"")
        if staging is not None and not isinstance(staging, Staging):
            staging = Staging(buffer=staging)
        self._agent = Agent(self.name, progress_thread=not polled, backends=self.backends)
        self._files: dict[Memory, RegisteredFile] = {}
        self.memory: tuple[Memory, ...] = ()
        # The lists that were prepared for each peer. None: lists of this rank.
        self._lists: dict[str | None, list[Prepared]] = {None: []}
        # Peers that received a hello. A polled rank has also read from them.
        self._answered: set[str] = set()
        self._next_discard = 0.0
        buffers = Buffers(staging, self._agent) if staging else None
        self._in_flight = InFlightTransfers(self._agent, buffers)
        self._probe = np.zeros(PROBES, np.uint8)
        self._probes = itertools.cycle(range(1, PROBES))
        self.register([Memory(self._probe.ctypes.data, PROBES)], owner=self._probe)
        _RANKS.add(weakref.ref(self, _RANKS.discard))

    def __repr__(self) -> str:
        return (
            f"<NixlRank {self.name!r}: {len(self.peers)} peers, {self.stats().handles} in flight>"
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the connected peers."""
        return tuple(name for name in tuple(self._lists) if name is not None)

    @property
    def closed(self) -> bool:
        """Whether the rank was closed: then no byte of it can move, and no call reaches NIXL."""
        return self._agent.closed

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers of which bytes can move, including those that failed in flight.

        Handles in quarantine that ended are released first. So a failed transfer disappears as soon
        as its blocks can be used again.
        """
        return self._in_flight.reap()

    def stats(self) -> NixlStats:
        """Return the numbers of the objects that the rank holds."""
        # Copies, because another thread may connect meanwhile.
        transfers, lists = tuple(self._in_flight), tuple(self._lists.values())
        return NixlStats(
            transfers=len(transfers),
            handles=sum(transfer.live_handles for transfer in transfers),
            lists=sum(not prepared.released for some in lists for prepared in tuple(some)),
            registrations=len(self._agent.registered),
            peers=len(self.peers),
        )

    def register(self, memories: Iterable[Memory], owner: object = None) -> None:
        """Register memory, so that rows in it can be prepared.

        A memory inside a registered one is skipped. A memory that contains a registered one is
        refused. Peers need new metadata to reach new memory. They cannot reach files.

        Args:
            memories: The memories to register. A file must have all bytes already.
            owner: Owner of their bytes, or what keeps the files open. The rank keeps a reference
                until it is closed, or until `deregister_files`.

        Raises:
            SpecError: If a memory overlaps a registered one in part or contains it, or if no
                backend of the rank moves its type of memory.
            TransferError: With state "file_failed" if a file is too short.
        """
        with self._agent.lock:
            self._agent.check_open()
            new = new_memories(self.memory, memories)
            identities = {
                memory: identity_of(memory) for memory in new if memory.memory_type == "FILE"
            }
            if identities and not any("FILE" in BACKENDS[name] for name in self.backends):
                expected = "a backend that moves files, such as POSIX"
                raise SpecError("backends", self.backends, expected)
            for memory in new:
                descs = self._agent.register(memory, owner)
                if memory in identities:
                    file = RegisteredFile(memory, identities[memory], descs, owner)
                    self._files[memory] = file
                self.memory += (memory,)
            if not new:  # The registered memory may have no owner, or another one.
                self._agent.owners.append(owner)

    def deregister_files(self, memories: Iterable[Memory]) -> None:
        """Undo `register` for files, and release their lists. The files can be closed then.

        Args:
            memories: Registered memory of files, as passed to `register`.

        Raises:
            SpecError: If a memory is not a registered one of a file.
            TransferError: With state "busy" while a transfer of one of the files is not over.
        """
        with self._agent.lock:
            self._agent.check_open()
            files = []
            for place, memory in enumerate(sequence("memories", memories, "Memories")):
                if memory not in self._files:
                    raise SpecError(f"memories[{place}]", memory, "a registered memory of a file")
                files.append(self._files[memory])
            devices = {file.memory.device for file in files}
            self._in_flight.check_files_idle(devices)
            for prepared in self._lists[None]:
                if prepared.memory_type == "FILE" and devices & prepared.devices:
                    prepared.release()
            gone = {file.memory for file in files}
            self.memory = tuple(memory for memory in self.memory if memory not in gone)
            for file in files:
                del self._files[file.memory]
            self._agent.deregister_files([(file.descs, file.owner) for file in files])

    def metadata(self) -> bytes:
        """Return the introduction of this rank, which a peer passes to `connect`.

        It contains the registered memory of now, sealed with the secret.

        Raises:
            SpecError: If the rank has only files.
        """
        self._check_network()
        metadata = bytes(self._agent.call("metadata", "getLocalMD"))
        probe = self._probe.ctypes.data
        return Envelope(name=self.name, metadata=metadata, probe=probe).seal(self.secret)

    def connect(self, metadata: bytes, timeout: float = 10.0) -> str:
        """Connect one peer. See `connect_all`.

        Args:
            metadata: Bytes that the peer's `metadata` returned.
            timeout: Seconds to wait for the connection. Only a polled rank waits.

        Returns:
            The name of the peer.

        Raises:
            SpecError: As in `connect_all`.
            WireError: As in `connect_all`.
            TransferError: As in `connect_all`.
        """
        (name,) = self.connect_all([metadata], timeout)
        return name

    def connect_all(self, metadata: Iterable[bytes], timeout: float = 10.0) -> tuple[str, ...]:
        """Load the metadata of some peers, and open all connections at the same time.

        A second call with newer metadata of the same peer adds the memory that it registered since.
        A polled rank waits until the connections are established, since no thread of it would go
        on with them. The peers must make progress meanwhile. A silent peer delays no other one:
        together they take as long as the slowest. If the wait fails, the next call waits again.

        After an error, all peers are forgotten that this call has connected. A peer whose
        connection is still being established stays until the next call: `disconnect` raises
        "busy" then.

        Args:
            metadata: Bytes that the `metadata` of each peer returned.
            timeout: Seconds to wait for all connections together, or for each 4,095 new peers if
                there are more. Only a polled rank waits.

        Returns:
            The names of the peers, in the order of *metadata*.

        Raises:
            SpecError: If *timeout* is wrong, or the rank has only files.
            WireError: If some metadata is damaged or was sealed with another secret.
            TransferError: With state "stale_peer" if another agent with the name of a peer is
                connected. A polled rank also raises the errors of `read`, after it has waited for
                all peers: the error of the first peer that failed.
        """
        self._check_network()
        timeout = seconds("timeout", timeout)
        given = sequence("metadata", metadata, "the metadata of some ranks")
        # All are checked before NIXL receives any: it keeps half of wrong metadata.
        peers = [open_metadata(each, self.secret) for each in given]
        new = {peer.name: peer for peer in peers if peer.name not in self._answered}
        try:
            for peer in peers:
                self._greet(peer)
            if self.polled:
                knocked = [*new.values()]
                for first in range(0, len(knocked), PROBES - 1):  # Each needs a byte of its own.
                    self._knock(knocked[first : first + PROBES - 1], timeout)
            self._answered.update(new)
        except TransferError:
            for name in new:
                with contextlib.suppress(TransferError):
                    self.disconnect(name)
            raise
        return tuple(peer.name for peer in peers)

    def _greet(self, peer: Envelope) -> None:
        """Load the metadata of *peer*, and begin to open the connection."""
        if peer.name == self.name:
            message = f"{peer.name!r} is this rank's own name: connect with another rank's metadata"
            raise TransferError(message, rank=peer.name, state=TransferState.STALE_PEER)
        with self._agent.lock:
            self._agent.check_open()
            self._agent.call("connect", "loadRemoteMD", peer.metadata, peer=peer.name)
            self._lists.setdefault(peer.name, [])
        # Also to a known peer: it shows whether the peer is still there.
        self._agent.call("notify", "genNotif", peer.name, HELLO, peer=peer.name)

    def disconnect(self, peer: str) -> None:
        """Disconnect *peer* and release its lists.

        Each cycle of `disconnect` and `connect` to a live peer costs both sides one file
        descriptor, which NIXL keeps until the agent is destroyed.

        Raises:
            TransferError: With state "busy" while a transfer with the peer is not over, or
                "stale_peer" if *peer* is not connected.
        """
        with self._agent.lock:
            self._agent.check_open()
            self._in_flight.check_idle(peer)
            self._check_connected(peer)
            self._answered.discard(peer)
            for prepared in self._lists[peer]:
                prepared.release()
            del self._lists[peer]
            self._disconnect(peer)

    def prepare(
        self, rows: NDArray[np.uint64], memory_type: str = "DRAM", peer: str | None = None
    ) -> Prepared:
        """Let NIXL check *rows* of this rank or of a peer, and return them as a list.

        The ids of the list count the descriptors, row after row.

        Args:
            rows: A uint64 array of shape (rows, 5): address, length of one descriptor in bytes,
                device, stride in bytes, and number of descriptors. They must lie in registered
                memory.
            memory_type: "DRAM", "VRAM" or "FILE". A list of files is the remote side of a transfer.
            peer: Name of the connected peer that has the memory. None: memory of this rank.

        Returns:
            The list.

        Raises:
            SpecError: If the rows are malformed, or the files are those of a peer.
            TransferError: With state "not_registered" if a row is outside registered memory,
                "stale_peer" if *peer* is not connected, or "file_failed" if a file has changed.
        """
        check_memory_type(memory_type)
        checked = checked_rows(rows)
        with self._agent.lock:
            self._agent.check_open()
            lists = self._lists[None]
            if peer is not None:
                self._check_connected(peer)
                lists = self._lists[peer]
            if memory_type == "FILE":
                if peer is not None:
                    raise SpecError("peer", peer, "None: a rank reaches only its own files")
                check_files(self._files.values(), checked)
                peer = self.name
            handle = self._agent.prepare(peer, memory_type, checked) if checked.total else 0
            prepared = Prepared(self._agent, checked, memory_type, peer, handle, rows)
            lists[:] = [known for known in lists if not known.released] + [prepared]
            return prepared

    def read(
        self,
        local: Prepared,
        local_ids: NDArray[np.integer] | Selection,
        remote: Prepared,
        remote_ids: NDArray[np.integer] | None = None,
        *,
        request: str,
        timeout: float,
    ) -> Transfer:
        """Start copying remote id *i* to local id *i*, pair by pair.

        Descriptors that touch on both sides may be moved as one.

        Args:
            local: Destination, a list of this rank.
            local_ids: Ids of *local*, of any integer type. Or a `Selection`, which contains the ids
                of both sides, if both lists were prepared from the rows of its table.
            remote: Source, a list of the peer.
            remote_ids: Ids of *remote*, as many as *local_ids*. None for a `Selection`.
            request: Name of the request, for errors.
            timeout: Seconds from now. A later poll fails the transfer.

        Returns:
            The transfer.

        Raises:
            SpecError: If the ids are wrong, or a destination byte is named twice.
            TransferError: With state "busy" if another transfer of this rank writes some of the
                same bytes, or reads some of the bytes to write. Transfers of other ranks and of
                peers are not checked.
        """
        sides = local, local_ids, remote, remote_ids
        return self._in_flight.start("READ", {None: sides}, request, timeout)[None]

    def write(
        self,
        local: Prepared,
        local_ids: NDArray[np.integer] | Selection,
        remote: Prepared,
        remote_ids: NDArray[np.integer] | None = None,
        *,
        request: str,
        timeout: float,
    ) -> Transfer:
        """Start copying local id *i* to remote id *i*. All else is as in `read`."""
        sides = local, local_ids, remote, remote_ids
        return self._in_flight.start("WRITE", {None: sides}, request, timeout)[None]

    def pair(self, pairs: Mapping[K, PreparedSides], *, request: str) -> dict[K, Transfer]:
        """Check several reads and pair their ids. That takes long. Nothing starts.

        The agent is not locked meanwhile. Pass each transfer to `move` of this rank once, in place
        of the sides, or drop it. It is not among the `transfers` until then, and cannot be polled.
        Its claim to its bytes yields to any transfer that starts first.

        Raises:
            SpecError: As in `read`.
            TransferError: As in `read`, or with state "closed" if a list was released.
        """
        return self._in_flight.pair(_checked_pairs(pairs), request)

    def move(
        self, pairs: Mapping[K, PreparedSides | Transfer], *, request: str, timeout: float
    ) -> dict[K, Transfer]:
        """Start several reads. If one of them is wrong, none starts.

        Args:
            pairs: Tuples (local list, local ids, remote list, remote ids), by any key. Or results
                of `pair`: the first `poll` of such a transfer posts its first batch. No pair may
                write bytes that another pair reads or writes. The key becomes the `key` of the
                transfer. If the call is interrupted, its caller finds by the keys which of the
                `transfers` were started.
            request: Name of the request, for errors.
            timeout: Seconds from now until the transfers fail.

        Returns:
            The transfers, by the keys of *pairs*.

        Raises:
            SpecError: As in `read`.
            TransferError: As in `read`.
        """
        return self._in_flight.start("READ", _checked_pairs(pairs, Transfer), request, timeout)

    def tick(self) -> None:
        """Discard the hellos that have arrived, at most once a second.

        NIXL would keep them until the rank is closed.
        """
        with self._agent.lock:
            self._agent.check_open()
            if (now := time.monotonic()) >= self._next_discard:
                self._next_discard = now + DISCARD
                self._agent.call("notifications", "getNotifs", {}, [])

    def close(self, drain: float = 1.0) -> None:
        """Release everything in the order that NIXL needs. In a forked child, do nothing.

        All unfinished transfers fail with the state "closed" at once. Their posted handles have
        *drain* seconds to end. If they do not, the agent is destroyed, which stops them. Over TCP,
        that can crash the process of a peer inside UCX. The death of this process can do so too.
        RDMA was not tested.
        """
        limit = seconds("drain", drain)
        if self._agent.forked:
            return
        # The lock is held to the end: a thread that waits for it then finds the rank closed.
        with self._agent.lock:
            # `check_open` raises if the rank is closed already. If NIXL refuses to release an
            # object, the rest is skipped: all of it goes with the agent.
            with contextlib.suppress(TransferError):
                self._agent.check_open()
                idle = self._in_flight.cancel_all(limit)
                try:
                    self._in_flight.release_now()
                    # NIXL's order: handles, lists, peers, memory, agent. If bytes are still in
                    # flight, only the destruction of the agent stops them. Then the handles are
                    # released and the agent is destroyed at once. Lists, peers and memory go with
                    # it.
                    if idle:
                        self._release_all()
                finally:
                    # Also after an interrupt: the bytes of a released transfer may still move.
                    self._agent.close()
            self._lists = {None: []}
            self._answered = set()

    def _release_all(self) -> None:
        """Release lists, peers and memory, in this order. Nothing is in flight."""
        for lists in self._lists.values():
            for prepared in lists:
                prepared.release()
        for peer in self.peers:
            self._disconnect(peer)
        self._agent.deregister()

    def _disconnect(self, peer: str) -> None:
        """Let NIXL disconnect *peer*. It has disconnected a dead peer already."""
        with contextlib.suppress(TransferError):
            self._agent.call("disconnect", "invalidateRemoteMD", peer, peer=peer)

    def _check_network(self) -> None:
        """Raise `SpecError` if the rank has only files."""
        if "UCX" not in self.backends:
            raise SpecError("backends", self.backends, "UCX, which connects peers")

    def _check_connected(self, peer: str) -> None:
        """Raise `TransferError` "stale_peer" if *peer* is not connected."""
        if not isinstance(peer, str) or peer not in self._lists:
            state = TransferState.STALE_PEER
            raise TransferError(f"{peer!r} is not connected", rank=peer, state=state)

    def _knock(self, peers: Iterable[Envelope], timeout: float) -> None:
        """Read one byte of each of *peers*, to establish all connections at the same time.

        NIXL's `make_connection` does not connect anything, so transfers have to.
        """
        first = np.zeros(1, np.int32)
        knocks = list[Transfer]()
        with contextlib.ExitStack() as stack:
            for peer in peers:
                local = self.prepare(row_of_one(self._probe.ctypes.data + next(self._probes)))
                stack.callback(local.release)
                remote = self.prepare(row_of_one(peer.probe), peer=peer.name)
                stack.callback(remote.release)
                stack.callback(self._cancel_probe, local)
                sides = local, first, remote, first
                knocks.append(self.read(*sides, request="connect", timeout=timeout))
            wait_for_all(knocks)

    def _cancel_probe(self, local: Prepared) -> None:
        """Cancel the read of `_knock` if an interrupt has left it. No other call polls it."""
        for transfer in self._in_flight:
            if transfer.local is local:
                transfer.cancel("the connection was not established", TransferState.CANCELLED)


def _checked_pairs(pairs: Mapping[K, T], *others: type[T]) -> Mapping[K, T]:
    """Return *pairs* if its values are sides or of the classes *others*, or raise `SpecError`."""
    checked = mapping("pairs", pairs, f"keys to {SIDES_TEXT}")
    for sides in checked.values():
        known = isinstance(sides, others)
        if not known and (not isinstance(sides, tuple) or len(sides) != 4):  # noqa: PLR2004 - as in SIDES_TEXT
            raise SpecError("pairs", sides, SIDES_TEXT)
    return checked


# Weak references: a rank that the caller drops without `close` must disappear with its agent.
# Python copies a set at once. A `WeakSet` is copied item by item, while other threads change it.
_RANKS: set[weakref.ref[NixlRank]] = set()


@atexit.register
def close_all() -> None:
    """Close all live ranks.

    At exit, a thread that still waits inside NIXL would abort the process.
    """
    for known in tuple(_RANKS):
        if (rank := known()) is not None:
            rank.close()
