"""The checker finds every planted fault and names the byte; the prover finds a planted bug.

Two layers of four heads, producer TP 4 and consumer TP 2: head h lies on producer rank h alone,
so the right descriptor of every content is known without asking the library who reads whom.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import builders
import numpy as np
import pytest

import kvspec
from kvspec import BlockTable, RankId
from kvspec.check import proof, prove
from kvspec.check.verify import verify
from kvspec.ownership.replicas import ReplicaChooser, ReplicaPolicy, tp_chooser
from kvspec.ownership.sharding import Sharding, even_sharding
from kvspec.ownership.slices import UnitRange, consumer_unit_ranges

LAYERS = ("a", "b")
HEADS, ROWS, CONTENT = 4, 4, 16
GQA: dict[str, Any] = {
    "block_size": ROWS, "total_num_kv_heads": HEADS, "head_size": 8, "dtype": "bfloat16",
}  # fmt: skip
OURS, THEIRS = (5, 1, 3), (2, 6, 0)
CACHED, NUM_TOKENS = 5, 11
Descriptors = dict[tuple[RankId, RankId], np.ndarray[Any, np.dtype[np.uint64]]]


def engine(tp: int, layout: str, spec: kvspec.LayerSpec | None = None) -> kvspec.EngineSpec:
    """Return an engine of two layers."""
    spec = spec or kvspec.FullAttentionSpec(**GQA)
    return builders.engine(spec, layers=LAYERS, tp=tp, layout=layout)


PLAN = kvspec.plan_transfer(engine(4, "LBHNC"), engine(2, "LBNHC"))
HELD = [
    {rank: kvspec.allocate(side, rank, 8) for rank in side.parallel.ranks}
    for side in (PLAN.producer, PLAN.consumer)
]
PRODUCERS, CONSUMERS = ({rank: cache for rank, (cache, _) in side.items()} for side in HELD)
REQUEST = builders.request(NUM_TOKENS, OURS, THEIRS, cached_tokens=CACHED)


@attrs.frozen
class Row:
    """The right descriptor of one content: what it carries, between which ranks, from and to."""

    layer: str
    part: str
    head: int
    token: int
    pair: tuple[RankId, RankId]
    start: int
    stop: int
    length: int = CONTENT


def consumer_of(head: int) -> RankId:
    """Return the consumer rank that has *head*: two heads each."""
    return RankId(tp=head // 2)


def source(layer: str, part: str, head: int, token: int) -> int:
    """Return where the producer rank of *head* has one content."""
    region = PRODUCERS[RankId(tp=head)].region(layer, part)
    return region.address(OURS[token // ROWS], 0, token % ROWS)


def target(layer: str, part: str, head: int, token: int, blocks: tuple[int, ...] = THEIRS) -> int:
    """Return where the consumer rank of *head* has one content."""
    region = CONSUMERS[consumer_of(head)].region(layer, part)
    return region.address(blocks[token // ROWS], head % 2, token % ROWS)


def row(layer: str, part: str, head: int, token: int) -> Row:
    """Return the right descriptor of one content."""
    pair = (RankId(tp=head), consumer_of(head))
    at = (layer, part, head, token)
    return Row(*at, pair, source(*at), target(*at))


def right() -> Iterator[Row]:
    """Yield the right descriptors, one for each content that is live and not cached."""
    for layer in LAYERS:
        for part in "kv":
            for head in range(HEADS):
                for token in range(CACHED, NUM_TOKENS):
                    yield row(layer, part, head, token)


RIGHT = tuple(right())
AT = ("b", "v", 2, 6)
"""The content at which faults are planted."""
GOOD = row(*AT)
TOLD = "consumer tp1, layer b, part v, unit 2, token 6, byte 0: "


def table(rows: Any) -> Descriptors:
    """Return *rows* by pair of ranks, as `verify` takes them."""
    found: dict[tuple[RankId, RankId], list[tuple[int, int, int]]] = {x.pair: [] for x in RIGHT}
    for each in rows:
        found.setdefault(each.pair, []).append((each.start, each.stop, each.length))
    return {pair: np.array(each, np.uint64).reshape(-1, 3) for pair, each in found.items()}


def instead(*others: Row, of: Row = GOOD) -> list[Row]:
    """Return the right rows with *others* instead of one."""
    return [each for each in RIGHT if each != of] + list(others)


def fault(rows: Any, request: kvspec.TransferRequest = REQUEST) -> kvspec.CounterExample | None:
    """Return what `verify` finds in *rows*."""
    return verify(PLAN, PRODUCERS, CONSUMERS, request, table(rows))


def moved(**changed: Any) -> list[Row]:
    """Return the right rows, with the planted one's fields changed."""
    return instead(attrs.evolve(GOOD, **changed))


