"""Check which field and which value an error rejects."""

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
REJECTED = ("call", "field", "value", "word")
"""The arguments of a test with a table of `row`s."""


def refusal(call: Callable[[], object], kind: type[Exception] = kvspec.SpecError) -> Any:
    """Return the error of *kind* that *call* raises, and check that a pickle preserves it."""
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


def row(call: Callable[[], object], field: str, value: object, word: object = "") -> Any:
    """Return the row of a table: a call, and what `check_rejected` expects of its error."""
    return pytest.param(call, field, value, word, id=f"{next(NUMBER)} {field}")


def check_rejected(
    call: Callable[[], object], field: str, value: object, word: object = ""
) -> kvspec.SpecError:
    """Check the field and the value of the `SpecError` that *call* raises, and return the error.

    Args:
        call: The call that raises.
        field: The field of the error.
        value: The value of the error.
        word: One word, name or number of the requirement, if the field and the value do not
            show which requirement the call breaks.
    """
    error: kvspec.SpecError = refusal(call)
    # Compare values by repr: 1, 1.0 and True are equal, and arrays have no single truth value.
    assert (field, repr(value)) == (error.field, repr(error.value))
    assert has_word(word, error.rule or error.expected)
    return error


def check_values(
    call: Callable[[Any], object], field: str, values: list[Any], word: object = ""
) -> None:
    """Check that *call* rejects each of *values* as the value of *field*."""
    for value in values:
        check_rejected(lambda v=value: call(v), field, value, word)  # type: ignore[misc]


def has_word(word: object, text: str) -> bool:
    """Return whether *text* contains *word* as a whole word. The empty word is always there."""
    return not word or bool(re.search(rf"(?<!\w){re.escape(str(word))}(?!\w)", text))


def has_in_order(facts: list[str], text: str) -> bool:
    """Return whether *text* contains *facts* as whole words, one after the other."""
    pattern = ".*".join(rf"(?<!\w){re.escape(fact)}(?!\w)" for fact in facts)
    return bool(re.search(pattern, text, re.DOTALL))


def differences(error: Any) -> list[tuple[str, object, object]]:
    """Return field, producer's value and consumer's value of each mismatch of *error*."""
    return [(each.field, each.producer, each.consumer) for each in error.mismatches]
