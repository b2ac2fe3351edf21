"""The pages of a scheduler: which prompts are found in the store, and which pages are saved.

Invariant: a page is saved only from blocks whose values are right: the engine has computed them, or
a load that wrote them was verified. Its blocks are not reused until all ranks have reported.

How it works:
    The scheduler sends names of pages and block tables to the workers with the `EngineStep`. All
    ranks load and save the same pages. For a request, in order:

        matched      vLLM asks how many tokens are stored: find the longest prefix, and pin it
        allocated    vLLM has blocks for them: send a `PageLoad`, or end the pins
        settle       all ranks have loaded, or one has failed. A failed request is computed
        advance      a step of the model begins: send a `PageSave` of the pages that it completes
        finish       the request ends: save its last pages

    Pages are saved step by step, because vLLM frees the blocks that a window has passed. A step of
    the model and the save that comes with it run in this order in each worker. So the save reads
    what the step has computed.

    vLLM counts the users of each block. A save adds one to the count of its blocks, as vLLM's own
    `SimpleCPUOffloadConnector` does. So it does not matter whether the request still runs, has
    ended, or was preempted.

    After a load, the block in which a window begins is not complete (see
    `kvspec.adapters.vllm.prefix_cache`). A page that lies in such a block is not saved.
"""

# ruff: noqa: ANN401 - requests, blocks and configs are of vLLM's classes, which are not imported
from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any, Self

import attrs

from kvspec.adapters.vllm.adapters import Adapters, StatedAdapter
from kvspec.adapters.vllm.content import prompt_of_request
from kvspec.adapters.vllm.engine import NULL_BLOCK, vllm_group
from kvspec.adapters.vllm.media import MediaContents
from kvspec.adapters.vllm.prefix_cache import hashed_of, withhold
from kvspec.adapters.vllm.store_settings import StoreSettings
from kvspec.adapters.vllm.tables import block_tables
from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.errors import KVSpecError, SpecError, counted
from kvspec.ownership.parallel import RankId
from kvspec.stored.names import PageNames, PromptIdentity
from kvspec.stored.page_steps import whole_pages
from kvspec.stored.placement import is_state
from kvspec.stored.plans import plan_store
from kvspec.stored.publish import PageFailed, PageStored, StoreLedger, Writer
from kvspec.stored.store import Hit

log = logging.getLogger(__name__)

_SHOWN = 5  # Other spaces of the directory that the log describes.
# Share of the blocks that may wait for a slow disk. Then pages are not stored, so that the engine
# does not become as slow as the disk.
_MOST_HELD = 0.25


@attrs.frozen(kw_only=True)
class PageLoad:
    """Pages that all ranks load into the blocks of a request.

    Attributes:
        request_id: Id of the request.
        names: Names of its first pages, up to the last that is loaded.
        tables: Its block tables, by group.
        cached_tokens: Leading tokens that the blocks have already.
        adapter: Its LoRA adapter.
    """

    request_id: str
    names: tuple[str, ...]
    tables: Mapping[str, BlockTable]
    cached_tokens: int
    adapter: StatedAdapter | None = None


@attrs.frozen(kw_only=True)
class PageSave:
    """Pages that all ranks save after the step with which they receive this.

    Attributes:
        number: Number of the save.
        first_page: Number of the first page that is saved.
        names: Names of the pages of the prompt, up to the last one that is saved.
        tables: Block tables of the pages that are saved, by group.
        states_at: As in `RankPages.save`.
        adapter: The LoRA adapter with which they are computed.
    """

    number: int
    first_page: int
    names: tuple[str, ...]
    tables: Mapping[str, BlockTable]
    states_at: Mapping[str, Mapping[int, int]]
    adapter: StatedAdapter | None = None


@attrs.define
class SaveReports:
    """What workers have saved in a step. vLLM adds those of all workers.

    Attributes:
        saved: Of each save of a rank: its number, the rank, the number of objects by page, and why
            others are missing.
    """

    saved: list[tuple[int, RankId, dict[str, int], str]]

    def aggregate(self, other: Self) -> SaveReports:
        """Return the reports of two workers."""
        return SaveReports([*self.saved, *other.saved])


@attrs.define
class _Known:
    """A request that has not ended.

    Attributes:
        request: vLLM's request.
        names: The names of its pages so far, or None if something about it is not stated.
        besides: The other inputs of the names, besides tokens and model, in words.
        adapter: Its LoRA adapter.
        media: Digests of its media items.
        tokens: Number of tokens from which the names were made.
        saved: Number of the first page that was not saved.
        computes: Whether the engine has computed tokens of it.
        complete_from: By group, the first token whose values are right, after a load.
        failed: Whether a load has failed. It is not tried again.
    """

    request: Any
    names: PageNames | None
    besides: str
    adapter: StatedAdapter | None = None
    media: list[str | None] = attrs.field(factory=list)
    tokens: int = 0
    saved: int = 0
    computes: bool = False
    complete_from: dict[str, int] = attrs.field(factory=dict)
    failed: bool = False


