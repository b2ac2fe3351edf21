"""Move many requests between two engines of sessions, with injected faults, and count the damage.

Invariant: surviving ranks continue. Each request ends on every live rank. No load with wrong bytes
is ever done. At the end nothing is held, moving or left.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Sequence

import attrs

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.errors import KVSpecError
from kvspec.run.job import SIDES, SPARE_BLOCKS, Job, Side
from kvspec.run.rank_client import EngineClient, RankClient
from kvspec.run.rank_server import Launch
from kvspec.run.report import Figures
from kvspec.run.soak_rank import LoadOutcome, RankStats
from kvspec.session import new_remote_id

KILLS = ("kill producer", "kill consumer")
FAULTS = (
    *KILLS, "stop producer", "stop consumer", "deregister producer", "abort", "cancel", "late",
)  # fmt: skip
"""What may break while a request is under way."""
LEASE, HEARTBEAT, PATIENCE = 3.0, 0.4, 3.0  # of the sessions, in seconds
MOST = 8  # requests under way
ROOM = 4  # of the longest requests, for which each side has blocks
ENDS = 20.0  # seconds in which the last requests come to an end
THREADS = 3  # of a process with a session


def pools_of(jobs: Sequence[Job], side: Side) -> dict[str, int]:
    """Return the blocks of each group's pool."""
    engine, first = jobs[0].engine(side), jobs[0].first_block(side) + SPARE_BLOCKS
    return {
        group.name: first
        + SPARE_BLOCKS
        + ROOM * max(len(j.block_starts(side, group)) for j in jobs)
        for group in engine.groups
    }


@attrs.define(eq=False)
class Flying:
    """A request under way: which ranks still hold or load it."""

    request: TransferRequest
    remote_id: str
    holders: set[int]
    loaders: set[int]


Asked = list[tuple[RankClient, int | None]]
"""Ranks that owe an answer, those that load with their number."""