HOLDER = "producer tp2 holds the right ones"
MISSING = "missing; producer tp2 should have sent it"
WRONG = f"{TOLD}read from other bytes; {HOLDER}"
SWAPPED = [row("b", "k", 2, 6), GOOD]
UNWANTED = (
    "consumer tp1, layer b, part v, unit {}, block {}, row {}, byte 0: "
    "written, although the request does not want it"
)
CACHED = (
    "consumer tp1, layer b, part v, unit {}, token {}, byte 0: "
    "written, although the request does not want it"
)
NOTHING = (
    "consumer tp0, layer a, part k, unit 0, token 5, byte 0: missing; "
    "producer tp0 should have sent it"
)
END = PRODUCERS[RankId(tp=2)].memory[-1].end
READS = "consumer tp1 reads producer tp2"


def dead(**changed: Any) -> Row:
    """Return the descriptor of a token beyond the request, in its own last blocks."""
    return attrs.evolve(row("b", "v", 2, 11), **changed)


def after_the_last() -> Row:
    """Return head 3's descriptor, read where the rank of head 2 would have it if it had any."""
    stride = PRODUCERS[RankId(tp=2)].region("b", "v").unit_stride
    right, before = row("b", "v", 3, 6), row("b", "v", 2, 6)
    return attrs.evolve(right, pair=before.pair, start=before.start + stride)


FAULTS: dict[str, tuple[Callable[[], Any], str]] = {
    "missing row": (instead, TOLD + MISSING),
    "double row": (lambda: [*RIGHT, GOOD],
                   f"{TOLD}written twice; producer tp2 should have sent it once"),
    "wrong head": (lambda: moved(start=source("b", "v", 3, 6)), WRONG),
    "wrong head's rank": (lambda: moved(start=source("b", "v", 3, 6),
                                        pair=(RankId(tp=3), RankId(tp=1))), WRONG),
    "right address, wrong rank": (lambda: moved(pair=(RankId(tp=3), RankId(tp=1))), WRONG),
    "wrong token": (lambda: moved(start=source("b", "v", 2, 7)), WRONG),
    "wrong layer": (lambda: moved(start=source("a", "v", 2, 6)), WRONG),
    "wrong block": (lambda: moved(start=source("b", "v", 2, 10)), WRONG),
    "one byte off": (lambda: moved(start=GOOD.start + 1), WRONG),
    "k of v": (lambda: moved(start=source("b", "k", 2, 6)), WRONG),
    "swapped k and v": (
        lambda: [each for each in RIGHT if each not in SWAPPED]
        + [attrs.evolve(x, start=y.start) for x, y in zip(SWAPPED, SWAPPED[::-1], strict=True)],
        f"consumer tp1, layer b, part k, unit 2, token 6, byte 0: read from other bytes; {HOLDER}"),
    "one byte short": (
        lambda: moved(length=CONTENT - 1),
        TOLD.replace("byte 0", "byte 15") + MISSING,
    ),
    "empty": (lambda: moved(length=0), TOLD + MISSING),
    "to another token": (lambda: moved(stop=target("b", "v", 2, 7)), TOLD + MISSING),
    "to a foreign block": (
        lambda: [*RIGHT, attrs.evolve(GOOD, stop=target("b", "v", 2, 6, (4, 4, 4)))],
        UNWANTED.format(0, 4, 2)),
    "to a cached token": (
        lambda: [*RIGHT, attrs.evolve(GOOD, stop=target("b", "v", 2, 4))],
        CACHED.format(2, 4)),
    "to a cached block": (
        lambda: [*RIGHT, attrs.evolve(GOOD, stop=target("b", "v", 3, 1))],
        CACHED.format(3, 1)),
    "nowhere": (
        lambda: [*RIGHT, attrs.evolve(GOOD, stop=16)],
        "consumer tp1, address 0x10: written, although no content lies there"),
    "a dead row from another request's block": (
        lambda: [*RIGHT, dead(start=PRODUCERS[RankId(tp=2)].region("b", "v").address(4, 0, 3))],
        f"{READS}, layer b, part v, unit 0, block 4, row 3, byte 0: another request's block"),
    "a dead row from beyond the memory": (
        lambda: [*RIGHT, dead(start=END)],
        f"{READS}, address {END:#x}: read, although no content lies there"),
    "a dead row from within the memory and beyond": (
        lambda: [*RIGHT, dead(start=END - 1)],
        f"{READS}, layer b, part v, unit 0, block 7, row 3, byte 15: another request's block"),
    "the unit after the last that the source has": (
        lambda: instead(after_the_last(), of=row("b", "v", 3, 6)),
        WRONG.replace("unit 2", "unit 3").replace("producer tp2", "producer tp3")),
    "nothing": (list, NOTHING),
}  # fmt: skip


@pytest.mark.parametrize(("plant", "wanted"), FAULTS.values(), ids=FAULTS)
def test_a_planted_fault_is_found_and_named(plant: Callable[[], Any], wanted: str) -> None:
    """One fault: its kind, the consumer rank, layer, part, unit and token, and who has it."""
    assert wanted == str(fault(plant()))


@pytest.mark.parametrize("at", [("a", "k", 0, 5), ("a", "v", 1, 7), ("b", "k", 3, 10), AT])
def test_a_missing_content_is_named_wherever_it_is(at: tuple[str, str, int, int]) -> None:
    """The fields are the content's own: model's head number, token position, sender."""
    found = fault(instead(of=row(*at)))
    assert (
        kvspec.CounterExample(
            kind="missing",
            consumer=consumer_of(at[2]),
            layer=at[0],
            part=at[1],
            unit=at[2],
            token=at[3],
            row=at[3],
            wanted_from=(RankId(tp=at[2]),),
        )
        == found
    )


