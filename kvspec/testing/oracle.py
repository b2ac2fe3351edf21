"""Count bytes: what every rank should hold after a transfer, and where a storage differs from it.

The oracle judges the library, so it shares no arithmetic with it: units are handed out one by one
like cards, storage is cut into arrays by the layout letters alone (`carve`), liveness is asked
position by position. Of kvspec it reads only values (parts, groups, block tables) and imports only
names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from kvspec.testing.carve import Blocks, Bytes, Storage, Views, logical_views
from kvspec.testing.positions import Rows, Tables, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.descriptors.request import TransferRequest
    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId

ViewsOf = Callable[[Storage], Views]
"""What shows the arrays of a storage that does not lie as the letters say: where tensors are."""
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finalizer of every word: one changed bit changes half of the others."""
    word = (word ^ (word >> np.uint64(30))) * _MULTIPLIERS[0]
    word = (word ^ (word >> np.uint64(27))) * _MULTIPLIERS[1]
    return word ^ (word >> np.uint64(31))


def content(
    layer: str,
    part: str,
    units: Sequence[int] | NDArray[np.int64],
    rows: Sequence[int] | NDArray[np.int64],
    size: int,
    *,
    seed: int = 0,
    seen: int = -1,
) -> Bytes:
    """Return the true bytes [units, rows, *size*]: a hash of every coordinate and of *seed*.

    *units* are global; *rows* are token positions (of a state's first token), or row numbers of a
    state that has *seen* that many tokens.
    """
    name = "\0".join((str(seed), layer, part, str(seen))).encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    word = _mix(np.asarray(units, np.uint64) ^ np.uint64(key))
    word = _mix(word[:, None] ^ np.asarray(rows, np.uint64))
    word = _mix(word[:, :, None] ^ np.arange(-(-size // 8), dtype=np.uint64))
    return word.astype("<u8").view(np.uint8)[:, :, :size]


def _content_of(rows: Rows, seed: int) -> Bytes:
    """Return the true bytes [entries, units, C] of *rows*."""
    of_tokens, (_, layer, name) = rows.part.per_token, rows.key
    numbers, seen = (rows.token, -1) if of_tokens else (rows.row, rows.seen)
    size = rows.part.content_bytes
    return content(layer, name, rows.units, numbers, size, seed=seed, seen=seen).swapaxes(0, 1)


def _views(engine: EngineSpec, rank: RankId, storage: Storage, blocks: Blocks | ViewsOf) -> Views:
    """Return the arrays of *storage*, as the letters say, or as whoever knows better does."""
    return blocks(storage) if callable(blocks) else logical_views(engine, rank, storage, blocks)


def _random(storage: Storage, rank: RankId, seed: int) -> None:
    """Overwrite *storage* with bytes that differ between ranks, groups and seeds."""
    for name, flat in storage.items():
        digest = hashlib.blake2b(f"{seed}\0{rank}\0{name}".encode(), digest_size=8).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "little"))
        flat[:] = np.frombuffer(generator.bytes(flat.size), np.uint8)


def fill(
    engine: EngineSpec,
    rank: RankId,
    storage: Storage,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> None:
    """Give a producer rank's *storage* the true bytes of the tokens in its *tables*.

    Everything else, also rows at or beyond the request's length, gets random bytes.
    """
    _random(storage, rank, seed + 1)
    views = _views(engine, rank, storage, num_blocks)
    for rows in rows_of(engine, rank, tables, request, request.state_tokens):
        known = rows.known
        views[rows.key][rows.block[known], :, rows.row[known]] = _content_of(rows, seed)[known]


def spoil(
    engine: EngineSpec,
    rank: RankId,
    storage: Storage,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> None:
    """Give a consumer rank's *storage* random bytes, wrong at each byte of the request's blocks.

    So a byte that is not written shows, and so does a cached byte that is.
    """
    _random(storage, rank, seed + 2)
    views = _views(engine, rank, storage, num_blocks)
    for rows in rows_of(engine, rank, tables, request):
        now, true = views[rows.key][rows.block, :, rows.row], _content_of(rows, seed)
        views[rows.key][rows.block, :, rows.row] = np.where(now == true, ~true, now)


def expected(
    engine: EngineSpec,
    rank: RankId,
    before: Storage,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
    source: EngineSpec | None = None,
) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    """Return what a consumer rank must hold, and a mask (1) of the bytes that may be anything.

    Live, uncached tokens have the true bytes; bytes of dead, uncached positions in the request's
    own blocks may change; every other byte is as it was *before*. Both are flat arrays by group,
    one for all groups that share one. *source*: the producer; what it excludes stays as it was.
    """
    must = each_array(before, np.copy)
    may = each_array(before, np.zeros_like)
    must_views = _views(engine, rank, must, num_blocks)
    may_views = _views(engine, rank, may, num_blocks)
    for rows in rows_of(engine, rank, tables, request, source=source):
        live, dead = rows.live, rows.dead
        must_views[rows.key][rows.block[live], :, rows.row[live]] = _content_of(rows, seed)[live]
        may_views[rows.key][rows.block[dead], :, rows.row[dead]] = 1
    return must, may


def check(
    engine: EngineSpec,
    rank: RankId,
    before: Storage,
    after: Storage,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
    limit: int = 20,
    source: EngineSpec | None = None,
) -> list[str]:
    """Return what is wrong with a consumer rank's storage *after* the transfer, a line a byte.

    Empty: right. At most *limit* lines, each naming rank, layer, part, unit, token and byte.
    """
    right = expected(engine, rank, before, num_blocks, tables, request, seed=seed, source=source)
    return compare(
        engine, rank, right, after, num_blocks, tables, request, limit=limit, source=source
    )


def compare(
    engine: EngineSpec,
    rank: RankId,
    right: tuple[Storage, Storage],
    after: Storage,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    limit: int = 20,
    source: EngineSpec | None = None,
) -> list[str]:
    """Return the same of what is *right*, as `expected` returns it: what must be, what may."""
    must, may = right
    wrong: dict[str, Bytes] = {}
    by_array: dict[int, Bytes] = {}
    for name, free in may.items():
        faults = ((after[name] != must[name]) & (free == 0)).view(np.uint8)
        wrong[name] = by_array.setdefault(id(free), faults)
    if not any(flat.any() for flat in wrong.values()):
        return []
    rest = must, after, wrong, num_blocks, tables, request, source
    return list(islice(_differences(engine, rank, *rest), limit))


def _differences(
    engine: EngineSpec,
    rank: RankId,
    must: Storage,
    after: Storage,
    wrong: Storage,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    source: EngineSpec | None,
) -> Iterator[str]:
    """Yield a line for every byte that is *wrong* (1), in logical order; the request's own first.

    Then come other blocks, and last what no part holds.
    """
    left = _views(engine, rank, wrong, num_blocks)
    must_views = _views(engine, rank, must, num_blocks)
    after_views = _views(engine, rank, after, num_blocks)
    for own in (True, False):
        for rows in rows_of(engine, rank, tables, request, source=source):
            group, layer, part = rows.key
            told = {
                (int(block), int(row)): (
                    f"token {token}" if token >= 0 else f"state row {row}",
                    live,
                )
                for block, row, token, live in zip(
                    rows.block, rows.row, rows.token, rows.live, strict=True
                )
            }
            for at in map(tuple, np.argwhere(left[rows.key]).tolist()):
                block, unit, row, byte = at
                if own and (block, row) not in told:
                    continue
                where, live = told.get((block, row), (f"row {row}, not the request's", False))
                left[rows.key][at] = 0
                yield (
                    f"{rank} group {group} layer {layer} part {part} unit {rows.units[unit]} "
                    f"{where} (block {block}) byte {byte}: expected {must_views[rows.key][at]:#04x}"
                    f", got {after_views[rows.key][at]:#04x} "
                    f"({'live' if live else 'must not change'})"
                )
    for name, flat in wrong.items():
        for byte in np.flatnonzero(flat).tolist():
            flat[byte] = 0
            yield (
                f"{rank} group {name} padding at byte {byte} of the storage: "
                f"expected {must[name][byte]:#04x}, got {after[name][byte]:#04x} (must not change)"
            )


def each_array(storage: Storage, make: Callable[[Bytes], Bytes]) -> dict[str, Bytes]:
    """Return what *make* makes of each array; groups that share one share what is made of it."""
    made = {id(flat): make(flat) for flat in storage.values()}
    return {name: made[id(flat)] for name, flat in storage.items()}
