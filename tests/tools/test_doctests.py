"""Every example in a docstring is true."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvspec

MODULES = [
    "kvspec",
    *(
        each.name
        for each in pkgutil.walk_packages(kvspec.__path__, "kvspec.")
        if not each.name.endswith(("__main__", "vllm.connector"))  # which needs vLLM
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_the_examples_of_a_module_are_true(name: str) -> None:
    """What a docstring shows is what is printed."""
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert 0 == failed


def test_there_are_examples() -> None:
    """The modules were found, and some have examples."""
    tried = sum(
        len(test.examples)
        for name in MODULES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert tried > 10
