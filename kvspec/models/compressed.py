"""Build the KV cache groups of DeepSeek-V4, whose layers keep compressed latents.

Invariant: every size is one of vLLM's models/deepseek_v4. vLLM fixes the blocks of the window and
of the compressors, because their pages share memory with the latents.

How it works:
    Each layer keeps the latents of a window. A layer with a ratio of 4 or 128 also keeps one latent
    for as many tokens, and the unfinished sums of its compressor. A ratio of 4 reads two groups of
    tokens for each latent, so the sums of the last 8 tokens count, and a sum is twice as long. It
    also has an indexer, with keys and a compressor of its own. For ``head_dim`` 512 and
    ``index_head_dim`` 128:

        cache of a layer                 ratios    group          a row
        attn.swa_cache                   all       window         1 token, 512 elements
        attn                             4, 128    mla            4 or 128 tokens, 512 elements
        attn.indexer.k_cache             4         mla            4 tokens, 132 bytes
        attn.compressor.state_cache      4         compressor_4   1 token, 2048 float32
        attn.indexer.compressor...       4         compressor_4   1 token, 512 float32
        attn.compressor.state_cache      128       compressor_128 1 token, 1024 float32
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.models.fields import ModelConfig
from kvspec.specs import (
    LayerSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    UniformTypeKVCacheSpecs,
)

# Returns the name of a cache from its pattern and the index of the layer.
NameRule: TypeAlias = Callable[[str, int], str]

# Takes the config, the kinds of the layers, the rule for names, the tokens of a block, the type of
# the latents, and the number of speculative tokens. Returns the groups.
GroupRule: TypeAlias = Callable[
    [ModelConfig, list[str], NameRule, int, str, int], tuple[KVCacheGroup, ...]
]

NO_RATIO, SPARSE_RATIO, HEAVY_RATIO = "0", "4", "128"

# Bytes of a row of ``fp8_ds_mla``: 448 8-bit elements, 64 of bfloat16, 7 scales and a padding.
_PACKED_ROW = 584
_PACKED_HEAD = 512
_WINDOW_BLOCK = 64
# The tokens of one block of sums, and how many groups of tokens a latent reads.
_SUMS = {SPARSE_RATIO: (4, 2), HEAVY_RATIO: (8, 1)}
_INDEXER_BLOCK = 128


def listed_ratios(read: ModelConfig, layers: int, allowed: tuple[str, ...]) -> list[str]:
    """Return the ratio of each layer, from ``compress_ratios``. Each must be *allowed*."""
    listed = read.get("compress_ratios")
    # Some configs also list the draft layers, after the others.
    if not isinstance(listed, list) or len(listed) < layers:
        raise SpecError("compress_ratios", listed, f"num_hidden_layers={layers} ratios")
    found = [str(ratio) for ratio in listed[:layers]]
    if not set(allowed).issuperset(found):
        raise SpecError("compress_ratios", listed, f"ratios of {', '.join(allowed)}")
    return found


def ratios(read: ModelConfig, layers: int) -> list[str]:
    """Return the ratio of each layer of DeepSeek-V4. In some configs, 1 stands for 0.

    >>> ratios(ModelConfig({"compress_ratios": [1, 4, 128]}, {}), 3)
    ['0', '4', '128']
    """
    found = listed_ratios(read, layers, (NO_RATIO, "1", SPARSE_RATIO, HEAVY_RATIO))
    return [NO_RATIO if ratio == "1" else ratio for ratio in found]


def check_rates(read: ModelConfig) -> None:
    """Raise `SpecError` if the compressed layers have other rates than vLLM's."""
    rates = read.get("compress_rates")
    names = ("compressed_sparse_attention", "heavily_compressed_attention")
    if rates is not None and rates != dict(zip(names, (4, 128), strict=True)):
        raise SpecError("compress_rates", rates, f"4 and 128 for {' and '.join(names)}")


