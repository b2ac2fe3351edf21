"""Read stored objects into host memory: by `os.preadv`, and by NIXL's plug-in POSIX.

Usage: `python bench/file_memory.py`. Half a minute. Each object is a file of its own. Both ways
open and close it for each read, as a store must: it cannot keep all of its files open. "open" reads
from files that stay open and registered.
"""

from __future__ import annotations

import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from kvspec import Memory
from kvspec.nixl import NixlRank

TOTAL = 64 << 20
ROUNDS = 9
IDS = np.arange(TOTAL >> 16, dtype=np.int32)


def by_preadv(paths: Iterable[Path], slots: memoryview, size: int) -> None:
    """Open, read and close each file."""
    for number, path in enumerate(paths):
        descriptor = os.open(path, os.O_RDONLY)
        os.preadv(descriptor, [slots[number * size :][:size]], 0)
        os.close(descriptor)


def by_nixl(paths: Iterable[Path], rank: NixlRank, address: int, size: int) -> None:
    """Open and register all files, read them in one transfer, and close them."""
    descriptors = [os.open(path, os.O_RDONLY) for path in paths]
    files = [Memory.of_file(descriptor, size) for descriptor in descriptors]
    rank.register(files)
    read_registered(files, rank, address, size)
    rank.deregister_files(files)
    for descriptor in descriptors:
        os.close(descriptor)


def read_registered(files: list[Memory], rank: NixlRank, address: int, size: int) -> None:
    """Read files that are open and registered, in one transfer."""
    near = rank.prepare(np.array([(address, size, 0, size, len(files))], np.uint64))
    rows = [(file.address, size, file.device, size, 1) for file in files]
    far = rank.prepare(np.array(rows, np.uint64), "FILE")
    ids = IDS[: len(files)]
    rank.read(near, ids, far, ids, request="read", timeout=60).wait()
    near.release()
    far.release()


def measured(size: int, folder: Path, rank: NixlRank, target: np.ndarray) -> list[float]:
    """Return the GB/s of each way, the best of several rounds in turn."""
    content = np.random.default_rng(1).bytes(TOTAL)
    paths = [folder / f"{size}-{number}" for number in range(TOTAL // size)]
    for number, path in enumerate(paths):
        path.write_bytes(content[number * size :][:size])
    handles = [path.open("rb", buffering=0) for path in paths]
    known = [Memory.of_file(handle.fileno(), size) for handle in handles]
    rank.register(known)
    address = target.ctypes.data
    ways: list[Callable[[], object]] = [
        partial(by_preadv, paths, memoryview(target), size),
        partial(by_nixl, paths, rank, address, size),
        partial(read_registered, known, rank, address, size),
    ]
    best = [float("inf")] * (len(ways) + 1)
    for _ in range(ROUNDS):
        for number, way in enumerate([*ways, partial(zlib.crc32, target)]):
            target[:] = target if number == len(ways) else 0
            start = time.perf_counter()
            way()
            best[number] = min(best[number], time.perf_counter() - start)
            if target.tobytes() != content:
                raise SystemExit("wrong bytes")
    rank.deregister_files(known)
    for handle in handles:
        handle.close()
    return [TOTAL / 1e9 / seconds for seconds in best]


def main() -> None:
    """Print a line for each size of an object."""
    target = np.zeros(TOTAL, np.uint8)
    with tempfile.TemporaryDirectory() as folder, NixlRank(backends=["POSIX"]) as rank:
        rank.register([Memory(target.ctypes.data, TOTAL)], owner=target)
        print("object      preadv   NIXL   NIXL, open   checksum   (GB/s)")
        for size in (64 << 10, 256 << 10, 1 << 20, 4 << 20):
            preadv, nixl, opened, crc = measured(size, Path(folder), rank, target)
            print(f"{size >> 10:5} KiB  {preadv:7.2f}{nixl:7.2f}{opened:13.2f}{crc:11.2f}")


if __name__ == "__main__":
    main()
