"""A rank learns from its first transfers below which length of runs it stages."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest

from kvspec.errors import TransferError
from kvspec.memory.rank_cache import Memory
from kvspec.nixl import NixlRank, Staging, Transfer
from kvspec.nixl.staging import learning, rule, stage
from kvspec.nixl.staging.learning import LEARNED, Learner, Lesson, threshold_of
from kvspec.nixl.staging.ranges import Moves
from kvspec.nixl.staging.rule import STAGE_BELOW
from kvspec.nixl.staging.stage import StagedRanges
from kvspec.testing.fake_nixl import FakeFlight, FakeNixl

SIZE = 4 << 20
READING = 1 / 8e9  # seconds for one byte


@attrs.define(slots=False)
class Machine:
    """Two ranks on a machine whose clock shows only what transfers cost there.

    Attributes:
        posting: Seconds for one descriptor.
        permuting: Seconds for one byte that is permuted.
        network: Whether bytes move between the polls, by themselves.
    """

    posting: float
    permuting: float
    network: bool = False
    cpu: float = 1.0
    wall: float = 1.0

    def start(self, net: FakeNixl, patch: pytest.MonkeyPatch, settings: Staging) -> None:
        """Create both ranks."""
        clock = SimpleNamespace(thread_time=lambda: self.cpu, perf_counter=lambda: self.wall)
        patch.setattr(stage, "time", clock)
        patch.setattr(learning, "time", clock)
        patch.setattr(stage, "copy_runs", self.copy)
        self.near = NixlRank(secret=b"", staging=settings)
        self.far = NixlRank(secret=b"")
        self.arrays = [np.zeros(SIZE, np.uint8) for _ in range(2)]
        for rank, array in zip((self.near, self.far), self.arrays, strict=True):
            rank.register([Memory(array.ctypes.data, SIZE)], owner=array)
        self.near.connect(self.far.metadata())
        net.fate = self.fly

    def spend(self, seconds: float) -> None:
        """Let the clocks go on while the processor works."""
        self.cpu += seconds
        self.wall += seconds

    def copy(self, _base: int, moves: Moves, **_: object) -> None:
        """Take the place of `copy_runs`."""
        self.spend(len(moves.near) * moves.length * self.permuting)

    def cost(self, flight: FakeFlight) -> float:
        """Return the seconds that a handle takes."""
        nbytes = sum(length for *_, length in flight.copies)
        return len(flight.copies) * self.posting + nbytes * READING

    def fly(self, flight: FakeFlight) -> None:
        """Move the bytes of a posted handle at once, or later."""
        if not self.network:
            self.spend(self.cost(flight))
            flight.land()

    def move(self, net: FakeNixl, length: int, nbytes: int = SIZE // 2) -> Transfer:
        """Read *nbytes* in runs of *length*, from one range of the far side."""
        near, far = (
            np.array([(array.ctypes.data, length, 0, length, SIZE // length)], np.uint64)
            for array in self.arrays
        )
        count = nbytes // length
        order = np.arange(count)
        transfer = self.near.read(
            self.near.prepare(near),
            order[::-1],
            self.near.prepare(far, peer=self.far.name),
            order,
            request="r",
            timeout=60,
        )
        while transfer.poll() == "PROC":
            for flight in net.moving:
                self.wall += self.cost(flight)
                flight.land()
        return transfer

    def best(self, length: int, nbytes: int = SIZE // 2) -> dict[bool, float]:
        """Return the seconds of a read, by whether it is staged."""
        direct = nbytes // length * self.posting + nbytes * READING
        return {False: direct, True: self.posting + nbytes * (READING + self.permuting)}

    @property
    def threshold(self) -> int:
        """The threshold of the near rank."""
        buffers = self.near._in_flight.buffers
        assert buffers is not None
        return buffers.learner.staging.threshold


# A processor that copies slowly, one that copies fast, and one with a costly descriptor. The
# threshold is 3.9 KiB, 11.7 KiB and 58.6 KiB.
MACHINES = [(3e-6, 1 / 1.33e9), (2.8e-6, 1 / 4.29e9), (15e-6, 1 / 4e9)]


@pytest.mark.parametrize("network", [False, True])
@pytest.mark.parametrize(("posting", "permuting"), MACHINES)
@pytest.mark.parametrize("first", [4 << 10, 8 << 10, 16 << 10])
def test_rank_chooses_the_faster_way_on_each_machine(
    net: FakeNixl,
    monkeypatch: pytest.MonkeyPatch,
    first: int,
    posting: float,
    permuting: float,
    network: bool,
) -> None:
    """It learns from transfers of one length, and then chooses right for all lengths."""
    if (SIZE // 2) // first < learning.LEARN_RUNS:
        monkeypatch.setattr(learning, "LEARN_RUNS", 128)
    monkeypatch.setattr(rule, "LEAST_SAVED", 0)  # Nothing searches on this machine's clock.
    machine = Machine(posting, permuting, network)
    machine.start(net, monkeypatch, Staging())
    ways = [machine.move(net, first).staged for _ in range(6)]
    assert [True, False] * 3 == ways
    assert posting / permuting == pytest.approx(machine.threshold, rel=0.05)
    for length in (1 << power for power in range(8, 18)):
        times, staged = machine.best(length), machine.move(net, length).staged
        assert times[staged] <= 1.15 * min(times.values()), f"{length} B, staged: {staged}"


def test_threshold_is_that_of_the_example() -> None:
    """The module's docstring has these times."""
    nbytes, runs = 16 << 20, 2048
    work = StagedRanges(None, (), 64, nbytes, inward=True, copying=3.9e-3)  # type: ignore[arg-type]
    staged = [Lesson(runs, nbytes, work, seconds=6e-3), Lesson(runs, nbytes, work, seconds=9e-3)]
    direct = [Lesson(runs, nbytes, seconds=seconds) for seconds in (9.9e-3, 7.8e-3, 8.1e-3)]
    assert 12 << 10 == pytest.approx(threshold_of(direct, staged), rel=0.03)


