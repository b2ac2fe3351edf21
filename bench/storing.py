"""STORED: objects in files, compared with `cp` and with vLLM's own files, and lookups in them."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle
from pathlib import Path
from statistics import median
from typing import Any

from timing import Options, Row, clock, interleaved, readable

import kvspec
from kvspec.errors import nbytes
from kvspec.stored import (
    FileObjects,
    Hit,
    ModelIdentity,
    ObjectContents,
    ObjectKey,
    PageStore,
    StoredSpec,
)
from kvspec.stored.objects import checksum

DIRECTORY = "KVSPEC_STORE_DIRECTORY"
VLLM_IO = "KVSPEC_VLLM_FS_IO"
INSTALLED = "lib/*/site-packages/vllm/v1/kv_offload/tiering/fs/io.py"
SPACE = "ab" * 32
GIB, KIB = 1 << 30, 1 << 10
# Aims: at most so much of the better of the others, and a lookup of 1,000 pages.
MOST, MOST_SECONDS, PAGES = 1.3, 5e-3, 1000


def stored(options: Options) -> Iterator[Row]:
    """Store and load bytes in files, and look up a prompt among many names."""
    yield from _moved(options)
    for names in (10_000,) if options.quick else (10_000, 100_000, 1_000_000):
        with tempfile.TemporaryDirectory(dir=os.environ.get(DIRECTORY)) as folder:
            objects = FileObjects(folder)
            for chunks in (1, 8):
                yield from _looked_up(options, objects, names, chunks)
            objects.close()


def _looked_up(options: Options, objects: FileObjects, count: int, chunks: int) -> Iterator[Row]:
    """Look up the first pages of *count* names in the index, which has no files."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=8, head_size=8, dtype="bfloat16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    placement = StoredSpec.of(engine, page_tokens=16, head_groups=chunks)
    model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    store = PageStore(placement, model, objects)
    pages = [hashlib.sha256(b"%d" % page).hexdigest() for page in range(count)]
    items = [f"full,{chunk}" for _, chunk in placement.objects]
    space = bytes.fromhex(store.space)
    rows = (
        (space + bytes.fromhex(page), item, 1 << 16, time.time_ns())
        for page in pages
        for item in items
    )
    objects._index.replace(space, rows)  # noqa: SLF001 - no million of files
    hits: list[Hit] = []
    starts = cycle(range(0, count, PAGES))  # Of prompts without a common page.

    def look_up() -> None:
        start = next(starts)
        hits.append(store.lookup(pages[start : start + PAGES], engine))

    find = clock(look_up)
    end = clock(lambda: hits.pop().close())
    ours, ended = interleaved(options.times(32), find, end)
    yield Row(
        budget="STORED",
        what=f"lookup of {PAGES:,} pages in {count:,}, chunks of a page: {chunks}; other: end it",
        ours=readable(ours),
        other=readable(ended),
        required=f"at most {readable(MOST_SECONDS)}",
        met=ours <= MOST_SECONDS,
    )


def _moved(options: Options) -> Iterator[Row]:
    total = GIB // 16 if options.quick else GIB
    memory = memoryview(bytearray(os.urandom(1 << 20)) * (total >> 20))
    for size in (64 * KIB, KIB * KIB):
        taken: dict[str, list[float]] = {}
        for _ in range(3 if options.quick else 5):
            with tempfile.TemporaryDirectory(dir=os.environ.get(DIRECTORY)) as folder:
                for name, seconds in _once(Path(folder), memory, size):
                    taken.setdefault(name, []).append(seconds)
        best = {name: median(times) for name, times in taken.items()}
        for verb in ("store", "load"):
            others = {name: best[name] for name in ("cp", f"vLLM {verb}") if name in best}
            other, seconds = min(others.items(), key=lambda pair: pair[1])
            shown = {**others, "bare": best[f"bare {verb}"]}
            for kind in (verb, f"{verb}, 2 threads"):
                ratio = best[kind] / seconds
                yield Row(
                    budget="STORED",
                    what=f"{kind} {nbytes(total)} in objects of {nbytes(size)}; other: {other}, "
                    f"of {', '.join(shown)}",
                    ours=f"{total / best[kind] / 1e9:.2f} GB/s",
                    other=", ".join(f"{total / s / 1e9:.2f}" for s in shown.values()) + " GB/s",
                    ratio=f"{ratio:.3g}",
                    required=f"at most {MOST} x",
                    met=ratio <= MOST,
                )


