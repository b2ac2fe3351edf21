"""Print every budget with the measured figures, in one table.

`python bench/run.py [--only B3,B5] [--quick] [--mooncake-python PATH]`. Figures are medians of
interleaved repetitions in one run. The exit status does not depend on the speed of the machine.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from importlib import metadata
from pathlib import Path

import mooncake_client
from connecting import connected
from counting import b17
from digesting import digested
from growth import b9, b10
from merging import b6
from modelling import modelled
from moving import b7, b8, b15
from naming import named
from planning import b3, b4, b5
from polling import polled
from posting import read_cost
from requesting import b11, b12, b13, b16
from starting import b1, b2
from storing import stored
from tabling import b14
from timing import Options, Row

BUDGETS: dict[str, Callable[[Options], Iterator[Row]]] = {
    "B1": b1,
    "B2": b2,
    "B3": b3,
    "B4": b4,
    "B5": b5,
    "B6": b6,
    "B7": b7,
    "B8": b8,
    "B9": b9,
    "B10": b10,
    "B11": b11,
    "B12": b12,
    "B13": b13,
    "B14": b14,
    "B15": b15,
    "B16": b16,
    "B17": b17,
    "CONNECT": connected,
    "READ": read_cost,
    "DIGEST": digested,
    "POLL": polled,
    "MODEL": modelled,
    "NAMES": named,
    "STORED": stored,
}
COLUMNS = ("budget", "what", "ours", "other", "ratio", "required", "met")
WIDTHS = (6, 98, 24, 22, 9, 16, 4)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen budgets and print their table; return 0."""
    parser = argparse.ArgumentParser(description="Measure kvspec against its budgets.")
    parser.add_argument("--only", default=",".join(BUDGETS), help="names of budgets, such as B3,B5")
    parser.add_argument("--quick", action="store_true", help="fewer repetitions, smaller proofs")
    parser.add_argument("--mooncake-python", help="an interpreter that has Mooncake installed")
    chosen = parser.parse_args(arguments)
    names = [name.strip().upper() for name in chosen.only.split(",")]
    unknown = [name for name in names if name not in BUDGETS]
    if unknown:
        parser.error(f"--only {','.join(unknown)}: expected some of {','.join(BUDGETS)}")
    python = mooncake_client.python_of(chosen.mooncake_python)
    options = Options(quick=chosen.quick, python=python)
    print(machine())
    print(line(COLUMNS))
    print(line(["-" * width for width in WIDTHS]))
    for name in names:
        for row in BUDGETS[name](options):
            print(shown(row), flush=True)
    print(f"load at the end: {os.getloadavg()[0]:.2f}")
    return 0


def line(cells: Sequence[str]) -> str:
    """Return *cells* as one line of the table."""
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)).rstrip()


def shown(row: Row) -> str:
    """Return *row* as one line of the table."""
    met = {True: "yes", False: "NO", None: ""}[row.met]
    return line([row.budget, row.what, row.ours, row.other, row.ratio, row.required, met])


def machine() -> str:
    """Return one line that describes the machine and the versions of the packages."""
    versions = ", ".join(f"{name} {_version(name)}" for name in ("numpy", "torch", "nixl"))
    cores = len(os.sched_getaffinity(0))
    python = f"Python {platform.python_version()}"
    load = f"load {os.getloadavg()[0]:.2f}"
    return f"machine: {cores} cores, {_cpu()}, {python}, {versions}, {load}"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def _cpu() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return models[0] if models else platform.machine()


if __name__ == "__main__":
    sys.exit(main())
