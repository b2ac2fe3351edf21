"""The objects of a store: the protocol that each backend follows, and a backend in host memory.

An *object* holds the bytes of one page of one group of one chunk. Its key names them.

Invariant: an object is visible only when it is whole. A reader gets exactly the bytes that were
written under the key, or a `StoreError` that says what is wrong.
"""

from __future__ import annotations

import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cached_property
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import attrs
import xxhash

from kvspec.errors import SpecError, StoreError
from kvspec.inputs import positive_int, seconds
from kvspec.tickets.stated import encodable

MAX_PIN = 3600.0
"""The longest pin in seconds. A pin that would last longer is of a clock that was set back."""
LOOKUP_SECONDS = 10.0
"""The longest search of a lookup in seconds. An engine's scheduler waits for it."""

# For fewer calls no threads are started.
_FEW_CALLS = 4
Result = TypeVar("Result")
_DIGEST = re.compile("[0-9a-f]{64}")

DTYPE_BYTES = {
    name: size
    for size, names in {
        1: "BOOL U8 I8 F8_E4M3 F8_E5M2",
        2: "U16 I16 F16 BF16",
        4: "U32 I32 F32",
        8: "U64 I64 F64",
    }.items()
    for name in names.split()
}
"""Bytes of an element, for each type that the header of an object may name. These are the names
of the safetensors format."""


Item = tuple[str, str]
"""Group and chunk of an object."""


class ObjectKey(NamedTuple):
    """The name of an object.

    Attributes:
        space: Digest of the model and the placement, from `space_of`: 64 hexadecimal digits.
        page: Name of the page, from `page_names`: 64 hexadecimal digits.
        group: Name of the group of layers.
        chunk: Text of the rank of the virtual engine, such as "tp0".

    >>> print(ObjectKey("0" * 64, "f" * 64, "full", "tp0"))
    chunk tp0 of group full of page ffffffffffffffff
    """

    space: str
    page: str
    group: str
    chunk: str

    def __str__(self) -> str:
        return f"chunk {self.chunk} of group {self.group} of page {self.page[:16]}"

    def checked(self) -> ObjectKey:
        """Return the key. Raise `SpecError` if a field is not possible."""
        check_digest("key.space", self.space)
        check_digest("key.page", self.page)
        if not encodable("key.group", self.group) or not encodable("key.chunk", self.chunk):
            raise SpecError("key", self, rule="a group and a chunk have names")
        return self


def check_digest(field: str, value: object) -> str:
    """Return *value* if it has 64 lower-case hexadecimal digits. Raise `SpecError` otherwise."""
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise SpecError(field, value, "64 lower-case hexadecimal digits")
    return value


def check_pages(space: str, pages: Sequence[str]) -> bytes:
    """Return the bytes of all names of pages, each behind those of the space.

    Raises:
        SpecError: If a name, or that of the space, has not 64 hexadecimal digits.
    """
    check_digest("space", space)
    # To check one page by itself takes a microsecond.
    with suppress(TypeError, ValueError):
        text = space.join(("", *pages))
        names = bytes.fromhex(text)
        if names.hex() == text and {*map(len, pages)} <= {len(space)}:
            return names
    return bytes.fromhex("".join(space + check_digest("pages", page) for page in pages))


