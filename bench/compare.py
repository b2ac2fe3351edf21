"""Compare the speed of this checkout's kvspec with another checkout's, in CPU time, in one run.

`python bench/compare.py OTHER_CHECKOUT [--rounds 15] [--only select]`. Each checkout has one
process, which imports that checkout's kvspec and this checkout's works. The processes repeat each
row in turn, and the least time of each is compared, so that a busy machine affects neither.
Differences of more than 5 % are marked. The exit status does not depend on them.
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

from timing import forget, readable

HERE = Path(__file__).resolve()
# A higher ratio is marked as slower, and a ratio below its inverse as faster. Smaller differences
# are not distinguished from noise.
LIMIT = 1.05
# A repetition has at least this many calls and takes at least this many CPU seconds.
CALLS, SECONDS = 3, 4e-3
WIDTHS = (69, 8, 8, 5)
Work = Callable[[], object]


def rows() -> Iterator[tuple[str, Callable[[], Work]]]:
    """Yield the name of each row and a function that prepares its work, for the imported kvspec."""
    import works  # noqa: PLC0415 - imports kvspec: in the process of one checkout

    # Only public names are used: an older checkout has the same ones. `works` hides the one that
    # was renamed. A row that an older checkout cannot run prints its error.
    import kvspec  # noqa: PLC0415

    def slices() -> Work:
        spec = works.heads(8, 16)
        return lambda: [spec.get_tp_transfer_slices(r, 64, 48) for r in range(64)]

    def plan(work: works.Work) -> Work:
        producer, consumer = work.engines()
        return lambda: (forget(), kvspec.plan_transfer(producer, consumer))

    def table(work: works.Work) -> Work:
        plan = kvspec.plan_transfer(*work.engines())
        target = plan.consumer.parallel.ranks[0]
        source, pools = plan.sources(target)[0], work.pools
        producer = works.plan_memory(plan.producer, source, pools[0], 1 << 40)
        consumer = works.plan_memory(plan.consumer, target, pools[1], 2 << 40)
        return lambda: kvspec.build_table(plan, producer, consumer)

    def lookup(method: str, work: works.Work) -> Work:
        built, request = table(work)(), work.request()
        return lambda: getattr(built, method)(works.afresh(request))

    yield "get_tp_transfer_slices, TP 48 -> 64, warm", slices
    for work in (works.W1, works.W2, works.W3, works.W4, works.W5, works.W6):
        yield f"plan_transfer, {work.name}, nothing cached", lambda work=work: plan(work)
        yield f"build_table, {work.name}", lambda work=work: table(work)
        yield f"select, {work.name}", lambda work=work: lookup("select", work)
        yield f"descriptors, {work.name}", lambda work=work: lookup("descriptors", work)


def serve() -> None:
    """Read names of rows from the input; print the CPU seconds of one call, or the error."""
    named, ready = dict(rows()), dict[str, Work]()
    print(*named, sep="\t", flush=True)
    for name in map(str.strip, sys.stdin):
        try:
            if name not in ready:
                ready[name] = named[name]()
            print(_seconds(ready[name]), flush=True)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            print(f"cannot: {type(error).__name__}: {error}".splitlines()[0], flush=True)


def _seconds(work: Work) -> float:
    """Return the CPU seconds of the fastest of several calls of *work* in a row."""
    taken: list[float] = []
    # The first call runs with the cold caches that the other process has left. A mean would depend
    # on the number of calls, and a fixed number was chosen differently for two equal checkouts.
    while len(taken) < CALLS or sum(taken) < SECONDS:
        began = time.process_time()
        work()
        taken.append(time.process_time() - began)
    return min(taken)


class Checkout:
    """A process that runs the rows with the kvspec of one checkout."""

    def __init__(self, folder: Path) -> None:
        """Start the process and read the names of its rows."""
        # The checkout comes first, before an installed kvspec. The works are this checkout's.
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
        """Return the CPU seconds of one call of a row, or the line that explains why it failed."""
        print(name, file=self.process.stdin, flush=True)
        line = self._line()
        return line if line.startswith("cannot") else float(line)

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process.stdout else ""
        if not line:
            raise SystemExit("the process of a checkout ended: its error is above")
        return line.strip()

    def close(self) -> None:
        """End the process."""
        self.process.kill()
        self.process.communicate()


def compared(this: Checkout, other: Checkout, name: str, rounds: int) -> list[str]:
    """Return the cells of one row: the least CPU time of each side, their ratio, and a mark."""
    least: dict[Checkout, float] = {}
    for turn in range(rounds):
        # The sides alternate in going first, because the second runs with a warmer cache.
        for side in (this, other) if turn % 2 else (other, this):
            taken = side.seconds(name)
            if isinstance(taken, str):
                return [name, "", "", "", f"{'this' if side is this else 'the other'} {taken}"]
            least[side] = min(taken, least.get(side, taken))
    ratio = least[this] / least[other]
    mark = "SLOWER" if ratio > LIMIT else "faster" if ratio < 1 / LIMIT else ""
    return [name, readable(least[this]), readable(least[other]), f"{ratio:.3f}", mark]


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare the speed of two checkouts of kvspec.")
    parser.add_argument("other", nargs="?", help="the folder of the other checkout")
    parser.add_argument("--rounds", type=int, default=15, help="repetitions of each row")
    parser.add_argument("--only", default="", help="rows with these letters in their names")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    chosen = parser.parse_args(arguments)
    if chosen.serve:
        serve()
        return
    if chosen.other is None or not Path(chosen.other, "kvspec").is_dir() or chosen.rounds < 1:
        parser.error("expected the folder of another checkout, and at least one round")
    folders = (HERE.parents[1], Path(chosen.other).resolve())
    with closing(Checkout(folders[0])) as this, closing(Checkout(folders[1])) as other:
        print(_line(["what, in CPU time", "this", "other", "ratio", ""]))
        for name in this.names:
            if chosen.only in name:
                print(_line(compared(this, other, name, chosen.rounds)), flush=True)


def _line(cells: Sequence[str]) -> str:
    padded = [cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=False)]
    return "  ".join([*padded, cells[-1]]).rstrip()


if __name__ == "__main__":
    main()
