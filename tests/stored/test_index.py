"""The index after a loss of power, a fork, a signal, and files that have changed their sizes."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from kvspec.errors import StoreError
from kvspec.stored import index
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.index import Row
from kvspec.stored.objects import ObjectContents
from tests.support.asked import CONTENTS, SIZE, SPACE, get, has, key, payload, put

FILE = SIZE + 4096


def database(root: str) -> Path:
    return Path(root, "index-1", "pages.sqlite3")


def ended(process: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


@contextmanager
def in_child() -> Iterator[None]:
    """Run the rest of a forked process. It ends within ten seconds."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.alarm(10)
    status = 1
    try:
        yield
        status = 0
    except BaseException as error:  # noqa: BLE001 - a child must never run the tests of its parent
        os.write(2, f"{error!r}\n".encode())
    finally:
        os._exit(status)


def test_an_index_that_lost_all_its_bytes_is_made_again(tmp_path: Path) -> None:
    """A loss of power leaves such a file: its name was on the disk before its bytes."""
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    store.close()
    os.truncate(database(store.root), 0)
    for _ in range(2):
        store = FileObjects(tmp_path)
        assert has(store, [key(1), key(2), key(3)]) == [True, True, False]
        assert store.num_bytes() == 2 * FILE
        store.close()


def test_an_index_that_loses_its_bytes_while_it_is_open_is_made_again(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    store.close()
    os.truncate(database(store.root), 0)
    assert has(store, [key(1), key(2), key(3)]) == [True, True, False]
    assert store.num_bytes() == 2 * FILE


def test_an_index_of_an_earlier_start_of_the_machine_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing waits until the index is on the disk, so a loss of power may leave an old one."""
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    store.close()
    old = tmp_path / "old"
    shutil.copytree(database(store.root).parent, old)
    put(store, 3)
    assert store.remove([key(1)]) == 1
    store.close()
    with closing(sqlite3.connect(old / "pages.sqlite3", isolation_level=None)) as sql:
        sql.execute("UPDATE total SET bytes = 7")
    shutil.rmtree(database(store.root).parent)
    shutil.copytree(old, database(store.root).parent)
    boot = tmp_path / "boot_id"
    boot.write_text("0d1f3a5c-0000-4000-8000-000000000000\n")
    monkeypatch.setattr(index, "_BOOT_ID", str(boot))
    assert has(store, [key(1), key(2), key(3)]) == [False, True, True]
    assert store.num_bytes() == 2 * FILE
    monkeypatch.setattr(FileObjects, "_rows", None)  # It is read once.
    assert FileObjects(tmp_path).num_bytes() == 2 * FILE


def test_an_index_whose_damage_is_no_text_is_made_again(tmp_path: Path) -> None:
    """SQLite names the damage by its bytes, which Python cannot decode."""
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    store.close()
    found = database(store.root).read_bytes()
    broken = found.replace(
        b"triggeraddedpagesCREATE TRIGGER", b"trigger\xdeddedpagesCREATE TRIGGEX"
    )
    assert broken != found
    database(store.root).write_bytes(broken)
    has(store, [key(1)])
    assert has(store, [key(1), key(2)]) == [True, True]
    put(store, 3)
    assert store.num_bytes() == 3 * FILE


@pytest.mark.parametrize("gone", ["-wal", "-shm", ""])
def test_an_index_whose_files_are_deleted_while_it_is_open_works_again(
    gone: str, tmp_path: Path
) -> None:
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    Path(f"{database(store.root)}{gone}").unlink()
    other = FileObjects(tmp_path)
    for page in (3, 4, 5):
        put(other, page)
        put(store, page + 10)
    Path(store.root, "index.stale").touch()  # Such an index may have lost pages.
    pages = [key(page) for page in (1, 2, 3, 4, 5, 13, 14, 15)]
    for objects in (store, other, FileObjects(tmp_path)):
        for _ in range(3):
            has(objects, pages)
        assert has(objects, pages) == [True] * len(pages)
        assert not objects._index.incomplete()
        assert objects.num_bytes() == len(pages) * FILE


def test_a_signal_while_the_index_is_locked_leaves_no_transaction(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    other = sqlite3.connect(database(store.root), isolation_level=None, check_same_thread=False)
    other.execute("BEGIN IMMEDIATE")
    release = threading.Timer(0.5, other.execute, ["ROLLBACK"])
    try:
        release.start()
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            store.write(key(2), payload(2), CONTENTS)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        release.join()
    other.execute("PRAGMA busy_timeout = 0")
    other.execute("BEGIN IMMEDIATE")  # Nobody holds the lock.
    other.execute("ROLLBACK")
    other.close()
    put(store, 3)
    assert has(FileObjects(tmp_path), [key(1), key(3)]) == [True, True]


def test_pages_of_a_forked_child_stay_listed_when_its_parent_closes(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1)
    written, written_end = os.pipe()
    closed, closed_end = os.pipe()
    process = os.fork()
    if not process:
        with in_child():
            put(store, 2)
            os.write(written_end, b".")
            os.read(closed, 1)
            put(store, 3)
    os.read(written, 1)
    store.close()
    # Another process is now the only one, as far as the locks of the files show.
    other = os.fork()
    if not other:
        with in_child():
            put(store, 4)
            store.close()
    assert ended(other) == 0
    os.write(closed_end, b".")
    assert ended(process) == 0
    for descriptor in (written, written_end, closed, closed_end):
        os.close(descriptor)
    assert has(store, [key(page) for page in range(1, 6)]) == [True] * 4 + [False]
    assert store.num_bytes() == 4 * FILE


def test_a_fork_while_another_thread_uses_the_index_copies_no_lock(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    begun = threading.Event()

    def is_gone() -> bool:
        begun.set()
        time.sleep(0.2)
        return True

    page = bytes.fromhex(SPACE + key(2).page)
    forget = (page, "full,tp0", is_gone, lambda items: len(items) - 1)
    thread = threading.Thread(target=store._index.discard, args=forget)
    thread.start()
    begun.wait()
    process = os.fork()
    if not process:
        with in_child():
            assert has(store, [key(1), key(2)]) == [True, False]
            put(store, 3)
    thread.join()
    assert ended(process) == 0
    assert has(store, [key(1), key(2), key(3)]) == [True, False, True]


def test_a_signal_while_a_fork_waits_for_the_index_copies_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exception does not stop a fork that waits: Python prints it, and forks."""
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    begun, go_on, printed = threading.Event(), threading.Event(), list[object]()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_type))

    def is_gone() -> bool:
        begun.set()
        go_on.wait(10)
        return True

    def interrupt(*_: object) -> None:
        threading.Timer(0.2, go_on.set).start()
        raise KeyboardInterrupt

    page = bytes.fromhex(SPACE + key(2).page)
    forget = (page, "full,tp0", is_gone, lambda items: len(items) - 1)
    thread = threading.Thread(target=store._index.discard, args=forget)
    thread.start()
    begun.wait()
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        process = os.fork()
        if not process:
            with in_child():
                assert has(store, [key(1), key(2)]) == [True, False]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    thread.join()
    assert ended(process) == 0
    assert printed == [KeyboardInterrupt]
    assert has(store, [key(1), key(2)]) == [True, False]


