"""What a run found: bytes moved, notifications counted, bytes compared, ranks that failed.

Law: a run is right only if every rank finished, every byte that was judged is right and every count
is exactly what the plan says. Whatever is not known is not right.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import attrs

from kvspec.errors import counted
from kvspec.ownership.parallel import RankId
from kvspec.run.job import SIDES, Job, Side

DIED = "its process died"


@attrs.frozen(kw_only=True)
class Moved:
    """What one pair of ranks exchanged: *runs* are the descriptors left after merging *ids*."""

    producer: RankId
    consumer: RankId
    nbytes: int = 0
    ids: int = 0
    runs: int = 0
    seconds: float = 0.0


@attrs.frozen(kw_only=True)
class Compared:
    """A cache after the run: bytes *judged*, bytes *free* to be anything, and what is *wrong*.

    *lines* tell the first wrong bytes, one a line.
    """

    judged: int
    free: int = 0
    wrong: int = 0
    lines: tuple[str, ...] = ()


@attrs.frozen(kw_only=True)
class RankReport:
    """What one rank's process saw.

    *notified* of *awaited* notifications came; *finished* requests had all of theirs; *foreign*
    ones, which nobody should have sent, are told by request and sender. *torch* says whether the
    process imported torch.
    """

    side: Side
    rank: RankId
    moved: tuple[Moved, ...]
    awaited: int
    notified: int
    foreign: tuple[str, ...]
    finished: int
    compared: Compared
    torch: bool


@attrs.frozen(kw_only=True)
class Failure:
    """A rank that did not get through: in which *stage*, and why."""

    side: Side
    rank: RankId
    stage: str
    why: str

    def __str__(self) -> str:
        return f"{self.side} {self.rank} failed in stage {self.stage}: {self.why}"


@attrs.frozen(kw_only=True)
class Report:
    """The outcome of one run.

    *stages*: seconds of each stage, in order. *sending* and *receiving*: finished (rank, request)
    pairs, and how many there must be.
    """

    ranks: tuple[RankReport, ...]
    failures: tuple[Failure, ...]
    stages: dict[str, float]
    sending: tuple[int, int]
    receiving: tuple[int, int]

    @staticmethod
    def of(job: Job, answers: Iterable[object], seconds: dict[str, float]) -> Report:
        """Return what the *answers*, a `RankReport` or a `Failure` each, say of *job*."""
        told = tuple(answers)
        ranks = tuple(each for each in told if isinstance(each, RankReport))
        failures = (each for each in told if isinstance(each, Failure))
        done = {side: sum(e.finished for e in ranks if e.side == side) for side in SIDES}
        return Report(
            ranks=ranks,
            failures=tuple(sorted(failures, key=lambda each: DIED not in each.why)),
            stages=seconds,
            sending=(done["producer"], job.plan.finished_sending_count * job.requests),
            receiving=(done["consumer"], job.plan.finished_recving_count * job.requests),
        )

    @property
    def moved(self) -> tuple[Moved, ...]:
        """Every pair of ranks, by consumer, then producer."""
        pairs = (pair for rank in self.ranks for pair in rank.moved)
        return tuple(sorted(pairs, key=lambda pair: (pair.consumer, pair.producer)))

    @property
    def consumers(self) -> tuple[RankReport, ...]:
        """The consumer ranks that finished."""
        return tuple(rank for rank in self.ranks if rank.side == "consumer")

    @property
    def judged(self) -> int:
        """Bytes of consumer ranks that were compared."""
        return sum(rank.compared.judged for rank in self.consumers)

    @property
    def wrong(self) -> int:
        """Bytes, of any rank, that are wrong."""
        return sum(rank.compared.wrong for rank in self.ranks)

    @property
    def lines(self) -> tuple[str, ...]:
        """The first wrong bytes of every rank, one a line."""
        return tuple(line for rank in self.ranks for line in rank.compared.lines)

    @property
    def faults(self) -> tuple[str, ...]:
        """Everything that makes the run wrong, one a line; empty if all is right."""
        return tuple(self._faults())

    def _faults(self) -> Iterator[str]:
        yield from map(str, self.failures)
        if self.wrong:
            where = ", ".join(f"{e.side} {e.rank}" for e in self.ranks if e.compared.wrong)
            yield f"{counted(self.wrong, 'wrong byte')}, on {where}"
        for name, (done, wanted) in (("sending", self.sending), ("receiving", self.receiving)):
            if done != wanted:
                yield f"finished {name} {done} times, not {wanted}"
        for rank in self.ranks:
            who = f"{rank.side} {rank.rank}"
            if rank.notified != rank.awaited:
                yield f"{who} got {rank.notified} notifications of {rank.awaited}"
            if rank.foreign:
                yield f"{who} got notifications it must not: {', '.join(rank.foreign)}"

    @property
    def ok(self) -> bool:
        """Whether every byte is right and every count exact."""
        return not self.faults

    def as_dict(self) -> dict[str, Any]:
        """Return the report as plain values, ranks by their names."""
        whole = attrs.asdict(self, value_serializer=_plain)
        moved = [attrs.asdict(pair, value_serializer=_plain) for pair in self.moved]
        summary = {"ok": self.ok, "faults": list(self.faults), "judged_bytes": self.judged}
        return summary | {"wrong_bytes": self.wrong, "pairs": moved} | whole


def _plain(instance: object, field: object, value: Any) -> Any:  # noqa: ANN401 - any field's value
    del instance, field
    return str(value) if isinstance(value, RankId) else value


@attrs.define
class Figures:
    """What came of a run of sessions under faults.

    *done*, *failed*, *gone*: loads, one for each request and consumer rank; those that are gone
    ended with their engine, since a rank of it was killed. *faults*: kills, and whatever else was
    broken. *lost*: requests that were not sent in time, never came to an end or were never freed.
    *wrong*: bytes of loads that were called done. *leaked*: what is left at the end. *died*: the
    rank that ended the run, since it died without being killed, or was silent.
    """

    requests: int = 0
    done: int = 0
    failed: int = 0
    gone: int = 0
    faults: int = 0
    lost: int = 0
    wrong: int = 0
    leaked: int = 0
    seconds: float = 0.0
    died: str = ""

    def __str__(self) -> str:
        loads = counted(self.done + self.failed + self.gone, "load")
        ends = f"{self.done} done, {self.failed} failed, {self.gone} gone"
        found = f"{self.lost} lost, {self.wrong} wrong, {self.leaked} leaked"
        sent = f"{counted(self.requests, 'request')}, {counted(self.faults, 'fault')}"
        return f"{sent}; of {loads} {ends}; {found}; {self.seconds} seconds"

    @property
    def ok(self) -> bool:
        """Whether nothing is lost, wrong or leaked."""
        return not self.wrongs

    @property
    def wrongs(self) -> tuple[str, ...]:
        """What makes the run wrong, one a line; empty if all recovered."""
        counts = (
            (self.lost, "requests were lost"),
            (self.wrong, "bytes are wrong in loads that were called done"),
            (self.leaked, "things are left over"),
        )
        told = tuple(f"{count} {what}" for count, what in counts if count)
        if not self.done and self.requests > self.faults:
            told = ("no load was done", *told)
        return (self.died, *told) if self.died else told
