"""Strategies draw only what a system supports, and throw nothing away."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import builders
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from hypothesis.internal.conjecture.data import ConjectureData

import kvspec
from kvspec.check.counting import cached_tokens_of, context_of
from kvspec.testing import Case, laws, strategies
from kvspec.testing.kinds import KINDS, WINDOWED, kinds_of
from kvspec.testing.kit import Supports
from kvspec.testing.kit.axes import AXES
from kvspec.testing.laws import KVSPEC
from kvspec.testing.pairs import sharing_kinds

SOURCES = sorted(Path(strategies.__file__).parent.glob("*.py"))
QUICK = settings(
    max_examples=40, deadline=None, database=None, phases=[Phase.generate],
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)  # fmt: skip

Check = Callable[[Case], bool]


def sides(case: Case) -> list[kvspec.EngineSpec]:
    """Return both engines."""
    return [case.producer, case.consumer]


def tp(case: Case) -> list[int]:
    """Return the TP size of both engines."""
    return [engine.parallel.tp_size for engine in sides(case)]


def even(case: Case) -> bool:
    """Return whether each rank holds an even share of the heads, or one of them."""
    return all(
        size % packs == 0 or packs % size == 0
        for size, engine in zip(tp(case), sides(case), strict=True)
        for group in engine.groups
        for packs in (part.units // part.granularity for part in group.own_parts)
    )


def blocks(case: Case) -> dict[str, set[int]]:
    """Return the block sizes of each layer."""
    sizes: dict[str, set[int]] = {}
    for engine in sides(case):
        for group in engine.groups:
            for layer in group.layers:
                sizes.setdefault(layer, set()).add(group.spec.block_size)
    return sizes


def layouts(case: Case) -> dict[str, set[str]]:
    """Return the layouts of each layer."""
    names: dict[str, set[str]] = {}
    for engine in sides(case):
        for group in engine.groups:
            for layer in group.layers:
                names.setdefault(layer, set()).add(engine.layout_of(group))
    return names


def ends_on_blocks(case: Case) -> bool:
    """Return whether the cached tokens are whole blocks of both sides."""
    return all(
        cached_tokens_of(case.request, group) % group.spec.block_size == 0
        for group in case.consumer.groups
    )


NARROWED: list[tuple[dict[str, Any], Check]] = [
    ({"kinds": ["MLA", "mamba2"], "drafts": False, "regrouped": False},
     lambda c: {g.name for g in c.producer.groups} <= {"MLA", "mamba2"}),
    ({"hybrid": False, "drafts": False, "regrouped": False}, lambda c: len(c.producer.groups) == 1),
    ({"windows": False, "drafts": False, "regrouped": False},
     lambda c: not {g.name for g in c.producer.groups} & WINDOWED),
    ({"compressed": False, "drafts": False},
     lambda c: all(p.tokens_per_state == 1 for e in sides(c) for g in e.groups for p in g.own_parts
                   if p.per_token)),
    ({"max_tp": 3}, lambda c: max(tp(c)) <= 3),
    ({"equal_tp": True}, lambda c: len({*tp(c)}) == 1),
    ({"tp_multiples": True}, lambda c: max(tp(c)) % min(tp(c)) == 0),
    ({"even_heads": True, "drafts": False}, even),
    ({"shardings": False}, lambda c: not any(e.parallel.shardings for e in sides(c))),
    ({"max_pp": 1}, lambda c: all(e.parallel.pp_size == 1 for e in sides(c))),
    ({"equal_pp": True}, lambda c: len({e.parallel.pp_size for e in sides(c)}) == 1),
    ({"dcp": False, "pcp": False}, lambda c: all(e.parallel.context_size == 1 for e in sides(c))),
    ({"equal_blocks": True}, lambda c: all(len(s) == 1 for s in blocks(c).values())),
    ({"kernel_blocks": False},
     lambda c: all(g.kernel_blocks_per_block == 1 for e in sides(c) for g in e.groups)),
    ({"layouts": ["LBNHC", "LBHNC"]},
     lambda c: all(s <= {"LBNHC", "LBHNC"} for s in layouts(c).values())),
    ({"equal_layouts": True}, lambda c: all(len(s) == 1 for s in layouts(c).values())),
    ({"prefixes": "none"},
     lambda c: all(cached_tokens_of(c.request, g) == 0 for g in c.consumer.groups)),
    ({"prefixes": "blocks"}, ends_on_blocks),
    ({"null_blocks": False}, lambda c: all(e.null_block is None for e in sides(c))),
    ({"late_tables": False},
     lambda c: all(t.first_token == 0 for t in c.request.producer_blocks.values())),
    ({"padding": False, "shared": False, "drafts": False},
     lambda c: not any(p.page_size_padded for e in sides(c) for g in e.groups
                       for p in map(g.spec.of_layer, g.layers))),
    ({"drafts": False}, lambda c: not any(g.excluded for e in sides(c) for g in e.groups)),
    ({"policies": ["stripe"]}, lambda c: c.replica_policy.name == "stripe"),
]  # fmt: skip


@pytest.mark.parametrize(("fields", "kept"), NARROWED)
def test_cases_are_those_that_are_supported(fields: dict[str, Any], kept: Check) -> None:
    supports = Supports(**fields)

    draws = strategies.cases(largest=4, supports=supports)
    if sharing_kinds(tuple(KINDS), supports):
        draws = draws | draws | strategies.sharing_cases(supports=supports)

    @settings(QUICK, max_examples=12)
    @given(draws)
    def check(case: Case) -> None:
        assert kept(case)

    check()


def test_both_twins_have_prefixes_of_whole_blocks() -> None:
    """The twin has other blocks and context ranks, and the same cached tokens."""
    lengths: set[int] = set()
    stated = Supports.only(kinds=["full"], prefixes="blocks", equal_blocks=False, dcp=True)

    @settings(QUICK)
    @given(strategies.twins(supports=stated))
    def check(twins: tuple[Case, Case]) -> None:
        for case in twins:
            for engine in sides(case):
                for group in engine.groups:
                    cached = cached_tokens_of(case.request, group)
                    virtual = group.spec.block_size * context_of(engine, kvspec.RankId(), group)[1]
                    assert cached % virtual == 0
                    lengths.add(cached)

    check()
    assert len(lengths) > 1


def test_no_draw_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected draw calls `mark_invalid`, as `assume` and `filter` do."""
    rejected: list[object] = []
    mark = ConjectureData.mark_invalid

    def marked(data: ConjectureData, why: str | None = None) -> Any:
        rejected.append(why)
        return mark(data, why)

    narrow = Supports.only(kinds=["full", "sliding window"], max_tp=4, equal_tp=False)
    draws = [strategies.twins(supports=each) for each in (narrow, Supports())]
    draws += [strategies.sharing_cases(), strategies.scripts()]

    @QUICK
    @given(st.one_of(draws))
    def draw(_: object) -> None: ...

    monkeypatch.setattr(ConjectureData, "mark_invalid", marked)
    draw()
    assert not rejected


