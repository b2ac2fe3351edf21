"""Draw the pictures of the documentation: ``python docs/draw_pictures.py``.

The script writes ``plan.svg``, ``table.svg`` and ``stored.svg`` into its own folder. They show a
model with 8 KV heads. The producer has 4 ranks and tokens outermost. The consumer has 3 ranks and
heads outermost. In ``stored.svg``, the producer is a stored page of 4 head groups.
"""

from __future__ import annotations

from pathlib import Path

import kvspec
from kvspec.draw import plan_svg, table_svg
from kvspec.stored import StoredSpec, plan_load

HERE = Path(__file__).parent


def engine(tp_size: int, layout: str) -> kvspec.EngineSpec:
    """Return an engine that serves Llama-3.1-8B."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16"
    )
    layers = tuple(f"model.layers.{number}" for number in range(32))
    group = kvspec.KVCacheGroup(name="attention", layers=layers, spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=tp_size)
    return kvspec.EngineSpec(groups=(group,), parallel=parallel, layout=layout)


def pictures() -> dict[str, str]:
    """Return every picture by its file name."""
    producer, consumer = engine(4, "NHD"), engine(3, "HND")
    plan = kvspec.plan_transfer(producer, consumer)
    rank = kvspec.RankId(tp=1)
    source, _source = kvspec.allocate(producer, rank, num_blocks=4)
    target, _target = kvspec.allocate(consumer, rank, num_blocks=4)
    table = kvspec.build_table(plan, source, target)
    load = plan_load(StoredSpec.of(producer, page_tokens=64, head_groups=4), consumer)
    return {
        "plan.svg": plan_svg(plan),
        "table.svg": table_svg(table),
        "stored.svg": plan_svg(load.plan),
    }


if __name__ == "__main__":
    for name, text in pictures().items():
        (HERE / name).write_text(text + "\n", encoding="utf-8")
