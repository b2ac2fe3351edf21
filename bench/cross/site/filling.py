"""A plug-in of SGLang: fill the memory of the cache whenever the cache is flushed.

It also lets idle schedulers sleep. SGLang's own spin, and there are more of them than cores.

The number is in the file that the environment variable `CROSS_FILLING` names.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

VARIABLE = "CROSS_FILLING"
# Seconds for which an idle scheduler sleeps.
REST = 2e-2


def register() -> None:
    """Hook SGLang's scheduler. SGLang calls this function in each of its processes."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType  # noqa: PLC0415

    flush = "sglang.srt.managers.scheduler.Scheduler.flush_cache"
    HookRegistry.register(flush, _fill, HookType.AFTER)
    idle = "sglang.srt.managers.scheduler.Scheduler.on_idle"
    HookRegistry.register(idle, _rest, HookType.AFTER)


def _rest(*_: Any, **__: Any) -> None:  # noqa: ANN401
    time.sleep(REST)


def _fill(result: Any, scheduler: Any, *_: Any, **__: Any) -> None:  # noqa: ANN401
    if result and os.environ.get(VARIABLE):
        value = float(Path(os.environ[VARIABLE]).read_text(encoding="utf-8"))
        _fill_pool(scheduler.token_to_kv_pool_allocator.get_kvcache(), value)


def _fill_pool(pool: Any, value: float) -> None:  # noqa: ANN401
    for name in ("full_kv_pool", "swa_kv_pool"):
        if hasattr(pool, name):
            _fill_pool(getattr(pool, name), value)
    for name in ("k_buffer", "v_buffer", "kv_buffer"):
        for tensor in getattr(pool, name, None) or ():
            tensor.fill_(value)
