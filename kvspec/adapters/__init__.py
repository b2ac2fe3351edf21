"""Adapters: read a serving engine's own description of its caches into kvspec's types.

Each engine has a package, which is imported when it is first named: `kvspec.adapters.vllm`.

>>> import kvspec
>>> sorted(kvspec.adapters.ENGINES)
['sglang', 'transformers', 'vllm']
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

# The engines that have an adapter.
ENGINES = frozenset(module.name for module in iter_modules(__path__) if module.ispkg)


def __getattr__(name: str) -> ModuleType:
    if name not in ENGINES:
        raise AttributeError(f"module 'kvspec.adapters' has no attribute {name!r}")
    return import_module(f"kvspec.adapters.{name}")
