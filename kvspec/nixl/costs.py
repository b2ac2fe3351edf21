"""Compute the time of a transfer, directly and staged, from seven figures of a machine.

Invariant: only these figures decide between both ways. Nothing is measured here.
"""

from __future__ import annotations

import attrs

from kvspec.errors import SpecError
from kvspec.inputs import seconds

FIGURES = ("handle", "descriptor", "byte", "order", "batch", "run", "run_byte")
MOST = 1e3
"""Seconds that no single figure reaches: greater ones are nonsense."""
MAX_GAP = 256 << 10
"""Bytes that are never read only to be skipped, whatever a descriptor costs."""


def _figure(_: object, field: attrs.Attribute[float], value: object) -> None:
    """Refuse what is no number of seconds: none below zero, none that is endless."""
    if seconds(field.name, value) >= MOST:
        raise SpecError(field.name, value, f"seconds below {MOST:g}")


@attrs.frozen(kw_only=True)
class Costs:
    """The seconds that each step of a transfer takes on one machine with one transport.

    Attributes:
        handle: Seconds to make, post and poll one NIXL handle.
        descriptor: Seconds to post one descriptor.
        byte: Seconds for each byte that the transport moves.
        order: Seconds to find the ranges of one staged transfer.
        batch: Seconds to permute one batch, without its runs.
        run: Seconds to permute one run, without its bytes.
        run_byte: Seconds for each byte of a permuted run.
        origin: Where the figures come from. The defaults were measured with NIXL over shared
            memory, on one core.
    """

    handle: float = attrs.field(default=1e-4, validator=_figure)
    descriptor: float = attrs.field(default=2.4e-6, validator=_figure)
    byte: float = attrs.field(default=1 / 9e9, validator=_figure)
    order: float = attrs.field(default=2e-4, validator=_figure)
    batch: float = attrs.field(default=3e-5, validator=_figure)
    run: float = attrs.field(default=1.2e-7, validator=_figure)
    run_byte: float = attrs.field(default=1 / 14e9, validator=_figure)
    origin: str = attrs.field(default="the stated defaults", eq=False)

    def direct(self, descriptors: int, nbytes: int, handles: int = 1) -> float:
        """Return the seconds of a direct transfer.

        Args:
            descriptors: Number of descriptors after merging.
            nbytes: Bytes of all descriptors.
            handles: Number of handles.

        Returns:
            Seconds.

        >>> round(1e3 * Costs().direct(65_536, 16 << 20), 1)  # runs of 256 bytes, in ms
        159.3
        """
        return handles * self.handle + descriptors * self.descriptor + nbytes * self.byte

    def staged(self, ranges: int, read: int, runs: int, nbytes: int, batches: int = 1) -> float:
        """Return the seconds of a staged transfer.

        Args:
            ranges: Number of ranges that the transport moves.
            read: Bytes of all ranges.
            runs: Number of runs that are permuted.
            nbytes: Bytes of all runs. The other bytes of the ranges are not copied.
            batches: Number of batches.

        Returns:
            Seconds.

        >>> round(1e3 * Costs().staged(64, 18 << 20, 65_536, 16 << 20, batches=3), 1)
        11.9
        """
        moved = self.direct(ranges, read, batches) + self.order + batches * self.batch
        return moved + runs * self.run + nbytes * self.run_byte

    @property
    def gap(self) -> int:
        """Bytes that take as long to read as one new range costs.

        A smaller gap between two ranges is read as well, because that is faster.
        """
        return min(MAX_GAP, int(self.descriptor / self.byte)) if self.byte else MAX_GAP
