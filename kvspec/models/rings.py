"""Build the caches of models that keep one row for several tokens, and the open tokens in a ring.

Invariant: a ring has as many rows as vLLM's. Its engines may have other numbers of speculative
tokens, and so rings of other sizes. The tokens that are compressed together are equal.

How it works:
    vLLM's ring needs rows for the open tokens and for those of one speculative step:

        model            tokens of a row     rows of the ring for s speculative tokens
        DeepSeek-V4.1    2                   the power of two that is at least s + 2, and 8
        GLM-5.3-Flash    index_kpool = 16    16 times a power of two, at least 16 + s
        Qwen4-exp        a ratio r           a multiple of r, at least r + s

    DeepSeek-V4.1 shares latents: only the layers in ``kv_source_layer_ids`` own them, and the next
    layers read those of the last source. All layers have a window. For ratios 0, 1, 2, 2 and the
    sources 1 and 2, of which both own an indexer, the caches are:

        layer    ratio    window    latents and indexer keys    ring
        0        0        yes
        1        1        yes       one row for each token
        2        2        yes       one row for two tokens      yes
        3        2        yes       reads those of layer 2
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.models.compressed import NameRule, group_of, indexer_keys, listed_ratios
from kvspec.models.fields import ModelConfig
from kvspec.specs import CircularBufferSpec, LayerSpec, MLAAttentionSpec, SlidingWindowMLASpec


class RingRule(Protocol):
    """A rule for the ring of a layer."""

    def __call__(self, read: ModelConfig, drafts: int, *, nested: bool) -> CircularBufferSpec:
        """Return the ring of a config, for *drafts* speculative tokens.

        *nested* is whether the config is the part of another one, as in multimodal models.
        """


_V41_WINDOW_BLOCK = 32
_LEAST_ROWS = 8
_RATIOS = ("0", "1", "2")
# The elements of the three positions of a token, and the elements on whose multiple they begin.
_POSITIONS, _ALIGNED = 12, 4


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def pooled_tail(read: ModelConfig, drafts: int, *, nested: bool) -> CircularBufferSpec:  # noqa: ARG001
    """Return the ring of keys and gates of GLM-5.3-Flash (vLLM: `Glm5NextTailCache`)."""
    pool = read.number("index_kpool")
    return CircularBufferSpec(
        block_size=pool * _power_of_two(-(-(pool + drafts) // pool)),
        num_kv_heads=2,
        head_size=read.number("index_head_dim"),
        dtype="bfloat16",
        compress_ratio=pool,
    )


def key_tail(read: ModelConfig, drafts: int, *, nested: bool) -> CircularBufferSpec:
    """Return the ring of keys of Qwen4-exp (vLLM: `QSAKeyStateCache`).

    If a model has positions of several axes, a row also has the position of its token. vLLM's class
    for text has none.
    """
    ratio, size = read.number("index_kpool"), read.number("index_head_dim")
    rope = (read.get("rope_parameters"), read.get("rope_scaling"))
    if nested and any(isinstance(each, Mapping) and "mrope_section" in each for each in rope):
        size = -(-size // _ALIGNED) * _ALIGNED + _POSITIONS
    return CircularBufferSpec(
        block_size=ratio * -(-(ratio + drafts) // ratio),
        head_size=size,
        dtype="bfloat16",
        compress_ratio=ratio,
    )


def shared_ratios(read: ModelConfig, layers: int) -> list[str]:
    """Return the ratio of each layer of DeepSeek-V4.1, from ``compress_ratios``.

    >>> shared_ratios(ModelConfig({"compress_ratios": [0, 1, 2, 0]}, {}), 3)
    ['0', '1', '2']
    """
    return listed_ratios(read, layers, _RATIOS)


def shared_groups(
    read: ModelConfig,
    kinds: list[str],
    name: NameRule,
    block_size: int,
    dtype: str,
    num_speculative_tokens: int,
) -> tuple[KVCacheGroup, ...]:
    """Return the groups of DeepSeek-V4.1, whose layers have the ratios *kinds*.

    The arguments are those of a `GroupRule`.
    """
    if dtype == "uint8":
        rule = "a packed row has 528 bytes on some GPUs and 584 on others, so read vLLM's specs"
        raise SpecError("dtype", dtype, rule=rule)
    head = read.number("head_dim")
    sources = _sources(read, "kv_source_layer_ids", kinds)
    with_keys = set(_sources(read, "index_source_layer_ids", kinds))
    window = SlidingWindowMLASpec(
        block_size=_V41_WINDOW_BLOCK,
        sliding_window=read.number("sliding_window"),
        head_size=head,
        dtype=dtype,
    )
    windows: dict[str, LayerSpec] = {
        name("model.layers.{}.attn.swa_cache", i): window for i in range(len(kinds))
    }
    latents, rings = dict[str, LayerSpec](), dict[str, LayerSpec]()
    for index in sources:
        ratio = int(kinds[index])
        latents[name("model.layers.{}.attn", index)] = MLAAttentionSpec(
            block_size=block_size, head_size=head, dtype=dtype, tokens_per_state=ratio
        )
        if index in with_keys:
            size = read.number("index_head_dim")
            keys = indexer_keys(size, block_size, tokens_per_state=ratio)
            latents[name("model.layers.{}.attn.indexer.k_cache", index)] = keys
        if ratio > 1:
            rings[name("model.layers.{}.attn.compressor.state_cache", index)] = CircularBufferSpec(
                block_size=max(_LEAST_ROWS, _power_of_two(num_speculative_tokens + 2)),
                head_size=2 * head,
                dtype="float32",
                compress_ratio=ratio,
            )
    groups = {"mla": latents, "sliding_window": windows, "ring": rings}
    return tuple(group_of(group, specs) for group, specs in groups.items() if specs)


def _sources(read: ModelConfig, field: str, kinds: list[str]) -> list[int]:
    """Return the layers that *field* lists. The first layer with a ratio must be one of them."""
    first = next((index for index, ratio in enumerate(kinds) if ratio != _RATIOS[0]), None)
    given = read.get(field)
    listed: object = [] if given is None and first is None else given
    expected = f"indices of layers with a ratio, with {first} as the first"
    if not isinstance(listed, list) or not all(
        isinstance(index, int) and 0 <= index < len(kinds) and kinds[index] != _RATIOS[0]
        for index in listed
    ):
        raise SpecError(field, given, expected)
    if min(listed, default=None) != first:
        raise SpecError(field, given, expected)
    return sorted(set(listed))
