"""What is public, and that it is whole: a public signature names public things alone."""

from __future__ import annotations

import ast
import inspect
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, Literal, get_args, get_origin

import attrs
import pytest

import kvspec

PACKAGE = Path(kvspec.__file__).parent
CONTRIBUTING = PACKAGE.parent / "CONTRIBUTING.md"
MODULES = tuple(import_module(f"kvspec.{name}") for name in sorted(kvspec.ON_DEMAND))
PLACES = (kvspec, *MODULES)


def public() -> Iterator[tuple[str, Any]]:
    """Yield every public name with what it stands for."""
    for module in PLACES:
        for name in module.__all__:
            yield f"{module.__name__}.{name}", getattr(module, name)


NAMES = {name.rpartition(".")[2] for name, _ in public()}
KNOWN = {value.__name__ for _, value in public() if inspect.isclass(value)}


def signatures(value: Any) -> Iterator[FunctionType]:
    """Yield the functions that a caller of *value* calls: itself, or a class's public methods."""
    if inspect.isfunction(value):
        yield value
    elif inspect.isclass(value):
        for base in value.__mro__:
            if base.__module__.startswith("kvspec"):
                for name, member in vars(base).items():
                    function = getattr(member, "__func__", getattr(member, "fget", member))
                    if inspect.isfunction(function) and not name.startswith("_"):
                        yield function


def annotations(value: Any) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the annotations of *value*'s signatures and fields as text, with where names lie."""
    for function in signatures(value):
        for text in function.__annotations__.values():
            yield str(text), function.__globals__
    if inspect.isclass(value) and attrs.has(value):
        for field in attrs.fields(value):
            if not field.name.startswith("_"):
                yield str(field.type), vars(sys.modules[value.__module__])


INSIDE = {"Agent", "Tiles", "ReplicaChooser", "Entry", "GroupPair", "HeldPart", "ReplicaGroup"}
"""What public values carry for the library's own use; no promise goes with them."""


def strangers(value: Any) -> Iterator[str]:
    """Yield the names of ours in the annotations of *value* that are not public.

    An alias is as public as what it is made of; a choice of words has to be public by its name.
    """
    for text, names in annotations(value):
        for node in ast.walk(ast.parse(text, mode="eval")):
            if isinstance(node, ast.Name) and node.id in names:
                found = names[node.id]
                choice = get_origin(found) is Literal and node.id not in NAMES
                if choice or not set(classes(found)) <= {*KNOWN, *INSIDE}:
                    yield node.id


def classes(found: Any) -> Iterator[str]:
    """Yield the classes of ours that an annotation is made of, by name."""
    if inspect.isclass(found) and found.__module__.startswith("kvspec"):
        yield found.__name__
    for argument in get_args(found):
        yield from classes(argument)


def test_every_name_in_a_public_signature_is_public() -> None:
    """What a caller has to pass or gets back can be imported, and will not move."""
    found = {name: sorted(set(strangers(value))) for name, value in public()}
    assert {} == {name: names for name, names in found.items() if names}


@pytest.mark.parametrize("module", PLACES, ids=lambda module: module.__name__)
def test_public_modules_say_what_is_public(module: ModuleType) -> None:
    """Each has `__all__`, every name once, and every class and function in it is documented."""
    assert len(module.__all__) == len(set(module.__all__))
    assert set(module.__all__) <= set(dir(module))
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_contributing_lists_the_public_modules() -> None:
    """The rule is written where a contributor reads it."""
    text = CONTRIBUTING.read_text(encoding="utf-8")
    rule = text.partition("## What is public")[2].partition("\n## ")[0]
    for name in kvspec.ON_DEMAND:
        assert f"`kvspec.{name}`" in rule


def test_public_modules_come_when_they_are_named() -> None:
    """After a bare ``import kvspec`` each is there, and none is loaded before."""
    code = (
        "import sys, kvspec; "
        "late = kvspec.ON_DEMAND - {'analysis', 'check', 'check.digests', 'check.reference'}; "
        "assert not {f'kvspec.{n}' for n in late} & set(sys.modules); "
        "from operator import attrgetter; "
        "print(*[attrgetter(n)(kvspec).__name__ for n in sorted(kvspec.ON_DEMAND)], sep='\\n')"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert [f"kvspec.{name}" for name in sorted(kvspec.ON_DEMAND)] == done.stdout.split()
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvspec.nothing  # noqa: B018


def test_one_name_is_one_class() -> None:
    """No two classes of the package share a name, but private ones of different modules."""
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [] == [name for name, times in names.items() if times > 1]
