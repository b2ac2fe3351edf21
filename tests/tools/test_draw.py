"""Pictures show every rank and every slice, in letters that can be read."""

from __future__ import annotations

import re
import runpy
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple
from xml.etree import ElementTree as ET

import attrs
import builders
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvspec
from kvspec.draw import plan_svg, table_picture, table_svg
from kvspec.draw.canvas import (
    BAND,
    FAINT,
    HOLLOW,
    INK,
    LINE,
    PALETTE,
    PAPER,
    SHADE,
    SMALL,
    shortened,
    width_of,
)
from kvspec.testing.case import Case
from kvspec.testing.strategies import cases, common_cases, sharing_cases, spanning_cases
from kvspec.testing.world import plan_of

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """Where something is drawn, and what it says."""

    left: float
    top: float
    right: float
    bottom: float
    says: str = ""

    def inside(self, other: Box, slack: float = 0.0) -> bool:
        """Whether this lies in *other*."""
        return (
            other.left - slack <= self.left
            and self.right <= other.right + slack
            and other.top - slack <= self.top
            and self.bottom <= other.bottom + slack
        )

    def meets(self, other: Box) -> bool:
        """Whether any pixel is in both."""
        return (
            self.left < other.right
            and other.left < self.right
            and self.top < other.bottom
            and other.top < self.bottom
        )


def attention(heads: int, layers: int = 4, first: int = 0, block: int = 16) -> kvspec.KVCacheGroup:
    """Return a group of full attention."""
    names = (f"model.layers.{at}" for at in range(first, first + layers))
    spec = builders.gqa(heads, block_size=block, head_size=8)
    return builders.group(spec, *names, name=f"full{first}")


def engine(tp: int, *groups: kvspec.KVCacheGroup, **sizes: int) -> kvspec.EngineSpec:
    """Return an engine of *groups*."""
    return builders.engine(*groups, tp=tp, layout="NHD", **sizes)


def latent() -> kvspec.KVCacheGroup:
    """Return a group of MLA."""
    return builders.group(builders.mla(head_size=64), "model.layers.0", name="latent")


def states() -> kvspec.KVCacheGroup:
    """Return a group of Mamba2, whose b and c are sharded otherwise than x and the heads."""
    spec = builders.mamba2(num_heads=16, head_dim=4, n_groups=2, state_size=8)
    return builders.group(spec, "model.layers.9", name="states")


PLANS = {
    "4 to 3": kvspec.plan_transfer(engine(4, attention(8)), engine(3, attention(8))),
    "8 to 16": kvspec.plan_transfer(engine(8, attention(8)), engine(16, attention(8))),
    "16 to 6": kvspec.plan_transfer(engine(16, attention(8)), engine(6, attention(8))),
    "mla": kvspec.plan_transfer(engine(8, latent()), engine(3, latent())),
    "mla striped": kvspec.plan_transfer(engine(8, latent()), engine(3, latent()), "stripe"),
    "hybrid": kvspec.plan_transfer(
        engine(4, attention(2), states()), engine(8, attention(2), states())
    ),
    "hybrid 8 to 16": kvspec.plan_transfer(
        engine(8, attention(4), states()), engine(16, attention(4), states())
    ),
    "stages": kvspec.plan_transfer(
        engine(2, attention(4, 6), pp_size=2), engine(4, attention(4, 6), pp_size=3)
    ),
    "contexts": kvspec.plan_transfer(
        engine(4, attention(2), dcp_size=2), engine(2, attention(2), pcp_size=2)
    ),
    "two groups": kvspec.plan_transfer(
        engine(2, attention(4), attention(2, first=4)),
        engine(4, attention(4), attention(2, first=4)),
    ),
    "many heads": kvspec.plan_transfer(engine(2, attention(64)), engine(3, attention(64))),
}
every_plan = pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS.keys())


def parsed(text: str) -> ET.Element:
    """Return a picture's root; it is well-formed XML, or this raises."""
    return ET.fromstring(text)  # noqa: S314 - drawn by this process


def texts(root: ET.Element) -> list[Box]:
    """Return every text with room for its letters."""
    found = []
    for each in root.iter(f"{SVG}text"):
        size, x, y = (float(each.attrib[name]) for name in ("font-size", "x", "y"))
        wide = width_of(each.text or "", size, bold=each.get("font-weight") == "bold")
        left = x - {"middle": wide / 2, "end": wide}.get(each.get("text-anchor", ""), 0)
        found.append(Box(left, y - size * 0.8, left + wide, y + size * 0.22, each.text or ""))
    return found


