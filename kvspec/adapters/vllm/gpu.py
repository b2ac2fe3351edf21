"""Wait for the kernels that a worker has given its GPU.

vLLM calls a connector while kernels are queued. A request may end while its draft model still
computes, because vLLM copies a sampled token to the host before the draft runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from kvspec.memory.rank_cache import RankCache


def gpu_of(cache: RankCache) -> int | None:
    """Return the number of the GPU that holds *cache*, or None if it lies in host memory."""
    gpus = {region.device for region in cache.regions if region.memory_type != "DRAM"}
    return min(gpus, default=None)


def submitted_work(gpu: int | None) -> Callable[[], Any]:
    """Return a function that waits until *gpu* has done all that it was given so far.

    Args:
        gpu: The number of the GPU. With None, there is nothing to wait for.
    """
    if gpu is None:
        return int
    import torch  # noqa: PLC0415 - kvspec imports torch only inside functions

    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(gpu))
    wait: Callable[[], Any] = event.synchronize
    return wait
