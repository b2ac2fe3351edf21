"""A stand-in for SGLang's kernels, which PyPI has only for CUDA.

It has no arithmetic of a model. SGLang imports many names, so each missing name is a function that
raises when it is called.
"""

from __future__ import annotations

from typing import Any


def assign_req_to_token_pool_cpu(
    req_pool_indices: Any,  # noqa: ANN401
    req_to_token: Any,  # noqa: ANN401
    start_offset: Any,  # noqa: ANN401
    end_offset: Any,  # noqa: ANN401
    out_cache_loc: Any,  # noqa: ANN401
    pool_len: int,  # noqa: ARG001
) -> None:
    """Write the slots of new tokens into the rows of their requests."""
    at = 0
    rows, starts, ends = req_pool_indices.tolist(), start_offset.tolist(), end_offset.tolist()
    for row, start, end in zip(rows, starts, ends, strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start].to(req_to_token.dtype)
        at += end - start


def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name.startswith("__"):
        raise AttributeError(name)

    def missing(*_: object, **__: object) -> None:
        raise NotImplementedError(f"sgl_kernel.{name}")

    missing.__name__ = name
    return missing
