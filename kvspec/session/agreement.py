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
        "done" again                                      no effect
        "failed" again                                    adds its undefined blocks
        "failed" after "done", or the reverse             "failed" counts, to be safe
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Generic, Literal, TypeVar, get_args

from kvspec.errors import SpecError
from kvspec.inputs import positive_int

RankT = TypeVar("RankT")
RankState = Literal["moving", "done", "failed"]


class _Word:
    """The reports of the newest *start* of one rank."""

    def __init__(self, start: int) -> None:
        self.start = start
        self.state: RankState = "moving"
        self.blocks: dict[str, set[int]] = {}


class RankAgreement(Generic[RankT]):
    """The loads of one request on all ranks of an engine, as a scheduler sees them.

    It is pure: it has no clock, no thread and no connection. A rank that has reported nothing is
    "moving".

    Args:
        ranks: All ranks that load the request, such as `engine.parallel.ranks`, or numbers.

    Raises:
        SpecError: If there are no ranks.

    >>> ranks = RankAgreement(["tp0", "tp1", "tp2"])
    >>> ranks.report("tp0", "done")
    >>> ranks.report("tp1", "failed", undefined_blocks={"full": (4, 5)})
    >>> ranks.state, ranks.to_cancel
    ('moving', ('tp2',))
    >>> ranks.report("tp2", "failed", undefined_blocks={"full": (5, 6)})
    >>> ranks.state, ranks.undefined_blocks
    ('failed', {'full': (4, 5, 6)})
    """

    def __init__(self, ranks: Iterable[RankT]) -> None:
        self._words = {rank: _Word(0) for rank in ranks}
        if not self._words:
            raise SpecError("ranks", [], "at least one rank")

    def report(
        self,
        rank: RankT,
        state: RankState,
        *,
        start: int = 0,
        undefined_blocks: Mapping[str, Iterable[int]] | None = None,
    ) -> None:
        """Record what *rank* reports about its load.

        Args:
            rank: One of the ranks of this object.
            state: `Load.state`: "moving", "done" or "failed".
            start: A number that grows each time the process of the rank starts. If it has grown,
                the earlier reports of the rank no longer count: its memory is gone.
            undefined_blocks: `Load.undefined_blocks`, block ids by group.

        Raises:
            SpecError: If the engine does not have *rank*, *state* is unknown, or *start* is not an
                int >= 0.
        """
        if state not in get_args(RankState):
            raise SpecError("state", state, f"one of {', '.join(get_args(RankState))}")
        positive_int("start", start, least=0)
        word = self._words.get(rank)
        if word is None:
            raise SpecError("rank", rank, f"one of the ranks {', '.join(map(str, self._words))}")
        if start < word.start:
            return
        if start > word.start:
            word = self._words[rank] = _Word(start)
        if state == "failed":
            word.state = "failed"
            for group, ids in (undefined_blocks or {}).items():
                word.blocks.setdefault(group, set()).update(ids)
        elif word.state == "moving":
            word.state = state

    @property
    def state(self) -> RankState:
        """The state of the request on the whole engine.

        "done": all ranks are done. "failed": a rank has failed, and no rank is moving any more, so
        that nothing can write the blocks. Otherwise "moving".
        """
        states = {word.state for word in self._words.values()}
        return "moving" if "moving" in states else "failed" if "failed" in states else "done"

    @property
    def to_cancel(self) -> tuple[RankT, ...]:
        """The ranks that have to cancel their loads, because another rank has failed."""
        if all(word.state != "failed" for word in self._words.values()):
            return ()
        return tuple(rank for rank, word in self._words.items() if word.state == "moving")

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the blocks whose contents are undefined on at least one rank, ascending."""
        blocks: dict[str, set[int]] = {}
        for word in self._words.values():
            for group, ids in word.blocks.items():
                blocks.setdefault(group, set()).update(ids)
        return {group: tuple(sorted(ids)) for group, ids in sorted(blocks.items()) if ids}
