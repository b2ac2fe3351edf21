"""Errors of layouts, groups, engines, shardings and pairs of engines.

An impossible description is a `SpecError`. Two engines that do not fit are a `MismatchError`, which
lists every differing field with both values and the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from builders import mamba2
from refused import REJECTED, check_rejected, differences, refusal, row

import kvspec
from kvspec import RankId

GQA: dict[str, Any] = {
    "block_size": 4, "total_num_kv_heads": 4, "head_size": 8, "dtype": "bfloat16",
}  # fmt: skip
FULL = kvspec.FullAttentionSpec(**GQA)
PADDED = kvspec.FullAttentionSpec(**GQA, page_size_padded=1024)
WINDOW = kvspec.SlidingWindowSpec(**GQA, sliding_window=4)
CHUNKED = kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=4)
MLA = kvspec.MLAAttentionSpec(block_size=4, head_size=8, dtype="bfloat16")
TWO = kvspec.UniformTypeKVCacheSpecs(
    specs={"a": FULL, "b": attrs.evolve(FULL, total_num_kv_heads=2)}
)
ROWS = kvspec.UniformTypeKVCacheSpecs(
    specs={"a": FULL, "b": attrs.evolve(FULL, tokens_per_state=2)}
)


def group(*layers: Any, name: Any = "g", spec: Any = FULL, **fields: Any) -> kvspec.KVCacheGroup:
    """Return a group of *layers*, by default the layer "l"."""
    return kvspec.KVCacheGroup(name=name, layers=layers or ("l",), spec=spec, **fields)


def engine(*groups: Any, layout: Any = "LBHNC", **sizes: Any) -> kvspec.EngineSpec:
    """Return an engine of *groups*, by default one group of one layer, with parallel *sizes*."""
    parallel = kvspec.ParallelConfig(**sizes)
    return kvspec.EngineSpec(groups=groups or (group(),), parallel=parallel, layout=layout)


def state(**sizes: Any) -> kvspec.MambaSpec:
    """Return a Mamba2 state of two heads. *sizes* replace its other sizes."""
    return mamba2(**{"num_heads": 2, "state_size": 2, "conv_kernel": 2} | sizes)


def opaque(**sizes: Any) -> kvspec.MambaSpec:
    """Return a state of one part "p" of four units. *sizes* replace the part's fields."""
    base: dict[str, Any] = {
        "name": "p", "units": 4, "states": 1, "content_bytes": 1, "tokens_per_state": 0,
    }  # fmt: skip
    return kvspec.MambaSpec(state_parts=(kvspec.Part(**base | sizes),))


@pytest.mark.parametrize(
    "layout",
    ["LBHN", "LBHNCC", "LBHHNC", "LBHNCB", "LBXNC", "LBKKHNC", "KC", "", "lbhnc", "nhd", "LBHNC ",
     3, b"LBHNC", ("L", "B", "H", "N", "C")],
)  # fmt: skip
def test_layout_rejects_missing_doubled_and_unknown_letters(layout: Any) -> None:
    """An engine and a group both check their layout."""
    check_rejected(lambda: engine(layout=layout), "layout", layout)
    check_rejected(lambda: group(layout=layout), "groups['g'].layout", layout)


@pytest.mark.parametrize("layout", ["CLBHN", "LBHCN", "LBKHCN"])
def test_layout_rejects_content_before_the_last_letter(layout: str) -> None:
    """Content is contiguous in every layout."""
    check_rejected(lambda: engine(layout=layout), "layout", layout, "contiguous")


def test_layout_may_be_none_in_a_group_only() -> None:
    """A group without a layout has the engine's."""
    check_rejected(lambda: engine(layout=None), "layout", None)
    assert group(layout=None).layout is None


def sharding(*ranges: Any, units: Any = 4) -> object:
    """Return a config of two TP ranks with an explicit sharding."""
    return kvspec.ParallelConfig(tp_size=2, shardings={units: ranges})


BARE = kvspec.LayerSpec(block_size=4)


def blocks(num_blocks: Any, **fields: Any) -> object:
    """Allocate a cache of *num_blocks*."""
    return kvspec.allocate(engine(), RankId(), num_blocks, **fields)


def at(rank: Any) -> object:
    """Allocate the cache of *rank*, which should be one of two TP ranks."""
    return kvspec.allocate(engine(tp_size=2), rank, 1)


