"""A group: layers that share one block table, and how it owns its tokens and units.

Law: a group says of its layers what may differ between groups of one engine, and nothing of ranks
or sizes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cached_property

import attrs

from kvspec.engines.letters import layout_letters, without_alias
from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int, sequence
from kvspec.ownership.part import Part
from kvspec.ownership.sharding import Ranges, explicit_shardings
from kvspec.specs import LayerSpec


def _layers(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("layers", value, "layer names")


def _excluded(value: Iterable[str]) -> tuple[str, ...]:
    return sequence("excluded", value, "layer names")


def _explicit_shardings(value: object) -> Mapping[str, Ranges]:
    return explicit_shardings(value, "part names")


@attrs.frozen(kw_only=True, cache_hash=True)
class KVCacheGroup:
    """Layers that share one block table.

    *layers*: their names, the same on both engines. *spec*: one for all, or a uniform-type group.
    *layout*: this group's own, or None for the engine's. For state layers H before N means that
    the conv state lies dimension first, N before H that it lies row first. *kernel_block_size*:
    tokens of a block in memory, where the table's blocks are cut finer; None if they are not.
    *excluded*: layers of the group that are not transferred (draft layers of one engine).
    *shardings*: explicit shardings of this group alone, from a part's name to one range of units
    for each TP rank. *context_sharded*: False where every context rank holds every token, as a
    draft model does beside a target that shares its tokens.
    """

    name: str
    layers: tuple[str, ...] = attrs.field(converter=_layers)
    spec: LayerSpec
    layout: str | None = attrs.field(default=None, converter=without_alias)
    kernel_block_size: int | None = None
    excluded: tuple[str, ...] = attrs.field(default=(), converter=_excluded)
    shardings: Mapping[str, Ranges] = attrs.field(factory=dict, converter=_explicit_shardings)
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
            if not isinstance(layer, str) or layer not in self.layers:
                raise SpecError(f"{field}.excluded", layer, "layers of the group")

    def _check_kernel_block(self, field: str) -> None:
        size = positive_int(field, self.kernel_block_size)
        if self.spec.block_size % size:
            raise SpecError(field, size, f"a divisor of block_size={self.spec.block_size}")
        for spec in map(self.spec.of_layer, self.layers):
            if spec.page_size_padded is not None:
                raise SpecError(field, size, "no padded pages where blocks are cut finer")
            if any(not p.per_token or size % p.tokens_per_state for p in spec.parts):
                wanted = "rows of whole tokens, and a multiple of them"
                if any(part.name == "page" for part in spec.parts):
                    wanted = "whole opaque pages: page_block_size in the spec, a divisor of it"
                raise SpecError(field, size, wanted)

    @property
    def memory_block_size(self) -> int:
        """Tokens of one block in memory: the kernel's, where the table's are cut finer."""
        return self.kernel_block_size or self.spec.block_size

    @property
    def kernel_blocks_per_block(self) -> int:
        """Blocks in memory for each block of the table."""
        return self.spec.block_size // self.memory_block_size

    def in_memory(self, layer: str) -> LayerSpec:
        """Return the spec of *layer* as it lies in memory, block by kernel block."""
        spec = self.spec.of_layer(layer)
        return (
            spec
            if self.kernel_blocks_per_block == 1
            else attrs.evolve(spec, block_size=self.memory_block_size)
        )

    @property
    def own_parts(self) -> tuple[Part, ...]:
        """The parts of its layers, those of layers that are alike once."""
        return tuple(part for spec, _ in self.layers_by_spec for part in spec.parts)

    @cached_property
    def layers_by_spec(self) -> tuple[tuple[LayerSpec, tuple[str, ...]], ...]:
        """The layers by their own spec: one entry, unless this is a uniform-type group."""
        found: dict[tuple[Part, ...], tuple[LayerSpec, list[str]]] = {}
        for layer in self.layers:
            spec = self.spec.of_layer(layer)
            found.setdefault(spec.parts, (spec, []))[1].append(layer)
        return tuple((spec, tuple(layers)) for spec, layers in found.values())
