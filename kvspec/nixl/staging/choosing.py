"""Decide for each transfer of a rank whether it is staged, and keep the buffers of the rank."""

from __future__ import annotations

import logging

from kvspec.errors import SpecError, TransferError
from kvspec.nixl.agent import Agent, Prepared
from kvspec.nixl.merging import Pairing
from kvspec.nixl.rows import SEVERAL
from kvspec.nixl.staging.learning import Learner, Lesson
from kvspec.nixl.staging.ranges import ranges_of
from kvspec.nixl.staging.rule import Staging
from kvspec.nixl.staging.stage import StagedRanges, StagingBuffer

LOG = logging.getLogger("kvspec.nixl")


class Buffers:
    """The staging buffers of one rank: one for each memory type and device.

    They are created when they are first needed. If one cannot be allocated or registered, a warning
    is logged, and the transfers of its memory type and device are direct until the rank is closed.

    Attributes:
        learner: The settings, and what the rank has learned.
    """

    def __init__(self, staging: Staging, agent: Agent) -> None:
        self.learner = Learner(staging)
        self._agent = agent
        # None: the buffer of this memory type and device could not be created.
        self._made: dict[tuple[str, int], StagingBuffer | None] = {}

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
        place = local.memory_type, local.rows.device
        several = SEVERAL in (local.rows.device, remote.rows.device)
        if several or not pairs.nbytes or self._made.get(place, ...) is None:
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
        batches = ranges_of(pairs.moved_runs(), remote.rows.memory_begins, longest=longest, gap=gap)
        if batches is None:
            return None, None
        posted, moved = (sum(len(b.address) for b in batches), sum(b.nbytes for b in batches))
        # Many ranges, or many other bytes, would hide what the copies cost.
        learns = learns and 4 * posted <= runs and moved <= 2 * nbytes
        worth = learns or saves(runs, posted, moved)
        if not worth or (buffer := self._beside(place)) is None:
            return None, None
        stage = StagedRanges(buffer, batches, posted, moved, inward)
        return stage, Lesson(runs, nbytes, stage) if learns else None

    def _beside(self, place: tuple[str, int]) -> StagingBuffer | None:
        """Return the buffer for a memory type and device, or None if it cannot be created."""
        if place not in self._made:
            try:
                self._create(place)
            except (SpecError, TransferError) as error:
                with self._agent.lock:
                    self._agent.check_open()
                    if place not in self._made:
                        self._made[place] = None
                        LOG.warning("nothing is staged in %s of device %d: %s", *place, error)
        return self._made[place]

    def _create(self, place: tuple[str, int]) -> None:
        """Create the buffer for a memory type and device."""
        # Allocate without the lock of the agent, because that waits for the kernels of a GPU.
        buffer = StagingBuffer(self.learner.staging, *place)
        with self._agent.lock:
            if place not in self._made:  # Another thread may have been faster.
                self._agent.register(buffer.memory, buffer.owner)
                self._made[place] = buffer
