"""Run the functions of the library on symbolic integers, one path after the other.

Invariant: a symbolic value never becomes a concrete one. It has no `__index__`, `__int__` or hash,
so code in C that needs a number raises instead of continuing with a wrong one.

How it works:
    An `Int` is a term of z3 with Python's meaning of operators. A comparison is a `Bool`. As soon
    as Python asks whether a `Bool` is true, the `Path` decides: if both answers are possible, it
    takes one now, and `explore` runs the theorem again for the other one. So a theorem is a plain
    Python function, which creates integers, calls the library and claims something of the result:

        def absolute(path):
            x = path.int("x")
            path.claim("not negative", (x if x > 0 else -x) >= 0)

    `explore` runs it twice: with `x > 0`, then with `x <= 0`. A claim must hold on every path, for
    all integers that lead there. Two things that Python cannot do with symbolic values are replaced
    in the modules that a theorem runs (see `STUBS`): `range`, and functions in C such as `len`.

    A loop over `range(n)` with a symbolic n has no number of rounds. `Path.rounds` states which
    rounds to run: any two of them, say. That is sound if no round reads what another one wrote,
    and each theorem that does so also checks it.
"""

from __future__ import annotations

import bisect
import builtins
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import z3

# Steps that z3 may take for one question. Unlike a time, it gives the same answer on any machine.
STEPS = 5_000_000
# Solvers that try again if z3 gives up.
SEEDS = 4

Term = Any  # z3 has no type hints.


class RefutedError(Exception):
    """A claim does not hold. The message contains the claim and a counterexample."""


class UndecidedError(Exception):
    """z3 could not decide a claim within its steps."""


def term(value: object) -> Term:
    """Return *value* as a term of z3."""
    if isinstance(value, Int | Bool):
        return value.term
    if isinstance(value, bool | np.bool_):
        return z3.BoolVal(bool(value))
    if isinstance(value, int | np.integer):
        return z3.IntVal(int(value))
    return value


class Bool:
    """A truth value that depends on symbolic integers."""

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Term) -> None:
        """Wrap a term of z3."""
        self.term = value

    def __bool__(self) -> bool:
        return Path.current.decide(self.term)

    def __and__(self, other: object) -> Bool:
        return Bool(z3.And(self.term, term(other)))

    def __or__(self, other: object) -> Bool:
        return Bool(z3.Or(self.term, term(other)))

    def __invert__(self) -> Bool:
        return Bool(z3.Not(self.term))

    def __eq__(self, other: object) -> Bool:  # type: ignore[override]
        return Bool(self.term == term(other))

    def __rshift__(self, other: object) -> Bool:
        """Return the implication: if this is true, then *other* is."""
        return Bool(z3.Implies(self.term, term(other)))

    __rand__, __ror__ = __and__, __or__


class Int:
    """A symbolic integer with the meaning of Python's operators."""

    __slots__ = ("term",)
    __hash__ = None  # type: ignore[assignment]

    def __init__(self, value: Term) -> None:
        """Wrap a term of z3."""
        self.term = value

    def __repr__(self) -> str:
        return f"Int({self.term})"

    def __bool__(self) -> bool:
        return bool(self != 0)

    def __neg__(self) -> Int:
        return Int(-self.term)

    def __add__(self, other: object) -> Int:
        return Int(self.term + term(other))

    def __sub__(self, other: object) -> Int:
        return Int(self.term - term(other))

    def __rsub__(self, other: object) -> Int:
        return Int(term(other) - self.term)

    def __mul__(self, other: object) -> Int:
        return Int(self.term * term(other))

    def __floordiv__(self, other: object) -> Int:
        return Path.current.divided(self.term, term(other))[0]

    def __rfloordiv__(self, other: object) -> Int:
        return Path.current.divided(term(other), self.term)[0]

    def __mod__(self, other: object) -> Int:
        return Path.current.divided(self.term, term(other))[1]

    def __rmod__(self, other: object) -> Int:
        return Path.current.divided(term(other), self.term)[1]

    def __divmod__(self, other: object) -> tuple[Int, Int]:
        return Path.current.divided(self.term, term(other))

    def __rdivmod__(self, other: object) -> tuple[Int, Int]:
        return Path.current.divided(term(other), self.term)

    def __eq__(self, other: object) -> Bool:  # type: ignore[override]
        return Bool(self.term == term(other)) if _number(other) else Bool(z3.BoolVal(val=False))

    def __ne__(self, other: object) -> Bool:  # type: ignore[override]
        return ~(self == other)

    def __lt__(self, other: object) -> Bool:
        return Bool(self.term < term(other))

    def __le__(self, other: object) -> Bool:
        return Bool(self.term <= term(other))

    def __gt__(self, other: object) -> Bool:
        return Bool(self.term > term(other))

    def __ge__(self, other: object) -> Bool:
        return Bool(self.term >= term(other))

    __radd__, __rmul__ = __add__, __mul__


