"""`kvspec transfer`: move a model's cache between real processes and compare every byte.

Law: exit status 0 means that every byte is right and every count exact, and nothing else does.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, cast

import attrs
import typer
from rich.text import Text

from kvspec.analysis.explanation import sizes
from kvspec.cli.options import (
    AS_JSON,
    KEYS,
    MODEL,
    RANKS_PER_NODE,
    REPLICA_POLICY,
    WRONG,
    engine,
    in_words,
    of_engines,
    of_requests,
    output,
    print_json,
    progress_bar,
    refusals,
    replica_policy_of,
    table,
)
from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.errors import SpecError, counted, nbytes
from kvspec.nixl.agent import package_names
from kvspec.run import (
    LAUNCHERS,
    STAGES,
    GoneError,
    Job,
    Moved,
    Place,
    Report,
    check_job,
    check_kills,
    run_launched,
    run_recovery,
    run_transfer,
)
from kvspec.run.job import Mode

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

MAX_PAIRS, MAX_LINES = 48, 12
"""Pairs of ranks of the table, and wrong bytes; ``--json`` tells all of them."""

of_run = partial(typer.Option, rich_help_panel="The run")


def transfer(
    model: str = MODEL,
    producer_tp: int = of_engines(2, help="Tensor-parallel size of the producer."),
    consumer_tp: int = of_engines(3, help="Tensor-parallel size of the consumer."),
    producer_layout: str = of_engines(
        "LBNHC", help="Layout of the producer's cache: letters, NHD or HND."
    ),
    consumer_layout: str = of_engines("LBHNC", help="Layout of the consumer's cache."),
    block_size: int = of_engines(16, help="Tokens of one block."),
    producer: str = in_words("", help=f"More of the producer, or the same: {', '.join(KEYS)}."),
    consumer: str = in_words("", help="The same of the consumer, such as tp=4,pp=2,block=32."),
    replica_policy: str = REPLICA_POLICY,
    ranks_per_node: int | None = RANKS_PER_NODE,
    tokens: int = of_requests(300, help="Tokens of each prompt."),
    cached: int = of_requests(0, help="Leading tokens that the consumer already holds."),
    requests: int = of_requests(2, help="How many prompts."),
    seed: int = of_requests(0, help="What block tables and contents are drawn from."),
    mode: str = of_run("pull", metavar="pull|push", help="Consumers read, or producers write."),
    device: str = of_run("cpu", metavar="cpu|cuda|cuda:N", help="Where the caches lie."),
    timeout: float = of_run(120.0, help="Seconds for the whole run."),
    tamper: bool = of_run(
        False,
        "--tamper",
        help="Change one byte before the comparison, to see it found (exit status 1).",
    ),
    staging: int = of_run(
        0, metavar="MIB", help="Let all go through a buffer of so many MiB that can, on each rank."
    ),
    kill: int = of_run(
        0,
        metavar="COUNT",
        help="Let sessions move requests of random lengths, and so often kill a random rank.",
    ),
    launcher: str = of_run(
        "",
        metavar="|".join(LAUNCHERS),
        help="Be one rank of a run that this launcher started, on one machine or several.",
    ),
    as_json: bool = AS_JSON,
) -> None:
    """Move a model's KV cache between two engines over NIXL, and compare every byte.

    Every rank of both engines is a process with its own agent and its own memory.

    Exit status 0: every byte is right and every notification came once, or with --kill nothing is
    lost, wrong or leaked; 1: not so; 2: bad input.
    """
    with refusals():
        made = partial(engine, model=model, block_size=block_size)
        engines = (
            made("producer", words=producer, tp_size=producer_tp, layout=producer_layout),
            made("consumer", words=consumer, tp_size=consumer_tp, layout=consumer_layout),
        )
        job = Job(
            producer=engines[0],
            consumer=engines[1],
            tokens=tokens,
            cached=cached,
            requests=requests,
            replica_policy=replica_policy_of(
                replica_policy, ranks_per_node, *(e.parallel for e in engines)
            ),
            mode=cast("Mode", mode),
            device=device,
            seed=seed,
            timeout=timeout,
            tamper=tamper,
            staging=staging,
        )
        names = package_names()
        if not any(map(find_spec, names)):
            wanted = "an installed nixl: pip install 'kvspec[nixl]'"
            raise SpecError("nixl", " or ".join(names), wanted)
        if kill:
            raise typer.Exit(_recover(model, job, kill, launcher, as_json=as_json))
        place = Place.of(launcher, job) if launcher else None
        if place is None:
            check_job(job)
        console = output()
        if not as_json and (place is None or place.number == 0):
            _show_job(console, model, job)
        report = _run(job, place)
    if report is None:
        return
    if as_json:
        print_json({"model": model, **report.as_dict()})
    else:
        _show_report(console, job, report)
    raise typer.Exit(0 if report.ok else WRONG)


def _run(job: Job, place: Place | None) -> Report | None:
    if place is not None:
        try:
            return run_launched(job, place)
        except GoneError as error:
            typer.echo(str(error), err=True)
            raise typer.Exit(WRONG) from None
    with progress_bar() as bar:
        task = bar.add_task(STAGES[0], total=len(list(job.ranks())))

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{stage:8}", completed=done, total=total)

        return run_transfer(job, show)


def _recover(model: str, job: Job, kill: int, launcher: str, *, as_json: bool) -> int:
    """Run *job* over sessions while ranks are killed, print the figures, return the exit status."""
    if launcher:
        raise SpecError("kill", kill, f"no launcher={launcher}: the ranks of a run on one machine")
    check_kills(job, kill)
    console = output()
    if not as_json:
        _show_job(console, model, job, killed=True)
    with progress_bar() as bar:
        task = bar.add_task("recover", total=job.requests)

        def show(sent: int) -> None:
            bar.update(task, completed=sent)

        figures = run_recovery(job, kill, show)
    if as_json:
        print_json({"model": model, "ok": figures.ok, **attrs.asdict(figures)})
        return 0 if figures.ok else WRONG
    console.print(f"\n{figures}", soft_wrap=True)
    if figures.ok:
        console.print("nothing lost, wrong or leaked", style="bold green")
    for fault in figures.wrongs:
        console.print(f"WRONG: {fault}", style="bold red")
    return 0 if figures.ok else WRONG


def _show_job(console: Console, model: str, job: Job, *, killed: bool = False) -> None:
    """Print what is to be done: the model, both engines, the requests.

    Where ranks are *killed*, requests are of random lengths.
    """
    groups = ", ".join(map(_group, job.producer.groups))
    engines = f"{_engine(job.producer)} -> {_engine(job.consumer)}"
    cached = f", {job.cached} of them cached" if job.cached else ""
    who = "consumers read" if job.mode == "pull" else "producers write"
    where = "host memory" if job.device == "cpu" else job.device
    count = counted(job.requests, "request")
    console.print(Text.assemble((model, "bold"), f"  {groups}"), soft_wrap=True)
    console.print(Text.assemble((engines, "bold")), soft_wrap=True)
    least, each = ("1 to " if job.tokens > 1 else "", "at most") if killed else ("", "each")
    tokens, size = f"{least}{counted(job.tokens, 'token')}{cached}", nbytes(job.request_bytes)
    console.print(f"{count} of {tokens}; {size} {each}; {who}, {where}", soft_wrap=True)


def _engine(engine: EngineSpec) -> str:
    blocks = {g.spec.block_size for g in engine.groups if g.spec.parts[0].per_token}
    tokens = f", blocks of {' and '.join(map(str, sorted(blocks)))}" if blocks else ""
    return f"{sizes(engine.parallel)}{tokens}, {engine.layout}"


def _group(group: KVCacheGroup) -> str:
    by_units: dict[int, list[str]] = {}
    for part in group.spec.of_layer(group.layers[0]).parts:
        by_units.setdefault(part.units // part.granularity, []).append(part.name)
    units = "; ".join(f"{'+'.join(names)} {count}" for count, names in by_units.items())
    return f"{len(group.layers)} {group.name} layers (units: {units})"


def _show_report(console: Console, job: Job, report: Report) -> None:
    """Print what was moved and counted, and the verdict."""
    console.print()
    if report.moved:
        console.print(_pairs(report.moved[:MAX_PAIRS]))
        if len(report.moved) > MAX_PAIRS:
            console.print(f"and {len(report.moved) - MAX_PAIRS} pairs more: see --json")
    for line in _counts(job, report) if report.ranks else ():
        console.print(line)
    times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.stages.items())
    if times:
        console.print(f"time: {times}")
    if report.ok:
        where = counted(len(report.consumers), "consumer rank")
        console.print(f"every byte right: {report.judged:,} bytes on {where}", style="bold green")
    for fault in report.faults[:MAX_LINES]:
        console.print(f"WRONG: {fault}", style="bold red")
    for line in report.lines[:MAX_LINES]:
        console.print(f"  {line}")


def _pairs(moved: tuple[Moved, ...]) -> Table:
    numbers = ("bytes", "descriptors", "mean run", "time", "GB/s")
    rows = (
        (
            str(pair.producer),
            str(pair.consumer),
            f"{pair.nbytes:,}",
            f"{pair.runs:,}",
            nbytes(pair.nbytes // pair.runs) if pair.runs else "-",
            f"{pair.seconds * 1e3:,.1f} ms",
            f"{pair.nbytes / pair.seconds / 1e9:.3f}" if pair.seconds else "-",
        )
        for pair in moved
    )
    return table(("producer", "consumer", *numbers), rows, numbers)


def _counts(job: Job, report: Report) -> Iterator[str]:
    for name, (done, wanted), ranks in (
        ("sending", report.sending, job.plan.finished_sending_count),
        ("receiving", report.receiving, job.plan.finished_recving_count),
    ):
        yield f"finished {name} {done} of {wanted} ({counted(ranks, 'rank')} x {job.requests})"
    came = sum(rank.notified for rank in report.ranks)
    yield f"{came} of {sum(rank.awaited for rank in report.ranks)} notifications"
