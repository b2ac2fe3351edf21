"""Engines of SGLang with one manager in each rank. Sessions, NIXL and memory are real.

Only SGLang's scheduler is imitated: its queues, its requests and its metadata buffers.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import sglang_like as like

from kvspec.adapters.sglang.backend import Manager as OwnManager
from kvspec.adapters.sglang.describing import ONLY, Surroundings
from kvspec.adapters.sglang.receiving import Receiver
from kvspec.adapters.sglang.sending import Sender
from kvspec.adapters.sglang.tickets import TicketServer

HEADS, SIZE, LAYERS = 2, 8, 2


class Module:
    """A module with *children* and other attributes."""

    def __init__(self, children: dict[str, Any] | None = None, **attributes: Any) -> None:
        self._children = children or {}
        vars(self).update(self._children | attributes)

    def named_children(self) -> list[tuple[str, Any]]:
        """Return the children, as torch does."""
        return list(self._children.items())

    def named_modules(self, name: str = "") -> Iterator[tuple[str, Any]]:
        """Yield this module and all below, as torch does."""
        yield name, self
        for child_name, child in self._children.items():
            yield from child.named_modules(f"{name}.{child_name}")


class RadixAttention(Module):
    """SGLang's attention layer."""


class Indexer(Module):
    """SGLang's module that chooses tokens. *fused*: without the Hadamard product."""

    def __init__(self, *, fused: bool) -> None:
        super().__init__(use_dsa_indexer_fusion=fused, use_aiter_fused_fp8_writer=False)


class Exaone4Attention(Module):
    """The module around an attention layer. It may have layers without positions."""

    __module__ = "sglang.srt.models.exaone4"


def model(
    *,
    neox: bool = True,
    window: int = -1,
    layers: int = LAYERS,
    rope: bool = True,
    fused: Sequence[bool] = (),
    **rotary: Any,
) -> Module:
    """Return a model whose last layer has a window of *window* tokens before the query's own.

    *rope* is whether layers rotate their keys. *fused* has a value for each layer with an indexer.
    """
    embedding = Module(**{"is_neox_style": neox, "rotary_dim": SIZE, "head_size": SIZE} | rotary)

    def layer(number: int) -> Module:
        before = window if number == layers - 1 else -1
        attention = RadixAttention(layer_id=number, sliding_window_size=before)
        children: dict[str, Any] = {"attn": attention, "rotary_emb": embedding}
        if number < len(fused):
            children["indexer"] = Indexer(fused=fused[number])
        return Module(
            {"self_attn": Exaone4Attention(children, sliding_window_pattern="LG", is_sliding=rope)}
        )

    return Module({str(number): layer(number) for number in range(layers)})


class Buffers:
    """SGLang's metadata buffers."""

    def __init__(self) -> None:
        for name in ("output_ids", "cached_tokens", "output_token_logprobs_idx", "bootstrap_room"):
            setattr(self, name, np.zeros((4, 16), np.int64))
        self.output_token_logprobs_val = np.zeros((4, 16))
        self.output_top_logprobs_val = np.zeros((4, 128))
        self.output_top_logprobs_idx = np.zeros((4, 128), np.int64)


# SGLang's names of the settings of sampling, with values for the most probable token.
SAMPLING = {
    "temperature": 1.0,
    "top_k": 1,
    "top_p": 1.0,
    "min_p": 0.0,
    "sampling_seed": None,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "min_new_tokens": 0,
    "logit_bias": None,
    "stop_token_ids": None,
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "custom_params": None,
    "watermark": None,
    "ebnf_full_assistant": False,
}


def request(tokens: list[int], *, top: int | None = None, first: int = 5, **sampling: Any) -> Any:
    """Return a request whose prompt is *tokens*. A prefill engine has sampled *first*."""
    values = [-0.5 - place for place in range(top or 0)]
    logprob = SimpleNamespace(
        top_logprobs_num=top or 0,
        output_token_logprobs_val=[-0.5],
        output_token_logprobs_idx=[first],
        output_top_logprobs_val=[values] if top else [],
        output_top_logprobs_idx=[[first + place for place in range(top)]] if top else [],
    )
    return SimpleNamespace(
        origin_input_ids=tokens,
        output_ids=[first],
        return_logprob=top is not None,
        logprob=logprob,
        sampling_params=SimpleNamespace(**SAMPLING | sampling),
        vocab_size=1000,
    )


def settings(port: int = 1, **changes: Any) -> Any:
    """Return SGLang's settings, all of which are supported unless *changes* has others."""
    own = {"host": "127.0.0.1", "disaggregation_bootstrap_port": port, "model_path": "m"}
    return SimpleNamespace(**{name: values[0] for name, values in ONLY.items()} | own | changes)


class World:
    """The ranks of one engine, each in a thread, and their gathers."""

    def __init__(self, size: int) -> None:
        self._barrier, self._values = threading.Barrier(size), dict[int, Any]()

    def gather(self, rank: int, value: Any) -> list[Any]:
        """Return the values of all ranks."""
        self._values[rank] = value
        self._barrier.wait(20)
        values = [self._values[each] for each in sorted(self._values)]
        self._barrier.wait(20)
        return values


