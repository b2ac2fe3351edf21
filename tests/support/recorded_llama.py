"""Play back states of llama.cpp's sequences, which were recorded with llama-cpp-python 0.3.36.

`llama_states.npz` has for each architecture and setting of flash attention the states of all tokens
that the probe computes, in its order, and the state of the prompt `PROMPT`. The models have one
layer, three heads of keys and values, and four elements of a head. Run
`tests/session/test_llama_cpp.py` as a program to record them again.
"""

from __future__ import annotations

import ctypes
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

STATES = Path(__file__).with_name("llama_states.npz")
PROMPT = [3, 14, 15, 9, 26]

# What the functions of a model return.
_MODEL = {
    "model_is_recurrent": 0,
    "model_is_hybrid": 0,
    "model_has_encoder": 0,
    "model_n_swa": 0,
    "model_n_head_kv": 3,
    "model_n_layer": 1,
    "model_n_ctx_train": 256,
    "vocab_n_tokens": 64,
}


class RecordedLlama:
    """The functions of `llama_cpp` that the adapter calls. The context has one sequence.

    Attributes:
        state: The state of the sequence, or None if it is empty.
        prompt: The recorded state of the prompt.
    """

    LLAMA_STATE_SEQ_VERSION = 3

    def __init__(self, kind: str, flash: int) -> None:
        with np.load(STATES) as found:
            self._probe = [*found[f"{kind}-{flash}-probe"]]
            self.prompt = found[f"{kind}-{flash}-prompt"]
        self.state: Any = None
        for name in ("get_model", "get_memory", "model_get_vocab", "batch_free"):
            setattr(self, f"llama_{name}", lambda given: given)
        for name, value in _MODEL.items():
            setattr(self, f"llama_{name}", lambda _, value=value: value)

    def llama_batch_init(self, *_: int) -> SimpleNamespace:
        """Return a batch of one token."""
        return SimpleNamespace(token=[0], pos=[0], n_seq_id=[0], seq_id=[[0]], logits=[0])

    def llama_decode(self, _context: object, _batch: object) -> int:
        """Put the next state of the probe into the sequence."""
        self.state = self._probe.pop(0)
        return 0

    def llama_state_seq_get_size(self, _context: object, _sequence: int) -> int:
        """Return the size of the state."""
        return len(self.state)

    def llama_state_seq_get_data(self, _context: object, place: Any, size: int, _seq: int) -> int:
        """Copy the state to *place*."""
        ctypes.memmove(place, self.state.ctypes.data, size)
        return size

    def llama_state_seq_set_data(self, _context: object, place: Any, size: int, _seq: int) -> int:
        """Copy the state from *place*."""
        self.state = np.frombuffer(ctypes.string_at(place, size), np.uint8)
        return size

    def llama_memory_seq_pos_max(self, _memory: object, _sequence: int) -> int:
        """Return -1 if the sequence is empty."""
        return -1 if self.state is None else 0

    def llama_memory_seq_rm(self, *_: object) -> None:
        """Forget the sequence."""
        self.state = None
