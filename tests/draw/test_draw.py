"""Test that pictures of plans and tables show every rank and slice in readable letters."""

from __future__ import annotations

import re
import runpy
from functools import partial
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
from refused import check_rejected, has_in_order, refusal
from special_cases import common_cases, spanning_cases

import kvspec
from kvspec.draw import plan_svg, table_svg
from kvspec.draw.style import (
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
from kvspec.testing.strategies import cases, sharing_cases
from kvspec.testing.world import plan_of

SVG = "{http://www.w3.org/2000/svg}"


class Box(NamedTuple):
    """A rectangle of a picture, and its text."""

    left: float
    top: float
    right: float
    bottom: float
    text: str = ""

    def inside(self, other: Box, slack: float = 0.0) -> bool:
        """Return whether this box is inside *other*."""
        return (
            other.left - slack <= self.left
            and self.right <= other.right + slack
            and other.top - slack <= self.top
            and self.bottom <= other.bottom + slack
        )

    def overlaps(self, other: Box) -> bool:
        """Return whether any pixel is in both boxes."""
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
    """Return a group of Mamba2, whose b and c have another sharding than x and the heads."""
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
    """Return the root of a picture, which must be well-formed XML."""
    return ET.fromstring(text)  # noqa: S314 - drawn by this process


def texts(root: ET.Element) -> list[Box]:
    """Return the box of every text."""
    labels = []
    for label in root.iter(f"{SVG}text"):
        size, x, y = (float(label.attrib[name]) for name in ("font-size", "x", "y"))
        wide = width_of(label.text or "", size, bold=label.get("font-weight") == "bold")
        left = x - {"middle": wide / 2, "end": wide}.get(label.get("text-anchor", ""), 0)
        labels.append(Box(left, y - size * 0.8, left + wide, y + size * 0.22, label.text or ""))
    return labels


def boxes(root: ET.Element, name: str) -> list[tuple[Box, dict[str, str]]]:
    """Return every rectangle that has the data attribute *name*."""
    rectangles = []
    for shape in root.iter(f"{SVG}rect"):
        if f"data-{name}" in shape.attrib:
            x, y, wide, high = (float(shape.attrib[k]) for k in ("x", "y", "width", "height"))
            rectangles.append((Box(x, y, x + wide, y + high), shape.attrib))
    return rectangles


def units_in(label: str) -> range:
    """Return the units of the cell with *label*."""
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
    """Return pictures of tables with different kinds of layers and block sizes."""
    pictures = {}
    for name, producer, consumer in (
        ("heads", engine(2, attention(4)), engine(1, attention(4))),
        ("blocks", engine(2, attention(4)), engine(1, attention(4, block=64))),
        ("latent", engine(2, latent()), engine(1, latent())),
        ("states", engine(2, states()), engine(1, states())),
    ):
        pictures[name] = table_svg(table_of(producer, consumer))
    return pictures


@every_plan
def test_every_rank_has_one_box_with_its_name(plan: kvspec.TransferPlan) -> None:
    """Each rank of both sides has one box, which contains its name."""
    root = parsed(plan_svg(plan))
    for side, ranks in (
        ("producer", plan.producer.parallel.ranks),
        ("consumer", plan.consumer.parallel.ranks),
    ):
        homes = [(box, data) for box, data in boxes(root, "rank") if data["data-side"] == side]
        assert sorted(map(str, ranks)) == sorted(data["data-rank"] for _, data in homes)
        for box, data in homes:
            assert data["data-rank"] in [text.text for text in texts(root) if text.inside(box, 1)]


@every_plan
def test_every_unit_of_the_target_has_a_label(plan: kvspec.TransferPlan) -> None:
    """The box of a consumer rank has a cell with the number of each of its units."""
    root = parsed(plan_svg(plan))
    cells, labels = boxes(root, "cell"), texts(root)
    homes = {
        data["data-rank"]: box
        for box, data in boxes(root, "rank")
        if data["data-side"] == "consumer"
    }
    for rank in plan.consumer.parallel.ranks:
        own = [(box, data) for box, data in cells if box.inside(homes[str(rank)])]
        for box, data in own:
            assert data["data-cell"] in [label.text for label in labels if label.inside(box, 4)]
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
    """Each slice of an edge has a line from the box of the producer to the box of the consumer."""
    root = parsed(plan_svg(plan))
    homes = {(d["data-side"], d["data-rank"]): box for box, d in boxes(root, "rank")}
    lines = [path for path in root.iter(f"{SVG}path") if "data-producer" in path.attrib]
    expected = {
        (str(e.producer), str(e.consumer), "+".join(s.parts), s.global_range, e.group)
        for e in plan.edges
        for s in e.slices
    }
    drawn = set()
    for line in lines:
        data = line.attrib
        start, stop = map(int, data["data-units"].split("-"))
        for group in data["data-groups"].split():
            key = (data["data-producer"], data["data-consumer"], data["data-parts"])
            drawn.add((*key, range(start, stop), group))
        x0, y0, *_, x1, y1 = map(float, re.findall(r"-?[\d.]+", data["d"]))
        producer = homes["producer", data["data-producer"]]
        consumer = homes["consumer", data["data-consumer"]]
        assert producer.right == pytest.approx(x0, abs=0.2)
        assert consumer.left == pytest.approx(x1 + 6, abs=0.2)
        assert producer.top < y0 < producer.bottom
        assert consumer.top < y1 < consumer.bottom
    assert expected == drawn


@every_plan
def test_rank_without_readers_is_grey_and_names_its_notifier(
    plan: kvspec.TransferPlan,
) -> None:
    """Its box names the rank that notifies it. The box of a rank with readers is white."""
    root = parsed(plan_svg(plan))
    homes = {d["data-rank"]: (b, d) for b, d in boxes(root, "rank") if d["data-side"] == "producer"}
    for rank in plan.producer.parallel.ranks:
        box, data = homes[str(rank)]
        if plan.targets(rank):
            assert PAPER == data["fill"]
            continue
        (notifier,) = plan.notifiers(rank)
        assert SHADE == data["fill"]
        notes = [label.text for label in texts(root) if label.inside(box, 1)]
        assert any(has_in_order([str(notifier)], note) for note in notes if note != str(rank))


@every_plan
def test_labels_of_a_plan_do_not_overlap(plan: kvspec.TransferPlan) -> None:
    """All texts are inside the picture, also from TP 8 to 16."""
    root = parsed(plan_svg(plan))
    labels = texts(root)
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    assert [] == [label.text for label in labels if not label.inside(paper)]
    assert [] == [(a.text, b.text) for a, b in combinations(labels, 2) if a.overlaps(b)]


@pytest.mark.parametrize("name", ["heads", "blocks", "latent", "states"])
def test_labels_of_a_table_do_not_overlap(name: str) -> None:
    """All texts are inside the picture."""
    root = parsed(drawn_tables()[name])
    labels = texts(root)
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    assert [] == [label.text for label in labels if not label.inside(paper)]
    assert [] == [(a.text, b.text) for a, b in combinations(labels, 2) if a.overlaps(b)]


def test_plan_svg_counts_common_rows() -> None:
    """The producer's state has one row of three bytes and the consumer's has two. One row moves."""
    sides = (
        builders.engine(kvspec.MambaSpec.short_conv(conv_dim=3, conv_kernel=rows + 1, dtype="int8"))
        for rows in (1, 2)
    )
    plan = kvspec.plan_transfer(*sides, common_states=True)
    assert "3 B a state" in plan_svg(plan)


def test_pictures_have_large_letters_and_colours_of_the_palette() -> None:
    """Letters have at least 11 pixels. Colours are those of the palette, or greys."""
    allowed = {*PALETTE, INK, FAINT, LINE, BAND, PAPER, SHADE, HOLLOW, "none"}
    for text in [*(plan_svg(plan) for plan in PLANS.values()), *drawn_tables().values()]:
        root = parsed(text)
        assert min(float(label.attrib["font-size"]) for label in root.iter(f"{SVG}text")) >= SMALL
        used = {shape.get(name) for shape in root.iter() for name in ("fill", "stroke")}
        colours = {value for value in used if value and not value.startswith("url(")}
        assert set() == colours - allowed


@every_plan
def test_picture_of_a_plan_is_deterministic(plan: kvspec.TransferPlan) -> None:
    """A notebook shows the picture that `plan_svg` returns."""
    assert plan_svg(plan) == plan_svg(plan) == plan._repr_svg_()


@pytest.mark.parametrize("falling", [False, True])
def test_each_memory_has_its_own_axis(falling: bool) -> None:
    """Each layer has its own memory, which has a number and counts its bytes from 0."""
    memories = [np.zeros((2, 4, 4, 4, 16), np.uint8) for _ in range(3)]
    memories.sort(key=lambda array: array.ctypes.data, reverse=falling)
    arrays = {f"model.layers.{at}": array for at, array in enumerate(memories)}
    plan = kvspec.plan_transfer(*[engine(1, attention(4, layers=3, block=4))] * 2)
    cache = kvspec.RankCache.from_tensors(plan.producer, kvspec.RankId(), arrays, axes="KBNHC")
    other, _ = kvspec.allocate(plan.consumer, kvspec.RankId(), 4)
    root = parsed(table_svg(kvspec.build_table(plan, cache, other)))
    labels = ["".join(label.itertext()) for label in root.iter(f"{SVG}text")]
    axis = [text for text in labels if text in {"0 B", "elsewhere"} or text.startswith("memory")]
    assert ["0 B", "memory 2", "memory 3", "0 B"] == axis


def test_picture_of_a_table_does_not_depend_on_addresses() -> None:
    """New caches of the same engines have the same picture."""
    assert drawn_tables() == drawn_tables()


def test_stages_and_contexts_are_bands() -> None:
    """The label of a band has the layers of a stage, or the tokens of a context rank."""
    labels = {label.text for label in texts(parsed(plan_svg(PLANS["stages"])))}
    for stage, first, last in (("0", "0", "2"), ("1", "3", "5"), ("2", "4", "5")):
        facts = [f"stage {stage}", f"{first}\N{EN DASH}{last}"]
        assert any(has_in_order(facts, text) for text in labels)
    labels = {label.text for label in texts(parsed(plan_svg(PLANS["contexts"])))}
    assert any(has_in_order(["context 1", "2", "1 token"], text) for text in labels)


def test_stage_without_layers_has_a_label() -> None:
    """If there are more stages than layers, the band of a stage may have no layers."""
    producer, consumer = engine(1, attention(4, 2), pp_size=3), engine(1, attention(4, 2))
    plan = kvspec.plan_transfer(producer, consumer)
    labels = {label.text for label in texts(parsed(plan_svg(plan)))}
    (empty,) = {0, 1, 2} - set(plan.producer.stage_of.values())
    assert any(has_in_order([f"stage {empty}", "no"], text) for text in labels)


def test_parts_with_equal_shardings_share_a_pattern() -> None:
    """Conv x, conv b with c, the states and attention differ without colour, too."""
    root = parsed(plan_svg(PLANS["hybrid"]))
    names = {data["data-parts"] for _, data in boxes(root, "cell")}
    assert {"k+v", "conv_x", "conv_b+conv_c", "ssm"} == names
    hatches = {shape.get("fill") for shape in root.iter(f"{SVG}rect")}
    assert {"url(#slope)", "url(#dots)", "url(#cross)"} <= hatches


def test_picture_of_one_group_has_no_other_parts() -> None:
    """An unknown group is an error."""
    root = parsed(plan_svg(PLANS["hybrid"], "states"))
    assert "k+v" not in {data["data-parts"] for _, data in boxes(root, "cell")}
    check_rejected(lambda: plan_svg(PLANS["hybrid"], "none"), "group", "none")


def ribbons(text: str) -> list[int]:
    """Return the bytes of the runs of every ribbon."""
    paths = parsed(text).iter(f"{SVG}path")
    return [int(path.attrib["data-length"]) for path in paths if "data-length" in path.attrib]


def all_text(picture: str) -> str:
    """Return all texts of a picture in one line."""
    return " ".join(label.text for label in texts(parsed(picture)))


def test_ribbons_are_the_runs_of_one_block() -> None:
    """Each layer drawn has 32 runs of 32 bytes: 16 tokens of 2 heads, keys and values packed."""
    producer, consumer = engine(2, attention(4)), engine(1, attention(4))
    consumer = kvspec.EngineSpec(groups=consumer.groups, parallel=consumer.parallel, layout="HND")
    table = table_of(producer, consumer)
    text = table_svg(table)
    labels = all_text(text)
    layers = int(re.findall(r"(\d+) layers? drawn", labels)[0])
    assert [32] * 32 * layers == ribbons(text)
    assert f"and {4 - layers} more" in labels
    assert has_in_order(["4 layers", "128 runs", "32 B", "4 KiB"], labels)
    assert text == table._repr_svg_()


def test_ribbons_join_the_bytes_of_one_unit() -> None:
    """A ribbon has the same layer and unit on both sides, and every unit that moves has one."""
    producer, consumer = engine(2, attention(4)), engine(1, attention(4))
    consumer = kvspec.EngineSpec(groups=consumer.groups, parallel=consumer.parallel, layout="HND")
    table = table_of(producer, consumer, tp=1)
    root = parsed(table_svg(table))
    bars = boxes(root, "layer")
    joined = set()
    for line in (path for path in root.iter(f"{SVG}path") if "data-length" in path.attrib):
        numbers = [float(number) for number in re.findall(r"-?[\d.]+", line.attrib["d"])]
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


def test_picture_of_a_request_shows_its_own_block() -> None:
    """A request with cached tokens moves fewer bytes of the block."""
    producer, consumer = engine(1, latent()), engine(1, latent())
    table = table_of(producer, consumer)
    request = builders.request(16, {"latent": [5]}, {"latent": [2]}, cached_tokens=12)
    text = table_svg(table, request)
    labels = all_text(text)
    assert "block 5" in labels
    assert "block 2" in labels
    assert sum(table.descriptors(request)[:, 2]) == sum(ribbons(text)) == 4 * 64 * 2


def test_layers_with_unequal_rows_show_the_same_tokens() -> None:
    """The last 4 of 16 tokens are rows 12 to 15 of one layer and row 3 of the other."""
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
    assert 2 == len([label for label in texts(root) if "tokens 12 to 15" in label.text])
    assert sorted((4 * 16, 1 * 16)) == sorted(ribbons(table_svg(table, request)))


def check_picture(text: str) -> None:
    """Check that a picture is XML, and that all its letters and boxes are inside it."""
    root = parsed(text)
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    shapes = [box for name in ("rank", "cell", "layer") for box, _ in boxes(root, name)]
    assert [] == [box for box in [*texts(root), *shapes] if not box.inside(paper)]


@given(cases() | common_cases() | sharing_cases() | spanning_cases(), st.booleans())
def test_every_plan_and_table_has_a_picture(case: Case, one_block: bool) -> None:
    """The cases are those of the laws. Their pools may have one block besides the null block."""
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
        for group in {numbered.edge.group for numbered in table.numbered_rows}:
            check_picture(table_svg(table, group=group))
            if not one_block:
                check_picture(table_svg(table, case.request, group=group))


def test_fully_cached_request_has_no_ribbons() -> None:
    """Nothing of the request moves."""
    table = table_of(engine(1, latent()), engine(1, latent()))
    request = builders.request(16, {"latent": [5]}, {"latent": [2]}, cached_tokens=16)
    assert [] == ribbons(table_svg(table, request))


def nothing() -> kvspec.TransferPlan:
    """Return a plan that moves nothing: the producer excludes its only layer."""
    group = attrs.evolve(latent(), excluded=latent().layers)
    return kvspec.plan_transfer(engine(2, group), engine(1, latent()))


def test_picture_of_an_empty_plan_lists_the_excluded_layers() -> None:
    """The plan has no group to draw. A notebook shows the same picture."""
    plan = nothing()
    assert () == plan.edges
    root = parsed(plan_svg(plan))
    labels = [label.text for label in texts(root)]
    assert "TP 2 → TP 1" == labels[0]
    assert "nothing" in labels[1]
    assert has_in_order(["producer", "0"], labels[2])
    paper = Box(0, 0, float(root.attrib["width"]), float(root.attrib["height"]))
    assert all(label.inside(paper) for label in texts(root))
    assert plan_svg(plan) == plan._repr_svg_()
    check_rejected(lambda: plan_svg(plan, group="latent"), "group", "latent")


def test_picture_of_many_excluded_layers_stays_small() -> None:
    """The label has a range of layers."""
    group = attrs.evolve(attention(4, layers=80), excluded=attention(4, layers=80).layers)
    root = parsed(
        plan_svg(kvspec.plan_transfer(engine(1, attention(4, layers=80)), engine(1, group)))
    )
    assert has_in_order(["consumer", "0\N{EN DASH}79"], texts(root)[-1].text)
    assert float(root.attrib["width"]) < 500


def test_picture_of_an_empty_table_names_the_ranks() -> None:
    """Two ranks without an edge and a plan without edges are drawn, with or without a request."""
    four = kvspec.plan_transfer(engine(4, attention(4)), engine(4, attention(4)))
    request = builders.request(4, {"full0": [0]}, {"full0": [0]})
    for plan, ranks in ((four, (0, 1)), (nothing(), (0, 0))):
        producer, consumer = (
            kvspec.allocate(side, kvspec.RankId(tp=tp), 4)[0]
            for side, tp in zip((plan.producer, plan.consumer), ranks, strict=True)
        )
        table = kvspec.build_table(plan, producer, consumer)
        for text in (table_svg(table), table._repr_svg_(), table_svg(table, request)):
            names, note = (label.text for label in texts(parsed(text)))
            assert f"tp{ranks[0]} → tp{ranks[1]}" == names
            assert "nothing" in note
        check_rejected(partial(table_svg, table, group="g"), "group", "g", "nothing")


def tables_of(
    spec: kvspec.LayerSpec, producing: Any = None, consuming: Any = None, **more: Any
) -> Any:
    """Return the tables of all ranks that exchange bytes."""
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
    ("spec", "live"),
    [
        (kvspec.FullAttentionSpec(**GQA), 16),
        (kvspec.CrossAttentionSpec(**GQA), 16),
        (kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=16), 15),
        (kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=8), 7),
        (kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=2), 1),
        (kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=64), 16),
        (kvspec.SlidingWindowSpec(**GQA, sliding_window=2), 1),
        (kvspec.SlidingWindowSpec(**GQA, sliding_window=1, extra_retained_tokens=3), 3),
    ],
    ids=repr,
)
def test_live_tokens_of_the_first_block_are_drawn(spec: kvspec.LayerSpec, live: int) -> None:
    """Each of the *live* tokens has keys and values of 16 bytes."""
    (table,) = tables_of(spec)
    text = table_svg(table)
    size = f"{32 * live} B"
    assert has_in_order(["1 layer", "1 run", size, size], all_text(text))
    assert [32 * live] == ribbons(text)