def test_a_byte_too_many_is_named() -> None:
    """A length one too long writes into the next content; what it hits depends on what is next."""
    last = row("b", "v", 3, 8)
    found = fault(instead(attrs.evolve(last, length=CONTENT + 1), of=last))
    assert found is not None
    assert ("b", RankId(tp=1)) == (found.layer, found.consumer)
    assert (found.kind, found.token) in {("double", 9), ("unwanted", None)}


@pytest.mark.parametrize("wrong", range(4))
def test_every_write_of_a_content_is_checked_for_its_source(wrong: int) -> None:
    """Of four writes of one content, each is looked at, in whatever order they stand."""
    size = CONTENT // 4
    parts = [
        attrs.evolve(GOOD, start=GOOD.start + at, stop=GOOD.stop + at, length=size)
        for at in range(0, CONTENT, size)
    ]
    parts[wrong] = attrs.evolve(parts[wrong], start=parts[wrong].start + 1)
    for rows in (parts, parts[::-1]):
        told = f"{TOLD.replace('byte 0', f'byte {wrong * size}')}read from other bytes; {HOLDER}"
        assert told == str(fault(instead(*rows)))


def test_a_late_or_empty_write_hides_nothing() -> None:
    """Writes of no byte, and a dead row that is written along, do not hide a wrong source."""
    empty = attrs.evolve(GOOD, length=0, start=0)
    wrong = attrs.evolve(GOOD, start=GOOD.start + 1)
    assert str(fault(instead(empty, wrong, empty))) == WRONG
    assert None is fault([empty, *RIGHT, empty])


def joined() -> Descriptors:
    """Return the library's own descriptors, maximally merged."""
    return {
        (p, c): kvspec.build_table(PLAN, PRODUCERS[p], CONSUMERS[c]).descriptors(REQUEST)
        for c in CONSUMERS
        for p in PLAN.sources(c)
    }


def test_right_descriptors_cut_differently_are_accepted() -> None:
    """Content by content, in any order, half contents, or merged: all are the same bytes."""
    assert None is verify(PLAN, PRODUCERS, CONSUMERS, REQUEST)
    assert None is verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, joined())
    shuffled = list(RIGHT)
    np.random.default_rng(3).shuffle(shuffled)  # type: ignore[arg-type]
    assert None is fault(shuffled)
    half = CONTENT // 2
    halves = [
        attrs.evolve(each, start=each.start + at, stop=each.stop + at, length=half)
        for each in RIGHT
        for at in (0, half)
    ]
    assert None is fault(halves)


def test_dead_rows_of_own_blocks_may_be_written() -> None:
    """Token 11 of the last block is beyond the request: a tile that brings it along is right."""
    dead = [
        row(layer, part, head, 11) for layer in LAYERS for part in "kv" for head in range(HEADS)
    ]
    assert None is fault([*RIGHT, *dead])


@pytest.mark.parametrize("kind", ["gap", "foreign"])
def test_a_fault_in_merged_descriptors_is_named(kind: str) -> None:
    """A merged run that is cut short, or reads elsewhere, is named by its first wrong token."""
    rows = joined()
    pair = GOOD.pair
    at = int(np.argmax(rows[pair][:, 2]))
    rows[pair] = rows[pair].copy()
    if kind == "gap":
        rows[pair][at, 2] -= 1
    else:
        rows[pair][at, 0] += 1
    found = verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, rows)
    assert found is not None
    assert {"gap": "missing", "foreign": "wrong source"}[kind] == found.kind
    assert (RankId(tp=1), 2, (RankId(tp=2),)) == (found.consumer, found.unit, found.wanted_from)


WHOLE = kvspec.plan_transfer(engine(1, "LBHNC"), engine(1, "LBHNC"))
ONE = RankId()
FROM, TO = (kvspec.allocate(WHOLE.producer, ONE, 8)[0] for _ in range(2))
MERGED = builders.request(8, (0, 1), (0, 1))


def test_halves_of_a_content_may_come_from_two_replicas() -> None:
    """Bytes are what is wanted: either replica has the right ones."""
    spec = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
    plan = kvspec.plan_transfer(engine(2, "LBHNC", spec), engine(1, "LBHNC", spec))
    ours = {r: kvspec.allocate(plan.producer, r, 8)[0] for r in plan.producer.parallel.ranks}
    theirs, _ = kvspec.allocate(plan.consumer, ONE, 8)
    rows = {
        (rank, ONE): np.array(
            [
                (cache.region(x, "latent").address(block, 0, token) + at,
                 theirs.region(x, "latent").address(block, 0, token) + at, 8)
                for x in LAYERS for block in (0, 1) for token in range(4)
            ], np.uint64,
        )
        for (rank, cache), at in zip(ours.items(), (0, 8), strict=True)
    }  # fmt: skip
    assert None is verify(plan, ours, {ONE: theirs}, MERGED, rows)


