"""The arrows point one way, between folders and inside each, and what is heavy comes late.

FOLDERS has a place for every module of kvspec, from bottom to top: a module imports only what
stands above it. The same rows are drawn in CONTRIBUTING.md.
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
ROOT = Path(__file__).parents[2]
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

FOLDERS = (
    ("", "errors dtypes inputs words"),
    ("ownership", ". intervals tokens deals parallel part stripes election slices"),
    ("specs", "formats layer attention state uniform ."),
    ("engines", ". letters group stages engine"),
    ("plan", ". mismatches shares edges cover plan explain"),
    ("memory", ". layout region aliasing regions allocation arrays axes tensors"),
    ("staging", ". costs fitting ranges"),
    (
        "descriptors",
        (
            ". request shared paging pool boxes tables cells runs entries families selection"
            " untouched table explain"
        ),
    ),
    ("traffic", ". loads flows traffic"),
    ("check", "counting owners counterexample coverage places checker apart exhaustive verify ."),
    ("", "reference"),
    (
        "protocol",
        (
            "fingerprint plain reading regions handshake extent pushed"
            " states notices order held pending producer consumer wire seal ."
        ),
    ),
    (
        "nixl",
        (
            "errors rows spans memory introduction living agent calibration permuting area stage"
            " pieces merging lattice selected order staged choice"
            " notifications peers transfer flights rank ."
        ),
    ),
    ("", "digest"),
    (
        "session",
        (
            "background channel introduction control extents summing ledger remote remotes"
            " written audit load following reading pushing leftovers session heldprompt prompts ."
        ),
    ),
    ("", "."),  # kvspec/__init__.py, which names the public values
    ("models", "fields table build ."),
    ("", "catalogue"),
    ("testing", "formats carve typed positions oracle case world"),
    ("testing.laws", "system owners moves copies runs steps refusal ."),
    ("testing", "fake_nixl kinds parallels engines pairs requests strategies ."),
    ("", "simulate"),
    ("draw", "canvas lines block bars ranks memory ."),
    ("adapters", ". given"),
    (
        "adapters.vllm",
        (
            "config backends packing states specs memory arrays tensors engine heads made settings"
            " told tables scheduling worker connector ."
        ),
    ),
    ("adapters.sglang", "ranks pools engine tensors tables ."),
    (
        "run",
        (
            "limits job report contents notices worker launched conduct served started soak"
            " recovery calibrate ."
        ),
    ),
    ("cli", ". options simulate slices transfer verify calibrate app __main__"),
)
"""Folders and the files in each, from bottom to top; ``.`` is the folder's own ``__init__``."""

ORDER = [
    ".".join(filter(None, ("kvspec", folder, name.strip("."))))
    for folder, names in FOLDERS
    for name in names.split()
]
PLACE = {name: place for place, name in enumerate(ORDER)}

UPWARD = {
    ("kvspec.plan.plan", "kvspec.plan.explain"): "a plan reads itself out",
    ("kvspec.plan.plan", "kvspec.traffic.loads"): "a plan counts what it moves",
    ("kvspec.plan.plan", "kvspec.traffic.traffic"): "a plan counts what it moves",
    ("kvspec.plan.plan", "kvspec.draw"): "a plan draws itself",
    ("kvspec.memory.regions", "kvspec.memory.tensors"): "RankCache.from_tensors",
    ("kvspec.descriptors.table", "kvspec.descriptors.explain"): "a table tells of a descriptor",
    ("kvspec.descriptors.table", "kvspec.draw"): "a table draws itself",
    ("kvspec.descriptors.explain", "kvspec.nixl.choice"): "a table tells what a request costs",
    ("kvspec.protocol.handshake", "kvspec"): "the library's version",
    ("kvspec.cli", "kvspec.cli.app"): "the entry point says which extra is missing",
}
"""Imports against the order, each inside a function or for a type checker, and why."""

CORE = set(ORDER[: PLACE["kvspec.nixl.errors"]])
"""The pure part: descriptions in, rows out."""

EFFECTS = {"torch", "nixl", "ctypes", "socket", "threading", "subprocess", "time", "os", "pathlib"}
"""What the pure part may not import at the top of a module."""

HEAVY = ("torch", "nixl", "nixl_cu12", "nixl_cu13", "msgspec", "hypothesis", "typer", "rich")

UNTYPED = {
    "kvspec.adapters.vllm.connector.start_load_kv": "vLLM decides what it passes to this hook",
    "kvspec.adapters.vllm.connector.save_kv_layer": "vLLM decides what it passes to this hook",
    "kvspec.run.started.ask": "the arguments of a command that another process runs",
    "kvspec.run.started.tell": "the arguments of a command that another process runs",
    "kvspec.testing.kinds.build": "Hypothesis passes the fields that it drew",
}
"""Functions that take ``**keywords`` of any type, and why."""

PRONOUNS = {"ours", "theirs", "mine", "yours"}

MAX_LINES = 300
MAX_FUNCTION = 60


@attrs.frozen
class Import:
    """One imported module; *late*: inside a function; *typing*: for a type checker alone."""

    name: str
    late: bool
    typing: bool


