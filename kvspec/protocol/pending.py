"""One request that a consumer rank reads, as far as it has come.

Law: a source is sound when all of it arrived no later than it surely held the request; a step that
is open may still write.
"""

from __future__ import annotations

from typing import Any

import attrs

from kvspec.ownership.parallel import RankId
from kvspec.protocol.notices import Notice, Party
from kvspec.protocol.order import Frontiers, Name, ReadOrder


@attrs.define(eq=False)
class Source:
    """One source: its frontiers, when its last byte came, until when it surely held the request."""

    frontiers: Frontiers
    whole: float | None = None
    held: float = -1.0

    @property
    def sound(self) -> bool:
        """Whether all has arrived from it, and was valid then."""
        return self.whole is not None and self.whole <= self.held


@attrs.define(eq=False)
class Pending:
    """One request: its order, its sources, the steps that may still write, who has to answer.

    *asked*: when each notice that has no answer yet was sent, by rank and number.
    """

    order: ReadOrder
    deadline: float
    state: str = "moving"
    sources: dict[RankId, Source] = attrs.field(factory=dict)
    steps: set[int] = attrs.field(factory=set)
    asked: dict[RankId, dict[int, float]] = attrs.field(factory=dict)
    untold: set[RankId] = attrs.field(factory=set)
    next_tell: float = 0.0
    number: int = 0

    @property
    def due(self) -> float:
        """When time has something to do with it."""
        return min(self.deadline, self.next_tell)

    def notice(self, kind: str, by: Party, rank: RankId) -> Notice:
        """Return the next notice to a producer *rank*."""
        order = self.order
        return Notice(
            kind=kind,
            key=order.key,
            by=by,
            to=Party(order.engine_id, order.epoch, rank),
            attempt=order.attempt,
            number=self.number,
            sample=order.sample,
            expected=order.expected[rank],
        )


def name_of(answer: Notice) -> Name:
    """Return what a producer's notice names a request by."""
    return answer.key, answer.attempt, answer.sample, answer.by.engine_id, answer.by.epoch


def notice_of(name: Name, kind: str, by: Party, rank: RankId, **more: Any) -> Notice:  # noqa: ANN401
    """Return a reader's notice about the request of that *name*, to a producer *rank* of it."""
    key, attempt, sample, engine_id, epoch = name
    to = Party(engine_id, epoch, rank)
    return Notice(kind=kind, key=key, by=by, to=to, attempt=attempt, sample=sample, **more)
