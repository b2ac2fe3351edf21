"""Read each layer of a request as far as its producer has written it.

Invariant: data is read after it was written, and only once. The ledger counts both.
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


@attrs.frozen
class Advance:
    """One step: from a rank, *layers* of a group, from one position up to another.

    *whole*: whether these are all layers of the group that move from the rank.
    """

    rank: RankId
    group: str
    layers: tuple[str, ...]
    tokens: range
    whole: bool

    @property
    def upto(self) -> dict[Place, int]:
        """The position behind the last token of each layer."""
        return {(self.group, layer): self.tokens.stop for layer in self.layers}


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
            alike: dict[range, list[str]] = {}
            for layer in all_layers:
                if (group, layer) in ranges:
                    alike.setdefault(ranges[group, layer], []).append(layer)
            for tokens, layers in alike.items():
                whole = layers == all_layers
                for some in [layers] if whole else [[layer] for layer in layers]:
                    yield Advance(rank, group, tuple(some), tokens, whole)


def start(nixl: NixlRank, load: Load, advance: Advance, timeout: float) -> Transfer | None:
    """Start to read one step. Return None if this rank needs nothing of it.

    Each error becomes a `TransferError`: the load fails, not the session.
    """
    tokens, rank = {advance.group: advance.tokens}, str(advance.rank)
    lane = load.remote.lanes.get(advance.rank)
    if lane is None:
        message = f"{load.engine_id} was connected again meanwhile"
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
