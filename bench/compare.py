"""Print what a change costs: this checkout's kvspec beside another's, in CPU time, in one run.

`python bench/compare.py OTHER_CHECKOUT [--rounds 15] [--only select]`. One process for each
checkout repeats each row in turn with the other, and the least of each is compared, so that a busy
machine falls on both and then out. More than 5 % is marked; nothing fails because of it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from pathlib import Path

from timing import forget, told

HERE = Path(__file__).resolve()
LIMIT = 1.05
"""A ratio above this is marked as slower, below its inverse as faster."""
LEAST = 4e-3
"""CPU seconds that a repetition takes at least: short calls are made several times."""
WIDTHS = (69, 8, 8, 5)
Work = Callable[[], object]


def rows() -> Iterator[tuple[str, Callable[[], Work]]]:
    """Yield the name of each row, and what makes its work, of the kvspec that is imported."""
    import works  # noqa: PLC0415 - imports kvspec: in the process of one checkout

    import kvspec  # noqa: PLC0415 - its public names alone, which older ones have too

    def slices() -> Work:
        spec = works.heads(8, 16)
        return lambda: [spec.get_tp_transfer_slices(r, 64, 48) for r in range(64)]

    def plan(work: works.Work) -> Work:
        producer, consumer = work.engines()
        return lambda: (forget(), kvspec.plan_transfer(producer, consumer))

    def table(work: works.Work) -> Work:
        made = kvspec.plan_transfer(*work.engines())
        target = made.consumer.parallel.ranks[0]
        source, pools = made.sources(target)[0], work.pools
        producer = works.plan_memory(made.producer, source, pools[0], 1 << 40)
        consumer = works.plan_memory(made.consumer, target, pools[1], 2 << 40)
        return lambda: kvspec.build_table(made, producer, consumer)

    def asked(name: str, work: works.Work) -> Work:
        made, request = table(work)(), work.request()
        return lambda: getattr(made, name)(works.afresh(request))

    yield "get_tp_transfer_slices, TP 48 -> 64, warm", slices
    for work in (works.W1, works.W2, works.W3, works.W4, works.W5, works.W6):
        yield f"plan_transfer, {work.name}, nothing cached", lambda work=work: plan(work)
        yield f"build_table, {work.name}", lambda work=work: table(work)
        yield f"select, {work.name}", lambda work=work: asked("select", work)
        yield f"descriptors, {work.name}", lambda work=work: asked("descriptors", work)


def serve() -> None:
    """Answer each name of a row that is read with the CPU seconds of one more call, or nothing."""
    named, ready = dict(rows()), dict[str, tuple[Work, int]]()
    print(*named, sep="\t", flush=True)
    for name in map(str.strip, sys.stdin):
        try:
            if name not in ready:
                ready[name] = named[name](), 0
                _seconds(*ready[name])  # warm
                ready[name] = ready[name][0], int(LEAST / _seconds(*ready[name]))
            print(_seconds(*ready[name]), flush=True)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            print(f"cannot: {type(error).__name__}: {error}".splitlines()[0], flush=True)


def _seconds(work: Work, more: int) -> float:
    """Return the mean CPU seconds of one call of *work* and so many *more* in a row."""
    began = time.process_time()
    for _ in range(1 + more):
        work()
    return (time.process_time() - began) / (1 + more)


class Checkout:
    """A process that runs the rows with the kvspec of one checkout."""

    def __init__(self, folder: Path) -> None:
        """Start it."""
        path = os.pathsep.join([str(folder), str(HERE.parent)])
        self.process = subprocess.Popen(
            [sys.executable, str(HERE), "--serve"],
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.names = self._line().split("\t")

    def seconds(self, name: str) -> float | str:
        """Return the CPU seconds of one call of a row, or why there are none."""
        print(name, file=self.process.stdin, flush=True)
        line = self._line()
        return line if line.startswith("cannot") else float(line)

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise SystemExit("a checkout's process ended: see above")
        return line.strip()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def compared(this: Checkout, other: Checkout, name: str, rounds: int) -> list[str]:
    """Return the cells of one row: each side's least CPU time, their ratio, and a mark."""
    least: dict[Checkout, float] = {}
    for turn in range(rounds):
        for side in (this, other) if turn % 2 else (other, this):
            taken = side.seconds(name)
            if isinstance(taken, str):
                return [name, "", "", "", f"{'this' if side is this else 'the other'} {taken}"]
            least[side] = min(taken, least.get(side, taken))
    ratio = least[this] / least[other]
    mark = "SLOWER" if ratio > LIMIT else "faster" if ratio < 1 / LIMIT else ""
    return [name, told(least[this]), told(least[other]), f"{ratio:.3f}", mark]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare the speed of two checkouts of kvspec.")
    parser.add_argument("other", nargs="?", help="the folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each row")
    parser.add_argument("--only", default="", help="rows with these letters in their names")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.serve:
        serve()
        return
    if given.other is None or not Path(given.other, "kvspec").is_dir() or given.rounds < 1:
        parser.error("expected the folder of another checkout, and at least one round")
    folders = (HERE.parents[1], Path(given.other).resolve())
    with closing(Checkout(folders[0])) as this, closing(Checkout(folders[1])) as other:
        print(_line(["what, in CPU time", "this", "other", "ratio", ""]))
        for name in this.names:
            if given.only in name:
                print(_line(compared(this, other, name, given.rounds)), flush=True)


def _line(cells: Sequence[str]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)]
    return "  ".join([*padded, cells[-1]]).rstrip()


if __name__ == "__main__":
    main()
