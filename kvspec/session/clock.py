"""The clock of a session for leases, heartbeats and timeouts."""

from __future__ import annotations

import time

_BOOT = getattr(time, "CLOCK_BOOTTIME", None)


def since_boot() -> float:
    """Return seconds that never go back, and that count while the machine is suspended.

    `time.monotonic` stands still during a suspend on Linux. It is used only where the system has no
    `CLOCK_BOOTTIME`. A paused virtual machine may stop both clocks, so neither may decide that
    bytes are valid.
    """
    return time.monotonic() if _BOOT is None else time.clock_gettime(_BOOT)
