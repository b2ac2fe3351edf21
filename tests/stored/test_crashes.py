"""Writers that are killed at every step, and processes that store and load the same pages."""

from __future__ import annotations

import os
import random
import resource
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from kvspec.errors import StoreError
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.objects import ObjectContents, ObjectKey
from tests.support.asked import has, pin

SPACE = "5a" * 32
SIZE = 20_000
CONTENTS = ObjectContents.of_bytes(SIZE)
CALLS = "open mkdir chmod lstat posix_fallocate writev link unlink close stat scandir fstat"


def key(page: int) -> ObjectKey:
    return ObjectKey(SPACE, f"{page % 3:02x}{page:062x}", "full", "tp0")


def payload(page: int) -> memoryview:
    return memoryview(page.to_bytes(4, "little") * (SIZE // 4))


def right(objects: FileObjects, page: int) -> bool:
    """Return whether the page is stored. Fail if it has other bytes."""
    target = bytearray(SIZE)
    try:
        objects.read(key(page), memoryview(target))
    except StoreError as error:
        if error.problem != "absent":
            raise
        return False
    assert target == payload(page), f"page {page} has wrong bytes"
    return True


def child(function: Callable[[], None]) -> int:
    """Run *function* in a forked process, which ends with status 1 if it raises."""
    process = os.fork()
    if process:
        return process
    status = 1
    try:
        function()
        status = 0
    except BaseException as error:  # noqa: BLE001 - a child must never run the tests of its parent
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(status)


@contextmanager
def killed_before(call: int) -> Iterator[list[int]]:
    """Let this process kill itself before its system call with the number *call*."""
    count = [0]

    def counting(real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*arguments: Any, **keywords: Any) -> Any:
            count[0] += 1
            if count[0] == call:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **keywords)

        return counted

    real = {name: getattr(os, name) for name in CALLS.split()}
    for name, function in real.items():
        setattr(os, name, counting(function))
    try:
        yield count
    finally:
        for name, function in real.items():
            setattr(os, name, function)


def test_a_writer_killed_at_any_step_leaves_no_wrong_page(tmp_path: Path) -> None:
    def write(place: Path, call: int) -> None:
        with killed_before(call):
            FileObjects(place).write(key(1), payload(1), CONTENTS)

    with killed_before(0) as count:
        FileObjects(tmp_path / "counted").write(key(1), payload(1), CONTENTS)
    assert count[0] > 20
    stored = 0
    for call in range(1, count[0] + 1):
        place = tmp_path / str(call)
        _, status = os.waitpid(child(lambda at=place, n=call: write(at, n)), 0)  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"call {call} of {count[0]} was not reached"
        objects = FileObjects(place)
        stored += right(objects, 1)
        assert {kind for _, kind in objects.strays()} <= {"temporary"}
        objects.write(key(1), payload(1), CONTENTS)
        assert right(objects, 1)
        assert has(objects, [key(1)]) == [True]
        objects.close()
    assert 0 < stored < count[0]


def test_a_writer_killed_in_a_batch_leaves_whole_pages(tmp_path: Path) -> None:
    pages = range(6)
    payloads = [(key(page), payload(page)) for page in pages]

    def write(place: Path, call: int) -> None:
        objects = FileObjects(place)
        objects.threads = 1
        with killed_before(call):
            objects.write_all(payloads, CONTENTS)

    counted = FileObjects(tmp_path / "counted")
    counted.threads = 1
    with killed_before(0) as count:
        counted.write_all(payloads, CONTENTS)
    numbers = set()
    for call in range(1, count[0], 3):
        place = tmp_path / str(call)
        _, status = os.waitpid(child(lambda at=place, n=call: write(at, n)), 0)  # type: ignore[misc]
        assert os.WIFSIGNALED(status), f"call {call} of {count[0]} was not reached"
        objects = FileObjects(place)
        stored = [right(objects, page) for page in pages]
        numbers.add(sum(stored))
        created = objects.write_all(payloads, CONTENTS)
        assert created == [not there for there in stored]
        assert all(right(objects, page) for page in pages)
        assert has(objects, [key(page) for page in pages]) == [True] * len(pages)
        objects.close()
    assert len(numbers) >= len(pages)


def killed_at_random_times(place: Path, times: int) -> None:
    chance = random.Random(times)
    seen = 0

    def write() -> None:
        objects = FileObjects(place, limit=40 * SIZE)
        for page in range(10**6):
            objects.write(key(page % 60), payload(page % 60), CONTENTS)

    for turn in range(10 * times):
        if turn >= times and seen:
            break  # On a busy machine, the first writers may be killed before they begin.
        process = child(write)
        time.sleep(chance.uniform(0.001, 0.06))
        os.kill(process, signal.SIGKILL)
        os.waitpid(process, 0)
        objects = FileObjects(place)
        seen += sum(right(objects, page) for page in range(60))
        assert {kind for _, kind in objects.strays()} <= {"temporary"}
        assert len([*objects.stored_objects()]) <= 40
        objects.close()
    assert seen


def test_writers_killed_at_random_times_leave_no_wrong_page(tmp_path: Path) -> None:
    killed_at_random_times(tmp_path, 6)


@pytest.mark.slow
def test_writers_killed_at_200_random_times_leave_no_wrong_page(tmp_path: Path) -> None:
    killed_at_random_times(tmp_path, 200)


def processes_that_share_pages(place: Path, processes: int, duration: float) -> None:
    pages = 80
    end = time.monotonic() + duration

    def work(number: int) -> None:
        chance = random.Random(number)
        objects = FileObjects(place, limit=50 * (SIZE + 4096))
        loaded = 0
        # On a busy machine, a short run may end before a process has loaded anything.
        while time.monotonic() < (end if loaded else end + 60):
            first = chance.randrange(pages)
            wanted = [page % pages for page in range(first, first + 8)]
            there = pin(objects, [key(page) for page in wanted], str(number), 60)
            for page, known in zip(wanted, there, strict=True):
                found = right(objects, page)
                # A page that was there when it was pinned stays.
                assert found or not known, f"page {page} left although it was pinned"
                loaded += found
                if not found:
                    try:
                        objects.write(key(page), payload(page), CONTENTS)
                    except StoreError as error:
                        if error.problem != "full":  # Others have pinned most pages.
                            raise
            objects.unpin(str(number))
        assert loaded

    children = [child(lambda number=number: work(number)) for number in range(processes)]  # type: ignore[misc]
    assert [os.waitpid(process, 0)[1] for process in children] == [0] * processes
    objects = FileObjects(place)
    left = [entry.key for entry in objects.stored_objects()]
    assert left
    assert has(objects, left) == [True] * len(left)
    assert all(right(objects, page) for page in range(pages) if key(page) in left)
    assert [*objects.strays()] == []


def test_processes_share_pages(tmp_path: Path) -> None:
    processes_that_share_pages(tmp_path, 4, 0.8)


@pytest.mark.slow
def test_eight_processes_share_pages_for_ten_minutes(tmp_path: Path) -> None:
    processes_that_share_pages(tmp_path, 8, float(os.environ.get("KVSPEC_SECONDS", "600")))


def test_a_file_that_may_not_grow_is_refused_by_name(tmp_path: Path) -> None:
    def write() -> None:
        objects = FileObjects(tmp_path)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        try:
            objects.write(key(1), payload(1), CONTENTS)
        except StoreError as error:
            os._exit(7 if error.problem == "full" and not has(objects, [key(1)])[0] else 8)

    _, status = os.waitpid(child(write), 0)
    assert os.waitstatus_to_exitcode(status) == 7
    assert [*FileObjects(tmp_path).strays()] == []
