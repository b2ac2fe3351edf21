"""The byte oracle: what each byte of a rank must be after a transfer, and where it differs.

Invariant: the oracle shares no arithmetic with the library that it judges. It reads only values of
kvspec: parts, groups and block tables.

How it works:
    1. Each byte of a model has a true value: a hash of layer, part, unit, token and byte
       (`content`). So a byte that arrives at a wrong place is almost surely wrong there.
    2. `fill` writes the true bytes to the producer, and random bytes everywhere else.
    3. `spoil` writes random bytes to the consumer. Each byte of the request's blocks is wrong, so a
       missing byte shows, and so does a cached byte that is overwritten.
    4. The system under test moves bytes.
    5. `check` compares each byte of the consumer:

           byte                                        must be
           live and not cached                         the true byte
           dead, from the first live block on          any byte
           cached, of another block, or padding        the byte that was there before

    Example: a block has 4 tokens of 2 bytes, the prompt has 3 tokens, and 1 token is cached. The
    consumer's table is [1], and its pool has 2 blocks. Of 16 bytes, 4 are live and 2 are dead.

    >>> import kvspec
    >>> import numpy as np
    >>> spec = kvspec.MLAAttentionSpec(block_size=4, head_size=2, dtype="uint8")
    >>> engine = kvspec.EngineSpec(groups=[kvspec.KVCacheGroup(name="g", layers=["l"], spec=spec)])
    >>> request = kvspec.TransferRequest(
    ...     request_id="r", num_tokens=3, cached_tokens=1,
    ...     producer_blocks={"g": [0]}, consumer_blocks={"g": [1]},
    ... )
    >>> storage = {"g": np.zeros(16, np.uint8)}
    >>> rank, tables = kvspec.RankId(), request.consumer_blocks
    >>> spoil(engine, rank, storage, 2, tables, request)
    >>> must, may = expected(engine, rank, storage, 2, tables, request)
    >>> (must["g"] != storage["g"]).nonzero()[0].tolist(), may["g"].nonzero()[0].tolist()
    ([10, 11, 12, 13], [14, 15])
    >>> must["g"][13] ^= 1
    >>> for line in check(engine, rank, storage, must, 2, tables, request):
    ...     print(line.partition(": ")[0])
    consumer tp0, group g, layer l, part latent, unit 0, token 2, block 1, byte 1

    Units are dealt to ranks one by one, storage is cut by the layout letters (`carve`), and each
    position is checked alone for liveness (`positions`).
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from kvspec.testing.carve import Blocks, Bytes, StoredBytes, Views, in_common_order, logical_views
from kvspec.testing.positions import PartRows, Tables, rows_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.descriptors.request import TransferRequest
    from kvspec.engines.engine import EngineSpec
    from kvspec.ownership.parallel import RankId

A = TypeVar("A")
# A function that returns the arrays of a storage, for layouts that letters do not describe.
ViewsOf = Callable[[StoredBytes], Views]
# The constants of splitmix64's finalizer.
_MULTIPLIERS = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def _mix(word: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return splitmix64's finalizer of each word. If one bit changes, half of the others change."""
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
    """Return the true bytes of a part: a hash of all coordinates and of *seed*.

    Args:
        layer: Name of the layer.
        part: Name of the part.
        units: Numbers of the units in the model.
        rows: Token positions (the first token, if a row stands for several), or rows of a state.
        size: Bytes of one row of one unit.
        seed: Changes all bytes.
        seen: For a state, the number of tokens that it has seen. Else -1.

    Returns:
        uint8 array of shape (units, rows, size).

    >>> content("layers.0", "k", [0, 1], [5], 2).shape
    (2, 1, 2)
    """
    name = "\0".join((str(seed), layer, part, str(seen))).encode()
    key = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    word = _mix(np.asarray(units, np.uint64) ^ np.uint64(key))
    word = _mix(word[:, None] ^ np.asarray(rows, np.uint64))
    word = _mix(word[:, :, None] ^ np.arange(-(-size // 8), dtype=np.uint64))
    return word.astype("<u8").view(np.uint8)[:, :, :size]


def content_of(rows: PartRows, seed: int) -> Bytes:
    """Return the true bytes of *rows*, of shape (entries, units, bytes)."""
    of_tokens, (_, layer, name) = rows.part.per_token, rows.key
    numbers, seen = (rows.token, -1) if of_tokens else (rows.row, rows.seen)
    size = rows.part.content_bytes
    return content(layer, name, rows.units, numbers, size, seed=seed, seen=seen).swapaxes(0, 1)


def _views(
    engine: EngineSpec, rank: RankId, storage: StoredBytes, blocks: Blocks | ViewsOf
) -> Views:
    """Return the arrays of *storage*, cut by the layout letters or by the function *blocks*."""
    if callable(blocks):
        return in_common_order(engine, blocks(storage))
    return logical_views(engine, rank, storage, blocks)


def _random(storage: StoredBytes, rank: RankId, seed: int) -> None:
    """Overwrite *storage* with bytes that differ between ranks, groups and seeds."""
    for name, flat in storage.items():
        digest = hashlib.blake2b(f"{seed}\0{rank}\0{name}".encode(), digest_size=8).digest()
        generator = np.random.default_rng(int.from_bytes(digest, "little"))
        flat[:] = np.frombuffer(generator.bytes(flat.size), np.uint8)


def fill(
    engine: EngineSpec,
    rank: RankId,
    storage: StoredBytes,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> None:
    """Write the true bytes of a request to the storage of a producer rank.

    All other bytes become random, also rows at or after the request's length.

    Args:
        engine: The producer.
        rank: Its rank.
        storage: One flat uint8 array for each group, or one array that all groups share.
        num_blocks: Blocks of the pool, for all groups or by group. Or a function that returns the
            arrays of a storage, if the layout letters do not describe it.
        tables: The block tables of the producer.
        request: The request.
        seed: Changes all bytes. Use one seed for a whole transfer.
    """
    _random(storage, rank, seed + 1)
    views = _views(engine, rank, storage, num_blocks)
    for rows in rows_of(engine, rank, tables, request, request.state_tokens):
        known = rows.known
        views[rows.key][rows.block[known], :, rows.row[known]] = content_of(rows, seed)[known]


def spoil(
    engine: EngineSpec,
    rank: RankId,
    storage: StoredBytes,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> None:
    """Write random bytes to the storage of a consumer rank. None of the request's bytes is true.

    So a byte that is not written shows, and so does a cached byte that is written.

    Args:
        engine: The consumer.
        rank: Its rank.
        storage: One flat uint8 array for each group, or one array that all groups share.
        num_blocks: As for `fill`.
        tables: The block tables of the consumer.
        request: The request.
        seed: The seed of `fill`.
    """
    _random(storage, rank, seed + 2)
    views = _views(engine, rank, storage, num_blocks)
    for rows in rows_of(engine, rank, tables, request):
        now, true = views[rows.key][rows.block, :, rows.row], content_of(rows, seed)
        views[rows.key][rows.block, :, rows.row] = np.where(now == true, ~true, now)


def expected(
    engine: EngineSpec,
    rank: RankId,
    before: StoredBytes,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
    source: EngineSpec | None = None,
) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    """Return the bytes that a consumer rank must hold after a transfer.

    Args:
        engine: The consumer.
        rank: Its rank.
        before: A copy of its storage before the transfer.
        num_blocks: As for `fill`.
        tables: The block tables of the consumer.
        request: The request.
        seed: The seed of `fill`.
        source: The producer. Layers that it excludes must not change.

    Returns:
        The bytes, and a mask that is 1 for each byte that may have any value. Only live
        bytes differ from *before*. Both are flat arrays by group. Groups that share one storage
        share one array.
    """
    must = each_array(before, np.copy)
    may = each_array(before, np.zeros_like)
    must_views = _views(engine, rank, must, num_blocks)
    may_views = _views(engine, rank, may, num_blocks)
    rows_of_parts = list(rows_of(engine, rank, tables, request, source=source))
    for rows in rows_of_parts:
        may_views[rows.key][rows.block[rows.dead], :, rows.row[rows.dead]] = 1
    # A block that one group has given back may be another group's. So live rows come last.
    for rows in rows_of_parts:
        live = rows.live
        must_views[rows.key][rows.block[live], :, rows.row[live]] = content_of(rows, seed)[live]
        may_views[rows.key][rows.block[live], :, rows.row[live]] = 0
    return must, may


def check(
    engine: EngineSpec,
    rank: RankId,
    before: StoredBytes,
    after: StoredBytes,
    num_blocks: Blocks | ViewsOf,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
    limit: int = 20,
    source: EngineSpec | None = None,
    right: tuple[StoredBytes, StoredBytes] | None = None,
) -> list[str]:
    """Compare the storage of a consumer rank with `expected`, byte by byte.

    Args:
        engine: The consumer.
        rank: Its rank.
        before: A copy of its storage before the transfer.
        after: Its storage after the transfer.
        num_blocks: As for `fill`.
        tables: The block tables of the consumer.
        request: The request.
        seed: The seed of `fill`.
        limit: The maximum number of lines.
        source: The producer. Layers that it excludes must not change.
        right: The result of `expected`, if it is known already.

    Returns:
        A line for each wrong byte, which names rank, group, layer, part, unit, token, block and
        byte, and both values. Empty if the storage is right. The rows of the request come first,
        then other rows. Bytes that no part holds, such as padding, come last.
    """
    must, may = right or expected(
        engine, rank, before, num_blocks, tables, request, seed=seed, source=source
    )
    wrong: dict[str, Bytes] = {}
    by_array: dict[int, Bytes] = {}
    for name, dead in may.items():
        faults = ((after[name] != must[name]) & (dead == 0)).view(np.uint8)
        wrong[name] = by_array.setdefault(id(dead), faults)
    if not any(flat.any() for flat in wrong.values()):
        return []
    rows = list(rows_of(engine, rank, tables, request, source=source))
    views = [_views(engine, rank, storage, num_blocks) for storage in (wrong, must, after)]
    lines = differences(f"consumer {rank}", rows, views, wrong, must, after)
    return list(islice(lines, limit))


def differences(
    rank: str, rows_of_parts: list[PartRows], views: list[Views], *flats: StoredBytes
) -> Iterator[str]:
    """Yield a line for each wrong byte: in the rows of requests, then in other rows, then padding.

    *views* and *flats* are each three storages: the marks of the bytes that are wrong (1), the
    right bytes and the bytes that are there. The marks are cleared.
    """
    left, must_views, after_views = views
    wrong, must, after = flats
    for only_request in (True, False):
        for rows in rows_of_parts:
            group, layer, part = rows.key
            request_rows = {
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
                if only_request and (block, row) not in request_rows:
                    continue
                foreign = f"row {row} outside of the request", False
                where, live = request_rows.get((block, row), foreign)
                left[rows.key][at] = 0
                yield (
                    f"{rank}, group {group}, layer {layer}, part {part}, unit "
                    f"{rows.units[unit]}, {where}, block {block}, byte {byte}: this byte must "
                    f"{'become' if live else 'stay'} {must_views[rows.key][at]:#04x}, but it is "
                    f"{after_views[rows.key][at]:#04x}"
                )
    for name, flat in wrong.items():
        for byte in np.flatnonzero(flat).tolist():
            flat[byte] = 0
            yield (
                f"{rank}, group {name}, byte {byte} of the storage (padding): this byte "
                f"must stay {must[name][byte]:#04x}, but it is {after[name][byte]:#04x}"
            )


def each_array(storage: StoredBytes, make: Callable[[Bytes], A]) -> dict[str, A]:
    """Return *make* of each array. Groups that share one array share its result."""
    made = {id(flat): make(flat) for flat in storage.values()}
    return {name: made[id(flat)] for name, flat in storage.items()}
