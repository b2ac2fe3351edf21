"""Compute a mutation score: plant faults in the core and count how many the tests find.

    python fuzz/mutants.py --sample 200 --seed 7 --shard 2/8 kvspec/plan kvspec/memory/layout.py

The faults are those of cosmic-ray and of `operators.py`. A sample draws places first and then one
fault of each place, so that a place with many possible faults has no more weight than another. The
program plants a fault in a copy of the repository and runs the tests of the package, one process at
a time. It prints each fault that no test notices as `file:line`. Faults with a reason in
`equivalent.txt` do not count.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

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


class Judge:
    """Run the tests of a package over a copy of the repository, with or without a fault."""

    def __init__(self, folder: Path) -> None:
        """Copy the files that the tests read into *folder*."""
        self.folder = folder
        self.ready: dict[str, tuple[list[str], float]] = {}
        unread = shutil.ignore_patterns(".*", "__pycache__", "dist", "corpus")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=unread)

    def run(self, flags: Sequence[str], seconds: float | None = None) -> tuple[int, str]:
        """Run pytest for at most *seconds* of processor time; return its status and its output."""
        environment = os.environ | {
            "PYTHONPATH": str(self.folder),
            "CI": "true",
            "HYPOTHESIS_PROFILE": "mutants",
            "PYTHONDONTWRITEBYTECODE": "1" if seconds else "",
        }

        def limited() -> None:
            if seconds:
                resource.setrlimit(resource.RLIMIT_CPU, (int(seconds), int(seconds) + 5))

        quiet = ("-q", "-p", "no:cacheprovider", "--no-header", "--tb=no")
        try:
            done = subprocess.run(  # noqa: S603 - our own tests
                (sys.executable, "-m", "pytest", *quiet, *flags),
                cwd=self.folder,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                preexec_fn=limited,
                # The processor limit ends a busy loop. This limit ends a process that sleeps.
                timeout=40 * seconds if seconds else None,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, ""
        return done.returncode, done.stdout

    def judges(self, package: str) -> tuple[list[str], float]:
        """Return the arguments of pytest that judge a fault of *package*, and the time limit.

        Tests that fail without any fault cannot judge. The program prints their names and leaves
        them out.
        """
        if package not in self.ready:
            tests = [*JUDGES["first"], *JUDGES[package]]
            began = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
            status, text = self.run(tests)
            taken = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - began
            failed = re.findall(r"^FAILED (.+?)(?: - .*)?$", text, re.MULTILINE)
            if status not in (0, 1):
                raise SystemExit(f"{package}: its tests do not run\n{text}")
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
        try:
            status, _ = self.run(flags, seconds)
        finally:
            file.write_text(source)
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


def options() -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="*", help="modules or folders; the whole core by default")
    parser.add_argument(
        "--sample", type=int, help="number of places, one fault each; all by default"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the sample")
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
    status = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        judge = Judge(Path(folder))
        try:
            for mutant in islice(mutants, share - 1, arguments.sample, shares):
                began = time.monotonic()
                if (mutant.path, mutant.before, mutant.after) in known:
                    verdict = "equivalent"
                else:
                    verdict = "killed" if judge.kills(mutant) else "survived"
                verdicts.append((mutant, verdict))
                took = time.monotonic() - began
                print(f"{verdict} in {took:.0f} s: {mutant}", file=sys.stderr, flush=True)
        except (KeyboardInterrupt, SystemExit) as stop:
            print(f"{stop}\nstopped: the report covers the faults so far", file=sys.stderr)
            status = 2
    print(report(verdicts))
    sys.exit(status or any(verdict == "survived" for _, verdict in verdicts))


if __name__ == "__main__":
    main()
