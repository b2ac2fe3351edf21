"""The theorems: what is claimed of each function, for which sizes, and a fault that refutes it.

A theorem is a function of the library and of a path, or of the library alone. The first kind is
symbolic: it holds for all integers that it creates. The second kind tries every case up to a bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import z3
from library import Library, Plant
from symbolic import STUBS, Bool, Int, Path, Range, RefutedError, Seq, term, within

MOST = 2**63 - 1


class Theorem(NamedTuple):
    """One theorem.

    Attributes:
        name: Its name.
        about: The function that it is about.
        bound: For which sizes it holds.
        sentence: What it states.
        proof: The function that proves it.
        symbolic: Whether the proof takes a path and is run on symbolic integers.
        plants: Faults, each of which must refute it.
        quick: Whether the tests of the package prove it too.
    """

    name: str
    about: str
    bound: str
    sentence: str
    proof: Callable[..., int | None]
    symbolic: bool
    plants: tuple[Plant, ...]
    quick: bool


THEOREMS: list[Theorem] = []
ALL = "all sizes"


def theorem(
    about: str,
    *plants: tuple[str, str],
    bound: str = ALL,
    quick: bool = True,
    symbolic: bool = True,
    module: str | None = None,
) -> Callable[[Callable[..., int | None]], Callable[..., int | None]]:
    """Register a theorem about a function. Its docstring is the sentence.

    Args:
        about: The function, from `kvspec` on.
        plants: Text of the function's module, and the text that replaces it as a fault.
        bound: For which sizes it holds.
        quick: Whether the tests prove it too.
        symbolic: Whether it is run on symbolic integers.
        module: Module of the faults, if it is not that of the function.
    """
    words = about.split(".")
    home = module or ".".join(itertools.takewhile(lambda word: word[0].islower(), words[:2]))

    def register(proof: Callable[..., int | None]) -> Callable[..., int | None]:
        name = proof.__name__.replace("_", "-")
        faults = tuple(Plant(home, before, after) for before, after in plants)
        sentence = " ".join((proof.__doc__ or "").split())
        THEOREMS.append(Theorem(name, about, bound, sentence, proof, symbolic, faults, quick))
        return proof

    return register


def every(*conditions: object) -> Bool:
    """Return whether all *conditions* hold, without a decision."""
    return Bool(z3.And(*(term(condition) for condition in conditions)))


def some(*conditions: object) -> Bool:
    """Return whether any of *conditions* holds, without a decision."""
    return Bool(z3.Or(*(term(condition) for condition in conditions)))


def count(*conditions: object) -> Int:
    """Return how many of *conditions* hold."""
    return Int(z3.Sum([z3.If(term(condition), 1, 0) for condition in conditions]))


def check(name: str, claim: object) -> None:
    """Raise `RefutedError` unless the concrete *claim* holds."""
    if not claim:
        raise RefutedError(name)


# Arithmetic


@theorem("proof.symbolic.Path.quotient", bound="all integers", module="inputs")
def quotients_are_unique(_: Library, path: Path) -> None:
    """If n = d k + r = d q + s with 0 <= r, s < d, then k = q and r = s."""
    d, k, r, q, s = (path.int(name) for name in ("d", "k", "r", "q", "s"))
    path.assume(every(r >= 0, r < d, s >= 0, s < d, d * k + r == d * q + s))
    path.claim("not above", (k > q) >> (d * k >= d * q + d))
    path.claim("not below", (q > k) >> (d * q >= d * k + d))
    path.claim("unique", every(k == q, r == s))


@theorem("proof.symbolic.Int", bound="-9 to 9", symbolic=False, module="inputs")
def symbolic_integers_are_those_of_python(_: Library) -> int:
    """The operators and replacements return what Python returns."""
    path = Path.current = Path([])
    numbers = range(-9, 10)
    for a, b in itertools.product(numbers, repeat=2):
        x, y = Int(z3.IntVal(a)), Int(z3.IntVal(b))
        pairs = [(x + y, a + b), (x - y, a - b), (x * y, a * b), (-x, -a), (a + y, a + b)]
        pairs += [(a - y, a - b), (a * y, a * b), (STUBS["min"](x, y), min(a, b))]
        pairs += [(STUBS["max"](x, b), max(a, b)), (STUBS["len"](Range(x, y)), len(range(a, b)))]
        if b > 0:
            pairs += [(x // y, a // b), (x % y, a % b), (a // y, a // b), (a % y, a % b)]
            pairs += [*zip(divmod(x, y), divmod(a, b), strict=True)]
        orders = [(x < y, a < b), (x <= y, a <= b), (x > y, a > b), (x >= y, a >= b)]
        orders += [(x == y, a == b), (x != y, a != b)]
        same = every(*(left == right for left, right in pairs + orders))
        path.claim(f"{a}, {b}", same)
        check(f"range({a}, {b})", bool(Range(x, y)) == bool(range(a, b)))
        check(f"range({a}, 3)", (Range(x, Int(z3.IntVal(3))) == range(a, 3)) is True)
    return len(numbers) ** 2


# Intervals


@theorem(
    "ownership.intervals.shift", ("range(a.start + by, a.stop + by)", "range(a.start + by, a.stop)")
)
def shift_moves_each_member(lib: Library, path: Path) -> None:
    """The moved interval contains x if and only if the interval contains x - by."""
    start, stop, by, x = (path.int(name) for name in ("start", "stop", "by", "x"))
    moved = lib.intervals.shift(Range(start, stop), by)
    path.claim("same members", within(x, moved) == within(x - by, Range(start, stop)))


def _cover(lib: Library, path: Path, intervals: int) -> None:
    """Claim all that `cover_fault` promises, for any *intervals* intervals."""
    ranges = [Range(path.int(f"start{i}"), path.int(f"stop{i}")) for i in range(intervals)]
    target = Range(path.int("start"), path.int("stop"))
    x = path.int("x")
    held = count(*(within(x, interval) for interval in ranges))
    exact = some(every(within(x, target), held == 1), every(~within(x, target), held == 0))
    fault = lib.intervals.cover_fault(ranges, target)
    if fault is None:
        path.claim("each integer is in one interval, or in none outside of the target", exact)
        return
    where = fault.where
    path.claim("the place is not empty", every(Bool(term(where.start) < term(where.stop))))
    if fault.kind == "missing":
        path.claim("a missing integer is in the target", within(x, where) >> within(x, target))
        path.claim("a missing integer is in no interval", within(x, where) >> (held == 0))
    elif fault.kind == "double":
        path.claim("a double integer is in two intervals", within(x, where) >> (held >= 2))
    else:
        leaves = (Int(term(where.start)) < target.start) | (Int(term(where.stop)) > target.stop)
        path.claim("the interval leaves the target", leaves)
    # An interval that leaves the target is found first, even if a lower integer is missing.
    if fault.kind != "outside":
        path.claim("no lower integer is wrong", (x < where.start) >> exact)


COVER_FAULTS = (
    ("if interval.start > reached:", "if interval.start > reached + 1:"),
    ("if interval.start < reached:", "if interval.start < reached - 1:"),
    ("interval.stop > target.stop", "interval.stop > target.stop + 1"),
    ("min(reached, interval.stop)", "interval.stop"),
    ("if reached < target.stop:", "if reached < target.stop - 1:"),
)


@theorem("ownership.intervals.cover_fault", *COVER_FAULTS, bound="any 0 to 2 intervals")
def cover_of_two_is_exact(lib: Library, path: Path) -> None:
    """`cover_fault` returns None if and only if each integer is covered exactly once.

    Otherwise the range that it returns is missing, is covered several times, or leaves the target.
    """
    _cover(lib, path, 2 if path.int("both", 0, 1) == 1 else 1 if path.int("one", 0, 1) == 1 else 0)


@theorem("ownership.intervals.cover_fault", *COVER_FAULTS[:2], bound="any 3 intervals", quick=False)
def cover_of_three_is_exact(lib: Library, path: Path) -> None:
    """`cover_fault` returns None if and only if each integer is covered exactly once.

    Otherwise the range that it returns is missing, is covered several times, or leaves the target.
    """
    _cover(lib, path, 3)


@theorem(
    "ownership.intervals.cover_fault",
    ("reached = interval.stop", "reached = target.stop"),
    bound="any 2 of 3 intervals",
)
def cover_joins_neighbours(lib: Library, path: Path) -> None:
    """Two intervals that touch give the same answer as one. By induction, any number does."""
    start, stop, a, b, c = (path.int(name) for name in ("start", "stop", "a", "b", "c"))
    path.assume(every(a < b, b < c))
    other = Range(path.int("d"), path.int("e"))
    target = Range(start, stop)
    # Without a third interval between them in the order, which would be a fault of its own.
    path.assume((other.start >= c) | (other.stop <= a) | (other.start >= other.stop))
    apart = lib.intervals.cover_fault([Range(a, b), Range(b, c), other], target)
    joined = lib.intervals.cover_fault([Range(a, c), other], target)
    path.claim("both are exact, or none", (apart is None) == (joined is None))


# Shardings


def _even(lib: Library, path: Path, ranks: list[Int], units: Int, tp: Int, pack: Int) -> list[Any]:
    """Return the ranges of *ranks*, by running the loop of `even_sharding` for these only."""
    made: list[Any] = []
    real, lib.sharding.Sharding = lib.sharding.Sharding, lambda _, ranges: made.extend(ranges)
    try:
        with path.rounds(*ranks):
            lib.sharding.even_sharding.__wrapped__(units, tp, pack)
    finally:
        lib.sharding.Sharding = real
    return made


def _sizes(path: Path, *, replicas: bool | None = None) -> tuple[Int, Int, Int, Int]:
    """Return any units, ranks, granularity, and packs."""
    packs, tp, pack = (path.int(name, 1, MOST) for name in ("packs", "tp", "granularity"))
    units = path.int("units", 1, MOST)
    path.assume(units == packs * pack)
    # The library divides; this is the quotient that it must find.
    path.quotient(units, pack, packs)
    if replicas is not None:
        path.assume((packs < tp) if replicas else (packs >= tp))
    return units, tp, pack, packs


EVEN = "ownership.sharding.even_sharding"


@theorem(
    EVEN,
    ("else start + 1", "else start"),
    ("range(start * granularity,", "range(start * granularity - 1,"),
)
def even_ranges_are_whole_packs(lib: Library, path: Path) -> None:
    """Each rank owns at least one pack, only whole packs, and only units that exist."""
    units, tp, pack, _ = _sizes(path)
    rank = path.int("rank", 0, tp - 1)
    (own,) = _even(lib, path, [rank], units, tp, pack)
    path.claim("inside", every(own.start >= 0, own.stop <= units, own.start < own.stop))
    first, last = path.int("first"), path.int("last")
    path.assume(every(own.start - first * pack < pack, own.start - first * pack >= 0))
    path.assume(every(own.stop - last * pack < pack, own.stop - last * pack >= 0))
    path.claim("whole packs", every(own.start == first * pack, own.stop == last * pack))


@theorem(
    EVEN, ("stop = (rank + 1) * packs // tp_size if", "stop = (rank + 1) * packs // tp_size + 1 if")
)
def even_ranges_are_equal_or_disjoint(lib: Library, path: Path) -> None:
    """The ranges of two ranks are equal, or the lower rank's ends before the other's begins."""
    units, tp, pack, _ = _sizes(path)
    low, high = path.int("low", 0), path.int("high", 0, tp - 1)
    path.assume(low < high)
    a, b = _even(lib, path, [low, high], units, tp, pack)
    path.claim("equal or apart", (a.stop <= b.start) | ((a.start == b.start) & (a.stop == b.stop)))


@theorem(EVEN, ("start = rank * packs // tp_size", "start = (rank * packs + 1) // tp_size"))
def even_ranges_cover_the_units(lib: Library, path: Path) -> None:
    """Each unit belongs to a rank.

    Rank ((p + 1) T - 1) // U owns pack p, if there are U packs on T ranks.
    """
    units, tp, pack, packs = _sizes(path, replicas=False)
    number = path.int("pack", 0, packs - 1)
    rank = ((number + 1) * tp - 1) // packs
    path.claim("the rank exists", every(rank >= 0, rank < tp))
    (own,) = _even(lib, path, [rank], units, tp, pack)
    path.claim(
        "it owns the pack", every(own.start <= number * pack, (number + 1) * pack <= own.stop)
    )


@theorem(EVEN, ("start = rank * packs // tp_size", "start = (rank * packs + 1) // tp_size"))
def even_replicas_cover_the_units(lib: Library, path: Path) -> None:
    """With fewer packs than ranks, each pack has an owner, and two packs differ by one at most.

    The owners of pack p are the ranks from ceil(p T / U) to ceil((p + 1) T / U) - 1.
    """
    units, tp, pack, packs = _sizes(path, replicas=True)
    number, rank = path.int("pack", 0, packs - 1), path.int("rank", 0, tp - 1)
    first, end = -(-number * tp // packs), -(-(number + 1) * tp // packs)
    (own,) = _even(lib, path, [rank], units, tp, pack)
    path.claim("rounded up", every(first * packs >= number * tp, (first - 1) * packs < number * tp))
    path.claim("owners are ranks", every(first >= 0, first < end, end <= tp))
    owns = every(own.start == number * pack, own.stop == (number + 1) * pack)
    path.claim("exactly these own it", owns == within(rank, Range(first, end)))
    least = tp // packs
    path.claim("balanced", every(end - first >= least, end - first <= least + 1))


@theorem(EVEN, ("(rank + 1) * packs // tp_size if", "max(rank, 1) * packs // tp_size if"))
def even_ranges_are_balanced(lib: Library, path: Path) -> None:
    """If there are as many packs as ranks or more, two ranks differ by at most one pack."""
    units, tp, pack, packs = _sizes(path, replicas=False)
    rank = path.int("rank", 0, tp - 1)
    (own,) = _even(lib, path, [rank], units, tp, pack)
    least = packs // tp
    path.claim("at least", own.stop - own.start >= least * pack)
    path.claim("at most", own.stop - own.start <= (least + 1) * pack)


@theorem(EVEN, ("start = rank * packs // tp_size", "start = rank * (packs // tp_size)"))
def even_ranges_are_those_of_vllm(lib: Library, path: Path) -> None:
    """If U = k T, rank r owns k heads from r k. If T = k U, it owns the one head r // k."""
    factor, rank = path.int("k", 1, MOST), path.int("rank", 0)
    if path.int("more_heads", 0, 1) == 1:
        tp = path.int("tp", 1, MOST)
        units = factor * tp
    else:
        units = path.int("units", 1, MOST)
        tp = factor * units
    path.assume(every(units <= MOST, tp <= MOST, rank < tp))
    (own,) = _even(lib, path, [rank], units, tp, 1)  # type: ignore[arg-type]
    if units >= tp:
        path.claim(
            "heads", every(own.start == rank * (units // tp), own.stop - own.start == units // tp)
        )
    else:
        path.claim("head", every(own.start == rank // factor, own.stop == own.start + 1))


@theorem(
    EVEN,
    (
        "    for rank in range(tp_size):",
        "    for rank in range(tp_size):\n        packs += len(ranges)",
    ),
)
def even_rounds_do_not_depend_on_each_other(lib: Library, path: Path) -> None:
    """The loop over the ranks gives a rank the same range whatever rank it was run for before."""
    units, tp, pack, _ = _sizes(path)
    first, second = path.int("first", 0, tp - 1), path.int("second", 0, tp - 1)
    _, after = _even(lib, path, [first, second], units, tp, pack)
    (alone,) = _even(lib, path, [second], units, tp, pack)
    path.claim("same", every(after.start == alone.start, after.stop == alone.stop))


@theorem("ownership.intervals.plain_range", ("value.start < 0", "value.start < -1"))
def plain_range_refuses_negative_starts(lib: Library, path: Path) -> None:
    """An interval is returned with the same members, or refused because it starts below 0."""
    given, x = Range(path.int("start"), path.int("stop")), path.int("x")
    try:
        own = lib.intervals.plain_range("shardings", given)
    except lib.intervals.SpecError:
        path.claim("negative", given.start < 0)
        return
    path.claim("same members", within(x, own) == within(x, given))
    path.claim("from 0", given.start >= 0)


@theorem(
    "ownership.sharding.check_granularity",
    ("or own.stop % granularity", "or own.start % granularity"),
)
def granularity_means_whole_packs(lib: Library, path: Path) -> None:
    """A sharding is accepted if and only if each range starts and stops at a multiple."""
    pack, own = path.int("granularity", 1), Range(path.int("start", 0), path.int("stop", 0))
    sharding = type("OneRange", (), {"owned": (own,)})
    whole = every(own.start % pack == 0, own.stop % pack == 0)
    try:
        lib.sharding.check_granularity("shardings", sharding, pack)
    except lib.sharding.SpecError:
        path.claim("not whole", ~whole)
        return
    path.claim("whole", whole)


def _tiling(path: Path, name: str, units: Int, *watched: Int) -> tuple[Any, Int]:
    """Return any sharding whose distinct ranges tile the units, and the number of its ranges.

    The bounds are an unknown function that grows. z3 is told so for the *watched* indices.
    """
    number = path.int(f"{name}_ranges", 1)
    bound = z3.Function(f"{name}_bound", z3.IntSort(), z3.IntSort())

    def at(index: Any) -> Int:
        return Int(bound(term(index)))

    path.assume(every(at(0) == 0, at(number) == units))

    def grow(*indices: Any) -> None:
        indices = (*indices, 0, number)
        for a, b in itertools.permutations(indices, 2):
            known = every(Bool(term(a) >= 0), Bool(term(b) <= term(number)))
            path.assume(every(known, Bool(term(a) < term(b))) >> (at(a) < at(b)))
            path.assume((Bool(term(a) == term(b))) >> (at(a) == at(b)))

    grow(*watched, *(index + 1 for index in watched))
    sharding = type("Tiling", (), {})()
    sharding.owned = Seq(number, lambda index: Range(at(index), at(index + 1)))
    sharding._starts, sharding._stops = Seq(number, at), Seq(number, lambda index: at(index + 1))
    sharding.grow, sharding.at = grow, at
    return sharding, number


@theorem(
    "ownership.sharding.Sharding.classes",
    ("bisect_right(self._stops, units.start)", "bisect_right(self._starts, units.start)"),
    ("bisect_left(self._starts, units.stop)", "bisect_right(self._starts, units.stop)"),
    module="ownership.sharding",
)
def classes_are_the_intersecting_ranges(lib: Library, path: Path) -> None:
    """`classes` returns a range if and only if the range contains one of the given units."""
    units, index = path.int("units", 1), path.int("index", 0)
    sharding, number = _tiling(path, "producer", units, index)
    path.assume(index < number)
    path.watched = [index]
    asked, owned = Range(path.int("start", 0), path.int("stop", 0, units)), sharding.owned[index]
    classes = lib.sharding.Sharding.classes(sharding, asked)
    common = every(asked.start < asked.stop, asked.start < owned.stop, owned.start < asked.stop)
    path.claim("intersects", within(index, classes) == common)


# Slices


def _read(lib: Library, path: Path) -> tuple[Any, Any, list[Any], Range, Any]:
    """Run the loop of `consumer_unit_ranges` for two neighbouring classes, or for the only one."""
    units, index = path.int("units", 1), path.int("index", 0)
    sharding, number = _tiling(path, "producer", units, index, index + 1)
    path.assume(index < number)
    own = Range(path.int("start", 0), path.int("stop", 0, units))
    path.assume(own.start < own.stop)
    path.watched = [index, index + 1]
    holder = z3.Function("holder", z3.IntSort(), z3.IntSort())
    sharding.holders = Seq(number, lambda at: (Int(holder(term(at))),))
    sharding.classes = lambda asked: lib.sharding.Sharding.classes(sharding, asked)
    classes = sharding.classes(own)
    sharding.grow(
        index,
        index + 1,
        index + 2,
        classes.start,
        classes.stop,
        classes.start + 1,
        classes.stop - 1,
    )
    path.assume(within(index, classes))
    sharding.classes = lambda _: classes
    consumer = type("Consumer", (), {"ranges": (own,)})
    two = bool(index + 1 < classes.stop)
    with path.rounds(*([index, index + 1] if two else [index])):
        ranges = lib.slices.consumer_unit_ranges(consumer, sharding, 0, None)
    return sharding, index, ranges, own, classes


SLICES = "ownership.slices.consumer_unit_ranges"


@theorem(
    SLICES,
    (
        "max(own.start, units.start), min(own.stop, units.stop)",
        "units.start, min(own.stop, units.stop)",
    ),
    (
        "max(own.start, units.start), min(own.stop, units.stop)",
        "max(own.start, units.start), units.stop",
    ),
    module="ownership.slices",
)
def slices_tile_the_units_of_a_rank(lib: Library, path: Path) -> None:
    """A rank reads each of its units exactly once, and no other unit.

    The ranges begin and end where its own do, and each begins where the one before ends.
    """
    _, index, ranges, own, classes = _read(lib, path)
    first = ranges[0]
    path.claim("not empty", Bool(term(first.start) < term(first.stop)))
    path.claim("begins", (index == classes.start) >> Bool(term(first.start) == term(own.start)))
    if len(ranges) > 1:
        path.claim("neighbours", Bool(term(first.stop) == term(ranges[1].start)))
    else:
        path.claim("ends", Bool(term(first.stop) == term(own.stop)))


@theorem(SLICES, ("UnitRange(replicas[0], start, stop", "UnitRange(replicas[0], start, own.stop"))
def slices_come_from_an_owner(lib: Library, path: Path) -> None:
    """Each range is owned by the consumer rank, and by the producer rank that it is read from."""
    sharding, index, ranges, own, _ = _read(lib, path)
    read, held = ranges[0], sharding.owned[index]
    path.claim("the consumer's", every(read.start >= own.start, read.stop <= own.stop))
    path.claim("the producer's", every(read.start >= held.start, read.stop <= held.stop))
    path.claim("from its holder", read.producer == sharding.holders[index][0])


@theorem(
    SLICES,
    (
        "max(own.start, units.start), min(own.stop, units.stop)",
        "max(own.start, units.start), max(own.stop, units.stop)",
    ),
    bound="any shardings of 2 and 3 ranks, policy spread",
    quick=False,
)
def slices_of_few_ranks_tile(lib: Library, path: Path) -> None:
    """A rank reads each of its units exactly once, and no other unit.

    Here `Sharding`, `bisect` and `choose` run too, for any ranges that `explicit_sharding` accepts.
    """
    units, x = path.int("units", 1), path.int("x", 0)

    def any_sharding(name: str, ranks: int) -> Any:
        ranges = tuple(
            Range(path.int(f"{name}_start{r}"), path.int(f"{name}_stop{r}")) for r in range(ranks)
        )
        return lib.sharding.explicit_sharding("shardings", units, ranges, ranks)

    try:
        consumer, producer = any_sharding("consumer", 2), any_sharding("producer", 3)
    except lib.sharding.SpecError:
        return
    chooser = lib.replicas.ReplicaChooser(lib.replicas.POLICIES["spread"], 0, ((), ()))
    own = consumer.ranges[0]
    classes = lib.slices._replica_class
    lib.slices._replica_class = classes.__wrapped__
    try:
        ranges = lib.slices.consumer_unit_ranges(consumer, producer, 0, chooser)
    finally:
        lib.slices._replica_class = classes
    path.claim(
        "once", count(*(within(x, r) for r in ranges)) == Int(z3.If(term(within(x, own)), 1, 0))
    )
    for read in ranges:
        path.claim("owned", within(x, read) >> within(x, producer.ranges[read.producer]))


# Replicas


class Numbers(Seq):
    """The numbers 0, 1, ... as a sequence of symbolic length, in which `index` is known."""

    def __init__(self, length: Int, known: Any = None) -> None:
        """Take the length, and the number whose place is asked."""
        super().__init__(length, lambda index: index)
        self.known = known

    def index(self, _: object) -> Any:
        """Return the place of the known number."""
        return self.known


def _chosen(
    lib: Library,
    path: Path,
    number: Int,
    replicas: Int,
    consumers: Int,
    salt: Int,
    *,
    policy: str = "spread",
    blocks: tuple[Any, ...] = (),
) -> Any:
    among = type(
        "Class", (), {"replicas": Numbers(replicas), "consumers": Numbers(consumers, number)}
    )
    chooser = lib.replicas.ReplicaChooser(lib.replicas.POLICIES[policy], salt, ((), ()))
    with path.rounds(*blocks):
        return lib.replicas.ReplicaChooser.choose(chooser, 0, among)[1]


def _readers(path: Path) -> tuple[Int, Int, Int, Int]:
    replicas, consumers = path.int("replicas", 1), path.int("consumers", 1)
    return path.int("number", 0, consumers - 1), replicas, consumers, path.int("salt", 0)


CHOOSE = "ownership.replicas.ReplicaChooser.choose"
PLACE = "place = (number * len(replicas) // consumers + self.salt) % len(replicas)"


@theorem(
    CHOOSE,
    (PLACE, "place = (number * len(replicas) // consumers) % len(replicas) + self.salt"),
    module="ownership.replicas",
)
def spread_chooses_a_replica(lib: Library, path: Path) -> None:
    """Each reader reads one replica, which exists, with all of its blocks."""
    number, replicas, consumers, salt = _readers(path)
    ((place, stripe),) = _chosen(lib, path, number, replicas, consumers, salt)
    path.claim("exists", every(place >= 0, place < replicas))
    check("all blocks", stripe.whole)


@theorem(
    CHOOSE,
    (PLACE, "place = number * number % len(replicas)"),
    (PLACE, "place = number // consumers"),
    module="ownership.replicas",
)
def spread_is_fair(lib: Library, path: Path) -> None:
    """The numbers of readers of two replicas differ by at most one.

    Without salt, the readers of replica k are those from ceil(k C / M) to ceil((k + 1) C / M) - 1.
    """
    number, replicas, consumers, _ = _readers(path)
    replica = path.int("replica", 0, replicas - 1)
    ((place, _),) = _chosen(lib, path, number, replicas, consumers, 0)  # type: ignore[arg-type]
    first, end = -(-replica * consumers // replicas), -(-(replica + 1) * consumers // replicas)
    path.claim("readers", (place == replica) == within(number, Range(first, end)))
    least = consumers // replicas
    path.claim("fair", every(end - first >= least, end - first <= least + 1))


@theorem(
    CHOOSE,
    (PLACE, "place = min(number * len(replicas) // consumers + self.salt, len(replicas) - 1)"),
    module="ownership.replicas",
)
def salt_only_rotates(lib: Library, path: Path) -> None:
    """Two readers choose the same replica with a salt if and only if they do without it."""
    number, replicas, consumers, salt = _readers(path)
    other = path.int("other", 0, consumers - 1)
    places, salted = [], []
    for reader in (number, other):
        ((place, _),) = _chosen(lib, path, reader, replicas, consumers, 0)  # type: ignore[arg-type]
        plain = reader * replicas // consumers
        path.quotient(plain, replicas, 0)
        path.claim("without salt", place == plain)
        places.append(plain)
        ((place, _),) = _chosen(lib, path, reader, replicas, consumers, salt)
        salted.append(place)
    (a, b), (c, d) = places, salted
    if a == b:
        path.claim("same", c == d)
        return
    low, high = (a, b) if a < b else (b, a)
    # If both had the same rest, their difference would be a multiple of the replicas.
    laps = (high + salt) // replicas - (low + salt) // replicas
    path.quotient(high - low, replicas, 0)
    if c == d:
        path.quotient(high - low, replicas, laps)
    path.claim("different", c != d)


STRIPED = "replicas[(block * consumers + number + self.salt) % len(replicas)]"


@theorem(
    CHOOSE,
    (STRIPED, STRIPED.replace("block * consumers + number", "block + number")),
    (
        "step = len(replicas) // gcd(consumers, len(replicas))",
        "step = gcd(consumers, len(replicas))",
    ),
    module="ownership.replicas",
)
def stripe_takes_the_replicas_in_turns(lib: Library, path: Path) -> None:
    """Reader i of C reads block b from replica (b C + i + salt) mod M, and from no other one.

    So the reads of all blocks by all readers go round the replicas one by one.
    """
    common, m, c = path.int("gcd", 1), path.int("m", 2), path.int("c", 1)
    replicas, consumers = path.int("replicas", 2), path.int("consumers", 1)
    path.assume(every(replicas == common * m, consumers == common * c))
    path.common_divisor(consumers, replicas, common)
    number, salt = path.int("number", 0, consumers - 1), path.int("salt", 0)
    path.claim("the quotient", replicas // common == m)
    path.assume(m * consumers <= lib.replicas.MAX_STRIPES)
    path.assume(m <= MOST)
    block, turn = path.int("block", 0), path.int("turn", 0)
    # `first` is the block of the stripe that contains `block`, by the theorem on stripes.
    first = path.int("first", 0, m - 1)
    path.assume(block == turn * m + first)
    ((replica, stripe),) = _chosen(
        lib, path, number, replicas, consumers, salt, policy="stripe", blocks=(first,)
    )
    path.quotient(block, m, turn)
    path.claim("the step", stripe.step == m)
    path.quotient(block, stripe.step, turn)
    path.claim("holds the block", stripe.holds(block))
    laps = turn * c
    path.claim("whole laps", (block - first) * consumers == laps * replicas)
    place = block * consumers + number + salt
    path.quotient(first * consumers + number + salt, replicas, place // replicas - laps)
    path.claim("in turns", replica == place % replicas)


@theorem(
    "ownership.replicas._nearest",
    ("return near or replica_class.replicas", "return near[:1] or replica_class.replicas"),
    bound="any nodes of 3 replicas",
)
def nearest_stays_on_the_node(lib: Library, path: Path) -> None:
    """The candidates are all replicas on the reader's node, or all replicas if there are none."""
    nodes = tuple(path.int(f"node{replica}") for replica in range(3))
    mine = path.int("mine")
    members = lib.replicas.ReplicaClass((0, 1, 2), (0,))
    near = lib.replicas._nearest(0, members, (nodes, (mine,)))
    here = [nodes[replica] == mine for replica in range(3)]
    none = ~some(*here)
    for replica in range(3):
        path.claim("candidates", Bool(z3.BoolVal(replica in near)) == (here[replica] | none))


# Stripes


@theorem(
    "ownership.stripes.Stripe.holds",
    ("block % self.step == self.first", "block // self.step == self.first"),
    module="ownership.stripes",
)
def stripes_of_a_step_divide_the_blocks(lib: Library, path: Path) -> None:
    """Block b is in exactly one stripe of a step: that whose first block is b mod step."""
    step = path.int("step", 1, MOST)
    first, block = path.int("first", 0, step - 1), path.int("block", 0)
    stripe = lib.stripes.Stripe(first, step)
    path.claim("one", stripe.holds(block) == (block % step == first))
    path.claim("period", stripe.holds(block) == stripe.holds(block % step))


@theorem(
    "ownership.stripes.Stripe",
    ("self.first, least=0) >=", "self.first, least=0) >"),
    module="ownership.stripes",
)
def stripe_refuses_a_first_block_beyond_its_step(lib: Library, path: Path) -> None:
    """A stripe is accepted if and only if 0 <= first < step."""
    first, step = path.int("first", None, MOST), path.int("step", None, MOST)
    try:
        lib.stripes.Stripe(first, step)
    except lib.stripes.SpecError:
        path.claim("refused", ~every(first >= 0, first < step))
        return
    path.claim("accepted", every(first >= 0, first < step))


@theorem(
    "ownership.stripes.times_held",
    ("min(*counts, 1)", "min(max(counts), 1)"),
    ("min(max(counts), 2)", "max(counts)"),
    ("max((stripe.step", "min((stripe.step"),
    bound="4 stripes, step <= 5",
    symbolic=False,
)
def times_held_counts_each_block(lib: Library) -> int:
    """It returns 1 if each block is in exactly one stripe.

    It returns 0 if some block is in none, and otherwise 2.
    """
    cases = 0
    for step in range(1, 6):
        kinds = [lib.stripes.Stripe(first, step) for first in range(step)] + [lib.stripes.WHOLE]
        for size in range(5):
            for stripes in itertools.combinations_with_replacement(kinds, size):
                held = [sum(block % s.step == s.first for s in stripes) for block in range(step)]
                expected = 0 if min(held) == 0 else 1 if set(held) == {1} else 2
                check(f"{stripes}", lib.stripes.times_held(stripes) == expected)
                cases += 1
    return cases


# Tokens


def _cyclic(lib: Library, path: Path, side: str = "") -> Any:
    size = path.int(f"size{side}", 1)
    return lib.tokens.BlockCyclic(
        path.int(f"rank{side}", 0, size - 1), size, path.int(f"interleave{side}", 1)
    )


TOKENS = "ownership.tokens.BlockCyclic"


@theorem(
    f"{TOKENS}.owns",
    ("// self.interleave % self.size, self.rank", "% self.interleave % self.size, self.rank"),
    module="ownership.tokens",
)
def each_position_has_one_owner(lib: Library, path: Path) -> None:
    """Each position has an owner, and two different ranks never own the same position.

    The rank of turn t is t mod C, and a turn is one interleave of positions.
    """
    size, interleave = path.int("size", 1), path.int("interleave", 1)
    turn, inside = path.int("turn", 0), path.int("inside", 0, interleave - 1)
    rank, position = path.int("rank", 0, size - 1), turn * interleave + inside
    path.quotient(position, interleave, turn)
    owner = turn % size
    path.claim("the owner exists", every(owner >= 0, owner < size))
    path.quotient(position // interleave, size, turn // size)
    owns = lib.tokens.BlockCyclic(rank, size, interleave).owns(position)
    path.claim("only the owner owns it", owns == (rank == owner))


@theorem(
    f"{TOKENS}.position",
    (
        "(rounds * self.size + self.rank) * self.interleave + rest",
        "(rounds * self.size + self.rank) * self.interleave",
    ),
    module="ownership.tokens",
)
def position_is_owned_and_ascends(lib: Library, path: Path) -> None:
    """The rank owns the position of each local index, and a higher index has a higher position."""
    cyclic, index = _cyclic(lib, path), path.int("n", 0)
    position, after = cyclic.position(index), cyclic.position(index + 1)
    path.claim("ascends", position < after)
    rounds = index // cyclic.interleave
    turn = rounds * cyclic.size + cyclic.rank
    path.quotient(position, cyclic.interleave, turn)
    path.quotient(position // cyclic.interleave, cyclic.size, rounds)
    path.claim("owned", cyclic.owns(position))


@theorem(
    f"{TOKENS}.local",
    ("before = rest - self.rank * self.interleave", "before = rest - self.rank"),
    ("min(max(before, 0), self.interleave)", "max(before, 0)"),
    module="ownership.tokens",
)
def local_counts_the_owned_positions(lib: Library, path: Path) -> None:
    """The local index is the number of owned positions before the given one.

    It is 0 at position 0, and each position adds one if the rank owns it.
    """
    cyclic = _cyclic(lib, path)
    size, interleave = cyclic.size, cyclic.interleave
    # Any position: its round, its turn in the round, and its place in the turn.
    rounds, turn = path.int("round", 0), path.int("turn", 0, size - 1)
    inside = path.int("inside", 0, interleave - 1)
    position, period = (rounds * size + turn) * interleave + inside, interleave * size
    path.claim("in the round", within(turn * interleave + inside, Range(0, period)))
    path.quotient(position, period, rounds)
    path.quotient(position, interleave, rounds * size + turn)
    path.quotient(position // interleave, size, rounds)
    zero = Int(z3.IntVal(0))
    path.quotient(zero, period, 0)
    path.claim("begins", cyclic.local(zero) == 0)
    owns = Int(z3.If(term(cyclic.owns(position)), 1, 0))
    before = (turn < cyclic.rank) >> ((turn + 1) * interleave <= cyclic.rank * interleave)
    after = (turn > cyclic.rank) >> (turn * interleave >= (cyclic.rank + 1) * interleave)
    path.claim("place of the turn", every(before, after))
    if turn * interleave + inside + 1 == period:
        path.quotient(position + 1, period, rounds + 1)
    else:
        path.quotient(position + 1, period, rounds)
    path.claim("one more", cyclic.local(position + 1) == cyclic.local(position) + owns)


@theorem(
    f"{TOKENS}.local",
    ("rounds * self.interleave + min", "rounds * self.size + min"),
    module="ownership.tokens",
)
def local_is_the_inverse_of_position(lib: Library, path: Path) -> None:
    """`local` returns the index that `position` was given."""
    cyclic, index = _cyclic(lib, path), path.int("n", 0)
    position = cyclic.position(index)
    rounds, rest = index // cyclic.interleave, index % cyclic.interleave
    period = cyclic.interleave * cyclic.size
    place = cyclic.rank * cyclic.interleave + rest
    path.claim("place", every(place >= 0, place < period))
    path.claim("round", every(position // period == rounds, position % period == place))
    path.claim("inverse", cyclic.local(position) == index)


@theorem(
    f"{TOKENS}.local",
    ("np.clip(before, 0, self.interleave)", "np.maximum(before, 0)"),
    ("np.clip(before, 0, self.interleave)", "np.minimum(before, self.interleave)"),
    bound="interleaves <= 5, 1 to 4 context ranks, 3 rounds",
    symbolic=False,
    module="ownership.tokens",
)
def local_of_an_array_is_that_of_its_members(lib: Library) -> int:
    """`local` returns for an array what it returns for each of its positions."""
    cases = 0
    for size, interleave in itertools.product(range(1, 5), range(1, 6)):
        positions = np.arange(3 * size * interleave)
        for rank in range(size):
            cyclic = lib.tokens.BlockCyclic(rank, size, interleave)
            found = np.asarray(cyclic.local(positions)).tolist()
            check(f"{cyclic}", found == [cyclic.local(p) for p in positions.tolist()])
            cases += len(positions)
    return cases


@theorem(
    f"{TOKENS}.same_sharding",
    ("(self.size, self.interleave) == (other.size, other.interleave)", "self.size == other.size"),
    module="ownership.tokens",
)
def same_sharding_means_equal_owners(lib: Library, path: Path) -> None:
    """In equal shardings, equal ranks own the same positions."""
    a, b, position = _cyclic(lib, path, "_a"), _cyclic(lib, path, "_b"), path.int("p", 0)
    if not (a.same_sharding(b) and a.rank == b.rank):
        return
    turn = position // a.interleave
    if a.size == 1:
        for side in (a, b):
            path.quotient(position // side.interleave, side.size, position // side.interleave)
    else:
        path.quotient(position, b.interleave, turn)
        path.quotient(position // b.interleave, b.size, turn // a.size)
    path.claim("the same", a.owns(position) == b.owns(position))


def _two(lib: Library, path: Path) -> tuple[Any, Any, Int, Int, Int]:
    """Return two contexts, the gcd of their periods and the two factors."""
    a, b = _cyclic(lib, path, "_a"), _cyclic(lib, path, "_b")
    common, factor_a, factor_b = (
        path.int("gcd", 1),
        path.int("factor_a", 1),
        path.int("factor_b", 1),
    )
    path.assume(
        every(
            a.interleave * a.size == common * factor_a, b.interleave * b.size == common * factor_b
        )
    )
    path.common_divisor(a.interleave * a.size, b.interleave * b.size, common)
    return a, b, common, factor_a, factor_b


def _owned(path: Path, cyclic: Any, name: str) -> tuple[Int, Int, Int]:
    """Return any position that *cyclic* owns, its round, and its place in the turn."""
    rounds, inside = (
        path.int(f"round_{name}", 0),
        path.int(f"inside_{name}", 0, cyclic.interleave - 1),
    )
    return (rounds * cyclic.size + cyclic.rank) * cyclic.interleave + inside, rounds, inside


MEET = "ownership.tokens.meet"


@theorem(
    MEET,
    ("step < b.interleave", "step < b.interleave - 1"),
    ("least = 1 - a.interleave", "least = 2 - a.interleave"),
)
def meet_finds_each_common_position(lib: Library, path: Path) -> None:
    """If two ranks own a common position, `meet` is true."""
    a, b, common, factor_a, factor_b = _two(lib, path)
    (p, round_a, inside_a), (q, round_b, inside_b) = _owned(path, a, "a"), _owned(path, b, "b")
    path.assume(p == q)
    if a.same_sharding(b):
        if a.size == 1:
            path.claim("one rank", every(a.rank == b.rank))
            return
        turn_a, turn_b = round_a * a.size + a.rank, round_b * b.size + b.rank
        path.quotient(p, a.interleave, turn_a)
        path.quotient(p, a.interleave, turn_b)
        path.quotient(turn_a, a.size, round_a)
        path.quotient(turn_a, a.size, round_b)
        path.claim("rank", a.rank == b.rank)
        return
    # The difference of the places in the turns is congruent to the distance of the first turns.
    shift = inside_b - inside_a
    distance = a.rank * a.interleave - b.rank * b.interleave
    turns = round_b * factor_b - round_a * factor_a
    path.claim("congruent", distance - shift == turns * common)
    least = 1 - a.interleave
    smallest = (distance - least) % common
    laps = (distance - least) // common - turns
    path.claim("a multiple", shift - least - smallest == laps * common)
    path.claim("no lap back", (laps < 0) >> (laps * common <= -common))
    path.claim("the smallest", shift >= least + smallest)
    path.claim("meet", every(lib.tokens.meet.__wrapped__(a, b)))


@theorem(
    MEET,
    (
        "return least + (distance - least) % step < b.interleave",
        "return least + (distance - least) % step <= b.interleave",
    ),
    ("a.size == 1 or a.rank == b.rank", "a.size == 1 or True"),
)
def meet_is_true_only_for_a_common_position(lib: Library, path: Path) -> None:
    """If `meet` is true, two ranks own a common position.

    The proof constructs it with the numbers of Bezout: gcd = x A + y B for the periods A and B.
    """
    a, b, common, factor_a, factor_b = _two(lib, path)
    x, y = path.int("x"), path.int("y")
    path.assume(x * factor_a + y * factor_b == 1)
    if not lib.tokens.meet.__wrapped__(a, b):
        return
    if a.same_sharding(b):
        position = a.rank * a.interleave
        path.claim("first turn of both", every(some(a.rank == b.rank, a.size == 1)))
        path.claim("one interleave or one rank", some(a.size == 1, a.interleave == b.interleave))
        del position
        return
    distance = a.rank * a.interleave - b.rank * b.interleave
    least = 1 - a.interleave
    shift = least + (distance - least) % common
    laps = -((distance - least) // common)
    path.claim("shift", shift - distance == laps * common)
    inside_a = Int(z3.If(term(shift) < 0, term(-shift), 0))
    inside_b = inside_a + shift
    path.claim(
        "places",
        every(inside_a >= 0, inside_a < a.interleave, inside_b >= 0, inside_b < b.interleave),
    )
    # The rounds before both are shifted to 0 or later, by whole common periods.
    magnitude = Int(z3.If(term(laps * x) < 0, term(-(laps * x)), term(laps * x)))
    other = Int(z3.If(term(laps * y) < 0, term(-(laps * y)), term(laps * y)))
    more = magnitude + other
    round_a, round_b = laps * x + more * factor_b, more * factor_a - laps * y
    path.claim("more", every(more * factor_b >= more, more * factor_a >= more))
    path.claim("rounds exist", every(round_a >= 0, round_b >= 0))
    path.claim("laps", round_a * factor_a - round_b * factor_b == laps)
    path.claim(
        "in positions",
        round_a * (common * factor_a) - round_b * (common * factor_b) == laps * common,
    )
    p = (round_a * a.size + a.rank) * a.interleave + inside_a
    q = (round_b * b.size + b.rank) * b.interleave + inside_b
    path.claim("products a", round_a * (common * factor_a) == round_a * a.size * a.interleave)
    path.claim("products b", round_b * (common * factor_b) == round_b * b.size * b.interleave)
    path.claim("one position", p == q)


# Paging: blocks of unequal sizes


@theorem(
    "descriptors.paging.Paging.places",
    ("own % self.memory_block_size // tile", "own // tile % self.memory_block_size"),
    (
        "own // self.memory_block_size % self.kernel_blocks_per_block",
        "own % self.memory_block_size % self.kernel_blocks_per_block",
    ),
    module="descriptors.paging",
)
def places_find_the_token(lib: Library, path: Path) -> None:
    """The index in the table, the kernel block and the tile of a row lead back to its token."""
    memory, kernels, tiles = (
        path.int("memory_block", 1),
        path.int("kernels", 1),
        path.int("tiles", 1),
    )
    tile = path.int("tile", 1)
    skip = path.int("skip", 0, tile - 1)
    block = memory * kernels
    path.assume(memory == tile * tiles)
    path.quotient(block, memory, kernels)
    # Any row: its block in the table, its kernel block and its tile.
    index, kernel = path.int("index", 0), path.int("kernel", 0, kernels - 1)
    number = path.int("number", 0, tiles - 1)
    inside = number * tile + skip
    own = (index * kernels + kernel) * memory + inside
    path.claim("inside the kernel block", within(inside, Range(0, memory)))
    path.quotient(own, memory, index * kernels + kernel)
    path.quotient(own // memory, block // memory, index)
    path.claim("inside the block", within(kernel * memory + inside, Range(0, block)))
    path.quotient(own, block, index)
    path.quotient(own % memory, tile, number)
    context = lib.tokens.BlockCyclic(0, 1, 1)
    paging = lib.paging.Paging(block, memory, context)
    found = lib.paging.Paging.places(paging, own, tile)
    path.claim("block of the table", found[0] == index)
    path.claim("kernel block", kernel == (0 if found[1] is None else found[1]))
    path.claim("tile", number == (0 if found[2] is None else found[2]))


@theorem(
    "descriptors.paging.tile_tokens",
    (
        "tile = gcd(producer.memory_block_size, consumer.memory_block_size)",
        "tile = producer.memory_block_size",
    ),
    ("if context.size > 1 else tile", "if context.size > 2 else tile"),
    bound="blocks <= 8, interleaves <= 6, 1 to 3 context ranks",
    quick=False,
    symbolic=False,
)
def tiles_are_cut_by_nothing(lib: Library) -> int:
    """All tokens of a tile have one owner, one block in memory, and places without a gap.

    This holds on both sides. Their sizes may share no divisor.
    """
    part = type("Part", (), {"name": "k", "tokens_per_state": 1})
    positions = np.arange(64)
    contexts = [(1, 1), *itertools.product((2, 3), (1, 2, 4, 6))]
    cases = 0
    for blocks in itertools.product((1, 2, 3, 4, 6, 8), repeat=2):
        for owners in itertools.product(contexts, repeat=2):
            sides = [
                lib.paging.Paging(block, block, lib.tokens.BlockCyclic(0, *owner))
                for block, owner in zip(blocks, owners, strict=True)
            ]
            tile = lib.paging.tile_tokens("l", part, *sides)
            alike = owners[0] == owners[1]
            for paging, (size, interleave) in zip(sides, owners, strict=True):
                for rank in range(size):
                    context = lib.tokens.BlockCyclic(rank, size, interleave)
                    own = positions[context.owns(positions)]
                    if alike:  # Then a tile counts the rank's own tokens.
                        own = own[: len(own) // tile * tile]
                        numbers, places = np.arange(len(own)), np.arange(len(own))
                    else:
                        check(
                            "one owner",
                            all(
                                len({*context.owns(chunk)}) == 1
                                for chunk in positions[: 64 // tile * tile].reshape(-1, tile)
                            ),
                        )
                        own = own[own < 64 // tile * tile]
                        numbers, places = own, context.local(own)
                    check("from a multiple", all(n % tile == 0 for n in numbers[::tile]))
                    rows = places.reshape(-1, tile)
                    check("without a gap", (np.diff(rows, axis=1) == 1).all())
                    check(
                        "one block",
                        (
                            rows // paging.memory_block_size
                            == rows[:, :1] // paging.memory_block_size
                        ).all(),
                    )
            cases += 1
    return cases


@theorem(
    "descriptors.request.BlockTable.blocks_of",
    (
        "last = (tokens.stop - 1 - self.first_token) // block_size",
        "last = (tokens.stop - self.first_token) // block_size",
    ),
    module="descriptors.request",
)
def blocks_of_tokens_are_theirs(lib: Library, path: Path) -> None:
    """The blocks from the first to the last token are exactly the blocks that contain a token.

    The table may begin at any token.
    """
    size, begin, first = path.int("block_size", 1), path.int("first_token", 0), path.int("first", 0)
    start, count_ = first, path.int("count", 1)
    inside = path.int("inside", 0, size - 1)
    token = Range(begin + start * size + inside, begin + start * size + inside + count_)
    path.quotient(token.start - begin, size, start)

    class Ids:
        """Records which slice of the ids is taken."""

        def __getitem__(self, taken: slice) -> slice:
            return taken

    table = type("Table", (), {"first_token": begin, "block_ids": Ids()})
    taken = lib.request.BlockTable.blocks_of(table, token, size)
    index = path.int("index", 0)
    lies = every(begin + index * size < token.stop, begin + (index + 1) * size > token.start)
    last = (token.stop - 1 - begin) // size
    path.claim("before", (index < start) >> ((index + 1) * size <= start * size))
    path.claim("from", (index >= start) >> ((index + 1) * size >= (start + 1) * size))
    path.claim("after", (index > last) >> (index * size >= (last + 1) * size))
    path.claim("up to", (index <= last) >> (index * size <= last * size))
    path.claim("exactly", within(index, Range(taken.start, taken.stop)) == lies)


@theorem(
    "descriptors.request.TransferRequest.wanted",
    ("range(max(live.start, self.cached(group, spec)), live.stop)", "range(live.start, live.stop)"),
    module="descriptors.request",
)
def wanted_tokens_are_live_and_not_cached(lib: Library, path: Path) -> None:
    """A request moves exactly the live tokens from the first that is not cached."""
    live = Range(path.int("start", 0), path.int("stop", 0))
    cached, x = path.int("cached", 0), path.int("x", 0)
    spec = type("Spec", (), {"live_tokens": staticmethod(lambda _: live)})
    request = type("Request", (), {"total": lambda *_: 0, "cached": lambda *_: cached})()
    wanted = lib.request.TransferRequest.wanted(request, "full", spec)
    path.claim("exactly", within(x, wanted) == every(within(x, live), x >= cached))


@theorem("specs.attention._window", ("n - window + 1", "n - window"))
def window_reaches_back_from_the_query(lib: Library, path: Path) -> None:
    """A token is live if and only if it is before the query and less than a window away."""
    tokens, window, x = path.int("tokens", 0, MOST), path.int("window", 1, MOST), path.int("x", 0)
    live = lib.attention._window(tokens, window)
    path.claim("exactly", within(x, live) == every(x < tokens, tokens - x < window))


@theorem(
    "specs.attention.ChunkedLocalAttentionSpec.live_tokens",
    (
        "range(n // self.attention_chunk_size * self.attention_chunk_size, n)",
        "range(n // self.attention_chunk_size, n)",
    ),
    module="specs.attention",
)
def chunk_is_that_of_the_query(lib: Library, path: Path) -> None:
    """A token is live if and only if it is before the query and in the same chunk."""
    tokens, chunk, x = path.int("tokens", 0, MOST), path.int("chunk", 1, MOST), path.int("x", 0)
    spec = type("Spec", (), {"attention_chunk_size": chunk})
    live = lib.attention.ChunkedLocalAttentionSpec.live_tokens(spec, tokens)
    number = tokens // chunk
    path.claim("below", (x // chunk < number) >> ((x // chunk + 1) * chunk <= number * chunk))
    path.claim("above", (x // chunk > number) >> (x // chunk * chunk >= (number + 1) * chunk))
    path.claim("equal", (x // chunk == number) >> (x // chunk * chunk == number * chunk))
    path.claim("exactly", within(x, live) == every(x < tokens, x // chunk == number))


@theorem(
    "ownership.parallel.ParallelConfig.context",
    (
        "rank.pcp * self.dcp_size + rank.tp % self.dcp_size",
        "rank.pcp * self.dcp_size + rank.tp // self.dcp_size",
    ),
    module="ownership.parallel",
)
def context_ranks_are_all_used(lib: Library, path: Path) -> None:
    """By default every rank has a valid context rank, and every context rank is used."""
    dcp, pcp, share = path.int("dcp", 1), path.int("pcp", 1), path.int("share", 1)
    size = path.int("size", 2)
    path.assume(size == dcp * pcp)
    config = type(
        "Sizes",
        (),
        {"context_size": size, "context_ranks": None, "dcp_size": dcp, "interleave_size": 1},
    )
    tp, at = path.int("tp", 0, dcp * share - 1), path.int("pcp_rank", 0, pcp - 1)
    context = lib.parallel.ParallelConfig.context
    own = context(config, lib.parallel.RankId(0, at, tp)).rank
    path.claim("rounds", at * dcp + dcp <= size)
    path.claim("it exists", every(own >= 0, own < size))
    asked = path.int("asked", 0, size - 1)
    path.claim("a stage of PCP", every(asked // dcp >= 0, (asked // dcp) * dcp < pcp * dcp))
    path.claim("which exists", asked // dcp < pcp)
    path.quotient(asked % dcp, dcp, 0)
    found = context(config, lib.parallel.RankId(0, asked // dcp, asked % dcp)).rank
    path.claim("it is used", found == asked)


# Rows of a request: prefixes and tiles


def _moved(rows: Any) -> list[int]:
    """Return the tokens that rows move."""
    return [
        token
        for kind, starts in rows
        for start in starts.tolist()
        for token in range(start, start + kind.tokens)
    ]


@theorem(
    "descriptors.tiles._cut",
    ("if tables.wanted.start // tokens_per_state * tokens_per_state < tables.cached:", "if False:"),
    (
        "-(-wanted.stop // tokens_per_state) * tokens_per_state",
        "wanted.stop // tokens_per_state * tokens_per_state",
    ),
    ("np.arange(moving.start // size * size", "np.arange(moving.start"),
    (
        "stop = max(moving.start, tile_start), min(moving.stop, tile_start + size)",
        "stop = moving.start, moving.stop",
    ),
    bound="prompts <= 26, any cached prefix, blocks (4, 4) (4, 8) (6, 4) (12, 8)",
    symbolic=False,
)
def requests_move_each_wanted_state_once(lib: Library) -> int:
    """The rows of a request move each wanted state exactly once, and no other state.

    The cached prefix and the window may end anywhere. A prefix that cuts a state is refused.
    """
    tiles, paging = lib.tiles, lib.paging
    edge = type("Edge", (), {"group": "g", "producer_group": "g"})
    cases = 0
    for (a, b), tokens_per_state in itertools.product(((4, 4), (4, 8), (6, 4), (12, 8)), (1, 2)):
        cyclic = lib.tokens.BlockCyclic()
        sides = [paging.Paging(size, size, cyclic) for size in (a, b)]
        split = paging.TokenSplit(lib.stripes.WHOLE, math.gcd(a, b), tokens_per_state, *sides)
        for stop in range(1, 27):
            tables = [lib.request.BlockTable([*range(3, 3 + -(-26 // size))]) for size in (a, b)]
            for start, cached in {(s, c) for s in range(stop) for c in (0, s)}:
                bound = tiles.EdgeTables(edge, range(start, stop), cached, None, False, *tables)  # noqa: FBT003
                frame = tiles._positions(bound, split)
                first = start // tokens_per_state * tokens_per_state
                try:
                    tiles.check_cached(bound, tokens_per_state)
                    rows = tiles._cut(bound, split, frame, None)
                except lib.request.SpecError:
                    check("refused", cached > first)
                    continue
                check("not refused", cached <= first)
                expected = [*range(first, -(-stop // tokens_per_state) * tokens_per_state)]
                check(
                    f"{a}, {b}, {tokens_per_state}: {start}..{stop}",
                    sorted(_moved(rows.items())) == expected,
                )
                for kind, starts in rows.items():
                    check("in one tile", not ((starts - kind.skip) % split.tile).any())
                cases += 1
    return cases


@theorem(
    "descriptors.paging.BlockLayout.ids",
    ("else block * self.tiles + tile", "else block + self.tiles * tile"),
    ("return number % self.num_blocks, number // self.num_blocks", "return divmod(number, 1)"),
    bound="5 blocks, 6 tiles",
    symbolic=False,
    module="descriptors.paging",
)
def ids_are_unique_and_invertible(lib: Library) -> int:
    """Each place has its own id, from 0 without a gap, and `place` is the inverse of `ids`."""
    cases = 0
    lib.paging.MANY_TILES = 3  # Blocks of more tiles have rows by block, if there are fewer blocks.
    for blocks, count_, gap in itertools.product(range(1, 6), range(1, 7), (0, 7)):
        layout = lib.paging.BlockLayout(blocks, count_ * 10 + gap, count_, 10)
        places = [(b, t) for b in range(blocks) for t in range(count_)]
        block, tile = np.array(places).T
        ids = layout.ids(block, tile).tolist()
        check(
            f"{layout}: ids",
            sorted(ids) == [*range(len(places))] and len(ids) == layout.ids_per_run,
        )
        check(f"{layout}: inverse", [layout.place(number) for number in ids] == places)
        # The address of an id in the strided rows is the address of its place.
        rows = layout.rows(np.array([0]), np.array([10])).astype(int)
        row, index = np.divmod(np.array(ids), layout.count)
        address = rows[row, 0] + index * rows[row, 3]
        check(f"{layout}: rows", (address == layout.offsets(block, tile)).all())
        same = row[1:] == row[:-1]
        numbers = np.broadcast_to(layout.row(block, tile), len(ids))
        check(f"{layout}: row", ((numbers[1:] == numbers[:-1]) == same).all() or layout.coalesced)
        cases += 1
    return cases


# Whole plans of two tensor-parallel engines


@theorem(
    "ownership.slices.transfer_slices",
    (
        "for reader in remote.ranks_of(local.ranges[rank])",
        "for reader in remote.ranks_of(local.ranges[rank])[:2]",
    ),
    ("if unit_range.producer == rank", "if unit_range.producer <= rank"),
    bound="TP and heads <= 6, all policies, salts 0 and 1",
    symbolic=False,
    module="ownership.slices",
)
def both_sides_know_the_same_slices(lib: Library) -> int:
    """The slices that all producer ranks find are those that all consumer ranks find."""
    part = type("Part", (), {"name": "k", "units": 0, "granularity": 1})
    cases = 0
    for heads, p, c in itertools.product(range(1, 7), repeat=3):
        sides = lib.sharding.even_sharding(heads, p), lib.sharding.even_sharding(heads, c)
        sizes = [lib.parallel.ParallelConfig(tp_size=size) for size in (p, c)]
        nodes = lib.replicas.Topology.packed(*sizes, ranks_per_node=2)
        for name, salt in itertools.product(lib.replicas.POLICIES, (0, 1)):
            policy = lib.replicas.ReplicaPolicy(name, salt=salt, topology=nodes)
            chooser = lib.replicas.tp_chooser(policy, p, c)
            found = []
            for role, local, remote in (("consumer", sides[1], sides[0]), ("producer", *sides)):
                slices = set()
                for rank in range(len(local.ranges)):
                    for s in lib.slices.transfer_slices(
                        (part,),
                        role,
                        rank,
                        lambda _, own=local: own,
                        lambda _, own=remote: own,
                        chooser,
                    ):
                        here, there = (rank, s.local_range), (s.remote_rank, s.remote_range)
                        ends = (there, here) if role == "consumer" else (here, there)
                        slices.add((*ends, s.global_range, s.stripe.first, s.stripe.step))
                found.append(slices)
            check(f"{heads} heads, {p} -> {c}, {name}", found[0] == found[1])
            cases += 1
    return cases
