"""A bucket that answers late, wrongly or not at all, and a server that is not what it seems."""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from obstore.store import HTTPStore, S3Store

import kvspec
from kvspec.adapters.vllm.store_settings import opened
from kvspec.errors import KVSpecError, SpecError, StoreError
from kvspec.stored import (
    BucketObjects,
    ModelIdentity,
    ObjectContents,
    PageStore,
    PromptIdentity,
    StoredSpec,
    bucket_objects,
)
from kvspec.stored import store as store_module
from kvspec.stored.bucket_objects import CREATED_ONCE
from kvspec.stored.file_objects import ROOT, path_of
from tests.support.asked import CONTENTS, SIZE, SPACE, get, has, key, payload, problem, put
from tests.support.s3_server import Answer, Request, S3Server, running

LOGIN = {"AWS_ACCESS_KEY_ID": "a", "AWS_SECRET_ACCESS_KEY": "b", "AWS_REGION": "r"}


@pytest.fixture(scope="module")
def shared_server() -> Iterator[S3Server]:
    with running() as server:
        yield server


@pytest.fixture
def server(shared_server: S3Server, monkeypatch: pytest.MonkeyPatch) -> S3Server:
    shared_server.reset()
    settings = {"AWS_ENDPOINT_URL": shared_server.url, "AWS_ALLOW_HTTP": "true"}
    for name, value in {**LOGIN, **settings}.items():
        monkeypatch.setenv(name, value)
    return shared_server


@pytest.fixture
def objects(server: S3Server) -> BucketObjects:
    return BucketObjects.of_url("s3://b")


def calls(objects: BucketObjects) -> dict[str, Callable[[], object]]:
    return {
        "write": lambda: objects.write(key(9), payload(9), CONTENTS),
        "read": lambda: get(objects, 1),
        "has": lambda: has(objects, [key(1)]),
        "remove": lambda: objects.remove([key(1)]),
        "stored_objects": lambda: [*objects.stored_objects()],
        "describe": lambda: objects.describe("0" * 64, {"model": "m"}),
        "spaces": objects.spaces,
    }


def test_a_server_that_ignores_conditions_is_refused_before_it_overwrites(
    server: S3Server, objects: BucketObjects
) -> None:
    server.conditional = False
    server.objects[path_of(key(1))] = b"a letter to a friend"
    for _ in range(2):
        with pytest.raises(StoreError) as caught:
            put(objects, 1)
        assert ("failed", CREATED_ONCE) == (caught.value.problem, caught.value.place)
    with pytest.raises(StoreError):
        objects.describe(SPACE, {})
    assert server.objects.keys() == {path_of(key(1)), CREATED_ONCE}
    assert server.objects[path_of(key(1))] == b"a letter to a friend"


def test_a_process_asks_once_whether_objects_are_created_once(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1, 2)
    objects.describe(SPACE, {})
    writes = [request.key for request in server.requests if request.method == "PUT"]
    assert writes.count(CREATED_ONCE) == 2
    assert len(writes) == 5
    put(BucketObjects.of_url("s3://b"), 3)
    writes = [request.key for request in server.requests if request.method == "PUT"]
    assert writes.count(CREATED_ONCE) == 3
    assert [*objects.spaces()] == [SPACE]


@pytest.mark.parametrize("status", [304, 409, 412])
def test_a_name_that_is_taken_by_no_object_is_not_stored(
    server: S3Server, objects: BucketObjects, status: int
) -> None:
    """S3 answers 409 if somebody deletes the object at this moment."""
    put(objects, 1)
    server.before = lambda request: Answer(status) if request.method == "PUT" else None
    with pytest.raises(StoreError) as caught:
        put(objects, 2)
    assert "failed" == caught.value.problem
    assert not objects.write(key(1), payload(1), CONTENTS)


@pytest.mark.parametrize("status", [204, 301, 307, 304, 400, 403, 409, 412, 429, 500, 501, 503])
def test_each_answer_that_is_none_is_an_error_with_words(
    server: S3Server, objects: BucketObjects, status: int
) -> None:
    put(objects, 1)
    quoted = "<Token>SECRET</Token>"
    body = f"<?xml?>\n<Error><Code>Reason</Code><Message>In words</Message>{quoted}</Error>"
    server.before = lambda _: Answer(status, b"" if status == 204 else body.encode())
    for name, call in calls(objects).items():
        if (status, name) == (204, "has"):  # A success without a text.
            continue
        with pytest.raises(StoreError) as caught:
            call()
        assert caught.value.problem in {"failed", "damaged"}, name
        # An older obstore leaves out the text of what it has tried again.
        if 400 <= status < 429 and name in {"read", "spaces"}:
            assert "Reason: In words" in str(caught.value), name
        assert "SECRET" not in "".join(traceback.format_exception(caught.value)), name