def test_no_strategy_filters() -> None:
    words = (".filter(", "assume(")
    found = [path.name for path in SOURCES if any(w in path.read_text("utf-8") for w in words)]
    assert not found


def test_each_axis_narrows_to_what_is_supported() -> None:
    """A field that the system does not support is never drawn on any axis."""
    stated = Supports(kinds=["full", "MLA"], max_tp=4, dcp=False, prefixes="blocks", padding=False)
    for axis in AXES:
        for narrow in axis.narrowed(stated, kinds_of(stated)):
            assert set(narrow.kinds or KINDS) <= {"full", "MLA"}
            assert (narrow.max_tp <= 4, narrow.dcp, narrow.padding) == (True, False, False)
            assert narrow.prefixes in ("none", "blocks")


def test_axis_is_left_out_if_only_the_simplest_is_supported() -> None:
    simple = Supports.only(kinds=["full"])
    left = [axis.name for axis in AXES if axis.narrowed(simple, ("full",))]
    assert left == ["kinds", "steps", "everything", "names", "pages", "release"]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kinds", []), ("kinds", "full"), ("kinds", [1]), ("max_tp", 0), ("max_pp", True),
        ("equal_tp", 1), ("prefixes", "some"), ("layouts", ""), ("layouts", ["LKBNHX"]),
        ("policies", ["frist"]), ("policies", ["nearest"]),
    ],
)  # fmt: skip
def test_supports_refuses_wrong_value(field: str, value: object) -> None:
    with pytest.raises(kvspec.SpecError) as caught:
        Supports(**{field: value})  # type: ignore[arg-type]
    assert field == caught.value.field


