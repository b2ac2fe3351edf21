"""Compute the checksums that readers request of a producer rank.

Invariant: a checksum covers the blocks that the producer's engine passed to `hold`, and is sent
only while they are held. One poll takes a bounded time. A reader without an answer asks again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

import attrs

from kvspec.completion.producer import ProducerLedger
from kvspec.descriptors.request import BlockTable
from kvspec.errors import SpecError
from kvspec.memory.rank_cache import RankCache
from kvspec.session.extents import sums_of
from kvspec.wire.messages import (
    SUM,
    Checksum,
    ChecksumRequest,
    ChecksumUnavailable,
    Extent,
    Key,
    Message,
)

TURN = 0.02  # seconds that a poll sums, and some hundred kilobytes more
MAX_ASKED, MAX_KNOWN = 4096, 512
"""Questions that wait, more are asked again; sums that are kept of one request."""


@attrs.define(eq=False)
class Work:
    """A sum on its way: what is still to be added, and the *total* so far; *seconds* it took."""

    left: Iterator[int]
    total: int = 0
    over: bool = False
    seconds: float = 0.0

    def go_on(self, end: float) -> bool:
        """Add until all is added, or the time is *end*; return whether it is all."""
        began = time.monotonic()
        while not self.over:
            partial_sum = next(self.left, None)
            self.over = partial_sum is None
            self.total = (self.total + (partial_sum or 0)) % 2 ** (8 * SUM)
            if time.monotonic() >= end:
                break
        self.seconds += time.monotonic() - began
        return self.over


@attrs.define(eq=False)
class Summing:
    """The sums that one rank is asked for. *tables*: where requests lie, as far as was said."""

    book: ProducerLedger
    cache: RankCache
    owner: object
    tell: Callable[[Message], None]
    note: Callable[[str], None]
    tables: dict[Key, Mapping[str, BlockTable]] = attrs.field(factory=dict)
    _asked: dict[ChecksumRequest, Work] = attrs.field(factory=dict)
    _known: dict[Key, dict[Extent, bytes]] = attrs.field(factory=dict)

    @property
    def waiting(self) -> int:
        """How many sums are asked for, and not told yet."""
        return len(self._asked)

    def deliver(self, message: ChecksumRequest) -> None:
        """Take a question; of a request that is not held yet, or no more, it is not answered."""
        extent, key = message.extent, message.key
        if not self.book.holds(key) or message in self._asked:
            return
        total = self._known.get(key, {}).get(extent)
        if total is not None:
            self.tell(message.answer(Checksum, total=total))
        elif len(self._asked) < MAX_ASKED:
            sums = sums_of(self.cache, self.tables.get(key, {}), extent)
            self._asked[message] = Work(sums)

    def move(self) -> None:
        """Sum for a while, and forget what is not held any more."""
        for key in [key for key in self.tables if not self.book.holds(key)]:
            del self.tables[key]
            self._known.pop(key, None)
        end = time.monotonic() + TURN
        for message, work in list(self._asked.items()):
            if self.book.holds(message.key):
                try:
                    if not work.go_on(end):
                        return
                    self._sum(message, work.total.to_bytes(SUM, "little"))
                except SpecError as error:
                    self.note(f"{message.kind} of {message.by}: {error}")
                    self.tell(message.answer(ChecksumUnavailable))
            del self._asked[message]
            if time.monotonic() >= end:
                return

    def _sum(self, message: ChecksumRequest, total: bytes) -> None:
        known = self._known.setdefault(message.key, {})
        if len(known) < MAX_KNOWN:
            known[message.extent] = total
        self.tell(message.answer(Checksum, total=total))

    def close(self) -> None:
        """Sum nothing any more, and let the memory go."""
        self._asked.clear()
        self.tables.clear()
        self._known.clear()
        self.owner = None
