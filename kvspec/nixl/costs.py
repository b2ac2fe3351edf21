"""What a transfer costs, directly and staged: seven figures of a machine, and arithmetic.

Law: the same figures decide everything that is a matter of cost, and whoever is asked why can show
them. Pure: nothing is measured here.
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
    """Seconds, of one machine and transport.

    *handle*: one transfer handle made, posted and polled. *descriptor*: each that is posted.
    *byte*: each that the transport moves. Of what is staged, *order*: finding the ranges of a
    transfer; *batch*: permuting one batch, before any run of it; *run*, *run_byte*: each run that
    is permuted, and each byte of it. The defaults are those of NIXL over shared memory, one core;
    *origin* says where others come from.
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
        """Return the seconds of *descriptors* of *nbytes* in all, each posted where it goes.

        >>> round(1e3 * Costs().direct(65_536, 16 << 20), 1)  # runs of 256 bytes, in ms
        159.3
        """
        return handles * self.handle + descriptors * self.descriptor + nbytes * self.byte

    def staged(self, ranges: int, read: int, runs: int, nbytes: int, batches: int = 1) -> float:
        """Return the seconds of *ranges* of *read* bytes in all, of which *runs* are permuted.

        *nbytes*: of the runs alone; the rest of the ranges is dropped.

        >>> round(1e3 * Costs().staged(64, 18 << 20, 65_536, 16 << 20, batches=3), 1)
        11.9
        """
        moved = self.direct(ranges, read, batches) + self.order + batches * self.batch
        return moved + runs * self.run + nbytes * self.run_byte

    @property
    def gap(self) -> int:
        """Bytes between two ranges that it takes no longer to read than to begin a new range."""
        return min(MAX_GAP, int(self.descriptor / self.byte)) if self.byte else MAX_GAP
