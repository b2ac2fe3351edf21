"""The arrows between modules point one way, and what is heavy is imported late.

ORDER has a place for every module of kvspec: a module imports only what stands above it. The same
rows are drawn in CONTRIBUTING.md.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

import kvspec

PACKAGE = Path(kvspec.__file__).parent
ROOT = Path(__file__).parent.parent
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

ORDER = (
    "errors",
    "dtypes",
    "ranges",
    "parallel",
    "slices",
    "specs.layer",
    "specs.attention",
    "specs.state",
    "specs.uniform",
    "specs",
    "layout",
    "engine",
    "mismatches",
    "shares",
    "loads",
    "plan",
    "explain",
    "flows",
    "request",
    "cache",
    "allocation",
    "overlaps",
    "tensors",
    "geometry",
    "runs",
    "pieces",
    "table",
    "describe",
    "traffic",
    "counterexample",
    "coverage",
    "checker",
    "proof",
    "verify",
    "reference",
    "nixl.checks",
    "nixl.states",
    "nixl.agent",
    "nixl.pairs",
    "nixl.inbox",
    "nixl.transfer",
    "nixl.rank",
    "nixl",
    "",  # kvspec/__init__.py, which names the public values
    "models.fields",
    "models.table",
    "models.build",
    "models",
    "catalogue",
    "testing.carve",
    "testing.positions",
    "testing.oracle",
    "testing",
    "testing.kinds",
    "testing.parallels",
    "testing.engines",
    "testing.strategies",
    "testing.world",
    "simulate",
    "draw.canvas",
    "draw.scene",
    "draw.column",
    "draw.block",
    "draw.bars",
    "draw.ranks",
    "draw.memory",
    "draw",
    "adapters",
    "adapters.vllm_config",
    "adapters.vllm_states",
    "adapters.vllm_specs",
    "adapters.vllm_memory",
    "adapters.vllm_tensors",
    "adapters.vllm",
    "run.limits",
    "run.job",
    "run.report",
    "run.contents",
    "run.notices",
    "run.worker",
    "run.conduct",
    "run",
    "cli",
    "cli.options",
    "cli.show",
    "cli.simulate",
    "cli.slices",
    "cli.transfer",
    "cli.verify",
    "cli.app",
    "cli.__main__",
)
PLACE = {f"kvspec.{name}".rstrip("."): place for place, name in enumerate(ORDER)}

UPWARD = {
    ("kvspec.plan", "kvspec.explain"): "a plan reads itself out; explain reads plans",
    ("kvspec.plan", "kvspec.traffic"): "a plan counts what it moves; traffic reads plans",
    ("kvspec.cache", "kvspec.tensors"): "RankCache.from_tensors; tensors builds RankCaches",
    ("kvspec.table", "kvspec.describe"): "a table tells of one descriptor; describe reads tables",
    ("kvspec.plan", "kvspec.draw"): "a plan draws itself",
    ("kvspec.table", "kvspec.draw"): "a table draws itself",
    ("kvspec.cli", "kvspec.cli.app"): "the entry point says which extra is missing",
}
"""Imports against the order, each inside a function, and why."""

CORE = {name for name, place in PLACE.items() if place < PLACE["kvspec.nixl.checks"]}
"""The pure part: descriptions in, rows out."""

EFFECTS = {"torch", "nixl", "ctypes", "socket", "threading", "subprocess", "time", "os", "pathlib"}
"""What the pure part may not import at the top of a module."""

HEAVY = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "msgspec", "hypothesis", "typer", "rich")

MAX_LINES = 300
MAX_FUNCTION = 60


@attrs.frozen
class Import:
    """One imported module; *late*: inside a function."""

    name: str
    late: bool


def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of *module*."""
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports_of(module: str, *, typing_too: bool = True) -> Iterator[Import]:
    """Yield what *module* imports; *typing_too*: also what only a type checker reads."""

    def walk(node: ast.AST, *, late: bool) -> Iterator[Import]:
        checked = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        if checked and not typing_too:
            return
        if isinstance(node, ast.Import):
            yield from (Import(each.name, late) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: imports are written out"
            whole = [f"{node.module}.{each.name}" for each in node.names]
            names = [name if name in SOURCES else str(node.module) for name in whole]
            yield from (Import(name, late) for name in dict.fromkeys(names))
        inside = late or isinstance(node, (ast.FunctionDef, ast.Lambda))
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late=inside)

    yield from walk(tree_of(module), late=False)


