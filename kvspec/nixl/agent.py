"""Call NIXL's bindings for one agent, and turn their exceptions into `TransferError`.

Invariant: no other module imports nixl. No call reaches a closed agent, or an agent in a forked
child.

How it works:
    kvspec calls the bindings, not NIXL's own class `nixl_agent`, for two reasons. That class
    fixes the delay of the progress thread at 0, so the thread uses a whole core. Its handles also
    release themselves when Python collects them, and NIXL does not stop a released transfer.

    The facts behind the order of calls, measured with nixl 1.5.1:

    - Releasing a handle in flight does not stop its bytes. Only the destruction of the agent does.
    - Deregistering memory does not stop its peers, who can still read and write it.
    - Posting a released handle crashes the process.
    - Errors carry only the name of a status. The step that failed decides what they mean.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager, suppress
from typing import TYPE_CHECKING, Any, Literal, NoReturn

import attrs
import numpy as np

from kvspec.descriptors.selection import RowIds
from kvspec.errors import TransferError, TransferState
from kvspec.memory.region import FILE_OFFSET_BITS
from kvspec.nixl.rows import StridedRows, row_text
from kvspec.ownership.tokens import Ints

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.memory.rank_cache import Memory

Subject = tuple[str | None, str | None]  # Peer and request, for errors.
ListIds = tuple[int, RowIds]  # Handle of a list, and ids of it.
Addresses = tuple[str, int, Ints]  # Memory type, device, and address of each descriptor.
PACKAGES = ("nixl_cu13", "nixl_cu12")
# Pause of the progress thread. NIXL's own Python class sets 0: its thread then uses a whole core
# while idle. With 1 ms it uses about 4 % of a core.
PROGRESS_DELAY_US = 1000

# One exception of NIXL covers many faults, so the step that failed decides the state as well.
STATE_OF_KIND = {
    "RemoteDisconnect": TransferState.PEER_LOST,
    "Cancelled": TransferState.PEER_LOST,
    "Backend": TransferState.PEER_LOST,
    "Unknown": TransferState.PEER_LOST,
    "NotFound": TransferState.STALE_PEER,
}
STATE_OF_PURPOSE = {
    ("create", "NotFound"): TransferState.UNAVAILABLE,
    ("create", "Backend"): TransferState.UNAVAILABLE,
    ("create", "NotSupported"): TransferState.UNAVAILABLE,
    ("register", "Backend"): TransferState.NOT_REGISTERED,
    ("prepare", "NotFound"): TransferState.NOT_REGISTERED,
    ("check", "NotPosted"): TransferState.INTERRUPTED,
    ("connect", "NotAllowed"): TransferState.STALE_PEER,
    ("connect", "InvalidParam"): TransferState.STALE_PEER,
    ("connect", "Mismatch"): TransferState.STALE_PEER,
}
# Kinds after which the backend no longer uses a handle. NotFound is not one of them: it also means
# that the peer's entry was removed while the data still moves. InvalidParam is not one either: UCX
# may refuse one descriptor of a handle after it has posted others, and NIXL then keeps that status.
# If NIXL refuses a post before it reaches UCX, the status stays NotPosted.
TERMINAL_KINDS = frozenset({"RemoteDisconnect", "Cancelled", "Backend", "NotPosted"})
# `mallopt`'s parameter: memory is filled when it is allocated, with the complement of a byte.
M_PERTURB = -6


def kind_of(error: BaseException) -> str:
    """Return NIXL's word for *error*: "NotFound" for nixlNotFoundError."""
    return type(error).__name__.removeprefix("nixl").removesuffix("Error")


def state_of(purpose: str, kind: str) -> TransferState:
    """Return the state after an error *kind* of a call for *purpose*."""
    return STATE_OF_PURPOSE.get((purpose, kind), STATE_OF_KIND.get(kind, TransferState.BUG))


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
    """Import the nixl bindings.

    `import nixl` would import torch to find its CUDA version, which takes 3 seconds.
    """
    # UCX installs a handler for SIGHUP otherwise, and the program loses its own.
    os.environ.setdefault("UCX_DEBUG_SIGNO", "0")
    names = package_names()
    failures = []
    for name in names:
        try:
            return importlib.import_module(f"{name}._bindings")
        except ImportError as error:
            failures.append(f"{name}: {error}")
    message = f"nixl cannot be imported ({'; '.join(failures)}): pip install 'kvspec[nixl]'"
    raise TransferError(message, state=TransferState.UNAVAILABLE)


