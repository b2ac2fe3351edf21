"""Memory as other engines make it, read by the calls of docs/adapters.md and moved both ways.

Arrays have the shapes that TensorRT-LLM, LMCache, SGLang's host pools and transformers allocate.
Where a byte lies is said here through each engine's own indexing, never by a region.
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
from refused import words

import kvspec
from kvspec import RankId

PAGE = (Path(__file__).parents[2] / "docs" / "adapters.md").read_text(encoding="utf-8")
CALLS = {
    name: (call, layout)
    for name, call, layout in re.findall(
        r"^\| ([^|]+) \| [^|]+ \| `([^`|]+)` \| ([A-Z]+) \|$", PAGE, re.MULTILINE
    )
}
"""What the table says: by its first column, the arguments of the call, and the layout."""

LAYERS = ("model.layers.0", "model.layers.1", "model.layers.2")
COUNT, HEADS, SIZE, BLOCKS, ROWS = len(LAYERS), 4, 8, 8, 16
BYTES = 2 * SIZE
TOKENS = 70
ELEMENT = np.uint16
"""Two bytes, as bfloat16 has."""
GQA = gqa(HEADS, block_size=ROWS, head_size=SIZE)
LATENT = mla(block_size=ROWS, head_size=SIZE)

Arrays = dict[str, list[Any]]
"""An engine's arrays by the name that the table calls them."""
View = Callable[[Arrays, int, int, int], Any]
"""Returns [blocks, heads, rows, bytes] of a layer's keys (0) or values (1), on so many heads."""


@attrs.frozen
class Memory:
    """How one engine keeps its cache: shapes by name, given heads, and where a part lies."""

    shapes: Callable[[int], dict[str, list[tuple[int, ...]]]]
    view: View
    spec: Any = GQA
    blocks: int = BLOCKS


def one(name: str, *shape: int, scaled: int = -1) -> Callable[[int], dict[str, Any]]:
    """Return the shapes of one array, one axis of which counts the rank's heads."""

    def shapes(heads: int) -> dict[str, list[tuple[int, ...]]]:
        own = list(shape)
        if "MLA" not in name:
            own[scaled] *= heads
        return {name.removesuffix("MLA"): [tuple(own)]}

    return shapes


