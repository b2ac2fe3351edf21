"""The execution layer: one rank's NIXL agent, which moves what a plan says and nothing else.

Everything is checked before NIXL sees it, every wait has a deadline, and memory stays registered
and referenced for as long as a byte may move. What cannot be aborted is put in quarantine; closing
the rank, which destroys the agent, is the only abort.

The network devices are UCX's choice: set `UCX_NET_DEVICES` (for instance `mlx5_0:1`, or `lo` on one
machine) before the first rank is made. `KVSPEC_NIXL_PACKAGE` names the nixl package to import.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import numpy as np

from kvspec.descriptors.selection import Selection
from kvspec.errors import TransferError
from kvspec.inputs import flag, seconds
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import living
from kvspec.nixl.agent import Agent
from kvspec.nixl.envelope import Envelope, name_of, secret_of
from kvspec.nixl.in_flight import Event, InFlightTransfers, NixlStats
from kvspec.nixl.memory import check_inside, check_memory_type, new_memories
from kvspec.nixl.notifications import Inbox, check_payload
from kvspec.nixl.peers import Peers
from kvspec.nixl.rows import checked_rows, row_of_one
from kvspec.nixl.staged import specs_of
from kvspec.nixl.staging_buffer import Buffers, Staging
from kvspec.nixl.transfer import Transfer
from kvspec.nixl.transfer_spec import Operation, Prepared, Sides
from kvspec.protocol.seal import Secret

if TYPE_CHECKING:
    from numpy.typing import NDArray

PROBES = 4096  # connections that may be proven at once, before any of their reads ends


class NixlRank:
    """One rank's agent: registers memory, knows peers, reads, writes and notifies.

    *name* is exact and must be new; by default it is unique per incarnation, host-pid-uuid after
    *prefix*, so that a restarted peer is never taken for its predecessor. A *polled* rank has no
    progress thread: it moves only inside `poll`, `wait`, `notifications` (right for a rank that
    starts every transfer itself; one that is read from must not be polled). *telemetry* lets a
    `Transfer` tell how many descriptors were posted after merging. *secret*, by default the
    environment's `KVSPEC_SECRET`, authenticates introductions; `b""` is for channels that
    only trusted programs reach. The data itself NIXL neither authenticates nor encrypts. *staging*:
    bytes, or a `Staging`: the buffer through which short runs go where that takes less time.

    Methods may be called from any thread; one runs at a time. Close it, or use it in a `with`.
    """

    def __init__(
        self,
        name: str | None = None,
        *,
        prefix: str = "",
        secret: str | bytes | None = None,
        polled: bool = False,
        telemetry: bool = False,
        staging: Staging | int | None = None,
    ) -> None:
        self.name = name_of(name, prefix)
        self.polled, timed = flag("polled", polled), flag("telemetry", telemetry)
        key = secret_of(secret)
        self._agent = Agent(self.name, progress_thread=not polled, telemetry=timed)
        self.secret = Secret(key or b"")
        self._held = living.Held()
        self._registered: list[object] = []
        self._inbox = Inbox(self._agent)
        self._peers = Peers(self._agent, self._inbox, key)
        self._in_flight = InFlightTransfers(self._agent, self._inbox)
        self._buffers = Buffers(Staging.of(staging), self.register, self._in_flight, self._held)
        self._aborted = False  # whether handles were released in flight: only the agent's end helps
        self._probe = np.zeros(PROBES, np.uint8)  # peers read the first byte, this rank the others
        self._probes = itertools.cycle(range(1, PROBES))
        self.register([Memory(self._probe.ctypes.data, PROBES)], owner=self._probe)
        self._buffers.open()
        living.enter(self, self._held)

    def __repr__(self) -> str:
        return f"<NixlRank {self.name!r}: {len(self.peers)} peers, {self.live_handles} in flight>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the connected peers."""
        return self._peers.names

    @property
    def live_handles(self) -> int:
        """Transfer handles that nixl holds for this rank."""
        return sum(transfer.live_handles for transfer in self._in_flight)

    @property
    def quarantined(self) -> tuple[Transfer, ...]:
        """Transfers that failed in flight, until `reap` or `pump` tells that they are over."""
        return tuple(transfer for transfer in self._in_flight if transfer.quarantined)

    @property
    def transfers(self) -> tuple[Transfer, ...]:
        """Transfers that are not over, or whose end nobody knows."""
        return tuple(self._in_flight)

    @property
    def refused(self) -> dict[str, int]:
        """Notifications that did not fit into the inbox, by peer; "": of all strangers."""
        return dict(self._inbox.refused)

    def stats(self) -> NixlStats:
        """Count what the rank holds."""
        return NixlStats(
            transfers=len(tuple(self._in_flight)),
            handles=self.live_handles,
            lists=self._peers.lists,
            registrations=len(self._registered),
            peers=len(self.peers),
            notifications=len(self._inbox),
            threads=len(self._agent.waiters),
        )

    def register(self, memories: Iterable[Memory], owner: object = None) -> None:
        """Register *memories*, each once, and hold *owner* (what owns their bytes) until closed.

        A memory inside a registered one is covered; any other overlap, also with another rank's
        buffer, is a `SpecError`. Metadata taken before does not tell of them.
        """
        with self._agent.locked():
            self._agent.owners.append(owner)
            for memory in new_memories(self._held.memories, memories, living.buffers()):
                self._registered.append(self._agent.register(memory))
                self._held.memories += (memory,)

    def metadata(self) -> bytes:
        """Return what a peer's `connect` takes: send it to them."""
        metadata, probe = self._agent.metadata(), self._probe.ctypes.data
        return Envelope(name=self.name, metadata=metadata, probe=probe).seal(self.secret.key)

    def introduce(self, metadata: bytes) -> str:
        """Take notifications of the peer that *metadata* is of, and return its name.

        Nothing is loaded or connected. What the peer sent before comes with the next notifications.
        """
        return self._peers.introduce(metadata).name

    def connect(self, metadata: bytes, timeout: float = 10.0) -> str:
        """Load a peer's *metadata*, open the connection, and return the peer's name.

        Again with newer metadata of the same peer adds what it registered since. A polled rank
        waits until the connection stands, at most *timeout* seconds, since a notification over one
        that does not would stay here; the peer must make progress. `WireError` if *metadata* is not
        whole or of another secret; `TransferError` "stale_peer" if another agent has that name, or
        as `read`.
        """
        peer = self._peers.introduce(metadata)
        if self._peers.load(peer) and self.polled:
            try:
                self._knock(peer, timeout)
            except TransferError:
                with contextlib.suppress(TransferError):  # "busy": it is the caller's to reap
                    self.disconnect(peer.name)
                raise
        return peer.name

    def disconnect(self, peer: str) -> None:
        """Forget *peer*, its lists and what it sent. Refused while a transfer with it is not over.

        Each cycle of disconnecting and connecting a live peer costs both sides a file descriptor.
        """
        with self._agent.locked():
            self._in_flight.check_idle(peer)
            self._peers.forget(peer)

    def prepare(
        self, rows: NDArray[np.uint64], memory_type: str = "DRAM", peer: str | None = None
    ) -> Prepared:
        """Return the list of strided *rows*, of this rank or of *peer*.

        (N, 5) uint64: address, length (bytes of one descriptor), device, stride (bytes), count.
        Row after row, each id stands for one descriptor. Rows must lie in registered memory.
        """
        check_memory_type(memory_type)
        checked = checked_rows(rows)
        with self._agent.locked():
            if peer is None:
                check_inside(checked, memory_type, self._held.caches)
            else:
                self._peers.check(peer)
            handle = self._agent.prepare(peer, memory_type, checked) if checked.total else None
            return self._peers.keep(Prepared(self._agent, checked, memory_type, peer, handle, rows))

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
        """Start copying remote id *i* to local id *i*, pair by pair, and return the `Transfer`.

        *timeout* in seconds from now. Ids are any integers; no destination byte may be named twice.
        What touches on both sides is moved as one. A `Selection` stands for the ids of both sides,
        where both lists were prepared from its table's rows.
        """
        pairs = [(local, local_ids, remote, remote_ids)]
        return self.move("READ", pairs, request=request, timeout=timeout)[0]

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
        """Start copying local id *i* to remote id *i*; otherwise as `read`."""
        sides = local, local_ids, remote, remote_ids
        return self.move("WRITE", [sides], request=request, timeout=timeout)[0]

    def move(
        self, operation: Operation, pairs: Iterable[Sides], *, request: str, timeout: float
    ) -> tuple[Transfer, ...]:
        """Start a read or write of each (local, ids, remote, ids): none unless all are right."""
        found = specs_of(self._agent, operation, pairs, self._buffers, request, timeout)
        return self._in_flight.start(found)

    def reap(self) -> tuple[Transfer, ...]:
        """Release what ended in quarantine; return the transfers whose blocks are free again."""
        return self._in_flight.reap()

    def pump(self, budget: float = 0.0) -> tuple[Event, ...]:
        """Move everything on, for *budget* seconds or until there is something to tell; tell it.

        Polls all transfers, also those that nobody holds, holds their deadlines, reaps quarantine,
        takes notifications, in turns of one batch (13 ms, or 64 MiB). One thread pumps a rank; a
        `wait` competes with it. A transfer's end is told once: here, or by its `poll` or `wait`.
        """
        return self._in_flight.pump(budget)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send *payload*, at most 64 KiB, to *peer*: once a plan, after its data is done."""
        check_payload(payload)
        with self._agent.locked():
            self._peers.check(peer)
            self._agent.notify(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return (peer, payload) of all that came and was not returned yet, in order by peer."""
        return self._inbox.drain()

    def wait_notification(self, payload: bytes, timeout: float, peer: str | None = None) -> str:
        """Take one notification that equals *payload* (from *peer* if given); return its sender.

        Others stay for `notifications`. `TransferError` "timeout" after *timeout* seconds.
        """
        return self._inbox.wait(payload, timeout, peer)

    def close(self, drain: float = 1.0) -> None:
        """Let go of everything, in nixl's order. Nothing in a fork.

        What is in flight has *drain* seconds to end, then it is aborted. Over tcp an abort may kill
        the peer's process, inside UCX; so may the death of this one. Of RDMA nothing is known yet.
        """
        limit = seconds("drain", drain)
        if self._agent.forked:
            return
        with self._agent.still():  # to the end: who waits to begin something finds it closed
            with contextlib.suppress(TransferError), self._agent.locked():
                self._aborted |= not self._in_flight.stop(limit)
                self._in_flight.abandon()
                if not self._aborted:
                    self._peers.close()
                    while self._registered:
                        self._agent.deregister(self._registered.pop())
            self._registered.clear()  # sessions see by it that nothing can be read any more
            self._agent.drop()
            self._peers.clear()
        living.leave(self)

    def _knock(self, peer: Envelope, timeout: float) -> None:
        first = np.zeros(1, np.int32)
        local = self.prepare(row_of_one(self._probe.ctypes.data + next(self._probes)))
        remote = self.prepare(row_of_one(peer.probe), peer=peer.name)
        try:
            self.read(local, first, remote, first, request="connect", timeout=timeout).wait()
        finally:
            local.release()
            remote.release()
