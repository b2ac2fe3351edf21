"""Staging buffers with slots of any size, so that a small buffer has several."""

from __future__ import annotations

import attrs

from kvspec.nixl import Staging
from kvspec.nixl.staging.rule import SLOT_BYTES


@attrs.frozen(kw_only=True, eq=False)
class Slotted(Staging):
    """Settings of a buffer whose slots have *slot_bytes* bytes."""

    slot_bytes: int = SLOT_BYTES

    @property
    def longest(self) -> int:
        """Bytes of a slot."""
        return min(self.slot_bytes, self.buffer)
