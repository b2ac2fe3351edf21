"""Objects with numbered pages, and questions to a store of them by the key of each object."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from kvspec.errors import StoreError
from kvspec.stored.objects import ObjectContents, ObjectKey, Objects

SPACE = "5a" * 32
SIZE = 6000
CONTENTS = ObjectContents.of_bytes(SIZE, {"model": "org/m"})


def key(page: int, chunk: str = "tp0", group: str = "full") -> ObjectKey:
    return ObjectKey(SPACE, f"{page:064x}", group, chunk)


def payload(page: int) -> memoryview:
    return memoryview(bytes([page % 256, 7]) * (SIZE // 2))


def put(objects: Objects, *pages: int) -> None:
    for page in pages:
        assert objects.write(key(page), payload(page), CONTENTS)


def get(objects: Objects, page: int) -> bytes:
    target = bytearray(SIZE)
    objects.read(key(page), memoryview(target))
    return bytes(target)


def problem(objects: Objects, page: int) -> tuple[str, str]:
    with pytest.raises(StoreError) as caught:
        get(objects, page)
    return caught.value.problem, caught.value.field


def has(objects: Objects, keys: Sequence[ObjectKey]) -> list[bool]:
    """Return whether each object is stored."""
    return [objects.has(key.space, [key.page], [(key.group, key.chunk)])[0] for key in keys]


def pin(objects: Objects, keys: Sequence[ObjectKey], owner: str, duration: float) -> list[bool]:
    """Pin the pages of *keys*, which have one space. Return whether each object is stored."""
    objects.pin(keys[0].space, [key.page for key in keys], owner, duration)
    return has(objects, keys)