def test_a_fork_while_other_threads_open_indexes_closes_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    printed = list[object]()
    monkeypatch.setattr(sys, "unraisablehook", lambda found: printed.append(found.exc_value))
    stop = threading.Event()

    def open_some() -> None:
        while not stop.is_set():
            some = [index.PageIndex(str(tmp_path), 0o700) for _ in range(100)]
            some.clear()

    threads = [threading.Thread(target=open_some) for _ in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for _ in range(100):
            process = os.fork()
            if not process:
                os._exit(0)
            assert ended(process) == 0
    finally:
        stop.set()
        sys.setswitchinterval(interval)
        for thread in threads:
            thread.join()
    assert printed == []


def test_the_group_can_use_the_index_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        store = FileObjects(tmp_path / "store", mode=0o770)
        put(store, 1)
        (mark := Path(store.root, "index.stale")).unlink(missing_ok=True)
        store._index._mark()
        found = [mark, database(store.root).parent, *database(store.root).parent.iterdir()]
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in found}
    finally:
        os.umask(before)
    assert len(modes) == 5
    assert modes.pop("index-1") == 0o770
    assert {*modes.values()} == {0o660}


@pytest.mark.skipif(os.geteuid() != 0, reason="it needs a second user")
def test_two_users_share_an_index() -> None:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        place, owners = Path(folder, "store"), (os.geteuid(), 4321)
        store = FileObjects(place, mode=0o770, owners=owners, limit=1 << 20)
        put(store, 1)
        process = os.fork()
        if not process:
            with in_child():
                os.setgroups([])
                os.setuid(4321)
                other = FileObjects(place, mode=0o770, owners=owners, limit=1 << 20)
                put(other, 2)
                assert not other._index.incomplete()
                assert has(other, [key(1), key(2)]) == [True, True]
        assert ended(process) == 0
        assert has(store, [key(1), key(2)]) == [True, True]
        put(store, 3)
        assert not store._index.incomplete()
        assert store.num_bytes() == 3 * FILE
        store.close()


