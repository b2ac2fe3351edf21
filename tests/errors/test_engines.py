"""Refusals of layouts, groups, engines, shardings and pairs of engines, by their words.

A description that is impossible is a `SpecError`; two engines that do not fit are a
`MismatchError` that lists every differing field with both values and the reason.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import numpy as np
import pytest
from builders import mamba2
from refused import refusal, words

import kvspec
from kvspec import RankId
from kvspec.errors import shown

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
LAYOUT = "the letters L, B, H, N, C, optionally K, each once, outermost first, C last"
SUCH_AS = (
    f"{LAYOUT}, such as LBHNC, LBNHC, LHBNC, BLHNC, BLNHC, BHLNC, LKBNHC, LBKNHC, LBKHNC, BLKHNC"
)


def group(*layers: Any, name: Any = "g", spec: Any = FULL, **given: Any) -> kvspec.KVCacheGroup:
    """Return a group of *layers*, "l" unless given."""
    return kvspec.KVCacheGroup(name=name, layers=layers or ("l",), spec=spec, **given)


def engine(*groups: Any, layout: Any = "LBHNC", **sizes: Any) -> kvspec.EngineSpec:
    """Return an engine of *groups*, one of one layer unless given, with parallel *sizes*."""
    parallel = kvspec.ParallelConfig(**sizes)
    return kvspec.EngineSpec(groups=groups or (group(),), parallel=parallel, layout=layout)


def state(**sizes: Any) -> kvspec.MambaSpec:
    """Return a Mamba2 state of two heads with *sizes* of its own."""
    return mamba2(**{"num_heads": 2, "state_size": 2, "conv_kernel": 2} | sizes)


def opaque(**sizes: Any) -> kvspec.MambaSpec:
    """Return a state of one part "p" of four units with *sizes* of its own."""
    base: dict[str, Any] = {
        "name": "p", "units": 4, "states": 1, "content_bytes": 1, "tokens_per_state": 0,
    }  # fmt: skip
    return kvspec.MambaSpec(state_parts=(kvspec.Part(**base | sizes),))


@pytest.mark.parametrize(
    "layout",
    ["LBHN", "LBHNCC", "LBHHNC", "LBHNCB", "LBXNC", "LBKKHNC", "KC", "", "lbhnc", "nhd", "LBHNC ",
     3, b"LBHNC", ("L", "B", "H", "N", "C")],
)  # fmt: skip
def test_a_layout_has_each_letter_once(layout: Any) -> None:
    """Missing, doubled and unknown letters and other types are refused, on engines and groups."""
    assert f"layout={layout!r}: expected {SUCH_AS}" == words(lambda: engine(layout=layout))
    wanted = f"groups['g'].layout={layout!r}: expected {SUCH_AS}"
    assert wanted == words(lambda: group(layout=layout))


@pytest.mark.parametrize("layout", ["CLBHN", "LBHCN", "LBKHCN"])
def test_content_is_the_last_letter(layout: str) -> None:
    """Content that is not contiguous is no layout."""
    wanted = f"{LAYOUT}: content is contiguous in every layout"
    assert f"layout={layout!r}: expected {wanted}" == words(lambda: engine(layout=layout))


def test_an_engine_needs_a_layout() -> None:
    """None stands for the engine's layout in a group only."""
    assert f"layout=None: expected {SUCH_AS}" == words(lambda: engine(layout=None))
    assert group(layout=None).layout is None


RANK = "RankId(pp={}, pcp={}, tp={}): expected pp < 1, pcp < 1, tp < 2, none negative"
COVER = "ranges must be equal or disjoint and cover range(0, 4), but units"


def sharding(*ranges: Any, units: Any = 4) -> object:
    """Return a config of two TP ranks with an explicit sharding."""
    return kvspec.ParallelConfig(tp_size=2, shardings={units: ranges})


BARE = kvspec.LayerSpec(block_size=4)


def blocks(num_blocks: Any, **given: Any) -> object:
    """Allocate a cache of *num_blocks*."""
    return kvspec.allocate(engine(), RankId(), num_blocks, **given)


def at(rank: Any) -> object:
    """Allocate a cache of rank *rank* of two."""
    return kvspec.allocate(engine(tp_size=2), rank, 1)


