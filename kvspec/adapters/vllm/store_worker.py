"""The threads of a worker that load and save pages. The worker's steps do not wait for them.

Invariant: a load is reported when it writes no byte any more, and a save when it reads no block any
more. An error fails one load or one save, and the log names it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor

from kvspec.adapters.vllm.gpu import gpu_of, submitted_work
from kvspec.adapters.vllm.store_scheduler import PageLoad, PageSave, SaveReports
from kvspec.memory.rank_cache import RankCache
from kvspec.stored.store import PageStore, Saved

log = logging.getLogger(__name__)


class PageThreads:
    """A thread that loads pages into the cache of one rank, and one that saves pages of it.

    A load of a new request does not wait for saves of older ones.
    """

    def __init__(self, store: PageStore, cache: RankCache) -> None:
        """Prepare the threads.

        Raises:
            SpecError: If the engine cannot store its pages.
            MismatchError: If it cannot load them.
        """
        self._rank = cache.rank
        self._loading, self._saving = store.rank_pages(cache), store.rank_pages(cache)
        self._loading.load_plan, self._saving.store_plan  # noqa: B018 - both may raise
        self._gpu = gpu_of(cache)
        self._loader = ThreadPoolExecutor(1, "kvspec-load")
        self._saver = ThreadPoolExecutor(1, "kvspec-save")
        self._loads: dict[str, Future[None]] = {}
        self._saves: list[tuple[int, Future[Saved]]] = []

    def begin(self, loads: Iterable[PageLoad], cancelled: Iterable[str]) -> None:
        """Begin *loads*, and end those of the requests *cancelled* that have not begun."""
        for load in loads:
            self._load(load)
        for name in cancelled:
            if name in self._loads:
                # A load that has begun goes on: it does not take long.
                self._loads[name].cancel()

    def _load(self, load: PageLoad) -> None:
        done = submitted_work(self._gpu)
        # After this, vLLM computes with these files, whatever becomes of them.
        error = None if load.adapter is None else load.adapter.load()

        def run() -> None:
            done()
            if error is not None:
                raise error
            names, cached = load.names, load.cached_tokens
            self._loading.load(names, len(names), load.tables, cached_tokens=cached)

        self._loads[load.request_id] = self._loader.submit(run)

    def save(self, save: PageSave) -> None:
        """Begin a save of what the model has computed, or will compute on its GPU."""
        done = submitted_work(self._gpu)
        error = None if save.adapter is None else save.adapter.mismatch()

        def run() -> Saved:
            done()
            if error is not None:
                raise error
            pages = len(save.names) - save.first_page
            tables, states = save.tables, save.states_at
            return self._saving.save(save.names, save.first_page, pages, tables, states)

        self._saves.append((save.number, self._saver.submit(run)))

    def settle(self) -> tuple[set[str], set[str]]:
        """Return the requests whose loads have ended since the last call, and those that failed."""
        ended = {name for name, load in self._loads.items() if load.done()}
        failed = {name for name in ended if not _succeeded(name, self._loads.pop(name))}
        return ended, failed

    def reports(self) -> SaveReports | None:
        """Return the saves that have ended since the last call, or None."""
        ended = [(number, save) for number, save in self._saves if save.done()]
        self._saves = [(number, save) for number, save in self._saves if not save.done()]
        found = [(number, self._rank, *_objects(save)) for number, save in ended]
        return SaveReports(found) if found else None

    def close(self) -> None:
        """Cancel the loads that have not begun, and wait for all others and for the saves."""
        self._loader.shutdown(cancel_futures=True)
        self._saver.shutdown()


def _succeeded(name: str, load: Future[None]) -> bool:
    try:
        load.result()
    except CancelledError:
        return False
    except Exception as error:  # noqa: BLE001 - one request fails, and the engine goes on
        log.warning("%s: %s: %s", name, type(error).__name__, error)
        return False
    return True


def _objects(save: Future[Saved]) -> tuple[dict[str, int], str]:
    """Return the number of stored objects by page, and why others are missing."""
    try:
        saved = save.result()
    except Exception as error:  # noqa: BLE001 - some pages are not stored, and the engine goes on
        return {}, f"{type(error).__name__}: {error}"
    return dict(Counter(key.page for key in (*saved.written, *saved.already_stored))), ""
