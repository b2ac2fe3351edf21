"""Copy a file of vectors, with one error in each vector. See vectors/README.md.

Usage: `python3 vectors/plant.py KIND IN.json OUT.json`. Only Python's own library is needed.
"""  # noqa: INP001

import json
import sys
from pathlib import Path
from typing import Any


def plant(kind: str, expected: Any) -> bool:  # noqa: ANN401
    """Change the expected result of a vector. Return False if it has nothing to change."""
    slices, pairs = expected["slices"], expected["copies"]
    if not pairs:
        return False
    copies = pairs[-1]["copies"]
    if kind == "slice":  # The last slice takes the unit beside the right one.
        slices[-1]["producer_units"] = [unit + 1 for unit in slices[-1]["producer_units"]]
    elif kind == "byte":  # The last copy writes one byte too late.
        copies[-1][3] += 1
    elif kind == "missing":
        copies.pop()
    elif kind == "double":
        copies.append(copies[-1])
    return True


def main(kind: str, source: str, target: str) -> None:
    """Write the vectors of *source* that can be changed to *target*."""
    file = json.loads(Path(source).read_text(encoding="utf-8"))
    file["vectors"] = [v for v in file["vectors"] if plant(kind, v["expected"])]
    Path(target).write_text(json.dumps(file), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
