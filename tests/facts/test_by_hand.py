"""Facts worked out by hand: small tables of slices, releasers, stripes, sizes and live tokens.

Laws hold the library against itself; these hold it against numbers that a reader can check.
"""

from __future__ import annotations

from typing import Any

import builders
import pytest

import kvspec
from kvspec import RankId
from kvspec.ownership.slices import TPTransferSlice

Seen = list[tuple[int, tuple[int, int], int, int]]


def gqa(heads: int, **changed: Any) -> kvspec.FullAttentionSpec:
    """Return a spec of *heads* KV heads of 128 elements of bfloat16, 16 tokens a block."""
    return builders.gqa(heads, **{"head_size": 128} | changed)


def mamba2(**changed: Any) -> kvspec.MambaSpec:
    """Return a Mamba2 state: 4 heads of 2, one group of 3, unless *changed*."""
    return builders.mamba2(**{"num_heads": 4, "ssm_dtype": "float32"} | changed)


LATENT = kvspec.MLAAttentionSpec(block_size=64, head_size=576, dtype="bfloat16")


def plan(heads: int, producer: int, consumer: int, **how: Any) -> kvspec.TransferPlan:
    """Return the plan of one layer of *heads* KV heads between two TP sizes."""
    return kvspec.plan_transfer(*builders.sides(gqa(heads), producer, consumer), **how)


def seen(slices: tuple[TPTransferSlice, ...], parts: tuple[str, ...] = ("k", "v")) -> Seen:
    """Return (remote rank, (first, end) unit, first local, first remote) for *parts*."""
    found = []
    for each in slices:
        assert len(each.global_range) == len(each.local_range) == len(each.remote_range)
        if each.parts == parts:
            units = (each.global_range.start, each.global_range.stop)
            found.append((each.remote_rank, units, each.local_range.start, each.remote_range.start))
    return found


