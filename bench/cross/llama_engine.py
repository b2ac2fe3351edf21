"""Engines of llama.cpp, which answer the calls of `lines`.

Flash attention is off, because llama.cpp rounds keys and values to float16 for it. Answers alone
would then differ from transformers by a hundredth.
"""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lines
import llama_cpp
import numpy as np
import torch
from buffer_engine import BUFFER, LOADING, LOGPROBS, BufferEngine
from gguf_models import write
from llama_prompts import Prompts

from kvspec.tickets import PrefillTicket

# Tokens of the context, which holds one prompt.
CONTEXT = 512
F32 = 0  # GGML_TYPE_F32


class Engine(BufferEngine):
    """A model of llama.cpp, a buffer, and a session."""

    def __init__(self, name: str, path: str, model: str, revision: str, block: int) -> None:
        self._model = llama_cpp.llama_model_load_from_file(
            str(write(Path(path))).encode(), llama_cpp.llama_model_default_params()
        )
        settings = llama_cpp.llama_context_default_params()
        settings.n_ctx = settings.n_batch = settings.n_ubatch = CONTEXT
        settings.n_threads = settings.n_threads_batch = 1
        settings.type_k = settings.type_v = F32
        settings.flash_attn_type = llama_cpp.LLAMA_FLASH_ATTN_TYPE_DISABLED
        self._context = llama_cpp.llama_init_from_model(self._model, settings)
        prompts = Prompts(self._context, num_blocks=BUFFER // block, block_size=block)
        super().__init__(name, prompts, model, revision)

    def compute(self, tokens: list[int]) -> dict[int, float]:
        """Compute *tokens*. Return the largest log probabilities after the last, sorted."""
        array = (llama_cpp.llama_token * len(tokens))(*tokens)
        batch = llama_cpp.llama_batch_get_one(array, len(tokens))
        if status := llama_cpp.llama_decode(self._context, batch):
            raise RuntimeError(f"llama_decode returned {status}")
        size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        found = torch.from_numpy(np.ctypeslib.as_array(logits, (size,)).copy())
        values, ids = found.log_softmax(-1).topk(LOGPROBS)
        return dict(zip(ids.tolist(), values.tolist(), strict=True))

    def forget(self) -> None:
        """Empty the sequence. The bytes of its cells stay."""
        memory = llama_cpp.llama_get_memory(self._context)
        llama_cpp.llama_memory_clear(memory, False)  # noqa: FBT003 - ctypes takes no names

    def load(self, ticket: PrefillTicket, prompt: list[int]) -> int:
        """Load a prompt into the sequence."""
        return self.prompts.load(self.session, ticket, prompt, timeout=LOADING)

    def prefill(self, prompt: list[int]) -> dict[str, Any]:
        """Compute and hold a prompt."""
        self.forget()
        pairs = [*self.compute(prompt).items()]
        sampled = {"first_token": pairs[0][0], "first_logprobs": pairs, "sampling": "greedy"}
        ticket = self.prompts.hold(self.session, next(self.names), prompt, sampled)
        return {"ticket": ticket.to_params(), "why": None}

    def fill(self, value: float) -> None:
        """Write *value* into the buffer and into all cells."""
        self.fill_buffer(np.float32(value).tobytes())
        form = self.prompts._format  # noqa: SLF001
        rows = [np.full((CONTEXT, size // 4), value, "<f4") for size in form.row_sizes]
        state = form.write([each.view(np.uint8) for each in rows])
        self.forget()
        place, size = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8)), len(state)
        if (done := llama_cpp.llama_state_seq_set_data(self._context, place, size, 0)) != size:
            raise RuntimeError(f"llama_state_seq_set_data has read {done} of {size} bytes")
        self.forget()


if __name__ == "__main__":
    lines.serve(lambda: (Engine, f"llama-cpp-python {version('llama_cpp_python')}"))
