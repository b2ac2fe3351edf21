"""Tests of the prompts of llama.cpp: with recorded states, and with llama.cpp if it is installed.

They compare with transformers, whose keys always lie in halves.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "bench" / "cross"))
from gguf_models import write
from llama_prompts import Prompts, StateFormat

import kvspec
from kvspec.adapters.transformers import prompts as adapter
from kvspec.errors import SpecError
from kvspec.nixl import NixlRank
from kvspec.session import Session
from kvspec.testing import FakeNixl
from kvspec.tickets import PrefillTicket
from tests.support.recorded_llama import PROMPT, STATES, RecordedLlama

pytestmark = pytest.mark.adapters

# Architectures, and whether flash attention is on. Without it, values are transposed.
KINDS = [("llama", 0), ("llama", 1), ("qwen3", 0), ("qwen3", 1)]
# The order of keys in llama.cpp, and whether they are normalised.
ORDERS = {"llama": ("pairs", False), "qwen3": ("halves", True)}
HEADS = {
    "vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 12, "num_key_value_heads": 6, "head_dim": 8,
    "max_position_embeddings": 256, "initializer_range": 0.2,
}  # fmt: skip
SMALL = HEADS | {"hidden_size": 24, "num_attention_heads": 6, "num_key_value_heads": 3}
SMALL |= {"num_hidden_layers": 1, "head_dim": 4, "initializer_range": 0.5}
GARBAGE = 1e4


def recorded(
    monkeypatch: pytest.MonkeyPatch, kind: str = "llama", flash: int = 0, **changed: Any
) -> RecordedLlama:
    """Return recorded states in place of llama.cpp. *changed* are other results of its model."""
    llama = RecordedLlama(kind, flash)
    for name, value in changed.items():
        setattr(llama, name, value if name.isupper() else lambda _, value=value: value)
    monkeypatch.setitem(sys.modules, "llama_cpp", llama)
    return llama


@contextmanager
def side(name: str, prompts: Any) -> Iterator[Session]:
    """Yield the session of an engine. Its buffer is NaN at first."""
    for array in prompts.cache.owner[0]:
        array[:] = 255
    with NixlRank() as nixl, Session(nixl, prompts.cache, engine_id=name, background=True) as own:
        yield own


@pytest.mark.parametrize(("kind", "flash"), KINDS)
def test_probe_finds_the_meaning_of_recorded_keys(
    monkeypatch: pytest.MonkeyPatch, kind: str, flash: int
) -> None:
    recorded(monkeypatch, kind, flash)
    order, normalized = ORDERS[kind]
    (group,) = Prompts(object(), num_blocks=4).engine.groups
    assert group.spec == kvspec.FullAttentionSpec(
        block_size=16,
        total_num_kv_heads=3,
        head_size=4,
        head_size_v=4,
        dtype="float32",
        key_content=kvspec.KeyContent(rotary=order, rotary_size=4, normalized=normalized),
    )


@pytest.mark.parametrize(("kind", "flash"), KINDS)
def test_recorded_prompt_is_the_same_after_a_transfer(
    monkeypatch: pytest.MonkeyPatch, kind: str, flash: int
) -> None:
    """The consumer has the other setting of flash attention."""
    llama = recorded(monkeypatch, kind, flash)
    held = Prompts(object(), num_blocks=4, block_size=2)
    llama.state = llama.prompt
    other = recorded(monkeypatch, kind, 1 - flash)
    loading = Prompts(object(), num_blocks=4, block_size=4)
    with FakeNixl(), side("p", held) as producer, side("d", loading) as consumer:
        ticket = held.hold(producer, "r", PROMPT)
        assert len(PROMPT) - 1 == loading.load(consumer, ticket, PROMPT)
    positions, found = loading._format.read(other.state)
    expected = loading._format.read(other.prompt)[1]
    assert positions.tolist() == [0, 1, 2, 3]
    for rows, wanted in zip(found, expected, strict=True):
        # Flash attention computes with halves, but a single layer stores before attention.
        assert rows.tolist() == wanted[:4].tolist()


@pytest.mark.parametrize("flash", [0, 1])
def test_state_is_the_same_after_it_was_read_and_written(flash: int) -> None:
    prompt = RecordedLlama("llama", flash).prompt
    form = StateFormat(1, 0, 48, 48, transposed=not flash)
    assert form.write(form.read(prompt)[1]).tolist() == prompt.tolist()


def test_hold_reorders_cells_by_their_positions(monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache with holes puts the tokens of a prompt into cells in any order."""
    llama = recorded(monkeypatch, "llama", 1)
    prompts = Prompts(object(), num_blocks=4)
    rows = prompts._format.read(llama.prompt)[1]
    order = np.array([3, 0, 4, 2, 1])
    llama.state = prompts._format.write([part[order] for part in rows])
    llama.state[16:76].view("<i4").reshape(5, 3)[:, 0] = order
    with FakeNixl(), side("p", prompts) as producer:
        ticket = prompts.hold(producer, "r", PROMPT)
        for place, (name, part) in enumerate(prompts._parts):
            found = prompts._buffer.read(ticket.tables, name, part, range(5))
            assert found.reshape(5, -1).tolist() == rows[place].tolist()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("LLAMA_STATE_SEQ_VERSION", 4),
        ("llama_model_is_recurrent", 1),
        ("llama_model_is_hybrid", 1),
        ("llama_model_has_encoder", 1),
        ("llama_model_n_swa", 64),
    ],
)
def test_prompts_refuse_other_memory_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, value: int
) -> None:
    recorded(monkeypatch, **{name: value})
    with pytest.raises(SpecError) as caught:
        Prompts(object(), num_blocks=4)
    assert (name, value) == (caught.value.field, caught.value.value)


