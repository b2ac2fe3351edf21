"""Tests of the byte oracle against values worked out by hand and loops over single bytes."""

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
from kvspec.check.counting import context_of, live_positions, rank_units
from kvspec.testing import oracle, positions, strategies
from kvspec.testing.carve import logical_views

pytestmark = pytest.mark.uncovered

WORD = 2**64 - 1


def slow_content(
    layer: str, part: str, unit: int, row: int, byte: int, *, seed: int = 0, seen: int = -1
) -> int:
    """Return the true value of one byte, computed with Python integers."""

    def mix(word: int) -> int:
        word = (word ^ (word >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        word = (word ^ (word >> 27)) * 0x94D049BB133111EB & WORD
        return word ^ (word >> 31)

    name = f"{seed}\0{layer}\0{part}\0{seen}".encode()
    word = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little")
    for coordinate in (unit, row, byte // 8):
        word = mix(word ^ coordinate)
    return word >> 8 * (byte % 8) & 255


def test_content_equals_the_hash_of_the_coordinates_of_each_byte() -> None:
    """The vectors of the oracle and the loop over bytes compute the same values."""
    vectors = oracle.content("a", "k", [3, 0], [5, 17, 4096], 19, seed=2)
    loop = [
        [[slow_content("a", "k", u, r, b, seed=2) for b in range(19)] for r in (5, 17, 4096)]
        for u in (3, 0)
    ]
    assert loop == vectors.tolist()


def test_content_differs_if_one_coordinate_differs() -> None:
    """Random bytes are equal in 1 of 256 places, so nearly every byte must change."""
    base: dict[str, Any] = {"layer": "a", "part": "k", "units": [1], "rows": [1]}
    changes = {"layer": "b", "part": "v", "units": [2], "rows": [2], "seed": 1, "seen": 7}
    original = oracle.content(**base, size=4096)
    for name, value in changes.items():
        changed = oracle.content(**base | {name: value}, size=4096)
        assert np.mean(original == changed) < 0.02, name
    assert np.mean(original[..., :-1] == original[..., 1:]) < 0.02
    assert np.unique(original).size == 256


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
def test_live_positions_are_those_that_the_next_query_attends_to(
    kind: str, fields: Mapping[str, int], tokens: int, live: list[int]
) -> None:
    """The query attends to all positions, its window, its chunk, or the encoder."""
    make = getattr(kvspec, kind)
    spec = make(block_size=2, total_num_kv_heads=1, head_size=1, dtype="uint8", **fields)
    request = builders.request(tokens, {}, {}, encoder_tokens=3)
    assert live == live_positions(spec, request).nonzero()[0].tolist()


Place = tuple[str, str, int, int, int, int]


def places(case: strategies.Case, rank: kvspec.RankId) -> dict[str, list[Place | None]]:
    """Return (layer, part, block, unit, row, byte) of each byte of a consumer, None for padding."""
    places_by_group: dict[str, list[Place | None]] = {}
    for name, flat in storage_of(case, rank).items():
        places_by_group[name] = [None] * flat.size
    numbers: Any = {
        name: np.arange(len(group_places)) for name, group_places in places_by_group.items()
    }
    for (name, layer, part), view in logical_views(
        case.consumer, rank, numbers, case.consumer_pool
    ).items():
        for at in np.ndindex(view.shape):
            block, unit, row, byte = at
            places_by_group[name][int(view[at])] = (layer, part, block, unit, row, byte)
    return places_by_group


def storage_of(case: strategies.Case, rank: kvspec.RankId) -> dict[str, npt.NDArray[np.uint8]]:
    """Return new storage of a consumer rank, by group."""
    _, storage = kvspec.allocate(case.consumer, rank, case.consumer_pool)
    return storage


def slow_tokens(
    engine: kvspec.EngineSpec, rank: kvspec.RankId, group: kvspec.KVCacheGroup, first: int
) -> Iterator[int]:
    """Yield the positions from *first* that *rank* stores.

    The context ranks take turns, and each takes one interleave of positions at a time.
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
    """Return the positions of the row *at* (block in memory, row), or None if it has none.

    The loop goes through the kernel blocks of each block of the table, and through their rows.
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
        cached = 0  # One count for all groups counts tokens of the prompt, not of the encoder.
    head = rank_units(case.consumer, rank, part, case.consumer.group(name))[unit]
    if not part.tokens_per_state:
        if cached >= request.num_tokens:
            return "same"
        slot = slow_slot(request.consumer_blocks[name], spec.block_size, request.num_tokens)
        true = slow_content(layer, part_name, head, row, byte, seed=9, seen=request.num_tokens)
        return "same" if block != slot else true
    tokens = slow_tokens_of_row(case, rank, name, part, (block, row)) or [-1]
    live = set(live_positions(spec, request).nonzero()[0].tolist())
    if any(token in live and token >= cached for token in tokens):
        return slow_content(layer, part_name, head, tokens[0], byte, seed=9)
    length = len(live_positions(spec, request))
    virtual = spec.block_size * context_of(case.consumer, rank, case.consumer.group(name))[1]
    # The block may belong to another request if it ends before the first live token.
    expired = (tokens[0] // virtual + 1) * virtual <= min(live, default=length)
    held = any(token < cached for token in tokens) or tokens == [-1] or expired
    return "same" if held else "any"


def slow_slot(table: kvspec.BlockTable, block_size: int, num_tokens: int) -> int:
    """Return the block of a state: the only block, or the block of the last token."""
    token = table.first_token
    for block in list(table.block_ids):
        for _ in range(block_size):
            token += 1
            if token == num_tokens or len(table.block_ids) == 1:
                return int(block)
    raise AssertionError(f"the table has no token {num_tokens - 1}")


def excluded(case: strategies.Case, layer: str) -> bool:
    """Return whether a group of either side names *layer* as excluded."""
    engines = case.producer, case.consumer
    return any(layer in group.excluded for engine in engines for group in engine.groups)


def slow_layers(engine: kvspec.EngineSpec, rank: kvspec.RankId) -> set[str]:
    """Return the layers of a rank's stage.

    Of N layer numbers, stage s of S holds the numbers from index s * N // S on.
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
        layer
        for layer in layers
        if (numbers[layer] if isinstance(stage, range) else layer) in stage
    }


@given(strategies.cases(largest=3))
@settings(max_examples=min(60, settings.default.max_examples // 4))  # Python judges each byte.
def test_expected_agrees_with_a_verdict_on_each_byte(case: strategies.Case) -> None:
    """A live byte that is not cached must be true. Dead bytes of the request may be anything."""
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
def test_fill_writes_true_bytes_and_spoil_writes_none(case: strategies.Case) -> None:
    """The bytes are those that `expected` requires if nothing is cached."""
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
    """Return an engine, storage before and after a correct transfer, and the other arguments."""
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
    ("byte", "facts", "live"),
    [
        (5 * 40 + 6, "tp1 g a v 1 9 5 0", True),
        (5 * 40 + 1, "tp1 g a k 1 8 5 1", False),
        (2 * 40, "tp1 g a k 1 0 2 0", False),  # Row 0 of a block of another request.
        (2 * 40 + 17, "tp1 g 97 padding", False),
    ],
    ids=["live", "cached", "foreign block", "padding"],
)
def test_check_names_the_place_and_both_values_of_a_wrong_byte(
    arrived: Arrived, byte: int, facts: str, live: bool
) -> None:
    """The line contains the place, from rank to byte, and both values."""
    engine, before, after, rest = arrived
    assert [] == oracle.check(engine, RANK, before, after, *rest)
    old = int(after["g"][byte])
    after["g"][byte] ^= 255
    (line,) = oracle.check(engine, RANK, before, after, *rest)
    values = f" {old:#04x} {old ^ 255:#04x}"
    assert re.search(r"\b.*\b".join((facts + values).split()), line)
    assert live == ("become" in line)


def test_check_accepts_any_value_of_a_dead_byte(arrived: Arrived) -> None:
    """The byte belongs to a position after the request's end in the request's own block."""
    engine, before, after, rest = arrived
    after["g"][0 * 40 + 2 * 4] ^= 255
    assert [] == oracle.check(engine, RANK, before, after, *rest)


def test_check_returns_at_most_limit_lines(arrived: Arrived) -> None:
    """Each byte of the storage is wrong."""
    engine, before, after, rest = arrived
    after["g"] ^= 255
    assert len(oracle.check(engine, RANK, before, after, *rest, limit=7)) == 7


def test_oracle_imports_no_module_that_it_judges() -> None:
    """`kvspec.testing` does not import hypothesis or torch either, because both are slow."""
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
