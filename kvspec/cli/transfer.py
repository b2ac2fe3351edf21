"""`kvspec transfer`: move a model's cache between real processes and compare every byte.

Law: exit status 0 means that every byte is right and every count exact, and nothing else does.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import cast

import typer

from kvspec import catalogue
from kvspec.cli.options import (
    KEYS,
    POLICY_NAMES,
    RANKS_PER_NODE,
    WRONG,
    election_of,
    engine,
    engine_words,
    output,
    progress_bar,
    refusals,
)
from kvspec.cli.show import show_job, show_report
from kvspec.errors import SpecError
from kvspec.nixl.agent import package_names
from kvspec.run import STAGES, Job, Report, check_job, run_transfer
from kvspec.run.job import Mode

_ENGINES, _REQUESTS, _RUN = "The two engines", "The requests", "The run"


def transfer(
    model: str = typer.Option(
        catalogue.DEFAULT, help="A model of the catalogue, or the path of a config.json."
    ),
    producer_tp: int = typer.Option(
        2, help="Tensor-parallel size of the producer.", rich_help_panel=_ENGINES
    ),
    consumer_tp: int = typer.Option(
        3, help="Tensor-parallel size of the consumer.", rich_help_panel=_ENGINES
    ),
    producer_layout: str = typer.Option(
        "LBNHC",
        help="Layout of the producer's cache: letters, NHD or HND.",
        rich_help_panel=_ENGINES,
    ),
    consumer_layout: str = typer.Option(
        "LBHNC", help="Layout of the consumer's cache.", rich_help_panel=_ENGINES
    ),
    block_size: int = typer.Option(16, help="Tokens of one block.", rich_help_panel=_ENGINES),
    producer: str = typer.Option(
        "",
        metavar="KEY=VALUE,…",
        help=f"More of the producer, or the same: {', '.join(KEYS)}.",
        rich_help_panel=_ENGINES,
    ),
    consumer: str = typer.Option(
        "",
        metavar="KEY=VALUE,…",
        help="The same of the consumer, such as tp=4,pp=2,block=32.",
        rich_help_panel=_ENGINES,
    ),
    replicas: str = typer.Option(
        "spread",
        metavar=POLICY_NAMES,
        help="Which of several equal producer ranks is read.",
        rich_help_panel=_ENGINES,
    ),
    ranks_per_node: int | None = RANKS_PER_NODE,
    tokens: int = typer.Option(300, help="Tokens of each prompt.", rich_help_panel=_REQUESTS),
    cached: int = typer.Option(
        0, help="Leading tokens that the consumer already holds.", rich_help_panel=_REQUESTS
    ),
    requests: int = typer.Option(2, help="How many prompts.", rich_help_panel=_REQUESTS),
    seed: int = typer.Option(
        0, help="What block tables and contents are drawn from.", rich_help_panel=_REQUESTS
    ),
    mode: str = typer.Option(
        "pull",
        metavar="pull|push",
        help="Consumers read, or producers write.",
        rich_help_panel=_RUN,
    ),
    device: str = typer.Option(
        "cpu",
        metavar="cpu|cuda|cuda:N",
        help="Where the caches lie.",
        rich_help_panel=_RUN,
    ),
    timeout: float = typer.Option(120.0, help="Seconds for the whole run.", rich_help_panel=_RUN),
    tamper: bool = typer.Option(
        False,
        "--tamper",
        help="Change one byte before the comparison, to see it found (exit status 1).",
        rich_help_panel=_RUN,
    ),
    as_json: bool = typer.Option(
        False, "--json", help="Print one JSON object instead of tables.", rich_help_panel=_RUN
    ),
) -> None:
    """Move a model's KV cache between two engines over NIXL, and compare every byte.

    Every rank of both engines is a process with its own agent and its own memory.

    Exit status 0: every byte is right and every notification came once; 1: not so; 2: bad input.
    """
    with refusals():
        ours, theirs = (
            engine_words(side, words, tp_size=tp_size, layout=layout, block_size=block_size)
            for side, words, tp_size, layout in (
                ("producer", producer, producer_tp, producer_layout),
                ("consumer", consumer, consumer_tp, consumer_layout),
            )
        )
        engines = engine("producer", model, ours), engine("consumer", model, theirs)
        job = Job(
            producer=engines[0],
            consumer=engines[1],
            tokens=tokens,
            cached=cached,
            requests=requests,
            election=election_of(replicas, ranks_per_node, *(e.parallel for e in engines)),
            mode=cast("Mode", mode),
            device=device,
            seed=seed,
            timeout=timeout,
            tamper=tamper,
        )
        _check_nixl()
        check_job(job)
        console = output()
        if not as_json:
            show_job(console, model, job)
        report = _run(job)
    if as_json:
        typer.echo(json.dumps({"model": model, **report.as_dict()}, indent=1))
    else:
        show_report(console, job, report)
    raise typer.Exit(0 if report.ok else WRONG)


def _check_nixl() -> None:
    names = package_names()
    if not any(find_spec(name) for name in names):
        raise SpecError("nixl", " or ".join(names), "an installed nixl: pip install 'kvspec[nixl]'")


def _run(job: Job) -> Report:
    with progress_bar() as bar:
        task = bar.add_task(STAGES[0], total=len(list(job.ranks())))

        def show(stage: str, done: int, total: int) -> None:
            bar.update(task, description=f"{stage:8}", completed=done, total=total)

        return run_transfer(job, show)