def zero_new_memory() -> None:
    """Let malloc return zeros if UCX is told to move data over tcp, unless the user decides.

    UCX 1.23 answers a read over tcp with a request from a pool, and leaves the data type of the
    request unset (`ucp_get_req_handler`). If the reader dies while answers wait, UCX looks at the
    data type (`ucp_request_memory_dereg`). Bytes of an earlier use of that memory may then end the
    process with a segmentation fault. Zero is the type of plain bytes, for which UCX does nothing.
    Blocks of at most 1 KiB may still contain earlier bytes, but a pool takes more.

    Arrays of 64 KiB and more take about twice the time to allocate and free. So this is done only
    if `UCX_TLS` names tcp. A limit above which malloc asks the system for memory would help as
    well, but costs ten times the time.
    """
    tunables = os.environ.get("GLIBC_TUNABLES", "")
    decided = "MALLOC_PERTURB_" in os.environ or "malloc.perturb" in tunables
    if "tcp" in os.environ.get("UCX_TLS", "").split(",") and not decided:
        with suppress(AttributeError):  # Only glibc has it.
            ctypes.CDLL(None).mallopt(M_PERTURB, 0xFF)


class _ForkedLock:
    """The lock of an agent in a forked child. The child can never take it."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        state = TransferState.FORKED
        message = f"the agent was used in the fork {os.getpid()} of its process: {state.advice}"
        raise TransferError(message, rank=self._name, state=state)

    def __exit__(self, *_: object) -> None:
        """Do nothing."""


def _closed(name: str) -> TransferError:
    return TransferError("the rank is closed", rank=name, state=TransferState.CLOSED)


class _Destroyed:
    """Takes the place of a destroyed native agent. Each use raises `TransferError`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, method: str) -> NoReturn:
        raise _closed(self._name)