def _once(folder: Path, memory: memoryview, size: int) -> Iterator[tuple[str, float]]:
    """Store, load and copy the same bytes once. Yield the seconds of each."""
    pieces = [memory[at : at + size] for at in range(0, len(memory), size)]
    target = memoryview(bytearray(size * 2))
    contents = ObjectContents.of_bytes(size)
    names = [hashlib.sha256(b"%d" % number).hexdigest() for number in range(len(pieces))]
    keys = [ObjectKey(SPACE, name, "full", "tp0") for name in names]
    payloads = list(zip(keys, pieces, strict=True))
    for threads in (1, 2):
        objects = FileObjects(folder / str(threads))
        objects.threads = threads

        def read(part: int, objects: FileObjects = objects, step: int = threads) -> None:
            into = target[part * size : (part + 1) * size]
            for number in range(part, len(keys), step):
                objects.read(keys[number], into)

        suffix = "" if threads == 1 else ", 2 threads"
        yield f"store{suffix}", clock(lambda o=objects: o.write_all(payloads, contents))()
        yield f"load{suffix}", _in_threads(read, threads)
        objects.close()
    shutil.rmtree(folder / "2")
    copy = ["cp", "-r", str(folder / "1"), str(folder / "copy")]
    yield "cp", clock(lambda: subprocess.run(copy, check=True))()
    yield from _bare(folder / "bare", payloads, target[:size])
    if vllm := _vllm():
        paths = [str(folder / "vllm" / name[:3] / name[3:5] / f"{name}.bin") for name in names]
        offsets = list(range(0, len(memory), size))
        yield (
            "vLLM store",
            clock(
                lambda: vllm.batch_store_block(paths, memory, offsets, size, use_o_direct=False)
            )(),
        )

        def load() -> None:
            for path in paths:
                vllm.batch_load_block([path], target, [0], size, use_o_direct=False)

        yield "vLLM load", clock(load)()


def _bare(
    folder: Path, payloads: list[tuple[ObjectKey, memoryview]], target: memoryview
) -> Iterator[tuple[str, float]]:
    """Do only what each store of files must do: checksums, and calls of the system."""
    head = bytes(4096)
    for number in range(256):
        (folder / f"{number:02x}").mkdir(parents=True)
    paths = [f"{folder}/{key.page[:2]}/{key.page}" for key, _ in payloads]

    def store() -> None:
        for path, (_, payload) in zip(paths, payloads, strict=True):
            checksum(payload)
            descriptor = os.open(f"{folder}/new", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            os.writev(descriptor, [head, payload])
            os.close(descriptor)
            Path(f"{folder}/new").rename(path)

    def load() -> None:
        for path in paths:
            descriptor = os.open(path, os.O_RDONLY)
            os.preadv(descriptor, [target], len(head))
            os.close(descriptor)
            checksum(target)

    yield "bare store", clock(store)()
    yield "bare load", clock(load)()


def _in_threads(work: Callable[[int], None], threads: int) -> float:
    with ThreadPoolExecutor(threads) as pool:
        return clock(lambda: list(pool.map(work, range(threads))))()


def _vllm() -> Any:  # noqa: ANN401 - a module that need not be there
    installed = [*Path(__file__).parents[1].glob(f".venv-vllm/{INSTALLED}")]
    path = os.environ.get(VLLM_IO) or (str(installed[0]) if installed else "")
    if not path:
        return None
    found = importlib.util.spec_from_file_location("vllm_fs_io", path)
    if found is None or found.loader is None:
        return None
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
