"""Plan and run the transfer of KV caches between two LLM serving engines.

kvspec computes which bytes of which rank belong to which bytes of which other rank. The two engines
may differ in parallel sizes, block sizes, cache layouts and page formats.

How it works:
    Describe both engines, and plan the transfer once. The plan holds for every request.

        >>> import kvspec
        >>> spec = kvspec.FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> group = kvspec.KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=spec)
        >>> producer, consumer = (
        ...     kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=size))
        ...     for size in (2, 3))
        >>> plan = kvspec.plan_transfer(producer, consumer)
        >>> [str(rank) for rank in plan.sources(kvspec.RankId(tp=1))]
        ['tp0', 'tp1']

    The next steps have functions of their own. `build_table` makes descriptor rows for a pair of
    ranks. `kvspec.nixl` moves the bytes, and `kvspec.session` runs whole requests. `verify` and
    `explain` check and describe a plan.
"""

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
    LocalTransferError,
    Mismatch,
    MismatchError,
    RemoteTransferError,
    SpecError,
    StoreError,
    TransferError,
    TransferState,
    WireError,
)
from kvspec.memory.allocation import allocate, plan_memory
from kvspec.memory.rank_cache import Memory, RankCache, Region
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, Topology
from kvspec.ownership.slices import TPTransferSlice
from kvspec.plan.mismatches import mismatches
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KeyContent,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
    scales_digest,
)
from kvspec.version import __version__

__all__ = [
    "BlockTable",
    "ChunkedLocalAttentionSpec",
    "CircularBufferSpec",
    "CounterExample",
    "CrossAttentionSpec",
    "DescriptorTable",
    "EngineSpec",
    "FullAttentionSpec",
    "KVCacheGroup",
    "KVSpecError",
    "KeyContent",
    "LayerSpec",
    "LocalTransferError",
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
    "RemoteTransferError",
    "ReplicaPolicy",
    "SlidingWindowMLASpec",
    "SlidingWindowSpec",
    "SpecError",
    "StoreError",
    "TPTransferSlice",
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
    "scales_digest",
    "traffic",
    "verify",
]

# The other public modules. They are imported on first use, because some of them need packages that
# are not always installed, such as nixl or hypothesis.
ON_DEMAND = frozenset(
    {
        "adapters.sglang",
        "adapters.transformers",
        "adapters.vllm",
        "models.catalogue",
        "analysis",
        "check",
        "check.differences",
        "digests",
        "draw",
        "models",
        "nixl",
        "wire",
        "session",
        "stored",
        "tickets",
        "testing",
        "testing.kit",
        "testing.laws",
        "testing.strategies",
    }
)


def __getattr__(name: str) -> ModuleType:
    """Import a public module on its first use, as in `kvspec.models.from_config`."""
    if not any(module.partition(".")[0] == name for module in ON_DEMAND):
        raise AttributeError(f"module 'kvspec' has no attribute {name!r}")
    return import_module(f"kvspec.{name}")
