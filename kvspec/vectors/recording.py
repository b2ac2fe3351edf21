"""Record one transfer as a vector: plan it, move its bytes, judge them, and write the result.

Invariant: `record` returns a vector only if the byte oracle found every byte right, if no byte was
written twice, and if the ids of a prepared list move the same bytes as the descriptors.

How it works:
    A `World` holds the memory of both sides. The library's descriptors are addresses in it, which
    differ in every process. So a copy is written as the number of a memory and the offset in it.
    Copies are *canonical*: sorted by consumer offset, and joined where both sides continue.

        >>> canonical([(0, 8, 0, 4, 2), (0, 6, 0, 2, 2), (0, 0, 0, 10, 2)])
        ((0, 6, 0, 2, 4), (0, 0, 0, 10, 2))
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any, TypeVar

import attrs
import msgspec

from kvspec.descriptors.table import build_table
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import KVSpecError, MismatchError, SpecError
from kvspec.memory.rank_cache import RankCache
from kvspec.ownership.parallel import ParallelConfig, RankId
from kvspec.ownership.part import Part
from kvspec.ownership.replicas import ReplicaPolicy, Role
from kvspec.specs import CircularBufferSpec, LayerSpec, MambaSpec
from kvspec.testing.case import Case
from kvspec.testing.laws.steps import Schedule, schedule_of
from kvspec.testing.world import Pair, World, described, held, plan_of, selected, world
from kvspec.vectors import structure as to
from kvspec.vectors.families import FamilyTransfer

Struct = TypeVar("Struct", bound=msgspec.Struct)
# Fields of a layer's spec that other fields of a vector contain.
_ELSEWHERE = {"block_size", "state_parts", "specs", "page_block_size"}


def record(transfer: FamilyTransfer) -> to.Vector:
    """Return the vector of one transfer.

    Args:
        transfer: The transfer.

    Raises:
        KVSpecError: If the oracle finds a wrong byte, or a transfer that must be refused is not.
            Both are bugs of the library.
    """
    name, case = transfer.name, transfer.case
    if transfer.refused:
        return _vector(name, case, to.Expected((), (), (), refused=_refused(transfer)), {}, {})
    here = world(case)
    copies = {pair: _copies(here, pair) for pair in _pairs(here)}
    _confirm(name, here, copies)
    expected = to.Expected(
        slices=_slices(here),
        notifies=_notifies(here),
        copies=_written(here, copies),
        steps=_steps(name, here, schedule_of(case)) if transfer.steps else (),
    )
    caches = (
        {rank: held for rank, (held, _) in side.items()}
        for side in (here.producers, here.consumers)
    )
    return _vector(name, case, expected, *caches)


def _refused(transfer: FamilyTransfer) -> tuple[str, ...]:
    """Return the fields that the library names when it refuses *transfer*."""
    case = transfer.case
    try:
        plan = plan_of(case)
        sides = held(case.producer, case.producer_pool), held(case.consumer, case.consumer_pool)
        for edge in plan.edges:
            caches = sides[0][edge.producer][0], sides[1][edge.consumer][0]
            build_table(plan, *caches).select(case.request)
    except MismatchError as error:
        return tuple(sorted({mismatch.field for mismatch in error.mismatches}))
    except SpecError as error:
        return (error.field,)
    raise KVSpecError(f"{transfer.name}: expected a refusal, but it was not refused")


def canonical(copies: Iterable[to.Copy]) -> tuple[to.Copy, ...]:
    """Return *copies*, sorted by consumer offset and joined where both sides continue."""
    joined: list[to.Copy] = []
    for copy in sorted(copies, key=lambda copy: copy[2:4]):
        source, start, target, offset, length = copy
        if joined:
            last = joined[-1]
            if last[::2][:2] == (source, target) and (last[1] + last[4], last[3] + last[4]) == (
                start,
                offset,
            ):
                joined[-1] = (*last[:4], last[4] + length)
                continue
        joined.append(copy)
    return tuple(joined)


def _pairs(here: World) -> list[Pair]:
    return sorted({(edge.producer, edge.consumer) for edge in here.plan.edges})


def _copies(
    here: World,
    pair: Pair,
    layers: frozenset[str] | None = None,
    tokens: range | None = None,
    *,
    by_ids: bool = False,
) -> tuple[to.Copy, ...]:
    """Return the canonical copies of two ranks, for some layers and tokens or for all."""
    table, request = here.table(*pair, layers), here.case.request
    found = selected(table, request) if by_ids else described(table, request, tokens)
    memories = [
        side[rank][0] for side, rank in zip((here.producers, here.consumers), pair, strict=True)
    ]
    return canonical(
        (*_place(memories[0], source), *_place(memories[1], target), length)
        for source, target, length in found
    )


def _place(cache: RankCache, address: int) -> tuple[int, int]:
    """Return the index of the memory that contains *address*, and the offset in it."""
    for index, memory in enumerate(cache.memory):
        if memory.address <= address < memory.end:
            return index, address - memory.address
    raise KVSpecError(f"address {address:#x} lies in no memory of {cache.rank}")


def _confirm(name: str, here: World, copies: Mapping[Pair, tuple[to.Copy, ...]]) -> None:
    """Raise `KVSpecError` unless the oracle finds every byte right after *copies*."""
    for pair, found in copies.items():
        if found != _copies(here, pair, by_ids=True):
            raise KVSpecError(f"{name}: ids and descriptors of {pair[0]} and {pair[1]} differ")
    _move(name, here, [copies])


def _move(name: str, here: World, steps: Iterable[Mapping[Pair, tuple[to.Copy, ...]]]) -> None:
    """Execute the copies of *steps*, and let the oracle judge the memory of the consumers."""
    here.restore()
    written: dict[RankId, list[tuple[int, int, int]]] = {rank: [] for rank in here.consumers}
    for copies in steps:
        for (producer, consumer), found in copies.items():
            sides = here.producers[producer][0].memory, here.consumers[consumer][0].memory
            here.copy(
                (producer, consumer),
                [
                    (sides[0][m].address + a, sides[1][n].address + b, length)
                    for m, a, n, b, length in found
                ],
            )
            written[consumer] += [(n, b, b + length) for _, _, n, b, length in found]
    faults = here.differences()
    for rank, ranges in written.items():
        for (n, _, stop), (m, start, _) in pairwise(sorted(ranges)):
            if n == m and start < stop:
                faults.append(f"consumer {rank}: byte {start} is written twice")
    if faults:
        raise KVSpecError(f"{name}: {faults[0]}")


def _steps(name: str, here: World, schedule: Schedule) -> tuple[to.VectorStep, ...]:
    moved = [
        {pair: _copies(here, pair, layers, tokens) for pair in _pairs(here)}
        for layers, tokens in schedule
    ]
    _move(name, here, moved)
    return tuple(
        to.VectorStep(tuple(sorted(layers)), (tokens.start, tokens.stop), _written(here, copies))
        for (layers, tokens), copies in zip(schedule, moved, strict=True)
    )


def _written(here: World, copies: Mapping[Pair, tuple[to.Copy, ...]]) -> tuple[to.Copies, ...]:
    """Return the copies of each pair of ranks that moves bytes, by consumer and producer."""
    numbered = {_numbers(here.case, pair): moved for pair, moved in copies.items() if moved}
    return tuple(
        to.Copies(producer, consumer, numbered[producer, consumer])
        for producer, consumer in sorted(numbered, key=lambda pair: pair[::-1])
    )


def _numbers(case: Case, pair: Pair) -> tuple[int, int]:
    """Return the indices of the two ranks of *pair*."""
    producer, consumer = pair
    return (
        case.producer.parallel.ranks.index(producer),
        case.consumer.parallel.ranks.index(consumer),
    )


def _slices(here: World) -> tuple[to.Slice, ...]:
    slices = [
        to.Slice(
            producer=producer,
            consumer=consumer,
            layers=found.layers,
            parts=found.parts,
            units=_interval(found.global_range),
            producer_units=_interval(found.remote_range),
            consumer_units=_interval(found.local_range),
            stripe=(found.stripe.first, found.stripe.step),
        )
        for edge in here.plan.edges
        for producer, consumer in [_numbers(here.case, (edge.producer, edge.consumer))]
        for found in edge.slices
    ]
    return tuple(
        sorted(slices, key=lambda s: (s.consumer, s.producer, s.layers, s.parts, s.units, s.stripe))
    )


def _interval(units: range) -> tuple[int, int]:
    return units.start, units.stop


def _notifies(here: World) -> tuple[tuple[int, int], ...]:
    case = here.case
    pairs = (
        _numbers(case, (producer, consumer))
        for producer in case.producer.parallel.ranks
        for consumer in here.plan.notifiers(producer)
    )
    return tuple(sorted(pairs))


def _vector(
    name: str,
    case: Case,
    expected: to.Expected,
    producers: Mapping[RankId, RankCache],
    consumers: Mapping[RankId, RankCache],
) -> to.Vector:
    return to.Vector(
        id=name,
        producer=_engine(case.producer, producers),
        consumer=_engine(case.consumer, consumers),
        policy=_policy(case),
        request=_request(case),
        expected=expected,
    )


def _copied(kind: type[Struct], source: object, **other: object) -> Struct:
    """Return a structure with the fields *other*, and the attributes of *source* for all others."""
    same = {name: getattr(source, name) for name in kind.__struct_fields__ if name not in other}
    return kind(**same, **other)


def _policy(case: Case) -> to.Policy:
    policy: ReplicaPolicy = case.replica_policy
    if policy.topology is None:
        return to.Policy(policy.name, policy.salt)
    producer, consumer = policy.topology.producer, policy.topology.consumer
    nodes = {node: number for number, node in enumerate([*producer.values(), *consumer.values()])}
    return to.Policy(
        policy.name,
        policy.salt,
        tuple(nodes[producer[rank]] for rank in case.producer.parallel.ranks),
        tuple(nodes[consumer[rank]] for rank in case.consumer.parallel.ranks),
    )


def _request(case: Case) -> to.Request:
    request = case.request

    def tables(role: Role) -> dict[str, to.Table]:
        blocks = request.producer_blocks if role == "producer" else request.consumer_blocks
        return {
            group: to.Table(tuple(table.block_ids.tolist()), table.first_token)
            for group, table in blocks.items()
        }

    cached = {group.name: request.hit(group.name, group.spec) for group in case.consumer.groups}
    return to.Request(
        num_tokens=request.num_tokens,
        producer_blocks=tables("producer"),
        consumer_blocks=tables("consumer"),
        cached=cached,
        encoder_tokens=request.encoder_tokens,
    )


def _engine(engine: EngineSpec, caches: Mapping[RankId, RankCache]) -> to.Engine:
    parallel: ParallelConfig = engine.parallel
    stages = None
    if parallel.stages is not None:
        stages = tuple(
            tuple(layer for layer, at in engine.stage_of.items() if at == stage)
            for stage in range(parallel.pp_size)
        )
    return _copied(
        to.Engine,
        parallel,
        groups=tuple(_group(engine, group) for group in engine.groups),
        ranks=tuple(_rank(rank, caches.get(rank)) for rank in parallel.ranks),
        stages=stages,
        null_block=engine.null_block,
        layout=engine.layout,
    )


def _group(engine: EngineSpec, group: KVCacheGroup) -> to.VectorGroup:
    kinds = tuple(_kind(engine, group, layers) for _, layers in group.layers_by_spec)
    return _copied(to.VectorGroup, group, block_size=group.spec.block_size, kinds=kinds)


def _kind(engine: EngineSpec, group: KVCacheGroup, layers: tuple[str, ...]) -> to.Kind:
    """Return layers with equal parts. They must have one meaning: a vector can state no more."""
    spec, *others = (group.spec.of_layer(layer) for layer in layers)
    meaning = _meaning(spec)
    for other in others:
        # The layers of a group may be padded differently, which changes only their strides.
        padded = attrs.evolve(other, page_size_padded=spec.page_size_padded)
        if _meaning(padded) != meaning:
            raise KVSpecError(f"group {group.name!r}: layers with equal parts must mean the same")
    parts = tuple(_part(engine, group, part) for part in spec.parts)
    return to.Kind(layers, parts, _live(spec), meaning)


def _part(engine: EngineSpec, group: KVCacheGroup, part: Part) -> to.VectorPart:
    explicit = part.name in group.shardings or part.units in engine.parallel.shardings
    ranges = tuple(map(_interval, engine.sharding(group, part).ranges)) if explicit else None
    return _copied(to.VectorPart, part, ranges=ranges)


def _live(spec: LayerSpec) -> to.Live:
    counts = "prompt" if spec.counts_prompt else "encoder"
    if isinstance(spec, MambaSpec):
        return to.Live("state")
    if isinstance(spec, CircularBufferSpec):
        return to.Live("ring and group" if spec.overlap else "ring", spec.compress_ratio)
    window = getattr(spec, "sliding_window", None)
    if window is not None:
        return to.Live("window", window + getattr(spec, "extra_retained_tokens", 0))
    chunk = getattr(spec, "attention_chunk_size", None)
    return to.Live("all", counts=counts) if chunk is None else to.Live("chunk", chunk)


def _meaning(spec: LayerSpec) -> dict[str, Any]:
    """Return the class of *spec* and those of its fields that are not the default."""
    given = {
        field.name: getattr(spec, field.name)
        for field in attrs.fields(type(spec))
        if field.name not in _ELSEWHERE and getattr(spec, field.name) != field.default
    }
    plain = {
        # The angles of a key content are None: engines of a vector do not state them.
        name: attrs.asdict(value, filter=lambda _, v: v is not None)
        if attrs.has(type(value))
        else value
        for name, value in given.items()
    }
    return {"kind": type(spec).__name__, **plain}


def _rank(rank: RankId, cache: RankCache | None) -> to.Rank:
    if cache is None:
        return to.Rank(rank.pp, rank.pcp, rank.tp, (), ())
    regions = []
    for region in cache.regions:
        memory, base = _place(cache, region.base)
        regions.append(_copied(to.VectorRegion, region, base=base, memory=memory))
    sizes = tuple(memory.length for memory in cache.memory)
    return to.Rank(rank.pp, rank.pcp, rank.tp, sizes, tuple(regions))
