"""Exhibits that compute addresses and lengths wrongly, or move what must be refused."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from exhibit import Exhibit
from hypothesis import strategies as st
from toy import SMALL_TP, Toy, gqa, latent, place, transfer

import kvspec
from kvspec import RankId
from kvspec.testing import Case
from kvspec.testing.laws import KVSPEC, System
from kvspec.testing.world import ByteCopy, World

TOKENS = st.integers(1, 9)
LAYERS = ("l.0", "l.1"), ("l.0", "l.1")


def by_head(region: Any, block: int, row: int, head: int) -> int:
    """Return the address of a token in pages that hold one head after the other."""
    content = 2 * region.content_bytes  # A token is a key, then a value.
    value = region.part == "v"
    inside = (head * region.states + row) * content + value * region.content_bytes
    return int(region.base - value * region.content_bytes + block * region.block_stride + inside)


class PaddingInHeads(Toy):
    """Divide the padded page by heads."""

    def address(self, region: Any, block: int, row: int, head: int) -> int:
        """Compute the distance of two heads from the bytes of the page."""
        heads = region.block_stride // region.units
        content = 2 * region.content_bytes
        return int(region.base + block * region.block_stride + head * heads + row * content)


class HeadsOuter(Toy):
    """Take each page for one that holds one head after the other."""

    def address(self, region: Any, block: int, row: int, head: int) -> int:
        """Ignore the layout."""
        return by_head(region, block, row, head)


class PermutesTheFirstGroup(Toy):
    """Reorder heads and tokens after the transfer, in the first group alone."""

    def address(self, region: Any, block: int, row: int, head: int) -> int:
        """Leave the pages of other groups as they came: one head after the other."""
        if region.group in ("g0", "full"):
            return super().address(region, block, row, head)
        return by_head(region, block, row, head)


class StrideFromShape(Toy):
    """Compute the distance of two blocks from the shape of one."""

    def address(self, region: Any, block: int, row: int, head: int) -> int:
        """Forget that the blocks of other layers may lie between."""
        page = 2 * region.units * region.states * region.content_bytes
        return int(region.address(0, head, row) + block * page)


class SizeOfTheFirstGroup(Toy):
    """Read the size of a row from the pool of layer 0."""

    def length(self, world: World, producer: RankId, source: Any, target: Any) -> int:
        """Return the size of a row of the first region."""
        return int(world.producers[producer][0].regions[0].content_bytes)


class EvenlyDivided(Toy):
    """Divide all bytes of a request evenly among the decode ranks."""

    def length(self, world: World, producer: RankId, source: Any, target: Any) -> int:
        """Return the share of one rank, also if several ranks hold a head."""
        spec: Any = world.case.consumer.groups[0].spec
        ranks = world.case.consumer.parallel.tp_size
        return int(target.content_bytes * spec.total_num_kv_heads // max(
            ranks, spec.total_num_kv_heads
        ))  # fmt: skip


class SlicesByRatio(Toy):
    """Give each decoder rank a slice of the prefill rank, by the ratio of the TP sizes."""

    def heads(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[tuple[int, int]]:
        """Ignore that the ratio may be larger than the heads of the prefill rank."""
        ratio = max(1, case.consumer.parallel.tp_size // case.producer.parallel.tp_size)
        if consumer.tp // ratio == producer.tp:
            for place in range(target.units):
                yield consumer.tp % ratio * target.units + place, place


class OneCopyEachLayer(Toy):
    """Copy each layer of a block alone, since one side declares its layers separate."""

    def copies(self, world: World, producer: RankId, consumer: RankId) -> Iterator[ByteCopy]:
        """Copy whole pages. In memory, the pages of a block may follow one another."""
        request = world.case.request
        for source, target in self.regions(world, producer, consumer):
            tables = request.producer_blocks[source.group], request.consumer_blocks[target.group]
            for there, here in zip(*(table.block_ids.tolist() for table in tables), strict=True):
                page = source.states * source.content_bytes
                yield source.address(there, 0, 0), target.address(here, 0, 0), page


def saves_before_the_draft_runs(
    world: World, producer: RankId, consumer: RankId, layers: frozenset[str], tokens: range
) -> Iterable[ByteCopy]:
    """Save all layers when the first ones are computed. The draft layer runs later."""
    steps: Any = KVSPEC.steps
    every = frozenset(layer for group in world.case.consumer.groups for layer in group.layers)
    return steps(world, producer, consumer, every, tokens) if min(every) in layers else []


def rotary(**fields: Any) -> kvspec.MLAAttentionSpec:
    """Return a latent whose last elements are rotated, as DeepSeek's."""
    return latent(4, **fields)


