"""The thin binding: finds nixl, sets an agent up, and turns its exceptions into `TransferError`.

The only module that imports nixl. It calls the bindings and not nixl's Python class, because that
class fixes a spinning progress thread, and its handles release themselves when collected, in flight
or not. No call reaches an agent that is closed or that a fork copied.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
import weakref
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.errors import KVSpecError, TransferError
from kvspec.nixl.errors import STATES, TERMINAL_KINDS, kind_of, state_of
from kvspec.nixl.rows import Ids, StridedRows

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.memory.regions import Memory

Subject = tuple[str, str]  # peer and request, for errors
PACKAGES = ("nixl_cu13", "nixl_cu12")
PROGRESS_DELAY_US = 1000  # 0, the default of nixl's own Python class, takes a whole core while idle


def package_names() -> tuple[str, ...]:
    """Return the nixl packages to try: the environment's, torch's CUDA major, or all."""
    if override := os.environ.get("KVSPEC_NIXL_PACKAGE"):
        return (override,)
    loaded = tuple(name for name in PACKAGES if f"{name}._bindings" in sys.modules)
    version = getattr(getattr(sys.modules.get("torch"), "version", None), "cuda", None)
    if loaded or not version:
        return loaded or PACKAGES
    return (f"nixl_cu{version.split('.')[0]}",)


def bindings() -> Any:  # noqa: ANN401 - nixl has no stubs
    """Import the nixl bindings without torch, which nixl's own `import nixl` would load."""
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")  # or UCX takes SIGHUP from the program
    names = package_names()
    failures = []
    for name in names:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            failures.append(f"{name}: {error}")
    message = f"nixl cannot be imported ({'; '.join(failures)}): pip install 'kvspec[nixl]'"
    raise TransferError(message, state="unavailable")


def _devices() -> str:
    asked = os.environ.get("UCX_NET_DEVICES")
    if asked is None:
        return ""
    folders = Path("/sys/class/net"), Path("/sys/class/infiniband")
    names = sorted(path.name for folder in folders if folder.is_dir() for path in folder.iterdir())
    return f"UCX_NET_DEVICES={asked!r}; this machine has {', '.join(names)}; "


