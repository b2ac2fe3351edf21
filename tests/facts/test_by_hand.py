"""Test slices, notifiers, stripes, page sizes and live tokens against numbers worked out by hand.

The tests in `tests/laws` compare parts of the library with each other. The numbers here can be
checked by a reader.
"""

from __future__ import annotations

from typing import Any

import builders
import pytest

import kvspec
from kvspec import RankId
from kvspec.ownership.slices import TPTransferSlice

# (remote rank, (first, end) unit, first local unit, first remote unit) of each slice
SliceTuples = list[tuple[int, tuple[int, int], int, int]]


def gqa(heads: int, **changed: Any) -> kvspec.FullAttentionSpec:
    """Return a spec of *heads* KV heads of 128 elements of bfloat16, with blocks of 16 tokens."""
    return builders.gqa(heads, **{"head_size": 128} | changed)


def mamba2(**changed: Any) -> kvspec.MambaSpec:
    """Return a Mamba2 state of 4 heads of 2 and one group of 3, with fields *changed*."""
    return builders.mamba2(**{"num_heads": 4, "ssm_dtype": "float32"} | changed)


LATENT = kvspec.MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")


def plan(heads: int, producer: int, consumer: int, **options: Any) -> kvspec.TransferPlan:
    """Return the plan of one layer of *heads* KV heads between two TP sizes."""
    return kvspec.plan_transfer(*builders.sides(gqa(heads), producer, consumer), **options)


def tuples_of(
    slices: tuple[TPTransferSlice, ...], parts: tuple[str, ...] = ("k", "v")
) -> SliceTuples:
    """Return the slices of *parts* as tuples."""
    tuples = []
    for slice_ in slices:
        units = slice_.global_range
        assert len(units) == len(slice_.local_range) == len(slice_.remote_range)
        if slice_.parts == parts:
            local, remote = slice_.local_range.start, slice_.remote_range.start
            tuples.append((slice_.remote_rank, (units.start, units.stop), local, remote))
    return tuples


