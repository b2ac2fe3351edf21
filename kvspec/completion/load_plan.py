"""The plan of one load: the ranks, groups, layers and tokens that a consumer rank reads.

Invariant: for each source, group and layer, a frontier counts the tokens that have moved. It only
grows. Data moves after it was written, and only once. The last frontier is the end of the request.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import Frozen, flag, instance, mapping, positive_int
from kvspec.ownership.parallel import RankId
from kvspec.plan.plan import TransferPlan
from kvspec.wire.handshake import is_name
from kvspec.wire.messages import MAX_READERS, Key

Place = tuple[str, str]
"""A group and a layer of it."""
Name = tuple[Key, int, int, str, int]
"""What messages name a request by: key, attempt, sample, the producer's name and epoch."""


def _sources(value: object) -> Mapping[RankId, Mapping[Place, int]]:
    ranks = mapping("sources", value, "producer ranks to the ends of their layers")
    inner = "(group, layer) to the position behind the last token"
    return Frozen({rank: Frozen(mapping("sources", ends, inner)) for rank, ends in ranks.items()})


def _expected(value: object) -> Mapping[RankId, int]:
    return Frozen(mapping("expected", value, "producer ranks to their numbers of readers"))


@attrs.frozen(kw_only=True)
class LoadPlan:
    """One request that one consumer rank reads.

    Attributes:
        request_id: The consumer's own id.
        key: The producer's name of the request.
        engine_id: Name of the producer.
        epoch: Incarnation of the producer.
        expected: For each producer rank that receives messages, how many readers it must expect,
            all samples counted.
        sources: For each producer rank that is read, the end of each layer of each group. Empty if
            nothing moves.
        attempt: As in `Message`.
        sample: As in `Message`.
        partial: Whether to read only written data. Else all data is written already.
        again: Whether another attempt follows if this one fails. Then a failure is not sent.
    """

    request_id: str
    key: Key
    engine_id: str
    epoch: int
    expected: Mapping[RankId, int] = attrs.field(converter=_expected)
    sources: Mapping[RankId, Mapping[Place, int]] = attrs.field(factory=dict, converter=_sources)
    attempt: int = 0
    sample: int = 0
    partial: bool = False
    again: bool = False

    def __attrs_post_init__(self) -> None:
        is_name("request_id", self.request_id, 1024)
        instance("key", self.key, Key)
        is_name("engine_id", self.engine_id)
        for name in ("epoch", "attempt", "sample"):
            positive_int(name, getattr(self, name), least=0)
        flag("partial", self.partial)
        flag("again", self.again)
        for rank, count in self.expected.items():
            positive_int(f"expected[{instance('expected', rank, RankId)}]", count, most=MAX_READERS)
        for rank, ends in self.sources.items():
            if rank not in self.expected:
                raise SpecError("sources", str(rank), "ranks that are also in `expected`")
            for end in ends.values():
                positive_int(f"sources[{rank}]", end)

    @property
    def name(self) -> Name:
        """Name of the request in messages."""
        return self.key, self.attempt, self.sample, self.engine_id, self.epoch

    @staticmethod
    def of(
        plan: TransferPlan,
        rank: RankId,
        ends: Mapping[str, int],
        *,
        request_id: str,
        key: Key,
        engine_id: str,
        epoch: int,
        attempt: int = 0,
        sample: int = 0,
        samples: int = 1,
        partial: bool = False,
        again: bool = False,
    ) -> LoadPlan:
        """Return the load of consumer *rank* by *plan*.

        Args:
            plan: The transfer plan.
            rank: The consumer rank.
            ends: For each consumer group, the position behind the last token to move. A missing
                group or 0 moves nothing (a full hit, or a window inside the cached tokens).
            request_id: As in `LoadPlan`.
            key: As in `LoadPlan`.
            engine_id: As in `LoadPlan`.
            epoch: As in `LoadPlan`.
            attempt: As in `LoadPlan`.
            sample: As in `LoadPlan`.
            samples: Number of equal requests of the prompt.
            partial: As in `LoadPlan`.
            again: As in `LoadPlan`.

        Returns:
            The load.
        """
        sources: dict[RankId, dict[Place, int]] = {}
        for producer in plan.sources(rank):
            for edge in plan.between(producer, rank):
                end = ends.get(edge.group, 0)
                if end:
                    layers = {(edge.group, layer): end for layer in edge.layers}
                    sources.setdefault(producer, {}).update(layers)
        most = positive_int("samples", samples, most=MAX_READERS) - 1
        positive_int("sample", sample, least=0, most=most)
        told = plan.notifies(rank)
        expected = {producer: len(plan.notifiers(producer)) * samples for producer in told}
        return LoadPlan(
            request_id=request_id,
            key=key,
            engine_id=engine_id,
            epoch=epoch,
            expected=expected,
            sources=sources,
            attempt=attempt,
            sample=sample,
            partial=partial,
            again=again,
        )


class Frontiers:
    """How far one source's layers have been started, have arrived, and were written before that."""

    def __init__(self, ends: Mapping[Place, int], *, partial: bool) -> None:
        self._ends = ends
        self._started = dict.fromkeys(ends, 0)
        self._left = dict(ends)
        self._written = dict.fromkeys(ends, 0) if partial else dict(ends)

    def copied(self) -> Frontiers:
        """Return a copy that later changes of this one do not reach."""
        copied = copy.copy(self)
        for name in ("_started", "_left", "_written"):
            setattr(copied, name, dict(getattr(self, name)))
        return copied

    @property
    def whole(self) -> bool:
        """Whether everything has arrived."""
        return not any(self._left.values())

    def record(self, place: Place, upto: int) -> None:
        """Note how far the producer wrote; a frontier never goes back, nor beyond the end."""
        if place in self._written:
            self._written[place] = max(self._written[place], min(upto, self._ends[place]))

    def readable(self) -> dict[Place, int]:
        """Return how far each layer can be started beyond where it has been."""
        return {place: upto for place, upto in self._written.items() if upto > self._started[place]}

    def start(
        self, group: str, layers: Iterable[str] | None, upto: int | None
    ) -> dict[Place, range]:
        """Start *layers* of *group*, all unless given, up to a position, the end unless given.

        Return the places that move, each with its positions; raise `SpecError` where one would move
        twice, before it was written, or is none of this source's.
        """
        named = [place for place in self._ends if place[0] == group]
        places = named if layers is None else [(group, layer) for layer in layers]
        moved = {}
        for place in places:
            if place not in self._ends:
                raise SpecError("layers", place, "layers of the group that move from this source")
            end = self._ends[place] if upto is None else positive_int("upto", upto)
            if not self._started[place] < end <= self._written[place]:
                least, most = self._started[place], self._written[place]
                raise SpecError("upto", end, f"more than {least}, of {place}, and at most {most}")
            moved[place] = range(self._started[place], end)
        if not moved:
            raise SpecError("group", group, "a group that moves from this source")
        self._started.update({place: tokens.stop for place, tokens in moved.items()})
        return moved

    def finish(self, moved: Mapping[Place, range]) -> None:
        """Note what arrived; steps may end in any order."""
        for place, tokens in moved.items():
            self._left[place] -= len(tokens)
