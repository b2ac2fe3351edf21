"""The law of refusals, law 11: a system refuses an impossible transfer before any byte moves.

A system refuses by raising `KVSpecError`, `ValueError` or one of its own `refuses`. Any other
exception is a crash. A system that refuses the legal case, too, is not judged: the case is refused.

How it works:
    Each wrong case is a legal case with one change, after which the two engines disagree about the
    bytes, or a live block has no source or no place. Example: block 3 of the consumer must receive
    the tokens 0 to 3, and the pool has 8 blocks.

        change                              why it is wrong            the error must contain
        consumer_blocks["g"] = []           block 3 is missing         g
        consumer_blocks["g"] = [8]          the pool has no block 8    g
        consumer_blocks["g"] = [-1]         -1 is not a block          g
        producer_blocks["g"] = []           the tokens have no source  g
        dtype of the producer = "float16"   the dtypes differ          dtype
        head_size of the producer = 8       the rows differ            head_size
        layer l of the producer = other.l   the layer has no source    l
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from itertools import permutations
from typing import TYPE_CHECKING, Any

import attrs

from kvspec.check.counting import (
    cached_tokens_of,
    context_of,
    is_ring,
    live_positions,
    rank_units,
)
from kvspec.descriptors.request import BlockTable
from kvspec.errors import SpecError
from kvspec.testing.carve import count_kernel_blocks
from kvspec.testing.laws.owners import home, targets
from kvspec.testing.laws.system import NothingToJudgeError, Trial
from kvspec.testing.positions import rows_of

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.engines.group import KVCacheGroup
    from kvspec.ownership.parallel import RankId
    from kvspec.testing.case import Case

# A word that the error must contain, a description of the change, and the changed case.
Change = tuple[str, str, Trial]

# Sizes that each system has to compare. An engine with another one has other memory, but a system
# that reads only its own sizes accepts it.
_SIZE_FIELDS = ("head_size", "total_num_kv_heads", "head_size_v", "tokens_per_state")
# Another dtype of the same size: all addresses stay legal, so only a comparison can refuse it.
_OTHER_DTYPE = {
    "uint8": "int8",
    "bfloat16": "float16",
    "float8_e4m3fn": "float8_e5m2",
    "float32": "int32",
}


def refusal(trial: Trial) -> Iterator[str]:
    """Yield all changes after which the system does not refuse as it should, one a line."""
    ask_all(trial)
    changes = [*_of_models(trial), *_of_requests(trial)]
    if not changes:
        raise NothingToJudgeError("no change of this case makes it impossible")
    yield from faults_of_all(changes)


def _of_models(trial: Trial) -> Iterator[Change]:
    """Yield the cases with a wrong producer."""
    for name, what, wrong in _other_models(trial.case):
        yield name, what, Trial(trial.system, wrong, blank=True)


def _of_requests(trial: Trial) -> Iterator[Change]:
    """Yield the impossible requests."""
    # A system that has only moves never sees the blocks of a request.
    if not trial.system.answers(("descriptors", "prepared", "connector")):
        return
    for name, what, change in (*_wrong_requests(trial.case), *_shared_blocks(trial.case)):
        wrong = attrs.evolve(trial.case.request, **change)
        yield name, what, trial.asking(wrong)


def ask_all(trial: Trial) -> None:
    """Ask the system all questions to which a refusal is an answer."""
    trial.moves("consumer")
    for _, _ in trial.copies():
        pass
    _ = trial.after_connector


def faults_of_all(changes: Iterable[Change]) -> Iterator[str]:
    """Yield the faults of all *changes* as one of several lines, so an author sees all at once."""
    if faults := [fault for change in changes for fault in _faults_of(*change)]:
        yield "\n".join(faults)


def _faults_of(name: str, what: str, wrong: Trial) -> Iterator[str]:
    """Yield a difference unless the system refuses *wrong* with an error that contains *name*.

    A crash is a difference, too. A system that accepts one impossible transfer often crashes in the
    next one, and that must not hide the first.
    """
    try:
        ask_all(wrong)
    except wrong.system.refusals as error:
        if name not in str(error):
            yield f"{what}: expected an error that contains {name!r}, got {error}"
    except Exception as error:  # noqa: BLE001 - see above
        crash = "" if isinstance(error, AssertionError) else f"{type(error).__name__}: "
        yield f"{what}: expected a refusal, got {crash}{error}"
    else:
        yield f"{what}: expected a refusal, but it was not refused"


def _other_models(case: Case) -> Iterator[tuple[str, str, Case]]:
    """Yield (field, change, case) with a producer of another model.

    The change is in the first group that moves, is not of uniform type, and has heads or latents.
    After it, the two engines disagree about its bytes. A layer of another name is one that is
    missing. It is tried if only states move, too.
    """
    moving = {target.layer for target in targets(case.consumer, case.producer)}
    groups = [
        group
        for group in case.producer.groups
        if not group.spec.layers and not moving.isdisjoint(group.layers)
    ]
    if not groups:
        return
    group = next((each for each in groups if hasattr(each.spec, "head_size")), groups[0])
    layer = next(layer for layer in group.layers if layer in moving)
    for field, values in _other_fields(case, group).items():
        for value in values:
            # Page formats, blocks and shardings of an engine allow some of the values.
            with suppress(SpecError):
                spec: Any = group.spec
                # Only sizes need larger pages, and groups of one memory keep theirs.
                padded = spec.page_size_padded if case.shared else None
                changed = attrs.evolve(
                    group, spec=attrs.evolve(spec, page_size_padded=padded, **{field: value})
                )
                producer = _with(case.producer, changed)
                what = f"producer, layer {group.layers[0]}, {field}={value!r}"
                yield field, what, attrs.evolve(case, producer=producer)
                break
    names = [f"other.{name}" if name == layer else name for name in group.layers]
    # Stages may be ranges of the numbers in names, which stay, or lists of names, which do not.
    with suppress(SpecError):
        producer = _with(case.producer, attrs.evolve(group, layers=names))
        yield layer, f"producer, without layer {layer}", attrs.evolve(case, producer=producer)


def _other_fields(case: Case, group: KVCacheGroup) -> dict[str, list[Any]]:
    """Return the values to try for each field of a spec. The first one that is legal is used."""
    spec: Any = group.spec
    if not hasattr(spec, "head_size"):
        return {}
    fields: dict[str, list[Any]] = {
        "dtype": [_OTHER_DTYPE[spec.dtype]] if spec.dtype in _OTHER_DTYPE else []
    }
    readers = [each.spec for each in case.consumer.groups if set(each.layers) & set(group.layers)]
    # A consumer that keeps all tokens serves any window, so nothing is wrong there.
    if all(hasattr(layer_spec, "sliding_window") for layer_spec in (spec, *readers)):
        fields["sliding_window"] = [spec.sliding_window + 1]
    # Groups that share one memory have pages of one size.
    sizes = () if case.shared else _SIZE_FIELDS
    for field in filter(attrs.fields_dict(type(spec)).__contains__, sizes):
        # An omitted size of values is that of keys.
        size = getattr(spec, field) or spec.head_size
        fields[field] = [size * 2, size + 1, *([size // 2] if size > 1 else [])]
    return fields


def _with(engine: EngineSpec, group: Any) -> EngineSpec:  # noqa: ANN401
    groups = tuple(group if old.name == group.name else old for old in engine.groups)
    return attrs.evolve(engine, groups=groups)


def _wrong_requests(case: Case) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (group, change, fields) of requests in which a live block has no source or place."""
    request = case.request
    for group, live in _live_blocks(case).items():
        ids = request.consumer_blocks[group].block_ids.tolist()
        first = request.consumer_blocks[group].first_token
        sources = {
            source.name
            for source in case.producer.groups
            if set(source.layers) & set(case.consumer.group(group).layers)
        }
        # A block after the pool, no block, and a block that the table has already.
        wrong_blocks = case.consumer_pool[group], -1, *live[1:2]
        changed = (
            [wrong if block == live[0] else block for block in ids] for wrong in wrong_blocks
        )
        none: list[int] = []
        for table in (none, *changed):
            blocks = {**request.consumer_blocks, group: BlockTable(table, first)}
            yield group, f"consumer_blocks[{group!r}]={table}", {"consumer_blocks": blocks}
        if len(sources) == 1:
            (name,) = sources
            tables = {**request.producer_blocks, name: BlockTable(none)}
            yield name, f"producer_blocks[{name!r}]=[]", {"producer_blocks": tables}


