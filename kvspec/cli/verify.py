"""`kvspec verify`: every TP pair and head count up to a bound, each proved exact."""

from __future__ import annotations

import time
from typing import cast

import typer

from kvspec.check.proof import MAX_HEADS, MAX_TP, prove
from kvspec.cli.options import (
    POLICY_NAMES,
    RANKS_PER_NODE,
    WRONG,
    output,
    progress_bar,
    refusals,
    topology_of,
)
from kvspec.errors import SpecError
from kvspec.ownership.parallel import ParallelConfig
from kvspec.ownership.replicas import ReplicaPolicyName, known_policies

MAX_FAULTS = 10
"""Counter-examples that are printed."""


def verify(
    max_tp: int = typer.Option(
        16, help=f"Largest tensor-parallel size, of either side: {MAX_TP} at most."
    ),
    max_heads: int = typer.Option(16, help=f"Largest number of KV heads: {MAX_HEADS} at most."),
    jobs: int | None = typer.Option(None, help="Processes; one for each core unless given."),
    replica_policy: str = typer.Option(
        "spread", metavar=f"{POLICY_NAMES}|all", help="The policies to try."
    ),
    ranks_per_node: int | None = RANKS_PER_NODE,
) -> None:
    """Prove, triple by triple, that every consumer head is read exactly once, from its owner."""
    began = time.perf_counter()
    with refusals():
        nodes = topology_of((replica_policy,), ranks_per_node, ParallelConfig(), ParallelConfig())
        policies = known_policies(nodes) if replica_policy == "all" else (replica_policy,)
        if jobs is not None and jobs < 1:
            raise SpecError("jobs", jobs, "an int >= 1")
        with progress_bar() as bar:
            task = bar.add_task("triples", total=max(1, max_tp * max_tp * max_heads))
            proof = prove(
                max_tp,
                max_heads,
                jobs=jobs,
                progress=lambda done: bar.update(task, advance=done),
                replica_policies=cast("tuple[ReplicaPolicyName, ...]", policies),
                ranks_per_node=ranks_per_node,
            )
    console = output()
    tried = f"{proof.triples:,} triples (producer TP, consumer TP, heads), "
    tried += f"{proof.rank_cases:,} consumer ranks, by {', '.join(policies)}, "
    tried += f"{time.perf_counter() - began:.1f} s"
    if proof.exact:
        console.print(f"all exact: {tried}", style="bold green")
        return
    console.print(f"WRONG: {len(proof.faults):,} of {tried}", style="bold red")
    for fault in proof.faults[:MAX_FAULTS]:
        console.print(f"  {fault}")
    raise typer.Exit(WRONG)
