"""Return which units, layers and positions a rank owns: from the library, or counted one by one.

Invariant: `Owners` and `Counted` return the same values. If they differ, the library is wrong.

How it works:
    `verify` needs seven facts about an engine and a request. `Owners` takes them from the library.
    A fault there would be in the plan too, so `verify` would not find it. `Counted` takes them from
    `kvspec.check.counting`, which computes them again from their definitions.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import attrs
import numpy as np

from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
    first_live,
    is_ring,
    length_in,
    live_positions,
    of_group,
    own_positions,
    rank_layers,
    rank_units,
)
from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.ownership.intervals import EMPTY
from kvspec.ownership.parallel import RankId
from kvspec.ownership.part import Part
from kvspec.ownership.tokens import Ints
from kvspec.specs import LayerSpec

# More positions would need more than about a second.
MAX_COUNTED = 2**24


@attrs.frozen(eq=False)
class Owners:
    """The facts about one engine, from the library itself."""

    engine: EngineSpec

    def layers(self, group: KVCacheGroup, rank: RankId) -> tuple[str, ...]:
        """Return the layers of *group* that the stage of *rank* holds."""
        return self.engine.layers_at(group, rank.pp)

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the model's units of *part* that *rank* holds."""
        return self.engine.units(group, part, rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the number of positions of one block, after which the rows of a ring repeat."""
        return group.spec.block_size * self.engine.context_size(group)

    def stored(self, group: KVCacheGroup, rank: RankId) -> Ints:
        """Return the positions of a virtual block that *rank* stores, in the order of its block."""
        _check_countable(f"groups[{group.name!r}].block_size", group.spec.block_size)
        return self.engine.context(group, rank).position(np.arange(group.spec.block_size))

    def wanted(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> range:
        """Return the positions of *group* that must move, in layers of *spec*."""
        return request.wanted(group.name, spec)

    def moves(
        self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec
    ) -> tuple[range, ...]:
        """Return the wanted positions. For recurrent states, the last position of each state."""
        return request.moves(group.name, spec)

    def cached(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> int:
        """Return the number of leading positions of *group* that the consumer has cached."""
        return request.cached(group.name, spec)

    def first_live(self, request: TransferRequest, spec: LayerSpec) -> int:
        """Return the first live position in layers of *spec*. Earlier blocks may be given back."""
        return spec.live_tokens(request.total(spec)).start


class Counted(Owners):
    """The same facts, counted one by one."""

    def layers(self, group: KVCacheGroup, rank: RankId) -> tuple[str, ...]:
        """Return the layers of *group* that the stage of *rank* holds."""
        return tuple(rank_layers(self.engine, rank, group))

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the model's units of *part* that *rank* holds."""
        return _units(self.engine, group, part, rank)

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the number of positions of one block of each context rank."""
        _, size = context_of(self.engine, RankId(), group)
        return group.spec.block_size * size

    def stored(self, group: KVCacheGroup, rank: RankId) -> Ints:
        """Return the positions of a virtual block that *rank* stores."""
        size = group.spec.block_size
        _check_countable(f"groups[{group.name!r}].block_size", self.virtual_block(group))
        return own_positions(self.engine, rank, 0, size, group)

    def wanted(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> range:
        """Return the positions that the next query attends to, without the cached ones."""
        _check_countable("num_tokens", length_in(spec, request))
        live = np.flatnonzero(live_positions(spec, request))
        live = live[live >= self.cached(request, group, spec)]
        return range(int(live[0]), int(live[-1]) + 1) if len(live) else EMPTY

    def moves(
        self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec
    ) -> tuple[range, ...]:
        """Return the wanted positions, or the last position of each state that is not cached."""
        if all(part.per_token for part in spec.parts):
            return tuple(each for each in [self.wanted(request, group, spec)] if each)
        cached = self.cached(request, group, spec)
        ends = request.state_positions or (request.num_tokens,)
        return tuple(range(end - 1, end) for end in ends if end > cached)

    def cached(self, request: TransferRequest, group: KVCacheGroup, spec: LayerSpec) -> int:
        """Return the number of leading positions of *group* that the consumer has cached."""
        if is_ring(spec):
            _check_ring_prefix(spec, request, group.name)
        return cached_tokens_of(request, group)

    def first_live(self, request: TransferRequest, spec: LayerSpec) -> int:
        """Return the first position that the next query attends to, or the query's own position."""
        _check_countable("num_tokens", length_in(spec, request))
        return first_live(live_positions(spec, request))


@lru_cache(maxsize=4096)
def _units(engine: EngineSpec, group: KVCacheGroup, part: Part, rank: RankId) -> range:
    own = rank_units(engine, rank, part, group)
    return range(own[0], own[-1] + 1) if own else EMPTY


def _check_ring_prefix(spec: Any, request: TransferRequest, group: str) -> None:  # noqa: ANN401
    """Raise `SpecError` if a cached prefix ends inside a group of a ring that moves."""
    stated, ratio = of_group(request.cached_tokens, group, 0), spec.compress_ratio
    if stated % ratio and live_positions(spec, request).any():
        wanted = f"a multiple of compress_ratio={ratio}, for a layer with a ring"
        raise SpecError("cached_tokens", stated, wanted)


def _check_countable(field: str, positions: int) -> None:
    if positions > MAX_COUNTED:
        expected = f"at most {MAX_COUNTED} positions, because each is counted"
        raise SpecError(field, positions, expected)
