"""Describe the toy connector to the kit: `pytest --kvspec toy_system:SYSTEM`."""

import attrs
from toy_connector import CannotServeError, copies, reads

from kvspec import RankId
from kvspec.testing.kit import Supports, System
from kvspec.testing.laws import Move


def reads_of(case):
    """Yield what the toy reads: both ranks, the head, and its place on both."""
    first, second = (attrs.asdict(side.groups[0].spec) for side in (case.producer, case.consumer))
    if differing := [name for name in first if first[name] != second[name]]:
        raise CannotServeError(f"the engines differ in {differing}")
    sizes = case.producer.parallel.tp_size, case.consumer.parallel.tp_size
    for head, source, source_place, target, place in reads(first["total_num_kv_heads"], *sizes):
        yield (RankId(tp=source), RankId(tp=target)), head, source_place, place


def moves(case, _role):
    """Yield a move for each head, layer and part. Both sides compute the same."""
    for (source, target), *numbers in reads_of(case):
        names = ("units", "producer_units", "consumer_units")
        units = {name: range(n, n + 1) for name, n in zip(names, numbers, strict=True)}
        for layer in case.consumer.groups[0].layers:
            for part in ("k", "v"):
                yield Move(producer=source, consumer=target, layer=layer, part=part, **units)


def descriptors(world, producer, consumer):
    """Return the copies between two ranks."""
    case, request, pair = world.case, world.case.request, (producer, consumer)
    group, tokens = case.consumer.groups[0], range(request.cached_tokens, request.num_tokens)
    both = request.producer_blocks, request.consumer_blocks
    tables = [table["full"].block_ids.tolist() for table in both]
    pools = case.producer_pool["full"], case.consumer_pool["full"]
    places = [tuple(both) for ranks, _, *both in reads_of(case) if ranks == pair]
    caches = world.producers[producer][0], world.consumers[consumer][0]
    parts = [(layer, part) for layer in group.layers for part in ("k", "v")]
    tensors = [[cache.region(*names) for cache in caches] for names in parts]
    starts = {memory.address for cache in caches for memory in cache.memory}
    return copies(places, tensors, tables, pools, group.spec.block_size, tokens, starts)


SUPPORTS = Supports.only(
    kinds=["full"], layouts=["LBHNC", "LBNHC"], policies=["first"], prefixes="blocks",
    max_tp=8, equal_tp=False, tp_multiples=False, equal_layouts=False,
)  # fmt: skip
ANSWERS = {"moves": moves, "descriptors": descriptors, "refuses": (CannotServeError,)}
SYSTEM = System(name="toy connector", version="1.0", supports=SUPPORTS, **ANSWERS)
