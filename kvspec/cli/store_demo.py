"""Implement `kvspec store demo`: store a prompt at TP 8, load it in other engines, break the store.

Invariant: each line is judged. A load is judged by the byte oracle, which knows no plan. The exit
status is 1 if a line is not as it must be.

How it works:
    The engine at TP 8 stores 15 pages of 64 tokens. Each reader looks the prompt up, loads it into
    memory full of other bytes, and every byte of the memory is compared. Then a file is damaged,
    writers are killed, and the pages of other weights are wanted.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import attrs
import numpy as np

from kvspec.descriptors.request import TransferRequest
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, StoreError, counted, nbytes
from kvspec.memory.allocation import allocate
from kvspec.ownership.parallel import ParallelConfig
from kvspec.specs.attention import FullAttentionSpec, SlidingWindowSpec
from kvspec.stored.file_objects import FileObjects, path_of
from kvspec.stored.names import ModelIdentity, PromptIdentity
from kvspec.stored.placement import StoredSpec
from kvspec.stored.store import LoadError, PageStore
from kvspec.testing import oracle

DEMO_MODEL = ModelIdentity(
    model="demo/model", revision="a1", weights="", quantization="", overrides=""
)
PROMPT = PromptIdentity.of_text()
PAGE_TOKENS, NUM_TOKENS, KV_HEADS = 64, 960, 4
DEMO_LAYERS = [f"layers.{number}" for number in range(4)]
# Writers to kill. The first one is killed after so many seconds, and each later by as much later.
KILLED_WRITERS, KILL_SECONDS = 20, 0.01


def engine(parallel: ParallelConfig, block_size: int = 16, layout: str = "NHD") -> EngineSpec:
    """Return an engine of the model: two layers of full attention and two with a window."""
    full = FullAttentionSpec(
        block_size=block_size, total_num_kv_heads=KV_HEADS, head_size=64, dtype="float16"
    )
    window = SlidingWindowSpec(
        block_size=block_size,
        total_num_kv_heads=KV_HEADS,
        head_size=64,
        dtype="float16",
        sliding_window=200,
    )
    groups = [
        KVCacheGroup(name="full", layers=DEMO_LAYERS[::2], spec=full),
        KVCacheGroup(name="window", layers=DEMO_LAYERS[1::2], spec=window),
    ]
    return EngineSpec(groups=groups, parallel=parallel, layout=layout)


WRITER = engine(ParallelConfig(tp_size=8))
READERS = {
    "TP 3": engine(ParallelConfig(tp_size=3)),
    "PP 2": engine(ParallelConfig(tp_size=2, pp_size=2)),
    "DCP 2": engine(ParallelConfig(tp_size=8, dcp_size=2)),
    "blocks of 48 tokens, heads outside": engine(ParallelConfig(tp_size=2), 48, "HND"),
}


class Demonstration:
    """The demonstration in one directory.

    Args:
        directory: An empty directory, or one that does not exist.

    Raises:
        SpecError: If the directory has contents.
    """

    def __init__(self, directory: Path) -> None:
        if directory.exists() and any(directory.iterdir()):
            raise SpecError("--directory", str(directory), "an empty or a new directory")
        self.objects = FileObjects(directory)
        placement = StoredSpec.of(WRITER, page_tokens=PAGE_TOKENS, head_groups=KV_HEADS)
        self.store = PageStore(placement, DEMO_MODEL, self.objects)
        self.names = self.store.names(range(NUM_TOKENS), PROMPT)

    def lines(self) -> Iterator[tuple[bool, str]]:
        """Yield for each step whether it was right, and a line."""
        yield self._save()
        for name, reader in READERS.items():
            yield self._load(name, reader)
        yield self._flip()
        yield self._save()
        yield self._load("TP 3", READERS["TP 3"])
        yield self._kill()
        yield self._other_weights()

    def _save(self) -> tuple[bool, str]:
        """Store the prompt from each rank of the writer."""
        began, written, size = time.perf_counter(), 0, 0
        tables, pool = _tables(WRITER, NUM_TOKENS)
        request = _request(tables, NUM_TOKENS)
        for rank in WRITER.parallel.ranks:
            cache, storage = allocate(WRITER, rank, pool)
            oracle.fill(WRITER, rank, storage, pool, request.producer_blocks, request)
            saved = self.store.rank_pages(cache).save(self.names, 0, len(self.names), tables)
            written, size = written + len(saved.written), size + saved.nbytes
        seconds = time.perf_counter() - began
        return (
            written > 0,
            f"TP 8 stores {counted(written, 'object')}, {nbytes(size)}, in {seconds:.1f} s",
        )

    def _load(self, name: str, reader: EngineSpec) -> tuple[bool, str]:
        """Load the prompt into each rank of *reader*, and judge every byte."""
        with self.store.lookup(self.names, reader) as hit:
            tokens = hit.num_tokens
            tables, pool = _tables(reader, tokens)
            request, faults, judged = _request(tables, tokens), list[str](), 0
            for rank in reader.parallel.ranks:
                cache, storage = allocate(reader, rank, pool)
                memory = reader, rank, storage
                oracle.spoil(*memory, pool, request.consumer_blocks, request)
                before = {group: flat.copy() for group, flat in storage.items()}
                self.store.rank_pages(cache).load(hit, hit.num_pages, tables)
                sides = reader, rank, before, storage
                faults += oracle.check(*sides, pool, request.consumer_blocks, request)
                judged += sum(flat.nbytes for flat in storage.values())
        line = f"{name} loads {tokens} tokens: {nbytes(judged)} judged, {len(faults)} wrong"
        return tokens == len(self.names) * PAGE_TOKENS and not faults, "\n".join([line, *faults])

    def _flip(self) -> tuple[bool, str]:
        """Change one bit of page 5, and load."""
        page, reader = 5, READERS["TP 3"]
        # The window does not reach this page, so its objects are not read.
        key = self.store.key(self.names[page], self.store.placement.objects[0])
        path = Path(self.objects.root).parent / path_of(key)
        content = bytearray(path.read_bytes())
        content[-100] ^= 1
        path.write_bytes(content)
        tables, pool = _tables(reader, NUM_TOKENS)
        with self.store.lookup(self.names, reader) as hit:
            try:
                for rank in reader.parallel.ranks:
                    cache, _ = allocate(reader, rank, pool)
                    self.store.rank_pages(cache).load(hit, hit.num_pages, tables)
            except LoadError as error:
                with self.store.lookup(self.names, reader) as again:
                    found = again.num_pages
                cause = error.__cause__
                named = isinstance(cause, StoreError) and cause.field == "checksum"
                why = f"a flipped bit in page {page} is found by its checksum"
                return named and found == page, f"{why}: {found} pages can be loaded now"
        return False, "a flipped bit was not found"

    def _kill(self) -> tuple[bool, str]:
        """Kill processes that store pages, and read all pages."""
        for number in range(KILLED_WRITERS):
            child = os.fork()
            if not child:
                try:
                    self._write_for_ever(number)
                finally:
                    os._exit(1)
            time.sleep(KILL_SECONDS * (1 + number))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        right = wrong = 0
        target = bytearray(self.store.placement.object_bytes(*self.store.placement.objects[0]))
        for one in self.objects.stored_objects():
            try:
                self.objects.read(one.key, memoryview(target))
                right += 1
            except StoreError:
                wrong += 1
        left = sum(kind == "temporary" for _, kind in self.objects.strays())
        line = f"{KILLED_WRITERS} killed writers: {counted(right, 'object')} right, {wrong} wrong"
        return right > 0 and not wrong, f"{line}, {counted(left, 'unfinished file')}"

    def _write_for_ever(self, number: int) -> None:
        tables, pool = _tables(WRITER, NUM_TOKENS)
        rank = next(iter(WRITER.parallel.ranks))
        cache, storage = allocate(WRITER, rank, pool)
        for flat in storage.values():
            flat[:] = np.random.default_rng(number).integers(256, size=flat.size, dtype=np.uint8)
        pages = self.store.rank_pages(cache)
        for prompt in count():
            tokens = [number, prompt, *range(NUM_TOKENS - 2)]
            names = self.store.names(tokens, PROMPT)
            pages.save(names, 0, len(names), tables)

    def _other_weights(self) -> tuple[bool, str]:
        """Look the prompt up for another revision of the weights."""
        other = PageStore(
            self.store.placement, attrs.evolve(DEMO_MODEL, revision="b2"), self.objects
        )
        names = other.names(range(NUM_TOKENS), PROMPT)
        with other.lookup(names, WRITER) as hit:
            pages = hit.num_pages
        return pages == 0, f"revision b2 finds {pages} pages: {'; '.join(other.other_spaces())}"


def _tables(engine: EngineSpec, tokens: int) -> tuple[dict[str, list[int]], dict[str, int]]:
    """Return a shuffled block table of each group, and the sizes of the pools."""
    tables: dict[str, list[int]] = {}
    pool: dict[str, int] = {}
    for number, group in enumerate(engine.groups):
        blocks = -(-tokens // engine.virtual_block(group))
        pool[group.name] = 2 * blocks
        drawn = np.random.default_rng(number).permutation(2 * blocks)
        tables[group.name] = drawn[:blocks].tolist()
    return tables, pool


def _request(tables: dict[str, list[int]], tokens: int) -> TransferRequest:
    return TransferRequest(
        request_id="demo", num_tokens=tokens, producer_blocks=tables, consumer_blocks=tables
    )