def boxes(root: ET.Element, name: str) -> list[tuple[Box, dict[str, str]]]:
    """Return every rectangle that has the data attribute *name*."""
    found = []
    for each in root.iter(f"{SVG}rect"):
        if f"data-{name}" in each.attrib:
            x, y, wide, high = (float(each.attrib[k]) for k in ("x", "y", "width", "height"))
            found.append((Box(x, y, x + wide, y + high), each.attrib))
    return found


def units_in(label: str) -> range:
    """Return the units that a cell stands for."""
    first, _, last = label.partition("\N{EN DASH}")
    return range(int(first), int(last or first) + 1)


def table_of(
    producer: kvspec.EngineSpec, consumer: kvspec.EngineSpec, tp: int = 0
) -> kvspec.DescriptorTable:
    """Return the table of producer rank *tp* and the consumer's first, with 8 blocks each."""
    caches = (
        kvspec.allocate(side, kvspec.RankId(tp=rank), 8)[0]
        for side, rank in ((producer, tp), (consumer, 0))
    )
    return kvspec.build_table(kvspec.plan_transfer(producer, consumer), *caches)


def drawn_tables() -> dict[str, str]:
    """Return pictures of tables: other layouts, block sizes, kinds of layers, requests."""
    found = {}
    for name, producer, consumer in (
        ("heads", engine(2, attention(4)), engine(1, attention(4))),
        ("blocks", engine(2, attention(4)), engine(1, attention(4, block=64))),
        ("latent", engine(2, latent()), engine(1, latent())),
        ("states", engine(2, states()), engine(1, states())),
    ):
        found[name] = table_svg(table_of(producer, consumer))
    return found


@every_plan
def test_every_rank_has_one_box_that_names_it(plan: kvspec.TransferPlan) -> None:
    """Both sides' ranks are all there, each once, with its name written inside."""
    root = parsed(plan_svg(plan))
    for side, ranks in (
        ("producer", plan.producer.parallel.ranks),
        ("consumer", plan.consumer.parallel.ranks),
    ):
        found = [(box, data) for box, data in boxes(root, "rank") if data["data-side"] == side]
        assert sorted(map(str, ranks)) == sorted(data["data-rank"] for _, data in found)
        for box, data in found:
            assert data["data-rank"] in [text.says for text in texts(root) if text.inside(box, 1)]


