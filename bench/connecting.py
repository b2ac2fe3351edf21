"""CONNECT: the time in which one rank connects ten others of its process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from statistics import median

from moving import nixl_or_row
from timing import Options, Row, readable

from kvspec.nixl import NixlRank

PEERS = 10
TIMEOUT = 60.0


def connected(options: Options) -> Iterator[Row]:
    """Connect ten peers together, ten one after the other, and one. Each by a new rank.

    Each connection takes several answers of the peer. A busy machine delays each answer, so the
    ratio shows whether the delays add up. Loading the metadata of a peer takes about 2 ms of CPU
    time, and adds up in any case.
    """
    if rows := list(nixl_or_row("CONNECT")):
        yield from rows
        return
    taken: list[tuple[float, float, float]] = []
    with ExitStack() as stack:
        peers = [stack.enter_context(NixlRank(secret=b"")) for _ in range(PEERS)]
        metadata = [peer.metadata() for peer in peers]
        for _ in range(options.times(24)):
            together, one = _timed([metadata]), _timed([metadata[:1]])
            taken.append((together, _timed([[each] for each in metadata]), one))
    together, apart, one = (median(each) for each in zip(*taken, strict=True))
    for other, name, row in ((apart, "one after the other", 1), (one, "one peer", 2)):
        yield Row(
            budget="CONNECT",
            what=f"connect {PEERS} peers (other: {name})",
            ours=readable(together),
            other=readable(other),
            ratio=f"{median(each[0] / each[row] for each in taken):.3g}",
        )


def _timed(calls: Sequence[Sequence[bytes]]) -> float:
    """Return the seconds in which a new rank connects the peers of each call in turn."""
    with NixlRank(secret=b"", polled=True) as rank:
        started = time.perf_counter()
        for metadata in calls:
            rank.connect_all(metadata, TIMEOUT)
        return time.perf_counter() - started
