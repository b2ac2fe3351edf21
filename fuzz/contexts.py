"""For any two shardings, every token of every unit reaches each rank that owns it exactly once.

Tokens are sharded to context ranks in interleaves. Units are sharded to TP ranks in any order and
with replicas. Block sizes, kernel block sizes and cached counts differ between the sides. The
oracle shards positions one by one, and the bytes that move are read from addresses alone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import attrs
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.check.counting import own_positions, rank_units
from kvspec.ownership.replicas import ReplicaPolicyName
from kvspec.ownership.tokens import BlockCyclic, meet
from kvspec.testing.parallels import explicit_shardings
from kvspec.testing.strategies import KNOWN_POLICIES

LAYER = "layers.0"
# Four context ranks are enough for two interleaves that share no divisor on either side. More would
# only make each input slower.
LARGEST = 4
# A part, a unit, a token and a byte of its content.
Place = tuple[str, int, int, int]


@st.composite
def shared_tokens(draw: st.DrawFn, units: int) -> kvspec.ParallelConfig:
    """Draw a sharding of units and tokens in which some rank owns every token of every unit."""
    size, pcp_size = draw(st.integers(1, LARGEST)), draw(st.integers(1, 2))
    bare = draw(explicit_shardings(units, 1, draw(st.integers(1, 3))))
    copies = -(-size // pcp_size)
    held = draw(st.permutations([units_held for own in bare for units_held in [own] * copies]))
    rows = [[0] * len(held) for _ in range(pcp_size)]
    for own in dict.fromkeys(held):
        cells = [(p, t) for p in range(pcp_size) for t, has in enumerate(held) if has == own]
        more = draw(
            st.lists(
                st.integers(0, size - 1), min_size=len(cells) - size, max_size=len(cells) - size
            )
        )
        contexts = draw(st.permutations([*range(size), *more]))
        for (p, t), context in zip(cells, contexts, strict=True):
            rows[p][t] = context
    return kvspec.ParallelConfig(
        tp_size=len(held),
        pcp_size=pcp_size,
        interleave_size=draw(st.integers(1, 6)),
        shardings={units: tuple(held)},
        context_ranks=tuple(map(tuple, rows)),
    )


@st.composite
def engines(draw: st.DrawFn, units: int) -> kvspec.EngineSpec:
    """Draw an engine of one layer: its shardings, and a block size that the interleave divides."""
    parallel = draw(shared_tokens(units))
    size = parallel.interleave_size * draw(st.integers(1, 4))
    group = kvspec.KVCacheGroup(
        name="full",
        layers=(LAYER,),
        spec=kvspec.FullAttentionSpec(
            block_size=size, total_num_kv_heads=units, head_size=2, dtype="uint8"
        ),
        kernel_block_size=draw(st.sampled_from([k for k in range(1, size + 1) if not size % k])),
    )
    layout = draw(st.sampled_from(("LBHNC", "LBNHC", "LKBNHC", "BHLNC")))
    return kvspec.EngineSpec(groups=(group,), parallel=parallel, layout=layout)


@st.composite
def block_tables(draw: st.DrawFn, engine: kvspec.EngineSpec, tokens: int) -> list[int]:
    """Draw a table for *tokens* tokens with up to two extra blocks; the pool has three more."""
    virtual = engine.groups[0].spec.block_size * engine.parallel.context_size
    count = -(-tokens // virtual) + draw(st.integers(0, 2))
    return draw(st.permutations(range(count + 3)))[:count]


def placed(
    cache: kvspec.RankCache, table: list[int], start: int, length: int
) -> Iterator[Place | None]:
    """Yield the content of each of *length* bytes at *start*, by the table.

    A byte outside the blocks of the table is None.
    """
    engine, rank = cache.engine, cache.rank
    [group] = engine.groups
    kernel = group.kernel_block_size or group.spec.block_size
    kernel_blocks_per_block = group.spec.block_size // kernel
    positions = own_positions(engine, rank, 0, len(table) * group.spec.block_size)
    for address in range(start, start + length):
        for region in cache.regions:
            at = region.locate(address)
            if at is None:
                continue
            block, unit, row, byte = at
            if block // kernel_blocks_per_block not in table:
                yield None
                break
            local = table.index(block // kernel_blocks_per_block) * group.spec.block_size
            token = int(positions[local + block % kernel_blocks_per_block * kernel + row])
            part = next(p for p in group.spec.parts if p.name == region.part)
            yield region.part, rank_units(engine, rank, part)[unit], token, byte
            break
        else:
            raise AssertionError(f"address {address:#x} is in no region of {rank}")


@given(st.data(), st.integers(1, 4), st.sampled_from(KNOWN_POLICIES), st.integers(0, 3))
def test_consumers_receive_each_token_once(
    data: st.DataObject, units: int, replica_policy: ReplicaPolicyName, salt: int
) -> None:
    """Count the bytes that each consumer rank receives, by their meaning on both sides."""
    producer, consumer = (data.draw(engines(units)) for _ in range(2))
    tokens = data.draw(st.integers(1, 60))
    cached = data.draw(st.just(0) | st.integers(0, tokens))
    ours, theirs = (data.draw(block_tables(side, tokens)) for side in (producer, consumer))
    request = kvspec.TransferRequest(
        request_id="request",
        num_tokens=tokens,
        cached_tokens=cached,
        producer_blocks={"full": ours},
        consumer_blocks={"full": theirs},
    )
    plan = kvspec.plan_transfer(producer, consumer, kvspec.ReplicaPolicy(replica_policy, salt))
    sources, targets = (
        {rank: kvspec.allocate(side, rank, len(table) + 3) for rank in side.parallel.ranks}
        for side, table in ((producer, ours), (consumer, theirs))
    )
    for rank, (cache, _) in targets.items():
        arrived: Counter[Place] = Counter()
        for source in plan.sources(rank):
            far = sources[source][0]
            for origin, place, length in (
                kvspec.build_table(plan, far, cache).descriptors(request).tolist()
            ):
                read = list(placed(far, ours, origin, length))
                written = list(placed(cache, theirs, place, length))
                assert None not in written
                assert read == written
                arrived.update(byte for byte in written if byte is not None)
        assert set(arrived.values()) <= {1}
        assert not [byte for byte in arrived if byte[2] < cached]
        live = {byte for byte in arrived if byte[2] < tokens}
        assert set(owned(cache, range(cached, tokens))) == live


def owned(cache: kvspec.RankCache, tokens: range) -> Iterator[Place]:
    """Yield every byte of *tokens* that the rank must hold."""
    engine, rank = cache.engine, cache.rank
    positions = own_positions(engine, rank, 0, tokens.stop * engine.groups[0].spec.block_size)
    for part in engine.groups[0].spec.parts:
        for unit in rank_units(engine, rank, part):
            for token in positions[np.isin(positions, tokens)].tolist():
                yield from ((part.name, unit, token, byte) for byte in range(part.content_bytes))


@given(st.data())
def test_positions_are_sharded_like_those_of_the_oracle(data: st.DataObject) -> None:
    """`BlockCyclic` and the oracle agree about owners, local counts, and common positions."""
    sizes = [(data.draw(st.integers(1, 9)), data.draw(st.integers(1, 24))) for _ in range(2)]
    owners = [BlockCyclic(data.draw(st.integers(0, c - 1)), c, i) for c, i in sizes]
    positions = np.arange(sizes[0][0] * sizes[0][1] * sizes[1][0] * sizes[1][1])
    hands = []
    for owner in owners:
        parallel = kvspec.ParallelConfig(
            tp_size=owner.size, dcp_size=owner.size, interleave_size=owner.interleave
        )
        engine = attrs.evolve(BARE, parallel=parallel)
        count = len(positions) // owner.size
        own = own_positions(engine, kvspec.RankId(tp=owner.rank), 0, count)
        assert own.tolist() == positions[owner.owns(positions)].tolist()
        assert own.tolist() == owner.position(np.arange(count)).tolist()
        before = np.searchsorted(own, positions)
        assert before.tolist() == owner.local(positions).tolist()
        hands.append(set(own.tolist()))
    assert meet(*owners) == bool(hands[0] & hands[1])


# An engine of one state has no rule about the tokens of a rank, so any sharding of tokens is legal.
BARE = kvspec.EngineSpec(
    groups=(
        kvspec.KVCacheGroup(
            name="state",
            layers=(LAYER,),
            spec=kvspec.MambaSpec.short_conv(conv_dim=1, conv_kernel=2, dtype="uint8"),
        ),
    )
)
