"""Decide when all ranks of an engine agree on one load, or on freeing the blocks of a request.

Each rank of an engine has its own load of a request, in its own process. A scheduler collects what
the ranks report and passes it to a `RankAgreement`. Likewise, each rank of a producer settles a
request on its own, and a `ReleaseAgreement` returns the requests that all ranks have settled.

Invariant: the result depends only on the reports of the newest start of each rank, and not on their
order. It is "done" only if every rank is done.

How it works:
    For one start of a rank, "done" and "failed" are final:

        report                                            effect
        ------------------------------------------------  ------------------------------------------
        of an older start of the rank                     ignored
        of a newer start of the rank                      replaces all earlier reports of the rank
        "moving" after "done" or "failed"                 ignored: it is late
        "done" or "failed" again                          adds its written blocks
        "failed" after "done", or the reverse             "failed" counts, to be safe
"""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, Literal, NamedTuple, TypeVar, get_args

from kvspec.errors import SpecError
from kvspec.inputs import positive_int

RankT = TypeVar("RankT")
RankState = Literal["moving", "done", "failed"]


class _Report(NamedTuple):
    """The newest start of a rank, its state, and the blocks that it has written, by group."""

    start: int = 0
    state: RankState = "moving"
    blocks: Mapping[str, set[int]] = {}


