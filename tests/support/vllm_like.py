"""Classes with vLLM's names and attributes, and tensors placed as vLLM's configs describe.

They have only the parts that an adapter reads: a rank's `KVCacheConfig`, the specs of its groups,
and numpy views of one flat buffer in place of torch tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

import kvspec
from kvspec.adapters import vllm

FLASH = "vllm.v1.attention.backends.flash_attn.FlashAttentionBackend"
FLASHINFER = "vllm.v1.attention.backends.flashinfer.FlashInferBackend"
MSA = "vllm.models.minimax_m3.nvidia.sparse_attention_msa.MiniMaxM3SparseMSANvfp4Backend"
B12X = "vllm.v1.attention.backends.b12x.B12xPagedAttentionBackend"

ITEMSIZE = {"uint8": 1, "bfloat16": 2, "float16": 2, "float32": 4}
NUMPY = {1: np.uint8, 2: np.uint16, 4: np.uint32}


class KVQuantMode(Enum):
    """How a cache is quantised."""

    NONE = 0
    NVFP4 = 4
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TENSOR = 1


@dataclass(frozen=True, kw_only=True)
class KVCacheSpec:
    """The base class: the field of all specs."""

    block_size: int


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """A rank's heads, and how a backend packs them."""

    num_kv_heads: int
    head_size: int
    dtype: str
    head_size_v: int | None = None
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None
    num_head_slots: int | None = None
    state_content_bytes: int | None = None
    tokens_per_state: int = 1
    dcp_sharded: bool = True

    @property
    def slots(self) -> int:
        """The size of a view along H."""
        return self.num_head_slots or self.num_kv_heads

    @property
    def content(self) -> int:
        """Bytes of a view along C."""
        if self.state_content_bytes is not None:
            return self.state_content_bytes
        return (self.head_size + self._value()) * ITEMSIZE[self.dtype]

    def _value(self) -> int:
        return self.head_size if self.head_size_v is None else self.head_size_v

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Bytes of a page."""
        return self.slots * self.block_size // self.tokens_per_state * self.content

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, padding included."""
        return self.page_size_padded or self.unpadded_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """A layer that keeps every token."""

    sliding_window: int | None = None


@dataclass(frozen=True, kw_only=True)
class RSWASpec(FullAttentionSpec):
    """A layer that keeps the prompt and a window of generated tokens."""

    rswa_window: int = 8


@dataclass(frozen=True, kw_only=True)
class TQFullAttentionSpec(FullAttentionSpec):
    """A kind of full attention that the adapter does not know."""


@dataclass(frozen=True, kw_only=True)
class SinkFullAttentionSpec(FullAttentionSpec):
    """Full attention with sink tokens."""


@dataclass(frozen=True, kw_only=True)
class CircularBufferSpec(FullAttentionSpec):
    """A ring of the last rows of a request."""


@dataclass(frozen=True, kw_only=True)
class EncoderOnlyAttentionSpec(AttentionSpec):
    """A layer without a cache."""


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A layer that keeps the encoder's tokens."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A layer that keeps the last tokens."""

    sliding_window: int
    extra_retained_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class ChunkedLocalAttentionSpec(AttentionSpec):
    """A layer that keeps the tokens of a chunk."""

    attention_chunk_size: int


