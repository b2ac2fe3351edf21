"""The interface for connectors: save whole pages, find the longest stored prefix, load it.

Invariant: a load writes to the cache only bytes of objects that were read whole and verified. If it
fails, it has written whole pages up to one page and nothing behind. Its error names the pages from
which the engine can continue.

How it works:
    A scheduler and its workers each make a `PageStore` from equal arguments. They exchange only
    names of pages and block tables.

        who         when                                call
        scheduler   once for a prompt                   `names = store.names(token_ids, prompt)`
        scheduler   before it computes a prompt         `hit = store.lookup(names, engine)`
        worker      before the first step of the        `pages.load(names, hit.num_pages, tables)`
                    prompt, on each rank
        scheduler   when all ranks have loaded          `hit.close()`
        worker      after each step that fills pages,   `pages.save(names, first, count, tables)`
                    on each rank

    The scheduler keeps the blocks of a step from being used again until `save` has returned on all
    ranks, and it passes no block to `save` whose load has not ended. All calls block, and they may
    run in a thread of the connector. Only one call of a `RankPages` runs at a time.

    Bytes go through a buffer in host memory, whose slots are objects:

        save    cache -> slots (gather)    each slot -> one object (write)
        load    objects -> slots (read, verify), for all objects of some pages; then
                slots -> cache (scatter)
"""

from __future__ import annotations

import json
import math
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import attrs

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import KVSpecError, MismatchError, SpecError, StoreError
from kvspec.inputs import instance, positive_int, seconds, sequence
from kvspec.memory.rank_cache import RankCache
from kvspec.plan.mismatches import mismatches
from kvspec.stored.buffer import SlotBuffer
from kvspec.stored.lookup import explain_lookup, longest_prefix, pages_read
from kvspec.stored.names import ModelIdentity, PromptIdentity, page_names, space_of
from kvspec.stored.objects import (
    LOOKUP_SECONDS,
    ObjectContents,
    ObjectKey,
    Objects,
    together,
)
from kvspec.stored.page_steps import (
    StateBlocks,
    Tables,
    check_load_tables,
    check_states,
    check_store_tables,
    load_pages,
    load_request,
    store_requests,
    whole_pages,
)
from kvspec.stored.placement import PLACEMENT_SIZES, PageObject, StoredSpec
from kvspec.stored.plans import PageLoadPlan, StorePlan, plan_load, plan_store
from kvspec.tickets.stated import explain_difference

if TYPE_CHECKING:
    import numpy.typing as npt

BUFFER_BYTES = 64 << 20
"""Bytes of the buffer of a rank by default. It holds at least one page."""
PIN_SECONDS = 300.0
"""Seconds after which the pins of a hit end by default, if nobody closes it."""
# Pages whose objects are searched with the first call, and the most: each call doubles them.
_FIRST_PAGES, _LOOKUP_PAGES = 8, 256
_PAGE_NAMES = "names of pages"


class LoadError(KVSpecError):
    """A load that failed on one rank. Each byte that it has written is right.

    The other ranks may have loaded more or fewer pages. The engine continues behind the fewest of
    all ranks: ``loaded.stop`` of this error, or ``Loaded.pages.stop``.

    Attributes:
        loaded: Numbers of the pages from which the engine can continue, from the first one that is
            not cached. Each group has those that it needs. None if a group of the engine needs
            earlier pages for a shorter prefix, such as a window, or has none for it, such as a
            state. Otherwise this rank has written no byte behind these pages.
        missing: Numbers of the other pages of the load. The engine computes them.
    """

    def __init__(self, loaded: range, missing: range, why: str) -> None:
        pages = f"pages {missing.start}..{missing.stop - 1} cannot be used"
        super().__init__(f"{pages}, {len(loaded)} pages before them can: {why}")
        self.loaded, self.missing, self.why = loaded, missing, why

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.loaded, self.missing, self.why)


@attrs.frozen(kw_only=True)
class Saved:
    """The result of a save of one rank.

    Attributes:
        written: Keys of the objects that this call wrote.
        already_stored: Keys of the objects of this rank that were there before.
        not_whole: Numbers of the pages that were not whole in memory, by stored group. They were
            not stored. Groups without such pages have no entry.
        nbytes: Bytes of the objects that this call wrote.
    """

    written: tuple[ObjectKey, ...] = ()
    already_stored: tuple[ObjectKey, ...] = ()
    not_whole: Mapping[str, tuple[int, ...]] = attrs.field(factory=dict)
    nbytes: int = 0


