"""Compute a mutation score: plant faults in the core and count how many the tests find.

    python fuzz/mutants.py --sample 200 --seed 7 --shard 2/8 kvspec/plan kvspec/memory/layout.py

The faults are those of cosmic-ray and of `operators.py`. A sample draws places first and then one
fault of each place, so that a place with many possible faults has no more weight than another. The
program plants a fault in a copy of the repository and runs the tests of the package, one process at
a time. First run the tests that found earlier faults of the module, then the others, the fastest
first. It prints each fault that no test notices as `file:line`. Faults with a reason in
`equivalent.txt` do not count.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np  # noqa: F401 - the forks that run the tests need it
import pytest

ROOT = Path(__file__).parents[1]
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
CORE = ("ownership", "specs", "engines", "plan", "memory", "descriptors", "check")
JUDGES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("judges.toml").read_text())
VERDICTS = ("killed", "survived", "equivalent")


class Mutant(NamedTuple):
    """One fault: the lines that it changes, and the source of the module with it."""

    path: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        """Return the place of the fault and its change, as a diff."""
        return f"{self.path}:{self.line}\n- {self.before}\n+ {self.after}"


def package(path: str) -> str:
    """Return the package of the core that contains the module at *path*."""
    return path.split("/")[1]


def modules(chosen: Sequence[str]) -> list[str]:
    """Return the modules in the *chosen* files and folders, or those of the whole core."""
    roots = [ROOT / path for path in chosen or [f"kvspec/{folder}" for folder in CORE]]
    files = [file for root in roots for file in (root.rglob("*.py") if root.is_dir() else [root])]
    paths = sorted(str(file.relative_to(ROOT)) for file in files if file.is_file())
    outside = [path for path in paths if package(path) not in CORE]
    if outside or not paths:
        raise SystemExit(f"{outside or chosen}: expected modules of {', '.join(CORE)}")
    return paths


def equivalents() -> dict[tuple[str, str, str], str]:
    """Return the reason why a fault changes nothing, by file, line before and line after."""
    judged = {}
    for block in EQUIVALENT.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            path, before, after, *reason = lines
            judged[path, before[2:], after[2:].strip()] = " ".join(reason)
    return judged


def meaning(source: str) -> str:
    """Return a dump of the tree of *source* without annotations, which are never evaluated here."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def changed(path: str, source: str, mutated: str) -> Mutant | None:
    """Return the fault that turns *source* into *mutated*, or None if the meaning is the same."""
    try:
        if meaning(mutated) == meaning(source):
            return None
    except SyntaxError:
        return None
    old, new = source.splitlines(), mutated.splitlines()
    opcodes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    spans = [op for op in opcodes if op[0] != "equal"]
    first, last = spans[0], spans[-1]
    before = " ".join(line.strip() for line in old[first[1] : last[2]])
    after = " ".join(line.strip() for line in new[first[3] : last[4]])
    if before.startswith("@lru_cache") and "typed=False" not in after:
        return None  # The size of a cache changes only the speed.
    if before.replace("strict=True", "strict=False") == after:
        return None  # Both lengths are always equal here, so no test can notice it.
    return Mutant(path, first[1] + 1, before, after, mutated)


def drawn(paths: Sequence[str], *, every: bool, seed: int) -> Iterator[Mutant]:
    """Yield faults of *paths*, places in random order: *every* fault of a place, or one of them."""
    import operators  # noqa: PLC0415 - only planting faults needs cosmic-ray

    chance = random.Random(seed)  # noqa: S311 - repeatable on purpose
    sources = {path: (ROOT / path).read_text() for path in paths}
    places = [
        (path, faults)
        for path, source in sources.items()
        for faults in operators.places(source).values()
    ]
    chance.shuffle(places)
    for path, faults in places:
        chance.shuffle(faults)
        candidates = (
            changed(path, sources[path], mutated)
            for mutated in (operators.plant(sources[path], fault) for fault in faults)
            if mutated is not None
        )
        real = (mutant for mutant in candidates if mutant is not None)
        yield from real if every else islice(real, 1)


