"""Objects that other programs stored, as a store of kvspec that can only be read.

Invariant: no file is created, changed or deleted, and no name leads out of the store. The format of
none of these programs has a checksum, so a reader finds another length, name or format, but not a
changed byte. The caller has to accept that.
"""

from __future__ import annotations

import errno
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

import attrs
import numpy as np
import numpy.typing as npt

from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, StoreError, StoreProblem
from kvspec.inputs import flag, instance
from kvspec.memory.allocation import plan_memory
from kvspec.memory.region import Region
from kvspec.specs import LayerSpec
from kvspec.specs.formats import PLAIN
from kvspec.specs.key_content import Segment
from kvspec.stored.objects import Item, ObjectContents, ObjectKey, Payload, StoredObject
from kvspec.stored.placement import PageObject, StoredSpec

_FOREIGN_NAME = re.compile(r"[0-9a-f]{32,64}")


class ForeignObjects(ABC):
    """Objects that another program stored. It follows `kvspec.stored.objects.Objects`.

    The names of pages are those of the other program. They begin with its own digest of the tokens,
    so pass them to `PageStore.lookup` and `RankPages.load` in place of the names of kvspec.

    Attributes:
        placement: What the pages are. Pass it to `PageStore`.
    """

    FORMAT: str

    def __init__(
        self, groups: Sequence[KVCacheGroup], placement: StoredSpec, *, accept_unverified: bool
    ) -> None:
        """Describe the pages.

        Args:
            groups: Groups of layers, with the order of keys that the other engine has.
            placement: The placement of the same groups.
            accept_unverified: True, since the format has no checksum.

        Raises:
            SpecError: If the format cannot hold such layers, or an argument is wrong.
        """
        if not flag("accept_unverified", accept_unverified):
            rule = f"{self.FORMAT} has no checksum: pass True to load bytes without a check"
            raise SpecError("accept_unverified", accept_unverified, rule=rule)
        for group in groups:
            for layer in group.layers:
                check_spec(layer, group.spec.of_layer(layer), self.FORMAT)
        self.placement = placement
        self.threads = 4
        self._layers = {name: g.spec.of_layer(name) for g in groups for name in g.layers}
        self._objects = {(each.group, str(each.chunk)): each for each in self.placement.objects}
        self._regions = {each: regions_of(self.placement, each) for each in self.placement.objects}

    @abstractmethod
    def name_of(self, page: str, stored: PageObject) -> str:
        """Return the name under which the other program has stored an object."""

    @abstractmethod
    def has_name(self, name: str) -> bool:
        """Return whether an object of this name is stored."""

    @abstractmethod
    def read_name(self, name: str, stored: PageObject, place: str, into: memoryview) -> None:
        """Read the payload of an object. Raise `StoreError` if it is absent or has another length.

        Args:
            name: Its name.
            stored: Which object of a page it is.
            place: Text for errors.
            into: As many bytes as the placement has.
        """

    def read(self, key: ObjectKey, into: memoryview) -> None:
        """Read the payload of an object, whose length must be that of *into*.

        Raises:
            StoreError: If the object is absent, or does not fit the format.
        """
        stored = self._stored(key)
        expected = self.placement.object_bytes(*stored)
        if into.nbytes != expected:
            raise SpecError("into", into.nbytes, f"{expected} bytes, as the object has")
        self.read_name(self.name_of(key.page, stored), stored, str(key), into.cast("B"))
        for region in self._regions[stored]:
            spec = self._layers[region.layer]
            if segments := spec.segments(region.part):
                sort_keys(region, segments, np.frombuffer(into, np.uint8))

    def has(self, space: str, pages: Sequence[str], items: Sequence[Item]) -> list[bool]:
        """Return for each page whether all its items are stored."""
        keys = [[ObjectKey(space, page, *item) for item in items] for page in pages]
        return [
            all(self.has_name(self.name_of(key.page, self._stored(key))) for key in each)
            for each in keys
        ]

    def pin(self, space: str, pages: Sequence[str], owner: str, duration: float) -> None:  # noqa: B027
        """Do nothing: the other program may remove an object at any time."""

    def use(self, space: str, pages: Sequence[str]) -> None:  # noqa: B027 - as for pins
        """Do nothing."""

    def unpin(self, owner: str) -> None:  # noqa: B027 - there is nothing to end
        """Do nothing."""

    def describe(self, space: str, description: Mapping[str, str]) -> None:  # noqa: B027
        """Do nothing: the store is not written."""

    def spaces(self) -> dict[str, Mapping[str, str]]:
        """Return nothing."""
        return {}

    def stored_objects(self, space: str | None = None) -> Iterator[StoredObject]:  # noqa: ARG002
        """Return nothing: the names of the other program have no space."""
        return iter(())

    def write(self, key: ObjectKey, payload: memoryview, contents: ObjectContents) -> NoReturn:  # noqa: ARG002
        """Raise `StoreError`."""
        raise StoreError("foreign", str(key), "store", self.FORMAT, "a store of kvspec, to write")

    def write_all(self, payloads: Sequence[Payload], contents: ObjectContents) -> list[bool]:
        """Raise `StoreError` if there is an object to write."""
        return [self.write(*each, contents) for each in payloads]

    def remove(self, keys: Sequence[ObjectKey]) -> NoReturn:
        """Raise `StoreError`."""
        place = str(keys[0]) if keys else "nothing"
        raise StoreError("foreign", place, "store", self.FORMAT, "a store of kvspec, to remove")

    def _stored(self, key: ObjectKey) -> PageObject:
        instance("key", key, ObjectKey)
        if not isinstance(key.page, str) or not _FOREIGN_NAME.fullmatch(key.page):
            raise SpecError("key.page", key.page, "32 to 64 lower-case hexadecimal digits")
        stored = self._objects.get((key.group, key.chunk))
        if stored is None:
            raise SpecError("key", f"{key.group} {key.chunk}", f"one of {[*self._objects]}")
        return stored


