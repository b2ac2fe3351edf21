"""The description of a run: two engines and some requests.

Invariant: a job determines everything. Each rank draws the same block tables and contents from the
job, so the engines exchange only metadata and addresses.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Literal

import attrs
import numpy as np

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, seconds
from kvspec.memory.allocation import plan_memory
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy
from kvspec.plan.plan import TransferPlan, plan_transfer

Side = Literal["producer", "consumer"]
SIDES: tuple[Side, Side] = ("producer", "consumer")


def other_side(side: Side) -> Side:
    """Return the side that is not *side*."""
    return "consumer" if side == "producer" else "producer"


def has_tokens(group: KVCacheGroup) -> bool:
    """Return whether the blocks of *group* hold tokens, not only recurrent states."""
    return any(part.per_token for part in group.spec.parts)


SPARE_BLOCKS = 3
"""Blocks of each pool that belong to no request. They must not change."""
MAX_TIMEOUT = 24 * 3600.0
MAX_JOB_TOKENS = 10**9
MAX_STAGING = 1 << 16
MAX_JOB_RANKS = 256
"""Processes of one run, each with an agent."""
_SEED_DISTANCE = 16  # Seeds differ by more than what the oracle itself adds to a seed.
_NONCE = "00" * 16


@attrs.frozen(kw_only=True)
class Job:
    """One run: several prompts move from a producer to a consumer.

    Attributes:
        producer: The engine that has the prompts.
        consumer: The engine that receives them.
        tokens: Tokens of each prompt.
        cached: Leading tokens that the consumer already has.
        requests: Number of prompts.
        replica_policy: How replicas share the work.
        device: Memory that holds the caches: "cpu", "cuda" (the ranks use all GPUs in turn) or one
            GPU such as "cuda:0".
        seed: Seed of block tables and contents.
        timeout: Seconds for the whole run.
        tamper: Change one byte of the first consumer rank before the comparison.
        staging: MiB of a staging buffer on each consumer rank. All transfers that can be staged are
            staged. 0: no buffer.

    Raises:
        SpecError: If an attribute is wrong.
    """

    producer: EngineSpec
    consumer: EngineSpec
    tokens: int = 300
    cached: int = 0
    requests: int = 2
    replica_policy: ReplicaPolicy = attrs.field(factory=ReplicaPolicy)
    device: str = "cpu"
    seed: int = 0
    timeout: float = 120.0
    tamper: bool = False
    staging: int = 0

    def __attrs_post_init__(self) -> None:
        positive_int("tokens", self.tokens)
        positive_int("requests", self.requests)
        positive_int("seed", self.seed, least=0)
        positive_int("staging", self.staging, least=0, most=MAX_STAGING)
        if self.tokens * self.requests > MAX_JOB_TOKENS:
            expected = f"at most {MAX_JOB_TOKENS} tokens in all {self.requests} requests together"
            raise SpecError("tokens", self.tokens, expected)
        if positive_int("cached", self.cached, least=0) > self.tokens:
            raise SpecError("cached", self.cached, f"at most tokens={self.tokens}")
        instance("replica_policy", self.replica_policy, ReplicaPolicy)
        if not re.fullmatch("cpu|cuda(:[0-9]+)?", self.device):
            raise SpecError("device", self.device, "cpu, cuda, or one GPU such as cuda:0")
        ranks = sum(len(self.engine(side).parallel.ranks) for side in SIDES)
        if ranks > MAX_JOB_RANKS:
            raise SpecError("ranks", ranks, f"at most {MAX_JOB_RANKS} ranks of both engines")
        if not 0 < seconds("timeout", self.timeout) <= MAX_TIMEOUT:
            expected = f"seconds, more than 0 and at most {MAX_TIMEOUT:.0f}"
            raise SpecError("timeout", self.timeout, expected)

    @cached_property
    def plan(self) -> TransferPlan:
        """The plan. Each rank computes the same."""
        return plan_transfer(self.producer, self.consumer, self.replica_policy)

    @cached_property
    def moves(self) -> tuple[TransferRequest, ...]:
        """The requests, with shuffled block tables on both sides."""
        producer, consumer = (self._tables(side) for side in SIDES)
        return tuple(
            TransferRequest(
                request_id=f"request-{number}",
                num_tokens=self.tokens,
                encoder_tokens=self.tokens,
                cached_tokens=self.cached,
                producer_blocks=producer[number],
                consumer_blocks=consumer[number],
            )
            for number in range(self.requests)
        )

    def engine(self, side: Side) -> EngineSpec:
        """Return the engine of *side*."""
        return self.producer if side == "producer" else self.consumer

    def ranks(self) -> Iterator[tuple[Side, RankId]]:
        """Yield all ranks of both engines, producers first."""
        for side in SIDES:
            for rank in self.engine(side).parallel.ranks:
                yield side, rank

    def remote_id(self, request: int) -> str:
        """Return the remote id of a request, the same on all ranks.

        It needs no random part: each of its sessions serves only one run.
        """
        return f"{self.moves[request].request_id}#{_NONCE}"

    def content_seed(self, request: int) -> int:
        """Return the seed of a request. Each request has other contents."""
        return (self.seed * self.requests + request) * _SEED_DISTANCE

    def num_blocks(self, side: Side) -> dict[str, int]:
        """Return the number of blocks of each group: those of all requests, and a few more."""
        return {
            group.name: self.first_block(side)
            + self.requests * len(self.block_starts(side, group))
            + SPARE_BLOCKS
            for group in self.engine(side).groups
        }

    def first_block(self, side: Side) -> int:
        """Return the first block for requests: the one after the null block."""
        null = self.engine(side).null_block
        return 0 if null is None else null + 1

    def cache_bytes(self, blocks: Mapping[Side, dict[str, int]] | None = None) -> list[int]:
        """Return the bytes of each rank's cache, by default with the blocks of the job.

        Raises:
            SpecError: If the layout is impossible.
        """
        pools = blocks or {side: self.num_blocks(side) for side in SIDES}
        return [
            sum(
                memory.length for memory in plan_memory(self.engine(side), rank, pools[side]).memory
            )
            for side, rank in self.ranks()
        ]

    def block_starts(self, side: Side, group: KVCacheGroup) -> range:
        """Return the first token of each block of one request."""
        if not has_tokens(group):
            return range(1)
        live = group.spec.live_tokens(self.tokens)
        size = self.engine(side).virtual_block(group)
        return range(live.start // size * size, live.stop, size) if live else range(0)

    def _tables(self, side: Side) -> list[dict[str, BlockTable]]:
        shuffle = np.random.default_rng([self.seed, SIDES.index(side)])
        tables: list[dict[str, BlockTable]] = [{} for _ in range(self.requests)]
        blocks, first = self.num_blocks(side), self.first_block(side)
        for group in self.engine(side).groups:
            tokens, ids = self.block_starts(side, group), shuffle.permutation(blocks[group.name])
            ids = ids[ids >= first]
            for table, own in zip(
                tables, ids[SPARE_BLOCKS:].reshape(self.requests, -1), strict=True
            ):
                table[group.name] = BlockTable(own, tokens.start)
        return tables
