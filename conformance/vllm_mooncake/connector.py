"""The rank mapping of vLLM's Mooncake connector."""

from __future__ import annotations

from collections.abc import Iterator

import grids
import vllm
from judging import Axis, Finding
from refusal import RefusedError
from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology
from vllm.distributed.kv_transfer.kv_connector.v1.mooncake.mooncake_connector import (
    _compute_sender_transfer_plan,
)

from kvspec.testing import Case
from kvspec.testing.laws import Move, System

NAME = "vLLM Mooncake connector"
VERSION = vllm.__version__
JUDGED = (
    "`_compute_sender_transfer_plan` and `TransferTopology.handshake_target_ranks` of the wheel:"
    " which producer rank sends which bytes of a block to which consumer rank. In these cases a"
    " head has 1 byte."
)


def moves(case: Case, role: str) -> Iterator[Move]:
    """Yield what the producers send to the consumers that asked them."""
    heads, is_mla = grids.heads_of(case)
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    theirs, mine = max(1, heads // p), max(1, heads // d)
    for consumer in range(d):
        topology = TransferTopology(
            tp_rank=consumer, tp_size=d, block_size=1, engine_id="D", is_mla=is_mla,
            is_mamba=False, total_num_kv_heads=heads, attn_backends=[],
        )  # fmt: skip
        try:
            sources = topology.handshake_target_ranks(p)
            for source in sources:
                sends, start, place, length = _compute_sender_transfer_plan(
                    source, p, consumer, d, theirs, mine,
                    producer_cache_replicated=is_mla or p > heads,
                    total_num_kv_heads=None if is_mla else heads,
                )  # fmt: skip
                if sends:
                    yield from grids.moves(
                        case, source, consumer, range(start, start + length),
                        range(place, place + length),
                    )  # fmt: skip
        except AssertionError as error:
            raise RefusedError(str(error)) from error


SYSTEM = System(name=NAME, version=VERSION, moves=moves)
AXES = [
    Axis(name="attention heads, TP up to 16", cases=grids.heads, system=SYSTEM, laws=(1, 3, 5)),
    Axis(name="latent (MLA), TP up to 8", cases=grids.latents, system=SYSTEM, laws=(1, 3, 5)),
]
FINDINGS: list[Finding] = []
