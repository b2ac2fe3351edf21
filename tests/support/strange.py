"""Values of every type that a caller may pass by mistake."""

from __future__ import annotations

from typing import Any

import numpy as np

STRANGE: tuple[Any, ...] = (
    None, True, -1, 0, 3, 1.5, float("nan"), 10**30, "", "x", "\ud800", b"x", [], [None], {},
    {"x": 1}, object(), int, np.int64(1), np.zeros(3), range(2),
)  # fmt: skip
