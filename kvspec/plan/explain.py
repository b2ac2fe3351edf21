"""A plan in words.

Law: only reads a plan; nothing here decides anything.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvspec.ownership.parallel import ParallelConfig
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan


def sizes(parallel: ParallelConfig) -> str:
    """Return the parallel sizes in words, such as ``TP 4, PP 2``."""
    found = [f"TP {parallel.tp_size}"]
    if parallel.pp_size > 1:
        found.append(f"PP {parallel.pp_size}")
    if parallel.context_size > 1:
        found.append(f"context {parallel.context_size} x {parallel.interleave_size} tokens")
    return ", ".join(found)


def explain(plan: TransferPlan) -> Iterator[str]:
    """Yield, line by line, who reads which units from whom, and who tells whom."""
    both = " -> ".join(sizes(engine.parallel) for engine in (plan.producer, plan.consumer))
    yield f"{both}, replicas by {plan.replicas!r}: {len(plan.edges)} edges"
    for side, engine in (("producer", plan.producer), ("consumer", plan.consumer)):
        if engine.excluded:
            yield f"excluded by the {side}, not transferred: {', '.join(engine.excluded)}"
    for edge in plan.edges:
        yield f"{edge.consumer} reads {edge.producer}, group {edge.group}:"
        yield from (f"  {line}" for line in carried(edge))
    for rank in plan.producer.parallel.ranks:
        told = ", ".join(map(str, plan.notifiers(rank)))
        unread = "" if plan.targets(rank) else " (nobody reads it)"
        yield f"producer {rank}{unread} is told by consumer {told}"


def carried(edge: Edge) -> Iterator[str]:
    """Yield what one producer rank gives to one consumer rank: parts, units, layers, blocks."""
    for each in edge.slices:
        units = f"{each.global_range.start}..{each.global_range.stop - 1}"
        layers = "" if each.layers == edge.layers else f" of {', '.join(each.layers)}"
        blocks = "" if each.stripe.whole else f", {each.stripe}"
        yield f"{'+'.join(each.parts)} units {units}{layers}{blocks}"
