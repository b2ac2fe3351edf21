"""The ledger of stores: a law over random orders of events, and what it refuses.

The world has ranks that really copy values out of blocks. So a page that is stored too early, a
block that is reused too early, and a value that was never right are found by comparing values.
"""

# ruff: noqa: D102 - a broken ledger changes methods of the ledger

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import attrs
import pytest

from kvspec.errors import SpecError, TransferError
from kvspec.stored.publish import (
    REQUEST,
    BlocksReleased,
    PageFailed,
    PageStored,
    StoreLedger,
)

RANKS = ("tp0", "tp1", "tp2")


class BrokenPromiseError(AssertionError):
    """A promise of the ledger was broken."""


@attrs.define
class Work:
    """The work of one rank for one store."""

    number: int
    rank: str
    blocks: dict[str, int]  # The block of each page.
    counts: dict[str, int]  # Objects of each page.
    values: dict[str, str] | None = None  # Of each page, after the copy.


class World:
    """An engine whose tokens of page p have the value p, and a store of objects."""

    def __init__(self, seed: int, ledger: StoreLedger) -> None:
        self.random = random.Random(seed)
        self.ledger = ledger
        self.memory = dict.fromkeys(range(12), "garbage")
        self.owner: dict[int, str] = {}
        self.tables: dict[str, dict[str, int]] = {}  # Blocks of the pages of each request.
        self.loads: dict[str, list[str]] = {}  # Pages that a load has not written.
        self.work: list[Work] = []
        self.objects: dict[tuple[str, str], list[str]] = {}  # Values by page and rank.
        self.expected: dict[str, dict[str, int]] = {}
        self.begun: list[str] = []
        self.ended: list[PageStored | PageFailed] = []
        self.over: set[str] = set()  # Requests that wait for the release of their blocks.

    def steps(self) -> Iterator[Any]:
        """Yield all kinds of step."""
        return iter((self.admit, self.store, self.store, self.copy, self.copy, self.write,
                     self.write, self.load, self.load, self.finish))  # fmt: skip

    def admit(self) -> None:
        """Begin a request with free blocks. Its tokens are computed, or will be loaded."""
        free = [block for block in self.memory if block not in self.owner]
        if len(free) < 3:
            return
        request = f"r{len(self.begun)}.{self.random.random()}"
        pages = self.random.sample(["a", "b", "c", "d"], 3)
        self.tables[request] = dict(zip(pages, self.random.sample(free, 3), strict=True))
        for page, block in self.tables[request].items():
            self.owner[block] = request
            self.memory[block] = "garbage"
            if self.random.random() < 0.6:
                self.memory[block] = page
        missing = [p for p, block in self.tables[request].items() if self.memory[block] != p]
        if missing:
            self.ledger.load(request, {"g": [self.tables[request][p] for p in missing]})
            self.loads[request] = missing

    def load(self) -> None:
        """Write a page of a load, or end the load, perhaps with wrong values."""
        if not self.loads:
            return
        request = self.random.choice(sorted(self.loads))
        pages = self.loads[request]
        if pages and self.random.random() < 0.7:
            page = pages.pop()
            self.memory[self.tables[request][page]] = page
            return
        del self.loads[request]
        self.act(self.ledger.loaded(request, valid=not pages))
        if pages and request in self.tables and request not in self.over:
            if self.random.random() < 0.5:
                return
            for page in pages:
                self.memory[self.tables[request][page]] = page
            self.ledger.computes(request)

    def store(self) -> None:
        """Try to store some pages of a request. The ledger may refuse."""
        request = self.pick()
        if not request:
            return
        table = self.tables[request]
        pages = self.random.sample(sorted(table), self.random.randint(1, 3))
        expected = {}
        for page in pages:
            ranks = self.random.sample(RANKS, self.random.randint(1, 3))
            expected[page] = {rank: self.random.randint(1, 2) for rank in ranks}
        try:
            store = self.ledger.store(request, expected, {"g": [table[page] for page in pages]})
        except TransferError:
            return
        self.begun += store.pages
        self.expected |= {page: expected[page] for page in store.pages}
        for rank in RANKS:
            counts = {p: expected[p][rank] for p in store.pages if rank in expected[p]}
            for page in counts:
                self.objects[page, rank] = []
            if counts:
                blocks = {page: table[page] for page in counts}
                self.work.append(Work(store.number, rank, blocks, counts))

    def copy(self) -> None:
        """Let a rank copy its blocks."""
        waiting = [work for work in self.work if work.values is None]
        if waiting:
            work = self.random.choice(waiting)
            work.values = {page: self.memory[block] for page, block in work.blocks.items()}

    def write(self) -> None:
        """Let a rank write its objects and report them. Some of them may fail."""
        waiting = [work for work in self.work if work.values is not None]
        if not waiting:
            return
        work = self.random.choice(waiting)
        self.work.remove(work)
        wrote = {}
        for page, value in (work.values or {}).items():
            count = work.counts[page] - (self.random.random() < 0.1)
            self.objects[page, work.rank] = [value] * count
            wrote[page] = count
        self.act(self.ledger.report(work.number, work.rank, wrote, "full disk"))
        assert [] == self.ledger.report(work.number, work.rank, wrote)

    def finish(self) -> None:
        """End a request: reuse its blocks now, or after the release."""
        request = self.pick()
        if request:
            self.over.add(request)
            if self.ledger.finish(request):
                self.reuse(request)

    def pick(self) -> str:
        """Return a request that has not ended, or ""."""
        return self.random.choice([*(self.tables.keys() - self.over), ""])

    def reuse(self, request: str) -> None:
        """Give the blocks of a request back. Nothing may be moving in them."""
        self.over.remove(request)
        blocks = set(self.tables.pop(request).values())
        moving = [work for work in self.work if work.values is None]
        if request in self.loads or any(blocks & {*work.blocks.values()} for work in moving):
            raise BrokenPromiseError(f"the blocks of {request} are reused while bytes move")
        for block in blocks:
            del self.owner[block]
            self.memory[block] = "garbage"

    def act(self, actions: list[Any]) -> None:
        """Carry out actions, and judge them."""
        for action in actions:
            if isinstance(action, BlocksReleased):
                self.reuse(action.request_id)
                continue
            self.ended.append(action)
            counts = self.expected[action.page]
            written = {rank: self.objects[action.page, rank] for rank in counts}
            whole = all(len(written[rank]) == count for rank, count in counts.items())
            if isinstance(action, PageStored) and not whole:
                raise BrokenPromiseError(f"page {action.page} is stored, and objects are missing")
            if not {value for values in written.values() for value in values} <= {action.page}:
                raise BrokenPromiseError(f"page {action.page} has wrong values")

    def end(self) -> None:
        """End everything. Each page has ended once, and no block is held."""
        while self.loads or self.work:
            self.load()
            self.copy()
            self.write()
        for request in sorted(self.tables.keys() - self.over):
            self.over.add(request)
            if self.ledger.finish(request):
                self.reuse(request)
        if self.tables or self.ledger.requests:
            raise BrokenPromiseError("blocks are held for ever")
        if left := {name for name, value in vars(self.ledger).items() if value} - {"_next"}:
            raise BrokenPromiseError(f"the ledger still has {left}")
        if sorted(self.begun) != sorted(end.page for end in self.ended):
            raise BrokenPromiseError("a page has not ended once")


