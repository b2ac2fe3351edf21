"""The law of stored pages: two hops are one hop, for all kinds and all sizes."""

from __future__ import annotations

import random
from itertools import product

import builders
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvspec
from kvspec.stored.placement import StoredSpec
from kvspec.testing.laws.stored_pages import StoredCase, StoredStep
from kvspec.testing.stored import STORABLE, stored_cases, two_hops

LAYOUTS = ("LBHNC", "LBNHC", "BLHNC", "BLNHC", "LBKHNC")
PAGE, PAGES = 12, 2  # Tokens of a page, and pages of a prompt.


@settings(max_examples=settings.default.max_examples // 2)
@given(stored_cases())
def test_two_hops_are_one_hop(case: StoredCase) -> None:
    assert two_hops(case) == []


@pytest.mark.slow
@pytest.mark.parametrize("kind", STORABLE)
@settings(max_examples=40)
@given(data=st.data())
def test_two_hops_are_one_hop_for_each_kind(kind: str, data: st.DataObject) -> None:
    assert two_hops(data.draw(stored_cases([kind]))) == []


# The TP sizes at which vLLM loads a model, by its KV heads. `tests/tools/test_readme.py` compares
# this rule with sizes recorded from vLLM.
LOADABLE = {
    heads: [tp for tp in range(1, 17) if heads % tp == 0 or tp % heads == 0]
    for heads in range(1, 17)
}


def stored_case(heads: int, sizes: tuple[int, int], head_groups: int) -> StoredCase:
    """Return a prompt of two pages between two TP *sizes*, with drawn layouts and blocks."""
    draws = random.Random(repr((heads, sizes, head_groups)))
    engines = [
        builders.engine(
            builders.gqa(heads, block_size=draws.choice((1, 2, 3, 4, 6, 12)), head_size=2),
            layers=("layers.0", "layers.1"),
            layout=draws.choice(LAYOUTS),
            tp=tp,
        )
        for tp in sizes
    ]
    sides = []
    for engine in engines:
        tables = {"g": draws.sample(range(32), PAGES * PAGE // engine.groups[0].spec.block_size)}
        request = kvspec.TransferRequest(
            request_id="r",
            num_tokens=PAGES * PAGE,
            producer_blocks=tables,
            consumer_blocks=tables,
        )
        sides.append(StoredStep(request=request, pool={"g": 32}))
    placement = StoredSpec.of(engines[0], page_tokens=PAGE, head_groups=head_groups)
    return StoredCase(
        producer=engines[0],
        consumer=engines[1],
        placement=placement,
        steps=sides[:1],
        loaded=sides[1],
    )


@pytest.mark.slow
@pytest.mark.parametrize(("heads", "sizes"), LOADABLE.items())
def test_two_hops_are_one_hop_for_all_tp_sizes_that_vllm_loads(
    heads: int, sizes: list[int]
) -> None:
    """An object has the heads of one rank of the producer, or one head."""
    for pair in product(sizes, repeat=2):
        for head_groups in {min(heads, pair[0]), heads}:
            assert two_hops(stored_case(heads, pair, head_groups)) == [], (pair, head_groups)


def test_there_are_610_pairs_of_tp_sizes_that_vllm_loads() -> None:
    assert sum(len(sizes) ** 2 for sizes in LOADABLE.values()) == 610
