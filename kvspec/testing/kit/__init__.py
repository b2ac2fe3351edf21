"""Judge your own connector by all laws, and report what it supports, refuses and gets wrong.

    name                 use
    `System`             the functions of your connector, and what it supports
    `Supports`           the cases that it supports, as data
    `judge`              draw cases, judge the system, return a `SystemReport`
    `as_code`            print a case as code that builds it again

`docs/test-your-connector.md` is a tutorial. pytest runs the kit with the option ``--kvspec``.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from kvspec.testing.kit.code import as_code
from kvspec.testing.kit.system_report import Judgement, SystemReport, Verdict, WrongCase
from kvspec.testing.laws import System
from kvspec.testing.supports import Supports

if TYPE_CHECKING:
    from kvspec.testing.kit.judging import judge

__all__ = [
    "Judgement",
    "Supports",
    "System",
    "SystemReport",
    "Verdict",
    "WrongCase",
    "as_code",
    "judge",
]


# `judge` is imported on first use, because it needs Hypothesis.
def __getattr__(name: str) -> Any:  # noqa: ANN401
    if name != "judge":
        raise AttributeError(f"module 'kvspec.testing.kit' has no attribute {name!r}")
    return import_module("kvspec.testing.kit.judging").judge
