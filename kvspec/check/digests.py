"""Compare the contents of a request on two engines by one sum for each side.

Invariant: equal contents have equal digests. The parallelism, layouts, page formats, block sizes
and orders of keys of the two engines do not affect a digest. A digest is a sum over logical
coordinates. So the digests of ranks that hold different tokens add up. A difference can be narrowed
to layer, part, unit and token.

How it works:
    A content is the bytes of one row of one unit, in the common order of
    `kvspec.specs.key_content`, padded with zeros to 8-byte words:

        content sum      = sum over the words of the content of weight * fold(weight * word)
        digest           = sum over rows of mix(content sum ^ name of the row)
        name of a row    = mix(row ^ hash of layer, part and unit)

    All numbers are modulo 2**64. Each position of a word in the content has an odd *weight* of its
    own, and fold(x) = x ^ (x >> 47).
    *row* is the first token of the row, or the number of a state's row.

    The fold between two multiplications matters. Without it, a change of bit 63 adds 2**63 in any
    word, so an even number of flipped signs cancels. With it, the same change adds
    weight * (2**63 +- 2**16). The sign depends on the content, and the weight on the position.

    Every step is a bijection of the word, so a single changed word always changes the digest.
    More changes cancel only by chance. The digest finds accidents, not forgers: an attacker who
    chooses the bytes can make two digests equal.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.check.places import token_places
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError
from kvspec.inputs import instance, mapping, sequence
from kvspec.memory.rank_cache import RankCache
from kvspec.memory.region import Region
from kvspec.ownership.part import Part
from kvspec.ownership.slices import TPTransferSlice
from kvspec.ownership.tokens import Ints
from kvspec.plan.edges import Edge
from kvspec.plan.plan import TransferPlan
from kvspec.specs.key_content import Segment

__all__ = [
    "differing",
    "digest",
    "wanted",
]

Words = npt.NDArray[np.uint64]
# Sums by layer, part, unit of the model, and the context rank that stores the tokens.
Sums = Mapping[tuple[str, str, int, int], int]
# Bytes that are summed at once. The temporary arrays stay in the cache of a core, which makes the
# sum three times as fast.
MANY_BYTES = 1 << 17
# Multipliers and shift of the finalizer of MurmurHash3.
_MULTIPLIERS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
# Moves the highest bit of a product to bit 16. The second multiplication spreads it upwards.
_FOLD = np.uint64(47)


@attrs.frozen
class Wanted:
    """The rows of one part of one layer that a digest covers.

    Attributes:
        tokens: Token positions.
        rows: Number of rows of a state, from its first row on. 0 if the rows are tokens.

    >>> Wanted(range(0, 100))
    Wanted(tokens=range(0, 100), rows=0)
    """

    tokens: range
    rows: int = 0


def wanted(plan: TransferPlan, request: TransferRequest) -> dict[tuple[str, str], Wanted]:
    """Return the rows that *request* moves, by layer and part. Both sides digest these rows.

    Args:
        plan: The transfer plan of the two engines.
        request: The request.

    Returns:
        The rows of each layer and part that moves.
    """
    instance("plan", plan, TransferPlan)
    instance("request", request, TransferRequest)
    return {
        (layer, part.name): want
        for edge in plan.edges
        for slice_ in edge.slices
        for layer, part, want in wanted_of(plan, request, edge, slice_)
    }


def wanted_of(
    plan: TransferPlan, request: TransferRequest, edge: Edge, one: TPTransferSlice
) -> Iterator[tuple[str, Part, Wanted]]:
    """Yield the layers, parts and rows that *request* moves by the slice *one* of *edge*."""
    specs, held = plan.pair_of(edge).specs, plan.producer.group(edge.producer_group).spec
    for layer in one.layers:
        tokens = request.wanted(edge.group, specs[layer])
        states = {part.name: part.states for part in held.of_layer(layer).parts}
        for part in specs[layer].parts if tokens else ():
            if part.name in one.parts:
                rows = 0 if part.per_token else min(part.states, states[part.name])
                yield layer, part, Wanted(tokens, rows)


def digest(
    cache: RankCache,
    tables: Mapping[str, BlockTable],
    asked: Mapping[tuple[str, str], Wanted],
) -> dict[tuple[str, str, int, int], int]:
    """Return the digest of the rows of a request that one rank holds.

    The function reads host memory at the addresses of the *cache*. The caller must keep that
    memory allocated.

    Args:
        cache: The rank's cache.
        tables: The request's block table of each of the engine's groups.
        asked: The rows, as `wanted` returned them.

    Returns:
        One sum for each layer, part, unit of the model and context rank.

    Raises:
        SpecError: If a region is not in host memory, or a table lacks a block.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig, RankId
    >>> from kvspec import allocate
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> cache, storage = allocate(engine, RankId(), num_blocks=4)
    >>> storage["full"][:16], storage["full"][48:] = 7, 7  # block 0 and block 3 become equal
    >>> asked = {("l", "latent"): Wanted(range(0, 2))}
    >>> sums = [digest(cache, {"full": BlockTable([block])}, asked) for block in (0, 3, 1)]
    >>> differing([sums[0]], [sums[1]]), differing([sums[0]], [sums[2]])
    ([], [('l', 'latent', 0)])
    """
    engine, rank = instance("cache", cache, RankCache).engine, cache.rank
    sums: dict[tuple[str, str, int, int], int] = {}
    for region in cache.regions:
        want = mapping("asked", asked, "(layer, part) to Wanted").get((region.layer, region.part))
        if want is None:
            continue
        part, units = readable(cache, region)
        placed = rows_of(cache, region, part, tables, want)
        context = engine.context(engine.group(region.group), rank).rank if part.per_token else 0
        for own, unit in enumerate(units):
            total = sum(partial_sums(region, own, unit, *placed)) % 2**64
            sums[region.layer, region.part, unit, context] = total
    return sums


def readable(cache: RankCache, region: Region) -> tuple[Part, range]:
    """Return the part and the model's units of a *region*. It must be in host memory."""
    if region.memory_type != "DRAM":
        raise SpecError("memory_type", region.memory_type, "DRAM: copy the blocks to it first")
    return cache.part_of(region)