@every_plan
def test_every_unit_of_the_target_has_a_label(plan: kvspec.TransferPlan) -> None:
    """For every unit that a consumer rank owns, a cell in its box says the unit's number."""
    root = parsed(plan_svg(plan))
    cells, said = boxes(root, "cell"), texts(root)
    homes = {
        data["data-rank"]: box
        for box, data in boxes(root, "rank")
        if data["data-side"] == "consumer"
    }
    for rank in plan.consumer.parallel.ranks:
        own = [(box, data) for box, data in cells if box.inside(homes[str(rank)])]
        for box, data in own:
            assert data["data-cell"] in [each.says for each in said if each.inside(box, 4)]
        for group in plan.consumer.groups:
            if not plan.consumer.layers_at(group, rank.pp):
                continue
            for part in group.spec.parts:
                own_units = plan.consumer.parallel.sharding(part.units, part.granularity).ranges[
                    rank.tp
                ]
                target = {unit // part.granularity for unit in own_units}
                shown = {
                    unit
                    for _, data in own
                    if part.name in data["data-parts"].split("+")
                    for unit in units_in(data["data-cell"])
                }
                assert set() == target - shown


@every_plan
def test_every_slice_is_a_line_between_its_ranks(plan: kvspec.TransferPlan) -> None:
    """A line for each slice of each edge leaves the producer's box and ends at the consumer's."""
    root = parsed(plan_svg(plan))
    homes = {(d["data-side"], d["data-rank"]): box for box, d in boxes(root, "rank")}
    lines = [each for each in root.iter(f"{SVG}path") if "data-producer" in each.attrib]
    wanted = {
        (str(e.producer), str(e.consumer), "+".join(s.parts), s.global_range, e.group)
        for e in plan.edges
        for s in e.slices
    }
    found = set()
    for line in lines:
        data = line.attrib
        start, stop = map(int, data["data-units"].split("-"))
        for group in data["data-groups"].split():
            key = (data["data-producer"], data["data-consumer"], data["data-parts"])
            found.add((*key, range(start, stop), group))
        x0, y0, *_, x1, y1 = map(float, re.findall(r"-?[\d.]+", data["d"]))
        producer = homes["producer", data["data-producer"]]
        consumer = homes["consumer", data["data-consumer"]]
        assert producer.right == pytest.approx(x0, abs=0.2)
        assert consumer.left == pytest.approx(x1 + 6, abs=0.2)
        assert producer.top < y0 < producer.bottom
        assert consumer.top < y1 < consumer.bottom
    assert wanted == found


@every_plan
def test_a_rank_that_nobody_reads_is_grey_and_says_who_releases_it(
    plan: kvspec.TransferPlan,
) -> None:
    """Its box is shaded and names the rank that tells it; a rank that is read is not."""
    root = parsed(plan_svg(plan))
    homes = {d["data-rank"]: (b, d) for b, d in boxes(root, "rank") if d["data-side"] == "producer"}
    for rank in plan.producer.parallel.ranks:
        box, data = homes[str(rank)]
        if plan.targets(rank):
            assert PAPER == data["fill"]
            continue
        (teller,) = plan.notifiers(rank)
        assert SHADE == data["fill"]
        note = f"not read; released by {teller}"
        assert note in [each.says for each in texts(root) if each.inside(box, 1)]


@every_plan
def test_no_label_of_a_plan_covers_another(plan: kvspec.TransferPlan) -> None:
    """Texts keep apart and inside the picture, also at TP 8 to 16."""
    root = parsed(plan_svg(plan))
    said = texts(root)
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    assert [] == [each.says for each in said if not each.inside(paper)]
    assert [] == [(a.says, b.says) for a, b in combinations(said, 2) if a.meets(b)]


@pytest.mark.parametrize("name", ["heads", "blocks", "latent", "states"])
def test_no_label_of_a_table_covers_another(name: str) -> None:
    """Texts keep apart and inside the picture."""
    root = parsed(drawn_tables()[name])
    said = texts(root)
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    assert [] == [each.says for each in said if not each.inside(paper)]
    assert [] == [(a.says, b.says) for a, b in combinations(said, 2) if a.meets(b)]


def test_letters_are_large_and_colours_are_of_the_palette() -> None:
    """No text is smaller than 11 pixels; colours are the palette's, or greys."""
    allowed = {*PALETTE, INK, FAINT, LINE, BAND, PAPER, SHADE, HOLLOW, "none"}
    for text in [*(plan_svg(plan) for plan in PLANS.values()), *drawn_tables().values()]:
        root = parsed(text)
        assert min(float(each.attrib["font-size"]) for each in root.iter(f"{SVG}text")) >= SMALL
        used = {each.get(name) for each in root.iter() for name in ("fill", "stroke")} - {None}
        assert set() == {each for each in used if each and not each.startswith("url(")} - allowed


@every_plan
def test_a_plan_has_one_picture(plan: kvspec.TransferPlan) -> None:
    """Drawing is deterministic, and a notebook shows what `plan_svg` returns."""
    assert plan_svg(plan) == plan_svg(plan) == plan._repr_svg_()


@pytest.mark.parametrize("falling", [False, True])
def test_each_memory_has_an_axis_of_its_own(falling: bool) -> None:
    """Layers in memories of their own: each is numbered, and its bytes count from its first."""
    made = [np.zeros((2, 4, 4, 4, 16), np.uint8) for _ in range(3)]
    made.sort(key=lambda each: each.ctypes.data, reverse=falling)
    arrays = {f"model.layers.{at}": each for at, each in enumerate(made)}
    plan = kvspec.plan_transfer(*[engine(1, attention(4, layers=3, block=4))] * 2)
    cache = kvspec.RankCache.from_tensors(plan.producer, kvspec.RankId(), arrays, axes="KBNHC")
    other, _ = kvspec.allocate(plan.consumer, kvspec.RankId(), 4)
    root = parsed(table_svg(kvspec.build_table(plan, cache, other)))
    said = ["".join(each.itertext()) for each in root.iter(f"{SVG}text")]
    axis = [each for each in said if each in {"0 B", "elsewhere"} or each.startswith("memory")]
    assert ["0 B", "memory 2", "memory 3", "0 B"] == axis


def test_a_table_has_one_picture_wherever_its_memory_lies() -> None:
    """Addresses do not show: caches allocated anew give the same picture."""
    assert drawn_tables() == drawn_tables()


def test_stages_and_contexts_are_bands() -> None:
    """Bands say which layers a stage holds, and which tokens a context rank."""
    said = {each.says for each in texts(parsed(plan_svg(PLANS["stages"])))}
    stages = {("0", "0", "2"), ("1", "3", "5"), ("2", "4", "5")}
    told = {f"stage {stage}: layers {a}\N{EN DASH}{b}" for stage, a, b in stages}
    assert set() == told - said
    said = {each.says for each in texts(parsed(plan_svg(PLANS["contexts"])))}
    assert "context 1 of 2, 1 token at a time" in said


def test_a_stage_without_layers_says_so() -> None:
    """More stages than layers: a band of ranks that hold nothing, told in words."""
    producer, consumer = engine(1, attention(4, 2), pp_size=3), engine(1, attention(4, 2))
    plan = kvspec.plan_transfer(producer, consumer)
    said = {each.says for each in texts(parsed(plan_svg(plan)))}
    empty = {0, 1, 2} - set(plan.producer.stage_of.values())
    assert {f"stage {stage}: no layers" for stage in empty} <= said
    assert len(empty) == 1


def test_parts_that_are_sharded_alike_share_a_pattern() -> None:
    """Conv x, b with c, the heads' states and attention can be told apart without colour."""
    root = parsed(plan_svg(PLANS["hybrid"]))
    named = {data["data-parts"] for _, data in boxes(root, "cell")}
    assert {"k+v", "conv_x", "conv_b+conv_c", "ssm"} == named
    hatches = {each.get("fill") for each in root.iter(f"{SVG}rect")}
    assert {"url(#slope)", "url(#dots)", "url(#cross)"} <= hatches


def test_one_group_can_be_drawn_alone() -> None:
    """Other groups' parts do not show, and an unknown group is refused."""
    root = parsed(plan_svg(PLANS["hybrid"], "states"))
    assert "k+v" not in {data["data-parts"] for _, data in boxes(root, "cell")}
    with pytest.raises(kvspec.SpecError, match="group='none'"):
        plan_svg(PLANS["hybrid"], "none")


def ribbons(text: str) -> list[int]:
    """Return the bytes of the runs of every ribbon."""
    paths = parsed(text).iter(f"{SVG}path")
    return [int(each.attrib["data-length"]) for each in paths if "data-length" in each.attrib]


def test_ribbons_are_the_runs_of_one_block() -> None:
    """2 heads of 16 tokens, k and v together: 32 runs of 32 bytes for each of 3 layers drawn."""
    producer, consumer = engine(2, attention(4)), engine(1, attention(4))
    consumer = kvspec.EngineSpec(groups=consumer.groups, parallel=consumer.parallel, layout="HND")
    table = table_of(producer, consumer)
    text = table_svg(table)
    said = " ".join(each.says for each in texts(parsed(text)))
    layers = int(re.findall(r"(\d+) layers? drawn", said)[0])
    assert [32] * 32 * layers == ribbons(text)
    assert f"{layers} layer{'s' if layers > 1 else ''} drawn, … and {4 - layers} more" in said
    assert "one block of 4 layers: 128 runs of 32 B, 4 KiB in all" in said
    assert text == table._repr_svg_()


def test_ribbons_join_the_bytes_of_one_unit() -> None:
    """Each ribbon ends on the same layer and unit on both sides; every unit that moves has one."""
    producer, consumer = engine(2, attention(4)), engine(1, attention(4))
    consumer = kvspec.EngineSpec(groups=consumer.groups, parallel=consumer.parallel, layout="HND")
    table = table_of(producer, consumer, tp=1)
    root = parsed(table_svg(table))
    bars = boxes(root, "layer")
    joined = set()
    for line in (each for each in root.iter(f"{SVG}path") if "data-length" in each.attrib):
        numbers = [float(each) for each in re.findall(r"-?[\d.]+", line.attrib["d"])]
        a, c, d, b = numbers[0], numbers[6], numbers[8], numbers[14]
        ends = []
        for side, left, right in (("producer", a, b), ("consumer", c, d)):
            under = [
                (data["data-layer"], data["data-units"])
                for box, data in bars
                if data["data-side"] == side and box.left + 0.3 < right and left < box.right - 0.3
            ]
            assert 1 == len(set(under))
            ends.append(under[0])
        assert ends[0] == ends[1]
        joined.add(ends[0])
    moved = {(d["data-layer"], d["data-units"]) for _, d in bars if d["data-side"] == "producer"}
    assert {"2", "3"} == {unit for _, unit in moved}
    assert moved == joined


def test_a_request_shows_its_own_block() -> None:
    """The block drawn is one of the request's, and a cached end moves in fewer bytes."""
    producer, consumer = engine(1, latent()), engine(1, latent())
    table = table_of(producer, consumer)
    request = builders.request(16, {"latent": [5]}, {"latent": [2]}, cached_tokens=12)
    text = table_svg(table, request)
    said = " ".join(each.says for each in texts(parsed(text)))
    assert "block 5" in said
    assert "block 2" in said
    assert sum(table.descriptors(request)[:, 2]) == sum(ribbons(text)) == 4 * 64 * 2


def test_layers_of_unlike_rows_show_the_same_tokens() -> None:
    """A request of the last 4 of 16 tokens: rows 12 to 15 of one layer, row 3 of another."""
    latents = {
        name: builders.mla(head_size=8, tokens_per_state=size)
        for name, size in (("l.0", 1), ("l.1", 4))
    }
    spec = kvspec.UniformTypeKVCacheSpecs(specs=latents)
    (table,) = tables_of(spec)
    request = builders.request(16, [5], [2], cached_tokens=12)
    root = parsed(table_svg(table, request))
    shown = {(d["data-side"], d["data-layer"]): d for _, d in boxes(root, "layer")}
    assert {(side, layer) for side in ("producer", "consumer") for layer in latents} == set(shown)
    assert 2 == len([each for each in texts(root) if "tokens 12 to 15 drawn" in each.says])
    assert sorted((4 * 16, 1 * 16)) == sorted(ribbons(table_svg(table, request)))


def check_picture(text: str) -> None:
    """Check that a picture is XML, and that all its letters and boxes lie on its paper."""
    root = parsed(text)
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    shapes = [box for name in ("rank", "cell", "layer") for box, _ in boxes(root, name)]
    assert [] == [each for each in [*texts(root), *shapes] if not each.inside(paper)]


@given(cases() | common_cases() | sharing_cases() | spanning_cases(), st.booleans())
def test_whatever_can_be_planned_can_be_drawn(case: Case, one_block: bool) -> None:
    """Every plan and table that the laws are about has a picture, of pools of one block too.

    Of an engine with a null block, that is the last one of them.
    """
    plan = plan_of(case)
    check_picture(plan_svg(plan))
    pairs = list(dict.fromkeys((edge.producer, edge.consumer) for edge in plan.edges))
    pools: Any = (case.producer_pool, case.consumer_pool)
    if one_block:
        nulls = case.producer.null_block, case.consumer.null_block
        pools = [1 if null is None else null + 1 for null in nulls]
    for pair in {*pairs[:1], *pairs[-1:]}:
        caches = [
            kvspec.allocate(side, rank, pool, shared=case.shared)
            for side, rank, pool in zip((case.producer, case.consumer), pair, pools, strict=True)
        ]
        table = kvspec.build_table(plan, caches[0][0], caches[1][0])
        for group in {entry.edge.group for entry in table.entries}:
            check_picture(table_svg(table, group=group))
            if not one_block:
                check_picture(table_svg(table, case.request, group=group))


def test_nothing_to_move_is_drawn_without_runs() -> None:
    """A request that is cached whole has no ribbons."""
    table = table_of(engine(1, latent()), engine(1, latent()))
    request = builders.request(16, {"latent": [5]}, {"latent": [2]}, cached_tokens=16)
    assert [] == ribbons(table_svg(table, request))


def nothing() -> kvspec.TransferPlan:
    """Return a plan that moves nothing: the producer excludes its only layer."""
    group = attrs.evolve(latent(), excluded=latent().layers)
    return kvspec.plan_transfer(engine(2, group), engine(1, latent()))


def test_a_plan_that_moves_nothing_says_so() -> None:
    """In words, with the layers that are excluded; in a notebook too. A group is refused."""
    plan = nothing()
    assert () == plan.edges
    root = parsed(plan_svg(plan))
    said = [each.says for each in texts(root)]
    told = ["TP 2 → TP 1", "nothing moves"]
    assert [*told, "excluded by the producer: layer 0"] == said
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    assert all(each.inside(paper) for each in texts(root))
    assert plan_svg(plan) == plan._repr_svg_()
    with pytest.raises(kvspec.SpecError) as caught:
        plan_svg(plan, group="latent")
    assert "group='latent': expected a group that the plan transfers" == str(caught.value)


def test_many_excluded_layers_are_told_shortly() -> None:
    """The picture of a plan without edges stays small."""
    group = attrs.evolve(attention(4, layers=80), excluded=attention(4, layers=80).layers)
    root = parsed(
        plan_svg(kvspec.plan_transfer(engine(1, attention(4, layers=80)), engine(1, group)))
    )
    said = [each.says for each in texts(root)]
    assert "excluded by the consumer: layers 0\N{EN DASH}79" == said[-1]
    assert float(root.attrib["width"]) < 500


def test_a_table_that_moves_nothing_says_so() -> None:
    """Of two ranks without an edge, of a plan without any, with a request or without."""
    four = kvspec.plan_transfer(engine(4, attention(4)), engine(4, attention(4)))
    request = builders.request(4, {"full0": [0]}, {"full0": [0]})
    for plan, ranks in ((four, (0, 1)), (nothing(), (0, 0))):
        producer, consumer = (
            kvspec.allocate(side, kvspec.RankId(tp=tp), 4)[0]
            for side, tp in zip((plan.producer, plan.consumer), ranks, strict=True)
        )
        table = kvspec.build_table(plan, producer, consumer)
        for text in (table_svg(table), table._repr_svg_(), table_svg(table, request)):
            said = [each.says for each in texts(parsed(text))]
            assert [f"tp{ranks[0]} → tp{ranks[1]}", "these two ranks exchange nothing"] == said
        with pytest.raises(kvspec.SpecError, match=r"group='g': .* exchange: nothing"):
            table_svg(table, group="g")


def tables_of(
    spec: kvspec.LayerSpec, producing: Any = None, consuming: Any = None, **more: Any
) -> Any:
    """Return the table of each two ranks that exchange anything, with the parallel sizes."""
    group = kvspec.KVCacheGroup(name="g", layers=spec.layers or ("l.0",), spec=spec)
    producer, consumer = (
        kvspec.EngineSpec(groups=(group,), parallel=kvspec.ParallelConfig(**sizes or {}))
        for sizes in (producing, consuming)
    )
    plan = kvspec.plan_transfer(producer, consumer, **more)
    pairs = dict.fromkeys((edge.producer, edge.consumer) for edge in plan.edges)
    return [
        kvspec.build_table(
            plan, kvspec.allocate(producer, p, 8)[0], kvspec.allocate(consumer, c, 8)[0]
        )
        for p, c in pairs
    ]


GQA: dict[str, Any] = {
    "block_size": 16, "total_num_kv_heads": 1, "head_size": 8, "dtype": "bfloat16",
}  # fmt: skip
LATENT = kvspec.MLAAttentionSpec(block_size=16, head_size=16, dtype="bfloat16")


@pytest.mark.parametrize(
    "spec",
    [
        kvspec.FullAttentionSpec(**GQA),
        kvspec.CrossAttentionSpec(**GQA),
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=16),
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=8),
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=2),
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=64),
        kvspec.SlidingWindowSpec(**GQA, sliding_window=2),
        kvspec.SlidingWindowSpec(**GQA, sliding_window=1, extra_retained_tokens=3),
    ],
    ids=repr,
)
def test_the_first_block_moves_if_any_of_it_can_live(spec: kvspec.LayerSpec) -> None:
    """As many tokens are asked for as leave some live: 16 rows of k and v, 16 bytes each."""
    (table,) = tables_of(spec)
    text = table_svg(table)
    said = [each.says for each in texts(parsed(text))]
    assert "one block of 1 layer: 1 run of 512 B, 512 B in all" in said
    assert [512] == ribbons(text)


