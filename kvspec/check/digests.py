"""Compare what two engines hold of a request, whatever their layouts, by one sum for each side.

Invariant: the digests of equal contents are equal, whatever the parallelism, layouts, page formats
and block sizes of the two engines. A digest is a sum over logical coordinates. So the digests of
ranks that hold different tokens add up, and a difference can be narrowed to layer, part, unit and
token.

How it works:
    A content is the bytes of one row of one unit, padded with zeros to 8-byte words:

        word of the content = sum over places of weight * fold(weight * word at the place)
        digest              = sum over rows of mix(word of the content ^ name of the row)
        name of a row       = mix(row ^ hash of layer, part and unit)

    All of it modulo 2**64. Each place has an odd *weight* of its own, and fold(x) = x ^ (x >> 47).
    *row* is the first token of the row, or the number of a state's row.

    The fold between two multiplications matters. Without it, a change of bit 63 adds 2**63 at any
    place, so an even number of flipped signs cancels. With it, the same change adds
    weight * (2**63 +- 2**16). The sign depends on the content, and the weight on the place.

    Every step is a bijection of the word, so a single changed word always changes the digest.
    More changes cancel only by chance. The digest finds accidents, not forgers: an attacker who
    chooses the bytes can make two digests equal.
"""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import attrs
import numpy as np
import numpy.typing as npt

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

__all__ = [
    "differing",
    "digest",
    "wanted",
]

Words = npt.NDArray[np.uint64]
Sums = Mapping[tuple[str, str, int, int], int]
"""By layer, part, unit of the model, and which context's tokens they are."""
MANY_BYTES = 1 << 17
"""Bytes read at once: what is made of them stays in the cache of a core, thrice as fast so."""
_MULTIPLIERS = np.uint64(0xFF51AFD7ED558CCD), np.uint64(0xC4CEB9FE1A85EC53)
_SHIFT = np.uint64(33)
_FOLD = np.uint64(47)
"""Moves the highest bit of a product to bit 16: the second multiplication spreads it upwards."""


@attrs.frozen
class Wanted:
    """What of one part of one layer is digested: token positions, or the first rows of a state."""

    tokens: range
    rows: int = 0


def wanted(plan: TransferPlan, request: TransferRequest) -> dict[tuple[str, str], Wanted]:
    """Return what *request* moves by *plan*, by layer and part: both sides digest that."""
    instance("plan", plan, TransferPlan)
    instance("request", request, TransferRequest)
    return {
        (layer, part.name): want
        for edge in plan.edges
        for one in edge.slices
        for layer, part, want in wanted_of(plan, request, edge, one)
    }