def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of *module*."""
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


def imports_of(module: str) -> Iterator[Import]:
    """Yield what *module* imports."""

    def walk(node: ast.AST, *, late: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(each.name, late, typing) for each in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: imports are written out"
            whole = [f"{node.module}.{each.name}" for each in node.names]
            names = [name if name in SOURCES else str(node.module) for name in whole]
            yield from (Import(name, late, typing) for name in dict.fromkeys(names))
        late = late or isinstance(node, (ast.FunctionDef, ast.Lambda))
        checked = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late=late, typing=typing or checked)

    yield from walk(tree_of(module), late=False, typing=False)


IMPORTS = {module: tuple(imports_of(module)) for module in SOURCES}


def top(name: str) -> str:
    """Return the package that *name* belongs to."""
    return name.partition(".")[0]


def test_every_module_has_a_place() -> None:
    """The table names the modules that there are, each once."""
    assert sorted(SOURCES) == sorted(ORDER)


def test_a_module_imports_only_what_stands_above_it() -> None:
    """Arrows point one way, those that only a type checker follows too."""
    against = {
        (module, each.name)
        for module, found in IMPORTS.items()
        for each in found
        if top(each.name) == "kvspec"
        and each.name != module
        and PLACE[each.name] >= PLACE[module]
        and not ((each.late or each.typing) and (module, each.name) in UPWARD)
    }
    assert set() == against


def test_every_exception_is_still_needed() -> None:
    """Each import against the order is there, and is not made when the module is loaded."""
    found = {
        (module, each.name)
        for module in SOURCES
        for each in IMPORTS[module]
        if each.late or each.typing
    }
    assert set() == set(UPWARD) - found


def test_the_core_does_nothing_but_compute() -> None:
    """Descriptions in, rows out: no clock, no file, no process, no framework."""
    found = {
        (module, each.name)
        for module in CORE
        for each in IMPORTS[module]
        if top(each.name) in EFFECTS and not each.late and not each.typing
    }
    assert set() == found


def test_torch_is_imported_only_inside_functions() -> None:
    """Who plans does not wait for torch to start."""
    found = {
        module
        for module in SOURCES
        for each in IMPORTS[module]
        if top(each.name) == "torch" and not each.late and not each.typing
    }
    assert set() == found


def test_one_module_binds_nixl() -> None:
    """Nothing but `kvspec.nixl.agent` imports nixl, nor anything by a name worked out late.

    `kvspec`, `adapters` and `testing` find their own modules by name, when first asked for.
    """
    found = {
        module
        for module, path in SOURCES.items()
        if any(top(each.name).startswith("nixl") for each in IMPORTS[module])
        or "import_module" in path.read_text(encoding="utf-8")
    }
    assert {"kvspec", "kvspec.adapters", "kvspec.testing", "kvspec.nixl.agent"} == found


@pytest.mark.parametrize("start", ["kvspec", "kvspec.check.reference"])
def test_importing_kvspec_loads_nothing_heavy(start: str) -> None:
    """A process that only plans loads attrs and numpy."""
    code = f"import sys, {start}; print(*sorted(set({HEAVY!r}) & set(sys.modules)))"
    told = subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "" == told.stdout.strip()


def test_a_module_can_be_read_in_one_sitting() -> None:
    """A file has fewer than 300 lines and a function at most 60, docstring and all.

    The options of a command are its signature; there, only what follows is counted.
    """
    long: dict[str, int] = {}
    for module, path in SOURCES.items():
        lines = len(path.read_text(encoding="utf-8").splitlines())
        if lines >= MAX_LINES:
            long[module] = lines
        options = module.startswith("kvspec.cli.")
        for node in ast.walk(tree_of(module)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                first = (node.body[0] if options else node).lineno
                lines = 1 + (node.end_lineno or 0) - first
                if lines > MAX_FUNCTION:
                    long[f"{module}.{node.name}"] = lines
    assert {} == long


def test_a_module_opens_with_what_it_obeys() -> None:
    """The first statement is a docstring."""
    silent = [name for name in SOURCES if not (ast.get_docstring(tree_of(name)) or "").strip()]
    assert [] == silent


def test_input_is_never_asserted() -> None:
    """An assert is gone under ``python -O``; input is refused with an error instead."""
    found = [
        (module, node.lineno)
        for module in SOURCES
        if ".testing" not in module
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Assert)
    ]
    assert [] == found


def test_keyword_arguments_are_typed_unless_listed() -> None:
    """A call through untyped ``**keywords`` is checked by nobody; each exception is needed."""
    found = {
        f"{module}.{node.name}"
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.args.kwarg
        for kind in (node.args.kwarg.annotation,)
        if kind is None or ast.unparse(kind) in {"Any", "object"}
    }
    assert found == set(UNTYPED)


def test_the_two_sides_are_named() -> None:
    """Producer and consumer, local and remote: nothing is called by whose eyes see it."""
    found = [
        (module, node.lineno)
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if (isinstance(node, ast.Name) and node.id in PRONOUNS)
        or (isinstance(node, ast.arg) and node.arg in PRONOUNS)
    ]
    assert [] == found


def test_contributing_draws_the_same_order() -> None:
    """The picture in CONTRIBUTING.md has the table's folders and files, in its order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.partition("```text arrows\n")[2].partition("```")[0]
    rows = [line.split() for line in drawn.splitlines()]
    wanted = [
        [*([folder.replace(".", "/") + "/"] if folder else []), *files]
        for folder, names in FOLDERS
        if (files := [name for name in names.split() if name != "."])
    ]
    assert wanted == rows
