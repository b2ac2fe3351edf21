"""Objects in a bucket of an object store, such as S3, through the library obstore.

Invariant: as for files, an object is visible only when it is whole, and nothing that it did not
write is ever deleted.

How it works:
    An object has the bytes that its file would have, under the same name:

        kvspec-pages-1/<space>/<first 2 digits>/<page>,<group>,<chunk>.safetensors

    A bucket shows an object only when all its bytes have arrived, and a conditional request
    creates it only if the name is free. So there are no temporary objects and no index. A lookup
    asks for each object, many at a time. The rules of the bucket delete old objects: an object that
    is gone when it is read is a page that must be computed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Self

from kvspec.errors import SpecError, StoreError
from kvspec.stored import header
from kvspec.stored.file_objects import DAMAGED, ROOT, SPACE_FILE, key_of, path_of
from kvspec.stored.objects import (
    Item,
    ObjectContents,
    ObjectKey,
    Payload,
    StoredObject,
    absent,
    check_digest,
    check_pages,
    check_payload,
    checksum,
    pin_seconds,
    together,
)

if TYPE_CHECKING:
    from obstore.store import ObjectStore

REQUESTS = 32
"""Requests of one call that are sent at the same time."""
RETRY_SECONDS = 10.0
"""A request is sent a second time if the first one fails within so many seconds. An engine's
scheduler waits for a lookup, and obstore by default would try for three minutes."""


class BucketObjects:
    """Objects in a bucket.

    Args:
        store: A store of obstore, such as `obstore.store.S3Store`. Its bucket must support
            conditional requests that create an object only if the name is free.

    Raises:
        SpecError: If obstore is not installed.

    >>> from obstore.store import MemoryStore
    >>> objects, key = BucketObjects(MemoryStore()), ObjectKey("0" * 64, "1" * 64, "full", "tp0")
    >>> objects.write(key, memoryview(b"keys"), ObjectContents.of_bytes(4))
    True
    >>> objects.has(key.space, [key.page], [("full", "tp0"), ("full", "tp1")])
    [False]
    """

    threads = REQUESTS

    def __init__(self, store: ObjectStore) -> None:
        self._client = _library()
        self._store = store

    @classmethod
    def of_url(cls, url: str) -> Self:
        """Return the objects of a bucket.

        Args:
            url: Such as "s3://bucket/folder". Environment variables have the credentials, as
                obstore describes, and the time limit of a request, such as AWS_TIMEOUT=5s.

        Raises:
            SpecError: If obstore is not installed, or cannot use the address.
        """
        library = _library()
        # Options of the client would replace all of those in the environment.
        tries = {"max_retries": 1, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
        try:
            return cls(library.store.from_url(url, retry_config=tries))
        except (library.exceptions.BaseError, ValueError, TypeError) as error:
            raise SpecError("url", url, f"the address of a bucket: {_first_line(error)}") from error

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> bool:
        """Store an object."""
        path, view = path_of(key), check_payload(payload, contents)
        head = header.encode(key, contents, checksum(view))
        return self._create(path, b"".join((head, view)))

    def write_all(self, payloads: Sequence[Payload], contents: ObjectContents) -> list[bool]:
        """Store objects of equal contents, many at a time."""
        return together(REQUESTS, self.write, [(*each, contents) for each in payloads])

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object."""
        path = path_of(key)
        target = into.cast("B") if into.format != "B" or into.ndim != 1 else into
        with self._named(path, key):
            whole = memoryview(self._client.get(self._store, path).bytes())
        try:
            target[:] = _payload(whole, key, path, target.nbytes)
        except StoreError as error:
            if error.problem == "damaged":  # Then the page can be stored again.
                with suppress(StoreError, OSError), self._named(path):
                    self._client.rename(self._store, path, f"{path}{DAMAGED}")
            raise

    def has(self, space: str, pages: Sequence[str], items: Sequence[Item]) -> list[bool]:
        """Return for each page whether all its items are stored."""
        check_pages(space, pages)
        keys = (ObjectKey(space, page, *item) for page in pages for item in items)
        paths = [(path_of(key),) for key in keys]
        there, count = together(REQUESTS, self._is_there, paths), len(items)
        return [all(there[at * count : (at + 1) * count]) for at in range(len(pages))]

    def pin(self, space: str, pages: Sequence[str], owner: str, duration: float) -> None:  # noqa: ARG002
        """Do nothing: the rules of the bucket delete objects, and they know no pins."""
        check_pages(space, pages)
        pin_seconds(duration)

    def use(self, space: str, pages: Sequence[str]) -> None:
        """Do nothing: a bucket has no times of use."""

    def unpin(self, owner: str) -> None:
        """Do nothing."""

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        """Remove objects. Raise `StoreError` for one that kvspec did not write."""
        return sum(together(REQUESTS, self._remove, [(key,) for key in keys]))

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:
        """Iterate over the stored objects, and their sizes with their headers."""
        prefix = ROOT if space is None else f"{ROOT}/{check_digest('space', space)}"
        with self._in_bucket(prefix):
            for some in self._client.list(self._store, prefix=prefix):
                for one in some:
                    if key := key_of(*one["path"].rpartition("/")[::2]):
                        yield StoredObject(key, one["size"])

    def describe(self, space: str, description: Mapping[str, str]) -> None:
        """Keep the description of a space. The first description stays."""
        text = json.dumps(dict(description), indent=1, sort_keys=True).encode()
        self._create(f"{ROOT}/{check_digest('space', space)}/{SPACE_FILE}", text)

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return the description of each space. It is empty if it cannot be read."""
        with self._in_bucket(ROOT):
            folders = self._client.list_with_delimiter(self._store, prefix=ROOT)["common_prefixes"]
        found: dict[str, Mapping[str, str]] = {}
        for folder in folders:
            name = folder.rpartition("/")[2]
            with suppress(SpecError):
                found[check_digest("space", name)] = {}
            with suppress(OSError, ValueError, RecursionError, StoreError):
                with self._named(folder):
                    content = self._client.get(self._store, f"{folder}/{SPACE_FILE}").bytes()
                text = json.loads(bytes(content))
                fields = text.items() if isinstance(text, dict) else ()
                found[name] = {str(field): str(value) for field, value in fields}
        return found

    def _create(self, path: str, content: bytes) -> bool:
        try:
            with self._in_bucket(path):
                self._client.put(self._store, path, content, mode="create", use_multipart=False)
        except self._client.exceptions.AlreadyExistsError:
            return False
        return True

    def _is_there(self, path: str) -> bool:
        try:
            with self._named(path):
                self._client.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def _remove(self, key: ObjectKey) -> bool:
        path = path_of(key)
        try:
            with self._named(path):
                size = self._client.head(self._store, path)["size"]
                most = min(size, header.MAX_HEADER)
                first = (
                    self._client.get_range(self._store, path, start=0, end=most) if most else b""
                )
        except FileNotFoundError:
            return False
        _check_key(header.decode(bytes(first), size, path), key, path)
        with self._named(path):
            self._client.delete(self._store, path)
        return True

    @contextmanager
    def _in_bucket(self, path: str) -> Iterator[None]:
        """Raise errors as `_named` does. Only a bucket that does not exist is not found."""
        try:
            with self._named(path):
                yield
        except FileNotFoundError as error:
            text = _first_line(error)
            raise StoreError("failed", path, "bucket", text, "a bucket that exists") from error

    @contextmanager
    def _named(self, path: str, key: ObjectKey | None = None) -> Iterator[None]:
        """Raise errors of the bucket as `StoreError`, but not that a name is free or taken."""
        try:
            yield
        except FileNotFoundError:
            if key is None:
                raise
            raise absent(key) from None
        except self._client.exceptions.AlreadyExistsError:
            raise
        except (self._client.exceptions.BaseError, OSError) as error:
            text = _first_line(error)
            raise StoreError("failed", path, "bucket", text, "an answer") from error


def _payload(whole: memoryview, key: ObjectKey, path: str, num_bytes: int) -> memoryview:
    """Return the payload of an object. Raise `StoreError` if it is not the right one."""
    found = header.decode(bytes(whole[: header.MAX_HEADER]), len(whole), path)
    _check_key(found, key, path)
    if found.num_bytes != num_bytes:
        wanted = f"{num_bytes} bytes, as the placement has"
        raise StoreError("foreign", path, "bytes", found.num_bytes, wanted)
    payload = whole[found.start :]
    if (sums := checksum(payload)) != found.checksum:
        raise StoreError("damaged", path, "checksum", sums, repr(found.checksum))
    return payload


def _check_key(found: header.Header, key: ObjectKey, path: str) -> None:
    if found.key != key:
        raise StoreError("foreign", path, "key", str(found.key), str(key))


def _library() -> Any:  # noqa: ANN401 - the types of obstore need it to be installed
    try:
        import obstore.store  # noqa: PLC0415 - only buckets need it
    except ImportError as error:
        raise SpecError("objects", "a bucket", "obstore: pip install 'kvspec[bucket]'") from error
    return obstore


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