def play(seed: int, kind: type[StoreLedger] = StoreLedger, steps: int = 120) -> World:
    """Run *steps* random steps, and then end the world."""
    world = World(seed, kind())
    kinds = [*world.steps()]
    for _ in range(steps):
        world.random.choice(kinds)()
    world.end()
    return world


def test_pages_and_blocks_are_right_in_any_order_of_events() -> None:
    """Many pages are stored and many fail, so both ends are reached."""
    ends = Counter(type(end) for seed in range(150) for end in play(seed).ended)
    assert {PageStored, PageFailed} == ends.keys()
    assert min(ends.values()) > 100


class ReleasesEarly(StoreLedger):
    """Frees blocks although ranks read them."""

    def finish(self, request_id: str) -> bool:
        super().finish(request_id)
        self._finished.discard(request_id)
        return True


class StoresWhileLoading(StoreLedger):
    """Stores blocks whose load has not settled."""

    def _next_state(self, request_id: str, event: str) -> str:
        return "right" if event == "store" else super()._next_state(request_id, event)

    def _check_not_loading(self, request_id: str, blocks: Any) -> None:
        pass


class BelievesFailedLoads(StoreLedger):
    """Takes each load as valid."""

    def loaded(self, request_id: str, *, valid: bool) -> Any:
        del valid
        return super().loaded(request_id, valid=True)

    def computes(self, request_id: str) -> None:
        pass


