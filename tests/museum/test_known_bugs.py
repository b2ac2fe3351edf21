"""Configurations of bugs that connectors of other projects had, moved byte by byte or rejected.

Each catalogued bug of mapping, layout, registration and block ids has a row if its report has a
configuration. Head counts, TP sizes, block sizes, tokens and tables are those of the report, but
head sizes and numbers of layers are small. The other bugs are listed with the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import builders
import numpy as np
import pytest
from builders import request as request_of
from moved import moved, moves

import kvspec

Faults = list[str]


def gqa(heads: int, block_size: int = 16, **more: Any) -> kvspec.FullAttentionSpec:
    """Return attention with *heads* KV heads."""
    return builders.gqa(heads, block_size=block_size, **more)


def mla(block_size: int = 16, size: int = 12, **more: Any) -> kvspec.MLAAttentionSpec:
    """Return a latent spec, or the spec of an indexer's keys."""
    return builders.mla(block_size=block_size, head_size=size, **more)


def window(heads: int, size: int, block_size: int = 16) -> kvspec.SlidingWindowSpec:
    """Return attention with a sliding window."""
    return builders.window(size, heads, block_size=block_size)


def gdn(heads: int = 8, **more: Any) -> kvspec.MambaSpec:
    """Return the state of a gated delta net, with conv channels q, k and v."""
    return kvspec.MambaSpec.gated_delta_net(
        num_k_heads=heads,
        num_v_heads=2 * heads,
        head_k_dim=2,
        head_v_dim=3,
        conv_kernel=4,
        dtype="bfloat16",
        **more,
    )


def mamba2(heads: int = 8, n_groups: int = 1) -> kvspec.MambaSpec:
    """Return a Mamba2 state."""
    return builders.mamba2(num_heads=heads, n_groups=n_groups, dtype="float16")


def engine(
    *specs: kvspec.LayerSpec,
    tp: int = 1,
    layout: str = "LBHNC",
    kernel: int | None = None,
    layers: int = 2,
    excluded: tuple[str, ...] = (),
    **sizes: Any,
) -> kvspec.EngineSpec:
    """Return an engine with a group of *layers* layers, interleaved, for each spec."""
    groups = []
    for at, spec in enumerate(specs):
        tokens = all(part.tokens_per_state for part in spec.parts)
        own = spec.layers or tuple(f"layer.{at + len(specs) * index}" for index in range(layers))
        groups.append(
            builders.group(
                spec,
                *own,
                name=f"group{at}",
                kernel_block_size=kernel if tokens else None,
                excluded=tuple(name for name in own if name in excluded),
            )
        )
    return builders.engine(*groups, tp=tp, layout=layout, **sizes)


def sized(
    *specs: kvspec.LayerSpec, p: int, d: int, tokens: int = 40, **more: Any
) -> Callable[[], Faults]:
    """Return the case that moves a model from TP *p* to TP *d*."""
    return lambda: moves(engine(*specs, tp=p, **more), engine(*specs, tp=d, **more), tokens)


def together(*cases: Callable[[], Faults]) -> Callable[[], Faults]:
    """Return one case that runs all *cases*."""
    return lambda: [fault for case in cases for fault in case()]


def every_triple() -> Faults:
    """Move 1 to 8 heads between all TP sizes that are powers of two up to 16."""
    faults = []
    for heads in (1, 2, 4, 8):
        for p in (1, 2, 4, 8, 16):
            for d in (1, 2, 4, 8, 16):
                faults += sized(gqa(heads), p=p, d=d, tokens=5, layers=1)()
    return faults


def pp_peers() -> Faults:
    """Move layers between equal stages, uneven stages and no stages."""
    staged = engine(gqa(4), layers=4, tp=2, pp_size=2)
    uneven = engine(gqa(4), layers=4, pp_size=2, stages=(range(1), range(1, 4)))
    whole = engine(gqa(4), layers=4, tp=4)
    pairs = ((staged, whole), (staged, uneven), (whole, uneven))
    return [fault for pair in pairs for fault in moves(*pair, 40)]