def _shared_blocks(case: Case) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Yield (group, change, fields) of requests in which a block moves for two groups.

    In a shared memory a block holds the bytes of one group, so the bytes of another would be lost.
    On each side, a block of one group takes the place of a block of another group.
    """
    if not case.shared:
        return
    producer, consumer = case.producer, case.consumer
    sides: tuple[tuple[str, EngineSpec, EngineSpec, dict[str, list[int]]], ...] = (
        ("producer_blocks", producer, consumer, _read_blocks(case)),
        ("consumer_blocks", consumer, producer, _live_blocks(case)),
    )
    for side, engine, other, moved in sides:
        holders: dict[str, set[RankId]] = {}
        for target in targets(engine, other):
            # A rank to which no unit is sharded has no memory of the group.
            if rank_units(engine, target.rank, target.part, target.group):
                holders.setdefault(target.group.name, set()).add(target.rank)
        tables = getattr(case.request, side)
        for group, second in permutations(moved, 2):
            # On different pipeline stages two groups have different memories.
            if not holders[group] <= holders[second]:
                continue
            old, new = moved[group][-1], moved[second][0]
            ids = [new if block == old else block for block in tables[group].block_ids.tolist()]
            changed = {**tables, group: attrs.evolve(tables[group], block_ids=ids)}
            what = f"{side}[{group!r}]={ids}, where block {new} belongs to group {second!r}"
            yield group, what, {side: changed}


def _read_blocks(case: Case) -> dict[str, list[int]]:
    """Return the producer's blocks that must be read, sorted, by group."""
    read_blocks: dict[str, set[int]] = {}
    for target in targets(case.producer, case.consumer):
        group, table = target.group, case.request.producer_blocks[target.group.name]
        tokens = _moving_tokens(case, home(case.consumer, target.layer), target.layer)
        size = group.spec.block_size
        if is_ring(group.spec):
            tokens = [0] if tokens else []
        elif target.part.per_token:
            size *= context_of(case.producer, target.rank, group)[1]
        else:  # A state lies in the block of its last token, or in its only slot.
            one_slot = len(table.block_ids) == 1 and not table.first_token
            tokens = [0] if one_slot and tokens else tokens[-1:]
        ids = table.block_ids.tolist()
        blocks = {ids[(token - table.first_token) // size] for token in tokens}
        read_blocks.setdefault(group.name, set()).update(blocks)
    return {group: sorted(blocks) for group, blocks in read_blocks.items() if blocks}


def _moving_tokens(case: Case, group: KVCacheGroup, layer: str) -> list[int]:
    """Return the tokens that *layer* in *group* of the consumer must receive."""
    live = live_positions(group.spec.of_layer(layer), case.request).nonzero()[0].tolist()
    return [token for token in live if token >= cached_tokens_of(case.request, group)]


def _live_blocks(case: Case) -> dict[str, list[int]]:
    """Return the consumer's blocks with a live byte, sorted, by group."""
    live_blocks: dict[str, set[int]] = {}
    for rank in case.consumer.parallel.ranks:
        tables = case.request.consumer_blocks
        for rows in rows_of(case.consumer, rank, tables, case.request, source=case.producer):
            kernel_blocks_per_block = count_kernel_blocks(case.consumer.group(rows.key[0]))
            blocks = (
                (rows.block[rows.live] // kernel_blocks_per_block).tolist() if rows.units else ()
            )
            live_blocks.setdefault(rows.key[0], set()).update(blocks)
    return {group: sorted(blocks) for group, blocks in live_blocks.items() if blocks}
