"""The kit draws each hard case within the few examples of the profile "ci"."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import pytest

from kvspec.ownership.dtypes import itemsize
from kvspec.testing import Case
from kvspec.testing.kinds import kinds_of
from kvspec.testing.kit import Supports
from kvspec.testing.kit.axes import AXES
from kvspec.testing.kit.judging import PROFILES, _drawn, _examples, _pairs
from kvspec.testing.laws import KVSPEC, LAWS
from kvspec.testing.requests import needed
from kvspec.testing.rotary import may_rotate, reorders

# A reach test of one seed could be true by chance.
SEEDS = range(4)


@lru_cache
def drawn(axis: str, seed: int, kind: str | None = None) -> tuple[Case, ...]:
    """Return the cases and twins that the kit draws on *axis*, of one *kind* or of all."""
    (chosen,) = [each for each in AXES if each.name == axis]
    number, supports = _examples(chosen, PROFILES["ci"]), Supports()
    cases: list[Case] = []
    for narrow in chosen.narrowed(supports, kinds_of(supports)):
        if kind is None or narrow.kinds == (kind,):
            for pair in _drawn(_pairs(KVSPEC, LAWS, narrow), number, seed):
                cases += pair
    return tuple(cases)


def moving_groups(case: Case) -> list[range]:
    """Return the tokens that move, for each group of the consumer."""
    return [needed(group, case.request, case.consumer) for group in case.consumer.groups]


def moving_specs(case: Case) -> Iterator[tuple[Any, Any]]:
    """Yield the specs on both sides of each layer that moves tokens."""
    for source in case.producer.groups:
        for target in case.consumer.groups:
            if needed(target, case.request, case.consumer):
                for layer in set(source.layers) & set(target.layers):
                    yield source.spec.of_layer(layer), target.spec.of_layer(layer)


@pytest.mark.parametrize("kind", ["full", "MLA"])
def test_axis_of_content_draws_keys_whose_reordering_is_not_its_own_inverse(kind: str) -> None:
    """Two rotated pairs are stored as a b A B or a A b B, and one step leads to both orders."""
    stated = 0
    for seed in SEEDS:
        specs = [both for case in drawn("content", seed, kind) for both in moving_specs(case)]
        # Law 14 states orders of its own, if the elements of a row can be reordered.
        assert any(may_rotate(spec) and reorders(spec) and spec.head_size >= 6 for spec, _ in specs)
        contents = [(one.key_content, other.key_content) for one, other in specs]
        stated += sum(
            one is not None and one.rotary != other.rotary and one.rotary_size >= 6
            for one, other in contents
        )
    assert stated


@pytest.mark.parametrize("kind", ["full", "MLA"])
def test_axis_of_content_draws_elements_of_each_size(kind: str) -> None:
    """A step of two bytes is right for bfloat16 and wrong for float32."""
    specs = [
        spec
        for seed in SEEDS
        for case in drawn("content", seed, kind)
        for spec, _ in moving_specs(case)
    ]
    assert {1, 2, 4} == {itemsize(spec.dtype) for spec in specs}


@pytest.mark.parametrize(("axis", "kind"), [("prefixes", "full"), ("windows", "sliding window")])
@pytest.mark.parametrize("side", ["producer_blocks", "consumer_blocks"])
def test_axes_of_prefixes_and_windows_draw_tables_that_begin_late(
    axis: str, kind: str, side: str
) -> None:
    """A table may begin late only if its first tokens do not move."""
    late = [
        sum(
            any(table.first_token for table in getattr(case.request, side).values())
            and any(True for _ in moving_specs(case))
            for case in drawn(axis, seed, kind)
        )
        for seed in SEEDS
    ]
    # The cases that each run must draw contain such a table. So one seed may have none.
    assert sorted(late)[1] >= 1, late
    assert sum(late) >= 8, late


@pytest.mark.parametrize("axis", ["groups", "everything"])
def test_axes_draw_groups_that_share_one_memory(axis: str) -> None:
    """A system may fold the groups of one memory into one."""
    shared = [
        sum(case.shared and sum(map(bool, moving_groups(case))) > 1 for case in drawn(axis, seed))
        for seed in SEEDS
    ]
    assert sum(shared) >= len(SEEDS), shared
