"""A plug-in of SGLang: let its host cache (HiCache) run on a machine without a GPU.

SGLang's copies between the device and the host are kernels for GPUs, and its host memory is
registered with CUDA. Here the device is the CPU, so torch copies, and nothing is registered.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Replace what needs a GPU. SGLang calls this function in each of its processes."""
    import torch  # noqa: PLC0415
    from sglang.srt.mem_cache.pool_host import base, common, mha  # noqa: PLC0415

    if torch.cuda.is_available():
        return
    common._cuda_host_register = _nothing  # noqa: SLF001
    mha._cuda_host_unregister = _nothing  # noqa: SLF001
    mha.transfer_kv_direct = _copy
    # SGLang would leave 10 GB for others, which a small machine does not have.
    base.HICACHE_HOST_MEMORY_RESERVE_BYTES = 0


def _nothing(*_: Any, **__: Any) -> None:  # noqa: ANN401
    pass


def _copy(
    *,
    src_layers: Any,  # noqa: ANN401
    dst_layers: Any,  # noqa: ANN401
    src_indices: Any,  # noqa: ANN401
    dst_indices: Any,  # noqa: ANN401
    page_size: int,  # noqa: ARG001 - each index is of one token
) -> None:
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]
