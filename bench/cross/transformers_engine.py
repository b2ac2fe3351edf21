"""Engines of transformers, which answer the calls of `lines`. They decode greedily, one by one."""

from __future__ import annotations

import contextlib
import itertools
import os
from typing import Any

import lines
import torch
import transformers

from kvspec.adapters.transformers import Prompts
from kvspec.errors import KVSpecError
from kvspec.nixl import NixlRank
from kvspec.session import PrefillTicket, Session

LOGPROBS = 5


class Engine:
    """A model of transformers, its buffer, and its session."""

    def __init__(
        self,
        engine_id: str,
        path: str,
        model: str,
        revision: str,
        block: int,
        dtype: str = "float32",
    ) -> None:
        self.network = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype)
        ).eval()
        self.prompts = Prompts(
            self.network,
            num_blocks=2048 // block,
            block_size=block,
            layer_name="model.layers.{}.self_attn.attn",
        )
        self.session = Session(
            NixlRank(prefix=f"{engine_id}-"),
            self.prompts.cache,
            engine_id=engine_id,
            model=model,
            revision=revision,
            background=True,
            lease=15.0,
            heartbeat=3.0,
        )
        self.names = itertools.count()

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt."""
        name = f"prompt-{next(self.names)}"
        ticket = self.prompts.hold(self.session, name, prompt, top_logprobs=LOGPROBS)
        return {"ticket": ticket.to_params(), "why": None}

    def decode(
        self, prompt: list[int], count: int, ticket: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Generate *count* tokens. Load the prompt first if there is a ticket."""
        cache = transformers.DynamicCache(config=self.network.config)
        if ticket is not None:
            try:
                found = PrefillTicket.from_params(ticket)
                self.prompts.load(self.session, found, prompt, cache, timeout=20.0)
            except KVSpecError as error:
                return {"finish": "error", "why": lines.reason(error)}
        computed, tokens, logprobs, given = 0, [], [], prompt[cache.get_seq_length() :]
        for _ in range(count):
            with torch.no_grad():
                logits = self.network(torch.tensor([given]), past_key_values=cache).logits[0, -1]
            computed += len(given)
            values, ids = logits.float().log_softmax(-1).topk(LOGPROBS)
            logprobs.append(dict(zip(ids.tolist(), values.tolist(), strict=True)))
            given = [int(ids[0])]
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
        """Write *value* into the whole buffer, unless a prompt is held."""
        if self.held():
            return False
        dtype = self.network.dtype
        element = torch.tensor([value], dtype=dtype).view(torch.uint8).numpy().tobytes()
        for view in self.prompts._buffer._views.values():  # noqa: SLF001 - only a test fills it
            view[...] = element * (view.dtype.itemsize // len(element))
        return True

    def close(self) -> None:
        """Close the session."""
        with contextlib.suppress(KVSpecError):
            self.session.close()
            self.session.nixl.close()


class Engines:
    """The calls. See `lines`."""

    make: Any = Engine

    def __init__(self) -> None:
        torch.set_num_threads(1)
        transformers.utils.logging.disable_progress_bar()
        self._engines: dict[str, Any] = {}

    def start(self, engine: str, **settings: Any) -> None:  # noqa: ANN401
        """Start an engine."""
        self._engines[engine] = self.make(engine, **settings)

    def version(self) -> str:
        """Return the version of transformers."""
        return f"transformers {transformers.__version__}"

    def stop(self, engine: str) -> None:
        """End an engine."""
        self._engines.pop(engine).close()

    def ready(self, engine: str) -> None:
        """Do nothing: `start` has waited."""

    def alone(self, engine: str, prompt: list[int], count: int) -> dict[str, Any]:
        """Return the answer of an engine that computes the prompt itself."""
        found: dict[str, Any] = self._engines[engine].decode(prompt, count, None)
        return found

    def prefill(self, engine: str, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt."""
        found: dict[str, Any] = self._engines[engine].prefill(prompt)
        return found

    def decode(
        self, engine: str, prompt: list[int], count: int, ticket: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the answer of an engine that loads the prompt."""
        found: dict[str, Any] = self._engines[engine].decode(prompt, count, ticket)
        return found

    def clear(self, engine: str, value: float) -> bool:
        """Write *value* into the buffer of an engine."""
        return bool(self._engines[engine].clear(value))

    def held(self, engine: str) -> int:
        """Return the number of prompts that consumers may still read."""
        return int(self._engines[engine].held())

    def kill(self, engine: str) -> None:  # noqa: ARG002 - all engines of this process end
        """End the process without warning."""
        os._exit(1)

    def close(self) -> None:
        """Close all sessions."""
        for name in [*self._engines]:
            self.stop(name)


if __name__ == "__main__":
    found: list[Engines] = []
    lines.serve(lambda: found.append(Engines()) or found[0])
    found[0].close()
