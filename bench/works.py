"""The works that the benchmarks measure: models, pairs of engines and requests.

Invariant: a work consists of engines, block tables and addresses, and allocates nothing. Its caches
lie at invented addresses, so that a laptop can plan 40 GiB of cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

import kvspec
from kvspec import (
    EngineSpec,
    FullAttentionSpec,
    KVCacheGroup,
    LayerSpec,
    MLAAttentionSpec,
    ParallelConfig,
    RankCache,
    RankId,
    TransferRequest,
)

# `compare.py` runs these works with older checkouts, in which `plan_memory` was `lay_out`.
plan_memory = vars(kvspec).get("plan_memory") or vars(kvspec)["lay_out"]

GROUP = "full"
# Blocks of a pool that the request does not use, as a share of those that it uses. A shuffled table
# of a pool without spare blocks could never have gaps.
SPARE = 0.1


@attrs.frozen(kw_only=True)
class Work:
    """One model, one pair of engines and one request.

    All pairs are (producer's, consumer's).

    Attributes:
        name: Name of the work, as printed.
        layers: Number of layers.
        spec: Spec of every layer.
        tp_sizes: TP sizes of the engines. Used unless *parallels* are given.
        tokens: Tokens of the request.
        layouts: Layouts of the engines.
        block_sizes: Block sizes, if they differ from the block size of *spec*.
        kernel_blocks: Kernel block sizes, or None if a block is not divided.
        parallels: All parallel sizes of the engines.
        fragments: Blocks that are adjacent before the next random place. 1 is a shuffled pool,
            0 is a pool in order.
        cached: Leading tokens that the consumer has already.
    """

    name: str
    layers: int
    spec: LayerSpec
    tp_sizes: tuple[int, int]
    tokens: int
    layouts: tuple[str, str] = ("LBHNC", "LBHNC")
    block_sizes: tuple[int, int] | None = None
    kernel_blocks: tuple[int | None, int | None] = (None, None)
    parallels: tuple[ParallelConfig, ParallelConfig] | None = None
    fragments: int = 1
    cached: int = 0

    @property
    def blocks(self) -> tuple[int, int]:
        """Tokens of a block in each side's table, on one rank."""
        return self.block_sizes or (self.spec.block_size, self.spec.block_size)

    @property
    def sides(self) -> tuple[ParallelConfig, ParallelConfig]:
        """The parallel sizes of each side."""
        if self.parallels is not None:
            return self.parallels
        ours, theirs = (ParallelConfig(tp_size=size) for size in self.tp_sizes)
        return ours, theirs

    @property
    def used(self) -> tuple[int, int]:
        """Blocks of the request in each side's table. One block counts on every context rank."""
        ours, theirs = (
            -(-self.tokens // (size * side.context_size))
            for size, side in zip(self.blocks, self.sides, strict=True)
        )
        return ours, theirs

    @property
    def pools(self) -> tuple[int, int]:
        """Blocks of each side's pool."""
        ours, theirs = (used + max(2, int(used * SPARE)) for used in self.used)
        return ours, theirs

    def engines(self) -> tuple[EngineSpec, EngineSpec]:
        """Return new descriptions of the producer and the consumer."""
        names = tuple(f"model.layers.{i}" for i in range(self.layers))
        producer, consumer = (
            EngineSpec(
                groups=(
                    KVCacheGroup(
                        name=GROUP,
                        layers=names,
                        spec=attrs.evolve(self.spec, block_size=size),
                        kernel_block_size=kernel,
                    ),
                ),
                parallel=side,
                layout=layout,
            )
            for size, kernel, side, layout in zip(
                self.blocks, self.kernel_blocks, self.sides, self.layouts, strict=True
            )
        )
        return producer, consumer

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the request's block ids in the producer's and the consumer's pool."""
        drawn = np.random.default_rng(len(self.name) + self.tokens)
        ours, theirs = (
            self._fragmented(drawn, used, pool)
            for used, pool in zip(self.used, self.pools, strict=True)
        )
        return ours, theirs

    def _fragmented(self, drawn: np.random.Generator, used: int, pool: int) -> np.ndarray:
        if not self.fragments:
            return np.arange(used)
        runs = np.array_split(np.arange(pool), -(-pool // self.fragments))
        return np.concatenate([runs[i] for i in drawn.permutation(len(runs))])[:used]

    def request(self) -> TransferRequest:
        """Return the request."""
        ours, theirs = self.tables()
        return TransferRequest(
            request_id=self.name,
            num_tokens=self.tokens,
            cached_tokens=self.cached,
            producer_blocks={GROUP: ours},
            consumer_blocks={GROUP: theirs},
        )


def afresh(request: TransferRequest) -> TransferRequest:
    """Return *request* without anything that a table has stored in it."""
    if hasattr(request, "known"):  # Requests of the oldest comparable checkouts store nothing.
        request.known.clear()
    return request


def heads(num: int, block_size: int) -> FullAttentionSpec:
    """Return the common spec: *num* KV heads of 128 elements, bfloat16."""
    return FullAttentionSpec(
        block_size=block_size, total_num_kv_heads=num, head_size=128, dtype="bfloat16"
    )


# The latents of DeepSeek-V3: 512 elements and 64 of the rotary embedding.
LATENT = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")

# Llama-3.1-70B, 128 Ki tokens, TP 8 to TP 4.
W1 = Work(name="W1", layers=80, spec=heads(8, 16), tp_sizes=(8, 4), tokens=131_072)

# The latents of DeepSeek-V3, TP 8 to TP 1.
W2 = Work(name="W2", layers=61, spec=LATENT, tp_sizes=(8, 1), tokens=131_072)

# 32 layers, TP 8 to TP 4, rows first, 1,024 tokens: 524,288 runs of 256 bytes.
W3 = Work(
    name="W3",
    layers=32,
    spec=heads(8, 64),
    tp_sizes=(8, 4),
    tokens=1024,
    layouts=("LKBNHC", "LKBNHC"),
)

# W1 with other stages, into blocks that are four times as large.
W4 = Work(
    name="W1 with PP 2 -> 3, blocks 16 -> 64",
    layers=80,
    spec=heads(8, 16),
    tp_sizes=(8, 4),
    tokens=131_072,
    block_sizes=(16, 64),
    parallels=(ParallelConfig(tp_size=8, pp_size=2), ParallelConfig(tp_size=4, pp_size=3)),
)

# W1 with other stages, and block sizes of which neither divides the other.
W5 = Work(
    name="W1 with PP 2 -> 3, blocks 48 -> 32",
    layers=80,
    spec=heads(8, 16),
    tp_sizes=(8, 4),
    tokens=131_072,
    block_sizes=(48, 32),
    parallels=W4.parallels,
)

# The latents of DeepSeek-V3, each token on one of eight context ranks.
W6 = Work(
    name="W2 with DCP 8, interleave 64 -> TP 1",
    layers=61,
    spec=LATENT,
    tp_sizes=(8, 1),
    tokens=131_072,
    parallels=(ParallelConfig(tp_size=8, dcp_size=8, interleave_size=64), ParallelConfig()),
)


def many_ranks(scale: int = 4) -> Work:
    """Return the model of W1 on 32 * *scale* -> 64 * *scale* ranks with other stages and contexts.

    PP 4 and DCP *scale* with an interleave of 4 tokens become PP 2 and DCP 4 * *scale* with 64.
    Every consumer rank reads both stages that hold its layers, and every context rank of the
    producer.
    """
    sides = (
        ParallelConfig(tp_size=8 * scale, pp_size=4, dcp_size=scale, interleave_size=4),
        ParallelConfig(tp_size=32 * scale, pp_size=2, dcp_size=4 * scale, interleave_size=64),
    )
    return Work(
        name=f"{32 * scale} x {64 * scale} ranks, PP 4 -> 2, DCP {scale} -> {4 * scale}",
        layers=80,
        spec=heads(8, 16),
        tp_sizes=(8 * scale, 32 * scale),
        tokens=131_072,
        block_sizes=(16, 64),
        parallels=sides,
    )


def caches(engine: EngineSpec, num_blocks: int, side: int) -> Iterator[tuple[RankId, RankCache]]:
    """Yield every rank of *engine* and its cache, each in an address range of its own.

    *side* is 0 for the producer and 1 for the consumer, so that no two ranks of a transfer overlap.
    """
    for at, rank in enumerate(engine.parallel.ranks):
        # 1 TiB for each rank, more than any cache of a work, and room for 1,024 ranks of a side.
        base = (1 + 1024 * side + at) << 40
        yield rank, plan_memory(engine, rank, num_blocks, base)
