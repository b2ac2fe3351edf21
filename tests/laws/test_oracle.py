"""The oracle judges everything else, so it is judged by hand and by loops of one byte at a time."""

from __future__ import annotations

import hashlib
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from itertools import count, cycle
from pathlib import Path
from typing import Any

import attrs
import builders
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings

import kvspec
from kvspec.testing import oracle, positions, strategies
from kvspec.testing.carve import logical_views, rank_units

WORD = 2**64 - 1


def slow_content(
    layer: str, part: str, unit: int, row: int, byte: int, *, seed: int = 0, seen: int = -1
) -> int:
    """Return the true value of one byte, in Python integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
        return word ^ (word >> 31)

    name = f"{seed}\0{layer}\0{part}\0{seen}".encode()
    word = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    for coordinate in (unit, row, byte // 8):
        word = mix(word ^ coordinate)
    return word >> 8 * (byte % 8) & 255


def test_content_of_one_byte_is_the_hash_of_its_coordinates() -> None:
    """Vectorised content and content byte by byte agree."""
    got = oracle.content("a", "k", [3, 0], [5, 17, 4096], 19, seed=2)
    want = [
        [[slow_content("a", "k", u, r, b, seed=2) for b in range(19)] for r in (5, 17, 4096)]
        for u in (3, 0)
    ]
    assert want == got.tolist()


def test_content_tells_every_coordinate_apart() -> None:
    """Changing any one coordinate changes nearly every byte: two bytes are equal 1 time in 256."""
    base: dict[str, Any] = {"layer": "a", "part": "k", "units": [1], "rows": [1]}
    other = {"layer": "b", "part": "v", "units": [2], "rows": [2], "seed": 1, "seen": 7}
    one = oracle.content(**base, size=4096)
    for name, value in other.items():
        changed = oracle.content(**base | {name: value}, size=4096)
        assert np.mean(one == changed) < 0.02, name
    assert np.mean(one[..., :-1] == one[..., 1:]) < 0.02
    assert np.unique(one).size == 256


@pytest.mark.parametrize(
    ("kind", "fields", "tokens", "live"),
    [
        ("FullAttentionSpec", {}, 5, [0, 1, 2, 3, 4]),
        ("SlidingWindowSpec", {"sliding_window": 3}, 5, [3, 4]),
        ("SlidingWindowSpec", {"sliding_window": 1}, 5, []),
        ("SlidingWindowSpec", {"sliding_window": 3, "extra_retained_tokens": 1}, 5, [2, 3, 4]),
        ("SlidingWindowSpec", {"sliding_window": 9}, 5, [0, 1, 2, 3, 4]),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 4}, 5, [4]),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 4}, 7, [4, 5, 6]),
        ("ChunkedLocalAttentionSpec", {"attention_chunk_size": 4}, 8, []),
        ("CrossAttentionSpec", {}, 5, [0, 1, 2]),
    ],
)
def test_live_positions_by_hand(
    kind: str, fields: Mapping[str, int], tokens: int, live: list[int]
) -> None:
    """What the query at position n sees: all, a window with itself, its own chunk, the encoder."""
    make = getattr(kvspec, kind)
    spec = make(block_size=2, total_num_kv_heads=1, head_size=1, dtype="uint8", **fields)
    request = builders.request(tokens, {}, {}, encoder_tokens=3)
    assert live == positions.live_positions(spec, request).nonzero()[0].tolist()


Place = tuple[str, str, int, int, int, int]


def places(case: strategies.Case, rank: kvspec.RankId) -> dict[str, list[Place | None]]:
    """Return (layer, part, block, unit, row, byte) of each byte of a consumer; None: padding."""
    found: dict[str, list[Place | None]] = {}
    for name, flat in storage_of(case, rank).items():
        found[name] = [None] * flat.size
    numbers: Any = {name: np.arange(len(each)) for name, each in found.items()}
    for (name, layer, part), view in logical_views(
        case.consumer, rank, numbers, case.consumer_pool
    ).items():
        for at in np.ndindex(view.shape):
            block, unit, row, byte = at
            found[name][int(view[at])] = (layer, part, block, unit, row, byte)
    return found


def storage_of(case: strategies.Case, rank: kvspec.RankId) -> dict[str, npt.NDArray[np.uint8]]:
    """Return a consumer rank's storage, by group."""
    _, storage = kvspec.allocate(case.consumer, rank, case.consumer_pool)
    return storage


