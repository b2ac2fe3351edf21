"""Which pages are stored, and which blocks may be reused: the ledger of a scheduler.

Invariant: a page is reported as stored only if every rank has written all of its objects. A block
is not reused while a rank reads it for a store. No store reads a block whose values are not right.

How it works:
    A *store* writes some pages of a request. Each rank that writes a part of a page copies it from
    the blocks, writes its objects, and then reports how many it wrote. The ledger compares this
    with the number that the certificate of the placement contains:

        >>> ledger = StoreLedger()
        >>> store = ledger.store("r1", {"page": {"tp0": 2, "tp1": 1}}, {"full": [7]})
        >>> ledger.report(store.number, "tp0", {"page": 2})
        []
        >>> ledger.report(store.number, "tp1", {"page": 1})
        [PageStored(page='page')]

    A ledger has no clock and does nothing itself: it returns actions. `REQUEST` has the states of a
    request. A request may have any number of stores in the state *right*, and none in another.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import NamedTuple

import attrs

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, instance, mapping, positive_int

Writer = Hashable
"""A rank of the engine, such as a `RankId`."""
GroupBlock = tuple[str, int]

REQUEST: dict[tuple[str, str], tuple[str, str]] = {
    ("right", "store"): ("right", "its computed tokens have right values"),
    ("right", "load"): ("loading", "the blocks are being written"),
    ("loading", "valid"): ("right", "all bytes were verified"),
    ("loading", "invalid"): ("wrong", "some bytes are missing or differ"),
    ("wrong", "load"): ("loading", "it is tried again, perhaps from another place"),
    ("wrong", "compute"): ("right", "the engine computes the tokens that were not loaded"),
}
"""The states of a request: state and event, next state and the reason. Others are refused."""


class PageStored(NamedTuple):
    """Action: all objects of a page are written, so other engines can load it."""

    page: str


class PageFailed(NamedTuple):
    """Action: a page was not stored. *why* is the first reason."""

    page: str
    why: str


class BlocksReleased(NamedTuple):
    """Action: the blocks of a finished request may be reused."""

    request_id: str


StoreAction = PageStored | PageFailed | BlocksReleased


class BegunStore(NamedTuple):
    """One store that has begun.

    Attributes:
        number: Number of the store in this ledger.
        pages: The pages to write. A page that another store is writing is left out.
    """

    number: int
    pages: tuple[str, ...]


@attrs.define
class _OpenStore:
    """A store that some rank has not reported, or may still read the blocks for."""

    request_id: str
    expected: dict[Writer, dict[str, int]]  # Objects of each page, of ranks that have not reported.
    reading: set[Writer]  # Ranks that may still read the blocks.
    blocks: frozenset[GroupBlock]
    ranks: frozenset[Writer]
    writers: Counter[str]  # Ranks of each page that have not reported.
    failed: set[str] = attrs.field(factory=set)


class StoreLedger:
    """The stores and loads of an engine's requests.

    A method that raises an error has changed nothing.

    >>> ledger = StoreLedger()
    >>> ledger.load("r1", {"full": [7]})
    >>> ledger.finish("r1"), ledger.loaded("r1", valid=True)
    (False, [BlocksReleased(request_id='r1')])
    """

    def __init__(self) -> None:
        self._states: dict[str, str] = {}  # Of requests that are not "right".
        self._stores: dict[int, _OpenStore] = {}
        self._writing: set[str] = set()  # Pages of open stores.
        self._read = Counter[GroupBlock]()  # Stores that may still read a block.
        self._loads: dict[str, frozenset[GroupBlock]] = {}  # Until their values are right.
        self._finished: set[str] = set()
        self._next = 0

    @property
    def requests(self) -> frozenset[str]:
        """Requests whose blocks must not be reused now."""
        reading = {store.request_id for store in self._stores.values() if store.reading}
        loading = {request for request, state in self._states.items() if state == "loading"}
        return frozenset(reading | loading)

    def load(self, request_id: str, blocks: Mapping[str, Iterable[int]]) -> None:
        """Record that a load begins to write *blocks*, by group.

        Raises:
            SpecError: If the blocks are malformed.
            TransferError: If a block is being loaded, or read by a store. Its state is `BUSY`.
        """
        own = _blocks(blocks)
        next_state = self._next_state(request_id, "load")
        for block in own & self._read.keys():
            raise _busy(request_id, block, "a store still reads")
        self._check_not_loading(request_id, own)
        self._loads[request_id] = own
        self._states[request_id] = next_state

    def loaded(self, request_id: str, *, valid: bool) -> list[StoreAction]:
        """Record that no byte of the load of *request_id* can move any more.

        Args:
            request_id: The request.
            valid: Whether all bytes arrived and were verified.

        Raises:
            TransferError: If there is no such load.
        """
        event = "valid" if flag("valid", valid) else "invalid"
        self._enter(request_id, self._next_state(request_id, event))
        return self._release(request_id)

    def computes(self, request_id: str) -> None:
        """Record that the engine computes the tokens that a load has not brought.

        Raises:
            TransferError: If the last load of the request has not failed.
        """
        self._enter(request_id, self._next_state(request_id, "compute"))

    def store(
        self,
        request_id: str,
        pages: Mapping[str, Mapping[Writer, int]],
        blocks: Mapping[str, Iterable[int]],
    ) -> BegunStore:
        """Begin a store. The blocks must not be reused until each rank has copied them.

        Args:
            request_id: The request.
            pages: For the name of each page, the number of objects that each rank writes.
            blocks: The blocks that the ranks read, by group, without null blocks.

        Returns:
            The number of the store, and the pages to write. There may be none.

        Raises:
            SpecError: If a page has no object, or an argument is malformed.
            TransferError: If a load of the request has not ended or has failed, or another load
                writes one of the blocks. Its state is `BUSY`.
        """
        self._next_state(request_id, "store")
        own = _blocks(blocks)
        self._check_not_loading(request_id, own)
        expected: dict[Writer, dict[str, int]] = {}
        writers = Counter[str]()
        for page, objects in mapping("pages", pages, "names of pages to objects").items():
            counts = dict(mapping("pages", objects, "ranks to numbers of objects"))
            if not counts:
                raise SpecError("pages", page, "pages, each with a rank that writes objects of it")
            for rank, count in counts.items():
                positive_int(f"pages[{page!r}]", count)
                if page not in self._writing:
                    expected.setdefault(rank, {})[page] = count
                    writers[page] += 1
        number, self._next = self._next, self._next + 1
        if writers:
            ranks = frozenset(expected)
            self._stores[number] = _OpenStore(request_id, expected, set(ranks), own, ranks, writers)
            self._writing |= writers.keys()
            self._read.update(own)
        return BegunStore(number, tuple(writers))

    def report(
        self, number: int, rank: Writer, objects: Mapping[str, int], why: str = ""
    ) -> list[StoreAction]:
        """Record how many objects of each page *rank* has written. It reads the blocks no more.

        Objects that were stored already count, too.

        Args:
            number: Number of the store.
            rank: The rank. A second report of it changes nothing.
            objects: Number of objects by page. A page that is left out has none.
            why: The reason why objects were not written.

        Raises:
            SpecError: If the rank writes nothing for this store, or there was no such store.
        """
        store = self._open(number, rank)
        if store is None or rank not in store.expected:
            return []
        for page, count in mapping("objects", objects, "names of pages to numbers").items():
            most = store.expected[rank].get(page, 0)
            if positive_int(f"objects[{page!r}]", count, least=0) > most:
                raise SpecError(f"objects[{page!r}]", count, f"at most {most}, as the store began")
        actions = self._copied(store, rank)
        for page, expected_count in store.expected.pop(rank).items():
            count = objects.get(page, 0)
            if count < expected_count and page not in store.failed:
                store.failed.add(page)
                wrote = f"rank {rank} wrote {count} of {expected_count} objects"
                actions.append(PageFailed(page, f"{wrote}: {why}" if why else wrote))
            store.writers[page] -= 1
            if not store.writers[page]:
                self._writing.remove(page)
                if page not in store.failed:
                    actions.append(PageStored(page))
        if not store.expected:
            del self._stores[number]
        return actions

    def finish(self, request_id: str) -> bool:
        """Return whether the engine may reuse the blocks of a request that has ended.

        If not, `BlocksReleased` follows. It follows once.
        """
        self._finished.add(request_id)
        return bool(self._release(request_id))

    def _copied(self, store: _OpenStore, rank: Writer) -> list[StoreAction]:
        """Note that *rank* reads the blocks of a store no more."""
        store.reading.remove(rank)
        if store.reading:
            return []
        self._read -= Counter(store.blocks)
        return self._release(store.request_id)

    def _next_state(self, request_id: str, event: str) -> str:
        state = self._states.get(instance("request_id", request_id, str), "right")
        if (state, event) not in REQUEST:
            message = f"the event {event!r} is not possible while the tokens are {state!r}"
            raise TransferError(message, request=request_id, state=TransferState.BUSY)
        return REQUEST[state, event][0]

    def _enter(self, request_id: str, state: str) -> None:
        self._states[request_id] = state
        if state == "right":
            del self._states[request_id], self._loads[request_id]

    def _check_not_loading(self, request_id: str, blocks: frozenset[GroupBlock]) -> None:
        for loading, loaded in self._loads.items():
            for block in blocks & loaded if loading != request_id else ():
                raise _busy(request_id, block, "a load has not written right values into")

    def _open(self, number: int, rank: Writer) -> _OpenStore | None:
        """Return the store, or None if it has ended."""
        if positive_int("number", number, least=0) >= self._next:
            raise SpecError("number", number, "the number of a store that has begun")
        store = self._stores.get(number)
        if store is not None and rank not in store.ranks:
            raise SpecError("rank", rank, f"a rank that writes objects of store {number}")
        return store

    def _release(self, request_id: str) -> list[StoreAction]:
        if request_id not in self._finished or request_id in self.requests:
            return []
        self._finished.remove(request_id)
        self._states.pop(request_id, None)
        self._loads.pop(request_id, None)
        return [BlocksReleased(request_id)]


def _blocks(blocks: Mapping[str, Iterable[int]]) -> frozenset[GroupBlock]:
    def all_of() -> Iterator[GroupBlock]:
        for group, ids in mapping("blocks", blocks, "groups to ids of blocks").items():
            for block in ids:
                yield group, positive_int(f"blocks[{group!r}]", block, least=0)

    return frozenset(all_of())


def _busy(request_id: str, block: GroupBlock, who: str) -> TransferError:
    message = f"{who} block {block[1]} of group {block[0]!r}"
    return TransferError(message, request=request_id, state=TransferState.BUSY)
