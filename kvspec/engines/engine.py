"""One engine's description.

Law: every layer has one group and one stage, and every token of every unit a rank that owns it; a
description of which that is not true does not exist.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cached_property
from itertools import pairwise

import attrs

from kvspec.engines.letters import layout_letters, without_alias
from kvspec.errors import SpecError
from kvspec.inputs import instance, positive_int, sequence
from kvspec.ownership.parallel import ParallelConfig, RankId, Stage
from kvspec.ownership.part import Part
from kvspec.specs import LayerSpec


def _layers(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("layers", value, "layer names")


def _excluded(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("excluded", value, "layer names")


@attrs.frozen(kw_only=True)
class KVCacheGroup:
    """Layers that share one block table.

    *layers*: their names, the same on both engines. *spec*: one for all, or a uniform-type group.
    *layout*: this group's own, or None for the engine's. For state layers H before N means that
    the conv state lies dimension first, N before H that it lies row first. *kernel_block_size*:
    tokens of a block in memory, where the table's blocks are cut finer; None if they are not.
    *excluded*: layers of the group that are not transferred (draft layers of one engine).
    """

    name: str
    layers: tuple[str, ...] = attrs.field(converter=_layers)
    spec: LayerSpec
    layout: str | None = attrs.field(default=None, converter=without_alias)
    kernel_block_size: int | None = None
    excluded: tuple[str, ...] = attrs.field(default=(), converter=_excluded)

    def __attrs_post_init__(self) -> None:
        field = f"groups[{self.name!r}]"
        if not isinstance(self.name, str) or not self.name:
            raise SpecError("name", self.name, "a group name")
        if not isinstance(self.spec, LayerSpec) or type(self.spec) is LayerSpec:
            raise SpecError(f"{field}.spec", self.spec, "a spec of a kind of layer")
        self._check_layers(field)
        if self.layout is not None:
            layout_letters(self.layout, f"{field}.layout")
        if self.kernel_block_size is not None:
            self._check_kernel_block(f"{field}.kernel_block_size")

    def _check_layers(self, field: str) -> None:
        if not self.layers:
            raise SpecError(f"{field}.layers", self.layers, "at least one layer name")
        for layer in self.layers:
            if not isinstance(layer, str) or not layer:
                wanted = "layer names, each a non-empty str"
                raise SpecError(f"{field}.layers", layer, wanted)
        if len(set(self.layers)) < len(self.layers):
            raise SpecError(f"{field}.layers", self.layers, "each layer once")
        if self.spec.layers and set(self.spec.layers) != set(self.layers):
            raise SpecError(f"{field}.layers", self.layers, f"the spec's {self.spec.layers}")
        for layer in self.excluded:
            if layer not in self.layers:
                raise SpecError(f"{field}.excluded", layer, "layers of the group")

    def _check_kernel_block(self, field: str) -> None:
        size = positive_int(field, self.kernel_block_size)
        if self.spec.block_size % size:
            raise SpecError(field, size, f"a divisor of block_size={self.spec.block_size}")
        for spec in map(self.spec.of_layer, self.layers):
            if spec.page_size_padded is not None:
                raise SpecError(field, size, "no padded pages where blocks are cut finer")
            if any(not p.tokens_per_state or size % p.tokens_per_state for p in spec.parts):
                raise SpecError(field, size, "rows of whole tokens, and a multiple of them")

    @property
    def memory_block_size(self) -> int:
        """Tokens of one block in memory: the kernel's, where the table's are cut finer."""
        return self.kernel_block_size or self.spec.block_size

    @property
    def split(self) -> int:
        """Blocks in memory for each block of the table."""
        return self.spec.block_size // self.memory_block_size

    def in_memory(self, layer: str) -> LayerSpec:
        """Return the spec of *layer* as it lies in memory, block by kernel block."""
        spec = self.spec.of_layer(layer)
        return spec if self.split == 1 else attrs.evolve(spec, block_size=self.memory_block_size)

    @cached_property
    def alike(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """The layers by their own spec: one entry, unless this is a uniform-type group."""
        found: dict[tuple[Part, ...], tuple[LayerSpec, list[str]]] = {}
        for layer in self.layers:
            spec = self.spec.of_layer(layer)
            found.setdefault(spec.parts, (spec, []))[1].append(layer)
        return tuple((spec, tuple(layers)) for spec, layers in found.values())


@attrs.frozen
class Held:
    """One part of a layer as a rank holds it: its group, content, own units, rows in memory."""

    group: str
    content_bytes: int
    units: int
    states: int


def _groups(value: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    return sequence("groups", value, "KVCacheGroups")


@attrs.frozen(kw_only=True)
class EngineSpec:
    """One engine: its groups of layers, its parallel sizes, and the layout of its cache."""

    groups: tuple[KVCacheGroup, ...] = attrs.field(converter=_groups)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    layout: str = attrs.field(default="LBHNC", converter=without_alias)

    def __attrs_post_init__(self) -> None:
        layout_letters(self.layout)
        if not self.groups:
            raise SpecError("groups", self.groups, "at least one group")
        instance("parallel", self.parallel, ParallelConfig)
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
        self._check_deals()
        for group in self.groups:
            self._check_context(group)
        self.stage_of  # noqa: B018 - every layer has a stage, or this raises

    def _check_deals(self) -> None:
        """Check that every explicit deal is one of a part's units, in multiples of its pieces."""
        if not self.parallel.unit_deals:
            return
        parts = [part for group in self.groups for part in group.spec.parts]
        known = sorted({part.units for part in parts})
        for units in self.parallel.unit_deals:
            if units not in known:
                wanted = f"the units of a part of the engine, one of {', '.join(map(str, known))}"
                raise SpecError("unit_deals", units, wanted)
        for part in parts:
            self.parallel.deal(part.units, part.deal_in)

    def _check_context(self, group: KVCacheGroup) -> None:
        """Check that the token deal fits the blocks, and that every token has an owner."""
        size, parallel = self.parallel.context_size, self.parallel
        if size == 1 or not any(part.tokens_per_state for part in group.spec.parts):
            return
        if group.spec.block_size % parallel.interleave_size:
            wanted = f"a divisor of block_size={group.spec.block_size} of group {group.name!r}"
            raise SpecError("interleave_size", parallel.interleave_size, wanted)
        for part in group.spec.parts:
            if part.tokens_per_state and parallel.interleave_size % part.tokens_per_state:
                wanted = f"a multiple of tokens_per_state={part.tokens_per_state} of {group.name!r}"
                raise SpecError("interleave_size", parallel.interleave_size, wanted)
        context = {r: parallel.context(r).rank for r in parallel.ranks if r.pp == 0}
        for part in group.spec.parts:
            deal = parallel.deal(part.units, part.deal_in)
            for units, holders in zip(deal.owned, deal.holders, strict=True):
                missing = set(range(size)) - {c for r, c in context.items() if r.tp in holders}
                if missing:
                    where = f"units {units.start}..{units.stop - 1} of {group.name}.{part.name}"
                    wanted = f"a rank for every context; {where} have none for {sorted(missing)}"
                    raise SpecError("context_size", size, wanted)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The pipeline stage of each layer, by layer name."""
        layers = [layer for group in self.groups for layer in group.layers]
        if self.parallel.pp_size == 1 and self.parallel.stages is None:
            return dict.fromkeys(layers, 0)
        stages = self.parallel.stages or _even_stages(layers, self.parallel.pp_size)
        found: dict[str, int] = {}
        for layer in layers:
            at = [n for n, stage in enumerate(stages) if _holds(stage, layer)]
            if len(at) != 1:
                told = "no stage" if not at else f"stages {at}"
                raise SpecError(
                    "stages", stages, f"one stage for layer {layer!r}, which is in {told}"
                )
            found[layer] = at[0]
        return found

    def layers_at(self, group: KVCacheGroup, stage: int) -> tuple[str, ...]:
        """Return the layers of *group* that pipeline stage *stage* holds."""
        return tuple(layer for layer in group.layers if self.stage_of[layer] == stage)

    def by_stage(self, layers: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Return *layers* by the pipeline stage that holds them."""
        found: dict[int, list[str]] = {}
        for layer in layers:
            found.setdefault(self.stage_of[layer], []).append(layer)
        return {stage: tuple(names) for stage, names in found.items()}

    def held(self, rank: RankId) -> dict[tuple[str, str], Held]:
        """Return what *rank* holds any units of, by layer and part."""
        found: dict[tuple[str, str], Held] = {}
        for group in self.groups:
            for _, layers in group.alike:
                here = [layer for layer in layers if self.stage_of[layer] == rank.pp]
                for part in group.in_memory(layers[0]).parts:
                    units = len(self.parallel.deal(part.units, part.deal_in).ranges[rank.tp])
                    each = Held(group.name, part.content_bytes, units, part.states)
                    found.update(((layer, part.name), each) for layer in here if units)
        return found

    def group(self, name: str) -> KVCacheGroup:
        """Return the group called *name*."""
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


def _number(layer: str) -> int | None:
    found = re.search(r"\d+", layer)
    return int(found.group()) if found else None


def _holds(stage: Stage, layer: str) -> bool:
    return _number(layer) in stage if isinstance(stage, range) else layer in stage


def _even_stages(layers: list[str], count: int) -> tuple[range, ...]:
    """Return a contiguous, even deal of layer numbers to stages."""
    found: set[int] = set()
    for layer in layers:
        number = _number(layer)
        if number is None:
            wanted = f"each stage's layer names, since layer {layer!r} has no number to deal by"
            raise SpecError("stages", None, wanted)
        found.add(number)
    numbers = sorted(found)
    starts = (numbers[stage * len(numbers) // count] for stage in range(1, count))
    return tuple(range(a, b) for a, b in pairwise([0, *starts, numbers[-1] + 1]))