class CountsNoObjects(StoreLedger):
    """Takes each report as complete."""

    def report(self, number: int, rank: Any, objects: Any, why: str = "") -> Any:
        store = self._stores.get(number)
        if store and rank in store.expected:
            objects = dict(store.expected[rank])
        return super().report(number, rank, objects, why)


BROKEN = [ReleasesEarly, StoresWhileLoading, BelievesFailedLoads, CountsNoObjects]


@pytest.mark.parametrize("kind", BROKEN)
def test_broken_ledgers_are_found(kind: type[StoreLedger]) -> None:
    with pytest.raises(BrokenPromiseError):
        _play_many(kind)


def _play_many(kind: type[StoreLedger]) -> None:
    for seed in range(300):
        play(seed, kind)


def test_states_and_events_are_those_of_the_table() -> None:
    """Each pair that the table leaves out is refused, and changes nothing."""
    events: dict[str, Any] = {
        "load": lambda ledger: ledger.load("r", {"g": [1]}),
        "valid": lambda ledger: ledger.loaded("r", valid=True),
        "invalid": lambda ledger: ledger.loaded("r", valid=False),
        "compute": lambda ledger: ledger.computes("r"),
        "store": lambda ledger: ledger.store("r", {}, {"g": [1]}),
    }
    ways: dict[str, list[str]] = {
        "right": [], "loading": ["load"], "wrong": ["load", "invalid"],
    }  # fmt: skip
    for state, way in ways.items():
        for event, act in events.items():
            ledger = StoreLedger()
            for earlier in way:
                events[earlier](ledger)
            if (state, event) in REQUEST:
                act(ledger)
                continue
            with pytest.raises(TransferError) as caught:
                act(ledger)
            assert "busy" == caught.value.state
            assert (state == "loading") == bool(ledger.requests)


def test_block_of_another_request_is_refused_while_it_moves() -> None:
    ledger = StoreLedger()
    ledger.load("loads", {"g": [1]})
    store = ledger.store("stores", {"p": {"tp0": 1}}, {"g": [2]})
    with pytest.raises(TransferError):
        ledger.store("other", {"q": {"tp0": 1}}, {"g": [1]})
    for block in (1, 2):
        with pytest.raises(TransferError):
            ledger.load("other", {"g": [block]})
    ledger.load("other", {"h": [1, 2]})
    ledger.report(store.number, "tp0", {"p": 1})
    ledger.load("third", {"g": [2]})


def test_block_is_read_until_the_last_rank_has_reported() -> None:
    ledger = StoreLedger()
    store = ledger.store("r", {"p": {"tp0": 1, "tp1": 1}}, {"g": [1]})
    ledger.report(store.number, "tp0", {"p": 1})
    with pytest.raises(TransferError):
        ledger.load("other", {"g": [1]})
    ledger.report(store.number, "tp1", {"p": 1})
    ledger.load("other", {"g": [1]})