def _number(value: object) -> bool:
    return isinstance(value, Int | int | np.integer)


class Path:
    """One way through a theorem: the facts that led here, and the decisions to take.

    Attributes:
        facts: What is known: the bounds of the integers, the decisions, and the definitions.
        decisions: Answers to the questions of this path, in order.
        claims: Number of claims that were proven on this path.
        watched: Indices for which a bisection states its contract, besides those around its result.
    """

    current: ClassVar[Path]

    def __init__(self, decisions: list[bool]) -> None:
        """Begin with *decisions* that an earlier path left to take."""
        self.solver = z3.Solver()
        self.solver.set("rlimit", STEPS)
        self.decisions = decisions
        self.taken = 0
        self.claims = 0
        self.unexplored: list[list[bool]] = []
        self._quotients: dict[tuple[int, int], tuple[Int, Int]] = {}
        self._kept: list[Term] = []
        self._gcds: list[tuple[Int, Int, Int]] = []
        self._rounds: list[Int] | None = None
        self.watched: list[Int] = []

    def int(self, name: str, least: object = None, most: object = None) -> Int:
        """Return any integer from *least* to *most*; no bound if None."""
        value = Int(z3.Int(name))
        for bound, sign in ((least, 1), (most, -1)):
            if bound is not None:
                self.solver.add(sign * value.term >= sign * term(bound))
        return value

    def assume(self, fact: object) -> None:
        """Consider only integers for which *fact* holds."""
        self.solver.add(term(fact))

    def claim(self, name: str, claim: object) -> None:
        """Prove *claim* for all integers that lead here, then use it as a fact.

        Raises:
            RefutedError: If there is a counterexample.
            UndecidedError: If z3 gives up.
        """
        answer, model = self._counterexample(z3.Not(term(claim)))
        if answer == z3.sat:
            numbers = sorted((str(name), str(model[name])) for name in model)
            shown = ", ".join(f"{name}={value}" for name, value in numbers if "!" not in name)
            raise RefutedError(f"{name}: {shown}")
        if answer != z3.unsat:
            raise UndecidedError(name)
        self.claims += 1
        self.solver.add(term(claim))

    def _counterexample(self, negation: Term) -> tuple[Any, Any]:
        """Return whether the facts allow *negation*, and a model if they do."""
        self.solver.push()
        self.solver.add(negation)
        answer = self.solver.check()
        model = self.solver.model() if answer == z3.sat else None
        self.solver.pop()
        for seed in range(SEEDS):
            if answer != z3.unknown:
                break
            # z3 decides some products only by luck, so a fresh solver tries with another seed.
            solver = z3.Solver()
            solver.set("rlimit", STEPS)
            solver.set("random_seed", seed)
            solver.add(self.solver.assertions())
            solver.add(negation)
            answer = solver.check()
            model = solver.model() if answer == z3.sat else None
        return answer, model

    def decide(self, condition: Term) -> bool:
        """Return whether *condition* holds on this path."""
        condition = z3.simplify(condition)
        if z3.is_true(condition) or z3.is_false(condition):
            return z3.is_true(condition)
        if self.taken == len(self.decisions):
            # An answer that z3 cannot exclude counts as possible. Its claims must hold too.
            possible = [
                answer
                for answer in (True, False)
                if self.solver.check(condition if answer else z3.Not(condition)) != z3.unsat
            ]
            if len(possible) > 1:
                self.unexplored.append([*self.decisions, False])
            # Without a possible answer the path itself is impossible, and every claim holds.
            self.decisions = [*self.decisions, (possible or [True])[0]]
        answer = self.decisions[self.taken]
        self.taken += 1
        self.solver.add(condition if answer else z3.Not(condition))
        return answer

    def divided(self, number: Term, divisor: Term) -> tuple[Int, Int]:
        """Return quotient and remainder as Python rounds them, for a divisor above 0."""
        key = number.get_id(), divisor.get_id()
        if key not in self._quotients:
            self.claim(f"{divisor} > 0", divisor > 0)
            quotient = z3.FreshInt("quotient")
            remainder = number - divisor * quotient
            self.solver.add(remainder >= 0, remainder < divisor)
            # Keep both terms: z3 gives the id of a term that is gone to a new one.
            self._kept += [number, divisor]
            self._quotients[key] = Int(quotient), Int(remainder)
        return self._quotients[key]

    def quotient(self, number: Any, divisor: Any, quotient: Any) -> None:
        """Prove that *quotient* is `number // divisor`, and use it.

        z3 often misses that a quotient is unique. The theorem `quotients-are-unique` proves it.
        """
        rest = number - divisor * quotient
        self.claim("the rest is less than the divisor", within(rest, Range(0, divisor)))
        key = term(number).get_id(), term(divisor).get_id()
        if key in self._quotients:
            found, found_rest = self._quotients[key]
            self.assume((found == quotient) & (found_rest == rest))
        else:
            self._kept += [term(number), term(divisor)]
            self._quotients[key] = Int(term(quotient)), Int(term(rest))

    def common_divisor(self, a: Int, b: Int, divisor: Int) -> None:
        """Let `gcd(a, b)` return *divisor*. The theorem has defined all three."""
        self._gcds.append((a, b, divisor))

    def gcd(self, a: object, b: object) -> object:
        """Return what `common_divisor` states about the equal numbers."""
        for first, second, divisor in self._gcds:
            if z3.eq(z3.simplify(term(a) - first.term), z3.IntVal(0)) and z3.eq(
                z3.simplify(term(b) - second.term), z3.IntVal(0)
            ):
                return divisor
        raise TypeError(f"no statement about gcd({a}, {b})")

    @contextmanager
    def rounds(self, *values: Int) -> Iterator[None]:
        """Run loops over a symbolic range for *values* only."""
        self._rounds = list(values)
        yield
        self._rounds = None

    def iterate(self, start: object, stop: object) -> Iterator[Any]:
        """Yield the integers from *start* to *stop*, or those that `rounds` states."""
        if self._rounds is not None:
            for value in self._rounds:
                self.claim("a round is in the range", (value >= start) & (value < stop))
                yield value
            return
        while start < stop:  # type: ignore[operator]
            yield start
            start = start + 1  # type: ignore[operator]


