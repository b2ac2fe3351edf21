"""Check files before NIXL moves their bytes.

Invariant: each row of a list of files lies in a registered file, and the file is the one that was
registered, with as many bytes. NIXL itself reports a file that is too short only after it has moved
a part of the bytes, by an error without a name.

How it works:
    NIXL's plug-ins POSIX, GDS and GDS_MT move bytes between memory of this process and its open
    files. The files are memory of the type `FILE`. The agent reads and writes them as it does the
    memory of a peer, and is its own peer. Measured with nixl 1.5.1:

    - The plug-in POSIX has 65,536 places for descriptors in flight. If they do not suffice, a post
      fails, and its descriptors keep their places.
    - A read past the end of a file, and a write to a file that was opened for reading, raise the
      error "Backend". So does a full disk.
    - Memory must be registered after the backend was created. So a rank creates its backends first.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable

import attrs
import numpy as np

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import sequence
from kvspec.memory.region import FILE_OFFSET_BITS, Memory
from kvspec.nixl.rows import StridedRows, row_text

# NIXL's plug-ins that a rank can create, and the types of memory that they move.
BACKENDS = {
    "UCX": ("DRAM", "VRAM"),
    "POSIX": ("DRAM", "FILE"),
    "GDS": ("DRAM", "VRAM", "FILE"),
    "GDS_MT": ("DRAM", "VRAM", "FILE"),
}
# A handle posts at most 1,024 descriptors (`merging.MAX_DESCRIPTORS`), and POSIX has 65,536 places.
FILE_HANDLES = 64


def checked_backends(value: object) -> tuple[str, ...]:
    """Return the names of *value*. Raise `SpecError` unless they fit each other."""
    names: tuple[str, ...] = sequence("backends", value, "names of NIXL's plug-ins")
    known = ", ".join(BACKENDS)
    for name in names:
        if name == "OBJ":
            rule = f"not yet: kvspec moves no objects with NIXL, only memory and files ({known})"
            raise SpecError("backends", name, rule=rule)
        if name not in BACKENDS:
            raise SpecError("backends", name, f"one of {known}")
    movers = [name for name in names if "FILE" in BACKENDS[name]]
    if not names or len(set(names)) < len(names) or len(movers) > 1:
        raise SpecError("backends", names, "each once, and at most one of POSIX, GDS and GDS_MT")
    return names


@attrs.define(eq=False)
class RegisteredFile:
    """A file that NIXL knows.

    Attributes:
        memory: Its registered bytes.
        identity: Its device and inode. A descriptor that was closed may name another file later.
        descs: NIXL's object.
        owner: What keeps the file open.
    """

    memory: Memory
    identity: tuple[int, int]
    descs: object
    owner: object


def identity_of(memory: Memory) -> tuple[int, int]:
    """Return device and inode of the file of *memory*. Raise `TransferError` if it is too short."""
    try:
        status = os.fstat(memory.device)
    except OSError as error:
        raise _failed(f"descriptor {memory.device}: {error.strerror}") from error
    end = memory.end - (memory.device << FILE_OFFSET_BITS)
    if not stat.S_ISREG(status.st_mode):
        raise _failed(f"descriptor {memory.device} is not open for a regular file")
    if status.st_size < end:
        found = f"its file has {status.st_size} bytes, of at least {end}"
        raise _failed(f"descriptor {memory.device}: {found}")
    return status.st_dev, status.st_ino


def check_files(files: Iterable[RegisteredFile], rows: StridedRows) -> None:
    """Raise `TransferError` unless each of *rows* lies in one of *files*, which are unchanged."""
    known = sorted(files, key=lambda file: file.memory.address)
    begins = np.array([file.memory.address for file in known], np.int64)
    ends = np.array([file.memory.end for file in known], np.int64)
    address, length, _, stride, count = rows.table.view(np.int64).T
    at = begins.searchsorted(address, side="right") - 1
    outside = at < 0
    if known:
        outside |= address + (count - 1) * stride + length > ends[at]
    if outside.any():
        row = int(outside.argmax())
        state = TransferState.NOT_REGISTERED
        message = f"rows[{row}] (FILE, {row_text(rows.table[row])}): {state.advice}"
        raise TransferError(message, state=state)
    for place in np.unique(at).tolist():
        file = known[place]
        if identity_of(file.memory) != file.identity:
            raise _failed(f"descriptor {file.memory.device} was closed, and names another file now")


def _failed(what: str) -> TransferError:
    state = TransferState.FILE_FAILED
    return TransferError(f"{what}: {state.advice}", state=state)
