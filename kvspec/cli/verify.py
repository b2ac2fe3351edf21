"""Implement `kvspec verify`: judge every byte that two running engines would exchange.

Invariant: `kvspec.verify` judges with its own count of who owns what, not with that of the plan.
"""

from __future__ import annotations

import typer

from kvspec.check.verify import verify as first_fault
from kvspec.cli import printing
from kvspec.cli.running import (
    CONSUMER_ADDRESSES,
    MAX_JUDGED_TOKENS,
    NO_SECRET,
    PRODUCER_ADDRESSES,
    TIMEOUT_OPTION,
    Running,
)
from kvspec.errors import KVSpecError, SpecError
from kvspec.inputs import positive_int, seconds
from kvspec.session.deployment import Deployment


def verify(
    producer: list[str] = PRODUCER_ADDRESSES,
    consumer: list[str] = CONSUMER_ADDRESSES,
    tokens: int = typer.Option(1024, help="Tokens of the longest request."),
    timeout: float = TIMEOUT_OPTION,
    no_secret: bool = NO_SECRET,
) -> None:
    """Judge where each byte would go between two engines that run now.

    The command asks all ranks for their introductions, which contain the places of their caches in
    memory. It computes the reads of several requests, and checks that each consumer rank receives
    every byte exactly once, from a rank that owns it. No byte moves.
    `kvspec check` is the shorter question whether the engines fit. `kvspec prove` tries all sizes.
    Exit status 0: all bytes are right. 1: one is wrong, or the engines do not fit together.
    2: invalid input.
    """
    with printing.reported_errors():
        most = seconds("timeout", timeout, 0.1)
        positive_int("tokens", tokens, most=MAX_JUDGED_TOKENS)
        if not producer or not consumer:
            rule = "pass the addresses of both engines. `kvspec prove` needs none"
            raise SpecError("producer, consumer", None, rule=rule)
        running = Running(producer, consumer, no_secret=no_secret)
        running.find(most)
        made = running.compare()
        if made is not None:
            _judge(running, made, tokens)
    running.end("yes: every byte would come once, and from its owner")


def _judge(running: Running, made: Deployment, tokens: int) -> None:
    """Judge requests of several lengths, and print the first wrong byte of each."""
    blocks = {
        engine.virtual_block(group)
        for engine in (made.plan.producer, made.plan.consumer)
        for group in engine.groups
    }
    # Lengths beside the ends of blocks are where mistakes are.
    near = {size + more for size in blocks for more in (-1, 0, 1)}
    lengths = sorted(size for size in {1, *near, tokens} if 0 < size <= tokens)
    judged = set[int]()
    for seed, length in enumerate(lengths):
        try:
            request = made.request(length, seed)
            if request.num_tokens in judged:
                continue  # The caches have no room for more.
            judged.add(request.num_tokens)
            fault = first_fault(
                made.plan,
                made.caches("producer"),
                made.caches("consumer"),
                request,
                independent=True,
                separate_processes=True,
            )
        except KVSpecError as error:
            running.fault(f"a request of {length:,} tokens", error)
            continue
        if fault is not None:
            running.fault(f"a request of {request.num_tokens:,} tokens", str(fault))
    shown = ", ".join(map(str, sorted(judged)))
    running.say(f"judged: requests of {shown} tokens, with blocks in random order")