def test_a_double_row_inside_a_merged_one_is_a_double() -> None:
    """A token that a long run writes already is written twice; no other token is missing."""
    rows = kvspec.build_table(WHOLE, FROM, TO).descriptors(MERGED)
    ours, theirs = (cache.region("a", "v").address(0, 1, 1) for cache in (FROM, TO))
    rows = np.concatenate([rows, np.array([[ours, theirs, CONTENT]], np.uint64)])
    found = verify(WHOLE, {ONE: FROM}, {ONE: TO}, MERGED, {(ONE, ONE): rows})
    assert found is not None
    assert ("double", "a", "v", 1, 1) == (
        found.kind, found.layer, found.part, found.unit, found.token,
    )  # fmt: skip


def test_a_double_row_after_a_doubled_dead_one_is_found() -> None:
    """A dead row written twice does no harm, and hides no harm either."""
    dead = row("a", "k", 2, 11)
    found = fault([*RIGHT, dead, dead, GOOD])
    assert found is not None
    assert f"{TOLD}written twice; producer tp2 should have sent it once" == str(found)


def test_a_token_without_a_consumer_block_is_missing() -> None:
    """The target is what the request wants, not what its table happens to hold."""
    short = attrs.evolve(REQUEST, consumer_blocks={"g": THEIRS[:2]})
    rows = [each for each in RIGHT if each.token < 2 * ROWS]
    assert None is not fault(rows, short)


def test_a_cached_block_used_twice_is_overwritten() -> None:
    """Block 2 holds the cached tokens 0..3, so tokens 8..10 must not be written there."""
    reused = attrs.evolve(REQUEST, consumer_blocks={"g": (2, 6, 2)})
    rows = [
        attrs.evolve(each, stop=target(each.layer, each.part, each.head, each.token, (2, 6, 2)))
        for each in RIGHT
    ]
    assert None is not fault(rows, reused)


def test_a_request_far_beyond_its_table_is_missing() -> None:
    """What the table lacks is told by its first token, however much it is."""
    tables = [BlockTable(blocks, 2**62 - 2**62 % ROWS - 12) for blocks in (OURS, THEIRS)]
    whole = attrs.evolve(REQUEST, num_tokens=2**62, cached_tokens=0)
    with pytest.raises(kvspec.MismatchError, match="does not hold tokens 12"):
        fault(RIGHT, whole)
    late = attrs.evolve(
        whole,
        cached_tokens=tables[0].first_token + 5,
        num_tokens=tables[0].first_token + NUM_TOKENS,
        producer_blocks={"g": tables[0]},
        consumer_blocks={"g": THEIRS},
    )
    found = fault(RIGHT, late)
    assert found is not None
    assert ("missing", late.cached_tokens) == (found.kind, found.token)
    assert None is fault(RIGHT, attrs.evolve(late, consumer_blocks={"g": tables[1]}))


def test_tokens_before_a_late_table_are_missing() -> None:
    """However many blocks before it: its own blocks hold none of them."""
    late = attrs.evolve(REQUEST, cached_tokens=0, consumer_blocks={"g": BlockTable(THEIRS, 8)})
    found = fault(RIGHT, late)
    assert found is not None
    assert ("missing", 0) == (found.kind, found.token)


@pytest.mark.parametrize("side", [0, 1])
def test_a_null_block_is_neither_read_nor_written(side: int) -> None:
    """A dead row of it is another's on the producer, and unwanted on the consumer."""
    one = kvspec.FullAttentionSpec(**GQA)
    null = attrs.evolve(engine(1, "LBHNC", one), null_block=0)
    plan = kvspec.plan_transfer(null, null)
    caches = [{ONE: kvspec.allocate(null, ONE, 8)[0]} for _ in range(2)]
    request = builders.request(7, (0, 5), (0, 6), cached_tokens=4)
    rows = kvspec.build_table(plan, caches[0][ONE], caches[1][ONE]).descriptors(request)
    assert None is verify(plan, *caches, request, {(ONE, ONE): rows})
    dead = [
        each[ONE].region("a", "k").address(block, 0, 3)
        for each, block in zip(caches, (5, 6), strict=True)
    ]
    dead[side] = caches[side][ONE].region("a", "k").address(0, 0, 3)
    rows = np.concatenate([rows, np.array([[*dead, CONTENT]], np.uint64)])
    found = verify(plan, *caches, request, {(ONE, ONE): rows})
    assert found is not None
    assert ("foreign", "unwanted")[side] == found.kind


def test_a_table_without_blocks_is_missing_everything() -> None:
    """An empty consumer table holds no token: the first wanted one is missing."""
    assert str(fault(RIGHT, attrs.evolve(REQUEST, consumer_blocks={"g": ()}))) == NOTHING