SLICES: list[tuple[int, int, int, list[Seen]]] = [
    # heads, producer TP, consumer TP, of every consumer rank: source, heads, local, remote
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
def test_slices(heads: int, producer: int, consumer: int, ranks: list[Seen]) -> None:
    """Which heads each consumer rank reads of whom, and where they lie on either side."""
    spec = gqa(heads)
    assert ranks == [
        seen(spec.get_tp_transfer_slices(rank, consumer, producer)) for rank in range(consumer)
    ]


STATES: list[tuple[int, int, dict[str, list[Seen]]]] = [
    # producer TP, consumer TP, of every consumer rank by part: source, units, local, remote
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
def test_slices_of_a_state(producer: int, consumer: int, parts: dict[str, list[Seen]]) -> None:
    """One group's B and C go whole to every rank; x goes in heads of two, the state in heads."""
    for names, ranks in parts.items():
        slices = [
            mamba2().get_tp_transfer_slices(rank, consumer, producer) for rank in range(consumer)
        ]
        assert ranks == [seen(each, tuple(names.split())) for each in slices]


POLICIES: list[tuple[int, int, int, dict[str, Any], list[list[tuple[int, tuple[int, int]]]]]] = [
    # heads, producer TP, consumer TP, how, of every consumer rank: source, (first, step) of blocks
    (1, 8, 3, {}, [[(0, (0, 1))], [(2, (0, 1))], [(5, (0, 1))]]),
    (1, 8, 3, {"replica_policy": "first"}, [[(0, (0, 1))]] * 3),
    (1, 8, 3, {"replica_policy": kvspec.ReplicaPolicy("spread", 3)},
     [[(3, (0, 1))], [(5, (0, 1))], [(0, (0, 1))]]),
    (1, 4, 2, {"replica_policy": "stripe"}, [[(0, (0, 2)), (2, (1, 2))], [(1, (0, 2)), (3, (1,
     2))]]),
    (1, 4, 1, {"replica_policy": "stripe"}, [[(0, (0, 4)), (1, (1, 4)), (2, (2, 4)), (3, (3, 4))]]),
    (1, 2, 4, {"replica_policy": "stripe"}, [[(i % 2, (0, 1))] for i in range(4)]),
    (1, 2, 1, {"replica_policy": kvspec.ReplicaPolicy("stripe", 1)}, [[(1, (0, 2)), (0, (1, 2))]]),
    (2, 4, 1, {"replica_policy": "stripe"},
     [[(0, (0, 2)), (1, (1, 2)), (2, (0, 2)), (3, (1, 2))]]),
    (1, 3, 2, {"replica_policy": "stripe"},
     [[(0, (0, 3)), (2, (1, 3)), (1, (2, 3))], [(1, (0, 3)), (0, (1, 3)), (2, (2, 3))]]),
]  # fmt: skip


@pytest.mark.parametrize(("heads", "producer", "consumer", "how", "ranks"), POLICIES)
def test_who_is_read(
    heads: int, producer: int, consumer: int, how: dict[str, Any], ranks: list[Any]
) -> None:
    """Of equal producer ranks, which is read by whom, and for which blocks."""
    found = [
        [
            (each.remote_rank, (each.stripe.first, each.stripe.step))
            for each in gqa(heads).get_tp_transfer_slices(rank, consumer, producer, **how)
        ]
        for rank in range(consumer)
    ]
    assert ranks == found


RELEASERS: list[tuple[int, int, int, dict[int, int]]] = [
    # heads, producer TP, consumer TP, of every producer rank that nobody reads: who tells it
    (1, 8, 3, {1: 0, 3: 1, 4: 1, 6: 2, 7: 2}),
    (2, 8, 2, {1: 0, 2: 0, 3: 0, 5: 1, 6: 1, 7: 1}),
    (2, 6, 2, {1: 0, 2: 0, 4: 1, 5: 1}),
    (8, 16, 2, {1: 0, 3: 0, 5: 0, 7: 0, 9: 1, 11: 1, 13: 1, 15: 1}),
    (1, 4, 1, {1: 0, 2: 0, 3: 0}),
    (4, 4, 8, {}),
    (12, 4, 3, {}),
]


@pytest.mark.parametrize(("heads", "producer", "consumer", "told"), RELEASERS)
def test_releasers(heads: int, producer: int, consumer: int, told: dict[int, int]) -> None:
    """Each unread producer rank has one releaser; a rank that is read is told by its readers."""
    made = plan(heads, producer, consumer)
    for rank in made.producer.parallel.ranks:
        wanted = (RankId(tp=told[rank.tp]),) if rank.tp in told else made.targets(rank)
        assert wanted == made.notifiers(rank)
        assert bool(made.targets(rank)) == (rank.tp not in told)


@pytest.mark.parametrize(
    ("heads", "producer", "consumer", "reads", "notifies"),
    [
        (8, 16, 2, [[0, 2, 4, 6], [8, 10, 12, 14]], [list(range(8)), list(range(8, 16))]),
        (1, 8, 3, [[0], [2], [5]], [[0, 1], [2, 3, 4], [5, 6, 7]]),
        (6, 2, 3, [[0], [0, 1], [1]], [[0], [0, 1], [1]]),
    ],
)
def test_sources_and_counts(
    heads: int, producer: int, consumer: int, reads: list[list[int]], notifies: list[list[int]]
) -> None:
    """Whom each consumer rank reads and notifies; every rank of either engine reports."""
    made = plan(heads, producer, consumer)
    ranks = made.consumer.parallel.ranks
    assert reads == [[each.tp for each in made.sources(rank)] for rank in ranks]
    assert notifies == [[each.tp for each in made.notifies(rank)] for rank in ranks]
    assert (producer, consumer) == (made.finished_sending_count, made.finished_recving_count)


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
    """Bytes of one block on every rank."""
    assert pages == [spec.page_size_bytes(rank, size) for rank in range(size)]


ROWS: dict[str, Any] = {
    "block_size": 16, "total_num_kv_heads": 1, "head_size": 1, "dtype": "uint8",
}  # fmt: skip
FOUR = kvspec.SlidingWindowSpec(**ROWS, sliding_window=4)
LIVE: list[tuple[kvspec.LayerSpec, dict[int, range]]] = [
    (gqa(1), {0: range(0), 1: range(1), 1000: range(1000)}),
    (kvspec.CrossAttentionSpec(**ROWS), {0: range(0), 7: range(7)}),
    (LATENT, {0: range(0), 65: range(65)}),
    # the query at n and the window - 1 positions before it
    (FOUR, {0: range(0), 1: range(1), 3: range(3), 4: range(1, 4), 10: range(7, 10)}),
    (kvspec.SlidingWindowSpec(**ROWS, sliding_window=1), {0: range(0), 1: range(0), 9: range(0)}),
    (kvspec.SlidingWindowSpec(**ROWS, sliding_window=4096),
     {4095: range(4095), 4096: range(1, 4096), 5000: range(905, 5000)}),
    (kvspec.SlidingWindowSpec(**ROWS, sliding_window=4, extra_retained_tokens=2),
     {5: range(5), 6: range(1, 6), 10: range(5, 10)}),
    (kvspec.SlidingWindowMLASpec(block_size=16, head_size=1, dtype="uint8", sliding_window=4),
     {4: range(1, 4)}),
    # the query at n and what is before it in its own chunk
    (kvspec.ChunkedLocalAttentionSpec(**ROWS, attention_chunk_size=8),
     {0: range(0), 7: range(7), 8: range(0), 9: range(8, 9), 16: range(0), 23: range(16, 23)}),
    (mamba2(), {0: range(0), 1: range(1), 5: range(4, 5)}),
    (kvspec.UniformTypeKVCacheSpecs(specs={"a": FOUR, "b": FOUR}), {10: range(7, 10)}),
]  # fmt: skip


@pytest.mark.parametrize(("spec", "live"), LIVE)
def test_live_tokens(spec: kvspec.LayerSpec, live: dict[int, range]) -> None:
    """The positions that the query at n still reads; nothing is *the* empty range."""
    assert live == {n: spec.live_tokens(n) for n in live}
    assert {"range(0, 0)"} >= {repr(spec.live_tokens(n)) for n, each in live.items() if not each}


def test_traffic() -> None:
    """Ten tokens of one layer: 512 bytes a head and token, four heads to each consumer rank."""
    wanted = {(RankId(tp=2 * head), RankId(tp=head // 4)): 10 * 512 for head in range(8)}
    found = kvspec.traffic(plan(8, 16, 2), 10)
    assert wanted == {pair: load.nbytes for pair, load in found.pairs.items()}


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
def test_descriptors(
    layouts: tuple[str, str],
    tp_sizes: tuple[int, int],
    blocks: tuple[int, ...],
    count: int,
    length: int,
) -> None:
    """How many copies blocks 0, 1, 2 of one layer take to *blocks*, and of how many bytes each."""
    engines = [
        builders.engine(gqa(8), tp=size, layout=layout)
        for layout, size in zip(layouts, tp_sizes, strict=True)
    ]
    made = kvspec.plan_transfer(*engines)
    caches = [kvspec.allocate(engine, RankId(), 5)[0] for engine in engines]
    request = builders.request(48, range(3), blocks)
    rows = kvspec.build_table(made, *caches).descriptors(request)
    assert [length] * count == rows[:, 2].tolist()
