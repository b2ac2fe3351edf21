"""Test the public names of the package, their documentation and their examples."""

from __future__ import annotations

import ast
import inspect
import re
import subprocess
import sys
from collections import Counter
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest

import kvspec

pytestmark = pytest.mark.pages

PACKAGE = Path(kvspec.__file__).parent
PAGE = PACKAGE.parent / "docs" / "public-names.md"
MODULES = tuple(import_module(f"kvspec.{name}") for name in sorted(kvspec.ON_DEMAND))
PLACES = (kvspec, *MODULES)


FROZEN = """
    kvspec BlockTable ChunkedLocalAttentionSpec CounterExample CrossAttentionSpec DescriptorTable
    kvspec EngineSpec FullAttentionSpec KVCacheGroup KVSpecError KeyContent LayerSpec
    kvspec MLAAttentionSpec TPTransferSlice
    kvspec MambaSpec Memory Mismatch MismatchError ParallelConfig Part RankCache RankId Region
    kvspec ReplicaPolicy SlidingWindowMLASpec SlidingWindowSpec SpecError Topology TransferError
    kvspec TransferPlan TransferRequest TransferState UniformTypeKVCacheSpecs WireError __version__
    kvspec allocate build_table explain mismatches plan_memory plan_transfer traffic verify
    kvspec.adapters.sglang block_tables engine_spec parallel_config rank_cache
    kvspec.adapters.vllm block_tables engine_spec from_vllm rank_cache
    kvspec.models from_config
    kvspec.nixl NixlRank Staging Transfer
    kvspec.wire VERSION
    kvspec.session Channel Session Load TcpChannel new_remote_id
    kvspec.tickets PrefillTicket
"""
"""Names that version 1.0 will keep. Each line has a module and its names."""

PROVISIONAL = """
    kvspec CircularBufferSpec LocalTransferError RemoteTransferError StoreError scales_digest
    kvspec.adapters.sglang UnifiedPages worker_rank
    kvspec.adapters.transformers Prompts
    kvspec.adapters.vllm CanonicalPages LMCacheChunks MooncakeShards
    kvspec.adapters.vllm WorkerInfo loses_a_token stages whole_engine worker_rank
    kvspec.analysis Simulation simulate
    kvspec.check prove
    kvspec.check.differences differing differing_rows row_digests
    kvspec.digests compile_digest digest tensor_digest wanted
    kvspec.draw plan_svg table_svg
    kvspec.models architectures
    kvspec.models.catalogue config names
    kvspec.session SessionCollector Transport
    kvspec.stored BucketObjects FileObjects Hit LoadError Loaded MemoryObjects ObjectContents
    kvspec.stored ObjectKey Objects PageLoadPlan PageObject PageStore RankPages Saved StorePlan
    kvspec.stored StoredObject StoredSpec StoredTensor explain_lookup longest_prefix
    kvspec.stored plan_load plan_store
    kvspec.stored BegunStore BlocksReleased PageFailed PageStored StoreLedger
    kvspec.stored ModelIdentity PageNames PromptIdentity explain_difference page_names space_of
    kvspec.tickets ContentIdentity MediaItem RankAgreement ReleaseAgreement content_of
    kvspec.tickets explain_difference sampling_of
    kvspec.wire Secret
    kvspec.testing Case FakeNixl fill logical_views
    kvspec.testing.kit WrongCase Judgement Supports System SystemReport Verdict as_code judge
    kvspec.testing.laws KVSPEC LAWS Move PreparedLists System broken
    kvspec.testing.strategies KINDS cases engine_pairs engines requests specs
"""
"""Names that may change before version 1.0."""