def surroundings(world: World, rank: int, tp_size: int, page: int, **changes: Any) -> Surroundings:
    """Return the objects of one rank. *changes* may have a function that makes its pool."""
    local = HEADS // tp_size
    if callable(changes.get("pool")):
        changes["pool"] = changes["pool"](tp_size, page)
    pool = like.MHATokenToKVPool(64, local, SIZE, page_size=page, dtype="float32", layer_num=LAYERS)
    fields: dict[str, Any] = {
        "pool": pool,
        "draft_pool": None,
        "model": model(),
        "kv_heads": HEADS,
        "state_types": (),
        "tp_rank": rank,
        "tp_size": tp_size,
        "decode_radix_cache": False,
        "gather": lambda value: world.gather(rank, value),
        "buffers": Buffers(),
        "releases": None,
        "weight_version": lambda: "default",
        "labels": None,
    }
    return Surroundings(**fields | changes)


class Engine:
    """The managers of all ranks of one engine."""

    def __init__(self, tp_size: int, page: int, port: int, **changes: Any) -> None:
        world, mode = World(tp_size), SimpleNamespace(value="decode")

        def start(rank: int) -> OwnManager:
            class Manager(OwnManager):
                def surroundings(self, *_: Any) -> Surroundings:
                    return surroundings(world, rank, tp_size, page, **changes)

            return Manager(SimpleNamespace(), mode, settings(port))

        with ThreadPoolExecutor(tp_size) as threads:
            self.ranks = list(threads.map(start, range(tp_size)))
        self.page = page

    def fill(self, pages: list[int], tokens: int, seed: int) -> None:
        """Write values that depend on layer, head and token."""
        for tensor, values in self.contents(pages, tokens, seed):
            tensor[:] = values

    def check(self, pages: list[int], tokens: int, seed: int, first: int = 0) -> None:
        """Compare the tokens from *first* on with the values of `fill`."""
        for tensor, values in self.contents(pages, tokens, seed):
            np.testing.assert_array_equal(tensor[first:tokens], values[first:tokens])

    def contents(self, pages: list[int], tokens: int, seed: int) -> Iterator[tuple[Any, Any]]:
        """Yield views of the slots of each layer, part and rank, with the model's values."""
        slots = like.pages_to_slots(pages, self.page, tokens)
        for rank, manager in enumerate(self.ranks):
            pool, local = manager.around.pool, HEADS // len(self.ranks)
            for number, buffers in enumerate((pool.k_buffer, pool.v_buffer)):
                for layer, buffer in enumerate(buffers):
                    random = np.random.default_rng((seed, number, layer))
                    values = random.random((tokens, HEADS, SIZE), np.float32)
                    yield _View(buffer, slots), values[:, rank * local : (rank + 1) * local]

    def close(self) -> None:
        """Close all sessions."""
        for manager in self.ranks:
            manager.close()


class _View:
    """The rows *slots* of a buffer."""

    def __init__(self, buffer: Any, slots: Any) -> None:
        self._buffer, self._slots = buffer, slots

    def __setitem__(self, key: slice, values: Any) -> None:
        self._buffer[self._slots[key]] = values

    def __getitem__(self, key: slice) -> Any:
        return self._buffer[self._slots[key]]


@contextlib.contextmanager
def pair(
    producer: tuple[int, int], consumer: tuple[int, int], **changes: Any
) -> Iterator[tuple[Engine, Engine, TicketServer]]:
    """Start two engines, each of (TP size, page size), and a server for their tickets."""
    with contextlib.ExitStack() as stack:
        server = TicketServer("127.0.0.1", 0)
        stack.callback(server.close)
        port = int(server.address.rpartition(":")[2])
        engines = []
        for tp_size, page in (producer, consumer):
            engines.append(Engine(tp_size, page, port, **changes))
            stack.callback(engines[-1].close)
        yield engines[0], engines[1], server


def senders(engine: Engine, address: str, room: int, asked: Any) -> list[Sender]:
    """Create the senders of a request on all ranks."""
    made = [Sender(manager, address, room) for manager in engine.ranks]
    for sender in made:
        sender.request = asked
    return made


def receivers(engine: Engine, address: str, room: int, asked: Any) -> list[Receiver]:
    """Create the receivers of a request on all ranks."""
    made = [Receiver(manager, address, room) for manager in engine.ranks]
    for receiver in made:
        receiver.request = asked
        receiver.init(0)
    return made


def pages_of(engine: Engine, count: int) -> list[int]:
    """Return pages for *count* tokens, in an order that is not ascending."""
    number = -(-count // engine.page)
    return [1 + place for place in range(number)][::-1]


def lowest(transfers: Any) -> int:
    """Return the state of the engine: the lowest one of its ranks."""
    return min(transfer.poll() for transfer in transfers)


def until(state: int, transfers: Any, seconds: float = 20.0) -> None:
    """Poll until the engine has *state*. Fail if it does not come."""
    wait(lambda: lowest(transfers) == state, seconds)


def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Wait until *condition* is true."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not happen in time"
        time.sleep(0.002)
