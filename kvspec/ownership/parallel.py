"""Ranks and the parallel sizes of an engine.

Invariant: a rank is identified by its coordinates, never by one linear number, because engines
number their ranks in different orders. `ParallelConfig` determines the units, tokens and layers of
a rank. Only a group of layers can override the units and tokens.

How it works:
    Three axes divide a cache, and each rank has a place on all of them:

    axis                     divides        sizes
    -----------------------  -------------  ----------------------------
    pipeline parallelism     layers         `pp_size`
    tensor parallelism       units (heads)  `tp_size`
    context parallelism      tokens         `pcp_size`, `dcp_size`

    Decode context parallelism (DCP) uses the ranks of TP again. With TP 4 and DCP 2, ranks 0 and 2
    hold tokens 0 to 15, 32 to 47 and so on. Ranks 1 and 3 hold the others:

        >>> sizes = ParallelConfig(tp_size=4, dcp_size=2, interleave_size=16)
        >>> [sizes.context(rank).rank for rank in sizes.ranks]
        [0, 1, 0, 1]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.sharding import (
    Sharding,
    UnitRanges,
    check_granularity,
    even_sharding,
    explicit_sharding,
    explicit_shardings,
)
from kvspec.ownership.tokens import BlockCyclic


@attrs.frozen(order=True)
class RankId:
    """One rank of an engine, identified by its coordinates.

    Attributes:
        pp: Pipeline stage.
        pcp: Prefill context rank (vLLM: `get_pcp_group().rank_in_group`).
        tp: Tensor-parallel rank.

    >>> print(RankId(tp=3), RankId(pp=1, tp=3))
    tp3 pp1.tp3
    """

    pp: int = 0
    pcp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        pp = f"pp{self.pp}." if self.pp else ""
        return f"{pp}pcp{self.pcp}.tp{self.tp}" if self.pcp else f"{pp}tp{self.tp}"


# The layers of a pipeline stage: a range of layer numbers, or the names of the layers.
StageLayers = range | tuple[str, ...]


def _stages(value: Iterable[StageLayers] | None) -> tuple[StageLayers, ...] | None:
    if value is None:
        return None
    stages = sequence("stages", value, "stages, each a range of layer numbers or layer names")
    return tuple(
        stage if isinstance(stage, range) else sequence("stages", stage, "layer names")
        for stage in stages
    )


def _context_ranks(value: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    rows = sequence("context_ranks", value, "rows, one for each PCP rank")
    return tuple(
        sequence("context_ranks", row, "context ranks, one for each TP rank") for row in rows
    )


def _explicit_shardings(value: object) -> Mapping[int, UnitRanges]:
    return explicit_shardings(value, "units")


# More ranks than any engine has. `ParallelConfig.ranks` lists each of them, so a larger number
# could exhaust the memory.
MAX_RANKS = 2**16


@attrs.frozen(kw_only=True, cache_hash=True)
class ParallelConfig:
    """The parallel sizes of one engine.

    Attributes:
        tp_size: Tensor-parallel ranks (vLLM: `tensor_parallel_size`).
        pp_size: Pipeline stages (vLLM: `pipeline_parallel_size`).
        dcp_size: Decode context ranks (vLLM: `decode_context_parallel_size`). They are TP ranks, so
            they do not add to the number of ranks.
        pcp_size: Prefill context ranks (vLLM: `prefill_context_parallel_size`).
        interleave_size: Tokens that one context rank stores before it is the turn of the next rank
            (vLLM: `cp_kv_cache_interleave_size`).
        shardings: Explicit shardings. A key is the number of units of a part. Its value is one
            range of units for each TP rank. It holds for every part with that many units, unless
            the group of the part has its own sharding. Each range is a whole multiple of the
            `granularity` of the part. By default, `even_sharding`.
        stages: Layers of each pipeline stage, as a range of layer numbers or as layer names. The
            number of a layer is the first number in its name. By default, the layer numbers are
            divided contiguously and evenly. Names that count on from others are refused.
        context_ranks: For each PCP rank, the context rank of each TP rank. By default, it is
            `pcp_rank * dcp_size + tp_rank % dcp_size`, as in vLLM. If all are zero, every PCP rank
            holds all tokens.

    >>> sizes = ParallelConfig(tp_size=2, pp_size=2)
    >>> [str(rank) for rank in sizes.ranks]
    ['tp0', 'tp1', 'pp1.tp0', 'pp1.tp1']
    >>> ParallelConfig(tp_size=2, shardings={3: [range(0, 2), range(2, 3)]}).sharding(3).ranges
    (range(0, 2), range(2, 3))
    """

    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    interleave_size: int = 1
    shardings: Mapping[int, UnitRanges] = attrs.field(factory=dict, converter=_explicit_shardings)
    stages: tuple[StageLayers, ...] | None = attrs.field(default=None, converter=_stages)
    context_ranks: tuple[tuple[int, ...], ...] | None = attrs.field(
        default=None, converter=_context_ranks
    )
    # The explicit shardings after their check, by number of units. It follows from `shardings`, so
    # it takes no part in comparisons.
    _checked_shardings: dict[int, Sharding] = attrs.field(
        init=False, factory=dict, repr=False, eq=False, hash=False
    )

    def __attrs_post_init__(self) -> None:
        for name in ("tp_size", "pp_size", "dcp_size", "pcp_size", "interleave_size"):
            positive_int(name, getattr(self, name))
        ranks = self.tp_size * self.pp_size * self.pcp_size
        if ranks > MAX_RANKS:
            raise SpecError("ranks", ranks, f"at most {MAX_RANKS}: tp_size x pp_size x pcp_size")
        for units, ranges in self.shardings.items():
            positive_int("shardings", units)
            field = f"shardings[{units}]"
            self._checked_shardings[units] = explicit_sharding(field, units, ranges, self.tp_size)
        if self.stages is not None and len(self.stages) != self.pp_size:
            raise SpecError("stages", self.stages, f"one for each of the {self.pp_size} stages")
        if self.context_ranks is not None:
            self._check_context_ranks(self.context_ranks)
        elif self.tp_size % self.dcp_size:
            requirement = f"a divisor of tp_size={self.tp_size}, or explicit context_ranks"
            raise SpecError("dcp_size", self.dcp_size, requirement)

    def _check_context_ranks(self, rows: tuple[tuple[int, ...], ...]) -> None:
        if len(rows) != self.pcp_size or any(len(row) != self.tp_size for row in rows):
            requirement = f"{self.pcp_size} rows (PCP) of {self.tp_size} context ranks (TP)"
            raise SpecError("context_ranks", rows, requirement)
        numbers = {positive_int("context_ranks", number, least=0) for row in rows for number in row}
        # A number that no rank has would be an owner of tokens that are stored nowhere.
        if numbers != set(range(len(numbers))):
            raise SpecError("context_ranks", rows, "context ranks 0, 1, ... without a gap")
        if len(numbers) % self.dcp_size:
            requirement = f"context ranks whose number is a multiple of dcp_size={self.dcp_size}"
            raise SpecError("context_ranks", rows, requirement)

    @cached_property
    def ranks(self) -> tuple[RankId, ...]:
        """All ranks of the engine, in ascending order."""
        return tuple(
            RankId(pp, pcp, tp)
            for pp in range(self.pp_size)
            for pcp in range(self.pcp_size)
            for tp in range(self.tp_size)
        )

    def check_rank(self, rank: RankId, field: str = "rank") -> RankId:
        """Return *rank* if this engine has it. Raise `SpecError` with *field* otherwise."""
        sizes = (self.pp_size, self.pcp_size, self.tp_size)
        instance(field, rank, RankId)
        for name, place in zip(("pp", "pcp", "tp"), (rank.pp, rank.pcp, rank.tp), strict=True):
            if isinstance(place, bool) or not isinstance(place, int):
                raise SpecError(f"{field}.{name}", place, "an int")
        places = zip(attrs.astuple(rank), sizes, strict=True)
        if not all(0 <= place < size for place, size in places):
            bounds = f"pp < {self.pp_size}, pcp < {self.pcp_size}, tp < {self.tp_size}"
            raise SpecError(field, rank, f"{bounds}, none negative")
        return rank

    @property
    def context_size(self) -> int:
        """Number of context ranks that divide the tokens (vLLM: `total_cp_world_size`)."""
        if self.context_ranks is None:
            return self.pcp_size * self.dcp_size
        return 1 + max(number for row in self.context_ranks for number in row)

    def context(self, rank: RankId) -> BlockCyclic:
        """Return the token positions that *rank* owns.

        A recurrent state has no token positions. `EngineSpec.context` takes that into account.

        >>> sizes = ParallelConfig(tp_size=2, dcp_size=2, pcp_size=2)
        >>> [(rank.pcp, rank.tp, sizes.context(rank).rank) for rank in sizes.ranks]
        [(0, 0, 0), (0, 1, 1), (1, 0, 2), (1, 1, 3)]
        """
        if self.context_size == 1:
            return BlockCyclic()
        if self.context_ranks is None:
            at = rank.pcp * self.dcp_size + rank.tp % self.dcp_size
        else:
            at = self.context_ranks[rank.pcp][rank.tp]
        return BlockCyclic(at, self.context_size, self.interleave_size)

    def sharding(self, units: int, granularity: int = 1) -> Sharding:
        """Return the sharding of a part that has *units* units.

        Args:
            units: Number of units of the part.
            granularity: Units that stay together on one rank.

        Returns:
            The explicit sharding for that many units, or the even one.
        """
        explicit = self._checked_shardings.get(units)
        if explicit is None:
            return even_sharding(units, self.tp_size, granularity)
        return check_granularity(f"shardings[{units}]", explicit, granularity)
