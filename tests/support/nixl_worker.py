"""A child process that owns one rank and executes its parent's commands over a pipe.

The parent starts it by path, with the number of an inherited end of a pipe. So the process does
not import pytest or the modules of the parent.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection

import numpy as np
from nixl_pair import memory
from notified import notifications

from kvspec.errors import TransferError
from kvspec.nixl import NixlRank

BLOCK, BLOCKS = 4096, 64
SIZE = 2 * BLOCK * BLOCKS  # A gap as long as a block follows each block.


def rows(address: int) -> np.ndarray:
    """Return one strided row of `BLOCKS` blocks with gaps between them."""
    return np.array([[address, BLOCK, 0, 2 * BLOCK, BLOCKS]], np.uint64)


def pattern(seed: int) -> np.ndarray:
    """Return bytes that depend on *seed* alone."""
    return np.random.default_rng(seed).integers(0, 256, SIZE, dtype=np.uint8)


def use_in_fork(rank: NixlRank) -> str:
    """Use *rank* in a forked child that exits normally; return its error and exit status."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            notifications(rank)
            outcome = b"nothing"
        except TransferError as error:
            outcome = str(error.state).encode()
        os.write(write, outcome)
        # `sys.exit`, not `os._exit`: the destructors must run, as at the end of any script.
        sys.exit(7)
    outcome = os.read(read, 64)
    _, status = os.waitpid(pid, 0)
    return f"{outcome.decode()} {os.waitstatus_to_exitcode(status)}"


def main(parent: Connection) -> None:
    """Run commands and send their results until the pipe is closed."""
    storage = pattern(int(sys.argv[2]))
    name = sys.argv[3] if len(sys.argv) > 3 else None
    with NixlRank(name, prefix="" if name else "worker-") as rank:
        rank.register([memory(storage)], owner=storage)
        parent.send((rank.metadata(), storage.ctypes.data))
        while True:
            try:
                command, *arguments = parent.recv()
            except EOFError:
                return
            answer: object = None
            match command:
                case "connect":
                    rank.connect(arguments[0])
                case "storage":
                    answer = storage.tobytes()
                case "fork":
                    answer = use_in_fork(rank)
            parent.send(answer)


if __name__ == "__main__":
    main(Connection(int(sys.argv[1])))
