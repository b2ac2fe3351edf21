"""The faults that `mutants.py` plants: those of cosmic-ray that a test could miss, and three more.

A place is a span of the source; a fault is an operator and which of its occurrences is meant.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, ClassVar

import parso
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.operators.operator import Example, Operator
from cosmic_ray.operators.provider import OperatorProvider

Position = tuple[tuple[int, int], tuple[int, int]]
Fault = tuple[str, int]
Node = Any
"""A node of a tree of parso, which has no types."""
SWAPPED = {"all": "any", "any": "all", "min": "max", "max": "min"}
BINARY = {
    "Add": "Sub",
    "Sub": "Add",
    "Mul": "FloorDiv",
    "FloorDiv": "Mul",
    "Mod": "FloorDiv",
    "BitAnd": "BitOr",
    "BitOr": "BitAnd",
    "LShift": "RShift",
    "Pow": "Mul",
}
COMPARISONS = {
    "Eq": ("NotEq",),
    "NotEq": ("Eq",),
    "Lt": ("LtE", "GtE"),
    "LtE": ("Lt", "Gt"),
    "Gt": ("GtE", "LtE"),
    "GtE": ("Gt", "Lt"),
    "Is": ("IsNot",),
    "IsNot": ("Is",),
}
"""Each comparison by the one that differs at its border, and by its opposite."""
NAMES = (
    *(f"ReplaceBinaryOperator_{old}_{new}" for old, new in BINARY.items()),
    *(
        f"ReplaceComparisonOperator_{old}_{new}"
        for old, news in COMPARISONS.items()
        for new in news
    ),
    "ReplaceUnaryOperator_USub_UAdd",
    "ReplaceUnaryOperator_Delete_Not",
    "ReplaceUnaryOperator_Delete_Invert",
    "AddNot",
    "ReplaceTrueWithFalse",
    "ReplaceFalseWithTrue",
    "ReplaceAndWithOr",
    "ReplaceOrWithAnd",
    "ReplaceBreakWithContinue",
    "ReplaceContinueWithBreak",
    "ExceptionReplacer",
    "NumberReplacer",
    "RemoveDecorator",
    "ZeroIterationForLoop",
)
"""Of cosmic-ray: one fault for an operator, not eleven, most of which no test could miss."""


class Swap(Operator):  # type: ignore[misc]
    """Asks for any of what has to be all, and for the least of what has to be the most."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Yield the name of a call that has an opposite."""
        if node.type == "name" and node.value in SWAPPED and node.get_next_leaf() == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, _index: int) -> Node:
        """Name the opposite."""
        node.value = SWAPPED[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return what it does."""
        return (Example("all(x)", "any(x)"), Example("y = max(1, 2)", "y = min(1, 2)"))


class Unguard(Operator):  # type: ignore[misc]
    """Never does what stands under an `if`; takes all where a comprehension takes some."""

    DECIDED: ClassVar = {"if_stmt": " False", "comp_if": " True"}

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Yield a condition."""
        if node.type in self.DECIDED:
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Node, _index: int) -> Node:
        """Decide it."""
        node.children[1] = parso.parse(self.DECIDED[node.type])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return what it does."""
        return (
            Example("if x: f()", "if False: f()"),
            Example("[y for y in x if y]", "[y for y in x if True]"),
        )


class Drop(Operator):  # type: ignore[misc]
    """Leaves a statement out: a call, a raise, a change of what stands already."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Yield a statement without which the rest still runs."""
        if node.type == "simple_stmt" and self._effect(node.children[0]):
            yield node.start_pos, node.end_pos

    @staticmethod
    def _effect(node: Node) -> bool:
        if node.type == "expr_stmt":
            target, change = node.children[:2]
            return bool(target.type == "atom_expr" or (change.type == "operator" and change != "="))
        return bool(node.type in ("atom_expr", "raise_stmt"))

    def mutate(self, node: Node, _index: int) -> Node:
        """Pass instead."""
        leaf = parso.parse("pass").children[0]
        leaf.prefix = node.get_first_leaf().prefix
        node.children[0] = leaf
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return what it does."""
        return (
            Example("f(x)\n", "pass\n"),
            Example("x[1] = 2\n", "pass\n"),
            Example("x += 2\n", "pass\n"),
            Example("raise x\n", "pass\n"),
        )


OPERATORS = {name: OperatorProvider()[name]() for name in NAMES} | {
    "Swap": Swap(),
    "Unguard": Unguard(),
    "Drop": Drop(),
}


def places(source: str) -> dict[Position, list[Fault]]:
    """Return, by place, the faults that can be planted in *source*."""
    found: dict[Position, list[Fault]] = defaultdict(list)
    tree = get_ast(source)
    for name, operator in OPERATORS.items():
        positions = (spot for node in ast_nodes(tree) for spot in operator.mutation_positions(node))
        for occurrence, position in enumerate(positions):
            found[position].append((name, occurrence))
    return found


def plant(source: str, fault: Fault) -> str | None:
    """Return *source* with *fault*; None where it cannot be planted."""
    name, occurrence = fault
    mutated: str | None = mutate_code(source, OPERATORS[name], occurrence)
    return mutated