@pytest.mark.parametrize("size", [None, 0, FILE - 1, 3 * FILE])
def test_a_file_that_changed_its_size_is_not_counted_twice(
    size: int | None, tmp_path: Path
) -> None:
    """Delete or damage one of the two objects of a page by hand, and write it again."""
    store = FileObjects(tmp_path)
    for chunk in ("tp0", "tp1"):
        assert store.write(key(1, chunk), payload(1), CONTENTS)
    for _ in range(3):
        if size is None:
            Path(store._path(key(1))).unlink()
        else:
            os.truncate(store._path(key(1)), size)
        with pytest.raises(StoreError):
            get(store, 1)
        assert has(store, [key(1, "tp0"), key(1, "tp1")]) == [False, True]
        assert store.num_bytes() == FILE
        put(store, 1)
        assert store.num_bytes() == 2 * FILE
    assert get(store, 1) == bytes(payload(1))


@pytest.mark.parametrize("limit", [10_000, 100_000, 1_000_000])
def test_a_batch_of_small_objects_does_not_exceed_the_limit(limit: int, tmp_path: Path) -> None:
    """Most bytes of these files are those of their headers."""
    store = FileObjects(tmp_path, limit=limit)
    contents = ObjectContents.of_bytes(16)
    for first in range(0, 512, 128):
        payloads = [(key(page), memoryview(b"x" * 16)) for page in range(first, first + 128)]
        assert store.write_all(payloads, contents) == [True] * 128
    assert limit // 2 <= store.num_bytes() <= limit