@pytest.mark.parametrize("name", ["plan.svg", "table.svg"])
def test_the_documentation_shows_what_is_drawn(name: str) -> None:
    """The pictures in docs are what docs/draw_pictures.py draws."""
    docs = Path(__file__).parents[2] / "docs"
    pictures = runpy.run_path(str(docs / "draw_pictures.py"))["pictures"]()
    assert pictures[name] + "\n" == (docs / name).read_text(encoding="utf-8")


def test_the_first_block_s_request_tells_the_encoder_s_tokens() -> None:
    """Cross attention counts those, and no picture asks without them."""
    (table,) = tables_of(kvspec.CrossAttentionSpec(**GQA))
    asked = list(table_picture._first_blocks(table, table.entries[0].edge))
    assert 16 == asked[0].num_tokens
    assert [each.num_tokens for each in asked] == [each.encoder_tokens for each in asked]


@pytest.mark.parametrize(
    "spec",
    [
        kvspec.SlidingWindowSpec(**GQA, sliding_window=1),
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=1),
    ],
)
def test_a_block_of_which_nothing_lives_says_so(spec: kvspec.LayerSpec) -> None:
    """A window of the query's own token keeps none before it."""
    (table,) = tables_of(spec)
    said = [each.says for each in texts(parsed(table_svg(table)))]
    assert "one block of 1 layer: nothing of it moves" in said


