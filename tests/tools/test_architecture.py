"""Test that folders import only lower layers, and that heavy modules are loaded late.

`FOLDERS` places every folder and single file of `kvspec/` in a layer. CONTRIBUTING.md draws the
same layers.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import attrs
import pytest

import kvspec

pytestmark = pytest.mark.pages

PACKAGE = Path(kvspec.__file__).parent
ROOT = Path(__file__).parents[2]
SOURCES = {
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(PACKAGE.rglob("*.py"))
}

FOLDERS = (
    "errors version",
    "inputs",
    "ownership",
    "specs",
    "engines",
    "plan memory models",
    "descriptors wire",
    "digests",
    "analysis check completion nixl tickets",
    "draw session stored",
    ".",  # kvspec/__init__.py, which exports the public names
    "testing",
    "adapters run vectors",
    "cli",
)
"""The folders and single files of `kvspec/` in layers. A layer imports only the layers before it.

Folders of one layer do not import each other.
"""

LAYER = {name: layer for layer, names in enumerate(FOLDERS) for name in names.split()}

CORE = {
    name
    for names in FOLDERS[: FOLDERS.index("analysis check completion nixl tickets")]
    for name in names.split()
}
CORE |= {"analysis", "check", "draw"}
CORE -= {"models"}
"""The pure part computes rows from descriptions. `models` reads a file, so it is not pure."""

EFFECTS = {"torch", "nixl", "ctypes", "socket", "threading", "subprocess", "time", "os", "pathlib"}
"""Modules that the pure part may not import when it is loaded."""

HEAVY = (
    "torch",
    "nixl",
    "nixl_cu12",
    "nixl_cu13",
    "msgspec",
    "hypothesis",
    "typer",
    "rich",
    "numba",
)

UNTYPED = {
    "kvspec.adapters.sglang.frontend_hooks.release_memory": "SGLang decides what it passes",
    "kvspec.adapters.sglang.hicache.cache_is_built": "SGLang decides what it passes",
    "kvspec.adapters.sglang.hicache.get": "SGLang decides what it passes",
    "kvspec.adapters.sglang.hicache.pages_are_stored": "SGLang decides what it passes",
    "kvspec.adapters.sglang.hicache.prompt_is_looked_up": "SGLang decides what it passes",
    "kvspec.adapters.sglang.plugin._cache_flushed": "SGLang decides what it passes",
    "kvspec.adapters.sglang.plugin._request_handled": "SGLang decides what it passes",
    "kvspec.adapters.sglang.plugin._update_begins": "SGLang decides what it passes",
    "kvspec.adapters.sglang.plugin._update_ended": "SGLang decides what it passes",
    "kvspec.adapters.vllm.connector.start_load_kv": "vLLM decides what it passes to this hook",
    "kvspec.adapters.vllm.connector.save_kv_layer": "vLLM decides what it passes to this hook",
    "kvspec.adapters.vllm.worker_side.refused": "vLLM decides what it passes to this hook",
    "kvspec.run.rank_client.ask": "the arguments of a command that another process runs",
    "kvspec.run.rank_client.send": "the arguments of a command that another process runs",
    "kvspec.testing.supports.only": "the fields of the class, which checks them",
    "kvspec.vectors.families.keys": "the fields of a spec, which checks them",
    "kvspec.vectors.families._with_tables": "the fields of a request, which checks them",
    "kvspec.testing.kinds.build": "Hypothesis passes the fields that it drew",
    "kvspec.vectors.families._engine": "the fields of a ParallelConfig",
    "kvspec.vectors.families._full": "the fields of a spec",
    "kvspec.vectors.families._ring": "the fields of a spec",
    "kvspec.testing.kinds._ring": "the fields of a spec that Hypothesis drew",
    "kvspec.vectors.families._latent": "the fields of a spec",
    "kvspec.vectors.recording._copied": "the fields that only the structure has",
    "kvspec.wire.messages.answer": "the fields that only the class of the answer has",
}
"""Functions that take ``**keywords`` of any type, and why."""

PRONOUNS = {"ours", "theirs", "mine", "yours"}

MAX_FUNCTION = 60

WATCHED = """
import sys
import kvspec, kvspec.draw
from kvspec import RankId

def engine(tp_size):
    spec = kvspec.FullAttentionSpec(
        block_size=4, total_num_kv_heads=4, head_size=8, dtype="float32"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp_size))

def watch(event, args):
    if event in ("open", "socket.__new__", "subprocess.Popen"):
        raise SystemExit(f"the core raises {event}: {args}")
    if event == "import" and args[0].partition(".")[0].startswith(("nixl", "torch", "msgspec")):
        raise SystemExit(f"the core imports {args[0]}")