WITHOUT_EXAMPLE = {
    "is a base class or a protocol": (
        "kvspec.KVSpecError kvspec.LayerSpec kvspec.session.Channel kvspec.session.Transport "
        "kvspec.stored.Objects"
    ),
    "needs NIXL or a second process": (
        "kvspec.nixl.NixlRank kvspec.nixl.Staging kvspec.nixl.Transfer "
        "kvspec.session.Session kvspec.session.Load kvspec.session.SessionCollector"
    ),
    "needs vLLM": ("kvspec.adapters.vllm.from_vllm kvspec.adapters.vllm.whole_engine"),
    "needs what another program has stored": (
        "kvspec.adapters.sglang.UnifiedPages kvspec.adapters.vllm.CanonicalPages "
        "kvspec.adapters.vllm.LMCacheChunks kvspec.adapters.vllm.MooncakeShards"
    ),
    "needs transformers and a model": "kvspec.adapters.transformers.Prompts",
    "is a value that another public name returns or accepts": (
        "kvspec.TPTransferSlice "
        "kvspec.adapters.vllm.WorkerInfo kvspec.analysis.Simulation kvspec.tickets.PrefillTicket "
        "kvspec.stored.BegunStore kvspec.stored.BlocksReleased kvspec.stored.PageFailed "
        "kvspec.stored.ModelIdentity kvspec.stored.PageStored kvspec.stored.PromptIdentity "
        "kvspec.tickets.ContentIdentity kvspec.tickets.MediaItem "
        "kvspec.testing.kit.WrongCase kvspec.testing.kit.Judgement "
        "kvspec.testing.kit.SystemReport kvspec.testing.kit.Verdict "
        "kvspec.stored.Hit kvspec.stored.LoadError kvspec.stored.Loaded kvspec.stored.PageObject "
        "kvspec.stored.PageLoadPlan kvspec.stored.RankPages kvspec.stored.Saved "
        "kvspec.stored.StorePlan kvspec.stored.StoredObject kvspec.stored.StoredTensor"
    ),
    "is part of a larger check, which has an example": (
        "kvspec.digests.wanted kvspec.testing.fill kvspec.testing.laws.broken"
    ),
}
"""Public classes and functions without an example in their docstring, by the reason."""

MAX_FROZEN, MAX_PROVISIONAL = 61, 125


def whole_names(table: str) -> list[str]:
    """Return the names of *table* with their modules, such as `kvspec.models.from_config`."""
    rows = [line.split() for line in table.strip().splitlines()]
    return [f"{module}.{name}" for module, *names in rows for name in names]


def public_names() -> set[str]:
    """Return every name of every `__all__` but modules, which are public by `ON_DEMAND`."""
    return {
        f"{module.__name__}.{name}"
        for module in PLACES
        for name in module.__all__
        if not inspect.ismodule(getattr(module, name))
    }


def test_public_names_are_listed() -> None:
    """A name is frozen or provisional, and both lists stay small."""
    frozen, provisional = whole_names(FROZEN), whole_names(PROVISIONAL)
    assert sorted(public_names()) == sorted(frozen + provisional)
    assert (len(frozen), len(provisional)) <= (MAX_FROZEN, MAX_PROVISIONAL)
    assert len(provisional) <= MAX_PROVISIONAL


def test_page_of_public_names_lists_them() -> None:
    """`docs/public-names.md` has a table of the frozen names, then one of the provisional names."""
    _, frozen, provisional = PAGE.read_text(encoding="utf-8").split("\n## ")
    assert [sorted(whole_names(FROZEN)), sorted(whole_names(PROVISIONAL))] == [
        sorted(
            f"{module}.{name}"
            for module, cell in re.findall(
                r"^\| `(kvspec[\w.]*)` \| (.*) \|$", section, re.MULTILINE
            )
            for name in re.findall(r"`(\w+)`", cell)
        )
        for section in (frozen, provisional)
    ]


@pytest.mark.parametrize("module", PLACES, ids=lambda module: module.__name__)
def test_public_module_lists_its_documented_names(module: ModuleType) -> None:
    """`__all__` has each name once, and each class and function in it has a docstring."""
    assert len(module.__all__) == len(set(module.__all__))
    assert all(hasattr(module, name) for name in module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        if inspect.isclass(value) or inspect.isfunction(value):
            assert inspect.getdoc(value), name


def test_public_names_have_an_example() -> None:
    """The docstring has an example, or the list of exceptions has the name and the reason."""
    without = {
        f"{module.__name__}.{name}"
        for module in PLACES
        for name in module.__all__
        for value in [getattr(module, name)]
        if inspect.isclass(value) or inspect.isfunction(value)
        if ">>>" not in (inspect.getdoc(value) or "")
    }
    listed = [name for names in WITHOUT_EXAMPLE.values() for name in names.split()]
    assert sorted(without) == sorted(listed)


def test_public_modules_are_loaded_at_their_first_use() -> None:
    """A bare ``import kvspec`` loads none of these modules."""
    code = (
        "import sys, kvspec; "
        "late = kvspec.ON_DEMAND - {'analysis', 'check'}; "
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


def test_class_names_are_unique() -> None:
    """Only private classes of different modules may have the same name."""
    names = Counter(
        node.name
        for path in PACKAGE.rglob("*.py")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [] == [name for name, times in names.items() if times > 1]