def pp_and_dcp() -> Faults:
    """Move a latent from 2 stages of 2 context ranks. The consumer needs all four ranks."""
    ranks = engine(mla(), layers=4, tp=2, dcp_size=2, pp_size=2, interleave_size=16)
    one = engine(mla(), layers=4)
    assert 4 == len(kvspec.plan_transfer(ranks, one).sources(kvspec.RankId()))
    return moves(ranks, one, 100)


def pp_and_states() -> Faults:
    """Move padded GDN pages from 2 stages of TP 2 to TP 4."""
    specs = gqa(2), attrs.evolve(gdn(), page_size_padded=600)
    return moves(engine(*specs, tp=2, pp_size=2), engine(*specs, tp=4), 40)


def hisparse() -> Faults:
    """Move from 8 context ranks (PCP 8) of TP 1 to TP 8. The last block is not full."""
    spans = tuple((rank,) for rank in range(8))
    ours = engine(mla(), pcp_size=8, context_ranks=spans, interleave_size=16)
    return moves(ours, engine(mla(), tp=8), 300)


def context_of_both() -> Faults:
    """Move from DCP 2 and PCP 2: the four context ranks divide the tokens of a block."""
    ours = engine(mla(), tp=2, dcp_size=2, pcp_size=2, interleave_size=16)
    return moves(ours, engine(mla()), 200)


def draft_layers(ours: int, theirs: int) -> Callable[[], Faults]:
    """Return the case of draft layers on one side, which are a mismatch unless excluded."""

    def case() -> Faults:
        more = tuple(f"layer.{at}" for at in range(min(ours, theirs), max(ours, theirs)))
        bare = [engine(gqa(2), layers=count, tp=2) for count in (ours, theirs)]
        with pytest.raises(kvspec.MismatchError) as caught:
            kvspec.plan_transfer(*bare)
        assert [f"{name}.layer" for name in more] == [m.field for m in caught.value.mismatches]
        sides = [engine(gqa(2), layers=count, tp=2, excluded=more) for count in (ours, theirs)]
        plan = kvspec.plan_transfer(*sides)
        assert all(name in kvspec.explain(plan) for name in more)
        return moves(*sides, 40)

    return case


def registered_in_another_order() -> Faults:
    """Move draft layers that one side registers first and the other side last."""
    spec = gqa(2)
    orders = ("layer.0", "layer.1", "draft.0"), ("draft.0", "layer.0", "layer.1")
    sides = [
        kvspec.EngineSpec(groups=(kvspec.KVCacheGroup(name="all", layers=order, spec=spec),))
        for order in orders
    ]
    return moves(*sides, 40)


def layouts(
    *pairs: tuple[str, str], specs: tuple[kvspec.LayerSpec, ...], p: int = 1, d: int = 1
) -> Callable[[], Faults]:
    """Return the case of one model in each pair of layouts."""

    def case() -> Faults:
        return [
            fault
            for ours, theirs in pairs
            for fault in moves(
                engine(*specs, tp=p, layout=ours), engine(*specs, tp=d, layout=theirs), 40
            )
        ]

    return case


def nvfp4_heads() -> Faults:
    """Reject packed pages that span the heads if the TP sizes differ."""
    spec = gqa(4, state_content_bytes=288, spans_heads=True, tokens_per_state=16)
    with pytest.raises(kvspec.MismatchError) as caught:
        kvspec.plan_transfer(engine(spec), engine(spec, tp=8))
    assert all(m.field.endswith(".kv") for m in caught.value.mismatches)
    return moves(engine(spec), engine(spec), 40)


