"""Exhibits that pair blocks and tokens wrongly, or take a block of the wrong list."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from exhibit import Exhibit
from hypothesis import strategies as st
from toy import Rows, Toy, block_pairs, gqa, latent, place, transfer, window

from kvspec import RankId
from kvspec.testing import Case
from kvspec.testing.laws import System
from kvspec.testing.world import PreparedLists, World

TOKENS = st.integers(1, 12)
CACHED = st.sampled_from((0, 4, 8))


class PairsFromTheEnd(Toy):
    """Pair the last block of one table with the last block of the other."""

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Count blocks from the end, whatever tokens they hold."""
        return block_pairs(
            case, source, target, lambda there, here: zip(there[::-1], here[::-1], strict=False)
        )


class PairsFromTheStart(Toy):
    """Pair the first block of one table with the first block of the other."""

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Count blocks from the start, although the consumer has cached some."""
        return block_pairs(case, source, target, lambda there, here: zip(there, here, strict=False))


class CutsThenPairsFromTheEnd(Toy):
    """Cut the consumer's blocks to the size of the producer's, and pair them from the end."""

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Clip the cut blocks at the end, and then take as many blocks from the other end."""
        there = case.request.producer_blocks[source.group].block_ids.tolist()
        here = case.request.consumer_blocks[target.group].block_ids.tolist()
        ratio = target.states // source.states
        cut = [(block, part * source.states) for block in here for part in range(ratio)]
        cut = cut[: len(there)]
        for block, (other, first) in zip(there[len(there) - len(cut) :], cut, strict=True):
            yield from (((block, row), (other, first + row)) for row in range(source.states))


class ClipsWindowsByBlocks(Toy):
    """Keep the last blocks of a window on each side, and pair what is left from the start."""

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Keep one block more than the window has, of the blocks of each side."""
        spec: Any = case.consumer.group(target.group).spec
        tables = case.request.producer_blocks, case.request.consumer_blocks
        there, here = (
            table[region.group].block_ids.tolist()[
                -(-(-spec.sliding_window // region.states) + 1) :
            ]
            for table, region in zip(tables, (source, target), strict=True)
        )
        ratio = target.states // source.states
        cut = [(block, part * source.states) for block in here for part in range(ratio)]
        for block, (other, first) in zip(there, cut, strict=False):
            yield from (((block, row), (other, first + row)) for row in range(source.states))


class PastesPages(Toy):
    """Write two small pages into one large page, one after the other."""

    def copies(self, world: World, producer: RankId, consumer: RankId) -> Iterator[Any]:
        """Copy pages as bytes, although a page does not hold its tokens one after the other."""
        for source, target in self.regions(world, producer, consumer):
            there, here = (
                tables[region.group].block_ids.tolist()
                for tables, region in (
                    (world.case.request.producer_blocks, source),
                    (world.case.request.consumer_blocks, target),
                )
            )
            page = source.states * source.content_bytes
            ratio = target.states // source.states
            for number, block in enumerate(there):
                other, part = here[number // ratio], number % ratio
                yield (
                    source.base + block * source.block_stride,
                    target.base + other * target.block_stride + part * page,
                    page,
                )


class FreesByTheNextQuery(Toy):
    """Free each block that the query after the prompt does not read."""

    def tokens(self, case: Case, target: Any) -> Sequence[int]:
        """Forget that the query of the last token is computed again, and reads one token more."""
        group = case.producer.group(target.group)
        spec: Any = group.spec
        first = max(0, case.request.num_tokens - spec.sliding_window + 1)
        kept = first // spec.block_size * spec.block_size
        return [token for token in super().tokens(case, target) if token >= kept]


class StrideOfDcp(Toy):
    """Divide tokens by DCP alone, although PCP divides them, too."""

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Compute the owner of a token without PCP."""
        size, block = case.producer.parallel.dcp_size, source.states
        there, here = (
            blocks[region.group]
            for blocks, region in (
                (case.request.producer_blocks, source),
                (case.request.consumer_blocks, target),
            )
        )
        for token in self.tokens(case, target):
            number, row = token // (block * size), token % block
            arrives = place(case.consumer, consumer, target, here, token)
            mine = token // block % size == producer.tp % size
            if mine and arrives is not None and number < len(there.block_ids):
                yield (int(there.block_ids[number]), row), arrives


class InterleavesByBlocks(Toy):
    """Take the tokens of context ranks for whole blocks, whatever their interleave is."""

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Divide the tokens of the producer by blocks."""
        size, block = case.producer.parallel.dcp_size, source.states
        tables = case.request.producer_blocks, case.request.consumer_blocks
        for token in self.tokens(case, target):
            if token // block % size == producer.tp % size:
                number = token // (block * size)
                there = int(tables[0][source.group].block_ids[number]), token % block
                here = place(case.consumer, consumer, target, tables[1][target.group], token)
                if here is not None:
                    yield there, here


def ids_of_the_wrong_pool(world: World, producer: RankId, consumer: RankId) -> PreparedLists:
    """Count the producer's descriptors with the number of blocks of the consumer."""
    sides = world.producers[producer][0], world.consumers[consumer][0]
    rows = [
        np.array(
            [
                (r.base, r.states * r.content_bytes, 0, r.block_stride, r.num_blocks)
                for r in side.regions
            ],
            np.uint64,
        )
        for side in sides
    ]
    tables = world.case.request.producer_blocks, world.case.request.consumer_blocks
    name = world.case.producer.groups[0].name
    blocks = sides[1].regions[0].num_blocks
    ids = [
        [number * blocks + block for number in range(len(side.regions)) for block in table]
        for side, table in zip(
            sides, (tables[0][name].block_ids, tables[1][name].block_ids), strict=True
        )
    ]
    count = min(map(len, ids))
    return PreparedLists(*rows, *(np.array(side[:count], np.int32) for side in ids))