def top(name: str) -> str:
    """Return the package that *name* belongs to."""
    return name.partition(".")[0]


def test_every_module_has_a_place() -> None:
    """The table names the modules that there are, each once."""
    assert sorted(SOURCES) == sorted(PLACE)
    assert len(ORDER) == len(PLACE)


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_imports_only_what_stands_above_it(module: str) -> None:
    """Arrows point one way, those that only a type checker follows too."""
    against = {
        each.name
        for each in imports_of(module)
        if top(each.name) == "kvspec"
        and each.name != module
        and PLACE[each.name] >= PLACE[module]
        and not (each.late and (module, each.name) in UPWARD)
    }
    assert set() == against


def test_every_exception_is_still_needed() -> None:
    """Each import against the order is there, and inside a function."""
    found = {(module, each.name) for module in SOURCES for each in imports_of(module) if each.late}
    assert set() == set(UPWARD) - found


def test_the_core_does_nothing_but_compute() -> None:
    """Descriptions in, rows out: no clock, no file, no process, no framework."""
    found = {
        (module, each.name)
        for module in CORE
        for each in imports_of(module, typing_too=False)
        if top(each.name) in EFFECTS and not each.late
    }
    assert set() == found


def test_torch_is_imported_only_inside_functions() -> None:
    """Who plans does not wait for torch to start."""
    found = {
        module
        for module in SOURCES
        for each in imports_of(module, typing_too=False)
        if top(each.name) == "torch" and not each.late
    }
    assert set() == found


def test_one_module_binds_nixl() -> None:
    """Nothing but `kvspec.nixl.agent` imports nixl, nor anything by a name worked out late.

    `kvspec` itself finds its own modules by name, when they are first asked for.
    """
    found = {
        module
        for module, path in SOURCES.items()
        if any(top(each.name).startswith("nixl") for each in imports_of(module))
        or "import_module" in path.read_text(encoding="utf-8")
    }
    assert {"kvspec", "kvspec.nixl.agent"} == found


@pytest.mark.parametrize("start", ["kvspec", "kvspec.verify", "kvspec.table", "kvspec.reference"])
def test_importing_kvspec_loads_nothing_heavy(start: str) -> None:
    """A process that only plans loads attrs and numpy."""
    code = f"import sys, {start}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    told = subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "" == told.stdout.strip()


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_can_be_read_in_one_sitting(module: str) -> None:
    """A file has fewer than 300 lines and a function at most 60, docstring and all.

    The options of a command are its signature; there, only what follows is counted.
    """
    assert len(SOURCES[module].read_text(encoding="utf-8").splitlines()) < MAX_LINES
    options = module.startswith("kvspec.cli.")
    long = {
        node.name: 1 + (node.end_lineno or 0) - (node.body[0] if options else node).lineno
        for node in ast.walk(tree_of(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    }
    assert {} == {name: lines for name, lines in long.items() if lines > MAX_FUNCTION}


@pytest.mark.parametrize("module", SOURCES)
def test_a_module_opens_with_what_it_obeys(module: str) -> None:
    """The first statement is a docstring."""
    assert (ast.get_docstring(tree_of(module)) or "").strip()


@pytest.mark.parametrize("module", [name for name in SOURCES if ".testing" not in name])
def test_input_is_never_asserted(module: str) -> None:
    """An assert is gone under ``python -O``; input is refused with an error instead."""
    found = [node.lineno for node in ast.walk(tree_of(module)) if isinstance(node, ast.Assert)]
    assert [] == found


def test_contributing_draws_the_same_order() -> None:
    """The picture in CONTRIBUTING.md names the modules of the table, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.partition("```text arrows\n")[2].partition("```")[0]
    words = drawn.replace("←", " ").replace("·", " ").split()
    places = [PLACE[f"kvspec.{word}"] for word in words]
    assert places == sorted(places)
    packages = {"models", "testing", "run", "cli", "specs", "draw", "adapters"}
    modules = {name for name in ORDER if name and name.partition(".")[0] not in packages}
    assert modules | packages == set(words)


def test_parts_of_the_library_come_when_they_are_named() -> None:
    """`kvspec.models` needs no import of its own, and what nobody names is not loaded."""
    code = (
        "import kvspec, sys; assert 'kvspec.models' not in sys.modules; "
        "print(kvspec.models.from_config.__name__, 'kvspec.nixl' in sys.modules)"
    )
    done = subprocess.run(  # noqa: S603 - our own interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert "from_config False\n" == done.stdout
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        kvspec.nothing  # noqa: B018