@pytest.mark.parametrize("name", ["plan.svg", "table.svg"])
def test_pictures_of_the_documentation_are_current(name: str) -> None:
    """`docs/draw_pictures.py` draws them."""
    docs = Path(__file__).parents[2] / "docs"
    pictures = runpy.run_path(str(docs / "draw_pictures.py"))["pictures"]()
    assert pictures[name] + "\n" == (docs / name).read_text(encoding="utf-8")


def test_picture_of_cross_attention_needs_no_request() -> None:
    """The request that is drawn by default has the encoder's tokens: 16 rows of 32 bytes."""
    (table,) = tables_of(kvspec.CrossAttentionSpec(**GQA))
    text = table_svg(table)
    check_picture(text)
    assert [16 * 32] == ribbons(text)


@pytest.mark.parametrize(
    "spec",
    [
        kvspec.SlidingWindowSpec(**GQA, sliding_window=1),
        kvspec.ChunkedLocalAttentionSpec(**GQA, attention_chunk_size=1),
    ],
)
def test_picture_of_a_block_without_live_tokens_has_a_note(spec: kvspec.LayerSpec) -> None:
    """A window of the query's own token has no token before it."""
    (table,) = tables_of(spec)
    assert has_in_order(["1 layer", "nothing"], all_text(table_svg(table)))
    assert [] == ribbons(table_svg(table))


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
def test_every_pair_that_exchanges_bytes_has_ribbons(
    spec: kvspec.LayerSpec, producing: Any, consuming: Any, more: Any
) -> None:
    """The first tokens of a pair may be outside the first block, or inside a block."""
    tables = tables_of(spec, producing, consuming, **more)
    assert len(tables) > 1
    for table in tables:
        assert ribbons(table_svg(table)) != []