@pytest.mark.parametrize(
    "fields",
    [{"shared": False}, {"hybrid": False}, {"kinds": ["full", "uniform"]}, {"layouts": ["LHBNC"]}],
)
def test_no_groups_share_memory_if_that_is_not_supported(fields: dict[str, Any]) -> None:
    assert [] == sharing_kinds(tuple(KINDS), Supports(**fields))


def test_strategies_refuse_unknown_kind_and_quote_the_known_ones() -> None:
    """Some names of kinds have a comma."""
    with pytest.raises(kvspec.SpecError) as caught:
        kinds_of(Supports(kinds=["ful"]))
    assert ("kinds", "ful") == (caught.value.field, caught.value.value)
    assert "'full, opaque'" in str(caught.value)


def test_only_draws_the_simplest_kind_layout_and_policy() -> None:
    @settings(QUICK)
    @given(strategies.cases(supports=Supports.only()))
    def check(case: Case) -> None:
        assert case.replica_policy.name == "spread"
        for engine in sides(case):
            (group,) = engine.groups
            assert ("full", "LBHNC") == (group.name, engine.layout_of(group))

    check()


@pytest.mark.parametrize(
    ("fields", "change"),
    [
        ({"equal_tp": True}, {"tp": (2, 4)}),
        ({"tp_multiples": True}, {"tp": (2, 3)}),
        ({"equal_pp": True}, {"pp_size": (1, 2)}),
        ({"equal_layouts": True}, {"layout": ("LBHNC", "LBNHC")}),
    ],
)
def test_law_4_is_not_judged_through_an_engine_that_is_not_supported(
    fields: dict[str, Any], change: dict[str, tuple[Any, Any]]
) -> None:
    ((name, values),) = change.items()
    engines = [
        builders.engine(builders.gqa(), layers=("l.0", "l.1"), **{name: value}) for value in values
    ]
    both = [builders.case(one, one, builders.request(2, [0], [1])) for one in engines]
    for supports, judged in ((Supports(), True), (Supports(**fields), False)):
        system = attrs.evolve(KVSPEC, supports=supports)
        broken = laws.broken(system, *both, of=[laws.LAWS[3]])
        assert [] == broken
        assert judged is not bool(broken.not_judged)


def test_law_3_asks_only_for_the_policy_of_the_case() -> None:
    asked: set[str] = set()

    def moves(case: Case, role: Any) -> Any:
        asked.add(case.replica_policy.name)
        right: Any = KVSPEC.moves
        return right(case, role)

    @QUICK
    @given(strategies.cases(largest=4, supports=Supports(kinds=["full"], policies=["first"])))
    def check(case: Case) -> None:
        assert [] == laws.broken(laws.System(name="first", moves=moves), case, of=[laws.LAWS[2]])

    check()
    assert asked == {"first"}


def test_only_keeps_every_field_narrow_but_the_named() -> None:
    narrow = Supports.only(max_tp=8)
    assert attrs.evolve(narrow, max_tp=1) == Supports.only()
    assert all(
        getattr(narrow, field.name) == field.metadata["only"]
        for field in attrs.fields(Supports)
        if field.name != "max_tp"
    )
