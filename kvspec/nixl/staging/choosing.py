"""Decide for each transfer of a rank whether it is staged, and keep the buffers of the rank."""

from __future__ import annotations

from kvspec.errors import TransferError
from kvspec.nixl.agent import Agent, Prepared
from kvspec.nixl.merging import Pairing
from kvspec.nixl.rows import SEVERAL
from kvspec.nixl.staging.learning import Learner, Lesson
from kvspec.nixl.staging.ranges import ranges_of
from kvspec.nixl.staging.rule import Staging
from kvspec.nixl.staging.stage import StagedRanges, StagingBuffer


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
    ) -> tuple[StagedRanges | None, Lesson | None]:
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
        stage = StagedRanges(buffer, batches, posted, moved, inward)
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