def _two_layouts(tp: tuple[int, int], tokens: int, layout: str) -> tuple[Case, Case]:
    """Return one request in LBHNC, and the same request in *layout*."""
    first, second = (
        transfer(gqa(2), tp=tp, tokens=tokens, layouts=(name, name)) for name in ("LBHNC", layout)
    )
    return first, second


class OneFileForAllSizes(Toy):
    """Store the cache of each rank after that of the last one, under a name without TP size."""

    def copies(self, world: Any, producer: RankId, consumer: RankId) -> Iterator[Any]:
        """Copy what two ranks have at the same place of the file."""
        case, request = world.case, world.case.request
        written = self.file(case, case.producer, world.producers, request.producer_blocks)
        read = self.file(case, case.consumer, world.consumers, request.consumer_blocks)
        for (rank, there, _), (other, here, length) in zip(written, read, strict=True):
            if (rank, other) == (producer, consumer):
                yield there, here, length

    def file(self, case: Case, side: Any, held: Any, tables: Any) -> Iterator[Any]:
        """Yield the rank, the address and the bytes of each row, in the order of the file."""
        for rank, (cache, _) in held.items():
            for region in cache.regions:
                for token in self.tokens(case, region):
                    spot: Any = place(side, rank, region, tables[region.group], token)
                    for head in range(region.units):
                        yield rank, self.address(region, *spot, head), region.content_bytes


def _through_a_file(heads: int, sizes: tuple[int, int], tokens: int) -> tuple[Case, Case]:
    """Return a transfer between equal engines, and one whose consumer has another TP size."""
    same, other = (sizes[0], sizes[0]), sizes
    return (
        transfer(gqa(heads), tp=same, tokens=tokens),
        transfer(gqa(heads), tp=other, tokens=tokens),
    )