def test_bytes_that_changed_on_their_way_are_read_again(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1)
    broken = [0]

    def flip(request: Request, answer: Answer) -> Answer:
        if request.method == "GET" and broken[0] < 1:
            broken[0] += 1
            return answer._replace(body=answer.body[:-1] + b"\xff")
        return answer

    server.after = flip
    assert bytes(payload(1)) == get(objects, 1)
    assert 1 == broken[0]


@pytest.mark.parametrize("kept", [3000, 9000, 0])
def test_an_object_that_only_a_proxy_shortens_stays(
    server: S3Server, objects: BucketObjects, kept: int
) -> None:
    put(objects, 1)
    stored = dict(server.objects)
    server.after = lambda request, answer: (
        answer._replace(body=answer.body[:kept]) if request.method == "GET" else answer
    )
    with pytest.raises(StoreError):
        get(objects, 1)
    assert server.objects == stored
    server.after = lambda _, answer: answer
    assert bytes(payload(1)) == get(objects, 1)


@pytest.mark.parametrize("kept", [0, 100, 5000])
def test_a_connection_that_drops_within_an_object_is_an_error(
    server: S3Server, objects: BucketObjects, kept: int
) -> None:
    put(objects, 1)
    server.after = lambda request, answer: (
        answer._replace(body=answer.body[:kept], length=len(answer.body))
        if request.method == "GET"
        else answer
    )
    assert ("failed", "bucket") == problem(objects, 1)
    assert path_of(key(1)) in server.objects


def test_a_damaged_object_that_was_replaced_meanwhile_stays(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1)
    right, path = server.objects[path_of(key(1))], path_of(key(1))
    server.objects[path] = right[:-1] + b"\xff"

    def replace(request: Request) -> None:
        if request.method == "HEAD":
            server.objects[path] = right

    server.before = replace
    assert ("damaged", "checksum") == problem(objects, 1)
    assert right == server.objects[path]
    assert bytes(payload(1)) == get(objects, 1)


def test_a_name_for_a_damaged_object_that_is_taken_is_not_overwritten(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1)
    path = path_of(key(1))
    server.objects[f"{path}.damaged"] = b"a letter to a friend"
    server.objects[path] = wrong = server.objects[path][:-1] + b"\xff"
    assert ("damaged", "checksum") == problem(objects, 1)
    assert [False] == has(objects, [key(1)])
    assert b"a letter to a friend" == server.objects[f"{path}.damaged"]
    (other,) = [name for name in server.objects if name.endswith(".damaged")][1:]
    assert wrong == server.objects[other]
    put(objects, 1)


def test_a_bucket_that_forbids_deletion_gets_one_copy_of_a_damaged_object(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1)
    server.objects[path_of(key(1))] = server.objects[path_of(key(1))][:-1] + b"\xff"
    server.deletes = False
    for _ in range(4):
        assert ("damaged", "checksum") == problem(objects, 1)
    assert len(server.objects) <= 4
    put(objects, 2)
    with pytest.raises(StoreError) as caught:
        objects.remove([key(2)])
    assert "failed" == caught.value.problem
    assert [True] == has(objects, [key(2)])


def test_an_object_with_far_too_many_bytes_is_not_read(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1)
    other = BucketObjects.of_url("s3://b/other")
    size = 3 << 20
    other.write(key(1), memoryview(bytes(size)), ObjectContents.of_bytes(size))
    big = server.objects[f"other/{path_of(key(1))}"]
    server.objects[path_of(key(1))] = big
    assert ("foreign", "bytes") == problem(objects, 1)
    ranges = [
        request.headers.get("range") for request in server.requests if request.method == "GET"
    ]
    assert "bytes=0-1048575" == ranges[-1]
    server.objects[path_of(key(1))] = b"\xff" * size
    assert ("foreign", "header") == problem(objects, 1)
    server.objects[f"{ROOT}/{SPACE}/space.json"] = b" " * size + b"{}"
    assert {SPACE: {}} == objects.spaces()


def test_a_name_in_a_folder_too_many_is_no_object(server: S3Server, objects: BucketObjects) -> None:
    put(objects, 1)
    for folder in ("deep", "0" * 64):
        inside = path_of(key(2)).removeprefix(f"{ROOT}/")
        server.objects[f"{ROOT}/{folder}/{inside}"] = b"x"
    server.objects[f"{ROOT}0/{path_of(key(2)).removeprefix(f'{ROOT}/')}"] = b"x"
    assert [key(1)] == [one.key for one in objects.stored_objects()]
    assert [] == [*objects.stored_objects("0" * 64)]