SLICES: list[tuple[int, int, int, list[SliceTuples]]] = [
    # heads, producer TP, consumer TP; for every consumer rank: source, heads, local, remote
    (8, 16, 2, [
        [(0, (0, 1), 0, 0), (2, (1, 2), 1, 0), (4, (2, 3), 2, 0), (6, (3, 4), 3, 0)],
        [(8, (4, 5), 0, 0), (10, (5, 6), 1, 0), (12, (6, 7), 2, 0), (14, (7, 8), 3, 0)],
    ]),
    (6, 2, 3, [
        [(0, (0, 2), 0, 0)],
        [(0, (2, 3), 0, 2), (1, (3, 4), 1, 0)],
        [(1, (4, 6), 0, 1)],
    ]),
    (12, 4, 3, [
        [(0, (0, 3), 0, 0), (1, (3, 4), 3, 0)],
        [(1, (4, 6), 0, 1), (2, (6, 8), 2, 0)],
        [(2, (8, 9), 0, 2), (3, (9, 12), 1, 0)],
    ]),
    (1, 8, 3, [[(0, (0, 1), 0, 0)], [(2, (0, 1), 0, 0)], [(5, (0, 1), 0, 0)]]),
    (8, 3, 2, [
        [(0, (0, 2), 0, 0), (1, (2, 4), 2, 0)],
        [(1, (4, 5), 0, 2), (2, (5, 8), 1, 0)],
    ]),
    (8, 4, 2, [[(0, (0, 2), 0, 0), (1, (2, 4), 2, 0)], [(2, (4, 6), 0, 0), (3, (6, 8), 2, 0)]]),
    (2, 2, 4, [[(0, (0, 1), 0, 0)]] * 2 + [[(1, (1, 2), 0, 0)]] * 2),
    (2, 4, 8, [[(rank // 2, (rank // 4, rank // 4 + 1), 0, 0)] for rank in range(8)]),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "producer", "consumer", "ranks"), SLICES)
def test_slices_of_heads(
    heads: int, producer: int, consumer: int, ranks: list[SliceTuples]
) -> None:
    """The heads that each consumer rank reads from each source, and their places on both sides."""
    spec = gqa(heads)
    assert ranks == [
        tuples_of(spec.get_tp_transfer_slices(rank, consumer, producer)) for rank in range(consumer)
    ]


STATES: list[tuple[int, int, dict[str, list[SliceTuples]]]] = [
    # producer TP, consumer TP; by part, for every consumer rank: source, units, local, remote
    (1, 2, {
        "conv_x": [[(0, (0, 4), 0, 0)], [(0, (4, 8), 0, 4)]],
        "conv_b conv_c": [[(0, (0, 3), 0, 0)]] * 2,
        "ssm": [[(0, (0, 2), 0, 0)], [(0, (2, 4), 0, 2)]],
    }),
    (4, 2, {
        "conv_x": [[(0, (0, 2), 0, 0), (1, (2, 4), 2, 0)], [(2, (4, 6), 0, 0), (3, (6, 8), 2, 0)]],
        "conv_b conv_c": [[(0, (0, 3), 0, 0)], [(2, (0, 3), 0, 0)]],
        "ssm": [[(0, (0, 1), 0, 0), (1, (1, 2), 1, 0)], [(2, (2, 3), 0, 0), (3, (3, 4), 1, 0)]],
    }),
    (2, 4, {
        "conv_x": [[(0, (0, 2), 0, 0)], [(0, (2, 4), 0, 2)], [(1, (4, 6), 0, 0)],
                   [(1, (6, 8), 0, 2)]],
        "conv_b conv_c": [[(0, (0, 3), 0, 0)]] * 2 + [[(1, (0, 3), 0, 0)]] * 2,
        "ssm": [[(0, (0, 1), 0, 0)], [(0, (1, 2), 0, 1)], [(1, (2, 3), 0, 0)],
                [(1, (3, 4), 0, 1)]],
    }),
]  # fmt: skip


@pytest.mark.parametrize(("producer", "consumer", "parts"), STATES)
def test_slices_of_a_state(
    producer: int, consumer: int, parts: dict[str, list[SliceTuples]]
) -> None:
    """Every rank needs all of B and C, because there is one group. The rest is sharded by heads."""
    for names, ranks in parts.items():
        slices = [
            mamba2().get_tp_transfer_slices(rank, consumer, producer) for rank in range(consumer)
        ]
        assert ranks == [tuples_of(rank_slices, tuple(names.split())) for rank_slices in slices]


POLICIES: list[tuple[int, int, int, dict[str, Any], list[list[tuple[int, tuple[int, int]]]]]] = [
    # heads, producer TP, consumer TP, options;
    # for every consumer rank: source, (first, step) of its blocks
    (1, 8, 3, {}, [[(0, (0, 1))], [(2, (0, 1))], [(5, (0, 1))]]),
    (1, 8, 3, {"replica_policy": "first"}, [[(0, (0, 1))]] * 3),
    (1, 8, 3, {"replica_policy": kvspec.ReplicaPolicy("spread", 3)},
     [[(3, (0, 1))], [(5, (0, 1))], [(0, (0, 1))]]),
    (1, 4, 2, {"replica_policy": "stripe"},
     [[(0, (0, 2)), (2, (1, 2))], [(1, (0, 2)), (3, (1, 2))]]),
    (1, 4, 1, {"replica_policy": "stripe"}, [[(0, (0, 4)), (1, (1, 4)), (2, (2, 4)), (3, (3, 4))]]),
    (1, 2, 4, {"replica_policy": "stripe"}, [[(i % 2, (0, 1))] for i in range(4)]),
    (1, 2, 1, {"replica_policy": kvspec.ReplicaPolicy("stripe", 1)}, [[(1, (0, 2)), (0, (1, 2))]]),
    (2, 4, 1, {"replica_policy": "stripe"},
     [[(0, (0, 2)), (1, (1, 2)), (2, (0, 2)), (3, (1, 2))]]),
    (1, 3, 2, {"replica_policy": "stripe"},
     [[(0, (0, 3)), (2, (1, 3)), (1, (2, 3))], [(1, (0, 3)), (0, (1, 3)), (2, (2, 3))]]),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "producer", "consumer", "options", "ranks"), POLICIES)
def test_replica_policy_chooses_sources_and_stripes(
    heads: int, producer: int, consumer: int, options: dict[str, Any], ranks: list[Any]
) -> None:
    """The policy chooses the replica that each consumer rank reads, and for which blocks."""
    sources = [
        [
            (slice_.remote_rank, (slice_.stripe.first, slice_.stripe.step))
            for slice_ in gqa(heads).get_tp_transfer_slices(rank, consumer, producer, **options)
        ]
        for rank in range(consumer)
    ]
    assert ranks == sources


NOTIFIERS: list[tuple[int, int, int, dict[int, int]]] = [
    # heads, producer TP, consumer TP; for every producer rank without readers: its notifier
    (1, 8, 3, {1: 0, 3: 1, 4: 1, 6: 2, 7: 2}),
    (2, 8, 2, {1: 0, 2: 0, 3: 0, 5: 1, 6: 1, 7: 1}),
    (2, 6, 2, {1: 0, 2: 0, 4: 1, 5: 1}),
    (8, 16, 2, {1: 0, 3: 0, 5: 0, 7: 0, 9: 1, 11: 1, 13: 1, 15: 1}),
    (1, 4, 1, {1: 0, 2: 0, 3: 0}),
    (4, 4, 8, {}),
    (12, 4, 3, {}),
]


@pytest.mark.parametrize(("heads", "producer", "consumer", "notifier"), NOTIFIERS)
def test_producer_rank_is_notified_by_its_readers_or_by_one_other_rank(
    heads: int, producer: int, consumer: int, notifier: dict[int, int]
) -> None:
    """A producer rank that no consumer rank reads has one notifier."""
    transfer_plan = plan(heads, producer, consumer)
    for rank in transfer_plan.producer.parallel.ranks:
        targets = transfer_plan.targets(rank)
        expected = (RankId(tp=notifier[rank.tp]),) if rank.tp in notifier else targets
        assert expected == transfer_plan.notifiers(rank)
        assert bool(targets) == (rank.tp not in notifier)


@pytest.mark.parametrize(
    ("heads", "producer", "consumer", "reads", "notifies"),
    [
        (8, 16, 2, [[0, 2, 4, 6], [8, 10, 12, 14]], [list(range(8)), list(range(8, 16))]),
        (1, 8, 3, [[0], [2], [5]], [[0, 1], [2, 3, 4], [5, 6, 7]]),
        (6, 2, 3, [[0], [0, 1], [1]], [[0], [0, 1], [1]]),
    ],
)
def test_consumer_ranks_read_sources_and_notify_all_ranks(
    heads: int, producer: int, consumer: int, reads: list[list[int]], notifies: list[list[int]]
) -> None:
    """Every rank of both engines is counted when it has finished."""
    transfer_plan = plan(heads, producer, consumer)
    ranks = transfer_plan.consumer.parallel.ranks
    assert reads == [[source.tp for source in transfer_plan.sources(rank)] for rank in ranks]
    assert notifies == [[peer.tp for peer in transfer_plan.notifies(rank)] for rank in ranks]
    assert producer == transfer_plan.finished_sending_count
    assert consumer == transfer_plan.finished_recving_count


PAGES: list[tuple[kvspec.LayerSpec, int, list[int]]] = [
    # spec, TP size, bytes of a block on each rank
    (gqa(8), 1, [65536]),  # 16 tokens x 8 heads x (128 + 128) x 2
    (gqa(8), 4, [16384] * 4),
    (gqa(8), 3, [16384, 24576, 24576]),  # 2, 3 and 3 heads of 8192
    (gqa(2), 4, [8192] * 4),  # a replica each
    (gqa(1, head_size=192, head_size_v=128), 1, [10240]),  # 16 x (192 + 128) x 2
    (gqa(8, dtype="float8_e4m3fn"), 1, [32768]),
    (gqa(8, state_content_bytes=264), 2, [16896] * 2),  # 16 x 4 x (256 + two scales of 4)
    (gqa(8, page_size_padded=20000), 4, [20000] * 4),
    (LATENT, 1, [73728]),  # 64 x 576 x 2
    (LATENT, 8, [73728] * 8),
    (kvspec.MLAAttentionSpec(block_size=64, head_size=576, dtype="uint8", state_content_bytes=656),
     2, [41984] * 2),  # 64 x (512 + 16 + 128)
    (kvspec.MLAAttentionSpec(block_size=64, head_size=128, dtype="bfloat16", tokens_per_state=4),
     1, [4096]),  # 16 rows x 128 x 2
    (mamba2(), 1, [180]),  # 3 rows x (8 + 3 + 3) x 2 + 4 x 6 x 4
    (mamba2(), 2, [108] * 2),  # 3 x (4 + 3 + 3) x 2 + 2 x 6 x 4
    (mamba2(num_heads=128, head_dim=64, n_groups=8, state_size=128), 8, [531968] * 8),
    (mamba2(num_heads=128, head_dim=64, n_groups=8, state_size=128), 16, [266752] * 16),
    (kvspec.UniformTypeKVCacheSpecs(specs={"a": gqa(8), "b": gqa(4), "c": gqa(2)}), 4,
     [16384 + 8192 + 8192] * 4),
    (kvspec.MambaSpec.replicated_state(state_bytes=100), 2, [100, 100]),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "size", "pages"), PAGES)
def test_page_sizes(spec: kvspec.LayerSpec, size: int, pages: list[int]) -> None:
    """The sizes are the bytes of one block on every rank."""
    assert pages == [spec.page_size_bytes(rank, size) for rank in range(size)]


ROWS: dict[str, Any] = {
    "block_size": 16, "total_num_kv_heads": 1, "head_size": 1, "dtype": "uint8",
}  # fmt: skip
FOUR = kvspec.SlidingWindowSpec(**ROWS, sliding_window=4)
LIVE: list[tuple[kvspec.LayerSpec, dict[int, range]]] = [
    (gqa(1), {0: range(0), 1: range(1), 1000: range(1000)}),
    (kvspec.CrossAttentionSpec(**ROWS), {0: range(0), 7: range(7)}),
    (LATENT, {0: range(0), 65: range(65)}),
    # The query at n reads its own position and the window - 1 positions before it.
    (FOUR, {0: range(0), 1: range(1), 3: range(3), 4: range(1, 4), 10: range(7, 10)}),
    (kvspec.SlidingWindowSpec(**ROWS, sliding_window=1),
     {0: range(0), 1: range(1, 1), 9: range(9, 9)}),
    (kvspec.SlidingWindowSpec(**ROWS, sliding_window=4096),
     {4095: range(4095), 4096: range(1, 4096), 5000: range(905, 5000)}),
    (kvspec.SlidingWindowSpec(**ROWS, sliding_window=4, extra_retained_tokens=2),
     {5: range(5), 6: range(1, 6), 10: range(5, 10)}),
    (kvspec.SlidingWindowMLASpec(block_size=16, head_size=1, dtype="uint8", sliding_window=4),
     {4: range(1, 4)}),
    # The query at n reads its own position and those before it in its own chunk.
    (kvspec.ChunkedLocalAttentionSpec(**ROWS, attention_chunk_size=8),
     {0: range(0), 7: range(7), 8: range(8, 8), 9: range(8, 9), 16: range(16, 16),
      23: range(16, 23)}),
    (mamba2(), {0: range(0), 1: range(1), 5: range(4, 5)}),
    (kvspec.UniformTypeKVCacheSpecs(specs={"a": FOUR, "b": FOUR}), {10: range(7, 10)}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "live"), LIVE)
def test_live_tokens(spec: kvspec.LayerSpec, live: dict[int, range]) -> None:
    """These positions are read by the query at n. An empty range begins at n."""
    # Empty ranges are equal wherever they begin, so compare their texts.
    assert str(live) == str({n: spec.live_tokens(n) for n in live})


def test_traffic_of_pairs() -> None:
    """A token of one head and one layer has 512 bytes. Each consumer rank reads four heads."""
    expected = {(RankId(tp=2 * head), RankId(tp=head // 4)): 10 * 512 for head in range(8)}
    traffic = kvspec.traffic(plan(8, 16, 2), 10)
    assert expected == {pair: load.nbytes for pair, load in traffic.pairs.items()}


@pytest.mark.parametrize(
    ("layouts", "tp_sizes", "blocks", "count", "length"),
    [
        (("LBHNC", "LBHNC"), (1, 1), (0, 1, 2), 1, 3 * 65536),  # three blocks in one chunk
        (("LBHNC", "LBHNC"), (1, 1), (0, 2, 4), 3, 65536),
        (("LBNHC", "LBNHC"), (2, 1), (0, 1, 2), 48, 4 * 512),  # a token's four heads
        (("LBHNC", "LBHNC"), (2, 1), (0, 1, 2), 3, 4 * 16 * 512),  # four heads of a block
        (("LBHNC", "LBNHC"), (1, 1), (0, 2, 4), 384, 512),  # heads and tokens swap
        (("LKBNHC", "LKBNHC"), (1, 1), (0, 1, 2), 2, 3 * 32768),  # the planes of k and of v
        (("LKBNHC", "LBNHC"), (1, 1), (0, 1, 2), 768, 256),  # k and v apart, packed
        (("LBKHNC", "LKBHNC"), (2, 1), (0, 1, 2), 6, 4 * 16 * 256),  # four heads of a plane
    ],
)
def test_descriptors_have_equal_lengths(
    layouts: tuple[str, str],
    tp_sizes: tuple[int, int],
    blocks: tuple[int, ...],
    count: int,
    length: int,
) -> None:
    """Blocks 0, 1, 2 of one layer move to *blocks* in *count* descriptors of *length* bytes."""
    engines = [
        builders.engine(gqa(8), tp=size, layout=layout)
        for layout, size in zip(layouts, tp_sizes, strict=True)
    ]
    transfer_plan = kvspec.plan_transfer(*engines)
    caches = [kvspec.allocate(engine, RankId(), 5)[0] for engine in engines]
    request = builders.request(48, range(3), blocks)
    rows = kvspec.build_table(transfer_plan, *caches).descriptors(request)
    assert [length] * count == rows[:, 2].tolist()
