"""The transfers of each family of vectors.

Invariant: the transfers are enumerated, not drawn, so that every machine writes the same files.
A name identifies one transfer for ever: programs list the names that they do not support.

How it works:
    `FAMILIES` maps the name of a family to a function that yields its transfers. Each transfer
    varies the axis of its family, and is small in all other respects: one or two layers, contents
    of a few bytes, prompts of a few blocks. The committed set samples each axis. The large set,
    which is a release artefact, has every combination.

        >>> [transfer.name for transfer in transfers("tp")][:2]
        ['tp/heads1-tp1-tp1', 'tp/heads1-tp1-tp2']
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import gcd
from typing import Any

import attrs

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.engines.letters import NAMED_LAYOUTS
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.replicas import ReplicaPolicy, ReplicaPolicyName, Topology
from kvspec.specs import (
    ChunkedLocalAttentionSpec,
    CircularBufferSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KeyContent,
    LayerSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
    UniformTypeKVCacheSpecs,
)
from kvspec.testing.case import Case

__all__ = ["FAMILIES", "FamilyTransfer", "transfers"]


@attrs.frozen
class FamilyTransfer:
    """One transfer of a family.

    Attributes:
        name: Family and name, such as `tp/heads8-tp2-tp3`.
        case: The transfer.
        steps: Whether the request also moves in steps.
        refused: Whether the library must refuse the transfer.
    """

    name: str
    case: Case
    steps: bool = False
    refused: bool = False


# Page formats that cut the content of a row into chunks.
CUT = ("keys-transposed", "x-packed")

# A family yields the name of a transfer in the family, and the transfer.
Family = Callable[[bool], Iterator[tuple[str, Case]]]


def transfers(family: str, *, large: bool = False) -> Iterator[FamilyTransfer]:
    """Yield the transfers of a family.

    Args:
        family: Name of the family.
        large: Whether to yield the large set.

    Raises:
        SpecError: If the family is unknown.
    """
    if family not in FAMILIES:
        raise SpecError("family", family, f"one of {', '.join(FAMILIES)}")
    for name, case in FAMILIES[family](large):
        yield FamilyTransfer(
            f"{family}/{name}", case, steps=family == "steps", refused=family == "refusals"
        )


def _full(heads: int, block: int = 4, **fields: Any) -> FullAttentionSpec:  # noqa: ANN401
    sizes: dict[str, Any] = {"total_num_kv_heads": heads, "block_size": block}
    return FullAttentionSpec(**sizes | {"head_size": 2, "dtype": "uint8"} | fields)


def _latent(block: int = 4, **fields: Any) -> MLAAttentionSpec:  # noqa: ANN401
    sizes: dict[str, Any] = {"head_size": 6, "dtype": "uint8", "block_size": block}
    return MLAAttentionSpec(**{**sizes, **fields})


def _group(name: str, spec: LayerSpec, *layers: str) -> KVCacheGroup:
    return KVCacheGroup(name=name, layers=layers, spec=spec)


def _engine(
    spec: LayerSpec | Sequence[KVCacheGroup],
    layers: Iterable[str] = ("layers.0",),
    *,
    layout: str = "LBHNC",
    null: int | None = None,
    group: Mapping[str, Any] | None = None,
    **parallel: Any,  # noqa: ANN401
) -> EngineSpec:
    """Return an engine. *spec* is that of one group, or a sequence of groups."""
    groups = (
        [KVCacheGroup(name="g", layers=layers, spec=spec, **(group or {}))]
        if isinstance(spec, LayerSpec)
        else spec
    )
    sizes = ParallelConfig(**parallel)
    return EngineSpec(groups=groups, parallel=sizes, layout=layout, null_block=null)


def _case(
    producer: EngineSpec,
    consumer: EngineSpec,
    tokens: int = 6,
    *,
    cached: int | Mapping[str, int] = 0,
    policy: ReplicaPolicy | ReplicaPolicyName = "spread",
    encoder: int | None = None,
    late: tuple[bool, bool] = (False, False),
    common_states: bool = False,
    shared: bool = False,
) -> Case:
    """Return a case with block tables for *tokens* tokens.

    Args:
        producer: The producer.
        consumer: The consumer.
        tokens: Tokens of the prompt.
        cached: Cached tokens of the consumer.
        policy: The replica policy.
        encoder: Tokens of the encoder.
        late: For each side, whether tables begin at the first live token.
        common_states: As in `Case`.
        shared: As in `Case`.
    """
    counts = tokens, encoder
    producer_blocks, producer_pool = _tables(producer, counts, 3, late=late[0], shared=shared)
    consumer_blocks, consumer_pool = _tables(consumer, counts, 4, late=late[1], shared=shared)
    request = TransferRequest(
        request_id="vector",
        num_tokens=tokens,
        cached_tokens=cached,
        encoder_tokens=encoder,
        producer_blocks=producer_blocks,
        consumer_blocks=consumer_blocks,
    )
    return Case(
        producer=producer,
        consumer=consumer,
        producer_pool=producer_pool,
        consumer_pool=consumer_pool,
        request=request,
        replica_policy=policy,
        common_states=common_states,
        shared=shared,
    )


def _with_tables(case: Case, **tables: Any) -> Case:  # noqa: ANN401
    """Return *case* with other block tables, such as `consumer_blocks={"g": [3, 1]}`."""
    return attrs.evolve(case, request=attrs.evolve(case.request, **tables))


def _tables(
    engine: EngineSpec, counts: tuple[int, int | None], seed: int, *, late: bool, shared: bool
) -> tuple[dict[str, BlockTable], dict[str, int]]:
    """Return the block tables of one side, and the number of blocks of each group."""
    tables: dict[str, BlockTable] = {}
    sizes: dict[str, int] = {}
    used = 0  # Groups that share memory have no common block.
    for group in engine.groups:
        total = group.spec.total(*counts)
        live = group.spec.live_tokens(total)
        virtual = engine.virtual_block(group)
        first = live.start // virtual * virtual if late else 0
        # A state has one block, the slot of the state.
        state = not any(part.per_token for part in group.own_parts)
        count = 1 if state else -(-(total - first) // virtual)
        ids = [used + block for block in _ids(count, seed)]
        if engine.null_block is not None:
            # Blocks before the first live token are dropped, as an engine with a window does.
            dropped = range(live.start // virtual)
            ids = [engine.null_block if i in dropped else block + 1 for i, block in enumerate(ids)]
        tables[group.name] = BlockTable(ids, first_token=0 if state else first)
        used += (count + 3) if shared else 0
        sizes[group.name] = count + 3
    return tables, dict.fromkeys(sizes, used + 1) if shared else sizes


def _ids(count: int, seed: int) -> list[int]:
    """Return *count* different ids below *count* + 2. Most of them do not follow each other.

    >>> _ids(4, 3), _ids(4, 4)
    ([3, 2, 1, 0], [4, 5, 0, 1])
    """
    pool = count + 2
    step = next(step for step in range(seed + 2, 2 * pool + seed) if gcd(step, pool) == 1)
    return [(seed + place * step) % pool for place in range(count)]


def _some(items: Iterable[Any], large: bool, every: int) -> list[Any]:  # noqa: FBT001
    """Return all *items* of a large set, or one of *every* of them."""
    return list(items)[:: 1 if large else every]


def _tp(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    heads = range(1, 17) if large else (1, 2, 3, 4, 6, 8)
    sizes = (1, 2, 3, 4, 5, 6, 8, 12, 16) if large else (1, 2, 3, 4, 8)
    for units, p, c in product(heads, sizes, sizes):
        case = _case(_engine(_full(units), tp_size=p), _engine(_full(units), tp_size=c))
        yield f"heads{units}-tp{p}-tp{c}", case


def _replicas(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    sizes: Iterable[tuple[int, int]] = ((4, 1), (4, 3), (8, 2), (2, 8), (3, 4), (6, 4), (8, 8))
    if large:
        tps = (1, 2, 3, 4, 6, 8, 12)
        sizes = product(tps, tps)
    kinds = {"latent": _latent(block=2), "heads2": _full(2, block=2), "heads3": _full(3, block=2)}
    for (name, spec), (p, c) in product(kinds.items(), sizes):
        producer, consumer = _engine(spec, tp_size=p), _engine(spec, tp_size=c)
        nodes = Topology(
            producer={rank: rank.tp // 3 for rank in producer.parallel.ranks},
            consumer={rank: rank.tp // 2 for rank in consumer.parallel.ranks},
        )
        for policy in (
            ReplicaPolicy("spread"), ReplicaPolicy("spread", 3), ReplicaPolicy("first"),
            ReplicaPolicy("stripe"), ReplicaPolicy("stripe", 1),
            ReplicaPolicy("nearest", 1, nodes),
        ):  # fmt: skip
            case = _case(producer, consumer, 11, policy=policy)
            yield f"{name}-tp{p}-tp{c}-{policy.name}{policy.salt}", case
    for p, c in ((4, 3), (2, 8)):
        case = _case(
            _engine(_latent(), tp_size=p),
            _engine(_latent(), tp_size=c),
            policy=ReplicaPolicy("first", 1),
        )
        yield f"latent-tp{p}-tp{c}-first1", case
    yield from _stripes()


def _stripes() -> Iterator[tuple[str, Case]]:
    """Yield stripes between engines whose blocks, first tokens or contexts differ."""
    window = SlidingWindowMLASpec(block_size=2, head_size=6, dtype="uint8", sliding_window=12)
    larger = attrs.evolve(window, block_size=6)
    kernels = {"kernel_block_size": 2}
    small, large = _engine(_latent(2), tp_size=4), _engine(_latent(6), tp_size=3)
    pairs = {
        "block2-block6": (small, large),
        "block6-block2": (large, small),
        "kernel-blocks": (small, _engine(_latent(8), tp_size=3, group=kernels)),
        # The first virtual block of the consumer's table is 3, and a stripe has 4 of them.
        "late-tables": (_engine(window, tp_size=4), _engine(larger, tp_size=3)),
        "dcp2-dcp2": (
            _engine(_latent(2), tp_size=8, dcp_size=2), _engine(_latent(2), tp_size=2, dcp_size=2)
        ),
        "dcp1-dcp2": (
            small, _engine(_latent(2), tp_size=2, dcp_size=2, interleave_size=2)
        ),
        "dcp2-dcp1": (_engine(_latent(4), tp_size=4, dcp_size=2), _engine(_latent(2))),
    }  # fmt: skip
    for name, (producer, consumer) in pairs.items():
        late = name == "late-tables"
        policy = ReplicaPolicy("stripe", 1)
        yield f"stripe-{name}", _case(producer, consumer, 29, policy=policy, late=(late, late))


def _shardings(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    explicit: dict[str, list[range]] = {
        "first-larger": [range(3), range(3, 5)],
        "reversed": [range(4, 5), range(2, 4), range(2)],
        "replicas-apart": [range(2), range(2, 5), range(2), range(2, 5)],
        "one-empty": [range(5), range(0)],
    }
    even = (1, 2, 3, 4, 5, 7) if large else (1, 2, 3, 7)
    sides = {
        name: _engine(_full(5), tp_size=len(ranges), shardings={5: ranges})
        for name, ranges in explicit.items()
    }
    by_part = {"k": [range(1), range(1, 5)], "v": [range(4), range(4, 5)]}
    # K and V of other sizes need planes of their own.
    sides["k-unlike-v"] = _engine(
        _full(5), layout="LBKHNC", tp_size=2, group={"shardings": by_part}
    )
    for (name, engine), size in product(sides.items(), even):
        other = _engine(_full(5), tp_size=size)
        yield f"{name}-to-tp{size}", _case(engine, other)
        yield f"tp{size}-to-{name}", _case(other, engine)
    for (name, producer), (to, consumer) in product(sides.items(), repeat=2):
        yield f"{name}-to-{to}", _case(producer, consumer)


def _pp(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    names = [f"model.layers.{number}.attn" for number in (0, 1, 2, 3, 4)]
    sizes = (1, 2, 3, 4, 5) if large else (1, 2, 3)
    for p, c, (tp, to) in product(sizes, sizes, ((1, 1), (2, 3), (4, 2))):
        for kind, spec in (("heads2", _full(2)), ("latent", _latent())):
            case = _case(
                _engine(spec, names, tp_size=tp, pp_size=p),
                _engine(spec, names[::-1], tp_size=to, pp_size=c),
                5,
            )
            yield f"{kind}-pp{p}-tp{tp}-pp{c}-tp{to}", case
    stages: dict[str, Any] = {
        "first-smaller": [range(1), range(1, 5)],
        "by-name": [(names[0], names[3]), (names[1], names[2], names[4])],
        "three": [range(2), range(2, 4), range(4, 5)],
    }
    engines = {
        name: _engine(_full(2), names, tp_size=2, pp_size=len(of), stages=of)
        for name, of in stages.items()
    }
    for (name, producer), (to_name, consumer) in product(engines.items(), repeat=2):
        yield f"{name}-to-{to_name}", _case(producer, consumer, 5)
    gaps = [f"blocks.{number}" for number in (2, 3, 7, 20)]
    named = {
        "numbers-with-gaps": gaps,
        "first-number-of-two": [f"blocks.{number}.part.{9 - number}" for number in range(5)],
        "several-layers-of-one-number": [f"layers.{name}" for name in ("0.a", "0.b", "0.c", 1, 2)],
        "more-stages-than-numbers": ["layers.4", "layers.5"],
    }
    for name, layers in named.items():
        first, second = (_engine(_full(1), layers, pp_size=size) for size in (2, 3))
        yield name, _case(first, second)
    groups = [_group(f"from{at}", _full(1), *names[at : at + 3]) for at in (0, 3)]
    yield "numbers-of-all-groups", _case(_engine(groups, pp_size=2), _engine(groups, pp_size=3))


def _cp(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    # TP, DCP, PCP and interleave. Each context rank needs a rank for each head.
    sizes = [
        (1, 1, 1, 1), (2, 2, 1, 1), (2, 2, 1, 4), (4, 2, 1, 2), (4, 4, 1, 1), (6, 3, 1, 2),
        (1, 1, 2, 2), (1, 1, 3, 1), (2, 2, 2, 1), (4, 2, 2, 4),
    ]  # fmt: skip

    def of(spec: LayerSpec, side: Sequence[int]) -> EngineSpec:
        tp, dcp, pcp, run = side
        return _engine(spec, tp_size=tp, dcp_size=dcp, pcp_size=pcp, interleave_size=run)

    def between(*sides: Sequence[int]) -> str:
        return "-to-".join("tp{}-dcp{}-pcp{}-i{}".format(*side) for side in sides)

    for kind, spec in (("latent", _latent(8)), ("head1", _full(1, 8))):
        for (p, c), tokens in product(product(sizes, repeat=2), (37, 64) if large else (37,)):
            if not large and kind == "head1" and (sizes.index(p) + sizes.index(c)) % 3:
                continue
            yield f"{kind}-{between(p, c)}-n{tokens}", _case(of(spec, p), of(spec, c), tokens)
    two_heads = [(4, 2, 1, 2), (8, 4, 1, 1), (2, 1, 2, 4), (2, 1, 1, 1), (3, 1, 1, 1)]
    for p, c in product(two_heads, repeat=2):
        case = _case(of(_full(2, 8), p), of(_full(2, 8), c), 29, cached=5)
        yield f"heads2-{between(p, c)}", case
    for name, rows, pcp in (("all-zero", [[0], [0]], 2), ("swapped", [[1], [0]], 2)):
        own = _engine(_latent(8), pcp_size=pcp, context_ranks=rows, interleave_size=2)
        other = _engine(_latent(8), tp_size=2, dcp_size=2)
        yield f"context-ranks-{name}", _case(own, other, 37)
        yield f"to-context-ranks-{name}", _case(other, own, 37)
    draft = attrs.evolve(_group("draft", _latent(8), "layers.1"), context_sharded=False)
    groups = [_group("target", _latent(8), "layers.0"), draft]
    two, four = _engine(groups, tp_size=2, dcp_size=2), _engine(groups, tp_size=4, dcp_size=4)
    yield "draft-has-all-tokens", _case(two, four, 21)
    whole = _engine(_latent(8), tp_size=2, dcp_size=2, group={"context_sharded": False})
    sharded = _engine(_latent(4), tp_size=2, dcp_size=2)
    yield "one-side-has-all-tokens", _case(whole, sharded, 21)
    yield "other-side-has-all-tokens", _case(sharded, whole, 21)
    pairs = _latent(8, tokens_per_state=2)
    first = _engine(pairs, tp_size=2, dcp_size=2, interleave_size=4)
    second = _engine(pairs, pcp_size=3, interleave_size=2, group={"kernel_block_size": 4})
    yield "rows-of-two-tokens", _case(first, second, 37, cached=6)
    first = _engine(_latent(8), pcp_size=2, interleave_size=4, group={"kernel_block_size": 2})
    second = _engine(_latent(6), pcp_size=2, interleave_size=6, group={"kernel_block_size": 3})
    yield "kernel-blocks-below-interleave", _case(first, second, 37)


def _blocks(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    sizes = (1, 2, 3, 4, 6, 8, 16, 24) if large else (1, 3, 4, 8, 16)
    for p, c, tokens in product(sizes, sizes, (1, 16, 33)):
        first, second = (_engine(_full(2, block), tp_size=tp) for block, tp in ((p, 2), (c, 1)))
        yield f"block{p}-block{c}-n{tokens}", _case(first, second, tokens)
    kernels = [(8, 8), (8, 4), (8, 2), (16, 4), (12, 3)]
    for (p, pk), (c, ck) in product(kernels, repeat=2):
        first, second = (
            _engine(_full(2, block), group={"kernel_block_size": kernel}, layout="LBNHC")
            for block, kernel in ((p, pk), (c, ck))
        )
        yield f"block{p}-kernel{pk}-block{c}-kernel{ck}", _case(first, second, 27, cached=3)
    for block, dcp in product((4, 8), (2, 4)):
        sizes_of_dcp: Any = {"tp_size": dcp, "dcp_size": dcp, "interleave_size": 2}
        first = _engine(_latent(block), group={"kernel_block_size": 2}, **sizes_of_dcp)
        second = _engine(_latent(6), group={"kernel_block_size": 3})
        yield f"block{block}-kernel2-dcp{dcp}", _case(first, second, 35)
    yield "no-tokens", _case(_engine(_full(2)), _engine(_full(2), tp_size=2), 0)


def _layouts(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    layers = ("layers.0", "layers.1")
    pairs = product((*NAMED_LAYOUTS, "BNHLKC", "HLBKNC"), repeat=2)
    for number, (p, c) in enumerate(pairs):
        if large or number % 3 == 0 or p == c:
            spec = _full(4, 2, head_size_v=3)
            first, second = (
                _engine(spec, layers, layout=layout, tp_size=tp) for layout, tp in ((p, 2), (c, 3))
            )
            yield f"{p}-to-{c}", _case(first, second, 5, cached=1)
    for page, other in product((None, 40, 64), repeat=2):
        specs = [_full(4, 2, page_size_padded=size) for size in (page, other)]
        first = _engine(specs[0], layers, layout="LBNHC", tp_size=2)
        second = _engine(specs[1], layers, layout="BLHNC", tp_size=2)
        yield f"page{page or 0}-to-page{other or 0}", _case(first, second, 5)
    own = {"layout": "LKBNHC"}
    yield "layout-of-group", _case(_engine(_full(2), group=own), _engine(_full(2), tp_size=2))


def _prefixes(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    tokens = 17
    steps = range(tokens + 3) if large else (1, 3, 4, 7, 8, 12, 15, 16, 17, 19)
    for cached, (p, c) in product(steps, ((4, 4), (3, 8), (16, 4))):
        first, second = (_engine(_full(2, block), tp_size=tp) for block, tp in ((p, 1), (c, 2)))
        yield f"cached{cached}-block{p}-block{c}", _case(first, second, tokens, cached=cached)
    for cached in steps:
        first = _engine(_latent(4), tp_size=2, dcp_size=2, interleave_size=2)
        second = _engine(_latent(8), tp_size=3, dcp_size=3, interleave_size=4)
        yield f"cached{cached}-dcp2-dcp3", _case(first, second, tokens, cached=cached)
    groups = [_group("a", _full(2), "layers.0"), _group("b", _full(2), "layers.1")]
    yield "cached-by-group", _case(_engine(groups), _engine(groups), 9, cached={"b": 5})
    rows = _latent(8, tokens_per_state=4)
    yield "all-cached-inside-row", _case(_engine(rows), _engine(rows, tp_size=2), 14, cached=14)
    window = SlidingWindowMLASpec(
        block_size=8, head_size=6, dtype="uint8", sliding_window=6, tokens_per_state=4
    )
    case = _case(_engine(window), _engine(window, tp_size=2), 22, cached=6)
    yield "cached-inside-row-before-window", case
    first, second = _engine(_full(2)), _engine(_full(2, 8), tp_size=2)
    case = _case(first, second, 23, cached=9)
    dropped = {"g": BlockTable([4, 1, 0, 3], first_token=8)}
    short = {"g": BlockTable([3, 1], first_token=8)}
    yield "producer-table-begins-late", _with_tables(case, producer_blocks=dropped)
    yield "consumer-table-begins-late", _with_tables(case, consumer_blocks=short)
    late = _with_tables(case, producer_blocks=dropped, consumer_blocks=short)
    yield "both-tables-begin-late", late
    # The producer's first two blocks hold cached tokens only, so they do not move.
    tables = {"g": [5, 5, 1, 0, 3, 2]}
    yield "producer-repeats-cached-block", _with_tables(case, producer_blocks=tables)


def _windows(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    sizes = (1, 2, 4, 5, 9, 30) if large else (1, 4, 9, 30)
    lengths = (1, 8, 13, 16, 21) if large else (8, 13, 21)
    tables = {"all": (None, False), "late": (None, True), "null": (0, False)}
    for size, tokens, (name, (null, late)) in product(sizes, lengths, tables.items()):
        for kind, spec in _window_kinds(size).items():
            producer = _engine(attrs.evolve(spec, block_size=4), null=null, tp_size=2)
            consumer = _engine(attrs.evolve(spec, block_size=8))
            cached = tokens // 2 if size % 2 else 0
            case = _case(producer, consumer, tokens, cached=cached, late=(late, False))
            yield f"{kind}{size}-n{tokens}-{name}", case
    window = _window_kinds(7)["window"]
    yield "full-to-window", _case(_engine(_full(2)), _engine(window, tp_size=2), 13)
    yield "window-to-full", _case(_engine(window), _engine(_full(2), tp_size=2), 6)
    retained = SlidingWindowSpec(
        block_size=4, total_num_kv_heads=2, head_size=2, dtype="uint8", sliding_window=4,
        extra_retained_tokens=3,
    )  # fmt: skip
    yield "window-with-retained-tokens", _case(_engine(retained), _engine(retained, tp_size=2), 13)
    latent = SlidingWindowMLASpec(block_size=8, head_size=6, dtype="uint8", sliding_window=11)
    contexts = _engine(latent, tp_size=2, dcp_size=2, interleave_size=2)
    yield "latent-window-dcp", _case(contexts, _engine(latent, tp_size=3), 37)
    smaller = _engine(attrs.evolve(latent, block_size=4), pcp_size=3, interleave_size=4)
    for sides in ((True, False), (False, True), (True, True)):
        case = _case(contexts, smaller, 37, late=sides)
        yield f"latent-window-dcp-late{sides[0]:d}{sides[1]:d}", case
    # The window begins inside a row, which moves whole.
    rows = attrs.evolve(latent, sliding_window=6, tokens_per_state=4)
    yield "window-of-rows-of-four-tokens", _case(_engine(rows), _engine(rows, tp_size=2), 22)
    chunk = _window_kinds(7)["chunk"]
    yield "full-to-chunk", _case(_engine(_full(2)), _engine(chunk, tp_size=2), 13)
    yield "chunk-to-full", _case(_engine(chunk), _engine(_full(2), tp_size=2), 6)
    yield "latent-to-window", _case(_engine(_latent(8)), _engine(latent, tp_size=2), 37)
    fewer = attrs.evolve(retained, extra_retained_tokens=0)
    yield "retained-tokens-differ", _case(_engine(fewer), _engine(retained, tp_size=2), 13)


def _window_kinds(size: int) -> dict[str, LayerSpec]:
    fields = {"block_size": 4, "total_num_kv_heads": 2, "head_size": 2, "dtype": "uint8"}
    window: Any = fields | {"sliding_window": size}
    chunk: Any = fields | {"attention_chunk_size": size}
    return {"window": SlidingWindowSpec(**window), "chunk": ChunkedLocalAttentionSpec(**chunk)}


def _states(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    sizes: dict[str, Any] = {"conv_kernel": 4, "dtype": "uint8"}
    kinds = {
        "mamba1": MambaSpec.mamba1(intermediate_size=6, state_size=2, **sizes),
        "mamba2": MambaSpec.mamba2(num_heads=4, head_dim=2, n_groups=1, state_size=2, **sizes),
        "mamba2-groups2": MambaSpec.mamba2(
            num_heads=4, head_dim=2, n_groups=2, state_size=3, ssm_dtype="float32", **sizes
        ),
        "gated-delta-net": MambaSpec.gated_delta_net(
            num_k_heads=2, num_v_heads=4, head_k_dim=2, head_v_dim=1, **sizes
        ),
        "short-conv": MambaSpec.short_conv(conv_dim=6, **sizes),
        "replicated": MambaSpec.replicated_state(state_bytes=5),
    }
    pairs = list(product((1, 2, 3, 4), repeat=2))
    for name, spec in kinds.items():
        for p, c in _some(pairs, large, 2 if name == "mamba2" else 3):
            case = _case(
                _engine(spec, tp_size=p, layout="LBHNC"), _engine(spec, tp_size=c, layout="LBNHC")
            )
            yield f"{name}-tp{p}-tp{c}", case
    mamba = MambaSpec.mamba2(
        num_heads=2, head_dim=2, n_groups=1, state_size=2, block_size=4, **sizes
    )
    for tokens, cached in ((0, 0), (1, 0), (8, 0), (9, 8), (9, 9)):
        case = _case(_engine(mamba, tp_size=2), _engine(mamba), tokens, cached=cached)
        yield f"n{tokens}-cached{cached}", case
    long = _case(_engine(mamba), _engine(mamba, tp_size=2), 9)
    tables = {"producer_blocks": {"g": [2, 0, 1]}, "consumer_blocks": {"g": [1, 3, 2]}}
    yield "block-of-last-token", _with_tables(long, **tables)
    yield from _state_blocks(mamba)
    extra = MambaSpec.short_conv(conv_dim=6, num_speculative_tokens=2, **sizes)
    rows = _engine(extra), _engine(kinds["short-conv"])
    yield "producer-has-more-rows", _case(*rows, common_states=True)
    yield "consumer-has-more-rows", _case(*rows[::-1], common_states=True)
    four, two = (_engine(kinds["replicated"], tp_size=size) for size in (4, 2))
    for policy in ("spread", "stripe"):
        yield f"replicated-{policy}", _case(four, two, 9, policy=ReplicaPolicy(policy, 1))
    decode = _engine(kinds["mamba2"], tp_size=2, dcp_size=2)
    yield "context-ranks-hold-all", _case(decode, _engine(kinds["mamba2"], pcp_size=2))


def _state_blocks(mamba: MambaSpec) -> Iterator[tuple[str, Case]]:
    """Yield tables of several blocks. *mamba* has blocks of 4 tokens."""
    plain, null = _engine(mamba), _engine(mamba, null=0)
    tables: dict[str, tuple[EngineSpec, int, Any, Any]] = {
        "spare-blocks": (plain, 7, [2, 0, 1, 3], [1, 3, 2]),
        "table-begins-late": (plain, 10, [2, 0, 1], BlockTable([3, 1, 2], first_token=4)),
        "table-of-one-late-block": (plain, 10, BlockTable([3], first_token=8), [1, 3, 2]),
        "table-of-null-blocks": (null, 10, [0, 0, 3], [0, 0, 1]),
        "slot-and-blocks": (plain, 10, [2], [1, 3, 2]),
    }
    for name, (engine, tokens, producer_ids, consumer_ids) in tables.items():
        case = _case(engine, attrs.evolve(engine, parallel=ParallelConfig(tp_size=2)), tokens)
        case = attrs.evolve(case, producer_pool={"g": 4}, consumer_pool={"g": 4})
        ids = {"producer_blocks": {"g": producer_ids}, "consumer_blocks": {"g": consumer_ids}}
        yield name, _with_tables(case, **ids)
    sizes = ParallelConfig(tp_size=2, dcp_size=2)
    case = _case(attrs.evolve(plain, parallel=sizes), attrs.evolve(plain, parallel=sizes), 7)
    two = {"producer_blocks": {"g": [2, 0]}, "consumer_blocks": {"g": [1, 3]}}
    yield "block-of-last-token-contexts", _with_tables(case, **two)
    replicated = MambaSpec.replicated_state(state_bytes=5)
    for name, own, other, dcp in (
        ("blocks", 4, 4, 1), ("unequal-blocks", 2, 4, 1), ("contexts", 4, 4, 2),
    ):  # fmt: skip
        specs = [attrs.evolve(replicated, block_size=size) for size in (own, other)]
        first, second = _engine(specs[0], tp_size=4), _engine(specs[1], tp_size=2, dcp_size=dcp)
        yield f"stripe-{name}", _case(first, second, 6, policy=ReplicaPolicy("stripe", 1))


def _ring(rows: int, ratio: int = 4, **fields: Any) -> CircularBufferSpec:  # noqa: ANN401
    sizes: dict[str, Any] = {"head_size": 3, "dtype": "uint8", "compress_ratio": ratio}
    return CircularBufferSpec(block_size=rows, **sizes | fields)


def _rings(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    kinds = ((2, False), (3, False), (3, True), (4, True), (8, False))
    for (ratio, overlap), tokens in product(kinds, (0, 1, 7, 8, 10, 21) if large else (8, 10, 21)):
        least = ratio * (1 + overlap) - 1
        sizes = (least, 8, 16) if large or tokens == 10 else (8, 16)  # noqa: PLR2004
        for p, c in product(sizes, repeat=2):
            first, second = (_engine(_ring(rows, ratio, overlap=overlap)) for rows in (p, c))
            name = f"ratio{ratio}{'-overlap' if overlap else ''}-rows{p}-rows{c}-n{tokens}"
            yield name, _case(first, second, tokens)
    small, great = _ring(8, overlap=True), _ring(16, overlap=True)
    for p, c in product((1, 2, 3, 4), repeat=2):
        for policy in ("spread", "stripe") if p > 1 else ("spread",):
            case = _case(
                _engine(small, tp_size=p), _engine(great, tp_size=c), 10,
                policy=ReplicaPolicy(policy, 1),
            )  # fmt: skip
            yield f"tp{p}-tp{c}-{policy}", case
    heads = {"num_kv_heads": 2, "overlap": True}
    for own, other in (("LBHNC", "LBNHC"), ("LBNHC", "BLHNC"), ("BHLNC", "LKBNHC")):
        first, second = (
            _engine(_ring(rows, **heads), ("layers.0", "layers.1"), layout=layout, tp_size=tp)
            for rows, layout, tp in ((8, own, 2), (16, other, 3))
        )
        yield f"two-heads-{own}-to-{other}", _case(first, second, 10)
    contexts = _engine(small, tp_size=2, dcp_size=2), _engine(great, pcp_size=2, interleave_size=4)
    yield "context-ranks-hold-all", _case(*contexts, 10)
    groups = [
        [
            _group("rows", _latent(8, tokens_per_state=4), "layers.0"),
            _group("ring", own, "layers.1"),
        ]
        for own in (small, great)
    ]
    for name, cached in (("none", 0), ("some", 8), ("by-group", {"ring": 8})):
        case = _case(_engine(groups[0]), _engine(groups[1], tp_size=2), 10, cached=cached)
        yield f"beside-rows-cached-{name}", case
    rings = [
        _engine([_group("full", _full(2), "layers.0"), _group("ring", own, "layers.1")], null=0)
        for own in (_ring(8, head_size=4, overlap=True), _ring(8, head_size=4, overlap=True))
    ]
    yield "shares-memory", _case(rings[0], rings[1], 10, shared=True)


def _refused_rings() -> Iterator[tuple[str, Case]]:
    """Yield rings that mean other things, and requests without one block of the ring."""
    changes: dict[str, Any] = {
        "compress_ratio": 2, "overlap": True, "head_size": 4, "num_kv_heads": 2,
    }  # fmt: skip
    for field, value in changes.items():
        other = attrs.evolve(_ring(8), **{field: value})
        yield f"ring-{field}-differs", _case(_engine(_ring(8)), _engine(other), 9)
    good = _case(_engine(_ring(8), null=0), _engine(_ring(16), null=0), 10)
    tables: dict[str, Any] = {
        "is-empty": [], "has-two-blocks": [1, 2], "has-null-block": [0],
        "begins-late": BlockTable([1], first_token=16),
    }  # fmt: skip
    for name, table in tables.items():
        for side in ("producer", "consumer"):
            changed = {f"{side}_blocks": {"g": table}}
            yield f"{side}-ring-table-{name}", _with_tables(good, **changed)
    yield "cached-inside-group-of-ring", _case(_engine(_ring(8)), _engine(_ring(8)), 10, cached=6)


def _format_pairs() -> dict[str, tuple[LayerSpec, LayerSpec]]:
    """Return a spec of the producer and one of the consumer for each name."""

    def rotary(order: str, start: int = 0, size: int = 4) -> KeyContent:
        return KeyContent(rotary=order, rotary_start=start, rotary_size=size)

    wide: dict[str, Any] = {"head_size": 16, "dtype": "bfloat16"}
    return {
        "scales": (
            _full(4, dtype="float8_e4m3fn", scale_dtype="float32", head_size=4),
            _full(4, 8, dtype="float8_e4m3fn", scale_dtype="float32", head_size=4),
        ),
        "scales-of-two-tokens": (
            _full(4, scale_dtype="float8_e4m3fn", head_size=4, elements_per_scale=2,
                  tokens_per_scale=2),
            _full(4, 8, scale_dtype="float8_e4m3fn", head_size=4, elements_per_scale=2,
                  tokens_per_scale=2),
        ),
        "packed-rows": (_full(4, state_content_bytes=7), _full(4, 8, state_content_bytes=7)),
        "rows-of-four-tokens": (
            _latent(8, tokens_per_state=4), _latent(16, tokens_per_state=4)
        ),
        "keys-transposed": (
            _full(4, head_size=4), _full(4, head_size=4, page_format="keys-transposed")
        ),
        "x-packed": (_full(4, **wide), _full(4, **wide, page_format="x-packed")),
        "halves-to-pairs": (
            _full(4, head_size=4, key_content=rotary("halves")),
            _full(4, head_size=4, key_content=rotary("pairs")),
        ),
        "latent-rotary-first": (
            _latent(key_content=rotary("pairs", 0)), _latent(key_content=rotary("halves", 2))
        ),
        "keys-transposed-pairs": (
            _full(4, head_size=4, key_content=rotary("halves")),
            _full(4, head_size=4, page_format="keys-transposed", key_content=rotary("pairs")),
        ),
        "x-packed-pairs": (
            _full(4, **wide, key_content=rotary("halves", 2, 12)),
            _full(4, **wide, page_format="x-packed", key_content=rotary("pairs", 2, 12)),
        ),
        "sizes-given": (
            _full(4, head_size=4, scale_dtype="float32"),
            _full(4, head_size=4, scale_dtype="float32", head_size_v=4, elements_per_scale=4),
        ),
        "opaque-page": (
            _full(4, page_format="opaque:fp4"), _full(4, page_format="opaque:fp4")
        ),
        "opaque-page-of-four-tokens": (
            _full(4, 8, page_format="opaque:fp4", page_block_size=4),
            _full(4, 12, page_format="opaque:fp4", page_block_size=4),
        ),
        "spans-heads": (
            _full(4, state_content_bytes=7, spans_heads=True),
            _full(4, 8, state_content_bytes=7, spans_heads=True),
        ),
    }  # fmt: skip


def _formats(_large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    for name, (producer, consumer) in _format_pairs().items():
        whole = name in {"opaque-page", "opaque-page-of-four-tokens", "spans-heads"}
        for p, c in ((2, 2),) if whole else ((1, 1), (2, 3), (4, 2)):
            # A format that cuts the content needs planes of K and V, with rows just before content.
            layout = "LBKHNC" if getattr(consumer, "page_format", "") in CUT else "LBNHC"
            first = _engine(producer, tp_size=p, layout="LBHNC")
            second = _engine(consumer, tp_size=c, layout=layout)
            for tokens, cached in ((13, 0), (16, 8)):
                case = _case(first, second, tokens, cached=cached)
                yield f"{name}-tp{p}-tp{c}-n{tokens}-cached{cached}", case
    # Both sides have the same ranges of units, with other numbers of ranks.
    spans = _full(2, state_content_bytes=7, spans_heads=True)
    yield "spans-heads-tp2-tp4", _case(_engine(spans, tp_size=2), _engine(spans, tp_size=4), 13)


def _groups(_large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    window = _window_kinds(5)["window"]
    state = MambaSpec.mamba2(
        num_heads=4, head_dim=2, n_groups=1, state_size=2, conv_kernel=4, dtype="uint8"
    )
    cross = CrossAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=2, dtype="uint8")
    named = {"full": _full(2), "window": window, "state": state, "cross": cross}

    def of(*names: str) -> list[KVCacheGroup]:
        return [_group(name, named[name], f"layers.{at}.{name}") for at, name in enumerate(names)]

    for names in (("full", "window"), ("full", "state"), ("window", "full", "state")):
        for p, c in ((1, 2), (4, 1), (2, 3)):
            case = _case(_engine(of(*names), tp_size=p), _engine(of(*names), tp_size=c), 11)
            yield f"{'-'.join(names)}-tp{p}-tp{c}", case
    both = of("full", "cross")
    yield "cross-attention", _case(_engine(both), _engine(both, tp_size=2), 6, encoder=9)
    layers = ["layers.0", "layers.1", "layers.2"]
    one = [_group("all", _full(2), *layers)]
    three = [_group(f"only{at}", _full(2), layer) for at, layer in enumerate(layers)]
    yield "one-group-to-three", _case(_engine(one, tp_size=2), _engine(three))
    yield "three-groups-to-one", _case(_engine(three), _engine(one, tp_size=2))
    draft = [attrs.evolve(one[0], excluded=[layers[2]])]
    yield "excluded-by-producer", _case(_engine(draft), _engine(one, tp_size=2))
    yield "excluded-by-consumer", _case(_engine(one, tp_size=2), _engine(draft))
    sizes = {layers[0]: _full(2), layers[1]: _full(4, head_size=3), layers[2]: _full(2)}
    uniform = UniformTypeKVCacheSpecs(specs=sizes)
    for p, c in ((2, 1), (4, 3)):
        case = _case(_engine(uniform, layers, tp_size=p), _engine(uniform, layers, tp_size=c))
        yield f"layers-of-two-sizes-tp{p}-tp{c}", case
    hybrid = [_group("full0", _full(2), "layers.0"), _group("window1", window, "layers.1")]
    shared = _case(_engine(hybrid), _engine(hybrid, tp_size=2), 11, shared=True)
    yield "groups-share-memory", shared
    yield from _notified()
    yield from _excluded(layers)
    case = _case(_engine(both), _engine(both), 6, encoder=9, cached={"cross": 5})
    yield "cached-encoder-tokens", case


def _excluded(layers: list[str]) -> Iterator[tuple[str, Case]]:
    """Yield engines with layers that do not move."""
    stages = [f"layers.{number}" for number in range(4)]
    out = {"excluded": [stages[3]]}
    case = _case(
        _engine(_full(2), stages, group=out, pp_size=2), _engine(_full(2), stages[::-1], pp_size=3)
    )
    yield "excluded-layer-counts-for-stages", case
    own = {"excluded": ["draft.7"]}
    case = _case(
        _engine(_full(2), [*layers, "draft.7"], group=own, pp_size=2), _engine(_full(2), layers)
    )
    yield "consumer-lacks-excluded-layer", case
    yield "producer-lacks-excluded-layer", _case(case.consumer, case.producer)
    other = UniformTypeKVCacheSpecs(specs={layers[0]: _full(2), layers[1]: _full(3)})
    case = _case(
        _engine(other, layers[:2], group={"excluded": [layers[1]]}), _engine(_full(2), layers[:2])
    )
    yield "excluded-layer-differs", case


def _notified() -> Iterator[tuple[str, Case]]:
    """Yield transfers in which the order or the layers of classes decide who reads or notifies."""
    layers = ["layers.0", "layers.1", "layers.2"]

    def apart(order: Sequence[int]) -> list[KVCacheGroup]:
        return [_group(f"g{at}", _latent(), layers[at]) for at in order]

    in_order = _engine(apart(range(3)), tp_size=8)
    # The consumer rank of the last stage notifies all producer ranks that no rank reads.
    yield "consumer-groups-in-other-order", _case(in_order, _engine(apart([2, 0, 1]), pp_size=3))
    yield "layers-in-other-order", _case(in_order, _engine(_latent(), layers[::-1], pp_size=3))
    # Layers with parts of equal sizes are two kinds if their elements differ.
    specs = {layers[0]: _latent(), layers[1]: _latent(dtype="int8")}
    two = UniformTypeKVCacheSpecs(specs=specs)
    producer = _engine(two, layers[:2], tp_size=4)
    yield "layers-of-two-dtypes", _case(producer, _engine(two, layers[:2], tp_size=2, pp_size=2))
    # The layers 0 and 2 are one kind, so the producer's group of layer 2 comes before that of 1.
    kinds = {**specs, layers[2]: _latent()}
    groups = [_group(f"g{at}", spec, layer) for at, (layer, spec) in enumerate(kinds.items())]
    case = _case(
        _engine(groups, tp_size=4, pp_size=2),
        _engine(UniformTypeKVCacheSpecs(specs=kinds), layers, pp_size=3),
    )
    yield "kinds-in-turns", case


def _steps(large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    layers = ("layers.0", "layers.1", "layers.2")
    window = _window_kinds(5)["window"]
    kinds = {"full": (_full(2), _full(2, 8)), "latent": (_latent(), _latent(8)),
             "window": (window, attrs.evolve(window, block_size=8))}  # fmt: skip
    for (name, (p, c)), tokens in product(kinds.items(), (1, 2, 7, 16, 19)):
        for cached in sorted({0, tokens // 2}) if large else (0,):
            first, second = _engine(p, layers, tp_size=2), _engine(c, layers, tp_size=3)
            yield f"{name}-n{tokens}-cached{cached}", _case(first, second, tokens, cached=cached)
    for tokens in (7, 29):
        first = _engine(_latent(8), layers, tp_size=2, dcp_size=2, interleave_size=2)
        yield f"dcp2-pp3-n{tokens}", _case(first, _engine(_latent(4), layers, pp_size=3), tokens)
    state = MambaSpec.short_conv(conv_dim=4, conv_kernel=3, dtype="uint8")
    full = _group("full", _full(2), *layers[:2])
    groups = [full, _group("state", state, layers[2])]
    yield "full-and-state", _case(_engine(groups), _engine(groups, tp_size=2), 9)
    cross = CrossAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=2, dtype="uint8")
    groups = [full, _group("cross", cross, layers[2])]
    yield "full-and-cross", _case(_engine(groups), _engine(groups, tp_size=2), 6, encoder=9)
    sides = [[full, _group("ring", _ring(own, overlap=True), layers[2])] for own in (8, 16)]
    yield "full-and-ring", _case(_engine(sides[0]), _engine(sides[1], tp_size=2), 10)
    rows = _latent(8, tokens_per_state=4)
    yield "rows-of-four-tokens", _case(_engine(rows, layers), _engine(rows, layers, tp_size=2), 14)


def _refusals(_large: bool) -> Iterator[tuple[str, Case]]:  # noqa: FBT001
    plain = _full(4, head_size=4)
    for field, value in (
        ("total_num_kv_heads", 8), ("head_size", 2), ("head_size_v", 2), ("dtype", "int8"),
        ("state_content_bytes", 8), ("scale_dtype", "float32"), ("scales_digest", "0" * 64),
        ("key_content", KeyContent(rotary="none")), ("tokens_per_state", 2),
        ("spans_heads", True), ("page_format", "opaque:fp4"),
    ):  # fmt: skip
        changed: dict[str, Any] = {field: value}
        other = attrs.evolve(plain, **changed)
        yield f"{field}-differs", _case(_engine(plain), _engine(other))
    whole = attrs.evolve(plain, state_content_bytes=7, spans_heads=True)
    yield "whole-units-cut", _case(_engine(whole, tp_size=2), _engine(whole))
    for producer, consumer in ((4, 6), (6, 4)):
        windows = [_window_kinds(size)["window"] for size in (producer, consumer)]
        case = _case(_engine(windows[0]), _engine(windows[1]))
        yield f"window{producer}-to-window{consumer}", case
    yield "other-layer", _case(_engine(plain), _engine(plain, ("layers.1",)))
    yield from _refused_specs(plain)
    yield from _refused_tables(plain)
    yield from _refused_states()
    yield from _refused_rings()


def _refused_specs(plain: FullAttentionSpec) -> Iterator[tuple[str, Case]]:
    """Yield engines whose layers do not fit together."""

    def keys(order: str, start: int = 0, size: int = 4, **fields: Any) -> LayerSpec:  # noqa: ANN401
        content = KeyContent(rotary=order, rotary_start=start, rotary_size=size)
        return attrs.evolve(plain, key_content=content, **fields)

    def latent(start: int) -> LayerSpec:
        return _latent(key_content=KeyContent(rotary="pairs", rotary_start=start, rotary_size=2))

    normal = KeyContent(rotary="halves", rotary_size=4, normalized=True)
    scaled: Any = {"scale_dtype": "float32", "elements_per_scale": 2}
    opaque: Any = {"page_format": "opaque:fp4"}
    chunk = _window_kinds(4)["chunk"]
    state: Any = {"conv_kernel": 4, "dtype": "uint8"}
    sizes: Any = {"block_size": 4, "total_num_kv_heads": 4, "head_size": 4, "dtype": "uint8"}
    pairs: dict[str, tuple[LayerSpec, LayerSpec]] = {
        "rotary-size-differs": (keys("halves"), keys("halves", size=2)),
        "rotary-start-differs": (keys("halves", 0, 2), keys("halves", 2, 2)),
        "normalized-differs": (keys("halves"), attrs.evolve(plain, key_content=normal)),
        # Pairs cannot become halves if a row is not one key, or if its elements cannot move.
        "pairs-of-two-tokens": (
            keys("pairs", tokens_per_state=2), keys("halves", tokens_per_state=2)
        ),
        "pairs-with-several-scales": (keys("pairs", **scaled), keys("halves", **scaled)),
        "pairs-in-packed-rows": (
            keys("pairs", state_content_bytes=7), keys("halves", state_content_bytes=7)
        ),
        "pairs-of-spanned-heads": (
            keys("pairs", spans_heads=True), keys("halves", spans_heads=True)
        ),
        "latent-rotary-in-the-middle": (latent(2), latent(4)),
        "opaque-formats-differ": (
            attrs.evolve(plain, **opaque), attrs.evolve(plain, page_format="opaque:fp6")
        ),
        "opaque-pages-of-other-sizes": (
            attrs.evolve(plain, **opaque), attrs.evolve(plain, **opaque, block_size=8)
        ),
        "window-to-chunk": (_window_kinds(4)["window"], chunk),
        "chunk4-to-chunk6": (chunk, _window_kinds(6)["chunk"]),
        "full-to-latent": (_full(1, head_size=6), _latent()),
        "full-to-cross": (plain, CrossAttentionSpec(**sizes)),
        "state-units-differ": (
            MambaSpec.short_conv(conv_dim=4, **state), MambaSpec.short_conv(conv_dim=6, **state)
        ),
    }  # fmt: skip
    for name, (first, second) in pairs.items():
        yield name, _case(_engine(first), _engine(second), encoder=6)
    layers = ("layers.0", "layers.1", "layers.2")
    other = attrs.evolve(plain, head_size=8)
    yield "three-layers-differ", _case(_engine(plain, layers), _engine(other, layers))
    yield "consumer-lacks-layer", _case(_engine(plain, layers), _engine(plain, layers[:2]))
    page = attrs.evolve(plain, **opaque)
    yield "opaque-page-cut", _case(_engine(page), _engine(page, tp_size=2))


def _refused_tables(plain: FullAttentionSpec) -> Iterator[tuple[str, Case]]:
    """Yield block tables and prefixes that cannot be served."""
    good = _case(_engine(plain, null=0), _engine(plain, null=0), 9)
    late = BlockTable([2, 3], first_token=4)
    between = BlockTable([1, 2, 3], first_token=2)
    changes: tuple[tuple[str, dict[str, Any]], ...] = (
        ("producer-lacks-last-block", {"producer_blocks": {"g": [1, 2]}}),
        ("consumer-lacks-last-block", {"consumer_blocks": {"g": [1, 2]}}),
        ("producer-dropped-first-block", {"producer_blocks": {"g": [0, 2, 3]}}),
        ("consumer-has-null-block", {"consumer_blocks": {"g": [0, 2, 3]}}),
        ("consumer-repeats-block", {"consumer_blocks": {"g": [2, 2, 3]}}),
        ("producer-lacks-group", {"producer_blocks": {}}),
        ("consumer-lacks-group", {"consumer_blocks": {}}),
        ("producer-table-begins-late", {"producer_blocks": {"g": late}}),
        ("consumer-table-begins-late", {"consumer_blocks": {"g": late}}),
        ("producer-repeats-block", {"producer_blocks": {"g": [2, 2, 3]}}),
        ("producer-has-negative-id", {"producer_blocks": {"g": [-1, 2, 3]}}),
        ("consumer-has-negative-id", {"consumer_blocks": {"g": [-1, 2, 3]}}),
        # The first block of the table is cached, and its id is also that of a block that moves.
        ("consumer-repeats-cached-block",
         {"consumer_blocks": {"g": [2, 2, 3]}, "cached_tokens": 4}),
        ("producer-table-begins-inside-block",
         {"producer_blocks": {"g": between}, "cached_tokens": 4}),
        ("consumer-table-begins-inside-block",
         {"consumer_blocks": {"g": between}, "cached_tokens": 4}),
    )  # fmt: skip
    for name, tables in changes:
        yield name, _with_tables(good, **tables)
    contexts = _engine(_latent(), tp_size=2, dcp_size=2)
    inside = {"g": BlockTable([1, 2, 3], first_token=4)}
    case = _with_tables(_case(contexts, contexts, 20, cached=8), consumer_blocks=inside)
    yield "consumer-table-begins-inside-virtual-block", case
    rows = _latent(8, tokens_per_state=4)
    yield "cached-inside-row", _case(_engine(rows), _engine(rows), 14, cached=6)
    split = _engine(rows, tp_size=2, dcp_size=2, interleave_size=4)
    yield "cached-inside-row-of-contexts", _case(split, split, 14, cached=6)
    window = SlidingWindowMLASpec(
        block_size=8, head_size=6, dtype="uint8", sliding_window=6, tokens_per_state=4
    )
    yield "cached-inside-row-of-window", _case(_engine(window), _engine(window), 22, cached=18)
    scales = _full(2, 8, scale_dtype="float32", tokens_per_scale=4)
    yield "cached-inside-row-of-scales", _case(_engine(scales), _engine(scales), 14, cached=6)
    cross = CrossAttentionSpec(block_size=4, total_num_kv_heads=2, head_size=2, dtype="uint8")
    known = _case(_engine(cross), _engine(cross), encoder=6)
    yield "encoder-tokens-missing", _with_tables(known, encoder_tokens=None)


def _refused_states() -> Iterator[tuple[str, Case]]:
    """Yield block tables in which the state has no block of its own."""
    spec = MambaSpec.short_conv(conv_dim=4, conv_kernel=3, dtype="uint8", block_size=4)
    tables = {"producer_blocks": {"g": [1, 2, 3]}, "consumer_blocks": {"g": [2, 1, 3]}}
    good = _with_tables(_case(_engine(spec, null=0), _engine(spec, null=0), 10), **tables)
    bad: dict[str, Any] = {
        "lacks-block": [1, 2],
        "block-is-null": [1, 2, 0],
        "table-begins-late": BlockTable([1, 2], first_token=12),
        "late-table-has-one-block": BlockTable([1], first_token=4),
        "table-begins-inside-block": BlockTable([1, 2, 3], first_token=2),
    }
    for name, table in bad.items():
        for side in ("producer", "consumer"):
            yield f"{side}-state-{name}", _with_tables(good, **{f"{side}_blocks": {"g": table}})
    yield "consumer-state-block-is-repeated", _with_tables(good, consumer_blocks={"g": [3, 2, 3]})


FAMILIES: dict[str, Family] = {
    "tp": _tp,
    "replicas": _replicas,
    "shardings": _shardings,
    "pp": _pp,
    "cp": _cp,
    "blocks": _blocks,
    "layouts": _layouts,
    "prefixes": _prefixes,
    "windows": _windows,
    "states": _states,
    "rings": _rings,
    "formats": _formats,
    "groups": _groups,
    "steps": _steps,
    "refusals": _refusals,
}
"""The families, by name. A function receives whether the large set is wanted."""