@pytest.mark.parametrize(
    ("producing", "consuming", "more"),
    [
        ({"tp_size": 4}, {"tp_size": 1}, {"replica_policy": "stripe"}),
        ({"tp_size": 4}, {"tp_size": 3}, {"replica_policy": kvspec.ReplicaPolicy("stripe", 1)}),
        ({"tp_size": 4, "dcp_size": 4}, {"tp_size": 1}, {}),
        ({"tp_size": 1}, {"tp_size": 2, "dcp_size": 2, "interleave_size": 16}, {}),
        (
            {"tp_size": 2, "dcp_size": 2, "interleave_size": 8},
            {"tp_size": 3, "dcp_size": 3, "interleave_size": 4},
            {},
        ),
    ],
)
@pytest.mark.parametrize(
    "spec",
    [
        LATENT,
        kvspec.SlidingWindowMLASpec(
            block_size=16, head_size=16, dtype="bfloat16", sliding_window=3
        ),
    ],
    ids=["full", "window"],
)
def test_every_pair_that_exchanges_anything_has_runs(
    spec: kvspec.LayerSpec, producing: Any, consuming: Any, more: Any
) -> None:
    """Also where its first tokens are not in the first block, or not at the end of one."""
    tables = tables_of(spec, producing, consuming, **more)
    assert len(tables) > 1
    for table in tables:
        assert ribbons(table_svg(table)) != []


