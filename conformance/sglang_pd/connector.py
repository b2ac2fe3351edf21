"""The rank mapping and the head slices of SGLang's disaggregation."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from types import SimpleNamespace

import grids
from judging import Axis, Finding
from refusal import RefusedError
from sglang.srt.disaggregation.common.conn import CommonKVManager, PrefillServerInfo
from sglang.srt.disaggregation.common.staging_buffer import compute_head_slice_params

from kvspec.testing import Case
from kvspec.testing.laws import Move, System

NAME = "SGLang disaggregation"
VERSION = version("sglang")
JUDGED = (
    "`CommonKVManager._resolve_rank_mapping` and `compute_head_slice_params` of the wheel, which"
    " the Mooncake, NIXL and MORI backends share: from which prefill ranks a decode rank requests"
    " data, and which heads each of them sends. This judges only the mapping; no bytes are copied."
    " If several prefill ranks hold one head, all of them send it to the same place. That costs"
    " traffic and does no harm, so equal copies count once."
)


def asked(case: Case, rank: int) -> list[int]:
    """Return the prefill ranks that send KV to the decode rank *rank*."""
    _, is_mla = grids.heads_of(case)
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    info = PrefillServerInfo(
        attn_tp_size=p, attn_cp_size=1, dp_size=1, pp_size=1, page_size=1,
        kv_cache_dtype=None, follow_bootstrap_room=False,
    )  # fmt: skip
    manager = SimpleNamespace(
        is_mla_backend=is_mla, is_hybrid_mla_backend=False, attn_tp_size=d, attn_cp_size=1,
        attn_cp_rank=0, pp_size=1, pp_rank=0, enable_all_cp_ranks_for_transfer=False,
        kv_args=SimpleNamespace(engine_rank=rank),
    )  # fmt: skip
    try:
        CommonKVManager._resolve_rank_mapping(manager, info)
    except AssertionError as error:
        raise RefusedError(str(error)) from error
    ranks = info.target_tp_ranks
    # If the layer has a latent, the other ranks get a dummy request.
    return [info.target_tp_rank] if is_mla else ranks


def moves(case: Case, role: str) -> Iterator[Move]:
    """Yield what the prefill ranks send."""
    heads, is_mla = grids.heads_of(case)
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    for rank in range(d):
        for source in asked(case, rank):
            start, count, place, _ = (
                (0, 1, 0, 1) if is_mla else compute_head_slice_params(p, d, source, rank, heads)
            )
            if source < p:  # The bootstrap server answers 404 for other ranks.
                theirs, mine = range(start, start + count), range(place, place + count)
                yield from grids.moves(case, source, rank, theirs, mine)


def without_replicas(case: Case, role: str) -> Iterator[Move]:
    """Yield the moves, but only one of several that write equal bytes to one place."""
    seen = set()
    for move in moves(case, role):
        key = move.consumer, move.layer, move.part, move.units, move.consumer_units
        if key not in seen:
            yield move
        seen.add(key)


def dividing(*, divides: bool) -> Iterator[Case]:
    """The cases of `grids.heads` in which one TP size divides the other, or in which none does."""
    for case in grids.heads():
        sizes = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
        if (max(sizes) % min(sizes) == 0) is divides:
            yield case


SYSTEM = System(name=NAME, version=VERSION, moves=without_replicas)
AXES = [
    Axis(
        name="attention heads, one TP divides the other",
        cases=lambda: dividing(divides=True),
        system=SYSTEM,
        laws=(1, 5),
    ),
    Axis(
        name="attention heads, no TP divides the other",
        cases=lambda: dividing(divides=False),
        system=SYSTEM,
        laws=(1, 5),
    ),
    Axis(name="latent (MLA), TP up to 8", cases=grids.latents, system=SYSTEM, laws=(1, 5)),
]
COMMON = "sglang/srt/disaggregation/common"
LOUD = (
    "Nothing refuses these sizes when the engines connect. A decode rank asks for a prefill rank"
    " that does not exist, or a prefill rank is asked by nobody. By reading, both end in a timeout"
    " of the request, and never in a wrong answer."
)
FINDINGS = [
    Finding(
        axis="attention heads, no TP divides the other",
        function=f"{COMMON}/conn.py: _resolve_rank_mapping",
        result="The ratio of the TP sizes is rounded down, so ranks and heads are left out.",
        reach=LOUD,
    ),
    Finding(
        axis="latent (MLA), TP up to 8",
        function=f"{COMMON}/conn.py: _resolve_rank_mapping",
        result="The ratio of the TP sizes is rounded down, so a decode rank asks for a prefill rank"
        " that does not exist.",
        reach=LOUD,
    ),
]
