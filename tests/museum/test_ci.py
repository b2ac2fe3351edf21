"""The profile "ci" of the kit finds each bug of the museum, not only the exhibit's own cases.

An author of a connector has the kit, and not our exhibits. So each exhibit is judged as any other
system, on the cases that the kit lists and draws for what the exhibit supports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import attrs
import pytest
from exhibits_of_ranks import right_slices, states_by_ratio
from table import EXHIBITS
from toy import Toy, head_reads

import kvspec
from kvspec.testing import Case
from kvspec.testing.kinds import kinds_of
from kvspec.testing.kit import Supports, System, Verdict, judge, judging
from kvspec.testing.kit.axes import AXES, Axis
from kvspec.testing.kit.guard import Guard
from kvspec.testing.laws import LAWS

CI = judging.PROFILES["ci"]


def always(_: Case) -> bool:
    """Serve each case."""
    return True


@attrs.frozen
class Judged:
    """How the kit judges an exhibit.

    Attributes:
        axis: The axis on which the bug is found.
        supports: What the real connector supports. Without its mistake, the exhibit is right there.
        serves: Returns whether the exhibit serves a case. It refuses the others.
        right: The exhibit without its mistake, if it is a small system of our own.
    """

    axis: str
    supports: Supports
    serves: Callable[[Case], bool] = always
    right: System | None = None


def blocks(case: Case) -> set[tuple[int, int]]:
    """Return the block sizes of the groups of both sides."""
    return {
        (source.spec.block_size, target.spec.block_size)
        for source in case.producer.groups
        for target in case.consumer.groups
        if set(source.layers) & set(target.layers)
    }


def consumer_multiple(case: Case) -> bool:
    """Return whether the consumer's blocks are multiples of the producer's."""
    return all(target % source == 0 for source, target in blocks(case))


def one_head(case: Case) -> bool:
    """Return whether there is one head and no prefix, and the consumer has multiple blocks."""
    heads = {part.units for group in case.producer.groups for part in group.own_parts}
    return heads == {1} and not case.request.cached_tokens and consumer_multiple(case)


def interleaves_blocks(case: Case) -> bool:
    """Return whether each context rank of the producer holds whole blocks."""
    parallel = case.producer.parallel
    whole = parallel.interleave_size == case.producer.groups[0].spec.block_size
    return whole or parallel.context_size == 1


def grows(case: Case) -> bool:
    """Return whether the consumer's TP size is a multiple of the producer's."""
    return case.consumer.parallel.tp_size % case.producer.parallel.tp_size == 0


def shrinks(case: Case) -> bool:
    """Return whether the producer's TP size is a multiple of the consumer's."""
    return case.producer.parallel.tp_size % case.consumer.parallel.tp_size == 0


def only(*kinds: str, **fields: Any) -> Supports:
    """Return the narrowest description with *kinds* and *fields*."""
    return Supports.only(kinds=kinds or ("full",), **fields)


UNEQUAL: Any = {"max_tp": 8, "equal_tp": False, "tp_multiples": False}
SMALL: Any = {"max_tp": 2, "equal_tp": False}
TOY = Toy().system()
RATIO = System(name="right states", moves=lambda case, _: states_by_ratio(case, right=True))
RANKS = Judged("tp", only(**UNEQUAL), right=head_reads(right_slices))
BYTES = Judged("tp", only(**SMALL), right=TOY)
SPARE = Judged("blocks", only(late_tables=True), right=TOY)
RELEASE = Judged("release", Supports())

ON_AXES: dict[str, Judged] = {
    "vllm#42082, slicing sketch": RANKS,
    "vllm#45330": RANKS,
    "vllm#52516": attrs.evolve(RANKS, serves=shrinks),
    "sglang#19086": attrs.evolve(RANKS, serves=shrinks),
    "sglang#23746": RANKS,
    "vllm#37635": attrs.evolve(RANKS, serves=shrinks),
    "vllm-ascend#5846": RANKS,
    "vLLM 0.33, push to replicas": Judged("tp", only(**UNEQUAL)),
    "vLLM 0.33, canonical pages": RANKS,
    "sglang#40727": Judged("tp", only("MLA", **UNEQUAL)),
    "vllm-rbln#1011": RANKS,
    "vllm#49499": Judged("kinds", only("MLA", "gated delta net", max_tp=4), right=RATIO),
    "vllm#55208": Judged("kinds", only("mamba2", **UNEQUAL), grows, RATIO),
    "vllm#55523": Judged("kinds", only("full", "MLA", max_tp=4, equal_tp=False), grows),
    "vllm#54926": Judged("groups", only(drafts=True)),
    "vllm-ascend#16149": Judged("pp", only(max_pp=2, equal_pp=False)),
    "vllm#57389": Judged("cp", only("MLA", max_tp=2, equal_tp=False, dcp=True, policies=["first"])),
    "vllm-ascend#10246": Judged("tp", only(**UNEQUAL)),
    "vllm#56033": Judged("pp", only(max_pp=2, equal_pp=False)),
    "sglang#18939": Judged("windows", only("full", "sliding window"), right=TOY),
    "sglang#22060": Judged("kinds", only("gated delta net", **UNEQUAL), shrinks, TOY),
    "SGLang 0.5.23, conv states of Mamba2": Judged("kinds", only("mamba2", **UNEQUAL), shrinks),
    "sglang#33041": Judged(
        "groups", only("full", "MLA", hybrid=True, regrouped=True), right=TOY
    ),
    "vllm#46407": Judged(
        "groups", only("full", "sliding window", hybrid=True, shared=True, padding=True), right=TOY
    ),
    "vllm#57661": Judged(
        "groups", only("full", "MLA", hybrid=True, shared=True, padding=True), right=TOY
    ),
    "vllm#50558": SPARE,
    "vllm-ascend#8908": SPARE,
    "vllm#48758": Judged("prefixes", only(prefixes="blocks", late_tables=True), right=TOY),
    "vllm#51527": Judged(
        "prefixes", only(prefixes="blocks", late_tables=True, equal_blocks=False),
        consumer_multiple, TOY,
    ),
    "vLLM 0.33, windows with unequal blocks": Judged(
        "windows", only("sliding window", equal_blocks=False), consumer_multiple, TOY
    ),
    "vLLM 0.32, freed window token": Judged("windows", only("sliding window"), right=TOY),
    "vLLM 0.32, CPU attention with blocks of 32 and 64": Judged(
        "everything",
        only(transposed=True, equal_blocks=False, layouts=["LBHKNC"], equal_layouts=False),
        one_head,
    ),
    "vllm#38433": Judged(
        "cp", only("MLA", dcp=True, pcp=True, **SMALL), interleaves_blocks, TOY
    ),
    "vLLM 0.33, interleave of context ranks": Judged(
        "cp", only("MLA", dcp=True, **SMALL), right=TOY
    ),
    "vllm#33795": Judged("kinds", only("MLA")),
    "vllm#52516, padded pages": Judged("layouts", only(padding=True), right=TOY),
    "TensorRT-LLM#6507": Judged(
        "everything", only(layouts=["LBHNC", "LBNHC"], **SMALL), right=TOY
    ),
    "vllm#55191": Judged("tp", only(**SMALL), right=TOY),
    "vllm#32204": Judged(
        "everything",
        only("full", "sliding window", layouts=["LBHNC", "LBNHC"], equal_layouts=False),
        right=TOY,
    ),
    "vllm#36867": Judged(
        "layouts", only(layouts=["LBHNC", "BLHNC"], equal_layouts=False), right=TOY
    ),
    "TensorRT-LLM#16505": Judged("groups", only("full", "MLA", hybrid=True), right=TOY),
    "NVIDIA KVBench, traffic matrix": attrs.evolve(RANKS, right=TOY),
    "sglang#31295": attrs.evolve(RANKS, serves=grows, right=TOY),
    "sglang#18968": Judged("kinds", only("MLA")),
    "dynamo#12750": Judged("kinds", only("MLA", layouts=["BLHNC"])),
    "vllm#29503": BYTES,
    "vllm#35158": Judged("steps", only()),
    "DeepSeek's rope, vLLM and transformers": Judged("kinds", only("MLA")),
    "vllm#36958": RELEASE,
    "sglang#22145": RELEASE,
    "vLLM 0.33, number of notifications": RELEASE,
    "sglang#35049": RELEASE,
    "vllm#52234": RELEASE,
    "TensorRT-LLM#17665": RELEASE,
}  # fmt: skip
BY_REFERENCE = {exhibit.reference: exhibit for exhibit in EXHIBITS}
QUESTIONS = ("moves", "tells", "descriptors", "prepared", "steps", "connector")


def serving(system: System, how: Judged) -> System:
    """Return *system* with its description, which refuses the cases that it does not serve."""

    def refusing(function: Callable[..., Any]) -> Callable[..., Any]:
        def ask(where: Any, *arguments: Any) -> Any:
            if not how.serves(getattr(where, "case", where)):
                raise kvspec.MismatchError([])
            return function(where, *arguments)

        return ask

    asked = {name: getattr(system, name) for name in QUESTIONS}
    asked = {name: refusing(function) for name, function in asked.items() if function is not None}
    return attrs.evolve(system, supports=how.supports, **asked)


def verdicts(system: System, axis: Axis, number: int) -> Iterator[tuple[Verdict, str]]:
    """Yield the verdict of each case that the profile "ci" judges on *axis*, as the kit does."""
    law, guard = LAWS[number - 1], Guard(system, CI.seconds)
    examples = judging._examples(axis, CI)
    for narrow in axis.narrowed(system.supports, kinds_of(system.supports)):
        drawn = judging._drawn(judging._pairs(system, [law], narrow), examples, 0)
        for laws, pair in judging.judged_cases(axis, narrow, [law], drawn):
            yield judging.look(guard, laws, *pair)[number]


def axis_of(how: Judged) -> Axis:
    """Return the axis on which an exhibit is judged."""
    return next(axis for axis in AXES if axis.name == how.axis)


@pytest.mark.parametrize("reference", BY_REFERENCE)
def test_ci_finds_the_bug_of_an_exhibit(reference: str) -> None:
    exhibit, how = BY_REFERENCE[reference], ON_AXES[reference]
    system = serving(exhibit.system, how)
    found = (words for verdict, words in verdicts(system, axis_of(how), exhibit.law)
             if verdict is Verdict.WRONG)  # fmt: skip
    fault = next(found, "")
    assert fault
    # Bytes or ranks are wrong. A crash would be found by any case.
    assert "raised" not in fault.splitlines()[0] or reference == "vllm#45330"


# Several exhibits are described in the same way.
SYSTEMS = {
    repr((how.axis, how.supports, how.serves)): name
    for name, how in ON_AXES.items()
    if how.right is not None
}


@pytest.mark.slow
@pytest.mark.parametrize("reference", SYSTEMS.values())
def test_exhibit_without_its_mistake_is_not_wrong(reference: str) -> None:
    """So the kit finds the mistake, and not a limit of the exhibit."""
    how = ON_AXES[reference]
    assert how.right is not None
    system = serving(how.right, how)
    each = verdicts(system, axis_of(how), number=1)
    found = [words for verdict, words in each if verdict is Verdict.WRONG]
    assert found == []


@pytest.mark.slow
@pytest.mark.parametrize("reference", BY_REFERENCE)
def test_whole_run_of_ci_calls_an_exhibit_wrong(reference: str) -> None:
    exhibit, how = BY_REFERENCE[reference], ON_AXES[reference]
    report = judge(serving(exhibit.system, how), profile="ci", laws=[exhibit.judge])
    assert exhibit.judge in {judgement.law for judgement in report.wrong}


def test_each_exhibit_is_judged_by_the_kit() -> None:
    assert ON_AXES.keys() == BY_REFERENCE.keys()
