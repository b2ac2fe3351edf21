"""A case as code: the code runs, builds an equal case, and has no field with its default."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings

from kvspec.testing import Case, strategies
from kvspec.testing.kit import as_code
from kvspec.testing.kit.code import WIDTH


@settings(max_examples=25)
@given(strategies.twins() | strategies.sharing_cases().map(lambda case: (case, None)))
def test_code_builds_an_equal_case(pair: tuple[Case, Case | None]) -> None:
    names: dict[str, Any] = {}
    exec(as_code(*pair), names)  # noqa: S102 - the code that is tested
    assert [repr(case) for case in pair if case is not None] == [
        repr(names[name]) for name in ("case", "other") if name in names
    ]


@settings(max_examples=10)
@given(strategies.cases(["full"], largest=2))
def test_code_has_short_lines_and_no_defaults(case: Case) -> None:
    code = as_code(case)
    assert max(map(len, code.splitlines())) <= WIDTH + 20
    for default in ("tp_size=1,", 'page_format="plain"', "common_states", "shardings={}"):
        assert default not in code
