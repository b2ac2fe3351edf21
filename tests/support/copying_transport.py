"""A second `Transport`: it copies bytes inside of this process with numpy, and knows no NIXL."""

from __future__ import annotations

import contextlib
import ctypes
import uuid
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, ClassVar

import attrs
import numpy as np
import two_engines

from kvspec.descriptors.selection import Selection
from kvspec.errors import TransferError, TransferState
from kvspec.memory.region import Memory
from kvspec.nixl.rank import NixlStats
from kvspec.wire.seal import secret_of

TAG = b"copying transport\n"
Ints = np.ndarray[Any, np.dtype[np.int64]]


def failed(why: str, state: TransferState, peer: str) -> TransferError:
    """Return the error of a transport."""
    return TransferError(f"{why}: {state.advice}", rank=peer, state=state)


@attrs.define(eq=False)
class CopiedRows:
    """Rows of one side."""

    rows: np.ndarray
    peer: str | None
    released: bool = False

    def release(self) -> None:
        """Release the rows."""
        self.released = True

    def spans(self, ids: np.ndarray) -> tuple[Ints, Ints]:
        """Return the address and the length of each id."""
        address, length, _, stride, count = self.rows.astype(np.int64).T
        ends = np.cumsum(count)
        row = np.searchsorted(ends, ids, side="right")
        return address[row] + (ids - (ends - count)[row]) * stride[row], length[row]


