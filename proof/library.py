"""Fresh copies of the modules that are proven, with symbolic names and perhaps a planted fault.

Invariant: the copies are made from the source files that Python imports. Nothing is typed again.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import NamedTuple

from symbolic import IMPORTED, STUBS

import kvspec

# In the order of their imports, so that a copy uses the copies before it.
MODULES = (
    "inputs",
    "ownership.intervals",
    "ownership.tokens",
    "ownership.stripes",
    "ownership.sharding",
    "ownership.parallel",
    "ownership.replicas",
    "ownership.slices",
    "plan.cover",
    "engines.stages",
    "specs.attention",
    "descriptors.request",
    "descriptors.paging",
    "descriptors.tiles",
)


class Plant(NamedTuple):
    """A fault: the module, and the text that is replaced in it, which must be there once."""

    module: str
    before: str
    after: str


class Library(SimpleNamespace):
    """The copies, by the last part of their names, such as `tokens`."""


def load(plant: Plant | None = None, *, symbolic: bool) -> Library:
    """Return copies of `MODULES`.

    Args:
        plant: The fault to plant, or None.
        symbolic: Whether the names in `STUBS` are replaced. Without, the copies run as they are.
    """
    if plant is not None and plant.module not in MODULES:
        raise ValueError(plant.module)
    root = Path(kvspec.__file__).parent
    names = {name: f"kvspec.{name}" for name in MODULES}
    originals = {name: importlib.import_module(full) for name, full in names.items()}
    copies: dict[str, ModuleType] = {}
    try:
        for name, full in names.items():
            path = root.joinpath(*name.split(".")).with_suffix(".py")
            source = path.read_text()
            if plant is not None and plant.module == name:
                if source.count(plant.before) != 1:
                    raise ValueError(
                        f"{name}: {plant.before!r} is there {source.count(plant.before)} times"
                    )
                source = source.replace(plant.before, plant.after)
            copy = ModuleType(full)
            copy.__file__, copy.__package__ = str(path), full.rpartition(".")[0]
            sys.modules[full] = copies[name] = copy
            exec(compile(source, str(path), "exec"), vars(copy))  # noqa: S102 - our own source
    finally:
        sys.modules.update({names[name]: module for name, module in originals.items()})
    if symbolic:
        for copy in copies.values():
            vars(copy).update(STUBS)
            vars(copy).update({k: v for k, v in IMPORTED.items() if k in vars(copy)})
    return Library(**{name.rpartition(".")[2]: copy for name, copy in copies.items()})