@attrs.frozen(kw_only=True)
class Loaded:
    """The result of a load of one rank.

    Attributes:
        pages: Numbers of the pages that are in the cache now. Each group has those that it needs.
        objects: Number of objects that were read.
        nbytes: Their bytes.
    """

    pages: range
    objects: int
    nbytes: int


@attrs.define(eq=False)
class Hit:
    """The longest stored prefix of a prompt. Its objects are pinned until `close`.

    It is a context manager, which closes it.

    Attributes:
        names: Names of the pages of the prefix.
        num_tokens: Tokens of the prefix.
    """

    names: tuple[str, ...]
    num_tokens: int
    _objects: Objects | None = attrs.field(repr=False)
    _owner: str = attrs.field(repr=False)

    @property
    def num_pages(self) -> int:
        """Number of pages of the prefix."""
        return len(self.names)

    def close(self) -> None:
        """End the pins. It may be called again."""
        if self._objects is not None:
            self._objects.unpin(self._owner)
            self._objects = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class PageStore:
    """The stored pages of one model and one placement, in one place.

    A scheduler calls `names` and `lookup`. A worker calls `rank_pages` once.

    >>> import kvspec
    >>> from kvspec.stored import MemoryObjects, ModelIdentity, PromptIdentity
    >>> spec = kvspec.MLAAttentionSpec(block_size=2, head_size=4, dtype="uint8")
    >>> group = kvspec.KVCacheGroup(name="g", layers=["l.0"], spec=spec)
    >>> engine = kvspec.EngineSpec(groups=[group])
    >>> model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    >>> store = PageStore(StoredSpec.of(engine, page_tokens=4), model, MemoryObjects())
    >>> cache, arrays = kvspec.allocate(engine, kvspec.RankId(), num_blocks=8)
    >>> arrays["g"][:] = 7
    >>> pages = store.rank_pages(cache, buffer_bytes=1 << 10)
    >>> names = store.names(range(10), PromptIdentity.of_text())
    >>> pages.save(names, 0, 2, {"g": [0, 1, 2, 3, 4]}).nbytes
    32
    >>> other, other_arrays = kvspec.allocate(engine, kvspec.RankId(), num_blocks=8)
    >>> with store.lookup(names, engine) as hit:
    ...     pages = store.rank_pages(other).load(hit, hit.num_pages, {"g": [5, 1, 6, 2]}).pages
    >>> pages, int(other_arrays["g"].sum())
    (range(0, 2), 224)
    """

    def __init__(self, placement: StoredSpec, model: ModelIdentity, objects: Objects) -> None:
        """Open a store.

        Args:
            placement: The placement of the pages. All engines of the store use an equal one.
            model: The weights. All fields must be stated.
            objects: The place of the objects, such as `MemoryObjects` or `FileObjects`.

        Raises:
            SpecError: If a field of *model* is not stated, or an argument has the wrong type.
            MismatchError: If the space has a description whose keys mean something else. Its name
                contains sums of their angles, and two lists of angles can have equal sums.
            StoreError: If the description of the space cannot be stored or read.
        """
        self.placement = instance("placement", placement, StoredSpec)
        self.model = instance("model", model, ModelIdentity)
        if not callable(getattr(objects, "describe", None)):  # An address has credentials.
            raise SpecError("objects", type(objects), "objects, such as FileObjects(directory)")
        self.objects = objects
        self.space = space_of(model, placement.digest)
        self._load_plans: dict[EngineSpec, PageLoadPlan] = {}
        self._store_plans: dict[EngineSpec, StorePlan] = {}
        self._contents: dict[PageObject, ObjectContents] = {}
        description = {"model": model.to_params(), "placement": placement.to_params()}
        objects.describe(self.space, {name: json.dumps(v) for name, v in description.items()})
        self._compare_description()

    def _compare_description(self) -> None:
        """Raise `MismatchError` if another placement has described the space."""
        spaces = self.objects.spaces()
        try:
            described = StoredSpec.from_params(json.loads(spaces[self.space]["placement"]))
        except (KeyError, ValueError, RecursionError, KVSpecError):
            return  # It cannot be read, so it says nothing.
        if found := mismatches(described.engine, self.placement.engine):
            raise MismatchError(found)

    def names(
        self, token_ids: Sequence[int] | npt.NDArray[Any], prompt: PromptIdentity
    ) -> tuple[str, ...]:
        """Return the name of each whole page of a prompt. See `page_names`."""
        return page_names(self.space, token_ids, self.placement.page_tokens, prompt)

    def load_plan(self, engine: EngineSpec) -> PageLoadPlan:
        """Return the plan by which *engine* loads pages. It is made once."""
        if engine not in self._load_plans:
            self._load_plans[engine] = plan_load(self.placement, engine)
        return self._load_plans[engine]

    def store_plan(self, engine: EngineSpec) -> StorePlan:
        """Return the plan by which *engine* stores pages. It is made once."""
        if engine not in self._store_plans:
            self._store_plans[engine] = plan_store(engine, self.placement)
        return self._store_plans[engine]

    def rank_pages(self, cache: RankCache, *, buffer_bytes: int = BUFFER_BYTES) -> RankPages:
        """Return the side of one rank. See `RankPages`."""
        return RankPages(self, cache, buffer_bytes=buffer_bytes)

    def contents(self, stored: PageObject) -> ObjectContents:
        """Return what an object states about its payload, besides its key and its checksum."""
        if stored not in self._contents:
            facts = {
                "placement": self.placement.digest,
                "model": json.dumps(self.model.to_params()),
            }
            self._contents[stored] = self.placement.contents(*stored, facts)
        return self._contents[stored]

    def key(self, name: str, stored: PageObject) -> ObjectKey:
        """Return the key of an object of the page *name*."""
        return ObjectKey(self.space, name, stored.group, str(stored.chunk))

    def lookup(
        self,
        names: Sequence[str],
        engine: EngineSpec,
        *,
        pin_seconds: float = PIN_SECONDS,
    ) -> Hit:
        """Find the longest prefix of a prompt that *engine* can load, and pin its objects.

        A prefix needs all its pages of full attention, the last ones of a window, and the state
        at its end. After `LOOKUP_SECONDS` the search counts all other pages as absent, because the
        scheduler of an engine waits for it.

        Args:
            names: Names of the pages of the prompt, from `names`. An engine that must compute at
                least one token passes ``names[:(num_tokens - 1) // page_tokens]``.
            engine: The engine that loads. Its ranks need not be here.
            pin_seconds: The pins end after so many seconds, if `Hit.close` is not called.

        Returns:
            The hit, which may have no page.

        Raises:
            MismatchError: If the engine does not fit the placement.
            StoreError: If a bucket cannot be asked.
        """
        plan = self.load_plan(engine)
        wanted = tuple(sequence("names", names, _PAGE_NAMES))
        seconds("pin_seconds", pin_seconds)
        owner, pages = uuid.uuid4().hex, 0
        # Pin first: an object that is found then stays.
        self.objects.pin(self.space, wanted, owner, pin_seconds)
        try:
            found = _Found(self, plan, wanted, LOOKUP_SECONDS)
            pages = found.longest_prefix()
            needed = found.needed(pages)
            if len(needed) < len(wanted):
                self.objects.pin(self.space, needed, owner, pin_seconds)
        finally:
            if not pages:
                self.objects.unpin(owner)
        size = self.placement.page_tokens
        return Hit(wanted[:pages], pages * size, self.objects if pages else None, owner)

    def has(self, names: Sequence[str], objects: Sequence[PageObject]) -> list[bool]:
        """Return for each page whether all these objects of it are stored."""
        items = [(stored.group, str(stored.chunk)) for stored in objects]
        return self.objects.has(self.space, names, items)

    def other_spaces(self) -> list[str]:
        """Return in words how the model or the placement of each other space here differs."""
        lines: list[str] = []
        for space, description in self.objects.spaces().items():
            if space == self.space:
                continue
            try:
                other = ModelIdentity.from_params(json.loads(description["model"]))
                why = explain_difference(self.model, other)
                if not why:
                    placement = StoredSpec.from_params(json.loads(description["placement"]))
                    why = _placement_difference(self.placement, placement)
            except (KeyError, ValueError, RecursionError, KVSpecError) as error:
                why = str(error)  # Another version wrote it.
            lines.append(f"pages of another space: {why}")
        return lines

    def explain(self, names: Sequence[str], engine: EngineSpec) -> str:
        """Return in words how many tokens *engine* can load, and which groups end the prefix.

        A name does not show what it was made of. So compare the identity of the prompt with that of
        the engine that stored it, and read `other_spaces`: their pages are never found.

        Args:
            names: As for `lookup`.
            engine: As for `lookup`.

        Raises:
            MismatchError: If the engine does not fit the placement.
        """
        wanted = tuple(sequence("names", names, _PAGE_NAMES))
        return _Found(self, self.load_plan(engine), wanted).explain()


