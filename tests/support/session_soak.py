"""Many requests through the processes of two engines, with faults: lost, wrong and leaked are none.

`python tests/support/session_soak.py --requests 1000` runs for longer, and prints the figures.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

import attrs

sys.path.insert(0, str(Path(__file__).parent))

from session_processes import Engine
from sessions import engine, new_remote_id

import kvspec
from kvspec.errors import KVSpecError

TIMES = {"lease": 3.0, "beat": 0.4, "patience": 3.0}
BLOCKS = 64
MOST = 8  # requests under way
FAULTS = ("kill P", "kill D", "stop P", "stop D", "drop", "cancel", "late")


@attrs.define
class Figures:
    """What came of a run. *lost*: requests that never came to an end, or were never freed."""

    requests: int = 0
    done: int = 0
    failed: int = 0
    faults: int = 0
    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        return ", ".join(f"{value} {name}" for name, value in attrs.asdict(self).items())


@attrs.define(eq=False)
class Flying:
    """A request under way: which ranks still hold or load it."""

    request: kvspec.TransferRequest
    remote_id: str
    holders: set[int]
    loaders: set[int]


class Soak:
    """Two engines, the requests between them, and who breaks what when."""

    def __init__(self, seed: int, tls: str, *, pushed: bool) -> None:
        self.drawn, self.tls, self.pushed = random.Random(seed), tls, pushed
        self.figures, self.epoch = Figures(), {"P": 0, "D": 0}
        self.specs = {
            "P": engine(4, heads=4, block=8, size=512),
            "D": engine(2, heads=4, block=4, size=512),
        }
        self.flying: dict[str, Flying] = {}
        self.engines: dict[str, Engine] = {}
        self.free = {name: set(range(1, BLOCKS)) for name in "PD"}
        self.start("P")
        self.start("D")

    def start(self, name: str) -> None:
        """Start an engine, again perhaps: its ranks hold and load nothing then."""
        if name in self.engines:
            self.engines[name].kill()
            for flying in self.flying.values():
                (flying.holders if name == "P" else flying.loaders).clear()
        self.epoch[name] += 1
        self.engines[name] = Engine(
            name, self.specs[name], self.epoch[name], blocks=BLOCKS, times=TIMES, one_in=20,
            tls=self.tls, polled=(name == "D") != self.pushed,
        )  # fmt: skip
        if "D" in self.engines:
            self.engines["D"].meet(self.engines["P"])
            if self.pushed:
                self.engines["P"].meet(self.engines["D"], role="consumer")

    def admit(self, fault: str = "") -> None:
        """Send a request on its way, if there are blocks for it, and break something meanwhile."""
        tokens, name = self.drawn.randint(1, 60), f"r{self.figures.requests}"
        tables = {}
        for side in "PD":
            count = -(-tokens // self.specs[side].groups[0].spec.block_size)
            if len(self.free[side]) < count:
                return
            ids = self.drawn.sample(sorted(self.free[side]), count)
            tables[side] = {group.name: ids for group in self.specs[side].groups}
        request = kvspec.TransferRequest(
            request_id=name, num_tokens=tokens, producer_blocks=tables["P"],
            consumer_blocks=tables["D"],
        )  # fmt: skip
        for side, own in tables.items():
            self.free[side] -= set(own["full"])
        holders, loaders = (set(range(len(self.engines[side].ranks))) for side in "PD")
        flying = Flying(request, new_remote_id(name), holders, loaders)
        self.flying[name] = flying
        self.figures.requests += 1
        seed, late = int(name[1:]), {"lease": 0.05} if fault == "late" else {}
        self.engines["P"].ask("hold", flying.remote_id, request, seed, **late)
        if late:
            time.sleep(0.2)
            self.free_up()  # and its blocks are written over
        asked = [(rank, at) for at, rank in enumerate(self.engines["D"].ranks)]
        for rank, _ in asked:
            rank.tell("load", request, flying.remote_id, seed, 4.0, pushed=self.pushed)
        if self.pushed:
            self.collect(flying, asked)
            asked = [(rank, None) for rank in self.engines["P"].ranks]
            for rank, _ in asked:
                rank.tell("push", request, flying.remote_id, 4.0, self.epoch["D"])
        if fault == "cancel":
            self.collect(flying, asked)
        self.fault(fault, flying, asked)
        self.collect(flying, asked)

    def collect(self, flying: Flying, asked: list[tuple[Any, int | None]]) -> None:
        """Take the answers of those who still live."""
        while asked:
            rank, at = asked.pop(0)
            try:
                _ = rank.pipe.closed or rank.answer()
            except KVSpecError:  # refused, since whom it concerns is gone
                if at is not None:
                    flying.loaders.discard(at)
                    self.figures.failed += 1

    def free_up(self) -> None:
        """Take what is free on the producer."""
        for at, answer in enumerate(self.engines["P"].ask("settled")):
            for name in (*answer[0], *answer[1]):
                self.flying[name].holders.discard(at)

    def look(self) -> None:
        """Take what is free on the producer, and how each load stands."""
        self.free_up()
        for at, rank in enumerate(self.engines["D"].ranks):
            for name, flying in self.flying.items():
                if at in flying.loaders:
                    self.judge(flying, at, rank.ask("state", name))
        for name, flying in list(self.flying.items()):
            if not flying.holders and not flying.loaders:
                del self.flying[name]
                self.free["P"] |= set(flying.request.producer_blocks["full"].block_ids.tolist())
                self.free["D"] |= set(flying.request.consumer_blocks["full"].block_ids.tolist())

    def judge(self, flying: Flying, at: int, answer: Any) -> None:
        """Count a load that is over."""
        state, _, _, wrong = answer
        if state != "moving":
            flying.loaders.discard(at)
            self.figures.done += state == "done"
            self.figures.failed += state == "failed"
            self.figures.wrong += wrong

    def fault(self, what: str, flying: Flying, asked: list[tuple[Any, int | None]]) -> None:
        """Break something while a request is under way."""
        self.figures.faults += what != ""
        verb, _, side = what.partition(" ")
        if verb == "kill":
            time.sleep(self.drawn.choice((0.0, 1e-3, 1e-2)))
            self.engines[side].kill()
            self.collect(flying, asked)
            self.start(side)
        elif verb == "stop":
            rank = self.drawn.choice(self.engines[side].ranks)
            rank.stop()
            time.sleep(self.drawn.choice((0.3, 5.0)))  # longer than the lease
            rank.go_on()
        elif verb == "drop":
            self.engines["P"].ask("drop", flying.remote_id)
        elif verb == "cancel":
            self.engines["D"].ranks[0].ask("cancel", flying.request.request_id)

    def run(self, requests: int, faults: int) -> Figures:
        """Send so many requests, with so many faults among them; then let all end."""
        began = time.monotonic()
        kinds = [FAULTS[at % len(FAULTS)] for at in range(faults)]
        due = sorted(self.drawn.sample(range(requests), faults))
        while self.figures.requests < requests:
            if len(self.flying) < MOST:
                hit = bool(due) and due[0] <= self.figures.requests
                before = self.figures.faults
                self.admit(kinds[before] if hit else "")
                if self.figures.faults > before:
                    due.pop(0)
            self.look()
        end = time.monotonic() + 20
        while self.flying and time.monotonic() < end:
            self.look()
            time.sleep(5e-3)
        self.figures.lost = len(self.flying)
        for side in self.engines.values():
            try:
                side.quiet()
            except AssertionError:
                self.figures.leaked += 1
        for session, nixl, threads, _ in self.engines["P"].ask("left"):
            self.figures.leaked += session.held + nixl.transfers + (threads > 3)
        self.figures.seconds = round(time.monotonic() - began, 1)
        return self.figures

    def close(self) -> None:
        """End every process."""
        for side in self.engines.values():
            side.kill()


def soak(
    requests: int, faults: int, seed: int = 0, tls: str = "all", *, pushed: bool = False
) -> Figures:
    """Return what came of *requests* with *faults*."""
    made = Soak(seed, tls, pushed=pushed)
    try:
        return made.run(requests, faults)
    finally:
        made.close()


if __name__ == "__main__":
    os.environ.setdefault("KVSPEC_SECRET", "the secret of this soak")
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--faults", type=int, default=70)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tls", default="all", help="UCX_TLS of the processes: all, tcp")
    parser.add_argument("--push", action="store_true", help="producers write")
    given = parser.parse_args()
    told = soak(given.requests, given.faults, given.seed, given.tls, pushed=given.push)
    print(told)  # noqa: T201