def cache(spec: kvspec.LayerSpec, layout: str) -> object:
    """Allocate a cache of *spec* in *layout*."""
    layers = spec.layers or ("a", "b")
    return kvspec.allocate(engine(group(*layers, spec=spec), layout=layout), RankId(), 2)


TWO_LAYERS = "groups['g'].layers={}: expected the spec's ('a', 'b')"
EACH_RANK = "expected one range for each of the 2 TP ranks"
SHORT = (range(2), range(2, 3))
LONG = (range(2), range(2, 5))
DOUBLE = (range(3), range(2, 4))
THREE = (range(4), range(4), range(4))


def call_with_a_list(name: str) -> object:
    """Give a list, which has no hash, where a name or a number is wanted."""
    given: Any = ["l"]
    calls: dict[str, Callable[[], object]] = {
        "page": lambda: engine().page_size_bytes(given, RankId()),
        "group": lambda: engine().group(given),
        "of_layer": lambda: TWO.of_layer(given),
        "role": lambda: FULL.get_tp_transfer_slices(0, 1, 1, given),
        "excluded": lambda: group(excluded=[given]),
    }
    return calls[name]()


REFUSED: list[Any] = [
    # groups
    (lambda: group(name=""), "name='': expected a group name"),
    (lambda: group(name=None), "name=None: expected a group name"),
    (lambda: kvspec.KVCacheGroup(name="g", layers=(), spec=FULL),
     "groups['g'].layers=(): expected at least one layer name"),
    (lambda: kvspec.KVCacheGroup(name="g", layers="l", spec=FULL),
     "layers='l': expected a sequence of layer names"),
    (lambda: group("l", "m", "l"), "groups['g'].layers=('l', 'm', 'l'): expected each layer once"),
    (lambda: group(spec=None), "groups['g'].spec=None: expected a spec of a kind of layer"),
    (lambda: group(spec="full"), "groups['g'].spec='full': expected a spec of a kind of layer"),
    (lambda: group(spec=int), "groups['g'].spec=<class 'int'>: expected a spec of a kind of layer"),
    (lambda: group("a", spec=TWO), TWO_LAYERS.format("('a',)")),
    (lambda: group("a", "c", spec=TWO), TWO_LAYERS.format("('a', 'c')")),
    # engines
    (lambda: kvspec.EngineSpec(groups=()), "groups=(): expected at least one group"),
    (lambda: engine("full"), "groups='full': expected a KVCacheGroup"),
    (lambda: engine(group("l"), group("m")), "groups='g': expected different group names"),
    (lambda: engine(group("l"), group("m", "l", name="h")),
     "groups['h'].layers='l': a layer must be in one group, but this one is in 'g' too"),
    (lambda: engine().group("h"), "group='h': expected one of g"),
    # shardings
    (lambda: sharding(*SHORT), f"shardings[4]={SHORT!r}: {COVER} range(3, 4) are missing"),
    (lambda: sharding(*DOUBLE), f"shardings[4]={DOUBLE!r}: {COVER} range(2, 3) are double"),
    (lambda: sharding(*LONG), f"shardings[4]={LONG!r}: {COVER} range(2, 5) are outside"),
    (lambda: sharding(*THREE[:1]), f"shardings[4]=(range(0, 4),): {EACH_RANK}"),
    (lambda: sharding(*THREE), f"shardings[4]={THREE!r}: {EACH_RANK}"),
    (lambda: sharding(range(0, 4, 2), range(1, 4, 2)),
     "shardings[4]=range(0, 4, 2): expected a range of step 1 with start >= 0"),
    (lambda: sharding(range(-1, 2), range(2, 4)),
     "shardings[4]=range(-1, 2): expected a range of step 1 with start >= 0"),
    (lambda: sharding((0, 2), (2, 4)),
     "shardings[4]=(0, 2): expected a range of step 1 with start >= 0"),
    (lambda: sharding(range(1), range(1), units=0), "shardings=0: expected an int >= 1"),
    (lambda: sharding(range(1), range(1), units="k"), "shardings='k': expected an int >= 1"),
    (lambda: kvspec.plan_transfer(*[engine(
        group(spec=state()), tp_size=2, shardings={4: (range(1), range(1, 4))})] * 2),
     "shardings[4]=range(0, 1): expected multiples of granularity=2"),
    # ranks
    (lambda: at(RankId(tp=2)), "rank=" + RANK.format(0, 0, 2)),
    (lambda: at(RankId(tp=-1)), "rank=" + RANK.format(0, 0, -1)),
    (lambda: at(RankId(pp=1)), "rank=" + RANK.format(1, 0, 0)),
    (lambda: at(RankId(pcp=1)), "rank=" + RANK.format(0, 1, 0)),
    (lambda: at(0), "rank=0: expected a RankId"),
    (lambda: at((0, 0, 0)), "rank=(0, 0, 0): expected a RankId"),
    # blocks
    *((lambda n=n: blocks(n), f"num_blocks['g']={n!r}: expected an int >= 1")
      for n in (0, -1, True, 1.5, None, "3")),
    (lambda: blocks({"g": 0}), "num_blocks['g']=0: expected an int >= 1"),
    (lambda: blocks({}), "num_blocks['g']=None: expected an int >= 1"),
    (lambda: blocks({"h": 1}), "num_blocks=['h']: expected groups of the engine: g"),
    # pages in layouts
    *((lambda x=x: cache(PADDED, x),
       f"page_size_padded=1024: expected no padding in layout {x}, or L and B outermost")
      for x in ("LHBNC", "BHLNC", "HLBNC", "LNBHC", "LKBNHC", "KLBHNC", "BKLHNC")),
    (lambda: cache(attrs.evolve(FULL, page_size_padded=511), "LBHNC"),
     "page_size_padded=511: expected at least the 512 bytes of the page"),
    *((lambda x=x: cache(TWO, x),
       f"layout={x!r}: expected H inside LK, since heads (units) differ: [2, 4]")
      for x in ("BHLNC", "HLBNC")),
    (lambda: cache(ROWS, "BHNLC"),
     "layout='BHNLC': expected N inside LK, since states (tokens of a block) differ: [2, 4]"),
    # plans
    (lambda: kvspec.plan_transfer("p", engine()),  # type: ignore[arg-type]
     "producer='p': expected an EngineSpec"),
    (lambda: kvspec.mismatches("p", engine()),  # type: ignore[arg-type]
     "producer='p': expected an EngineSpec"),
    (lambda: kvspec.mismatches(engine(), None),  # type: ignore[arg-type]
     "consumer=None: expected an EngineSpec"),
    (lambda: kvspec.plan_transfer(engine(), None),  # type: ignore[arg-type]
     "consumer=None: expected an EngineSpec"),
    (lambda: kvspec.plan_transfer(engine(), engine(), replica_policy="all"),  # type: ignore[arg-type]
     "replica_policy='all': expected one of spread, first, stripe, nearest"),
    (lambda: kvspec.traffic(kvspec.plan_transfer(engine(), engine()), -1),
     "num_tokens=-1: expected an int >= 0"),
    (lambda: kvspec.traffic(kvspec.plan_transfer(engine(), engine()), num_tokens=True),
     "num_tokens=True: expected an int >= 0"),
    # things of another type
    *((lambda n=name: call_with_a_list(n), f"{field}=['l']: expected {told}")
      for name, field, told in (
          ("page", "layer", "a str"), ("group", "group", "a str"), ("of_layer", "layer", "a str"),
          ("role", "role", "'consumer' or 'producer'"),
          ("excluded", "groups['g'].excluded", "layers of the group"))),
    (lambda: kvspec.KVCacheGroup(name="g", layers=np.array("l"), spec=FULL),
     "layers=array('l', dtype='<U1'): expected a sequence of at most 1048576 layer names"),
    (lambda: kvspec.EngineSpec(groups=range(10**20)),  # type: ignore[arg-type]
     f"groups={range(10**20)}: expected a sequence of at most 1048576 KVCacheGroups"),
    (lambda: kvspec.KVCacheGroup(name="g", layers=None, spec=FULL),  # type: ignore[arg-type]
     "layers=None: expected a sequence of layer names"),
    (lambda: group(1),
     "groups['g'].layers=1: expected layer names, each a non-empty str"),
    (lambda: group("l", ""),
     "groups['g'].layers='': expected layer names, each a non-empty str"),
    (lambda: kvspec.EngineSpec(groups=None),  # type: ignore[arg-type]
     "groups=None: expected a sequence of KVCacheGroups"),
    (lambda: kvspec.EngineSpec(groups=group()),  # type: ignore[arg-type]
     f"groups={shown(group())}: expected a sequence of KVCacheGroups"),
    (lambda: engine(*[group()] * 2),
     "groups='g': expected different group names"),
    (lambda: kvspec.EngineSpec(groups=(group(),), parallel=4),  # type: ignore[arg-type]
     "parallel=4: expected a ParallelConfig"),
    (lambda: kvspec.EngineSpec(groups=(group(),), parallel=None),  # type: ignore[arg-type]
     "parallel=None: expected a ParallelConfig"),
    (lambda: kvspec.ParallelConfig(shardings=None),  # type: ignore[arg-type]
     "shardings=None: expected a mapping from units to one range for each TP rank"),
    (lambda: kvspec.ParallelConfig(shardings={4: None}),  # type: ignore[dict-item]
     "shardings[4]=None: expected one range for each of the 1 TP ranks"),
    (lambda: engine(tp_size=2, shardings={7: (range(3), range(3, 7))}),
     "shardings=7: expected the units of a part of the engine, one of 4"),
    (lambda: at(RankId(tp=True)), "rank.tp=True: expected an int"),
    (lambda: at(RankId(tp=1.0)),  # type: ignore[arg-type]
     "rank.tp=1.0: expected an int"),
    (lambda: at(RankId(tp="1")),  # type: ignore[arg-type]
     "rank.tp='1': expected an int"),
    (lambda: blocks({"g": 1, "h": 2}),
     "num_blocks=['h']: expected groups of the engine: g"),
    (lambda: blocks(1, device="tpu"),
     "device='tpu': expected 'cpu' or a GPU such as 'cuda:0'"),
    (lambda: kvspec.allocate("e", RankId(), 1),  # type: ignore[arg-type]
     "engine='e': expected an EngineSpec"),
    (lambda: kvspec.mismatches("e", engine()),  # type: ignore[arg-type]
     "producer='e': expected an EngineSpec"),
    (lambda: kvspec.plan_transfer(engine(), engine(), common_states=1),  # type: ignore[arg-type]
     "common_states=1: expected True or False"),
    (lambda: FULL.get_tp_transfer_slices(0, 4, 2**40),
     "remote_tp_size=1099511627776: expected at most 65536"),
    (lambda: FULL.page_size_bytes(0, 2**40), "tp_size=1099511627776: expected at most 65536"),
    (lambda: group(spec=BARE),
     f"groups['g'].spec={BARE!r}: expected a spec of a kind of layer"),
    (lambda: kvspec.plan_transfer(engine(), engine()).pair_of(None),  # type: ignore[arg-type]
     "edge=None: expected an Edge"),
    # memory that cannot be, and caches of no regions
    (lambda: kvspec.Memory("a", 10), "address='a': expected an int >= 0"),  # type: ignore[arg-type]
    (lambda: kvspec.Memory(1, -1), "length=-1: expected an int >= 0"),
    (lambda: kvspec.Memory(1, 10, "HBM"), "memory_type='HBM': expected DRAM or VRAM"),
    (lambda: kvspec.Memory(1, 10, "DRAM", -1), "device=-1: expected an int >= 0"),
    (lambda: kvspec.Memory(2**63 - 8, 10),
     "length=10: expected an end of at most 9223372036854775807"),
    (lambda: kvspec.RankCache(engine(), RankId(), None, ()),  # type: ignore[arg-type]
     "regions=None: expected a sequence of Regions"),
    (lambda: kvspec.RankCache(engine(), RankId(), (5,), ()),  # type: ignore[arg-type]
     "regions=5: expected a Region"),
    (lambda: kvspec.RankCache(engine(), RankId(), (), None),  # type: ignore[arg-type]
     "memory=None: expected a sequence of Memories"),
    (lambda: kvspec.RankCache(engine(), RankId(), (), (5,)),  # type: ignore[arg-type]
     "memory=5: expected a Memory"),
    (lambda: kvspec.plan_memory(engine(), RankId(), 1, 2**63 - 8),
     "length=512: expected an end of at most 9223372036854775807"),
    (lambda: kvspec.plan_memory(engine(), RankId(), 1, -8), "address=-8: expected an int >= 0"),
    (lambda: kvspec.plan_memory(engine(), RankId(), 1, shared=1),  # type: ignore[arg-type]
     "shared=1: expected True or False"),
    (lambda: blocks(2**62),
     "num_blocks='2361183241434822606848 bytes': expected a size that fits into memory"),
    (lambda: blocks(1, shared="no"), "shared='no': expected True or False"),
    # blocks that the kernel cuts finer, and layers that are left out
    *((lambda n=n: group(kernel_block_size=n),
       f"groups['g'].kernel_block_size={n!r}: expected an int >= 1") for n in (0, True, 2.0, "2")),
    (lambda: group(kernel_block_size=3),
     "groups['g'].kernel_block_size=3: expected a divisor of block_size=4"),
    (lambda: group(kernel_block_size=8),
     "groups['g'].kernel_block_size=8: expected a divisor of block_size=4"),
    (lambda: group(spec=PADDED, kernel_block_size=2),
     "groups['g'].kernel_block_size=2: cannot be combined with page_size_padded"),
    (lambda: group(spec=state(block_size=4), kernel_block_size=2),
     "groups['g'].kernel_block_size=2: expected a multiple of the tokens of each row, in attention layers"),
    (lambda: group(spec=attrs.evolve(FULL, tokens_per_state=2), kernel_block_size=1),
     "groups['g'].kernel_block_size=1: expected a multiple of the tokens of each row, in attention layers"),
    (lambda: group("a", "b", excluded=("b", "c")),
     "groups['g'].excluded='c': expected layers of the group"),
    (lambda: group(excluded="l"), "excluded='l': expected a sequence of layer names"),
    (lambda: group(excluded=None), "excluded=None: expected a sequence of layer names"),
    (lambda: kvspec.KVCacheGroup(name="g", layers={"l"}, spec=FULL),  # type: ignore[arg-type]
     "layers={'l'}: expected a sequence of layer names"),
    # stages
    (lambda: engine(pp_size=2),
     "stages=None: expected the layer names of each stage, because layer 'l' has no number"),
    (lambda: engine(group("l.0", "draft"), pp_size=2),
     "stages=None: expected the layer names of each stage, because layer 'draft' has no number"),
    (lambda: kvspec.ParallelConfig(pp_size=2, stages=(range(2),)),
     "stages=(range(0, 2),): expected one for each of the 2 stages"),
    (lambda: kvspec.ParallelConfig(stages=("l",)), "stages='l': expected a sequence of layer names"),
    (lambda: kvspec.ParallelConfig(stages=3),  # type: ignore[arg-type]
     "stages=3: expected a sequence of stages, each a range of layer numbers or layer names"),
    (lambda: engine(group("l.0", "l.1"), pp_size=2, stages=(range(1), range(2, 3))),
     "stages=(range(0, 1), range(2, 3)): expected one stage for layer 'l.1', which is in no stage"),
    (lambda: engine(group("l.0", "l.1"), pp_size=2, stages=(range(2), ["l.1"])),
     "stages=(range(0, 2), ('l.1',)): expected one stage for layer 'l.1', which is in stages [0, 1]"),
    # contexts
    (lambda: kvspec.ParallelConfig(tp_size=3, dcp_size=2),
     "dcp_size=2: expected a divisor of tp_size=3, or explicit context_ranks"),
    (lambda: engine(group(spec=MLA), tp_size=2, dcp_size=2, interleave_size=3),
     "interleave_size=3: expected a divisor of block_size=4 of group 'g'"),
    (lambda: engine(tp_size=4, dcp_size=2),
     "context_size=2: each context rank needs a rank with units 0..0 of g.k, but [1] have none"),
    (lambda: engine(tp_size=2, pcp_size=2, context_ranks=((0, 0), (0, 1))),
     "context_size=2: each context rank needs a rank with units 0..1 of g.k, but [1] have none"),
    *((lambda rows=rows: kvspec.ParallelConfig(tp_size=2, pcp_size=2, context_ranks=rows),
       f"context_ranks={rows!r}: expected 2 rows (PCP) of 2 context ranks (TP)")
      for rows in (((0, 1),), ((0, 1), (0,)), ((0, 1),) * 3)),
    (lambda: kvspec.ParallelConfig(tp_size=2, context_ranks=((0, 2),)),
     "context_ranks=((0, 2),): expected context ranks 0, 1, ... without a gap"),
    (lambda: kvspec.ParallelConfig(tp_size=2, context_ranks=((1, 2),)),
     "context_ranks=((1, 2),): expected context ranks 0, 1, ... without a gap"),
    (lambda: kvspec.ParallelConfig(tp_size=2, dcp_size=2, context_ranks=((0, 0),)),
     "context_ranks=((0, 0),): expected context ranks whose number is a multiple of dcp_size=2"),
    (lambda: kvspec.ParallelConfig(context_ranks=((-1,),)),
     "context_ranks=-1: expected an int >= 0"),
    (lambda: kvspec.ParallelConfig(context_ranks=(0,)),  # type: ignore[arg-type]
     "context_ranks=0: expected a sequence of context ranks, one for each TP rank"),
    (lambda: kvspec.ParallelConfig(context_ranks=0),  # type: ignore[arg-type]
     "context_ranks=0: expected a sequence of rows, one for each PCP rank"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("call", "wanted"),
    [pytest.param(*each, id=f"{i} {each[1][:40]}") for i, each in enumerate(REFUSED)],
)
def test_a_wrong_description_is_refused_in_words(call: Callable[[], object], wanted: str) -> None:
    """Field, value and what was wanted are told, in these words."""
    assert wanted == words(call)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC", "LBNHC", "LBKNHC", "BLKHNC"])
def test_padding_is_accepted_where_a_page_lies_in_one_chunk(layout: str) -> None:
    """The refusals of padding are no broader than they must be."""
    cache(PADDED, layout)


@pytest.mark.parametrize(
    ("ask", "field", "size"),
    [("sources", "consumer", 1), ("notifies", "consumer", 1), ("targets", "producer", 2),
     ("notifiers", "producer", 2)],
)  # fmt: skip
def test_a_plan_knows_its_ranks(ask: str, field: str, size: int) -> None:
    """A rank that the engine on that side does not have is refused by the side's name."""
    plan = kvspec.plan_transfer(engine(tp_size=2), engine())
    for rank in (RankId(tp=size), RankId(tp=-1), RankId(pp=1), RankId(pcp=1)):
        told = f"pp < 1, pcp < 1, tp < {size}, none negative"
        assert f"{field}={rank!r}: expected {told}" == words(lambda r=rank: getattr(plan, ask)(r))
        pair = {"producer": RankId(), "consumer": RankId()} | {field: rank}
        assert f"{field}={rank!r}: expected {told}" == words(lambda p=pair: plan.between(**p))
    assert f"{field}=0: expected a RankId" == words(lambda: getattr(plan, ask)(0))


HEADS = "heads are matched by their number in the model"
TOKENS = "the sides keep different tokens"
ROW = "the row of one unit has a different length"
STATES = "the states have different numbers of rows, perhaps because of speculative tokens"
ONE_SIDE = "each layer must exist on both sides or be excluded"
BYTES = "the same bytes mean other numbers"
KIND = "each kind of layer keeps different tokens and different parts"
PAIRS: list[tuple[kvspec.LayerSpec, kvspec.LayerSpec, list[tuple[Any, ...]]]] = [
    (FULL, attrs.evolve(FULL, total_num_kv_heads=8), [("l.total_num_kv_heads", 4, 8, HEADS)]),
    (FULL, attrs.evolve(FULL, head_size=4),
     [("l.head_size", 8, 4, "one head of one token has another length")]),
    (FULL, attrs.evolve(FULL, head_size_v=4),
     [("l.head_size_v", None, 4, "one value of one token has another length")]),
    (FULL, attrs.evolve(FULL, dtype="float16"), [("l.dtype", "bfloat16", "float16", BYTES)]),
    (FULL, attrs.evolve(FULL, tokens_per_state=2),
     [("l.tokens_per_state", 1, 2, "one row describes another number of tokens")]),
    (FULL, attrs.evolve(FULL, state_content_bytes=32),
     [("l.state_content_bytes", None, 32, "one head's row has another length or packing")]),
    (WINDOW, attrs.evolve(WINDOW, sliding_window=8), [("l.sliding_window", 4, 8, TOKENS)]),
    (CHUNKED, attrs.evolve(CHUNKED, attention_chunk_size=8),
     [("l.attention_chunk_size", 4, 8, TOKENS)]),
    (MLA, attrs.evolve(MLA, head_size=4, dtype="uint8"),
     [("l.head_size", 8, 4, "one head of one token has another length"),
      ("l.dtype", "bfloat16", "uint8", BYTES)]),
    (FULL, attrs.evolve(FULL, total_num_kv_heads=8, head_size=4, dtype="float16", head_size_v=2,
                        tokens_per_state=2, state_content_bytes=7),
     [("l.head_size", 8, 4, "one head of one token has another length"),
      ("l.dtype", "bfloat16", "float16", BYTES),
      ("l.tokens_per_state", 1, 2, "one row describes another number of tokens"),
      ("l.state_content_bytes", None, 7, "one head's row has another length or packing"),
      ("l.total_num_kv_heads", 4, 8, HEADS),
      ("l.head_size_v", None, 2, "one value of one token has another length")]),
    (CHUNKED, WINDOW, [("l.kind", "ChunkedLocalAttentionSpec", "SlidingWindowSpec", KIND)]),
    (MLA, attrs.evolve(opaque(), block_size=4),
     [("l.kind", "MLAAttentionSpec", "MambaSpec", KIND)]),
    (state(), state(num_speculative_tokens=1),
     [(f"l.conv_{each}.states", 1, 2, STATES) for each in "xbc"]),
    (state(), state(num_heads=4, head_dim=1),
     [("l.conv_x.granularity", 2, 1, "the units would be cut at different places"),
      ("l.ssm.units", 2, 4, "units pair by their global number"),
      ("l.ssm.content_bytes", 8, 4, ROW)]),
    (state(), state(ssm_dtype="float32"),
     [("l.ssm_dtype", "bfloat16", "float32", BYTES), ("l.ssm.content_bytes", 8, 16, ROW)]),
    (state(), state(dtype="float16", num_speculative_tokens=1, ssm_dtype="bfloat16"),
     [("l.dtype", "bfloat16", "float16", BYTES),
      *((f"l.conv_{each}.states", 1, 2, STATES) for each in "xbc")]),
    (opaque(), opaque(granularity=2),
     [("l.p.granularity", 1, 2, "the units would be cut at different places")]),
    (opaque(), opaque(units=8), [("l.p.units", 4, 8, "units pair by their global number")]),
    (opaque(), opaque(content_bytes=2), [("l.p.content_bytes", 1, 2, ROW)]),
    (opaque(), opaque(name="q"), [("l.parts", ("p",), ("q",), "parts pair by name")]),
    (state(), kvspec.MambaSpec.short_conv(conv_dim=4, conv_kernel=2, dtype="bfloat16"),
     [("l.parts", ("conv_x", "conv_b", "conv_c", "ssm"), ("conv_x",), "parts pair by name")]),
]  # fmt: skip
PARALLEL: list[tuple[kvspec.EngineSpec, kvspec.EngineSpec, list[tuple[Any, ...]]]] = [
    (engine(group("a", "b")), engine(group("a")), [("b.layer", "in group 'g'", None, ONE_SIDE)]),
    (engine(group("a")), engine(group("a"), group("draft", name="mtp")),
     [("draft.layer", None, "in group 'mtp'", ONE_SIDE)]),
    (engine(group("a", "b")), engine(group("a", "b", spec=attrs.evolve(FULL, head_size=4))),
     [("a and 1 more.head_size", 8, 4, "one head of one token has another length")]),
    (engine(group("a"), group("b", name="h")),
     engine(group("a", "b", spec=attrs.evolve(FULL, dtype="float16"))),
     [("a and 1 more.dtype", "bfloat16", "float16", BYTES)]),
    (engine(group("a", "b", spec=TWO)), engine(group("a", "b")),
     [("b.total_num_kv_heads", 2, 4, HEADS)]),
]  # fmt: skip


@pytest.mark.parametrize(
    ("ours", "theirs", "differences"),
    [*((engine(group(spec=a)), engine(group(spec=b)), found) for a, b, found in PAIRS), *PARALLEL],
)
def test_every_difference_of_two_engines_is_listed(
    ours: kvspec.EngineSpec, theirs: kvspec.EngineSpec, differences: list[tuple[Any, ...]]
) -> None:
    """Each field with ours, theirs and why, in `mismatches` and in the text, from either side."""
    error = refusal(lambda: kvspec.plan_transfer(ours, theirs), kvspec.MismatchError)
    assert tuple(kvspec.Mismatch(*each) for each in differences) == error.mismatches
    lines = [f"{field}: producer {a!r}, consumer {b!r} ({why})" for field, a, b, why in differences]
    assert lines == str(error).splitlines()
    swapped = refusal(lambda: kvspec.plan_transfer(theirs, ours), kvspec.MismatchError)
    assert [(a, b) for _, a, b, _ in differences] == [
        (m.consumer, m.producer) for m in swapped.mismatches
    ]


@pytest.mark.parametrize("field", ["dtype", "ssm_dtype"])
def test_states_of_another_dtype_of_the_same_size_are_a_mismatch(field: str) -> None:
    """bfloat16 read as float16 is silent corruption, for a state as for attention."""
    same = {"dtype": "bfloat16", "ssm_dtype": "bfloat16"}
    ours, theirs = state(**same), state(**same | {field: "float16"})
    error = refusal(
        lambda: kvspec.plan_transfer(engine(group(spec=ours)), engine(group(spec=theirs))),
        kvspec.MismatchError,
    )
    assert f"l.{field}: producer 'bfloat16', consumer 'float16' ({BYTES})" == str(error)


def test_a_default_said_aloud_is_no_mismatch() -> None:
    """`head_size_v=None` means `head_size`, so a side that says so describes the same bytes."""
    said = attrs.evolve(FULL, head_size_v=8)
    assert () == kvspec.mismatches(engine(), engine(group(spec=said)))


def test_another_kind_is_the_same_difference_from_either_side() -> None:
    """Both sides list the same fields, so that both logs tell the same."""
    one, two = engine(group(spec=MLA)), engine(group(spec=opaque()))
    fields = [
        [each.field for each in refusal(call, kvspec.MismatchError).mismatches]
        for call in (lambda: kvspec.plan_transfer(one, two), lambda: kvspec.plan_transfer(two, one))
    ]
    assert [["l.kind"], ["l.kind"]] == fields


def test_content_that_spans_heads_is_not_cut() -> None:
    """Scales that span a rank's heads move only between sides that sharding the heads alike."""
    packed = group(spec=attrs.evolve(FULL, state_content_bytes=9, spans_heads=True))
    why = "its bytes mix all heads of a rank, so both sides must shard the heads equally"
    error = refusal(
        lambda: kvspec.plan_transfer(engine(packed, tp_size=2), engine(packed, tp_size=4)),
        kvspec.MismatchError,
    )
    quarters = "[(0, 1), (1, 2), (2, 3), (3, 4)]"
    assert f"l.kv: producer [(0, 2), (2, 4)], consumer {quarters} ({why})" == str(error)
    kvspec.plan_transfer(engine(packed, tp_size=2), engine(packed, tp_size=2))


def test_states_with_other_rows_move_what_is_common_if_asked() -> None:
    """Speculative rows of one side are a mismatch, unless `common_states` says to leave them."""
    ours, theirs = engine(group(spec=state())), engine(group(spec=state(num_speculative_tokens=2)))
    error = refusal(lambda: kvspec.plan_transfer(ours, theirs), kvspec.MismatchError)
    assert [(f"l.conv_{each}.states", 1, 3) for each in "xbc"] == [
        (each.field, each.producer, each.consumer) for each in error.mismatches
    ]
    kvspec.plan_transfer(ours, theirs, common_states=True)
    other = engine(group(spec=state(num_speculative_tokens=2, dtype="float16")))
    error = refusal(
        lambda: kvspec.plan_transfer(ours, other, common_states=True), kvspec.MismatchError
    )
    assert ["l.dtype", "l.ssm_dtype"] == [each.field for each in error.mismatches]


def test_every_layer_on_one_side_only_is_named() -> None:
    """A reader has to exclude them one by one, so all are named."""
    theirs = engine(group("a", "draft.0", "draft.1"))
    error = refusal(lambda: kvspec.plan_transfer(engine(group("a")), theirs), kvspec.MismatchError)
    assert "draft.0" in str(error)
    assert "draft.1" in str(error)


def test_what_only_says_where_bytes_lie_is_no_mismatch() -> None:
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