def _placement_difference(own: StoredSpec, other: StoredSpec) -> str:
    """Return in words how *other*, the placement of stored pages, differs from *own*."""
    sizes = {
        name: (getattr(other, name), getattr(own, name))
        for name in (*PLACEMENT_SIZES, "layer_ranges")
    }
    lines = [
        f"{name}: {offered!r} is offered, {wanted!r} is wanted"
        for name, (offered, wanted) in sizes.items()
        if offered != wanted
    ]
    found = mismatches(other.engine, own.engine)
    lines += [str(attrs.evolve(each, sides=("offered", "wanted"))) for each in found]
    return "; ".join(lines) or "its layers are in other groups"


class _Found:
    """Which pages of a prompt are stored, by group of the engine. Each is searched once."""

    def __init__(
        self,
        store: PageStore,
        plan: PageLoadPlan,
        names: tuple[str, ...],
        most_seconds: float = math.inf,
    ) -> None:
        self._store, self._plan, self._names = store, plan, names
        self._end = time.monotonic() + most_seconds
        sources: dict[str, set[str]] = {}
        for pair in plan.plan.pairs:
            sources.setdefault(pair.consumer.name, set()).add(pair.producer.name)
        self._by_group = {
            name: [stored for stored in plan.objects if stored.group in groups]
            for name, groups in sources.items()
        }
        self._groups = [group for group in plan.engine.groups if group.name in sources]
        self._known: dict[str, dict[int, bool]] = {name: {} for name in sources}
        self._ask = _FIRST_PAGES

    def has(self, group: str, page: int) -> bool:
        """Return whether all objects of *page* that a group of the engine reads are stored."""
        known = self._known[group]
        if page not in known:
            if time.monotonic() > self._end:
                return False
            pages = range(page, min(page + self._ask, len(self._names)))
            self._ask = min(2 * self._ask, _LOOKUP_PAGES)
            names = self._names[pages.start : pages.stop]
            known.update(zip(pages, self._store.has(names, self._by_group[group]), strict=True))
        return known[page]

    def longest_prefix(self) -> int:
        """Return the number of pages of the longest prefix that each group can serve."""
        return longest_prefix(self._groups, *self._sizes, self.has)

    def explain(self) -> str:
        """Return in words why the prefix ends where it ends."""
        return explain_lookup(self._groups, *self._sizes, self.has)

    @property
    def _sizes(self) -> tuple[int, int]:
        return len(self._names), self._store.placement.page_tokens

    def needed(self, pages: int) -> list[str]:
        """Return the names of the pages that a load of *pages* pages reads."""
        size = self._store.placement.page_tokens
        read = set[int]().union(*(pages_read(group, pages, size) for group in self._groups))
        return [self._names[page] for page in sorted(read)]


