"""Read the addresses of an engine's own tensors, and move a request between them.

```sh
python examples/read_tensors.py
```

The producer keeps one tensor for each layer, as vLLM does with the layout HND: its shape has tokens
before heads, and its strides have heads before tokens. The consumer has one pool for all layers, as
TensorRT-LLM does. torch tensors are read in the same way: kvspec copies nothing.
"""

from __future__ import annotations

import ctypes

import numpy as np

import kvspec
from kvspec import RankId

HEADS, SIZE, LAYERS = 8, 64, ["layers.0", "layers.1"]
TOKENS = 40


def engine(tp_size: int, block_size: int, layout: str) -> kvspec.EngineSpec:
    """Return an engine. The layout names the axes in the order of memory, outermost first."""
    spec = kvspec.FullAttentionSpec(
        block_size=block_size, total_num_kv_heads=HEADS, head_size=SIZE, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=LAYERS, spec=spec)
    parallel = kvspec.ParallelConfig(tp_size=tp_size)
    return kvspec.EngineSpec(groups=[group], parallel=parallel, layout=layout)


def main() -> None:
    """Allocate as two engines do, describe the tensors, and move 40 tokens."""
    producer, consumer = engine(2, 16, "LKBHNC"), engine(4, 32, "BLKHNC")

    # The producer, on each rank: [2, blocks, tokens, heads, size]. It is a view of memory that has
    # heads before tokens.
    held = {
        rank: {
            layer: np.random.default_rng(rank.tp)
            .random((2, 8, HEADS // 2, 16, SIZE))
            .astype(np.float16)
            .transpose(0, 1, 3, 2, 4)
            for layer in LAYERS
        }
        for rank in producer.parallel.ranks
    }
    producers = {
        rank: kvspec.RankCache.from_tensors(producer, rank, tensors, axes="KBNHC")
        for rank, tensors in held.items()
    }

    # The consumer, on each rank: [blocks, layers, 2, heads, tokens, size]. A layer is a view of it.
    pools = {
        rank: np.zeros((4, len(LAYERS), 2, HEADS // 4, 32, SIZE), np.float16)
        for rank in consumer.parallel.ranks
    }
    consumers = {
        rank: kvspec.RankCache.from_tensors(
            consumer,
            rank,
            {layer: pool[:, number] for number, layer in enumerate(LAYERS)},
            axes="BKHNC",
        )
        for rank, pool in pools.items()
    }

    # A description that the strides contradict is refused, before any byte moves.
    try:
        kvspec.RankCache.from_tensors(producer, RankId(), held[RankId()], axes="KBHNC")
    except kvspec.SpecError as error:
        print("refused:", error.field)

    request = kvspec.TransferRequest(
        request_id="1",
        num_tokens=TOKENS,
        producer_blocks={"full": [5, 1, 2]},  # 16 tokens each
        consumer_blocks={"full": [3, 0]},  # 32 tokens each
    )
    plan = kvspec.plan_transfer(producer, consumer)
    for rank, cache in consumers.items():
        for source in plan.sources(rank):
            table = kvspec.build_table(plan, producers[source], cache)
            for address, target, length in table.descriptors(request).tolist():
                ctypes.memmove(target, address, length)

    # Token 37 is row 5 of the producer's block 2, and row 5 of the consumer's block 0. Head 5 of
    # the model is the second head of producer rank 1, and of consumer rank 2.
    sent = held[RankId(tp=1)]["layers.1"][1, 2, 5, 1]
    received = pools[RankId(tp=2)][0, 1, 1, 1, 5]
    print("value of token 37, head 5, layer 1:", np.array_equal(sent, received))
    print("wrong bytes:", kvspec.verify(plan, producers, consumers, request))


if __name__ == "__main__":
    main()