EXHIBITS = [
    Exhibit(
        reference="vllm#52516, padded pages",
        bug="The distance of two heads is the padded page divided by the heads.",
        law=1,
        system=PaddingInHeads().system(),
        cases=st.builds(
            transfer,
            st.builds(gqa, st.just(2), page_size_padded=st.sampled_from((None, 34, 36))),
            tp=SMALL_TP, tokens=TOKENS,
        ),
        minimal="2 heads, pages padded to 34, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="TensorRT-LLM#6507",
        bug="Pages are divided as if they held one head after the other, but the backend's pages"
        " hold one token after the other.",
        law=9,
        system=HeadsOuter().system(),
        cases=st.builds(
            _two_layouts, SMALL_TP, st.sampled_from((4, 8)), st.sampled_from(("LBHNC", "LBNHC"))
        ),
        minimal="2 heads, TP 1 to 2, blocks of 4, 4 tokens;"
        " 2 heads, TP 1 to 2, layout LBNHC to LBNHC, blocks of 4, 4 tokens",
    ),
    Exhibit(
        reference="vllm#55191",
        bug="A file has the layers of one rank after those of the other, and engines of any TP size"
        " share its name.",
        law=4,
        system=OneFileForAllSizes().system(),
        cases=st.builds(
            _through_a_file, st.sampled_from((2, 4)),
            st.sampled_from([(1, 1), (2, 2), (1, 2), (2, 1)]), TOKENS,
        ),
        minimal="2 heads, blocks of 4, 1 token; 2 heads, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#32204",
        bug="Pages are reordered after the transfer, but only those of the first group.",
        law=1,
        system=PermutesTheFirstGroup().system(),
        cases=st.builds(
            transfer, st.just(gqa(2)), st.just(gqa(2)), tokens=TOKENS,
            layouts=st.sampled_from([("LBHNC", "LBHNC"), ("LBHNC", "LBNHC")]),
        ),
        minimal="2 heads and 2 heads, layout LBHNC to LBNHC, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#36867",
        bug="A kernel computes the distance of two blocks from a shape, but the blocks of another"
        " layer lie between.",
        law=1,
        system=StrideFromShape().system(),
        cases=st.builds(
            transfer, st.just(gqa()), tokens=TOKENS, layers=st.just(LAYERS),
            layouts=st.sampled_from([("LBHNC", "LBHNC"), ("BLHNC", "LBHNC")]),
        ),
        minimal="1 head, 2 layers, layout BLHNC to LBHNC, blocks of 4, 5 tokens",
    ),
    Exhibit(
        reference="TensorRT-LLM#16505",
        bug="The size of a row is that of layer 0, for all layers.",
        law=1,
        system=SizeOfTheFirstGroup().system(),
        cases=st.builds(
            transfer, st.builds(latent, st.integers(1, 3)), st.builds(latent, st.integers(1, 3)),
            tokens=TOKENS,
        ),
        minimal="latent of 1 and latent of 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="NVIDIA KVBench, traffic matrix",
        bug="The bytes of a request are divided evenly by TP, but ranks that share a head each"
        " read all of it.",
        law=1,
        system=EvenlyDivided().system(),
        cases=st.builds(
            transfer, st.builds(gqa, st.sampled_from((1, 2)), head_size=st.just(4)),
            tp=st.sampled_from([(1, 1), (1, 2), (2, 2), (2, 4)]), tokens=TOKENS,
        ),
        minimal="1 head, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#31295",
        bug="The slice of a decoder rank follows the ratio of the TP sizes, and ends after the"
        " memory of a prefill rank with fewer heads.",
        law=10,
        system=SlicesByRatio().system(),
        cases=st.builds(
            transfer, st.builds(gqa, st.sampled_from((1, 2))), tokens=TOKENS,
            tp=st.sampled_from([(1, 1), (1, 2), (2, 2), (1, 4)]),
        ),
        minimal="1 head, TP 1 to 2, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="sglang#18968",
        bug="Each token of each head is a copy of its own.",
        law=8,
        system=Toy().system(),
        cases=st.builds(transfer, st.just(latent()), tokens=TOKENS),
        minimal="latent of 2, blocks of 4, 2 tokens",
    ),
    Exhibit(
        reference="dynamo#12750",
        bug="Each layer of a block is a copy of its own, although all layers of a block are one"
        " run of bytes on both sides.",
        law=8,
        system=OneCopyEachLayer().system(),
        cases=st.builds(
            transfer, st.just(latent()), tokens=st.sampled_from((4, 8)), layers=st.just(LAYERS),
            layouts=st.just(("BLHNC", "BLHNC")),
        ),
        minimal="latent of 2, 2 layers, layout BLHNC to BLHNC, blocks of 4, 4 tokens",
    ),
    Exhibit(
        reference="vllm#29503",
        bug="Engines of different models exchange bytes, since nothing compares them.",
        law=11,
        system=Toy().system(),
        cases=st.builds(transfer, st.just(gqa()), tokens=TOKENS),
        minimal="1 head, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="vllm#35158",
        bug="All layers are saved before the draft layer has run.",
        law=13,
        system=System(name="saves before the draft runs", steps=saves_before_the_draft_runs),
        cases=st.builds(
            transfer, st.just(gqa()), tokens=TOKENS,
            layers=st.sampled_from([(("l",), ("l",)), (("l", "m.draft"), ("l", "m.draft"))]),
        ),
        minimal="1 head, layers l and m.draft, blocks of 4, 1 token",
    ),
    Exhibit(
        reference="DeepSeek's rope, vLLM and transformers",
        bug="One engine stores the rotated elements of a key as pairs and the other as halves, and"
        " rows are copied as they are.",
        law=14,
        system=Toy().system(),
        cases=st.builds(transfer, st.just(rotary()), tokens=TOKENS),
        minimal="latent of 4, blocks of 4, 1 token",
    ),
]  # fmt: skip
