"""NIXL for tests: the bindings that `kvspec.nixl.agent` uses, in one process, on host memory.

Invariant: bytes move only when the test lets them move. As in NIXL, neither releasing a handle nor
forgetting a peer stops them. Only the end of an agent does. A call that would crash NIXL raises
`AssertionError`.

How it works:
    A test decides what happens to each posted handle. By default its bytes land at once.

        call                  state before    state after    the next status call
        makeXferReq           -               made           raises NotPosted
        postXferReq           any             moving         PROC
        FakeFlight.land       moving          done           DONE
        FakeFlight.fail       moving          gone           raises RemoteDisconnect
        FakeNixl.kill         moving          gone           raises RemoteDisconnect
        releaseXferReq        any             unchanged      AssertionError

    A handle whose bytes move late, after its transfer was cancelled:

    >>> import ctypes
    >>> here, there = FakeLife("here", 1), FakeLife("there", 2)
    >>> source, target = ctypes.c_uint8(7), ctypes.c_uint8(0)
    >>> copy = ctypes.addressof(target), ctypes.addressof(source), 1
    >>> flight = FakeFlight((here, there), [copy], "moving")
    >>> target.value
    0
    >>> flight.land()
    >>> target.value, flight.state
    (7, 'done')
"""

from __future__ import annotations

import ctypes
import enum
import itertools
import struct
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Self

import attrs
import numpy as np

from kvspec.nixl import agent as binding

if TYPE_CHECKING:
    from numpy.typing import NDArray

ByteCopy = tuple[int, int, int]  # to, from, length
# NIXL's metadata begins with this tag, and with the length and the name of the agent.
_HEAD = struct.Struct("<16sQ")
_TAG = b"nixlSerDes|Agent"
FakeStatus = enum.Enum("FakeStatus", ["DONE", "PROC"])  # of a handle
_ERRORS = (
    "NotPosted", "InvalidParam", "Backend", "NotFound", "Mismatch", "NotAllowed", "RepostActive",
    "RemoteDisconnect", "Cancelled",
)  # fmt: skip


@attrs.define(eq=False)
class FakeLife:
    """The state of an agent that its peers can see. It outlives the agent.

    Attributes:
        name: Name of the agent.
        number: A number that no other agent has, not even one of the same name.
        alive: Whether the agent exists.
        memory: Registered memory: (memory_type, start, stop).
        inbox: Unread notifications, by the name of the sender.

    >>> FakeLife("worker", 1).alive
    True
    """

    name: str
    number: int
    alive: bool = True
    memory: list[tuple[str, int, int]] = attrs.field(factory=list)
    inbox: dict[str, list[bytes]] = attrs.field(factory=dict)

    def holds(self, memory_type: str, start: int, length: int) -> bool:
        """Return whether one registered memory contains all these bytes."""
        return any(
            memory_type == kind and low <= start and start + length <= high
            for kind, low, high in self.memory
        )


@attrs.define(eq=False)
class FakeFlight:
    """One handle between two agents.

    Attributes:
        between: The agent that posts it, and its peer.
        copies: (target address, source address, bytes).
        state: "made", "moving", "done" or "gone".

    >>> FakeFlight((FakeLife("here", 1), FakeLife("there", 2)), []).state
    'made'
    """

    between: tuple[FakeLife, FakeLife]
    copies: list[ByteCopy]
    state: str = "made"

    def land(self, part: float = 1.0) -> None:
        """Move the bytes of the first copies. *part* is their share of all; 1 ends the handle."""
        if self.state == "moving":
            for to, source, length in self.copies[: round(part * len(self.copies))]:
                ctypes.memmove(to, source, length)
            self.state = "done" if part == 1.0 else self.state

    def spoil(self, copy: int = 0) -> None:
        """Change the first byte that one of the copies has written, as a wrong write would."""
        to = self.copies[copy % len(self.copies)][0]
        ctypes.c_uint8.from_address(to).value ^= 0xFF

    def fail(self, part: float = 0.0) -> None:
        """Move the first copies and fail: the next status call raises.

        *part* is their share of all. It must be less than 1, because a handle that is done cannot
        fail.
        """
        self.land(part)
        if self.state == "moving":
            self.state = "gone"


def _descriptors(memory_type: str, rows: NDArray[np.uint64]) -> tuple[str, NDArray[np.uint64]]:
    return memory_type, np.array(rows)


