"""Who owns what, and what is live: asked of the library, or counted out beside it.

Law: both answer the same questions, and of the tokens' sharding only which places of one virtual
block a rank stores. Where they differ, the library is wrong.
"""

from __future__ import annotations

from functools import lru_cache

import attrs
import numpy as np

from kvspec.check import counting
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints
from kvspec.specs import LayerSpec

MAX_COUNTED = 2**24
"""Positions that are looked at one by one: a second or so."""


@attrs.frozen(eq=False)
class Owners:
    """What the library itself says of one engine."""

    engine: EngineSpec

    def layers(self, group: KVCacheGroup, rank: RankId) -> tuple[str, ...]:
        """Return the layers of *group* that the rank's stage holds."""
        return self.engine.layers_at(group, rank.pp)

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the model's units of *part* that the rank holds."""
        return self.engine.units(group, part, rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the positions that one block of the group's table stands for."""
        return self.engine.virtual_block(group)

    def stored(self, group: KVCacheGroup, rank: RankId) -> Ints:
        """Return which positions of a virtual block the rank's block stores, in its order."""
        _check_countable(f"groups[{group.name!r}].block_size", group.spec.block_size)
        return self.engine.context(group, rank).position(np.arange(group.spec.block_size))

    def wanted(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> range:
        """Return the positions of *group*, of layers of *spec*, that have to move."""
        return request.wanted(group.name, spec)

    def cached(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> int:
        """Return how many leading positions of *group*, of layers of *spec*, the consumer has."""
        return request.cached(group.name, spec)


class Counted(Owners):
    """The same, counted out one by one.

    No sharding, no `BlockCyclic`, no `live_tokens` is asked.
    """

    def layers(self, group: KVCacheGroup, rank: RankId) -> tuple[str, ...]:
        """Return the layers of *group* whose numbers are handed out to the rank's stage."""
        return tuple(counting.rank_layers(self.engine, rank, group))

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the units that are handed out to the rank one by one."""
        return _units(self.engine, group, part, rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the positions of as many blocks as there are context ranks."""
        _, size = counting.context_of(self.engine, RankId(), group)
        return group.spec.block_size * size

    def stored(self, group: KVCacheGroup, rank: RankId) -> Ints:
        """Return the positions of a virtual block that are handed out to the rank in turn."""
        size = group.spec.block_size
        _check_countable(f"groups[{group.name!r}].block_size", self.virtual_block(group))
        return counting.own_positions(self.engine, rank, 0, size, group)

    def wanted(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> range:
        """Return the positions that the next query sees, and that are not cached."""
        _check_countable("num_tokens", counting.length_in(spec, request))
        live = np.flatnonzero(counting.live_positions(spec, request))
        live = live[live >= self.cached(request, group, spec)]
        return range(int(live[0]), int(live[-1]) + 1) if len(live) else EMPTY

    def cached(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> int:  # noqa: ARG002
        """Return the one count, unless it is told by group or is not of the encoder's tokens."""
        return counting.cached_tokens_of(request, group)


@lru_cache(maxsize=4096)
def _units(engine: EngineSpec, group: KVCacheGroup, part: Part, rank: RankId) -> range:
    own = counting.rank_units(engine, rank, part, group)
    return range(own[0], own[-1] + 1) if own else EMPTY


def _check_countable(field: str, positions: int) -> None:
    if positions > MAX_COUNTED:
        told = f"at most {MAX_COUNTED} positions, which are looked at one by one"
        raise SpecError(field, positions, told)