def test_a_listing_of_many_pages_is_complete(server: S3Server, objects: BucketObjects) -> None:
    put(objects, 0)
    content = server.objects[path_of(key(0))]
    server.objects |= {path_of(key(page)): content for page in range(2500)}
    assert {key(page) for page in range(2500)} == {one.key for one in objects.stored_objects()}


def test_folders_that_begin_alike_are_apart(server: S3Server) -> None:
    places = ["s3://b/a", "s3://b/ab", "s3://b/a/b", "s3://b", "s3://b/%61 c%2Bd"]
    stores = [BucketObjects.of_url(place) for place in places]
    for page, objects in enumerate(stores):
        put(objects, page)
    for page, objects in enumerate(stores):
        assert [key(page)] == [one.key for one in objects.stored_objects()]
        assert bytes(payload(page)) == get(objects, page)
    assert [True] == has(BucketObjects.of_url("s3://b/a/"), [key(0)])


@pytest.mark.parametrize(
    "url",
    [
        "s3://user:SECRET@b/folder",
        "s3://SECRET@b",
        "s3://b/folder?token=SECRET",
        "s3://b/#SECRET",
        "s3://b/SECRET\nfolder",
        "s3://b/a/../SECRET",
        "s3://b/./SECRET",
        "file:///SECRET",
    ],
)
def test_an_address_of_which_obstore_ignores_a_part_is_refused(url: str) -> None:
    with pytest.raises(SpecError) as caught:
        BucketObjects.of_url(url)
    assert "url" == caught.value.field
    assert "SECRET" not in str(caught.value)


def test_an_address_is_no_store() -> None:
    with pytest.raises(SpecError) as caught:
        BucketObjects("s3://user:SECRET@b")  # type: ignore[arg-type]
    assert "store" == caught.value.field
    assert "SECRET" not in str(caught.value)


def test_a_missing_library_is_an_error_with_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "obstore", None)
    monkeypatch.setitem(sys.modules, "obstore.store", None)
    for call in (BucketObjects.of_url, lambda url: opened(url, None)):
        with pytest.raises(SpecError, match=r"pip install 'kvspec\[bucket\]'"):
            call("s3://b")


def silent(request: Request) -> None:
    if request.method == "HEAD":
        time.sleep(1.5)