def compressed_groups(
    read: ModelConfig,
    kinds: list[str],
    name: NameRule,
    block_size: int,
    dtype: str,
    _num_speculative_tokens: int,
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of a model whose layers have the ratios *kinds*.

    Args:
        read: The config.
        kinds: The ratio of each layer.
        name: Returns the name of a cache from its pattern and the index of the layer.
        block_size: Tokens of one block of the compressed latents, a multiple of 128.
        dtype: Type of the latents. ``uint8`` is the packed rows of vLLM's ``fp8_ds_mla``.
        _num_speculative_tokens: Not used. Windows of the sums do not depend on it.
    """
    check_rates(read)
    # vLLM follows this field, and transformers ``layer_types``.
    if read.get("compress_ratios") is not None and ratios(read, len(kinds)) != kinds:
        rule = "layer_types describes other layers, and engines follow different fields"
        raise SpecError("compress_ratios", read.get("compress_ratios"), rule=rule)
    if block_size % int(HEAVY_RATIO):
        raise SpecError("block_size", block_size, f"a multiple of {HEAVY_RATIO}")
    head, packed = read.number("head_dim"), dtype == "uint8"
    if packed and head != _PACKED_HEAD:
        raise SpecError("head_dim", head, f"{_PACKED_HEAD}, for the packed rows of fp8_ds_mla")
    latent: dict[str, object] = {"head_size": head, "dtype": dtype}
    if packed:
        # A page has the elements of all rows, then their scales.
        latent |= {"state_content_bytes": _PACKED_ROW, "page_format": "opaque:deepseek"}
    window = SlidingWindowMLASpec(
        block_size=_WINDOW_BLOCK,
        sliding_window=read.number("sliding_window"),
        **latent,  # type: ignore[arg-type]
    )
    groups: dict[str, dict[str, LayerSpec]] = {
        "mla": {},
        "sliding_window": {
            name("model.layers.{}.attn.swa_cache", i): window for i in range(len(kinds))
        },
    }
    for index, kind in enumerate(kinds):
        if kind == NO_RATIO:
            continue
        sums = groups.setdefault(f"compressor_{kind}", {})
        groups["mla"][name("model.layers.{}.attn", index)] = MLAAttentionSpec(
            block_size=block_size,
            tokens_per_state=int(kind),
            **latent,  # type: ignore[arg-type]
        )
        sums[name("model.layers.{}.attn.compressor.state_cache", index)] = _sums(kind, head)
        if kind == SPARSE_RATIO:
            size = read.number("index_head_dim")
            keys = indexer_keys(size, block_size, tokens_per_state=int(kind))
            groups["mla"][name("model.layers.{}.attn.indexer.k_cache", index)] = keys
            own = _sums(kind, size)
            sums[name("model.layers.{}.attn.indexer.compressor.state_cache", index)] = own
    return tuple(group_of(group, specs) for group, specs in groups.items() if specs)


def indexer_keys(size: int, block_size: int, *, tokens_per_state: int = 1) -> MLAAttentionSpec:
    """Return the spec of the 8-bit keys of a DeepSeek indexer.

    A key has 8-bit floats and one float32 scale for each 128 elements. A key of 128 elements takes
    128 + 4 = 132 bytes. A page has the keys of all tokens, then their scales. So it is no sequence
    of rows of 132 bytes. vLLM describes the keys as bytes, and so does this spec.
    """
    if size % _INDEXER_BLOCK:
        raise SpecError("index_head_dim", size, f"a multiple of {_INDEXER_BLOCK}")
    return MLAAttentionSpec(
        block_size=block_size,
        head_size=size,
        dtype="uint8",
        tokens_per_state=tokens_per_state,
        scale_dtype="float32",
        elements_per_scale=None if size == _INDEXER_BLOCK else _INDEXER_BLOCK,
    )


def _sums(kind: str, size: int) -> SlidingWindowMLASpec:
    """Return the spec of the sums of a compressor: a key and a gate for each token."""
    block, read_groups = _SUMS[kind]
    return SlidingWindowMLASpec(
        block_size=block,
        head_size=2 * read_groups * size,
        dtype="float32",
        sliding_window=read_groups * int(kind),
    )


def group_of(name: str, specs: Mapping[str, LayerSpec]) -> KVCacheGroup:
    """Return the group of these layers. It is a uniform-type group if they differ."""
    first, *others = specs.values()
    same = all(other == first for other in others)
    spec = first if same else UniformTypeKVCacheSpecs(specs=specs)
    return KVCacheGroup(name=name, layers=tuple(specs), spec=spec)
