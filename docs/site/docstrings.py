"""Prepare what the API reference shows: an extension of griffe, which mkdocstrings uses.

attrs writes `__init__` when a class is created, so a reader of the source cannot see it. The
extension imports the class and copies the signature. It also fences the doctests: Markdown would
take ``>>>`` for a quotation.
"""

from __future__ import annotations

import inspect
import re
from importlib import import_module
from typing import Any

import griffe

KINDS = {
    inspect.Parameter.POSITIONAL_ONLY: griffe.ParameterKind.positional_only,
    inspect.Parameter.POSITIONAL_OR_KEYWORD: griffe.ParameterKind.positional_or_keyword,
    inspect.Parameter.VAR_POSITIONAL: griffe.ParameterKind.var_positional,
    inspect.Parameter.KEYWORD_ONLY: griffe.ParameterKind.keyword_only,
    inspect.Parameter.VAR_KEYWORD: griffe.ParameterKind.var_keyword,
}


DOCTEST = re.compile(r"(?:^|(?<=\n\n))(>>> .*?)(?=\n\n|\Z)", re.DOTALL)


class Docstrings(griffe.Extension):
    """Fences doctests, and adds the constructor to each attrs class."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the doctests in the docstring of *obj*."""
        if obj.docstring:
            obj.docstring.value = DOCTEST.sub(r"```pycon\n\1\n```", obj.docstring.value)

    def on_class(self, *, cls: griffe.Class, **_: Any) -> None:
        """Add `__init__` to *cls* if attrs has generated it."""
        if "__init__" in cls.members or not any("attrs." in str(d.value) for d in cls.decorators):
            return
        signature = inspect.signature(getattr(import_module(cls.module.path), cls.name))
        own = [griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)]
        own += [_parameter(each) for each in signature.parameters.values()]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*own)))


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    default = parameter.default
    if default is inspect.Parameter.empty:
        shown = None
    else:
        # attrs.NOTHING marks a default that a function computes.
        shown = "..." if repr(default) == "NOTHING" else repr(default)
    # A converter accepts more than the type of the field, so the annotation would mislead.
    return griffe.Parameter(parameter.name, kind=KINDS[parameter.kind], default=shown)
