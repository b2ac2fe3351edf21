"""What is asked of a tensor, whether it is torch's or numpy's.

Law: extents, bytes and views; nothing is copied and nothing is known of caches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvspec.errors import SpecError

_AXES = 4


def several(given: Any) -> bool:  # noqa: ANN401
    """Whether *given* is a sequence of tensors, not one."""
    return isinstance(given, Sequence) and not isinstance(given, (str, bytes))


def is_raw(tensor: Any) -> bool:  # noqa: ANN401
    """Whether a tensor is one of raw bytes, ``[blocks, 1, 1, bytes]``."""
    shape = tuple(tensor.shape)
    return len(shape) == _AXES and shape[1:3] == (1, 1) and itemsize(tensor) == 1


def has(tensor: Any, content: int) -> bool:  # noqa: ANN401
    """Whether the last axis is of so many bytes of *content*."""
    return bool(tensor.shape[-1] * itemsize(tensor) == content)


def itemsize(tensor: Any) -> int:  # noqa: ANN401
    """Return the bytes of an element."""
    return int(tensor.itemsize if hasattr(tensor, "strides") else tensor.element_size())


def strides_of(tensor: Any) -> tuple[int, ...]:  # noqa: ANN401
    """Return the strides in bytes."""
    if hasattr(tensor, "strides"):
        return tuple(tensor.strides)
    return tuple(stride * tensor.element_size() for stride in tensor.stride())


def ordered(tensor: Any, order: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return the view whose axes stand in another *order*."""
    return tensor.permute(order) if hasattr(tensor, "permute") else tensor.transpose(order)


def flat(field: str, tensor: Any, shape: tuple[int, ...]) -> Any:  # noqa: ANN401
    """Return *tensor*, called *field*, in a new shape; raise `SpecError` unless that is a view."""
    kept = next(
        (at for at, (a, b) in enumerate(zip(tensor.shape, shape, strict=False)) if a != b),
        len(tensor.shape),
    )
    step = itemsize(tensor)
    dims = list(zip(tensor.shape, strides_of(tensor), strict=True))[kept:]
    for count, stride in reversed(dims):
        if count > 1 and stride != step:
            raise SpecError(f"{field}.stride", stride, f"one piece, {step} bytes apart")
        step *= count
    return tensor.reshape(shape)
