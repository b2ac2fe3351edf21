"""The plug-in of pytest that judges one system. `pytest_kvspec` registers it.

How it works:
    There is one test for each law and axis, such as ``exact_cover[blocks]``. The first test of an
    axis judges all laws on it, and the others of this axis only look up their result. So the laws
    share the cases, their memory and the answers of the system.

        judgements of the law    the test
        wrong in some case       fails, with the smallest case
        refused in all cases     is skipped, with the words of the system
        exact in some case       passes

    Each test also has a function of Hypothesis, so that HypoFuzz can fuzz it. A wrong case that
    HypoFuzz has stored is judged again each time, until the system is right.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from kvspec.draw import plan_svg
from kvspec.errors import KVSpecError
from kvspec.testing.kit import judging
from kvspec.testing.kit.axes import Axis
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.system_report import Counterexample, Judgement, SystemReport, Verdict
from kvspec.testing.kit.words import described
from kvspec.testing.laws import LAWS, Law, System, unanswered
from kvspec.testing.laws.release import Script
from kvspec.testing.world import plan_of

if TYPE_CHECKING:
    from _pytest._io import TerminalWriter


def load(where: str) -> System:
    """Return the system at *where*, which is "module:NAME".

    Raises:
        pytest.UsageError: If there is no such system.
    """
    module, _, name = where.partition(":")
    # The current folder is where an author runs pytest, but pytest does not add it to the path.
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        system = getattr(import_module(module), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise pytest.UsageError(f"--kvspec {where}: expected MODULE:NAME ({error})") from error
    if not isinstance(system, System):
        raise pytest.UsageError(f"--kvspec {where}: expected a kvspec.testing.kit.System")
    return attrs.evolve(system, where=where)


def title(law: Law) -> str:
    """Return the name of *law* as part of a test's name.

    >>> title(LAWS[0])
    'exact_cover'
    """
    return re.sub(r"\W+", "_", law.name)


@attrs.frozen
class KnownFailure:
    """A line of the file of expected failures."""

    place: str
    words: str


class BrokenLaw(Exception):  # noqa: N818 - it is the result of a test
    """A law that the system breaks, with the smallest case."""

    def __init__(self, judgement: Judgement) -> None:
        super().__init__(str(judgement.law))
        self.judgement = judgement


class Explanation(TerminalRepr):
    """The text of a failure, of which the summary of pytest shows only the first difference."""

    def __init__(self, text: str, path: Path, fault: str) -> None:
        self.text = text
        self.reprcrash = ReprFileLocation(str(path), 0, fault)

    def toterminal(self, tw: TerminalWriter) -> None:
        """Write all lines."""
        tw.line(self.text)


class SystemNode(pytest.Collector):
    """The system: the parent of all its tests."""

    def collect(self) -> list[pytest.Item]:
        """Return nothing, because `Judging` makes the tests."""
        return []


class LawTest(pytest.Function):
    """One law on one axis."""

    judging: Judging
    law: Law
    axis: Axis | None
    expected: KnownFailure | None = None

    def setup(self) -> None:
        """Do nothing: there are no fixtures."""

    def runtest(self) -> None:
        """Judge the law, or look up its judgement."""
        if self.axis is None:
            pytest.skip(f"not judged: {unanswered(self.judging.system, self.law)}")
        found = self.judging.judgements(self.law, self.axis, self.nodeid)
        wrong = [judgement for judgement in found if judgement.verdict is Verdict.WRONG]
        if wrong and self.expected is not None:
            pytest.xfail(self.expected.words or wrong[0].verdict)
        if wrong:
            raise BrokenLaw(wrong[0])
        if self.expected is not None:
            pytest.fail(f"{self.expected.place}: this no longer fails, so delete the line", False)  # noqa: FBT003
        if not any(judgement.exact for judgement in found):
            refused = any(judgement.refused for judgement in found)
            words = next((j.words for j in found if j.words), "no case")
            pytest.skip(f"{Verdict.REFUSED if refused else Verdict.NOT_JUDGED}: {words}")

    def repr_failure(  # type: ignore[override]
        self, excinfo: pytest.ExceptionInfo[BaseException]
    ) -> str | TerminalRepr:
        """Return the smallest case as a table, a picture and code."""
        if isinstance(excinfo.value, BrokenLaw):
            judgement = excinfo.value.judgement
            found = judgement.counterexample
            fault = "" if found is None else found.fault
            return Explanation(self.judging.explained(judgement, self.name), self.path, fault)
        return super().repr_failure(excinfo)

    def reportinfo(self) -> tuple[Path, None, str]:
        """Return where the test is, for the heading of a failure."""
        return self.path, None, f"{self.judging.system.where}::{self.name}"


class Judging:
    """The plug-in: makes the tests, keeps the judgements and writes the reports."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.began = time.monotonic()
        self.system = load(config.getoption("--kvspec"))
        self.seed: int = config.getoption("--kvspec-seed")
        try:
            self.profile = judging.profile_of(config.getoption("--kvspec-profile"))
            self.axes = judging.supported_axes(self.system)
        except KVSpecError as error:
            raise pytest.UsageError(f"--kvspec: {error}") from error
        self.guard = Guard(self.system, self.profile.seconds)
        self.laws: dict[str, list[Law]] = {}
        self.done: dict[str, list[Judgement]] = {}
        self.silent: list[Judgement] = []

    def judgements(self, law: Law, axis: Axis, test: str) -> list[Judgement]:
        """Return the judgements of *law* on *axis*. The first call of an axis judges all laws.

        Args:
            law: The law.
            axis: The axis.
            test: The name of the test, under which HypoFuzz has stored a wrong case.
        """
        if axis.name not in self.done:
            self.done[axis.name] = judging.judge_axis(
                self.guard, axis, self.profile, seed=self.seed, laws=self.laws[axis.name]
            )
        found = [judgement for judgement in self.done[axis.name] if judgement.law is law]
        if not any(judgement.wrong for judgement in found):
            again = judging.replayed(self.system, law, axis, self.profile, test)
            self.done[axis.name] += [again] if again else []
            found += [again] if again else []
        return found

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection(self, session: pytest.Session) -> None:
        """Collect no tests of the project, unless the command names some."""
        if session.config.args_source is not pytest.Config.ArgsSource.ARGS:
            session.config.args = []

    @pytest.hookimpl(tryfirst=True)
    def pytest_collection_modifyitems(
        self, session: pytest.Session, items: list[pytest.Item]
    ) -> None:
        """Add the tests of the system."""
        parent = SystemNode.from_parent(session, name=self.system.where, nodeid=self.system.where)
        expected = self._expected()
        for law in LAWS:
            if unanswered(self.system, law):
                items.append(self._test(parent, law, None))
            for axis in judging.axes_of(law, self.axes) if not unanswered(self.system, law) else ():
                test = self._test(parent, law, axis)
                test.expected = expected.pop(test.name, None)
                items.append(test)
        if expected:
            places = ", ".join(f"{line.place} ({name})" for name, line in expected.items())
            raise pytest.UsageError(f"--kvspec-xfail: no such law and axis: {places}")

    def _test(self, parent: SystemNode, law: Law, axis: Axis | None) -> LawTest:
        def not_judged() -> None: ...

        name = title(law) if axis is None else f"{title(law)}[{axis.name}]"
        fuzzed = not_judged
        if axis is not None:
            fuzzed = judging.law_test(self.system, law, axis, self.profile)
        test: LawTest = LawTest.from_parent(parent, name=name, callobj=fuzzed)
        test.judging, test.law, test.axis = self, law, axis
        return test

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Note which laws are judged on which axis, after others have deselected tests."""
        for test in session.items:
            if isinstance(test, LawTest) and test.axis is not None:
                self.laws.setdefault(test.axis.name, []).append(test.law)
            elif isinstance(test, LawTest):
                self.silent += judging.not_judged(self.system, [test.law])

    def _expected(self) -> dict[str, KnownFailure]:
        """Return the lines of the file of expected failures, by the name of the test."""
        file = self.config.getoption("--kvspec-xfail")
        if file is None:
            return {}
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise pytest.UsageError(f"--kvspec-xfail {file}: {error}") from error
        names = {str(law.number): title(law) for law in LAWS}
        expected: dict[str, KnownFailure] = {}
        for number, line in enumerate(lines, 1):
            test, _, words = (part.strip() for part in line.partition("#"))
            law, slash, axis = test.partition("/")
            if slash:
                name = f"{names.get(law, law)}[{axis}]"
                expected[name] = KnownFailure(f"{file}:{number}", words)
            elif test:
                raise pytest.UsageError(f"{file}:{number}: expected LAW/AXIS, got {test!r}")
        return expected

    def explained(self, judgement: Judgement, name: str) -> str:
        """Return the counter-example of *judgement* in words, with a picture if it has a plan."""
        law, found = judgement.law, judgement.counterexample
        lines = [f"{self.system.name} breaks {law}: {law.sentence}", ""]
        if found is None:
            return "\n".join([*lines, f"In {judgement.wrong} cases, but not when drawn again."])
        lines += [found.fault, "", *described(found)]
        if (picture := self._picture(found, name)) is not None:
            lines += ["", f"what should be read by whom: {picture}"]
        return "\n".join([*lines, "", "To see it again, run:", "", found.code])

    def _picture(self, found: Counterexample, name: str) -> Path | None:
        """Draw the right plan into a file of pytest's cache."""
        cache = getattr(self.config, "cache", None)
        if isinstance(found.case, Script) or cache is None:
            return None
        try:
            picture = plan_svg(plan_of(found.case))
        except KVSpecError:
            return None
        path: Path = cache.mkdir("kvspec") / f"{name.translate({91: '-', 93: None})}.svg"
        path.write_text(picture, encoding="utf-8")
        return path

    def report(self) -> SystemReport:
        """Return the report of all tests that have run."""
        judgements = [*self.silent, *(j for axis in self.done.values() for j in axis)]
        return SystemReport(
            system=self.system.name,
            version=self.system.version,
            profile=self.profile.name,
            seed=self.seed,
            seconds=time.monotonic() - self.began,
            judgements=tuple(judgements),
        )

    def pytest_sessionfinish(self) -> None:
        """Write the reports."""
        report = self.report()
        for file in self.config.getoption("--kvspec-report"):
            report.save(file)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was judged, and what was not."""
        terminalreporter.section(f"kvspec: {self.system.name} {self.system.version}".rstrip())
        for line in self._summary():
            terminalreporter.write_line(line)

    def _summary(self) -> Iterator[str]:
        report = self.report()
        for verdict in (Verdict.EXACT, Verdict.REFUSED, Verdict.WRONG):
            cells = [j for j in report.judgements if j.verdict is verdict]
            axes = dict.fromkeys(judgement.axis for judgement in cells)
            yield f"{verdict}: {len(cells)} of law, axis and value ({_few(list(axes))})"
        for judgement in self.silent:
            yield f"{judgement.law}: not judged, {judgement.words}"
        for file in self.config.getoption("--kvspec-report"):
            yield f"report: {file}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"
