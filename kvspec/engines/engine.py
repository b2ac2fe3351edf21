"""The description of one engine.

Invariant: every layer has one group and one pipeline stage, and some rank owns each unit of each
token. A description that violates this cannot be created.

How it works:
    `EngineSpec` combines the groups of layers with the parallel sizes, and answers two questions:
    which units, tokens and layers a rank owns, and how many bytes its pages have.

        >>> from kvspec import FullAttentionSpec
        >>> spec = FullAttentionSpec(
        ...     block_size=16, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
        >>> group = KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=spec)
        >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=2, pp_size=2))
        >>> rank = RankId(pp=1, tp=0)
        >>> engine.layers_at(group, rank.pp), engine.units(group, spec.parts[0], rank)
        (('l.1',), range(0, 4))
        >>> engine.page_size_bytes("l.1", rank), engine.page_size_bytes("l.0", rank)
        (32768, 0)
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import attrs

from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import layout_letters, without_alias
from kvspec.engines.stages import stages_of
from kvspec.errors import SpecError
from kvspec.inputs import MAX_TOKENS, instance, positive_int, sequence
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.sharding import Sharding, check_granularity, explicit_sharding
from kvspec.ownership.tokens import BlockCyclic
from kvspec.specs.key_content import Segment
from kvspec.specs.layer import padded_page


@attrs.frozen
class HeldPart:
    """One part of a layer on one rank.

    Attributes:
        group: Name of the group of the layer.
        content_bytes: Bytes of one unit of one row.
        units: Number of units that the rank owns.
        states: Rows of one block in memory.
        chunks: Chunks of the content, see `Part`.
        segments: Where a row stores its bytes, see `kvspec.specs.key_content`.
    """

    group: str
    content_bytes: int
    units: int
    states: int
    chunks: int
    segments: tuple[Segment, ...]


def _groups(value: Iterable[KVCacheGroup]) -> tuple[KVCacheGroup, ...]:
    return sequence("groups", value, "KVCacheGroups")


@attrs.frozen(kw_only=True, cache_hash=True)
class EngineSpec:
    """One engine: groups of layers, parallel sizes, and the layout of the cache.

    Both engines need such a description. `plan_transfer` accepts two of them if their layers have
    equal names and the bytes of these layers have equal meaning. Everything else may differ.

    Attributes:
        groups: Groups of layers. Each layer is in one group.
        parallel: Parallel sizes.
        layout: Letters of the layout, the outermost first, or `NHD` or `HND`
            (`kvspec.engines.letters`).
        null_block: Id in block tables that means "no block", or None if the engine has no such id.
            It replaces a block when all its tokens are outside the sliding window. vLLM uses 0
            (`BlockPool.null_block`). This block is never read or written.

    >>> from kvspec import MLAAttentionSpec
    >>> spec = MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="mla", layers=["l.0"], spec=spec)],
    ...                     parallel=ParallelConfig(tp_size=8), layout="NHD", null_block=0)
    >>> engine.layout
    'LBNHC'
    """

    groups: tuple[KVCacheGroup, ...] = attrs.field(converter=_groups)
    parallel: ParallelConfig = attrs.field(factory=ParallelConfig)
    layout: str = attrs.field(default="LBHNC", converter=without_alias)
    null_block: int | None = None
    # The explicit shardings of groups after their check. They follow from the other fields, so they
    # take no part in comparisons.
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
                raise SpecError("groups", group.name, "different group names")
            names.add(group.name)
            for layer in group.layers:
                if layer in homes:
                    rule = f"a layer must be in one group, but this one is in {homes[layer]!r} too"
                    raise SpecError(f"groups[{group.name!r}].layers", layer, rule=rule)
                homes[layer] = group.name
        self._check_shardings()
        for group in self.groups:
            self._check_context(group)
        # This raises an error if a layer has no stage.
        self.stage_of  # noqa: B018

    def _check_shardings(self) -> None:
        """Check that every explicit sharding belongs to a part and covers its units."""
        parts = [(group, part) for group in self.groups for part in group.own_parts]
        known = sorted({part.units for _, part in parts})
        for units in self.parallel.shardings:
            if units not in known:
                requirement = (
                    f"the units of a part of the engine, one of {', '.join(map(str, known))}"
                )
                raise SpecError("shardings", units, requirement)
        for group in self.groups:
            names = dict.fromkeys(part.name for part in group.own_parts)
            for name in group.shardings:
                if name not in names:
                    requirement = f"the name of a part of the group, one of {', '.join(names)}"
                    raise SpecError(f"groups[{group.name!r}].shardings", name, requirement)
        for group, part in parts:
            self.sharding(group, part)

    def sharding(self, group: KVCacheGroup, part: Part) -> Sharding:
        """Return the sharding of a part.

        An explicit sharding of the group has priority over one of the engine. Without both, the
        sharding is even.

        Args:
            group: A group of the engine.
            part: A part of a layer of *group*.
        """
        explicit = group.shardings.get(part.name)
        if explicit is None:
            return self.parallel.sharding(part.units, part.granularity)
        key = group.name, part.name, part.units
        if key not in self._checked_shardings:
            field = f"groups[{group.name!r}].shardings[{part.name!r}]"
            sharded = explicit_sharding(field, part.units, explicit, self.parallel.tp_size)
            self._checked_shardings[key] = check_granularity(field, sharded, part.granularity)
        return self._checked_shardings[key]

    def units(self, group: KVCacheGroup, part: Part, rank: RankId) -> range:
        """Return the units that *rank* owns of *part*, a part of a layer of *group*."""
        return self.sharding(group, part).ranges[rank.tp]

    def context_size(self, group: KVCacheGroup) -> int:
        """Return the number of context ranks that divide the tokens of *group*."""
        return self.parallel.context_size if group.context_sharded else 1

    def context(self, group: KVCacheGroup, rank: RankId) -> BlockCyclic:
        """Return the token positions that *rank* owns, if the rows of *group* are tokens."""
        return self.parallel.context(rank) if group.context_sharded else BlockCyclic()

    def virtual_block(self, group: KVCacheGroup) -> int:
        """Return the number of token positions that belong to one id in a block table of *group*.

        It is the block size times the number of context ranks, as in vLLM's `BlockTable`. The one
        block of a ring has all positions.
        """
        if group.spec.is_ring:
            return MAX_TOKENS
        return group.spec.block_size * self.context_size(group)

    def page_size_bytes(self, layer: str, rank: RankId) -> int:
        """Return the bytes of one block of a layer on one rank, with padding.

        Args:
            layer: Name of the layer.
            rank: A rank of the engine.

        Returns:
            The bytes, by the shardings of this engine. It is 0 if the layer is on another stage.

        Raises:
            SpecError: If the layer or the rank is unknown, or `page_size_padded` is too small.
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
        """Check that the interleave divides a block, and that each token of a unit has an owner.

        Each context rank number owns other tokens. So for each unit, the TP ranks that hold it must
        have all the numbers together.
        """
        size, interleave = self.context_size(group), self.parallel.interleave_size
        parts = [part for part in group.own_parts if part.per_token]
        if size == 1 or not parts:
            return
        if group.spec.block_size % interleave:
            requirement = f"a divisor of block_size={group.spec.block_size} of group {group.name!r}"
            raise SpecError("interleave_size", interleave, requirement)
        # All stages divide the tokens in the same way, so the ranks of one stage are enough.
        ranks = [rank for rank in self.parallel.ranks if rank.pp == 0]
        for part in parts:
            if interleave % part.tokens_per_state:
                row = f"tokens_per_state={part.tokens_per_state} of {group.name!r}"
                raise SpecError("interleave_size", interleave, f"a multiple of {row}")
            sharding = self.sharding(group, part)
            for units, holders in zip(sharding.owned, sharding.holders, strict=True):
                present = {self.context(group, rank).rank for rank in ranks if rank.tp in holders}
                missing = set(range(size)) - present
                # The tokens of a missing context rank would be stored nowhere for these units.
                if missing:
                    where = f"units {units.start}..{units.stop - 1} of {group.name}.{part.name}"
                    rule = (
                        f"each context rank needs a rank with {where}, "
                        f"but {sorted(missing)} have none"
                    )
                    raise SpecError("context_size", size, rule=rule)

    @cached_property
    def stage_of(self) -> dict[str, int]:
        """The pipeline stage of each layer, by layer name."""
        layers = [layer for group in self.groups for layer in group.layers]
        return stages_of(layers, self.parallel)

    def layers_at(self, group: KVCacheGroup, stage: int) -> tuple[str, ...]:
        """Return the layers of *group* on pipeline stage *stage*."""
        return tuple(layer for layer in group.layers if self.stage_of[layer] == stage)

    def by_stage(self, layers: Iterable[str]) -> dict[int, tuple[str, ...]]:
        """Return *layers* by their pipeline stage."""
        names_of: dict[int, list[str]] = {}
        for layer in layers:
            names_of.setdefault(self.stage_of[layer], []).append(layer)
        return {stage: tuple(names) for stage, names in names_of.items()}

    def held(self, rank: RankId) -> dict[tuple[str, str], HeldPart]:
        """Return the parts of which *rank* owns any units, by the names of layer and part."""
        held: dict[tuple[str, str], HeldPart] = {}
        for group in self.groups:
            for _, layers in group.layers_by_spec:
                here = [layer for layer in layers if self.stage_of[layer] == rank.pp]
                # Layers with equal parts may store their keys in different orders.
                specs = {layer: group.spec.of_layer(layer) for layer in here}
                orders = {id(spec): spec for spec in specs.values()}
                for part in group.in_memory(layers[0]).parts:
                    units = len(self.units(group, part, rank))
                    own = {
                        number: HeldPart(
                            group=group.name,
                            content_bytes=part.content_bytes,
                            units=units,
                            states=part.states,
                            chunks=part.chunks,
                            segments=spec.segments(part.name),
                        )
                        for number, spec in orders.items()
                    }
                    if units:
                        held |= {(layer, part.name): own[id(specs[layer])] for layer in here}
        return held

    def group(self, name: str) -> KVCacheGroup:
        """Return the group *name*. Raise `SpecError` if it is unknown."""
        instance("group", name, str)
        for group in self.groups:
            if group.name == name:
                return group
        raise SpecError("group", name, f"one of {', '.join(group.name for group in self.groups)}")

    def layout_of(self, group: KVCacheGroup) -> str:
        """Return the letters of the layout of *group*, the outermost first."""
        return layout_letters(group.layout or self.layout)

    @property
    def excluded(self) -> tuple[str, ...]:
        """The layers that no plan transfers."""
        return tuple(layer for group in self.groups for layer in group.excluded)

    @cached_property
    def homes(self) -> dict[str, KVCacheGroup]:
        """The group of each layer, by layer name."""
        return {layer: group for group in self.groups for layer in group.layers}