def rows(heads: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the shapes of keys and values by layer, two rows of a batch."""
    return {x: [(2, heads, BLOCKS * ROWS, SIZE)] * COUNT for x in ("keys", "values")}


def slabs(heads: int) -> dict[str, list[tuple[int, ...]]]:
    """Return the same where each row of the batch is a block."""
    return {x: [(BLOCKS, heads, ROWS, SIZE)] * COUNT for x in ("keys", "values")}


def order(array: Any, axes: str, **sizes: int) -> Any:
    """Return *array*, of *axes* in this order, as bytes [B, H, N, C]; others have been indexed."""
    full = {"B": -1, "H": 1, "N": 1, "C": BYTES} | sizes
    shaped = array.view(np.uint8).reshape([full[x] for x in axes])
    assert np.shares_memory(shaped, array)
    return shaped.transpose([axes.index(x) for x in "BHNC"])


def halves(array: Any, heads: int, part: int, *, by_head: bool) -> Any:
    """Return keys or values of a packed chunk's layer [tokens, heads * 2 * size]."""
    row = array.view(np.uint8)
    if by_head:
        own = row.reshape(-1, ROWS, heads, 2 * BYTES)[..., part * BYTES : (part + 1) * BYTES]
    else:
        own = row.reshape(-1, ROWS, 2, heads, BYTES)[:, :, part]
    return own.transpose(0, 2, 1, 3)


WIDTH = ROWS * SIZE
MEMORIES = {
    "TensorRT-LLM, kernels' order HND": Memory(
        one("pool", BLOCKS, COUNT, 2, WIDTH),
        lambda a, i, p, h: order(a["pool"][0][:, i, p], "BHNC", H=h, N=ROWS),
    ),
    "TensorRT-LLM, NHD": Memory(
        one("pool", BLOCKS, COUNT, 2, WIDTH),
        lambda a, i, p, h: order(a["pool"][0][:, i, p], "BNHC", H=h, N=ROWS),
    ),
    "TensorRT-LLM, one latent": Memory(
        one("poolMLA", BLOCKS, COUNT, 1, WIDTH),
        lambda a, i, p, _: order(a["pool"][0][:, i, p], "BNHC", N=ROWS),
        LATENT,
    ),
    "LMCache, chunks of a paged pool": Memory(
        one("pool", BLOCKS, 2, COUNT, ROWS, SIZE),
        lambda a, i, p, h: order(a["pool"][0][:, p, i], "BNHC", H=h, N=ROWS),
    ),
    "LMCache, one chunk": Memory(
        one("chunk", 2, COUNT, BLOCKS * ROWS, SIZE),
        lambda a, i, p, h: order(a["chunk"][0][p, i], "BNHC", H=h, N=ROWS),
    ),
    "LMCache, packed: each head's keys, then its values": Memory(
        one("chunk", 1, COUNT, BLOCKS * ROWS, 2 * SIZE),
        lambda a, i, p, h: halves(a["chunk"][0][0, i], h, p, by_head=True),
    ),
    "LMCache, packed: all heads' keys, then their values": Memory(
        one("chunk", 1, COUNT, BLOCKS * ROWS, 2 * SIZE),
        lambda a, i, p, h: halves(a["chunk"][0][0, i], h, p, by_head=False),
    ),
    "LMCache, one latent": Memory(
        one("chunkMLA", 1, COUNT, BLOCKS * ROWS, SIZE),
        lambda a, i, _p, _h: order(a["chunk"][0][0, i], "BNHC", N=ROWS),
        LATENT,
    ),
    "SGLang HiCache, Mooncake: page_first_direct": Memory(
        one("kv", 2, BLOCKS, COUNT, ROWS, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][p, :, i], "BNHC", H=h, N=ROWS),
    ),
    "page_first": Memory(
        one("kv", 2, BLOCKS * ROWS, COUNT, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][p, :, i], "BNHC", H=h, N=ROWS),
    ),
    "page_head": Memory(
        one("kv", 2, BLOCKS, 1, ROWS, COUNT, SIZE, scaled=2),
        lambda a, i, p, h: order(a["kv"][0][p, ..., i, :], "BHNC", H=h, N=ROWS),
    ),
    "layer_first": Memory(
        one("kv", 2, COUNT, BLOCKS * ROWS, 1, SIZE, scaled=-2),
        lambda a, i, p, h: order(a["kv"][0][p, i], "BNHC", H=h, N=ROWS),
    ),
    "page first, keys inside the page": Memory(
        one("kv", BLOCKS, COUNT, 2, ROWS, 1, SIZE, scaled=-2),
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


def made(memory: Memory, heads: int) -> Arrays:
    """Return the arrays of one rank."""
    return {
        name: [np.zeros(shape, ELEMENT) for shape in shapes]
        for name, shapes in memory.shapes(heads).items()
    }


def given(call: str, arrays: Arrays) -> tuple[dict[str, Any], str]:
    """Return (tensors, axes) that *call*, of the table, makes of an engine's arrays."""
    several = "keys" in arrays
    names = {name: own if several else own[0] for name, own in arrays.items()}
    pair = eval(call, {"layers": list(enumerate(LAYERS)), "b": 1, **names})  # noqa: S307 - our page
    assert 2 == len(pair)
    return pair


def views_of(memory: Memory, arrays: Arrays, heads: int) -> Any:
    """Return what shows each part in these arrays' memory, or in a copy of it."""

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
    """One engine, its caches, and what shows the parts in them."""

    engine: kvspec.EngineSpec
    caches: dict[RankId, kvspec.RankCache]
    views: dict[RankId, Any]
    kept: list[Arrays]


def side(name: str, tp: int) -> Side:
    """Return *tp* ranks of the engine that keeps its cache as the row *name* of the table says."""
    memory, (call, layout) = MEMORIES[name], CALLS[name]
    described = engine(memory.spec, layers=LAYERS, layout=layout, tp=tp)
    found = Side(described, {}, {}, [])
    for rank in described.parallel.ranks:
        heads = HEADS // tp
        arrays = made(memory, heads)
        cache = kvspec.RankCache.from_tensors(described, rank, *given(call, arrays))
        found.kept.append(arrays)
        found.caches[rank] = cache
        found.views[rank] = views_of(memory, arrays, heads)
        assert sum(a.nbytes for own in arrays.values() for a in own) == sum(
            each.length for each in cache.memory
        )
    return found


def paged(spec: Any, tp: int) -> Side:
    """Return an engine that keeps its cache as vLLM does: a tensor [B, H, N, C] a layer."""
    spec = attrs.evolve(spec, block_size=8)
    described = engine(spec, layers=LAYERS, layout="LBHNC", tp=tp)
    found = Side(described, {}, {}, [])
    parts, content = spec.parts, sum(part.content_bytes for part in spec.parts)
    for rank in described.parallel.ranks:
        heads = HEADS // tp if len(parts) > 1 else 1
        arrays = {layer: [np.zeros((12, heads, 8, content), np.uint8)] for layer in LAYERS}
        tensors = {layer: own[0] for layer, own in arrays.items()}
        found.caches[rank] = kvspec.RankCache.from_tensors(described, rank, tensors, "BHNC")
        found.kept.append(arrays)

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

        found.views[rank] = views
    return found


def faults(producer: Side, consumer: Side) -> list[str]:
    """Move 70 tokens, 5 of them cached; return every fault."""
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=TOKENS,
        cached_tokens=5,
        producer_blocks=blocks_for(producer.engine, TOKENS),
        consumer_blocks=blocks_for(consumer.engine, TOKENS, 50),
    )
    caches, views = (producer.caches, consumer.caches), (producer.views, consumer.views)
    return moved(producer.engine, consumer.engine, request, caches, views)


