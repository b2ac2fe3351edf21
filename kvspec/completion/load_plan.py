"""The plan of one load, and how far each of its sources has come.

Invariant: a frontier only grows. Data moves after it was written, and only once. The last frontier
is the end of the request.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import msgspec

from kvspec.errors import SpecError
from kvspec.ownership.parallel import RankId
from kvspec.wire.messages import Key

Place = tuple[str, str]
"""A group and a layer of it."""
EVERYTHING: Mapping[Place, int] = {("", ""): 1}
"""The ends of a source that is read as a whole. Only a load that follows counts each layer."""
Name = tuple[Key, int, int, str, int]
"""Name of a load in messages: key, attempt, sample, the producer's name and epoch."""


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
        sources: For each producer rank that is read, the end of each layer of each group, or
            `EVERYTHING`. Empty if nothing moves.
        attempt: As in `Message`.
        sample: As in `Message`.
        partial: Whether to read only written data. Else all data is written already.
        again: Whether another attempt follows if this one fails. Then a failure is not sent.
        name: Name of the load in messages.
    """

    request_id: str
    key: Key
    engine_id: str
    epoch: int
    expected: Mapping[RankId, int]
    sources: Mapping[RankId, Mapping[Place, int]] = attrs.field(factory=dict)
    attempt: int = 0
    sample: int = 0
    partial: bool = False
    again: bool = False
    name: Name = attrs.field(init=False)

    @name.default
    def _name(self) -> Name:
        return self.key, self.attempt, self.sample, self.engine_id, self.epoch


class Source(msgspec.Struct, eq=False):
    """The data of one producer rank, and how far it has moved.

    Attributes:
        ends: The end of each layer.
        written: Up to where the producer has written each layer.
        started: Up to where a step was started for each layer.
        missing: Number of tokens that have not arrived, over all layers.
        valid: Whether the producer answered, after the last byte, that it still held the request.
    """

    ends: Mapping[Place, int]
    written: dict[Place, int]
    started: dict[Place, int]
    missing: int
    valid: bool = False

    @staticmethod
    def of(ends: Mapping[Place, int], *, partial: bool) -> Source:
        """Return a source of which nothing has moved."""
        nothing = dict.fromkeys(ends, 0)
        return Source(ends, dict(nothing if partial else ends), nothing, sum(ends.values()))

    @property
    def sound(self) -> bool:
        """Whether everything has arrived, and was valid then."""
        return self.missing == 0 and self.valid

    def record(self, place: Place, upto: int) -> None:
        """Record how far the producer wrote. A frontier never goes back or beyond the end."""
        if place in self.written:
            self.written[place] = max(self.written[place], min(upto, self.ends[place]))

    def readable(self) -> dict[Place, range]:
        """Return the written positions of each layer for which no step was started."""
        return {
            place: range(self.started[place], upto)
            for place, upto in self.written.items()
            if upto > self.started[place]
        }

    def start(self, upto: Mapping[Place, int]) -> int:
        """Start a step that moves layers *upto* positions. Return its number of tokens.

        Raises:
            SpecError: If a layer does not move from this source, or would move twice or before it
                was written.
        """
        tokens = 0
        for place, end in upto.items():
            if place not in self.ends:
                raise SpecError("layers", place, "layers of a group that move from this source")
            least, most = self.started[place], self.written[place]
            if not least < end <= most:
                raise SpecError("upto", end, f"more than {least}, of {place}, and at most {most}")
            tokens += end - least
        # A new dict: an undone call must not have changed the old one.
        self.started = {**self.started, **upto}
        return tokens
