"""Objects in a bucket of an object store, such as S3, through the library obstore.

Invariant: as for files, an object is visible only when it is whole, and nothing that it did not
write is ever deleted.

How it works:
    An object has the bytes that its file would have, under the same name:

        kvspec-pages-2/<space>/<first 2 digits>/<page>,<group>,<chunk>.safetensors

    A bucket shows an object only when all its bytes have arrived, and a conditional request
    creates it only if the name is free. So there are no temporary objects and no index. A lookup
    asks for each object, many at a time. The rules of the bucket delete old objects: an object that
    is gone when it is read is a page that must be computed.

    Some servers accept a conditional request and ignore its condition. So the first write of a
    process creates one more object, `kvspec-pages-2/created-once`, twice. A server that creates it
    a second time is refused.

    The scheduler of an engine waits for a lookup. So the requests of one call of `has` end after
    `LOOKUP_SECONDS`. After a call or a write that failed, the bucket rests ten times as long as it
    took: each question then fails at once. So a bucket in trouble takes a tenth of the time, also
    of a worker, which asks before each save.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple, Self
from urllib.parse import urlsplit

from kvspec.errors import SpecError, StoreError
from kvspec.inputs import flag
from kvspec.stored import header
from kvspec.stored.file_objects import (
    DAMAGED,
    ROOT,
    SPACE_FILE,
    is_damaged,
    key_of,
    path_of,
    second_name,
)
from kvspec.stored.objects import (
    LOOKUP_SECONDS,
    Item,
    ObjectContents,
    ObjectKey,
    Payload,
    Result,
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
"""A request is sent a second time if the first one fails within so many seconds. obstore by default
would try for three minutes."""
CREATED_ONCE = f"{ROOT}/created-once"
"""Name of the object by which a bucket shows that it creates an object once."""
# A bucket rests so many times as long as the questions took that it did not answer.
_REST = 10.0
_MOST_WORDS = 300
# Slashes in the folder of an object.
_FOLDERS = 2
# The process that has used a bucket. A child that it forks lacks the threads of obstore, so a
# request of the child would never end.
_process: int | None = None


class _Got(NamedTuple):
    """The beginning of an object, or all its bytes, with its size and its version."""

    content: memoryview
    size: int
    version: str | None


class BucketObjects:
    """Objects in a bucket.

    Args:
        store: A store of obstore, such as `obstore.store.S3Store`. Its bucket must support
            conditional requests that create an object only if the name is free.
        read_only: Whether to change nothing: objects are not written, renamed or removed, and
            spaces are not described.

    Raises:
        SpecError: If obstore is not installed, or *store* is an address.

    >>> from obstore.store import MemoryStore
    >>> objects, key = BucketObjects(MemoryStore()), ObjectKey("0" * 64, "1" * 64, "full", "tp0")
    >>> objects.write(key, memoryview(b"keys"), ObjectContents.of_bytes(4))
    True
    >>> objects.has(key.space, [key.page], [("full", "tp0"), ("full", "tp1")])
    [False]
    """

    threads = REQUESTS

    def __init__(self, store: ObjectStore, *, read_only: bool = False) -> None:
        if isinstance(store, str):  # It may contain credentials.
            raise SpecError("store", type(store), "a store of obstore: of_url takes an address")
        self._client = _library()
        self._store = store
        self._read_only = flag("read_only", read_only)
        self._creates_once = False
        # The end of a rest, and why the bucket rests.
        self._rest = 0.0, ""

    @classmethod
    def of_url(cls, url: str, *, read_only: bool = False) -> Self:
        """Return the objects of a bucket.

        Args:
            url: Such as "s3://bucket/folder". Environment variables have the credentials, as
                obstore describes, and the time limit of a request, such as AWS_TIMEOUT=5s.
            read_only: As for the class.

        Raises:
            SpecError: If obstore is not installed, or cannot use the address. An address with
                credentials, a query or a fragment is refused: obstore would ignore them.
        """
        _check_url(url)
        library = _library()
        # Options of the client would replace all of those in the environment.
        tries = {"max_retries": 1, "retry_timeout": timedelta(seconds=RETRY_SECONDS)}
        try:
            store = library.store.from_url(url, retry_config=tries)
        except (library.exceptions.BaseError, ValueError, TypeError) as error:
            raise SpecError("url", url, f"the address of a bucket: {_words(error)}") from None
        return cls(store, read_only=read_only)

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> bool:
        """Store an object."""
        path, view = path_of(key), check_payload(payload, contents)
        head = header.encode(key, contents, checksum(view))
        with self._resting():
            return self._create(path, b"".join((head, view)))

    def write_all(self, payloads: Sequence[Payload], contents: ObjectContents) -> list[bool]:
        """Store objects of equal contents, many at a time."""
        return together(REQUESTS, self.write, [(*each, contents) for each in payloads])

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object."""
        path = path_of(key)
        target = into.cast("B") if into.format != "B" or into.ndim != 1 else into

        def copy(got: _Got) -> None:
            target[:] = _payload(got, key, path, target.nbytes)

        self._checked(key, path, target.nbytes, copy)

    def inspect(self, key: ObjectKey) -> header.Header:
        """Read and check the header of an object. Raise `StoreError` as `read` does."""
        path = path_of(key)
        return self._checked(key, path, 0, lambda got: _header(got, key, path))

    def _checked(
        self, key: ObjectKey, path: str, num_bytes: int, check: Callable[[_Got], Result]
    ) -> Result:
        """Return the result of *check* for an object. Rename the object if it is damaged."""
        found = self._get(key, path, num_bytes)
        try:
            return check(found)
        except StoreError as error:
            if error.problem != "damaged":
                raise
            # Its bytes may have changed on the way. Only an object that is damaged is renamed.
            again = self._get(key, path, num_bytes)
            try:
                return check(again)
            except StoreError as still:
                if still.problem == "damaged" and again[1:] == found[1:]:
                    self._set_aside(path, again)
                raise

    def _get(self, key: ObjectKey, path: str, num_bytes: int) -> _Got:
        """Return an object, or only its beginning if it has too many bytes to be the right one."""
        with self._named(path, key):
            found = self._client.get(self._store, path)
            size, version = found.meta["size"], found.meta["e_tag"]
            if size > header.MAX_HEADER + num_bytes:
                end = header.MAX_HEADER
                content = self._client.get_range(self._store, path, start=0, end=end)
            else:
                content = found.bytes()
            return _Got(memoryview(content), size, version)

    def _set_aside(self, path: str, found: _Got) -> None:
        """Rename a damaged object, unless it was replaced, so that the page can be stored again."""
        if self._read_only:
            return
        with suppress(StoreError, OSError), self._named(path):
            name = f"{path}{DAMAGED}"
            with suppress(FileNotFoundError):
                self._client.head(self._store, name)
                # One name for each version: a bucket may forbid the deletion behind the copy.
                name = second_name(path, str(found.version))
            meta = self._client.head(self._store, path)
            if (meta["size"], meta["e_tag"]) == found[1:]:
                self._client.rename(self._store, path, name)

    def has(self, space: str, pages: Sequence[str], items: Sequence[Item]) -> list[bool]:
        """Return for each page whether all its items are stored."""
        check_pages(space, pages)
        keys = (ObjectKey(space, page, *item) for page in pages for item in items)
        paths, count = [path_of(key) for key in keys], len(items)
        _check_process(f"{ROOT}/{space}")
        end, why = self._rest
        if (left := end - time.monotonic()) > 0:
            wanted = f"an answer: it is asked again in {left:.1f} seconds"
            raise StoreError("failed", f"{ROOT}/{space}", "bucket", why, wanted)
        with self._resting():
            there = self._are_there(paths)
        return [all(there[at * count : (at + 1) * count]) for at in range(len(pages))]

    @contextmanager
    def _resting(self) -> Iterator[None]:
        """Let the bucket rest if it fails."""
        began = time.monotonic()
        try:
            yield
        except StoreError as error:
            now = time.monotonic()
            rest = _REST * min(now - began, LOOKUP_SECONDS)
            self._rest = now + rest, str(error.value)
            raise

    def _are_there(self, paths: Sequence[str]) -> list[bool]:
        pool = ThreadPoolExecutor(REQUESTS, "kvspec-bucket")
        try:
            calls = [pool.submit(self._is_there, path) for path in paths]
            done, open_calls = wait(calls, LOOKUP_SECONDS, FIRST_EXCEPTION)
            for call in done:
                call.result()
            if open_calls:
                found = f"{len(open_calls)} of {len(calls)} requests have no answer"
                wanted = f"all answers within {LOOKUP_SECONDS:g} seconds"
                raise StoreError("failed", paths[0], "bucket", found, wanted)
            return [call.result() for call in calls]
        finally:
            # Requests that are open end by their own time limit. Nobody waits for them.
            pool.shutdown(wait=False, cancel_futures=True)

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
        self._check_writable()
        return sum(together(REQUESTS, self._remove, [(key,) for key in keys]))

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:
        """Iterate over the stored objects, and their sizes with their headers."""
        prefix = ROOT if space is None else f"{ROOT}/{check_digest('space', space)}"
        for path, size in self._paths(prefix):
            if key := self._key_of(path):
                yield StoredObject(key, size)

    def _paths(self, prefix: str) -> Iterator[tuple[str, int]]:
        """Iterate over the names and the sizes of all objects below a folder."""
        with self._in_bucket(prefix):
            for some in self._client.list(self._store, prefix=prefix):
                yield from ((one["path"], one["size"]) for one in some)

    @staticmethod
    def _key_of(path: str) -> ObjectKey | None:
        """Return the key of an object, or None if an object in a folder too many has its name."""
        key = key_of(*path.rpartition("/")[::2])
        return key if key is not None and path_of(key) == path else None

    def strays(self) -> Iterator[tuple[str, str]]:
        """Iterate over the objects that are not pages, and what they are."""
        for path, _ in self._paths(ROOT):
            folder, _, name = path.rpartition("/")
            if path == CREATED_ONCE or name == SPACE_FILE or self._key_of(path):
                continue
            match = is_damaged(folder, name) and folder.count("/") == _FOLDERS
            yield path, "damaged" if match else "foreign"

    def remove_strays(self) -> Iterator[str]:
        """Delete damaged objects. Iterate over their names."""
        self._check_writable()
        for path, kind in self.strays():
            if kind == "damaged":
                with self._named(path):
                    self._client.delete(self._store, path)
                yield path

    def num_bytes(self) -> int:
        """Return the bytes of all objects that are pages."""
        return sum(one.num_bytes for one in self.stored_objects())

    def describe(self, space: str, description: Mapping[str, str]) -> None:
        """Keep the description of a space. The first description stays."""
        path = f"{ROOT}/{check_digest('space', space)}/{SPACE_FILE}"
        if not self._read_only:
            self._create(path, json.dumps(dict(description), indent=1, sort_keys=True).encode())

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return the description of each space. It is empty if it cannot be read."""
        with self._in_bucket(ROOT):
            folders = self._client.list_with_delimiter(self._store, prefix=ROOT)["common_prefixes"]
        names = []
        for folder in folders:
            with suppress(SpecError):
                names.append(check_digest("space", folder.rpartition("/")[2]))
        found = together(REQUESTS, self._description, [(name,) for name in names])
        return dict(zip(names, found, strict=True))

    def _description(self, space: str) -> Mapping[str, str]:
        path = f"{ROOT}/{space}/{SPACE_FILE}"
        content = b"{}"
        with suppress(FileNotFoundError), self._named(path):
            found = self._client.get(self._store, path)
            if found.meta["size"] <= header.MAX_HEADER:
                content = bytes(found.bytes())
        with suppress(ValueError, RecursionError):
            text = json.loads(content)
            fields = text.items() if isinstance(text, dict) else ()
            return {str(field): str(value) for field, value in fields}
        return {}

    def _create(self, path: str, content: bytes) -> bool:
        """Create an object, and return whether its name was free."""
        self._check_writable()
        if not self._creates_once:
            text = b"A bucket of kvspec creates this object once."
            if self._put(CREATED_ONCE, text) and self._put(CREATED_ONCE, text):
                wanted = "conditional requests (If-None-Match), which create an object once"
                raise StoreError("failed", CREATED_ONCE, "bucket", "created twice", wanted)
            self._creates_once = True
        return self._put(path, content)

    def _put(self, path: str, content: bytes) -> bool:
        taken = False
        with self._in_bucket(path):
            try:
                self._client.put(self._store, path, content, mode="create", use_multipart=False)
            except self._client.exceptions.AlreadyExistsError:
                taken = True
        # S3 gives the same answer if somebody deletes the object meanwhile: it asks for a retry.
        if taken and not self._is_there(path):
            found = "its name is taken, but it is not there"
            raise StoreError("failed", path, "bucket", found, "an object that stays")
        return not taken

    def _check_writable(self) -> None:
        if self._read_only:
            raise SpecError("read_only", value=True, expected="False, to change objects")

    def _is_there(self, path: str) -> bool:
        try:
            with self._named(path):
                self._client.head(self._store, path)
        except FileNotFoundError:
            return False
        return True

    def _remove(self, key: ObjectKey) -> bool:
        try:
            self.inspect(key)
        except StoreError as error:
            if error.problem == "absent":
                return False
            raise
        path = path_of(key)
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
            raise StoreError("failed", path, "bucket", _words(error), "one that exists") from None

    @contextmanager
    def _named(self, path: str, key: ObjectKey | None = None) -> Iterator[None]:
        """Raise errors of the bucket as `StoreError`, but not that a name is free."""
        _check_process(path)
        try:
            yield
        except FileNotFoundError:
            if key is None:
                raise
            raise absent(key) from None
        except BaseException as error:
            # obstore raises errors of several classes. A panic of its code is no `Exception`.
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            # A traceback must not show the texts of obstore, which have what `_words` leaves out.
            raise StoreError("failed", path, "bucket", _words(error), "an answer") from None


def _header(got: _Got, key: ObjectKey, path: str) -> header.Header:
    """Return the header of an object. Raise `StoreError` if it is not the right one."""
    found = header.decode(bytes(got.content[: header.MAX_HEADER]), got.size, path)
    if found.key != key:
        raise StoreError("foreign", path, "key", str(found.key), str(key))
    return found


def _payload(got: _Got, key: ObjectKey, path: str, num_bytes: int) -> memoryview:
    """Return the payload of an object. Raise `StoreError` if it is not the right one."""
    found = _header(got, key, path)
    if found.num_bytes != num_bytes:
        wanted = f"{num_bytes} bytes, as the placement has"
        raise StoreError("foreign", path, "bytes", found.num_bytes, wanted)
    payload = got.content[found.start :]
    if (sums := checksum(payload)) != found.checksum:
        raise StoreError("damaged", path, "checksum", sums, repr(found.checksum))
    return payload


def _library() -> Any:  # noqa: ANN401 - the types of obstore need it to be installed
    try:
        import obstore.store  # noqa: PLC0415 - only buckets need it
    except ImportError as error:
        raise SpecError("objects", "a bucket", "obstore: pip install 'kvspec[bucket]'") from error
    return obstore


def _check_process(path: str) -> None:
    """Raise `StoreError` in a child of a process that has used a bucket before."""
    global _process  # noqa: PLW0603 - all stores of a process share the threads of obstore
    _process = _process or os.getpid()
    if _process != os.getpid():
        wanted = "a process that used no bucket before its fork: start it by spawn"
        raise StoreError("failed", path, "process", os.getpid(), wanted)


def _check_url(url: object) -> None:
    """Raise `SpecError` if an address has parts that obstore ignores or changes."""
    if not isinstance(url, str) or not url.isprintable():
        raise SpecError("url", type(url), "a text without control characters")
    parts = urlsplit(url)
    # The error must not show credentials.
    shown = f"{parts.scheme}://..."
    if "@" in parts.netloc or "?" in url or "#" in url:
        wanted = "scheme://bucket/folder: the environment has the credentials and the options"
        raise SpecError("url", shown, wanted)
    if {".", ".."} & {*parts.path.split("/")}:
        raise SpecError("url", shown, "a folder without the parts '.' and '..'")
    if parts.scheme == "file":
        raise SpecError("url", shown, "a bucket: FileObjects has a directory")


def _words(error: BaseException) -> str:
    r"""Return the cause of an error of obstore, without addresses and without what a server quotes.

    obstore's text has the answer of the server, which may quote the request with its credentials.

    >>> _words(OSError("GET http://h/b?key=s - status code: 403 Forbidden: <?xml?>\n<Error>"
    ...     "<Code>ExpiredToken</Code><Message>Expired.</Message><Token>s</Token></Error>"))
    '403 Forbidden: ExpiredToken: Expired.'
    """
    text, _, details = str(error).partition("\n\nDebug source:")
    status = re.search(r"status(?: code:)? (\d{3} [A-Za-z ]*)", text)
    code = re.search(r"<Code>([^<]*)</Code>", text)
    message = re.search(r"<Message>([^<]*)</Message>", text)
    found = [match[1].strip() for match in (status, code, message) if match]
    if not found:
        line = text.partition("\n")[0].partition("<")[0]
        found = [re.sub(r"(\w+://)(?:[^\s/@]*@)?([^\s/?#]*)\S*", r"\1\2/...", line)]
        if kind := re.search(r"kind: (Timeout|Connect|Interrupted|Decode)", details):
            found.append(kind[1])
    return ": ".join(found)[:_MOST_WORDS]
