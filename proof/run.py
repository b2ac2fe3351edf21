"""Prove the integer core of the library: `python proof/run.py`.

    pip install --group proof -e . -c constraints.txt
    python proof/run.py                  # all theorems
    python proof/run.py --table          # the same, as the table of docs/proof.md
    python proof/run.py --quick          # those that the tests prove too
    python proof/run.py meet local       # those whose names contain one of the words
    python proof/run.py --plant          # plant each fault: its theorem must fail

The exit status is 1 if a theorem fails, or with `--plant` if a planted fault is not found.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path as File

sys.path.insert(0, str(File(__file__).parent))
sys.path.insert(1, str(File(__file__).parents[1]))

from library import Library, Plant, load
from symbolic import explore
from theorems import THEOREMS, Theorem


def prove(theorem: Theorem, lib: Library) -> str:
    """Prove one theorem of *lib*. Return how, in a few words.

    Raises:
        RefutedError: If it does not hold.
        UndecidedError: If z3 gives up.
    """
    if theorem.symbolic:
        paths, claims = explore(lambda path: theorem.proof(lib, path))
        return f"{paths} paths, {claims} claims"
    return f"{theorem.proof(lib):,} cases"


def judged(theorem: Theorem, plant: Plant | None) -> tuple[bool, str]:
    """Return whether all is as it must be, and how: a proof, or a planted fault that is found."""
    lib = load(plant, symbolic=theorem.symbolic)
    try:
        how = prove(theorem, lib)
    except Exception as error:  # noqa: BLE001 - a fault may raise anything
        return plant is not None, f"{type(error).__name__}: {error}"
    return plant is None, how if plant is None else f"not found: {plant.after}"


def chosen(words: Sequence[str], *, quick: bool) -> list[Theorem]:
    """Return the theorems whose names contain any of *words*; all without a word."""
    found = [t for t in THEOREMS if not words or any(word in t.name for word in words)]
    return [t for t in found if t.quick or not quick]


def row(theorem: Theorem, seconds: float) -> str:
    """Return the row of a theorem in the table of docs/proof.md."""
    about = theorem.about.removeprefix("ownership.").removeprefix("descriptors.")
    return f"| {theorem.sentence} | `{about}` | {theorem.bound} | {seconds:.1f} |"


def main() -> int:
    """Prove, print and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("word", nargs="*", help="part of the name of a theorem")
    parser.add_argument("--quick", action="store_true", help="only those that the tests prove")
    parser.add_argument("--plant", action="store_true", help="plant faults, which must be found")
    parser.add_argument("--table", action="store_true", help="print the table of docs/proof.md")
    arguments = parser.parse_args()
    rows = ["| theorem | function | bound | seconds |", "|---|---|---|---|"]
    judgements: list[bool] = []
    for theorem in chosen(arguments.word, quick=arguments.quick):
        for plant in theorem.plants if arguments.plant else (None,):
            began = time.process_time()
            good, how = judged(theorem, plant)
            seconds = time.process_time() - began
            judgements.append(good)
            line = f"{'ok  ' if good else 'FAIL'} {theorem.name}, {seconds:.1f} s: {how}"
            print(line, file=sys.stderr if arguments.table else sys.stdout, flush=True)
            rows.append(row(theorem, seconds))
    if arguments.table:
        print("\n".join(rows))
    else:
        kind = "planted faults" if arguments.plant else "theorems"
        print(f"{len(judgements)} {kind}, {judgements.count(False)} failed")
    return int(not all(judgements))


if __name__ == "__main__":
    sys.exit(main())