plan = kvspec.plan_transfer(engine(2), engine(4))
caches = [
    {rank: kvspec.plan_memory(side, rank, 8) for rank in side.parallel.ranks}
    for side in (plan.producer, plan.consumer)
]
table = kvspec.build_table(plan, caches[0][RankId()], caches[1][RankId()])
request = kvspec.TransferRequest(
    request_id="r", num_tokens=6, producer_blocks={"full": [1, 2]}, consumer_blocks={"full": [3, 4]}
)
table.descriptors(request)  # numpy loads some of its modules at their first use
sys.addaudithook(watch)
plan = kvspec.plan_transfer(engine(2), engine(4))
table = kvspec.build_table(plan, caches[0][RankId()], caches[1][RankId()])
assert len(table.select(request)) and len(table.descriptors(request))
assert kvspec.explain(plan) and kvspec.explain(table, request=request)
assert kvspec.traffic(plan, 6) and kvspec.draw.plan_svg(plan) and kvspec.draw.table_svg(table)
assert kvspec.verify(plan, *caches, request) is None
print("done")
"""


@attrs.frozen
class Import:
    """One imported module.

    Attributes:
        name: Name of the module.
        late: Whether the import is inside a function.
        typing: Whether the import is only for a type checker.
    """

    name: str
    late: bool
    typing: bool


@cache
def tree_of(module: str) -> ast.Module:
    """Return the syntax tree of *module*."""
    return ast.parse(SOURCES[module].read_text(encoding="utf-8"))


@cache
def imports_of(module: str) -> tuple[Import, ...]:
    """Return the imports of *module*."""

    def walk(node: ast.AST, *, late: bool, typing: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, late, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module} line {node.lineno}: imports must be absolute"
            whole = [f"{node.module}.{alias.name}" for alias in node.names]
            names = [name if name in SOURCES else str(node.module) for name in whole]
            yield from (Import(name, late, typing) for name in dict.fromkeys(names))
        late = late or isinstance(node, (ast.FunctionDef, ast.Lambda))
        checked = isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        for child in ast.iter_child_nodes(node):
            yield from walk(child, late=late, typing=typing or checked)

    return tuple(walk(tree_of(module), late=False, typing=False))


def top(name: str) -> str:
    """Return the package that *name* belongs to."""
    return name.partition(".")[0]


def folder_of(module: str) -> str:
    """Return the folder or single file of `kvspec/` that *module* belongs to."""
    return module.split(".")[1] if "." in module else "."


def own_imports(module: str) -> Iterator[str]:
    """Yield the modules of kvspec that *module* imports, also inside functions and for types."""
    yield from (imported.name for imported in imports_of(module) if top(imported.name) == "kvspec")


def test_layers_place_every_folder_once() -> None:
    """A new folder needs a place in `FOLDERS`."""
    assert sorted({folder_of(module) for module in SOURCES}) == sorted(LAYER)


def test_folders_import_only_lower_layers() -> None:
    """Imports inside functions and for type checkers keep the rule, too."""
    upward = {
        (module, name)
        for module in SOURCES
        for name in own_imports(module)
        if folder_of(name) != folder_of(module)
        and LAYER[folder_of(name)] >= LAYER[folder_of(module)]
    }
    assert set() == upward


def test_files_form_no_import_cycle() -> None:
    """The topological sorter of Python raises an error for a cycle."""
    graph = {module: {name for name in own_imports(module) if name != module} for module in SOURCES}
    tuple(TopologicalSorter(graph).static_order())  # It raises CycleError.


def test_private_names_stay_in_their_folder() -> None:
    """No module imports a name with a leading underscore from another folder."""
    foreign = {
        (module, alias.name)
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and top(str(node.module)) == "kvspec"
        for alias in node.names
        if alias.name.startswith("_") and not alias.name.endswith("__")
        if folder_of(f"{node.module}.{alias.name}") != folder_of(module)
    }
    assert set() == foreign


def test_core_imports_no_effects() -> None:
    """Loading the core imports no clock, file, process or framework."""
    effects = {
        (module, imported.name)
        for module in SOURCES
        if folder_of(module) in CORE
        for imported in imports_of(module)
        if top(imported.name) in EFFECTS and not imported.late and not imported.typing
    }
    # A digest reads the bytes of a cache at their address, without a copy.
    assert {("kvspec.digests.regions", "ctypes")} == effects


def test_core_opens_no_file_and_imports_no_nixl() -> None:
    """An audit hook watches a process that makes, counts, explains, draws and checks a plan."""
    done = subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", WATCHED], capture_output=True, text=True, check=False, cwd=ROOT
    )
    assert ("", "done") == (done.stderr, done.stdout.strip())


def test_torch_is_imported_only_inside_functions() -> None:
    """A process that only plans does not wait until torch is loaded."""
    early = {
        module
        for module in SOURCES
        for imported in imports_of(module)
        if top(imported.name) == "torch" and not imported.late and not imported.typing
    }
    assert set() == early


def test_only_the_agent_module_imports_nixl() -> None:
    """Only `kvspec.nixl.agent` imports NIXL, also if the name of the module is computed.

    The other modules in the set import only modules of kvspec by a computed name. Plans and tables
    import `kvspec.draw`, when a notebook displays them.
    """
    importers = {
        module
        for module, path in SOURCES.items()
        if any(top(imported.name).startswith("nixl") for imported in imports_of(module))
        or "import_module" in path.read_text(encoding="utf-8")
    }
    lazy = {"kvspec", "kvspec.adapters", "kvspec.analysis", "kvspec.check", "kvspec.testing"}
    lazy |= {"kvspec.testing.kit", "kvspec.plan.plan", "kvspec.descriptors.table"}
    systems_of_authors = {"kvspec.testing.kit.pytest_plugin"}
    assert lazy | systems_of_authors | {"kvspec.nixl.agent"} == importers


def test_session_loads_nothing_of_kvspec_nixl() -> None:
    """A session takes any `Transport`. Only a type checker needs the class of NIXL."""
    loaded = [
        (module, imported.name)
        for module in SOURCES
        if folder_of(module) == "session"
        for imported in imports_of(module)
        if imported.name.startswith("kvspec.nixl") and not imported.typing
    ]
    assert [] == loaded


def test_import_of_kvspec_loads_no_heavy_module() -> None:
    """A process that only plans needs attrs and numpy, and none of the tools."""
    unused = (*HEAVY, "kvspec.run", "kvspec.vectors", "kvspec.testing", "kvspec.cli")
    code = f"import sys, kvspec; print(*sorted(set({unused!r}) & set(sys.modules)))"
    done = subprocess.run(  # noqa: S603 - our own interpreter and code
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert "" == done.stdout.strip()


def test_functions_have_at_most_60_lines() -> None:
    """The docstring does not count.

    The signature of a command contains its options, so only the body of a command is counted.
    """
    long: dict[str, int] = {}
    for module in SOURCES:
        options = module.startswith("kvspec.cli.")
        for node in ast.walk(tree_of(module)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[1 if documented else 0].lineno
                signature = 0 if options else node.body[0].lineno - node.lineno
                lines = 1 + (node.end_lineno or 0) - first + signature
                if lines > MAX_FUNCTION:
                    long[f"{module}.{node.name}"] = lines
    assert {} == long


SAME_NAME_SAME_MEANING = {
    "__init__": "a folder",
    "engine": "an EngineSpec: its class, or how to read it from a serving engine",
    "stored_pages": "the pages that a serving engine stores, read only",
    "tables": "the block tables of a serving engine",
    "tensors": "the tensors of a serving engine",
}
"""Names of files in several folders, with the one meaning of each name."""


def test_file_names_are_unique_unless_listed() -> None:
    """Files with one name must have the same meaning."""
    # A file of `kvspec.cli` has the name of its command.
    names = Counter(path.stem for name, path in SOURCES.items() if ".cli" not in name)
    twice = {name for name, count in names.items() if count > 1}
    assert set() == twice - set(SAME_NAME_SAME_MEANING)


def test_modules_have_a_docstring() -> None:
    """The first statement of each module is a docstring."""
    undocumented = [
        name for name in SOURCES if not (ast.get_docstring(tree_of(name)) or "").strip()
    ]
    assert [] == undocumented


def test_package_has_no_assert_statement() -> None:
    """``python -O`` removes asserts, so wrong input must raise an error instead."""
    asserts = [
        (module, node.lineno)
        for module in SOURCES
        if ".testing" not in module
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.Assert)
    ]
    assert [] == asserts


def test_keyword_arguments_are_typed_unless_listed() -> None:
    """A type checker cannot check untyped ``**keywords``. Each listed exception exists."""
    untyped = {
        f"{module}.{node.name}"
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.args.kwarg
        for kind in (node.args.kwarg.annotation,)
        if kind is None or ast.unparse(kind) in {"Any", "object"}
    }
    assert untyped == set(UNTYPED)


def test_names_contain_no_pronoun() -> None:
    """The sides are the producer and the consumer, or local and remote, but never "ours"."""
    pronouns = [
        (module, node.lineno)
        for module in SOURCES
        for node in ast.walk(tree_of(module))
        if (isinstance(node, ast.Name) and node.id in PRONOUNS)
        or (isinstance(node, ast.arg) and node.arg in PRONOUNS)
    ]
    assert [] == pronouns


def test_contributing_shows_the_layers_of_this_test() -> None:
    """The picture in CONTRIBUTING.md has the rows of `FOLDERS`, in their order."""
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    drawn = text.partition("```text layers\n")[2].partition("```")[0]
    assert [row.replace(".", "kvspec") for row in FOLDERS] == drawn.splitlines()
