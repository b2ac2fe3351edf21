"""Load a prompt while it is computed: read each layer as far as its producer has written it.

Invariant: data is read after it was written, and only once. The ledger counts both. Such a load is
ready when each layer of each rank has reached its end.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs

from kvspec.completion.load_plan import Place
from kvspec.errors import KVSpecError, TransferError, TransferState
from kvspec.nixl import NixlRank, Transfer
from kvspec.nixl.transfer_spec import Sides
from kvspec.ownership.parallel import RankId
from kvspec.session.load import Load

Frontiers = dict[tuple[RankId, Place], int]
"""By rank, group and layer: up to where it was asked for."""
Ends = dict[Place, int]


@attrs.frozen
class Advance:
    """One step: from a rank, *layers* of a group, from one position up to another."""

    rank: RankId
    group: str
    layers: tuple[str, ...]
    tokens: range
    whole: bool

    @property
    def places(self) -> Iterator[tuple[RankId, Place]]:
        """Each layer, as frontiers name it."""
        return ((self.rank, (self.group, layer)) for layer in self.layers)


def ends_of(load: Load) -> dict[RankId, Ends]:
    """Return up to where each layer of a load moves, of each rank that anything comes from.

    Raises as `DescriptorTable.select` does: of tables that a load follows, all is known before.
    """
    plan, request = load.remote.plan, load.request
    found: dict[RankId, Ends] = {}
    for rank, lane in load.remote.lanes.items():
        if not len(lane.sides(request)[1][0]):
            continue
        found[rank] = {
            (edge.group, layer): request.total(spec)
            for edge in plan.between(rank, lane.table.consumer.rank)
            for layer in edge.layers
            for spec in (plan.pair_of(edge).specs[layer],)
            if request.wanted(edge.group, spec)
        }
    return found


def advances(readable: Mapping[RankId, Ends], frontiers: Frontiers) -> Iterator[Advance]:
    """Yield the steps that can start: all layers of a group in one, where they stand alike."""
    for rank, ends in readable.items():
        for group in dict.fromkeys(name for name, _ in ends):
            all_of = [layer for r, (name, layer) in frontiers if (r, name) == (rank, group)]
            spans: dict[tuple[int, int], list[str]] = {}
            for layer in all_of:
                place = group, layer
                if place in ends:
                    span = frontiers[rank, place], ends[place]
                    spans.setdefault(span, []).append(layer)
            for (start, stop), layers in spans.items():
                tokens = range(start, stop)
                if layers == all_of:
                    yield Advance(rank, group, tuple(layers), tokens, whole=True)
                else:
                    for layer in layers:
                        yield Advance(rank, group, (layer,), tokens, whole=False)


def start(nixl: NixlRank, load: Load, advance: Advance, timeout: float) -> Transfer | None:
    """Start to read one step; None where nothing of it is this rank's.

    Whatever is wrong is a `TransferError`: the load fails, not the session.
    """
    tokens, rank = {advance.group: advance.tokens}, str(advance.rank)
    lane = load.remote.lanes.get(advance.rank)
    if lane is None:
        message = f"{load.remote.start[0]} was connected again meanwhile"
        raise TransferError(message, rank=rank, state=TransferState.STALE_PEER)
    try:
        own = lane if advance.whole else lane.of_layer(nixl, advance.layers[0])
        sides: Sides = own.sides(load.request, tokens)
        if not len(sides[1][0]):
            return None
        name = load.request.request_id
        return nixl.move("READ", [sides], request=name, timeout=max(timeout, 1e-3))[0]
    except TransferError:
        raise
    except KVSpecError as error:
        raise TransferError(str(error), rank=rank, state=TransferState.BUG) from error
