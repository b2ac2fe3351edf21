"""Find where the contents of a request differ between two engines.

How it works:
    A load that compares checksums fails with the state `differs`, and its error names a layer and a
    producer rank. To find the rows, call `row_digests` on that rank of the producer and on the
    consumer rank, for the rows of that layer. Bring both results to one process, and call
    `differing_rows`. The producer's blocks must still be held.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from kvspec.descriptors.request import BlockTable
from kvspec.digests.ranks import Wanted, wanted_rows
from kvspec.digests.regions import all_row_digests
from kvspec.errors import SpecError
from kvspec.inputs import mapping, sequence
from kvspec.memory.rank_cache import RankCache

__all__ = [
    "differing",
    "differing_rows",
    "row_digests",
]

# Sums by layer, part, unit of the model, and the context rank that stores the tokens.
Sums = Mapping[tuple[str, str, int, int], int]
# By layer, part and unit of the model: the digest of each row, by its first token, or by the number
# of a state's row.
RowDigests = Mapping[tuple[str, str, int], Mapping[int, int]]


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


def row_digests(
    cache: RankCache,
    tables: Mapping[str, BlockTable],
    asked: Mapping[tuple[str, str], Wanted],
) -> dict[tuple[str, str, int], dict[int, int]]:
    """Return the digest of each row that one rank holds.

    The sum of the digests of all rows is the `kvspec.digests.digest` of the unit.

    Args:
        cache: The rank's cache.
        tables: The request's block table of each of the engine's groups.
        asked: The rows, as `kvspec.digests.wanted` returned them. Keep only the layers of interest:
            the result has a number for each row.

    Returns:
        For each layer, part and unit of the model, the digest of each row by its first token, or by
        the number of a state's row.

    Raises:
        SpecError: If a region is not in host memory, or a table lacks a block.

    >>> from kvspec import EngineSpec, KVCacheGroup, MLAAttentionSpec, ParallelConfig, RankId
    >>> from kvspec import allocate
    >>> spec = MLAAttentionSpec(block_size=2, head_size=8, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig())
    >>> cache, storage = allocate(engine, RankId(), num_blocks=4)
    >>> storage["full"][8:16] = 7  # token 1 of block 0
    >>> asked = {("l", "latent"): Wanted(range(0, 2))}
    >>> sides = [row_digests(cache, {"full": BlockTable([block])}, asked) for block in (0, 3)]
    >>> differing_rows(sides[:1], sides[1:])
    [('l', 'latent', 0, 1)]
    """
    digests: dict[tuple[str, str, int], dict[int, int]] = {}
    for region, units, rows in wanted_rows(cache, tables, asked):
        chunks = [*all_row_digests(region, range(len(units)), units.start, rows)]
        columns = np.concatenate(chunks).T.tolist() if chunks else [[]] * len(units)
        for unit, column in zip(units, columns, strict=True):
            numbers = rows.number.tolist()
            digests[region.layer, region.part, unit] = dict(zip(numbers, column, strict=True))
    return digests


def differing_rows(
    producers: Iterable[RowDigests], consumers: Iterable[RowDigests]
) -> list[tuple[str, str, int, int]]:
    """Return the rows whose content differs between the two engines.

    Only rows that both sides have are compared.

    Args:
        producers: What `row_digests` returned on some producer ranks.
        consumers: What it returned on some consumer ranks.

    Returns:
        (layer, part, unit, row) of each difference, sorted. *row* is the first token of the row, or
        the number of a state's row.

    Raises:
        SpecError: If a value is not the result of `row_digests`.

    >>> differing_rows([{("l", "k", 0): {0: 5, 1: 6}}], [{("l", "k", 0): {1: 7, 2: 8}}])
    [('l', 'k', 0, 1)]
    """
    sent, received = _all_rows("producers", producers), _all_rows("consumers", consumers)
    return sorted(
        row for row in sent.keys() & received.keys() if len(sent[row] | received[row]) > 1
    )


def _all_rows(
    field: str, digests: Iterable[RowDigests]
) -> dict[tuple[str, str, int, int], set[int]]:
    """Return the digests of each row on all ranks that have it."""
    expected = "the digests that `row_digests` returned for each rank"
    rows: dict[tuple[str, str, int, int], set[int]] = {}
    for units in sequence(field, digests, expected):
        for key, numbers in mapping(field, units, expected).items():
            if not isinstance(key, tuple) or len(key) != 3:  # noqa: PLR2004 - of `RowDigests`
                raise SpecError(field, key, expected)
            for number, value in mapping(field, numbers, expected).items():
                rows.setdefault((*key, number), set()).add(value)
    return rows
