"""The settings of a staging buffer, and the rule by which transfers are staged."""

from __future__ import annotations

import attrs

from kvspec.inputs import flag, positive_int

# Default bytes of a buffer.
BUFFER = 32 << 20
# Bytes of a slot. One handle moves so much at most, and a transfer with a longer run is not staged.
SLOT_BYTES = 8 << 20
# Least bytes of a buffer.
LEAST = 4096
# The threshold until a rank has learned its own. Measured with NIXL over shared memory on one core,
# 16 to 32 MiB from four sources, in shuffled blocks. Runs of 4 KiB: staged and direct take equal
# times. 2 KiB: direct takes 1.4 times as long. 8 KiB: staged takes 1.4 times as long. The number is
# larger than 4 KiB, because `Staging.saves` also counts the ranges and the search against staging.
# On an AMD EPYC, ranks learn 10 to 17 KiB, so one number cannot fit all machines.
STAGE_BELOW = 6 << 10
# Finding the ranges of a transfer takes as long as posting so many descriptors.
LEAST_SAVED = 96
# Ranges so far apart are never read as one, whatever a descriptor costs.
MAX_GAP = 256 << 10


@attrs.frozen(kw_only=True, eq=False)
class Staging:
    """The staging buffer of a rank, and the rule by which transfers are staged.

    Attributes:
        buffer: Bytes to allocate when they are first needed, in the memory type and on the device
            of the transfer. If that fails, the transfers are direct, and a warning is logged.
        stage_below: One descriptor costs as much time as permuting this number of bytes. Ranges,
            the bytes between runs and the search count against staging. So runs are staged up to a
            mean length that is somewhat smaller. None: the rank learns the number from its first
            transfers. Until then it is 6 KiB. `kvspec calibrate` measures it too.
        always: Stage each transfer that can be staged, however long its runs are.

    Raises:
        SpecError: If an attribute is wrong.
    """

    buffer: int = BUFFER
    stage_below: int | None = None
    always: bool = False

    def __attrs_post_init__(self) -> None:
        positive_int("staging.buffer", self.buffer, least=LEAST)
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
        """Bytes of a slot. A small buffer is one slot."""
        return min(SLOT_BYTES, self.buffer)
