"""MODEL: plans and tables of models with many kinds of caches, and the runs that they move.

Invariant: the groups are those that vLLM 0.32 makes for the same config. They are those of
`kvspec.models.from_config`, but vLLM divides the windows of DeepSeek-V4 into two groups, so that no
group is much larger than the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import attrs
import numpy as np
from planning import first_ranks
from requesting import budgeted
from timing import Options, Row, clock, cpu, forget, interleaved, readable

import kvspec
from kvspec import EngineSpec, KVCacheGroup, ParallelConfig, TransferRequest, models

# CPU seconds of one table, as in B14, and seconds of a plan, as in B3.
TABLE, PLAN, READ = 8e-3, 20e-3, 20e-3
TOKENS = 16_384

_V4: dict[str, Any] = {
    "architectures": ["DeepseekV4ForCausalLM"],
    "num_hidden_layers": 61,
    "head_dim": 512,
    "sliding_window": 128,
    "index_head_dim": 128,
    "compress_ratios": [128, *[128, 4] * 30],
}
# The heads are those for which vLLM has kernels of Kimi-K3. The number of layers is assumed: no
# published config was at hand. The time and the descriptors are proportional to it.
_FULL = [*range(4, 92, 4), 92, 93]
_K3: dict[str, Any] = {
    "architectures": ["KimiK3ForConditionalGeneration"],
    "model_type": "kimi_k3",
    "text_config": {
        "model_type": "kimi_linear",
        "num_hidden_layers": 93,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "dtype": "bfloat16",
        "linear_attn_config": {
            "full_attn_layers": _FULL,
            "kda_layers": [index for index in range(1, 94) if index not in _FULL],
            "head_dim": 128,
            "num_heads": 96,
            "short_conv_kernel_size": 4,
        },
    },
}
# For each model: its config, the options of `from_config`, and the TP sizes.
WORKS: Mapping[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V4, 61 layers": (_V4, {"dtype": "uint8", "block_size": 256}),
    "Kimi-K3, 93 layers": (_K3, {"block_size": 128}),
}


def modelled(options: Options) -> Iterator[Row]:
    """Time the groups, the plan and one table of each model, and count what a request moves."""
    for name, (config, given) in WORKS.items():
        groups = tuple(_as_vllm(models.from_config(config, **given)))
        (read,) = interleaved(
            options.times(16), cpu(lambda c=config, g=given: models.from_config(c, **g))
        )
        yield budgeted("MODEL", f"from_config, {name}, {len(groups)} groups", read, READ)
        producer, consumer = (
            EngineSpec(groups=groups, parallel=ParallelConfig(tp_size=size), layout="LBHNC")
            for size in (8, 4)
        )
        (planned,) = interleaved(options.times(16), lambda p=producer, c=consumer: _planned(p, c))
        yield budgeted("MODEL", f"plan_transfer, {name}, TP 8 -> 4", planned, PLAN)
        request = _request(groups)
        plan, blocks = kvspec.plan_transfer(producer, consumer), _blocks(groups)
        ranks = first_ranks(plan)
        source = kvspec.plan_memory(producer, ranks[0], blocks, 1 << 40)
        target = kvspec.plan_memory(consumer, ranks[1], blocks, 2 << 40)
        make = cpu(lambda p=plan, s=source, t=target: kvspec.build_table(p, s, t))
        (built,) = interleaved(options.times(16), make)
        yield budgeted("MODEL", f"build_table, {name}, TP 8 -> 4, one rank pair", built, TABLE)
        table = kvspec.build_table(plan, source, target)
        moved = table.descriptors(request)
        (selected,) = interleaved(options.times(16), cpu(lambda t=table, r=request: t.select(r)))
        yield Row(
            budget="MODEL",
            what=f"  {TOKENS:,} tokens: descriptors and their mean bytes; other: select",
            ours=f"{len(moved):,} of {int(moved[:, 2].mean()):,}",
            other=readable(selected),
        )


def _as_vllm(groups: tuple[KVCacheGroup, ...]) -> Iterator[KVCacheGroup]:
    """Yield the groups, with every second window in a group of its own."""
    for group in groups:
        if group.name != "sliding_window":
            yield group
            continue
        for first in range(2):
            yield attrs.evolve(group, name=f"window_{first}", layers=group.layers[first::2])


def _planned(producer: EngineSpec, consumer: EngineSpec) -> float:
    forget()
    return clock(lambda: kvspec.plan_transfer(producer, consumer))()


def _needed(group: KVCacheGroup) -> int:
    """Return the blocks of a request in a group."""
    spec = group.spec
    return -(-TOKENS // spec.block_size) if spec.parts[0].per_token else 1


def _blocks(groups: tuple[KVCacheGroup, ...]) -> int:
    return max(map(_needed, groups))


def _request(groups: tuple[KVCacheGroup, ...]) -> TransferRequest:
    """Return a request with shuffled blocks."""
    drawn = np.random.default_rng(0)
    pool = _blocks(groups)
    ours, theirs = (
        {group.name: drawn.permutation(pool)[: _needed(group)] for group in groups}
        for _ in range(2)
    )
    return TransferRequest(
        request_id="request", num_tokens=TOKENS, producer_blocks=ours, consumer_blocks=theirs
    )
