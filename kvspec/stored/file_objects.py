"""Objects as files of one directory, for several processes of one machine or of a shared disk.

Invariant: a file has its final name only when it is whole, and it is never changed afterwards. No
file that kvspec did not write is deleted, overwritten or followed.

How it works:
    The directory gets a folder `kvspec-pages-2`, whose number is the version of the files. So files
    of another version are never found, and a page is never taken for stored if no load can read it.
    The folder contains:

        <space>/<first 2 digits>/<page>,<group>,<chunk>.safetensors     an object
        <space>/space.json                                              what the space is
        tmp/<process>-<random>                                          a file that is being written
        index-1/                                                        see `kvspec.stored.index`

    A writer allocates all bytes of a new file in `tmp` first, so a full disk is known before
    anything is visible. Then it writes them and links the file to its final name. Linking fails if
    the name exists, so the first writer wins. A writer that is killed leaves a file in `tmp`, which
    is deleted after an hour. No other file is ever incomplete.

    A reader checks owner, permissions and header, reads, and compares the checksum. It renames a
    damaged object to `....damaged`, so that the page can be stored again. If something has that
    name, the object is renamed to `.....<8 digits>.damaged`.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import secrets
import stat
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from urllib.parse import quote, unquote

from kvspec.errors import SpecError, StoreError, StoreProblem
from kvspec.inputs import flag, positive_int
from kvspec.stored import header
from kvspec.stored.index import IndexUnavailable, PageIndex, Row
from kvspec.stored.objects import (
    Item,
    ObjectContents,
    ObjectKey,
    Payload,
    StoredObject,
    absent,
    as_bytes,
    check_digest,
    check_pages,
    check_payload,
    checksum,
    pin_seconds,
    together,
)

ROOT = f"kvspec-pages-{header.HEADER_VERSION}"
"""Name of the folder with all files of this version. Other versions have folders of their own."""
OBJECT_SUFFIX = ".safetensors"
DAMAGED = ".damaged"
SPACE_FILE = "space.json"
"""Name of the description of a space, in its folder."""
TEMPORARY_SECONDS = 3600.0
MODES = (0o700, 0o750, 0o770)
_MOST_NAME = 255
# Space, first two digits and name: the parts of the path of an object.
_OBJECT_DEPTH = 3
_MOST_WRITE = 1 << 30
# Objects that are added to the index together. The index does not know those of a batch whose
# writer is killed, and does not count their bytes, until they are written again.
_MOST_NEW, _MOST_NEW_BYTES = 64, 1 << 22
# Pages leave in groups of about so many objects, because the index is locked meanwhile: 20,000
# objects in one group locked it for 9 seconds. Other processes try to lock it at least every 0.1
# seconds, so it stays free for half of this time after each group.
_MOST_FREED, _FREE_SECONDS = 200, 0.05
# A lookup pins all pages of its prompt for some milliseconds, so a writer waits for their room. It
# tries only so often, because each time locks the index for others.
_PAUSES = (0.05, 0.25)
# A writer frees a 64th of the limit more than it needs, but at most so many bytes.
_MOST_SPARE = 1 << 28
# The first lookup waits so long while a large directory is read. The others do not wait.
_REFRESH_SECONDS = 5.0
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_TEMPORARY = re.compile(r"\d+-[0-9a-f]{16}")
_DAMAGED = re.compile(
    rf"(.+{re.escape(OBJECT_SUFFIX)})(?:\.[0-9a-f]{{8}})?{re.escape(DAMAGED)}", re.DOTALL
)
# Descriptors that hold the lock of this process while it reads the directory. A child of fork gets
# copies of them, and would keep the lock after its parent is killed. So it closes them.
_READING: set[int] = set()
_UNSAFE = {errno.ELOOP, errno.EACCES, errno.EPERM, errno.ENXIO, errno.ENOTDIR}


class FileObjects:
    """Objects as files of a directory.

    Args:
        directory: The directory. It is created if its parent exists. It must belong to this user,
            and others must not be able to write to it.
        limit: Most bytes of all files, or None. The pages that were used least recently leave
            first. Objects that are written at the same time may exceed the limit for a moment.
        mode: Permissions of new directories: 0o700, 0o750 or 0o770. Files get them without `x`.
        owners: Numbers of other users whose files are accepted, too.
        sync: Whether to wait until the bytes of an object are on the disk. Without it, a loss of
            power may damage new objects, which readers find by their checksums.
        read_only: Whether to change nothing. The directory must exist, the index is not used, and
            damaged objects keep their names.

    Raises:
        SpecError: If an argument is not possible.
        StoreError: If the directory cannot be used, or others can change it.

    >>> import tempfile
    >>> folder = tempfile.TemporaryDirectory()
    >>> objects = FileObjects(folder.name, limit=1 << 30)
    >>> key = ObjectKey("0" * 64, "1" * 64, "full", "tp0")
    >>> objects.write(key, memoryview(b"keys"), ObjectContents.of_bytes(4))
    True
    >>> target = bytearray(4)
    >>> objects.read(key, memoryview(target))
    >>> bytes(target), objects.has(key.space, [key.page], [("full", "tp0")])
    (b'keys', [True])
    >>> objects.close(); folder.cleanup()
    """

    # File systems of networks answer several requests at once. On a local disk, two threads load
    # objects of 1 MiB faster, and those of 64 KiB slower.
    threads = 4

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        limit: int | None = None,
        mode: int = 0o700,
        owners: Sequence[int] = (),
        sync: bool = False,
        read_only: bool = False,
    ) -> None:
        self.limit = None if limit is None else positive_int("limit", limit)
        if "://" in str(directory):  # It may contain credentials.
            raise SpecError("directory", type(directory), "a path: BucketObjects has an address")
        if mode not in MODES:
            raise SpecError("mode", oct(mode), "one of 0o700, 0o750 and 0o770")
        self._mode, self._sync = mode, flag("sync", sync)
        self._read_only = flag("read_only", read_only)
        self._owners = {os.geteuid(), *owners}
        self._parent = parent = os.path.abspath(directory)
        self.root = f"{parent}/{ROOT}"
        self._safe: set[str] = set()
        self._common_headers: dict[tuple[str, ...], header.CommonHeader] = {}
        with _named(self.root):
            with suppress(FileExistsError):
                if not read_only:
                    os.mkdir(parent, mode)
            status = os.lstat(parent)
            # In a sticky directory nobody else may rename our folder.
            forbidden = 0 if status.st_mode & stat.S_ISVTX else 0o022 & ~mode
            self._check_owner(parent, status, stat.S_IFDIR, forbidden, {*self._owners, 0})
        self._index = PageIndex(self.root, mode, read_only=read_only)
        if read_only:
            with _named(self.root):
                self._check_folder(self.root)
            return
        self._make_folder(f"{self.root}/tmp")
        self._delete_temporary()
        self._refresh()

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> bool:
        """Store an object."""
        return self.write_all([(key, payload)], contents)[0]

    def write_all(self, payloads: Sequence[Payload], contents: ObjectContents) -> list[bool]:
        """Store objects of equal contents. The index is changed once for some of them."""
        self._check_writable()
        views = [(key, check_payload(payload, contents)) for key, payload in payloads]
        paths = [self._path(key) for key, _ in views]
        # With a limit, they must not displace each other.
        most = _MOST_NEW_BYTES if self.limit is None else min(self.limit // 64, _MOST_NEW_BYTES)
        size = _file_bytes(views[0][0], contents) if views else 1
        count = min(max(1, most // size), _MOST_NEW)
        created = list[bool]()
        for at in range(0, len(views), count):
            created += self._write_some(views[at : at + count], paths[at : at + count], contents)
        return created

    def _write_some(
        self, views: Sequence[Payload], paths: Sequence[str], contents: ObjectContents
    ) -> list[bool]:
        for folder in (f"{self.root}/tmp", *{os.path.dirname(path) for path in paths}):
            if folder in self._safe and not os.path.isdir(folder):  # Somebody deleted it.
                self._safe.clear()
            self._make_folder(folder)
        if self.limit is not None and (new := [p for p in paths if not os.path.lexists(p)]):
            self._make_room(len(new) * _file_bytes(views[0][0], contents), new[0])
        rows: list[Row] = []

        def write(key: ObjectKey, view: memoryview, path: str) -> bool:
            head = header.encode(key, contents, checksum(view))
            created = not os.path.lexists(path) and self._create(path, [memoryview(head), view])
            if not created:  # It counts as stored, so it must be a file that can be read.
                try:
                    self.inspect(key)
                except StoreError as error:
                    if error.problem not in ("absent", "damaged"):
                        raise
            size = len(head) + view.nbytes
            rows.append((_page(key), _item(key.group, key.chunk), size, time.time_ns()))
            return created

        try:
            calls = [(*view, path) for view, path in zip(views, paths, strict=True)]
            created = together(self.threads, write, calls)
        finally:
            with suppress(IndexUnavailable):
                self._index.add(rows)
        for at, path in enumerate(paths):
            # Another process may have deleted the object that was there before it was noted.
            if not created[at] and not os.path.lexists(path):
                created[at] = self.write(*views[at], contents)
        return created

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object."""
        path = self._path(key)
        target = as_bytes(into)
        common = self._common_headers.get(_kind(key))
        guess = start = common.start if common else header.ALIGNMENT
        with self._opened(path, key) as (descriptor, status):
            head = bytearray(guess)
            got = os.preadv(descriptor, [head, target[:_MOST_WRITE]], 0)
            first, expected = bytes(head[:got]), None
            if common and common.num_bytes == target.nbytes:
                expected = common.checksum(first, key.page, status.st_size)
            if expected is None:
                found = self._header(descriptor, status, key, path, first)
                if found.num_bytes != target.nbytes:
                    wanted = f"{target.nbytes} bytes, as the placement has"
                    raise StoreError("foreign", path, "bytes", found.num_bytes, wanted)
                start, expected = found.start, found.checksum
            done = max(0, got - guess) if start == guess else 0
            while done < target.nbytes:
                some = target[done : done + _MOST_WRITE]
                got = os.preadv(descriptor, [some], start + done)
                if not got:
                    raise StoreError("damaged", path, "bytes", done, f"{target.nbytes}")
                done += got
            if (sums := checksum(target)) != expected:
                raise StoreError("damaged", path, "checksum", sums, repr(expected))

    def inspect(self, key: ObjectKey) -> header.Header:
        """Read and check the header of an object. Raise `StoreError` as `read` does."""
        path = self._path(key)
        with self._opened(path, key) as (descriptor, status):
            first = os.pread(descriptor, header.ALIGNMENT, 0)
            return self._header(descriptor, status, key, path, first)

    def has(self, space: str, pages: Sequence[str], items: Sequence[Item]) -> list[bool]:
        """Return for each page whether all its items are stored, as far as the index knows."""
        names = check_pages(space, pages)
        if not self._read_only:
            self._begin_refresh()
        try:
            found = self._index.items(names)
        except IndexUnavailable:
            paths = ([self._path(ObjectKey(space, page, *one)) for one in items] for page in pages)
            return [all(map(os.path.lexists, each)) for each in paths]
        wanted = [f"/{_item(*item)}/" for item in items]
        # Most pages have the same items.
        whole = {text: all(one in text for one in wanted) for text in set(found)}
        return [whole[text] for text in found]

    def pin(self, space: str, pages: Sequence[str], owner: str, duration: float) -> None:
        """Keep pages from eviction."""
        names, longest = check_pages(space, pages), pin_seconds(duration)
        with suppress(IndexUnavailable):  # Without pins, a page that leaves too early is absent.
            self._index.pin(names, owner, longest)

    def use(self, space: str, pages: Sequence[str]) -> None:
        """Note that pages of a prompt are used. Without a limit of bytes, nothing is noted."""
        names = check_pages(space, pages)
        if self.limit is not None:
            with suppress(IndexUnavailable):
                self._index.use(names)

    def unpin(self, owner: str) -> None:
        """End the pins of *owner*."""
        with suppress(IndexUnavailable):
            self._index.unpin(owner)

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        """Remove objects. Raise `StoreError` for a file that is not one."""
        self._check_writable()
        return sum(self._remove(key) for key in keys)

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:
        """Iterate over the files of objects, and their sizes with their headers."""
        for name in self._space_names() if space is None else [check_digest("space", space)]:
            for digits in range(256):
                for page, item, size, _ in self._rows(name, digits):
                    group, _, chunk = item.partition(",")
                    key = ObjectKey(name, page[32:].hex(), unquote(group), unquote(chunk))
                    yield StoredObject(key, size)

    def strays(self) -> Iterator[tuple[Path, str]]:
        """Iterate over the files that are not objects, and what they are."""
        for path in sorted(Path(self.root).rglob("*")):
            inside = path.relative_to(self.root).parts
            if path.is_dir() and not path.is_symlink():
                continue
            if kind := self._kind_of_stray(path, inside):
                yield path, kind

    def remove_strays(self) -> Iterator[str]:
        """Delete damaged objects and old temporary files. Iterate over their names."""
        self._check_writable()
        for path, kind in self.strays():
            with suppress(FileNotFoundError):  # Another process deleted it.
                old = time.time() - path.lstat().st_mtime > TEMPORARY_SECONDS
                if kind == "damaged" or (kind == "temporary" and old):
                    path.unlink()
                    yield str(path)

    def _kind_of_stray(self, path: Path, inside: tuple[str, ...]) -> str:
        """Return the kind of a file that is not an object, or "" for a file of the store."""
        in_place = len(inside) == _OBJECT_DEPTH
        if not path.is_symlink() and path.is_file():
            if inside[:-1] == ("tmp",) and _TEMPORARY.fullmatch(path.name):
                return "temporary"
            if in_place and is_damaged(str(path.parent), path.name):
                return "damaged"
        if inside[0].startswith("index") or path.name == SPACE_FILE:
            return ""
        return "" if key_of(str(path.parent), path.name) else "foreign"

    def describe(self, space: str, description: Mapping[str, str]) -> None:
        """Keep the description of a space in its folder. The first description stays."""
        folder = f"{self.root}/{check_digest('space', space)}"
        if self._read_only:
            return
        self._make_folder(folder)
        if not os.path.exists(f"{folder}/{SPACE_FILE}"):
            text = json.dumps(dict(description), indent=1, sort_keys=True).encode()
            self._create(f"{folder}/{SPACE_FILE}", [memoryview(text)])

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return the description of each space. It is empty if it cannot be read."""
        found: dict[str, Mapping[str, str]] = {}
        for name in self._space_names():
            found[name] = {}
            with suppress(OSError, ValueError, RecursionError, StoreError):
                with self._opened(f"{self.root}/{name}/{SPACE_FILE}") as (descriptor, _):
                    text = json.loads(os.pread(descriptor, header.MAX_HEADER, 0))
                fields = text.items() if isinstance(text, dict) else ()
                found[name] = {str(field): str(value) for field, value in fields}
        return found

    def num_bytes(self) -> int:
        """Return the bytes of all files of objects, as far as the index knows."""
        try:
            return self._index.num_bytes()
        except IndexUnavailable:
            return sum(one.num_bytes for one in self.stored_objects())

    def free_bytes(self, num_bytes: int, keep: int = 0) -> int:
        """Delete the pages that were not used for longest, and are not pinned.

        Args:
            num_bytes: Bytes of files to delete.
            keep: Bytes that stay at least, by the index. Pass it if several processes may delete at
                the same time: each has computed *num_bytes* before the others deleted.

        Returns:
            The number of deleted objects.
        """
        self._check_writable()
        deleted = []

        def delete(page: bytes, items: str) -> bool:
            gone = True
            for item in filter(None, items.split("/")):
                group, _, chunk = map(unquote, item.partition(","))
                key = ObjectKey(page[:32].hex(), page[32:].hex(), group, chunk)
                is_object = False
                try:
                    self.inspect(key)
                    is_object = True
                    deleted.append(self._delete_file(key))
                except SpecError:  # A row of a damaged index may have no key.
                    pass
                except StoreError as error:  # Another kind of file stays.
                    gone = gone and not is_object and error.problem != "failed"
            return gone

        while (num_bytes := self._index.free_bytes(num_bytes, _MOST_FREED, delete, keep)) > 0:
            time.sleep(_FREE_SECONDS)
        return sum(deleted)

    def close(self) -> None:
        """Close the index."""
        self._index.close()

    def _check_writable(self) -> None:
        if self._read_only:
            raise SpecError("read_only", value=True, expected="False, to change objects")

    def _path(self, key: ObjectKey) -> str:
        return f"{self._parent}/{path_of(key)}"

    def _create(self, path: str, parts: list[memoryview]) -> bool:
        """Write a new file and give it its name. Return False if the name exists."""
        temporary = f"{self.root}/tmp/{os.getpid()}-{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        with _named(path):
            try:
                descriptor = os.open(temporary, flags, self._mode & 0o666)
                try:
                    self._fill(descriptor, parts)
                finally:
                    os.close(descriptor)
                os.link(temporary, path, follow_symlinks=False)
            except FileExistsError:
                return False
            finally:
                with suppress(FileNotFoundError):
                    os.unlink(temporary)
        return True

    def _fill(self, descriptor: int, parts: list[memoryview]) -> None:
        os.posix_fallocate(descriptor, 0, sum(part.nbytes for part in parts))
        if self._mode & 0o077:  # The umask would take them away.
            os.fchmod(descriptor, self._mode & 0o666)
        while parts:
            # Linux writes at most 2 GiB a call.
            done = os.writev(descriptor, [part[:_MOST_WRITE] for part in parts])
            while parts and done >= parts[0].nbytes:
                done -= parts.pop(0).nbytes
            if parts:
                parts[0] = parts[0][done:]
        if self._sync:
            os.fsync(descriptor)

    @contextmanager
    def _opened(
        self, path: str, key: ObjectKey | None = None
    ) -> Iterator[tuple[int, os.stat_result]]:
        """Open a file that only the owners can change. Rename it if it turns out to be damaged."""
        # O_NONBLOCK: to open a FIFO would wait for its writer.
        flags = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        with _named(path):
            try:
                if path.rpartition("/")[0] not in self._safe:
                    try:
                        self._check_folder(os.path.dirname(path))
                    except StoreError:
                        if key is not None:
                            self._unlist(key, lambda: True)
                        raise
                descriptor = os.open(path, flags)
            except FileNotFoundError:
                if key is not None:
                    self._unlist(key, lambda: not os.path.lexists(path))
                    raise absent(key) from None
                raise
            status = os.fstat(descriptor)
            try:
                self._check_owner(path, status, stat.S_IFREG, 0o022 & ~self._mode)
                yield descriptor, status
            except StoreError as error:
                if key is not None and error.problem == "damaged":
                    self._set_aside(path, status, key)
                elif key is not None:  # It stays, and a lookup must not find it.
                    self._unlist(key, lambda: True)
                raise
            finally:
                os.close(descriptor)

    def _header(
        self, descriptor: int, status: os.stat_result, key: ObjectKey, path: str, first: bytes
    ) -> header.Header:
        size = header.header_bytes(first, path)
        if size > len(first):
            first = os.pread(descriptor, size, 0)
        found = header.decode(first, status.st_size, path)
        if found.key != key:
            raise StoreError("foreign", path, "key", str(found.key), str(key))
        if common := header.CommonHeader.of(first, found):
            self._common_headers[_kind(key)] = common
        return found

    def _set_aside(self, path: str, status: os.stat_result, key: ObjectKey) -> None:
        def rename() -> bool:
            with suppress(OSError):
                if os.path.samestat(os.lstat(path), status):  # else another process replaced it
                    name = f"{path}{DAMAGED}"
                    if os.path.lexists(name):
                        name = second_name(path, f"{status.st_ino}-{status.st_mtime_ns}")
                    os.rename(path, name)
                    return True
            return False

        if self._read_only:
            return
        self._unlist(key, rename)

    def _unlist(self, key: ObjectKey, gone: Callable[[], bool]) -> bool:
        item, folder = _item(key.group, key.chunk), os.path.dirname(self._path(key))

        def num_bytes(items: str) -> int:
            total = 0
            for one in filter(None, items.split("/")):
                with suppress(OSError):
                    total += os.lstat(f"{folder}/{key.page},{one}{OBJECT_SUFFIX}").st_size
            return total

        try:
            return self._index.discard(_page(key), item, gone, num_bytes)
        except IndexUnavailable:  # It is marked as incomplete now.
            return gone()

    def _remove(self, key: ObjectKey) -> bool:
        try:
            self.inspect(key)
        except StoreError as error:
            if error.problem == "absent":
                return False
            raise
        return self._unlist(key, lambda: self._delete_file(key))

    def _delete_file(self, key: ObjectKey) -> bool:
        path = self._path(key)
        with _named(path), suppress(FileNotFoundError):
            os.unlink(path)
            return True
        return False

    def _make_room(self, num_bytes: int, path: str) -> None:
        if self.limit is None:
            return
        wanted = f"{num_bytes} bytes that are free or not pinned"
        if num_bytes > self.limit:  # To delete pages would not help.
            raise StoreError("full", path, "limit", self.limit, wanted)
        try:
            for pause in (*_PAUSES, None):
                excess = self._index.num_bytes() + num_bytes - self.limit
                if excess > 0:  # A little more, so that not every write has to look for pages.
                    spare = min(self.limit // 64, _MOST_SPARE)
                    self.free_bytes(excess + spare, self.limit - num_bytes - spare)
                    excess = self._index.num_bytes() + num_bytes - self.limit
                if excess <= 0:
                    return
                if pause is None:
                    raise StoreError("full", path, "limit", self.limit, wanted)
                time.sleep(pause)
        except IndexUnavailable as error:
            raise StoreError("failed", path, "index", str(error), "one that works") from error

    def _begin_refresh(self) -> None:
        """Refresh the index, without waiting long for it: a scheduler may wait for the caller."""
        with suppress(IndexUnavailable, OSError):
            if self._index.incomplete():
                thread = threading.Thread(target=self._refresh, daemon=True)
                thread.start()
                thread.join(_REFRESH_SECONDS)

    def _refresh(self) -> None:
        """Read the directory if the index is incomplete, and no other process does so."""
        with suppress(IndexUnavailable, OSError, StoreError):
            if not self._index.incomplete():
                return
            descriptor = os.open(self.root, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            _READING.add(descriptor)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                self._index.begin()
                for name in self._index.keep_spaces(self._space_names):
                    for digits in range(256):
                        prefix = bytes.fromhex(name) + bytes([digits])
                        self._index.replace(prefix, self._readable_rows(name, digits))
                self._index.completed()
            finally:
                _READING.discard(descriptor)
                # A child that is forked now has the descriptor, too.
                fcntl.flock(descriptor, fcntl.LOCK_UN)
                os.close(descriptor)

    def _readable_rows(self, space: str, digits: int) -> Iterable[Row]:
        """Return the rows of a folder. If it is unsafe, no page of it can be read."""
        folder = f"{self.root}/{space}/{digits:02x}"
        with suppress(FileNotFoundError):
            try:
                self._check_folder(folder)
            except StoreError:
                return ()
            if not os.access(folder, os.R_OK | os.X_OK):
                return ()
        return self._rows(space, digits)

    def _rows(self, space: str, digits: int) -> Iterator[Row]:
        folder = f"{self.root}/{space}/{digits:02x}"
        with (
            _named(folder),
            suppress(FileNotFoundError, NotADirectoryError),
            os.scandir(folder) as found,
        ):
            for entry in found:
                key = key_of(folder, entry.name)
                if key is not None and entry.is_file(follow_symlinks=False):
                    with suppress(FileNotFoundError):
                        status = entry.stat(follow_symlinks=False)
                        item = _item(key.group, key.chunk)
                        # A time after the year 2262 exceeds an integer of SQLite.
                        used = min(status.st_mtime_ns, time.time_ns())
                        yield _page(key), item, status.st_size, used

    def _space_names(self) -> list[str]:
        names = []
        for entry in os.scandir(self.root):
            with suppress(SpecError):
                if entry.is_dir(follow_symlinks=False):
                    names.append(check_digest("space", entry.name))
        return sorted(names)

    def _delete_temporary(self) -> None:
        """Delete files that writers left behind when they were killed."""
        for entry in os.scandir(f"{self.root}/tmp"):
            with suppress(OSError):  # It is deleted already, or the disk is read-only.
                status = entry.stat(follow_symlinks=False)
                old = time.time() - status.st_mtime > TEMPORARY_SECONDS
                old = old and _TEMPORARY.fullmatch(entry.name) is not None
                if old and status.st_uid in self._owners and stat.S_ISREG(status.st_mode):
                    Path(entry).unlink()

    def _make_folder(self, folder: str) -> None:
        """Create a folder below the root, and those above it, if they are absent."""
        if folder in self._safe:
            return
        if folder != self.root:
            self._make_folder(os.path.dirname(folder))
        with _named(folder), suppress(FileExistsError):
            os.mkdir(folder, self._mode)
            os.chmod(folder, self._mode)
        self._check_folder(folder)

    def _check_folder(self, folder: str) -> None:
        """Check a folder and those above it, up to the root."""
        if folder != self.root:
            self._check_folder(os.path.dirname(folder))
        if folder not in self._safe:
            self._check_owner(folder, os.lstat(folder), stat.S_IFDIR, 0o777 & ~self._mode)
            self._safe.add(folder)

    def _check_owner(
        self,
        path: str,
        status: os.stat_result,
        kind: int,
        forbidden: int,
        owners: set[int] | None = None,
    ) -> None:
        """Raise `StoreError` if a file is of another kind or owner, or others may change it."""
        if stat.S_IFMT(status.st_mode) != kind:
            wanted = "a directory" if kind == stat.S_IFDIR else "a regular file"
            raise StoreError("unsafe", path, "type", stat.filemode(status.st_mode)[0], wanted)
        if status.st_uid not in (owners or self._owners):
            wanted = f"one of the users {sorted(owners or self._owners)}: or pass it in `owners`"
            raise StoreError("unsafe", path, "owner", status.st_uid, wanted)
        if status.st_mode & forbidden:
            wanted = f"no permissions of {forbidden:#o}: chmod it"
            raise StoreError("unsafe", path, "mode", oct(stat.S_IMODE(status.st_mode)), wanted)


@contextmanager
def _named(path: str) -> Iterator[None]:
    """Raise `StoreError` with the name of the file instead of `OSError`."""
    try:
        yield
    except OSError as error:
        problem: StoreProblem = "failed"
        if error.errno in _FULL:
            problem = "full"
        elif error.errno in _UNSAFE:
            problem = "unsafe"
        found = errno.errorcode.get(error.errno or 0, "?")
        wanted = f"no error of the system ({error.strerror})"
        raise StoreError(problem, path, "errno", found, wanted) from error


def _kind(key: ObjectKey) -> tuple[str, ...]:
    """Return the part of a key that objects with a common header share."""
    return key.space, key.group, key.chunk


def _file_bytes(key: ObjectKey, contents: ObjectContents) -> int:
    return len(header.encode(key, contents, checksum(b""))) + contents.num_bytes


def _page(key: ObjectKey) -> bytes:
    """Return the name of a page in the index."""
    return bytes.fromhex(check_digest("key.space", key.space) + check_digest("key.page", key.page))


@lru_cache(maxsize=4096)
def _item(group: str, chunk: str) -> str:
    """Return the part of a file name that names group and chunk.

    >>> _item("group 0/a", "pp0.tp1")
    'group%200%2Fa,pp0.tp1'
    """
    return f"{quote(group, safe='')},{quote(chunk, safe='')}"


def path_of(key: ObjectKey) -> str:
    """Return the name of the file of an object, from the directory that was passed.

    Raises:
        SpecError: If a field of the key is not possible, or the name is too long.
    """
    space, page, group, chunk = key.checked()
    name = f"{page},{_item(group, chunk)}{OBJECT_SUFFIX}"
    if len(second_name(name, "")) > _MOST_NAME:
        raise SpecError("key", (group, chunk), "shorter names: a file name has 255 bytes")
    return f"{ROOT}/{space}/{page[:2]}/{name}"


def second_name(path: str, version: str) -> str:
    """Return the name of a damaged object if something has its first name.

    Args:
        path: Name of the object.
        version: Text that differs for each object that had the name.
    """
    return f"{path}.{checksum(version.encode())[:8]}{DAMAGED}"


def is_damaged(folder: str, name: str) -> bool:
    """Return whether a file has the name of a damaged object."""
    match = _DAMAGED.fullmatch(name)
    return match is not None and key_of(folder, match[1]) is not None


def key_of(folder: str, name: str) -> ObjectKey | None:
    """Return the key of the object with this file name, or None if no object has such a name."""
    page, _, item = name.removesuffix(OBJECT_SUFFIX).partition(",")
    group, _, chunk = item.partition(",")
    above, _, digits = folder.rpartition("/")
    key = ObjectKey(os.path.basename(above), page, unquote(group), unquote(chunk))
    with suppress(SpecError, UnicodeEncodeError):  # A file name may be no text.
        whole = f"{page},{_item(key.group, key.chunk)}{OBJECT_SUFFIX}"
        return key.checked() if whole == name and digits == page[:2] else None
    return None


def _close_reading() -> None:
    while _READING:
        os.close(_READING.pop())


os.register_at_fork(after_in_child=_close_reading)
