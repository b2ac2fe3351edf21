"""Write ledgers.md: the tables of kvspec/protocol/states.py, drawn, each row with its reason."""

from __future__ import annotations

from pathlib import Path

from kvspec.protocol.messages import MESSAGES
from kvspec.protocol.states import CONSUMER, PRODUCER, Row

PAGE = Path(__file__).with_name("ledgers.md")
HEAD = """\
# How a request goes through the ledgers

Written by `python docs/draw_ledgers.py` from `kvspec/protocol/states.py`, which the ledgers run on.
Law 12: of every admitted request each producer rank frees its blocks exactly once, after the last
reader is done or when the lease is over, and who reads later is told; what failed never becomes
readable.

A message names its request by id, nonce and attempt, who sends it and to whom; a reader's says how
many readers will come, and has a number that nothing else it asks has, so that a load is not told
what held for an earlier one of the same attempt."""
Table = dict[tuple[str, str], Row]


def page() -> str:
    """Return the page."""
    sections = (
        HEAD,
        rows(("message", "says"), [(f"`{kind}`", means) for kind, means in MESSAGES.items()]),
        *told("Producer", PRODUCER, "unknown"),
        *told("Consumer", CONSUMER, "moving"),
    )
    return "\n\n".join(sections) + "\n"


def told(side: str, table: Table, first: str) -> tuple[str, ...]:
    """Return one ledger's section: a picture, and every row with its reason."""
    body = [(state, event, row.state, row.done, row.why) for (state, event), row in table.items()]
    return (
        f"## {side}",
        picture(table, first),
        rows(("state", "event", "then", "does", "because"), body),
    )


def picture(table: Table, first: str) -> str:
    """Return the states and what leads from one to another, as a Mermaid diagram."""
    arrows: dict[tuple[str, str], list[str]] = {}
    for (state, event), row in table.items():
        if state != row.state:
            arrows.setdefault((state, row.state), []).append(event)
    lines = [f"    {state} --> {then}: {', '.join(es)}" for (state, then), es in arrows.items()]
    ends = sorted({then for _, then in arrows} - {state for state, _ in arrows})
    last = [f"    {end} --> [*]" for end in ends]
    return "\n".join(
        ["```mermaid", "stateDiagram-v2", f"    [*] --> {first}", *lines, *last, "```"]
    )


def rows(head: tuple[str, ...], body: list[tuple[str, ...]]) -> str:
    """Return a table in Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, ("---",) * len(head), *body))


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
