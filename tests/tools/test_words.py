"""Test that names use one word for one thing: the words of the glossary, and no others."""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvspec

pytestmark = pytest.mark.pages

PACKAGE = Path(kvspec.__file__).parent
PAGE = PACKAGE.parent / "CONTRIBUTING.md"

WORDS = {
    "pieces of memory": """
        area box bunch bundle burst chunk content entry extent fragment grain grid hunk lane lump
        patch piece portion range region row run section segment side span stretch stripe tile
        zone
    """,
    "ends": """
        abandon abort cancel close decline detach disconnect dismiss drop evict fail forget give_up
        leave quit release retire revoke shut stop terminate unlink withdraw
    """,
}
"""Words that mean nearly the same, by what they name. A new one needs a row of the glossary."""

MOST = {"pieces of memory": 10, "ends": 7}
"""How many of these words the glossary may have."""

MAX_WORDS = 60
"""Words of the whole glossary."""

ELSEWHERE = {
    "span": "`spans_heads`, a key of the wire format: the content of a unit has bytes of all heads",
    "stop": "the number behind the last one of a range, as Python's",
}
"""Words of the lists that names may have for another thing, and what that is."""

ENGINES = """
    clear_deferred_abort_state deferred_kv_release_timeout enable_deferred_decode_kv_release
    enable_deferred_kv_release ensure_abort_notified handle_batch is_abort_release_safe
    request_finished_all_groups should_send_kv_chunk supports_deferred_decode_kv_release
"""
"""Names of the engines' own interfaces, in `kvspec.adapters`."""


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Return the syntax tree of each module of the package, by its path."""
    return {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted(PACKAGE.rglob("*.py"))
    }


def names_of(tree: ast.Module) -> Iterator[str]:
    """Yield the names of classes, functions, attributes, parameters and module variables."""
    yield from (name for name, _ in assigned(tree))
    for node in ast.walk(tree):
        kind = type(node)
        if kind is ast.Attribute:
            if type(node.ctx) is ast.Store:  # type: ignore[attr-defined]
                yield node.attr  # type: ignore[attr-defined]
        elif kind is ast.arg:
            yield node.arg  # type: ignore[attr-defined]
        elif kind in (ast.FunctionDef, ast.AsyncFunctionDef):
            yield node.name  # type: ignore[attr-defined]
        elif isinstance(node, ast.ClassDef):
            yield node.name
            yield from (name for name, _ in assigned(node))


def assigned(body: ast.Module | ast.ClassDef) -> Iterator[tuple[str, ast.expr | None]]:
    """Yield each variable of a module or a class, with its value."""
    for node in body.body:
        match node:
            case ast.Assign(targets=targets, value=value):
                pairs: list[tuple[ast.expr, ast.expr | None]] = [(each, value) for each in targets]
            case ast.AnnAssign(target=target, value=annotated):
                pairs = [(target, annotated)]
            case _:
                continue
        for target, value_of in pairs:
            if isinstance(target, ast.Name):
                yield target.id, value_of
            elif isinstance(target, ast.Tuple):
                values = value_of.elts if isinstance(value_of, ast.Tuple) else [value_of] * 99
                for each, own in zip(target.elts, values, strict=False):
                    if isinstance(each, ast.Name):
                        yield each.id, own


def parts_of(name: str) -> set[str]:
    """Return the words of a name, in lower case.

    >>> sorted(parts_of("MaxRowsOf_each"))
    ['each', 'max', 'of', 'rows']
    """
    found = re.findall(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+", name)
    return {part.lower() for part in found}


def forms_of(word: str) -> set[str]:
    """Return the forms in which a verb or a noun occurs in a name."""
    stem = word.removesuffix("e")
    doubled = word + word[-1]
    return {
        word, word + "s", word + "es", stem + "ed", stem + "ing", doubled + "ed", doubled + "ing",
        word.removesuffix("y") + "ies",
        "forgotten" if word == "forget" else word,
    }  # fmt: skip


def glossary() -> list[str]:
    """Return the words of the glossary of CONTRIBUTING.md."""
    text = PAGE.read_text(encoding="utf-8").partition("\n## Glossary")[2]
    rows = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    return [word.strip() for row in rows for word in row.split(",") if word.strip() != "word"]


@functools.cache
def places() -> dict[str, set[str]]:
    """Return the names of the package by the words in them, without those of the engines."""
    found: dict[str, set[str]] = defaultdict(set)
    engines = set(ENGINES.split())
    for path, tree in trees().items():
        for name in {*names_of(tree)}:
            if path.startswith("adapters/") and name in engines:
                continue
            for part in parts_of(name):
                found[part].add(f"{path}: {name}")
            if "give_up" in name:
                found["give_up"].add(f"{path}: {name}")
    return found


@pytest.mark.parametrize("kind", WORDS)
def test_words_of_names_are_in_the_glossary(kind: str) -> None:
    """Some words mean nearly the same. Names use those of the glossary."""
    words = set(WORDS[kind].split())
    allowed = words & (set(glossary()) | ELSEWHERE.keys())
    strange = {
        word: sorted(names)[:3]
        for word in sorted(words - allowed)
        if (names := set[str]().union(*(places().get(form, set()) for form in forms_of(word))))
    }
    assert {} == strange
    assert len(words & set(glossary())) <= MOST[kind]


def test_glossary_has_each_word_once() -> None:
    """A word with two rows would have two meanings. A long list would cost readers time."""
    words = glossary()
    assert sorted(words) == sorted(set(words))
    assert len(words) <= MAX_WORDS
    listed = {word for kind in WORDS.values() for word in kind.split()} & set(words)
    assert [] == [w for w in sorted(listed) if not any(places().get(f) for f in forms_of(w))]


def test_each_name_of_a_module_has_one_value() -> None:
    """Two modules have no class or constant of one name with different values."""
    owners: dict[str, list[tuple[str, ast.AST]]] = defaultdict(list)
    for path, tree in trees().items():
        for node in tree.body:
            if isinstance(node, ast.ClassDef):
                owners[node.name].append((path, node))
        for name, value in assigned(tree):
            if name not in ("__all__", "log", "_LOG", "LOG") and value is not None:
                owners[name].append((path, value))
    several = {name: {*map(written, own)} for name, own in owners.items() if len(own) > 1}
    several.pop("K", None)  # A type variable has any value, and each module needs its own.
    assert {} == {name: sorted(values) for name, values in several.items() if len(values) > 1}


def written(owner: tuple[str, ast.AST]) -> str:
    """Return the source of a value. A class is a value of its own, by its path."""
    path, node = owner
    if isinstance(node, ast.ClassDef):
        return f"class of {path}"
    return ast.unparse(node).replace("npt.", "").replace("'", "")
