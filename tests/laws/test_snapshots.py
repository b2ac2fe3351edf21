"""States at several positions of one request: a consumer may resume at each of them.

The laws judge such requests with the byte oracle: the state after each position has bytes of its
own. The tables below were worked out by hand.
"""

from __future__ import annotations

from typing import Any

import attrs
import builders
import numpy as np
import pytest
import special_cases
from hypothesis import given, settings

import kvspec
from kvspec import digests
from kvspec.descriptors.complete import resume_positions
from kvspec.testing import Case, laws, oracle
from kvspec.testing.laws import KVSPEC, LAWS
from kvspec.testing.world import SEED, ByteCopy, World, selected, world

OF_BYTES = [law for law in LAWS if law.number in {1, 8, 10, 11}]
STATE = kvspec.MambaSpec.short_conv(conv_dim=8, conv_kernel=4, dtype="float16", block_size=16)


def snapshots(
    producer_blocks: Any, consumer_blocks: Any, positions: Any, size: int = 16, **more: Any
) -> Case:
    """Return a case of a state in blocks of 16 tokens, and of *size* tokens on the consumer."""
    specs = STATE, attrs.evolve(STATE, block_size=size)
    sides = [builders.engine(builders.group(spec), null_block=0) for spec in specs]
    request = builders.request(
        positions[-1], producer_blocks, consumer_blocks, state_positions=positions, **more
    )
    return builders.case(*sides, request)


