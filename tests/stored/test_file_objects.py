"""Objects as files: what several processes, crashes, strangers and damage do to them."""

from __future__ import annotations

import json
import os
import random
import sqlite3
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from obstore.store import MemoryStore

from kvspec.errors import SpecError, StoreError
from kvspec.stored import file_objects
from kvspec.stored.bucket_objects import BucketObjects
from kvspec.stored.file_objects import ROOT, FileObjects
from kvspec.stored.header import HEADER_VERSION, decode, encode
from kvspec.stored.index import PageIndex
from kvspec.stored.objects import (
    MemoryObjects,
    ObjectContents,
    Objects,
    StoredTensor,
    checksum,
)
from tests.support.asked import CONTENTS, SIZE, SPACE, get, has, key, payload, pin, problem, put


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileObjects]:
    objects = FileObjects(tmp_path / "store")
    yield objects
    objects.close()


def file_of(objects: FileObjects, page: int) -> Path:
    return Path(objects._path(key(page)))


@pytest.mark.parametrize("kind", ["memory", "files", "bucket"])
def test_objects_are_written_once_and_read_as_written(kind: str, tmp_path: Path) -> None:
    objects: Objects = FileObjects(tmp_path)
    if kind != "files":
        objects = MemoryObjects() if kind == "memory" else BucketObjects(MemoryStore())
    put(objects, 1, 2)
    other = ObjectContents.of_bytes(SIZE)
    assert not objects.write(key(1), payload(9), other)
    assert get(objects, 1) == bytes(payload(1))
    assert has(objects, [key(1), key(3), key(1, "tp1"), key(2)]) == [True, False, False, True]
    assert problem(objects, 3) == ("absent", "object")
    assert {entry.key for entry in objects.stored_objects()} == {key(1), key(2)}
    assert [*objects.stored_objects("0" * 64)] == []
    objects.describe(SPACE, {"model": "org/m"})
    objects.describe(SPACE, {"model": "the first one stays"})
    assert objects.spaces() == {SPACE: {"model": "org/m"}}
    assert objects.remove([key(1), key(3)]) == 1
    assert has(objects, [key(1)]) == [False]
    small = bytearray(4)
    with pytest.raises(StoreError, match="bytes"):
        objects.read(key(2), memoryview(small))


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_pages_that_were_not_used_leave_first(kind: str, tmp_path: Path) -> None:
    size = SIZE + (4096 if kind == "files" else 0)
    limit = 4 * size + size // 2
    objects = MemoryObjects(limit) if kind == "memory" else FileObjects(tmp_path, limit=limit)
    put(objects, 1, 2, 3, 4)
    assert pin(objects, [key(1)], "reader", 60) == [True]
    put(objects, 5)
    assert has(objects, [key(page) for page in (1, 2, 3, 4, 5)]) == [True, False, True, True, True]
    objects.unpin("reader")
    put(objects, 6)
    assert has(objects, [key(page) for page in (1, 3, 4, 5, 6)]) == [True, False, True, True, True]
    pin(objects, [key(page) for page in (1, 4, 5, 6)], "all", 60)
    with pytest.raises(StoreError) as caught:
        put(objects, 7)
    assert (caught.value.problem, caught.value.field) == ("full", "limit")
    with pytest.raises(SpecError, match="duration"):
        pin(objects, [key(1)], "all", 1e9)


def test_names_of_groups_and_chunks_may_contain_any_character(store: FileObjects) -> None:
    strange = key(1, "pp0.tp1/..", "../group 0,é%2F\n")
    assert store.write(strange, payload(1), CONTENTS)
    assert has(store, [strange]) == [True]
    assert [entry.key for entry in store.stored_objects()] == [strange]
    for wrong in (
        strange._replace(space="../" + SPACE[3:]),
        strange._replace(page="A" * 64),
        strange._replace(group=""),
        strange._replace(chunk="\ud800"),
        strange._replace(group="g" * 200),
    ):
        with pytest.raises(SpecError, match="key"):
            store.write(wrong, payload(1), CONTENTS)


