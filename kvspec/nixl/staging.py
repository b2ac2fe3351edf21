"""Move transfers of many short runs through staging buffers: registered memory of this rank.

Invariant: a slot belongs to one transfer from before its handle is posted until no byte of the
handle can move any more. A transfer in quarantine keeps its slots. A staged transfer writes exactly
the bytes of the direct transfer. The other bytes of a range stay in the buffer.

How it works:
    Each posted descriptor costs the transport time. So a staged read posts a few long ranges of the
    peer instead of many short runs, and then permutes the bytes of the runs into place. That is
    faster if posting takes longer than permuting. `Staging.saves` decides with one number: a
    descriptor costs as much time as permuting `stage_below` bytes. For example, 16 MiB move from
    64 ranges. In runs of 2 KiB, these are 8,192 descriptors. Staging spares 8,128 of them. Minus
    96 for the search, they cost as much as permuting 47 MiB: staging is faster. In runs of 8 KiB,
    the spared descriptors cost as much as permuting 11 MiB: staging is slower.

    The number differs from machine to machine, so a rank learns it from its first transfers
    (`Learner`). Transfers for which both ways may be the faster one take turns until three of each
    way are done:

        from          time of                     16 MiB in runs of 8 KiB
        a staged one  reading one byte            2.1 ms / 16 MiB
                      permuting one byte          3.9 ms / 16 MiB
        a direct one  posting one descriptor      (7.8 ms - 2.1 ms) / 2,048 = 2.8 us

    Here a descriptor costs as much as permuting 12 KiB. Only the rank that starts a transfer stages
    it, so its peers need not know the number.

    A buffer is divided into slots of equal size. Each handle of a staged transfer uses one slot. A
    transfer that finds no free slot draws a ticket and waits. Free slots go to the waiting
    transfers in the order of their tickets. For example, three transfers share two slots:

        transfer    ticket    slots
        A           -         0, 1
        B           7         -
        C           8         -

    The handle in slot 0 ends. C is polled first, but B is ahead of C and only one slot is free: C
    waits. Then B is polled and receives slot 0.

    A transfer makes progress only when it is polled, and its owner may have stopped polling it. So
    polling C also polls B and then A, until a handle of one of them ends
    (`InFlightTransfers.poll_others`).
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable
from typing import Any

import attrs
import numpy as np

from kvspec.errors import SpecError, TransferError, TransferState
from kvspec.inputs import flag, positive_int
from kvspec.memory.rank_cache import Memory
from kvspec.nixl.agent import Agent, Prepared
from kvspec.nixl.merging import Pairing, Spans
from kvspec.nixl.ranges import SPARE, Batch, copy_runs, ranges_of
from kvspec.nixl.rows import SEVERAL

LOG = logging.getLogger("kvspec.nixl")
# Default bytes of a buffer and of its slots.
BUFFER = 32 << 20
SLOT_BYTES = 8 << 20
# Least bytes of a buffer.
LEAST = 4096
# The threshold until a rank has learned its own. Measured with NIXL over shared memory on one core
# of an Intel Xeon. On an AMD EPYC, 12 KiB would be right.
STAGE_BELOW = 6 << 10
# A rank learns from transfers whose runs have so many bytes on average. Shorter ones were faster
# staged on each machine that was measured, and longer ones direct.
LEARN_FROM = range(2 << 10, 32 << 10)
# It learns only from transfers that are long enough for the clock, and of so many runs.
LEARN_BYTES, LEARN_RUNS = 1 << 20, 256
# Transfers of each way to learn from. The first staged one is slow: it touches the buffer first.
LESSONS = 3
# The least and the most that a rank may learn, whatever the clock shows.
LEARNED = range(512, 128 << 10)
# Finding the ranges of a transfer takes as long as posting so many descriptors.
LEAST_SAVED = 96
# Ranges so far apart are never read as one, whatever a descriptor costs.
MAX_GAP = 256 << 10


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """The staging buffer of a rank, and the rule by which transfers are staged.

    Attributes:
        buffer: Bytes to allocate when they are first needed, in the memory type and on the device
            of the transfer.
        slot_bytes: Bytes of one slot. One handle moves so much at most. A transfer with a longer
            run is not staged.
        stage_below: Transfers of many runs are staged if their runs are shorter than this number of
            bytes on average. None: the rank learns the number from its first transfers. Until then
            it is 6 KiB. `kvspec calibrate` measures it too.
        always: Stage each transfer that can be staged, however long its runs are.

    Raises:
        SpecError: If an attribute is wrong.
    """

    buffer: int = BUFFER
    slot_bytes: int = SLOT_BYTES
    stage_below: int | None = None
    always: bool = False

    def __attrs_post_init__(self) -> None:
        positive_int("staging.buffer", self.buffer, least=LEAST)
        positive_int("staging.slot_bytes", self.slot_bytes)
        if self.stage_below is not None:
            positive_int("staging.stage_below", self.stage_below, least=0)
        flag("staging.always", self.always)

    def saves(self, runs: int, ranges: int, nbytes: int) -> bool:
        """Whether *ranges* ranges of *nbytes* in all, and permuting, are faster than *runs* runs.

        >>> Staging().saves(runs=8192, ranges=64, nbytes=16 << 20)  # Runs of 2 KiB
        True
        >>> Staging().saves(runs=2048, ranges=64, nbytes=16 << 20)  # Runs of 8 KiB
        False
        >>> Staging().saves(runs=64, ranges=1, nbytes=16 << 10)  # Too few to be worth the search
        False
        """
        return self.always or (runs - ranges - LEAST_SAVED) * self.threshold > nbytes

    @property
    def threshold(self) -> int:
        """The bytes that can be permuted in the time of one descriptor."""
        return STAGE_BELOW if self.stage_below is None else self.stage_below

    @property
    def gap(self) -> int:
        """Reads join ranges that are at most so many bytes apart.

        Reading a byte takes about a quarter of the time of reading and permuting it.
        """
        return min(MAX_GAP, 4 * self.threshold)

    @property
    def longest(self) -> int:
        """Bytes of a slot. A buffer smaller than `slot_bytes` is one slot."""
        return min(self.slot_bytes, self.buffer)


class StagingBuffer:
    """One allocated memory, divided into slots.

    Attributes:
        owner: The array or tensor that owns the memory.
        memory: The whole memory.
        slots: Number of slots.
        slot_bytes: Bytes of one slot.
        scratch: Addresses of the unused bytes below and above all slots, or nothing. `copy_runs`
            writes there.
    """

    def __init__(self, staging: Staging, memory_type: str, device: int) -> None:
        nbytes, margin = staging.buffer, SPARE if memory_type == "DRAM" else 0
        try:
            if memory_type == "DRAM":
                self.owner: Any = np.empty(margin + nbytes + margin, np.uint8)
                address = self.owner.ctypes.data
            else:
                import torch  # noqa: PLC0415 - heavy, and only a GPU needs it

                self.owner = torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}")
                address = self.owner.data_ptr()
        # torch raises RuntimeError if the memory of the GPU is exhausted.
        except (MemoryError, ValueError, RuntimeError) as error:
            wanted = f"a size that fits into {memory_type} of device {device}"
            raise SpecError("staging.buffer", f"{nbytes} bytes", wanted) from error
        self.memory = Memory(address, margin + nbytes + margin, memory_type, device)
        self.slot_bytes = staging.longest
        self.slots = nbytes // self.slot_bytes
        self.scratch = (address, address + margin + nbytes) if margin else ()
        self._first = address + margin

    def address(self, slot: int) -> int:
        """Return the address of a slot."""
        return self._first + slot * self.slot_bytes


@attrs.define(eq=False)
class Lesson:
    """One transfer from which a rank learns.

    Attributes:
        runs: Number of its runs.
        nbytes: Bytes of its runs.
        stage: How it is staged, or None.
        seconds: Its time so far: CPU time of this process, or wall time if the transport moves
            bytes by itself.
    """

    runs: int
    nbytes: int
    stage: Stage | None = None
    seconds: float = 0.0
    _begun: float = 0.0
    _waited: bool = False

    def take(self, step: Callable[[], bool], waits: Callable[[], bool]) -> bool:
        """Call *step* and add its time. *waits*: whether bytes are in flight after it."""
        begun = time.perf_counter(), time.thread_time()
        self._begun = self._begun or begun[0]
        result = step()
        # CPU time, because the machine may be busy. But a network moves bytes between two steps.
        self._waited |= waits()
        if self._waited:
            self.seconds = time.perf_counter() - self._begun
        else:
            self.seconds += time.thread_time() - begun[1]
        return result


class Learner:
    """Learns the threshold of one rank from its first transfers.

    Attributes:
        staging: The settings, with the threshold that was learned.
        learns: Whether the threshold is not known yet.
    """

    def __init__(self, staging: Staging) -> None:
        self.staging = staging
        self.learns = staging.stage_below is None and not staging.always
        self._turns = itertools.count()
        self._done: dict[bool, list[Lesson]] = {False: [], True: []}  # by whether they are staged

    def teaches(self, runs: int, nbytes: int) -> bool:
        """Whether a transfer of *runs* runs shows the threshold."""
        long = nbytes >= LEARN_BYTES and runs >= LEARN_RUNS
        return self.learns and long and nbytes // runs in LEARN_FROM

    def stages_next(self) -> bool:
        """Return whether the next transfer to learn from is staged. The two ways take turns."""
        return next(self._turns) % 2 == 0

    def add(self, lesson: Lesson) -> None:
        """Learn from a transfer that is done. The caller holds the lock of the agent."""
        if len(done := self._done[lesson.stage is not None]) < LESSONS:
            done.append(lesson)
        if self.learns and min(map(len, self._done.values())) >= LESSONS:
            below = threshold_of(self._done[False], self._done[True])
            self.staging, self.learns = attrs.evolve(self.staging, stage_below=below), False
            self._done = {False: [], True: []}
            LOG.info("transfers of runs shorter than %d bytes are staged from now on", below)


def threshold_of(direct: list[Lesson], staged: list[Lesson]) -> int:
    """Return the bytes that are permuted in the time of one descriptor.

    The least times count: other programs disturb each measurement, and none makes it shorter.
    """
    stages = [(each, each.stage) for each in staged if each.stage is not None]
    permuting = min(stage.copying / each.nbytes for each, stage in stages)
    reading = min((each.seconds - stage.copying) / stage.nbytes for each, stage in stages)
    posting = min((each.seconds - reading * each.nbytes) / each.runs for each in direct)
    learned = round(posting / permuting) if permuting > 0 else LEARNED[-1]
    return min(max(learned, LEARNED[0]), LEARNED[-1])


class Buffers:
    """The staging buffers of one rank: one for each memory type and device.

    They are created when they are first needed.

    Attributes:
        learner: The settings, and what the rank has learned.
    """

    def __init__(self, staging: Staging, agent: Agent) -> None:
        self.learner = Learner(staging)
        self._agent = agent
        self._made: dict[tuple[str, int], StagingBuffer] = {}

    def choose(
        self, pairs: Pairing, local: Prepared, remote: Prepared, *, inward: bool
    ) -> tuple[Stage | None, Lesson | None]:
        """Return how to stage *pairs*, and what to measure while they move.

        The stage is None if staging is impossible or slower. A staged transfer has one device of
        the peer, one device of this rank, and no run longer than a slot.

        Args:
            pairs: The pairs of ids.
            local: List of this rank.
            remote: List of the peer.
            inward: Whether the transfer is a read.
        """
        if SEVERAL in (local.rows.device, remote.rows.device) or not pairs.nbytes:
            return None, None
        runs, nbytes, learner = pairs.runs, pairs.nbytes, self.learner
        saves, staging = learner.staging.saves, learner.staging
        learns = inward and learner.teaches(runs, nbytes)
        if learns and not learner.stages_next():
            return None, Lesson(runs, nbytes)
        # One range is the best case, so the ranges of most transfers need not be found.
        if not learns and not saves(runs, 1, nbytes):
            return None, None
        gap, longest = staging.gap if inward else 0, staging.longest
        batches = ranges_of(pairs.spans(), remote.rows.area_begins, longest=longest, gap=gap)
        if batches is None:
            return None, None
        posted, moved = (sum(len(b.address) for b in batches), sum(b.nbytes for b in batches))
        # Many ranges, or many other bytes, would hide what the copies cost.
        learns = learns and 4 * posted <= runs and moved <= 2 * nbytes
        if not learns and not saves(runs, posted, moved):
            return None, None
        buffer = self._beside(local.memory_type, local.rows.device)
        stage = Stage(buffer, batches, posted, moved, inward)
        return stage, Lesson(runs, nbytes, stage) if learns else None

    def _beside(self, memory_type: str, device: int) -> StagingBuffer:
        """Return the buffer for a memory type and device. Create it if it is missing."""
        with self._agent.lock:  # Two threads must not create the same buffer.
            if (memory_type, device) not in self._made:
                buffer = StagingBuffer(self.learner.staging, memory_type, device)
                self._agent.owners.append(buffer.owner)
                try:
                    self._agent.register(buffer.memory)
                except TransferError:  # Free the buffer. The next transfer makes another one.
                    self._agent.owners.pop()
                    raise
                self._made[memory_type, device] = buffer
            return self._made[memory_type, device]


@attrs.define(eq=False)
class Stage:
    """The ranges of one staged transfer.

    Attributes:
        buffer: The buffer of this rank.
        batches: Ranges of the peer, and their runs.
        ranges: Number of ranges.
        nbytes: Bytes of all ranges.
        inward: Whether the transfer is a read.
        copying: Seconds that the copies took so far.
    """

    buffer: StagingBuffer
    batches: tuple[Batch, ...]
    ranges: int
    nbytes: int
    inward: bool
    copying: float = 0.0

    def spans(self, batch: Batch, slot: int) -> Spans:
        """Return the ranges of *batch* in *slot* and at the peer. A write copies its runs first."""
        base = self.buffer.address(slot)
        if not self.inward:
            self._copy(batch, base)
        return Spans(base + batch.offset, batch.address, batch.length)

    def land(self, batch: Batch, slot: int) -> None:
        """Copy the runs of a finished read from *slot* to their places."""
        if self.inward:
            self._copy(batch, self.buffer.address(slot))

    def _copy(self, batch: Batch, base: int) -> None:
        memory = self.buffer.memory
        place = memory.memory_type, memory.device
        # The processor copies host memory itself. It waits for a GPU.
        clock = time.thread_time if memory.memory_type == "DRAM" else time.perf_counter
        begun = clock()
        try:
            for moves in batch.moves():
                copy_runs(base, moves, inward=self.inward, place=place, scratch=self.buffer.scratch)
        # torch raises RuntimeError if the memory of the GPU is exhausted.
        except (MemoryError, RuntimeError) as error:
            message = f"the copy between a slot and the cache failed: {error}"
            raise TransferError(message, state=TransferState.STOPPED) from error
        self.copying += clock() - begun
