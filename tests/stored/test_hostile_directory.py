"""Odd names, odd times, and an index whose rows no longer have their types."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import kvspec
from kvspec.errors import SpecError, StoreError
from kvspec.stored import ModelIdentity, PageStore, StoredSpec
from kvspec.stored.file_objects import FileObjects
from kvspec.stored.objects import ObjectKey
from tests.support.asked import CONTENTS, get, has, key, payload, pin

BROKEN = (
    "UPDATE pages SET items = x'ff'",
    "UPDATE pages SET items = '/,/'",
    "UPDATE pages SET items = CAST(x'2fff2f' AS TEXT)",
    "UPDATE pages SET bytes = 'many'",
    "UPDATE pages SET page = CAST(page AS TEXT)",
    "UPDATE pages SET page = x'00' || page",
    "UPDATE pages SET used = 'abc'",
    "UPDATE pages SET used = 9223372036854775807",
    "INSERT INTO pages VALUES (x'00', '/full,tp0/', 5, 5)",
    "INSERT INTO pins VALUES ('x', 'abc', 5)",
    "INSERT INTO pins VALUES ('x', 9e99, 'text')",
    "INSERT INTO pins VALUES (NULL, 0, NULL)",
    "UPDATE total SET bytes = 'x'",
    "DELETE FROM total",
    "PRAGMA user_version = 7",
    "DROP TABLE pins",
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[FileObjects]:
    objects = FileObjects(tmp_path / "store", limit=46_000)
    for page in (1, 2):
        objects.write(key(page), payload(page), CONTENTS)
    yield objects
    objects.close()


def lose_index(store: FileObjects) -> None:
    shutil.rmtree(f"{store.root}/index-1")


@pytest.mark.parametrize("nanoseconds", [2**63 + 10**18, 2**63 - 1, -(10**18)])
def test_a_file_of_any_time_is_found_and_can_leave(store: FileObjects, nanoseconds: int) -> None:
    """A time after 2262 exceeds an integer of SQLite."""
    os.utime(store._path(key(1)), ns=(0, nanoseconds))
    if Path(store._path(key(1))).stat().st_mtime_ns != nanoseconds:
        pytest.skip("the file system has no such time")
    lose_index(store)
    assert has(store, [key(1), key(2)]) == [True, True]
    assert store.write(key(3), payload(3), CONTENTS)
    assert store.free_bytes(1 << 40) == 3


def test_a_file_name_that_is_not_text_is_foreign(store: FileObjects) -> None:
    folder = os.fsencode(Path(store._path(key(1))).parent)
    name = folder + b"/" + b"0" * 64 + b",\xff,tp0.safetensors"
    Path(os.fsdecode(name)).touch()
    lose_index(store)
    assert has(store, [key(1), key(2)]) == [True, True]
    assert [(os.fsencode(path), kind) for path, kind in store.strays()] == [(name, "foreign")]


@pytest.mark.parametrize("statement", BROKEN)
def test_an_index_with_broken_rows_is_made_again(store: FileObjects, statement: str) -> None:
    store.close()
    with sqlite3.connect(f"{store.root}/index-1/pages.sqlite3") as sql:
        sql.execute(statement)
    sql.close()
    assert len(pin(store, [key(1)], "reader", 60)) == 1
    store.unpin("reader")
    for page in range(3, 9):  # Pages have to leave.
        try:
            store.write(key(page), payload(page), CONTENTS)
        except StoreError as error:
            assert error.problem in ("failed", "full")  # noqa: PT017 - it may also succeed
        has(store, [key(page)])
    assert store.write(key(9), payload(9), CONTENTS)
    assert has(store, [key(9)]) == [True]
    assert get(store, 9) == bytes(payload(9))
    store.free_bytes(1 << 40)
    assert store.num_bytes() == 0
    # The files of a page whose row has no keys stay until the page is stored again.
    hidden = 2 if "'/,/'" in statement else 0
    assert len([*store.stored_objects()]) == hidden


def test_an_index_that_is_deleted_while_pages_leave_is_made_again(
    store: FileObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    remove = FileObjects._remove

    def remove_and_lose(objects: FileObjects, gone: ObjectKey) -> bool:
        if Path(objects.root, "index-1").exists():
            lose_index(objects)
        return remove(objects, gone)

    monkeypatch.setattr(FileObjects, "_remove", remove_and_lose)
    assert store.free_bytes(1 << 40) == 2
    assert has(store, [key(1), key(2)]) == [False, False]
    assert store.write(key(1), payload(1), CONTENTS)
    assert has(store, [key(1)]) == [True]


@pytest.mark.parametrize("gone", ["tmp", "5a" * 32, ""])
def test_folders_that_are_deleted_are_made_again(store: FileObjects, gone: str) -> None:
    shutil.rmtree(Path(store.root, gone))
    assert has(store, [key(3)]) == [False]
    assert store.write(key(3), payload(3), CONTENTS)
    assert get(store, 3) == bytes(payload(3))
    assert has(store, [key(3)]) == [True]


@pytest.mark.parametrize("text", ["[]", "3", "{", "[" * 100_000, "\udcff", '{"model": [1]}'])
def test_a_description_that_cannot_be_read_is_empty(store: FileObjects, text: str) -> None:
    path = Path(store.root, "5a" * 32, "space.json")
    path.write_text(text, errors="surrogateescape")
    assert list(store.spaces()) == ["5a" * 32]


def test_only_files_in_their_places_count_as_those_of_kvspec(store: FileObjects) -> None:
    """A command deletes damaged objects and old temporary files, so others must not seem such."""
    name, temporary = Path(store._path(key(1))).name, f"1-{'0' * 16}"
    strange = (f"x/{'5a' * 32}/00/{name}.damaged", f"tmp/x/{temporary}", f"x/tmp/{temporary}")
    for relative in strange:
        Path(store.root, relative).parent.mkdir(parents=True, exist_ok=True)
        Path(store.root, relative).touch()
    Path(store.root, "tmp", temporary).symlink_to("/")
    Path(f"{store._path(key(1))}.damaged").symlink_to("/")
    assert {kind for _, kind in store.strays()} == {"foreign"}
    assert len([*store.strays()]) == 5


def test_an_old_temporary_file_that_cannot_be_deleted_stays(
    store: FileObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = Path(store.root, "tmp", f"1-{'0' * 16}")
    path.touch()
    os.utime(path, (time.time() - 4000,) * 2)

    def refuse(*_: object) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(Path, "unlink", refuse)
    assert has(FileObjects(Path(store.root).parent), [key(1)]) == [True]


@pytest.mark.parametrize("model", ["[" * 100_000, "{", "[]", "\\ud800"])
def test_other_spaces_are_described_whatever_their_model_is(store: FileObjects, model: str) -> None:
    Path(store.root, "5a" * 32, "space.json").write_text(json.dumps({"model": model}))
    spec = kvspec.MLAAttentionSpec(block_size=2, head_size=4, dtype="uint8")
    group = kvspec.KVCacheGroup(name="g", layers=["l.0"], spec=spec)
    own = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    pages = PageStore(StoredSpec(groups=[group], page_tokens=4), own, store)
    (line,) = pages.other_spaces()
    assert line.startswith("pages of another space: ")


@pytest.mark.parametrize("kind", ["directory", "full directory", "file", "link", "pipe"])
def test_a_taken_name_does_not_keep_a_damaged_object_in_its_place(
    store: FileObjects, kind: str
) -> None:
    path = Path(store._path(key(1)))
    taken = Path(f"{path}.damaged")
    if kind.endswith("directory"):
        taken.mkdir()
        if kind.startswith("full"):
            (taken / "letter").touch()
    elif kind == "file":
        taken.write_text("a letter to a friend")
    elif kind == "link":
        taken.symlink_to("/nowhere")
    else:
        os.mkfifo(taken)
    before = taken.lstat()
    for _ in range(3):
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(StoreError) as caught:
            get(store, 1)
        assert "damaged" == caught.value.problem
        assert [False] == has(store, [key(1)])
        assert store.write(key(1), payload(1), CONTENTS)
        assert bytes(payload(1)) == get(store, 1)
    assert os.path.samestat(before, taken.lstat())
    named = [name for name, kind in store.strays() if kind == "damaged" and name != taken]
    assert 3 == len(named)
    removed = {*store.remove_strays()}
    assert {*map(str, named)} <= removed
    assert bytes(payload(1)) == get(store, 1)


def test_an_address_is_no_directory() -> None:
    with pytest.raises(SpecError) as caught:
        FileObjects("s3://user:SECRET@b")
    assert "directory" == caught.value.field
    assert "SECRET" not in str(caught.value)


def test_a_store_that_is_opened_for_reading_needs_a_directory(tmp_path: Path) -> None:
    for place in (tmp_path / "none", tmp_path):
        with pytest.raises(StoreError):
            FileObjects(place, read_only=True)
    assert [] == [*tmp_path.iterdir()]


def test_a_store_that_is_opened_for_reading_changes_nothing(store: FileObjects) -> None:
    Path(store._path(key(2))).write_bytes(Path(store._path(key(2))).read_bytes()[:-1])
    shutil.rmtree(Path(store.root, "index-1"))
    before = {path: path.lstat().st_mtime_ns for path in Path(store.root).rglob("*")}
    objects = FileObjects(Path(store.root).parent, limit=1, read_only=True)
    assert bytes(payload(1)) == get(objects, 1)
    assert [True, True, False] == pin(objects, [key(1), key(2), key(3)], "me", 5)
    with pytest.raises(StoreError):
        get(objects, 2)
    with pytest.raises(StoreError):
        get(objects, 3)
    objects.describe("0" * 64, {"model": "m"})
    objects.use(key(1).space, [key(1).page])
    objects.unpin("me")
    assert objects.num_bytes() > 0
    calls = (
        lambda: objects.write(key(3), payload(3), CONTENTS),
        lambda: objects.remove([key(1)]),
        lambda: objects.free_bytes(5),
        lambda: [*objects.remove_strays()],
    )
    for call in calls:
        with pytest.raises(SpecError) as caught:
            call()
        assert "read_only" == caught.value.field
    objects.close()
    assert before == {path: path.lstat().st_mtime_ns for path in Path(store.root).rglob("*")}


@pytest.mark.parametrize("kind", ["loop", "link", "shared"])
def test_a_folder_that_is_unsafe_hides_no_other_pages(
    store: FileObjects, kind: str, tmp_path: Path
) -> None:
    """A folder of pages is a link, or others may change it."""
    other = ObjectKey(key(1).space, "ff" * 32, "full", "tp0")
    store.write(other, payload(3), CONTENTS)
    folder = Path(store._path(key(1))).parent
    if kind == "shared":
        folder.chmod(0o777)
    else:
        folder.rename(tmp_path / "elsewhere")
        folder.symlink_to(folder if kind == "loop" else tmp_path / "elsewhere")
    reader = FileObjects(tmp_path / "store")
    for _ in range(2):
        with pytest.raises(StoreError, match="unsafe"):
            get(reader, 1)
        assert has(reader, [key(1), other]) == [False, True]
    for _ in range(2):
        lose_index(reader)
        reader = FileObjects(tmp_path / "store")
        assert has(reader, [key(1), key(2), other]) == [False, False, True]
        assert not reader._index.incomplete()
    if kind == "loop":
        with pytest.raises(StoreError, match="unsafe"):
            next(reader.stored_objects())