def test_pins_that_nobody_ends_do_not_stay(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    pages = [key(page).page for page in range(500)]
    store.pin(SPACE, pages, "reader", 60)
    for owner in range(300):
        store.pin(SPACE, pages, f"killed {owner}", 0.001)
    time.sleep(0.01)
    store.pin(SPACE, pages, "other", 60)
    with closing(sqlite3.connect(database(store.root))) as sql:
        owners = [owner for (owner,) in sql.execute("SELECT owner FROM pins")]
    assert {"reader", "other"} < {*owners}
    assert len(owners) < 70


def test_pins_of_killed_processes_do_not_stay_without_a_limit(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1)
    pages = [key(page).page for page in range(500)]
    for owner in range(300):
        store.pin(SPACE, pages, f"killed {owner}", 0.001)
    store.pin(SPACE, pages, "reader", 60)
    time.sleep(0.01)
    store.pin(SPACE, pages, "other", 60)
    store.unpin("other")
    with closing(sqlite3.connect(database(store.root))) as sql:
        owners = [owner for (owner,) in sql.execute("SELECT owner FROM pins")]
    assert "reader" in owners
    assert len(owners) < 70


@pytest.mark.parametrize("opened", [True, False])
def test_only_the_first_call_waits_long_for_a_process_that_is_stopped(
    opened: bool, tmp_path: Path
) -> None:
    """A scheduler waits for each lookup, which changes the index several times."""
    store = FileObjects(tmp_path)
    put(store, 1)
    store._index = index.PageIndex(store.root, 0o700, lock_seconds=2.0)
    with closing(sqlite3.connect(database(store.root), isolation_level=None)) as other:
        for _ in range(2):
            other.execute("BEGIN IMMEDIATE")
            begin = time.monotonic()
            store.pin(SPACE, [key(1).page], "reader", 60)
            assert time.monotonic() - begin > 1.5
            for _ in range(6):
                if not opened:
                    store.close()
                store.pin(SPACE, [key(1).page], "reader", 60)
                assert has(store, [key(1)]) == [True]
            assert time.monotonic() - begin < 10
            other.execute("ROLLBACK")
            store.pin(SPACE, [key(1).page], "reader", 60)


def test_a_lookup_does_not_wait_until_a_large_directory_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    rows, go_on = FileObjects._rows, threading.Event()

    def slow_rows(objects: FileObjects, space: str, digits: int) -> Iterator[Row]:
        if digits:
            go_on.wait(30)
        return rows(objects, space, digits)

    monkeypatch.setattr(FileObjects, "_rows", slow_rows)
    Path(store.root, "index.stale").touch()
    begin = time.monotonic()
    assert has(store, [key(1), key(2)]) == [True, True]
    process = os.fork()
    if not process:
        with in_child():
            time.sleep(1)
    assert time.monotonic() - begin < 20
    assert store._index.incomplete()
    go_on.set()
    while store._index.incomplete():
        assert time.monotonic() - begin < 60
        time.sleep(0.01)
    Path(store.root, "index.stale").touch()  # The child does not keep others from reading it.
    assert has(store, [key(1), key(2)]) == [True, True]
    assert not store._index.incomplete()
    assert ended(process) == 0


def test_processes_that_make_room_together_do_not_delete_each_for_itself(tmp_path: Path) -> None:
    """After a limit was lowered, each of some processes finds the same bytes to delete."""
    contents, total = ObjectContents.of_bytes(16), 1000
    store = FileObjects(tmp_path)
    payloads = [(key(page), memoryview(b"x" * 16)) for page in range(total)]
    assert all(store.write_all(payloads, contents))
    limit = store.num_bytes() * 7 // 10
    waiting, begin = os.pipe()
    children = []
    for child in range(4):
        children.append(os.fork())
        if not children[-1]:
            with in_child():
                other = FileObjects(tmp_path, limit=limit)
                os.close(begin)
                os.read(waiting, 1)
                assert other.write(key(total + child), memoryview(b"x" * 16), contents)
    for descriptor in (begin, waiting):
        os.close(descriptor)
    assert [ended(child) for child in children] == [0] * 4
    assert 0.9 * limit < store.num_bytes() <= limit


def test_an_index_that_misses_a_page_at_the_end_of_a_refresh_stays_incomplete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that could not lock the index marks it just before a reader deletes the mark."""
    store = FileObjects(tmp_path)
    Path(store.root, "index.stale").touch()
    unlink, late = Path.unlink, [1]

    def put_and_unlink(path: Path, *, missing_ok: bool = False) -> None:
        if path.name.startswith("index.") and late:
            writer = FileObjects(tmp_path, read_only=True)
            writer._read_only, writer._index = (
                False,
                index.PageIndex(writer.root, 0o700, lock_seconds=0),
            )
            with closing(sqlite3.connect(database(store.root), isolation_level=None)) as other:
                other.execute("BEGIN IMMEDIATE")
                put(writer, late.pop())
                other.execute("ROLLBACK")
        unlink(path, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", put_and_unlink)
    for _ in range(2):
        has(store, [key(1)])
    assert not late
    assert has(store, [key(1)]) == [True]
    assert store.num_bytes() == FILE


def test_an_index_that_two_threads_make_keeps_its_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that closes any descriptor of a file loses all its locks on the file."""
    store = FileObjects(tmp_path)
    store.close()
    shutil.rmtree(database(store.root).parent)
    others, close = list[FileObjects](), os.close

    def open_and_close(descriptor: int) -> None:
        if "pages.sqlite3" in str(Path(f"/proc/self/fd/{descriptor}").readlink()) and not others:
            others.append(store)
            others[0] = FileObjects(tmp_path)
            put(others[0], 1)
        close(descriptor)

    monkeypatch.setattr(os, "close", open_and_close)
    store._index.incomplete()
    monkeypatch.undo()
    store.close()
    # To a process that closes the index it would be the only one, so it would delete the log.
    program = (
        "import sys; from kvspec.stored import FileObjects; from tests.support.asked import put;"
        "store = FileObjects(sys.argv[1]); put(store, 2); store.close()"
    )
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True)  # noqa: S603
    put(others[0], 3)
    assert len([*database(store.root).parent.iterdir()]) == 3
    reader = FileObjects(tmp_path)
    assert has(reader, [key(1), key(2), key(3)]) == [True] * 3


def test_a_child_does_not_keep_the_lock_of_a_parent_that_was_killed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileObjects(tmp_path)
    put(store, 1)
    forked, end = os.pipe()
    process = os.fork()
    if not process:
        with in_child():
            rows = FileObjects._rows

            def wait(objects: FileObjects, space: str, digits: int) -> Iterator[Row]:
                if digits:
                    threading.Event().wait()
                return rows(objects, space, digits)

            monkeypatch.setattr(FileObjects, "_rows", wait)
            Path(store.root, "index.stale").touch()
            threading.Thread(target=store._refresh, daemon=True).start()
            while not Path(store.root, "index.reading").exists():
                time.sleep(0.01)
            child = os.fork()
            if not child:
                with in_child():
                    time.sleep(6)
            os.write(end, str(child).encode())
            os.kill(os.getpid(), signal.SIGKILL)
    assert ended(process) == -signal.SIGKILL
    child = int(os.read(forked, 20))
    for descriptor in (forked, end):
        os.close(descriptor)
    assert store._index.incomplete()
    assert has(store, [key(1)]) == [True]
    assert not store._index.incomplete()
    os.kill(child, signal.SIGKILL)
