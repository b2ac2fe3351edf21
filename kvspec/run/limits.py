"""Check the memory and the GPUs of this machine before a run.

Invariant: a run that does not fit is refused before a process starts. The error contains what it
needs and what is available.
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kvspec.errors import SpecError, nbytes

COPIES = 4
"""A consumer has its cache, the bytes before, the expected bytes, and a mask of free bytes."""
PROCESS_BYTES = 50 << 20
"""Bytes of a process with its libraries and agent."""
SHARE = 0.6
"""How much of the available memory a run may take."""


def check_memory(
    caches: Collection[int], staging: int = 0, *, available: int | None = None
) -> None:
    """Check that a run fits into the *available* bytes.

    Args:
        caches: Bytes of the cache of each rank.
        staging: Bytes of the staging buffers of all ranks.
        available: Bytes of memory. Those of this machine by default.

    Raises:
        SpecError: If the run does not fit.
    """
    free = available_bytes() if available is None else available
    need = COPIES * sum(caches) + PROCESS_BYTES * len(caches) + staging
    if free is not None and need > SHARE * free:
        why = f"{nbytes(sum(caches))} of cache on {len(caches)} ranks, {COPIES} times to compare it"
        expected = f"at most {SHARE:.0%} of the free {nbytes(free)}"
        expected += ": fewer tokens, requests or ranks, or a smaller staging buffer"
        raise SpecError("memory", f"{nbytes(need)} ({why})", expected)


def available_bytes() -> int | None:
    """Return the available bytes of memory, or None if the system does not report them."""
    limits: list[int] = []
    memory = Path("/proc/meminfo")
    if memory.exists():
        lines = (line.split() for line in memory.read_text(encoding="ascii").splitlines())
        limits += [int(line[1]) << 10 for line in lines if line[0] == "MemAvailable:"]
    group = Path("/sys/fs/cgroup")
    limit, used = group / "memory.max", group / "memory.current"
    if limit.exists() and used.exists():
        text = limit.read_text(encoding="ascii").strip()
        if text.isdecimal():
            limits.append(int(text) - int(used.read_text(encoding="ascii")))
    return min(limits, default=None)


def devices_of(device: str) -> list[str]:
    """Return the devices that the ranks use in turn: all GPUs for "cuda", else *device* alone.

    Raises:
        SpecError: If there is no such GPU.
    """
    if device == "cpu":
        return [device]
    try:
        import torch  # noqa: PLC0415 - only a GPU needs it, and it starts slowly
    except ImportError:
        raise SpecError("device", device, "cpu: torch is not installed") from None
    count = int(torch.cuda.device_count()) if torch.cuda.is_available() else 0
    if int(device.partition(":")[2] or 0) >= count:
        raise SpecError("device", device, f"cpu, or one of the {count} GPUs that torch sees")
    return [f"cuda:{index}" for index in range(count)] if device == "cuda" else [device]
