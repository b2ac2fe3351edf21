"""What `kvspec transfer` prints: what is to be done, what was moved, and one line of verdict."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table
from rich.text import Text

from kvspec.engines.engine import EngineSpec
from kvspec.engines.group import KVCacheGroup
from kvspec.ownership.part import Part
from kvspec.plan.explain import sizes as parallel_words
from kvspec.run import Job, Moved, Report
from kvspec.run.limits import sizes

if TYPE_CHECKING:
    from rich.console import Console

MAX_PAIRS = 48
"""Rank pairs of the table; ``--json`` tells all of them."""
MAX_LINES = 12


def show_job(console: Console, model: str, job: Job) -> None:
    """Print what is to be done: the model, both engines, the requests."""
    groups = ", ".join(map(_group, job.producer.groups))
    ours, theirs = (_engine(each) for each in (job.producer, job.consumer))
    cached = f", {job.cached} of them cached" if job.cached else ""
    who = "consumers read" if job.mode == "pull" else "producers write"
    where = "host memory" if job.device == "cpu" else job.device
    count = f"{job.requests} requests" if job.requests > 1 else "1 request"
    console.print(Text.assemble((model, "bold"), f"  {groups}"))
    console.print(Text.assemble((ours, "bold"), " -> ", (theirs, "bold"), f", {who}, {where}"))
    console.print(f"{count} of {job.tokens:,} tokens{cached}; {sizes(job.request_bytes)} each")


def _engine(engine: EngineSpec) -> str:
    blocks = {g.spec.block_size for g in engine.groups if g.spec.parts[0].per_token}
    told = f", blocks of {' and '.join(map(str, sorted(blocks)))}" if blocks else ""
    return f"{parallel_words(engine.parallel)}{told}, {engine.layout}"


def _group(group: KVCacheGroup) -> str:
    parts = group.spec.of_layer(group.layers[0]).parts
    units = "; ".join(f"{'+'.join(names)} {count}" for count, names in _by_units(parts).items())
    return f"{len(group.layers)} {group.name} layers (units: {units})"


def _by_units(parts: Iterable[Part]) -> dict[int, list[str]]:
    found: dict[int, list[str]] = {}
    for part in parts:
        found.setdefault(part.units // part.deal_in, []).append(part.name)
    return found


def show_report(console: Console, job: Job, report: Report) -> None:
    """Print what was moved and counted, and the verdict."""
    console.print()
    if report.moved:
        console.print(_pairs(report.moved[:MAX_PAIRS]))
        if len(report.moved) > MAX_PAIRS:
            console.print(f"and {len(report.moved) - MAX_PAIRS} pairs more: see --json")
    if report.ranks:
        for line in _counts(job, report):
            console.print(line)
    told = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in report.stages.items())
    if told:
        console.print(f"time: {told}")
    _verdict(console, report)


def _pairs(moved: tuple[Moved, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("producer", "consumer"):
        table.add_column(name)
    for name in ("bytes", "descriptors", "mean run", "time", "GB/s"):
        table.add_column(name, justify="right")
    for each in moved:
        table.add_row(
            str(each.producer),
            str(each.consumer),
            f"{each.nbytes:,}",
            f"{each.runs:,}",
            sizes(each.nbytes / each.runs) if each.runs else "-",
            f"{each.seconds * 1e3:,.1f} ms",
            f"{each.nbytes / each.seconds / 1e9:.3f}" if each.seconds else "-",
        )
    return table


def _counts(job: Job, report: Report) -> Iterator[str]:
    for name, (done, wanted), ranks in (
        ("sending", report.sending, job.plan.finished_sending_count),
        ("receiving", report.receiving, job.plan.finished_recving_count),
    ):
        counted = f"{ranks} rank{'s' if ranks > 1 else ''} x {job.requests}"
        yield f"finished {name} {done} of {wanted} ({counted})"
    came = sum(each.notified for each in report.ranks)
    yield f"{came} of {sum(each.awaited for each in report.ranks)} notifications"


def _verdict(console: Console, report: Report) -> None:
    if report.ok:
        count = len(report.consumers)
        where = f"{count} consumer rank{'s' if count > 1 else ''}"
        console.print(f"every byte right: {report.judged:,} bytes on {where}", style="bold green")
        return
    for fault in report.faults[:MAX_LINES]:
        console.print(f"WRONG: {fault}", style="bold red")
    for line in report.lines[:MAX_LINES]:
        console.print(f"  {line}")
