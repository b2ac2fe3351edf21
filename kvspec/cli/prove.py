"""Implement `kvspec prove`: check the slices of all TP sizes and head counts up to a limit."""

from __future__ import annotations

import time

import typer

from kvspec.check import proof
from kvspec.check.proof import MAX_HEADS, MAX_TP
from kvspec.cli import options, printing
from kvspec.ownership.replicas import POLICIES, known_policies

# Number of counter-examples that are printed.
MAX_FAULTS = 10


def prove(
    max_tp: int = typer.Option(
        16, help=f"Largest tensor-parallel size of both sides, at most {MAX_TP}."
    ),
    max_heads: int = typer.Option(16, help=f"Largest number of KV heads, at most {MAX_HEADS}."),
    jobs: int | None = typer.Option(None, help="Number of processes. Default: one for each core."),
    ranks_per_node: int | None = options.RANKS_PER_NODE,
) -> None:
    """Check that each consumer rank reads each of its heads exactly once, from an owner.

    The command tries every combination of producer TP, consumer TP and number of heads, with each
    replica policy.
    Exit status 0: all are exact. 1: there is a counter-example. 2: invalid input.
    """
    start = time.perf_counter()
    with printing.reported_errors():
        policies = known_policies(None) if ranks_per_node is None else tuple(POLICIES)
        printing.show_stages()
        found = proof.prove(
            max_tp,
            max_heads,
            jobs=jobs,
            replica_policies=policies,
            ranks_per_node=ranks_per_node,
        )
    console = printing.output()
    tried = f"{found.triples:,} triples (producer TP, consumer TP, heads), "
    tried += f"{found.rank_cases:,} consumer ranks, {time.perf_counter() - start:.1f} s, "
    tried += f"policies: {', '.join(policies)}"
    if found.exact:
        console.print(f"all exact: {tried}", style="bold green")
        return
    console.print(f"WRONG: {len(found.faults):,} of {tried}", style="bold red")
    for fault in found.faults[:MAX_FAULTS]:
        console.print(f"  {fault}")
    raise typer.Exit(printing.WRONG)
