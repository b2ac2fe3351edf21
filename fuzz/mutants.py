"""A mutation score: of faults planted in the core one at a time, how many the tests find.

    python fuzz/mutants.py --sample 200 --seed 7 --shard 2/8 kvspec/plan kvspec/memory/layout.py

The faults are those of cosmic-ray, and a few of `operators.py`. A sample is drawn by place, then
one fault of each place, so that a place with many possible faults weighs no more than another.
A fault is planted in a copy, which the tests of its package judge, one process at a time; one that
they do not notice is printed as `file:line`. Those with a reason in `equivalent.txt` do not count.
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
    """One fault: the lines that it changes, and the module with it."""

    path: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        """Return where it lies and what it changes, as a diff."""
        return f"{self.path}:{self.line}\n- {self.before}\n+ {self.after}"


def package(path: str) -> str:
    """Return the package of the core that the module at *path* belongs to."""
    return path.split("/")[1]


def modules(chosen: Sequence[str]) -> list[str]:
    """Return the modules that *chosen* files and folders name, or those of the whole core."""
    folders = [ROOT / each for each in chosen or [f"kvspec/{each}" for each in CORE]]
    files = [
        found for each in folders for found in (each.rglob("*.py") if each.is_dir() else [each])
    ]
    paths = sorted(str(file.relative_to(ROOT)) for file in files if file.is_file())
    outside = [path for path in paths if package(path) not in CORE]
    if outside or not paths:
        raise SystemExit(f"{outside or chosen}: expected modules of {', '.join(CORE)}")
    return paths


def equivalents() -> dict[tuple[str, str, str], str]:
    """Return, by file and by the lines before and after, why a fault changes nothing."""
    judged = {}
    for block in EQUIVALENT.read_text().split("\n\n"):
        lines = [line for line in block.splitlines() if not line.startswith("#")]
        if lines:
            path, before, after, *reason = lines
            judged[path, before[2:], after[2:].strip()] = " ".join(reason)
    return judged


def meaning(source: str) -> str:
    """Return what *source* does: its tree without annotations, which are never evaluated here."""
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
    """Return the fault that makes *mutated* of *source*; None if it means the same, or nothing."""
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
        return None  # how long answers are kept is speed, not truth
    if before.replace("strict=True", "strict=False") == after:
        return None  # lengths that are equal anyway
    return Mutant(path, first[1] + 1, before, after, mutated)


def drawn(paths: Sequence[str], *, every: bool, seed: int) -> Iterator[Mutant]:
    """Yield faults of *paths*, places in random order: *every* one of a place, or one of them."""
    import operators  # noqa: PLC0415 - only who plants faults needs cosmic-ray

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
        made = (
            changed(path, sources[path], mutated)
            for mutated in (operators.plant(sources[path], fault) for fault in faults)
            if mutated is not None
        )
        real = (mutant for mutant in made if mutant is not None)
        yield from real if every else islice(real, 1)


class Judge:
    """Runs the tests of a package over a copy of the repository, with or without a fault."""

    def __init__(self, folder: Path) -> None:
        """Copy what the tests read into *folder*."""
        self.folder = folder
        self.ready: dict[str, tuple[list[str], float]] = {}
        unread = shutil.ignore_patterns(".*", "__pycache__", "dist", "corpus")
        shutil.copytree(ROOT, folder, dirs_exist_ok=True, ignore=unread)

    def run(self, flags: Sequence[str], seconds: float | None = None) -> tuple[int, str]:
        """Run pytest, for so many *seconds* of the processor; return its status and its words."""
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
                timeout=40 * seconds if seconds else None,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return -1, ""
        return done.returncode, done.stdout

    def judges(self, package: str) -> tuple[list[str], float]:
        """Return what pytest runs to judge a fault of *package*, and how long it may take.

        Tests that fail without any fault judge nothing: they are named, and left out.
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
            self.ready[package] = flags, 2 * taken + 10
        return self.ready[package]

    def kills(self, mutant: Mutant) -> bool:
        """Say whether a test fails, or none comes to an end, with *mutant* in place."""
        flags, seconds = self.judges(package(mutant.path))
        file = self.folder / mutant.path
        source = file.read_text()
        for compiled in (file.parent / "__pycache__").glob(f"{file.stem}.*"):
            compiled.unlink()  # is not read again for a file of the same second and size
        file.write_text(mutant.source)
        try:
            status, _ = self.run(flags, seconds)
        finally:
            file.write_text(source)
        return status != 0


def score(killed: int, survived: int) -> str:
    """Return the share that was killed, in per cent."""
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
    """Return what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("path", nargs="*", help="modules or folders; the whole core unless named")
    parser.add_argument("--sample", type=int, help="so many places, one fault each; else all")
    parser.add_argument("--seed", type=int, default=0, help="another seed is another sample")
    parser.add_argument("--shard", default="1/1", help="i/n: the i-th of n shares of the sample")
    return parser.parse_args()


def main() -> None:
    """Plant the faults one after the other, and print the score, of an interrupted run as well."""
    asked = options()
    share, shares = (int(number) for number in asked.shard.split("/"))
    os.nice(19)
    known = equivalents()
    mutants = drawn(modules(asked.path), every=asked.sample is None, seed=asked.seed)
    verdicts: list[tuple[Mutant, str]] = []
    status = 0
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        judge = Judge(Path(folder))
        try:
            for mutant in islice(mutants, share - 1, asked.sample, shares):
                began = time.monotonic()
                if (mutant.path, mutant.before, mutant.after) in known:
                    verdict = "equivalent"
                else:
                    verdict = "killed" if judge.kills(mutant) else "survived"
                verdicts.append((mutant, verdict))
                took = time.monotonic() - began
                print(f"{verdict} in {took:.0f} s: {mutant}", file=sys.stderr, flush=True)
        except (KeyboardInterrupt, SystemExit) as stop:
            print(f"{stop}\nstopped: what follows is of the faults so far", file=sys.stderr)
            status = 2
    print(report(verdicts))
    sys.exit(status or any(verdict == "survived" for _, verdict in verdicts))


if __name__ == "__main__":
    main()
