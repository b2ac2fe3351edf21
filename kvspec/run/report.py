"""The results of a run: moved bytes, finished requests, compared bytes and failed ranks.

Invariant: a run is right only if every rank has finished, every compared byte is right, and every
count is that of the plan. Missing results are wrong.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import attrs

from kvspec.errors import counted
from kvspec.ownership.parallel import RankId
from kvspec.run.job import SIDES, Job, Side


@attrs.frozen(kw_only=True)
class Moved:
    """The bytes between two ranks.

    Attributes:
        producer: Rank of the producer.
        consumer: Rank of the consumer.
        nbytes: Bytes of all requests.
        staged: Those of them that moved through a staging buffer.
        runs: Descriptors after merging.
        seconds: Seconds from the start of a request until the last byte of this pair, for all
            requests together. Pairs with the same rank share this time.
    """

    producer: RankId
    consumer: RankId
    nbytes: int = 0
    staged: int = 0
    runs: int = 0
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Compared:
    """The comparison of one cache after a run.

    Attributes:
        judged: Number of compared bytes.
        arriving: Those of them that the transfer must change. It must not change the others.
        free: Number of bytes that may have any value.
        wrong: Number of wrong bytes.
        lines: The first wrong bytes, one line each.
    """

    judged: int
    arriving: int = 0
    free: int = 0
    wrong: int = 0
    lines: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RankReport:
    """The results of one rank.

    Attributes:
        side: Side of the rank.
        rank: The rank.
        moved: Bytes between this rank and others, if it starts the transfers.
        finished: Number of finished requests: loaded by a consumer, or freed by a producer after
            all its readers were done.
        expired: Ids of requests that a producer freed before its readers were done.
        compared: The comparison of the cache.
        torch: Whether the process imported torch.
    """

    side: Side
    rank: RankId
    moved: tuple[Moved, ...]
    finished: int
    expired: tuple[str, ...] = ()
    compared: Compared
    torch: bool


@attrs.frozen
class Failure:
    """A rank that failed, the *stage* of the failure, and its reason. *died*: its process ended."""

    side: Side
    rank: RankId
    stage: str
    why: str
    died: bool = False

    def __str__(self) -> str:
        return f"{self.side} {self.rank} failed in stage {self.stage}: {self.why}"


@attrs.frozen(kw_only=True)
class Report:
    """The results of one run.

    Attributes:
        ranks: Results of the ranks, if all have compared their bytes.
        failures: Ranks that failed.
        stages: Seconds of each stage, in order.
        loaded: How many requests all consumer ranks have loaded, and how many they must load. Each
            rank counts.
        freed: The same numbers for the requests that the producer ranks freed.
    """

    ranks: tuple[RankReport, ...]
    failures: tuple[Failure, ...]
    stages: dict[str, float]
    loaded: tuple[int, int]
    freed: tuple[int, int]

    @staticmethod
    def of(
        job: Job,
        ranks: Iterable[RankReport],
        failures: Iterable[Failure],
        seconds: dict[str, float],
    ) -> Report:
        """Return the report of *job*. A rank that died is the first of the failures."""
        ranks = tuple(ranks)
        done = {side: sum(e.finished for e in ranks if e.side == side) for side in SIDES}
        return Report(
            ranks=ranks,
            failures=tuple(sorted(failures, key=lambda failure: not failure.died)),
            stages=seconds,
            loaded=(done["consumer"], job.plan.finished_recving_count * job.requests),
            freed=(done["producer"], job.plan.finished_sending_count * job.requests),
        )

    @property
    def moved(self) -> tuple[Moved, ...]:
        """All pairs of ranks, by consumer, then producer."""
        pairs = (pair for rank in self.ranks for pair in rank.moved)
        return tuple(sorted(pairs, key=lambda pair: (pair.consumer, pair.producer)))

    @property
    def consumers(self) -> tuple[RankReport, ...]:
        """The consumer ranks that finished."""
        return tuple(rank for rank in self.ranks if rank.side == "consumer")

    @property
    def judged(self) -> int:
        """Number of compared bytes of consumer ranks."""
        return sum(rank.compared.judged for rank in self.consumers)

    @property
    def wrong(self) -> int:
        """Number of wrong bytes of all ranks."""
        return sum(rank.compared.wrong for rank in self.ranks)

    @property
    def lines(self) -> tuple[str, ...]:
        """The first wrong bytes of each rank, one line each."""
        return tuple(line for rank in self.ranks for line in rank.compared.lines)

    @property
    def faults(self) -> tuple[str, ...]:
        """All faults of the run, one line each. Empty if the run is right."""
        faults = [str(failure) for failure in self.failures]
        if faults and not self.ranks:
            return tuple(faults)
        if self.wrong:
            where = ", ".join(f"{e.side} {e.rank}" for e in self.ranks if e.compared.wrong)
            faults.append(f"{counted(self.wrong, 'wrong byte')}, on {where}")
        for name, (done, expected) in (("loaded", self.loaded), ("freed", self.freed)):
            if done != expected:
                faults.append(f"{name} {done} requests on all ranks together, not {expected}")
        for rank in self.ranks:
            if rank.expired:
                early = ", ".join(rank.expired)
                faults.append(f"{rank.side} {rank.rank} freed {early} before its readers were done")
        return tuple(faults)

    @property
    def ok(self) -> bool:
        """Whether every byte is right and every count is exact."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the report, and what follows from them."""
        summary = {"ok": self.ok, "faults": list(self.faults), "judged_bytes": self.judged}
        summary |= {"wrong_bytes": self.wrong, "pairs": self.moved}
        return summary | attrs.asdict(self, recurse=False)


