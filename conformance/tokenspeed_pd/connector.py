"""The transfer planner of TokenSpeed."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

import grids
from judging import Axis, Finding
from refusal import RefusedError
from tokenspeed.runtime.layers.attention.kv_cache.recipes import plan as plans
from tokenspeed.runtime.layers.attention.kv_cache.recipes.spec import CacheGroupSpec
from tokenspeed.runtime.layers.attention.kv_cache.recipes.transfer import (
    CacheFieldPartition,
    CacheFieldTransferSpec,
    CacheTransferSchema,
)
from tokenspeed.runtime.pd.cache_protocol import CacheTransferContract
from tokenspeed.runtime.pd.transfer_plan import CacheTransferPlanner, UnsupportedPDLayoutError

from kvspec.testing import Case
from kvspec.testing.laws import Move, System

NAME = "TokenSpeed transfer planner"
VERSION = version("tokenspeed")
JUDGED = (
    "`CacheTransferPlanner` of the wheel: the fragments that each decode rank reads from each"
    " prefill rank. In these cases a page has one token, and a head has 1 byte. This judges only"
    " the mapping; no bytes are copied."
)
FIELDS = {"k": "layer.0.k", "v": "layer.0.v", "latent": "layer.0.latent"}


def contract(heads: int, tp: int, parts: list[str], *, is_mla: bool) -> CacheTransferContract:
    """Return the cache of one rank: a group with a field for each part."""
    shape = (1, 1) if is_mla else (1, max(1, heads // tp), 1)
    size = shape[1]
    fields = tuple(
        plans.CacheFieldLayout(
            group_id="g", field_id=FIELDS[part], plane_id="p", shape=shape, dtype="uint8",
            field_offset_bytes=at * size, page_stride_bytes=size * len(parts),
        )
        for at, part in enumerate(parts)
    )  # fmt: skip
    memory = plans.CacheMemoryPlan(
        prefix_granularity=1, lcm_block_bytes=size * len(parts), num_lcm_blocks=2,
        groups=(plans.CacheGroupLayout("g", 1, 2),),
        planes=(plans.CachePlaneLayout("p", size * len(parts), 0),), fields=fields,
    )  # fmt: skip
    partitions = () if is_mla else tuple(
        CacheFieldTransferSpec(FIELDS[part], CacheFieldPartition(1, heads)) for part in parts
    )  # fmt: skip
    spec = CacheGroupSpec(
        group_id="g", retention="full_history", rows_per_page=1, entry_stride_tokens=1,
        replayable=False,
    )  # fmt: skip
    return CacheTransferContract(memory, (spec,), CacheTransferSchema(partitions))


def moves(case: Case, role: str) -> Iterator[Move]:
    """Yield the fragments of all decode ranks."""
    heads, is_mla = grids.heads_of(case)
    parts = [part.name for part in case.producer.groups[0].spec.parts]
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    mine = 1 if is_mla else max(1, heads // d)
    try:
        planner = CacheTransferPlanner(
            prefill_tp_size=p, decode_tp_size=d, prefill_field_ids=None,
            prefill_layout=contract(heads, p, parts, is_mla=is_mla),
            decode_layout=contract(heads, d, parts, is_mla=is_mla),
        )  # fmt: skip
        routes = [planner.plan_for_decode_rank(rank) for rank in range(d)]
    except UnsupportedPDLayoutError as error:
        raise RefusedError(str(error)) from error
    names = {field: part for part, field in FIELDS.items()}
    for rank, route in enumerate(routes):
        for source, fragments in route.fragments_by_prefill_rank.items():
            if not fragments:  # Equal TP: the whole cache of the rank with the same number.
                yield from grids.moves(case, source, rank, range(mine), range(mine))
            for fragment in fragments:
                copied: Any = (
                    range(at, at + fragment.bytes_per_row)
                    for at in (fragment.src_byte_offset, fragment.dst_byte_offset)
                )
                for move in grids.moves(case, source, rank, *copied):
                    if move.part == names[fragment.field_id]:
                        yield move


SYSTEM = System(name=NAME, version=VERSION, moves=moves)
AXES = [
    Axis(name="attention heads, TP up to 16", cases=grids.heads, system=SYSTEM, laws=(1, 5)),
    Axis(name="latent (MLA), TP up to 8", cases=grids.latents, system=SYSTEM, laws=(1, 5, 6)),
]
FINDINGS: list[Finding] = []