@pytest.mark.parametrize(
    ("place", "field"),
    [
        (0, "state.magic"),
        (8, "state.streams"),
        (12, "state.cells"),
        (20, "state.sequences"),
        (28, "state.transposed"),
        (32, "state.layers"),
        (36, "state.type_k"),
        (96, "state.type_v"),
        (100, "state"),
        (104, "state"),
    ],
)
def test_format_refuses_each_other_number_by_name(place: int, field: str) -> None:
    state = RecordedLlama("llama", 0)._probe[0].copy()
    state[place] += 8
    with pytest.raises(SpecError) as caught:
        StateFormat.of(state, 1)
    assert field == caught.value.field


@pytest.mark.parametrize("size", [0, 40, 95, 96, 100, 155, 157])
def test_format_refuses_a_state_of_another_size(size: int) -> None:
    state = np.resize(RecordedLlama("llama", 1)._probe[0], size)
    with pytest.raises(SpecError) as caught:
        StateFormat.of(state, 1)
    assert caught.value.field.startswith("state")


def test_prompts_refuse_a_used_sequence_and_a_short_one(monkeypatch: pytest.MonkeyPatch) -> None:
    llama = recorded(monkeypatch)
    llama.state = llama.prompt
    with pytest.raises(SpecError, match="empty"):
        Prompts(object(), num_blocks=4)
    llama.state = None
    prompts = Prompts(object(), num_blocks=4)
    llama.state = llama.prompt
    with FakeNixl(), side("p", prompts) as session:
        ticket = prompts.hold(session, "r", PROMPT)
        for call in (
            lambda: prompts.hold(session, "r", [*PROMPT, 7]),
            lambda: prompts.load(session, ticket, PROMPT),
        ):
            with pytest.raises(SpecError) as caught:
                call()
            assert caught.value.field == "sequence"


QUIET: list[Any] = []
Step = Callable[[list[int]], Any]


def generated(step: Step, given: list[int]) -> tuple[list[int], Any]:
    """Return 16 greedy tokens, and the log probabilities of each step."""
    tokens, logprobs = list[int](), []
    for _ in range(16):
        logprobs.append(step(given))
        given = [int(logprobs[-1].argmax())]
        tokens += given
    return tokens, np.stack(logprobs)


def libraries() -> SimpleNamespace:
    """Return the libraries that real engines need. Skip the test if one is missing."""
    names = ("torch", "transformers", "safetensors", "gguf", "llama_cpp")
    found = {name: pytest.importorskip(name, reason=f"{name} is missing") for name in names}
    # It prints each tensor otherwise. The function must live as long as it may be called.
    QUIET[:] = [found["llama_cpp"].llama_log_callback(lambda *_: None)]
    found["llama_cpp"].llama_log_set(QUIET[0], None)
    return SimpleNamespace(**found)