def states_are_whole() -> Faults:
    """Move conv and temporal states. Each layer has regions for both."""
    side = engine(gqa(2), gdn(), tp=2)
    cache, _ = kvspec.allocate(side, kvspec.RankId(tp=1), 2)
    held = {(region.layer, region.part) for region in cache.regions}
    parts = [part.name for part in gdn().parts]
    assert {(layer, part) for layer in ("layer.1", "layer.3") for part in parts} <= held
    return moves(side, engine(gqa(2), gdn()), 40)


def aliases_of_other_lengths() -> Faults:
    """Move two groups at one address, with pages of 32768 and 19008 bytes, from TP 8 to TP 8."""
    sizes = {"layer.0": 32768, "layer.1": 19008}
    specs = [mla(4, size // 4, dtype="uint8") for size in sizes.values()]
    side, ranks, kept = engine(*specs, tp=8, layers=1), [], []
    for _ in "pd":
        ranks.append({})
        for rank in side.parallel.ranks:
            flat = np.zeros(8 * 32768, np.uint8)
            kept.append(flat)
            views = {
                layer: np.ndarray(
                    (8, 1, 4, size // 4), np.uint8, flat, 0, (32768, size, size // 4, 1)
                )
                for layer, size in sizes.items()
            }
            ranks[-1][rank] = kvspec.RankCache.from_tensors(side, rank, views, "BHNC")
    tables = {"group0": [5, 4], "group1": [1, 2]}, {"group0": [6, 7], "group1": [0, 3]}
    return moved(side, side, request_of(8, *tables), (ranks[0], ranks[1]))


def tables(
    tokens: int,
    ours: Any,
    theirs: Any,
    *specs: kvspec.LayerSpec,
    p: Any = None,
    d: Any = None,
    **more: Any,
) -> Callable[[], Faults]:
    """Return the case of one model with the block tables of the report."""

    def case() -> Faults:
        sides = [engine(*specs, **(sizes or {})) for sizes in (p, d)]
        named = [
            {f"group{at}": table for at, table in enumerate(side if len(specs) > 1 else [side])}
            for side in (ours, theirs)
        ]
        return moved(*sides, request_of(tokens, *named, **more))

    return case


def own_pools() -> Faults:
    """Move chunked local attention from TP 2 to TP 4 between pools of unequal sizes."""
    spec = kvspec.ChunkedLocalAttentionSpec(
        block_size=16, total_num_kv_heads=8, head_size=4, dtype="bfloat16", attention_chunk_size=64
    )
    few, many = {"group0": [5, 0, 3, 1, 2, 4, 6]}, {"group0": [40, 2, 77, 30, 8, 99, 1]}
    sides = engine(spec, tp=2), engine(spec, tp=4)
    return [
        fault
        for ours, theirs in ((few, many), (many, few))
        for fault in moved(*sides, request_of(100, ours, theirs))
    ]


def one_token_too_many() -> Faults:
    """Add the first sampled token to the prompt: 2049 tokens, of which the producer holds 2048.

    31 blocks of 64 tokens are cached, so 2048 tokens need one block. 2049 tokens are a mismatch.
    """
    ours, theirs = {"group0": range(32)}, {"group0": [*range(40, 8, -1), 3]}
    sides = engine(gqa(2, 64), layers=1), engine(gqa(2, 64), layers=1)
    with pytest.raises(kvspec.MismatchError) as caught:
        moved(*sides, request_of(2049, ours, theirs, cached_tokens=31 * 64))
    (mismatch,) = caught.value.mismatches
    expected = ("producer_blocks['group0']", range(2048), range(31 * 64, 2049))
    assert expected == (mismatch.field, mismatch.producer, mismatch.consumer)
    return moved(*sides, request_of(2048, ours, theirs, cached_tokens=31 * 64))


def full_hit() -> Faults:
    """Replay 7681 tokens in blocks of 64. 7680 are cached, so nothing moves, not even the state."""
    sides = engine(gqa(2, 64), mamba2(), layers=1), engine(gqa(2, 64), mamba2(), layers=1)
    both = {"group0": range(121), "group1": [0]}
    return moved(*sides, request_of(7680, both, both, cached_tokens=7680))


def of_sizes(*pairs: tuple[int, int], tokens: int, layout: str = "LBHNC") -> Callable[[], Faults]:
    """Return the case of unequal block sizes, with and without a cached prefix."""

    def case() -> Faults:
        return [
            fault
            for ours, theirs in pairs
            for cached in (0, 16, 128)
            for fault in moves(
                engine(gqa(2, ours), layout=layout),
                engine(gqa(2, theirs), layout=layout),
                tokens,
                cached_tokens=cached,
            )
        ]

    return case


def kernels(ours: int | None, theirs: int | None) -> Callable[[], Faults]:
    """Return the case of a hybrid, TP 4 to 1, with unequal kernel blocks."""
    specs = gqa(2, 48), gdn()
    return lambda: moves(engine(*specs, tp=4, kernel=ours), engine(*specs, kernel=theirs), 100)


def minimax(size: int) -> Callable[[], Faults]:
    """Return the case of 4 sharded heads and of indexer keys on every rank, TP 4 to 1."""
    return sized(gqa(4), mla(16, size), p=4, d=1)


def uniform() -> kvspec.UniformTypeKVCacheSpecs:
    """Return a latent and indexer keys in one group."""
    return kvspec.UniformTypeKVCacheSpecs(
        specs={"layer.0.attn": mla(64), "layer.0.indexer": mla(64, 4)}
    )


LOOKAHEAD = tables(128, [3, 1, 0], [2, 0], gqa(2, 64))
NULLS = tables(
    130,
    [[0, 17], [0, 19], [0, 21], [0, 23], [24, 25]],
    [[16], [17], [18], [19], [20, 21]],
    *[attrs.evolve(kvspec.MambaSpec.replicated_state(state_bytes=40), block_size=80)] * 4,
    gqa(2, 80),
)
CASES: dict[str, Callable[[], Faults]] = {
    # mapping
    "vllm#45330": every_triple,
    "vllm#52516": together(
        sized(gqa(4), p=8, d=1), sized(gqa(4), p=2, d=8), sized(gqa(4), p=4, d=8)
    ),
    "vllm#55523": minimax(12),
    "vllm#49499": sized(mla(), gdn(), p=2, d=2),
    "sglang#19086": sized(gqa(2), p=4, d=1),
    "sglang#23746": sized(gqa(2), gdn(), p=1, d=4),
    "sglang#31295": sized(gqa(2), p=1, d=4, layout="LKBNHC"),
    "vllm-ascend#3366": together(sized(gqa(2), p=8, d=4), sized(gqa(2), p=4, d=8)),
    "vllm-ascend#5846": sized(gqa(2), p=2, d=8),
    "vllm#26848": sized(mla(), p=4, d=2),
    "vllm#37635": together(sized(gqa(2), gdn(), p=4, d=1), sized(gqa(2), gdn(), p=4, d=2)),
    "vllm-rbln#1011": pp_peers,
    "vllm-ascend#16149": pp_and_dcp,
    "vllm#55208": together(
        *(sized(gqa(2), mamba2(), p=p, d=d) for p, d in ((1, 2), (2, 1), (4, 2)))
    ),
    "vllm#53078": pp_and_states,
    "sglang#22060": together(*(sized(gdn(), p=p, d=1) for p in (8, 2))),
    "TensorRT-LLM#16237": minimax(4),
    "vllm#57389": hisparse,
    "vllm#38433": context_of_both,
    "vllm#54926": draft_layers(2, 3),
    "sglang#30222": draft_layers(78, 79),
    "sglang#33041": registered_in_another_order,
    "vllm#43366": lambda: moves(engine(gqa(4), pp_size=2), engine(gqa(4), tp=2), 40),
    # layout
    "vllm#52516 (padded pages)": together(
        sized(gqa(4, page_size_padded=1200), p=1, d=8), nvfp4_heads
    ),
    "TensorRT-LLM#6507": layouts(("NHD", "NHD"), ("NHD", "HND"), specs=(gqa(4),), p=2, d=4),
    "TensorRT-LLM#16505": sized(gqa(2, dtype="float8_e4m3fn"), mamba2(), p=2, d=1),
    "vllm#33192": layouts(("BLHNC", "LBHNC"), ("BLHNC", "BLHNC"), specs=(gqa(8),)),
    "vllm#36867": layouts(
        ("BLNHC", "LBNHC"), ("LBHNC", "BLHNC"), specs=(gqa(2, dtype="float8_e4m3fn"),)
    ),
    "vllm#47783": layouts(("BLHNC", "LBHNC"), ("LBNHC", "BLHNC"), specs=(uniform(),)),
    "vllm#21789": layouts(("NHD", "HND"), ("HND", "NHD"), specs=(gqa(4),)),
    "vllm#32204": layouts(("HND", "NHD"), specs=(gqa(4), window(4, 20))),
    "vllm#19090": layouts(
        ("LBKNHC", "LBKHNC"), ("LBKNHC", "LKBNHC"), ("LBHNC", "LBKNHC"), specs=(gqa(4),), p=1, d=2
    ),
    # registration
    "vllm#46407": lambda: moves(
        engine(gqa(2), mamba2(), mamba2(), pp_size=2), engine(gqa(2), mamba2(), mamba2()), 40
    ),
    "vllm#39529": states_are_whole,
    "vllm#57661": aliases_of_other_lengths,
    "vllm#23079": lambda: moves(
        engine(gqa(4), *(window(4, 20) for _ in range(6)), layers=5),
        engine(gqa(4), *(window(4, 20) for _ in range(6)), layers=5),
        40,
    ),
    "vllm#50714": lambda: moves(engine(mla(256), mla(4)), engine(mla(256), mla(4)), 300),
    "vllm#53781": layouts(
        ("BLHNC", "BLHNC"),
        ("LBHNC", "BLHNC"),
        specs=(mla(64), mla(64, 33, dtype="uint8")),
        p=8,
        d=8,
    ),
    "kvcached#311": lambda: moves(engine(gqa(2, 64), kernel=16), engine(gqa(2, 64)), 100),
    # block ids
    "vllm#33795": own_pools,
    "vllm#50558": one_token_too_many,
    "vllm#48758": tables(64, [7, 1, 4, 2], [3, 0, 6, 5], gqa(2), cached_tokens=32),
    "vllm#41693": NULLS,
    "vllm#53514": full_hit,
    "vllm-ascend#8908": LOOKAHEAD,
    "vllm#46694": together(LOOKAHEAD, tables(127, [3, 1], [2, 0, 4], uniform())),
    "vllm#26759": of_sizes((16, 128), (128, 16), tokens=300),
    "vllm#42895": together(kernels(16, None), kernels(16, 24), kernels(None, 16)),
}
"""The bugs whose report has a configuration. A case moves it and returns the wrong bytes."""

NO_CONFIGURATION = {
    "vllm-ascend#15467": "it wasted memory on draft layers, and moved the right bytes",
    "vllm#29569": "memory of an allocator that the network card cannot register",
    "vllm#22976": "the device number of a pipeline stage: needs several GPUs",
    "vllm#30358": "it is about block counts of requests over time, and its report has no cause",
}
"""The bugs without a case, and the reason."""


@pytest.mark.parametrize("bug", CASES)
def test_kvspec_does_not_have_a_known_bug(bug: str) -> None:
    """Each live byte arrives once and no other byte changes, or the case checks an error."""
    assert [] == CASES[bug]()


def test_every_catalogued_bug_is_listed() -> None:
    """The catalogue has 24 bugs of mapping, 9 of layout, 9 of registration and 10 of block ids."""
    assert 52 == len(CASES) + len(NO_CONFIGURATION)
    assert 4 == len(NO_CONFIGURATION)