def slow_tokens(
    engine: kvspec.EngineSpec, rank: kvspec.RankId, group: kvspec.KVCacheGroup, first: int
) -> Iterator[int]:
    """Yield the positions from *first* that *rank* stores.

    Cards handed out to the context ranks.
    """
    parallel = engine.parallel
    if not group.context_sharded:
        yield from count(first)
    if parallel.context_ranks is None:
        seats = {
            (pcp, tp): pcp * parallel.dcp_size + dcp
            for pcp in range(parallel.pcp_size)
            for tp, dcp in zip(range(parallel.tp_size), cycle(range(parallel.dcp_size)))
        }
    else:
        seats = {
            (pcp, tp): seat
            for pcp, row in enumerate(parallel.context_ranks)
            for tp, seat in enumerate(row)
        }
    rounds = cycle(sorted(set(seats.values())))
    for start in count(0, parallel.interleave_size):
        if next(rounds) == seats[rank.pcp, rank.tp]:
            for token in range(start, start + parallel.interleave_size):
                if token >= first:
                    yield token


def slow_tokens_of_row(
    case: strategies.Case, rank: kvspec.RankId, name: str, part: kvspec.Part, at: tuple[int, int]
) -> list[int] | None:
    """Return the positions of the row *at* (block in memory, row of it); None: not the request's.

    The table is unrolled row by row: the kernel's blocks of each of its own, and their rows.
    """
    group, table = case.consumer.group(name), case.request.consumer_blocks[name]
    kernel = group.kernel_block_size or group.spec.block_size
    tokens = slow_tokens(case.consumer, rank, group, table.first_token)
    ids = list(table.block_ids)
    for own in ids:
        for kernel_block in range(group.spec.block_size // kernel):
            for row in range(kernel // part.tokens_per_state):
                first = next(tokens)
                for _ in range(part.tokens_per_state - 1):
                    next(tokens)
                if (
                    own != case.consumer.null_block
                    and ids.count(own) == 1
                    and at
                    == (
                        own * (group.spec.block_size // kernel) + kernel_block,
                        row,
                    )
                ):
                    return [first + i for i in range(part.tokens_per_state)]
    return None


def slow_verdict(
    case: strategies.Case, rank: kvspec.RankId, name: str, place: Place | None
) -> int | str:
    """Return what one byte of a consumer must be: its true value, "same" or "any"."""
    request = case.request
    if place is None or name not in request.consumer_blocks or excluded(case, place[0]):
        return "same"
    layer, part_name, block, unit, row, byte = place
    spec = case.consumer.group(name).spec.of_layer(layer)
    part = next(part for part in spec.parts if part.name == part_name)
    cached: Any = request.cached_tokens
    if not isinstance(cached, int):
        cached = cached.get(name, 0)
    elif isinstance(spec, kvspec.CrossAttentionSpec):
        cached = 0  # one count is of the prompt's tokens, these are the encoder's
    head = rank_units(case.consumer, rank, part, case.consumer.group(name))[unit]
    if not part.tokens_per_state:
        if cached >= request.num_tokens:
            return "same"
        slot = slow_slot(request.consumer_blocks[name], spec.block_size, request.num_tokens)
        true = slow_content(layer, part_name, head, row, byte, seed=9, seen=request.num_tokens)
        return "same" if block != slot else true
    tokens = slow_tokens_of_row(case, rank, name, part, (block, row)) or [-1]
    live = set(positions.live_positions(spec, request).nonzero()[0].tolist())
    if any(token in live and token >= cached for token in tokens):
        return slow_content(layer, part_name, head, tokens[0], byte, seed=9)
    return "same" if any(token < cached for token in tokens) or tokens == [-1] else "any"


def slow_slot(table: kvspec.BlockTable, block_size: int, num_tokens: int) -> int:
    """Return the block of a state: the only one, or the one in which the last token lies."""
    token = table.first_token
    for block in list(table.block_ids):
        for _ in range(block_size):
            token += 1
            if token == num_tokens or len(table.block_ids) == 1:
                return int(block)
    raise AssertionError(f"token {num_tokens - 1} is not in the table")


def excluded(case: strategies.Case, layer: str) -> bool:
    """Return whether a group of either side names *layer* as excluded."""
    engines = case.producer, case.consumer
    return any(layer in group.excluded for engine in engines for group in engine.groups)


def slow_layers(engine: kvspec.EngineSpec, rank: kvspec.RankId) -> set[str]:
    """Return the layers of a rank's stage: a number at a time goes to the stage whose turn it is.

    Stage s of S holds the numbers from s N // S on, of N.
    """
    layers = [layer for group in engine.groups for layer in group.layers]
    numbers = {layer: int((re.findall(r"[0-9]+", layer) or ["-1"])[0]) for layer in layers}
    stages: Any = engine.parallel.stages
    if stages is None:
        known = sorted(set(numbers.values()))
        starts = [s * len(known) // engine.parallel.pp_size for s in range(rank.pp, rank.pp + 2)]
        own = known[starts[0] : starts[1]]
        return {layer for layer in layers if engine.parallel.pp_size == 1 or numbers[layer] in own}
    stage = stages[rank.pp]
    return {
        each for each in layers if (numbers[each] if isinstance(stage, range) else each) in stage
    }


@given(strategies.cases(largest=3))
@settings(max_examples=60)
def test_expectation_agrees_with_one_byte_at_a_time(case: strategies.Case) -> None:
    """A live uncached byte is true, a dead one of the request's own free, any other is kept."""
    ranks = case.consumer.parallel.ranks
    for rank in {ranks[0], ranks[-1]}:
        before = storage_of(case, rank)
        rest = case.consumer_pool, case.request.consumer_blocks, case.request
        oracle.spoil(case.consumer, rank, before, *rest, seed=9)
        must, may = oracle.expected(
            case.consumer, rank, before, *rest, seed=9, source=case.producer
        )
        for name, counted in places(case, rank).items():
            group = case.consumer.group(name)
            units = {
                layer
                for layer in slow_layers(case.consumer, rank) & set(group.layers)
                for part in group.spec.of_layer(layer).parts
                if rank_units(case.consumer, rank, part, group)
            }
            assert units == {place[0] for place in counted if place is not None}
            verdicts = [slow_verdict(case, rank, name, place) for place in counted]
            kept = [
                int(old) if isinstance(verdict, str) else verdict
                for old, verdict in zip(before[name], verdicts, strict=True)
            ]
            assert kept == must[name].tolist()
            assert [int(verdict == "any") for verdict in verdicts] == may[name].tolist()


@given(strategies.cases(largest=3))
@settings(max_examples=60)
def test_a_producer_holds_true_bytes_and_a_consumer_none(case: strategies.Case) -> None:
    """`fill` writes each byte that `expected` wants where nothing is cached; `spoil` none."""
    full = attrs.evolve(case.request, cached_tokens=0)
    rank = case.consumer.parallel.ranks[0]
    storage = storage_of(case, rank)
    rest = case.consumer_pool, full.consumer_blocks, full
    oracle.spoil(case.consumer, rank, storage, *rest, seed=3)
    blank = {name: flat.copy() for name, flat in storage.items()}
    must, _ = oracle.expected(case.consumer, rank, storage, *rest, seed=3)
    oracle.fill(case.consumer, rank, storage, *rest, seed=3)
    true, wrong, filled = (
        logical_views(case.consumer, rank, each, case.consumer_pool)
        for each in (must, blank, storage)
    )
    for rows in positions.rows_of(case.consumer, rank, full.consumer_blocks, full):
        at = rows.block[rows.live], slice(None), rows.row[rows.live]
        assert true[rows.key][at].tolist() == filled[rows.key][at].tolist()
        assert not (true[rows.key][at] == wrong[rows.key][at]).any()


Arrived = tuple[kvspec.EngineSpec, Any, Any, Any]
RANK = kvspec.RankId(tp=1)


@pytest.fixture
def arrived() -> Arrived:
    """Return an engine, storage before and after a right transfer, and the other arguments."""
    spec = kvspec.SlidingWindowSpec(
        block_size=4, total_num_kv_heads=2, head_size=2, dtype="uint8", sliding_window=8,
        page_size_padded=40,
    )  # fmt: skip
    engine = builders.engine(spec, layers=("a",), tp=2)
    request = builders.request(14, {}, [3, 1, 5, 0], cached_tokens=9)
    before = {"g": np.zeros(6 * 40, np.uint8)}
    rest = (6, request.consumer_blocks, request)
    oracle.spoil(engine, RANK, before, *rest)
    must, _ = oracle.expected(engine, RANK, before, *rest)
    return engine, before, must, rest


@pytest.mark.parametrize(
    ("byte", "where", "verb"),
    [
        (
            5 * 40 + 6,
            "consumer tp1, group g, layer a, part v, unit 1, token 9, block 5, byte 0",
            "become",
        ),
        (5 * 40 + 1, "part k, unit 1, token 8, block 5, byte 1", "stay"),
        (2 * 40, "part k, unit 1, row 0 outside of the request, block 2, byte 0", "stay"),
        (2 * 40 + 17, "consumer tp1, group g, byte 97 of the storage (padding)", "stay"),
    ],
    ids=["live", "cached", "foreign block", "padding"],
)
def test_each_wrong_byte_is_named(arrived: Arrived, byte: int, where: str, verb: str) -> None:
    """A planted byte is found and named: rank, layer, part, unit, token, byte, both values."""
    engine, before, after, rest = arrived
    assert [] == oracle.check(engine, RANK, before, after, *rest)
    old = int(after["g"][byte])
    after["g"][byte] ^= 255
    (line,) = oracle.check(engine, RANK, before, after, *rest)
    assert line.endswith(f"{where}: this byte must {verb} {old:#04x}, but it is {old ^ 255:#04x}")


def test_a_dead_byte_is_free(arrived: Arrived) -> None:
    """A position at or beyond the request's length in its own block may hold anything."""
    engine, before, after, rest = arrived
    after["g"][0 * 40 + 2 * 4] ^= 255
    assert [] == oracle.check(engine, RANK, before, after, *rest)


def test_differences_are_limited(arrived: Arrived) -> None:
    """A storage that is wrong throughout gives as many lines as asked for."""
    engine, before, after, rest = arrived
    after["g"] ^= 255
    assert len(oracle.check(engine, RANK, before, after, *rest, limit=7)) == 7


def test_the_oracle_starts_light_and_alone() -> None:
    """`kvspec.testing` imports neither hypothesis nor torch; the oracle nothing that it judges."""
    code = (
        "import sys, kvspec; known = set(sys.modules); import kvspec.testing;"
        "print([m for m in set(sys.modules) - known if m.startswith(('hypothesis', 'torch'))])"
    )
    got = subprocess.run(  # noqa: S603 - this interpreter
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert got.stdout.strip() == "[]"
    for module in ("check/counting", "testing/carve", "testing/positions", "testing/oracle"):
        text = (Path(kvspec.__path__[0]) / f"{module}.py").read_text()
        imports = [line for line in text.splitlines() if line.startswith(("import", "from"))]
        own = "kvspec.testing", "kvspec.check.counting"
        judged = [x for x in imports if "kvspec" in x and not any(name in x for name in own)]
        assert [] == judged, module