class RankAgreement(Generic[RankT]):
    """The loads of one request on all ranks of an engine, as a scheduler sees them.

    It is pure: it has no clock, no thread and no connection. A rank that has reported nothing is
    "moving".

    Args:
        ranks: All ranks that load the request, such as `engine.parallel.ranks`, or numbers.

    Raises:
        SpecError: If there are no ranks.

    >>> ranks = RankAgreement(["tp0", "tp1", "tp2"])
    >>> ranks.report("tp0", "done", written_blocks={"full": (4, 5)})
    >>> ranks.report("tp1", "failed", error="the process of tp1 has ended")
    >>> ranks.state, ranks.to_cancel
    ('moving', ('tp2',))
    >>> ranks.report("tp2", "failed", written_blocks={"full": (5, 6)}, error="cancelled")
    >>> ranks.state, ranks.undefined_blocks, ranks.error
    ('failed', {'full': (4, 5, 6)}, 'the process of tp1 has ended')
    """

    def __init__(self, ranks: Iterable[RankT]) -> None:
        self._reports = dict.fromkeys(_ranks_of(ranks), _Report())
        self._errors: dict[RankT, object] = {}  # In the order in which the ranks have failed.

    def report(
        self,
        rank: RankT,
        state: RankState,
        *,
        start: int = 0,
        written_blocks: Mapping[str, Iterable[int]] | None = None,
        error: object = None,
    ) -> None:
        """Record what *rank* reports about its load.

        Args:
            rank: One of the ranks of this object.
            state: `Load.state`: "moving", "done" or "failed".
            start: A number that grows each time the process of the rank starts. If it has grown,
                the earlier reports of the rank no longer count: its memory is gone.
            written_blocks: `Load.written_blocks`, block ids by group.
            error: `Load.error`, or its text.

        Raises:
            SpecError: If the engine does not have *rank*, *state* is unknown, or *start* is not an
                int >= 0.
        """
        if state not in get_args(RankState):
            raise SpecError("state", state, f"one of {', '.join(get_args(RankState))}")
        positive_int("start", start, least=0)
        if not isinstance(rank, Hashable) or rank not in self._reports:
            raise SpecError("rank", rank, f"one of the ranks {', '.join(map(str, self._reports))}")
        try:
            written = {group: {*ids} for group, ids in (written_blocks or {}).items()}
        except (AttributeError, TypeError) as cause:
            wanted = "a mapping from groups to block ids"
            raise SpecError("written_blocks", written_blocks, wanted) from cause
        known = self._reports[rank]
        if start > known.start:
            known = self._reports[rank] = _Report(start)
            self._errors.pop(rank, None)
        if start == known.start and state != "moving":
            final: RankState = "failed" if "failed" in (state, known.state) else "done"
            self._reports[rank] = _Report(start, final, _union((known.blocks, written)))
            if state == "failed":
                self._errors.setdefault(rank, error)

    @property
    def state(self) -> RankState:
        """The state of the request on the whole engine.

        "done": all ranks are done. "failed": a rank has failed, and no rank is moving any more, so
        that nothing can write the blocks. Otherwise "moving".
        """
        states = {report.state for report in self._reports.values()}
        return "moving" if "moving" in states else "failed" if self._errors else "done"

    @property
    def to_cancel(self) -> tuple[RankT, ...]:
        """The ranks that have to cancel their loads, because another rank has failed."""
        moving = (rank for rank, report in self._reports.items() if report.state == "moving")
        return tuple(moving) if self._errors else ()

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the blocks of a failed request that a rank may have written, ascending.

        A rank that is done counts too: its bytes are right, and those of other ranks are missing.
        """
        blocks = _union(report.blocks for report in self._reports.values() if self._errors)
        return {group: tuple(sorted(ids)) for group, ids in sorted(blocks.items()) if ids}

    @property
    def error(self) -> object:
        """The error that the first failed rank reported, or None.

        Other ranks often fail later, because they were cancelled for that reason.
        """
        return next(iter(self._errors.values()), None)


class ReleaseAgreement(Generic[RankT]):
    """The requests that all ranks of a producer hold, as a scheduler sees them.

    Blocks that have the same ids on all ranks are free when all ranks have settled the request. It
    is pure: it has no clock, no thread and no connection.

    Args:
        ranks: All ranks that hold the requests, such as `engine.parallel.ranks`, or numbers.

    Raises:
        SpecError: If there are no ranks.

    >>> ranks = ReleaseAgreement(["tp0", "tp1"])
    >>> ranks.hold("r-1")
    >>> ranks.report("tp0", ["r-1"]), ranks.report("tp0", ["r-1"])
    ((), ())
    >>> ranks.report("tp1", ["r-1"]), ranks.held
    (('r-1',), ())
    """

    def __init__(self, ranks: Iterable[RankT]) -> None:
        self._ranks = _ranks_of(ranks)
        self._holding: dict[str, set[RankT]] = {}

    @property
    def held(self) -> tuple[str, ...]:
        """The requests that a rank has not settled, the oldest first."""
        return tuple(self._holding)

    def hold(self, remote_id: str) -> None:
        """Record that all ranks hold a request. Call it before the first rank can settle it.

        Raises:
            SpecError: If the request is held already.
        """
        if remote_id in self._holding:
            raise SpecError("remote_id", remote_id, "a request that is not held yet")
        self._holding[remote_id] = {*self._ranks}

    def report(self, rank: RankT, freed: Iterable[str]) -> tuple[str, ...]:
        """Return the requests whose blocks are free on all ranks now.

        Args:
            rank: One of the ranks of this object.
            freed: `Session.settled().freed` of the rank. Repeated names change nothing.

        Raises:
            SpecError: If the engine does not have *rank*.
        """
        self._check(rank)
        return self._released(rank, [name for name in freed if name in self._holding])

    def restart(self, rank: RankT) -> tuple[str, ...]:
        """Return the requests that are free because the process of *rank* has ended.

        Its memory is gone, so it settles none of the requests that it held. Call it before the new
        process holds any.

        Raises:
            SpecError: If the engine does not have *rank*.
        """
        self._check(rank)
        return self._released(rank, self.held)

    def _check(self, rank: RankT) -> None:
        if not isinstance(rank, Hashable) or rank not in self._ranks:
            raise SpecError("rank", rank, f"one of the ranks {', '.join(map(str, self._ranks))}")

    def _released(self, rank: RankT, names: Iterable[str]) -> tuple[str, ...]:
        for name in names:
            self._holding[name].discard(rank)
        free = tuple(name for name in dict.fromkeys(names) if not self._holding[name])
        for name in free:
            del self._holding[name]
        return free


def _ranks_of(ranks: Iterable[RankT]) -> tuple[RankT, ...]:
    """Return the ranks of an engine, each once. Raises `SpecError` if there are none."""
    with contextlib.suppress(TypeError):  # No iterable, or a rank that cannot be hashed.
        if found := tuple(dict.fromkeys(ranks)):
            return found
    raise SpecError("ranks", ranks, "at least one rank, each one hashable")


def _union(some: Iterable[Mapping[str, set[int]]]) -> dict[str, set[int]]:
    blocks: dict[str, set[int]] = {}
    for found in some:
        for group, ids in found.items():
            blocks[group] = blocks.get(group, set()) | ids
    return blocks
