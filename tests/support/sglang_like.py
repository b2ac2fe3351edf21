"""Token pools with SGLang's names and attributes, over numpy buffers shaped as SGLang's.

A pool has a slot for each token, and one extra page at the front for dummy outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

NUMPY = {
    "bfloat16": np.uint16,
    "float32": np.float32,
    "uint8": np.uint8,
    "float8_e4m3fn": np.uint8,
    "float8_e5m2": np.uint8,
}


class KVCache:
    """The base class: the attributes of all pools."""

    def __init__(
        self, size: int, page_size: int, dtype: str, layer_num: int, start_layer: int = 0
    ) -> None:
        self.size, self.page_size, self.dtype = size, page_size, dtype
        self.layer_num, self.start_layer = layer_num, start_layer

    def buffers(self, *shape: int) -> list[Any]:
        """Return a buffer of shape (slots, *shape) for each layer."""
        slots = self.size + self.page_size
        return [np.zeros((slots, *shape), NUMPY[self.dtype]) for _ in range(self.layer_num)]


class MHATokenToKVPool(KVCache):
    """Keys and values of a rank's heads."""

    def __init__(
        self,
        size: int,
        head_num: int,
        head_dim: int = 4,
        value_dim: int | None = None,
        **more: Any,
    ) -> None:
        super().__init__(size, **{"page_size": 1, "dtype": "bfloat16", "layer_num": 2, **more})
        self.kv_cache_layout = "nhd"
        self.k_buffer = self.buffers(head_num, head_dim)
        self.v_buffer = self.buffers(head_num, value_dim or head_dim)


# The classes of SGLang's `quant_method`, by the names of its recipes.
RECIPES = {"fp4_mx_block16": "FP4MXBlock16KVCacheMethod", "nvfp4": "NVFP4KVCacheMethod"}


def recipe(cls: str) -> Any:
    """Return SGLang's `quant_method` of the class *cls*."""
    return type(cls, (), {})()


def with_scales(cls: str, heads: int, page: int, *, size: int = 64, flat: bool = False) -> Any:
    """Return a pool of class *cls* with scales: FP4 of *size* elements, or MXFP8.

    Args:
        cls: The name of the class, or of the recipe of a `MHATokenToKVPool`.
        heads: Heads of a rank.
        page: Tokens of a page. 128 gives MXFP8 the order of one kernel.
        size: Elements of a head.
        flat: Whether the scales of all heads of a token have one axis.
    """
    latent, wide = "MLA" in cls, "MXFP8" in cls
    own = cls if cls.endswith(("FP4", "MXFP8")) else "MHATokenToKVPool"
    pool = type(own, (), {})()
    pool.page_size, pool.start_layer = page, 0
    pool.dtype, width = ("float8_e4m3fn", size) if wide else ("float4_e2m1fn_x2", size // 2)
    slots, count = 10 * page, size // (32 if wide else 16)
    shape: tuple[int, ...] = (slots, heads * count) if flat else (slots, heads, count)
    if wide:
        pool.mxfp8_sf_interleaved = page == 128
        if pool.mxfp8_sf_interleaved:
            shape = (10, heads, 32, 4, count)
    for name, own_shape in (("buffer", (slots, heads, width)), ("scale_buffer", shape)):
        for part in ["kv"] if latent else ["k", "v"]:
            setattr(pool, f"{part}_{name}", [np.zeros(own_shape, np.uint8) for _ in range(2)])
    if own == "MHATokenToKVPool":
        pool.quant_method = recipe(RECIPES[cls])
    return pool


class MLATokenToKVPool(KVCache):
    """A single latent for each token."""

    def __init__(self, size: int, kv_cache_dim: int = 12, **more: Any) -> None:
        super().__init__(size, **{"page_size": 1, "dtype": "bfloat16", "layer_num": 2, **more})
        self.kv_buffer = self.buffers(1, kv_cache_dim)


class SWAKVPool:
    """Two pools: one for layers that keep every token, and one for layers with a window."""

    def __init__(
        self, full: MHATokenToKVPool, swa: MHATokenToKVPool, windowed: Sequence[bool]
    ) -> None:
        self.full_kv_pool, self.swa_kv_pool = full, swa
        self.layers_mapping: dict[int, tuple[int, bool]] = {}
        for layer, of_window in enumerate(windowed):
            place = sum(each is of_window for each in windowed[:layer])
            self.layers_mapping[layer] = (place, of_window)


class DSATokenToKVPool(MLATokenToKVPool):
    """A latent, and pages of an indexer: all keys, then their scales.

    A layer that is *skipped* takes the tokens that another layer has chosen.
    """

    def __init__(self, size: int, skipped: Sequence[bool] = (False, False), **more: Any) -> None:
        super().__init__(size, **more)
        self.index_kpool, self.index_page_size = 1, self.page_size
        self.skip_topk_layers = list(skipped)
        shape = (size // self.page_size + 1, self.page_size * (128 + 4))
        self.index_k_with_scale_buffer = [
            np.zeros((0 if skip else shape[0], shape[1]), np.uint8) for skip in skipped
        ]


class State:
    """The tensors of a `MambaPool`."""

    def __init__(self, conv: list[Any], temporal: Any) -> None:
        self.conv, self.temporal = conv, temporal


class MambaPool:
    """Recurrent states of all layers. No request owns slot 0.

    *conv* and *temporal* are the shapes of one slot.
    """

    _slot_siblings = ()

    def __init__(
        self,
        size: int,
        layers: Sequence[int],
        conv: tuple[int, ...],
        temporal: tuple[int, ...],
        *,
        groups: list[int] | None = None,
        rows_first: bool = False,
        dtypes: tuple[str, str] = ("float16", "float32"),
        device: str = "cuda",
    ) -> None:
        first, second = (
            np.zeros((len(layers), size + 1, *shape), dtype)
            for shape, dtype in zip((conv, temporal), dtypes, strict=True)
        )
        self.mamba_cache = State([first], second)
        self.mamba_layer_ids = list(layers)
        self.conv_shard_groups, self.conv_slice_axis = groups, int(rows_first)
        self.device = device


class HybridLinearKVPool:
    """A pool for the layers that attend, and the states of the others."""

    def __init__(self, full: Any, layers: Sequence[int], states: MambaPool) -> None:
        self.page_size, self.dtype, self.start_layer = full.page_size, full.dtype, 0
        self.full_kv_pool, self.mamba_pool = full, states
        self.full_attention_layer_id_mapping = {layer: at for at, layer in enumerate(layers)}


class MHATokenToKOnlyPool(KVCache):
    """A key for each token."""

    def __init__(self, size: int, head_dim: int, **more: Any) -> None:
        super().__init__(size, **{"page_size": 1, "dtype": "bfloat16", "layer_num": 1, **more})
        self.k_buffer = self.buffers(1, head_dim)


class MiniMaxSparseKVPool:
    """Keys and values of all layers, and an index key of the sparse ones."""

    def __init__(self, main: MHATokenToKVPool, keys: MHATokenToKOnlyPool, layers: Any) -> None:
        self.page_size, self.dtype, self.start_layer = main.page_size, main.dtype, 0
        self.main_pool, self.index_k_pool = main, keys
        self.dense_pool = self.index_kv_pool = None
        self.index_k_layer_id_mapping = {layer: at for at, layer in enumerate(layers)}


def pages_to_slots(pages: Sequence[int], page: int, count: int) -> Any:
    """Return the slots of *count* tokens on *pages*, as a row of `req_to_token` has them."""
    slots = (np.asarray(pages)[:, None] * page + np.arange(page)).ravel()[:count]
    return slots.astype(np.int32)
