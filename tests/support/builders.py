"""Small engines, specs, configs and requests for tests.

Fields that a test does not pass are arbitrary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import kvspec
from kvspec.testing import Case

# The config.json of a small model with full attention.
LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "num_hidden_layers": 2,
    "hidden_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "torch_dtype": "bfloat16",
}


def gqa(heads: int = 4, **fields: Any) -> kvspec.FullAttentionSpec:
    """Return full attention of *heads* KV heads: 16 tokens a block, 4 elements of bfloat16."""
    defaults: dict[str, Any] = {"block_size": 16, "head_size": 4, "dtype": "bfloat16"}
    return kvspec.FullAttentionSpec(total_num_kv_heads=heads, **defaults | fields)


def mla(**fields: Any) -> kvspec.MLAAttentionSpec:
    """Return a latent: 16 tokens a block, 12 elements of bfloat16."""
    defaults: dict[str, Any] = {"block_size": 16, "head_size": 12, "dtype": "bfloat16"}
    return kvspec.MLAAttentionSpec(**defaults | fields)


def window(size: int, heads: int = 4, **fields: Any) -> kvspec.SlidingWindowSpec:
    """Return attention of *heads* KV heads with a sliding window of *size* tokens."""
    defaults: dict[str, Any] = {"block_size": 16, "head_size": 4, "dtype": "bfloat16"}
    defaults |= {"total_num_kv_heads": heads, "sliding_window": size}
    return kvspec.SlidingWindowSpec(**defaults | fields)


def mamba2(**fields: Any) -> kvspec.MambaSpec:
    """Return a Mamba2 state: 8 heads of 2, one group of 3, a conv state of 3 rows, bfloat16."""
    defaults: dict[str, Any] = {
        "num_heads": 8, "head_dim": 2, "n_groups": 1, "state_size": 3, "conv_kernel": 4,
        "dtype": "bfloat16",
    }  # fmt: skip
    return kvspec.MambaSpec.mamba2(**defaults | fields)


def engine(
    *groups: kvspec.LayerSpec | kvspec.KVCacheGroup,
    layers: Sequence[str] = ("l",),
    layout: str = "LBHNC",
    tp: int = 1,
    null_block: int | None = None,
    **sizes: Any,
) -> kvspec.EngineSpec:
    """Return an engine of *groups*. A spec becomes a group "g" of *layers*.

    Several specs become the groups "g0", "g1" and so on, and the names of their layers begin with
    the name of the group. *sizes* are fields of `ParallelConfig`.
    """
    made = [
        member
        if isinstance(member, kvspec.KVCacheGroup)
        else _group(member, at, len(groups), layers)
        for at, member in enumerate(groups)
    ]
    parallel = kvspec.ParallelConfig(**{"tp_size": tp} | sizes)
    return kvspec.EngineSpec(groups=made, parallel=parallel, layout=layout, null_block=null_block)


def group(
    spec: kvspec.LayerSpec, *layers: str, name: str = "g", **fields: Any
) -> kvspec.KVCacheGroup:
    """Return a group of *layers* (by default "l") with *fields* of its own."""
    return kvspec.KVCacheGroup(name=name, layers=layers or ("l",), spec=spec, **fields)


def sides(
    spec: kvspec.LayerSpec, producer: int, consumer: int
) -> tuple[kvspec.EngineSpec, kvspec.EngineSpec]:
    """Return two engines of one layer of *spec* that differ in their TP sizes."""
    return engine(spec, tp=producer), engine(spec, tp=consumer)


def _group(
    spec: kvspec.LayerSpec, at: int, count: int, layers: Sequence[str]
) -> kvspec.KVCacheGroup:
    name = "g" if count == 1 else f"g{at}"
    own = [layer if count == 1 else f"{name}.{layer}" for layer in layers]
    return kvspec.KVCacheGroup(name=name, layers=spec.layers or own, spec=spec)


def request(
    num_tokens: int, producer_blocks: Any, consumer_blocks: Any, **more: Any
) -> kvspec.TransferRequest:
    """Return a request. A table that is not in a mapping belongs to group "g"."""
    sides = (
        side if isinstance(side, Mapping) else {"g": side}
        for side in (producer_blocks, consumer_blocks)
    )
    return kvspec.TransferRequest(
        request_id="r", num_tokens=num_tokens, producer_blocks=next(sides),
        consumer_blocks=next(sides), **more,
    )  # fmt: skip


def case(
    producer: kvspec.EngineSpec,
    consumer: kvspec.EngineSpec,
    asked: kvspec.TransferRequest | None = None,
    **more: Any,
) -> Case:
    """Return the case of a request, in pools that fit its tables, or of an empty request."""
    asked = asked or request(0, {}, {})
    pools = [
        {name: 1 + int(max(table.block_ids, default=0)) for name, table in tables.items()}
        for tables in (asked.producer_blocks, asked.consumer_blocks)
    ]
    return Case(
        producer=producer, consumer=consumer, producer_pool=pools[0], consumer_pool=pools[1],
        request=asked, **more,
    )  # fmt: skip
