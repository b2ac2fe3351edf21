"""Questions to a store of objects, by the key of each object."""

from __future__ import annotations

from collections.abc import Sequence

from kvspec.stored.objects import ObjectKey, Objects


def has(objects: Objects, keys: Sequence[ObjectKey]) -> list[bool]:
    """Return whether each object is stored."""
    return [objects.has(key.space, [key.page], [(key.group, key.chunk)])[0] for key in keys]


def pin(objects: Objects, keys: Sequence[ObjectKey], owner: str, duration: float) -> list[bool]:
    """Pin the pages of *keys*, which have one space. Return whether each object is stored."""
    objects.pin(keys[0].space, [key.page for key in keys], owner, duration)
    return has(objects, keys)
