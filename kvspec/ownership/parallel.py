"""Ranks as coordinates, and an engine's parallel sizes.

Law: a rank is named by its coordinates and never by a linear number; what it owns follows from the
sizes and shardings given here alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.sharding import (
    Ranges,
    Sharding,
    check_whole,
    even_sharding,
    explicit_sharding,
    explicit_shardings,
)
from kvspec.ownership.tokens import BlockCyclic


@attrs.frozen(order=True)
class RankId:
    """One rank of an engine, as named coordinates: pipeline stage, prefill-context and TP rank."""

    pp: int = 0
    pcp: int = 0
    tp: int = 0

    def __str__(self) -> str:
        pp = f"pp{self.pp}." if self.pp else ""
        return f"{pp}pcp{self.pcp}.tp{self.tp}" if self.pcp else f"{pp}tp{self.tp}"


Stage = range | tuple[str, ...]


def _stages(value: Iterable[Stage] | None) -> tuple[Stage, ...] | None:
    if value is None:
        return None
    wanted = "stages, each a range of layer numbers or layer names"
    stages = sequence("stages", value, wanted)
    return tuple(
        x if isinstance(x, range) else sequence("stages", x, "layer names") for x in stages
    )


def _context_ranks(value: Iterable[Iterable[int]] | None) -> tuple[tuple[int, ...], ...] | None:
    if value is None:
        return None
    rows = sequence("context_ranks", value, "rows, one for each PCP rank")
    return tuple(
        sequence("context_ranks", row, "context ranks, one for each TP rank") for row in rows
    )


def _explicit_shardings(value: object) -> Mapping[int, Ranges]:
    return explicit_shardings(value, "units")


MAX_RANKS = 2**16
"""More ranks than any engine has: every one of them is listed."""


@attrs.frozen(kw_only=True, cache_hash=True)
class ParallelConfig:
    """The parallel sizes of one engine.

    *interleave_size*: tokens stored on one context rank before the next. *shardings*: explicit
    shardings, from a part's number of units to one range of units for each TP rank; every part with
    that many units is handed out so, unless its group shards it otherwise. A range is a whole
    number of the part's `granularity`. *stages*: what
    each pipeline stage holds, as a range of layer numbers (the first number in a layer's name) or
    as layer names; unless given, layer numbers are handed out contiguously and evenly.
    *context_ranks*: for each PCP rank, the context rank of each TP rank; unless given,
    ``pcp_rank * dcp_size + tp_rank % dcp_size``. All zero is PCP that replicates.
    """

    tp_size: int = 1
    pp_size: int = 1
    dcp_size: int = 1
    pcp_size: int = 1
    interleave_size: int = 1
    shardings: Mapping[int, Ranges] = attrs.field(factory=dict, converter=_explicit_shardings)
    stages: tuple[Stage, ...] | None = attrs.field(default=None, converter=_stages)
    context_ranks: tuple[tuple[int, ...], ...] | None = attrs.field(
        default=None, converter=_context_ranks
    )
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
        if self.context_ranks is None:
            if self.tp_size % self.dcp_size:
                wanted = f"a divisor of tp_size={self.tp_size}, or explicit context_ranks"
                raise SpecError("dcp_size", self.dcp_size, wanted)
            return
        rows = self.context_ranks
        if len(rows) != self.pcp_size or any(len(row) != self.tp_size for row in rows):
            wanted = f"{self.pcp_size} rows (PCP) of {self.tp_size} context ranks (TP)"
            raise SpecError("context_ranks", rows, wanted)
        found = {positive_int("context_ranks", each, least=0) for row in rows for each in row}
        if found != set(range(len(found))):
            raise SpecError("context_ranks", rows, "context ranks 0, 1, ... without a gap")
        if len(found) % self.dcp_size:
            wanted = f"a multiple of dcp_size={self.dcp_size} different ones"
            raise SpecError("context_ranks", rows, wanted)

    @cached_property
    def ranks(self) -> tuple[RankId, ...]:
        """Every rank of the engine, ascending."""
        return tuple(
            RankId(pp, pcp, tp)
            for pp in range(self.pp_size)
            for pcp in range(self.pcp_size)
            for tp in range(self.tp_size)
        )

    def check_rank(self, rank: RankId, field: str = "rank") -> RankId:
        """Return *rank* if this engine has it; else raise `SpecError` naming *field*."""
        sizes = (self.pp_size, self.pcp_size, self.tp_size)
        instance(field, rank, RankId)
        for name, at in zip(("pp", "pcp", "tp"), (rank.pp, rank.pcp, rank.tp), strict=True):
            if isinstance(at, bool) or not isinstance(at, int):
                raise SpecError(f"{field}.{name}", at, "an int")
        if not all(0 <= at < size for at, size in zip(attrs.astuple(rank), sizes, strict=True)):
            wanted = f"pp < {self.pp_size}, pcp < {self.pcp_size}, tp < {self.tp_size}"
            raise SpecError(field, rank, f"{wanted}, none negative")
        return rank

    @property
    def context_size(self) -> int:
        """How many context ranks share the tokens."""
        if self.context_ranks is None:
            return self.pcp_size * self.dcp_size
        return 1 + max(each for row in self.context_ranks for each in row)

    def context(self, rank: RankId) -> BlockCyclic:
        """Return which token positions *rank* owns, in groups whose rows are tokens."""
        if self.context_size == 1:
            return BlockCyclic()
        if self.context_ranks is None:
            at = rank.pcp * self.dcp_size + rank.tp % self.dcp_size
        else:
            at = self.context_ranks[rank.pcp][rank.tp]
        return BlockCyclic(at, self.context_size, self.interleave_size)

    def sharding(self, units: int, granularity: int = 1) -> Sharding:
        """Return the sharding of a part with *units* units.

        Handed out in multiples of *granularity*.
        """
        explicit = self._checked_shardings.get(units)
        if explicit is None:
            return even_sharding(units, self.tp_size, granularity)
        return check_whole(f"shardings[{units}]", explicit, granularity)