def rows_of(
    cache: RankCache,
    region: Region,
    part: Part,
    tables: Mapping[str, BlockTable],
    want: Wanted,
) -> tuple[Ints, Ints, Ints]:
    """Return kernel block, row in the block and number of each wanted row of *region*."""
    group = cache.engine.group(region.group)
    table = _table(tables, group.name)
    if part.per_token:
        placed = _token_rows(cache, group, part, table, want)
    else:
        placed = _state_rows(group, part, table, want)
    if len(placed[0]) and not 0 <= placed[0].min() <= placed[0].max() < region.num_blocks:
        num_blocks = region.num_blocks // group.kernel_blocks_per_block
        expected = f"ids of a pool of {num_blocks} blocks"
        raise SpecError(f"tables[{group.name!r}]", table.block_ids.tolist(), expected)
    return placed


def differing(producers: Iterable[Sums], consumers: Iterable[Sums]) -> list[tuple[str, str, int]]:
    """Return the layers, parts and units whose content differs between the two engines.

    Args:
        producers: The digests of all producer ranks. If both engines shard their tokens in the same
            way, the ranks of one context rank can be compared alone.
        consumers: The digests of all consumer ranks, or of the same context rank.

    Returns:
        (layer, part, unit) of each difference, sorted. If the replicas of one engine differ from
        each other, their units are included.

    Raises:
        SpecError: If a value is not a digest.

    >>> differing([{("l", "k", 0, 0): 5, ("l", "k", 1, 0): 6}], [{("l", "k", 0, 0): 5}])
    [('l', 'k', 1)]
    """
    sent, received = _totals("producers", producers), _totals("consumers", consumers)
    keys = sent.keys() | received.keys()
    return sorted(key for key in keys if sent.get(key) is None or sent[key] != received.get(key))


def _totals(field: str, digests: Iterable[Sums]) -> dict[tuple[str, str, int], int | None]:
    """Return the sums over all context ranks, or None if replicas of one context rank differ."""
    contexts: dict[tuple[str, str, int], dict[int, set[int]]] = {}
    expected = "the digests that `digest` returned for each rank"
    for sums in sequence(field, digests, expected):
        for key, total in mapping(field, sums, expected).items():
            if not isinstance(key, tuple) or len(key) != 4:  # noqa: PLR2004 - the key of `Sums`
                raise SpecError(field, key, expected)
            *place, context = key
            contexts.setdefault(tuple(place), {}).setdefault(context, set()).add(total)
    # No combination of replicas is tried: their number is exponential in the contexts.
    return {
        place: sum(map(sum, sums.values())) % 2**64
        if all(len(totals) == 1 for totals in sums.values())
        else None
        for place, sums in contexts.items()
    }


def _table(tables: Mapping[str, BlockTable], group: str) -> BlockTable:
    table = mapping("tables", tables, "group names to block tables").get(group)
    if not isinstance(table, BlockTable):
        raise SpecError("tables", sorted(tables, key=repr), f"a block table for group {group!r}")
    return table


