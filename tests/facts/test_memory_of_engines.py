"""Tests that the calls in docs/adapters.md read the memory of other engines.

The arrays have the shapes that TensorRT-LLM, LMCache, SGLang's host pools and transformers
allocate. The tests locate bytes with the indexing of each engine, never with a region.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
from builders import engine, gqa, mla
from moved import blocks_for, moved

import kvspec
from kvspec import RankId

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
# The rows of the table: its first column, the arguments of the call, and the layout.
CALLS = {
    name: (call, layout)
    for name, call, layout in re.findall(
        r"^\| ([^|]+) \| [^|]+ \| `([^`|]+)` \| ([A-Z]+) \|$", PAGE, re.MULTILINE
    )
}

LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")
COUNT, HEADS, SIZE, BLOCKS, ROWS = len(LAYERS), 4, 8, 8, 16
BYTES = 2 * SIZE
TOKENS = 70
ELEMENT = np.uint16  # numpy has no bfloat16.
GQA = gqa(HEADS, block_size=ROWS, head_size=SIZE)
LATENT = mla(block_size=ROWS, head_size=SIZE)

# The arrays of an engine, by their names in the table.
Arrays = dict[str, list[Any]]
# Takes the arrays, a layer, 0 for keys or 1 for values, and the heads of the rank. Returns a view
# [blocks, heads, rows, bytes].
View = Callable[[Arrays, int, int, int], Any]


@attrs.frozen
class Memory:
    """The cache of one engine: its shapes for a number of heads, and the view of a part."""

    shapes: Callable[[int], dict[str, list[tuple[int, ...]]]]
    view: View
    spec: Any = GQA
    blocks: int = BLOCKS


def one_array(name: str, *shape: int, scaled: int = -1) -> Callable[[int], dict[str, Any]]:
    """Return the shapes of one array. Its axis *scaled* is multiplied by the heads of the rank."""

    def shapes(heads: int) -> dict[str, list[tuple[int, ...]]]:
        own = list(shape)
        if "MLA" not in name:
            own[scaled] *= heads
        return {name.removesuffix("MLA"): [tuple(own)]}

    return shapes


def rows(heads: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the keys and values of each layer, for two rows of a batch."""
    return {x: [(2, heads, BLOCKS * ROWS, SIZE)] * COUNT for x in ("keys", "values")}