def test_every_consumer_rank_is_checked() -> None:
    """A plan of two consumer ranks is not verified by looking at one."""
    some = {RankId(tp=0): CONSUMERS[RankId(tp=0)]}
    with pytest.raises(kvspec.SpecError, match=r"consumers=.*: expected the cache of .*tp1"):
        verify(PLAN, PRODUCERS, some, REQUEST)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"producers": {}}, "producers=.*: expected the cache of"),
        ({"request": attrs.evolve(REQUEST, consumer_blocks={})},
         "consumer_blocks=.*: expected a block table for group 'g'"),
        ({"request": attrs.evolve(REQUEST, producer_blocks={})},
         "producer_blocks=.*: expected a block table for group 'g'"),
        ({"request": attrs.evolve(REQUEST, producer_blocks={"g": ()})},
         "the producer's table does not hold tokens 5..10"),
    ],
)  # fmt: skip
def test_what_verify_needs_is_asked_for_in_words(given: dict[str, Any], told: str) -> None:
    """Caches and tables that foreign descriptors were made from are asked for by name."""
    arguments: dict[str, Any] = {"producers": PRODUCERS, "request": REQUEST}
    arguments |= given
    with pytest.raises(kvspec.KVSpecError, match=told):
        verify(PLAN, consumers=CONSUMERS, descriptors=table(RIGHT), **arguments)


def test_the_library_s_own_refusals_come_through() -> None:
    """Without descriptors the request is first selected, and refused as `select` refuses it."""
    short = attrs.evolve(REQUEST, consumer_blocks={"g": THEIRS[:2]})
    with pytest.raises(kvspec.SpecError, match=r"expected blocks for tokens 5\.\.10"):
        verify(PLAN, PRODUCERS, CONSUMERS, short)


STATE = kvspec.MambaSpec.mamba2(
    num_heads=4, head_dim=2, n_groups=1, state_size=2, conv_kernel=3, dtype="bfloat16"
)


@pytest.mark.parametrize(
    ("part", "unit", "row_", "told"),
    [
        ("conv_x", 5, 1, "part conv_x, unit 5, row 1, byte 0: missing; producer tp0 should"),
        ("conv_b", 1, 0, "part conv_b, unit 1, row 0, byte 0: missing; producer tp0 should"),
        ("ssm", 3, 0, "part ssm, unit 3, row 0, byte 0: missing; producer tp0 should"),
    ],
)
def test_a_missing_byte_of_a_state_is_named(part: str, unit: int, row_: int, told: str) -> None:
    """States are told by the model's channel or head, and the row of the state."""
    plan = kvspec.plan_transfer(engine(1, "LBHNC", STATE), engine(2, "LBNHC", STATE))
    held = [
        {r: kvspec.allocate(side, r, 3) for r in side.parallel.ranks}
        for side in (plan.producer, plan.consumer)
    ]
    ours, theirs = ({rank: cache for rank, (cache, _) in side.items()} for side in held)
    request = builders.request(9, (2,), (1,))
    rank = RankId(tp=1 if part != "conv_b" else 0)
    first = theirs[rank].region("b", part)
    hole = first.address(1, unit % first.units, row_)
    rows = {}
    for each, cache in theirs.items():
        merged = kvspec.build_table(plan, ours[ONE], cache).descriptors(request).tolist()
        cuts = [
            (start + at, stop + at, 2)
            for start, stop, length in merged
            for at in range(0, length, 2)
            if each != rank or not hole <= stop + at < hole + first.content_bytes
        ]
        rows[ONE, each] = np.array(cuts, np.uint64)
    found = verify(plan, ours, theirs, request, rows)
    assert f"consumer {rank}, layer b, {told} have sent it" == str(found)


POLICIES: Any = ("spread", "first", "stripe")


def test_small_bounds_are_exact_under_every_policy() -> None:
    """Every (producer TP, consumer TP, heads) up to 6 x 6 x 8, on every consumer rank."""
    found = [proof._prove_heads(heads, 6, POLICIES) for heads in range(1, 9)]
    assert [(6 * sum(range(1, 7)), [])] * 8 == found


def test_the_proof_counts_what_it_tried() -> None:
    """Triples and rank cases are told, and progress is reported for each number of heads."""
    done: list[int] = []
    found = prove(2, 2, jobs=1, progress=done.append, replica_policies=POLICIES)
    assert proof.Proof(8, 12, ()) == found
    assert found.exact
    assert [4, 4] == done


def test_bounds_of_a_proof_are_plain_ints() -> None:
    """Bounds and policies are refused in words."""
    for call, wanted in (
        (lambda: prove(0, 1), "max_tp=0: expected an int >= 1"),
        (lambda: prove(1, True), "max_heads=True: expected an int >= 1"),  # noqa: FBT003
        (lambda: prove(1, 1, replica_policies=("all",)),  # type: ignore[arg-type]
         "replica_policy='all': expected one of spread, first, stripe, nearest"),
        (lambda: prove(1, 1, replica_policies=()), ("replica_policies=(): expected at least one "
                                                    "policy")),
        (lambda: prove(1, 1, replica_policies="first"),  # type: ignore[arg-type]
         "replica_policies='first': expected a sequence of policies"),
        (lambda: prove(257, 1), "max_tp=257: expected at most 256"),
        (lambda: prove(10**8, 10**8), "max_tp=100000000: expected at most 256"),
        (lambda: prove(1, 257), "max_heads=257: expected at most 256"),
        (lambda: prove(1, 1, jobs=0), "jobs=0: expected an int >= 1"),
        (lambda: prove(1, 1, jobs="2"),  # type: ignore[arg-type]
         "jobs='2': expected an int >= 1"),
    ):  # fmt: skip
        with pytest.raises(kvspec.SpecError) as caught:
            call()
        assert wanted == str(caught.value)


