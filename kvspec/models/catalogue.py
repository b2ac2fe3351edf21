"""A catalogue of published models: the parts of their ``config.json`` that describe the cache.

Invariant: an entry has only published values, and only the keys that `kvspec.models` uses. If the
published file omits a value because the model class supplies it, the entry omits it as well.
"""

from __future__ import annotations

import copy
import difflib
import functools
import json
from importlib import resources

from kvspec.errors import SpecError

# A small model for examples and for the command line.
DEFAULT = "Qwen3-0.6B"

__all__ = [
    "config",
    "names",
]


def names() -> tuple[str, ...]:
    """Return the names of the models in the order of the catalogue.

    >>> "Llama-3.1-8B" in names()
    True
    """
    return tuple(_models())


def repository(name: str) -> str:
    """Return the repository of a model on the Hugging Face Hub."""
    return _model(name)[0]


def config(name: str) -> dict[str, object]:
    """Return a copy of the reduced ``config.json`` of a model.

    Args:
        name: One of `names`, or a repository on the Hugging Face Hub. Case does not matter.

    Raises:
        SpecError: If the catalogue does not have the model. The message suggests similar names.

    >>> config("qwen3-0.6b")["num_key_value_heads"]
    8
    """
    # A caller may change the dict, and the entries are cached.
    return copy.deepcopy(_model(name)[1])


@functools.cache
def _models() -> dict[str, tuple[str, dict[str, object]]]:
    text = resources.files("kvspec").joinpath("data", "catalogue.json").read_text(encoding="utf-8")
    return {entry["name"]: (entry["repository"], entry["config"]) for entry in json.loads(text)}


def _model(name: str) -> tuple[str, dict[str, object]]:
    entries = _models()
    folded_name = str(name).casefold()
    for known, entry in entries.items():
        if folded_name in (known.casefold(), entry[0].casefold()):
            return entry
    folded = {known.casefold(): known for known in entries}
    matches = difflib.get_close_matches(folded_name, folded, n=3, cutoff=0.5)
    similar = " or ".join(folded[match] for match in matches)
    hint = f"perhaps {similar}; " if similar else ""
    expected = f"a model of the catalogue ({hint}known: {', '.join(entries)})"
    raise SpecError("model", name, expected)