@attrs.frozen
class _Save:
    """A save that some rank has not reported."""

    pages: frozenset[str]
    ranks: set[Writer]
    blocks: list[Any]


class StoredPrompts:
    """The prompts of one scheduler that are in its store, or will be."""

    def __init__(
        self,
        settings: StoreSettings,
        engine: EngineSpec,
        configs: tuple[Any, Any],
        kv_cache_manager: Any,
        adapters: Adapters,
    ) -> None:
        vllm_config, self._kv_cache_config = configs
        self._adapters = adapters
        self._engine, self._manager = engine, kv_cache_manager
        self._media = MediaContents(vllm_config, len(kv_cache_manager.block_pool.blocks))
        self._hashed = hashed_of(kv_cache_manager)
        self._store = settings.open(vllm_config, engine)
        self._size = settings.page_tokens
        self._plan = plan_store(engine, self._store.placement)
        self._ledger = StoreLedger()
        self._known: dict[str, _Known] = {}
        # The last hit of each request that waits, and the number of tokens that it had then.
        self._hits: dict[str, tuple[int, Hit]] = {}
        self._loading: dict[str, Hit] = {}
        self._saves: dict[int, _Save] = {}
        self._loads: list[PageLoad] = []
        self._new_saves: list[PageSave] = []
        log.info("pages in %s: %s", settings.directory, str(self._plan).split("\n")[0])
        for line in self._store.other_spaces()[:_SHOWN]:
            log.info("%s: %s", settings.directory, line)

    def accept(self, request: Any) -> None:
        """Take a new request."""
        prompt = prompt_of_request(request, self._adapters, self._media)
        known = _Known(request, None, "")
        self._known[request.request_id] = known
        if prompt.unstated:
            fields = ", ".join(prompt.unstated)
            log.info("%s has no names for pages: %s is not stated", request.request_id, fields)
        # A session of vLLM discards its last token when its client sends more.
        elif not getattr(request, "resumable", False):
            known.names = PageNames(self._store.space, self._size, prompt)
            known.adapter = self._adapters.to_workers(request.lora_request)
            known.media = self._media.digests(request.mm_features)
            known.besides = self._words(prompt)

    def _words(self, prompt: PromptIdentity) -> str:
        """Return the other inputs of the names of a prompt, besides tokens and model."""
        words = [self._adapters.words(prompt.adapter)]
        words += [f"item {item.identifier[:8]} at {item.start}" for item in prompt.media or ()]
        words += ["this salt"] if prompt.salt else []
        words += ["these embeddings"] if prompt.embeddings else []
        found = " and ".join(filter(None, words))
        return found and f" under {found}"

    def matched(self, request: Any, cached: int) -> int:
        """Return the number of stored tokens behind the first *cached* ones, and pin them."""
        known = self._known.get(request.request_id)
        if known is None or known.names is None or known.failed:
            return 0
        # vLLM computes this request from its beginning, because it is new or was preempted.
        known.complete_from = {}
        tokens, hit = self._hits.get(request.request_id, (None, None))
        if hit is None or tokens != request.num_tokens:
            self._unpin(request.request_id)
            # The last token is computed, so that there is a next one.
            names = self._names(known)[: (request.num_tokens - 1) // self._size]
            try:
                hit = self._store.lookup(names, self._engine)
            except (KVSpecError, OSError) as error:  # The request is computed.
                log.warning("%s is not looked up: %s", request.request_id, error)
                known.failed = True
                return 0
            self._hits[request.request_id] = request.num_tokens, hit
            known.saved = max(known.saved, hit.num_pages)
            log.debug(
                "%s: %d of %s are stored%s",
                request.request_id,
                hit.num_pages,
                counted(len(names), "page"),
                known.besides,
            )
        return max(0, hit.num_tokens - cached)

    def allocated(self, name: str, block_ids: Any, cached: int, count: int) -> bool:
        """Load *count* tokens behind *cached* ones into blocks, or end the pins of the request.

        Returns:
            Whether the load begins, or there is none. Otherwise the request has to be computed.
        """
        if not count or name not in self._hits:
            self._unpin(name)
            return True
        _, hit = self._hits.pop(name)
        try:
            self._load(name, hit, block_ids, cached, cached + count)
        except KVSpecError as error:  # One request is computed, and the engine goes on.
            log.error("%s: %s", name, error)  # noqa: TRY400
            hit.close()
            self._known[name].failed = True
            return False
        self._loading[name] = hit
        return True

    def _unpin(self, name: str) -> None:
        if name in self._hits:
            self._hits.pop(name)[1].close()

    def _load(self, name: str, hit: Hit, block_ids: Any, cached: int, end: int) -> None:
        """Load the tokens from *cached* to *end*."""
        pages, rest = divmod(end, self._size)
        if rest or pages > hit.num_pages:
            wanted = f"whole pages of {self._size} tokens, at most {hit.num_pages}"
            raise SpecError("num_external_tokens", end - cached, wanted)
        tables = block_tables(self._engine, self._kv_cache_config, block_ids, end)
        # As if the tokens came from an engine with the same blocks.
        transfer = TransferRequest(
            request_id=name,
            num_tokens=end,
            cached_tokens=cached,
            producer_blocks=tables,
            consumer_blocks=tables,
        )
        self._known[name].complete_from = withhold(self._engine, transfer, self._hashed)
        self._ledger.load(name, {group: _used(table) for group, table in tables.items()})
        names = hit.names[:pages]
        self._loads.append(
            PageLoad(
                request_id=name,
                names=names,
                tables=tables,
                cached_tokens=cached,
                adapter=self._known[name].adapter,
            )
        )

    def loaded_by_ticket(self, name: str, complete_from: Mapping[str, int]) -> None:
        """Take a request whose tokens come from another engine.

        Args:
            name: Id of the request.
            complete_from: By group, the first token of the request whose values will be right.
        """
        if name in self._known:
            self._known[name].complete_from = dict(complete_from)
            self._media.came_from_elsewhere(self._known[name].request.mm_features)

    def loads(self, name: str) -> bool:
        """Return whether a request loads pages."""
        return name in self._loading

    def advance(self, step: Any) -> tuple[list[PageLoad], list[PageSave]]:
        """Save the pages that the model completes in *step*, vLLM's `SchedulerOutput`.

        Returns:
            The loads and the saves that begin with this step.
        """
        offers = getattr(step.kv_connector_block_state, "boundary_state_offloads", {})
        for name, count in step.num_scheduled_tokens.items():
            known = self._known.get(name)
            if known is not None:
                known.computes = True
                self._save(known, known.request.num_computed_tokens + count, offers.get(name, ()))
        loads, self._loads = self._loads, list[PageLoad]()
        saves, self._new_saves = self._new_saves, list[PageSave]()
        return loads, saves

    def finish(self, request: Any) -> bool:
        """Save the last pages of a request that ends, whose blocks vLLM has not freed yet.

        Returns:
            Whether it still loads.
        """
        name = request.request_id
        self._unpin(name)
        known = self._known.pop(name, None)
        # The tokens of a request that waits for a load are counted as computed already.
        if known is not None and known.computes and name not in self._loading:
            self._save(known, request.num_computed_tokens, ())
        self._ledger.finish(name)
        return name in self._loading

    def settle(self, output: Any) -> None:
        """Take the results of the workers, vLLM's `KVConnectorOutput`."""
        for name in output.finished_recving or ():
            hit = self._loading.pop(name, None)
            if hit is None:
                continue
            hit.close()
            failed = name in (output.failed_recving or ())
            self._ledger.loaded(name, valid=not failed)
            if failed and name in self._known:
                self._known[name].failed, self._known[name].saved = True, 0
                self._ledger.computes(name)
        reports = getattr(output, "kv_connector_worker_meta", None)
        if isinstance(reports, SaveReports):
            for number, rank, objects, why in reports.saved:
                self._reported(number, rank, objects, why)

    @property
    def is_saving(self) -> bool:
        """Whether a save has not ended."""
        return bool(self._saves)

    def _names(self, known: _Known) -> tuple[str, ...]:
        """Return the names of the whole pages of a request. It is empty if they have no name."""
        if known.names is None:
            return ()
        tokens = known.request.num_tokens
        if tokens > known.tokens:
            known.names.extend(known.request._all_token_ids[known.tokens : tokens])  # noqa: SLF001
            known.tokens = tokens
        return known.names.names

    def _save(self, known: _Known, computed: int, offers: Sequence[tuple[int, int, int]]) -> None:
        """Save pages of the first *computed* tokens.

        *offers* are states that vLLM keeps: group, block, and the number of tokens of each.
        """
        name, size = known.request.request_id, self._size
        if known.names is None or known.media != self._media.digests(known.request.mm_features):
            return
        # Tokens behind the known ones are drafts.
        stop = min(computed, known.request.num_tokens) // size
        states = self._states(offers, stop)
        ends = [tokens // size - 1 for blocks in states.values() for tokens in blocks]
        pages = range(min([known.saved, *ends]), stop)
        known.saved = max(known.saved, stop)
        if not pages or self._is_late():
            return
        names = self._names(known)
        tables, blocks = self._tables(known, pages)
        used = {group: _used(table) for group, table in tables.items()}
        for group, held in states.items():
            used[group] = list(held.values())
            blocks += [self._manager.block_pool.blocks[block] for block in held.values()]
        try:
            expected = self._expected(names, pages, tables, states)
            save = self._ledger.store(name, expected, used)
        except KVSpecError as error:
            log.error("pages of %s are not saved: %s", name, error)  # noqa: TRY400
            return
        if not save.pages:  # They are not whole, or another request saves them.
            return
        # All pages in between are sent, too. A rank leaves out what is stored already.
        numbers = [page for page in pages if names[page] in save.pages]
        sent = slice(numbers[0], numbers[-1] + 1)
        blocks = list({id(block): block for block in blocks}.values())
        self._manager.block_pool.touch(blocks)
        ranks = {rank for page in save.pages for rank in expected[page]}
        self._saves[save.number] = _Save(frozenset(save.pages), ranks, blocks)
        self._new_saves.append(
            PageSave(
                number=save.number,
                first_page=sent.start,
                names=names[: sent.stop],
                tables=tables,
                states_at=states,
                adapter=known.adapter,
            )
        )

    def _is_late(self) -> bool:
        """Return whether saves alone hold so many blocks that new ones would slow the engine."""
        pool = self._manager.block_pool
        alone = sum(block.ref_cnt == 1 for save in self._saves.values() for block in save.blocks)
        return bool(alone > _MOST_HELD * len(pool.blocks))

    def _states(
        self, offers: Sequence[tuple[int, int, int]], stop: int
    ) -> dict[str, dict[int, int]]:
        """Return the blocks of the states at page ends, by group and number of tokens."""
        states: dict[str, dict[int, int]] = {}
        for number, block, tokens in offers:
            if tokens % self._size or tokens > stop * self._size:
                continue
            for group in self._engine.groups:
                if vllm_group(group.name) == f"group{number}" and is_state(group.spec):
                    states.setdefault(group.name, {})[tokens] = block
        return states

    def _tables(self, known: _Known, pages: range) -> tuple[dict[str, BlockTable], list[Any]]:
        """Return the block tables of *pages*, and vLLM's blocks in them without null blocks."""
        all_blocks = self._manager.get_blocks(known.request.request_id).blocks
        tables: dict[str, BlockTable] = {}
        held: list[Any] = []
        for group in self._engine.groups:
            if is_state(group.spec):
                continue
            size = self._engine.virtual_block(group)
            start = max(pages.start * self._size, known.complete_from.get(group.name, 0))
            first = -(-start // size) if start > pages.start * self._size else start // size
            number = int(vllm_group(group.name).removeprefix("group"))
            own = all_blocks[number][first : -(-pages.stop * self._size // size)]
            tables[group.name] = BlockTable([block.block_id for block in own], first * size)
            held += [block for block in own if not block.is_null]
        return tables, held

    def _expected(
        self,
        names: Sequence[str],
        pages: range,
        tables: Mapping[str, BlockTable],
        states: Mapping[str, Mapping[int, int]],
    ) -> dict[str, dict[Writer, int]]:
        """Return for each page, by name, the number of objects that each rank writes."""
        expected: dict[str, dict[Writer, int]] = {}
        objects: dict[str, list[RankId]] = {}
        for group, chunk in self._store.placement.objects:
            objects.setdefault(group, []).append(chunk)
        for group, chunks in objects.items():
            for page in whole_pages(self._plan, group, pages, tables, states):
                counts = expected.setdefault(names[page], {})
                for chunk in chunks:
                    rank = self._plan.writer(group, chunk, page)
                    counts[rank] = counts.get(rank, 0) + 1
        return expected

    def _reported(self, number: int, rank: RankId, objects: Mapping[str, int], why: str) -> None:
        """Take what *rank* has saved. After the last rank, the blocks may be reused."""
        save = self._saves.get(number)
        if save is None or rank not in save.ranks:
            return
        own = {page: count for page, count in objects.items() if page in save.pages}
        actions = self._ledger.report(number, rank, own, why)
        failed = [action for action in actions if isinstance(action, PageFailed)]
        if failed:
            pages = counted(len(failed), "page")
            log.warning("%s not stored, the first because %s", pages, failed[0].why)
        stored = sum(isinstance(action, PageStored) for action in actions)
        log.debug("save %d: %s stored", number, counted(stored, "page"))
        save.ranks.remove(rank)
        if not save.ranks:
            # The last blocks of a prompt are reused first, as in vLLM.
            self._manager.block_pool.free_blocks(reversed(save.blocks))
            del self._saves[number]


def _used(table: BlockTable) -> list[int]:
    """Return the blocks of *table* without null blocks."""
    return [block for block in table.block_ids.tolist() if block != NULL_BLOCK]