def _token_rows(
    cache: RankCache, group: KVCacheGroup, part: Part, table: BlockTable, want: Wanted
) -> tuple[Ints, Ints, Ints]:
    """Return kernel block, row in the block and first token of each wanted row of the rank."""
    row_tokens, context = part.tokens_per_state, cache.engine.context(group, cache.rank)
    first = want.tokens.start // row_tokens * row_tokens
    held = table.tokens(cache.engine.virtual_block(group))
    if want.tokens and not held.start <= first < want.tokens.stop <= held.stop:
        tokens = f"{want.tokens.start}..{want.tokens.stop - 1}"
        raise SpecError(f"tables[{group.name!r}]", held, f"blocks for tokens {tokens}")
    positions = np.arange(first, want.tokens.stop, row_tokens, dtype=np.int64)
    positions = positions[context.owns(positions)]
    index, kernel_block, token = token_places(group, context, table, positions)
    block = table.block_ids[index] * group.kernel_blocks_per_block + kernel_block
    return block, token // row_tokens, positions


def _state_rows(
    group: KVCacheGroup, part: Part, table: BlockTable, want: Wanted
) -> tuple[Ints, Ints, Ints]:
    """Return block, row and number of the first rows of a state. The number is the row."""
    field = f"tables[{group.name!r}]"
    slot = table.state_block(field, group.spec.block_size, want.tokens.start)
    row = np.arange(min(part.states, want.rows))
    return np.full(len(row), table.block_ids[slot]), row, row


def partial_sums(
    region: Region, own: int, unit: int, block: Ints, row: Ints, number: Ints
) -> Iterator[int]:
    """Yield the sums of parts of the rows of one unit. They add up to the digest of the unit.

    Each sum reads about `MANY_BYTES`, so a caller can do other work between them.

    Args:
        region: The region.
        own: Number of the unit among the rank's own units.
        unit: Number of the unit in the model.
        block: Kernel block of each row.
        row: Number of each row in its block.
        number: First token of each row, or the number of a state's row.
    """
    many = max(1, MANY_BYTES // region.content_bytes)
    chunks = [_chunk(region, chunk) for chunk in range(region.chunks)]
    key = _key(region.layer, region.part, unit)
    for at in range(0, len(block), many):
        here = slice(at, at + many)
        stored = [chunk[block[here], own, row[here]] for chunk in chunks]
        content = _content_sum(_in_common_order(stored, region.segments))
        name = _mix(number[here].astype(np.uint64) ^ key)
        yield int(_mix(content ^ name).sum(dtype=np.uint64))


def _in_common_order(
    chunks: list[npt.NDArray[np.uint8]], segments: tuple[Segment, ...]
) -> npt.NDArray[np.uint8]:
    """Return contents in the common order, of shape (contents, bytes).

    Each of *chunks* is an array of shape (contents, bytes of the chunk), as it is stored.
    """
    content = chunks[0] if len(chunks) == 1 else np.concatenate(chunks, axis=1)
    return content.take(_stored_bytes(segments), axis=1) if segments else content


@lru_cache(maxsize=64)
def _stored_bytes(segments: tuple[Segment, ...]) -> Ints:
    """Return where a row stores each byte of its content.

    >>> _stored_bytes(((0, 2, 2, 4), (2, 2, 2, 4))).tolist()
    [0, 1, 4, 5, 2, 3, 6, 7]
    """
    return np.concatenate(
        [
            (start + np.arange(count)[:, None] * stride + np.arange(size)).ravel()
            for start, size, count, stride in segments
        ]
    )


def _content_sum(content: npt.NDArray[np.uint8]) -> Words:
    """Return the content sum of each content. The module docstring has the formula."""
    if short := -content.shape[1] % 8:
        content = np.pad(content, ((0, 0), (0, short)))
    words = content.view("<u8")
    weights = _mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    products = words * weights
    folded = products >> _FOLD
    folded ^= products
    # `einsum` multiplies and adds in one pass. `sum` of the products needs 1.5 times as long.
    return np.asarray(np.einsum("ij,j->i", folded, weights), np.uint64)


def _chunk(region: Region, chunk: int) -> npt.NDArray[np.uint8]:
    """Return a view of one chunk of all contents, of shape (blocks, units, states, bytes)."""
    extent, size = region.extent, region.chunk_bytes
    memory = (ctypes.c_uint8 * len(extent)).from_address(extent.start)
    return np.lib.stride_tricks.as_strided(
        np.ctypeslib.as_array(memory)[chunk * region.chunk_stride :],
        (region.num_blocks, region.units, region.states, size),
        (region.block_stride, region.unit_stride, region.state_stride, 1),
        writeable=False,
    )


def _key(layer: str, part: str, unit: int) -> np.uint64:
    name = f"{layer}\0{part}\0{unit}".encode()
    return np.uint64(int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little"))


def _mix(word: Words) -> Words:
    """Return every word mixed: one changed input bit changes about half of the output bits."""
    for multiplier in _MULTIPLIERS:
        word = (word ^ (word >> _SHIFT)) * multiplier
    return word ^ (word >> _SHIFT)
