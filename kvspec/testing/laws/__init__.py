"""The laws of a transfer, each one sentence, over any system that answers what a transfer is.

`LAWS` is the table. A broken law says by which system and where: `broken` lists what a system
breaks of one case, `Law.check` raises. Cases are drawn by `kvspec.testing.strategies` or made by
hand; nothing here needs hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

import attrs

from kvspec.testing.laws import copies, long_runs, moves, refusal, steps
from kvspec.testing.laws.system import KVSPEC, Move, System, Trial
from kvspec.testing.world import PreparedLists

if TYPE_CHECKING:
    from kvspec.testing.case import Case

__all__ = [
    "KVSPEC",
    "LAWS",
    "Move",
    "PreparedLists",
    "System",
    "broken",
]


class BrokenLawError(AssertionError):
    """A law does not hold of a system: which one, and where."""


@attrs.frozen
class Law:
    """One law: its number, name and sentence, and the functions that look for its counter-examples.

    *over*: of a case alone; *between*: of two cases of one request, between other engines.
    """

    number: int
    name: str
    sentence: str
    over: tuple[Callable[[Trial], Iterator[str]], ...] = ()
    between: tuple[Callable[[Trial, Trial], Iterator[str]], ...] = ()

    def faults(self, system: System, case: Case, other: Case | None = None) -> Iterator[str]:
        """Yield in words what of *system* breaks this law; nothing: it holds.

        Without *other* nothing is asked that takes two cases.
        """
        return self.look(*_trials(system, case, other))

    def look(self, trial: Trial, other: Trial | None = None) -> Iterator[str]:
        """Yield the same of a *trial*, whose world and copies several laws can look at."""
        try:
            for judge in self.over:
                yield from judge(trial)
            if other is not None:
                for compare in self.between:
                    yield from compare(trial, other)
        except AssertionError as error:  # an answer that means nothing, such as ids of no row
            yield str(error)

    def check(self, system: System, case: Case, other: Case | None = None) -> None:
        """Raise `BrokenLawError` with the first counter-example."""
        for fault in self.faults(system, case, other):
            raise BrokenLawError(f"{system.name} breaks {self}: {fault}")

    def __str__(self) -> str:
        return f"law {self.number}, {self.name}"


LAWS = (
    Law(
        1,
        "exact cover",
        "Every unit and token that a consumer rank owns is read once, from a rank that owns it;"
        " every live, uncached byte of a request is written once, with its true value, and no byte"
        " that has to stay is.",
        (moves.cover, copies.cover),
    ),
    Law(
        2,
        "target, not result",
        "A law asks for everything that should be there, never only about what came: a system that"
        " does nothing breaks it.",
    ),
    Law(
        3,
        "symmetry",
        "What consumers would pull is what producers would push; where no rank is a replica,"
        " swapping the engines swaps what moves.",
        (moves.symmetry,),
    ),
    Law(
        4,
        "two hops are one hop",
        "Over any third engine that can hold them, the same bytes arrive.",
        between=(copies.two_hops,),
    ),
    Law(
        5,
        "identity",
        "A move names the same units of the model at both ends.",
        (moves.identity,),
    ),
    Law(
        6,
        "fair",
        "Of producer ranks that hold the same, the numbers of readers differ by at most one; under"
        " `stripe`, those of virtual blocks; under `first`, the first alone is read; under"
        " `nearest`, one on the reader's node, if there is one.",
        (moves.fair,),
    ),
    Law(
        7,
        "counts",
        "Every producer rank is told by at least one consumer rank and by all that read it, and"
        " both sides count the same pairs.",
        (moves.counts,),
    ),
    Law(
        8,
        "maximal",
        "No two descriptors touch on both sides; no ids move a block without a live byte, or as"
        " several what one longer row has with less than 16 KiB more.",
        (long_runs.maximal, long_runs.minimal),
    ),
    Law(
        9,
        "layout invariance",
        (
            "What arrives does not depend on either side's layouts, blocks, stages, contexts or "
            "shardings."
        ),
        between=(copies.invariance,),
    ),
    Law(
        10,
        "bounds",
        "Every copy, and every row from its first to its last, lies in one memory of its own side.",
        (copies.bounds,),
    ),
    Law(
        11,
        "refusal",
        "What cannot be moved is refused by the name of what is wrong, before a byte of it moves.",
        (refusal.of_models, refusal.of_requests),
    ),
    Law(
        12,
        "release",
        "Each producer rank releases a request once, after its last reader; what is called ready"
        " was read whole, and was held until then.",
    ),
    Law(
        13,
        "steps",
        "Over any schedule of frontiers, by layer and by token, the steps are the whole request,"
        " nothing twice, nothing before it was written.",
        (steps.steps,),
    ),
)
"""Every law, in the order of its number."""


def broken(
    system: System, case: Case, other: Case | None = None, of: Iterable[Law] = LAWS
) -> list[tuple[Law, str]]:
    """Return each law *of* those that *system* breaks of *case*, with its first counter-example."""
    trials = _trials(system, case, other)
    found = ((law, next(law.look(*trials), None)) for law in of)
    return [(law, fault) for law, fault in found if fault is not None]


def _trials(system: System, *cases: Case | None) -> list[Trial]:
    return [Trial(system, case) for case in cases if case is not None]