@pytest.mark.parametrize(
    ("seconds", "copying", "learned"),
    [(0.0, 1e-3, LEARNED[0]), (1e-3, 0.0, LEARNED[-1]), (9.0, 1e-6, LEARNED[-1])],
)
def test_threshold_has_limits_whatever_the_clock_shows(
    seconds: float, copying: float, learned: int
) -> None:
    """A clock may stand still, and another program may take the processor."""
    work = StagedRanges(None, (), 1, 1 << 20, inward=True, copying=copying)  # type: ignore[arg-type]
    staged = [Lesson(256, 1 << 20, work, seconds=copying)]
    assert learned == threshold_of([Lesson(256, 1 << 20, seconds=seconds)], staged)


@pytest.mark.parametrize(
    ("settings", "length", "nbytes", "staged"),
    [
        pytest.param(Staging(stage_below=4096), 4 << 10, SIZE // 2, False, id="given"),
        pytest.param(Staging(always=True), 16 << 10, SIZE // 2, True, id="always"),
        pytest.param(Staging(), 4 << 10, 1 << 19, True, id="too few bytes"),
        pytest.param(Staging(), 16 << 10, SIZE // 2, False, id="too few runs"),
        pytest.param(Staging(), 1 << 10, SIZE // 2, True, id="short runs"),
        pytest.param(Staging(), 32 << 10, SIZE, False, id="long runs"),
    ],
)
def test_other_transfers_do_not_take_turns(
    net: FakeNixl,
    monkeypatch: pytest.MonkeyPatch,
    settings: Staging,
    length: int,
    nbytes: int,
    staged: bool,
) -> None:
    """The caller knows the threshold, or the transfer would not show it."""
    monkeypatch.setattr(rule, "LEAST_SAVED", 8)
    machine = Machine(1e-6, 1e-9)
    machine.start(net, monkeypatch, settings)
    assert [staged] * 8 == [machine.move(net, length, nbytes).staged for _ in range(8)]
    assert machine.threshold == (settings.stage_below or STAGE_BELOW)


def test_transfer_that_fails_teaches_nothing(
    net: FakeNixl, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its time is not that of the whole transfer."""
    machine = Machine(2e-6, 1 / 4e9)
    machine.start(net, monkeypatch, Staging())
    net.fate = FakeFlight.fail
    for _ in range(6):
        with pytest.raises(TransferError):
            machine.move(net, 4 << 10)
    assert STAGE_BELOW == machine.threshold
    net.fate = machine.fly
    for _ in range(6):
        machine.move(net, 4 << 10)
    assert 8000 == pytest.approx(machine.threshold, rel=0.05)


def test_transfer_of_many_ranges_teaches_nothing_about_copies() -> None:
    """The learner keeps few lessons, so a rank that never stages keeps little memory."""
    learner = Learner(Staging())
    for _ in range(100):
        learner.add(Lesson(256, 1 << 20, seconds=1.0))
    assert learner.learns
    assert sum(map(len, learner._done.values())) <= learning.LESSONS