class Agent:
    """One nixl agent over UCX, behind one lock. Handles are its plain ints."""

    def __init__(self, name: str, *, progress_thread: bool, telemetry: bool) -> None:
        self.name = name
        self.telemetry = telemetry
        self.owners: list[object] = []  # what must outlive the agent: the registered memory
        self.waiters: set[int] = set()  # threads
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._nb = nb = bindings()
        kinds = tuple(value for name, value in vars(nb).items() if name.endswith("Error"))
        plain = (ValueError, KeyError, IndexError, TypeError, RuntimeError)
        self._errors: tuple[type[Exception], ...] = (*kinds, *plain)
        self.strided = "numpy.ndarray" in (nb.nixlAgent.prepXferDlist.__doc__ or "")
        config = nb.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.pthrDelay = PROGRESS_DELAY_US
        config.syncMode = nb.NIXL_THREAD_SYNC_STRICT
        config.captureTelemetry = telemetry
        self._native: Any = True  # None is closed
        with self.step("create"):
            self._native = nb.nixlAgent(name, config)
            self._native.createBackend("UCX", {})
        _AGENTS.add(self)

    def __del__(self) -> None:
        self.drop()

    @property
    def forked(self) -> bool:
        """Whether this process is a fork of the one that made the agent."""
        return os.getpid() != self._pid

    def check_process(self) -> None:
        """Refuse a process that did not make the agent."""
        if self.forked:
            message = f"the agent of process {self._pid} was used in its fork {os.getpid()}"
            raise TransferError(f"{message}; {STATES['forked']}", rank=self.name, state="forked")

    @contextmanager
    def locked(self) -> Generator[None, None, None]:
        """Hold the agent still; refuse one that is closed."""
        self.check_process()
        with self._lock:
            if self._native is None:
                raise TransferError("the rank is closed", rank=self.name, state="closed")
            yield

    @contextmanager
    def waiting(self) -> Generator[None, None, None]:
        """Count the thread among those that wait."""
        thread = threading.get_ident()
        self.waiters.add(thread)
        try:
            yield
        finally:
            self.waiters.discard(thread)

    @contextmanager
    def step(
        self, step: str, peer: str | None = None, request: str | None = None
    ) -> Generator[None, None, None]:
        """Hold the agent for *step*, and put its errors into kvspec's words."""
        with self.locked():
            try:
                yield
            except KVSpecError:
                raise
            except self._errors as error:
                kind = kind_of(error)
                state = state_of(step, kind)
                message = f"nixl {step} failed: {kind} ({error}): {STATES[state]}"
                if state == "unavailable":
                    message += f"; {_devices()}NIXL_LOG_LEVEL=DEBUG names the library"
                raise TransferError(
                    message, rank=peer or self.name, request=request, state=state
                ) from error

    # The native object is never bound to a local name: a traceback that somebody keeps would keep
    # it alive, and dropping the last reference is the only way to abort a transfer.

    def register(self, memory: Memory) -> object:
        """Register *memory*; return what `deregister` takes."""
        row = np.array([(memory.address, memory.length, memory.device)], np.uint64)
        with self.step("register"):
            descs = self._nb.nixlRegDList(self._segment(memory.memory_type), row)
            self._native.registerMem(descs, [])
            return descs

    def deregister(self, descs: object) -> None:
        """Undo one `register`. No fence: peers may still reach the memory."""
        with self.step("deregister"):
            self._native.deregisterMem(descs, [])

    def metadata(self) -> bytes:
        """Return nixl's bytes for peers: how to reach the memory registered so far."""
        with self.step("metadata"):
            return bytes(self._native.getLocalMD())

    def connect(self, peer: str, metadata: bytes) -> None:
        """Load nixl's *metadata* of *peer*, which must be its own: nixl forgets no half of it."""
        with self.step("connect", peer):
            self._native.loadRemoteMD(metadata)

    def disconnect(self, peer: str) -> None:
        """Forget *peer*."""
        with self.step("disconnect", peer):
            self._native.invalidateRemoteMD(peer)

    def prepare(self, peer: str | None, memory_type: str, rows: StridedRows) -> int:
        """Return a list handle for *rows* of *peer*, None being this agent's own side."""
        name = self._nb.NIXL_INIT_AGENT if peer is None else peer
        with self.step("prepare", peer):
            segment = self._segment(memory_type)
            if self.strided:
                return int(self._native.prepXferDlist(name, segment, rows.table, []))
            descs = self._nb.nixlXferDList(segment, rows.expanded())
            return int(self._native.prepXferDlist(name, descs, []))

    def release_list(self, handle: int) -> None:
        """Release a list handle; transfers made from it go on."""
        with self.step("release"):
            self._native.releasedDlistH(handle)

    def make(
        self, operation: str, local: tuple[int, Ids], remote: tuple[int, Ids], subject: Subject
    ) -> int:
        """Return a handle for *operation* ("READ" or "WRITE") over (list handle, ids) pairs."""
        verb = self._nb.NIXL_READ if operation == "READ" else self._nb.NIXL_WRITE
        with self.step("make", *subject):
            return int(self._native.makeXferReq(verb, *local, *remote, "", [], False))  # noqa: FBT003

    def make_plain(
        self,
        operation: str,
        local: tuple[str, NDArray[np.uint64]],
        remote: tuple[str, NDArray[np.uint64]],
        subject: Subject,
    ) -> int:
        """Return a handle for *operation* over (memory type, descriptors) pairs, one to one."""
        verb = self._nb.NIXL_READ if operation == "READ" else self._nb.NIXL_WRITE
        sides = [
            self._nb.nixlXferDList(self._segment(kind), rows) for kind, rows in (local, remote)
        ]
        with self.step("make", *subject):
            return int(self._native.createXferReq(verb, *sides, subject[0], "", []))

    def post(self, handle: int, subject: Subject) -> bool:
        """Start *handle*; whether it is done already."""
        with self.step("post", *subject):
            return self._is_done(self._native.postXferReq(handle))

    def check(self, handle: int, subject: Subject) -> bool:
        """Whether the posted *handle* is done; makes progress."""
        with self.step("check", *subject):
            return self._is_done(self._native.getXferStatus(handle))

    def terminal(self, handle: int) -> bool:
        """Whether no byte of *handle* can move any more."""
        with self.locked():
            try:
                return bool(self._native.getXferStatus(handle) == self._nb.NIXL_SUCCESS)
            except self._errors as error:
                return kind_of(error) in TERMINAL_KINDS

    def posted(self, handle: int) -> int:
        """Return how many descriptors a finished *handle* had after merging (needs telemetry)."""
        with self.step("telemetry"):
            return int(self._native.getXferTelemetry(handle).descCount)

    def release(self, handle: int) -> None:
        """Release a terminal *handle*. It must never be named again: nixl would crash."""
        with self.step("release"):
            self._native.releaseXferReq(handle)

    def notify(self, peer: str, payload: bytes) -> None:
        """Send *payload* to *peer*; returns before it arrives."""
        with self.step("notify", peer):
            self._native.genNotif(peer, payload)

    def notifications(self) -> dict[str, list[bytes]]:
        """Return what came since the last call, by peer; makes progress."""
        with self.step("notifications"):
            received: dict[str, list[bytes]] = self._native.getNotifs({}, [])
            return received

    def drop(self) -> None:
        """Destroy the agent: whatever is in flight stops. Only then are the owners let go."""
        if getattr(self, "_native", None) is not None and not self.forked:
            with self._lock:
                self._native = None
                self.owners.clear()

    def _segment(self, memory_type: str) -> Any:  # noqa: ANN401 - nixl has no stubs
        return getattr(self._nb, f"{memory_type}_SEG")

    def _is_done(self, status: object) -> bool:
        if status not in {self._nb.NIXL_SUCCESS, self._nb.NIXL_IN_PROG}:
            raise RuntimeError(status)
        return bool(status == self._nb.NIXL_SUCCESS)


_AGENTS: weakref.WeakSet[Agent] = weakref.WeakSet()


def _keep_in_child() -> None:
    """Never destroy the parent's agents in a fork.

    They share sockets and epoll sets: a destructor hangs the child, or makes the parent abort.
    """
    for agent in tuple(_AGENTS):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent._native))  # noqa: SLF001 - same module


os.register_at_fork(after_in_child=_keep_in_child)