def cache(spec: kvspec.LayerSpec, layout: str) -> object:
    """Allocate a cache of *spec* in *layout*."""
    layers = spec.layers or ("a", "b")
    return kvspec.allocate(engine(group(*layers, spec=spec), layout=layout), RankId(), 2)


SHORT = (range(2), range(2, 3))
LONG = (range(2), range(2, 5))
DOUBLE = (range(3), range(2, 4))
THREE = (range(4), range(4), range(4))


def call_with_a_list(name: str) -> object:
    """Pass a list, which has no hash, for a name or a number."""
    value: Any = ["l"]
    calls: dict[str, Callable[[], object]] = {
        "page": lambda: engine().page_size_bytes(value, RankId()),
        "group": lambda: engine().group(value),
        "of_layer": lambda: TWO.of_layer(value),
        "role": lambda: FULL.get_tp_transfer_slices(0, 1, 1, value),
        "excluded": lambda: group(excluded=[value]),
    }
    return calls[name]()


TABLE: list[Any] = [
    # groups
    row(lambda: group(name=""), "name", ""),
    row(lambda: group(name=None), "name", None),
    row(lambda: kvspec.KVCacheGroup(name="g", layers=(), spec=FULL), "groups['g'].layers", ()),
    row(lambda: kvspec.KVCacheGroup(name="g", layers="l", spec=FULL), "layers", "l"),
    row(lambda: group("l", "m", "l"), "groups['g'].layers", ("l", "m", "l")),
    row(lambda: group(spec=None), "groups['g'].spec", None),
    row(lambda: group(spec="full"), "groups['g'].spec", "full"),
    row(lambda: group(spec=int), "groups['g'].spec", int),
    row(lambda: group("a", spec=TWO), "groups['g'].layers", ("a",)),
    row(lambda: group("a", "c", spec=TWO), "groups['g'].layers", ("a", "c")),
    # engines
    row(lambda: kvspec.EngineSpec(groups=()), "groups", ()),
    row(lambda: engine("full"), "groups", "full"),
    row(lambda: engine(group("l"), group("m")), "groups", "g", "different"),
    row(lambda: engine(group("l"), group("m", "l", name="h")), "groups['h'].layers", "l"),
    row(lambda: engine().group("h"), "group", "h"),
    # shardings
    row(lambda: sharding(*SHORT), "shardings[4]", SHORT, "missing"),
    row(lambda: sharding(*DOUBLE), "shardings[4]", DOUBLE, "double"),
    row(lambda: sharding(*LONG), "shardings[4]", LONG, "outside"),
    row(lambda: sharding(*THREE[:1]), "shardings[4]", THREE[:1], 2),
    row(lambda: sharding(*THREE), "shardings[4]", THREE, 2),
    row(lambda: sharding(range(0, 4, 2), range(1, 4, 2)), "shardings[4]", range(0, 4, 2), "step"),
    row(lambda: sharding(range(-1, 2), range(2, 4)), "shardings[4]", range(-1, 2), "step"),
    row(lambda: sharding((0, 2), (2, 4)), "shardings[4]", (0, 2), "step"),
    row(lambda: sharding(range(1), range(1), units=0), "shardings", 0, 1),
    row(lambda: sharding(range(1), range(1), units="k"), "shardings", "k", 1),
    row(lambda: kvspec.plan_transfer(*[engine(
        group(spec=state()), tp_size=2, shardings={4: (range(1), range(1, 4))})] * 2),
        "shardings[4]", range(1), 2),
    # ranks
    row(lambda: at(RankId(tp=2)), "rank", RankId(tp=2)),
    row(lambda: at(RankId(tp=-1)), "rank", RankId(tp=-1)),
    row(lambda: at(RankId(pp=1)), "rank", RankId(pp=1)),
    row(lambda: at(RankId(pcp=1)), "rank", RankId(pcp=1)),
    row(lambda: at(0), "rank", 0),
    row(lambda: at((0, 0, 0)), "rank", (0, 0, 0)),
    # blocks
    *(row(lambda n=n: blocks(n), "num_blocks['g']", n, 1) for n in (0, -1, True, 1.5, None, "3")),
    row(lambda: blocks({"g": 0}), "num_blocks['g']", 0, 1),
    row(lambda: blocks({}), "num_blocks['g']", None, 1),
    row(lambda: blocks({"h": 1}), "num_blocks", ["h"]),
    # pages in layouts
    *(row(lambda x=x: cache(PADDED, x), "page_size_padded", 1024, x)
      for x in ("LHBNC", "BHLNC", "HLBNC", "LNBHC", "LKBNHC", "KLBHNC", "BKLHNC")),
    row(lambda: cache(attrs.evolve(FULL, page_size_padded=511), "LBHNC"),
        "page_size_padded", 511, 512),
    *(row(lambda x=x: cache(TWO, x), "layout", x, "H") for x in ("BHLNC", "HLBNC")),
    row(lambda: cache(ROWS, "BHNLC"), "layout", "BHNLC", "N"),
    # plans
    row(lambda: kvspec.plan_transfer("p", engine()), "producer", "p"),  # type: ignore[arg-type]
    row(lambda: kvspec.mismatches("p", engine()), "producer", "p"),  # type: ignore[arg-type]
    row(lambda: kvspec.mismatches(engine(), None), "consumer", None),  # type: ignore[arg-type]
    row(lambda: kvspec.plan_transfer(engine(), None), "consumer", None),  # type: ignore[arg-type]
    row(lambda: kvspec.plan_transfer(engine(), engine(), replica_policy="all"),  # type: ignore[arg-type]
        "replica_policy", "all"),
    row(lambda: kvspec.traffic(kvspec.plan_transfer(engine(), engine()), -1), "num_tokens", -1, 0),
    row(lambda: kvspec.traffic(kvspec.plan_transfer(engine(), engine()), num_tokens=True),
        "num_tokens", value=True, word=0),
    # values of another type
    *(row(lambda n=name: call_with_a_list(n), field, ["l"])
      for name, field in (
          ("page", "layer"), ("group", "group"), ("of_layer", "layer"), ("role", "role"),
          ("excluded", "groups['g'].excluded"))),
    row(lambda: kvspec.KVCacheGroup(name="g", layers=np.array("l"), spec=FULL),
        "layers", np.array("l")),
    row(lambda: kvspec.EngineSpec(groups=range(10**20)), "groups", range(10**20)),  # type: ignore[arg-type]
    row(lambda: kvspec.KVCacheGroup(name="g", layers=None, spec=FULL), "layers", None),  # type: ignore[arg-type]
    row(lambda: group(1), "groups['g'].layers", 1),
    row(lambda: group("l", ""), "groups['g'].layers", ""),
    row(lambda: kvspec.EngineSpec(groups=None), "groups", None),  # type: ignore[arg-type]
    row(lambda: kvspec.EngineSpec(groups=group()), "groups", group()),  # type: ignore[arg-type]
    row(lambda: engine(*[group()] * 2), "groups", "g", "different"),
    row(lambda: kvspec.EngineSpec(groups=(group(),), parallel=4), "parallel", 4),  # type: ignore[arg-type]
    row(lambda: kvspec.EngineSpec(groups=(group(),), parallel=None), "parallel", None),  # type: ignore[arg-type]
    row(lambda: kvspec.ParallelConfig(shardings=None), "shardings", None),  # type: ignore[arg-type]
    row(lambda: kvspec.ParallelConfig(shardings={4: None}), "shardings[4]", None, 1),  # type: ignore[dict-item]
    row(lambda: engine(tp_size=2, shardings={7: (range(3), range(3, 7))}), "shardings", 7),
    row(lambda: at(RankId(tp=True)), "rank.tp", value=True),
    row(lambda: at(RankId(tp=1.0)), "rank.tp", 1.0),  # type: ignore[arg-type]
    row(lambda: at(RankId(tp="1")), "rank.tp", "1"),  # type: ignore[arg-type]
    row(lambda: blocks({"g": 1, "h": 2}), "num_blocks", ["h"]),
    row(lambda: blocks(1, device="tpu"), "device", "tpu"),
    row(lambda: kvspec.allocate("e", RankId(), 1), "engine", "e"),  # type: ignore[arg-type]
    row(lambda: kvspec.mismatches("e", engine()), "producer", "e"),  # type: ignore[arg-type]
    row(lambda: kvspec.plan_transfer(engine(), engine(), common_states=1), "common_states", 1),  # type: ignore[arg-type]
    row(lambda: FULL.get_tp_transfer_slices(0, 4, 2**40), "remote_tp_size", 2**40),
    row(lambda: FULL.page_size_bytes(0, 2**40), "tp_size", 2**40),
    row(lambda: group(spec=BARE), "groups['g'].spec", BARE),
    row(lambda: kvspec.plan_transfer(engine(), engine()).pair_of(None), "edge", None),  # type: ignore[arg-type]
    # impossible memory, and caches without regions
    row(lambda: kvspec.Memory("a", 10), "address", "a", 0),  # type: ignore[arg-type]
    row(lambda: kvspec.Memory(1, -1), "length", -1, 0),
    row(lambda: kvspec.Memory(1, 10, "HBM"), "memory_type", "HBM"),
    row(lambda: kvspec.Memory(1, 10, "DRAM", -1), "device", -1, 0),
    row(lambda: kvspec.Memory(2**63 - 8, 10), "length", 10),
    row(lambda: kvspec.RankCache(engine(), RankId(), None, ()), "regions", None),  # type: ignore[arg-type]
    row(lambda: kvspec.RankCache(engine(), RankId(), (5,), ()), "regions", 5),  # type: ignore[arg-type]
    row(lambda: kvspec.RankCache(engine(), RankId(), (), None), "memory", None),  # type: ignore[arg-type]
    row(lambda: kvspec.RankCache(engine(), RankId(), (), (5,)), "memory", 5),  # type: ignore[arg-type]
    row(lambda: kvspec.plan_memory(engine(), RankId(), 1, 2**63 - 8), "length", 512),
    row(lambda: kvspec.plan_memory(engine(), RankId(), 1, -8), "address", -8, 0),
    row(lambda: kvspec.plan_memory(engine(), RankId(), 1, shared=1), "shared", 1),  # type: ignore[arg-type]
    row(lambda: blocks(2**62), "num_blocks", "2361183241434822606848 bytes"),
    row(lambda: blocks(1, shared="no"), "shared", "no"),
    # smaller kernel blocks, and excluded layers
    *(row(lambda n=n: group(kernel_block_size=n), "groups['g'].kernel_block_size", n, 1)
      for n in (0, True, 2.0, "2")),
    row(lambda: group(kernel_block_size=3), "groups['g'].kernel_block_size", 3, 4),
    row(lambda: group(kernel_block_size=8), "groups['g'].kernel_block_size", 8, 4),
    row(lambda: group(spec=PADDED, kernel_block_size=2),
        "groups['g'].kernel_block_size", 2, "page_size_padded"),
    row(lambda: group(spec=state(block_size=4), kernel_block_size=2),
        "groups['g'].kernel_block_size", 2, "row"),
    row(lambda: group(spec=attrs.evolve(FULL, tokens_per_state=2), kernel_block_size=1),
        "groups['g'].kernel_block_size", 1, "row"),
    row(lambda: group("a", "b", excluded=("b", "c")), "groups['g'].excluded", "c"),
    row(lambda: group(excluded="l"), "excluded", "l"),
    row(lambda: group(excluded=None), "excluded", None),
    row(lambda: kvspec.KVCacheGroup(name="g", layers={"l"}, spec=FULL), "layers", {"l"}),  # type: ignore[arg-type]
    # stages
    row(lambda: engine(pp_size=2), "stages", None, "l"),
    row(lambda: engine(group("l.0", "draft"), pp_size=2), "stages", None, "draft"),
    row(lambda: engine(group("l.0", "l.1", "m.2", "m.3"), pp_size=2), "stages", None, "2 to 3"),
    row(lambda: kvspec.ParallelConfig(pp_size=2, stages=(range(2),)), "stages", (range(2),), 2),
    row(lambda: kvspec.ParallelConfig(stages=("l",)), "stages", "l"),
    row(lambda: kvspec.ParallelConfig(stages=3), "stages", 3),  # type: ignore[arg-type]
    row(lambda: engine(group("l.0", "l.1"), pp_size=2, stages=(range(1), range(2, 3))),
        "stages", (range(1), range(2, 3)), "l.1"),
    row(lambda: engine(group("l.0", "l.1"), pp_size=2, stages=(range(2), ["l.1"])),
        "stages", (range(2), ("l.1",)), "l.1"),
    # contexts
    row(lambda: kvspec.ParallelConfig(tp_size=3, dcp_size=2), "dcp_size", 2, 3),
    row(lambda: engine(group(spec=MLA), tp_size=2, dcp_size=2, interleave_size=3),
        "interleave_size", 3, 4),
    row(lambda: engine(group(spec=attrs.evolve(MLA, tokens_per_state=4)), tp_size=2, dcp_size=2,
                       interleave_size=2), "interleave_size", 2),
    row(lambda: engine(tp_size=4, dcp_size=2), "context_size", 2, "0..0"),
    row(lambda: engine(tp_size=2, pcp_size=2, context_ranks=((0, 0), (0, 1))),
        "context_size", 2, "0..1"),
    *(row(lambda rows=rows: kvspec.ParallelConfig(tp_size=2, pcp_size=2, context_ranks=rows),
          "context_ranks", rows, "PCP")
      for rows in (((0, 1),), ((0, 1), (0,)), ((0, 1),) * 3)),
    row(lambda: kvspec.ParallelConfig(tp_size=2, context_ranks=((0, 2),)),
        "context_ranks", ((0, 2),), "gap"),
    row(lambda: kvspec.ParallelConfig(tp_size=2, context_ranks=((1, 2),)),
        "context_ranks", ((1, 2),), "gap"),
    row(lambda: kvspec.ParallelConfig(tp_size=2, dcp_size=2, context_ranks=((0, 0),)),
        "context_ranks", ((0, 0),), 2),
    row(lambda: kvspec.ParallelConfig(context_ranks=((-1,),)), "context_ranks", -1, 0),
    row(lambda: kvspec.ParallelConfig(context_ranks=(0,)), "context_ranks", 0),  # type: ignore[arg-type]
    row(lambda: kvspec.ParallelConfig(context_ranks=0), "context_ranks", 0),  # type: ignore[arg-type]
]  # fmt: skip