@settings(max_examples=max(8, settings.default.max_examples // 4))
@given(special_cases.snapshot_cases())
def test_states_at_several_positions_keep_the_laws(one: Case) -> None:
    assert [] == laws.broken(KVSPEC, one, of=OF_BYTES)
    here = world(one)
    caches = [
        {rank: c for rank, (c, _) in side.items()} for side in (here.producers, here.consumers)
    ]
    assert None is kvspec.verify(here.plan, *caches, one.request)
    assert None is kvspec.verify(here.plan, *caches, one.request, independent=True)


@settings(max_examples=max(8, settings.default.max_examples // 4))
@given(special_cases.snapshot_cases())
def test_consumer_may_resume_where_all_groups_are_complete(one: Case) -> None:
    """Judged by the bytes of a prompt that ends at the position."""
    request = attrs.evolve(one.request, cached_tokens=0)
    one = attrs.evolve(one, request=request)
    try:
        here = world(one)
        here.execute(selected)
    except kvspec.KVSpecError:
        return  # The table of an earlier state that was cached has no block.
    resumable = resume_positions(here.plan, request)
    for end in request.state_positions:
        shorter = attrs.evolve(request, num_tokens=end, state_positions=(), state_tokens=None)
        wrong = [
            fault
            for rank, (_, storage) in here.consumers.items()
            for fault in oracle.check(
                one.consumer, rank, storage, storage, one.consumer_pool, request.consumer_blocks,
                shorter, seed=SEED, source=one.producer,
            )
        ]  # fmt: skip
        assert (end in resumable) == (not wrong), (end, wrong[:1])


def test_consumer_never_resumes_inside_a_row_of_several_tokens() -> None:
    """The row has seen the tokens after the position, so it is another one there."""
    spec = builders.mla(tokens_per_state=4)
    groups = [
        kvspec.KVCacheGroup(name=name, layers=[name], spec=each)
        for name, each in (("state", STATE), ("rows", spec))
    ]
    engine = builders.engine(*groups)
    tables: Any = {"state": [1, 2, 3], "rows": [1, 2, 3]}
    request = kvspec.TransferRequest(
        request_id="r",
        num_tokens=42,
        state_positions=(18, 20, 42),
        producer_blocks=tables,
        consumer_blocks=tables,
    )
    assert (20, 42) == resume_positions(kvspec.plan_transfer(engine, engine), request)


def moved_blocks(one: Case) -> list[tuple[int, int]]:
    """Return the pairs of blocks that a request moves: the producer's and the consumer's."""
    here = world(one)
    table = here.table(kvspec.RankId(), kvspec.RankId())
    bases = [
        side[kvspec.RankId()][0].memory[0].address for side in (here.producers, here.consumers)
    ]
    page = STATE.page_size_bytes()
    copies = table.descriptors(one.request).astype(np.int64).tolist()
    return sorted(
        ((source - bases[0]) // page + at, (target - bases[1]) // page + at)
        for source, target, length in copies
        for at in range(length // page)
    )


@pytest.mark.parametrize(
    ("positions", "size", "cached", "tables", "moved"),
    [
        # After 16, 32 and 40 tokens: the blocks 0, 1 and 2 of both tables.
        ((16, 32, 40), 16, 0, ([5, 6, 7], [1, 2, 3]), [(5, 1), (6, 2), (7, 3)]),
        # A prefix hit of 16 tokens: its state is there. The producer has given it back.
        ((16, 32, 40), 16, 16, ([0, 6, 7], [4, 2, 3]), [(6, 2), (7, 3)]),
        # A partial tail: the state after 24 tokens is in the block of token 23.
        ((24, 40), 16, 0, ([0, 6, 7], [0, 2, 3]), [(6, 2), (7, 3)]),
        # Blocks of 32 tokens: the states after 32 and 40 tokens are in the blocks 0 and 1.
        ((32, 40), 32, 0, ([0, 6, 7], [2, 3]), [(6, 2), (7, 3)]),
        # If all but one are cached, one id may be the slot.
        ((16, 40), 16, 16, ([0, 0, 7], [3]), [(7, 3)]),
        ((16, 40), 16, 40, ([0, 0, 7], [4, 0, 3]), []),
    ],
)
def test_each_state_moves_between_the_blocks_of_its_last_token(
    positions: Any, size: int, cached: int, tables: Any, moved: Any
) -> None:
    one = snapshots(*tables, positions, size, cached_tokens=cached)
    assert moved == moved_blocks(one)
    assert [] == laws.broken(KVSPEC, one, of=OF_BYTES)


@pytest.mark.parametrize(
    ("positions", "tables", "error"),
    [
        ((16, 32), ([5, 0], [1, 2]), kvspec.SpecError),  # The null block of the producer.
        ((16, 32), ([5, 6], [0, 2]), kvspec.SpecError),
        ((16, 32), ([5], [1, 2]), kvspec.SpecError),  # One slot, two states.
        ((24, 32), ([5, 6], [1, 2]), kvspec.SpecError),  # Both in the block of tokens 16 to 31.
        ((16, 32), ([5, 5], [1, 2]), kvspec.SpecError),
        ((16, 32), ([5, 6], [1, 1]), kvspec.SpecError),
    ],
)
def test_states_without_a_block_of_their_own_are_refused(
    positions: Any, tables: Any, error: Any
) -> None:
    """`verify` refuses the same requests, whatever was copied."""
    here = world(snapshots(*tables, positions))
    with pytest.raises((error, kvspec.MismatchError)):
        here.table(kvspec.RankId(), kvspec.RankId()).select(here.case.request)
    caches = [
        {rank: c for rank, (c, _) in side.items()} for side in (here.producers, here.consumers)
    ]
    with pytest.raises((error, kvspec.MismatchError)):
        kvspec.verify(here.plan, *caches, here.case.request)


@pytest.mark.parametrize("wrong", [(32, 16), (16, 16, 32), (16,), (0, 32), (16, 32, 48), "x", 32])
def test_state_positions_are_ascending_up_to_the_last_token(wrong: Any) -> None:
    with pytest.raises(kvspec.SpecError) as error:
        builders.request(32, [1, 2], [1, 2], state_positions=wrong)
    assert "state_positions" == error.value.field


def test_digest_of_several_states_is_refused() -> None:
    """A digest has one sum for each layer, so it would be that of one state alone."""
    one = snapshots([5, 6], [1, 2], (16, 32))
    with pytest.raises(kvspec.SpecError) as error:
        digests.wanted(world(one).plan, one.request)
    assert "state_positions" == error.value.field


def test_laws_find_a_connector_that_moves_only_the_last_state() -> None:
    """A prefix cache would then resume from random bytes."""

    def last_alone(here: World, producer: kvspec.RankId, consumer: kvspec.RankId) -> list[ByteCopy]:
        only = attrs.evolve(here.case.request, state_positions=())
        copies = here.table(producer, consumer).descriptors(only).astype(np.int64)
        return [(source, target, size) for source, target, size in copies.tolist()]

    one = snapshots([5, 6, 7], [1, 2, 3], (16, 32, 40))
    wrong = laws.System(name="last alone", descriptors=last_alone)
    assert 1 in {law.number for law, _ in laws.broken(wrong, one)}
