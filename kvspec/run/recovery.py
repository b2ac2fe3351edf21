"""Move many requests between two engines of sessions, kill ranks meanwhile, and count the damage.

Invariant: an impossible run is refused before a process starts, and no process is left after a run.

How it works:
    At most `SLOTS` requests are open at a time. Each has a slot, with blocks of its own on both
    sides, until every live rank has freed or loaded it. The next request reuses the slot at once.
    A killed rank takes its whole engine with it: the engine is started again under the same name,
    and its ranks hold and load nothing. The ranks of the other engine continue, and must free or
    fail what concerned the old start.

    Each rank compares a load at once when it is done. `Figures` counts what went wrong: requests
    that never end are lost, bytes of a load that is done may be wrong, a load may fail although
    nothing was killed while it was open, and objects that exist at the end are leaked.
"""

from __future__ import annotations

import logging
import math
import random
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress

import attrs

from kvspec.descriptors.request import BlockTable, TransferRequest
from kvspec.errors import KVSpecError, SpecError
from kvspec.inputs import positive_int
from kvspec.run.job import SIDES, SPARE_BLOCKS, Job, Side, has_tokens
from kvspec.run.limits import check_memory
from kvspec.run.rank_client import EngineClient, RankClient
from kvspec.run.rank_server import Launch
from kvspec.run.report import Figures
from kvspec.session import new_remote_id
from kvspec.session.load import LoadState

LOG = logging.getLogger(__name__)
KILLS = ("kill producer", "kill consumer")
TIMES = {"lease": 3.0, "heartbeat": 0.4, "patience": 3.0}  # of the sessions, in seconds
SLOTS = 6  # requests at a time
DRAIN = 20.0  # seconds in which the last requests must end
THREADS = 3  # of a process with a session

Unanswered = list[RankClient]
"""Ranks that have not answered a command yet."""


