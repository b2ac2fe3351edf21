"""Read vLLM's `KVCacheConfig` of one rank field by field.

Invariant: each layer of a tensor belongs to a group. If the config lists tensors, each layer of a
group belongs to a tensor. Otherwise `SpecError` names the path to the field.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader, layer_names
from kvspec.errors import SpecError
from kvspec.inputs import mapping, positive_int, sequence
from kvspec.ownership.parallel import ParallelConfig

# The class of vLLM that gives each layer of a group a spec of its own.
UNIFORM = "UniformTypeKVCacheSpecs"


@attrs.frozen
class Group:
    """One of `kv_cache_groups`: layers that share block tables.

    Attributes:
        layers: The names of the layers on this rank. Empty if all are on other pipeline stages.
        spec: The group's spec.
        transferred: Whether vLLM transfers the group. True for versions of vLLM without the field.
        eagle: Whether vLLM marks the group because it has at least one layer of a draft model.
    """

    layers: tuple[str, ...]
    spec: FieldReader
    transferred: bool
    eagle: bool

    @property
    def uniform(self) -> bool:
        """Whether each layer has a spec of its own."""
        return type(self.spec.value).__name__ == UNIFORM

    def spec_of(self, layer: str) -> FieldReader:
        """Return the spec of *layer*."""
        if not self.uniform:
            return self.spec
        field = self.spec.get("kv_cache_specs")
        specs = mapping(field.path, field.value, "layer names to specs")
        if layer not in specs:
            raise SpecError(field.path, sorted(specs, key=repr), f"a spec for {layer!r}")
        return FieldReader(f"{field.path}[{layer!r}]", specs[layer])


@attrs.frozen
class Tensor:
    """One of `kv_cache_tensors`. All sizes are in bytes.

    If *block_stride* is 0, the tensor is an allocation of its own. Otherwise all such tensors share
    one allocation. There the page of block b of ``layers[l]`` begins at
    ``offset + l * layer_stride + b * block_stride``.
    """

    path: str
    layers: tuple[str, ...]
    offset: int
    layer_stride: int
    block_stride: int


@attrs.frozen
class Config:
    """A `KVCacheConfig`. *tensors* is empty if the config lists none."""

    fields: FieldReader
    groups: tuple[Group, ...]
    tensors: tuple[Tensor, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of all groups."""
        return tuple(layer for group in self.groups for layer in group.layers)


def read_config(fields: FieldReader) -> Config:
    """Return the config of one rank. Raise `SpecError` if groups and tensors contradict."""
    groups_field = fields.get("kv_cache_groups")
    if groups_field.value is None:
        wanted = "a KVCacheConfig, with kv_cache_groups"
        raise SpecError(fields.path or "config", type(fields.value).__name__, wanted)
    groups = tuple(map(_group, groups_field.members("KVCacheGroupSpecs")))
    if not groups:
        raise SpecError(groups_field.path, groups_field.value, "at least one group")
    tensors = fields.get("kv_cache_tensors")
    tensor_fields = () if tensors.value is None else tensors.members("KVCacheTensors")
    config = Config(fields, groups, tuple(map(_tensor, tensor_fields)))
    placed_layers = {layer for tensor in config.tensors for layer in tensor.layers}
    for layer in config.layers if tensor_fields else ():
        if layer not in placed_layers:
            raise SpecError(tensors.path, sorted(placed_layers), f"a tensor that holds {layer!r}")
    for tensor in config.tensors:
        known_layers(tensor.path, tensor.layers, [config])
    return config


def read_configs(config: Any, parallel: ParallelConfig) -> tuple[Config, ...]:  # noqa: ANN401
    """Return the config of each pipeline stage, in order of the stages."""
    several = isinstance(config, Sequence) and not isinstance(config, (str, bytes))
    stages = (
        FieldReader("config", config).members("KVCacheConfigs")
        if several
        else (FieldReader("", config),)
    )
    if len(stages) != parallel.pp_size:
        wanted = f"one KVCacheConfig for each of the {parallel.pp_size} pipeline stages"
        raise SpecError("config", f"{len(stages)} configs", wanted)
    return tuple(map(read_config, stages))


def _group(fields: FieldReader) -> Group:
    layers = fields.get("layer_names").names()
    # Older versions of vLLM transfer every group and have no such field.
    moves = fields.get("enable_kv_transfer").flag(default=True)
    eagle = fields.get("is_eagle_group").value is True
    return Group(layers, fields.get("kv_cache_spec"), moves, eagle)


def _tensor(fields: FieldReader) -> Tensor:
    # The field has two names among the versions of vLLM: `shared_by` and `layers`.
    names = fields.get("shared_by")
    if not names.value and fields.get("layers").value is not None:
        names = fields.get("layers")
    # Versions in which each tensor is an allocation of its own have none of the three sizes.
    return Tensor(
        names.path,
        names.names(),
        *(fields.get(name).size(0, least=0) for name in ("offset", "layer_stride", "block_stride")),
    )


def known_layers(field: str, layers: Iterable[object], configs: Sequence[Config]) -> None:
    """Raise `SpecError` unless all *layers* belong to the groups of *configs*."""
    known = {layer for config in configs for layer in config.layers}
    for layer in layers:
        if layer not in known:
            raise SpecError(field, layer, "layers of kv_cache_groups")


def excluded_layers(names: Iterable[str], configs: Sequence[Config]) -> frozenset[str]:
    """Return the layers that the caller excludes."""
    unordered = isinstance(names, (set, frozenset))
    layers = tuple(names) if unordered else sequence("excluded", names, "layer names")
    known_layers("excluded", layer_names("excluded", layers), configs)
    return frozenset(layers)


def given_heads(heads: object, configs: Sequence[Config]) -> int | Mapping[str, int] | None:
    """Return the caller's number of KV heads: one number, one for each layer, or None."""
    if isinstance(heads, Mapping):
        known_layers("total_num_kv_heads", heads, configs)
        for layer, count in heads.items():
            positive_int(f"total_num_kv_heads[{layer!r}]", count)
        return heads
    return None if heads is None else positive_int("total_num_kv_heads", heads)
