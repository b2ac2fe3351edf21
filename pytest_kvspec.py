"""The options of pytest with which kvspec judges a connector: ``pytest --kvspec MODULE:NAME``.

pytest imports this module in every project that has kvspec installed. So it imports nothing but
pytest until the option is given: `kvspec.testing.kit.pytest_plugin` does the work.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    group = parser.getgroup("kvspec", "kvspec: judge a connector by the laws of a transfer")
    group.addoption("--kvspec", metavar="MODULE:NAME", help="Judge this kvspec.testing.kit.System.")
    group.addoption(
        "--kvspec-profile",
        metavar="NAME",
        default="ci",
        help="How many cases to draw: ci (the default, below two minutes), dev or nightly.",
    )
    group.addoption(
        "--kvspec-seed", metavar="N", type=int, default=0, help="The seed of the cases."
    )
    group.addoption(
        "--kvspec-xfail",
        metavar="FILE",
        help="Lines LAW/AXIS that are known to fail. A line that no longer fails is an error.",
    )
    group.addoption(
        "--kvspec-report",
        metavar="FILE",
        action="append",
        default=[],
        help="Write a report, as HTML if the name ends with .html, else as JSON. May be repeated.",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Register the plug-in that judges, if a system is given."""
    # An empty value, as of a variable that is not set, is refused: the judge must not be silent.
    if config.getoption("--kvspec") is not None:
        from kvspec.testing.kit.pytest_plugin import Judging  # noqa: PLC0415 - it is slow to import

        config.pluginmanager.register(Judging(config), "kvspec-judging")