def test_the_safetensors_library_reads_an_object(store: FileObjects) -> None:
    safetensors = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed")
    contents = ObjectContents(
        [StoredTensor("l.0.k", "U16", (25, 60)), StoredTensor("l.0.v", "U16", (1500,))]
    )
    store.write(key(1), payload(1), contents)
    tensors = safetensors.load_file(file_of(store, 1))
    assert tensors["l.0.k"].shape == (25, 60)
    assert tensors["l.0.k"].tobytes() + tensors["l.0.v"].tobytes() == bytes(payload(1))


def test_the_checksum_is_the_one_of_the_specification() -> None:
    assert checksum(b"123456789") == "33119477ede5dcd5e9716427681d5860"


@pytest.mark.parametrize("bits", [1, 2, 3])
def test_the_checksum_shows_flipped_bits(bits: int) -> None:
    chance = random.Random(bits)
    data = bytearray(chance.randbytes(16_384))
    known = checksum(data)
    for _ in range(100):
        words = chance.sample(range(2048), bits)
        bit = chance.choice([63, 63, 62, 31, chance.randrange(64)])
        for word in words:
            data[word * 8 + bit // 8] ^= 1 << bit % 8
        assert checksum(data) != known
        for word in words:
            data[word * 8 + bit // 8] ^= 1 << bit % 8


def test_a_reader_that_knows_the_header_judges_as_a_new_one(store: FileObjects) -> None:
    put(store, 1, 2)
    path = file_of(store, 2)
    good = path.read_bytes()
    outcomes = set()
    for offset in range(8 + len(encode(key(1), CONTENTS, "").rstrip()) + 40):
        judged = []
        for known in (True, False):
            with closing(FileObjects(store.root + "/..")) as reader:
                if known:
                    get(reader, 1)
                path.write_bytes(good[:offset] + bytes([good[offset] ^ 4]) + good[offset + 1 :])
                try:
                    judged.append(get(reader, 2))
                except StoreError as error:
                    judged.append((error.problem, error.field))
                    Path(f"{path}.damaged").unlink(missing_ok=True)
        assert judged[0] == judged[1], offset
        outcomes.add(judged[0])
    assert len(outcomes) > 4
    assert bytes(payload(2)) in outcomes


def test_a_checksum_that_is_no_text_is_damage(store: FileObjects) -> None:
    put(store, 1)
    head = encode(key(1), CONTENTS, "\\ud800" * 32)
    file_of(store, 1).write_bytes(head + bytes(payload(1)))
    assert decode(head, len(head) + SIZE, "x").checksum == "\ud800" * 32
    assert problem(store, 1) == ("damaged", "checksum")


def changed(objects: FileObjects, page: int, offset: int, value: bytes) -> None:
    with file_of(objects, page).open("r+b") as file:
        file.seek(offset)
        file.write(value)


def test_damage_is_named_and_the_page_can_be_stored_again(store: FileObjects) -> None:
    put(store, 1, 2, 3, 4, 5, 6, 7)
    whole = file_of(store, 1).stat().st_size
    flipped = bytes([payload(1)[0] ^ 1])
    changed(store, 1, whole - SIZE, flipped)
    os.truncate(file_of(store, 2), whole - 1)
    os.truncate(file_of(store, 3), 100)
    os.truncate(file_of(store, 4), 0)
    changed(store, 5, whole, b"\0")
    changed(store, 6, 0, bytes(whole))
    changed(store, 7, 60, b"\xff")
    found = [problem(store, page) for page in (1, 2, 3, 4, 5, 6, 7)]
    assert found == [
        ("damaged", "checksum"),
        ("damaged", "file size"),
        ("damaged", "header"),
        ("damaged", "header"),
        ("damaged", "file size"),
        ("damaged", "header"),
        ("damaged", "header"),
    ]
    assert has(store, [key(page) for page in range(1, 8)]) == [False] * 7
    assert [kind for _, kind in store.strays()] == ["damaged"] * 7
    put(store, 1, 2, 3, 4, 5, 6, 7)
    assert get(store, 1) == bytes(payload(1))


def test_no_flipped_bit_is_read_as_right(store: FileObjects) -> None:
    put(store, 1)
    path = file_of(store, 1)
    good = path.read_bytes()
    used = [*range(700), *range(4000, 4100), len(good) - 1]
    for offset in used[:: 1 + len(used) // 300]:
        path.write_bytes(good[:offset] + bytes([good[offset] ^ 4]) + good[offset + 1 :])
        try:
            assert get(store, 1) == bytes(payload(1))  # the bit is in a fact, or a space
            assert 8 + len(encode(key(1), CONTENTS, "")) > offset
        except StoreError:
            Path(f"{path}.damaged").unlink(missing_ok=True)
        path.parent.mkdir(exist_ok=True)


def test_files_of_others_are_refused_and_stay(store: FileObjects) -> None:
    put(store, 1)
    foreign = file_of(store, 2)
    foreign.write_bytes(b"a letter to a friend, of some length")
    copy = file_of(store, 3)
    os.link(file_of(store, 1), copy)
    newer = file_of(store, 4)
    text = encode(key(4), CONTENTS, checksum(payload(4))).replace(
        f'"version": "{HEADER_VERSION}"'.encode(), b'"version": "9"'
    )
    newer.write_bytes(text + bytes(payload(4)))
    assert problem(store, 2) == ("foreign", "header")
    assert problem(store, 3) == ("foreign", "key")
    assert problem(store, 4) == ("version", "version")
    for page in (2, 3, 4):
        with pytest.raises(StoreError) as caught:  # It would count as stored.
            store.write(key(page), payload(page), CONTENTS)
        assert caught.value.problem == ("version" if page == 4 else "foreign")
        with pytest.raises(StoreError):
            store.remove([key(page)])
    store.free_bytes(1 << 40)
    assert [path.exists() for path in (foreign, copy, newer)] == [True] * 3
    assert foreign.read_bytes().startswith(b"a letter")


def test_files_of_another_version_are_neither_found_nor_changed(tmp_path: Path) -> None:
    """A page that is found and cannot be read would be asked for again with each prompt."""
    assert ROOT.endswith(f"-{HEADER_VERSION}")
    with closing(FileObjects(tmp_path)) as objects:
        put(objects, 1)
        name = Path(objects.root).name
    older = tmp_path / name.replace(HEADER_VERSION, "1")
    (tmp_path / name).rename(older)
    before = {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}
    with closing(FileObjects(tmp_path)) as objects:
        assert has(objects, [key(1)]) == [False]
        put(objects, 1)
        assert get(objects, 1) == bytes(payload(1))
    assert before == {path: path.read_bytes() for path in older.rglob("*") if path.is_file()}


@pytest.mark.parametrize("at", [0, 9, 30, 60, 200, 4096])
def test_an_object_that_cannot_be_read_is_not_found_again(at: int, store: FileObjects) -> None:
    """A changed byte of a header may look like the file of another program, which stays."""
    put(store, 1, 2)
    with file_of(store, 1).open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))
    assert problem(store, 1)[0] in ("damaged", "foreign", "version")
    assert has(store, [key(1), key(2)]) == [False, True]
    assert store.num_bytes() == SIZE + 4096


def test_links_pipes_and_open_permissions_are_refused(store: FileObjects, tmp_path: Path) -> None:
    put(store, 1, 2)
    secret = tmp_path / "secret"
    secret.write_bytes(file_of(store, 1).read_bytes())
    file_of(store, 1).unlink()
    file_of(store, 1).symlink_to(secret)
    os.mkfifo(file_of(store, 3))
    file_of(store, 2).chmod(0o666)
    file_of(store, 4).mkdir()
    assert problem(store, 1) == ("unsafe", "errno")
    assert problem(store, 2) == ("unsafe", "mode")
    assert problem(store, 3) == ("unsafe", "type")
    assert problem(store, 4) == ("unsafe", "type")
    for place in (1, 2, 3, 4):  # They would count as stored.
        with pytest.raises(StoreError, match="unsafe"):
            store.write(key(place), payload(place), CONTENTS)
    assert secret.exists()


def test_directories_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    FileObjects(tmp_path / "a").close()
    root = tmp_path / "a" / file_objects.ROOT
    assert stat.S_IMODE(root.stat().st_mode) == 0o700
    root.chmod(0o777)
    with pytest.raises(StoreError) as caught:
        FileObjects(tmp_path / "a")
    assert (caught.value.problem, caught.value.field) == ("unsafe", "mode")
    (tmp_path / "b").mkdir(mode=0o700)
    (tmp_path / "b" / file_objects.ROOT).symlink_to(tmp_path / "a")
    with pytest.raises(StoreError) as caught:
        FileObjects(tmp_path / "b")
    assert (caught.value.problem, caught.value.field) == ("unsafe", "type")
    root.chmod(0o700)
    user = os.geteuid()
    monkeypatch.setattr(os, "geteuid", lambda: user + 1)
    with pytest.raises(StoreError) as caught:
        FileObjects(tmp_path / "a")
    assert (caught.value.problem, caught.value.field) == ("unsafe", "owner")
    FileObjects(tmp_path / "a", owners=[user]).close()


def test_a_full_disk_is_known_before_a_byte_is_visible(
    store: FileObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(StoreError) as caught:
        put(store, 1)
    assert caught.value.problem == "full"
    assert has(store, [key(1)]) == [False]
    assert [*store.strays()] == []


@pytest.mark.parametrize("kind", ["memory", "files", "bucket"])
def test_objects_of_a_batch_are_written_once(kind: str, tmp_path: Path) -> None:
    objects: Objects = FileObjects(tmp_path)
    if kind != "files":
        objects = MemoryObjects() if kind == "memory" else BucketObjects(MemoryStore())
    put(objects, 3, 70)
    payloads = [(key(page), payload(page)) for page in range(100)]
    created = objects.write_all(payloads, CONTENTS)
    assert [page for page, new in enumerate(created) if not new] == [3, 70]
    assert has(objects, [key(page) for page in range(101)]) == [True] * 100 + [False]
    assert all(get(objects, page) == bytes(payload(page)) for page in range(100))
    assert objects.write_all([], CONTENTS) == []
    with pytest.raises(SpecError, match="payload"):
        objects.write_all([(key(101), payload(101)), (key(102), payload(102)[1:])], CONTENTS)


def test_a_batch_that_fails_notes_what_it_has_written(
    store: FileObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    link, left = os.link, [5]

    def full_after_some(*arguments: object, **keywords: object) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, "No space left on device")
        link(*arguments, **keywords)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", full_after_some)
    with pytest.raises(StoreError, match="full"):
        store.write_all([(key(page), payload(page)) for page in range(12)], CONTENTS)
    known = has(store, [key(page) for page in range(12)])
    assert sum(known) == 5
    assert store.num_bytes() == 5 * (SIZE + 4096)
    assert [*store.strays()] == []
    assert [problem(store, page) for page in range(12) if not known[page]] == [
        ("absent", "object")
    ] * 7


def test_a_batch_evicts_as_its_objects_one_by_one(tmp_path: Path) -> None:
    objects = FileObjects(tmp_path, limit=4 * (SIZE + 4096))
    created = objects.write_all([(key(page), payload(page)) for page in range(10)], CONTENTS)
    assert created == [True] * 10
    assert has(objects, [key(page) for page in range(10)]) == [False] * 6 + [True] * 4


def test_the_index_may_be_lost_or_corrupt(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1, 2)
    index = Path(store.root, "index-1")
    database = index / "pages.sqlite3"
    store.close()
    for path in index.iterdir():
        path.unlink()
    index.rmdir()
    assert has(store, [key(1), key(2), key(3)]) == [True, True, False]
    assert store.num_bytes() == 2 * (SIZE + 4096)
    store.close()
    database.write_bytes(b"not a database" * 1000)
    has(store, [key(1)])
    assert has(store, [key(1), key(2)]) == [True, True]
    with sqlite3.connect(database) as sql:
        sql.execute("DROP TABLE pages")
    sql.close()
    has(store, [key(1)])
    assert has(store, [key(1), key(2)]) == [True, True]
    assert len([*Path(store.root).glob("index-1.damaged-*")]) == 2
    store.close()


def test_a_locked_index_delays_and_loses_nothing(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    put(store, 1)
    store.close()
    store._index = PageIndex(store.root, 0o700, lock_seconds=0.01)
    with sqlite3.connect(
        Path(store.root, "index-1", "pages.sqlite3"), isolation_level=None
    ) as other:
        other.execute("BEGIN EXCLUSIVE")
        put(store, 2)
        assert pin(store, [key(1), key(3)], "reader", 60) == [True, False]
        assert get(store, 2) == bytes(payload(2))
        other.execute("ROLLBACK")
    other.close()
    assert has(store, [key(1), key(2)]) == [True, True]


def test_a_space_that_appears_while_the_directory_is_read_stays_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, writer = FileObjects(tmp_path), FileObjects(tmp_path)
    writer._index = PageIndex(writer.root, 0o700, lock_seconds=0.01)
    names = FileObjects._space_names

    def names_before_a_write(objects: FileObjects) -> list[str]:
        found = names(objects)
        if objects is reader and not found:
            put(writer, 1)
        return found

    monkeypatch.setattr(FileObjects, "_space_names", names_before_a_write)
    Path(reader.root, "index.stale").touch()
    has(reader, [key(1)])
    assert has(reader, [key(1)]) == [True]
    assert reader.num_bytes() == SIZE + 4096


def test_a_clock_that_is_set_back_changes_no_order_and_ends_pins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileObjects(tmp_path)
    now = time.time()
    put(store, 1)
    pin(store, [key(1)], "from the future", 3000)
    monkeypatch.setattr(time, "time", lambda: now - 10**6)
    monkeypatch.setattr(time, "time_ns", lambda: int((now - 10**6) * 1e9))
    put(store, 2, 3)
    pin(store, [key(3)], "reader", 60)
    assert store.free_bytes(1) == 1  # the pin ends, and its page counts as used now
    assert has(store, [key(1), key(2), key(3)]) == [True, False, True]
    assert store.free_bytes(1 << 40) == 1
    assert has(store, [key(1), key(2), key(3)]) == [False, False, True]


def test_files_of_killed_writers_leave_after_an_hour(tmp_path: Path) -> None:
    store = FileObjects(tmp_path)
    old, new, foreign = f"1-{'0' * 16}", f"2-{'0' * 16}", "letter"
    for name, age in ((old, 4000), (new, 0), (foreign, 4000)):
        path = Path(store.root, "tmp", name)
        path.write_bytes(b"half")
        os.utime(path, (time.time() - age,) * 2)
    store.close()
    FileObjects(tmp_path).close()
    assert {path.name for path in Path(store.root, "tmp").iterdir()} == {new, foreign}


def test_a_malformed_name_is_refused(store: FileObjects) -> None:
    for ask in (lambda wrong: has(store, [wrong]), lambda wrong: pin(store, [wrong], "me", 1.0)):
        with pytest.raises(SpecError) as caught:
            ask(key(1)._replace(page="zz"))
        assert caught.value.field == "pages"


def test_two_writers_of_one_page_leave_one_object(store: FileObjects) -> None:
    created: list[bool] = []
    barrier = threading.Barrier(4)

    def write() -> None:
        barrier.wait()
        created.extend(store.write(key(page), payload(page), CONTENTS) for page in range(20))

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(created) == 20
    assert store.num_bytes() == 20 * (SIZE + 4096)
    assert all(get(store, page) == bytes(payload(page)) for page in range(20))


def test_a_page_that_leaves_during_a_read_is_read_whole(store: FileObjects) -> None:
    put(store, 1)
    with store._opened(store._path(key(1)), key(1)) as (descriptor, _):
        assert store.free_bytes(1) == 1
        assert os.pread(descriptor, SIZE, 4096) == bytes(payload(1))
    assert problem(store, 1) == ("absent", "object")


def test_permissions_of_a_group_are_kept_despite_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with pytest.raises(SpecError, match="mode"):
            FileObjects(tmp_path, mode=0o777)
        store = FileObjects(tmp_path, mode=0o770)
        put(store, 1)
    finally:
        os.umask(before)
    assert stat.S_IMODE(file_of(store, 1).stat().st_mode) == 0o660
    assert stat.S_IMODE(file_of(store, 1).parent.stat().st_mode) == 0o770
    store.close()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (b'"shape": [6000]', b'"shape": [6001]'),
        (b'"shape": [6000]', b'"shape": [true]'),
        (b'"data_offsets": [0, 6000]', b'"data_offsets": [1, 6000]'),
        (b'"data_offsets": [0, 6000]', b'"data_offsets": [0, 6e03]'),
        (b'"model": "org/m"', b'"bytes": "org/m"'),
        (b'"dtype": "U8"', b'"dtype": "X8"'),
        (b'"bytes": "6000"', b'"bytes": "5999"'),
        (b'"page": "', b'"pag3": "'),
        (b'"payload": {', b'"payload": ['),
        (b'"model": "org/m"', b'"model": 0000000'),
    ],
)
def test_a_header_is_read_strictly(old: bytes, new: bytes) -> None:
    head = encode(key(1), CONTENTS, "00000000")
    assert decode(head, len(head) + SIZE, "x").metadata["model"] == "org/m"
    assert old in head
    with pytest.raises(StoreError) as caught:
        decode(head.replace(old, new), len(head) + SIZE, "x")
    assert caught.value.problem == "damaged"


def test_contents_must_be_possible() -> None:
    for tensors in ([], [("a", "U8", (1,))] * 2, [("a", "X", (1,))], [("a", "U8", (0,))]):
        with pytest.raises(SpecError, match="tensors"):
            ObjectContents(tensors)
    with pytest.raises(SpecError, match="facts"):
        encode(key(1), ObjectContents.of_bytes(4, {"checksum": ""}), "")
    many = ObjectContents([(f"{'l' * 90}.{n}", "U8", (1,)) for n in range(4000)])
    with pytest.raises(SpecError, match="contents"):
        encode(key(1), many, "")
    store = MemoryObjects()
    with pytest.raises(SpecError, match="payload"):
        store.write(key(1), payload(1)[1:], CONTENTS)
    assert json.loads(json.dumps(store.spaces())) == {}


def test_a_writer_waits_for_the_pins_of_a_lookup(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup pins all pages of its prompt for some milliseconds."""
    store = FileObjects(tmp_path, limit=5 * (SIZE + 4096) // 2)
    put(store, 1, 2)
    pin(store, [key(1), key(2)], "lookup", 60)
    pauses = list[float]()

    def sleep(seconds: float) -> None:
        pauses.append(seconds)
        store.unpin("lookup")

    monkeypatch.setattr(file_objects.time, "sleep", sleep)
    put(store, 3)
    assert 1 == len(pauses)
    assert [True, False, True] == has(store, [key(1), key(2), key(3)])
    pin(store, [key(1), key(3)], "load", 60)
    with pytest.raises(StoreError) as caught:
        put(store, 4)
    assert "full" == caught.value.problem
    assert sum(pauses[1:]) < 0.5


@pytest.mark.parametrize("kind", ["memory", "files"])
def test_an_object_above_the_limit_drives_no_page_out(kind: str, tmp_path: Path) -> None:
    limit = 3 * SIZE
    objects = MemoryObjects(limit) if kind == "memory" else FileObjects(tmp_path, limit=limit)
    put(objects, 1)
    with pytest.raises(StoreError) as caught:
        objects.write(key(3), memoryview(bytes(limit + 1)), ObjectContents.of_bytes(limit + 1))
    assert "full" == caught.value.problem
    assert [True] == has(objects, [key(1)])
