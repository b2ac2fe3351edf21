"""Judge a system: draw cases on each axis, look for broken laws, and shrink what is broken.

How it works:
    For each axis, two passes:

    1. Draw cases. All laws judge each case together, so they share its memory and the answers of
       the system. Count for each law and value how many cases were exact, refused and wrong.
    2. For each law that was broken, draw the same cases again and let Hypothesis shrink the first
       wrong one. Most systems break few laws, so the second pass is rare.

    All draws come from one seed, so two runs give the same report.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any
from unittest import SkipTest

import attrs
from hypothesis import HealthCheck, Phase, Verbosity, given, seed, settings
from hypothesis import strategies as st
from hypothesis.errors import HypothesisException

from kvspec.errors import KVSpecError, SpecError
from kvspec.testing import strategies
from kvspec.testing.case import Case
from kvspec.testing.differing import prompt_pairs
from kvspec.testing.kinds import KINDS, kinds_of
from kvspec.testing.kit.axes import AXES, CLASSES, NAMED, PAGES, RELEASE, STEPS, Axis
from kvspec.testing.kit.code import reproduction
from kvspec.testing.kit.guard import FaultyAnswerError, Guard, NotAskedError, RefusedError, place_of
from kvspec.testing.kit.must_cases import moves_nothing, must_cases
from kvspec.testing.kit.system_report import Judgement, SystemReport, Verdict, WrongCase
from kvspec.testing.laws import LAWS, Judged, Law, half_unanswered, unanswered
from kvspec.testing.laws.prompt_names import PromptPair
from kvspec.testing.laws.release import Script, play
from kvspec.testing.laws.stored_pages import StoredCase
from kvspec.testing.laws.system import NothingToJudgeError, System, Trial
from kvspec.testing.pairs import sharing_kinds
from kvspec.testing.stored import STORABLE, stored_cases

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

    from kvspec.testing.supports import Supports

CasePair = "tuple[Case, Case | None]"
_FEW_STORED = 24  # Least number of `stored_of_each_kind`, for a system with few kinds.


@attrs.frozen
class Profile:
    """How much a run draws.

    Attributes:
        name: The name.
        examples: Cases of each axis.
        each: Cases of each kind on the axis "kinds".
        everything: Cases of the axis "everything".
        seconds: Time limit of each question.
        shrinking: Time limit of each shrink pass. 0: the first wrong case is reported as it is.
    """

    name: str
    examples: int
    each: int
    everything: int
    seconds: float
    shrinking: float


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("ci", 8, 3, 16, 20.0, 10.0),
        Profile("dev", 40, 15, 150, 20.0, 60.0),
        Profile("nightly", 400, 200, 4000, 60.0, 300.0),
    )
}


def axis_of(name: str | Axis) -> Axis:
    """Return the axis *name*, which may be an axis already."""
    found = [axis for axis in AXES if name in (axis, axis.name)]
    if not found:
        raise SpecError("axes", name, f"one of {', '.join(axis.name for axis in AXES)}")
    return found[0]


def profile_of(name: str | Profile) -> Profile:
    """Return the profile *name*, which may be a profile already."""
    if isinstance(name, Profile):
        return name
    if name not in PROFILES:
        raise SpecError("profile", name, f"one of {', '.join(PROFILES)}")
    return PROFILES[name]


def judge(
    system: System,
    *,
    profile: str | Profile = "ci",
    seed: int = 0,
    laws: Sequence[Law] | None = None,
    axes: Sequence[Axis | str] | None = None,
) -> SystemReport:
    """Judge *system* by all laws on all axes that it supports.

    Args:
        system: The system.
        profile: Name of a profile: "ci" (less than two minutes), "dev" or "nightly".
        seed: The seed of the drawn cases. The same seed draws the same cases, if the same modules
            are loaded: Hypothesis also draws constants of those.
        laws: The laws to judge by. All by default.
        axes: The axes to draw on, or their names. All by default.

    Returns:
        The report. The exceptions of the system are judgements, and none is raised.

    >>> from kvspec.testing.kit import Supports, System
    >>> idle = System(
    ...     name="idle", descriptors=lambda *_: [], supports=Supports.only(kinds=["full"])
    ... )
    >>> tiny = Profile("tiny", 1, 1, 3, 5.0, 5.0)
    >>> report = judge(idle, axes=["everything"], laws=LAWS[:1], profile=tiny)
    >>> report.wrong[0].wrong_case.fault.partition(": ")[2][:20]
    'consumer tp0, group '
    """
    began = time.monotonic()
    profile = profile_of(profile)
    laws = LAWS if laws is None else laws
    judgements = list(not_judged(system, laws))
    guard = Guard(system, profile.seconds)
    for axis in map(axis_of, AXES if axes is None else axes):
        judgements += judge_axis(guard, axis, profile, seed=seed, laws=laws)
    return SystemReport(
        system=system.name,
        version=system.version,
        profile=profile.name,
        seed=seed,
        seconds=time.monotonic() - began,
        judgements=tuple(judgements),
        supports=system.supports,
    )


def not_judged(system: System, laws: Iterable[Law]) -> Iterator[Judgement]:
    """Yield a judgement for each law of which *system* leaves all or half without an answer."""
    for law in laws:
        if reason := unanswered(system, law) or half_unanswered(system, law):
            yield Judgement(law=law, axis="", value="", words=reason)


def supported_axes(system: System, axes: Iterable[Axis] = AXES) -> list[Axis]:
    """Return the axes on which the system supports more than the simplest transfer."""
    kinds = kinds_of(system.supports)
    silent = {axis for axis in (RELEASE, STEPS, NAMED, PAGES) if getattr(system, axis) is None}
    return [
        axis for axis in axes if axis.name not in silent and axis.narrowed(system.supports, kinds)
    ]


def judge_axis(
    guard: Guard, axis: Axis, profile: Profile, *, seed: int = 0, laws: Sequence[Law] = LAWS
) -> list[Judgement]:
    """Return the judgements of all *laws* on one axis. Empty if the system does not support it."""
    system = guard.system
    if axis not in supported_axes(system, [axis]):
        return []
    laws = [law for law in laws if not unanswered(system, law) and axes_of(law, [axis])]
    if not laws:
        return []
    examples = _examples(axis, profile)
    judgements: list[Judgement] = []
    for narrow in axis.narrowed(system.supports, kinds_of(system.supports)):
        draws = _pairs(system, laws, narrow)
        tally = _Tally()
        drawn = _drawn(draws, examples, seed)
        if axis.name == PAGES:
            drawn = [*stored_of_each_kind(narrow, profile, seed), *drawn]
        for some, pair in judged_cases(axis, narrow, laws, drawn):
            tally.add(axis, pair, look(guard, some, *pair), stuck=bool(guard.stuck))
        for law in laws:
            found = tally.wrong.get(law.number)
            # A case without an answer does not shrink, since each try would take as long.
            if found is not None and law.number not in tally.stuck:
                if profile.shrinking:
                    found = smallest(guard, law, draws, examples, seed, profile.shrinking) or found
                found = _shortest(guard, law, *found)
            example = None if found is None else _wrong_case(guard, law, *found)
            judgements += tally.judgements(law, axis, example)
            judgements += tally.not_drawn(law, axis)
    return judgements


def judged_cases(
    axis: Axis, narrow: Supports, laws: Sequence[Law], drawn: Sequence[Any]
) -> Iterator[tuple[list[Law], tuple[Any, Any]]]:
    """Yield the laws and the cases that a run judges: those that are listed, then the *drawn* ones.

    No listed case has another one to compare it with. A law that alters a case asks many questions,
    and its faults do not depend on the class of the case.
    """
    alone = [law for law in laws if not law.between and not law.alters]
    listed: Iterable[Any] = must_cases(axis.name, narrow) if alone else ()
    if axis.name == NAMED:
        listed = prompt_pairs(placements=narrow.placements)
    for case in listed:
        yield alone, (case, None)
    for pair in drawn:
        yield list(laws), pair


def _examples(axis: Axis, profile: Profile) -> int:
    """Return how many cases or scripts of each draw of *axis* are judged."""
    drawn = {"kinds": profile.each, "everything": profile.everything, RELEASE: 100 * profile.each}
    # Only law 13 judges these small cases, and there are several ways to cut a request.
    drawn[STEPS] = 2 * profile.examples
    # All pairs of prompts are listed, and `stored_of_each_kind` has more stored cases.
    drawn |= {NAMED: 1, PAGES: 4 * profile.examples}
    return drawn.get(axis.name, profile.examples)


def _wrong_case(guard: Guard, law: Law, pair: Any, fault: str) -> WrongCase:  # noqa: ANN401
    case, other = pair if law.between else (pair[0], None)
    # Without a guard, the code would hang, end, or pass if both calls happen to be right.
    seconds = guard.seconds if any(words in fault for words in guard.found) else None
    code = reproduction(guard.system, law, case, other, seconds=seconds)
    return WrongCase(fault=fault, case=case, other=other, code=code)


def _pairs(system: System, laws: Sequence[Law], narrow: Supports) -> SearchStrategy[Any]:
    """Return a strategy of pairs of cases. The second one is None if no law compares two."""
    special: dict[Any, Callable[[], SearchStrategy[Any]]] = {
        Script: lambda: strategies.scripts(narrow),
        PromptPair: lambda: st.sampled_from([*prompt_pairs(placements=narrow.placements)]),
        StoredCase: lambda: stored_cases(supports=narrow),
    }
    if all(law.of in special for law in laws):
        return special[laws[0].of]().map(lambda case: (case, None))
    if any(law.between for law in laws) and system.answers(("descriptors", "prepared")):
        return strategies.twins(supports=narrow)
    cases = strategies.cases(supports=narrow)
    if sharing_kinds(tuple(KINDS), narrow):
        cases = cases | cases | strategies.sharing_cases(supports=narrow)
    return cases.map(lambda case: (case, None))


def _settings(examples: int, phases: Sequence[Phase]) -> settings:
    return settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=phases,
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
    )


def axes_of(law: Law, axes: Iterable[Axis]) -> list[Axis]:
    """Return the axes on which *law* is judged."""
    own = {Script: RELEASE, PromptPair: NAMED, StoredCase: PAGES}
    if law.of in own:
        return [axis for axis in axes if axis.name == own[law.of]]
    others = {*own.values(), *(() if "steps" in law.asks else (STEPS,))}
    return [axis for axis in axes if axis.name not in others]


class BrokenCaseError(AssertionError):
    """The system breaks a law in a case of a test of `law_test`."""

    def __init__(self, pair: Any, fault: str) -> None:  # noqa: ANN401
        super().__init__(fault)
        self.pair = pair
        self.fault = fault


def law_test(
    system: System, law: Law, axis: Axis, profile: Profile, phases: Sequence[Phase] = tuple(Phase)
) -> Callable[[], None]:
    """Return a test of Hypothesis that raises if *law* is broken on *axis*. HypoFuzz needs it.

    Raises:
        BrokenCaseError: When the test is called, if the law is broken.
    """
    guard = Guard(system, profile.seconds)
    kinds = kinds_of(system.supports)
    draws = [_pairs(system, [law], narrow) for narrow in axis.narrowed(system.supports, kinds)]

    # HypoFuzz skips a test that suppresses the check for nested tests.
    suppressed = [check for check in HealthCheck if check is not HealthCheck.nested_given]

    @settings(deadline=None, suppress_health_check=suppressed, phases=phases)
    @given(st.one_of(draws))
    def keeps_law(pair: Any) -> None:  # noqa: ANN401
        verdict, fault = look(guard, [law], *pair)[law.number]
        if verdict is Verdict.WRONG:
            raise BrokenCaseError(pair, fault)

    return keeps_law


def replayed(system: System, law: Law, axis: Axis, profile: Profile, test: str) -> Judgement | None:
    """Return the judgement of a case in which HypoFuzz has seen *system* break *law*.

    HypoFuzz stores such a case in the database of Hypothesis, under the name of the *test*.

    Returns:
        The judgement, or None if HypoFuzz has stored no case, or the system keeps the law now.
    """
    again: Any = law_test(system, law, axis, profile, [Phase.reuse])
    # The plug-in of Hypothesis does the same for a test that pytest runs.
    again.hypothesis.inner_test._hypothesis_internal_add_digest = test.encode()  # noqa: SLF001
    try:
        again()
    except BrokenCaseError as error:
        guard = Guard(system, profile.seconds)
        found = _wrong_case(guard, law, error.pair, error.fault)
        value = next(iter(axis.values(error.pair[0])))
        return Judgement(law=law, axis=axis.name, value=value, wrong=1, wrong_case=found)
    # Nothing is stored, or a case of another version that cannot be drawn any more.
    except (SkipTest, HypothesisException):
        return None
    return None


def _drawn(draws: SearchStrategy[Any], examples: int, number: int) -> list[Any]:
    """Return the *examples* cases that the seed *number* draws."""
    pairs: list[Any] = []

    @seed(number)
    @_settings(examples, [Phase.generate])
    @given(draws)
    def collect(pair: Any) -> None:  # noqa: ANN401
        pairs.append(pair)

    collect()
    return pairs


def stored_of_each_kind(narrow: Supports, profile: Profile, number: int) -> list[tuple[Any, None]]:
    """Return different stored cases, some of each kind of layers.

    Most cases of one long draw of Hypothesis are small changes of a few others. So each case here
    is the first random one of a draw of its own.
    """
    kinds = narrow.kinds or STORABLE
    each = max(profile.each, _FEW_STORED // len(kinds))
    pairs: list[tuple[Any, None]] = []
    for at, kind in enumerate(kinds):
        draws = stored_cases(kinds=[kind], supports=attrs.evolve(narrow, kinds=(kind,)))
        for place in range(each):
            # The first case of a draw is always the simplest one.
            *_, case = _drawn(draws, 2, 1000 * number + each * at + place)
            pairs.append((case, None))
    return pairs


def look(
    guard: Guard, laws: Iterable[Law], case: Judged, other: Case | None = None
) -> dict[int, tuple[Verdict, str]]:
    """Return the verdict and the words for each law in one case, by the number of the law.

    Each law judges a case of its own class, `Law.of`.
    """
    system = guard.guarded()
    guard.stuck.clear()
    judges: dict[int, Callable[[], object]] = {}
    if isinstance(case, Script):
        # The time limit is for the whole script.
        judged = partial(guard.ask, "release", play, guard.system.release, case)
        judges = {law.number: judged for law in laws}
    else:
        both: list[Any] = [each for each in (case, other) if each is not None]
        trials = [Trial(system, each) for each in both]
        judges = {law.number: partial(_first, law, trials) for law in laws}
    if isinstance(case, StoredCase):
        stored: Any = case
        whole = [Trial(guard.system, stored)]
        judges = {law.number: partial(guard.ask, "pages", _first, law, whole) for law in laws}
    verdicts: dict[int, tuple[Verdict, str]] = {}
    # If nothing moves, a law holds for any answer. So it proves nothing.
    idle = isinstance(case, Case) and moves_nothing(case)
    for number, first_fault in judges.items():
        guard.raised = None
        try:
            fault = first_fault()
        except (NotAskedError, NothingToJudgeError) as error:
            verdicts[number] = Verdict.NOT_JUDGED, str(error)
        except RefusedError as error:
            verdicts[number] = Verdict.REFUSED, str(error)
        except FaultyAnswerError as error:
            verdicts[number] = Verdict.WRONG, str(error)
        except (KVSpecError, ValueError) as error:
            # An error that the system did not raise is a fault of the kit.
            if error is not guard.raised:
                raise
            words = (
                f"raised {type(error).__name__}{place_of(error)}, which is not a refusal: {error}"
            )
            verdicts[number] = Verdict.WRONG, words
        else:
            right = Verdict.NOT_JUDGED if idle else Verdict.EXACT
            words = "no token moves in this case" if idle else ""
            verdicts[number] = (right, words) if fault is None else (Verdict.WRONG, str(fault))
    return verdicts


def _first(law: Law, trials: Sequence[Trial]) -> str | None:
    return next(law.look(*trials), None)


def smallest(
    guard: Guard,
    law: Law,
    draws: SearchStrategy[Any],
    examples: int,
    number: int,
    seconds: float,
) -> tuple[Any, str] | None:
    """Return the smallest cases that break *law*, as far as *seconds* suffice, and the fault."""
    found: list[tuple[Any, str]] = []
    until = float("inf")

    @seed(number)
    @_settings(examples, [Phase.generate, Phase.shrink])
    @given(draws)
    def check(pair: Any) -> None:  # noqa: ANN401
        nonlocal until
        if time.monotonic() > until:
            return
        verdict, fault = look(guard, [law], *pair)[law.number]
        if verdict is Verdict.WRONG:
            if not found:
                until = time.monotonic() + seconds
            found.append((pair, fault))
            raise AssertionError(fault)

    # Hypothesis reports a fault that it does not see again as flaky. It was seen once.
    with suppress(AssertionError, HypothesisException):
        check()
    return found[-1] if found else None


def _shortest(guard: Guard, law: Law, pair: Any, fault: str) -> tuple[Any, str]:  # noqa: ANN401
    """Return a broken script without the steps that it does not need. Cases are unchanged.

    Hypothesis keeps the number of steps, which `strategies.scripts` draws.
    """
    if not isinstance(pair[0], Script):
        return pair, fault
    steps = pair[0].steps
    for at in reversed(range(len(steps))):
        fewer = (*steps[:at], *steps[at + 1 :])
        verdict, words = look(guard, [law], Script(fewer))[law.number]
        if verdict is Verdict.WRONG:
            steps, fault = fewer, words
    return (Script(steps), None), fault


@attrs.define
class _Tally:
    """Counts the verdicts of one axis."""

    counts: dict[tuple[int, str], Counter[Verdict]] = attrs.field(factory=dict)
    words: dict[tuple[int, str, Verdict], str] = attrs.field(factory=dict)
    wrong: dict[int, tuple[Any, str]] = attrs.field(factory=dict)
    stuck: set[int] = attrs.field(factory=set)

    def add(
        self,
        axis: Axis,
        pair: tuple[Any, Any],
        verdicts: Mapping[int, tuple[Verdict, str]],
        *,
        stuck: bool,
    ) -> None:
        """Count the verdicts of one draw for each value that its case has on *axis*."""
        for number, (verdict, words) in verdicts.items():
            if verdict is Verdict.WRONG and number not in self.wrong:
                self.wrong[number] = pair, words
                self.stuck |= {number} if stuck else set()
        for value in dict.fromkeys(axis.values(pair[0])):
            for number, (verdict, words) in verdicts.items():
                self.counts.setdefault((number, value), Counter())[verdict] += 1
                self.words.setdefault((number, value, verdict), words)

    def not_drawn(self, law: Law, axis: Axis) -> Iterator[Judgement]:
        """Yield a judgement for each class of TP sizes of which no case was judged."""
        if axis.name != "tp":
            return
        drawn = {value for number, value in self.counts if number == law.number}
        for value in CLASSES:
            if value not in drawn:
                yield Judgement(law=law, axis=axis.name, value=value, words="not drawn")

    def judgements(self, law: Law, axis: Axis, found: WrongCase | None) -> Iterator[Judgement]:
        """Yield the judgement of *law* for each value."""
        for (number, value), count in sorted(self.counts.items()):
            if number == law.number:
                judgement = Judgement(
                    law=law,
                    axis=axis.name,
                    value=value,
                    exact=count[Verdict.EXACT],
                    refused=count[Verdict.REFUSED],
                    wrong=count[Verdict.WRONG],
                    wrong_case=found if count[Verdict.WRONG] else None,
                )
                told = Verdict.REFUSED if judgement.refused else judgement.verdict
                words = self.words.get((number, value, told), "")
                yield attrs.evolve(judgement, words="" if told is Verdict.WRONG else words)
