"""One tensor of an engine: address, shape, byte strides, and the memory behind it.

Law: what has no bytes of its own in a memory that can be registered is refused, whatever it looks
like; what has is read without importing the framework that made it.
"""

from __future__ import annotations

from inspect import ismethod
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError
from kvspec.memory.region import Memory


@attrs.frozen
class Array:
    """What is read of one tensor; strides are bytes, *dtype* is the framework's own name."""

    address: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    itemsize: int
    memory: Memory
    dtype: str


_DENSE = "a dense tensor on a CPU or a GPU"


def check_tensor(field: str, tensor: Any, name: str | None = None) -> None:  # noqa: ANN401
    """Raise `SpecError` naming *field* unless *tensor* is one, and *name* unless it has memory."""
    name = field if name is None else name
    if isinstance(tensor, np.ndarray):
        if tensor.dtype.hasobject:
            raise SpecError(f"{name}.dtype", str(tensor.dtype), "plain bytes, such as bfloat16")
        if not tensor.dtype.isnative:
            raise SpecError(f"{name}.dtype", str(tensor.dtype), "this machine's order of bytes")
        return
    for needed in ("data_ptr", "stride", "element_size", "untyped_storage", "device", "layout"):
        if not hasattr(tensor, needed):
            raise SpecError(field, type(tensor).__name__, "a torch tensor or a numpy array")
    # A class with a dispatcher of its own stands for other tensors, or for none.
    if ismethod(getattr(type(tensor), "__torch_dispatch__", None)):
        raise SpecError(name, type(tensor).__name__, _DENSE)
    if tensor.device.type == "meta":
        raise SpecError(f"{name}.device", tensor.device.type, _DENSE)
    if str(tensor.layout) != "torch.strided" or getattr(tensor, "is_nested", False):
        told = "nested" if tensor.is_nested else str(tensor.layout)
        raise SpecError(f"{name}.layout", told, _DENSE)
    try:
        tensor.data_ptr(), tensor.untyped_storage()
    except (RuntimeError, NotImplementedError) as error:
        told = "one without a storage of its own (under vmap?)"
        raise SpecError(name, told, _DENSE) from error


def read_array(field: str, name: str, tensor: Any) -> Array:  # noqa: ANN401
    """Read a torch tensor or a numpy array, called *name*, and the storage behind it."""
    check_tensor(field, tensor, name)
    if isinstance(tensor, np.ndarray):
        address, strides = tensor.ctypes.data, tensor.strides
        dtype = str(tensor.dtype)
        return Array(address, tensor.shape, strides, tensor.itemsize, _root(tensor), dtype)
    storage, size = tensor.untyped_storage(), tensor.element_size()
    on_cpu = tensor.device.type == "cpu"
    memory = Memory(
        storage.data_ptr(),
        storage.nbytes(),
        "DRAM" if on_cpu else "VRAM",
        0 if on_cpu else tensor.device.index or 0,
    )
    strides = tuple(each * size for each in tensor.stride())
    dtype = str(tensor.dtype).removeprefix("torch.")
    return Array(tensor.data_ptr(), tuple(tensor.shape), strides, size, memory, dtype)


def _root(array: np.ndarray[Any, Any]) -> Memory:
    """Return the memory of the array that *array* is a view of, however it was made.

    The root may have strides of its own, over a buffer that is no array: what it spans is known.
    """
    root = array
    base = root.base
    while base is not None:
        if isinstance(base, np.ndarray):
            root = base
        base = base.obj if isinstance(base, memoryview) else getattr(base, "base", None)
    steps = [(n - 1) * stride for n, stride in zip(root.shape, root.strides, strict=True) if n]
    first = root.ctypes.data + sum(step for step in steps if step < 0)
    length = sum(map(abs, steps)) + root.itemsize
    return Memory(first, length if root.size else 0)
