"""Engines of llama.cpp, which answer the calls of `lines`. They decode greedily, one by one.

Flash attention is off, because llama.cpp rounds keys and values to float16 for it. Answers alone
would then differ from transformers by a hundredth.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lines
import llama_cpp
import numpy as np
import torch
import transformers_engine
from gguf_models import write
from llama_prompts import Prompts
from transformers_engine import LOGPROBS

from kvspec.errors import KVSpecError
from kvspec.nixl import NixlRank
from kvspec.session import PrefillTicket, Session

# Tokens of the context, which holds one prompt.
CONTEXT = 512
F32 = 0  # GGML_TYPE_F32


class Engine:
    """A model of llama.cpp, a buffer, and a session."""

    def __init__(self, engine_id: str, path: str, model: str, revision: str, block: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(write(Path(path))).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = CONTEXT
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        self.prompts = Prompts(self._context, num_blocks=2048 // block, block_size=block)
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
        self._numbers = itertools.count()

    def _compute(self, tokens: list[int]) -> dict[int, float]:
        """Compute *tokens*, and return the largest log probabilities after the last."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        found = torch.from_numpy(np.ctypeslib.as_array(logits, (size,)).copy())
        values, ids = found.log_softmax(-1).topk(LOGPROBS)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))

    def _forget(self) -> None:
        """Empty the sequence. The bytes of its cells stay."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, False)  # noqa: FBT003 - ctypes takes no names

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt."""
        self._forget()
        pairs, name = [*self._compute(prompt).items()], f"prompt-{next(self._numbers)}"
        sampled = {"first_token": pairs[0][0], "first_logprobs": pairs}
        ticket = self.prompts.hold(self.session, name, prompt, sampled)
        return {"ticket": ticket.to_params(), "why": None}

    def decode(
        self, prompt: list[int], count: int, ticket: dict[str, Any] | None
    ) -> dict[str, Any]:
        """Generate *count* tokens. Load the prompt first if there is a ticket."""
        self._forget()
        known = 0
        if ticket is not None:
            try:
                found = PrefillTicket.from_params(ticket)
                known = self.prompts.load(self.session, found, prompt, timeout=20.0)
            except KVSpecError as error:
                return {"finish": "error", "why": lines.reason(error)}
        computed, tokens, logprobs, given = 0, [], [], prompt[known:]
        for _ in range(count):
            logprobs.append(self._compute(given))
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
        """Write *value* into the buffer and into all cells, unless a prompt is held."""
        if self.held():
            return False
        for view in self.prompts._buffer._views.values():  # noqa: SLF001 - only a test fills it
            view[...] = np.float32(value).tobytes() * (view.dtype.itemsize // 4)
        form = self.prompts._format  # noqa: SLF001
        rows = [np.full((CONTEXT, size // 4), value, "<f4") for size in form.row_sizes]
        state = form.write([each.view(np.uint8) for each in rows])
        self._forget()
        place, size = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(state)
        if (done := llama_cpp.llama_state_seq_set_data(self._context, place, size, 0)) != size:
            raise RuntimeError(f"llama_state_seq_set_data has read {done} of {size} bytes")
        self._forget()
        return True

    def close(self) -> None:
        """Close the session."""
        with contextlib.suppress(KVSpecError):
            self.session.close()
            self.session.nixl.close()


class Engines(transformers_engine.Engines):
    """The calls. See `lines`."""

    make = Engine

    def version(self) -> str:
        """Return the version of llama.cpp."""
        return f"llama-cpp-python {version('llama_cpp_python')}"


if __name__ == "__main__":
    made: list[Engines] = []
    lines.serve(lambda: made.append(Engines()) or made[0])
    made[0].close()
