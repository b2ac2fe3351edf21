"""Draw the state diagrams of the pages as SVG, so that the site needs no script and no network.

GitHub draws a fence of Mermaid itself. On the site, the theme would load Mermaid from a third party
when a page is read. The diagrams of this repository are small, so they are drawn here.

How it works:
    The states are in one column. A state comes after all states that lead to it. An arrow to the
    next state is a line. Any other arrow is an arc at the right or the left of the column, and a
    longer arc is further out.
"""

from __future__ import annotations

import re
from html import escape

ARROW = re.compile(r"^\s*(\S+) --> (\S+?)(?:: (.+))?$")
OUTSIDE = "[*]"
STEP, WIDTH, HEIGHT, SIDE = 64, 104, 30, 250
TIP = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
    ' markerHeight="7" orient="auto"><path d="M0 0 8 4 0 8z"/></marker></defs>'
)
LETTER = 6.2  # The width of a letter of 13 pixels.


def drawn(fence: str) -> str:
    r"""Return the SVG of a *fence* with a state diagram of Mermaid, as a block of HTML.

    Raises:
        ValueError: If the fence is another diagram.

    >>> svg = drawn("```mermaid\nstateDiagram-v2\n [*] --> a\n a --> b: go, stop\n```")
    >>> svg.count("<rect"), svg.count("<path"), "go, stop" in svg, "\n\n" in svg
    (2, 2, True, False)
    """
    first, *lines = fence.strip().splitlines()[1:-1]
    found = [ARROW.match(line) for line in lines]
    if first != "stateDiagram-v2" or None in found:
        raise ValueError(f"expected a state diagram with arrows only, got {fence}")
    arrows = [(match[1], match[2], match[3] or "") for match in found if match]
    inner = [arrow for arrow in arrows if OUTSIDE not in arrow]
    places = {state: at for at, state in enumerate(_ordered(inner))}
    starts = [state for source, state, _ in arrows if source == OUTSIDE]
    shapes = [_box(state, at, first=state in starts) for state, at in places.items()]
    count = {-1: 0, 1: 0}
    for source, target, label in sorted(inner, key=lambda a: abs(places[a[1]] - places[a[0]])):
        at, to = places[source], places[target]
        if to - at == 1:
            shapes.append(_line(at, label))
            continue
        side = 1 if count[1] <= count[-1] else -1
        count[side] += 1
        shapes.append(_arc(at, to, side, label))
    height = STEP * (len(places) - 1) + HEIGHT + 4
    view = f"{-SIDE} {-HEIGHT / 2 - 2} {2 * SIDE} {height}"
    names = escape(", ".join(places))
    opening = f'<svg class="states" viewBox="{view}" role="img" aria-label="States: {names}">'
    return "\n".join([opening, TIP, *shapes, "</svg>"])


def _ordered(arrows: list[tuple[str, str, str]]) -> list[str]:
    """Return the states, each after all states that lead to it.

    >>> _ordered([("a", "c", ""), ("a", "b", ""), ("b", "c", "")])
    ['a', 'b', 'c']
    """
    depth = {state: 0 for source, target, _ in arrows for state in (source, target)}
    for _ in depth:  # A path has fewer arrows than there are states.
        for source, target, _ in arrows:
            depth[target] = max(depth[target], depth[source] + 1)
    if any(depth[source] >= depth[target] for source, target, _ in arrows):
        raise ValueError("expected a state diagram without cycles")
    return sorted(depth, key=depth.__getitem__)


def _box(state: str, at: int, *, first: bool) -> str:
    """Return the box of a state. That of the *first* state is thicker."""
    y, kind = at * STEP, "first" if first else "state"
    return (
        f'<rect class="{kind}" x="{-WIDTH / 2}" y="{y - HEIGHT / 2}"'
        f' width="{WIDTH}" height="{HEIGHT}" rx="6"/>'
        f'<text y="{y + 4}">{escape(state)}</text>'
    )


def _line(at: int, label: str) -> str:
    """Return the arrow from a state to the next one, with its label at the right."""
    start, end = at * STEP + HEIGHT / 2, (at + 1) * STEP - HEIGHT / 2
    return (
        f'<path d="M0 {start} V{end}" marker-end="url(#tip)"/>'
        f'<text class="start" x="8" y="{(start + end) / 2 + 4}">{escape(label)}</text>'
    )


def _arc(at: int, to: int, side: int, label: str) -> str:
    """Return the arrow between two states that are not neighbours, with its label on the arc."""
    start, end = at * STEP, to * STEP
    edge, far = side * WIDTH / 2, side * (WIDTH / 2 + 42 * abs(to - at))
    # The top of a cubic curve is at three quarters of the way to its two control points.
    top, middle = edge + (far - edge) * 0.75, (start + end) / 2
    half = len(label) * LETTER / 2 + 2
    return (
        f'<path d="M{edge} {start} C{far} {start} {far} {end} {edge} {end}"'
        f' marker-end="url(#tip)"/><rect class="behind" x="{top - half}" y="{middle - 9}"'
        f' width="{2 * half}" height="18"/><text x="{top}" y="{middle + 4}">{escape(label)}</text>'
    )