def lost(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Lose a head of the last range."""
    return [*unit_ranges[:-1], unit_ranges[-1]._replace(stop=unit_ranges[-1].stop - 1)]


def doubled(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the first range twice."""
    return [unit_ranges[0], *unit_ranges]


def test_a_null_block_is_nowhere() -> None:
    """Id -1 is no block, not the one before the first: what lies there is another part's."""
    spec = kvspec.SlidingWindowSpec(
        block_size=4, total_num_kv_heads=1, head_size=2, dtype="int8", sliding_window=5
    )
    group = kvspec.KVCacheGroup(name="w", layers=("l.0", "l.1"), spec=spec)
    engine = kvspec.EngineSpec(groups=(group,), layout="LKBNHC")
    plan, rank = kvspec.plan_transfer(engine, engine), kvspec.RankId()
    caches = [{rank: kvspec.allocate(engine, rank, 4)[0]} for _ in range(2)]
    for null in (-1, 9, 0):
        request = builders.request(8, {"w": [0, 1]}, {"w": [null, 3]}, cached_tokens=4)
        assert None is kvspec.verify(plan, *caches, request)


def elsewhere(unit_ranges: list[UnitRange]) -> list[UnitRange]:
    """Read the first range from producer rank 0."""
    return [unit_ranges[0]._replace(producer=0), *unit_ranges[1:]]


@pytest.mark.parametrize(
    ("bug", "first"),
    [
        (lost, "4 heads, TP 1 -> 1, spread: rank 0: heads 3..3 missing"),
        (doubled, "4 heads, TP 1 -> 1, spread: rank 0: heads 4.. missing or double at 0..3"),
        (elsewhere,
         "4 heads, TP 2 -> 2, spread: rank 1: producer 0 does not own heads 2..3"),
    ],
)  # fmt: skip
def test_a_planted_bug_is_found_and_named(
    bug: Callable[[list[UnitRange]], list[UnitRange]], first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Heads, both TP sizes, policy, rank and heads are in the fault."""

    def wrong(*arguments: Any) -> list[UnitRange]:
        return bug(consumer_unit_ranges(*arguments))

    monkeypatch.setattr(proof, "consumer_unit_ranges", wrong)
    _, faults = proof._prove_heads(4, 3, ("spread",))
    assert first == faults[0]
    assert all(each.startswith("4 heads, TP ") for each in faults)


def test_an_unfair_choice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading only the first replica is right, but not what `spread` promises."""

    def first(
        consumer: Sharding, producer: Sharding, rank: int, _chooser: ReplicaChooser
    ) -> list[UnitRange]:
        sides = len(producer.ranges), len(consumer.ranges)
        return consumer_unit_ranges(
            consumer, producer, rank, tp_chooser(ReplicaPolicy("first"), *sides)
        )

    monkeypatch.setattr(proof, "consumer_unit_ranges", first)
    _, faults = proof._prove_heads(1, 3, ("spread",))
    assert [
        "1 heads, TP 2 -> 2, spread: replicas of heads (0, 1) are read [2, 0] times",
        "1 heads, TP 2 -> 3, spread: replicas of heads (0, 1) are read [3, 0] times",
        "1 heads, TP 3 -> 2, spread: replicas of heads (0, 1) are read [2, 0, 0] times",
        "1 heads, TP 3 -> 3, spread: replicas of heads (0, 1) are read [3, 0, 0] times",
    ] == faults


def rounded_up(units: int, tp_size: int, granularity: int = 1) -> Sharding:
    """Return a sharding that is rounded the other way."""
    cuts = [-(-rank * units // tp_size) for rank in range(tp_size + 1)]
    ranges = tuple(range(*cuts[i : i + 2]) for i in range(tp_size))
    return (
        Sharding(units, ranges) if units > tp_size else even_sharding(units, tp_size, granularity)
    )


def test_a_wrong_sharding_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding the other way cuts heads at other places than handing them out one by one."""
    monkeypatch.setattr(proof, "even_sharding", rounded_up)
    assert [] == proof._prove_heads(4, 2, ("spread",))[1]
    faults = proof._prove_heads(5, 3, ("spread",))[1]
    assert faults[0].startswith("5 heads, TP 1 -> 2, spread: rank 0: heads ")


def test_a_head_too_many_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading more than a rank owns is told as such: heads 0 and 1 of five are its own."""
    monkeypatch.setattr(proof, "even_sharding", rounded_up)
    faults = proof._prove_heads(5, 3, ("spread",))[1]
    assert "5 heads, TP 1 -> 2, spread: rank 0: heads 2..2 read, although not its own" == faults[0]


def test_the_prover_shardings_by_itself() -> None:
    """Its own sharding is by hand: 8 heads over 3 ranks, 2 over 4."""
    assert ((0, 2), (2, 5), (5, 8)) == proof.owned_heads(8, 3)
    assert ((0, 1), (0, 1), (1, 2), (1, 2)) == proof.owned_heads(2, 4)


def test_a_window_s_dead_tokens_need_not_come() -> None:
    """Only what the window still reads is the target; what lies before it may come or not."""
    spec = kvspec.SlidingWindowSpec(**GQA, sliding_window=3)
    plan = kvspec.plan_transfer(engine(1, "LBHNC", spec), engine(1, "LBHNC", spec))
    caches = [{ONE: kvspec.allocate(plan.producer, ONE, 8)[0]} for _ in range(2)]
    request = attrs.evolve(
        MERGED, num_tokens=7, producer_blocks={"g": BlockTable((1,), 4)},
        consumer_blocks={"g": BlockTable((3,), 4)},
    )  # fmt: skip
    assert None is verify(plan, *caches, request)
    rows = kvspec.build_table(plan, caches[0][ONE], caches[1][ONE]).descriptors(request)
    found = verify(plan, *caches, request, {(ONE, ONE): rows[:-1]})
    assert found is not None
    assert ("missing", 5) == (found.kind, found.token)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({(RankId(tp=0), RankId(tp=9)): [[1, 2, 3]]}, "tp < 2"),
        ({(RankId(tp=9), RankId(tp=0)): [[1, 2, 3]]}, "tp < 4"),
        ({(0, 0): [[1, 2, 3]]}, "expected a RankId"),
        ({"tp0": [[1, 2, 3]]}, "expected keys (producer RankId, consumer RankId)"),
        ({(RankId(), RankId()): [[1, 2]]}, "(1, 2)': expected integers of shape (n, 3)"),
        ({(RankId(), RankId()): [[1.0, 2.0, 3.0]]}, "float64 of shape (1, 3)': expected integers"),
        ({(RankId(), RankId()): [[1, 2, 3], [4]]}, "[[1, 2, 3], [4]]: expected integers of shape"),
        ({(RankId(), RankId()): [[1, 2, -3]]}, "[1, 2, -3]: expected an address and a length >= 0"),
        (
            {(RankId(), RankId()): np.array([[2**63, 2, 3]], np.uint64)},
            "[9223372036854775808, 2, 3]",
        ),
        ({(RankId(), RankId()): [[2**63 - 3, 2, 3]]}, "[9223372036854775805, 2, 3]: expected"),
        (
            [1],
            "descriptors=[1]: expected a mapping from (producer RankId, consumer RankId) to rows",
        ),
    ],
)
def test_other_descriptors_are_refused(given: Any, told: str) -> None:
    """Descriptors are three integers between two ranks of the plan; nothing else is overlooked."""
    with pytest.raises(kvspec.SpecError) as caught:
        verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, given)
    assert told in str(caught.value)


def test_plain_lists_are_descriptors_too() -> None:
    """Whatever numpy reads as rows of integers is taken."""
    rows = {pair: found.tolist() for pair, found in table(RIGHT).items()}
    assert None is verify(PLAN, PRODUCERS, CONSUMERS, REQUEST, rows)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"plan": None}, "plan=None: expected a TransferPlan"),
        ({"producers": None}, "producers=None: expected a mapping from RankId to RankCache"),
        ({"consumers": [1]}, "consumers=[1]: expected a mapping from RankId to RankCache"),
        ({"request": None}, "request=None: expected a TransferRequest"),
        (
            {"consumers": CONSUMERS | {RankId(tp=2): PRODUCERS[RankId(tp=2)]}},
            f"consumers[tp2]={RankId(tp=2)!r}: expected pp < 1, pcp < 1, tp < 2, none negative",
        ),
        ({"consumers": CONSUMERS | {"a": 1}}, "consumers[a]='a': expected a RankId"),
    ],
)
def test_verify_takes_a_plan_caches_and_a_request(given: dict[str, Any], told: str) -> None:
    """Anything else is refused, with descriptors and without."""
    base: dict[str, Any] = {
        "plan": PLAN, "producers": PRODUCERS, "consumers": CONSUMERS, "request": REQUEST
    }  # fmt: skip
    for more in ({}, {"descriptors": table(RIGHT)}):
        with pytest.raises(kvspec.SpecError) as caught:
            verify(**base | more | given)
        assert told == str(caught.value)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ({"producer_blocks": {"g": []}}, "producer_blocks['g']=[]"),
        ({"consumer_blocks": {"g": []}}, "consumer_blocks['g']=[]"),
        ({"consumer_blocks": {"g": [1, 2]}}, "consumer_blocks['g']=[1, 2]"),
        ({"producer_blocks": {"g": BlockTable((1, 2), 11)}}, "producer_blocks['g']=[1, 2]"),
    ],
)
def test_a_state_without_a_block_is_refused(tables: dict[str, Any], told: str) -> None:
    """Foreign descriptors are not judged by a block that is none of the state's."""
    plan = kvspec.plan_transfer(engine(1, "LBHNC", STATE), engine(1, "LBHNC", STATE))
    caches = [{ONE: kvspec.allocate(side, ONE, 8)[0]} for side in (plan.producer, plan.consumer)]
    blocks = {"producer_blocks": {"g": [1]}, "consumer_blocks": {"g": [2]}} | tables
    request = kvspec.TransferRequest(request_id="r", num_tokens=11, **blocks)
    for descriptors in ({}, None):
        with pytest.raises(kvspec.SpecError) as caught:
            verify(plan, *caches, request, descriptors)
        wanted = "one id, the state's slot, or a block for token 10"
        assert f"{told}: expected {wanted}" == str(caught.value)


