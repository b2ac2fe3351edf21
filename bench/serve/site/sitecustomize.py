"""Changes to vLLM 0.32 on a CPU. Python imports this file in each process of the servers.

Each change avoids a fault of vLLM's CPU build that one engine alone shows, too. The rows compare
two engines with one engine, so both run with the same changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import linecache
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

# vLLM's workers yield and try again. If there are more workers than cores, they keep all other
# processes from running, among them the engines' heartbeats.
os.sched_yield = lambda: time.sleep(1e-3)


def _without_amx(torch_cpu: Any) -> None:  # noqa: ANN401 - a module
    """Report no AMX.

    With AMX, vLLM takes kernels that refuse float32 (MLA) or compute in bfloat16 (convolutions).
    """
    torch_cpu._is_amx_tile_supported = lambda: False  # noqa: SLF001


def _rotary_in_torch(base: Any) -> None:  # noqa: ANN401 - a module
    """Take vLLM's rotary embedding in torch: its CPU kernel leaves the keys of MLA unchanged."""
    base.RotaryEmbedding.forward_cpu = base.RotaryEmbedding.forward_native


def _without_checkpoints(mamba2: Any) -> None:  # noqa: ANN401 - a module
    """Cache no state inside a forward pass: the kernels for CPUs return only the last state."""
    del mamba2.MambaMixer2.get_kv_cache_spec


CONNECTOR = ("/kvspec/", "/kv_connector/v1/nixl/")
_WAITS = ("time.sleep(", ".get(", ".acquire(", ".poll(", ".select(", ".wait(", "sched_yield")


def _sample(folder: str) -> None:
    """Count each 10 ms what the main thread does: it waits, it is in the connector, or other.

    A wait that the connector has called counts as the connector, since it keeps the thread.
    """
    counts = {"connector": 0, "other": 0, "waits": 0}
    main, begun = threading.main_thread().ident, time.monotonic()
    os.makedirs(folder, exist_ok=True)  # noqa: PTH103 - pathlib is not imported at this time
    while True:
        time.sleep(0.01)
        frame = sys._current_frames().get(main or 0)  # noqa: SLF001 - the only way
        if frame is None:
            continue
        at = linecache.getline(frame.f_code.co_filename, frame.f_lineno or 0)
        kind = "waits" if any(each in at for each in _WAITS) else "other"
        while frame is not None:
            if any(each in frame.f_code.co_filename for each in CONNECTOR):
                kind = "connector"
            frame = frame.f_back
        counts[kind] += 1
        if time.monotonic() - begun > 1.0:
            begun = time.monotonic()
            with open(f"{folder}/{os.getpid()}.json", "w") as file:  # noqa: PTH123 - as above
                file.write(json.dumps(counts))


def _sampled(_: Any) -> None:  # noqa: ANN401 - a module
    """Sample the main thread of a process that has a worker."""
    if folder := os.environ.get("KVSPEC_SERVE_SAMPLES"):
        threading.Thread(target=_sample, args=(folder,), daemon=True).start()


AFTER: dict[str, Callable[[Any], None]] = {
    "torch.cpu": _without_amx,
    "vllm.model_executor.layers.mamba.mamba_mixer2": _without_checkpoints,
    "vllm.model_executor.layers.rotary_embedding.base": _rotary_in_torch,
    "vllm.v1.worker.cpu_worker": _sampled,
}


class _Changes(importlib.abc.MetaPathFinder):
    """Change the modules of `AFTER` after their import."""

    def find_spec(
        self, name: str, _: Sequence[str] | None, __: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        change = AFTER.pop(name, None)  # Popped first: the search below comes here again.
        spec = importlib.util.find_spec(name) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def changed(module: ModuleType) -> None:
            load(module)
            change(module)

        spec.loader.exec_module = changed  # type: ignore[method-assign]
        return spec


sys.meta_path.insert(0, _Changes())
