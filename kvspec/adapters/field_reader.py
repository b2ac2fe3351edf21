"""Another's objects, read field by field.

Law: a field that is missing, or is not what it should be, is an error that names the path to it;
nothing of another's class is believed, not even that reading an attribute of it succeeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import attrs

from kvspec.dtypes import dtype_name
from kvspec.errors import SpecError
from kvspec.inputs import positive_int, sequence


@attrs.frozen
class FieldReader:
    """A value of an engine's, and the path by which it was reached; None for a missing field."""

    path: str
    value: Any

    def get(self, name: str) -> FieldReader:
        """Return the field called *name*."""
        path = f"{self.path}.{name}" if self.path else name
        try:
            return FieldReader(path, getattr(self.value, name, None))
        except Exception as error:  # another's property may do anything
            message = f"{type(error).__name__}: {error}"
            raise SpecError(path, message, "a value, not an error") from error

    def call(self, name: str) -> FieldReader:
        """Return what the method called *name* returns."""
        method = self.get(name)
        if not callable(method.value):
            raise SpecError(method.path, method.value, "a method")
        try:
            return FieldReader(f"{method.path}()", method.value())
        except Exception as error:  # so may a method
            message = f"{type(error).__name__}: {error}"
            raise SpecError(f"{method.path}()", message, "a value, not an error") from error

    def size(self, default: int | None = None, least: int = 1) -> int:
        """Return an int of at least *least*; *default*, if there is one, for what is missing."""
        if self.value is None and default is not None:
            return default
        return positive_int(self.path, self.value, least=least)

    def size_or_none(self) -> int | None:
        """Return an int >= 1, or None for what is missing."""
        return None if self.value is None else self.size()

    def sizes(self) -> tuple[int, ...]:
        """Return a sequence of ints >= 1."""
        found = sequence(self.path, self.value, "ints >= 1")
        for each in found:
            if isinstance(each, bool) or not isinstance(each, int) or each < 1:
                raise SpecError(self.path, found, "a sequence of ints >= 1")
        return found

    def dtype(self) -> str:
        """Return the name of a dtype."""
        return dtype_name(self.value, self.path)

    def members(self, wanted: str) -> tuple[FieldReader, ...]:
        """Return the members of a sequence of what is *expected*."""
        found = sequence(self.path, self.value, wanted)
        return tuple(FieldReader(f"{self.path}[{at}]", each) for at, each in enumerate(found))

    def names(self) -> tuple[str, ...]:
        """Return a sequence of layer names."""
        return layer_names(self.path, sequence(self.path, self.value, "layer names"))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put the path before the field of an error."""
        try:
            yield
        except SpecError as error:
            raise SpecError(f"{self.path}.{error.field}", error.value, error.expected) from None


def layer_names(field: str, found: tuple[Any, ...]) -> tuple[str, ...]:
    """Return *found* if each is a non-empty str."""
    for each in found:
        if not isinstance(each, str) or not each:
            raise SpecError(field, each, "layer names, each a non-empty str")
    return found
