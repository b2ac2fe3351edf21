"""Compare the data that a consumer received with the data that its producers hold, by checksums.

Invariant: the consumer asks for checksums of everything that moved, after it has arrived. If they
differ, the load fails. Then halves are compared until one token of one unit is known to differ, or
the time is over.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

import attrs

from kvspec.completion.load_plan import Name
from kvspec.completion.pending import about
from kvspec.descriptors.request import TransferRequest
from kvspec.errors import SpecError, TransferState
from kvspec.memory.rank_cache import RankCache
from kvspec.nixl import NixlRank
from kvspec.ownership.parallel import RankId
from kvspec.session.extents import extents_of, sums_of
from kvspec.session.remotes import RemoteEngine
from kvspec.session.summing import Work
from kvspec.wire.messages import (
    Checksum,
    ChecksumRequest,
    ChecksumUnavailable,
    Extent,
    Message,
    RankAddress,
)

_NUMBERS = itertools.count(1)
"""Of questions: an answer to one of an earlier load is none to a later one's."""


@attrs.define(eq=False)
class Question:
    """An extent, this rank's own sum of it, and what producer *rank* answered, once it has."""

    rank: RankId
    extent: Extent
    work: Work
    answer: int | None = None
    again: float = 0.0


@attrs.define(eq=False)
class Audit:
    """The comparison of one load; *steps*: the ledger's that have arrived, and end with it.

    *differs*: what is known to differ. *verdict*: the state of its error, if it fails. *seconds*:
    how long this rank summed.
    """

    remote: RemoteEngine
    request: TransferRequest
    me: RankAddress
    nixl: NixlRank
    cache: RankCache
    tell: Callable[[Message], None]
    steps: tuple[int, ...] = ()
    differs: str = ""
    verdict: TransferState = TransferState.UNVERIFIED
    source: RankId | None = None
    seconds: float = 0.0
    _open: dict[int, Question] | None = None
    _rest: Extent | None = None
    _refused: str = ""

    def __attrs_post_init__(self) -> None:
        for region in self.cache.regions:
            if region.memory_type != "DRAM":
                rule = f"a digest needs host memory, not {region.memory_type}"
                raise SpecError("digest", True, rule=rule)  # noqa: FBT003

    def cancel(self) -> tuple[int, ...]:
        """Compare nothing any more; return the ledger's steps that were held back."""
        steps, self.steps = self.steps, ()
        self._open = dict[int, Question]()
        return steps

    def move(self, name: Name, now: float, heartbeat: float, end: float) -> str | None:
        """Compare what messages name by *name*, until the time is *end*.

        Return "" once all is equal, what differs once that is known, and None before.
        """
        if not self.nixl.stats().registrations:
            self.verdict = TransferState.CLOSED
            return "the rank was closed before the received data could be compared"
        try:
            questions = self._begun()
            for number, question in questions.items():
                if question.answer is None and now >= question.again:
                    question.again = now + heartbeat
                    asked = about(name, self.me, question.rank, number)
                    self.tell(ChecksumRequest(*asked, extent=question.extent))
            for number, question in list(questions.items()):
                before = question.work.seconds
                summed = question.work.go_on(end)
                self.seconds += question.work.seconds - before
                if summed and question.answer is not None:
                    del questions[number]
                    if question.work.total != question.answer:
                        return self._narrow(question.rank, question.extent)
                if not summed:
                    break
        except SpecError as error:
            return str(error)
        return self._refused or (None if questions else self._equal())

    def deliver(self, message: Checksum | ChecksumUnavailable) -> bool:
        """Take a producer's answer; return whether it was waited for."""
        question = (self._open or {}).get(message.number)
        if question is None or question.rank != message.by.rank:
            return False
        if isinstance(message, Checksum):
            question.answer = int.from_bytes(message.total, "little")
        else:
            self._refused = f"{message.by} cannot sum it: `hold` it with `blocks`"
        return True

    def _begun(self) -> dict[int, Question]:
        """Return what is open; at first, all that moves."""
        if self._open is None:
            self._open = {}
            for rank in self.remote.tables:
                own = self.remote.plan, self.request, rank, self.cache.rank
                for extent in extents_of(*own):
                    self._ask(rank, extent)
        return self._open

    def _ask(self, rank: RankId, extent: Extent) -> None:
        work = Work(sums_of(self.cache, self.request.consumer_blocks, extent))
        self._begun()[next(_NUMBERS)] = Question(rank, extent, work)

    def _equal(self) -> str | None:
        """Take that all is equal that was asked for: the other half differs, or nothing."""
        if self._rest is None or self.source is None:
            return ""
        return self._narrow(self.source, self._rest)

    def _narrow(self, rank: RankId, extent: Extent) -> str | None:
        """Look into an extent that differs; return its name if it cannot be halved."""
        self.source, self.differs = rank, f"{extent}: received data differs from that of {rank}"
        self._open, self._rest = dict[int, Question](), None
        self.verdict = TransferState.DIFFERS
        if extent.halves is None:
            return self.differs
        first, self._rest = extent.halves
        self._ask(rank, first)
        return None
