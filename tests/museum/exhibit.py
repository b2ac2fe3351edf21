"""One exhibit of the museum: a real bug, a system that makes the same mistake, and its judge."""

from __future__ import annotations

import random
import re
from importlib import import_module
from typing import TYPE_CHECKING, Any

import attrs
from hypothesis import Phase, find, settings
from toy import describe

from kvspec.testing import Case, laws
from kvspec.testing.laws import KVSPEC, LAWS, System
from kvspec.testing.laws.release import Script, play

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

REPOSITORIES = {
    "vllm": "vllm-project/vllm",
    "vllm-ascend": "vllm-project/vllm-ascend",
    "vllm-rbln": "RBLN-SW/vllm-rbln",
    "sglang": "sgl-project/sglang",
    "dynamo": "ai-dynamo/dynamo",
    "TensorRT-LLM": "NVIDIA/TensorRT-LLM",
}
# `find` shrinks a case. These settings make the result repeatable, and bound its time.
SEARCH = settings(
    database=None,
    deadline=None,
    max_examples=300,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=settings.get_profile("default").suppress_health_check,
)

Drawn = Case | tuple[Case, Case | None] | Script


@attrs.frozen(kw_only=True)
class Exhibit:
    """A bug that a connector really had.

    Attributes:
        reference: An issue or pull request such as "vllm#19086", or else a place in words.
        bug: What went wrong, in one sentence.
        law: The number of the law that must catch it.
        system: A system of our own that makes the same mistake.
        cases: Draws small transfers, some of which the mistake hits. For a law that compares two
            transfers, it draws pairs. For the law of releases, it draws scripts.
        minimal: What `describe` returns for the smallest transfer that the mistake hits.
    """

    reference: str
    bug: str
    law: int
    system: System
    cases: SearchStrategy[Any]
    minimal: str

    @property
    def link(self) -> str:
        """The reference as Markdown."""
        made = re.fullmatch(r"([\w-]+)#(\d+)(.*)", self.reference)
        if made is None:
            return self.reference
        repository, number, rest = made.groups()
        # GitHub redirects the number of a pull request to its page.
        address = f"https://github.com/{REPOSITORIES[repository]}/issues/{number}"
        return f"[{repository}#{number}]({address}){rest}"

    @property
    def judge(self) -> laws.Law:
        """The law that must catch the bug."""
        return LAWS[self.law - 1]

    @property
    def right(self) -> System:
        """KVSPEC itself, restricted to the questions that the system answers."""
        if self.system.release is not None:
            # The release protocol of kvspec is the pair of its ledgers.
            return import_module("kvspec_system").SYSTEM
        questions = ("moves", "tells", "descriptors", "prepared", "steps")
        silent = {name: None for name in questions if getattr(self.system, name) is None}
        return attrs.evolve(KVSPEC, **silent)

    def fault(self, drawn: Drawn, system: System | None = None) -> str | None:
        """Return the first sentence with which the law refutes a system, by default the wrong one.

        Returns None if the system keeps the law.
        """
        system = system or self.system
        if isinstance(drawn, Script):
            return play(system.release, drawn)
        case, other = drawn if isinstance(drawn, tuple) else (drawn, None)
        return next(self.judge.faults(system, case, other), None)

    def smallest(self) -> Drawn:
        """Return the smallest transfer that the mistake hits."""
        found: Drawn = find(
            self.cases,
            lambda drawn: self.fault(drawn) is not None,
            settings=SEARCH,
            random=random.Random(0),
        )
        return found

    def describe(self, drawn: Drawn) -> str:
        """Return one line about a transfer, a pair of transfers or a script."""
        if isinstance(drawn, Script):
            return ", ".join(f"{name} {number:g}" for name, number in drawn.steps)
        if isinstance(drawn, tuple):
            return "; ".join(describe(case) for case in drawn if case is not None)
        return describe(drawn)