@pytest.mark.parametrize(REJECTED, TABLE)
def test_wrong_description_is_rejected(
    call: Callable[[], object], field: str, value: object, word: object
) -> None:
    """The error has the field and the value."""
    check_rejected(call, field, value, word)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LBNHC", "LBKNHC", "BLKHNC"])
def test_padding_is_accepted_if_a_page_is_one_chunk(layout: str) -> None:
    """Padding is rejected only if it would divide a page."""
    cache(PADDED, layout)


@pytest.mark.parametrize(
    ("method", "side", "size"),
    [("sources", "consumer", 1), ("notifies", "consumer", 1), ("targets", "producer", 2),
     ("notifiers", "producer", 2)],
)  # fmt: skip
def test_plan_rejects_rank_that_the_engine_lacks(method: str, side: str, size: int) -> None:
    """The error names the side of the rank."""
    plan = kvspec.plan_transfer(engine(tp_size=2), engine())
    for rank in (RankId(tp=size), RankId(tp=-1), RankId(pp=1), RankId(pcp=1)):
        check_rejected(lambda r=rank: getattr(plan, method)(r), side, rank, size)  # type: ignore[misc]
        pair = {"producer": RankId(), "consumer": RankId()} | {side: rank}
        check_rejected(lambda p=pair: plan.between(**p), side, rank, size)  # type: ignore[misc]
    check_rejected(lambda: getattr(plan, method)(0), side, 0)