@attrs.define(eq=False)
class CopiedRead:
    """One read. Its first poll copies all bytes."""

    owner: CopyTransport
    request: str
    peer: str
    source: Ints
    target: Ints
    length: Ints
    copied: bool = False
    error: TransferError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes to move."""
        return int(self.length.sum())

    @property
    def descriptors(self) -> int:
        """Number of pairs of ids and of ends."""
        return len(self.length)

    @property
    def arrived(self) -> int:
        """Bytes that have arrived."""
        return self.nbytes if self.copied else 0

    @property
    def large(self) -> bool:
        """Whether it takes several polls: never."""
        return False

    @property
    def begun(self) -> bool:
        """Whether a byte was written."""
        return self.copied

    @property
    def over(self) -> bool:
        """Whether no byte can move any more."""
        return self.error is not None or self.copied

    def poll(self, turn: float | None = None) -> str:  # noqa: ARG002 - it always copies all
        """Copy the bytes."""
        if self.error is not None:
            raise self.error
        if not self.over:
            if self.peer not in CopyTransport.ranks:
                self.error = failed("it is closed", TransferState.PEER_LOST, self.peer)
                raise self.error
            for target, source, length in zip(self.target, self.source, self.length, strict=True):
                view(target, length)[:] = view(source, length)
            self.copied = True
        return "DONE"

    def cancel(self, why: str, state: TransferState) -> bool:
        """Fail, unless all bytes were copied."""
        if not self.over:
            self.error = failed(why, state, self.peer)
        return True


def view(address: int, length: int) -> np.ndarray:
    """Return the bytes at an address."""
    memory = (ctypes.c_ubyte * int(length)).from_address(int(address))
    return np.frombuffer(memory, np.uint8)


class CopyTransport:
    """The transport of one rank of this process. It takes the arguments of `NixlRank`."""

    ranks: ClassVar[dict[str, CopyTransport]] = {}

    def __init__(self, *, prefix: str = "", secret: Any = None, **_: object) -> None:
        self.name, self.secret = f"{prefix}{uuid.uuid4().hex}", secret_of(secret)
        self.memory: list[Memory] = []
        self.owners: list[object] = []
        self.peers: tuple[str, ...] = ()
        self.reads: list[CopiedRead] = []
        self.lists: list[CopiedRows] = []
        self.ticks = 0
        self.ranks[self.name] = self

    @property
    def closed(self) -> bool:
        """Whether the transport was closed."""
        return self.name not in self.ranks

    @property
    def transfers(self) -> tuple[CopiedRead, ...]:
        """The reads that are not over."""
        self.reads = [read for read in self.reads if not read.over]
        return tuple(self.reads)

    def stats(self) -> NixlStats:
        """Return the numbers that tests compare."""
        lists = sum(not rows.released for rows in self.lists)
        return NixlStats(transfers=len(self.transfers), lists=lists, peers=len(self.peers))

    def check_open(self) -> None:
        """Raise `TransferError` if the transport was closed."""
        if self.closed:
            raise failed("it is closed", TransferState.CLOSED, self.name)

    def register(self, memories: Iterable[Memory], owner: object = None) -> None:
        """Let peers read memory."""
        self.check_open()
        self.memory += memories
        self.owners.append(owner)

    def metadata(self) -> bytes:
        """Return the sealed name."""
        return self.secret.seal(TAG, self.name.encode())

    def connect_all(self, metadata: Iterable[bytes], timeout: float = 10.0) -> tuple[str, ...]:  # noqa: ARG002 - never waits
        """Connect peers of this process."""
        self.check_open()
        names = [
            self.secret.unseal("metadata", TAG, each, "sealed metadata").decode()
            for each in metadata
        ]
        for name in names:
            if name not in self.ranks:
                raise failed("no such rank", TransferState.PEER_LOST, name)
        self.peers = tuple(dict.fromkeys((*self.peers, *names)))
        return tuple(names)

    def disconnect(self, peer: str) -> None:
        """Forget a peer."""
        if any(read.peer == peer for read in self.transfers):
            raise failed("bytes move", TransferState.BUSY, peer)
        self.peers = tuple(name for name in self.peers if name != peer)

    def prepare(
        self, rows: np.ndarray, memory_type: str = "DRAM", peer: str | None = None
    ) -> CopiedRows:
        """Check that each row lies in registered memory."""
        self.check_open()
        if peer is not None and peer not in self.peers:
            raise failed("not connected", TransferState.STALE_PEER, peer)
        side = self if peer is None else self.ranks[peer]
        for address, length, _, stride, count in rows.tolist():
            end = address + (count - 1) * stride + length
            if not any(
                each.memory_type == memory_type and each.address <= address and end <= each.end
                for each in side.memory
            ):
                raise failed("a row", TransferState.NOT_REGISTERED, side.name)
        self.lists.append(CopiedRows(rows, peer))
        return self.lists[-1]

    def pair(self, pairs: Mapping[Any, Any], *, request: str) -> dict[Any, CopiedRead]:
        """Return a read for each pair of sides."""
        return {key: self._paired(sides, request) for key, sides in pairs.items()}

    def _paired(
        self, sides: tuple[CopiedRows, Selection, CopiedRows, None], request: str
    ) -> CopiedRead:
        local, selection, remote, _ = sides
        assert local.rows is selection.consumer_rows
        assert remote.rows is selection.producer_rows
        assert remote.peer is not None
        (target, length), (source, other) = (
            rows.spans(ids)
            for rows, ids in ((local, selection.consumer_ids), (remote, selection.producer_ids))
        )
        assert np.array_equal(length, other)
        ends = selection.ends.astype(np.int64).T
        moved = (np.concatenate(each) for each in zip((source, target, length), ends, strict=True))
        return CopiedRead(self, request, remote.peer, *moved)

    def move(
        self, pairs: Mapping[Any, Any], *, request: str, timeout: float
    ) -> dict[Any, CopiedRead]:
        """Start reads. The first poll copies, so no deadline passes."""
        assert timeout >= 0
        self.check_open()
        for read in pairs.values():
            read.request = request
        self.reads += pairs.values()
        return {**pairs}

    def tick(self) -> None:
        """Count the calls."""
        self.ticks += 1

    def close(self, drain: float = 1.0) -> None:  # noqa: ARG002 - nothing is in flight
        """Let no byte move any more."""
        for read in self.transfers:
            read.cancel("the transport was closed", TransferState.CLOSED)
        self.ranks.pop(self.name, None)
        self.owners.clear()


@contextlib.contextmanager
def copying() -> Iterator[None]:
    """Let each `Side` use this transport."""
    known = two_engines.NixlRank
    two_engines.NixlRank = CopyTransport  # type: ignore[assignment,misc]
    try:
        yield
    finally:
        two_engines.NixlRank = known  # type: ignore[misc]
