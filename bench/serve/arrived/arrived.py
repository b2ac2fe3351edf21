"""A plug-in of SGLang: write how much of each prompt was loaded before its last chunk.

Each line of the file that the environment variable `ARRIVED` names has two numbers: the tokens
that were loaded when the load of the last chunk began, and the tokens of the prompt.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def register() -> None:
    """Hook the receivers of kvspec. SGLang calls this function in each of its processes."""
    from kvspec.adapters.sglang import tickets  # noqa: PLC0415 - in SGLang's processes
    from kvspec.adapters.sglang.receiving import Receiver  # noqa: PLC0415

    begin = Receiver._begin  # noqa: SLF001 - nothing public tells when a load begins

    def begun(self: Any, ticket: Any) -> bool:  # noqa: ANN401
        if tickets.is_whole(ticket) and self.kv_mgr.around.tp_rank == 0:
            with Path(os.environ["ARRIVED"]).open("a") as file:
                file.write(f"{self._arrived} {ticket.computed_tokens}\n")
        return begin(self, ticket)

    Receiver._begin = begun  # type: ignore[method-assign] # noqa: SLF001