def test_striped_states_have_ribbons() -> None:
    """The picture of a state has a request whose last block belongs to the pair."""
    spec = kvspec.MambaSpec.replicated_state(state_bytes=64)
    tables = tables_of(spec, {"tp_size": 4}, {"tp_size": 1}, replica_policy="stripe")
    assert 4 == len(tables)
    for table in tables:
        assert [64] == ribbons(table_svg(table))


@pytest.mark.parametrize("draw", [plan_svg, table_svg])
def test_pictures_need_a_plan_or_a_table(draw: Any) -> None:
    """Another value is an error."""
    assert None is refusal(lambda: draw(None)).value


def test_table_svg_rejects_group_that_the_ranks_do_not_exchange() -> None:
    """The error names the groups that they exchange."""
    table = table_of(engine(1, latent()), engine(1, latent()))
    check_rejected(lambda: table_svg(table, group="full"), "group", "full", "latent")


def test_pictures_escape_names() -> None:
    """A name may contain the special characters of XML."""
    spec = latent().spec
    group = kvspec.KVCacheGroup(name='a<b>&"c"', layers=('<"&>',), spec=spec)
    side = kvspec.EngineSpec(groups=(group,))
    cache, _storage = kvspec.allocate(side, kvspec.RankId(), 2)
    plan = kvspec.plan_transfer(side, side)
    root = parsed(table_svg(kvspec.build_table(plan, cache, cache)))
    assert {'<"&>'} == {data["data-layer"] for _, data in boxes(root, "layer")}
    (line,) = (e for e in parsed(plan_svg(plan)).iter() if "data-groups" in e.attrib)
    assert 'a<b>&"c"' == line.attrib["data-groups"]


def test_shortened_name_keeps_both_ends() -> None:
    """The ends of a name differ most."""
    assert "model.….27" == shortened("model.layers.27", 10)
    assert "short" == shortened("short", 10)
