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

import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import pytest
from _pytest._code.code import ReprFileLocation, TerminalRepr

from kvspec.errors import KVSpecError
from kvspec.testing.kit import judging
from kvspec.testing.kit.axes import Axis
from kvspec.testing.kit.guard import Guard
from kvspec.testing.kit.system_report import Judgement, SystemReport, Verdict, picture_of
from kvspec.testing.kit.words import answered, described
from kvspec.testing.laws import LAWS, Law, System, unanswered

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
    if not (module and name):
        raise pytest.UsageError(f"--kvspec {where}: expected MODULE:NAME")
    try:
        imported = import_module(module)
    except Exception as error:  # the module is code of its author
        text = "".join(traceback.format_exception(error, limit=-2))
        raise pytest.UsageError(f"--kvspec {where}: cannot import {module}:\n{text}") from error
    system = getattr(imported, name, None)
    if system is None:
        raise pytest.UsageError(f"--kvspec {where}: module {module} has no {name}")
    if not isinstance(system, System):
        raise pytest.UsageError(f"--kvspec {where}: expected a kvspec.testing.kit.System")
    return attrs.evolve(system, where=where)


def _check_writable(report: Path) -> None:
    """Raise `UsageError` now if the report could not be written after a run of many minutes."""
    folder = report.parent
    if report.is_dir() or not folder.is_dir() or not os.access(folder, os.W_OK):
        expected = "a file in a folder that exists and can be written"
        raise pytest.UsageError(f"--kvspec-report {report}: expected {expected}")


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

    def setup(self) -> None:
        """Do nothing: there are no fixtures."""

    def runtest(self) -> None:
        """Judge the law, or look up its judgement."""
        if self.axis is None:
            pytest.skip(f"not judged: {unanswered(self.judging.system, self.law)}")
        found = self.judging.judgements(self.law, self.axis, self.nodeid)
        wrong = [judgement for judgement in found if judgement.verdict is Verdict.WRONG]
        for judgement in wrong:
            if judgement.known is None:
                raise BrokenLaw(judgement)
        for line in self.judging.stale(self.law, self.axis):
            pytest.fail(f"{line.place}: this no longer fails, so delete the line", pytrace=False)
        if wrong:
            pytest.xfail(str(wrong[0].known))
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
            found = judgement.wrong_case
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
        for file in config.getoption("--kvspec-report"):
            _check_writable(Path(file))
        self.guard = Guard(self.system, self.profile.seconds)
        self.laws: dict[str, list[Law]] = {}
        self.done: dict[str, list[Judgement]] = {}
        self.silent: list[Judgement] = []
        self.known: dict[str, KnownFailure] = {}
        # The test that has shown a fault, by the number of the law and the fault.
        self.shown: dict[tuple[int, str], str] = {}
        self.left_out = 0

    def judgements(self, law: Law, axis: Axis, test: str) -> list[Judgement]:
        """Return the judgements of *law* on *axis*. The first call of an axis judges all laws.

        Args:
            law: The law.
            axis: The axis.
            test: The name of the test, under which HypoFuzz has stored a wrong case.
        """
        if axis.name not in self.done:
            found = judging.judge_axis(
                self.guard, axis, self.profile, seed=self.seed, laws=self.laws[axis.name]
            )
            self.done[axis.name] = [attrs.evolve(each, known=self._comment(each)) for each in found]
        found = [judgement for judgement in self.done[axis.name] if judgement.law is law]
        again = None
        if not any(judgement.wrong for judgement in found):
            again = judging.replayed(self.system, law, axis, self.profile, test)
        if again is not None:
            again = attrs.evolve(again, known=self._comment(again))
            self.done[axis.name].append(again)
            found.append(again)
        return found

    def _comment(self, judgement: Judgement) -> str | None:
        """Return the words of the line that expects a wrong *judgement*, or None."""
        keys = [title(judgement.law)]
        keys += [f"{keys[0]}/{judgement.axis}", f"{keys[0]}/{judgement.axis}/{judgement.value}"]
        lines = [self.known[key] for key in keys if key in self.known]
        wrong = judgement.verdict is Verdict.WRONG
        return lines[-1].words or lines[-1].place if lines and wrong else None

    def stale(self, law: Law, axis: Axis) -> Iterator[KnownFailure]:
        """Yield the lines about *law* on *axis* that expect a failure that was not found.

        The last axis of a law yields the line of all axes, if all of them were judged.
        """
        axes = judging.axes_of(law, self.axes)
        whole = axis is axes[-1] and all(law in self.laws.get(each.name, ()) for each in axes)
        for key, line in self.known.items():
            name, *rest = key.split("/", 2)
            where = [axis.name] if rest else [each.name for each in axes]
            if name == title(law) and (rest[:1] == [axis.name] or (not rest and whole)):
                found = (j for name in where for j in self.done.get(name, ()) if j.law is law)
                if not any(j.wrong and j.value in (rest[1:] or [j.value]) for j in found):
                    yield line

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
        self.known = self._known()
        made: list[pytest.Item | pytest.Collector] = []
        for law in LAWS:
            silent = unanswered(self.system, law)
            axes = [None] if silent else judging.axes_of(law, self.axes)
            made += [self._test(parent, law, axis) for axis in axes]
        # The terminal counts the tests of reports.
        report = pytest.CollectReport(parent.nodeid, "passed", None, made)
        session.ihook.pytest_collectreport(report=report)
        items += [test for test in made if isinstance(test, LawTest)]

    def pytest_deselected(self, items: Sequence[pytest.Item]) -> None:
        """Count the tests that do not run."""
        self.left_out += sum(isinstance(item, LawTest) for item in items)

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
        tests = [test for test in session.items if isinstance(test, LawTest)]
        for test in tests:
            if test.axis is not None:
                self.laws.setdefault(test.axis.name, []).append(test.law)
        chosen = [law for law in LAWS if any(test.law is law for test in tests)]
        self.silent += judging.not_judged(self.system, chosen)

        # Pictures of an earlier run would show faults that are mended.
        for old in self.pictures.glob("*.svg") if self.pictures else ():
            old.unlink()

    def _known(self) -> dict[str, KnownFailure]:
        """Return the lines of the file of expected failures."""
        file = self.config.getoption("--kvspec-xfail")
        if file is None:
            return {}
        try:
            lines = Path(file).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise pytest.UsageError(f"--kvspec-xfail {file}: {error}") from error
        laws = {title(law): law for law in LAWS if not unanswered(self.system, law)}
        numbers = {str(law.number): name for name, law in laws.items()}
        known: dict[str, KnownFailure] = {}
        for number, line in enumerate(lines, 1):
            test, _, words = (part.strip() for part in line.partition("#"))
            if not test:
                continue
            name, *rest = test.split("/", 2)
            name = numbers.get(name, name)
            axes = [axis.name for axis in self.axes]
            if name in laws:
                axes = [axis.name for axis in judging.axes_of(laws[name], self.axes)]
            if name not in laws or (rest and rest[0] not in axes):
                raise pytest.UsageError(
                    f"--kvspec-xfail {file}:{number}: expected LAW, LAW/AXIS or LAW/AXIS/VALUE, got"
                    f" {test!r}. Laws: {', '.join(laws)}. Axes: {', '.join(axes)}"
                )
            known["/".join([name, *rest])] = KnownFailure(f"{file}:{number}", words)
        return known

    def explained(self, judgement: Judgement, name: str) -> str:
        """Return the counter-example of *judgement* in words, with a picture if it has a plan.

        A fault that another test has shown is only named, and a law's sentence is printed once.
        """
        law, found = judgement.law, judgement.wrong_case
        first = not any(law.number == number for number, _ in self.shown)
        broken = f"{self.system.name} breaks {law} ({judgement.axis}: {judgement.value})"
        lines = [f"{broken}: {law.sentence}" if first else broken, ""]
        if found is None:
            return "\n".join([*lines, f"In {judgement.wrong} cases, but not when drawn again."])
        lines += [found.fault, ""]
        before = self.shown.setdefault((law.number, found.fault), name)
        if before != name:
            return "\n".join([*lines, f"{before} has shown this fault above."])
        lines += described(found.case, law)
        if "moves" in law.asks and not law.alters:
            lines += answered(self.guard.guarded(), found.case)
        picture = picture_of(found, law)
        if picture and self.pictures:
            path = self.pictures / f"{name.replace('[', '-').replace(']', '')}.svg"
            path.write_text(picture, encoding="utf-8")
            lines += ["", f"what should be read by whom: {path}"]
        return "\n".join([*lines, "", "To see it again, run:", "", found.code])

    @property
    def pictures(self) -> Path | None:
        """The folder of the pictures in pytest's cache. None without a cache."""
        cache = getattr(self.config, "cache", None)
        return None if cache is None else Path(cache.mkdir("kvspec"))

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
            supports=self.system.supports,
            left_out=self.left_out,
        )

    def pytest_sessionfinish(self) -> None:
        """Write the reports."""
        for file in self.config.getoption("--kvspec-report") if self.ran else ():
            self.report().save(file)

    @property
    def ran(self) -> bool:
        """Whether tests were selected. After an error of usage, no test was."""
        return bool(self.laws or self.silent)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        """Print what was judged, and what was not."""
        if not self.ran:
            return
        terminalreporter.section(f"kvspec: {self.system.name} {self.system.version}".rstrip())
        for line in self._summary():
            terminalreporter.write_line(line)

    def _summary(self) -> Iterator[str]:
        report = self.report()
        yield f"{report.counts()}. Each is one law for one value of one axis."
        if self.left_out:
            yield f"partial: {self.left_out} tests were not selected"
        for verdict in (Verdict.REFUSED, Verdict.NOT_JUDGED):
            yield from (f"{verdict}: {reason}" for reason in report.reasons(verdict))
        for file in self.config.getoption("--kvspec-report"):
            yield f"report: {file}"