class FakeNixl:
    """Bindings of NIXL that a test controls. Inside of a `with` statement, kvspec uses them.

    Args:
        fate: Called with each posted `FakeFlight`. By default it lands at once. To delay it, pass a
            function that does nothing, and call `land` or `fail` of an item of *moving* later.

    Attributes:
        agents: The living agents, by name.
        flights: The posted handles. When an agent ends, handles that have ended are removed.

    >>> with FakeNixl() as net:
    ...     net.moving
    []
    """

    def __init__(self, fate: Callable[[FakeFlight], None] = FakeFlight.land) -> None:
        self.fate = fate
        self.agents: dict[str, FakeLife] = {}
        self.flights: list[FakeFlight] = []
        self.numbers: Iterator[int] = itertools.count(1)
        self.NIXL_READ, self.NIXL_WRITE = "READ", "WRITE"
        self.NIXL_SUCCESS, self.NIXL_IN_PROG = FakeStatus.DONE, FakeStatus.PROC
        self.NIXL_INIT_AGENT, self.NIXL_THREAD_SYNC_STRICT = "", "STRICT"
        self.DRAM_SEG, self.VRAM_SEG, self.FILE_SEG = "DRAM", "VRAM", "FILE"
        self.nixlAgentConfig = SimpleNamespace
        self.nixlRegDList = self.nixlXferDList = _descriptors
        self.nixlAgent = type("nixlAgent", (FakeAgent,), {"net": self})
        for kind in _ERRORS:
            setattr(self, f"nixl{kind}Error", type(f"nixl{kind}Error", (Exception,), {}))

    def __enter__(self) -> Self:
        self._bindings, binding.bindings = binding.bindings, lambda: self
        return self

    def __exit__(self, *error: object) -> None:
        binding.bindings = self._bindings

    @property
    def moving(self) -> list[FakeFlight]:
        """The handles that were posted and have not ended."""
        return [flight for flight in self.flights if flight.state == "moving"]

    def kill(self, name: str) -> None:
        """End the process of the agent *name*. All moving handles to it or from it fail."""
        self.end(self.agents[name])

    def end(self, life: FakeLife) -> None:
        """End an agent. No byte moves to it or from it any more."""
        life.alive = False
        if self.agents.get(life.name) is life:
            del self.agents[life.name]
        for flight in self.moving:
            if life in flight.between:
                flight.fail()
        self.flights = self.moving

    def error(self, kind: str) -> Exception:
        """Return an error of NIXL, such as "NotFound"."""
        error: Exception = getattr(self, f"nixl{kind}Error")(f"NIXL_ERR_{kind}")
        return error


