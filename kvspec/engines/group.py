"""Groups of layers that share one block table.

Invariant: a group contains the properties that may differ between groups of one engine. Ranks and
parallel sizes belong to the engine.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import attrs

from kvspec.engines.letters import layout_letters, without_alias
from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int, sequence
from kvspec.ownership.part import Part
from kvspec.ownership.sharding import UnitRanges, explicit_shardings
from kvspec.specs import LayerSpec


def _layers(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("layers", value, "layer names")


def _excluded(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("excluded", value, "layer names")


def _explicit_shardings(value: object) -> Mapping[str, UnitRanges]:
    return explicit_shardings(value, "part names")


@attrs.frozen(kw_only=True, cache_hash=True)
class KVCacheGroup:
    """Layers that share one block table (vLLM: `KVCacheGroupSpec`).

    Attributes:
        name: Name of the group. Block tables are passed by this name. The two engines may use
            different names and groups.
        layers: Names of the layers. They identify the layers on both engines.
        spec: Spec of all layers, or a `UniformTypeKVCacheSpecs` with a spec for each.
        layout: Layout of this group, or None for the layout of the engine. In a recurrent state, H
            before N means that the conv state is [channels, rows], N before H the reverse.
        kernel_block_size: Tokens of one block in memory, or None if it is the block size of the
            table. vLLM cuts blocks of the table into kernel blocks if the attention kernel supports
            only smaller ones.
        excluded: Layers of the group that do not move, such as draft layers of one engine.
        shardings: Explicit shardings of this group: for the name of a part, one range of units for
            each TP rank. They have priority over those of `ParallelConfig`.
        context_sharded: Whether context ranks divide the tokens. It is False if every context rank
            holds all tokens. A draft model may do so while its target divides the tokens. A ring is
            never divided, so it becomes False.

    >>> from kvspec import FullAttentionSpec
    >>> spec = FullAttentionSpec(
    ...     block_size=64, total_num_kv_heads=8, head_size=128, dtype="bfloat16")
    >>> group = KVCacheGroup(name="full", layers=["l.0", "l.1"], spec=spec, kernel_block_size=16)
    >>> group.kernel_blocks_per_block
    4
    """

    name: str
    layers: tuple[str, ...] = attrs.field(converter=_layers)
    spec: LayerSpec
    layout: str | None = attrs.field(default=None, converter=without_alias)
    kernel_block_size: int | None = None
    excluded: tuple[str, ...] = attrs.field(default=(), converter=_excluded)
    shardings: Mapping[str, UnitRanges] = attrs.field(factory=dict, converter=_explicit_shardings)
    context_sharded: bool = True

    def __attrs_post_init__(self) -> None:
        field = f"groups[{self.name!r}]"
        if not isinstance(self.name, str) or not self.name:
            raise SpecError("name", self.name, "a group name")
        if not isinstance(self.spec, LayerSpec) or type(self.spec) is LayerSpec:
            raise SpecError(f"{field}.spec", self.spec, "a spec of a kind of layer")
        self._check_layers(field)
        if self.layout is not None:
            layout_letters(self.layout, f"{field}.layout")
        flag(f"{field}.context_sharded", self.context_sharded)
        if self.spec.is_ring:
            object.__setattr__(self, "context_sharded", False)
        if self.kernel_block_size is not None:
            self._check_kernel_block(f"{field}.kernel_block_size")

    def _check_layers(self, field: str) -> None:
        if not self.layers:
            raise SpecError(f"{field}.layers", self.layers, "at least one layer name")
        for layer in self.layers:
            if not isinstance(layer, str) or not layer:
                raise SpecError(f"{field}.layers", layer, "layer names, each a non-empty str")
        if len(set(self.layers)) < len(self.layers):
            raise SpecError(f"{field}.layers", self.layers, "each layer once")
        if self.spec.layers and set(self.spec.layers) != set(self.layers):
            raise SpecError(f"{field}.layers", self.layers, f"the spec's {self.spec.layers}")
        for layer in self.excluded:
            if not isinstance(layer, str) or layer not in self.layers:
                raise SpecError(f"{field}.excluded", layer, "layers of the group")

    def _check_kernel_block(self, field: str) -> None:
        size = positive_int(field, self.kernel_block_size)
        if self.spec.block_size % size:
            raise SpecError(field, size, f"a divisor of block_size={self.spec.block_size}")
        for spec in map(self.spec.of_layer, self.layers):
            if spec.page_size_padded is not None:
                raise SpecError(field, size, rule="cannot be combined with page_size_padded")
            if spec.is_ring:
                raise SpecError(field, size, "None, because a ring is one block")
            if any(not p.per_token or size % p.tokens_per_state for p in spec.parts):
                requirement = "a multiple of the tokens of each row, in attention layers"
                if any(part.name == "page" for part in spec.parts):
                    requirement = "a multiple of the spec's page_block_size, for opaque pages"
                raise SpecError(field, size, requirement)

    @property
    def memory_block_size(self) -> int:
        """Tokens of one block in memory: of a kernel block, if there are any."""
        return self.kernel_block_size or self.spec.block_size

    @property
    def kernel_blocks_per_block(self) -> int:
        """Blocks in memory for each block of the table.

        In vLLM, it is `physical_blocks_per_logical_kv_block`.
        """
        return self.spec.block_size // self.memory_block_size

    def in_memory(self, layer: str) -> LayerSpec:
        """Return the spec of *layer* with the block size that it has in memory."""
        spec = self.spec.of_layer(layer)
        return (
            spec
            if self.kernel_blocks_per_block == 1
            else attrs.evolve(spec, block_size=self.memory_block_size)
        )

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """The parts of the layers. Layers that have equal parts count once."""
        return tuple(part for spec, _ in self.layers_by_spec for part in spec.parts)

    @cached_property
    def layers_by_spec(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """One entry for each set of layers with equal parts: the first spec, and the layer names.

        Only a uniform-type group has more than one entry. The specs of one entry may differ in
        their padding.
        """
        by_parts: dict[tuple[Part, ...], tuple[LayerSpec, list[str]]] = {}
        for layer in self.layers:
            spec = self.spec.of_layer(layer)
            by_parts.setdefault(spec.parts, (spec, []))[1].append(layer)
        return tuple((spec, tuple(layers)) for spec, layers in by_parts.values())
