"""A plan in words and in bytes.

Law: only reads a plan; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from kvspec.parallel import RankId
from kvspec.plan import TransferPlan
from kvspec.slices import TPTransferSlice
from kvspec.specs import LayerSpec


def traffic(plan: TransferPlan, num_tokens: int) -> dict[tuple[RankId, RankId], int]:
    """Return the bytes of a request of *num_tokens*, nothing cached, by rank pair."""
    moved: dict[tuple[RankId, RankId], int] = {}
    for edge in plan.edges:
        group, pair = plan.consumer.group(edge.group), (edge.producer, edge.consumer)
        moved[pair] = moved.get(pair, 0) + sum(
            _slice_bytes(group.spec.of_layer(layer), each, num_tokens)
            for each in edge.slices
            for layer in each.layers or edge.layers
        )
    return moved


def _slice_bytes(spec: LayerSpec, each: TPTransferSlice, num_tokens: int) -> int:
    units, total = len(each.global_range), 0
    live = spec.live_tokens(num_tokens)
    first, step = each.stripe
    for part in (part for part in spec.parts if part.name in each.parts):
        if not part.tokens_per_state:
            moves = live and live.start // spec.block_size % step == first
            total += units * part.states * part.content_bytes if moves else 0
            continue
        tokens = np.arange(live.start, live.stop)
        tokens = tokens[tokens // spec.block_size % step == first]
        rows = len(np.unique(tokens // part.tokens_per_state))
        total += units * rows * part.content_bytes
    return total


def explain(plan: TransferPlan) -> Iterator[str]:
    """Yield, line by line, who reads which units from whom, and who tells whom."""
    sizes = f"TP {plan.producer.parallel.tp_size} -> TP {plan.consumer.parallel.tp_size}"
    yield f"{sizes}, replicas by {plan.replicas!r}: {len(plan.edges)} edges"
    for edge in plan.edges:
        yield f"{edge.consumer} reads {edge.producer}, group {edge.group}:"
        for each in edge.slices:
            units = f"{each.global_range.start}..{each.global_range.stop - 1}"
            layers = f" of {', '.join(each.layers)}" if each.layers else ""
            first, step = each.stripe
            blocks = f", blocks b % {step} == {first}" if step > 1 else ""
            yield f"  {'+'.join(each.parts)} units {units}{layers}{blocks}"
    for rank in plan.producer.parallel.ranks:
        told = ", ".join(map(str, plan.notifiers(rank)))
        unread = "" if plan.targets(rank) else " (nobody reads it)"
        yield f"producer {rank}{unread} is told by consumer {told}"