def test_block_of_a_load_is_free_for_stores_when_its_values_are_right() -> None:
    """A load that failed makes its blocks wrong for all requests until they are computed."""
    for event in ("valid", "computed", "finished"):
        ledger = StoreLedger()
        ledger.load("r", {"g": [1]})
        ledger.loaded("r", valid=event == "valid")
        if event != "valid":
            with pytest.raises(TransferError):
                ledger.store("other", {"p": {"tp0": 1}}, {"g": [1]})
        if event == "computed":
            ledger.computes("r")
        if event == "finished":
            assert ledger.finish("r")
        assert ("p",) == ledger.store("other", {"p": {"tp0": 1}}, {"g": [1]}).pages


def test_blocks_are_released_once() -> None:
    ledger = StoreLedger()
    ledger.load("r", {"g": [1]})
    assert not ledger.finish("r")
    assert [BlocksReleased("r")] == ledger.loaded("r", valid=False)
    store = ledger.store("r", {"p": {"tp0": 1}}, {"g": [1]})
    assert [PageStored("p")] == ledger.report(store.number, "tp0", {"p": 1})


def test_page_that_is_being_written_is_not_written_twice() -> None:
    ledger = StoreLedger()
    first = ledger.store("r1", {"p": {"tp0": 1}}, {"g": [1]})
    second = ledger.store("r2", {"p": {"tp0": 1}, "q": {"tp0": 1}}, {"g": [1, 2]})
    assert (("p",), ("q",)) == (first.pages, second.pages)
    assert () == ledger.store("r3", {"p": {"tp0": 1}}, {"g": [1]}).pages
    assert ledger.finish("r3")
    assert not ledger.finish("r1")
    assert [BlocksReleased("r1"), PageStored("p")] == ledger.report(0, "tp0", {"p": 1})
    assert ("p",) == ledger.store("r2", {"p": {"tp0": 1}}, {"g": [1]}).pages


def test_failure_names_rank_objects_and_reason() -> None:
    ledger = StoreLedger()
    store = ledger.store("r", {"p": {"tp0": 2, "tp1": 1}, "q": {"tp1": 1}}, {"g": [1]})
    (failed,) = ledger.report(store.number, "tp0", {"p": 1}, "the disk is full")
    assert PageFailed("p", "rank tp0 wrote 1 of 2 objects: the disk is full") == failed
    why = "rank tp1 wrote 0 of 1 objects: the rank has ended"
    assert [PageFailed("q", why)] == ledger.report(store.number, "tp1", {}, "the rank has ended")
    assert [] == ledger.report(store.number, "tp1", {"p": 1})


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        (("r", {"p": {}}, {}), "pages"), (("r", {"p": {"tp0": 0}}, {}), "pages['p']"),
        (("r", {"p": {"tp0": True}}, {}), "pages['p']"), (("r", ["p"], {}), "pages"),
        (("r", {}, {"g": [-1]}), "blocks['g']"), (("r", {}, [1]), "blocks"),
        ((1, {}, {}), "request_id"),
    ],
)  # fmt: skip
def test_wrong_stores_are_refused_and_change_nothing(arguments: Any, field: str) -> None:
    ledger = StoreLedger()
    with pytest.raises(SpecError) as caught:
        ledger.store(*arguments)
    assert field == caught.value.field
    assert 0 == ledger.store("r", {"p": {"tp0": 1}}, {"g": [1]}).number


@pytest.mark.parametrize(
    ("arguments", "field"),
    [
        ((1, "tp0", {}), "number"), ((-1, "tp0", {}), "number"), ((0, "tp9", {}), "rank"),
        ((0, "tp0", {"p": 2}), "objects['p']"), ((0, "tp0", {"other": 1}), "objects['other']"),
        ((0, "tp0", {"p": -1}), "objects['p']"), ((0, "tp0", ["p"]), "objects"),
    ],
)  # fmt: skip
def test_wrong_reports_are_refused_and_change_nothing(arguments: Any, field: str) -> None:
    ledger = StoreLedger()
    ledger.store("r", {"p": {"tp0": 1}}, {"g": [1]})
    with pytest.raises(SpecError) as caught:
        ledger.report(*arguments)
    assert field == caught.value.field
    assert [PageStored("p")] == ledger.report(0, "tp0", {"p": 1})