def explore(theorem: Callable[[Path], None]) -> tuple[int, int]:
    """Run *theorem* on all of its paths. Return the numbers of paths and of claims.

    Raises:
        RefutedError: If a claim does not hold, or no claim was made about any integers that exist.
        UndecidedError: If z3 gives up.
    """
    unexplored: list[list[bool]] = [[]]
    paths = claims = 0
    exists = False
    while unexplored:
        path = Path.current = Path(unexplored.pop())
        theorem(path)
        unexplored += path.unexplored
        paths, claims = paths + 1, claims + path.claims
        # Assumptions that contradict each other would prove anything.
        exists = exists or (path.claims > 0 and path.solver.check() == z3.sat)
    if not exists:
        raise RefutedError("no integers were found that a claim is about")
    return paths, claims


class Range:
    """A `range` of step 1 with symbolic ends. With concrete ends it is Python's own."""

    step = 1

    def __new__(cls, *ends: Any) -> Any:
        """Return Python's `range` if all ends are concrete."""
        if not any(isinstance(end, Int) for end in ends):
            return builtins.range(*ends)
        return super().__new__(cls)

    def __init__(self, *ends: Any) -> None:
        """Take a stop, or start and stop."""
        self.start, self.stop = ends if len(ends) > 1 else (0, ends[0])

    def __bool__(self) -> bool:
        return bool(self.start < self.stop)

    def __eq__(self, other: object) -> bool:
        """Compare as Python does: all empty ranges are equal."""
        if not isinstance(other, Range | builtins.range):
            return False
        same = (term(self.start) == term(other.start), term(self.stop) == term(other.stop))
        empty = (term(side.start) >= term(side.stop) for side in (self, other))
        return bool(Bool(z3.Or(z3.And(*same), z3.And(*empty))))

    def __hash__(self) -> int:
        return 0  # Equal ranges must have equal hashes, and any two may be equal.

    def __iter__(self) -> Iterator[Any]:
        return Path.current.iterate(self.start, self.stop)

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"a symbolic range has no {name}")


