"""Names and sizes of element types.

Invariant: inside kvspec a dtype is its name, such as `"bfloat16"`. The dtype objects of torch and
numpy are converted by their text, so that neither has to be imported to learn a size.
"""

from __future__ import annotations

from kvspec.errors import SpecError

# Bytes of one element of each type, by the name that torch gives to the type.
ITEMSIZE: dict[str, int] = {
    "float64": 8,
    "int64": 8,
    "float32": 4,
    "int32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}

# Other names that stand in the configuration of vLLM and of models. There, "fp8" means E4M3.
_DTYPE_ALIASES = {"half": "float16", "float": "float32", "fp8": "float8_e4m3fn"}


def dtype_name(dtype: object, field: str = "dtype") -> str:
    """Return the canonical name of a dtype.

    Args:
        dtype: A name, a `torch.dtype` or a numpy dtype.
        field: Name of the argument for the error.

    Raises:
        SpecError: If the dtype is unknown.

    >>> import numpy as np
    >>> dtype_name("half"), dtype_name(np.dtype("int8"))
    ('float16', 'int8')
    """
    text = str(dtype).removeprefix("torch.")
    name = _DTYPE_ALIASES.get(text, text)
    if isinstance(dtype, (bool, int, float)) or name not in ITEMSIZE:
        raise SpecError(field, dtype, f"one of {', '.join(ITEMSIZE)}")
    return name


def itemsize(dtype: str) -> int:
    """Return the bytes of one element of *dtype*, a canonical name.

    >>> itemsize("bfloat16")
    2
    """
    return ITEMSIZE[dtype]
