"""Implement `kvspec transfer`: move a model's cache between real processes, compare every byte.

Invariant: the exit status is 0 if and only if every byte is right and every count is exact.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

import typer

from kvspec.cli import options, printing
from kvspec.errors import SpecError, counted, nbytes
from kvspec.nixl.agent import package_names
from kvspec.run.job import Job
from kvspec.run.launched import LAUNCHERS, Place, run_launched
from kvspec.run.local import check_job, run_transfer
from kvspec.run.recovery import check_kills, run_recovery
from kvspec.run.report import Figures, Moved, Report

if TYPE_CHECKING:
    from rich.console import Console

# Wrong bytes that are printed. ``--json`` has all of them.
MAX_PRINTED = 12
# Columns of the pairs of ranks. Numbers are right-aligned.
REPORT_NUMBERS = ("bytes", "descriptors", "mean run", "time", "GB/s")

run_option = partial(typer.Option, rich_help_panel="The run")


def transfer(
    model: str = options.MODEL,
    producer: str = options.PRODUCER_OPTION,
    consumer: str = options.CONSUMER_OPTION,
    replica_policy: str = options.REPLICA_POLICY,
    ranks_per_node: int | None = options.RANKS_PER_NODE,
    tokens: int = options.request_option(300, help="Tokens of each prompt."),
    cached: int = options.request_option(
        0, help="Tokens at the start of each prompt that the consumer has already."
    ),
    requests: int = options.request_option(2, help="Number of prompts."),
    seed: int = options.request_option(
        0, help="Seed of the random block tables and cache contents."
    ),
    device: str = run_option(
        "cpu", metavar="cpu|cuda|cuda:N", help="Memory that holds the caches."
    ),
    timeout: float = run_option(
        120.0,
        help="Time limit of the whole run in seconds. With --kill, of the sending of requests.",
    ),
    tamper: bool = run_option(
        False,
        "--tamper",
        help="Change one byte before the comparison. The command must find it: exit status 1.",
    ),
    staging: int = run_option(
        0,
        metavar="MIB",
        help="Size of a staging buffer on each consumer rank. All data that can be staged goes "
        "through it. 0: no buffer.",
    ),
    kill: int = run_option(
        0,
        metavar="COUNT",
        help="Number of times that a random rank is killed and its engine started again. The "
        "requests then have random lengths, up to --tokens.",
    ),
    launcher: str = run_option(
        "",
        metavar="|".join(LAUNCHERS),
        help="Launcher that started this process. The process is then one rank of the run, on one "
        "machine or several. All of them need the same KVSPEC_SECRET in the environment.",
    ),
    as_json: bool = options.AS_JSON,
) -> None:
    """Move a model's KV cache between two engines over NIXL, and compare every byte.

    Each rank of both engines is a process with its own NIXL agent and memory.

    Exit status 0: every byte is right, and every request was loaded and freed by all ranks.
    With --kill, 0 means: nothing is lost, wrong or leaked, and no load fails without a kill.
    Exit status 1: something is wrong. Exit status 2: invalid input.
    """
    with printing.reported_errors():
        model = options.known_model(model)
        engines = options.engine_pair(model, producer, consumer)
        job = Job(
            producer=engines[0],
            consumer=engines[1],
            tokens=tokens,
            cached=cached,
            requests=requests,
            replica_policy=options.replica_policy_of(replica_policy, ranks_per_node, engines),
            device=device,
            seed=seed,
            timeout=timeout,
            tamper=tamper,
            staging=staging,
        )
        # With a launcher, each rank is such a command. Only the first one prints.
        first, run = _checked(job, kill, launcher)
        console = printing.output()
        if first and not as_json:
            _show_job(console, model, job, killed=kill != 0)
        report = run()
    if not first:
        for failure in getattr(report, "failures", ()):
            typer.echo(str(failure), err=True)
    elif as_json:
        printing.as_json({"model": model, **report.as_dict()})
    elif isinstance(report, Report):
        _show_report(console, job, report)
    else:
        _show_figures(console, report)
    raise typer.Exit(0 if report.ok else printing.WRONG)


def _checked(job: Job, kill: int, launcher: str) -> tuple[bool, Callable[[], Report | Figures]]:
    """Check that the run is possible. Return whether this process prints, and the run."""
    names = package_names()
    # `find_spec` imports the package of a name with a dot, which may be missing, too.
    if not any(find_spec(name.partition(".")[0]) for name in names):
        rule = "is not installed: run pip install 'kvspec[nixl]'"
        raise SpecError("nixl", " or ".join(names), rule=rule)
    if kill and launcher:
        # The command restarts the ranks that it kills, so it must have started them.
        raise SpecError("kill", kill, rule=f"cannot be combined with launcher={launcher}")
    if launcher:
        place = Place.of(launcher, job)
        return place.number == 0, partial(run_launched, job, place)
    printing.show_stages()
    if kill:
        check_kills(job, kill)
        return True, partial(run_recovery, job, kill)
    check_job(job)
    return True, partial(run_transfer, job)


def _show_job(console: Console, model: str, job: Job, *, killed: bool = False) -> None:
    """Print the model, both engines and the requests. If ranks are *killed*, lengths are random."""
    cached = f", {job.cached} of them cached" if job.cached else ""
    memory = "host memory" if job.device == "cpu" else job.device
    count = counted(job.requests, "request")
    printing.heading(console, model, job.producer, job.consumer)
    tokens = f"{'1 to ' if killed and job.tokens > 1 else ''}{counted(job.tokens, 'token')}"
    console.print(f"{count} of {tokens}{cached}; caches in {memory}", soft_wrap=True)


def _show_figures(console: Console, figures: Figures) -> None:
    """Print the counts of a run with kills, and the result."""
    console.print(f"\n{figures}", soft_wrap=True)
    if figures.ok:
        console.print("nothing lost, wrong or leaked", style="bold green")
    for fault in figures.wrongs:
        console.print(f"WRONG: {fault}", style="bold red", soft_wrap=True)


def _show_report(console: Console, job: Job, report: Report) -> None:
    """Print the pairs of ranks, the counts and the result."""
    console.print()
    if report.moved:
        names = ("producer", "consumer", *REPORT_NUMBERS)
        printing.pairs(console, names, list(map(_pair, report.moved)), REPORT_NUMBERS)
        moved = sum(pair.nbytes for pair in report.moved)
        console.print(f"moved: {moved:,} bytes, the sum of the table")
        if job.staging:
            staged = sum(pair.staged for pair in report.moved)
            console.print(f"staged: {staged:,} of these bytes moved through a staging buffer")
    if report.ranks:
        for name, side in (("loaded", "consumer"), ("freed", "producer")):
            done, expected = getattr(report, name)
            console.print(f"{name}: {done} of {expected}, each request by each {side} rank")
    times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.stages.items())
    if times:
        console.print(f"time: {times}")
    if report.ok:
        arriving = sum(rank.compared.arriving for rank in report.consumers)
        kept = report.judged - arriving
        console.print(
            f"compared: {arriving:,} bytes that must arrive, {kept:,} that must not change"
        )
        where = counted(len(report.consumers), "consumer rank")
        console.print(f"every byte right: {report.judged:,} bytes on {where}", style="bold green")
    for fault in report.faults[:MAX_PRINTED]:
        console.print(f"WRONG: {fault}", style="bold red", soft_wrap=True)
    for line in report.lines[:MAX_PRINTED]:
        console.print(f"  {line}", soft_wrap=True)


def _pair(pair: Moved) -> tuple[str, ...]:
    return (
        str(pair.producer),
        str(pair.consumer),
        f"{pair.nbytes:,}",
        f"{pair.runs:,}",
        nbytes(pair.nbytes // pair.runs) if pair.runs else "-",
        f"{pair.seconds * 1e3:,.1f} ms",
        f"{pair.nbytes / pair.seconds / 1e9:.3f}" if pair.seconds else "-",
    )
