"""Plans between an engine and stored pages, and the proof that each byte is written once.

Invariant: each object has one writer rank. The bytes of an object come from this rank alone, so an
object is written whole or not at all. All ranks of an engine compute the same writers.

How it works:
    A placement is a virtual engine, so `plan_transfer` makes the plans. Storing is a transfer from
    the engine to the virtual engine, loading is one from the virtual engine to the engine.

    Several ranks may hold all bytes of an object. They take turns by page. With 2 heads on TP 4 and
    one object for each head, page 0 is written by tp0 and tp2, page 1 by tp1 and tp3:

        >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup, ParallelConfig
        >>> spec = FullAttentionSpec(block_size=8, total_num_kv_heads=2, head_size=4, dtype="uint8")
        >>> group = KVCacheGroup(name="full", layers=["l.0"], spec=spec)
        >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=4))
        >>> placement = StoredSpec(groups=[group], page_tokens=16, head_groups=2)
        >>> plan = plan_store(engine, placement)
        >>> for stored in placement.objects:
        ...     print(stored.chunk, "by", *(plan.writer(*stored, page) for page in (0, 1, 2)))
        tp0 by tp0 tp1 tp0
        tp1 by tp2 tp3 tp2

    The plan of a writer prefers the writer wherever several ranks have the same units. So each rank
    has a plan of its own. All of them cover each object exactly once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property

import attrs

from kvspec.descriptors.table import numbered_rows_of
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import MismatchError, SpecError, counted, nbytes
from kvspec.inputs import Frozen, instance
from kvspec.memory.allocation import plan_memory
from kvspec.ownership.parallel import RankId
from kvspec.ownership.replicas import ReplicaPolicy, Topology
from kvspec.ownership.tokens import meet
from kvspec.plan.plan import TransferPlan, plan_transfer
from kvspec.stored.lookup import pages_read
from kvspec.stored.placement import PageObject, StoredSpec, is_state, keeping_all


def whole_engine(engine: EngineSpec) -> EngineSpec:
    """Return *engine* as if its layers kept all tokens. Its memory is the same.

    A load states which tokens it moves. A window would move those at its own end in their place.
    """
    groups = [attrs.evolve(group, spec=keeping_all(group.spec)) for group in engine.groups]
    return attrs.evolve(engine, groups=groups)


Writers = Mapping[PageObject, tuple[RankId, ...]]
"""The ranks that hold all bytes of each object, in the order of their turns."""


def _writers_of(value: Writers) -> Writers:
    return Frozen(value)


@attrs.frozen
class StorePlan:
    """How an engine stores pages, and the proof that it writes each byte once.

    `plan_store` makes it. `str()` shows it as a table, for the log of an engine.

    Attributes:
        engine: The engine that stores.
        placement: The placement of the pages.
        writers: For each object of a page, the ranks that hold all its bytes. They take turns in
            this order.
    """

    engine: EngineSpec = attrs.field(repr=False)
    placement: StoredSpec = attrs.field(repr=False)
    writers: Writers = attrs.field(converter=_writers_of)
    _plans: dict[RankId, TransferPlan] = attrs.field(init=False, factory=dict, repr=False, eq=False)

    def writer(self, group: str, chunk: RankId, page: int) -> RankId:
        """Return the rank that writes an object of page number *page* of a prompt."""
        ranks = self.writers[PageObject(group, chunk)]
        return ranks[page % len(ranks)]

    def objects_of(self, rank: RankId) -> tuple[PageObject, ...]:
        """Return the objects that *rank* writes, of some pages or of all pages."""
        self.engine.parallel.check_rank(rank)
        return tuple(stored for stored, ranks in self.writers.items() if rank in ranks)

    def plan(self, rank: RankId) -> TransferPlan:
        """Return the plan of *rank*. Its edges from *rank* contain all that *rank* writes."""
        self.engine.parallel.check_rank(rank)
        if rank not in self._plans:
            stored = self.placement.engine
            policy = _preferring(self.engine, stored, rank)
            self._plans[rank] = plan_transfer(self.engine, stored, policy)
        return self._plans[rank]

    def sources(self, group: str) -> tuple[KVCacheGroup, ...]:
        """Return the groups of the engine that contain layers of a stored group."""
        layers = self.placement.engine.group(group).layers
        names = {self.engine.homes[layer].name for layer in layers}
        return tuple(own for own in self.engine.groups if own.name in names)

    @cached_property
    def shortest_copy(self) -> int:
        """Bytes of the smallest piece that is copied between the engine's memory and an object.

        Few large pieces are copied faster. One layer of each spec is measured, in the smallest
        object of each group.
        """
        smallest: dict[str, PageObject] = {}
        for stored in sorted(self.writers, key=lambda one: -self.placement.object_bytes(*one)):
            smallest[stored.group] = stored
        lengths: list[int] = []
        for group, chunk in smallest.values():
            rank = self.writers[PageObject(group, chunk)][0]
            plan, virtual = self.plan(rank), self.placement.engine
            caches = plan_memory(self.engine, rank, 2), plan_memory(virtual, chunk, 2, 1 << 40)
            layers = [names[0] for pair in plan.pairs for _, names in pair.layers_by_spec]
            edges = [edge for edge in plan.between(rank, chunk) if edge.group == group]
            rows = numbered_rows_of(plan, edges, caches, frozenset(layers))
            lengths += [int(each.rows.length.min()) for each in rows if len(each.rows.length)]
        return min(lengths, default=0)

    def __str__(self) -> str:
        """Return the writers of each object as a table."""
        pages = f"a page of {counted(self.placement.page_tokens, 'token')}"
        total = f"{counted(len(self.writers), 'object')}, {nbytes(self.placement.page_bytes)}"
        lines = [f"{pages}: {total}, copied in pieces of at least {nbytes(self.shortest_copy)}"]
        for stored, ranks in self.writers.items():
            size = nbytes(self.placement.object_bytes(*stored))
            turns = " take turns" if len(ranks) > 1 else ""
            names = ", ".join(map(str, ranks))
            lines.append(f"  {stored.group} {stored.chunk}: {size}, by {names}{turns}")
        return "\n".join(lines)


def _preferring(engine: EngineSpec, stored: EngineSpec, rank: RankId) -> ReplicaPolicy:
    """Return the policy that reads *rank* wherever it is a replica."""
    nodes = {one: int(one == rank) for one in engine.parallel.ranks}
    topology = Topology(producer=nodes, consumer=dict.fromkeys(stored.parallel.ranks, 1))
    return ReplicaPolicy("nearest", topology=topology)


def plan_store(engine: EngineSpec, placement: StoredSpec) -> StorePlan:
    """Plan how *engine* stores pages.

    Args:
        engine: The engine that stores.
        placement: The placement of the pages.

    Returns:
        The plan. It is the same on every rank.

    Raises:
        MismatchError: If the engine does not fit the placement. It lists all differences.
        SpecError: If an object has no rank that holds all its bytes. It names what to choose.

    >>> from kvspec import EngineSpec, FullAttentionSpec, KVCacheGroup, ParallelConfig
    >>> spec = FullAttentionSpec(block_size=8, total_num_kv_heads=2, head_size=4, dtype="uint8")
    >>> group = KVCacheGroup(name="full", layers=["l.0"], spec=spec)
    >>> engine = EngineSpec(groups=[group], parallel=ParallelConfig(tp_size=4))
    >>> print(plan_store(engine, StoredSpec(groups=[group], page_tokens=16, head_groups=2)))
    a page of 16 tokens: 2 objects, 256 B, copied in pieces of at least 4 B
      full tp0: 128 B, by tp0, tp1 take turns
      full tp1: 128 B, by tp2, tp3 take turns
    """
    instance("engine", engine, EngineSpec)
    instance("placement", placement, StoredSpec)
    _check_layers(engine, placement)
    # It compares both sides, and checks that the edges fill each object exactly once.
    with _sides("engine", "placement"):
        plan_transfer(engine, placement.engine)
    writers = {stored: _writers(engine, placement, stored) for stored in placement.objects}
    turns: dict[PageObject, tuple[RankId, ...]] = {}
    taken: dict[tuple[RankId, ...], int] = {}
    for stored, ranks in writers.items():
        first = taken.get(ranks, 0) % len(ranks)
        taken[ranks] = first + 1
        turns[stored] = ranks[first:] + ranks[:first]
    return StorePlan(engine, placement, turns)


@contextmanager
def _sides(first: str, second: str) -> Iterator[None]:
    """Name the two sides of a `MismatchError`: a placement is neither producer nor consumer."""
    try:
        yield
    except MismatchError as error:
        sides = first, second
        raise MismatchError(attrs.evolve(each, sides=sides) for each in error.mismatches) from None


def _check_layers(engine: EngineSpec, placement: StoredSpec) -> None:
    """Raise unless the engine fills each layer of the placement."""
    for group in placement.groups:
        for layer in group.layers:
            if layer in engine.excluded:
                rule = f"the engine excludes layer {layer!r}, so it cannot store it"
                raise SpecError(f"placement.groups[{group.name!r}].layers", layer, rule=rule)


def _writers(engine: EngineSpec, placement: StoredSpec, stored: PageObject) -> tuple[RankId, ...]:
    """Return the ranks of *engine* that hold all bytes of an object."""
    ranks = list(engine.parallel.ranks)
    for check in (_on_stage, _with_tokens, _with_units):
        held = [rank for rank in ranks if check(engine, placement, stored, rank)]
        if not held:
            raise _no_writer(engine, placement, stored, check.__name__)
        ranks = held
    return tuple(ranks)


def _layers(placement: StoredSpec, stored: PageObject) -> tuple[str, ...]:
    virtual = placement.engine
    return virtual.layers_at(virtual.group(stored.group), stored.chunk.pp)


def _on_stage(engine: EngineSpec, placement: StoredSpec, stored: PageObject, rank: RankId) -> bool:
    """Return whether *rank* has the layers of an object."""
    return all(engine.stage_of[layer] == rank.pp for layer in _layers(placement, stored))


def _with_tokens(
    engine: EngineSpec, placement: StoredSpec, stored: PageObject, rank: RankId
) -> bool:
    """Return whether *rank* has the tokens of an object."""
    group = placement.engine.group(stored.group)
    if is_state(group.spec):
        return True
    own = placement.engine.context(group, stored.chunk)
    homes = {engine.homes[layer].name for layer in _layers(placement, stored)}
    for home in map(engine.group, homes):
        context = engine.context(home, rank)
        others = (attrs.evolve(context, rank=number) for number in range(context.size))
        if any(meet(own, other) for other in others if other.rank != context.rank):
            return False
    return True


def _with_units(
    engine: EngineSpec, placement: StoredSpec, stored: PageObject, rank: RankId
) -> bool:
    """Return whether *rank* has the units of an object."""
    group = placement.engine.group(stored.group)
    layers = set(_layers(placement, stored))
    for spec, names in group.layers_by_spec:
        homes = {engine.homes[layer].name for layer in layers.intersection(names)}
        for part in spec.parts:
            own = placement.engine.units(group, part, stored.chunk)
            for home in map(engine.group, homes):
                held = engine.units(home, part, rank)
                if own and not (held.start <= own.start and own.stop <= held.stop):
                    return False
    return True


def _no_writer(
    engine: EngineSpec, placement: StoredSpec, stored: PageObject, check: str
) -> SpecError:
    """Return the error that names what to choose, so that each object has one writer."""
    where = f"no rank holds all of object {stored.group} {stored.chunk}"
    sizes = engine.parallel
    if check == "_on_stage":
        expected = f"ranges that lie in one of the {sizes.pp_size} stages each, because {where}"
        return SpecError("layer_ranges", placement.layer_ranges, expected)
    if check == "_with_tokens":
        expected = f"{sizes.context_size} with interleave_size={sizes.interleave_size}"
        return SpecError("context_size", placement.context_size, f"{expected}, because {where}")
    expected = "a number of head groups such that each belongs to one rank"
    most = max(part.units for group in placement.groups for part in group.own_parts)
    for count in range(1, most + 1):
        if _fits(engine, placement, count):
            expected = str(count)
            break
    return SpecError("head_groups", placement.head_groups, f"{expected}, because {where}")


def _fits(engine: EngineSpec, placement: StoredSpec, head_groups: int) -> bool:
    """Return whether each chunk belongs to one rank if there were *head_groups* head groups."""
    other = attrs.evolve(placement, head_groups=head_groups)
    return all(
        any(_with_units(engine, other, stored, rank) for rank in engine.parallel.ranks)
        for stored in other.objects
    )


@attrs.frozen
class PageLoadPlan:
    """How an engine loads pages. Made by `plan_load`.

    Attributes:
        placement: The placement of the pages.
        engine: The engine that loads.
        plan: The plan from the virtual engine to the engine, whose layers keep all tokens.
    """

    placement: StoredSpec
    engine: EngineSpec
    plan: TransferPlan = attrs.field(repr=False)

    def objects_of(self, rank: RankId) -> tuple[PageObject, ...]:
        """Return the objects of which *rank* reads any bytes."""
        self.engine.parallel.check_rank(rank)
        found = {
            PageObject(edge.producer_group, chunk)
            for chunk in self.plan.sources(rank)
            for edge in self.plan.between(chunk, rank)
        }
        return tuple(stored for stored in self.placement.objects if stored in found)

    @cached_property
    def objects(self) -> tuple[PageObject, ...]:
        """The objects of which some rank reads any bytes."""
        found = {stored for rank in self.engine.parallel.ranks for stored in self.objects_of(rank)}
        return tuple(stored for stored in self.placement.objects if stored in found)

    def targets(self, group: str) -> tuple[KVCacheGroup, ...]:
        """Return the groups of the engine that read layers of a stored group."""
        names = [pair.consumer.name for pair in self.plan.pairs if pair.producer.name == group]
        return tuple(own for own in self.engine.groups if own.name in names)

    def live_pages(self, group: str, num_pages: int) -> range:
        """Return the pages of a stored group that the engine reads after *num_pages* pages.

        Args:
            group: Name of a stored group.
            num_pages: Pages of the prompt that the engine continues.

        Returns:
            The pages: the last one for a state, those of the window for a window, otherwise all.
        """
        size = self.placement.page_tokens
        reads = [pages_read(own, num_pages, size) for own in self.targets(group)]
        return range(min((read.start for read in reads if read), default=num_pages), num_pages)


def plan_load(placement: StoredSpec, engine: EngineSpec) -> PageLoadPlan:
    """Plan how *engine* loads pages.

    Args:
        placement: The placement of the pages.
        engine: The engine that loads.

    Returns:
        The plan. It is the same on every rank.

    Raises:
        MismatchError: If the engine does not fit the placement. It lists all differences.

    >>> from kvspec import EngineSpec, KVCacheGroup, SlidingWindowSpec
    >>> spec = SlidingWindowSpec(
    ...     block_size=8, total_num_kv_heads=2, head_size=4, dtype="uint8", sliding_window=20)
    >>> engine = EngineSpec(groups=[KVCacheGroup(name="g", layers=["l.0"], spec=spec)])
    >>> plan = plan_load(StoredSpec.of(engine, page_tokens=16), engine)
    >>> plan.live_pages("window-20", num_pages=5)  # The last 19 of 80 tokens.
    range(3, 5)
    """
    instance("placement", placement, StoredSpec)
    instance("engine", engine, EngineSpec)
    # Replicas among chunks are not stored. The first chunk has the content.
    with _sides("placement", "engine"):
        plan = plan_transfer(placement.engine, whole_engine(engine), "first")
    return PageLoadPlan(placement, engine, plan)
