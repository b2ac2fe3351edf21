"""What is asked of a tensor, whether it is torch's or numpy's.

Law: extents, bytes and views; nothing is copied and nothing is known of caches.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kvspec.errors import SpecError

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

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
            raise SpecError(f"{field}.stride", stride, f"one chunk, {step} bytes apart")
        step *= count
    return tensor.reshape(shape)


def zero(tensors: Iterable[Any], places: npt.NDArray[np.uint64]) -> None:
    """Set the bytes of *places*, rows (address, length), to zero; each lies in a torch tensor's."""
    import torch  # noqa: PLC0415 - whoever has such tensors has loaded it

    def bytes_of(tensor: Any) -> Any:  # noqa: ANN401
        made = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        return made.set_(tensor.untyped_storage())

    whole = map(bytes_of, tensors)
    storages = {storage.data_ptr(): storage for storage in whole}
    starts = sorted(storages)
    for address, length in places.tolist():
        start = starts[bisect_right(starts, address) - 1]
        storages[start][address - start : address - start + length] = 0