def test_a_cache_of_another_engine_is_a_mismatch() -> None:
    """Foreign descriptors are not judged by caches that the plan does not know."""
    other = engine(2, "LBNHC", kvspec.FullAttentionSpec(**GQA | {"head_size": 16}))
    caches = {rank: kvspec.allocate(other, rank, 8)[0] for rank in other.parallel.ranks}
    with pytest.raises(kvspec.MismatchError) as caught:
        verify(PLAN, PRODUCERS, caches, REQUEST, table(RIGHT))
    why = "the cache was laid out for another engine than the plan's"
    field = "consumers[tp0].engine.groups[0].spec.head_size"
    assert f"{field}: plan 8, cache 16 ({why})" == str(caught.value)


def test_a_cache_under_another_rank_is_refused() -> None:
    """A cache says whose it is."""
    swapped = {RankId(tp=0): CONSUMERS[RankId(tp=1)], RankId(tp=1): CONSUMERS[RankId(tp=0)]}
    with pytest.raises(kvspec.SpecError) as caught:
        verify(PLAN, PRODUCERS, swapped, REQUEST)
    assert "consumers[tp0]='tp1': expected the cache of that rank" == str(caught.value)


TWO = builders.engine(builders.gqa(4, block_size=4), tp=2)
BUFFER = np.zeros(1 << 16, np.uint8)


