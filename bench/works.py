"""The reference work that the budgets speak of.

Law: a work is engines, block tables and addresses; nothing is allocated. Caches lie at made-up
addresses, so that 40 GiB of cache can be planned and looked up on a laptop.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs
import numpy as np

from kvspec import (
    EngineSpec,
    FullAttentionSpec,
    KVCacheGroup,
    LayerSpec,
    MLAAttentionSpec,
    ParallelConfig,
    RankId,
    TransferRequest,
)
from kvspec.cache import Memory, RankCache, Region
from kvspec.layout import place
from kvspec.slices import Part

GROUP = "full"
SPARE = 0.1
"""Blocks of a pool that the request does not use, as a share of those that it does."""


@attrs.frozen(kw_only=True)
class Work:
    """One model, one pair of engines, one request.

    *fragments*: blocks that lie side by side on both sides before the next place is drawn; 1 is a
    shuffled pool, 0 a pool in order. *cached*: leading tokens that the consumer has.
    """

    name: str
    layers: int
    spec: LayerSpec
    tp_sizes: tuple[int, int]
    tokens: int
    layouts: tuple[str, str] = ("LBHNC", "LBHNC")
    fragments: int = 1
    cached: int = 0

    @property
    def num_blocks(self) -> int:
        """Blocks of each side's pool."""
        return self.used + max(2, int(self.used * SPARE))

    @property
    def used(self) -> int:
        """Blocks of the request."""
        return -(-self.tokens // self.spec.block_size)

    def engines(self) -> tuple[EngineSpec, EngineSpec]:
        """Return new descriptions of the producer and the consumer."""
        names = tuple(f"model.layers.{i}" for i in range(self.layers))
        group = KVCacheGroup(name=GROUP, layers=names, spec=self.spec)
        producer, consumer = (
            EngineSpec(groups=(group,), parallel=ParallelConfig(tp_size=size), layout=layout)
            for size, layout in zip(self.tp_sizes, self.layouts, strict=True)
        )
        return producer, consumer

    def tables(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the request's block ids in the producer's and the consumer's pool."""
        drawn = np.random.default_rng(len(self.name) + self.tokens)
        ours, theirs = (self._fragmented(drawn) for _ in range(2))
        return ours, theirs

    def _fragmented(self, drawn: np.random.Generator) -> np.ndarray:
        if not self.fragments:
            return np.arange(self.used)
        runs = np.array_split(np.arange(self.num_blocks), -(-self.num_blocks // self.fragments))
        return np.concatenate([runs[i] for i in drawn.permutation(len(runs))])[: self.used]

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


def heads(num: int, block_size: int) -> FullAttentionSpec:
    """Return the common spec: *num* KV heads of 128, bfloat16."""
    return FullAttentionSpec(
        block_size=block_size, total_num_kv_heads=num, head_size=128, dtype="bfloat16"
    )


LATENT = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")

W1 = Work(name="W1", layers=80, spec=heads(8, 16), tp_sizes=(8, 4), tokens=131_072)
"""Llama-3.1-70B, 128 Ki tokens, TP 8 to TP 4."""

W2 = Work(name="W2", layers=61, spec=LATENT, tp_sizes=(8, 1), tokens=131_072)
"""DeepSeek-V3's latents, TP 8 to TP 1."""

W3 = Work(
    name="W3",
    layers=32,
    spec=heads(8, 64),
    tp_sizes=(8, 4),
    tokens=1024,
    layouts=("LKBNHC", "LKBNHC"),
)
"""32 layers, TP 8 to TP 4, rows first, 1,024 tokens: 524,288 pieces of 256 bytes."""


def cache_at(engine: EngineSpec, rank: RankId, num_blocks: int, base: int) -> RankCache:
    """Return the cache of *rank* as it would lie at address *base*; no byte is allocated."""
    regions: list[Region] = []
    memory: list[Memory] = []
    for group in engine.groups:

        def local_units(part: Part) -> int:
            return len(engine.parallel.deal(part.units, part.deal_in).ranges[rank.tp])

        layers = [(layer, group.spec.of_layer(layer)) for layer in group.layers]
        placed, size = place(engine.layout_of(group), layers, local_units, num_blocks)
        memory.append(Memory(base, size))
        regions += (
            Region(
                group=group.name,
                layer=each.layer,
                part=each.part.name,
                base=base + each.offset,
                num_blocks=num_blocks,
                block_stride=each.block_stride,
                unit_stride=each.unit_stride,
                state_stride=each.state_stride,
                content_bytes=each.part.content_bytes,
                units=each.units,
                states=each.part.states,
            )
            for each in placed
            if each.units
        )
        base += size
    return RankCache(engine, rank, tuple(regions), tuple(memory))


def caches(engine: EngineSpec, num_blocks: int, side: int) -> Iterator[tuple[RankId, RankCache]]:
    """Yield every rank of *engine* and its cache, each in an address range of its own.

    *side*: 0 for the producer, 1 for the consumer, so that no two ranks of a transfer overlap.
    """
    for rank in engine.parallel.ranks:
        base = (1 + 1024 * side + rank.tp) << 40
        yield rank, cache_at(engine, rank, num_blocks, base)