class FakeAgent:
    """One agent, with those methods of NIXL's agent that `kvspec.nixl` uses.

    `FakeNixl.nixlAgent` creates agents. The names of all methods are NIXL's.

    >>> with FakeNixl() as net:
    ...     agent = net.nixlAgent("worker", None)
    ...     list(net.agents)
    ['worker']
    """

    net: FakeNixl

    def __init__(self, name: str, _config: object) -> None:
        self.life = self.net.agents[name] = FakeLife(name, next(self.net.numbers))
        self.peers: dict[str, FakeLife] = {}
        self.lists: dict[int, tuple[FakeLife, NDArray[np.uint64]]] = {}
        self.handles: dict[int, FakeFlight] = {}

    # NIXL has no close: dropping the last reference ends the agent.
    def __del__(self) -> None:
        self.net.end(self.life)

    def createBackend(self, _name: str, _options: object) -> None:  # noqa: N802, D102
        return

    def registerMem(self, descs: tuple[str, NDArray[np.uint64]], _: object) -> None:  # noqa: N802, D102
        memory_type, ((start, length, _device),) = descs[0], descs[1].tolist()
        self.life.memory.append((memory_type, start, start + length))

    def deregisterMem(self, _descs: object, _: object) -> None:  # noqa: N802, D102
        # Deregistering is not a fence: peers can still read and write the memory.
        return

    def getLocalMD(self) -> bytes:  # noqa: N802, D102
        name = self.life.name.encode()
        return _HEAD.pack(_TAG, len(name)) + name + self.life.number.to_bytes(8, "big")

    def loadRemoteMD(self, metadata: bytes) -> bytes:  # noqa: N802, D102
        tag, size = _HEAD.unpack_from(metadata)
        name, number = metadata[_HEAD.size :][:size].decode(), metadata[_HEAD.size + size :]
        if tag != _TAG or len(number) != 8:  # noqa: PLR2004 - the bytes that getLocalMD writes
            raise self.net.error("Mismatch")
        # A known peer stays the same until it is invalidated, even if a new agent has its name.
        peer = self.peers.get(name) or self.net.agents.get(name)
        if peer is None or peer.number != int.from_bytes(number, "big"):
            raise self.net.error("NotAllowed" if name in self.peers else "Backend")
        self.peers[name] = peer
        return name.encode()

    def invalidateRemoteMD(self, name: str) -> None:  # noqa: N802, D102
        if self.peers.pop(name, None) is None:
            raise self.net.error("NotFound")

    def prepXferDlist(self, name: str, memory_type: str, rows: Any, _: object) -> int:  # noqa: N802, ANN401
        """Prepare rows of five columns, a numpy.ndarray. NIXL accepts them since 1.5."""
        side = self.peers[name] if name else self.life
        descriptors = list[tuple[int, int]]()
        for address, length, _, stride, count in rows.tolist():
            # As in NIXL, one memory has the whole row, and not only each descriptor.
            if not side.holds(memory_type, address, stride * (count - 1) + length):
                raise self.net.error("NotFound")
            descriptors += [(address + stride * at, length) for at in range(count)]
        return self._number(self.lists, (side, np.array(descriptors, np.uint64)))

    def releasedDlistH(self, handle: int) -> None:  # noqa: N802, D102
        del self.lists[handle]

    def makeXferReq(self, verb: str, near: int, near_ids: Any, far: int, far_ids: Any,  # noqa: N802, D102, ANN401
                    *_: object) -> int:  # fmt: skip
        local, (peer, remote) = self.lists[near][1][near_ids], self.lists[far]
        return self._made(verb, local, remote[far_ids], peer)

    def createXferReq(self, verb: str, near: Any, far: Any, name: str, *_: object) -> int:  # noqa: N802, D102, ANN401
        return self._made(verb, near[1], far[1], self.peers[name])

    def _made(self, verb: str, near: Any, far: Any, peer: FakeLife) -> int:  # noqa: ANN401
        pairs = zip(*((far, near) if verb == "WRITE" else (near, far)), strict=True)
        copies = [(int(to[0]), int(source[0]), int(to[1])) for to, source in pairs]
        if self.peers.get(peer.name) is not peer:
            raise self.net.error("NotFound")
        return self._number(self.handles, FakeFlight((self.life, peer), copies))

    def postXferReq(self, handle: int) -> FakeStatus:  # noqa: N802, D102
        flight = self._flight(handle)
        flight.state = "moving"
        self.net.flights.append(flight)
        if flight.between[1].alive:
            self.net.fate(flight)
        else:
            flight.fail()
        return self.getXferStatus(handle)

    def getXferStatus(self, handle: int) -> FakeStatus:  # noqa: N802, D102
        flight = self._flight(handle)
        if flight.state in ("made", "gone"):
            raise self.net.error("NotPosted" if flight.state == "made" else "RemoteDisconnect")
        return self.net.NIXL_SUCCESS if flight.state == "done" else self.net.NIXL_IN_PROG

    def getXferTelemetry(self, handle: int) -> SimpleNamespace:  # noqa: N802, D102
        return SimpleNamespace(descCount=len(self._flight(handle).copies))

    def releaseXferReq(self, handle: int) -> None:  # noqa: N802, D102
        self._flight(handle)
        del self.handles[handle]  # Release is not cancel: bytes in flight still move.

    def genNotif(self, name: str, payload: bytes) -> None:  # noqa: N802, D102
        if not self.peers[name].alive:
            raise self.net.error("RemoteDisconnect")
        self.peers[name].inbox.setdefault(self.life.name, []).append(payload)

    def getNotifs(self, _: object, __: object) -> dict[str, list[bytes]]:  # noqa: N802, D102
        received = dict(self.life.inbox)
        self.life.inbox.clear()
        return received

    def _number(self, kept: dict[int, Any], value: object) -> int:
        """Add *value* to *kept* under a new number, and return the number."""
        number = next(self.net.numbers)
        kept[number] = value
        return number

    def _flight(self, handle: int) -> FakeFlight:
        """Return the flight of *handle*. NIXL would read freed memory if it was released."""
        if handle not in self.handles:
            raise AssertionError(
                f"handle {handle} of {self.life.name} was released: nixl would crash"
            )
        return self.handles[handle]