class Agent:
    """One NIXL agent with its backends and one lock. Its handles are plain ints.

    Attributes:
        forked: Whether this process is a fork of the one that made the agent.
        lock: The lock of the agent. In a fork, it raises `TransferError` "forked". The lock itself
            is the context manager: an interrupt between two lines of Python cannot leave it locked.
    """

    forked = False

    def __init__(
        self, name: str, *, progress_thread: bool, backends: Sequence[str] = ("UCX",)
    ) -> None:
        self.name = name
        # Owners of registered memory. They must outlive the agent: NIXL accepts transfers into
        # freed memory, and then overwrites what lies there.
        self.owners: list[object] = []
        self.registered: list[object] = []  # NIXL's descriptors of the registered memory.
        self.lock: AbstractContextManager[object] = threading.RLock()
        self._nb = nb = bindings()
        self._verbs = {"READ": nb.NIXL_READ, "WRITE": nb.NIXL_WRITE}
        named: dict[str, type[Exception]] = vars(nb)
        kinds = tuple(value for name, value in named.items() if name.endswith("Error"))
        plain = (ValueError, KeyError, IndexError, TypeError, RuntimeError)
        # NIXL's exceptions have no common base, and pybind11 raises plain ones for wrong values.
        errors: tuple[type[Exception], ...] = kinds + plain
        self._errors = errors
        config = nb.nixlAgentConfig()
        config.useProgThread = progress_thread
        config.pthrDelay = PROGRESS_DELAY_US
        # The default, no locking, gave wrong errors while another thread registered memory, and
        # crashed if one handle was posted twice. STRICT costs nothing measurable.
        config.syncMode = nb.NIXL_THREAD_SYNC_STRICT
        # NIXL's enums are compared by number: comparing two members takes 0.5 us.
        self._done, self._moving = nb.NIXL_SUCCESS.value, nb.NIXL_IN_PROG.value
        self._native: Any = _Destroyed(name)
        creating = "create"
        zero_new_memory()
        try:
            self._native = nb.nixlAgent(name, config)
            # All before any memory: NIXL registers memory with the backends that exist.
            for backend in backends:
                creating = f"create {backend}"
                self._native.createBackend(backend, {})
        except self._errors as error:
            raise self._failed(creating, error) from error
        _AGENTS.add(self)

    def __del__(self) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether the agent was destroyed."""
        return isinstance(self._native, _Destroyed)

    def check_open(self) -> None:
        """Raise `TransferError` "closed" if the agent was destroyed. The caller holds the lock."""
        if isinstance(self._native, _Destroyed):
            raise _closed(self.name)

    # Never bind the native object to a local name. A stored traceback would keep it alive, and only
    # dropping the last reference stops the bytes in flight. So `call` receives a method's name.
    # The steps of a transfer (`make`, `advance`, `terminal`, `release`) do without `call`, because
    # it takes 5 % of the time of a small read. Their caller holds the lock.

    def call(
        self,
        purpose: str,
        method: str,
        *arguments: object,
        peer: str | None = None,
        request: str | None = None,
    ) -> Any:  # noqa: ANN401 - nixl has no stubs
        """Call *method* of the native agent with the lock. Turn its exceptions into ours.

        Args:
            purpose: What the call is for. It decides what an exception means.
            method: Name of NIXL's method.
            *arguments: Arguments of the method.
            peer: Name of the peer, for errors.
            request: Name of the request, for errors.
        """
        with self.lock:
            try:
                return getattr(self._native, method)(*arguments)
            except self._errors as error:
                raise self._failed(purpose, error, peer, request) from error

    def _failed(
        self, purpose: str, error: Exception, peer: str | None = None, request: str | None = None
    ) -> TransferError:
        """Return the `TransferError` for an exception of NIXL."""
        kind = kind_of(error)
        state = state_of(purpose.partition(" ")[0], kind)
        # Only files are moved to and from the own agent.
        if peer == self.name and kind == "Backend":
            state = TransferState.FILE_FAILED
        message = f"nixl {purpose} failed: {kind} ({error}): {state.advice}"
        if state is TransferState.UNAVAILABLE:
            if purpose == "create UCX":
                # UCX lists the devices that it accepts in a line of its own.
                message += "; UCX_NET_DEVICES or UCX_TLS may be wrong"
            message += "; NIXL_LOG_LEVEL=DEBUG names the library"
        return TransferError(message, rank=peer or self.name, request=request, state=state)

    def register(self, memory: Memory, owner: object) -> object:
        """Register *memory*, and keep *owner* until the agent is destroyed. Return NIXL's object.

        The caller holds the lock. If NIXL refuses the memory, its owner is not kept.
        """
        address = _in_file(memory.memory_type, memory.address)
        row = np.array([(address, memory.length, memory.device)], np.uint64)
        descs = self._nb.nixlRegDList(self._memory_kind(memory.memory_type), row)
        self.owners.append(owner)  # First, since an interrupt may come after the call.
        try:
            self.call("register", "registerMem", descs, [])
        except TransferError:
            self.owners.pop()
            raise
        self.registered.append(descs)
        return descs

    def deregister(self) -> None:
        """Undo each `register`. Peers that know the memory can still read and write it."""
        while self.registered:
            self.call("deregister", "deregisterMem", self.registered.pop(), [])

    def deregister_files(self, files: Sequence[tuple[object, object]]) -> None:
        """Undo the `register` of files, of which it returned the first member, and drop the owners.

        No transfer may use the files.
        """
        gone = {id(descs) for descs, _ in files}
        self.registered = [known for known in self.registered if id(known) not in gone]
        for descs, _ in files:
            self.call("deregister", "deregisterMem", descs, [])
        left = Counter(id(owner) for _, owner in files)
        kept = []
        for owner in self.owners:
            left[id(owner)] -= 1
            if left[id(owner)] < 0:
                kept.append(owner)
        self.owners = kept

    def prepare(self, peer: str | None, memory_type: str, rows: StridedRows) -> int:
        """Return a list handle for *rows* of *peer*, or of this agent if *peer* is None.

        NIXL refuses a row that does not lie whole in one registered memory, and names none. So each
        row is prepared alone then, and the error names the first one that is refused.
        """
        name = self._nb.NIXL_INIT_AGENT if peer is None else peer

        def prepared(table: NDArray[np.uint64]) -> int:
            if memory_type == "FILE":
                table = table.copy()
                table[:, 0] = _in_file(memory_type, table[:, 0])
            arguments = name, self._memory_kind(memory_type), table, list[str]()
            return int(self.call("prepare", "prepXferDlist", *arguments, peer=peer))

        try:
            return prepared(rows.table)
        except TransferError:
            for number, row in enumerate(rows.table):
                try:
                    self.call("release", "releasedDlistH", prepared(row[None]))
                except TransferError as error:
                    message = f"rows[{number}] ({memory_type}, {row_text(row)}): {error.message}"
                    raise TransferError(message, rank=error.rank, state=error.state) from error
            raise

    def make(self, operation: str, local: ListIds, remote: ListIds, subject: Subject) -> int:
        """Return a handle for *operation* ("READ" or "WRITE") over (list handle, ids) pairs."""
        # "": no notification. Attached ones are sent only when this side polls the finished handle.
        # False: let NIXL merge descriptors, since each posted one costs about 3 us.
        verb = self._verbs[operation]
        try:
            made: int = self._native.makeXferReq(verb, *local, *remote, "", [], False)  # noqa: FBT003
        except self._errors as error:
            raise self._failed("make", error, *subject) from error
        return made

    def make_plain(
        self, operation: str, lengths: Ints, local: Addresses, remote: Addresses, subject: Subject
    ) -> int:
        """Return a handle for *operation* over descriptors of *lengths* bytes.

        NIXL does not merge these descriptors. So the caller merges them first.
        """
        sides = []
        for memory_type, device, starts in (local, remote):
            rows = np.empty((len(starts), 3), np.uint64)
            rows[:, 0], rows[:, 1], rows[:, 2] = _in_file(memory_type, starts), lengths, device
            sides.append(self._nb.nixlXferDList(self._memory_kind(memory_type), rows))
        peer, request = subject
        arguments = self._verbs[operation], *sides, peer, "", list[str]()
        return int(self.call("make", "createXferReq", *arguments, peer=peer, request=request))

    def advance(self, handle: int, purpose: Literal["post", "check"], subject: Subject) -> bool:
        """Post *handle*, or check it, which makes progress. Return whether it is done."""
        try:
            if purpose == "post":
                status = self._native.postXferReq(handle).value
            else:
                status = self._native.getXferStatus(handle).value
        except self._errors as error:
            raise self._failed(purpose, error, *subject) from error
        if status == self._done:
            return True
        # All failures seen were exceptions. Another status would be new.
        if status != self._moving:
            raise self._failed(purpose, RuntimeError(status), *subject)
        return False

    def terminal(self, handle: int) -> bool:
        """Whether no byte of *handle* can move any more."""
        try:
            return bool(self._native.getXferStatus(handle).value == self._done)
        except self._errors as error:
            return kind_of(error) in TERMINAL_KINDS

    def release(self, handle: int) -> None:
        """Release a *handle* in a terminal state. It must never be used again: NIXL would crash."""
        try:
            self._native.releaseXferReq(handle)
        except self._errors as error:
            raise self._failed("release", error) from error

    def close(self) -> None:
        """Destroy the agent, which stops everything in flight. Then release the owners."""
        if not self.forked:
            with self.lock:
                self._native = _Destroyed(self.name)
                self.registered.clear()
                self.owners.clear()

    def _memory_kind(self, memory_type: str) -> Any:  # noqa: ANN401 - nixl has no stubs
        return getattr(self._nb, f"{memory_type}_SEG")


def _in_file(memory_type: str, address: Any) -> Any:  # noqa: ANN401 - a number, or an array of them
    """Return *address* as NIXL counts it: in a file, from the begin of the file."""
    return address & ((1 << FILE_OFFSET_BITS) - 1) if memory_type == "FILE" else address


@attrs.define(eq=False, repr=False)
class Prepared:
    """A list of descriptors that NIXL has checked. `NixlRank.prepare` returns it.

    Id *i* of row *r* begins at `address[r] + (i - first id of r) * stride[r]`.

    Attributes:
        agent: The agent that checked the list.
        rows: The checked rows.
        memory_type: "DRAM", "VRAM" or "FILE".
        peer: Name of the peer that has the memory, or None for memory of this rank. A list of files
            has the name of this rank, because the agent is the peer of its own files.
        given_rows: The array that the caller passed to `prepare`, not a copy. If it is an array of
            a selection's table, the list has the rows of that table.
        released: Whether NIXL no longer has the list.
        handle: NIXL's handle, or 0 if there are no rows.
    """

    agent: Agent
    rows: StridedRows
    memory_type: str
    peer: str | None
    handle: int
    given_rows: object
    released: bool = False

    def __repr__(self) -> str:
        side = "local" if self.peer is None else f"peer={self.peer!r}"
        return f"<Prepared {side} {len(self.rows.table)} rows, {self.rows.total} ids>"

    @property
    def devices(self) -> set[int]:
        """The devices of the rows. A device of `FILE` is the descriptor of a file."""
        return set(self.rows.table[:, 2].tolist())

    def release(self) -> None:
        """Release the list. A second call does nothing.

        Posted batches continue. A transfer that has more batches fails with the state "closed".
        """
        with self.agent.lock:
            self.agent.check_open()
            # Set the flag first: after an interrupt in between, the handle is never freed twice.
            known, self.released = not self.released, True
            if known and self.rows.total:  # Transfers made from the list are independent of it.
                self.agent.call("release", "releasedDlistH", self.handle)


def check_unreleased(*lists: Prepared) -> None:
    """Raise `TransferError` "closed" if one of *lists* was released."""
    for prepared in lists:
        if prepared.released:
            message = f"{prepared!r} was released: {TransferState.CLOSED.advice}"
            raise TransferError(message, rank=prepared.peer, state=TransferState.CLOSED)


_AGENTS: weakref.WeakSet[Agent] = weakref.WeakSet()


def _keep_in_child() -> None:
    """Mark the agents in a forked child, and keep them alive: their destructors never run there.

    Both processes share sockets and epoll sets. A destructor in the child hangs, or makes the
    parent abort.
    """
    for agent in tuple(_AGENTS):
        agent.forked, agent.lock = True, _ForkedLock(agent.name)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(agent._native))  # noqa: SLF001 - same module


os.register_at_fork(after_in_child=_keep_in_child)