def wanted_of(
    plan: TransferPlan, request: TransferRequest, edge: Edge, one: TPTransferSlice
) -> Iterator[tuple[str, Part, Wanted]]:
    """Yield layer, part and what of it *request* moves by one slice of an *edge*, if anything."""
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
    """Return the digest of what this rank holds of what is *asked* for.

    A sum by layer, part, unit of the model and the context whose tokens they are. *tables*: the
    request's block table of each of this engine's groups. Reads host memory by the addresses of
    the *cache*, whose owner must be alive; other memory is a `SpecError`.
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
    """Return the part and the units of the model of a *region*; `SpecError` of other than DRAM."""
    if region.memory_type != "DRAM":
        raise SpecError("memory_type", region.memory_type, "DRAM: copy the blocks to it first")
    group = cache.engine.group(region.group)
    parts = group.spec.of_layer(region.layer).parts
    part = next(each for each in parts if each.name == region.part)
    return part, cache.engine.units(group, part, cache.rank)


def rows_of(
    cache: RankCache,
    region: Region,
    part: Part,
    tables: Mapping[str, BlockTable],
    want: Wanted,
) -> tuple[Ints, Ints, Ints]:
    """Return block in memory, row and number of the rows of *region* that are wanted."""
    group = cache.engine.group(region.group)
    table = _table(tables, group.name)
    if part.per_token:
        placed = _token_rows(cache, group, part, table, want)
    else:
        placed = _state_rows(group, part, table, want)
    if len(placed[0]) and not 0 <= placed[0].min() <= placed[0].max() < region.num_blocks:
        told = f"ids of a pool of {region.num_blocks // group.kernel_blocks_per_block} blocks"
        raise SpecError(f"tables[{group.name!r}]", table.block_ids.tolist(), told)
    return placed


def differing(producers: Iterable[Sums], consumers: Iterable[Sums]) -> list[tuple[str, str, int]]:
    """Return the layers, parts and units of which *consumers* hold other content than *producers*.

    The digests of every rank of an engine, or, where both share their tokens alike, of the ranks of
    one context. Replicas that differ among each other differ from everybody.
    """
    one, other = _totals("producers", producers), _totals("consumers", consumers)
    homes = one.keys() | other.keys()
    return sorted(key for key in homes if one.get(key) is None or one[key] != other.get(key))


def first_difference(equal: Callable[[range], bool], tokens: range) -> int | None:
    """Return the first of *tokens* whose content differs, or None if none does.

    *equal* asks both sides for the digest of some tokens: about log2(tokens) questions.
    """
    if not tokens or equal(tokens):
        return None
    while len(tokens) > 1:
        half = tokens.start + len(tokens) // 2
        first = range(tokens.start, half)
        tokens = range(half, tokens.stop) if equal(first) else first
    return tokens.start


def _totals(field: str, digests: Iterable[Sums]) -> dict[tuple[str, str, int], int | None]:
    """Return the sums over all contexts, or None where replicas of any context differ."""
    contexts: dict[tuple[str, str, int], dict[int, set[int]]] = {}
    wanted = "what `digest` returned, of each rank"
    for sums in sequence(field, digests, wanted):
        for key, total in mapping(field, sums, wanted).items():
            if not isinstance(key, tuple) or len(key) != 4:  # noqa: PLR2004 - as `Sums` says
                raise SpecError(field, key, wanted)
            *home, context = key
            contexts.setdefault(tuple(home), {}).setdefault(context, set()).add(total)
    # No combination of replicas is tried: their number is exponential in the contexts.
    return {
        home: sum(map(sum, sums.values())) % 2**64
        if all(len(totals) == 1 for totals in sums.values())
        else None
        for home, sums in contexts.items()
    }


def _table(tables: Mapping[str, BlockTable], group: str) -> BlockTable:
    table = mapping("tables", tables, "group names to block tables").get(group)
    if not isinstance(table, BlockTable):
        raise SpecError("tables", sorted(tables, key=repr), f"a block table for group {group!r}")
    return table


def _token_rows(
    cache: RankCache, group: KVCacheGroup, part: Part, table: BlockTable, want: Wanted
) -> tuple[Ints, Ints, Ints]:
    """Return block in memory, row and first token of the rank's own rows that are wanted."""
    grain, context = part.tokens_per_state, cache.engine.context(group, cache.rank)
    first = want.tokens.start // grain * grain
    held = table.tokens(cache.engine.virtual_block(group))
    if want.tokens and not held.start <= first < want.tokens.stop <= held.stop:
        tokens = f"{want.tokens.start}..{want.tokens.stop - 1}"
        raise SpecError(f"tables[{group.name!r}]", held, f"blocks for tokens {tokens}")
    position = np.arange(first, want.tokens.stop, grain, dtype=np.int64)
    position = position[context.owns(position)]
    local = context.local(position) - table.first_token // context.size
    place, token = np.divmod(local, group.spec.block_size)
    kernel_block, token = np.divmod(token, group.memory_block_size)
    return (
        table.block_ids[place] * group.kernel_blocks_per_block + kernel_block,
        token // grain,
        position,
    )


def _state_rows(
    group: KVCacheGroup, part: Part, table: BlockTable, want: Wanted
) -> tuple[Ints, Ints, Ints]:
    """Return block, row and row again of the first rows of a state."""
    field = f"tables[{group.name!r}]"
    slot = table.state_block(field, group.spec.block_size, want.tokens.start)
    row = np.arange(min(part.states, want.rows))
    return np.full(len(row), table.block_ids[slot]), row, row


def partial_sums(
    region: Region, own: int, unit: int, block: Ints, row: Ints, number: Ints
) -> Iterator[int]:
    """Yield sums of some rows that add up to that of all, of which *number* is the name.

    Of one *unit* of the model, the *own*-th of *region*. Each is some hundred kilobytes of work.
    """
    many = max(1, MANY_BYTES // region.content_bytes)
    chunks = [_chunk(region, chunk) for chunk in range(region.chunks)]
    key = _key(region.layer, region.part, unit)
    for at in range(0, len(block), many):
        here = slice(at, at + many)
        content = _word([chunk[block[here], own, row[here]] for chunk in chunks])
        name = _mix(number[here].astype(np.uint64) ^ key)
        yield int(_mix(content ^ name).sum(dtype=np.uint64))


def _word(chunks: list[npt.NDArray[np.uint8]]) -> Words:
    """Return one word for each content, made of all its bytes in order, which lie in *chunks*.

    One changed word of a content always changes the result. See the module for the formula.
    """
    content = chunks[0] if len(chunks) == 1 else np.concatenate(chunks, axis=1)
    if short := -content.shape[1] % 8:
        content = np.pad(content, ((0, 0), (0, short)))
    words = content.view("<u8")
    weights = _mix(np.arange(1, words.shape[1] + 1, dtype=np.uint64)) | np.uint64(1)
    products = words * weights
    folded = products >> _FOLD
    folded ^= products
    # One pass that multiplies and adds: `sum` of the products takes half as long again.
    return np.asarray(np.einsum("ij,j->i", folded, weights), np.uint64)


def _chunk(region: Region, chunk: int) -> npt.NDArray[np.uint8]:
    """Return a view of one chunk of all contents: [blocks, units, states, bytes]."""
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
    """Return every word scattered: one changed bit changes about half of the others."""
    for multiplier in _MULTIPLIERS:
        word = (word ^ (word >> _SHIFT)) * multiplier
    return word ^ (word >> _SHIFT)
