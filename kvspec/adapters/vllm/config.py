"""vLLM's config of one rank, read field by field.

Law: every layer that a tensor holds stands in a group, and every layer of a group in a tensor, if
any does; whatever is not so is an error that names the path to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import attrs

from kvspec.adapters.field_reader import FieldReader, layer_names
from kvspec.errors import SpecError
from kvspec.inputs import flag, mapping, positive_int, sequence
from kvspec.ownership.parallel import ParallelConfig

UNIFORM = "UniformTypeKVCacheSpecs"


@attrs.frozen
class Group:
    """One of `kv_cache_groups`."""

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
    """One of `kv_cache_tensors`, in bytes; *block_stride* 0: it is an allocation of its own.

    Otherwise the page of block b of the l-th layer begins at ``offset + l * layer_stride +
    b * block_stride`` of one allocation, which all such tensors share.
    """

    path: str
    layers: tuple[str, ...]
    offset: int
    layer_stride: int
    block_stride: int


@attrs.frozen
class Config:
    """A KVCacheConfig; *tensors* is empty where it does not say which there are."""

    fields: FieldReader
    groups: tuple[Group, ...]
    tensors: tuple[Tensor, ...]

    @property
    def layers(self) -> tuple[str, ...]:
        """The layers of all groups."""
        return tuple(layer for group in self.groups for layer in group.layers)


def read_config(fields: FieldReader) -> Config:
    """Return the config that *fields* is; every layer stands in a tensor, if any does."""
    found = fields.get("kv_cache_groups")
    if found.value is None:
        wanted = "a KVCacheConfig, with kv_cache_groups"
        raise SpecError(fields.path or "config", type(fields.value).__name__, wanted)
    groups = tuple(map(_group, found.members("KVCacheGroupSpecs")))
    if not groups:
        raise SpecError(found.path, found.value, "at least one group")
    tensors = fields.get("kv_cache_tensors")
    placed = () if tensors.value is None else tensors.members("KVCacheTensors")
    config = Config(fields, groups, tuple(map(_tensor, placed)))
    held = {layer for tensor in config.tensors for layer in tensor.layers}
    for layer in config.layers if placed else ():
        if layer not in held:
            raise SpecError(tensors.path, sorted(held), f"one that holds {layer!r}")
    for tensor in config.tensors:
        known_layers(tensor.path, tensor.layers, [config])
    return config


def read_configs(config: Any, parallel: ParallelConfig) -> tuple[Config, ...]:  # noqa: ANN401
    """Return the config of each pipeline stage."""
    several = isinstance(config, Sequence) and not isinstance(config, (str, bytes))
    found = (
        FieldReader("config", config).members("KVCacheConfigs")
        if several
        else (FieldReader("", config),)
    )
    if len(found) != parallel.pp_size:
        wanted = f"one KVCacheConfig for each of the {parallel.pp_size} pipeline stages"
        raise SpecError("config", f"{len(found)} of them", wanted)
    return tuple(map(read_config, found))


def _group(fields: FieldReader) -> Group:
    layers = fields.get("layer_names").names()
    transferred = fields.get("enable_kv_transfer")
    moves = transferred.value is None or flag(transferred.path, transferred.value)
    eagle = fields.get("is_eagle_group").value is True
    return Group(layers, fields.get("kv_cache_spec"), moves, eagle)


def _tensor(fields: FieldReader) -> Tensor:
    names = fields.get("shared_by")
    if not names.value and fields.get("layers").value is not None:
        names = fields.get("layers")
    return Tensor(
        names.path,
        names.names(),
        *(fields.get(name).size(0, least=0) for name in ("offset", "layer_stride", "block_stride")),
    )


def known_layers(field: str, layers: Iterable[object], configs: Sequence[Config]) -> None:
    """Check that *layers* are all of the *configs*' own."""
    known = {layer for config in configs for layer in config.layers}
    for layer in layers:
        if layer not in known:
            raise SpecError(field, layer, "layers of kv_cache_groups")


def excluded_layers(fields: Iterable[str], configs: Sequence[Config]) -> frozenset[str]:
    """Return the layers that the caller excludes."""
    unordered = isinstance(fields, (set, frozenset))
    found = tuple(fields) if unordered else sequence("excluded", fields, "layer names")
    known_layers("excluded", layer_names("excluded", found), configs)
    return frozenset(found)


def given_heads(fields: object, configs: Sequence[Config]) -> int | Mapping[str, int] | None:
    """Return the model's KV heads: a number, one by layer, or None."""
    if isinstance(fields, Mapping):
        known_layers("total_num_kv_heads", fields, configs)
        for layer, heads in fields.items():
            positive_int(f"total_num_kv_heads[{layer!r}]", heads)
        return fields
    return None if fields is None else positive_int("total_num_kv_heads", fields)
