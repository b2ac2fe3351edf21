"""Describe a counter-example as a small table: both engines side by side, and the request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import zip_longest
from typing import TYPE_CHECKING

import attrs

from kvspec.analysis.explanation import explain, sizes
from kvspec.errors import KVSpecError, counted
from kvspec.testing.case import Case
from kvspec.testing.kit.code import WIDTH, expression
from kvspec.testing.laws.release import Script
from kvspec.testing.laws.stored_pages import StoredCase
from kvspec.testing.laws.system import moves_of
from kvspec.testing.world import plan_of

if TYPE_CHECKING:
    from kvspec.engines.engine import EngineSpec
    from kvspec.testing.laws import Judged, Law, System
    from kvspec.testing.laws.prompt_names import PromptPair

# Lines of the right plan, and of the moves of the system. A smallest case rarely has more.
_MAX_LINES = 12


def described(case: Judged, law: Law) -> Iterator[str]:
    """Yield the lines that describe the smallest case. Rows that differ between the sides have !=.

    Args:
        case: The case of a counter-example.
        law: The law that it breaks.
    """
    if isinstance(case, Script):
        yield from (f"{name:<8}{number:g}" for name, number in case.steps)
        return
    if not isinstance(case, (Case, StoredCase)):
        yield from _differences(case)
        return
    sides = [list(_side(engine)) for engine in (case.producer, case.consumer)]
    rows = [("", "producer", "", "consumer")]
    for first, second in zip_longest(*sides, fillvalue=("", "")):
        left, right = first[1], second[1]
        rows.append((first[0] or second[0], left, " " if left == right else "!=", right))
    rows += _request(case) if isinstance(case, Case) else _stored(case)
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=False)]
        yield "  ".join([*cells, row[3]]).rstrip()
    yield ""
    if law.alters:
        yield "This case is legal. The law changes it as stated above, and then expects a refusal."
    elif isinstance(case, Case):
        yield from _plan(case)


def answered(system: System, case: Judged) -> Iterator[str]:
    """Yield the moves that *system* answers, below the right ones. Nothing if it has no moves."""
    if system.moves is None or not isinstance(case, Case):
        return
    try:
        moves = moves_of(system.moves(case, "consumer"), case)
    except Exception as error:  # noqa: BLE001 - the system is code of its author
        yield f"yours: {error}"
        return
    units: dict[str, dict[str, list[int]]] = {}
    for move in moves:
        who = f"consumer {move.consumer} reads producer {move.producer}, {move.layer}"
        units.setdefault(who, {}).setdefault(move.part, []).extend(move.units)
    yield "yours:"
    yield from _shortened(
        f"  {who}: {', '.join(f'{part} units {numbers}' for part, numbers in parts.items())}"
        for who, parts in units.items()
    )


def _shortened(lines: Iterable[str]) -> Iterator[str]:
    lines = list(lines)
    yield from lines[:_MAX_LINES]
    if len(lines) > _MAX_LINES:
        yield f"  and {len(lines) - _MAX_LINES} more lines"


def _side(engine: EngineSpec) -> Iterator[tuple[str, str]]:
    """Yield the rows of one engine."""
    yield "ranks", sizes(engine.parallel)
    for group in engine.groups:
        name = f"{group.name} ({len(group.layers)} layers)" if group.layers[1:] else group.name
        yield "group", name
        parts = [f"{part.name}: {part.units} x {part.content_bytes} B" for part in group.own_parts]
        yield "  units", ", ".join(dict.fromkeys(parts))
        kernel = group.kernel_blocks_per_block
        blocks = counted(group.spec.block_size, "token")
        yield "  blocks", blocks + (f", {kernel} in memory" if kernel > 1 else "")
        yield "  layout", engine.layout_of(group)


def _request(case: Case) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of the request."""
    request = case.request
    cached = expression(request.cached_tokens)
    yield "prompt", counted(request.num_tokens, "token"), "", f"cached: {cached}"
    tables = request.producer_blocks, request.consumer_blocks
    for name in dict.fromkeys([*tables[0], *tables[1]]):
        left, right = (_table(blocks.get(name)) for blocks in tables)
        yield f"table {name}", left, "", right


def _differences(pair: PromptPair) -> Iterator[str]:
    """Yield the fields in which two prompts differ, with both values unless they are long."""
    yield f"page     {counted(pair.one.placement.page_tokens, 'token')}"
    for name in ("model", "prompt", "placement"):
        one, other = getattr(pair.one, name), getattr(pair.other, name)
        for field in attrs.fields(type(one)):
            values = [expression(getattr(each, field.name)) for each in (one, other)]
            if values[0] != values[1]:
                yield from (f"{field.name:<16}{_brief(value)}" for value in values)
    yield from (
        f"token_ids       {_brief(expression(each.token_ids))}" for each in (pair.one, pair.other)
    )


def _brief(text: str) -> str:
    return text if len(text) < WIDTH else f"{text[:WIDTH]}..."


def _stored(case: StoredCase) -> Iterator[tuple[str, str, str, str]]:
    """Yield the rows of a prompt that is stored in steps."""
    ends = ", ".join(str(step.request.num_tokens) for step in case.steps)
    absent = "" if case.absent is None else f", the last one without {case.absent}"
    loaded = case.loaded.request
    yield "page", counted(case.placement.page_tokens, "token"), "", ""
    yield "steps", f"end at {ends}{absent}", "", f"loads {counted(loaded.num_tokens, 'token')}"
    yield "", "", "", f"cached: {expression(loaded.cached_tokens)}"


def _table(table: object) -> str:
    text = "" if table is None else expression(table)
    return text if len(text) < WIDTH // 2 else f"{text[: WIDTH // 2]}..."


def _plan(case: Case) -> Iterator[str]:
    """Yield what should be read by whom."""
    try:
        lines = explain(plan_of(case)).splitlines()
    except KVSpecError as error:
        lines = [f"kvspec refuses this case: {error}"]
    yield "right: " + lines[0]
    yield from _shortened(f"  {line}" for line in lines[1:])
