"""The execution layer: one rank's NIXL agent, which moves what a plan says and nothing else.

Everything is checked before NIXL sees it, every wait has a deadline, and memory stays registered
and referenced for as long as a byte may move. What cannot be aborted is put in quarantine; closing
the rank, which destroys the agent, is the only abort.

The network devices are UCX's choice: set `UCX_NET_DEVICES` (for instance `mlx5_0:1`, or `lo` on one
machine) before the first rank is made. `KVSPEC_NIXL_PACKAGE` names the nixl package to import.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self

import numpy as np

from kvspec.errors import SpecError, TransferError
from kvspec.memory.regions import Memory
from kvspec.nixl.agent import Agent
from kvspec.nixl.errors import STATES
from kvspec.nixl.introduction import Envelope, name_of, secret_of, unseal
from kvspec.nixl.memory import check_inside, check_memory_type, new_memories
from kvspec.nixl.notifications import HELLO, Inbox, check_payload
from kvspec.nixl.rows import checked_rows, row_of_one
from kvspec.nixl.transfer import Order, Prepared, Transfer, order_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LIVE: weakref.WeakValueDictionary[str, NixlRank] = weakref.WeakValueDictionary()
_NAMING = threading.Lock()


class NixlRank:
    """One rank's agent: registers memory, knows peers, reads, writes and notifies.

    *name* is exact and must be new; by default it is unique per incarnation, host-pid-uuid after
    *prefix*, so that a restarted peer is never taken for its predecessor. A *polled* rank has no
    progress thread: it moves only inside `poll`, `wait`, `notifications` (right for a rank that
    starts every transfer itself; one that is read from must not be polled). *telemetry* lets a
    `Transfer` tell how many descriptors were posted after merging. *secret*, by default the
    environment's `KVSPEC_SECRET`, authenticates introductions; `b""` is for channels
    that only trusted programs reach. The data itself NIXL neither authenticates nor encrypts.

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
    ) -> None:
        self.name = name = name_of(name, prefix)
        self._secret = secret_of(secret)
        self._peers: dict[str, list[Prepared]] = {}
        with _NAMING:
            if any(name in {rank.name, *rank.peers} for rank in tuple(_LIVE.values())):
                raise SpecError("name", name, "a name that no live rank of this process knows")
            _LIVE[name] = self
        self._memories: tuple[Memory, ...] = ()
        self._registered: list[object] = []
        self._lists: list[Prepared] = []
        self._transfers: set[Transfer] = set()
        self._aborted = False  # whether handles were released in flight: only the agent's end helps
        try:
            self._agent = Agent(name, progress_thread=not polled, telemetry=telemetry)
        except BaseException:
            del _LIVE[name]
            raise
        self.polled = polled
        self._inbox = Inbox(self._agent)
        self._probe = np.zeros(1, np.uint8)
        self.register([Memory(self._probe.ctypes.data, 1)], owner=self._probe)

    def __repr__(self) -> str:
        return f"<NixlRank {self.name!r}: {len(self._peers)} peers, {self.live_handles} in flight>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @property
    def peers(self) -> tuple[str, ...]:
        """Names of the connected peers."""
        return tuple(self._peers)

    @property
    def live_handles(self) -> int:
        """Transfer handles that nixl holds for this rank."""
        return sum(transfer.live_handles for transfer in tuple(self._transfers))

    @property
    def quarantined(self) -> tuple[Transfer, ...]:
        """Transfers that failed while some of their handles were, and are, in flight."""
        every = tuple(self._transfers)
        return tuple(failed for failed in every if failed.state not in {"PROC", "DONE"})

    def register(self, memories: Iterable[Memory], owner: object = None) -> None:
        """Register *memories*, each once, and hold *owner* (what owns their bytes) until closed.

        A memory inside a registered one is covered; any other overlap is a `SpecError`. Metadata
        taken before does not tell of peer.
        """
        with self._agent.locked():
            self._agent.owners.append(owner)
            for memory in new_memories(self._memories, memories):
                self._registered.append(self._agent.register(memory))
                self._memories += (memory,)

    def metadata(self) -> bytes:
        """Return what a peer's `connect` takes: send it to them."""
        metadata, probe = self._agent.metadata(), self._probe.ctypes.data
        return Envelope(name=self.name, metadata=metadata, probe=probe).seal(self._secret or b"")

    def connect(self, metadata: bytes, timeout: float = 10.0) -> str:
        """Load a peer's *metadata*, open the connection, and return the peer's name.

        Again with newer metadata of the same peer adds what it registered since. A polled rank
        waits until the connection stands, at most *timeout* seconds, since a notification over one
        that does not would stay here; the peer must make progress. `WireError` if *metadata* is not
        whole or of another secret; `TransferError` "stale_peer" if another agent has that name, or
        as `read`.
        """
        peer = unseal(metadata, self._secret)
        if peer.name == self.name:
            message = f"{self.name!r} is this rank's own name: connect takes the metadata of a peer"
            raise TransferError(message, rank=self.name, state="stale_peer")
        with self._agent.locked():
            known = peer.name in self._peers
            self._agent.connect(peer.name, peer.metadata)
            self._peers.setdefault(peer.name, [])
        try:
            self._agent.notify(peer.name, HELLO)
            if self.polled and not known:
                self._knock(peer, timeout)
        except TransferError:
            with contextlib.suppress(TransferError):  # "busy": it is the caller's to reap
                if not known:
                    self.disconnect(peer.name)
            raise
        return peer.name

    def disconnect(self, peer: str) -> None:
        """Forget *peer* and its lists. Refused while a transfer with it is not over.

        Each cycle of disconnecting and connecting a live peer costs both sides a file descriptor.
        """
        with self._agent.locked():
            self._check_peer(peer)
            transfers = tuple(self._transfers)
            busy = [transfer.request for transfer in transfers if transfer.peer == peer]
            if busy:
                raise TransferError(f"{busy}: {STATES['busy']}", rank=peer, state="busy")
            for prepared in self._peers[peer]:
                prepared.release()
            del self._peers[peer]
            self._agent.disconnect(peer)

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
                check_inside(checked, memory_type, self._memories)
            else:
                self._check_peer(peer)
            lists = self._lists if peer is None else self._peers[peer]
            handle = self._agent.prepare(peer, memory_type, checked) if checked.total else None
            prepared = Prepared(self._agent, checked, memory_type, peer, handle)
            lists[:] = [known for known in lists if not known.released] + [prepared]
        return prepared

    def read(
        self,
        local: Prepared,
        local_ids: NDArray[np.integer],
        remote: Prepared,
        remote_ids: NDArray[np.integer],
        *,
        request: str,
        timeout: float,
    ) -> Transfer:
        """Start copying remote id *i* to local id *i*, pair by pair, and return the `Transfer`.

        *timeout* in seconds from now. Ids are any integers; no destination byte may be named twice.
        What touches on both sides is moved as one, in any order of the ids.
        """
        sides = (local, local_ids), (remote, remote_ids)
        return self._start(order_of(self._agent, "READ", *sides, request=request, timeout=timeout))

    def write(
        self,
        local: Prepared,
        local_ids: NDArray[np.integer],
        remote: Prepared,
        remote_ids: NDArray[np.integer],
        *,
        request: str,
        timeout: float,
    ) -> Transfer:
        """Start copying local id *i* to remote id *i*; otherwise as `read`."""
        sides = (local, local_ids), (remote, remote_ids)
        return self._start(order_of(self._agent, "WRITE", *sides, request=request, timeout=timeout))

    def reap(self) -> tuple[Transfer, ...]:
        """Release what ended in quarantine; return the transfers whose blocks are free again."""
        with self._agent.locked():
            return tuple(failed for failed in self.quarantined if failed.reap())

    def notify(self, peer: str, payload: bytes) -> None:
        """Send *payload*, at most 64 KiB, to *peer*: once a plan, after its data is done."""
        check_payload(payload)
        with self._agent.locked():
            self._check_peer(peer)
            self._agent.notify(peer, payload)

    def notifications(self) -> list[tuple[str, bytes]]:
        """Return (peer, payload) of all that came and was not returned yet, in order by peer."""
        return self._inbox.drain()

    def wait_notification(self, payload: bytes, timeout: float, peer: str | None = None) -> str:
        """Take one notification that equals *payload* (from *peer* if given); return its sender.

        Others stay for `notifications`. `TransferError` "timeout" after *timeout* seconds.
        """
        return self._inbox.wait(payload, timeout, peer)

    def close(self) -> None:
        """Let go of everything, in nixl's order; data in flight stops. Nothing in a fork."""
        if self._agent.forked:
            return
        with contextlib.suppress(TransferError), self._agent.locked():
            transfers = tuple(self._transfers)
            if not all([transfer.stop() for transfer in transfers]):  # noqa: C419 - all of them
                self._aborted = True
            for transfer in transfers:
                transfer.abandon()
            if not self._aborted:
                self._undo()
        self._agent.drop()
        self._peers.clear()
        if _LIVE.get(self.name) is self:
            del _LIVE[self.name]

    def _undo(self) -> None:
        for lists in (self._lists, *self._peers.values()):
            for prepared in lists:
                prepared.release()
        for peer in self._peers:
            with contextlib.suppress(TransferError):  # a dead one is gone already
                self._agent.disconnect(peer)
        while self._registered:
            self._agent.deregister(self._registered.pop())

    def _knock(self, peer: Envelope, timeout: float) -> None:
        first = np.zeros(1, np.int32)
        local = self.prepare(row_of_one(self._probe.ctypes.data))
        remote = self.prepare(row_of_one(peer.probe), peer=peer.name)
        self.read(local, first, remote, first, request="connect", timeout=timeout).wait()
        local.release()
        remote.release()

    def _start(self, order: Order) -> Transfer:
        with self._agent.locked():
            transfer = Transfer(self._agent, self._transfers, order)
            transfer.start()
        return transfer

    def _check_peer(self, peer: str) -> None:
        if peer not in self._peers:
            raise TransferError(f"{peer!r} is not connected", rank=peer, state="stale_peer")


@atexit.register
def _close_all() -> None:
    """Close what is left before the interpreter ends: threads that wait would make it abort."""
    for rank in tuple(_LIVE.values()):
        rank.close()