def within(value: object, interval: Any) -> Bool:
    """Return whether *value* is in *interval*, without a decision."""
    return Bool(z3.And(term(interval.start) <= term(value), term(value) < term(interval.stop)))


class Seq:
    """A sequence of symbolic length, whose members are a function of their index.

    Attributes:
        length: The number of members.
        member: Function that returns the member at an index.
    """

    def __init__(self, length: Int, member: Callable[[Any], Any]) -> None:
        """Take the length and the members."""
        self.length, self.member = length, member

    def __getitem__(self, index: Any) -> Any:
        """Return the member at *index*, which must be in the sequence."""
        Path.current.claim(
            "an index is in the sequence",
            Bool(z3.And(term(index) >= 0, term(index) < self.length.term)),
        )
        return self.member(index)


def _isinstance(value: object, kind: Any) -> bool:
    kinds = kind if isinstance(kind, tuple) else (kind,)
    if isinstance(value, Int):
        return any(k is int for k in kinds)
    if isinstance(value, Range | builtins.range):
        return any(k in (Range, builtins.range) for k in kinds)
    return isinstance(value, kind)


def _len(value: Any) -> Any:
    if isinstance(value, Seq):
        return value.length
    if isinstance(value, Range):
        return value.stop - value.start if value else 0
    return len(value)


def _extreme(choose: Callable[..., Any], *, greater: bool) -> Callable[..., Any]:
    def chosen(*values: Any, **more: Any) -> Any:
        # One term with both cases needs fewer paths than a decision.
        if len(values) == 2 and any(isinstance(value, Int) for value in values):
            a, b = (term(value) for value in values)
            return Int(z3.If((a >= b) if greater else (a <= b), a, b))
        return choose(*values, **more)

    return chosen


def _bisect(concrete: Callable[..., int], *, right: bool) -> Callable[..., Any]:
    """Return a bisection that states its contract if the sequence is symbolic.

    The contract is that of the standard library for an ascending sequence: all members before the
    result are less than the value (`bisect_left`), or at most the value (`bisect_right`), and no
    member from the result on is.
    """

    def found(ascending: Any, value: Any) -> Any:
        if not isinstance(ascending, Seq):
            return concrete(ascending, value)
        index = Int(z3.FreshInt("index"))
        Path.current.assume(within(index, Range(0, ascending.length + 1)))
        # z3 is better without quantifiers, so the contract is stated for the watched indices only.
        for i in (*Path.current.watched, index, index - 1):
            member = ascending.member(i)
            before = (member <= value) if right else (member < value)
            Path.current.assume(within(i, Range(0, ascending.length)) >> (before == (i < index)))
        return index

    return found


class _Numpy:
    """numpy, with the two functions that the token arithmetic calls made symbolic."""

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)

    @staticmethod
    def equal(a: Any, b: Any) -> Any:
        return a == b

    @staticmethod
    def divmod(a: Any, b: Any) -> Any:
        return builtins.divmod(a, b)


# The names that are replaced in each module that a theorem runs.
STUBS: dict[str, Any] = {
    "range": Range,
    "isinstance": _isinstance,
    "len": _len,
    "min": _extreme(min, greater=False),
    "max": _extreme(max, greater=True),
    "bisect_left": _bisect(bisect.bisect_left, right=False),
    "bisect_right": _bisect(bisect.bisect_right, right=True),
}
# Replaced only in modules that import them, and where a theorem asks for it.
IMPORTED: dict[str, Any] = {
    "np": _Numpy(),
    "gcd": lambda a, b: (
        Path.current.gcd(a, b) if isinstance(a, Int) or isinstance(b, Int) else math.gcd(a, b)
    ),
}