def beside(first: int, second: int, step: int) -> dict[RankId, kvspec.RankCache]:
    """Return two ranks' caches in one buffer, from these bytes on, a page every *step* bytes."""
    found = {}
    for rank, start in ((RankId(tp=0), first), (RankId(tp=1), second)):
        shape, strides = (6, 2, 4, 16), (step, 64, 16, 1)
        pages = np.lib.stride_tricks.as_strided(BUFFER[start:], shape, strides)
        found[rank] = kvspec.RankCache.from_tensors(TWO, rank, {"l": pages}, "BHNC")
    return found


def judged(consumers: dict[RankId, kvspec.RankCache], **given: Any) -> object:
    """Return what `verify` says of the library's own descriptors to these ranks."""
    plan = kvspec.plan_transfer(builders.engine(builders.gqa(4, block_size=4)), TWO)
    cache, storage = kvspec.allocate(plan.producer, RankId(), 6)
    request = builders.request(9, [3, 0, 2], [1, 5, 4])
    found = verify(plan, {RankId(): cache}, consumers, request, **given)
    assert storage
    return found


@pytest.mark.parametrize(
    ("first", "second"), [(0, 0), (0, 128), (127, 0), (0, 5 * 256), (0, 5 * 256 + 127)]
)
def test_consumer_ranks_that_share_bytes_are_refused_by_name(first: int, second: int) -> None:
    """One writes over the other: the same tensors given twice, or storage that was let go."""
    step = 256 if abs(second - first) > 128 else 128
    with pytest.raises(kvspec.SpecError) as caught:
        judged(beside(first, second, step))
    assert "consumers[tp1]='l." in str(caught.value)
    assert " where tp0 has l." in str(caught.value)
    assert None is judged(beside(first, second, step), separate_processes=True)


def test_consumer_ranks_side_by_side_in_one_memory_are_right() -> None:
    """Pages of two ranks by turns, or one rank after the other; and caches on paper."""
    assert None is judged(beside(0, 128, 256))
    assert None is judged(beside(0, 6 * 128, 128))
    paper = {rank: kvspec.plan_memory(TWO, rank, 6) for rank in TWO.parallel.ranks}
    assert None is judged(paper)
    with pytest.raises(kvspec.SpecError, match="separate_processes=1: expected True or False"):
        judged(paper, separate_processes=1)


def test_caches_on_paper_have_no_bytes_to_share() -> None:
    """Each begins at address 0, whatever its other groups begin at."""
    specs = builders.gqa(4, block_size=4), builders.mla(block_size=4)
    plan = kvspec.plan_transfer(builders.engine(*specs), builders.engine(*specs, tp=2))
    sources, targets = (
        {rank: kvspec.plan_memory(side, rank, 6) for rank in side.parallel.ranks}
        for side in (plan.producer, plan.consumer)
    )
    assert 2 == len(targets[RankId()].memory)
    tables = {"g0": [3, 0, 2], "g1": [1, 2, 3]}, {"g0": [1, 5, 4], "g1": [4, 0, 2]}
    assert None is verify(plan, sources, targets, builders.request(9, *tables))