def slot_sizes(job: Job, side: Side) -> dict[str, int]:
    """Return the number of blocks of each group in one slot: enough for any number of tokens."""
    engine = job.engine(side)
    return {
        group.name: -(-job.tokens // engine.virtual_block(group)) if has_tokens(group) else 1
        for group in engine.groups
    }


def pools_of(job: Job, side: Side) -> dict[str, int]:
    """Return the number of blocks of each group: those of all slots, and a few more."""
    first, sizes = job.first_block(side), slot_sizes(job, side)
    return {name: first + SLOTS * size + SPARE_BLOCKS for name, size in sizes.items()}


def check_kills(job: Job, kills: int) -> None:
    """Check that this machine can run *job* with so many *kills*.

    Raises:
        SpecError: If *kills* cannot be combined with the job, or the job needs too much memory.
        MismatchError: If the engines do not fit.
    """
    if positive_int("kill", kills, least=0) > job.requests:
        raise SpecError("kill", kills, f"at most requests={job.requests}, one kill for each")
    for name in ("staging", "tamper"):
        if getattr(job, name):
            raise SpecError("kill", kills, rule=f"kill cannot be combined with {name}")
    if job.device != "cpu":
        raise SpecError("kill", kills, rule=f"kill needs device=cpu, not {job.device}")
    _ = job.plan  # planning is a check
    check_memory(job.cache_bytes({side: pools_of(job, side) for side in SIDES}))


def run_recovery(job: Job, kills: int) -> Figures:
    """Run *job* over sessions, and kill a random rank *kills* times.

    The engine of a killed rank is restarted. The requests have random lengths, up to the tokens of
    the job.

    Args:
        job: The job.
        kills: Number of kills, at most the number of requests.

    Returns:
        The figures of the run.

    Raises:
        SpecError: If the job cannot run. Then nothing has started.
        MismatchError: If the engines do not fit. Then nothing has started.
    """
    check_kills(job, kills)
    recovery = Recovery(job)
    return recovery.run(recovery.drawn.choices(KILLS, k=kills))


@attrs.define(eq=False)
class OpenRequest:
    """A request that has not ended, its slot, and the ranks that still hold or load it."""

    slot: int
    request: TransferRequest
    remote_id: str
    holders: set[RankClient]
    loaders: set[RankClient]
    may_fail: bool = False  # A fault was injected while it was open.


class Recovery:
    """Two engines, the open requests between them, and the figures so far.

    Tests replace `engine_type`, and add other faults than kills.
    """

    engine_type = EngineClient
    timeout = 30.0  # seconds for a load

    def __init__(self, job: Job) -> None:
        self.job = job
        self.drawn = random.Random(job.seed)  # noqa: S311 - no secret
        self.secret = secrets.token_hex(16)
        self.figures, self.epoch = Figures(), dict.fromkeys(SIDES, 0)
        self.sizes = {side: slot_sizes(job, side) for side in SIDES}
        self.slots = list(range(SLOTS))  # the free ones
        self.open: dict[str, OpenRequest] = {}
        self.engines: dict[Side, EngineClient] = {}
        self.deadline = math.inf

    def run(self, faults: Sequence[str]) -> Figures:
        """Send all requests, inject *faults* at some of them, and wait until all have ended."""
        began = time.monotonic()
        self.deadline = began + self.job.timeout
        try:
            self.start("producer")
            self.start("consumer")
            self.send(faults)
            self.end()
        except (OSError, KVSpecError) as error:
            self.figures.died = str(error)
        finally:
            for engine in self.engines.values():
                engine.kill()
        self.figures.lost = len(self.open) + self.job.requests - self.figures.requests
        self.figures.seconds = round(time.monotonic() - began, 1)
        return self.figures

    def start(self, side: Side) -> None:
        """Start an engine, or start it again. Its ranks hold and load nothing."""
        LOG.info("start %s after %d of %d requests", side, self.figures.requests, self.job.requests)
        if side in self.engines:
            self.engines[side].kill()
            killed = set(self.engines[side].ranks)
            for opened in self.open.values():
                self.figures.gone += len(opened.loaders & killed)
                opened.holders -= killed
                opened.loaders -= killed
        self.epoch[side] += 1
        launch = Launch(
            name=side,
            epoch=self.epoch[side],
            blocks=pools_of(self.job, side),
            nixl={"secret": self.secret, "polled": side == "consumer"},
            session={"replica_policy": self.job.replica_policy, **TIMES},
        )
        self.engines[side] = self.engine_type(self.job.engine(side), launch)
        for rank in self.engines[side].ranks:
            rank.deadline = self.deadline + DRAIN
        if len(self.engines) == len(SIDES):
            self.engines["consumer"].connect(self.engines["producer"])

    def send(self, faults: Sequence[str]) -> None:
        """Send all requests that can be sent before the deadline."""
        at = self.drawn.sample(range(self.job.requests), len(faults))
        due = dict(zip(sorted(at), faults, strict=True))
        while self.figures.requests < self.job.requests and time.monotonic() < self.deadline:
            if self.slots:
                self.start_request(due.get(self.figures.requests, ""))
            self.look()

    def start_request(self, fault: str) -> None:
        """Send a request and inject *fault* meanwhile."""
        number, slot = self.figures.requests, self.slots.pop()
        tokens, name = self.drawn.randint(1, self.job.tokens), f"request-{number}"
        cached = min(self.job.cached, tokens)
        job = attrs.evolve(self.job, tokens=tokens, cached=cached, requests=1)
        producer, consumer = (self.tables(side, job, slot) for side in SIDES)
        request = attrs.evolve(
            job.moves[0], request_id=name, producer_blocks=producer, consumer_blocks=consumer
        )
        holders, loaders = (set(self.engines[side].ranks) for side in SIDES)
        opened = OpenRequest(slot, request, new_remote_id(name), holders, loaders)
        self.open[name] = opened
        self.figures.requests += 1
        self.hold(opened, number)
        unanswered = self.move(opened, number)
        if fault:
            self.figures.faults += 1
            for each in self.open.values():
                each.may_fail = True
        self.inject(fault, opened, unanswered)
        self.collect(opened, unanswered)

    def tables(self, side: Side, job: Job, slot: int) -> dict[str, BlockTable]:
        """Return block tables of the blocks in a slot, in random order."""
        tables: dict[str, BlockTable] = {}
        first = job.first_block(side)
        for group in job.engine(side).groups:
            starts, size = job.block_starts(side, group), self.sizes[side][group.name]
            blocks = range(first + slot * size, first + (slot + 1) * size)
            tables[group.name] = BlockTable(self.drawn.sample(blocks, len(starts)), starts.start)
        return tables

    def hold(self, opened: OpenRequest, seed: int) -> None:
        """Let the producer compute and hold a request."""
        self.engines["producer"].ask("hold", opened.remote_id, opened.request, seed)

    def move(self, opened: OpenRequest, seed: int) -> Unanswered:
        """Start the loads of a request. Every second load compares checksums."""
        consumers = list(self.engines["consumer"].ranks)
        for rank in consumers:
            name, digest = opened.remote_id, seed % 2 == 1
            rank.send("load", opened.request, name, seed, self.timeout, digest=digest)
        return consumers

    def collect(self, opened: OpenRequest, unanswered: Unanswered) -> None:
        """Receive the answers of the ranks that are alive."""
        while unanswered:
            rank = unanswered.pop(0)
            try:
                _ = rank.pipe.closed or rank.answer()
            except KVSpecError:  # The engine that it concerns was restarted meanwhile.
                self.count(opened, rank, "failed")

    def count(self, opened: OpenRequest, rank: RankClient, state: LoadState) -> None:
        """Count the load of a rank if it is over."""
        if state != "moving" and rank in opened.loaders:
            opened.loaders.discard(rank)
            self.figures.done += state == "done"
            self.figures.failed += state == "failed"
            self.figures.unexplained += state == "failed" and not opened.may_fail

    def inject(self, fault: str, opened: OpenRequest, unanswered: Unanswered) -> None:
        """Inject a fault while a request is open: kill a random rank and restart its engine."""
        if fault in KILLS:
            side: Side = "producer" if fault == KILLS[0] else "consumer"
            time.sleep(self.drawn.choice((0.0, 1e-3, 1e-2)))
            self.drawn.choice(self.engines[side].ranks).kill()
            self.collect(opened, unanswered)
            self.start(side)

    def release(self) -> None:
        """Take the requests that the producer's ranks have freed."""
        producer = self.engines["producer"]
        for rank, (done, expired) in zip(producer.ranks, producer.ask("settled"), strict=True):
            for name in (*done, *expired):
                self.open[name].holders.discard(rank)

    def look(self) -> None:
        """Take what was freed, count the loads that are over, and close the ended requests."""
        self.release()
        for name, opened in self.open.items():
            for rank in list(opened.loaders):
                state, wrong = rank.ask("state", name)
                self.count(opened, rank, state)
                self.figures.wrong += wrong
        for name, opened in list(self.open.items()):
            if not opened.holders and not opened.loaders:
                self.slots.append(self.open.pop(name).slot)

    def end(self) -> None:
        """Wait until all requests have ended, and count the objects that are left."""
        end = time.monotonic() + DRAIN
        while self.open and time.monotonic() < end:
            self.look()
            time.sleep(5e-3)
        for engine in self.engines.values():
            with suppress(TimeoutError):  # What is active is counted.
                engine.quiet()
            for stats in engine.ask("left"):
                self.figures.wrong += stats.spilled
                self.figures.leaked += stats.active + (stats.threads > THREADS)
