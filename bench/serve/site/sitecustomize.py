"""Changes to vLLM 0.32 on a CPU. Python imports this file in each process of the servers.

Each change avoids a fault of vLLM's CPU build that one engine alone shows, too. The rows compare
two engines with one engine, so both run with the same changes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import os
import sys
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
    """Take vLLM's own rotary embedding in torch: its CPU kernel leaves the keys of MLA unchanged."""
    base.RotaryEmbedding.forward_cpu = base.RotaryEmbedding.forward_native


AFTER: dict[str, Callable[[Any], None]] = {
    "torch.cpu": _without_amx,
    "vllm.model_executor.layers.rotary_embedding.base": _rotary_in_torch,
}


class _Changes(importlib.abc.MetaPathFinder):
    """Change the modules of `AFTER` after their import."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
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
