"""Draw docs/idea.svg: the heads that the ranks of two engines own, and the heads that move.

`python docs/draw_idea.py` writes the picture. Every box and arrow comes from a plan: the example of
README.md, with 4 heads, a producer of TP 8 (each head on two ranks) and a consumer of TP 2.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import kvspec

HEADS, PRODUCER_TP, CONSUMER_TP = 4, 8, 2
WIDTH, LEFT, UNIT, HEIGHT = 840, 160, 160, 40
ROWS = {"producer": 84, "heads": 180, "consumer": 276}
COLOURS = ("#4c78a8", "#e08a3c", "#54a08a", "#b279a2")
FONT = "Helvetica, Arial, sans-serif"
INK, QUIET, PAPER = "#24292f", "#6e7781", "#ffffff"


def plan() -> kvspec.TransferPlan:
    """Return the plan that is drawn."""
    spec = kvspec.FullAttentionSpec(
        block_size=16, total_num_kv_heads=HEADS, head_size=128, dtype="bfloat16"
    )
    group = kvspec.KVCacheGroup(name="full", layers=["layers.0"], spec=spec)
    producer, consumer = (
        kvspec.EngineSpec(groups=[group], parallel=kvspec.ParallelConfig(tp_size=size))
        for size in (PRODUCER_TP, CONSUMER_TP)
    )
    return kvspec.plan_transfer(producer, consumer)


def text(
    x: float, y: float, content: str, *, size: int = 14, fill: str = INK, at: str = "middle"
) -> str:
    """Return a line of text. Its middle is at *x*, or its start if *at* is "start"."""
    where = f'x="{x:g}" y="{y:g}" text-anchor="{at}"'
    return f'<text {where} font-size="{size}" fill="{fill}">{content}</text>'


def box(x: float, y: float, width: float, *, fill: str, opacity: float = 1, dash: str = "") -> str:
    """Return a box of the common height."""
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="4" fill="{fill}" '
        f'fill-opacity="{opacity:g}" stroke="{INK}" stroke-width="1"{dash}/>'
    )


def centre(units: range, position: int = 0, of: int = 1) -> tuple[float, float]:
    """Return the left edge and the width of the box of *units*. Replicas share the width."""
    width = len(units) * UNIT / of
    return LEFT + units.start * UNIT + position * width, width


def boxes(drawn: kvspec.TransferPlan) -> Iterator[str]:
    """Yield the ranks of both engines and, between them, the heads."""
    for head in range(HEADS):
        x, width = centre(range(head, head + 1))
        yield box(x, ROWS["heads"], width, fill=COLOURS[head])
        yield text(x + width / 2, ROWS["heads"] + 25, f"head {head}", fill=PAPER)
    for side, engine in (("producer", drawn.producer), ("consumer", drawn.consumer)):
        sharding = engine.parallel.sharding(HEADS)
        for units, ranks in zip(sharding.owned, sharding.holders, strict=True):
            for position, rank in enumerate(ranks):
                x, width = centre(units, position, len(ranks))
                read = side == "consumer" or drawn.targets(kvspec.RankId(tp=rank))
                fill, opacity = ("#dbe4ee", 1) if read else (PAPER, 1)
                dash = "" if read else ' stroke-dasharray="4 3"'
                yield box(x + 4, ROWS[side], width - 8, fill=fill, opacity=opacity, dash=dash)
                ink = INK if read else QUIET
                yield text(x + width / 2, ROWS[side] + 25, f"tp{rank}", fill=ink)


def arrows(drawn: kvspec.TransferPlan) -> Iterator[str]:
    """Yield an arrow down through every head that moves."""
    sharding = drawn.producer.parallel.sharding(HEADS)
    for edge in drawn.edges:
        for unit_slice in edge.slices:
            heads = unit_slice.global_range
            index = sharding.owned.index(range(heads.start, heads.stop))
            ranks = sharding.holders[index]
            x, width = centre(heads, ranks.index(edge.producer.tp), len(ranks))
            begin, middle = x + width / 2, LEFT + (heads.start + 0.5) * UNIT
            colour = COLOURS[index]
            top, high = ROWS["producer"] + HEIGHT, ROWS["heads"]
            yield (
                f'<path d="M{begin:g} {top + 2} C{begin:g} {high - 24} {middle:g} {top + 24} '
                f'{middle:g} {high - 8}" fill="none" stroke="{colour}" stroke-width="3" '
                f'marker-end="url(#tip{index})"/>'
            )
            yield (
                f'<path d="M{middle:g} {high + HEIGHT + 2} V{ROWS["consumer"] - 8}" fill="none" '
                f'stroke="{colour}" stroke-width="3" marker-end="url(#tip{index})"/>'
            )


def draw() -> str:
    """Return the picture as SVG."""
    drawn, middle = plan(), LEFT + HEADS * UNIT / 2
    tips = "".join(
        f'<marker id="tip{i}" viewBox="0 0 8 8" refX="4" refY="4" markerWidth="4" markerHeight="4" '
        f'orient="auto"><path d="M0 0 L8 4 L0 8 z" fill="{colour}"/></marker>'
        for i, colour in enumerate(COLOURS)
    )
    names = {"producer": "producer", "heads": "the model", "consumer": "consumer"}
    sizes = {
        "producer": f"TP {PRODUCER_TP}",
        "heads": f"{HEADS} KV heads",
        "consumer": f"TP {CONSUMER_TP}",
    }
    labels = [
        text(24, y + dy, column[row], size=size, fill=fill, at="start")
        for row, y in ROWS.items()
        for column, dy, size, fill in ((names, 17, 15, INK), (sizes, 35, 13, QUIET))
    ]
    height = 364
    size = f'viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}"'
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="{FONT}" role="img">',
        "<title>Two engines own ranges of the same heads. The heads that both own move.</title>",
        f"<defs>{tips}</defs>",
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="{PAPER}"/>',
        text(
            middle,
            40,
            "Each rank owns heads of the model. The heads that two ranks both own are transferred.",
            size=16,
        ),
        *labels,
        *boxes(drawn),
        *arrows(drawn),
        text(
            middle,
            346,
            "dashed: a replica that no rank reads. One consumer rank notifies it when it may free.",
            size=13,
            fill=QUIET,
        ),
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("idea.svg").write_text(draw(), encoding="utf-8")