Difference = tuple[str, object, object]
"""Field, value of the producer and value of the consumer."""
PAIRS: list[tuple[kvspec.LayerSpec, kvspec.LayerSpec, list[Difference]]] = [
    (FULL, attrs.evolve(FULL, total_num_kv_heads=8), [("l.total_num_kv_heads", 4, 8)]),
    (FULL, attrs.evolve(FULL, head_size=4),
     [("l.head_size", 8, 4)]),
    (FULL, attrs.evolve(FULL, head_size_v=4),
     [("l.head_size_v", None, 4)]),
    (FULL, attrs.evolve(FULL, dtype="float16"), [("l.dtype", "bfloat16", "float16")]),
    (FULL, attrs.evolve(FULL, tokens_per_state=2),
     [("l.tokens_per_state", 1, 2)]),
    (FULL, attrs.evolve(FULL, state_content_bytes=32),
     [("l.state_content_bytes", None, 32)]),
    (WINDOW, attrs.evolve(WINDOW, sliding_window=8), [("l.sliding_window", 4, 8)]),
    (CHUNKED, attrs.evolve(CHUNKED, attention_chunk_size=8),
     [("l.attention_chunk_size", 4, 8)]),
    (MLA, attrs.evolve(MLA, head_size=4, dtype="uint8"),
     [("l.head_size", 8, 4),
      ("l.dtype", "bfloat16", "uint8")]),
    (FULL, attrs.evolve(FULL, total_num_kv_heads=8, head_size=4, dtype="float16", head_size_v=2,
                        tokens_per_state=2, state_content_bytes=7),
     [("l.head_size", 8, 4),
      ("l.dtype", "bfloat16", "float16"),
      ("l.tokens_per_state", 1, 2),
      ("l.state_content_bytes", None, 7),
      ("l.total_num_kv_heads", 4, 8),
      ("l.head_size_v", None, 2)]),
    (CHUNKED, WINDOW, [("l.kind", "ChunkedLocalAttentionSpec", "SlidingWindowSpec")]),
    (MLA, attrs.evolve(opaque(), block_size=4),
     [("l.kind", "MLAAttentionSpec", "MambaSpec")]),
    (state(), state(num_speculative_tokens=1),
     [(f"l.conv_{part}.states", 1, 2) for part in "xbc"]),
    (state(), state(num_heads=4, head_dim=1),
     [("l.conv_x.granularity", 2, 1),
      ("l.ssm.units", 2, 4),
      ("l.ssm.content_bytes", 8, 4)]),
    (state(), state(ssm_dtype="float32"),
     [("l.ssm_dtype", "bfloat16", "float32"), ("l.ssm.content_bytes", 8, 16)]),
    (state(), state(dtype="float16", num_speculative_tokens=1, ssm_dtype="bfloat16"),
     [("l.dtype", "bfloat16", "float16"),
      *((f"l.conv_{part}.states", 1, 2) for part in "xbc")]),
    (opaque(), opaque(granularity=2),
     [("l.p.granularity", 1, 2)]),
    (opaque(), opaque(units=8), [("l.p.units", 4, 8)]),
    (opaque(), opaque(content_bytes=2), [("l.p.content_bytes", 1, 2)]),
    (opaque(), opaque(name="q"), [("l.parts", ("p",), ("q",))]),
    (state(), kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=2, dtype="bfloat16"),
     [("l.parts", ("conv_x", "conv_b", "conv_c", "ssm"), ("conv_x",))]),
]  # fmt: skip
PARALLEL: list[tuple[kvspec.EngineSpec, kvspec.EngineSpec, list[Difference]]] = [
    (engine(group("a", "b")), engine(group("a")), [("b.layer", "in group 'g'", None)]),
    (engine(group("a")), engine(group("a"), group("draft", name="mtp")),
     [("draft.layer", None, "in group 'mtp'")]),
    (engine(group("a", "b")), engine(group("a", "b", spec=attrs.evolve(FULL, head_size=4))),
     [("a and 1 more.head_size", 8, 4)]),
    (engine(group("a"), group("b", name="h")),
     engine(group("a", "b", spec=attrs.evolve(FULL, dtype="float16"))),
     [("a and 1 more.dtype", "bfloat16", "float16")]),
    (engine(group("a", "b", spec=TWO)), engine(group("a", "b")),
     [("b.total_num_kv_heads", 2, 4)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "expected"),
    [*((engine(group(spec=a)), engine(group(spec=b)), rows) for a, b, rows in PAIRS), *PARALLEL],
)
def test_mismatches_list_every_difference_of_two_engines(
    ours: kvspec.EngineSpec, theirs: kvspec.EngineSpec, expected: list[Difference]
) -> None:
    """Each difference has both values, a reason and a line of the message, from either side."""
    error = refusal(lambda: kvspec.plan_transfer(ours, theirs), kvspec.MismatchError)
    assert expected == differences(error)
    assert all(mismatch.why for mismatch in error.mismatches)
    assert [str(mismatch) for mismatch in error.mismatches] == str(error).splitlines()
    swapped = refusal(lambda: kvspec.plan_transfer(theirs, ours), kvspec.MismatchError)
    assert [(a, b) for _, a, b in expected] == [
        (mismatch.consumer, mismatch.producer) for mismatch in swapped.mismatches
    ]


@pytest.mark.parametrize("field", ["dtype", "ssm_dtype"])
def test_states_of_equal_size_and_unequal_dtype_are_a_mismatch(field: str) -> None:
    """Reading bfloat16 as float16 is silent corruption, for a state as for attention."""
    same = {"dtype": "bfloat16", "ssm_dtype": "bfloat16"}
    ours, theirs = state(**same), state(**same | {field: "float16"})
    error = refusal(
        lambda: kvspec.plan_transfer(engine(group(spec=ours)), engine(group(spec=theirs))),
        kvspec.MismatchError,
    )
    assert [(f"l.{field}", "bfloat16", "float16")] == differences(error)


def test_explicit_default_is_no_mismatch() -> None:
    """`head_size_v=None` means `head_size`, so both sides describe the same bytes."""
    explicit = attrs.evolve(FULL, head_size_v=8)
    assert () == kvspec.mismatches(engine(), engine(group(spec=explicit)))


def test_unequal_kinds_are_the_same_difference_from_either_side() -> None:
    """The logs of both sides list the same fields."""
    ours, theirs = engine(group(spec=MLA)), engine(group(spec=opaque()))
    for sides in ((ours, theirs), (theirs, ours)):
        error = refusal(lambda s=sides: kvspec.plan_transfer(*s), kvspec.MismatchError)
        assert ["l.kind"] == [mismatch.field for mismatch in error.mismatches]


def test_content_that_spans_heads_needs_equal_shardings() -> None:
    """Scales that span the heads of a rank cannot be divided among other ranks."""
    packed = group(spec=attrs.evolve(FULL, state_content_bytes=9, spans_heads=True))
    error = refusal(
        lambda: kvspec.plan_transfer(engine(packed, tp_size=2), engine(packed, tp_size=4)),
        kvspec.MismatchError,
    )
    quarters = [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert [("l.kv", [(0, 2), (2, 4)], quarters)] == differences(error)
    kvspec.plan_transfer(engine(packed, tp_size=2), engine(packed, tp_size=2))


@pytest.mark.parametrize("rows", [(8, 16), (16, 8)])
def test_plan_refuses_common_rows_of_a_ring(rows: tuple[int, int]) -> None:
    """Row i of a ring is another position if the capacities differ, so no row is common."""
    sides = [
        engine(group(spec=opaque(name="ring", units=1, states=n, content_bytes=4))) for n in rows
    ]
    error = refusal(lambda: kvspec.plan_transfer(*sides, common_states=True), kvspec.MismatchError)
    assert ["ring.states"] == [".".join(m.field.split(".")[-2:]) for m in error.mismatches]


def test_plan_moves_common_rows_of_states_if_asked() -> None:
    """Speculative rows of one side are a mismatch, unless `common_states` leaves them out."""
    ours, theirs = engine(group(spec=state())), engine(group(spec=state(num_speculative_tokens=2)))
    error = refusal(lambda: kvspec.plan_transfer(ours, theirs), kvspec.MismatchError)
    assert [(f"l.conv_{part}.states", 1, 3) for part in "xbc"] == differences(error)
    kvspec.plan_transfer(ours, theirs, common_states=True)
    other = engine(group(spec=state(num_speculative_tokens=2, dtype="float16")))
    error = refusal(
        lambda: kvspec.plan_transfer(ours, other, common_states=True), kvspec.MismatchError
    )
    assert ["l.dtype", "l.ssm_dtype"] == [mismatch.field for mismatch in error.mismatches]


def test_message_names_every_layer_of_one_side_only() -> None:
    """The reader has to exclude them one by one, so the message names all."""
    theirs = engine(group("a", "draft.0", "draft.1"))
    error = refusal(lambda: kvspec.plan_transfer(engine(group("a")), theirs), kvspec.MismatchError)
    assert "draft.0" in str(error)
    assert "draft.1" in str(error)


def test_positions_of_bytes_are_no_mismatch() -> None:
    """Padding, layout, names and order of groups, block sizes and parallel sizes may differ."""
    ours = engine(
        group("a", spec=PADDED),
        group("b", name="h", spec=state()),
        pp_size=2,
        stages=(("b",), ("a",)),
    )
    theirs = engine(
        group("b", name="x", spec=state(block_size=7)),
        group("a", name="y", spec=attrs.evolve(FULL, block_size=6), kernel_block_size=3),
        layout="BLNHC",
        tp_size=3,
        pcp_size=2,
        interleave_size=2,
    )
    assert () == kvspec.mismatches(ours, theirs)
    kvspec.plan_transfer(ours, theirs)


def test_page_size_bytes_rejects_rank_of_another_engine() -> None:
    """The engine has one rank, and its layer exists on it."""
    outside = RankId(tp=1)
    error = refusal(lambda: engine().page_size_bytes("l", outside))
    assert ("rank", outside) == (error.field, error.value)
