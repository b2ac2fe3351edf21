"""A toy connector without mistakes, the small transfers on which it is judged, and their names.

How it works:
    An exhibit of the museum is a connector that makes one mistake of a real one. There are two ways
    to write it. Both state only what the real connector computes wrongly:

        head_reads(slices)    a rank mapping: which rank reads which of its heads from which rank
        class Mine(Toy)       a connector that copies bytes. `Toy` is right, and moves one token of
                              one head at a time. `Mine` replaces the step with the mistake

    `transfer` makes a case from a few numbers, so that Hypothesis shrinks to a case that fits into
    one line. `describe` returns this line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import attrs
from hypothesis import strategies as st

import kvspec
from kvspec import RankId
from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
    live_positions,
    rank_layers,
    rank_units,
)
from kvspec.testing import Case
from kvspec.testing.laws import Move, System
from kvspec.testing.world import ByteCopy, World

# (block, row) of a producer, and of a consumer.
Rows = tuple[tuple[int, int], tuple[int, int]]
# Producer rank, and the places of heads on the producer and on the consumer.
HeadSlice = tuple[int, range, range]
# Called with the number of heads, the TP sizes of both sides and a consumer rank.
Slices = Callable[[int, int, int, int], Iterable[HeadSlice]]

POWERS = st.sampled_from((1, 2, 4, 8))
"""Numbers of heads and of ranks, as most models and engines have them."""
TP = st.tuples(POWERS, POWERS)
"""TP sizes of the producer and of the consumer."""
SMALL_TP = st.sampled_from(((1, 1), (1, 2), (2, 1), (2, 2)))
"""The TP sizes of transfers whose bytes are copied."""


def gqa(heads: int = 1, **fields: Any) -> kvspec.FullAttentionSpec:
    """Return full attention with heads of two elements of one byte."""
    defaults: dict[str, Any] = {"block_size": 4, "head_size": 2, "dtype": "uint8"}
    return kvspec.FullAttentionSpec(total_num_kv_heads=heads, **defaults | fields)


def window(size: int, **fields: Any) -> kvspec.SlidingWindowSpec:
    """Return attention with one head and a window of *size* tokens."""
    defaults: dict[str, Any] = {"block_size": 4, "head_size": 2, "dtype": "uint8"}
    return kvspec.SlidingWindowSpec(total_num_kv_heads=1, sliding_window=size, **defaults | fields)


def latent(size: int = 2, **fields: Any) -> kvspec.MLAAttentionSpec:
    """Return a latent of *size* elements of one byte."""
    defaults: dict[str, Any] = {"block_size": 4, "head_size": size, "dtype": "uint8"}
    return kvspec.MLAAttentionSpec(**defaults | fields)


def mamba2(groups: int = 1) -> kvspec.MambaSpec:
    """Return a Mamba2 state of four heads."""
    return kvspec.MambaSpec.mamba2(
        num_heads=4, head_dim=1, n_groups=groups, state_size=1, conv_kernel=2, dtype="uint8"
    )


def delta_net() -> kvspec.MambaSpec:
    """Return the state of a gated delta net of four heads, whose conv state has parts q, k, v."""
    return kvspec.MambaSpec.gated_delta_net(
        num_k_heads=4, num_v_heads=4, head_k_dim=1, head_v_dim=1, conv_kernel=2, dtype="uint8"
    )


def engine(
    model: Sequence[kvspec.LayerSpec],
    *,
    layers: Sequence[str] = ("l",),
    block: int | None = None,
    layout: str = "LBHNC",
    **sizes: Any,
) -> kvspec.EngineSpec:
    """Return an engine with a group for each spec of *model*.

    Args:
        model: The specs. Group 0 has *layers*. The layers of group 1 have a 1 before their names.
        layers: Names of the layers of each group.
        block: Tokens of a block of attention layers. By default, that of the specs.
        layout: The layout of all groups.
        **sizes: Fields of `ParallelConfig`.
    """
    groups = []
    for number, spec in enumerate(model):
        if block is not None and not isinstance(spec, kvspec.MambaSpec):
            spec = attrs.evolve(spec, block_size=block)  # noqa: PLW2901
        names = tuple(f"{number or ''}{layer}" for layer in layers)
        groups.append(kvspec.KVCacheGroup(name=f"g{number}", layers=names, spec=spec))
    parallel = kvspec.ParallelConfig(**sizes)
    return kvspec.EngineSpec(groups=groups, parallel=parallel, layout=layout)


def transfer(
    *model: kvspec.LayerSpec,
    other: Sequence[kvspec.LayerSpec] = (),
    tp: tuple[int, int] = (1, 1),
    tokens: int = 1,
    cached: int = 0,
    blocks: tuple[int | None, int | None] = (None, None),
    spare: tuple[int, int] = (0, 0),
    layouts: tuple[str, str] = ("LBHNC", "LBHNC"),
    layers: tuple[Sequence[str], Sequence[str]] = (("l",), ("l",)),
    sizes: tuple[Mapping[str, Any], Mapping[str, Any]] = ({}, {}),
    shared: bool = False,
) -> Case:
    """Return the transfer of one request.

    The tables of the consumer begin with the block of the first token that is not cached, as in
    vLLM. A state has one block.

    Args:
        *model: The spec of each group.
        other: The specs of the consumer, if they differ.
        tp: TP sizes of the producer and of the consumer. The arguments below are pairs, too.
        tokens: Length of the prompt.
        cached: Tokens that the consumer has already. Only whole blocks of the prompt count.
        blocks: Tokens of a block.
        spare: Number of blocks in the tables after those of the prompt.
        layouts: The layouts.
        layers: Names of the layers.
        sizes: Other fields of `ParallelConfig`.
        shared: Whether the groups of a rank share one memory.
    """
    sides, tables = [], []
    size = blocks[1] or (other or model)[0].block_size
    cached = min(cached, tokens) // size * size
    for at, specs in enumerate((model, other or model)):
        side = engine(
            specs, layers=layers[at], block=blocks[at], layout=layouts[at], tp_size=tp[at],
            **sizes[at],
        )  # fmt: skip
        sides.append(side)
        tables.append(_tables(side, tokens, cached if at else 0, spare[at], shared=shared))
    most = [max((max(t.block_ids, default=0) for t in side.values()), default=0) for side in tables]
    return Case(
        producer=sides[0],
        consumer=sides[1],
        producer_pool={name: int(most[0]) + 1 for name in tables[0]},
        consumer_pool={name: int(most[1]) + 1 for name in tables[1]},
        request=kvspec.TransferRequest(
            request_id="r",
            num_tokens=tokens,
            cached_tokens=cached,
            producer_blocks=tables[0],
            consumer_blocks=tables[1],
        ),
        shared=shared,
    )


def _tables(
    side: kvspec.EngineSpec, tokens: int, cached: int, spare: int, *, shared: bool
) -> dict[str, kvspec.BlockTable]:
    """Return a table for each group. Tables of a shared memory have no common block."""
    tables, used = {}, 0
    for group in side.groups:
        virtual = group.spec.block_size * context_of(side, RankId(), group)[1]
        first = 0 if is_state(group) else cached // virtual
        count = 1 if is_state(group) else -(-tokens // virtual) - first + spare
        ids = range(used, used + max(count, 0))
        used += len(ids) if shared else 0
        tables[group.name] = kvspec.BlockTable(ids, first * virtual)
    return tables


def is_state(group: kvspec.KVCacheGroup) -> bool:
    """Return whether a block of *group* is a recurrent state."""
    return isinstance(group.spec, kvspec.MambaSpec)


def head_reads(slices: Slices, name: str = "") -> System:
    """Return the system of a connector that only maps ranks.

    Args:
        slices: Called with the number of heads, the TP sizes of the producer and of the consumer,
            and a consumer rank. Yields (producer rank, places of heads on the producer, places of
            heads on the consumer). A place counts the heads that a rank holds.
        name: The name of the system, by default that of the function.
    """

    def moves(case: Case, role: str) -> Iterator[Move]:
        for group in case.consumer.groups:
            spec: Any = group.spec
            sizes = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
            for consumer in case.consumer.parallel.ranks:
                for source, theirs, mine in slices(spec.total_num_kv_heads, *sizes, consumer.tp):
                    first = rank_units(case.consumer, consumer, spec.parts[0], group)[0]
                    for layer, part in product(group.layers, spec.parts):
                        yield Move(
                            producer=RankId(tp=source), consumer=consumer, layer=layer,
                            part=part.name, units=range(first + mine.start, first + mine.stop),
                            producer_units=theirs, consumer_units=mine,
                        )  # fmt: skip

    return System(name=name or slices.__name__, moves=moves)


class Toy:
    """A connector that moves one token of one head at a time, and is right.

    A subclass replaces one method with the mistake of a real connector.
    """

    def system(self) -> System:
        """Return the functions that the laws judge."""
        return System(name=type(self).__name__, descriptors=self.copies)

    def copies(self, world: World, producer: RankId, consumer: RankId) -> Iterator[ByteCopy]:
        """Yield the copies between two ranks."""
        case = world.case
        for source, target in self.regions(world, producer, consumer):
            for theirs, mine in self.heads(case, source, target, producer, consumer):
                for there, here in self.rows(case, source, target, producer, consumer):
                    yield (
                        self.address(source, *there, theirs),
                        self.address(target, *here, mine),
                        self.length(world, producer, source, target),
                    )

    def regions(
        self, world: World, producer: RankId, consumer: RankId
    ) -> Iterator[tuple[kvspec.Region, kvspec.Region]]:
        """Pair the regions of two ranks by the names of the layer and the part."""
        theirs = {(r.layer, r.part): r for r in world.producers[producer][0].regions}
        for mine in world.consumers[consumer][0].regions:
            if (mine.layer, mine.part) in theirs:
                yield theirs[mine.layer, mine.part], mine

    def heads(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[tuple[int, int]]:
        """Pair the places of each head. The first rank that holds a head serves it."""
        part, group = part_of(case.producer, source), case.producer.group(source.group)
        held = {
            tp: rank_units(case.producer, attrs.evolve(producer, tp=tp), part, group)
            for tp in range(case.producer.parallel.tp_size)
            if context_of(case.producer, attrs.evolve(producer, tp=tp), group)
            == context_of(case.producer, producer, group)
        }
        own = rank_units(case.consumer, consumer, part, case.consumer.group(target.group))
        for place, head in enumerate(own):
            if producer.tp == min(tp for tp, units in held.items() if head in units):
                yield held[producer.tp].index(head), place

    def rows(
        self, case: Case, source: Any, target: Any, producer: RankId, consumer: RankId
    ) -> Iterator[Rows]:
        """Pair the row of each token that moves, or the rows of a state."""
        sides = (case.producer, producer, source), (case.consumer, consumer, target)
        tables = case.request.producer_blocks, case.request.consumer_blocks
        if is_state(case.consumer.group(target.group)):
            blocks = (int(tables[at][sides[at][2].group].block_ids[0]) for at in (0, 1))
            there, here = blocks
            yield from (((there, row), (here, row)) for row in range(target.states))
            return
        for token in self.tokens(case, target):
            places = [
                place(side, rank, region, tables[at][region.group], token)
                for at, (side, rank, region) in enumerate(sides)
            ]
            if places[0] is not None and places[1] is not None:
                yield places[0], places[1]

    def tokens(self, case: Case, target: Any) -> Sequence[int]:
        """Return the tokens that must move."""
        group = case.consumer.group(target.group)
        live = live_positions(group.spec.of_layer(target.layer), case.request).nonzero()[0]
        return [int(t) for t in live if t >= cached_tokens_of(case.request, group)]

    def address(self, region: Any, block: int, row: int, head: int) -> int:
        """Return the address of one row of one head."""
        return int(region.address(block, head, row))

    def length(self, world: World, producer: RankId, source: Any, target: Any) -> int:
        """Return the bytes of one row of one head."""
        return int(target.content_bytes)


def place(
    side: kvspec.EngineSpec, rank: RankId, region: Any, table: kvspec.BlockTable, token: int
) -> tuple[int, int] | None:
    """Return the block and the row of *token*, or None if another context rank holds it."""
    group = side.group(region.group)
    context, size = context_of(side, rank, group)
    interleave = side.parallel.interleave_size
    if token // interleave % size != context:
        return None
    number, inside = divmod(token - table.first_token, group.spec.block_size * size)
    row = inside // (interleave * size) * interleave + inside % interleave
    return int(table.block_ids[number]), row


def part_of(side: kvspec.EngineSpec, region: Any) -> kvspec.Part:
    """Return the part of the model that *region* stores."""
    parts = side.group(region.group).spec.of_layer(region.layer).parts
    return next(part for part in parts if part.name == region.part)


def block_pairs(
    case: Case, source: Any, target: Any, pairs: Callable[[list[int], list[int]], Iterable[Any]]
) -> Iterator[Rows]:
    """Yield all rows of the blocks that *pairs* returns for the tables of both sides."""
    there = case.request.producer_blocks[source.group].block_ids.tolist()
    here = case.request.consumer_blocks[target.group].block_ids.tolist()
    for block, other in pairs(there, here):
        yield from (((block, row), (other, row)) for row in range(target.states))


def describe(case: Case) -> str:
    """Return one line that names what matters of a *case* of `transfer`."""
    first, second = _model(case.producer), _model(case.consumer)
    head = f"{first}, " if first == second else f"producer: {first}; consumer: {second}; "
    words = _layers(case) + ["one memory"] * case.shared
    for name, size in (
        ("TP", lambda side: side.parallel.tp_size),
        ("PP", lambda side: side.parallel.pp_size),
        ("DCP", lambda side: side.parallel.dcp_size),
        ("PCP", lambda side: side.parallel.pcp_size),
        ("interleave", lambda side: side.parallel.interleave_size),
        ("layout", lambda side: side.layout),
    ):
        values = size(case.producer), size(case.consumer)
        default = name != "interleave" or case.producer.parallel.dcp_size == 1
        if values not in {(1, 1), ("LBHNC", "LBHNC")} or not default:
            words.append(f"{name} {values[0]} to {values[1]}")
    sizes = [side.groups[0].spec.block_size for side in (case.producer, case.consumer)]
    if not is_state(case.producer.groups[0]):
        words.append(f"blocks of {sizes[0]}" + f" to {sizes[1]}" * (sizes[0] != sizes[1]))
    request = case.request
    words.append(f"{request.num_tokens} token{'s' * (request.num_tokens != 1)}")
    if request.cached_tokens:
        words.append(f"{request.cached_tokens} cached")
    for role, blocks in (
        ("producer", request.producer_blocks),
        ("consumer", request.consumer_blocks),
    ):
        side = getattr(case, role)
        if (spare := _spare(side, blocks, request.num_tokens)) > 0:
            words.append(f"{spare} block{'s' * (spare != 1)} more on the {role}")
    return head + ", ".join(words)


def _spare(side: kvspec.EngineSpec, blocks: Mapping[str, Any], tokens: int) -> int:
    """Return the number of blocks of the first table that no token of the prompt is in."""
    group = side.groups[0]
    if is_state(group):
        return 0
    table = blocks[group.name]
    virtual = group.spec.block_size * context_of(side, RankId(), group)[1]
    return len(table.block_ids) - max(0, -(-(tokens - table.first_token) // virtual))


def _layers(case: Case) -> list[str]:
    """Return the names of the layers, if they are not those of one plain layer."""
    sides = [" and ".join(side.groups[0].layers) for side in (case.producer, case.consumer)]
    if "draft" not in " ".join(sides):
        count = len(case.producer.groups[0].layers)
        return [f"{count} layers"] * (count > 1)
    return ["layers " + sides[0] + f" to {sides[1]}" * (sides[0] != sides[1])]


def _model(side: kvspec.EngineSpec) -> str:
    """Return the kinds of the groups of one side."""
    names = []
    for group in side.groups:
        spec: Any = group.spec
        if is_state(group):
            conv = {part.name for part in spec.parts}
            names.append("Mamba2" if "conv_x" in conv else "delta net")
        elif isinstance(spec, kvspec.MLAAttentionSpec):
            names.append(f"latent of {spec.head_size}")
        else:
            heads = spec.total_num_kv_heads
            names.append(f"{heads} head{'s' * (heads != 1)}")
            if hasattr(spec, "sliding_window"):
                names[-1] += f", window {spec.sliding_window}"
            if spec.page_size_padded is not None:
                names[-1] += f", pages padded to {spec.page_size_padded}"
    return " and ".join(names)


def layers_at(side: kvspec.EngineSpec, rank: RankId) -> list[str]:
    """Return the layers that *rank* holds."""
    return [layer for group in side.groups for layer in rank_layers(side, rank, group)]