@attrs.define
class Figures:
    """The results of a run of sessions with faults.

    Attributes:
        requests: Number of requests.
        done: Loads that are done. There is one load for each request and consumer rank.
        failed: Loads that failed.
        gone: Loads whose engine was killed.
        faults: Kills and other injected faults.
        unexplained: Failed loads of requests during which nothing was killed.
        lost: Requests that were not sent in time, never ended, or were never freed.
        wrong: Wrong bytes of loads that are done, and changed bytes of spare blocks.
        leaked: Objects that are left at the end.
        seconds: Seconds of the run.
        died: Rank that ended the run, because it died without a kill or gave no answer.
    """

    requests: int = 0
    done: int = 0
    failed: int = 0
    gone: int = 0
    faults: int = 0
    unexplained: int = 0
    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    seconds: float = 0.0
    died: str = ""

    def __str__(self) -> str:
        loads = counted(self.done + self.failed + self.gone, "load")
        ends = f"{self.done} done, {self.failed} failed, {self.gone} gone with a killed engine"
        found = f"{self.lost} lost, {self.wrong} wrong, {self.leaked} leaked"
        sent = f"{counted(self.requests, 'request')}, {counted(self.faults, 'fault')}"
        return f"{sent}; {loads}: {ends}; {found}; {self.seconds} seconds"

    @property
    def ok(self) -> bool:
        """Whether no request is lost, no byte is wrong, and nothing is leaked."""
        return not self.wrongs

    @property
    def wrongs(self) -> tuple[str, ...]:
        """All faults of the run, one line each. Empty if everything recovered."""
        counts = (
            (self.lost, "requests were lost"),
            (self.unexplained, "loads failed although nothing was killed"),
            (self.wrong, "bytes are wrong in loads that were called done, or in spare blocks"),
            (self.leaked, "things are left over"),
        )
        faults = [self.died] if self.died else []
        if not self.done and self.requests > self.faults:
            faults.append("no load was done")
        return (*faults, *(f"{count} {what}" for count, what in counts if count))

    def as_dict(self) -> dict[str, Any]:
        """Return the fields of the figures, and whether the run is right."""
        return {"ok": self.ok, **attrs.asdict(self)}
