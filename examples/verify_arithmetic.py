"""Verify the arithmetic of your own connector against every byte that should arrive.

```sh
python examples/verify_arithmetic.py
```

`own_copies` stands for your code. It pairs ranks by the ratio of their counts, as many connectors
do. kvspec knows what each byte must be, so it judges the copies without your transport.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

import kvspec

TOKENS, BLOCK, HEADS = 40, 16, 4
# Block ids of the request, in the order of tokens.
BLOCKS = {"producer": [5, 9, 2], "consumer": [11, 12, 40]}


def engine(tp_size: int) -> kvspec.EngineSpec:
    """Return an engine with one layer of four KV heads."""
    spec = kvspec.FullAttentionSpec(
        block_size=BLOCK, total_num_kv_heads=HEADS, head_size=64, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    return kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=tp_size))


def own_copies(
    source: kvspec.RankCache, target: kvspec.RankCache
) -> Iterator[tuple[int, int, int]]:
    """Yield (producer address, consumer address, bytes). Replace this by your own arithmetic."""
    producer_tp = source.engine.parallel.tp_size
    consumer_tp = target.engine.parallel.tp_size
    if producer_tp >= consumer_tp:
        ratio = producer_tp // consumer_tp
        if source.rank.tp // ratio != target.rank.tp:
            return
        first_source, first_target = 0, source.rank.tp % ratio * (HEADS // producer_tp)
    else:
        ratio = consumer_tp // producer_tp
        if target.rank.tp // ratio != source.rank.tp:
            return
        first_source, first_target = target.rank.tp % ratio * (HEADS // consumer_tp), 0
    for producer_region in source.regions:
        consumer_region = target.region(producer_region.layer, producer_region.part)
        for token in range(TOKENS):
            from_block, to_block = (BLOCKS[side][token // BLOCK] for side in BLOCKS)
            for head in range(max(1, min(HEADS // producer_tp, HEADS // consumer_tp))):
                yield (
                    producer_region.address(from_block, first_source + head, token % BLOCK),
                    consumer_region.address(to_block, first_target + head, token % BLOCK),
                    producer_region.content_bytes,
                )


def judged(producer_tp: int, consumer_tp: int) -> str:
    """Return the first byte that would be wrong, or "right"."""
    producer, consumer = engine(producer_tp), engine(consumer_tp)
    plan = kvspec.plan_transfer(producer, consumer)
    # Caches on paper have addresses and no memory.
    caches = [
        {rank: kvspec.plan_memory(each, rank, 64, start) for rank in each.parallel.ranks}
        for each, start in ((producer, 0), (consumer, 1 << 40))
    ]
    request = kvspec.TransferRequest(
        request_id="1",
        num_tokens=TOKENS,
        producer_blocks={"full": BLOCKS["producer"]},
        consumer_blocks={"full": BLOCKS["consumer"]},
    )
    copies = {
        (source, target): np.array(
            [*own_copies(caches[0][source], caches[1][target])], np.uint64
        ).reshape(-1, 3)
        for source in caches[0]
        for target in caches[1]
    }
    # Each rank is a process, so the same address may occur in several of them.
    fault = kvspec.verify(plan, *caches, request, descriptors=copies, separate_processes=True)
    return "right" if fault is None else f"wrong: {fault}"


if __name__ == "__main__":
    for sizes in ((1, 1), (2, 1), (1, 4), (4, 2), (8, 2), (2, 8)):
        print("TP {} -> TP {}:".format(*sizes), judged(*sizes))
