"""Find out from the code of a module whether its `forward` calls one of its children.

Some models give each attention module a rotary embedding, but apply it in some layers only. The
condition is in the code of `forward`, and its values are attributes of the module. The adapters
have a table of these conditions (`kvspec/adapters/rotating_modules.py`). Tests with an installed
engine compare the table with the result of this module.

Invariant: nothing is executed but the reading of attributes. A result other than None holds for
each way through the code that the attributes allow.

How it works:
    `calls` parses `forward` and follows all ways through it. It evaluates conditions of attributes
    of the module, constants, and globals of the module's file. If a condition contains anything
    else, both branches are possible. With `self.sliding_window = None` and `self.everywhere =
    False`, no way through this code reaches the call, and the result is False:

        def forward(self, positions, q, k):
            if q.shape[0] == 0:
                return q, k
            if self.sliding_window or self.everywhere:
                q, k = self.rotary_emb(positions, q, k)
            return q, k

    An early return that only the arguments decide, as above for an empty batch, is left out: it
    says nothing about the layer. Other methods of the module are followed. A function with `rope`
    in its name that gets the child, or a part of it, counts as a call: engines fuse the rotary
    embedding with other work.

    The result is None if only some ways reach a call, or if other code gets the child or the whole
    module.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import operator
import re
import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import attrs

# Whether the child is called (None if unknown), and whether the function ends there.
Outcome: TypeAlias = tuple[bool | None, bool]

# A value that only a run would show.
_UNKNOWN = object()

_COMPARISONS: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
# Types whose values compare without code of the engine.
_PLAIN = (bool, int, float, str)
# Functions that do nothing with a module but look at it.
_LOOK = ("isinstance", "getattr", "hasattr", "type")
# Names of functions that may do the work of a rotary embedding.
_ROTATES = re.compile("rope|rotary|rotate", re.IGNORECASE)


def calls(module: object, child: str) -> bool | None:
    """Return whether the `forward` of *module* calls its attribute *child*, or None if unknown."""
    # A `forward` that was set on the object has other code than its class.
    if "forward" in vars(module):
        return None
    code = _Code(module, child)
    called = code.method("forward")
    # Code that never names the child may reach it in a way that is not followed.
    return called if code.named else None


def _of_ways(outcomes: Iterable[bool | None]) -> bool | None:
    """Return the one outcome that all ways have, or None."""
    found = set(outcomes)
    return found.pop() if len(found) == 1 else None


def _of_steps(outcomes: Iterable[bool | None]) -> bool | None:
    """Return the outcome of steps that follow each other: whether any of them is True."""
    found = set(outcomes)
    return True if True in found else None if None in found else False


def _truth(value: Any) -> bool | None:
    """Return the truth of *value*, or None if only code of the engine knows it."""
    if value is None or isinstance(value, _PLAIN):
        return bool(value)
    by_code = value is _UNKNOWN or hasattr(value, "__bool__") or hasattr(value, "__len__")
    return None if by_code else True


@attrs.define
class _Code:
    """The code of a module.

    Attributes:
        module: The module.
        child: The attribute whose calls are looked for.
        named: Whether the code that was read names it.
    """

    module: Any
    child: str
    named: bool = False
    _results: dict[str, bool | None] = attrs.field(factory=dict)
    # Of the function that is read: globals that no local name hides, and parameters.
    _globals: Mapping[str, Any] = attrs.field(factory=dict)
    _parameters: frozenset[str] = frozenset()

    def method(self, name: str) -> bool | None:
        """Return whether the method called *name* calls the child."""
        if name not in self._results:
            self._results[name] = None  # For a method that calls itself.
            outer = self._globals, self._parameters
            self._results[name] = self._read(inspect.getattr_static(self.module, name, None))
            self._globals, self._parameters = outer
        return self._results[name]

    def _read(self, function: Any) -> bool | None:
        try:
            (tree,) = ast.parse(textwrap.dedent(inspect.getsource(function))).body
        except (OSError, TypeError, SyntaxError):
            return None
        # A decorator may do anything before and after the function.
        if not isinstance(tree, ast.FunctionDef) or tree.decorator_list:
            return None
        local = function.__code__.co_varnames
        self._globals = {k: v for k, v in function.__globals__.items() if k not in local}
        self._parameters = frozenset(inspect.signature(function).parameters) - {"self"}
        return _of_ways(called for called, _ in self._block(tree.body))

    def _block(self, statements: Sequence[ast.stmt]) -> set[Outcome]:
        """Return the outcomes of statements that follow each other. A way that raises has none."""
        ended, going = set[Outcome](), set[bool | None]([False])
        for statement in statements:
            outcomes = {
                (_of_steps([before, called]), ends)
                for called, ends in self._statement(statement)
                for before in going
            }
            ended |= {outcome for outcome in outcomes if outcome[1]}
            going = {called for called, ends in outcomes if not ends}
        return ended | {(called, False) for called in going}

    def _statement(self, node: ast.stmt) -> set[Outcome]:
        match node:
            case ast.Raise():
                return set()
            case ast.Return():
                return {(self._expression(node), True)}
            case ast.If(test=test):
                body, orelse = self._block(node.body), self._block(node.orelse)
                if self._of_arguments(test) and body == {(False, True)}:
                    body = set()
                tested = self._expression(test)
                ways = self._taken(test, body, orelse)
                return {(_of_steps([tested, called]), ends) for called, ends in ways}
            case ast.With():
                return self._block(node.body)
            case ast.Assign() | ast.AnnAssign() | ast.AugAssign() | ast.Expr() | ast.Assert():
                return {(self._expression(node), False)}
            case _:
                # A loop may do nothing, and an error may skip a call.
                found = self._perhaps(node)
                returns = any(isinstance(each, ast.Return) for each in ast.walk(node))
                return {(found, False), (found, returns)}

    def _expression(self, node: ast.AST) -> bool | None:  # noqa: PLR0911 - one for each kind
        match node:
            case ast.IfExp(test=test, body=body, orelse=orelse):
                ways = self._taken(test, {self._expression(body)}, {self._expression(orelse)})
                return _of_steps([self._expression(test), _of_ways(ways)])
            case ast.BoolOp() | ast.Lambda() | ast.ListComp() | ast.GeneratorExp():
                return self._perhaps(node)
            case ast.Compare(ops=[ast.Is() | ast.IsNot()]):
                return False  # The child is compared with None.
            case ast.Call(func=func):
                return self._call(node, getattr(func, "attr", getattr(func, "id", "")))
            case ast.Attribute(value=ast.Name(id="self"), attr=name):
                self.named |= name == self.child
                return None if name == self.child or self._is_method(name) else False
            case ast.Name(id="self" | "super"):
                return None
            case _:
                return _of_steps(map(self._expression, ast.iter_child_nodes(node)))

    def _call(self, node: ast.Call, name: str) -> bool | None:
        """Return the outcome of a call of a function or method called *name*."""
        if name in _LOOK:
            return False
        inside = [self._expression(each) for each in (*node.args, *node.keywords)]
        own = isinstance(node.func, ast.Attribute) and ast.unparse(node.func.value) == "self"
        if own and name == self.child:
            self.named = True
            return True
        if own and self._is_method(name):
            return _of_steps([*inside, self.method(name)])
        if _ROTATES.search(name):
            gets_child = f"self.{self.child}" in ast.unparse(node)
            self.named |= gets_child
            return True if gets_child else None
        return _of_steps([*inside, False if own else self._expression(node.func)])

    def _is_method(self, name: str) -> bool:
        return inspect.isfunction(inspect.getattr_static(self.module, name, None))

    def _perhaps(self, node: ast.AST) -> bool | None:
        """Return False if nothing inside *node* calls the child, and None otherwise."""
        inside = map(self._expression, ast.iter_child_nodes(node))
        return False if _of_steps(inside) is False else None

    def _of_arguments(self, test: ast.expr) -> bool:
        """Return whether only arguments of the function decide a condition."""
        return {
            each.id for each in ast.walk(test) if isinstance(each, ast.Name)
        } <= self._parameters

    def _taken(self, test: ast.expr, body: set[Any], orelse: set[Any]) -> set[Any]:
        """Return the outcomes of the branches that are possible."""
        truth = _truth(self._value(test))
        return body | orelse if truth is None else body if truth else orelse

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a condition, or `_UNKNOWN`."""
        found: Any = _UNKNOWN
        match node:
            case ast.Constant():
                found = node.value
            case ast.Name():
                found = self.module if node.id == "self" else self._globals.get(node.id, _UNKNOWN)
            case ast.Attribute():
                found = getattr(self._value(node.value), node.attr, _UNKNOWN)
            case ast.UnaryOp(op=ast.Not()):
                truth = _truth(self._value(node.operand))
                found = _UNKNOWN if truth is None else not truth
            case ast.BoolOp():
                truths = {_truth(self._value(each)) for each in node.values}
                decisive = isinstance(node.op, ast.Or)
                if decisive in truths or None not in truths:
                    found = (decisive in truths) is decisive
            case ast.Compare(left=left, ops=[op], comparators=[right]):
                found = _compared(self._value(left), op, self._value(right))
            case _:
                pass
        return found


def _compared(one: Any, op: ast.cmpop, other: Any) -> Any:
    """Return the result of a comparison, or `_UNKNOWN`."""
    if one is _UNKNOWN or other is _UNKNOWN:
        return _UNKNOWN
    if isinstance(op, (ast.Is, ast.IsNot)):
        return (one is other) is isinstance(op, ast.Is)
    if type(op) in _COMPARISONS and isinstance(one, _PLAIN) and isinstance(other, _PLAIN):
        return _COMPARISONS[type(op)](one, other)
    return _UNKNOWN


def module_of(name: str, **attributes: Any) -> Any:
    """Return a module of the class *name* with a rotary embedding. Its `__init__` is not called."""
    import torch  # noqa: PLC0415 - only engines need it here

    file, _, kind = name.rpartition(".")
    cls = getattr(importlib.import_module(file), kind)
    module = cls.__new__(cls)
    torch.nn.Module.__init__(module)
    module.rotary_emb = torch.nn.Identity()
    for attribute, value in attributes.items():
        setattr(module, attribute, value)
    return module
