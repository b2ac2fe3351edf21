"""Uniform-type groups: layers of one kind that have different sizes.

Invariant: each layer keeps its own parts. The parts of one layer never stand for those of another
layer: its slices would contain the wrong heads. Only tokens are the same for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import Frozen, instance, mapping
from kvspec.ownership.part import Part
from kvspec.specs.layer import LayerSpec

# Fields in which the layers of a uniform-type group may differ.
_MAY_DIFFER = {
    "total_num_kv_heads",
    "head_size",
    "head_size_v",
    "dtype",
    "scale_dtype",
    "elements_per_scale",
    "tokens_per_scale",
    "tokens_per_state",
    "state_content_bytes",
    "spans_heads",
    "page_size_padded",
    "key_content",
    "scales_digest",
    "page_format",
    "page_block_size",
}


def _specs(value: Mapping[str, LayerSpec]) -> Mapping[str, LayerSpec]:
    return Frozen(mapping("specs", value, "layer names to specs"))


@attrs.frozen(kw_only=True, slots=False)
class UniformTypeKVCacheSpecs(LayerSpec):
    """Layers of one kind that share block tables, but have different heads or dtypes.

    It has the name of vLLM's class. An example is DeepSeek-V3.2, whose indexer has another head
    size than its latent cache.

    Attributes:
        specs: Spec of each layer, by the name of the layer. All specs have the same class, block
            size and window.
        block_size: Block size of the layers.
        page_size_padded: Always None. Each layer has its own.

    >>> from kvspec import MLAAttentionSpec
    >>> group = UniformTypeKVCacheSpecs(specs={
    ...     "latent": MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16"),
    ...     "indexer": MLAAttentionSpec(block_size=64, head_size=128, dtype="uint8")})
    >>> [(part.name, part.content_bytes) for part in group.parts]
    [('latent/latent', 1152), ('indexer/latent', 128)]
    """

    block_size: int = attrs.field(init=False)
    specs: Mapping[str, LayerSpec] = attrs.field(converter=_specs)
    page_size_padded: None = attrs.field(default=None, init=False)

    def __attrs_post_init__(self) -> None:
        if not self.specs:
            raise SpecError("specs", self.specs, "at least one layer")
        first_name, first = next(iter(self.specs.items()))
        for layer, spec in self.specs.items():
            if not isinstance(layer, str) or not layer:
                raise SpecError("specs", layer, "layer names")
            # The check of the class below covers every spec except the first one.
            if not isinstance(spec, LayerSpec) and spec is first:
                raise SpecError(f"specs[{layer!r}]", spec, "a spec of a kind of layer")
            if isinstance(spec, UniformTypeKVCacheSpecs):
                raise SpecError(f"specs[{layer!r}]", spec, "a spec of one layer")
            if type(spec) is not type(first):
                requirement = f"a {type(first).__name__}, as {first_name} has"
                raise SpecError(f"specs[{layer!r}]", spec, requirement)
            for field in attrs.fields(type(first)):
                value, common_value = getattr(spec, field.name), getattr(first, field.name)
                if field.name not in _MAY_DIFFER and value != common_value:
                    requirement = f"{common_value!r}, as {first_name} has"
                    raise SpecError(f"specs[{layer!r}].{field.name}", value, requirement)
        object.__setattr__(self, "block_size", first.block_size)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        """The parts of all layers, each named `layer/part`."""
        return tuple(
            attrs.evolve(part, name=f"{layer}/{part.name}")
            for layer, spec in self.specs.items()
            for part in spec.parts
        )

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in order."""
        return tuple(self.specs)

    def of_layer(self, layer: str) -> LayerSpec:
        """Return the spec of *layer*. Raise `SpecError` if the layer is unknown."""
        if instance("layer", layer, str) not in self.specs:
            raise SpecError("layer", layer, f"one of {', '.join(self.specs)}")
        return self.specs[layer]

    def page_size_bytes(self, tp_rank: int = 0, tp_size: int = 1) -> int:
        """Return the bytes of one block of all layers on one rank, with padding."""
        return sum(spec.page_size_bytes(tp_rank, tp_size) for spec in self.specs.values())

    @property
    def counts_prompt(self) -> bool:
        """Whether the layers store tokens of the prompt."""
        return self._first.counts_prompt

    @property
    def is_ring(self) -> bool:
        """Whether the blocks of the layers are rings."""
        return self._first.is_ring

    def without_transfer(self, cached: int, num_tokens: int) -> int:
        """Return the leading positions that need not move if the consumer has cached *cached*."""
        return self._first.without_transfer(cached, num_tokens)

    def total(self, num_tokens: int, encoder_tokens: int | None) -> int:
        """Return the number of tokens that the layers store for a request."""
        return self._first.total(num_tokens, encoder_tokens)

    def live_tokens(self, num_tokens: int) -> range:
        """Return the positions that the query after *num_tokens* tokens still reads.

        All layers have the same window, so the first layer stands for all of them.
        """
        return self._first.live_tokens(num_tokens)

    @property
    def _first(self) -> LayerSpec:
        return next(iter(self.specs.values()))

    def _layers_by_parts(self) -> Iterator[tuple[tuple[str, ...], tuple[Part, ...]]]:
        names_by_parts: dict[tuple[Part, ...], list[str]] = {}
        for layer, spec in self.specs.items():
            names_by_parts.setdefault(spec.parts, []).append(layer)
        for parts, names in names_by_parts.items():
            yield tuple(names), parts
