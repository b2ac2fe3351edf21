"""Objects in buckets: of obstore's own store in memory, and of a server with the protocol of S3."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import numpy as np
import obstore
import pytest
from obstore.store import LocalStore, MemoryStore, ObjectStore, S3Store

import kvspec
from kvspec.adapters.vllm.store_settings import opened
from kvspec.errors import SpecError, StoreError
from kvspec.stored import (
    BucketObjects,
    LoadError,
    ModelIdentity,
    ObjectContents,
    PageStore,
    PromptIdentity,
    StoredSpec,
    bucket_objects,
)
from kvspec.stored.file_objects import FileObjects, path_of
from kvspec.stored.header import encode
from kvspec.stored.objects import checksum
from tests.support.asked import CONTENTS, SIZE, SPACE, get, has, key, payload, problem, put


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    moto = pytest.importorskip("moto.server", reason="moto is not installed: see the group s3")
    running = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    running.start()
    host, port = running.get_host_and_port()
    yield f"http://{host}:{port}"
    running.stop()


@pytest.fixture(params=["memory", "files", "s3"])
def bucket(request: pytest.FixtureRequest, tmp_path: object) -> ObjectStore:
    if request.param == "memory":
        return MemoryStore()
    if request.param == "files":
        return LocalStore(prefix=str(tmp_path))
    url = request.getfixturevalue("server")
    import boto3  # noqa: PLC0415 - moto has it

    name = f"b{abs(hash(request.node.name)):x}"
    login = {"aws_access_key_id": "a", "aws_secret_access_key": "b"}
    boto3.client("s3", endpoint_url=url, region_name="us-east-1", **login).create_bucket(
        Bucket=name
    )
    options = {"endpoint": url, "region": "us-east-1", "client_options": {"allow_http": True}}
    return S3Store(name, access_key_id="a", secret_access_key="b", **options)  # noqa: S106


def test_objects_of_a_bucket_are_whole_or_absent(bucket: ObjectStore) -> None:
    objects = BucketObjects(bucket)
    put(objects, 1, 2)
    assert not objects.write(key(1), payload(9), ObjectContents.of_bytes(SIZE))
    assert get(objects, 1) == bytes(payload(1))
    assert has(objects, [key(1), key(3), key(1, "tp1"), key(2)]) == [True, False, False, True]
    pages = [key(page).page for page in range(40)]
    assert objects.has(SPACE, pages, [("full", "tp0")]) == [page in (1, 2) for page in range(40)]
    assert objects.has(SPACE, pages[:2], [("full", "tp0"), ("full", "tp1")]) == [False] * 2
    assert problem(objects, 3) == ("absent", "object")
    strange = key(4, "pp0.tp1/..", "../group 0,é%2F\n")
    assert objects.write(strange, payload(4), CONTENTS)
    assert has(objects, [strange]) == [True]
    assert {one.key for one in objects.stored_objects()} == {key(1), key(2), strange}
    assert [*objects.stored_objects("0" * 64)] == []
    objects.describe(SPACE, {"model": "org/m"})
    objects.describe(SPACE, {"model": "the first one stays"})
    assert objects.spaces() == {SPACE: {"model": "org/m"}}
    assert objects.remove([key(1), key(3)]) == 1
    assert has(objects, [key(1), key(2)]) == [False, True]


def test_damaged_objects_are_renamed_and_others_stay(bucket: ObjectStore) -> None:
    objects = BucketObjects(bucket)
    right = encode(key(1), CONTENTS, checksum(payload(1))) + bytes(payload(1))
    wrong = {
        1: (right[:-1] + b"\0", ("damaged", "checksum")),
        2: (right, ("foreign", "key")),
        3: (right[:-1], ("damaged", "file size")),
        4: (b"a letter to a friend", ("foreign", "header")),
        5: (b"", ("damaged", "header")),
    }
    for page, (content, expected) in wrong.items():
        obstore.put(bucket, path_of(key(page)), content)
        assert problem(objects, page) == expected, page
    there = has(objects, [key(page) for page in wrong])
    assert there == [False, True, False, True, False]
    put(objects, 1)
    for page in (2, 4):
        with pytest.raises(StoreError):
            objects.remove([key(page)])
        assert has(objects, [key(page)]) == [True]
    small = memoryview(bytearray(b"kept"))
    with pytest.raises(StoreError, match="bytes"):
        objects.read(key(1), small)
    assert bytes(small) == b"kept"


def test_one_of_many_writers_of_a_name_creates_it(bucket: ObjectStore) -> None:
    objects, created = BucketObjects(bucket), list[bool]()

    def write() -> None:
        created.append(objects.write(key(1), payload(1), CONTENTS))

    writers = [threading.Thread(target=write) for _ in range(8)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()
    assert sorted(created) == [False] * 7 + [True]


def test_what_one_engine_stores_in_a_bucket_another_loads(bucket: ObjectStore) -> None:
    spec = kvspec.FullAttentionSpec(
        block_size=4, total_num_kv_heads=4, head_size=8, dtype="float16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0", "layers.1"], spec=spec)
    engine = kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=2))
    model = ModelIdentity(model="m", revision="r", weights="", quantization="", overrides="")
    store = PageStore(
        StoredSpec.of(engine, page_tokens=8, head_groups=4), model, BucketObjects(bucket)
    )
    names = store.names(range(40), PromptIdentity.of_text())
    table, other_table = [*range(10)], [*range(19, 9, -1)]
    stored = {}
    for rank in engine.parallel.ranks:
        cache, stored[rank] = kvspec.allocate(engine, rank, num_blocks=20)
        for array in stored[rank].values():
            values = np.random.default_rng(rank.tp).integers(1, 256, array.nbytes, np.uint8)
            array.view(np.uint8).reshape(-1)[:] = values
        assert len(store.rank_pages(cache).save(names, 0, 5, {"full": table}).written) == 10
    with store.lookup(names, engine) as hit:
        assert hit.num_tokens == 40
        for rank in engine.parallel.ranks:
            cache, arrays = kvspec.allocate(engine, rank, num_blocks=20)
            assert store.rank_pages(cache).load(hit, 5, {"full": other_table}).objects == 10
            for name, array in arrays.items():
                new, old = (each.reshape(2, 20, -1) for each in (array, stored[rank][name]))
                assert np.array_equal(new[:, other_table], old[:, table])
                assert not new[:, table].any()
    gone = next(one.key for one in store.objects.stored_objects() if one.key.page == names[3])
    assert store.objects.remove([gone]) == 1
    assert store.lookup(names, engine).num_pages == 3
    failed = 0
    for rank in engine.parallel.ranks:
        cache, _ = kvspec.allocate(engine, rank, num_blocks=20)
        try:
            store.rank_pages(cache).load(names, 5, {"full": table})
        except LoadError:
            failed += 1
    assert failed == 1


def test_a_bucket_that_does_not_exist_is_an_error(server: str) -> None:
    login = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}
    objects = BucketObjects(
        S3Store("none", endpoint=server, client_options={"allow_http": True}, **login)
    )
    assert has(objects, [key(1)]) == [False]  # After an error, the bucket rests.
    calls = (
        lambda: objects.write(key(1), payload(1), CONTENTS),
        lambda: objects.describe(SPACE, {}),
        lambda: [*objects.stored_objects()],
        objects.spaces,
    )
    for call in calls:
        with pytest.raises(StoreError) as caught:
            call()
        assert (caught.value.problem, caught.value.field) == ("failed", "bucket")


def test_a_lookup_in_a_bucket_that_is_silent_ends_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The scheduler of an engine waits for it."""
    with socket.create_server(("127.0.0.1", 0)) as silent:  # It accepts no request.
        settings = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{silent.getsockname()[1]}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_REGION": "r",
            "AWS_TIMEOUT": "1s",
        }
        for name, value in settings.items():
            monkeypatch.setenv(name, value)
        objects, began = BucketObjects.of_url("s3://b"), time.monotonic()
        with pytest.raises(StoreError, match="bucket"):
            has(objects, [key(1)])
        assert 2.0 <= time.monotonic() - began < bucket_objects.RETRY_SECONDS + 10.0


def test_a_bucket_that_does_not_answer_is_an_error() -> None:
    options = {"client_options": {"allow_http": True}, "retry_config": {"max_retries": 0}}
    objects = BucketObjects(
        S3Store("b", endpoint="http://127.0.0.1:9", region="r", skip_signature=True, **options)
    )
    with pytest.raises(StoreError) as caught:
        objects.write(key(1), payload(1), CONTENTS)
    assert (caught.value.problem, caught.value.field) == ("failed", "bucket")
    with pytest.raises(StoreError):
        has(objects, [key(1)])


def test_the_place_of_a_store_is_a_directory_or_an_address(tmp_path: object) -> None:
    assert isinstance(opened(f"{tmp_path}/a", 10), FileObjects)
    assert isinstance(opened("s3://bucket/folder", None), BucketObjects)
    for place, limit, field in (
        ("s3://bucket", 5, "limit"),
        ("memory:///", None, "directory"),
        ("gopher://b", None, "url"),
    ):
        with pytest.raises(SpecError) as caught:
            opened(place, limit)
        assert field in caught.value.field
