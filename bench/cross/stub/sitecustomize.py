"""Answer imports of torchvision with empty modules: SGLang imports it for models with images.

Python imports this file at its start, if its folder is on PYTHONPATH.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Sequence
from typing import Any


class _Absent(types.ModuleType):
    __path__: list[str] = []  # noqa: RUF012 - read by the import system
    __version__ = "0"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,  # noqa: ARG002
        target: types.ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname.split(".", maxsplit=1)[0] != "torchvision":
            return None
        # Libraries ask `importlib.util.find_spec` whether torchvision is installed. It is not.
        frame = sys._getframe(1)  # noqa: SLF001
        while frame is not None:
            if frame.f_globals.get("__name__") == "importlib.util":
                return None
            frame = frame.f_back  # type: ignore[assignment]
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return _Absent(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


sys.meta_path.append(_Finder())
