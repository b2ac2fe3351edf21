"""Real models as data: what their published ``config.json`` says about the cache.

Law: an entry holds published values only, reduced to the keys that `kvspec.models` reads; where the
published file is silent because its model class supplies the value, so is the entry.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from importlib import resources

from kvspec.errors import SpecError

DEFAULT = "Qwen3-0.6B"
"""A small model for examples."""


__all__ = [
    "config",
    "names",
]


def names() -> tuple[str, ...]:
    """Return the names of the models, in the catalogue's order."""
    return tuple(_entries())


def repository(name: str) -> str:
    """Return the model's repository on the Hugging Face Hub."""
    return _entry(name)[0]


def config(name: str) -> dict[str, object]:
    """Return a copy of the model's reduced ``config.json``.

    *name*: one of `names`, or a repository; upper and lower case are equal. Raises `SpecError`
    with the closest names for any other.

    >>> config("qwen3-0.6b")["num_key_value_heads"]
    8
    """
    return copy.deepcopy(_entry(name)[1])


@functools.cache
def _entries() -> dict[str, tuple[str, dict[str, object]]]:
    text = resources.files("kvspec").joinpath("data", "catalogue.json").read_text(encoding="utf-8")
    return {entry["name"]: (entry["repository"], entry["config"]) for entry in json.loads(text)}


def _entry(name: str) -> tuple[str, dict[str, object]]:
    entries = _entries()
    asked = str(name).casefold()
    for known, entry in entries.items():
        if asked in (known.casefold(), entry[0].casefold()):
            return entry
    folded = {known.casefold(): known for known in entries}
    close = [folded[match] for match in difflib.get_close_matches(asked, folded, n=3, cutoff=0.5)]
    hint = f"perhaps {' or '.join(close)}; " if close else ""
    raise SpecError("model", name, f"a model of the catalogue ({hint}known: {', '.join(entries)})")