class RankPages:
    """The side of one rank: it saves the pages of its cache, and loads pages into it.

    Attributes:
        store: The store.
        cache: The memory of the rank.
    """

    def __init__(
        self, store: PageStore, cache: RankCache, *, buffer_bytes: int = BUFFER_BYTES
    ) -> None:
        """Prepare a rank. Plans, tables and the buffer are made when they are first needed.

        Args:
            store: The store.
            cache: The memory of the rank.
            buffer_bytes: Bytes of the buffer. It holds at least one page.

        Raises:
            SpecError: If an argument has the wrong type.
        """
        self.store = instance("store", store, PageStore)
        self.cache = instance("cache", cache, RankCache)
        self._bytes = positive_int("buffer_bytes", buffer_bytes)
        self._lock = threading.Lock()

    @cached_property
    def store_plan(self) -> StorePlan:
        """The plan by which the engine stores pages.

        Raises:
            MismatchError: If the engine does not fit the placement.
            SpecError: If the engine cannot store its pages: see `plan_store`.
        """
        return self.store.store_plan(self.cache.engine)

    @cached_property
    def load_plan(self) -> PageLoadPlan:
        """The plan by which the engine loads pages.

        Raises:
            MismatchError: If the engine does not fit the placement.
        """
        return self.store.load_plan(self.cache.engine)

    @cached_property
    def _saving(self) -> SlotBuffer:
        plan, rank = self.store_plan, self.cache.rank
        objects = plan.objects_of(rank)
        cache = self.cache
        return SlotBuffer(plan.placement, plan.plan(rank), cache, objects, self._bytes, stores=True)

    @cached_property
    def _loading(self) -> SlotBuffer:
        plan = self.load_plan
        whole = attrs.evolve(self.cache, engine=plan.plan.consumer)
        objects = plan.objects_of(self.cache.rank)
        return SlotBuffer(plan.placement, plan.plan, whole, objects, self._bytes, stores=False)

    @cached_property
    def _num_blocks(self) -> dict[str, int]:
        """Blocks of each group in the memory of this rank."""
        engine = self.cache.engine
        return {
            region.group: region.num_blocks // engine.group(region.group).kernel_blocks_per_block
            for region in self.cache.regions
        }

    def save(
        self,
        names: Sequence[str],
        first_page: int,
        num_pages: int,
        tables: Tables,
        states_at: StateBlocks | None = None,
    ) -> Saved:
        """Save pages of this rank's cache, as far as it is the turn of this rank to write them.

        All ranks of the engine make the same call. The blocks must not change during the call.

        Args:
            names: Names of the pages of the prompt, from its first page on. "" for a page before
                *first_page* whose name is not known.
            first_page: Number of the first page to save.
            num_pages: Number of pages. All their tokens have been computed.
            tables: Block tables of the prompt by group of the engine. A window group may have null
                blocks or begin late: pages that are not whole are left out.
            states_at: For each group of states, the block of the state by the number of tokens that
                it has seen. Positions at which no page ends are left out.

        Returns:
            What was written.

        Raises:
            SpecError: If an argument is wrong, or the engine cannot store its pages. No object of
                any group is written.
            MismatchError: If the engine does not fit the placement.
            StoreError: If an object cannot be written. Objects written before stay.
        """
        wanted = _pages(names, first_page, num_pages)
        states = check_states(self.cache.engine, states_at or {})
        with self._lock:
            plan, slots = self.store_plan, self._saving
            whole: dict[str, tuple[int, ...]] = {}
            for group in self.store.placement.engine.groups:
                own = whole_pages(plan, group.name, wanted, tables, states)
                check_store_tables(plan, group.name, own, tables, states, self._num_blocks)
                whole[group.name] = own
            slots.prepare()
            missing = {
                group: tuple(page for page in wanted if page not in set(pages))
                for group, pages in whole.items()
            }
            saved = Saved(not_whole={group: pages for group, pages in missing.items() if pages})
            objects, space = self.store.objects, self.store.space
            # A page is useful only with the pages before it, so these leave last.
            objects.use(space, [*filter(None, names[:first_page])])
            for batch in _batches(wanted, slots.pages):
                for stored in slots.objects:
                    pages = [
                        page
                        for page in whole[stored.group]
                        if page in batch and plan.writer(*stored, page) == self.cache.rank
                    ]
                    saved = self._save(saved, stored, pages, names, (tables, states))
            objects.use(space, [*filter(None, names[: wanted.stop])])
            return saved

    def _save(
        self,
        saved: Saved,
        stored: PageObject,
        pages: list[int],
        names: Sequence[str],
        memory: tuple[Tables, StateBlocks],
    ) -> Saved:
        """Return *saved* with the objects of *pages* that this rank writes."""
        objects, slots = self.store.objects, self._saving
        keys = {page: self.store.key(names[page], stored) for page in pages}
        known = self.store.has([names[page] for page in pages], [stored])
        new = [page for page, there in zip(pages, known, strict=True) if not there]
        if new:
            requests = store_requests(self.store_plan, stored.group, new, *memory)
            slots.gather(stored, requests, len(new))
        payloads = [(keys[page], slots.payload(stored, slot)) for slot, page in enumerate(new)]
        created = objects.write_all(payloads, self.store.contents(stored))
        # Another engine may have written some of them since.
        written = {key for (key, _), own in zip(payloads, created, strict=True) if own}
        already_stored = (key for key in keys.values() if key not in written)
        return attrs.evolve(
            saved,
            written=(*saved.written, *(key for key in keys.values() if key in written)),
            already_stored=(*saved.already_stored, *already_stored),
            nbytes=saved.nbytes + len(written) * self.store.placement.object_bytes(*stored),
        )

    def load(
        self,
        names: Sequence[str] | Hit,
        num_pages: int,
        tables: Tables,
        *,
        cached_tokens: int = 0,
    ) -> Loaded:
        """Load the first pages of a prompt into this rank's cache.

        All ranks of the engine make the same call. After it has returned on all of them, the engine
        continues after ``num_pages * page_tokens`` tokens.

        Args:
            names: Names of the pages of the prompt, from its first page on, or the hit.
            num_pages: Number of pages, at most those of the hit.
            tables: Block tables of the prompt by group of the engine. They must have a block for
                each token that is loaded: in a window group, for those of the window.
            cached_tokens: Leading tokens that the cache has already. They are not written.

        Returns:
            What was loaded.

        Raises:
            SpecError: If an argument is wrong.
            MismatchError: If the engine does not fit the placement.
            LoadError: If an object is absent or damaged. It names the pages that are in the cache.
        """
        known = names.names if isinstance(names, Hit) else names
        wanted = _pages(known, 0, num_pages)
        positive_int("cached_tokens", cached_tokens, least=0)
        with self._lock:
            plan = self.load_plan
            own = {
                stored: load_pages(plan, stored.group, num_pages, cached_tokens)
                for stored in self._loading.objects
            }
            self._check_tables(own, num_pages, tables, cached_tokens)
            first = min((pages.start for pages in own.values()), default=wanted.stop)
            count = 0
            for batch in _batches(range(first, wanted.stop), self._loading.pages):
                moving = {
                    stored: range(max(pages.start, batch.start), min(pages.stop, batch.stop))
                    for stored, pages in own.items()
                }
                requests = {
                    stored: load_request(
                        plan, stored.group, pages, num_pages, tables, cached_tokens
                    )
                    for stored, pages in moving.items()
                    if pages
                }
                try:
                    self._load(moving, requests, known)
                except (StoreError, OSError) as error:
                    raise self._failed(batch.start, num_pages, cached_tokens, error) from error
                count += sum(map(len, moving.values()))
            sizes = self.store.placement.object_bytes
            nbytes = sum(sizes(*stored) * len(pages) for stored, pages in own.items())
            return Loaded(pages=wanted, objects=count, nbytes=nbytes)

    def _failed(self, stop: int, num_pages: int, cached_tokens: int, cause: Exception) -> LoadError:
        """Return the error of a load whose pages from *stop* on are not in the cache.

        All groups of the engine count, also those of which this rank has no layer: a window of a
        shorter prefix begins earlier, and a state is in another page.
        """
        plan = self.load_plan
        start = min(cached_tokens // plan.placement.page_tokens, num_pages)
        for group in {stored.group for stored in plan.objects}:
            loaded, shorter = (
                load_pages(plan, group, pages, cached_tokens) for pages in (num_pages, stop)
            )
            if shorter and shorter.start < loaded.start:
                stop = start
                break
        return LoadError(range(start, stop), range(stop, num_pages), str(cause))

    def _check_tables(
        self,
        own: Mapping[PageObject, range],
        num_pages: int,
        tables: Tables,
        cached_tokens: int,
    ) -> None:
        """Raise `SpecError` if a block of any batch is wrong, before the first batch moves."""
        groups = {stored.group: pages for stored, pages in own.items() if pages}
        for group, pages in groups.items():
            request = load_request(self.load_plan, group, pages, num_pages, tables, cached_tokens)
            check_load_tables(self.load_plan, group, request, self._num_blocks)

    def _load(
        self,
        moving: Mapping[PageObject, range],
        requests: Mapping[PageObject, TransferRequest],
        names: Sequence[str],
    ) -> None:
        """Load one batch: read and verify all its objects, then write the cache."""
        slots = self._loading
        rows = {stored: slots.rows(stored, request) for stored, request in requests.items()}

        def read(stored: PageObject, slot: int, page: int) -> None:
            key = self.store.key(names[page], stored)
            self.store.objects.read(key, slots.payload(stored, slot))

        wanted = [
            (stored, slot, page) for stored in requests for slot, page in enumerate(moving[stored])
        ]
        together(self.store.objects.threads, read, wanted)
        for stored in requests:
            slots.scatter(stored, rows[stored], len(moving[stored]))


def _batches(pages: range, size: int) -> Iterator[range]:
    """Yield *pages* in ranges of at most *size* pages."""
    for start in range(pages.start, pages.stop, size):
        yield range(start, min(start + size, pages.stop))


def _pages(names: object, first: int, count: int) -> range:
    """Return the pages *first* to *first* + *count*, each of which must have a name."""
    known = sequence("names", names, _PAGE_NAMES)
    positive_int("first_page", first, least=0)
    positive_int("num_pages", count, least=0)
    if first + count > len(known):
        raise SpecError("num_pages", count, f"at most the {len(known) - first} pages with names")
    return range(first, first + count)
