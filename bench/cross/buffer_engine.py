"""An engine that copies prompts between its cache and a buffer. It decodes greedily, one by one."""

from __future__ import annotations

import contextlib
import itertools
import os
from abc import ABC, abstractmethod
from typing import Any

import lines

from kvspec.errors import KVSpecError
from kvspec.nixl import NixlRank
from kvspec.session import Session
from kvspec.tickets import PrefillTicket

LOGPROBS = 5
# Tokens of a buffer.
BUFFER = 2048
# Seconds until a prompt must be there.
LOADING = 20.0


class BufferEngine(ABC):
    """A model, a buffer with prompts, and a session. It answers the calls of `lines`.

    Args:
        name: The `engine_id` of the session.
        prompts: Copies prompts between the cache of the model and the buffer.
        model: The name of the model.
        revision: Its revision.
    """

    def __init__(self, name: str, prompts: Any, model: str, revision: str) -> None:  # noqa: ANN401
        self.prompts = prompts
        self.session = Session(
            NixlRank(prefix=f"{name}-"),
            prompts.cache,
            engine_id=name,
            model=model,
            revision=revision,
            background=True,
            lease=15.0,
            heartbeat=3.0,
        )
        self.names = (f"prompt-{number}" for number in itertools.count())

    @abstractmethod
    def forget(self) -> None:
        """Empty the cache of the model."""

    @abstractmethod
    def compute(self, tokens: list[int]) -> dict[int, float]:
        """Compute *tokens*. Return the largest log probabilities after the last, sorted."""

    @abstractmethod
    def load(self, ticket: PrefillTicket, prompt: list[int]) -> int:
        """Load a prompt, and return how many of its tokens are in the cache."""

    @abstractmethod
    def fill(self, value: float) -> None:
        """Write *value* into all memory that the engine keeps."""

    def ready(self) -> None:  # noqa: B027 - none has to wait
        """Do nothing: the constructor has waited."""

    def alone(self, prompt: list[int], count: int) -> dict[str, Any]:
        """Return the answer of an engine that computes the prompt itself."""
        return self.decode(prompt, count, None)

    def decode(
        self, prompt: list[int], count: int, ticket: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Generate *count* tokens. Load the prompt first if there is a ticket."""
        self.forget()
        known = 0
        if ticket is not None:
            try:
                known = self.load(PrefillTicket.from_params(ticket), prompt)
            except KVSpecError as error:
                return {"finish": "error", "why": lines.reason(error)}
        return self.generated(prompt, count, known)

    def generated(self, prompt: list[int], count: int, known: int) -> dict[str, Any]:
        """Generate *count* tokens. The cache has the first *known* tokens of the prompt."""
        computed, tokens, logprobs, given = 0, [], [], prompt[known:]
        for _ in range(count):
            logprobs.append(self.compute(given))
            computed += len(given)
            given = [next(iter(logprobs[-1]))]
            tokens += given
        return {
            "tokens": tokens,
            "logprobs": logprobs,
            "finish": "length",
            "computed": computed,
            "why": None,
        }

    def held(self) -> int:
        """Return the number of prompts that consumers may still read."""
        self.prompts._buffer.reclaim(self.session)  # noqa: SLF001 - `hold` calls it too
        return len(self.session.held)

    def clear(self, value: float) -> bool:
        """Write *value* into all memory, unless a prompt is held."""
        if self.held():
            return False
        self.fill(value)
        return True

    def fill_buffer(self, element: bytes) -> None:
        """Write an element into the whole buffer."""
        for view in self.prompts._buffer._views.values():  # noqa: SLF001 - only a test fills it
            view[...] = element * (view.dtype.itemsize // len(element))

    def kill(self) -> None:
        """End the process, with all its engines, without warning."""
        os._exit(1)

    def close(self) -> None:
        """Close the session."""
        with contextlib.suppress(KVSpecError):
            self.session.close()
            self.session.nixl.close()
