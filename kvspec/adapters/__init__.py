"""Serving engines' own descriptions of their caches, read as this library's.

Each engine is a package, imported when it is first named: ``kvspec.adapters.vllm``.
"""

from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

ENGINES = frozenset(module.name for module in iter_modules(__path__) if module.ispkg)
"""The engines that have an adapter."""


def __getattr__(name: str) -> ModuleType:
    if name not in ENGINES:
        raise AttributeError(f"module 'kvspec.adapters' has no attribute {name!r}")
    return import_module(f"kvspec.adapters.{name}")
