"""Decide when all ranks of an engine agree on one load.

Each rank of an engine has its own load of a request, in its own process. A scheduler collects what
the ranks report and passes it to a `RankAgreement`.

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
        self._reports: dict[RankT, _Report] = {}
        self._errors: dict[RankT, object] = {}  # In the order in which the ranks have failed.
        with contextlib.suppress(TypeError):  # No iterable, or a rank that cannot be hashed.
            self._reports = dict.fromkeys(ranks, _Report())
        if not self._reports:
            raise SpecError("ranks", ranks, "at least one rank, each one hashable")

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


def _union(some: Iterable[Mapping[str, set[int]]]) -> dict[str, set[int]]:
    blocks: dict[str, set[int]] = {}
    for found in some:
        for group, ids in found.items():
            blocks[group] = blocks.get(group, set()) | ids
    return blocks
