"""The objects of a store: the protocol that each backend follows, and a backend in host memory.

An *object* holds the bytes of one page of one group of one chunk. Its key names them.

Invariant: an object is visible only when it is whole. A reader gets exactly the bytes that were
written under the key, or a `StoreError` that says what is wrong.
"""

from __future__ import annotations

import hashlib
import math
import re
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol, runtime_checkable

import attrs
import numpy as np

from kvspec.digests.definition import weights_of
from kvspec.errors import SpecError, StoreError
from kvspec.inputs import positive_int, seconds
from kvspec.tickets.stated import encodable

MAX_PIN = 3600.0
"""The longest pin in seconds. A pin that would last longer is of a clock that was set back."""

_ROW_WORDS, _ROW_BYTES = 512, 4096
_BLOCK_BYTES = 1 << 19
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
    """The methods of a store of objects. Several threads may call each method."""

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> bool:
        """Store an object. It becomes visible only when it is whole.

        Returns:
            False if an object is stored under this key already. It stays as it is.

        Raises:
            StoreError: If there is no room, or the object cannot be written. Nothing is visible.
        """

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object, whose length must be that of *into*.

        Raises:
            StoreError: If the object is absent or wrong. The bytes of *into* are then undefined.
        """

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return whether each object is stored. Only `read` finds out whether it is right."""

    def pin(self, keys: Sequence[ObjectKey], owner: str, duration: float) -> list[bool]:
        """Keep the pages of objects from eviction for *duration* seconds, then look again.

        Args:
            keys: The objects.
            owner: Name for `unpin`. Each owner pins once.
            duration: Seconds, at most `MAX_PIN`.

        Returns:
            Whether each object is stored now that it is pinned.
        """

    def unpin(self, owner: str) -> None:
        """End the pins of *owner*, if there are any."""

    def remove(self, keys: Sequence[ObjectKey]) -> int:
        """Remove objects that a store of kvspec wrote. Return how many were there."""

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:
        """Iterate over the stored objects, of one space or of all."""

    def describe(self, space: str, description: Mapping[str, str]) -> None:
        """Keep the description of a space, so that people and `explain` can read it."""

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return the description of each space that has one."""


def checksum(payload: memoryview | bytes | bytearray) -> str:
    """Return the checksum of a payload as 16 hexadecimal digits. It finds faults, not attackers.

    The payload, padded with zeros, is a table of rows of 512 words of 8 bytes. The sums of its
    rows, in which each word has the weight of its column, and the sums of its columns are
    hashed. For 64 KiB it takes the time of CRC-32, for 1 MiB half of it. Each change of one word
    changes the sum of its row. Two words of a row hide each other only if both sums stay, which
    needs a second row.

    >>> checksum(b"123456789")
    '03cc6b8cdc4eec79'
    """
    data = np.frombuffer(payload, np.uint8)
    if rest := data.size % _ROW_BYTES:
        blocks = [
            data[: data.size - rest],
            np.pad(data[data.size - rest :], (0, _ROW_BYTES - rest)),
        ]
    else:
        blocks = [data]
    hashed = hashlib.sha256(data.size.to_bytes(8, "little"))
    weights, columns = weights_of(_ROW_WORDS), np.zeros(_ROW_WORDS, np.uint64)
    for block in blocks:
        for at in range(0, block.size, _BLOCK_BYTES):  # The cache holds a block for both sums.
            table = block[at : at + _BLOCK_BYTES].view("<u8").reshape(-1, _ROW_WORDS)
            hashed.update(np.einsum("ij,j->i", table, weights).data)
            columns += np.add.reduce(table, axis=0)
    hashed.update(columns.data)
    return hashed.hexdigest()[:16]


def check_payload(payload: memoryview, contents: ObjectContents) -> memoryview:
    """Return *payload* as bytes. Raise `SpecError` if its length is not that of its contents."""
    view = payload.cast("B") if payload.format != "B" or payload.ndim != 1 else payload
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

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object."""
        with self._lock:
            stored = self._pages.get(key[:2], {}).get(key)
            if stored is None:
                raise absent(key)
            self._pages.move_to_end(key[:2])
        payload, expected = stored
        if into.nbytes != len(payload):
            raise StoreError("foreign", str(key), "bytes", len(payload), f"{into.nbytes} bytes")
        into[:] = payload
        if (found := checksum(into)) != expected:
            raise StoreError("damaged", str(key), "checksum", found, f"{expected!r}")

    def has(self, keys: Sequence[ObjectKey]) -> list[bool]:
        """Return whether each object is stored."""
        with self._lock:
            return [key in self._pages.get(key[:2], ()) for key in keys]

    def pin(self, keys: Sequence[ObjectKey], owner: str, duration: float) -> list[bool]:
        """Keep the pages of objects from eviction."""
        until = time.monotonic() + pin_seconds(duration)
        with self._lock:
            pages = frozenset(key[:2] for key in keys)
            self._pins[owner] = until, pages
            for page in pages & self._pages.keys():
                self._pages.move_to_end(page)
            return [key in self._pages.get(key[:2], ()) for key in keys]

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
        for page in [page for page in self._pages if page not in pinned]:
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
