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

import contextlib
from collections.abc import Hashable, Iterable, Mapping
from typing import Generic, Literal, TypeVar, get_args

from kvspec.errors import SpecError
from kvspec.inputs import positive_int

RankT = TypeVar("RankT")
RankState = Literal["moving", "done", "failed"]


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
        # By rank: its newest start, its state, and its undefined blocks by group.
        self._reports: dict[RankT, tuple[int, RankState, dict[str, set[int]]]] = {}
        with contextlib.suppress(TypeError):  # No iterable, or a rank that cannot be hashed.
            self._reports = {rank: (0, "moving", {}) for rank in ranks}
        if not self._reports:
            raise SpecError("ranks", ranks, "at least one rank, each one hashable")

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
        if not isinstance(rank, Hashable) or rank not in self._reports:
            raise SpecError("rank", rank, f"one of the ranks {', '.join(map(str, self._reports))}")
        try:
            undefined = {group: set(ids) for group, ids in (undefined_blocks or {}).items()}
        except (AttributeError, TypeError) as error:
            wanted = "a mapping from groups to block ids"
            raise SpecError("undefined_blocks", undefined_blocks, wanted) from error
        newest, before, blocks = self._reports[rank]
        if start > newest:
            newest, before, blocks = start, "moving", dict[str, set[int]]()
        if start == newest:
            if state == "failed":
                for group, ids in undefined.items():
                    blocks.setdefault(group, set()).update(ids)
            final = before if before != "moving" and state != "failed" else state
            self._reports[rank] = newest, final, blocks

    @property
    def state(self) -> RankState:
        """The state of the request on the whole engine.

        "done": all ranks are done. "failed": a rank has failed, and no rank is moving any more, so
        that nothing can write the blocks. Otherwise "moving".
        """
        states = {state for _, state, _ in self._reports.values()}
        return "moving" if "moving" in states else "failed" if "failed" in states else "done"

    @property
    def to_cancel(self) -> tuple[RankT, ...]:
        """The ranks that have to cancel their loads, because another rank has failed."""
        states = {rank: state for rank, (_, state, _) in self._reports.items()}
        failed = "failed" in states.values()
        return tuple(rank for rank in states if failed and states[rank] == "moving")

    @property
    def undefined_blocks(self) -> dict[str, tuple[int, ...]]:
        """By group, the blocks whose contents are undefined on at least one rank, ascending."""
        blocks: dict[str, set[int]] = {}
        for _, _, found in self._reports.values():
            for group, ids in found.items():
                blocks.setdefault(group, set()).update(ids)
        return {group: tuple(sorted(ids)) for group, ids in sorted(blocks.items()) if ids}