class Soak:
    """Two engines, the requests between them, and who breaks what when."""

    def __init__(
        self, job: Job, jobs: Sequence[Job], tls: str, one_in: int, timeout: float
    ) -> None:
        self.job, self.jobs, self.tls, self.one_in = job, jobs, tls, one_in
        self.timeout = timeout
        self.drawn = random.Random(job.seed)  # noqa: S311 - no secret
        self.pushed, self.secret = job.mode == "push", secrets.token_hex(16)
        self.figures, self.epoch = Figures(), dict.fromkeys(SIDES, 0)
        self.pools = {side: pools_of(jobs, side) for side in SIDES}
        self.free = {
            side: {name: set(range(job.first_block(side), n)) for name, n in pools.items()}
            for side, pools in self.pools.items()
        }
        self.flying: dict[str, Flying] = {}
        self.engines: dict[Side, EngineClient] = {}

    def start(self, side: Side) -> None:
        """Start an engine, again perhaps: its ranks hold and load nothing then."""
        if side in self.engines:
            self.engines[side].kill()
            for flying in self.flying.values():
                if side == "consumer":
                    self.figures.gone += len(flying.loaders)
                (flying.holders if side == "producer" else flying.loaders).clear()
        self.epoch[side] += 1
        start = Launch(
            name=side,
            epoch=self.epoch[side],
            blocks=self.pools[side],
            polled=side == self.job.active,
            replica_policy=self.job.replica_policy,
            lease=LEASE,
            heartbeat=HEARTBEAT,
            patience=PATIENCE,
            one_in=self.one_in,
            secret=self.secret,
        )
        self.engines[side] = EngineClient(self.job.engine(side), start, self.tls)
        if len(self.engines) == len(SIDES):
            self.engines["consumer"].connect(self.engines["producer"])
            if self.pushed:
                self.engines["producer"].connect(self.engines["consumer"], role="consumer")

    def tables(self, side: Side, job: Job) -> dict[str, BlockTable] | None:
        """Return block tables of free blocks; None if there are too few."""
        tables: dict[str, BlockTable] = {}
        for group in job.engine(side).groups:
            starts, free = job.block_starts(side, group), self.free[side][group.name]
            if len(free) < len(starts):
                return None
            ids = self.drawn.sample(sorted(free), len(starts))
            tables[group.name] = BlockTable(ids, starts.start)
        return tables

    def admit(self, fault: str = "") -> bool:
        """Send a request on its way, if there are blocks for it, and break something meanwhile."""
        seed = self.figures.requests
        job, name = self.jobs[seed], f"request-{seed}"
        producer, consumer = (self.tables(side, job) for side in SIDES)
        if producer is None or consumer is None:
            return False
        request = attrs.evolve(
            job.moves[0], request_id=name, producer_blocks=producer, consumer_blocks=consumer
        )
        self.take(request)
        holders, loaders = (set(range(len(self.engines[side].ranks))) for side in SIDES)
        flying = Flying(request, new_remote_id(name), holders, loaders)
        self.flying[name] = flying
        self.figures.requests += 1
        late = {"lease": 0.05} if fault == "late" else {}
        self.engines["producer"].ask("hold", flying.remote_id, request, seed, **late)
        if late:
            time.sleep(0.2)
            self.free_up()  # and its blocks are written over
        asked = self.move(flying, seed)
        if fault == "cancel":
            self.collect(flying, asked)
        self.fault(fault, flying, asked)
        self.collect(flying, asked)
        return True

    def take(self, request: TransferRequest, *, back: bool = False) -> None:
        """Take a request's blocks from those that are free, or put them *back*."""
        tables = {"producer": request.producer_blocks, "consumer": request.consumer_blocks}
        for side in SIDES:
            for name, table in tables[side].items():
                ids, free = set(table.block_ids.tolist()), self.free[side][name]
                self.free[side][name] = free | ids if back else free - ids

    def move(self, flying: Flying, seed: int) -> Asked:
        """Load a request, every second with a digest, and push it; return who owes an answer."""
        asked: Asked = [(rank, place) for place, rank in enumerate(self.engines["consumer"].ranks)]
        given = flying.request, flying.remote_id
        for rank, _ in asked:
            more = {"pushed": self.pushed, "digest": seed % 2 == 1}
            rank.tell("load", *given, seed, self.timeout, **more)
        if self.pushed:
            self.collect(flying, asked)
            asked = [(rank, None) for rank in self.engines["producer"].ranks]
            for rank, _ in asked:
                rank.tell("push", *given, self.timeout, self.epoch["consumer"])
        return asked

    def collect(self, flying: Flying, asked: Asked) -> None:
        """Take the answers of those who still live."""
        while asked:
            rank, place = asked.pop(0)
            try:
                _ = rank.pipe.closed or rank.answer()
            except KVSpecError:  # refused, since whom it concerns is gone
                if place is not None:
                    flying.loaders.discard(place)
                    self.figures.failed += 1

    def free_up(self) -> None:
        """Take what is free on the producer."""
        for place, answer in enumerate(self.engines["producer"].ask("settled")):
            for name in (*answer[0], *answer[1]):
                self.flying[name].holders.discard(place)

    def look(self) -> None:
        """Take what is free on the producer, and how each load stands."""
        self.free_up()
        for place, rank in enumerate(self.engines["consumer"].ranks):
            for name, flying in self.flying.items():
                if place in flying.loaders:
                    self.judge(flying, place, rank.ask("state", name))
        for name, flying in list(self.flying.items()):
            if not flying.holders and not flying.loaders:
                self.take(self.flying.pop(name).request, back=True)

    def judge(self, flying: Flying, place: int, stand: LoadOutcome) -> None:
        """Count a load that is over."""
        if stand.state != "moving":
            flying.loaders.discard(place)
            self.figures.done += stand.state == "done"
            self.figures.failed += stand.state == "failed"
            self.figures.wrong += stand.wrong

    def fault(self, what: str, flying: Flying, asked: Asked) -> None:
        """Break something while a request is under way."""
        self.figures.faults += what != ""
        verb, _, of = what.partition(" ")
        side: Side = "producer" if of == "producer" else "consumer"
        if verb == "kill":
            time.sleep(self.drawn.choice((0.0, 1e-3, 1e-2)))
            self.drawn.choice(self.engines[side].ranks).kill()
            self.collect(flying, asked)
            self.start(side)
        elif verb == "stop":
            rank = self.drawn.choice(self.engines[side].ranks)
            rank.stop()
            time.sleep(self.drawn.choice((0.3, 5.0)))  # longer than the lease
            rank.go_on()
        elif verb == "deregister":
            self.collect(flying, asked)
            self.drawn.choice(self.engines[side].ranks).ask("shut")
            time.sleep(0.3)
            self.look()
            self.start(side)
        elif verb == "abort":
            self.engines["producer"].ask("abort", flying.remote_id)
        elif verb == "cancel":
            self.engines["consumer"].ranks[0].ask("cancel", flying.request.request_id)

    def run(self, faults: Sequence[str], progress: Callable[[int], None]) -> Figures:
        """Send all requests, with *faults* at some of them; then let all end."""
        began = time.monotonic()
        try:
            self.start("producer")
            self.start("consumer")
            self.send(faults, progress, began + self.job.timeout)
            self.end()
        except (ConnectionError, TimeoutError) as error:
            self.figures.died = str(error)
        self.figures.lost = len(self.flying) + len(self.jobs) - self.figures.requests
        self.figures.seconds = round(time.monotonic() - began, 1)
        return self.figures

    def send(self, faults: Sequence[str], progress: Callable[[int], None], deadline: float) -> None:
        """Send all requests that can be sent before the *deadline*."""
        due = sorted(self.drawn.sample(range(len(self.jobs)), len(faults)))
        while (sent := self.figures.requests) < len(self.jobs) and time.monotonic() < deadline:
            broken = self.figures.faults
            fault = faults[broken] if broken < len(due) and due[broken] <= sent else ""
            if len(self.flying) < MOST and self.admit(fault):
                progress(sent + 1)
            self.look()

    def end(self) -> None:
        """Let all end, and count what is left."""
        end = time.monotonic() + ENDS
        while self.flying and time.monotonic() < end:
            self.look()
            time.sleep(5e-3)
        for engine in self.engines.values():
            try:
                engine.quiet()
            except TimeoutError:
                self.figures.leaked += 1
        left: list[RankStats] = [
            one for engine in self.engines.values() for one in engine.ask("left")
        ]
        for one in left:
            held, threads = one.session.held + one.nixl.transfers, one.threads > THREADS
            self.figures.leaked += held + threads

    def close(self) -> None:
        """End every process."""
        for engine in self.engines.values():
            engine.kill()
