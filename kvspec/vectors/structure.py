"""The structures of a file of vectors. `json_schema` describes them for other languages.

Invariant: a field is named after its meaning in `docs/spec.md`. A change of any structure is a new
`VECTORS_VERSION`, because programs in other languages read these files.

Ranks are numbers: the index of a rank if all ranks are sorted by `pp`, `pcp` and `tp`. A range is a
list of two numbers, its start and its stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec

FORMAT = "kvspec-vectors"
VECTORS_VERSION = 1

Natural = Annotated[int, msgspec.Meta(ge=0)]
Size = Annotated[int, msgspec.Meta(ge=1)]
Interval = tuple[Natural, Natural]
# Producer memory, producer offset, consumer memory, consumer offset, length.
Copy = tuple[Natural, Natural, Natural, Natural, Size]


class _Struct(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """A structure. A field with its default value is left out of the JSON."""


class VectorPart(_Struct, frozen=True):
    """A named array of a layer. Rule 1.

    Attributes:
        name: Name of the part, such as `k`.
        units: Units of the whole model.
        content_bytes: Bytes of one row of one unit.
        tokens_per_state: Tokens of one row. 0 for a recurrent state, whose rows are not tokens.
        states: Rows of one block of the block table.
        granularity: Units that stay together on one rank.
        ranges: The units of each TP rank, if the engine does not shard evenly.
        whole: Whether the units of a rank only move together. Rule 8.
        chunks: Chunks of the content in memory.
    """

    name: str
    units: Size
    content_bytes: Size
    tokens_per_state: Natural
    states: Size
    granularity: Size
    ranges: tuple[Interval, ...] | None = None
    whole: bool = False
    chunks: Size = 1


class Live(_Struct, frozen=True):
    """The positions that a later query reads. Rule 4.

    Attributes:
        rule: One of `all`, `window`, `chunk`, `state`, `ring` and `ring and group`.
        size: Tokens of the window, with the query and all retained tokens, of the chunk, or of a
            group that is compressed together.
        counts: `prompt` or `encoder`: the tokens that the layer stores.
    """

    rule: str
    size: Size | None = None
    counts: str = "prompt"


class Kind(_Struct, frozen=True):
    """All layers of one group with equal parts. Their elements have equal types and one meaning.

    Attributes:
        layers: Names of the layers.
        parts: Their parts.
        live: Their live positions.
        meaning: Fields that explain the layers, without fields that have their default. Rule 8
            states which of them may differ between engines.
    """

    layers: tuple[str, ...]
    parts: tuple[VectorPart, ...]
    live: Live
    meaning: dict[str, Any]


class VectorGroup(_Struct, frozen=True):
    """Layers with one block table. Rule 3.

    Attributes:
        name: Name of the group.
        block_size: Tokens of one rank in one block of the table.
        memory_block_size: Tokens of one block in memory. It divides *block_size*.
        kinds: The layers.
        context_sharded: Whether context ranks divide the tokens.
        excluded: Layers that do not move. They count for pipeline stages. Rules 1 and 8.
    """

    name: str
    block_size: Size
    memory_block_size: Size
    kinds: tuple[Kind, ...]
    context_sharded: bool = True
    excluded: tuple[str, ...] = ()


class VectorRegion(_Struct, frozen=True):
    """One part of one layer in the memory of one rank. Rule 3.

    Attributes:
        layer: Name of the layer.
        part: Name of the part.
        base: Offset of the first content in the memory.
        num_blocks: Blocks in memory.
        block_stride: Bytes from one block in memory to the next.
        unit_stride: Bytes from one unit to the next.
        state_stride: Bytes from one row to the next.
        units: Units that the rank holds.
        states: Rows of one block in memory.
        memory: Index of the memory.
        chunks: Chunks of a content.
        chunk_stride: Bytes from one chunk to the next.
        segments: The order of the content, if it is not the common order.
    """

    layer: str
    part: str
    base: Natural
    num_blocks: Size
    block_stride: Natural
    unit_stride: Natural
    state_stride: Natural
    units: Size
    states: Size
    memory: Natural
    chunks: Size = 1
    chunk_stride: Natural = 0
    segments: tuple[tuple[Natural, Size, Size, Natural], ...] = ()


class Rank(_Struct, frozen=True):
    """One rank with its memory.

    Attributes:
        pp: Pipeline stage.
        pcp: Prefill context rank.
        tp: Tensor-parallel rank.
        memory: Bytes of each memory.
        regions: The parts that the rank holds.
    """

    pp: Natural
    pcp: Natural
    tp: Natural
    memory: tuple[Size, ...]
    regions: tuple[VectorRegion, ...]


class Engine(_Struct, frozen=True):
    """One engine. Rules 1 and 2.

    Attributes:
        groups: Groups of layers.
        ranks: All ranks, by index.
        tp_size: TP ranks.
        pp_size: Pipeline stages.
        pcp_size: Prefill context ranks.
        dcp_size: Decode context ranks.
        interleave_size: Tokens of one turn of a context rank.
        layout: Letters of the layout, for people. The strides of the regions decide.
        context_ranks: For each PCP rank, the context rank of each TP rank, if it is not the
            default.
        stages: The layers of each stage, if they are not divided evenly.
        null_block: The block id that is no block.
    """

    groups: tuple[VectorGroup, ...]
    ranks: tuple[Rank, ...]
    tp_size: Size
    pp_size: Size
    pcp_size: Size
    dcp_size: Size
    interleave_size: Size
    layout: str
    context_ranks: tuple[tuple[Natural, ...], ...] | None = None
    stages: tuple[tuple[str, ...], ...] | None = None
    null_block: Natural | None = None


class Policy(_Struct, frozen=True):
    """The replica policy. Rule 5.

    Attributes:
        name: Name of the policy.
        salt: Rotation of the choice.
        producer_nodes: Node of each producer rank, if the policy needs it.
        consumer_nodes: Node of each consumer rank.
    """

    name: str
    salt: Natural
    producer_nodes: tuple[Natural, ...] = ()
    consumer_nodes: tuple[Natural, ...] = ()


class Table(_Struct, frozen=True):
    """A block table. Rule 3.

    Attributes:
        ids: Block ids in the order of tokens.
        first_token: Position of the first token of the table.
    """

    ids: tuple[int, ...]
    first_token: Natural


class Request(_Struct, frozen=True):
    """One request. Rules 3 and 4.

    Attributes:
        num_tokens: Number of leading tokens that the consumer need not compute.
        producer_blocks: Block tables by group of the producer.
        consumer_blocks: Block tables by group of the consumer.
        cached: Leading tokens that the consumer has, by its groups.
        encoder_tokens: Tokens of the encoder.
    """

    num_tokens: Natural
    producer_blocks: dict[str, Table]
    consumer_blocks: dict[str, Table]
    cached: dict[str, Natural]
    encoder_tokens: Natural | None = None


class Slice(_Struct, frozen=True):
    """Units that one consumer rank reads from one producer rank. Rule 6.

    Attributes:
        producer: Index of the producer rank.
        consumer: Index of the consumer rank.
        layers: Names of the layers.
        parts: Names of the parts.
        units: The units, as numbered in the model.
        producer_units: The same units, counted from the first unit of the producer rank.
        consumer_units: The same units, counted from the first unit of the consumer rank.
        stripe: `(first, step)`: only virtual blocks b with `b % step == first`.
    """

    producer: Natural
    consumer: Natural
    layers: tuple[str, ...]
    parts: tuple[str, ...]
    units: Interval
    producer_units: Interval
    consumer_units: Interval
    stripe: tuple[Natural, Size]


class Copies(_Struct, frozen=True):
    """The canonical copies of one pair of ranks. Rule 6.

    Attributes:
        producer: Index of the producer rank.
        consumer: Index of the consumer rank.
        copies: Producer memory and offset, consumer memory and offset, length.
    """

    producer: Natural
    consumer: Natural
    copies: tuple[Copy, ...]


class VectorStep(_Struct, frozen=True):
    """One step of a request that moves while it is computed. Rule 7.

    Attributes:
        layers: The layers that advance.
        tokens: The positions by which they advance.
        copies: The copies of the step.
    """

    layers: tuple[str, ...]
    tokens: Interval
    copies: tuple[Copies, ...]


class Expected(_Struct, frozen=True):
    """The right result.

    Attributes:
        slices: Slices of all pairs of ranks, by consumer and producer.
        notifies: Pairs of a producer rank and a consumer rank that notifies it.
        copies: Copies of each pair of ranks that moves bytes.
        steps: Copies of each step, if the request moves in steps.
        refused: Names of fields in which the engines or the request do not fit, for people.
            Rule 8. If it is not empty, all else is empty, and the ranks have no regions.
    """

    slices: tuple[Slice, ...]
    notifies: tuple[tuple[Natural, Natural], ...]
    copies: tuple[Copies, ...]
    steps: tuple[VectorStep, ...] = ()
    refused: tuple[str, ...] = ()


class Vector(_Struct, frozen=True):
    """One transfer and its right result.

    Attributes:
        id: Name of the vector in all files.
        producer: The engine that holds the tokens.
        consumer: The engine that reads them.
        policy: The replica policy.
        request: The request.
        expected: The right result.
    """

    id: str
    producer: Engine
    consumer: Engine
    policy: Policy
    request: Request
    expected: Expected


class Head(msgspec.Struct, frozen=True):
    """The first fields of a file, which tell whether this version can read it."""

    format: str
    version: int


class File(_Struct, frozen=True):
    """One family of vectors.

    Attributes:
        format: Always `kvspec-vectors`.
        version: Version of the format.
        family: Name of the family.
        sha256: SHA-256 of the vectors in their canonical encoding, in hexadecimal digits.
        vectors: The vectors.
    """

    format: str
    version: int
    family: str
    sha256: str
    vectors: tuple[Vector, ...]


def json_schema() -> Mapping[str, Any]:
    """Return the JSON Schema (draft 2020-12) of a file."""
    schema = msgspec.json.schema(File)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": f"{FORMAT}, version {VECTORS_VERSION}",
        **schema,
    }
