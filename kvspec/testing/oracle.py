"""Count bytes: what every rank should hold after a transfer, and where a storage differs from it.

The oracle judges the library, so it shares no arithmetic with it: units are dealt one by one like
cards, storage is cut into arrays by the layout letters alone (`carve`), liveness is asked position
by position. Of kvspec it reads only values (parts, groups, block tables) and imports only names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from kvspec.testing.carve import Blocks, Bytes, Storage, logical_views, rank_units

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from kvspec.engine import EngineSpec
    from kvspec.parallel import RankId
    from kvspec.request import BlockTable, TransferRequest
    from kvspec.slices import Part

Tables = Mapping[str, "BlockTable | Sequence[int]"]

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


def _of_group(value: int | Mapping[str, int] | None, group: str, default: int) -> int:
    if value is None:
        return default
    return value if isinstance(value, int) else value.get(group, default)


def _length(spec: object, request: TransferRequest) -> int:
    """Return how many positions the request has in this kind of layer."""
    if type(spec).__name__ == "CrossAttentionSpec" and request.encoder_tokens is not None:
        return request.encoder_tokens
    return request.num_tokens


def live_positions(spec: Any, request: TransferRequest) -> NDArray[np.bool_]:  # noqa: ANN401
    """Return, for each position below the request's length, whether the next query sees it.

    The query stands at position n = `num_tokens`: it sees what is less than a window away, or in
    its own chunk; cross attention sees every encoder token.
    """
    length = _length(spec, request)
    position = np.arange(length)
    window = getattr(spec, "sliding_window", None)
    if window is not None:
        return np.asarray(length - position < window + spec.extra_retained_tokens)
    chunk = getattr(spec, "attention_chunk_size", None)
    if chunk is not None:
        return np.asarray(position // chunk == length // chunk)
    return np.ones(length, bool)


@dataclass(frozen=True)
class _Rows:
    """Rows of one part that a request's own blocks hold: one entry a (block, row), same order."""

    key: tuple[str, str, str]
    part: Part
    units: Sequence[int]
    block: NDArray[np.int64]
    row: NDArray[np.int64]
    token: NDArray[np.int64]
    known: NDArray[np.bool_]  # below the request's length
    live: NDArray[np.bool_]  # must arrive
    dead: NDArray[np.bool_]  # may be overwritten
    seen: int

    def content(self, seed: int) -> Bytes:
        """Return the true bytes [entries, units, C]."""
        rows = self.token if self.part.tokens_per_state else self.row
        size, (_, layer, name) = self.part.content_bytes, self.key
        seen = -1 if self.part.tokens_per_state else self.seen
        return content(layer, name, self.units, rows, size, seed=seed, seen=seen).swapaxes(0, 1)


def _rows(
    engine: EngineSpec,
    rank: RankId,
    tables: Tables,
    request: TransferRequest,
    seen: int | Mapping[str, int] | None = None,
) -> Iterator[_Rows]:
    """Yield the rows of every part that *tables* give the request on this rank.

    States have *seen* that many tokens, or, as the consumer wants them, exactly `num_tokens`.
    """
    for group in engine.groups:
        table = tables[group.name]
        ids = np.asarray(getattr(table, "block_ids", table), np.int64)
        first = getattr(table, "first_token", 0)
        cached = _of_group(request.cached_tokens, group.name, 0)
        tokens = _of_group(seen, group.name, request.num_tokens)
        for layer in group.layers:
            spec = group.spec.of_layer(layer)
            live = live_positions(spec, request)
            for part in spec.parts:
                block, row = (each.ravel() for each in np.indices((len(ids), part.states)))
                if part.tokens_per_state:
                    token = first + block * spec.block_size + row * part.tokens_per_state
                    covered = token[:, None] + np.arange(part.tokens_per_state)
                    known = token < len(live)
                    wanted = np.append(live, False)[np.minimum(covered, len(live))]
                    must = (wanted & (covered >= cached)).any(axis=1)
                    dead = ~must & (covered >= cached).all(axis=1)
                else:
                    token, known = np.full(row.shape, -1), np.ones(row.shape, bool)
                    must = known & (cached < request.num_tokens)
                    dead = np.zeros(row.shape, bool)
                units, key = rank_units(engine, rank, part), (group.name, layer, part.name)
                yield _Rows(key, part, units, ids[block], row, token, known, must, dead, tokens)


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
    num_blocks: Blocks,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> None:
    """Give a producer rank's *storage* the true bytes of the tokens in its *tables*.

    Everything else, also rows at or beyond the request's length, gets random bytes.
    """
    _random(storage, rank, seed + 1)
    views = logical_views(engine, rank, storage, num_blocks)
    for rows in _rows(engine, rank, tables, request, request.state_tokens):
        known = rows.known
        views[rows.key][rows.block[known], :, rows.row[known]] = rows.content(seed)[known]