def check_spec(layer: str, spec: LayerSpec, name: str) -> None:
    """Raise `SpecError` unless *spec* has plain keys and values of one size, or a plain latent.

    Args:
        layer: Name of the layer.
        spec: Its spec.
        name: Name of the format, for the error.
    """
    parts = {part.name: part for part in spec.parts}
    plain = all(part.per_token and part.tokens_per_state == 1 for part in parts.values())
    same = len({(part.units, part.content_bytes) for part in parts.values()}) == 1
    known = [*parts] in (["k", "v"], ["latent"]) and same and spec.counts_prompt
    if not (known and plain and getattr(spec, "page_format", "") == PLAIN) or spec.is_ring:
        rule = f"{name} has keys and values of one size, or latents, without scales of their own"
        raise SpecError(f"groups[...].spec of {layer}", type(spec).__name__, rule=rule)


def regions_of(placement: StoredSpec, stored: PageObject) -> tuple[Region, ...]:
    """Return the regions of one object. A base is the distance from the begin of the payload."""
    whole = plan_memory(placement.engine, stored.chunk, 1).regions
    own = [region for region in whole if region.group == stored.group]
    first = min(region.base for region in own)
    return tuple(attrs.evolve(region, base=region.base - first) for region in own)


def sort_keys(region: Region, segments: Sequence[Segment], payload: npt.NDArray[np.uint8]) -> None:
    """Bring the keys of *region* into the common order of their elements.

    Args:
        region: The keys of a layer.
        segments: Where the other program stores the bytes of a key, see `segments_of`.
        payload: The payload of the object. Its keys change their order.
    """
    order = [
        (start + np.arange(count)[:, None] * stride + np.arange(size)).ravel()
        for start, size, count, stride in segments
    ]
    shape = region.units, region.states, region.content_bytes
    strides = region.unit_stride, region.state_stride, 1
    keys = np.lib.stride_tricks.as_strided(payload[region.base :], shape, strides)
    keys[:] = keys[..., np.concatenate(order)]


@contextmanager
def opened(path: Path, place: str) -> Iterator[tuple[int, int]]:
    """Open a regular file of another program for reading. Return its descriptor and its length.

    Raises:
        StoreError: If it is absent, a link, no regular file, or writable for everybody.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ENOTDIR):
            raise StoreError("absent", place, "file", path.name, "a file that exists") from error
        problem: StoreProblem = "unsafe" if error.errno == errno.ELOOP else "failed"
        expected = f"a file that can be read ({error.strerror})"
        raise StoreError(problem, place, "file", path.name, expected) from error
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_mode & stat.S_IWOTH:
            expected = "a regular file that not everybody can write"
            raise StoreError("unsafe", place, "mode", f"{status.st_mode:o}", expected)
        yield descriptor, status.st_size
        after = os.fstat(descriptor)
        if (after.st_size, after.st_mtime_ns) != (status.st_size, status.st_mtime_ns):
            expected = "a file that does not change while it is read"
            raise StoreError("damaged", place, "file", path.name, expected)
    finally:
        os.close(descriptor)


def read_at(descriptor: int, offset: int, into: memoryview, place: str) -> None:
    """Fill *into* with the bytes of a file at *offset*, or raise `StoreError`."""
    done = 0
    while done < into.nbytes:
        count = os.preadv(descriptor, [into[done:]], offset + done)
        if not count:
            raise StoreError("damaged", place, "bytes", offset + done, f"{offset + into.nbytes}")
        done += count


def copy_object(source: Mapping[str, Any], name: str, place: str, into: memoryview) -> None:
    """Copy the object *name* of a client of a store, or raise `StoreError`."""
    if name not in source:
        raise StoreError("absent", place, "key", name, "an object that is stored")
    check_length(len(content := memoryview(source[name]).cast("B")), place, into)
    into[:] = content


def check_length(length: int, place: str, into: memoryview) -> None:
    """Raise `StoreError` unless an object of *length* bytes has those of *into*."""
    if length != into.nbytes:
        expected = f"{into.nbytes} bytes: the heads may have another size or number"
        raise StoreError("damaged", place, "length", length, expected)