class Order:
    """A plug-in of pytest that runs the most promising tests first and records their durations.

    Attributes:
        seconds: Duration of each test that has run, by its name.
        killers: Tests that found earlier faults of the module, the latest last.
        failed: Names of the tests that failed.
    """

    def __init__(self, seconds: dict[str, float], killers: Sequence[str]) -> None:
        """Order the tests by *killers*, then by *seconds*."""
        self.seconds = seconds
        self.rank = {name: -number for number, name in enumerate(killers, 1)}
        self.failed: list[str] = []

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Sort *items*: tests that found a fault of the module, then by their duration."""
        items.sort(key=lambda item: self.rank.get(item.nodeid, self.seconds.get(item.nodeid, 0.0)))

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401
        """Record the duration of a test, and whether it failed."""
        self.seconds[report.nodeid] = self.seconds.get(report.nodeid, 0.0) + report.duration
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401
        """Record a file that cannot be imported."""
        if report.failed:
            self.failed.append(report.nodeid)


class Judge:
    """Run the tests of a package over a copy of the repository, with or without a fault.

    Each run is a fork of this process, which has imported pytest and numpy but not kvspec. So a
    run imports only the package with the fault and its tests, and saves half of the start.
    """

    def __init__(self, folder: Path) -> None:
        """Copy the files that the tests read into *folder*."""
        self.folder = folder
        self.ready: dict[str, tuple[list[str], float]] = {}
        self.seconds: dict[str, float] = {}
        self.killers: dict[str, list[str]] = {}
        unread = shutil.ignore_patterns(".*", "__pycache__", "dist", "corpus")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=unread)

    def run(
        self, flags: Sequence[str], killers: Sequence[str] = (), seconds: float | None = None
    ) -> tuple[int, list[str], dict[str, float]]:
        """Run pytest in a fork for at most *seconds* of processor time.

        Returns:
            The exit status, the names of the tests that failed, and the duration of each test.
        """
        with tempfile.NamedTemporaryFile("r", suffix=".json") as answer:
            child = os.fork()
            if child == 0:
                self._child(flags, killers, seconds, Path(answer.name))
            # The processor limit ends a busy loop. This limit ends a process that sleeps.
            limit = time.monotonic() + (40 * seconds if seconds else 3600)
            try:
                ended, status = os.waitpid(child, os.WNOHANG)
                while not ended:
                    time.sleep(0.02)
                    if time.monotonic() > limit:
                        os.killpg(child, signal.SIGKILL)
                    ended, status = os.waitpid(child, os.WNOHANG)
            finally:
                # An interrupt ends the fork too, and all processes that its tests started.
                with suppress(ProcessLookupError):
                    os.killpg(child, signal.SIGKILL)
            text = answer.read()
        failed, durations = json.loads(text) if text else ([], {})
        return os.waitstatus_to_exitcode(status), failed, durations

    def _child(
        self, flags: Sequence[str], killers: Sequence[str], seconds: float | None, answer: Path
    ) -> NoReturn:
        """Run pytest, write the result to *answer* and end the process."""
        status = 1
        try:
            os.setsid()
            os.chdir(self.folder)
            if seconds:
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))
                sys.dont_write_bytecode = True
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            os.environ |= {
                "PYTHONPATH": str(self.folder),
                "CI": "true",
                "HYPOTHESIS_PROFILE": "mutants",
            }
            sys.path.insert(0, str(self.folder))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for stream in range(3):
                os.dup2(nowhere, stream)
            order = Order(self.seconds, killers)
            quiet = ("-q", "-p", "no:cacheprovider", "--no-header", "--tb=no")
            status = int(pytest.main([*quiet, *flags], plugins=[order]))
            answer.write_text(json.dumps([order.failed, order.seconds]))
        finally:
            os._exit(status)

    def judges(self, package: str) -> tuple[list[str], float]:
        """Return the arguments of pytest that judge a fault of *package*, and the time limit.

        Tests that fail without any fault cannot judge. The program prints their names and leaves
        them out.
        """
        if package not in self.ready:
            tests = [*JUDGES["first"], *JUDGES[package]]
            tests += [f"--deselect={name}" for name in JUDGES["left_out"]]
            began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            status, failed, self.seconds = self.run(tests)
            taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
            if status not in (0, 1) or not self.seconds:
                raise SystemExit(f"{package}: its tests do not run: {failed}")
            for name in failed:
                print(f"fails without any fault: {name}", file=sys.stderr)
            flags = [*tests, "-x", *(f"--deselect={name}" for name in failed)]
            # A fault may cause an endless loop. A correct run takes less than twice the measured
            # time. The 10 s are a margin for packages whose tests are short.
            self.ready[package] = flags, 2 * taken + 10
        return self.ready[package]

    def kills(self, mutant: Mutant) -> bool:
        """Return whether a test fails, or does not end, with *mutant* in place."""
        flags, seconds = self.judges(package(mutant.path))
        file = self.folder / mutant.path
        source = file.read_text()
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            # Python reuses bytecode if the source has the same size and the same second.
            compiled.unlink()
        file.write_text(mutant.source)
        killers = self.killers.setdefault(mutant.path, [])
        try:
            status, failed, _ = self.run(flags, killers, seconds)
        finally:
            file.write_text(source)
        killers += (name for name in failed if name not in killers)
        return status != 0


def score(killed: int, survived: int) -> str:
    """Return the share of killed faults, in per cent."""
    return f"{100 * killed / (killed + survived):.1f} %" if killed + survived else "-"


def report(verdicts: Sequence[tuple[Mutant, str]]) -> str:
    """Return the table of scores by module, then each fault that no test noticed."""
    counts = Counter((mutant.path, verdict) for mutant, verdict in verdicts)
    paths = sorted({mutant.path for mutant, _ in verdicts})
    lines = [
        f"{'module':40} {'mutants':>7} {'killed':>7} {'survived':>8} {'equivalent':>10}   score"
    ]
    total: Counter[str] = Counter()
    for path in [*paths, "all"]:
        row = total if path == "all" else Counter({name: counts[path, name] for name in VERDICTS})
        total = total if path == "all" else total + row
        killed, survived, equal = (row[name] for name in VERDICTS)
        share = score(killed, survived)
        lines.append(
            f"{path:36} {sum(row.values()):7} {killed:7} {survived:8} {equal:10} {share:>7}"
        )
    return "\n".join(
        [*lines, "", *(f"{mutant}\n" for mutant, verdict in verdicts if verdict == "survived")]
    )


class Record:
    """A file of verdicts, one JSON object a line, with which an interrupted run continues.

    A new test never saves a fault, so a killed fault stays killed. The others are judged again.
    """

    def __init__(self, file: Path | None) -> None:
        """Read *file*, if it exists. Without a file, nothing is kept."""
        self.file = file
        self.killed: set[str] = set()
        if file is not None and file.exists():
            lines = [json.loads(line) for line in file.read_text().splitlines()]
            self.killed = {line["mutant"] for line in lines if line["verdict"] == "killed"}

    def add(self, mutant: Mutant, verdict: str) -> None:
        """Append a verdict."""
        if self.file is not None and str(mutant) not in self.killed:
            with self.file.open("a") as lines:
                lines.write(json.dumps({"mutant": str(mutant), "verdict": verdict}) + "\n")


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="*", help="modules or folders; the whole core by default")
    parser.add_argument(
        "--sample", type=int, help="number of places, one fault each; all by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
    parser.add_argument(
        "--record", type=Path, help="file of verdicts: faults that it lists as killed are not run"
    )
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th of n shares of the sample")
    return parser.parse_args()


def main() -> None:
    """Plant the faults one after the other and print the score, even if the run is interrupted."""
    arguments = options()
    share, shares = (int(number) for number in arguments.shard.split("/"))
    os.nice(19)  # A run takes hours and must not disturb other work on the machine.
    known = equivalents()
    mutants = drawn(modules(arguments.path), every=arguments.sample is None, seed=arguments.seed)
    verdicts: list[tuple[Mutant, str]] = []
    record = Record(arguments.record)
    status = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        judge = Judge(Path(folder))
        try:
            for mutant in islice(mutants, share - 1, arguments.sample, shares):
                began = time.monotonic()
                if (mutant.path, mutant.before, mutant.after) in known:
                    verdict = "equivalent"
                else:
                    known_killed = str(mutant) in record.killed
                    verdict = "killed" if known_killed or judge.kills(mutant) else "survived"
                verdicts.append((mutant, verdict))
                record.add(mutant, verdict)
                took = time.monotonic() - began
                print(f"{verdict} in {took:.0f} s: {mutant}", file=sys.stderr, flush=True)
        except (KeyboardInterrupt, SystemExit) as stop:
            print(f"{stop}\nstopped: the report covers the faults so far", file=sys.stderr)
            status = 2
    print(report(verdicts))
    sys.exit(status or any(verdict == "survived" for _, verdict in verdicts))


if __name__ == "__main__":
    main()
