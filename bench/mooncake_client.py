"""Run Mooncake's planner in a separate process, on the same work as kvspec.

Mooncake lives in another virtual environment and is not a dependency. If it is not installed, the
rows of the table explain how to install it. Both planners receive the same addresses and block
tables, and their writes must be equal.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import numpy as np
import works

from kvspec.memory.rank_cache import RankCache

PROGRAM = Path(__file__).with_name("mooncake_planner.py")
VARIABLE = "KVSPEC_MOONCAKE_PYTHON"
HOW = f"not installed (see bench/README.md; then --mooncake-python or {VARIABLE})"


class Mooncake:
    """The process of the planner, as a context manager."""

    def __init__(self, python: str, work: Mapping[str, Any]) -> None:
        self._process = subprocess.Popen(
            [python, str(PROGRAM)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self._send(json.dumps(work))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def _send(self, line: str) -> None:
        if self._process.stdin is not None:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()

    def ask(self, command: str) -> dict[str, Any]:
        """Return the answer to *command*; raise `RuntimeError` if the process ended."""
        self._send(command)
        line = self._process.stdout.readline() if self._process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"Mooncake's planner ended at {command!r}; its error is above")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def seconds(self, command: str) -> float:
        """Return the seconds that one repetition of *command* took."""
        return float(self.ask(command)["seconds"])


def python_of(argument: str | None) -> str | None:
    """Return the interpreter that has Mooncake, or None if Mooncake is not installed."""
    python = argument or os.environ.get(VARIABLE)
    if not python:
        return None
    probe = [python, "-c", "import mooncake.reshard.kv_cache"]
    try:
        installed = subprocess.run(probe, check=False, capture_output=True).returncode == 0
    except OSError:
        installed = False
    return python if installed else None


def described(work: works.Work) -> dict[str, Any]:
    """Return *work* as JSON for the planner: addresses in bytes, heads by number."""
    ours, theirs = work.tables()
    parts = work.spec.parts
    description: dict[str, Any] = {
        "layers": work.layers,
        "tokens": work.tokens,
        "page": work.spec.block_size,
        "heads": parts[0].units,
        "head_size": parts[0].content_bytes // 2,
        "blocks": {"producer": ours.tolist(), "consumer": theirs.tolist()},
    }
    for at, (side, engine) in enumerate(zip(("producer", "consumer"), work.engines(), strict=True)):
        description[side] = [
            _rank(f"{side}-{rank}", engine.parallel.sharding(parts[0].units).ranges[rank.tp], cache)
            for rank, cache in works.caches(engine, work.pools[at], at)
        ]
    return description


def _rank(name: str, heads: range, cache: RankCache) -> dict[str, Any]:
    first, memory = cache.regions[0], cache.memory[0]
    layers = list(dict.fromkeys(region.layer for region in cache.regions))
    return {
        "name": name,
        "heads": [heads.start, heads.stop],
        "base": memory.address,
        "nbytes": memory.length,
        "block_stride": first.block_stride,
        "token_stride": first.state_stride,
        "head_stride": first.unit_stride,
        "buffers": [
            [layers.index(region.layer), region.part, region.base - memory.address]
            for region in cache.regions
        ],
    }


def digest(descriptors: list[np.ndarray]) -> dict[str, Any]:
    """Return the number of rows (source, target, bytes) and a digest of the sorted rows."""
    rows = np.concatenate(descriptors).astype(np.uint64)
    rows = rows[np.lexsort(rows.T[::-1])]
    return {"writes": len(rows), "sha256": hashlib.sha256(rows.tobytes()).hexdigest()}
