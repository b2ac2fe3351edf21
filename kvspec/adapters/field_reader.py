"""Read objects of another library field by field, with errors that name the path to a field.

The adapters import nothing of vLLM or SGLang. So an object may come from any version of the
engine, and may have any fields.

Invariant: an unexpected value raises `SpecError`, and the error names the path to the field. An
exception in a property or method of the engine becomes such an error, too. The value of a missing
field is None. `get` returns it. The methods that convert it raise, unless they allow None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import flag, positive_int, sequence
from kvspec.ownership.dtypes import dtype_name
from kvspec.ownership.parallel import ParallelConfig


@attrs.frozen
class FieldReader:
    """A value of an engine, together with the path by which it was reached.

    Attributes:
        path: The path for error messages, such as ``kv_cache_groups[0].kv_cache_spec``.
        value: The value. None if the field is missing.

    >>> from types import SimpleNamespace
    >>> config = FieldReader("config", SimpleNamespace(num_blocks=0))
    >>> config.get("num_blocks").size()
    Traceback (most recent call last):
    kvspec.errors.SpecError: config.num_blocks=0: expected an int >= 1
    """

    path: str
    value: Any

    def get(self, name: str) -> FieldReader:
        """Return the field called *name*. Its value is None if the field is missing."""
        # `getattr` also returns None if a property of the engine raises AttributeError.
        path = f"{self.path}.{name}" if self.path else name
        return _read(path, lambda: getattr(self.value, name, None))

    def item(self, number: int) -> FieldReader:
        """Return the member at index *number*."""
        return _read(f"{self.path}[{number}]", lambda: self.value[number])

    def call(self, name: str) -> FieldReader:
        """Call the method *name* without arguments and return its result."""
        method = self.get(name)
        if not callable(method.value):
            raise SpecError(method.path, method.value, "a method")
        return _read(f"{method.path}()", method.value)

    def flag(self, *, default: bool) -> bool:
        """Return the value as a bool, or *default* if the field is missing."""
        return default if self.value is None else flag(self.path, self.value)

    def size(self, default: int | None = None, least: int = 1) -> int:
        """Return the value as an int of at least *least*.

        If the field is missing and *default* is not None, return *default*.
        """
        if self.value is None and default is not None:
            return default
        return positive_int(self.path, self.value, least=least)

    def size_or_none(self) -> int | None:
        """Return the value as an int >= 1, or None if the field is missing."""
        return None if self.value is None else self.size()

    def sizes(self) -> tuple[int, ...]:
        """Return the value as a sequence of ints >= 1."""
        numbers = sequence(self.path, self.value, "ints >= 1")
        for number in numbers:
            # A bool is an int in Python, but True is not a size.
            if isinstance(number, bool) or not isinstance(number, int) or number < 1:
                raise SpecError(self.path, numbers, "a sequence of ints >= 1")
        return numbers

    def dtype(self) -> str:
        """Return the value as the name of a dtype."""
        return dtype_name(self.value, self.path)

    def members(self, expected: str) -> tuple[FieldReader, ...]:
        """Return a reader for each member of a sequence. *expected* names them in errors."""
        values = sequence(self.path, self.value, expected)
        return tuple(FieldReader(f"{self.path}[{at}]", value) for at, value in enumerate(values))

    def names(self) -> tuple[str, ...]:
        """Return the value as a sequence of layer names."""
        return layer_names(self.path, sequence(self.path, self.value, "layer names"))

    @contextmanager
    def named(self) -> Iterator[None]:
        """Put this path before the field of a `SpecError` that the `with` block raises."""
        try:
            yield
        except SpecError as error:
            field = f"{self.path}.{error.field}"
            raise SpecError(field, error.value, error.expected, rule=error.rule) from None


def _read(path: str, read: Callable[[], Any]) -> FieldReader:
    try:
        return FieldReader(path, read())
    except Exception as error:  # A property or method of the engine may raise anything.
        message = f"{type(error).__name__}: {error}"
        raise SpecError(path, message, "a value, not an error") from error


def chosen(values: Any, key: str) -> Any:  # noqa: ANN401
    """Return the value of *key* if *values* is a mapping, or else *values* itself.

    >>> chosen({"layers.0": 4}, "layers.0"), chosen({"layers.0": 4}, "layers.1"), chosen(2, "any")
    (4, None, 2)
    """
    return values.get(key) if isinstance(values, Mapping) else values


def check_tp_rank(tp_rank: object, tp_size: int) -> None:
    """Raise `SpecError` unless *tp_rank* is the number of a TP rank."""
    if positive_int("tp_rank", tp_rank, least=0) >= tp_size:
        raise SpecError("tp_rank", tp_rank, f"less than tp_size={tp_size}")


def model_heads(
    heads: Any,  # noqa: ANN401
    key: str,
    local: FieldReader,
    parallel: ParallelConfig,
    tp_rank: int,
) -> int:
    """Return the KV heads of the model, of which the rank *tp_rank* holds the number *local*.

    Args:
        heads: One number, or a number for each layer or group.
        key: Name of the layer or group.
        local: The number of a rank's heads, as the engine reports it.
        parallel: The parallel sizes of the engine.
        tp_rank: The TP rank.

    Raises:
        SpecError: If the number is required, or contradicts *local*.
    """
    # Multiplying the heads of a rank by TP counts replicated heads several times (sglang#19086).
    total, own = chosen(heads, key), local.size()
    if total is None and parallel.tp_size == 1:
        total = own
    if total is None:
        wanted = f"the KV heads of {key!r} in the model: the engine reports those of a rank"
        raise SpecError("total_num_kv_heads", heads, wanted)
    total = positive_int("total_num_kv_heads", total)
    units = len(parallel.sharding(total).ranges[tp_rank])
    if units != own:
        wanted = f"{units}: rank {tp_rank} of {parallel.tp_size} has {units} of the model's {total}"
        raise SpecError(local.path, own, f"{wanted} (total_num_kv_heads) in {key!r}")
    return total


def layer_names(field: str, names: tuple[Any, ...]) -> tuple[str, ...]:
    """Return *names*. Raise `SpecError` unless each is a non-empty str."""
    for name in names:
        if not isinstance(name, str) or not name:
            raise SpecError(field, name, "layer names, each a non-empty str")
    return names
