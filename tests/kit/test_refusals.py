"""A system with its own class of refusals: what the kit reports, and the code that it prints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest

import kvspec
from kvspec import RankId
from kvspec.testing.kit import Supports, System, Verdict, judge
from kvspec.testing.kit.judging import Profile
from kvspec.testing.laws import KVSPEC, LAWS
from kvspec.testing.world import ByteCopy, World, described

TINY = Profile("tiny", examples=2, each=1, everything=4, seconds=30.0, shrinking=0.0)
NARROW = Supports.only(kinds=["full"], layouts=["LBHNC"], policies=["spread"])


class OwnError(Exception):
    """The class of refusals of this system."""


def refusing(**answers: Callable[..., Any]) -> System:
    """Return a system that refuses with its own class, for each of kvspec's *answers*."""

    def own(ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*arguments: Any) -> Any:
            try:
                return ask(*arguments)
            except kvspec.KVSpecError as error:
                raise OwnError(str(error)) from error

        return answer

    names = {name: own(ask) for name, ask in answers.items()}
    return System(name="own", supports=NARROW, refuses=(OwnError,), **names)


def ignores_meaning(here: World, *ranks: RankId) -> list[ByteCopy]:
    """Return kvspec's copies between engines that state no meaning of their bytes."""
    caches = []
    for held, rank in zip((here.producers, here.consumers), ranks, strict=True):
        cache = held[rank][0]
        (group,) = cache.engine.groups
        spec: Any = attrs.evolve(group.spec, key_content=None, scales_digest=None)
        engine = attrs.evolve(cache.engine, groups=[attrs.evolve(group, spec=spec)])
        caches.append(kvspec.RankCache(engine, rank, cache.regions, cache.memory))
    plan = kvspec.plan_transfer(*(cache.engine for cache in caches))
    return described(kvspec.build_table(plan, *caches), here.case.request)


def ignores_blocks(*arguments: Any) -> Any:
    """Return no copies if kvspec refuses the block tables."""
    copies: Any = KVSPEC.descriptors
    try:
        return copies(*arguments)
    except kvspec.SpecError:
        return []


@pytest.mark.parametrize(("number", "descriptors"), [(11, ignores_blocks), (14, ignores_meaning)])
def test_printed_code_reproduces_the_fault_of_a_system_with_own_refusals(
    number: int, descriptors: Callable[..., Any]
) -> None:
    system = refusing(descriptors=descriptors)
    law = LAWS[number - 1]
    report = judge(system, profile=TINY, axes=["everything"], laws=[law])
    found = report.wrong[0].wrong_case
    assert found is not None
    code = found.code.replace("system = ...  # your system", "")
    with pytest.raises(AssertionError) as caught:
        exec(code, {"system": system})  # noqa: S102 - the code that a report prints
    assert str(caught.value).endswith(found.fault)


@pytest.mark.parametrize("number", [11, 14])
def test_law_is_refused_if_the_system_refuses_the_unchanged_case(number: int) -> None:
    def refuse(*_: object) -> Any:
        raise OwnError("no context parallelism")

    law = LAWS[number - 1]
    system = refusing(descriptors=refuse)
    report = judge(system, profile=TINY, axes=["everything"], laws=[law])
    (judgement,) = report.judgements
    assert Verdict.REFUSED is judgement.verdict
    assert judgement.words == "no context parallelism"
