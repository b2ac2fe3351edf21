"""Count the descriptors that NIXL posts after merging, for tests and benchmarks of `kvspec.nixl`.

Only NIXL's telemetry contains that number. It must be captured from the start of an agent, and read
before a handle is released.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from kvspec.nixl import agent
from kvspec.nixl.transfer import Transfer


@contextmanager
def counted_posts() -> Iterator[Counter[Transfer]]:
    """Count the descriptors of the transfers of all ranks that are created inside.

    Yields:
        The number of descriptors that NIXL has posted for each transfer, of handles that ended.
    """
    bindings, settle = agent.bindings, Transfer._settle  # noqa: SLF001 - counts what it settles
    posted = Counter[Transfer]()

    def capturing() -> Any:  # noqa: ANN401 - nixl has no stubs
        real = bindings()

        def config() -> Any:  # noqa: ANN401
            made = real.nixlAgentConfig()
            made.captureTelemetry = True
            return made

        return SimpleNamespace(**{**vars(real), "nixlAgentConfig": config})

    def counting(self: Transfer, handle: int) -> None:
        telemetry = self._agent.call("telemetry", "getXferTelemetry", handle)
        posted[self] += int(telemetry.descCount)
        settle(self, handle)

    agent.bindings, Transfer._settle = capturing, counting  # type: ignore[method-assign] # noqa: SLF001
    try:
        yield posted
    finally:
        agent.bindings, Transfer._settle = bindings, settle  # type: ignore[method-assign] # noqa: SLF001
