"""The index of a store of files: which pages there are, which were used last, which are pinned.

Invariant: the index is only a hint. It may be deleted at any time, and the directory is the truth.
A page that the index does not know is computed again. A page that is gone is an absent object.

How it works:
    The index is a database of SQLite beside the pages. One row describes one page, because the
    objects of a page are useful only together:

        pages    page (space and name, 64 bytes), items ("/full,tp0/full,tp1/"), bytes, used
        pins     owner, until (seconds), pages

    `used` is a time in nanoseconds, or one more than the last one. So it grows even if the clock is
    set back. Of several pages that are used together, the first one has the largest number: a page
    is useful only with the pages before it, so the last one leaves first. A pin ends at its time,
    or if it would last longer than `MAX_PIN`.

    Pages of one prompt are added one after the other, so their rows are beside each other, and to
    change `used` of all of them writes few places of the file. It still takes 10 ms for 1,000
    pages, and only `free_bytes` reads `used`. So the use of a prompt is one row of `pins`, too: it
    has ended, and its owner is a checksum of the pages, so that many uses of one prompt are one
    row. `free_bytes` counts the pages of these rows as used, in the order of the rows. If there
    are too many, the oldest ones are counted earlier.

    The database has a directory of its own. If it is corrupt, the directory is renamed, so that the
    files of SQLite stay together. The mark `index.stale` means that the directory must be read
    again. An index gets it if it is new, if it cannot be changed because another process holds its
    lock, or if the machine has started since its last use: nothing waits until the index is on the
    disk. While the directory is read, the mark has the name `index.reading`. So a mark that another
    process makes meanwhile is a new file, and stays.

    SQLite keeps its locks by process, and a child of fork would take those of its parent for its
    own. So each index is closed before a fork, and opened again by the next call.
"""

from __future__ import annotations

import os
import sqlite3
import stat
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from kvspec.errors import KVSpecError
from kvspec.stored.objects import MAX_PIN, checksum