class StoredTensor(NamedTuple):
    """One tensor of an object: a run of its payload.

    Attributes:
        name: Name of the tensor, such as "model.layers.0.k".
        dtype: Name of the type in the safetensors format, such as "BF16".
        shape: Its lengths.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]


def _tensors(members: Iterable[tuple[str, str, tuple[int, ...]]]) -> tuple[StoredTensor, ...]:
    return tuple(StoredTensor(*member) for member in members)


@attrs.frozen(slots=False, eq=False)
class ObjectContents:
    """The tensors of a payload, and facts about it. All objects of a group and chunk share one.

    Attributes:
        tensors: The tensors in the order of their bytes. They cover the payload.
        facts: Texts for people and for other readers, such as the model.

    >>> ObjectContents([StoredTensor("layers.0.k", "BF16", (16, 8, 128))]).num_bytes
    32768
    """

    tensors: tuple[StoredTensor, ...] = attrs.field(converter=_tensors)
    facts: Mapping[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) < len(names) or "__metadata__" in names:
            raise SpecError("tensors", names, "at least one tensor, each with a name of its own")
        for number, tensor in enumerate(self.tensors):
            if tensor.dtype not in DTYPE_BYTES:
                raise SpecError(
                    f"tensors[{number}].dtype", tensor.dtype, f"one of {[*DTYPE_BYTES]}"
                )
            for length in tensor.shape:
                positive_int(f"tensors[{number}].shape", length)

    @classmethod
    def of_bytes(cls, num_bytes: int, facts: Mapping[str, str] | None = None) -> ObjectContents:
        """Return the contents of a payload that is not divided into tensors."""
        return cls([StoredTensor("payload", "U8", (num_bytes,))], facts or {})

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The first byte after each tensor."""
        ends, end = list[int](), 0
        for tensor in self.tensors:
            end += DTYPE_BYTES[tensor.dtype] * math.prod(tensor.shape)
            ends.append(end)
        return tuple(ends)

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload."""
        return self.ends[-1]


Payload = tuple[ObjectKey, memoryview]
"""An object to write."""


class StoredObject(NamedTuple):
    """One object in the list of a store.

    Attributes:
        key: Its key.
        num_bytes: Bytes of its payload.
    """

    key: ObjectKey
    num_bytes: int


@runtime_checkable
class Objects(Protocol):
    """The methods of a store of objects. Several threads may call each method.

    Attributes:
        threads: Number of objects that a rank should read at the same time.
    """

    threads: int

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> bool:
        """Store an object. It becomes visible only when it is whole.

        Returns:
            False if an object is stored under this key already. It stays as it is.

        Raises:
            StoreError: If there is no room, or the object cannot be written. Nothing is visible.
        """

    def write_all(self, payloads: Sequence[Payload], contents: ObjectContents) -> list[bool]:
        """Store objects of equal contents, as `write` does. Return its result for each one.

        Raises:
            StoreError: As `write`. Some of the other objects may be stored.
        """

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object, whose length must be that of *into*.

        Raises:
            StoreError: If the object is absent or wrong. The bytes of *into* are then undefined.
        """

    def has(self, space: str, pages: Sequence[str], items: Sequence[Item]) -> list[bool]:
        """Return for each page whether all its *items* are stored.

        Only `read` finds out whether they are right.

        Args:
            space: Space of the pages.
            pages: Names of pages.
            items: The group and the chunk of each object that a page must have.
        """

    def pin(self, space: str, pages: Sequence[str], owner: str, duration: float) -> None:
        """Keep pages from eviction. They need not be stored yet.

        Args:
            space: Space of the pages.
            pages: Names of pages.
            owner: Name for `unpin`. An owner has one pin: a second call replaces the first.
            duration: Seconds, at most `MAX_PIN`.
        """

    def use(self, space: str, pages: Sequence[str]) -> None:
        """Note that pages are used, so that they leave late, and the last of them first.

        Args:
            space: Space of the pages.
            pages: Names of pages of a prompt, from its first page on. They need not be stored.
        """

    def unpin(self, owner: str) -> None:
        """End the pins of *owner*, if there are any. Its pages count as used now."""

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        """Remove objects that a store of kvspec wrote. Return how many were there."""

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:
        """Iterate over the stored objects, of one space or of all."""

    def describe(self, space: str, description: Mapping[str, str]) -> None:
        """Keep the description of a space, so that people and `explain` can read it."""

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return the description of each space that has one."""


def checksum(payload: memoryview | bytes | bytearray) -> str:
    """Return the XXH3 hash of a payload as 32 hexadecimal digits. It finds faults, not attackers.

    >>> checksum(b"123456789")
    '33119477ede5dcd5e9716427681d5860'
    """
    return xxhash.xxh3_128_hexdigest(payload)


def together(
    threads: int, call: Callable[..., Result], arguments: Sequence[tuple[Any, ...]]
) -> list[Result]:
    """Return the results of calls that run in some threads. All have ended, also after an error."""
    if threads == 1 or len(arguments) < _FEW_CALLS:
        return [call(*each) for each in arguments]
    results: dict[int, Result] = {}
    # The threads share one iterator: to submit each call takes as long as to read 64 KiB.
    pending = iter([*enumerate(arguments)])

    def work() -> None:
        for at, each in pending:
            results[at] = call(*each)

    with ThreadPoolExecutor(threads) as pool:
        for thread in [pool.submit(work) for _ in range(threads)]:
            thread.result()
    return [results[at] for at in range(len(arguments))]


def as_bytes(view: memoryview) -> memoryview:
    """Return *view* as a view of single bytes."""
    return view.cast("B") if view.format != "B" or view.ndim != 1 else view


def check_payload(payload: memoryview, contents: ObjectContents) -> memoryview:
    """Return *payload* as bytes. Raise `SpecError` if its length is not that of its contents."""
    view = as_bytes(payload)
    if view.nbytes != contents.num_bytes:
        raise SpecError("payload", view.nbytes, f"{contents.num_bytes} bytes, as its tensors have")
    return view


def absent(key: ObjectKey) -> StoreError:
    """Return the error of an object that is not stored."""
    return StoreError("absent", str(key), "object", None, "an object that is stored")


class MemoryObjects:
    """Objects in the memory of this process. The page that was used least recently leaves first.

    Args:
        limit: Most bytes of all payloads, or None.

    >>> objects, key = MemoryObjects(limit=8), ObjectKey("0" * 64, "1" * 64, "full", "tp0")
    >>> objects.write(key, memoryview(b"keys"), ObjectContents.of_bytes(4))
    True
    >>> target = bytearray(4)
    >>> objects.read(key, memoryview(target))
    >>> bytes(target)
    b'keys'
    """

    threads = 1

    def __init__(self, limit: int | None = None) -> None:
        self.limit = None if limit is None else positive_int("limit", limit)
        self._lock = threading.Lock()
        # (space, page) -> key -> (payload, checksum). The page that was used last is at the end.
        self._pages: OrderedDict[tuple[str, str], dict[ObjectKey, tuple[bytes, str]]]
        self._pages = OrderedDict()
        self._bytes = 0
        self._pins: dict[str, tuple[float, frozenset[tuple[str, str]]]] = {}
        self._spaces: dict[str, Mapping[str, str]] = {}

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> bool:
        """Store an object."""
        key.checked()
        view = check_payload(payload, contents)
        with self._lock:
            if key in self._pages.get(key[:2], ()):
                return False
            self._make_room(view.nbytes, key)
            copy = bytes(view)
            self._pages.setdefault(key[:2], {})[key] = copy, checksum(copy)
            self._bytes += len(copy)
        return True

    def write_all(self, payloads: Sequence[Payload], contents: ObjectContents) -> list[bool]:
        """Store objects of equal contents."""
        return [self.write(*each, contents) for each in payloads]

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object."""
        with self._lock:
            stored = self._pages.get(key[:2], {}).get(key)
            if stored is None:
                raise absent(key)
        payload, expected = stored
        if into.nbytes != len(payload):
            raise StoreError("foreign", str(key), "bytes", len(payload), f"{into.nbytes} bytes")
        into[:] = payload
        if (found := checksum(into)) != expected:
            raise StoreError("damaged", str(key), "checksum", found, f"{expected!r}")

    def has(self, space: str, pages: Sequence[str], items: Sequence[Item]) -> list[bool]:
        """Return for each page whether all its items are stored."""
        check_pages(space, pages)
        with self._lock:
            return [
                all(
                    ObjectKey(space, page, *item) in self._pages.get((space, page), ())
                    for item in items
                )
                for page in pages
            ]

    def pin(self, space: str, pages: Sequence[str], owner: str, duration: float) -> None:
        """Keep pages from eviction."""
        check_pages(space, pages)
        until = time.monotonic() + pin_seconds(duration)
        pinned = frozenset((space, page) for page in pages)
        with self._lock:
            self._pins[owner] = until, pinned
        self.use(space, pages)

    def use(self, space: str, pages: Sequence[str]) -> None:
        """Note that pages of a prompt are used."""
        check_pages(space, pages)
        with self._lock:
            for page in reversed(pages):
                if (space, page) in self._pages:
                    self._pages.move_to_end((space, page))

    def unpin(self, owner: str) -> None:
        """End the pins of *owner*."""
        with self._lock:
            self._pins.pop(owner, None)

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        """Remove objects."""
        with self._lock:
            return sum(map(self._remove, keys))

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:
        """Iterate over the stored objects."""
        with self._lock:
            pages = [dict(page) for page in self._pages.values()]
        for page in pages:
            for key, (payload, _) in page.items():
                if space in (None, key.space):
                    yield StoredObject(key, len(payload))

    def describe(self, space: str, description: Mapping[str, str]) -> None:
        """Keep the description of a space."""
        self._spaces.setdefault(check_digest("space", space), dict(description))

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return the description of each space."""
        return dict(self._spaces)

    def _make_room(self, num_bytes: int, key: ObjectKey) -> None:
        if self.limit is None or self._bytes + num_bytes <= self.limit:
            return
        pinned = self._pinned() | {key[:2]}
        fits = num_bytes <= self.limit  # Otherwise it would not help that pages leave.
        for page in [page for page in self._pages if fits and page not in pinned]:
            for other in [*self._pages[page]]:
                self._remove(other)
            if self._bytes + num_bytes <= self.limit:
                return
        raise StoreError("full", str(key), "limit", self.limit, f"{num_bytes} free bytes")

    def _pinned(self) -> set[tuple[str, str]]:
        now = time.monotonic()
        self._pins = {owner: pin for owner, pin in self._pins.items() if pin[0] > now}
        return {page for _, pages in self._pins.values() for page in pages}

    def _remove(self, key: ObjectKey) -> bool:
        page = self._pages.get(key[:2], {})
        stored = page.pop(key, None)
        if stored is None:
            return False
        self._bytes -= len(stored[0])
        if not page:
            del self._pages[key[:2]]
        return True


def pin_seconds(duration: float) -> float:
    """Return the length of a pin. Raise `SpecError` if it is longer than `MAX_PIN`."""
    if seconds("duration", duration) > MAX_PIN:
        raise SpecError("duration", duration, f"at most {MAX_PIN:g} seconds")
    return float(duration)