EXHIBITS = [
    Exhibit(
        reference="vllm#50558",
        bug="Blocks are paired from the end, and the consumer has a block for a sampled token.",
        law=1,
        system=PairsFromTheEnd().system(),
        cases=st.builds(
            transfer, st.just(gqa()), tokens=TOKENS, cached=CACHED,
            spare=st.sampled_from([(0, 0), (0, 1)]),
        ),
        minimal="1 head, blocks of 4, 1 token, 1 block more on the consumer",
    ),
    Exhibit(
        reference="vllm-ascend#8908",
        bug="Blocks are paired from the end, and the producer has a block for speculative tokens.",
        law=1,
        system=PairsFromTheEnd().system(),
        cases=st.builds(
            transfer, st.just(gqa()), tokens=TOKENS, cached=CACHED,
            spare=st.sampled_from([(0, 0), (1, 0)]),
        ),
        minimal="1 head, blocks of 4, 1 token, 1 block more on the producer",
    ),
    Exhibit(
        reference="vllm#48758",
        bug="A push pairs blocks from the start, although the consumer has cached the first ones.",
        law=1,
        system=PairsFromTheStart().system(),
        cases=st.builds(transfer, st.just(gqa()), tokens=TOKENS, cached=CACHED),
        minimal="1 head, blocks of 4, 5 tokens, 4 cached",
    ),
    Exhibit(
        reference="vllm#51527",
        bug="With unequal block sizes and a cached prefix, blocks are paired from the end.",
        law=1,
        system=CutsThenPairsFromTheEnd().system(),
        cases=st.builds(
            transfer, st.just(gqa()), tokens=st.integers(1, 16), cached=st.sampled_from((0, 8)),
            blocks=st.sampled_from([(4, 4), (4, 8)]),
        ),
        minimal="1 head, blocks of 4 to 8, 9 tokens, 8 cached",
    ),
    Exhibit(
        reference="vLLM 0.33, windows with unequal blocks",
        bug="Each side keeps the last blocks of a window, and the rest is paired from the start.",
        law=1,
        system=ClipsWindowsByBlocks().system(),
        cases=st.builds(
            transfer, st.just(window(8)), tokens=st.integers(1, 24),
            blocks=st.just((4, 8)),
        ),
        minimal="1 head, window 8, blocks of 4 to 8, 19 tokens",
    ),
    Exhibit(
        reference="vLLM 0.32, freed window token",
        bug="Blocks are freed that the next query does not read, but the last token of the prompt"
        " is computed again.",
        law=1,
        system=FreesByTheNextQuery().system(),
        cases=st.builds(
            transfer, st.builds(window, st.integers(1, 8), extra_retained_tokens=st.just(1)),
            tokens=TOKENS,
        ),
        minimal="1 head, window 1, blocks of 4, 4 tokens",
    ),
    Exhibit(
        reference="vLLM 0.32, CPU attention with blocks of 32 and 64",
        bug="Two pages are written into one larger page as they are, although it holds the keys of"
        " all tokens column by column.",
        law=1,
        system=PastesPages().system(),
        cases=st.builds(
            transfer,
            st.builds(
                gqa, st.just(1), block_size=st.just(32),
                page_format=st.sampled_from(("plain", "keys-transposed")),
            ),
            tokens=st.integers(1, 70), blocks=st.sampled_from([(32, 32), (32, 64)]),
            layouts=st.just(("LBHKNC", "LBHKNC")),
        ),
        minimal="1 head, layout LBHKNC to LBHKNC, blocks of 32 to 64, 1 token",
    ),
    Exhibit(
        reference="vllm#38433",
        bug="The stride of context ranks is DCP, not PCP times DCP.",
        law=1,
        system=StrideOfDcp().system(),
        cases=st.builds(
            transfer, st.just(latent()), tp=st.just((2, 1)), tokens=TOKENS,
            sizes=st.sampled_from(
                [({"dcp_size": 2, "pcp_size": pcp, "interleave_size": 4}, {}) for pcp in (1, 2)]
            ),
        ),
        minimal="latent of 2, TP 2 to 1, DCP 2 to 1, PCP 2 to 1, interleave 4 to 1, blocks of 4,"
        " 1 token",
    ),
    Exhibit(
        reference="vLLM 0.33, interleave of context ranks",
        bug="The interleave is not compared, and tokens that alternate are copied as blocks.",
        law=1,
        system=InterleavesByBlocks().system(),
        cases=st.builds(
            transfer, st.just(latent()), tp=st.just((2, 1)), tokens=TOKENS,
            sizes=st.sampled_from(
                [({"dcp_size": 2, "interleave_size": size}, {}) for size in (4, 2, 1)]
            ),
        ),
        minimal="latent of 2, TP 2 to 1, DCP 2 to 1, interleave 1 to 1, blocks of 4, 2 tokens",
    ),
    Exhibit(
        reference="vllm#33795",
        bug="The numbers of descriptors on one side are computed from the pool of the other side.",
        law=10,
        system=System(name="ids of the wrong pool", prepared=ids_of_the_wrong_pool),
        cases=st.builds(
            transfer, st.just(latent()), layers=st.just((("l.0", "l.1"), ("l.0", "l.1"))),
            tokens=TOKENS, spare=st.sampled_from([(0, 0), (0, 1), (0, 2)]),
        ),
        minimal="latent of 2, 2 layers, blocks of 4, 1 token, 1 block more on the consumer",
    ),
]  # fmt: skip