def test_the_table_is_of_these_memories() -> None:
    """Each row of docs/adapters.md is moved below."""
    assert list(MEMORIES) == list(CALLS)


@pytest.mark.parametrize("name", MEMORIES)
@pytest.mark.parametrize(("tp", "other"), [(1, 1), (2, 1), (1, 4)])
def test_every_byte_arrives_both_ways(name: str, tp: int, other: int) -> None:
    """To pages of 8 tokens as vLLM keeps them and back, at equal and unequal TP."""
    memory = paged(MEMORIES[name].spec, other)
    assert [] == faults(side(name, tp), memory)
    assert [] == faults(memory, side(name, tp))


UNSAID = [
    ("TensorRT-LLM, NHD", "'BK(NHC)' or 'BK(HNC)'"),
    ("TensorRT-LLM, kernels' order HND", "'BK(HNC)' or 'BK(NHC)'"),
    ("LMCache, packed: each head's keys, then its values", "'(BN)(HC)' or '(BN)(KHC)'"),
    ("LMCache, packed: all heads' keys, then their values", "'(BN)(KHC)' or '(BN)(HC)'"),
    ("LMCache, chunks of a paged pool", "'BKN(HC)'"),
    ("page_first", "'K(BN)HC'"),
]


@pytest.mark.parametrize(("name", "readings"), UNSAID)
def test_what_has_two_readings_is_refused_unless_it_is_said(name: str, readings: str) -> None:
    """The refusal names every reading that fits; of the packed chunk both, as in LMCache#4463."""
    call, layout = CALLS[name]
    arrays = made(MEMORIES[name], HEADS)
    tensors, axes = given(call, arrays)
    described = engine(MEMORIES[name].spec, layers=LAYERS, layout=layout)
    shape = tensors[LAYERS[0]].shape
    assert repr(axes) in readings
    fits = "both fit" if " or " in readings else "it fits"
    field = f"tensors['{LAYERS[0]}']['kv'].shape"
    assert f"axes=None: pass {readings}, because {fits} {field}={shape}" == words(
        lambda: kvspec.RankCache.from_tensors(described, RankId(), tensors)
    )


def test_two_readings_of_one_chunk_are_other_bytes() -> None:
    """What one reading calls values of head 0 are keys of head 1 in the other."""
    by_head, by_kind = list(MEMORIES)[5:7]
    array = np.zeros((1, COUNT, BLOCKS * ROWS, HEADS * 2 * SIZE), ELEMENT)
    found = {}
    for name in (by_head, by_kind):
        call, layout = CALLS[name]
        described = engine(GQA, layers=LAYERS, layout=layout)
        tensors = given(call, {"chunk": [array]})
        found[name] = kvspec.RankCache.from_tensors(described, RankId(), *tensors)
    places = [found[by_head].region(LAYERS[0], "v").address(0, 0, 0),
              found[by_kind].region(LAYERS[0], "k").address(0, 1, 0)]  # fmt: skip
    assert [array.ctypes.data + BYTES] * 2 == places


def test_a_growing_cache_has_blocks_of_one_token() -> None:
    """A dynamic cache of 71 tokens, of torch: no longer block divides them."""
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
