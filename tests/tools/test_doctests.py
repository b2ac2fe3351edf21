"""Test that the examples in docstrings print the output that they show."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest

import kvspec

pytestmark = pytest.mark.pages

MODULES = [
    "kvspec",
    *(
        module.name
        for module in pkgutil.walk_packages(kvspec.__path__, "kvspec.")
        # The connector cannot be imported without vLLM, and the server not without Starlette.
        if not module.name.endswith(("__main__", "vllm.connector", "cli.view_server"))
    ),
]


@pytest.mark.parametrize("name", MODULES)
def test_examples_of_a_module_print_the_shown_output(name: str) -> None:
    """Each example prints the output in its docstring."""
    module = importlib.import_module(name)
    failed, _ = doctest.testmod(module, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert 0 == failed


def test_modules_have_examples() -> None:
    """The search finds modules and examples, so the other test is not empty."""
    examples = sum(
        len(test.examples)
        for name in MODULES
        for test in doctest.DocTestFinder().find(importlib.import_module(name))
    )
    assert examples > 10