INDEX = "index-1"
"""Name of the directory with the index of this version."""
_SCHEMA = """
CREATE TABLE pages (page BLOB PRIMARY KEY, items TEXT, bytes INTEGER, used INTEGER)

CREATE INDEX pages_by_use ON pages (used)

CREATE TABLE pins (owner TEXT PRIMARY KEY, until REAL, pages BLOB)

CREATE TABLE total (bytes INTEGER)

INSERT INTO total VALUES (0)

CREATE TRIGGER added AFTER INSERT ON pages
BEGIN UPDATE total SET bytes = bytes + new.bytes; END

CREATE TRIGGER changed AFTER UPDATE OF bytes ON pages
BEGIN UPDATE total SET bytes = bytes + new.bytes - old.bytes; END

CREATE TRIGGER removed AFTER DELETE ON pages
BEGIN UPDATE total SET bytes = bytes - old.bytes; END

PRAGMA user_version = 1
"""
_ADD = """
INSERT INTO pages
VALUES (?, '/' || ? || '/', ?, max(?, (SELECT ifnull(max(used), 0) + 1 FROM pages)))
ON CONFLICT (page) DO UPDATE
SET items = items || substr(excluded.items, 2), bytes = bytes + excluded.bytes, used = excluded.used
WHERE NOT instr(items, excluded.items)
"""
_ADD_OLD = """
INSERT INTO pages VALUES (?, '/' || ? || '/', ?, ?)
ON CONFLICT (page) DO UPDATE
SET items = items || substr(excluded.items, 2), bytes = bytes + excluded.bytes
"""
# One statement for all pages takes half the time of one with a parameter for each page. Most pages
# have equal items, which it leaves out: a row takes as long as the search for it.
_ITEMS = """
WITH RECURSIVE wanted (at)
AS (SELECT 0 WHERE ?2 UNION ALL SELECT at + 1 FROM wanted WHERE at + 1 < ?2)
SELECT at, items FROM wanted LEFT JOIN pages ON page = substr(?1, 64 * at + 1, 64)
WHERE items IS NOT ?3
"""
# The codes of a missing table, of a damaged file, and of a file of another kind. Besides, a read is
# too short if somebody has deleted or cut a file of an open index.
_USELESS = {sqlite3.SQLITE_ERROR, sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_PAGE_BYTES = 64
# The end of a row that is only a use; the most bytes of all such rows, and what a short row counts.
_ENDED = 0.0
_MOST_NOTED, _LEAST_NOTED = 1 << 20, 1 << 14
_HAS_ENDED = "(until < ? OR until > ?)"
# The largest integer of SQLite.
_MOST_USED = (1 << 63) - 1
# The wait of a call after one that waited in vain. SQLite tries again every 0.1 seconds at worst.
_IMPATIENT_SECONDS = 0.1
_BOOT_ID = "/proc/sys/kernel/random/boot_id"

_INDEXES: weakref.WeakSet[PageIndex] = weakref.WeakSet()
_FORKING = threading.Lock()
_CLOSED: list[PageIndex] = []  # Those that wait for the end of a fork.

Row = tuple[bytes, str, int, int]
"""One object in one row: page, item, bytes, and the time of its last use in nanoseconds."""


class IndexUnavailable(KVSpecError):  # noqa: N818 - it is no fault: callers do without the index
    """The index cannot be used now."""


class PageIndex:
    """The index of one directory. Threads and processes share it.

    Args:
        root: The directory of the store.
        mode: Permissions of the directory of the index.
        lock_seconds: How long to wait for another process that changes the index. After a call that
            waited in vain, the next calls wait at most 0.1 seconds, until one of them succeeds.
        read_only: Whether to change no file. SQLite writes even if it only reads, so the index is
            then unavailable.
    """

    def __init__(
        self, root: str, mode: int, *, lock_seconds: float = 5.0, read_only: bool = False
    ) -> None:
        self._folder, self._stale = Path(root, INDEX), Path(root, "index.stale")
        self._reading = Path(root, "index.reading")
        self._path = f"{self._folder}/pages.sqlite3"
        self._mode = mode
        self._lock_seconds = self._waits = lock_seconds
        self._read_only = read_only
        self._lock = threading.RLock()
        self._sql: sqlite3.Connection | None = None
        self._opened_as: tuple[int, ...] | None = None
        self._usual: str | None = None  # The items of the page that was found last.
        # A child of fork must not close the connection of its parent, so it keeps the object.
        self._of_parents: list[sqlite3.Connection] = []
        with _FORKING:  # A fork goes through all indexes.
            _INDEXES.add(self)

    def incomplete(self) -> bool:
        """Return whether the directory must be read again."""
        with self._open():  # It marks an index that is new or old.
            pass
        return os.path.lexists(self._stale) or os.path.lexists(self._reading)

    def begin(self) -> None:
        """Note that this process reads the directory now. No other one may do so meanwhile."""
        with suppress(FileNotFoundError):  # Only the mark of a killed reader is there.
            self._stale.rename(self._reading)

    def completed(self) -> None:
        """Note that the directory was read since `begin`. Later marks stay."""
        self._reading.unlink(missing_ok=True)

    def add(self, rows: Iterable[Row]) -> None:
        """Note objects. An object that is known is noted once."""
        with self._changing() as sql:
            sql.executemany(_ADD, rows)

    def replace(self, prefix: bytes, rows: Iterable[Row]) -> None:
        """Make the index of all pages with a prefix equal to *rows*. They keep their last use."""
        last = prefix.ljust(_PAGE_BYTES, b"\xff")
        with self._changing() as sql:
            known = dict(
                sql.execute(
                    "SELECT page, used FROM pages WHERE page BETWEEN ? AND ?", (prefix, last)
                )
            )
            sql.execute("DELETE FROM pages WHERE page BETWEEN ? AND ?", (prefix, last))
            own = ((page, item, size, known.get(page, used)) for page, item, size, used in rows)
            sql.executemany(_ADD_OLD, own)

    def keep_spaces(self, names: Callable[[], Sequence[str]]) -> Sequence[str]:
        """Forget the pages of all spaces but those that *names* returns, and return these.

        *names* runs while no other process can add an object. So it sees the folder of each space
        that the index knows.
        """
        with self._changing() as sql:
            spaces = names()
            marks = ",".join("?" * len(spaces))
            which = f"DELETE FROM pages WHERE substr(page, 1, 32) NOT IN ({marks})"  # noqa: S608
            sql.execute(which, [bytes.fromhex(space) for space in spaces])
            # A loss of power may leave a sum of other rows.
            sql.execute("UPDATE total SET bytes = (SELECT ifnull(sum(bytes), 0) FROM pages)")
            return spaces

    def discard(
        self, page: bytes, item: str, gone: Callable[[], bool], num_bytes: Callable[[str], int]
    ) -> bool:
        """Forget one object if *gone* returns that its file is gone.

        *gone* runs while no other process can add the object. So a process that writes the object
        again at this time adds it afterwards. *num_bytes* returns the bytes of the files of the
        items that are left: the file that is gone may have had another size than it was noted with.
        """
        with self._changing() as sql:
            if not gone():
                return False
            row = sql.execute("SELECT items FROM pages WHERE page = ?", (page,)).fetchone()
            if row is not None:
                left = _checked(row, str)[0].replace(f"/{item}/", "/")
                change = "UPDATE pages SET items = ?, bytes = ? WHERE page = ?"
                sql.execute(change, (left, num_bytes(left), page))
                sql.execute("DELETE FROM pages WHERE page = ? AND items = '/'", (page,))
            return True

    def items(self, pages: bytes) -> list[str]:
        """Return the items of each page, or "" for a page that is not known."""
        count = len(pages) // _PAGE_BYTES
        with self._open() as sql:
            found = [self._usual or ""] * count
            for row in sql.execute(_ITEMS, (pages, count, self._usual)):
                at, items = row
                found[at] = "" if items is None else _checked((items,), str)[0]
            self._usual = found[0] if count and found[0] else self._usual
        return found

    def num_bytes(self) -> int:
        """Return the bytes of all files of objects."""
        with self._open() as sql:
            total: tuple[int] = _checked(sql.execute("SELECT bytes FROM total").fetchone(), int)
            return total[0]

    def pin(self, pages: bytes, owner: str, duration: float) -> None:
        """Keep pages from eviction for some seconds."""
        with self._changing() as sql:
            row = owner, time.time() + duration, pages
            sql.execute("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", row)
            _count_old_uses(sql)  # A pin of a killed process is ended by nobody.

    def use(self, pages: bytes) -> None:
        """Note that *pages* of a prompt, from its first page on, are used now."""
        if pages:
            with self._changing() as sql:
                _note(sql, pages)

    def unpin(self, owner: str) -> None:
        """End the pins of *owner*. Its pages count as used now."""
        with self._changing() as sql:
            pin = sql.execute("SELECT pages FROM pins WHERE owner = ?", (owner,)).fetchone()
            sql.execute("DELETE FROM pins WHERE owner = ?", (owner,))
            if pin is not None and _checked(pin, bytes)[0]:
                _note(sql, pin[0])

    def free_bytes(
        self, num_bytes: int, most_objects: int, delete: Callable[[bytes, str], bool], keep: int = 0
    ) -> int:
        """Delete the pages that were not used for longest, without those that are pinned.

        Args:
            num_bytes: Bytes that the pages must have in sum.
            most_objects: Objects after which no further page is deleted, because the index is
                locked meanwhile.
            delete: Deletes the files of a page and its items, while no other process can add them.
                Returns False if one stays that may be deleted later. Then the page stays, too.
            keep: Bytes that stay at least. Other processes may have deleted pages meanwhile.

        Returns:
            The number of bytes that are left to delete, if there are such pages.
        """
        with self._changing() as sql:
            num_bytes = min(num_bytes, self.num_bytes() - keep)
            now = time.time()
            _count_uses(sql, _HAS_ENDED, now, now + MAX_PIN)
            pins = [_checked(row, bytes)[0] for row in sql.execute("SELECT pages FROM pins")]
            pinned = {page for pages in pins for page in _split(pages)}
            taken = []
            oldest = sql.execute("SELECT page, items, bytes FROM pages ORDER BY used")
            for row in oldest:
                if num_bytes <= 0 or most_objects <= 0:
                    break
                page, items, size = _checked(row, bytes, str, int)
                if page not in pinned:
                    taken.append((page, items))
                    num_bytes -= size
                    most_objects -= items.count("/") - 1
            oldest.close()
            gone, left = list[tuple[bytes]](), list[tuple[int, bytes]]()
            for page, items in taken:
                if delete(page, items):
                    gone.append((page,))
                else:  # Other pages are tried before it.
                    left.append((time.time_ns(), page))
            sql.executemany("DELETE FROM pages WHERE page = ?", gone)
            sql.executemany("UPDATE pages SET used = ? WHERE page = ?", left)
            return 0 if most_objects > 0 else num_bytes

    def close(self) -> None:
        """Close the database. The next call opens it again."""
        with self._lock:
            if self._sql is not None:
                if self._is_own():
                    self._sql.close()
                else:
                    self._of_parents.append(self._sql)
            self._sql = None

    def _is_own(self) -> bool:
        """Return whether this process opened the connection."""
        return self._opened_as is not None and self._opened_as[0] == os.getpid()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        """Run statements as one transaction."""
        with self._marking(), self._open() as sql:
            if sql.in_transaction:  # A function that was passed to this index calls it.
                yield sql
                return
            try:  # A signal that comes while BEGIN waits raises its exception behind it.
                sql.execute("BEGIN IMMEDIATE")
                yield sql
                sql.execute("COMMIT")
                self._wait(self._lock_seconds)
            except BaseException:
                with suppress(sqlite3.Error):
                    sql.execute("ROLLBACK")
                raise

    @contextmanager
    def _marking(self) -> Iterator[None]:
        """Mark the index as incomplete if it cannot be changed."""
        try:
            yield
        except IndexUnavailable:
            with suppress(OSError):
                if not self._read_only:
                    self._mark()
            raise

    def _mark(self) -> None:
        """Mark the index as incomplete."""
        create = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(self._stale, create, self._mode & 0o666)
        try:
            self._share(descriptor, self._mode & 0o666)
            os.utime(descriptor)
        finally:
            os.close(descriptor)

    def _share(self, path: str | Path | int, mode: int) -> None:
        """Set permissions for other users, which the umask would take away."""
        if mode & 0o077:
            with suppress(PermissionError):  # Another user has created it.
                os.chmod(path, mode)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Yield the connection of this process to the file that has the name now."""
        if self._read_only:
            raise IndexUnavailable(f"{self._path}: the store is opened for reading")
        with self._lock:
            found = None
            try:
                if self._sql is not None and self._sql.in_transaction and self._is_own():
                    # A function that was passed to this index calls it. The transaction must not
                    # lose its connection, also if somebody has just deleted the index.
                    yield self._sql
                    return
                found = self._identity()
                if self._sql is None or found is None or found != self._opened_as:
                    self.close()
                    self._sql = self._connect()
                    self._opened_as = found = self._identity()
                yield self._sql
            except (sqlite3.Error, UnicodeDecodeError) as error:
                # Rows with other types, or with a text that is not UTF-8, have no code. Nor has a
                # damage of which SQLite's own message is not UTF-8.
                code = getattr(error, "sqlite_errorcode", sqlite3.SQLITE_CORRUPT)
                if code & 0xFF in _USELESS or code == sqlite3.SQLITE_IOERR_SHORT_READ:
                    self._set_aside(found)
                elif code & 0xFF == sqlite3.SQLITE_BUSY:
                    # The other process may be stopped. A scheduler waits for several calls.
                    self._wait(min(self._lock_seconds, _IMPATIENT_SECONDS))
                raise IndexUnavailable(f"{self._path}: {error}") from error
            except OSError as error:
                raise IndexUnavailable(f"{self._path}: {error}") from error

    def _wait(self, lock_seconds: float) -> None:
        """Change how long the next calls wait for another process."""
        if lock_seconds != self._waits:
            self._waits = lock_seconds
            if self._sql is not None:
                self._sql.execute(f"PRAGMA busy_timeout = {int(1000 * lock_seconds)}")

    def _identity(self) -> tuple[int, ...] | None:
        try:
            status = os.lstat(self._path)
        except FileNotFoundError:
            return None
        if not stat.S_ISREG(status.st_mode):
            raise IndexUnavailable(f"{self._path}: not a file")
        return os.getpid(), status.st_dev, status.st_ino

    def _connect(self) -> sqlite3.Connection:
        if not os.path.exists(self._path):
            with suppress(FileExistsError):
                self._folder.mkdir(self._mode)
                self._share(self._folder, self._mode)
            # To close a file ends all locks of this process on it, also those of other threads.
            # So the file has another name until it is closed.
            new = f"{self._path}.{os.getpid()}-{time.time_ns()}"
            create = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC
            descriptor = os.open(new, create, self._mode & 0o666)
            try:
                self._share(descriptor, self._mode & 0o666)
            finally:
                os.close(descriptor)
            try:
                with suppress(FileExistsError):
                    os.link(new, self._path)
            finally:
                os.unlink(new)
        sql = sqlite3.connect(
            self._path, self._waits, isolation_level=None, check_same_thread=False
        )
        try:
            self._set_up(sql)
        except BaseException:
            sql.close()  # It refers to itself, so Python would close it much later.
            raise
        return sql

    def _set_up(self, sql: sqlite3.Connection) -> None:
        # After a loss of power the index may be old or corrupt. The directory is the truth.
        for setting in ("journal_mode = WAL", "synchronous = OFF", "trusted_schema = OFF"):
            sql.execute(f"PRAGMA {setting}")
        sql.execute("PRAGMA cache_size = -8000")  # 8 MB: the inner nodes of 10^6 pages fit in.
        if not self._is_current(sql):
            with sql:
                sql.execute("BEGIN IMMEDIATE")
                if not self._is_current(sql):
                    self._mark()
                    if not sql.execute("PRAGMA user_version").fetchone()[0]:
                        for statement in _SCHEMA.split("\n\n"):
                            sql.execute(statement)
                    sql.execute(f"PRAGMA application_id = {_boot()}")

    def _is_current(self, sql: sqlite3.Connection) -> bool:
        """Return whether the index has tables, and was used since the machine started."""
        pragmas = ("PRAGMA user_version", "PRAGMA application_id")
        version, boot = (sql.execute(each).fetchone()[0] for each in pragmas)
        return bool(version) and boot == _boot()

    def _set_aside(self, found: tuple[int, ...] | None) -> None:
        """Rename a useless index, unless another process has replaced it already."""
        self.close()
        with suppress(OSError):
            self._mark()
            if self._identity() == found:
                self._folder.rename(f"{self._folder}.damaged-{os.getpid()}-{time.time_ns()}")


def _note(sql: sqlite3.Connection, pages: bytes) -> None:
    """Keep the use of *pages* in a row, until `_count_uses`. Pins that have ended are uses, too."""
    row = checksum(pages).encode(), _ENDED, pages
    sql.execute("INSERT OR REPLACE INTO pins VALUES (?, ?, ?)", row)
    _count_old_uses(sql)


def _count_old_uses(sql: sqlite3.Connection) -> None:
    """Count the oldest uses and ended pins if there are too many."""
    which, now = f"SELECT rowid, length(pages) FROM pins WHERE {_HAS_ENDED}", time.time()  # noqa: S608
    room = _MOST_NOTED
    ended = sql.execute(f"{which} ORDER BY rowid DESC", (now, now + MAX_PIN)).fetchall()
    for row in ended:
        number, length = _checked(row, int, int)
        room -= max(length, _LEAST_NOTED)
        if room < 0:
            _count_uses(sql, f"{_HAS_ENDED} AND rowid <= ?", now, now + MAX_PIN, number)
            break


def _count_uses(sql: sqlite3.Connection, which: str, *values: object) -> None:
    """Count the pages of some pins as used, in the order of the pins, and delete these."""
    rows = sql.execute(f"SELECT pages FROM pins WHERE {which} ORDER BY rowid", values).fetchall()  # noqa: S608
    used: dict[bytes, None] = {}  # From the page that was used least recently on.
    for row in rows:
        pages = _checked(row, bytes)[0]
        for page in reversed([*_split(pages)]):
            used.pop(page, None)
            used[page] = None
    last = _checked(sql.execute("SELECT ifnull(max(used), 0) FROM pages").fetchone(), int)[0]
    start = min(max(time.time_ns(), last + 1), _MOST_USED - len(used))
    sql.executemany("UPDATE pages SET used = ? WHERE page = ?", enumerate(used, start))
    sql.execute(f"DELETE FROM pins WHERE {which}", values)  # noqa: S608


def _checked(row: Any, *kinds: type) -> Any:  # noqa: ANN401 - the values of any row
    """Return *row* if its values have these types. SQLite does not compare them when it reads."""
    if row is None or tuple(map(type, row)) != kinds:
        raise sqlite3.DatabaseError(f"{row!r} is not a row of this index")
    return row


def _split(pages: bytes) -> Iterator[bytes]:
    return (pages[at : at + _PAGE_BYTES] for at in range(0, len(pages), _PAGE_BYTES))


def _boot() -> int:
    """Return a number of this start of the machine, or 0 if it is not known.

    SQLite keeps it in 32 bits with a sign, so it has 28 bits.
    """
    try:
        return int(Path(_BOOT_ID).read_text("ascii")[:7], 16)
    except (OSError, ValueError):
        return 0


def _before_fork() -> None:
    """Close all indexes. Other threads wait, so that no lock is copied while it is held.

    Python prints an exception that is raised here, such as that of a signal, and forks. So it is
    raised at the end.
    """
    interrupts = _acquire(_FORKING)
    for index in [*_INDEXES]:
        interrupts += _acquire(index._lock)  # noqa: SLF001
        _CLOSED.append(index)
        if index._sql is None or not index._sql.in_transaction:  # noqa: SLF001
            index.close()
    for interrupt in interrupts:
        raise interrupt


def _acquire(lock: Any) -> list[BaseException]:  # noqa: ANN401 - RLock is no type
    """Acquire a lock. Return the exceptions of signals that came meanwhile."""
    interrupts = list[BaseException]()
    while True:
        try:
            lock.acquire()
        except BaseException as interrupt:  # noqa: BLE001 - the caller raises it
            interrupts.append(interrupt)
        else:
            return interrupts


def _after_fork() -> None:
    while _CLOSED:
        _CLOSED.pop()._lock.release()  # noqa: SLF001
    _FORKING.release()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)