def spoil(
    engine: EngineSpec,
    rank: RankId,
    storage: Storage,
    num_blocks: Blocks,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> None:
    """Give a consumer rank's *storage* random bytes, wrong at each byte of the request's blocks.

    So a byte that is not written shows, and so does a cached byte that is.
    """
    _random(storage, rank, seed + 2)
    views = logical_views(engine, rank, storage, num_blocks)
    for rows in _rows(engine, rank, tables, request):
        now, true = views[rows.key][rows.block, :, rows.row], rows.content(seed)
        views[rows.key][rows.block, :, rows.row] = np.where(now == true, ~true, now)


def expected(
    engine: EngineSpec,
    rank: RankId,
    before: Storage,
    num_blocks: Blocks,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
) -> tuple[dict[str, Bytes], dict[str, Bytes]]:
    """Return what a consumer rank must hold, and a mask (1) of the bytes that may be anything.

    Live, uncached tokens have the true bytes; bytes of dead, uncached positions in the request's
    own blocks may change; every other byte is as it was *before*. Both are flat arrays by group.
    """
    must = {name: flat.copy() for name, flat in before.items()}
    may = {name: np.zeros_like(flat) for name, flat in before.items()}
    must_views = logical_views(engine, rank, must, num_blocks)
    may_views = logical_views(engine, rank, may, num_blocks)
    for rows in _rows(engine, rank, tables, request):
        live, dead = rows.live, rows.dead
        must_views[rows.key][rows.block[live], :, rows.row[live]] = rows.content(seed)[live]
        may_views[rows.key][rows.block[dead], :, rows.row[dead]] = 1
    return must, may


def check(
    engine: EngineSpec,
    rank: RankId,
    before: Storage,
    after: Storage,
    num_blocks: Blocks,
    tables: Tables,
    request: TransferRequest,
    *,
    seed: int = 0,
    limit: int = 20,
) -> list[str]:
    """Return what is wrong with a consumer rank's storage *after* the transfer, a line a byte.

    Empty: right. At most *limit* lines, each naming rank, layer, part, unit, token and byte.
    """
    must, may = expected(engine, rank, before, num_blocks, tables, request, seed=seed)
    wrong = {name: ((after[name] != must[name]) & (may[name] == 0)) for name in must}
    if not any(flat.any() for flat in wrong.values()):
        return []
    return list(_differences(engine, rank, must, after, wrong, num_blocks, tables, request))[:limit]


def _differences(
    engine: EngineSpec,
    rank: RankId,
    must: Storage,
    after: Storage,
    wrong: Mapping[str, NDArray[np.bool_]],
    num_blocks: Blocks,
    tables: Tables,
    request: TransferRequest,
) -> Iterator[str]:
    """Yield a line for every wrong byte, in logical order; what no part holds comes last."""
    left = {name: flat.view(np.uint8).copy() for name, flat in wrong.items()}
    left_views = logical_views(engine, rank, left, num_blocks)
    must_views = logical_views(engine, rank, must, num_blocks)
    after_views = logical_views(engine, rank, after, num_blocks)
    for rows in _rows(engine, rank, tables, request):
        group, layer, part = rows.key
        owned = {
            (int(block), int(row)): f"token {token}" if token >= 0 else f"state row {row}"
            for block, row, token in zip(rows.block, rows.row, rows.token, strict=True)
        }
        live = {
            (int(b), int(r))
            for b, r in zip(rows.block[rows.live], rows.row[rows.live], strict=True)
        }
        for block, unit, row, byte in np.argwhere(left_views[rows.key]).tolist():
            where = owned.get((block, row), f"row {row}, not the request's")
            why = "live" if (block, row) in live else "must not change"
            at = (block, unit, row, byte)
            yield (
                f"{rank} group {group} layer {layer} part {part} unit {rows.units[unit]} {where} "
                f"(block {block}) byte {byte}: expected {must_views[rows.key][at]:#04x}, "
                f"got {after_views[rows.key][at]:#04x} ({why})"
            )
        left_views[rows.key][:] = 0
    for name, flat in left.items():
        for byte in np.flatnonzero(flat).tolist():
            yield (
                f"{rank} group {name} padding at byte {byte} of the storage: "
                f"expected {must[name][byte]:#04x}, got {after[name][byte]:#04x} (must not change)"
            )
