"""What a request moves, counted: values that only hold numbers."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from kvspec.ownership.election import Role
from kvspec.ownership.parallel import RankId

Pair = tuple[RankId, RankId]
"""A producer's rank and a consumer's."""


@attrs.frozen
class Load:
    """Bytes, and the descriptors that move them."""

    nbytes: int
    descriptors: int

    @staticmethod
    def total(loads: Iterable[Load]) -> Load:
        """Return the sum of *loads*."""
        every = tuple(loads)
        return Load(sum(each.nbytes for each in every), sum(each.descriptors for each in every))

    def __str__(self) -> str:
        return f"{self.nbytes:,} bytes in {self.descriptors:,} descriptors"


@attrs.frozen
class Link:
    """One rank's own link to the other side, and what goes over it."""

    side: Role
    rank: RankId
    load: Load

    def __str__(self) -> str:
        return f"{self.side} {self.rank}: {self.load}"


@attrs.frozen(kw_only=True)
class Traffic:
    """What a request of *num_tokens* moves, nothing cached.

    *pairs*: by (producer, consumer), every pair that has an edge. *producers* and *consumers*: of
    every rank of each side, all that leaves or enters it.
    """

    num_tokens: int
    pairs: dict[Pair, Load]
    producers: dict[RankId, Load]
    consumers: dict[RankId, Load]

    @property
    def total(self) -> Load:
        """All of it."""
        return Load.total(self.pairs.values())

    @property
    def busiest(self) -> Link:
        """The link with most bytes; the producer's and the lower rank in a tie."""
        links = [Link("producer", *each) for each in self.producers.items()]
        links += [Link("consumer", *each) for each in self.consumers.items()]
        return max(links, key=lambda link: link.load.nbytes)

    def __str__(self) -> str:
        lines = [f"{self.num_tokens:,} tokens: {self.total}"]
        lines += [
            f"  {source} -> {target}: {load}" for (source, target), load in self.pairs.items()
        ]
        return "\n".join([*lines, f"busiest link: {self.busiest}"])
