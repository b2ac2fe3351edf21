"""Implement `kvspec check`: whether engines that run now fit together.

Invariant: the exit status is 0 if and only if everything that was asked for is right.
"""

from __future__ import annotations

import contextlib

import typer

from kvspec.cli import printing
from kvspec.cli.running import (
    CONSUMER_ADDRESSES,
    MAX_JUDGED_TOKENS,
    NO_SECRET,
    PRODUCER_ADDRESSES,
    TIMEOUT_OPTION,
    Running,
    show_pairs,
)
from kvspec.errors import KVSpecError, counted, nbytes
from kvspec.inputs import positive_int, seconds
from kvspec.nixl import NixlRank
from kvspec.session.deployment import move
from kvspec.session.mailbox import Introduced


def check(
    producer: list[str] = PRODUCER_ADDRESSES,
    consumer: list[str] = CONSUMER_ADDRESSES,
    tokens: int = typer.Option(1024, help="Tokens of the request in the table."),
    moving: bool = typer.Option(
        False, "--move", help="Also read the first bytes of the producer's caches over NIXL."
    ),
    timeout: float = TIMEOUT_OPTION,
    no_secret: bool = NO_SECRET,
) -> None:
    """Check that engines that run now are complete and fit together.

    The command asks each rank for its introduction. It compares the engines as a consumer does
    that connects, and prints what would move. It changes nothing, so a readiness probe may call it.
    With one side only, it checks that all ranks of this engine are there.
    With --move, it also reads from each producer rank over NIXL, as a consumer does. Run that on
    the consumer's machine, before traffic: each such run costs the producer a file descriptor.
    Exit status 0: all fits. 1: something does not, and the output says what. 2: invalid input.
    """
    with printing.reported_errors():
        most = seconds("timeout", timeout, 0.1)
        positive_int("tokens", tokens, most=MAX_JUDGED_TOKENS)
        running = Running(producer, consumer, no_secret=no_secret)
        running.find(most)
        made = running.compare()
        if made is not None:
            try:
                show_pairs(running, made, tokens)
            except KVSpecError as error:
                running.fault("request", error)
        if moving:
            _move(running, most)
        elif not running.faults:
            running.say("no byte was moved: --move reads from the producer over NIXL")
    both = "producer and consumer fit together" if made is not None else "all ranks are there"
    running.end(f"yes: {both}")


def _move(running: Running, timeout: float) -> None:
    """Read the first bytes of each producer rank's caches, and print what was read."""
    ranks = running.engines.get("producer")
    if ranks is None:
        running.fault("--move", "no byte was moved: there is no complete producer to read from")
        return
    done = []

    def report(member: Introduced, result: int | KVSpecError) -> None:
        if isinstance(result, KVSpecError):
            running.fault(f"moving from {member.rank} at {member.address}", result)
        else:
            done.append(result)

    try:
        with contextlib.closing(NixlRank(prefix="check-", secret=running.secret)) as nixl:
            move(ranks, nixl, timeout, report)
    except KVSpecError as error:
        running.fault("--move", error)
    read = f"{nbytes(sum(done))} of {counted(len(done), 'producer rank')}"
    running.say(f"moved: {read} into this process, from the begin of each memory of their caches")
    running.say("not moved: anything into the consumer, whose own processes read")
