"""Which bytes of which rank's KV cache go where, for any two LLM serving engines."""

from importlib import import_module
from types import ModuleType

from kvspec.analysis.counts import traffic
from kvspec.analysis.explanation import explain
from kvspec.check.checker import CounterExample
from kvspec.check.verify import verify
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.descriptors.table import DescriptorTable, build_table
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import (
    KVSpecError,
    Mismatch,
    MismatchError,
    SpecError,
    TransferError,
    TransferState,
    WireError,
)
from kvspec.memory.allocation import allocate, plan_memory
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, Topology
from kvspec.plan.mismatches import mismatches
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.version import __version__

__all__ = [
    "BlockTable",
    "ChunkedLocalAttentionSpec",
    "CounterExample",
    "CrossAttentionSpec",
    "DescriptorTable",
    "EngineSpec",
    "FullAttentionSpec",
    "KVCacheGroup",
    "KVSpecError",
    "LayerSpec",
    "MLAAttentionSpec",
    "MambaSpec",
    "Memory",
    "Mismatch",
    "MismatchError",
    "ParallelConfig",
    "Part",
    "RankCache",
    "RankId",
    "Region",
    "ReplicaPolicy",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SpecError",
    "Topology",
    "TransferError",
    "TransferPlan",
    "TransferRequest",
    "TransferState",
    "UniformTypeKVCacheSpecs",
    "WireError",
    "__version__",
    "allocate",
    "build_table",
    "explain",
    "mismatches",
    "plan_memory",
    "plan_transfer",
    "traffic",
    "verify",
]

ON_DEMAND = frozenset(
    {
        "adapters.sglang",
        "adapters.vllm",
        "models.catalogue",
        "analysis",
        "check",
        "check.digests",
        "check.reference",
        "draw",
        "models",
        "nixl",
        "protocol",
        "session",
        "testing",
        "testing.laws",
        "testing.strategies",
    }
)
"""The public modules beside this one: each is imported when it is first named."""


def __getattr__(name: str) -> ModuleType:
    """Import a part of the library when it is first named, as in ``kvspec.models.from_config``."""
    if not any(module.partition(".")[0] == name for module in ON_DEMAND):
        raise AttributeError(f"module 'kvspec' has no attribute {name!r}")
    return import_module(f"kvspec.{name}")


def _repr_svg_(value: TransferPlan | DescriptorTable) -> str:
    """Draw *value* for a notebook."""
    draw = import_module("kvspec.draw")
    text: str = draw.plan_svg(value) if isinstance(value, TransferPlan) else draw.table_svg(value)
    return text


# A plan or a table must not import `kvspec.draw`, which reads both. IPython looks for the method
# on the class, so this module, which stands above both, adds it.
for _drawn in (TransferPlan, DescriptorTable):
    setattr(_drawn, "_repr_svg_", _repr_svg_)  # noqa: B010 - mypy refuses the plain assignment
