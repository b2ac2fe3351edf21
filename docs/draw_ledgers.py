"""Write ledgers.md from the tables of the ledgers, with a picture and each reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from kvspec.completion.states import CONSUMER, JOINT, PRODUCER, PUBLIC, Transition
from kvspec.wire.messages import MESSAGES

PAGE = Path(__file__).with_name("ledgers.md")
HEAD = """\
# How a request goes through the ledgers

A ledger is the state machine of one rank for the requests of one side. A producer's ledger decides
when the blocks of a request are free. A consumer's ledger decides when a load is done. The two
exchange messages, which may be lost, repeated or reordered.

The ledgers keep [law 12](../CONTRIBUTING.md#the-laws). Each producer rank frees each request
exactly once: after its last reader is done, or when the lease ends. A reader that comes later
receives `gone`. A load that has failed never becomes done.

`python docs/draw_ledgers.py` writes this page from the tables in `kvspec/completion/states.py`. The
ledgers execute these tables. [The wire format](wire.md) describes the bytes of each message.

## Messages

A message names its request (id and nonce), its sender and its receiver. A reader's message also
contains how many readers will come, and a number. The answer repeats the number, so a load ignores
answers to an earlier load of the same request."""
HELD = """\
The event `repeated` is a `done` that was answered before. `complete` means that all expected
readers are done. `time` means that the lease is over. For a freed request, it means that one more
lease has passed. An unknown request has one lease from its first message: heartbeats do not extend
it.

Each heartbeat has a new number. The ledger refuses a heartbeat whose number is not greater than the
number of the reader's last message, because it is a copy: a copy must not extend the lease of a
reader that has died. A repeated `done` is answered again."""
BOTH = """\
## Both sides

A load reads from one or more producer ranks. The table shows where its request can be on each of
them. `new` means that the rank does not hold the request yet. `read` and `expired` are the end:
all readers were done, or the lease was over before. Four pairs cannot occur. The request is not
`read` before the load has sent its `done`, so no block is reused while it is read. A load is done
only if each of these ranks has held the request.

This holds for the first load of a request by a rank. A rank that loads the request again may find
that it is free."""
ENDS = "new", "held", "fenced", "read", "expired"
Table = dict[tuple[str, str], Transition]


def page() -> str:
    """Return the page."""
    sections = (
        HEAD,
        rows(
            ("message", "meaning"),
            [
                (f"`{kind}`", (each.__doc__ or "").splitlines()[0])
                for kind, each in MESSAGES.items()
            ],
        ),
        *section("Producer", PRODUCER, "unknown"),
        HELD,
        *section("Consumer", CONSUMER, "connecting", PUBLIC),
        BOTH,
        rows(
            ("load", *ENDS),
            [
                (load, *("yes" if end in ends else "never" for end in ENDS))
                for load, ends in JOINT.items()
            ],
        ),
    )
    return "\n\n".join(sections) + "\n"


def section(
    side: str, table: Table, first: str, public: Mapping[str, str] | None = None
) -> tuple[str, ...]:
    """Return the section of one ledger: a picture, and each row with its reason.

    *public* maps each state to the one that callers see. It becomes the last column.
    """
    head: tuple[str, ...] = "state", "event", "next state", "action", "reason"
    body = [[state, event, row.state, row.action, row.why] for (state, event), row in table.items()]
    if public is not None:
        head += ("`Load.state`",)
        for row in body:
            row.append(public[row[2]] or public[row[0]])
    return f"## {side}", picture(table, first), rows(head, list(map(tuple, body)))


def picture(table: Table, first: str) -> str:
    """Return the states, with an arrow for each change, as a Mermaid diagram."""
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
