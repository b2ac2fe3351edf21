"""Read each layer of a request as far as its producer has written it.

Invariant: data is read after it was written, and only once. The ledger counts both.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from kvspec.completion.load_plan import Place
from kvspec.ownership.parallel import RankId
from kvspec.session.load import Load


class Advance(NamedTuple):
    """One step: from a rank, *layers* of a group, from one position up to another.

    *whole*: whether these are all layers of the group that move from the rank.
    """

    rank: RankId
    group: str
    layers: tuple[str, ...]
    tokens: range
    whole: bool


def ends_of(load: Load) -> dict[RankId, dict[Place, int]]:
    """Return the end of each layer that moves, for each rank that is read.

    Raises as `DescriptorTable.select`: all tables that the load will need are checked now.
    """
    plan, request = load.remote.plan, load.request
    ends: dict[RankId, dict[Place, int]] = {}
    for rank, lane in load.remote.lanes.items():
        if not len(lane.sides(request)[1][0]):
            continue
        ends[rank] = {
            (edge.group, layer): request.total(spec)
            for edge in plan.between(rank, lane.table.consumer.rank)
            for layer in edge.layers
            for spec in (plan.pair_of(edge).specs[layer],)
            if request.wanted(edge.group, spec)
        }
    return ends


def advances(
    readable: Mapping[RankId, Mapping[Place, range]], ends: Mapping[RankId, Mapping[Place, int]]
) -> Iterator[Advance]:
    """Yield the steps that can start.

    All layers of a group move in one step if all of them can be read over the same positions.
    Otherwise each layer moves in a step of its own.
    """
    for rank, ranges in readable.items():
        for group in dict.fromkeys(name for name, _ in ranges):
            all_layers = [layer for name, layer in ends[rank] if name == group]
            by_tokens: dict[range, list[str]] = {}
            for layer in all_layers:
                if (group, layer) in ranges:
                    by_tokens.setdefault(ranges[group, layer], []).append(layer)
            for tokens, layers in by_tokens.items():
                whole = layers == all_layers
                for some in [layers] if whole else [[layer] for layer in layers]:
                    yield Advance(rank, group, tuple(some), tokens, whole)
