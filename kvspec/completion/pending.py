"""The progress of one request that a consumer rank reads.

Invariant: a source is sound only after all its bytes arrived and its producer then answered
`valid`. An open step may still write.
"""

from __future__ import annotations

import attrs

from kvspec.completion.load_plan import Frontiers, LoadPlan, Name
from kvspec.ownership.parallel import RankId
from kvspec.wire.messages import (
    Gone,
    Key,
    LayerProgress,
    Lease,
    Message,
    RankAddress,
    ReaderStatus,
    Valid,
)


@attrs.define(eq=False)
class Source:
    """One source of a request.

    Attributes:
        frontiers: How far each layer has moved.
        whole: Whether the last byte has arrived.
        valid: Whether the producer answered, after that, that it still held the request.
    """

    frontiers: Frontiers
    whole: bool = False
    valid: bool = False

    @property
    def sound(self) -> bool:
        """Whether all has arrived from it, and was valid then."""
        return self.whole and self.valid


@attrs.define(eq=False)
class Pending:
    """One request: its order, its sources, the steps that may still write, who has to answer.

    *asked*: when each message that has no answer yet was sent, by rank and number.
    """

    plan: LoadPlan
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

    def copied(self) -> Pending:
        """Return a copy that later changes of this one do not reach."""
        sources = {
            rank: attrs.evolve(source, frontiers=source.frontiers.copied())
            for rank, source in self.sources.items()
        }
        asked = {rank: dict(questions) for rank, questions in self.asked.items()}
        steps, untold = set(self.steps), set(self.untold)
        return attrs.evolve(self, sources=sources, asked=asked, steps=steps, untold=untold)

    def ask(self, rank: RankId, now: float, patience: float) -> None:
        """Note when the next message is sent; forget those older than *patience* seconds."""
        asked = self.asked.setdefault(rank, {})
        for old in [n for n, at in asked.items() if at < now - patience]:
            del asked[old]
        asked[self.number] = now

    def message(self, kind: type[ReaderStatus], by: RankAddress, rank: RankId) -> ReaderStatus:
        """Return the next message to a producer *rank*."""
        plan = self.plan
        return kind(
            key=plan.key,
            by=by,
            to=RankAddress(plan.engine_id, plan.epoch, rank),
            attempt=plan.attempt,
            number=self.number,
            sample=plan.sample,
            expected=plan.expected[rank],
        )


def name_of(answer: Message) -> Name:
    """Return what a producer's message names a request by."""
    return answer.key, answer.attempt, answer.sample, answer.by.engine_id, answer.by.epoch


def about(
    name: Name, by: RankAddress, rank: RankId, number: int = 0
) -> tuple[Key, RankAddress, RankAddress, int, int, int]:
    """Return the fields of a reader's message about request *name*, to producer rank *rank*."""
    key, attempt, sample, engine_id, epoch = name
    return key, by, RankAddress(engine_id, epoch, rank), attempt, number, sample


def refusal_of(answer: Message, load: Pending | None, me: RankAddress) -> str | None:
    """Return why rank *me* does not expect *answer* about *load*, or None if it does."""
    if load is None or answer.to != me:
        return "it belongs to no open request of this rank"
    if answer.by.rank not in load.asked:
        return "its sender received no question"
    if isinstance(answer, LayerProgress):
        return None
    if not isinstance(answer, Lease | Valid | Gone):
        return "only producers receive this kind"
    if answer.number not in load.asked[answer.by.rank]:
        return "the answer is a repetition, or late"
    return None
