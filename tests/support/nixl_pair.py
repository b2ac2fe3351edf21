"""Two connected ranks of one process and their memory, for tests and their scripts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import kvspec
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank, Transfer
from kvspec.nixl.agent import Prepared

SIZE = 1 << 20
REPO = Path(kvspec.__file__).parents[1]
SUPPORT = Path(__file__).parent


def memory(array: np.ndarray) -> Memory:
    """Return the memory of *array*."""
    return Memory(array.ctypes.data, array.nbytes)


def table(base: int, rows: list[tuple[int, ...]]) -> np.ndarray:
    """Return rows for `NixlRank.prepare`, from (offset, length, stride, count)."""
    return np.array([(base + at, size, 0, stride, n) for at, size, stride, n in rows], np.uint64)


class Pair:
    """A rank that reads and writes, a rank that serves, and the memory of both.

    *posted*: what `counted_posts` counts.
    """

    def __init__(
        self, near: NixlRank, far: NixlRank, posted: Mapping[Transfer, int] | None = None
    ) -> None:
        self.near, self.far, self.posted = near, far, {} if posted is None else posted
        self.local = np.zeros(SIZE, np.uint8)
        self.remote = np.random.default_rng(0).integers(0, 256, SIZE, dtype=np.uint8)
        near.register([memory(self.local)], owner=self.local)
        far.register([memory(self.remote)], owner=self.remote)
        self.peer = near.connect(far.metadata())

    def lists(self, local: list[tuple[int, ...]], remote: list[tuple[int, ...]]) -> list[Prepared]:
        """Prepare rows of (offset, length, stride, count) on each side."""
        return [
            self.near.prepare(table(self.local.ctypes.data, local)),
            self.near.prepare(table(self.remote.ctypes.data, remote), peer=self.peer),
        ]

    def read(self, first: int, count: int, timeout: float = 10.0) -> Transfer:
        """Start to read *count* blocks of 512 bytes. Block k is at offset 1024 * (*first* + k)."""
        rows = [(first * 1024, 512, 1024, count)]
        local, remote = self.lists(rows, rows)
        ids = np.arange(count)
        return self.near.read(local, ids, remote, ids, request=f"{first}", timeout=timeout)

    def right(self, first: int, count: int) -> bool:
        """Return whether the blocks equal those of the other side, and the gaps are still zero."""
        local, remote = (
            side[first * 1024 : (first + count) * 1024].reshape(count, 2, 512)
            for side in (self.local, self.remote)
        )
        return np.array_equal(local[:, 0], remote[:, 0]) and not local[:, 1].any()


def run_script(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run *code* in its own interpreter, which may crash, for at most 60 s."""
    return subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code],
        env={
            "UCX_NET_DEVICES": "lo",
            **os.environ,
            "PYTHONPATH": f"{REPO}{os.pathsep}{SUPPORT}",
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
