"""One engine's description.

Law: every layer has one group and one stage, and every token of every unit a rank that owns it; a
description of which that is not true does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import layout_letters, without_alias
from kvspec.engines.stages import stages_of
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.sharding import Sharding, check_whole, explicit_sharding
from kvspec.ownership.tokens import BlockCyclic
from kvspec.specs.layer import padded_page


@attrs.frozen
class HeldPart:
    """One part of a layer as a rank holds it: its group, content, own units, rows in memory."""

    group: str
    content_bytes: int
    units: int
    states: int
    chunks: int


def _groups(value: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    return sequence("groups", value, "KVCacheGroups")


@attrs.frozen(kw_only=True, cache_hash=True)
class EngineSpec:
    """One engine: its groups of layers, its parallel sizes, and the layout of its cache.

    *null_block*: the id that stands in its block tables where no block is, as where a window has
    passed (vLLM: 0), or None if it has none. It is never read and never written.
    """

    groups: tuple[KVCacheGroup, ...] = attrs.field(converter=_groups)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    layout: str = attrs.field(default="LBHNC", converter=without_alias)
    null_block: int | None = None
    _checked_shardings: dict[tuple[str, str, int], Sharding] = attrs.field(
        init=False, factory=dict, repr=False, eq=False, hash=False
    )

    def __attrs_post_init__(self) -> None:
        layout_letters(self.layout)
        if not self.groups:
            raise SpecError("groups", self.groups, "at least one group")
        instance("parallel", self.parallel, ParallelConfig)
        if self.null_block is not None:
            positive_int("null_block", self.null_block, least=0)
        names: set[str] = set()
        homes: dict[str, str] = {}
        for group in self.groups:
            if instance("groups", group, KVCacheGroup).name in names:
                raise SpecError("groups", group.name, "group names that differ")
            names.add(group.name)
            for layer in group.layers:
                if layer in homes:
                    wanted = f"each layer in one group; it is in {homes[layer]!r} too"
                    raise SpecError(f"groups[{group.name!r}].layers", layer, wanted)
                homes[layer] = group.name
        self._check_shardings()
        for group in self.groups:
            self._check_context(group)
        self.stage_of  # noqa: B018 - every layer has a stage, or this raises

    def _check_shardings(self) -> None:
        """Check that every explicit sharding is one of a part's units.

        In multiples of its chunks.
        """
        parts = [(group, part) for group in self.groups for part in group.own_parts]
        known = sorted({part.units for _, part in parts})
        for units in self.parallel.shardings:
            if units not in known:
                wanted = f"the units of a part of the engine, one of {', '.join(map(str, known))}"
                raise SpecError("shardings", units, wanted)
        for group in self.groups:
            names = dict.fromkeys(part.name for part in group.own_parts)
            for name in group.shardings:
                if name not in names:
                    wanted = f"the name of a part of the group, one of {', '.join(names)}"
                    raise SpecError(f"groups[{group.name!r}].shardings", name, wanted)
        for group, part in parts:
            self.sharding(group, part)

    def sharding(self, group: KVCacheGroup, part: Part) -> Sharding:
        """Return which units of *part*, a part of a layer of *group*, each TP rank owns."""
        explicit = group.shardings.get(part.name)
        if explicit is None:
            return self.parallel.sharding(part.units, part.granularity)
        key = group.name, part.name, part.units
        if key not in self._checked_shardings:
            field = f"groups[{group.name!r}].shardings[{part.name!r}]"
            sharded = explicit_sharding(field, part.units, explicit, self.parallel.tp_size)
            self._checked_shardings[key] = check_whole(field, sharded, part.granularity)
        return self._checked_shardings[key]

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the model's units of *part*, a part of a layer of *group*, that *rank* owns."""
        return self.sharding(group, part).ranges[rank.tp]

    def context_size(self, group: KVCacheGroup) -> int:
        """Return how many context ranks share the tokens of *group*."""
        return self.parallel.context_size if group.context_sharded else 1

    def context(self, group: KVCacheGroup, rank: RankId) -> BlockCyclic:
        """Return which token positions of *group* a rank owns, where its rows are tokens."""
        return self.parallel.context(rank) if group.context_sharded else BlockCyclic()

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the token positions that one block of *group*'s table stands for."""
        return group.spec.block_size * self.context_size(group)

    def page_size_bytes(self, layer: str, rank: RankId) -> int:
        """Return the bytes of one block of *layer* on *rank*, as this engine shards its units.

        Padding is included. A layer of another stage has no page on the rank: 0.
        """
        self.parallel.check_rank(rank)
        group = self.homes.get(instance("layer", layer, str))
        if group is None:
            raise SpecError("layer", layer, f"one of {', '.join(self.homes)}")
        if self.stage_of[layer] != rank.pp:
            return 0
        spec = group.spec.of_layer(layer)
        sizes = (len(self.units(group, p, rank)) * p.states * p.content_bytes for p in spec.parts)
        return padded_page(sum(sizes), spec.page_size_padded)

    def _check_context(self, group: KVCacheGroup) -> None:
        """Check that the token sharding fits the blocks, and that every token has an owner."""
        size, interleave = self.context_size(group), self.parallel.interleave_size
        parts = [part for part in group.own_parts if part.per_token]
        if size == 1 or not parts:
            return
        if group.spec.block_size % interleave:
            wanted = f"a divisor of block_size={group.spec.block_size} of group {group.name!r}"
            raise SpecError("interleave_size", interleave, wanted)
        ranks = [rank for rank in self.parallel.ranks if rank.pp == 0]
        for part in parts:
            if interleave % part.tokens_per_state:
                wanted = f"a multiple of tokens_per_state={part.tokens_per_state} of {group.name!r}"
                raise SpecError("interleave_size", interleave, wanted)
            sharding = self.sharding(group, part)
            for units, holders in zip(sharding.owned, sharding.holders, strict=True):
                held = {self.context(group, rank).rank for rank in ranks if rank.tp in holders}
                missing = set(range(size)) - held
                if missing:
                    where = f"units {units.start}..{units.stop - 1} of {group.name}.{part.name}"
                    wanted = f"a rank for every context; {where} have none for {sorted(missing)}"
                    raise SpecError("context_size", size, wanted)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The pipeline stage of each layer, by layer name."""
        layers = [layer for group in self.groups for layer in group.layers]
        return stages_of(layers, self.parallel)

    def layers_at(self, group: KVCacheGroup, stage: int) -> tuple[str, ...]:
        """Return the layers of *group* that pipeline stage *stage* holds."""
        return tuple(layer for layer in group.layers if self.stage_of[layer] == stage)

    def by_stage(self, layers: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Return *layers* by the pipeline stage that holds them."""
        found: dict[int, list[str]] = {}
        for layer in layers:
            found.setdefault(self.stage_of[layer], []).append(layer)
        return {stage: tuple(names) for stage, names in found.items()}

    def held(self, rank: RankId) -> dict[tuple[str, str], HeldPart]:
        """Return what *rank* holds any units of, by layer and part."""
        found: dict[tuple[str, str], HeldPart] = {}
        for group in self.groups:
            for _, layers in group.layers_by_spec:
                here = [layer for layer in layers if self.stage_of[layer] == rank.pp]
                for part in group.in_memory(layers[0]).parts:
                    units = len(self.units(group, part, rank))
                    each = HeldPart(group.name, part.content_bytes, units, part.states, part.chunks)
                    found.update(((layer, part.name), each) for layer in here if units)
        return found

    def group(self, name: str) -> KVCacheGroup:
        """Return the group called *name*."""
        instance("group", name, str)
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError("group", name, f"one of {', '.join(each.name for each in self.groups)}")

    def layout_of(self, group: KVCacheGroup) -> str:
        """Return the letters of the layout of *group*'s cache."""
        return layout_letters(group.layout or self.layout)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The layers that no plan transfers."""
        return tuple(layer for group in self.groups for layer in group.excluded)

    @cached_property
    def homes(self) -> dict[str, KVCacheGroup]:
        """The group of each layer, by layer name."""
        return {layer: group for group in self.groups for layer in group.layers}
