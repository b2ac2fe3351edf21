"""The faults that `mutants.py` plants: a selection of cosmic-ray's operators, and three of its own.

A place is a span of the source. A fault is the name of an operator and the number of its
occurrence.
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
# A node of a tree of parso, which has no type hints.
Node = Any
SWAPPED = {"all": "any", "any": "all", "min": "max", "max": "min"}
# Each operator becomes one neighbour that often gives a plausible result.
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
# Each comparison becomes the one that differs at the border, and its opposite.
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
# One fault for each operator. cosmic-ray has eleven replacements for some, and any test notices
# most of them.
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


class Swap(Operator):  # type: ignore[misc]
    """Replace `all` by `any`, `min` by `max`, and the reverse."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Yield each called name that has an opposite."""
        if node.type == "name" and node.value in SWAPPED and node.get_next_leaf() == "(":
            yield node.start_pos, node.end_pos

    def mutate(self, node: Node, _index: int) -> Node:
        """Replace the name by its opposite."""
        node.value = SWAPPED[node.value]
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return examples of the change."""
        return (Example("all(x)", "any(x)"), Example("y = max(1, 2)", "y = min(1, 2)"))


class Unguard(Operator):  # type: ignore[misc]
    """Never run the body of an `if`; accept every item of a filtered comprehension."""

    DECIDED: ClassVar = {"if_stmt": " False", "comp_if": " True"}

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Yield each condition."""
        if node.type in self.DECIDED:
            yield node.children[1].start_pos, node.children[1].end_pos

    def mutate(self, node: Node, _index: int) -> Node:
        """Replace the condition by a constant."""
        node.children[1] = parso.parse(self.DECIDED[node.type])
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return examples of the change."""
        return (
            Example("if x: f()", "if False: f()"),
            Example("[y for y in x if y]", "[y for y in x if True]"),
        )


class Drop(Operator):  # type: ignore[misc]
    """Remove a statement: a call, a raise, or a change of an existing object."""

    def mutation_positions(self, node: Node) -> Iterator[Position]:
        """Yield each statement without which the other code still runs."""
        if node.type == "simple_stmt" and self._effect(node.children[0]):
            yield node.start_pos, node.end_pos

    @staticmethod
    def _effect(node: Node) -> bool:
        if node.type == "expr_stmt":
            target, change = node.children[:2]
            return bool(target.type == "atom_expr" or (change.type == "operator" and change != "="))
        return bool(node.type in ("atom_expr", "raise_stmt"))

    def mutate(self, node: Node, _index: int) -> Node:
        """Replace the statement by `pass`."""
        leaf = parso.parse("pass").children[0]
        leaf.prefix = node.get_first_leaf().prefix
        node.children[0] = leaf
        return node

    @classmethod
    def examples(cls) -> tuple[Example, ...]:
        """Return examples of the change."""
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
    """Return the faults that can be planted in *source*, by place."""
    faults: dict[Position, list[Fault]] = defaultdict(list)
    tree = get_ast(source)
    for name, operator in OPERATORS.items():
        positions = (spot for node in ast_nodes(tree) for spot in operator.mutation_positions(node))
        for occurrence, position in enumerate(positions):
            faults[position].append((name, occurrence))
    return faults


def plant(source: str, fault: Fault) -> str | None:
    """Return *source* with *fault*, or None if the fault cannot be planted."""
    name, occurrence = fault
    mutated: str | None = mutate_code(source, OPERATORS[name], occurrence)
    return mutated