def slabs(heads: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of the keys and values if each row of the batch is a block."""
    return {x: [(BLOCKS, heads, ROWS, SIZE)] * COUNT for x in ("keys", "values")}


def order(array: Any, axes: str, **sizes: int) -> Any:
    """Return a view [B, H, N, C] of the bytes of *array*. *axes* is the order of its axes."""
    full = {"B": -1, "H": 1, "N": 1, "C": BYTES} | sizes
    shaped = array.view(np.uint8).reshape([full[x] for x in axes])
    assert np.shares_memory(shaped, array)
    return shaped.transpose([axes.index(x) for x in "BHNC"])


def halves(array: Any, heads: int, part: int, *, by_head: bool) -> Any:
    """Return the keys or values of a layer [tokens, heads * 2 * size] of a packed chunk."""
    row = array.view(np.uint8)
    if by_head:
        own = row.reshape(-1, ROWS, heads, 2 * BYTES)[..., part * BYTES : (part + 1) * BYTES]
    else:
        own = row.reshape(-1, ROWS, 2, heads, BYTES)[:, :, part]
    return own.transpose(0, 2, 1, 3)


WIDTH = ROWS * SIZE
MEMORIES = {
    "TensorRT-LLM, kernels' order HND": Memory(
        one_array("pool", BLOCKS, COUNT, 2, WIDTH),
        lambda a, i, p, h: order(a["pool"][0][:, i, p], "BHNC", H=h, N=ROWS),
    ),
    "TensorRT-LLM, NHD": Memory(
        one_array("pool", BLOCKS, COUNT, 2, WIDTH),
        lambda a, i, p, h: order(a["pool"][0][:, i, p], "BNHC", H=h, N=ROWS),
    ),
    "TensorRT-LLM, one latent": Memory(
        one_array("poolMLA", BLOCKS, COUNT, 1, WIDTH),
        lambda a, i, p, _: order(a["pool"][0][:, i, p], "BNHC", N=ROWS),
        LATENT,
    ),
    "LMCache, chunks of a paged pool": Memory(
        one_array("pool", BLOCKS, 2, COUNT, ROWS, SIZE),
        lambda a, i, p, h: order(a["pool"][0][:, p, i], "BNHC", H=h, N=ROWS),
    ),
    "LMCache, one chunk": Memory(
        one_array("chunk", 2, COUNT, BLOCKS * ROWS, SIZE),
        lambda a, i, p, h: order(a["chunk"][0][p, i], "BNHC", H=h, N=ROWS),
    ),
    "LMCache, packed: each head's keys, then its values": Memory(
        one_array("chunk", 1, COUNT, BLOCKS * ROWS, 2 * SIZE),
        lambda a, i, p, h: halves(a["chunk"][0][0, i], h, p, by_head=True),
    ),
    "LMCache, packed: all heads' keys, then their values": Memory(
        one_array("chunk", 1, COUNT, BLOCKS * ROWS, 2 * SIZE),
        lambda a, i, p, h: halves(a["chunk"][0][0, i], h, p, by_head=False),
    ),
    "LMCache, one latent": Memory(
        one_array("chunkMLA", 1, COUNT, BLOCKS * ROWS, SIZE),
        lambda a, i, _p, _h: order(a["chunk"][0][0, i], "BNHC", N=ROWS),
        LATENT,
    ),
    "SGLang HiCache, Mooncake: page_first_direct": Memory(
        one_array("kv", 2, BLOCKS, COUNT, ROWS, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][p, :, i], "BNHC", H=h, N=ROWS),
    ),
    "page_first": Memory(
        one_array("kv", 2, BLOCKS * ROWS, COUNT, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][p, :, i], "BNHC", H=h, N=ROWS),
    ),
    "page_head": Memory(
        one_array("kv", 2, BLOCKS, 1, ROWS, COUNT, SIZE, scaled=2),
        lambda a, i, p, h: order(a["kv"][0][p, ..., i, :], "BHNC", H=h, N=ROWS),
    ),
    "layer_first": Memory(
        one_array("kv", 2, COUNT, BLOCKS * ROWS, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][p, i], "BNHC", H=h, N=ROWS),
    ),
    "page first, keys inside the page": Memory(
        one_array("kv", BLOCKS, COUNT, 2, ROWS, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][:, i, p], "BNHC", H=h, N=ROWS),
    ),
    "Hugging Face, row `b` of a batch": Memory(
        rows,
        lambda a, i, p, h: order(a[("keys", "values")[p]][i][1], "HBNC", H=h, N=ROWS),
    ),
    "Hugging Face, a static cache, a block a row": Memory(
        slabs,
        lambda a, i, p, h: order(a[("keys", "values")[p]][i], "BHNC", H=h, N=ROWS),
    ),
}


def arrays_of(memory: Memory, heads: int) -> Arrays:
    """Create the arrays of one rank."""
    return {
        name: [np.zeros(shape, ELEMENT) for shape in shapes]
        for name, shapes in memory.shapes(heads).items()
    }


def evaluate(call: str, arrays: Arrays) -> tuple[dict[str, Any], str]:
    """Return the tensors and axes to which *call* of the table evaluates for these arrays."""
    several = "keys" in arrays
    names = {name: own if several else own[0] for name, own in arrays.items()}
    pair = eval(call, {"layers": list(enumerate(LAYERS)), "b": 1, **names})  # noqa: S307 - our page
    assert 2 == len(pair)
    return pair


def views_of(memory: Memory, arrays: Arrays, heads: int) -> Any:
    """Return a function that returns the view of each part in the memory or in a copy of it."""

    def views(storage: Mapping[str, Any]) -> dict[tuple[str, str, str], Any]:
        own = {
            name: [storage[hex(a.ctypes.data)].view(a.dtype).reshape(a.shape) for a in some]
            for name, some in arrays.items()
        }
        return {
            ("g", layer, part.name): memory.view(own, number, place, heads)
            for number, layer in enumerate(LAYERS)
            for place, part in enumerate(memory.spec.parts)
        }

    return views


@attrs.frozen
class Side:
    """One engine with its caches and the views of their parts."""

    engine: kvspec.EngineSpec
    caches: dict[RankId, kvspec.RankCache]
    views: dict[RankId, Any]
    kept: list[Arrays]


def side(name: str, tp: int) -> Side:
    """Return *tp* ranks of the engine in the row *name* of the table."""
    memory, (call, layout) = MEMORIES[name], CALLS[name]
    described = engine(memory.spec, layers=LAYERS, layout=layout, tp=tp)
    ranks = Side(described, {}, {}, [])
    for rank in described.parallel.ranks:
        heads = HEADS // tp
        arrays = arrays_of(memory, heads)
        cache = kvspec.RankCache.from_tensors(described, rank, *evaluate(call, arrays))
        ranks.kept.append(arrays)
        ranks.caches[rank] = cache
        ranks.views[rank] = views_of(memory, arrays, heads)
        assert sum(a.nbytes for own in arrays.values() for a in own) == sum(
            registered.length for registered in cache.memory
        )
    return ranks


def paged(spec: Any, tp: int) -> Side:
    """Return an engine with the memory of vLLM: a tensor [B, H, N, C] for each layer."""
    spec = attrs.evolve(spec, block_size=8)
    described = engine(spec, layers=LAYERS, layout="LBHNC", tp=tp)
    ranks = Side(described, {}, {}, [])
    parts, content = spec.parts, sum(part.content_bytes for part in spec.parts)
    for rank in described.parallel.ranks:
        heads = HEADS // tp if len(parts) > 1 else 1
        arrays = {layer: [np.zeros((12, heads, 8, content), np.uint8)] for layer in LAYERS}
        tensors = {layer: own[0] for layer, own in arrays.items()}
        ranks.caches[rank] = kvspec.RankCache.from_tensors(described, rank, tensors, "BHNC")
        ranks.kept.append(arrays)

        def views(storage: Mapping[str, Any], arrays: Arrays = arrays) -> dict[Any, Any]:
            own = {
                layer: storage[hex(a.ctypes.data)].reshape(a.shape)
                for layer, (a,) in arrays.items()
            }
            return {
                ("g", layer, part.name): own[layer][..., at * BYTES : (at + 1) * BYTES]
                for layer in LAYERS
                for at, part in enumerate(parts)
            }

        ranks.views[rank] = views
    return ranks


def faults(producer: Side, consumer: Side) -> list[str]:
    """Move 70 tokens, of which 5 are cached. Return every fault."""
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=TOKENS,
        cached_tokens=5,
        producer_blocks=blocks_for(producer.engine, TOKENS),
        consumer_blocks=blocks_for(consumer.engine, TOKENS, 50),
    )
    caches, views = (producer.caches, consumer.caches), (producer.views, consumer.views)
    return moved(producer.engine, consumer.engine, request, caches, views)


def test_table_and_tests_have_the_same_rows() -> None:
    """A test below moves each row of the table in docs/adapters.md."""
    assert list(MEMORIES) == list(CALLS)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize(("tp", "other"), [(1, 1), (2, 1), (1, 4)])
def test_memory_of_engine_moves_to_pages_and_back(name: str, tp: int, other: int) -> None:
    """The pages have 8 tokens and the memory of vLLM, at equal and unequal TP."""
    memory = paged(MEMORIES[name].spec, other)
    assert [] == faults(side(name, tp), memory)
    assert [] == faults(memory, side(name, tp))


def test_axes_of_packed_chunk_decide_which_bytes_are_values() -> None:
    """The values of head 0 in one order are the keys of head 1 in the other order."""
    by_head, by_kind = list(MEMORIES)[5:7]
    array = np.zeros((1, COUNT, BLOCKS * ROWS, HEADS * 2 * SIZE), ELEMENT)
    caches = {}
    for name in (by_head, by_kind):
        call, layout = CALLS[name]
        described = engine(GQA, layers=LAYERS, layout=layout)
        tensors = evaluate(call, {"chunk": [array]})
        caches[name] = kvspec.RankCache.from_tensors(described, RankId(), *tensors)
    value_of_head_0 = caches[by_head].region(LAYERS[0], "v").address(0, 0, 0)
    key_of_head_1 = caches[by_kind].region(LAYERS[0], "k").address(0, 1, 0)
    assert array.ctypes.data + BYTES == value_of_head_0 == key_of_head_1


def test_dynamic_cache_has_blocks_of_one_token() -> None:
    """A dynamic cache of torch has 71 tokens, which no longer block divides."""
    torch = pytest.importorskip("torch")
    spec = attrs.evolve(GQA, block_size=1)
    described = engine(spec, layers=LAYERS, layout="LHBNC")
    tensors = {
        layer: {x: torch.zeros(2, HEADS, 71, SIZE, dtype=torch.bfloat16)[1] for x in "kv"}
        for layer in LAYERS
    }
    cache = kvspec.RankCache.from_tensors(described, RankId(), tensors, "H(BN)C")
    assert {71} == {region.num_blocks for region in cache.regions}
    assert {BYTES} == {region.block_stride for region in cache.regions}
    assert {71 * BYTES} == {region.unit_stride for region in cache.regions}
