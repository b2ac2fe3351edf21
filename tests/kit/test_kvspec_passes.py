"""kvspec keeps all laws of its own kit at all five levels, through the same public protocol."""

from __future__ import annotations

import attrs
import pytest
from kvspec_system import SYSTEM

import kvspec
from kvspec.testing.case import Case
from kvspec.testing.kit import judge
from kvspec.testing.kit.axes import AXES
from kvspec.testing.kit.judging import Profile
from kvspec.testing.laws import broken

SMALL = Profile("small", examples=2, each=1, everything=2, seconds=120.0, shrinking=5.0)


def test_system_answers_on_all_levels() -> None:
    copies = ("moves", "tells", "descriptors", "prepared", "steps")
    questions = (*copies, "release", "connector", "names", "pages")
    assert all(getattr(SYSTEM, question) is not None for question in questions)


# "everything" draws from these axes too, and `test_stores` judges each pair of "names".
LONG = ("windows", "cp", "layouts", "tp", "groups", "names")


@pytest.mark.parametrize(
    "axis",
    [
        pytest.param(axis.name, marks=[pytest.mark.slow] if axis.name in LONG else [])
        for axis in AXES
        if axis.name != "kinds"
    ],
)
def test_kvspec_keeps_all_laws_on_each_axis(axis: str) -> None:
    report = judge(SYSTEM, profile=SMALL, axes=[axis])
    assert not report.wrong
    assert not any(judgement.refused for judgement in report.judgements)


def test_axis_of_steps_shows_each_way_to_cut_a_request_for_law_13_alone() -> None:
    report = judge(SYSTEM, axes=["steps"])
    assert {13} == {judgement.law.number for judgement in report.judgements if judgement.axis}
    values = {judgement.value: judgement.exact for judgement in report.judgements}
    assert values.keys() >= {"by layer", "by layer and by token", "by token"}
    assert not report.wrong


def test_axis_of_steps_needs_a_system_that_answers_steps() -> None:
    report = judge(attrs.evolve(SYSTEM, steps=None), profile=SMALL, axes=["steps"])
    assert not any(judgement.axis for judgement in report.judgements)


@pytest.mark.parametrize("layout", ["LBHNC", "LBNHC"])
def test_reordered_keys_that_touch_other_contents_keep_law_8(layout: str) -> None:
    """The last element of a key may touch the next head or token, whatever the tile is."""
    sizes = {"head_size": 4, "total_num_kv_heads": 3, "dtype": "uint8", "sliding_window": 5}
    engines = []
    for block_size, rotary in ((12, "halves"), (16, "pairs")):
        key = kvspec.KeyContent(rotary=rotary, rotary_size=4)
        spec = kvspec.SlidingWindowSpec(block_size=block_size, key_content=key, **sizes)
        group = kvspec.KVCacheGroup(name="window", layers=["layers.0"], spec=spec)
        engines.append(kvspec.EngineSpec(groups=[group], layout=layout))
    blocks = {"window": kvspec.BlockTable([0, 1, 2])}
    request = kvspec.TransferRequest(
        request_id="r", num_tokens=33, producer_blocks=blocks, consumer_blocks=blocks
    )
    case = Case(
        producer=engines[0], consumer=engines[1], producer_pool={"window": 3},
        consumer_pool={"window": 3}, request=request, replica_policy=kvspec.ReplicaPolicy(),
    )  # fmt: skip
    assert [] == broken(SYSTEM, case)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [axis.name for axis in AXES])
def test_kvspec_keeps_all_laws_in_many_cases(axis: str) -> None:
    report = judge(SYSTEM, profile="dev", axes=[axis], seed=1)
    assert not report.wrong