def test_striped_states_have_runs() -> None:
    """A state is drawn where its last token's block is the pair's own."""
    spec = kvspec.MambaSpec.replicated_state(state_bytes=64)
    tables = tables_of(spec, {"tp_size": 4}, {"tp_size": 1}, replica_policy="stripe")
    assert 4 == len(tables)
    for table in tables:
        assert [64] == ribbons(table_svg(table))


@pytest.mark.parametrize("draw", [plan_svg, table_svg])
def test_only_plans_and_tables_are_drawn(draw: Any) -> None:
    """Anything else is refused."""
    with pytest.raises(kvspec.SpecError, match="=None: expected a "):
        draw(None)


def test_groups_that_two_ranks_do_not_exchange_are_refused() -> None:
    """The error names the groups that they do exchange."""
    table = table_of(engine(1, latent()), engine(1, latent()))
    with pytest.raises(kvspec.SpecError, match=r"group='full'.*\['latent'\]"):
        table_svg(table, group="full")


def test_names_are_escaped() -> None:
    """A name with marks of XML is shown as it is."""
    spec = latent().spec
    group = kvspec.KVCacheGroup(name='a<b>&"c"', layers=('<"&>',), spec=spec)
    side = kvspec.EngineSpec(groups=(group,))
    cache, _storage = kvspec.allocate(side, kvspec.RankId(), 2)
    plan = kvspec.plan_transfer(side, side)
    root = parsed(table_svg(kvspec.build_table(plan, cache, cache)))
    assert {'<"&>'} == {data["data-layer"] for _, data in boxes(root, "layer")}
    (line,) = (e for e in parsed(plan_svg(plan)).iter() if "data-groups" in e.attrib)
    assert 'a<b>&"c"' == line.attrib["data-groups"]


def test_long_names_lose_their_middle() -> None:
    """Both ends of a name say most."""
    assert "model.….27" == shortened("model.layers.27", 10)
    assert "short" == shortened("short", 10)
