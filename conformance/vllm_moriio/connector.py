"""The rank mapping of vLLM's MoRIIO connector in WRITE mode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grids
import vllm
from judging import Axis, Finding
from refusal import RefusedError
from vllm.distributed.kv_transfer.kv_connector.v1.moriio.moriio_tp_mapping import (
    compute_write_tp_mapping,
)

from kvspec import RankId
from kvspec.testing import Case
from kvspec.testing.laws import Move, System

NAME = "vLLM MoRIIO connector (write)"
VERSION = vllm.__version__
JUDGED = (
    "`compute_write_tp_mapping` of the wheel: which producer rank writes which heads to which"
    " consumer rank, and how many writers each consumer rank waits for. This judges only the"
    " mapping; no bytes are copied."
)


def mappings(case: Case) -> Iterator[tuple[int, Any]]:
    """Yield the mapping of each producer rank."""
    heads, is_mla = grids.heads_of(case)
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    for rank in range(p):
        try:
            yield rank, compute_write_tp_mapping(rank, p, d, heads, is_mla, False)  # noqa: FBT003
        except ValueError as error:
            raise RefusedError(str(error)) from error


def moves(case: Case, role: str) -> Iterator[Move]:
    """Yield what the producers write."""
    for rank, mapping in mappings(case):
        for target in mapping.targets:
            yield from grids.moves(
                case,
                rank,
                target.tp_rank,
                range(target.local_head, target.local_head + target.num_heads),
                range(target.remote_head, target.remote_head + target.num_heads),
            )


def tells(case: Case, role: str) -> Iterator[tuple[RankId, RankId]]:
    """Yield the writers of each consumer rank, or as many as it waits for."""
    writers: dict[int, list[tuple[int, int]]] = {}
    for rank, mapping in mappings(case):
        for target in mapping.targets:
            writers.setdefault(target.tp_rank, []).append((rank, target.num_writers))
    for consumer, found in writers.items():
        expected = max(count for _, count in found)
        named = [rank for rank, _ in found]
        if role == "producer":
            named = [*named, *range(1000, 1000 + expected)][:expected]
        yield from ((RankId(tp=rank), RankId(tp=consumer)) for rank in named)


SYSTEM = System(name=NAME, version=VERSION, moves=moves)


def both_sides_count(case: Case) -> Iterator[str]:
    """Yield each consumer rank that waits for another number of writers than there are."""
    sent, awaited = set(tells(case, "consumer")), set(tells(case, "producer"))
    for producer, consumer in sent ^ awaited:
        yield f"consumer {consumer} and producer {producer} do not agree on the writers"


AXES = [
    Axis(name="attention heads, TP up to 16", cases=grids.heads, system=SYSTEM, laws=(1, 3, 5)),
    Axis(name="latent (MLA), TP up to 8", cases=grids.latents, system=SYSTEM, laws=(1, 3, 5)),
    Axis(
        name="number of writers", cases=grids.heads, system=SYSTEM, laws=(),
        count=both_sides_count,
    ),
]  # fmt: skip
FINDINGS: list[Finding] = []
