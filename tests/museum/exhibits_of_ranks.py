"""Exhibits that map ranks wrongly: who reads which heads, and who tells whom."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs
from exhibit import Exhibit
from hypothesis import strategies as st
from toy import (
    POWERS,
    TP,
    HeadSlice,
    Toy,
    delta_net,
    gqa,
    head_reads,
    latent,
    mamba2,
    transfer,
    window,
)

from kvspec import RankId
from kvspec.check.counting import rank_units
from kvspec.testing import Case
from kvspec.testing.laws import KVSPEC, Move, System
from kvspec.testing.world import Pair

HEADS = st.builds(transfer, st.builds(gqa, POWERS), tp=TP)
"""One layer of attention between engines of any TP sizes."""
NARROWING = st.sampled_from([(p, d) for d in (1, 2, 4) for p in (1, 2, 4, 8) if p >= d])
"""TP sizes with at least as many producer ranks as consumer ranks."""
FEWER = st.builds(transfer, st.builds(gqa, POWERS), tp=NARROWING)
"""One layer of attention between engines of these TP sizes."""


def rfc_sketch(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Take a consumer rank modulo the producer's ranks, and skip producers beyond the consumer's.

    The sketch was read literally. Its authors may mean it differently.
    """
    theirs, mine = max(1, heads // p), max(1, heads // d)
    for source in range(p):
        turn = rank
        if d * mine > p * theirs:
            turn %= p
        elif source >= d:
            continue
        start = max(source * theirs, turn * mine)
        stop = min((source + 1) * theirs, (turn + 1) * mine)
        if start < stop:
            first, own = source * theirs, turn * mine
            yield source, range(start - first, stop - first), range(start - own, stop - own)


def replicas_as_heads(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Compute the number of all heads from those of one rank, although ranks share heads."""
    total = max(1, heads // p) * p
    theirs, mine = total // p, max(1, total // d)
    for source in range(p):
        start = max(source * theirs, rank * mine)
        stop = min((source + 1) * theirs, (rank + 1) * mine)
        if start < stop:
            first, own = source * theirs, rank * mine
            yield source, range(start - first, stop - first), range(start - own, stop - own)


def replicas_in_turn(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Give the ranks the heads 0, 1, 0, 1 instead of 0, 0, 1, 1."""
    mine = max(1, heads // d)
    first = rank * mine if heads >= d else rank % heads
    for at, head in enumerate(range(first, first + mine)):
        source = head * p // heads
        own = -(-source * heads // p)
        yield source, range(head - own, head - own + 1), range(at, at + 1)


def bytes_follow_tp(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Assert that a rank of twice the TP size has half of the bytes."""
    theirs, mine = max(1, heads // p), max(1, heads // d)
    assert theirs * p == mine * d, f"expected a block of {theirs * p} heads, got {mine * d}"
    yield from replicas_as_heads(heads, p, d, rank)


def replica_holds_all(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Take each rank of a producer with shared heads for one that holds all heads."""
    mine = max(1, heads // d)
    if p > heads:
        yield rank * p // d, range(mine), range(mine)
    else:
        yield from replicas_as_heads(heads, p, d, rank)


def reads_each_replica(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Read each producer rank of the window of ranks, also those that hold the same head."""
    theirs = max(1, heads // p)
    for source in range(rank * p // d, (rank + 1) * p // d):
        head = source * heads // p - rank * heads // d
        yield source, range(theirs), range(head, head + theirs)


def one_reader_a_head(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Push each head to the first decoder rank that holds it."""
    if d <= heads or rank % (d // heads) == 0:
        yield from right_slices(heads, p, d, rank)


def by_index(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Pair the n-th head of a consumer rank with the n-th head of a producer rank."""
    mine = max(1, heads // d)
    yield rank * p // d, range(mine), range(mine)


def right_slices(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Read each head from the first producer rank that holds it."""
    mine, theirs = max(1, heads // d), max(1, heads // p)
    for at in range(mine):
        head = rank * heads // d + at
        source = head // theirs if heads >= p else head * p // heads
        inside = head % theirs
        yield source, range(inside, inside + 1), range(at, at + 1)


def file_row(heads: int, size: int) -> int:
    """Return the heads of a stored page: those of one rank, times the ranks."""
    return max(1, heads // size) * size


def reads_whole_rows(heads: int, p: int, d: int, rank: int) -> Iterator[HeadSlice]:
    """Read a page of a file, whose name is the same for each TP size.

    If ranks share heads, a page is longer than its heads. A reader that expects a longer page reads
    too few bytes. Then it loads nothing, and deletes the file.
    """
    if file_row(heads, d) <= file_row(heads, p):
        yield from right_slices(heads, p, d, rank)


def dedup_for_pushes(case: Case, role: str) -> Iterator[Move]:
    """Push each head of a producer rank once, as a pull that reads no replica twice would do."""
    pull: Any = KVSPEC.moves
    seen = set()
    for move in pull(case, role):
        key = move.producer, move.layer, move.part, move.units
        if role == "consumer" or key not in seen:
            yield move
        seen.add(key)


def one_factor_for_all(case: Case, role: str) -> Iterator[Move]:
    """Read each layer from rank 0, since the ranks replicate the latent."""
    for move in states_by_ratio(case, right=True):
        units = rank_units(case.producer, RankId(), *_part(case, move.layer, move.part))
        yield attrs.evolve(move, producer=RankId(), producer_units=range(len(units)))


def scaled_states(case: Case, role: str) -> Iterator[Move]:
    """Divide all parts of a Mamba2 state by the ratio of the TP sizes, also replicated B and C."""
    yield from states_by_ratio(case, right=False)


def states_by_ratio(case: Case, *, right: bool) -> Iterator[Move]:
    """Yield the moves of all parts from a producer to a consumer of a multiple of its TP size."""
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    for consumer in case.consumer.parallel.ranks:
        source = RankId(tp=consumer.tp * p // d)
        for group in case.consumer.groups:
            for layer in group.layers:
                for part in group.spec.of_layer(layer).parts:
                    own = rank_units(case.consumer, consumer, part, group)
                    held = rank_units(case.producer, source, part, group)
                    first = consumer.tp % (d // p) * len(own)
                    if right:
                        first = held.index(own[0])
                    yield Move(
                        producer=source, consumer=consumer, layer=layer, part=part.name,
                        units=range(own[0], own[-1] + 1), consumer_units=range(len(own)),
                        producer_units=range(first, first + len(own)),
                    )  # fmt: skip


def _part(case: Case, layer: str, name: str) -> tuple[Any, Any]:
    group = next(group for group in case.producer.groups if layer in group.layers)
    return next(p for p in group.spec.of_layer(layer).parts if p.name == name), group


def always_rank_0(case: Case, role: str) -> Iterator[Move]:
    """Read a latent, which all ranks hold, from rank 0."""
    right: Any = KVSPEC.moves
    return (attrs.evolve(move, producer=RankId()) for move in right(case, role))


def sharded_region(case: Case, role: str) -> Iterator[Move]:
    """Take each region of a model with heads for one that the ranks divide, also the indexer."""
    right: Any = KVSPEC.moves
    p, d = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    for move in right(case, role):
        if move.part == "latent" and d > p:
            turn = move.consumer.tp % (d // p)
            move = attrs.evolve(move, producer_units=range(turn, turn + 1))  # noqa: PLW2901
        yield move


def without_drafts(case: Case, role: str) -> Iterator[Move]:
    """Leave out the groups of draft layers, and report nothing."""
    right: Any = KVSPEC.moves
    return (move for move in right(case, role) if "draft" not in move.layer)


def first_stage(case: Case, role: str) -> Iterator[Move]:
    """Connect to the ports of the first pipeline stage alone."""
    right: Any = KVSPEC.moves
    return (move for move in right(case, role) if not move.producer.pp)


def one_context_rank(case: Case, role: str) -> Iterator[Move]:
    """Read the whole prompt from one source rank."""
    right: Any = KVSPEC.moves
    return (move for move in right(case, role) if move.producer.tp == 0)


def readers_alone(case: Case, role: str) -> Iterator[Pair]:
    """Notify the ranks that were read. A rank that nobody reads waits for nobody."""
    right: Any = KVSPEC.moves
    yield from {(move.producer, move.consumer) for move in right(case, role)}


def readers_of_one_stage(case: Case, role: str) -> Iterator[Pair]:
    """Wait only for the TP ranks of the consumer, and not for those of its other stages."""
    right: Any = KVSPEC.tells
    for producer, consumer in right(case, role):
        if role == "consumer" or consumer.pp == 0:
            yield producer, consumer


class FullLayersAlone(Toy):
    """Send only the state types that the connector knows: no window is one of them."""

    def regions(self, world: Any, producer: RankId, consumer: RankId) -> Iterator[Any]:
        """Skip windows."""
        for source, target in super().regions(world, producer, consumer):
            spec = world.case.consumer.group(target.group).spec
            if not hasattr(spec, "sliding_window"):
                yield source, target


class FirstOfEachAddress(Toy):
    """Register one region for each address, and move it for the group that came first."""

    def regions(self, world: Any, producer: RankId, consumer: RankId) -> Iterator[Any]:
        """Skip regions whose address was seen."""
        seen = set()
        for source, target in super().regions(world, producer, consumer):
            if target.base not in seen:
                yield source, target
            seen.add(target.base)


class LengthOfTheFirst(Toy):
    """Fold the regions of one address, and keep the length of the first."""

    def length(self, world: Any, producer: RankId, source: Any, target: Any) -> int:
        """Return the length of the first region that has the address of *source*."""
        regions = world.producers[producer][0].regions
        return int(next(r for r in regions if r.base == source.base).content_bytes)


class ByPlace(Toy):
    """Pair the n-th region of one rank with the n-th region of the other."""

    def regions(self, world: Any, producer: RankId, consumer: RankId) -> Iterator[Any]:
        """Ignore the names of the layers."""
        sides = world.producers[producer][0].regions, world.consumers[consumer][0].regions
        yield from zip(*sides, strict=False)


class ConvAsOnePiece(Toy):
    """Divide the conv state of a rank as one piece: q, k and v, or x, B and C of Mamba2."""

    def copies(self, world: Any, producer: RankId, consumer: RankId) -> Iterator[Any]:
        """Copy each tensor of a state as one run to its share of the consumer's tensor."""
        p, d = (s.parallel.tp_size for s in (world.case.producer, world.case.consumer))
        sides = world.producers[producer][0].regions, world.consumers[consumer][0].regions
        for tensor in ("conv", "ssm"):
            theirs, mine = ([r for r in side if r.part.startswith(tensor)] for side in sides)
            length, whole = (
                sum(r.units * r.states * r.content_bytes for r in side) for side in (theirs, mine)
            )
            start = whole * (producer.tp % max(1, p // d)) // max(1, p // d)
            if producer.tp * d // p == consumer.tp:
                yield theirs[0].base, mine[0].base + start, min(length, whole - start)


EXHIBITS = [
    Exhibit(
        reference="vllm#42082, slicing sketch",
        bug="The consumer's rank is taken modulo the producer's TP size, and producer ranks from"
        " the consumer's TP size on are skipped.",
        law=1,
        system=head_reads(rfc_sketch),
        cases=HEADS,
        minimal="2 heads, TP 2 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#45330",
        bug="An assertion expects that the bytes of a rank are proportional to 1/TP. A rank has at"
        " least one head.",
        law=1,
        system=head_reads(bytes_follow_tp),
        cases=HEADS,
        minimal="1 head, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#52516",
        bug="A rank of a producer whose ranks share heads is read as if it held all of them.",
        law=1,
        system=head_reads(replica_holds_all),
        cases=FEWER,
        minimal="2 heads, TP 4 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#19086",
        bug="The number of all heads is computed from those of one rank, so replicas count twice.",
        law=1,
        system=head_reads(replicas_as_heads),
        cases=FEWER,
        minimal="2 heads, TP 4 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#23746",
        bug="Replicas of heads are given to the ranks in turn, not side by side.",
        law=1,
        system=head_reads(replicas_in_turn),
        cases=HEADS,
        minimal="2 heads, TP 1 to 4, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#37635",
        bug="Each rank of the producer is read, so a head that two ranks hold arrives twice.",
        law=1,
        system=head_reads(reads_each_replica),
        cases=FEWER,
        minimal="1 head, TP 2 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm-ascend#5846",
        bug="The producer pushes a head to one of the decoder ranks that hold it.",
        law=1,
        system=head_reads(one_reader_a_head),
        cases=HEADS,
        minimal="1 head, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vLLM 0.33, push to replicas",
        bug="A push skips equal heads as a pull does, so some consumer ranks get nothing.",
        law=3,
        system=System(name="dedup for pushes", moves=dedup_for_pushes),
        cases=HEADS,
        minimal="1 head, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vLLM 0.33, canonical pages",
        bug="A stored page has the bytes of a rank times the ranks. A reader with more ranks than"
        " heads expects a longer page, loads nothing, and deletes the file.",
        law=1,
        system=head_reads(reads_whole_rows),
        cases=HEADS,
        minimal="1 head, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#40727",
        bug="All ranks hold the latent, but all readers read rank 0.",
        law=6,
        system=System(name="always rank 0", moves=always_rank_0),
        cases=st.builds(transfer, st.just(latent()), tp=TP),
        minimal="latent of 2, TP 2 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm-rbln#1011",
        bug="Heads are paired by their places, so all lengths agree and the heads differ.",
        law=5,
        system=head_reads(by_index),
        cases=HEADS,
        minimal="2 heads, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#49499",
        bug="The latent is equal on all ranks, so the states of rank 0 are loaded by all ranks.",
        law=1,
        system=System(name="one factor for all", moves=one_factor_for_all),
        cases=st.builds(transfer, st.just(latent()), st.just(delta_net()), tp=st.sampled_from(
            [(1, 1), (2, 2), (4, 4)]
        )),
        minimal="latent of 2 and delta net, TP 2 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#55208",
        bug="B and C of Mamba2 are replicated, but their offsets follow the ratio of the TP sizes.",
        law=1,
        system=System(name="scaled states", moves=scaled_states),
        cases=st.builds(transfer, st.builds(mamba2, st.sampled_from((1, 2, 4))), tp=st.sampled_from(
            [(1, 1), (1, 2), (1, 4), (2, 2), (2, 4)]
        )),
        minimal="Mamba2, TP 1 to 2, 1 token",
    ),
    Exhibit(
        reference="vllm#55523",
        bug="The indexer's keys, which each rank holds, are divided like the heads of the model.",
        law=1,
        system=System(name="sharded region", moves=sharded_region),
        cases=st.builds(transfer, st.builds(gqa, st.just(4)), st.just(latent()), tp=TP),
        minimal="4 heads and latent of 2, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#54926",
        bug="Draft layers are left out of the transfer without a word.",
        law=1,
        system=System(name="without drafts", moves=without_drafts),
        cases=st.builds(
            transfer, st.just(gqa()), tp=TP,
            layers=st.sampled_from([(("l",), ("l",)), (("l", "draft"), ("l", "draft"))]),
        ),
        minimal="1 head, layers l and draft, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm-ascend#16149",
        bug="The consumer connects to the first pipeline stage alone.",
        law=1,
        system=System(name="first stage", moves=first_stage),
        cases=st.builds(
            transfer, st.just(gqa()), tp=TP, layers=st.just((("l.0", "l.1"), ("l.0", "l.1"))),
            sizes=st.sampled_from([({}, {}), ({"pp_size": 2}, {})]),
        ),
        minimal="1 head, 2 layers, PP 2 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#57389",
        bug="The receiver reads the whole prompt from one rank, although context ranks divide it.",
        law=1,
        system=System(name="one context rank", moves=one_context_rank),
        cases=st.builds(
            transfer, st.just(latent()), tp=st.sampled_from([(1, 1), (2, 1)]),
            sizes=st.just(({}, {})),
        ) | st.builds(
            transfer, st.just(latent()), tp=st.just((2, 1)),
            sizes=st.just(({"dcp_size": 2}, {})),
        ),
        minimal="latent of 2, TP 2 to 1, DCP 2 to 1, interleave 1 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm-ascend#10246",
        bug="A rank that nobody reads is never told that the request is done.",
        law=7,
        system=System(name="readers alone", moves=KVSPEC.moves, tells=readers_alone),
        cases=HEADS,
        minimal="1 head, TP 2 to 1, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#56033",
        bug="The producer counts the consumer's TP ranks, and frees the request before other"
        " stages have read it.",
        law=7,
        system=System(name="readers of one stage", tells=readers_of_one_stage),
        cases=st.builds(
            transfer, st.just(gqa()), tp=TP, layers=st.just((("l.0", "l.1"), ("l.0", "l.1"))),
            sizes=st.sampled_from([({}, {}), ({}, {"pp_size": 2})]),
        ),
        minimal="1 head, 2 layers, PP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#18939",
        bug="Only the state type that the connector knows is sent, and windows wait for ever.",
        law=1,
        system=FullLayersAlone().system(),
        cases=st.builds(
            transfer, st.just(gqa()), st.sampled_from([gqa(), window(6)]),
            tokens=st.integers(1, 9),
        ),
        minimal="1 head and 1 head, window 6, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#22060",
        bug="The conv state is three segments, and is merged as if it were one.",
        law=1,
        system=ConvAsOnePiece().system(),
        cases=st.builds(transfer, st.just(delta_net()), tp=NARROWING),
        minimal="delta net, TP 2 to 1, 1 token",
    ),
    Exhibit(
        reference="SGLang 0.5.23, conv states of Mamba2",
        bug="Only delta nets name the segments of their conv state, so x, B and C of Mamba2 are"
        " merged as if they were one.",
        law=1,
        system=ConvAsOnePiece().system(),
        cases=st.builds(transfer, st.just(mamba2(4)), tp=st.sampled_from(
            [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2)]
        )),
        minimal="Mamba2, TP 2 to 1, 1 token",
    ),
    Exhibit(
        reference="sglang#33041",
        bug="Regions are paired in the order of registration, and one side has draft layers first.",
        law=1,
        system=ByPlace().system(),
        cases=st.builds(
            transfer, st.just(gqa()), tokens=st.integers(1, 5),
            layers=st.sampled_from(
                [(("l", "draft"), ("l", "draft")), (("l", "draft"), ("draft", "l"))]
            ),
        ),
        minimal="1 head, layers l and draft to draft and l, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#46407",
        bug="Layers that share an address are registered once, and only the first of them moves.",
        law=1,
        system=FirstOfEachAddress().system(),
        cases=st.builds(
            transfer, st.just(gqa()), st.just(gqa()), tokens=st.integers(1, 5),
            shared=st.booleans(),
        ),
        minimal="1 head and 1 head, one memory, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#57661",
        bug="Regions of one address are folded, and the length of the first is used for all.",
        law=1,
        system=LengthOfTheFirst().system(),
        cases=st.builds(
            transfer,
            st.builds(latent, st.integers(1, 3), page_size_padded=st.just(12)),
            st.builds(latent, st.integers(1, 3), page_size_padded=st.just(12)),
            tokens=st.integers(1, 5), shared=st.booleans(),
        ),
        minimal="latent of 1 and latent of 2, one memory, blocks of 4, 1 token",
    ),
]  # fmt: skip
