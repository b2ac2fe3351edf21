"""The numbers of the cases that each run judges, as data. `must_cases` builds the cases."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

Sizes = tuple[int, int]


@attrs.frozen(kw_only=True)
class Recipe:
    """The numbers of one case. Each pair has the value of the producer, then of the consumer.

    Attributes:
        tp: TP sizes.
        heads: Number of KV heads, or of the units of a state.
        pp: Numbers of pipeline stages.
        odd: Whether the stages of both engines hold every other layer, and not neighbours.
        dcp: DCP sizes.
        pcp: PCP sizes.
        interleave: Tokens that one context rank holds in a row.
        blocks: Tokens of a block.
        kernel: Tokens of a block in memory, or 0 for those of a block.
        rows: Tokens that one row of a block stands for.
        layouts: Numbers of the layouts, among those that the system supports.
        padding: Bytes after a page, or -1 for none.
        page_format: Page formats, "" for the plain one.
        tokens: Length of the prompt.
        cached: Tokens that the consumer has.
        late: Whether a table begins with the first block that moves.
        spare: Blocks of a table after those of the prompt.
        null: Whether a null block stands for each block that does not move.
        keeps: Whether an engine keeps all tokens of a window.
        rotary: Orders of the rotated elements, "" for keys of unstated meaning.
        layers: Number of layers of a group.
        reverse: Whether the consumer has its groups in the reverse order.
        draft: Whether the last layer of the first group is excluded.
        named: Whether the last layer of each group has the name of a draft layer, but moves.
        shared: Whether the groups share one memory.
    """

    tp: Sizes = (1, 1)
    heads: int = 4
    pp: Sizes = (1, 1)
    odd: bool = False
    dcp: Sizes = (1, 1)
    pcp: Sizes = (1, 1)
    interleave: Sizes = (1, 1)
    blocks: Sizes = (2, 2)
    kernel: Sizes = (0, 0)
    rows: int = 1
    layouts: Sizes = (0, 0)
    padding: Sizes = (-1, -1)
    page_format: tuple[str, str] = ("", "")
    tokens: int = 5
    cached: int = 0
    late: tuple[bool, bool] = (False, False)
    spare: Sizes = (0, 0)
    null: tuple[bool, bool] = (False, False)
    keeps: tuple[bool, bool] = (False, False)
    rotary: tuple[str, str] = ("", "")
    layers: int = 1
    reverse: bool = False
    draft: bool = False
    named: bool = False
    shared: bool = False


def _sizes(*sizes: tuple[int, int, int]) -> list[Recipe]:
    """Return recipes of producer ranks, consumer ranks and heads."""
    return [Recipe(tp=(producer, consumer), heads=heads) for producer, consumer, heads in sizes]


KINDS_ = [Recipe(tp=tp, heads=4, layers=2) for tp in ((2, 2), (4, 2), (2, 3), (8, 2))]
TP = _sizes(
    # Sizes divide, or they do not.
    (2, 2, 4), (1, 2, 2), (2, 1, 2), (2, 4, 4), (4, 2, 4), (1, 3, 6), (3, 1, 6), (2, 3, 6),
    (3, 2, 6), (2, 3, 4), (3, 2, 4), (3, 4, 4), (4, 3, 4), (5, 2, 5), (2, 5, 5), (7, 3, 7),
    (3, 7, 7), (6, 4, 6), (7, 1, 7), (1, 7, 7), (3, 3, 3),
    # More producer ranks than heads.
    (4, 2, 2), (3, 1, 2), (4, 1, 2), (8, 2, 4), (6, 3, 3), (6, 2, 3), (5, 2, 3), (8, 3, 4),
    (7, 2, 4), (9, 2, 3), (10, 3, 4), (11, 2, 2), (12, 4, 4),
    # More consumer ranks than heads.
    (2, 4, 2), (1, 3, 2), (1, 4, 2), (2, 8, 4), (3, 6, 3), (2, 5, 3), (2, 7, 4), (3, 9, 3),
    (2, 10, 4), (2, 11, 2), (4, 12, 4),
    # Both.
    (4, 4, 2), (4, 3, 2), (3, 4, 2), (8, 4, 2), (4, 8, 2), (6, 4, 3), (5, 6, 4), (6, 5, 4),
    (7, 5, 3),
)  # fmt: skip
PP = [
    Recipe(pp=pp, odd=odd, layers=5)
    for pp in ((2, 2), (3, 3), (1, 2), (2, 1), (1, 3), (3, 1), (2, 3), (3, 2))
    for odd in (False, True)
]
CP = [
    Recipe(tokens=13, heads=heads, tp=tp, dcp=dcp, pcp=pcp, interleave=interleave)
    for heads, tp, dcp, pcp, interleave in (
        *((1, (2, 1), (2, 1), (1, 1), (n, 1)) for n in (1, 2)),
        *((1, (1, 2), (1, 2), (1, 1), (1, n)) for n in (1, 2)),
        *((1, (2, 2), dcp, (1, 1), (1, 2)) for dcp in ((2, 1), (1, 2), (2, 2))),
        *((1, tp, tp, (1, 1), (1, 1)) for tp in ((4, 2), (2, 4), (3, 1), (1, 3), (3, 2), (3, 3))),
        (2, (4, 1), (2, 1), (1, 1), (1, 1)), (2, (1, 4), (1, 2), (1, 1), (1, 1)),
        (2, (4, 4), (2, 1), (1, 1), (2, 1)), (2, (4, 4), (1, 2), (1, 1), (1, 2)),
        *((1, (1, 1), (1, 1), pcp, (1, 2)) for pcp in ((2, 1), (1, 2), (3, 2), (2, 3), (2, 2))),
        *((2, tp, (1, 1), pcp, (2, 1)) for tp in ((2, 1), (1, 2)) for pcp in ((2, 1), (1, 2))),
        (1, (2, 1), (2, 1), (2, 1), (2, 1)), (1, (1, 2), (1, 2), (1, 2), (1, 2)),
        (1, (2, 2), (2, 2), (2, 1), (1, 1)),
    )
]  # fmt: skip
BLOCKS = [
    *(
        Recipe(tokens=13, blocks=blocks)
        for blocks in ((1, 4), (4, 1), (2, 4), (4, 2), (2, 3), (3, 2), (6, 4), (4, 6), (16, 8))
    ),
    *(Recipe(tokens=13, blocks=(4, 4), kernel=k) for k in ((2, 0), (0, 2), (1, 2), (2, 1), (2, 2))),
    *(Recipe(tokens=13, blocks=(8, 4), kernel=k) for k in ((2, 0), (4, 2), (0, 1))),
    *(Recipe(tokens=14, blocks=blocks, rows=2) for blocks in ((4, 4), (4, 8), (6, 4))),
    *(Recipe(tokens=9, spare=spare) for spare in ((1, 0), (0, 1), (2, 1))),
    *(Recipe(tokens=tokens) for tokens in (8, 1, 23)),
    Recipe(tokens=9, blocks=(2, 4), spare=(1, 1)),
]  # fmt: skip
_EACH = range(16)
LAYOUT_RECIPES = [
    *(Recipe(heads=2, layers=2, layouts=(n, n + 1)) for n in _EACH),
    *(Recipe(heads=2, layers=2, layouts=(n + 1, n)) for n in _EACH[::3]),
    *(Recipe(heads=2, layers=2, layouts=(n, n)) for n in _EACH),
    *(Recipe(heads=2, layers=2, padding=padding) for padding in ((1, -1), (-1, 3), (2, 5), (4, 4))),
    *(
        Recipe(heads=2, page_format=(first, second), blocks=(4, 4))
        for name in ("keys-transposed", "x-packed")
        for first, second in ((name, name), (name, ""), ("", name))
    ),
]
PREFIXES = [
    *(
        Recipe(tokens=9, cached=cached, late=late)
        for cached in (1, 2, 3, 4, 7, 8)
        for late in ((False, False), (False, True), (True, True))
    ),
    *(
        Recipe(tokens=17, blocks=blocks, cached=cached, late=late)
        for blocks in ((2, 4), (4, 2), (2, 3), (3, 2), (1, 4))
        for cached, late in ((4, (False, True)), (12, (False, True)), (7, (True, True)))
    ),
]
WINDOWS = [
    *(Recipe(tokens=tokens) for tokens in (1, 4, 5, 9)),
    *(Recipe(tokens=9, late=late) for late in ((True, True), (False, True), (True, False))),
    *(Recipe(tokens=9, null=null) for null in ((True, True), (True, False), (False, True))),
    *(Recipe(tokens=9, cached=cached) for cached in (2, 7, 8)),
    Recipe(tokens=9, cached=8, late=(False, True)),
    Recipe(tokens=9, cached=2, late=(True, True)),
    *(Recipe(tokens=n, blocks=sizes) for n in (9, 11) for sizes in ((2, 4), (4, 2), (3, 2))),
    *(Recipe(tokens=9, keeps=keeps) for keeps in ((True, False), (False, True))),
]  # fmt: skip
CONTENT = [
    Recipe(rotary=rotary)
    for rotary in (("pairs", "halves"), ("halves", "pairs"), ("pairs", "pairs"))
]
_TWO = Recipe(heads=2, tokens=9, layers=2)
GROUPS = [
    attrs.evolve(_TWO, reverse=True),
    attrs.evolve(_TWO, draft=True),
    attrs.evolve(_TWO, named=True),
    attrs.evolve(_TWO, shared=True),
]


COMBINED = [
    Recipe(
        tp=(2, 1), pp=pp, blocks=(2, 4), layouts=(0, 1), cached=4, late=(False, True), tokens=13,
        layers=2,
    )
    for pp in ((2, 1), (1, 2))
]  # fmt: skip
"""Recipes of each kind with another number of stages, other blocks and layouts, and a prefix."""
FORMAT_RECIPES = [
    Recipe(heads=heads, page_format=(name, name), blocks=blocks, tokens=13)
    for name in ("keys-transposed", "x-packed")
    for heads, blocks in ((1, (4, 8)), (2, (8, 4)))
]
"""Recipes of page formats with unequal blocks, which belong to no single axis."""


def everything(first: int) -> Iterator[Recipe]:
    """Yield recipes in which several sizes differ at once, from number *first* on.

    The lists have lengths without a common divisor, so each value meets many of the others.
    """
    tp = ((2, 4), (4, 2), (1, 2), (2, 1), (3, 2), (2, 3), (1, 1))
    pp = ((2, 1), (1, 1), (1, 2), (1, 1), (3, 2))
    blocks = ((2, 4), (3, 2), (4, 2), (2, 2))
    prefixes = ((4, True), (0, False), (3, True), (8, False), (5, False), (0, False))
    for n in range(first, first + 100):
        cached, late = prefixes[n % 6]
        if n % 3 == 2:  # noqa: PLR2004
            yield Recipe(
                tp=((4, 2), (2, 4), (2, 2))[n % 7 % 3], heads=1, blocks=blocks[n % 4],
                dcp=((2, 1), (1, 2), (2, 2), (4, 2))[n % 7 % 4], cached=cached, tokens=19,
                interleave=(1 + n % 2, 1), layouts=(n % 7, n % 5), layers=2,
            )  # fmt: skip
            continue
        yield Recipe(
            tp=tp[n % 7], pp=pp[n % 5], odd=n % 2 == 1, blocks=blocks[n % 4],
            layouts=(n % 9, n % 13), padding=(n % 3 - 1, n % 5 - 1) if n % 8 == 1 else (-1, -1),
            cached=cached, tokens=13, late=(n % 4 == 1 and late, late), layers=2,
            heads=(4, 6, 2, 1, 12)[n // 5 % 5],
        )  # fmt: skip


RECIPES = {
    "kinds": KINDS_, "tp": TP, "pp": PP, "cp": CP, "blocks": BLOCKS, "layouts": LAYOUT_RECIPES,
    "prefixes": PREFIXES, "windows": WINDOWS, "content": CONTENT, "groups": GROUPS,
}  # fmt: skip
DRAWN_TOKENS = 36
"""Number of cases of `everything`, of all kinds together. Each kind has two or more."""