class Llama:
    """A model in llama.cpp."""

    def __init__(self, file: Path, flash: int, kind: int = 0) -> None:
        self.api = api = libraries().llama_cpp
        api.llama_backend_init()
        self.model = api.llama_model_load_from_file(
            str(file).encode(), api.llama_model_default_params()
        )
        settings = api.llama_context_default_params()
        settings.type_k = settings.type_v = kind
        settings.flash_attn_type, settings.n_ctx = flash, 256
        settings.n_threads = settings.n_threads_batch = 1
        self.context = api.llama_init_from_model(self.model, settings)
        self.memory = api.llama_get_memory(self.context)

    def step(self, tokens: list[int]) -> Any:
        """Compute *tokens*, and return the log probabilities after the last."""
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert (
            self.api.llama_decode(self.context, self.api.llama_batch_get_one(array, len(array)))
            == 0
        )
        size = self.api.llama_vocab_n_tokens(self.api.llama_model_get_vocab(self.model))
        logits = np.ctypeslib.as_array(self.api.llama_get_logits_ith(self.context, -1), (size,))
        shifted = logits.astype(np.float64) - logits.max()
        return shifted - np.log(np.exp(shifted).sum())

    def forget(self) -> None:
        """Empty the sequence. Its bytes stay."""
        self.api.llama_memory_seq_rm(self.memory, 0, -1, -1)

    def fill(self, prompts: Prompts, value: float) -> None:
        """Write *value* into all cells."""
        form = prompts._format
        cells = self.api.llama_n_ctx(self.context)
        rows = np.full((cells, form.key_row // 4), value, "<f4").view(np.uint8)
        state = form.write([rows] * (2 * form.layers))
        pointer = state.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
        assert self.api.llama_state_seq_set_data(self.context, pointer, len(state), 0) == len(state)
        self.forget()

    def close(self) -> None:
        """Free the memory."""
        self.api.llama_free(self.context)
        self.api.llama_model_free(self.model)


def made(folder: Path, kind: str, fields: dict[str, Any]) -> tuple[Any, Path]:
    """Return a model of transformers with random weights, and its file for llama.cpp."""
    found = libraries()
    torch, transformers = found.torch, found.transformers
    torch.manual_seed(1)
    config = transformers.AutoConfig.for_model(kind, **fields, tie_word_embeddings=False)
    network = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    network.save_pretrained(folder / kind)
    return network, write(folder / kind)


def stepper(network: Any, cache: Any) -> Step:
    """Return the function that computes tokens with *cache*."""
    torch = libraries().torch

    def step(tokens: list[int]) -> Any:
        with torch.no_grad():
            logits = network(torch.tensor([tokens]), past_key_values=cache).logits[0, -1]
        return logits.double().log_softmax(-1).numpy()

    return step


def prompt_of(tokens: int) -> list[int]:
    return np.random.default_rng(tokens).integers(3, 64, tokens).tolist()


@contextmanager
def both(
    folder: Path, kind: str, flash: int
) -> Iterator[tuple[Any, Any, Session, Llama, Prompts, Session]]:
    """Yield transformers and llama.cpp with the same weights, and their sessions."""
    network, file = made(folder, kind, HEADS)
    llama = Llama(file, flash)
    own = Prompts(llama.context, num_blocks=16, block_size=8)
    other = adapter.Prompts(network, num_blocks=16, layer_name="model.layers.{}.self_attn.attn")
    with FakeNixl(), side("t", other) as teacher, side("l", own) as student:
        llama.fill(own, GARBAGE)  # NaN would also reach the answer of llama.cpp alone.
        yield network, other, teacher, llama, own, student
    llama.close()


# Flash attention of llama.cpp rounds keys and values to float16, so it differs by this much.
CLOSE = {0: 1e-5, 1: 3e-2}


@pytest.mark.parametrize(("kind", "flash"), KINDS)
def test_llama_and_transformers_answer_alike_after_a_load(
    tmp_path: Path, kind: str, flash: int
) -> None:
    found, prompt = libraries(), prompt_of(37)
    with both(tmp_path, kind, flash) as (network, other, teacher, llama, own, student):
        cache = found.transformers.DynamicCache(config=network.config)
        tokens, expected = generated(stepper(network, cache), prompt)
        alone = generated(llama.step, prompt)
        assert tokens == alone[0]
        assert abs(expected - alone[1]).max() < CLOSE[flash]

        ticket = own.hold(student, "r", prompt, {"first_token": tokens[0]})
        cache = found.transformers.DynamicCache(config=network.config)
        read = PrefillTicket.from_params(ticket.to_params())
        other.load(teacher, read, found.torch.tensor(prompt), cache)
        got = generated(stepper(network, cache), prompt[-1:])
        assert tokens == got[0]
        assert abs(got[1] - expected).max() < CLOSE[flash]
        assert abs(got[1] - alone[1]).max() < CLOSE[flash]

        llama.forget()
        ticket = other.hold(teacher, "r", prompt)
        assert len(prompt) - 1 == own.load(student, ticket, prompt)
        got = generated(llama.step, prompt[-1:])
        assert tokens == got[0]
        assert abs(got[1] - expected).max() < CLOSE[flash]
        assert abs(got[1] - alone[1]).max() < CLOSE[flash]


@pytest.mark.parametrize(("kind", "same"), [("llama", False), ("qwen3", True)])
def test_llama_answers_differently_if_no_side_states_the_meaning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, same: bool
) -> None:
    """Qwen3 has halves on both sides, so its bytes mean the same."""
    libraries()

    def silent(specs: list[Any]) -> list[Any]:
        return [attrs.evolve(spec, key_content=None) for spec in specs]

    of_layers, probe, prompt = adapter.layer_specs, Prompts._probe, prompt_of(37)
    monkeypatch.setattr(adapter, "layer_specs", lambda *given: silent(of_layers(*given)))
    monkeypatch.setattr(Prompts, "_probe", lambda *given: silent(probe(*given)))
    with both(tmp_path, kind, 0) as (_, other, teacher, llama, own, student):
        alone = generated(llama.step, prompt)[1]
        llama.forget()
        ticket = other.hold(teacher, "r", prompt)
        own.load(student, ticket, prompt)
        got = generated(llama.step, prompt[-1:])[1]
    assert same == (abs(got - alone)[0].max() < 1e-5)
    assert same or abs(got - alone)[0].max() > 0.1


def test_prompts_refuse_a_quantised_cache(tmp_path: Path) -> None:
    libraries()
    fields = SMALL | {"head_dim": 32}
    llama = Llama(made(tmp_path, "llama", fields)[1], 1, 8)  # GGML_TYPE_Q8_0
    with pytest.raises(SpecError) as caught:
        Prompts(llama.context, num_blocks=4)
    assert ("state.type_k", 8) == (caught.value.field, caught.value.value)
    llama.close()


@pytest.mark.parametrize(("kind", "dtype"), [(1, "float16"), (30, "bfloat16")])
def test_probe_finds_the_meaning_of_rounded_keys(tmp_path: Path, kind: int, dtype: str) -> None:
    libraries()
    for name, (order, normalized) in ORDERS.items():
        llama = Llama(made(tmp_path, name, HEADS)[1], 1, kind)
        (group,) = Prompts(llama.context, num_blocks=4).engine.groups
        content = group.spec.key_content
        assert (dtype, order, normalized) == (group.spec.dtype, content.rotary, content.normalized)
        llama.close()


def record(folder: Path) -> None:
    """Record the states that the tests play back."""
    found, token, states = dict[str, Any](), Prompts._token, list[Any]()
    Prompts._token = lambda *given: states.append(token(*given)) or states[-1]
    for kind, flash in KINDS:
        llama = Llama(made(folder, kind, SMALL)[1], flash)
        prompts = Prompts(llama.context, num_blocks=4)
        llama.step(PROMPT)
        found[f"{kind}-{flash}-probe"] = np.array(states)
        found[f"{kind}-{flash}-prompt"] = prompts._state()
        states.clear()
        llama.close()
    np.savez_compressed(STATES, **found)


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        record(Path(scratch))
