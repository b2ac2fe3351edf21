"""The laws that each correct transfer of a KV cache keeps. They judge your own connector.

How it works:
    A `System` is a set of functions that describe what a connector does in one `Case`: which rank
    reads which units, and which bytes are copied. A law compares the answers with what should
    happen, and yields one sentence for each difference. `broken` returns all laws that a system
    breaks in a case. `Law.check` raises `BrokenLawError` instead.

    The laws use an oracle, which counts units, tokens and bytes one by one. It shares no arithmetic
    with the library. So `KVSPEC`, the library itself, is only one system among others.

    Example: two tokens of two bytes move from block 0 to block 1. A system that copies only one
    token breaks law 1.

    >>> import kvspec
    >>> from kvspec.testing import Case, laws
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=2, producer_blocks={"g": [0]}, consumer_blocks={"g": [1]}
    ... )
    >>> case = Case(
    ...     producer=engine, consumer=engine, producer_pool={"g": 2}, consumer_pool={"g": 2},
    ...     request=request,
    ... )
    >>> laws.broken(laws.KVSPEC, case)
    []
    >>> def one_token(world, producer, consumer):
    ...     [source] = world.producers[producer][0].memory
    ...     [target] = world.consumers[consumer][0].memory
    ...     return [(source.address, target.address + 8, 2)]
    >>> system = laws.System(name="one token", descriptors=one_token)
    >>> broken = laws.broken(system, case)
    >>> [law for law, _ in broken]
    [law 1, exact cover, law 11, refusal, law 14, equality of meaning]
    >>> print(broken[0][1])
    descriptors: consumer tp0, group g, layer l, part latent, unit 0, token 1,
    block 1, byte 0: this byte must become 0x65, but it is 0x7a
    >>> broken.not_judged["law 7, counts"]
    'the system does not answer tells'

    `kvspec.testing.strategies` draws cases. This package works without Hypothesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import islice
from typing import Any

import attrs

from kvspec.testing.case import Case
from kvspec.testing.laws import (
    copies,
    long_runs,
    meaning,
    moves,
    prompt_names,
    refusal,
    steps,
    stored_pages,
    whole,
)
from kvspec.testing.laws.prompt_names import PromptPair
from kvspec.testing.laws.release import Script
from kvspec.testing.laws.stored_pages import StoredCase
from kvspec.testing.laws.system import KVSPEC, Move, NothingToJudgeError, System, Trial
from kvspec.testing.world import PreparedLists

__all__ = [
    "KVSPEC",
    "LAWS",
    "Move",
    "PreparedLists",
    "System",
    "broken",
]


Judged = Case | Script | PromptPair | StoredCase
"""The cases of all laws. Each law judges one of these classes."""


class BrokenLawError(AssertionError):
    """A system breaks a law. The message names the system, the law and the first difference."""


@attrs.frozen(repr=False)
class Law:
    """One law, with the functions that look for differences.

    Attributes:
        number: The number of the law. It never changes.
        name: A short name.
        sentence: What the law requires.
        asks: The questions of a system, of which it must answer one. Else the law is not judged.
        over: Functions that judge one case.
        between: Functions that compare two cases of one request with different engines.
        alters: Whether the law changes the case so that only a refusal is right.
        fully: Questions of which a system must answer one, or half of the law is not judged.
        of: The class of its cases.

    Laws 2 and 12 have no functions. Law 2 is about the other laws. Law 12 is about messages and
    time, which a case does not have: `release.play` judges it.

    >>> print(LAWS[4])
    law 5, identity
    """

    number: int
    name: str
    sentence: str
    asks: tuple[str, ...] = ()
    over: tuple[Callable[[Trial], Iterator[str]], ...] = ()
    between: tuple[Callable[[Trial, Trial], Iterator[str]], ...] = ()
    alters: bool = False
    fully: tuple[str, ...] = ()
    of: type[Judged] = Case

    def faults(self, system: System, case: Judged, other: Case | None = None) -> Iterator[str]:
        """Yield a sentence for each way in which *system* breaks this law.

        Args:
            system: The system to judge.
            case: The transfer, or what else the law judges.
            other: The same request with other engines. Without it, comparisons are skipped.
        """
        with suppress(NothingToJudgeError):
            yield from self.look(*_trials(system, case, other))

    def look(self, trial: Trial, other: Trial | None = None) -> Iterator[str]:
        """Yield the sentences of `faults` for a *trial*. Several laws can share one trial.

        Raises:
            NothingToJudgeError: If the case has nothing that the law could judge.
        """
        try:
            for judge in self.over:
                yield from judge(trial)
            if other is not None:
                for compare in self.between:
                    yield from compare(trial, other)
        # An answer without a meaning, such as an id that is not in any row, breaks the law too.
        except AssertionError as error:
            yield str(error)

    def check(self, system: System, case: Judged, other: Case | None = None) -> None:
        """Raise `BrokenLawError` with the first difference, if *system* breaks this law."""
        for fault in self.faults(system, case, other):
            raise BrokenLawError(f"{system.name} breaks {self}: {fault}")

    def __str__(self) -> str:
        return f"law {self.number}, {self.name}"

    # Short, because `broken` returns laws in a list, and printing it is the first thing one does.
    __repr__ = __str__


# The questions of each level, see `System`.
_MOVES = ("moves",)
_COPIES = ("descriptors", "prepared")
_WHOLE = ("connector",)

LAWS = (
    Law(
        1,
        "exact cover",
        "Each unit and token that a consumer rank owns is read once, from a rank that owns it. Each"
        " live, uncached byte of a request is written once, with its true value. No byte that must"
        " not change is written, no dead byte is written twice, and none is read from blocks that"
        " are not the request's. `verify` has the same definition.",
        (*_MOVES, *_COPIES, *_WHOLE),
        (moves.cover, copies.cover, whole.cover),
    ),
    Law(
        2,
        "target, not result",
        "A law checks all content that should arrive, not only the content that did arrive. A"
        " system that does nothing breaks it.",
    ),
    Law(
        3,
        "symmetry",
        "The consumers pull the same moves that the producers push. If no rank is a replica,"
        " swapping the engines swaps the moves.",
        _MOVES,
        (moves.symmetry,),
    ),
    Law(
        4,
        "two hops are one hop",
        "A transfer through a third engine delivers the same bytes as a direct transfer.",
        _COPIES,
        between=(copies.two_hops,),
    ),
    Law(
        5,
        "identity",
        "A move names the same units of the model at both ends.",
        _MOVES,
        (moves.identity,),
    ),
    Law(
        6,
        "fair",
        "Producer ranks with the same content have numbers of readers that differ by at most one."
        " Under `stripe`, the numbers of virtual blocks differ by at most one. Under `first`, only"
        " the first rank is read. Under `nearest`, a rank on the reader's node is read, if there is"
        " one.",
        _MOVES,
        (moves.fair,),
    ),
    Law(
        7,
        "counts",
        "Each producer rank receives a notification from at least one consumer rank, and from each"
        " one that reads it. Both sides count the same pairs.",
        ("tells",),
        (moves.counts,),
        fully=(*_MOVES, *_COPIES),
    ),
    Law(
        8,
        "maximal",
        "No two descriptors are adjacent on both sides. No id moves a block without a live byte. If"
        " one longer descriptor can replace several copies of whole contents, and moves less than"
        " 16 KiB of other live bytes and no dead byte, the ids pick it.",
        _COPIES,
        (long_runs.maximal, long_runs.minimal),
    ),
    Law(
        9,
        "layout invariance",
        "The delivered content does not depend on the layouts, blocks, stages, context ranks or"
        " shardings of either side.",
        _COPIES,
        between=(copies.invariance,),
    ),
    Law(
        10,
        "bounds",
        "Each copy, and each row from its first to its last byte, lies in one memory of its side.",
        (*_COPIES, *_WHOLE),
        (copies.bounds, whole.bounds),
    ),
    Law(
        11,
        "refusal",
        "A system refuses an impossible transfer before any byte moves. Its error names the wrong"
        " field or group.",
        (*_MOVES, *_COPIES, *_WHOLE),
        (refusal.refusal,),
        alters=True,
    ),
    Law(
        12,
        "release",
        "Each producer rank releases a request once, after its last reader. A request that is"
        " reported as ready was read completely, and was held until then.",
        ("release",),
        of=Script,
    ),
    Law(
        13,
        "steps",
        "For any schedule by layer and by token, the steps together move the whole request. No byte"
        " moves twice, and no byte moves before it was written.",
        ("steps",),
        (steps.steps,),
    ),
    Law(
        14,
        "equality of meaning",
        "If two engines have equal shapes and different meanings, a system refuses the transfer, or"
        " delivers each element where its meaning is. It never moves such bytes as they are.",
        (*_COPIES, *_WHOLE),
        (meaning.meaning,),
        alters=True,
    ),
    Law(
        15,
        "names of pages",
        "Two prompts that differ in one fact share no name of a page that depends on this fact."
        " Equal prompts have equal names. A longer prompt keeps the names of its prefix. The names"
        " of many pages differ in at least 64 bits.",
        ("names",),
        (prompt_names.names,),
        of=PromptPair,
    ),
    Law(
        16,
        "stored pages",
        "An engine that loads the pages that another engine has saved, step by step, has the same"
        " bytes as after a direct transfer. Only whole pages are found and loaded.",
        ("pages",),
        (stored_pages.pages,),
        of=StoredCase,
    ),
)
"""All laws, in the order of their numbers."""


class Broken(list[tuple[Law, str]]):
    """The laws that a system breaks, each with its first difference. `[]` if it breaks none.

    Attributes:
        not_judged: The laws that were not judged, or not completely, each with the reason.
    """

    def __init__(self, faults: Iterable[tuple[Law, str]], not_judged: Mapping[str, str]) -> None:
        super().__init__(faults)
        self.not_judged = dict(not_judged)


def unanswered(system: System, law: Law, *, pair: bool = True) -> str:
    """Return why *law* cannot be judged, or an empty text.

    Args:
        system: The system to judge.
        law: The law.
        pair: Whether there are two cases to compare.

    >>> unanswered(System(name="idle"), LAWS[6])
    'the system does not answer tells'
    """
    if not law.asks:
        return "it is about the other laws"
    if not system.answers(law.asks):
        return f"the system does not answer {' or '.join(law.asks)}"
    if not pair and not law.over:
        return "it compares two cases"
    return ""


def half_unanswered(system: System, law: Law) -> str:
    """Return why half of *law* cannot be judged, or an empty text.

    >>> half_unanswered(System(name="idle", tells=lambda *_: []), LAWS[6])
    'half of it: the system does not answer moves or descriptors or prepared'
    """
    if not law.fully or system.answers(law.fully):
        return ""
    return f"half of it: the system does not answer {' or '.join(law.fully)}"


def broken(
    system: System, case: Case, other: Case | None = None, of: Iterable[Law] = LAWS
) -> Broken:
    """Return the laws that *system* breaks in *case*.

    Args:
        system: The system to judge.
        case: The transfer.
        other: The same request with other engines. Without it, laws 4 and 9 are not judged.
        of: The laws to judge.

    Returns:
        Each broken law with its first difference, as a sentence. The attribute `not_judged` has
        the laws that are not judged, and why: no answer does not mean that a law holds.

    Raises:
        MismatchError: If the system refuses the case. It may raise one of its own *refuses* too.
    """
    # The laws share the trials, so memory is allocated and each question is asked only once.
    trials = _trials(system, case, other)
    silent: dict[str, str] = {}
    found: list[tuple[Law, str]] = []
    for law in of:
        nothing = "" if law.of is Case else f"it judges a {law.of.__name__}, not a Case"
        if reason := unanswered(system, law, pair=other is not None) or nothing:
            silent[str(law)] = reason
            continue
        if reason := half_unanswered(system, law):
            silent[str(law)] = reason
        try:
            found += [(law, fault) for fault in islice(law.look(*trials), 1)]
        except NothingToJudgeError as error:
            silent[str(law)] = str(error)
    return Broken(found, silent)


def _trials(system: System, *cases: Any) -> list[Trial]:  # noqa: ANN401 - of each law's class
    return [Trial(system, case) for case in cases if case is not None]