@dataclass(frozen=True, kw_only=True)
class MLAAttentionSpec(FullAttentionSpec):
    """A layer that keeps one latent for each token."""

    num_kv_heads: int = 1
    cache_dtype_str: str | None = None

    def _value(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class HiddenStateCacheSpec(MLAAttentionSpec):
    """Hidden states, stored like a latent."""


@dataclass(frozen=True, kw_only=True)
class SlidingWindowMLASpec(SlidingWindowSpec):
    """A layer that keeps one latent for each of the last tokens."""

    num_kv_heads: int = 1

    def _value(self) -> int:
        return 0


@dataclass(frozen=True, kw_only=True)
class MambaSpec(KVCacheSpec):
    """The state tensors of a rank."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mamba_type: str = "mamba2"
    num_speculative_blocks: int = 0
    page_size_padded: int | None = None
    mamba_cache_mode: str = "none"
    dcp_sharded: bool = False
    tp_replicated: bool = False

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page, padding included."""
        sizes = zip(self.shapes, self.dtypes, strict=True)
        return self.page_size_padded or sum(prod(s) * ITEMSIZE[d] for s, d in sizes)


@dataclass(frozen=True, kw_only=True)
class UniformTypeKVCacheSpecs(KVCacheSpec):
    """Layers with one spec each."""

    kv_cache_specs: Mapping[str, KVCacheSpec]


@dataclass
class KVCacheGroupSpec:
    """Layers that share block tables."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec
    enable_kv_transfer: bool = True


@dataclass
class KVCacheTensor:
    """An area of memory and the layers in it."""

    size: int
    shared_by: list[str] = field(default_factory=list)
    offset: int = 0
    layer_stride: int = 0
    block_stride: int = 0


@dataclass
class KVCacheConfig:
    """The cache of one rank."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]


# Replacements of an attribute. "gone" deletes it.
BROKEN = ("gone", None, 5, "x", (), -1)


def changed(given: Any, name: str, value: object) -> Any:
    """Return a copy of *given* with the attribute *name* replaced and the same class name.

    A deleted field is missing even if the dataclass has a default for it.
    """

    def get(_: object) -> object:
        if value == "gone":
            raise AttributeError(name)
        return value

    copy = object.__new__(type(type(given).__name__, (type(given),), {name: property(get)}))
    copy.__dict__.update(vars(given))
    return copy


def attributes(given: Any) -> list[str]:
    """Return the names of *given*'s fields and properties."""
    return [name for name in dir(given) if not name.startswith("_")]


def broken(given: KVCacheConfig) -> Iterator[tuple[str, KVCacheConfig]]:
    """Yield copies of a config, each with one attribute of it or of its members replaced."""
    for name in attributes(given):
        for value in BROKEN:
            yield f"{name} {value!r}", changed(given, name, value)
    for held in ("kv_cache_groups", "kv_cache_tensors"):
        for at, each in enumerate(getattr(given, held)):
            for where, other in _broken_member(each):
                members = list(getattr(given, held))
                members[at] = other
                yield f"{held}[{at}]{where}", replace(given, **{held: members})


def _broken_member(given: Any) -> Iterator[tuple[str, Any]]:
    """Yield copies of a group or a tensor, and of its specs, with one attribute replaced."""
    for value in BROKEN[1:]:
        yield f" {value!r}", value
    for name in attributes(given):
        for value in BROKEN:
            yield f".{name} {value!r}", changed(given, name, value)
    spec = getattr(given, "kv_cache_spec", None)
    for name in attributes(spec) if spec is not None else ():
        for value in BROKEN:
            other = replace(given, kv_cache_spec=changed(spec, name, value))
            yield f".kv_cache_spec.{name} {value!r}", other
    for layer, each in getattr(spec, "kv_cache_specs", {}).items():
        for name in attributes(each):
            for value in BROKEN:
                specs = {**spec.kv_cache_specs, layer: changed(each, name, value)}
                other = replace(given, kv_cache_spec=replace(spec, kv_cache_specs=specs))
                yield f"[{layer!r}].{name} {value!r}", other


def engine_spec(config: Any, **options: Any) -> kvspec.EngineSpec:
    """Return the engine of a config. By default its layers have the FlashAttention backend."""
    return vllm.engine_spec(config, **{"backends": FLASH, **options})


def spec_of(recorded: Mapping[str, Any]) -> KVCacheSpec:
    """Return the spec of a recorded row. Its elements are bytes."""
    fields = dict(recorded)
    cls, page = fields.pop("cls"), fields.pop("page_size_bytes")
    if cls == "MambaSpec":
        fields["shapes"] = tuple(tuple(shape) for shape in fields["shapes"])
        fields["dtypes"] = ("uint8",) * len(fields["shapes"])
    else:
        fields["dtype"] = "uint8"
        fields["kv_quant_mode"] = KVQuantMode[fields.get("kv_quant_mode", "NONE")]
    spec: Any = globals()[cls](**fields)
    assert page == spec.page_size_bytes
    return spec  # type: ignore[no-any-return]


def config_of(row: Mapping[str, Any], side: str) -> KVCacheConfig:
    """Return the config of one rank of *side* ("p" or "d") of a recorded row."""
    specs = [spec_of(each) for each in row[f"{side}_specs"]]
    groups = row.get("groups")
    if groups is None:
        same_specs: dict[KVCacheSpec, list[int]] = {}
        for at, spec in enumerate(specs):
            same_specs.setdefault(spec, []).append(at)
        groups = list(same_specs.values())
    tensors = [
        KVCacheTensor(
            size=each["size"],
            shared_by=[f"layer.{at}" for at in each["layers"]],
            offset=each["offset"],
            layer_stride=each["layer_stride"],
            block_stride=each["block_stride"],
        )
        for each in row.get(f"{side}_tensors", ())
    ]
    named = [
        KVCacheGroupSpec([f"layer.{at}" for at in members], specs[members[0]]) for members in groups
    ]
    return KVCacheConfig(row[f"{side}_num_blocks"], tensors, named)


def buffer_of(config: KVCacheConfig) -> npt.NDArray[np.uint8]:
    """Return the one allocation that contains every tensor of *config*."""
    return np.zeros(max(t.offset + t.size for t in config.kv_cache_tensors), np.uint8)


def tensors_of(config: KVCacheConfig, layout: str, flat: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Return every layer's tensor, or list of tensors, as views of *flat*."""
    specs = {
        layer: group.kv_cache_spec
        for group in config.kv_cache_groups
        for layer in group.layer_names
    }
    tensors: dict[str, Any] = {}
    for tensor in config.kv_cache_tensors:
        for at, layer in enumerate(tensor.shared_by):
            place = (tensor.offset + at * tensor.layer_stride, tensor.block_stride)
            spec = specs[layer]
            if isinstance(spec, MambaSpec):
                tensors[layer] = _states(spec, config.num_blocks, place, flat)
            else:
                count = len(tensor.shared_by)
                tensors[layer] = _tokens(
                    spec, config.num_blocks, place, flat, layout, tensor, count
                )
    return tensors


def _states(
    spec: MambaSpec, num_blocks: int, place: tuple[int, int], flat: npt.NDArray[np.uint8]
) -> list[Any]:
    states, (offset, block) = [], place
    for shape, dtype in zip(spec.shapes, spec.dtypes, strict=True):
        size = ITEMSIZE[dtype]
        inner = [prod(shape[at + 1 :]) * size for at in range(len(shape))]
        states.append(np.ndarray((num_blocks, *shape), NUMPY[size], flat, offset, (block, *inner)))
        offset += prod(shape) * size
    return states


def _tokens(
    spec: Any,
    num_blocks: int,
    place: tuple[int, int],
    flat: npt.NDArray[np.uint8],
    layout: str,
    tensor: KVCacheTensor,
    layers: int,
) -> Any:
    """Return a view [blocks, slots, tokens, content]. The layout decides the strides of H and N."""
    rows, content = spec.block_size // spec.tokens_per_state, spec.content
    extents = {"H": spec.slots, "N": rows, "C": content}
    strides = {"C": 1}
    for letter in "HN":
        inside = layout[layout.index(letter) + 1 :]
        if "B" in inside:
            strides[letter] = tensor.block_stride * num_blocks
        elif "L" in inside:
            strides[letter] = tensor.layer_stride * layers
        else:
            strides[letter] = prod(extents[each] for each in inside)
    shape = (num_blocks, spec.slots, rows, content)
    at = (place[1], strides["H"], strides["N"], 1)
    return np.ndarray(shape, np.uint8, flat, place[0], at)


# The fields of a rank's heads.
HEADS = {"block_size": 16, "num_kv_heads": 2, "head_size": 8, "dtype": "bfloat16"}


def config(*groups: Any, num_blocks: int = 6, tensors: Any = ()) -> KVCacheConfig:
    """Return a config of (layers, spec) groups."""
    named = [KVCacheGroupSpec(list(layers), spec) for layers, spec in groups]
    return KVCacheConfig(num_blocks, list(tensors), named)


def state(kind: str, shapes: Any, **more: Any) -> MambaSpec:
    """Return a state whose elements are bytes."""
    dtypes = ("uint8",) * len(shapes)
    return MambaSpec(block_size=64, shapes=shapes, dtypes=dtypes, mamba_type=kind, **more)