def test_a_lookup_of_many_pages_ends_soon(
    server: S3Server, objects: BucketObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scheduler of an engine waits for it, and each request may take thirty seconds."""
    monkeypatch.setattr(bucket_objects, "LOOKUP_SECONDS", 0.3)
    server.before = silent
    pages, began = [key(page).page for page in range(200)], time.monotonic()
    with pytest.raises(StoreError) as caught:
        objects.has(SPACE, pages, [("full", "tp0")])
    assert "bucket" == caught.value.field
    assert time.monotonic() - began < 7 * 1.5  # The time of all answers.
    # The bucket rests ten times as long, so that other prompts are computed at once.
    server.before = lambda _: None
    asked = len(server.requests)
    for _ in range(20):
        with pytest.raises(StoreError):
            has(objects, [key(1)])
    assert len(server.requests) - asked <= 32
    time.sleep(objects._rest[0] - time.monotonic() + 0.1)
    assert [False] == has(objects, [key(1)])


def test_saves_do_not_wait_for_a_bucket_that_has_just_failed(
    server: S3Server, objects: BucketObjects
) -> None:
    """A worker that ends waits for all saves, each of which asks what is stored."""
    put(objects, 1)
    server.before = lambda request: Answer(500) if request.method == "PUT" else None
    with pytest.raises(StoreError):
        put(objects, 2)
    asked = len(server.requests)
    with pytest.raises(StoreError, match="500"):
        has(objects, [key(1)])
    assert asked == len(server.requests)
    assert bytes(payload(1)) == get(objects, 1)
    time.sleep(objects._rest[0] - time.monotonic() + 0.1)
    assert [True] == has(objects, [key(1)])


def test_a_lookup_ends_with_the_pages_that_it_found_in_time(
    server: S3Server, objects: BucketObjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=1, head_size=8, dtype="uint8")
    group = kvspec.KVCacheGroup(name="full", layers=["l"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group])
    model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    store = PageStore(StoredSpec.of(engine, page_tokens=4), model, objects)
    names = store.names(range(400), PromptIdentity.of_text())
    cache, _ = kvspec.allocate(engine, kvspec.RankId(), num_blocks=101)
    store.rank_pages(cache).save(names, 0, 100, {"full": [*range(1, 101)]})
    assert 100 == store.lookup(names, engine).num_pages
    monkeypatch.setattr(store_module, "LOOKUP_SECONDS", 0.2)
    server.before = lambda _: time.sleep(0.15)
    assert store.lookup(names, engine).num_pages in {8, 24}
    assert "400 of 400" in store.explain(names, engine)


def test_a_bucket_that_fails_when_a_store_opens_is_an_error(server: S3Server) -> None:
    """Its description could mean something else, so it must be read."""
    spec = kvspec.FullAttentionSpec(block_size=4, total_num_kv_heads=1, head_size=8, dtype="uint8")
    group = kvspec.KVCacheGroup(name="full", layers=["l"], spec=spec)
    placement = StoredSpec.of(kvspec.EngineSpec(groups=[group]), page_tokens=4)
    model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    PageStore(placement, model, BucketObjects.of_url("s3://b"))
    for broken in ("list-type", "space.json"):

        def refuse(request: Request, part: str = broken) -> Answer | None:
            asked = request.method == "GET" and part in f"{request.key}{request.query}"
            return Answer(403) if asked else None

        server.before = refuse
        with pytest.raises(StoreError):
            PageStore(placement, model, BucketObjects.of_url("s3://b"))


def test_a_store_that_is_opened_for_reading_changes_nothing(server: S3Server) -> None:
    put(BucketObjects.of_url("s3://b"), 1, 2)
    server.objects[path_of(key(2))] = server.objects[path_of(key(2))][:-1] + b"\xff"
    stored = dict(server.objects)
    objects = BucketObjects.of_url("s3://b", read_only=True)
    objects.describe(SPACE, {"model": "m"})
    assert bytes(payload(1)) == get(objects, 1)
    assert ("damaged", "checksum") == problem(objects, 2)
    for call in (lambda: put(objects, 3), lambda: objects.remove([key(1)])):
        with pytest.raises(SpecError):
            call()
    assert stored == server.objects


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # This process has threads.
def test_a_forked_process_gets_an_error_and_does_not_wait(
    server: S3Server, objects: BucketObjects
) -> None:
    """The threads of obstore exist only in the parent. A request of the child would never end."""
    put(objects, 1)
    process = os.fork()
    if not process:
        status = 1
        try:
            others = objects, BucketObjects.of_url("s3://b")
            for call in (call for each in others for call in calls(each).values()):
                try:
                    call()
                except StoreError as error:
                    status = 0 if error.field == "process" else 2
                if status:
                    break
        finally:
            os._exit(status)
    killer = threading.Timer(20, os.kill, (process, 9))
    killer.start()
    _, status = os.waitpid(process, 0)
    killer.cancel()
    assert 0 == status


def test_a_bucket_deleted_in_a_run_is_a_miss_or_an_error(
    server: S3Server, objects: BucketObjects
) -> None:
    put(objects, 1)
    body = b"<Error><Code>NoSuchBucket</Code><Message>It is gone</Message></Error>"
    server.before = lambda _: Answer(404, body)
    assert [False] == has(objects, [key(1)])
    assert ("absent", "object") == problem(objects, 1)
    with pytest.raises(StoreError, match="NoSuchBucket"):
        put(objects, 2)


def test_an_address_of_a_server_that_is_none_is_an_error(
    server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The code of obstore panics. Its error is not a subclass of `Exception`."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "not an address")
    objects = BucketObjects.of_url("s3://b")
    for name, call in calls(objects).items():
        with pytest.raises(StoreError) as caught:
            call()
        assert "failed" == caught.value.problem, name


@pytest.mark.parametrize("kind", ["http", "no conditions"])
def test_a_store_that_knows_no_conditions_is_refused(server: S3Server, kind: str) -> None:
    options: dict[str, Any] = {"client_options": {"allow_http": True}}
    if kind == "http":
        store: Any = HTTPStore(f"{server.url}/b", **options)
    else:
        options |= {"endpoint": server.url, "region": "r", "conditional_put": "disabled"}
        store = S3Store("b", access_key_id="a", secret_access_key="b", **options)  # noqa: S106
    with pytest.raises(StoreError) as caught:
        put(BucketObjects(store), 1)
    assert ("failed", CREATED_ONCE) == (caught.value.problem, caught.value.place)
    assert {} == server.objects


def test_another_store_of_obstore_has_the_same_errors(server: S3Server) -> None:
    options = {"endpoint": server.url, "region": "r", "client_options": {"allow_http": True}}
    objects = BucketObjects(S3Store("b", access_key_id="a", secret_access_key="b", **options))  # noqa: S106
    put(objects, 1)
    server.before = lambda _: Answer(403, b"<Error><Code>AccessDenied</Code></Error>")
    for call in calls(objects).values():
        with pytest.raises(KVSpecError, match="403"):
            call()
    assert SIZE == payload(1).nbytes
