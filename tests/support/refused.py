"""Helpers for refused calls: the error that a call raises, and parameters for tables of calls."""

from __future__ import annotations

import itertools
import pickle
import re
from collections.abc import Callable
from typing import Any

import pytest

import kvspec
from kvspec.errors import shown

NUMBER = itertools.count()


def refusal(call: Callable[[], object], kind: type[Exception] = kvspec.SpecError) -> Any:
    """Return the error of *kind* that *call* raises, after checking that it survives a pickle."""
    with pytest.raises(kind) as caught:
        call()
    error = caught.value
    again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own bytes
    assert (type(error), str(error)) == (type(again), str(again))
    if isinstance(error, kvspec.SpecError):
        assert (
            f"{error.field}={shown(error.value)}: {error.rule or f'expected {error.expected}'}"
            == str(error)
        )
        assert error.field == again.field
    return error


def words(call: Callable[[], object], kind: type[Exception] = kvspec.SpecError) -> str:
    """Return the message of the error that *call* raises."""
    return str(refusal(call, kind))


def case(call: Callable[[], object], message: str) -> Any:
    """Return a test parameter of a call and its expected message.

    The id of the parameter is the message without addresses.
    """
    name = re.sub(r"\d{8,}", "...", message)[:50]
    return pytest.param(call, message, id=f"{next(NUMBER)} {name}")
